"""A plan as tables and a verdict. Knows what `plan.make` returns, and nothing of how it comes about."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


def show(result: dict[str, Any], console: Console) -> None:
    """Prints a plan."""
    card, mesh = result["card"], result["mesh"]
    shape = " x ".join(f"{axis} {size}" for axis, size in mesh.items())
    console.print(
        f"\n{result['devices']} x {card['name']}: {shape}; {result['rollouts']} rollouts, "
        f"{result['rollouts_per_data_group']:g} a data group"
    )
    tables = [_held(result), _functions(result)]
    if any(f["collectives"] for f in result["functions"]):
        tables.append(_collectives(result))
    for table in tables:
        console.print()
        console.print(table)
    console.print()
    for f in result["functions"]:
        # That a compiler wanted less memory is of no interest where there is enough.
        warnings = [w for w in f["warnings"] if not (result["fits"] and "reduce memory" in w)]
        if warnings:
            more = f" (and {len(warnings) - 1} more)" if len(warnings) > 1 else ""
            console.print(f"warning: {f['name']}: {warnings[0]}{more}", markup=False, soft_wrap=True)
        if f["uncounted"]:
            console.print(
                f"warning: {f['name']}: not counted: {', '.join(f['uncounted'])}", markup=False, soft_wrap=True
            )
        if f["unknown_loops"]:
            console.print(f"warning: {f['name']}: {f['unknown_loops']} loops of unknown length count as one turn")
    evaluations = result["evaluations_per_rollout"]
    counted, expected = evaluations["counted"], evaluations["expected"]
    console.print(f"network evaluations a rollout: {counted:g} in the programs, {expected:g} by the method")
    bound = result["iteration"]["roofline_seconds"]
    if bound is not None:
        console.print(f"an iteration takes at least {_seconds(bound)} s, by the card's data sheet")
    console.print(f"compiled in {result['iteration']['compile_seconds']:.0f} s, planned in {result['seconds']:.0f} s")
    console.print(verdict(result), markup=False, soft_wrap=True)  # one line, wherever it goes


def verdict(result: dict[str, Any]) -> str:
    """One line: fits, or does not and what to try."""
    card = result["card"]
    room = size(card["memory"]) + (f" less {size(card['reserve'])} for the runtime" if card["reserve"] else "")
    if result["fits"]:
        return f"fits: at most {size(result['peak'])} a device, of {room}"
    why = result["too_large"] or f"{size(result['peak'])} a device, of {room}"
    return f"does not fit: {why}; try, until it fits: {'; then '.join(result['try'])}"


def size(count: float) -> str:
    """Bytes in words."""
    unit, name = _unit(count)
    return f"{count / unit:.2f} {name}"


def _rounded(count: float) -> str:
    """Four digits, and none after the point where there are as many before it."""
    return f"{count:,.0f}" if abs(count) >= 1000 else f"{count:.4g}"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f}" if seconds >= 1000 else f"{seconds:.3g}"


def _unit(largest: float) -> tuple[float, str]:
    return next((unit, name) for unit, name in _UNITS if largest >= unit or unit == 1)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, min_width=len(title))
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=True)
    return table


def _held(result: dict[str, Any]) -> Table:
    unit, name = _unit(result["peak"])
    table = _table(f"kept on a device, {name}", "", "")
    for kind, count in result["held"].items():
        table.add_row(kind, f"{count / unit:.2f}")
    return table


def _functions(result: dict[str, Any]) -> Table:
    unit, name = _unit(result["peak"])
    columns = ("arguments", "temporaries", "outputs", "resident", "peak", "model TFLOP", "executed", "ratio", "floor")
    table = _table(f"functions, one device, memory in {name}", "", *columns, "s >=", "compile s")

    def flops(entry: dict[str, Any]) -> list[str]:
        ratio = entry["executed_over_model"]
        counts = [_rounded(entry[kind] / 1e12) for kind in ("model_flops", "executed_flops")]
        return [*counts, "" if ratio is None else f"{ratio:.3f}"]

    for f in result["functions"]:
        b, bound = f["bytes"], f["seconds"]["roofline"]
        memory = (
            b["arguments"],
            b["temporaries"],
            b["outputs"] - b["aliased"],
            b["resident"] + b["workspace"],
            b["peak"],
        )
        table.add_row(
            f["name"] + ("" if f["runs"] else " (part of it)") + (f" x {f['runs']}" if f["runs"] > 1 else ""),
            *(f"{count / unit:.2f}" for count in memory),
            *flops(f),
            "" if f["floor"] is None else f"{f['floor']:.3f}",
            "" if bound is None or not f["runs"] else _seconds(bound),
            f"{f['compile_seconds']:.1f}",
        )
    iteration, bound = result["iteration"], result["iteration"]["roofline_seconds"]
    seconds = "" if bound is None else _seconds(bound)
    peak = f"{result['peak'] / unit:.2f}"
    table.add_row(
        "an iteration", "", "", "", "", peak, *flops(iteration), "", seconds, f"{iteration['compile_seconds']:.1f}"
    )
    return table


def _collectives(result: dict[str, Any]) -> Table:
    rows = [(f["name"], row) for f in result["functions"] if f["runs"] for row in f["collectives"]]
    unit, name = _unit(max((row["bytes"] for _, row in rows), default=0))
    table = _table(f"collectives of a run, one device, {name}", "", "over", "devices", "times", name, "s >=")
    for function, row in rows:
        if row["bytes"] >= 1e-3 * sum(other["bytes"] for f, other in rows if f == function):  # all are in plan.json
            table.add_row(
                f"{function}: {row['kind']}",
                " x ".join(row["axes"]),
                str(row["group"]),
                f"{row['count']:,}",
                f"{row['bytes'] / unit:.2f}",
                _seconds(row["seconds"]),
            )
    return table
