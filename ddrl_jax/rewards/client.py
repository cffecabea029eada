"""Asks a reward server for scores without ever stopping the training over it.

What the server does wrong becomes a mask and a reason; only a mistake in the configuration (a refused token, a
scorer that the server does not have) is raised.
"""

from __future__ import annotations

import copy
import io
import itertools
import json
import logging
import math
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

import httpx
import numpy as np
from pydantic import ValidationError

from ddrl_jax.sidecar import protocol, shared
from ddrl_jax.sidecar.protocol import one_line

from .environment import ConfigurationFault
from .mixing import resolve_name, scorer_of, weighted_names

if TYPE_CHECKING:
    from .sidecar import Sidecar


log = logging.getLogger("ddrl_jax.rewards")

_REQUEST_BYTES = 128 << 20  # of the array, before it is narrowed for the wire
_ANSWER_BYTES = 64 << 20


class _Retryable(Exception):
    """Worth another attempt: no connection, no answer in time, a 5xx, an answer that is no answer."""


class _Final(Exception):
    """The server's last word on this request."""


@dataclass(frozen=True)
class Scores:
    """What came back for a batch of B samples.

    Attributes:
      scores: name ("digits/text_alignment") -> (B,) float32, NaN where invalid. Empty when nothing came back.
      valid: (B,) bool: every score with a weight is there and finite.
      reason: why some or all are invalid, one line; "" when all are valid.
      seconds: from submit to answer; of a batch in several requests, their sum.
      attempts: how many times the batch was sent.
    """

    scores: dict[str, np.ndarray]
    valid: np.ndarray
    reason: str
    seconds: float
    attempts: int = 1


class _Request:
    """A batch as it is sent: by HTTP, or by name in shared memory."""

    def __init__(self, header: protocol.EnqueueHeader, array: np.ndarray):
        self.header, self.array = header, array
        self._body = b""

    def body(self) -> bytes:
        if not self._body:
            self._body = protocol.encode_request(self.header, self.array)
        return self._body

    def body_naming(self, segment: shared.Segment) -> bytes:
        claim = protocol.SharedArray.model_validate(
            {"name": segment.name, "dtype": self.array.dtype.name, "shape": self.array.shape}
        )
        return protocol.encode_request(self.header.model_copy(update={"shared": claim}), None)


class Ticket:
    """A batch on its way. `result()` waits for it."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._scores: Scores | None = None
        self._fault: BaseException | None = None

    def done(self) -> bool:
        return self._done.is_set()

    @property
    def fault(self) -> BaseException | None:
        """What `result` would raise, as far as it is known."""
        return self._fault

    def result(self) -> Scores:
        """Waits (bounded by the client's timeout). Raises ConfigurationFault, and nothing for faults of the server."""
        self._done.wait()
        if self._fault is not None:
            raise self._fault
        assert self._scores is not None
        return self._scores


class RewardClient:
    """Talks cosmos-rl's reward protocol to one server.

    Args:
      url, token: the server's. A `Sidecar` knows its own: `sidecar.client(...)`.
      reward_fn: sub-score or scorer -> weight. Decides which scorers are asked, and which scores a sample needs
        to be valid. One of weight 0 is a judge, asked by `with_judges` only.
      gates: sub-scores or scorers that are asked for, and needed, beside the weighted ones.
      timeout_s: most seconds for one batch, all attempts together.
      retries: attempts after the first, for faults that may pass (no connection, 5xx, an unreadable answer).
      poll_s: seconds between two questions whether the scores are there.
      fps: frames a second, told to the scorers.
      media_type: "latent" (B,C,T,h,w), "video" (B,C,T,H,W) in [0,255] or "image" (B,H,W,C) in [0,255].
      wire: "float32", or "bfloat16" (latents only): half the bytes.
      transport: "auto" hands arrays to a server that proves to be on this host in shared memory, "http" never does.
      sidecar: relaunched, a bounded number of times, when it has died or does not answer in time.

    Raises:
      ConfigurationFault: a field that cannot be right.
    """

    def __init__(
        self,
        url: str,
        token: str,
        reward_fn: Mapping[str, float],
        *,
        gates: Iterable[str] = (),
        timeout_s: float = 120.0,
        retries: int = 3,
        poll_s: float = 0.02,
        fps: float = 16.0,
        media_type: Literal["latent", "video", "image"] = "latent",
        wire: Literal["float32", "bfloat16"] = "float32",
        transport: Literal["auto", "http"] = "auto",
        sidecar: Sidecar | None = None,
    ):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigurationFault(f"reward.url: {url!r}; http://HOST:PORT is needed")
        if not any(reward_fn.values()) or not all(map(math.isfinite, reward_fn.values())):
            raise ConfigurationFault(
                f"reward.scorers: {dict(reward_fn)!r}; finite weights are needed, at least one other than 0"
            )
        if timeout_s <= 0 or poll_s <= 0 or retries < 0:
            raise ConfigurationFault(
                f"reward: timeout_s={timeout_s}, poll_s={poll_s}, retries={retries}; above 0, above 0, at least 0"
            )
        if wire == "bfloat16" and media_type != "latent":
            raise ConfigurationFault(f"reward.wire: 'bfloat16' is for latents, not for media_type {media_type!r}")
        if transport not in ("auto", "http"):
            raise ConfigurationFault(f"reward.transport: {transport!r}; 'auto' or 'http' is needed")
        self._url, self._token, self._sidecar = url.rstrip("/"), token, sidecar
        self.reward_fn = dict(reward_fn)
        # The server is asked for scorers; which sub-scores count, and with what sign, is the trainer's business.
        self.gates = tuple(gates)
        weighted = [n for n, w in reward_fn.items() if w]
        self.scorers = tuple(dict.fromkeys(map(scorer_of, (*weighted, *self.gates))))
        self._judges: frozenset[str] = frozenset()  # asked, but a batch is whole without them
        self.known: tuple[str, ...] = ()  # sub-scores, in the order that processes exchange them in; `scoring` sets it
        self.timeout_s, self.retries, self.poll_s = timeout_s, retries, poll_s
        self.fps, self.media_type, self.wire = fps, media_type, wire
        # A proxy from the environment is for the network, not for this machine.
        local = parts.hostname in ("127.0.0.1", "localhost", "::1")
        self._http = httpx.Client(trust_env=not local)
        self._may_share = transport == "auto" and shared.available()
        self._asked_to_share: tuple[str, int] | None = None  # which start of which server
        self._shares = False

    def with_judges(self) -> RewardClient:
        """This client, which also asks the scorers of weight 0: no sample needs their scores to be valid."""
        judging = copy.copy(self)
        judging.scorers = tuple(dict.fromkeys((*self.scorers, *map(scorer_of, self.reward_fn))))
        judging._judges = frozenset(judging.scorers) - frozenset(self.scorers)
        return judging

    @property
    def url(self) -> str:
        return self._sidecar.url if self._sidecar is not None else self._url

    @property
    def token(self) -> str:
        return self._sidecar.token if self._sidecar is not None else self._token

    @property
    def sidecar(self) -> Sidecar | None:
        """The server as launched; None: it was started elsewhere."""
        return self._sidecar

    def close(self) -> None:
        self._http.close()
        shared.sweep()  # of a server, or another client, that was killed

    # --- at the start of a run: everything that can be wrong is raised ---

    def ping(self, timeout_s: float = 10.0) -> None:
        """Checks that the server answers, takes the token and has the scorers. Raises ConfigurationFault if not."""
        try:
            answer = self._post(protocol.PING, timeout_s, data={"info_data": "{}"})
        except _Retryable as error:
            raise ConfigurationFault(
                f"reward.url: no reward server at {self.url} ({error}); start one, or set reward.launch = True"
            ) from None
        if answer.status_code != 200:
            raise ConfigurationFault(f"reward.url: {self.url} is no reward server (ping: status {answer.status_code})")
        has = self.health(timeout_s).get("scorers")  # cosmos-rl's own server has no /health
        missing = [s for s in self.scorers if isinstance(has, list) and s not in has]
        if missing:
            served = ", ".join(map(str, has or []))
            raise ConfigurationFault(f"reward.scorers: {', '.join(missing)} not served by {self.url}; it has {served}")

    def health(self, timeout_s: float = 10.0) -> dict[str, Any]:
        """The server's own account of itself; {"status": "unreachable", "reason"} when there is none. Never raises."""
        try:
            answer = self._http.get(self.url + protocol.HEALTH, timeout=timeout_s)
            fields = answer.json() if answer.status_code == 200 else None
        except (httpx.HTTPError, ValueError) as error:
            return {"status": "unreachable", "reason": one_line(f"{type(error).__name__}: {error}")}
        if not isinstance(fields, dict):
            return {"status": "unreachable", "reason": f"status {answer.status_code}, no health"}
        return fields

    # --- the rest of the protocol ---

    def push(
        self, uuid: str, scorer: str, scores: Mapping[str, Sequence[float | None]], timeout_s: float = 30.0
    ) -> None:
        """Hands in scores that were computed elsewhere, name -> one a sample. Raises ConfigurationFault if refused."""
        fields = {"scores": {name: list(values) for name, values in scores.items()}, "type": scorer}
        self._tell(protocol.PUSH, timeout_s, {"uuid": uuid, "scores": json.dumps(fields), "type": scorer})

    def latent_attr(self, timeout_s: float = 30.0, **fields: Any) -> None:
        """Tells a server what all latents are like (`protocol.LatentAttributes`). Raises as `push`."""
        self._tell(protocol.LATENT_ATTR, timeout_s, {"fields": json.dumps(fields)})

    def _tell(self, path: str, timeout_s: float, form: dict[str, str]) -> None:
        try:
            answer = self._post(path, timeout_s, data=form)
        except _Retryable as error:
            raise ConfigurationFault(f"reward.url: {self.url}{path}: {error}") from None
        if answer.status_code != 200:
            raise ConfigurationFault(f"reward.url: {self.url}{path}: {answer.status_code} {_message(answer)}")

    # --- every step ---

    def submit(self, latents: np.ndarray, prompts: Sequence[str]) -> Ticket:
        """Sends a batch and returns at once. latents as `media_type` says, B first; B prompts.

        A sample that holds values that are not finite is not sent (zeros go in its place) and comes back invalid.
        Raises ValueError when there is not one prompt a sample.
        """
        array = np.asarray(latents)
        if len(prompts) != len(array) or not len(array):
            raise ValueError(f"prompts: {len(prompts)} of them for a batch of {array.shape}")
        ticket = Ticket()

        def work() -> None:
            try:
                ticket._scores = self._in_requests(array, list(prompts))
            except BaseException as error:
                ticket._fault = error
            finally:
                ticket._done.set()

        threading.Thread(target=work, name="reward", daemon=True).start()
        return ticket

    def _in_requests(self, array: np.ndarray, prompts: list[str]) -> Scores:
        """A batch in as many requests as its size asks for, two on their way at a time: latents of 128 clips of 720p
        have 2.8 GB, more than a server takes at once."""
        requests = -(-array.nbytes // _REQUEST_BYTES)
        if requests == 1:
            return self._collect(array, prompts)
        edges = np.unique(np.linspace(0, len(array), requests + 1).astype(int))
        with ThreadPoolExecutor(2, "reward") as pool:
            parts = pool.map(
                lambda rows: self._collect(array[slice(*rows)], prompts[slice(*rows)]), itertools.pairwise(edges)
            )
            return joined(list(parts))

    def _collect(self, array: np.ndarray, prompts: list[str]) -> Scores:
        began = time.monotonic()
        deadline = began + self.timeout_s
        count = len(array)
        finite = np.isfinite(array.reshape(count, -1)).all(1)
        reason, attempt = "", 0
        if not finite.any():
            return self._masked(count, "no sample is finite", began, 0)
        request = self._request(array, finite, prompts)
        for attempt in range(1, self.retries + 2):
            seen = self._sidecar.generation if self._sidecar is not None else 0
            try:
                columns = self._once(request, count, deadline)
                break
            except _Final as error:
                return self._masked(count, str(error), began, attempt)
            except _Retryable as error:
                reason = str(error)
            late = time.monotonic() >= deadline
            if late:
                reason = f"no scores within {self.timeout_s:g} s ({reason})"
            # A process that has just dropped our connection may take a moment to be seen as dead.
            if self._sidecar is not None and (late or not self._sidecar.alive(wait_s=0.3)):
                # Late: it hangs. This batch is lost, the next one shall find a server that answers.
                told = self._sidecar.relaunch(seen)
                reason += f"; {told}" if told else ""
            log.warning("rewards, attempt %d of %d: %s", attempt, self.retries + 1, one_line(reason))
            if late or attempt > self.retries:
                return self._masked(count, reason, began, attempt)
            time.sleep(max(0.0, min(0.1 * 2**attempt, 2.0, deadline - time.monotonic())))
        try:
            needed = [*weighted_names(self.reward_fn, columns), *(resolve_name(n, columns) for n in self.gates)]
        except KeyError as error:
            return self._masked(count, f"the server's scores lack one: {error.args[0]}", began, attempt)
        for column in columns.values():
            column[~finite] = np.nan
        valid = np.all([np.isfinite(columns[n]) for n in needed], axis=0)
        reasons = []
        if not finite.all():
            reasons.append(f"{int((~finite).sum())} of {count} samples are not finite")
        for name in needed:
            bad = int((~np.isfinite(columns[name]) & finite).sum())
            if bad:
                reasons.append(f"{bad} of {count} scores {name} are not finite")
        return Scores(columns, valid, "; ".join(reasons), time.monotonic() - began, attempt)

    def _masked(self, count: int, reason: str, began: float, attempts: int) -> Scores:
        seconds = time.monotonic() - began
        return Scores({}, np.zeros(count, bool), one_line(reason), seconds, attempts)

    def _request(self, array: np.ndarray, finite: np.ndarray, prompts: list[str]) -> _Request:
        if array.dtype != np.uint8:
            array = np.asarray(array, np.float32)
        if not finite.all():
            array = np.where(finite.reshape(-1, *[1] * (array.ndim - 1)), array, np.float32(0))
        if self.wire == "bfloat16":
            array = protocol.to_bfloat16_bytes(array)
        header = protocol.EnqueueHeader(
            prompts=prompts,
            reward_fn=dict.fromkeys(self.scorers, 1.0),
            video_infos=[{"video_fps": self.fps}] * len(prompts),
            media_type=self.media_type,
        )
        return _Request(header, array)

    def _shares_memory(self, deadline: float) -> bool:
        """Whether the server has proven to be on this host. Asked once of every start of it."""
        if not self._may_share:
            return False
        server = self.url, self._sidecar.generation if self._sidecar is not None else 0
        if self._asked_to_share != server:
            health = self.health(max(0.1, min(5.0, (deadline - time.monotonic()) / 2)))
            self._shares = shared.same_host(health.get("shared"))
            self._asked_to_share = server
            shared.sweep()
        return self._shares

    def _send(self, request: _Request, deadline: float) -> httpx.Response:
        """One enqueue, by shared memory where that can be: its name is gone again when this returns."""
        if self._shares_memory(deadline):
            try:
                with shared.Segment(request.array) as segment:
                    body = request.body_naming(segment)
                    answer = self._post(protocol.ENQUEUE, deadline - time.monotonic(), content=body)
                if answer.status_code != 422 or not _message(answer).startswith("shared"):
                    return answer
                reason = _message(answer)
                self._shares = False  # another server than the one that was asked
            except OSError as error:
                reason = str(error)
            log.warning("rewards: over HTTP, not by shared memory (%s)", one_line(reason))
        return self._post(protocol.ENQUEUE, deadline - time.monotonic(), content=request.body())

    def _once(self, request: _Request, count: int, deadline: float) -> dict[str, np.ndarray]:
        """One attempt: enqueue, then pull each scorer until it is there."""
        while True:
            answer = self._send(request, deadline)
            if answer.status_code != 429:
                break
            self._wait(deadline, _retry_after(answer), "the server's queue is full")
        if answer.status_code != 200:
            raise _Final(f"the server refused the batch: {answer.status_code} {_message(answer)}")
        try:
            taken = protocol.EnqueueAnswer.model_validate(answer.json())
        except ValueError:
            raise _Retryable(f"garbage instead of a uuid: {one_line(answer.text, 80)!r}") from None
        columns: dict[str, np.ndarray] = {}
        for scorer in self.scorers:
            try:
                columns |= self._pull(taken, scorer, count, deadline)
            except _Final as error:
                if scorer not in self._judges:
                    raise
                log.warning("rewards: the judge %s gave no scores: %s", scorer, one_line(error))
        return columns

    def _pull(self, taken: protocol.EnqueueAnswer, scorer: str, count: int, deadline: float) -> dict[str, np.ndarray]:
        headers = {protocol.REPLICA_HEADER: taken.replica_id} if taken.replica_id else {}
        while True:
            left = deadline - time.monotonic()
            answer = self._post(
                protocol.PULL, min(left, 30.0), data={"uuid": taken.uuid, "type": scorer}, headers=headers
            )
            if answer.status_code == 200:
                return _columns(answer, scorer, count)
            if answer.status_code == 404:
                raise _Retryable("the server no longer knows the batch (it was restarted?)")
            if answer.status_code == 429:
                self._wait(deadline, _retry_after(answer), "the server asks for patience")
            elif answer.status_code in (400, 421):  # 421: another replica was asked than the one that took it
                self._wait(deadline, self.poll_s, "still pending")
            else:
                raise _Final(f"scoring failed: {answer.status_code} {_message(answer)}")

    def _wait(self, deadline: float, seconds: float, why: str) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise _Retryable(why)
        if self._sidecar is not None and not self._sidecar.alive():
            raise _Retryable("the sidecar died while it was scoring")
        time.sleep(min(seconds, left))

    def _post(self, path: str, timeout: float, **request: Any) -> httpx.Response:
        if timeout <= 0:
            raise _Retryable("no time left")
        headers: dict[str, Any] = request.pop("headers", {})
        if self.token:
            headers = {**headers, "Authorization": f"Bearer {self.token}".encode()}
        try:
            answer = exchange(self._http, self.url + path, timeout, _ANSWER_BYTES, headers=headers, **request)
        except httpx.TimeoutException as error:
            raise _Retryable(f"no answer within {timeout:.2g} s ({type(error).__name__})") from None
        except (httpx.HTTPError, OSError) as error:
            raise _Retryable(one_line(f"{type(error).__name__}: {error}", 160)) from None
        if answer.status_code in (401, 403):
            raise ConfigurationFault(
                f"reward.token: {self.url} refuses it ({answer.status_code}); it must be the server's own"
            )
        if answer.status_code >= 500:
            raise _Retryable(f"server error: {answer.status_code} {_message(answer)}")
        return answer


def exchange(http: httpx.Client, url: str, timeout: float, most: int, **request: Any) -> httpx.Response:
    """One POST. httpx bounds each read, this bounds the whole: a server that drips bytes is hanging, and one whose
    answer is larger than `most` bytes is no reward server. Raises httpx.HTTPError."""
    end = time.monotonic() + timeout
    if "content" in request:  # in pieces: httpx copies what is left of a bytes object after every send
        request["content"] = io.BytesIO(request["content"])
    with http.stream("POST", url, timeout=timeout, **request) as answer:
        content = bytearray()
        for chunk in answer.iter_bytes():
            content += chunk
            if time.monotonic() > end:
                raise httpx.ReadTimeout(f"the answer took longer than {timeout:.3g} s")
            if len(content) > most:
                raise httpx.DecodingError(f"an answer of more than {most} bytes")
    # The headers that matter here; the encoding is undone already.
    kept = {k: answer.headers[k] for k in ("retry-after", protocol.DTYPE_HEADER) if k in answer.headers}
    return httpx.Response(answer.status_code, headers=kept, content=bytes(content))


def _retry_after(answer: httpx.Response) -> float:
    try:
        return min(max(float(answer.headers.get("retry-after", 1.0)), 0.05), 30.0)
    except ValueError:
        return 1.0


def _message(answer: httpx.Response) -> str:
    try:
        fields = answer.json()
    except ValueError:
        return one_line(answer.text, 160)
    if isinstance(fields, dict):
        return one_line(fields.get("message", fields.get("detail", fields)), 240)
    return one_line(fields, 160)


def _columns(answer: httpx.Response, scorer: str, count: int) -> dict[str, np.ndarray]:
    """Numeric columns of an answer, by full name. What is no list of numbers (labels, nested groups) is not a score."""
    try:
        fields = json.loads(answer.content)
        scores = protocol.PullAnswer.model_validate(fields).scores
    except (ValueError, ValidationError, RecursionError):
        raise _Retryable(f"garbage instead of scores: {one_line(answer.text, 80)!r}") from None
    # A server of ours that is asked for a scorer of cosmos-rl's gives its keys too, without the scorer before them.
    if any(name.startswith(f"{scorer}/") for name in scores):
        scores = {name: values for name, values in scores.items() if name.startswith(f"{scorer}/")}
    columns = {}
    for name, values in scores.items():
        if not isinstance(values, list) or not all(
            v is None or (isinstance(v, int | float) and not isinstance(v, bool)) for v in values
        ):
            continue
        full = name if name.startswith(f"{scorer}/") else f"{scorer}/{name}"
        if len(values) != count:
            raise _Final(f"{full} has {len(values)} values for {count} samples")
        column = np.array([np.nan if v is None else _as_float(v) for v in values], np.float64)
        with np.errstate(over="ignore"):
            column = column.astype(np.float32)
        columns[full] = np.where(np.isfinite(column), column, np.float32(np.nan))
    if not columns:
        raise _Final(f"no scores of {scorer} in the answer: {one_line(answer.text, 80)!r}")
    return columns


def joined(parts: Sequence[Scores]) -> Scores:
    """The scores of a batch that went in several parts, at least one; NaN where a part lacks one."""
    names = dict.fromkeys(name for part in parts for name in part.scores)
    columns = {
        name: np.concatenate([p.scores.get(name, np.full(len(p.valid), np.nan, np.float32)) for p in parts])
        for name in names
    }
    return Scores(
        scores=columns,
        valid=np.concatenate([p.valid for p in parts]),
        reason="; ".join(dict.fromkeys(p.reason for p in parts if p.reason)),
        seconds=sum(p.seconds for p in parts),
        attempts=max(p.attempts for p in parts),
    )


def _as_float(value: int | float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf
