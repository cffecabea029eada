"""The Wan2.1 video autoencoder: 8x8 pixels and 4 frames to one latent cell of 16 channels, causal in time.

Written to `specs/cosmos.md` section 5. Every layer sees the present and past frames only, so that a clip may be run in
one piece or chunk by chunk, each chunk with the frames its causal layers remember of the one before (`Past`): the same
numbers, in memory that does not grow with the clip. The first frame is a chunk of its own (an image is a clip of one
frame); later chunks are 4 frames, or one latent frame.

Inside, tensors are channels-last, (B, T, H, W, C); videos and latents at the edge are (B, C, T, H, W).

Dims: B batch, T frame, H W rows and columns, C channel.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from ddrl_jax.models.layers import Linear, at_least_float32
from ddrl_jax.parallel.attention import attention

# Per-channel statistics of the published autoencoder's latents (`specs/cosmos.md` section 5).
LATENTS_MEAN = (
    *(-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508),
    *(0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921),
)
LATENTS_STD = (
    *(2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743),
    *(3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160),
)


@dataclasses.dataclass(frozen=True)
class WanVAEConfig:
    """Sizes and dtypes of a Wan autoencoder; the defaults are the published one's.

    Attributes:
      dim: channels after the first convolution.
      z_dim: latent channels.
      dim_mult: channels of every level over `dim`; between two levels H and W are halved.
      num_res_blocks: residual blocks a level of the encoder; the decoder has one more.
      temporal_downsample: for every pair of levels, whether T is halved too.
      latents_mean: subtracted from the latents, one a channel.
      latents_std: the latents are divided by it, one a channel, > 0.
      dtype: what the network computes in; norms, attention weights and the latents' statistics are float32 at least.
      param_dtype: what the parameters are kept in.
    """

    dim: int = 96
    z_dim: int = 16
    dim_mult: tuple[int, ...] = (1, 2, 4, 4)
    num_res_blocks: int = 2
    temporal_downsample: tuple[bool, ...] = (False, True, True)
    latents_mean: tuple[float, ...] = LATENTS_MEAN
    latents_std: tuple[float, ...] = LATENTS_STD
    dtype: str = "float32"
    param_dtype: str = "float32"

    def __post_init__(self) -> None:
        # Names and tuples, so that a config is hashable, compares by value and survives JSON.
        for name in ("dtype", "param_dtype"):
            object.__setattr__(self, name, jnp.dtype(getattr(self, name)).name)
        for name in ("dim_mult", "temporal_downsample", "latents_mean", "latents_std"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in ("dim", "z_dim", "num_res_blocks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not self.dim_mult or min(self.dim_mult) < 1:
            raise ValueError(f"dim_mult is {self.dim_mult}; it needs one factor a level, each at least 1")
        if len(self.temporal_downsample) != len(self.dim_mult) - 1:
            raise ValueError(
                f"temporal_downsample is {self.temporal_downsample}; it needs one entry for each of the "
                f"{len(self.dim_mult) - 1} pairs of levels"
            )
        if any(width % 2 for width in self.widths[1:]):
            raise ValueError(
                f"dim x dim_mult is {self.widths}; all but the first must be even, up-sampling halves them"
            )
        for name in ("latents_mean", "latents_std"):
            if len(getattr(self, name)) != self.z_dim:
                raise ValueError(f"{name} has {len(getattr(self, name))} entries; it needs z_dim = {self.z_dim}")
        if not min(self.latents_std) > 0:
            raise ValueError(f"latents_std is {self.latents_std}; all of it must be above 0")

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels of every level."""
        return tuple(self.dim * factor for factor in self.dim_mult)

    @property
    def spatial(self) -> int:
        """Pixels a latent cell along H and along W: 8."""
        return 2 ** len(self.temporal_downsample)

    @property
    def temporal(self) -> int:
        """Frames a latent frame: 4; the first frame is a latent frame of its own."""
        return 2 ** sum(self.temporal_downsample)

    def latent_shape(self, video: Sequence[int]) -> tuple[int, int, int, int]:
        """(C, T, H, W) of a video -> (z_dim, t, h, w) of its latent. ValueError: T is not 4k+1, H or W not 8k."""
        C, T, H, W = video
        s, r = self.spatial, self.temporal
        if C != 3:
            raise ValueError(f"video has {C} channels; it must have 3")
        if T < 1 or (T - 1) % r:
            raise ValueError(
                f"video has {T} frames; it must have {r}k+1, as {(T - 1) // r * r + 1} or {T + -(T - 1) % r}"
            )
        if min(H, W) < s or H % s or W % s:
            raise ValueError(f"video is {H} x {W}; both must be multiples of {s}")
        return self.z_dim, (T - 1) // r + 1, H // s, W // s

    def video_shape(self, latent: Sequence[int]) -> tuple[int, int, int, int]:
        """(z_dim, t, h, w) of a latent -> (3, T, H, W) of its video."""
        C, T, H, W = latent
        if self.z_dim != C or min(T, H, W) < 1:
            raise ValueError(f"latent is (C,T,H,W) = {(C, T, H, W)}; C must be {self.z_dim}, the others at least 1")
        return 3, (T - 1) * self.temporal + 1, H * self.spatial, W * self.spatial


class Past:
    """What the causal layers remember of the chunks before, in the order in which the layers run.

    `first` says that there is no chunk before. `kept` is what the chunk after this one starts from.
    """

    def __init__(self, before: Sequence[jax.Array] | None = None):
        self.first = before is None
        self._before = iter(before or ())
        self.kept: list[jax.Array] = []

    def join(self, x_BTHWC: jax.Array, frames: int) -> jax.Array:
        """x behind the last `frames` frames before it; behind frames of zeros at the start of the clip."""
        if self.first:
            before = jnp.zeros_like(x_BTHWC, shape=(x_BTHWC.shape[0], frames, *x_BTHWC.shape[2:]))
        else:
            before = next(self._before)
        joined = jnp.concatenate([before, x_BTHWC], axis=1)
        self.kept.append(joined[:, -frames:])
        return joined

    def join_later(self, x_BTHWC: jax.Array) -> jax.Array:
        """x behind the last frame before it; x alone at the start of the clip."""
        self.kept.append(x_BTHWC[:, -1:])
        return x_BTHWC if self.first else jnp.concatenate([next(self._before), x_BTHWC], axis=1)


class Conv(nnx.Module):
    """A convolution with bias over the last axes but one of (N, *spatial, C), kernel (*size, d_in, d_out)."""

    def __init__(
        self,
        d_in: int,
        d_out: int,
        size: tuple[int, ...],
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
        param_dtype: DTypeLike,
        strides: tuple[int, ...] | None = None,
        padding: Sequence[tuple[int, int]],
    ):
        self.dtype = jnp.dtype(dtype).name
        self.strides = strides or (1,) * len(size)
        self.padding = tuple(padding)
        init = nnx.initializers.truncated_normal((d_in * math.prod(size)) ** -0.5, lower=-3.0, upper=3.0)
        self.kernel = nnx.Param(init(rngs.params(), (*size, d_in, d_out), param_dtype))
        self.bias = nnx.Param(jnp.zeros((d_out,), param_dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        """(N, *spatial, d_in) -> (N, *spatial', d_out) in `dtype`."""
        axes = "DHW"[3 - len(self.strides) :]
        y = jax.lax.conv_general_dilated(
            x.astype(self.dtype),
            self.kernel[...].astype(self.dtype),
            self.strides,
            self.padding,
            dimension_numbers=(f"N{axes}C", f"{axes}IO", f"N{axes}C"),
        )
        return y + self.bias[...].astype(self.dtype)


def _per_frame(conv: Conv, x_BTHWC: jax.Array) -> jax.Array:
    """A two-dimensional convolution on every frame."""
    B, T, H, W, C = x_BTHWC.shape
    y = conv(x_BTHWC.reshape(B * T, H, W, C))
    return y.reshape(B, T, *y.shape[1:])


def _conv3(d_in: int, d_out: int, **kwargs) -> Conv:
    """3x3x3, padded at the borders of the frames; `_causal` puts the past before it."""
    return Conv(d_in, d_out, (3, 3, 3), padding=((0, 0), (1, 1), (1, 1)), **kwargs)


def _causal(conv: Conv, x_BTHWC: jax.Array, past: Past) -> jax.Array:
    """A convolution over a frame and the two before it."""
    return conv(past.join(x_BTHWC, 2))


class ChannelNorm(nnx.Module):
    """x / |x| sqrt(C) scale, |x| the length over channels, at least 1e-12; in float32 at least."""

    def __init__(self, width: int, *, dtype: DTypeLike, param_dtype: DTypeLike):
        self.dtype = jnp.dtype(dtype).name
        self.scale = nnx.Param(jnp.ones((width,), param_dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        """(..., width) -> the same shape in `dtype`."""
        wide = at_least_float32(self.dtype)
        x = x.astype(wide)
        inverse = jax.lax.rsqrt(jnp.maximum(jnp.sum(jnp.square(x), axis=-1, keepdims=True), 1e-24))
        return (x * inverse * (x.shape[-1] ** 0.5 * self.scale[...].astype(wide))).astype(self.dtype)


class ResidualBlock(nnx.Module):
    """conv(SiLU(norm(conv(SiLU(norm(x)))))) + x, x through a pointwise product where the width changes."""

    def __init__(self, d_in: int, d_out: int, *, rngs: nnx.Rngs, **dtypes):
        self.norm1 = ChannelNorm(d_in, **dtypes)
        self.conv1 = _conv3(d_in, d_out, rngs=rngs, **dtypes)
        self.norm2 = ChannelNorm(d_out, **dtypes)
        self.conv2 = _conv3(d_out, d_out, rngs=rngs, **dtypes)
        self.shortcut = Linear(d_in, d_out, rngs=rngs, bias=True, **dtypes) if d_in != d_out else None

    def __call__(self, x_BTHWC: jax.Array, past: Past) -> jax.Array:
        """(B,T,H,W,d_in) -> (B,T,H,W,d_out)."""
        h = _causal(self.conv1, jax.nn.silu(self.norm1(x_BTHWC)), past)
        h = _causal(self.conv2, jax.nn.silu(self.norm2(h)), past)
        return h + (x_BTHWC if self.shortcut is None else self.shortcut(x_BTHWC))


class FrameAttention(nnx.Module):
    """x + proj(attention(qkv(norm(x)))): one head, every frame by itself."""

    def __init__(self, width: int, *, rngs: nnx.Rngs, **dtypes):
        self.norm = ChannelNorm(width, **dtypes)
        self.qkv = Linear(width, 3 * width, rngs=rngs, bias=True, **dtypes)
        self.proj = Linear(width, width, rngs=rngs, bias=True, **dtypes)

    def __call__(self, x_BTHWC: jax.Array, past: Past) -> jax.Array:
        """(B,T,H,W,C) -> the same."""
        del past
        B, T, H, W, C = x_BTHWC.shape
        qkv = self.qkv(self.norm(x_BTHWC)).reshape(B, T, H * W, 1, 3 * C)

        def one_frame(qkv_BLNK):
            return attention(*jnp.split(qkv_BLNK, 3, axis=-1), kind="xla")

        # One frame at a time: at 720p the weights of a single one are 14400^2, 0.8 GB in float32.
        y = jnp.moveaxis(jax.lax.map(one_frame, jnp.moveaxis(qkv, 1, 0)), 0, 1)
        return x_BTHWC + self.proj(y.reshape(x_BTHWC.shape))


class Downsample(nnx.Module):
    """Halves H and W: padded by one on the right and below, 3x3 with stride 2. Then T, if `time` is asked for.

    In time the first frame passes through, and a convolution over 3 frames with stride 2 and no padding makes the
    others: [x0, f(x0,x1,x2), f(x2,x3,x4), ...].
    """

    def __init__(self, width: int, *, temporal: bool, rngs: nnx.Rngs, **dtypes):
        space: dict[str, Any] = {"strides": (2, 2), "padding": ((0, 1), (0, 1))}
        time: dict[str, Any] = {"strides": (2, 1, 1), "padding": ((0, 0),) * 3}
        self.space = Conv(width, width, (3, 3), rngs=rngs, **space, **dtypes)
        self.time = Conv(width, width, (3, 1, 1), rngs=rngs, **time, **dtypes) if temporal else None

    def __call__(self, x_BTHWC: jax.Array, past: Past) -> jax.Array:
        """(B,T,H,W,C) -> (B,T',H/2,W/2,C), T' = T, or (T+1)/2 at the start of a clip and T/2 after it."""
        x = _per_frame(self.space, x_BTHWC)
        if self.time is None:
            return x
        joined = past.join_later(x)
        parts = [x[:, :1]] if past.first else []
        if joined.shape[1] >= 3:
            parts.append(self.time(joined))
        return jnp.concatenate(parts, axis=1)


class Upsample(nnx.Module):
    """Doubles T, if `temporal`, then H and W: every pixel twice, then 3x3 to half the channels.

    In time the first frame passes through. A causal convolution that never sees it (before the second frame it has
    zeros) makes twice the channels of the others: one half for the first, one for the second of two frames.
    """

    def __init__(self, width: int, *, temporal: bool, rngs: nnx.Rngs, **dtypes):
        self.space = Conv(width, width // 2, (3, 3), padding=((1, 1), (1, 1)), rngs=rngs, **dtypes)
        time = (3, 1, 1)
        self.time = Conv(width, 2 * width, time, padding=((0, 0),) * 3, rngs=rngs, **dtypes) if temporal else None

    def __call__(self, x_BTHWC: jax.Array, past: Past) -> jax.Array:
        """(B,T,H,W,C) -> (B,T',2H,2W,C/2), T' = T, or 2T-1 at the start of a clip and 2T after it."""
        x = x_BTHWC
        if self.time is not None:
            parts, later = ([x[:, :1]], x[:, 1:]) if past.first else ([], x)
            joined = past.join(later, 2)
            if joined.shape[1] >= 3:
                B, T, H, W, C = later.shape
                pairs = self.time(joined).reshape(B, T, H, W, 2, C)
                parts.append(jnp.moveaxis(pairs, 4, 2).reshape(B, 2 * T, H, W, C))
            x = jnp.concatenate(parts, axis=1)
        B, T, H, W, C = x.shape
        x = jnp.broadcast_to(x[:, :, :, None, :, None], (B, T, H, 2, W, 2, C)).reshape(B, T, 2 * H, 2 * W, C)
        return _per_frame(self.space, x)


def _middle(width: int, *, rngs: nnx.Rngs, **dtypes) -> nnx.List:
    return nnx.List(
        [
            ResidualBlock(width, width, rngs=rngs, **dtypes),
            FrameAttention(width, rngs=rngs, **dtypes),
            ResidualBlock(width, width, rngs=rngs, **dtypes),
        ]
    )


class Encoder(nnx.Module):
    """Video to the mean and log variance of the latent, before the last pointwise product."""

    def __init__(self, config: WanVAEConfig, *, rngs: nnx.Rngs):
        c = config
        dtypes: dict[str, Any] = {"rngs": rngs, "dtype": c.dtype, "param_dtype": c.param_dtype}
        self.conv_in = _conv3(3, c.dim, **dtypes)
        down: list[nnx.Module] = []
        d_in = c.dim
        for level, width in enumerate(c.widths):
            for _ in range(c.num_res_blocks):
                down.append(ResidualBlock(d_in, width, **dtypes))
                d_in = width
            if level < len(c.temporal_downsample):
                down.append(Downsample(width, temporal=c.temporal_downsample[level], **dtypes))
        self.down = nnx.List(down)
        self.middle = _middle(d_in, **dtypes)
        self.norm_out = ChannelNorm(d_in, dtype=c.dtype, param_dtype=c.param_dtype)
        self.conv_out = _conv3(d_in, 2 * c.z_dim, **dtypes)

    def __call__(self, x_BTHWC: jax.Array, past: Past) -> jax.Array:
        """(B,T,H,W,3) -> (B,t,H/8,W/8,2*z_dim)."""
        x = _causal(self.conv_in, x_BTHWC, past)
        for layer in (*self.down, *self.middle):
            x = layer(x, past)
        return _causal(self.conv_out, jax.nn.silu(self.norm_out(x)), past)


class Decoder(nnx.Module):
    """Latent to video: the encoder mirrored, with one residual block more a level."""

    def __init__(self, config: WanVAEConfig, *, rngs: nnx.Rngs):
        c = config
        dtypes: dict[str, Any] = {"rngs": rngs, "dtype": c.dtype, "param_dtype": c.param_dtype}
        widths, temporal = c.widths[::-1], c.temporal_downsample[::-1]
        self.conv_in = _conv3(c.z_dim, widths[0], **dtypes)
        self.middle = _middle(widths[0], **dtypes)
        up: list[nnx.Module] = []
        d_in = widths[0]
        for level, width in enumerate(widths):
            for _ in range(c.num_res_blocks + 1):
                up.append(ResidualBlock(d_in, width, **dtypes))
                d_in = width
            if level < len(temporal):
                up.append(Upsample(width, temporal=temporal[level], **dtypes))
                d_in = width // 2
        self.up = nnx.List(up)
        self.norm_out = ChannelNorm(d_in, dtype=c.dtype, param_dtype=c.param_dtype)
        self.conv_out = _conv3(d_in, 3, **dtypes)

    def __call__(self, x_BTHWC: jax.Array, past: Past) -> jax.Array:
        """(B,t,h,w,z_dim) -> (B,T,8h,8w,3)."""
        x = _causal(self.conv_in, x_BTHWC, past)
        for layer in (*self.middle, *self.up):
            x = layer(x, past)
        return _causal(self.conv_out, jax.nn.silu(self.norm_out(x)), past)


class WanVAE(nnx.Module):
    """Video in [-1, 1] <-> latents of mean 0 and standard deviation 1 a channel (over the published model's data).

    The published sizes have 126,892,531 parameters.
    """

    def __init__(self, config: WanVAEConfig, *, rngs: nnx.Rngs):
        dtypes: dict[str, Any] = {"rngs": rngs, "dtype": config.dtype, "param_dtype": config.param_dtype}
        self.config = config
        self.encoder = Encoder(config, rngs=rngs)
        self.to_moments = Linear(2 * config.z_dim, 2 * config.z_dim, bias=True, **dtypes)
        self.from_latent = Linear(config.z_dim, config.z_dim, bias=True, **dtypes)
        self.decoder = Decoder(config, rngs=rngs)

    def encode(self, video: jax.Array, *, chunked: bool = False) -> jax.Array:
        """The normalised mean of the latent.

        Args:
          video: (B, 3, T, H, W) in [-1, 1], any float dtype; T = 4k+1 (1: an image), H and W multiples of 8.
          chunked: one frame, then 4 at a time: the same result with the memory of 4 frames, and a program of the size
            of two chunks for any T.

        Returns:
          (mean - latents_mean) / latents_std, (B, z_dim, 1 + (T-1)/4, H/8, W/8), float32 at least.

        Raises:
          ValueError: a size that does not fit; no frame is ever dropped.
        """
        chex.assert_rank(video, 5)
        c = self.config
        c.latent_shape(video.shape[1:])

        def chunk(video_BCTHW, past):
            moments = self.to_moments(self.encoder(jnp.moveaxis(video_BCTHW, 1, -1), past))
            mean = moments[..., : c.z_dim].astype(at_least_float32(c.dtype))
            return jnp.moveaxis((mean - self._statistic("latents_mean")) / self._statistic("latents_std"), -1, 1)

        return _over_time(chunk, jnp.asarray(video), c.temporal) if chunked else chunk(jnp.asarray(video), Past())

    def decode(
        self, latent: jax.Array, *, chunked: bool = False, tile: int = 0, overlap: int | None = None
    ) -> jax.Array:
        """The video of a latent, not clamped to [-1, 1].

        Args:
          latent: (B, z_dim, t, h, w) as `encode` gives it, any float dtype.
          chunked: one latent frame at a time: the same result with the memory of 4 frames, and a program of the size
            of two chunks for any t.
          tile: decode squares of this many latent rows and columns one after another and blend where they overlap;
            0: the whole frame at once. An approximation near the seams: the convolutions see zeros behind a tile's
            border and the middle attention sees the tile only. Exactly the untiled video where one tile covers all.
          overlap: latent rows and columns that neighbouring tiles share at least; None: a quarter of `tile`. Within
            the shared part weights run linearly from one tile to the next.

        Returns:
          (B, 3, 1 + 4(t-1), 8h, 8w), float32 at least.

        Raises:
          ValueError: a size that does not fit.
        """
        chex.assert_rank(latent, 5)
        c = self.config
        shape = c.video_shape(latent.shape[1:])

        def chunk(latent_BCTHW, past):
            z = jnp.moveaxis(latent_BCTHW, 1, -1).astype(at_least_float32(c.dtype))
            z = z * self._statistic("latents_std") + self._statistic("latents_mean")
            return jnp.moveaxis(self.decoder(self.from_latent(z), past), -1, 1).astype(at_least_float32(c.dtype))

        def whole_tile(latent_BCTHW):
            return _over_time(chunk, latent_BCTHW, 1) if chunked else chunk(latent_BCTHW, Past())

        latent = jnp.asarray(latent)
        if tile == 0:
            return whole_tile(latent)
        return _over_tiles(whole_tile, latent, shape, tile, tile // 4 if overlap is None else overlap)

    def _statistic(self, name: str) -> jax.Array:
        return jnp.asarray(getattr(self.config, name), at_least_float32(self.config.dtype))


def _over_time(chunk: Callable[[jax.Array, Past], jax.Array], x_BCTHW: jax.Array, frames: int) -> jax.Array:
    """`chunk` on the first frame, then on `frames` at a time in a scan that carries what the causal layers keep."""
    T = x_BCTHW.shape[2]
    past = Past()
    first = chunk(x_BCTHW[:, :, :1], past)
    if T == 1:
        return first

    def step(kept, start):
        past = Past(kept)
        y = chunk(jax.lax.dynamic_slice_in_dim(x_BCTHW, start, frames, axis=2), past)
        return past.kept, y

    _, later_KBCTHW = jax.lax.scan(step, past.kept, jnp.arange(1, T, frames))
    later = jnp.moveaxis(later_KBCTHW, 0, 2)
    return jnp.concatenate([first, later.reshape(*later.shape[:2], -1, *later.shape[4:])], axis=2)


def tile_windows(size: int, tile: int, overlap: int, scale: int) -> tuple[np.ndarray, np.ndarray]:
    """Where the tiles of an axis start, and with what weight each of their pixels counts.

    Tiles are spread evenly and share at least `overlap` cells with their neighbours; over a shared part the weights run
    linearly from one tile to the other, and at every pixel all tiles' weights add up to 1.

    Args:
      size: cells of the axis.
      tile: cells a tile, at most `size`.
      overlap: cells shared at least, under `tile`.
      scale: pixels a cell.

    Returns:
      starts (N,) in cells and weights (N, tile*scale), float64.
    """
    count = 1 if tile >= size else 1 + -(-(size - tile) // (tile - overlap))
    starts = np.round(np.linspace(0, size - tile, count)).astype(np.int64)
    weights = np.ones((count, tile * scale))
    total = np.zeros(size * scale)
    for n, start in enumerate(starts):
        pixel = np.arange(tile * scale) + 0.5
        if n > 0:
            weights[n] *= np.clip(pixel / max((starts[n - 1] + tile - start) * scale, 1), 0, 1)
        if n < count - 1:
            weights[n] *= np.clip((tile * scale - pixel) / max((start + tile - starts[n + 1]) * scale, 1), 0, 1)
        total[start * scale : (start + tile) * scale] += weights[n]
    for n, start in enumerate(starts):
        weights[n] /= total[start * scale : (start + tile) * scale]
    return starts, weights


def _over_tiles(
    decode: Callable[[jax.Array], jax.Array], latent_BCTHW: jax.Array, shape: Sequence[int], tile: int, overlap: int
) -> jax.Array:
    """`decode` of square tiles, one after another in a scan, blended into a video of (B, *shape)."""
    if tile < 1 or not 0 <= overlap < tile:
        raise ValueError(f"tile is {tile} and overlap {overlap}; tile must be at least 1, overlap from 0 to tile-1")
    B, C, T, h, w = latent_BCTHW.shape
    rows, columns = min(tile, h), min(tile, w)
    if (rows, columns) == (h, w):
        return decode(latent_BCTHW)
    scale = shape[-1] // w
    # A side shorter than a tile is covered by one; the overlap is under `rows` wherever there is more than one.
    row_starts, row_weights = tile_windows(h, rows, overlap, scale)
    column_starts, column_weights = tile_windows(w, columns, overlap, scale)
    i, j = (axis.ravel() for axis in np.indices((len(row_starts), len(column_starts))))
    wide = jax.eval_shape(decode, latent_BCTHW[..., :rows, :columns]).dtype

    def step(video, where):
        row, column, row_weight, column_weight = where
        z = jax.lax.dynamic_slice(latent_BCTHW, (0, 0, 0, row, column), (B, C, T, rows, columns))
        y = decode(z) * row_weight[:, None] * column_weight
        at = (0, 0, 0, row * scale, column * scale)
        return jax.lax.dynamic_update_slice(video, jax.lax.dynamic_slice(video, at, y.shape) + y, at), None

    tiles = (
        jnp.asarray(row_starts[i], jnp.int32),
        jnp.asarray(column_starts[j], jnp.int32),
        jnp.asarray(row_weights[i], wide),
        jnp.asarray(column_weights[j], wide),
    )
    video, _ = jax.lax.scan(step, jnp.zeros((B, *shape), wide), tiles)
    return video
