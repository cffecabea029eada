"""Advantages: group-normalised, of one reward or several, or (r - Z)/beta. Knows rewards only.

Dims: B rollouts = G groups of N, groups consecutive; R rewards.
"""

from __future__ import annotations

from typing import Any, Literal

import chex
import jax
import jax.numpy as jnp
import numpy as np

from ddrl_jax.diffusion.broadcast import compute_dtype


def group_advantages(
    rewards: chex.ArrayLike,
    group_size: int,
    valid: chex.ArrayLike | None = None,
    *,
    std: Literal["group", "batch"] = "group",
    ddof: int = 1,
    eps: float = 1e-4,
    reward_clip: float | None = None,
) -> chex.Array:
    """A = (r - mean_group r) / (std r + eps).

    Source: GRPO (arXiv 2402.03300), as DDRL (arXiv 2512.04332) uses it in place of lambda((r-Z)/beta) in its Eq. 8;
    std "batch" is FlowGRPO's (arXiv 2505.05470) global one, over live members. Several rewards of
    different scale: `mixed_advantages`.

    Args:
      rewards: (B,), any unit; non-finite ones count as invalid.
      group_size: N, at least 2, divides B.
      valid: (B,) bool, default all. An invalid reward takes the mean of its group's valid ones, so its advantage is 0.
        A group with fewer than two valid members is dead: all of its advantages are 0.
      std: over the group (invalid members filled), or over all valid members of live groups.
      ddof: of the std; 1 is unbiased.
      eps: added to the std.
      reward_clip: clip rewards to [-reward_clip, reward_clip] first; None does not.

    Returns:
      (B,) advantages, float32 at least.

    Raises:
      ValueError: group_size < 2, or it does not divide B; ddof outside [0, N); unknown std; reward_clip not positive.
    """
    rewards = jnp.asarray(rewards)
    rewards = rewards.astype(compute_dtype(rewards))
    chex.assert_rank(rewards, 1)
    num = rewards.shape[0]
    if group_size < 2:
        raise ValueError(f"group_size={group_size}: expected at least 2")
    if num % group_size:
        raise ValueError(f"group_size={group_size}: expected a divisor of the {num} rewards")
    if not 0 <= ddof < group_size:
        raise ValueError(f"ddof={ddof}: expected 0 <= ddof < group_size={group_size}")
    if std not in ("group", "batch"):
        raise ValueError(f"std={std!r}: expected 'group' or 'batch'")
    if reward_clip is not None and not reward_clip > 0.0:
        raise ValueError(f"reward_clip={reward_clip}: expected more than 0, or None")

    valid_B = jnp.isfinite(rewards)
    if valid is not None:
        valid_B &= jnp.asarray(valid, bool)
    if reward_clip is not None:
        rewards = jnp.clip(rewards, -reward_clip, reward_clip)
    valid_GN = valid_B.reshape(-1, group_size)
    r_GN = jnp.where(valid_GN, rewards.reshape(-1, group_size), 0.0)

    count_G1 = valid_GN.sum(axis=1, keepdims=True)
    fill_G1 = r_GN.sum(axis=1, keepdims=True) / jnp.maximum(count_G1, 1)
    r_GN = jnp.where(valid_GN, r_GN, fill_G1)
    live_GN = valid_GN & (count_G1 >= 2)
    centred_GN = r_GN - r_GN.mean(axis=1, keepdims=True)

    if std == "group":
        scale = _sqrt((centred_GN**2).sum(axis=1, keepdims=True) / (group_size - ddof))
    else:
        num_live = live_GN.sum()
        mean = jnp.where(live_GN, r_GN, 0.0).sum() / jnp.maximum(num_live, 1)
        square = jnp.where(live_GN, (r_GN - mean) ** 2, 0.0).sum()
        scale = _sqrt(square / jnp.maximum(num_live - ddof, 1))
    return jnp.where(live_GN, centred_GN / (scale + eps), 0.0).reshape(-1)


def mixed_advantages(
    rewards: chex.ArrayLike,
    weights: chex.ArrayLike,
    group_size: int,
    valid: chex.ArrayLike | None = None,
    **options: Any,
) -> chex.Array:
    """sum_R w A_R / sum_R |w|, each reward normalised within its group first: units do not matter, weights do.

    Args:
      rewards: (R,B), each in its own unit.
      weights: (R,), finite, not all 0; a negative one turns its reward around.
      group_size: N, at least 2, divides B.
      valid: (B,), or (R,B), bool, default all. A sample counts only where all R rewards are valid and finite, for every
        reward alike, and so does its group's being dead.
      **options: of `group_advantages`, the same for every reward.

    Returns:
      (B,) advantages, float32 at least. With one reward and a positive weight: `group_advantages`.

    Raises:
      ValueError: as `group_advantages`; weights not finite or all 0.
    """
    rewards = jnp.asarray(rewards)
    rewards = rewards.astype(compute_dtype(rewards))
    chex.assert_rank(rewards, 2)
    if not isinstance(weights, jax.core.Tracer) and not (np.isfinite(weights).all() and np.any(weights)):
        raise ValueError(f"weights={np.asarray(weights).tolist()}: expected finite numbers, at least one of them not 0")
    weights = jnp.asarray(weights, rewards.dtype)
    chex.assert_shape(weights, rewards.shape[:1])
    valid_B = jnp.isfinite(rewards).all(axis=0)
    if valid is not None:
        valid_B &= jnp.broadcast_to(jnp.asarray(valid, bool), rewards.shape).all(axis=0)
    a_RB = jax.vmap(lambda r: group_advantages(r, group_size, valid_B, **options))(rewards)
    return (weights[:, None] * a_RB).sum(axis=0) / jnp.abs(weights).sum()


def log_partition(
    ref_rewards: chex.ArrayLike, group_size: int, beta: float, valid: chex.ArrayLike | None = None
) -> chex.Array:
    """Z = beta log mean exp(r/beta) over each condition's valid reference rollouts.

    Source: DDRL (arXiv 2512.04332), the normaliser of its Eq. 8, whose expectation is over the reference policy. The
    estimate is consistent, and low on average: log is concave.

    Args:
      ref_rewards: (B,), the rewards of rollouts of the reference; non-finite ones count as invalid.
      group_size: rollouts a condition; need not be that of the policy's rollouts.
      beta: the temperature, in the reward's unit, more than 0.
      valid: (B,) bool, default all.

    Returns:
      (G,) in the reward's unit, NaN where a condition has no valid rollout.

    Raises:
      ValueError: beta not positive; group_size does not divide B.
    """
    r_GN, valid_GN = _grouped(ref_rewards, group_size, beta, valid)
    count_G = valid_GN.sum(axis=1)
    top_G1 = jnp.where(valid_GN, r_GN, -jnp.inf).max(axis=1, keepdims=True)
    top_G1 = jnp.where(count_G[:, None] > 0, top_G1, 0.0)
    terms_GN = jnp.where(valid_GN, jnp.exp((jnp.where(valid_GN, r_GN, top_G1) - top_G1) / beta), 0.0)
    mean_G = terms_GN.sum(axis=1) / jnp.maximum(count_G, 1)
    z_G = top_G1[:, 0] + beta * jnp.log(jnp.where(count_G > 0, mean_G, 1.0))
    return jnp.where(count_G > 0, z_G, jnp.nan)


def partition_advantages(
    rewards: chex.ArrayLike,
    z: chex.ArrayLike,
    group_size: int,
    beta: float,
    valid: chex.ArrayLike | None = None,
) -> chex.Array:
    """(r - Z)/beta, the argument of lambda in DDRL's Eq. 8 (arXiv 2512.04332); `Objective(reward_transform="exp")`.

    Args:
      rewards: (B,); non-finite ones count as invalid.
      z: (G,), of each condition (`log_partition`); a group with a non-finite one is dead.
      group_size: N, divides B.
      beta: the temperature, in the reward's unit, more than 0.
      valid: (B,) bool, default all.

    Returns:
      (B,), float32 at least; 0 for an invalid sample, which needs sample_weight 0 as well: lambda(0) is not 0.

    Raises:
      ValueError: beta not positive; group_size does not divide B.
    """
    r_GN, valid_GN = _grouped(rewards, group_size, beta, valid)
    z_G1 = jnp.asarray(z, r_GN.dtype)[:, None]
    chex.assert_shape(z_G1, (r_GN.shape[0], 1))
    valid_GN &= jnp.isfinite(z_G1)
    return jnp.where(valid_GN, (jnp.where(valid_GN, r_GN - z_G1, 0.0)) / beta, 0.0).reshape(-1)


def _grouped(
    rewards: chex.ArrayLike, group_size: int, beta: float, valid: chex.ArrayLike | None
) -> tuple[chex.Array, chex.Array]:
    rewards = jnp.asarray(rewards)
    rewards = rewards.astype(compute_dtype(rewards))
    chex.assert_rank(rewards, 1)
    if not beta > 0.0:
        raise ValueError(f"beta={beta}: expected more than 0")
    if group_size < 1 or rewards.shape[0] % group_size:
        raise ValueError(f"group_size={group_size}: expected a divisor of the {rewards.shape[0]} rewards")
    valid_B = jnp.isfinite(rewards)
    if valid is not None:
        valid_B &= jnp.asarray(valid, bool)
    return rewards.reshape(-1, group_size), valid_B.reshape(-1, group_size)


def _sqrt(square: chex.Array) -> chex.Array:
    """The square root with gradient 0 at 0, where all rewards are equal, and not infinity."""
    zero = square == 0.0
    return jnp.where(zero, 0.0, jnp.sqrt(jnp.where(zero, 1.0, square)))
