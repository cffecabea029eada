"""Rendered words: an embedded data set of captioned pictures, a small stand-in for text rendering.

A clip is one frame: a word of four letters in DejaVu Sans Mono, dark on light, captioned letter by letter with places,
"the word c1 a2 k3 e4". The places are in the caption because a DiT's cross-attention sees a set of tokens, not
their order. Size, weight, offset and contrast vary; clip n of a split is a pure function of (seed, split, n). The
held-out split has words of its own, each letter of which training sees at the same place in other words.

Needs numpy, Pillow and the fonts that matplotlib ships. Must not know about batching over processes
(`data.pipeline`) or about models.

Shape legend: N clips, C channels (1), T frames (1), H rows, W columns (3 H).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from PIL import Image, ImageDraw, ImageFont

Split = Literal["train", "heldout"]
SPLITS: tuple[str, ...] = get_args(Split)
LETTERS = 4
ASPECT = 3  # a picture is three times as wide as high
NOMINAL_LENGTH = 2**31 - 1

# Common words; each letter stands at its place in at least five of them, the held-out ones included.
_LIST = """
baby back bake ball band bank barn base bath bean bear beat belt bend best bike bird bite blow blue boat body bold
bone book boot born bowl brim bulb bull burn bush busy cake calf calm camp cape card care cart case cash cave chef
chin city clay clip club coal coat code coin cold cook cool copy corn cost crab crew crow cube cure dark dawn deck
deep deer desk dial dish dive dock door dove down draw drum duck dusk dust duty face fact fair fall farm fast fern
film fine fire fish five flag flat flow foam fold folk food foot fork form fort four free frog fuel full game gate
gift girl give glad goal goat gold good gray grid grow gulf hail half hall hand hard harp hawk head heat herb hill
hint hive hold home hood hook hope horn host hunt jade join jump june jury lace lake lamb lamp land lark lawn leaf
left lift lily lime line lion list loaf lock loft long loud love luck lung made mail main make mane mask meal melt
milk mind mint mist moon move much name navy neat neck nest nine node nose note pace pair palm park path peak pear
pink pipe plan play plum poem pond pony pool port post pure race raft rail rain reef rest rice rich ring road robe
rock roof room root rope rose ruby rule safe sail salt sand seal seed shed ship shoe show silk sing slow soap sock
soft soil song soup tail tale tank tape team tent tide time tiny toad tone town tree trip true tube turn vase vast
veil verb vest view vine volt vote walk wall wand warm wave week west whey wide wild wind wine wing wise wolf wood
wool word worm wrap
"""
WORDS = tuple(_LIST.split())
HELDOUT = WORDS[::8]
TRAINED = tuple(w for w in WORDS if w not in HELDOUT)

# The places are part of the vocabulary: 26 letters at four places.
VOCABULARY: tuple[str, ...] = (
    "the",
    "word",
    *(f"{letter}{place}" for place in range(1, LETTERS + 1) for letter in "abcdefghijklmnopqrstuvwxyz"),
)
MAX_WORDS = 2 + LETTERS

_PROMPT_SEED = 91
# How renderings vary. Lengths are fractions of the height; levels are of the range from black (0) to white (1).
_FONTS = ("DejaVuSansMono.ttf", "DejaVuSansMono-Bold.ttf")
_SIZES = (0.8125, 0.84375)  # of the font: 26 and 27 pixels at 32 rows, where a letter takes 16 columns
_SHIFT_X, _SHIFT_Y = 0.04, 0.03  # either way; the renderer moves letters by whole rows
_INK, _PAPER = (0.0, 0.25), (0.85, 1.0)
# The face's own measures, in ems: what a letter moves on, and how far below the middle of a line its letters stand.
_ADVANCE, _BASELINE = 0.602, 0.275


def caption(text: str) -> str:
    """ "cake" -> "the word c1 a2 k3 e4". Raises ValueError unless it is four letters from a to z."""
    if len(text) != LETTERS or not (text.isascii() and text.isalpha() and text.islower()):
        raise ValueError(f"text = {text!r}: must be {LETTERS} letters from a to z")
    return " ".join(["the", "word", *(f"{letter}{place}" for place, letter in enumerate(text, 1))])


@functools.cache
def _font(name: str, size: float) -> ImageFont.FreeTypeFont:
    # Imported here: matplotlib takes a while to import, and captions do not need it.
    from matplotlib import get_data_path

    return ImageFont.truetype(Path(get_data_path()) / "fonts" / "ttf" / name, size)


def render(text: str, size: int, u: Sequence[float]) -> np.ndarray:
    """A word -> uint8 (size, 3 size).

    Args:
      text: the word.
      size: rows.
      u: six numbers in [0,1) that say how: font size, weight, shift across and down, ink, paper.
    """
    points = _SIZES[int(u[0] * len(_SIZES))] * size
    font = _font(_FONTS[int(u[1] * len(_FONTS))], points)
    left = (ASPECT * size - LETTERS * _ADVANCE * points) / 2 + _SHIFT_X * size * (2 * u[2] - 1)
    baseline = size / 2 + _BASELINE * points + _SHIFT_Y * size * (2 * u[3] - 1)
    canvas = Image.new("L", (ASPECT * size, size))
    ImageDraw.Draw(canvas).text((left, baseline), text, fill=255, font=font, anchor="ls")
    ink, paper = (low + (high - low) * x for (low, high), x in zip((_INK, _PAPER), u[4:6], strict=True))
    cover = np.asarray(canvas, np.float64) / 255
    return np.rint(255 * (paper + (ink - paper) * cover)).astype(np.uint8)


@dataclass(frozen=True)
class WordClips:
    """A random-access stream of clips of rendered words; the interface of `data.pipeline.ClipSource`.

    The word is uniform over those of the split.

    Raises:
      ValueError: unknown split, fewer than 16 rows, a negative seed.
    """

    split: str
    size: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise ValueError(f"split = {self.split!r}: must be one of {', '.join(SPLITS)}")
        if self.size < 16:
            raise ValueError(f"size = {self.size}: a word that can be read needs at least 16 rows")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed = {self.seed}: must be in 0 .. 2**63 - 1")

    def __len__(self) -> int:
        return NOMINAL_LENGTH

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """Every token that a caption can hold."""
        return VOCABULARY

    def batch(self, indices: Sequence[int] | np.ndarray) -> dict[str, Any]:
        """Clips for a model: video float32 (N,1,1,H,W) in [-1,1]; text and caption, lists of N."""
        index_N = np.asarray(indices, np.int64).reshape(-1)
        if index_N.size and not (index_N.min() >= 0 and index_N.max() < NOMINAL_LENGTH):
            raise IndexError(f"clip index must be in 0 .. {NOMINAL_LENGTH - 1}")
        words = HELDOUT if self.split == "heldout" else TRAINED
        stream = SPLITS.index(self.split)
        texts, pictures = [], np.empty((len(index_N), self.size, ASPECT * self.size), np.uint8)
        for row, n in enumerate(index_N.tolist()):
            # The index is the counter's second word: the first counts the draws of one clip.
            bits = np.random.Philox(key=[self.seed, stream], counter=[0, n, 0, 0])
            u = np.random.Generator(bits).random(7).tolist()
            texts.append(words[int(u[0] * len(words))])
            pictures[row] = render(texts[-1], self.size, u[1:])
        video_NCTHW = pictures[:, None, None]
        return {
            "video": video_NCTHW.astype(np.float32) / np.float32(127.5) - np.float32(1),
            "text": texts,
            "caption": [caption(text) for text in texts],
        }


def evaluation_prompts(count: int) -> dict[str, Any]:
    """A fixed list of prompts for evaluations before and after: text and caption, lists of `count`.

    The held-out words in one fixed mixed order, again and again: a longer list begins with the shorter one.
    """
    if count < 1:
        raise ValueError(f"count = {count}: must be at least 1")
    order = np.random.Generator(np.random.PCG64(_PROMPT_SEED)).permutation(len(HELDOUT))
    texts = [HELDOUT[i] for i in itertools.islice(itertools.cycle(order.tolist()), count)]
    return {"text": texts, "caption": [caption(text) for text in texts]}


def heldout_clips(count: int, size: int = 32) -> dict[str, Any]:
    """The first `count` held-out clips, the same in every run: what held-out losses are measured on."""
    if count < 1:
        raise ValueError(f"count = {count}: must be at least 1")
    return WordClips("heldout", size=size).batch(np.arange(count))
