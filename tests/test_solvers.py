"""Solver steps against golden/sampler.npz in float64, and what no history means."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddrl_jax import EDMChurn

GOLDEN = np.load(pathlib.Path(__file__).parent / "golden" / "sampler.npz")
TOLERANCE = dict(rtol=0, atol=1e-11)


def denoise(params, x, sigma, cond):
    scale = jnp.sqrt(1 + sigma**2).reshape(-1, *[1] * (x.ndim - 1))
    return jnp.tanh(jnp.einsum("dc,bc...->bd...", params, x) / scale)


def maybe_jit(jit, f):
    return jax.jit(f) if jit else f


@pytest.mark.parametrize("jit", [False, True])
def test_2ab_first_and_second_order(jit):
    g = GOLDEN
    with jax.enable_x64(True):
        f = maybe_jit(jit, lambda *a: EDMChurn().mean_std(*a, num_steps=20)[0])
        first = f(g["step/x"], g["step/sigma"], g["step/sigma_next"], g["step/x0"])
        np.testing.assert_allclose(first, g["step/2ab_first"], **TOLERANCE)
        args = [g[f"step/{k}"] for k in ("x", "sigma", "sigma_next", "x0", "prev_x0", "prev_sigma")]
        np.testing.assert_allclose(f(*args), g["step/2ab"], **TOLERANCE)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("solver", ["1euler", "2mid"])
def test_runge_kutta(solver, jit):
    g = GOLDEN
    with jax.enable_x64(True):
        process = EDMChurn(solver=solver)

        def step(A, x, sigma, sigma_next):
            x0_fn = lambda x, sigma: denoise(A, x, sigma, None)  # noqa: E731
            return process.mean_std(x, sigma, sigma_next, x0_fn(x, sigma), num_steps=20, x0_fn=x0_fn)[0]

        mean = maybe_jit(jit, step)(
            g["net/A"], jnp.asarray(g["step/x"]), jnp.asarray(g["step/sigma"]), g["step/sigma_next"]
        )
        np.testing.assert_allclose(mean, g[f"rk/{solver}"], **TOLERANCE)


def test_2mid_without_x0_fn_is_an_error():
    with pytest.raises(ValueError, match="x0_fn"):
        EDMChurn(solver="2mid").mean_std(jnp.ones((2, 3)), 2.0, 1.0, jnp.ones((2, 3)), num_steps=4)


def test_2mid_hands_x0_fn_a_level_per_sample():
    seen = []

    def x0_fn(x, sigma):
        seen.append(sigma)
        return x

    EDMChurn(solver="2mid").mean_std(jnp.ones((2, 3)), 4.0, 1.0, jnp.ones((2, 3)), num_steps=4, x0_fn=x0_fn)
    np.testing.assert_allclose(seen[0], [2.0, 2.0])  # the geometric mean


@pytest.mark.parametrize("sigma_shape", [(), (3,)])
@pytest.mark.parametrize("jit", [False, True])
def test_no_history_is_the_euler_step_in_every_spelling_with_equal_finite_gradients(sigma_shape, jit):
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        x, x0, junk, cotangent = (jnp.asarray(rng.normal(size=(3, 4, 2))) for _ in range(4))
        sigma, sigma_next = jnp.full(sigma_shape, 3.0), jnp.full(sigma_shape, 2.0)
        process = EDMChurn()

        def value(x, sigma, sigma_next, x0, prev_x0, prev_sigma, process=process):
            mean, _ = process.mean_std(x, sigma, sigma_next, x0, prev_x0, prev_sigma, num_steps=20)
            return jnp.sum(mean * cotangent), mean

        def value_and_grads(prev_x0, prev_sigma, process=process):
            # Gradients to whatever of the six arguments there is.
            f = lambda args, p: value(*args, *p, process=process)  # noqa: E731
            g = maybe_jit(jit, jax.value_and_grad(f, argnums=(0, 1), has_aux=True))
            (_, mean), grads = g((x, sigma, sigma_next, x0), (prev_x0, prev_sigma))
            return mean, grads[0], jax.tree.leaves(grads[1])

        nan = jnp.full_like(x, jnp.nan)
        spelled = {
            "none": (None, None),
            "inf and zero": (jnp.zeros_like(x), jnp.full(sigma_shape, jnp.inf)),
            "nan and nan": (nan, jnp.full(sigma_shape, jnp.nan)),
            "minus inf and junk": (junk, jnp.full(sigma_shape, -jnp.inf)),
            "half none": (None, jnp.full(sigma_shape, 5.0)),
        }
        expected, expected_grads, _ = value_and_grads(None, None, EDMChurn(solver="1euler"))
        first = None
        for name, history in spelled.items():
            mean, grads, history_grads = value_and_grads(*history)
            np.testing.assert_allclose(mean, expected, rtol=1e-13, err_msg=name)
            for ours, euler in zip(grads, expected_grads, strict=True):
                np.testing.assert_allclose(ours, euler, rtol=1e-12, atol=1e-13, err_msg=name)
            for grad in history_grads:
                np.testing.assert_array_equal(grad, np.zeros_like(grad), err_msg=name)
            first = first or (mean, grads)
            if not jit:
                np.testing.assert_array_equal(mean, first[0], err_msg=name)
                for ours, none in zip(grads, first[1], strict=True):
                    np.testing.assert_array_equal(ours, none, err_msg=name)


def test_2ab_history_may_differ_from_sample_to_sample():
    g = GOLDEN
    with jax.enable_x64(True):
        args = [np.array(g[f"step/{k}"]) for k in ("x", "sigma", "sigma_next", "x0", "prev_x0", "prev_sigma")]
        args[5][1] = np.inf
        mean, _ = EDMChurn().mean_std(*args, num_steps=20)
        np.testing.assert_allclose(mean[1], g["step/2ab_first"][1], **TOLERANCE)
        np.testing.assert_allclose(mean[::2], g["step/2ab"][::2], **TOLERANCE)


def test_2ab_is_exact_for_a_denoiser_linear_in_log_sigma():
    # The order of the method in closed form: x0 = a + b l is integrated without error.
    with jax.enable_x64(True):
        a, b, x, p, s, t = 0.3, -0.7, 1.1, 5.0, 3.0, 1.7
        x0_at = lambda sigma: a + b * -np.log(sigma)  # noqa: E731
        solution = t / s * (x - x0_at(s) + b) + x0_at(t) - b  # of dx/dl = x0(l) - x
        for solver in ("2ab", "2mid"):
            mean, _ = EDMChurn(solver=solver).mean_std(
                jnp.full((1, 1), x),
                s,
                t,
                jnp.full((1, 1), x0_at(s)),
                jnp.full((1, 1), x0_at(p)),
                p,
                num_steps=3,
                x0_fn=lambda x, m: jnp.full_like(x, a) - b * jnp.log(m)[:, None],
            )
            np.testing.assert_allclose(mean, solution, rtol=1e-13)


def test_float32_stays_float32_under_x64_and_close():
    g = GOLDEN
    args = [g[f"step/{k}"] for k in ("x", "sigma", "sigma_next", "x0", "prev_x0", "prev_sigma")]
    with jax.enable_x64(True):
        mean, std = EDMChurn().mean_std(*[jnp.asarray(a, jnp.float32) for a in args], num_steps=20)
        assert mean.dtype == std.dtype == jnp.float32
    np.testing.assert_allclose(mean, g["step/2ab"], rtol=0, atol=2e-5 * np.abs(g["step/x"]).max() / 50)
