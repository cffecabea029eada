import jax
import jax.numpy as jnp
import numpy as np

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
