"""The wire format between trainer and sidecar: that of cosmos-rl's reward service. Needs pydantic and numpy only.

    POST /api/reward/enqueue   JSON line + b"\\n" + np.save bytes         -> {"uuid", "replica_id"?}
    POST /api/reward/pull      form: uuid, type                         -> 200 scores | 400 pending | 422 failed | 404
    POST /api/reward/ping      form: info_data                          -> 200
    POST /api/text/embed       JSON {"captions": [...]}                -> np.save bytes, (N, S, C) (ours only)
    GET  /health                                                        -> 200 (ours only)

Arrays: "latent" (B,C,T,h,w), normalised; "video" (B,C,T,H,W) in [0,255]; "image" (B,H,W,C) in [0,255].
A uint8 latent array holds the bytes of bfloat16, its last axis doubled. Text features are float32, or uint16 that holds
the bits of bfloat16; the headers X-DDRL-Dtype and X-DDRL-Shape say the same.
"""

from __future__ import annotations

import io
import json
import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

ENQUEUE = "/api/reward/enqueue"
PULL = "/api/reward/pull"
PING = "/api/reward/ping"
HEALTH = "/health"
TEXT = "/api/text/embed"
DTYPE_HEADER = "X-DDRL-Dtype"  # float32 or bfloat16
SHAPE_HEADER = "X-DDRL-Shape"  # N,S,C

REPLICA_HEADER = "X-Lepton-Replica-Target"  # cosmos-rl's clients pin a pull to the replica of its enqueue

MediaType = Literal["latent", "video", "image"]

_AXES = {"latent": "B,C,T,h,w", "video": "B,C,T,H,W", "image": "B,H,W,C"}
_DTYPES = {"float16", "float32", "float64", "uint8"}


class ProtocolError(ValueError):
    """A request or an answer that breaks the protocol. `status` is the HTTP status it deserves."""

    def __init__(self, message: str, status: int = 422):
        super().__init__(one_line(message))
        self.status = status


@dataclass(frozen=True)
class Limits:
    """What a server accepts. Bytes and elements bound its memory, before anything is allocated."""

    body_bytes: int = 1 << 30
    json_bytes: int = 4 << 20
    batch: int = 4096
    elements: int = 1 << 29  # of the array as sent
    queue: int = 64  # requests waiting to be scored
    queue_bytes: int = 4 << 30  # of the arrays of those requests
    results: int = 512  # finished requests whose scores are kept for the client
    result_seconds: float = 3600.0
    captions: int = 8  # of one text request: at Cosmos' sizes the features of each are 103 MB
    caption_chars: int = 1 << 16


class EnqueueHeader(BaseModel):
    """The JSON line of a request. Fields we do not know are ignored, as cosmos-rl does."""

    model_config = ConfigDict(extra="ignore")

    prompts: list[str]
    reward_fn: dict[str, float]
    video_infos: list[dict[str, Any]] | None = None
    media_type: MediaType = "latent"


class EnqueueAnswer(BaseModel):
    uuid: str = Field(min_length=1)
    replica_id: str | None = None


class PullAnswer(BaseModel):
    """Scores of one scorer: name -> one value a sample. Durations are seconds; cosmos-rl sends them as text."""

    scores: dict[str, Any]
    input_info: dict[str, Any] = {}
    duration: float | str = 0.0
    decoded_duration: float | str = 0.0
    type: str | None = None


def encode_request(header: EnqueueHeader, array: np.ndarray) -> bytes:
    """The body of an enqueue request."""
    buffer = io.BytesIO()
    buffer.write(json.dumps(header.model_dump(exclude_none=True)).encode())
    buffer.write(b"\n")
    np.save(buffer, np.ascontiguousarray(array), allow_pickle=False)
    return buffer.getvalue()


def decode_request(body: bytes | bytearray, limits: Limits | None = None) -> tuple[EnqueueHeader, np.ndarray]:
    """The inverse of `encode_request`: header, and the array with bfloat16 already widened to float32.

    Raises ProtocolError, in one line, for anything that is not a request within the limits. The array's header
    is checked before its bytes are touched; pickles are never read.
    """
    limits = limits or Limits()
    end = body.find(b"\n", 0, limits.json_bytes + 1)
    if end < 0:
        raise ProtocolError(
            "body: expected a JSON line, a newline and the bytes of np.save; no newline found in the first "
            f"{min(len(body), limits.json_bytes)} bytes"
        )
    header = _parse_header(body[:end])
    array = _parse_array(body, end + 1, header.media_type, limits)
    if len(header.prompts) != array.shape[0]:
        raise ProtocolError(
            f"prompts: {len(header.prompts)} of them for a batch of {array.shape[0]}; give one a sample"
        )
    if header.video_infos is not None and len(header.video_infos) != array.shape[0]:
        raise ProtocolError(
            f"video_infos: {len(header.video_infos)} of them for a batch of {array.shape[0]}; "
            "give one a sample or leave the field out"
        )
    return header, array


def _parse_header(line: bytes | bytearray) -> EnqueueHeader:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"first line: not JSON ({error})") from None
    if not isinstance(fields, dict):
        raise ProtocolError(f"first line: a JSON object is needed, not {type(fields).__name__}")
    try:
        header = EnqueueHeader.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ProtocolError(f"{where}: {first['msg']}") from None
    if not header.prompts:
        raise ProtocolError("prompts: empty; give one a sample")
    # A weight of zero or below switches a scorer off (cosmos-rl).
    wanted = {name: w for name, w in header.reward_fn.items() if w > 0 and math.isfinite(w)}
    if not wanted:
        raise ProtocolError(f"reward_fn: {header.reward_fn!r:.200} asks for no scorer; name one with a weight above 0")
    header.reward_fn = wanted
    return header


def _parse_array(body: bytes | bytearray, start: int, media_type: str, limits: Limits) -> np.ndarray:
    stream = io.BytesIO(body[start : start + (1 << 17)])  # room for the array's header, not a copy of it all
    try:
        version = np.lib.format.read_magic(stream)
        if version not in {(1, 0), (2, 0)}:
            raise ValueError(f"format version {version}")
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(stream)
    except (ValueError, EOFError, OverflowError, MemoryError, RecursionError, TypeError) as error:
        raise ProtocolError(f"array: not the bytes of np.save ({error})") from None
    if dtype.hasobject or dtype.name not in _DTYPES:
        raise ProtocolError(f"array: dtype {dtype} is not one of {', '.join(sorted(_DTYPES))}")
    axes = _AXES[media_type]
    if len(shape) != axes.count(",") + 1:
        raise ProtocolError(f"array: shape {shape} for media_type {media_type!r}; {axes} is needed")
    if any(type(n) is not int or n < 1 for n in shape):
        raise ProtocolError(f"array: shape {shape} has an empty axis, or one that is no whole number")
    if shape[0] > limits.batch:
        raise ProtocolError(f"array: batch of {shape[0]}; at most {limits.batch}", 413)
    elements = math.prod(shape)
    if elements > limits.elements:
        raise ProtocolError(f"array: shape {shape} has {elements} elements; at most {limits.elements}", 413)
    data = start + stream.tell()
    have, need = len(body) - data, elements * dtype.itemsize
    if have != need:
        raise ProtocolError(f"array: {have} bytes of data where shape {shape} and dtype {dtype} need {need}")
    array = np.frombuffer(body, dtype, elements, offset=data)
    array = array.reshape(shape, order="F" if fortran else "C")
    if media_type == "latent" and dtype == np.uint8:
        if shape[-1] % 2:
            raise ProtocolError(f"array: uint8 latents hold bfloat16, two bytes each; the last axis of {shape} is odd")
        array = from_bfloat16_bytes(array)
    if array.dtype != np.uint8 and not np.isfinite(array).all():
        raise ProtocolError("array: holds values that are not finite")
    if media_type != "latent" and array.dtype != np.uint8 and not _in_0_255(array):
        raise ProtocolError(
            f"array: {media_type} values from {array.min():.4g} to {array.max():.4g}; [0, 255] is needed"
        )
    return array


def decode_captions(body: bytes | bytearray, limits: Limits) -> list[str]:
    """The captions of a text request. Raises ProtocolError, in one line, for anything else."""
    try:
        captions = json.loads(body)["captions"]
    except (ValueError, RecursionError, KeyError, TypeError):
        raise ProtocolError('body: a JSON object {"captions": [...]} is needed') from None
    if not isinstance(captions, list) or not captions or not all(isinstance(c, str) for c in captions):
        raise ProtocolError("captions: a list of at least one text is needed")
    if len(captions) > limits.captions:
        raise ProtocolError(f"captions: {len(captions)} of them; at most {limits.captions} a request", 413)
    longest = max(map(len, captions))
    if longest > limits.caption_chars:
        raise ProtocolError(f"captions: one has {longest} characters; at most {limits.caption_chars}", 413)
    try:
        "".join(captions).encode()
    except UnicodeEncodeError:
        raise ProtocolError("captions: one holds half a surrogate pair, which is no character") from None
    return captions


def _in_0_255(array: np.ndarray) -> bool:
    return bool(array.min() >= 0 and array.max() <= 255)


def to_bfloat16_bytes(array: np.ndarray) -> np.ndarray:
    """float (..., n) -> uint8 (..., 2n): bfloat16, rounded to nearest even, little endian. Finite values only."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    rounded = bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))
    return (rounded >> 16).astype("<u2").view(np.uint8)


def from_bfloat16_bytes(array: np.ndarray) -> np.ndarray:
    """uint8 (..., 2n) -> float32 (..., n), exactly."""
    bits = np.ascontiguousarray(array).view("<u2").astype(np.uint32) << 16
    return bits.view(np.float32)


def one_line(text: object, limit: int = 300) -> str:
    """Text fit for a log line or a status line: control characters and newlines become spaces."""
    line = " ".join(str(text).split())
    line = "".join(c if c.isprintable() else "?" for c in line)
    return line if len(line) <= limit else line[: limit - 3] + "..."
