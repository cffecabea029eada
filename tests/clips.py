"""Small video files for tests."""

from fractions import Fraction

import av
import numpy as np


def write_video(
    path, frames, rate=24, size=(64, 48), codec="libx264", rotation=None, times=None, options=None, title=""
):
    """Encode frames: grey levels, or arrays (H,W,3). `times`: time stamps in ms instead of a steady rate."""
    width, height = size
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        if title:
            container.metadata["title"] = title
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.gop_size = 12
        stream.options = {"crf": "8", **(options or {})}
        if times is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        if rotation is not None:
            stream.set_display_rotation(rotation)
        for i, picture in enumerate(frames):
            if np.ndim(picture) == 0:
                picture = np.full((height, width, 3), picture)
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture, dtype=np.uint8), format="rgb24")
            if times is not None:
                frame.pts, frame.time_base = times[i], Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def numbered(count, size=(64, 48)):
    """Frames that say their number, up to 255, in two digits of base 16: a grey level left and one right."""
    pictures = np.empty((count, size[1], size[0], 3), np.uint8)
    for n in range(count):
        pictures[n, :, : size[0] // 2], pictures[n, :, size[0] // 2 :] = 16 * (n // 16) + 8, 16 * (n % 16) + 8
    return pictures


def numbers(video):
    """The numbers of frames of `numbered`, read off uint8 (T,H,W,3)."""
    _, height, width, _ = video.shape
    high, low = (video[:, height // 2, width * q // 4].mean(-1) // 16 for q in (1, 3))
    return (16 * high + low).astype(int).tolist()


def noise(count, size=(64, 48), seed=0):
    """Frames that no codec can make small: moving noise."""
    width, height = size
    picture = np.random.default_rng(seed).integers(0, 256, (height, width, 3))
    return [np.roll(picture, i, axis=1) for i in range(count)]


def damaged(path, at, length=2000, seed=1):
    """Overwrite bytes of a file, at a fraction of its length: several frames of `noise`."""
    content = bytearray(path.read_bytes())
    start = int(at * len(content))
    content[start : start + length] = np.random.default_rng(seed).bytes(length)
    path.write_bytes(content)
    return path
