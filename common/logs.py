"""The format of log lines, and limits for an event that repeats."""

import json
import logging
import sys


class JsonFormatter(logging.Formatter):
    """Formats each log line as one JSON object: time (seconds since 1970), level, logger, message."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
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
    """Write log lines of level INFO and above to stderr: as text, or each as a JSON object."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(JsonFormatter() if as_json else text)
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def is_milestone(count: int) -> bool:
    """Return True for 1, 2, 4, 8, …: the occurrences of a repeating event that are logged."""
    return count & (count - 1) == 0
