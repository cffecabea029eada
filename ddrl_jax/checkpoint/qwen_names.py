"""The tensor names and config.json of Qwen2.5-VL text towers, as `transformers` and the hub have written them.

The same tower goes by three prefixes: none (the tower saved by itself), "model." (a whole Qwen2.5-VL of the older
form, with a flat config.json) and "model.language_model." (of the newer form, with a nested text_config). The vision
tower and the head beside it are not read. Knows the tower's sizes and no files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from typing import Any

from ddrl_jax.checkpoint.entries import Entry
from ddrl_jax.models.qwen_text import QwenText, QwenTextConfig

MODEL = QwenText
TITLE = "Qwen2.5-VL text tower"
STEM = "model"
# What `save_pretrained` writes: "official" as the hub's Qwen2.5-VL files name it, "diffusers" as transformers saves it.
LAYOUTS = {"official": "model", "diffusers": "text_model"}

# Our name of a form -> the prefix of its tensors.
_PREFIX = {"text_model": "", "model": "model.", "language_model": "model.language_model."}
_MODEL_TYPES = ("qwen2_5_vl", "qwen2_5_vl_text")
_SIZES = {
    "vocab": "vocab_size",
    "width": "hidden_size",
    "mlp": "intermediate_size",
    "depth": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
}
_TABLE = "embed_tokens.weight"
_NO_PARAMETER = re.compile(r"^(model\.)?visual\.|^lm_head\.|\.rotary_emb\.inv_freq$")
_BLOCK = (
    ("attn_norm.scale", "input_layernorm.weight"),
    ("attn.q.kernel", "self_attn.q_proj.weight"),
    ("attn.q.bias", "self_attn.q_proj.bias"),
    ("attn.k.kernel", "self_attn.k_proj.weight"),
    ("attn.k.bias", "self_attn.k_proj.bias"),
    ("attn.v.kernel", "self_attn.v_proj.weight"),
    ("attn.v.bias", "self_attn.v_proj.bias"),
    ("attn.out.kernel", "self_attn.o_proj.weight"),
    ("mlp_norm.scale", "post_attention_layernorm.weight"),
    ("mlp.gate.kernel", "mlp.gate_proj.weight"),
    ("mlp.up.kernel", "mlp.up_proj.weight"),
    ("mlp.down.kernel", "mlp.down_proj.weight"),
)


def recognise(names: Collection[str], config: Mapping[str, Any] | None) -> bool:
    """Whether tensors of these names, with this config.json beside them, are a Qwen2.5-VL (its text tower in it)."""
    if config is not None and config.get("model_type") in _MODEL_TYPES:
        return True
    return any(f"{prefix}layers.0.self_attn.q_proj.bias" in names for prefix in _PREFIX.values())


def read_config(
    path: str | os.PathLike[str], shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any] | None, which: str
) -> tuple[QwenTextConfig, str]:
    """Sizes from config.json, flat or nested, and the form from the tensors' names.

    Args:
      path: what is read, for messages.
      shapes: file's tensor name -> shape.
      config: config.json; the shapes alone do not say how many heads there are.
      which: "raw"; there is no other set of weights.

    Returns:
      (config, layout), layout one of "text_model" (no prefix), "model", "language_model".

    Raises:
      ValueError: no config.json, one of another network, a field missing or with a value that this tower does not have.
    """
    if which != "raw":
        raise ValueError(f'which="{which}": {path} is a {TITLE}, which has one set of weights; use "raw"')
    if config is None:
        raise ValueError(f"{path} is a {TITLE} without a config.json: give the folder that holds both")
    file = f"{path}: config.json"
    found = [layout for layout, prefix in _PREFIX.items() if prefix + _TABLE in shapes]
    if len(found) > 1:
        names = ", ".join(_PREFIX[layout] + _TABLE for layout in found)
        raise ValueError(f"{path} has {len(found)} token tables of a {TITLE}: {names}; one is needed")
    if not found:  # missing, and to be listed as that beside whatever else is
        layers = {layout: sum(name.startswith(f"{p}layers.") for name in shapes) for layout, p in _PREFIX.items()}
        found = [max(layers, key=lambda layout: layers[layout])]
    given = config.get("text_config", config)
    if not isinstance(given, dict):
        raise ValueError(f"{file}: text_config is {given!r}; must be an object")
    kind = given.get("model_type", config.get("model_type"))
    if kind not in _MODEL_TYPES:
        raise ValueError(f"{file}: model_type is {kind!r}; must be one of {', '.join(_MODEL_TYPES)}")
    rope = given.get("rope_parameters") or given.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"{file}: rope_parameters is {rope!r}; must be an object")
    for field, value, wanted in (
        ("hidden_act", given.get("hidden_act", "silu"), ("silu",)),
        ("use_sliding_window", given.get("use_sliding_window", False), (False,)),
        ("rope_type", rope.get("rope_type", rope.get("type", "default")), ("default", "mrope")),
    ):
        if value not in wanted:
            raise ValueError(f"{file}: {field} is {value!r}; this tower has {wanted[0]!r}")
    theta = given.get("rope_theta", rope.get("rope_theta"))
    fields: dict[str, Any] = {}
    for ours, theirs in _SIZES.items():
        fields[ours] = given.get(theirs)
        if not isinstance(fields[ours], int):
            raise ValueError(f"{file}: {theirs} is {fields[ours]!r}; a whole number is needed")
    if not isinstance(theta, int | float):
        raise ValueError(f"{file}: rope_theta is {theta!r}; a number is needed")
    try:
        return QwenTextConfig(**fields, rope_theta=float(theta)), found[0]
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def entries(config: QwenTextConfig, layout: str, which: str = "raw") -> list[Entry]:
    """Every parameter and its tensors. `layout` is one of `read_config`'s; which is "raw"."""
    del which
    prefix = _PREFIX[layout]
    table = [Entry("table", prefix + _TABLE), Entry("norm.scale", prefix + "norm.weight")]
    for ours, theirs in _BLOCK:
        axes = (1, 0) if ours.endswith("kernel") else None
        table.append(Entry(f"blocks.{ours}", f"{prefix}layers.{{}}.{theirs}", axes, rows=config.depth))
    return table


def ignored(name: str, layout: str, which: str = "raw") -> bool:
    """Whether a tensor is no parameter of the tower: the vision tower's, the head, a rotary table of an old file."""
    del layout, which
    return _NO_PARAMETER.search(name) is not None


def config_json(config: QwenTextConfig) -> dict[str, Any]:
    """config.json of a folder with the tower by itself ("text_model"), as transformers reads it."""
    return {
        "architectures": ["Qwen2_5_VLTextModel"],
        "model_type": "qwen2_5_vl_text",
        **{theirs: getattr(config, ours) for ours, theirs in _SIZES.items()},
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config.rope_theta,
            "mrope_section": _mrope_section(config.head_width),
        },
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "dtype": config.param_dtype,
    }


def _mrope_section(head_width: int) -> list[int]:
    """How transformers deals K/2 frequencies to its three axes (16, 24, 24 of 64); on text any deal is the same."""
    side = head_width // 2 * 3 // 8
    return [head_width // 2 - 2 * side, side, side]
