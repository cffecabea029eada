"""The queue of a fleet: a Redis Stream that every replica takes from and any replica answers for.

Replicas are one consumer group. An entry stays in the stream until its request is finished, so the stream's length is
what is pending. Whoever takes an entry claims it again and again while it lives; entries that nobody has claimed for
`dead_seconds` are a dead replica's and are taken over (XAUTOCLAIM); a request is tried `TRIES` times at most. What must
happen together is a script in Redis, by Redis' clock: those of the replicas do not matter. Every script may run twice.

Keys, SET being a digest of the scorers and the codec:
    ddrl:SET:tasks     stream: uuid, nbytes          ddrl:task:UUID    hash: header, names, dtype, shape, answers
    ddrl:SET:bytes     hash: of each array in it     ddrl:array:UUID   hash: the array's bytes, by offset
    ddrl:SET:uploads   arrays being sent             ddrl:SET:done     uuids by when they were finished
    ddrl:SET:replicas  when each was last heard of
Needs Redis 6.2. Restarting it loses nothing if it has `appendonly yes`. Where it has no memory left, heartbeats and
ends of requests still get through (`pcall` skips what does not matter).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import secrets
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from .protocol import EnqueueHeader, Limits, one_line
from .queue import (
    MOST_PUSHED,
    PENDING,
    UNKNOWN,
    QueueDownError,
    QueueFullError,
    Task,
    check_scorers,
    full,
    is_uuid,
    no_uuid,
    not_asked,
)

log = logging.getLogger("ddrl_jax.sidecar")

TRIES = 3
_GROUP = "sidecar"
_PIECE = 16 << 20  # bytes; Redis takes no string above 512 MB
_UPLOAD_SECONDS = 10  # to send a piece: whoever takes longer has died
_WAITING_SECONDS = 86400  # for an array to be scored
_PATIENCE_SECONDS = 60.0  # for a Redis that is gone, with scores in hand
_EMPTY = {"pending": 0, "bytes": 0, "oldest_seconds": 0.0, "replicas": 0}

_NOW = "local t = redis.call('TIME') local now = t[1] * 1000 + math.floor(t[2] / 1000) "
# Finished requests: the newest `most`, none older than `seconds`.
_KEEP = """
local function keep(done, uuid, seconds, most)
  redis.pcall('ZADD', done, now, uuid)
  redis.call('ZREMRANGEBYSCORE', done, '-inf', now - seconds * 1000)
  local surplus = redis.call('ZCARD', done) - most
  if surplus > 0 then
    local oldest = redis.call('ZPOPMIN', done, surplus)
    for i = 1, #oldest, 2 do redis.call('DEL', 'ddrl:task:' .. oldest[i]) end
  end
end
"""

# bytes, uploads; uuid, nbytes, most requests, most bytes, seconds. Returns what is pending if there is no room.
_RESERVE = f"""{_NOW}
for _, uuid in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now)) do
  redis.call('ZREM', KEYS[2], uuid)
  redis.call('HDEL', KEYS[1], uuid)
end
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 1 then return false end
local each, bytes = redis.call('HVALS', KEYS[1]), 0
for _, one in ipairs(each) do bytes = bytes + one end
if #each >= tonumber(ARGV[3]) or (#each > 0 and bytes + ARGV[2] > tonumber(ARGV[4])) then return {{#each, bytes}} end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('ZADD', KEYS[2], now + ARGV[5] * 1000, ARGV[1])
return false
"""

# uploads; uuid, seconds
_RENEW = f"""{_NOW}
return redis.call('ZADD', KEYS[1], 'XX', now + ARGV[2] * 1000, ARGV[1])
"""

# stream, uploads, task, array; uuid, nbytes, header, names, dtype, shape, seconds.
# Returns 0 if the room was given away meanwhile.
_COMMIT = """
if redis.call('ZREM', KEYS[2], ARGV[1]) == 0 then return redis.call('EXISTS', KEYS[3]) end
redis.call('HSET', KEYS[3], 'header', ARGV[3], 'names', ARGV[4], 'dtype', ARGV[5], 'shape', ARGV[6])
redis.call('EXPIRE', KEYS[3], ARGV[7])
redis.call('EXPIRE', KEYS[4], ARGV[7])
redis.call('XADD', KEYS[1], '*', 'uuid', ARGV[1], 'nbytes', ARGV[2])
return 1
"""

# bytes, uploads, array; uuid
_RELEASE = """
if redis.call('ZREM', KEYS[2], ARGV[1]) == 1 then
  redis.call('HDEL', KEYS[1], ARGV[1])
  redis.call('DEL', KEYS[3])
end
"""

# task; field, value, the other field. Returns 1 if it was written.
_WRITE = """
if redis.call('EXISTS', KEYS[1]) == 0 or redis.call('HEXISTS', KEYS[1], ARGV[3]) == 1 then return 0 end
return redis.call('HSETNX', KEYS[1], ARGV[1], ARGV[2])
"""

# stream, bytes, done, task, array; group, entry, uuid, seconds, most. Returns 1 to the one who finishes it.
_FINISH = f"""{_NOW}{_KEEP}
redis.call('XACK', KEYS[1], ARGV[1], ARGV[2])
if redis.call('XDEL', KEYS[1], ARGV[2]) == 0 then return 0 end
redis.call('HDEL', KEYS[2], ARGV[3])
redis.call('DEL', KEYS[5])
redis.call('HDEL', KEYS[4], 'header')
if redis.call('EXPIRE', KEYS[4], ARGV[4]) == 1 then keep(KEYS[3], ARGV[3], ARGV[4], ARGV[5]) end
return 1
"""

# task, done; uuid, scorer, answer, seconds, most, most scorers. Returns 1, 0 (answered already) or the names asked for.
_PUSH = f"""{_NOW}{_KEEP}
local names = cjson.decode(redis.call('HGET', KEYS[1], 'names') or '[]')
local asked = false
for _, name in ipairs(names) do asked = asked or name == ARGV[2] end
if not asked then
  local known = redis.call('EXISTS', KEYS[1]) == 1
  if known and (redis.call('HEXISTS', KEYS[1], 'pushed') == 0 or #names >= tonumber(ARGV[6])) then
    return cjson.encode(names)
  end
  table.insert(names, ARGV[2])
  redis.call('HSET', KEYS[1], 'names', cjson.encode(names), 'pushed', 1)
  if not known then
    redis.call('EXPIRE', KEYS[1], ARGV[4])
    keep(KEYS[2], ARGV[1], ARGV[4], ARGV[5])
  end
end
if redis.call('HEXISTS', KEYS[1], 'e:' .. ARGV[2]) == 1 then return 0 end
return redis.call('HSETNX', KEYS[1], 'a:' .. ARGV[2], ARGV[3])
"""

# stream, bytes, replicas; group, me, milliseconds until dead, entries in hand.
# Returns pending, bytes, milliseconds of the oldest, replicas alive, entries that others have taken over.
_BEAT = f"""{_NOW}
local dead = tonumber(ARGV[3])
redis.pcall('ZADD', KEYS[3], now, ARGV[2])
local lost = {{}}
for i = 4, #ARGV do
  local held = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[i], ARGV[i], 1)[1]
  if held and held[2] ~= ARGV[2] then
    table.insert(lost, ARGV[i])
  elseif held then
    redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[i], 'JUSTID')
  end
end
for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', now - 10 * dead)) do
  if #redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1, name) == 0 then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], name)
    redis.call('ZREM', KEYS[3], name)
  end
end
local first = redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', 1)[1]
local age = 0
if first then age = now - string.match(first[1], '^%d+') end
local bytes = 0
for _, one in ipairs(redis.call('HVALS', KEYS[2])) do bytes = bytes + one end
return {{redis.call('XLEN', KEYS[1]), bytes, age,
        redis.call('ZCOUNT', KEYS[3], now - dead, '+inf'), lost}}
"""

# stream, replicas; group, me
_LEAVE = """
redis.call('ZREM', KEYS[2], ARGV[2])
if #redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1, ARGV[2]) == 0 then
  redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[2])
end
"""


class RedisQueue:
    """A `queue.Queue` in Redis. Its arguments are those of `open_queue`; ValueError where that Redis cannot be used."""

    def __init__(self, url: str, limits: Limits, scorers: Iterable[str], codec: str = "", dead_seconds: float = 15.0):
        try:
            import redis
        except ImportError:
            raise ValueError(
                "queue: the package redis is not in this environment; python -m ddrl_jax.sidecar build completes it"
            ) from None
        if not 0.5 <= dead_seconds < math.inf:
            raise ValueError(f"dead-seconds: {dead_seconds}; must be at least 0.5")
        self.limits, self.scorers, self._dead = limits, tuple(scorers), dead_seconds
        self._errors = redis.exceptions
        # Against one cut connection; who waits longer for Redis than this says so itself.
        retry = redis.retry.Retry(redis.backoff.ExponentialBackoff(cap=0.5, base=0.05), 3)
        where = _without_password(url)
        try:
            self._redis: Any = redis.Redis.from_url(url, socket_timeout=10, socket_connect_timeout=5, retry=retry)
            info = self._redis.info()
        except (redis.RedisError, ValueError, OSError) as error:
            raise ValueError(f"queue: {where} cannot be used ({one_line(error, 160)})") from None
        version = str(info.get("redis_version", "0"))
        if tuple(int(part) for part in version.split(".")[:2]) < (6, 2):
            raise ValueError(f"queue: {where} is Redis {version}; 6.2 or newer is needed")
        if info.get("maxmemory") and info.get("maxmemory_policy") != "noeviction":
            log.warning("queue: Redis may throw requests away; set maxmemory-policy noeviction")
        if 0 < int(info.get("maxmemory") or 0) < limits.queue_bytes:
            log.warning("queue: Redis' maxmemory is below the %d bytes that may wait", limits.queue_bytes)
        same = json.dumps([sorted(self.scorers), codec])
        prefix = f"ddrl:{hashlib.sha256(same.encode()).hexdigest()[:12]}"
        self._stream, self._bytes, self._uploads = f"{prefix}:tasks", f"{prefix}:bytes", f"{prefix}:uploads"
        self._done, self._replicas = f"{prefix}:done", f"{prefix}:replicas"
        self._script = {
            text: self._redis.register_script(text)
            for text in (_RESERVE, _RENEW, _COMMIT, _RELEASE, _WRITE, _FINISH, _PUSH, _BEAT, _LEAVE)
        }
        self._me = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._changed = threading.Condition()
        self._taken: dict[str, bool] = {}  # entries in hand; whether a scorer has failed
        self._stopping = self._closed = self._emptied = False
        self._taking = self._scored = self._failed = 0
        self._claimed = -math.inf  # when dead replicas were last looked for
        self._known, self._reachable = dict(_EMPTY), True
        self._make_group()
        self._beat()
        threading.Thread(target=self._beat_forever, name="heartbeat", daemon=True).start()

    # --- the HTTP face's side ---

    def add(self, header: EnqueueHeader, array: np.ndarray) -> str:
        check_scorers(header, self.scorers)
        task_uuid, nbytes = uuid.uuid4().hex, array.nbytes
        limits = self.limits
        task, stored = f"ddrl:task:{task_uuid}", f"ddrl:array:{task_uuid}"
        most = [limits.queue, limits.queue_bytes, _UPLOAD_SECONDS]
        with self._asking():
            occupied = self._run(_RESERVE, [self._bytes, self._uploads], [task_uuid, nbytes, *most])
            if occupied is not None:
                raise full(*map(int, occupied))
            try:
                flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
                for start in range(0, nbytes, _PIECE):
                    with self._redis.pipeline() as both:  # never a piece that would stay for ever
                        both.hset(stored, str(start), flat[start : start + _PIECE].data)
                        both.expire(stored, _UPLOAD_SECONDS)
                        both.execute()
                    if start + _PIECE < nbytes:
                        self._run(_RENEW, [self._uploads], [task_uuid, _UPLOAD_SECONDS])
                names, shape = json.dumps(list(header.reward_fn)), json.dumps(array.shape)
                about = [header.model_dump_json(), names, array.dtype.str, shape]
                keys = [self._stream, self._uploads, task, stored]
                there = self._run(_COMMIT, keys, [task_uuid, nbytes, *about, _WAITING_SECONDS])
            except self._errors.RedisError:
                self._quietly(_RELEASE, [self._bytes, self._uploads, stored], [task_uuid])
                raise
        if not there:
            raise QueueFullError("queue: sending the array to Redis took too long; try again later")
        return task_uuid

    def get(self, task_uuid: str, scorer: str | None) -> tuple[int, dict[str, Any]]:
        key = f"ddrl:task:{task_uuid}"
        if not is_uuid(task_uuid):
            return UNKNOWN
        with self._asking():
            listed = self._redis.hget(key, "names")
            if listed is None:
                return UNKNOWN
            names = json.loads(listed)
            if scorer is None and len(names) == 1:
                scorer = names[0]
            if scorer not in names:
                return 422, {"message": not_asked(scorer, names)}
            answer, error = self._redis.hmget(key, f"a:{scorer}", f"e:{scorer}")
        if answer is not None:
            return 200, json.loads(answer)
        return PENDING if error is None else (422, {"message": error.decode()})

    def put_answer(self, task_uuid: str, scorer: str, answer: dict[str, Any]) -> bool:
        if not is_uuid(task_uuid):
            raise ValueError(no_uuid(task_uuid))
        limits, text = self.limits, json.dumps(answer, allow_nan=False)
        given = [task_uuid, scorer, text, math.ceil(limits.result_seconds), limits.results, MOST_PUSHED]
        with self._asking():
            written = self._run(_PUSH, [f"ddrl:task:{task_uuid}", self._done], given)
        if isinstance(written, bytes):
            raise ValueError(not_asked(scorer, json.loads(written)))
        return bool(written)

    @property
    def account(self) -> dict[str, Any]:
        """As of the last heartbeat; scored and failed are this replica's."""
        mine = {"scored": self._scored, "failed": self._failed, "reachable": self._reachable}
        return {"kind": "redis", **self._known, **mine}

    # --- the worker's side ---

    def take(self, timeout: float) -> Task | None:
        """Work of the dead comes before new work. Outlives a Redis that is gone."""
        with self._changed:
            stopping = self._stopping
            self._taking += not stopping
        if stopping:
            time.sleep(min(timeout, 0.1))
            return None
        try:
            with self._asking():
                return self._claim() or self._read(timeout)
        except (QueueDownError, QueueFullError):
            time.sleep(min(timeout, 0.5))
            return None
        finally:
            with self._changed:
                self._taking -= 1
                self._changed.notify_all()

    def answer(self, task: Task, scorer: str, answer: dict[str, Any]) -> None:
        text = json.dumps(answer, allow_nan=False)
        self._insist(lambda: self._write(task.uuid, f"a:{scorer}", text, f"e:{scorer}"))

    def fail(self, task: Task, scorer: str, reason: str) -> bool:
        written = self._insist(lambda: self._write(task.uuid, f"e:{scorer}", one_line(reason), f"a:{scorer}"))
        if written:
            self._taken[task.entry] = True
        return bool(written)

    def finish(self, task: Task) -> None:
        try:
            if self._insist(lambda: self._finish(task.entry, task.uuid)):
                failed = self._taken[task.entry]
                self._failed += failed
                self._scored += not failed
        finally:  # if Redis is gone, the entry is taken over like a dead replica's
            self._drop(task.entry)

    def drain(self, seconds: float) -> None:
        """Takes nothing more and waits for what was taken here: the rest is safe in Redis."""
        with self._changed:
            self._stopping = True
            self._changed.wait_for(lambda: not self._taken and not self._taking, seconds)

    def close(self) -> None:
        with self._changed:
            self._stopping = self._closed = True
            self._changed.notify_all()
        self._quietly(_LEAVE, [self._stream, self._replicas], [_GROUP, self._me])

    # --- inside ---

    def _claim(self) -> Task | None:
        """A dead replica's task."""
        now = time.monotonic()
        if now - self._claimed < self._dead / 4:
            return None
        start: Any = "0-0"
        while True:
            start, entries, *_ = self._redis.xautoclaim(
                self._stream, _GROUP, self._me, int(self._dead * 1000), start, count=1
            )
            for entry, fields in entries:
                if fields:  # the next look follows at once
                    [held] = self._redis.xpending_range(self._stream, _GROUP, entry, entry, 1)
                    log.warning("request %s: taken over from a dead replica", fields[b"uuid"].decode())
                    return self._open(entry, fields, int(held["times_delivered"]))
            if start == b"0-0":
                self._claimed = now
                return None

    def _read(self, timeout: float) -> Task | None:
        """The next new task."""
        found = self._redis.xreadgroup(
            _GROUP, self._me, {self._stream: ">"}, count=1, block=max(1, int(timeout * 1000))
        )
        for _, entries in found.items() if isinstance(found, dict) else found or []:
            for entry, fields in entries:
                return self._open(entry, fields, 1)
        return None

    def _open(self, entry: bytes, fields: dict[bytes, bytes], tries: int) -> Task | None:
        """What an entry stands for; None if there is nothing left to do about it, which is then done."""
        name, task_uuid, nbytes = entry.decode(), fields[b"uuid"].decode(), int(fields[b"nbytes"])
        with self._changed:
            self._taken[name] = False
        task = None
        try:
            stored = self._redis.hgetall(f"ddrl:task:{task_uuid}")
            if b"header" in stored:
                names = json.loads(stored[b"names"])
                asked = [n for n in names if not {f"a:{n}".encode(), f"e:{n}".encode()} & stored.keys()]
                array = self._load(task_uuid, nbytes, stored) if asked and tries <= TRIES else None
                if array is not None:
                    header = EnqueueHeader.model_validate_json(stored[b"header"])
                    task = Task(task_uuid, header, array, asked, int(name.split("-")[0]) / 1000, name)
                    return task
                reason = f"killed {TRIES} replicas" if tries > TRIES else "the array has expired"
                for scorer in asked:
                    log.error("request %s: %s", task_uuid, reason, extra={"request": task_uuid, "scorer": scorer})
                    if self._write(task_uuid, f"e:{scorer}", f"scorer {scorer}: {reason}", f"a:{scorer}"):
                        self._taken[name] = True
            if self._finish(name, task_uuid):
                self._failed += self._taken[name]
                self._scored += not self._taken[name]
            return None
        finally:
            if task is None:
                self._drop(name)

    def _load(self, task_uuid: str, nbytes: int, stored: dict[bytes, bytes]) -> np.ndarray | None:
        """The array; None if it is not there, or not all of it."""
        flat = np.empty(nbytes, np.uint8)
        for start in range(0, nbytes, _PIECE):
            piece = self._redis.hget(f"ddrl:array:{task_uuid}", str(start))
            if piece is None:
                return None
            flat[start : start + _PIECE] = np.frombuffer(piece, np.uint8)
        return flat.view(stored[b"dtype"].decode()).reshape(json.loads(stored[b"shape"]))

    def _drop(self, entry: str) -> None:
        with self._changed:
            self._taken.pop(entry, None)
            self._changed.notify_all()

    def _write(self, task_uuid: str, name: str, value: str, other: str) -> Any:
        return self._run(_WRITE, [f"ddrl:task:{task_uuid}"], [name, value, other])

    def _finish(self, entry: str, task_uuid: str) -> Any:
        keys = [self._stream, self._bytes, self._done, f"ddrl:task:{task_uuid}", f"ddrl:array:{task_uuid}"]
        kept = [math.ceil(self.limits.result_seconds), self.limits.results]
        return self._run(_FINISH, keys, [_GROUP, entry, task_uuid, *kept])

    def _run(self, script: str, keys: list[str], args: list[Any]) -> Any:
        return self._script[script](keys=keys, args=args)

    def _quietly(self, script: str, keys: list[str], args: list[Any]) -> None:
        """For what Redis would forget by itself."""
        try:
            self._run(script, keys, args)
        except self._errors.RedisError as error:
            log.warning("queue: %s", one_line(error))

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """Redis' errors as ours: QueueDownError where it is gone, QueueFullError where it has no memory left."""
        errors = self._errors
        try:
            yield
        except (errors.ConnectionError, errors.TimeoutError, errors.ReadOnlyError) as error:
            raise QueueDownError(f"queue: Redis cannot be reached ({one_line(error, 160)})") from None
        except errors.ResponseError as error:
            if "NOGROUP" in str(error):  # it came back without its data; the next heartbeat makes the group
                self._emptied = True
                raise QueueDownError("queue: Redis has lost its data") from None
            if isinstance(error, errors.OutOfMemoryError) or "OOM" in str(error):
                raise QueueFullError("queue: Redis has no memory left; try again later") from None
            raise

    def _insist(self, call: Callable[[], Any]) -> Any:
        """`call`, again and again while Redis is gone: scores are worth it. Raises QueueDownError in the end."""
        end = time.monotonic() + _PATIENCE_SECONDS
        while True:
            try:
                with self._asking():
                    return call()
            except (QueueDownError, QueueFullError) as error:
                if time.monotonic() > end or self._closed:
                    raise QueueDownError(str(error)) from None
                time.sleep(0.2)

    def _make_group(self) -> None:
        try:
            self._redis.xgroup_create(self._stream, _GROUP, "0", mkstream=True)
        except self._errors.ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise

    def _beat(self) -> None:
        keys = [self._stream, self._bytes, self._replicas]
        with self._changed:
            held = list(self._taken)
        pending, nbytes, age, alive, lost = self._run(
            _BEAT, keys, [_GROUP, self._me, int(self._dead * 1000), *held]
        )  # fmt: skip
        self._known = {
            "pending": int(pending), "bytes": int(nbytes), "oldest_seconds": int(age) / 1000, "replicas": int(alive)
        }  # fmt: skip
        for entry in lost:
            if entry.decode() in self._taken:
                log.warning("queue: was silent for too long; another replica took %s over", entry.decode())

    def _beat_forever(self) -> None:
        while not self._closed:
            with self._changed:
                self._changed.wait_for(lambda: self._closed, min(1.0, self._dead / 4))
            try:
                if not self._closed:
                    with self._asking():
                        if self._emptied:
                            self._make_group()
                            self._emptied = False
                        self._beat()
                    self._reachable = True
            except QueueDownError as error:
                if self._reachable:
                    log.error("%s", error)
                self._reachable = False


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
