"""The fleet's queue when replicas and Redis die: real processes, a real Redis."""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from ddrl_jax.sidecar import redis_queue
from ddrl_jax.sidecar.protocol import EnqueueHeader, Limits
from ddrl_jax.sidecar.queue import QueueDownError, QueueFullError, open_queue

from .real_redis import redis, server  # noqa: F401

ROOT = Path(__file__).parents[1]
X = np.arange(6, dtype=np.float32).reshape(2, 3, 1, 1, 1)
HEADER = EnqueueHeader(prompts=["secret"] * 2, reward_fn={"a": 1.0, "b": 1.0})
# A replica that takes tasks, says so, answers `a` of each, and goes on holding them.
REPLICA = """
import sys, time
from ddrl_jax.sidecar.protocol import Limits
from ddrl_jax.sidecar.queue import open_queue
queue = open_queue(sys.argv[1], Limits(), ("a", "b"), dead_seconds=float(sys.argv[2]))
while True:
    task = queue.take(1.0)
    if task is not None:
        queue.answer(task, "a", {"scores": {"by": sys.argv[3]}})
        print(task.uuid, flush=True)
"""


@pytest.fixture
def open_one(server):  # noqa: F811
    server.client.flushall()
    queues = []

    def open_one(dead_seconds=0.6, scorers=("a", "b"), codec="", **limits):
        queues.append(open_queue(server.url, Limits(**limits), scorers, codec, dead_seconds))
        return queues[-1]

    yield open_one
    for queue in queues:
        queue.close()


@pytest.fixture
def replica(server):  # noqa: F811
    processes = []

    def replica(name="r", dead_seconds=0.6):
        variables = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", REPLICA, server.url, str(dead_seconds), name]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables))
        return processes[-1]

    yield replica
    for process in processes:
        process.kill()
        process.communicate()


def silent(queue):
    """As if its process had been stopped: no more heartbeats."""
    queue._beat = lambda: None


def take(queue, seconds=20.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if (task := queue.take(0.1)) is not None:
            return task
    raise AssertionError("nothing to take")


def done(queue, task, **scores):
    for name in task.asked:
        queue.answer(task, name, {"scores": scores})
    queue.finish(task)


def test_the_work_of_a_killed_replica_is_taken_over(open_one, replica):
    queue = open_one()
    uuid = queue.add(HEADER, X)
    process = replica("first")
    assert process.stdout.readline().strip() == uuid
    process.send_signal(signal.SIGKILL)
    process.wait()
    task = take(queue)
    # What it had answered stays; the rest is done again.
    assert task.uuid == uuid and task.asked == ["b"]
    np.testing.assert_array_equal(task.array, X)
    done(queue, task, by="second")
    assert queue.get(uuid, "a") == (200, {"scores": {"by": "first"}})
    assert queue.get(uuid, "b") == (200, {"scores": {"by": "second"}})
    assert queue.account["scored"] == 1


def test_the_work_of_a_slow_replica_is_not(open_one):
    slow, idle = open_one(), open_one()
    slow.add(HEADER, X)
    task = take(slow)
    end = time.monotonic() + 2.5  # four times what makes it dead
    while time.monotonic() < end:
        assert idle.take(0.1) is None
    done(slow, task)
    assert idle.take(0.1) is None and slow.account["scored"] == 1


def test_who_was_taken_for_dead_changes_nothing_more(open_one, caplog):
    paused, other = open_one(), open_one()
    uuid = paused.add(HEADER, X)
    first = take(paused)
    beat, paused._beat = paused._beat, lambda: None
    second = take(other)
    assert second.uuid == uuid and second.asked == ["a", "b"]
    other.answer(second, "a", {"scores": {"by": "other"}})
    caplog.set_level(logging.WARNING)
    beat()  # it wakes up, and does not take the task back
    assert "another replica took" in caplog.text
    [held] = other._redis.xpending_range(other._stream, "sidecar", "-", "+", 10)
    assert held["consumer"].decode() == other._me
    done(paused, first, by="paused")
    done(other, second, by="other")
    assert queue_answers(other, uuid) == ["other", "paused"]
    assert paused.account["scored"] + other.account["scored"] == 1
    beat()
    assert paused.account["pending"] == paused.account["bytes"] == 0


def queue_answers(queue, uuid):
    return [queue.get(uuid, name)[1]["scores"]["by"] for name in ("a", "b")]


def test_a_task_that_kills_three_replicas_fails(open_one, replica, caplog):
    queue = open_one()
    poison, innocent = queue.add(HEADER, X), queue.add(HEADER, X)
    for i in range(3):
        process = replica(f"r{i}")
        while process.stdout.readline().strip() != poison:
            pass
        process.kill()
        process.wait()
    end = time.monotonic() + 60
    while queue.account["scored"] == 0:
        assert time.monotonic() < end
        if (task := queue.take(0.1)) is not None:
            assert task.uuid == innocent
            done(queue, task, by="queue")
    while queue.account["failed"] == 0:
        assert queue.take(0.1) is None and time.monotonic() < end
    assert queue.get(poison, "b") == (422, {"message": "scorer b: killed 3 replicas"})
    assert queue.get(poison, "a") == (200, {"scores": {"by": "r0"}})
    assert queue.get(innocent, "b")[0] == 200
    assert queue.account["failed"] == 1 and queue.account["scored"] == 1
    assert "secret" not in caplog.text


def test_a_restart_of_everything_but_redis_loses_nothing(open_one):
    before = open_one()
    answered = before.add(HEADER, X)
    done(before, take(before), by="before")
    waiting = [before.add(HEADER, X + i) for i in range(4)]
    held = take(before)
    silent(before)
    after = open_one()
    assert queue_answers(after, answered) == ["before", "before"]
    found = {}
    for _ in waiting:
        task = take(after)
        found[task.uuid] = task.array
        done(after, task, by="after")
    assert held.uuid in found and found.keys() == set(waiting)
    for i, uuid in enumerate(waiting):
        np.testing.assert_array_equal(found[uuid], X + i)
        assert queue_answers(before, uuid) == ["after", "after"]


def test_redis_itself_is_killed(open_one, server):  # noqa: F811
    queue = open_one(dead_seconds=30)
    uuid, later = queue.add(HEADER, X), queue.add(HEADER, X)
    task = take(queue)
    server.kill()
    try:
        for ask in (
            lambda: queue.add(HEADER, X),
            lambda: queue.get(uuid, "a"),
            lambda: queue.put_answer(uuid, "a", {}),
        ):
            with pytest.raises(QueueDownError, match="queue: Redis cannot be reached"):
                ask()
        assert queue.take(0.1) is None
        end = time.monotonic() + 20
        while queue.account["reachable"]:
            assert time.monotonic() < end
            time.sleep(0.05)
        scoring = threading.Thread(target=done, args=(queue, task), kwargs={"by": "patience"})
        scoring.start()
        scoring.join(0.5)
        assert scoring.is_alive()  # scores are not thrown away
    finally:
        server.start()
    scoring.join(30)
    assert queue_answers(queue, uuid) == ["patience", "patience"]
    assert take(queue).uuid == later


def test_redis_comes_back_empty(open_one, server):  # noqa: F811
    queue = open_one()
    uuid = queue.add(HEADER, X)
    server.client.flushall()
    assert queue.get(uuid, "a")[0] == 404
    assert queue.take(0.1) is None
    done(queue, take_new(queue), by="new")


def take_new(queue):
    queue.add(HEADER, X)
    return take(queue)


def test_redis_without_memory(open_one, server):  # noqa: F811
    queue = open_one()
    server.client.config_set("maxmemory", "3mb")
    try:
        big = np.zeros((2, 1, 1, 1000, 1000), np.float32)
        with pytest.raises(QueueFullError, match="Redis has no memory left"):
            for _ in range(3):
                queue.add(HEADER, big)
    finally:
        server.client.config_set("maxmemory", "0")
    # What could not be sent keeps no room, and what was taken is finished as ever.
    assert queue._redis.zcard(queue._uploads) == 0
    count = queue._redis.xlen(queue._stream)
    assert queue._redis.hlen(queue._bytes) == count < 3
    for _ in range(count):
        done(queue, take(queue))
    assert queue._redis.hlen(queue._bytes) == 0


def test_heartbeats_and_ends_need_no_memory(open_one, server):  # noqa: F811
    queue, idle = open_one(), open_one()
    uuid = queue.add(HEADER, X)
    task = take(queue)
    server.client.config_set("maxmemory", "1mb")
    try:
        with pytest.raises(QueueFullError):
            queue.add(HEADER, X)
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            assert idle.take(0.1) is None
        queue.finish(task)
    finally:
        server.client.config_set("maxmemory", "0")
    queue._beat()
    assert queue.account["pending"] == queue.account["bytes"] == 0
    assert queue._redis.ttl(f"ddrl:task:{uuid}") > 0


def test_an_upload_that_never_ended_gives_its_room_back(open_one, monkeypatch):
    queue = open_one(queue=1)
    monkeypatch.setattr(redis_queue, "_UPLOAD_SECONDS", 1)
    with monkeypatch.context() as broken:
        broken.setattr(queue, "_redis", None)  # the process died between the two scripts
        with pytest.raises(AttributeError):
            queue.add(HEADER, X)
    with pytest.raises(QueueFullError, match="1 requests"):
        queue.add(HEADER, X)
    time.sleep(1.2)
    queue.add(HEADER, X)
    queue._beat()
    assert queue.account["pending"] == 1 and queue.account["bytes"] == X.nbytes


def test_an_array_that_has_expired(open_one):
    queue = open_one()
    uuid = queue.add(HEADER, X)
    queue._redis.delete(f"ddrl:array:{uuid}")
    assert queue.take(0.1) is None
    assert queue.get(uuid, "a") == (422, {"message": "scorer a: the array has expired"})
    forgotten = queue.add(HEADER, X)
    queue._redis.delete(f"ddrl:array:{forgotten}", f"ddrl:task:{forgotten}")
    assert queue.take(0.1) is None
    queue._beat()
    account = queue.account
    assert account["pending"] == account["bytes"] == 0 and account["failed"] == 1


def test_nothing_is_left_of_what_is_finished(open_one):
    queue = open_one(results=2)
    for _ in range(5):
        queue.add(HEADER, X)
        done(queue, take(queue))
    names = sorted(key.decode().split(":")[1:] for key in queue._redis.scan_iter())
    kinds = [name[1] if name[0] not in ("task", "array") else name[0] for name in names]
    assert sorted(kinds) == ["done", "replicas", "task", "task", "tasks"]
    assert queue._redis.xlen(queue._stream) == 0
    assert not any(b"secret" in value for key in queue._redis.scan_iter("ddrl:task:*")
                   for value in queue._redis.hvals(key))  # fmt: skip
    assert all(queue._redis.ttl(key) > 0 for key in queue._redis.scan_iter("ddrl:task:*"))


def test_replicas_of_other_scorers_have_work_of_their_own(open_one):
    one, two, three = open_one(), open_one(scorers=("b", "a"), codec=""), open_one(scorers=("a",))
    four = open_one(codec="wan:path=x")
    uuid = one.add(HEADER, X)
    for other in (three, four):
        assert other.take(0.05) is None
    assert three.get(uuid, "b")[0] == 400  # but any of them can be asked
    assert take(two).uuid == uuid


def test_replicas_are_counted_and_forgotten(open_one):
    one, two = open_one(dead_seconds=0.5), open_one(dead_seconds=0.5)
    one._beat()
    assert one.account["replicas"] == 2
    two.close()
    one._beat()
    assert one.account["replicas"] == 1
    three = open_one(dead_seconds=0.5)
    take_new(three)
    silent(three)
    time.sleep(0.7)
    one._beat()
    assert one.account["replicas"] == 1
    assert len(one._redis.xinfo_consumers(one._stream, "sidecar")) >= 1
    done(one, take(one))
    time.sleep(5)  # ten times as long as makes it dead: its name goes as well
    one._beat()
    names = {c["name"].decode() for c in one._redis.xinfo_consumers(one._stream, "sidecar")}
    assert three._me not in names and one._redis.zcard(one._replicas) == 1


def test_a_stopping_replica_finishes_what_it_took_and_leaves_the_rest(open_one):
    queue, other = open_one(), open_one()
    first, second = queue.add(HEADER, X), queue.add(HEADER, X)
    task = take(queue)
    drained = threading.Thread(target=queue.drain, args=(60,))
    drained.start()
    drained.join(0.3)
    assert drained.is_alive() and queue.take(0.1) is None
    done(queue, task, by="last")
    drained.join(10)
    assert not drained.is_alive()
    queue.close()
    assert queue_answers(other, first) == ["last", "last"]
    assert take(other).uuid == second


# --- whole replicas ---

SCORER = """
import os, time
class Slow:
    name, batch_size = "slow", 2
    def load(self, weights, device):
        pass
    def score(self, videos, prompts):
        time.sleep(float(prompts[0]))
        return {"pid": [float(os.getpid())] * 2}
"""


@pytest.fixture
def serve(server, tmp_path):  # noqa: F811
    pytest.importorskip("torch")
    pytest.importorskip("fastapi")
    (tmp_path / "slow.py").write_text(SCORER)
    server.client.flushall()
    from tests.test_sidecar_server import Server

    servers = []

    def serve(*args):
        fleet = ("--queue", server.url, "--dead-seconds", 1)
        servers.append(Server("--scorer", f"{tmp_path}/slow.py:Slow", *fleet, *args, token=""))
        return servers[-1].process, servers[-1].url

    yield serve
    for one in servers:
        one.stop()


def enqueue(http, url, seconds):
    from ddrl_jax.sidecar.protocol import encode_request

    header = EnqueueHeader(prompts=[str(seconds)] * 2, reward_fn={"slow": 1.0}, media_type="video")
    return http.post(url + "/api/reward/enqueue", content=encode_request(header, X))


def wait(http, url, uuid):
    while (answer := http.post(url + "/api/reward/pull", data={"uuid": uuid})).status_code == 400:
        time.sleep(0.02)
    return answer


@pytest.mark.slow
def test_two_servers_share_their_work(serve):
    import httpx

    (first, a), (second, b) = serve("--queue-size", 3), serve("--queue-size", 3)
    with httpx.Client(trust_env=False, timeout=30) as http:
        asked = [enqueue(http, a, 0.5).json()["uuid"] for _ in range(3)]
        full = enqueue(http, b, 0.5)  # one queue, whoever is asked
        assert full.status_code == 429 and full.headers["retry-after"]
        by = [wait(http, b, uuid).json()["scores"]["slow/pid"][0] for uuid in asked]
        assert set(by) == {first.pid, second.pid}
        # Killed while it scores: the other does it again.
        uuids = [enqueue(http, a, 1.0).json()["uuid"] for _ in range(2)]
        time.sleep(0.5)
        first.send_signal(signal.SIGKILL)
        for uuid in uuids:
            assert wait(http, b, uuid).json()["scores"]["slow/pid"] == [second.pid] * 2
        # Stopped gracefully while it scores: what it took is finished and told by whoever comes next.
        uuid = enqueue(http, b, 1.0).json()["uuid"]
        time.sleep(0.5)
        second.send_signal(signal.SIGTERM)
        assert second.wait(20) == 0
        _, c = serve()
        answer = http.post(c + "/api/reward/pull", data={"uuid": uuid})
        assert answer.status_code == 200 and answer.json()["scores"]["slow/pid"] == [second.pid] * 2


@pytest.mark.slow
def test_a_small_soak(tmp_path):
    out = tmp_path / "soak.json"
    command = [sys.executable, str(ROOT / "benchmarks/reward_soak.py"), "--requests", "300", "--replicas", "3"]
    command += ["--kill", "0.05", "--json", str(out)]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    figures = json.loads(out.read_text())
    assert figures["requests"] == 300 == figures["delivered"] + figures["invalid"]
    assert figures["kills"] >= 5 and figures["wrong"] == figures["twice"] == figures["lost"] == 0
