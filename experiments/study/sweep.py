"""Sweeps: one config with a [sweep] table is many runs, one for every combination of its values."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from ..config.named_files import fingerprint, refuse_changed
from ..config.needs import refuse_unused_axes, warn_unused_in_sweep
from ..config.tables import Config, ConfigError, parse_config
from ..results import Record
from . import Frame, Job, Study, as_text, frame_of, key_of
from .outcomes import outcomes, stackable


@dataclass(frozen=True)
class Cell:
    """One run of a sweep: the values that set it apart, its whole config, and the file it came from."""

    settings: Mapping[str, Any]
    config: Config
    source: str = "config"

    @property
    def key(self) -> str:
        """Names the run by its config, and what is in the files and modules that the config names."""
        return self._key

    @property
    def line(self) -> str:
        """Its values, as the progress bar shows them."""
        return _label(self.settings)

    @cached_property
    def _key(self) -> str:  # kept, so that a worker has the key of when the sweep was started
        text = self.config.model_dump_json()
        return key_of(text + fingerprint(self.config, self.source))


def sweep_study(config: Config, source: str = "config") -> Study[Cell]:
    """Return the study of a config's [sweep] table; raises ConfigError for one that cannot be run."""
    cells = expand(config, source)
    warn_unused_in_sweep(config, axes_of(config, source), [cell.config for cell in cells], source)
    return Study(
        config.name, cells, run_cells, table,
        lambda folder, records: draw(folder, records, config.name),
        batches=stackable,
        latest=lambda record: f"{_label(record['settings'])}: {record['accuracy']:.3f}",
        about={"config.json": config.model_dump(mode="json")},
    )  # fmt: skip


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
    refuse_unused_axes(axes, [cell.config for cell in cells], source)
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


def run_cells(cells: list[Cell], job: Job) -> list[Record]:
    """Run a batch of cells in one stack."""
    found = outcomes([cell.config for cell in cells], [cell.source for cell in cells], job.threads)
    refuse_changed(cells)
    return [
        {
            "key": cell.key,
            "settings": dict(cell.settings),
            "seed": cell.config.seed,
            "accuracy": one.accuracy,
            "worst": one.worst,
        }
        for cell, one in zip(cells, found, strict=True)
    ]


# --- what a sweep leaves ----------------------------------------------------------------------------

_FIGURES: dict[str, str] = dict.fromkeys(("mean", "± sd", "median", "worst peer"), ".4f")


def combine(records: Sequence[Record]) -> Frame:
    """Return a row for every combination of values, in the order in which they first occur.

    `± sd` is the standard deviation over seeds, missing of a single run; `worst peer` is that of the worst
    run.
    """
    keys = [key for key in records[0]["settings"] if key != "seed"]
    frame = frame_of(
        {
            **{key: [_shown(r["settings"][key]) for r in records] for key in keys},
            "accuracy": [r["accuracy"] for r in records],
            "worst": [r["worst"] for r in records],
        }
    )
    groups = frame.groupby(keys or (lambda _: 0), sort=False)
    accuracy = groups["accuracy"]
    combined = frame_of(
        {
            "runs": accuracy.size(), "mean": accuracy.mean(), "± sd": accuracy.std(),
            "median": accuracy.median(), "worst peer": groups["worst"].min(),
        }
    )  # fmt: skip
    return combined.reset_index(drop=not keys)


def table(records: Sequence[Record]) -> dict[str, Frame]:
    """Return the table of every combination."""
    return {"summary": as_text(combine(records), _FIGURES)}


def draw(folder: Path, records: Sequence[Record], title: str) -> list[Path]:
    """Draw accuracy along the last key that has several numbers and nothing else; nothing without one."""
    keys = [key for key in records[0]["settings"] if key != "seed"]
    axis = next((key for key in reversed(keys) if _is_numeric(records, key)), None)
    if axis is None:
        return []
    from .figures import draw_lines, lines_of  # matplotlib takes a second

    rest = [key for key in keys if key != axis]
    frame = combine(records)
    frame[axis] = frame[axis].astype(float)
    frame["label"] = frame[rest].agg(", ".join, axis=1) if rest else "all"
    bars = {}
    if frame["± sd"].notna().any():  # else nothing is known of the spread
        deviation = frame["± sd"].fillna(0)
        frame["low"], frame["high"] = frame["mean"] - deviation, frame["mean"] + deviation
        bars = {"low": "low", "high": "high"}
    return draw_lines(
        folder / "figure",
        lines_of(frame, "label", axis, "mean", **bars),
        title=title,
        x_label=axis,
        legend=", ".join(rest),
        caption=_caption(int(frame["runs"].min()), int(frame["runs"].max())),
    )


def _caption(fewest: int, most: int) -> str:
    if most == 1:
        return "one run each, so nothing is known of the spread; seeds = 5 in [sweep] repeats them."
    counts = f"{most}" if fewest == most else f"{fewest} to {most}"
    return f"mean of {counts} runs, bars: one standard deviation over seeds to either side."


def _is_numeric(records: Sequence[Record], key: str) -> bool:
    values = [record["settings"][key] for record in records]
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    return numbers and len(set(values)) > 1


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _label(settings: Mapping[str, Any]) -> str:
    return ", ".join(_shown(value) for value in settings.values())
