"""The verdict on one run known hacked and one known clean: real runs of configs/digits.py (docs/results/digits.md)."""

import json

import numpy as np
import pytest

from ddrl_jax.logbook import read_metrics
from ddrl_jax.report import verdict
from ddrl_jax.rl.signals import heldout_loss_signal, reward_slope_signal, reward_std_signal

from .paths import GOLDEN

RUNS = GOLDEN / "runs"


def signals(run):
    lines = read_metrics(RUNS / run / "metrics.jsonl")

    def column(stage, name):
        return np.array([m[name] for m in lines if m["stage"] == stage])

    std = column("ddrl", "reward_std")
    return [
        heldout_loss_signal(column("eval", "heldout_loss")),
        reward_slope_signal(column("ddrl", "reward"), unit=std[0]),
        reward_std_signal(std),
    ]


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
    for signal, then in zip(found, stored, strict=True):
        assert signal.value == pytest.approx(then["value"], rel=1e-5) and signal.alarm == then["alarm"]


def test_the_held_out_loss_warns_long_before_the_end():
    lines = [m for m in read_metrics(RUNS / "dance_grpo/metrics.jsonl") if m["stage"] == "eval"]
    losses = [m["heldout_loss"] for m in lines]
    first = next(m["step"] for m in lines if heldout_loss_signal([losses[0], m["heldout_loss"]]).alarm)
    assert first <= 75
