"""The gradients of an iteration, accumulated over trained steps and micro-batches, and the check of the replay.

Each equals jax.grad(loss_fn) of the whole batch up to summation order: `loss_fn` divides by fixed counts, so the mean
over equal parts is the whole (tests/test_gradients.py). Knows the objects of a run (`build.Setup`), not the run.

Dims: B rollouts, G conditions, N rollouts a condition (B = G N), K trained steps, M data draws, m rollouts a
micro-batch.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from ddrl_jax import build
from ddrl_jax.diffusion.guidance import Denoiser, replace_dropped
from ddrl_jax.diffusion.sampler import Trajectory, step_mean
from ddrl_jax.parallel import mesh as mesh_lib
from ddrl_jax.rl.loss import DataBatch, loss_fn
from ddrl_jax.rl.nft import nft_loss, optimality
from ddrl_jax.rl.objective import Objective

PER_ROLLOUT = ("x", "x_next", "mean_old", "prev_x0")  # of a Trajectory: (K, B, ...)
PER_LIVE_SLOT = ("ratio_mean", "clip_fraction")  # metrics of loss_fn that are means over slots of weight > 0


def micro_batches(x_BX: jax.Array, count: int, run: int) -> jax.Array:
    """(B, ...) -> (count, B/count, ...), in runs of neighbours: micro-batch i holds runs i, i + count, i + 2 count, ...

    Strided, so that a batch cut over devices stays where it is.
    """
    shape = x_BX.shape[1:]
    return jnp.moveaxis(x_BX.reshape(-1, count, run, *shape), 1, 0).reshape(count, -1, *shape)


@dataclasses.dataclass(frozen=True)
class MicroBatches:
    """A batch of G groups of N rollouts as `count` micro-batches of m = G N / count: whole groups, or parts of them.

    Every device takes part in each: where one holds fewer than N rollouts of a micro-batch (`shards` devices cut the
    batch), its runs are that short.
    """

    group: int
    count: int
    run: int

    @classmethod
    def of(cls, batch: int, conditions: int, micro_batch: int, shards: int) -> MicroBatches:
        group, count = batch // conditions, batch // micro_batch
        on_a_device = micro_batch // shards if micro_batch % shards == 0 else micro_batch
        return cls(group, count, group if count == 1 else math.gcd(group, on_a_device))

    def rows(self, x_BX: jax.Array, i: jax.Array) -> jax.Array:
        """Micro-batch i of what there is one of a rollout: (m, ...)."""
        if self.count == 1:
            return x_BX
        return jax.lax.dynamic_index_in_dim(micro_batches(x_BX, self.count, self.run), i, 0, keepdims=False)

    def joined(self, x_PmX: jax.Array) -> jax.Array:
        """The batch (B, ...) of its micro-batches (count, m, ...)."""
        shape = x_PmX.shape[2:]
        return jnp.moveaxis(x_PmX.reshape(self.count, -1, self.run, *shape), 0, 1).reshape(-1, *shape)

    def entries(self, x_GX: jax.Array, i: jax.Array) -> jax.Array:
        """Micro-batch i of what there is one of a condition: (g, ...), entry e for rows e m/g to (e+1) m/g - 1."""
        repeats, count = self.group // self.run, self.count  # runs a group, micro-batches
        if repeats % count == 0:  # all conditions are in every micro-batch
            return x_GX
        if count % repeats == 0:  # the conditions are the same in `repeats` micro-batches that follow each other
            x, i = micro_batches(x_GX, count // repeats, 1), i // repeats
        else:
            x = micro_batches(jnp.repeat(x_GX, repeats, axis=0), count, 1)
        return jax.lax.dynamic_index_in_dim(x, i, 0, keepdims=False)

    def conditions(self, cond: dict[str, Any], i: jax.Array) -> dict[str, Any]:
        """Micro-batch i of a condition whose leaves hold one entry a group."""
        return jax.tree.map(lambda x: self.entries(x, i), cond)


def at_step(trajectory: Trajectory, k: jax.Array, setup: build.Setup) -> Trajectory:
    """Recorded step k alone (K = 1), on the device: from the host's memory where the record is there."""

    def at(x: jax.Array | None, field: str) -> jax.Array | None:
        if x is None:
            return None
        x = jax.lax.dynamic_index_in_dim(x, k, 0, keepdims=True)
        return mesh_lib.on_device(setup.mesh, x) if field in PER_ROLLOUT else x

    fields = (*PER_ROLLOUT, "sigma", "sigma_next", "std", "prev_sigma", "step")
    changes: dict[str, Any] = {f: at(getattr(trajectory, f), f) for f in fields}
    return dataclasses.replace(trajectory, **changes, init_noise=None)


def pick_rollouts(step: Trajectory, pick: Callable[[jax.Array], jax.Array]) -> Trajectory:
    """One recorded step's rollouts, chosen by `pick` on arrays with a leading B."""
    chosen: dict[str, Any] = {f: pick(getattr(step, f)[0])[None] for f in PER_ROLLOUT if getattr(step, f) is not None}
    return dataclasses.replace(step, **chosen)


def _accumulate(
    gradient: Callable[[Any], tuple[tuple[jax.Array, dict], Any]], total: Any, items: Any, count: int
) -> tuple[jax.Array, dict, Any]:
    """Mean loss and metrics over a scan of equal parts, and `total` with 1/count of each part's gradient added: the one
    sum in memory beside the gradient under way.

    `*_max` metrics take the largest; those over live slots are weighted by each part's number of them ("live", which
    is summed).
    """

    def body(total: Any, item: Any) -> tuple[Any, Any]:
        (loss, metrics), grads = gradient(item)
        total = jax.tree.map(lambda t, g: t + g / count, total, grads)
        return total, (loss, {k: v for k, v in metrics.items() if k != "parts"})

    total, (losses, metrics) = jax.lax.scan(body, total, items)
    return jnp.mean(losses), _reduced(metrics), total


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
    others: Any = None,
    step_norms: bool = True,
) -> tuple[jax.Array, dict, Any]:
    """Loss, metrics and gradient of the policy term (and the reverse KL, where asked for): a scan over K and over B/m.

    `others`: a gradient that it is added to, the data loss's. `step_norms`: metrics["step_grad_norm"] (K,) is the norm
    of each recorded step's own gradient, the mean over rollouts; the gradient is their mean over K. Takes a gradient's
    memory more than the sum alone where B > m.
    """
    parts = _parts(setup, adv_B.shape[0], build.conditions(cond), micro_batch)
    steps = trajectory.sigma.shape[0]
    objective = dataclasses.replace(setup.objective, data_beta=0.0)
    total = _begun(params, others)

    def of_part(step: Trajectory, i: jax.Array) -> Any:
        pick = functools.partial(_pick, setup, parts, i)

        def loss(p: Any) -> Any:
            value, metrics = loss_fn(
                setup.network(p),
                pick_rollouts(step, pick),
                pick(adv_B),
                parts.conditions(cond, i),
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
        step = at_step(trajectory, k, setup)
        if parts.count > 1 and not step_norms:
            loss, metrics, total = _accumulate(
                lambda i: of_part(step, i), total, jnp.arange(parts.count), parts.count * steps
            )
            return total, (loss, metrics)
        if parts.count > 1:
            zeros = jax.tree.map(jnp.zeros_like, params)
            loss, metrics, grads = _accumulate(lambda i: of_part(step, i), zeros, jnp.arange(parts.count), parts.count)
        else:
            (loss, metrics), grads = of_part(step, jnp.zeros((), int))
            metrics.pop("parts")
        if step_norms:
            metrics["step_grad_norm"] = optax.global_norm(grads)
        return jax.tree.map(lambda t, g: t + g / steps, total, grads), (loss, metrics)

    total, (loss_K, metrics_K) = jax.lax.scan(of_step, total, jnp.arange(steps))
    norm_K = metrics_K.pop("step_grad_norm", None)
    metrics = _reduced(metrics_K) | ({} if norm_K is None else {"step_grad_norm": norm_K})
    return jnp.mean(loss_K), metrics, total


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
    others: Any = None,
) -> tuple[jax.Array, dict, Any]:
    """Loss, metrics and gradient of DiffusionNFT (`rl.nft.nft_loss`), added to `others`: a scan over B/m."""
    batch = adv_B.shape[0]
    parts = _parts(setup, batch, build.conditions(cond), micro_batch)
    r_B = optimality(adv_B, adv_clip)
    draw = _Draws(rng, draws, batch, setup.process)

    def gradient(i: jax.Array) -> Any:
        pick = functools.partial(_pick, setup, parts, i)

        def loss(p: Any) -> Any:
            value, metrics = nft_loss(
                setup.network(p),
                pick(x0_BX),
                pick(r_B),
                parts.conditions(cond, i),
                None,
                denoise=setup.policy_denoise,
                process=setup.process,
                old_params=old_params,
                ref_params=ref_params,
                beta=beta,
                kl_beta=setup.objective.kl_beta,
                sigma=draw.sigma(pick),
                noise=draw.noise(pick, x0_BX.shape[1:]),
                sample_weight=pick(weight_B),
            )
            return setup.objective.loss_scale * value, metrics

        return jax.value_and_grad(loss, has_aux=True)(params)

    total = _begun(params, others)
    return _accumulate(gradient, total, jnp.arange(parts.count), parts.count)


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
    others: Any = None,
) -> tuple[jax.Array, dict, Any]:
    """Loss, metrics and gradient of the data loss, added to `others`; needs no reward. A condition's rollouts share x0.

    Conditions that are not `alive_G` (bool; None: all are) count as 0 in the mean. data_levels "training": one pass of
    M draws over the rollouts. "rollout": at every trained step, at the rollout's level with its initial noise (Table
    3's full variant), a scan over K as well. Every draw is a rollout's own, whatever the micro-batch.
    """
    batch = x0_GX.shape[0] * group
    parts = _parts(setup, batch, x0_GX.shape[0], micro_batch)
    rollout_levels = objective.data_levels == "rollout"
    steps = trajectory.sigma.shape[0] if rollout_levels and trajectory is not None else 1
    # Dropped here, for the whole batch: within `loss_fn` it would depend on the micro-batch.
    drop, objective = objective.cond_dropout, dataclasses.replace(objective, cond_dropout=0.0)

    def gradient(item: Any) -> Any:
        k, i = item

        pick = functools.partial(_pick, setup, parts, i)

        def repeat(x: jax.Array) -> jax.Array:
            own = parts.entries(x, i)
            return jnp.repeat(own, micro_batch // own.shape[0], axis=0)

        x0_BX = _pinned(setup, repeat(x0_GX))
        draw_key, drop_key = jax.random.split(jax.random.fold_in(rng, k))
        own = parts.conditions(cond, i)
        if drop > 0:
            dropped_G = jax.random.bernoulli(drop_key, drop, (x0_GX.shape[0],))
            own = replace_dropped(parts.entries(dropped_G, i), own, setup.null_cond)
        if rollout_levels:
            assert trajectory is not None and trajectory.init_noise is not None, "rollout levels need the rollout"
            sigma = jax.lax.dynamic_index_in_dim(trajectory.sigma, k, 0, keepdims=False)
            sigma_MB, noise = jnp.full((1, micro_batch), sigma), pick(trajectory.init_noise)
        else:
            draw = _Draws(draw_key, objective.data_draws, batch, setup.process)
            sigma_MB, noise = draw.sigma(pick), draw.noise(pick, x0_BX.shape[1:])
        weight_MB = None
        if alive_G is not None:
            weight_MB = setup.process.loss_weight(sigma_MB) * repeat(alive_G)
        data = DataBatch(x0=x0_BX, cond=own, sigma=sigma_MB, noise=noise, weight=weight_MB)

        def loss(p: Any) -> Any:
            return loss_fn(
                setup.network(p),
                None,
                None,
                None,
                data,
                None,
                denoise=setup.denoise,
                process=setup.process,
                objective=objective,
            )

        return jax.value_and_grad(loss, has_aux=True)(params)

    items = (jnp.repeat(jnp.arange(steps), parts.count), jnp.tile(jnp.arange(parts.count), steps))
    total = _begun(params, others)
    return _accumulate(gradient, total, items, steps * parts.count)


def in_parts(denoise: Denoiser, micro_batch: int, mesh: Mesh) -> Denoiser:
    """`denoise` for `micro_batch` samples at a time, at a time's memory: for rollouts, without gradients."""

    def denoise_in_parts(params: Any, x: jax.Array, sigma_B: jax.Array, cond: dict[str, Any]) -> jax.Array:
        groups = next(leaf.shape[0] for leaf in jax.tree.leaves(cond))
        parts = MicroBatches.of(x.shape[0], groups, micro_batch, mesh_lib.batch_shards(mesh))

        def part(i: jax.Array) -> jax.Array:
            own = mesh_lib.pin_latents(mesh, parts.rows(x, i))
            return denoise(params, own, parts.rows(sigma_B, i), parts.conditions(cond, i))

        return parts.joined(jax.lax.map(part, jnp.arange(parts.count)))

    return denoise_in_parts


@dataclasses.dataclass(frozen=True)
class _Draws:
    """M levels and unit noises a rollout, the same in whichever micro-batch it is."""

    key: jax.Array
    draws: int
    batch: int
    process: Any

    def sigma(self, pick: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """(M, m)."""
        sigma_MB = self.process.draw_sigma(jax.random.fold_in(self.key, 0), (self.draws, self.batch))
        return pick(sigma_MB.T).T

    def noise(self, pick: Callable[[jax.Array], jax.Array], shape: tuple[int, ...]) -> jax.Array:
        """(M, m, *S)."""

        def of_row(row: jax.Array, m: jax.Array) -> jax.Array:
            key = jax.random.fold_in(jax.random.fold_in(self.key, 1 + m), row)
            return jax.random.normal(key, shape)

        rows, draws = pick(jnp.arange(self.batch)), jnp.arange(self.draws)
        return jax.vmap(lambda m: jax.vmap(lambda row: of_row(row, m))(rows))(draws)


def _parts(setup: build.Setup, batch: int, conditions: int, micro_batch: int) -> MicroBatches:
    return MicroBatches.of(batch, conditions, micro_batch, mesh_lib.batch_shards(setup.mesh))


def _begun(params: Any, others: Any) -> Any:
    """What a gradient is added to: `others`, or nothing yet."""
    return jax.tree.map(jnp.zeros_like, params) if others is None else others


def _pick(setup: build.Setup, parts: MicroBatches, i: jax.Array, x: jax.Array) -> jax.Array:
    """Micro-batch i of what there is one of a rollout, laid out."""
    return _pinned(setup, parts.rows(x, i))


def _pinned(setup: build.Setup, x: jax.Array) -> jax.Array:
    """Latents of a micro-batch laid out as the network likes them; anything else as it is."""
    return mesh_lib.pin_latents(setup.mesh, x) if x.ndim == 1 + len(setup.latent_shape) else x


def replay_gap(
    params: Any, trajectory: Trajectory, cond: dict[str, Any], setup: build.Setup, denoise: Denoiser | None = None
) -> jax.Array:
    """(K,) max |mean - mean_old| / std of the replayed policy: rollout and training must be the same function.

    `denoise`: what rolled out, where it is not `setup.rollout_denoise`, such as that in parts.
    """
    network = setup.network(params)

    def gap(k: jax.Array) -> jax.Array:
        part = jax.tree.map(lambda x: x[0], at_step(trajectory, k, setup))
        mean, _ = step_mean(
            network,
            part.x,
            part.sigma,
            part.sigma_next,
            part.prev_x0,
            part.prev_sigma,
            cond,
            denoise=denoise or setup.rollout_denoise,
            process=setup.process,
            num_steps=trajectory.num_steps,
        )
        still = part.std == 0.0  # a traced record's slot outside the schedule
        return jnp.where(still, 0.0, jnp.max(jnp.abs(mean - part.mean_old)) / jnp.where(still, 1.0, part.std))

    return jax.lax.map(gap, jnp.arange(trajectory.sigma.shape[0]))
