"""Features of captions on disk: the bits come back, and what was made otherwise or is damaged is refused."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ddrl_jax import files
from ddrl_jax.data import text_cache
from ddrl_jax.data.text_cache import TextCache

SIZE = {"length": 5, "dim": 6}
MADE_WITH = {"tower": "qwen", "strategy": "full_concat", "dtype": "bfloat16"}


def cache(folder, **changes):
    return TextCache(folder, **{**SIZE, "fingerprint": MADE_WITH, **changes})


def features(seed=0):
    """Any bits, those of -0, of numbers that are not normal, of infinities and of NaN with them."""
    return np.random.default_rng(seed).integers(0, 1 << 16, (5, 6), np.uint16).view(ml_dtypes.bfloat16)


def error_of(call):
    with pytest.raises(ValueError, match=r"^text_encoder\.where='cached': ") as error:
        call()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_bits_come_back(tmp_path):
    there, captions = cache(tmp_path / "text"), ["a fox", "Café, 東京 🦊", ""]
    assert there.missing([*captions, "a fox"]) == captions
    for i, caption in enumerate(captions):
        there.add(caption, features(i))
    assert there.missing([*captions, "another"]) == ["another"]
    for opened in (there, cache(tmp_path / "text")):
        got = opened.embed([captions[2], captions[0], captions[2], captions[1]])
        assert got.dtype == ml_dtypes.bfloat16 and got.shape == (4, 5, 6)
        np.testing.assert_array_equal(
            got.view(np.uint16), np.stack([features(i) for i in (2, 0, 2, 1)]).view(np.uint16)
        )


def test_float32_is_rounded_once(tmp_path):
    there, wide = cache(tmp_path), np.random.default_rng(0).standard_normal((5, 6)).astype(np.float32)
    there.add("a", wide)
    np.testing.assert_array_equal(there.embed(["a"])[0], wide.astype(ml_dtypes.bfloat16))


def test_features_of_another_shape_are_not_taken(tmp_path):
    with pytest.raises(ValueError, match=r"features are \(5, 7\), not \(5, 6\)"):
        cache(tmp_path / "text").add("a", np.zeros((5, 7)))
    assert not (tmp_path / "text").exists()


def test_no_features(tmp_path):
    message = error_of(lambda: cache(tmp_path).embed(["a red fox " * 20]))
    assert f"{tmp_path} has no features of the caption 'a red fox a red" in message
    assert message.endswith("run --mode=prepare with the same config") and len(message) < 300


def test_other_settings_are_refused(tmp_path):
    cache(tmp_path).add("a", features())
    for changes, words in [
        ({"fingerprint": {**MADE_WITH, "tower": "other"}}, "whose tower is 'qwen', not 'other'; remove it and run"),
        ({"fingerprint": {**MADE_WITH, "new": 1}}, "whose new is None, not 1"),
        ({"length": 4}, "whose length is 5, not 4"),
        ({"dim": 7}, "whose dim is 6, not 7"),
    ]:
        assert words in error_of(lambda changes=changes: cache(tmp_path, **changes))


def test_the_index_is_there_before_the_first_features(tmp_path, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as m:
        m.setattr(text_cache, "save_file", stop)
        with pytest.raises(KeyboardInterrupt):
            cache(tmp_path).add("a", features())
    assert [f.name for f in tmp_path.iterdir()] == ["index.json"]
    assert json.loads((tmp_path / "index.json").read_text()) == MADE_WITH | SIZE
    assert "whose tower is" in error_of(lambda: cache(tmp_path, fingerprint={"tower": "other"}))
    cache(tmp_path).add("a", features())


def test_an_index_that_is_none(tmp_path):
    cache(tmp_path).add("a", features())
    for content in ("{", "[]", "3", "\udcff"):
        (tmp_path / "index.json").write_text(content, errors="surrogateescape")
        assert "index.json is damaged" in error_of(lambda: cache(tmp_path))
    (tmp_path / "index.json").unlink()
    assert "holds features and no index.json; remove it and run --mode=prepare" in error_of(lambda: cache(tmp_path))


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda f: f.write_bytes(f.read_bytes()[:-1]), "is damaged"),
        (lambda f: f.write_bytes(b""), "is damaged"),
        (lambda f: save_file({"other": load_file(f)["features"]}, f), "features"),
        # What would fit all the same, spread over the tokens.
        (
            lambda f: save_file({"features": load_file(f)["features"][:1]}, f),
            "its features are U16 (1, 6), not U16 (5, 6)",
        ),
        (
            lambda f: save_file({"features": np.zeros((5, 3), np.float32)}, f),
            "its features are F32 (5, 3), not U16 (5, 6)",
        ),
        (
            lambda f: save_file({"features": np.zeros((5, 6), np.int16)}, f),
            "its features are I16 (5, 6), not U16 (5, 6)",
        ),
    ],
)
def test_damaged_features(tmp_path, harm, words):
    there = cache(tmp_path)
    there.add("a", features())
    (file,) = tmp_path.glob("*.safetensors")
    harm(file)
    message = error_of(lambda: there.embed(["a"]))
    assert f"{file} is damaged (" in message and words in message
    assert message.endswith("; remove it and run --mode=prepare")
    file.unlink()
    there.add("a", features())
    there.embed(["a"])


def test_a_file_is_whole_or_not_there(tmp_path):
    file = tmp_path / "x"
    with pytest.raises(OSError, match="disk full"), files.whole(file) as partial:
        partial.write_text("half")
        raise OSError("disk full")
    assert not list(tmp_path.iterdir())
    file.write_text("old")
    with files.whole(file) as partial:
        partial.write_text("new")
        assert file.read_text() == "old"
    assert file.read_text() == "new" and list(tmp_path.iterdir()) == [file]


def test_a_flipped_bit_is_found(tmp_path):
    there = cache(tmp_path / "text")
    for i, caption in enumerate(("a fox", "a dog")):
        there.add(caption, features(i))
    there.verify(["a fox", "a dog", "a caption without features"])
    file = there._file("a dog")
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    assert "its checksum is not that of its features" in error_of(lambda: there.embed(["a dog"]))
    assert str(file) in error_of(lambda: there.verify(["a fox", "a dog"]))
    there.embed(["a fox"])


def test_a_file_that_was_cut_off_is_missing_and_made_again(tmp_path):
    there = cache(tmp_path / "text")
    there.add("a fox", features())
    file = there._file("a fox")
    file.write_bytes(file.read_bytes()[:40])
    assert there.missing(["a fox"]) == ["a fox"]
    there.add("a fox", features())
    assert there.missing(["a fox"]) == []
