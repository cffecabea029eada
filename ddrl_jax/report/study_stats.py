"""A study's file, read forgivingly, and the numbers its page rests on.

`study.json` holds arms (a setting, trained once a seed). Here they become intervals over seeds, differences between
arms, and values at matched reward. Nothing here draws, words or judges; what is missing stays None, never 0.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ddrl_jax.report.verdict import Change, read_changes, verdict
from ddrl_jax.report.workdir import LOSS_LIMIT, number

# Two-sided 95 % points of Student's t for 1 to 30 degrees of freedom (any statistics table).
_T95 = (
    12.7062, 4.30265, 3.18245, 2.77645, 2.57058, 2.44691, 2.36462, 2.30600, 2.26216, 2.22814,
    2.20099, 2.17881, 2.16037, 2.14479, 2.13145, 2.11991, 2.10982, 2.10092, 2.09302, 2.08596,
    2.07961, 2.07387, 2.06866, 2.06390, 2.05954, 2.05553, 2.05183, 2.04841, 2.04523, 2.04227,
)  # fmt: skip
_Z95 = 1.959964
_GROUPS = ("main", "control", "ablation", "sweep")
Basis = Literal["seeds", "bootstrap", "none"]


@dataclasses.dataclass(frozen=True)
class Measure:
    """What was measured: its name in the file, how to call it, which way is better, how to write it.

    `scale` and `unit` turn a change into what is printed: 100 and " %" for the held-out loss, whose changes are
    fractions; 100 and " pt" (points of a hundred) for judges that are shares.
    """

    name: str
    label: str
    kind: str
    better: str
    scale: float = 1.0
    unit: str = ""

    @property
    def apart(self) -> Measure:
        """The same for a difference of two changes: percents apart are points."""
        return dataclasses.replace(self, unit=" pt") if self.unit == " %" else self

    @property
    def inside(self) -> str:
        """The label as it stands within a sentence."""
        kept = self.label[:2].isupper() or self.label.startswith("Fréchet")
        return self.label if kept else self.label[:1].lower() + self.label[1:]


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A mean with its 95 % interval; `basis` says of what: seeds (Student's t), one run's bootstrap, or no interval."""

    mean: float
    low: float | None
    high: float | None
    n: int
    basis: Basis

    def above(self, limit: float) -> bool:
        return self.low is not None and self.low > limit

    def below(self, limit: float) -> bool:
        return self.high is not None and self.high < limit

    def side(self, better: str) -> str:
        """ "good", "bad", "unclear" (the interval holds 0) or "unknown" (no interval)."""
        if self.low is None or self.high is None:
            return "unknown"
        if self.above(0.0) or self.below(0.0):
            return "good" if self.above(0.0) == (better == "up") else "bad"
        return "unclear"


@dataclasses.dataclass(frozen=True)
class SeedRun:
    """One arm with one seed.

    `changes` are counted from the base, if `from_base`, or from where the run began. `evals` and `rows` are the curves
    of the evaluations and of the updates, float64 (n,), NaN where null; both hold "step".
    """

    seed: int
    status: str
    error: str
    verdict: str
    seconds: float | None
    updates: float | None
    rollouts: float | None
    evaluations: dict[str, float]
    changes: dict[str, Change]
    from_base: bool
    before: dict[str, float]
    after: dict[str, float]
    evals: dict[str, np.ndarray]
    rows: dict[str, np.ndarray]
    workdir: Path | None
    method: str
    loss_limit: float | None


@dataclasses.dataclass(frozen=True)
class Arm:
    """A setting and its runs. `settings` are the config fields it sets, flat."""

    name: str
    label: str
    group: str
    settings: dict[str, Any]
    runs: tuple[SeedRun, ...]
    starts_from: str = "base"

    @property
    def traced(self) -> tuple[SeedRun, ...]:
        """The runs whose curves count: the finished ones, or, as long as there is none, those under way."""
        return self.done or self.runs

    @property
    def done(self) -> tuple[SeedRun, ...]:
        return tuple(run for run in self.runs if run.changes)

    @property
    def method(self) -> str:
        """The objective's name: as run, or as set; "ddrl" is the config's default."""
        ran = next((run.method for run in self.runs if run.method), "")
        return ran or str(self.settings.get("objective.name") or "ddrl")

    @property
    def after_sft(self) -> bool:
        """Whether it begins where another arm (SFT) ended, and so its own "before" is not the base."""
        return self.starts_from != "base" or self.settings.get("pretrain.from_stage") == "ddrl"

    @property
    def data_points(self) -> int | None:
        """How many training clips it may use; None is all of them."""
        limit = number(self.settings.get("data.limit"))
        return int(limit) if limit else None


@dataclasses.dataclass(frozen=True)
class Study:
    """All of study.json. `origin` is where every arm began: the base's metrics, as far as known."""

    path: Path
    title: str
    command: str
    seeds: tuple[int, ...]
    arms: tuple[Arm, ...]
    measures: tuple[Measure, ...]
    origin: dict[str, float]
    base: dict[str, Any]
    notes: tuple[str, ...]

    @property
    def loss_limit(self) -> float:
        limits = [run.loss_limit for arm in self.arms for run in arm.runs if run.loss_limit]
        return limits[0] if limits else LOSS_LIMIT

    def kind(self, *kinds: str) -> tuple[Measure, ...]:
        return tuple(m for m in self.measures if m.kind in kinds)

    def measure(self, name: str) -> Measure | None:
        return next((m for m in self.measures if m.name == name), None)

    def groups(self, *groups: str) -> tuple[Arm, ...]:
        return tuple(arm for arm in self.arms if arm.group in groups)

    @property
    def compared(self) -> tuple[Arm, ...]:
        """Who is set side by side: main arms and controls, or, in a study without any, all arms."""
        return self.groups("main", "control") or self.arms

    # The parts that arms play, found by what they set, so that a study may name them as it likes.

    @property
    def reference(self) -> Arm | None:
        """Plain DDRL of the main comparison: reduced data loss, real data, all of it, from the base, least set."""
        plain = [
            a for a in self.groups("main")
            if a.method == "ddrl" and not (_full(a) or _synthetic(a) or a.after_sft or a.data_points)
        ]  # fmt: skip
        return min(plain, key=lambda a: len(a.settings), default=None)

    @property
    def baselines(self) -> tuple[Arm, ...]:
        """The GRPO baselines of the main comparison."""
        return tuple(a for a in self.groups("main") if a.method in ("dance_grpo", "flow_grpo"))

    @property
    def full(self) -> Arm | None:
        """DDRL with the data loss at every trained step."""
        return self._nearest(_full)

    @property
    def synthetic(self) -> Arm | None:
        """DDRL with the base's own samples as data."""
        return self._nearest(_synthetic)

    @property
    def with_kl(self) -> tuple[Arm, ...]:
        """Arms, outside the sweep, whose runs measured a KL to the reference (with kl_beta 0 there is none)."""
        return tuple(a for a in self.arms if a.group != "sweep" and _has_kl(a))

    def by_data(self) -> tuple[tuple[Arm, ...], tuple[Arm, ...]]:
        """Arms that are the reference but for the amount of data, fewest first: without SFT before, and with it."""
        reference = self.reference
        if reference is None:
            return (), ()

        def same(arm: Arm) -> bool:
            return arm.group != "sweep" and all(
                key == "data.limit" or key.startswith("pretrain.") for key in _differences(arm, reference)
            )

        chosen = sorted(filter(same, self.arms), key=lambda a: a.data_points or math.inf)
        return tuple(a for a in chosen if not a.after_sft), tuple(a for a in chosen if a.after_sft)

    def _nearest(self, fits: Callable[[Arm], bool]) -> Arm | None:
        reference = self.reference
        arms = [a for a in self.arms if a.method == "ddrl" and a.group != "sweep" and fits(a) and not a.after_sft]
        if reference is None or not arms:
            return None
        return min(arms, key=lambda a: len(_differences(a, reference)))


def _full(arm: Arm) -> bool:
    return arm.settings.get("objective.data_levels") == "rollout"


def _synthetic(arm: Arm) -> bool:
    return bool(arm.settings.get("data.path")) or "synthetic" in arm.name


def _has_kl(arm: Arm) -> bool:
    kl = (run.rows.get("kl_loss", np.zeros(0)) for run in arm.runs)
    return any(bool(np.any(np.nan_to_num(values) != 0)) for values in kl)


def _differences(a: Arm, b: Arm) -> set[str]:
    return {k for k in a.settings.keys() | b.settings.keys() if a.settings.get(k) != b.settings.get(k)}


# ---------------------------------------------------------------- statistics


def student_t(degrees: int) -> float:
    """The two-sided 95 % point of Student's t; beyond 30 degrees by Cornish and Fisher's expansion."""
    if degrees < 1:
        raise ValueError(f"degrees={degrees}: must be at least 1")
    if degrees <= len(_T95):
        return _T95[degrees - 1]
    z, v = _Z95, degrees
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
    )


def over_seeds(values: Sequence[float]) -> Estimate | None:
    """Mean with a t interval over seeds; one value has no interval, none is None."""
    if not values:
        return None
    array = np.asarray(values, np.float64)
    mean, n = float(array.mean()), len(array)
    if n == 1:
        return Estimate(mean, None, None, 1, "none")
    half = student_t(n - 1) * float(array.std(ddof=1)) / math.sqrt(n)
    return Estimate(mean, mean - half, mean + half, n, "seeds")


def estimate(arm: Arm, name: str) -> Estimate | None:
    """An arm's change of one measure: over its seeds, or of its only run with that run's bootstrap interval."""
    changes = [c for run in arm.done if (c := run.changes.get(name)) is not None and c.mean is not None]
    if len(changes) == 1:
        (change,) = changes
        assert change.mean is not None
        has = change.low is not None and change.high is not None
        return Estimate(change.mean, change.low, change.high, 1, "bootstrap") if has else over_seeds([change.mean])
    return over_seeds([c.mean for c in changes if c.mean is not None])


def difference(a: Arm, b: Arm, name: str) -> Estimate | None:
    """The change of `a` minus that of `b`.

    Over seeds both have (runs of a seed share the base, the order of the data and the evaluation's noise, so they are
    paired). With one seed in common the two bootstrap intervals are combined as if independent: wider than paired.
    """
    left = {run.seed: run.changes[name] for run in a.done if name in run.changes}
    right = {run.seed: run.changes[name] for run in b.done if name in run.changes}
    pairs = [(left[s], right[s]) for s in sorted(left.keys() & right.keys())]
    pairs = [(x, y) for x, y in pairs if x.mean is not None and y.mean is not None]
    if len(pairs) != 1:
        return over_seeds([x.mean - y.mean for x, y in pairs if x.mean is not None and y.mean is not None])
    ((x, y),) = pairs
    assert x.mean is not None and y.mean is not None
    mean = x.mean - y.mean
    if x.low is None or x.high is None or y.low is None or y.high is None:
        return Estimate(mean, None, None, 1, "none")
    down = math.hypot(x.mean - x.low, y.high - y.mean)
    up = math.hypot(x.high - x.mean, y.mean - y.low)
    return Estimate(mean, mean - down, mean + up, 1, "bootstrap")


def mean_over_done(arm: Arm, get: Callable[[SeedRun], float | None]) -> float | None:
    values = [v for run in arm.done if (v := get(run)) is not None]
    return float(np.mean(values)) if values else None


# ---------------------------------------------------------------- along training


@dataclasses.dataclass(frozen=True)
class Curve:
    """One quantity over steps: the mean over seeds, and the smallest and largest seed, float64 (n,)."""

    step: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def change_along(study: Study, arm: Arm, run: SeedRun, name: str) -> tuple[np.ndarray, np.ndarray] | None:
    """(step, change since the start) over a run's evaluations, finite points only; the loss as a fraction.

    The start is the run's own first evaluation, or the base's where SFT came first.
    """
    step, value = run.evals.get("step"), run.evals.get(name)
    if step is None or value is None:
        return None
    known = np.isfinite(step) & np.isfinite(value)
    step, value = step[known], value[known]
    if not len(step):
        return None
    start = study.origin.get(name) if arm.after_sft else None
    start = float(value[0]) if start is None else start
    if name == "heldout_loss":
        return None if start == 0 else (step, value / start - 1)
    return step, value - start


def curve(study: Study, arm: Arm, name: str) -> Curve | None:
    """The change of one measure over training, at the steps that every seed with this curve has."""
    return _average([c for run in arm.traced if (c := change_along(study, arm, run, name)) is not None])


def update_curve(arm: Arm, name: str) -> Curve | None:
    """A training metric (such as kl_loss) over updates, as it was logged."""
    found = []
    for run in arm.traced:
        step, value = run.rows.get("step"), run.rows.get(name)
        if step is not None and value is not None and (known := np.isfinite(step) & np.isfinite(value)).any():
            found.append((step[known], value[known]))
    return _average(found)


def _average(curves: Sequence[tuple[np.ndarray, np.ndarray]]) -> Curve | None:
    if not curves:
        return None
    steps = sorted(set.intersection(*(set(step.tolist()) for step, _ in curves)))
    if not steps:
        return None
    table = np.array([[dict(zip(s.tolist(), v.tolist(), strict=True))[x] for x in steps] for s, v in curves])
    return Curve(np.array(steps), table.mean(0), table.min(0), table.max(0))


def at_reward(reward: np.ndarray, value: np.ndarray, level: float) -> float | None:
    """`value` where `reward` first climbs through `level`, linear between evaluations; None where it never does.

    A path that begins at or above the level counts only if it begins on it.
    """
    known = np.isfinite(reward) & np.isfinite(value)
    reward, value = reward[known], value[known]
    if not len(reward) or reward[0] > level:
        return None
    if reward[0] == level:
        return float(value[0])
    for i in range(1, len(reward)):
        if reward[i] >= level:
            share = (level - reward[i - 1]) / (reward[i] - reward[i - 1])
            return float(value[i - 1] + share * (value[i] - value[i - 1]))
    return None


def matched_values(study: Study, arm: Arm, name: str, level: float) -> dict[int, float]:
    """Per seed that gets there: the change of `name` (or "step") where the reward has first risen by `level`."""
    found = {}
    for run in arm.traced:
        reward = change_along(study, arm, run, "reward")
        other = reward and ((reward[0], reward[0]) if name == "step" else change_along(study, arm, run, name))
        if reward is None or other is None:
            continue
        steps = np.intersect1d(reward[0], other[0])
        value = at_reward(
            reward[1][np.isin(reward[0], steps)], np.asarray(other[1], np.float64)[np.isin(other[0], steps)], level
        )
        if value is not None:
            found[run.seed] = value
    return found


def reach(study: Study, arm: Arm) -> float | None:
    """The largest rise of the reward that every seed of the arm gets to, on the evaluations during training."""
    tops = [float(c[1].max()) for run in arm.traced if (c := change_along(study, arm, run, "reward")) is not None]
    return min(tops) if tops else None


def reward_levels(study: Study, arms: Iterable[Arm], *, most: int = 6) -> tuple[float, ...]:
    """Rises of the reward to compare at: round numbers, at least about three of them within the reference's reach.

    They go on to what the second farthest arm reaches, since a comparison needs two.
    """
    tops = sorted(top for arm in arms if (top := reach(study, arm)) is not None and top > 0)
    if len(tops) < 2:
        return ()
    reference = study.reference and reach(study, study.reference)
    ruler = min(reference, tops[-2]) if reference and reference > 0 else tops[-2]
    step = _round_down(ruler / 3)
    count = min(most, int(tops[-2] / step + 1e-9))
    return tuple(round(step * k, 10) for k in range(1, count + 1))


def _round_down(value: float) -> float:
    """The largest of 1, 2, 2.5, 5 times a power of ten that is not above `value`."""
    power = 10.0 ** math.floor(math.log10(value))
    return max(m * power for m in (1.0, 2.0, 2.5, 5.0) if m * power <= value * (1 + 1e-9))


def matched_difference(study: Study, a: Arm, b: Arm, name: str) -> tuple[float, Estimate] | None:
    """(level, `a` minus `b`) at the highest common level that every seed of both reaches; paired over seeds.

    None where no level is common, or where one seed would leave no interval to judge by.
    """
    for level in reversed(reward_levels(study, study.compared)):
        left, right = (matched_values(study, arm, name, level) for arm in (a, b))
        seeds = {run.seed for arm in (a, b) for run in arm.done}
        if seeds and seeds == left.keys() == right.keys():
            found = over_seeds([left[s] - right[s] for s in sorted(seeds)])
            assert found is not None
            return level, found
    return None


# ---------------------------------------------------------------- reading


def read_study(workdir: str | Path) -> Study:
    """Read `workdir`/study.json. Missing and malformed parts become None, or a sentence in `Study.notes`.

    Raises:
      ValueError: there is no study.json, or it holds no JSON object.
    """
    path = Path(workdir)
    file = path / "study.json"
    try:
        data = json.loads(file.read_text("utf-8"), parse_constant=lambda _: None)
    except FileNotFoundError:
        raise ValueError(f"workdir: {str(path)!r} holds no study.json; give the one --mode=study wrote to") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{str(file)!r} could not be read ({' '.join(str(error).split())[:100]})") from None
    if not isinstance(data, dict):
        raise ValueError(f"{str(file)!r} must hold a JSON object, and holds a {type(data).__name__}")
    notes: list[str] = []
    arms: list[Arm] = []
    for entry in _dicts(data.get("arms")):
        arm = _arm(path, entry, len(arms))
        if any(arm.name == other.name for other in arms):
            notes.append(f"Two arms are called {arm.name}; the first one is shown.")
            continue
        arms.append(arm)
    if not arms:
        notes.append("study.json lists no arms.")
    seeds = tuple(int(s) for v in _list(data.get("seeds")) if (s := number(v)) is not None)
    seeds = seeds or tuple(sorted({run.seed for arm in arms for run in arm.runs}))
    base = data.get("base") if isinstance(data.get("base"), dict) else {}
    assert isinstance(base, dict)
    origin = _origin(base, arms)
    arms = [_from_base(arm, origin) if arm.after_sft else arm for arm in arms]
    return Study(
        path=path,
        title=str(data.get("title") or path.resolve().name),
        command=str(data.get("command") or "").strip(),
        seeds=seeds,
        arms=tuple(sorted(arms, key=lambda a: _GROUPS.index(a.group) if a.group in _GROUPS else len(_GROUPS) - 1.5)),
        measures=_measures(arms),
        origin=origin,
        base=base,
        notes=tuple(notes),
    )


def _arm(path: Path, entry: dict[str, Any], place: int) -> Arm:
    name = str(entry.get("name") or f"arm_{place}")
    settings = entry.get("set")
    return Arm(
        name=name,
        label=str(entry.get("label") or name.replace("_", " ")),
        group=str(entry.get("group") or "main"),
        settings=_flat(settings) if isinstance(settings, dict) else {},
        runs=tuple(_run(path, run, n) for n, run in enumerate(_dicts(entry.get("seeds")))),
        starts_from=str(entry.get("starts_from") or "base"),
    )


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return flat


def _run(path: Path, entry: dict[str, Any], place: int) -> SeedRun:
    summary = _dict(entry.get("summary"))
    status = str(entry.get("status") or "pending")
    from_base = read_changes({"changes": entry.get("changes_from_base")})
    changes = {} if status == "failed" else {c.name: c for c in from_base or read_changes(summary)}
    found = entry.get("verdict")
    found = found.get("label") if isinstance(found, dict) else found
    curves = _dict(entry.get("curves"))
    where = entry.get("workdir")
    limits = [number(s.get("limit")) for s in _dicts(summary.get("signals")) if s.get("name") == "heldout_loss"]
    seed = number(entry.get("seed"))
    return SeedRun(
        seed=place if seed is None else int(seed),
        status=status,
        error=" ".join(str(entry.get("error") or "").split()),
        verdict=str(found) if found else verdict(summary).label if changes else "",
        seconds=number(entry.get("seconds")),
        updates=number(entry.get("updates")),
        rollouts=number(entry.get("rollouts")),
        evaluations=_numbers(entry.get("evaluations_per_iteration")),
        changes=changes,
        from_base=bool(from_base),
        before=_numbers(summary.get("before")),
        after=_numbers(summary.get("after")),
        evals=_columns(curves.get("eval")),
        rows=_columns(curves.get("ddrl")),
        workdir=_find(path, str(where)) if where else None,
        method=str(_dict(summary.get("run")).get("method") or ""),
        loss_limit=limits[0] if limits else None,
    )


def _find(path: Path, where: str) -> Path | None:
    """A run's folder: as written, or, in a study that was copied elsewhere, under the study's own."""
    given = Path(where)
    tails = [Path(*given.parts[-n:]) for n in range(1, min(4, len(given.parts)) + 1)]
    return next((p for p in (given, path / given, *(path / tail for tail in tails)) if p.is_dir()), None)


def _columns(value: Any) -> dict[str, np.ndarray]:
    columns = {}
    for key, values in _dict(value).items():
        if isinstance(values, list):
            columns[str(key)] = np.array([math.nan if (x := number(v)) is None else x for v in values], np.float64)
    length = len(columns.get("step", ()))
    return {k: v for k, v in columns.items() if len(v) == length}


def _origin(base: dict[str, Any], arms: Sequence[Arm]) -> dict[str, float]:
    """The base's metrics: as the file gives them, else the mean "before" of the arms that start there."""
    for key in ("before", "after", "metrics"):
        if given := _numbers(base.get(key)):
            return given
    runs = [run for arm in arms if not arm.after_sft for run in arm.runs if run.before]
    names = {name for run in runs for name in run.before}
    return {n: float(np.mean([run.before[n] for run in runs if n in run.before])) for n in sorted(names)}


def _from_base(arm: Arm, origin: dict[str, float]) -> Arm:
    """Changes counted from the base instead of from the end of SFT, where the file does not give them.

    The bootstrap intervals are those of other changes, and left out.
    """
    runs = []
    for run in arm.runs:
        if run.from_base:
            runs.append(run)
            continue
        changes = {}
        for name, change in run.changes.items():
            start, end = origin.get(name), run.after.get(name)
            if start is None or end is None or (change.kind == "loss" and not start):
                continue
            mean = end / start - 1 if change.kind == "loss" else end - start
            changes[name] = dataclasses.replace(change, mean=mean, low=None, high=None)
        runs.append(dataclasses.replace(run, changes=changes))
    return dataclasses.replace(arm, runs=tuple(runs))


def _measures(arms: Sequence[Arm]) -> tuple[Measure, ...]:
    found: dict[str, Change] = {}
    levels: dict[str, list[float]] = {}
    for arm in arms:
        for run in arm.runs:
            for name, change in run.changes.items():
                found.setdefault(name, change)
                levels.setdefault(name, []).extend(m[name] for m in (run.before, run.after) if name in m)
    measures = []
    for name, change in found.items():
        share = change.kind == "judge" and change.better == "up" and levels[name] and min(levels[name]) >= 0
        share = share and max(levels[name]) <= 1
        scale, unit = (100.0, " %") if change.kind == "loss" else (100.0, " pt") if share else (1.0, "")
        label = change.label.removesuffix(" (relative)")
        measures.append(Measure(name, label, change.kind, change.better, scale, unit))
    order = ("reward", "loss", "judge", "sub")
    return tuple(sorted(measures, key=lambda m: order.index(m.kind) if m.kind in order else len(order)))


def _numbers(value: Any) -> dict[str, float]:
    return {str(k): x for k, v in _dict(value).items() if (x := number(v)) is not None}


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [v for v in _list(value) if isinstance(v, dict)]
