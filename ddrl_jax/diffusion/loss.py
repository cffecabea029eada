"""The diffusion loss: the forward KL to the data, up to a constant (DDRL, Thm 3.1)."""

from __future__ import annotations

from typing import Any

import chex
import jax.numpy as jnp

from ddrl_jax.diffusion.broadcast import compute_dtype, expand, mean_over_sample
from ddrl_jax.diffusion.guidance import Denoiser
from ddrl_jax.diffusion.process import Process


def diffusion_loss(
    params: Any,
    x0: chex.Array,
    cond: Any,
    sigma: chex.ArrayLike,
    noise: chex.Array,
    *,
    denoise: Denoiser,
    process: Process,
    weight: chex.ArrayLike | None = None,
) -> chex.Array:
    """L = w(sigma) mean_S (denoise(corrupt(x0, sigma, e), sigma) - x0)^2.

    Source: DDRL (Ye et al. 2025, arXiv 2512.04332), Eq. 9; EDM (arXiv 2206.00364), Eq. 2 and Table 1.

    Args:
      params: parameters of the denoiser.
      x0: (B,*S) clean samples.
      cond: condition, handed on as given.
      sigma: (B,) levels of the process; (B,T) where x0 is (B,C,T,H,W) and the denoiser takes a level a frame.
      noise: (B,*S) unit noise.
      denoise: (params, x, sigma, cond) -> x0.
      process: gives corruption and weight.
      weight: replaces process.loss_weight(sigma); sigma's shape.

    Returns:
      (B,) losses, float32 at least.
    """
    chex.assert_equal_shape([x0, noise])
    dtype = compute_dtype(x0, noise)
    sigma = jnp.asarray(sigma, dtype)
    if sigma.ndim == 0:
        sigma = jnp.broadcast_to(sigma, x0.shape[:1])
    x = process.corrupt(x0, sigma, noise)
    error = (denoise(params, x, sigma, cond) - x0).astype(dtype)
    weight = process.loss_weight(sigma) if weight is None else jnp.asarray(weight, dtype)
    return mean_over_sample(expand(weight, error) * error**2)
