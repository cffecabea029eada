"""Null conditions: classifier-free guidance when sampling, condition dropout in the data loss."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp

Denoiser = Callable[[Any, chex.Array, chex.Array, Any], chex.Array]


def guided(denoise: Denoiser, scale: float, null_cond: Any) -> Denoiser:
    """Classifier-free guidance, x0 = cond + scale (cond - null) (Ho & Salimans 2022, arXiv 2207.12598, Eq. 6).

    Args:
      denoise: (params, x, sigma, cond) -> x0.
      scale: 0 is one conditional pass; 7 here is 8 where guidance is written uncond + g (cond - uncond).
      null_cond: same tree as cond, leading axis 1 or cond's; a leaf that is None, or a dict's absent key, keeps the
        sample's own value. None altogether: the denoiser is called with None.

    Returns:
      A denoiser of the same signature.
    """

    def denoise_guided(params: Any, x: chex.Array, sigma: chex.Array, cond: Any) -> chex.Array:
        x0 = denoise(params, x, sigma, cond)
        if isinstance(scale, int | float) and scale == 0:
            return x0
        null = None if null_cond is None else fill_null(cond, null_cond)
        return x0 + scale * (x0 - denoise(params, x, sigma, null))

    return denoise_guided


def fill_null(cond: Any, null_cond: Any) -> Any:
    """The null condition in cond's own leading axes."""
    return _merge(cond, null_cond, lambda own, null: null)


def drop_condition(rng: chex.PRNGKey, cond: Any, null_cond: Any, rate: float) -> Any:
    """Replaces the condition of each sample by null_cond with probability `rate`, all of its leaves together.

    Leaves may hold one entry a group (leading G dividing B); the groups of the shortest leaf that is replaced are then
    dropped as a whole, so that no condition is ever stored per sample.

    Args:
      rng: key.
      cond: tree with leading axes B or G.
      null_cond: same tree, leading axis 1; a leaf that is None, or a dict's absent key, keeps the sample's own value.
      rate: probability.
    """
    lengths: list[int] = []
    _merge(cond, null_cond, lambda own, null: lengths.append(own.shape[0]))
    if not lengths:
        return cond
    return replace_dropped(jax.random.bernoulli(rng, rate, (min(lengths),)), cond, null_cond)


def replace_dropped(drop_G: chex.Array, cond: Any, null_cond: Any) -> Any:
    """`drop_condition` for samples or groups that are chosen already: drop_G, bool (G,), G dividing every leading axis
    of the leaves that are replaced."""

    def choose(own: chex.Array, null: chex.Array) -> chex.Array:
        if own.shape[0] % drop_G.shape[0]:
            raise ValueError(
                f"cond has a leaf with a leading axis of {own.shape[0]}: the {drop_G.shape[0]} that are dropped or not "
                "must divide it"
            )
        drop = jnp.repeat(drop_G, own.shape[0] // drop_G.shape[0])
        return jnp.where(drop.reshape((-1,) + (1,) * (own.ndim - 1)), null, own)

    return _merge(cond, null_cond, choose)


def _merge(cond: Any, null_cond: Any, choose: Callable[[chex.Array, chex.Array], Any], at: str = "") -> Any:
    """Maps choose(own, null) over the leaves; null broadcast to own's leading axis, None leaves of null keep own.

    A dict's absent key is a None. The result has cond's keys; `at` is where in the trees this call is, for errors.
    """

    def merge(path: Any, null: Any, own: Any) -> Any:
        here = at + jax.tree_util.keystr(path)
        if null is None:
            return own
        if isinstance(null, dict) and (own is None or isinstance(own, dict)):
            merged = {} if own is None else copy.copy(own)
            for key, value in null.items():
                chosen = _merge(merged.get(key), value, choose, f"{here}[{key!r}]")
                if key in merged:
                    merged[key] = chosen
            return None if own is None else merged
        if own is None:
            raise ValueError(f"null_cond{here} is given where cond{here} is None or absent: the trees must agree")
        if not jax.tree_util.all_leaves([null, own]):
            raise ValueError(_disagree(here, null, own))
        own, null = jnp.asarray(own), jnp.asarray(null, jnp.result_type(own))
        return choose(own, jnp.broadcast_to(null, own.shape[:1] + null.shape[1:]))

    tree: Any
    nulls, tree = jax.tree_util.tree_flatten_with_path(
        null_cond, is_leaf=lambda node: node is None or isinstance(node, dict)
    )
    try:
        owns = tree.flatten_up_to(cond)
    except ValueError as error:
        raise ValueError(_disagree(at, null_cond, cond)) from error
    return tree.unflatten([merge(path, null, own) for (path, null), own in zip(nulls, owns, strict=True)])


def _disagree(at: str, null: Any, own: Any) -> str:
    def kind(node: Any) -> str:
        return type(node).__name__ + (f" of {len(node)}" if isinstance(node, tuple | list) else "")

    return f"null_cond{at} is a {kind(null)}, cond{at} a {kind(own)}: the trees must agree"
