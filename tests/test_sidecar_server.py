"""The server as a real process, asked with plain HTTP as any other client would."""

import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")

ROOT = Path(__file__).parents[1]
TOKEN = "s3cret-töken"
AUTH = {"Authorization": f"Bearer {TOKEN}".encode()}
SLOW_SCORER = """
import time
class Slow:
    name, batch_size = "slow", 2
    def load(self, weights, device):
        pass
    def score(self, videos, prompts):
        time.sleep(float(prompts[0]))
        return {"overall": videos.flatten(1).mean(1).tolist()}
"""


def environment(token=TOKEN):
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TOK": token}


def command(*args):
    return [sys.executable, "-m", "ddrl_jax.sidecar", "serve", *map(str, args)]


class Server:
    def __init__(self, *args, token=TOKEN):
        extra = ("--token-env", "TOK") if token else ()
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 (a pipe that nobody reads would stop it)
        self.process = subprocess.Popen(
            command(*args, *extra), env=environment(token), stdout=subprocess.PIPE, stderr=self.log
        )
        self.ready = json.loads(self.process.stdout.readline() or b"{}")
        assert self.ready, self.stop()
        self.url = f"http://127.0.0.1:{self.ready['port']}"
        self.http = httpx.Client(base_url=self.url, headers=AUTH if token else {}, trust_env=False, timeout=30)

    def stop(self):
        """Kills it. Returns its log."""
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        with self.log:
            self.log.seek(0)
            return self.log.read().decode()

    def enqueue(self, array, prompts=None, reward_fn=None, **fields):
        return self.http.post("/api/reward/enqueue", content=body(array, prompts, reward_fn, **fields))

    def pull(self, uuid, type="brightness"):
        return self.http.post("/api/reward/pull", data={"uuid": uuid, "type": type})

    def wait(self, uuid, type="brightness"):
        while (answer := self.pull(uuid, type)).status_code == 400:
            time.sleep(0.02)
        return answer


def body(array, prompts=None, reward_fn=None, **fields):
    buffer = io.BytesIO()
    np.save(buffer, array)
    header = {"prompts": prompts or ["a"] * len(array), "reward_fn": reward_fn or {"brightness": 1.0}}
    return json.dumps(header | fields).encode() + b"\n" + buffer.getvalue()


@pytest.fixture
def start():
    """Servers that are gone after the test, whatever became of it."""
    servers = []

    def start(*args, **options):
        servers.append(Server(*args, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    (folder / "slow.py").write_text(SLOW_SCORER)
    server = Server("--scorer", "brightness", "--scorer", f"{folder}/slow.py:Slow", "--queue-size", 3,
                    "--max-body-mib", 1, "--replica-id", "r1", "--codec", "unshuffle:factor=2,std=0.5",
                    "--ready-file", folder / "ready.json")  # fmt: skip
    assert json.loads((folder / "ready.json").read_text()) == server.ready
    yield server
    log = server.stop()
    assert "Traceback" not in log, log
    assert TOKEN not in log
    assert "soon" not in log  # no prompt, not even in the reason of a failure


LATENT = np.full((3, 4, 1, 2, 2), 0.5, np.float32)


def test_scores_come_back_in_the_protocols_form(server):
    answer = server.enqueue(LATENT, video_infos=[{"video_fps": 16.0}] * 3, media_type="latent")
    assert answer.status_code == 200 and answer.json()["replica_id"] == "r1"
    result = server.wait(answer.json()["uuid"])
    assert result.status_code == 200
    fields = result.json()
    assert set(fields) == {"scores", "input_info", "duration", "decoded_duration", "type"}
    assert fields["scores"] == {"brightness/overall": [0.25] * 3}
    assert fields["type"] == "brightness"
    assert fields["input_info"] == {"shape": [3, 4, 1, 2, 2], "dtype": "float32", "min": "0.500", "max": "0.500"}
    assert server.pull(answer.json()["uuid"]).json() == fields
    # With one scorer asked for, `type` may be left out.
    assert server.http.post("/api/reward/pull", data={"uuid": answer.json()["uuid"]}).json() == fields


def test_every_media_type(server):
    video = np.zeros((2, 3, 4, 6, 6), np.uint8)
    video[1] = 255
    uuid = server.enqueue(video, media_type="video").json()["uuid"]
    assert server.wait(uuid).json()["scores"]["brightness/overall"] == [-1.0, 1.0]
    uuid = server.enqueue(video[:, :, 0].transpose(0, 2, 3, 1), media_type="image").json()["uuid"]
    assert server.wait(uuid).json()["scores"]["brightness/overall"] == [-1.0, 1.0]
    bf16 = np.ascontiguousarray(LATENT.view(np.uint16)[..., 1::2]).view(np.uint8)  # 0.5 is exact in bfloat16
    assert bf16.shape == (3, 4, 1, 2, 4)
    uuid = server.enqueue(bf16).json()["uuid"]
    assert server.wait(uuid).json()["scores"]["brightness/overall"] == [0.25] * 3


def test_two_scorers_in_one_request(server):
    uuid = server.enqueue(LATENT, ["0.3"] * 3, {"brightness": 0.5, "slow": 2}).json()["uuid"]
    assert server.wait(uuid, "brightness").status_code == 200
    assert server.wait(uuid, "slow").json()["scores"] == {"slow/overall": [0.25] * 3}


def test_pending_is_the_only_400(server):
    uuid = server.enqueue(LATENT, ["0.5"] * 3, {"slow": 1}).json()["uuid"]
    assert server.pull(uuid, "slow").status_code == 400
    for answer, status in [
        (server.pull("nope", "slow"), 404),
        (server.pull(uuid, "brightness"), 422),
        (server.http.post("/api/reward/pull", data={"type": "slow"}), 422),
        (server.http.post("/api/reward/pull", content=b"\x00\xff"), 422),
        (server.http.post("/api/reward/pull", content=b"x" * 100,
                          headers={"content-type": "multipart/form-data; boundary=zz"}), 422),
        (server.http.post("/api/reward/ping"), 422),
        (server.http.get("/api/reward/pull"), 405),
        (server.http.get("/nothing"), 404),
        (server.enqueue(LATENT, reward_fn={"videoalign": 1}), 422),
        (server.enqueue(LATENT[0]), 422),
        (server.enqueue(LATENT, prompts=["one"]), 422),
        (server.http.post("/api/reward/enqueue", content=b"no newline"), 422),
        (server.http.post("/api/reward/enqueue"), 422),
        (server.enqueue(LATENT * np.nan), 422),
    ]:  # fmt: skip
        assert answer.status_code == status, answer.text
        message = answer.json()["message"]
        assert message and "\n" not in message and len(message) <= 300
    assert server.wait(uuid, "slow").status_code == 200


def test_a_failed_task_tells_why_at_once(server):
    uuid = server.enqueue(LATENT, ["soon"] * 3, {"slow": 1}).json()["uuid"]
    answer = server.wait(uuid, "slow")
    assert answer.status_code == 422
    assert answer.json()["message"] == "scorer slow: could not convert string to float: 'soon'"


def test_token(server):
    for wrong in ({}, {"Authorization": "Bearer nope"}, {"Authorization": TOKEN.encode()}):
        with httpx.Client(base_url=server.url, trust_env=False, headers=wrong) as stranger:
            assert stranger.post("/api/reward/enqueue", content=body(LATENT)).status_code == 401
            assert stranger.post("/api/reward/pull", data={"uuid": "x"}).status_code == 401
            answer = stranger.post("/api/reward/ping", data={"info_data": "{}"})
            assert answer.status_code == 401 and "token" in answer.json()["message"]
            assert stranger.get("/docs").status_code == 401
            assert stranger.get("/health").status_code == 200  # probes have no token
    assert server.http.post("/api/reward/ping", data={"info_data": "{}"}).status_code == 200


def test_health(server):
    health = server.http.get("/health").json()
    assert health["status"] == "ok" and health["scorers"] == ["brightness", "slow"]
    assert health["pending"] == 0


def test_full_queue_and_large_bodies(server):
    first = [server.enqueue(LATENT, ["0.7"] * 3, {"slow": 1}) for _ in range(3)]
    assert [a.status_code for a in first] == [200] * 3
    full = server.enqueue(LATENT, ["0.7"] * 3, {"slow": 1})
    assert full.status_code == 429 and float(full.headers["retry-after"]) > 0
    for answer in first:
        assert server.wait(answer.json()["uuid"], "slow").status_code == 200
    big = b"x" * ((1 << 20) + 1)
    assert server.http.post("/api/reward/enqueue", content=big).status_code == 413

    def drip():  # no content-length
        for _ in range(17):
            yield b"x" * (1 << 16)

    assert server.http.post("/api/reward/enqueue", content=drip()).status_code == 413


def test_a_body_that_is_cut_off_leaves_the_server_well(server):
    with socket.create_connection(("127.0.0.1", server.ready["port"])) as raw:
        head = f"POST /api/reward/enqueue HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
        raw.sendall(head.encode() + b"Content-Length: 1000\r\n\r\nabc")
    time.sleep(0.1)
    uuid = server.enqueue(LATENT).json()["uuid"]
    assert server.wait(uuid).status_code == 200


def test_sigterm_finishes_and_hands_out_what_was_taken(tmp_path, start):
    (tmp_path / "slow.py").write_text(SLOW_SCORER)
    server = start("--scorer", f"{tmp_path}/slow.py:Slow")
    uuids = [server.enqueue(LATENT, ["0.3"] * 3, {"slow": 1}).json()["uuid"] for _ in range(2)]
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    assert server.enqueue(LATENT, ["0"] * 3, {"slow": 1}).status_code == 503
    assert server.http.get("/health").json()["status"] == "stopping"
    for uuid in uuids:
        assert server.wait(uuid, "slow").status_code == 200
    assert server.process.wait(20) == 0


def test_a_hung_scorer_does_not_keep_a_stopping_server(tmp_path, start):
    (tmp_path / "slow.py").write_text(SLOW_SCORER)
    server = start("--scorer", f"{tmp_path}/slow.py:Slow", "--grace", "0.5")
    assert server.enqueue(LATENT, ["600"] * 3, {"slow": 1}).status_code == 200
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(20) == 0


def test_without_a_token_loopback_is_open(start):
    server = start("--scorer", "brightness", token="")
    assert server.http.post("/api/reward/ping", data={"info_data": "{}"}).status_code == 200


def fails(*args, env=None):
    done = subprocess.run(command(*args), env=env or environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("ddrl_jax.sidecar: "), done.stderr
    return lines[0]


def test_mistakes_at_the_start_are_one_line_and_exit_2(tmp_path):
    assert "there is no token" in fails("--scorer", "brightness", "--host", "0.0.0.0")
    assert "NOT_SET is empty" in fails("--scorer", "brightness", "--token-env", "NOT_SET")
    assert "codec: 'wan'" in fails("--scorer", "brightness", "--codec", "wan")
    assert "'nothing' is none of" in fails("--scorer", "nothing")
    assert "no digits.json" in fails("--scorer", "digits", "--weights", tmp_path)
    assert "port: 70000 is outside" in fails("--scorer", "brightness", "--port", 70000)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"port: {port} on 127.0.0.1 cannot be had" in fails("--scorer", "brightness", "--port", port)


def test_many_clients_at_once_each_get_their_own_scores(server):
    wrong, right = [], []

    def ask(value):
        for _ in range(5):
            array = np.full((2, 3, 1, 2, 2), value, np.uint8)
            while (answer := server.enqueue(array, media_type="video")).status_code == 429:
                time.sleep(0.05)
            scores = server.wait(answer.json()["uuid"]).json()["scores"]["brightness/overall"]
            if not np.allclose(scores, value / 127.5 - 1, atol=1e-6):
                wrong.append((value, scores))
            else:
                right.append(value)

    threads = [threading.Thread(target=ask, args=(20 * i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(right) == 8 * 5
