"""Entry point of `python -m gossamer.peer SPEC.json`; see process.py."""

import sys

from .exits import INTERRUPTED, exit_on_interrupt


def start() -> int:
    """Run the process that the command line describes; return its exit code."""
    try:
        with exit_on_interrupt():
            from .process import main
        return main(sys.argv[1:])
    except KeyboardInterrupt:  # before the signal handlers are installed, or after they are removed
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(start())
