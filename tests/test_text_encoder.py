"""Captions to features: tokens as transformers makes them, embeddings of the golden tower, errors in one line."""

import json
import shutil
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx

from ddrl_jax.checkpoint import load_pretrained
from ddrl_jax.models import text_encoder
from ddrl_jax.models.qwen_text import embed_text
from ddrl_jax.models.text_encoder import SYSTEM_MESSAGE, TextEncoder, load_tokenizer, tokenize
from ddrl_jax.parallel.mesh import make_mesh
from tests.paths import GOLDEN, ROOT
from tests.qwen_tokenizer import write_tower

HUB = GOLDEN / "text_encoder/hf_hub_layout_prefix_model"
CAPTIONS = [
    "a red fox runs through deep snow",
    "",
    "  spaces   and\nlines\t\n",
    "Café au lait, 東京の夜, Привет 🦊 naïve",
    "cafe\u0301",  # decomposed: the tokenizer composes it
    "<|im_end|> markup in a caption <|endoftext|>",
    "don't it's 12345 !!! {{ braces }} {% raw %}",
    "long " * 300,
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The golden tower with a tokenizer beside it, in one folder as on the hub."""
    return write_tower(tmp_path_factory.mktemp("tower") / "folder")


@pytest.fixture(scope="module")
def tower(folder):
    return load_pretrained(folder)


# ---- tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("caption", CAPTIONS, ids=range(len(CAPTIONS)))
def test_tokens_are_those_of_transformers(folder, caption):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "system", "content": SYSTEM_MESSAGE}, {"role": "user", "content": caption}]
    ids = theirs.apply_chat_template(chat, tokenize=True, add_generation_prompt=False, return_dict=False)
    assert theirs.pad_token_id == load_tokenizer(folder).pad_id
    length = 512
    wanted = (ids + [theirs.pad_token_id] * length)[:length]
    got = tokenize(load_tokenizer(folder), [caption], length)
    assert got.dtype == np.int32 and got.shape == (1, length)
    assert got[0].tolist() == wanted
    assert len(ids) < length or caption == CAPTIONS[-1]  # the last one is cut


def test_the_markup(folder):
    tokenizer = load_tokenizer(folder)
    ids = tokenize(tokenizer, ["a fox"], 200)[0]
    kept = ids[: list(ids).index(tokenizer.pad_id)]
    assert tokenizer.tokens.decode(kept.tolist(), skip_special_tokens=False) == (
        "<|im_start|>system\nYou are a helpful assistant who will provide prompts to an image generator.<|im_end|>\n"
        "<|im_start|>user\na fox<|im_end|>\n"
    )
    assert (ids[len(kept) :] == tokenizer.pad_id).all()


def test_many_captions_are_each_tokenized_alone(folder):
    tokenizer = load_tokenizer(folder)
    rows = tokenize(tokenizer, CAPTIONS, 80)
    for caption, row in zip(CAPTIONS, rows, strict=True):
        np.testing.assert_array_equal(tokenize(tokenizer, [caption], 80)[0], row)
        np.testing.assert_array_equal(tokenize(tokenizer, [caption], 300)[0, :80], row)


def test_padding_and_truncation_of_the_file_do_not_count(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "t")
    file = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    file.enable_truncation(5)
    file.enable_padding(length=7, pad_id=3)
    file.save(str(tmp_path / "t/tokenizer.json"))
    wanted = tokenize(load_tokenizer(folder), CAPTIONS, 90)
    np.testing.assert_array_equal(tokenize(load_tokenizer(tmp_path / "t"), CAPTIONS, 90), wanted)


def test_where_the_pad_id_is_named(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "t")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    pad_id = load_tokenizer(folder).pad_id
    (tmp_path / "t/tokenizer_config.json").write_text(json.dumps({"pad_token": {"content": settings["pad_token"]}}))
    assert load_tokenizer(tmp_path / "t").pad_id == pad_id
    (tmp_path / "t/tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match=r"names no pad token"):
        load_tokenizer(tmp_path / "t")
    (tmp_path / "t/config.json").write_text(json.dumps({"text_config": {"pad_token_id": 5}}))
    assert load_tokenizer(tmp_path / "t").pad_id == 5
    (tmp_path / "t/config.json").write_text(json.dumps({"pad_token_id": 6}))
    assert load_tokenizer(tmp_path / "t").pad_id == 6


def test_neither_torch_nor_transformers_is_imported():
    code = (
        "import sys\nfor name in ('torch', 'transformers'): sys.modules[name] = None\n"
        f"from ddrl_jax.models.text_encoder import load_tokenizer, tokenize\nload_tokenizer({str(HUB)!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == (
        f"ValueError: {HUB} has no tokenizer.json; a folder that holds the text tower's tokenizer is needed"
    )


# ---- features --------------------------------------------------------------------------------------------------------


def test_features_are_the_towers(folder, tower):
    encoder = TextEncoder(*tower, folder, length=24)
    assert (encoder.length, encoder.dim, encoder.dtype) == (24, 192, np.float32)
    got = encoder.embed(CAPTIONS)
    assert isinstance(got, np.ndarray) and got.shape == (len(CAPTIONS), 24, 192) and got.dtype == np.float32
    ids = tokenize(load_tokenizer(folder), CAPTIONS, 24)
    wanted = embed_text(nnx.merge(*tower)(jnp.asarray(ids)), "full_concat")
    np.testing.assert_allclose(got, wanted, rtol=0, atol=5e-5)


@pytest.mark.parametrize("strategy, dim", [("mean_pooling", 48), ("pool_every_3_layers_and_concat", 96)])
def test_strategies(folder, tower, strategy, dim):
    encoder = TextEncoder(*tower, folder, length=9, strategy=strategy)
    assert encoder.dim == dim and encoder.embed(["a"]).shape == (1, 9, dim)


@pytest.mark.parametrize("batch", [1, 3])
def test_features_do_not_depend_on_batch_mates(folder, tower, batch):
    encoder = TextEncoder(*tower, folder, length=120, batch=batch)
    together = encoder.embed(CAPTIONS)
    for caption, features in zip(CAPTIONS, together, strict=True):
        np.testing.assert_array_equal(encoder.embed([caption])[0], features)
    assert len(np.unique(together.reshape(len(CAPTIONS), -1), axis=0)) == len(CAPTIONS)


def test_equal_captions_are_computed_once(folder, tower, monkeypatch):
    encoder = TextEncoder(*tower, folder, length=60, batch=2)
    calls = []
    features = text_encoder._features
    monkeypatch.setattr(text_encoder, "_features", lambda *args: calls.append(1) or features(*args))
    got = encoder.embed(["a", "b", "a", "a", "c", "b"])
    assert len(calls) == 2  # three captions, two at a time
    np.testing.assert_array_equal(got[0], got[2])
    np.testing.assert_array_equal(got[0], got[3])
    np.testing.assert_array_equal(got[1], got[5])
    assert np.abs(got[0] - got[1]).max() > 0.1 and np.abs(got[0] - got[4]).max() > 0.1


def test_no_captions(folder, tower):
    assert TextEncoder(*tower, folder, length=6).embed([]).shape == (0, 6, 192)


def test_on_a_mesh(folder, tower):
    mesh = make_mesh(fsdp=8)
    encoder = TextEncoder(*load_pretrained(folder, mesh=mesh), folder, length=50, mesh=mesh)
    wanted = TextEncoder(*tower, folder, length=50).embed(CAPTIONS[:2])
    np.testing.assert_allclose(encoder.embed(CAPTIONS[:2]), wanted, rtol=0, atol=5e-5)


def test_bfloat16(folder):
    encoder = TextEncoder(*load_pretrained(folder, dtype="bfloat16"), folder, length=8)
    got = encoder.embed(["a"])
    assert got.dtype == jnp.bfloat16 and np.isfinite(got.astype(np.float32)).all()


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_errors(folder, tower, tmp_path):
    with pytest.raises(ValueError, match="length is 0"):
        TextEncoder(*tower, folder, length=0)
    with pytest.raises(ValueError, match="batch is 0"):
        TextEncoder(*tower, folder, batch=0)
    with pytest.raises(ValueError, match="strategy is 'last'"):
        TextEncoder(*tower, folder, strategy="last")
    with pytest.raises(ValueError, match=r"^[^\n]*is not a tokenizer: [^\n]*$"):
        (tmp_path / "tokenizer.json").write_text("{}")
        load_tokenizer(tmp_path)
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"has no token <\|im_start\|>"):
        load_tokenizer(tmp_path)
    shutil.copy(folder / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is not a JSON object"):
        load_tokenizer(tmp_path)
    shutil.copy(folder / "tokenizer_config.json", tmp_path)
    grown = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    grown.add_tokens([f"word{i}" for i in range(60)])
    grown.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"largest token id is \d+; the tower has 400 tokens"):
        TextEncoder(*tower, tmp_path)


def test_another_network_is_no_text_encoder(folder):
    dit = load_pretrained(GOLDEN / "cosmos_dit/official.safetensors")
    with pytest.raises(ValueError, match=r"is a CosmosDiT; a Qwen2\.5-VL text tower is needed"):
        TextEncoder(*dit, folder)
