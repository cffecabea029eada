"""The HTTP face of the sidecar: cosmos-rl's reward protocol on FastAPI, one process, loopback unless told otherwise."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import os
import signal
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI, Form, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from . import shared, status
from .protocol import (
    DTYPE_HEADER,
    ENQUEUE,
    LATENT_ATTR,
    PING,
    PULL,
    PUSH,
    REPLICA_HEADER,
    SHAPE_HEADER,
    TEXT,
    Limits,
    ProtocolError,
    decode_captions,
    decode_latent_attributes,
    decode_push,
    decode_request,
    one_line,
    our_scorer,
    with_cosmos_keys,
)
from .queue import Queue, QueueDownError, QueueFullError

if TYPE_CHECKING:
    from .text import TextWorker
    from .worker import Worker

log = logging.getLogger("ddrl_jax.sidecar")

_SWEEP_S = 30.0


class Draining:
    """Set once a graceful stop has begun: nothing new is taken, what was taken is finished and handed out."""

    def __init__(self) -> None:
        self.on = False


def _refuse(path: str, status: int, message: object, **headers: str) -> JSONResponse:
    line = one_line(message)
    log.warning("%s: %d %s", one_line(path, 80), status, line)
    return JSONResponse({"message": line}, status, headers=headers)


class _Door:
    """ASGI: asks for the token, bounds forms, and counts answers. The page at `/` and its kin look after themselves.

    A form that is larger than `most` bytes is a 413; what is sent to ENQUEUE and TEXT is bounded where it is read.
    """

    def __init__(self, app: Any, token: str, most: int, counts: status.Counts):
        self.app, self.most, self.counts = app, most, counts
        self.expected = f"Bearer {token}".encode() if token else b""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        path, began, answered, seen = scope["path"], time.perf_counter(), 500, 0

        async def counted(message: Any) -> None:
            nonlocal answered
            answered = message.get("status", answered)
            await send(message)

        async def bounded() -> Any:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.most:
                raise HTTPException(413, f"body: larger than the limit of {self.most} bytes")
            return message

        given = dict(scope["headers"]).get(b"authorization", b"")
        try:
            if self.expected and not status.is_own(path) and not hmac.compare_digest(given, self.expected):
                refusal = _refuse(path, 401, "token: missing or wrong; send Authorization: Bearer TOKEN")
                await refusal(scope, receive, counted)
            else:
                await self.app(scope, receive if path in (ENQUEUE, TEXT) else bounded, counted)
        finally:
            self.counts.add(path, answered, time.perf_counter() - began)


def make_app(
    queue: Queue,
    worker: Worker,
    limits: Limits,
    token: str,
    draining: Draining,
    replica_id: str = "",
    text: TextWorker | None = None,
    proof: dict[str, str] | None = None,
) -> FastAPI:
    """The application.

    Args:
      queue: what requests go into; `worker` takes from it and knows the scorers.
      token: an empty one means that anyone who reaches the port may ask.
      replica_id: told to clients, which name it when they pull.
      proof: of sharing memory with clients on this host (`shared.prove`).
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    counts = status.Counts()
    reading = 0  # bytes of bodies on their way in
    latent_fps: float | None = None

    def more() -> dict[str, Any]:
        return {
            "replica_id": replica_id,
            "shared": proof,
            "text_encoder": text.account if text is not None else None,
        }

    app.include_router(status.router(queue, worker, draining, token, counts, more=more))

    @app.exception_handler(RequestValidationError)
    async def bad_form(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:])
        return _refuse(request.url.path, 422, f"{where}: {first['msg']}")

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        # Starlette's own refusals (no such path, form too broken to read). 400 is kept for "pending".
        return _refuse(request.url.path, 422 if error.status_code == 400 else error.status_code, error.detail)

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> JSONResponse:
        return _refuse(request.url.path, 422, "body: the client left before all of it was there")

    @app.exception_handler(ProtocolError)
    async def malformed(request: Request, error: ProtocolError) -> JSONResponse:
        return _refuse(request.url.path, error.status, error)

    @app.exception_handler(QueueFullError)
    async def full(request: Request, error: QueueFullError) -> JSONResponse:
        return _refuse(request.url.path, 429, error, **{"Retry-After": "1"})

    @app.exception_handler(QueueDownError)
    async def down(request: Request, error: QueueDownError) -> JSONResponse:
        return _refuse(request.url.path, 503, error, **{"Retry-After": "1"})

    async def read(request: Request, most: int) -> bytearray:
        """The body. Raises ProtocolError as soon as it is known to be larger than `most` bytes, and QueueFullError once
        all bodies on their way have more than the queue may hold."""
        nonlocal reading
        too_large = ProtocolError(f"body: larger than the limit of {most} bytes", 413)
        length = request.headers.get("content-length", "")
        if length.isdigit() and int(length) > most:
            raise too_large
        body, room = bytearray(), True
        try:
            async for chunk in request.stream():
                room = room and (not body or reading + len(chunk) <= limits.queue_bytes)
                if not room:  # heard out, not kept
                    continue
                body += chunk
                reading += len(chunk)
                if len(body) > most:
                    raise too_large
        finally:
            reading -= len(body)
        if not room:
            raise QueueFullError("queue: too many bytes are on their way already; try again later")
        return body

    @app.post(ENQUEUE)
    async def enqueue(request: Request) -> JSONResponse:
        if draining.on:
            return _refuse(ENQUEUE, 503, "server: stopping, takes nothing new")
        header, array = await run_in_threadpool(decode_request, await read(request, limits.body_bytes), limits)
        header.reward_fn = {our_scorer(name, worker.scorers): weight for name, weight in header.reward_fn.items()}
        if header.video_infos is None and latent_fps is not None and header.media_type != "image":
            header.video_infos = [{"video_fps": latent_fps}] * len(header.prompts)
        try:
            uuid = await run_in_threadpool(queue.add, header, array)
        except ValueError as error:
            return _refuse(ENQUEUE, 422, error)
        answer = {"uuid": uuid}
        if replica_id:
            answer["replica_id"] = replica_id
        return JSONResponse(answer)

    @app.post(PULL)
    async def pull(request: Request, uuid: str = Form(...), type: str | None = Form(None)) -> JSONResponse:
        scorer = our_scorer(type, worker.scorers) if type is not None else None
        code, answer = await run_in_threadpool(queue.get, uuid, scorer)
        if code == 404:
            target = request.headers.get(REPLICA_HEADER)
            if replica_id and target and target != replica_id:
                return _refuse(PULL, 421, f"replica: this is {replica_id}, the request is for {target}; ask again")
            return _refuse(PULL, code, answer["message"])
        # Pending is not worth a line; a failed task has one already, without the reason: that may quote prompts.
        if code == 200 and type is not None and scorer is not None:
            answer = with_cosmos_keys(answer, type, scorer)
        return JSONResponse(answer, code)

    @app.post(PUSH)
    async def push(uuid: str = Form(...), scores: str = Form(...), type: str | None = Form(None)) -> JSONResponse:
        scorer, answer = decode_push(scores, type)
        try:
            kept = await run_in_threadpool(queue.put_answer, uuid, our_scorer(scorer, worker.scorers), answer)
        except ValueError as error:
            return _refuse(PUSH, 422, error)
        return JSONResponse({"message": "scores kept" if kept else "there are scores already; they stay"})

    @app.post(LATENT_ATTR)
    async def latent_attr(fields: str = Form(...)) -> dict[str, str]:
        nonlocal latent_fps
        given = decode_latent_attributes(fields)
        latent_fps = given.fps if given.fps is not None else latent_fps
        told = "none set" if latent_fps is None else f"{latent_fps:g} frames a second where a request has none"
        return {"message": f"latents: {told}"}

    @app.post(TEXT)
    async def embed(request: Request) -> Response:
        if text is None:
            return _refuse(TEXT, 404, "text: this server has no text encoder; start it with --text-encoder FOLDER")
        if draining.on:
            return _refuse(TEXT, 503, "server: stopping, takes nothing new")
        captions = decode_captions(await read(request, limits.json_bytes), limits)
        try:
            content = await asyncio.wrap_future(text.add(captions))
        except QueueFullError:
            raise
        except Exception as error:  # the tower's own: no memory on its device, say
            log.error("text: %s", type(error).__name__)
            return JSONResponse({"message": one_line(f"text: {type(error).__name__}: {error}")}, 500)
        encoder = text.encoder
        shape = f"{len(captions)},{encoder.length},{encoder.dim}"
        headers = {DTYPE_HEADER: encoder.dtype, SHAPE_HEADER: shape}
        return Response(content, media_type="application/octet-stream", headers=headers)

    @app.post(PING)
    async def ping(info_data: str = Form(...)) -> dict[str, str]:
        return {"message": "Ping request received"}

    app.add_middleware(_Door, token=token, most=limits.json_bytes, counts=counts)
    return app


class _Server(uvicorn.Server):
    """uvicorn, but the first SIGTERM or SIGINT lets the queue run empty; the second stops at once."""

    def __init__(self, config: uvicorn.Config, queue: Queue, draining: Draining, grace: float, text: TextWorker | None):
        super().__init__(config)
        self.queue, self.draining, self.grace, self.text = queue, draining, grace, text

    def handle_exit(self, sig: int, frame: Any) -> None:
        if self.draining.on:
            self.force_exit = self.should_exit = True
            return
        self.draining.on = True
        # Nothing here may wait for a lock: the signal may have come while this very thread held it.
        threading.Thread(target=self._drain_then_exit, args=(sig,), daemon=True).start()

    def _drain_then_exit(self, sig: int) -> None:
        end = time.monotonic() + self.grace
        log.info("signal %d: finishing %d requests", sig, self.queue.account["pending"])
        self.queue.drain(self.grace)
        if self.text is not None:
            self.text.drain(end - time.monotonic())
        self.should_exit = True


def bind(host: str, port: int, token: str) -> socket.socket:
    """A listening socket. Raises ValueError, in one line: port taken, or an open door to the network."""
    if not token and host not in ("127.0.0.1", "localhost", "::1"):
        raise ValueError(
            f"host: {host!r} is reachable from other machines and there is no token; "
            "name the variable that holds one with --token-env, or use 127.0.0.1"
        )
    if not 0 <= port < 65536:
        raise ValueError(f"port: {port} is outside 0..65535")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    if os.name == "posix":  # a port just left by a server of ours is free
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(128)
    except OSError as error:
        sock.close()
        raise ValueError(
            f"port: {port} on {host} cannot be had ({error.strerror}); choose another, or 0 for any free one"
        ) from None
    return sock


def exit_with_parent(parent: int) -> None:
    """Ends this process as soon as `parent` is gone, however it went (kill -9 included)."""
    try:  # Linux: at once, by the kernel
        import ctypes

        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    except (OSError, AttributeError):
        pass

    def watch() -> None:  # elsewhere, and for a parent that went before the line above
        while os.getppid() == parent:
            time.sleep(0.25)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def write_ready(path: str, fields: dict[str, Any]) -> None:
    """Atomically: a reader sees the whole file or none."""
    partial = f"{path}.{os.getpid()}"
    with open(partial, "w") as file:
        json.dump(fields, file)
    os.replace(partial, path)


def serve(
    sock: socket.socket,
    queue: Queue,
    worker: Worker,
    *,
    limits: Limits,
    token: str,
    ready_file: str = "",
    replica_id: str = "",
    grace: float = 30.0,
    text: TextWorker | None = None,
) -> None:
    """Answers until SIGTERM. Once it does, prints one JSON line: host, port, pid, scorers (also to `ready_file`)."""
    draining = Draining()
    host, port = sock.getsockname()[:2]
    ready = {"host": host, "port": port, "pid": os.getpid(), "scorers": list(worker.scorers)}

    async def sweep() -> None:
        while True:
            await run_in_threadpool(shared.sweep)
            await asyncio.sleep(_SWEEP_S)

    async def main(proof: dict[str, str] | None) -> None:
        app = make_app(queue, worker, limits, token, draining, replica_id, text, proof)
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, log_config=None, lifespan="off", timeout_graceful_shutdown=5
        )
        server = _Server(config, queue, draining, grace, text)
        sweeping = asyncio.ensure_future(sweep())
        running = asyncio.ensure_future(server.serve(sockets=[sock]))
        while not server.started and not running.done():
            await asyncio.sleep(0.01)
        if server.started:
            print(json.dumps(ready), flush=True)
            if ready_file:
                write_ready(ready_file, ready)
        await running
        sweeping.cancel()

    with contextlib.ExitStack() as stack:
        stack.callback(queue.close)
        proof = None
        try:
            segment, proof = shared.prove()
            stack.enter_context(segment)
        except OSError:  # no such memory here: arrays come over HTTP
            log.info("no shared memory here; arrays come over HTTP")
        asyncio.run(main(proof))
