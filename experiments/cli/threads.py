"""How many threads torch may use, said before torch is there."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from ...peer import exit_on_interrupt


class _AtFirstUse(MetaPathFinder):
    """Finds torch where it is, and sets its threads as soon as it is loaded."""

    threads = 1

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torch":
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_set(module: ModuleType) -> None:
            with exit_on_interrupt():  # two seconds in which people change their mind
                load(module)
            module.set_num_threads(self.threads)

        spec.loader.exec_module = load_and_set
        return spec


_at_first_use = _AtFirstUse()


def use_threads(count: int) -> None:
    """Let one product of torch use so many threads: at once, or when torch is first imported.

    Importing torch only to say this would make people wait two seconds for help, or for the news that
    a file is missing.
    """
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(count)
        return
    _at_first_use.threads = count
    if _at_first_use not in sys.meta_path:
        sys.meta_path.insert(0, _at_first_use)
