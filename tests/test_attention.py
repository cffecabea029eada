import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddrl_jax.parallel import attention as attention_module
from ddrl_jax.parallel.attention import attention


def _inputs(dtype=np.float64):
    rng = np.random.default_rng(0)
    return [rng.standard_normal((2, n, 3, 8)).astype(dtype) * 2 for n in (5, 7, 7)]


def _naive(q, k, v):
    out = np.empty_like(q)
    for b in range(q.shape[0]):
        for n in range(q.shape[2]):
            for i in range(q.shape[1]):
                w = np.exp(np.array([q[b, i, n] @ row for row in k[b, :, n]]) / np.sqrt(8))
                out[b, i, n] = (w / w.sum()) @ v[b, :, n]
    return out


def test_equals_the_formula():
    q, k, v = _inputs()
    with jax.enable_x64(True):
        np.testing.assert_allclose(attention(*map(jnp.asarray, (q, k, v))), _naive(q, k, v), rtol=1e-12)
    out = jax.jit(attention)(*map(jnp.float32, (q, k, v)))
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, _naive(q, k, v), atol=2e-6)


def test_softmax_is_float32_for_bfloat16():
    # 4096 equal keys of weight 1/4096: a bfloat16 sum of them stalls long before 1.
    q, k = jnp.ones((1, 1, 1, 8), jnp.bfloat16), jnp.ones((1, 4096, 1, 8), jnp.bfloat16)
    v = jnp.full((1, 4096, 1, 8), 3.0, jnp.bfloat16)
    out = attention(q, k, v)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(jnp.float32), 3.0, rtol=1e-2)


def test_large_logits_are_finite():
    q, k, v = (jnp.float32(x) * 1e3 for x in _inputs())
    value, grad = jax.value_and_grad(lambda q: attention(q, k, v).sum())(q)
    assert np.isfinite(value) and np.isfinite(grad).all()


def _value_and_grads(q, k, v, weight):
    def value(*args):
        return jnp.sum(weight * attention_module.attention(*args).astype(jnp.float32))

    return jax.jit(jax.value_and_grad(value, (0, 1, 2)))(q, k, v)


def _rows(length, keys, rows=2, key_rows=2, heads=3, seed=3):
    shapes = [(rows, length, heads, 8), *[(key_rows, keys, heads, 8)] * 2, (rows, length, heads, 8)]
    split = jax.random.split(jax.random.key(seed), 4)
    return [jax.random.normal(key, shape) for key, shape in zip(split, shapes, strict=True)]


@pytest.mark.parametrize("key_rows", [4, 2, 1])
def test_blocks_of_queries_are_the_same_attention(monkeypatch, key_rows):
    q, k, v, weight = _rows(30, 7, rows=4, key_rows=key_rows)
    whole, whole_grads = _value_and_grads(q, k, v, weight)
    monkeypatch.setattr(attention_module, "LOGITS_BYTES", 3 * 7 * 4 * 8)  # 8 queries of a sample fit: 5 blocks of 6
    text = str(jax.make_jaxpr(lambda q: attention_module.attention(q, k, v))(q))
    assert "length=5" in text and "f32[5,4,6,3,8]" in text
    blocked, blocked_grads = _value_and_grads(q, k, v, weight)
    np.testing.assert_allclose(blocked, whole, rtol=1e-5)
    for a, b in zip(blocked_grads, whole_grads, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_rows_may_share_their_keys():
    q, k, v, weight = _rows(5, 7, rows=6, key_rows=2)
    value, (dq, dk, dv) = _value_and_grads(q, k, v, weight)
    repeated = [jnp.repeat(x, 3, axis=0) for x in (k, v)]
    want, (want_q, want_k, want_v) = _value_and_grads(q, *repeated, weight)
    np.testing.assert_allclose(value, want, rtol=1e-5)
    np.testing.assert_allclose(dq, want_q, atol=1e-6)
    for a, b in ((dk, want_k), (dv, want_v)):
        np.testing.assert_allclose(a, b.reshape(2, 3, *k.shape[1:]).sum(1), atol=1e-5)


@pytest.mark.parametrize("mean", [0.0, 1.0])
def test_the_gradients_of_keys_and_values_do_not_stall_over_many_blocks(monkeypatch, mean):
    """Sums of 1024 blocks in bfloat16 would be 3 to 16 % off; one block is 0.3 % off."""
    q, k, v, weight = _rows(1024, 64, rows=1, key_rows=1, heads=1)
    narrow = [x.astype(jnp.bfloat16) for x in (q, k, v)]
    exact = _value_and_grads(*[x.astype(jnp.float32) for x in narrow], weight + mean)[1]

    def errors():
        grads = _value_and_grads(*narrow, weight + mean)[1]
        assert all(g.dtype == jnp.bfloat16 for g in grads)
        return [float(jnp.linalg.norm(g - e) / jnp.linalg.norm(e)) for g, e in zip(grads, exact, strict=True)]

    one = errors()
    for blocks in (256, 1024):
        monkeypatch.setattr(attention_module, "LOGITS_BYTES", 1024 // blocks * 64 * 4)
        many = errors()
        assert max(one) < 0.01 and all(m < 1.5 * o for m, o in zip(many, one, strict=True)), (blocks, many, one)


def test_the_largest_block_of_a_sample():
    # Cosmos-2B and 14B at 24 x 90 x 160 latents: 86,400 tokens; self-attention, then 512 text tokens.
    block, tokens = attention_module._block, 86_400
    assert block(tokens, 16 * tokens * 4) == 192
    assert block(tokens, 40 * tokens * 4) == 75
    assert block(tokens, 16 * 512 * 4) == 28_800
    assert block(1024, 16 * 1024 * 4) == 1024
    assert block(7, 2 << 30) == 1  # not even one fits
