"""One solver step of the EDM probability-flow ODE, from level s to level t < s. These are the policy means.

All three are exponential integrators in l = -log sigma, where the ODE is dx/dl = x0(x, sigma) - x.
Levels broadcast against x already; every argument has x's float dtype.
"""

from __future__ import annotations

from collections.abc import Callable

import chex
import jax.numpy as jnp


def euler_step(x: chex.Array, s: chex.Array, t: chex.Array, x0: chex.Array) -> chex.Array:
    """mu = (t/s) x + (1 - t/s) x0, the solver "1euler" (DDIM; EDM, arXiv 2206.00364, Algorithm 2 at first order)."""
    return t / s * x + (1.0 - t / s) * x0


def two_point_step(
    x: chex.Array,
    s: chex.Array,
    t: chex.Array,
    x0: chex.Array,
    other_x0: chex.Array,
    inverse_c: chex.Array,
) -> chex.Array:
    """mu = exp(-h) x + h [(f1 - f2/c) x0(s) + (f2/c) x0(p)], h = log(s/t), c = (l(p) - l(s))/h.

    f1 = expm1(-h)/(-h) and f2 = (f1 - 1)/(-h). inverse_c = 0 makes it the Euler step, exactly.
    """
    h = jnp.log(s / t)
    f1 = jnp.expm1(-h) / -h
    f2 = (f1 - 1.0) / -h * inverse_c
    return t / s * x + h * ((f1 - f2) * x0 + f2 * other_x0)


def adams_bashforth_step(
    x: chex.Array,
    s: chex.Array,
    t: chex.Array,
    x0: chex.Array,
    prev_x0: chex.Array,
    prev_s: chex.Array,
) -> chex.Array:
    """Exponential Adams-Bashforth, "2ab": the other point is the previous *noised* level and its x0 (arXiv 2308.02157).

    A non-finite prev_s means no history and gives the Euler step: both it and prev_x0 are replaced before any
    arithmetic, so that values and gradients stay finite.
    """
    has_history = jnp.isfinite(prev_s)
    safe_prev_s = jnp.where(has_history, prev_s, 2.0 * s)
    safe_prev_x0 = jnp.where(has_history, prev_x0, 0.0)
    inverse_c = jnp.where(has_history, jnp.log(s / t) / jnp.log(s / safe_prev_s), 0.0)
    return two_point_step(x, s, t, x0, safe_prev_x0, inverse_c)


def midpoint_step(
    x: chex.Array,
    s: chex.Array,
    t: chex.Array,
    x0: chex.Array,
    x0_at: Callable[[chex.Array, chex.Array], chex.Array],
) -> chex.Array:
    """Exponential midpoint, "2mid": Euler to m = sqrt(s t), x0 there, then the formula with m in place of p (c = 1/2).

    Args:
      x0_at: (x_m, m) -> x0, m of the shape of s.
    """
    m = jnp.sqrt(s * t)
    x0_m = x0_at(euler_step(x, s, m, x0), m)
    return two_point_step(x, s, t, x0, x0_m, jnp.full_like(m, 2.0))
