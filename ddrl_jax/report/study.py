"""The page of a study: many arms, several seeds, one base; what was found, and where it disagrees with the paper.

Reads `study.json` (and the runs' sample clips where they are still there) and nothing else of ddrl_jax. Every word and
number on the page follows from the file by the rules in `study_stats` and `study_claims`; nothing is written by hand.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from ddrl_jax.report import media, study_plots
from ddrl_jax.report.study_claims import (
    MARGIN,
    Claim,
    claims,
    disagreements,
    headline,
    listed,
    state,
    training_evaluations,
    write_estimate,
)
from ddrl_jax.report.study_document import (
    Block,
    Card,
    Cards,
    Cell,
    Charts,
    Code,
    Document,
    Lines,
    Missing,
    Multiples,
    Row,
    Section,
    Strips,
    Table,
    Terms,
    Text,
    clip_html,
    drawings,
    to_html,
    to_markdown,
)
from ddrl_jax.report.study_stats import (
    Arm,
    Estimate,
    Measure,
    SeedRun,
    Study,
    difference,
    estimate,
    matched_values,
    mean_over_done,
    over_seeds,
    read_study,
    reward_levels,
)
from ddrl_jax.report.workdir import Samples, number, read_run

_CLIP_SIZE = 112
_PROMPTS = 8
_GROUP_HEADS = {"main": "Main comparison", "control": "Controls", "ablation": "Ablations", "sweep": "Sweep"}
_TONES = {"hacked": "bad", "clean": "good", "unclear": "warn", "no gain": "soft", "not measured": "soft"}
_OUTCOME_TONES = {
    "reproduced": "good", "not reproduced": "bad", "in part": "warn", "unclear": "open", "not measured": "open",
}  # fmt: skip
_LINE_TONES = {"reproduced": "good", "unclear": "soft", "not measured": "soft"}
_VERDICT_TONES = {"hacked": "bad", "suspicious": "warn", "clean": "good"}

_GLOSSARY = (
    ("Reward", "What the scorer pays for a sample, and so what training pushes up: here always its change since the "
     "base, on held-out prompts."),
    ("Judge", "A measurement that no arm was trained on. If the reward rises and a judge falls, believe the judge."),
    ("Held-out diffusion loss", "How badly the model explains real data it never trained on. A rise past its limit "
     "counts as hacked."),
    ("Hacked, clean, unclear", "Hacked: the reward rose, and the held-out loss lies above its limit or a judge on its "
     "bad side, each with its whole interval. Clean: the reward rose, the loss lies under its limit, and no judge is "
     "on its bad side. Unclear: the interval of the loss holds the limit. The verdict of each seed is its own run’s "
     "report’s."),
    ("95 % interval over seeds", "Student’s t over the seeds’ means: where the mean over many seeds would lie. With "
     "two or three seeds it is wide, and rightly so."),
    ("95 % interval of one run", "With a single seed, a bootstrap over that run’s evaluation prompts. It leaves out "
     "how much another seed would change."),
    ("At matched reward", "Arms are compared where each first reaches the same reward, not after the same number of "
     "updates: a slow arm looks unhacked in a short run. Values between two evaluations are interpolated."),
    ("Full and reduced", "The data loss at every trained step of a rollout, or at one level drawn for it."),
    ("Data loss only (SFT)", "The control that trains on the data without any reward: what of a gain is only more "
     "training."),
    ("KL to the reference", "The reverse KL that FlowGRPO subtracts: measured on the policy’s own samples."),
    ("pt", "Points: hundredths of a share, or percents apart."),
)  # fmt: skip


def write_study(workdir: str | Path) -> tuple[Path, Path]:
    """Write a study's page twice; safe to call again while the study goes on, and deterministic.

    Args:
      workdir: the directory that holds study.json. Arms and seeds in it may be pending or failed, numbers null, and the
        runs' own directories gone: the page says what is missing.

    Returns:
      The paths of `study.html`, one self-contained file, and of `study.md`, which links to `figures/*.png` beside it.

    Raises:
      ValueError: there is no readable study.json.
    """
    study = read_study(workdir)
    document = _document(study)
    for name, png in drawings(document).items():
        media.write_bytes(study.path / "figures" / f"{name}.png", png)
    page, markdown = study.path / "study.html", study.path / "study.md"
    media.write_bytes(page, to_html(document).encode())
    media.write_bytes(markdown, to_markdown(document).encode())
    return page, markdown


def _document(study: Study) -> Document:
    found = claims(study)
    finding, details = headline(study)
    kl = "The KL does not see it (Fig. 3)" if _blind(found) else "The KL and the samples (Fig. 3)"
    sections = (
        Section(
            "paper", "Against the paper", "Where this small study disagrees with the paper", _disagreement(found), True
        ),
        Section("arms", "Every arm", "Every arm", _main_table(study)),
        Section("matched", "Matched reward", "At the same reward", _matched(study)),
        Section("training", "Fig. 2", "Over training (Fig. 2)", _training(study)),
        Section("kl", "Fig. 3", kl, _kl(study)),
        Section("subscores", "Fig. 4", "Sub-scores (Fig. 4)", _sub_scores(study)),
        Section("amount", "Fig. 5", "Number of data points, with and without SFT (Fig. 5)", _amount(study)),
        Section("full", "Table 3", "Full and reduced data loss (Table 3)", _full_and_reduced(study)),
        Section("synthetic", "Table 4", "Synthetic data (Table 4)", _synthetic(study)),
        Section("samples", "Samples", "Samples", _samples(study)),
        Section("claims", "Claims and rules", "All claims and their rules", _all_claims(found)),
        Section("sweep", "Sweep", "The baselines’ sweep", _sweep(study)),
        Section("seeds", "Seeds", "Seeds", _seeds(study)),
        Section("cost", "Cost", "Cost", _cost(study)),
        Section("reproduce", "How to reproduce", "How to reproduce", _reproduce(study)),
        Section("glossary", "How to read this", "How to read this", (Terms(_GLOSSARY),)),
    )
    shown = tuple(s for s in sections if not all(isinstance(b, Missing) for b in s.blocks))
    left_out = [f"{s.title}: {b.text}" for s in sections for b in s.blocks if s not in shown and isinstance(b, Missing)]
    return Document(
        title=study.title,
        facts=_facts(study),
        finding=finding,
        details=tuple(details),
        states=_states(study),
        notes=(*_missing(study), *left_out),
        sections=shown,
    )


def _blind(found: Sequence[Claim]) -> bool:
    return any(c.name == "kl_blind" and c.outcome == "reproduced" for c in found)


def _facts(study: Study) -> tuple[tuple[str, str], ...]:
    runs = [run for arm in study.arms for run in arm.runs]
    counts = Counter("done" if run.changes else run.status for run in runs)
    seconds = sum(run.seconds or 0.0 for run in runs)
    facts = [
        ("arms", str(len(study.arms))),
        ("seeds", ", ".join(map(str, study.seeds)) or "none"),
        ("runs", ", ".join(f"{n} {k}" for k, n in sorted(counts.items())) or "none"),
    ]
    if seconds:
        facts.append(("time of all runs", _duration(seconds)))
    return tuple(facts)


def _states(study: Study) -> tuple[tuple[str, str, str], ...]:
    """Arms outside the sweep by state, for the head of the page."""
    groups: dict[str, list[str]] = {}
    for arm in study.arms:
        if arm.done and (arm.group != "sweep" or arm in study.compared):
            groups.setdefault(state(study, arm), []).append(arm.label)
    names = {
        "hacked": "Hacked", "clean": "Clean", "unclear": "Unclear: the intervals allow both",
        "no gain": "No gain in reward",
        "not measured": "Without an interval",
    }  # fmt: skip
    return tuple((name, " · ".join(groups[key]), _TONES[key]) for key, name in names.items() if key in groups)


def _missing(study: Study) -> list[str]:
    notes = list(study.notes)
    for arm in study.arms:
        failed = [run for run in arm.runs if run.status == "failed"]
        for run in failed:
            why = f": {textwrap.shorten(run.error, 160, placeholder='…')}" if run.error else ""
            notes.append(f"{arm.label}, seed {run.seed}, failed{why}")
    waiting = []
    for arm in study.arms:
        over = {run.seed for run in arm.runs if run.changes or run.status == "failed"}
        planned = [run.seed for run in arm.runs] or study.seeds  # an arm may take fewer seeds than the study
        left = [str(s) for s in planned if s not in over]
        if left:
            waiting.append(f"{arm.label} (seed {listed(left)})")
    if waiting:
        notes.append(f"Not finished: {listed(waiting)}.")
    one = [a.label for a in study.arms if len(a.done) == 1]
    if one:
        notes.append(f"One seed only, so that intervals are that run’s bootstrap: {listed(one)}.")
    return notes


# ---------------------------------------------------------------- the paper


def _card(claim: Claim) -> Card:
    return Card(claim.outcome, _OUTCOME_TONES[claim.outcome], claim.source, claim.statement, claim.measured, claim.rule)


def _disagreement(found: Sequence[Claim]) -> tuple[Block, ...]:
    against = disagreements(found)
    open_ = [c for c in found if c.outcome == "unclear"]
    same = [c for c in found if c.outcome == "reproduced"]
    gone = [c for c in found if c.outcome == "not measured"]
    if len(gone) == len(found):
        return (Missing("no claim can be tested yet."),)
    blocks: list[Block] = []
    counts = [
        f"{len(group)} {word}"
        for group, word in (
            (same, "reproduced"),
            ([c for c in against if c.outcome == "not reproduced"], "not reproduced"),
            ([c for c in against if c.outcome == "in part"], "in part"),
            (open_, "unclear"),
            (gone, "not measured"),
        )
        if group
    ]
    text = f"Of {len(found)} of the paper’s claims put to the test by fixed rules: {listed(counts)}."
    if not against and len(gone) < len(found):
        text += " No claim that could be tested was contradicted."
    text += " One small task and a small model: a disagreement says what happened here, not that the paper is wrong."
    blocks.append(Text(text, lede=True))
    if against:
        blocks.append(Cards(tuple(map(_card, against))))
    rest = [c for c in found if c not in against]
    blocks.append(Lines(tuple((c.outcome, _LINE_TONES[c.outcome], c.statement) for c in rest)))
    return tuple(blocks)


def _all_claims(found: Sequence[Claim]) -> tuple[Block, ...]:
    if all(c.outcome == "not measured" for c in found):
        return (Missing("they come with the first finished arms."),)
    lede = "Each claim of the paper as a statement that can fail, what was measured, and the rule that decided."
    return (Text(lede, lede=True), Cards(tuple(map(_card, found)), two=True))


# ---------------------------------------------------------------- tables


def _shown(study: Study) -> tuple[Measure, ...]:
    return study.kind("reward", "loss", "judge", "sub")


def _cell(study: Study, m: Measure, found: Estimate | None, *, judge: bool = True) -> Cell:
    mean, interval = write_estimate(m, found)
    tone = ""
    if found is not None and judge:
        bad = found.above(study.loss_limit) if m.kind == "loss" else found.side(m.better) == "bad"
        tone = "bad" if bad else ""
    if found is not None and found.n == 1 and found.basis == "bootstrap":
        interval += " 1 seed"
    return Cell(mean, interval, tone if found is not None else "soft")


def _arm_rows(study: Study, arms: Sequence[Arm], cells: Callable[[Arm], list[Cell]], *, heads: bool) -> tuple[Row, ...]:
    rows: list[Row] = []
    group = None
    for arm in arms:
        if heads and arm.group != group:
            group = arm.group
            rows.append(Row(heading=_GROUP_HEADS.get(group, group.replace("_", " ").capitalize())))
        if arm.done:
            rows.append(Row((Cell(arm.label, _settings(arm)), *cells(arm)), first=arm is study.reference))
        else:
            errors = [run.error for run in arm.runs if run.status == "failed"]
            why = (
                "failed: " + textwrap.shorten(errors[0] or "no reason given", 90, placeholder="…")
                if errors
                else "pending"
            )
            rows.append(Row((Cell(arm.label), Cell(why, tone="bad" if errors else "soft"))))
    return tuple(rows)


def _settings(arm: Arm) -> str:
    """What tells the sweep's arms and slow controls apart; other settings are in study.json."""
    names = {"train.learning_rate": "lr", "objective.kl_beta": "KL", "data.limit": "data"}
    parts = [f"{names[k]} {v:g}" for k in names if (v := number(arm.settings.get(k))) is not None]
    return ", ".join(parts)


def _verdicts(arm: Arm) -> Cell:
    counts = Counter(run.verdict or "none" for run in arm.done)
    order = sorted(counts, key=lambda v: (-counts[v], v))
    tone = _VERDICT_TONES.get(order[0], "") if len(order) == 1 else "warn"
    return Cell(", ".join(f"{v} {counts[v]}/{len(arm.done)}" for v in order), "", tone)


def _measure_table(study: Study, arms: Sequence[Arm], *, heads: bool, note: str = "") -> Table:
    measures = _shown(study)
    columns = [("arm", "")]
    columns += [(_short(m.label), "lower is better" if m.better == "down" else "") for m in measures]
    columns += [("time", "a seed"), ("verdicts", "of the seeds")]

    def cells(arm: Arm) -> list[Cell]:
        row = [_cell(study, m, estimate(arm, m.name)) for m in measures]
        seconds = mean_over_done(arm, lambda run: run.seconds)
        return [*row, Cell("–" if seconds is None else _duration(seconds)), _verdicts(arm)]

    rows = _arm_rows(study, arms, cells, heads=heads)
    return Table(tuple(columns), rows, note=note, words=frozenset({0, len(columns) - 1}))


def _short(label: str) -> str:
    return label.replace("diffusion loss", "loss").replace("Held-out diffusion", "Held-out")


def _main_table(study: Study) -> tuple[Block, ...]:
    arms = [a for a in study.arms if a.group != "sweep"]
    if not arms:
        return (Missing("none is listed, apart from a sweep\u2019s."),)
    lede = (
        "Change since the base: mean over seeds, below it the 95 % interval over seeds (of one run, if it is alone). "
        f"Red: the held-out loss above +{100 * study.loss_limit:g} %, or an interval wholly on its bad side."
    )
    note = (
        "pt: points of a hundred. Arms that begin after SFT are counted from the base, too."
        if study.kind("judge")
        else ""
    )
    blocks: list[Block] = [Text(lede, lede=True), _measure_table(study, arms, heads=True, note=note)]
    others = [m for m in study.measures if m not in _shown(study)]
    if others:
        rows = _arm_rows(study, arms, lambda arm: [_cell(study, m, estimate(arm, m.name), judge=False) for m in others],
                         heads=False)  # fmt: skip
        columns = (("arm", ""), *((m.label, "") for m in others))
        blocks.append(Table(columns, rows, title="Other measurements, change since the base"))
    return tuple(blocks)


def _matched(study: Study) -> tuple[Block, ...]:
    arms = [a for a in study.compared if any(run.evals for run in a.runs)]
    measures = study.kind("loss", "judge")
    charts = study_plots.frontiers(study, arms, measures)
    if not charts:
        return (Missing("needs the evaluations during training of at least one arm."),)
    lede = (
        "After the same number of updates a slow arm has simply gone less far. So here each arm is followed along its "
        "training: what had the same reward cost when it was reached?"
    )
    blocks: list[Block] = [Text(lede, lede=True), Charts(tuple(charts))]
    levels = reward_levels(study, arms)
    for m in (*measures, None) if levels else ():
        blocks.append(_matched_table(study, arms, m, levels))
    loss = study.measure("heldout_loss") or (measures[0] if measures else None)
    everyone = [a for a in study.arms if a.group != "sweep" or a in study.compared]
    if loss is not None:
        singles, together = study_plots.small_multiples(study, everyone, loss)
        if together is not None:
            blocks.append(Multiples(tuple(singles), together, f"Each of {len(singles)} arms on a panel of its own"))
    return tuple(blocks)


def _matched_table(study: Study, arms: Sequence[Arm], m: Measure | None, levels: Sequence[float]) -> Table:
    columns = (("arm", ""), *((f"reward +{level:g}", "") for level in levels))
    rows = []
    for arm in arms:
        cells = [Cell(arm.label)]
        for level in levels:
            values = matched_values(study, arm, m.name if m else "step", level)
            total = sum(1 for run in arm.runs if run.evals)
            few = f"{len(values)} of {total} seeds" if 0 < len(values) < total else ""
            found = over_seeds(list(values.values()))
            if found is None:
                cells.append(Cell("not reached", tone="soft"))
            elif m is None:
                cells.append(Cell(f"{found.mean:.0f}", few))
            else:
                mean, interval = write_estimate(m, found)
                bad = m.kind == "loss" and found.mean > study.loss_limit
                cells.append(Cell(mean, few or interval, "bad" if bad else ""))
        if any(c.text != "not reached" for c in cells[1:]):
            rows.append(Row(tuple(cells), first=arm is study.reference))
    title = f"{m.label} at matched reward" if m else "Updates to get there"
    note = ""
    if m is not None and m.kind == "loss":
        note = (
            "Where the reward first reaches the level, linear between evaluations, mean over the seeds that "
            "reach it, with the 95 % interval over seeds where all do. Curves are of fewer clips "
            "(eval.clips_during) than the table of arms."
        )
    return Table(columns, tuple(rows), title=title, note=note)


def _training(study: Study) -> tuple[Block, ...]:
    arms = [a for a in study.compared if any(run.evals for run in a.runs)]
    charts = study_plots.over_training(study, arms, study.kind("reward", "loss", "judge"))
    if not charts:
        return (Missing("no evaluation during training has been written yet."),)
    lede = "All from the same base. Lines are means over seeds, bands run from the smallest seed to the largest."
    return (Text(lede, lede=True), Charts(tuple(charts)))


def _kl(study: Study) -> tuple[Block, ...]:
    charts = study_plots.kl_charts(study)
    if not charts:
        return (Missing("no arm with a KL to the reference has been measured."),)
    lede = (
        "A reverse KL is measured on the policy’s own samples, so it says little of the data that the policy has left. "
        "Compare the top row with the rows below it."
    )
    return (Text(lede, lede=True), Charts(tuple(charts)))


def _sub_scores(study: Study) -> tuple[Block, ...]:
    arms = [a for a in study.compared if a.done]
    charts = study_plots.sub_score_bars(study, arms)
    if not charts:
        return (Missing("no sub-scores have been measured."),)
    lede = "An average can rise while one of its parts falls. Here are the parts, of the main arms and the controls."
    return (Text(lede, lede=True), Charts(tuple(charts)))


def _amount(study: Study) -> tuple[Block, ...]:
    judges = study.kind("judge")
    charts = study_plots.by_data_points(study, (*study.kind("reward"), *study.kind("loss"), *judges))
    if not charts:
        return (Missing("needs arms with data.limit set, or with SFT before DDRL (pretrain.from_stage = “ddrl”)."),)
    lede = "DDRL with fewer and fewer data points, from the base and from where SFT on the same points had ended."
    return (Text(lede, lede=True), Charts(tuple(charts)))


def _pair_table(study: Study, a: Arm, b: Arm, *, evaluations: bool) -> Table:
    """Two arms side by side, a row a measure, and `a` minus `b`."""
    rows = []
    for m in _shown(study):
        note = "lower is better" if m.better == "down" else ""
        cells = [_cell(study, m, estimate(arm, m.name)) for arm in (a, b)]
        apart = _cell(study, m.apart, difference(a, b, m.name), judge=False)
        rows.append(Row((Cell(m.label, note), *cells, apart)))
    if evaluations:
        totals = [mean_over_done(arm, lambda run: run.evaluations.get("total")) for arm in (a, b)]
        trained = [training_evaluations(arm) for arm in (a, b)]
        for name, note, counts in (("Network evaluations", "policy and data, an iteration", trained),
                                   ("Network evaluations", "with rollouts, an iteration", totals)):  # fmt: skip
            rows.append(Row((Cell(name, note), *map(_count, counts), _share(*counts))))
    seconds = [mean_over_done(arm, lambda run: run.seconds) for arm in (a, b)]
    times = (Cell("–" if s is None else _duration(s)) for s in seconds)
    rows.append(Row((Cell("Time", "a seed"), *times, _share(*seconds))))
    columns = (("", ""), (a.label, ""), (b.label, ""), ("difference", "of counts and times: share"))
    return Table(columns, tuple(rows), narrow=True)


def _count(value: float | None) -> Cell:
    return Cell("–", tone="soft") if value is None else Cell(f"{value:,.0f}")


def _share(part: float | None, whole: float | None) -> Cell:
    return Cell(f"{100 * part / whole:.0f} %") if part is not None and whole else Cell("–", tone="soft")


def _full_and_reduced(study: Study) -> tuple[Block, ...]:
    reduced, full = study.reference, study.full
    if reduced is None or full is None or not (reduced.done and full.done):
        return (Missing("needs DDRL reduced and DDRL full (objective.data_levels = “rollout”), both finished."),)
    lede = "The data loss at one level a rollout, or at every trained step. Differences are over paired seeds."
    return (Text(lede, lede=True), _pair_table(study, reduced, full, evaluations=True))


def _synthetic(study: Study) -> tuple[Block, ...]:
    real, synthetic = study.reference, study.synthetic
    if real is None or synthetic is None or not (real.done and synthetic.done):
        return (Missing("needs DDRL with real data and with prepared data (data.path), both finished."),)
    lede = (
        "The base model’s own samples in place of real data. As good, by the rule below, is a loss of less than "
        f"{100 * MARGIN:.0f} % of the gain."
    )
    return (Text(lede, lede=True), _pair_table(study, synthetic, real, evaluations=False))


def _sweep(study: Study) -> tuple[Block, ...]:
    arms = study.groups("sweep")
    if not arms:
        return (Missing("this study holds none."),)

    def key(arm: Arm) -> tuple[str, float, float]:
        rate, kl = (number(arm.settings.get(k)) for k in ("train.learning_rate", "objective.kl_beta"))
        return arm.method, rate or 0.0, kl or 0.0

    hours = sum(run.seconds or 0.0 for arm in arms for run in arm.runs)
    lede = f"Every learning rate and KL weight that was tried for the baselines, {_duration(hours)} in all."
    table = _measure_table(study, sorted(arms, key=key), heads=False)
    return (Text(lede, lede=True), table)


def _seeds(study: Study) -> tuple[Block, ...]:
    arms = [a for a in study.arms if a.done and (a.group != "sweep" or a in study.compared)]
    charts = study_plots.seed_spread(study, arms, study.kind("reward", "loss", "judge"))
    if not charts:
        return (Missing("no run has finished yet."),)
    return (Text("How far apart the seeds of an arm lie.", lede=True), Charts(tuple(charts)))


def _cost(study: Study) -> tuple[Block, ...]:
    if not any(arm.done for arm in study.arms):
        return (Missing("no run has finished yet."),)
    parts = ("rollout", "policy", "data", "reference", "total")
    columns = (
        ("arm", ""), ("time", "a seed"), ("updates", ""), ("rollouts", ""), ("seconds", "an update"),
        *((p, "evaluations an iteration") for p in parts),
    )  # fmt: skip

    def cells(arm: Arm) -> list[Cell]:
        def per_update(run: SeedRun) -> float | None:
            return run.seconds / run.updates if run.seconds is not None and run.updates else None

        def part(name: str) -> Callable[[SeedRun], float | None]:
            return lambda run: run.evaluations.get(name)

        seconds, rate = mean_over_done(arm, lambda run: run.seconds), mean_over_done(arm, per_update)
        return [
            Cell("–" if seconds is None else _duration(seconds)),
            _count(mean_over_done(arm, lambda run: run.updates)),
            _count(mean_over_done(arm, lambda run: run.rollouts)),
            Cell("–" if rate is None else f"{rate:.2f}"),
            *(_count(mean_over_done(arm, part(p))) for p in parts),
        ]

    arms = [a for a in study.arms if a.group != "sweep"]
    lede = (
        "Means over seeds. A network evaluation is one sample through the network once, with or without its gradient."
    )
    return (Text(lede, lede=True), Table(columns, _arm_rows(study, arms, cells, heads=True)))


def _reproduce(study: Study) -> tuple[Block, ...]:
    if not study.command:
        return (Missing("study.json does not name the command."),)
    return (Text("It can be stopped at any time, and goes on where it was.", lede=True), Code(study.command))


def _duration(seconds: float) -> str:
    minutes = seconds / 60
    if minutes >= 60:
        hours, rest = divmod(round(minutes), 60)
        return f"{hours} h {rest} min"
    return f"{minutes:.0f} min" if minutes >= 10 else f"{minutes:.1f} min" if minutes >= 1 else f"{seconds:.0f} s"


# ---------------------------------------------------------------- samples


def _samples(study: Study) -> tuple[Block, ...]:
    base: Samples | None = None
    rows: list[tuple[str, str, Samples]] = []
    for arm in study.compared:
        for run in arm.runs:
            if run.workdir is None:
                continue
            read = read_run(run.workdir)
            if base is None and not arm.after_sft:
                base = read.before
            if read.after is not None:
                small = state(study, arm)
                rows.append((arm.label, f"{small}, seed {run.seed}", read.after))
                break
    if base is None or not rows:
        return (Missing("the runs’ sample clips are not beside this study any more, or not written yet."),)
    shared = [c for c in dict.fromkeys(base.captions) if all(c in s.captions for *_, s in rows)]
    if not shared:
        return (Missing("the arms’ evaluations have no prompt in common."),)
    captions = [shared[i] for i in np.unique(np.linspace(0, len(shared) - 1, _PROMPTS).round().astype(int))]
    table = [("Base", "before training", base), *rows]
    strips = tuple(
        (label, small, tuple(_clip(label, caption, samples) for caption in captions)) for label, small, samples in table
    )
    picture = study_plots.samples_picture([(label, s) for label, _, s in table], captions)
    lede = "The same prompts and the same noise for every arm. Prompts are evenly spaced, none was picked by hand."
    labels, columns = ", ".join(label for label, *_ in table), ", ".join(captions)
    alt = f"Samples of the base and after training: rows {labels}; columns {columns}."
    return (Text(lede, lede=True), Strips(tuple(captions), strips, picture, alt))


def _clip(label: str, caption: str, samples: Samples) -> str:
    clip = samples.video[samples.captions.index(caption)]
    kind, data, frames = media.strip(clip, size=_CLIP_SIZE, max_frames=24)
    height, width = clip.shape[1:3]
    pixels = max(height, width) <= _CLIP_SIZE
    return clip_html(data, kind, frames, height, width, f"{label}: {caption}", pixels=pixels)
