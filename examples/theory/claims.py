"""What every theory script does at its ends: flags, the figure's style, and claims that make the script fail."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

# Mid-tones that read on white and on black, apart for the colour-blind (blue, orange, teal, purple), never alone: each
# line also has its own dash or its name beside it.
INK, SOFT = "#7b8190", "#8b909c55"
BLUE, ORANGE, TEAL, PURPLE = "#3f7fe0", "#e08a2e", "#22a08f", "#a463cf"

_STYLE = {
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "figure.constrained_layout.use": True,
    "font.size": 10,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "legend.labelcolor": INK,
    "lines.linewidth": 1.9,
    "savefig.transparent": True,
    "svg.fonttype": "none",
    "svg.hashsalt": "ddrl_jax",
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


def arguments(doc: str) -> argparse.Namespace:
    """--out, the folder of the figure: docs/images of this checkout unless given."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(__file__).parents[2] / "docs/images"
    parser.add_argument("--out", type=Path, default=default, help="folder for the figure (default: docs/images)")
    return parser.parse_args()


def new_figure(columns: int, rows: int = 1, *, width: float = 9.6, height: float = 3.4):
    """(figure, axes) in the pages' style."""
    plt.rcParams.update(_STYLE)
    return plt.subplots(rows, columns, figsize=(width, height))


def save(figure, out: Path, name: str) -> None:
    """Writes out/name as SVG, the same bytes for the same numbers."""
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / name, metadata={"Date": None})
    print(f"figure: {out / name}")


class Claims:
    """Collects what is claimed; `finish` ends the process, with 1 if one claim does not hold."""

    def __init__(self) -> None:
        self._failed = 0

    def check(self, holds: bool, words: str) -> None:
        """Prints the claim and whether it holds; a NaN compares false and so fails."""
        self._failed += not holds
        print(f"{'holds ' if holds else 'FAILED'}  {words}", flush=True)

    def finish(self) -> None:
        if self._failed:
            print(f"{self._failed} claim(s) failed")
        sys.exit(1 if self._failed else 0)
