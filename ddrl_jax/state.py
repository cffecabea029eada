"""Train state, optimizer, learning-rate schedule and power-function EMA: pure functions on pytrees."""

from __future__ import annotations

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """What a checkpoint holds. All leaves are arrays. There is no RNG state: keys are fold_in(key, step)."""

    step: jax.Array  # () int32, iterations done
    updates: jax.Array  # () int32, optimizer updates done: what the EMA counts
    params: Any
    opt_state: Any
    ema: Any  # like params, or None
    old: Any  # like params, the policy that rolls out (DiffusionNFT), or None
    skipped: jax.Array  # () int32, updates left out because something was not finite
    skipped_in_a_row: jax.Array  # () int32


def warmup_schedule(learning_rate: float, warmup_steps: int, start: float = 1e-6) -> optax.Schedule:
    """Learning rate of step n (from 0): multiplier linear from `start` to 1 over warmup_steps, then constant.

    Source: the reference's LambdaLinear schedule with f_max = f_min = 1 (specs: golden/ema.npz `lr/*`).
    """
    if warmup_steps == 0:
        return optax.constant_schedule(learning_rate)

    def schedule(step: chex.Numeric) -> chex.Numeric:
        done = jnp.minimum(step / warmup_steps, 1.0)
        return learning_rate * (start + (1.0 - start) * done)

    return schedule


def make_optimizer(
    *,
    learning_rate: float,
    warmup_steps: int,
    b1: float = 0.9,
    b2: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    grad_clip: float = 1.0,
) -> optax.GradientTransformation:
    """Global-norm clipping, then AdamW with decoupled weight decay on every parameter, as the reference's."""
    return optax.chain(
        optax.clip_by_global_norm(grad_clip),
        optax.adamw(warmup_schedule(learning_rate, warmup_steps), b1=b1, b2=b2, eps=eps, weight_decay=weight_decay),
    )


def ema_exponent(rate: float) -> float:
    """gamma of the power-function EMA whose relative width is `rate`: the positive root of
    rate^2 = (gamma + 1) / ((gamma + 2)^2 (gamma + 3)). Karras et al. 2024 (EDM2), Algorithm 2 with rate = sigma_rel."""
    if not 0 < rate < 0.288:
        raise ValueError(f"ema_rate={rate!r}: must be above 0 and below 0.288 (the width of a plain average)")
    t = rate**-2
    return float(max(np.roots([1.0, 7.0, 16.0 - t, 12.0 - t]).real))


def ema_beta(iteration: jax.Array | float, exponent: float) -> jax.Array:
    """Weight of the old average at `iteration` (from 0): (1 - 1/(iteration + 1))^(gamma + 1); 0 at the first, which
    therefore copies the weights. The iteration before its increment, as in the reference (golden/ema.npz)."""
    return (1.0 - 1.0 / (jnp.asarray(iteration) + 1.0)) ** (exponent + 1.0)


def ema_update(ema: Any, params: Any, iteration: jax.Array, exponent: float) -> Any:
    """beta ema + (1 - beta) params, leaf by leaf in the leaf's dtype."""
    beta = ema_beta(iteration, exponent)
    return jax.tree.map(lambda e, p: (beta * e + (1.0 - beta) * p).astype(e.dtype), ema, params)


def init_state(params: Any, optimizer: optax.GradientTransformation, *, ema: bool, old: bool = False) -> TrainState:
    """A state at step 0; EMA and old policy start as copies (the EMA's first update overwrites it anyway)."""
    zero = jnp.zeros((), jnp.int32)
    return TrainState(
        step=zero,
        updates=zero,
        params=params,
        opt_state=optimizer.init(params),
        ema=jax.tree.map(jnp.copy, params) if ema else None,
        old=jax.tree.map(jnp.copy, params) if old else None,
        skipped=zero,
        skipped_in_a_row=zero,
    )


def apply_gradients(
    state: TrainState,
    grads: Any,
    loss: jax.Array,
    optimizer: optax.GradientTransformation,
    *,
    ema_exponent: float | None,
    advance: bool | jax.Array = True,
    old_decay: tuple[float, float] = (1e-3, 0.5),
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One optimizer step. A non-finite loss, gradient or update leaves parameters, moments and EMA as they were and is
    counted. `advance` is False for all but the last update of an iteration, after which an old policy follows: it keeps
    min(old_decay[0] * iteration, old_decay[1]) of itself (DiffusionNFT, arXiv 2509.16117, section 3). Returns the
    state and {"grad_norm", "update_norm", "skipped"}, scalars."""
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    grad_norm, update_norm = optax.global_norm(grads), optax.global_norm(updates)
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm) & jnp.isfinite(update_norm)

    def keep(new: Any, old: Any) -> Any:
        return jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)

    params = keep(optax.apply_updates(state.params, updates), state.params)
    ema = state.ema
    if ema is not None:
        assert ema_exponent is not None, "a state with an EMA needs its exponent"
        ema = keep(ema_update(ema, params, state.updates, ema_exponent), ema)
    old = state.old
    if old is not None:
        kept = jnp.minimum(old_decay[0] * (state.step + 1), old_decay[1])
        followed = jax.tree.map(lambda o, p: (kept * o + (1.0 - kept) * p).astype(o.dtype), old, params)
        old = jax.tree.map(lambda n, o: jnp.where(jnp.asarray(advance) & finite, n, o), followed, old)
    new = TrainState(
        step=state.step + jnp.asarray(advance, jnp.int32),
        updates=state.updates + finite.astype(jnp.int32),
        params=params,
        opt_state=keep(opt_state, state.opt_state),
        ema=ema,
        old=old,
        skipped=state.skipped + (~finite).astype(jnp.int32),
        skipped_in_a_row=jnp.where(finite, 0, state.skipped_in_a_row + 1),
    )
    return new, {"grad_norm": grad_norm, "update_norm": update_norm, "skipped": (~finite).astype(jnp.float32)}
