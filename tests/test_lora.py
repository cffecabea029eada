"""Low-rank adapters: merged as unmerged, in both layouts, in and out."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from ddrl_jax import export
from ddrl_jax.checkpoint import load_pretrained, save_pretrained
from ddrl_jax.checkpoint.lora_files import load_lora, read_adapter, save_lora
from ddrl_jax.models.lora import TARGETS, init_lora, merge_lora
from tests.paths import GOLDEN
from tests.test_weights import FOLDER, OFFICIAL, TWIN, same_bits, same_params

ADAPTERS = GOLDEN / "lora"


@pytest.fixture(scope="module")
def network():
    graphdef, params = load_pretrained(OFFICIAL)
    return graphdef, params, nnx.merge(graphdef, params).config


@pytest.fixture(scope="module")
def lora(network):
    """Rank 3, with a b that is not zero."""
    made = init_lora(network[1], 3, key=jax.random.key(0))
    return {
        path: pair | {"b": 0.1 * jax.random.normal(jax.random.key(i), pair["b"].shape)}
        for i, (path, pair) in enumerate(made.items())
    }


def same_lora(a, b):
    flat = [{f"{p}.{n}": np.asarray(x) for p, pair in lora.items() for n, x in pair.items()} for lora in (a, b)]
    same_bits(*flat)


# ---- numbers ---------------------------------------------------------------------------------------------------------


def test_a_new_adapter_changes_nothing(network):
    _, params, config = network
    lora = init_lora(params, 4, key=jax.random.key(0))
    assert sorted(lora) == sorted(f"blocks.{target}" for target in TARGETS)
    for pair in lora.values():
        assert pair["a"].shape == (config.depth, config.width, 4) and pair["b"].shape == (config.depth, 4, config.width)
        assert float(jnp.std(pair["a"])) == pytest.approx(1 / 4, rel=0.15) and not pair["b"].any()
    assert not np.array_equal(lora["blocks.self_attn.q"]["a"], lora["blocks.self_attn.k"]["a"])
    same_params(merge_lora(params, lora, 2.0), params)


def test_targets_are_ends_of_paths(network):
    _, params, _ = network
    lora = init_lora(params, 1, ("mlp.up", "final", "q"), key=jax.random.key(0))
    assert sorted(lora) == ["blocks.cross_attn.q", "blocks.mlp.up", "blocks.self_attn.q", "final"]
    assert lora["final"]["a"].ndim == 2
    with pytest.raises(ValueError, match=r"targets: 'attn.q' is the end of no layer's path"):
        init_lora(params, 1, ("attn.q",), key=jax.random.key(0))
    with pytest.raises(ValueError, match="rank=0: must be at least 1"):
        init_lora(params, 0, key=jax.random.key(0))


def test_merged_is_unmerged(network, lora):
    _, params, _ = network
    merged = merge_lora(params, lora, 2 / 3)
    x = np.random.default_rng(0).standard_normal((5, 64))
    before, after = (dict(nnx.to_flat_state(p)) for p in (params, merged))
    for key, leaf in before.items():
        path = ".".join(map(str, key)).removesuffix(".kernel")
        w, new = np.asarray(leaf[...], np.float64), np.asarray(after[key][...], np.float64)
        if path not in lora:
            assert np.array_equal(w, new), path
            continue
        a, b = (np.asarray(lora[path][n], np.float64) for n in "ab")
        np.testing.assert_allclose(x @ new, x @ w + 2 / 3 * (x @ a) @ b, atol=2e-5)
        assert np.abs(x @ new - x @ w).max() > 0.1


def test_gradients_reach_the_adapter_only(network, lora):
    graphdef, params, _ = network
    io = np.load(FOLDER / "io.npz")
    x, t, context = (io[f"video/{key}"][:1] for key in ("x", "timesteps_B", "context"))

    def loss(lora):
        return jnp.sum(nnx.merge(graphdef, merge_lora(params, lora, 1.0))(x, t, context) ** 2)

    grads = jax.jit(jax.grad(loss))(lora)
    assert all(float(jnp.abs(g).max()) > 0 for g in jax.tree.leaves(grads))


def test_bfloat16_kernels_are_rounded_once(network, lora):
    _, params, _ = network
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    wide = jax.tree.map(lambda p: p.astype(jnp.float32), half)
    want = jax.tree.map(lambda p: p.astype(jnp.bfloat16), merge_lora(wide, lora, 0.5))
    same_params(merge_lora(half, lora, 0.5), want)


def test_the_golden_merge():
    golden = np.load(ADAPTERS / "merge.npz")
    name = "transformer_blocks.0.attn.to_k"
    adapter = read_adapter(ADAPTERS / "lora_peft_layout")
    a, b = adapter.layers[name]
    params = nnx.State({"k": {"kernel": nnx.Param(jnp.asarray(golden["kernel"].T))}})
    merged = merge_lora(params, {"k": {"a": a.T, "b": b.T}}, adapter.alpha / adapter.rank)
    np.testing.assert_allclose(merged["k"]["kernel"][...].T, golden["merged"], atol=1e-6, rtol=0)


@pytest.mark.parametrize("layout", ["diffusers", "peft"])
def test_diffusers_unmerged_gives_the_same_output(network, lora, layout, tmp_path):
    """The base in diffusers' class, and beside its layers, by hand, what the file says: an unmerged adapter."""
    pytest.importorskip("diffusers", reason="the test extra installs it")
    graphdef, params, config = network
    save_pretrained(tmp_path / "base", graphdef, params, layout="diffusers")
    save_lora(tmp_path / "lora", lora, config, alpha=6.0, layout=layout)
    io = np.load(FOLDER / "io.npz")
    keys = ("x", "timesteps_B", "context", "condition_mask", "padding_mask_pixels")
    inputs = [io[f"video/{key}"] for key in keys]
    np.savez(tmp_path / "in.npz", *inputs)
    file = next((tmp_path / "lora").glob("*.safetensors"))
    prefix = {"peft": "base_model.model.", "diffusers": "transformer."}[layout]
    twin = TWIN.replace(
        "rows = []",
        f"""
from safetensors.torch import load_file
adapter = load_file({str(file)!r})
left = set(adapter)
for name, module in model.named_modules():
    names = [{prefix!r} + name + f".lora_{{part}}.weight" for part in "AB"]
    if names[0] in adapter:
        left -= set(names)
        A, B = (adapter[n] for n in names)
        module.register_forward_hook(lambda module, x, y, A=A, B=B: y + 6 / 3 * (x[0] @ A.T) @ B.T)
assert not left, left
rows = []""",
    )
    command = [sys.executable, "-c", twin, tmp_path / "base", tmp_path / "in.npz", tmp_path / "out.npy"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    forward = jax.jit(lambda params: nnx.merge(graphdef, params)(*inputs))
    theirs = np.load(tmp_path / "out.npy")
    np.testing.assert_allclose(forward(merge_lora(params, lora, 2.0)), theirs, atol=3e-5, rtol=0)
    # The control: without the adapter, or with another scale, it is another network.
    assert np.abs(forward(params) - theirs).max() > 1e-2
    assert np.abs(forward(merge_lora(params, lora, 1.0)) - theirs).max() > 1e-2


# ---- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["diffusers", "peft"])
def test_round_trips(network, lora, layout, tmp_path):
    config = network[2]
    save_lora(tmp_path / "x", lora, config, alpha=5.0, layout=layout)
    again, alpha = load_lora(tmp_path / "x", config)
    same_lora(again, lora)
    assert alpha == 5.0
    save_lora(tmp_path / "y", again, config, alpha=alpha, layout=layout)
    for file in (tmp_path / "x").iterdir():
        assert file.read_bytes() == (tmp_path / "y" / file.name).read_bytes()
    with_one = {"final": {"a": jnp.ones((64, 2)), "b": jnp.ones((2, 64))}}
    save_lora(tmp_path / "z", with_one, config, alpha=1.0, layout=layout)
    same_lora(load_lora(tmp_path / "z", config)[0], with_one)


def test_what_the_layouts_say(network, lora, tmp_path):
    config = network[2]
    for layout in ("diffusers", "peft"):
        save_lora(tmp_path / layout, lora, config, alpha=5.0, layout=layout, dtype="bfloat16")
    targets = ["attn1.to_k", "attn1.to_out.0", "attn1.to_q", "attn1.to_v"]  # not attn2's, and no bare to_q
    assert sorted(f.name for f in (tmp_path / "peft").iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    said = json.loads((tmp_path / "peft/adapter_config.json").read_text())
    assert (said["r"], said["lora_alpha"], said["target_modules"], said["peft_type"]) == (3, 5.0, targets, "LORA")
    assert [f.name for f in (tmp_path / "diffusers").iterdir()] == ["pytorch_lora_weights.safetensors"]
    with safe_open(tmp_path / "diffusers/pytorch_lora_weights.safetensors", "pt") as file:
        said = json.loads(file.metadata()["lora_adapter_metadata"])
        names = set(file.keys())
        name = "transformer.transformer_blocks.1.attn1.to_out.0.lora_A.weight"
        assert file.get_slice(name).get_shape() == [3, 64] and file.get_slice(name).get_dtype() == "BF16"
    assert (said["transformer.r"], said["transformer.lora_alpha"]) == (3, 5.0)
    assert said["transformer.target_modules"] == targets
    assert len(names) == 2 * 4 * config.depth


def test_the_golden_layouts_are_read():
    read = {name: read_adapter(ADAPTERS / f"lora_{name}_layout") for name in ("peft", "diffusers", "cosmos_rl")}
    for adapter in read.values():
        assert (len(adapter.layers), adapter.rank, adapter.alpha) == (12, 4, 8.0)
        for name, pair in adapter.layers.items():
            for ours, theirs in zip(pair, read["peft"].layers[name], strict=True):
                assert np.array_equal(ours, theirs)


def test_without_alpha_it_is_the_rank(network, lora, tmp_path):
    tensors = load_file(ADAPTERS / "lora_diffusers_layout/pytorch_lora_weights.safetensors")
    save_file(tensors, tmp_path / "x.safetensors")
    with pytest.warns(RuntimeWarning, match=r"x.safetensors says no alpha; it is taken to be the rank, 4: scale 1"):
        assert read_adapter(tmp_path / "x.safetensors").alpha == 4.0


def test_official_names_and_an_adapters_name(network, lora, tmp_path):
    config = network[2]
    save_lora(tmp_path / "x", lora, config, alpha=5.0, layout="peft")
    file = tmp_path / "x/adapter_model.safetensors"
    official = {}
    for name, tensor in load_file(file).items():
        for theirs, new in (
            ("base_model.model.transformer_blocks.", "net.blocks."),
            ("attn1.to_out.0", "self_attn.output_proj"),
            ("attn1.to_", "self_attn."),
            (".lora_A.", "_proj.lora_A.default."),
            (".lora_B.", "_proj.lora_B.default."),
        ):
            name = name.replace(theirs, new)
        official[name.replace("output_proj_proj", "output_proj")] = tensor
    save_file(official, file)
    same_lora(load_lora(tmp_path / "x", config)[0], lora)


def test_adapters_that_do_not_fit(network, lora, tmp_path):
    config = network[2]

    def error(change=lambda tensors: None, config_changes=None):
        save_lora(tmp_path / "x", lora, config, alpha=5.0, layout="peft")
        file = tmp_path / "x/adapter_model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)
        said = json.loads((tmp_path / "x/adapter_config.json").read_text()) | (config_changes or {})
        (tmp_path / "x/adapter_config.json").write_text(json.dumps(said))
        with pytest.raises(ValueError) as raised:
            load_lora(tmp_path / "x", config)
        assert "\n" not in str(raised.value)
        return str(raised.value)

    base = "base_model.model.transformer_blocks.1.attn1.to_q"

    def drop_block(tensors):
        del tensors[f"{base}.lora_A.weight"], tensors[f"{base}.lora_B.weight"]
        tensors["base_model.model.other.lora_A.weight"] = np.zeros((3, 4), np.float32)
        tensors["base_model.model.other.lora_B.weight"] = np.zeros((4, 3), np.float32)

    message = error(drop_block)
    assert "missing transformer_blocks.1.attn1.to_q" in message and "unexpected other" in message
    assert "without both of lora_A and lora_B: transformer_blocks.1.attn1.to_q" in error(
        lambda t: t.pop(f"{base}.lora_A.weight")
    )
    assert "no adapter's tensors: alpha" in error(lambda t: t.update(alpha=np.zeros(1, np.float32)))
    message = error(lambda t: t.update({f"{base}.lora_A.weight": np.zeros((3, 65), np.float32)}))
    assert "are of different sizes" in message
    wide = {f"base_model.model.transformer_blocks.{i}.attn1.to_q.lora_A.weight": np.zeros((3, 65)) for i in (0, 1)}
    assert "blocks.self_attn.q is (65, 64), not (64, 64)" in error(lambda t: t.update(wide))
    assert "an adapter of one rank is needed; its layers' are [2, 3]" in error(
        lambda t: t.update({f"{base}.lora_A.weight": np.zeros((2, 64)), f"{base}.lora_B.weight": np.zeros((64, 2))})
    )
    assert "use_dora is True; only W + lora_alpha/r B A" in error(config_changes={"use_dora": True})
    assert "r is 8; the tensors' rank is 3" in error(config_changes={"r": 8})
    assert "lora_alpha is 'x'; a number is needed" in error(config_changes={"lora_alpha": "x"})


def test_adapters_that_cannot_be_written_or_merged(network, lora, tmp_path):
    _, params, config = network
    with pytest.raises(ValueError, match='must be "peft" or "diffusers"'):
        save_lora(tmp_path / "x", lora, config, alpha=1.0, layout="kohya")
    one = {"blocks.nothing": lora["blocks.self_attn.q"]}
    with pytest.raises(ValueError, match=r"the network has no layers blocks.nothing"):
        save_lora(tmp_path / "x", one, config, alpha=1.0)
    with pytest.raises(ValueError, match=r"a layer blocks.nothing, which the network has not"):
        merge_lora(params, one, 1.0)
    with pytest.raises(ValueError, match=r"does not fit a kernel \(2, 64, 256\)"):
        merge_lora(params, {"blocks.mlp.up": lora["blocks.self_attn.q"]}, 1.0)
    with pytest.raises(ValueError, match=r"one rank; the layers' ranks are \[\]"):
        save_lora(tmp_path / "x", {}, config, alpha=1.0)
    assert not list(tmp_path.iterdir())


# ---- export ----------------------------------------------------------------------------------------------------------


def test_export_merged_or_separate(network, lora, tmp_path):
    graphdef, params, config = network
    adapter = (lora, 6.0)
    export.write(tmp_path / "merged", graphdef, params, format="safetensors", lora=adapter)
    same_params(load_pretrained(tmp_path / "merged")[1], jax.jit(merge_lora, static_argnums=2)(params, lora, 2.0))
    for format, file in (
        ("safetensors", "adapter_model.safetensors"),
        ("diffusers", "pytorch_lora_weights.safetensors"),
    ):
        export.write(tmp_path / format, graphdef, params, format=format, lora=adapter, separate=True)
        assert (tmp_path / format / file).is_file()
        again, alpha = load_lora(tmp_path / format, config)
        same_lora(again, lora)
        assert alpha == 6.0
        assert file in json.loads((tmp_path / format / "export.json").read_text())["files"]
    for options in ({"format": "pt", "lora": adapter}, {"format": "diffusers"}):
        with pytest.raises(ValueError, match="separate: needs an adapter"):
            export.write(tmp_path / "x", graphdef, params, separate=True, **options)
