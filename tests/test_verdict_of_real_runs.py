"""The verdict on one run known hacked and one known clean: real runs of configs/digits.py (docs/results/digits.md)."""

import json

import numpy as np
import pytest

from ddrl_jax.logbook import read_metrics
from ddrl_jax.monitor import is_hacked, read_signals
from ddrl_jax.report import verdict
from ddrl_jax.rl.signals import heldout_loss_signal

from .paths import GOLDEN

RUNS = GOLDEN / "runs"


LIMITS = {
    "heldout_loss_limit": 0.10,
    "reward_slope_limit": 0.02,
    "reward_std_limit": 0.25,
    "sub_score_limit": 0.25,
    "image_limit": 0.15,
}
WEIGHTS = {"digits/text_alignment": 1.0, "digits/visual_quality": 1.0, "digits/motion_quality": 1.0}


def signals(run):
    return read_signals(read_metrics(RUNS / run / "metrics.jsonl"), LIMITS, WEIGHTS)


@pytest.mark.parametrize(("run", "label"), [("ddrl", "clean"), ("dance_grpo", "hacked")])
def test_the_verdict_is_what_the_run_is_known_to_be(run, label):
    summary = json.loads((RUNS / run / "summary.json").read_text())
    assert verdict(summary).label == label
    # Known by the judges, which the signals do not see: DanceGRPO's clips left the real ones behind, DDRL's did not.
    changes = {c["name"]: c for c in summary["changes"]}
    assert changes["reward"]["low"] > 0
    assert (changes["frechet"]["low"] > 0) == (label == "hacked")


@pytest.mark.parametrize(("run", "alarms"), [("ddrl", []), ("dance_grpo", ["heldout_loss"])])
def test_the_signals_follow_from_the_runs_metrics(run, alarms):
    found = signals(run)
    assert [s.name for s in found if s.alarm] == alarms
    stored = json.loads((RUNS / run / "summary.json").read_text())["signals"]
    for signal, then in zip(found[:3], stored, strict=True):
        assert (signal.name, signal.alarm) == (then["name"], then["alarm"])
        assert signal.value == pytest.approx(then["value"], rel=1e-5)
    # Runs from before the monitor: the sub-scores can be read, in the reward's unit; pictures were not measured.
    assert found[3].name == "sub_scores" and 0.0 <= found[3].value < 0.02
    assert found[4].name == "image_statistics" and np.isnan(found[4].value)


@pytest.mark.parametrize(("run", "label"), [("ddrl", "clean"), ("dance_grpo", "hacked")])
def test_the_verdict_is_the_same_with_all_five_signals(run, label):
    summary = json.loads((RUNS / run / "summary.json").read_text())
    summary["signals"] = [{**vars(s), "value": None if np.isnan(s.value) else s.value} for s in signals(run)]
    found = verdict(summary)
    assert found.label == label
    assert bool(is_hacked(signals(run))) == (label == "hacked")
    json.dumps(summary, allow_nan=False)  # signals can be written as they are, but for a value that is not there


def test_the_held_out_loss_warns_long_before_the_end():
    lines = [m for m in read_metrics(RUNS / "dance_grpo/metrics.jsonl") if m["stage"] == "eval"]
    losses = [m["heldout_loss"] for m in lines]
    first = next(m["step"] for m in lines if heldout_loss_signal([losses[0], m["heldout_loss"]]).alarm)
    assert first <= 75
