"""Sweeps: one config with a [sweep] table is many runs, one for every combination of its values."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

from ..config.named_files import fingerprint
from ..config.needs import refuse_idle_axes
from ..config.tables import Config, ConfigError, parse_config


@dataclass(frozen=True)
class Cell:
    """One run of a sweep: the values that set it apart, its whole config, and the file it came from."""

    settings: Mapping[str, Any]
    config: Config
    source: str = "config"

    @property
    def key(self) -> str:
        """Names the run by all that decides its result, so that finished runs are not run again.

        That is the config, and what is in the files and modules that it names.
        """
        return self._key

    @cached_property
    def _key(self) -> str:  # kept, so that a worker has the key of when the sweep was started
        text = self.config.model_dump_json(exclude_defaults=True)
        text += fingerprint(self.config, self.source)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def expand(config: Config, source: str = "config") -> list[Cell]:
    """Every run of a config's sweep, seeds innermost; without a sweep, the config itself.

    A key that does not exist, a list without values, a value that its key does not take, or a key that
    changes nothing in any of the runs is a `ConfigError` that names it.
    """
    axes = axes_of(config, source)
    plain = config.model_dump(mode="json") | {"sweep": {}}
    cells = []
    for values in product(*axes.values()):
        settings = dict(zip(axes, values, strict=True))
        table = json.loads(json.dumps(plain))  # a copy of its own, lists and all
        for path, value in settings.items():
            _put(table, path, value, source)
        cells.append(Cell(settings, parse_config(table, f"{source}, [sweep]"), source))
    refuse_idle_axes(axes, [cell.config for cell in cells], source)
    return cells


def axes_of(config: Config, source: str = "config") -> dict[str, list[Any]]:
    """What is varied: every key with its values, `seed` last."""
    axes: dict[str, list[Any]] = {}
    for path, values in _flat(config.sweep):
        if path == "seeds":
            if isinstance(values, bool) or not isinstance(values, int) or values < 1:
                raise _mistake(source, path, f"should be a number of seeds, not {values!r}")
            path, values = "seed", list(range(config.seed, config.seed + values))
        if not isinstance(values, list):
            raise _mistake(source, path, f"should be a list of values, as in [{values!r}]")
        if not values:
            raise _mistake(source, path, "is an empty list; give it a value, or leave it out")
        if path in axes:
            raise _mistake(source, path, "is there twice; write either seed = [0, 1] or seeds = 2")
        if twice := [value for place, value in enumerate(values) if value in values[:place]]:
            raise _mistake(source, path, f"names {twice[0]!r} twice")
        axes[path] = values
    if "seed" in axes:
        axes["seed"] = axes.pop("seed")
    return axes


def _flat(table: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """`[sweep]`'s keys as paths, whether they were written with dots, in quotes or as tables."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _put(table: Any, path: str, value: Any, source: str) -> None:
    *way, last = path.split(".")
    for step in way:
        table = _inside(table, step, path, source)
    if isinstance(table, list):
        _inside(table, last, path, source)
        table[int(last)] = value
    elif isinstance(table, dict):
        table[last] = value
    else:
        raise _mistake(source, path, f"{'.'.join(way)} is not a table, it has no {last!r}")


def _inside(table: Any, step: str, path: str, source: str) -> Any:
    if isinstance(table, list):
        if not step.isdigit() or int(step) >= len(table):
            raise _mistake(source, path, f"the list has {len(table)} entries, numbered from 0")
        return table[int(step)]
    if not isinstance(table, dict):
        raise _mistake(source, path, f"there is no table that could have {step!r}")
    if table.get(step) is None:
        table[step] = {}  # an optional table that was left out, or a key that parsing will refuse
    return table[step]


def _mistake(source: str, path: str, text: str) -> ConfigError:
    return ConfigError(f"{source}: key 'sweep.{path}': {text}")
