"""The look of pages and reports: of figures, tables and widgets, and the HTML around them, light and dark.

Reports and the pages of a server have the same template; it, style sheets and scripts are files in static/.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from math import ceil
from pathlib import Path
from typing import Any, TypeAlias

from bokeh import models, plotting

# The types of Bokeh's models describe their properties, not the values that these take.
bk: Any = models
Model: TypeAlias = Any
"""A model of Bokeh: a figure, widget, layout or data source."""

# Okabe and Ito's colours without black, which a dark page would hide.
COLOURS = (
    "#0a84c6", "#e06a1b", "#00a37a", "#cc79a7", "#e6a000", "#56b4e9", "#9d7bd8", "#8a9a2b",
    "#c0504d", "#5f9ea0", "#b8860b", "#708090",
)  # fmt: skip
INK = "#7b858f"
"""The colour of text and axes in figures: readable on a white page and on a dark one."""
MEAN_COLOUR = "#e0342b"
LEGEND_COLUMNS, LEGEND_ROW_HEIGHT = 3, 26
"""Entries beside each other in a legend, and the height of a row of them in pixels."""


def static(name: str) -> str:
    """Return the text of a style sheet, a script or a template."""
    return (Path(__file__).parent / "static" / name).read_text("utf-8")


WIDGET_STYLE, TABLE_STYLE = static("widget.css"), static("table.css")
TEMPLATE = static("page.html")
"""Replaces blocks of Bokeh's own template."""


def line_figure(title: str, height: int, x_label: str = "", **options: Any) -> Model:
    """Return an empty figure without a background, so that the page's own shows through."""
    options = {"tools": "pan,wheel_zoom,box_zoom,reset", **options}
    plot: Model = plotting.figure(
        title=title, height=height, sizing_mode="stretch_width", toolbar_location="right",
        active_scroll=None, min_border_left=45, background_fill_alpha=0, border_fill_alpha=0,
        outline_line_color=None, **options,
    )  # fmt: skip
    plot.toolbar.logo = None
    plot.toolbar.autohide = True
    plot.title.text_color, plot.title.text_font_size = INK, "13px"
    for axis in plot.axis:
        axis.update(
            axis_line_color=INK, major_tick_line_color=INK, minor_tick_line_color=None,
            axis_line_alpha=0.5, major_tick_line_alpha=0.5, **text_style("axis_label"),
            **text_style("major_label"),
        )  # fmt: skip
    if options.get("y_axis_type") == "log":
        # Bokeh's own ticks of one or two decades are so many that their labels overlap.
        ticker = bk.FixedTicker(ticks=[10.0**exponent for exponent in range(-12, 7)])
        plot.yaxis.ticker = plot.ygrid.ticker = ticker
    if x_label:
        plot.xaxis.axis_label = x_label
    plot.grid.grid_line_color, plot.grid.grid_line_alpha = INK, 0.2
    return plot


def named_lines(source: Model, name: str, title: str, height: int, **options: Any) -> Model:
    """Return a figure of a source's lines (columns xs, ys, colour), with a legend of the column `name`."""
    plot = line_figure(title, full_height(height, len(source.data[name])), **options)
    lines = plot.multi_line(
        "xs", "ys", source=source, line_color="colour", line_dash="dash", line_width=2.2
    )
    plot.add_tools(bk.HoverTool(renderers=[lines], tooltips=[(name, f"@{name}")]))
    plot.add_layout(line_legend([bk.LegendItem(label={"field": name}, renderers=[lines])]), "below")
    return plot


def line_columns(
    name: str, lines: Mapping[str, tuple[Sequence[float], Sequence[float]]]
) -> dict[str, list[Any]]:
    """Return the columns of the source of `named_lines`."""
    return {
        "xs": [list(x) for x, _ in lines.values()], "ys": [list(y) for _, y in lines.values()],
        name: list(lines), "colour": [COLOURS[i % len(COLOURS)] for i in range(len(lines))],
        "dash": ["solid" if i < len(COLOURS) else "dashed" for i in range(len(lines))],
    }  # fmt: skip


def refill(source: Model, columns: Mapping[str, list[Any]]) -> bool:
    """Replace the columns of a source if they differ, so that nothing is sent to the browser in vain."""
    differs = any(list(source.data[name]) != values for name, values in columns.items())
    if differs:
        source.data = columns
    return differs


def log_range() -> Model:
    """Return a range for a logarithmic axis: Bokeh cannot choose one for no data."""
    return bk.Range1d(start=1e-4, end=1.0)


def text_style(prefix: str) -> dict[str, Any]:
    """Return the properties of text whose names begin with a prefix."""
    style: dict[str, Any] = {
        "text_color": INK,
        "text_font_size": "11px",
        "text_font_style": "normal",
    }
    return {f"{prefix}_{name}": value for name, value in style.items()}


def full_height(height: int, entries: int) -> int:
    """Return the height of a figure with a legend of so many entries. height: with one row of them."""
    return height + LEGEND_ROW_HEIGHT * max(ceil(entries / LEGEND_COLUMNS) - 1, 0)


def line_legend(items: list[Model]) -> Model:
    """Return a legend for the space below a figure."""
    return bk.Legend(
        items=items, orientation="horizontal", ncols=LEGEND_COLUMNS, background_fill_alpha=0,
        border_line_color=None, label_text_color=INK, label_text_font_size="11px", glyph_width=18,
        spacing=6, padding=2, margin=0,
    )  # fmt: skip


PLAIN_CELL = '<span title="<%- value %>"><%- value %></span>'
STATE_CELL = """<span style="color: <%= ["left", "dead", "lost", "refused", "offline", "banned"]
    .includes(value) ? "var(--bad)" : "inherit" %>"><%- value %></span>"""


def column(field: str, title: str, width: int, form: Any = None, **options: Any) -> Model:
    """Return a column of a table. form: a format of numbers, or the HTML of a cell."""
    if form is not None:
        numeric = not form.startswith("<")
        options["formatter"] = (
            bk.NumberFormatter(format=form, nan_format="")
            if numeric
            else bk.HTMLTemplateFormatter(template=form)
        )
    return bk.TableColumn(field=field, title=title, width=width, **options)


def least_width(columns: Sequence[Model]) -> str:
    """Return the style of a table that is scrolled, and not squeezed, where its columns do not fit."""
    return f":host {{ --least: {sum(shown.width for shown in columns if shown.visible)}px; }}"


# --- the HTML around figures ----------------------------------------------------------------------

NO_DATA = "no-data"
"""The class of a figure that has nothing to show; its box is hidden."""


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
        "subtitle": subtitle,
        "sections": sections,
        "style": static("page.css"),
        "page_script": static("theme.js"),
    }


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
