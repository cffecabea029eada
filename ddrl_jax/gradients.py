"""The gradients of an iteration, accumulated over trained steps and micro-batches, and the check of the replay.

Each equals jax.grad(loss_fn) of the whole batch up to summation order: `loss_fn` divides by fixed counts, so the mean
over equal parts is the whole (tests/test_gradients.py). Knows the objects of a run (`build.Setup`), not the run.

Dims: B rollouts, G conditions, N rollouts a condition (B = G N), K trained steps, M data draws, m rollouts a
micro-batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ddrl_jax import build
from ddrl_jax.diffusion.sampler import Trajectory, step_mean
from ddrl_jax.rl.loss import DataBatch, loss_fn
from ddrl_jax.rl.nft import nft_loss, optimality
from ddrl_jax.rl.objective import Objective

PER_ROLLOUT = ("x", "x_next", "mean_old", "prev_x0")  # of a Trajectory: (K, B, ...)
PER_LIVE_SLOT = ("ratio_mean", "clip_fraction")  # metrics of loss_fn that are means over slots of weight > 0


def micro_batches(x_BX: jax.Array, count: int, group: int) -> jax.Array:
    """(B, ...) -> (count, B/count, ...), groups whole: micro-batch i holds groups i, i + count, i + 2 count, ...

    Strided, so that a batch cut over devices stays where it is.
    """
    shape = x_BX.shape[1:]
    return jnp.moveaxis(x_BX.reshape(-1, count, group, *shape), 1, 0).reshape(count, -1, *shape)


def pick_conditions(cond: dict[str, Any], count: int, i: jax.Array) -> dict[str, Any]:
    """Micro-batch i of `count` of a condition whose leaves hold one entry a group."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(micro_batches(x, count, 1), i, 0, keepdims=False), cond)


def slice_trajectory(trajectory: Trajectory, k: jax.Array, pick: Callable[[jax.Array], jax.Array]) -> Trajectory:
    """Recorded step k alone (K = 1), rollouts chosen by `pick` on arrays with a leading B."""

    def at(x: jax.Array | None, rollouts: bool) -> jax.Array | None:
        if x is None:
            return None
        x = jax.lax.dynamic_index_in_dim(x, k, 0, keepdims=False)
        return (pick(x) if rollouts else x)[None]

    changes: dict[str, Any] = {f: at(getattr(trajectory, f), True) for f in PER_ROLLOUT}
    changes |= {f: at(getattr(trajectory, f), False) for f in ("sigma", "sigma_next", "std", "prev_sigma", "step")}
    noise = None if trajectory.init_noise is None else pick(trajectory.init_noise)
    return dataclasses.replace(trajectory, **changes, init_noise=noise)


def _accumulate(
    gradient: Callable[[Any], tuple[tuple[jax.Array, dict], Any]], params: Any, items: Any, count: int
) -> tuple[jax.Array, dict, Any]:
    """Mean loss, metrics and gradient over a scan of `count` equal parts.

    `*_max` metrics take the largest; those over live slots are weighted by each part's number of them ("live", which
    is summed).
    """

    def body(carry: Any, item: Any) -> tuple[Any, Any]:
        (loss, metrics), grads = gradient(item)
        return jax.tree.map(jnp.add, carry, grads), (loss, {k: v for k, v in metrics.items() if k != "parts"})

    grads, (losses, metrics) = jax.lax.scan(body, jax.tree.map(jnp.zeros_like, params), items)
    return jnp.mean(losses), _reduced(metrics), jax.tree.map(lambda g: g / count, grads)


def _reduced(metrics: dict[str, jax.Array]) -> dict[str, jax.Array]:
    live = metrics.get("live", jnp.ones(()))
    mean = {}
    for name, value in metrics.items():
        if name == "live":
            mean[name] = jnp.sum(value)
        elif name.endswith("_max"):
            mean[name] = jnp.max(value)
        elif name in PER_LIVE_SLOT:
            mean[name] = jnp.sum(value * live) / jnp.maximum(jnp.sum(live), 1)
        else:
            mean[name] = jnp.mean(value)
    return mean


def policy_gradient(
    params: Any,
    trajectory: Trajectory,
    adv_B: jax.Array,
    weight_B: jax.Array,
    cond: dict[str, Any],
    *,
    setup: build.Setup,
    micro_batch: int,
    ref_params: Any = None,
) -> tuple[jax.Array, dict, Any]:
    """Loss, metrics and gradient of the policy term (and the reverse KL, where asked for): a scan over K of scans over
    B/m. metrics["step_grad_norm"] (K,) is the norm of each recorded step's own gradient, the mean over rollouts; the
    gradient is their mean over K. Takes one gradient's memory more than the sum alone would where B > m."""
    group = adv_B.shape[0] // build.conditions(cond)
    parts, steps = adv_B.shape[0] // micro_batch, trajectory.sigma.shape[0]
    objective = dataclasses.replace(setup.objective, data_beta=0.0)

    def of_part(k: jax.Array, i: jax.Array) -> Any:
        def pick(x: jax.Array) -> jax.Array:
            return jax.lax.dynamic_index_in_dim(micro_batches(x, parts, group), i, 0, keepdims=False)

        def loss(p: Any) -> Any:
            value, metrics = loss_fn(
                setup.network(p),
                slice_trajectory(trajectory, k, pick),
                pick(adv_B),
                pick_conditions(cond, parts, i),
                None,
                None,
                denoise=setup.policy_denoise,
                process=setup.process,
                objective=objective,
                ref_params=ref_params,
                sample_weight=pick(weight_B),
            )
            return value, metrics | {"live": jnp.sum(pick(weight_B) != 0)}

        return jax.value_and_grad(loss, has_aux=True)(params)

    def of_step(total: Any, k: jax.Array) -> Any:
        loss, metrics, grads = _accumulate(lambda i: of_part(k, i), params, jnp.arange(parts), parts)
        metrics["step_grad_norm"] = optax.global_norm(grads)
        return jax.tree.map(jnp.add, total, grads), (loss, metrics)

    grads, (loss_K, metrics_K) = jax.lax.scan(of_step, jax.tree.map(jnp.zeros_like, params), jnp.arange(steps))
    norm_K = metrics_K.pop("step_grad_norm")
    metrics = _reduced(metrics_K) | {"step_grad_norm": norm_K}
    return jnp.mean(loss_K), metrics, jax.tree.map(lambda g: g / steps, grads)


def nft_gradient(
    params: Any,
    rng: jax.Array,
    x0_BX: jax.Array,
    adv_B: jax.Array,
    weight_B: jax.Array,
    cond: dict[str, Any],
    *,
    setup: build.Setup,
    micro_batch: int,
    old_params: Any,
    ref_params: Any,
    beta: float,
    adv_clip: float,
    draws: int,
) -> tuple[jax.Array, dict, Any]:
    """Loss, metrics and gradient of DiffusionNFT (`rl.nft.nft_loss`): a scan over B/m."""
    group, parts = adv_B.shape[0] // build.conditions(cond), adv_B.shape[0] // micro_batch
    r_B = optimality(adv_B, adv_clip)

    def gradient(i: jax.Array) -> Any:
        def pick(x: jax.Array) -> jax.Array:
            return jax.lax.dynamic_index_in_dim(micro_batches(x, parts, group), i, 0, keepdims=False)

        def loss(p: Any) -> Any:
            value, metrics = nft_loss(
                setup.network(p),
                pick(x0_BX),
                pick(r_B),
                pick_conditions(cond, parts, i),
                jax.random.fold_in(rng, i),
                denoise=setup.policy_denoise,
                process=setup.process,
                old_params=old_params,
                ref_params=ref_params,
                beta=beta,
                kl_beta=setup.objective.kl_beta,
                draws=draws,
                sample_weight=pick(weight_B),
            )
            return setup.objective.loss_scale * value, metrics

        return jax.value_and_grad(loss, has_aux=True)(params)

    return _accumulate(gradient, params, jnp.arange(parts), parts)


def data_gradient(
    params: Any,
    rng: jax.Array,
    x0_GX: jax.Array,
    cond: dict[str, Any],
    trajectory: Trajectory | None,
    *,
    setup: build.Setup,
    objective: Objective,
    group: int,
    micro_batch: int,
    alive_G: jax.Array | None = None,
) -> tuple[jax.Array, dict, Any]:
    """Loss, metrics and gradient of the data loss; needs no reward. A condition's N rollouts share x0.

    Conditions that are not `alive_G` (bool; None: all are) count as 0 in the mean. data_levels "training": one pass of
    M draws over the rollouts. "rollout": at every trained step, at the rollout's level with its initial noise (Table
    3's full variant), a scan over K as well.
    """
    parts = x0_GX.shape[0] * group // micro_batch
    rollout_levels = objective.data_levels == "rollout"
    steps = trajectory.sigma.shape[0] if rollout_levels and trajectory is not None else 1

    def gradient(item: Any) -> Any:
        k, i = item

        def pick(x: jax.Array, size: int = 1) -> jax.Array:
            return jax.lax.dynamic_index_in_dim(micro_batches(x, parts, size), i, 0, keepdims=False)

        x0_BX = jnp.repeat(pick(x0_GX), group, axis=0)
        data = DataBatch(x0=x0_BX, cond=pick_conditions(cond, parts, i), null_cond=setup.null_cond)
        draw_rng = jax.random.fold_in(rng, k * parts + i)
        if alive_G is not None:
            sigma_key, draw_rng = jax.random.split(draw_rng)
            sigma_MB = setup.process.draw_sigma(sigma_key, (objective.data_draws, x0_BX.shape[0]))
            weight_MB = setup.process.loss_weight(sigma_MB) * jnp.repeat(pick(alive_G), group)
            data = dataclasses.replace(data, sigma=sigma_MB, weight=weight_MB)
        if rollout_levels:
            assert trajectory is not None and trajectory.init_noise is not None, "rollout levels need the rollout"
            sigma = jax.lax.dynamic_index_in_dim(trajectory.sigma, k, 0, keepdims=False)
            data = dataclasses.replace(
                data, sigma=jnp.full((1, micro_batch), sigma), noise=pick(trajectory.init_noise, group)
            )

        def loss(p: Any) -> Any:
            return loss_fn(
                setup.network(p),
                None,
                None,
                None,
                data,
                draw_rng,
                denoise=setup.denoise,
                process=setup.process,
                objective=objective,
            )

        return jax.value_and_grad(loss, has_aux=True)(params)

    items = (jnp.repeat(jnp.arange(steps), parts), jnp.tile(jnp.arange(parts), steps))
    return _accumulate(gradient, params, items, steps * parts)


def replay_gap(params: Any, trajectory: Trajectory, cond: dict[str, Any], setup: build.Setup) -> jax.Array:
    """(K,) max |mean - mean_old| / std of the replayed policy: rollout and training must be the same function."""

    network = setup.network(params)

    def gap(part: Trajectory) -> jax.Array:
        mean, _ = step_mean(
            network,
            part.x,
            part.sigma,
            part.sigma_next,
            part.prev_x0,
            part.prev_sigma,
            cond,
            denoise=setup.rollout_denoise,
            process=setup.process,
            num_steps=trajectory.num_steps,
        )
        still = part.std == 0.0  # a traced record's slot outside the schedule
        return jnp.where(still, 0.0, jnp.max(jnp.abs(mean - part.mean_old)) / jnp.where(still, 1.0, part.std))

    return jax.lax.map(gap, dataclasses.replace(trajectory, init_noise=None))


def add(a: Any, b: Any) -> Any:
    """The sum of two trees; b where a is None."""
    return b if a is None else jax.tree.map(jnp.add, a, b)
