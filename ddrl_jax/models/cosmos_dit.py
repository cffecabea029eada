"""The Cosmos-Predict2.5 video diffusion transformer (MinimalV1LVGDiT), from a toy's size to 14B by configuration alone.

Written to `specs/cosmos.md` section 1, whose step numbers the comments name. The network maps a latent, a time in
[0, 1] and text features to a latent; noise levels and preconditioning belong to `denoiser.py`.

Dims: B batch, C latent channel, T latent frame, H W rows and columns (h w: of patches), L token = t*h*w, D width,
N head, K head width, S context token, G conditions (G divides B; condition g serves rows g*B/G to (g+1)*B/G - 1).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from ddrl_jax.models.layers import (
    Linear,
    RMSNorm,
    at_least_float32,
    gelu,
    modulated_norm,
    rope_angles,
    rotate,
    time_features,
)
from ddrl_jax.parallel.attention import attention
from ddrl_jax.parallel.mesh import pin_batch


@dataclasses.dataclass(frozen=True)
class CosmosDiTConfig:
    """Sizes and dtypes of a Cosmos DiT.

    Attributes:
      in_channels: latent channels C, in and out; the two mask channels come on top.
      width: D, a multiple of `heads`, even.
      depth: blocks.
      heads: N; the head width D/N is even and at least 12.
      mlp_ratio: hidden width of the MLP over D.
      adaln_rank: rank of the adaLN-LoRA modulation.
      context_in: width of the text features handed in.
      context_dim: width they are projected to.
      patch: (p_t, p_h, p_w) latent cells a token.
      max_grid: the largest token grid (T, H, W).
      rope_ratios: context extension of the rotary embedding along (t, h, w).
      dtype: what the network computes in; norms, softmax, rotary angles and time features are float32 at least.
      param_dtype: what the parameters are kept in.
      remat: "none" keeps every activation of the backward pass, "full" keeps each block's input only.
    """

    in_channels: int = 16
    width: int = 2048
    depth: int = 28
    heads: int = 16
    mlp_ratio: float = 4.0
    adaln_rank: int = 256
    context_in: int = 100352
    context_dim: int = 1024
    patch: tuple[int, int, int] = (1, 2, 2)
    max_grid: tuple[int, int, int] = (128, 120, 120)
    rope_ratios: tuple[float, float, float] = (1.0, 3.0, 3.0)
    dtype: str = "bfloat16"
    param_dtype: str = "float32"
    remat: Literal["none", "full"] = "none"

    def __post_init__(self) -> None:
        # Names and tuples, so that a config is hashable, compares by value and survives JSON.
        for name in ("dtype", "param_dtype"):
            object.__setattr__(self, name, jnp.dtype(getattr(self, name)).name)
        for name in ("patch", "max_grid", "rope_ratios"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.depth < 1 or self.heads < 1:
            raise ValueError(f"depth is {self.depth}, heads is {self.heads}; both must be at least 1")
        if self.width % self.heads:
            raise ValueError(f"heads is {self.heads}; it must divide width {self.width}")
        if self.width // self.heads % 2 or self.width // self.heads < 12:
            raise ValueError(f"width/heads is {self.width // self.heads}; the head width must be even and >= 12")
        if self.remat not in ("none", "full"):
            raise ValueError(f'remat is {self.remat!r}; it must be "none" or "full"')
        if self.patch[0] != 1:
            raise ValueError(f"patch is {self.patch}; times and masks are per frame, so its first entry must be 1")

    @property
    def head_width(self) -> int:
        """K."""
        return self.width // self.heads

    @property
    def mlp_width(self) -> int:
        """Hidden width of the MLP."""
        return round(self.width * self.mlp_ratio)


def cosmos_2b(**changes) -> CosmosDiTConfig:
    """Cosmos-Predict2.5-2B: 2,059,174,912 parameters."""
    return CosmosDiTConfig(**changes)


def cosmos_14b(**changes) -> CosmosDiTConfig:
    """Cosmos-Predict2.5-14B: 14,368,047,104 parameters."""
    return CosmosDiTConfig(**{"width": 5120, "depth": 36, "heads": 40, **changes})


class Modulation(nnx.Module):
    """adaLN-LoRA (step 6): L2 L1 SiLU(E) + A, split into `parts` vectors of width D, one set a frame.

    L2 starts at zero, so that with A = 0 every sublayer starts as the identity (adaLN-Zero, Peebles & Xie 2023).
    """

    def __init__(self, config: CosmosDiTConfig, parts: int, *, rngs: nnx.Rngs):
        dtypes: dict[str, Any] = {"dtype": config.dtype, "param_dtype": config.param_dtype}
        self.parts = parts
        self.down = Linear(config.width, config.adaln_rank, rngs=rngs, **dtypes)
        self.up = Linear(config.adaln_rank, parts * config.width, rngs=rngs, zero=True, **dtypes)

    def __call__(self, time_BTD: jax.Array, shared_BTP: jax.Array) -> list[jax.Array]:
        """E (B,T,D) and A (B,T,3D) -> `parts` arrays (B,T,1,D), to broadcast over a frame's tokens."""
        m = self.up(self.down(jax.nn.silu(time_BTD)))
        m = m + shared_BTP[..., : m.shape[-1]]
        return jnp.split(m[:, :, None, :], self.parts, axis=-1)


class Attention(nnx.Module):
    """Multi-head attention with RMSNorm on each head's queries and keys, then RoPE if angles are given (step 8)."""

    def __init__(self, config: CosmosDiTConfig, d_context: int, *, rngs: nnx.Rngs):
        dtypes: dict[str, Any] = {"dtype": config.dtype, "param_dtype": config.param_dtype}
        self.heads = config.heads
        self.q = Linear(config.width, config.width, rngs=rngs, **dtypes)
        self.k = Linear(d_context, config.width, rngs=rngs, **dtypes)
        self.v = Linear(d_context, config.width, rngs=rngs, **dtypes)
        self.out = Linear(config.width, config.width, rngs=rngs, **dtypes)
        self.q_norm = RMSNorm(config.head_width, **dtypes)
        self.k_norm = RMSNorm(config.head_width, **dtypes)

    def __call__(self, x_BLD: jax.Array, context_GSD: jax.Array, angles_LK: jax.Array | None = None) -> jax.Array:
        """Queries from x (B,L,D), keys and values from the context (G,S,D), G dividing B -> (B,L,D)."""
        q, k, v = (
            y.reshape(*y.shape[:2], self.heads, -1) for y in (self.q(x_BLD), self.k(context_GSD), self.v(context_GSD))
        )
        q, k = self.q_norm(q), self.k_norm(k)
        if angles_LK is not None:
            q, k = rotate(q, angles_LK), rotate(k, angles_LK)
        return self.out(attention(q, k, v).reshape(x_BLD.shape))


class MLP(nnx.Module):
    """D -> ratio*D -> D with the exact (erf) GELU between (step 10)."""

    def __init__(self, config: CosmosDiTConfig, *, rngs: nnx.Rngs):
        dtypes: dict[str, Any] = {"dtype": config.dtype, "param_dtype": config.param_dtype}
        self.up = Linear(config.width, config.mlp_width, rngs=rngs, **dtypes)
        self.down = Linear(config.mlp_width, config.width, rngs=rngs, **dtypes)

    def __call__(self, x: jax.Array) -> jax.Array:
        """(..., D) -> (..., D)."""
        return self.down(gelu(self.up(x)))


class Block(nnx.Module):
    """Self-attention, cross-attention, MLP, each x += gate * f(LN(x)(1+scale)+shift) (step 7)."""

    def __init__(self, config: CosmosDiTConfig, *, rngs: nnx.Rngs):
        self.self_mod = Modulation(config, 3, rngs=rngs)
        self.self_attn = Attention(config, config.width, rngs=rngs)
        self.cross_mod = Modulation(config, 3, rngs=rngs)
        self.cross_attn = Attention(config, config.context_dim, rngs=rngs)
        self.mlp_mod = Modulation(config, 3, rngs=rngs)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(
        self,
        x_BTLD: jax.Array,
        time_BTD: jax.Array,
        shared_BTP: jax.Array,
        context_GSD: jax.Array,
        angles_LK: jax.Array,
    ) -> jax.Array:
        """x (B,T,h*w,D) -> the same; E (B,T,D) or (B,1,D), A (B,T,3D) likewise."""

        def self_attention(h):
            h = h.reshape(h.shape[0], -1, h.shape[-1])
            return self.self_attn(h, h, angles_LK)

        def cross_attention(h):
            return self.cross_attn(h.reshape(h.shape[0], -1, h.shape[-1]), context_GSD)

        sublayers = (
            (self.self_mod, self_attention),
            (self.cross_mod, cross_attention),
            (self.mlp_mod, self.mlp),
        )
        for modulation, f in sublayers:
            shift, scale, gate = modulation(time_BTD, shared_BTP)
            y = f(modulated_norm(x_BTLD, shift, scale))
            x_BTLD = x_BTLD + gate * y.reshape(x_BTLD.shape)
        return x_BTLD


class CosmosDiT(nnx.Module):
    """The network of `specs/cosmos.md` section 1.

    Blocks are stacked along a leading depth axis and run by a scan: the program does not grow with depth.

    A new network predicts exactly zero: the final projection, every L2 and the time MLP's second layer start at zero
    (adaLN-Zero, Peebles & Xie 2023), all other products at a normal of std 1/sqrt(d_in) cut at 3 std.
    """

    def __init__(self, config: CosmosDiTConfig, *, rngs: nnx.Rngs):
        c = config
        dtypes: dict[str, Any] = {"dtype": c.dtype, "param_dtype": c.param_dtype}
        cells = int(np.prod(c.patch))
        self.config = c
        self.patch_embed = Linear((c.in_channels + 2) * cells, c.width, rngs=rngs, **dtypes)
        self.context_proj = Linear(c.context_in, c.context_dim, rngs=rngs, bias=True, **dtypes)
        self.time_in = Linear(c.width, c.width, rngs=rngs, **dtypes)
        self.time_out = Linear(c.width, 3 * c.width, rngs=rngs, zero=True, **dtypes)
        self.time_norm = RMSNorm(c.width, **dtypes)

        @nnx.split_rngs(splits=c.depth)
        @nnx.vmap
        def stack(rngs):
            return Block(c, rngs=rngs)

        self.blocks = stack(rngs)
        self.final_mod = Modulation(c, 2, rngs=rngs)
        self.final = Linear(c.width, c.in_channels * cells, rngs=rngs, zero=True, **dtypes)

    def __call__(
        self,
        x: jax.Array,
        t: jax.Array,
        context: jax.Array,
        condition_mask: jax.Array | None = None,
        padding_mask: jax.Array | None = None,
        mesh: Mesh | None = None,
    ) -> jax.Array:
        """Network output for a latent.

        Args:
          x: latent (B, C, T, H, W), any float dtype; T = 1 is an image.
          t: time in [0, 1], (), (B,), (B, 1) or (B, T): float32, never narrower.
          context: text features before their projection, (G, S, context_in) with G dividing B; all S are attended.
          condition_mask: 1 where a frame is given, (B, 1, T, 1 or H, 1 or W); None: no frame. Ignored for images, as
            in the original.
          padding_mask: 1 where a pixel is padding, (B, 1, any height, any width), brought to the latent's size by
            nearest neighbour; None: no padding.
          mesh: what the batch of every block's activations is cut over (`pin_batch`); None: as the compiler likes.

        Returns:
          (B, C, T, H, W) in the config's `dtype`.

        Raises:
          ValueError: the latent's size, its grid or a batch size does not fit.
        """
        pin = functools.partial(pin_batch, mesh)
        tokens_BTLD, features, angles_LK = self.embed(pin(x), t, context, condition_mask, padding_mask)
        time_BTD, shared_BTP, context_GSD = features
        time_BTD, shared_BTP = pin(time_BTD), pin(shared_BTP)

        graphdef, stacked = nnx.split(self.blocks)

        def step(x_BTLD, block):
            x_BTLD = nnx.merge(graphdef, block)(pin(x_BTLD), time_BTD, shared_BTP, context_GSD, angles_LK)
            return pin(x_BTLD), None

        if self.config.remat == "full":
            step = jax.checkpoint(step, prevent_cse=False)
        x_BTLD, _ = jax.lax.scan(step, pin(tokens_BTLD), stacked)

        shift, scale = self.final_mod(time_BTD, shared_BTP)
        return pin(self.unpatchify(self.final(modulated_norm(x_BTLD, shift, scale)), x.shape))

    def embed(self, x, t, context, condition_mask, padding_mask):
        """Steps 1 to 5 and 9: tokens (B,T,h*w,D); E (B,T,D), A (B,T,3D), context (G,S,context_dim); rotary angles."""
        c = self.config
        chex.assert_rank([x, context], [5, 3])
        B, C, T, H, W = x.shape
        _, p_h, p_w = c.patch
        if c.in_channels != C or H % p_h or W % p_w:
            raise ValueError(
                f"latent is (B,C,T,H,W) = {x.shape}; C must be {c.in_channels}, H and W multiples of {p_h} and {p_w}"
            )
        grid = (T, H // p_h, W // p_w)
        if any(n > most for n, most in zip(grid, c.max_grid, strict=True)):
            raise ValueError(f"token grid (T,H,W) is {grid}; the largest is {c.max_grid}")
        if B % context.shape[0] or context.shape[-1] != c.context_in:
            raise ValueError(
                f"context is (G,S,D) = {context.shape}; G must divide the batch {B}, D must be {c.context_in}"
            )
        t = jnp.full((B, 1), t) if jnp.ndim(t) == 0 else t.reshape(B, -1)
        if t.shape[1] not in (1, T):
            raise ValueError(f"t is {t.shape}; it must have one entry a sample or one a frame ({T})")

        # Step 1. The mask channels: condition, then padding.
        if condition_mask is None or T == 1:
            condition = jnp.zeros((B, 1, T, H, W), c.dtype)
        else:
            condition = jnp.broadcast_to(condition_mask.astype(c.dtype), (B, 1, T, H, W))
        if padding_mask is None:
            padding = jnp.zeros((B, 1, T, H, W), c.dtype)
        else:
            rows, columns = (np.arange(n) * size // n for n, size in zip((H, W), padding_mask.shape[-2:], strict=True))
            padding = padding_mask[:, :, rows][:, :, :, columns].astype(c.dtype)
            padding = jnp.broadcast_to(padding[:, :, None], (B, 1, T, H, W))
        x = jnp.concatenate([x.astype(c.dtype), condition, padding], axis=1)

        # Step 2. b c t (h m) (w n) -> b t (h w) (c m n), the channel slowest.
        x = x.reshape(B, C + 2, T, grid[1], p_h, grid[2], p_w).transpose(0, 2, 3, 5, 1, 4, 6)
        tokens_BTLD = self.patch_embed(x.reshape(B, T, grid[1] * grid[2], -1))

        # Step 3. No mask: the null context is GELU(bias), not zero.
        context_GSD = gelu(self.context_proj(context))

        # Steps 4 and 5. E is the normalised sinusoid itself, not the MLP's output.
        e_BTD = time_features(t, c.width, c.dtype)
        shared_BTP = self.time_out(jax.nn.silu(self.time_in(e_BTD)))
        time_BTD = self.time_norm(e_BTD)

        # Step 9.
        angles_LK = rope_angles(grid, c.head_width, c.rope_ratios, at_least_float32(c.dtype))
        return tokens_BTLD, (time_BTD, shared_BTP, context_GSD), angles_LK

    def unpatchify(self, y_BTLD: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Step 11: (p_h p_w C) -> C (H p_h) (W p_w), the channel *fastest*: not the inverse of step 2."""
        B, C, T, H, W = shape
        _, p_h, p_w = self.config.patch
        y = y_BTLD.reshape(B, T, H // p_h, W // p_w, p_h, p_w, C)
        return y.transpose(0, 6, 1, 2, 4, 3, 5).reshape(shape)
