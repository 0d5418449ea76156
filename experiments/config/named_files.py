"""What a config names but does not hold: files and modules, whose contents decide a result too."""

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

_LIBRARY = Path(sysconfig.get_paths()["stdlib"]).resolve()
_INSTALLED = {"site-packages", "dist-packages"}


def fingerprint(config: Experiment, source: str = "config") -> str:
    """A digest of the files and modules that a config names; empty if it names none.

    Modules of the user's own that such a module imports count too. What a user's function reads by
    itself is not known here.
    """
    return digest(named_files(config, source))


def refuse_changed(cells: Iterable[Any]) -> None:
    """ConfigError if a named file is no longer what it was when the runs began: whose result is it?

    cells: of a study, with a source, and a key that holds the digest of what their config names.
    """
    for cell in cells:
        if replace(cell).key != cell.key:  # the new one takes the digest of now
            raise ConfigError(
                f"{cell.source}: a file or module that it names was changed while it ran; finished runs are "
                "kept, start it again for the others"
            )


def digest(files: Sequence[Path]) -> str:
    """One digest of several files' contents, in their order; empty without files."""
    if not files:
        return ""
    return hashlib.sha256("".join(map(_contents, files)).encode()).hexdigest()


def named_files(config: Experiment, source: str = "config") -> list[Path]:
    """The files behind a config's keys, whether or not they are there: running it says what is missing."""
    folder, found = Path(source).parent, []
    if isinstance(config, Config):
        if config.topology is not None:
            found += topology_files(config.topology, folder)
        if config.time and config.time.churn and config.time.churn.trace:
            found.append(folder / config.time.churn.trace)
    for entry in (config.data.set, config.network.entry or ""):
        found += entry_files(entry, folder)
    if (trained := config.network.trained) is not None:
        found += [folder / trained.replace("{peer}", str(peer)) for peer in range(config.peers)]
    return found


def topology_files(spec: str | Mapping[str, Any], folder: Path) -> list[Path]:
    """The file of a graph, or those of the module that makes it; none for a builder's name."""
    from ...topology import TopologyError, parse
    from ..graphs.swarm import beside, complete_path

    try:
        with beside(folder):
            kind, parameters = parse(complete_path(spec, folder))  # pyright: ignore[reportArgumentType]
    except TopologyError:
        return []  # building it says what is wrong
    if kind == "file" and isinstance(path := parameters.get("path"), str):
        return [Path(path)]
    if kind == "function" and isinstance(name := parameters.get("name"), str):
        return entry_files(name, folder)
    return []


def entry_files(entry: str, folder: Path) -> list[Path]:
    """The files of a user's `module:function`; none for another name."""
    module, colon, _ = entry.partition(":")
    return module_files(module, folder) if module and colon else []


def module_files(module: str, folder: Path) -> list[Path]:
    """A module's source, and those of the modules that it imports from the user's own folders.

    Nothing is imported for it: a worker will, and must find the module as it is then.
    """
    importlib.invalidate_caches()  # a file may have come a moment ago
    own = [folder.resolve(), Path.cwd()]
    found: dict[Path, None] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if "." in name:
            waiting.append(name.rpartition(".")[0])  # the package's own source runs first
        path = _source(name, [*map(str, own), *sys.path])
        if path is None or path in found:
            continue
        is_own = any(path.is_relative_to(each) for each in own)
        # A home folder or a container's root may well be above Python's own library.
        is_own = is_own and not _INSTALLED & {*path.parts} and not path.is_relative_to(_LIBRARY)
        if is_own or name == module:
            found[path] = None
        if is_own:
            package = name if path.name == "__init__.py" else name.rpartition(".")[0]
            waiting += _imports(path, package)
    return sorted(found)


def _source(module: str, places: list[str]) -> Path | None:
    """Where a module's source stands, found without importing the packages it is in."""
    steps, within, spec = module.split("."), places, None
    for count in range(1, len(steps) + 1):
        spec = PathFinder.find_spec(".".join(steps[:count]), within)
        if spec is None:
            return None
        within = list(spec.submodule_search_locations or [])
    if spec is None or spec.origin is None or not os.path.isfile(spec.origin):
        return None  # built in, or a folder without a source of its own
    return Path(spec.origin).resolve()


def _imports(path: Path, package: str) -> Iterator[str]:
    """Names that may be modules which a source imports."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return  # importing it says what is wrong
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join(filter(None, [*(above if node.level else []), node.module]))
            if base:
                yield base
            yield from (f"{base}.{alias.name}".lstrip(".") for alias in node.names)


def _contents(path: Path) -> str:
    try:
        about = path.stat()
        return _hashed(path, about.st_mtime_ns, about.st_size, about.st_ino)
    except OSError:
        return "none"


@lru_cache(maxsize=4096)  # a sweep asks for the same files again for each of its cells
def _hashed(path: Path, *_version: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
