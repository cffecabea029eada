"""The Wan2.1 VAE: parity with the published code's outputs, its two forms in time, tiles, names and the codec."""

import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from ddrl_jax.checkpoint import load_pretrained, save_pretrained
from ddrl_jax.models.wan_codec import WanCodec
from ddrl_jax.models.wan_vae import Downsample, Past, Upsample, WanVAE, WanVAEConfig, _over_tiles, tile_windows
from ddrl_jax.parallel.mesh import make_mesh

from .paths import GOLDEN

FOLDER = GOLDEN / "wan_vae"
OFFICIAL, DIFFUSERS = FOLDER / "official.safetensors", FOLDER / "diffusers"
# golden/README: float32 in another order of summation.
ENCODE, DECODE = 1e-5, 1e-4


@pytest.fixture(scope="module")
def golden():
    return dict(np.load(FOLDER / "io.npz"))


@functools.cache
def loaded():
    return load_pretrained(OFFICIAL)


@functools.cache
def program(method, chunked=False, dtype="float32", **options):
    """A jitted method of the golden network: compiled once a shape for all tests."""
    graphdef, params = loaded() if dtype == "float32" else load_pretrained(OFFICIAL, compute_dtype=dtype)

    def run(params, x):
        return getattr(nnx.merge(graphdef, params), method)(x, chunked=chunked, **options)

    return functools.partial(jax.jit(run), params)


# --- parity ---


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("case", ["video", "image"])
def test_parity(golden, case, chunked):
    mean = golden[f"{case}/encode_mean_normalised"]
    latent = program("encode", chunked)(golden[f"{case}/x_BCTHW"])
    assert latent.shape == mean.shape and latent.dtype == np.float32
    np.testing.assert_allclose(latent, mean, rtol=0, atol=ENCODE)
    raw = latent * golden["latents_std"].reshape(-1, 1, 1, 1) + golden["latents_mean"].reshape(-1, 1, 1, 1)
    np.testing.assert_allclose(raw, golden[f"{case}/encode_mean_raw"], rtol=0, atol=3 * ENCODE)
    decode = program("decode", chunked)
    for z, name in ((mean, "encode"), (golden[f"{case}/latent_random"], "latent_random")):
        video = decode(z)
        assert video.dtype == np.float32
        np.testing.assert_allclose(video, golden[f"{case}/decode_of_{name}_unclamped"], rtol=0, atol=DECODE)
    np.testing.assert_allclose(
        np.clip(video, -1, 1), golden[f"{case}/decode_of_latent_random_clamped"], rtol=0, atol=DECODE
    )
    assert case == "image" or abs(video).max() > 1  # else a clamp would go unseen


def test_whole_and_chunked_are_the_same_numbers(golden):
    x, z = golden["video/x_BCTHW"], golden["video/latent_random"]
    np.testing.assert_allclose(program("encode", True)(x), program("encode")(x), rtol=0, atol=3e-6)
    np.testing.assert_allclose(program("decode", True)(z), program("decode")(z), rtol=0, atol=2e-5)


def test_without_jit(golden):
    model = nnx.merge(*loaded())
    x, z = golden["image/x_BCTHW"][:1], golden["image/latent_random"][:1]
    np.testing.assert_allclose(model.encode(x), golden["image/encode_mean_normalised"][:1], rtol=0, atol=ENCODE)
    np.testing.assert_allclose(
        model.decode(z, chunked=True), golden["image/decode_of_latent_random_unclamped"][:1], rtol=0, atol=DECODE
    )


def test_bfloat16_is_near(golden):
    x, z = golden["video/x_BCTHW"], golden["video/latent_random"]
    for method, given in (("encode", x), ("decode", z)):
        exact = np.asarray(program(method)(given))
        rough = program(method, dtype="bfloat16")(given)
        assert rough.dtype == np.float32 and np.isfinite(rough).all()
        error = np.sqrt(np.mean((rough - exact) ** 2)) / np.std(exact)
        assert 1e-5 < error < 0.05, (method, error)


def test_float64_is_computed_in_float64(golden):
    with jax.enable_x64(True):
        graphdef, params = load_pretrained(OFFICIAL, dtype="float64")
        z = jnp.asarray(golden["image/latent_random"], jnp.float64)
        video = jax.jit(lambda p, z: nnx.merge(graphdef, p).decode(z))(params, z)
        assert video.dtype == np.float64
        np.testing.assert_allclose(video, golden["image/decode_of_latent_random_unclamped"], rtol=0, atol=DECODE)


# --- the forms in time ---


def test_down_in_time_passes_the_first_frame_and_has_no_padding():
    layer = Downsample(4, temporal=True, rngs=nnx.Rngs(0), dtype="float32", param_dtype="float32")
    x = np.random.default_rng(0).normal(size=(1, 9, 4, 6, 4)).astype(np.float32)
    space = np.asarray(layer.space(x[0]))
    want = [space[0]]
    for k in range(4):
        window = space[2 * k : 2 * k + 3]
        want.append(np.einsum("thwc,tcd->hwd", window, np.asarray(layer.time.kernel)[:, 0, 0]) + layer.time.bias)
    y = layer(x, Past())
    assert y.shape == (1, 5, 2, 3, 4)
    np.testing.assert_array_equal(y[0, 0], space[0])
    np.testing.assert_allclose(y[0], np.stack(want), rtol=0, atol=3e-6)


def test_down_in_space_pads_right_and_below():
    layer = Downsample(2, temporal=False, rngs=nnx.Rngs(0), dtype="float32", param_dtype="float32")
    x = np.random.default_rng(0).normal(size=(1, 1, 4, 4, 2)).astype(np.float32)
    padded = np.pad(x[0, 0], ((0, 1), (0, 1), (0, 0)))
    corner = np.einsum("hwc,hwcd->d", padded[2:5, 2:5], np.asarray(layer.space.kernel))
    np.testing.assert_allclose(layer(x, Past())[0, 0, 1, 1], corner, rtol=0, atol=1e-6)


def test_up_in_time_passes_the_first_frame_and_never_looks_at_it():
    layer = Upsample(4, temporal=True, rngs=nnx.Rngs(0), dtype="float32", param_dtype="float32")
    x = np.random.default_rng(0).normal(size=(1, 3, 2, 3, 4)).astype(np.float32)
    y = np.asarray(layer(x, Past()))
    assert y.shape == (1, 5, 4, 6, 2)
    twice = x[0, 0].repeat(2, 0).repeat(2, 1)
    np.testing.assert_allclose(y[0, 0], layer.space(twice[None])[0], rtol=0, atol=1e-6)
    other = x.copy()
    other[:, 0] += 1
    changed = np.asarray(layer(other, Past()))
    np.testing.assert_array_equal(changed[:, 1:], y[:, 1:])
    assert (changed[:, 0] != y[:, 0]).all()
    # The second frame has zeros before it and makes two: first half of the channels, then the second.
    pair = np.einsum("hwc,cd->hwd", x[0, 1], np.asarray(layer.time.kernel)[2, 0, 0]) + np.asarray(layer.time.bias)
    for n, half in enumerate((pair[..., :4], pair[..., 4:])):
        want = layer.space(half.repeat(2, 0).repeat(2, 1)[None])[0]
        np.testing.assert_allclose(y[0, 1 + n], want, rtol=0, atol=3e-6)


def test_the_past_does_not_see_the_future(golden):
    x, z = golden["video/x_BCTHW"].copy(), golden["video/latent_random"].copy()
    latent, video = program("encode")(x), program("decode")(z)
    x[:, :, 5:] *= -1
    z[:, :, 2:] *= -1
    np.testing.assert_array_equal(program("encode")(x)[:, :, :2], latent[:, :, :2])
    np.testing.assert_array_equal(program("decode")(z)[:, :, :5], video[:, :, :5])
    assert (program("encode")(x)[:, :, 2] != latent[:, :, 2]).any()


def test_the_chunked_program_and_its_memory_do_not_grow_with_the_clip():
    graphdef, params = loaded()
    model = nnx.merge(graphdef, params)

    def equations(method, *shape):
        jaxpr = jax.make_jaxpr(functools.partial(getattr(model, method), chunked=True))(np.zeros(shape, np.float32))
        return len(str(jaxpr).splitlines())

    assert equations("encode", 1, 3, 9, 16, 16) == equations("encode", 1, 3, 93, 16, 16)
    assert equations("decode", 1, 16, 3, 2, 2) == equations("decode", 1, 16, 24, 2, 2)

    def temporary(frames):
        abstract = jax.ShapeDtypeStruct((1, 3, frames, 64, 64), jnp.float32)
        compiled = (
            jax.jit(lambda p, x: nnx.merge(graphdef, p).encode(x, chunked=True)).lower(params, abstract).compile()
        )
        return compiled.memory_analysis().temp_size_in_bytes

    short, long = temporary(9), temporary(93)
    assert long < 1.1 * short, (short, long)


# --- what does not fit ---


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((1, 3, 8, 16, 16), "8 frames; it must have 4k+1, as 5 or 9"),
        ((1, 3, 0, 16, 16), "0 frames"),
        ((1, 3, 5, 16, 20), "16 x 20; both must be multiples of 8"),
        ((1, 3, 5, 0, 16), "0 x 16"),
        ((1, 1, 5, 16, 16), "1 channels; it must have 3"),
    ],
)
def test_videos_that_do_not_fit(shape, words):
    graphdef, params = loaded()
    for encode in (nnx.merge(graphdef, params).encode, WanCodec(graphdef, params).encode):
        with pytest.raises(ValueError, match=words.replace("+", r"\+")):
            encode(np.zeros(shape, np.float32))


def test_latents_and_tiles_that_do_not_fit():
    graphdef, params = loaded()
    model = nnx.merge(graphdef, params)
    z = np.zeros((1, 16, 1, 4, 4), np.float32)
    with pytest.raises(ValueError, match="C must be 16"):
        model.decode(z[:, :15])
    for options in ({"tile": -1}, {"tile": 2, "overlap": 2}, {"tile": 2, "overlap": -1}):
        with pytest.raises(ValueError, match="tile must be at least 1, overlap from 0 to tile-1"):
            model.decode(z, **options)
    with pytest.raises(ValueError, match="tile is -1"):
        WanCodec(graphdef, params, tile=-1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dim": 0}, "dim is 0"),
        ({"dim_mult": (1, 2)}, "temporal_downsample"),
        ({"dim": 3, "dim_mult": (1, 1, 2, 2)}, "must be even"),
        ({"z_dim": 8}, "latents_mean has 16 entries; it needs z_dim = 8"),
        ({"latents_std": (0.0,) * 16}, "latents_std"),
        ({"num_res_blocks": 0}, "num_res_blocks is 0"),
    ],
)
def test_configs_that_do_not_fit(changes, words):
    with pytest.raises(ValueError, match=words):
        WanVAEConfig(**changes)


# --- tiles ---


@pytest.mark.parametrize(
    ("size", "tile", "overlap"), [(5, 5, 1), (7, 3, 1), (7, 3, 2), (10, 4, 0), (11, 10, 2), (90, 32, 8), (160, 32, 8)]
)
def test_tile_weights_add_up_to_one(size, tile, overlap):
    starts, weights = tile_windows(size, tile, overlap, 8)
    assert starts[0] == 0 and starts[-1] == size - tile
    assert len(starts) == 1 or (tile - np.diff(starts)).min() >= overlap
    total = np.zeros(size * 8)
    for start, weight in zip(starts, weights, strict=True):
        total[start * 8 : (start + tile) * 8] += weight
    np.testing.assert_allclose(total, 1, rtol=0, atol=1e-12)
    assert weights.min() > 0


def test_tile_weights_run_linearly_over_the_shared_part():
    starts, weights = tile_windows(6, 4, 2, 2)
    assert starts.tolist() == [0, 2]
    np.testing.assert_allclose(weights[0], [1, 1, 1, 1, 0.875, 0.625, 0.375, 0.125])
    np.testing.assert_allclose(weights[1], weights[0][::-1])


@pytest.mark.parametrize(("tile", "overlap"), [(3, 0), (3, 2), (4, 1), (6, 5), (8, 2)])
def test_tiles_of_a_local_decoder_are_seamless(tile, overlap):
    z = np.random.default_rng(0).normal(size=(2, 3, 2, 8, 5)).astype(np.float32)

    def decode(z):
        return z.repeat(4, 3).repeat(4, 4)

    whole = np.asarray(decode(z))
    tiled = jax.jit(lambda z: _over_tiles(decode, z, whole.shape[1:], tile, overlap))(z)
    np.testing.assert_allclose(tiled, whole, rtol=0, atol=1e-6)


def test_tiled_decode():
    # As a trained decoder and real latents: smooth, and a cell speaks mostly for itself. The random network is nothing
    # of the sort, so its attention is switched off and its kernels' outer taps are made small.
    graphdef, params = loaded()
    state = []
    for key, leaf in nnx.to_flat_state(params):
        value = np.asarray(leaf[...])
        if key[:3] == ("decoder", "middle", 1) and key[3] == "proj":
            value = 0 * value
        if value.ndim > 3 and value.shape[-3] == 3:
            value = value * (0.1 + 0.9 * (np.indices((3, 3)) == 1).all(0)).astype(np.float32)[..., None, None]
        state.append((key, leaf.replace(jnp.asarray(value))))
    params = nnx.from_flat_state(state)
    h, w = np.linspace(0, 1, 12)[:, None], np.linspace(0, 1, 10)
    z = np.sin(np.arange(16).reshape(16, 1, 1, 1) + 2 * h + 3 * w)[None] * np.ones((1, 1, 2, 1, 1))

    def decode(**options):
        run = jax.jit(lambda params, z: nnx.merge(graphdef, params).decode(z, **options))
        return np.asarray(run(params, z.astype(np.float32)))

    plain = decode()
    np.testing.assert_array_equal(decode(tile=12), plain)
    tiled = decode(tile=8)
    assert tiled.shape == plain.shape
    assert 1e-4 < np.sqrt(np.mean((tiled - plain) ** 2)) / plain.std() < 0.02


# --- names ---


def same_params(a, b):
    a, b = nnx.to_flat_state(a), nnx.to_flat_state(b)
    assert [key for key, _ in a] == [key for key, _ in b]
    for (key, x), (_, y) in zip(a, b, strict=True):
        np.testing.assert_array_equal(x[...], y[...], err_msg=str(key))


def test_all_forms_are_the_same_network():
    graphdef, params = loaded()
    assert nnx.merge(graphdef, params).config == WanVAEConfig(dim=4)
    for path in (FOLDER / "official.pth", DIFFUSERS, DIFFUSERS / "diffusion_pytorch_model.safetensors"):
        other, others = load_pretrained(path)
        assert other == graphdef, path
        same_params(others, params)


@pytest.mark.parametrize("layout", ["official", "diffusers"])
def test_round_trip_is_bit_exact(tmp_path, layout):
    source = OFFICIAL if layout == "official" else DIFFUSERS / "diffusion_pytorch_model.safetensors"
    graphdef, params = load_pretrained(source)
    save_pretrained(tmp_path / "x", graphdef, params, layout=layout)
    (file,) = (tmp_path / "x").glob("*.safetensors")
    before, after = load_file(source), load_file(file)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        np.testing.assert_array_equal(after[name], tensor, err_msg=name)
    assert load_pretrained(tmp_path / "x")[0] == graphdef
    if layout == "diffusers":
        theirs = json.loads((DIFFUSERS / "config.json").read_text())
        assert json.loads((tmp_path / "x/config.json").read_text()) == theirs


def test_diffusers_loads_ours_and_gives_the_same(tmp_path, golden):
    import torch
    from diffusers import AutoencoderKLWan

    torch.set_num_threads(1)
    save_pretrained(tmp_path / "vae", *loaded(), layout="diffusers")
    twin = AutoencoderKLWan.from_pretrained(tmp_path / "vae").eval()
    mean, std = (np.array(getattr(twin.config, f"latents_{name}")).reshape(-1, 1, 1, 1) for name in ("mean", "std"))
    with torch.inference_mode():
        latent = twin.encode(torch.from_numpy(golden["video/x_BCTHW"])).latent_dist.mean.numpy()
        z = golden["video/latent_random"]
        video = twin.decode(torch.from_numpy((z * std + mean).astype(np.float32))).sample.numpy()
    np.testing.assert_allclose(program("encode")(golden["video/x_BCTHW"]), (latent - mean) / std, rtol=0, atol=ENCODE)
    np.testing.assert_allclose(np.clip(program("decode")(z), -1, 1), video, rtol=0, atol=DECODE)


def test_the_published_size():
    import torch
    from diffusers import AutoencoderKLWan

    abstract = nnx.state(nnx.eval_shape(lambda: WanVAE(WanVAEConfig(), rngs=nnx.Rngs(0))))
    with torch.device("meta"):
        twin = sum(p.numel() for p in AutoencoderKLWan().parameters())
    assert sum(leaf.size for leaf in jax.tree.leaves(abstract)) == twin == 126_892_531


def random_network(config):
    """Numbers from numpy: drawing them with jax compiles a program a shape."""
    graphdef, abstract = nnx.split(nnx.eval_shape(lambda: WanVAE(config, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(0)
    return graphdef, jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype), abstract)


SIZES = {"dim": 6, "dim_mult": (1, 3, 2), "num_res_blocks": 1, "temporal_downsample": (True, False)}


@pytest.mark.parametrize("layout", ["official", "diffusers"])
def test_other_sizes_are_found_in_the_file(tmp_path, layout):
    config = WanVAEConfig(**SIZES)
    graphdef, params = random_network(config)
    save_pretrained(tmp_path / "x", graphdef, params, layout=layout)
    other, others = load_pretrained(tmp_path / "x")
    assert nnx.merge(other, others).config == config
    same_params(others, params)
    assert (config.spatial, config.temporal) == (4, 2)
    assert config.latent_shape((3, 7, 12, 8)) == (16, 4, 3, 2)
    assert config.video_shape((16, 4, 3, 2)) == (3, 7, 12, 8)


def test_all_names_that_do_not_fit_are_listed(tmp_path):
    tensors = load_file(OFFICIAL)
    del tensors["decoder.upsamples.3.time_conv.bias"], tensors["conv2.bias"]
    tensors["encoder.extra"] = np.zeros(1, np.float32)
    tensors["encoder.conv1.bias"] = np.zeros(5, np.float32)
    tensors["encoder.downsamples.6.residual.2.bias"] = np.zeros(9, np.float32)
    save_file(tensors, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="does not fit") as error:
        load_pretrained(tmp_path / "x.safetensors")
    text = str(error.value)
    assert "\n" not in text
    assert "2 missing: " in text and "decoder.upsamples.3.time_conv.bias" in text and "conv2.bias" in text
    assert "1 unexpected: encoder.extra" in text
    assert "encoder.conv1.bias is (5,), not (4,)" in text
    assert "encoder.downsamples.6.residual.2.bias is (9,), not (16,)" in text


def test_files_of_another_kind(tmp_path):
    with pytest.raises(ValueError, match='one set of weights; use "raw"'):
        load_pretrained(OFFICIAL, which="ema")
    shutil.copyfile(DIFFUSERS / "diffusion_pytorch_model.safetensors", tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match=r"no config.json; AutoencoderKLWan's is needed"):
        load_pretrained(tmp_path / "x.safetensors")
    given = json.loads((DIFFUSERS / "config.json").read_text())
    for changes, words in (
        ({"is_residual": True}, "is_residual True; a Wan2.1 autoencoder has False"),
        ({"decoder_base_dim": 8}, "decoder_base_dim 8"),
        ({"patch_size": 2}, "patch_size 2"),
        ({"attn_scales": [1.0]}, r"attn_scales \[1.0\]"),
        ({"z_dim": 8}, "config.json: latents_mean has 16 entries"),
        ({"dim_mult": 4}, "config.json: "),
    ):
        (tmp_path / "config.json").write_text(json.dumps(given | changes))
        with pytest.raises(ValueError, match=words):
            load_pretrained(tmp_path)
    del given["latents_std"]
    (tmp_path / "config.json").write_text(json.dumps(given))
    with pytest.raises(ValueError, match="has no latents_std"):
        load_pretrained(tmp_path)


def test_other_statistics_need_the_diffusers_form(tmp_path):
    config = dataclasses.replace(WanVAEConfig(**SIZES), z_dim=2, latents_mean=(1.0, 2.0), latents_std=(1.0, 3.0))
    network = random_network(config)
    with pytest.raises(ValueError, match='use layout="diffusers"'):
        save_pretrained(tmp_path / "x.safetensors", *network, layout="official")
    save_pretrained(tmp_path / "x", *network, layout="diffusers")
    assert nnx.merge(*load_pretrained(tmp_path / "x")).config == config


# --- the codec ---


def test_codec(golden):
    codec = WanCodec(*loaded())
    assert (codec.spatial, codec.temporal) == (8, 4)
    assert codec.latent_shape((3, 93, 704, 1280)) == (16, 24, 88, 160)
    assert codec.video_shape((16, 24, 88, 160)) == (3, 93, 704, 1280)
    x, z = golden["image/x_BCTHW"], golden["image/latent_random"]
    # Two clips share the eight devices, one runs alone: the same numbers.
    latents, videos = codec.encode(x), codec.decode(z)
    for array in (latents, videos):
        assert isinstance(array, np.ndarray) and array.dtype == np.float32
    np.testing.assert_allclose(latents, golden["image/encode_mean_normalised"], rtol=0, atol=ENCODE)
    np.testing.assert_allclose(videos, golden["image/decode_of_latent_random_unclamped"], rtol=0, atol=DECODE)
    np.testing.assert_allclose(codec.encode(x[1:]), latents[1:], rtol=0, atol=1e-6)
    np.testing.assert_allclose(codec.decode(z[1:]), videos[1:], rtol=0, atol=1e-6)
    assert codec.encode(x[:0]).shape == (0, 16, 1, 3, 4)


def test_codec_with_weights_from_a_mesh_and_tiles(golden):
    graphdef, params = load_pretrained(OFFICIAL, mesh=make_mesh(fsdp=8))
    z = golden["image/latent_random"][:1]
    tiled = WanCodec(graphdef, params, tile=2).decode(z)
    np.testing.assert_allclose(tiled, program("decode", True, tile=2)(z), rtol=0, atol=1e-5)
    assert abs(tiled - golden["image/decode_of_latent_random_unclamped"][:1]).max() > 1e-2  # it is tiled
