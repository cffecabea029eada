"""DiffusionNFT in closed form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddrl_jax import EDMChurn, FlowSDE, diffusion_loss, group_advantages, nft_loss


def constant(params, x, sigma, cond):
    return jnp.broadcast_to(params, x.shape)


def affine(params, x, sigma, cond):
    return params[0] * x + params[1] * sigma[:, None]


RNG = np.random.default_rng(0)
X0 = RNG.normal(size=(6, 2))
R = np.array([0.0, 0.2, 0.5, 0.7, 1.0, 0.9])
DRAWS = dict(sigma=RNG.uniform(0.2, 0.9, size=(3, 6)), noise=RNG.normal(size=(3, 6, 2)))


@pytest.mark.parametrize("process", [EDMChurn(), FlowSDE()])
@pytest.mark.parametrize("beta", [1.0, 0.3])
@pytest.mark.parametrize("jit", [False, True])
def test_the_minimum_is_where_the_paper_says(process, beta, jit):
    # With one x0 prediction for every state the minimiser is old + E[w (2r-1)(x0 - old)] / (beta E[w]).
    with jax.enable_x64(True):
        f = lambda p: nft_loss(  # noqa: E731
            p, X0, R, None, None, denoise=constant, process=process, old_params=jnp.array([0.1, -0.2]), beta=beta,
            adaptive_weight=False, **DRAWS,
        )[0]  # fmt: skip
        f = jax.jit(f) if jit else f
        weight = np.asarray(process.loss_weight(DRAWS["sigma"]))[..., None]
        old = np.array([0.1, -0.2])
        step = (weight * ((2 * R - 1)[:, None] * (X0 - old))).mean((0, 1)) / (beta * weight.mean())
        gradient = jax.grad(f)(jnp.asarray(old + step))
        np.testing.assert_allclose(gradient, 0.0, atol=1e-12 * weight.max())
        assert np.abs(jax.grad(f)(jnp.asarray(old))).max() > 1e-3


def test_all_good_samples_make_it_the_diffusion_loss_and_all_bad_ones_its_mirror():
    with jax.enable_x64(True):
        new, old = jnp.array([0.4, 0.1]), jnp.array([0.5, -0.3])
        f = lambda r: nft_loss(  # noqa: E731
            new, X0, np.full(6, r), None, None, denoise=affine, process=FlowSDE(), old_params=old,
            adaptive_weight=False, **DRAWS,
        )  # fmt: skip
        loss_of = lambda p: np.mean(  # noqa: E731
            [
                diffusion_loss(p, X0, None, s, e, denoise=affine, process=FlowSDE())
                for s, e in zip(DRAWS["sigma"], DRAWS["noise"], strict=True)
            ]
        )
        np.testing.assert_allclose(f(1.0)[0], loss_of(new), rtol=1e-12)
        np.testing.assert_allclose(f(0.0)[0], loss_of(2 * old - new), rtol=1e-12)
        np.testing.assert_allclose(f(0.3)[0], 0.3 * loss_of(new) + 0.7 * loss_of(2 * old - new), rtol=1e-12)


def test_adaptive_weight_is_the_stopped_mean_absolute_error():
    with jax.enable_x64(True):
        new, old = jnp.array([0.3, 0.1]), jnp.array([0.0, 0.0])
        settings = dict(denoise=constant, process=FlowSDE(), old_params=old, **DRAWS)
        f = lambda p: nft_loss(p, X0, np.ones(6), None, None, **settings)[0]  # noqa: E731
        error = np.asarray(new) - X0
        np.testing.assert_allclose(f(new), ((error**2).mean(1) / np.abs(error).mean(1)).mean(), rtol=1e-12)
        np.testing.assert_allclose(jax.grad(f)(new), (error / np.abs(error).mean(1, keepdims=True)).mean(0), rtol=1e-12)


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("beta", [1.0, 0.1])
def test_under_a_flow_it_is_the_papers_velocity_form(beta, adaptive):
    # v+ = (1-beta) v_old + beta v, v- = (1+beta) v_old - beta v, each against v = e - x0; the adaptive weight (the
    # authors' code) is on the x0 that belongs to each.
    t, e = DRAWS["sigma"][..., None], DRAWS["noise"]
    xt = (1 - t) * X0 + t * e

    def velocity(p):
        return (xt - (p[0] * xt + p[1] * t)) / t

    def by_hand(p, old):
        v, v_old = velocity(p), velocity(old)
        out = 0.0
        for r, implicit in (
            (R, (1 - beta) * v_old + beta * v),
            (1 - R, (1 + beta) * v_old - beta * v),
        ):
            if adaptive:
                difference = (xt - t * implicit) - X0
                weight = jax.lax.stop_gradient(jnp.maximum(jnp.abs(difference).mean(-1), 1e-5))
                out += (r * (difference**2).mean(-1) / weight).mean()
            else:
                out += (r * ((implicit - (e - X0)) ** 2).mean(-1)).mean()
        return out

    with jax.enable_x64(True):
        new, old, ref = jnp.array([0.4, 0.1]), jnp.array([0.5, -0.3]), jnp.array([0.45, 0.2])
        f = lambda p: nft_loss(  # noqa: E731
            p, X0, R, None, None, denoise=affine, process=FlowSDE(), old_params=old, ref_params=ref, beta=beta,
            kl_beta=0.3, adaptive_weight=adaptive, **DRAWS,
        )[0]  # fmt: skip
        g = lambda p: by_hand(p, old) + 0.3 * ((velocity(p) - velocity(ref)) ** 2).mean()  # noqa: E731
        np.testing.assert_allclose(f(new), g(new), rtol=1e-12)
        np.testing.assert_allclose(jax.grad(f)(new), jax.grad(g)(new), rtol=1e-11)
        assert np.abs(jax.grad(f)(new)).min() > 1e-3


def test_raw_rewards_reference_and_invalid_members():
    with jax.enable_x64(True):
        new, old, ref = jnp.array([0.4, 0.1]), jnp.array([0.5, -0.3]), jnp.array([0.2, 0.2])
        raw = np.array([1.0, 5.0, 2.0, 0.0, -1.0, 4.0])
        common = dict(denoise=affine, process=FlowSDE(), old_params=old, **DRAWS)
        A = np.asarray(group_advantages(raw, 3))
        by_hand = nft_loss(new, X0, 0.5 + 0.5 * np.clip(A / 2.0, -1, 1), None, None, **common)[0]
        np.testing.assert_allclose(
            nft_loss(new, X0, raw, None, None, group_size=3, adv_clip=2.0, **common)[0], by_hand, rtol=1e-12
        )
        loss, metrics = nft_loss(new, X0, R, None, None, ref_params=ref, kl_beta=0.1, **common)
        x = np.asarray([FlowSDE().corrupt(X0, s, e) for s, e in zip(DRAWS["sigma"], DRAWS["noise"], strict=True)])
        difference = (new[0] - ref[0]) * x + (new[1] - ref[1]) * DRAWS["sigma"][..., None]
        velocity = (difference / DRAWS["sigma"][..., None]) ** 2
        np.testing.assert_allclose(metrics["kl_loss"], velocity.mean(), rtol=1e-12)
        np.testing.assert_allclose(loss, metrics["policy_loss"] + 0.1 * metrics["kl_loss"], rtol=1e-12)
        masked, weighted = np.where(np.arange(6) == 2, np.nan, R), (np.arange(6) != 2).astype(float)
        invalid = nft_loss(new, X0, masked, None, None, **common)
        np.testing.assert_allclose(
            invalid[0], nft_loss(new, X0, R, None, None, sample_weight=weighted, **common)[0], rtol=1e-12
        )
        np.testing.assert_allclose(invalid[0], (invalid[1]["parts"]["policy"] * weighted).sum() / 18, rtol=1e-12)


def test_draws_and_errors():
    f = lambda rng, **kw: nft_loss(  # noqa: E731
        jnp.zeros(2), jnp.asarray(X0, jnp.float32), R, None, rng, denoise=affine, process=EDMChurn(),
        old_params=jnp.zeros(2), **kw,
    )  # fmt: skip
    loss, metrics = f(jax.random.key(0), draws=4)
    assert metrics["parts"]["policy"].shape == (4, 6) and np.isfinite(loss)
    for kw, word in ((dict(beta=0.0), "beta=0.0"), (dict(kl_beta=1.0), "ref_params=None"), ({}, "rng=None")):
        with pytest.raises(ValueError, match=word):
            f(None if not kw else jax.random.key(0), **kw)


def test_rewards_and_weights_may_be_lists():
    f = lambda rewards, weight: nft_loss(  # noqa: E731
        jnp.ones(2), jnp.asarray(X0, jnp.float32), rewards, None, jax.random.key(0), denoise=affine, process=EDMChurn(),
        old_params=jnp.zeros(2), sample_weight=weight,
    )[0]  # fmt: skip
    weight = np.array([1.0, 0.0, 1.0, 1.0, 0.5, 1.0])
    expected = f(jnp.asarray(R), jnp.asarray(weight))
    assert f(R, weight) == f(R.tolist(), weight.tolist()) == expected
    with pytest.raises(AssertionError):
        f(R.tolist()[:5], weight)


def test_a_rollout_that_went_non_finite_leaves_the_gradient_of_the_others():
    with jax.enable_x64(True):
        old = jnp.array([0.5, -0.3])

        def gradient(x0, rewards):
            f = lambda p: nft_loss(  # noqa: E731
                p, x0, rewards, None, None, denoise=affine, process=FlowSDE(), old_params=old, **DRAWS
            )[0]  # fmt: skip
            return jax.grad(f)(jnp.array([0.4, 0.1]))

        broken, lost = X0.copy(), R.copy()
        broken[2], lost[2] = np.nan, np.nan
        np.testing.assert_allclose(gradient(broken, lost), gradient(X0, lost), rtol=1e-12)
        assert np.isfinite(gradient(broken, lost)).all()
