"""Every method through the jitted parts of the trainer (update.Update): what it holds, trains on and changes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from ddrl_jax import build, state, update
from ddrl_jax import config as config_lib
from ddrl_jax.gradients import data_gradient
from ddrl_jax.parallel.mesh import AXES
from ddrl_jax.rl.steps import window_steps
from ddrl_jax.update import Rewarded, Update

from . import tiny

FLOW = {"process.name": "flow_sde", "process.sigma_max": None, "process.train_mean": None}
FLOW |= {"process.train_multiplier": None, "process.high_sigma_ratio": None}
DANCE = {**FLOW, "process.name": "dance_sde"}
METHODS = {
    "ddrl": {},
    "ddrl_full": {"objective.data_levels": "rollout"},
    "ddrl_exact": {"advantage.kind": "partition", "objective.reward_transform": "exp", "objective.adv_clip": np.inf},
    "ddrl_flow": FLOW,
    "dance_grpo": {**DANCE, "objective.name": "dance_grpo", "rollout.steps": "random", "rollout.same_noise": True},
    "dance_grpo_edm": {"objective.name": "dance_grpo", "rollout.steps": "random"},
    "flow_grpo": {**FLOW, "objective.name": "flow_grpo", "advantage.std": "batch"},
    "flow_grpo_edm": {"objective.name": "flow_grpo", "objective.kl": "mean_square"},
    "flow_cps": {
        **FLOW,
        "process.name": "flow_cps",
        "objective.name": "flow_grpo",
        "objective.log_ratio": "mean_square",
    },
    "mix_grpo": {**FLOW, "objective.name": "flow_grpo", "rollout.steps": "window", "rollout.window": 2},
    "nft": {"objective.name": "nft"},
    "best_of": {"objective.name": "dance_grpo", "advantage.best_of": 2},
    "rft": {"objective.name": "rft"},
    "sft": {"objective.name": "sft"},
}


def make(**fields):
    c = tiny.config()
    with c.unlocked():
        for field, value in fields.items():
            section, name = field.rsplit(".", 1)
            config_lib.get(c, section)[name] = value
    c.mesh.fsdp, c.mesh.context = 4, 2
    config_lib.validate(c)
    return c


def denoise(params, x, sigma, cond):
    """A small network in place of the DiT, which takes a minute to compile: x0 from x, its level and the text."""
    text_B = jnp.repeat(cond["context"].mean(1) @ params["text"], len(x) // len(cond["context"]))
    level_B, shape = jnp.log1p(sigma), (-1, 1, 1, 1, 1)
    return jnp.tanh(
        params["gain"] * x / (1.0 + sigma.reshape(shape))
        + params["level"] * level_B.reshape(shape)
        + text_B.reshape(shape)
        + params["bias"]
    )


def with_small_network(setup):
    """On one of the tests' eight devices, and with `denoise`."""
    devices = np.array(jax.devices()[:1]).reshape(1, 1, 1)
    mesh = Mesh(devices, AXES, axis_types=(AxisType.Auto,) * 3)
    return dataclasses.replace(setup, mesh=mesh, denoise=denoise)


class Run:
    """A method's parts without sidecar and data: rewards are the mean brightness of the latents."""

    def __init__(self, **fields):
        self.config = make(**fields)
        self.setup = with_small_network(build.build(self.config))
        self.method = Update(self.config, self.setup)
        self.key = jax.random.key(3)
        size = {"gain": self.setup.latent_shape, "bias": self.setup.latent_shape, "level": (1,), "text": (8,)}
        keys = jax.random.split(jax.random.key(2), len(size))
        self.base = {n: 0.3 * jax.random.normal(k, d) for (n, d), k in zip(size.items(), keys, strict=True)}
        m = self.method
        self.state = build.train_state(self.setup, self.base, m.optimizer, m.exponent, old=m.needs_old)
        shape = (self.config.rollout.conditions, *self.setup.latent_shape)
        self.x0_GX = jax.random.normal(jax.random.key(4), shape)
        words = ["a seven moving up", "a two moving down"]
        self.cond = self.setup.condition(words)

    @functools.cached_property
    def ref(self):
        return self.base if self.method.needs_reference else None

    def rollout(self, keep_mean=None, reference=False):
        m = self.method
        params = self.ref if reference else m.rollout_params(self.state)
        keep = m.keeps_mean if keep_mean is None else keep_mean
        return m.rollout(params, self.key, self.state.step, self.cond, keep_mean=keep, reference=reference)

    def rewarded(self, x0, valid=None):
        valid = jnp.ones(len(x0), bool) if valid is None else jnp.asarray(valid)
        other = {}
        if self.method.needs_reference_rollouts:
            reference, _ = self.rollout(reference=True)
            other = {"reference_B": reference.mean((1, 2, 3, 4)), "reference_valid_B": valid}
        return Rewarded(x0.mean((1, 2, 3, 4))[None], jnp.ones(1), valid, **other)

    def iterate(self, valid=None):
        m, x0, trajectory, rewarded, metrics = self.method, None, None, None, []
        if m.rolls_out:
            x0, trajectory = self.rollout()
            rewarded = self.rewarded(x0, valid)
        for u in range(m.updates):
            data = None
            if m.has_data:
                levels = trajectory if m.data_needs_rollout else None
                data = m.data(self.state.params, self.key, self.state.step, u, self.x0_GX, self.cond, levels)
            self.state, of_update, _ = m.apply(
                self.state, self.key, u, x0, trajectory, self.cond, rewarded, data, self.ref
            )
            metrics.append(of_update)
        return metrics


def moved(run):
    pairs = zip(jax.tree.leaves(run.state.params), jax.tree.leaves(run.base), strict=True)
    return max(float(jnp.max(jnp.abs(a - b))) for a, b in pairs)


@pytest.mark.parametrize("name", METHODS)
def test_two_iterations_change_the_policy_and_nothing_is_skipped(name):
    run = Run(**METHODS[name])
    for _ in range(2):
        (metrics,) = run.iterate()
    assert int(run.state.step) == 2 and int(run.state.skipped) == 0
    assert moved(run) > 0
    if run.method.on_steps:
        assert float(metrics["ratio_mean"]) == 1.0  # one update a rollout: exactly on policy
        assert metrics["step_grad_norm"].shape == metrics["trained_steps"].shape
        assert np.all(np.asarray(metrics["step_grad_norm"]) > 0)


def test_what_each_method_holds_in_memory():
    held = {name: Update(make(**fields), build.build(make(**fields))).networks() for name, fields in METHODS.items()}
    assert held["ddrl"] == held["sft"] == held["rft"] == held["dance_grpo"] == held["best_of"] == ["policy", "EMA"]
    assert held["flow_grpo"] == held["ddrl_exact"] == ["policy", "EMA", "reference"]
    assert held["nft"] == ["policy", "EMA", "old policy"]
    run = Run(**METHODS["ddrl"])
    assert run.state.old is None and run.ref is None


def test_without_a_kl_or_nft_the_state_has_no_old_policy_and_nft_follows_by_its_decay():
    run = Run(**METHODS["nft"], **{"nft.decay_rate": 0.25, "nft.decay_max": 0.4})
    old = jax.tree.map(np.array, run.state.old)
    for kept in (0.25, 0.4, 0.4):  # min(0.25 n, 0.4)
        run.iterate()
        want = jax.tree.map(lambda o, p, kept=kept: kept * o + (1 - kept) * p, old, run.state.params)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-7), run.state.old, want)
        old = jax.tree.map(np.array, run.state.old)
    assert run.method.rollout_params(run.state) is run.state.old


def test_random_steps_are_drawn_anew_and_are_sixty_percent_of_all_but_the_last():
    run = Run(**METHODS["dance_grpo"], **{"rollout.num_steps": 11})
    drawn = []
    for _ in range(4):
        (metrics,) = run.iterate()
        drawn.append(tuple(np.asarray(metrics["trained_steps"]).tolist()))
    assert all(len(d) == 6 and set(d) <= set(range(10)) for d in drawn)  # .6 of 10
    assert len(set(drawn)) > 1


def test_the_window_moves_without_a_new_compilation():
    run = Run(**METHODS["mix_grpo"], **{"rollout.window_every": 1, "rollout.num_steps": 5})
    for n in range(4):
        (metrics,) = run.iterate()
        want = window_steps(n, 4, window=2, every=1)  # all but the last step
        np.testing.assert_array_equal(metrics["trained_steps"], want)
    assert run.method.rollout.func._cache_size() == run.method.apply.func._cache_size() == 1


def test_same_noise_is_shared_within_a_group_only():
    for same in (True, False):
        run = Run(**{"rollout.same_noise": same, "objective.data_levels": "rollout"})
        _, trajectory = run.rollout()
        noise = np.asarray(trajectory.init_noise).reshape(2, 4, -1)
        assert np.all(noise[:, :1] == noise) == same
        assert not np.any(noise[0] == noise[1])


def test_clipping_bites_on_the_second_update_of_a_rollout():
    # One condition an update: the second update sees a policy that the first has moved.
    fields = {"objective.name": "dance_grpo", "objective.log_ratio": "mean_square", "train.learning_rate": 3e-2}
    run = Run(**fields, **{"train.updates_per_rollout": 2, "train.warmup_steps": 0})
    first, second = run.iterate()
    assert abs(float(first["ratio_mean"]) - 1) < 1e-5 and float(first["clip_fraction"]) == 0
    assert float(second["clip_fraction"]) > 0.5
    wide = Run(**fields, **{"train.updates_per_rollout": 2, "train.warmup_steps": 0, "objective.clip_range": 1e6})
    _, unclipped = wide.iterate()
    assert float(unclipped["clip_fraction"]) == 0
    # Same rollout, same first update: what is clipped has no gradient (which slots those are: tests/test_loss_fn.py).
    assert float(second["grad_norm"]) != pytest.approx(float(unclipped["grad_norm"]), rel=1e-2)


def test_rollouts_from_the_ema_are_off_policy_and_the_ratio_knows():
    run = Run(**{"rollout.ema": True, "train.learning_rate": 1e-2, "train.warmup_steps": 0, "train.ema_rate": 0.28})
    (first,), *_ = run.iterate(), run.iterate()
    (third,) = run.iterate()
    assert abs(float(first["ratio_mean"]) - 1) < 1e-6
    assert abs(float(third["ratio_mean"]) - 1) > 1e-6


def test_guidance_reaches_rollout_and_policy_each_on_its_own():
    plain, rollout, train = (Run(**f) for f in ({}, {"rollout.guidance": 2.0}, {"train.guidance": 2.0}))
    x0 = [np.asarray(r.rollout()[0]) for r in (plain, rollout, train)]
    assert np.abs(x0[0] - x0[1]).max() > 1e-4
    np.testing.assert_array_equal(x0[0], x0[2])
    for run in (plain, rollout, train):
        run.iterate()
    assert moved(plain) > 0
    # The policy gradient is that of the guided policy where it is trained guided: another one, far beyond rounding.
    steep = [float(Run(**f).iterate()[0]["step_grad_norm"].sum()) for f in ({}, {"train.guidance": 2.0})]
    assert steep[1] != pytest.approx(steep[0], rel=5e-3)
    x, sigma = jnp.ones((8, *plain.setup.latent_shape)), jnp.ones(8)
    cond = plain.cond
    same = plain.setup.denoise(plain.base, x, sigma, cond)
    np.testing.assert_array_equal(plain.setup.policy_denoise(plain.base, x, sigma, cond), same)
    np.testing.assert_array_equal(train.setup.rollout_denoise(plain.base, x, sigma, cond), same)
    assert np.abs(train.setup.policy_denoise(plain.base, x, sigma, cond) - same).max() > 1e-4


def test_invalid_rollouts_and_dead_groups_do_not_train():
    dead = np.zeros(8, bool)
    for name in ("dance_grpo", "nft", "rft", "best_of"):
        run = Run(**METHODS[name], **{"train.weight_decay": 0.0})
        (metrics,) = run.iterate(valid=dead)
        assert float(metrics["grad_norm"]) == 0.0 and moved(run) == 0.0, name


def test_rejection_fine_tuning_trains_on_the_best_of_each_group(monkeypatch):
    run = Run(**METHODS["rft"])
    x0, trajectory = run.rollout()
    assert trajectory is None  # nothing trains on steps: nothing is recorded
    seen = []

    def gradient(params, rng, x0_GX, *args, alive_G, **options):
        seen.append((x0_GX, alive_G))
        return data_gradient(params, rng, x0_GX, *args, alive_G=alive_G, **options)

    monkeypatch.setattr(update, "data_gradient", gradient)
    rewarded = run.rewarded(x0)
    adv_B, _, valid_B = run.method._advantages(rewarded)
    run.method._best_of_n(run.base, run.key, x0, adv_B, valid_B.at[4:].set(False), run.cond, run.setup)
    ((x0_GX, alive_G),) = seen
    best = int(x0[:4].mean((1, 2, 3, 4)).argmax())
    np.testing.assert_array_equal(x0_GX[0], x0[best])
    np.testing.assert_array_equal(alive_G, [True, False])
    np.testing.assert_array_equal(x0_GX[1], 0.0)


@pytest.mark.parametrize("name", ["nft", "rft"])
def test_nft_and_rejection_take_several_updates_a_rollout_and_a_data_loss(name):
    run = Run(**METHODS[name], **{"train.updates_per_rollout": 2, "objective.data_beta": 0.1})
    metrics = run.iterate()
    assert len(metrics) == 2 and all(float(m["data_loss"]) > 0 and float(m["policy_loss"]) > 0 for m in metrics)
    assert int(run.state.step) == 1 and int(run.state.updates) == 2


def test_the_full_data_loss_takes_the_levels_of_steps_drawn_at_random():
    run = Run(**{"objective.data_levels": "rollout", "rollout.steps": "random", "rollout.num_steps": 5})
    (metrics,) = run.iterate()
    assert metrics["trained_steps"].shape == (2,) and float(metrics["data_loss"]) > 0  # .6 of 4


@pytest.mark.parametrize("process", ["dance_sde", "flow_cps"])
def test_the_window_leaves_the_last_step_alone(process):
    run = Run(**{**METHODS["mix_grpo"], "process.name": process, "rollout.window_every": 1, "rollout.num_steps": 4})
    for _ in range(4):
        (metrics,) = run.iterate()
        assert max(np.asarray(metrics["trained_steps"])) <= 2 and np.all(np.asarray(metrics["step_grad_norm"]) > 0)


def test_best_of_weights_reach_the_loss():
    all_of, some = (Run(**{**METHODS["best_of"], "advantage.best_of": n}) for n in (4, 2))
    a, b = all_of.iterate()[0], some.iterate()[0]
    assert float(a["grad_norm"]) != pytest.approx(float(b["grad_norm"]), rel=1e-3)


def test_the_exact_objective_needs_z_of_the_reference():
    run = Run(**METHODS["ddrl_exact"], **{"advantage.beta": 0.5})
    x0, _ = run.rollout()
    rewarded = run.rewarded(x0)
    adv, weight, _ = run.method._advantages(rewarded)
    r, ref = np.asarray(rewarded.rewards_RB[0], np.float64), np.asarray(rewarded.reference_B, np.float64)
    z = 0.5 * np.log(np.exp(ref.reshape(2, 4) / 0.5).mean(1))
    np.testing.assert_allclose(adv, (r - np.repeat(z, 4)) / 0.5, rtol=1e-4, atol=1e-5)
    assert np.all(np.asarray(weight) == 1)


def test_several_rewards_are_normalised_each_within_its_group():
    run = Run()
    rewards = jax.random.normal(jax.random.key(0), (2, 8)) * jnp.array([[1.0], [1000.0]])
    adv, _, _ = run.method._advantages(Rewarded(rewards, jnp.array([1.0, 1.0]), jnp.ones(8, bool)))
    single = [run.method._advantages(Rewarded(r[None], jnp.ones(1), jnp.ones(8, bool)))[0] for r in rewards]
    # The clip at 5 (advantage.reward_clip) levels the second one; without it both count alike.
    np.testing.assert_allclose(adv, 0.5 * (single[0] + single[1]), rtol=1e-5, atol=1e-6)


def test_state_with_an_old_policy_survives_apply_with_a_non_finite_loss():
    run = Run(**METHODS["nft"])
    before = run.state.old
    grads = jax.tree.map(jnp.ones_like, run.state.params)
    after, metrics = state.apply_gradients(
        run.state, grads, jnp.asarray(jnp.nan), run.method.optimizer, ema_exponent=run.method.exponent
    )
    assert float(metrics["skipped"]) == 1
    jax.tree.map(np.testing.assert_array_equal, after.old, before)


def test_a_gradient_is_gone_with_its_update():
    """The sum comes back in the data loss's own memory: nothing of its size is left where only the state is kept."""
    run = Run(**METHODS["ddrl"])
    run.iterate()
    shapes = {leaf.shape for leaf in jax.tree.leaves(run.base)}

    def held():
        return sum(x.shape in shapes and not x.is_deleted() for x in jax.live_arrays())

    before = held()
    run.iterate()
    assert held() <= before
