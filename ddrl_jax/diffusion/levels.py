"""Noise levels of a sampling run. All are numpy float64, descending, with both ends exact."""

from __future__ import annotations

import numpy as np


def karras_levels(sigma_min: float, sigma_max: float, num_steps: int, rho: float = 7.0) -> np.ndarray:
    """The EDM schedule, (sigma_max^(1/rho) + i/n (sigma_min^(1/rho) - sigma_max^(1/rho)))^rho for i = 0..n.

    Source: Karras et al. 2022, arXiv 2206.00364, Eq. 5, ending on sigma_min and not on zero.

    Args:
      sigma_min, sigma_max: ends, 0 < sigma_min < sigma_max.
      num_steps: n, solver steps, at least 1.
      rho: curvature.

    Returns:
      (num_steps+1,) float64, from exactly sigma_max to exactly sigma_min.
    """
    _check_steps(num_steps)
    if not 0.0 < sigma_min < sigma_max:
        raise ValueError(f"sigma_min={sigma_min}, sigma_max={sigma_max}: expected 0 < sigma_min < sigma_max")
    if not rho > 0.0:
        raise ValueError(f"rho={rho}: expected rho > 0")
    high, low = float(sigma_max) ** (1.0 / rho), float(sigma_min) ** (1.0 / rho)
    levels = (high + np.arange(num_steps + 1) / num_steps * (low - high)) ** rho
    levels[0], levels[-1] = sigma_max, sigma_min
    return levels


def shift_level(u: np.ndarray, shift: float) -> np.ndarray:
    """The flow time shift g(u) = shift u / (1 + (shift-1) u) (Esser et al. 2024, arXiv 2403.03206, Eq. 23)."""
    return shift * u / (1.0 + (shift - 1.0) * u)


def shifted_linear_levels(num_steps: int, shift: float) -> np.ndarray:
    """DanceGRPO's levels: g(linspace(1, 0, n+1)). Returns (num_steps+1,) float64 from 1 to 0."""
    _check_steps(num_steps)
    levels = shift_level(np.linspace(1.0, 0.0, num_steps + 1), shift)
    levels[0], levels[-1] = 1.0, 0.0
    return levels


def flow_match_euler_levels(num_steps: int, shift: float) -> np.ndarray:
    """diffusers' flow-match Euler levels, shifted twice: g(linspace(g(1), g(1/1000), n)), then 0.

    The second shift is the scheduler's own: it builds its table of shifted levels and shifts the ones it picks again.
    Returns (num_steps+1,) float64 from 1 to 0.
    """
    _check_steps(num_steps)
    ends = shift_level(np.array([1.0, 1.0 / 1000.0]), shift)
    levels = np.append(shift_level(np.linspace(ends[0], ends[1], num_steps), shift), 0.0)
    levels[0] = 1.0
    return levels


def _check_steps(num_steps: int) -> None:
    if num_steps < 1:
        raise ValueError(f"num_steps={num_steps}: expected at least 1")
