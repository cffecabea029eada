import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddrl_jax.parallel import attention as attention_module
from ddrl_jax.parallel import mesh as mesh_lib
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


def _rows(length, keys, rows=2, heads=3, seed=3):
    shapes = [(rows, length, heads, 8), *[(rows, keys, heads, 8)] * 2, (rows, length, heads, 8)]
    split = jax.random.split(jax.random.key(seed), 4)
    return [jax.random.normal(key, shape) for key, shape in zip(split, shapes, strict=True)]


@pytest.mark.parametrize("keys", [7, 30])
def test_blocks_of_queries_are_the_same_attention(monkeypatch, keys):
    q, k, v, weight = _rows(30, keys, rows=4)
    whole, whole_grads = _value_and_grads(q, k, v, weight)
    monkeypatch.setattr(attention_module, "LOGITS_BYTES", 3 * keys * 4 * 8)  # 8 queries of a sample fit: 5 blocks of 6
    text = str(jax.make_jaxpr(lambda q: attention_module.attention(q, k, v))(q))
    assert "length=5" in text and "f32[5,4,6,3,8]" in text
    blocked, blocked_grads = _value_and_grads(q, k, v, weight)
    np.testing.assert_allclose(blocked, whole, rtol=1e-5)
    for a, b in zip(blocked_grads, whole_grads, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mean", [0.0, 1.0])
def test_the_gradients_of_keys_and_values_do_not_stall_over_many_blocks(monkeypatch, mean):
    """Sums of 1024 blocks in bfloat16 would be 3 to 16 % off; one block is 0.3 % off."""
    q, k, v, weight = _rows(1024, 64, rows=1, heads=1)
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


def test_blocks_in_float64(monkeypatch):
    with jax.enable_x64(True):
        q, k, v, weight = (x.astype(jnp.float64) for x in _rows(30, 7))

        def grads():
            return jax.grad(lambda *x: jnp.sum(weight * attention(*x)), (0, 1, 2))(q, k, v)

        whole = grads()
        monkeypatch.setattr(attention_module, "LOGITS_BYTES", 3 * 7 * 8 * 8)
        for a, b in zip(grads(), whole, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13)


# ---- the form that suits -------------------------------------------------------------------------------------------


def _like(dtype="bfloat16", length=256, keys=256, width=128):
    return [jax.ShapeDtypeStruct((1, n, 4, width), dtype) for n in (length, keys)]


class _Devices:
    """A mesh of nothing but devices of a platform."""

    def __init__(self, platform):
        self.devices = np.array([types.SimpleNamespace(platform=platform)])


@pytest.mark.parametrize(
    "platform, arrays, want",
    [
        ("cuda", _like(), "cudnn"),
        ("gpu", _like(), "cudnn"),
        ("cuda", _like("float32"), "xla"),
        ("cuda", _like(width=384), "xla"),
        ("tpu", _like(), "splash"),
        ("tpu", _like("float32"), "splash"),
        ("tpu", _like(length=200), "xla"),
        ("tpu", _like(keys=200), "xla"),
        ("tpu", _like(width=64), "xla"),
        ("cpu", _like(), "xla"),
    ],
)
def test_the_platforms_own_where_it_takes_the_arrays(platform, arrays, want):
    assert attention_module.resolve("auto", _Devices(platform), *arrays) == want
    assert attention_module.resolve("xla", _Devices(platform), *arrays) == "xla"


def test_a_form_that_does_not_take_the_arrays_is_an_error():
    with pytest.raises(ValueError, match=r"attention='cudnn': needs 16-bit floats .* got float32, 256 queries"):
        attention_module.resolve("cudnn", None, *_like("float32"))
    with pytest.raises(ValueError, match="attention='splash': needs lengths"):
        attention_module.resolve("splash", None, *_like(length=200))
    with pytest.raises(ValueError, match="attention='splash': is for tpu, not for cpu: take auto or xla"):
        attention_module.resolve("splash", None, *_like())


def test_the_splash_form_is_the_same_attention(monkeypatch):
    """In Pallas' interpreter: what a TPU would compile, block by block."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

    call = splash_attention_kernel.pl.pallas_call
    monkeypatch.setattr(splash_attention_kernel.pl, "pallas_call", lambda *a, **k: call(*a, **{**k, "interpret": True}))
    monkeypatch.setattr(attention_module, "_platform", lambda mesh: "tpu")
    q, k, v, weight = (jax.random.normal(key, (2, 256, 2, 128)) for key in jax.random.split(jax.random.key(0), 4))

    def grads(kind):
        return jax.value_and_grad(lambda *x: jnp.sum(weight * attention(*x, kind=kind)), (0, 1, 2))(q, k, v)

    (got, got_grads), (want, want_grads) = grads("splash"), grads("xla")
    np.testing.assert_allclose(got, want, rtol=1e-4)
    for a, b in zip(got_grads, want_grads, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_splash_blocks():
    # 86,400 tokens: the backward pass writes one part of dq a block of keys (specs: 3456 of them, not 640).
    assert [attention_module._splash_block(86_400, most) for most in (1024, 4096)] == [640, 3456]
    assert attention_module._splash_block(3456, 1280) == 1152
    assert attention_module._splash_block(512, 4096) == 512


# ---- over a mesh ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape, frames, tokens", [((2, 2, 2), 4, 3), ((2, 1, 4), 4, 3), ((1, 4, 2), 1, 6)])
def test_heads_for_tokens_and_back(shape, frames, tokens):
    """By frames, and of images by their tokens."""
    mesh = mesh_lib.make_mesh(*shape)
    x = jnp.arange(4.0 * frames * tokens * 8 * 2).reshape(4, frames, tokens, 8, 2)

    @jax.jit
    def there_and_back(x):
        heads = attention_module.to_heads(mesh_lib.pin_tokens(mesh, x), mesh)
        return heads, attention_module.to_tokens(heads, frames, mesh)

    heads, back = there_and_back(x)
    np.testing.assert_array_equal(heads, x.reshape(4, -1, 8, 2))
    np.testing.assert_array_equal(back, x.reshape(4, frames, tokens, 16))
    assert heads.sharding.shard_shape(heads.shape)[2] == 8 // shape[2]
    assert back.sharding.shard_shape(back.shape)[1:3] in ((frames // shape[2], tokens), (frames, tokens // shape[2]))
    program = there_and_back.lower(x).compile().as_text()
    assert program.count(" all-to-all(") == 2 and "all-gather" not in program


def test_what_context_does_not_divide_is_an_error():
    mesh = mesh_lib.make_mesh(1, 2, 4)
    with pytest.raises(ValueError, match=r"config.mesh.context=4: must divide the network's 6 heads"):
        attention_module.to_heads(jnp.zeros((2, 4, 3, 6, 2)), mesh)
    with pytest.raises(
        ValueError, match=r"config.mesh.context=4: must divide a latent's 3 frames, or else the 9 tokens"
    ):
        attention_module.to_heads(jnp.zeros((2, 3, 9, 8, 2)), mesh)


@pytest.mark.parametrize("shape", [(2, 2, 2), (1, 2, 4), (8, 1, 1)])
def test_a_mesh_changes_nothing(shape):
    mesh = mesh_lib.make_mesh(*shape)
    q, k, v, weight = _rows(12, 12, rows=8, heads=4)
    text = [x[:, :5] for x in (k, v)]

    def value(mesh, q, k, v, text_k, text_v):
        y = attention(q, k, v, mesh=mesh).reshape(8, 4, 3, 4, 8)
        y = attention_module.attention_to_text(y, text_k, text_v, mesh=mesh)
        return jnp.sum(weight * y.reshape(q.shape))

    grad = jax.jit(jax.value_and_grad(value, (1, 2, 3, 4, 5)), static_argnums=0)
    (got, got_grads), (want, want_grads) = grad(mesh, q, k, v, *text), grad(None, q, k, v, *text)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    for a, b in zip(got_grads, want_grads, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
