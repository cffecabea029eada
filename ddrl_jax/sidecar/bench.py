"""`sidecar bench`: throughput and latency of a running server, over cosmos-rl's protocol (so of theirs as well).

Closed loop: each of `concurrency` clients enqueues a request, pulls until its scores are there, and begins anew. A
latency is the time from the first byte of the enqueue to the last scorer's scores.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np

from .protocol import ENQUEUE, HEALTH, PULL, REPLICA_HEADER, EnqueueHeader, encode_request, one_line

_AXES = {"latent": 5, "video": 5, "image": 4}
_POLL_S = 0.005


def parse_shape(text: str, media_type: str) -> tuple[int, ...]:
    """`4,3,1,64,64`. Raises ValueError."""
    try:
        shape = tuple(int(part) for part in text.split(","))
    except ValueError:
        shape = ()
    if len(shape) != _AXES[media_type] or min(shape) < 1:
        raise ValueError(f"shape: {text!r}; {_AXES[media_type]} whole numbers above 0 are needed for {media_type}")
    return shape


def bodies(shape: tuple[int, ...], media_type: str, scorers: list[str], count: int = 4) -> list[bytes]:
    """A few different requests, the same each time."""
    rng = np.random.default_rng(0)
    header = EnqueueHeader(
        prompts=[f"a seven moving up and to the left, {i}" for i in range(shape[0])],
        reward_fn=dict.fromkeys(scorers, 1.0),
        video_infos=[{"video_fps": 16.0}] * shape[0],
        media_type=media_type,  # type: ignore[arg-type]
    )

    def array() -> np.ndarray:
        if media_type == "latent":
            return rng.standard_normal(shape).clip(-1, 1).astype(np.float32)
        return rng.integers(0, 256, shape, np.uint8)

    return [encode_request(header, array()) for _ in range(count)]


def one_request(http: httpx.Client, body: bytes, scorers: list[str], timeout_s: float) -> dict[str, Any]:
    """Returns outcome ("ok", or why not), seconds of the enqueue and of all, and how often the server said "full"."""
    began, full = time.perf_counter(), 0

    def result(outcome: str, enqueue: float = 0.0) -> dict[str, Any]:
        return {"outcome": outcome, "enqueue": enqueue, "total": time.perf_counter() - began, "full": full}

    try:
        while True:
            answer = http.post(ENQUEUE, content=body)
            if answer.status_code != 429:
                break
            full += 1
            if time.perf_counter() - began > timeout_s:
                return result("queue full")
            time.sleep(min(float(answer.headers.get("retry-after", 1)), 1.0))
        enqueue = time.perf_counter() - began
        if answer.status_code != 200:
            return result(f"enqueue {answer.status_code}: {one_line(answer.text, 120)}")
        taken = answer.json()
        headers = {REPLICA_HEADER: taken["replica_id"]} if taken.get("replica_id") else {}
        for scorer in scorers:
            form = {"uuid": taken["uuid"], "type": scorer}
            while (answer := http.post(PULL, data=form, headers=headers)).status_code == 400:
                if time.perf_counter() - began > timeout_s:
                    return result("no scores in time", enqueue)
                time.sleep(_POLL_S)
            if answer.status_code != 200:
                return result(f"pull {answer.status_code}: {one_line(answer.text, 120)}", enqueue)
        return result("ok", enqueue)
    except httpx.HTTPError as error:
        return result(type(error).__name__)


def run(
    url: str, token: str, scorers: list[str], shape: tuple[int, ...], media_type: str, requests: int, concurrency: int,
    timeout_s: float,
) -> dict[str, Any]:  # fmt: skip
    """The figures: seconds, requests and samples a second, MiB a second, p50 and p95 of both latencies, outcomes.

    Raises ValueError when there is no server, it refuses the token, or it names no scorer.
    """
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    pool = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    with httpx.Client(base_url=url, headers=headers, timeout=timeout_s, limits=pool) as http:
        try:
            health = http.get(HEALTH)
            served = health.json().get("scorers", []) if health.status_code == 200 else []
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, AttributeError) as error:
            raise ValueError(
                f"url: no reward server at {url!r} ({one_line(f'{type(error).__name__}: {error}')})"
            ) from None
        scorers = scorers or served[:1]
        if not scorers:
            raise ValueError(f"scorer: {url} does not say what it has; name one with --scorer")
        ready = bodies(shape, media_type, scorers)
        first = one_request(http, ready[0], scorers, timeout_s)  # warms up, and tells what would fail every time
        if first["outcome"] != "ok":
            raise ValueError(f"url: {url}: the first request failed: {first['outcome']}")
        began, lock, results = time.perf_counter(), threading.Lock(), list[dict[str, Any]]()

        def work(i: int) -> None:
            result = one_request(http, ready[i % len(ready)], scorers, timeout_s)
            with lock:
                results.append(result)

        with ThreadPoolExecutor(concurrency) as threads:
            list(threads.map(work, range(requests)))
        seconds = time.perf_counter() - began
    good = [r for r in results if r["outcome"] == "ok"]
    figures: dict[str, Any] = {
        "url": url, "scorers": scorers, "shape": list(shape), "media_type": media_type, "concurrency": concurrency,
        "requests": requests, "ok": len(good), "seconds": seconds, "body_bytes": len(ready[0]),
        "requests_per_second": len(good) / seconds, "samples_per_second": len(good) * shape[0] / seconds,
        "mib_per_second": len(good) * len(ready[0]) / seconds / 2**20,
        "queue_full": sum(r["full"] for r in results),
        "outcomes": dict(Counter(r["outcome"] for r in results)),
    }  # fmt: skip
    for name in ("enqueue", "total"):
        for percent in (50, 95):
            value = float(np.percentile([r[name] for r in good], percent)) if good else None
            figures[f"{name}_p{percent}_seconds"] = value
    return figures


def table(figures: dict[str, Any]) -> str:
    """The figures for people."""

    def ms(name: str) -> str:
        value = figures[name]
        return "-" if value is None else f"{value * 1000:.1f} ms"

    speeds = ("requests", "samples", "mib")
    speed = "{:.1f} requests/s, {:.1f} samples/s, {:.1f} MiB/s".format(*(figures[f"{n}_per_second"] for n in speeds))
    rows = [
        ("requests", f"{figures['ok']} of {figures['requests']} in {figures['seconds']:.2f} s"),
        ("throughput", speed),
        ("latency, enqueue", f"p50 {ms('enqueue_p50_seconds')}, p95 {ms('enqueue_p95_seconds')}"),
        ("latency, to scores", f"p50 {ms('total_p50_seconds')}, p95 {ms('total_p95_seconds')}"),
        ("queue full (429)", str(figures["queue_full"])),
        *((f"lost: {k}", str(n)) for k, n in figures["outcomes"].items() if k != "ok"),
    ]  # fmt: skip
    return "\n".join(f"{name:20} {value}" for name, value in rows)


def main(args: argparse.Namespace, token: str) -> int:
    """`sidecar bench`. Returns 0, or 1 where a request was lost. Raises ValueError in one line."""
    for name in ("requests", "concurrency", "timeout"):
        if not getattr(args, name) > 0:
            raise ValueError(f"{name}: {getattr(args, name)}; must be above 0")
    shape = parse_shape(args.shape, args.media_type)
    figures = run(
        args.url, token, args.scorer, shape, args.media_type, args.requests, args.concurrency, args.timeout
    )  # fmt: skip
    print(table(figures), file=sys.stderr if args.json == "-" else sys.stdout)
    text = json.dumps(figures, indent=1)
    if args.json == "-":
        print(text)
    elif args.json:
        with open(args.json, "w") as file:
            file.write(text + "\n")
    return int(figures["ok"] < figures["requests"])
