"""The curves and bars of a run, drawn once with matplotlib's object interface.

Each chart is an SVG for the page, whose colours are the page's CSS variables so that it follows the
reader's light or dark scheme, and a PNG on white for a paper or a README.
"""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from ddrl_jax.report.verdict import Change
from ddrl_jax.report.workdir import Run, column, short_labels

# Light values, used as they are in the PNG; in the SVG each becomes var(--name). All different.
COLORS = {
    "ink": "#1b1d22",
    "soft": "#666c78",
    "rule": "#dcdfe5",
    "line": "#2f62d9",
    "band": "#b9cbf6",
    "bad": "#c0362c",
    "good": "#1c7f56",
    "mid": "#8b909c",
    "s1": "#3567d6",
    "s2": "#e08a2e",
    "s3": "#2a9d8f",
    "s4": "#9a5bc7",
    "s5": "#d1557f",
    "s6": "#7a8b2f",
}
_SERIES = ("s1", "s2", "s3", "s4", "s5", "s6")
_RC: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "svg.fonttype": "none",
    "svg.hashsalt": "ddrl_jax",
    "text.parse_math": False,
    "axes.unicode_minus": True,
    "path.simplify": True,
    "agg.path.chunksize": 0,
}


@dataclasses.dataclass(frozen=True)
class Chart:
    """One chart: file stem, heading, what to look for, inline SVG, PNG bytes."""

    name: str
    title: str
    caption: str
    svg: str
    png: bytes


def curves(run: Run) -> list[Chart]:
    """Every curve the metrics allow, the ones that tell hacking first; [] without metrics."""
    ddrl, evals, pretrain = run.stage("ddrl"), run.stage("eval"), run.stage("pretrain")
    makers = (
        lambda: _reward(ddrl, evals),
        lambda: _heldout(evals, run.loss_limit),
        lambda: _spread(ddrl),
        lambda: _frontier(evals, run.loss_limit),
        lambda: _judges(evals),
        lambda: _sub_scores(ddrl, run.role),
        lambda: _image_statistics(evals, run.image_limit),
        lambda: _kl(ddrl),
        lambda: _ratio(ddrl),
        lambda: _step_gradients(ddrl),
        lambda: _loss(ddrl, "ddrl", "data_loss"),
        lambda: _loss(pretrain, "pretrain", "loss"),
        lambda: _seconds(ddrl),
    )
    return [chart for make in makers if (chart := make()) is not None]


def bars(changes: Sequence[Change], role: Callable[[str], str] = lambda name: "unknown") -> list[Chart]:
    """Change bars with 95 % intervals: reward and sub-scores on one axis, each judge on its own.

    `role` says what training made of a sub-score (`Run.role`); one without a weight is marked.
    """
    scores = [c for c in changes if c.kind in ("reward", "sub") and c.mean is not None]
    judges = [c for c in changes if c.kind in ("judge", "loss") and c.mean is not None]
    charts = []
    if scores:
        charts.append(
            _chart(
                "sub_scores",
                "Change of the reward and its sub-scores",
                "Bars to the right of 0 went up; whiskers are 95 % intervals.",
                lambda figure: _score_bars(figure, scores, role),
                height=0.75 + 0.36 * len(scores),
            )
        )
    if judges:
        charts.append(
            _chart(
                "judges",
                "Change of what the policy never saw",
                "Each on its own axis, turned so that better is to the right.",
                lambda figure: _judge_bars(figure, judges),
                height=0.35 + 0.62 * len(judges),
            )
        )
    return charts


def _chart(
    name: str,
    title: str,
    caption: str,
    draw: Callable[[Figure], Any],
    *,
    height: float = 2.45,
) -> Chart:
    # Settings are matplotlib's only global state here, and are put back on the way out.
    with matplotlib.rc_context(_RC):
        figure = Figure(figsize=(4.7, height), layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure)
        buffer = io.StringIO()
        nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
        svg = _inline(buffer.getvalue(), name, title)
        figure.suptitle(title, x=0.01, ha="left", fontsize=9.5, color=COLORS["ink"])
        picture = io.BytesIO()
        figure.savefig(picture, format="png", dpi=220, facecolor="white")
    return Chart(name, title, caption, svg, picture.getvalue())


def _inline(svg: str, name: str, title: str) -> str:
    """Make a matplotlib SVG fit to stand in the page: no prologue, own ids, colours and font."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"| version="[^"]*"', "", svg)
    svg = re.sub(r' (?:width|height)="[\d.]+pt"', "", svg)
    svg = svg.replace("xlink:href", "href")
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    # Only inside style attributes: a label may well contain "#2f62d9" or "font: 8px x".
    svg = re.sub(r'style="[^"]*"', _restyle, svg)
    label = title.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1).strip()


def _restyle(match: re.Match[str]) -> str:
    style = match[0]
    for name, value in COLORS.items():
        style = style.replace(value, f"var(--{name})")
    return re.sub(r"font: (?:[a-z]+ )*([\d.]+px) [^;\"]*", r"font-size: \1", style)


def _axes(figure: Figure, *args: int, xlabel: str = "update") -> Axes:
    axes = figure.add_subplot(*args) if args else figure.add_subplot()
    _bare(axes)
    axes.set_xlabel(xlabel, color=COLORS["soft"])
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(4))
    return axes


def _bare(axes: Axes) -> None:
    axes.set_facecolor("none")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(COLORS["rule"])
    axes.tick_params(colors=COLORS["soft"], length=0, pad=4)
    axes.grid(axis="y", color=COLORS["rule"], linewidth=0.7)
    axes.set_axisbelow(True)


def _smooth(values: np.ndarray) -> np.ndarray:
    """Centred moving average over a tenth of the run, NaN-aware; the window shrinks at the ends."""
    width = max(1, len(values) // 10) | 1
    known = np.isfinite(values)
    kernel = np.ones(width)
    total = np.convolve(np.where(known, values, 0.0), kernel, "same")
    count = np.convolve(known.astype(float), kernel, "same")
    mean = np.full(len(values), np.nan)
    np.divide(total, count, out=mean, where=(count > 0) & known)
    return mean


def _line(axes: Axes, x: np.ndarray, y: np.ndarray, color: str, label: str | None = None) -> None:
    """The values faintly, their moving average strongly; single points stay visible."""
    if len(x) >= 20:
        axes.plot(x, y, color=COLORS[color], alpha=0.3, linewidth=0.8)
        y = _smooth(y)
    marker = "o" if np.isfinite(y).sum() <= 12 else None
    axes.plot(
        x,
        y,
        color=COLORS[color],
        linewidth=1.7,
        marker=marker,
        markersize=3.2,
        label=label,
        solid_capstyle="round",
    )


def _legend(axes: Axes, columns: int = 3) -> None:
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, frameon=False, fontsize=8,
        labelcolor=COLORS["soft"], handlelength=1.1, columnspacing=1.2, borderaxespad=0.2,
        handletextpad=0.5,
    )  # fmt: skip


def _xy(rows: Sequence[dict[str, Any]], key: str) -> tuple[np.ndarray, np.ndarray] | None:
    x, y = column(rows, "step"), column(rows, key)
    return (x, y) if np.isfinite(y).any() else None


def _reward(rows, evals) -> Chart | None:
    if (data := _xy(rows, "reward")) is None:
        return None
    x, y = data
    std = column(rows, "reward_std")

    def draw(figure: Figure) -> None:
        axes = _axes(figure)
        if np.isfinite(std).any():
            mid, half = (_smooth(y), _smooth(std)) if len(x) >= 20 else (y, std)
            axes.fill_between(
                x, mid - half, mid + half, color=COLORS["band"], alpha=0.5, linewidth=0,
                label="\u00b1 within-group std",
            )  # fmt: skip
        _line(axes, x, y, "line", "training reward")
        if (seen := _xy(evals, "reward")) is not None:
            axes.plot(*seen, "D", color=COLORS["ink"], markersize=4, label="evaluation")
        _legend(axes)

    return _chart(
        "reward",
        "Reward",
        "A slow rise is what training should do; a sudden one is the second signal. The band is the "
        "spread among rollouts of the same prompt.",
        draw,
    )


def relative(values: np.ndarray) -> np.ndarray:
    """Change against the first finite value, as a fraction; all NaN where that is 0 or absent."""
    known = values[np.isfinite(values)]
    if not len(known) or known[0] == 0:
        return np.full(len(values), np.nan)
    return values / known[0] - 1


def _heldout(evals, limit: float) -> Chart | None:
    x, y = column(evals, "step"), relative(column(evals, "heldout_loss"))
    if not np.isfinite(y).any():
        return None

    def draw(figure: Figure) -> None:
        axes = _axes(figure)
        _percent(axes)
        top = max(limit * 1.35, float(np.nanmax(y)) * 1.12)
        bottom = min(-0.03, float(np.nanmin(y)) * 1.2)
        axes.axhspan(limit, top, color=COLORS["bad"], alpha=0.08, linewidth=0)
        axes.axhline(limit, color=COLORS["bad"], linewidth=1.1, dashes=(4, 3))
        axes.axhline(0, color=COLORS["mid"], linewidth=0.8)
        axes.annotate(
            f"limit {_tick(100 * limit)} %", (1, limit), (-2, 3), xycoords=axes.get_yaxis_transform(),
            textcoords="offset points", color=COLORS["bad"], fontsize=8, ha="right", va="bottom",
        )  # fmt: skip
        axes.set_ylim(bottom, top)
        _line(axes, x, y, "line")

    return _chart(
        "heldout_loss",
        "Held-out diffusion loss, change since the start",
        "How much worse the model explains real clips it never trained on. Past the limit it is leaving the data.",
        draw,
    )


def _spread(rows) -> Chart | None:
    if (data := _xy(rows, "reward_std")) is None:
        return None

    def draw(figure: Figure) -> None:
        axes = _axes(figure)
        _line(axes, *data, "line")
        axes.set_ylim(bottom=0)

    return _chart(
        "reward_std",
        "Within-group std of the reward",
        "If it falls towards 0, rollouts of a prompt have become alike: the third signal, and a late one.",
        draw,
    )


def _frontier(evals, limit: float) -> Chart | None:
    reward, loss = column(evals, "reward"), relative(column(evals, "heldout_loss"))
    step = column(evals, "step")
    known = np.isfinite(reward) & np.isfinite(loss)
    if known.sum() < 2:
        return None
    reward, loss, step = reward[known], loss[known], step[known]

    def draw(figure: Figure) -> None:
        axes = _axes(figure, xlabel="evaluation reward")
        axes.xaxis.set_major_locator(MaxNLocator(5))
        _percent(axes)
        axes.axhline(limit, color=COLORS["bad"], linewidth=1.1, dashes=(4, 3))
        axes.plot(reward, loss, color=COLORS["line"], linewidth=1.3, marker="o", markersize=4)
        for at in (0, -1):
            axes.annotate(
                f"update {step[at]:.0f}", (reward[at], loss[at]), (0, 7), fontsize=8, ha="center",
                textcoords="offset points", color=COLORS["soft"],
            )  # fmt: skip
        axes.margins(0.16, 0.2)
        axes.set_ylim(top=max(limit * 1.25, axes.get_ylim()[1]))

    return _chart(
        "frontier",
        "What the reward cost: reward against held-out loss",
        "Further right at the same height is better. Compare runs here, at equal reward, not at equal updates.",
        draw,
    )


def _judges(evals) -> Chart | None:
    names = sorted({k for row in evals for k in row if k.startswith("judge")})
    series = [(n, data) for n in names if (data := _xy(evals, n)) is not None]
    series = [(n, d) for n, d in series if np.isfinite(d[1]).sum() > 1][:4]
    if not series:
        return None

    def draw(figure: Figure) -> None:
        for n, (name, data) in enumerate(series, 1):
            axes = _axes(figure, len(series), 1, n)
            if n < len(series):
                axes.set_xlabel("")
                axes.tick_params(labelbottom=False)
            axes.yaxis.set_major_locator(MaxNLocator(2))
            label = name.removeprefix("judge").strip("_/").replace("_", " ")[:32]
            _line(axes, *data, _SERIES[n - 1], label)
            _legend(axes)

    return _chart(
        "judge_curves",
        "Judges during training",
        "Independent of the reward.",
        draw,
        height=max(2.45, 0.6 + 0.75 * len(series)),
    )


def _ratio(rows) -> Chart | None:
    mean, most = _xy(rows, "ratio_mean"), _xy(rows, "ratio_max")
    clip = _xy(rows, "clip_fraction")
    if clip is None and most is None:
        return None

    def draw(figure: Figure) -> None:
        panels = [p for p in ("ratio", "clip") if (most if p == "ratio" else clip) is not None]
        for n, panel in enumerate(panels, 1):
            axes = _axes(figure, len(panels), 1, n)
            if n < len(panels):
                axes.set_xlabel("")
                axes.tick_params(labelbottom=False)
            axes.yaxis.set_major_locator(MaxNLocator(3))
            if panel == "ratio" and most is not None:
                _line(axes, most[0], most[1] - 1, "s2", "largest ratio \u2212 1")
                if mean is not None:
                    _line(axes, mean[0], mean[1] - 1, "s1", "mean ratio \u2212 1")
                axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: _tick(v)))
                if not np.nanmax(np.abs(most[1] - 1)):
                    axes.set_yticks([0.0])
            elif clip is not None:
                _line(axes, *clip, "s3", "clipped fraction")
                axes.set_ylim(-0.02, max(0.05, float(np.nanmax(clip[1])) * 1.15))
            _legend(axes)

    return _chart(
        "ratio",
        "Policy ratio and clipping",
        "Both are 0 when each rollout is used for one update only.",
        draw,
        height=2.8,
    )


def _sub_scores(rows, role: Callable[[str], str]) -> Chart | None:
    """Sub-scores of the rollouts: those with a weight first, the others thin and dashed."""
    names = sorted({k.removeprefix("sub/") for row in rows for k in row if k.startswith("sub/")})
    labels = short_labels(names)
    names.sort(key=lambda name: role(name) not in ("reward", "unknown"))
    series = [(n, data) for n in names if (data := _xy(rows, f"sub/{n}")) is not None][: len(_SERIES)]
    if not series:
        return None
    marks = {"gate": " (gate)", "none": " (no weight)"}

    def draw(figure: Figure) -> None:
        axes = _axes(figure)
        for color, (name, data) in zip(_SERIES, series, strict=False):
            mark = marks.get(role(name), "")
            _line(axes, *data, color, labels[name][:24] + mark)
            if mark:
                axes.lines[-1].set(linestyle=(0, (3, 2)), linewidth=1.1)
        _legend(axes, 2 if any(role(name) in marks for name, _ in series) else 3)

    return _chart(
        "sub_score_curves",
        "Sub-scores",
        "One rising while another falls is a reason to look closer. Dashed ones have no weight in the reward.",
        draw,
    )


def eval_sub_scores(evals: Sequence[dict[str, Any]]) -> list[str]:
    """The sub-scores that evaluations have, overall scores left out."""
    names = {k for row in evals for k in row if "/" in k and not k.startswith("image/")}
    return sorted(n for n in names if not n.endswith("/overall"))


def image_names(evals: Sequence[dict[str, Any]]) -> list[str]:
    """The columns of image statistics that have a number."""
    names = sorted({k for row in evals for k in row if k.startswith("image/")})
    return [n for n in names if _xy(evals, n) is not None]


def _image_statistics(evals, limit: float) -> Chart | None:
    x = column(evals, "step")
    series = [(n.removeprefix("image/"), relative(column(evals, n))) for n in image_names(evals)]
    series = [(n, y) for n, y in series if np.isfinite(y).any()][: len(_SERIES)]
    if not series:
        return None

    def draw(figure: Figure) -> None:
        axes = _axes(figure)
        _percent(axes)
        reach = max(1.25 * limit, *(1.12 * float(np.nanmax(np.abs(y))) for _, y in series))
        for sign in (1, -1):
            axes.axhspan(sign * limit, sign * reach, color=COLORS["bad"], alpha=0.08, linewidth=0)
            axes.axhline(sign * limit, color=COLORS["bad"], linewidth=1.1, dashes=(4, 3))
        axes.annotate(
            f"limit {_tick(100 * limit)} %", (0, limit), (2, 3), xycoords=axes.get_yaxis_transform(),
            textcoords="offset points", color=COLORS["bad"], fontsize=8, ha="left", va="bottom",
        )  # fmt: skip
        axes.axhline(0, color=COLORS["mid"], linewidth=0.8)
        axes.set_ylim(-reach, reach)
        for color, (name, y) in zip(_SERIES, series, strict=False):
            _line(axes, x, y, color, name.replace("_", " ")[:24])
        _legend(axes)

    return _chart(
        "image_statistics",
        "What the pictures look like, change since the start",
        "Means over an evaluation\u2019s clips. Past the limit, either way, they are other pictures: look at them.",
        draw,
    )


def _kl(rows) -> Chart | None:
    data = _xy(rows, "kl_loss")
    if data is None or not np.nanmax(np.abs(data[1])):  # no reference is held
        return None

    def draw(figure: Figure) -> None:
        axes = _axes(figure)
        _line(axes, *data, "line")
        axes.set_ylim(bottom=min(0.0, float(np.nanmin(data[1]))))

    return _chart(
        "kl",
        "KL to the reference",
        "On the policy\u2019s own rollouts. Flat here and rising in the held-out loss is what reverse KL cannot see.",
        draw,
    )


def _step_gradients(rows) -> Chart | None:
    """One line a denoising step, early ones (much noise) pale, late ones strong."""
    names = sorted({k for row in rows for k in row if k.startswith("grad_norm/step")})
    series = [(n.removeprefix("grad_norm/step").lstrip("0") or "0", _xy(rows, n)) for n in names]
    known = [(n, d) for n, d in series if d is not None]
    if not known:
        return None

    def draw(figure: Figure) -> None:
        axes = _axes(figure)
        values = np.concatenate([y[np.isfinite(y)] for _, (_, y) in known])
        if values.min() > 0 and values.max() / values.min() > 20:
            _log(axes)
        else:
            axes.set_ylim(0, 1.08 * float(values.max()) or 1.0)
        named = {0, len(known) // 2, len(known) - 1}
        for i, (name, (x, y)) in enumerate(known):
            at = np.isfinite(y)  # a step that is trained now and then has gaps
            axes.plot(
                x[at], _smooth(y[at]) if at.sum() >= 20 else y[at], color=COLORS["line"], linewidth=1.3,
                alpha=1 - 0.8 * (len(known) - 1 - i) / len(known),
                marker="o" if at.sum() == 1 else None, markersize=3.2,
                label=f"step {name}" if i in named else None,
            )  # fmt: skip
        _legend(axes)

    return _chart(
        "step_gradients",
        "Gradient norm of each trained step",
        "From the first denoising step (pale) to the last (strong). One that outgrows the others drives the run.",
        draw,
    )


def _loss(rows, stage: str, key: str) -> Chart | None:
    if (data := _xy(rows, key)) is None:
        return None

    def draw(figure: Figure) -> None:
        axes = _axes(figure, xlabel="step" if stage == "pretrain" else "update")
        positive = data[1][np.isfinite(data[1])]
        if stage == "pretrain" and positive.min() > 0 and positive.max() / positive.min() > 20:
            _log(axes)
        _line(axes, *data, "line")

    title, caption = {
        "ddrl": ("Data loss during training", "The diffusion loss that holds the policy to data."),
        "pretrain": ("Pre-training loss", "The diffusion loss of the base the policy starts from."),
    }[stage]
    return _chart(f"{stage}_loss", title, caption, draw)


def _seconds(rows) -> Chart | None:
    if (data := _xy(rows, "seconds")) is None:
        return None
    x, total = data
    keys = sorted({k for row in rows for k in row if k.startswith("seconds_")})
    parts = {
        k.removeprefix("seconds_").replace("_", " ")[:20]: np.nan_to_num(column(rows, k))
        for k in keys[: len(_SERIES) - 1]
    }
    rest = np.nan_to_num(total) - sum(parts.values(), np.zeros(len(x)))
    parts["update and the rest" if parts else "all"] = np.maximum(rest, 0)

    def draw(figure: Figure) -> None:
        axes = _axes(figure)
        if len(x) == 1:
            bottom = 0.0
            for color, (label, y) in zip(_SERIES, parts.items(), strict=False):
                axes.bar(x, y, bottom=bottom, color=COLORS[color], label=label, width=0.4)
                bottom += y[0]
        else:
            colors = [COLORS[c] for c in _SERIES[: len(parts)]]
            axes.stackplot(x, *parts.values(), colors=colors, labels=parts.keys(), alpha=0.85)
        # The first update compiles and would flatten everything after it.
        ceiling = np.nanquantile(total, 0.95) * 1.25 if len(x) >= 20 else np.nanmax(total) * 1.1
        axes.set_ylim(0, max(float(ceiling), 1e-9))
        axes.set_ylabel("seconds", color=COLORS["soft"])
        _legend(axes)

    return _chart(
        "seconds",
        "Seconds an update, by stage",
        "The first update compiles and may leave the frame.",
        draw,
    )


def _log(axes: Axes) -> None:
    """A logarithmic scale; its own labels are formulas, which are not read as such here."""
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}".replace("-", "\u2212")))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())


def _percent(axes: Axes) -> None:
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{_tick(100 * v)} %"))


def _tick(value: float) -> str:
    """A tick's number, signed, with no more digits than it needs."""
    return "0" if abs(value) < 1e-12 else f"{value:+.4g}".replace("-", "\u2212")


def _side_color(change: Change) -> str:
    return COLORS[{"good": "good", "bad": "bad"}.get(change.side, "mid")]


def _bar(axes: Axes, y: float, change: Change) -> None:
    axes.barh(y, change.mean or 0.0, height=0.5, color=_side_color(change), alpha=0.85, linewidth=0)
    if change.low is not None and change.high is not None:
        axes.plot([change.low, change.high], [y, y], color=COLORS["ink"], linewidth=1.2)
        axes.plot([change.low, change.high], [y, y], "|", color=COLORS["ink"], markersize=6)


def _bar_axes(axes: Axes) -> None:
    _bare(axes)
    axes.grid(False)
    axes.grid(axis="x", color=COLORS["rule"], linewidth=0.7)
    axes.axvline(0, color=COLORS["ink"], linewidth=0.9)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: _tick(v)))


def _score_bars(figure: Figure, changes: Sequence[Change], role: Callable[[str], str]) -> None:
    marks = {"gate": " (gate)", "none": " (no weight)"}
    labels = [c.label[:32] + (marks.get(role(c.name), "") if c.kind == "sub" else "") for c in changes]
    axes = figure.add_subplot()
    _bar_axes(axes)
    for n, change in enumerate(changes):
        _bar(axes, n, change)
    axes.set_yticks(range(len(changes)), labels)
    axes.tick_params(axis="y", colors=COLORS["ink"])
    axes.invert_yaxis()


def _judge_bars(figure: Figure, changes: Sequence[Change]) -> None:
    for n, change in enumerate(changes, 1):
        axes = figure.add_subplot(len(changes), 1, n)
        _bar_axes(axes)
        _bar(axes, 0, change)
        axes.set_yticks([0], [change.label[:32]])
        axes.tick_params(axis="y", colors=COLORS["ink"])
        axes.set_ylim(-0.6, 0.6)
        ends = [v for v in (change.low, change.high, change.mean) if v is not None]
        reach = max(map(abs, ends)) * 1.15 or 1.0
        if change.kind == "loss":
            axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{_tick(100 * v)} %"))
        axes.set_xlim((reach, -reach) if change.better == "down" else (-reach, reach))
