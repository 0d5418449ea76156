"""Write the golden files anew: `python -m tests.golden.make [run …]`, from the repository's root.

Without names it writes all runs, the dialogue and the test vectors; with names, only those runs (`exact`,
`ring`, …), or `dialogue`, `vectors` or `release`. The folder of a release is only written when it is named,
since clocks, sessions and keys are in it: do so once for each minor version that adds something to what peers
publish, send or save, and keep the folders of former ones.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from . import dialogue, release, simulated, vectors


def main(names: list[str]) -> None:
    """Write what was named."""
    known = [*simulated.TOLERANCES, "dialogue", "vectors", "release"]
    if unknown := sorted(set(names) - set(known)):
        sys.exit(f"error: no golden file {', '.join(unknown)}: choose from {', '.join(known)}")
    with tempfile.TemporaryDirectory() as folder:
        for name in names or known[:-1]:
            match name:
                case "dialogue":
                    dialogue.write()
                case "vectors":
                    vectors.write()
                case "release":
                    release.write(Path(folder))
                case _:
                    made = simulated.simulate(name, Path(folder) / name)
                    shutil.copy(made, simulated.metrics(name))
            print(f"wrote {name}")


if __name__ == "__main__":
    main(sys.argv[1:])
