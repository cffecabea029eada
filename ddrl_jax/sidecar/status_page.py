"""The status page as HTML: one self-contained document, light and dark, for a phone or a desk, that renews itself.

Takes plain accounts and gives text; knows nothing of HTTP, of who may see what, or of where the numbers come from.
"""

from __future__ import annotations

import hashlib
import html
import math
import time
from collections.abc import Iterable
from typing import Any

import numpy as np

SAMPLES = "/samples/"
_WINDOW_S = 60.0  # of the throughput
_BARS, _BAR_S = 60, 10.0  # of the chart: ten minutes
_MEANING = {
    401: "no token, or a wrong one",
    404: "unknown path, or a request that has expired",
    413: "larger than the limit",
    422: "malformed, or its scoring failed",
    429: "the queue was full",
    500: "the server's own fault: see its log",
    503: "stopping, takes nothing new",
}


def latency(timings: Iterable[tuple[float, float, int]], now: float) -> dict[str, float]:
    """Of finished requests (when, seconds it took, samples): p50 and p95 in seconds (NaN: none), samples a second."""
    rows = list(timings)
    seconds = [took for _, took, _ in rows]
    p50, p95 = np.percentile(seconds, (50, 95)) if seconds else (math.nan, math.nan)
    fresh = [(when, n) for when, _, n in rows if now - when <= _WINDOW_S]
    # A full deque may reach back less than the window.
    span = _WINDOW_S if len(fresh) < len(rows) or not fresh else max(now - fresh[0][0], 1.0)
    return {"p50": float(p50), "p95": float(p95), "samples_per_second": sum(n for _, n in fresh) / span}


def key(thumbnail_HWC: np.ndarray) -> str:
    """The name of a thumbnail in `/samples/NAME`: a hash of what it shows."""
    content = np.ascontiguousarray(thumbnail_HWC).tobytes() + repr(thumbnail_HWC.shape).encode()
    return hashlib.blake2b(content, digest_size=12).hexdigest()


_STYLE = """
:root { color-scheme: light dark; --paper: #fbfbfa; --card: #fff; --ink: #1b1d22; --soft: #5f6570; --rule: #e3e5e9;
  --line: #2f62d9; --good: #1c7f56; --warn: #8a5700; --bad: #b82e25; --well: #f1f2f4; }
@media (prefers-color-scheme: dark) { :root { --paper: #121316; --card: #191b1f; --ink: #eceef1; --soft: #9ba1ad;
  --rule: #2c2f36; --line: #7ea4ff; --good: #4cc38f; --warn: #e5b04c; --bad: #ff7b6e; --well: #22252a; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI",
  Roboto, "Helvetica Neue", sans-serif; font-variant-numeric: tabular-nums; }
main { max-width: 1080px; margin: 0 auto; padding: 32px 20px 64px; }
header { display: flex; flex-wrap: wrap; align-items: baseline; gap: 4px 14px; }
h1 { font-size: 26px; line-height: 1.2; letter-spacing: -.015em; font-weight: 650; margin: 0; }
h2 { font-size: 18px; line-height: 1.3; font-weight: 650; margin: 36px 0 10px; }
p { margin: 0; } .soft { color: var(--soft); } .where { overflow-wrap: anywhere; }
.state { font-weight: 650; white-space: nowrap; }
.state::before { content: ""; display: inline-block; width: .62em; height: .62em;
  border-radius: 50%; background: currentColor; margin-right: .45em; }
.good { color: var(--good); } .warn { color: var(--warn); } .bad { color: var(--bad); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin-top: 22px; }
.tile, .wide { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 14px 16px; }
.tile b { display: block; font-size: 26px; line-height: 1.25; font-weight: 650; letter-spacing: -.01em; }
.tile small { font-size: 15px; font-weight: 500; letter-spacing: 0; }
.tile span { color: var(--soft); font-size: 13px; }
.wide { margin-top: 12px; overflow-x: auto; }
svg { display: block; width: 100%; height: 72px; } rect { fill: var(--line); } .empty { fill: var(--well); }
.ends { display: flex; justify-content: space-between; color: var(--soft); font-size: 13px; margin-top: 4px; }
table { border-collapse: collapse; width: 100%; } th, td { padding: 7px 12px 7px 0; text-align: left; }
th { color: var(--soft); font-size: 13px; font-weight: 500; white-space: nowrap; }
tr + tr td { border-top: 1px solid var(--rule); }
.n { text-align: right; white-space: nowrap; } td:last-child, th:last-child { padding-right: 0; }
td.last { padding-left: 24px; width: 40%; overflow-wrap: anywhere; } th.last { padding-left: 24px; }
.samples { display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: 12px; }
figure { margin: 0; background: var(--card); border: 1px solid var(--rule); border-radius: 10px; overflow: hidden; }
figure img { display: block; width: 100%; aspect-ratio: 1; object-fit: contain; background: var(--well); }
.tiny { image-rendering: pixelated; }
figcaption { padding: 8px 10px 10px; font-size: 13px; line-height: 1.4; overflow-wrap: anywhere; }
dl { margin: 6px 0 0; display: grid; grid-template-columns: minmax(0, 1fr) auto; gap: 0 8px; color: var(--soft); }
dd { margin: 0; text-align: right; color: var(--ink); }
form { display: flex; flex-wrap: wrap; gap: 8px; margin-top: 10px; }
input { flex: 1 1 200px; max-width: 340px; min-width: 0; }
input, button { font: inherit; padding: 7px 12px; border-radius: 8px;
  border: 1px solid var(--rule); background: var(--card); color: var(--ink); } button { cursor: pointer; }
button[value=in] { background: var(--line); border-color: var(--line); color: var(--paper); }
:focus-visible { outline: 2px solid var(--line); outline-offset: 2px; }
.spread { display: flex; justify-content: space-between; align-items: end; } .spread form { margin: 0 0 10px; }
#lost { display: none; margin-top: 14px; padding: 10px 14px; border-radius: 8px; border: 1px solid var(--bad);
  color: var(--bad); }
#lost.on { display: block; }
@media (max-width: 520px) { main { padding: 20px 14px 48px; } .tile b { font-size: 22px; }
  .tiles { grid-template-columns: 1fr 1fr; }
  .cards thead { display: none; } .cards tr { display: grid; grid-template-columns: 1fr 1fr 1fr; padding: 8px 0; }
  .cards tr + tr { border-top: 1px solid var(--rule); } .cards tr + tr td { border: 0; }
  .cards td { padding: 2px 8px 2px 0; text-align: left; width: auto; grid-column: auto; }
  .cards td:nth-child(n + 3)::before { content: attr(data-name); display: block; color: var(--soft); font-size: 13px; }
  .cards td:nth-child(1) { grid-column: span 2; font-weight: 650; } .cards td.last { grid-column: 1 / -1; }
  .samples { grid-template-columns: 1fr 1fr; } .tile { padding: 11px 12px; } }
"""

_SCRIPT = """
let since = null, shown = "";
setInterval(async () => {
  if (document.hidden) return;
  const lost = document.getElementById("lost");
  try {
    const answer = await fetch("/?part=live", {credentials: "same-origin", signal: AbortSignal.timeout(8000)});
    if (!answer.ok) throw new Error(answer.status);
    const next = await answer.text();
    if (next !== shown) document.getElementById("live").innerHTML = shown = next;
    since = null; lost.className = "";
  } catch (error) {
    since = since || new Date();
    lost.textContent = "No answer since " + since.toLocaleTimeString() + ". What is below is older.";
    lost.className = "on";
  }
}, 2000);
"""


def _seconds(value: float) -> str:
    if not math.isfinite(value):
        return "–"
    if value < 1:
        return f"{value * 1000:.2g} ms" if value < 0.01 else f"{value * 1000:.0f} ms"
    return f"{value:.1f} s" if value < 120 else f"{value / 60:.0f} min"


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def _number(value: float | None) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:.3g}"


def _tile(name: str, value: str, unit: str, below: str) -> str:
    return (
        f'<div class="tile"><span>{name}</span><b>{html.escape(value)} <small>{html.escape(unit)}</small></b>'
        f"<span>{html.escape(below)}</span></div>"
    )


def _chart(timings: list[tuple[float, float, int]], now: float) -> str:
    """Samples a second, in bars of ten seconds over ten minutes."""
    bars = [0] * _BARS
    for when, _, samples in timings:
        back = int((now - when) / _BAR_S)
        if 0 <= back < _BARS:
            bars[-1 - back] += samples
    most = max(bars)
    drawn = "".join(
        f'<rect x="{i * 10}" y="{72 - h:.1f}" width="8" height="{h:.1f}" class="{"full" if n else "empty"}"/>'
        for i, n in enumerate(bars)
        for h in [max(2.0, 72 * n / most) if n else 2.0]
    )
    return (
        f'<div class="wide"><span class="soft">Samples a second, at most {most / _BAR_S:.3g}</span>'
        f'<svg viewBox="0 0 {_BARS * 10} 72" preserveAspectRatio="none" role="img" '
        f'aria-label="samples a second over ten minutes">{drawn}</svg>'
        '<div class="ends"><span>10 minutes ago</span><span>now</span></div></div>'
    )


def _table(heads: list[str], rows: list[list[str]], numeric: set[int], kind: str = "") -> str:
    """Cells are HTML already. Of the kind "cards", a phone shows each row as a card."""
    last = len(heads) - 1

    def attribute(i: int) -> str:
        return ' class="n"' if i in numeric else ' class="last"' if i == last else ""

    def cells(row: list[str]) -> str:
        return "".join(f'<td data-name="{heads[i]}"{attribute(i)}>{cell}</td>' for i, cell in enumerate(row))

    head = "".join(f"<th{attribute(i)}>{text}</th>" for i, text in enumerate(heads))
    body = "".join(f"<tr>{cells(row)}</tr>" for row in rows)
    return f'<div class="wide {kind}"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _scorers(states: dict[str, dict[str, Any]]) -> str:
    tones = {"ready": "good", "scoring": "good", "restarting": "warn"}
    rows = []
    for name, one in states.items():
        rows.append([
            html.escape(name),
            f'<span class="state {tones.get(one["state"], "bad")}">{html.escape(one["state"])}</span>',
            f"{one['scored']:,}",
            f"{one['failed']:,}",
            _seconds(one["seconds"] / one["scored"]) if one["scored"] else "–",
            html.escape(one["last_error"]) or '<span class="soft">none</span>',
        ])  # fmt: skip
    return _table(["scorer", "state", "samples", "failed", "a sample", "last error"], rows, {2, 3, 4}, "cards")


def _errors(refused: dict[int, int]) -> str:
    if not refused:
        return '<p class="soft">No request was refused since the start.</p>'
    rows = [[str(s), f"{n:,}", html.escape(_MEANING.get(s, "refused"))] for s, n in sorted(refused.items())]
    return _table(["status", "answers", "meaning"], rows, {1})


def _samples(recent: list[tuple[str, str, np.ndarray, dict[str, float | None]]]) -> str:
    if not recent:
        return '<p class="soft">Nothing has been scored yet.</p>'
    figures = []
    for _, prompt, thumbnail, scores in reversed(recent):
        tiny = ' class="tiny"' if max(thumbnail.shape[:2]) < 100 else ""
        numbers = "".join(
            f"<dt>{html.escape(k).replace('/', '/<wbr>')}</dt><dd>{_number(v)}</dd>" for k, v in scores.items()
        )
        caption = html.escape(prompt if len(prompt) <= 160 else prompt[:159] + "…")
        figures.append(
            f'<figure><img src="{SAMPLES}{key(thumbnail)}" alt=""{tiny} loading="lazy">'
            f"<figcaption>{caption}<dl>{numbers}</dl></figcaption></figure>"
        )
    return f'<div class="samples">{"".join(figures)}</div>'


def live(
    account: dict[str, Any],
    timings: list[tuple[float, float, int]],
    refused: dict[int, int],
    recent: list[tuple[str, str, np.ndarray, dict[str, float | None]]] | None,
    where: str,
    can_log_out: bool,
) -> str:
    """The part that renews itself.

    Args:
      account: `status.health`'s, perhaps with replica_id.
      timings: of the last requests, as the worker's.
      refused: how many answers of each status from 400.
      recent: the last samples, as the worker's; None: not for these eyes.
      where: the machine.
      can_log_out: whether there is something to log out of.
    """
    now = time.monotonic()
    waiting, speed = account["queue"], latency(timings, now)
    tone = {"ok": "good", "degraded": "warn", "stopping": "warn"}[account["status"]]
    lines = [f"oldest {_seconds(waiting['oldest_seconds'])}"] if waiting["pending"] else []
    lines += [_size(waiting["bytes"])] + ([f"{waiting['replicas']} replicas"] if waiting["replicas"] > 1 else [])
    lines = lines if waiting["reachable"] else ["the queue does not answer"]
    tiles = (
        _tile("Waiting", f"{waiting['pending']:,}", "requests", ", ".join(lines))
        + _tile("Throughput", f"{speed['samples_per_second']:.3g}", "samples/s", "last minute, or since the first")
        + _tile("Latency", _seconds(speed["p50"]), "p50", f"p95 {_seconds(speed['p95'])}")
        + _tile("Requests scored", f"{waiting['scored']:,}", "", f"{waiting['failed']:,} failed")
    )
    out = '<form method="post" action="/logout"><button>Log out</button></form>' if can_log_out else ""
    seen = f'<div class="spread"><h2>Last samples</h2>{out}</div>{_samples(recent)}' if recent is not None else ""
    place = html.escape(" ".join(filter(None, [where, account.get("replica_id", "")])))
    return (
        f'<header><h1>Reward sidecar</h1><span class="state {tone}">{account["status"]}</span>'
        f'<span class="soft where">{place}</span></header><div class="tiles">{tiles}</div>{_chart(timings, now)}'
        f"<h2>Scorers</h2>{_scorers(account['scorer_states'])}<h2>Refused requests</h2>{_errors(refused)}{seen}"
    )


def page(live_part: str, nonce: str, login: str) -> str:
    """The document around `live`.

    Args:
      nonce: of the style and the script, as in the policy.
      login: "" none needed, "ask", or "failed".
    """
    wrong = '<p class="bad" role="alert">That was not the token.</p>' if login == "failed" else ""
    form = (
        "<h2>Last samples</h2><p>Prompts and pictures are shown to whoever has the server's token.</p>"
        f'{wrong}<form method="post" action="/login"><input name="username" autocomplete="username" '
        'value="sidecar" hidden><input type="password" name="token" aria-label="Token" '
        'placeholder="Token" autocomplete="current-password" required><button value="in">Log in</button></form>'
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Reward sidecar</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        '<noscript><meta http-equiv="refresh" content="5"></noscript>'
        f'<style nonce="{nonce}">{_STYLE}</style></head><body><main><p id="lost" role="status"></p>'
        f'<div id="live">{live_part}</div>{form if login else ""}</main>'
        f'<script nonce="{nonce}">{_SCRIPT}</script></body></html>'
    )
