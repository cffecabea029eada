"""Caption features from the sidecar's text tower, for a trainer whose devices have no room for one.

Unlike a reward, which may be missing, a step cannot do without them: what cannot be had is raised.

Dims: N caption, S token, C channel of an embedding.
"""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httpx
import ml_dtypes
import numpy as np

from ddrl_jax.sidecar import protocol
from ddrl_jax.sidecar.protocol import one_line

from .environment import ConfigurationFault

if TYPE_CHECKING:
    from .client import RewardClient
    from .sidecar import Sidecar

log = logging.getLogger("ddrl_jax.rewards")


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
    sidecar: Sidecar | None = None,
) -> np.ndarray:
    """The features of captions, from a server with a text encoder. Equal captions are asked for once, one a request.

    Args:
      url, token: the server's.
      captions: N of them, at least one.
      timeout_s: most seconds for one request.
      retries: attempts after the first, for faults that may pass.
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
            one_SC = _patiently(http, url, token, caption, timeout_s, retries, sidecar)
            if out is None:
                out = np.empty((len(captions), *one_SC.shape), one_SC.dtype)
            if out.shape[1:] != one_SC.shape or out.dtype != one_SC.dtype:
                raise TextUnavailable(
                    f"text: {url} gave {one_SC.shape} {one_SC.dtype} after {out.shape[1:]} {out.dtype}: it was "
                    "restarted with other settings"
                )
            out[[i for i, other in enumerate(captions) if other == caption]] = one_SC
    assert out is not None
    return out


def _patiently(
    http: httpx.Client, url: str, token: str, caption: str, timeout_s: float, retries: int, sidecar: Sidecar | None
) -> np.ndarray:
    reason = ""
    for attempt in range(retries + 1):
        generation = 0
        if sidecar is not None:
            url, token, generation = sidecar.url, sidecar.token, sidecar.generation
        try:
            return _once(http, url, token, caption, timeout_s)
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


def _once(http: httpx.Client, url: str, token: str, caption: str, timeout_s: float) -> np.ndarray:
    """One request, one caption: (S, C)."""
    headers: dict[bytes, bytes] = {b"Authorization": f"Bearer {token}".encode()} if token else {}
    try:
        answer = http.post(
            url.rstrip("/") + protocol.TEXT, json={"captions": [caption]}, headers=headers, timeout=timeout_s
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
    try:
        features = np.load(io.BytesIO(answer.content), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise _Retryable(f"garbage instead of features: {error}") from None
    dtype = answer.headers.get(protocol.DTYPE_HEADER, "")
    if not isinstance(features, np.ndarray):
        raise _Retryable("an archive instead of features")
    if features.ndim != 3 or len(features) != 1 or features.dtype != {"bfloat16": "uint16"}.get(dtype, dtype):
        raise _Retryable(f"features of {features.shape} {features.dtype} said to be {dtype!r} for one caption")
    features = features.view(ml_dtypes.bfloat16) if dtype == "bfloat16" else features
    if not np.isfinite(features.astype(np.float32)).all():
        raise TextUnavailable(
            f"text: {url} gave features that are not finite; its weights are damaged, or of another dtype"
        )
    return features[0]


class SidecarText:
    """Captions -> features by the sidecar of a run: what `TextEncoder` is on the devices.

    Args:
      length, dim: S and C that the network is made for.

    `connect` comes before `embed`.
    """

    def __init__(self, *, length: int, dim: int):
        self.length, self.dim = length, dim
        self._client: RewardClient | None = None

    def connect(self, client: RewardClient) -> None:
        """Takes the server that `client` asks for rewards.

        Raises:
          ConfigurationFault: it has no text encoder, or one with another length or width.
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
        self._client = client

    def embed(self, captions: Sequence[str]) -> np.ndarray:
        """(N, S, C), float32 or bfloat16. Raises as `embed_captions`."""
        client = self._client
        if client is None:
            raise ValueError("the sidecar's text encoder is asked before `connect`")
        return embed_captions(client.url, client._token, captions, sidecar=client._sidecar)
