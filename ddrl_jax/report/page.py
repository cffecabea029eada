"""The frame that every page is put in: head, title, facts, links to the sections. One file that needs no network."""

from __future__ import annotations

import html
from typing import Any

from ddrl_jax.report.style import CSS

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def escape(value: Any) -> str:
    """Escape for element content and for quoted attributes alike."""
    return html.escape(str(value), quote=True)


def page(*, title: str, eyebrow: str, facts: str, links: str, main: str, source: str, css: str = "") -> str:
    """The whole page. `title` and `source` (what it was written from) are text, the others HTML; `css` adds to CSS."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{escape(title)}</title>
<style>{CSS}{css}</style>
</head>
<body>
<div class="page">
<header>
<p class="eyebrow">{eyebrow}</p>
<h1>{escape(title)}</h1>
{facts}
<nav aria-label="Sections">{links}</nav>
</header>
<main>
{main}
</main>
<footer>Written by ddrl_jax from {escape(source)}. This file needs no network.</footer>
</div>
</body>
</html>
"""
