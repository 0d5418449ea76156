"""`gossamer`, or `python -m gossamer.experiments`: starts the command line, see cli."""

from ..peer.signals import exit_on_interrupt


def main() -> None:
    """Load the command line and run it. Ctrl-C while it loads leaves no traceback."""
    with exit_on_interrupt():
        from .cli import main as run
    run()


if __name__ == "__main__":
    main()
