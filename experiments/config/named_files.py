"""Lists the files and modules that a config names, and computes a digest of their contents.

Results depend on these contents as well as on the config: finished runs of a study are only reused if neither
has changed.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .tables import Config, Experiment

_STANDARD_LIBRARY = Path(sysconfig.get_paths()["stdlib"]).resolve()
_INSTALLED_FOLDERS = {"site-packages", "dist-packages"}


def fingerprint(config: Experiment, source: str = "config") -> str:
    """Return a digest of the files and modules that a config names; empty if it names none.

    It includes the user's own modules that such a module imports, but no files that a user's function opens
    when it is called.
    """
    return digest(named_files(config, source))


def refuse_changed(cells: Iterable[Any]) -> None:
    """Raise ConfigError if a named file was changed since the runs of a study began.

    cells: the study's runs, each with a `source`, and a `key` that contains the digest of the files that its
        config names. A result that is saved under the old key must not depend on a new file.
    """
    for cell in cells:
        if replace(cell).key != cell.key:  # a copy computes its key from the present files
            raise ConfigError(
                f"{cell.source}: a file or module that it names was changed while it ran; finished runs are "
                "kept, start it again for the others"
            )


def digest(files: Sequence[Path]) -> str:
    """Return one digest of the contents of several files in the given order; empty without files."""
    if not files:
        return ""
    return hashlib.sha256("".join(map(_file_digest, files)).encode()).hexdigest()


def named_files(config: Experiment, source: str = "config") -> list[Path]:
    """Return the files that a config's keys name, also missing ones, which running the config reports."""
    folder, files = Path(source).parent, []
    if isinstance(config, Config):
        if config.topology is not None:
            files += topology_files(config.topology, folder)
        if config.time and config.time.churn and config.time.churn.trace:
            files.append(folder / config.time.churn.trace)
    entries = (*config.training.metrics, *config.callbacks)
    for entry in (config.data.set, config.network.entry or "", *entries):
        files += entry_files(entry, folder)
    if (trained := config.network.trained) is not None:
        files += [folder / trained.replace("{peer}", str(peer)) for peer in range(config.peers)]
    return files


def topology_files(spec: str | Mapping[str, Any], folder: Path) -> list[Path]:
    """Return the file of a graph, or of the module with the function that makes it.

    Graphs that Gossamer builds itself, such as `regular:4`, have none.
    """
    from ...topology import TopologyError, parse
    from ..graphs.swarm import complete_path, importing_from

    try:
        with importing_from(folder):
            kind, parameters = parse(complete_path(spec, folder))  # pyright: ignore[reportArgumentType]
    except TopologyError:
        return []  # building the graph will raise the error
    if kind == "file" and isinstance(path := parameters.get("path"), str):
        return [Path(path)]
    if kind == "function" and isinstance(name := parameters.get("name"), str):
        return entry_files(name, folder)
    return []


def entry_files(entry: str, folder: Path) -> list[Path]:
    """Return the files of a user's `module:function`; none for a name of another form."""
    module, colon, _ = entry.partition(":")
    return module_files(module, folder) if module and colon else []


def module_files(module: str, folder: Path) -> list[Path]:
    """Return the file of a module, and those of the modules that it imports from the user's own folders.

    Finds them by parsing, without importing anything: worker processes import the modules later, and must not
    get an older version from this process.
    """
    importlib.invalidate_caches()  # a file may have been created since the last import
    own_folders = [folder.resolve(), Path.cwd()]
    files: dict[Path, None] = {}
    queue = [module]
    while queue:
        name = queue.pop()
        if "." in name:
            queue.append(name.rpartition(".")[0])  # importing a module runs its package first
        path = _source_file(name, [*map(str, own_folders), *sys.path])
        if path is None or path in files:
            continue
        # One of the user's folders, such as a container's root, may contain Python's installed packages.
        is_installed = _INSTALLED_FOLDERS & {*path.parts} or path.is_relative_to(_STANDARD_LIBRARY)
        is_own = not is_installed and any(path.is_relative_to(own) for own in own_folders)
        if is_own or name == module:
            files[path] = None
        if is_own:
            package = name if path.name == "__init__.py" else name.rpartition(".")[0]
            queue += _imported_names(path, package)
    return sorted(files)


def _source_file(module: str, search_path: list[str]) -> Path | None:
    """Return the file of a module, without importing its packages; None if it has none."""
    steps, spec = module.split("."), None
    for count in range(1, len(steps) + 1):
        spec = PathFinder.find_spec(".".join(steps[:count]), search_path)
        if spec is None:
            return None
        search_path = list(spec.submodule_search_locations or [])
    if spec is None or spec.origin is None or not os.path.isfile(spec.origin):
        return None  # a built-in module, or a package without __init__.py
    return Path(spec.origin).resolve()


def _imported_names(path: Path, package: str) -> Iterator[str]:
    """Yield the full names that a source file imports; some may be names inside modules, not modules."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return  # importing the module will raise the error
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join(filter(None, [*(parents if node.level else []), node.module]))
            if base:
                yield base
            yield from (f"{base}.{alias.name}".lstrip(".") for alias in node.names)


def _file_digest(path: Path) -> str:
    """Return the digest of a file's contents; "none" if it cannot be read."""
    try:
        stat = path.stat()
        return _cached_digest(path, stat.st_mtime_ns, stat.st_size, stat.st_ino)
    except OSError:
        return "none"


@lru_cache(maxsize=4096)  # every run of a sweep needs the digests of the same files
def _cached_digest(path: Path, *_version: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
