"""The attention every transformer here calls, in the form that suits the hardware.

Knows nothing of models: queries, keys and values in, weighted values out. The only form so far is XLA's own: two
products around a softmax, with the logits in float32 at least. Where (B, N, L, S) of them would fill the memory, as at
a video's 86,400 tokens, queries are taken a block at a time and their logits computed again in the backward pass.

Dims: B batch, L query token, S key token, N head, K head width.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

LOGITS_BYTES = 4 << 30  # most that is kept at once, over all devices


def attention(q_BLNK: jax.Array, k_BSNK: jax.Array, v_BSNK: jax.Array) -> jax.Array:
    """Softmax attention without a mask: softmax(q k^T / sqrt(K)) v (Vaswani et al. 2017, Eq. 1).

    Args:
      q_BLNK: queries (B, L, N, K), any float dtype.
      k_BSNK: keys (B, S, N, K), the queries' dtype.
      v_BSNK: values (B, S, N, K), the queries' dtype.

    Returns:
      (B, L, N, K) in the queries' dtype. The logits and the softmax are float32, or float64 for float64 input.
    """
    chex.assert_rank([q_BLNK, k_BSNK, v_BSNK], 4)
    wide = jnp.promote_types(q_BLNK.dtype, jnp.float32)
    B, L, N, K = q_BLNK.shape
    blocks = _blocks(L, B * N * L * k_BSNK.shape[1] * wide.itemsize)
    if blocks > 1:
        q_XBLNK = jnp.moveaxis(q_BLNK.reshape(B, blocks, -1, N, K), 1, 0)
        block = jax.checkpoint(lambda q: _attention(q, k_BSNK, v_BSNK, wide), prevent_cse=False)
        return jnp.moveaxis(jax.lax.map(block, q_XBLNK), 0, 1).reshape(q_BLNK.shape)
    return _attention(q_BLNK, k_BSNK, v_BSNK, wide)


def _blocks(length: int, logits_bytes: int) -> int:
    """Into how many equal blocks of queries: the fewest that keep the logits within LOGITS_BYTES."""
    return next(
        n for n in range(1, length + 1) if length % n == 0 and (logits_bytes // n <= LOGITS_BYTES or n == length)
    )


def _attention(q_BLNK: jax.Array, k_BSNK: jax.Array, v_BSNK: jax.Array, wide: jnp.dtype) -> jax.Array:
    scale = q_BLNK.shape[-1] ** -0.5
    logits_BNLS = jnp.einsum("blnk,bsnk->bnls", q_BLNK, k_BSNK, preferred_element_type=wide)
    weights_BNLS = jax.nn.softmax(logits_BNLS * scale, axis=-1).astype(q_BLNK.dtype)
    return jnp.einsum("bnls,bsnk->blnk", weights_BNLS, v_BSNK)
