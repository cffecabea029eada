"""Network preconditioning: x0 = c_skip x + c_out net(c_in x, c_noise). Knows no network and no process."""

from __future__ import annotations

from typing import NamedTuple

import chex
import jax.numpy as jnp


class Preconditioning(NamedTuple):
    """The four coefficients of EDM Eq. 7, each of sigma's shape."""

    c_skip: chex.Array
    c_out: chex.Array
    c_in: chex.Array
    c_noise: chex.Array


def rectified_flow(sigma: chex.ArrayLike) -> Preconditioning:
    """Rectified-flow preconditioning at sigma_data 1 (Cosmos-Predict2.5).

    With s = sigma/(1+sigma): c_skip = c_in = 1-s, c_out = -s, c_noise = s. 1-s is computed as 1/(1+sigma), for
    float32 1-s is off by 0.14 % at sigma 1e5.

    Args:
      sigma: EDM levels, any shape, float32 or float64.
    """
    sigma = jnp.asarray(sigma)
    clean = 1.0 / (1.0 + sigma)
    s = sigma * clean
    return Preconditioning(c_skip=clean, c_out=-s, c_in=clean, c_noise=s)


def edm(sigma: chex.ArrayLike, sigma_data: float = 0.5) -> Preconditioning:
    """EDM preconditioning (Karras et al. 2022, arXiv 2206.00364, Table 1).

    Args:
      sigma: EDM levels, any shape, float32 or float64.
      sigma_data: the data's standard deviation.
    """
    sigma = jnp.asarray(sigma)
    total = sigma**2 + sigma_data**2
    return Preconditioning(
        c_skip=sigma_data**2 / total,
        c_out=sigma * sigma_data / jnp.sqrt(total),
        c_in=1.0 / jnp.sqrt(total),
        c_noise=0.25 * jnp.log(sigma),
    )


def edm_loss_weight(sigma: chex.ArrayLike, sigma_data: float = 1.0) -> chex.Array:
    """lambda(sigma) = (sigma^2 + sigma_data^2)/(sigma sigma_data)^2 on the x0 error (EDM, Table 1)."""
    sigma = jnp.asarray(sigma)
    return (sigma**2 + sigma_data**2) / (sigma * sigma_data) ** 2


def rectified_flow_loss_weight(sigma: chex.ArrayLike) -> chex.Array:
    """(1+sigma)^2/sigma^2: the velocity error seen from x0. Cosmos defines it and trains with the EDM weight."""
    sigma = jnp.asarray(sigma)
    return (1.0 + sigma) ** 2 / sigma**2
