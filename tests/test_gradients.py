"""Accumulated gradients against `loss_fn` on the whole batch, micro-batches, meshes, the replay check."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddrl_jax import build, gradients, state, train, update
from ddrl_jax.diffusion.sampler import sample
from ddrl_jax.rl.advantages import group_advantages
from ddrl_jax.rl.loss import DataBatch, loss_fn
from ddrl_jax.rl.objective import Objective

from . import tiny

GROUPS, GROUP, STEPS = 4, 4, (0, 1, 2)


def _setup(**objective):
    config = tiny.config()
    config.rollout.conditions, config.rollout.group_size = GROUPS, GROUP
    config.train.micro_batch = 4
    config.mesh.replica, config.mesh.fsdp, config.mesh.context = 1, 4, 2
    for name, value in objective.items():
        config.objective[name] = value
    setup = build.build(config)
    params = build.init_params(config, setup.mesh, jax.random.key(0))
    # The network starts at zero: move it, so that every gradient is exercised.
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    params = tree.unflatten([p + 0.05 * jax.random.normal(k, p.shape) for k, p in zip(keys, leaves, strict=True)])
    context = jax.random.normal(jax.random.key(2), (GROUPS, 10, 8))

    @jax.jit
    def rollout(p):
        return sample(
            p,
            jax.random.key(3),
            build.cond(context),
            denoise=setup.denoise,
            process=setup.process,
            shape=(GROUPS * GROUP, *setup.latent_shape),
            num_steps=4,
            record=STEPS,
            keep_mean=True,
        )

    _, trajectory = rollout(params)
    return config, setup, params, context, trajectory


def _close(a, b, rtol=2e-4):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        scale = float(jnp.abs(y).max())
        np.testing.assert_allclose(x, y, atol=rtol * max(scale, 1e-12))


@pytest.mark.parametrize("shards", [1, 2, 4, 8])
@pytest.mark.parametrize("micro_batch", [1, 2, 4, 8, 16, 32, 64])
def test_micro_batches_of_whole_groups_or_parts_of_them(shards, micro_batch):
    """Each rollout is in one micro-batch, with its own condition; each device has its share of each."""
    batch, conditions = 64, 8
    parts = gradients.MicroBatches.of(batch, conditions, micro_batch, shards)
    rows_BX, entries_GX = jnp.arange(batch), jnp.arange(conditions)
    seen = []
    for i in range(parts.count):
        rows = np.asarray(parts.rows(rows_BX, jnp.asarray(i)))
        entries = np.asarray(parts.entries(entries_GX, jnp.asarray(i)))
        assert rows.shape == (micro_batch,) and micro_batch % len(entries) == 0
        np.testing.assert_array_equal(np.repeat(entries, micro_batch // len(entries)), rows // (batch // conditions))
        if micro_batch >= shards:
            per_device = np.bincount(rows // (batch // shards), minlength=shards)
            assert (per_device == micro_batch // shards).all()
        seen += rows.tolist()
    assert sorted(seen) == list(range(batch))
    stacked = jnp.stack([parts.rows(rows_BX, jnp.asarray(i)) for i in range(parts.count)])
    np.testing.assert_array_equal(parts.joined(stacked), rows_BX)


def test_micro_batches_keep_groups_whole_and_lose_none():
    x = jnp.arange(24).reshape(24, 1)
    parts = gradients.micro_batches(x, 3, 4)
    assert parts.shape == (3, 8, 1)
    for part in np.asarray(parts)[:, :, 0]:
        for group in part.reshape(-1, 4):
            assert group[0] % 4 == 0 and (group == group[0] + np.arange(4)).all()
    assert sorted(parts.reshape(-1).tolist()) == list(range(24))


@pytest.mark.parametrize("micro_batch", [2, 4, 8, 16])
@pytest.mark.parametrize("kl_beta", [0.0, 0.3])
def test_accumulated_policy_gradient_is_the_gradient_of_loss_fn(micro_batch, kl_beta):
    _, setup, params, context, trajectory = _setup(kl_beta=kl_beta)
    setup = dataclasses.replace(setup, objective=dataclasses.replace(setup.objective, log_ratio="gaussian"))
    moved = jax.tree.map(lambda p: p * 1.001, params)  # off-policy: ratios are not 1
    reference = jax.tree.map(lambda p: p * 0.99, params)
    rewards = jax.random.normal(jax.random.key(4), (GROUPS * GROUP,))
    valid = jnp.ones(GROUPS * GROUP, bool).at[5].set(False)
    adv, weight = group_advantages(rewards, GROUP, valid), valid.astype(jnp.float32)

    loss, metrics, grads = jax.jit(
        lambda p: gradients.policy_gradient(
            p, trajectory, adv, weight, build.cond(context), setup=setup, micro_batch=micro_batch, ref_params=reference
        )
    )(moved)
    objective = dataclasses.replace(setup.objective, data_beta=0.0)

    def whole(p):
        return loss_fn(
            p,
            trajectory,
            adv,
            build.cond(context),
            None,
            None,
            denoise=setup.denoise,
            process=setup.process,
            objective=objective,
            ref_params=reference,
            sample_weight=weight,
        )

    (expected, expected_metrics), expected_grads = jax.jit(jax.value_and_grad(whole, has_aux=True))(moved)
    # Advantages of a group add up to zero: the loss is a small difference of numbers of size loss_scale.
    assert float(loss) == pytest.approx(float(expected), abs=1e-5 * objective.loss_scale)
    assert float(metrics["ratio_max"]) == pytest.approx(float(expected_metrics["ratio_max"]), rel=1e-5)
    assert float(metrics["ratio_max"]) != 1.0
    _close(grads, expected_grads)


def test_a_dead_micro_batch_does_not_dilute_the_means_over_live_slots():
    _, setup, params, context, trajectory = _setup()
    adv = jnp.linspace(-1.0, 1.0, GROUPS * GROUP)
    weight = jnp.ones(GROUPS * GROUP).at[4:8].set(0.0)  # group 1: a micro-batch of its own, and half of one

    def metrics(micro_batch):
        call = jax.jit(
            lambda p: gradients.policy_gradient(
                p, trajectory, adv, weight, build.cond(context), setup=setup, micro_batch=micro_batch
            )[1]
        )
        return call(jax.tree.map(lambda p: p * 1.01, params))

    small, large = metrics(4), metrics(8)
    for name in ("ratio_mean", "clip_fraction", "policy_loss"):
        assert float(small[name]) == pytest.approx(float(large[name]), abs=1e-5), name
    assert float(small["ratio_mean"]) == pytest.approx(1.0, abs=0.2)
    slots = (GROUPS * GROUP - 4) * trajectory.sigma.shape[0]
    assert int(small["live"]) == int(large["live"]) == slots and small["step_grad_norm"].shape == trajectory.sigma.shape


@pytest.mark.parametrize("levels", ["training", "rollout"])
def test_accumulated_data_gradient_is_the_gradient_of_loss_fn(levels):
    _, setup, params, context, trajectory = _setup(data_beta=0.1)
    objective = Objective(data_beta=0.1, data_levels=levels, loss_scale=10.0)
    x0 = jax.random.normal(jax.random.key(5), (GROUPS, *setup.latent_shape))
    rng = jax.random.key(6)
    _, metrics, grads = jax.jit(
        lambda p: gradients.data_gradient(
            p, rng, x0, build.cond(context), trajectory, setup=setup, objective=objective, group=GROUP, micro_batch=8
        )
    )(params)

    # The same draws, handed to one call on the whole batch.
    whole = DataBatch(x0=jnp.repeat(x0, GROUP, axis=0), cond=build.cond(context))
    if levels == "training":
        key = jax.random.split(jax.random.fold_in(rng, 0))[0]
        noise = [
            jax.random.normal(jax.random.fold_in(jax.random.fold_in(key, 1), row), setup.latent_shape)
            for row in range(GROUPS * GROUP)
        ]
        sigma = setup.process.draw_sigma(jax.random.fold_in(key, 0), (1, GROUPS * GROUP))
        whole = dataclasses.replace(whole, sigma=sigma, noise=jnp.stack(noise))
    else:
        whole = dataclasses.replace(
            whole,
            sigma=jnp.repeat(trajectory.sigma[:, None], GROUPS * GROUP, axis=1),
            noise=trajectory.init_noise,
        )

    def loss(p):
        kinds = {"denoise": setup.denoise, "process": setup.process, "objective": objective}
        return loss_fn(p, None, None, None, whole, None, **kinds)

    (_, expected), expected_grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    assert float(metrics["data_loss"]) == pytest.approx(float(expected["data_loss"]), rel=1e-4)
    _close(grads, expected_grads)


@pytest.mark.parametrize("levels", ["training", "rollout"])
def test_draws_and_dropped_conditions_do_not_depend_on_the_micro_batch(levels):
    _, setup, params, context, trajectory = _setup(data_beta=0.1)
    objective = Objective(data_beta=0.1, data_levels=levels, cond_dropout=0.5, data_draws=2)
    x0 = jax.random.normal(jax.random.key(5), (GROUPS, *setup.latent_shape))

    def of(micro_batch, cond_dropout=0.5):
        kinds = {"setup": setup, "objective": dataclasses.replace(objective, cond_dropout=cond_dropout)}
        return jax.jit(
            lambda p: gradients.data_gradient(
                p, jax.random.key(6), x0, build.cond(context), trajectory, group=GROUP, micro_batch=micro_batch, **kinds
            )
        )(params)

    whole = of(16)
    for micro_batch in (2, 8):
        part = of(micro_batch)
        assert float(part[0]) == pytest.approx(float(whole[0]), rel=1e-5)
        _close(part[2], whole[2])
    assert float(of(16, 0.0)[0]) != pytest.approx(float(whole[0]), rel=1e-5), "nothing was dropped"


def test_replay_is_the_rollout():
    config, setup, params, context, trajectory = _setup()
    gap = np.asarray(gradients.replay_gap(params, trajectory, build.cond(context), setup))
    assert gap.shape == (len(STEPS),) and gap.max() < 1e-3
    train._check_replay(config, update.Update(config, setup), params, trajectory, build.cond(context))


def test_a_replay_that_disagrees_stops_the_run():
    config, setup, params, context, trajectory = _setup()
    moved = jax.tree.map(lambda p: p * 1.1, params)
    with pytest.raises(train.RunStopped, match="rollout and training disagree: at step"):
        train._check_replay(config, update.Update(config, setup), moved, trajectory, build.cond(context))


def _one_update(mesh):
    """Loss and parameters after one whole update on a mesh."""
    config = tiny.config()
    config.rollout.conditions, config.rollout.group_size, config.train.micro_batch = 8, 4, 32
    config.pretrain.batch_size = config.eval.chunk = 8
    config.objective.data_beta = 0.1
    config.mesh.replica, config.mesh.fsdp, config.mesh.context = mesh
    setup = build.build(config)
    optimizer = build.optimizer(config.train)
    s = build.train_state(setup, build.init_params(config, setup.mesh, jax.random.key(0)), optimizer, 6.9)
    context = build.to_global(setup.mesh, np.asarray(jax.random.normal(jax.random.key(2), (8, 10, 8))))
    x0 = build.to_global(setup.mesh, np.asarray(jax.random.normal(jax.random.key(5), (8, *setup.latent_shape))))

    @jax.jit
    def step(s, context, x0):
        cond = build.cond(context)
        samples, trajectory = sample(
            s.params,
            jax.random.key(3),
            cond,
            denoise=setup.denoise,
            process=setup.process,
            shape=(32, *setup.latent_shape),
            num_steps=4,
            record=(0, 2),
        )
        adv = group_advantages(jnp.mean(samples, axis=(1, 2, 3, 4)), 4)
        shared = {"setup": setup, "micro_batch": 32}
        loss_b, _, grads_b = gradients.data_gradient(
            s.params, jax.random.key(7), x0, cond, None, objective=setup.objective, group=4, **shared
        )
        loss_a, _, grads = gradients.policy_gradient(
            s.params, trajectory, adv, jnp.ones(32), cond, others=grads_b, **shared
        )
        s, _ = state.apply_gradients(s, grads, loss_a + loss_b, optimizer, ema_exponent=6.9)
        return s, loss_a + loss_b, grads

    s, loss, grads = step(s, context, x0)
    return float(loss), jax.tree.map(np.asarray, grads), s


@pytest.mark.slow
def test_meshes_agree():
    loss, grads, s = _one_update((8, 1, 1))
    for mesh in ((1, 8, 1), (2, 4, 1), (2, 2, 2), (1, 4, 2)):
        other_loss, other_grads, other = _one_update(mesh)
        assert other_loss == pytest.approx(loss, rel=1e-5)
        _close(other_grads, grads)
        if mesh == (1, 8, 1):
            sharded = [x for x in jax.tree.leaves(other.params) if not x.sharding.is_fully_replicated]
            assert sharded, "fsdp shards nothing"
        _close(other.params, s.params, rtol=1e-3)
