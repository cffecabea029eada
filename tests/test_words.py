"""Rendered words: pure functions of (seed, split, n), splits apart, captions that the word table can say."""

from collections import Counter

import numpy as np
import pytest

from ddrl_jax.data import pipeline, words
from ddrl_jax.data.words import HELDOUT, TRAINED, WORDS, WordClips
from ddrl_jax.models.word_table import WordTable


def test_a_batch_is_captioned_pictures_in_range():
    batch = WordClips("train").batch(range(64))
    video = batch["video"]
    assert video.shape == (64, 1, 1, 32, 96) and video.dtype == np.float32
    assert video.min() >= -1 and video.max() <= 1
    assert batch["caption"] == [words.caption(text) for text in batch["text"]]
    # Paper of .85 to 1 and ink of 0 to .25 of the range: light pictures with dark letters.
    light = video.reshape(64, -1).max(1)
    dark = video.reshape(64, -1).min(1)
    assert (light >= 0.69).all() and (dark <= -0.45).all() and len(np.unique(light)) > 10
    assert 0.61 < video.mean() < 0.67 and 0.50 < video.std() < 0.55  # what configs/words.py normalises with


def test_captions_name_letters_and_places():
    assert words.caption("cake") == "the word c1 a2 k3 e4"
    for wrong in ("cat", "Cake", "ca1e", "çake", "cakes"):
        with pytest.raises(ValueError, match="must be 4 letters"):
            words.caption(wrong)


def test_every_caption_is_within_the_word_table_and_no_two_look_alike_to_it():
    table = WordTable(words.VOCABULARY, dim=16, length=words.MAX_WORDS)
    features = table.embed([words.caption(text) for text in WORDS])
    # As cross-attention sees them: sets of tokens, without an order.
    sets = np.unique(np.sort(features, axis=1).round(4).reshape(len(WORDS), -1), axis=0)
    assert len(sets) == len(WORDS) == len(set(WORDS))


def test_heldout_words_are_apart_and_made_of_letters_seen_in_their_places():
    assert not set(HELDOUT) & set(TRAINED) and set(HELDOUT) | set(TRAINED) == set(WORDS)
    assert len(HELDOUT) == 38 and len(TRAINED) == 265
    seen = Counter((place, letter) for text in TRAINED for place, letter in enumerate(text))
    assert min(seen[place, letter] for text in HELDOUT for place, letter in enumerate(text)) >= 2


def test_splits_have_no_word_and_no_picture_in_common():
    train, heldout = WordClips("train").batch(range(3000)), WordClips("heldout").batch(range(600))
    assert set(train["text"]) == set(TRAINED) and set(heldout["text"]) == set(HELDOUT)
    assert not {v.tobytes() for v in train["video"]} & {v.tobytes() for v in heldout["video"]}


def test_a_clip_is_a_pure_function_of_seed_split_and_index():
    source = WordClips("train", seed=3)
    batch = source.batch([7, 2**31 - 2, 7, 0])
    alone = source.batch([2**31 - 2])
    np.testing.assert_array_equal(batch["video"][1], alone["video"][0])
    np.testing.assert_array_equal(batch["video"][0], batch["video"][2])
    assert batch["text"][1] == alone["text"][0]
    for other in (WordClips("train", seed=4), WordClips("heldout", seed=3)):
        assert not np.array_equal(other.batch(range(20))["video"], source.batch(range(20))["video"])


def test_renderings_of_one_word_differ_in_all_that_may_vary():
    middle = [0.5, 0.0, 0.5, 0.5, 0.5, 0.5]
    plain = words.render("cake", 32, middle)
    for i, value in enumerate((0.0, 0.9, 0.99, 0.99, 0.9, 0.9)):
        u = middle.copy()
        u[i] = value
        assert not np.array_equal(words.render("cake", 32, u), plain), i
    # Shifts move the ink's centre of mass: by .04 of 32 rows across, .03 of them down.
    ink = [255.0 - words.render("noon", 32, [0.5, 0.0, x, x, 0.0, 0.999]) for x in (0.0, 0.999)]
    across = [(i.sum(0) @ np.arange(96)) / i.sum() for i in ink]
    down = [(i.sum(1) @ np.arange(32)) / i.sum() for i in ink]
    assert across[1] - across[0] == pytest.approx(2 * 0.04 * 32, abs=0.5)
    assert down[1] - down[0] == pytest.approx(2 * 0.03 * 32, abs=0.5)


def test_no_letter_is_cut_off():
    extremes = [[0.9, w, x, y, 0.0, 0.999] for w in (0.0, 0.9) for x in (0.0, 0.999) for y in (0.0, 0.999)]
    edges = [
        255 - min(p[:, 0].min(), p[:, -1].min(), p[-1].min())
        for text in ("jump", "flag", "quay", "wolf")
        for p in (words.render(text, 32, u) for u in extremes)
    ]
    assert max(edges) < 64  # at most the soft rim of a stroke


def test_words_are_uniform():
    counts = Counter(WordClips("heldout").batch(range(3800))["text"])
    # Multinomial, 100 expected each: five standard deviations.
    assert len(counts) == 38 and min(counts.values()) > 50 and max(counts.values()) < 150


def test_evaluation_prompts_are_fixed_and_balanced():
    prompts = words.evaluation_prompts(100)
    assert prompts == words.evaluation_prompts(100)
    assert prompts["text"][:38] == words.evaluation_prompts(38)["text"] and set(prompts["text"]) == set(HELDOUT)
    assert set(Counter(prompts["text"]).values()) == {2, 3}
    assert prompts["text"][:38] != list(HELDOUT)


def test_heldout_clips_are_fixed():
    clips = words.heldout_clips(5, size=16)
    assert clips["video"].shape == (5, 1, 1, 16, 48)
    np.testing.assert_array_equal(clips["video"], WordClips("heldout", size=16).batch(range(5))["video"])


def test_they_feed_the_pipeline():
    batches = pipeline.clip_batches(WordClips("train"), 8, seed=0)
    assert batches[3]["video"].shape == (8, 1, 1, 32, 96) and len(batches[3]["caption"]) == 8
    halves = (np.arange(4), np.arange(4, 8))
    first, second = (pipeline.clip_batches(WordClips("train"), 8, 0, rows)[3]["text"] for rows in halves)
    assert first + second == batches[3]["text"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: WordClips("test"), "split = 'test': must be one of train, heldout"),
        (lambda: WordClips("train", size=8), "size = 8"),
        (lambda: WordClips("train", seed=-1), "seed = -1"),
        (lambda: words.evaluation_prompts(0), "count = 0"),
        (lambda: words.heldout_clips(0), "count = 0"),
    ],
)
def test_bad_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_an_index_out_of_range_is_refused():
    with pytest.raises(IndexError, match="clip index"):
        WordClips("train").batch([-1])
