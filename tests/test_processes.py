"""Training in several processes, for real: the same numbers, one owner of everything, one end.

Every run is a set of processes with CPU devices of their own, joined by jax.distributed.
"""

import collections
import json
import shutil
import signal
import time

import jax
import numpy as np
import pytest

from ddrl_jax import build, config, train
from ddrl_jax.checkpoint.manager import Checkpoints
from ddrl_jax.parallel import distributed

from . import processes, tiny
from .paths import ROOT
from .processes_config import STEPS, get_config

DELAY = 0.1  # seconds a sample, of the scorer in the first run
DDRL = ("reward", "reward_std", "data_loss", "policy_loss", "loss", "grad_norm", "update_norm", "valid_rate")


def checked(ended, *statuses):
    assert tuple(status for status, _, _ in ended) == statuses, ended
    return ended


def losses(workdir):
    return [[line["step"], *(line[name] for name in DDRL)] for line in tiny.lines(workdir, "ddrl")]


def state_of(workdir, step):
    """The train state of a checkpoint, on this process's devices."""
    c = get_config()
    setup = build.build(c)
    optimizer, exponent = build.optimizer(c.train), build.ema_exponent(c.train)
    like = build.train_state(setup, build.init_params(c, setup.mesh, jax.random.key(0)), optimizer, exponent)
    with Checkpoints(workdir / "checkpoints/ddrl", read_only=True) as checkpoints:
        return checkpoints.restore(like, step)[1]


def assert_same_run(one, other):
    """Losses and the last state agree within float rounding: sums are in another order."""
    np.testing.assert_allclose(losses(one), losses(other), rtol=2e-4, atol=2e-5)
    first, second = (state_of(w, STEPS) for w in (one, other))
    for (path, a), b in zip(jax.tree.leaves_with_path(first.params), jax.tree.leaves(second.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4, err_msg=jax.tree_util.keystr(path))
    for a, b in zip(jax.tree.leaves(first.ema), jax.tree.leaves(second.ema), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
    assert int(first.step) == int(second.step) == STEPS


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The run in one process on one device."""
    workdir = tmp_path_factory.mktemp("one") / "run"
    variables = {"DDRL_TEST_RECORD": str(workdir.parent / "sent"), "DDRL_TEST_DELAY": str(DELAY)}
    checked(processes.finish(processes.run(workdir, 1, 1, **variables)), 0)
    return workdir


@pytest.mark.slow
def test_latency_is_hidden_behind_the_data_gradient(one):
    """Which was begun before the rewards were waited for, and was done while they were computed."""
    overlapped = 0
    for line in tiny.lines(one, "ddrl"):
        latency, waited = line["reward_latency_seconds"], line["seconds_reward_wait"]
        assert latency >= 8 * DELAY and 0 <= waited <= latency
        if "data_gradient_seconds" in line:  # else it took longer than the rewards, and nothing was waited for
            overlapped += 1
            assert waited <= latency - line["data_gradient_seconds"] + 1e-5
        else:
            assert waited == 0.0
    assert overlapped > 0


@pytest.mark.slow
def test_eight_devices_give_the_same_numbers(one, tmp_path):
    workdir = tmp_path / "run"
    checked(processes.finish(processes.run(workdir, 1, 8, DDRL_TEST_RECORD=str(tmp_path / "sent"))), 0)
    assert_same_run(one, workdir)


@pytest.mark.slow
def test_two_processes_end_together_go_on_elsewhere_and_give_the_same_numbers(one, tmp_path):
    """2 processes of 4 devices until one has damaged data, 2 of 1 until one gets SIGTERM, then 1 of 4."""
    workdir, sent = tmp_path / "run", tmp_path / "sent"
    module = (str(ROOT / "tests/process_main.py"),)
    variables = {"DDRL_TEST_RECORD": str(sent), "DDRL_TEST_DAMAGED": "1:2"}
    ended = checked(processes.finish(processes.run(workdir, 2, 4, module=module, **variables)), 1, 1)
    said = "".join(err for _, _, err in ended).strip().splitlines()
    assert said == ["stopped: the data of step 2 cannot be read: it is damaged"]
    assert (workdir / "checkpoints/ddrl/2").is_dir() and not (workdir / "checkpoints/ddrl/3").exists()
    assert len(losses(workdir)) == 2
    # Two probes of the same clip, the evaluation before, and two rollouts: every sample once.
    often = collections.Counter(sent.read_text().split())
    assert sorted(often.values()) == [1] * (8 + 2 * 8) + [2]

    going = processes.run(workdir, 2, 1, DDRL_TEST_RECORD=str(sent), DDRL_TEST_DELAY="0.3")
    deadline = time.monotonic() + 200
    while len(sent.read_text().split()) < 26 + 2 + 4:  # two probes, and rewards are awaited
        assert going[0].poll() is None and time.monotonic() < deadline, processes.finish(going)
        time.sleep(0.05)
    going[1].send_signal(signal.SIGTERM)
    ended = checked(processes.finish(going), 0, 0)
    done = len(losses(workdir))
    assert f"stopped at iteration {done} of {STEPS}" in ended[0][1] and 2 <= done < STEPS
    assert max(int(p.name) for p in (workdir / "checkpoints/ddrl").iterdir() if p.name.isdigit()) == done

    checked(processes.finish(processes.run(workdir, 1, 4, DDRL_TEST_RECORD=str(sent))), 0)
    assert_same_run(one, workdir)


@pytest.mark.slow
def test_evaluation_in_two_processes_measures_the_same(one, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(one, workdir)
    file = workdir / f"eval/{STEPS:06d}/eval.json"
    before = json.loads(file.read_text())
    file.unlink()
    arguments = ("--mode=eval", "--config.eval.chunk=8")
    ended = processes.finish(processes.run(workdir, 2, 2, *arguments, DDRL_TEST_RECORD=str(tmp_path / "sent")))
    checked(ended, 0, 0)
    after = json.loads(file.read_text())
    for name, values in before["per_clip"].items():
        np.testing.assert_allclose(after["per_clip"][name], values, rtol=1e-4, atol=1e-4, err_msg=name)
    np.testing.assert_allclose(after["heldout_loss_per_clip"], before["heldout_loss_per_clip"], rtol=1e-4)
    assert "report: " in ended[0][1] and "report: " not in ended[1][1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("each", "line"),
    [
        (((), ("--config.train.learning_rat=1",)), "error: config.train.learning_rat='1': there is no such field"),
        (((), ("--config.seed=1",)), "error: config.seed=1: process 0 has 0; all processes must be given the same"),
        ((("--config.mesh.fsdp=3",),) * 2, "error: config.mesh: replica=1, fsdp=3, context=1 does not give 2 devices"),
        ((("--mode=prepare",),) * 2, "error: --mode=prepare: runs in one process, not in 2"),
    ],
)
def test_bad_input_ends_all_with_one_line(each, line, tmp_path):
    ended = processes.finish(processes.run(tmp_path / "run", 2, 1, each=each), timeout=120)
    checked(ended, 2, 2)
    said = "".join(err for _, _, err in ended).strip().splitlines()
    assert len(said) == 1 and said[0].startswith(line)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 4), (4, 1)])
def test_rows_and_words_are_shared(shape):
    script = ["tests/distributed_script.py"]
    ended = processes.finish(processes.start([script] * shape[0], processes.environments(*shape)), timeout=120)
    assert [(status, err) for status, _, err in ended] == [(0, "")] * shape[0]


@pytest.mark.slow
def test_a_process_that_fails_ends_those_that_wait_for_it():
    script = ["tests/distributed_script.py", "fail"]
    ended = processes.finish(processes.start([script] * 2, processes.environments(2, 1)), timeout=120)
    assert [(status, out.strip(), err.strip()) for status, out, err in ended] == [
        (2, "done", ""),
        (2, "done", "error: process 1 found it"),
    ]


# -------------------------------------------------------------------------------------------- how processes are found


GIVEN = {"JAX_COORDINATOR_ADDRESS": "host:1234", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "node[003-004]",
    "SLURM_NTASKS": "16",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
}


@pytest.fixture
def environment(monkeypatch):
    for name in (*GIVEN, *SLURM, "CUDA_VISIBLE_DEVICES", "JAX_LOCAL_DEVICE_IDS", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)

    def put(variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return put


def test_a_plain_process_is_alone(environment):
    assert distributed._settings() is None
    environment({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "16"})  # a batch script without srun
    assert distributed._settings() is None
    environment(GIVEN | {"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"})
    assert distributed._settings() is None


def test_processes_are_given_by_variables(environment):
    environment(GIVEN)
    assert distributed._settings() == {
        "coordinator_address": "host:1234",
        "num_processes": 4,
        "process_id": 3,
        "cluster_detection_method": "deactivate",
    }


@pytest.mark.parametrize(
    ("variables", "devices"),
    [
        ({}, 1),  # a task a GPU: the GPU of its number
        ({"CUDA_VISIBLE_DEVICES": "1"}, None),  # Slurm has bound it
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x16)", "SLURM_LOCALID": "0"}, None),  # a task a node: all its GPUs
        ({"JAX_LOCAL_DEVICE_IDS": "2,3"}, None),  # the user has
    ],
)
def test_slurm_tasks(environment, variables, devices):
    environment(SLURM | variables)
    settings = distributed._settings()
    assert settings["local_device_ids"] == devices
    assert (settings["num_processes"], settings["process_id"]) == (16, 9)
    assert settings["coordinator_address"].startswith("node003:")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"JAX_COORDINATOR_ADDRESS": "host"}, r"JAX_COORDINATOR_ADDRESS='host': must be HOST:PORT"),
        ({"JAX_NUM_PROCESSES": "two"}, "JAX_NUM_PROCESSES='two': must be a whole number"),
        ({"JAX_PROCESS_ID": "4"}, r"JAX_PROCESS_ID='4': must be in 0 \.\. 3, as JAX_NUM_PROCESSES=4"),
        ({"JAX_NUM_PROCESSES": ""}, "JAX_NUM_PROCESSES: not set, but JAX_COORDINATOR_ADDRESS, JAX_PROCESS_ID is"),
        ({"JAX_NUM_PROCESSES": "", "JAX_PROCESS_ID": ""}, "JAX_NUM_PROCESSES, JAX_PROCESS_ID: not set"),
    ],
)
def test_wrong_variables_are_one_line(environment, variables, message):
    environment(GIVEN | variables)
    with pytest.raises(ValueError, match=message):
        distributed.initialize()


# ------------------------------------------------------------------------------------------------ waiting for rewards


class Answer:
    """A batch that is answered `after` seconds."""

    def __init__(self, after, fault=None):
        self._at, self._fault = time.monotonic() + after, fault

    def done(self):
        return time.monotonic() >= self._at

    @property
    def fault(self):
        return self._fault if self.done() else None


class Gradient:
    """Of the data loss, done `after` seconds."""

    def __init__(self, after):
        self._at = time.monotonic() + after

    def is_ready(self):
        return time.monotonic() >= self._at


def never():
    return False


def test_rewards_that_are_there_before_the_data_gradient_are_hidden():
    waited = train.wait_for_rewards([Answer(0.0)], (Gradient(60.0),), never, None)
    assert waited.answered and waited.free == np.inf and max(0.0, waited.there - waited.free) == 0.0


def test_of_later_ones_only_the_rest_is_waited_for():
    began = time.perf_counter()
    waited = train.wait_for_rewards([Answer(0.4), Answer(0.0)], (Gradient(0.2),), never, None)
    assert waited.answered and not waited.stopping and not waited.failed
    assert began + 0.2 <= waited.free < waited.there and waited.there >= began + 0.4


@pytest.mark.parametrize(
    ("after", "refused", "stop", "unread", "expected"),
    [
        (60.0, None, True, None, (False, True, False)),  # left for the run that goes on
        (0.0, None, True, None, (True, True, False)),  # finished first
        (0.0, ValueError("token"), False, None, (False, False, True)),
        (0.2, None, False, ValueError("damaged"), (True, False, True)),  # of the next step: this one is whole
    ],
)
def test_what_ends_a_run_while_it_waits(after, refused, stop, unread, expected):
    waited = train.wait_for_rewards([Answer(after, refused)], None, lambda: stop, unread)
    assert (waited.answered, waited.stopping, waited.failed) == expected


def test_a_config_of_another_process_is_refused(monkeypatch, tmp_path):
    c = get_config()
    theirs = [str(tmp_path), config.to_json(c)]
    monkeypatch.setattr(distributed, "primary", lambda do: theirs)
    c.reward.url = "http://10.0.0.2:8000"  # of a fleet each may have its own
    build.same_run(c, tmp_path)
    with pytest.raises(config.ConfigError, match=r"--workdir=.*: process 0 has .*; all processes must"):
        build.same_run(c, tmp_path / "other")
    c.seed = 1
    with pytest.raises(config.ConfigError, match=r"config\.seed=1: process 0 has 0"):
        build.same_run(c, tmp_path)
