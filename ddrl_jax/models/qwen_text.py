"""The text tower of Qwen2.5-VL, as Cosmos-Predict2.5 reads captions with it, and the embedding made of its states.

Written to `specs/cosmos.md` section 6. A decoder-only transformer (pre-norm, grouped queries, SwiGLU) that hands out
every hidden state and has no head. Knows token ids only: captions and the chat markup are `text_encoder`'s.

Dims: B batch, S token, D width, M hidden width of the MLP, N query head, G key-value head (G divides N), K head width,
L layer, V vocabulary, C channel of an embedding.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ddrl_jax.models.layers import Linear, RMSNorm, at_least_float32, rotate

STRATEGIES = ("full_concat", "mean_pooling", "pool_every_n_layers_and_concat")
_POOL_EVERY = re.compile(r"pool_every_(n|[1-9]\d*)_layers_and_concat")


@dataclasses.dataclass(frozen=True)
class QwenTextConfig:
    """Sizes and dtypes of a Qwen2.5-VL text tower; the defaults are Cosmos-Reason1-7B's (7,070,619,136 parameters).

    The eps of its norms is no field: the published weights were trained with 1e-6 even where a config.json says 1e-5.

    Attributes:
      vocab: V, rows of the token table.
      width: D.
      mlp: M.
      depth: L, blocks.
      heads: N, query heads, a divisor of `width`; the head width D/N is even.
      kv_heads: G, key and value heads, a divisor of `heads`.
      rope_theta: base of the rotary embedding.
      dtype: what the network computes in; norms, softmax and rotary angles are float32 at least.
      param_dtype: what the parameters are kept in.
    """

    vocab: int = 152064
    width: int = 3584
    mlp: int = 18944
    depth: int = 28
    heads: int = 28
    kv_heads: int = 4
    rope_theta: float = 1e6
    dtype: str = "bfloat16"
    param_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        # Names, so that a config is hashable, compares by value and survives JSON.
        for name in ("dtype", "param_dtype"):
            object.__setattr__(self, name, jnp.dtype(getattr(self, name)).name)
        for name in ("vocab", "width", "mlp", "depth", "heads", "kv_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; must be at least 1")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads is {self.kv_heads}; it must divide heads {self.heads}")
        if self.width % (2 * self.heads):
            raise ValueError(f"heads is {self.heads}; width {self.width} must be a multiple of twice that")
        if not self.rope_theta > 1:
            raise ValueError(f"rope_theta is {self.rope_theta}; must be above 1")

    @property
    def head_width(self) -> int:
        """K."""
        return self.width // self.heads


def causal_attention(q_BSNK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array) -> jax.Array:
    """softmax(q k^T / sqrt(K)) v over the tokens up to a query's own; a key head serves N/G query heads in a row.

    Vaswani et al. 2017, Eq. 1; grouped queries: Ainslie et al. 2023, arXiv 2305.13245.

    Args:
      q_BSNK: queries (B, S, N, K), any float dtype.
      k_BSGK: keys (B, S, G, K), G dividing N.
      v_BSGK: values (B, S, G, K).

    Returns:
      (B, S, N, K) in the queries' dtype; the logits and the softmax are float32, or float64 for float64 input.
    """
    B, S, N, K = q_BSNK.shape
    wide = at_least_float32(q_BSNK.dtype)
    q_BSGNK = q_BSNK.reshape(B, S, k_BSGK.shape[2], -1, K)
    logits = jnp.einsum("bsgnk,btgk->bgnst", q_BSGNK, k_BSGK, preferred_element_type=wide) * K**-0.5
    logits = jnp.where(np.tri(S, dtype=bool), logits, -jnp.inf)
    weights = jax.nn.softmax(logits, axis=-1).astype(q_BSNK.dtype)
    return jnp.einsum("bgnst,btgk->bsgnk", weights, v_BSGK).reshape(B, S, N, K)


class Attention(nnx.Module):
    """Causal self-attention with grouped queries and RoPE; biases on q, k and v, none on the output."""

    def __init__(self, config: QwenTextConfig, *, rngs: nnx.Rngs):
        c = config
        dtypes: dict[str, Any] = {"dtype": c.dtype, "param_dtype": c.param_dtype}
        self.head_width = c.head_width
        self.q = Linear(c.width, c.width, rngs=rngs, bias=True, **dtypes)
        self.k = Linear(c.width, c.kv_heads * c.head_width, rngs=rngs, bias=True, **dtypes)
        self.v = Linear(c.width, c.kv_heads * c.head_width, rngs=rngs, bias=True, **dtypes)
        self.out = Linear(c.width, c.width, rngs=rngs, **dtypes)

    def __call__(self, x_BSD: jax.Array, angles_SK: jax.Array) -> jax.Array:
        """x (B,S,D), angles (S,K/2) -> (B,S,D)."""
        q, k, v = (y.reshape(*y.shape[:2], -1, self.head_width) for y in (self.q(x_BSD), self.k(x_BSD), self.v(x_BSD)))
        y = causal_attention(rotate(q, angles_SK), rotate(k, angles_SK), v)
        return self.out(y.reshape(*y.shape[:2], -1))


class MLP(nnx.Module):
    """down(SiLU(gate x) * up x), SwiGLU (Shazeer 2020, arXiv 2002.05202), no bias."""

    def __init__(self, config: QwenTextConfig, *, rngs: nnx.Rngs):
        dtypes: dict[str, Any] = {"dtype": config.dtype, "param_dtype": config.param_dtype}
        self.gate = Linear(config.width, config.mlp, rngs=rngs, **dtypes)
        self.up = Linear(config.width, config.mlp, rngs=rngs, **dtypes)
        self.down = Linear(config.mlp, config.width, rngs=rngs, **dtypes)

    def __call__(self, x: jax.Array) -> jax.Array:
        """(..., D) -> (..., D)."""
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    """x += attention(norm(x)); x += MLP(norm(x))."""

    def __init__(self, config: QwenTextConfig, *, rngs: nnx.Rngs):
        dtypes: dict[str, Any] = {"dtype": config.dtype, "param_dtype": config.param_dtype}
        self.attn_norm = RMSNorm(config.width, **dtypes)
        self.attn = Attention(config, rngs=rngs)
        self.mlp_norm = RMSNorm(config.width, **dtypes)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(self, x_BSD: jax.Array, angles_SK: jax.Array) -> jax.Array:
        """(B,S,D) -> (B,S,D)."""
        x_BSD = x_BSD + self.attn(self.attn_norm(x_BSD), angles_SK)
        return x_BSD + self.mlp(self.mlp_norm(x_BSD))


class QwenText(nnx.Module):
    """The tower of `specs/cosmos.md` section 6.

    Blocks are stacked along a leading layer axis and run by a scan: the program does not grow with depth.
    """

    def __init__(self, config: QwenTextConfig, *, rngs: nnx.Rngs):
        c = config
        self.config = c
        # 0.02 is the std that Qwen's own configs name (initializer_range).
        self.table = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), (c.vocab, c.width), c.param_dtype))

        @nnx.split_rngs(splits=c.depth)
        @nnx.vmap
        def stack(rngs):
            return Block(c, rngs=rngs)

        self.blocks = stack(rngs)
        self.norm = RMSNorm(c.width, dtype=c.dtype, param_dtype=c.param_dtype)

    def __call__(self, ids_BS: jax.Array) -> jax.Array:
        """Hidden states of token ids.

        Causal, without a padding mask: what follows a token never changes its states.

        Args:
          ids_BS: (B, S) integers in [0, vocab); one outside gives NaN in float dtypes, not another token's row.

        Returns:
          (L+1, B, S, D) in the config's `dtype`: 0 the token embeddings, l block l's output, L after the final norm.
        """
        chex.assert_rank(ids_BS, 2)
        c = self.config
        x_BSD = self.table[...].at[ids_BS].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
        x_BSD = x_BSD.astype(c.dtype)
        # On text the tower's three rotary axes (mRoPE) all count tokens: one ordinary axis.
        frequency = c.rope_theta ** (-np.arange(0, c.head_width, 2, dtype=np.float64) / c.head_width)
        angles = np.arange(ids_BS.shape[1], dtype=np.float64)[:, None] * frequency
        angles_SK = jnp.asarray(angles, at_least_float32(c.dtype))
        graphdef, stacked = nnx.split(self.blocks)

        def step(x_BSD, block):
            y_BSD = nnx.merge(graphdef, block)(x_BSD, angles_SK)
            return y_BSD, y_BSD

        last_BSD, states_LBSD = jax.lax.scan(step, x_BSD, stacked)
        return jnp.concatenate([x_BSD[None], states_LBSD[:-1], self.norm(last_BSD)[None]])


def _group_size(strategy: str, depth: int, n_layers_per_group: int) -> int:
    """How many layers are averaged into one part of the embedding."""
    if strategy == "full_concat":
        return 1
    if strategy == "mean_pooling":
        return depth
    match = _POOL_EVERY.fullmatch(strategy)
    if match is None:
        raise ValueError(
            f"strategy is {strategy!r}; must be one of {', '.join(STRATEGIES)} (n: the letter or a number)"
        )
    size = n_layers_per_group if match[1] == "n" else int(match[1])
    if size < 1:
        raise ValueError(f"n_layers_per_group is {size}; must be at least 1")
    return size


def embedding_width(config: QwenTextConfig, strategy: str, n_layers_per_group: int = 5) -> int:
    """C of `embed_text`'s result. Raises ValueError for an unknown strategy."""
    return config.width * -(-config.depth // _group_size(strategy, config.depth, n_layers_per_group))


def embed_text(hidden_LBSD: jax.Array, strategy: str = "full_concat", n_layers_per_group: int = 5) -> jax.Array:
    """One embedding a token from all hidden states of the tower (Cosmos-Predict2.5).

    Each state but the first (the token embeddings) is normalised over its channels, (h - mean)/(std + 1e-8) with the
    unbiased std. Then consecutive layers are averaged in groups, and the groups' averages concatenated, early ones
    first; a last group with fewer layers is averaged over those it has.

    Args:
      hidden_LBSD: (L+1, B, S, D) from `QwenText`, any float dtype.
      strategy: "full_concat" (groups of one: C = L*D), "mean_pooling" (one group: C = D),
        "pool_every_n_layers_and_concat" (C = ceil(L/n)*D), or the same with a number in place of the letter n.
      n_layers_per_group: the n of the strategy that names none; the original's default.

    Returns:
      (B, S, C) in hidden's dtype; computed in float32 at least.

    Raises:
      ValueError: an unknown strategy, no layer, or n under 1.
    """
    chex.assert_rank(hidden_LBSD, 4)
    states = hidden_LBSD[1:]
    depth = states.shape[0]
    if not depth:
        raise ValueError(f"hidden is {hidden_LBSD.shape}; the token embeddings and at least one layer are needed")
    size = _group_size(strategy, depth, n_layers_per_group)
    h = states.astype(at_least_float32(states.dtype))
    h = (h - jnp.mean(h, axis=-1, keepdims=True)) / (jnp.std(h, axis=-1, keepdims=True, ddof=1) + 1e-8)
    parts = h if size == 1 else jnp.stack([jnp.mean(h[i : i + size], axis=0) for i in range(0, depth, size)])
    P, B, S, D = parts.shape
    return parts.astype(states.dtype).transpose(1, 2, 0, 3).reshape(B, S, P * D)
