"""Which members of a group are trained on. Knows rewards only. Dims: B rollouts = G groups of N, groups consecutive."""

from __future__ import annotations

import chex
import jax.numpy as jnp

from ddrl_jax.diffusion.broadcast import compute_dtype


def best_of_weights(
    rewards: chex.ArrayLike, group_size: int, keep: int, valid: chex.ArrayLike | None = None
) -> chex.Array:
    """The sample weight that trains on the keep/2 best and the keep/2 worst members of each group.

    A kept member weighs N/keep, so that `loss_fn`'s mean over all rollouts is the mean over the kept ones.
    Source: DanceGRPO (arXiv 2505.07818), its best-of-N selection.

    Args:
      rewards: (B,); non-finite ones count as invalid.
      group_size: N, divides B.
      keep: even, 2 to N.
      valid: (B,) bool, default all. Invalid members are never kept. Where fewer than `keep` are valid, all of them are,
        each once; a group with fewer than two has weight 0.

    Returns:
      (B,), float32 at least: N/keep or 0. Equal rewards rank by their index, the earlier one as the better.

    Raises:
      ValueError: keep odd or out of range; group_size does not divide B.
    """
    r_GN, valid_GN = _grouped(rewards, group_size, valid)
    if keep % 2 or not 2 <= keep <= group_size:
        raise ValueError(f"keep={keep}: expected an even number, 2 to group_size={group_size}")
    count_G1 = valid_GN.sum(axis=1, keepdims=True)
    best_first_GN = jnp.argsort(jnp.where(valid_GN, -r_GN, jnp.inf), axis=1, stable=True)
    rank_GN = jnp.argsort(best_first_GN, axis=1, stable=True)  # the inverse permutation
    ends_GN = (rank_GN < keep // 2) | (rank_GN >= count_G1 - keep // 2)
    kept_GN = valid_GN & ends_GN & (count_G1 >= 2)
    return jnp.where(kept_GN, jnp.asarray(group_size / keep, r_GN.dtype), 0.0).reshape(-1)


def best_of_group(
    rewards: chex.ArrayLike, group_size: int, valid: chex.ArrayLike | None = None
) -> tuple[chex.Array, chex.Array]:
    """The best member of each group, for fine-tuning on it alone.

    Source: RAFT (Dong et al. 2023, arXiv 2304.06767), its reward-ranked best-of-K.

    Args:
      rewards: (B,); non-finite ones count as invalid.
      group_size: N, divides B.
      valid: (B,) bool, default all.

    Returns:
      index (G,) int32 into B, of the best valid member (the first of equals), and alive (G,) bool: at least two members
      are valid. A dead group's index is still one of its own members.

    Raises:
      ValueError: group_size does not divide B.
    """
    r_GN, valid_GN = _grouped(rewards, group_size, valid)
    best_G = jnp.argmax(jnp.where(valid_GN, r_GN, -jnp.inf), axis=1).astype(jnp.int32)
    first_G = jnp.arange(r_GN.shape[0], dtype=jnp.int32) * group_size
    return first_G + best_G, valid_GN.sum(axis=1) >= 2


def _grouped(rewards: chex.ArrayLike, group_size: int, valid: chex.ArrayLike | None) -> tuple[chex.Array, chex.Array]:
    rewards = jnp.asarray(rewards)
    rewards = rewards.astype(compute_dtype(rewards))
    chex.assert_rank(rewards, 1)
    if group_size < 2 or rewards.shape[0] % group_size:
        raise ValueError(
            f"group_size={group_size}: expected at least 2 and a divisor of the {rewards.shape[0]} rewards"
        )
    valid_B = jnp.isfinite(rewards)
    if valid is not None:
        valid_B &= jnp.asarray(valid, bool)
    return rewards.reshape(-1, group_size), valid_B.reshape(-1, group_size)
