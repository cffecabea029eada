"""Log ratio of two Gaussian policies with one std, and the KL to a reference. Dims: B rollouts, S a sample's shape."""

from __future__ import annotations

from typing import Literal

import chex
import jax.numpy as jnp

from ddrl_jax.diffusion.broadcast import expand, mean_over_sample, sum_over_sample

LogRatio = Literal["mean_square", "gaussian", "gaussian_sum"]
KL = Literal["mean_square", "gaussian", "flow_grpo"]


def log_ratio(
    mean: chex.Array,
    mean_old: chex.Array,
    x_next: chex.Array,
    std: chex.Array,
    kind: LogRatio = "mean_square",
) -> chex.Array:
    """log p(x'|mean) - log p(x'|mean_old) = [(x'-mean_old)^2 - (x'-mean)^2] / (2 std^2).

    Computed as d (2e - d), d = mean - mean_old, e = x' - mean_old: a difference of two squares would lose all of a
    small policy change to rounding.

    Args:
      mean, mean_old, x_next: (B,*S).
      std: () or (B,); 0 stands for a deterministic step, whose log ratio has weight 0 and must only be finite.
      kind: "mean_square" is the reference implementation's, mean over dimensions without 1/(2 std^2); "gaussian" the
        mean over dimensions; "gaussian_sum" the sum, the true log ratio.

    Returns:
      (B,).
    """
    d = mean - mean_old
    terms = d * (2.0 * (x_next - mean_old) - d)
    if kind == "mean_square":
        return mean_over_sample(terms)
    terms = terms / (2.0 * _safe(expand(std, terms)) ** 2)
    return mean_over_sample(terms) if kind == "gaussian" else sum_over_sample(terms)


def gaussian_kl(
    mean: chex.Array,
    mean_ref: chex.Array,
    std: chex.Array,
    level_change: chex.Array,
    kind: KL = "mean_square",
    *,
    summed: bool = False,
) -> chex.Array:
    """KL(N(mean, std^2) || N(mean_ref, std^2)) = (mean - mean_ref)^2 / (2 std^2).

    Args:
      mean, mean_ref: (B,*S).
      std: () or (B,).
      level_change: () or (B,), |sigma_next - sigma|, read by "flow_grpo".
      kind: "mean_square" is the reference implementation's, without 1/(2 std^2); "gaussian"; "flow_grpo" is FlowGRPO's
        (arXiv 2505.05470), whose std leaves out the step length: |sigma_next - sigma| times "gaussian".
      summed: "gaussian" sums over dimensions, to go with the log ratio "gaussian_sum".

    Returns:
      (B,).
    """
    square = (mean - mean_ref) ** 2
    if kind == "mean_square":
        return mean_over_sample(square)
    terms = square / (2.0 * _safe(expand(std, square)) ** 2)
    if kind == "flow_grpo":
        return level_change * mean_over_sample(terms)
    return sum_over_sample(terms) if summed else mean_over_sample(terms)


def _safe(std: chex.Array) -> chex.Array:
    return jnp.where(std > 0.0, std, 1.0)
