"""A study's page as a list of blocks, written once as HTML (one file, no script, no request) and once as Markdown.

Knows how things look, and nothing of what a study is.
"""

from __future__ import annotations

import base64
import dataclasses

from ddrl_jax.report.page import escape, page
from ddrl_jax.report.plots import Chart
from ddrl_jax.report.study_plots import Drawing

STYLE = """
.finding { --tone: var(--line); margin-top: 30px; }
.finding .headline { font-size: 25px; line-height: 1.3; font-weight: 650; letter-spacing: -.012em; margin-top: 0; }
.finding .call { align-items: start; }
.states { display: grid; gap: 14px; margin: 22px 0 0; }
.states dt { font-size: 13px; font-weight: 600; } .states dd { margin: 2px 0 0; font-size: 15px; line-height: 1.45; }
.tone-good { color: var(--good); } .tone-bad { color: var(--bad); } .tone-warn { color: var(--warn); }
.tone-soft { color: var(--soft); }
.claims { display: grid; gap: 14px; margin-top: 18px; }
.claims.two { grid-template-columns: repeat(2, minmax(0, 1fr)); }
.claim { --tone: var(--mid); background: var(--card); border: 1px solid var(--rule); border-left: 4px solid var(--tone);
  border-radius: 4px 10px 10px 4px; padding: 16px 20px 18px; display: flex; flex-direction: column; gap: 8px; }
.claim.good { --tone: var(--good); } .claim.bad { --tone: var(--bad); } .claim.warn { --tone: var(--warn); }
.claim header { display: flex; justify-content: space-between; gap: 4px 16px; align-items: baseline; flex-wrap: wrap; }
.claim .badge { color: var(--tone); font-size: 14px; font-weight: 650; white-space: nowrap; }
.claim.open .badge { color: var(--soft); }
.claim .source { color: var(--soft); font-size: 13px; }
.claim h3 { font-size: 16px; text-wrap: pretty; }
.claim ul { margin: 0; padding: 0; list-style: none; font-size: 14.5px; line-height: 1.5; display: grid; gap: 4px; }
.claim .rule { color: var(--soft); font-size: 13.5px; line-height: 1.45; }
.disagree { background: var(--well); border-radius: 12px; padding: 26px 28px 30px; margin-top: 34px; }
.lines { list-style: none; margin: 18px 0 0; padding: 0; font-size: 15px; }
.lines li { display: grid; grid-template-columns: 8em minmax(0, 1fr); gap: 2px 16px; padding: 7px 0;
  border-top: 1px solid var(--rule); }
.lines span:first-child { font-weight: 600; font-size: 14px; }
.narrow { max-width: 760px; }
.scroll { overflow-x: auto; margin-top: 18px; -webkit-overflow-scrolling: touch; }
.scroll:focus-visible { outline-offset: -2px; }
.data { font-size: 13.5px; line-height: 1.4; border-collapse: separate; border-spacing: 0; }
.data th { padding: 0 10px 8px 0; line-height: 1.3; } .data td { padding: 8px 10px 8px 0; vertical-align: top; }
.data th:first-child, .data td:first-child { position: sticky; left: 0; background: var(--paper); z-index: 1;
  min-width: 9.5em; max-width: 14em; text-align: left; padding-right: 14px; overflow-wrap: break-word; }
.data td:first-child { font-weight: 550; }
.data td:first-child small { font-weight: 400; }
.data small { display: block; color: var(--soft); font-size: 11.5px; }
.data .num { white-space: nowrap; } .data th.num { white-space: normal; }
.data .words { white-space: normal; min-width: 9em; }
.data .group td { color: var(--soft); font-size: 13px; font-weight: 400; padding-top: 22px; padding-bottom: 6px;
  border-top: 0; }
.data .first td { background: color-mix(in srgb, var(--band) 24%, var(--paper)); }
.data .first td:first-child { box-shadow: inset 3px 0 var(--line); padding-left: 10px; }
.table-note { color: var(--soft); font-size: 13.5px; max-width: 84ch; margin-top: 10px; }
h3.table-title { margin-top: 34px; }
.multiples { display: grid; gap: 26px 24px; grid-template-columns: repeat(auto-fill, minmax(216px, 1fr));
  margin-top: 20px; }
.multiples .chart h3 { font-size: 14px; } .multiples .chart figcaption { font-size: 13px; }
.multiples .chart svg { margin-top: 6px; }
section .charts { margin-top: 26px; }
.strips { display: grid; gap: 6px 8px; align-items: center; margin-top: 22px;
  grid-template-columns: minmax(0, 11em) repeat(var(--columns), minmax(0, 1fr)); }
.strips .name { font-size: 14px; line-height: 1.3; font-weight: 550; padding-right: 8px; }
.strips .name small { display: block; font-weight: 400; font-size: 12.5px; }
.strips .caption { font-size: 12px; line-height: 1.3; color: var(--soft); align-self: end; }
.strips .clip { border-radius: 4px; }
.prose { max-width: 74ch; margin-top: 14px; }
.prose + .prose { margin-top: 8px; }
@media screen and (max-width: 820px) { .claims.two { grid-template-columns: minmax(0, 1fr); } }
@media screen and (max-width: 640px) {
  .finding .headline { font-size: 20px; } .disagree { padding: 20px 16px 22px; margin-left: -8px; margin-right: -8px; }
  .claim { padding: 14px 16px; } .lines li { grid-template-columns: minmax(0, 1fr); }
  .data { font-size: 13px; } .data th:first-child, .data td:first-child { min-width: 8em; max-width: 9.5em; }
  .data td:nth-child(1) { grid-area: auto; }
  .multiples { grid-template-columns: 1fr 1fr; gap: 20px 12px; }
  .strips { grid-template-columns: repeat(var(--columns), minmax(0, 1fr)); gap: 4px; }
  .strips .name { grid-column: 1 / -1; margin-top: 10px; } .strips .caption { display: none; }
  .strips .corner { display: none; }
}
@media print { .scroll { overflow: visible; } .data { font-size: 9px; } .claim { break-inside: avoid; } }
"""


@dataclasses.dataclass(frozen=True)
class Cell:
    """A table's cell: text, a smaller line below, and a tone: "", good, bad, warn or soft."""

    text: str
    note: str = ""
    tone: str = ""


@dataclasses.dataclass(frozen=True)
class Row:
    """Cells, or with `heading` a line across the table; `first` marks the row to look at."""

    cells: tuple[Cell, ...] = ()
    heading: str = ""
    first: bool = False


@dataclasses.dataclass(frozen=True)
class Table:
    """`columns` are (head, its smaller line); `words` are the columns that hold text rather than numbers."""

    columns: tuple[tuple[str, str], ...]
    rows: tuple[Row, ...]
    title: str = ""
    note: str = ""
    words: frozenset[int] = frozenset({0})
    narrow: bool = False


@dataclasses.dataclass(frozen=True)
class Text:
    """A paragraph; `lede` stands under a heading."""

    text: str
    lede: bool = False


@dataclasses.dataclass(frozen=True)
class Missing:
    """What a section cannot show, and why."""

    text: str


@dataclasses.dataclass(frozen=True)
class Charts:
    drawings: tuple[Drawing, ...]


@dataclasses.dataclass(frozen=True)
class Multiples:
    """Small panels on the page, under a summary to open; one picture of them all in Markdown."""

    drawings: tuple[Drawing, ...]
    together: Drawing
    summary: str


@dataclasses.dataclass(frozen=True)
class Card:
    """A claim: badge and tone (good, bad, warn, open), its source, the statement, what was measured, the rule."""

    badge: str
    tone: str
    source: str
    statement: str
    measured: tuple[str, ...]
    rule: str


@dataclasses.dataclass(frozen=True)
class Cards:
    cards: tuple[Card, ...]
    two: bool = False


@dataclasses.dataclass(frozen=True)
class Lines:
    """A list of (word, tone, sentence)."""

    items: tuple[tuple[str, str, str], ...]


@dataclasses.dataclass(frozen=True)
class Strips:
    """Rows of clips: (label, small line, HTML of each clip); `picture` is the same as a PNG for Markdown."""

    captions: tuple[str, ...]
    rows: tuple[tuple[str, str, tuple[str, ...]], ...]
    picture: bytes
    alt: str


@dataclasses.dataclass(frozen=True)
class Code:
    text: str


@dataclasses.dataclass(frozen=True)
class Terms:
    items: tuple[tuple[str, str], ...]


Block = Table | Text | Missing | Charts | Multiples | Cards | Lines | Strips | Code | Terms


@dataclasses.dataclass(frozen=True)
class Section:
    """`link` is the title as the list of sections has it."""

    name: str
    link: str
    title: str
    blocks: tuple[Block, ...]
    prominent: bool = False


@dataclasses.dataclass(frozen=True)
class Document:
    """Title, facts under it, the finding (a sentence, its details, arms by state with a tone), notes, sections."""

    title: str
    facts: tuple[tuple[str, str], ...]
    finding: str
    details: tuple[str, ...]
    states: tuple[tuple[str, str, str], ...]
    notes: tuple[str, ...]
    sections: tuple[Section, ...]


def drawings(document: Document) -> dict[str, bytes]:
    """The pictures that the Markdown page links to: stem -> PNG."""
    found: dict[str, bytes] = {}
    for section in document.sections:
        for block in section.blocks:
            if isinstance(block, Charts):
                found |= {d.name: d.png for d in block.drawings}
            elif isinstance(block, Multiples):
                found[block.together.name] = block.together.png
            elif isinstance(block, Strips):
                found["samples"] = block.picture
    return found


# ---------------------------------------------------------------- HTML


def to_html(document: Document) -> str:
    links = "".join(f'<a href="#{s.name}">{escape(s.link)}</a>' for s in document.sections)
    facts = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in document.facts)
    prominent = "".join(_section(s) for s in document.sections if s.prominent)
    body = "".join(_section(s) for s in document.sections if not s.prominent)
    return page(
        title=document.title,
        eyebrow="ddrl_jax study",
        facts=f'<dl class="facts">{facts}</dl>',
        links=links,
        main=f"{_finding(document)}\n{prominent}\n{body}",
        source="study.json",
        css=STYLE,
    )


def _finding(document: Document) -> str:
    states = "".join(
        f'<div><dt class="tone-{tone}">{escape(name)}</dt><dd>{escape(arms)}</dd></div>'
        for name, arms, tone in document.states
    )
    details = "".join(f"<li>{escape(d)}</li>" for d in document.details)
    notes = ""
    if document.notes:
        items = "".join(f"<li>{escape(n)}</li>" for n in document.notes)
        notes = f'<aside class="notes"><h3>What is missing</h3><ul>{items}</ul></aside>'
    return f"""<div class="finding" id="finding"><div class="call">
<div><p class="headline">{escape(document.finding)}</p>
<dl class="states">{states}</dl></div><ul class="reasons">{details}</ul></div>{notes}</div>"""


def _section(section: Section) -> str:
    inner = "".join(_block(block, section) for block in section.blocks)
    kind = ' class="disagree"' if section.prominent else ""
    return f'<section id="{section.name}"{kind}><h2>{escape(section.title)}</h2>{inner}</section>'


def _block(block: Block, section: Section) -> str:
    if isinstance(block, Text):
        return f'<p class="{"lede" if block.lede else "prose"}">{escape(block.text)}</p>'
    if isinstance(block, Missing):
        return f'<p class="empty">{escape(block.text)}</p>'
    if isinstance(block, Table):
        return _table(block, section)
    if isinstance(block, Charts):
        return f'<div class="charts">{"".join(map(_figure, block.drawings))}</div>'
    if isinstance(block, Multiples):
        panels = "".join(map(_figure, block.drawings))
        return (
            f'<details class="more"><summary>{escape(block.summary)}</summary>'
            f'<div class="multiples">{panels}</div></details>'
        )
    if isinstance(block, Cards):
        two = " two" if block.two else ""
        return f'<div class="claims{two}">{"".join(map(_card, block.cards))}</div>'
    if isinstance(block, Lines):
        items = "".join(
            f'<li><span class="tone-{tone}">{escape(word)}</span><span>{escape(sentence)}</span></li>'
            for word, tone, sentence in block.items
        )
        return f'<ul class="lines">{items}</ul>'
    if isinstance(block, Strips):
        return _strips(block)
    if isinstance(block, Code):
        return f"<pre>{escape(block.text)}</pre>"
    items = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in block.items)
    return f'<dl class="glossary">{items}</dl>'


def _figure(chart: Chart) -> str:
    caption = f"<figcaption>{escape(chart.caption)}</figcaption>" if chart.caption else ""
    return f'<figure class="chart"><h3>{escape(chart.title)}</h3>{caption}{chart.svg}</figure>'


def _card(card: Card) -> str:
    measured = "".join(f"<li>{escape(m)}</li>" for m in card.measured)
    measured = f"<ul>{measured}</ul>" if measured else ""
    return f"""<article class="claim {card.tone}"><header><span class="badge">{escape(card.badge)}</span>
<span class="source">{escape(card.source)}</span></header><h3>{escape(card.statement)}</h3>{measured}
<p class="rule">Rule: {escape(card.rule)}</p></article>"""


def _table(table: Table, section: Section) -> str:
    def classes(n: int) -> str:
        return "words" if n in table.words else "num"

    head = "".join(
        f'<th scope="col" class="{classes(n)}">{escape(name)}{f"<small>{escape(note)}</small>" if note else ""}</th>'
        for n, (name, note) in enumerate(table.columns)
    )
    rows = []
    for row in table.rows:
        if row.heading:
            rows.append(f'<tr class="group"><td colspan="{len(table.columns)}">{escape(row.heading)}</td></tr>')
            continue
        cells = []
        for n, cell in enumerate(row.cells):
            tone = f' class="tone-{cell.tone}"' if cell.tone else ""
            note = f"<small>{escape(cell.note)}</small>" if cell.note else ""
            # A row that failed says so across what it could not fill.
            span = len(table.columns) - len(row.cells) + 1 if n == len(row.cells) - 1 else 1
            wide = f' colspan="{span}"' if span > 1 else ""
            kind = "words" if span > 1 else classes(n)
            cells.append(f'<td class="{kind}"{wide}><span{tone}>{escape(cell.text)}</span>{note}</td>')
        first = ' class="first"' if row.first else ""
        rows.append(f"<tr{first}>{''.join(cells)}</tr>")
    title = f'<h3 class="table-title">{escape(table.title)}</h3>' if table.title else ""
    note = f'<p class="table-note">{escape(table.note)}</p>' if table.note else ""
    label = escape(table.title or section.title)
    narrow = " narrow" if table.narrow else ""
    return (
        f'{title}<div class="scroll{narrow}" tabindex="0" role="region" aria-label="{label}"><table class="data">'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>{note}"
    )


def _strips(block: Strips) -> str:
    heads = "".join(f'<div class="caption">{escape(c)}</div>' for c in block.captions)
    rows = "".join(
        f'<div class="name">{escape(label)}<small class="tone-soft">{escape(small)}</small></div>{"".join(clips)}'
        for label, small, clips in block.rows
    )
    return (
        '<div class="bar"><label><input type="checkbox" id="pause"> Pause</label></div>'
        f'<div class="strips" style="--columns:{len(block.captions)}"><div class="corner"></div>{heads}{rows}</div>'
    )


def clip_html(data: bytes, kind: str, frames: int, height: int, width: int, label: str, *, pixels: bool) -> str:
    """One clip as the page's animated strip (`media.strip`)."""
    seconds = min(max(frames / 8, 0.8), 6.0)
    classes = "clip" + (" pixels" if pixels else "") + (" moving" if frames > 1 else "")
    style = (
        f"--n:{frames};--d:{seconds:.2f}s;--a:{width}/{height};"
        f"--i:url(data:{kind};base64,{base64.b64encode(data).decode()})"
    )
    return f'<div class="{classes}" role="img" aria-label="{escape(label)}" style="{style}"></div>'


# ---------------------------------------------------------------- Markdown


def to_markdown(document: Document, figures: str = "figures") -> str:
    """The same page for a repository; `figures` is the folder of the pictures, relative to the page."""
    lines = [f"# {_plain(document.title)}", ""]
    lines += [" · ".join(f"{k} {v}" for k, v in document.facts), "", f"**{_plain(document.finding)}**", ""]
    lines += [f"- {_plain(d)}" for d in document.details]
    lines += ["", *(f"- **{name}**: {_plain(arms)}" for name, arms, _ in document.states)]
    if document.notes:
        lines += ["", "**What is missing**", "", *(f"- {_plain(n)}" for n in document.notes)]
    for section in sorted(document.sections, key=lambda s: not s.prominent):
        lines += ["", f"## {_plain(section.title)}"]
        for block in section.blocks:
            lines += ["", *_markdown(block, figures)]
    return "\n".join(lines) + "\n"


def _markdown(block: Block, figures: str) -> list[str]:
    if isinstance(block, Text | Missing):
        return [_plain(block.text)]
    if isinstance(block, Table):
        return _markdown_table(block)
    if isinstance(block, Charts):
        lines = []
        for d in block.drawings:
            lines += [f"![{_alt(d.alt)}]({figures}/{d.name}.png)", ""]
        return lines[:-1]
    if isinstance(block, Multiples):
        return [f"![{_alt(block.together.alt)}]({figures}/{block.together.name}.png)"]
    if isinstance(block, Cards):
        lines = []
        for card in block.cards:
            lines += [f"- **{card.badge.capitalize()}**: {_plain(card.statement)} ({card.source})"]
            lines += [f"  - {_plain(m)}" for m in card.measured]
            lines += [f"  - *Rule: {_plain(card.rule)}*"]
        return lines
    if isinstance(block, Lines):
        return [f"- {word.capitalize()}: {_plain(sentence)}" for word, _, sentence in block.items]
    if isinstance(block, Strips):
        return [f"![{_alt(block.alt)}]({figures}/samples.png)"]
    if isinstance(block, Code):
        return ["```bash", block.text, "```"]
    return [f"- **{_plain(k)}**: {_plain(v)}" for k, v in block.items]


def _markdown_table(table: Table) -> list[str]:
    lines = [f"**{_plain(table.title)}**", ""] if table.title else []
    lines.append("| " + " | ".join(_cell(f"{a} ({b})" if b else a) for a, b in table.columns) + " |")
    lines.append("|" + "|".join("---" if n in table.words else "---:" for n in range(len(table.columns))) + "|")
    for row in table.rows:
        cells = [f"*{_cell(row.heading)}*"] if row.heading else []
        for n, c in enumerate(row.cells):
            note = f" ({c.note})" if c.note and n in table.words else f" {c.note}"
            cells.append(_cell((c.text + note).strip()))
        if row.first:
            cells[0] = f"**{cells[0]}**"
        cells += [""] * (len(table.columns) - len(cells))
        lines.append("| " + " | ".join(cells) + " |")
    return lines + (["", _plain(table.note)] if table.note else [])


def _cell(text: str) -> str:
    return _plain(text).replace("|", "\\|")


def _alt(text: str) -> str:
    return _plain(text).replace("[", "(").replace("]", ")")


def _plain(text: str) -> str:
    """One line, in which nothing is markup: a label may come from anywhere."""
    text = " ".join(text.split())
    for mark in ("\\", "`", "*", "_", "<"):
        text = text.replace(mark, "\\" + mark)
    return text
