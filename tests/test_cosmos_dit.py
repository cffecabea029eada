"""The Cosmos DiT against `golden/cosmos_dit`: forward, gradients, intermediate values, sizes and errors."""

import dataclasses
import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ddrl_jax.checkpoint import load_pretrained, save_pretrained
from ddrl_jax.models import CosmosDiT, CosmosDiTConfig, cosmos_2b, cosmos_14b
from ddrl_jax.models.layers import RMSNorm, modulated_norm, rope_angles, time_features
from ddrl_jax.parallel.mesh import fsdp_sharding, latent_sharding, make_mesh
from tests.paths import GOLDEN

FOLDER = GOLDEN / "cosmos_dit"
TINY = CosmosDiTConfig(
    in_channels=4, width=48, depth=2, heads=4, adaln_rank=8, context_in=10, context_dim=12, dtype="float32"
)


@pytest.fixture(scope="module")
def io():
    with np.load(FOLDER / "io.npz") as file:
        return dict(file)


@functools.cache
def golden(dtype="float32", remat="none"):
    graphdef, params = load_pretrained(FOLDER / "official.safetensors", dtype=dtype)
    if remat == "none":
        return graphdef, params
    return with_config(graphdef, params, remat=remat), params


def with_config(graphdef, params, **changes):
    config = dataclasses.replace(nnx.merge(graphdef, params).config, **changes)
    return abstract(config)[0]


@functools.partial(jax.jit, static_argnums=0)
def apply(graphdef, params, *args):
    return nnx.merge(graphdef, params)(*args)


def video(io, t="timesteps_BT"):
    return [io[f"video/{name}"] for name in ("x", t, "context", "condition_mask", "padding_mask_pixels")]


@functools.partial(jax.jit, static_argnums=0)
def init(config, key, spread):
    params = nnx.split(CosmosDiT(config, rngs=nnx.Rngs(key)))[1]
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(key, len(leaves))
    noise = [jax.random.normal(key, leaf.shape, leaf.dtype) for key, leaf in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(tree, [a + spread * b for a, b in zip(leaves, noise, strict=True)])


def tiny(config=TINY, seed=0, spread=0.1):
    """A small network; with `spread` every parameter is away from its start value, so that every path counts."""
    return abstract(config)[0], init(config, jax.random.key(seed), spread)


def abstract(config):
    return nnx.split(nnx.eval_shape(lambda: CosmosDiT(config, rngs=nnx.Rngs(0))))


# ---- parity ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("t", ["timesteps_B", "timesteps_BT"])
def test_video(io, t, remat):
    out = apply(*golden(remat=remat), *video(io, t))
    np.testing.assert_allclose(out, io[f"video/out_{t}"], atol=3e-5, rtol=0)


def test_video_without_padding_mask(io):
    args = video(io, "timesteps_B")
    want = io["video/out_timesteps_B_zero_padding_mask"]
    np.testing.assert_allclose(apply(*golden(), *args[:4]), want, atol=3e-5, rtol=0)
    np.testing.assert_allclose(apply(*golden(), *args[:4], np.zeros_like(args[4])), want, atol=3e-5, rtol=0)


@pytest.mark.parametrize("mask", [False, True])
def test_image_ignores_the_condition_mask(io, mask):
    condition = np.ones((2, 1, 1, 6, 10), np.float32) if mask else None
    args = io["image/x"], io["image/timesteps_B"], io["video/context"], condition, io["video/padding_mask_pixels"]
    np.testing.assert_allclose(apply(*golden(), *args), io["image/out"], atol=3e-5, rtol=0)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_gradients(io, remat):
    graphdef, params = golden(remat=remat)
    x, t, context, *masks = video(io)

    @jax.jit
    def loss(params, x, context):
        return jnp.sum(nnx.merge(graphdef, params)(x, t, context, *masks) * io["grad/R"])

    value, (d_params, d_x, d_context) = jax.value_and_grad(loss, (0, 1, 2))(params, x, context)
    np.testing.assert_allclose(value, io["grad/loss_sum_out_times_R"], rtol=1e-5)
    g = nnx.merge(graphdef, d_params)
    blocks = g.blocks
    got = {
        "d_video_x": d_x,
        "d_context": d_context,
        "d_net.x_embedder.proj.1.weight": g.patch_embed.kernel[...].T,
        "d_net.blocks.0.cross_attn.k_proj.weight": blocks.cross_attn.k.kernel[0].T,
        "d_net.blocks.1.adaln_modulation_self_attn.2.weight": blocks.self_mod.up.kernel[1].T,
        "d_net.blocks.1.self_attn.q_norm.weight": blocks.self_attn.q_norm.scale[1],
        "d_net.t_embedding_norm.weight": g.time_norm.scale[...],
        "d_net.crossattn_proj.0.bias": g.context_proj.bias[...],
    }
    assert {f"grad/{name}" for name in got} == {key for key in io if key.startswith("grad/d_")}
    for name, value in got.items():
        want = io[f"grad/{name}"]
        np.testing.assert_allclose(value, want, atol=1e-5 * np.abs(want).max(), rtol=0, err_msg=name)


def test_intermediate_values(io):
    model = nnx.merge(*golden())
    tokens, (time, shared, context), angles = model.embed(*map(jnp.asarray, video(io)))
    graphdef, stacked = nnx.split(model.blocks)
    block0 = nnx.merge(graphdef, jax.tree.map(lambda a: a[0], stacked))(tokens, time, shared, context, angles)
    got = {
        "after_patch_embed_BTHWD": tokens,
        "after_block0_BTHWD": block0,
        "t_embedding_BTD": time,
        "projected_context_BSD": context,
        "rope_angles_LD": jnp.concatenate([angles, angles], axis=-1),
    }
    assert {f"debug/{name}" for name in got} == {key for key in io if key.startswith("debug/")}
    for name, value in got.items():
        want = io[f"debug/{name}"]
        np.testing.assert_allclose(value.reshape(want.shape), want, atol=3e-5, rtol=0, err_msg=name)


def test_float64_agrees(io):
    with jax.enable_x64(True):
        graphdef, params = load_pretrained(FOLDER / "official.safetensors", dtype="float64")
        out = apply(graphdef, params, *(a.astype(np.float64) for a in video(io)))
        assert out.dtype == jnp.float64
        np.testing.assert_allclose(out, io["video/out_timesteps_BT"], atol=1e-5, rtol=0)


# ---- bfloat16 --------------------------------------------------------------------------------------------------------


def test_bfloat16_checkpoint_in_float32(io, tmp_path):
    save_pretrained(tmp_path / "bf16.safetensors", *golden(), layout="official", dtype="bfloat16")
    out = apply(*load_pretrained(tmp_path / "bf16.safetensors"), *video(io))
    np.testing.assert_allclose(out, io["bf16_checkpoint/out_timesteps_BT"], atol=3e-5, rtol=0)
    # The control: rounding the weights is seen.
    assert np.abs(out - io["video/out_timesteps_BT"]).max() > 1e-2


@pytest.mark.parametrize(
    "file, which, key",
    [
        ("official_flat_bf16.pt", "raw", "out_timesteps_BT"),
        ("official_wrapped_net_and_net_ema_bf16.pt", "raw", "out_timesteps_BT"),
        ("official_wrapped_net_and_net_ema_bf16.pt", "ema", "out_timesteps_BT_net_ema"),
    ],
)
def test_bfloat16_torch_files(io, file, which, key, tmp_path):
    pytest.importorskip("torch", reason="torch files are read by a child process that has it")
    shutil.copyfile(FOLDER / file, tmp_path / file)  # what it is converted to is written beside it
    out = apply(*load_pretrained(tmp_path / file, which=which), *video(io))
    np.testing.assert_allclose(out, io[f"bf16_checkpoint/{key}"], atol=3e-5, rtol=0)


def test_bfloat16_compute(io):
    graphdef, params = load_pretrained(FOLDER / "official.safetensors", compute_dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    out = apply(graphdef, params, *video(io))
    assert out.dtype == jnp.bfloat16
    # The reference in bf16 is up to 0.083 away from itself in float32 (tolerances.json).
    np.testing.assert_allclose(out.astype(np.float32), io["video/out_timesteps_BT"], atol=0.12, rtol=0)


def test_rope_and_time_stay_float32_in_bfloat16(io):
    model = nnx.merge(*load_pretrained(FOLDER / "official.safetensors", compute_dtype="bfloat16"))
    x, _, context, *masks = map(jnp.asarray, video(io))
    # 0.9991 and 1.0 are one bfloat16 number; the features must still differ by what float32 says.
    t = jnp.array([0.9991, 1.0])
    *_, angles = model.embed(x, t, context, *masks)
    assert angles.dtype == jnp.float32
    half = jnp.concatenate([angles, angles], axis=-1)
    np.testing.assert_allclose(half, io["debug/rope_angles_LD"], atol=1e-5, rtol=0)
    features = time_features(t, 64, "bfloat16")
    assert features.dtype == jnp.float32
    np.testing.assert_allclose(features[0, 0] - features[1, 0], np.cos(0.9991) - np.cos(1.0), rtol=1e-3)


# ---- what the golden files cannot show -------------------------------------------------------------------------------


@pytest.mark.parametrize("config, count", [(cosmos_2b(), 2_059_174_912), (cosmos_14b(), 14_368_047_104)])
def test_parameter_count(config, count):
    model = nnx.eval_shape(lambda: CosmosDiT(config, rngs=nnx.Rngs(0)))
    assert sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(nnx.state(model))) == count
    assert config.head_width == 128 and config.dtype == "bfloat16"


def test_a_new_network_is_zero_and_learns():
    graphdef, params = tiny(spread=0.0)
    key = jax.random.key(0)
    x, context = jax.random.normal(key, (8, 4, 2, 4, 4)), jax.random.normal(key, (8, 3, 10))
    t = jnp.linspace(0.1, 0.9, 8)
    np.testing.assert_array_equal(apply(graphdef, params, x, t, context), 0)
    # A target that needs every part: tokens (x), time, and text.
    target = x * t[:, None, None, None, None] + jnp.mean(context, (1, 2))[:, None, None, None, None]

    @jax.jit
    def step(params, m, v, n):
        loss, g = jax.value_and_grad(lambda p: jnp.mean(jnp.square(nnx.merge(graphdef, p)(x, t, context) - target)))(
            params
        )
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, g)
        v = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, v, g)
        update = jax.tree.map(lambda m, v: 3e-3 * m / (1 - 0.9**n) / (jnp.sqrt(v / (1 - 0.99**n)) + 1e-8), m, v)
        return jax.tree.map(jnp.subtract, params, update), m, v, loss

    m = v = jax.tree.map(jnp.zeros_like, params)
    start, losses = params, []
    for n in range(1, 151):
        params, m, v, loss = step(params, m, v, jnp.float32(n))
        losses.append(float(loss))
    assert losses[-1] < 0.02 * losses[0]
    still = [
        ".".join(map(str, key))
        for (key, a), (_, b) in zip(nnx.to_flat_state(start), nnx.to_flat_state(params), strict=True)
        if np.array_equal(a[...], b[...])
    ]
    assert still == []


def test_rows_and_frames_do_not_mix_conditions():
    """Batch rows are independent, and a context shared by a group is the context repeated."""
    graphdef, params = tiny()
    key = jax.random.key(1)
    x, t = jax.random.normal(key, (6, 4, 2, 4, 4)), jnp.linspace(0.1, 0.9, 6)
    context = jax.random.normal(key, (2, 3, 10))
    shared = apply(graphdef, params, x, t, context)
    np.testing.assert_allclose(shared, apply(graphdef, params, x, t, jnp.repeat(context, 3, axis=0)), atol=2e-6)
    for i in range(6):
        one = apply(graphdef, params, x[i : i + 1], t[i : i + 1], context[i // 3][None])
        np.testing.assert_allclose(shared[i : i + 1], one, atol=2e-6)
    assert np.abs(shared - apply(graphdef, params, x, t, context[::-1])).max() > 1e-3


def test_jit_and_no_jit_agree():
    graphdef, params = tiny()
    key = jax.random.key(2)
    args = jax.random.normal(key, (2, 4, 2, 4, 4)), jnp.array([0.3, 0.7]), jax.random.normal(key, (2, 3, 10))
    with jax.disable_jit():
        eager = nnx.merge(graphdef, params)(*args)
    np.testing.assert_allclose(apply(graphdef, params, *args), eager, atol=2e-6)


def test_gradient_against_finite_differences():
    with jax.enable_x64(True):
        config = dataclasses.replace(TINY, dtype="float64", param_dtype="float64", depth=1)
        graphdef, params = tiny(config)
        key = jax.random.key(3)
        x, context = jax.random.normal(key, (1, 4, 2, 4, 4)), jax.random.normal(key, (1, 3, 10))

        @jax.jit
        def f(params):
            return jnp.sum(jnp.sin(nnx.merge(graphdef, params)(x, jnp.array([0.4]), context)))

        d = tiny(config, seed=4, spread=1.0)[1]
        slope = sum(jax.tree.leaves(jax.tree.map(lambda a, b: jnp.sum(a * b), jax.jit(jax.grad(f))(params), d)))
        e = 1e-6
        ahead, behind = (f(jax.tree.map(lambda a, b, s=s: a + s * b, params, d)) for s in (e, -e))
        np.testing.assert_allclose(slope, (ahead - behind) / (2 * e), rtol=1e-6)


def test_depth_does_not_grow_the_program():
    def lines(depth):
        graphdef, params = abstract(dataclasses.replace(TINY, depth=depth))
        args = jnp.zeros((1, 4, 2, 4, 4)), jnp.zeros((1,)), jnp.zeros((1, 3, 10))
        return len(apply.lower(graphdef, params, *args).as_text().splitlines())

    assert lines(2) == lines(9)


@pytest.mark.parametrize(
    "change, word",
    [
        ({"x": np.zeros((2, 5, 2, 4, 4))}, "C must be 4"),
        ({"x": np.zeros((2, 4, 2, 5, 4))}, "multiples of 2"),
        ({"x": np.zeros((2, 4, 2, 4, 242))}, "largest is"),
        ({"context": np.zeros((2, 3, 9))}, "D must be 10"),
        ({"context": np.zeros((3, 3, 10))}, "must divide the batch 2"),
        ({"t": np.zeros((2, 3))}, r"one a frame \(2\)"),
    ],
)
def test_inputs_that_do_not_fit(change, word):
    graphdef, params = tiny()
    args = {"x": np.zeros((2, 4, 2, 4, 4)), "t": np.zeros(2), "context": np.zeros((2, 3, 10))} | change
    with pytest.raises(ValueError, match=word) as error:
        nnx.merge(graphdef, params)(**args)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "change, word",
    [
        ({"depth": 0}, "depth is 0"),
        ({"heads": 5}, "must divide width"),
        ({"heads": 8}, "head width"),
        ({"remat": "some"}, "remat"),
        ({"patch": (2, 2, 2)}, "patch"),
    ],
)
def test_config_errors(change, word):
    with pytest.raises(ValueError, match=word):
        dataclasses.replace(TINY, **change)


def test_norms_at_the_size_of_their_eps():
    """Small inputs tell eps 1e-6 from the 1e-5 of diffusers, which outputs of ordinary size hardly do."""
    x = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32) * 1e-3
    norm = RMSNorm(8, dtype="float32", param_dtype="float32")
    want = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(norm(jnp.asarray(x)), want, rtol=1e-5)
    centred = x - x.mean(-1, keepdims=True)
    want = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6) * 3 + 0.5
    got = modulated_norm(jnp.asarray(x), jnp.full((1, 8), 0.5), jnp.full((1, 8), 2.0))
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_head_widths_the_rotary_embedding_cannot_split():
    for width in (10, 13):
        with pytest.raises(ValueError, match=f"head width is {width}"):
            rope_angles((1, 2, 2), width, (1.0, 3.0, 3.0))


@pytest.mark.parametrize("t", [0.3, np.float32(0.3), jnp.float32(0.3)])
def test_a_scalar_time_is_every_samples(t):
    graphdef, params = tiny()
    x, context = jax.random.normal(jax.random.key(0), (2, 4, 2, 4, 4)), jnp.ones((1, 3, 10))
    net = nnx.merge(graphdef, params)
    np.testing.assert_array_equal(net(x, t, context), net(x, jnp.full(2, 0.3, jnp.float32), context))


def test_a_mesh_says_where_and_not_what():
    mesh = make_mesh(replica=2, fsdp=2, context=2)
    graphdef, params = tiny()
    params = jax.device_put(params, fsdp_sharding(mesh, params))
    x, context = jax.random.normal(jax.random.key(0), (8, 4, 2, 4, 4)), jnp.ones((2, 3, 10))

    @functools.partial(jax.jit, static_argnums=0)
    def run(mesh, x):
        return nnx.merge(graphdef, params)(x, 0.3, context, mesh=mesh)

    out = run(mesh, x)
    assert out.sharding.is_equivalent_to(latent_sharding(mesh, out.shape), out.ndim)
    np.testing.assert_allclose(out, run(None, x), atol=1e-5)
    np.testing.assert_allclose(run(mesh, x[:6]), out[:6], atol=1e-5)  # no whole number of rows a device
