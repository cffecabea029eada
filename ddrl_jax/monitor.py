"""The hacking monitor: what the lines of metrics.jsonl say about a run, during it and after.

`read_signals` turns a run's lines into the five signals of rl.signals; `is_hacked` says whether they are enough to act
on while the run goes on. Knows plain rows and limits; must not know training, evaluation, or what is done about it
(`monitor.on_hacking`: train.py). The report's verdict is a rule of its own: it comes after the run and has what this
one has not, judges and intervals.

The rule for acting, `is_hacked`:
- the held-out loss beyond its limit is enough. It is the paper's own criterion (arXiv 2512.04332, sec. 4.2), it is
  measured on fixed data with fixed noise, and nothing that is good for the reward needs it to rise that far;
- otherwise the reward must have risen and two of the other four must alarm. Each of them alone has an honest cause: a
  steep rise is an easy reward, a fallen spread a policy that got its prompts right, a fallen sub-score a trade the
  weights asked for, changed pictures an ugly base. Two at once rarely have. Without a rise of the reward the run is
  failing, which is not hacking, and stopping it is its owner's decision.
Judges are not asked: where there are any, they must stay independent of what training does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ddrl_jax.rl.signals import (
    Signal,
    heldout_loss_signal,
    image_statistics_signal,
    reward_slope_signal,
    reward_std_signal,
    sub_score_signal,
)

# Updates. On the digits a clean run's first steps reach the slope's limit over 12 to 40 (.045 to .020; a hacked run's
# .037 to .026) and not over 50 (.015; hacked .022), where the noise of the prompts is a tenth of the limit.
SLOPE_WINDOW = 50
HARD = "heldout_loss"
IMAGE, SUB_STD = "image/", "sub_std/"


def read_signals(
    rows: Iterable[Mapping[str, Any]],
    monitor_config: Mapping[str, Any],
    weights: Mapping[str, float] | None = None,
) -> list[Signal]:
    """The five signals, all and in this order: heldout_loss, reward_slope, reward_std, sub_scores, image_statistics.

    What could not be measured has the value NaN and no alarm.

    Args:
      rows: lines of metrics.jsonl in order. Read are, of stage "ddrl", reward, reward_std and sub_std/<scorer>/<name>;
        of stage "eval", reward, heldout_loss, the sub-scores as <scorer>/<name>, and image/<statistic>. A missing value
        may be absent or None. Sub-scores are measured in their within-group std of the first update; in rows that do
        not have it, in the reward's, which is larger for a plain sum.
      monitor_config: heldout_loss_limit, reward_slope_limit, reward_std_limit, sub_score_limit, image_limit.
      weights: config.reward.weights: only weighted sub-scores count, and one with a negative weight should fall. A
        weight on a whole scorer stands for every sub-score it has. None: all count.

    Raises:
      KeyError: `monitor_config` lacks a limit.
    """
    rows = list(rows)
    ddrl, evals = ([r for r in rows if r.get("stage") == stage] for stage in ("ddrl", "eval"))
    reward, spread = _column(ddrl, "reward"), _column(ddrl, "reward_std")
    unit = _first(spread)
    subs = _weighted(evals, weights)
    return [
        heldout_loss_signal(_column(evals, "heldout_loss"), monitor_config["heldout_loss_limit"]),
        reward_slope_signal(
            reward,
            monitor_config["reward_slope_limit"],
            unit=unit,
            window=max(SLOPE_WINDOW, int(np.isfinite(reward).sum()) // 2),
        ),
        reward_std_signal(spread, monitor_config["reward_std_limit"]),
        sub_score_signal(
            _column(evals, "reward"),
            {shown: sign * _column(evals, name) for shown, (name, sign) in subs.items()},
            {shown: _first(_column(ddrl, SUB_STD + name), unit) for shown, (name, _) in subs.items()},
            monitor_config["sub_score_limit"],
            reward_unit=unit,
        ),
        image_statistics_signal(
            {name.removeprefix(IMAGE): _column(evals, name) for name in _names(evals) if name.startswith(IMAGE)},
            monitor_config["image_limit"],
        ),
    ]


def is_hacked(signals: Sequence[Signal]) -> str:
    """The evidence to act on, one sentence a signal; "" where there is not enough. The rule: the module's docstring."""
    alarms = {s.name: s for s in signals if s.alarm}
    soft = [s for name, s in alarms.items() if name != HARD]
    rose = any(s.rose for s in signals if s.name == "reward_slope")
    if HARD in alarms:
        return " ".join(s.evidence for s in (alarms[HARD], *soft))
    return " ".join(s.evidence for s in soft) if rose and len(soft) >= 2 else ""


def _weighted(evals: Sequence[Mapping[str, Any]], weights: Mapping[str, float] | None) -> dict[str, tuple[str, float]]:
    """The sub-scores that the reward is made of: name to show -> (column, sign that makes higher better)."""
    names = [n for n in _names(evals) if "/" in n and not n.startswith(IMAGE)]
    # An overall score is the reward, or a part of it, summed up: what it is made of says more.
    parts = [n for n in names if not n.endswith("/overall")]
    if weights is None:
        return {n: (n, 1.0) for n in parts}
    found = {}
    for name, weight in weights.items():
        scorer = name.removesuffix("/overall")
        whole = [n for n in parts if n.startswith(f"{scorer}/")] or [n for n in names if n.startswith(f"{scorer}/")]
        for sub in whole if "/" not in scorer else [name]:
            if weight > 0 and sub in names:
                found[sub] = (sub, 1.0)
            elif weight < 0 and sub in names:
                found[f"minus {sub}"] = (sub, -1.0)
    return found


def _names(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    return sorted({name for row in rows for name in row})


def _column(rows: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
    return np.array([np.nan if row.get(name) is None else row[name] for row in rows], np.float64)


def _first(values: np.ndarray, otherwise: float = 1.0) -> float:
    """The first positive finite one."""
    known = values[np.isfinite(values) & (values > 0)]
    return float(known[0]) if len(known) else otherwise
