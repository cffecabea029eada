"""What a data set's name stands for: clips to train on, prompts and clips to evaluate on, the words, the judge.

The one place where the built-in data sets differ for training and evaluation; a new one is a class here with these
members. Errors name the fields without "config.": this module must not know the config.

Shape legend: N clips, C channels, T frames, H rows, W columns, F features.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ddrl_jax.data import digits, pipeline, words
from ddrl_jax.data.latent_cache import LatentCache
from ddrl_jax.data.prompts import read_prompts
from ddrl_jax.data.video import read_image
from ddrl_jax.models import digit_judge
from ddrl_jax.models.pixel_features import PixelFeatures
from ddrl_jax.models.wan_vae import WanVAEConfig

JUDGE_CLIPS = 20_000  # of digits, rendered from the judge's own scans
LATENTS = "latents"  # the folder in data.path
PIXEL_CLIPS, PIXEL_COMPONENTS = 1500, 32  # of words


class Judge(Protocol):
    """Looks at generated clips: what the policy is never trained on."""

    def __call__(
        self, videos_NCTHW: Any, latents: np.ndarray, asked: dict[str, Any]
    ) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Clips (None where only latents are stored), their latents, and what was asked for (`evaluation_prompts`,
        `heldout_clips`) -> values by name, each (N,), higher is better; and features (N,F) for a Fréchet distance."""


class DataSet(Protocol):
    """A data set as training and evaluation see it.

    Attributes:
      title: for reports, in "ddrl on moving digits".
      vocabulary: every word that a caption can hold.
      video_shape: (C,T,H,W) of a clip.
    """

    @property
    def title(self) -> str: ...

    @property
    def vocabulary(self) -> tuple[str, ...]: ...

    @property
    def video_shape(self) -> tuple[int, int, int, int]: ...

    def training(self) -> pipeline.ClipSource:
        """The clips to train on. Raises ValueError, one line, where data.path or data.limit cannot be."""

    def evaluation_prompts(self, count: int) -> dict[str, Any]:
        """A fixed list of prompts that training never sees: caption, a list of `count`, and what they ask for.

        Of videos also first, what each begins with: a picture uint8 (H,W,3), latents (C,h,w) or None; and, of a list of
        prompts, id: a number each that its sample's noise is drawn by.
        """

    def heldout_clips(self, count: int) -> dict[str, Any]:
        """The first `count` held-out clips, the same in every run: video float32 (N,C,T,H,W), caption, their labels."""

    def judge(self, file: Path, *, seed: int, steps: int, say: Callable[[str], None]) -> Judge:
        """The judge: read from `file` where it is there, else made (and stored, where making it takes long)."""


def data_set(
    name: str,
    *,
    frames: int,
    size: int,
    seed: int,
    long_size: int = 0,
    path: str = "",
    limit: int = 0,
    heldout: int = 0,
    prompts: str = "",
    image_to_video: float = 0.0,
    fingerprint: Callable[[], dict[str, Any]] | None = None,
) -> DataSet:
    """The data set of that name.

    Args:
      name: "digits", "words" or "videos".
      frames: of a clip; words have 1.
      size: rows of a clip; digits are square, words three times as wide; of videos the short edge.
      seed: of the training clips.
      long_size: of videos, the long edge.
      path: a folder with clips to train on; "" renders them. Of videos, the folder with latents/.
      limit: train on the first so many only; 0 is all.
      heldout: of videos, how many clips are set aside.
      prompts: of videos, a file of captions to evaluate on; "": those of held-out clips.
      image_to_video: of videos, the share of held-out clips whose first frame is given in evaluations.
      fingerprint: of videos, what their latents are to be a function of.

    Raises:
      ValueError: one line with the field, its value and what would be right.
    """
    if name == "digits":
        return Digits(frames, size, seed, path, limit)
    if name == "words":
        return Words(frames, size, seed, path, limit)
    if name == "videos":
        return Videos(frames, size, long_size, seed, Path(path), limit, heldout, prompts, image_to_video, fingerprint)
    raise ValueError(f"data.name={name!r}: must be digits, words or videos")


@dataclasses.dataclass(frozen=True)
class Digits:
    """Moving handwritten digits (`data.digits`), judged by a net fitted on scans of its own (`models.digit_judge`)."""

    frames: int
    size: int
    seed: int
    path: str
    limit: int
    title = "moving digits"
    vocabulary = digits.VOCABULARY

    @property
    def video_shape(self) -> tuple[int, int, int, int]:
        return 1, self.frames, self.size, self.size

    def training(self) -> pipeline.ClipSource:
        source: pipeline.ClipSource
        if self.path:
            stored = source = digits.load_clips(self.path)
            shape, right = stored.video.shape[1:], (self.frames, self.size, self.size, 1)
            unknown = sorted(set(stored.vocabulary) - set(self.vocabulary))
            if shape != right or unknown:
                wrong = f"words {unknown[:3]} are not in the word table" if unknown else f"clips are (T,H,W,C) {shape}"
                raise ValueError(
                    f"data.path={self.path!r}: {wrong}; captions and shape must be those of "
                    f"data.frames and data.size, {right}"
                )
        else:
            source = digits.DigitClips("train", frames=self.frames, size=self.size, seed=self.seed)
        return pipeline.limited(source, self.limit)

    def evaluation_prompts(self, count: int) -> dict[str, Any]:
        return pipeline.evaluation_prompts(count)

    def heldout_clips(self, count: int) -> dict[str, Any]:
        return pipeline.heldout_clips(count, frames=self.frames, size=self.size)

    def judge(self, file: Path, *, seed: int, steps: int, say: Callable[[str], None]) -> Judge:
        if file.exists():
            try:
                return _DigitJudge(digit_judge.Judge.load(file))
            except ValueError:
                say(f"judge: {file.name} is damaged and is fitted again")
        clips = digits.DigitClips("judge", frames=self.frames, size=self.size, seed=seed).batch(np.arange(JUDGE_CLIPS))
        fitted = digit_judge.fit_judge(clips["video"], clips["digit"], clips["direction"], seed=seed, steps=steps)
        fitted.save(file)
        return _DigitJudge(fitted)


@dataclasses.dataclass(frozen=True)
class _DigitJudge:
    net: digit_judge.Judge

    def __call__(
        self, videos_NCTHW: np.ndarray, latents: np.ndarray, asked: dict[str, Any]
    ) -> tuple[dict[str, np.ndarray], np.ndarray]:
        seen = self.net(videos_NCTHW)
        values = {
            "judge_digit": seen["digit_prob"].argmax(1) == asked["digit"],
            "judge_direction": seen["direction_prob"].argmax(1) == asked["direction"],
        }
        return values, seen["features"]


@dataclasses.dataclass(frozen=True)
class Words:
    """Rendered words (`data.words`).

    What they say is judged by a scorer of weight 0 in the sidecar ("ocr_judge"); here are features only, those of
    pixels (`models.pixel_features`).

    Raises:
      ValueError: fields that words cannot have.
    """

    frames: int
    size: int
    seed: int
    path: str
    limit: int
    title = "rendered words"
    vocabulary = words.VOCABULARY

    def __post_init__(self) -> None:
        if self.frames != 1:
            raise ValueError(f"data.frames={self.frames}: must be 1 for words, which are pictures")
        if self.path:
            raise ValueError(f"data.path={self.path!r}: must be '' for words, which are always rendered")

    @property
    def video_shape(self) -> tuple[int, int, int, int]:
        return 1, 1, self.size, words.ASPECT * self.size

    def training(self) -> pipeline.ClipSource:
        return pipeline.limited(words.WordClips("train", size=self.size, seed=self.seed), self.limit)

    def evaluation_prompts(self, count: int) -> dict[str, Any]:
        return words.evaluation_prompts(count)

    def heldout_clips(self, count: int) -> dict[str, Any]:
        return words.heldout_clips(count, size=self.size)

    def judge(self, file: Path, *, seed: int, steps: int, say: Callable[[str], None]) -> Judge:
        clips = words.WordClips("train", size=self.size, seed=seed).batch(np.arange(PIXEL_CLIPS))
        return _PixelJudge(PixelFeatures.fit(clips["video"], PIXEL_COMPONENTS))


@dataclasses.dataclass(frozen=True)
class _PixelJudge:
    features: PixelFeatures

    def __call__(
        self, videos_NCTHW: np.ndarray, latents: np.ndarray, asked: dict[str, Any]
    ) -> tuple[dict[str, np.ndarray], np.ndarray]:
        return {}, self.features(videos_NCTHW)


@dataclasses.dataclass(frozen=True)
class Videos:
    """Captioned videos, as the latents that --mode=prepare made of them (`data.latent_cache`).

    No judge net knows arbitrary videos; what guards against hacking is the held-out diffusion loss, image statistics,
    and a Fréchet distance of latent statistics, which training never sees.
    """

    frames: int
    size: int
    long_size: int
    seed: int
    path: Path
    limit: int
    heldout: int
    prompts: str
    image_to_video: float
    fingerprint: Callable[[], dict[str, Any]] | None = None
    title = "videos"
    vocabulary = ()

    @property
    def video_shape(self) -> tuple[int, int, int, int]:
        return 3, self.frames, self.size, self.long_size

    @functools.cached_property
    def cache(self) -> LatentCache:
        """The latents. Raises ValueError, one line naming data.path."""
        made = None if self.fingerprint is None else self.fingerprint()
        return LatentCache(self.path / LATENTS, fingerprint=made, heldout=self.heldout)

    def training(self) -> pipeline.BucketedSource:
        return self.cache.split("train", limit=self.limit)

    def _heldout(self) -> tuple[Any, np.ndarray]:
        """Held-out clips of the most common shape: a held-out loss and an evaluation have one shape."""
        clips = self.cache.split("heldout")
        return clips, max(clips.buckets.values(), key=len)

    def evaluation_prompts(self, count: int) -> dict[str, Any]:
        clips, index = self._heldout()
        if self.prompts:
            asked = read_prompts(self.prompts)
            # The orientation that is evaluated.
            _, _, height, width = WanVAEConfig().video_shape(clips.shapes[index[0]])
            pictures = {p.image: read_image(p.image, height, width) for p in asked if p.image}
            rows = [(asked[i % len(asked)], i // len(asked)) for i in range(count)]
            return {
                "caption": [p.caption for p, _ in rows],
                "first": [pictures[p.image] if p.image else None for p, _ in rows],
                "id": [_identity(p.caption, p.image.name if p.image else "", again) for p, again in rows],
            }
        picked = index[np.arange(count) % len(index)]
        share = np.arange(count + 1) * self.image_to_video
        given = np.floor(share[1:]) > np.floor(share[:-1])
        # One by one: all of them together are gigabytes, their first frames are not.
        frames = {i: clips.batch([i])["latent"][0][:, 0].copy() for i in dict.fromkeys(picked[given].tolist())}
        first = [frames[int(i)] if it else None for i, it in zip(picked, given, strict=True)]
        return {"caption": [clips.captions[i] for i in picked], "first": first}

    def heldout_clips(self, count: int) -> dict[str, Any]:
        clips, index = self._heldout()
        return clips.batch(index[:count])

    def judge(self, file: Path, *, seed: int, steps: int, say: Callable[[str], None]) -> Judge:
        return _LatentJudge()


def _identity(*parts: Any) -> int:
    """A number of 32 bits that depends on the parts alone: a prompt's samples are the same wherever it stands."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4])


class _LatentJudge:
    """Mean and standard deviation of each latent channel, in space and time, of a clip."""

    def __call__(
        self, videos_NCTHW: np.ndarray, latents: np.ndarray, asked: dict[str, Any]
    ) -> tuple[dict[str, np.ndarray], np.ndarray]:
        axes = (2, 3, 4)
        return {}, np.concatenate([latents.mean(axes, np.float64), latents.std(axes, dtype=np.float64)], axis=1)
