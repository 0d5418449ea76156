"""Log lines: writing them to stderr, as text or JSON, and which repetitions of an event to log."""

import json
import logging
import sys
from collections import Counter


class JsonFormatter(logging.Formatter):
    """Formats each log record as one line with one JSON object.

    Its keys are `time` (seconds since 1970), `level` (in lower case), `logger` (its name) and `message`; a
    record of an exception has `traceback` too.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the JSON object of a record, as text without a line break."""
        line = {
            "time": record.created,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def log_to_stderr(*, as_json: bool = False) -> None:
    """Make the root logger write records of level INFO and above to stderr, as text or as JSON objects.

    Like `logging.basicConfig`, it does nothing if the root logger has a handler already.
    """
    handler = logging.StreamHandler(sys.stderr)
    text_formatter = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(JsonFormatter() if as_json else text_formatter)
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def should_log_repeat(count: int) -> bool:
    """Return whether to log the `count`-th occurrence of an event: True for 1, 2, 4, 8 and so on.

    The first occurrence is logged at once, and an event that a faulty peer causes a million times fills the
    log with 20 lines only.
    """
    return count & (count - 1) == 0


def log_repeated(
    log: logging.Logger,
    counters: Counter[str],
    cause: str,
    text: str,
    *args: object,
    level: int = logging.WARNING,
) -> None:
    """Count an event by its cause, and log the 1st, 2nd, 4th, 8th … of them with their number so far."""
    counters[cause] += 1
    if should_log_repeat(counters[cause]):
        log.log(level, f"{text} (%d so far)", *args, counters[cause])
