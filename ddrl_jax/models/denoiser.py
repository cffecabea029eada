"""From a network to a denoiser: rectified-flow preconditioning and conditioning frames (`specs/cosmos.md` section 2).

A denoiser is a frozen, hashable function of (params, x, sigma, cond); the samplers and losses of `diffusion` and `rl` know
nothing else of a model.

Dims: B batch, C channel, T frame, H W rows and columns, G conditions (G divides B).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from ddrl_jax.diffusion.preconditioning import rectified_flow

Params = Any  # an nnx.State or a plain tree of the same structure


@dataclasses.dataclass(frozen=True)
class CosmosDenoiser:
    """denoise(params, x, sigma, cond) -> x0 for a Cosmos DiT; made by `cosmos_denoiser`."""

    graphdef: nnx.GraphDef
    use_rf_ckpts: bool
    sigma_conditional: float
    level: Literal["edm", "flow"]
    zero_frames: bool
    keep_frames: bool

    def __call__(
        self, params: Params, x: jax.Array, sigma: jax.Array, cond: Mapping[str, Any]
    ) -> jax.Array:
        """The prediction of the clean latent.

        With s = sigma/(1+sigma): x0 = x/(1+sigma) - s net(x/(1+sigma), s), or with a flow time t: x0 = x - t net(x, t); the
        given frames are put in place of the network's input and of its prediction.

        Args:
          params: the network's parameters.
          x: x_BCTHW, noised latent, float32 or float64; the conditioning frames in it are not read.
          sigma: level, (B,), (B, 1) or (B, T).
          cond: dict of `context` (G, S, context_in); `frames` (G, C, T, H, W), clean latents, with `condition_mask`
            (G, 1, T, 1, 1), 1 where a frame is given; `padding_mask` (G, 1, height, width) in pixels. The last three may be
            None or absent. Each G divides B: entry g serves rows g*B/G to (g+1)*B/G - 1. Images (T = 1) have no
            conditioning frames: mask and frames are ignored.

        Returns:
          (B, C, T, H, W) in x's dtype, float32 at least.

        Raises:
          ValueError: one of frames and condition_mask without the other, a G that does not divide B, or sigma's shape.
        """
        batch, frames_in_x = x.shape[0], x.shape[2]
        dtype = jnp.promote_types(x.dtype, jnp.float32)
        x = x.astype(dtype)
        sigma = jnp.asarray(sigma, dtype)
        if sigma.ndim not in (1, 2) or sigma.shape[0] != batch or sigma.shape[1:] not in ((), (1,), (frames_in_x,)):
            raise ValueError(f"sigma is {sigma.shape}; must be ({batch},) or ({batch}, {frames_in_x}), a level a sample or a frame")
        sigma = sigma.reshape(batch, 1, -1, 1, 1)

        mask = _rows(cond.get("condition_mask"), batch, "condition_mask")
        frames = _rows(cond.get("frames"), batch, "frames")
        if (mask is None) != (frames is None):
            raise ValueError("cond: frames and condition_mask go together; one of them is None")
        if frames_in_x == 1:
            mask = frames = None

        if self.level == "flow":
            c_skip, c_out, c_in, c_noise = 1, -sigma, 1, sigma
        else:
            c_skip, c_out, c_in, c_noise = rectified_flow(sigma)
        net_x, t = c_in * x, c_noise
        if mask is not None:
            frames, given = frames.astype(dtype), mask.astype(bool)
            net_x = jnp.where(given, jnp.zeros_like(frames) if self.zero_frames else frames, net_x)
            if not self.use_rf_ckpts:
                t_given = rectified_flow(jnp.asarray(self.sigma_conditional, dtype)).c_noise
                t = jnp.where(given.any(axis=(1, 3, 4), keepdims=True), t_given, t)

        net = nnx.merge(self.graphdef, params)
        padding_mask = _rows(cond.get("padding_mask"), batch, "padding_mask")
        y = net(net_x, t.reshape(batch, -1), cond["context"], mask, padding_mask).astype(dtype)
        x0 = c_skip * x + c_out * y
        return x0 if mask is None or not self.keep_frames else jnp.where(given, frames, x0)


def cosmos_denoiser(
    graphdef: nnx.GraphDef,
    *,
    use_rf_ckpts: bool,
    sigma_conditional: float = 1e-4,
    level: Literal["edm", "flow"] = "edm",
    zero_frames: bool = False,
    keep_frames: bool = True,
) -> CosmosDenoiser:
    """A denoiser from a Cosmos DiT's graph definition (`nnx.split(model)[0]`).

    Args:
      graphdef: of a `CosmosDiT`.
      use_rf_ckpts: True (the 14B recipe): one time for all frames. False (the 2B recipe): given frames have the time of
        `sigma_conditional`.
      sigma_conditional: the noise level given frames are said to have.
      level: what `sigma` is: the EDM noise level of x = x0 + sigma e, or "flow", the time in [0, 1] of x = (1-t) x0 + t e.
        The network is the same: its input and time are those of the flow.
      zero_frames: the video condition is dropped: the network sees zeros for the given frames, and still their mask.
      keep_frames: the prediction holds the given frames as they were given.

    Returns:
      A frozen, hashable function denoise(params, x, sigma, cond) -> x0: see `CosmosDenoiser.__call__`.
    """
    return CosmosDenoiser(graphdef, use_rf_ckpts, sigma_conditional, level, zero_frames, keep_frames)


def _rows(value: jax.Array | None, batch: int, name: str) -> jax.Array | None:
    """One entry a group -> one a row."""
    if value is None or value.shape[0] == batch:
        return value
    if batch % value.shape[0]:
        raise ValueError(f"cond[{name!r}] has {value.shape[0]} entries; their number must divide the batch {batch}")
    return jnp.repeat(jnp.asarray(value), batch // value.shape[0], axis=0)
