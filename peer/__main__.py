"""`python -m gossamer.peer SPEC.json`: see host."""

import sys

from .exits import INTERRUPTED, exit_on_interrupt


def start() -> int:
    """Run the process that the command line describes; return its exit code."""
    try:
        with exit_on_interrupt():
            from .host import main
        return main(sys.argv[1:])
    except KeyboardInterrupt:  # before the peers listen for signals, or after they have left
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(start())
