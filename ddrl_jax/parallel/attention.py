"""The attention every transformer here calls, in the form that suits the hardware.

Knows nothing of models: queries, keys and values in, weighted values out. The only form so far is XLA's own: two
products around a softmax, with the logits in float32 at least. Where the (N, L, S) logits of a sample are too many, as
at a video's 86,400 tokens, queries are taken a block at a time and their logits computed again in the backward pass.

Dims: B batch, G entry of keys and values (G divides B; entry g serves rows g*B/G to (g+1)*B/G - 1), L query token,
S key token, N head, K head width, X block of queries.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

# Most logits of one sample at once: 192 of 86,400 queries with Cosmos-2B's 16 heads. A device holds that much for each
# of the samples that it has of the batch.
LOGITS_BYTES = 1 << 30


def attention(q_BLNK: jax.Array, k_GSNK: jax.Array, v_GSNK: jax.Array) -> jax.Array:
    """Softmax attention without a mask: softmax(q k^T / sqrt(K)) v (Vaswani et al. 2017, Eq. 1).

    Args:
      q_BLNK: queries (B, L, N, K), any float dtype.
      k_GSNK: keys (G, S, N, K), the queries' dtype; with G < B rows share them without a copy.
      v_GSNK: values (G, S, N, K), the queries' dtype.

    Returns:
      (B, L, N, K) in the queries' dtype. The logits and the softmax are float32, or float64 for float64 input. The
      gradients of keys and values are sums over the blocks of queries in that dtype too.
    """
    chex.assert_rank([q_BLNK, k_GSNK, v_GSNK], 4)
    wide = jnp.promote_types(q_BLNK.dtype, jnp.float32)
    B, L, N, K = q_BLNK.shape
    block = _block(L, N * k_GSNK.shape[1] * wide.itemsize)
    if block == L:
        return _attention(q_BLNK, k_GSNK, v_GSNK)
    q_XBLNK = jnp.moveaxis(q_BLNK.reshape(B, -1, block, N, K), 1, 0)
    # What a loop closes over has its gradient summed in its own dtype: a sum of hundreds of blocks stalls in bfloat16.
    k_wide, v_wide = k_GSNK.astype(wide), v_GSNK.astype(wide)

    def of_block(q_BLNK: jax.Array) -> jax.Array:
        return _attention(q_BLNK, k_wide.astype(k_GSNK.dtype), v_wide.astype(v_GSNK.dtype))

    y_XBLNK = jax.lax.map(jax.checkpoint(of_block, prevent_cse=False), q_XBLNK)
    return jnp.moveaxis(y_XBLNK, 0, 1).reshape(q_BLNK.shape)


def _block(length: int, query_bytes: int) -> int:
    """Queries in a block: the most that divide `length` and have logits within LOGITS_BYTES; at least one."""
    return max(n for n in range(1, length + 1) if length % n == 0 and (n == 1 or n * query_bytes <= LOGITS_BYTES))


def _attention(q_BLNK: jax.Array, k_GSNK: jax.Array, v_GSNK: jax.Array) -> jax.Array:
    wide = jnp.promote_types(q_BLNK.dtype, jnp.float32)
    scale = q_BLNK.shape[-1] ** -0.5
    # Rows with common keys attend to them as one longer row of queries.
    q_GLNK = q_BLNK.reshape(k_GSNK.shape[0], -1, *q_BLNK.shape[2:])
    logits_GNLS = jnp.einsum("glnk,gsnk->gnls", q_GLNK, k_GSNK, preferred_element_type=wide)
    weights_GNLS = jax.nn.softmax(logits_GNLS * scale, axis=-1).astype(q_BLNK.dtype)
    return jnp.einsum("gnls,gsnk->glnk", weights_GNLS, v_GSNK).reshape(q_BLNK.shape)
