"""loss_fn: golden cases in float64, gradients, weights, data levels and draws, condition dropout, objectives."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddrl_jax import (
    DanceSDE,
    DataBatch,
    EDMChurn,
    FlowSDE,
    Objective,
    Trajectory,
    dance_grpo,
    ddrl,
    diffusion_loss,
    flow_grpo,
    group_advantages,
    loss_fn,
    sample,
)
from ddrl_jax.diffusion.sampler import step_mean
from ddrl_jax.rl.ratio import log_ratio

GOLDEN = np.load(pathlib.Path(__file__).parent / "golden" / "loss.npz")
CASES = ["ddrl_full", "ddrl_reduced", "ddrl_onpolicy", "ddrl_exp_reward", "grpo_reverse_kl", "wide_clip"]


def net(params, x, sigma, cond):
    A, b = params
    scale = jnp.sqrt(1 + sigma**2).reshape(-1, *[1] * (x.ndim - 1))
    return jnp.tanh(jnp.einsum("dc,bc...->bd...", A, x) / scale + b.reshape(1, -1, *[1] * (x.ndim - 2)))


def toy(params, x, sigma, cond):
    sigma = sigma.reshape(-1, *[1] * (x.ndim - 1))
    return jnp.tanh(params["a"] * x / (1 + sigma) + params["b"]) + (0.0 if cond is None else cond)


def golden_case(name, keep_mean=True):
    g = {k[len(name) + 1 :]: GOLDEN[k] for k in GOLDEN.files if k.startswith(name + "/")}
    num_steps, clip, data_beta, kl_beta, rollout, first_only, exp, scale, churn = g["config"].tolist()
    process = EDMChurn(s_churn=churn)
    steps = g["train_on"]
    trajectory = Trajectory(
        x=g["traj/x"],
        x_next=g["traj/x_next"],
        mean_old=g["traj/mean_old"] if keep_mean else None,
        sigma=g["traj/sigma"],
        sigma_next=g["traj/sigma_next"],
        std=process.step_stds(int(num_steps))[steps],
        prev_x0=g["traj/prev_x0"],
        prev_sigma=g["traj/prev_sigma"],
        step=steps,
        init_noise=g["x_init_unit"],
        num_steps=int(num_steps),
    )
    objective = Objective(
        # The original divides its once-only data loss by |T| like everything else.
        data_beta=data_beta / (len(steps) if first_only else 1),
        kl_beta=kl_beta,
        clip_range=clip,
        loss_scale=scale,
        reward_transform="exp" if exp else "identity",
        data_levels="rollout" if rollout else "training",
    )
    draws = {}
    if not rollout:
        M = 1 if first_only else len(steps)
        draws = {"sigma": g["data_sigma"][:M], "noise": g["data_eps"][:M]}
    data = DataBatch(g["data_x0"], **draws) if data_beta else None
    ref_params = (g["A_ref"], g["b_old"]) if kl_beta else None
    f = functools.partial(loss_fn, denoise=net, process=process, objective=objective, ref_params=ref_params)
    return g, trajectory, data, f


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_golden(name, jit):
    with jax.enable_x64(True):
        g, trajectory, data, f = golden_case(name)
        both = jax.value_and_grad(lambda p: f(p, trajectory, g["advantages"], None, data, None), has_aux=True)
        both = jax.jit(both) if jit else both
        (loss, metrics), grads = both((g["A"], g["b"]))
        for ours, key in ((loss, "loss"), (metrics["loss"], "loss"), (grads[0], "grad_A"), (grads[1], "grad_b")):
            np.testing.assert_allclose(ours, g[key], rtol=0, atol=1e-9 * np.abs(g[key]).max(), err_msg=key)
        golden_parts = g["per_sample_step(policy,kl,data,log_ratio,std)"].transpose(2, 1, 0)
        for i, key in enumerate(("policy", "kl", "data", "log_ratio")):
            if key == "data" and data is None:
                assert not golden_parts[i].any()
                continue
            ours = np.asarray(metrics["parts"][key])
            expected = golden_parts[i, : len(ours)]
            atol = 1e-11 if key == "log_ratio" else 1e-9 * max(np.abs(expected).max(), 1e-30)
            np.testing.assert_allclose(ours, expected, rtol=0, atol=atol, err_msg=key)
            assert not golden_parts[i, len(ours) :].any()
        np.testing.assert_allclose(trajectory.std, golden_parts[4, :, 0], rtol=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_metrics_are_the_parts_means(name):
    with jax.enable_x64(True):
        g, trajectory, data, f = golden_case(name)
        loss, metrics = f((g["A"], g["b"]), trajectory, g["advantages"], None, data, None)
        parts, objective = metrics["parts"], f.keywords["objective"]
        ratio = np.exp(parts["log_ratio"])
        np.testing.assert_allclose(metrics["policy_loss"], parts["policy"].mean(), rtol=1e-12)
        np.testing.assert_allclose(metrics["kl_loss"], parts["kl"].mean(), rtol=1e-12)
        np.testing.assert_allclose(metrics["ratio_mean"], ratio.mean(), rtol=1e-12)
        np.testing.assert_allclose(metrics["ratio_max"], ratio.max(), rtol=1e-12)
        outside = np.abs(ratio - 1) > objective.clip_range
        np.testing.assert_allclose(metrics["clip_fraction"], outside.mean(), rtol=1e-12)
        assert name == "ddrl_onpolicy" or outside.any()
        data_loss = parts["data"].mean() if data else 0.0
        np.testing.assert_allclose(metrics["data_loss"], data_loss, rtol=1e-12)
        total = metrics["policy_loss"] + objective.kl_beta * metrics["kl_loss"] + objective.data_beta * data_loss
        np.testing.assert_allclose(loss, objective.loss_scale * total, rtol=1e-12)


def test_float32_agrees_with_golden_and_stays_float32_under_x64():
    with jax.enable_x64(True):
        g, trajectory, data, f = golden_case("ddrl_full")
        to32 = lambda tree: jax.tree.map(  # noqa: E731
            lambda a: jnp.asarray(a, jnp.float32 if np.issubdtype(a.dtype, np.floating) else a.dtype), tree
        )
        loss, metrics = f(to32((g["A"], g["b"])), to32(trajectory), to32(g["advantages"]), None, to32(data), None)
        assert {leaf.dtype for leaf in jax.tree.leaves((loss, metrics))} == {jnp.dtype("float32")}
    # At sigma 200 a mean rounded to float32 is off by 1e-5, the log ratio by 2e-4.
    np.testing.assert_allclose(loss, g["loss"], rtol=2e-4)


def test_the_float32_log_ratio_is_not_a_difference_of_two_squares():
    g = golden_case("ddrl_full")[0]
    old, x_next = (g[f"traj/{k}"][0].astype(np.float32) for k in ("mean_old", "x_next"))
    mean = (old + np.float32(1e-3) * np.sign(g["data_x0"])).astype(np.float32)
    exact = ((x_next - old.astype(np.float64)) ** 2 - (x_next - mean.astype(np.float64)) ** 2).mean((1, 2, 3, 4))
    squares = ((x_next - old) ** 2).mean((1, 2, 3, 4)) - ((x_next - mean) ** 2).mean((1, 2, 3, 4))
    ours = log_ratio(mean, old, x_next, np.float32(1.0))
    assert np.abs(ours - exact).max() < 1e-7
    assert np.abs(squares - exact).max() > 1e-5  # what the other formula would give


# Small levels: at sigma 200 a finite difference of a mean-square log ratio has no digits left.
SMALL = dict(sigma_min=0.1, sigma_max=5.0)
SOLVERS = ("2ab", "1euler", "2mid")


@pytest.mark.parametrize("process", [*(EDMChurn(solver=s, **SMALL) for s in SOLVERS), FlowSDE(), DanceSDE()])
@pytest.mark.parametrize("kind", ["mean_square", "gaussian", "gaussian_sum"])
def test_gradients_against_finite_differences(process, kind):
    with jax.enable_x64(True):
        params, ref = {"a": np.float64(0.7), "b": np.float64(-0.1)}, {"a": np.float64(0.6), "b": np.float64(0.1)}
        trajectory = rollout(process, jnp.float64, keep_mean=True)
        kl = {"mean_square": "mean_square", "gaussian": "flow_grpo", "gaussian_sum": "gaussian"}[kind]
        objective = Objective(data_beta=0.3, kl_beta=0.2, log_ratio=kind, kl=kl, clip_range=2e-3)
        data = DataBatch(trajectory.x_next[0], sigma=np.full((1, 3), 0.4), noise=trajectory.init_noise)
        f = jax.jit(
            lambda p: loss_fn(
                p, trajectory, np.array([1.0, -0.4, 0.2]), None, data, None, denoise=toy, process=process,
                objective=objective, ref_params=ref,
            )[0]
        )  # fmt: skip
        moved = jax.tree.map(lambda v: v + 1e-4, params)
        grads, h = jax.grad(f)(moved), 1e-7
        for key in params:
            up, down = ({**moved, key: moved[key] + s * h} for s in (1, -1))
            np.testing.assert_allclose(grads[key], (f(up) - f(down)) / (2 * h), rtol=2e-6, atol=1e-7)


@functools.lru_cache
def rollout(process, dtype=jnp.float32, *, keep_mean=False, record=(0, 2, 3), batch=3):
    params = {"a": np.asarray(0.7, dtype), "b": np.asarray(-0.1, dtype)}
    f = functools.partial(
        sample, denoise=toy, process=process, shape=(batch, 2), num_steps=5, record=record, keep_mean=keep_mean,
        dtype=dtype,
    )  # fmt: skip
    return jax.jit(f)(params, jax.random.key(1), None)[1]


PARAMS = {"a": jnp.float32(0.7), "b": jnp.float32(-0.1)}
ADVANTAGES = jnp.array([1.0, -0.4, 0.2])


def edm_loss(params, trajectory, advantages, cond, data, rng, objective, process=None, denoise=toy, **kwargs):
    return loss_fn(
        params, trajectory, advantages, cond, data, rng, denoise=denoise, process=process or EDMChurn(),
        objective=objective, **kwargs,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["mean_square", "gaussian", "gaussian_sum"])
def test_without_mean_old_the_ratio_is_exactly_1_and_the_gradient_unchanged(kind):
    with jax.enable_x64(True):
        with_mean = rollout(EDMChurn(), jnp.float64, keep_mean=True)
        without = dataclasses.replace(with_mean, mean_old=None)
        params = {"a": np.float64(0.7), "b": np.float64(-0.1)}
        f = jax.value_and_grad(
            lambda p, t: edm_loss(p, t, ADVANTAGES, None, None, None, Objective(log_ratio=kind)), has_aux=True
        )
        (loss, metrics), grads = f(params, without)
        (expected, _), expected_grads = f(params, with_mean)
        assert (metrics["parts"]["log_ratio"] == 0).all() and metrics["ratio_mean"] == metrics["ratio_max"] == 1.0
        assert metrics["clip_fraction"] == 0.0
        np.testing.assert_allclose(loss, expected, rtol=1e-9)
        for key in params:
            assert abs(grads[key]) > 1e-6
            np.testing.assert_allclose(grads[key], expected_grads[key], rtol=1e-9)


def test_rollout_and_replay_agree_in_float32():
    for process in (EDMChurn(), EDMChurn(solver="2mid"), FlowSDE(), DanceSDE()):
        trajectory = rollout(process, keep_mean=True)
        for k in range(3):
            at = trajectory.take_steps(k)
            mean, _ = step_mean(
                PARAMS, at.x, at.sigma, at.sigma_next, at.prev_x0, at.prev_sigma, None, denoise=toy, process=process,
                num_steps=5,
            )  # fmt: skip
            assert np.abs(mean - at.mean_old).max() <= 1e-5 * at.std  # DESIGN allows 1e-3
        objective = Objective(log_ratio="gaussian")
        metrics = edm_loss(PARAMS, trajectory, ADVANTAGES, None, None, None, objective, process)[1]
        assert abs(metrics["ratio_max"] - 1) < 1e-5 and metrics["clip_fraction"] == 0.0


@pytest.mark.parametrize(
    "history",
    [(None, None), (0.0, np.inf), (np.nan, np.nan)],
)
def test_the_first_steps_gradient_is_the_euler_steps_in_every_spelling(history):
    with jax.enable_x64(True):
        first = rollout(EDMChurn(), jnp.float64, keep_mean=True, record=(0,))
        euler = dataclasses.replace(first, prev_x0=None, prev_sigma=None)
        prev_x0, prev_sigma = history
        spelled = dataclasses.replace(
            first,
            prev_x0=None if prev_x0 is None else jnp.full_like(first.x, prev_x0),
            prev_sigma=None if prev_sigma is None else jnp.full((1,), prev_sigma),
        )
        params = {"a": np.float64(0.71), "b": np.float64(-0.1)}
        f = lambda p, t, process: edm_loss(p, t, ADVANTAGES, None, None, None, Objective(), process)[0]  # noqa: E731
        grads = jax.grad(f)(params, spelled, EDMChurn())
        expected = jax.grad(f)(params, euler, EDMChurn(solver="1euler"))
        for key in params:
            assert np.isfinite(grads[key])
            np.testing.assert_allclose(grads[key], expected[key], rtol=1e-11)


def test_sample_weight_keeps_the_denominator_and_parts_stay_unweighted():
    trajectory = rollout(EDMChurn(), keep_mean=True)
    moved = {"a": jnp.float32(0.72), "b": jnp.float32(-0.1)}
    weight = jnp.array([1.0, 0.0, 0.5])
    args = (moved, trajectory, ADVANTAGES, None, None, None, Objective(kl_beta=0.5))
    loss, metrics = edm_loss(*args, ref_params=PARAMS, sample_weight=weight)
    _, plain_metrics = edm_loss(*args, ref_params=PARAMS)
    for key in ("policy", "kl", "log_ratio"):
        np.testing.assert_array_equal(metrics["parts"][key], plain_metrics["parts"][key])
    policy, kl = metrics["parts"]["policy"], metrics["parts"]["kl"]
    np.testing.assert_allclose(metrics["policy_loss"], (policy * weight).sum() / 9, rtol=1e-6)
    np.testing.assert_allclose(metrics["kl_loss"], (kl * weight).sum() / 9, rtol=1e-6)
    np.testing.assert_allclose(loss, metrics["policy_loss"] + 0.5 * metrics["kl_loss"], rtol=1e-6)
    live = np.exp(metrics["parts"]["log_ratio"])[:, [0, 2]]
    np.testing.assert_allclose(metrics["ratio_mean"], live.mean(), rtol=1e-6)
    np.testing.assert_allclose(metrics["ratio_max"], live.max(), rtol=1e-6)


def test_a_nan_advantage_of_weight_0_is_nothing_and_of_weight_1_is_seen():
    trajectory = rollout(EDMChurn())
    advantages, weight = jnp.array([1.0, jnp.nan, 0.5]), jnp.array([1.0, 0.0, 1.0])
    f = lambda p, w: edm_loss(p, trajectory, advantages, None, None, None, Objective(), sample_weight=w)[0]  # noqa: E731
    assert np.isfinite(f(PARAMS, weight)) and np.isfinite(jax.grad(f)(PARAMS, weight)["a"])
    assert np.isnan(f(PARAMS, None))


def test_a_rollout_that_went_nan_has_no_influence_once_its_weight_is_0():
    trajectory = rollout(EDMChurn(), keep_mean=True)
    poison = lambda a: a.at[:, 1].set(jnp.nan)  # noqa: E731
    fields = ("x", "x_next", "mean_old", "prev_x0")
    poisoned = dataclasses.replace(trajectory, **{f: poison(getattr(trajectory, f)) for f in fields})
    moved, weight = {"a": jnp.float32(0.72), "b": jnp.float32(-0.1)}, jnp.array([1.0, 0.0, 1.0])
    f = jax.jit(
        jax.value_and_grad(
            lambda p, t, w: edm_loss(
                p, t, ADVANTAGES, None, None, None, Objective(kl_beta=1.0), ref_params=PARAMS, sample_weight=w
            )[0]
        )
    )
    for ours, theirs in zip(
        jax.tree.leaves(f(moved, poisoned, weight)), jax.tree.leaves(f(moved, trajectory, weight)), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    assert np.isnan(f(moved, poisoned, jnp.ones(3))[0])  # with weight it is seen


def test_dead_slots_of_a_traced_record_have_weight_0():
    f = jax.jit(
        lambda record: sample(
            PARAMS, jax.random.key(1), None, denoise=toy, process=EDMChurn(), shape=(3, 2), num_steps=5,
            record=record, keep_mean=True,
        )[1]
    )  # fmt: skip
    live, dead = f(jnp.array([0, 2])), f(jnp.array([0, 4, 2, 9]))
    moved = {"a": jnp.float32(0.72), "b": jnp.float32(-0.1)}
    for objective in (
        Objective(),
        dance_grpo(),
        flow_grpo(),
        Objective(log_ratio="gaussian_sum", kl="gaussian", kl_beta=1),
    ):
        g = jax.jit(
            jax.value_and_grad(
                lambda p, t, objective=objective: edm_loss(
                    p, t, ADVANTAGES, None, None, None, objective, ref_params=PARAMS
                ),
                has_aux=True,
            )
        )
        (loss, metrics), grads = g(moved, dead)
        (expected, expected_metrics), expected_grads = g(moved, live)
        np.testing.assert_allclose(2 * loss, expected, rtol=1e-5)  # the denominator is K*B of all four slots
        for key in ("ratio_mean", "ratio_max", "clip_fraction"):
            np.testing.assert_allclose(metrics[key], expected_metrics[key], rtol=1e-5)
        for key in PARAMS:
            np.testing.assert_allclose(2 * grads[key], expected_grads[key], rtol=1e-4)


def test_reward_transform_and_clip_come_in_the_references_order():
    trajectory = rollout(EDMChurn())
    parts = lambda advantages, **kw: edm_loss(  # noqa: E731
        PARAMS, trajectory, jnp.array(advantages), None, None, None, Objective(**kw)
    )[1]["parts"]["policy"][0]
    np.testing.assert_allclose(parts([7.0, -9.0, 1.0]), [-5.0, 5.0, -1.0])
    np.testing.assert_allclose(parts([7.0, -9.0, 1.0], adv_clip=None), [-7.0, 9.0, -1.0])
    np.testing.assert_allclose(parts([0.0, -9.0, 1.0], reward_transform="exp"), [1.0, 5.0, np.exp(-1.0)], rtol=1e-6)
    np.testing.assert_allclose(parts([0.0, -2.0, 1.0], reward_transform="exp", adv_clip=0.5), [0.5, 0.5, np.exp(-1.0)])


def test_the_three_log_ratios_and_kls_by_hand():
    trajectory = rollout(EDMChurn(), keep_mean=True)
    shifted = dataclasses.replace(trajectory, mean_old=trajectory.mean_old + 0.01 * trajectory.std[:, None, None])
    ref = {"a": jnp.float32(0.5), "b": jnp.float32(0.2)}
    get = lambda **kw: edm_loss(  # noqa: E731
        PARAMS, shifted, ADVANTAGES, None, None, None, Objective(kl_beta=1.0, **kw), ref_params=ref
    )[1]["parts"]
    std = np.asarray(shifted.std)[:, None]
    mean, old, x_next = (np.asarray(a, np.float64) for a in (trajectory.mean_old, shifted.mean_old, shifted.x_next))
    difference = (x_next - old) ** 2 - (x_next - mean) ** 2
    expected = {
        "mean_square": difference.mean(-1),
        "gaussian": difference.mean(-1) / (2 * std**2),
        "gaussian_sum": difference.sum(-1) / (2 * std**2),
    }
    for kind, value in expected.items():
        atol = 1e-5 * std**2 if kind == "mean_square" else 1e-5
        assert (np.abs(get(log_ratio=kind)["log_ratio"] - value) < 1e-4 * np.abs(value) + atol).all()
    square = get(kl="mean_square")["kl"]
    np.testing.assert_allclose(get(kl="gaussian")["kl"], square / (2 * std**2), rtol=1e-5)
    np.testing.assert_allclose(get(kl="gaussian", log_ratio="gaussian_sum")["kl"], square / std**2, rtol=1e-5)
    change = np.abs(shifted.sigma_next - shifted.sigma)[:, None]
    np.testing.assert_allclose(get(kl="flow_grpo")["kl"], change * square / (2 * std**2), rtol=1e-5)
    np.testing.assert_allclose(get(kl="mean_square", log_ratio="gaussian_sum")["kl"], square, rtol=1e-6)


def test_std_is_the_trajectorys():
    trajectory = rollout(EDMChurn(), keep_mean=True)
    moved = {"a": jnp.float32(0.72), "b": jnp.float32(-0.1)}
    get = lambda t: edm_loss(moved, t, ADVANTAGES, None, None, None, dance_grpo())[1]["parts"]["log_ratio"]  # noqa: E731
    doubled = dataclasses.replace(trajectory, std=2 * trajectory.std)
    np.testing.assert_allclose(4 * get(doubled), get(trajectory), rtol=1e-5)


# --- The data loss -------------------------------------------------------------------------------------------------


def data_parts(data, rng, objective, trajectory=None, process=None, denoise=toy):
    return edm_loss(PARAMS, trajectory, None, None, data, rng, objective, process, denoise)[1]["parts"]["data"]


def test_given_draws_need_no_key_and_may_differ_in_batch():
    rng = np.random.default_rng(0)
    x0, sigma = rng.normal(size=(5, 2)).astype(np.float32), rng.uniform(1, 9, size=(4, 5)).astype(np.float32)
    noise = rng.normal(size=(4, 5, 2)).astype(np.float32)
    objective = Objective(data_beta=0.5, loss_scale=2.0)
    loss, metrics = edm_loss(
        PARAMS, rollout(EDMChurn()), ADVANTAGES, None, DataBatch(x0, None, sigma, noise), None, objective
    )
    expected = [
        diffusion_loss(PARAMS, x0, None, s, e, denoise=toy, process=EDMChurn())
        for s, e in zip(sigma, noise, strict=True)
    ]
    np.testing.assert_allclose(metrics["parts"]["data"], expected, rtol=1e-6)
    assert metrics["parts"]["data"].shape == (4, 5) and metrics["parts"]["policy"].shape == (3, 3)
    np.testing.assert_allclose(loss, 2 * (metrics["policy_loss"] + 0.5 * np.mean(expected)), rtol=1e-5)
    # One noise for all draws, and a weight in place of the process's.
    shared = data_parts(DataBatch(x0, None, sigma, noise[0]), None, objective)
    repeated = data_parts(DataBatch(x0, None, sigma, np.repeat(noise[:1], 4, 0)), None, objective)
    np.testing.assert_allclose(shared, repeated, rtol=1e-6)
    weight = rng.uniform(size=(4, 5)).astype(np.float32)
    weighted = data_parts(DataBatch(x0, None, sigma, noise, weight), None, objective)
    np.testing.assert_allclose(
        weighted, np.array(expected) * weight / np.asarray(EDMChurn().loss_weight(sigma)), rtol=1e-5
    )


@pytest.mark.parametrize("process", [EDMChurn(), FlowSDE()])
def test_training_levels_are_drawn_from_the_processs_law(process):
    x0 = jnp.zeros((3, 2))
    seen = []

    def denoise(params, x, sigma, cond):
        jax.debug.callback(lambda s: seen.append(np.asarray(s)), sigma)
        return x

    objective = Objective(data_beta=1.0, data_draws=2000)
    parts = data_parts(DataBatch(x0), jax.random.key(0), objective, process=process, denoise=denoise)
    jax.effects_barrier()
    assert parts.shape == (2000, 3) and len(seen) == 2000
    sigma = np.array(seen).reshape(-1)
    law = np.asarray(process.draw_sigma(jax.random.key(7), (6000,)))
    for q in (0.1, 0.5, 0.9):
        assert abs((sigma < np.quantile(law, q)).mean() - q) < 0.03
    # Another key draws other levels and other noise.
    other = data_parts(DataBatch(x0), jax.random.key(1), objective, process=process, denoise=denoise)
    assert not np.isclose(other, parts).mean() > 0.01


def test_rollout_levels_use_the_rollouts_noise():
    trajectory = rollout(EDMChurn())
    x0 = jnp.ones((3, 2))
    objective = Objective(data_beta=1.0, data_levels="rollout")
    parts = data_parts(DataBatch(x0), None, objective, trajectory)
    expected = [
        diffusion_loss(PARAMS, x0, None, jnp.full(3, s), trajectory.init_noise, denoise=toy, process=EDMChurn())
        for s in trajectory.sigma
    ]
    np.testing.assert_allclose(parts, expected, rtol=1e-6)
    # The same as a data-only call with the levels handed over.
    sigma = jnp.broadcast_to(trajectory.sigma[:, None], (3, 3))
    alone = data_parts(DataBatch(x0, sigma=sigma, noise=trajectory.init_noise), None, objective)
    np.testing.assert_allclose(alone, expected, rtol=1e-6)
    with pytest.raises(ValueError, match="as many data samples as rollouts"):
        data_parts(DataBatch(jnp.ones((4, 2))), None, objective, trajectory)
    with pytest.raises(ValueError, match="rollout"):
        data_parts(DataBatch(x0), None, objective)
    # Its own noise frees the batch sizes; without a recorded one it is drawn.
    assert data_parts(DataBatch(jnp.ones((4, 2)), noise=jnp.ones((4, 2))), None, objective, trajectory).shape == (3, 4)
    bare = dataclasses.replace(trajectory, init_noise=None)
    assert data_parts(DataBatch(jnp.ones((4, 2))), jax.random.key(0), objective, bare).shape == (3, 4)


def test_condition_dropout_is_in_the_data_loss_only():
    cond = {"text": jnp.arange(1.0, 4001.0)[:, None], "frames": jnp.full((4000, 1), 0.25)}
    null = {"text": jnp.zeros((1, 1)), "frames": None}
    x0 = jnp.zeros((4000, 1))
    # The loss is cond's own square: which text each sample had can be read off.
    denoise = lambda params, x, sigma, cond: 0 * x + cond["text"] + cond["frames"]  # noqa: E731
    given = DataBatch(x0, cond, jnp.ones((2, 4000)), jnp.zeros((2, 4000, 1)), jnp.ones((2, 4000)), null)
    objective = Objective(data_beta=1.0, cond_dropout=0.2)
    parts = np.asarray(data_parts(given, jax.random.key(0), objective, denoise=denoise))
    text = np.sqrt(parts) - 0.25
    dropped = np.abs(text) < 1e-3
    np.testing.assert_allclose(text[~dropped], np.tile(np.arange(1.0, 4001.0), 2)[~dropped.reshape(-1)], rtol=1e-5)
    assert abs(dropped.mean() - 0.2) < 0.02
    assert abs((dropped[0] & dropped[1]).mean() - 0.04) < 0.012  # every draw decides anew
    everything = data_parts(given, jax.random.key(0), dataclasses.replace(objective, cond_dropout=1.0), denoise=denoise)
    np.testing.assert_allclose(everything, 0.0625)
    # In the policy part the condition stays.
    trajectory = rollout(EDMChurn(), keep_mean=True)
    rows = {"text": jnp.zeros((3, 1)), "frames": jnp.zeros((3, 1))}
    with_data = edm_loss(PARAMS, trajectory, ADVANTAGES, rows, given, jax.random.key(0), objective, denoise=denoise)
    alone = edm_loss(PARAMS, trajectory, ADVANTAGES, rows, None, None, Objective(), denoise=denoise)
    np.testing.assert_array_equal(with_data[1]["parts"]["policy"], alone[1]["parts"]["policy"])


def test_condition_dropout_keeps_one_entry_a_group():
    # Text is given once for two samples, frames for each: both are dropped together, and text is never repeated.
    cond = {"text": jnp.ones((1000, 1)), "frames": jnp.ones((2000, 1))}
    null = {"text": jnp.zeros((1, 1)), "frames": jnp.zeros((1, 1))}

    def denoise(params, x, sigma, cond):
        assert cond["text"].shape == (1000, 1)
        return 0 * x + jnp.repeat(cond["text"], 2, axis=0) + 2 * cond["frames"]

    data = DataBatch(jnp.zeros((2000, 1)), cond, jnp.ones((1, 2000)), jnp.zeros((2000, 1)), jnp.ones((1, 2000)), null)
    parts = np.asarray(data_parts(data, jax.random.key(0), Objective(data_beta=1.0, cond_dropout=0.3), denoise=denoise))
    assert set(np.unique(parts)) == {0.0, 9.0}
    assert abs((parts == 0).mean() - 0.3) < 0.05


def test_what_is_missing_is_named():
    trajectory, data, key = rollout(EDMChurn()), DataBatch(jnp.ones((3, 2))), jax.random.key(0)
    misshapen = functools.partial(dataclasses.replace, data)
    for args, objective, word in (
        ((None, ADVANTAGES, None, data, None), Objective(), "trajectory=None"),
        ((None, None, None, None, None), Objective(), "nothing to compute"),
        ((trajectory, ADVANTAGES, None, None, None), Objective(data_beta=1.0), "data=None"),
        ((trajectory, ADVANTAGES, None, None, None), Objective(kl_beta=1.0), "ref_params=None"),
        ((trajectory, ADVANTAGES, None, data, None), Objective(data_beta=1.0), "rng=None"),
        ((trajectory, ADVANTAGES, None, data, jax.random.key(0)), ddrl(), "null_cond=None"),
        ((None, None, None, misshapen(sigma=jnp.ones((1, 2))), key), Objective(data_beta=1.0), "data.sigma"),
        ((None, None, None, misshapen(noise=jnp.ones((3, 1))), key), Objective(data_beta=1.0), "data.noise"),
        ((None, None, None, misshapen(weight=jnp.ones((1, 2))), key), Objective(data_beta=1.0), "data.weight"),
    ):  # fmt: skip
        with pytest.raises(ValueError) as error:
            edm_loss(PARAMS, *args, objective)
        assert word in str(error.value) and "\n" not in str(error.value)


def test_parts_that_are_off_are_zero():
    data = DataBatch(jnp.ones((3, 2)), sigma=jnp.ones((1, 3)), noise=jnp.ones((3, 2)))
    loss, metrics = edm_loss(PARAMS, None, None, None, data, None, Objective(data_beta=0.5))
    np.testing.assert_allclose(loss, 0.5 * metrics["data_loss"], rtol=1e-6)
    for key in ("policy_loss", "kl_loss", "ratio_mean", "ratio_max", "clip_fraction"):
        assert metrics[key] == 0.0
    _, metrics = edm_loss(PARAMS, rollout(EDMChurn()), ADVANTAGES, None, data, None, Objective())
    assert metrics["data_loss"] == metrics["kl_loss"] == 0.0
    np.testing.assert_array_equal(metrics["parts"]["kl"], np.zeros((3, 3)))


@pytest.mark.parametrize("process", [EDMChurn(), FlowSDE()])
def test_accumulated_gradient_is_the_gradient(process):
    # A scan over recorded steps, micro-batches of rollouts and draws, each with the full denominators, adds up.
    trajectory = rollout(process, keep_mean=True, batch=4)
    advantages = jnp.array([1.0, -0.4, 0.2, -0.7])
    moved = {"a": jnp.float32(0.72), "b": jnp.float32(-0.1)}
    sigma, noise = jnp.array([[0.3, 0.6, 0.9, 0.5]] * 2), jax.random.normal(jax.random.key(3), (2, 4, 2))
    data = DataBatch(jnp.ones((4, 2)), None, sigma, noise)
    objective = Objective(data_beta=0.4, kl_beta=0.3, loss_scale=10.0)
    full = jax.grad(
        lambda p: edm_loss(p, trajectory, advantages, None, data, None, objective, process, ref_params=PARAMS)[0]
    )(moved)

    total = jax.tree.map(jnp.zeros_like, moved)
    policy_only = dataclasses.replace(objective, data_beta=0.0)
    loss = lambda *args: edm_loss(*args, process, ref_params=PARAMS)[0]  # noqa: E731
    policy_grad = jax.jit(jax.grad(lambda p, t, a: loss(p, t, a, None, None, None, policy_only)))
    data_grad = jax.jit(jax.grad(lambda p, d: loss(p, None, None, None, d, None, objective)))
    for k in range(3):
        for rows in (slice(0, 2), slice(2, 4)):
            part = trajectory.take_steps(slice(k, k + 1)).take_rows(rows)
            grads = policy_grad(moved, part, advantages[rows])
            total = jax.tree.map(lambda s, g: s + g * (1 * 2) / (3 * 4), total, grads)
    for m in range(2):
        part = DataBatch(data.x0, None, sigma[m : m + 1], noise[m])
        grads = data_grad(moved, part)
        total = jax.tree.map(lambda s, g: s + g / 2, total, grads)
    for key in full:
        np.testing.assert_allclose(total[key], full[key], rtol=2e-5)


def test_presets():
    table = {
        Objective(): (0, 0, "mean_square", "mean_square", 1e-4, 5, 1, 0, 1, "training"),
        ddrl(): (0.01, 0, "mean_square", "mean_square", 1e-4, 5, 10, 0.2, 1, "training"),
        dance_grpo(): (0, 0, "gaussian", "mean_square", 1e-4, 5, 1, 0, 1, "training"),
        flow_grpo(): (0, 0.04, "gaussian", "flow_grpo", 1e-4, 5, 1, 0, 1, "training"),
    }
    assert len(table) == 4  # hashable, and all different
    for objective, expected in table.items():
        fields = ["data_beta", "kl_beta", "log_ratio", "kl", "clip_range", "adv_clip", "loss_scale", "cond_dropout"]
        fields += ["data_draws", "data_levels"]
        assert tuple(getattr(objective, field) for field in fields) == expected
        assert objective.reward_transform == "identity"
    assert ddrl(data_beta=0.1, loss_scale=1.0) == Objective(data_beta=0.1, loss_scale=1.0, cond_dropout=0.2)
    with pytest.raises(TypeError):
        ddrl(no_such_setting=1)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("clip_range", 0.0), ("clip_range", -1.0), ("log_ratio", "sum"), ("kl", "reverse"), ("reward_transform", "log"),
        ("data_levels", "both"), ("data_beta", -0.1), ("kl_beta", float("nan")), ("adv_clip", 0.0), ("loss_scale", 0.0),
        ("data_draws", 0), ("cond_dropout", 1.5),
    ],
)  # fmt: skip
def test_bad_settings_are_one_line_errors(setting, value):
    with pytest.raises(ValueError) as error:
        Objective(**{setting: value})
    assert f"{setting}={value!r}" in str(error.value) and "\n" not in str(error.value)


def test_clipping_stops_the_gradient_once_the_ratio_has_moved_far_enough():
    trajectory = rollout(EDMChurn(), keep_mean=True, record=(3,))
    moved = {"a": jnp.float32(0.9), "b": jnp.float32(-0.1)}
    f = lambda a: jax.grad(lambda p: edm_loss(p, trajectory, a, None, None, None, Objective())[0])(moved)["a"]  # noqa: E731
    moved_by = edm_loss(moved, trajectory, ADVANTAGES, None, None, None, Objective())[1]["parts"]["log_ratio"][0]
    assert (jnp.abs(moved_by) > 2e-4).all()
    assert f(jnp.sign(moved_by)) == 0.0  # moved the good way already: clipped
    assert f(-jnp.sign(moved_by)) != 0.0  # moved the bad way: not


def test_the_whole_loss_under_jit_with_static_settings_is_the_eager_one():
    trajectory = rollout(FlowSDE(), keep_mean=True)
    cond, null = jnp.arange(3.0)[:, None], jnp.zeros((1, 1))
    data = DataBatch(jnp.ones((3, 2)), cond, null_cond=null)
    args = (PARAMS, trajectory, ADVANTAGES, cond, data, jax.random.key(4))
    settings = dict(denoise=toy, process=FlowSDE(), objective=ddrl(data_draws=3))
    loss, metrics = loss_fn(*args, **settings)
    jitted = jax.jit(loss_fn, static_argnames=("denoise", "process", "objective"))
    loss_jit, metrics_jit = jitted(*args, **settings)
    np.testing.assert_allclose(loss_jit, loss, rtol=2e-5)
    for ours, theirs in zip(jax.tree.leaves(metrics_jit), jax.tree.leaves(metrics), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
    assert set(metrics) == {
        *("loss", "policy_loss", "kl_loss", "data_loss", "ratio_mean", "ratio_max", "clip_fraction", "parts")
    }
    assert set(metrics["parts"]) == {"policy", "kl", "log_ratio", "data"}
    assert metrics["parts"]["data"].shape == (3, 3)


def test_the_policy_gradient_goes_up_the_reward():
    # A one-dimensional policy whose reward is its sample: ascending the loss's negative gradient raises it.
    process, params = EDMChurn(sigma_min=0.1, sigma_max=5.0), jnp.zeros(())
    denoise = lambda p, x, sigma, cond: jnp.tanh(p + x / (1 + sigma[:, None] ** 2))  # noqa: E731

    @jax.jit
    def update(params, rng):
        x0, trajectory = sample(
            params, rng, None, denoise=denoise, process=process, shape=(256, 1), num_steps=8, record=tuple(range(7))
        )
        advantages = group_advantages(x0[:, 0], 8)
        grad = jax.grad(
            lambda p: loss_fn(
                p, trajectory, advantages, None, None, None, denoise=denoise, process=process, objective=dance_grpo()
            )[0]
        )(params)
        return params - 0.3 * grad, x0.mean()

    rewards = []
    for i in range(15):
        params, reward = update(params, jax.random.key(i))
        rewards.append(float(reward))
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.2


def test_advantages_and_weights_may_be_lists():
    trajectory, weight = rollout(EDMChurn()), [1.0, 0.0, 0.5]
    f = lambda a, w: edm_loss(PARAMS, trajectory, a, None, None, None, Objective(), sample_weight=w)[0]  # noqa: E731
    expected = f(ADVANTAGES, jnp.array(weight))
    assert f(ADVANTAGES.tolist(), weight) == f(np.array(ADVANTAGES), np.array(weight)) == expected
    with pytest.raises(AssertionError):
        f(ADVANTAGES.tolist()[:2], None)


def test_without_std_every_slot_is_live_where_std_is_not_needed():
    trajectory = rollout(EDMChurn(), keep_mean=True)
    bare = dataclasses.replace(trajectory, std=None, step=None)
    moved = {"a": jnp.float32(0.72), "b": jnp.float32(-0.1)}
    f = lambda t, a, **kw: edm_loss(moved, t, a, None, None, None, Objective(**kw), ref_params=PARAMS)  # noqa: E731
    for advantages, kw in (
        (ADVANTAGES, {"kl_beta": 0.5}),
        (ADVANTAGES, {"kl": "gaussian"}),  # kl_beta is 0
        (None, {"kl_beta": 0.5, "log_ratio": "gaussian"}),
    ):
        ours, theirs = f(bare, advantages, **kw), f(trajectory, advantages, **kw)
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_array_equal(a, b)
    for kw, word in (
        ({"log_ratio": "gaussian"}, "trajectory.std=None: log_ratio='gaussian' needs it"),
        ({"kl": "flow_grpo", "kl_beta": 1.0}, "trajectory.std=None: kl='flow_grpo' needs it"),
    ):
        with pytest.raises(ValueError, match=word) as error:
            f(bare, ADVANTAGES, **kw)
        assert "\n" not in str(error.value)
    part = bare.take_steps(slice(0, 2)).take_rows(slice(0, 2))
    assert part.std is None and part.step is None and part.x.shape == (2, 2, 2)
    data = DataBatch(jnp.ones((3, 2)))
    assert data_parts(data, None, Objective(data_beta=1.0, data_levels="rollout"), bare).shape == (3, 3)


def test_a_key_that_null_cond_lacks_is_kept_by_the_dropout():
    denoise = lambda params, x, sigma, cond: 0 * x + cond["a"] + cond["b"]  # noqa: E731
    cond = {"a": jnp.ones((3, 1)), "b": jnp.ones((3, 1))}
    draws = (jnp.ones((1, 3)), jnp.zeros((3, 1)), jnp.ones((1, 3)))
    f = lambda null: data_parts(  # noqa: E731
        DataBatch(jnp.zeros((3, 1)), cond, *draws, null), jax.random.key(0), Objective(data_beta=1.0, cond_dropout=1.0),
        denoise=denoise,
    )  # fmt: skip
    np.testing.assert_array_equal(f({"a": jnp.zeros((1, 1)), "c": None}), 1.0)
    with pytest.raises(ValueError, match=r"null_cond\['c'\] is given where cond\['c'\] is None or absent"):
        f({"c": jnp.zeros((1, 1))})


# --- The baselines, by hand ------------------------------------------------------------------------------------------
# With x0 = p x every kernel's mean is (b + a p) x, so ratios, KLs and their gradients have closed forms.


def linear(params, x, sigma, cond):
    return params * x


def affine_mean(process, trajectory):
    """a, b (K,1,1) of mean = (b + a p) x, from the kernels' formulas."""
    s, t = (np.asarray(v, np.float64)[:, None, None] for v in (trajectory.sigma, trajectory.sigma_next))
    if isinstance(process, EDMChurn):  # Euler
        return 1 - t / s, t / s
    drift, dt = process.noise_level**2 / (2 * (1 - np.where(s < 1, s, t))), t - s
    slope = (1 + drift * (1 - s)) * dt / s  # of v = (1-p) x / t
    return -slope, 1 + drift * dt + slope


@functools.lru_cache
def linear_rollout(process):
    with jax.enable_x64(True):
        return sample(
            0.6, jax.random.key(4), None, denoise=linear, process=process, shape=(4, 3), num_steps=6, record=(0, 1, 3),
            keep_mean=True, dtype=jnp.float64,
        )[1]  # fmt: skip


BASELINE_PROCESSES = [EDMChurn(solver="1euler", sigma_max=20.0), FlowSDE()]
FOUR = np.array([1.2, -0.7, 0.4, -0.9])


@pytest.mark.parametrize("process", BASELINE_PROCESSES)
@pytest.mark.parametrize("std", ["group", "batch"])
def test_the_baselines_objectives_by_hand(process, std):
    with jax.enable_x64(True):
        at, p, old, ref = linear_rollout(process), 0.6001, 0.6, 0.55
        advantages = group_advantages([0.3, 1.0, -0.5, 2.0], 2, std=std)
        A, (a, b) = np.asarray(advantages), affine_mean(process, at)
        x, x_next, stdev = np.asarray(at.x), np.asarray(at.x_next), np.asarray(at.std)[:, None]
        d, e = a * (p - old) * x, x_next - (b + a * old) * x
        ratio = np.exp((d * (2 * e - d)).mean(-1) / (2 * stdev**2))
        policy = np.maximum(-A * ratio, -A * np.clip(ratio, 0.999, 1.001)).mean()
        # FlowGRPO's KL divides by the std without the step length in it.
        change = np.abs(np.asarray(at.sigma_next - at.sigma))[:, None]
        kl = (((a * (p - ref) * x) ** 2).mean(-1) / (2 * stdev**2) * change).mean()
        if isinstance(process, FlowSDE):
            t = np.asarray(at.sigma)[:, None]
            bare = process.noise_level * np.sqrt(t / (1 - np.where(t < 1, t, np.asarray(at.sigma_next)[:, None])))
            np.testing.assert_allclose(kl, (((a * (p - ref) * x) ** 2).mean(-1) / (2 * bare**2)).mean(), rtol=1e-12)
        f = functools.partial(
            loss_fn, p, at, advantages, None, None, None, denoise=linear, process=process, ref_params=ref
        )
        loss, metrics = f(objective=dance_grpo(clip_range=1e-3))
        np.testing.assert_allclose(metrics["parts"]["log_ratio"], np.log(ratio), rtol=1e-9, atol=1e-15)
        np.testing.assert_allclose(loss, policy, rtol=1e-11)
        assert metrics["kl_loss"] == 0.0
        loss, metrics = f(objective=flow_grpo(clip_range=1e-3))
        np.testing.assert_allclose(metrics["kl_loss"], kl, rtol=1e-11)
        np.testing.assert_allclose(loss, policy + 0.04 * kl, rtol=1e-11)


@pytest.mark.parametrize("process", BASELINE_PROCESSES)
def test_clipping_bites_at_the_second_update_of_a_rollout(process):
    with jax.enable_x64(True):
        at, clip = linear_rollout(process), 1e-4
        f = lambda p: loss_fn(  # noqa: E731
            p, at, FOUR, None, None, None, denoise=linear, process=process, objective=dance_grpo(clip_range=clip)
        )  # fmt: skip
        a, b = affine_mean(process, at)
        x, stdev = np.asarray(at.x), np.asarray(at.std)[:, None]

        def by_hand(p):
            d, e = a * (p - 0.6) * x, np.asarray(at.x_next) - (b + a * 0.6) * x
            ratio = np.exp((d * (2 * e - d)).mean(-1) / (2 * stdev**2))
            return ratio, -FOUR * ratio * (a * x * (e - d)).mean(-1) / stdev**2

        slots = jax.jacobian(lambda p: f(p)[1]["parts"]["policy"])  # (K,B), each slot's own gradient
        # First update: on the policy, ratio 1, nothing is clipped.
        _, first = by_hand(0.6)
        np.testing.assert_allclose(slots(0.6), first, rtol=1e-8, atol=1e-12)
        loss_grad = jax.grad(lambda p: f(p)[0])(0.6)
        np.testing.assert_allclose(loss_grad, first.mean(), rtol=1e-8)
        assert f(0.6)[1]["clip_fraction"] == 0.0

        # Second update, from where a step down the gradient leads.
        p = 0.6 - 3e-2 * np.sign(loss_grad)
        ratio, unclipped = by_hand(p)
        gone = ((FOUR > 0) & (ratio > 1 + clip)) | ((FOUR < 0) & (ratio < 1 - clip))
        assert 0 < gone.sum() < gone.size and ((np.abs(ratio - 1) > clip) & ~gone).any()
        ours = np.asarray(slots(p))
        assert (ours[gone] == 0.0).all()
        np.testing.assert_allclose(ours[~gone], unclipped[~gone], rtol=1e-9)
        assert (np.abs(ours[~gone]) > 1e-6).all()
        np.testing.assert_allclose(jax.grad(lambda p: f(p)[0])(p), np.where(gone, 0, unclipped).mean(), rtol=1e-9)
        np.testing.assert_allclose(f(p)[1]["clip_fraction"], (np.abs(ratio - 1) > clip).mean(), rtol=1e-12)
