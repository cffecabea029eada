"""Caption features for the trainer: a Qwen2.5-VL text tower in torch, and the one thread that runs it.

What `ddrl_jax.models.text_encoder` does, for a trainer whose devices have no room for the tower. The chat markup, the
pad id and the pooling are said again here, since the two sides share no code; a test compares them. The tower itself is
transformers'. Knows nothing of HTTP.

Dims: S token, D width, L layer, C channel of an embedding.
"""

from __future__ import annotations

import io
import json
import queue
import re
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from .convert import weight_files
from .worker import QueueFullError

_SYSTEM = "You are a helpful assistant who will provide prompts to an image generator."
_PREFIXES = ("", "model.", "model.language_model.")
_NO_PARAMETER = re.compile(r"^(model\.)?visual\.|^lm_head\.|\.rotary_emb\.inv_freq$")
_POOL_EVERY = re.compile(r"pool_every_(n|[1-9]\d*)_layers_and_concat")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
          "num_key_value_heads")  # fmt: skip


def group_size(strategy: str, layers: int) -> int:
    """How many layers are averaged into one part of an embedding. Raises ValueError for an unknown strategy."""
    if strategy == "full_concat":
        return 1
    if strategy == "mean_pooling":
        return layers
    match = _POOL_EVERY.fullmatch(strategy)
    if match is None:
        raise ValueError(
            f"text-strategy: {strategy!r}; full_concat, mean_pooling or pool_every_N_layers_and_concat is needed"
        )
    return 5 if match[1] == "n" else int(match[1])


def load_tokenizer(folder: Path) -> tuple[Any, int]:
    """A folder's tokenizer.json and its pad id, from tokenizer_config.json or config.json. Raises ValueError."""
    try:
        import tokenizers
    except ImportError:
        raise ValueError(
            "text-encoder: this environment lacks tokenizers; pip install tokenizers transformers"
        ) from None
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ValueError(f"text-encoder: {folder} has no tokenizer.json")
    try:
        tokens = tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # the package raises bare Exceptions
        raise ValueError(f"text-encoder: {file} is not a tokenizer: {error}") from error
    tokens.no_padding()
    tokens.no_truncation()
    for token in ("<|im_start|>", "<|im_end|>"):
        if tokens.token_to_id(token) is None:
            raise ValueError(f"text-encoder: {file} has no token {token}; it is not the tokenizer of a Qwen chat model")
    pad = _json_object(folder / "tokenizer_config.json").get("pad_token")
    pad = pad.get("content") if isinstance(pad, dict) else pad
    pad_id = tokens.token_to_id(pad) if isinstance(pad, str) else None
    if pad_id is None:
        config = _json_object(folder / "config.json")
        text = config.get("text_config")
        pad_id = (text if isinstance(text, dict) else {}).get("pad_token_id", config.get("pad_token_id"))
    if not isinstance(pad_id, int):
        raise ValueError(f"text-encoder: {folder} names no pad token in tokenizer_config.json or config.json")
    return tokens, pad_id


def tokenize(tokens: Any, pad_id: int, caption: str, length: int) -> list[int]:
    """A chat of the system message and the caption, filled up on the right or cut to `length` ids."""
    chat = f"<|im_start|>system\n{_SYSTEM}<|im_end|>\n<|im_start|>user\n{caption}<|im_end|>\n"
    ids = tokens.encode(chat, add_special_tokens=False).ids[:length]
    return ids + [pad_id] * (length - len(ids))


def _json_object(file: Path) -> dict[str, Any]:
    """A JSON file's object; {} where there is no file. Raises ValueError for anything else."""
    if not file.is_file():
        return {}
    try:
        given = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"text-encoder: {file} is not a JSON object: {error}") from error
    if not isinstance(given, dict):
        raise ValueError(f"text-encoder: {file} is not a JSON object: it is a {type(given).__name__}")
    return given


def load_tower(folder: Path, dtype: torch.dtype, device: str) -> Any:
    """transformers' text tower with the folder's weights, in any of their three namings, moved tensor by tensor.

    Raises ValueError, in one line: no transformers, no such folder, another network, names or shapes that do not fit.
    """
    try:
        from transformers import Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel
    except ImportError:
        raise ValueError(
            "text-encoder: this environment lacks transformers; pip install 'transformers>=5' tokenizers"
        ) from None
    if not folder.is_dir():
        raise ValueError(f"text-encoder: there is no folder {folder}")
    config = _json_object(folder / "config.json")
    given = config.get("text_config", config)
    given = given if isinstance(given, dict) else {}
    rope = given.get("rope_parameters") or given.get("rope_scaling")
    rope = rope if isinstance(rope, dict) else {}
    for field, value, allowed in (
        ("model_type", given.get("model_type", config.get("model_type")), ("qwen2_5_vl", "qwen2_5_vl_text")),
        ("hidden_act", given.get("hidden_act", "silu"), ("silu",)),
        ("use_sliding_window", given.get("use_sliding_window", False), (False,)),
        ("rope_type", rope.get("rope_type", rope.get("type", "default")), ("default", "mrope")),
    ):
        if value not in allowed:
            raise ValueError(f"text-encoder: {folder}/config.json: {field} is {value!r}; this tower has {allowed[0]!r}")
    sizes: dict[str, Any] = {name: given.get(name) for name in _SIZES}
    theta: Any = given.get("rope_theta", rope.get("rope_theta"))
    for name, value in (*sizes.items(), ("rope_theta", theta)):
        if not isinstance(value, int | float):
            raise ValueError(f"text-encoder: {folder}/config.json: {name} is {value!r}; a number is needed")
    try:
        # On text its three rotary axes count alike, so one of them may have all frequencies. The eps is what the
        # weights were trained with, also where a config.json says 1e-5.
        half = sizes["hidden_size"] // sizes["num_attention_heads"] // 2
        settings = Qwen2_5_VLTextConfig(
            **sizes,
            rms_norm_eps=1e-6,
            use_sliding_window=False,
            rope_parameters={"rope_type": "default", "rope_theta": float(theta), "mrope_section": [half, 0, 0]},
        )
        with torch.device("meta"):
            tower: Any = Qwen2_5_VLTextModel(settings)
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ValueError(f"text-encoder: {folder}/config.json: {error}") from error
    # Its table of angles is no parameter, and stays float32.
    tower.rotary_emb = type(tower.rotary_emb)(settings).to(device)

    found: dict[str, torch.Tensor] = {}
    try:
        files = weight_files(folder)
    except ValueError as error:
        raise ValueError(f"text-encoder: {error}") from error
    for file in files:
        try:
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (no dict)
                    if not _NO_PARAMETER.search(name):
                        found[name] = tensors.get_tensor(name).to(device, dtype)
        except SafetensorError as error:
            raise ValueError(f"text-encoder: {file} is not a whole safetensors file: {error}") from error
    prefix = next((p for p in reversed(_PREFIXES) if p + "embed_tokens.weight" in found), "")
    own = tower.state_dict()
    wanted = {prefix + name: tuple(value.shape) for name, value in own.items()}
    parts = (
        ("missing", sorted(wanted.keys() - found.keys())),
        ("unexpected", sorted(found.keys() - wanted.keys())),
        ("misshapen", sorted(n for n in wanted.keys() & found.keys() if wanted[n] != tuple(found[n].shape))),
    )
    if any(names for _, names in parts):
        lists = "; ".join(f"{len(names)} {word}: {', '.join(names)}" for word, names in parts if names)
        raise ValueError(f"text-encoder: {folder} does not fit a Qwen2.5-VL text tower: {lists}")
    tower.load_state_dict({name: found[prefix + name] for name in own}, assign=True)
    return tower.eval().requires_grad_(False)


class TextEncoder:
    """Captions -> features, one caption at a time, so that one does not depend on another.

    Args:
      folder: of the tower, with its tokenizer.
      tokenizer: folder of the tokenizer where that is another; "": the tower's.
      length: S, tokens a caption, filled up or cut.
      strategy: "full_concat", "mean_pooling" or "pool_every_N_layers_and_concat".
      dtype: "bfloat16" or "float32", of the tower and of the features.
      device: torch's name of it.

    Raises:
      ValueError: in one line, whatever is wrong with them.
    """

    def __init__(
        self,
        folder: str,
        *,
        tokenizer: str = "",
        length: int = 512,
        strategy: str = "full_concat",
        dtype: str = "bfloat16",
        device: str = "cpu",
    ):
        if length < 1:
            raise ValueError(f"text-length: {length}; must be at least 1")
        if dtype not in _DTYPES:
            raise ValueError(f"text-dtype: {dtype!r}; must be one of {', '.join(_DTYPES)}")
        group_size(strategy, 1)
        self._tokens, self._pad_id = load_tokenizer(Path(tokenizer or folder))
        self._tower = load_tower(Path(folder), _DTYPES[dtype], device)
        self.length, self.strategy, self.dtype, self._device = length, strategy, dtype, device
        config = self._tower.config
        largest = max([self._pad_id, *self._tokens.get_vocab(with_added_tokens=True).values()])
        if largest >= config.vocab_size:
            raise ValueError(
                f"text-encoder: the tokenizer's largest id is {largest}; {folder} has {config.vocab_size} tokens"
            )
        self._size = group_size(strategy, config.num_hidden_layers)
        self.dim = config.hidden_size * -(-config.num_hidden_layers // self._size)

    def embed(self, captions: Sequence[str]) -> np.ndarray:
        """(N, S, C): float32, or the bits of bfloat16 as uint16."""
        out = torch.empty((len(captions), self.length, self.dim), dtype=_DTYPES[self.dtype])
        for row, caption in zip(out, captions, strict=True):
            row.copy_(self._one(caption))
        return out.numpy() if self.dtype == "float32" else out.view(torch.int16).numpy().view(np.uint16)

    @torch.inference_mode()
    def _one(self, caption: str) -> torch.Tensor:
        ids = torch.tensor([tokenize(self._tokens, self._pad_id, caption, self.length)], device=self._device)
        states = self._tower(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states[1:]
        parts = []
        for start in range(0, len(states), self._size):
            group = [_normalised(state[0]) for state in states[start : start + self._size]]
            parts.append(torch.stack(group).mean(0).to(_DTYPES[self.dtype]))
        return torch.cat(parts, dim=-1)


def _normalised(h_SD: torch.Tensor) -> torch.Tensor:
    """(h - mean)/(std + 1e-8) over the channels, float32, the unbiased std."""
    h = h_SD.float()
    return (h - h.mean(-1, keepdim=True)) / (h.std(-1, keepdim=True, correction=1) + 1e-8)


class TextWorker:
    """One thread that embeds what is asked for, in order. `add` may be called from any thread.

    Args:
      encoder: a `TextEncoder`.
      most: requests that may wait.
    """

    def __init__(self, encoder: TextEncoder, most: int):
        self.encoder, self._most = encoder, most
        self._waiting: queue.Queue[tuple[list[str], Future[bytes]]] = queue.Queue()
        self._pending = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="text", daemon=True).start()

    @property
    def account(self) -> dict[str, Any]:
        """What /health says of it."""
        e = self.encoder
        return {"length": e.length, "dim": e.dim, "strategy": e.strategy, "dtype": e.dtype, "pending": self._pending}

    def add(self, captions: list[str]) -> Future[bytes]:
        """The features to come, as np.save's bytes. Raises QueueFullError."""
        with self._lock:
            if self._pending >= self._most:
                raise QueueFullError(f"text: {self._pending} requests wait already; try again later")
            self._pending += 1
        future: Future[bytes] = Future()
        self._waiting.put((captions, future))
        return future

    def drain(self, seconds: float) -> None:
        """Waits until nothing is pending, or the time is up."""
        end = time.monotonic() + seconds
        while self._pending and time.monotonic() < end:
            time.sleep(0.05)

    def _run(self) -> None:
        while True:
            captions, future = self._waiting.get()
            if future.set_running_or_notify_cancel():
                try:
                    buffer = io.BytesIO()
                    np.save(buffer, self.encoder.embed(captions), allow_pickle=False)
                    future.set_result(buffer.getvalue())
                except BaseException as error:  # the one thread never dies, whatever the tower raises
                    future.set_exception(error)
            with self._lock:
                self._pending -= 1
