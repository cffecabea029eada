"""--mode=prepare: synthetic clips of the base model, as data for the diffusion loss (paper, Table 4).

The base's samples stand in for real clips: captions as training meets them, latents drawn with the base's EMA weights,
decoded and stored as `data.digits.load_clips` reads them, so that `--config.data.path` trains on them. Sample i is a
pure function of (seed, i, parameters): neither eval.chunk nor the number of devices matters, beyond float rounding.
Knows nothing of rewards or evaluations.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict
from PIL import Image, ImageDraw, ImageFont

from ddrl_jax import build, train
from ddrl_jax.config import ConfigError, check_same_run
from ddrl_jax.data import digits
from ddrl_jax.diffusion.sampler import sample_each
from ddrl_jax.logbook import Logbook

STREAM = 1000  # of random numbers, apart from the trainer's, which count from 0
RECORD = "synthetic.json"
SHEET = "sheet.png"
SHOWN = 48  # clips on the sheet


def run(config: ConfigDict, workdir: Path, *, arguments: Sequence[str] = ()) -> bool:
    """Writes prepare.clips synthetic clips to prepare.out, or to `workdir`/synthetic where that is "".

    The folder is there whole or not at all: clips.npz, the record of how they were made (synthetic.json) and a picture
    of the first ones (sheet.png). Nothing of a run is written to. A call that finds the same clips there makes none.

    Args:
      config: validated. The base is pretrain.from_run (and from_stage), or `workdir`'s own finished pre-training;
        the sampler is config.process with eval.num_steps.
      workdir: holds the base's run, or, with pretrain.from_run, need not exist.
      arguments: of this call, for the record and the next command.

    Returns:
      False when SIGTERM or Ctrl-C ended it early: nothing is written then, and the same call starts again.

    Raises:
      ConfigError: no base, `out` holds something else, or data that are rendered only. RunStopped: a sample is not
        finite.
    """
    if config.data.name == "words":
        raise ConfigError(
            f"config.data.name={config.data.name!r}: must be 'digits'; others cannot train on stored clips"
        )
    for line in check_same_run(config, workdir):
        print(line)
    out = Path(config.prepare.out) if config.prepare.out else workdir / "synthetic"
    _check_folder(out)
    base = _base_of(config, workdir)
    train.check_base(base)
    setup = build.build(config)
    batches = train.clip_dataset(config, setup.mesh, build.chunk(config, setup.mesh))
    book = Logbook(workdir, primary=jax.process_index() == 0, tensorboard=False)
    params = train.load_base(base, setup, book)
    record = _record(config, base, params)
    if (out / RECORD).exists():
        _check_same_clips(out, record)
        book.say(f"{out}: holds these {config.prepare.clips} clips already")
    else:
        clips = _sample(config, setup, params, batches, book)
        if clips is None:
            return False
        command = shlex.join(["python", "-m", "ddrl_jax.main", *arguments])
        _write(out, clips, record | {"command": command})
        book.say(f"synthetic clips: {out / digits.CLIPS_FILE}, the first {min(SHOWN, len(clips))} in {out / SHEET}")
    book.say("train on them: " + _next_command(arguments, base, workdir, out))
    return True


# ------------------------------------------------------------------------------------------------ the samples


def _sample(
    config: ConfigDict, setup: build.Setup, params: Any, batches: Any, book: Logbook
) -> digits.StoredClips | None:
    """Clips 0 .. prepare.clips-1, or None when asked to stop.

    Batch n of the training clips has rows n*chunk .. (n+1)*chunk-1 of one stream, whatever the chunk: clip i has row
    i's caption, and the digit and direction that it asks for.
    """
    count, size = config.prepare.clips, build.chunk(config, setup.mesh)
    draw = sampler(config, setup)
    videos, captions, digit, direction = [], [], [], []
    book.say(f"synthetic clips: {count}, {config.eval.num_steps} steps of {config.process.name}")
    with train.interrupts() as stop, book.progress("synthetic clips", count) as advance:
        for start in range(0, count, size):
            if stop():
                book.say(f"stopped after {start} of {count} clips; nothing is written, the same command starts again")
                return None
            # The last chunk has rows that nobody asked for, so that one program draws all.
            asked, kept = batches[start // size], slice(0, count - start)
            index_B = build.to_global(setup.mesh, np.arange(start, start + size))
            x0_BX = np.asarray(draw(params, index_B, setup.condition(asked["caption"])))[kept]
            broken = int((~np.isfinite(x0_BX).all(axis=(1, 2, 3, 4))).sum())
            if broken:
                raise train.RunStopped(
                    f"{broken} of clips {start} to {start + len(x0_BX) - 1} are not finite, and nothing is written; "
                    "the base, config.process or config.prepare.guidance is at fault"
                )
            video_BCTHW = np.clip(setup.codec.decode(x0_BX), -1.0, 1.0)
            videos.append(np.rint((np.moveaxis(video_BCTHW, 1, -1) + 1) * 127.5).astype(np.uint8))
            captions += asked["caption"][kept]
            digit.append(asked["digit"][kept])
            direction.append(asked["direction"][kept])
            advance(len(x0_BX))
    return digits.StoredClips(np.concatenate(videos), np.concatenate(digit), np.concatenate(direction), captions)


def sampler(config: ConfigDict, setup: build.Setup) -> Callable[..., jax.Array]:
    """(params, index (B,), condition) -> latents (B,C,T,h,w); each sample's noise is drawn from its own key."""
    key = jax.random.fold_in(jax.random.key(config.seed), STREAM)

    @jax.jit
    def draw(params: Any, index_B: jax.Array, cond: dict[str, Any]) -> jax.Array:
        return sample_each(
            params,
            jax.vmap(lambda i: jax.random.fold_in(key, i))(index_B),
            cond,
            denoise=setup.guided(setup.denoise, config.prepare.guidance),
            process=setup.process,
            shape=setup.latent_shape,
            num_steps=config.eval.num_steps,
        )

    return draw


# -------------------------------------------------------------------------------------- the base and the folder


def _base_of(config: ConfigDict, workdir: Path) -> ConfigDict:
    """The config whose pretrain.from_run is the run to sample from."""
    if config.pretrain.from_run:
        return config
    if not (workdir / "config.json").exists():
        raise ConfigError(
            f"workdir={str(workdir)!r}: holds no run to sample from; train one there first (--config.train.steps=0 "
            "ends after pre-training), or name one with --config.pretrain.from_run=RUN"
        )
    base = config.copy_and_resolve_references()
    base.pretrain.from_run, base.pretrain.from_stage = str(workdir), "pretrain"
    return base


def _check_folder(out: Path) -> None:
    """Raises ConfigError unless `out` is missing and can be made, is empty, or holds what an earlier call wrote."""
    field = f"config.prepare.out={str(out)!r}"
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{field}: is a file; it must be a folder that is new or empty")
    if out.is_dir() and any(out.iterdir()) and not (out / RECORD).is_file():
        raise ConfigError(f"{field}: holds something else; it must be a folder that is new or empty")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{field}: cannot be made ({error.strerror}); take another folder") from error
    if not os.access(out.parent, os.W_OK):
        raise ConfigError(f"{field}: no permission to write to {out.parent}; take another folder")


def _record(config: ConfigDict, base: ConfigDict, params: Any) -> dict[str, Any]:
    """What the clips are a function of, as JSON, and where the base came from."""
    run, stage = Path(base.pretrain.from_run).absolute(), base.pretrain.from_stage
    weights = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        weights.update(np.asarray(leaf).tobytes())
    return {
        "base": str(run),
        "stage": stage,
        "step": max(int(p.name) for p in (run / "checkpoints" / stage).iterdir() if p.name.isdigit()),
        "weights": weights.hexdigest()[:16],
        "clips": config.prepare.clips,
        "guidance": config.prepare.guidance,
        "seed": config.seed,
        "num_steps": config.eval.num_steps,
        "process": {name: value for name, value in config.process.items() if value is not None},
        "data": config.data.to_dict(),  # whose captions
        "codec": config.codec.to_dict(),
    }


def _check_same_clips(out: Path, record: dict[str, Any]) -> None:
    """Raises ConfigError where `out` holds clips that were made otherwise; the first difference is named."""
    field = f"config.prepare.out={str(out)!r}"
    try:
        there = json.loads((out / RECORD).read_text())
        digits.load_clips(out)
    except ValueError as error:
        raise ConfigError(f"{field}: holds damaged clips ({error}); remove it, or take another folder") from error
    for name, value in record.items():
        # A run that was moved is the same base.
        if name != "base" and there.get(name) != value:
            raise ConfigError(
                f"{field}: holds other clips, whose {name} is {there.get(name)!r} and not {value!r}; "
                "remove it, or take another folder"
            )


def _write(out: Path, clips: digits.StoredClips, record: dict[str, Any]) -> None:
    """All files in a folder beside `out`, which then takes its name."""
    part = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
    try:
        digits.save_clips(part, clips)
        (part / RECORD).write_text(json.dumps(record, indent=1) + "\n")
        _sheet(clips.video[:SHOWN], clips.caption[:SHOWN]).save(part / SHEET)
        part.chmod(0o755)
        part.rename(out)  # onto an empty folder too
    except BaseException as error:
        shutil.rmtree(part)
        if isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise ConfigError(f"config.prepare.out={str(out)!r}: another call wrote there meanwhile") from error
        raise


def _sheet(video_NTHWC: np.ndarray, captions: Sequence[str], *, columns: int = 4, side: int = 48) -> Image.Image:
    """A picture of clips: each its frames in a row, enlarged by a whole factor, over its caption."""
    n, frames, height, width, channels = video_NTHWC.shape
    scale, gap, line = max(1, side // max(height, width)), 12, 16
    rows_NHWC = video_NTHWC.transpose(0, 2, 1, 3, 4).reshape(n, height, frames * width, channels)
    rows_NHWC = rows_NHWC.repeat(scale, axis=1).repeat(scale, axis=2)
    font = ImageFont.load_default(size=11)
    cell = max([rows_NHWC.shape[2], *(int(font.getlength(text)) + 1 for text in captions)]) + gap
    row = rows_NHWC.shape[1] + line + gap
    columns = min(columns, n)
    sheet = Image.new("RGB", (columns * cell + gap, -(-n // columns) * row + gap), "white")
    draw = ImageDraw.Draw(sheet)
    for i, (picture, text) in enumerate(zip(rows_NHWC, captions, strict=True)):
        x, y = gap + i % columns * cell, gap + i // columns * row
        sheet.paste(Image.fromarray(picture[..., 0] if channels == 1 else picture), (x, y))
        draw.text((x, y + picture.shape[0] + 2), text, "black", font)
    return sheet


def _next_command(arguments: Sequence[str], base: ConfigDict, workdir: Path, out: Path) -> str:
    """The command of this call as a training on the clips: another workdir, whose run starts from the same base."""
    changed = ("--mode", "--workdir", "--config.prepare.", "--config.pretrain.from_run", "--config.data.path")
    kept = [a for a in arguments if not a.startswith(changed) and a != "--config.train.steps=0"]
    kept += [f"--config.pretrain.from_run={base.pretrain.from_run}", f"--config.data.path={out}"]
    return shlex.join(["python", "-m", "ddrl_jax.main", *kept, f"--workdir={workdir}-synthetic"])
