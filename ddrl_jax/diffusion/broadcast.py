"""How levels and per-sample numbers meet latents. Dims: B batch, S the sample's shape, T latent frames."""

from __future__ import annotations

import chex
import jax.numpy as jnp


def compute_dtype(*arrays: chex.ArrayLike | None) -> jnp.dtype:
    """The dtype that levels and means are computed in: the arrays' own, float32 at least."""
    present = [jnp.result_type(a) for a in arrays if a is not None]
    return jnp.result_type(jnp.float32, *present)


def expand(level: chex.Array, x: chex.Array) -> chex.Array:
    """Makes a level of shape (), (B,) or (B,T) broadcast against x (B,*S); (B,T) needs x_BCTHW."""
    level = jnp.asarray(level)
    if level.ndim == 0:
        return level
    if level.ndim == 1:
        return level.reshape(level.shape + (1,) * (x.ndim - 1))
    if level.ndim == 2 and x.ndim == 5:
        return level[:, None, :, None, None]
    raise ValueError(
        f"sigma has shape {level.shape} for a sample of shape {x.shape}; expected (), (B,), or (B,T) with x (B,C,T,H,W)"
    )


def mean_over_sample(x: chex.Array) -> chex.Array:
    """(B,*S) -> (B,), the mean over all dimensions of a sample."""
    return jnp.mean(x, axis=tuple(range(1, x.ndim)))


def sum_over_sample(x: chex.Array) -> chex.Array:
    """(B,*S) -> (B,), the sum over all dimensions of a sample."""
    return jnp.sum(x, axis=tuple(range(1, x.ndim)))
