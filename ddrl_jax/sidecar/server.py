"""The HTTP face of the sidecar: cosmos-rl's reward protocol on FastAPI, one process, loopback unless told otherwise."""

from __future__ import annotations

import asyncio
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

from .protocol import (
    DTYPE_HEADER,
    ENQUEUE,
    HEALTH,
    PING,
    PULL,
    SHAPE_HEADER,
    TEXT,
    Limits,
    ProtocolError,
    decode_captions,
    decode_request,
    one_line,
)
from .worker import QueueFullError, Worker

if TYPE_CHECKING:
    from .text import TextWorker

log = logging.getLogger("ddrl_jax.sidecar")


class Draining:
    """Set once a graceful stop has begun: nothing new is taken, what was taken is finished and handed out."""

    def __init__(self) -> None:
        self.on = False


def make_app(
    worker: Worker,
    limits: Limits,
    token: str,
    draining: Draining,
    replica_id: str = "",
    text: TextWorker | None = None,
) -> FastAPI:
    """The application. An empty token means that anyone who reaches the port may ask."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    expected = f"Bearer {token}".encode()

    def refuse(request: Request, status: int, message: str, **headers: str) -> JSONResponse:
        log.warning("%s %s: %d %s", request.method, request.url.path, status, one_line(message))
        return JSONResponse({"message": one_line(message)}, status, headers=headers)

    @app.exception_handler(RequestValidationError)
    async def bad_form(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:])
        return refuse(request, 422, f"{where}: {first['msg']}")

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        # Starlette's own refusals (no such path, form too broken to read). 400 is kept for "pending".
        return refuse(request, 422 if error.status_code == 400 else error.status_code, str(error.detail))

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> JSONResponse:
        return refuse(request, 422, "body: the client left before all of it was there")

    @app.middleware("http")
    async def authorise(request: Request, call_next: Any) -> Any:
        given = request.headers.get("authorization", "").encode("latin-1")  # the bytes as sent
        if token and request.url.path != HEALTH and not hmac.compare_digest(given, expected):
            return refuse(request, 401, "token: missing or wrong; send Authorization: Bearer TOKEN")
        return await call_next(request)

    async def read(request: Request, most: int) -> bytearray:
        """The body. Raises ProtocolError as soon as it is known to be larger than `most` bytes."""
        too_large = ProtocolError(f"body: larger than the limit of {most} bytes", 413)
        length = request.headers.get("content-length", "")
        if length.isdigit() and int(length) > most:
            raise too_large
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > most:
                raise too_large
        return body

    @app.post(ENQUEUE)
    async def enqueue(request: Request) -> JSONResponse:
        if draining.on:
            return refuse(request, 503, "server: stopping, takes nothing new")
        try:
            body = await read(request, limits.body_bytes)
            header, array = await run_in_threadpool(decode_request, body, limits)
            uuid = worker.add(header, array)
        except QueueFullError as error:
            return refuse(request, 429, str(error), **{"Retry-After": "1"})
        except ProtocolError as error:
            return refuse(request, error.status, str(error))
        except ValueError as error:
            return refuse(request, 422, str(error))
        answer = {"uuid": uuid}
        if replica_id:
            answer["replica_id"] = replica_id
        return JSONResponse(answer)

    @app.post(PULL)
    async def pull(request: Request, uuid: str = Form(...), type: str | None = Form(None)) -> JSONResponse:
        status, answer = worker.get(uuid, type)
        if status == 404:
            return refuse(request, status, answer["message"])
        # Pending is not worth a line; a failed task has one already, without the reason: that may quote prompts.
        return JSONResponse(answer, status)

    @app.post(TEXT)
    async def embed(request: Request) -> Response:
        if text is None:
            return refuse(request, 404, "text: this server has no text encoder; start it with --text-encoder FOLDER")
        if draining.on:
            return refuse(request, 503, "server: stopping, takes nothing new")
        try:
            captions = decode_captions(await read(request, limits.json_bytes), limits)
            content = await asyncio.wrap_future(text.add(captions))
        except QueueFullError as error:
            return refuse(request, 429, str(error), **{"Retry-After": "1"})
        except ProtocolError as error:
            return refuse(request, error.status, str(error))
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

    @app.get(HEALTH)
    async def health() -> dict[str, Any]:
        return {
            "status": "stopping" if draining.on else "ok",
            "scorers": list(worker.scorers),
            "pending": worker.pending,
            "scored": worker.scored,
            "failed": worker.failed,
            "text_encoder": text.account if text is not None else None,
        }

    return app


class _Server(uvicorn.Server):
    """uvicorn, but the first SIGTERM or SIGINT lets the queue run empty; the second stops at once."""

    def __init__(
        self, config: uvicorn.Config, worker: Worker, draining: Draining, grace: float, text: TextWorker | None
    ):
        super().__init__(config)
        self.worker, self.draining, self.grace, self.text = worker, draining, grace, text

    def handle_exit(self, sig: int, frame: Any) -> None:
        if self.draining.on:
            self.force_exit = self.should_exit = True
            return
        self.draining.on = True
        log.info("signal %d: finishing %d requests", sig, self.worker.pending)
        threading.Thread(target=self._drain_then_exit, daemon=True).start()

    def _drain_then_exit(self) -> None:
        end = time.monotonic() + self.grace
        self.worker.drain(self.grace)
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
    app = make_app(worker, limits, token, draining, replica_id, text)
    config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=5)
    server = _Server(config, worker, draining, grace, text)
    host, port = sock.getsockname()[:2]
    ready = {"host": host, "port": port, "pid": os.getpid(), "scorers": list(worker.scorers)}

    async def main() -> None:
        running = asyncio.ensure_future(server.serve(sockets=[sock]))
        while not server.started and not running.done():
            await asyncio.sleep(0.01)
        if server.started:
            print(json.dumps(ready), flush=True)
            if ready_file:
                write_ready(ready_file, ready)
        await running

    asyncio.run(main())
