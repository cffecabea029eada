"""The Qwen2.5-VL text tower against `golden/text_encoder`: hidden states, embeddings, forms of files, errors."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from ddrl_jax.checkpoint import load_pretrained, save_pretrained
from ddrl_jax.models.qwen_text import QwenText, QwenTextConfig, causal_attention, embed_text, embedding_width
from ddrl_jax.parallel.mesh import make_mesh
from tests.paths import GOLDEN

FOLDER = GOLDEN / "text_encoder"
HUB = FOLDER / "hf_hub_layout_prefix_model"
TOLERANCE = 5e-5  # golden/README.md
LAYOUTS = ("hf_hub_layout_prefix_model", "hf_text_model", "hf_prefix_model_language_model")
STRATEGIES = (
    "full_concat",
    "mean_pooling",
    "pool_every_2_layers_and_concat",
    "pool_every_3_layers_and_concat",
)


@pytest.fixture(scope="module")
def io():
    with np.load(FOLDER / "io.npz") as file:
        return dict(file)


def tensors():
    return {name: value for file in sorted(HUB.glob("*.safetensors")) for name, value in load_file(file).items()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The three forms. Only the hub's is stored; the others are its tensors under their own names and config.json."""
    root = tmp_path_factory.mktemp("towers")
    bare = {name.removeprefix("model."): value for name, value in tensors().items() if name.startswith("model.")}
    other = {name: value for name, value in tensors().items() if not name.startswith("model.")}
    nested = {f"model.language_model.{name}": value for name, value in bare.items()}
    nested |= {name if name.startswith("lm_head") else f"model.{name}": value for name, value in other.items()}
    made = {"hf_hub_layout_prefix_model": HUB}
    for layout, values in (("hf_text_model", bare), ("hf_prefix_model_language_model", nested)):
        made[layout] = root / layout
        made[layout].mkdir()
        save_file(values, made[layout] / "model.safetensors")
        shutil.copy(FOLDER / layout / "config.json", made[layout])
    return made


def copy_of(folder, path, **changes):
    shutil.copytree(folder, path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))
    return path


def hidden(loaded, ids):
    graphdef, params = loaded
    return np.asarray(jax.jit(lambda params, ids: nnx.merge(graphdef, params)(ids))(params, ids.astype(np.int32)))


# ---- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_hidden_states(io, folders, layout):
    states = hidden(load_pretrained(folders[layout]), io["input_ids_BS"])
    wanted = [io[name] for name in sorted(io) if name.startswith("hidden_state/")]
    assert states.shape == (len(wanted), *wanted[0].shape)
    np.testing.assert_allclose(states, np.stack(wanted), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_embeddings(io, strategy):
    states = np.stack([io[name] for name in sorted(io) if name.startswith("hidden_state/")])
    wanted = io[f"embedding/{strategy}"]
    np.testing.assert_allclose(embed_text(states, strategy), wanted, rtol=0, atol=TOLERANCE)
    config = QwenTextConfig(width=states.shape[-1], depth=len(states) - 1, heads=1, kv_heads=1)
    assert embedding_width(config, strategy) == wanted.shape[-1]


def test_the_letter_n_is_a_number_handed_in(io):
    states = np.stack([io[name] for name in sorted(io) if name.startswith("hidden_state/")])
    letter = embed_text(states, "pool_every_n_layers_and_concat", 3)
    np.testing.assert_array_equal(letter, embed_text(states, "pool_every_3_layers_and_concat"))
    config = QwenTextConfig()
    # 28 layers in groups of 5: six, the last of three.
    assert embedding_width(config, "pool_every_n_layers_and_concat") == 6 * 3584
    assert embedding_width(config, "full_concat") == 100352
    assert embedding_width(config, "mean_pooling") == 3584


def test_the_whole_path_in_float32(io):
    graphdef, params = load_pretrained(HUB)
    embed = jax.jit(lambda params, ids: embed_text(nnx.merge(graphdef, params)(ids), "full_concat"))
    got = embed(params, io["input_ids_BS"].astype(np.int32))
    np.testing.assert_allclose(got, io["embedding/full_concat"], rtol=0, atol=TOLERANCE)


def test_bfloat16_features_are_rounded_only_at_the_end(io):
    states = jnp.stack([io[name] for name in sorted(io) if name.startswith("hidden_state/")]).astype("bfloat16")
    h = np.asarray(states, np.float64)[1:]
    h = (h - h.mean(-1, keepdims=True)) / (h.std(-1, keepdims=True, ddof=1) + 1e-8)
    got = embed_text(states, "mean_pooling")
    assert got.dtype == jnp.bfloat16
    # Half a unit in the last of 8 significant bits, and the float32 rounding before it.
    np.testing.assert_allclose(np.asarray(got, np.float64), h.mean(0), rtol=2**-8 * 1.01, atol=1e-5)


def test_a_bfloat16_tower_keeps_its_norms_softmax_and_angles_wide(io):
    """Off the float32 states by the rounding of bf16 products only: by at most .117 of a magnitude of 3.4, and .019 in
    the root mean square, where transformers' own bf16 is off by .125 and .020."""
    states = hidden(load_pretrained(HUB, dtype="bfloat16"), io["input_ids_BS"])
    assert states.dtype == jnp.bfloat16
    for name, got in zip((n for n in sorted(io) if n.startswith("hidden_state/")), states, strict=True):
        wanted = io[name]
        off = got.astype(np.float32) - wanted
        assert np.abs(off).max() < 0.05 * np.abs(wanted).max() and np.sqrt(np.mean(off**2)) < 0.03, name


def test_the_norms_eps_is_1e_6_whatever_config_json_says(io, tmp_path):
    folder = copy_of(HUB, tmp_path / "eps", rms_norm_eps=1e-5)
    states = hidden(load_pretrained(folder), io["input_ids_BS"])
    np.testing.assert_array_equal(states, hidden(load_pretrained(HUB), io["input_ids_BS"]))
    # The golden table is small (0.5), so that a wrong eps would be seen.
    model = nnx.merge(*load_pretrained(HUB))
    model.norm.eps = 1e-5
    assert np.abs(np.asarray(model(io["input_ids_BS"].astype(np.int32)))[-1] - states[-1]).max() > 1e-7


def test_later_tokens_change_nothing_before_them(io):
    loaded = load_pretrained(HUB)
    ids = io["input_ids_BS"].astype(np.int32)
    changed = ids.copy()
    changed[:, 20:] = (changed[:, 20:] + 7) % 100
    a, b = hidden(loaded, ids), hidden(loaded, changed)
    np.testing.assert_array_equal(a[:, :, :20], b[:, :, :20])
    assert np.abs(a[:, :, 20:] - b[:, :, 20:]).max() > 0.1


def test_grouped_queries_by_hand():
    """Query heads 0, 1 read key head 0, heads 2, 3 key head 1."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, 5, heads, 6)).astype(np.float32) for heads in (4, 2, 2))
    got = causal_attention(q, k, v)
    for head in range(4):
        for token in range(5):
            logits = k[0, : token + 1, head // 2] @ q[0, token, head] / np.sqrt(6)
            weights = np.exp(logits - logits.max())
            wanted = weights @ v[0, : token + 1, head // 2] / weights.sum()
            np.testing.assert_allclose(got[0, token, head], wanted, atol=1e-6)


def test_a_token_outside_the_table_is_no_other_token(io):
    loaded = load_pretrained(HUB)
    ids = io["input_ids_BS"].astype(np.int32).copy()
    ids[1, 39] = 192
    states = hidden(loaded, ids)
    assert np.isnan(states[:, 1, 39]).all() and np.isfinite(states[:, 0]).all()
    ids[0, 39] = -1
    assert np.isnan(hidden(loaded, ids)[:, 0, 39]).all()


def test_cosmos_reason_has_7_070_619_136_parameters():
    model = nnx.eval_shape(lambda: QwenText(QwenTextConfig(), rngs=nnx.Rngs(0)))
    assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model))) == 7_070_619_136


def test_a_new_tower_is_finite():
    config = QwenTextConfig(vocab=11, width=32, mlp=40, depth=3, heads=4, kv_heads=2, dtype="float32")
    states = QwenText(config, rngs=nnx.Rngs(0))(np.arange(6)[None])
    assert states.shape == (4, 1, 6, 32) and bool(jnp.isfinite(states).all())


# ---- files -----------------------------------------------------------------------------------------------------------


def test_sharded_over_a_mesh(io):
    mesh = make_mesh(fsdp=8)
    graphdef, params = load_pretrained(HUB, mesh=mesh)
    cut = {key: leaf[...].sharding.spec for key, leaf in nnx.to_flat_state(params) if leaf[...].size > 1000}
    assert cut and all("fsdp" in str(spec) for spec in cut.values())
    states = hidden((graphdef, params), io["input_ids_BS"])
    np.testing.assert_allclose(states[-1], io["hidden_state/04"], rtol=0, atol=TOLERANCE)


def test_the_three_forms_hold_the_same_tower(folders):
    first, *others = (load_pretrained(folders[layout]) for layout in LAYOUTS)
    for graphdef, params in others:
        assert graphdef == first[0]
        assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), params, first[1]))


def test_round_trips(folders, tmp_path):
    loaded = load_pretrained(folders["hf_text_model"])
    save_pretrained(tmp_path / "t", *loaded, layout="diffusers")
    wrote, read = load_file(tmp_path / "t/model.safetensors"), load_file(folders["hf_text_model"] / "model.safetensors")
    assert {k: v.tobytes() for k, v in wrote.items()} == {k: v.tobytes() for k, v in read.items()}
    again = load_pretrained(tmp_path / "t")
    assert again[0] == loaded[0]
    # The hub's names, which say nothing of the heads: with a config.json beside them they can be read.
    save_pretrained(tmp_path / "o", *loaded, layout="official")
    with pytest.raises(ValueError, match=r"without a config\.json"):
        load_pretrained(tmp_path / "o")
    shutil.copy(HUB / "config.json", tmp_path / "o")
    again = load_pretrained(tmp_path / "o")
    assert again[0] == loaded[0]
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), again[1], loaded[1]))


def test_transformers_loads_ours(io, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    save_pretrained(tmp_path / "t", *load_pretrained(HUB), layout="diffusers")
    tower = transformers.Qwen2_5_VLTextModel.from_pretrained(tmp_path / "t", dtype=torch.float32).eval()
    with torch.no_grad():
        out = tower(input_ids=torch.from_numpy(io["input_ids_BS"]), output_hidden_states=True)
    np.testing.assert_allclose(out.hidden_states[-1], io["hidden_state/04"], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, r"model_type is 'llama'"),
        ({"hidden_act": "gelu"}, r"hidden_act is 'gelu'; this tower has 'silu'"),
        ({"use_sliding_window": True}, r"use_sliding_window is True"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, r"rope_type is 'yarn'"),
        ({"rope_theta": None}, r"rope_theta is None; a number"),
        ({"num_attention_heads": None}, r"num_attention_heads is None"),
        ({"num_attention_heads": 3}, r"kv_heads is 2; it must divide heads 3"),
        ({"num_key_value_heads": 0}, r"kv_heads is 0"),
        ({"text_config": 3}, r"text_config is 3"),
        ({"num_hidden_layers": 5}, r"12 missing: model\.layers\.4\."),
        ({"num_hidden_layers": 3}, r"12 unexpected: model\.layers\.3\."),
        ({"vocab_size": 191}, r"model\.embed_tokens\.weight is \(192, 48\), not \(191, 48\)"),
    ],
)
def test_a_config_that_does_not_fit(tmp_path, changes, message):
    folder = copy_of(HUB, tmp_path / "bad", **changes)
    with pytest.raises(ValueError, match=message) as raised:
        load_pretrained(folder)
    assert "\n" not in str(raised.value)


def test_there_is_one_set_of_weights():
    with pytest.raises(ValueError, match=r'which="ema".*one set of weights'):
        load_pretrained(HUB, which="ema")


def test_two_towers_in_one_folder(tmp_path):
    values = tensors()
    values["embed_tokens.weight"] = values["model.embed_tokens.weight"]
    shutil.copy(HUB / "config.json", tmp_path)
    save_file(values, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="2 token tables"):
        load_pretrained(tmp_path)


def test_a_missing_token_table_is_named_beside_the_rest(tmp_path):
    values = tensors()
    del values["model.embed_tokens.weight"], values["model.norm.weight"]
    values["model.foreign"] = values["model.layers.0.input_layernorm.weight"]
    shutil.copy(HUB / "config.json", tmp_path)
    save_file(values, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="2 missing") as error:
        load_pretrained(tmp_path)
    for name in ("model.embed_tokens.weight", "model.norm.weight", "model.foreign"):
        assert name in str(error.value)


@pytest.mark.parametrize("strategy", ["last", "pool_every_0_layers_and_concat", "pool_every_2", ""])
def test_an_unknown_strategy(strategy):
    with pytest.raises(ValueError, match=r"must be one of full_concat, mean_pooling, pool_every_n"):
        embed_text(jnp.zeros((3, 1, 2, 4)), strategy)


def test_bad_sizes():
    with pytest.raises(ValueError, match=r"heads is 28; width 100 must be a multiple"):
        QwenTextConfig(width=100)
    with pytest.raises(ValueError, match=r"n_layers_per_group is 0"):
        embed_text(jnp.zeros((3, 1, 2, 4)), "pool_every_n_layers_and_concat", 0)
    with pytest.raises(ValueError, match=r"at least one layer"):
        embed_text(jnp.zeros((1, 1, 2, 4)))
    with pytest.raises(ValueError, match=r"rope_theta is 1"):
        QwenTextConfig(rope_theta=1.0)
