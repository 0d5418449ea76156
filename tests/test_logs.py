"""Log lines as JSON objects."""

from __future__ import annotations

import json
import logging
import sys

from gossamer.logs import JsonFormatter


def line(message: str, *values: object, error: BaseException | None = None) -> str:
    info = None if error is None else (type(error), error, error.__traceback__)
    record = logging.LogRecord("gossamer.peer", logging.WARNING, __file__, 1, message, values, info)
    return JsonFormatter().format(record)


def test_a_line_is_one_object_whatever_is_in_it() -> None:
    text = line("peer %s left:\n%s", "anna", '"so"')
    assert "\n" not in text
    read = json.loads(text)
    assert (read["message"], read["level"]) == ('peer anna left:\n"so"', "warning")
    assert (read["logger"], type(read["time"])) == ("gossamer.peer", float)


def test_a_traceback_is_kept() -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        text = line("it failed", error=sys.exception())
    assert "ValueError: broken" in json.loads(text)["traceback"]
