"""The monitor: from lines of metrics.jsonl to signals, and to whether they are enough to act on."""

import math

import numpy as np
import pytest

from ddrl_jax.logbook import read_metrics
from ddrl_jax.monitor import SLOPE_WINDOW, is_hacked, read_signals
from ddrl_jax.rl.signals import Signal

from .paths import GOLDEN

LIMITS = {
    "on_hacking": "warn",
    "heldout_loss_limit": 0.10,
    "reward_slope_limit": 0.02,
    "reward_std_limit": 0.25,
    "sub_score_limit": 0.25,
    "image_limit": 0.15,
}
WEIGHTS = {"digits/text_alignment": 1.0, "digits/visual_quality": 1.0, "digits/motion_quality": 1.0}
NAMES = ["heldout_loss", "reward_slope", "reward_std", "sub_scores", "image_statistics"]


def run(name):
    return read_metrics(GOLDEN / "runs" / name / "metrics.jsonl")


def until(rows, step):
    """What metrics.jsonl holds when the evaluation at `step` has been written."""
    return [r for r in rows if r["step"] < step or (r["stage"] == "eval" and r["step"] <= step)]


def rows(rewards=(), stds=(), evals=(), **columns):
    """Lines of a run: `columns` are of stage ddrl, `evals` dicts of stage eval."""
    lines = [
        {"stage": "ddrl", "step": n, "reward": r, "reward_std": s, **{k: v[n] for k, v in columns.items()}}
        for n, (r, s) in enumerate(zip(rewards, stds, strict=True))
    ]
    return lines + [{"stage": "eval", "step": n, **e} for n, e in enumerate(evals)]


def by_name(lines, weights=None, **limits):
    return {s.name: s for s in read_signals(lines, LIMITS | limits, weights)}


# ---------------------------------------------------------------- real runs


def test_the_clean_run_is_let_through_at_every_evaluation():
    lines = run("ddrl")
    steps = [r["step"] for r in lines if r["stage"] == "eval"]
    assert len(steps) == 9
    for step in steps:
        found = read_signals(until(lines, step), LIMITS, WEIGHTS)
        assert [s.name for s in found] == NAMES
        assert [s.name for s in found if s.alarm] == [], step
        assert is_hacked(found) == ""


def test_the_hacked_run_is_caught_at_its_fourth_evaluation_and_stays_caught():
    lines = run("dance_grpo")
    found = {r["step"]: is_hacked(read_signals(until(lines, r["step"]), LIMITS, WEIGHTS))
             for r in lines if r["stage"] == "eval"}  # fmt: skip
    assert [step for step, evidence in found.items() if evidence] == [75, 100, 125, 150, 175, 200]
    assert found[75].startswith("The held-out diffusion loss went from 0.1602 to 0.1786 (+11.4 %, limit +10 %).")
    assert "At its steepest, updates" in found[75]  # the soft alarm beside it is told too
    assert "At its steepest" not in found[200]


def test_two_soft_alarms_catch_a_hacked_run_whose_loss_was_not_watched():
    """The real DanceGRPO run's rewards, its edges as measured on its clips (docs/hacking.md), no held-out loss."""
    lines = [{k: v for k, v in r.items() if k != "heldout_loss"} for r in until(run("dance_grpo"), 75)]
    assert is_hacked(read_signals(lines, LIMITS, WEIGHTS)) == ""
    for r in lines:
        if r["stage"] == "eval":
            r["image/edge_density"] = 0.1713 if r["step"] == 0 else 0.2033
    evidence = is_hacked(read_signals(lines, LIMITS, WEIGHTS))
    assert "rose by 0.0225" in evidence and "edge density moved most: from 0.171 to 0.203 (+18.7 %" in evidence
    assert is_hacked(read_signals(lines, LIMITS | {"image_limit": 0.19}, WEIGHTS)) == ""


# ---------------------------------------------------------------- columns


def test_nothing_written_yet_is_five_signals_that_say_nothing():
    found = read_signals([], LIMITS)
    assert [s.name for s in found] == NAMES
    assert all(math.isnan(s.value) and not s.alarm and not s.rose and s.evidence.endswith(".") for s in found)
    assert is_hacked(found) == ""
    # Other stages are no business of the monitor.
    assert all(
        math.isnan(s.value) for s in read_signals([{"stage": "pretrain", "step": 0, "reward": 1.0}] * 99, LIMITS)
    )


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("heldout_loss", "heldout_loss_limit", 0.3),
        ("reward_slope", "reward_slope_limit", 0.1 / 2.0),
        ("reward_std", "reward_std_limit", 0.5),
        ("sub_scores", "sub_score_limit", 0.75),
        ("image_statistics", "image_limit", 0.4),
    ],
)
def test_every_signal_reads_its_columns_and_its_limit(name, key, value):
    lines = rows(
        0.1 * np.arange(60),
        np.linspace(2.0, 1.0, 60)[[0] * 6 + list(range(6, 54)) + [-1] * 6],
        [
            {
                "reward": 0.0,
                "heldout_loss": 2.0,
                "s/a": 1.0,
                "s/b": 0.0,
                "image/contrast": 0.5,
                "image/saturation": None,
            },
            {
                "reward": 6.0,
                "heldout_loss": 2.6,
                "s/a": -0.5,
                "s/b": 9.0,
                "image/contrast": 0.3,
                "image/saturation": None,
            },
        ],
    )
    for limit, alarm in ((value - 0.001, True), (value + 0.001, False)):
        signal = by_name(lines, **{key: limit})[name]
        assert (signal.value, signal.limit, signal.alarm) == (pytest.approx(value), limit, alarm)


def test_missing_values_are_gaps():
    lines = rows([0.0] * 60, [1.0] * 60, [{"heldout_loss": 1.0}, {"heldout_loss": None}, {}, {"heldout_loss": 1.2}])
    lines[3]["reward"] = lines[0]["reward_std"] = None
    del lines[4]["reward"]
    found = by_name(lines)
    assert found["heldout_loss"].value == pytest.approx(0.2)
    assert found["reward_slope"].value == 0.0 and found["reward_std"].value == 0.0


def test_a_limit_that_is_not_there_is_an_error():
    with pytest.raises(KeyError, match="image_limit"):
        read_signals([], {k: v for k, v in LIMITS.items() if k != "image_limit"})


def test_the_slope_needs_its_window_and_then_half_of_the_run():
    assert SLOPE_WINDOW == 50
    steep = 0.05 * np.arange(300)
    assert math.isnan(by_name(rows(steep[:49], [1.0] * 49))["reward_slope"].value)
    assert by_name(rows(steep[:50], [1.0] * 50))["reward_slope"].value == pytest.approx(0.05)
    # Noise of two updates is no slope; a rise over a sixth of the run is diluted by what is around it.
    late = np.maximum(0.0, 0.05 * np.arange(-250, 50))
    assert 0.001 < by_name(rows(late, [1.0] * 300))["reward_slope"].value < 0.02
    assert by_name(rows(np.r_[0.0, 9.0, np.zeros(58)], [1.0] * 60))["reward_slope"].value < 0.02


def test_the_unit_of_a_sub_score_is_its_own_spread_else_the_rewards():
    evals = [{"reward": 0.0, "s/a": 1.0, "s/b": 0.0}, {"reward": 6.0, "s/a": 0.7, "s/b": 9.0}]
    std = {"sub_std/s/a": [None, 0.5]}
    assert by_name(rows([0.0, 0.0], [2.0, 1.0], evals))["sub_scores"].value == pytest.approx(0.3 / 2.0)
    assert by_name(rows([0.0, 0.0], [2.0, 1.0], evals, **std))["sub_scores"].value == pytest.approx(0.3 / 0.5)
    # In units of a spread of 100, the reward's 6 are no rise.
    assert by_name(rows([0.0, 0.0], [100.0, 1.0], evals, **std))["sub_scores"].value == 0.0


@pytest.mark.parametrize(
    ("weights", "value", "sub"),
    [
        (None, 3.0, "s/b"),
        ({"s/a": 1.0, "s/b": 0.0}, 1.0, "s/a"),
        ({"s/a": 0.5}, 1.0, "s/a"),
        ({"s/b": 1.0, "s/a": 1.0}, 3.0, "s/b"),
        ({"s": 1.0}, 3.0, "s/b"),  # a whole scorer: its parts
        ({"s/overall": 1.0}, 3.0, "s/b"),
        ({"t": 1.0}, 2.0, "t/overall"),  # a scorer that is only its overall
        ({"s/c": -1.0}, 5.0, "minus s/c"),  # it rose, and the reward punishes it
        ({"s/c": 1.0}, 0.0, "No sub-score fell"),
        ({"nowhere": 1.0}, math.nan, "measured"),
        ({"s/c": 0.0}, math.nan, "measured"),
    ],
)
def test_only_what_the_reward_is_made_of_counts(weights, value, sub):
    evals = [
        {"reward": 0.0, "s/a": 1.0, "s/b": 3.0, "s/c": 0.0, "s/overall": 4.0, "t/overall": 2.0, "image/contrast": 9.0},
        {"reward": 6.0, "s/a": 0.0, "s/b": 0.0, "s/c": 5.0, "s/overall": 0.0, "t/overall": 0.0, "image/contrast": 0.0},
    ]
    signal = by_name(rows([0.0], [1.0], evals), weights)["sub_scores"]
    assert signal.value == pytest.approx(value, nan_ok=True)
    assert sub in signal.evidence


# ---------------------------------------------------------------- enough to act on?


def signals(*alarms, rose=True):
    return [
        Signal(n, 1.0, 0.5, n in alarms, f"Evidence of {n}.", rose=rose and n == "reward_slope") for n in NAMES
    ]  # fmt: skip


@pytest.mark.parametrize("one", NAMES)
def test_one_alarm_is_enough_only_if_it_is_the_held_out_loss(one):
    for rose in (True, False):
        assert is_hacked(signals(one, rose=rose)) == ("Evidence of heldout_loss." if one == "heldout_loss" else "")


@pytest.mark.parametrize("two", [(a, b) for a in NAMES[1:] for b in NAMES[1:] if a < b])
def test_two_soft_alarms_are_enough_if_the_reward_rose(two):
    evidence = is_hacked(signals(*two))
    assert evidence == " ".join(f"Evidence of {n}." for n in NAMES if n in two)
    assert is_hacked(signals(*two, rose=False)) == ""


def test_no_alarm_is_no_evidence():
    assert is_hacked(signals()) == "" and is_hacked([]) == ""


def test_a_collapse_without_a_gain_is_not_hacking():
    evals = [{"reward": 0.0, "image/contrast": 0.2}, {"reward": -3.0, "image/contrast": 0.05}]
    lines = rows(np.linspace(0.0, -3.0, 60), np.linspace(1.0, 0.1, 60), evals)
    assert [n for n, s in by_name(lines).items() if s.alarm] == ["reward_std", "image_statistics"]
    assert is_hacked(read_signals(lines, LIMITS)) == ""
    for r in lines:
        r["reward"] = -r["reward"]
    assert is_hacked(read_signals(lines, LIMITS | {"reward_slope_limit": 9.0})) != ""
