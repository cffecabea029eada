"""Low-rank adapters of kernels (LoRA, Hu et al. 2021): pure functions on parameter trees that know no network.

An adapter is a dict: path of a layer, "blocks.self_attn.q" -> {"a": (..., d_in, r), "b": (..., r, d_out)}, with the
layer's leading (block) axes; the layer computes x @ (W + scale a b) with scale = alpha / r. Trained by
differentiating through `merge_lora`: W is not, so there are no gradients nor moments of it.

Dims: r rank, L block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

Lora = dict[str, dict[str, jax.Array]]

# The self-attention of a Cosmos DiT.
TARGETS = ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.out")


def init_lora(params: Any, rank: int, targets: Sequence[str] = TARGETS, *, key: jax.Array) -> Lora:
    """A new adapter, float32: a normal with std 1/r, b zero, so that merging it changes nothing.

    Args:
      params: the network's parameters (an `nnx.State`), arrays or shapes.
      rank: r, at least 1.
      targets: ends of the layers' paths, at a dot.
      key: for a.

    Raises:
      ValueError: a rank below 1, or a target that no layer has.
    """
    if rank < 1:
        raise ValueError(f"rank={rank}: must be at least 1")
    kernels = {path.removesuffix(".kernel"): leaf for path, leaf in _flat(params).items() if path.endswith(".kernel")}
    for target in targets:
        if not any(_ends(path, target) for path in kernels):
            raise ValueError(f"targets: {target!r} is the end of no layer's path; there are {', '.join(kernels)}")
    lora = {}
    for i, (path, kernel) in enumerate(sorted(kernels.items())):
        if any(_ends(path, target) for target in targets):
            *blocks, d_in, d_out = kernel.shape
            a = jax.random.normal(jax.random.fold_in(key, i), (*blocks, d_in, rank), jnp.float32) / rank
            lora[path] = {"a": a, "b": jnp.zeros((*blocks, rank, d_out), jnp.float32)}
    return lora


def merge_lora(params: Any, lora: Mapping[str, Mapping[str, jax.Array]], scale: float) -> Any:
    """W + scale a b for every layer of the adapter; the other parameters as they are.

    Args:
      params: the network's parameters (an `nnx.State`).
      lora: the adapter.
      scale: alpha / r.

    Returns:
      Like `params`. The sum is made in float32 at least and rounded to the kernel's dtype once.

    Raises:
      ValueError: a layer that the network has not, or of other sizes.
    """
    flat = dict(nnx.to_flat_state(params))
    keys = {".".join(map(str, key)): key for key in flat}
    for path, pair in lora.items():
        key = keys.get(f"{path}.kernel")
        if key is None:
            raise ValueError(f"the adapter has a layer {path}, which the network has not")
        kernel, a, b = flat[key][...], pair["a"], pair["b"]
        if (*a.shape[:-1], b.shape[-1]) != kernel.shape or (*a.shape[:-2], a.shape[-1]) != b.shape[:-1]:
            raise ValueError(f"{path}: an adapter of a {a.shape} and b {b.shape} does not fit a kernel {kernel.shape}")
        wide = jnp.promote_types(kernel.dtype, jnp.float32)
        change = jnp.matmul(a.astype(wide), b.astype(wide), precision=jax.lax.Precision.HIGHEST)
        flat[key] = flat[key].replace((kernel.astype(wide) + scale * change).astype(kernel.dtype))
    return nnx.from_flat_state(list(flat.items()))


def _flat(params: Any) -> dict[str, Any]:
    return {".".join(map(str, key)): leaf.get_value() for key, leaf in nnx.to_flat_state(params)}


def _ends(path: str, target: str) -> bool:
    return path == target or path.endswith(f".{target}")
