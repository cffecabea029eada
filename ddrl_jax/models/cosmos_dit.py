"""The Cosmos-Predict2.5 video diffusion transformer (MinimalV1LVGDiT), from a toy's size to 14B by configuration alone.

Written to `specs/cosmos.md` section 1, whose step numbers the comments name. The network maps a latent, a time in
[0, 1] and text features to a latent; noise levels and preconditioning belong to `denoiser.py`.

Dims: B batch, C latent channel, T latent frame, H W rows and columns (h w: of patches), L token = t*h*w, D width,
N head, K head width, S context token, G conditions (G divides B; condition g serves rows g*B/G to (g+1)*B/G - 1).

Over a mesh (`parallel.mesh`) samples are cut over replica x fsdp and their frames over context; each block's kernels
are gathered inside the scan over blocks, and self-attention exchanges frames for heads (`parallel.attention`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
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
from ddrl_jax.parallel.attention import (
    KINDS,
    SAVED,
    attention,
    attention_to_text,
    saves_cudnn,
    to_heads,
    to_tokens,
)
from ddrl_jax.parallel.mesh import batch_spec, pin, pin_latents, pin_text, pin_tokens

# What a block's backward pass finds kept, by policy: names of `checkpoint_name`, beside the block's input. The rest is
# computed again.
REMAT: dict[str, tuple[str, ...]] = {
    "none": (),
    "full": (),
    "save-attention": (SAVED,),
    "save-attention-mlp": (SAVED, "mlp"),
    "save-qkv": (SAVED, "mlp", "qkv"),
    "save-most": (SAVED, "mlp", "qkv", "branch", "cross_q", "mlp_up"),
    "offload": (SAVED,),
}
_OFFLOADED = ("mlp", "qkv", "branch")  # by "offload", to the host's memory


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
      remat: what the backward pass finds kept. "none": every activation, "full": each block's input only,
        "save-attention": the result of self-attention as well, "save-attention-mlp": and the MLP's, "save-qkv": and
        queries, keys and values, "save-most": all but what costs next to nothing to compute again, "offload":
        attention on the device, and what else "save-qkv" keeps, with self-attention's projection, in the host's memory.
      attention: the form of attention, one of `parallel.attention.KINDS`.
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
    remat: str = "none"
    attention: str = "auto"

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
        for name, known in (("remat", REMAT), ("attention", KINDS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(known)}")
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

    def __call__(self, time_BTD: jax.Array, shared_BTP: jax.Array, mesh: Mesh | None = None) -> list[jax.Array]:
        """E (B,T,D) and A (B,T,3D) -> `parts` arrays (B,T,1,D), to broadcast over a frame's tokens."""
        m = self.up(self.down(jax.nn.silu(time_BTD), mesh), mesh)
        m = m + shared_BTP[..., : m.shape[-1]]
        return jnp.split(m[:, :, None, :], self.parts, axis=-1)


class Attention(nnx.Module):
    """Multi-head attention with RMSNorm on each head's queries and keys, then RoPE if angles are given (step 8)."""

    def __init__(self, config: CosmosDiTConfig, d_context: int, *, rngs: nnx.Rngs):
        dtypes: dict[str, Any] = {"dtype": config.dtype, "param_dtype": config.param_dtype}
        self.heads = config.heads
        self.kind = config.attention
        self.q = Linear(config.width, config.width, rngs=rngs, **dtypes)
        self.k = Linear(d_context, config.width, rngs=rngs, **dtypes)
        self.v = Linear(d_context, config.width, rngs=rngs, **dtypes)
        self.out = Linear(config.width, config.width, rngs=rngs, **dtypes)
        self.q_norm = RMSNorm(config.head_width, **dtypes)
        self.k_norm = RMSNorm(config.head_width, **dtypes)

    def of_itself(self, x_BTLD: jax.Array, angles_LK: jax.Array, mesh: Mesh | None) -> jax.Array:
        """Self-attention of all frames: (B,T,h*w,D) -> the same; angles of T*h*w tokens."""
        shape = (*x_BTLD.shape[:3], self.heads, -1)
        q, k, v = (
            checkpoint_name(to_heads(f(x_BTLD, mesh).reshape(shape), mesh), "qkv") for f in (self.q, self.k, self.v)
        )
        q, k = rotate(self.q_norm(q), angles_LK), rotate(self.k_norm(k), angles_LK)
        y = attention(q, k, v, kind=self.kind, mesh=mesh)
        return self.out(pin_tokens(mesh, to_tokens(y, x_BTLD.shape[1], mesh)), mesh)

    def to_text(self, x_BTLD: jax.Array, text_BSD: jax.Array, mesh: Mesh | None) -> jax.Array:
        """Queries from x (B,T,h*w,D), keys and values from the text (B,S,D) -> (B,T,h*w,D)."""
        rows = None if mesh is None else batch_spec(mesh, x_BTLD.shape[0])
        # The text's tokens are cut over context for the projections; every device attends to all of them.
        k, v = (pin(mesh, f(text_BSD, mesh), rows) for f in (self.k, self.v))
        k, v = (x.reshape(*text_BSD.shape[:2], self.heads, -1) for x in (k, v))
        q_BTLNK = checkpoint_name(self.q(x_BTLD, mesh), "cross_q").reshape(*x_BTLD.shape[:3], self.heads, -1)
        y_BTLNK = attention_to_text(self.q_norm(q_BTLNK), self.k_norm(k), v, kind=self.kind, mesh=mesh)
        return self.out(y_BTLNK.reshape(x_BTLD.shape), mesh)


class MLP(nnx.Module):
    """D -> ratio*D -> D with the exact (erf) GELU between (step 10)."""

    def __init__(self, config: CosmosDiTConfig, *, rngs: nnx.Rngs):
        dtypes: dict[str, Any] = {"dtype": config.dtype, "param_dtype": config.param_dtype}
        self.up = Linear(config.width, config.mlp_width, rngs=rngs, **dtypes)
        self.down = Linear(config.mlp_width, config.width, rngs=rngs, **dtypes)

    def __call__(self, x: jax.Array, mesh: Mesh | None = None) -> jax.Array:
        """(..., D) -> (..., D)."""
        return checkpoint_name(self.down(gelu(checkpoint_name(self.up(x, mesh), "mlp_up")), mesh), "mlp")


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
        text_BSD: jax.Array,
        angles_LK: jax.Array,
        mesh: Mesh | None = None,
    ) -> jax.Array:
        """x (B,T,h*w,D) -> the same; E (B,T,D) or (B,1,D), A (B,T,3D) likewise."""
        # Named are branches, before their gate, and not the sum of them: that follows from the block's input.
        sublayers = (
            (self.self_mod, lambda h: checkpoint_name(self.self_attn.of_itself(h, angles_LK, mesh), "branch")),
            (self.cross_mod, lambda h: checkpoint_name(self.cross_attn.to_text(h, text_BSD, mesh), "branch")),
            (self.mlp_mod, lambda h: self.mlp(h, mesh)),
        )
        for modulation, f in sublayers:
            shift, scale, gate = modulation(time_BTD, shared_BTP, mesh)
            x_BTLD = pin_tokens(mesh, x_BTLD + gate * f(modulated_norm(x_BTLD, shift, scale)))
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
        projected: bool = False,
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
          mesh: what parameters and activations are cut over; None: one device, or as the compiler likes.
          projected: the context is `project`'s result already, (G, S, context_dim).

        Returns:
          (B, C, T, H, W) in the config's `dtype`.

        Raises:
          ValueError: the latent's size, its grid or a batch size does not fit.
        """
        tokens_BTLD, features, angles_LK = self.embed(
            pin_latents(mesh, x), t, context, condition_mask, padding_mask, mesh, projected
        )
        graphdef, stacked = nnx.split(self.blocks)

        def step(x_BTLD, block):
            return nnx.merge(graphdef, block)(x_BTLD, *features, angles_LK, mesh), None

        x_BTLD, _ = jax.lax.scan(self._remat(step), tokens_BTLD, stacked)

        time_BTD, shared_BTP, _ = features
        shift, scale = self.final_mod(time_BTD, shared_BTP, mesh)
        y_BTLD = self.final(modulated_norm(x_BTLD, shift, scale), mesh)
        return pin_latents(mesh, self.unpatchify(pin_tokens(mesh, y_BTLD), x.shape))

    def project(self, context: jax.Array, mesh: Mesh | None = None) -> jax.Array:
        """Step 3: text features (G,S,context_in) -> (G,S,context_dim). No mask: the null context is GELU(bias)."""
        return gelu(self.context_proj(context, mesh, gather=False))

    def _remat(self, step: Callable[..., Any]) -> Callable[..., Any]:
        policies, remat = jax.checkpoint_policies, self.config.remat
        if remat == "none":
            return step
        if remat == "full":
            return jax.checkpoint(step, prevent_cse=False)
        names = policies.save_only_these_names(*REMAT[remat])
        if remat == "offload":
            names = policies.save_and_offload_only_these_names(
                names_which_can_be_saved=REMAT[remat],
                names_which_can_be_offloaded=_OFFLOADED,
                offload_src="device",
                offload_dst="pinned_host",
            )

        def policy(prim: Any, *avals: Any, **params: Any) -> Any:
            return True if saves_cudnn(prim, *avals, **params) else names(prim, *avals, **params)

        return jax.checkpoint(step, prevent_cse=False, policy=policy)

    def embed(self, x, t, context, condition_mask, padding_mask, mesh=None, projected=False):
        """Steps 1 to 5 and 9: tokens (B,T,h*w,D); E (B,T,D), A (B,T,3D), text (B,S,context_dim); rotary angles."""
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
        width = c.context_dim if projected else c.context_in
        if B % context.shape[0] or context.shape[-1] != width:
            raise ValueError(f"context is (G,S,D) = {context.shape}; G must divide the batch {B}, D must be {width}")
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
        tokens_BTLD = pin_tokens(mesh, self.patch_embed(pin_tokens(mesh, x.reshape(B, T, grid[1] * grid[2], -1)), mesh))

        # Step 3.
        text_GSD = context if projected else self.project(context, mesh)
        text_BSD = pin_text(mesh, jnp.repeat(text_GSD, B // text_GSD.shape[0], axis=0))

        # Steps 4 and 5. E is the normalised sinusoid itself, not the MLP's output.
        e_BTD = time_features(t, c.width, c.dtype)
        e_BTD = pin_tokens(mesh, e_BTD)
        shared_BTP = self.time_out(jax.nn.silu(self.time_in(e_BTD, mesh)), mesh)
        time_BTD = self.time_norm(e_BTD)

        # Step 9.
        angles_LK = rope_angles(grid, c.head_width, c.rope_ratios, at_least_float32(c.dtype))
        return tokens_BTLD, (time_BTD, shared_BTP, text_BSD), angles_LK

    def unpatchify(self, y_BTLD: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Step 11: (p_h p_w C) -> C (H p_h) (W p_w), the channel *fastest*: not the inverse of step 2."""
        B, C, T, H, W = shape
        _, p_h, p_w = self.config.patch
        y = y_BTLD.reshape(B, T, H // p_h, W // p_w, p_h, p_w, C)
        return y.transpose(0, 6, 1, 2, 4, 3, 5).reshape(shape)
