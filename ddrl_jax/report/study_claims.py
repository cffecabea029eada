"""What a study found, and where it disagrees with the paper: rules over intervals, small enough to be argued with.

An arm's state:

| reward's interval | held-out loss above its limit, or a judge on its bad side, each with its whole interval | state |
|---|---|---|
| above 0 | yes | hacked |
| above 0 | no; the loss's interval lies under the limit, and no judge is on its bad side | clean |
| above 0 | neither: the loss's interval holds the limit, or nothing independent was measured | unclear |
| holds 0, or below | - | no gain |

A claim is reproduced, not reproduced, in part, unclear (the intervals allow both) or not measured. Each says its rule.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np

from ddrl_jax.report.study_stats import (
    Arm,
    Estimate,
    Measure,
    Study,
    difference,
    estimate,
    matched_difference,
    mean_over_done,
    over_seeds,
)

State = Literal["hacked", "clean", "unclear", "no gain", "not measured"]
Outcome = Literal["reproduced", "not reproduced", "in part", "unclear", "not measured"]
MARGIN = 0.20  # "as good": no more than a fifth of the other's gain is lost ...
LOSS_MARGIN = 0.02  # ... and the held-out loss is no more than 2 points of percent higher
FLAT = 1.5  # a KL is flat if its last fifth is under 1.5 times its middle fifth
HALF = 0.65  # "about half the evaluations"


@dataclasses.dataclass(frozen=True)
class Claim:
    """One of the paper's statements put to the test: its place there, the rule, what was measured, the outcome."""

    name: str
    statement: str
    source: str
    rule: str
    outcome: Outcome
    measured: tuple[str, ...]


# ---------------------------------------------------------------- numbers as text


def write_number(measure: Measure, value: float, *, sign: bool = True) -> str:
    """A value of a measure in its unit, at the digits its size needs."""
    scaled = value * measure.scale
    decimals = 1 if measure.unit else _decimals(abs(scaled))
    return _signed(scaled, decimals, sign) + measure.unit


def write_estimate(measure: Measure, found: Estimate | None) -> tuple[str, str]:
    """Mean and "[low, high]", with the same decimals; an interval that leaves 0 out never reads as if it touched it."""
    if found is None:
        return "\u2013", ""
    mean = found.mean * measure.scale
    ends = [v * measure.scale for v in (found.low, found.high) if v is not None]
    decimals = 1 if measure.unit else _decimals(max(map(abs, (mean, *ends))))
    while decimals < 6 and any(v and not round(v, decimals) for v in ends):
        decimals += 1
    interval = f"[{', '.join(_signed(v, decimals) for v in ends)}]" if len(ends) == 2 else ""
    return _signed(mean, decimals) + measure.unit, interval


def say(measure: Measure | None, found: Estimate | None) -> str:
    """An estimate in a sentence."""
    if measure is None or found is None:
        return "not measured"
    mean, interval = write_estimate(measure, found)
    return f"{mean} {interval}" if interval else f"{mean}, without an interval"


def _decimals(size: float) -> int:
    return 0 if size >= 99.95 else 1 if size >= 9.995 else 2


def _signed(value: float, decimals: int, sign: bool = True) -> str:
    text = f"{value:{'+' if sign else ''}.{decimals}f}"
    return text.lstrip("+-") if not float(text) else text.replace("-", "\u2212")


def listed(words: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"; with semicolons alone where a word holds a comma itself."""
    if any("," in word for word in words):
        return "; ".join(words)
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


# ---------------------------------------------------------------- an arm's state


def state(study: Study, arm: Arm) -> State:
    """The table in the module's docstring."""
    reward = estimate(arm, "reward")
    if reward is None or reward.low is None:
        return "not measured"
    if not reward.above(0.0):
        return "no gain"
    if evidence(study, arm):
        return "hacked"
    loss = estimate(arm, "heldout_loss")
    judges = [estimate(arm, m.name) for m in study.kind("judge")]
    heard = loss is not None and loss.high is not None
    if loss is not None and loss.high is not None and loss.high > study.loss_limit:
        return "unclear"
    return "clean" if heard or any(j is not None and j.low is not None for j in judges) else "unclear"


def evidence(study: Study, arm: Arm) -> list[str]:
    """The hard evidence against an arm, in words; empty where there is none."""
    found = []
    for m in study.kind("loss"):
        e = estimate(arm, m.name)
        if e is not None and e.above(study.loss_limit):
            found.append(f"held-out loss {say(m, e)}")
    for m in study.kind("judge"):
        e = estimate(arm, m.name)
        if e is not None and e.side(m.better) == "bad":
            found.append(f"{m.inside} {say(m, e)}")
    return found


def headline(study: Study) -> tuple[str, list[str]]:
    """One sentence on what was found, and the sentences it rests on."""
    compared = [a for a in study.compared if a.done]
    if not compared:
        return "Nothing has been measured yet.", []
    if not study.groups("main", "control"):
        return _sweep_headline(study, compared)
    states = {a.name: state(study, a) for a in compared}
    reference = study.reference if study.reference and study.reference.done else None
    hacked = [a for a in study.baselines if states.get(a.name) == "hacked"]
    kept = [a for a in study.baselines if states.get(a.name) == "clean"]
    if reference is None:
        lead = "Plain DDRL has not finished, so there is nothing to hold the baselines against yet."
    else:
        how = {
            "clean": "raised the reward and stayed clean",
            "hacked": "hacked its reward",
            "unclear": "raised the reward, but its checks are not clear",
            "no gain": "did not raise the reward",
            "not measured": "was not measured with an interval",
        }[states.get(reference.name) or state(study, reference)]
        lead = f"{reference.label} {how}"
        good = states.get(reference.name) == "clean"
        if hacked:
            lead += f"; {listed([a.label for a in hacked])} {'' if good else 'also '}hacked it"
            lead += f", {listed([a.label for a in kept])} did not" if kept else ""
        elif kept:
            lead += (
                f"; so did {listed([a.label for a in kept])}"
                if good
                else f"; {listed([a.label for a in kept])} did not"
            )
        lead += "."
    details = []
    reward, loss = study.measure("reward"), study.measure("heldout_loss")
    if reference is not None:
        text = f"{reference.label}: reward {say(reward, estimate(reference, 'reward'))}"
        if loss:
            text += f", held-out loss {say(loss, estimate(reference, 'heldout_loss'))}"
        judges = [f"{m.inside} {say(m, estimate(reference, m.name))}" for m in study.kind("judge")]
        details.append("; ".join([text, *judges]) + ".")
        for arm in study.baselines:
            details += _beside(study, reference, arm)
    return lead, details


def _sweep_headline(study: Study, arms: Sequence[Arm]) -> tuple[str, list[str]]:
    """Of a study that only sweeps: each method's most rewarded setting that stayed clean."""
    details = []
    for method in dict.fromkeys(a.method for a in arms):
        own = [a for a in arms if a.method == method]
        clean = [a for a in own if state(study, a) == "clean"]
        if not clean:
            details.append(f"Of {len(own)} settings of {method}, none raised the reward and stayed clean.")
            continue
        best = max(clean, key=lambda a: mean_of(estimate(a, "reward")))
        details.append(
            f"Of {len(own)} settings of {method}, {len(clean)} stayed clean; most rewarded among them: {best.label}, "
            f"reward {say(study.measure('reward'), estimate(best, 'reward'))}, held-out loss "
            f"{say(study.measure('heldout_loss'), estimate(best, 'heldout_loss'))}."
        )
    hacked = sum(state(study, a) == "hacked" for a in arms)
    return f"A sweep of {len(study.arms)} settings: {hacked} of {len(arms)} finished ones hacked their reward.", details


def mean_of(found: Estimate | None) -> float:
    return -np.inf if found is None else found.mean


def _beside(study: Study, reference: Arm, arm: Arm) -> list[str]:
    """One baseline against the reference: at equal updates, and at equal reward."""
    ours, theirs = estimate(reference, "reward"), estimate(arm, "reward")
    loss = study.measure("heldout_loss")
    if ours is None or theirs is None:
        return []
    text = f"{arm.label}: reward {say(study.measure('reward'), theirs)} after the same updates"
    if ours.above(0.0) and theirs.above(0.0):
        text += f", {theirs.mean / ours.mean:.1f} times {reference.label}’s"
    if loss:
        text += f", with the held-out loss {say(loss, estimate(arm, 'heldout_loss'))}"
    matched = matched_difference(study, reference, arm, "heldout_loss")
    if matched and loss:
        level, found = matched
        word = "lower" if found.mean < 0 else "higher"
        size = write_number(loss.apart, abs(found.mean), sign=False).replace(" pt", " points")
        how = "" if found.low is not None and found.side("down") != "unclear" else " (the interval over seeds holds 0)"
        how = " (one seed)" if found.low is None else how
        text += f". At the same reward (+{level:g}) {reference.label}’s held-out loss is {size} {word}{how}"
    return [text + "."]


# ---------------------------------------------------------------- the paper's claims


def claims(study: Study) -> list[Claim]:
    """Every statement that this study can put to the test, in the paper's order."""
    return [
        _ddrl_does_not_hack(study),
        _sub_scores_all_rise(study),
        _baselines_leave_the_data(study),
        _judges_fall(study),
        _better_at_matched_reward(study),
        _kl_is_blind(study),
        _no_sft_needed(study),
        _reduced_is_enough(study),
        _synthetic_is_enough(study),
    ]


def disagreements(found: Sequence[Claim]) -> list[Claim]:
    return [c for c in found if c.outcome in ("not reproduced", "in part")]


def _ddrl_does_not_hack(study: Study) -> Claim:
    arm, outcome, measured = study.reference, "not measured", []
    if arm is not None and arm.done:
        outcome = {
            "clean": "reproduced", "hacked": "not reproduced", "no gain": "not reproduced",
            "unclear": "unclear", "not measured": "not measured",
        }[state(study, arm)]  # fmt: skip
        measured = [_measured(study, arm)]
    return Claim(
        "ddrl_clean",
        "DDRL raises the reward without hacking it.",
        "sec. 4, Fig. 2",
        f"The reward’s interval lies above 0, the held-out loss’s under +{100 * study.loss_limit:g} %, and no "
        "judge’s interval lies wholly on its bad side.",
        _outcome(outcome),
        tuple(measured),
    )


def _sub_scores_all_rise(study: Study) -> Claim:
    arm, subs = study.reference, study.kind("sub")
    outcome, measured = "not measured", []
    if arm is not None:
        found = [(m, e) for m in subs if (e := estimate(arm, m.name)) is not None and e.low is not None]
        sides = [e.side(m.better) for m, e in found]
        if found:
            outcome = "not reproduced" if "bad" in sides else "reproduced" if set(sides) == {"good"} else "unclear"
            measured = [f"{arm.label}: " + "; ".join(f"{m.inside} {say(m, e)}" for m, e in found) + "."]
        for other in study.baselines:
            fell = [(m, e) for m in subs if (e := estimate(other, m.name)) is not None and e.side(m.better) == "bad"]
            if fell:
                measured.append(f"{other.label} loses " + "; ".join(f"{m.inside} {say(m, e)}" for m, e in fell) + ".")
    return Claim(
        "sub_scores",
        "Under DDRL every part of the reward rises; none is traded for another.",
        "Fig. 4",
        "Reproduced if every sub-score’s interval lies above 0, not if one lies below.",
        _outcome(outcome),
        tuple(measured),
    )


def _baselines_leave_the_data(study: Study) -> Claim:
    results, measured = [], []
    for arm in study.baselines:
        reward, loss = estimate(arm, "reward"), estimate(arm, "heldout_loss")
        if reward is None or loss is None or loss.low is None or loss.high is None:
            continue
        measured.append(f"{arm.label}: reward {say(study.measure('reward'), reward)}, held-out loss "
                        f"{say(study.measure('heldout_loss'), loss)}.")  # fmt: skip
        limit = study.loss_limit
        if reward.above(0.0):
            results.append("yes" if loss.above(limit) else "no" if loss.below(limit) else "unclear")
        else:
            results.append("no" if reward.below(0.0) or loss.below(limit) else "unclear")
    return Claim(
        "leave_data",
        "The GRPO baselines hack: the reward rises while the held-out diffusion loss shows that they leave the data.",
        "sec. 4.2",
        f"For each baseline: the reward’s interval above 0, and the held-out loss’s above "
        f"+{100 * study.loss_limit:g} %.",
        _together(results),
        tuple(measured),
    )


def _judges_fall(study: Study) -> Claim:
    judges = [m for m in study.kind("judge") if m.better == "up"]
    results, measured = [], []
    for arm in study.baselines:
        reward = estimate(arm, "reward")
        found = [(m, e) for m in judges if (e := estimate(arm, m.name)) is not None and e.low is not None]
        if reward is None or not found:
            continue
        sides = [e.side(m.better) for m, e in found]
        rose = reward.above(0.0)
        results.append("yes" if rose and "bad" in sides else "no" if "good" in sides or not rose else "unclear")
        measured.append(f"{arm.label}: reward {say(study.measure('reward'), reward)}; "
                        + "; ".join(f"{m.inside} {say(m, e)}" for m, e in found) + ".")  # fmt: skip
    return Claim(
        "judges_fall",
        "While a GRPO baseline’s reward rises, a judge it never saw gets worse.",
        "Fig. 2",
        "For each baseline: reproduced if a judge’s interval lies below 0, not if none does and one lies above 0 "
        "(or the reward did not rise). Distances to the data are left out here: they are counted above.",
        _together(results),
        tuple(measured),
    )


def _better_at_matched_reward(study: Study) -> Claim:
    results, measured = [], []
    reference, loss = study.reference, study.measure("heldout_loss")
    rivals = [a for a in study.groups("main", "control") if a.method in ("dance_grpo", "flow_grpo")]
    for arm in rivals:
        matched = matched_difference(study, reference, arm, "heldout_loss") if reference else None
        if matched is None or loss is None:
            continue
        level, found = matched
        sides = {"good": "yes", "bad": "no"}
        results.append(sides.get(found.side("down"), "unclear"))
        measured.append(f"Against {arm.label} at reward +{level:g}: held-out loss {say(loss.apart, found)}.")
    return Claim(
        "matched",
        "At the same reward, DDRL stays closer to the data than the GRPO baselines, slow ones included.",
        "sec. 4.2, at matched reward",
        "For each baseline and its low-rate control: the held-out loss of DDRL minus the baseline’s, at the highest "
        "common reward that all seeds of both reach, has its interval over seeds below 0.",
        _together(results),
        tuple(measured),
    )


def _kl_is_blind(study: Study) -> Claim:
    results, measured = [], []
    for arm in study.with_kl:
        ratios = [r for run in arm.traced if (r := kl_growth(run.rows.get("kl_loss"))) is not None]
        ratio = over_seeds(ratios)
        if ratio is None or not arm.done:
            continue
        rotten = evidence(study, arm)
        flat = ratio.mean <= FLAT
        judged = state(study, arm)
        if judged == "hacked":
            sure = ratio.low is None or ratio.high is None or ratio.high <= FLAT or ratio.low > FLAT
            results.append("unclear" if not sure else "yes" if flat else "no")
        else:
            results.append("unclear" if judged in ("unclear", "not measured") else "no")
        measured.append(
            f"{arm.label}: the KL’s last fifth is {ratio.mean:.2f} times its middle fifth"
            + (f" [{ratio.low:.2f}, {ratio.high:.2f}]" if ratio.low is not None else "")
            + (f", while {'; '.join(rotten)}." if rotten else "; nothing independent of the reward got clearly worse.")
        )
    return Claim(
        "kl_blind",
        "The reverse KL to the reference stays flat while the samples rot.",
        "Fig. 3",
        f"For each arm with a KL term: it is hacked, and its KL over the last fifth of the updates is under "
        f"{FLAT:g} times that over the middle fifth. If the arm is not hacked, there is no rot for "
        "the KL to miss: not reproduced.",
        _together(results),
        tuple(measured),
    )


def kl_growth(kl: np.ndarray | None) -> float | None:
    """Mean KL over the last fifth of the updates, divided by that over the middle fifth; None if it cannot be said."""
    if kl is None or len(kl) < 5:
        return None
    n = len(kl)
    middle, last = kl[2 * n // 5 : 3 * n // 5], kl[4 * n // 5 :]
    middle, last = middle[np.isfinite(middle)], last[np.isfinite(last)]
    if not len(middle) or not len(last) or middle.mean() <= 0:
        return None
    return float(last.mean() / middle.mean())


def _no_sft_needed(study: Study) -> Claim:
    results, measured = [], []
    without, with_sft = study.by_data()
    for arm in without:
        for other in with_sft:
            if arm.data_points == other.data_points:
                verdict, text = _as_good(study, arm, other)
                if verdict:
                    points = "all data" if arm.data_points is None else f"{arm.data_points} data points"
                    results.append(verdict)
                    measured.append(f"With {points}, DDRL from the base minus SFT then DDRL: {text}.")
    return Claim(
        "no_sft",
        "DDRL needs no supervised fine-tuning before it, however few the data.",
        "Fig. 5",
        "At each number of data points, DDRL from the base is as good as SFT then DDRL. " + _as_good_rule(),
        _together(results),
        tuple(measured),
    )


def _reduced_is_enough(study: Study) -> Claim:
    results, measured = [], []
    reduced, full = study.reference, study.full
    if reduced is not None and full is not None:
        verdict, text = _as_good(study, reduced, full)
        ratio = evaluations_ratio(reduced, full)
        if verdict:
            measured.append(f"Reduced minus full: {text}.")
            if ratio is None:
                results.append("unclear")
                measured.append("Network evaluations were not counted.")
            else:
                results.append(verdict if ratio <= HALF else "no")
                measured.append(f"Training evaluations of reduced: {100 * ratio:.0f} % of full’s.")
    return Claim(
        "reduced",
        "The reduced data loss is as good as the full one at about half the network evaluations of training.",
        "Table 3",
        f"Reduced is as good as full, and its evaluations for gradients (policy and data) are at most "
        f"{100 * HALF:.0f} % of full’s. " + _as_good_rule(),
        _together(results),
        tuple(measured),
    )


def training_evaluations(arm: Arm) -> float | None:
    """Network evaluations an iteration that gradients are taken of: policy and data."""

    def of(counts: dict[str, float]) -> float | None:
        parts = [counts[k] for k in ("policy", "data") if k in counts]
        return sum(parts) if parts else None

    return mean_over_done(arm, lambda run: of(run.evaluations))


def evaluations_ratio(a: Arm, b: Arm) -> float | None:
    left, right = training_evaluations(a), training_evaluations(b)
    return left / right if left is not None and right else None


def _synthetic_is_enough(study: Study) -> Claim:
    results, measured = [], []
    if study.reference is not None and study.synthetic is not None:
        verdict, text = _as_good(study, study.synthetic, study.reference)
        if verdict:
            results.append(verdict)
            measured.append(f"Synthetic minus real: {text}.")
    return Claim(
        "synthetic",
        "Samples of the base model serve as data about as well as real data.",
        "Table 4",
        "DDRL on synthetic data is as good as on real data. " + _as_good_rule(),
        _together(results),
        tuple(measured),
    )


def _as_good_rule() -> str:
    return (
        f"“As good”: the whole interval of the difference loses less than {100 * MARGIN:.0f} % of the other’s "
        f"reward gain and less than {100 * LOSS_MARGIN:g} points of held-out loss; “not”: the interval lies wholly "
        "on the losing side of 0 and reaches beyond that."
    )


def _as_good(study: Study, arm: Arm, other: Arm) -> tuple[str, str]:
    """ "yes", "no", "unclear" or "" (not measured), and the differences in words."""
    gain, reward, loss = (
        estimate(other, "reward"), difference(arm, other, "reward"), difference(arm, other, "heldout_loss"),
    )  # fmt: skip
    if gain is None or reward is None:
        return "", ""
    # Without a gain there is nothing to be as good as.
    parts = [_holds(reward.low, reward.high, MARGIN * gain.mean) if gain.above(0.0) else "unclear"]
    text = f"reward {say(study.measure('reward'), reward)}"
    if loss is not None:
        flipped = (None if loss.high is None else -loss.high, None if loss.low is None else -loss.low)
        parts.append(_holds(*flipped, LOSS_MARGIN))
        text += f", held-out loss {say(_apart(study, 'heldout_loss'), loss)}"
    for m in study.kind("judge"):
        found = difference(arm, other, m.name)
        if found is not None:
            text += f", {m.inside} {say(m, found)}"
    return ("no" if "no" in parts else "unclear" if "unclear" in parts else "yes"), text


def _apart(study: Study, name: str) -> Measure | None:
    measure = study.measure(name)
    return measure and measure.apart


def _holds(low: float | None, high: float | None, margin: float) -> str:
    if low is None or high is None:
        return "unclear"
    return "yes" if low > -margin else "no" if high < 0 else "unclear"


def _together(results: Sequence[str]) -> Outcome:
    """One outcome of several tests: all yes, all no, some of both (in part), or undecided."""
    found = set(results)
    if not found:
        return "not measured"
    if found == {"yes"}:
        return "reproduced"
    if found == {"no"}:
        return "not reproduced"
    return "in part" if "yes" in found and "no" in found else "unclear"


def _outcome(word: str) -> Outcome:
    known: tuple[Outcome, ...] = ("reproduced", "not reproduced", "in part", "unclear", "not measured")
    return next(k for k in known if k == word)


def _measured(study: Study, arm: Arm) -> str:
    parts = [f"reward {say(study.measure('reward'), estimate(arm, 'reward'))}"]
    for m in study.kind("loss", "judge"):
        parts.append(f"{m.inside} {say(m, estimate(arm, m.name))}")
    return f"{arm.label}: " + "; ".join(parts) + "."
