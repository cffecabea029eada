"""The run, read top to bottom: set-up, sidecar, pre-training, DDRL, the end. The libraries below never import it.

One iteration of DDRL (paper, sec. 4): jitted rollout -> x0 to the sidecar -> the data-loss
gradient while rewards are computed -> rewards -> advantages -> the policy gradient, accumulated over trained steps and
micro-batches -> one clipped AdamW step -> EMA. Other methods differ in `update.py` only. Everything random is
fold_in(key, step) and the data of step n is a pure function of (seed, n), so the step is all that a resumed run needs
to know.

Of several processes each has its own rows of the data and of the rollouts, and process 0 the workdir. All go through
the same jitted calls in the same order, whatever one of them meets on the way: rewards are waited for between two such
calls, and what ends a run early (a signal, data that cannot be read, a refused token) is agreed on first, so that all
save the same step (`parallel.distributed`).

Dims: B rollouts, G conditions, N rollouts a condition (B = G N), K trained steps, M data draws, U updates an iteration,
m rollouts a micro-batch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import grain
import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from ddrl_jax import build, monitor, rewards, scoring, state
from ddrl_jax.checkpoint.manager import Checkpoints, UnreadableError
from ddrl_jax.config import ConfigError, check_same_run, to_json
from ddrl_jax.data import pipeline
from ddrl_jax.diffusion.sampler import Trajectory
from ddrl_jax.gradients import data_gradient
from ddrl_jax.logbook import Logbook, read_metrics, write_text
from ddrl_jax.parallel import distributed
from ddrl_jax.parallel import mesh as mesh_lib
from ddrl_jax.rl.objective import Objective
from ddrl_jax.update import INIT, PRETRAIN, Update, to_device


class RunStopped(RuntimeError):
    """The run ended itself: invalid rewards, non-finite steps, or a replay that disagrees with the rollout."""


def stopped_by_all(text: str) -> RunStopped:
    """For what every process has found, so that each ends by itself."""
    distributed.ending()
    return RunStopped(text)


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
        """Means over the updates; `*_max` the largest, `skipped` the number of them. The gradient norm of each trained
        step is `grad_norm/step<its number>`."""
        reduce: dict[str, Callable[[list[float]], float]] = {"ratio_max": max, "skipped": sum}
        names = [k for k, v in self.updates[0].items() if k != "skipped_in_a_row" and np.ndim(v) == 0]
        columns = {k: [float(m[k]) for m in self.updates] for k in names}
        if "step_grad_norm" in self.updates[0]:
            steps = distributed.to_host(self.updates[0]["trained_steps"])
            norms_UK = np.stack([distributed.to_host(m["step_grad_norm"]) for m in self.updates])
            columns |= {f"grad_norm/step{k:02d}": list(map(float, norms_UK[:, i])) for i, k in enumerate(steps)}
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
    for line in distributed.primary(lambda: check_same_run(config, workdir)):
        if distributed.is_primary():
            print(line)
    build.same_run(config, workdir)
    setup = build.build(config)
    clip_dataset(config, setup.mesh, config.rollout.conditions)  # bad data is found before anything is started
    check_base(config)
    probe = scoring.probe(config, setup)
    lock = build.own_workdir(workdir)
    if distributed.is_primary() and not (workdir / "config.json").exists():
        # What a start that came to nothing left here may have been made for other settings.
        shutil.rmtree(workdir / "scorer", ignore_errors=True)
        (workdir / "judge.npz").unlink(missing_ok=True)
    book = build.logbook(config, workdir)
    try:
        with scoring.open_rewards(config, setup.text, workdir, book, probe) as client, interrupts() as stop:
            evaluator = make_evaluator(config, setup, client, workdir, book)
            saved, base = json.loads(to_json(config)), []
            if config.pretrain.from_run:
                base = [load_base(config, setup, book)]
            elif config.model.checkpoint:
                with book.working(f"network: read from {config.model.checkpoint}"):
                    base = [build.init_params(config, setup.mesh, key=None)]
            # Only now: a start that bad input ended must not bind the workdir to that input.
            distributed.primary(lambda: bind(config, workdir))
            if not base:
                with Checkpoints(workdir / "checkpoints/pretrain", keep=2, config=saved) as checkpoints:
                    base = [pretrain(config, setup, book, checkpoints, stop)]
            if base[0] is None:
                return False
            with Checkpoints(workdir / "checkpoints/ddrl", keep=config.checkpoint.keep, config=saved) as checkpoints:
                # Popped: this frame holds no second copy of the network.
                return reinforce(config, setup, workdir, book, client, evaluator, checkpoints, base.pop(), stop)
    except UnreadableError as error:
        raise stopped_by_all(f"{error}; remove the folder to start that stage again") from error
    finally:
        book.close()
        lock.close()


def bind(config: ConfigDict, workdir: Path) -> None:
    """The workdir is this config's from now on, and that of the weights an adapter is of."""
    if not (workdir / "config.json").exists():
        write_text(workdir / "config.json", to_json(config))
    build.check_adapter_base(config, workdir)


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

        @functools.partial(jax.jit, donate_argnums=0)
        def update(s: state.TrainState, x0_BX: jax.Array, cond: dict[str, Any]) -> Any:
            loss, _, grads = data_gradient(
                s.params,
                jax.random.fold_in(data_key, s.step),
                x0_BX,
                cond,
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

        upcoming = Upcoming(config, setup, config.pretrain.batch_size, step, total)
        early = distributed.Told(setup.mesh)
        early.tell(stop(), upcoming.fault is not None)
        pending, started = None, time.perf_counter()
        with book.progress("pre-training", total, step) as advance:
            while step < total and not any(early.told()):
                x0_BX, cond, _ = upcoming.take()
                upcoming.read()
                early.tell(stop(), upcoming.fault is not None)
                train_state, metrics = update(train_state, x0_BX, cond)
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
        _, failed = early.told()
        if failed:
            distributed.ending()
        checkpoints.save(step, train_state, wait=True)
        if failed:
            raise upcoming.fault or distributed.ended_elsewhere()
    if step < total:
        book.say(f"stopped in pre-training at step {step} of {total}; the same command goes on from there")
        return None
    return _trained(train_state)


def _fresh_state(config: ConfigDict, setup: build.Setup) -> state.TrainState:
    """The pre-training's state at step 0."""
    params = build.init_params(config, setup.mesh, jax.random.fold_in(jax.random.key(config.seed), INIT))
    return build.train_state(setup, params, build.optimizer(config.pretrain), build.ema_exponent(config.pretrain))


def check_base(config: ConfigDict) -> None:
    """Raises ConfigError unless `pretrain.from_run` is empty or a run whose `from_stage` is finished."""
    name, stage = config.pretrain.from_run, config.pretrain.from_stage
    if not name:
        return
    how = f"with the same command and --config.pretrain.from_run= --config.train.steps=0 --workdir={name}"
    if stage == "ddrl":
        how = "by training there first"
    folder, settings = Path(name) / "checkpoints" / stage, Path(name) / "config.json"
    if not folder.is_dir() or not settings.is_file():
        raise ConfigError(f"config.pretrain.from_run={name!r}: holds no checkpoints/{stage}; make it {how}")
    total = json.loads(settings.read_text())["pretrain" if stage == "pretrain" else "train"]["steps"]
    done = max((int(p.name) for p in folder.iterdir() if p.name.isdigit()), default=0)
    if done < total and not (stage == "ddrl" and (Path(name) / "stopped.json").exists()):
        raise ConfigError(
            f"config.pretrain.from_run={name!r}: its stage {stage} is at step {done} of {total}; finish it {how}"
        )


def load_base(config: ConfigDict, setup: build.Setup, book: Logbook) -> Any:
    """The weights (EMA, where there is one) of another run, which is read and never written to."""
    name, stage = config.pretrain.from_run, config.pretrain.from_stage
    like = _fresh_state(config, setup)
    if stage == "ddrl":
        then = json.loads((Path(name) / "config.json").read_text())
        exponent = 1.0 if then["train"]["ema_rate"] > 0 else None  # only whether there is an EMA matters here
        old = then["objective"]["name"] == "nft"
        like = build.train_state(setup, like.params, build.optimizer(config.train), exponent, old=old)
    with Checkpoints(Path(name) / "checkpoints" / stage, read_only=True) as checkpoints:
        try:
            restored = checkpoints.restore(like)
        except UnreadableError as error:
            raise ConfigError(
                f"config.pretrain.from_run={name!r}: {error}; model and pretrain.ema_rate must be that run's"
            ) from error
    assert restored is not None, "check_base saw a checkpoint"
    book.say(f"{'pre-training' if stage == 'pretrain' else 'the weights trained there'}: step {restored[0]} of {name}")
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
    """DDRL, or another method, from `base_params` up to train.steps iterations, evaluations included. False when
    stopped early."""
    adapter = base_params if config.lora.rank > 0 else None
    method, ro = Update(config, setup, adapter), config.rollout
    group, updates = ro.group_size, config.train.updates_per_rollout
    key = jax.random.key(config.seed)
    # The reference is the base itself and exists only where the method asks for it.
    ref_params = base_params if method.needs_reference else None
    held = ", ".join(method.networks())
    book.say(f"{config.objective.name}: {method.batch} rollouts an iteration; networks held: {held}")
    terms = f"data_beta {method.objective.data_beta:g}, kl_beta {method.objective.kl_beta:g}"
    if method.rolls_out and config.objective.name != "ddrl" and method.has_data:
        terms += ": a baseline with DDRL's data loss beside it; --config.objective.data_beta=0 leaves it out"
    book.say(terms)
    if method.rolls_out and config.objective.name != "rft" and ro.guidance != config.train.guidance:
        book.say(
            f"rollouts are guided by {ro.guidance:g}, the trained policy by {config.train.guidance:g}: "
            "the update is not the policy gradient of the sampler"
        )

    # --- checkpoint ----------------------------------------------------------------------------------------
    trained = build.trained_params(config, base_params)
    s = build.train_state(setup, trained, method.optimizer, method.exponent, old=method.needs_old)
    # The policy's copy is the only one, unless the base is the reference or what the adapter is of.
    del base_params, adapter, trained
    found = checkpoints.restore(s)
    restored = found is not None
    s = found[1] if found else s
    del found
    step, total = int(s.step), config.train.steps
    guard = Guard(config, workdir, book)
    ended_by = guard.stopped() if restored else None
    if ended_by is not None:
        book.say(f"this run was ended by its monitor ({ended_by}); --config.monitor.on_hacking=warn goes on")
        evaluate_the_end(config, workdir, evaluator, method, s)
        return True
    if restored and step >= total:
        book.say(f"this run is finished: {step} of {total} iterations; --config.train.steps=N goes on from there")
    elif restored:
        book.say(f"resuming at iteration {step} of {total}")
    book.forget_from("ddrl", step)
    book.forget_from("eval", step + (1 if restored else 0))

    # --- evaluations ---------------------------------------------------------------------------------------
    def evaluate(full: bool) -> bool:
        """Evaluates, unless metrics.jsonl has it already. Returns whether the monitor ends the run here."""
        nonlocal s
        written = workdir / f"eval/{step:06d}/eval.json"
        if not distributed.primary(lambda: book.has("eval", step) and (not full or written.exists())):
            book.forget_from("eval", step)
            book.write("eval", step, evaluator(method.network(build.evaluated_params(config, s)), step, full=full))
        ended = guard.look(step, s, checkpoints) if step > 0 else None
        if ended is None:
            return False
        s = ended
        evaluate_the_end(config, workdir, evaluator, method, s)
        return True

    if not restored:
        evaluate(full=True)
        checkpoints.save(0, s, wait=True)
    guard.resume(step, s)
    # The kill may have come between the save and the evaluation, or before the monitor looked at it.
    if restored and 0 < step < total and step % config.eval.every == 0 and evaluate(full=False):
        return True

    def log(done: Iteration) -> None:
        """Writes a finished iteration's line; waits for its gradients where the loop has not yet."""
        done.wait()
        _log_iteration(book, done, total)
        _check_finite(done.skipped_in_a_row(), config.train.max_skipped_in_a_row)

    # --- loop ----------------------------------------------------------------------------------------------
    upcoming = Upcoming(config, setup, ro.conditions, step, total)
    stopping, failed = distributed.any_process(stop(), upcoming.fault is not None)
    early = distributed.Told(setup.mesh)  # of a method that waits for no rewards
    asked: list[scoring.Asked] = []
    low_valid = 0
    pending: Iteration | None = None  # logged one step late, so that dispatch never waits for a metric
    with book.progress(config.objective.name, total, step) as advance:
        while step < total and not (stopping or failed):
            begin = time.perf_counter()
            x0_GX, cond, captions = upcoming.take()
            shape = x0_GX.shape[1:]
            record: dict[str, float] = {}
            # What the iteration before left is let go: a rollout's recorded steps are gigabytes.
            x0_BX = trajectory = rewarded = acting = data = levels = None
            if method.rolls_out:
                acting = method.rollout_params(s)
                keep_mean = method.keeps_mean or (method.on_steps and step == 0)
                x0_BX, trajectory = method.rollout(acting, key, s.step, cond, keep_mean=keep_mean, latent_shape=shape)
                if step == 0 and method.on_steps:
                    _check_replay(config, method, acting, trajectory, cond)
                    if not method.keeps_mean:
                        trajectory = dataclasses.replace(trajectory, mean_old=None)
                # The rollout is queued behind the gradients of the iteration before: it begins where they end.
                begin = pending.wait() if pending else begin
                caption_of = functools.partial(_caption, captions, group)
                asked = [scoring.ask(client, setup.mesh, x0_BX, caption_of)]
                sent = time.perf_counter()
                record["seconds_rollout"] = sent - begin
                if method.needs_reference_rollouts:
                    options = {"keep_mean": False, "reference": True, "latent_shape": shape}
                    x0, _ = method.rollout(ref_params, key, s.step, cond, **options)
                    asked.append(scoring.ask(client, setup.mesh, x0, caption_of))
            else:
                upcoming.read()
                early.tell(stop(), upcoming.fault is not None)
            metrics = []
            for u in range(updates):
                # Dispatched before the rewards are waited for: it needs none of them.
                data = None
                if method.has_data:
                    levels = trajectory if method.data_needs_rollout else None
                    data = method.data(s.params, key, s.step, u, x0_GX, cond, levels)
                if method.rolls_out and u == 0:
                    dispatched = time.perf_counter()
                    upcoming.read()
                    waited = wait_for_rewards(asked, data, stop, upcoming.fault)
                    stopping, failed = waited.stopping, waited.failed
                    if not waited.answered:
                        break  # the iteration is done again by the run that goes on from here
                    record["reward_latency_seconds"] = waited.there - sent
                    # What is not hidden behind the data gradient.
                    record["seconds_reward_wait"] = max(0.0, waited.there - waited.free)
                    if data is not None and waited.free < math.inf:
                        record["data_gradient_seconds"] = waited.free - dispatched
                    scores, *of_reference = [batch.result() for batch in asked]
                    reward, valid = scoring.total_reward(scores, config)
                    record |= reward_metrics(reward, valid, scores, group)
                    rows, weights, valid, gate_metrics = scoring.training_rewards(scores, config)
                    record |= gate_metrics
                    reference = scoring.total_reward(of_reference[0], config) if of_reference else None
                    if reference is not None:
                        record["reference_reward"] = float(np.nanmean(reference[0])) if reference[1].any() else math.nan
                        # Without Z there is no advantage: as bad as rollouts without a reward.
                        record["valid_rate"] = min(record["valid_rate"], float(reference[1].mean()))
                    rewarded = to_device(setup.mesh, rows, weights, valid, reference)
                    for got in (scores, *of_reference):
                        if got.reason:
                            book.say(f"iteration {step}: {int((~got.valid).sum())} rewards invalid: {got.reason}")
                # Not by name: the third result is a whole gradient.
                s, of_update = method.apply(s, key, u, x0_BX, trajectory, cond, rewarded, data, ref_params)[:2]
                metrics.append(of_update)
            if not metrics:
                break
            if pending is not None:
                log(pending)
            pending = Iteration(step, metrics, record, begin)
            step += 1
            advance()
            if not method.rolls_out:
                stopping, failed = early.told()

            low_valid = low_valid + 1 if record.get("valid_rate", 1.0) < config.reward.min_valid_rate else 0
            invalid = low_valid >= config.reward.min_valid_window
            saving = step % config.checkpoint.every == 0 or step == total or invalid or stopping
            # A run that has to end now is evaluated by the one that goes on.
            looking = step % config.eval.every == 0 and step < total and not (stopping or failed)
            if saving or looking:
                # Its line first: what is saved must not be without one, whatever ends the run after it.
                log(pending)
                pending = None
            if saving:
                checkpoints.save(step, s, wait=invalid)
            if invalid:
                raise stopped_by_all(
                    f"fewer than {config.reward.min_valid_rate:.0%} of the rewards were valid in {low_valid} "
                    f"iterations in a row; the last reason: {scores.reason or 'not given'}. The state is saved: "
                    "mend the sidecar and start the same command again"
                )
            if looking:
                if evaluate(full=False):
                    return True
                # Minutes may have gone by.
                stopping, failed = distributed.any_process(stop(), upcoming.fault is not None)
        if pending is not None:
            log(pending)

    # --- the end -------------------------------------------------------------------------------------------
    if int(s.skipped) and step >= total:
        book.say(
            f"{int(s.skipped)} updates were skipped because something was not finite: see skipped in metrics.jsonl"
        )
    if failed:
        distributed.ending()
    checkpoints.save(step, s, wait=True)
    if failed:
        faults = [upcoming.fault, *(batch.fault for batch in asked)]
        raise next((fault for fault in faults if fault is not None), None) or distributed.ended_elsewhere()
    if step < total:
        book.say(f"stopped at iteration {step} of {total}; the same command goes on from there")
        return False
    if total > 0:
        evaluate(full=True)
    return True


def evaluate_the_end(
    config: ConfigDict, workdir: Path, evaluator: Evaluator, method: Update, s: state.TrainState
) -> None:
    """In full, where the monitor has ended a run: the report shows what it leaves behind."""
    step = int(s.step)
    if not distributed.primary((workdir / f"eval/{step:06d}/eval.json").exists):
        evaluator(method.network(build.evaluated_params(config, s)), step, full=True)


# ------------------------------------------------------------------------------------------------- the monitor


class Guard:
    """What monitor.on_hacking does: at every evaluation the signals are read off the run's own metrics.jsonl.

    "warn" says so and goes on. "stop" saves the state and ends the run. "rollback" ends it at the state of the last
    evaluation that was clean, which a checkpoint of its own keeps. Both leave stopped.json.
    """

    def __init__(self, config: ConfigDict, workdir: Path, book: Logbook) -> None:
        self._monitor, self._workdir, self._book = config.monitor, workdir, book
        self._weights = config.reward.weights.to_dict()
        self._file = workdir / "stopped.json"
        if self._monitor.on_hacking == "warn" and distributed.is_primary():
            self._file.unlink(missing_ok=True)

    def stopped(self) -> str | None:
        """Why an earlier start of this run was ended, or None."""
        return distributed.primary(
            lambda: json.loads(self._file.read_text())["reason"] if self._file.exists() else None
        )

    def _why(self) -> str:
        def read() -> str:
            rows = read_metrics(self._workdir / "metrics.jsonl")
            return monitor.is_hacked(monitor.read_signals(rows, self._monitor, self._weights))

        return distributed.primary(read)

    def _clean(self) -> Checkpoints:
        return Checkpoints(self._workdir / "checkpoints/clean", keep=1)

    def resume(self, step: int, s: state.TrainState) -> None:
        """At every start: clean states of steps that are repeated are gone, and a run that is not hacked yet can be
        rolled back to here."""
        if self._monitor.on_hacking == "rollback":
            with self._clean() as clean:
                clean.forget_after(step)
                if not self._why():
                    clean.save(step, s)

    def look(self, step: int, s: state.TrainState, checkpoints: Checkpoints) -> state.TrainState | None:
        """After the evaluation at `step`. Returns the state that the run ends with where it has to end, else None."""
        why = self._why()
        if not why:
            if self._monitor.on_hacking == "rollback":
                with self._clean() as clean:  # waits for the save when it closes
                    clean.save(step, s)
            return None
        self._book.say(f"HACKING at iteration {step}: {why}")
        if self._monitor.on_hacking == "warn":
            return None
        if self._monitor.on_hacking == "rollback":
            with self._clean() as clean:
                found = clean.restore(s)
            if found is None:
                self._book.say("rollback: this run was never clean since it may roll back; it stops where it is")
            else:
                s = found[1]
                checkpoints.forget_after(found[0])
                later = (f for f in (self._workdir / "eval").glob("*/") if f.name.isdigit() and int(f.name) > found[0])
                for folder in later if distributed.is_primary() else ():
                    shutil.rmtree(folder)  # of states that are no longer this run's
        at = int(s.step)
        checkpoints.save(at, s, wait=True)
        record = {"step": step, "action": self._monitor.on_hacking, "ended_at": at, "reason": why}
        distributed.primary(lambda: write_text(self._file, json.dumps(record)))
        self._book.say(f"{self._monitor.on_hacking}: the run ends with the state of iteration {at}")
        return s


# ------------------------------------------------------------------------------------------------- the parts


def _trained(s: state.TrainState) -> Any:
    return s.params if s.ema is None else s.ema


def clip_dataset(config: ConfigDict, mesh: Mesh, batch_size: int) -> Any:
    """Batch n of captioned training clips, this process's rows; a pure function of (seed, n)."""
    try:
        source = build.data_set(config).training()
    except ValueError as error:
        raise error if isinstance(error, ConfigError) else ConfigError(f"config.{error}") from error
    batches: Any = pipeline.bucketed_batches if config.data.name == "videos" else pipeline.clip_batches
    return batches(source, batch_size, config.seed, build.own_rows(mesh, batch_size))


class Upcoming:
    """The batch of the next step, read while the devices are busy with this one.

    Attributes:
      fault: why it could not be read, or None. Raised by the loop, once all processes have stopped at one step.
    """

    def __init__(self, config: ConfigDict, setup: build.Setup, batch_size: int, step: int, total: int) -> None:
        self._config, self._setup, self._size = config, setup, batch_size
        self._next, self._total = step, total
        dataset = clip_dataset(config, setup.mesh, batch_size)
        # Batches from `step` on, made in a thread.
        self._batches = iter(dataset[step:].to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)))
        self._batch: Any = None
        self.fault: Exception | None = None
        self.read()

    def read(self) -> None:
        """Reads the next batch, if there is a step for it."""
        if self._next >= self._total:
            return
        try:
            self._batch = next_batch(self._config, self._setup, self._batches, self._next, self._size)
        except (RunStopped, ConfigError, rewards.ConfigurationFault, rewards.TextUnavailable) as error:
            self.fault = error
        self._next += 1

    def take(self) -> tuple[jax.Array, dict[str, Any], dict[int, str]]:
        """The batch that was read last: `next_batch`'s, its text as the network takes it. All processes take theirs at
        the same time, once they know that each has one."""
        (x0_GX, cond, captions), self._batch = self._batch, None
        return x0_GX, self._setup.spread(cond), captions


def next_batch(
    config: ConfigDict, setup: build.Setup, batches: Iterator[dict[str, Any]], step: int, count: int
) -> tuple[jax.Array, dict[str, Any], dict[int, str]]:
    """Batch `step` of `count` conditions on the devices: clean latents (G,C,T,h,w), the condition, and the captions of
    this process's rows."""
    try:
        clips = next(batches)
    except ValueError as error:  # stored clips that turn out to be damaged
        raise RunStopped(f"the data of step {step} cannot be read: {error}") from error
    rows, given_G = build.own_rows(setup.mesh, count), None
    x0_GX = build.to_global(setup.mesh, setup.latents(clips), count, mesh_lib.latent_sharding)
    if config.data.image_to_video > 0:
        given_G = pipeline.image_to_video_mask(config.seed, step, count, config.data.image_to_video)[rows]
    captions = dict(zip(rows.tolist(), clips["caption"], strict=True))
    return x0_GX, setup.condition(clips["caption"], x0_GX, given_G, count), captions


def _caption(captions: dict[int, str], group: int, row: int) -> str:
    """Of a rollout: its condition's."""
    return captions[row // group]


POLL_S = 3.0


class Waited(NamedTuple):
    """How waiting for rewards ended; times in seconds of time.perf_counter."""

    answered: bool  # all are there, on every process
    stopping: bool  # a process was asked to stop
    failed: bool  # a process has met what ends the run
    there: float  # when this process's rewards were there
    free: float  # when the data gradient was done; infinite: not before the rewards were there


def wait_for_rewards(
    asked: Sequence[scoring.Asked], data: Any, stop: Callable[[], bool], fault: Exception | None
) -> Waited:
    """Waits on the host, which may take an hour, until all processes have their rewards or the run has to stop.

    Every process asks the others each POLL_S seconds at least, and at once when it has what it waits for: a handful of
    bytes, behind the data gradient where that is under way. So all leave after the same number of questions, a signal
    is heeded within that time once the gradient is done, and the collective of a late process is never met by another
    one of the next step. `data`: the data gradient under way, or None.
    """
    began, there, free = time.perf_counter(), math.inf, math.inf
    several = jax.process_count() > 1
    while True:
        asking = time.perf_counter() + POLL_S
        while True:
            now = time.perf_counter()
            if free == math.inf and there == math.inf and (data is None or data[0].is_ready()):
                free = now if data is not None else began
            done = all(batch.done() for batch in asked)
            refused = any(batch.fault is not None for batch in asked)
            if done or refused or stop() or (several and now > asking):
                break
            time.sleep(0.01)
        if done:
            there = min(there, now)
        pending, stopping, lost, unread = distributed.any_process(not done, stop(), refused, fault is not None)
        if not pending or stopping or lost:
            return Waited(not (pending or lost), stopping, lost or unread, there, free)


def _check_finite(in_a_row: int, limit: int) -> None:
    if in_a_row >= limit:
        raise stopped_by_all(
            f"{in_a_row} steps in a row had a non-finite loss, gradient or update and were skipped. The first one has "
            "skipped = 1 in metrics.jsonl; a lower learning rate, in a new --workdir, is what usually helps. What was "
            "saved last stays"
        )


def _check_replay(config: ConfigDict, method: Update, params: Any, trajectory: Trajectory, cond: Any) -> None:
    """The first update's policy must be the rollout's: max |mean - mean_old| of a recorded step within 1e-3 std."""
    limit = 1e-3 if config.model.dtype == "float32" else 5e-2
    gap_K = distributed.to_host(method.replay_gap(params, trajectory, cond))
    if not gap_K.max() <= limit:
        worst = int(gap_K.argmax())
        raise stopped_by_all(
            f"rollout and training disagree: at step {int(trajectory.step[worst])} the replayed mean is "
            f"{gap_K[worst]:.2e} std away from the rollout's (limit {limit:g})"
        )


def reward_metrics(reward_B: np.ndarray, valid_B: np.ndarray, scores: rewards.Scores, group: int) -> dict[str, float]:
    """Means over valid rewards and sub-scores, and the mean over groups of their within-group std."""
    reward_GN = np.where(valid_B, reward_B, np.nan).reshape(-1, group)
    record = {
        "reward": float(np.nanmean(reward_GN)) if valid_B.any() else math.nan,
        "reward_std": _group_std(reward_GN),
        "valid_rate": float(valid_B.mean()),
        "scorer_seconds": scores.seconds,
    }
    for name, value in scores.scores.items():
        if np.isfinite(value).any():
            record[f"sub/{name}"] = float(np.nanmean(value))
            record[f"sub_std/{name}"] = _group_std(np.asarray(value).reshape(-1, group))
    return record


def _group_std(value_GN: np.ndarray) -> float:
    """The mean over groups of the within-group std (unbiased), NaN where no group has two members."""
    value_GN = np.where(np.isfinite(value_GN), value_GN, np.nan)
    several = np.isfinite(value_GN).sum(1) >= 2
    return float(np.nanstd(value_GN[several], axis=1, ddof=1).mean()) if several.any() else math.nan


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
