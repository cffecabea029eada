"""Scorers: small classes with `load` and `score`. How to write one: docs/rewards.md."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from pathlib import Path
from typing import Any, Protocol

BUILT_IN = {
    "aesthetic": "ddrl_jax.sidecar.scorers.aesthetic:Aesthetic",
    "brightness": "ddrl_jax.sidecar.scorers.brightness:Brightness",
    "clip_score": "ddrl_jax.sidecar.scorers.clip_score:ClipScore",
    "cosmos_reason1": "ddrl_jax.sidecar.scorers.cosmos_reason1:CosmosReason1",
    "digits": "ddrl_jax.sidecar.scorers.digits:Digits",
    "hps_v2": "ddrl_jax.sidecar.scorers.hps_v2:HpsV2",
    "image_reward": "ddrl_jax.sidecar.scorers.image_reward:ImageReward",
    "jpeg": "ddrl_jax.sidecar.scorers.jpeg:Jpeg",
    "mini_clip": "ddrl_jax.sidecar.scorers.mini_clip:MiniClip",
    "ocr": "ddrl_jax.sidecar.scorers.ocr:Ocr",
    "ocr_judge": "ddrl_jax.sidecar.scorers.ocr_judge:OcrJudge",
    "pick_score": "ddrl_jax.sidecar.scorers.pick_score:PickScore",
    "vbench": "ddrl_jax.sidecar.scorers.vbench:VBench",
    "video_align": "ddrl_jax.sidecar.scorers.video_align:VideoAlign",
}


class Scorer(Protocol):
    """What the server asks of a scorer.

    `batch_size`: the server calls `score` with exactly this many samples every time (the last ones may be padding),
    so that a sample's score does not depend on how many came with it.
    """

    batch_size: int

    def load(self, weights: str | None, device: str) -> None:
        """Reads the weights: a folder, or None where the server was given none. Called once."""

    def score(self, videos: Any, prompts: list[str]) -> dict[str, list[float]]:
        """videos: float32 torch tensor (B,C,T,H,W) in [-1,1] on the CPU. Returns name -> B numbers, NaN where a sample
        cannot be scored. ValueError fails the request, with its text as the reason."""


def resolve(spec: str) -> tuple[str, type[Any]]:
    """`digits` or `path/to/my_scorer.py:MyScorer` -> (name on the wire, class). Raises ValueError in one line.

    A file's scorer is named by the class's attribute `name`, or by the file's name without `.py`.
    """
    target = BUILT_IN.get(spec, spec)
    where, colon, class_name = target.rpartition(":")
    if not colon or not class_name.isidentifier():
        raise ValueError(f"scorer: {spec!r} is none of {', '.join(BUILT_IN)} and no FILE.py:Class either")
    if spec in BUILT_IN:
        return spec, getattr(importlib.import_module(where), class_name)
    path = Path(where)
    if path.suffix != ".py" or not path.is_file():
        raise ValueError(f"scorer: there is no Python file {where!r} (from {spec!r})")
    loader = importlib.util.spec_from_file_location(f"ddrl_user_scorer_{path.stem}", path)
    assert loader is not None and loader.loader is not None
    module = importlib.util.module_from_spec(loader)
    try:
        loader.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"scorer: {where} fails to import: {type(error).__name__}: {error}") from error
    cls = getattr(module, class_name, None)
    if not isinstance(cls, type) or not all(callable(getattr(cls, method, None)) for method in ("load", "score")):
        raise ValueError(f"scorer: {where} has no class {class_name!r} with the methods `load` and `score`")
    name = str(getattr(cls, "name", path.stem))
    if not name or "/" in name:
        raise ValueError(f"scorer: {where} calls itself {name!r}; a name without '/' is needed")
    return name, cls


def load(spec: str, weights: str | None, device: str, dtype: str = "float32") -> tuple[str, Scorer]:
    """`resolve`, then an instance with its weights. Raises ValueError in one line, whatever the scorer raises."""
    name, cls = resolve(spec)
    try:
        options = {"dtype": dtype} if "dtype" in inspect.signature(cls.load).parameters else {}
        if dtype != "float32" and not options:
            raise ValueError(f"dtype {dtype!r}; it computes in its own (its `load` takes no dtype)")
        scorer = cls()
        scorer.load(weights, device, **options)
        if int(scorer.batch_size) < 1:
            raise ValueError(f"batch_size {scorer.batch_size}; at least 1 is needed")
    except Exception as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"scorer {name}: {kind}{error}") from error
    return name, scorer
