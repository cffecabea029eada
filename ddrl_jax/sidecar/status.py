"""What is seen of a running server: `/health`, Prometheus' `/metrics`, and a page at `/` for people.

Reads the accounts of the queue and of the worker at every look and keeps none of its own but HTTP's (`Counts`). Numbers
are open to whoever reaches the port, as `/health` always was, but for `/metrics`; prompts and thumbnails are behind the
token: a login leaves a cookie that is derived from it and that scripts and other sites cannot read or send.
"""

from __future__ import annotations

import hashlib
import hmac
import io
import secrets
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import parse_qs

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client import generate_latest as write_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from . import status_page
from .protocol import ENQUEUE, HEALTH, PING, PULL, TEXT

_PAGE, _LOGIN, _LOGOUT, _METRICS, _SAMPLES = "/", "/login", "/logout", "/metrics", status_page.SAMPLES
_KNOWN = (ENQUEUE, PULL, PING, TEXT, HEALTH)
_WELL = ("ready", "scoring")


def is_own(path: str) -> bool:
    """Whether the router checks by itself who may see this path."""
    return path in (_PAGE, _LOGIN, _LOGOUT, _METRICS, HEALTH) or path.startswith(_SAMPLES)


class Counts:
    """Answers by path and status, and how long they took; in a registry of its own, for `/metrics`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        labels = ("path", "status")
        self._answers = Counter("ddrl_reward_http_answers", "HTTP answers", labels, registry=self.registry)
        self._seconds = Histogram(
            "ddrl_reward_http_seconds", "From a request's head to its answer", ("path",), registry=self.registry
        )
        self.refused: dict[int, int] = {}

    def add(self, path: str, status: int, seconds: float) -> None:
        """One answer. Paths that do not exist share a label, so that nobody can make labels up."""
        path = path if path in _KNOWN else "page" if is_own(path) else "other"
        self._answers.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)
        if status >= 400 and not (status == 400 and path == PULL):  # that is "pending"
            self.refused[status] = self.refused.get(status, 0) + 1


def health(queue: Any, worker: Any, draining: Any) -> dict[str, Any]:
    """`/health`: "ok", "degraded" (a scorer or the queue is not there) or "stopping"; the queue's and each scorer's
    account."""
    waiting, scorers = queue.account, states(worker)
    ready = waiting["reachable"] and all(one["state"] in _WELL for one in scorers.values())
    return {
        "status": "stopping" if draining.on else "ok" if ready else "degraded",
        "scorers": list(scorers),
        "pending": waiting["pending"],
        "scored": waiting["scored"],
        "failed": waiting["failed"],
        "queue": waiting,
        "scorer_states": scorers,
    }


def states(worker: Any) -> dict[str, dict[str, Any]]:
    """Each scorer's account; one in a process of its own knows better whether it is there (restarting, dead)."""
    found = {}
    for name, one in worker.account.items():
        state = getattr(worker.scorers[name], "state", "ready")
        found[name] = one if state == "ready" else {**one, "state": state}
    return found


class _Accounts(Collector):
    """The accounts as Prometheus metrics, read when asked."""

    def __init__(self, queue: Any, worker: Any, draining: Any):
        self._queue, self._worker, self._draining = queue, worker, draining

    def describe(self) -> list[Metric]:
        return []  # so that registering does not read them

    def collect(self) -> Iterable[Metric]:
        waiting, scorers = self._queue.account, states(self._worker)

        def gauge(name: str, text: str, value: float) -> Metric:
            return GaugeMetricFamily(f"ddrl_reward_{name}", text, value=value)

        yield gauge("queue_pending", "Requests taken and not finished", waiting["pending"])
        yield gauge("queue_bytes", "Bytes of their arrays", waiting["bytes"])
        yield gauge("queue_oldest_seconds", "How long the oldest of them has waited", waiting["oldest_seconds"])
        yield gauge("stopping", "1 once a graceful stop has begun", float(self._draining.on))
        yield gauge("queue_reachable", "0: what keeps the queue does not answer", float(waiting["reachable"]))
        yield gauge("replicas", "Replicas alive on this queue", waiting["replicas"])
        for name in ("scored", "failed"):
            yield CounterMetricFamily(f"ddrl_reward_{name}", f"Requests {name}", value=waiting[name])
        now = status_page.latency(self._worker.timings, time.monotonic())
        times = GaugeMetricFamily(
            "ddrl_reward_latency_seconds", "Enqueue to scores, of the last requests", labels=["quantile"]
        )
        for quantile, key in (("0.5", "p50"), ("0.95", "p95")):
            times.add_metric([quantile], now[key])
        yield times
        ready = GaugeMetricFamily("ddrl_reward_scorer_ready", "1: it answers", labels=["scorer"])
        samples = CounterMetricFamily("ddrl_reward_scorer_samples", "Samples it scored", labels=["scorer"])
        errors = CounterMetricFamily("ddrl_reward_scorer_errors", "Requests it failed", labels=["scorer"])
        busy = CounterMetricFamily("ddrl_reward_scorer_seconds", "Seconds spent in it", labels=["scorer"])
        for name, one in scorers.items():
            ready.add_metric([name], float(one["state"] in _WELL))
            samples.add_metric([name], one["scored"])
            errors.add_metric([name], one["failed"])
            busy.add_metric([name], one["seconds"])
        yield from (ready, samples, errors, busy)


def router(
    queue: Any,
    worker: Any,
    draining: Any,
    token: str,
    counts: Counts,
    more: Callable[[], dict[str, Any]] = dict,
) -> APIRouter:
    """GET /health, /metrics, / and /samples/ID; POST /login and /logout.

    Args:
      queue: a `queue.Queue`, of which `account` is read.
      worker: has `account` (scorer -> state, scored, failed, seconds, last_error), `timings` and `recent`.
      draining: `on` once a graceful stop has begun.
      token: the bearer token; "": whoever reaches this machine's own address may see all.
      counts: HTTP's answers, to which the caller adds.
      more: further fields of `/health`.
    """
    routes = APIRouter()
    bearer = f"Bearer {token}".encode()
    pass_value = hmac.new(token.encode(), b"ddrl sidecar status page", hashlib.sha256).hexdigest().encode()
    counts.registry.register(_Accounts(queue, worker, draining))
    ProcessCollector(registry=counts.registry)
    where = socket.gethostname()

    def cookie(request: Request) -> str:
        return f"ddrl_status_{request.url.port or 80}"  # cookies know no ports, and a machine may have several servers

    def trusted(request: Request) -> bool:
        if not token:
            # A name that someone else's page made point here (DNS rebinding) is not this machine's own.
            return request.url.hostname in ("127.0.0.1", "localhost", "::1")
        given = request.headers.get("authorization", "").encode("latin-1")
        shown = request.cookies.get(cookie(request), "").encode("latin-1", "replace")
        return hmac.compare_digest(given, bearer) | hmac.compare_digest(shown, pass_value)

    def refuse() -> JSONResponse:
        message = "token: missing or wrong; send Authorization: Bearer TOKEN, or log in at /"
        return JSONResponse({"message": message}, 401, headers={"WWW-Authenticate": "Bearer"})

    @routes.get(HEALTH)
    def get_health() -> dict[str, Any]:
        return {**health(queue, worker, draining), **more()}

    @routes.get(_METRICS)
    def get_metrics(request: Request) -> Response:
        if not trusted(request):
            return refuse()
        return Response(write_metrics(counts.registry), media_type=CONTENT_TYPE_LATEST)

    @routes.get(_PAGE)
    def get_page(request: Request, login: str = "", part: str = "") -> HTMLResponse:
        nonce, trust = secrets.token_urlsafe(16), trusted(request)
        live = status_page.live(
            {**health(queue, worker, draining), **more()},
            list(worker.timings),
            dict(counts.refused),
            list(worker.recent) if trust else None,
            where,
            can_log_out=trust and bool(token),
        )
        asked = "" if trust else "failed" if login == "failed" else "ask"
        text = live if part == "live" else status_page.page(live, nonce, asked)
        policy = (
            f"default-src 'none'; style-src 'nonce-{nonce}'; script-src 'nonce-{nonce}'; img-src 'self' data:; "
            "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
        )
        headers = {"Content-Security-Policy": policy, "Cache-Control": "no-store", "Referrer-Policy": "same-origin",
                   "X-Content-Type-Options": "nosniff"}  # fmt: skip
        return HTMLResponse(text, headers=headers)

    @routes.get(_SAMPLES + "{key}")
    def get_sample(request: Request, key: str) -> Response:
        if not trusted(request):
            return refuse()
        for _, _, thumbnail, _ in list(worker.recent):
            if status_page.key(thumbnail) == key:
                headers = {"Cache-Control": "private, max-age=3600", "X-Content-Type-Options": "nosniff"}
                return Response(_png(thumbnail), media_type="image/png", headers=headers)
        return JSONResponse({"message": "sample: no longer among the last ones"}, 404)

    @routes.post(_LOGIN)
    async def log_in(request: Request) -> Response:
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > 4096:
                return JSONResponse({"message": "body: larger than a login's 4096 bytes"}, 413)
        given = parse_qs(body.decode("utf-8", "replace")).get("token", [""])[0]
        if not token or not hmac.compare_digest(given.encode("utf-8", "replace"), token.encode()):
            return RedirectResponse(f"{_PAGE}?login=failed", 303)
        answer = RedirectResponse(_PAGE, 303)
        answer.set_cookie(
            cookie(request), pass_value.decode(), max_age=12 * 3600, httponly=True, samesite="strict",
            secure=request.url.scheme == "https",
        )  # fmt: skip
        return answer

    @routes.post(_LOGOUT)
    async def log_out(request: Request) -> Response:
        answer = RedirectResponse(_PAGE, 303)
        answer.delete_cookie(cookie(request), httponly=True, samesite="strict")
        return answer

    return routes


def _png(thumbnail_HWC: np.ndarray) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    picture = thumbnail_HWC if thumbnail_HWC.shape[-1] == 3 else thumbnail_HWC[..., 0]
    Image.fromarray(np.ascontiguousarray(picture)).save(buffer, "PNG")
    return buffer.getvalue()
