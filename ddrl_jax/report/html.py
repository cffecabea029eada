"""The report: files for people in `samples/` and `report/`, and one page that holds everything.

The page needs nothing but itself: styles, charts and clips are inside it, no script runs, and its
content policy forbids every request, so that a caption or a config can never fetch or execute.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ddrl_jax.report import media, plots
from ddrl_jax.report.page import escape, page
from ddrl_jax.report.verdict import (
    Change,
    Signal,
    read_changes,
    read_signals,
    show,
    stopped_sentence,
    verdict,
)
from ddrl_jax.report.workdir import Run, Samples, column, number, read_run

_FIRST_PAIRS = 20  # shown at once; the others are one click away
_MAX_PAIRS = 64
_CLIP_BYTES = 8 << 20  # of inlined clips: large videos show fewer pairs rather than a huge page
_CLIP_SIZE = 112  # pixels of a clip's longer side on the page
_ICONS = {
    "clean": '<circle cx="12" cy="12" r="11"/><path d="M7 12.5l3.4 3.4L17.2 9"/>',
    "suspicious": '<path d="M12 1.8L23.2 21.6H.8z"/><path d="M12 9v5.6M12 18v.2"/>',
    "hacked": '<path d="M7.4 1h9.2L23 7.4v9.2L16.6 23H7.4L1 16.6V7.4z"/><path d="M8 8l8 8M16 8l-8 8"/>',
    "no change": '<circle cx="12" cy="12" r="11"/><path d="M7 10h10M7 14.4h10"/>',
    "no verdict yet": '<circle cx="12" cy="12" r="11"/><path d="M12 6v6.4l4 2.4"/>',
}

_KINDS = {
    "reward": "Reward and its sub-scores, which training saw; one scale for all",
    "gate": "Sub-scores that gate the reward: training saw whether they passed; each on its own scale",
    "none": "Other sub-scores of the same scorers: no weight in the reward, each on its own scale",
    "judge": "Judges, which training never saw; each on its own scale",
    "other": "Other measures; each on its own scale",
}

_GLOSSARY = (
    ("Reward hacking", "The reward goes up while the thing it stands for does not. The policy has "
     "found what the scorer likes, not what people like."),
    ("Held-out diffusion loss", "How badly the model explains real clips it never trained on. Hacking "
     "drags the model away from real data, so this usually warns early. A rise past "
     "its limit (10 % unless set otherwise) is an alarm."),
    ("Steepness of the rise", "Real improvement is slow. A reward that climbs suddenly has usually "
     "found a shortcut."),
    ("Within-group std", "The spread of the reward among rollouts of one prompt. When it collapses, all "
     "rollouts look alike. It is a late signal."),
    ("Sub-scores traded for the reward", "The reward is made of several scores. If it rises while one of them falls, "
     "the policy may have found where the points are cheap. Measured against how much rollouts of one prompt differ."),
    ("What the pictures look like", "Edge density, colour saturation, change from frame to frame, brightness, "
     "contrast: numbers without an opinion. Hacked pictures turn garish, over-sharp or still before anybody looks at "
     "them; a poor base may move them honestly."),
    ("Judge", "A measurement that training never used: a network trained on other data, or a distance "
     "between generated and real clips. If the reward rises and a judge falls, believe the judge."),
    ("Fr\u00e9chet distance", "How far the judge\u2019s view of generated clips lies from its view of real "
     "ones. Lower is closer to real."),
    ("95 % interval", "What repeated draws of the evaluation prompts would give in 95 of 100 cases. It "
     "leaves out how much another seed would change."),
    ("Data loss", "The diffusion loss on fixed real data that DDRL adds to the reward. It is what keeps "
     "the policy near the data."),
    ("Policy ratio, clipped fraction", "How far one update moved the policy from the one that made the "
     "rollouts, and how often clipping held it back."),
    ("Gradient norm of a step", "How hard each denoising step of the rollout pulls at the weights. One step that "
     "outgrows the others is what the update is really about."),
    ("KL to the reference", "How far the policy is from where it began, on its own rollouts. It can stay flat while "
     "the samples leave the data: the held-out loss looks from the data\u2019s side."),
    ("Valid rate", "The share of rollouts whose reward arrived and was a number. The others are left "
     "out, never counted as 0."),
)  # fmt: skip


def write_report(workdir: str | Path) -> Path:
    """Write a run's sample files, charts and page; safe to call again while the run goes on.

    Writes `report/index.html`, `report/*.png`, `samples/{before,after}.{gif,mp4}` and
    `samples/contact_sheet.png` under `workdir`, each replaced in one step. What the run has not
    produced yet, or what cannot be read, is said on the page.

    Args:
      workdir: the directory a run writes to: config.json, metrics.jsonl, eval/<step>/samples.npz,
        summary.json. Each of them may be missing.

    Returns:
      The path of `report/index.html`.

    Raises:
      ValueError: `workdir` is not a directory.
    """
    run = read_run(workdir)
    _write_samples(run)
    charts = plots.curves(run)
    for chart in (*charts, *plots.bars(read_changes(run.summary), run.role)):
        media.write_bytes(run.path / "report" / f"{chart.name}.png", chart.png)
    page = run.path / "report" / "index.html"
    media.write_bytes(page, _page(run, charts).encode())
    return page


def _write_samples(run: Run) -> None:
    folder = run.path / "samples"
    for name, samples in (("before", run.before), ("after", run.after)):
        if samples is None:
            continue
        large = max(samples.video.shape[2:4]) > _CLIP_SIZE
        clips = samples.video[: 16 if large else _MAX_PAIRS]
        many = len(clips) > 16
        fps = _fps(run, clips.shape[1])
        # A clip of half a second is over before a player has shown it.
        loops = max(1, round(3 * fps / clips.shape[1]))
        # GIF compresses photographs badly: large clips are smaller there than in the MP4.
        for kind, size in (("gif", 72 if many else 160), ("mp4", 72 if many else 320 if large else 160)):
            sheet = media.mosaic(media.fit(clips, size), columns=8 if many else 4)
            if kind == "gif":
                media.write_gif(folder / f"{name}.gif", sheet, fps)
            else:
                media.write_mp4(folder / f"{name}.mp4", sheet, fps, loops=loops)
    shown = run.before or run.after
    if shown is None:
        return
    pairs = _pairs(run)
    if run.before is not None and run.after is not None and pairs:
        # Spread over the prompts: neighbours are often the same digit or subject.
        chosen = [pairs[i] for i in np.unique(np.linspace(0, len(pairs) - 1, 12).astype(int))]
        left = run.before.video[[i for i, _ in chosen]]
        right = run.after.video[[j for _, j in chosen]]
        captions = [run.before.captions[i] for i, _ in chosen]
        titles = (f"before (update {run.before.step})", f"after (update {run.after.step})")
        picture = media.contact_sheet(captions, left, right, titles=titles)
    else:
        rows = np.unique(np.linspace(0, len(shown.video) - 1, 12).astype(int))
        title = f"update {shown.step}"
        captions = [shown.captions[i] for i in rows]
        picture = media.contact_sheet(captions, shown.video[rows], None, titles=(title, ""))
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", optimize=True)
    media.write_bytes(folder / "contact_sheet.png", buffer.getvalue())


def _fps(run: Run, frames: int) -> float:
    """The run's frame rate; very short clips are slowed down so that one can see them."""
    fps = number(_get(run.config, "reward", "fps")) or 8.0
    return min(max(fps, 1.0), 60.0, max(frames / 0.8, 1.0))


def _pairs(run: Run) -> list[tuple[int, int]]:
    """Indices (before, after) of clips of the same prompt, in the order of `before`."""
    if run.before is None or run.after is None:
        return []
    left, right = run.before.captions, run.after.captions
    if left == right:
        return [(i, i) for i in range(len(left))]
    places: dict[str, list[int]] = {}
    for j, caption in enumerate(right):
        places.setdefault(caption, []).append(j)
    return [(i, places[c].pop(0)) for i, c in enumerate(left) if places.get(c)]


def _get(value: Any, *path: str) -> Any:
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _page(run: Run, charts: Sequence[plots.Chart]) -> str:
    title = str(run.summary.get("title") or _get(run.config, "title") or run.path.resolve().name)
    sections = (
        ("samples", "Samples", _samples(run)),
        ("changes", "What changed", _changes(run)),
        ("curves", "Curves", _curves(charts)),
        ("config", "Configuration", _config(run)),
        ("reproduce", "How to reproduce", _reproduce(run)),
        ("glossary", "How to read this", _glossary()),
    )
    links = "".join(f'<a href="#{name}">{heading}</a>' for name, heading, _ in sections)
    body = "".join(f'<section id="{name}"><h2>{heading}</h2>{content}</section>' for name, heading, content in sections)
    return page(
        title=title,
        eyebrow="ddrl_jax run report",
        facts=_facts(run),
        links=links,
        main=f"{_verdict(run)}\n{body}",
        source=run.path.resolve().name,
    )


def _facts(run: Run) -> str:
    given = run.summary.get("run")
    facts = dict(given) if isinstance(given, dict) else {}
    facts.setdefault("method", _get(run.config, "objective", "name"))
    seconds = number(facts.pop("seconds", None))
    items = [(k.replace("_", " "), _value(v)) for k, v in facts.items() if v not in (None, "")]
    if seconds is not None:
        items.append(("time", _duration(seconds)))
    inner = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in items)
    return f'<dl class="facts">{inner}</dl>' if inner else ""


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


# ---------------------------------------------------------------- the verdict


def _verdict(run: Run) -> str:
    label: str
    signals = read_signals(run.summary)
    if read_changes(run.summary):
        found = verdict({"stopped": run.stopped, **run.summary})
        label, headline = found.label, found.headline
        # The cards below say these in the same words; an alarm is said here, where the verdict is argued.
        cards_say = {s.evidence for s in signals if not s.alarm} | {f"{s.label}: not measured." for s in signals}
        reasons = [r for r in found.reasons if r not in cards_say]
        caveat = (
            "This verdict rests on the measurements below and on one run. It can show that a reward "
            "was hacked; it cannot prove that it was not. Look at the samples."
        )
    else:
        label, (headline, reasons) = "no verdict yet", _progress(run)
        caveat = "The verdict needs both evaluations. Curves and samples show what there is so far."
    tone = label if label in ("clean", "suspicious", "hacked") else "open"
    items = "".join(f"<li>{escape(reason)}</li>" for reason in reasons)
    icon = (
        '<svg viewBox="0 0 24 24" fill="none" stroke="currentColor" stroke-width="2" '
        f'stroke-linecap="round" stroke-linejoin="round" aria-hidden="true">{_ICONS[label]}</svg>'
    )
    told = {*reasons}
    cards = "".join(_signal(signal, run, told) for signal in signals)
    return f"""<div class="verdict {tone}" id="verdict">
<div class="call"><div><p class="label">{icon}<span>{label.capitalize()}</span></p>
<p class="headline">{escape(headline)}</p>{_glance(run)}</div>
<ul class="reasons">{items}</ul></div>
<div class="signals">{cards}</div>
<p class="caveat">{caveat}</p>
{_notes(run)}</div>"""


def _progress(run: Run) -> tuple[str, list[str]]:
    """Where an unfinished run stands: a headline, and what is there and what is not."""
    reasons = []
    if ended := stopped_sentence(run.stopped):
        reasons.append(ended)
    current = "Nothing has been measured yet."
    for stage, section, doing in (
        ("pretrain", "pretrain", "Pre-training is at step"),
        ("ddrl", "train", "Training is at update"),
    ):
        rows = run.stage(stage)
        if rows:
            planned = number(_get(run.config, section, "steps"))
            of = f" of {planned:.0f}" if planned else ""
            current = f"{doing} {number(rows[-1]['step']):.0f}{of}."
    if not run.rows:
        reasons.append("There are no metrics yet.")
    if run.before is None:
        reasons.append("The evaluation before training has not been written.")
    if run.after is None:
        reasons.append("The evaluation after training has not been written.")
    if not run.summary:
        reasons.append("There is no summary: the run has not finished, or was stopped.")
    else:
        reasons.append("The summary holds no changes, so there is nothing to judge.")
    return current, reasons


def _card_text(signal: Signal, spark: str, *, finished: bool) -> str:
    when = "The run\u2019s summary does not hold it" if finished else "Judged when the run ends"
    return signal.evidence or (f"{when}; this is its curve." if spark else "Nothing measured.")


def _signal(signal: Signal, run: Run, told: set[str]) -> str:
    if signal.alarm is None:
        state, kind = "not measured", ""
    else:
        state, kind = ("alarm", "alarm") if signal.alarm else ("quiet", "quiet")
    reading = ""
    if signal.value is not None:
        small = {"reward_slope": "an update", "sub_scores": "group std"}.get(signal.name, "")
        if signal.limit is not None:
            small += f"{', ' if small else ''}limit {_reading(signal.name, signal.limit, digits=0)}"
        value = _reading(signal.name, signal.value, digits=1)
        reading = f'<p class="reading">{value}<small>{small}</small></p>'
    spark = _spark(signal, run)
    text = _card_text(signal, spark, finished=bool(read_changes(run.summary)))
    said = "" if text in told else f"<p>{escape(text)}</p>"
    return f"""<article class="signal"><header><h3>{signal.label}</h3>
<span class="state {kind}">{state}</span></header>
{reading}{said}{spark}</article>"""


def _reading(name: str, value: float, *, digits: int) -> str:
    """A signal's value or limit in its unit: a rise, a slope, a change."""
    if name in ("reward_slope", "sub_scores"):
        return show(value)
    if name == "image_statistics":  # either way
        return f"{100 * value:.{digits}f} %"
    # The third signal measures a fall; as a change it is negative, which needs no explaining.
    percent = (-100.0 if name == "reward_std" else 100.0) * value
    return f"{percent:+.{digits}f} %".replace("-", "\u2212")


def _spark(signal: Signal, run: Run) -> str:
    """The signal's own curves, small: no axes, its limit dashed where it is a height on them."""
    ddrl, evals = run.stage("ddrl"), run.stage("eval")
    limits: list[float] = []
    if signal.name in ("reward_slope", "reward_std"):
        rows, key = ddrl, "reward" if signal.name == "reward_slope" else "reward_std"
        curves = [column(rows, key)]
    elif signal.name == "heldout_loss":
        rows, curves, limits = evals, [plots.relative(column(evals, "heldout_loss"))], [0.0, run.loss_limit]
    elif signal.name == "image_statistics":
        rows = evals
        curves = [plots.relative(column(evals, name)) for name in plots.image_names(evals)]
        limits = [-run.image_limit, run.image_limit]
    else:
        rows = evals
        names = [name for name in plots.eval_sub_scores(evals) if run.role(name) in ("reward", "unknown")]
        values = [column(evals, name) for name in names]
        curves = [y - y[np.isfinite(y)][0] for y in values if np.isfinite(y).any()]
    x = column(rows, "step")
    known = [y for y in curves if np.isfinite(y).sum() > 1]
    if not known or x[0] == x[-1]:
        return ""
    low, high = (float(f([f(y[np.isfinite(y)]) for y in known])) for f in (np.min, np.max))
    if signal.name == "reward_std":
        low = 0.0
        if signal.limit is not None:
            y = known[0][np.isfinite(known[0])]
            limits = [float(y[: max(1, len(y) // 10)].mean()) * (1 - signal.limit)]
    if limits and signal.name != "reward_std":
        low, high = min(low, limits[0] * 1.1), max(high, limits[-1] * 1.1)
    span = (high - low) or 1.0

    def height(value: Any) -> Any:
        return 38 - 36 * (value - low) / span

    def path(y: np.ndarray) -> str:
        at = np.isfinite(y)
        points = zip(100 * (x[at] - x[0]) / (x[-1] - x[0]), height(y[at]), strict=True)
        return "M" + "L".join(f"{a:.2f} {b:.2f}" for a, b in points)

    dashes = "".join(f'<path class="limit" d="M0 {height(limit):.2f}H100"/>' for limit in limits if limit)
    # One curve has the page's line colour, several have the charts' own.
    colors = [""] if len(known) == 1 else [f' style="stroke:var(--s{n})"' for n in range(1, 7)]
    lines = "".join(f'<path d="{path(y)}"{color}/>' for y, color in zip(known, colors, strict=False))
    return (
        f'<svg class="spark" viewBox="0 0 100 40" preserveAspectRatio="none" aria-hidden="true">{dashes}{lines}</svg>'
    )


def _notes(run: Run) -> str:
    if not run.notes:
        return ""
    items = "".join(f"<li>{escape(note)}</li>" for note in run.notes)
    return f'<aside class="notes"><h3>Not everything could be read</h3><ul>{items}</ul></aside>'


# ---------------------------------------------------------------- samples


def _samples(run: Run) -> str:
    if run.before is None and run.after is None:
        return _empty("No samples yet: they come with the first evaluation.")
    before, after = run.before, run.after
    cells: Iterable[tuple[str, Sequence[tuple[Samples, int]]]]
    if before is not None and after is not None:
        pairs = _pairs(run)
        lede = (
            f"The same prompts and the same noise, at update {before.step} and at update "
            f"{after.step}. No clip was picked by hand."
        )
        key = '<span class="key"><span>before</span><span>after</span></span>'
        grid = "grid"
        if not pairs:
            return _empty("The two evaluations have no prompt in common.")
        cells = ((before.captions[i], ((before, i), (after, j))) for i, j in pairs[:_MAX_PAIRS])
    else:
        shown = before or after
        assert shown is not None
        lede = f"Clips at update {shown.step}. There is no other evaluation to set beside them yet."
        key, grid = "", "grid solo"
        chosen = range(min(_MAX_PAIRS, len(shown.video)))
        cells = ((shown.captions[i], ((shown, i),)) for i in chosen)
    figures: list[str] = []
    size = 0
    for caption, clips in cells:
        figure = _pair(caption, clips)
        size += len(figure)
        if figures and size > _CLIP_BYTES:
            break
        figures.append(figure)
    first, rest = figures[:_FIRST_PAIRS], figures[_FIRST_PAIRS:]
    more = ""
    if rest:
        more = (
            f'<details class="more"><summary>{len(rest)} more</summary>'
            f'<div class="{grid}">{"".join(rest)}</div></details>'
        )
    return f"""<p class="lede">{lede}</p>
<div class="bar">{key}<label><input type="checkbox" id="pause"> Pause</label></div>
<div class="{grid}">{"".join(first)}</div>{more}"""


def _glance(run: Run) -> str:
    """Four pairs spread over the prompts, beside the verdict: the first thing to look at."""
    pairs = _pairs(run)
    if run.before is None or run.after is None or not pairs:
        return ""
    chosen = np.unique(np.linspace(0, min(len(pairs), _MAX_PAIRS) - 1, 4).astype(int))
    figures = "".join(
        _pair(run.before.captions[i], ((run.before, i), (run.after, j)), bare=True)
        for i, j in (pairs[k] for k in chosen)
    )
    key = '<p class="key"><span>before</span><span>after</span></p>'
    return f'<div class="glance">{figures}</div>{key}'


def _pair(caption: str, clips: Sequence[tuple[Samples, int]], *, bare: bool = False) -> str:
    names = ("before", "after") if len(clips) == 2 else ("",)
    parts = []
    for name, (samples, i) in zip(names, clips, strict=True):
        clip = samples.video[i]
        kind, data, frames = media.strip(clip, size=_CLIP_SIZE, max_frames=24)
        seconds = min(max(frames / 8, 0.8), 6.0)
        classes = "clip" + (" pixels" if max(clip.shape[1:3]) <= _CLIP_SIZE else "")
        classes += " moving" if frames > 1 else ""
        style = (
            f"--n:{frames};--d:{seconds:.2f}s;--a:{clip.shape[2]}/{clip.shape[1]};"
            f"--i:url(data:{kind};base64,{base64.b64encode(data).decode()})"
        )
        label = escape(f"{name}: {caption}" if name else caption)
        parts.append(f'<div class="{classes}" role="img" aria-label="{label}" style="{style}"></div>')
    single = "" if len(parts) == 2 else " single"
    below = "" if bare else f"<figcaption>{escape(caption)}</figcaption>"
    return f'<figure class="pair"><div class="clips{single}">{"".join(parts)}</div>{below}</figure>'


# ---------------------------------------------------------------- what changed


def _changes(run: Run) -> str:
    changes = read_changes(run.summary)
    before = run.summary.get("before")
    after = run.summary.get("after")
    before, after = (v if isinstance(v, dict) else {} for v in (before, after))
    named = {c.name for c in changes}
    extra = [
        Change(str(k), str(k).removeprefix("image/").replace("_", " "), "other", "", None, None, None, None)
        for k in dict.fromkeys((*before, *after))
        # A statistic that these clips do not have (grey ones no saturation) is no row.
        if k not in named and not (str(k).startswith("image/") and before.get(k) is None and after.get(k) is None)
    ]
    if not changes and not extra:
        return _empty("Nothing to compare yet: the means come with the evaluation after training.")
    groups: dict[str, list[Change]] = {"reward": [], "gate": [], "none": [], "judge": [], "other": []}
    for change in (*changes, *extra):
        kind = {"loss": "judge"}.get(change.kind, change.kind)
        if kind == "sub":
            kind = {"unknown": "reward"}.get(role := run.role(change.name), role)
        groups.get(kind, groups["other"]).append(change)
    # A held-out loss that rose within its limit is worse, and not an alarm: its row says so.
    held = read_signals(run.summary)[0].alarm is False
    rows = []
    for kind, members in groups.items():
        if not members:
            continue
        rows.append(f'<tr class="group"><td colspan="6">{_KINDS[kind]}</td></tr>')
        shared = max((_reach(c) for c in members), default=0.0) if kind == "reward" else None
        rows += [_row(c, before.get(c.name), after.get(c.name), shared, loss_held=held) for c in members]
    n = next((c.n for c in changes if c.kind == "reward"), None)
    over = f" over {n} prompts" if n else ""
    return f"""<p class="lede">Means before and after, and the change with its 95 % interval{over}.
A bar to the right of the line is better, whichever way the number goes. An interval that crosses
the line shows no clear change.</p>
<table class="changes"><thead><tr><th>measure</th><th class="num">before</th><th class="num">after</th>
<th class="num">change [95 % interval]</th><th class="forest"><span class="axis"><span>worse</span>
<span>better</span></span></th><th></th></tr></thead><tbody>{"".join(rows)}</tbody></table>"""


def _reach(change: Change) -> float:
    ends = (change.mean, change.low, change.high)
    return max((abs(v) for v in ends if v is not None), default=0.0)


def _row(change: Change, before: Any, after: Any, shared: float | None, *, loss_held: bool) -> str:
    sides = {"good": "\u25b2 better", "bad": "\u25bc worse", "unclear": "no clear change"}
    tone, side = change.side, sides.get(change.side, "no interval")
    if change.kind == "loss" and tone == "bad" and loss_held:
        tone, side = "unclear", "\u25bc within limit"
    mean, interval = change.numbers()
    lower = '<span class="unit">lower is better</span>' if change.better == "down" else ""
    return (
        f"<tr><td>{escape(change.label)}{lower}</td>"
        f'<td class="num" data-h="before">{show(number(before))}</td>'
        f'<td class="num" data-h="after">{show(number(after))}</td>'
        f'<td class="num delta">{mean} <span class="interval">{interval}</span></td>'
        f'<td class="forest">{_forest(change, shared)}</td>'
        f'<td class="side {tone}">{side}</td></tr>'
    )


def _forest(change: Change, shared: float | None) -> str:
    """Bar of the change with a whisker for the interval; better is to the right."""
    reach = shared or _reach(change)
    if change.mean is None or not reach:
        return ""
    turn = -1 if change.better == "down" else 1

    def at(value: float) -> float:
        return 50 + 47 * turn * value / reach

    color = {"good": "var(--good)", "bad": "var(--bad)"}.get(change.side, "var(--mid)")
    left, right = sorted((50.0, at(change.mean)))
    whisker = ""
    if change.low is not None and change.high is not None:
        a, b = sorted((at(change.low), at(change.high)))
        lines = ((a, b, 11, 11), (a, a, 7, 15), (b, b, 7, 15))
        whisker = "".join(
            f'<line x1="{x1:.2f}%" x2="{x2:.2f}%" y1="{y1}" y2="{y2}" stroke="var(--ink)" stroke-width="1.5"/>'
            for x1, x2, y1, y2 in lines
        )
    return (
        f'<svg aria-hidden="true"><rect x="{left:.2f}%" width="{right - left:.2f}%" y="5" height="12" '
        f'rx="1.5" fill="{color}" opacity=".8"/>{whisker}'
        '<line x1="50%" x2="50%" y1="-3" y2="25" stroke="var(--mid)"/></svg>'
    )


# ---------------------------------------------------------------- the rest


def _curves(charts: Sequence[plots.Chart]) -> str:
    if not charts:
        return _empty("No metrics yet: curves appear after the first update.")
    figures = "".join(
        f'<figure class="chart"><h3>{escape(c.title)}</h3><figcaption>{escape(c.caption)}</figcaption>{c.svg}</figure>'
        for c in charts
    )
    return (
        '<p class="lede">Faint lines are single updates, strong ones a moving average.</p>'
        f'<div class="charts">{figures}</div>'
    )


def _config(run: Run) -> str:
    if not run.config:
        return _empty("config.json is missing.")
    groups: dict[str, list[tuple[str, Any]]] = {}
    for key, value in run.config.items():
        if isinstance(value, dict):
            groups.setdefault(str(key), []).extend(_leaves(value))
        else:
            groups.setdefault("run", []).append((str(key), value))
    blocks = "".join(
        f"<div><h3>{escape(name)}</h3><dl>"
        + "".join(f"<dt>{escape(k)}</dt><dd>{escape(_value(v))}</dd>" for k, v in leaves)
        + "</dl></div>"
        for name, leaves in groups.items()
    )
    count = sum(map(len, groups.values()))
    return f'<details><summary>All {count} settings of this run</summary><div class="config">{blocks}</div></details>'


def _leaves(value: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    leaves: list[tuple[str, Any]] = []
    for key, child in value.items():
        if isinstance(child, dict) and child:
            leaves += _leaves(child, f"{prefix}{key}.")
        else:
            leaves.append((f"{prefix}{key}", child))
    return leaves


def _value(value: Any) -> str:
    """A setting as people write it: 1e-05 rather than 0.00001, bare text, lists in one line."""
    if value is None:
        return "default"
    if isinstance(value, str):
        return value or "\u201c\u201d"
    return json.dumps(value, ensure_ascii=False)


def _reproduce(run: Run) -> str:
    command = run.summary.get("command")
    if not isinstance(command, str) or not command.strip():
        return _empty("The command is written down when the run ends.")
    config = run.summary.get("config_file")
    source = f" The settings came from <code>{escape(config)}</code>." if config else ""
    return f'<p class="lede">Run this with an empty working directory.{source}</p><pre>{escape(command.strip())}</pre>'


def _glossary() -> str:
    items = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in _GLOSSARY)
    return f'<dl class="glossary">{items}</dl>'


def _empty(text: str) -> str:
    return f'<p class="empty">{escape(text)}</p>'
