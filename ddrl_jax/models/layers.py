"""The layers the networks share. Flax NNX modules that know their own width and dtype and nothing of any one model.

`dtype` is what a layer computes in; its parameters are kept in `param_dtype` and cast on use. Normalisations, rotary
angles and time features are computed in float32 even where `dtype` is bfloat16 (and in float64 where it is float64).

Dims: B batch, T frame, L token, N head, K head width, D width.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from ddrl_jax.parallel.mesh import product


def at_least_float32(dtype: DTypeLike) -> jnp.dtype:
    """float32 for the narrower float dtypes, `dtype` itself for float32 and float64."""
    return jnp.promote_types(dtype, jnp.float32)


# For functions of one element or one row: the backward pass computes them again from their input instead of keeping
# their intermediate results, which are several times as large and slower to write and read back than to compute.
_recompute = functools.partial(jax.checkpoint, prevent_cse=False)


class Linear(nnx.Module):
    """x @ kernel (+ bias), kernel (d_in, d_out).

    Starts from a normal cut at three standard deviations of 1/sqrt(d_in), or from zero.
    """

    def __init__(
        self,
        d_in: int,
        d_out: int,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
        param_dtype: DTypeLike,
        bias: bool = False,
        zero: bool = False,
    ):
        self.dtype = jnp.dtype(dtype).name
        normal = nnx.initializers.truncated_normal(d_in**-0.5, lower=-3.0, upper=3.0)
        init = nnx.initializers.zeros if zero else normal
        self.kernel = nnx.Param(init(rngs.params(), (d_in, d_out), param_dtype))
        self.bias = nnx.Param(jnp.zeros((d_out,), param_dtype)) if bias else None

    def __call__(self, x: jax.Array, mesh: Mesh | None = None, gather: bool = True) -> jax.Array:
        """(..., d_in) -> (..., d_out) in `dtype`; mesh and gather: see `parallel.mesh.product`."""
        x = x.astype(self.dtype)
        if mesh is not None:
            y = product(x, self.kernel[...], mesh, gather)
        else:
            # Rows in one axis: see `product`.
            y = x.reshape(-1, x.shape[-1]) @ self.kernel[...].astype(self.dtype)
            y = y.reshape(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias[...].astype(self.dtype)


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * scale over the last axis (Zhang & Sennrich 2019)."""

    def __init__(self, width: int, *, dtype: DTypeLike, param_dtype: DTypeLike, eps: float = 1e-6):
        self.dtype = jnp.dtype(dtype).name
        self.eps = eps
        self.scale = nnx.Param(jnp.ones((width,), param_dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        """(..., width) -> the same shape in `dtype`; computed in float32 at least."""
        wide = at_least_float32(self.dtype)

        @_recompute
        def normalise(x, scale):
            x = x.astype(wide)
            inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.eps)
            return (x * inverse * scale.astype(wide)).astype(self.dtype)

        return normalise(x, self.scale[...])


@jax.custom_vjp
def modulated_norm(x: jax.Array, shift: jax.Array, scale: jax.Array) -> jax.Array:
    """LN(x) (1 + scale) + shift over the last axis, LN without an affine part and with eps 1e-6.

    shift and scale broadcast against x, axis by axis. Computed in float32 at least; returns x's dtype. The backward
    pass is written out: it keeps the arguments alone, and its sums of products are `_inner`'s.
    """
    wide = at_least_float32(x.dtype)
    return (_normalised(x)[0] * (1 + scale.astype(wide)) + shift.astype(wide)).astype(x.dtype)


def _normalised(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """LN(x) and 1/sqrt(variance + eps)."""
    y = x.astype(at_least_float32(x.dtype))
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + 1e-6)
    return y * inverse, inverse


def _modulated_norm_forward(x: jax.Array, shift: jax.Array, scale: jax.Array) -> tuple[jax.Array, Any]:
    return modulated_norm(x, shift, scale), (x, shift, scale)


def _modulated_norm_backward(kept: Any, dy: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    x, shift, scale = kept
    wide = at_least_float32(x.dtype)
    normal, inverse = _normalised(x)
    dy = dy.astype(wide)
    dnormal = dy * (1 + scale.astype(wide))
    last = (x.ndim - 1,)
    # d LN(x) = (d - mean(d) - LN(x) mean(d LN(x))) / sqrt(variance + eps)
    along = _inner(dnormal, normal, last) / x.shape[-1]
    dx = inverse * (dnormal - jnp.mean(dnormal, axis=-1, keepdims=True) - normal * along)
    dshift = jnp.sum(dy, _broadcast_axes(shift, x), keepdims=True).astype(shift.dtype)
    dscale = _inner(dy, normal, _broadcast_axes(scale, x)).astype(scale.dtype)
    return dx.astype(x.dtype), dshift.reshape(shift.shape), dscale.reshape(scale.shape)


modulated_norm.defvjp(_modulated_norm_forward, _modulated_norm_backward)


def _broadcast_axes(small: jax.Array, x: jax.Array) -> tuple[int, ...]:
    """The axes of x along which `small` is repeated."""
    shape = (1,) * (x.ndim - small.ndim) + small.shape
    return tuple(a for a in range(x.ndim) if shape[a] == 1 and x.shape[a] > 1)


def _inner(a: jax.Array, b: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """sum(a b) over axes, which stay with size 1.

    A product without rows and columns on CPU: XLA takes a sum over something computed element by element there, ten
    times as long.
    """
    kept = tuple(n for n in range(a.ndim) if n not in axes)

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        y = jax.lax.dot_general(a, b, ((axes, axes), (kept, kept)))
        return jnp.expand_dims(y, axes)

    def sum_of_products(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.sum(a * b, axes, keepdims=True)

    return jax.lax.platform_dependent(a, b, cpu=product, default=sum_of_products)


@_recompute
def gelu(x: jax.Array) -> jax.Array:
    """x Phi(x), the exact form with erf (Hendrycks & Gimpel 2016)."""
    return jax.nn.gelu(x, approximate=False)


def time_features(t: jax.Array, width: int, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """[cos(t w), sin(t w)], cosine first, w_i = 10000^(-i / (width/2)): t (...) -> (..., width).

    Computed in `dtype`, float32 at least: bfloat16 turns t = 0.9991 into 1.
    """
    wide = at_least_float32(dtype)
    half = width // 2
    frequency = np.exp(-math.log(1e4) * np.arange(half, dtype=np.float64) / half)
    angle = t.astype(wide)[..., None] * jnp.asarray(frequency, wide)
    return jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=-1)


def rope_angles(
    grid: tuple[int, int, int],
    head_width: int,
    ratios: tuple[float, float, float],
    dtype: DTypeLike = jnp.float32,
) -> jax.Array:
    """Angles of the three-axis rotary embedding (RoFormer, Su et al. 2021, with Cosmos-Predict2.5's split over axes).

    The head's K/2 frequencies go to t, h, w in this order: d_h = d_w = 2*(K//6), d_t the rest; axis a turns with
    theta_a = 1e4 * r_a^(d_a/(d_a-2)), the NTK rule for a context r_a times as long.

    Args:
      grid: (T, H, W), the token grid.
      head_width: K, even and at least 12, so that no axis has the single frequency for which the rule has no value.
      ratios: r of (t, h, w).
      dtype: of the result; float32 at least.

    Returns:
      (T*H*W, K/2) radians, t slowest. `rotate` uses them for both halves of the head.

    Raises:
      ValueError: head_width is odd or under 12.
    """
    if head_width % 2 or head_width < 12:
        raise ValueError(f"head width is {head_width}; the 3-axis rotary embedding needs an even one >= 12")
    wide = at_least_float32(dtype)
    d_hw = 2 * (head_width // 6)
    parts = []
    for axis, d in enumerate((head_width - 2 * d_hw, d_hw, d_hw)):
        theta = 1e4 * ratios[axis] ** (d / (d - 2))
        frequency = theta ** (-np.arange(0, d, 2, dtype=np.float64) / d)
        angle = np.arange(grid[axis], dtype=np.float64)[:, None] * frequency
        shape = [1, 1, 1, d // 2]
        shape[axis] = grid[axis]
        # One small constant an axis, widened by the compiler: at 86,400 tokens a whole table would bloat the program.
        parts.append(jnp.broadcast_to(jnp.asarray(angle.reshape(shape), wide), (*grid, d // 2)))
    return jnp.concatenate(parts, axis=-1).reshape(-1, head_width // 2)


def rotate(x_BLNK: jax.Array, angles_LK: jax.Array) -> jax.Array:
    """Turns the pairs (x_i, x_{i+K/2}) by their token's angles (rotate-half, not interleaved).

    Args:
      x_BLNK: (B, L, N, K).
      angles_LK: (L, K/2) from `rope_angles`; their dtype is the one the turn is computed in.

    Returns:
      x's shape and dtype.
    """
    cos, sin = jnp.cos(angles_LK)[:, None, :], jnp.sin(angles_LK)[:, None, :]
    a, b = jnp.split(x_BLNK.astype(angles_LK.dtype), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BLNK.dtype)
