"""The attention every transformer here calls, in the form that suits the hardware.

Knows nothing of models: queries, keys and values in, weighted values out. The only form so far is XLA's own: two
products around a softmax, with the logits in float32 at least and (B, N, L, S) of them in memory.

Dims: B batch, L query token, S key token, N head, K head width.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp


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
    scale = q_BLNK.shape[-1] ** -0.5
    logits_BNLS = jnp.einsum("blnk,bsnk->bnls", q_BLNK, k_BSNK, preferred_element_type=wide)
    weights_BNLS = jax.nn.softmax(logits_BNLS * scale, axis=-1).astype(q_BLNK.dtype)
    return jnp.einsum("bnls,bsnk->blnk", weights_BNLS, v_BSNK)
