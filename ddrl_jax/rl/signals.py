"""The three signals of reward hacking (DDRL, arXiv 2512.04332, section 4.2), read off a run's curves. numpy only."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import ArrayLike


@dataclasses.dataclass(frozen=True)
class Signal:
    """One signal.

    Attributes:
      name: "heldout_loss", "reward_slope" or "reward_std".
      value: what was measured, in the unit of the limit; NaN where nothing could be.
      limit: above it the signal alarms.
      alarm: value > limit.
      evidence: one sentence for a reader.
    """

    name: str
    value: float
    limit: float
    alarm: bool
    evidence: str


def heldout_loss_signal(losses: ArrayLike, limit: float = 0.10) -> Signal:
    """Relative rise of the held-out diffusion loss from the first evaluation to the last.

    Args:
      losses: (n,) held-out losses, on fixed data, levels and noise.
      limit: a rise by more than this share alarms.
    """
    losses = _finite(losses)
    if losses.size < 2 or not losses[0] > 0.0:
        return _unmeasured("heldout_loss", limit, "The held-out diffusion loss was measured less than twice.")
    value = float(losses[-1] / losses[0] - 1.0)
    return Signal(
        "heldout_loss",
        value,
        limit,
        value > limit,
        f"The held-out diffusion loss went from {losses[0]:.4g} to {losses[-1]:.4g} "
        f"({100 * value:+.1f} %, limit {100 * limit:+.0f} %).",
    )


def reward_slope_signal(
    rewards: ArrayLike, limit: float = 0.02, *, unit: float = 1.0, window: int | None = None
) -> Signal:
    """Steepest rise of the mean reward: the largest least-squares slope over any window of consecutive updates.

    Args:
      rewards: (n,) mean reward of every update.
      limit: units an update. On the digits, runs that hacked rose by .025 and more within-group standard deviations an
        update, honest ones by .015 at most.
      unit: the reward's unit; the within-group standard deviation at the start makes runs comparable.
      window: updates, default half of the run: a shorter one follows the noise of the batches.
    """
    rewards = _finite(rewards)
    window = max(2, rewards.size // 2) if window is None else window
    if rewards.size < max(window, 4) or not unit > 0.0:
        return _unmeasured("reward_slope", limit, "Too few updates to fit a slope to the reward.")
    time = np.arange(window) - 0.5 * (window - 1)
    slopes = np.lib.stride_tricks.sliding_window_view(rewards, window) @ time / (time @ time) / unit
    start = int(np.argmax(slopes))
    value = float(slopes[start])
    return Signal(
        "reward_slope",
        value,
        limit,
        value > limit,
        f"At its steepest, updates {start} to {start + window - 1}, the reward rose by {value:.3g} "
        f"within-group standard deviations an update (limit {limit:.3g})."
        if unit != 1.0
        else f"At its steepest, updates {start} to {start + window - 1}, the reward rose by {value:.3g} "
        f"an update (limit {limit:.3g}).",
    )


def reward_std_signal(stds: ArrayLike, limit: float = 0.25, *, window: int | None = None) -> Signal:
    """Relative fall of the reward's within-group standard deviation, last window against first.

    Args:
      stds: (n,) within-group standard deviation of every update.
      limit: a fall by more than this share alarms.
      window: updates averaged at each end, default a tenth of the run.
    """
    stds = _finite(stds)
    window = max(1, stds.size // 10) if window is None else window
    if stds.size < 2 * window or not stds[:window].mean() > 0.0:
        return _unmeasured("reward_std", limit, "Too few updates to compare the reward's spread.")
    first, last = float(stds[:window].mean()), float(stds[-window:].mean())
    value = 1.0 - last / first
    return Signal(
        "reward_std",
        value,
        limit,
        value > limit,
        f"The reward's within-group standard deviation went from {first:.3g} to {last:.3g} "
        f"({-100 * value:+.1f} %, limit {-100 * limit:+.0f} %).",
    )


def _finite(values: ArrayLike) -> np.ndarray:
    values = np.asarray(values, np.float64).reshape(-1)
    return values[np.isfinite(values)]


def _unmeasured(name: str, limit: float, evidence: str) -> Signal:
    return Signal(name, float("nan"), limit, False, evidence)
