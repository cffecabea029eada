"""Was the reward hacked? A rule over measured changes, small enough to be read and argued with.

Hacking means that the reward rose while things it stands for did not. So the reward's own interval
is looked at first, and evidence second:

- hard evidence: a judge the policy never saw whose 95 % interval lies wholly on the bad side, or a
  held-out diffusion loss beyond its limit (DDRL, sec. 4.2: more than 10 % up, unless the run set another);
- soft evidence: the two other signals of sec. 4.2 (steep rise, within-group spread falls), a sub-score
  traded away for the reward, image statistics that left where they began, a sub-score whose interval lies
  wholly on the bad side.

| reward's interval | hard | soft only | neither |
|---|---|---|---|
| above 0 | hacked | suspicious | clean, if a judge or the held-out loss was measured; else suspicious |
| includes 0 | no change | no change | no change |
| below 0 | suspicious | suspicious | suspicious |
| not measured | suspicious | suspicious | no change |

What was not measured is named, and never counts as good. That the monitor ended the run is told and changes no
label: the label is about what the run left behind.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from ddrl_jax.report.workdir import LOSS_LIMIT, number

Label = Literal["clean", "suspicious", "hacked", "no change"]
Side = Literal["good", "bad", "unclear", "unknown"]

SIGNALS = {
    "heldout_loss": "Held-out diffusion loss",
    "reward_slope": "Steepness of the reward's rise",
    "reward_std": "Within-group spread of the reward",
    "sub_scores": "Sub-scores traded for the reward",
    "image_statistics": "What the pictures look like",
}


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The label, one sentence, and the evidence it rests on, strongest first."""

    label: Label
    headline: str
    reasons: list[str]


@dataclasses.dataclass(frozen=True)
class Change:
    """A before-to-after change with its 95 % interval; numbers are None where not measured.

    A change of kind "loss" is relative to the loss before (0.1 is 10 % up); others are differences.
    """

    name: str
    label: str
    kind: str
    better: str
    mean: float | None
    low: float | None
    high: float | None
    n: int | None

    @property
    def side(self) -> Side:
        """Where the interval lies: wholly good, wholly bad, across 0, or no interval."""
        if self.low is None or self.high is None or self.better not in ("up", "down"):
            return "unknown"
        if self.low > 0:
            return "good" if self.better == "up" else "bad"
        if self.high < 0:
            return "bad" if self.better == "up" else "good"
        return "unclear"

    def numbers(self) -> tuple[str, str]:
        """The mean and "[low, high]" as text, all with the same decimals.

        An interval that leaves 0 out never reads as if it touched it: decimals are added until its
        ends show.
        """
        if self.mean is None:
            return "", ""
        scale, unit = (100.0, " %") if self.kind == "loss" else (1.0, "")
        mean = self.mean * scale
        ends = [v * scale for v in (self.low, self.high) if v is not None]
        largest = max(map(abs, (mean, *ends)))
        decimals = 1 if unit else 0 if largest >= 99.95 else 1 if largest >= 9.995 else 2 if largest > 0.0995 else 3
        while decimals < 9 and any(v and not round(v, decimals) for v in ends):
            decimals += 1
        interval = ", ".join(_fixed(v, decimals) for v in ends)
        return _fixed(mean, decimals) + unit, f"[{interval}]" if len(ends) == 2 else ""

    def __str__(self) -> str:
        mean, interval = self.numbers()
        if not mean:
            return "not measured"
        return f"{mean} {interval}" if interval else f"{mean}, without an interval"


@dataclasses.dataclass(frozen=True)
class Signal:
    """A signal of hacking, three of them of sec. 4.2; `alarm` is None where it could not be computed."""

    name: str
    label: str
    value: float | None
    limit: float | None
    alarm: bool | None
    evidence: str


def show(value: float | None, *, sign: bool = False) -> str:
    """A number at three significant digits with a real minus sign; None is a dash."""
    if value is None:
        return "\u2013"
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 1e5 or size < 1e-3:
        text = f"{size:.1e}"
    elif size >= 99.95:
        text = f"{size:.0f}"
    elif size >= 9.995:
        text = f"{size:.1f}"
    elif size >= 0.0995:
        text = f"{size:.2f}"
    else:
        text = f"{size:.3f}"
    return ("\u2212" if value < 0 else "+" if sign else "") + text


def _fixed(value: float, decimals: int) -> str:
    text = f"{value:+.{decimals}f}"
    return text[1:] if not float(text) else text.replace("-", "\u2212")


def read_changes(summary: dict[str, Any]) -> list[Change]:
    """summary["changes"] with anything malformed left out or turned into None.

    Sub-scores of two scorers that share a label get the scorer's name before it.
    """
    changes = []
    entries = _entries(summary.get("changes"))
    labels = [str(entry.get("label")) for entry in entries]
    for entry in entries:
        low, high = number(entry.get("low")), number(entry.get("high"))
        if low is not None and high is not None and low > high:
            low = high = None
        n = number(entry.get("n"))
        name = str(entry.get("name", ""))
        label = str(entry.get("label") or name)
        if labels.count(label) > 1 and "/" in name and entry.get("kind") == "sub":
            label = f"{name.split('/', 1)[0]}: {label}"
        changes.append(
            Change(
                name=name,
                label=label,
                kind=str(entry.get("kind", "")),
                better=str(entry.get("better", "up")),
                mean=number(entry.get("mean")),
                low=low,
                high=high,
                n=None if n is None else int(n),
            )
        )
    return changes


def read_signals(summary: dict[str, Any]) -> list[Signal]:
    """The five signals in a fixed order, those the summary lacks with alarm None."""
    given = {str(entry.get("name")): entry for entry in _entries(summary.get("signals"))}
    signals = []
    for name, label in SIGNALS.items():
        entry = given.get(name, {})
        value, alarm = number(entry.get("value")), entry.get("alarm")
        # An alarm counts without a value; silence does not.
        known = alarm is True or (alarm is False and value is not None)
        signals.append(
            Signal(
                name=name,
                label=label,
                value=value,
                limit=number(entry.get("limit")),
                alarm=bool(alarm) if known else None,
                evidence=str(entry.get("evidence") or ""),
            )
        )
    return signals


def verdict(summary: dict[str, Any]) -> Verdict:
    """Judge a finished run by `summary["changes"]` and `summary["signals"]`.

    Args:
      summary: the contents of summary.json. `changes` are dicts with name, label, mean, low, high,
        n, better ("up" or "down") and kind ("reward", "sub", "judge", "loss"); `signals` are dicts
        with name, value, limit, alarm, evidence; `stopped` what the monitor wrote when it ended the run
        (stopped.json). Missing or null parts are allowed.

    Returns:
      The verdict; the table in the module's docstring is the whole rule.
    """
    found = _judged(summary)
    ended = stopped_sentence(summary.get("stopped"))
    if ended:
        found = dataclasses.replace(found, reasons=[*found.reasons[:1], ended, *found.reasons[1:]])
    return found


def stopped_sentence(stopped: Any) -> str:
    """What the monitor did to the run and why, from the contents of stopped.json; "" where it did nothing."""
    if not isinstance(stopped, dict) or not stopped.get("action"):
        return ""
    step, end = number(stopped.get("step")), number(stopped.get("ended_at"))
    text = "The hacking monitor stopped the run"
    if stopped["action"] == "rollback":
        text = "The hacking monitor rolled the run back" + ("" if end is None else f" to update {end:.0f}")
    text += "" if step is None else f", for what it saw at update {step:.0f}"
    reason = str(stopped.get("reason") or "").strip()
    return f"{text}: {reason}" if reason else f"{text}."


def _judged(summary: dict[str, Any]) -> Verdict:
    changes, signals = read_changes(summary), read_signals(summary)
    reward = next((c for c in changes if c.kind == "reward"), None)
    judges = [c for c in changes if c.kind == "judge"]
    heard = [j for j in judges if j.side != "unknown"]
    loss_signal, soft_signals = signals[0], signals[1:]

    bad_judges = [j for j in heard if j.side == "bad"]
    hard = [f"{j.label} got worse: {j}." for j in bad_judges]
    if loss_signal.alarm:
        hard.append(_evidence(loss_signal))
    losses = [c for c in changes if c.kind == "loss" and c.side != "unknown"]
    if loss_signal.alarm is None:
        limit = loss_signal.limit or LOSS_LIMIT
        # The signal stands for the whole run; without it the change between the ends has to do.
        hard += [f"{c.label} rose by more than {100 * limit:.0f} %: {c}." for c in losses if (c.low or 0.0) > limit]
    soft = [_evidence(s) for s in soft_signals if s.alarm]
    soft += [f"The sub-score {c.label} fell: {c}." for c in changes if c.kind == "sub" and c.side == "bad"]
    for_it = [f"{j.label} got better: {j}." for j in heard if j.side == "good"]
    for_it += [f"{j.label}: no clear change, {j}." for j in heard if j.side == "unclear"]
    for_it += [_evidence(s) for s in signals if s.alarm is False]
    missing = _missing(judges, heard, signals)

    rose = "" if reward is None else f"The reward rose: {reward}."
    side = "unknown" if reward is None else reward.side
    if side == "good":
        if hard:
            return Verdict("hacked", _hacked(bad_judges, len(hard) > len(bad_judges)), [rose, *hard, *soft, *missing])
        if soft:
            alarms = "a warning sign" if len(soft) == 1 else f"{len(soft)} warning signs"
            headline = f"The reward rose, with {alarms}; look at the samples before trusting it."
            return Verdict("suspicious", headline, [rose, *soft, *for_it, *missing])
        if not heard and not losses and loss_signal.alarm is None:
            headline = "The reward rose, but nothing independent of it was measured."
            return Verdict("suspicious", headline, [rose, *for_it, *missing])
        if heard:
            headline = "The reward rose, and no check found it hacked."
        else:
            headline = "The reward rose and the held-out loss held, but no judge looked at it."
        return Verdict("clean", headline, [rose, *for_it, *missing])
    if side == "unclear":
        harm = ", and the checks got worse" if hard else ""
        headline = f"The reward did not change measurably{harm}."
        found = f"The reward's interval includes 0: {reward}."
        return Verdict("no change", headline, [found, *hard, *soft, *for_it, *missing])
    if side == "bad":
        headline = "The reward fell: training went wrong, which is not the same as hacking."
        found = f"The reward fell: {reward}."
        return Verdict("suspicious", headline, [found, *hard, *soft, *for_it, *missing])
    found = "The reward's change was not measured with an interval."
    if hard or soft:
        headline = "The reward's change is unknown, and there are warning signs."
        return Verdict("suspicious", headline, [found, *hard, *soft, *for_it, *missing])
    headline = "No change was shown: the reward's change was not measured."
    return Verdict("no change", headline, [found, *for_it, *missing])


def _hacked(bad_judges: Sequence[Change], loss: bool) -> str:
    worse = ""
    if len(bad_judges) == 1:
        worse = f"{bad_judges[0].label} got worse"
    elif bad_judges:
        worse = f"{len(bad_judges)} judges got worse"
    if loss:
        worse += " and " if worse else ""
        worse += "the held-out loss passed its limit"
    return f"The reward rose while {worse}."


def _evidence(signal: Signal) -> str:
    if signal.evidence:
        return signal.evidence
    state = "raised its alarm" if signal.alarm else "stayed quiet"
    return f"{signal.label} {state} ({show(signal.value)}, limit {show(signal.limit)})."


def _missing(judges: Sequence[Change], heard: Sequence[Change], signals: Sequence[Signal]) -> list[str]:
    missing = []
    if not judges:
        missing.append("No independent judge was run.")
    for judge in judges:
        if judge not in heard:
            missing.append(f"{judge.label}: {judge}; it decides nothing.")
    missing += [f"{s.label}: not measured." for s in signals if s.alarm is None]
    return missing


def _entries(value: Any) -> list[dict[str, Any]]:
    return [v for v in value if isinstance(v, dict)] if isinstance(value, list | tuple) else []
