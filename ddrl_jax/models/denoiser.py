"""From a network to a denoiser: rectified-flow preconditioning and conditioning frames (`specs/cosmos.md` section 2).

A denoiser is a frozen, hashable function of (params, x, sigma, cond); the samplers and losses of `diffusion` and `rl`
know nothing else of a model.

Dims: B batch, C channel, T frame, H W rows and columns, G conditions (G divides B).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

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
    mesh: Mesh | None = None

    def __call__(self, params: Params, x: jax.Array, sigma: jax.Array, cond: Mapping[str, Any]) -> jax.Array:
        """The prediction of the clean latent.

        With s = sigma/(1+sigma): x0 = x/(1+sigma) - s net(x/(1+sigma), s), or with a flow time t: x0 = x - t net(x, t).
        The given frames are put in place of the network's input and of its prediction.

        Args:
          params: the network's parameters.
          x: x_BCTHW, noised latent, float32 or float64; the conditioning frames in it are not read.
          sigma: level, (), (B,), (B, 1) or (B, T).
          cond: dict of `context` (G, S, context_in), or of `text`, what `project` makes of it; `frames`
            (G, C, T, H, W), clean latents, with `condition_mask` (G, 1, T, 1, 1), 1 where a frame is given;
            `padding_mask` (G, 1, height, width), 1 where a pixel is padding.
            The last three may be None or absent; a mask that is all zero (and no tracer) needs no frames. Each G
            divides B: entry g serves rows g*B/G to (g+1)*B/G - 1. Images (T = 1) have no conditioning frames: mask and
            frames are ignored.

        Returns:
          (B, C, T, H, W) in x's dtype, float32 at least.

        Raises:
          ValueError: one of frames and condition_mask without the other, a G that does not divide B, or sigma's shape.
        """
        B, _, T, _, _ = x.shape
        dtype = jnp.promote_types(x.dtype, jnp.float32)
        x, sigma = x.astype(dtype), jnp.asarray(sigma, dtype)
        sigma = jnp.broadcast_to(sigma, (B,)) if sigma.ndim == 0 else sigma
        if sigma.shape not in ((B,), (B, 1), (B, T)):
            raise ValueError(f"sigma is {sigma.shape}; must be ({B},) or ({B}, {T}): a level a sample or a frame")
        sigma = sigma.reshape(B, -1)[:, None, :, None, None]
        mask: Any = _rows(cond, "condition_mask", B) if T > 1 else None
        frames: Any = _rows(cond, "frames", B) if T > 1 else None
        if mask is not None and frames is None and _all_zero(cond["condition_mask"]):
            mask = None
        if (mask is None) != (frames is None):
            raise ValueError("cond: frames and condition_mask go together; one of them is None")

        if self.level == "flow":
            c_skip, c_out, c_in, c_noise = 1.0, -sigma, 1.0, sigma
        else:
            c_skip, c_out, c_in, c_noise = rectified_flow(sigma)
        net_x, t = c_in * x, c_noise
        conditioned = mask is not None and frames is not None
        if conditioned:
            given, frames = mask.astype(bool), frames.astype(dtype)
            # A choice, not a blend: what is under a given frame may be anything, NaN too.
            net_x = jnp.where(given, 0.0 if self.zero_frames else frames, net_x)
            if not self.use_rf_ckpts:
                t_given = rectified_flow(jnp.asarray(self.sigma_conditional, dtype)).c_noise
                t = jnp.where(given.any(axis=(1, 3, 4), keepdims=True), t_given, t)

        net = nnx.merge(self.graphdef, params)
        text = cond.get("text")
        y = net(
            net_x,
            t.reshape(B, -1),
            cond["context"] if text is None else text,
            mask,
            _rows(cond, "padding_mask", B),
            self.mesh,
            projected=text is not None,
        ).astype(dtype)
        x0 = c_skip * x + c_out * y
        return jnp.where(given, frames, x0) if conditioned and self.keep_frames else x0

    def project(self, params: Params, cond: Mapping[str, Any]) -> dict[str, Any]:
        """The condition with its text projected, once for the many steps of a rollout."""
        text = nnx.merge(self.graphdef, params).project(cond["context"], self.mesh)
        return {**{k: v for k, v in cond.items() if k != "context"}, "text": text}


def cosmos_denoiser(
    graphdef: nnx.GraphDef,
    *,
    use_rf_ckpts: bool,
    sigma_conditional: float = 1e-4,
    level: Literal["edm", "flow"] = "edm",
    zero_frames: bool = False,
    keep_frames: bool = True,
    mesh: Mesh | None = None,
) -> CosmosDenoiser:
    """A denoiser from a Cosmos DiT's graph definition (`nnx.split(model)[0]`).

    Args:
      graphdef: of a `CosmosDiT`.
      use_rf_ckpts: True (the 14B recipe): one time for all frames. False (the 2B recipe): given frames have the time of
        `sigma_conditional`.
      sigma_conditional: the noise level given frames are said to have.
      level: what `sigma` is: "edm", the noise level > 0 of x = x0 + sigma e, or "flow", the time t in [0, 1] of
        x = (1-t) x0 + t e (FlowSDE, DanceSDE). The network is the same: its own input and time are the flow's.
      zero_frames: the video condition is dropped: the network sees zeros for the given frames, and still their mask.
      keep_frames: the prediction holds the given frames as they were given.
      mesh: where the parameters are cut over fsdp: activations are then cut along the batch, not gathered.

    Returns:
      A frozen, hashable function denoise(params, x, sigma, cond) -> x0: see `CosmosDenoiser.__call__`.
    """
    return CosmosDenoiser(graphdef, use_rf_ckpts, sigma_conditional, level, zero_frames, keep_frames, mesh)


def _all_zero(mask: Any) -> bool:
    """Whether a mask is known to be all zero, which that of a tracer is not."""
    return not isinstance(mask, jax.core.Tracer) and not np.asarray(mask).any()


def _rows(cond: Mapping[str, Any], name: str, batch: int) -> Any:
    """An entry of the condition, one row a sample: repeated where there is one a group, None where there is none."""
    value = cond.get(name)
    if value is None or value.shape[0] == batch:
        return value
    if batch % value.shape[0]:
        raise ValueError(f"cond[{name!r}] has {value.shape[0]} entries; their number must divide the batch {batch}")
    return jnp.repeat(jnp.asarray(value), batch // value.shape[0], axis=0)
