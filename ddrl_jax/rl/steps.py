"""Which solver steps of an iteration are trained. Knows numbers of steps only, neither processes nor rollouts.

Both functions return a fixed number of steps, so that `sample(record=...)` compiles once for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import chex
import jax
import jax.numpy as jnp


def random_steps(rng: chex.PRNGKey, candidates: Sequence[int], count: int) -> chex.Array:
    """A random subset of steps, without replacement: every subset of that size is equally likely.

    Source: DanceGRPO (arXiv 2505.07818), which trains 60 % of the first n-1 steps, drawn anew.

    Args:
      rng: key; one an iteration gives the whole batch the same steps.
      candidates: static, the steps to draw from.
      count: how many, 1 to len(candidates).

    Returns:
      (count,) int32, ascending.

    Raises:
      ValueError: count out of range; candidates that repeat.
    """
    candidates = tuple(int(i) for i in candidates)
    if len(set(candidates)) != len(candidates):
        raise ValueError(f"candidates={candidates}: expected each step once")
    if not 1 <= count <= len(candidates):
        raise ValueError(f"count={count}: expected 1 to {len(candidates)}, the number of candidates")
    order = jax.random.permutation(rng, jnp.asarray(candidates, jnp.int32))
    return jnp.sort(order[:count])


def window_steps(iteration: chex.ArrayLike, num_steps: int, *, window: int, every: int) -> chex.Array:
    """A window of consecutive steps that slides from the highest noise to the lowest, then starts over.

    Its first step is (iteration // every) mod (num_steps - window + 1).
    Source: MixGRPO (arXiv 2507.21802), progressive sliding with stride 1.

    Args:
      iteration: () int, may be traced, counts from 0.
      num_steps: the steps that the window may cover, 0 to num_steps - 1: those that can be stochastic (all n of
        FlowSDE, n-1 of FlowCPS).
      window: steps in the window, 1 to num_steps.
      every: iterations between two moves, at least 1.

    Returns:
      (window,) int32, ascending.

    Raises:
      ValueError: window or every out of range.
    """
    if not 1 <= window <= num_steps:
        raise ValueError(f"window={window}: expected 1 to {num_steps}, the number of stochastic steps")
    if every < 1:
        raise ValueError(f"every={every}: expected at least 1 iteration")
    first = jnp.asarray(iteration, jnp.int32) // every % (num_steps - window + 1)
    return first + jnp.arange(window, dtype=jnp.int32)
