"""Runs that are killed, stopped, resumed, extended, damaged: each for real, in a process of its own.

The measure is the sha256 of the parameters after the last step, against an uninterrupted run's.
"""

import functools
import hashlib
import json
import os
import random
import shutil
import signal
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import jax
import numpy as np
import pytest

from ddrl_jax import build, train
from ddrl_jax.checkpoint.manager import Checkpoints
from ddrl_jax.logbook import read_metrics

from . import tiny

pytestmark = pytest.mark.slow
TOTAL = tiny.config().train.steps


def digest(workdir, step=TOTAL):
    """sha256 over parameters, optimizer and EMA of the checkpoint at `step`."""
    config = tiny.config()
    config.train.micro_batch = 8  # restored on eight devices
    setup = build.build(config)
    optimizer, exponent = build.optimizer(config.train), build.ema_exponent(config.train)
    params = build.init_params(config, setup.mesh, jax.random.key(0))
    checkpoints = Checkpoints(workdir / "checkpoints/ddrl", read_only=True)
    found, state = checkpoints.restore(build.train_state(setup, params, optimizer, exponent))
    assert found == step
    sha = hashlib.sha256()
    for leaf in jax.tree.leaves(state):
        sha.update(np.asarray(leaf).tobytes())
    return sha.hexdigest()


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """One uninterrupted run; the others are compared with it."""
    workdir = tmp_path_factory.mktemp("straight") / "run"
    process = tiny.main(workdir)
    assert process.returncode == 0, process.err
    return workdir


def check_metrics(workdir, total=TOTAL):
    """Each step once, in order, with every number that the straight run has."""
    for stage, steps in (("pretrain", 4), ("ddrl", total)):
        assert [m["step"] for m in tiny.lines(workdir, stage)] == list(range(steps))
    evaluations = [m["step"] for m in tiny.lines(workdir, "eval")]
    assert evaluations == [s for s in range(total + 1) if s % 3 == 0]


def test_the_straight_run_is_whole(straight):
    check_metrics(straight)
    line = tiny.lines(straight, "ddrl")[-1]
    for name in ("reward", "reward_std", "data_loss", "ratio_mean", "valid_rate", "grad_norm"):
        assert np.isfinite(line[name]), name
    assert line["valid_rate"] == 1.0 and line["ratio_mean"] == 1.0
    assert {"seconds", "seconds_rollout", "seconds_gradients", "seconds_reward_wait"} <= line.keys()
    assert (straight / "report/index.html").stat().st_size > 10_000
    assert len(json.loads((straight / "summary.json").read_text())["signals"]) == 5
    assert {"grad_norm/step00", "grad_norm/step02"} <= line.keys()


def test_the_same_command_twice_gives_the_same_parameters(straight, tmp_path):
    process = tiny.main(tmp_path / "run")
    assert process.returncode == 0, process.err
    assert digest(tmp_path / "run") == digest(straight)
    first, second = (tiny.lines(w, "ddrl") for w in (straight, tmp_path / "run"))
    strip = [{k: v for k, v in m.items() if "seconds" not in k} for m in first]
    assert strip == [{k: v for k, v in m.items() if "seconds" not in k} for m in second]


def _kill_when(workdir, ready, timeout=240):
    """Starts the run and kills it, with everything it started, once ready() is true. False when it ended before."""
    with (workdir.parent / "log.txt").open("a") as log:
        process = tiny.start(workdir, stdout=log, stderr=log)
    deadline = time.monotonic() + timeout
    while process.poll() is None and not ready():
        assert time.monotonic() < deadline, "the moment to kill never came"
        time.sleep(0.002)
    alive = process.poll() is None
    process.kill()
    process.wait()
    return alive


def test_killed_at_random_moments_and_inside_a_save(straight, tmp_path):
    workdir = tmp_path / "run"
    rng = random.Random(20251204)
    log = workdir / "metrics.jsonl"

    def count():
        return log.read_bytes().count(b"\n") if log.exists() else 0

    # A save under way is a temporary folder beside the checkpoints; one that is left shows that the kill was inside it.
    saving = lambda: any(workdir.glob("checkpoints/*/*tmp*"))  # noqa: E731
    kills = 0
    for _ in range(6):
        kills += _kill_when(workdir, saving)
        if saving():
            break
    assert saving(), "no kill fell inside a save"
    for _ in range(5):
        before, extra = count(), rng.random() * 0.1
        moment = []

        def ready(before=before, extra=extra, moment=moment):
            if not moment and count() > before:
                moment.append(time.monotonic() + extra)
            return bool(moment) and time.monotonic() >= moment[0]

        kills += _kill_when(workdir, ready)
    assert kills >= 5, "the run was over before it could be killed often enough"
    process = tiny.main(workdir)
    assert process.returncode == 0, process.err
    assert digest(workdir) == digest(straight)
    check_metrics(workdir)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_asked_to_stop_it_saves_and_leaves_and_the_rest_is_the_same(straight, tmp_path, number):
    workdir = tmp_path / "run"
    process = tiny.start(workdir)
    while not (workdir / "metrics.jsonl").exists() or len(tiny.lines(workdir, "ddrl")) < 1:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "stopped at iteration" in out
    assert not (workdir / "report/index.html").exists()
    saved = max(int(p.name) for p in (workdir / "checkpoints/ddrl").iterdir() if p.name.isdigit())
    assert 0 < saved < TOTAL and len(tiny.lines(workdir, "ddrl")) == saved
    process = tiny.main(workdir)
    assert process.returncode == 0, process.err
    assert f"resuming at iteration {saved} of {TOTAL}" in process.out
    assert digest(workdir) == digest(straight)
    check_metrics(workdir)


class _StopsInTheEvaluation:
    """An evaluator that is told to stop while it works, as SIGTERM does to a real one."""

    def __init__(self, config, setup, client, workdir, book):
        pass

    def __call__(self, params, step, *, full):
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return {"heldout_loss": 1.0}


@pytest.mark.parametrize("updates", [1, 2])
def test_stopped_inside_an_evaluation_no_line_is_lost(tmp_path, updates, monkeypatch):
    # One of the test process's eight devices, which these batches do not divide by.
    one = functools.partial(build.make_mesh, devices=jax.devices()[:1])
    monkeypatch.setattr(build, "make_mesh", one)
    config = tiny.config()
    config.eval.every, config.checkpoint.every = 3, 100
    config.train.updates_per_rollout = updates
    workdir = tmp_path / "run"
    assert train.run(config, workdir, _StopsInTheEvaluation) is False
    assert [m["step"] for m in tiny.lines(workdir, "ddrl")] == [0, 1, 2]
    assert train.run(config, workdir, _StopsInTheEvaluation) is True
    assert [m["step"] for m in tiny.lines(workdir, "ddrl")] == list(range(TOTAL))
    # The second update is off-policy, once the learning rate has warmed up: its ratio is not 1, and clipping bites.
    clipped = [m["clip_fraction"] > 0 for m in tiny.lines(workdir, "ddrl")]
    assert all(clipped[2:]) if updates == 2 else not any(clipped)


def test_a_finished_run_says_so_and_train_steps_extends_it(straight, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(straight, workdir)
    before = (workdir / "metrics.jsonl").read_bytes()
    process = tiny.main(workdir)
    assert process.returncode == 0, process.err
    assert f"this run is finished: {TOTAL} of {TOTAL} iterations" in process.out
    assert (workdir / "metrics.jsonl").read_bytes() == before
    process = tiny.main(workdir, f"--config.train.steps={TOTAL + 3}")
    assert process.returncode == 0, process.err
    assert f"config.train.steps: {TOTAL} when the run was started, {TOTAL + 3} now" in process.out
    check_metrics(workdir, TOTAL + 3)
    longer = tmp_path / "longer"
    process = tiny.main(longer, f"--config.train.steps={TOTAL + 3}")
    assert process.returncode == 0, process.err
    assert digest(workdir, TOTAL + 3) == digest(longer, TOTAL + 3)


def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(straight, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(straight, workdir)
    newest = workdir / f"checkpoints/ddrl/{TOTAL}"
    for file in [p for p in newest.rglob("*") if p.is_file()]:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    process = tiny.main(workdir)
    assert process.returncode == 0, process.err
    assert f"ddrl/{TOTAL} cannot be read" in process.err + process.out
    assert f"resuming at iteration {TOTAL - 2} of {TOTAL}" in process.out
    assert digest(workdir) == digest(straight)
    check_metrics(workdir)


def test_another_runs_base_is_taken_and_not_written_to(straight, tmp_path):
    base = sorted((p.name, p.stat().st_mtime_ns) for p in (straight / "checkpoints/pretrain").rglob("*"))
    workdir = tmp_path / "run"
    process = tiny.main(workdir, f"--config.pretrain.from_run={straight}")
    assert process.returncode == 0, process.err
    assert not (workdir / "checkpoints/pretrain").exists()
    assert sorted((p.name, p.stat().st_mtime_ns) for p in (straight / "checkpoints/pretrain").rglob("*")) == base
    assert digest(workdir) == digest(straight)


def test_eval_mode_measures_the_newest_checkpoint_again(straight, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(straight, workdir)
    before = json.loads((workdir / f"eval/{TOTAL:06d}/eval.json").read_text())
    shutil.rmtree(workdir / f"eval/{TOTAL:06d}")
    process = tiny.main(workdir, "--mode=eval")
    assert process.returncode == 0, process.err
    after = json.loads((workdir / f"eval/{TOTAL:06d}/eval.json").read_text())
    assert after["per_clip"] == before["per_clip"]
    check_metrics(workdir)


def _sidecar_of(pid):
    """The sidecar process that a trainer launched, or None."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rsplit(")", 1)[1].split()[1])
            if parent == pid and b"ddrl_jax.sidecar" in stat.with_name("cmdline").read_bytes():
                return int(stat.parent.name)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return None


def test_a_killed_sidecar_is_started_again_and_the_run_goes_on(tmp_path):
    workdir = tmp_path / "run"
    process = tiny.start(workdir)
    while not (workdir / "metrics.jsonl").exists() or len(tiny.lines(workdir, "ddrl")) < 2:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    first = _sidecar_of(process.pid)
    os.kill(first, signal.SIGKILL)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    check_metrics(workdir)
    assert tiny.lines(workdir, "ddrl")[-1]["valid_rate"] == 1.0
    assert (workdir / "sidecar.log").read_text().count('"pid"') == 2  # it says so at each start


class _Refuses(BaseHTTPRequestHandler):
    """A reward server that rates the first batch, the check at the start, and fails on every other."""

    pulls = 0

    def _answer(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        self._answer(200, {"status": "ok", "scorers": ["brightness"]})

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.path.endswith("enqueue"):
            self._answer(200, {"uuid": "1"})
        elif self.path.endswith("pull"):
            _Refuses.pulls += 1
            if _Refuses.pulls > 1:
                return self._answer(422, {"detail": "the scorer is broken"})
            self._answer(
                200,
                {
                    "scores": {"brightness/overall": [0.0]},
                    "input_info": {},
                    "duration": "0",
                    "decoded_duration": "0",
                    "type": "brightness",
                },
            )
        else:
            self._answer(200, {})

    def log_message(self, *_):
        pass


def test_a_run_without_valid_rewards_stops_says_why_and_can_go_on(straight, tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Refuses)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    workdir = tmp_path / "run"
    given = ("--config.reward.launch=False", f"--config.reward.url=http://127.0.0.1:{server.server_address[1]}")
    process = tiny.main(workdir, *given, "--config.reward.min_valid_window=2")
    server.shutdown()
    assert process.returncode == 1
    assert "stopped: fewer than 50% of the rewards were valid in 2 iterations in a row" in process.err
    assert "the scorer is broken" in process.err and "Traceback" not in process.err
    assert [m["valid_rate"] for m in tiny.lines(workdir, "ddrl")] == [0.0, 0.0]
    assert [m["reward"] for m in tiny.lines(workdir, "ddrl")] == [None, None]
    assert (workdir / "checkpoints/ddrl/2").is_dir()


def test_lines_that_are_none_are_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(
        b'{"stage": "ddrl", "step": 0}\n[1, 2]\n\xff\xfe\n{"step": 1}\n{"stage": "ddrl", "step": 1}\n{"stage": "dd'
    )
    assert [m["step"] for m in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1]
