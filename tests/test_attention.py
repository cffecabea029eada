import jax
import jax.numpy as jnp
import numpy as np

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


def test_blocks_of_queries_are_the_same_attention(monkeypatch):
    keys = jax.random.split(jax.random.key(3), 4)
    q, k, v = (jax.random.normal(key, (2, length, 3, 8)) for key, length in zip(keys, (30, 7, 7), strict=False))
    weight = jax.random.normal(keys[3], q.shape)

    def value_and_grads(q, k, v):
        return jax.value_and_grad(lambda *args: jnp.sum(weight * attention_module.attention(*args)), (0, 1, 2))(q, k, v)

    whole, whole_grads = value_and_grads(q, k, v)
    monkeypatch.setattr(attention_module, "LOGITS_BYTES", 2 * 3 * 7 * 4 * 8)  # 8 queries fit: 5 blocks of 6
    assert attention_module._blocks(30, 2 * 3 * 30 * 7 * 4) == 5
    text = str(jax.make_jaxpr(lambda q: attention_module.attention(q, k, v))(q))
    assert "scan" in text or "while" in text
    blocked, blocked_grads = value_and_grads(q, k, v)
    np.testing.assert_allclose(blocked, whole, rtol=1e-5)
    for a, b in zip(blocked_grads, whole_grads, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
