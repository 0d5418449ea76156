"""Count what the house is made of: `python tests/house.py` from anywhere; takes a minute or two.

Prints how much code there is, how it hangs together, and through how many modules the common walks lead,
each beside its goal. `--counts` leaves the walks out (a second), `--json` prints all that was found, with
the names behind the figures.

- *code*: lines that hold more than a comment, a docstring (also one below a field) or nothing.
- *one importer*: modules that exactly one other module imports, be it for types alone.
- *past a door*: of all pairs (module, module of another top folder that it imports), those in which the
  second is neither a package nor a module that its package's stub lists. The modules of `gossamer` itself
  are the floor for all others: each is a door.
- *in functions*: names of gossamer's own that are imported inside functions.
- *private names*: names of other libraries that begin with an underscore: attributes of their objects,
  imports, and strings that name such an attribute.
- *tests*: private attributes of anything but `self`; names of code that `monkeypatch` or `mock` replaces (not
  the environment, the folder or the path of a process, which are there to be set); calls of `sleep` that take
  real time. Left out: `sleep(0)`, which only yields; the clock of `tests/lives`, which is virtual; the faults
  that `tests/lives/mutants.py` puts back on purpose; and `tests/waiting.py`, through which all others wait.
- *error roots*: exceptions all of whose bases are Python's own.
"""

from __future__ import annotations

import ast
import builtins
import io
import json
import re
import sys
import tokenize
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import walks

ROOT = Path(__file__).parents[1]
NAME = "gossamer"
PATCHES = {"setattr", "delattr", "setitem", "delitem"}
MOCKS = {
    "patch",
    "mock.patch",
    "mock.patch.object",
    "patch.object",
    "mock.patch.dict",
    "patch.dict",
}
WAITING = "tests/waiting.py"
"""The one file of the tests that may sleep."""
MUTANTS = "tests/lives/mutants.py"
VIRTUAL_TIME = "tests/lives"
GOALS = {
    "code": "24000",
    "lines": "39000",
    "files": "210",
    "one importer": "40",
    "past a door": "0",
    "in functions": "where a command loads its own world",
    "private names": "6, each with its reason",
    "tests: private": "30",
    "tests: patches": "40",
    "tests: sleeps": "0",
    "error roots": "1",
    "entries of experiments": "8 files",
    "exact": "28",
    "int8": "40",
    "time": "40",
    "packet": "15",
    "sealed": "23",
    "join": "42",
}


@dataclass(frozen=True)
class Source:
    """One file; `module` is its dotted name, `package` the one that its relative imports start from."""

    path: Path
    module: str = ""
    package: str = ""
    root: Path = ROOT

    @cached_property
    def text(self) -> str:
        return self.path.read_text("utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())

    def code(self) -> int:
        """Lines that hold code."""
        held: set[int] = set()
        silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type not in silent and token.type != tokenize.ENDMARKER:
                held.update(range(token.start[0], token.end[0] + 1))
        for node in self.nodes:
            if isinstance(node, ast.Expr) and _string(node.value) is not None:
                held.difference_update(range(node.lineno, (node.end_lineno or 0) + 1))
        return len(held)

    def where(self, node: ast.AST) -> str:
        return f"{self.path.relative_to(self.root).as_posix()}:{getattr(node, 'lineno', 0)}"


@dataclass(frozen=True)
class Import:
    """A name that a module imports: `target` is the module it comes from, or is."""

    importer: str
    target: str
    name: str
    in_function: bool


@cache
def sources(root: Path = ROOT) -> dict[str, Source]:
    """The program's files, by the names that their modules are installed under."""
    with (root / "pyproject.toml").open("rb") as file:
        folders = tomllib.load(file)["tool"]["setuptools"]["package-dir"]
    found = {}
    for package, folder in folders.items():
        for path in sorted((root / folder).glob("*.py")):
            module = package if path.name == "__init__.py" else f"{package}.{path.stem}"
            found[module] = Source(path, module, package, root)
    return found


def files_of_tests(root: Path = ROOT) -> list[Source]:
    """The files of the tests."""
    return [Source(path, root=root) for path in sorted((root / "tests").rglob("*.py"))]


# --- imports ------------------------------------------------------------------------------------


def imports(modules: dict[str, Source]) -> list[Import]:
    """Every import of one of our modules, or of a name in it."""
    return [each for source in modules.values() for each in _imports(source, modules)]


def _imports(source: Source, modules: dict[str, Source]) -> Iterator[Import]:
    for node, in_function in statements(source.tree.body):
        if isinstance(node, ast.Import):
            pairs = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = source.package.split(".")
            start = above[: len(above) - node.level + 1] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            pairs = [(base, alias.name) for alias in node.names]
        else:
            continue
        for target, name in pairs:
            if f"{target}.{name}" in modules:
                yield Import(source.module, f"{target}.{name}", name, in_function)
            elif target in modules:
                yield Import(source.module, target, name, in_function)


def statements(
    nodes: Iterable[ast.AST], in_function: bool = False
) -> Iterator[tuple[ast.AST, bool]]:
    """Some statements and all below them, and whether each is inside a function."""
    for node in nodes:
        yield node, in_function
        opens = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for field in ("body", "handlers", "orelse", "finalbody", "cases"):
            yield from statements(getattr(node, field, ()), in_function or opens)


def one_importer(modules: dict[str, Source], found: Iterable[Import]) -> list[str]:
    """The modules that one other module imports."""
    importers: defaultdict[str, set[str]] = defaultdict(set)
    for each in found:
        if each.importer != each.target:
            importers[each.target].add(each.importer)
    return sorted(module for module in modules if len(importers[module]) == 1)


def cross_imports(
    modules: dict[str, Source], found: Iterable[Import]
) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
    """Pairs of importer and imported across top folders, and those of them that go past a door."""
    packages = {source.package for source in modules.values()}

    def top(module: str) -> str:
        first = ".".join(module.split(".")[:2])
        return first if first in packages else NAME

    across = {(i.importer, i.target) for i in found if top(i.importer) != top(i.target)}
    doors = {module for module in modules if module in packages or top(module) == NAME}
    doors.update(
        f"{package}.{name}" for package in packages for name in shown_modules(modules[package])
    )
    return across, {pair for pair in across if pair[1] not in doors}


def shown_modules(package: Source) -> list[str]:
    """The modules that a package's stub lists as they are: `from . import topics as topics`."""
    stub = package.path.with_suffix(".pyi")
    nodes = ast.walk(ast.parse(stub.read_text("utf-8"))) if stub.exists() else ()
    return [
        alias.name
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module is None
        for alias in node.names
    ]


# --- private names ------------------------------------------------------------------------------


def private_names(modules: dict[str, Source]) -> dict[str, dict[str, list[str]]]:
    """By library, its private names that we use, and where."""
    own = {name for source in modules.values() for name in _defined(source)}
    libraries = sorted({each for source in modules.values() for each in _libraries(source)})
    found: defaultdict[str, defaultdict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for source in modules.values():
        for node, name, library in _private(source, own):
            at = library or _owner(name, [*_libraries(source), *libraries])
            if at is not None:
                found[at][name].append(source.where(node))
    return {library: dict(sorted(names.items())) for library, names in sorted(found.items())}


def _private(source: Source, own: set[str]) -> Iterator[tuple[ast.AST, str, str | None]]:
    """Nodes that may use a private name of a library, the name, and the library if it is certain."""
    objects = _library_objects(source)
    formats = (node for node in source.nodes if isinstance(node, ast.JoinedStr))
    in_format = {id(part) for node in formats for part in ast.walk(node)}
    for node in source.nodes:
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            on = ast.unparse(node.value)
            if on in objects or (node.attr not in own and on not in sys.stdlib_module_names):
                yield node, node.attr, objects.get(on)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            library = node.module.split(".")[0]
            names = [*node.module.split("."), *(alias.name for alias in node.names)]
            if library in _libraries(source):
                yield from ((node, name, library) for name in names if _is_private(name))
        elif id(node) not in in_format:
            text = _string(node) or ""
            if _is_private(text) and text.isidentifier() and text not in own:
                yield node, text, None


def _library_objects(source: Source) -> dict[str, str]:
    """Expressions (`client`, `self._client`) that stand for an object of a library, by their text.

    Those are its modules and what is imported from it, arguments annotated with a type of it, and what is
    made by a call of it.
    """
    found = {
        alias: library for library in _libraries(source) for alias in _aliases(source, library)
    }

    def library_of(node: ast.AST | None) -> str | None:
        while isinstance(node, ast.Attribute):
            node = node.value
        return found.get(node.id) if isinstance(node, ast.Name) else None

    for node in source.nodes:
        if isinstance(node, ast.arg) and (library := library_of(node.annotation)):
            found[node.arg] = library
    for node in source.nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            call = node.value
            made_by = call.args[-1] if ast.unparse(call.func) == "cast" else call.func
            if library := library_of(made_by):
                found |= {ast.unparse(target): library for target in node.targets}
    return found


@cache
def _libraries(source: Source) -> frozenset[str]:
    """The libraries that a file imports, without Python's own and ours."""
    found: set[str] = set()
    for node in source.nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            found.add(node.module.split(".")[0])
    return frozenset(found - sys.stdlib_module_names - {NAME, "__future__"})


def _aliases(source: Source, library: str) -> set[str]:
    """The names under which a file knows a library, its modules and what it imports from it."""
    found: set[str] = set()
    for node in source.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == library:
                    found.add(alias.asname or library)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == library:
            found |= {alias.asname or alias.name for alias in node.names}
    return found


def _defined(source: Source) -> Iterator[str]:
    """The private names that a file defines itself."""
    for node in source.nodes:
        match node:
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
            ):
                yield name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name
            case ast.arg(arg=name):
                yield name


def _owner(name: str, libraries: Iterable[str]) -> str | None:
    """The first library in whose sources a name occurs."""
    return next((library for library in libraries if name in _words(library)), None)


@cache
def _words(library: str) -> frozenset[str]:
    """The private names in a library's sources."""
    spec = find_spec(library)
    folders = [Path(each) for each in (spec and spec.submodule_search_locations) or ()]
    return frozenset(
        word
        for folder in folders
        for path in folder.rglob("*.py")
        for word in re.findall(r"\b_[A-Za-z]\w*", path.read_text("utf-8", errors="ignore"))
    )


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name.strip("_") != ""


def _string(node: ast.AST) -> str | None:
    match node:
        case ast.Constant(value=str() as text):
            return text
    return None


# --- tests and errors ---------------------------------------------------------------------------


def habits_of_tests(files: Iterable[Source]) -> dict[str, list[str]]:
    """Where tests reach for private attributes, patch code, and sleep."""
    found: dict[str, list[str]] = {"private": [], "patches": [], "sleeps": []}
    for source in files:
        path = source.path.relative_to(source.root).as_posix()
        if path == MUTANTS:
            continue
        may_sleep = path == WAITING or path.startswith(f"{VIRTUAL_TIME}/")
        for node in source.nodes:
            for habit in _habits(node):
                if habit != "sleeps" or not may_sleep:
                    found[habit].append(source.where(node))
    return found


def _habits(node: ast.AST) -> Iterator[str]:
    """What one node of a test counts as."""
    if isinstance(node, ast.Attribute) and _is_private(node.attr):
        on = ast.unparse(node.value)
        if on not in ("self", "cls") and on not in sys.stdlib_module_names:
            yield "private"
    if isinstance(node, ast.Call):
        called = ast.unparse(node.func)
        on, _, what = called.rpartition(".")
        if (on in ("monkeypatch", "patch") and what in PATCHES) or called in MOCKS:
            yield "patches"
        only_yields = [ast.unparse(each) for each in node.args] == ["0"]
        if what == "sleep" and not only_yields:
            yield "sleeps"


def error_roots(modules: dict[str, Source]) -> list[str]:
    """Exceptions that are children of Python's own alone."""

    def is_error(base: ast.expr) -> bool:
        known = getattr(builtins, ast.unparse(base), None)
        return isinstance(known, type) and issubclass(known, BaseException)

    return sorted(
        f"{source.module}.{node.name}"
        for source in modules.values()
        for node in source.nodes
        if isinstance(node, ast.ClassDef) and node.bases and all(map(is_error, node.bases))
    )


# --- all of it ----------------------------------------------------------------------------------


def count(root: Path = ROOT) -> dict[str, dict[str, Any]]:
    """Every figure but the walks; each with its number, what it is out of, and the names behind it."""
    modules = sources(root)
    found = imports(modules)
    alone = one_importer(modules, found)
    across, past = cross_imports(modules, found)
    private = private_names(modules)
    habits = habits_of_tests(files_of_tests(root))
    roots = error_roots(modules)
    top = sorted(each for each in (root / "experiments").iterdir() if each.name[0] not in "._")
    folders = sum(each.is_dir() for each in top)
    names = ", ".join(f"{library} {len(uses)}" for library, uses in private.items())
    return {
        "code": {"number": sum(source.code() for source in modules.values())},
        "lines": {"number": sum(source.lines for source in modules.values())},
        "files": {"number": len(modules)},
        "one importer": {
            "number": len(alone),
            "note": f"with {sum(modules[module].lines for module in alone)} lines",
            "names": alone,
        },
        "past a door": {
            "number": len(past),
            "note": f"of {len(across)} cross-package imports",
            "names": [f"{importer} imports {target}" for importer, target in sorted(past)],
        },
        "in functions": {"number": sum(each.in_function for each in found)},
        "private names": {
            "number": sum(map(len, private.values())),
            "note": names,
            "names": private,
        },
        "tests: private": {"number": len(habits["private"]), "names": habits["private"]},
        "tests: patches": {"number": len(habits["patches"]), "names": habits["patches"]},
        "tests: sleeps": {"number": len(habits["sleeps"]), "names": habits["sleeps"]},
        "error roots": {"number": len(roots), "names": roots},
        "entries of experiments": {
            "number": len(top),
            "note": f"{len(top) - folders} files, {folders} folders",
            "names": [each.name for each in top],
        },
    }


def go_walks() -> dict[str, dict[str, Any]]:
    """Every walk: how many modules, and which. A walk that does not arrive has no number, and says why."""
    found: dict[str, dict[str, Any]] = {}
    for name, what in walks.WALKS.items():
        try:
            modules = walks.modules(name)
            found[name] = {"number": len(modules), "note": what, "names": modules}
        except RuntimeError as error:
            found[name] = {"number": None, "note": f"{what}: {error}", "names": []}
    return found


def show(figures: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Figures as a table."""
    for name, figure in figures.items():
        number = "failed" if figure["number"] is None else str(figure["number"])
        yield f"{name:24} {number:>7}  goal {GOALS[name]:38} {figure.get('note', '')}".rstrip()


def main(options: list[str], root: Path = ROOT) -> int:
    """Count, and print."""
    if unknown := set(options) - {"--json", "--counts"}:
        print(f"error: {' '.join(sorted(unknown))}: use --json or --counts", file=sys.stderr)
        return 2
    figures = count(root)
    if "--counts" not in options:
        figures |= go_walks()
    print(json.dumps(figures, indent=1) if "--json" in options else "\n".join(show(figures)))
    return int(any(figure["number"] is None for figure in figures.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
