"""Video and picture files: the right frames, the right way up, and one line where a file is not as it should be."""

import shutil
import subprocess
import sys
from fractions import Fraction

import av
import numpy as np
import pytest
from PIL import Image

from ddrl_jax.data.video import probe, read_clip, read_image, write_mp4

from .clips import damaged, noise, numbered, numbers, write_video


# 93 frames at 16 fps by hand: frame k is nearest to k * rate / 16; ties (k * rate / 16 = n + .5) go to the earlier.
@pytest.mark.parametrize(
    ("rate", "count", "expected"),
    [
        (24, 139, [0, 1, 3, 4, 6, 7, 9, 10, 12]),  # 0 1.5 3 4.5 6 ...
        (30, 174, [0, 2, 4, 6, 7, 9, 11, 13, 15]),  # 0 1.875 3.75 5.625 7.5 9.375 ...
        (16, 93, [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        (8, 47, [0, 0, 1, 1, 2, 2, 3, 3, 4]),  # 0 .5 1 1.5 ...
        (Fraction(30000, 1001), 174, [0, 2, 4, 6, 7, 9, 11, 13, 15]),
    ],
)
def test_93_frames_at_16_a_second_are_those_nearest_in_time(tmp_path, rate, count, expected):
    file = write_video(tmp_path / "a.mp4", numbered(count), rate)
    clip = read_clip(file, frames=93, fps=16, height=48, width=64)
    assert clip.shape == (93, 48, 64, 3) and clip.dtype == np.uint8
    seen = numbers(clip)
    wanted = [int(np.ceil(Fraction(k) * Fraction(rate) / 16 - Fraction(1, 2))) for k in range(93)]
    assert wanted[:9] == expected
    assert seen == [min(n, count - 1) for n in wanted]


def test_time_stamps_decide_where_the_rate_varies(tmp_path):
    # In ms; 10 frames a second ask for 0, 100, ..., 500.
    file = write_video(tmp_path / "a.mp4", numbered(5), times=[0, 40, 80, 290, 500])
    assert numbers(read_clip(file, frames=6, fps=10, height=48, width=64)) == [0, 2, 3, 3, 4, 4]


def test_a_frame_shown_for_no_time_is_not_there(tmp_path):
    file = write_video(tmp_path / "a.mkv", numbered(4), codec="ffv1", times=[0, 100, 100, 200])
    assert numbers(read_clip(file, frames=3, fps=10, height=48, width=64)) == [0, 1, 3]


def test_time_stamps_that_begin_late_make_no_difference(tmp_path):
    file = write_video(tmp_path / "a.mkv", numbered(8), times=[1000 + 100 * i for i in range(8)])
    assert numbers(read_clip(file, frames=4, fps=5, height=48, width=64)) == [0, 2, 4, 6]


def test_a_clip_may_begin_later(tmp_path):
    file = write_video(tmp_path / "a.mp4", numbered(48), 24)
    whole = read_clip(file, frames=32, fps=16, height=48, width=64)
    np.testing.assert_array_equal(read_clip(file, frames=22, fps=16, height=48, width=64, start=10), whole[10:])


@pytest.mark.parametrize("suffix", [".mp4", ".mov", ".mkv"])
def test_too_short_says_how_many_frames_there_are(tmp_path, suffix):
    # 5.75 s are 92 frames at 16 a second, 5.79 s are 93 (the last one shown for a part of its time).
    short = write_video(tmp_path / f"short{suffix}", numbered(138), 24)
    with pytest.raises(ValueError, match=r"short\.m..: has 92 frames at 16 a second, 93 are needed$"):
        read_clip(short, frames=93, fps=16, height=48, width=64)
    with pytest.raises(ValueError, match="has 82 frames at 16 a second after the first 10, 83 are needed"):
        read_clip(short, frames=83, fps=16, height=48, width=64, start=10)
    assert probe(short).frames_at(16) == 92
    enough = write_video(tmp_path / f"enough{suffix}", numbered(139), 24)
    assert probe(enough).frames_at(16) == 93
    # At its own rate too, where stamps are rounded to milliseconds: 5.792 s for 5.79167.
    for file, count in ((short, 138), (enough, 139)):
        assert probe(file).frames_at(24) == count
        with pytest.raises(ValueError, match=f"has {count} frames at 24 a second, {count + 1} are needed"):
            read_clip(file, frames=count + 1, fps=24, height=48, width=64)
        assert numbers(read_clip(file, frames=count, fps=24, height=48, width=64)) == list(range(count))


def quarters():
    """64x48: red and green above, blue and white below."""
    picture = np.zeros((48, 64, 3), np.uint8)
    picture[:24, :32], picture[:24, 32:] = (255, 0, 0), (0, 255, 0)
    picture[24:, :32], picture[24:, 32:] = (0, 0, 255), (255, 255, 255)
    return picture


def corners(picture):
    """Which of red, green, blue, white is in each corner, row by row."""
    h, w = picture.shape[0] // 4, picture.shape[1] // 4
    names = {(1, 0, 0): "r", (0, 1, 0): "g", (0, 0, 1): "b", (1, 1, 1): "w"}
    return "".join(names[tuple((picture[i, j] > 128).astype(int).tolist())] for i in (h, -h) for j in (w, -w))


# Turned anti-clockwise by a quarter, the right edge (green, white) comes up.
@pytest.mark.parametrize(("degrees", "expected"), [(0, "rgbw"), (90, "gwrb"), (180, "wbgr"), (-90, "brwg")])
def test_rotation_is_applied(tmp_path, degrees, expected):
    file = write_video(tmp_path / "a.mp4", [quarters()] * 4, rotation=degrees)
    seen = probe(file)
    upright = (64, 48) if degrees % 180 == 0 else (48, 64)
    assert (seen.width, seen.height, seen.rotation) == (*upright, degrees % 360)
    clip = read_clip(file, frames=2, fps=12, height=upright[1], width=upright[0])
    assert corners(clip[0]) == corners(clip[1]) == expected
    assert corners(np.rot90(quarters(), degrees // 90)) == expected


def test_a_phone_held_upright(tmp_path):
    """The matrix that phones write says clockwise: x' = -y, y' = x."""
    file = write_video(tmp_path / "a.mp4", [quarters()] * 4, rotation=90)
    content = bytearray(file.read_bytes())
    at = content.index(b"tkhd") + 4 + 4 + 20 + 16
    content[at : at + 36] = np.array([0, 1 << 16, 0, -(1 << 16), 0, 0, 48 << 16, 0, 1 << 30], ">i4").tobytes()
    file.write_bytes(content)
    assert corners(read_clip(file, frames=1, fps=12, height=64, width=48)[0]) == "brwg"
    assert probe(file).rotation == 270


def test_scaling_covers_and_crops_about_the_centre(tmp_path):
    # 96x48 with bands of 16 columns; a square keeps the 48 in the middle.
    picture = np.zeros((48, 96, 3), np.uint8)
    picture[:, 24:48], picture[:, 48:72] = 120, 240
    file = write_video(tmp_path / "a.mp4", [picture] * 3, size=(96, 48))
    clip = read_clip(file, frames=1, fps=24, height=24, width=24)[0].astype(int)
    assert np.abs(clip[:, 1:11] - 120).max() <= 6 and np.abs(clip[:, 13:23] - 240).max() <= 6
    tall = read_clip(file, frames=1, fps=24, height=96, width=48)[0].astype(int)  # the 24 in the middle
    assert np.abs(tall[:, 2:22] - 120).max() <= 6 and np.abs(tall[:, 26:46] - 240).max() <= 6


def test_pixels_that_are_not_square_are_stretched(tmp_path):
    picture = np.zeros((48, 64, 3), np.uint8)
    picture[:12] = 255  # a quarter of the height, which a square pixel's crop would lose
    file = write_video(tmp_path / "a.mkv", [picture] * 3)
    with av.open(str(file)) as source, av.open(str(tmp_path / "wide.mkv"), "w") as target:
        stream = target.add_stream("libx264", rate=24)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        stream.codec_context.sample_aspect_ratio = Fraction(2, 1)
        for frame in source.decode(video=0):
            frame.pts = None
            target.mux(stream.encode(frame))
        target.mux(stream.encode())
    assert (probe(tmp_path / "wide.mkv").width, probe(tmp_path / "wide.mkv").height) == (128, 48)
    clip = read_clip(tmp_path / "wide.mkv", frames=1, fps=24, height=48, width=128)[0]
    assert clip[:11].min() > 200 and clip[14:].max() < 50


def test_a_title_in_another_encoding_does_no_harm(tmp_path):
    file = write_video(tmp_path / "a.mp4", numbered(4), title="zzzz")
    content = file.read_bytes()
    assert content.count(b"zzzz") == 1
    file.write_bytes(content.replace(b"zzzz", b"\xe9\xff\xfe!"))
    assert probe(file).width == 64
    assert numbers(read_clip(file, frames=2, fps=24, height=48, width=64)) == [0, 1]


def test_decoding_is_deterministic(tmp_path):
    file = write_video(tmp_path / "a.mp4", noise(30), 30)
    first, second = (read_clip(file, frames=16, fps=16, height=40, width=40) for _ in range(2))
    np.testing.assert_array_equal(first, second)


def refused(path, match, **kwargs):
    for call in (lambda: probe(path), lambda: read_clip(path, frames=4, fps=16, height=48, width=64)):
        with pytest.raises(ValueError, match=match) as caught:
            call()
        assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


def test_unreadable_files_are_one_line(tmp_path):
    refused(tmp_path / "none.mp4", "No such file")
    (tmp_path / "text.mp4").write_text("not a video " * 1000)
    refused(tmp_path / "text.mp4", "cannot be read as a video")
    (tmp_path / "empty.mp4").touch()
    refused(tmp_path / "empty.mp4", "cannot be read as a video")
    (tmp_path / "folder.mp4").mkdir()
    refused(tmp_path / "folder.mp4", "directory")
    refused(truncated(write_video(tmp_path / "cut.mp4", noise(24))), "cannot be read as a video")
    with av.open(str(tmp_path / "sound.mp4"), "w") as container:
        stream = container.add_stream("aac", rate=8000)
        sound = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        sound.rate = 8000
        container.mux(stream.encode(sound))
        container.mux(stream.encode())
    refused(tmp_path / "sound.mp4", "has no video stream")


def truncated(path, keep=0.6):
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content))])
    return path


def test_a_name_is_never_a_url(tmp_path, monkeypatch):
    write_video(tmp_path / "data:a.mp4", numbered(4))
    monkeypatch.chdir(tmp_path)
    assert numbers(read_clip("data:a.mp4", frames=2, fps=24, height=48, width=64)) == [0, 1]


@pytest.mark.parametrize("at", [0.3, 0.5, 0.8])
def test_damage_in_the_middle_is_found_where_it_is_read(tmp_path, at):
    file = damaged(write_video(tmp_path / "a.mp4", noise(96), 24), at)
    probe(file)  # the header and the first frame are whole
    with pytest.raises(ValueError, match=r"a\.mp4: (cannot be read as a video|is damaged)") as caught:
        read_clip(file, frames=64, fps=16, height=48, width=64)
    assert "\n" not in str(caught.value)
    # Ahead of the damage all is well; the group of pictures it lies in is 12 frames long.
    before = int(96 * at) // 12 * 12 - 12
    assert len(read_clip(file, frames=before, fps=24, height=48, width=64)) == before


def test_what_the_decoder_repairs_is_damage_too(tmp_path):
    """A few bytes within frames: the codec has no checksum, but most of the time it notices and papers over them."""
    whole, found = write_video(tmp_path / "a.mp4", noise(96), 24), 0
    for i in range(10):
        file = tmp_path / f"{i}.mp4"
        shutil.copy(whole, file)
        try:
            read_clip(damaged(file, 0.1 + 0.08 * i, length=60, seed=i), frames=96, fps=24, height=48, width=64)
        except ValueError:
            found += 1
    assert found >= 4


def test_a_file_cut_off_in_the_middle(tmp_path):
    # With the index in front the file opens, and its header still promises 64 frames.
    whole = write_mp4(tmp_path / "a.mp4", np.stack(noise(96)).astype(np.uint8), 24)
    file = truncated(whole)
    assert probe(file).frames_at(16) == 64
    with pytest.raises(ValueError, match=r"a\.mp4: (cannot be read|is damaged|has \d+ frames)"):
        read_clip(file, frames=64, fps=16, height=48, width=64)


@pytest.mark.parametrize("size", [(64, 48), (48, 64), (63, 47), (12, 12)])
def test_what_is_written_is_read_back(tmp_path, size):
    width, height = size
    x, y = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    video = np.stack([np.stack([60 * x, 60 * y, np.full_like(x, 10 * t)], -1) for t in range(9)]).astype(np.uint8)
    file = write_mp4(tmp_path / "new" / "a.mp4", video, 16)
    assert [f.name for f in file.parent.iterdir()] == ["a.mp4"]
    even = (height + height % 2, width + width % 2)
    seen = probe(file)
    assert (seen.height, seen.width, seen.fps, seen.frames_at(16)) == (*even, 16.0, 9)
    assert abs(seen.duration - Fraction(9, 16)) < Fraction(1, 1000)
    clip = read_clip(file, frames=9, fps=16, height=even[0], width=even[1])[:, :height, :width]
    # Half as many colour samples in each direction: a gradient keeps its colours up to a few levels.
    assert np.abs(clip.astype(int) - video).mean() < 3
    assert np.abs(clip[:, 2:-2, 2:-2].astype(int) - video[:, 2:-2, 2:-2]).max() <= 16


def test_colours_follow_the_tags(tmp_path):
    colour = np.full((3, 48, 64, 3), (200, 40, 90), np.uint8)
    tagged = write_mp4(tmp_path / "709.mp4", colour, 24)
    untagged = write_video(tmp_path / "601.mp4", list(colour))
    with av.open(str(tagged)) as a, av.open(str(untagged)) as b:
        assert (a.streams.video[0].codec_context.colorspace, b.streams.video[0].codec_context.colorspace) == (1, 2)
    for file in (tagged, untagged):
        clip = read_clip(file, frames=1, fps=24, height=48, width=64)
        # Read with the other matrix, this colour would be off by 18 levels.
        np.testing.assert_allclose(clip[0, 24, 32], (200, 40, 90), atol=3)


def test_without_h264_there_is_mpeg4(tmp_path, monkeypatch):
    monkeypatch.setattr(av, "codecs_available", {"mpeg4"})
    file = write_mp4(tmp_path / "a.mp4", np.full((5, 48, 64, 3), 90, np.uint8), 16)
    with av.open(str(file)) as container:
        assert container.streams.video[0].codec_context.name == "mpeg4"
    np.testing.assert_allclose(read_clip(file, frames=5, fps=16, height=48, width=64), 90, atol=3)


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    file = write_mp4(tmp_path / "a.mp4", np.full((5, 48, 64, 3), 90, np.uint8), 16)
    before = file.read_bytes()

    def fail(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(av.VideoFrame, "from_ndarray", fail)
    with pytest.raises(KeyboardInterrupt):
        write_mp4(file, np.zeros((5, 48, 64, 3), np.uint8), 16)
    assert file.read_bytes() == before and [f.name for f in tmp_path.iterdir()] == ["a.mp4"]


@pytest.mark.parametrize(
    "video", [np.zeros((0, 8, 8, 3), np.uint8), np.zeros((4, 8, 8, 1), np.uint8), np.zeros((4, 8, 8, 3), np.float32)]
)
def test_only_rgb_of_8_bits_is_written(tmp_path, video):
    with pytest.raises(ValueError, match=r"a\.mp4: video is .* must be uint8 \(T,H,W,3\)"):
        write_mp4(tmp_path / "a.mp4", video, 16)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("fps", [0, -1, float("nan"), float("inf")])
def test_a_rate_must_be_above_0(tmp_path, fps):
    with pytest.raises(ValueError, match="must be above 0"):
        write_mp4(tmp_path / "a.mp4", np.zeros((4, 8, 8, 3), np.uint8), fps)


@pytest.mark.parametrize("name", ["frames", "height", "width", "start"])
def test_bad_arguments_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match=f"{name} = -1"):
        read_clip(tmp_path / "a.mp4", **{"frames": 1, "fps": 16, "height": 8, "width": 8, "start": 0, name: -1})


def test_pictures_are_covered_cropped_and_turned(tmp_path):
    Image.fromarray(quarters()).save(tmp_path / "a.png")
    np.testing.assert_array_equal(read_image(tmp_path / "a.png", 48, 64), quarters())
    assert corners(read_image(tmp_path / "a.png", 30, 30)) == "rgbw"
    exif = Image.Exif()
    exif[0x0112] = 6  # shown turned clockwise by a quarter
    Image.fromarray(quarters()).save(tmp_path / "b.jpg", exif=exif, quality=95)
    assert corners(read_image(tmp_path / "b.jpg", 64, 48)) == "brwg"
    Image.fromarray(quarters()).convert("L").save(tmp_path / "c.png")
    assert read_image(tmp_path / "c.png", 48, 64).shape == (48, 64, 3)
    for name, content in (("d.png", b"no"), ("e.png", (tmp_path / "a.png").read_bytes()[:60])):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=rf"{name}: cannot be read as a picture: ") as caught:
            read_image(tmp_path / name, 8, 8)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"f\.png: cannot be read as a picture: No such file"):
        read_image(tmp_path / "f.png", 8, 8)


def test_needs_no_jax():
    code = "import sys; sys.modules['jax'] = None\nimport ddrl_jax.data.video, ddrl_jax.data.prompts"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
