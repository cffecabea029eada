"""A tiny trainable denoiser on top of the data's exact one, for flow processes.

D(x, t) = E_data[x0 | x] + V(t) net(x, t), V the posterior variance of x0 were the data one Gaussian: changing the data
density by a factor exp(h) changes E[x0|x] by about V grad h, so that the network has to learn something of order one,
smooth in t. At initialisation the network is zero and the policy is the data's own (a perfect pre-training).
Knows nothing of rewards. Dims: B batch, D dimensions, H hidden.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from gaussian_mixture import Mixture


@dataclasses.dataclass(frozen=True)
class ResidualDenoiser:
    """denoise(params, x (B,D), t (B,), cond) -> x0 (B,D); cond is not read."""

    data: Mixture
    variance: float
    hidden: int = 24

    def init(self, key: jax.Array) -> dict[str, jax.Array]:
        """Parameters in float32; the last layer is zero."""
        sizes = [self.data.dims + 3, self.hidden, self.hidden, self.data.dims]
        params = {}
        for i, (n_in, n_out) in enumerate(itertools.pairwise(sizes)):
            scale = 0.0 if i == 2 else (1.5 if i == 0 else 1.0) / n_in**0.5
            params[f"w{i}"] = scale * jax.random.normal(jax.random.fold_in(key, i), (n_in, n_out))
            params[f"b{i}"] = jnp.zeros(n_out)
        return params

    def __call__(self, params: Any, x: jax.Array, t: jax.Array, cond: Any) -> jax.Array:
        t_B1 = t[:, None]
        total = (1.0 - t_B1) ** 2 * self.variance + t_B1**2
        h = jnp.concatenate([x / jnp.sqrt(total), jnp.sqrt(t_B1), t_B1, 1.0 - t_B1], axis=1)
        h = jnp.tanh(h @ params["w0"] + params["b0"])
        h = jnp.tanh(h @ params["w1"] + params["b1"])
        correction = self.variance * t_B1**2 / total * (h @ params["w2"] + params["b2"])
        return self.data.denoise(x, t) + correction
