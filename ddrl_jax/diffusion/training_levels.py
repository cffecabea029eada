"""Laws of the training level sigma: Cosmos' log-normal and its high-sigma strategies; the flow models' logit-normal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import chex
import jax
import jax.numpy as jnp

from ddrl_jax.diffusion.levels import karras_levels

Strategy = Literal[
    "none",
    "uniform80_2000",
    "loguniform200_100000",
    "shift24",
    "balanced_two_heads_v1",
    "hardcoded_20steps",
]


def log_normal_sigma(
    rng: chex.PRNGKey, shape: Sequence[int], *, mean: float, std: float, multiplier: float = 1.0
) -> chex.Array:
    """multiplier * exp(N(mean, std^2)): EDM's law (arXiv 2206.00364, Table 1); the multiplier is Cosmos' for videos."""
    return multiplier * jnp.exp(mean + std * jax.random.normal(rng, tuple(shape)))


def logit_normal_time(rng: chex.PRNGKey, shape: Sequence[int], *, mean: float = 0.0, std: float = 1.0) -> chex.Array:
    """sigmoid(N(mean, std^2)) in (0,1): the flow models' law (arXiv 2403.03206, Eq. 19)."""
    return jax.nn.sigmoid(mean + std * jax.random.normal(rng, tuple(shape)))


def training_sigma(
    rng: chex.PRNGKey,
    shape: Sequence[int],
    *,
    strategy: Strategy = "loguniform200_100000",
    mean: float = math.log(4.0),
    std: float = 1.2,
    multiplier: float = 24**0.5,
    high_sigma_ratio: float = 0.05,
    low_sigma_ratio: float = 0.05,
    sigma_min: float = 0.01,
    sigma_max: float = 200.0,
) -> chex.Array:
    """Draws the training level of Cosmos-Predict2.5 (specs: section 2 of the Cosmos page).

    The base is `log_normal_sigma`; with probability `high_sigma_ratio` it is replaced by a high level:
      none                    never;
      uniform80_2000          uniform on [80, 2000];
      loguniform200_100000    log-uniform on [200, 1e5] (what the released recipes use);
      shift24                 as uniform80_2000, over the base 24 u/(1-u), u uniform on [0,1);
      balanced_two_heads_v1   as loguniform200_100000, then with probability `low_sigma_ratio` uniform on [1e-5, 2];
      hardcoded_20steps       none of the above: uniform over 1e5 and the 21 levels of a 20-step sampling run.
    For images use `log_normal_sigma` alone: they get neither multiplier nor strategy.

    Returns:
      Levels of the given shape in JAX's default float dtype (float64 under x64).
    """
    if strategy not in get_args(Strategy):
        raise ValueError(f"strategy={strategy!r}: expected one of {', '.join(get_args(Strategy))}")
    shape = tuple(shape)
    base_key, pick_key, high_key, low_pick_key, low_key = jax.random.split(rng, 5)
    if strategy == "hardcoded_20steps":
        table = jnp.asarray([1e5, *karras_levels(sigma_min, sigma_max, 20)])
        return table[jax.random.randint(pick_key, shape, 0, table.size)]

    if strategy == "shift24":
        u = jax.random.uniform(base_key, shape)
        sigma = 24.0 * u / (1.0 - u)
    else:
        sigma = log_normal_sigma(base_key, shape, mean=mean, std=std, multiplier=multiplier)
    if strategy == "none":
        return sigma

    if strategy in ("uniform80_2000", "shift24"):
        high = jax.random.uniform(high_key, shape, minval=80.0, maxval=2000.0)
    else:
        high = jnp.exp(jax.random.uniform(high_key, shape, minval=math.log(200.0), maxval=math.log(1e5)))
    sigma = jnp.where(jax.random.uniform(pick_key, shape) < high_sigma_ratio, high, sigma)
    if strategy == "balanced_two_heads_v1":
        low = jax.random.uniform(low_key, shape, minval=1e-5, maxval=2.0)
        sigma = jnp.where(jax.random.uniform(low_pick_key, shape) < low_sigma_ratio, low, sigma)
    return sigma
