"""`python -m gossamer.peer SPEC.json`: see host."""

import sys

from .host import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
