"""The report: verdicts on known runs, a page without references, media that decode, partial runs."""

from __future__ import annotations

import base64
import io
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from ddrl_jax.report import media, plots, verdict, write_report
from ddrl_jax.report.verdict import SIGNALS, Change, read_changes, show, stopped_sentence
from ddrl_jax.report.workdir import number, read_run, short_labels

HOSTILE = "\"'><script>alert(1)</script><img src=http://evil.example/x onerror=alert(2)> $\\frac{$ &"


def _change(name, mean, low, high, better="up", kind="judge", **more):
    return dict(name=name, label=name, mean=mean, low=low, high=high, n=256, better=better,
                kind=kind, **more)  # fmt: skip


def _signal(name, value, limit, alarm, evidence=""):
    return dict(name=name, value=value, limit=limit, alarm=alarm, evidence=evidence)


def _quiet(loss=0.027):
    return [
        _signal("heldout_loss", loss, 0.1, False, f"The held-out loss rose by {loss:.1%}."),
        _signal("reward_slope", 0.012, 0.02, False),
        _signal("reward_std", 0.03, 0.25, False),
        _signal("sub_scores", 0.08, 0.25, False, "A sub-score fell by 0.08."),
        _signal("image_statistics", 0.03, 0.15, False),
    ]


def _hacked_summary() -> dict[str, Any]:
    """DanceGRPO at 1e-4 after 50 updates, as measured on the moving digits (specs/data.md)."""
    return {
        "title": "DanceGRPO",
        "run": {"method": "dance_grpo", "steps": 50, "seconds": 85.0},
        "before": {"reward": -1.2, "judge_digit": 0.66, "frechet": 52.0, "heldout_loss": 0.33},
        "after": {"reward": 0.68, "judge_digit": 0.546, "frechet": 437.0, "heldout_loss": 0.42},
        "changes": [
            _change("reward", 1.88, 1.77, 1.98, kind="reward"),
            _change("text_alignment", 0.9, 0.8, 1.0, kind="sub"),
            _change("judge_digit", -0.114, -0.163, -0.064),
            _change("frechet", 385.0, 350.0, 420.0, better="down"),
            _change("heldout_loss", 0.28, 0.25, 0.31, better="down", kind="loss"),
        ],
        "signals": [
            _signal("heldout_loss", 0.28, 0.1, True, "The held-out loss rose by 28 %."),
            _signal("reward_slope", 0.05, 0.02, True, "The reward rose steeply."),
            _signal("reward_std", 0.2, 0.25, False, "The spread fell by 20 %."),
            _signal("sub_scores", 0.31, 0.25, True, "Motion fell while the reward rose."),
            _signal("image_statistics", 0.19, 0.15, True, "Edges grew by 19 %."),
        ],
        "config_file": "configs/quickstart.py",
        "command": "python -m ddrl_jax.main --config=configs/quickstart.py",
    }


def _clean_summary() -> dict[str, Any]:
    """DDRL .1 at 3e-5 after 100 updates; the Frechet distance with an interval that includes 0."""
    return {
        "title": "DDRL",
        "before": {"reward": -1.2, "judge_digit": 0.66},
        "after": {"reward": -0.29, "judge_digit": 0.672},
        "changes": [
            _change("reward", 0.91, 0.86, 0.96, kind="reward"),
            _change("text_alignment", 0.5, 0.45, 0.55, kind="sub"),
            _change("motion_quality", 0.06, 0.02, 0.10, kind="sub"),
            _change("judge_digit", 0.012, -0.010, 0.033),
            _change("frechet", 12.0, -3.0, 28.0, better="down"),
            _change("heldout_loss", 0.027, 0.012, 0.041, better="down", kind="loss"),
        ],
        "signals": _quiet(),
    }


# ---------------------------------------------------------------- verdict


def test_known_hacked():
    found = verdict(_hacked_summary())
    assert found.label == "hacked"
    assert found.headline == ("The reward rose while 2 judges got worse and the held-out loss passed its limit.")
    assert found.reasons[0] == "The reward rose: +1.88 [+1.77, +1.98]."
    assert "judge_digit got worse: \u22120.11 [\u22120.16, \u22120.06]." in found.reasons
    assert "The held-out loss rose by 28 %." in found.reasons


def test_known_clean():
    found = verdict(_clean_summary())
    assert found.label == "clean"
    assert "no check found it hacked" in found.headline
    assert "judge_digit: no clear change, +0.012 [\u22120.010, +0.033]." in found.reasons
    assert "The held-out loss rose by 2.7%." in found.reasons


@pytest.mark.parametrize(
    ("judge", "label"),
    [
        (_change("j", -0.1, -0.2, -0.001), "hacked"),
        (_change("j", -0.1, -0.2, 0.0), "clean"),
        (_change("j", 0.1, 0.001, 0.2), "clean"),
        (_change("j", 10.0, 0.1, 20.0, better="down"), "hacked"),
        (_change("j", -10.0, -20.0, -0.1, better="down"), "clean"),
    ],
)
def test_one_judge_decides_by_its_whole_interval(judge, label):
    changes = [_change("reward", 0.9, 0.8, 1.0, kind="reward"), judge]
    assert verdict({"changes": changes, "signals": _quiet()}).label == label


@pytest.mark.parametrize(
    ("alarm", "label"),
    [
        ("heldout_loss", "hacked"),
        ("reward_slope", "suspicious"),
        ("reward_std", "suspicious"),
        ("sub_scores", "suspicious"),
        ("image_statistics", "suspicious"),
    ],
)
def test_a_single_alarm(alarm, label):
    summary = _clean_summary()
    for signal in summary["signals"]:
        signal["alarm"] = signal["name"] == alarm
    found = verdict(summary)
    assert found.label == label
    if label == "suspicious":
        assert "with a warning sign" in found.headline
        summary["signals"][1]["alarm"] = summary["signals"][4]["alarm"] = True
        summary["signals"][2]["alarm"] = summary["signals"][3]["alarm"] = False
        assert "with 2 warning signs" in verdict(summary).headline


def test_signals_of_an_older_run_are_not_measured_and_change_no_label():
    for summary, label in ((_hacked_summary(), "hacked"), (_clean_summary(), "clean")):
        summary["signals"] = summary["signals"][:3]
        found = verdict(summary)
        assert found.label == label
        assert [r for r in found.reasons if "not measured" in r] == [
            "Sub-scores traded for the reward: not measured.",
            "What the pictures look like: not measured.",
        ]


@pytest.mark.parametrize(
    ("stopped", "sentence"),
    [
        (
            {"step": 75, "action": "rollback", "ended_at": 50, "reason": "The loss rose."},
            "The hacking monitor rolled the run back to update 50, for what it saw at update 75: The loss rose.",
        ),
        (
            {"step": 75, "action": "stop", "ended_at": 75, "reason": ""},
            "The hacking monitor stopped the run, for what it saw at update 75.",
        ),
        ({"action": "stop", "step": None}, "The hacking monitor stopped the run."),
        ({}, ""),
        (None, ""),
        ("stop", ""),
    ],
)
def test_what_the_monitor_did_is_told_and_changes_no_label(stopped, sentence):
    assert stopped_sentence(stopped) == sentence
    for summary in (_clean_summary(), _hacked_summary(), {}):
        before, after = verdict(summary), verdict(summary | {"stopped": stopped})
        assert (after.label, after.headline) == (before.label, before.headline)
        told = [sentence] if sentence else []
        assert after.reasons == before.reasons[:1] + told + before.reasons[1:]


def test_a_falling_sub_score_is_suspicious():
    summary = _clean_summary()
    summary["changes"][2] = _change("motion_quality", -0.06, -0.1, -0.02, kind="sub")
    found = verdict(summary)
    assert found.label == "suspicious"
    assert "The sub-score motion_quality fell: \u22120.06 [\u22120.10, \u22120.02]." in found.reasons


@pytest.mark.parametrize("interval", [(-0.01, 0.09), (0.0, 0.09), (-0.09, 0.0)])
def test_reward_interval_with_zero_is_no_change(interval):
    summary = _clean_summary()
    summary["changes"][0] = _change("reward", 0.04, *interval, kind="reward")
    assert verdict(summary).label == "no change"
    # Harm without gain is not hacking, but it is said.
    summary["changes"][3] = _change("judge_digit", -0.2, -0.3, -0.1)
    found = verdict(summary)
    assert found.label == "no change"
    assert "the checks got worse" in found.headline


def test_a_fallen_reward_is_neither_clean_nor_no_change():
    summary = _clean_summary()
    summary["changes"][0] = _change("reward", -0.5, -0.6, -0.4, kind="reward")
    found = verdict(summary)
    assert found.label == "suspicious"
    assert "fell" in found.headline


def test_missing_judges_are_said():
    summary = _clean_summary()
    summary["changes"] = [c for c in summary["changes"] if c["kind"] != "judge"]
    found = verdict(summary)
    assert found.label == "clean"
    assert "no judge looked at it" in found.headline
    assert "No independent judge was run." in found.reasons


def test_nothing_independent_measured_is_not_clean():
    found = verdict({"changes": [_change("reward", 0.9, 0.8, 1.0, kind="reward")]})
    assert found.label == "suspicious"
    assert "nothing independent" in found.headline
    assert sum("not measured" in reason for reason in found.reasons) == 5


def test_a_judge_without_an_interval_decides_nothing():
    summary = _clean_summary()
    summary["changes"] = [
        _change("reward", 0.9, 0.8, 1.0, kind="reward"),
        _change("frechet", 400.0, None, None, better="down"),
    ]
    found = verdict(summary)
    assert found.label == "clean"
    assert "no judge looked at it" in found.headline
    assert "frechet: +400, without an interval; it decides nothing." in found.reasons


def test_loss_beyond_the_limit_counts_without_its_signal():
    summary = _clean_summary()
    summary["signals"] = []
    assert verdict(summary).label == "clean"
    summary["changes"][-1] = _change("loss", 0.28, 0.25, 0.31, better="down", kind="loss")
    found = verdict(summary)
    assert found.label == "hacked"
    assert "loss rose by more than 10 %: +28.0 % [+25.0, +31.0]." in found.reasons


def test_a_signal_without_a_value_is_not_quiet():
    summary = _clean_summary()
    summary["signals"][0] = _signal("heldout_loss", None, 0.1, False)
    assert "Held-out diffusion loss: not measured." in verdict(summary).reasons


@pytest.mark.parametrize(
    "summary",
    [
        {},
        {"changes": None, "signals": None},
        {"changes": [None, 3, {}], "signals": ["x", {}]},
        {"changes": [_change("reward", None, None, None, kind="reward")]},
        {"changes": [_change("reward", 1.0, float("nan"), float("inf"), kind="reward")]},
        {"changes": [_change("reward", 1.0, 2.0, 0.5, kind="reward")]},
    ],
)
def test_without_a_reward_interval_nothing_is_claimed(summary):
    found = verdict(summary)
    assert found.label == "no change"
    assert "not measured" in found.headline


def test_numbers_never_hide_that_an_interval_leaves_zero_out():
    change = Change("c", "c", "sub", "up", 0.2, 0.00004, 0.4, 10)
    assert change.side == "good"
    assert change.numbers() == ("+0.20000", "[+0.00004, +0.40000]")


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "\u2013"), (0.0, "0"), (-0.114, "\u22120.11"), (0.0123, "0.012"), (437.2, "437"),
     (1.5e-5, "1.5e-05"), (99.97, "100")],
)  # fmt: skip
def test_show(value, text):
    assert show(value) == text


def test_number_takes_finite_numbers_only():
    values = [1, 2.5, True, None, "3", float("nan"), float("inf"), 10**400, [1]]
    assert [number(v) for v in values] == [1.0, 2.5] + [None] * 7


# ---------------------------------------------------------------- media


def _clip(t=4, h=12, w=16, c=1, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (t, h, w, c), dtype=np.uint8)


def test_upscale_and_fit():
    clip = _clip()
    big = media.upscale(clip, 72)
    assert big.shape == (4, 48, 64, 1)
    np.testing.assert_array_equal(big[:, ::4, ::4], clip)
    np.testing.assert_array_equal(big[:, 3::4, 3::4], clip)
    np.testing.assert_array_equal(media.upscale(clip, 10), clip)
    assert media.fit(_clip(h=120, w=160, c=3), 80).shape == (4, 60, 80, 3)
    flat = np.full((2, 100, 50, 1), 77, np.uint8)
    np.testing.assert_array_equal(media.fit(flat, 20), np.full((2, 20, 10, 1), 77))


def test_mosaic():
    clips = np.stack([_clip(seed=s) for s in range(5)])
    sheet = media.mosaic(clips, 3, gap=2, ground=9)
    assert sheet.shape == (4, 2 * 14 + 2, 3 * 18 + 2, 1)
    np.testing.assert_array_equal(sheet[:, 2:14, 20:36], clips[1])
    np.testing.assert_array_equal(sheet[:, 16:28, 20:36], clips[4])
    assert (sheet[:, 16:, 38:] == 9).all()


@pytest.mark.parametrize("channels", [1, 3])
def test_gif_decodes_back(tmp_path, channels):
    clip = _clip(c=channels, h=24, w=32)
    media.write_gif(tmp_path / "a.gif", clip, fps=8)
    with Image.open(tmp_path / "a.gif") as image:
        assert (image.format, image.size, image.n_frames) == ("GIF", (32, 24), 4)
        assert image.info["loop"] == 0
        for n, frame in enumerate(clip):
            image.seek(n)
            assert image.info["duration"] == 120
            rgb = np.asarray(image.convert("RGB"), np.int32)
            if channels == 1:
                np.testing.assert_array_equal(rgb, np.broadcast_to(frame, rgb.shape))
            else:  # 768 different colours in 256
                assert np.abs(rgb - frame).mean() < 30


def test_gif_of_a_still_clip_keeps_its_time(tmp_path):
    media.write_gif(tmp_path / "a.gif", np.repeat(_clip(t=1), 4, 0), fps=10)
    with Image.open(tmp_path / "a.gif") as image:
        total = 0
        for n in range(image.n_frames):
            image.seek(n)
            total += image.info["duration"]
    assert total == 400


def _decode(path) -> tuple[list[np.ndarray], Any]:
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        frames = [f.to_ndarray(format="rgb24") for f in container.decode(stream)]
        return frames, (stream.codec_context.pix_fmt, float(stream.average_rate))


@pytest.mark.parametrize("shape", [(12, 16), (13, 17), (1, 1)])
@pytest.mark.parametrize("channels", [1, 3])
def test_mp4_decodes_back(tmp_path, shape, channels):
    small = _clip(t=5, h=shape[0], w=shape[1], c=channels)
    # Large flat blocks, as upscaled clips have them: the halved colour planes blur only edges.
    clip = small.repeat(9, 1).repeat(9, 2)
    codec = media.write_mp4(tmp_path / "a.mp4", clip, fps=7.5, loops=2)
    assert codec in {name for name, _ in media._CODECS}
    frames, (pixel_format, rate) = _decode(tmp_path / "a.mp4")
    height, width = (-(-9 * n // 2) * 2 for n in shape)
    assert len(frames) == 10
    assert {f.shape for f in frames} == {(height, width, 3)}
    assert (pixel_format, rate) == ("yuv420p", 7.5)
    difference = np.abs(frames[3][: clip.shape[1], : clip.shape[2]].astype(int) - clip[3])
    assert difference.mean() < (4 if channels == 1 else 24)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.mp4"]


def test_mp4_falls_back_to_mpeg4(tmp_path, monkeypatch):
    monkeypatch.setattr(media, "_CODECS", (("no_such_codec", {}), ("mpeg4", {"qscale": "2"})))
    assert media.write_mp4(tmp_path / "a.mp4", _clip(h=32, w=32), fps=8) == "mpeg4"
    assert len(_decode(tmp_path / "a.mp4")[0]) == 4
    monkeypatch.setattr(media, "_CODECS", (("no_such_codec", {}),))
    with pytest.raises(RuntimeError, match="no_such_codec"):
        media.write_mp4(tmp_path / "b.mp4", _clip(h=32, w=32), fps=8)


def test_contact_sheet_holds_the_frames():
    before, after = (np.stack([_clip(c=1, w=12, seed=s + k) for s in range(3)]) for k in (0, 9))
    words = ["a seven moving up and to the left " * 40, "\u4e03 \U0001f60a", HOSTILE]
    sheet = np.asarray(media.contact_sheet(words, before, after, frame_size=24))
    half = media.contact_sheet(words, before, None, frame_size=24)
    assert half.height == sheet.shape[0]
    assert half.width < sheet.shape[1]
    x, y, row = 24 + 216, 24 + 44, 56
    tile = sheet[y + row : y + row + 24, x + 28 : x + 52]
    np.testing.assert_array_equal(tile, np.broadcast_to(media.upscale(before[1], 24)[1], tile.shape))
    x += 4 * 28 - 4 + 28
    tile = sheet[y : y + 24, x : x + 24]
    np.testing.assert_array_equal(tile, np.broadcast_to(media.upscale(after[0], 24)[0], tile.shape))


def test_contact_sheet_thins_long_clips():
    long = np.stack([_clip(t=40, c=3)])
    sheet = media.contact_sheet(["a"], long, None, frame_size=16, max_frames=5)
    assert sheet.width == 2 * 24 + 216 + 5 * (16 + 4) - 4


@pytest.mark.parametrize(("side", "kind"), [(12, "image/png"), (300, "image/jpeg")])
def test_strip(side, kind):
    clip = _clip(t=6, h=side, w=side, c=3)
    got, data, frames = media.strip(clip, size=112, max_frames=4)
    assert (got, frames) == (kind, 4)
    image = Image.open(io.BytesIO(data))
    shown = min(side, 112)
    assert image.size == (4 * shown, shown)
    if kind == "image/png":
        pixels = np.asarray(image)
        np.testing.assert_array_equal(pixels[:, :side], clip[0])
        np.testing.assert_array_equal(pixels[:, -side:], clip[-1])


# ---------------------------------------------------------------- whole reports


def _metrics(steps=30) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    rows: list[dict[str, Any]] = [
        {"stage": "pretrain", "step": s, "loss": float(3 / (1 + s)), "seconds": 0.1} for s in range(0, 200, 10)
    ]
    for s in range(steps):
        rows.append({
            "stage": "ddrl", "step": s, "reward": s / steps + rng.normal() * 0.1,
            "reward_std": 1.0, "valid_rate": 1.0, "data_loss": 0.3, "ratio_mean": 1.0,
            "ratio_max": 1.0, "clip_fraction": 0.0, "seconds": 1.7, "seconds_rollout": 0.6,
            "seconds_reward_wait": 0.1, "sub/digits/text_alignment": s / steps,
            "sub/digits/overall": -1.0, "kl_loss": 0.01 * s,
            "grad_norm/step00": 0.1, "grad_norm/step08": 0.1 + s if s % 2 else None, "grad_norm/step12": 3.0,
        })  # fmt: skip
    for s in (0, 15, 30):
        rows.append({"stage": "eval", "step": s, "heldout_loss": 0.3 + s / 1000, "reward": s / 30,
                     "judge_digit": 0.66, "digits/text_alignment": s / 30, "image/edge_density": 0.2 + s / 600,
                     "image/brightness": 0.1, "image/saturation": None})  # fmt: skip
    return rows


def _write_workdir(path: Path, summary=None, *, rows=None, evals=(0, 30), config=None, caption="a"):
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(
        config or {"seed": 0, "train": {"steps": 30}, "objective": {"name": "ddrl"}}
    ))  # fmt: skip
    lines = [json.dumps(row) + "\n" for row in (_metrics() if rows is None else rows)]
    (path / "metrics.jsonl").write_text("".join(lines))
    for step in evals:
        _write_samples(path, step, [f"{caption} {n}" for n in range(24)])
    if summary is not None:
        (path / "summary.json").write_text(json.dumps(summary))
    return path


def _write_samples(path: Path, step: int, captions: list[str], channels: int = 1):
    folder = path / "eval" / f"{step:06d}"
    folder.mkdir(parents=True, exist_ok=True)
    video = np.stack([_clip(w=12, c=channels, seed=step + n) for n in range(len(captions))])
    np.savez(folder / "samples.npz", video=video, caption=np.array(captions))


class _Page(HTMLParser):
    """Tags, attributes and text of a page; unclosed or crossing elements are errors."""

    VOID = frozenset({"meta", "input", "br", "img"})

    def __init__(self, text: str):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, {k: v or "" for k, v in attrs}))
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, {k: v or "" for k, v in attrs}))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if "style" not in self._open:
            self.text += data


def _assert_self_contained(page: _Page, raw: str) -> None:
    assert not {"script", "img", "link", "iframe", "object", "base", "form"} & {tag for tag, _ in page.elements}
    style = raw[raw.index("<style>") : raw.index("</style>")]
    assert "@import" not in style
    assert "url(" not in style
    for tag, attrs in page.elements:
        for name, value in attrs.items():
            assert not name.startswith("on"), (tag, name)
            if name in ("src", "href", "xlink:href", "action", "poster", "srcset"):
                assert value.startswith("#"), (tag, name, value)
            for target in re.findall(r"url\(([^)]*)", value) if name in ("style", "clip-path") else ():
                assert target.startswith(("data:image/", "#")), (tag, name, target[:40])
    policy = [a["content"] for t, a in page.elements if a.get("http-equiv")]
    assert policy == ["default-src 'none'; img-src data:; style-src 'unsafe-inline'"]


def test_full_report(tmp_path):
    workdir = _write_workdir(tmp_path / "run", _hacked_summary())
    path = write_report(workdir)
    assert path == workdir / "report" / "index.html"
    raw = path.read_text()
    page = _Page(raw)
    _assert_self_contained(page, raw)
    assert "http://" not in raw
    assert "https://" not in raw
    for text in ("Hacked", "Held-out diffusion loss", "+28.0 %", "configs/quickstart.py", "frechet",
                 "judge_digit", "python -m ddrl_jax.main", "before", "after", "quiet", "alarm",
                 "\u221220.0 %", "limit \u221225 %", "19.0 %", "limit 15 %", "0.31", "group std, limit 0.25",
                 *SIGNALS.values(), "Gradient norm of each trained step", "KL to the reference",
                 "What the pictures look like, change since the start"):  # fmt: skip
        assert text in page.text, text
    ids = [attrs["id"] for _, attrs in page.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    targets = {a["href"][1:] for _, a in page.elements if a.get("href")}
    assert targets <= set(ids)
    clips = [a for _, a in page.elements if a.get("class", "").startswith("clip pixels")]
    assert len(clips) == 2 * (24 + 4)
    data = base64.b64decode(re.search(r"base64,([^)]*)\)", clips[-1]["style"])[1])
    frames = np.asarray(Image.open(io.BytesIO(data)))
    expected = _clip(w=12, seed=30 + 23)[..., 0]
    np.testing.assert_array_equal(frames, np.concatenate(list(expected), axis=1))

    pictures = {p.name for p in (workdir / "report").glob("*.png")}
    assert pictures == {f"{n}.png" for n in (
        "reward", "heldout_loss", "reward_std", "frontier", "judge_curves", "ratio", "kl", "step_gradients",
        "image_statistics", "sub_score_curves", "ddrl_loss", "pretrain_loss", "seconds", "sub_scores", "judges",
    )}  # fmt: skip
    for picture in (workdir / "report").glob("*.png"):
        with Image.open(picture) as image:
            image.load()
            assert image.width > 900
            assert len(image.getcolors(1 << 20)) > 4, picture
    samples = {p.name for p in (workdir / "samples").iterdir()}
    assert samples == {"before.gif", "before.mp4", "after.gif", "after.mp4", "contact_sheet.png"}
    with Image.open(workdir / "samples" / "after.gif") as image:
        assert (image.n_frames, image.size) == (4, (8 * 76 + 4, 3 * 76 + 4))
    frames, _ = _decode(workdir / "samples" / "after.mp4")
    assert len(frames) % 4 == 0
    assert frames[0].shape == (3 * 76 + 4, 8 * 76 + 4, 3)


def test_the_loss_limit_is_the_runs_own(tmp_path):
    workdir = _write_workdir(tmp_path, config={"monitor": {"heldout_loss_limit": 0.2}})
    assert read_run(workdir).loss_limit == 0.2
    assert "limit +20 %" in _Page(write_report(workdir).read_text()).text
    summary = _clean_summary()
    summary["signals"][0]["limit"] = 0.15
    (workdir / "summary.json").write_text(json.dumps(summary))
    assert read_run(workdir).loss_limit == 0.15
    for name in ("config.json", "summary.json"):
        (workdir / name).unlink()
    assert read_run(workdir).loss_limit == 0.1


def _columns(*names):
    """The rows with these columns only: every chart takes its time to draw."""
    kept = {"stage", "step", *names}
    rows = [{k: v for k, v in row.items() if k in kept} for row in _metrics()]
    return [row for row in rows if len(row) > 2]


def test_every_signals_sentence_stands_once(tmp_path):
    path = _write_workdir(tmp_path, _hacked_summary(), rows=[], evals=())
    text = _Page(write_report(path).read_text()).text
    for signal in _hacked_summary()["signals"]:
        if signal["evidence"]:
            assert text.count(signal["evidence"]) == 1, signal["name"]
    summary = _hacked_summary()
    summary["signals"] = []
    (path / "summary.json").write_text(json.dumps(summary))
    lines = [json.dumps(r) + "\n" for r in _columns("digits/text_alignment")]
    (path / "metrics.jsonl").write_text("".join(lines))
    text = _Page(write_report(path).read_text()).text
    assert (text.count("not measured"), text.count("Nothing measured.")) == (5, 4)
    assert text.count("summary does not hold it; this is its curve.") == 1
    (path / "summary.json").unlink()
    assert _Page(write_report(path).read_text()).text.count("Judged when the run ends; this is its curve.") == 1


def test_the_limit_of_the_pictures_is_the_runs_own(tmp_path):
    rows = _columns("image/edge_density", "image/brightness", "image/saturation")
    limits = {"image_limit": 0.4, "heldout_loss_limit": 0.2}
    workdir = _write_workdir(tmp_path, rows=rows, evals=(), config={"monitor": limits})
    assert (read_run(workdir).image_limit, read_run(workdir).loss_limit) == (0.4, 0.2)
    chart = {c.name: c for c in plots.curves(read_run(workdir))}["image_statistics"]
    assert "limit +40 %" in chart.svg and "edge density" in chart.svg and "brightness" in chart.svg
    assert "saturation" not in chart.svg  # grey clips have none
    (workdir / "summary.json").write_text(json.dumps(_hacked_summary()))
    assert read_run(workdir).image_limit == 0.15
    for name in ("config.json", "summary.json"):
        (workdir / name).unlink()
    assert read_run(workdir).image_limit == 0.15


def test_a_run_that_the_monitor_ended_says_so(tmp_path):
    stopped = {"step": 15, "action": "rollback", "ended_at": 10, "reason": f"Too good. {HOSTILE}"}
    path = _write_workdir(tmp_path, _clean_summary(), rows=[], evals=())
    assert "The hacking monitor" not in _Page(write_report(path).read_text()).text
    (path / "stopped.json").write_text(json.dumps(stopped))
    for summary in (True, False):  # without one, there is no verdict yet
        if not summary:
            (path / "summary.json").unlink()
        page = _Page(write_report(path).read_text())
        _assert_self_contained(page, (path / "report" / "index.html").read_text())
        assert (
            page.text.count(f"rolled the run back to update 10, for what it saw at update 15: Too good. {HOSTILE}") == 1
        )
    (path / "stopped.json").write_text("{")
    assert "stopped.json could not be read" in _Page(write_report(path).read_text()).text


@pytest.mark.parametrize(
    ("reward", "roles"),
    [
        (None, {"a/x": "unknown", "b/x": "unknown"}),
        ({"weights": {}}, {"a/x": "unknown"}),
        ({"weights": {"a/x": 1.0, "a/y": 0.0}}, {"a/x": "reward", "a/y": "none", "a/overall": "none", "b/x": "none"}),
        ({"weights": {"a": 1.0}}, {"a/x": "reward", "a/overall": "reward", "b/x": "none"}),
        ({"weights": {"a/overall": -1.0}}, {"a/x": "reward", "ab/x": "none"}),
        (
            {"weights": {"a/x": 1.0}, "gates": {"b/x": 0.0, "c": 1.0}},
            {"a/x": "reward", "b/x": "gate", "b/y": "none", "c/y": "gate"},
        ),
    ],
)
def test_what_training_made_of_a_sub_score(tmp_path, reward, roles):
    run = read_run(_write_workdir(tmp_path, config={"seed": 0} | ({"reward": reward} if reward is not None else {})))
    assert {name: run.role(name) for name in roles} == roles


def test_sub_scores_without_a_weight_are_set_apart(tmp_path):
    summary = _clean_summary()
    names = ["digits/text_alignment", "digits/overall", "ocr/text_alignment"]
    summary["changes"][1:3] = [_change(n, 0.5, 0.4, 0.6, kind="sub") | {"label": "Text alignment"} for n in names]
    summary["changes"][2]["label"] = "Overall"
    weights = {"weights": {"digits/text_alignment": 1.0}, "gates": {"ocr/text_alignment": 0.0}}
    rows = _columns("sub/digits/text_alignment", "sub/digits/overall")
    path = _write_workdir(tmp_path, summary, rows=rows, evals=(), config={"reward": weights})
    text = re.sub(r"\s+", " ", _Page(write_report(path).read_text()).text)
    heads = [
        "Reward and its sub-scores, which training saw",
        "digits: Text alignment",
        "Sub-scores that gate the reward",
        "ocr: Text alignment",
        "Other sub-scores of the same scorers: no weight",
        "Overall",
        "Judges, which",
    ]
    places = [text.index(head, text.index(heads[0])) for head in heads]
    assert places == sorted(places)
    bars = plots.bars(read_changes(summary), read_run(path).role)[0].svg
    assert "Overall (no weight)" in bars and "ocr: Text alignment (gate)" in bars
    assert "digits: Text alignment<" in bars
    curves = {c.name: c for c in plots.curves(read_run(path))}["sub_score_curves"].svg
    assert "overall (no weight)" in curves and "text alignment<" in curves
    # Without weights nothing is known, and nothing is marked.
    path = _write_workdir(tmp_path / "old", summary, rows=[], evals=())
    assert "no weight" not in _Page(write_report(path).read_text()).text


def test_short_labels():
    names = ["a/some_score", "b/some_score", "b/other", "plain"]
    assert short_labels(names) == {
        "a/some_score": "a: some score", "b/some_score": "b: some score", "b/other": "other", "plain": "plain",
    }  # fmt: skip


def test_the_kl_is_drawn_only_where_a_reference_is_held(tmp_path):
    rows = _columns("kl_loss", "grad_norm/step00")
    for path, held, names in (("held", 1.0, {"kl", "step_gradients"}), ("none", 0.0, {"step_gradients"})):
        scaled = [r | {"kl_loss": held * r["kl_loss"]} for r in rows]
        run = read_run(_write_workdir(tmp_path / path, rows=scaled, evals=()))
        assert {c.name for c in plots.curves(run)} == names


def test_step_gradients_are_named_by_their_step_on_a_readable_scale(tmp_path):
    rows = _columns("grad_norm/step00", "grad_norm/step08", "grad_norm/step12")
    [chart] = plots.curves(read_run(_write_workdir(tmp_path, rows=rows, evals=())))
    svg = chart.svg
    assert all(f">step {n}</text>" in svg for n in (0, 8, 12))
    assert "mathdefault" not in svg and ">0.1</text>" in svg  # 0.1 to 29: logarithmic
    rows = [{"stage": "ddrl", "step": n, "grad_norm/step07": 1.0} for n in range(3)]
    [chart] = plots.curves(read_run(_write_workdir(tmp_path / "one", rows=rows, evals=())))
    assert ">step 7</text>" in chart.svg


def test_repeated_calls_give_the_same_page(tmp_path):
    workdir = _write_workdir(tmp_path / "run", _clean_summary())
    first = write_report(workdir).read_bytes()
    assert write_report(workdir).read_bytes() == first
    assert not [p for p in workdir.rglob("*") if p.name.endswith(".tmp")]


def test_a_loss_that_rose_within_its_limit_says_so(tmp_path):
    path = _write_workdir(tmp_path, _clean_summary())
    text = _Page(write_report(path).read_text()).text
    assert "Clean" in text
    assert text.count("\u25bc within limit") == 1
    assert "\u25bc worse" not in text
    (path / "summary.json").write_text(json.dumps(_hacked_summary()))
    text = _Page(write_report(path).read_text()).text
    assert text.count("\u25bc worse") == 3


def test_everything_a_user_wrote_is_escaped(tmp_path):
    summary = _hacked_summary()
    summary["title"] = summary["command"] = summary["config_file"] = HOSTILE
    summary["run"] = {HOSTILE: HOSTILE, "method": HOSTILE}
    summary["before"][HOSTILE] = 1.0
    for change in summary["changes"]:
        change["label"] = HOSTILE
    summary["changes"][1]["label"] = "$\\frac{$"  # broken, were it read as mathematics
    for signal in summary["signals"]:
        signal["evidence"] = HOSTILE
    rows = _metrics()
    for row in rows:
        if row["stage"] == "ddrl":
            row[f"sub/{HOSTILE}"] = row[f"seconds_{HOSTILE}"] = 0.1
        if row["stage"] == "eval":
            row[f"judge_{HOSTILE}"] = 0.5
    config = {HOSTILE: {HOSTILE: HOSTILE, "list": [HOSTILE, {"a": HOSTILE}]}, "x": HOSTILE}
    workdir = _write_workdir(tmp_path / "run", summary, rows=rows, config=config, caption=HOSTILE)
    (workdir / "metrics.jsonl").open("a").write(HOSTILE + "\n")
    raw = write_report(workdir).read_text()
    page = _Page(raw)
    _assert_self_contained(page, raw)
    assert "<script" not in raw
    assert page.text.count(HOSTILE) >= 24 + 7
    known = {"class", "id", "style", "role", "aria-label", "lang", "charset", "name", "content",
             "http-equiv", "href", "type", "colspan", "data-h", "aria-hidden", "transform"}  # fmt: skip
    geometry = {"viewbox", "d", "x", "y", "x1", "x2", "y1", "y2", "width", "height", "rx", "fill",
                "stroke", "stroke-width", "stroke-linecap", "stroke-linejoin", "opacity", "cx", "cy",
                "r", "preserveaspectratio", "clip-path"}  # fmt: skip
    assert {name for _, attrs in page.elements for name in attrs} <= known | geometry


PARTS = {
    "nothing": {},
    "config": {"config": True},
    "pretraining": {"config": True, "rows": 20},
    "training": {"config": True, "rows": 35, "before": True},
    "no summary": {"config": True, "rows": 53, "before": True, "after": True},
    "only after": {"after": True},
    "only summary": {"summary": True},
}


@pytest.mark.parametrize("name", PARTS)
def test_partial_runs(tmp_path, name):
    parts = PARTS[name]
    if parts.get("config"):
        (tmp_path / "config.json").write_text('{"train": {"steps": 30}, "pretrain": {"steps": 200}}')
    if rows := parts.get("rows"):
        lines = [json.dumps(row) for row in _metrics()[:rows]]
        (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    # An evaluation that was made its folder and nothing yet.
    (tmp_path / "eval" / "000000").mkdir(parents=True)
    for key, step in (("before", 0), ("after", 30)):
        if parts.get(key):
            _write_samples(tmp_path, step, ["one", "two"], channels=3)
    if parts.get("summary"):
        (tmp_path / "summary.json").write_text(json.dumps(_clean_summary()))
    raw = write_report(tmp_path).read_text()
    page = _Page(raw)
    _assert_self_contained(page, raw)
    verdicts = "Clean" if parts.get("summary") else "No verdict yet"
    assert verdicts in page.text
    assert ("No metrics yet" in page.text) == (not rows)
    assert ("No samples yet" in page.text) == (not parts.keys() & {"before", "after"})
    assert ("config.json is missing" in page.text) == (not parts.get("config"))
    if name == "pretraining":
        assert "Pre-training is at step 190 of 200." in page.text
    if name == "training":
        assert "Training is at update 14 of 30." in page.text
        assert "The evaluation after training has not been written." in page.text
    if name == "nothing":
        assert "Nothing has been measured yet." in page.text
    sheet = tmp_path / "samples" / "contact_sheet.png"
    assert sheet.exists() == bool(parts.keys() & {"before", "after"})


def test_not_a_directory(tmp_path):
    with pytest.raises(ValueError, match=r"workdir: .*nowhere.* is not a directory"):
        write_report(tmp_path / "nowhere")


def test_broken_metrics_lines_are_left_out_and_noted(tmp_path):
    workdir = _write_workdir(tmp_path, rows=[])
    lines = [json.dumps(row) for row in _metrics()]
    lines[3] = lines[3][:-9]
    lines += ["[1, 2]", '{"stage": "ddrl"}', '{"stage": "ddrl", "step": 29, "reward": NaN}']
    text = "\n".join([*lines, "", '{"stage": "ddrl", "st'])
    (workdir / "metrics.jsonl").write_bytes(text.encode() + b"\xff\xfe")
    run = read_run(workdir)
    assert run.notes == ("4 lines were left out of metrics.jsonl as unreadable (line 4, 54, 55, 58).",)
    assert len(run.stage("pretrain")) == 19
    # A step written twice counts once, as its later line, and NaN is a gap.
    assert len(run.stage("ddrl")) == 30
    assert run.stage("ddrl")[-1]["reward"] is None
    page = _Page(write_report(workdir).read_text())
    assert run.notes[0] in page.text
    assert "Not everything could be read" in page.text


def test_damaged_files_are_noted(tmp_path):
    workdir = _write_workdir(tmp_path, evals=())
    (workdir / "config.json").write_text("{")
    (workdir / "summary.json").write_text("[]")
    bad = {
        0: lambda path: path.write_bytes(b"PK\x03\x04 cut off"),
        30: lambda path: np.savez(path, video=np.zeros((2, 3, 4, 5, 2), np.uint8)),
    }
    for step, write in bad.items():
        folder = workdir / "eval" / f"{step:06d}"
        folder.mkdir(parents=True)
        write(folder / "samples.npz")
    run = read_run(workdir)
    assert [note.split(" ")[0].rstrip(":") for note in run.notes] == [
        "eval/000000/samples.npz", "eval/000030/samples.npz", "config.json", "summary.json",
    ]  # fmt: skip
    assert "No samples yet" in _Page(write_report(workdir).read_text()).text


def test_pickled_samples_are_refused(tmp_path):
    folder = tmp_path / "eval" / "000000"
    folder.mkdir(parents=True)
    np.savez(folder / "samples.npz", video=np.array([{"a": 1}], object), caption=np.array(["a"]))
    run = read_run(tmp_path)
    assert run.before is None
    assert "could not be read" in run.notes[0]


def test_pairs_follow_captions_when_the_order_differs(tmp_path):
    _write_samples(tmp_path, 0, ["a", "b", "b", "c"])
    _write_samples(tmp_path, 30, ["b", "c", "b", "d"])
    page = _Page(write_report(tmp_path).read_text())
    labels = [a["aria-label"] for _, a in page.elements if a.get("class", "").startswith("clip ")]
    assert labels[-6:] == [f"{side}: {c}" for c in "bbc" for side in ("before", "after")]


def test_large_videos_do_not_make_a_huge_page(tmp_path):
    rng = np.random.default_rng(0)
    for step in (0, 9):
        folder = tmp_path / "eval" / f"{step:06d}"
        folder.mkdir(parents=True)
        video = rng.integers(0, 256, (3, 12, 160, 256, 3), dtype=np.uint8)
        np.savez(folder / "samples.npz", video=video, caption=np.array(["a", "b", "c"]))
    page = write_report(tmp_path)
    assert page.stat().st_size < 3e6
    assert "image/jpeg" in page.read_text()
    with Image.open(tmp_path / "samples" / "after.gif") as image:
        assert (image.n_frames, image.size) == (12, (3 * 164 + 4, 100 + 8))
    frames, _ = _decode(tmp_path / "samples" / "after.mp4")
    assert {f.shape for f in frames} == {(160 + 8, 3 * 260 + 4, 3)}


def test_rows_with_gaps_and_single_points_draw(tmp_path):
    rows = [
        {"stage": "ddrl", "step": 0, "reward": None, "seconds": 1.0, "data_loss": 0.0},
        {"stage": "eval", "step": 0, "heldout_loss": 0.0, "reward": 1.0},
        {"stage": "pretrain", "step": 0, "loss": -1.0},
    ]
    workdir = _write_workdir(tmp_path, rows=rows, evals=())
    charts = {chart.name for chart in plots.curves(read_run(workdir))}
    assert charts == {"ddrl_loss", "pretrain_loss", "seconds"}


def test_charts_follow_the_page_and_leave_settings_alone():
    import matplotlib

    before = dict(matplotlib.rcParams)
    changes = read_changes(_hacked_summary())
    charts = plots.bars(changes)
    assert dict(matplotlib.rcParams) == before
    assert [c.name for c in charts] == ["sub_scores", "judges"]
    for chart in charts:
        assert "var(--ink)" in chart.svg
        assert not any(color in chart.svg for color in plots.COLORS.values())
        assert "<text" in chart.svg
        assert Image.open(io.BytesIO(chart.png)).format == "PNG"
    assert "var(--bad)" in charts[1].svg


def test_report_stands_apart():
    code = (
        "import sys, ddrl_jax.report as r; "
        "print([m for m in sys.modules if m.split('.')[0] in ('jax', 'torch', 'flax') "
        "or m.startswith('matplotlib.pyplot') "
        "or m.startswith('ddrl_jax.') and not m.startswith('ddrl_jax.report')])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
