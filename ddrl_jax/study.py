"""`--mode=study`: a comparison. Every arm from one base, with equal settings and several seeds, and one page of it all.

    python -m ddrl_jax.main --mode=study --config=configs/study_digits.py --workdir=runs/study_digits

An arm is the config with a few fields set otherwise (`config.study.arms`). Each arm and seed is a run in a process of
its own, pinned to its share of the cores: `python -m ddrl_jax.main` on the config file that is left in its workdir.
This module starts them, gives them one sidecar for all, watches them, and gathers what they wrote in study.json, of
which report.study makes the page. It knows a run's files and exit status, and nothing of how a run works.

    base/               the pre-trained network that all arms start from (elsewhere with study.base)
    synthetic/          clips of the base, where an arm asks for "{synthetic}"
    arms/NAME/seed0/    one run: config.py, console.log, and all that a run leaves behind
    study.json          what the page is made of
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import math
import os
import pprint
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from ml_collections import ConfigDict
from rich.progress import BarColumn, Progress, TextColumn

from ddrl_jax import build, evaluate, report, rewards, scoring, train
from ddrl_jax import config as config_lib
from ddrl_jax.config import RATIO_OBJECTIVES, ConfigError
from ddrl_jax.diffusion.process import EDMChurn
from ddrl_jax.logbook import Logbook, read_metrics, write_text
from ddrl_jax.report.study import write_study

ARM_FIELDS = ("label", "group", "set", "seeds")
# What is the same in every arm, so that arms can be compared and one base and one sidecar serve them all.
COMMON = (
    *("seed", "study", "prepare", "eval", "mesh", "codec", "text", "model", "data.name", "data.frames", "data.size"),
    *(f"reward.{f}" for f in ("launch", "url", "token_env", "env", "port", "retries", "timeout_s", "fps")),
)
FROM = ("pretrain.from_run", "pretrain.from_stage")  # all of pretrain that an arm may set: the rest is the base's
WHOLE = (
    "reward.weights",
    "reward.bounds",
    "reward.gates",
)  # set as a whole: a sub-score that the arm does not name is not there
NAMED = ("process", "objective")  # with a name of its own, an arm leaves none of the common values
OF_NETWORK = ("model", "codec", "text", "data.frames", "data.size", "pretrain.ema_rate")
OF_BASE = (*OF_NETWORK, "seed", "data", "process", "pretrain")
OF_JUDGE = ("data.frames", "data.size", "eval.seed", "eval.judge_steps")
OF_SCORER = ("data.frames", "data.size", "eval.seed")

RETRIES = 20  # of a batch of rewards: about half a minute, in which the sidecar is started again
RELAUNCHES = 20
RESTARTS = 3  # of a run whose rewards failed because the sidecar did
POLL_S, LINE_S = 0.25, 60.0

CHILD = (
    "import sys; from ddrl_jax import main, study; study.end_with(int(sys.argv[1])); sys.exit(main.main(sys.argv[1:]))"
)


@dataclasses.dataclass(frozen=True)
class Arm:
    """An entry of config.study.arms.

    `values` is its `set`; `needs` names the arms that it starts from; `seeds`: it takes the first so many of the
    study's seeds, 0 all.
    """

    name: str
    label: str
    group: str
    values: dict[str, Any]
    needs: tuple[str, ...]
    synthetic: bool
    seeds: int = 0

    @property
    def flat(self) -> dict[str, Any]:
        """{"objective.name": "sft", ...}; reward.weights, reward.bounds and reward.gates stay whole."""
        return _flat(self.values)


@dataclasses.dataclass
class Run:
    """One process: the base, the synthetic clips, or an arm with one seed.

    `status` is waiting, running, done, stopped (it saved what it had and left) or failed (then `error` is a line).
    `cost` is that of one step in network evaluations, which the time left is made of.
    """

    name: str
    workdir: Path
    config: ConfigDict
    needs: tuple[str, ...] = ()
    arm: Arm | None = None
    mode: str = "train"
    cost: float = 0.0
    status: str = "waiting"
    error: str = ""
    steps: int = 0  # as last seen
    cores: tuple[int, ...] = ()
    slot: int = 0
    process: subprocess.Popen[bytes] | None = None
    generation: int = 0  # of the sidecar, when the process was started
    restarts: int = 0

    @property
    def seed(self) -> int:
        return self.config.seed

    @property
    def total(self) -> int:
        """Steps of the whole run: iterations of an arm, optimizer steps of the base."""
        if self.mode != "train":
            return 0
        return self.config.train.steps if self.arm else self.config.pretrain.steps


# ------------------------------------------------------------------------------------------------- the study


def run(config: ConfigDict, workdir: Path, *, config_file: str, arguments: Sequence[str]) -> bool:
    """Runs what the study still lacks and writes its page. Returns False when SIGTERM or Ctrl-C ended it early.

    Runs go seed by seed and, within a seed, the group "main" first, so that a study that is ended early is a smaller
    one. The page is written after each seed and at the end.

    Args:
      config: validated, but for study.arms, which is checked here.
      workdir: absolute; made if it is missing.
      config_file, arguments: of this call, for the page.

    Raises:
      ConfigError: bad input; nothing was started.
      RunStopped: runs failed; all others are finished and the page says which failed.
    """
    arms = read_arms(config)
    runs = plan(config, arms, workdir)
    base, rest = runs[0], runs[1:]
    counted = [r for r in rest if r.arm]
    title = Path(config_file).stem.replace("_", " ").capitalize()
    command = shlex.join(["python", "-m", "ddrl_jax.main", *arguments])
    seeds_shown: set[int] = set()

    def show() -> None:
        collect(workdir, arms, runs, title=title, command=command)
        book.say("study: " + "  ".join(str(_shown(p)) for p in write_study(workdir)))

    def show_new_seeds() -> None:
        over = {s for s in config.study.seeds if all(r.status in ("done", "failed") for r in counted if r.seed == s)}
        # The last one's page is that of the end.
        if over - seeds_shown and len(over) < len(config.study.seeds):
            show()
        seeds_shown.update(over)

    lock = build.own_workdir(workdir)
    book = Logbook(workdir, tensorboard=False)
    try:
        with train.interrupts() as stop, Watch(book, runs) as watch:
            pool = Pool(runs, config.study.workers, watch, stop)
            pool.work([base])
            if base.status == "failed":
                raise train.RunStopped(f"the base failed: {base.error} ({_shown(base.workdir / 'console.log')})")
            if not stop() and any(r.status == "waiting" for r in rest):
                with open_server(config, rest, base.workdir, workdir, book) as server:
                    pool.work(rest, server, show_new_seeds)
            if base.status == "done":
                show()
            stopped = stop()
    finally:
        book.close()
        lock.close()
    finished = sum(r.status == "done" for r in counted)
    failed = [f"{r.name}: {r.error}" for r in rest if r.status == "failed"]
    if stopped and finished < len(counted):
        book.say(f"stopped: {finished} of {len(counted)} runs are finished; the same command goes on from there")
        return False
    if failed:
        raise train.RunStopped(
            f"{len(failed)} of {len(rest)} runs failed; the same command tries them again. {'; '.join(failed)}"
        )
    return True


# -------------------------------------------------------------------------------------------------- the arms


def read_arms(config: ConfigDict) -> list[Arm]:
    """config.study.arms in its order. Raises ConfigError, which names study.arms.NAME.FIELD."""
    arms = []
    entries = config.study.arms.to_dict()
    if not entries:
        raise ConfigError("config.study.arms={}: must name at least one arm; configs/study_digits.py is an example")
    for name, entry in entries.items():
        where = f"config.study.arms.{name}"
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            raise ConfigError(f"{where}: an arm's name must be of letters, digits, _ and -, since its folder has it")
        if not isinstance(entry, dict):
            raise ConfigError(f"{where}={entry!r}: must be a block with label, group and set")
        for field in entry:
            if field not in ARM_FIELDS:
                close = difflib.get_close_matches(field, ARM_FIELDS, n=1, cutoff=0.4)
                hint = f"; did you mean {close[0]}?" if close else ""
                raise ConfigError(f"{where}.{field}: there is no such field{hint}; an arm has {', '.join(ARM_FIELDS)}")
        values = entry.get("set", {})
        if not isinstance(values, dict):
            raise ConfigError(
                f"{where}.set={values!r}: must be a part of a config, such as {{'train': {{'steps': 9}}}}"
            )
        for field in ("label", "group"):
            if not isinstance(entry.get(field, ""), str):
                raise ConfigError(f"{where}.{field}={entry[field]!r}: must be text")
        count = entry.get("seeds", 0)
        if type(count) is not int or count < 0:
            raise ConfigError(f"{where}.seeds={count!r}: must be a number of the study's seeds, or 0 for all of them")
        needs: list[str] = []
        synthetic = False
        for field, value in _flat(values).items():
            for holder in re.findall(r"\{([^{}]*)\}", value) if isinstance(value, str) else ():
                other = holder.removeprefix("arm:")
                synthetic |= holder == "synthetic"
                if other != holder and other in entries and other != name:
                    needs.append(other)
                elif holder not in ("base", "synthetic"):
                    raise ConfigError(
                        f"{where}.set.{field}={value!r}: {{{holder}}} stands for nothing; there are {{base}}, "
                        "{synthetic} and {arm:NAME}, the folders of the base, its clips and another arm's run"
                    )
        arms.append(
            Arm(name, entry.get("label") or name, entry.get("group") or "main", values, tuple(needs), synthetic, count)
        )
    by_name = {a.name: a for a in arms}
    for arm in arms:
        circle = _circle(arm.name, by_name)
        if circle:
            raise ConfigError(f"config.study.arms.{arm.name}: needs itself: {' from '.join(circle)}")
        short = [n for n in arm.needs if 0 < by_name[n].seeds < (arm.seeds or math.inf)]
        if short:
            raise ConfigError(
                f"config.study.arms.{arm.name}.seeds={arm.seeds}: must be 1 to {by_name[short[0]].seeds}, the seeds of "
                f"{short[0]}, from which it starts"
            )
    return arms


def _circle(name: str, arms: dict[str, Arm], seen: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The chain of arms from `name` back to one that is in it already; () where there is none."""
    if name in seen:
        return (*seen, name)
    return next((c for n in arms[name].needs if (c := _circle(n, arms, (*seen, name)))), ())


def arm_config(config: ConfigDict, arm: Arm, seed: int, workdir: Path, base: Path) -> ConfigDict:
    """The config of one run: the study's with the arm's fields, the seed, the base and the study's sidecar.

    Raises ConfigError, which names study.arms.NAME.set.FIELD where the arm set the field.
    """
    where = f"config.study.arms.{arm.name}.set."
    result = config.copy_and_resolve_references()
    result.pretrain.from_run = str(base)
    folders = {f"arm:{name}": str(run_folder(workdir, name, seed)) for name in arm.needs}
    folders |= {"base": str(base), "synthetic": str(workdir / "synthetic")}

    def fill(value: Any) -> Any:
        if isinstance(value, str):
            return re.sub(r"\{([^{}]*)\}", lambda m: folders[m[1]], value)
        return value

    for block in NAMED:
        if f"{block}.name" in arm.flat:
            for field in result[block]:
                result[block][field] = None if field != "name" else result[block].name
    known = config_lib.flatten(config_lib.default().to_dict())
    for field, value in arm.flat.items():
        common = next((c for c in COMMON if field == c or field.startswith(c + ".")), None)
        if common or (field.startswith("pretrain.") and field not in FROM):
            raise ConfigError(
                f"{where}{field}={value!r}: is the same in all arms; set config.{field} outside study.arms"
            )
        if field not in known and field not in WHOLE:
            close = difflib.get_close_matches(field, known, n=1, cutoff=0.4)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ConfigError(f"{where}{field}={value!r}: there is no such field{hint}")
        section, _, key = field.rpartition(".")
        block = config_lib.get(result, section)
        try:
            with result.unlocked():
                if field in WHOLE:
                    block[key] = ConfigDict()  # without the old one's fields
                block[key] = fill(value)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{where}{field}={value!r}: {' '.join(str(error).split())}") from error
    result.seed = seed
    with result.unlocked():
        result.study = config_lib.default().study
    if config.reward.launch:
        result.reward.launch, result.reward.url = False, "http://127.0.0.1:1"  # until the sidecar is there
        result.reward.retries = max(RETRIES, config.reward.retries)
    try:
        config_lib.validate(result)
        build.build_process(result)
        build.build_objective(result)
    except ConfigError as error:
        field = str(error).partition("=")[0].removeprefix("config.")
        own = next((f for f in arm.flat if field == f or field.startswith(f + ".")), None)
        text = where + str(error).removeprefix("config.") if own else f"config.study.arms.{arm.name}: {error}"
        raise ConfigError(text) from error
    return result


def run_folder(workdir: Path, arm: str, seed: int) -> Path:
    return workdir / "arms" / arm / f"seed{seed}"


def plan(config: ConfigDict, arms: Sequence[Arm], workdir: Path) -> list[Run]:
    """All runs in order: the base first, then the synthetic clips if an arm asks for them, then seed by seed.

    What is on disk is taken over: finished runs are "done". Raises ConfigError where it is of another config.
    """
    seeds = tuple(config.study.seeds)
    if not seeds or len(set(seeds)) < len(seeds) or not all(type(s) is int and 0 <= s < 2**32 for s in seeds):
        raise ConfigError(f"config.study.seeds={seeds!r}: must be distinct whole numbers from 0, at least one")
    if config.pretrain.from_run:
        raise ConfigError(
            f"config.pretrain.from_run={config.pretrain.from_run!r}: must be empty in a study, whose base is study.base"
        )
    runs = [_base_run(config, workdir)]
    base = runs[0].workdir
    by_need: dict[str, Run] = {}
    if any(a.synthetic for a in arms):
        clips = config.copy_and_resolve_references()
        clips.pretrain.from_run, clips.prepare.out = str(base), str(workdir / "synthetic")
        by_need["synthetic"] = Run("synthetic", workdir / "prepare", clips, ("base",), mode="prepare")
        runs.append(by_need["synthetic"])
    ordered = sorted(arms, key=lambda a: a.group != "main")  # stable: else in the config's order
    for index, seed in enumerate(seeds):
        for arm in ordered:
            if arm.seeds and index >= arm.seeds:
                continue
            folder = run_folder(workdir, arm.name, seed)
            own = arm_config(config, arm, seed, workdir, base)
            needs = ["base"] + ["synthetic"] * arm.synthetic + [f"{n}/seed{seed}" for n in arm.needs]
            new = Run(f"{arm.name}/seed{seed}", folder, own, tuple(needs), arm, cost=_cost(own))
            if has_begun(new):
                try:
                    config_lib.check_same_run(own, folder)
                except ConfigError as error:
                    raise ConfigError(f"study.arms.{arm.name}: {error}, or remove the folder") from error
            if is_finished(new):
                new.status, new.steps = "done", new.total
            runs.append(new)
    if "synthetic" in by_need and config.data.name != "digits":
        raise ConfigError(f"config.data.name={config.data.name!r}: must be digits where an arm asks for {{synthetic}}")
    if "synthetic" in by_need and all(r.status == "done" for r in runs if r.arm and r.arm.synthetic):
        by_need["synthetic"].status = "done"
    return runs


def _base_run(config: ConfigDict, workdir: Path) -> Run:
    given = config.study.base
    folder = Path(given).absolute() if given else workdir / "base"
    own, default = config.copy_and_resolve_references(), config_lib.default()
    with own.unlocked():
        # Not the arms' settings: they may be changed later without another base.
        for block in ("objective", "advantage", "nft", "monitor", "study", "prepare"):
            own[block] = default[block]
        own.train = default.train
    for field in ("micro_batch", "max_skipped_in_a_row"):
        own.train[field] = config.train[field]
    own.train.steps = 0
    result = Run("base", folder, own, cost=3.0 * config.pretrain.batch_size)
    looked_at = own.copy_and_resolve_references()
    looked_at.pretrain.from_run = str(folder)
    try:
        train.check_base(looked_at)
    except ConfigError as error:
        if given:
            raise ConfigError(str(error).replace("config.pretrain.from_run", "config.study.base", 1)) from error
        if config.pretrain.steps < 1:
            raise ConfigError(
                f"config.pretrain.steps={config.pretrain.steps}: must be at least 1, or study.base a finished base"
            ) from error
    else:
        for field, then, now in _differences(own, folder, OF_NETWORK if given else OF_BASE):
            raise ConfigError(
                f"config.{field}={now!r}: the base in {_shown(folder)} has {then!r}; take that value, or another "
                + ("study.base" if given else "--workdir")
            )
        if given or (folder / "eval/000000/eval.json").exists():
            result.status, result.steps = "done", result.total
    if result.status != "done":
        try:
            config_lib.check_same_run(own, folder)
        except ConfigError as error:
            raise ConfigError(f"the base: {error}, or remove the folder") from error
    return result


def _differences(config: ConfigDict, folder: Path, fields: Sequence[str]) -> list[tuple[str, Any, Any]]:
    """(field, value in the run's config.json, value now), of these fields and blocks."""
    saved = json.loads((folder / "config.json").read_text())
    different = config_lib.differences(config, saved)
    return [d for d in different if any(d[0] == f or d[0].startswith(f + ".") for f in fields)]


def has_begun(run: Run) -> bool:
    """Whether there is anything in the run's folder that was measured or trained."""
    return bool(read_metrics(run.workdir / "metrics.jsonl"))


def is_finished(run: Run) -> bool:
    """Whether the run is through, its last evaluation and summary included."""
    steps = _of_json(run.workdir / "summary.json", "run", "steps")
    # stopped.json: its monitor ended it (monitor.on_hacking), which is a result and not a failure, also where it went
    # back to where it began; "warn" goes on from there.
    ended = (run.workdir / "stopped.json").exists() and run.config.monitor.on_hacking != "warn"
    measured = _of_json(run.workdir / "summary.json", "after") or run.total == 0 or ended
    return steps is not None and bool(measured) and (steps >= run.total or ended)


# ------------------------------------------------------------------------------------- network evaluations


def evaluations_per_iteration(config: ConfigDict) -> dict[str, int]:
    """Network evaluations (forward passes of one sample) of one iteration, evaluations and the first replay left out.

    rollout: sampling. policy: in the policy term, one a sample and trained step (of DiffusionNFT and rejection
    fine-tuning one a sample and draw). data: in the data loss. reference: of the reference and the old policy, sampling
    for Z included. A guided evaluation counts twice. policy + data is what the paper counts (arXiv 2512.04332, Tab. 3):
    for each condition N (1 + |T|) with the reduced data loss and 2 N |T| with the full one; these have a backward pass
    as well.
    """
    process, objective, ro = build.build_process(config), build.build_objective(config), config.rollout
    name, batch = config.objective.name, ro.conditions * ro.group_size
    step, finish = (2 if process.solver == "2mid" else 1, 1) if isinstance(process, EDMChurn) else (1, 0)
    steps = build.trained_step_count(config)
    sampling = batch * (ro.num_steps * step + finish) * (1 if ro.guidance == 0 else 2)
    replay = batch * steps * step * (1 if config.train.guidance == 0 else 2)
    draws = batch * config.nft.draws * (1 if config.train.guidance == 0 else 2)

    counts = {"rollout": 0 if name == "sft" else sampling, "policy": 0, "data": 0, "reference": 0}
    if name in RATIO_OBJECTIVES:
        counts["policy"] = replay
        counts["reference"] = replay * (objective.kl_beta > 0) + sampling * (config.advantage.kind == "partition")
    elif name == "nft":
        counts["policy"] = draws
        counts["reference"] = draws * (2 if objective.kl_beta > 0 else 1)  # the old policy's, and the reference's
    elif name == "rft":
        counts["policy"] = batch * objective.data_draws
    if objective.data_beta > 0:
        counts["data"] = batch * (steps if objective.data_levels == "rollout" else objective.data_draws)
    return counts | {"total": sum(counts.values())}


def _cost(config: ConfigDict) -> float:
    """Of a step, its share of the evaluations included; a forward and a backward pass count as three."""
    count = evaluations_per_iteration(config)
    of_eval = config.eval
    clips = 2 * of_eval.clips + config.train.steps / of_eval.every * of_eval.clips_during
    return (
        count["rollout"]
        + count["reference"]
        + 3 * (count["policy"] + count["data"])
        + clips * (of_eval.num_steps + 1) / max(config.train.steps, 1)
    )


# ---------------------------------------------------------------------------------------------- the processes


class Pool:
    """Starts runs as processes, at most `workers` at once, in their order, each when what it needs is done."""

    def __init__(self, runs: Sequence[Run], workers: int, watch: Watch, stop: Callable[[], bool]) -> None:
        self._by_name = {r.name: r for r in runs}
        self._watch, self._stop, self._workers = watch, stop, workers
        self._all = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        self._running: list[Run] = []

    def work(
        self, runs: Sequence[Run], server: Server | None = None, settled: Callable[[], None] | None = None
    ) -> None:
        """Until all of them are done or failed, or `stop()` and those that run have saved and left.

        `settled` is called whenever runs have ended. Whatever else ends this, no process stays behind.
        """
        asked = False
        try:
            while True:
                ended = [r for r in self._running if r.process is not None and r.process.poll() is not None]
                for r in ended:
                    self._running.remove(r)
                    self._settle(r, server)
                waiting = [r for r in runs if r.status == "waiting"]
                if self._stop() and not asked:
                    asked = True
                    for r in self._running:
                        _signal(r, signal.SIGTERM)
                for r in [] if asked else waiting:
                    self._start_or_wait(r, server, alone=len(runs) == 1)
                if server is not None and not asked:
                    server.keep()
                self._watch.update(self._running)
                if ended and settled is not None and not asked:
                    settled()
                if not self._running and (asked or not any(r.status == "waiting" for r in runs)):
                    return
                time.sleep(POLL_S)
        finally:
            for r in self._running:
                _signal(r, signal.SIGKILL)
                assert r.process is not None
                r.process.wait()
                r.status = "stopped"
            self._running.clear()

    def _start_or_wait(self, r: Run, server: Server | None, alone: bool) -> None:
        needed = [self._by_name[n] for n in r.needs]
        lost = next((n for n in needed if n.status == "failed"), None)
        if lost is not None:
            r.status, r.error = "failed", f"it needs {lost.name}, which failed"
        if lost is not None or any(n.status != "done" for n in needed) or len(self._running) >= self._workers:
            return
        slot = min(set(range(self._workers)) - {o.slot for o in self._running})
        count = len(self._all)
        share = self._all[slot * count // self._workers : (slot + 1) * count // self._workers]
        # More workers than cores: they share.
        share = self._all if alone else share or ([self._all[slot % count]] if count else [])
        r.slot, r.cores, r.generation = slot, tuple(share), 0 if server is None else server.generation
        start(r, self._by_name["base"].workdir, server, crowded=self._workers > 1)
        r.status = "running"
        self._running.append(r)

    def _settle(self, r: Run, server: Server | None) -> None:
        assert r.process is not None
        code = r.process.returncode
        # The base and the clips say by their exit status alone that they are through, unless they were asked to leave.
        through = is_finished(r) if r.arm else code == 0 and not self._stop()
        if r.mode == "prepare":  # it leaves with 0 when it is asked to, without clips
            through = through and (Path(r.config.prepare.out) / "clips.npz").exists()
        if through and code in (0, 1):
            r.status, r.steps = "done", r.total
        elif self._stop() and code in (0, -signal.SIGTERM, -signal.SIGKILL):
            r.status = "stopped"
        elif code == 1 and server is not None and r.restarts < RESTARTS and server.changed_since(r.generation):
            r.status, r.restarts = "waiting", r.restarts + 1
            self._watch.book.say(f"{r.name}: its sidecar was lost; it is started again")
        else:
            r.status, r.error = "failed", _last_words(r, code)
            self._watch.book.say(f"{r.name} failed: {r.error}")
        if r.status == "done" and r.arm:
            self._watch.book.say(f"{r.name} is done")


def start(r: Run, base: Path, server: Server | None, *, crowded: bool) -> None:
    """Leaves the run's config in its folder and starts its process there."""
    r.workdir.mkdir(parents=True, exist_ok=True)
    env = dict(os.environ, PYTHONUNBUFFERED="1")
    if crowded:  # several on one accelerator: none may take all of its memory
        env.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if r.arm and server is not None:
        r.config.reward.url = server.url
        env[r.config.reward.token_env] = server.token
    if r.arm and not has_begun(r):
        # A new run removes a judge that may be of other settings, and knows that it is not new by its config.json.
        write_text(r.workdir / "config.json", config_lib.to_json(r.config))
        (r.workdir / "judge.npz").unlink(missing_ok=True)
        if (base / "judge.npz").exists() and not _differences(r.config, base, OF_JUDGE):
            shutil.copyfile(base / "judge.npz", r.workdir / "judge.npz")
    file = r.workdir / "config.py"
    write_text(file, _config_file(r))
    command = [sys.executable, "-c", CHILD, str(os.getpid()), f"--mode={r.mode}"]
    command += [f"--config={_shown(file)}", f"--workdir={_shown(r.workdir)}"]
    with (r.workdir / "console.log").open("ab") as log, pinned(r.cores):
        # A session of its own: Ctrl-C is for the study, which then asks its runs to leave.
        r.process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )


def _config_file(r: Run) -> str:
    what = f"Arm {r.arm.name} with seed {r.seed}" if r.arm else f"The {r.name}"
    values = pprint.pformat(r.config.to_dict(), width=110, sort_dicts=False)
    return (
        f'"""{what}: written by --mode=study when it starts the run."""\n\n'
        "from math import inf  # noqa: F401\n\nfrom ml_collections import ConfigDict\n\n"
        f"VALUES = {values}\n\n\ndef get_config():\n    return ConfigDict(VALUES)\n"
    )


@contextlib.contextmanager
def pinned(cores: Sequence[int]) -> Iterator[None]:
    """What is started within may use these cores only, from its first instruction on: jax counts them when imported."""
    if not cores or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)  # of this thread, which its children inherit
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def end_with(parent: int) -> None:
    """In a run's process: ends it, as a kill would, when the study is gone.

    The sidecar goes with the study, and the run must not go on without rewards: what it saved last is whole, and the
    client's attempts outlast the quarter of a second between two looks.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.25)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _signal(r: Run, number: signal.Signals) -> None:
    """To the run and what it started; the base has a sidecar of its own."""
    assert r.process is not None
    with contextlib.suppress(ProcessLookupError):
        if number == signal.SIGKILL:
            os.killpg(r.process.pid, number)
        else:
            r.process.send_signal(number)


def _last_words(r: Run, code: int) -> str:
    """Why a process ended: the last line of its console, without the word that main puts before it."""
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    text = (r.workdir / "console.log").read_text(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    last = re.sub(r"^(error|stopped): ", "", lines[-1]) if lines else "it said nothing"
    return f"{last[:400]} (exit status {code})"


# ------------------------------------------------------------------------------------------------ the sidecar


class Server:
    """The sidecar of all runs, or the one that the config names. Keeps its address over a relaunch."""

    def __init__(self, url: str, token: str, sidecar: rewards.Sidecar | None, book: Logbook | None = None) -> None:
        self.url, self.token = url, token
        self._sidecar, self._book = sidecar, book
        self._given_up = False

    @property
    def generation(self) -> int:
        return 0 if self._sidecar is None else self._sidecar.generation

    def keep(self) -> None:
        """Starts it again when it has died."""
        if self._sidecar is None or self._given_up or self._sidecar.alive():
            return
        self._relaunch()

    def changed_since(self, generation: int) -> bool:
        """Whether it was started again since then; one that hangs is, now."""
        if self._sidecar is None:
            return False
        if self.generation == generation and not self._given_up:
            client = self._sidecar.client({"ping": 1.0})
            if client.health()["status"] != "ok":
                self._relaunch()
            client.close()
        return self.generation != generation and self._sidecar.alive()

    def _relaunch(self) -> None:
        assert self._sidecar is not None and self._book is not None
        before = self.generation
        self._book.say(f"rewards: {self._sidecar.relaunch()}")
        self._given_up = self.generation == before and not self._sidecar.alive()


@contextlib.contextmanager
def open_server(config: ConfigDict, runs: Sequence[Run], base: Path, workdir: Path, book: Logbook) -> Iterator[Server]:
    """One sidecar with the scorers of all arms; the base's scorer weights where they fit. Raises ConfigError."""
    reward, codec = config.reward, config.codec
    if not reward.launch:
        yield Server(reward.url, os.environ.get(reward.token_env, ""), None)
        return
    scorers = dict.fromkeys(s for r in runs if r.arm for s in r.config.reward.scorers)
    weights = workdir / "scorer"
    if (base / "scorer").is_dir() and not weights.exists() and not _differences(config, base, OF_SCORER):
        part = weights.with_name("scorer.part")  # whole or absent
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(base / "scorer", part)
        part.rename(weights)
    own = config.copy_and_resolve_references()
    own.reward.scorers = tuple(scorers)
    try:
        rewards.check_environment(reward.env, own.reward.scorers)
        weights = scoring.scorer_weights(own, workdir, book)
        with rewards.launch(
            env=reward.env,
            scorers=own.reward.scorers,
            weights_dir=weights if weights.is_dir() else "",
            codec=f"unshuffle:factor={codec.factor},mean={codec.mean},std={codec.std}",
            port=reward.port or _free_port(),  # a relaunch takes it again, so that runs find it where it was
            log_path=workdir / "sidecar.log",
            max_relaunches=RELAUNCHES,
        ) as sidecar:
            book.say(f"rewards: one sidecar for all runs, at {sidecar.url}")
            yield Server(sidecar.url, sidecar.token, sidecar, book)
    except rewards.ConfigurationFault as error:
        raise ConfigError(str(error)) from error


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# --------------------------------------------------------------------------------------------------- progress


class Watch:
    """Bars for the whole and for each run that is on; a line a minute where the output is no terminal."""

    def __init__(self, book: Logbook, runs: Sequence[Run]) -> None:
        self.book, self._runs = book, runs
        self._counted = [r for r in runs if r.arm]
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}"))
        self._bars = Progress(*columns, console=book.console, transient=True, disable=not book.console.is_terminal)
        self._whole = self._bars.add_task("study", total=None, text="")
        self._tasks: dict[str, Any] = {}
        self._begin: tuple[float, float] | None = None
        self._next_line = time.monotonic() + 5.0

    def __enter__(self) -> Watch:
        self._bars.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bars.stop()

    def update(self, running: Sequence[Run]) -> None:
        for r in running:
            r.steps = max(r.steps, _steps_on_disk(r))
        text = self.text()
        done, total = self._work()
        self._bars.update(self._whole, completed=done, total=total or 1.0, text=text)
        for name in self._tasks.keys() - {r.name for r in running}:
            self._bars.remove_task(self._tasks.pop(name))
        for r in running:
            if r.name not in self._tasks:
                self._tasks[r.name] = self._bars.add_task(r.name, total=r.total or None, text="")
            self._bars.update(self._tasks[r.name], completed=r.steps, text=f"{r.steps}/{r.total}" if r.total else "")
        now = time.monotonic()
        if running and now >= self._next_line and not self.book.console.is_terminal:
            self._next_line = now + LINE_S
            on = ", ".join(f"{r.name} {r.steps}/{r.total}" if r.total else r.name for r in running)
            self.book.say(f"study: {text}; running {on}")

    def _work(self) -> tuple[float, float]:
        """Network evaluations done and in all; what failed is left out of both."""
        counted = [r for r in self._runs if r.status != "failed"]
        return sum(r.cost * min(r.steps, r.total) for r in counted), sum(r.cost * r.total for r in counted)

    def text(self) -> str:
        done, total = self._work()
        now = time.monotonic()
        if self._begin is None:
            self._begin = now, done
        seconds, evaluated = now - self._begin[0], done - self._begin[1]
        finished = sum(r.status == "done" for r in self._counted)
        failed = sum(r.status == "failed" for r in self._counted)
        text = f"{finished} of {len(self._counted)} runs" + (f", {failed} failed" if failed else "")
        if evaluated > 0 and seconds > 10:
            left = seconds * (total - done) / evaluated
            text += f", about {_duration(left)} left"
        return text


def _duration(seconds: float) -> str:
    minutes = math.ceil(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def _steps_on_disk(r: Run) -> int:
    """Steps in the end of the run's metrics.jsonl; a cut line is none."""
    stage = "ddrl" if r.arm else "pretrain"
    try:
        with (r.workdir / "metrics.jsonl").open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 16_384))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            fields = json.loads(line)
            if fields["stage"] == stage:
                return fields["step"] + 1
    return 0


# --------------------------------------------------------------------------------------------------- study.json


def collect(workdir: Path, arms: Sequence[Arm], runs: Sequence[Run], *, title: str, command: str) -> dict[str, Any]:
    """Writes study.json: all numbers that the runs have left so far. Returns what it wrote.

    {"title", "command", "seeds", "base", "arms": [{"name", "label", "group", "set", "starts_from", "seeds": [...]}]};
    folders are relative to `workdir` where they are in it. Numbers that are not finite are null.
    """
    base = runs[0]
    # An arm's own first evaluation: a base from elsewhere may have been evaluated otherwise.
    origins = [r.workdir for r in runs if r.arm and not r.arm.needs] + [base.workdir]
    metrics = [_of_json(w / "eval/000000/eval.json", "metrics") for w in origins]
    by_arm = {a.name: [r for r in runs if r.arm is a] for a in arms}
    record = {
        "title": title,
        "command": command,
        "seeds": list(dict.fromkeys(r.seed for r in runs if r.arm)),
        "base": {
            "workdir": _inside(workdir, base.workdir),
            "pretrain_steps": _of_json(base.workdir / "config.json", "pretrain", "steps"),
            "metrics": next((m for m in metrics if m), {}),
        },
        "arms": [
            {
                "name": arm.name,
                "label": arm.label,
                "group": arm.group,
                "set": arm.flat,
                "starts_from": arm.needs[0] if arm.needs else "base",
                "seeds": [_collect_run(workdir, r, _first_of_chain(r, runs)) for r in by_arm[arm.name]],
            }
            for arm in arms
        ],
    }
    record = _plain(record)
    write_text(workdir / "study.json", json.dumps(record, indent=1, allow_nan=False))
    return record


def _collect_run(workdir: Path, r: Run, first: Run) -> dict[str, Any]:
    summary = _of_json(r.workdir / "summary.json") or {} if r.status == "done" else {}
    rows = read_metrics(r.workdir / "metrics.jsonl")
    iterations = sum(m["stage"] == "ddrl" for m in rows)
    verdict = report.verdict(summary) if summary else None
    status = "stopped" if r.status in ("waiting", "running") and rows else r.status
    changes = summary.get("changes", [])
    if r.status == "done" and first is not r:
        # What the arm that it starts from has changed counts too.
        last = max(p.parent for p in (r.workdir / "eval").glob("*/eval.json"))
        changes = evaluate.compare(first.workdir / "eval/000000", last)
    return {
        "seed": r.seed,
        "workdir": _inside(workdir, r.workdir),
        "status": status,
        "error": r.error,
        "verdict": verdict.label if verdict else None,
        "headline": verdict.headline if verdict else None,
        "seconds": sum(m["seconds"] for m in rows if isinstance(m.get("seconds"), int | float)),
        "iterations": iterations,
        "updates": iterations * r.config.train.updates_per_rollout,
        "rollouts": 0 if r.config.objective.name == "sft" else iterations * _batch(r.config),
        "evaluations_per_iteration": evaluations_per_iteration(r.config),
        "summary": {k: summary[k] for k in ("before", "after", "changes", "signals") if k in summary},
        "changes_from_base": changes,
        "curves": {stage: _curves([m for m in rows if m["stage"] == stage]) for stage in ("eval", "ddrl")},
    }


def _first_of_chain(r: Run, runs: Sequence[Run]) -> Run:
    """The run of the same seed that starts from the base: r itself, or the arm that it starts from, and so on."""
    while r.arm and r.arm.needs:
        r = next(o for o in runs if o.name == f"{r.arm.needs[0]}/seed{r.seed}")
    return r


def _batch(config: ConfigDict) -> int:
    return config.rollout.conditions * config.rollout.group_size


def _curves(rows: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """{"step": [...], "reward": [...], ...}: columns of equal length, null where a row has no such number."""
    names = dict.fromkeys(n for row in rows for n, v in row.items() if n != "step" and isinstance(v, int | float))
    return {"step": [row["step"] for row in rows]} | {n: [row.get(n) for row in rows] for n in names}


def _of_json(path: Path, *keys: str) -> Any:
    """What lies under `keys` in a JSON file; None where there is none."""
    try:
        value = json.loads(path.read_text())
        for key in keys:
            value = value[key]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return value


def _plain(value: Any) -> Any:
    """JSON values only: tuples become lists, numbers that are not finite None."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _inside(workdir: Path, path: Path) -> str:
    return str(path.relative_to(workdir)) if path.is_relative_to(workdir) else str(_shown(path))


def _shown(path: Path) -> Path:
    """Relative to the current folder where it lies in it: the way that a user would write it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = prefix + key
        flat |= _flat(value, name + ".") if isinstance(value, dict) and name not in WHOLE else {name: value}
    return flat
