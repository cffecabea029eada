"""Caption features from the sidecar's text tower, for a trainer whose devices have no room for one.

Unlike a reward, which may be missing, a step cannot do without them: what cannot be had is raised.

Dims: N caption, S token, C channel of an embedding.
"""

from __future__ import annotations

import io
import logging
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httpx
import ml_dtypes
import numpy as np

from ddrl_jax.sidecar import protocol
from ddrl_jax.sidecar.protocol import one_line

from .client import RewardClient, exchange
from .environment import ConfigurationFault

if TYPE_CHECKING:
    from .sidecar import Sidecar

log = logging.getLogger("ddrl_jax.rewards")

_HEADER_BYTES = 4096  # of what np.save writes before the numbers: 128, as a rule
_ITEM_BYTES = {"float32": 4, "bfloat16": 2}


class TextUnavailable(RuntimeError):
    """The server gave no features, however often it was asked."""


class _Retryable(Exception):
    """Worth another attempt."""


def embed_captions(
    url: str,
    token: str,
    captions: Sequence[str],
    *,
    timeout_s: float = 600.0,
    retries: int = 3,
    limit: int = 1 << 30,
    shape: tuple[int, int] | None = None,
    sidecar: Sidecar | None = None,
) -> np.ndarray:
    """The features of captions, from a server with a text encoder. Equal captions are asked for once, one a request.

    Args:
      url, token: the server's.
      captions: N of them, at least one.
      timeout_s: most seconds for one request.
      retries: attempts after the first, for faults that may pass.
      limit: most bytes of one answer; what is larger is not read to its end.
      shape: (S, C) that they must have; None: whatever the first has.
      sidecar: the server as launched, which knows its url and token better and is relaunched when it has died.

    Returns:
      (N, S, C), float32 or bfloat16, as the server computes them.

    Raises:
      ConfigurationFault: one line, for what the user must mend: no text encoder there, a refused token or caption.
      TextUnavailable: one line, no features after all attempts.
      ValueError: no captions.
    """
    if not captions:
        raise ValueError("captions: empty; give at least one")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigurationFault(f"reward.url: {url!r}; http://HOST:PORT is needed")
    out: np.ndarray | None = None
    # A proxy from the environment is for the network, not for this machine.
    local = parts.hostname in ("127.0.0.1", "localhost", "::1")
    with httpx.Client(trust_env=not local) as http:
        for caption in dict.fromkeys(captions):
            one_SC = _patiently(http, url, token, caption, timeout_s, retries, limit, sidecar)
            if (shape or one_SC.shape) != one_SC.shape or (out is not None and out.dtype != one_SC.dtype):
                was = f"{shape}" if out is None else f"{shape} {out.dtype}"
                raise TextUnavailable(
                    f"text: {url} gave {one_SC.shape} {one_SC.dtype}, not {was}: it was restarted with other settings"
                )
            if out is None:
                shape = one_SC.shape
                out = np.empty((len(captions), *shape), one_SC.dtype)
            out[[i for i, other in enumerate(captions) if other == caption]] = one_SC
    assert out is not None
    return out


def _patiently(
    http: httpx.Client,
    url: str,
    token: str,
    caption: str,
    timeout_s: float,
    retries: int,
    limit: int,
    sidecar: Sidecar | None,
) -> np.ndarray:
    reason = ""
    for attempt in range(retries + 1):
        generation = 0
        if sidecar is not None:
            url, token, generation = sidecar.url, sidecar.token, sidecar.generation
        try:
            return _once(http, url, token, caption, timeout_s, limit)
        except _Retryable as error:
            reason = one_line(error)
        # A process that has just dropped our connection may take a moment to be seen as dead.
        if sidecar is not None and not sidecar.alive(wait_s=0.3):
            told = sidecar.relaunch(generation)
            reason += f"; {told}" if told else ""
        log.warning("text, attempt %d of %d: %s", attempt + 1, retries + 1, reason)
        if attempt < retries:
            time.sleep(min(0.2 * 2**attempt, 5.0))
    raise TextUnavailable(f"text: {url} gave no features in {retries + 1} attempts: {reason}")


def _once(http: httpx.Client, url: str, token: str, caption: str, timeout_s: float, limit: int) -> np.ndarray:
    """One request, one caption: (S, C)."""
    headers: dict[bytes, bytes] = {b"Authorization": f"Bearer {token}".encode()} if token else {}
    try:
        answer = exchange(
            http, url.rstrip("/") + protocol.TEXT, timeout_s, limit, json={"captions": [caption]}, headers=headers
        )
    except httpx.TimeoutException as error:
        raise _Retryable(f"no answer within {timeout_s:g} s ({type(error).__name__})") from None
    except (httpx.HTTPError, OSError) as error:
        raise _Retryable(f"{type(error).__name__}: {error}") from None
    if answer.status_code in (401, 403):
        raise ConfigurationFault(f"reward.token: {url} refuses it ({answer.status_code}); it must be the server's own")
    if answer.status_code == 404:
        raise ConfigurationFault(f"text_encoder.where: {url} has no text encoder; start it with --text-encoder FOLDER")
    if answer.status_code == 429 or answer.status_code >= 500:
        raise _Retryable(f"server error: {answer.status_code} {one_line(answer.text, 200)}")
    if answer.status_code != 200:
        raise ConfigurationFault(
            f"text: {url} refuses a caption of {len(caption)} characters: {answer.status_code} "
            f"{one_line(answer.text, 200)}"
        )
    features = _parse(answer.content, answer.headers.get(protocol.DTYPE_HEADER, ""))
    if not np.isfinite(features.astype(np.float32)).all():
        raise TextUnavailable(
            f"text: {url} gave features that are not finite; its weights are damaged, or of another dtype"
        )
    return features


def _parse(content: bytes, dtype: str) -> np.ndarray:
    """np.save's bytes of one caption's features -> (S, C), a view. What the header claims is checked before use."""
    stream = io.BytesIO(content[: 1 << 17])
    try:
        if (version := np.lib.format.read_magic(stream)) != (1, 0):
            raise ValueError(f"format version {version}")
        shape, fortran, kind = np.lib.format.read_array_header_1_0(stream)
    except (ValueError, EOFError, OverflowError, MemoryError, RecursionError, TypeError) as error:
        raise _Retryable(f"garbage instead of features: {error}") from None
    if dtype not in _ITEM_BYTES or kind != {"bfloat16": "uint16"}.get(dtype, dtype) or fortran:
        raise _Retryable(f"features of {shape} {kind} said to be {dtype!r}")
    if len(shape) != 3 or shape[0] != 1 or min(shape) < 1:
        raise _Retryable(f"features of {shape} {kind} for one caption")
    if (have := len(content) - stream.tell()) != (need := math.prod(shape) * kind.itemsize):
        raise _Retryable(f"{have} bytes of features where {shape} {kind} needs {need}")
    numbers = np.frombuffer(content, ml_dtypes.bfloat16 if dtype == "bfloat16" else kind, offset=stream.tell())
    return numbers.reshape(shape[1:])


class SidecarText:
    """Captions -> features by the sidecar of a run: what `TextEncoder` is on the devices.

    Args:
      length, dim: S and C that the network is made for.
      timeout_s: most seconds for one caption.

    `connect` comes before `embed`.
    """

    def __init__(self, *, length: int, dim: int, timeout_s: float = 600.0):
        self.length, self.dim, self.timeout_s = length, dim, timeout_s
        self._client: RewardClient | None = None
        self._limit = 0

    def connect(self, client: RewardClient) -> None:
        """Takes the server that `client` asks for rewards.

        Raises:
          ConfigurationFault: it has no text encoder, or one with another length, width or dtype.
        """
        has = client.health().get("text_encoder")
        if not isinstance(has, dict):
            raise ConfigurationFault(
                f"text_encoder.where='sidecar': {client.url} has no text encoder; start it with --text-encoder FOLDER"
            )
        for field, wanted in (("length", self.length), ("dim", self.dim)):
            if has.get(field) != wanted:
                raise ConfigurationFault(
                    f"text.{field}={wanted}: the text encoder of {client.url} has {has.get(field)}"
                )
        if (dtype := str(has.get("dtype"))) not in _ITEM_BYTES:
            raise ConfigurationFault(
                f"text_encoder.where='sidecar': the text encoder of {client.url} computes in {dtype}; "
                f"one of {', '.join(_ITEM_BYTES)} is needed"
            )
        self._limit = self.length * self.dim * _ITEM_BYTES[dtype] + _HEADER_BYTES
        self._client = client

    def embed(self, captions: Sequence[str]) -> np.ndarray:
        """(N, S, C), float32 or bfloat16. Raises as `embed_captions`."""
        client = self._client
        if client is None:
            raise ValueError("the sidecar's text encoder is asked before `connect`")
        return embed_captions(
            client.url,
            client.token,
            captions,
            timeout_s=self.timeout_s,
            limit=self._limit,
            shape=(self.length, self.dim),
            sidecar=client.sidecar,
        )
