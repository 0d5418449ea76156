"""The lab in a real browser: a graph is picked, a link is cut, the swarm is run, the config is downloaded."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser_kit import Browser, a_browser
from test_page import check_quiet, serving, shows

from gossamer.experiments.cli import main
from gossamer.experiments.page import LAB_POLL_SECONDS, build_lab, serve
from gossamer.experiments.results import read_records

pytestmark = pytest.mark.live

CHOOSE = """
for (const [title, value] of Object.entries(arguments[0])) {
    const widgets = Array.from(Bokeh.documents[0].get_model_by_name("a").references());
    widgets.find(each => each.title == title && "value" in each).value = value;
}
"""
CLICK = """
const [root, label] = arguments;
const buttons = Array.from(Bokeh.documents[0].get_model_by_name(root).references());
const button = buttons.find(each => each.type == "Button" && each.label == label);
Bokeh.index.find_one(button).el.shadowRoot.querySelector("button").click();
"""
MIDDLE = """
const plot = Array.from(Bokeh.documents[0].get_model_by_name("a").references())
    .find(each => each.type == "Figure" && each.title?.text == "peers and links");
const view = Bokeh.index.find_one(plot), box = view.el.getBoundingClientRect();
const links = plot.renderers.map(each => each.data_source.data).find(data => "x0" in data);
const {x_scale, y_scale} = view.frame;
const i = links.a.findIndex((a, i) => a == arguments[0] && links.b[i] == arguments[1]);
return [box.left + x_scale.compute((links.x0[i] + links.x1[i]) / 2),
        box.top + y_scale.compute((links.y0[i] + links.y1[i]) / 2)];
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with a_browser() as browser:
        yield browser


@pytest.mark.timeout(600)
def test_what_is_run_in_the_lab_is_repeated_on_the_command_line(
    tmp_path: Path, browser: Browser
) -> None:
    def script(code: str, *arguments: object) -> Any:
        return browser.driver.execute_script(code, *arguments)

    async def use() -> str:
        page = serving(
            lambda ready: serve(
                lambda doc: build_lab(doc, tmp_path), every=LAB_POLL_SECONDS, on_ready=ready
            )
        )
        async with page as address:
            await asyncio.to_thread(browser.open, address)
            await shows(lambda: "8,512" in browser.text(), "what ring and regular:4 need")
            await asyncio.to_thread(script, CHOOSE, {"graph": "torus", "peers": 9, "rounds": 5})
            await shows(lambda: "18 two-way" in browser.text(), "the torus of nine peers")
            x, y = await asyncio.to_thread(script, MIDDLE, "0", "1")
            await asyncio.to_thread(browser.click_at, x, y)
            await shows(lambda: "17 two-way" in browser.text(), "a link less")
            await asyncio.to_thread(script, CLICK, "a", "run")
            await shows(lambda: "round 5" in browser.text(), "the end of the run")
            await asyncio.to_thread(browser.save_downloads, tmp_path)
            await asyncio.to_thread(script, CLICK, "a", "download the config")
            await shows((tmp_path / "lab-a.toml").exists, "the file")
            shown = re.search(r"mean accuracy (0\.\d+)", browser.text())
            await asyncio.to_thread(check_quiet, browser)
            assert shown is not None
            return shown[1]

    accuracy, repeated = asyncio.run(use()), tmp_path / "repeated"
    with pytest.raises(SystemExit) as stop:
        main(["simulate", str(tmp_path / "lab-a.toml"), "--out", str(repeated)])
    assert not stop.value.code
    records = list(read_records(repeated / "metrics.jsonl"))
    assert records == list(read_records(tmp_path / "lab-a" / "latest" / "metrics.jsonl"))
    last = [record["accuracy"] for record in records if record["round"] == 5]
    assert len(last) == 9
    assert f"{sum(last) / 9:.3f}" == accuracy
