"""The command `gossamer`, or `python -m gossamer`: see gossamer.experiments.cli.

Imports almost nothing before Ctrl-C is handled, because a KeyboardInterrupt in an import shows a traceback.
"""

import os
import signal


def main() -> None:
    """Load the command line and run it; until it is loaded, Ctrl-C ends the process at once."""
    handler = signal.getsignal(signal.SIGINT)
    # Only if SIGINT is not ignored, as it is in background jobs of a shell.
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # 128 + SIGINT, as shells report it
    # Type checkers do not see the packages that setuptools maps into this one.
    from gossamer.experiments.cli import main as run  # pyright: ignore[reportMissingImports]

    signal.signal(signal.SIGINT, handler)
    run()


if __name__ == "__main__":
    main()
