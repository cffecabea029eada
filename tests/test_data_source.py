"""What training and evaluation see of a data set, digits and words alike; and features of pixels."""

import numpy as np
import pytest

from ddrl_jax.data import digits, pipeline, source, words
from ddrl_jax.models.digit_judge import frechet_distance
from ddrl_jax.models.pixel_features import PixelFeatures


@pytest.fixture(autouse=True)
def few_clips_for_the_judge(monkeypatch):
    monkeypatch.setattr(source, "JUDGE_CLIPS", 200)
    monkeypatch.setattr(source, "PIXEL_CLIPS", 120)


def make(name, **changes):
    shape = {"digits": {"frames": 4, "size": 12}, "words": {"frames": 1, "size": 32}}.get(name, {})
    return source.data_set(name, **{"frames": 1, "size": 32, "seed": 0, **shape, **changes})


@pytest.mark.parametrize("name", ["digits", "words"])
def test_clips_have_the_shape_and_the_words_that_are_said(name, tmp_path):
    data = make(name)
    training = data.training()
    judge = data.judge(tmp_path / "judge.npz", seed=0, steps=3, say=print)
    for clips in (training.batch(range(30)), data.heldout_clips(30)):
        assert clips["video"].shape == (30, *data.video_shape)
        assert {w for text in clips["caption"] for w in text.split()} <= set(data.vocabulary)
        values, features = judge(clips["video"], None, clips)
        assert all(v.shape == (30,) for v in values.values()) and features.shape[0] == 30
    prompts = data.evaluation_prompts(50)
    assert len(prompts["caption"]) == 50 and prompts["caption"] == data.evaluation_prompts(60)["caption"][:50]
    assert not set(prompts["caption"]) & set(training.batch(range(5000))["caption"])


def test_digits_are_those_of_the_modules_they_stand_for():
    data = make("digits", seed=7)
    assert data.video_shape == (1, 4, 12, 12) and data.vocabulary == digits.VOCABULARY
    np.testing.assert_array_equal(
        data.training().batch([3, 5])["video"], digits.DigitClips("train", seed=7).batch([3, 5])["video"]
    )
    assert data.evaluation_prompts(9)["caption"] == pipeline.evaluation_prompts(9)["caption"]
    np.testing.assert_array_equal(data.heldout_clips(4)["video"], pipeline.heldout_clips(4)["video"])


def test_words_are_those_of_the_module_they_stand_for():
    data = make("words", seed=7)
    assert data.video_shape == (1, 1, 32, 96) and data.vocabulary == words.VOCABULARY
    assert data.training().batch([3, 5])["text"] == words.WordClips("train", seed=7).batch([3, 5])["text"]
    assert data.evaluation_prompts(9) == words.evaluation_prompts(9)


@pytest.mark.parametrize("name", ["digits", "words"])
def test_a_limit_keeps_the_first_clips(name):
    few = make(name, limit=5).training()
    assert len(few) == 5
    np.testing.assert_array_equal(few.batch([4])["video"], make(name).training().batch([4])["video"])


def test_the_judge_of_digits_is_stored_and_read_again(tmp_path):
    file, data, said = tmp_path / "judge.npz", make("digits"), []
    clips = data.heldout_clips(20)

    def judged():
        values, features = data.judge(file, seed=0, steps=3, say=said.append)(clips["video"], None, clips)
        return {**values, "features": features}

    first = judged()
    stamp = file.stat().st_mtime_ns
    again = judged()
    assert file.stat().st_mtime_ns == stamp and not said
    assert first.keys() == {"judge_digit", "judge_direction", "features"}
    for name, value in first.items():
        np.testing.assert_array_equal(value, again[name])
    file.write_bytes(b"damaged")
    third = judged()
    assert said == ["judge: judge.npz is damaged and is fitted again"]
    np.testing.assert_array_equal(first["features"], third["features"])


def test_stored_digits_of_another_shape_are_refused(tmp_path):
    digits.write_clips(tmp_path, "train", 4, frames=3)
    with pytest.raises(ValueError, match=r"^data\.path=.*clips are \(T,H,W,C\) \(3, 12, 12, 1\)"):
        make("digits", path=str(tmp_path)).training()
    assert len(make("digits", path=str(tmp_path), frames=3).training()) == 4


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: make("letters"), "data.name='letters': must be digits, words or videos"),
        (lambda: make("words", frames=4), "data.frames=4: must be 1 for words"),
        (lambda: make("words", path="x"), "data.path='x': must be '' for words"),
        (lambda: make("digits", path="/nowhere").training(), "data.path = '/nowhere'"),
        (lambda: make("words", limit=-1).training(), "data.limit=-1"),
    ],
)
def test_bad_fields_are_one_line(call, message):
    with pytest.raises(ValueError) as error:
        call()
    assert message in str(error.value) and "\n" not in str(error.value)


# --- features of pixels ---


def test_components_are_those_of_the_covariance():
    rng = np.random.default_rng(0)
    # Six pixels of which three directions carry 9, 4 and 1 of variance, and .01 is noise.
    axes = np.linalg.qr(rng.standard_normal((6, 6)))[0]
    x = (rng.standard_normal((4000, 6)) * np.array([3, 2, 1, 0.1, 0.1, 0.1])) @ axes.T + 5.0
    for count in (4000, 5):  # more clips than pixels, and fewer
        features = PixelFeatures.fit(x[:count].reshape(count, 1, 1, 2, 3), 3)
        values, vectors = np.linalg.eigh(np.cov(x[:count].T))
        np.testing.assert_allclose(features.scale_F**2, values[::-1][:3], rtol=1e-3)
        np.testing.assert_allclose(np.abs(features.basis_PF.T @ vectors[:, ::-1][:, :3]), np.eye(3), atol=2e-3)
    f = PixelFeatures.fit(x.reshape(-1, 1, 1, 2, 3), 3)(x.reshape(-1, 1, 1, 2, 3))
    assert f.shape == (4000, 4) and f.dtype == np.float32
    np.testing.assert_allclose(f.mean(0), 0, atol=1e-3)
    np.testing.assert_allclose(f.std(0), 1, atol=1e-3)


def test_what_the_components_leave_over_is_seen():
    data = words.WordClips("train").batch(range(150))["video"]
    features, clips = PixelFeatures.fit(data, 16), words.WordClips("heldout").batch(range(100))["video"]
    real = features(words.WordClips("heldout", seed=1).batch(range(100))["video"])
    rng = np.random.default_rng(0)
    base = frechet_distance(features(clips), real)
    noisy = frechet_distance(features(np.clip(clips + 0.3 * rng.standard_normal(clips.shape), -1, 1)), real)
    blurred = frechet_distance(features((clips + np.roll(clips, 1, -1) + np.roll(clips, -1, -1)) / 3), real)
    same = frechet_distance(features(np.repeat(clips[:1], 100, 0)), real)
    assert min(noisy, blurred) > 1.5 * base and same > 5 * base


def test_features_do_not_depend_on_batch_mates():
    clips = words.WordClips("train").batch(range(40))["video"]
    features = PixelFeatures.fit(clips, 8)
    np.testing.assert_array_equal(features(clips)[17:18], features(clips[17:18]))


def test_too_many_components_are_refused():
    for components in (0, 5):
        with pytest.raises(ValueError, match="components"):
            PixelFeatures.fit(np.zeros((5, 1, 1, 3, 3)), components)
