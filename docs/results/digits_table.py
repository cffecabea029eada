"""Prints the tables of digits.md from the runs of launch/digits.sh: python docs/results/digits_table.py RUNS."""

import json
import sys
from pathlib import Path

import numpy as np

ROWS = (
    ("reward", "reward"),
    ("digits/text_alignment", "text alignment"),
    ("digits/visual_quality", "visual quality"),
    ("digits/motion_quality", "motion quality"),
    ("judge_digit", "judge reads the digit"),
    ("judge_direction", "judge reads the motion"),
    ("frechet", "Fréchet distance"),
    ("heldout_loss", "held-out diffusion loss"),
)
RUNS = (
    ("digits_ddrl_0", "DDRL, seed 0"),
    ("digits_ddrl_1", "DDRL, seed 1"),
    ("digits_ddrl_2", "DDRL, seed 2"),
    ("digits_dance_0", "DanceGRPO, seed 0"),
    ("digits_sft_0", "data loss only, seed 0"),
)
PERCENT = {"judge_digit", "judge_direction", "heldout_loss"}


def show(name: str, value: float) -> str:
    return f"{100 * value:+.1f}" if name in PERCENT else f"{value:+.2f}"


def main(folder: Path) -> None:
    summaries = {
        title: json.loads((folder / run / "summary.json").read_text())
        for run, title in RUNS
        if (folder / run / "summary.json").exists()
    }
    changes = {title: {c["name"]: c for c in s["changes"]} for title, s in summaries.items()}
    print("| change, 95 % interval | base | " + " | ".join(summaries) + " |")
    print("|---" * (len(summaries) + 2) + "|")
    for name, label in ROWS:
        unit = " (points)" if name.startswith("judge") else " (%)" if name == "heldout_loss" else ""
        before = next(iter(summaries.values()))["before"][name]
        base = f"{100 * before:.1f} %" if name.startswith("judge") else f"{before:.3g}"
        cells = []
        for title in summaries:
            c = changes[title].get(name)
            cells.append(f"{show(name, c['mean'])} [{show(name, c['low'])}, {show(name, c['high'])}]" if c else "-")
        print(f"| {label}{unit} | {base} | " + " | ".join(cells) + " |")
    print()
    seeds = [c for title, c in changes.items() if title.startswith("DDRL")]
    print("| DDRL over seeds | mean of the changes | smallest | largest |")
    print("|---|---|---|---|")
    for name, label in ROWS:
        values = np.array([c[name]["mean"] for c in seeds])
        cells = (show(name, v) for v in (values.mean(), values.min(), values.max()))
        print(f"| {label} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
