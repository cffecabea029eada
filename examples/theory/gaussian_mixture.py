"""Gaussian mixtures with exact densities: what the theory scripts use as data.

For data p = sum_k w_k N(m_k, s_k^2 I) everything DDRL speaks of is a formula: the density, the noised density, the
denoiser E[x0 | x_t], and, for a reward that is linear in x, the optimum p exp(r/beta)/Z, which is a mixture again.
Knows nothing of training. Dims: C components, D dimensions, B batch.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Mixture:
    """sum_k weights_k N(means_k, stds_k^2 I), hashable: tuples of length C; means hold D-tuples."""

    weights: tuple[float, ...]
    means: tuple[tuple[float, ...], ...]
    stds: tuple[float, ...]

    @property
    def dims(self) -> int:
        return len(self.means[0])

    def log_density(self, x_BD: jax.Array) -> jax.Array:
        """(B,) log p(x)."""
        return jax.nn.logsumexp(self._log_parts(x_BD, 1.0, 0.0), axis=-1)

    def denoise(self, x_BD: jax.Array, t_B: jax.Array) -> jax.Array:
        """E[x0 | x], x = (1-t) x0 + t e: (B,D), exact for every t in (0,1]."""
        t_B1, means_CD, var_C = t_B[:, None], jnp.asarray(self.means), jnp.asarray(self.stds) ** 2
        part_BC = jax.nn.softmax(self._log_parts(x_BD, 1.0 - t_B1, t_B1), axis=-1)
        a_BC = (1.0 - t_B1) * var_C / ((1.0 - t_B1) ** 2 * var_C + t_B1**2)
        # Of one component: m + a (x - (1-t) m).
        shift_BCD = x_BD[:, None, :] - (1.0 - t_B1)[:, :, None] * means_CD
        return (part_BC[..., None] * (means_CD + a_BC[..., None] * shift_BCD)).sum(axis=1)

    def noised_density(self, x_BD: jax.Array, t: float) -> jax.Array:
        """(B,) density of (1-t) x0 + t e."""
        return jnp.exp(jax.nn.logsumexp(self._log_parts(x_BD, 1.0 - t, t), axis=-1))

    def draw(self, key: jax.Array, num: int) -> jax.Array:
        """(num,D) samples."""
        pick_key, noise_key = jax.random.split(key)
        k = jax.random.choice(pick_key, len(self.weights), (num,), p=jnp.asarray(self.weights))
        noise = jax.random.normal(noise_key, (num, self.dims))
        return jnp.asarray(self.means)[k] + jnp.asarray(self.stds)[k][:, None] * noise

    def variance(self) -> float:
        """Of a coordinate, averaged over coordinates."""
        w, m, s = np.array(self.weights), np.array(self.means), np.array(self.stds)
        mean = w @ m
        return float(w @ (s**2) + (w @ (m - mean) ** 2).mean())

    def tilted(self, slope: tuple[float, ...]) -> Mixture:
        """p(x) exp(slope . x)/Z: means move by s_k^2 slope, weights by exp(slope . m_k + s_k^2 slope^2/2)."""
        w, m, s, a = (np.array(v, np.float64) for v in (self.weights, self.means, self.stds, slope))
        log_w = np.log(w) + m @ a + 0.5 * s**2 * (a @ a)
        w = np.exp(log_w - log_w.max())
        m = m + s[:, None] ** 2 * a
        return Mixture(tuple(w / w.sum()), tuple(map(tuple, m)), self.stds)

    def log_normaliser(self, slope: tuple[float, ...]) -> float:
        """log E_p[exp(slope . x)]."""
        w, m, s, a = (np.array(v, np.float64) for v in (self.weights, self.means, self.stds, slope))
        return float(np.log((w * np.exp(m @ a + 0.5 * s**2 * (a @ a))).sum()))

    def _log_parts(self, x_BD: jax.Array, scale: jax.Array | float, noise: jax.Array | float) -> jax.Array:
        """(B,C) log of w_k N(x; scale m_k, scale^2 s_k^2 + noise^2)."""
        means_CD, var_C = jnp.asarray(self.means), jnp.asarray(self.stds) ** 2
        total = scale**2 * var_C + noise**2
        centre = jnp.asarray(scale)[..., None] * means_CD if jnp.ndim(scale) else scale * means_CD
        square_BC = ((x_BD[:, None, :] - centre) ** 2).sum(axis=-1)
        normaliser = 0.5 * self.dims * jnp.log(2.0 * jnp.pi * total)
        return jnp.log(jnp.asarray(self.weights)) - 0.5 * square_BC / total - normaliser
