"""From named sub-scores to one reward a sample."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping

import numpy as np


def scorer_of(name: str) -> str:
    """`digits/overall` and `digits` are both the business of the scorer `digits`."""
    return name.partition("/")[0]


def resolve_name(name: str, available: Iterable[str]) -> str:
    """The sub-score that a weight is for. A bare scorer name means its `overall`, or its only sub-score.

    Raises KeyError, in one line, when there is none.
    """
    names = list(available)
    if name in names:
        return name
    if "/" not in name:
        own = [n for n in names if scorer_of(n) == name]
        if f"{name}/overall" in own:
            return f"{name}/overall"
        if len(own) == 1:
            return own[0]
    raise KeyError(f"no score {name!r} among {', '.join(sorted(names)) or 'none'}")


def weighted_names(weights: Mapping[str, float], available: Iterable[str]) -> dict[str, float]:
    """Sub-score -> weight, for every weight that is not 0."""
    names = list(available)
    mixed: dict[str, float] = {}
    for name, weight in weights.items():
        if weight:
            full = resolve_name(name, names)
            mixed[full] = mixed.get(full, 0.0) + float(weight)
    return mixed


def bounded(scores: Mapping[str, np.ndarray], bounds: Mapping[str, tuple[float, float]]) -> dict[str, np.ndarray]:
    """The scores, those with bounds (`resolve_name`) clipped to (low, high). NaN stays; a batch may lack a score."""
    limits = {}
    for name, limit in bounds.items():
        with contextlib.suppress(KeyError):
            limits[resolve_name(name, scores)] = limit
    return {name: np.clip(column, *limits[name]) if name in limits else column for name, column in scores.items()}


def total_reward(scores: Mapping[str, np.ndarray], weights: Mapping[str, float]) -> tuple[np.ndarray, np.ndarray]:
    """Weighted sum of sub-scores.

    Args:
      scores: name -> (B,) float; NaN where a sample has none.
      weights: sub-score or scorer -> weight (`resolve_name`).

    Returns:
      reward: (B,) float32, NaN where invalid.
      valid: (B,) bool: every sub-score with a weight is finite. Nothing is ever counted as 0.

    Raises:
      KeyError: a weight names a score that is not there.
    """
    mixed = weighted_names(weights, scores)
    if not mixed:
        raise KeyError("no score has a weight other than 0")
    total = sum(np.float64(w) * np.asarray(scores[n], np.float64) for n, w in mixed.items())
    total = np.asarray(total)
    valid = np.isfinite(total)
    return np.where(valid, total, np.nan).astype(np.float32), valid


def passes_gates(scores: Mapping[str, np.ndarray], gates: Mapping[str, float]) -> tuple[np.ndarray, np.ndarray]:
    """Whether each sample reaches every gate's minimum, and whether all of the gates' scores are there.

    Args:
      scores: name -> (B,) float; NaN where a sample has none.
      gates: sub-score or scorer -> minimum (`resolve_name`).

    Returns:
      passed, known: (B,) bool.

    Raises:
      KeyError: a gate names a score that is not there.
    """
    columns = [np.asarray(scores[resolve_name(n, scores)], np.float64) for n in gates]
    known = np.logical_and.reduce([np.isfinite(c) for c in columns])
    passed = np.logical_and.reduce([c >= low for c, low in zip(columns, gates.values(), strict=True)])
    return passed & known, known


def gated(rewards: np.ndarray, passed: np.ndarray, valid: np.ndarray, group_size: int) -> np.ndarray:
    """Rewards where a sample that fails a gate gets the lowest valid one of its group: it is never preferred.

    A constant such as 0 would favour it where rewards are negative, and its own reward would still pull.

    Args:
      rewards: (R, B) float, one row a reward.
      passed, valid: (B,) bool.
      group_size: N, divides B.

    Returns:
      (R, B) float32.
    """
    rows = np.asarray(rewards, np.float32)
    grouped = np.where(valid, rows, np.inf).reshape(len(rows), -1, group_size)
    lowest = np.repeat(grouped.min(axis=2), group_size, axis=1)
    return np.where(valid & ~passed, lowest, rows).astype(np.float32)
