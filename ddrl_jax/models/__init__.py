"""Networks (Flax NNX) and what makes denoisers and latents of them. Names resolve on first use (PEP 562)."""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "CosmosDiT": "cosmos_dit",
    "CosmosDiTConfig": "cosmos_dit",
    "cosmos_2b": "cosmos_dit",
    "cosmos_14b": "cosmos_dit",
    "CosmosDenoiser": "denoiser",
    "cosmos_denoiser": "denoiser",
    "QwenText": "qwen_text",
    "QwenTextConfig": "qwen_text",
    "TextEncoder": "text_encoder",
    "Unshuffle": "unshuffle",
    "WanCodec": "wan_codec",
    "WanVAE": "wan_vae",
    "WanVAEConfig": "wan_vae",
    "WordTable": "word_table",
    "embed_text": "qwen_text",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
