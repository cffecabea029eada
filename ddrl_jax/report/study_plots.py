"""The study's figures, in the look of a run's charts (`plots`): SVG for the page, PNG on white for Markdown.

Colour is by method: blue DDRL, orange DanceGRPO, teal FlowGRPO, grey the rest; lines carry their names at their ends,
so that nothing rests on colour alone. A band is the smallest to the largest seed, a line their mean.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from ddrl_jax.report import media, plots
from ddrl_jax.report.plots import COLORS
from ddrl_jax.report.study_claims import say, state, write_number
from ddrl_jax.report.study_stats import Arm, Curve, Measure, Study, curve, estimate, update_curve
from ddrl_jax.report.workdir import Samples

_METHODS = {"ddrl": "line", "dance_grpo": "s2", "flow_grpo": "s3"}
_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (7, 2, 1.5, 2)), (0, (3, 3)))
_MARKERS = ("o", "s", "^", "D", "v", "P")
_WIDTH = 4.7  # inches; a chart fills half the page, or a phone


@dataclasses.dataclass(frozen=True)
class Drawing(plots.Chart):
    """A chart and what it shows in words, for those who cannot see it."""

    alt: str


@dataclasses.dataclass(frozen=True)
class Style:
    """How an arm is drawn, the same in every figure."""

    color: str
    dashes: Any
    marker: str
    width: float
    order: float


def styles(study: Study) -> dict[str, Style]:
    """By arm's name: the method's colour, dashes for its second and later arms, the reference strongest."""
    seen: dict[str, int] = {}
    found = {}
    for arm in study.arms:
        color = _METHODS.get(arm.method, "mid")
        n = seen.setdefault(color, 0)
        seen[color] += 1
        first = study.reference is arm
        found[arm.name] = Style(
            COLORS[color], _DASHES[n % len(_DASHES)], _MARKERS[n % len(_MARKERS)],
            2.4 if first else 1.5, 4.0 if first else 3.0 if color != "mid" else 2.0,
        )  # fmt: skip
    return found


def _draw(
    name: str,
    title: str,
    caption: str,
    alt: str,
    draw: Callable[[Figure], Any],
    *,
    width: float = _WIDTH,
    height: float,
) -> Drawing:
    with matplotlib.rc_context(plots._RC):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure)
        buffer = io.StringIO()
        nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
        svg = plots._inline(buffer.getvalue(), name, alt)
        figure.suptitle(title, x=0.01, ha="left", fontsize=9.5, color=COLORS["ink"])
        picture = io.BytesIO()
        figure.savefig(picture, format="png", dpi=180, facecolor="white")
    return Drawing(name, title, caption, svg, picture.getvalue(), alt)


def _format(axis: Any, measure: Measure) -> None:
    axis.set_major_formatter(FuncFormatter(lambda v, _: f"{plots._tick(measure.scale * v)}{measure.unit}"))


def _spread(values: Sequence[float], least: float) -> list[float]:
    """The nearest heights to `values` (sorted) that keep `least` between neighbours and stay within [0, 1]."""
    n = len(values)
    least = min(least, 1 / max(n - 1, 1))
    clusters: list[list[Any]] = []
    for i, value in enumerate(values):
        clusters.append([value - i * least, 1])
        while len(clusters) > 1 and clusters[-2][0] > clusters[-1][0]:
            mean, count = clusters.pop()
            before = clusters[-1]
            before[0] = (before[0] * before[1] + mean * count) / (before[1] + count)
            before[1] += count
    flat = [mean for mean, count in clusters for _ in range(count)]
    top = 1 - (n - 1) * least
    return [min(max(v, 0.0), top) + i * least for i, v in enumerate(flat)]


def _name_ends(axes: Axes, ends: Sequence[tuple[float, float, str, Style]]) -> None:
    """Each line's name in a column right of the axes, as near its end as the others allow, with a thin leader to it."""
    if not ends:
        return
    low, high = axes.get_ylim()
    left, right = axes.get_xlim()
    axes.set_ylim(low, high)
    axes.set_xlim(left, right)

    def share(y: float) -> float:
        return min(max((y - low) / (high - low), 0.0), 1.0)

    figure = axes.figure
    assert isinstance(figure, Figure)
    room = figure.get_figheight() - 0.6  # inches of the axes, about
    ordered = sorted(ends, key=lambda e: e[1])
    places = _spread([share(y) for _, y, *_ in ordered], 0.15 / room)
    for (x, y, label, style), place in zip(ordered, places, strict=True):
        lines = textwrap.shorten(label, 30, placeholder="…")
        axes.annotate(
            lines, (x, y), (1.05, place), textcoords="axes fraction", va="center", ha="left", fontsize=8,
            color=style.color if style.color != COLORS["mid"] else COLORS["soft"], annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": COLORS["rule"], "linewidth": 0.8, "shrinkA": 1, "shrinkB": 3},
            fontweight="bold" if style.width > 2 else "normal",
        )  # fmt: skip


def _height(names: int) -> float:
    """Inches of a chart that has so many names beside it."""
    return max(2.85, 0.7 + 0.155 * names)


def _limit(axes: Axes, limit: float, *, label: bool = True, at: float = 0.0) -> None:
    axes.axhline(limit, color=COLORS["bad"], linewidth=1, dashes=(4, 3))
    if label:
        axes.annotate(
            f"limit {plots._tick(100 * limit)} %", (at, limit), (2, 2), xycoords=axes.get_yaxis_transform(),
            textcoords="offset points", color=COLORS["bad"], fontsize=7.5, ha="left", va="bottom",
        )  # fmt: skip


# ---------------------------------------------------------------- over training


def over_training(study: Study, arms: Sequence[Arm], measures: Sequence[Measure]) -> list[Drawing]:
    """Fig. 2: one chart a measure, its change over updates, a line an arm."""
    drawings = []
    look = styles(study)
    for m in measures:
        lines = [(arm, c) for arm in arms if (c := curve(study, arm, m.name)) is not None and len(c.step) > 1]
        if not lines:
            continue

        def draw(figure: Figure, m: Measure = m, lines: Sequence[tuple[Arm, Curve]] = lines) -> None:
            axes = plots._axes(figure)
            _format(axes.yaxis, m)
            axes.axhline(0, color=COLORS["mid"], linewidth=0.8)
            if m.kind == "loss":
                _limit(axes, study.loss_limit)
            for arm, c in lines:
                s = look[arm.name]
                axes.fill_between(c.step, c.low, c.high, color=s.color, alpha=0.13, linewidth=0, zorder=s.order - 1)
                axes.plot(c.step, c.mean, color=s.color, linewidth=s.width, linestyle=s.dashes, zorder=s.order)
            _name_ends(axes, [(c.step[-1], c.mean[-1], arm.label, look[arm.name]) for arm, c in lines])

        ends = "; ".join(f"{arm.label} ends at {write_number(m, float(c.mean[-1]))}" for arm, c in lines)
        what = {
            "reward": "What training is paid for.",
            "loss": "How much worse held-out real data are explained; past the limit counts as hacked.",
            "judge": "Never seen by training" + ("; higher is better." if m.better == "up" else "; lower is better."),
        }.get(m.kind, "")
        drawings.append(
            _draw(f"training_{_stem(m)}", f"{m.label}, change since the base", what,
                  f"{m.label} over updates, change since the base. {ends}.", draw, height=_height(len(lines)))
        )  # fmt: skip
    return drawings


def kl_charts(study: Study) -> list[Drawing]:
    """Fig. 3: for each arm with a KL, the KL and below it, on the same updates, what the KL should have noticed."""
    drawings = []
    look = styles(study)
    beside = [m for m in study.kind("loss", "judge")][:4]
    for arm in study.with_kl:
        kl = update_curve(arm, "kl_loss")
        panels = [(m, c) for m in beside if (c := curve(study, arm, m.name)) is not None and len(c.step) > 1]
        if kl is None or not panels:
            continue

        def draw(
            figure: Figure, arm: Arm = arm, kl: Curve = kl, panels: Sequence[tuple[Measure, Curve]] = panels
        ) -> None:
            color = look[arm.name].color
            rows = 1 + len(panels)
            top = plots._axes(figure, rows, 1, 1)
            _heading(top, "KL to the reference (what training sees)")
            top.plot(kl.step, kl.mean, color=color, alpha=0.3, linewidth=0.8)
            smooth = plots._smooth(kl.mean)
            top.plot(kl.step, smooth, color=color, linewidth=1.9)
            top.set_ylim(0, max(float(np.nanmax(smooth)) * 1.35, 1e-12))
            top.yaxis.set_major_locator(MaxNLocator(2))
            for n, (m, c) in enumerate(panels, 2):
                axes = plots._axes(figure, rows, 1, n)
                axes.set_xlim(top.get_xlim())
                _heading(axes, f"{m.label}{' (lower is better)' if m.better == 'down' else ''}")
                _format(axes.yaxis, m)
                axes.yaxis.set_major_locator(MaxNLocator(3))
                axes.axhline(0, color=COLORS["mid"], linewidth=0.8)
                if m.kind == "loss":
                    _limit(axes, study.loss_limit, label=False)
                axes.fill_between(c.step, c.low, c.high, color=color, alpha=0.15, linewidth=0)
                axes.plot(c.step, c.mean, color=color, linewidth=1.9)
            for axes in figure.axes[:-1]:
                axes.set_xlabel("")
                axes.tick_params(labelbottom=False)

        ends = "; ".join(f"{m.label} {write_number(m, float(c.mean[-1]))}" for m, c in panels)
        drawings.append(
            _draw(f"kl_{_clean(arm.name)}", arm.label, "The KL above; below it what nobody optimised.",
                  f"{arm.label}: KL to the reference over updates, ending at {kl.mean[-1]:.3g}; at the end {ends}.",
                  draw, height=1.0 + 1.05 * (1 + len(panels)))
        )  # fmt: skip
    return drawings


def _heading(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=8, color=COLORS["soft"], pad=3)


# ---------------------------------------------------------------- what the reward cost


def frontiers(study: Study, arms: Sequence[Arm], measures: Sequence[Measure]) -> list[Drawing]:
    """Reward against each measure, one line an arm along its training, its end marked."""
    drawings = []
    for m in measures:
        lines = _frontier_lines(study, arms, m)
        if not lines:
            continue
        drawings.append(_frontier(study, m, lines, close=False))
        reference = next((line for line in lines if line[0] is study.reference), None)
        if m.kind == "loss" and reference is not None:
            most = max(float(line[2].max()) for line in lines)
            if most > 3 * study.loss_limit:
                drawings.append(_frontier(study, m, lines, close=True))
    return drawings


def _frontier_lines(
    study: Study, arms: Sequence[Arm], m: Measure
) -> list[tuple[Arm, np.ndarray, np.ndarray, np.ndarray]]:
    lines = []
    for arm in arms:
        reward, other = curve(study, arm, "reward"), curve(study, arm, m.name)
        if reward is None or other is None:
            continue
        steps = np.intersect1d(reward.step, other.step)
        if len(steps) > 1:
            lines.append((arm, reward.mean[np.isin(reward.step, steps)], other.mean[np.isin(other.step, steps)], steps))
    return lines


def _frontier(study: Study, m: Measure, lines: Sequence[Any], *, close: bool) -> Drawing:
    look = styles(study)

    def draw(figure: Figure) -> None:
        axes = plots._axes(figure, xlabel="evaluation reward, change since the base")
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: plots._tick(v)))
        _format(axes.yaxis, m)
        axes.axhline(0, color=COLORS["mid"], linewidth=0.8)
        if m.kind == "loss":
            _limit(axes, study.loss_limit)
        ends = []
        for arm, x, y, _ in lines:
            s = look[arm.name]
            axes.plot(
                x, y, color=s.color, linewidth=s.width, linestyle=s.dashes, zorder=s.order, solid_capstyle="round"
            )
            axes.plot(x[-1:], y[-1:], s.marker, color=s.color, markersize=6, zorder=s.order + 1)
            ends.append([x, y, arm.label, s])
        if close:
            (own,) = [x for arm, x, *_ in lines if arm is study.reference]
            right, top = float(own.max()) * 1.35, study.loss_limit * 1.15
            axes.set_xlim(min(0.0, float(own.min())) - 0.03 * right, right)
            axes.set_ylim(-0.02, top)
            ends = [[*_until(end[0], end[1], right, top), *end[2:]] for end in ends]
        _name_ends(axes, [(x[-1], y[-1], label, s) for x, y, label, s in ends])

    title = f"Reward against {m.inside}"
    better = "Further right at the same height is better." if m.kind == "loss" else "Further up and right is better."
    better = "Further down and right is better." if m.kind == "judge" and m.better == "down" else better
    ends = "; ".join(
        f"{arm.label} ends at reward {plots._tick(round(float(x[-1]), 2))} and {write_number(m, float(y[-1]))}"
        for arm, x, y, _ in lines
    )
    if close:
        title += ", close up"
        return _draw(f"frontier_{_stem(m)}_close", title, "The same lines below the limit.",
                     f"Close-up below the limit. {ends}.", draw, height=_height(len(lines)))  # fmt: skip
    return _draw(f"frontier_{_stem(m)}", title, f"{better} Marks are where training ended.",
                 f"{title}, along training. {ends}.", draw, height=_height(len(lines)))  # fmt: skip


def _until(x: np.ndarray, y: np.ndarray, right: float, top: float) -> tuple[np.ndarray, np.ndarray]:
    """A path up to where it leaves the frame, that point included."""
    for i in range(1, len(x)):
        shares = [(limit - v[i - 1]) / (v[i] - v[i - 1]) for v, limit in ((x, right), (y, top)) if v[i] > limit]
        if shares:
            t = max(min(shares), 0.0)
            return np.append(x[:i], x[i - 1] + t * (x[i] - x[i - 1])), np.append(
                y[:i], y[i - 1] + t * (y[i] - y[i - 1])
            )
    return x, y


def small_multiples(study: Study, arms: Sequence[Arm], m: Measure) -> tuple[list[Drawing], Drawing | None]:
    """Every arm's frontier on a panel of its own, the others grey behind it; and all panels as one picture."""
    lines = _frontier_lines(study, arms, m)
    if len(lines) < 2:
        return [], None
    look = styles(study)
    xs, ys = (np.concatenate([line[k] for line in lines]) for k in (1, 2))
    pad_x, pad_y = 0.06 * np.ptp(xs) + 1e-9, 0.08 * np.ptp(ys) + 1e-9

    def panel(axes: Axes, own: Arm) -> None:
        axes.set_xlabel("")
        axes.xaxis.set_major_locator(MaxNLocator(3))
        axes.yaxis.set_major_locator(MaxNLocator(3))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: plots._tick(v)))
        _format(axes.yaxis, m)
        if m.kind == "loss":
            _limit(axes, study.loss_limit, label=False)
        for arm, x, y, _ in lines:
            s = look[arm.name]
            if arm is own:
                axes.plot(x, y, color=s.color, linewidth=2.2, zorder=5)
                axes.plot(x[-1:], y[-1:], "o", color=s.color, markersize=6, zorder=6)
            else:
                axes.plot(x, y, color=COLORS["rule"], linewidth=1.1, zorder=1)
        axes.set_xlim(xs.min() - pad_x, xs.max() + pad_x)
        axes.set_ylim(ys.min() - pad_y, ys.max() + pad_y)

    def alone(own: Arm, figure: Figure) -> None:
        panel(plots._axes(figure), own)

    singles = []
    for arm, x, y, _ in lines:
        end = f"reward {plots._tick(round(float(x[-1]), 2))}, {m.label} {write_number(m, float(y[-1]))}"
        alt = f"{arm.label}: ends at {end}."
        singles.append(
            _draw(f"multiple_{_clean(arm.name)}", arm.label, state(study, arm), alt,
                  functools.partial(alone, arm), width=2.5, height=1.55)
        )  # fmt: skip

    def everything(figure: Figure) -> None:
        columns = min(4, len(lines))
        rows = -(-len(lines) // columns)
        for n, (arm, *_) in enumerate(lines, 1):
            axes = plots._axes(figure, rows, columns, n)
            panel(axes, arm)
            _heading(axes, textwrap.shorten(arm.label, 34, placeholder="…"))

    rows = -(-len(lines) // min(4, len(lines)))
    together = _draw("every_arm", f"Every arm: reward (right) against {m.inside} (up)", "",
                     "Small multiples, one an arm: " + " ".join(d.alt for d in singles),
                     everything, width=9.4, height=0.5 + 1.5 * rows)  # fmt: skip
    return singles, together


# ---------------------------------------------------------------- at the end


def sub_score_bars(study: Study, arms: Sequence[Arm]) -> list[Drawing]:
    """Fig. 4: a block an arm, a bar a sub-score, with intervals; the arms in two charts on the same axis."""
    subs = study.kind("sub")
    found = [(arm, [(m, e) for m in subs if (e := estimate(arm, m.name)) is not None]) for arm in arms]
    found = [(arm, bars) for arm, bars in found if bars]
    if not found:
        return []
    ends = [v for _, bars in found for _, e in bars for v in (e.mean, e.low, e.high, 0.0) if v is not None]
    pad = 0.05 * (max(ends) - min(ends)) or 1.0
    frame = (min(ends) - pad, max(ends) + pad)
    half = -(-len(found) // 2) if len(found) > 3 else len(found)
    blocks = [b for b in (found[:half], found[half:]) if b]
    return [_sub_score_chart(study, block, frame, n) for n, block in enumerate(blocks, 1)]


def _sub_score_chart(study: Study, found: Sequence[Any], frame: tuple[float, float], n: int) -> Drawing:
    look = styles(study)

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        plots._bar_axes(axes)
        y, ticks, names, heads = 0.0, list[float](), list[str](), list[int]()
        for arm, bars in found:
            heads.append(len(ticks))
            ticks.append(y)
            names.append(textwrap.shorten(arm.label, 30, placeholder="…"))
            y += 1
            for m, e in bars:
                color = COLORS["bad"] if e.side(m.better) == "bad" else look[arm.name].color
                axes.barh(y, e.mean, height=0.62, color=color, alpha=0.85, linewidth=0)
                if e.low is not None and e.high is not None:
                    axes.plot([e.low, e.high], [y, y], color=COLORS["ink"], linewidth=1.1)
                    axes.plot([e.low, e.high], [y, y], "|", color=COLORS["ink"], markersize=5)
                ticks.append(y)
                names.append(textwrap.shorten(m.label, 26, placeholder="…"))
                y += 1
            y += 0.35
        axes.set_yticks(ticks, names)
        axes.tick_params(axis="y", colors=COLORS["soft"])
        for k in heads:
            axes.get_yticklabels()[k].set(fontweight="bold", color=COLORS["ink"])
        axes.set_ylim(y - 0.6, -0.7)
        axes.set_xlim(*frame)

    rows = sum(1.35 + len(bars) for _, bars in found)
    alt = " ".join(f"{arm.label}: {'; '.join(f'{m.label} {say(m, e)}' for m, e in bars)}." for arm, bars in found)
    title = ("Change of each sub-score", "The other arms")[n - 1]
    caption = "Whiskers are 95 % intervals; red bars fell." if n == 1 else "On the same axis."
    return _draw(f"sub_scores_{n}", title, caption, alt, draw, height=0.5 + 0.2 * rows)


def by_data_points(study: Study, measures: Sequence[Measure]) -> list[Drawing]:
    """Fig. 5: what is reached against the number of data points, DDRL from the base and after SFT."""
    without, with_sft = study.by_data()
    if len(without) + len(with_sft) < 2:
        return []
    places = sorted({a.data_points or np.inf for a in (*without, *with_sft)})
    names = ["all" if np.isinf(p) else f"{p:g}" for p in places]
    series = (("DDRL from the base", without, COLORS["line"], "o", "-"),
              ("SFT, then DDRL", with_sft, COLORS["s2"], "s", (0, (5, 2))))  # fmt: skip
    drawings = []
    for m in measures:
        points = [
            (label, [(places.index(a.data_points or np.inf), e) for a in arms if (e := estimate(a, m.name))], *rest)
            for label, arms, *rest in series
        ]
        points = [p for p in points if p[1]]
        if not points:
            continue

        def draw(figure: Figure, m: Measure = m, points: Sequence[Any] = points) -> None:
            axes = plots._axes(figure, xlabel="data points")
            axes.set_xticks(range(len(places)), names)
            _format(axes.yaxis, m)
            axes.axhline(0, color=COLORS["mid"], linewidth=0.8)
            if m.kind == "loss":
                _limit(axes, study.loss_limit, at=0.45)
            ends = []
            for k, (label, values, color, marker, dashes) in enumerate(points):
                x = np.array([v[0] for v in values]) + (k - 0.5) * 0.06
                axes.plot(x, [e.mean for _, e in values], color=color, marker=marker, markersize=5, linewidth=1.8,
                          linestyle=dashes)  # fmt: skip
                for at, (_, e) in zip(x, values, strict=True):
                    if e.low is not None:
                        axes.plot([at, at], [e.low, e.high], color=color, linewidth=1.1)
                ends.append((float(x[-1]), values[-1][1].mean, label, Style(color, dashes, marker, 1.5, 3)))
            axes.margins(x=0.12)
            _name_ends(axes, ends)

        text = " ".join(
            f"{label}: " + "; ".join(f"{names[place]} data points {say(m, e)}" for place, e in values) + "."
            for label, values, *_ in points
        )
        drawings.append(
            _draw(f"data_points_{_stem(m)}", m.label, "Change since the base, 95 % intervals.",
                  f"{m.label} against the number of data points. {text}", draw, height=2.5)
        )  # fmt: skip
    return drawings


def seed_spread(study: Study, arms: Sequence[Arm], measures: Sequence[Measure]) -> list[Drawing]:
    """Every seed of every arm as a dot, with the arm's mean."""
    look = styles(study)
    drawings = []
    for m in measures:
        rows = []
        for arm in arms:
            values = [c.mean for r in arm.done if (c := r.changes.get(m.name)) is not None and c.mean is not None]
            if values:
                rows.append((arm, values))
        if not rows:
            continue

        def draw(figure: Figure, m: Measure = m, rows: Sequence[tuple[Arm, list[float]]] = rows) -> None:
            axes = figure.add_subplot()
            plots._bare(axes)
            axes.grid(False)
            axes.grid(axis="x", color=COLORS["rule"], linewidth=0.7)
            axes.axvline(0, color=COLORS["mid"], linewidth=0.9)
            axes.xaxis.set_major_locator(MaxNLocator(5))
            _format(axes.xaxis, m)
            if m.kind == "loss":
                axes.axvline(study.loss_limit, color=COLORS["bad"], linewidth=1, dashes=(4, 3))
            for y, (arm, values) in enumerate(rows):
                s = look[arm.name]
                axes.plot([min(values), max(values)], [y, y], color=s.color, linewidth=1.1, alpha=0.6)
                axes.plot(values, [y] * len(values), "o", color=s.color, markersize=4.6, alpha=0.75, markeredgewidth=0)
                axes.plot([np.mean(values)], [y], "|", color=COLORS["ink"], markersize=9, markeredgewidth=1.4)
            axes.set_yticks(range(len(rows)), [textwrap.shorten(a.label, 30, placeholder="…") for a, _ in rows])
            axes.tick_params(axis="y", colors=COLORS["ink"])
            axes.set_ylim(len(rows) - 0.4, -0.6)

        alt = "; ".join(f"{a.label} {', '.join(write_number(m, v) for v in values)}" for a, values in rows)
        drawings.append(
            _draw(f"seeds_{_stem(m)}", m.label, "A dot a seed, a bar their mean.", f"{m.label} of each seed: {alt}.",
                  draw, height=0.55 + 0.215 * len(rows))
        )  # fmt: skip
    return drawings


# ---------------------------------------------------------------- samples


def samples_picture(rows: Sequence[tuple[str, Samples]], captions: Sequence[str], most_frames: int = 4) -> bytes:
    """PNG: a row an arm, a column a prompt, each clip as a few of its frames side by side."""
    pixels, width, left = 40, 9.4, 0.215
    shape = rows[0][1].video.shape
    cell = width * (1 - left) / len(captions)  # inches of a column
    row = cell * shape[2] / shape[3] / min(most_frames, shape[1]) + 0.1
    with matplotlib.rc_context(plots._RC):
        height = row * len(rows) + 0.36
        figure = Figure(figsize=(width, height))
        FigureCanvasAgg(figure)
        grid = figure.add_gridspec(len(rows), len(captions), left=left, right=0.995, top=1 - 0.34 / height,
                                   bottom=0.04 / height, wspace=0.06, hspace=0.1)  # fmt: skip
        for r, (label, samples) in enumerate(rows):
            for c, caption in enumerate(captions):
                axes = figure.add_subplot(grid[r, c])
                axes.set_axis_off()
                clip = samples.video[samples.captions.index(caption)]
                clip = media.fit(
                    clip[np.linspace(0, len(clip) - 1, min(most_frames, len(clip))).round().astype(int)], pixels
                )
                strip = np.concatenate([np.pad(f, ((0, 0), (1, 1), (0, 0)), constant_values=128) for f in clip], axis=1)
                axes.imshow(np.broadcast_to(strip, (*strip.shape[:2], 3)), interpolation="nearest")
                if not r:
                    axes.set_title("\n".join(textwrap.wrap(caption, 22)[:2]), fontsize=6.5, color=COLORS["soft"], pad=4)
            box = axes.get_position()
            figure.text(0.005, (box.y0 + box.y1) / 2, textwrap.shorten(label, 32, placeholder="…"), fontsize=8,
                        color=COLORS["ink"], va="center")  # fmt: skip
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=150, facecolor="white")
    return buffer.getvalue()


def _stem(measure: Measure) -> str:
    return _clean(measure.name)


def _clean(name: str) -> str:
    """A name fit for a file and for an id in the page."""
    return "".join(c if c.isascii() and c.isalnum() else "_" for c in name)
