"""What any queue promises, of the embedded one and of Redis'."""

import threading
import time

import numpy as np
import pytest

from ddrl_jax.sidecar import redis_queue
from ddrl_jax.sidecar.protocol import EnqueueHeader, Limits
from ddrl_jax.sidecar.queue import EmbeddedQueue, QueueFullError, open_queue

from .real_redis import server  # noqa: F401

X = np.arange(24, dtype=np.float32).reshape(2, 1, 3, 2, 2)
SCORERS = ("a", "b")


@pytest.fixture(params=["embedded", "redis"])
def make(request):
    """A queue with the limits given."""
    queues = []

    def make(**limits):
        spec = "embedded"
        if request.param == "redis":
            redis = request.getfixturevalue("server")
            redis.client.flushall()
            spec = redis.url
        queues.append(open_queue(spec, Limits(**limits), SCORERS, dead_seconds=5))
        return queues[-1]

    yield make
    for queue in queues:
        queue.close()


def header(count=2, **scorers):
    return EnqueueHeader(
        prompts=["ä cat"] * count, reward_fn=scorers or {"a": 1.0}, video_infos=[{"video_fps": 8}] * count
    )


def settled(queue, **wanted):
    """Redis' account is that of the last heartbeat."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        account = queue.account
        if all(account[key] == value for key, value in wanted.items()):
            return account
        time.sleep(0.02)
    raise AssertionError(f"{queue.account} where {wanted} was expected")


def test_the_whole_way(make):
    queue = make()
    before = time.time()
    uuid = queue.add(header(a=1.0, b=0.5), X)
    assert queue.get(uuid, "a")[0] == queue.get(uuid, "b")[0] == 400
    account = settled(queue, pending=1, bytes=X.nbytes, scored=0, failed=0, replicas=1, reachable=True)
    assert 0 <= account["oldest_seconds"] < 10
    task = queue.take(5)
    assert task.uuid == uuid and task.header == header(a=1.0, b=0.5) and task.asked == ["a", "b"]
    assert before - 1 <= task.enqueued <= time.time() + 1
    np.testing.assert_array_equal(task.array, X)
    assert task.array.dtype == X.dtype
    assert queue.take(0.01) is None  # nobody else gets it
    queue.answer(task, "a", {"scores": {"a/x": [1.0, None]}})
    assert queue.get(uuid, "a") == (200, {"scores": {"a/x": [1.0, None]}})
    assert queue.get(uuid, "b")[0] == 400
    assert queue.fail(task, "b", "out of\nmemory")
    queue.finish(task)
    for _ in range(2):  # an answer lost on the way can be asked for again
        assert queue.get(uuid, "a") == (200, {"scores": {"a/x": [1.0, None]}})
        assert queue.get(uuid, "b") == (422, {"message": "out of memory"})
    settled(queue, pending=0, bytes=0, oldest_seconds=0.0, scored=0, failed=1)
    assert queue.take(0.01) is None


def test_what_is_no_answer(make):
    queue = make()
    uuid = queue.add(header(a=1.0, b=1.0), X)
    assert queue.get("0" * 32, "a")[0] == 404
    assert queue.get("*", "a")[0] == 404
    status, answer = queue.get(uuid, "c")
    assert status == 422 and answer["message"] == "type: 'c'; this request asked for a, b"
    assert queue.get(uuid, None)[0] == 422  # two to choose from
    with pytest.raises(ValueError, match="reward_fn: this server has no scorer 'c'; it has a, b"):
        queue.add(header(a=1.0, c=1.0), X)
    alone = queue.add(header(b=1.0), X)
    assert queue.get(alone, None)[0] == 400


def test_the_first_answer_stays(make):
    queue = make()
    uuid = queue.add(header(a=1.0, b=1.0), X)
    task = queue.take(5)
    queue.answer(task, "a", {"scores": {"a/x": [1.0]}})
    queue.answer(task, "a", {"scores": {"a/x": [2.0]}})
    assert not queue.fail(task, "a", "no")
    assert queue.get(uuid, "a") == (200, {"scores": {"a/x": [1.0]}})
    assert queue.fail(task, "b", "first") and not queue.fail(task, "b", "second")
    queue.answer(task, "b", {"scores": {"b/x": [1.0]}})
    assert queue.get(uuid, "b") == (422, {"message": "first"})
    queue.finish(task)
    queue.finish(task)
    settled(queue, pending=0, bytes=0, failed=1, scored=0)


def test_requests_come_in_order(make):
    queue = make()
    uuids = [queue.add(header(), X) for _ in range(5)]
    assert [queue.take(1).uuid for _ in range(5)] == uuids


def test_room_for_so_many(make):
    queue = make(queue=3)
    for _ in range(3):
        queue.add(header(), X)
    with pytest.raises(QueueFullError, match=f"3 requests \\({3 * X.nbytes} bytes\\) wait already"):
        queue.add(header(), X)
    task = queue.take(5)
    with pytest.raises(QueueFullError):  # what is being scored counts
        queue.add(header(), X)
    queue.finish(task)
    queue.add(header(), X)


def test_room_for_so_many_bytes(make):
    queue = make(queue_bytes=2 * X.nbytes)
    queue.add(header(), X)
    queue.add(header(), X)
    with pytest.raises(QueueFullError):
        queue.add(header(), X)
    for _ in range(2):
        queue.finish(queue.take(5))
    queue.add(header(6), np.concatenate([X, X, X]))  # larger than all room, but alone
    with pytest.raises(QueueFullError):
        queue.add(header(), X)


def test_results_are_bounded_in_number(make):
    queue = make(results=4)
    uuids = []
    for _ in range(8):
        uuids.append(queue.add(header(), X))
        task = queue.take(5)
        queue.answer(task, "a", {"scores": {}})
        queue.finish(task)
    uuids.append(queue.add(header(), X))
    assert [queue.get(uuid, "a")[0] for uuid in uuids] == [404] * 4 + [200] * 4 + [400]


def test_results_expire(make):
    queue = make(result_seconds=1.0)
    uuid = queue.add(header(), X)
    task = queue.take(5)
    queue.answer(task, "a", {"scores": {}})
    queue.finish(task)
    assert queue.get(uuid, "a")[0] == 200
    end = time.monotonic() + 20
    while queue.get(uuid, "a")[0] != 404:
        assert time.monotonic() < end
        time.sleep(0.1)
        queue.finish(queue.take(5)) if queue.add(header(), X) else None
    # Nothing of it is left, in Redis either.
    if not isinstance(queue, EmbeddedQueue):
        assert not [key for key in queue._redis.scan_iter() if uuid.encode() in key]


def test_scores_from_elsewhere(make):
    queue = make()
    uuid = queue.add(header(a=1.0, b=1.0), X)
    assert queue.put_answer(uuid, "a", {"scores": {"a/x": [3.0]}})
    assert not queue.put_answer(uuid, "a", {"scores": {"a/x": [4.0]}})
    assert queue.get(uuid, "a") == (200, {"scores": {"a/x": [3.0]}})
    with pytest.raises(ValueError, match="type: 'c'; this request asked for a, b"):
        queue.put_answer(uuid, "c", {})
    task = queue.take(5)
    assert task.asked == ["b"]
    queue.answer(task, "a", {"scores": {"a/x": [5.0]}})
    assert queue.get(uuid, "a") == (200, {"scores": {"a/x": [3.0]}})


def test_scores_for_a_uuid_of_somebody_elses(make):
    queue = make(results=8)
    assert queue.put_answer("other-1", "hpsv3", {"scores": {"x": [1.0]}})
    assert queue.get("other-1", None) == queue.get("other-1", "hpsv3") == (200, {"scores": {"x": [1.0]}})
    assert queue.put_answer("other-1", "ocr", {"scores": {"y": [2.0]}})
    assert queue.get("other-1", "ocr")[1] == {"scores": {"y": [2.0]}}
    assert not queue.put_answer("other-1", "ocr", {})
    for wrong in ("", "a b", "x" * 65, "a:b", "../x", "a\n"):
        with pytest.raises(ValueError, match="uuid: "):
            queue.put_answer(wrong, "a", {})
    for i in range(62):
        queue.put_answer("other-1", f"s{i}", {})
    with pytest.raises(ValueError, match="type: "):  # so that it cannot grow without end
        queue.put_answer("other-1", "s62", {})
    for i in range(20):
        queue.put_answer(f"more-{i}", "a", {})
    assert [queue.get(f"more-{i}", "a")[0] for i in (0, 11, 12, 19)] == [404, 404, 200, 200]
    settled(queue, pending=0, bytes=0, scored=0, failed=0)


@pytest.mark.parametrize("dtype", ["<f2", "<f4", ">f4", "<f8", "|u1"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_any_array_arrives_as_it_was(make, monkeypatch, dtype, order):
    monkeypatch.setattr(redis_queue, "_PIECE", 7)
    array = np.asarray(X.astype(dtype), order=order)
    queue = make()
    queue.add(header(), array)
    got = queue.take(5).array
    assert got.shape == X.shape and got.dtype == array.dtype
    np.testing.assert_array_equal(got, array)


def test_many_at_once_each_once(make):
    queue = make(queue=1000)
    given, taken = [], []

    def give():
        for _ in range(25):
            given.append(queue.add(header(), X))

    def take():
        while (task := queue.take(0.5)) is not None:
            queue.answer(task, "a", {"scores": {"u": task.uuid}})
            queue.finish(task)
            taken.append(task.uuid)

    threads = [threading.Thread(target=f) for f in (give, give, give, take, take, take)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(given) == 75 and sorted(given) == sorted(taken)
    assert all(queue.get(uuid, "a") == (200, {"scores": {"u": uuid}}) for uuid in given)
    settled(queue, pending=0, bytes=0, scored=75, failed=0)


def test_the_embedded_one_is_empty_once_all_is_collected():
    queue = EmbeddedQueue(Limits(), SCORERS)
    uuid = queue.add(header(a=1.0, b=1.0), X)
    began = time.monotonic()
    queue.drain(0.2)
    assert time.monotonic() - began >= 0.19
    task = queue.take(1)
    for name in SCORERS:
        queue.answer(task, name, {})
    queue.finish(task)
    queue.get(uuid, "a")
    drained = threading.Thread(target=queue.drain, args=(60,))
    drained.start()
    drained.join(0.1)
    assert drained.is_alive()
    queue.get(uuid, "b")
    drained.join(10)
    assert not drained.is_alive()


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("64", "queue: '64'; 'embedded', redis://HOST:PORT, rediss://HOST:PORT or unix://PATH is needed"),
        ("http://user:secret@host", "queue: 'http'; "),
        ("redis://user:secret@127.0.0.1:1/0", "queue: redis://127.0.0.1:1/0 cannot be used ("),
        ("redis://:secret@127.0.0.1:x", "queue: redis://127.0.0.1:x cannot be used ("),
        ("unix:///nowhere/s", "queue: unix:///nowhere/s cannot be used ("),
    ],
)
def test_no_such_queue(spec, said):
    with pytest.raises(ValueError) as caught:
        open_queue(spec, Limits(), SCORERS)
    message = str(caught.value)
    assert message.startswith(said) and "\n" not in message and "secret" not in message


def test_dead_seconds(server):  # noqa: F811
    with pytest.raises(ValueError, match=r"dead-seconds: 0\.1; must be at least 0\.5"):
        open_queue(server.url, Limits(), SCORERS, dead_seconds=0.1)
