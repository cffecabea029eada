"""The OCR reward and its judge: what they ask for, how they compare, what they read. Needs torch, and the engines."""

import tomllib

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from ddrl_jax.data.words import TRAINED, WordClips, caption  # noqa: E402
from ddrl_jax.sidecar import build  # noqa: E402
from ddrl_jax.sidecar.scorers import load, resolve  # noqa: E402
from ddrl_jax.sidecar.scorers.ocr import (  # noqa: E402
    comparable,
    edit_distance,
    pictures,
    similarity,
    wanted_text,
)
from ddrl_jax.sidecar.worker import score_in_fixed_batches  # noqa: E402

from .paths import ROOT  # noqa: E402

torch.set_num_threads(1)
ENGINES = {"ocr": "rapidocr", "ocr_judge": "ddddocr"}


@pytest.fixture(scope="module")
def clips():
    return WordClips("train", seed=5).batch(range(24))


@pytest.fixture(scope="module", params=sorted(ENGINES))
def scorer(request):
    pytest.importorskip(
        ENGINES[request.param], reason=f"add it with: pip install {' '.join(build.scorer_requirements('ocr'))}"
    )
    return load(request.param, None, "cpu")[1]


# --- what is asked for, and how it is compared ---


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("the word c1 a2 k3 e4", "cake"),
        ("the word c a k e", "cake"),
        ("The Word C A K E", "cake"),
        ('a neon sign that says "Open Late" in the rain', "Open Late"),
        ('a sign "" with the letters a b', "ab"),
        ("a 7", "a7"),
    ],
)
def test_the_text_is_read_off_the_prompt(prompt, text):
    assert wanted_text(prompt) == text


def test_every_caption_of_the_words_names_its_word():
    assert [wanted_text(caption(text)) for text in TRAINED] == list(TRAINED)


@pytest.mark.parametrize("prompt", ["", "a seven moving up", "c1 a2 k3 e4 the word"])
def test_a_prompt_without_a_text_is_refused(prompt):
    with pytest.raises(ValueError, match="names no text"):
        wanted_text(prompt)


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [
        ("", "", 0),
        ("", "cake", 4),
        ("cake", "cake", 0),
        ("cake", "lake", 1),
        ("cake", "cakes", 1),
        ("cake", "ake", 1),
        ("kitten", "sitting", 3),
        ("sunday", "saturday", 3),
        ("abcd", "dcba", 4),
        ("ab", "ba", 2),
    ],
)
def test_edit_distances(a, b, distance):
    assert edit_distance(a, b) == edit_distance(b, a) == distance


def test_similarities():
    assert similarity("CAKE", "cake") == 1.0  # case does not count
    assert similarity("c a-k.e", "cake") == 1.0  # nor does what is no letter
    assert similarity("lake", "cake") == 0.75
    assert similarity("cakes", "cake") == 0.8
    assert similarity("", "cake") == 0.0
    assert similarity("口o", "cake") == 0.0  # nor what is not ASCII
    assert similarity("wolf", "barn") == 0.0
    assert comparable("Ça va? Ω 12") == "ava12"


def test_pictures_are_rounded_bytes_in_three_channels():
    video = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0]).reshape(1, 1, 1, 1, 5)
    assert pictures(video)[0, 0, 0].tolist() == [[v] * 3 for v in (0, 0, 128, 255, 255)]
    colour = torch.rand(2, 3, 4, 5, 6)
    assert pictures(colour).shape == (2, 4, 5, 6, 3)
    np.testing.assert_array_equal(pictures(colour)[1, 2, 3, 4], ((colour[1, :, 2, 3, 4] + 1) * 127.5).round().byte())


# --- where they are found, and what they need ---


def test_they_are_built_in():
    assert {name: resolve(name)[0] for name in ENGINES} == {"ocr": "ocr", "ocr_judge": "ocr_judge"}


def test_one_environment_serves_both_and_the_digits_do_not_need_it():
    digits, both = build.requirements("digits"), build.requirements("ocr")
    assert both == build.requirements("ocr_judge") and both[: len(digits)] == digits
    assert {n.partition("=")[0] for n in both[len(digits) :]} == {"rapidocr", "ddddocr", "onnxruntime>"}


@pytest.mark.parametrize("name", sorted(ENGINES))
def test_a_missing_engine_is_one_line_that_says_how_to_add_it(name, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, ENGINES[name], None)
    with pytest.raises(ValueError, match=rf"^scorer {name}: \w+ is not .* --scorer ocr$"):
        load(name, None, "cpu")


# --- what they read ---


def test_clean_words_are_read(scorer, clips):
    scores = score_in_fixed_batches(scorer, clips["video"], clips["caption"])
    assert np.mean(scores["text"]) >= 0.97
    assert np.mean(np.array(scores["text"]) == 1) >= 0.9
    if "exact" in scores:
        assert scores["exact"] == [float(t == 1) for t in scores["text"]]
    else:
        assert min(scores["confidence"]) > 0.9


def test_a_word_that_is_not_the_one_asked_for_scores_low(scorer, clips):
    text = clips["text"][:12]
    turned = text[1:] + text[:1]
    wrong = score_in_fixed_batches(scorer, clips["video"][:12], [caption(t) for t in turned])["text"]
    expected = [similarity(a, b) for a, b in zip(text, turned, strict=True)]
    assert np.mean(wrong) == pytest.approx(np.mean(expected), abs=0.05) and np.mean(wrong) < 0.4


def test_noise_and_blank_pictures_score_low(scorer, clips):
    noise = np.random.default_rng(0).uniform(-1, 1, clips["video"].shape).astype(np.float32)
    for video in (noise, np.ones_like(noise), -np.ones_like(noise)):
        scores = score_in_fixed_batches(scorer, video[:8], clips["caption"][:8])
        assert np.mean(scores["text"]) < 0.1
        assert np.mean(scores.get("exact", scores.get("confidence"))) < 0.3


def test_the_reward_falls_as_the_picture_drowns(scorer, clips):
    noise = np.random.default_rng(1).standard_normal(clips["video"].shape).astype(np.float32)
    means = [
        np.mean(score_in_fixed_batches(scorer, clips["video"][:8] + s * noise[:8], clips["caption"][:8])["text"])
        for s in (0.0, 1.0, 3.0)
    ]
    assert means[0] > means[1] > means[2]


def test_a_score_does_not_depend_on_its_batch_mates(scorer, clips):
    video = clips["video"] + 0.7 * np.random.default_rng(2).standard_normal(clips["video"].shape).astype(np.float32)
    together = score_in_fixed_batches(scorer, video[:6], clips["caption"][:6])
    alone = score_in_fixed_batches(scorer, video[4:5], clips["caption"][4:5])
    assert {name: [column[4]] for name, column in together.items()} == alone


def test_frames_are_averaged(scorer, clips):
    # One frame with the word, one that is blank.
    two = np.concatenate([clips["video"][:1], np.ones_like(clips["video"][:1])], axis=2)
    assert score_in_fixed_batches(scorer, two, clips["caption"][:1])["text"] == [0.5]


def test_the_extra_for_tests_has_the_engines_that_the_environment_is_built_with():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras["ocr"]) == set(build.requirements("ocr")) - set(build.requirements("digits"))
