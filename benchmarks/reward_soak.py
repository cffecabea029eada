"""The reward service while replicas are killed: `python benchmarks/reward_soak.py [--requests 10000] [--kill 0.05]`.

A Redis, several replicas on it, and clients that send requests to any of them and pull the scores from any other. A
share of the requests is doomed: whoever scores one is killed (SIGKILL) meanwhile and started again; one in ten of these
kills everybody who tries. Counted is what became of every request that a replica accepted:
  delivered  its scores came, and are those of its array;
  invalid    it was told why there are none ("killed 3 replicas");
  lost       neither: a replica no longer knew it, or nothing came within `--patience`;
  wrong      the scores of another array;
  twice      asked again, another replica gave other scores: two workers' answers (each has a nonce) got through.
The last three must be 0: the exit code is 1 otherwise. More clients than the queue has room for, so that 429 is
common. Memory is the most that a replica, and Redis, had at any time.

The replicas are forked from a process that has torch loaded, or most of the time would go into importing it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import numpy as np
import redis

from ddrl_jax.sidecar.protocol import ENQUEUE, PULL, EnqueueHeader, encode_request

# The slow ones of `serve`; torch._inductor is what use_deterministic_algorithms imports.
PRELOAD = ["torch._inductor.config", "ddrl_jax.sidecar.__main__", "ddrl_jax.sidecar.server", "ddrl_jax.sidecar.worker",
           "ddrl_jax.sidecar.redis_queue", "ddrl_jax.sidecar.settings", "ddrl_jax.sidecar.status"]  # fmt: skip

SCORER = '''
import os
import time


class Mean:
    """A sample's mean, and a number drawn anew each time it is scored. Prompts say who is to be killed meanwhile."""

    name, batch_size = "mean", 2

    def load(self, weights, device):
        self.folder = weights

    def score(self, videos, prompts):
        number, fate = prompts[0].split()
        if fate == "always" or (fate == "once" and not os.path.exists(f"{self.folder}/{number}.killed")):
            open(f"{self.folder}/{number}.{os.getpid()}.doomed", "w").close()
            time.sleep(60)
        nonce = [float(int.from_bytes(os.urandom(6), "big"))] * len(prompts)
        return {"mean": videos.double().mean(dim=(1, 2, 3, 4)).tolist(), "nonce": nonce}
'''


def replica(arguments: list[str], log: str) -> None:
    """A process of its own: `sidecar serve`."""
    from ddrl_jax.sidecar.__main__ import main

    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    raise SystemExit(main(["serve", *arguments]))


class Fleet:
    """Replicas that are started again when they go, and a killer of those who score what is doomed."""

    def __init__(self, count: int, url: str, folder: Path, queue_size: int, dead_seconds: float, seed: int):
        (folder / "mean.py").write_text(SCORER)
        self.folder, self.kills, self.starts, self.rss = folder, 0, 0, 0
        self.ports = [free_port() for _ in range(count)]
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOAD)
        self.arguments = ["--scorer", f"{folder}/mean.py:Mean", "--weights", str(folder), "--queue", url]
        self.arguments += ["--queue-size", str(queue_size), "--dead-seconds", str(dead_seconds)]
        self.rng, self.stopping = random.Random(seed), threading.Event()
        self.processes = [self.start(port) for port in self.ports]
        self.threads = [threading.Thread(target=self.forever, args=(work, every)) for work, every in
                        ((self.restart, 0.02), (self.kill, 0.01), (self.weigh, 0.5))]  # fmt: skip
        for thread in self.threads:
            thread.start()

    def forever(self, work, every: float) -> None:
        while not self.stopping.wait(every):
            work()

    def start(self, port: int):
        self.starts += 1
        log = str(self.folder / f"replica_{port}.log")
        process = self.context.Process(target=replica, args=([*self.arguments, "--port", str(port)], log))
        process.start()
        return process

    def restart(self) -> None:
        for i, process in enumerate(self.processes):
            if not process.is_alive():
                process.join()
                self.processes[i] = self.start(self.ports[i])

    def kill(self) -> None:
        for mark in self.folder.glob("*.doomed"):
            number, pid, _ = mark.name.split(".")
            mark.unlink()
            (self.folder / f"{number}.killed").touch()
            time.sleep(self.rng.uniform(0, 0.03))  # at whatever point its other threads are
            os.kill(int(pid), signal.SIGKILL)
            self.kills += 1

    def weigh(self) -> None:
        for process in self.processes:
            try:
                status = Path(f"/proc/{process.pid}/status").read_text()
            except OSError:  # just killed
                continue
            for line in status.splitlines():
                if line.startswith("VmRSS:"):
                    self.rss = max(self.rss, int(line.split()[1]) * 1024)

    def stop(self) -> list[int | None]:
        """Gracefully; the exit codes."""
        self.stopping.set()
        for thread in self.threads:
            thread.join()
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.join(60)
        return [process.exitcode for process in self.processes]


class Client:
    """Sends requests to any replica and pulls from any other, as behind a load balancer."""

    def __init__(self, ports: list[int], patience: float, seed: int):
        self.ports, self.patience, self.rng = ports, patience, random.Random(seed)
        self.http = httpx.Client(trust_env=False, timeout=30)
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.latencies: list[float] = []

    def post(self, path: str, **request) -> httpx.Response | None:
        """None: whoever was asked has just been killed."""
        try:
            return self.http.post(f"http://127.0.0.1:{self.rng.choice(self.ports)}{path}", **request)
        except httpx.TransportError:
            self.counts["resets"] += 1
            return None

    def run(self, number: int, fate: str) -> None:
        value = (number % 251) / 250
        array = np.full((2, 3, 4, 16, 16), value, np.float32)
        header = EnqueueHeader(prompts=[f"{number} {fate}"] * 2, reward_fn={"mean": 1.0})
        body, end = encode_request(header, array), time.monotonic() + self.patience
        began = time.monotonic()
        while True:
            answer = self.post(ENQUEUE, content=body)
            if answer is not None and answer.status_code == 200:
                break
            if time.monotonic() > end:
                self.counts["not taken"] += 1
                return
            if answer is not None and answer.status_code == 429:
                self.counts["refused (429)"] += 1
                assert float(answer.headers["retry-after"]) > 0
            elif answer is not None:
                self.counts[f"refused ({answer.status_code})"] += 1
            time.sleep(self.rng.uniform(0.02, 0.2))
        uuid = answer.json()["uuid"]
        answer = self.pull(uuid, end)
        self.latencies.append(time.monotonic() - began)
        if answer is None or answer.status_code not in (200, 422):
            self.counts["lost"] += 1
            self.reasons["nothing came" if answer is None else answer.text[:120]] += 1
        elif answer.status_code == 422:
            self.counts["invalid"] += 1
            self.counts["invalid, not doomed to be"] += fate != "always"
            self.reasons[answer.json()["message"]] += 1
        else:
            scores = answer.json()["scores"]
            self.counts["delivered"] += 1
            self.counts["wrong"] += not np.allclose(scores["mean/mean"], value, atol=1e-6)
        if fate != "live" or number % 10 == 0:
            again = self.pull(uuid, end)
            self.counts["twice"] += again is None or answer is None or again.content != answer.content

    def pull(self, uuid: str, end: float) -> httpx.Response | None:
        while time.monotonic() < end:
            answer = self.post(PULL, data={"uuid": uuid, "type": "mean"})
            if answer is not None and answer.status_code not in (400, 503):
                return answer
            time.sleep(0.03)
        return None


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def start_redis(folder: Path) -> tuple[subprocess.Popen, str]:
    command = ["redis-server", "--port", "0", "--unixsocket", str(folder / "redis"), "--dir", str(folder), "--save", ""]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL), f"unix://{folder}/redis"


def soak(args: argparse.Namespace, folder: Path) -> dict[str, object]:
    rng = random.Random(args.seed)
    fates = ["live"] * args.requests
    doomed = rng.sample(range(args.requests), round(args.kill * args.requests))
    for i, number in enumerate(doomed):
        fates[number] = "always" if i % 10 == 0 else "once"
    numbers = iter(range(args.requests))
    lock, done = threading.Lock(), Counter[str]()
    clients: list[Client] = []
    process, url = start_redis(folder)
    store = redis.Redis.from_url(url)
    while True:
        try:
            store.ping()
            break
        except redis.ConnectionError:
            time.sleep(0.05)
    fleet = Fleet(args.replicas, url, folder, args.queue_size, args.dead_seconds, args.seed)
    try:
        while any(not answers(port) for port in fleet.ports):
            time.sleep(0.1)
        began, told = time.monotonic(), time.monotonic()

        def work(client: Client) -> None:
            nonlocal told
            while True:
                with lock:
                    number = next(numbers, None)
                    if number is None:
                        return
                    done["requests"] += 1
                    if time.monotonic() - told > 20:
                        told = time.monotonic()
                        print(f"{number} of {args.requests} sent, {fleet.kills} replicas killed", flush=True)
                client.run(number, fates[number])

        clients = [Client(fleet.ports, args.patience, args.seed + i) for i in range(args.clients)]
        threads = [threading.Thread(target=work, args=(client,)) for client in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.monotonic() - began
        # What was enqueued by a replica that died before it could say so is scored too, for nobody.
        [stream] = store.keys("ddrl:*:tasks")
        end = time.monotonic() + args.patience
        while store.xlen(stream) and time.monotonic() < end:
            time.sleep(0.1)
        memory, left = store.info("memory"), store.xlen(stream)
        arrays = len(store.keys("ddrl:array:*"))
        codes = fleet.stop()
    finally:
        fleet.stopping.set()
        for one in fleet.processes:
            one.kill()
        store.close()
        process.kill()
        process.wait()
    counts: Counter[str] = sum((client.counts for client in clients), Counter())
    reasons: Counter[str] = sum((client.reasons for client in clients), Counter())
    latencies = sorted(second for client in clients for second in client.latencies)
    figures: dict[str, object] = {"requests": args.requests}
    for name in ("delivered", "invalid", "invalid, not doomed to be", "lost", "not taken", "wrong", "twice"):
        figures[name] = counts.pop(name, 0)
    figures |= {
        "doomed once": fates.count("once"),
        "doomed always": fates.count("always"),
        "kills": fleet.kills,
        "starts": fleet.starts,
        "connections cut": counts.pop("resets", 0),
        **{name: counts[name] for name in sorted(counts)},
        "reasons": dict(reasons),
        "seconds": round(seconds, 1),
        "requests a second": round(args.requests / seconds, 1),
        "latency p50 s": round(statistics.median(latencies), 3),
        "latency p95 s": round(latencies[int(0.95 * len(latencies))], 3),
        "latency max s": round(latencies[-1], 3),
        "replica memory, most, MiB": round(fleet.rss / 2**20, 1),
        "redis memory, most, MiB": round(memory["used_memory_peak"] / 2**20, 1),
        "redis memory at the end, MiB": round(memory["used_memory"] / 2**20, 1),
        "left in the queue": left,
        "half-sent arrays, yet to expire": arrays,
        "exit codes": codes,
    }
    return figures


def answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--clients", type=int, default=16, help="requests at a time")
    parser.add_argument("--kill", type=float, default=0.05, help="share of requests that have a replica killed")
    parser.add_argument("--queue-size", type=int, default=12)
    parser.add_argument("--dead-seconds", type=float, default=1.5)
    parser.add_argument("--patience", type=float, default=300.0, help="seconds until a request counts as lost")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", default="", help="file for the figures")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="soak_"))
    try:
        figures = soak(args, folder)
        for log in folder.glob("*.log"):
            if "Traceback" in (text := log.read_text()):
                print(text[text.index("Traceback") :][:3000])
    finally:
        shutil.rmtree(folder)
    for name, value in figures.items():
        print(f"{name:<34}{value if not isinstance(value, float) else f'{value:g}':>12}" if not isinstance(
            value, dict | list) else f"{name:<34}{value}")  # fmt: skip
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=1))
    return int(any(figures[name] for name in ("lost", "not taken", "wrong", "twice")))


if __name__ == "__main__":
    raise SystemExit(main())
