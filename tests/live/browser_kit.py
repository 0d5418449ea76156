"""A real browser for tests of pages: Debian's chromium without a window, driven through selenium."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
WITHOUT_BROWSER = "chromium and chromium-driver are not installed"

# Bokeh draws in shadow trees, which the text of a page does not include.
TEXT = """
const text = node => {
    let found = "";
    for (const child of node.childNodes) {
        if (child.nodeName == "STYLE" || child.nodeName == "SCRIPT") continue;
        if (child.nodeType == 3) found += child.textContent + " ";
        if (child.shadowRoot) found += text(child.shadowRoot);
        found += text(child);
    }
    return found;
};
return text(document.body);
"""
ROWS = """
const table = window.Bokeh?.documents[0]?.get_model_by_name(arguments[0]);
const view = table && Bokeh.index.find_one(table);
if (!view) return [];  // the page is not drawn yet
return Array.from(view.el.shadowRoot.querySelectorAll(".slick-row"), row => row.innerText.trim());
"""
WHERE = """
const [name, peer] = arguments;
const plot = Bokeh.documents[0].get_model_by_name(name), view = Bokeh.index.find_one(plot);
const data = Bokeh.documents[0].get_model_by_name("peers").source.data;
const index = Array.from(data.peer).indexOf(peer);
const box = view.el.getBoundingClientRect();
const {x_scale, y_scale} = view.frame;
return [box.left + x_scale.compute(data.x[index]), box.top + y_scale.compute(data.y[index])];
"""


class Browser:
    """One window. Each method asks the browser; none waits for a page to change."""

    def __init__(self, driver: Any):
        self.driver = driver

    def open(self, url: str) -> None:
        self.driver.get(url)

    def text(self) -> str:
        """All text on the page, with single spaces."""
        return " ".join(self.driver.execute_script(TEXT).split())

    def rows(self, table: str) -> list[str]:
        """The rows of a table that are drawn, by the table's name."""
        return self.driver.execute_script(ROWS, table)

    def points(self) -> int:
        """How many points the curve of the mean has."""
        return self.driver.execute_script(
            """
            const plot = window.Bokeh?.documents[0]?.get_model_by_name("curves");
            if (!plot) return 0;
            const means = plot.renderers.map(each => each.data_source.data).find(data => "width" in data);
            return means.xs.at(-1).length;"""
        )

    def click_peer(self, peer: str) -> None:
        """Click a peer in the drawn graph."""
        self.click_at(*self.driver.execute_script(WHERE, "graph", peer))

    def click_at(self, x: float, y: float) -> None:
        """Click a place in the window, in pixels."""
        from selenium.webdriver.common.action_chains import ActionChains

        actions = ActionChains(self.driver)
        actions.w3c_actions.pointer_action.move_to_location(round(x), round(y))
        actions.click().perform()

    def save_downloads(self, folder: Path) -> None:
        """Write what the page lets one download into a folder from now on."""
        options = {"behavior": "allow", "downloadPath": str(folder)}
        self.driver.execute_cdp_cmd("Browser.setDownloadBehavior", options)

    def errors(self) -> list[str]:
        """Errors on the console so far."""
        return [e["message"] for e in self.driver.get_log("browser") if e["level"] == "SEVERE"]

    def hosts(self) -> set[str]:
        """The hosts that the page has asked for anything, by requests or websockets."""
        hosts = set()
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            url = message["params"].get("request", {}).get("url") or message["params"].get(
                "url", ""
            )
            if message["method"] in ("Network.requestWillBeSent", "Network.webSocketCreated"):
                parts = urlsplit(url)
                if parts.scheme not in ("data", "blob", "file"):
                    hosts.add(parts.hostname or url)
        return hosts


@contextmanager
def a_browser() -> Iterator[Browser]:
    """Start a browser; skips the test where none is installed."""
    if CHROMIUM is None or DRIVER is None:
        if os.environ.get("GOSSAMER_REQUIRE_BROWSER"):
            pytest.fail(WITHOUT_BROWSER)
        pytest.skip(WITHOUT_BROWSER)
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1200,1500",
                     "--disable-dev-shm-usage"):  # fmt: skip
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
