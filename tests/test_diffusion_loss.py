"""diffusion_loss by hand, and its gradient against finite differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddrl_jax import DanceSDE, EDMChurn, FlowSDE, diffusion_loss


def denoise(params, x, sigma, cond):
    return params * x + (0.0 if cond is None else cond)


@pytest.mark.parametrize("jit", [False, True])
def test_by_hand(jit):
    x0, e, sigma = jnp.array([[1.0, 2.0], [0.0, -1.0]]), jnp.array([[1.0, -1.0], [2.0, 0.5]]), jnp.array([2.0, 0.5])
    f = lambda p: diffusion_loss(p, x0, None, sigma, e, denoise=denoise, process=EDMChurn())  # noqa: E731
    # x = [[3, 0], [1, -.75]], x0 predicted [[1.5, 0], [.5, -.375]], squared errors [[.25, 4], [.25, .390625]].
    expected = [1.25 * 2.125, 5.0 * 0.3203125]
    np.testing.assert_allclose((jax.jit(f) if jit else f)(0.5), expected, rtol=1e-6)
    for process in (FlowSDE(), DanceSDE()):
        loss = diffusion_loss(0.5, x0, None, 0.5 * sigma, e, denoise=denoise, process=process, weight=jnp.ones(2))
        x = np.array([[1.0, -1.0], [0.5, -0.625]])
        np.testing.assert_allclose(loss, ((0.5 * x - x0) ** 2).mean(1), rtol=1e-6)
        weighted = diffusion_loss(0.5, x0, None, 0.5 * sigma, e, denoise=denoise, process=process)
        np.testing.assert_allclose(weighted, loss / (0.5 * sigma) ** 2, rtol=1e-6)


def test_a_level_a_frame():
    rng = np.random.default_rng(0)
    x0, e = rng.normal(size=(2, 2, 3, 1, 2)), rng.normal(size=(2, 2, 3, 1, 2))
    sigma = rng.uniform(0.5, 2.0, size=(2, 3))
    with jax.enable_x64(True):
        loss = diffusion_loss(0.7, x0, None, sigma, e, denoise=denoise, process=EDMChurn())
        level = sigma[:, None, :, None, None]
        expected = ((level**2 + 1) / level**2 * (0.7 * (x0 + level * e) - x0) ** 2).mean((1, 2, 3, 4))
        np.testing.assert_allclose(loss, expected, rtol=1e-12)


def test_the_perfect_denoiser_of_gaussian_data_has_the_closed_form_loss():
    # x0 ~ N(0, 1): E[x0|x] = x/(1+sigma^2), error sigma^2/(1+sigma^2), so the weighted loss is 1 at every level.
    key = jax.random.split(jax.random.key(0))
    x0, e = (jax.random.normal(k, (4, 50_000)) for k in key)
    sigma = jnp.array([0.1, 1.0, 10.0, 200.0])
    perfect = lambda params, x, sigma, cond: x / (1 + sigma[:, None] ** 2)  # noqa: E731
    loss = diffusion_loss(None, x0, None, sigma, e, denoise=perfect, process=EDMChurn())
    np.testing.assert_allclose(loss, 1.0, atol=0.04)


@pytest.mark.parametrize("process", [EDMChurn(), FlowSDE(), DanceSDE()])
def test_gradient_against_finite_differences(process):
    rng = np.random.default_rng(1)
    with jax.enable_x64(True):
        x0, e = rng.normal(size=(3, 4)), rng.normal(size=(3, 4))
        sigma = np.array([0.3, 0.5, 0.9])
        net = lambda p, x, s, c: jnp.tanh(p[0] * x + p[1] * s[:, None])  # noqa: E731
        f = lambda p: diffusion_loss(p, x0, None, sigma, e, denoise=net, process=process).mean()  # noqa: E731
        p, h = np.array([0.7, -0.2]), 1e-6
        numeric = [(f(p + h * d) - f(p - h * d)) / (2 * h) for d in np.eye(2)]
        np.testing.assert_allclose(jax.grad(f)(p), numeric, rtol=1e-7)


def test_low_precision_samples_are_compared_in_float32():
    x0 = jnp.ones((2, 3), jnp.bfloat16)
    loss = diffusion_loss(0.5, x0, None, jnp.ones(2), jnp.zeros_like(x0), denoise=denoise, process=EDMChurn())
    assert loss.dtype == jnp.float32 and loss.shape == (2,)
