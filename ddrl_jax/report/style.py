"""The page's style sheet. Colour names are those of `plots.COLORS`, so that charts follow it."""

from __future__ import annotations

CSS = """
:root {
  color-scheme: light dark;
  --paper: #fbfbfa; --card: #ffffff; --ink: #1b1d22; --soft: #666c78; --rule: #e3e5e9;
  --line: #2f62d9; --band: #b9cbf6; --good: #1c7f56; --warn: #9a6200; --bad: #c0362c;
  --mid: #8b909c; --s1: #3567d6; --s2: #e08a2e; --s3: #2a9d8f; --s4: #9a5bc7; --s5: #d1557f;
  --s6: #7a8b2f; --well: #f1f2f4;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #121316; --card: #191b1f; --ink: #eceef1; --soft: #9ba1ad; --rule: #2c2f36;
    --line: #7ea4ff; --band: #31487f; --good: #4cc38f; --warn: #e5b04c; --bad: #ff7b6e;
    --mid: #7d838f; --s1: #7ea4ff; --s2: #f0a95c; --s3: #58c9bb; --s4: #c190ea; --s5: #ee86a8;
    --s6: #b3c567; --well: #22252a;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; scroll-behavior: smooth; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
  font-variant-numeric: tabular-nums; overflow-wrap: break-word;
}
.page { max-width: 1120px; margin: 0 auto; padding: 44px 32px 72px; }
h1 { font-size: 30px; line-height: 1.2; letter-spacing: -.015em; font-weight: 650; margin: 0; }
h2 { font-size: 21px; line-height: 1.3; letter-spacing: -.01em; font-weight: 650; margin: 0 0 4px; }
h3 { font-size: 15px; line-height: 1.35; font-weight: 600; margin: 0; }
p { margin: 0; }
section { margin-top: 60px; }
.lede { color: var(--soft); max-width: 68ch; margin-bottom: 22px; }
.eyebrow { color: var(--soft); font-size: 13px; letter-spacing: .02em; margin-bottom: 6px; }
.facts { display: flex; flex-wrap: wrap; gap: 4px 22px; margin: 12px 0 0; color: var(--soft);
  font-size: 14px; }
.facts div { min-width: 0; overflow-wrap: anywhere; }
.facts dt { display: inline; } .facts dd { display: inline; margin: 0 0 0 5px; color: var(--ink); }
nav { display: flex; flex-wrap: wrap; gap: 2px 18px; margin-top: 18px; font-size: 14px; }
a { color: var(--line); text-decoration: none; } a:hover { text-decoration: underline; }
:focus-visible { outline: 2px solid var(--line); outline-offset: 2px; border-radius: 3px; }

.verdict { --tone: var(--mid); margin-top: 30px; }
.clean { --tone: var(--good); } .suspicious { --tone: var(--warn); } .hacked { --tone: var(--bad); }
.call { background: var(--card); border: 1px solid var(--rule); border-top: 4px solid var(--tone);
  border-radius: 4px 4px 10px 10px; padding: 26px 30px 28px; display: grid; gap: 4px 44px;
  grid-template-columns: minmax(0, 5fr) minmax(0, 6fr); }
.label { color: var(--tone); font-size: 46px; line-height: 1.1; font-weight: 700;
  letter-spacing: -.03em; display: flex; align-items: center; gap: 14px; }
.label svg { width: 38px; height: 38px; flex: none; }
.headline { font-size: 19px; line-height: 1.4; margin-top: 12px; text-wrap: pretty; }
.reasons { margin: 4px 0 0; padding: 0; list-style: none; font-size: 15px; line-height: 1.5;
  text-wrap: pretty; }
.reasons li { padding: 8px 0; border-top: 1px solid var(--rule); }
.reasons li:first-child { border-top: 0; padding-top: 4px; }
.glance { display: grid; grid-template-columns: 1fr 1fr; gap: 10px; margin-top: 22px; max-width: 420px; }
.call .key { margin-top: 10px; }
.signals { display: grid; gap: 14px; grid-template-columns: repeat(6, minmax(0, 1fr));
  margin-top: 14px; }
.signal { grid-column: span 2; } .signal:nth-child(n+4) { grid-column: span 3; }
.signal { background: var(--card); border: 1px solid var(--rule); border-radius: 10px;
  padding: 16px 18px; display: flex; flex-direction: column; gap: 8px; }
.signal header { display: flex; justify-content: space-between; gap: 12px; align-items: baseline; }
.state { font-size: 13px; font-weight: 600; white-space: nowrap; color: var(--soft); }
.state.quiet { color: var(--good); } .state.alarm { color: var(--bad); }
.signal .reading { color: var(--ink); font-size: 24px; font-weight: 600; letter-spacing: -.01em; line-height: 1.2; }
.reading small { font-size: 13px; font-weight: 400; color: var(--soft); letter-spacing: 0;
  margin-left: 6px; }
.signal p { font-size: 14px; line-height: 1.45; color: var(--soft); }
.spark { display: block; width: 100%; height: 54px; overflow: visible; margin-top: auto; }
.spark path { fill: none; stroke: var(--line); stroke-width: 1.75; stroke-linejoin: round;
  stroke-linecap: round; vector-effect: non-scaling-stroke; }
.spark path.limit { stroke: var(--bad); stroke-width: 1; stroke-dasharray: 4 3; }
.caveat { color: var(--soft); font-size: 14px; max-width: 78ch; margin-top: 16px; }
.notes { margin-top: 16px; padding: 12px 18px; border-radius: 8px; background: var(--well);
  font-size: 14px; } .notes ul { margin: 4px 0 0; padding-left: 18px; }

.grid { display: grid; gap: 22px 18px; grid-template-columns: repeat(auto-fill, minmax(196px, 1fr)); }
.grid.solo { grid-template-columns: repeat(auto-fill, minmax(132px, 1fr)); }
.pair { margin: 0; }
.clips { display: grid; grid-template-columns: 1fr 1fr; gap: 3px; border-radius: 6px;
  overflow: hidden; background: var(--rule); }
.clips.single { grid-template-columns: 1fr; }
.clip { aspect-ratio: var(--a); background-image: var(--i); background-size: calc(var(--n) * 100%) 100%;
  background-position: 0 0; background-color: #000; }
.pixels { image-rendering: pixelated; }
.moving { animation: play var(--d) steps(var(--n), jump-none) infinite; }
@keyframes play { from { background-position: 0 0; } to { background-position: 100% 0; } }
body:has(#pause:checked) .moving { animation-play-state: paused; }
.pair figcaption { font-size: 13.5px; line-height: 1.4; color: var(--soft); margin-top: 7px; }
.pair figcaption span { display: block; }
.bar { display: flex; flex-wrap: wrap; gap: 8px 24px; align-items: center; margin-bottom: 16px;
  font-size: 14px; color: var(--soft); }
.key { display: inline-grid; grid-template-columns: 1fr 1fr; gap: 3px; text-align: center; }
.key span { background: var(--well); padding: 3px 14px; color: var(--ink); font-size: 13px; }
.key span:first-child { border-radius: 5px 0 0 5px; } .key span:last-child { border-radius: 0 5px 5px 0; }
.bar label { display: inline-flex; gap: 7px; align-items: center; cursor: pointer; }
.bar input { accent-color: var(--line); width: 16px; height: 16px; margin: 0; }
.more { margin-top: 22px; }
summary { cursor: pointer; color: var(--line); font-size: 15px; padding: 4px 0; }
details[open] > summary { margin-bottom: 16px; }

table { width: 100%; border-collapse: collapse; font-size: 15px; }
th { text-align: left; font-weight: 500; color: var(--soft); font-size: 13px; padding: 0 14px 8px 0;
  vertical-align: bottom; }
td { padding: 11px 14px 11px 0; border-top: 1px solid var(--rule); vertical-align: middle; }
.changes td:first-child { font-weight: 550; min-width: 7.5em; max-width: 20em; }
.num { text-align: right; white-space: nowrap; } th.num { text-align: right; }
.changes .forest { width: 31%; padding-right: 18px; padding-left: 8px; }
.forest svg { display: block; width: 100%; height: 22px; overflow: visible; }
.forest .axis { display: flex; justify-content: space-between; }
.interval { color: var(--soft); }
.changes .group td { max-width: none; color: var(--soft); font-size: 13px; font-weight: 400;
  padding-top: 26px; padding-bottom: 8px; border-top: 0; }
.group + tr td { border-top-color: var(--mid); }
.side { white-space: nowrap; font-size: 14px; color: var(--soft); padding-right: 0; }
.side.good { color: var(--good); } .side.bad { color: var(--bad); font-weight: 600; }
.unit { font-weight: 400; color: var(--soft); font-size: 13px; display: block; }

.charts { display: grid; gap: 40px 44px; grid-template-columns: repeat(2, minmax(0, 1fr)); }
.chart { margin: 0; } .chart svg { display: block; width: 100%; height: auto; margin: 12px 0 0 -2px; }
.chart figcaption { font-size: 14px; line-height: 1.45; color: var(--soft); max-width: 60ch; margin-top: 2px; }

.config { columns: 2; column-gap: 44px; font-size: 14px; }
.config div { break-inside: avoid; margin-bottom: 20px; }
.config h3 { margin-bottom: 4px; }
.config dl { margin: 0; display: grid; grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); }
.config dt { color: var(--soft); } .config dd { margin: 0; }
.config dt, .config dd, .pair figcaption, pre { overflow-wrap: anywhere; }
.config dt, .config dd { padding: 3px 14px 3px 0; border-top: 1px solid var(--rule); }
pre, code { font: 13.5px/1.6 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
pre { margin: 0; padding: 16px 18px; background: var(--well); border-radius: 8px; white-space: pre-wrap;
  user-select: all; }
.glossary { display: grid; grid-template-columns: minmax(0, 12em) minmax(0, 1fr); margin: 16px 0 0; }
.glossary dt { font-weight: 550; } .glossary dd { margin: 0; color: var(--soft); max-width: 70ch; }
.glossary dt, .glossary dd { padding: 9px 18px 9px 0; border-top: 1px solid var(--rule); font-size: 15px; }
.empty { color: var(--soft); padding: 18px 20px; border: 1px dashed var(--rule); border-radius: 10px; }
footer { margin-top: 64px; color: var(--soft); font-size: 13px; }

@media screen and (max-width: 820px) {
  .call { grid-template-columns: minmax(0, 1fr); gap: 18px; padding: 22px 20px; }
  .signals { grid-template-columns: minmax(0, 1fr); }
  .signal, .signal:nth-child(n+4) { grid-column: auto; }
  .charts { grid-template-columns: minmax(0, 1fr); gap: 36px; }
}
@media screen and (max-width: 640px) {
  .page { padding: 26px 16px 48px; } section { margin-top: 46px; }
  h1 { font-size: 25px; } .label { font-size: 38px; } .label svg { width: 32px; height: 32px; }
  .headline { font-size: 18px; }
  .grid { grid-template-columns: 1fr 1fr; gap: 18px 12px; }
  .config { columns: 1; }
  .glossary { grid-template-columns: 1fr; } .glossary dd { border-top: 0; padding-top: 0; }
  .glossary dt { padding-bottom: 0; }
  .changes thead { display: none; }
  .changes tr { display: grid; grid-template-columns: 1fr auto; gap: 0 12px; padding: 10px 0;
    border-top: 1px solid var(--rule); }
  .changes td { border: 0; padding: 1px 0; text-align: left; }
  .changes .side { text-align: right; }
  .changes .group { border-top: 0; padding: 22px 0 0; } .changes .group td { padding: 0 0 4px; }
  .changes td[data-h]::before { content: attr(data-h) " "; color: var(--soft); }
  .changes .num { font-size: 14px; }
  .changes .num.delta { grid-column: 1 / -1; }
  .changes .forest { width: auto; grid-column: 1 / -1; padding: 4px 0 2px; }
  td:nth-child(1) { grid-area: 1 / 1; } td.side { grid-area: 1 / 2; }
}
@media (prefers-reduced-motion: reduce) { .moving { animation: none; } html { scroll-behavior: auto; } }
@media print {
  :root { color-scheme: light; --paper: #fff; --card: #fff; --ink: #000; --soft: #555; --rule: #ddd;
    --line: #2f62d9; --band: #b9cbf6; --good: #1c7f56; --warn: #9a6200; --bad: #c0362c; --mid: #8b909c;
    --s1: #3567d6; --s2: #e08a2e; --s3: #2a9d8f; --s4: #9a5bc7; --s5: #d1557f; --s6: #7a8b2f;
    --well: #f4f4f4; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  body, .lede, table { font-size: 12px; } .page { max-width: none; padding: 0; }
  nav, .bar label, .more { display: none; } .charts { gap: 24px; } .label { font-size: 36px; }
  .reasons, .signal p, .chart figcaption, .headline { font-size: 12px; } .headline { font-size: 15px; }
  section { margin-top: 30px; }
  .call, .signal, .pair, .chart, .notes, tr { break-inside: avoid; } h2 { break-after: avoid; }
  .grid { grid-template-columns: repeat(5, 1fr); } .moving { animation: none; }
  details::details-content { content-visibility: visible; height: auto; display: block; }
}
"""
