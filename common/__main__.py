"""The command `gossamer`, or `python -m gossamer`: see gossamer.experiments.cli.

Imports next to nothing before Ctrl-C is handled: a KeyboardInterrupt in an import shows a traceback.
"""

import os
import signal


def main() -> None:
    """Load the command line and run it; until it is loaded, Ctrl-C ends the process at once."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # not if it is ignored, as in a shell's background
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    # Type checkers do not see the packages that setuptools maps into this one.
    from gossamer.experiments.cli import main as run  # pyright: ignore[reportMissingImports]

    signal.signal(signal.SIGINT, before)
    run()


if __name__ == "__main__":
    main()
