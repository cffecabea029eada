"""Video and picture files to arrays and back, with PyAV and Pillow.

A clip is read at a given frame rate and size whatever the file has: frames are chosen by their time stamps, turned
upright, scaled to cover the wanted size and cropped about the centre. Colours follow the file's tags; a file
without them is taken for BT.601, which is what FFmpeg writes untagged.

Knows files only: not folders of them (`data.video_folder`), nor captions or models. Errors are ValueErrors of one line
that begin with the file's path.

Shape legend: T frames, H rows, W columns, always RGB (3).
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from PIL import Image, ImageOps

from ddrl_jax import files

PathLike = str | os.PathLike[str]

_BT709 = 1  # in FFmpeg's numbering of matrices, primaries and transfer curves alike


@dataclass(frozen=True)
class Probe:
    """What a video file says of itself, its first frame decoded.

    Attributes:
      width, height: pixels as shown, that is turned upright and with pixels that are not square stretched.
      fps: frames a second, on average; 0 where the file does not say.
      duration: seconds; None where the file does not say.
      rotation: by how many degrees, anti-clockwise, the stored frames are turned to be shown: 0, 90, 180 or 270.
    """

    width: int
    height: int
    fps: float
    duration: Fraction | None
    rotation: int

    def frames_at(self, fps: float) -> int | None:
        """How many frames `read_clip` should find at a frame rate; None where the file does not say."""
        return None if self.duration is None else _count(self.duration, _rate(fps))


def _rate(fps: float) -> Fraction:
    if not (math.isfinite(fps) and fps > 0):
        raise ValueError(f"fps = {fps}: must be above 0")
    return Fraction(fps).limit_denominator(100_000)  # exact for 30000/1001 and its like


def _count(duration: Fraction, rate: Fraction) -> int:
    """Frames that begin in a duration; one shown for under a twentieth of its time is an effect of rounded stamps."""
    return max(math.ceil(duration * rate - Fraction(1, 20)), 0)


def _open(path: PathLike) -> av.container.InputContainer:
    local = os.path.abspath(path)  # which is never taken for a URL
    try:
        return av.open(local)
    except UnicodeDecodeError:  # a title that is not UTF-8; PyAV 19 takes it and has no such argument
        return av.open(local, metadata_errors="replace")


@contextlib.contextmanager
def _opened(path: PathLike) -> Iterator[tuple[av.container.InputContainer, av.VideoStream]]:
    """The container and its first video stream. FFmpeg's errors become ValueErrors."""
    try:
        with _open(path) as container:
            if not container.streams.video:
                raise ValueError(f"{path}: has no video stream")
            stream = container.streams.video[0]
            if stream.codec_context is None:
                raise ValueError(f"{path}: is in a codec that this build of PyAV cannot decode")
            yield container, stream
    except (av.FFmpegError, OSError) as e:
        raise ValueError(f"{path}: cannot be read as a video: {e.strerror or e}") from e


def _timed(
    path: PathLike, container: av.container.InputContainer, stream: av.VideoStream
) -> Iterator[tuple[Fraction, Fraction, av.VideoFrame]]:
    """(start, end, frame) in order, in seconds since the first frame's start."""
    origin: Fraction | None = None  # not every file begins at 0
    time = Fraction(0)
    for frame in container.decode(stream):
        if frame.is_corrupt:  # FFmpeg repairs what it can and goes on
            raise ValueError(f"{path}: is damaged after {float(time):.2f} s")
        if frame.pts is None or not frame.time_base:
            raise ValueError(f"{path}: has frames without a time stamp")
        stamp = frame.pts * Fraction(frame.time_base)
        if origin is None:
            origin = stamp
        time = stamp - origin
        shown = frame.duration * Fraction(frame.time_base) if frame.duration else Fraction(0)
        if not shown and (rate := stream.average_rate or stream.guessed_rate):
            shown = 1 / Fraction(rate)
        yield time, time + shown, frame


def _turn(frame: av.VideoFrame) -> int:
    """Anti-clockwise quarter turns that bring a stored frame upright: 0 to 3."""
    return round(frame.rotation / 90) % 4


def _aspect(stream: av.VideoStream) -> Fraction:
    """Width of a pixel over its height."""
    ratio = stream.sample_aspect_ratio
    return Fraction(ratio) if ratio else Fraction(1)


def _covered(picture: Image.Image, height: int, width: int, aspect: Fraction = Fraction(1)) -> np.ndarray:
    """An RGB picture scaled to cover height x width, keeping its shape, and cropped about its centre: (H,W,3)."""
    scale = max(Fraction(width) / (picture.width * aspect), Fraction(height, picture.height))
    # The part that will be seen, in the picture's own pixels: cutting first saves scaling what is cropped.
    seen_w, seen_h = float(width / (scale * aspect)), float(height / scale)
    left, top = (picture.width - seen_w) / 2, (picture.height - seen_h) / 2
    box = (max(left, 0.0), max(top, 0.0), min(left + seen_w, picture.width), min(top + seen_h, picture.height))
    return np.asarray(picture.resize((width, height), Image.Resampling.BICUBIC, box=box))


def _upright(frame: av.VideoFrame, height: int, width: int, aspect: Fraction) -> np.ndarray:
    turn = _turn(frame)
    if turn % 2:
        height, width = width, height
    picture = Image.fromarray(frame.to_ndarray(format="rgb24"))
    return np.rot90(_covered(picture, height, width, aspect), turn)


def probe(path: PathLike) -> Probe:
    """Size, rate and length of a video file; decodes one frame.

    Raises:
      ValueError: not a video, or its first frame cannot be decoded.
    """
    with _opened(path) as (container, stream):
        frame = next((frame for _, _, frame in _timed(path, container, stream)), None)
        if frame is None:
            raise ValueError(f"{path}: has no frames")
        duration: Fraction | None = None
        if stream.duration is not None and stream.time_base:
            duration = stream.duration * Fraction(stream.time_base)
        elif container.duration is not None:
            duration = Fraction(container.duration, av.time_base)
        width, height = round(frame.width * _aspect(stream)), frame.height
        turn = _turn(frame)
        if turn % 2:
            width, height = height, width
        return Probe(width, height, float(stream.average_rate or 0), duration, 90 * turn)


def read_clip(path: PathLike, *, frames: int, fps: float, height: int, width: int, start: int = 0) -> np.ndarray:
    """A clip at a given rate and size.

    Frame k is the one nearest in time to (start + k) / fps seconds after the file's first frame; of two as near, the
    earlier one. A file of duration D has ceil(D fps) frames. It is decoded from its beginning, whatever the start.

    Args:
      path: a video file.
      frames: how many, at `fps`.
      fps: frames a second of the clip.
      height, width: pixels; the video is scaled (bicubic) to cover them and cropped about its centre.
      start: frames, at `fps`, to pass over.

    Returns:
      uint8 (frames,height,width,3), RGB.

    Raises:
      ValueError: not a video, too short (the message says how many frames there are), or damaged where it is read as
        far as the codec notices: a few wrong bytes can decode to a wrong picture.
    """
    if frames < 1 or height < 1 or width < 1 or start < 0:
        raise ValueError(
            f"frames = {frames}, height = {height}, width = {width}, start = {start}: "
            "must be at least 1, and start at least 0"
        )
    rate = _rate(fps)
    out_THWC = np.empty((frames, height, width, 3), np.uint8)
    done = 0

    def take(frame: av.VideoFrame, count: int) -> None:
        nonlocal done
        count = min(count, frames - done)
        if count > 0:
            out_THWC[done : done + count] = _upright(frame, height, width, aspect)
            done += count

    with _opened(path) as (container, stream):
        aspect = _aspect(stream)
        held: av.VideoFrame | None = None
        held_time = end = Fraction(0)
        for time, frame_end, frame in _timed(path, container, stream):
            if held is not None:
                # Up to the middle between the two, the earlier frame is the nearer one.
                take(held, math.floor((held_time + time) / 2 * rate) - start - done + 1)
                if done == frames:
                    return out_THWC
            held, held_time, end = frame, time, frame_end
        available = _count(end, rate)
        if held is not None:
            take(held, available - start - done)
    if done < frames:
        after = f" after the first {start}" if start else ""
        raise ValueError(
            f"{path}: has {max(available - start, 0)} frames at {fps:g} a second{after}, {frames} are needed"
        )
    return out_THWC


def write_mp4(path: PathLike, video: np.ndarray, fps: float) -> Path:
    """Write a clip as MP4 (H.264 where this build of PyAV has an encoder, else MPEG-4) and return the file.

    The file appears only when it is complete. Both codecs need even sizes: an odd last row or column is doubled.

    Args:
      path: the file; its folder is made.
      video: uint8 (T,H,W,3), RGB.
      fps: frames a second.

    Raises:
      ValueError: another shape or type, no frames, or fps not above 0.
    """
    video_THWC = np.asarray(video)
    if video_THWC.dtype != np.uint8 or video_THWC.ndim != 4 or video_THWC.shape[-1] != 3 or 0 in video_THWC.shape:
        raise ValueError(f"{path}: video is {video_THWC.dtype} {video_THWC.shape}, must be uint8 (T,H,W,3)")
    _, height, width, _ = video_THWC.shape
    even_THWC = np.pad(video_THWC, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    rate = _rate(fps)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with (
        files.whole(target) as partial,
        av.open(str(partial), "w", format="mp4", options={"movflags": "+faststart"}) as container,
    ):
        h264 = "libx264" in av.codecs_available
        stream = container.add_stream("libx264" if h264 else "mpeg4", rate=rate)
        stream.height, stream.width = even_THWC.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.options = {"crf": "17"} if h264 else {"qscale": "2"}
        context = stream.codec_context
        context.colorspace = context.color_primaries = context.color_trc = _BT709
        for picture_HWC in even_THWC:
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture_HWC), format="rgb24")
            container.mux(stream.encode(frame.reformat(format="yuv420p", dst_colorspace="ITU709")))
        container.mux(stream.encode())
    return target


def read_image(path: PathLike, height: int, width: int) -> np.ndarray:
    """A picture, turned upright, scaled to cover height x width and cropped about its centre: uint8 (H,W,3).

    Raises:
      ValueError: no picture that Pillow can read.
    """
    try:
        with Image.open(path) as picture:
            return _covered(ImageOps.exif_transpose(picture).convert("RGB"), height, width)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as e:
        reason = e.strerror if isinstance(e, OSError) and e.strerror else str(e).splitlines()[0] if str(e) else e
        raise ValueError(f"{path}: cannot be read as a picture: {reason}") from e
