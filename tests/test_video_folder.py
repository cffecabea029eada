"""A folder of captioned videos: what is used, what is not and why, and who reads it."""

import itertools
import shutil

import numpy as np
import pytest

from ddrl_jax.data.video_folder import READ_AHEAD, VideoFolder, clip_dataset

from .clips import damaged, noise, numbered, numbers, write_video


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Six clips that can be used and eight things that cannot."""
    root = tmp_path_factory.mktemp("folder")
    videos, metas = root / "videos", root / "metas"
    metas.mkdir()

    def clip(name, pictures, rate=24, caption="a caption", **kwargs):
        write_video(videos / name, pictures, rate, **kwargs)
        if caption is not None:
            (metas / name).with_suffix(".txt").write_text(caption, encoding="utf-8")

    clip("a_wide.mp4", numbered(40), caption="  a wide one\n")
    clip("b_upright.mp4", numbered(40, (48, 64)), size=(48, 64), caption="upright")
    clip("c_turned.mov", numbered(40), rotation=90, caption="turned")
    clip("d_square.mkv", numbered(30, (48, 48)), 12, size=(48, 48), caption="\ufeffsquare, à côté")
    clip("e_thirty.MP4", numbered(60), 30, caption="thirty")
    clip("f_plain.mp4", numbered(40), caption="plain")
    clip("short.mp4", numbered(20))
    clip("silent.mp4", numbered(40), caption=None)
    clip("empty.mp4", numbered(40), caption=" \n")
    (videos / "broken.mp4").write_text("no video" * 1000)
    (metas / "broken.txt").write_text("a caption")
    (metas / "alone.txt").write_text("a caption")
    (videos / "notes.doc").touch()
    clip("f_plain.mov", numbered(40), caption=None)
    clip("latin.mp4", numbered(40), caption=None)
    (metas / "latin.txt").write_bytes("é".encode("latin-1"))
    (videos / ".DS_Store").touch()
    return root


def opened(root):
    return VideoFolder(root, frames=16, fps=12, size=32, long_size=64)


@pytest.fixture(scope="module")
def folder(made):
    return opened(made)


def test_what_can_be_used_is_in_the_order_of_names(folder):
    assert folder.names == ["a_wide", "b_upright", "c_turned", "d_square", "e_thirty", "f_plain"]
    assert folder.captions == ["a wide one", "upright", "turned", "square, à côté", "thirty", "plain"]
    assert len(folder) == 6


def test_all_else_is_listed_with_a_reason(folder):
    reasons = dict(folder.skipped)
    assert reasons.keys() == {
        "short", "silent", "empty", "broken", "alone", "notes.doc", "f_plain.mp4", "latin"
    }  # fmt: skip
    assert reasons["short"] == "too short: has 10 frames at 12 a second, 16 are needed"
    assert reasons["silent"] == "no caption: metas/silent.txt is missing"
    assert reasons["empty"] == "no caption: metas/empty.txt is empty"
    assert reasons["broken"].startswith("cannot be read as a video")
    assert reasons["alone"] == "caption without a video"
    assert reasons["notes.doc"].startswith("videos/ holds .mp4")
    assert reasons["f_plain.mp4"] == "has the name of f_plain.mov"
    assert reasons["latin"] == "metas/latin.txt is not UTF-8"
    assert folder.skipped == sorted(folder.skipped) and len(folder.skipped) == 8


def test_orientation_is_the_nearer_one(folder):
    shapes = {name: folder.shape(i) for i, name in enumerate(folder.names)}
    wide, upright = (32, 64), (64, 32)
    assert shapes == {
        "a_wide": wide, "b_upright": upright, "c_turned": upright, "d_square": wide, "e_thirty": wide, "f_plain": wide
    }  # fmt: skip
    for i in range(len(folder)):
        assert folder.read(i)["video"].shape == (16, *folder.shape(i), 3)


def test_a_clip_is_the_beginning_of_its_file(folder):
    clip = folder.read(0)
    assert (clip["name"], clip["caption"]) == ("a_wide", "a wide one")
    assert clip["video"].dtype == np.uint8 and numbers(clip["video"]) == list(range(0, 32, 2))
    # 30 to 12 frames a second: frame k is nearest to 2.5 k, of two the earlier.
    assert numbers(folder.read(4)["video"]) == [0, 2, 5, 7, 10, 12, 15, 17, 20, 22, 25, 27, 30, 32, 35, 37]


def test_scanning_twice_gives_the_same(made, folder):
    again = opened(made)
    assert (again.names, again.captions, again.skipped) == (folder.names, folder.captions, folder.skipped)
    np.testing.assert_array_equal(again.read(1)["video"], folder.read(1)["video"])


def test_damage_that_a_scan_cannot_see_becomes_a_reason(made, tmp_path):
    shutil.copytree(made, tmp_path / "data")
    write_video(tmp_path / "data/videos/bad.mp4", noise(40))
    damaged(tmp_path / "data/videos/bad.mp4", 0.4)
    (tmp_path / "data/metas/bad.txt").write_text("a caption")
    folder = opened(tmp_path / "data")
    i = folder.names.index("bad")
    with pytest.raises(ValueError, match=r"bad\.mp4: ") as caught:
        folder.read(i)
    assert "\n" not in str(caught.value)
    seen = {clip["name"]: clip for clip in clip_dataset(folder).to_iter_dataset(READ_AHEAD)}
    assert seen.keys() == set(folder.names)
    assert seen["bad"].keys() == {"name", "error"} and "bad.mp4" not in seen["bad"]["error"]
    assert all("video" in clip for name, clip in seen.items() if name != "bad")


def test_a_file_that_goes_away_becomes_a_reason(made, tmp_path):
    shutil.copytree(made, tmp_path / "data")
    folder = opened(tmp_path / "data")
    (tmp_path / "data/videos/a_wide.mp4").unlink()
    assert "No such file" in clip_dataset(folder)[0]["error"]


def names_of(dataset):
    return [clip["name"] for clip in dataset.to_iter_dataset(READ_AHEAD)]


@pytest.mark.parametrize("processes", [1, 2, 4, 8])
def test_every_clip_is_read_by_one_process(folder, processes):
    parts = [names_of(clip_dataset(folder, p, processes)) for p in range(processes)]
    # Process p reads clips p, p + P, ...: taken in turns they are all clips in order.
    turns = [name for turn in itertools.zip_longest(*parts) for name in turn if name is not None]
    assert turns == folder.names


def test_what_is_done_is_left_out_and_changes_nothing_else(folder):
    done = {"a_wide", "b_upright", "e_thirty", "of another folder"}
    assert names_of(clip_dataset(folder, 0, 2, done)) == ["c_turned"]
    assert names_of(clip_dataset(folder, 1, 2, done)) == ["d_square", "f_plain"]
    assert len(clip_dataset(folder, 0, 1, folder.names)) == 0


def test_threads_change_nothing(folder):
    ahead = list(clip_dataset(folder).to_iter_dataset(READ_AHEAD))
    for i, clip in enumerate(ahead):
        np.testing.assert_array_equal(clip["video"], folder.read(i)["video"])


def test_a_folder_of_another_form_names_data_path(tmp_path):
    with pytest.raises(ValueError, match=r"data\.path='.*': has no folder videos/; videos/ and metas/ are needed"):
        opened(tmp_path)
    (tmp_path / "videos").mkdir()
    with pytest.raises(ValueError, match=r"has no folder metas/"):
        opened(tmp_path)
    (tmp_path / "metas").mkdir()
    with pytest.raises(ValueError, match=r"data\.path=.* no usable clip of 16 frames at 12 a second, 0 skipped$"):
        opened(tmp_path)
    write_video(tmp_path / "videos/a.mp4", numbered(40))
    with pytest.raises(ValueError, match=r"1 skipped; the first is a: no caption: metas/a\.txt is missing$"):
        opened(tmp_path)


def test_bad_arguments_are_refused(made, folder):
    with pytest.raises(ValueError, match="size = 64, long_size = 32"):
        VideoFolder(made, frames=16, fps=12, size=64, long_size=32)
    with pytest.raises(ValueError, match=r"process_index = 2: must be in 0 \.\. 1"):
        clip_dataset(folder, 2, 2)
