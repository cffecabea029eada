"""The judge of digit clips and the Fréchet distance in its features."""

import os

import numpy as np
import pytest
from scipy import linalg

from ddrl_jax.data.digits import DigitClips
from ddrl_jax.models.digit_judge import Judge, fit_judge, frechet_distance


@pytest.fixture(scope="module")
def heldout():
    return DigitClips("heldout").batch(np.arange(2000))


@pytest.fixture(scope="module")
def judge():
    clips = DigitClips("judge").batch(np.arange(10_000))
    return fit_judge(clips["video"], clips["digit"], clips["direction"], steps=1200)


def reads(judge, videos, clips):
    """Accuracy on digits and directions, and the mean probability of the right digit."""
    out = judge(videos)
    right = out["digit_prob"][np.arange(len(videos)), clips["digit"]]
    return (
        (out["digit_prob"].argmax(1) == clips["digit"]).mean(),
        (out["direction_prob"].argmax(1) == clips["direction"]).mean(),
        right.mean(),
    )


# ---- what it reads


def test_reads_real_heldout_clips(judge, heldout):
    digit, direction, _ = reads(judge, heldout["video"], heldout)
    assert digit >= 0.90
    assert direction >= 0.995


def test_outputs(judge, heldout):
    out = judge(heldout["video"][:300])
    assert {k: (v.shape, v.dtype.name) for k, v in out.items()} == {
        "digit_prob": ((300, 10), "float32"),
        "direction_prob": ((300, 9), "float32"),
        "features": ((300, 32), "float32"),
    }
    np.testing.assert_allclose(out["digit_prob"].sum(1), 1, atol=1e-5)
    np.testing.assert_allclose(out["direction_prob"].sum(1), 1, atol=1e-5)


def test_slightly_imperfect_clips_are_still_read(judge, heldout):
    noise = np.random.default_rng(0).normal(0, 0.2, heldout["video"].shape)
    digit, direction, _ = reads(judge, np.clip(heldout["video"] + noise, -1, 1), heldout)
    assert digit >= 0.87
    assert direction >= 0.99


def noisy(x):
    return np.clip(x + np.random.default_rng(1).normal(0, 1.0, x.shape), -1, 1)


def thick(x):
    return np.max([np.roll(x, s, axis) for s in (-1, 0, 1) for axis in (3, 4)], 0)


def blended(x):
    return (x + np.roll(x, 7, 0)) / 2


@pytest.mark.parametrize("corrupt", [noisy, thick, blended])
def test_corrupted_digits_are_read_worse(judge, heldout, corrupt):
    digit, _, sure = reads(judge, heldout["video"], heldout)
    corrupted, _, less_sure = reads(judge, corrupt(heldout["video"]), heldout)
    assert corrupted < digit - 0.1
    assert less_sure < sure - 0.1


def test_corrupted_motion_is_read_worse(judge, heldout):
    for frames in ([0, 0, 0, 0], [3, 2, 1, 0], [2, 0, 3, 1]):
        _, direction, _ = reads(judge, heldout["video"][:, :, frames], heldout)
        assert direction < 0.3


def test_distance_grows_with_corruption(judge, heldout):
    real, other = heldout["video"][:1000], heldout["video"][1000:]
    reference = judge(real)["features"]

    def distance(videos):
        return frechet_distance(judge(videos)["features"], reference)

    base = distance(other)
    slight = np.clip(other + np.random.default_rng(1).normal(0, 0.4, other.shape), -1, 1)
    collapsed = other[np.arange(1000) % 10]
    values = [base, distance(slight), distance(noisy(other)), distance(thick(other)), distance(collapsed)]
    assert values[1] > 1.15 * base
    assert values[2] > 4 * base
    assert values[3] > 8 * base
    assert values[4] > 20 * base


def test_a_clip_does_not_depend_on_its_batch_mates(judge, heldout):
    whole = judge(heldout["video"][:700])
    part = judge(heldout["video"][300:311])
    for key in whole:
        np.testing.assert_array_equal(whole[key][300:311], part[key])


def test_no_clips(judge, heldout):
    assert judge(heldout["video"][:0])["digit_prob"].shape == (0, 10)


# ---- fitting and files


def test_same_seed_same_judge():
    clips = DigitClips("judge").batch(np.arange(200))

    def features(seed):
        fitted = fit_judge(clips["video"], clips["digit"], clips["direction"], seed=seed, steps=5)
        return fitted(clips["video"])["features"]

    first = features(0)
    np.testing.assert_array_equal(first, features(0))
    assert np.abs(first - features(1)).max() > 0.1


def test_one_step_is_enough_to_run():
    clips = DigitClips("judge", frames=2, size=10).batch(np.arange(8))
    fitted = fit_judge(clips["video"], clips["digit"], clips["direction"], steps=1)
    assert np.isfinite(fitted(clips["video"])["features"]).all()


def test_saved_judge_is_the_same_judge(judge, heldout, tmp_path):
    file = tmp_path / "sub" / "judge.npz"
    judge.save(file)
    judge.save(file)
    assert os.listdir(file.parent) == ["judge.npz"]
    with np.load(file, allow_pickle=False) as stored:
        assert all(stored[name].dtype.kind in "fU" for name in stored.files)
    loaded = Judge.load(file)
    assert loaded.shape == judge.shape == (1, 4, 12, 12)
    expected, actual = judge(heldout["video"][:50]), loaded(heldout["video"][:50])
    for key in expected:
        np.testing.assert_array_equal(actual[key], expected[key])


@pytest.mark.parametrize("how", ["missing", "text", "other arrays", "cut short", "wrong shape"])
def test_bad_judge_files_are_refused_in_one_line(judge, tmp_path, how):
    file = tmp_path / "judge.npz"
    judge.save(file)
    if how == "missing":
        file.unlink()
    elif how == "text":
        file.write_text("no judge")
    elif how == "other arrays":
        np.savez(file, video=np.zeros(3))
    elif how == "cut short":
        file.write_bytes(file.read_bytes()[:1000])
    elif how == "wrong shape":
        with np.load(file) as stored:
            arrays = dict(stored)
        np.savez(file, **(arrays | {"shape": np.array("[1, 5, 12, 12]")}))
    with pytest.raises(ValueError, match=r"judge\.npz.*as Judge\.save writes it") as error:
        Judge.load(file)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"videos_NCTHW": np.zeros((4, 4, 12, 12))}, r"videos \(4, 4, 12, 12\)"),
        ({"digit_N": np.zeros(3, int)}, r"digit int64 \(3,\)"),
        ({"digit_N": np.zeros(4)}, "digit float64"),
        ({"digit_N": np.full(4, 10)}, r"digit in 10\.\.10: must be in 0\.\.9"),
        ({"direction_N": np.full(4, -1)}, r"direction in -1\.\.-1: must be in 0\.\.8"),
        ({"steps": 0}, "steps = 0"),
    ],
)
def test_bad_training_data_is_refused(change, message):
    good = {
        "videos_NCTHW": np.zeros((4, 1, 4, 12, 12)),
        "digit_N": np.zeros(4, int),
        "direction_N": np.zeros(4, int),
        "steps": 1,
    } | change
    with pytest.raises(ValueError, match=message):
        fit_judge(good["videos_NCTHW"], good["digit_N"], good["direction_N"], steps=good["steps"])


def test_bad_clips_are_refused(judge):
    with pytest.raises(ValueError, match=r"this judge reads \(N, 1, 4, 12, 12\)"):
        judge(np.zeros((2, 1, 4, 16, 16)))
    with pytest.raises(ValueError, match="finite"):
        judge(np.full((2, 1, 4, 12, 12), np.nan))


# ---- Fréchet distance


def gaussian_sample(mean, covariance, count, seed):
    """Rows whose sample mean and covariance are exactly those asked for."""
    x = np.random.default_rng(seed).normal(size=(count, len(mean)))
    x -= x.mean(0)
    x = np.linalg.solve(np.linalg.cholesky(np.cov(x.T)), x.T).T
    return x @ np.linalg.cholesky(covariance).T + mean


def test_closed_form_for_commuting_covariances():
    a = gaussian_sample(np.zeros(3), np.diag([1.0, 4.0, 9.0]), 50, 0)
    b = gaussian_sample(np.array([1.0, -2.0, 0.5]), np.diag([4.0, 0.25, 9.0]), 80, 1)
    # |m|^2 = 5.25, sum (sqrt a - sqrt b)^2 = 1 + 2.25 + 0
    assert frechet_distance(a, b) == pytest.approx(8.5, rel=1e-12)


def test_closed_form_for_covariances_that_do_not_commute():
    s, t = np.array([[2.0, 1.0], [1.0, 3.0]]), np.array([[1.0, -0.5], [-0.5, 2.0]])
    a, b = gaussian_sample(np.zeros(2), s, 60, 0), gaussian_sample(np.zeros(2), t, 60, 1)
    # In two dimensions tr M^(1/2) = (tr M + 2 det(M)^(1/2))^(1/2): tr(ST) = 7, det = 5 * 1.75.
    expected = 5 + 3 - 2 * np.sqrt(7 + 2 * np.sqrt(8.75))
    assert frechet_distance(a, b) == pytest.approx(expected, rel=1e-12)


def test_agrees_with_the_matrix_square_root():
    rng = np.random.default_rng(2)
    a = rng.normal(size=(200, 12)) @ rng.normal(size=(12, 12))
    b = rng.normal(size=(150, 12)) @ rng.normal(size=(12, 12)) + 1
    s, t = np.cov(a.T), np.cov(b.T)
    expected = ((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(s + t - 2 * linalg.sqrtm(s @ t).real)
    assert frechet_distance(a, b) == pytest.approx(expected, rel=1e-9)
    assert frechet_distance(b, a) == pytest.approx(frechet_distance(a, b), rel=1e-12)


@pytest.mark.parametrize("count", [10, 500])
def test_zero_on_itself(count):
    # With 10 rows of 32 features the covariance is singular.
    x = np.random.default_rng(3).normal(size=(count, 32)).astype(np.float32) * 10
    assert frechet_distance(x, x) < 1e-9
    assert frechet_distance(x, x[::-1]) < 1e-9
    assert frechet_distance(x, x + 1) == pytest.approx(32, rel=1e-6)


@pytest.mark.parametrize(
    ("a", "b"),
    [((5, 3), (5, 4)), ((1, 3), (5, 3)), ((5,), (5,)), ((5, 3), (0, 3))],
)
def test_features_that_do_not_fit_are_refused(a, b):
    with pytest.raises(ValueError, match="must be"):
        frechet_distance(np.zeros(a), np.zeros(b))


def test_features_must_be_finite():
    with pytest.raises(ValueError, match="finite"):
        frechet_distance(np.array([[0.0], [np.nan]]), np.zeros((2, 1)))
