"""The sampler: one scan over solver steps, K of which are recorded for the policy gradient.

Rollout and replay share `step_mean`, so that at the first update mean and mean_old differ by rounding only.
Dims: B batch, S the sample's shape, n solver steps, K recorded steps.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from ddrl_jax.diffusion.guidance import Denoiser
from ddrl_jax.diffusion.process import Process


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "x",
        "x_next",
        "mean_old",
        "sigma",
        "sigma_next",
        "std",
        "prev_x0",
        "prev_sigma",
        "step",
        "init_noise",
    ],
    meta_fields=["num_steps"],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Trajectory:
    """K recorded steps of a rollout (a pytree).

    A record that `sample` kept in another memory (`keep_at`) has a slot more in x, x_next, mean_old and prev_x0, the
    last, which holds nothing; K is the length of sigma.

    Attributes:
      x: (K,B,*S), what the denoiser saw (EDMChurn: after noising).
      x_next: (K,B,*S), the next step's x, after its noising.
      mean_old: (K,B,*S), the rollout's policy mean, or None: the current mean stands in for it.
      sigma: (K,), the level of x.
      sigma_next: (K,), the un-noised next level.
      std: (K,), the std of x_next; a slot with std 0 has weight 0. None where nothing needs it.
      prev_x0: (K,B,*S), the previous step's x0 (0 for the first step), or None where the solver keeps no history.
      prev_sigma: (K,), the previous step's level (inf for the first step), or None likewise.
      step: (K,) int, the recorded steps, or None.
      init_noise: (B,*S), the unit start noise, or None.
      num_steps: n of the run (static).
    """

    x: chex.Array
    x_next: chex.Array
    mean_old: chex.Array | None = None
    sigma: chex.Array
    sigma_next: chex.Array
    std: Any = None
    prev_x0: chex.Array | None = None
    prev_sigma: chex.Array | None = None
    step: Any = None
    init_noise: chex.Array | None = None
    num_steps: int

    def take_steps(self, index: Any) -> Trajectory:
        """The trajectory of some recorded steps: index any slice or integer array over K."""
        steps = dataclasses.replace(self, init_noise=None)
        steps = jax.tree.map(lambda a: a[index], steps)
        return dataclasses.replace(steps, init_noise=self.init_noise)

    def take_rows(self, index: Any) -> Trajectory:
        """The trajectory of some rollouts: index any slice or integer array over B."""

        def rows(a: chex.Array | None) -> chex.Array | None:
            return None if a is None else a[:, index]

        return dataclasses.replace(
            self,
            x=self.x[:, index],
            x_next=self.x_next[:, index],
            mean_old=rows(self.mean_old),
            prev_x0=rows(self.prev_x0),
            init_noise=None if self.init_noise is None else self.init_noise[index],
        )


def step_mean(
    params: Any,
    x: chex.Array,
    sigma: chex.Array,
    sigma_next: chex.Array,
    prev_x0: chex.Array | None,
    prev_sigma: chex.Array | None,
    cond: Any,
    *,
    denoise: Denoiser,
    process: Process,
    num_steps: int,
) -> tuple[chex.Array, chex.Array]:
    """One policy step at scalar levels: (mean, x0), both (B,*S) in x's dtype."""

    def x0_fn(x: chex.Array, sigma_B: chex.Array) -> chex.Array:
        return jnp.asarray(denoise(params, x, sigma_B, cond), x.dtype)

    x0 = x0_fn(x, jnp.broadcast_to(sigma, x.shape[:1]))
    mean, _ = process.mean_std(x, sigma, sigma_next, x0, prev_x0, prev_sigma, num_steps=num_steps, x0_fn=x0_fn)
    return mean.astype(x.dtype), x0


def sample(
    params: Any,
    rng: chex.PRNGKey | None,
    cond: Any,
    *,
    denoise: Denoiser,
    process: Process,
    shape: Sequence[int],
    num_steps: int,
    record: Sequence[int] | chex.Array | None = None,
    noise: tuple[chex.Array, chex.Array | None] | None = None,
    stochastic: Sequence[bool] | chex.Array | None = None,
    keep_mean: bool = False,
    dtype: Any = None,
    keep_at: Callable[[chex.Array], chex.Array] | None = None,
) -> tuple[chex.Array, Trajectory]:
    """Draws samples from the policy and records some of its steps.

    Each step is x_{i+1} ~ N(mean_theta(x_i), std_i^2) with the process's kernel;
    memory is K recorded steps, whatever the number of steps.

    Args:
      params: parameters of the denoiser.
      rng: key; None when every draw is given by `noise`.
      cond: condition, handed on as given.
      denoise: (params, x (B,*S), sigma (B,), cond) -> x0.
      process: EDMChurn, FlowSDE, FlowCPS or DanceSDE.
      shape: (B,*S).
      num_steps: n, solver steps.
      record: the recorded steps, a tuple or a (K,) int array, which may be traced or hold tracers: K is static and
        another subset compiles nothing. Default: the stochastic ones of range(0, n-1, 2); () for none.
      noise: (x_init_unit (B,*S), churn (n,B,*S)) replaces the draws. EDMChurn noises step i by churn[i] before its
        evaluation; the flows noise step i by churn[i] after it. With churn None it is drawn from rng, with the draws
        that rng alone would give: for groups that share their start noise.
      stochastic: (n,) bool, which may be traced: a step where it is False is the process's own ODE's (its mean without
        noise, std 0), so that another window of stochastic steps compiles nothing (MixGRPO, arXiv 2507.21802). None is
        all. For the flows only.
      keep_mean: record mean_old.
      dtype: of the latents; None is the noise's, else float32. Levels are float32 at least.
      keep_at: puts (B,*S) arrays where the record is to be, such as the host's memory. The record then has one more
        slot, the last, which holds nothing.

    Returns:
      x0 (B,*S) and the trajectory. A traced record's slot outside the schedule, or whose next state is deterministic
      (by the schedule, or by stochastic), has std 0 and weight 0.

    Raises:
      ValueError: a concrete record holds a step outside the schedule or one whose next state is deterministic (which a
        concrete stochastic can make it); a draw is needed and rng is None; noise or stochastic of another shape;
        stochastic for a process that noises before its evaluation.
    """
    shape = tuple(shape)
    levels = process.levels(num_steps)
    seen, stds = process.seen_levels(num_steps), process.step_stds(num_steps)
    mask, ode = _resolve_stochastic(stochastic, process, num_steps)
    record_K = _resolve_record(record, np.where(mask, stds, 0.0) if isinstance(mask, np.ndarray) else stds)
    num_records = record_K.shape[0]

    # Start noise and churn: given, or drawn step by step inside the scan.
    if noise is None and rng is None:
        raise ValueError("rng=None: expected a key, or noise=(x_init_unit, churn)")
    if noise is not None and noise[1] is None and rng is None:
        raise ValueError("rng=None: noise=(x_init_unit, None) draws the churn, expected a key")
    keys: list[Any] = [None, None] if rng is None else list(jax.random.split(rng))
    init_key, churn_key = keys
    if noise is None:
        dtype = jnp.dtype(jnp.float32 if dtype is None else dtype)
        unit_noise = jax.random.normal(init_key, shape, dtype)
    else:
        unit_noise = jnp.asarray(noise[0], dtype)
        dtype = unit_noise.dtype
        churn_shape = (num_steps, *shape) if noise[1] is None else jnp.shape(noise[1])
        if unit_noise.shape != shape or churn_shape != (num_steps, *shape):
            raise ValueError(
                f"noise has shapes {unit_noise.shape}, {'None' if noise[1] is None else churn_shape}: "
                f"expected {shape}, {(num_steps, *shape)} or None"
            )
    given_churn = None if noise is None or noise[1] is None else jnp.asarray(noise[1])

    def churn(i: chex.ArrayLike) -> chex.Array:
        if given_churn is None:
            return jax.random.normal(jax.random.fold_in(churn_key, i), shape, dtype)
        i = jnp.minimum(i, num_steps - 1)
        return jax.lax.dynamic_index_in_dim(given_churn, i, keepdims=False).astype(dtype)

    level_dtype = jnp.result_type(jnp.float32, dtype)
    schedule = {
        "sigma": jnp.asarray(seen, level_dtype),
        "sigma_next": jnp.asarray(levels[1:], level_dtype),
        "std": jnp.asarray(stds, level_dtype),
        "prev_sigma": jnp.asarray(np.append(np.inf, seen[:-1]), level_dtype),
    }
    if mask is not None:
        schedule |= {"stochastic": jnp.asarray(mask), "std": jnp.where(mask, schedule["std"], 0.0)}

    x = process.start(unit_noise, churn(0), num_steps).astype(dtype)
    fields = ["x", "x_next"]
    fields += ["mean_old"] if keep_mean else []
    fields += ["prev_x0"] if process.keeps_history else []
    records = {name: _no_record(num_records, shape, dtype, keep_at) for name in fields}

    def step(carry: Any, inputs: Any) -> tuple[Any, None]:
        x, prev_x0, records = carry
        i, at = inputs
        mean, x0 = step_mean(
            params,
            x,
            at["sigma"],
            at["sigma_next"],
            prev_x0 if process.keeps_history else None,
            at["prev_sigma"] if process.keeps_history else None,
            cond,
            denoise=denoise,
            process=process,
            num_steps=num_steps,
        )
        if ode is not None:
            # Both means come from one evaluation; a recorded step is stochastic, and its mean the replay's.
            ode_mean, _ = ode.mean_std(x, at["sigma"], at["sigma_next"], x0, num_steps=num_steps)
            mean = jnp.where(at["stochastic"], mean, ode_mean.astype(mean.dtype))
        # A process that noises first reaches the next step's x with the next step's noise.
        x_next = mean + at["std"].astype(dtype) * churn(i + 1 if process.noises_first else i)
        values = {"x": x, "x_next": x_next, "mean_old": mean, "prev_x0": prev_x0}
        hit_K = record_K == i
        if keep_at is None:
            hit = hit_K.reshape((-1,) + (1,) * len(shape))
            records = {name: jnp.where(hit, values[name], old) for name, old in records.items()}
        else:  # one slot is written and none is read: all that can be done in another memory
            slot = jnp.where(hit_K.any(), jnp.argmax(hit_K), num_records)
            records = {
                name: jax.lax.dynamic_update_index_in_dim(old, keep_at(values[name]), slot, 0)
                for name, old in records.items()
            }
        return (x_next, x0, records), None

    (x, last_x0, records), _ = jax.lax.scan(step, (x, jnp.zeros_like(x), records), (jnp.arange(num_steps), schedule))
    sample_x0 = process.finish(x, last_x0, lambda x, sigma_B: jnp.asarray(denoise(params, x, sigma_B, cond), dtype))

    inside = (record_K >= 0) & (record_K < num_steps)
    at_K = {name: a[jnp.clip(record_K, 0, num_steps - 1)] for name, a in schedule.items()}
    trajectory = Trajectory(
        x=records["x"],
        x_next=records["x_next"],
        mean_old=records.get("mean_old"),
        sigma=at_K["sigma"],
        sigma_next=at_K["sigma_next"],
        std=jnp.where(inside, at_K["std"], 0.0),
        prev_x0=records.get("prev_x0"),
        prev_sigma=at_K["prev_sigma"] if process.keeps_history else None,
        step=record_K,
        init_noise=unit_noise,
        num_steps=num_steps,
    )
    return sample_x0, trajectory


def _no_record(
    num_records: int, shape: tuple[int, ...], dtype: Any, keep_at: Callable[[chex.Array], chex.Array] | None
) -> chex.Array:
    if keep_at is None:
        return jnp.zeros((num_records, *shape), dtype)
    return jax.lax.broadcast(keep_at(jnp.zeros(shape, dtype)), (num_records + 1,))


def _resolve_stochastic(
    stochastic: Sequence[bool] | chex.Array | None, process: Process, num_steps: int
) -> tuple[np.ndarray | chex.Array | None, Process | None]:
    """(n,) bool, numpy where it is concrete, and the process's ODE; (None, None) where every step keeps its noise."""
    if stochastic is None:
        return None, None
    if process.noises_first:
        raise ValueError(
            f"stochastic is given with {type(process).__name__}, which noises before its evaluation: expected a flow "
            "process"
        )
    if isinstance(stochastic, tuple | list) and any(isinstance(i, jax.core.Tracer) for i in stochastic):
        stochastic = jnp.stack([jnp.asarray(i) for i in stochastic])
    mask = stochastic if isinstance(stochastic, jax.core.Tracer) else np.asarray(stochastic)
    if mask.shape != (num_steps,) or mask.dtype != np.bool_:
        raise ValueError(
            f"stochastic has shape {mask.shape} and dtype {mask.dtype}: expected {(num_steps,)} and bool, one a step"
        )
    return mask, process.ode()  # type: ignore[attr-defined]  # optional in the protocol


def sample_each(
    params: Any,
    keys: chex.PRNGKey,
    cond: Any,
    *,
    denoise: Denoiser,
    process: Process,
    shape: Sequence[int],
    num_steps: int,
) -> chex.Array:
    """One sample a key, (B,*S) float32: sample b depends on keys[b], its condition and params, not on its batch.

    Args:
      params, cond, denoise, process, num_steps: as in `sample`; nothing is recorded.
      keys: (B,) keys.
      shape: S, of one sample.
    """
    noise_BNX = jax.vmap(lambda key: jax.random.normal(key, (num_steps + 1, *shape)))(keys)
    x0, _ = sample(
        params,
        None,  # every draw is given
        cond,
        denoise=denoise,
        process=process,
        shape=(keys.shape[0], *shape),
        num_steps=num_steps,
        record=(),
        noise=(noise_BNX[:, 0], jnp.moveaxis(noise_BNX[:, 1:], 1, 0)),
    )
    return x0


def _resolve_record(record: Sequence[int] | chex.Array | None, stds: np.ndarray) -> chex.Array:
    """(K,) int32. Concrete records are checked against the schedule, traced ones cannot be."""
    num_steps = len(stds)
    if record is None:
        record = tuple(i for i in range(0, num_steps - 1, 2) if stds[i] > 0.0)
    if isinstance(record, tuple | list) and any(isinstance(i, jax.core.Tracer) for i in record):
        record = jnp.stack([jnp.asarray(i) for i in record])
    if isinstance(record, jax.core.Tracer):
        if record.ndim != 1:
            raise ValueError(f"record has shape {record.shape}: expected (K,)")
        return record.astype(jnp.int32)
    steps = np.asarray(record).reshape(-1) if np.size(record) == 0 else np.asarray(record)
    if steps.ndim != 1 or (steps.size and not np.issubdtype(steps.dtype, np.integer)):
        raise ValueError(f"record={record}: expected a tuple or a (K,) array of integers")
    for i in steps.tolist():
        if not 0 <= i < num_steps:
            raise ValueError(f"record holds step {i}: expected steps in [0, {num_steps})")
        if not stds[i] > 0.0:
            raise ValueError(
                f"record holds step {i}, whose next state is deterministic (std 0): it has no policy gradient"
            )
    return jnp.asarray(steps, jnp.int32)
