"""The run, read top to bottom: set-up, sidecar, pre-training, DDRL, the end. The libraries below never import it.

One iteration of DDRL (paper, sec. 4): jitted rollout -> x0 to the sidecar -> the data-loss
gradient while rewards are computed -> rewards -> advantages -> the policy gradient, accumulated over trained steps and
micro-batches -> one clipped AdamW step -> EMA. Everything random is fold_in(key, step) and the data of step n is a pure
function of (seed, n), so the step is all that a resumed run needs to know.

Dims: B rollouts, G conditions, N rollouts a condition (B = G N), K trained steps, M data draws, U updates an iteration,
m rollouts a micro-batch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import grain
import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from ddrl_jax import build, rewards, state
from ddrl_jax.checkpoint.manager import Checkpoints, UnreadableError
from ddrl_jax.config import ConfigError, check_same_run, to_json
from ddrl_jax.data import digits, pipeline
from ddrl_jax.diffusion.sampler import Trajectory, sample
from ddrl_jax.gradients import PER_ROLLOUT, add, data_gradient, micro_batches, policy_gradient, replay_gap
from ddrl_jax.logbook import Logbook, write_text
from ddrl_jax.parallel import mesh as mesh_lib
from ddrl_jax.rl.advantages import group_advantages
from ddrl_jax.rl.objective import Objective

# One stream of random numbers a purpose, all from the config's seed.
INIT, PRETRAIN, ROLLOUT, DATA = range(4)


class RunStopped(RuntimeError):
    """The run ended itself: invalid rewards, non-finite steps, or a replay that disagrees with the rollout."""


class Evaluator(Protocol):
    """What `evaluate.Evaluator` is to this module, which does not know it."""

    def __call__(self, params: Any, step: int, *, full: bool) -> dict[str, float]: ...


@dataclasses.dataclass
class Iteration:
    """An iteration whose gradients may still be on their way; `begin` in seconds of time.perf_counter."""

    step: int
    updates: list[dict[str, jax.Array]]  # metrics of each optimizer step
    record: dict[str, float]
    begin: float

    def wait(self) -> float:
        """Until its last update is there; notes how long the iteration took, and returns when that was."""
        jax.block_until_ready(self.updates)
        now = time.perf_counter()
        if "seconds" not in self.record:
            self.record["seconds"] = now - self.begin
            known = self.record.get("seconds_rollout", 0.0) + self.record.get("seconds_reward_wait", 0.0)
            self.record["seconds_gradients"] = self.record["seconds"] - known
        return now

    def metrics(self) -> dict[str, float]:
        """Means over the updates; `*_max` the largest, `skipped` the number of them."""
        reduce: dict[str, Callable[[list[float]], float]] = {"ratio_max": max, "skipped": sum}
        columns = {k: [float(m[k]) for m in self.updates] for k in self.updates[0] if k != "skipped_in_a_row"}
        return {k: reduce[k](v) if k in reduce else sum(v) / len(v) for k, v in columns.items()} | self.record

    def skipped_in_a_row(self) -> int:
        return int(self.updates[-1]["skipped_in_a_row"])


# ------------------------------------------------------------------------------------------------------ run


def run(config: ConfigDict, workdir: Path, make_evaluator: Callable[..., Evaluator]) -> bool:
    """Pre-trains, then runs DDRL; resumes what `workdir` holds. Returns False when SIGTERM or Ctrl-C ended it early.

    Args:
      config: validated (`config.validate`).
      workdir: made if it is missing; a run of another config is refused.
      make_evaluator: evaluate.Evaluator; handed in, so that neither module knows the other.

    Raises:
      ConfigError: bad input. RunStopped: the run ended itself; a state at most checkpoint.every old is saved.
    """
    # --- set-up --------------------------------------------------------------------------------------------
    for line in check_same_run(config, workdir):
        print(line)
    build.one_process()
    setup = build.build(config)
    clip_dataset(config, config.rollout.conditions)  # bad data is found before anything is started
    check_base(config)
    lock = build.own_workdir(workdir)
    if not (workdir / "config.json").exists():
        # What a start that came to nothing left here may have been made for other settings.
        shutil.rmtree(workdir / "scorer", ignore_errors=True)
        (workdir / "judge.npz").unlink(missing_ok=True)
    book = Logbook(workdir, primary=jax.process_index() == 0, **config.log)
    try:
        with build.open_rewards(config, workdir, book) as client, interrupts() as stop:
            # Only now: a start that bad input ended must not bind the workdir to that input.
            if jax.process_index() == 0 and not (workdir / "config.json").exists():
                write_text(workdir / "config.json", to_json(config))
            evaluator = make_evaluator(config, setup, client, workdir, book)
            saved = json.loads(to_json(config))
            if config.pretrain.from_run:
                base = [load_base(config, setup, book)]
            else:
                with Checkpoints(workdir / "checkpoints/pretrain", keep=2, config=saved) as checkpoints:
                    base = [pretrain(config, setup, book, checkpoints, stop)]
            if base[0] is None:
                return False
            with Checkpoints(workdir / "checkpoints/ddrl", keep=config.checkpoint.keep, config=saved) as checkpoints:
                # Popped: this frame holds no second copy of the network.
                return reinforce(config, setup, workdir, book, client, evaluator, checkpoints, base.pop(), stop)
    except UnreadableError as error:
        raise RunStopped(f"{error}; remove the folder to start that stage again") from error
    finally:
        book.close()
        lock.close()


@contextlib.contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Yields `stop()`: whether SIGTERM or Ctrl-C asked to save and leave. A second Ctrl-C interrupts at once."""
    received: list[int] = []

    def note(number: int, _: Any) -> None:
        received.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    # None stands for a handler that was not set from Python.
    previous = {n: signal.signal(n, note) or signal.SIG_DFL for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


# --------------------------------------------------------------------------------------------- pre-training


def pretrain(
    config: ConfigDict, setup: build.Setup, book: Logbook, checkpoints: Checkpoints, stop: Callable[[], bool]
) -> Any | None:
    """The base model's parameters (the EMA's), restored or trained here. None when stopped early."""
    key = jax.random.key(config.seed)
    optimizer, exponent = build.optimizer(config.pretrain), build.ema_exponent(config.pretrain)
    train_state = _fresh_state(config, setup)
    restored = checkpoints.restore(train_state)
    train_state = restored[1] if restored else train_state
    step, total = int(train_state.step), config.pretrain.steps
    if step < total:
        book.forget_from("pretrain", step)
        objective = Objective(data_beta=1.0, cond_dropout=config.pretrain.cond_dropout)
        data_key = jax.random.fold_in(key, PRETRAIN)

        @jax.jit
        def update(s: state.TrainState, x0_BX: jax.Array, context_BSD: jax.Array) -> Any:
            loss, _, grads = data_gradient(
                s.params,
                jax.random.fold_in(data_key, s.step),
                x0_BX,
                context_BSD,
                None,
                setup=setup,
                objective=objective,
                group=1,
                micro_batch=min(config.train.micro_batch, config.pretrain.batch_size),
            )
            s, metrics = state.apply_gradients(s, grads, loss, optimizer, ema_exponent=exponent)
            return s, metrics | {"loss": loss, "skipped_in_a_row": s.skipped_in_a_row}

        def log(done: tuple[int, dict, float]) -> None:
            _log_pretrain(book, *done, total)
            _check_finite(int(done[1]["skipped_in_a_row"]), config.train.max_skipped_in_a_row)

        batches = _read_ahead(clip_dataset(config, config.pretrain.batch_size), step)
        pending, started = None, time.perf_counter()
        with book.progress("pre-training", total, step) as advance:
            while step < total and not stop():
                batch = next(batches)
                train_state, metrics = update(
                    train_state,
                    build.to_global(setup.mesh, setup.codec.encode(batch["video"])),
                    build.to_global(setup.mesh, setup.context(batch["caption"])),
                )
                # The metrics of the step before: reading this one's would make dispatch wait.
                if pending is not None:
                    log(pending)
                now = time.perf_counter()
                pending, started = (step, metrics, now - started), now
                step += 1
                advance()
                if step % config.checkpoint.pretrain_every == 0 and step < total:
                    log(pending)
                    pending = None
                    checkpoints.save(step, train_state)
            if pending is not None:
                log(pending)
        checkpoints.save(step, train_state, wait=True)
    if step < total:
        book.say(f"stopped in pre-training at step {step} of {total}; the same command goes on from there")
        return None
    return _trained(train_state)


def _fresh_state(config: ConfigDict, setup: build.Setup) -> state.TrainState:
    """The pre-training's state at step 0."""
    params = build.init_params(config, setup, jax.random.fold_in(jax.random.key(config.seed), INIT))
    return build.train_state(setup, params, build.optimizer(config.pretrain), build.ema_exponent(config.pretrain))


def check_base(config: ConfigDict) -> None:
    """Raises ConfigError unless `pretrain.from_run` is empty or a run whose pre-training is finished."""
    name = config.pretrain.from_run
    if not name:
        return
    how = f"with the same command and --config.pretrain.from_run= --config.train.steps=0 --workdir={name}"
    folder, settings = Path(name) / "checkpoints/pretrain", Path(name) / "config.json"
    if not folder.is_dir() or not settings.is_file():
        raise ConfigError(f"config.pretrain.from_run={name!r}: holds no checkpoints/pretrain; make it {how}")
    total = json.loads(settings.read_text())["pretrain"]["steps"]
    done = max((int(p.name) for p in folder.iterdir() if p.name.isdigit()), default=0)
    if done < total:
        raise ConfigError(
            f"config.pretrain.from_run={name!r}: its pre-training is at step {done} of {total}; finish it {how}"
        )


def load_base(config: ConfigDict, setup: build.Setup, book: Logbook) -> Any:
    """The base of another run, which is read and never written to."""
    name = config.pretrain.from_run
    with Checkpoints(Path(name) / "checkpoints/pretrain", read_only=True) as checkpoints:
        try:
            restored = checkpoints.restore(_fresh_state(config, setup))
        except UnreadableError as error:
            raise ConfigError(
                f"config.pretrain.from_run={name!r}: {error}; model and pretrain.ema_rate must be that run's"
            ) from error
    assert restored is not None, "check_base saw a checkpoint"
    book.say(f"pre-training: step {restored[0]} of {name}")
    return _trained(restored[1])


def _log_pretrain(book: Logbook, step: int, metrics: dict, seconds: float, total: int) -> None:
    values = {k: float(metrics[k]) for k in ("loss", "grad_norm", "skipped")}
    book.write("pretrain", step, values | {"seconds": seconds})
    if (step + 1) % 100 == 0 or step + 1 == total:
        book.say(f"pre-training {step + 1}/{total}  loss {values['loss']:.4f}  {seconds:.3f} s a step")


# ---------------------------------------------------------------------------------------------------- DDRL


def reinforce(
    config: ConfigDict,
    setup: build.Setup,
    workdir: Path,
    book: Logbook,
    client: rewards.RewardClient,
    evaluator: Evaluator,
    checkpoints: Checkpoints,
    base_params: Any,
    stop: Callable[[], bool],
) -> bool:
    """DDRL from `base_params` up to train.steps iterations, evaluations included. False when stopped early."""
    ro, objective = config.rollout, setup.objective
    batch, group, updates = ro.conditions * ro.group_size, ro.group_size, config.train.updates_per_rollout
    policy_on = config.objective.name != "sft"
    rollout_levels = objective.data_beta > 0 and objective.data_levels == "rollout"
    key = jax.random.key(config.seed)
    optimizer, exponent = build.optimizer(config.train), build.ema_exponent(config.train)
    # The reference is the base itself and exists only where a KL to it is asked for.
    ref_params = base_params if objective.kl_beta > 0 else None
    held = ["policy"] + ["EMA"] * (exponent is not None) + ["reference"] * (ref_params is not None)
    book.say(f"{config.objective.name}: {batch} rollouts an iteration; networks held: {', '.join(held)}")

    # --- update step ---------------------------------------------------------------------------------------
    def rollout(params: Any, step: jax.Array, context_GSD: jax.Array, keep_mean: bool = False) -> Any:
        x0, trajectory = sample(
            params,
            jax.random.fold_in(jax.random.fold_in(key, ROLLOUT), step),
            build.cond(context_GSD),
            denoise=setup.denoise,
            process=setup.process,
            shape=(batch, *setup.latent_shape),
            num_steps=ro.num_steps,
            record=tuple(ro.trained_steps),
            keep_mean=keep_mean or updates > 1,
        )
        x0 = jax.lax.with_sharding_constraint(x0, mesh_lib.batch_sharding(setup.mesh))
        return x0, trajectory if rollout_levels else dataclasses.replace(trajectory, init_noise=None)

    def data_step(params: Any, step: jax.Array, u: jax.Array, x0_GX: Any, context_GSD: Any, t: Any) -> Any:
        """Gradient of the data loss on update u's share of the conditions."""
        rng = jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(key, DATA), step), u)
        return data_gradient(
            params,
            rng,
            share(x0_GX, u, 1),
            share(context_GSD, u, 1),
            share_trajectory(t, u),
            setup=setup,
            objective=objective,
            group=group,
            micro_batch=config.train.micro_batch,
        )

    def share(x: jax.Array, u: jax.Array, size: int) -> jax.Array:
        return x if updates == 1 else jax.lax.dynamic_index_in_dim(micro_batches(x, updates, size), u, 0, False)

    def share_trajectory(t: Any, u: jax.Array) -> Any:
        if t is None or updates == 1:
            return t
        pick = jax.vmap(lambda x: share(x, u, group))
        changed: dict[str, Any] = {f: pick(getattr(t, f)) for f in PER_ROLLOUT if getattr(t, f) is not None}
        noise = None if t.init_noise is None else share(t.init_noise, u, group)
        return dataclasses.replace(t, **changed, init_noise=noise)

    def update(
        s: state.TrainState,
        u: jax.Array,
        t: Trajectory | None,
        context_GSD: Any,
        reward_B: Any,
        valid_B: Any,
        data: Any,
        ref_params: Any,
    ) -> Any:
        """Advantages of the whole rollout, the policy gradient of update u's share, and one optimizer step."""
        loss, metrics, grads = jnp.zeros(()), {}, None
        if data is not None:
            loss, data_metrics, grads = data
            metrics["data_loss"] = data_metrics["data_loss"]
        if t is not None:
            adv_B = group_advantages(reward_B, group, valid_B, **config.advantage)
            # Groups with fewer than two valid members say nothing about their order.
            valid = valid_B & jnp.isfinite(reward_B)
            alive = jnp.repeat(valid.reshape(-1, group).sum(1) >= 2, group)
            policy_loss, policy_metrics, policy_grads = policy_gradient(
                s.params,
                share_trajectory(t, u),
                share(adv_B, u, group),
                share((valid & alive).astype(adv_B.dtype), u, group),
                share(context_GSD, u, 1),
                setup=setup,
                micro_batch=config.train.micro_batch,
                ref_params=ref_params,
            )
            loss, grads = loss + policy_loss, add(grads, policy_grads)
            metrics |= {k: v for k, v in policy_metrics.items() if k not in ("loss", "data_loss")}
        s, step_metrics = state.apply_gradients(
            s, grads, loss, optimizer, ema_exponent=exponent, advance=u == updates - 1
        )
        return s, metrics | step_metrics | {"loss": loss, "skipped_in_a_row": s.skipped_in_a_row}

    rollout_jit, data_jit, update_jit = jax.jit(rollout, static_argnums=3), jax.jit(data_step), jax.jit(update)

    # --- checkpoint ----------------------------------------------------------------------------------------
    s = build.train_state(setup, base_params, optimizer, exponent)
    del base_params  # the policy's copy is the only one, unless the base is the reference
    found = checkpoints.restore(s)
    restored = found is not None
    s = found[1] if found else s
    del found
    step, total = int(s.step), config.train.steps
    if restored and step >= total:
        book.say(f"this run is finished: {step} of {total} iterations; --config.train.steps=N goes on from there")
    elif restored:
        book.say(f"resuming at iteration {step} of {total}")
    book.forget_from("ddrl", step)
    book.forget_from("eval", step + (1 if restored else 0))

    # --- evaluations ---------------------------------------------------------------------------------------
    def evaluate(full: bool) -> None:
        params = s.ema if config.eval.ema and s.ema is not None and step > 0 else s.params
        book.write("eval", step, evaluator(params, step, full=full))

    if not restored:
        evaluate(full=True)
        checkpoints.save(0, s, wait=True)
    elif 0 < step < total and step % config.eval.every == 0 and not book.has("eval", step):
        evaluate(full=False)  # the kill came between the save and the evaluation

    def log(done: Iteration) -> None:
        """Writes a finished iteration's line; waits for its gradients where the loop has not yet."""
        done.wait()
        _log_iteration(book, done, total)
        _check_finite(done.skipped_in_a_row(), config.train.max_skipped_in_a_row)

    # --- loop ----------------------------------------------------------------------------------------------
    batches = _read_ahead(clip_dataset(config, ro.conditions), step)
    low_valid = 0
    pending: Iteration | None = None  # logged one step late, so that dispatch never waits for a metric
    with book.progress(config.objective.name, total, step) as advance:
        while step < total and not stop():
            begin = time.perf_counter()
            clips = next(batches)
            x0_GX = build.to_global(setup.mesh, setup.codec.encode(clips["video"]))
            context_GSD = build.to_global(setup.mesh, setup.context(clips["caption"]))
            record: dict[str, float] = {}
            reward_B = valid_B = trajectory = None
            if policy_on:
                x0_BX, trajectory = rollout_jit(s.params, s.step, context_GSD, step == 0)
                if step == 0:
                    _check_replay(config, setup, s.params, trajectory, context_GSD)
                    if updates == 1:
                        trajectory = dataclasses.replace(trajectory, mean_old=None)
                # The rollout is queued behind the gradients of the iteration before: it begins where they end.
                begin = pending.wait() if pending else begin
                latents = np.asarray(x0_BX)
                record["seconds_rollout"] = time.perf_counter() - begin
                ticket = client.submit(latents, [c for c in clips["caption"] for _ in range(group)])
            metrics = []
            for u in range(updates):
                # Dispatched before the rewards are waited for: it needs none of them.
                data = None
                if objective.data_beta > 0:
                    data = data_jit(s.params, s.step, u, x0_GX, context_GSD, trajectory if rollout_levels else None)
                if policy_on and u == 0:
                    waiting = time.perf_counter()
                    scores = ticket.result()
                    record["seconds_reward_wait"] = time.perf_counter() - waiting
                    reward, valid = build.total_reward(scores, config)
                    reward_B = build.to_global(setup.mesh, reward.astype(np.float32))
                    valid_B = build.to_global(setup.mesh, valid)
                    record |= reward_metrics(reward, valid, scores, group)
                    if scores.reason:
                        book.say(f"iteration {step}: {int((~valid).sum())} rewards invalid: {scores.reason}")
                s, of_update = update_jit(s, u, trajectory, context_GSD, reward_B, valid_B, data, ref_params)
                metrics.append(of_update)
            if pending is not None:
                log(pending)
            pending = Iteration(step, metrics, record, begin)
            step += 1
            advance()

            low_valid = low_valid + 1 if record.get("valid_rate", 1.0) < config.reward.min_valid_rate else 0
            invalid = low_valid >= config.reward.min_valid_window
            saving = step % config.checkpoint.every == 0 or step == total or invalid or stop()
            looking = step % config.eval.every == 0 and step < total
            if saving or looking:
                # Its line first: what is saved must not be without one, whatever ends the run after it.
                log(pending)
                pending = None
            if saving:
                checkpoints.save(step, s, wait=invalid)
            if invalid:
                raise RunStopped(
                    f"fewer than {config.reward.min_valid_rate:.0%} of the rewards were valid in {low_valid} "
                    f"iterations in a row; the last reason: {scores.reason or 'not given'}. The state is saved: "
                    "mend the sidecar and start the same command again"
                )
            if looking:
                evaluate(full=False)
        if pending is not None:
            log(pending)

    # --- the end -------------------------------------------------------------------------------------------
    if int(s.skipped) and step >= total:
        book.say(
            f"{int(s.skipped)} updates were skipped because something was not finite: see skipped in metrics.jsonl"
        )
    checkpoints.save(step, s, wait=True)
    if step < total:
        book.say(f"stopped at iteration {step} of {total}; the same command goes on from there")
        return False
    whole = (workdir / f"eval/{step:06d}/eval.json").exists() and book.has("eval", step)
    if total > 0 and not whole:
        book.forget_from("eval", step)
        evaluate(full=True)
    return True


# ------------------------------------------------------------------------------------------------- the parts


def _trained(s: state.TrainState) -> Any:
    return s.params if s.ema is None else s.ema


def clip_dataset(config: ConfigDict, batch_size: int) -> Any:
    """Batch n of captioned training clips, this process's rows; a pure function of (seed, n)."""
    source: pipeline.ClipSource
    if config.data.path:
        try:
            source = digits.load_clips(config.data.path, field="config.data.path")
        except ValueError as error:
            raise ConfigError(str(error)) from error
        shape, right = source.video.shape[1:], (config.data.frames, config.data.size, config.data.size, 1)
        unknown = sorted(set(source.vocabulary) - set(digits.VOCABULARY))
        if shape != right or unknown:
            wrong = f"words {unknown[:3]} are not in the word table" if unknown else f"clips are (T,H,W,C) {shape}"
            raise ConfigError(
                f"config.data.path={config.data.path!r}: {wrong}; captions and shape must be those of "
                f"data.frames and data.size, {right}"
            )
    else:
        source = digits.DigitClips("train", frames=config.data.frames, size=config.data.size, seed=config.seed)
    return pipeline.clip_batches(source, batch_size, config.seed, jax.process_index(), jax.process_count())


def _read_ahead(dataset: Any, step: int) -> Iterator[dict[str, Any]]:
    """Batches from `step` on, made in a thread while the device works."""
    return iter(dataset[step:].to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)))


def _check_finite(in_a_row: int, limit: int) -> None:
    if in_a_row >= limit:
        raise RunStopped(
            f"{in_a_row} steps in a row had a non-finite loss, gradient or update and were skipped. The first one has "
            "skipped = 1 in metrics.jsonl; a lower learning rate, in a new --workdir, is what usually helps. What was "
            "saved last stays"
        )


def _check_replay(config: ConfigDict, setup: build.Setup, params: Any, trajectory: Trajectory, context: Any) -> None:
    """The first update's policy must be the rollout's: max |mean - mean_old| of a recorded step within 1e-3 std."""
    limit = 1e-3 if config.model.dtype == "float32" else 5e-2
    gap_K = np.asarray(jax.jit(lambda p, t, c: replay_gap(p, t, c, setup))(params, trajectory, context))
    if not gap_K.max() <= limit:
        worst = int(gap_K.argmax())
        raise RunStopped(
            f"rollout and training disagree: at step {int(trajectory.step[worst])} the replayed mean is "
            f"{gap_K[worst]:.2e} std away from the rollout's (limit {limit:g})"
        )


def reward_metrics(reward_B: np.ndarray, valid_B: np.ndarray, scores: rewards.Scores, group: int) -> dict[str, float]:
    """Means over valid rewards; `reward_std` is the mean over groups of the within-group std (unbiased)."""
    reward_GN = np.where(valid_B, reward_B, np.nan).reshape(-1, group)
    several = np.isfinite(reward_GN).sum(1) >= 2
    record = {
        "reward": float(np.nanmean(reward_GN)) if valid_B.any() else math.nan,
        "reward_std": float(np.nanstd(reward_GN[several], axis=1, ddof=1).mean()) if several.any() else math.nan,
        "valid_rate": float(valid_B.mean()),
        "scorer_seconds": scores.seconds,
    }
    for name, value in scores.scores.items():
        if np.isfinite(value).any():
            record[f"sub/{name}"] = float(np.nanmean(value))
    return record


def _log_iteration(book: Logbook, done: Iteration, total: int) -> None:
    values = done.metrics()
    book.write("ddrl", done.step, values)
    if (done.step + 1) % book.every == 0 or done.step + 1 == total:
        shown = {
            "reward": ("reward", ".3f"),
            "reward_std": ("group std", ".3f"),
            "data_loss": ("data loss", ".4f"),
            "ratio_mean": ("ratio", ".5f"),
            "clip_fraction": ("clipped", ".2f"),
            "valid_rate": ("valid", ".0%"),
            "grad_norm": ("grad", ".3f"),
        }
        if values["skipped"]:
            shown["skipped"] = ("NOT FINITE, skipped", ".0f")
        text = "  ".join(f"{label} {values[k]:{form}}" for k, (label, form) in shown.items() if k in values)
        stages = ("rollout", "gradients", "reward_wait")
        known = {n: values[f"seconds_{n}"] for n in stages if f"seconds_{n}" in values}
        times = ", ".join(f"{n.replace('_', ' ')} {seconds:.2f}" for n, seconds in known.items())
        book.say(f"{done.step + 1}/{total}  {text}  {values['seconds']:.2f} s ({times})")
