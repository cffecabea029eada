"""--mode=prepare for videos: a folder of captioned videos, or a list of prompts, -> the latents that training reads.

Videos are decoded ahead in threads, encoded with the VAE and stored with their captions (`data.latent_cache`); what
cannot be used is reported and skipped. Prompts instead of videos are answered by the base model: synthetic data for the
diffusion loss (paper, Table 4), sample i a pure function of (seed, i, parameters). With text_encoder.where=cached the
captions' features are stored too. A call that was stopped goes on where it was; training makes what is missing itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from ddrl_jax import build, scoring, train
from ddrl_jax.config import ConfigError, check_same_run, get
from ddrl_jax.data import source, video_folder
from ddrl_jax.data.latent_cache import CacheWriter, LatentCache
from ddrl_jax.logbook import Logbook
from ddrl_jax.parallel import distributed
from ddrl_jax.prepare import sampler

SHARD_BYTES = 256 << 20


def run(config: ConfigDict, workdir: Path, *, arguments: Sequence[str] = ()) -> bool:
    """Prepares into prepare.out, or into data.path where that is "". Returns False when it was stopped.

    Raises:
      ConfigError: no videos, no usable one, another cache there, weights that do not fit.
    """
    del arguments  # what was made is recorded by its fingerprint
    build.one_process("making the latents (--mode=prepare)")
    out = Path(config.prepare.out or config.data.path)
    fields = ["model.checkpoint"] if config.prepare.prompts else ["data.path"]
    _check_files(config, "codec.path", *fields)
    _asked(config)
    if config.text_encoder.where == "cached" or config.prepare.prompts:
        build.check_text_files(config)
    workdir.mkdir(parents=True, exist_ok=True)
    field = "config.prepare.out" if config.prepare.out else "config.data.path"
    lock = build.own_folder(out, field, "; take another folder with --config.prepare.out")
    book = Logbook(workdir, primary=jax.process_index() == 0, tensorboard=False)
    try:
        with train.interrupts() as stop:
            make = _synthesise if config.prepare.prompts else _encode
            if not make(config, out, book, stop):
                return False
            try:
                LatentCache(out / source.LATENTS)
            except ValueError as error:
                again = f"remove {out / source.LATENTS} and run --mode=prepare again"
                raise ConfigError(f"config.{error}; {again}") from error
            if config.text_encoder.where == "cached" and not _embed(config, out, book, stop):
                return False
        book.say(f"prepared: {out / source.LATENTS}; training reads it with --config.data.path={out}")
        return True
    except ValueError as error:
        raise error if isinstance(error, ConfigError) else ConfigError(f"config.{error}") from error
    finally:
        book.close()
        lock.close()


def ensure(config: ConfigDict, workdir: Path) -> bool:
    """At the start of training: prepares data.path unless it is prepared. Returns False when it was stopped.

    What can be found out at once is found out before: encoding takes hours.
    """
    check_same_run(config, workdir)
    build.make_mesh(config)
    _check_files(config, "codec.path", "model.checkpoint", "data.path")
    _asked(config)
    if config.text_encoder.where != "sidecar" or config.reward.launch:
        build.check_text_files(config)
    if config.reward.launch:
        scoring.check_sidecar(config)
    try:
        cache = LatentCache(Path(config.data.path) / source.LATENTS, fingerprint=build.latent_fingerprint(config))
    except ValueError as error:
        if not (Path(config.data.path) / "videos").is_dir():
            raise ConfigError(
                f"config.{error}; config.data.path={config.data.path!r} has no videos/ to make it of either"
            ) from error
        return run(_here(config), workdir)
    known = {*cache.names, *(name for name, _ in cache.skipped)}
    new = sum(f.stem not in known for f in (Path(config.data.path) / "videos").glob("[!.]*.*"))
    if new and distributed.is_primary():
        print(f"{config.data.path}: {new} videos are not in {source.LATENTS}/ yet; --mode=prepare adds them")
    if config.text_encoder.where == "cached":
        features = build.text_cache(config)
        if features.missing([*cache.captions, *_asked(config)]):
            return run(_here(config), workdir)
    return True


def _check_files(config: ConfigDict, *fields: str) -> None:
    """Raises ConfigError unless what the fields name, where they name something, is there; opens nothing."""
    for field in fields:
        path = get(config, field)
        if path and not Path(path).exists():
            raise ConfigError(f"config.{field}={path!r}: there is no such file or folder")


def _here(config: ConfigDict) -> ConfigDict:
    """The config that prepares data.path from its own videos, whatever --mode=prepare was asked for."""
    here = config.copy_and_resolve_references()
    here.prepare.out, here.prepare.prompts = "", ""
    return here


def _at(config: ConfigDict, out: Path) -> ConfigDict:
    """The config whose data.path is `out`."""
    there = config.copy_and_resolve_references()
    there.data.path = str(out)
    return there


def _encode(config: ConfigDict, out: Path, book: Logbook, stop: Any) -> bool:
    data = config.data
    if not (Path(data.path) / "videos").is_dir() and (out / source.LATENTS).is_dir():
        return True  # latents without their videos: nothing to encode, captions may still be
    with book.working("videos: looked at one by one"):
        folder = video_folder.VideoFolder(
            data.path, frames=data.frames, fps=data.fps, size=data.size, long_size=data.long_size
        )
    book.say(f"{data.path}: {len(folder)} videos to use, {len(folder.skipped)} skipped")
    if len(folder) <= config.eval.heldout_clips:
        raise ConfigError(
            f"config.eval.heldout_clips={config.eval.heldout_clips}: must be below the {len(folder)} usable videos of "
            f"config.data.path={data.path!r}"
        )
    codec = build.build_codec(config, build.make_mesh(config))
    with _writer(config, out) as cache:

        def store(clips: list[dict[str, Any]]) -> None:
            """A clip on each device."""
            pixels = np.stack([clip["video"] for clip in clips]).astype(np.float32) / 127.5 - 1.0
            for clip, latent in zip(clips, codec.encode(np.moveaxis(pixels, -1, 1)), strict=True):
                cache.add(clip["name"], latent, clip["caption"])
            advance(len(clips))

        waiting: list[dict[str, Any]] = []
        for name, reason in folder.skipped:
            cache.skip(name, reason)
            book.say(f"skipped {name}: {reason}")
        todo = video_folder.clip_dataset(folder, done=cache.done)
        with book.progress("encoding videos", len(folder), len(folder) - len(todo)) as advance:
            for clip in todo.to_iter_dataset(video_folder.READ_AHEAD):
                if stop():
                    book.say("stopped; the same command goes on")
                    return False
                if "error" in clip:
                    cache.skip(clip["name"], clip["error"])
                    book.say(f"skipped {clip['name']}: {clip['error']}")
                    advance()
                    continue
                if waiting and waiting[0]["video"].shape != clip["video"].shape:
                    store(waiting)
                    waiting = []
                waiting.append(clip)
                if len(waiting) == jax.local_device_count():
                    store(waiting)
                    waiting = []
            if waiting:
                store(waiting)
        cache.finish()
    return True


def _synthesise(config: ConfigDict, out: Path, book: Logbook, stop: Any) -> bool:
    """prepare.clips samples of the base, in landscape, of the prompts again and again."""
    prompts, count = build.read_prompts(config, "prepare.prompts"), config.prepare.clips
    if config.text_encoder.where == "cached" and not _store_features(
        config, out, [p.caption for p in prompts], book, stop
    ):
        return False
    setup = build.build(_at(config, out))
    size = build.chunk(config, setup.mesh)
    if config.pretrain.from_run:
        train.check_base(config)
        params = train.load_base(config, setup, book)
    else:
        params = build.init_params(config, setup.mesh, jax.random.key(config.seed))
    draw = sampler(config, setup)
    checkpoint = config.model.checkpoint
    made = {
        "base": build.signature(checkpoint, "model.checkpoint") if checkpoint else config.pretrain.from_run,
        "prompts": [p.caption for p in prompts],
        "seed": config.seed,
        "num_steps": config.eval.num_steps,
        "guidance": config.prepare.guidance,
        "process": {name: value for name, value in config.process.items() if value is not None},
    }
    with _writer(config, out, made) as cache:
        names = [f"synthetic-{i:07d}" for i in range(count)]
        with book.progress("synthetic clips", count, sum(n in cache.done for n in names)) as advance:
            for start in range(0, count, size):
                if stop():
                    book.say("stopped; the same command goes on")
                    return False
                rows = [i for i in range(start, start + size) if i < count and names[i] not in cache.done]
                if not rows:
                    continue
                index_B = np.arange(start, start + size)
                captions = [prompts[i % len(prompts)].caption for i in index_B]
                x0 = np.asarray(draw(params, build.to_global(setup.mesh, index_B), setup.condition(captions)))
                for i in rows:
                    if not np.isfinite(x0[i - start]).all():
                        raise train.RunStopped(
                            f"synthetic clip {i} is not finite; the base, config.process or config.prepare.guidance is "
                            "at fault. What was written stays"
                        )
                    cache.add(names[i], x0[i - start], captions[i - start])
                advance(len(rows))
        cache.finish()
    return True


def _writer(config: ConfigDict, out: Path, made: dict[str, Any] | None = None) -> CacheWriter:
    """Shards of about SHARD_BYTES: what a kill may cost. `made`: what synthetic clips are a function of beside."""
    clip_bytes = 4 * int(np.prod(build.latent_shape(config)))
    folder = out / source.LATENTS
    fingerprint = build.latent_fingerprint(config) | ({} if made is None else {"synthetic": made})
    return CacheWriter(folder, fingerprint, max(1, SHARD_BYTES // clip_bytes))


def _asked(config: ConfigDict) -> list[str]:
    """The captions of evaluations that are not those of held-out clips."""
    return [p.caption for p in build.read_prompts(config, "eval.prompts")] if config.eval.prompts else []


def _embed(config: ConfigDict, out: Path, book: Logbook, stop: Any) -> bool:
    """Stores the features of all captions that training and evaluations on `out` ask for."""
    captions = [*LatentCache(out / source.LATENTS).captions, *_asked(config)]
    return _store_features(config, out, captions, book, stop)


def _store_features(config: ConfigDict, out: Path, captions: list[str], book: Logbook, stop: Any) -> bool:
    features = build.text_cache(_at(config, out))
    todo = features.missing(captions)
    if not todo:
        return True
    book.say(f"embedding {len(todo)} captions")
    tower = build.text_tower(config, build.make_mesh(config))
    with book.progress("embedding captions", len(todo)) as advance:
        for caption in todo:
            if stop():
                book.say("stopped; the same command goes on")
                return False
            features.add(caption, tower.embed([caption])[0])
            advance()
    return True
