"""The embedded clips: splits, purity, geometry, captions, and the file they are handed on in."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import ndimage
from sklearn.datasets import load_digits

from ddrl_jax.data import digits
from ddrl_jax.data.digits import DigitClips


def centroid(canvas_THW):
    """Centre of mass (rows, columns) of each frame, float64 (T,2)."""
    mass = canvas_THW.astype(np.float64)
    total = mass.sum((1, 2))
    rows, columns = np.arange(mass.shape[1]), np.arange(mass.shape[2])
    return np.stack([(mass.sum(2) @ rows) / total, (mass.sum(1) @ columns) / total], -1)


# ---- splits


def test_splits_are_disjoint_and_hold_every_scan():
    train, judge, heldout = (set(digits.split_scans(s).tolist()) for s in ("train", "judge", "heldout"))
    assert not train & judge and not train & heldout and not judge & heldout
    assert train | judge | heldout == set(range(1797))


def test_no_scan_occurs_twice_under_two_numbers():
    # Otherwise disjoint row numbers would not mean disjoint scans.
    assert len({image.tobytes() for image in load_digits().images}) == 1797


def test_scorer_learns_from_a_third_of_all_scans_inside_train():
    scorer = set(digits.split_scans("scorer").tolist())
    assert scorer < set(digits.split_scans("train").tolist())
    assert len(scorer) == 599


@pytest.mark.parametrize(("split", "share"), [("train", 0.55), ("scorer", 1 / 3), ("judge", 0.25), ("heldout", 0.2)])
def test_splits_are_stratified(split, share):
    target = load_digits().target
    whole = np.bincount(target)
    part = np.bincount(target[digits.split_scans(split)])
    assert np.abs(part - share * whole).max() <= 1.01


@pytest.mark.parametrize("split", digits.SPLITS)
def test_clips_come_from_scans_of_their_split_and_digit(split):
    clips = DigitClips(split, seed=3).arrays(np.arange(3000))
    assert np.isin(clips["scan"], digits.split_scans(split)).all()
    assert (load_digits().target[clips["scan"]] == clips["digit"]).all()


# ---- purity


def test_clips_of_seed_zero_stay_what_they_are():
    # Constants: checkpoints, shipped scorers and published numbers depend on them.
    clips = DigitClips("train").arrays([0, 1, 2, 3, 2**31 - 2])
    assert clips["digit"].tolist() == [3, 1, 1, 0, 0]
    assert clips["direction"].tolist() == [2, 8, 5, 3, 3]
    assert clips["scan"].tolist() == [575, 657, 947, 1206, 126]
    np.testing.assert_allclose(clips["video"].sum((1, 2, 3, 4)), [18798, 23580, 20208, 22312, 23713], atol=8)


def test_a_clip_does_not_depend_on_its_batch():
    source = DigitClips("train", seed=5)
    indices = np.random.default_rng(0).integers(0, len(source), 200)
    together = source.arrays(indices)
    for i, n in enumerate(indices[:40].tolist()):
        clip = DigitClips("train", seed=5).clip(n)
        np.testing.assert_array_equal(clip.video, together["video"][i])
        assert (clip.digit, clip.direction, clip.scan) == (
            together["digit"][i],
            together["direction"][i],
            together["scan"][i],
        )
    backwards = source.arrays(indices[::-1])
    np.testing.assert_array_equal(backwards["video"][::-1], together["video"])


def test_seed_and_split_each_change_the_stream():
    def labels(split, seed):
        clips = DigitClips(split, seed=seed).arrays(np.arange(2000))
        return clips["digit"] * 9 + clips["direction"]

    base = labels("train", 0)
    for other in (labels("train", 1), labels("heldout", 0), labels("train", 2**63 - 1)):
        # Independent streams agree on one label in ninety.
        assert (base == other).mean() < 0.03


def test_digits_and_motions_are_uniform_and_independent():
    clips = DigitClips("train").arrays(np.arange(45_000))
    cells = np.bincount(clips["digit"] * 9 + clips["direction"], minlength=90)
    # Chi-square with 89 degrees of freedom: 99.99 % lie below 145.
    assert ((cells - 500) ** 2 / 500).sum() < 145


# ---- geometry


@pytest.mark.parametrize(("frames", "size"), [(4, 12), (8, 16)])
def test_motion_is_read_off_the_centroid(frames, size):
    source = DigitClips("train", frames=frames, size=size)
    clips = source.arrays(np.arange(1000))
    assert clips["video"].shape == (1000, frames, size, size, 1)
    free, steps = size - 8, frames - 1
    for canvas, direction in zip(clips["video"][..., 0], clips["direction"], strict=True):
        step = np.diff(centroid(canvas), axis=0)
        # A bilinear shift moves the centroid by exactly the shift; what is left is rounding to 8 bits.
        np.testing.assert_allclose(step, step.mean(0, keepdims=True).repeat(steps, 0), atol=0.04)
        speed = np.linalg.norm(step.mean(0))
        if digits.DIRECTIONS[direction] == "still":
            assert speed < 0.01
        else:
            assert 0.6 * free / steps - 0.02 < speed < 0.9 * free / steps + 0.02
            assert np.argmax(digits.VELOCITIES[:8] @ step.mean(0)) == direction
            assert digits.VELOCITIES[direction] @ step.mean(0) > 0.99 * speed


@pytest.mark.parametrize(
    ("motion", "rows", "columns"),
    [
        ("ing up", -1, 0),
        ("ing to the right", 0, 1),
        ("ing down and to the left", 1, -1),
        ("ing still", 0, 0),
    ],
)
def test_words_mean_what_they_say(motion, rows, columns):
    source = DigitClips("train")
    clip = next(c for c in map(source.clip, range(1000)) if c.caption.endswith(motion))
    moved = np.ptp(centroid(clip.video[..., 0]), axis=0) * np.sign(
        np.diff(centroid(clip.video[..., 0])[[0, -1]], axis=0)[0]
    )
    assert np.sign(np.round(moved, 1)).tolist() == [rows, columns]


@pytest.mark.parametrize("size", [10, 12, 17])
def test_the_scan_stays_whole_inside_the_canvas(size):
    clips = DigitClips("heldout", size=size).arrays(np.arange(500))
    mass = clips["video"].sum((2, 3, 4)) / 255
    whole = load_digits().images[clips["scan"]].sum((1, 2)) / 16
    np.testing.assert_allclose(mass, whole[:, None].repeat(4, 1), atol=0.15)


def test_frames_are_bilinear_shifts_of_the_scan():
    source = DigitClips("train")
    for n in range(50):
        clip = source.clip(n)
        scan = np.pad(load_digits().images[clip.scan] / 16, 2)
        for frame, centre in zip(clip.video[..., 0] / 255, centroid(clip.video[..., 0]), strict=True):
            shifted = ndimage.shift(scan, centre - centroid(scan[None])[0], order=1)
            np.testing.assert_allclose(frame, shifted, atol=0.02)


def test_positions_are_sub_pixel():
    source = DigitClips("train")
    still = [c for c in map(source.clip, range(600)) if c.direction == 8]
    place = np.array([centroid(c.video[:1, ..., 0])[0] - centroid(load_digits().images[[c.scan]])[0] for c in still])
    assert ((place % 1 > 0.25) & (place % 1 < 0.75)).mean() > 0.3
    assert place.min() > 0.95 and place.max() < 3.05 and place.std() > 0.4


# ---- what a model sees


def test_batch_is_what_a_model_reads():
    source = DigitClips("train")
    batch = source.batch(range(64))
    assert batch["video"].shape == (64, 1, 4, 12, 12) and batch["video"].dtype == np.float32
    assert batch["video"].min() == -1.0 and batch["video"].max() <= 1.0
    assert batch["digit"].dtype == batch["direction"].dtype == np.int32
    stored = source.arrays(range(64))["video"]
    np.testing.assert_allclose(batch["video"][:, 0], stored[..., 0] / 127.5 - 1, atol=1e-6)
    rows = zip(batch["digit"].tolist(), batch["direction"].tolist(), batch["caption"], strict=True)
    assert set(rows) <= set(digits.all_prompts(heldout=False))


def test_pixel_moments():
    # docs/data.md gives these numbers; a codec may be normalised by them.
    video = DigitClips("train").batch(np.arange(20_000))["video"]
    assert video.mean() == pytest.approx(-0.729, abs=0.002)
    assert video.std() == pytest.approx(0.513, abs=0.002)


def test_the_data_sheet_gives_the_numbers_its_program_prints(capsys):
    sheet = (Path(__file__).parents[1] / "docs" / "data.md").read_text(encoding="utf-8")
    program, printed = re.search(r"```python\n(.*?)```\n```text\n(.*?)```", sheet, re.DOTALL).groups()
    exec(compile(program, "docs/data.md", "exec"), {})
    assert capsys.readouterr().out == printed


# ---- captions


def test_captions():
    assert digits.caption(7, 7) == "a seven moving up and to the left"
    assert digits.caption(8, 8) == "an eight staying still"
    assert digits.caption(0, 2, 5) == "the digit zero drifting to the right"
    assert digits.caption(1, 8, 6) == "the digit one resting still"


def test_prompts_are_distinct_and_in_the_vocabulary():
    prompts = digits.all_prompts()
    assert len({text for _, _, text in prompts}) == len(prompts) == 720
    assert {w for _, _, text in prompts for w in text.split()} == set(digits.VOCABULARY)
    assert len(set(digits.VOCABULARY)) == len(digits.VOCABULARY) == 29
    assert digits.MAX_WORDS == 9


def test_heldout_prompts_say_every_digit_and_direction_in_words_that_training_has():
    trained, heldout = digits.all_prompts(heldout=False), digits.all_prompts(heldout=True)
    assert not {t for *_, t in trained} & {t for *_, t in heldout}
    assert len(heldout) == 270 and len(trained) == 450
    for prompts, ways in ((trained, 5), (heldout, 3)):
        pairs = [(d, m) for d, m, _ in prompts]
        assert {pairs.count(pair) for pair in pairs} == {ways} and len(set(pairs)) == 90
    words = {w for *_, text in trained for w in text.split()}
    assert {w for *_, text in heldout for w in text.split()} <= words


@pytest.mark.parametrize("split", digits.SPLITS)
def test_wordings_of_a_split(split):
    seen = set(digits.DigitClips(split).batch(range(15_000))["caption"])
    expected = digits.all_prompts({"train": False, "heldout": True}.get(split))
    assert seen == {text for *_, text in expected}


# ---- files


def test_written_clips_are_the_stream_and_need_no_pickle(tmp_path):
    file = digits.write_clips(tmp_path / "clips", "scorer", 30, seed=4)
    assert file == tmp_path / "clips" / "clips.npz"
    assert os.listdir(file.parent) == ["clips.npz"]
    with np.load(file, allow_pickle=False) as stored:
        assert set(stored.files) == {"video", "digit", "direction", "caption"}
        assert stored["video"].dtype == np.uint8 and stored["video"].shape == (30, 4, 12, 12, 1)
        assert stored["caption"].dtype.kind == "U"
    for path in (file, file.parent, str(file.parent)):
        read = digits.load_clips(path)
        expected = DigitClips("scorer", seed=4).batch(range(5, 30))
        actual = read.batch(np.arange(5, 30))
        assert len(read) == 30
        assert actual["caption"] == expected["caption"]
        for key in ("video", "digit", "direction"):
            np.testing.assert_array_equal(actual[key], expected[key])
    assert set(read.vocabulary) <= set(digits.VOCABULARY)
    np.testing.assert_array_equal(read.clip(3).video, DigitClips("scorer", seed=4).clip(3).video)


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    file = digits.write_clips(tmp_path / "a.npz", "train", 3)
    before = file.read_bytes()

    def fail(stream, **arrays):
        stream.write(b"half a file")
        raise OSError("disk full")

    monkeypatch.setattr(np, "savez_compressed", fail)
    with pytest.raises(OSError, match="disk full"):
        digits.write_clips(file, "train", 5)
    assert file.read_bytes() == before
    assert os.listdir(tmp_path) == ["a.npz"]


def good_arrays():
    clips = DigitClips("train").arrays(range(3))
    return {k: clips[k] for k in ("video", "digit", "direction")} | {"caption": np.array(["a", "b", "c"])}


def spoil(folder, how):
    """Make a folder that is wrong in one way; return the path to ask for."""
    if how == "missing":
        return folder / "nowhere"
    file = folder / "clips.npz"
    arrays = good_arrays()
    if how == "empty folder":
        return folder
    if how == "empty file":
        file.touch()
    elif how == "text":
        file.write_text("these are not the clips you are looking for")
    elif how == "cut short":
        np.savez(file, **arrays)
        file.write_bytes(file.read_bytes()[:-100])
    elif how == "flipped bits":
        file = digits.write_clips(folder, "train", 200)
        content = bytearray(file.read_bytes())
        content[1000:1040] = bytes(255 - b for b in content[1000:1040])
        file.write_bytes(content)
    elif how == "npy":
        with file.open("wb") as stream:
            np.save(stream, arrays["video"])
    elif how == "pickle":
        np.savez(file, **(arrays | {"caption": np.array(["a", "b", "c"], object)}))
    elif how == "no caption":
        del arrays["caption"]
        np.savez(file, **arrays)
    elif how == "float video":
        np.savez(file, **(arrays | {"video": arrays["video"].astype(np.float32)}))
    elif how == "no channel":
        np.savez(file, **(arrays | {"video": arrays["video"][..., 0]}))
    elif how == "no clips":
        np.savez(file, **{k: v[:0] for k, v in arrays.items()})
    elif how == "lengths":
        np.savez(file, **(arrays | {"caption": arrays["caption"][:2]}))
    elif how == "float digit":
        np.savez(file, **(arrays | {"digit": arrays["digit"] / 2}))
    return folder


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("missing", "nowhere is not there"),
        ("empty folder", "clips.npz is not there"),
        ("empty file", "not a readable npz"),
        ("text", "not a readable npz"),
        ("cut short", "not a readable npz"),
        ("flipped bits", "not a readable npz"),
        ("npy", "not a readable npz"),
        ("pickle", "not a readable npz"),
        ("no caption", "has no caption"),
        ("float video", "video is float32"),
        ("no channel", r"not uint8 \(N,T,H,W,C\)"),
        ("no clips", r"video is uint8 \(0,"),
        ("lengths", r"caption is .* beside 3 videos"),
        ("float digit", "digit is float64"),
    ],
)
def test_unreadable_clips_are_refused_in_one_line(tmp_path, how, why):
    path = spoil(tmp_path, how)
    with pytest.raises(ValueError, match=why) as error:
        digits.load_clips(path)
    text = str(error.value)
    assert text.startswith(f"data.path = {str(path)!r}: ")
    assert "write_clips" in text and "\n" not in text


def test_clips_without_permission_are_refused_in_one_line(tmp_path, monkeypatch):
    digits.write_clips(tmp_path, "train", 2)

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ValueError, match=r"^my\.field = .*no permission"):
        digits.load_clips(tmp_path, field="my.field")


# ---- bad arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split": "test"}, "split = 'test': must be one of train, scorer, judge, heldout"),
        ({"split": "train", "frames": 1}, "frames = 1"),
        ({"split": "train", "size": 9}, "size = 9"),
        ({"split": "train", "seed": -1}, "seed = -1"),
        ({"split": "train", "seed": 2**63}, "seed = "),
    ],
)
def test_bad_streams_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        DigitClips(**arguments)


@pytest.mark.parametrize("n", [-1, 2**31 - 1])
def test_clip_numbers_out_of_range(n):
    with pytest.raises(IndexError):
        DigitClips("train").clip(n)


@pytest.mark.parametrize(("digit", "direction"), [(10, 0), (-1, 0), (0, 9), (0, -1)])
def test_captions_out_of_range(digit, direction):
    with pytest.raises(ValueError, match=r"must be in 0\.\.9"):
        digits.caption(digit, direction)


def test_write_clips_wants_a_count(tmp_path):
    with pytest.raises(ValueError, match="count = 0"):
        digits.write_clips(tmp_path, "train", 0)


def test_needs_neither_jax_nor_grain_nor_torch():
    program = (
        "import sys; from ddrl_jax.data import digits; digits.DigitClips('train').batch([0]);"
        "print([m for m in ('jax', 'flax', 'grain', 'torch') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
