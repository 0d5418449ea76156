"""The HTML around the figures: one template for reports and for pages of a server, light and dark."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

NO_DATA = "no-data"
"""The class of a figure that has nothing to show; its box is hidden."""
STYLE = """
:root { --page: #f4f5f7; --panel: #ffffff; --ink: #1d242b; --dim: #66717c; --line: #dde1e6; --bad: #c62828; }
:root[data-theme="dark"] {
  --page: #14181d; --panel: #1c2128; --ink: #dfe4ea; --dim: #98a2ad; --line: #343c46; --bad: #ff6b5e;
  color-scheme: dark; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 14px/1.45 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 1500px; margin: 0 auto; padding: 12px 16px 40px; }
header { display: flex; flex-wrap: wrap; gap: 4px 16px; align-items: baseline; }
h1 { font-size: 20px; margin: 6px 0; }
h2 { font-size: 17px; margin: 26px 0 8px; }
h3 { font-size: 14px; margin: 12px 0 4px; color: var(--dim); font-weight: 600; }
header button { margin-left: auto; background: var(--panel); color: var(--ink); border: 1px solid var(--line);
  border-radius: 6px; padding: 3px 10px; font: inherit; cursor: pointer; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 430px), 1fr)); gap: 12px;
  margin: 8px 0; }
.box { background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: 8px;
  min-width: 0; overflow-x: auto; }
.box:has(.no-data) { display: none; }
.wide { grid-column: 1 / -1; }
.bare { background: none; border: none; padding: 0 4px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 3px 12px 3px 0; border-bottom: 1px solid var(--line);
  vertical-align: top; }
th { color: var(--dim); font-weight: 600; }
td.number, th.number { text-align: right; }
pre { background: var(--panel); border: 1px solid var(--line); border-radius: 6px; padding: 8px;
  overflow-x: auto; }
.problem { color: var(--bad); margin: 4px 0; }
.note { color: var(--dim); margin: 4px 0; }
img { max-width: 100%; background: #fff; border-radius: 6px; }
details summary { cursor: pointer; color: var(--dim); }
"""

SCRIPT = """
(() => {
  const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)");
  const wanted = new URLSearchParams(location.search).get("theme");
  const set = theme => { root.dataset.theme = theme; };
  set(["dark", "light"].includes(wanted) ? wanted : dark.matches ? "dark" : "light");
  window.switchTheme = () => set(root.dataset.theme == "dark" ? "light" : "dark");
})();
"""

TEMPLATE = """
{% block preamble %}
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<script>{{ page_script }}</script>
{% endblock %}
{% block postamble %}<style>{{ style }}</style>{% endblock %}
{% block contents %}
{% from macros import embed %}
<main>
<header><h1>{{ title | e }}</h1><span class="note">{{ subtitle | e }}</span>
<button onclick="switchTheme()">light / dark</button></header>
{% for section in sections %}
<section>
{% if section.title %}<h2>{{ section.title | e }}</h2>{% endif %}
{{ section.html }}
<div class="grid">
{% for name, style in section.roots.items() %}
<div class="{{ style }}" id="box-{{ name }}">{{ embed(roots[name]) }}</div>
{% endfor %}
</div>
{{ section.after }}
</section>
{% endfor %}
</main>
{% endblock %}
"""
"""Blocks of Bokeh's own template."""

ROOT_STYLES = {
    "headline": "bare wide", "controls": "bare wide", "graph": "box", "curves": "box",
    "disagreement": "box", "sent": "box", "peers": "box wide", "timeline": "box wide", "events": "box wide",
}  # fmt: skip
"""How each figure is placed in the grid."""


@dataclass
class Section:
    """A part of a page: a heading, HTML, and Bokeh models by name with the style of their boxes.

    after: HTML below the models.
    """

    title: str
    html: str = ""
    roots: dict[str, str] = field(default_factory=dict)
    after: str = ""
    models: dict[str, Any] = field(default_factory=dict)

    def place(self, models: Mapping[str, Any], prefix: str = "") -> None:
        """Add figures to the section. prefix: distinguishes the figures of several runs on one page."""
        for name, model in models.items():
            model.name = f"{prefix}{name}"
            self.models[model.name] = model
            self.roots[model.name] = ROOT_STYLES.get(name, "box")


def variables(subtitle: str, sections: Sequence[Section]) -> dict[str, object]:
    """Return the variables of TEMPLATE; Bokeh adds the title."""
    return {
        "subtitle": subtitle, "sections": sections, "style": STYLE, "page_script": SCRIPT,
    }  # fmt: skip


def html_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table as HTML; columns of numbers are right-aligned."""
    body = [[str(value) for value in row] for row in rows]
    numeric = [
        bool(body) and all(_is_number(row[column]) for row in body) for column in range(len(header))
    ]
    kinds = [' class="number"' if number else "" for number in numeric]
    head = "".join(f"<th{kind}>{escape(h)}</th>" for kind, h in zip(kinds, header, strict=True))
    lines = [
        "".join(f"<td{kind}>{escape(v)}</td>" for kind, v in zip(kinds, row, strict=True))
        for row in body
    ]
    rows_html = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table><tr>{head}</tr>{rows_html}</table></div>'


def _is_number(text: str) -> bool:
    try:
        float(text.replace(",", "") or 0)
    except ValueError:
        return False
    return True
