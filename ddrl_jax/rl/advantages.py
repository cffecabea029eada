"""Group-normalised advantages. Knows rewards only. Dims: B rollouts = G groups of N, groups consecutive."""

from __future__ import annotations

from typing import Literal

import chex
import jax.numpy as jnp

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
    std "batch" is FlowGRPO's (arXiv 2505.05470) global one, over live members. Several rewards: average their
    normalised advantages with their weights.

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


def _sqrt(square: chex.Array) -> chex.Array:
    """The square root with gradient 0 at 0, where all rewards are equal, and not infinity."""
    zero = square == 0.0
    return jnp.where(zero, 0.0, jnp.sqrt(jnp.where(zero, 1.0, square)))
