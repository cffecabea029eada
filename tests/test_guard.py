"""monitor.on_hacking in the trainer: on a run known to be hacked and one known to be clean, and through a whole run."""

import json

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ddrl_jax import config as config_lib
from ddrl_jax import state
from ddrl_jax.checkpoint.manager import Checkpoints
from ddrl_jax.logbook import Logbook, read_metrics
from ddrl_jax.train import Guard

from . import tiny
from .paths import ROOT

RUNS = ROOT / "tests/golden/runs"  # real runs of configs/digits.py: DDRL (clean) and DanceGRPO (hacked)


def state_at(step):
    s = state.init_state({"w": jnp.full((2,), float(step))}, optax.sgd(0.1), ema=False)
    return state.TrainState(**{**vars(s), "step": jnp.asarray(step, jnp.int32)})


def replay(name, workdir, action):
    """The run's evaluations one after the other, as the trainer has them. Returns (evaluation it ended at, state)."""
    c = config_lib.default()
    c.monitor.on_hacking = action
    rows = read_metrics(RUNS / name / "metrics.jsonl")
    workdir.mkdir()
    book = Logbook(workdir, tensorboard=False)
    guard = Guard(c, workdir, book)
    guard.resume(0, state_at(0))
    with Checkpoints(workdir / "checkpoints/ddrl", keep=9) as checkpoints:
        for row in rows:
            with (workdir / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
            if row["stage"] == "eval" and row["step"] > 0:
                checkpoints.save(row["step"], state_at(row["step"]), wait=True)
                ended = guard.look(row["step"], state_at(row["step"]), checkpoints)
                if ended is not None:
                    return row["step"], ended, checkpoints.steps()
    book.close()
    return None, None, None


@pytest.mark.parametrize("action", ["warn", "stop", "rollback"])
def test_a_clean_run_is_left_alone(tmp_path, action, capsys):
    assert replay("ddrl", tmp_path / "run", action) == (None, None, None)
    assert not (tmp_path / "run/stopped.json").exists()
    assert "HACKING" not in capsys.readouterr().out


def test_a_hacked_run_is_warned_about_and_goes_on(tmp_path, capsys):
    assert replay("dance_grpo", tmp_path / "run", "warn") == (None, None, None)
    out = capsys.readouterr().out
    assert "HACKING at iteration" in out and "held-out diffusion loss" in out
    assert not (tmp_path / "run/stopped.json").exists()


def test_a_hacked_run_is_stopped_where_it_is(tmp_path):
    at, ended, _ = replay("dance_grpo", tmp_path / "run", "stop")
    assert int(ended.step) == at
    record = json.loads((tmp_path / "run/stopped.json").read_text())
    assert record["action"] == "stop" and record["step"] == record["ended_at"] == at
    assert "held-out" in record["reason"]


def test_a_hacked_run_is_rolled_back_to_its_last_clean_evaluation(tmp_path):
    at, ended, steps = replay("dance_grpo", tmp_path / "run", "rollback")
    evaluations = [r["step"] for r in read_metrics(RUNS / "dance_grpo/metrics.jsonl") if r["stage"] == "eval"]
    before = evaluations[evaluations.index(at) - 1]
    assert int(ended.step) == before > 0
    np.testing.assert_array_equal(ended.params["w"], [before, before])
    assert max(steps) == before, "later checkpoints are gone: a resumed run starts from the clean one"
    record = json.loads((tmp_path / "run/stopped.json").read_text())
    assert (record["action"], record["step"], record["ended_at"]) == ("rollback", at, before)


@pytest.mark.slow
def test_a_whole_run_is_rolled_back_reports_it_and_goes_on_when_told(tmp_path):
    # A limit below zero calls the first evaluation of any run hacked.
    flags = ("--config.monitor.on_hacking=rollback", "--config.monitor.heldout_loss_limit=-0.99")
    run = tiny.main(tmp_path, *flags)
    assert run.returncode == 1, run.err
    assert "HACKING at iteration 3" in run.out and "rollback: the run ends with the state of iteration 0" in run.out
    assert "hacked" not in json.loads((tmp_path / "summary.json").read_text()).get("label", "")
    assert "rolled the run back to update 0" in (tmp_path / "report/index.html").read_text().lower()
    again = tiny.main(tmp_path, *flags)
    assert again.returncode == 1 and "ended by its monitor" in again.out
    on = tiny.main(tmp_path, "--config.monitor.on_hacking=warn", "--config.monitor.heldout_loss_limit=-0.99")
    assert on.returncode == 0, on.err
    steps = [r["step"] for r in tiny.lines(tmp_path, "ddrl")]
    assert steps == list(range(12)), "each step once, also those that were rolled back"
