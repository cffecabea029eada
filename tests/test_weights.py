"""Import and export of weights: bits, names, errors. That the numbers mean the right thing is test_cosmos_dit's."""

import collections
import dataclasses
import io
import json
import pickle
import shutil
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from ddrl_jax.checkpoint import load_pretrained, save_pretrained
from ddrl_jax.models import CosmosDiT, CosmosDiTConfig
from ddrl_jax.parallel.mesh import make_mesh
from tests.paths import GOLDEN

FOLDER = GOLDEN / "cosmos_dit"
OFFICIAL, DIFFUSERS = FOLDER / "official.safetensors", FOLDER / "diffusers"
WRAPPED = FOLDER / "official_wrapped_net_and_net_ema_bf16.pt"


def same_bits(a, b):
    assert sorted(a) == sorted(b)
    for name in a:
        assert a[name].dtype == b[name].dtype and a[name].shape == b[name].shape, name
        assert a[name].tobytes() == b[name].tobytes(), name


def same_params(a, b):
    a, b = ({key: np.asarray(leaf[...]) for key, leaf in nnx.to_flat_state(p)} for p in (a, b))
    same_bits(a, b)


def diffusers_tensors(folder):
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


# ---- round trips -----------------------------------------------------------------------------------------------------


def test_official_round_trip(tmp_path):
    loaded = load_pretrained(OFFICIAL)
    save_pretrained(tmp_path / "out.safetensors", *loaded, layout="official")
    same_bits(load_file(tmp_path / "out.safetensors"), load_file(OFFICIAL))
    save_pretrained(tmp_path / "folder", *loaded)
    same_bits(load_file(tmp_path / "folder/model.safetensors"), load_file(OFFICIAL))
    again = load_pretrained(tmp_path / "folder")
    assert again[0] == loaded[0]
    same_params(again[1], loaded[1])


def test_diffusers_round_trip(tmp_path):
    loaded = load_pretrained(DIFFUSERS)
    save_pretrained(tmp_path / "out", *loaded, layout="diffusers")
    same_bits(diffusers_tensors(tmp_path / "out"), diffusers_tensors(DIFFUSERS))
    want = json.loads((DIFFUSERS / "config.json").read_text())
    got = json.loads((tmp_path / "out/config.json").read_text())
    assert {k: v for k, v in want.items() if k not in ("img_context_dim_out", "img_context_num_tokens")} == got


def test_the_two_layouts_hold_the_same_network(tmp_path):
    a, b = load_pretrained(OFFICIAL), load_pretrained(DIFFUSERS)
    assert a[0] == b[0]
    same_params(a[1], b[1])
    save_pretrained(tmp_path / "d", *a, layout="diffusers")
    same_bits(diffusers_tensors(tmp_path / "d"), diffusers_tensors(DIFFUSERS))


def test_shards_with_an_index(tmp_path):
    loaded = load_pretrained(DIFFUSERS)
    save_pretrained(tmp_path, *loaded, layout="diffusers", max_shard_bytes=200_000)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 2 and all(file.stat().st_size < 210_000 for file in files)
    assert files[0].name == f"diffusion_pytorch_model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "diffusion_pytorch_model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in diffusers_tensors(DIFFUSERS).values())
    assert {k: tmp_path / v for k, v in index["weight_map"].items()} == {k: f for f in files for k in load_file(f)}
    same_bits(diffusers_tensors(tmp_path), diffusers_tensors(DIFFUSERS))
    same_params(load_pretrained(tmp_path)[1], loaded[1])
    # Saving again as one file leaves no shard of before behind.
    save_pretrained(tmp_path, *loaded, layout="diffusers")
    assert sorted(f.name for f in tmp_path.iterdir()) == ["config.json", "diffusion_pytorch_model.safetensors"]
    same_params(load_pretrained(tmp_path)[1], loaded[1])


def test_bfloat16_is_kept(tmp_path):
    graphdef, params = load_pretrained(OFFICIAL, dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    assert nnx.merge(graphdef, params).config.dtype == "bfloat16"
    save_pretrained(tmp_path / "a.safetensors", graphdef, params)
    save_pretrained(tmp_path / "b.safetensors", *load_pretrained(tmp_path / "a.safetensors"), dtype="bfloat16")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    same_params(load_pretrained(tmp_path / "b.safetensors", dtype="bfloat16")[1], params)


def test_a_trained_network_of_other_sizes(tmp_path):
    config = CosmosDiTConfig(
        in_channels=4,
        width=48,
        depth=11,
        heads=2,
        mlp_ratio=3,
        adaln_rank=8,
        context_in=10,
        context_dim=12,
        dtype="float32",
    )
    graphdef = nnx.split(nnx.eval_shape(lambda: CosmosDiT(config, rngs=nnx.Rngs(0))))[0]
    params = jax.jit(lambda: nnx.split(CosmosDiT(config, rngs=nnx.Rngs(0)))[1])()
    for path, layout in ((tmp_path / "x.safetensors", "official"), (tmp_path / "x", "diffusers")):
        save_pretrained(path, graphdef, params, layout=layout)
        again = load_pretrained(path)
        assert again[0] == graphdef
        same_params(again[1], params)


def test_the_compute_dtype_is_the_parameters_unless_said():
    def config(**options):
        return nnx.merge(*load_pretrained(OFFICIAL, **options)).config

    assert (config().dtype, config().param_dtype) == ("float32", "float32")
    half = config(compute_dtype=jnp.bfloat16)
    assert (half.dtype, half.param_dtype) == ("bfloat16", "float32")


def test_onto_a_mesh():
    mesh = make_mesh(replica=2, fsdp=4, context=1)
    graphdef, params = load_pretrained(OFFICIAL, mesh=mesh)
    plain_graphdef, plain = load_pretrained(OFFICIAL)
    assert graphdef == plain_graphdef
    same_params(params, plain)
    kernel = nnx.merge(graphdef, params).blocks.mlp.up.kernel[...]
    assert kernel.sharding.mesh == mesh and "fsdp" in kernel.sharding.spec
    assert kernel.addressable_shards[0].data.size * 4 == kernel.size


# ---- torch files -----------------------------------------------------------------------------------------------------


def test_torch_file_equals_safetensors():
    same_params(load_pretrained(FOLDER / "official_flat.pt")[1], load_pretrained(OFFICIAL)[1])


def test_ema_is_chosen_by_the_option():
    raw, ema = load_pretrained(WRAPPED)[1], load_pretrained(WRAPPED, which="ema")[1]
    same_params(raw, load_pretrained(FOLDER / "official_flat_bf16.pt")[1])
    assert not any(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(raw), jax.tree.leaves(ema), strict=True))


class Evil:
    def __reduce__(self):
        return exec, ("raise SystemExit('code of the file ran')",)


def test_a_torch_file_runs_no_code(tmp_path):
    stream = io.BytesIO()
    pickle.dump({"net.x": Evil(), "model": collections.OrderedDict(a=Evil())}, stream)
    with zipfile.ZipFile(tmp_path / "evil.pt", "w") as archive:
        archive.writestr("evil/data.pkl", stream.getvalue())
    with pytest.raises(ValueError, match=r"no names net\.\*"):
        load_pretrained(tmp_path / "evil.pt")


def test_damaged_torch_files(tmp_path):
    whole = WRAPPED.read_bytes()
    (tmp_path / "cut.pt").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.pt").write_text("hello")
    for name in ("cut.pt", "text.pt"):
        with pytest.raises(ValueError, match=f"{name} is not a torch file"):
            load_pretrained(tmp_path / name)


# ---- errors ----------------------------------------------------------------------------------------------------------


def error_of(path, **options):
    with pytest.raises(ValueError) as error:
        load_pretrained(path, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_every_bad_name_in_one_error(tmp_path):
    tensors = load_file(OFFICIAL)
    del tensors["net.blocks.1.mlp.layer1.weight"], tensors["net.t_embedding_norm.weight"]
    tensors["net.surprise.weight"] = np.zeros(3, np.float32)
    tensors["optimizer.step"] = np.zeros((), np.int64)
    tensors["net.blocks.0.self_attn.q_proj.weight"] = np.zeros((64, 63), np.float32)
    tensors["net.x_embedder.proj.1.weight"] = np.zeros((65, 72), np.float32)
    save_file(tensors, tmp_path / "bad.safetensors")
    message = error_of(tmp_path / "bad.safetensors")
    for part in (
        "2 missing: ",
        "blocks.1.mlp.layer1.weight",
        "t_embedding_norm.weight",
        "2 unexpected: ",
        "surprise.weight",
        "optimizer.step",
        "2 misshapen: ",
        "net.blocks.0.self_attn.q_proj.weight is (64, 63), not (64, 64)",
        "net.x_embedder.proj.1.weight is (65, 72), not (64, 72)",
    ):
        assert part in message, part


def test_every_bad_name_in_a_diffusers_folder(tmp_path):
    shutil.copytree(DIFFUSERS, tmp_path / "d", copy_function=shutil.copyfile)
    file = tmp_path / "d/diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    del tensors["proj_out.weight"]
    tensors["extra"] = np.zeros(1, np.float32)
    tensors["time_embed.norm.weight"] = np.zeros(63, np.float32)
    save_file(tensors, file)
    message = error_of(tmp_path / "d")
    assert "1 missing: proj_out.weight" in message
    assert "1 unexpected: extra" in message
    assert "1 misshapen: time_embed.norm.weight is (63,), not (64,)" in message


@pytest.mark.parametrize("name", sorted(load_file(OFFICIAL)))
def test_any_one_name_missing_or_misshapen(name, tmp_path):
    tensors = load_file(OFFICIAL)
    shape = tensors[name].shape
    if "blocks.1" in name or name in ("net.final_layer.linear.weight", "net.t_embedder.1.linear_1.weight"):
        tensors[name] = np.zeros((shape[0] + 1, *shape[1:]), np.float32)
        word = "misshapen"
    else:
        del tensors[name]
        word = "missing"
    save_file(tensors, tmp_path / "bad.safetensors")
    message = error_of(tmp_path / "bad.safetensors")
    assert f"1 {word}: {name}" in message
    assert message.count(" missing: ") + message.count(" misshapen: ") + message.count(" unexpected: ") == 1


def test_only_the_other_set_of_weights(tmp_path):
    tensors = {name.replace("net.", "net_ema."): value for name, value in load_file(OFFICIAL).items()}
    save_file(tensors, tmp_path / "ema.safetensors")
    assert 'it has which="ema"' in error_of(tmp_path / "ema.safetensors")
    same_params(load_pretrained(tmp_path / "ema.safetensors", which="ema")[1], load_pretrained(OFFICIAL)[1])
    assert 'it has which="raw"' in error_of(OFFICIAL, which="ema")


def test_what_is_no_parameter_is_dropped(tmp_path):
    tensors = load_file(OFFICIAL)
    extra = ("accum_iteration", "pos_embedder.seq", "blocks.0.self_attn.attn_op._extra_state")
    tensors |= {f"net.{name}": np.zeros(2, np.float32) for name in extra}
    save_file(tensors, tmp_path / "more.safetensors")
    same_params(load_pretrained(tmp_path / "more.safetensors")[1], load_pretrained(OFFICIAL)[1])


def test_paths_and_options(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.safetensors").write_text("hello, this is no such file")
    whole = OFFICIAL.read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[: len(whole) // 2])
    assert "does not exist" in error_of(tmp_path / "nowhere")
    assert "0 .safetensors files" in error_of(tmp_path / "empty")
    assert "not a whole safetensors file" in error_of(tmp_path / "text.safetensors")
    assert "not a whole safetensors file" in error_of(tmp_path / "cut.safetensors")
    assert 'must be "raw" or "ema"' in error_of(OFFICIAL, which="both")
    assert "diffusers folder" in error_of(DIFFUSERS, which="ema")
    loaded = load_pretrained(OFFICIAL)
    with pytest.raises(ValueError, match='must be "official" or "diffusers"'):
        save_pretrained(tmp_path / "x", *loaded, layout="other")
    with pytest.raises(ValueError, match="must be a folder"):
        save_pretrained(tmp_path / "cut.safetensors", *loaded, layout="diffusers")


@pytest.mark.parametrize(
    "change, word",
    [
        ({"_class_name": "WanTransformer3DModel"}, "_class_name is 'WanTransformer3DModel'"),
        ({"in_channels": 16}, "in_channels is 16"),
        ({"use_crossattn_projection": False}, "use_crossattn_projection is False"),
        ({"extra_pos_embed_type": "learnable"}, "extra_pos_embed_type is 'learnable'"),
        ({"num_layers": None}, "has no num_layers"),
        ({"num_layers": 3}, "20 missing: transformer_blocks.2."),
        ({"attention_head_dim": 33}, "head width must be even"),
    ],
)
def test_diffusers_config(change, word, tmp_path):
    shutil.copytree(DIFFUSERS, tmp_path / "d", copy_function=shutil.copyfile)
    file = tmp_path / "d/config.json"
    config = json.loads(file.read_text()) | change
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None or k not in change}))
    assert word in error_of(tmp_path / "d")


def test_missing_shards(tmp_path):
    save_pretrained(tmp_path, *load_pretrained(DIFFUSERS), layout="diffusers", max_shard_bytes=300_000)
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    assert f"files that are not there: {shard.name}" in error_of(tmp_path)


def test_nothing_half_written(tmp_path, monkeypatch):
    loaded = load_pretrained(OFFICIAL)
    save_pretrained(tmp_path / "x.safetensors", *loaded)
    before = (tmp_path / "x.safetensors").read_bytes()
    monkeypatch.setattr(np, "ascontiguousarray", lambda part: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        save_pretrained(tmp_path / "x.safetensors", *loaded)
    assert (tmp_path / "x.safetensors").read_bytes() == before
    assert [f.name for f in tmp_path.iterdir()] == ["x.safetensors"]


def test_the_official_layout_cannot_say_everything(tmp_path):
    config = dataclasses.replace(nnx.merge(*load_pretrained(OFFICIAL)).config, rope_ratios=(1, 2, 2))
    graphdef = nnx.split(nnx.eval_shape(lambda: CosmosDiT(config, rngs=nnx.Rngs(0))))[0]
    params = load_pretrained(OFFICIAL)[1]
    with pytest.raises(ValueError, match=r"rope_ratios is \(1, 2, 2\)"):
        save_pretrained(tmp_path / "x.safetensors", graphdef, params, layout="official")
    save_pretrained(tmp_path / "x", graphdef, params, layout="diffusers")
    assert load_pretrained(tmp_path / "x")[0] == graphdef


def test_only_a_cosmos_dit(tmp_path):
    with pytest.raises(ValueError, match="Linear; only a CosmosDiT"):
        save_pretrained(tmp_path / "x", *nnx.split(nnx.Linear(2, 2, rngs=nnx.Rngs(0))))


def test_a_diffusers_file_by_its_own_name(tmp_path):
    file = DIFFUSERS / "diffusion_pytorch_model.safetensors"
    same_params(load_pretrained(file)[1], load_pretrained(DIFFUSERS)[1])
    assert "diffusers folder" in error_of(file, which="ema")
    shutil.copyfile(file, tmp_path / "x.safetensors")
    assert "give the folder" in error_of(tmp_path / "x.safetensors")
    save_pretrained(tmp_path / "d", *load_pretrained(DIFFUSERS), layout="diffusers", max_shard_bytes=300_000)
    shard = sorted((tmp_path / "d").glob("*.safetensors"))[0]
    assert "one shard of several: give the folder" in error_of(shard)
    # An official file is one whatever lies beside it.
    shutil.copyfile(OFFICIAL, tmp_path / "d/official.safetensors")
    same_params(load_pretrained(tmp_path / "d/official.safetensors")[1], load_pretrained(OFFICIAL)[1])


def test_an_official_folder_may_have_a_config_of_another_kind(tmp_path):
    shutil.copyfile(OFFICIAL, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "cosmos"}')
    same_params(load_pretrained(tmp_path)[1], load_pretrained(OFFICIAL)[1])
    (tmp_path / "config.json").write_text("[]")
    assert "is not a JSON object" in error_of(tmp_path)
    shutil.copyfile(DIFFUSERS / "diffusion_pytorch_model.safetensors", tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert "_class_name is None" in error_of(tmp_path)


def test_other_families_are_told_which_ones_there_are(tmp_path):
    save_file({"encoder.conv1.weight": np.zeros((2, 2), np.float32)}, tmp_path / "vae.safetensors")
    families = "only Cosmos-Predict2.5 DiTs (official or diffusers form) can be loaded today"
    assert families in error_of(tmp_path / "vae.safetensors")
    assert families in error_of(tmp_path)
    (tmp_path / "config.json").write_text('{"_class_name": "AutoencoderKLWan"}')
    for path in (tmp_path, tmp_path / "vae.safetensors"):
        message = error_of(path)
        assert families in message and "AutoencoderKLWan" in message


def test_meshes_and_dtypes_that_do_not_fit():
    mesh = jax.make_mesh((8,), ("data",))
    assert "one of them must be fsdp" in error_of(OFFICIAL, mesh=mesh)
    assert "dtype=float64: needs jax_enable_x64" in error_of(OFFICIAL, dtype="float64")
    assert "compute_dtype=float64: needs jax_enable_x64" in error_of(OFFICIAL, compute_dtype=np.float64)
    with jax.enable_x64(True):
        assert jax.tree.leaves(load_pretrained(OFFICIAL, dtype="float64")[1])[0].dtype == np.float64


def test_where_weights_cannot_be_written(tmp_path):
    loaded = load_pretrained(OFFICIAL)
    for name, layout, word in (
        ("x.pt", "official", "a .safetensors file or a folder"),
        ("x.bin", "official", "a .safetensors file or a folder"),
        ("x.pt", "diffusers", "a folder"),
        ("x.safetensors", "diffusers", "a folder"),
    ):
        with pytest.raises(ValueError, match=f"{name}: must be {word} for") as error:
            save_pretrained(tmp_path / name, *loaded, layout=layout)
        assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())
    (tmp_path / "run.final").mkdir()
    for folder in ("Cosmos-Predict2.5-2B", "run.final"):
        save_pretrained(tmp_path / folder, *loaded)
        same_params(load_pretrained(tmp_path / folder)[1], loaded[1])
