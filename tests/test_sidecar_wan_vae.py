"""The sidecar's Wan2.1 decoder in torch: parity with the golden set and with the trainer's, files, the codec option."""

import json
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.numpy import load_file, save_file

from ddrl_jax.checkpoint import load_pretrained, save_pretrained
from ddrl_jax.models.wan_vae import WanVAE, WanVAEConfig
from ddrl_jax.models.wan_vae import tile_windows as trainers_windows
from ddrl_jax.sidecar import wan_vae
from ddrl_jax.sidecar.codec import parse_codec, to_video
from ddrl_jax.sidecar.wan_vae import load, tile_windows

from .paths import GOLDEN, ROOT

torch.set_num_threads(1)
FOLDER = GOLDEN / "wan_vae"
OFFICIAL, DIFFUSERS = FOLDER / "official.safetensors", FOLDER / "diffusers"
FORMS = {
    "safetensors": OFFICIAL,
    "pth": FOLDER / "official.pth",
    "diffusers": DIFFUSERS,
    "diffusers_file": DIFFUSERS / "diffusion_pytorch_model.safetensors",
}
DECODE = 1e-4  # golden/README: float32 in another order of summation


@pytest.fixture(scope="module")
def golden():
    return dict(np.load(FOLDER / "io.npz"))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", ["video", "image"])
def test_parity(golden, case, form):
    codec = parse_codec(f"wan:path={FORMS[form]}")
    for z, name in (("encode_mean_normalised", "encode"), ("latent_random", "latent_random")):
        video = codec.decode(golden[f"{case}/{z}"])
        assert video.dtype == np.float32
        np.testing.assert_allclose(video, golden[f"{case}/decode_of_{name}_unclamped"], rtol=0, atol=DECODE)
    clamped = to_video(golden[f"{case}/latent_random"], "latent", codec)
    np.testing.assert_allclose(clamped, golden[f"{case}/decode_of_latent_random_clamped"], rtol=0, atol=DECODE)


@pytest.mark.parametrize("tile", [0, 3])
def test_the_trainer_decodes_the_same(golden, tile):
    graphdef, params = load_pretrained(OFFICIAL)
    z = golden["video/latent_random"]
    theirs = jax.jit(lambda p, z: nnx.merge(graphdef, p).decode(z, chunked=True, tile=tile))(params, z)
    ours = parse_codec(f"wan:path={OFFICIAL},tile={tile}").decode(z)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5)
    plain = golden["video/decode_of_latent_random_unclamped"]
    assert (abs(ours - plain).max() > 1e-2) == bool(tile)


@pytest.mark.parametrize(("size", "tile", "overlap"), [(7, 3, 2), (10, 4, 0), (11, 10, 2), (5, 5, 1), (90, 32, 8)])
def test_tiles_are_the_trainers(size, tile, overlap):
    for ours, theirs in zip(
        tile_windows(size, tile, overlap, 8), trainers_windows(size, tile, overlap, 8), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


def test_a_clip_does_not_depend_on_its_batch(golden):
    codec = parse_codec(f"wan:path={OFFICIAL}")
    z = golden["image/latent_random"]
    np.testing.assert_array_equal(codec.decode(z)[1:], codec.decode(z[1:]))
    np.testing.assert_array_equal(codec.decode(z.astype(np.float16)), codec.decode(z.astype(np.float16)))


def test_bfloat16_is_near(golden):
    codec = parse_codec(f"wan:path={OFFICIAL},dtype=bfloat16")
    dtypes = {p.dtype for n, p in codec.network.named_parameters() if not n.endswith("gamma")}
    assert dtypes == {torch.bfloat16}
    rough, exact = codec.decode(golden["video/latent_random"]), golden["video/decode_of_latent_random_unclamped"]
    assert 1e-5 < np.sqrt(np.mean((rough - exact) ** 2)) / exact.std() < 0.05


def test_memory_does_not_grow_with_the_clip(golden, monkeypatch):
    frames = []
    convolve = torch.nn.Conv3d.forward
    monkeypatch.setattr(torch.nn.Conv3d, "forward", lambda s, x: frames.append(x.shape[2]) or convolve(s, x))
    parse_codec(f"wan:path={OFFICIAL}").decode(golden["video/latent_random"][..., :1, :1].repeat(3, 2))
    assert max(frames) == 4 + 2  # the frames of one latent frame, and the two before


@pytest.mark.parametrize("layout", ["official", "diffusers"])
def test_other_sizes_are_found_in_the_file(tmp_path, layout):
    config = WanVAEConfig(dim=6, dim_mult=(1, 3, 2), num_res_blocks=1, temporal_downsample=(True, False))
    graphdef, abstract = nnx.split(nnx.eval_shape(lambda: WanVAE(config, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: jax.numpy.asarray(0.1 * rng.normal(size=leaf.shape), leaf.dtype), abstract)
    save_pretrained(tmp_path / "x", graphdef, params, layout=layout)
    z = rng.normal(size=(1, 16, 3, 3, 2)).astype(np.float32)
    theirs = jax.jit(lambda p, z: nnx.merge(graphdef, p).decode(z))(params, z)
    ours = load(tmp_path / "x").decode(z)
    assert ours.shape == (1, 3, 5, 12, 8)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5)


def test_statistics_of_a_diffusers_folder(tmp_path, golden):
    shutil.copytree(DIFFUSERS, tmp_path / "x")
    config = json.loads((DIFFUSERS / "config.json").read_text())
    config["latents_mean"], config["latents_std"] = [0.5] * 16, [2.0] * 16
    (tmp_path / "x/config.json").write_text(json.dumps(config))
    z = golden["image/latent_random"]
    std, mean = (golden[f"latents_{name}"].reshape(-1, 1, 1, 1) for name in ("std", "mean"))
    video = load(tmp_path / "x").decode(((z * std + mean) - 0.5) / 2)
    np.testing.assert_allclose(video, golden["image/decode_of_latent_random_unclamped"], rtol=0, atol=DECODE)


@pytest.mark.parametrize("zipped", [True, False])
def test_torch_files_that_the_trainer_reads(tmp_path, golden, zipped, capsys):
    """Of the form before zip, and of a run that kept other things beside the model."""
    state = {name: torch.from_numpy(value) for name, value in load_file(OFFICIAL).items()}
    state = {"model": state | {"x._extra_state": torch.zeros(1), "step": 3}, "optimizer": {"lr": 1}}
    torch.save(state, tmp_path / "x.pth", _use_new_zipfile_serialization=zipped)
    z = golden["image/latent_random"]
    for path in (tmp_path / "x.pth", tmp_path):
        np.testing.assert_array_equal(load(path).decode(z), load(OFFICIAL).decode(z))
    assert not capsys.readouterr().out  # what a server says there is read by whoever started it


def test_shards_of_an_index(tmp_path, golden):
    tensors = load_file(FORMS["diffusers_file"])
    names = sorted(tensors)
    weight_map = {name: f"x-0000{i % 2 + 1}-of-00002.safetensors" for i, name in enumerate(names)}
    for shard in set(weight_map.values()):
        save_file({name: tensors[name] for name in names if weight_map[name] == shard}, tmp_path / shard)
    save_file({"decoder.extra": np.zeros(1)}, tmp_path / "other.safetensors")  # which the index does not name
    shutil.copyfile(DIFFUSERS / "config.json", tmp_path / "config.json")
    index = tmp_path / "x.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    z = golden["image/latent_random"]
    np.testing.assert_array_equal(load(tmp_path).decode(z), load(DIFFUSERS).decode(z))
    index.write_text(json.dumps({"weight_map": weight_map | {"a": "../x.safetensors"}}))
    assert "names '../x.safetensors', which is no file of its folder" in error_of(tmp_path)
    index.write_text("[]")
    assert "no weight_map" in error_of(tmp_path)
    (tmp_path / "x-00002-of-00002.safetensors").unlink()
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert "names files that are not there: x-00002-of-00002.safetensors" in error_of(tmp_path)


# --- what does not fit ---


def error_of(path):
    with pytest.raises(ValueError) as error:
        load(path)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("form", ["official", "diffusers"])
def test_all_names_that_do_not_fit_are_listed(tmp_path, form):
    source = OFFICIAL if form == "official" else FORMS["diffusers_file"]
    tensors = load_file(source)
    bias, first, time = (
        ("conv2.bias", "decoder.conv1.bias", "decoder.upsamples.3.time_conv.bias")
        if form == "official"
        else ("post_quant_conv.bias", "decoder.conv_in.bias", "decoder.up_blocks.0.upsamplers.0.time_conv.bias")
    )
    del tensors[time]
    tensors |= {bias: np.zeros(3, np.float32), first: np.zeros(5, np.float32), "decoder.extra": np.zeros(1)}
    save_file(tensors, tmp_path / "x.safetensors")
    shutil.copyfile(DIFFUSERS / "config.json", tmp_path / "config.json")
    text = error_of(tmp_path / "x.safetensors")
    assert f"1 missing: {time}; 1 unexpected: decoder.extra; 2 misshapen: " in text
    assert f"{bias} is (3,), not (16,)" in text and f"{first} is (5,), not (16,)" in text


def test_files_of_another_kind(tmp_path):
    assert "does not exist" in error_of(tmp_path / "nothing.pth")
    assert "0 .safetensors files and 0 indices" in error_of(tmp_path)
    assert "not a whole safetensors file" in error_of(tmp_path / "nothing.safetensors")
    for name in ("x.pth", "x.safetensors"):
        (tmp_path / name).write_bytes(b"no weights at all")
        assert "x." in error_of(tmp_path / name)
    torch.save({"conv2.bias": 3}, tmp_path / "x.pth")
    assert "does not hold a dict of tensors" in error_of(tmp_path / "x.pth")
    torch.save([torch.nn.Linear(1, 1)], tmp_path / "x.pth")  # a pickle of code: never run
    assert "not a torch file of tensors alone" in error_of(tmp_path / "x.pth")
    save_file({"net.x": np.zeros(1)}, tmp_path / "x.safetensors")
    assert "holds no Wan2.1 decoder" in error_of(tmp_path / "x.safetensors")
    shutil.copyfile(FORMS["diffusers_file"], tmp_path / "x.safetensors")
    assert "is not the config.json of an AutoencoderKLWan" in error_of(tmp_path / "x.safetensors")


def test_latents_that_do_not_fit():
    with pytest.raises(ValueError, match="C must be 16"):
        parse_codec(f"wan:path={OFFICIAL}").decode(np.zeros((1, 4, 1, 2, 2), np.float32))


# --- the option ---


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("wan", "'wan'; wan needs path=FILE_OR_FOLDER"),
        ("wan:tile=3", "wan needs path"),
        ("wan:nowhere", "no option 'nowhere'; it has path, dtype, tile"),
        ("wan:path=/nowhere.pth", "/nowhere.pth does not exist"),
        ("wan:path=/nowhere,dtyp=float32", "/nowhere,dtyp=float32 does not exist"),
        (f"wan:path={OFFICIAL},dtype=float16", "dtype='float16'; float32 or bfloat16"),
        (f"wan:path={OFFICIAL},tile=x", "tile='x' is not a number"),
        (f"wan:path={OFFICIAL},tile=-1", "tile=-1; 0"),
    ],
)
def test_options_that_do_not_fit(text, words):
    with pytest.raises(ValueError, match=r"^codec: ") as error:
        parse_codec(text)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_a_path_may_hold_commas_and_equals_signs(tmp_path):
    file = tmp_path / "step=3,run:b" / "vae,x=1.safetensors"
    file.parent.mkdir()
    shutil.copyfile(OFFICIAL, file)
    for text in (f"wan:path={file},tile=2,dtype=bfloat16", f"wan:tile=2,dtype=bfloat16,path={file}"):
        codec = parse_codec(text)
        assert codec.tile == 2 and codec.network.conv2.weight.dtype == torch.bfloat16


def test_the_device_is_the_servers(monkeypatch):
    codec = parse_codec(f"wan:path={OFFICIAL}", "meta")
    assert {p.device.type for p in codec.network.parameters()} == {"meta"}
    seen = []

    def fake(path, *, device, dtype):
        seen.append(device)
        raise ValueError("enough")

    monkeypatch.setattr(wan_vae, "load", fake)
    from ddrl_jax.sidecar.__main__ import main

    assert main(["serve", "--scorer", "brightness", "--codec", "wan:path=x", "--device", "meta"]) == 2
    assert seen == ["meta"]


def test_a_server_without_its_weights_says_so_in_one_line(tmp_path):
    command = [sys.executable, "-m", "ddrl_jax.sidecar", "serve", "--scorer", "brightness", "--codec"]
    done = subprocess.run([*command, f"wan:path={tmp_path}/no.pth"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("ddrl_jax.sidecar: codec: ") and "no.pth does not exist" in line


def test_the_decoder_needs_no_jax():
    code = "import sys\nfor name in ('jax', 'flax', 'diffusers'): sys.modules[name] = None\n"
    code += f"from ddrl_jax.sidecar.codec import parse_codec\nparse_codec('wan:path={OFFICIAL}')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
