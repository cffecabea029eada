"""Clips to files: GIF, MP4, contact sheet, and the frame strips the page animates.

Clips are uint8 (..., T, H, W, C), C 1 (grayscale) or 3 (RGB). Small ones are enlarged by a whole
factor with nearest neighbour, so that a pixel the model made stays a pixel; large ones are reduced.
"""

from __future__ import annotations

import fractions
import io
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import av
import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

# In order of preference; the first one this PyAV build can encode with is used.
_CODECS = (("libx264", {"crf": "16", "preset": "medium"}), ("mpeg4", {"qscale": "2"}))


def upscale(video: np.ndarray, size: int) -> np.ndarray:
    """Enlarge (..., H, W, C) by the largest whole factor that keeps the longer side <= `size`.

    Never shrinks: a clip already larger comes back as it is.
    """
    factor = max(1, size // max(video.shape[-3:-1]))
    return video.repeat(factor, axis=-3).repeat(factor, axis=-2)


def fit(video: np.ndarray, size: int) -> np.ndarray:
    """`upscale`, and a smooth reduction of (..., H, W, C) clips whose longer side is over `size`."""
    h, w, c = video.shape[-3:]
    if max(h, w) <= size:
        return upscale(video, size)
    scale = size / max(h, w)
    shape = (max(1, round(w * scale)), max(1, round(h * scale)))
    flat = video.reshape(-1, h, w, c)
    small = [np.asarray(to_image(f).resize(shape, Image.Resampling.LANCZOS)) for f in flat]
    return np.stack(small).reshape(*video.shape[:-3], shape[1], shape[0], c)


def to_image(frame: np.ndarray) -> Image.Image:
    """A uint8 (H, W, 1) or (H, W, 3) frame as an "L" or "RGB" image."""
    return Image.fromarray(frame[..., 0] if frame.shape[-1] == 1 else frame)


def mosaic(video: np.ndarray, columns: int, *, gap: int = 4, ground: int = 128) -> np.ndarray:
    """Lay N clips (N, T, H, W, C) out on a grid, row by row: uint8 (T, H', W', C)."""
    n, t, h, w, c = video.shape
    columns = min(columns, n)
    rows = -(-n // columns)
    size = (t, rows * (h + gap) + gap, columns * (w + gap) + gap, c)
    sheet = np.full(size, ground, np.uint8)
    for i, clip in enumerate(video):
        y, x = (gap + (i // columns) * (h + gap), gap + (i % columns) * (w + gap))
        sheet[:, y : y + h, x : x + w] = clip
    return sheet


def write_gif(path: str | Path, video: np.ndarray, fps: float) -> None:
    """Write (T, H, W, C) as an endless GIF.

    Grayscale is kept exactly; RGB is reduced to 256 colours a frame. Players round a frame's time
    to 1/100 s. Pillow merges equal neighbouring frames and adds up their time.
    """
    frames = [to_image(f) for f in video]
    if video.shape[-1] == 3:
        frames = [f.quantize(256, dither=Image.Dither.FLOYDSTEINBERG) for f in frames]
    buffer = io.BytesIO()
    frames[0].save(
        buffer,
        "GIF",
        save_all=True,
        append_images=frames[1:],
        duration=max(20, round(100 / fps) * 10),
        loop=0,
        optimize=False,
    )
    write_bytes(path, buffer.getvalue())


def write_mp4(path: str | Path, video: np.ndarray, fps: float, *, loops: int = 1) -> str:
    """Write (T, H, W, C) as MP4 (yuv420p), `loops` times over; returns the encoder's name.

    yuv420p halves the colour planes, so an odd height or width gets its last row or column twice.

    Raises:
      RuntimeError: this PyAV build has none of the encoders.
    """
    t, h, w, _ = video.shape
    rgb = np.broadcast_to(video, (t, h, w, 3))
    rgb = np.pad(rgb, ((0, 0), (0, h % 2), (0, w % 2), (0, 0)), mode="edge")
    rate = fractions.Fraction(fps).limit_denominator(1000)
    codec, options = _codec()
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # A file and not a buffer: "faststart" reads back what was written, so that playing can begin
    # before the last byte has come.
    temporary = path.with_name(f".{path.name}.tmp")
    with av.open(str(temporary), "w", format="mp4", options={"movflags": "+faststart"}) as container:
        stream = cast(av.VideoStream, container.add_stream(codec, rate=rate, options=options))
        stream.height, stream.width, stream.pix_fmt = rgb.shape[1], rgb.shape[2], "yuv420p"
        for _ in range(loops):
            for frame in rgb:
                picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
                container.mux(stream.encode(picture))
        container.mux(stream.encode())
    temporary.replace(path)
    return codec


def contact_sheet(
    captions: Sequence[str],
    before: np.ndarray,
    after: np.ndarray | None,
    *,
    titles: tuple[str, str] = ("before", "after"),
    frame_size: int = 72,
    max_frames: int = 8,
) -> Image.Image:
    """Rows are prompts, columns frames: before | after, captions on the left.

    Args:
      captions: N texts.
      before, after: uint8 (N, T, H, W, C); `after` None leaves its half out.
      titles: the two column heads.
      frame_size: longer side of a frame in pixels.
      max_frames: longer clips show this many evenly spaced frames, the ends included.
    """
    halves = [before] if after is None else [before, after]
    halves = [fit(half[:, _pick(half.shape[1], max_frames)], frame_size) for half in halves]
    ink, faint, paper = (24, 26, 31), (110, 116, 128), (255, 255, 255)
    text, head = _font(15), _font(15, bold=True)
    margin, gap, middle, head_height, label = 24, 4, 28, 44, 216
    heights = [half.shape[2] for half in halves]
    row = max(*heights, 44) + 12
    widths = [half.shape[1] * (half.shape[3] + gap) - gap for half in halves]
    width = 2 * margin + label + sum(widths) + middle * (len(halves) - 1)
    height = margin + head_height + len(captions) * row + margin - 12
    sheet = Image.new("RGB", (width, height), paper)
    draw = ImageDraw.Draw(sheet)
    x = margin + label
    for half, title, half_width in zip(halves, titles, widths, strict=False):
        draw.text((x, margin), title, ink, head)
        draw.line((x, margin + 27, x + half_width, margin + 27), (205, 209, 217), 1)
        for i, clip in enumerate(half):
            y = margin + head_height + i * row
            for k, frame in enumerate(clip):
                sheet.paste(to_image(frame), (x + k * (half.shape[3] + gap), y))
        x += half_width + middle
    for i, caption in enumerate(captions):
        y = margin + head_height + i * row
        lines = _wrap(draw, caption, text, label - 20, 3)
        draw.multiline_text((margin, y + (row - 12) / 2), lines, faint, text, "lm", spacing=5)
    return sheet


def strip(clip: np.ndarray, *, size: int, max_frames: int) -> tuple[str, bytes, int]:
    """A clip (T, H, W, C) as one row of frames for the page: (media type, bytes, frames).

    Clips up to `size` keep their pixels as PNG (the page enlarges them); others become JPEG.
    """
    clip = clip[_pick(len(clip), max_frames)]
    small = max(clip.shape[1:3]) <= size
    if not small:
        clip = fit(clip, size)
    t, h, w, c = clip.shape
    row = to_image(clip.transpose(1, 0, 2, 3).reshape(h, t * w, c))
    buffer = io.BytesIO()
    if small:
        row.save(buffer, "PNG", optimize=True)
        return "image/png", buffer.getvalue(), t
    row.save(buffer, "JPEG", quality=82)
    return "image/jpeg", buffer.getvalue(), t


def write_bytes(path: str | Path, data: bytes) -> None:
    """Replace `path` in one step, so that a viewer never sees half a file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(data)
    temporary.replace(path)


def _pick(count: int, most: int) -> np.ndarray:
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int))


def _codec() -> tuple[str, dict[str, str]]:
    for name, options in _CODECS:
        try:
            av.Codec(name, "w")
        except (ValueError, av.error.FFmpegError):
            continue
        return name, dict(options)
    raise RuntimeError(f"PyAV has no encoder of {[name for name, _ in _CODECS]}")


def _font(size: int, *, bold: bool = False) -> ImageFont.FreeTypeFont:
    # matplotlib ships DejaVu, which covers far more scripts than Pillow's own font.
    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    return ImageFont.truetype(str(Path(matplotlib.get_data_path(), "fonts", "ttf", name)), size)


def _wrap(draw: ImageDraw.ImageDraw, text: str, font, width: float, most: int) -> str:
    """Break `text` into at most `most` lines of `width` pixels; what does not fit ends in "..."."""
    # A caption of a thousand characters is legal; only the start of it can ever fit.
    words, lines, line = text[:400].split(), [], ""
    for word in words:
        while draw.textlength(word, font) > width and len(word) > 1:
            word = word[:-1]
        joined = f"{line} {word}".strip()
        if line and draw.textlength(joined, font) > width:
            lines.append(line)
            line = word
        else:
            line = joined
    lines.append(line)
    if len(lines) > most:
        lines = lines[:most]
        while lines[-1] and draw.textlength(lines[-1] + "...", font) > width:
            lines[-1] = lines[-1][:-1]
        lines[-1] = lines[-1].rstrip() + "..."
    return "\n".join(lines)
