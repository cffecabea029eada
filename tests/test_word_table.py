import numpy as np
import pytest

from ddrl_jax.models.word_table import WordTable

WORDS = ("a", "seven", "moving", "up", "down")


def test_a_word_is_its_row_and_the_rest_is_zero():
    table = WordTable(WORDS, dim=16, length=4)
    out = table.embed(["a seven moving up", "up", "A Seven"])
    assert out.shape == (3, 4, 16) and out.dtype == np.float32
    np.testing.assert_array_equal(out[0, 3], out[1, 0])
    np.testing.assert_array_equal(out[0, :2], out[2, :2])
    assert not out[1, 1:].any() and not out[2, 2:].any()
    assert len(np.unique(out[0], axis=0)) == 4


def test_rows_have_unit_variance_and_depend_on_the_seed_alone():
    words = tuple(f"w{i}" for i in range(200))
    a, b, c = (WordTable(words, dim=64, length=200, seed=seed).embed([" ".join(words)]) for seed in (0, 0, 1))
    np.testing.assert_array_equal(a, b)
    assert not np.array_equal(a, c)
    assert abs(a.std() - 1) < 0.03 and abs(a.mean()) < 0.03


def test_bad_captions():
    table = WordTable(WORDS, dim=4, length=3)
    with pytest.raises(ValueError, match="'six'"):
        table.embed(["a six"])
    with pytest.raises(ValueError, match="at most 3"):
        table.embed(["a seven moving up"])
    with pytest.raises(ValueError, match="twice"):
        WordTable(("a", "a"), dim=4, length=3)
