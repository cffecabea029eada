"""Weights and states on disk: import and export of published formats here, the Orbax manager of a run in `manager`."""

from __future__ import annotations

from ddrl_jax.checkpoint.weights import load_pretrained, save_pretrained

__all__ = ["load_pretrained", "save_pretrained"]
