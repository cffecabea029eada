"""From captions to the text features a Cosmos DiT is conditioned on: chat markup, tokens, tower, embedding.

Written to `specs/cosmos.md` section 6. Tokens are made by the `tokenizers` package from a folder's tokenizer.json, so
that neither torch nor transformers is needed.

Dims: N caption, B batch, S token, C channel of an embedding.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tokenizers
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from ddrl_jax.models.qwen_text import QwenText, embed_text, embedding_width
from ddrl_jax.parallel.mesh import replicated

SYSTEM_MESSAGE = "You are a helpful assistant who will provide prompts to an image generator."


@dataclasses.dataclass(frozen=True)
class ChatTokenizer:
    """A Qwen tokenizer and the id that fills up a short caption."""

    tokens: tokenizers.Tokenizer
    pad_id: int


def load_tokenizer(folder: str | os.PathLike[str]) -> ChatTokenizer:
    """The tokenizer of a folder: tokenizer.json, and the pad token that tokenizer_config.json or config.json names.

    Raises:
      ValueError: no tokenizer.json, one that cannot be read or lacks the chat markup's tokens, or no pad token.
    """
    folder = Path(folder)
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ValueError(f"{folder} has no tokenizer.json; a folder that holds the text tower's tokenizer is needed")
    try:
        tokens = tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # the package raises bare Exceptions
        raise ValueError(f"{file} is not a tokenizer: {error}") from error
    # A tokenizer.json may hold settings of its own for both; length and pad id are ours to set.
    tokens.no_padding()
    tokens.no_truncation()
    for token in ("<|im_start|>", "<|im_end|>"):
        if tokens.token_to_id(token) is None:
            raise ValueError(f"{file} has no token {token}; it is not the tokenizer of a Qwen chat model")
    pad = _json_object(folder / "tokenizer_config.json").get("pad_token")
    pad = pad.get("content") if isinstance(pad, dict) else pad
    pad_id = tokens.token_to_id(pad) if isinstance(pad, str) else None
    if pad_id is None:
        config = _json_object(folder / "config.json")
        text = config.get("text_config")
        pad_id = (text if isinstance(text, dict) else {}).get("pad_token_id", config.get("pad_token_id"))
    if not isinstance(pad_id, int):
        raise ValueError(
            f"{folder} names no pad token: pad_token in tokenizer_config.json, or pad_token_id in config.json"
        )
    return ChatTokenizer(tokens, pad_id)


def _json_object(file: Path) -> dict[str, Any]:
    """A JSON file's object; {} where there is no file. Raises ValueError for anything else."""
    if not file.is_file():
        return {}
    try:
        given = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not a JSON object: {error}") from error
    if not isinstance(given, dict):
        raise ValueError(f"{file} is not a JSON object: it is a {type(given).__name__}")
    return given


def tokenize(tokenizer: ChatTokenizer, captions: Sequence[str], length: int) -> np.ndarray:
    """Captions as a chat's token ids.

    A conversation of the system message and the caption in Qwen's markup, without the turn of an answer; filled up on
    the right with the pad id, or cut.

    Returns:
      int32 (N, length).
    """
    out = np.full((len(captions), length), tokenizer.pad_id, np.int32)
    for row, caption in zip(out, captions, strict=True):
        chat = f"<|im_start|>system\n{SYSTEM_MESSAGE}<|im_end|>\n<|im_start|>user\n{caption}<|im_end|>\n"
        ids = tokenizer.tokens.encode(chat, add_special_tokens=False).ids[:length]
        row[: len(ids)] = ids
    return out


@functools.partial(jax.jit, static_argnums=(0, 3, 4))
def _features(
    graphdef: nnx.GraphDef, params: Any, ids_BS: jax.Array, strategy: str, sharding: NamedSharding | None
) -> jax.Array:
    features = embed_text(nnx.merge(graphdef, params)(ids_BS), strategy)
    # Whole on every device, so that every process has all of it.
    return features if sharding is None else jax.lax.with_sharding_constraint(features, sharding)


class TextEncoder:
    """The text tower with its tokenizer.

    Captions go through the tower in batches of exactly `batch`, so that an embedding does not depend on what else was
    asked for: kernels choose their summation order by shape.

    Args:
      graphdef, params: a `QwenText`, as `load_pretrained` returns it.
      tokenizer: folder with tokenizer.json.
      length: S, tokens a caption, filled up or cut.
      strategy: of `embed_text`.
      mesh: the one that the parameters are sharded over; None: they are on one device. Of a mesh over several
        processes, all call `embed` with the same captions.
      batch: B, captions at a time.

    Raises:
      ValueError: see `load_tokenizer`; an unknown strategy, length or batch under 1, a tokenizer with more tokens than
        the tower.
    """

    def __init__(
        self,
        graphdef: nnx.GraphDef,
        params: Any,
        tokenizer: str | os.PathLike[str],
        *,
        length: int = 512,
        strategy: str = "full_concat",
        mesh: Mesh | None = None,
        batch: int = 1,
    ):
        for name, value in (("length", length), ("batch", batch)):
            if value < 1:
                raise ValueError(f"{name} is {value}; must be at least 1")
        tower = nnx.merge(graphdef, params)
        if not isinstance(tower, QwenText):
            raise ValueError(f"the text encoder is a {type(tower).__name__}; a Qwen2.5-VL text tower is needed")
        self.length, self.strategy, self.batch = length, strategy, batch
        self.dim = embedding_width(tower.config, strategy)
        self.dtype = np.dtype(tower.config.dtype)
        self.tokenizer = load_tokenizer(tokenizer)
        # The tower may have more rows than the tokenizer has tokens (Qwen's table is padded), never fewer.
        largest = max([self.tokenizer.pad_id, *self.tokenizer.tokens.get_vocab(with_added_tokens=True).values()])
        if largest >= tower.config.vocab:
            raise ValueError(
                f"{tokenizer}: its largest token id is {largest}; the tower has {tower.config.vocab} tokens"
            )
        self._graphdef, self._params = graphdef, params
        self._sharding = None if mesh is None else replicated(mesh)

    def embed(self, captions: Sequence[str]) -> np.ndarray:
        """Captions -> (N, S, C) features in the tower's `dtype`, on the host; equal captions are computed once.

        At Cosmos' sizes a caption is 103 MB in bfloat16: ask for distinct ones, and for no more than are needed.
        """
        ids_NS = tokenize(self.tokenizer, captions, self.length)
        out = np.empty((len(captions), self.length, self.dim), self.dtype)
        distinct, where = np.unique(ids_NS, axis=0, return_inverse=True)
        for start in range(0, len(distinct), self.batch):
            rows = np.minimum(np.arange(start, start + self.batch), len(distinct) - 1)
            features_BSC = self._compute(distinct[rows])
            for row in range(start, min(start + self.batch, len(distinct))):
                out[where.reshape(-1) == row] = features_BSC[row - start]
        return out

    def _compute(self, ids_BS: np.ndarray) -> np.ndarray:
        """One call of the tower."""
        ids: Any = ids_BS if self._sharding is None else jax.device_put(ids_BS, self._sharding)
        return np.asarray(_features(self._graphdef, self._params, ids, self.strategy, self._sharding))
