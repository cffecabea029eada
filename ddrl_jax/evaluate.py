"""Evaluation: fixed prompts, fixed noise, rewards, judges the policy never sees, the held-out diffusion loss.

Sample i of an evaluation is a pure function of (eval.seed, i, parameters): the noise of a clip is drawn from its own
key, so before and after, another chunk size and another device count all look at the same draws, and every comparison
is paired. Judges: a net fitted on the "judge" scans (models.digit_judge), a Fréchet distance in its features, and the
diffusion loss on scans and prompts that training never sees. Of several processes each samples and sends its rows;
process 0 alone judges, decodes and writes, while the others wait for the numbers. Knows nothing of training.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from ddrl_jax import build, rewards, scoring
from ddrl_jax.config import ConfigError, check_same_run, to_json
from ddrl_jax.data.image_statistics import image_statistics
from ddrl_jax.data.video import write_mp4
from ddrl_jax.diffusion.loss import diffusion_loss
from ddrl_jax.diffusion.sampler import sample_each
from ddrl_jax.export import read_weights
from ddrl_jax.logbook import Logbook, read_metrics, write_text
from ddrl_jax.models.digit_judge import frechet_distance
from ddrl_jax.monitor import read_signals
from ddrl_jax.parallel import distributed
from ddrl_jax.rewards.mixing import scorer_of

HELDOUT_DRAWS = 4  # noise levels a held-out clip
SHOWN = 64  # clips kept on disk for the report, fewer of large ones ...
THUMBNAIL = 320  # ... each edge of so many pixels at most
_SHOWN_BYTES, _DECODED_BYTES = 256 << 20, 512 << 20
LABELS = {
    "reward": "Reward",
    "judge_digit": "Judge reads the digit",
    "judge_direction": "Judge reads the motion",
    "ocr/text": "OCR reads the letters",
    "ocr/confidence": "OCR's confidence",
    "judge/ocr_judge/text": "Judge's OCR reads the letters",
    "judge/ocr_judge/exact": "Judge's OCR reads the word",
    "frechet": "Fréchet distance to real clips",
    "heldout_loss": "Held-out diffusion loss (relative)",
}


class Evaluator:
    """Evaluates parameters; holds the fitted judge, the real clips' features and the compiled sampler."""

    def __init__(
        self, config: ConfigDict, setup: build.Setup, client: rewards.RewardClient, workdir: Path, book: Logbook
    ) -> None:
        self.config, self.setup, self.client, self.book = config, setup, client.with_judges(), book
        self.folder = workdir / "eval"
        self._key = jax.random.key(config.eval.seed)
        self._denoise, self._process = build.evaluation(config, setup)
        count, data = config.eval.clips, build.data_set(config)
        try:
            self._prompts = data.evaluation_prompts(count)
        except ValueError as error:
            field = f"config.eval.prompts={config.eval.prompts!r}: " if config.eval.prompts else "config."
            raise ConfigError(f"{field}{error}") from error
        # What the noise of a sample is drawn by: its place in the list, or what the data set names it by.
        self._ids = np.asarray(self._prompts.pop("id", np.arange(count)), np.uint32)
        # One list of clips serves both: its first ones are what a shorter list would hold.
        heldout = data.heldout_clips(max(count, config.eval.heldout_clips))
        latents = setup.latents(heldout)

        def judge() -> None:
            with book.working("judge: made of clips of its own"):
                seed, steps = config.eval.seed, config.eval.judge_steps
                self._judge = data.judge(workdir / "judge.npz", seed=seed, steps=steps, say=book.say)
            real = {name: column[:count] for name, column in heldout.items()}
            values, self._real_features = self._judge(real.get("video"), latents[:count], real)
            for name, value in values.items():
                book.say(f"{name}: {value.mean():.1%} of {len(value)} real held-out clips")

        distributed.primary(judge)
        self._heldout_x0 = latents[: config.eval.heldout_clips]
        self._heldout_captions = heldout["caption"][: config.eval.heldout_clips]
        # Of clips that come in several shapes the held-out ones have the most common one, and so have the samples.
        self._shape = self._heldout_x0.shape[1:]
        self._first_NCHW = self._first_frames()
        self._chunk = build.chunk(config, setup.mesh)
        self._sample, self._loss = jax.jit(self._sample_chunk), jax.jit(self._loss_chunk)

    def _first_frames(self) -> np.ndarray | None:
        """Latents (N, C, h, w) of the prompts' first frames, NaN where a prompt has none; None where all have none."""
        given = self._prompts.get("first")
        if given is None or all(first is None for first in given):
            return None
        C, _, h, w = self._shape
        frames = np.full((len(given), C, h, w), np.nan, np.float32)
        for row, first in zip(frames, given, strict=True):
            if first is not None and first.dtype == np.uint8:  # a picture
                pixels = np.moveaxis(first.astype(np.float32) / 127.5 - 1.0, -1, 0)
                first = self.setup.codec.encode(pixels[None, :, None])[0, :, 0]
            if first is not None:
                row[...] = first
        return frames

    def _condition(self, rows: np.ndarray, chunk: int) -> dict[str, Any]:
        """The condition of prompts `rows`, this process's of a chunk: their text, and their first frames where they
        have one."""
        captions = [self._prompts["caption"][i] for i in rows]
        if self._first_NCHW is None:
            return self.setup.condition(captions, count=chunk)
        x0_BCTHW = np.zeros((len(rows), *self._shape), np.float32)
        first_BCHW = self._first_NCHW[rows]
        given_B = np.isfinite(first_BCHW).all(axis=(1, 2, 3))
        x0_BCTHW[given_B, :, 0] = first_BCHW[given_B]
        return self.setup.condition(captions, build.to_global(self.setup.mesh, x0_BCTHW, chunk), given_B, chunk)

    # ---------------------------------------------------------------------------------------- jitted

    def _sample_chunk(self, params: Any, index_B: jax.Array, cond: dict[str, Any]) -> jax.Array:
        """Clips `index_B` of the evaluation -> latents (B, C, T, h, w)."""
        return sample_each(
            params,
            jax.vmap(lambda i: jax.random.fold_in(self._key, i))(index_B),
            cond,
            denoise=self.setup.guided(self._denoise, self.config.eval.guidance),
            process=self._process,
            shape=self._shape,
            num_steps=self.config.eval.num_steps,
        )

    def _loss_chunk(self, params: Any, index_B: jax.Array, x0_BX: jax.Array, cond: dict[str, Any]) -> jax.Array:
        """Weighted diffusion loss (B,) of held-out clips, averaged over HELDOUT_DRAWS levels of the training law."""
        process = self._process
        keys = jax.vmap(lambda i: jax.random.fold_in(self._key, i))(index_B)

        def draw(d: jax.Array) -> jax.Array:
            k = jax.vmap(lambda key: jax.random.split(jax.random.fold_in(key, d)))(keys)
            sigma_B = jax.vmap(lambda key: process.draw_sigma(key, ()))(k[:, 0])
            noise_BX = jax.vmap(lambda key: jax.random.normal(key, x0_BX.shape[1:]))(k[:, 1])
            return diffusion_loss(
                params,
                x0_BX,
                cond,
                sigma_B,
                noise_BX,
                denoise=self._denoise,
                process=process,
            )

        return jnp.mean(jax.lax.map(draw, jnp.arange(HELDOUT_DRAWS)), axis=0)

    def _in_chunks(
        self,
        title: str,
        count: int,
        call: Callable[..., jax.Array],
        inputs: Callable[[np.ndarray], tuple],
        then: Callable[[jax.Array, np.ndarray], None] | None = None,
        ids: np.ndarray | None = None,
    ) -> np.ndarray:
        """`call(id or index, *inputs(own rows))` over equal chunks, the last one padded -> all rows, on process 0;
        `then` sees each chunk, on the devices, and its rows."""
        size, parts, mesh = self._chunk, [], self.setup.mesh
        own = build.own_rows(mesh, size)
        with self.book.progress(title, count) as advance:
            for start in range(0, count, size):
                rows = np.minimum(np.arange(start, start + size), count - 1)
                index_B = build.to_global(mesh, rows if ids is None else ids[rows])
                part = call(index_B, *inputs(rows[own]))
                if then is not None:
                    then(part, rows)
                here = distributed.to_host(part)[: count - start]
                # The others let it go: a thousand clips of 720p are 23 GB.
                parts.append(here if distributed.is_primary() else here[:0])
                advance(len(here))
        return np.concatenate(parts)

    # ------------------------------------------------------------------------------------------ call

    def __call__(self, params: Any, step: int, *, full: bool) -> dict[str, float]:
        """Evaluates and returns the metrics of its line in metrics.jsonl, over the first eval.clips_during clips (the
        Fréchet distance over all). `full` (before and after) takes eval.clips and leaves eval/<step>/ on disk."""
        config, setup = self.config.eval, self.setup
        count = config.clips if full else config.clips_during
        captions = self._prompts["caption"][:count]
        asked: list[scoring.Asked] = []
        latents = self._in_chunks(
            f"evaluation at {step}",
            count,
            lambda i, c: self._sample(params, i, c),
            lambda rows: (setup.spread(self._condition(rows, self._chunk)),),
            ids=self._ids,
            # Sent at once: the sidecar scores this chunk while the next one is sampled.
            then=lambda x0, rows: asked.append(
                scoring.ask(self.client, setup.mesh, x0, lambda i: captions[rows[i]], rows[-1] + 1 - rows[0])
            ),
        )
        heldout = self._in_chunks(
            f"held-out loss at {step}",
            len(self._heldout_x0),
            lambda i, x, c: self._loss(params, i, x, c),
            lambda rows: (
                build.to_global(setup.mesh, self._heldout_x0[rows], self._chunk),
                setup.spread(setup.condition([self._heldout_captions[i] for i in rows], count=self._chunk)),
            ),
        )
        got = rewards.joined([batch.result() for batch in asked])
        return distributed.primary(lambda: self._measure(step, latents, heldout, got, captions, full))

    def _measure(
        self, step: int, latents: np.ndarray, heldout: np.ndarray, got: rewards.Scores, captions: list[str], full: bool
    ) -> dict[str, float]:
        """The metrics of samples (count, C, T, h, w), their scores and the held-out losses; process 0's work."""
        config, count = self.config.eval, len(latents)
        finite = np.isfinite(latents).all(axis=(1, 2, 3, 4))
        judged, features, looks, pixels = self._look(step, np.nan_to_num(latents), write=full)
        reward, valid = scoring.total_reward(got, self.config)
        reward = np.where(valid, reward, np.nan)
        weights = self.config.reward.weights.to_dict()
        obeyed = {scorer_of(n) for n, w in weights.items() if w} | set(map(scorer_of, self.config.reward.gates))
        judges = set(map(scorer_of, weights)) - obeyed
        values = {
            "reward": reward,
            **{f"judge/{n}" if scorer_of(n) in judges else n: v for n, v in sorted(got.scores.items())},
            **{name: np.where(finite, v, np.nan) for name, v in judged.items()},
        }
        if not finite.all():
            self.book.say(f"evaluation at {step}: {int((~finite).sum())} of {count} samples are not finite")
        metrics = {name: _mean(v) for name, v in values.items()} | {"heldout_loss": _mean(heldout)}
        metrics |= {f"image/{name}": _mean(np.where(finite, v, np.nan)) for name, v in looks.items()}
        if full:
            features = np.where(finite[:, None], features, np.nan)
            metrics["frechet"] = _frechet(features, self._real_features)
            self._write(step, captions, values, metrics, heldout, features, pixels)
            # The curve is one of the same clips all along: a jump at its ends would look like a change.
            few = config.clips_during
            curve = {name: _mean(v[:few]) for name, v in values.items()}
            curve |= {f"image/{name}": _mean(np.where(finite, v, np.nan)[:few]) for name, v in looks.items()}
        if got.reason:
            self.book.say(f"evaluation at {step}: {int(np.isnan(reward).sum())} rewards invalid: {got.reason}")
        shown = ("reward", *(n for n in values if n.startswith("judge")), "frechet", "heldout_loss")
        self.book.say(f"evaluation at {step}: " + "  ".join(f"{n} {metrics[n]:.4g}" for n in shown if n in metrics))
        return metrics | curve if full else metrics

    def _look(
        self, step: int, latents: np.ndarray, *, write: bool
    ) -> tuple[dict[str, np.ndarray], np.ndarray, dict[str, np.ndarray], np.ndarray]:
        """What the judges and the image statistics see in samples, their features, and pixels for the report: uint8
        (n, T, H, W, C), made small. Samples are decoded a few at a time: one of 93 frames of 720p has a gigabyte. Those
        of videos are also left as MP4 files, whole, where `write`."""
        asked = {name: column[: len(latents)] for name, column in self._prompts.items()}
        size = max(
            jax.local_device_count(), _DECODED_BYTES // (4 * math.prod(self.setup.codec.video_shape(latents.shape[1:])))
        )
        folder, videos = self.folder / f"{step:06d}" / "videos", self.config.data.name == "videos"
        judged, features, looks = [], [], []
        shown: list[np.ndarray] = []
        with self.book.progress(f"decoding at {step}", len(latents)) as advance:
            for start in range(0, len(latents), size):
                rows = slice(start, min(start + size, len(latents)))
                video = np.clip(self.setup.codec.decode(latents[rows]), -1.0, 1.0)
                part, seen = self._judge(video, latents[rows], {name: column[rows] for name, column in asked.items()})
                judged.append(part)
                features.append(seen)
                looks.append(image_statistics(video))
                pixels = np.rint((np.moveaxis(video, 1, -1) + 1) * 127.5).astype(np.uint8)
                if write and videos:
                    for i, clip in enumerate(pixels, start):
                        folder.mkdir(parents=True, exist_ok=True)
                        write_mp4(folder / f"{i:04d}.mp4", clip, self.config.data.fps)
                if start < SHOWN and sum(p.nbytes for p in shown) < _SHOWN_BYTES:
                    # Every n-th pixel: the report's clips are thumbnails, the MP4 files are whole.
                    step_px = -(-max(pixels.shape[2:4]) // THUMBNAIL)
                    shown.append(pixels[: SHOWN - start, :, ::step_px, ::step_px])
                advance(len(video))

        def joined(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
            return {name: np.concatenate([p[name] for p in parts]) for name in parts[0]}

        return joined(judged), np.concatenate(features), joined(looks), np.concatenate(shown)

    def _write(
        self,
        step: int,
        captions: list[str],
        values: dict[str, np.ndarray],
        metrics: dict[str, float],
        heldout: np.ndarray,
        features: np.ndarray,
        shown: np.ndarray,
    ) -> None:
        folder = self.folder / f"{step:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        np.savez(folder / "features.npz", generated=features, real=self._real_features)
        np.savez(folder / "samples.npz", video=shown, caption=np.array(captions[: len(shown)]))
        record = {
            "step": step,
            "metrics": {n: _json(v) for n, v in metrics.items()},
            "prompts": captions,
            "per_clip": {n: [_json(x) for x in v] for n, v in values.items()},
            "heldout_loss_per_clip": [_json(x) for x in heldout],
        }
        # Last, and by a rename: eval.json says that the evaluation is whole.
        write_text(folder / "eval.json", json.dumps(record))


def _frechet(generated_NF: np.ndarray, real_MF: np.ndarray) -> float:
    """The Fréchet distance of the finite rows, NaN where fewer than two are, or fewer than two are real."""
    rows = generated_NF[np.isfinite(generated_NF).all(1)]
    return frechet_distance(rows, real_MF) if min(len(rows), len(real_MF)) >= 2 else float("nan")


def _mean(values: np.ndarray) -> float:
    return float(np.nanmean(values)) if np.isfinite(values).any() else float("nan")


def _stopped(workdir: Path) -> dict[str, Any]:
    """What the monitor left where it ended the run, else {}."""
    path = workdir / "stopped.json"
    return json.loads(path.read_text()) if path.exists() else {}


def _json(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None


# ------------------------------------------------------------------------------------- before against after


def compare(before: Path, after: Path, *, resamples: int = 2000, seed: int = 0) -> list[dict[str, Any]]:
    """Change of every quantity between two evaluations of the same prompts and noise, with a 95 % interval.

    The intervals are percentile bootstraps over *prompts* (clips of one prompt are resampled together) of the paired
    differences; the Fréchet distance is computed anew on each resample (a fifth as many), its draws corrected for their
    bias. Held-out loss: over clips, as a fraction of the loss before. Variance between training seeds is not in them.

    Returns:
      [{"name", "label", "kind": reward|sub|judge|loss, "mean", "low", "high", "n", "better": up|down}]; n counts
      prompts, or held-out clips.
    """
    first, last = (json.loads((p / "eval.json").read_text()) for p in (before, after))
    if first["prompts"] != last["prompts"]:
        raise ValueError(f"{before} and {after} evaluated different prompts; a paired comparison needs the same")
    rng = np.random.default_rng(seed)
    prompts, prompt_of = np.unique(first["prompts"], return_inverse=True)
    draws_RP = rng.integers(len(prompts), size=(resamples, len(prompts)))
    changes = []
    for name in first["per_clip"]:
        if name not in last["per_clip"]:
            continue
        pair = (np.array(e["per_clip"][name], np.float64) for e in (first, last))
        difference = np.subtract(*reversed(list(pair)))
        ok = np.isfinite(difference)
        total_P = np.bincount(prompt_of, np.where(ok, difference, 0.0), len(prompts))
        count_P = np.bincount(prompt_of, ok, len(prompts))
        if not ok.any():
            continue
        means = total_P[draws_RP].sum(1) / np.maximum(count_P[draws_RP].sum(1), 1)
        kind = "reward" if name == "reward" else "judge" if name.startswith("judge") else "sub"
        changes.append(_change(name, kind, difference[ok].mean(), means, int((count_P > 0).sum()), "up"))

    features = [np.load(p / "features.npz", allow_pickle=False) for p in (before, after)]
    real, generated = features[0]["real"], [f["generated"] for f in features]
    by_prompt = [np.flatnonzero(prompt_of == p) for p in range(len(prompts))]

    def frechet_change(rows: np.ndarray) -> float:
        return _frechet(generated[1][rows], real) - _frechet(generated[0][rows], real)

    boot = [frechet_change(np.concatenate([by_prompt[p] for p in draw])) for draw in draws_RP[: resamples // 5]]
    point = frechet_change(np.arange(len(prompt_of)))
    # A resample repeats prompts, which inflates the distance, and more so the farther a set is from the real one: its
    # draws lie above the estimate. Shifted by that bias (Efron & Tibshirani 1993, ch. 10), they lie around it.
    draws = np.array(boot) - np.mean(boot) + point
    changes.append(_change("frechet", "judge", point, draws, len(prompts), "down"))

    a, b = (np.array(e["heldout_loss_per_clip"], np.float64) for e in (first, last))
    rows = rng.integers(len(a), size=(resamples, len(a)))
    relative = b[rows].mean(1) / a[rows].mean(1) - 1
    changes.append(_change("heldout_loss", "loss", b.mean() / a.mean() - 1, relative, len(a), "down"))
    return changes


def _change(name: str, kind: str, mean: float, draws: np.ndarray, n: int, better: str) -> dict[str, Any]:
    low, high = np.percentile(draws, [2.5, 97.5])
    label = LABELS.get(name, name.rsplit("/", 1)[-1].replace("_", " ").capitalize())
    return {
        "name": name,
        "label": label,
        "kind": kind,
        "mean": _json(mean),
        "low": _json(low),
        "high": _json(high),
        "n": n,
        "better": better,
    }


def summarise(config: ConfigDict, workdir: Path, *, config_file: str, arguments: list[str]) -> dict[str, Any]:
    """Writes summary.json, what the report is made of: before, after, changes, the hacking signals.

    `arguments` of this call; the command that makes the run again has its final number of steps and trains.
    """
    folders = sorted(p.parent for p in (workdir / "eval").glob("*/eval.json"))
    evaluations = [json.loads((p / "eval.json").read_text()) for p in folders]
    if folders and int(folders[0].name) != 0:
        print(f"eval/000000 is gone: {folders[0].name} stands for the state before")
    lines, stopped = read_metrics(workdir / "metrics.jsonl"), _stopped(workdir)
    if stopped.get("action") == "rollback":
        # The run is what is left of it; what was rolled back is evidence in stopped.json.
        end = stopped["ended_at"]
        lines = [m for m in lines if m["stage"] == "pretrain" or m["step"] < end + (m["stage"] == "eval")]
    ddrl = [m for m in lines if m["stage"] == "ddrl"]

    def column(rows: list[dict], name: str) -> np.ndarray:
        return np.array([np.nan if m.get(name) is None else m[name] for m in rows], np.float64)

    steps = max((m["step"] + 1 for m in ddrl), default=0)
    again = [a for a in arguments if not a.startswith(("--mode", "--config.train.steps="))]
    if again != arguments or steps != config.train.steps:
        again.append(f"--config.train.steps={steps}")
    signals = read_signals(lines, config.monitor, config.reward.weights.to_dict()) if len(folders) > 1 else []
    device = jax.devices()[0]
    summary = {
        "title": f"{config.objective.name} on {build.data_set(config).title}",
        "config_file": config_file,
        "command": shlex.join(["python", "-m", "ddrl_jax.main", *again]),
        "run": {
            "method": config.objective.name,
            "steps": steps,
            "rollouts": config.rollout.conditions * config.rollout.group_size,
            "seconds": float(np.nansum(column(lines, "seconds"))),
            "hardware": f"{jax.device_count()} x {device.device_kind}",
            "seed": config.seed,
        },
        "before": evaluations[0]["metrics"] if evaluations else {},
        "after": evaluations[-1]["metrics"] if len(evaluations) > 1 else {},
        "changes": compare(folders[0], folders[-1]) if len(folders) > 1 else [],
        "signals": [{**vars(s), "value": _json(s.value)} for s in signals],
        "stopped": stopped,
    }
    write_text(workdir / "summary.json", json.dumps(summary, indent=1))
    return summary


def run(config: ConfigDict, workdir: Path) -> bool:
    """`--mode=eval`: the newest checkpoint of a run, evaluated in full and written to eval/<step>/; in a workdir
    without a run, model.checkpoint, as step 0 of the run that may be trained there."""
    for line in distributed.primary(lambda: check_same_run(config, workdir)):
        if distributed.is_primary():
            print(line)
    build.same_run(config, workdir)
    files = (workdir / "config.json", workdir / "checkpoints/ddrl")
    started, trained = distributed.primary(lambda: [file.exists() for file in files])
    if not started and not config.model.checkpoint:
        raise ConfigError(f"workdir={str(workdir)!r}: holds no run to evaluate; train one there first")
    setup = build.build(config)
    if trained or not config.model.checkpoint:
        step, params = read_weights(config, workdir, "ema" if config.eval.ema and config.train.ema_rate > 0 else "raw")
        if config.lora.rank > 0:  # `read_weights` has compared its base
            params = build.with_base(config, setup, build.pretrained_params(config, setup.mesh)).network(params)
    else:
        step, params = 0, build.init_params(config, setup.mesh, key=None)
    probe, lock = scoring.probe(config, setup), build.own_workdir(workdir)
    book = build.logbook(config, workdir)
    try:
        with scoring.open_rewards(config, setup.text, workdir, book, probe) as client:
            if not started:
                distributed.primary(lambda: write_text(workdir / "config.json", to_json(config)))
            metrics = Evaluator(config, setup, client, workdir, book)(params, step, full=True)
            book.forget_from("eval", step)
            book.write("eval", step, metrics)
    finally:
        book.close()
        lock.close()
    return True
