"""The wire format between trainer and sidecar: that of cosmos-rl's reward service. Needs pydantic and numpy only.

    POST /api/reward/enqueue     JSON line + b"\\n" + array bytes        -> {"uuid", "replica_id"?}
    POST /api/reward/pull        form: uuid, type                       -> 200 scores | 400 pending | 422 failed | 404
    POST /api/reward/push        form: uuid, scores (JSON), type        -> 200; scores computed elsewhere
    POST /api/reward/ping        form: info_data                        -> 200
    POST /api/reward/latent_attr form: fields (JSON)                    -> 200
    POST /api/text/embed         JSON {"captions": [...]}              -> np.save bytes, (N, S, C) (ours only)
    GET  /health                                                        -> 200 (ours only)

Arrays: "latent" (B,C,T,h,w), normalised; "video" (B,C,T,H,W) in [0,255]; "image" (B,H,W,C) in [0,255]. Their bytes are
those of np.save or of torch.save (one tensor), or none where the JSON line names a segment of shared memory (ours only,
`shared.py`). A uint8 latent array holds the bytes of bfloat16, its last axis doubled. Text features are float32, or
uint16 that holds the bits of bfloat16; the headers X-DDRL-Dtype and X-DDRL-Shape say the same.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from . import shared

ENQUEUE = "/api/reward/enqueue"
PULL = "/api/reward/pull"
PUSH = "/api/reward/push"
PING = "/api/reward/ping"
LATENT_ATTR = "/api/reward/latent_attr"
HEALTH = "/health"
TEXT = "/api/text/embed"
DTYPE_HEADER = "X-DDRL-Dtype"  # float32 or bfloat16
SHAPE_HEADER = "X-DDRL-Shape"  # N,S,C

REPLICA_HEADER = "X-Lepton-Replica-Target"  # cosmos-rl's clients pin a pull to the replica of its enqueue

_Model = TypeVar("_Model", bound=BaseModel)
_NAME = 256  # characters of a scorer's name

MediaType = Literal["latent", "video", "image"]

_AXES = {"latent": "B,C,T,h,w", "video": "B,C,T,H,W", "image": "B,H,W,C"}
_DTYPES = {"float16", "float32", "float64", "uint8"}
_TORCH = b"PK\x03\x04"  # what torch.save begins with: a zip archive

# cosmos-rl's scorers: ours by its side, and its keys of the scores that ours gives, with the factor between them.
COSMOS: dict[str, tuple[str, dict[str, tuple[str, float]]]] = {
    "cosmos_reason1": (
        "cosmos_reason1",
        {"no_score": ("overall", 1.0), "yes_logit": ("yes_logit", 1.0), "no_logit": ("no_logit", 1.0)},
    ),
    "dance_grpo": (
        "video_align",
        {
            "vq_reward": ("vq", 1.0),
            "mq_reward": ("mq", 1.0),
            "ta_reward": ("ta", 1.0),
            "overall_reward": ("overall", 1.0),
        },
    ),
    "hpsv2": ("hps_v2", {"hpsv2": ("overall", 1.0)}),
    "image_reward": ("image_reward", {"image_reward": ("overall", 1.0)}),
    "ocr": ("ocr", {"ocr_reward": ("text", 1.0)}),
    "pickscore": ("pick_score", {"pickscore": ("overall", 1 / 26)}),
}


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


class SharedArray(BaseModel):
    """An array in shared memory on the server's own host: `take` removes its name."""

    name: str
    dtype: Literal["float16", "float32", "float64", "uint8"]
    shape: list[int]


class EnqueueHeader(BaseModel):
    """The JSON line of a request. Fields we do not know are ignored, as cosmos-rl does."""

    model_config = ConfigDict(extra="ignore")

    prompts: list[str]
    reward_fn: dict[str, float]
    video_infos: list[dict[str, Any]] | None = None
    media_type: MediaType = "latent"
    shared: SharedArray | None = None  # None once the array is there

    @field_validator("media_type", mode="before")
    @classmethod
    def _any_case(cls, value: Any) -> Any:
        return "latent" if value is None else value.lower() if isinstance(value, str) else value

    @field_validator("video_infos")
    @classmethod
    def _frame_rates(cls, infos: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        for info in infos or ():
            if "video_fps" in info and not _is_rate(info["video_fps"]):
                raise ValueError(f"video_fps is {info['video_fps']!r:.40}; frames a second, above 0, are needed")
        return infos


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


class LatentAttributes(BaseModel):
    """What cosmos-rl lets a client say of its latents. Only `fps` changes anything here: frames a second where a
    request has none. Its decoder's window is nothing to ours, and which decoder it is, is not for a request to say."""

    model_config = ConfigDict(extra="forbid")

    fps: float | None = Field(None, gt=0, le=1000)
    chunk_duration: int | None = None
    temporal_window: int | None = None
    num_frames: int | None = None
    height: int | None = None
    width: int | None = None
    load_mean_std: Literal[False] | None = None


def encode_request(header: EnqueueHeader, array: np.ndarray | None) -> bytes:
    """The body of an enqueue request; without an array, where the header names a shared one."""
    buffer = io.BytesIO()
    buffer.write(json.dumps(header.model_dump(exclude_none=True)).encode())
    buffer.write(b"\n")
    if array is None:
        return buffer.getvalue()
    np.save(buffer, np.ascontiguousarray(array), allow_pickle=False)
    return buffer.getvalue()


def decode_request(body: bytes | bytearray, limits: Limits | None = None) -> tuple[EnqueueHeader, np.ndarray]:
    """The inverse of `encode_request`: header, and the array with bfloat16 already widened to float32.

    Raises ProtocolError, in one line, for anything that is not a request within the limits. The array's header
    is checked before its bytes are touched. Pickles are never read, but for the description of a tensor in what
    torch.save wrote (`torch_body`).
    """
    limits = limits or Limits()
    end = body.find(b"\n", 0, limits.json_bytes + 1)
    if end < 0:
        raise ProtocolError(
            "body: expected a JSON line, a newline and the bytes of np.save; no newline found in the first "
            f"{min(len(body), limits.json_bytes)} bytes"
        )
    header = _parse_header(body[:end])
    if header.shared is not None:
        array = _take_array(header.shared, header.media_type, len(body) - end - 1, limits)
        header.shared = None
    elif body.startswith(_TORCH, end + 1):
        array = _parse_tensor(body, end + 1, header.media_type, limits)
    else:
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
    header = _validated(EnqueueHeader, _json_object(line, "first line"))
    if not header.prompts:
        raise ProtocolError("prompts: empty; give one a sample")
    try:
        "".join(header.prompts).encode()
    except UnicodeEncodeError:
        raise ProtocolError("prompts: one holds half a surrogate pair, which is no character") from None
    # A weight of zero or below switches a scorer off (cosmos-rl).
    wanted = {name: w for name, w in header.reward_fn.items() if w > 0 and math.isfinite(w)}
    if not wanted:
        raise ProtocolError(f"reward_fn: {header.reward_fn!r:.200} asks for no scorer; name one with a weight above 0")
    header.reward_fn = wanted
    return header


def _json_object(text: str | bytes | bytearray, what: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"{what}: not JSON ({error})") from None
    if not isinstance(fields, dict):
        raise ProtocolError(f"{what}: a JSON object is needed, not {type(fields).__name__}")
    return fields


def _validated(model: type[_Model], fields: dict[str, Any]) -> _Model:
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ProtocolError(f"{where}: {first['msg'].removeprefix('Value error, ')}") from None


def _parse_array(body: bytes | bytearray, start: int, media_type: str, limits: Limits) -> np.ndarray:
    stream = io.BytesIO(body[start : start + (1 << 17)])  # room for the array's header, not a copy of it all
    try:
        version = np.lib.format.read_magic(stream)
        if version not in {(1, 0), (2, 0)}:
            raise ValueError(f"format version {version}")
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(stream)
    except (ValueError, EOFError, OverflowError, MemoryError, RecursionError, TypeError) as error:
        raise ProtocolError(f"array: not the bytes of np.save, nor of torch.save ({error})") from None
    if dtype.hasobject or dtype.name not in _DTYPES:
        raise ProtocolError(f"array: dtype {dtype} is not one of {', '.join(sorted(_DTYPES))}")
    elements = _checked_size(shape, media_type, limits)
    data = start + stream.tell()
    have, need = len(body) - data, elements * dtype.itemsize
    if have != need:
        raise ProtocolError(f"array: {have} bytes of data where shape {shape} and dtype {dtype} need {need}")
    array = np.frombuffer(body, dtype, elements, offset=data)
    return _checked_values(array.reshape(shape, order="F" if fortran else "C"), media_type)


def _parse_tensor(body: bytes | bytearray, start: int, media_type: str, limits: Limits) -> np.ndarray:
    from . import torch_body  # torch: the server has it, the trainer has not

    try:
        tensor = torch_body.read_tensor(memoryview(body)[start:])
    except ValueError as error:
        raise ProtocolError(f"array: {error}") from None
    _checked_size(tuple(tensor.shape), media_type, limits)
    tensor = tensor.contiguous()
    if tensor.dtype == torch_body.torch.bfloat16:
        array = from_bfloat16_bytes(tensor.view(torch_body.torch.uint8).numpy())
    elif tensor.dtype == torch_body.torch.uint8 and media_type == "latent":
        raise ProtocolError("array: latents of uint8 in torch.save; save the bfloat16 tensor itself")
    else:
        array = tensor.numpy()
    return _checked_values(array, media_type)


def _take_array(claim: SharedArray, media_type: str, rest: int, limits: Limits) -> np.ndarray:
    if rest:
        raise ProtocolError(f"shared: the array is in shared memory, and {rest} bytes follow the JSON line; give one")
    dtype, shape = np.dtype(claim.dtype), tuple(claim.shape)
    elements = _checked_size(shape, media_type, limits)
    if elements * dtype.itemsize > limits.body_bytes:
        raise ProtocolError(f"shared: larger than the limit of {limits.body_bytes} bytes", 413)
    try:
        mapping = shared.take(claim.name, elements * dtype.itemsize)
    except ValueError as error:
        raise ProtocolError(str(error)) from None
    return _checked_values(np.frombuffer(mapping, dtype).reshape(shape), media_type)


def _checked_size(shape: tuple[int, ...], media_type: str, limits: Limits) -> int:
    """Elements of an array that was announced with this shape."""
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
    return elements


def _checked_values(array: np.ndarray, media_type: str) -> np.ndarray:
    """The array, bfloat16 widened, if its values are what its media type has."""
    if media_type == "latent" and array.dtype == np.uint8:
        if array.shape[-1] % 2:
            raise ProtocolError(
                f"array: uint8 latents hold bfloat16, two bytes each; the last axis of {array.shape} is odd"
            )
        array = from_bfloat16_bytes(array)
    if array.dtype != np.uint8 and not np.isfinite(array).all():
        raise ProtocolError("array: holds values that are not finite")
    if media_type != "latent" and array.dtype != np.uint8 and not _in_0_255(array):
        raise ProtocolError(
            f"array: {media_type} values from {array.min():.4g} to {array.max():.4g}; [0, 255] is needed"
        )
    return array


def decode_push(scores: str, scorer: str | None) -> tuple[str, dict[str, Any]]:
    """Scores computed elsewhere: (scorer, an answer as `pull` gives it). Raises ProtocolError, in one line."""
    fields = _json_object(scores, "scores")
    answer = _validated(PullAnswer, fields)
    scorer = scorer or answer.type
    if not scorer or len(scorer) > _NAME:
        raise ProtocolError(f"type: {scorer!r:.80}; the scorer's name is needed, here or in the scores")
    columns = {}
    for name, values in answer.scores.items():
        if not isinstance(values, list):
            raise ProtocolError(f"scores.{name:.80}: a list, one entry a sample, is needed")
        columns[name] = [None if isinstance(v, float) and not math.isfinite(v) else v for v in values]
    # JSON knows no NaN: null is a sample that could not be scored.
    plain = json.dumps(answer.model_dump() | {"scores": columns, "type": scorer}, allow_nan=True)
    return scorer, json.loads(plain, parse_constant=lambda _: None)


def decode_latent_attributes(fields: str) -> LatentAttributes:
    """Raises ProtocolError, in one line, for what a request may not say."""
    given = _json_object(fields, "fields")
    for name in ("vae_pth", "device"):
        if name in given:
            raise ProtocolError(f"fields.{name}: not for a request to say; the server's --codec and --device name it")
    return _validated(LatentAttributes, given)


def our_scorer(name: str, served: Collection[str]) -> str:
    """Our name of a scorer that cosmos-rl's clients ask for by its own, where the server has it by ours only."""
    ours = COSMOS[name][0] if name in COSMOS else name
    return ours if name not in served and ours in served else name


def with_cosmos_keys(answer: dict[str, Any], asked: str, scorer: str) -> dict[str, Any]:
    """An answer of `scorer`, asked for as `asked`: the keys that cosmos-rl's clients read stand beside ours."""
    scores = answer.get("scores")
    if asked not in COSMOS or COSMOS[asked][0] != scorer or not isinstance(scores, dict):
        return answer
    theirs = {
        key: [v * factor if isinstance(v, int | float) else v for v in scores[f"{scorer}/{ours}"]]
        for key, (ours, factor) in COSMOS[asked][1].items()
        if f"{scorer}/{ours}" in scores
    }
    return {**answer, "scores": theirs | scores, "type": asked}


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


def _is_rate(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1000


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


def reason(error: BaseException) -> str:
    """An error's text for whoever asked; that of a ValueError is meant for people, any other needs its kind."""
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"


def one_line(text: object, limit: int = 300) -> str:
    """Text fit for a log line or a status line: control characters and newlines become spaces."""
    line = " ".join(str(text).split())
    line = "".join(c if c.isprintable() else "?" for c in line)
    return line if len(line) <= limit else line[: limit - 3] + "..."
