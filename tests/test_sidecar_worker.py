"""What the worker tells of its scorers, what it gives them, and how it and its server stand a flood. Needs torch."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from ddrl_jax.sidecar.codec import Identity
from ddrl_jax.sidecar.protocol import EnqueueHeader, Limits, encode_request
from ddrl_jax.sidecar.queue import EmbeddedQueue, QueueDownError
from ddrl_jax.sidecar.worker import Worker, thumbnails

ROOT = Path(__file__).parents[1]


class Mean:
    batch_size = 2

    def score(self, videos, prompts):
        return {"x": videos.mean((1, 2, 3, 4)).tolist()}


class Bad(Mean):
    def score(self, videos, prompts):
        raise KeyError("secret")


class Fps(Mean):
    wants_infos = True

    def score(self, videos, prompts, infos):
        return {"fps": [float(info.get("video_fps", -1)) for info in infos]}


def ask(worker, count=3, infos=None, **scorers):
    header = EnqueueHeader(prompts=[f"p{i}" for i in range(count)], reward_fn=scorers, video_infos=infos)
    video = np.linspace(-1, 1, count * 3 * 4 * 6, dtype=np.float32).reshape(count, 3, 1, 4, 6)
    uuid = worker.queue.add(header, video)
    done = worker.queue.account["scored"] + worker.queue.account["failed"]
    end = time.monotonic() + 20
    while worker.queue.account["scored"] + worker.queue.account["failed"] == done:
        assert time.monotonic() < end
        time.sleep(0.01)
    return uuid, video


def test_the_account_of_each_scorer():
    worker = Worker({"mean": Mean(), "bad": Bad()}, Identity(), Limits())
    fresh = {"state": "ready", "scored": 0, "failed": 0, "seconds": 0.0, "last_error": ""}
    assert worker.account == {"mean": fresh, "bad": fresh}
    ask(worker, mean=1.0, bad=1.0)
    ask(worker, mean=1.0)
    account = worker.account
    assert account["mean"].pop("seconds") > 0
    assert account["mean"] == {"state": "ready", "scored": 6, "failed": 0, "last_error": ""}
    assert account["bad"] == {**fresh, "failed": 1, "last_error": "KeyError"}  # its kind: the text may hold a prompt
    assert worker.queue.account["scored"] == 1 == worker.queue.account["failed"]


def test_the_state_while_it_scores():
    inside, go = threading.Event(), threading.Event()

    class Slow(Mean):
        def score(self, videos, prompts):
            inside.set()
            assert go.wait(20)
            return super().score(videos, prompts)

    worker = Worker({"slow": Slow(), "mean": Mean()}, Identity(), Limits())
    asking = threading.Thread(target=ask, args=(worker,), kwargs={"slow": 1.0})
    asking.start()
    assert inside.wait(20)
    assert {name: one["state"] for name, one in worker.account.items()} == {"slow": "scoring", "mean": "ready"}
    go.set()
    asking.join()
    assert worker.account["slow"]["state"] == "ready"


def test_recent_samples_and_timings():
    worker = Worker({"mean": Mean(), "bad": Bad()}, Identity(), Limits())
    uuid, video = ask(worker, mean=1.0, bad=1.0)
    ask(worker, bad=1.0)  # nothing to show of what has no scores
    # Those of the first batch: the rest is decoded later, and need not fit beside it.
    assert [(u, prompt) for u, prompt, _, _ in worker.recent] == [(uuid, "p0"), (uuid, "p1")]
    for i, (_, _, picture, scores) in enumerate(worker.recent):
        np.testing.assert_array_equal(picture, np.round((video[i, :, 0].transpose(1, 2, 0) + 1) * 127.5))
        np.testing.assert_allclose(scores["mean/x"], video[i].mean(), atol=1e-6)
    for _ in range(20):
        ask(worker, mean=1.0)
    assert len(worker.recent) == 16  # pictures are not kept without end
    while len(worker.timings) < 22:
        time.sleep(0.01)
    first, took, samples = worker.timings[0]
    assert samples == 3 and 0 <= took < 20 and first <= time.monotonic()


@pytest.mark.parametrize(
    ("shape", "size"),
    [((6, 3, 5, 720, 1280), (72, 128)), ((1, 1, 1, 300, 100), (128, 43)), ((2, 4, 2, 2, 2), (2, 2)),
     ((1, 3, 1, 1, 1000), (1, 128))],
)  # fmt: skip
def test_thumbnails(shape, size):
    video = np.full(shape, -1.0, np.float32)
    video[:, :, shape[2] // 2] = 1.0
    pictures = thumbnails(video)
    assert len(pictures) == min(4, shape[0])
    for picture in pictures:
        assert picture.shape == (*size, 3) and picture.dtype == np.uint8 and (picture == 255).all()


def test_a_scorer_that_wants_to_know_more_of_each_video():
    worker = Worker({"fps": Fps()}, Identity(), Limits())
    uuid, _ = ask(worker, infos=[{"video_fps": 8.0}, {}, {"video_fps": 24}], fps=1.0)
    assert worker.queue.get(uuid, "fps")[1]["scores"] == {"fps/fps": [8.0, -1.0, 24.0]}
    uuid, _ = ask(worker, fps=1.0)
    assert worker.queue.get(uuid, "fps")[1]["scores"] == {"fps/fps": [-1.0] * 3}


def test_a_queue_that_fails_does_not_end_the_worker(caplog):
    class Flaky(EmbeddedQueue):
        takes = finishes = 0

        def take(self, timeout):
            self.takes += 1
            if self.takes == 1:
                raise RuntimeError("unheard of")
            return super().take(timeout)

        def answer(self, task, scorer, answer):
            self.finishes += 1
            if self.finishes == 1:
                super().finish(task)  # somebody else did
                raise QueueDownError("queue: gone")
            super().answer(task, scorer, answer)

    worker = Worker({"mean": Mean()}, Identity(), Limits(), Flaky(Limits(), ["mean"]))
    ask(worker, mean=1.0)
    uuid, _ = ask(worker, mean=1.0)
    assert worker.queue.get(uuid, "mean")[0] == 200
    assert "unheard of" in caplog.text and "its scores are lost: queue: gone" in caplog.text


def resident(pid):
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_a_flood_on_a_slow_scorer_is_held_back(tmp_path):
    httpx = pytest.importorskip("httpx")
    from tests.test_sidecar_server import SLOW_SCORER, Server

    (tmp_path / "slow.py").write_text(SLOW_SCORER)
    server = Server("--scorer", f"{tmp_path}/slow.py:Slow", "--queue-size", "4", token="")
    try:
        url, pid = server.url, server.process.pid
        video = np.zeros((2, 3, 8, 256, 256), np.uint8)  # 3 MiB, 12 as float32
        header = EnqueueHeader(prompts=["0.1", "0.1"], reward_fn={"slow": 1.0}, media_type="video")
        body = encode_request(header, video)
        statuses, accepted, bytes_seen = [], [], []

        def flood(count):
            with httpx.Client(base_url=url, trust_env=False, timeout=60) as http:
                for _ in range(count):
                    answer = http.post("/api/reward/enqueue", content=body)
                    statuses.append(answer.status_code)
                    if answer.status_code == 200:
                        accepted.append(answer.json()["uuid"])
                    else:
                        assert 0 < float(answer.headers["retry-after"]) <= 60
                    bytes_seen.append(http.get("/health").json()["queue"]["bytes"])

        flood(8)
        before = resident(pid)
        threads = [threading.Thread(target=flood, args=(40,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert set(statuses) == {200, 429} and statuses.count(429) > 100
        assert max(bytes_seen) <= 4 * video.nbytes
        # Eight bodies on their way, twice; without a limit it would be a GB.
        assert resident(pid) - before < 100 << 20
        with httpx.Client(base_url=url, trust_env=False, timeout=60) as http:
            for uuid in accepted:
                while (answer := http.post("/api/reward/pull", data={"uuid": uuid})).status_code == 400:
                    time.sleep(0.05)
                assert answer.status_code == 200
    finally:
        server.stop()
