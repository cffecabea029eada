"""The attention every transformer here calls, in the form that suits the hardware, and its layout over devices.

Knows nothing of models: queries, keys and values in, weighted values out. Three forms of the same function: cuDNN's
flash attention on NVIDIA, Pallas' splash attention on TPU, and XLA's own anywhere else: two products around a softmax,
taken a block of queries at a time where the logits of all are too many, as at a video's 86,400 tokens.

Where a sequence is cut over the mesh's `context` axis, attention needs all of it: `to_heads` exchanges tokens for heads
in one all-to-all and `to_tokens` exchanges them back (DeepSpeed-Ulysses, arXiv 2309.14509), so that every device
attends with some of the heads.

Dims: B batch, T frame, H token of a frame, L query token, S key token, N head, K head width, X block of queries.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ddrl_jax.parallel.mesh import batch_spec, sequence_axis

KINDS = ("auto", "xla", "cudnn", "splash")
# The name under which the forms that have a backward pass of their own keep their result and its log-sum-exp.
SAVED = "attention"
# Most logits of one sample at once: 192 of 86,400 queries with Cosmos-2B's 16 heads. A device holds that much for each
# of the samples that it has of the batch.
LOGITS_BYTES = 1 << 30
# On CPU, most logits of a device at once: the passes of a softmax over what left the cache cost more than the products.
CACHE_BYTES = 4 << 20
# But no fewer queries than this: the products of fewer are slow.
CACHE_QUERIES = 32


def attention(
    q_BLNK: jax.Array,
    k_BSNK: jax.Array,
    v_BSNK: jax.Array,
    *,
    kind: str = "auto",
    mesh: Mesh | None = None,
) -> jax.Array:
    """Softmax attention without a mask: softmax(q k^T / sqrt(K)) v (Vaswani et al. 2017, Eq. 1).

    Args:
      q_BLNK: queries (B, L, N, K), any float dtype.
      k_BSNK: keys (B, S, N, K), the queries' dtype.
      v_BSNK: values (B, S, N, K), the queries' dtype.
      kind: "xla", "cudnn" (16-bit floats, head width a multiple of 8 up to 128), "splash" (lengths that are multiples
        of 128), or "auto": the mesh's platform's own where it takes these arrays, else "xla".
      mesh: B is cut over its replica x fsdp and N over its context; None: one device.

    Returns:
      (B, L, N, K) in the queries' dtype. The logits and the softmax are float32, or float64 for float64 input.

    Raises:
      ValueError: a form that does not take these arrays.
    """
    chex.assert_rank([q_BLNK, k_BSNK, v_BSNK], 4)
    form = _form(kind, mesh, q_BLNK, k_BSNK)
    if mesh is None or mesh.size == 1:
        return form(q_BLNK, k_BSNK, v_BSNK)
    heads = P(batch_spec(mesh, q_BLNK.shape[0]), None, "context")
    return jax.shard_map(
        form, mesh=mesh, in_specs=(heads, heads, heads), out_specs=heads, check_vma=False
    )(q_BLNK, k_BSNK, v_BSNK)  # fmt: skip


def attention_to_text(
    q_BTHNK: jax.Array, k_BSNK: jax.Array, v_BSNK: jax.Array, *, kind: str = "auto", mesh: Mesh | None = None
) -> jax.Array:
    """`attention` of a video's tokens (B,T,H,N,K), which stay cut over context as they are, to keys and values that
    every device has whole. Returns queries' shape and dtype."""
    B, T, H, N, K = q_BTHNK.shape
    rows = None if mesh is None else batch_spec(mesh, B)
    axis = None if mesh is None else sequence_axis(mesh, T, H)
    here = (T * H if axis is None or mesh is None else T * H // mesh.shape["context"], N, K)
    form = _form(kind, mesh, jax.ShapeDtypeStruct((B, *here), q_BTHNK.dtype), k_BSNK)

    def local(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return form(q.reshape(q.shape[0], -1, N, K), k, v).reshape(q.shape)

    if mesh is None or mesh.size == 1:
        return local(q_BTHNK, k_BSNK, v_BSNK)
    # An axis that no spec names is summed over on the way back, even one of size 1: then heads name it.
    queries = P(rows, *("context" if a == (axis or 3) else None for a in (1, 2, 3)))
    text = P(rows, None, None if axis else "context")
    return jax.shard_map(
        local, mesh=mesh, in_specs=(queries, text, text), out_specs=queries, check_vma=False
    )(q_BTHNK, k_BSNK, v_BSNK)  # fmt: skip


def resolve(kind: str, mesh: Mesh | None, q_BLNK: Any, k_BSNK: Any) -> str:
    """The form that `kind` stands for with these arrays or their shapes. Raises ValueError where it takes them not."""
    platform = _platform(mesh)
    L, (_, S, _, K), dtype = q_BLNK.shape[1], k_BSNK.shape, jnp.dtype(q_BLNK.dtype)
    fits = {
        "cudnn": dtype in (jnp.bfloat16, jnp.float16) and K % 8 == 0 and K <= 128,
        "splash": L % 128 == 0 and S % 128 == 0 and K % 128 == 0,
    }
    if kind == "auto":
        own = {"gpu": "cudnn", "cuda": "cudnn", "tpu": "splash"}.get(platform, "xla")
        return own if fits.get(own) else "xla"
    if kind == "xla":
        return kind
    needs, platforms = {
        "cudnn": ("16-bit floats and a head width that is a multiple of 8, at most 128", ("gpu", "cuda")),
        "splash": ("lengths and a head width that are multiples of 128", ("tpu",)),
    }[kind]
    if not fits[kind]:
        raise ValueError(
            f"attention={kind!r}: needs {needs}; got {dtype.name}, {L} queries, {S} keys, head width {K}: "
            "take auto or xla"
        )
    if platform not in platforms:
        raise ValueError(f"attention={kind!r}: is for {platforms[0]}, not for {platform}: take auto or xla")
    return kind


def _platform(mesh: Mesh | None) -> str:
    return jax.default_backend() if mesh is None else mesh.devices.flat[0].platform


def _form(kind: str, mesh: Mesh | None, q_BLNK: Any, k_BSNK: Any) -> Callable[..., jax.Array]:
    """The function that `kind` stands for with these arrays."""
    name = resolve(kind, mesh, q_BLNK, k_BSNK)
    return functools.partial(_xla, in_cache=True) if name == "xla" and _platform(mesh) == "cpu" else FORMS[name]


def to_heads(x_BTHNK: jax.Array, mesh: Mesh | None) -> jax.Array:
    """(B,T,H,N,K), tokens cut over context -> (B,T*H,N,K), heads cut over context: one all-to-all."""
    axis = _exchanged(mesh, x_BTHNK.shape)
    shape = (x_BTHNK.shape[0], -1, *x_BTHNK.shape[3:])
    if axis is None:
        return x_BTHNK.reshape(shape)
    assert mesh is not None
    spec = [batch_spec(mesh, x_BTHNK.shape[0]), None, None]

    def exchange(x: jax.Array) -> jax.Array:
        x = jax.lax.all_to_all(x, "context", split_axis=3, concat_axis=axis, tiled=True)
        return x.reshape(x.shape[0], -1, *x.shape[3:])

    tokens = P(*(("context" if a == axis else s) for a, s in enumerate(spec)))
    return jax.shard_map(
        exchange, mesh=mesh, in_specs=tokens, out_specs=P(spec[0], None, "context"), check_vma=False
    )(x_BTHNK)  # fmt: skip


def to_tokens(x_BLNK: jax.Array, frames: int, mesh: Mesh | None) -> jax.Array:
    """The way back: (B,T*H,N,K), heads cut over context -> (B,T,H,N*K), tokens cut over context."""
    B, L, N, K = x_BLNK.shape
    axis = _exchanged(mesh, (B, frames, L // frames, N, K))
    if axis is None:
        return x_BLNK.reshape(B, frames, L // frames, N * K)
    assert mesh is not None
    spec = [batch_spec(mesh, B), None, None]

    def exchange(x: jax.Array) -> jax.Array:
        x = x.reshape(x.shape[0], frames, -1, *x.shape[2:])
        x = jax.lax.all_to_all(x, "context", split_axis=axis, concat_axis=3, tiled=True)
        return x.reshape(*x.shape[:3], -1)

    tokens = P(*(("context" if a == axis else s) for a, s in enumerate(spec)))
    return jax.shard_map(
        exchange, mesh=mesh, in_specs=P(spec[0], None, "context"), out_specs=tokens, check_vma=False
    )(x_BLNK)  # fmt: skip


def _exchanged(mesh: Mesh | None, shape: tuple[int, ...]) -> int | None:
    """The axis of tokens that is cut over context; None where it is 1. Raises ValueError where context divides no
    axis of tokens, or not the heads."""
    if mesh is None or mesh.shape["context"] == 1:
        return None
    _, frames, tokens, heads, _ = shape
    if heads % mesh.shape["context"]:
        raise ValueError(f"config.mesh.context={mesh.shape['context']}: must divide the network's {heads} heads")
    return sequence_axis(mesh, frames, tokens)


# ------------------------------------------------------------------------------------------------------------- forms


def _cudnn(q_BLNK: jax.Array, k_BSNK: jax.Array, v_BSNK: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q_BLNK, k_BSNK, v_BSNK, implementation="cudnn")


def saves_cudnn(prim: Any, *avals: Any, **_: Any) -> bool:
    """A checkpoint policy: keeps what the backward pass of cuDNN's self-attention needs of the forward pass.

    Its result has no name inside the operation that makes it, and one given outside does not spare computing it again.
    Only self-attention, whose queries are as many as its keys: attention to a text costs next to nothing again.
    """
    forward = prim.name in ("dot_product_attention_fwd", "dot_product_attention_fwd_wrapper")
    return forward and avals[0].shape[1] == avals[1].shape[1]


def _splash(q_BLNK: jax.Array, k_BSNK: jax.Array, v_BSNK: jax.Array) -> jax.Array:
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    L, (_, S, N, K) = q_BLNK.shape[1], k_BSNK.shape
    # The backward pass writes one part of dq a block of keys, so these are large.
    q_block, kv_block, kv_large = _splash_block(L, 1024), _splash_block(S, 1024), _splash_block(S, 4096)
    kv_part = _splash_block(kv_large, 1280)
    heads = max(n for n in range(1, 5) if N % n == 0)
    kernel = splash.make_splash_mha(
        mask=splash.MultiHeadMask([splash.FullMask((L, S))] * heads),
        block_sizes=splash.BlockSizes(
            block_q=q_block,
            block_kv=kv_block,
            block_kv_compute=kv_block,
            block_q_dkv=q_block,
            block_kv_dkv=kv_large,
            block_kv_dkv_compute=kv_part,
            use_fused_bwd_kernel=True,
        ),
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name=SAVED if L == S else None,
    )
    # A few heads of one sample at a time: several samples would want several times the kernel's memory on the chip, and
    # the parts of dq of all heads gigabytes beside it.
    parts = tuple(jnp.moveaxis(x, 2, 1).reshape(-1, heads, x.shape[1], K) for x in (q_BLNK * K**-0.5, k_BSNK, v_BSNK))
    y = jax.lax.map(lambda part: kernel(*part), parts)
    return jnp.moveaxis(y.reshape(-1, N, L, K), 1, 2)


def _splash_block(length: int, most: int) -> int:
    """The largest multiple of 128 that divides `length` and is at most `most`."""
    return max(n for n in range(128, min(length, most) + 1, 128) if length % n == 0)


def _xla(q_BLNK: jax.Array, k_BSNK: jax.Array, v_BSNK: jax.Array, in_cache: bool = False) -> jax.Array:
    B, L, N, _ = q_BLNK.shape
    query_bytes = N * k_BSNK.shape[1] * jnp.promote_types(q_BLNK.dtype, jnp.float32).itemsize
    block = _block_in_cache(L, query_bytes, B) if in_cache else _block(L, query_bytes)
    return _plain(q_BLNK, k_BSNK, v_BSNK) if block == L else _blocked(q_BLNK, k_BSNK, v_BSNK, block)


FORMS: dict[str, Callable[..., jax.Array]] = {"xla": _xla, "cudnn": _cudnn, "splash": _splash}


def _block(length: int, query_bytes: int) -> int:
    """Queries in a block: the most that divide `length` and have logits within LOGITS_BYTES; at least one."""
    return max(n for n in range(1, length + 1) if length % n == 0 and (n == 1 or n * query_bytes <= LOGITS_BYTES))


def _block_in_cache(length: int, query_bytes: int, rows: int) -> int:
    """As `_block`, but rather so few that the logits of `rows` samples are within CACHE_BYTES."""
    most = _block(length, query_bytes)
    enough = [n for n in range(CACHE_QUERIES, most + 1) if length % n == 0 and n * query_bytes <= LOGITS_BYTES]
    return max((n for n in enough if n * rows * query_bytes <= CACHE_BYTES), default=min(enough, default=most))


def _plain(q_BLNK: jax.Array, k_BSNK: jax.Array, v_BSNK: jax.Array) -> jax.Array:
    weights_BNLS = jax.nn.softmax(_logits(_by_head(q_BLNK), _by_head(k_BSNK)), axis=-1).astype(q_BLNK.dtype)
    return jnp.einsum("bnls,bsnk->blnk", weights_BNLS, v_BSNK)


def _by_head(x_BLNK: jax.Array) -> jax.Array:
    return jnp.moveaxis(x_BLNK, 2, 1)


def _logits(q_BNLK: jax.Array, k_BNSK: jax.Array) -> jax.Array:
    wide = jnp.promote_types(q_BNLK.dtype, jnp.float32)
    logits_BNLS = jnp.einsum("bnlk,bnsk->bnls", q_BNLK, k_BNSK, preferred_element_type=wide)
    return logits_BNLS * q_BNLK.shape[-1] ** -0.5


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _blocked(q_BLNK: jax.Array, k_BSNK: jax.Array, v_BSNK: jax.Array, block: int) -> jax.Array:
    """`_plain`, `block` queries at a time; the backward pass computes their logits again from the log-sum-exp
    (FlashAttention-2, arXiv 2307.08691, algorithms 1 and 2, with the keys in one block).

    All products have heads before tokens and none has a transposed operand with a block's (L, S), which a CPU would
    copy: the gradients of keys and values come as (B,N,K,S)."""
    return _blocked_forward(q_BLNK, k_BSNK, v_BSNK, block)[0]


def _in_blocks(x_BLNK: jax.Array, block: int) -> jax.Array:
    x_XBLNK = jnp.moveaxis(x_BLNK.reshape(x_BLNK.shape[0], -1, block, *x_BLNK.shape[2:]), 1, 0)
    return jnp.moveaxis(x_XBLNK, 3, 2)


def _whole(x_XBNLK: jax.Array) -> jax.Array:
    x = jnp.moveaxis(x_XBNLK, (0, 2), (1, 3))
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _blocked_forward(q_BLNK: jax.Array, k_BSNK: jax.Array, v_BSNK: jax.Array, block: int) -> tuple[jax.Array, Any]:
    dtype, wide = q_BLNK.dtype, jnp.promote_types(q_BLNK.dtype, jnp.float32)
    k_BNSK, v_BNSK = _by_head(k_BSNK), _by_head(v_BSNK)

    def of_block(q_BNLK: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits_BNLS = _logits(q_BNLK, k_BNSK)
        max_BNL = jnp.max(logits_BNLS, axis=-1)
        weights_BNLS = jnp.exp(logits_BNLS - max_BNL[..., None])
        sum_BNL = jnp.sum(weights_BNLS, axis=-1)
        # Divided after the product: one pass over the weights less.
        y = jnp.einsum("bnls,bnsk->bnlk", weights_BNLS.astype(dtype), v_BNSK, preferred_element_type=wide)
        return (y / sum_BNL[..., None]).astype(dtype), max_BNL + jnp.log(sum_BNL)

    y_XBNLK, lse_XBNL = jax.lax.map(of_block, _in_blocks(q_BLNK, block))
    y, lse = _whole(y_XBNLK), _whole(lse_XBNL)
    if q_BLNK.shape[1] == k_BSNK.shape[1]:  # as with cuDNN's, self-attention only
        y, lse = checkpoint_name(y, SAVED), checkpoint_name(lse, SAVED)
    return y, (q_BLNK, k_BSNK, v_BSNK, y, lse)


def _blocked_backward(block: int, kept: Any, dy_BLNK: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    q_BLNK, k_BSNK, v_BSNK, y_BLNK, lse_BLN = kept
    dtype, wide = q_BLNK.dtype, jnp.promote_types(q_BLNK.dtype, jnp.float32)
    scale = q_BLNK.shape[-1] ** -0.5
    k_BNSK, v_BNSK = _by_head(k_BSNK), _by_head(v_BSNK)
    delta_BLN = jnp.sum(y_BLNK.astype(wide) * dy_BLNK.astype(wide), axis=-1)

    def of_block(sums: Any, at: Any) -> tuple[Any, jax.Array]:
        q_BNLK, dy_BNLK, lse_BNL, delta_BNL = at
        weights_BNLS = jnp.exp(_logits(q_BNLK, k_BNSK) - lse_BNL[..., None])
        dweights_BNLS = jnp.einsum("bnlk,bnsk->bnls", dy_BNLK, v_BNSK, preferred_element_type=wide)
        dlogits_BNLS = (weights_BNLS * (dweights_BNLS - delta_BNL[..., None])).astype(dtype)
        # Sums over blocks stay wide: hundreds of them stall in bfloat16.
        dk = jnp.einsum("bnlk,bnls->bnks", q_BNLK, dlogits_BNLS, preferred_element_type=wide)
        dv = jnp.einsum("bnlk,bnls->bnks", dy_BNLK, weights_BNLS.astype(dtype), preferred_element_type=wide)
        dq = jnp.einsum("bnls,bnsk->bnlk", dlogits_BNLS, k_BNSK, preferred_element_type=wide)
        return jax.tree.map(jnp.add, sums, (dk, dv)), (dq * scale).astype(dtype)

    B, N, S, K = k_BNSK.shape
    zeros = jnp.zeros((B, N, K, S), wide)
    items = tuple(_in_blocks(x, block) for x in (q_BLNK, dy_BLNK, lse_BLN, delta_BLN))
    (dk_BNKS, dv_BNKS), dq_XBNLK = jax.lax.scan(of_block, (zeros, zeros), items)
    dk, dv = (jnp.moveaxis(x, 3, 1).astype(dtype) for x in (dk_BNKS * scale, dv_BNKS))
    return _whole(dq_XBNLK), dk, dv


_blocked.defvjp(_blocked_forward, _blocked_backward)
