"""Starting the sidecar from the trainer, and how it ends: with the trainer, by accident, by hanging. Real processes."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("fastapi")

from ddrl_jax.rewards import ConfigurationFault, RewardClient, launch
from ddrl_jax.rewards import environment as launching
from ddrl_jax.sidecar import build as building

ROOT = Path(__file__).parents[1]
LATENT = np.full((3, 4, 2, 2, 2), 0.5, np.float32)
PROMPTS = ["a", "b", "c"]
SCORER = """
import time
class Moody:
    name, batch_size = "moody", 4
    def load(self, weights, device): pass
    def score(self, videos, prompts):
        if prompts[0] == "hang": time.sleep(600)
        if prompts[0] == "die": import os, signal; os.kill(os.getpid(), signal.SIGKILL)
        return {"overall": videos.flatten(1).mean(1).tolist()}
"""


def gone(pid):
    """Whether the process has ended (a zombie that nobody has waited for counts)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def wait_until(condition, what):
    for _ in range(600):
        if condition():
            return
        time.sleep(0.05)
    pytest.fail(f"30 s passed and still not: {what}")


@pytest.fixture
def moody(tmp_path):
    (tmp_path / "moody.py").write_text(SCORER)
    with launch("this", [f"{tmp_path}/moody.py:Moody"], log_path=tmp_path / "log", max_relaunches=2) as sidecar:
        yield sidecar


def test_launch_score_close(tmp_path):
    log = tmp_path / "deep" / "sidecar.log"
    with launch("this", {"brightness/overall": 1.0}, codec="unshuffle:factor=2,std=0.5", log_path=log) as sidecar:
        assert sidecar.alive() and sidecar.url.startswith("http://127.0.0.1:")
        client = sidecar.client({"brightness": 2.0})
        client.ping()
        out = client.submit(LATENT, PROMPTS).result()
        assert out.valid.all() and out.reason == ""
        np.testing.assert_array_equal(out.scores["brightness/overall"], np.float32([0.25] * 3))
        # bfloat16 holds 0.5 exactly
        again = sidecar.client({"brightness": 1.0}, wire="bfloat16").submit(LATENT, PROMPTS).result()
        np.testing.assert_array_equal(again.scores["brightness/overall"], out.scores["brightness/overall"])
        with pytest.raises(ConfigurationFault, match=r"reward\.scorers: digits not served"):
            sidecar.client({"digits": 1.0}).ping()
        stranger = RewardClient(sidecar.url, "wrong", {"brightness": 1.0})
        with pytest.raises(ConfigurationFault, match=r"reward\.token: "):
            stranger.ping()
        with pytest.raises(ConfigurationFault, match=r"reward\.token: "):
            stranger.submit(LATENT, PROMPTS).result()
        assert os.getpgid(sidecar.pid) == sidecar.pid  # a process group of its own
        pid = sidecar.pid
    assert gone(pid) and not sidecar.alive()
    assert "brightness scored 3 samples" in log.read_text()
    assert sidecar.token not in log.read_text()
    sidecar.close()  # twice does no harm
    out = client.submit(LATENT, PROMPTS).result()
    assert not out.valid.any() and "the sidecar is closed" in out.reason


def test_a_killed_sidecar_is_relaunched_and_the_batch_scored(moody):
    client = moody.client({"moody": 1.0})
    assert client.submit(LATENT, PROMPTS).result().valid.all()
    os.kill(moody.pid, signal.SIGKILL)
    wait_until(lambda: not moody.alive(), "dead")
    tickets = [client.submit(LATENT, PROMPTS) for _ in range(3)]  # several fail over one death
    for out in (ticket.result() for ticket in tickets):
        assert out.valid.all() and out.reason == "", out
    assert moody.generation == 2 and moody.relaunches_left == 1


def test_relaunches_are_bounded(moody):
    client = moody.client({"moody": 1.0}, retries=1)
    for _ in range(3):
        out = client.submit(LATENT, ["die"] * 3).result()
        assert not out.valid.any() and out.attempts == 2
    assert "no relaunch left" in out.reason and "log" in out.reason
    assert moody.relaunches_left == 0 and not moody.alive()
    out = client.submit(LATENT, PROMPTS).result()
    assert not out.valid.any() and "no relaunch left" in out.reason


def test_a_hanging_scorer_costs_its_batch_and_is_replaced(moody):
    client = moody.client({"moody": 1.0}, timeout_s=2.0)
    pid = moody.pid
    out = client.submit(LATENT, ["hang"] * 3).result()
    assert not out.valid.any()
    assert "within 2 s" in out.reason and "was relaunched (1 relaunches left)" in out.reason
    assert gone(pid) and moody.alive()
    patient = moody.client({"moody": 1.0})
    assert patient.submit(LATENT, PROMPTS).result().valid.all()


def test_a_stopped_server_is_replaced(moody):
    os.kill(moody.pid, signal.SIGSTOP)
    out = moody.client({"moody": 1.0}, timeout_s=2.0).submit(LATENT, PROMPTS).result()
    assert not out.valid.any() and "was relaunched" in out.reason
    assert moody.client({"moody": 1.0}).submit(LATENT, PROMPTS).result().valid.all()


TRAINER = """
import sys, threading, time
from ddrl_jax.rewards import launch
def start():
    sidecar = launch("this", ["brightness"])
    print(sidecar.pid, flush=True)
    return sidecar
if sys.argv[1] == "thread":
    # The kernel's signal is tied to the starting thread: a sidecar must outlive that one, and only that one.
    keep = []
    thread = threading.Thread(target=lambda: keep.append(start()))
    thread.start(); thread.join(); time.sleep(0.5)
    client = keep[0].client({"brightness": 1.0})
    client.ping()
    print("alive", flush=True)
else:
    sidecar = start()
if sys.argv[1] == "leave": sys.exit(0)
if sys.argv[1] == "fail": raise RuntimeError("the trainer has a bug")
time.sleep(600)
"""


@pytest.mark.parametrize("how", ["kill", "thread", "leave", "fail"])
def test_the_sidecar_dies_with_its_trainer(tmp_path, how):
    (tmp_path / "trainer.py").write_text(TRAINER)
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    trainer = subprocess.Popen(
        [sys.executable, str(tmp_path / "trainer.py"), how], env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    pid = int(trainer.stdout.readline())
    if how == "thread":
        assert trainer.stdout.readline() == "alive\n"
    if how in ("kill", "thread"):
        assert not gone(pid)
        trainer.kill()
    trainer.wait(60)
    wait_until(lambda: gone(pid), "the sidecar is gone")
    trainer.stdout.close()


def refused(*args, match, **options):
    with pytest.raises(ConfigurationFault, match=match) as caught:
        launch(*args, **options)
    assert "\n" not in str(caught.value)


def test_mistakes_are_one_line(tmp_path):
    refused(str(tmp_path / "none"), match=r"^reward\.env: there is no environment in .*/none; make it with: "
            "python -m ddrl_jax.sidecar build --scorer digits --env ")  # fmt: skip
    refused("this", ["digits"], tmp_path, match="no digits.json .*sidecar build --scorer digits --data")
    refused("this", ["unheard-of"], match="none of .*brightness.*digits")
    refused("this", [], match=r"^reward\.scorers: empty")
    refused("this", ["brightness"], codec="zip", match="codec: 'zip'")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused("this", ["brightness"], port=port, match=f"port: {port} on 127.0.0.1 cannot be had")
    broken = tmp_path / "broken" / "bin"
    broken.mkdir(parents=True)
    (broken / "python").write_text("no program")
    refused(str(tmp_path / "broken"), match=r"^reward\.env: .* cannot be run")


def test_a_sidecar_that_never_answers(tmp_path):
    (tmp_path / "lazy.py").write_text(SCORER.replace("device): pass", "device): time.sleep(600)"))
    refused("this", [f"{tmp_path}/lazy.py:Moody"], startup_s=5.0, match="did not answer within 5 s")


def test_an_environment_without_torch_says_so(tmp_path):
    """The environment that `sidecar build` makes, before pip has put anything into it."""
    env = tmp_path / "env"
    building.make_env(env, ())
    linked = next(env.glob("lib/python*/site-packages/ddrl_jax"))
    assert linked.resolve() == ROOT / "ddrl_jax"
    building.make_env(env, ())  # again, over what is there
    refused(str(env), match=f"environment {env} lacks .*torch.*; complete it with: python -m ddrl_jax.sidecar build "
            f"--scorer digits --env {env}")  # fmt: skip


def test_both_sides_agree_on_the_environment(tmp_path):
    for scorer in ("digits", "other"):
        assert launching.default_env(scorer) == building.default_env(scorer)
        assert launching.build_command(scorer, tmp_path) == building.build_command(scorer, tmp_path)
    assert launching.env_python(tmp_path) == building.env_python(tmp_path)
