"""Results on disk: a separate folder for every run, and files that are replaced atomically.

A run creates its folder and locks it, so that no other command writes into it or empties it:

    results = Results(Path("results/digits"), "simulate")
    with results.run_folder() as folder:               # results/digits/001, or the next free number
        write_json(folder / "config.json", …)

Records that are written during a run are appended to JSON lines files; all other files are written to
a temporary file that then replaces the old one.
"""

from __future__ import annotations

import csv
import errno
import io
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from gossamer import files
from gossamer.files import FileLock

from .errors import ConfigError

_log = logging.getLogger(__name__)

Record = dict[str, Any]

CHECKPOINT_FILE = "checkpoint.safetensors"
"""The state of a simulation, from which it can be continued."""
SHARING_FILE = "sharing.json"
"""The file of what peers have decided to share; `gossamer assignment` reads it."""
PEERS_FILE = "peers.json"
"""The file of a swarm's peers: their tasks, their partial models and the links between them."""
EVENTS_FILE = "events.jsonl"
"""The file of what happened to a live swarm's processes, with the time."""
RUN_FILE = "run.json"
_LOCK_FILE = ".lock"
_LATEST_LINK = "latest"


# --- a run's folder ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _RunInfo:
    """The content of run.json.

    key: identifies what the run computes; only a run with the same key resumes it. None: never resumed.
    """

    command: str
    key: str | None
    finished: bool

    @classmethod
    def read(cls, folder: Path) -> _RunInfo | None:
        """Read a folder's run.json; None if it has no valid one."""
        try:
            table = json.loads((folder / RUN_FILE).read_text("utf-8"))
            return cls(table["command"], table["key"], table["finished"])
        except (OSError, ValueError, KeyError, TypeError):
            return None


class Results:
    """The folder for the results of one run of a command, which no other run overwrites.

    base: the folder in which each run gets the next free sub-folder of 001, 002, …; the symlink `latest`
        in it points to the run that started last.
    command: the command's name, without `gossamer`.
    exact: write results to `base` itself, which must be empty, instead of to a sub-folder.
    force: replace the newest results in `base`.
    details: returns what run.json tells a reader beside what is needed to resume the run; called when the run
        begins and when it is finished.
    """

    def __init__(
        self,
        base: Path,
        command: str,
        *,
        exact: bool = False,
        force: bool = False,
        details: Callable[[], Record] = dict,
    ):
        self.base = require_folder(base)
        self._command, self._exact, self._force, self._details = command, exact, force, details
        self._folder: Path | None = None
        self._key: str | None = None
        self._begun = self._resumed = False
        self._new_folders: list[Path] = []

    @property
    def folder(self) -> Path:
        """The run's folder; only inside `opened` or `run_folder`."""
        assert self._folder is not None, "open the results first"
        return self._folder

    @contextmanager
    def opened(self, key: str | None = None) -> Iterator[Path]:
        """Create or reuse the run's folder and hold its lock until the block ends. Raises ConfigError.

        key: identifies what the run computes, for a run that can be resumed. An unfinished run with the same
            key is resumed in its folder. If left out, no run is resumed.

        The run is marked as finished if the block ends without an error. If the block did not call `begin`, a
        folder that was created for it is removed, and one that existed before is left unchanged.
        """
        self._key, self._begun, self._resumed, self._new_folders = key, False, False, []
        folder, lock = self._claim()
        self._folder = folder
        try:
            yield folder
            if self._begun:
                self._write_info(finished=True)
        finally:
            if not self._begun:
                self._remove_new_folders(folder)
            lock.release()

    @contextmanager
    def run_folder(self, key: str | None = None) -> Iterator[Path]:
        """Open the run's folder, as `opened` does, and call `begin` at once.

        For a run whose config has been checked already.
        """
        with self.opened(key) as folder:
            self.begin()
            yield folder

    def begin(self, keep: Collection[str] = ()) -> None:
        """Mark the folder as the latest run, and delete the results that --force replaces.

        keep: names of files and folders in it that this run has written already.
        """
        self._begun = True
        self._write_info(finished=False)
        if not self._resumed:
            for path in self.folder.iterdir():
                if path.name in (RUN_FILE, _LOCK_FILE, *keep):
                    continue
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()
        if not self._exact:
            _set_latest(self.base / _LATEST_LINK, self.folder.name)

    def earlier_runs(self) -> list[Path]:
        """Return the folders of other runs in `base`, the newest first; none with `force` or `exact`."""
        if self._exact or self._force:
            return []
        return [run for run in _numbered(self.base) if run != self._folder]

    def _claim(self) -> tuple[Path, FileLock]:
        """Choose the run's folder, create it if it is new, and lock it."""
        if self._exact:
            return self._claim_exact()
        runs = _numbered(self.base)
        if self._force and runs and (_RunInfo.read(runs[0]) or _is_empty(runs[0])):
            return runs[0], _lock(runs[0])
        for run in filter(self._resumes, () if self._force else runs):
            lock = _lock(run)
            if self._resumes(run):  # another command may have finished it before we got the lock
                self._resumed = True
                return run, lock
            lock.release()
        number = int(runs[0].name) if runs else 0
        while True:
            number += 1
            folder = self.base / f"{number:03d}"
            self._note_new_folders(folder)
            make_folder(self.base)
            try:
                folder.mkdir()
                lock = _lock(folder)
            except FileExistsError:
                continue  # another command created it first
            except OSError as error:
                raise cannot_write(folder, error) from None
            return folder, lock

    def _claim_exact(self) -> tuple[Path, FileLock]:
        """Lock `base` itself as the run's folder. Raises ConfigError if it holds other files."""
        folder = self.base
        self._note_new_folders(folder)
        lock, info = _lock(make_folder(folder)), _RunInfo.read(folder)
        self._resumed = not self._force and self._resumes(folder)
        if self._resumed or _is_empty(folder) or (info and self._force):
            return folder, lock
        lock.release()
        if info is None:
            raise ConfigError(
                f"{folder}: holds files that no gossamer command wrote; name another folder"
            )
        raise ConfigError(
            f"{folder}: holds the results of gossamer {info.command}; name another folder, or replace them "
            "with --force"
        )

    def _resumes(self, run: Path) -> bool:
        """Return whether `run` is an unfinished run of the same command and key."""
        return self._key is not None and _RunInfo.read(run) == _RunInfo(
            self._command, self._key, False
        )

    def _write_info(self, *, finished: bool) -> None:
        info = asdict(_RunInfo(self._command, self._key, finished))
        write_json(self.folder / RUN_FILE, info | self._details())

    def _note_new_folders(self, folder: Path) -> None:
        """Remember which folders do not exist yet, for `_remove_new_folders`."""
        self._new_folders = [path for path in (folder, *folder.parents) if not path.exists()]

    def _remove_new_folders(self, folder: Path) -> None:
        """Remove the folders that were created for a run that did not begin; parent folders only if empty."""
        if folder in self._new_folders:
            shutil.rmtree(folder, ignore_errors=True)
        for path in self._new_folders:
            with suppress(OSError):
                path.rmdir()


def find_run(folder: Path) -> Path:
    """Return a run's folder: `folder` itself, or the latest run in it if there are several."""
    if (folder / RUN_FILE).exists():
        return folder
    latest = folder / _LATEST_LINK
    if latest.is_dir():
        return latest
    with suppress(OSError, ValueError):
        # On file systems without symlinks, `latest` is a file that contains the folder's name.
        run = folder / latest.read_text("utf-8").strip()
        if run.parent == folder and run.is_dir():
            return run
    return next(iter(_numbered(folder)), folder)


def _numbered(base: Path) -> list[Path]:
    """Return the folders of runs in `base`, the newest first."""
    try:
        runs = [path for path in base.iterdir() if re.fullmatch(r"\d{3,}", path.name)]
    except OSError:
        return []
    return sorted((run for run in runs if run.is_dir()), key=lambda run: -int(run.name))


def _is_empty(folder: Path) -> bool:
    """Return whether a folder holds nothing but the lock file."""
    return all(path.name == _LOCK_FILE for path in folder.iterdir())


def _lock(folder: Path) -> FileLock:
    """Lock a folder. Raises ConfigError if another command holds its lock."""
    lock = FileLock(folder / _LOCK_FILE)
    try:
        acquired = lock.acquire()
    except OSError as error:
        raise cannot_write(folder, error) from None
    if not acquired:
        raise ConfigError(
            f"{folder}: another gossamer command is writing its results there; wait until it has ended, or "
            "name another folder with --out"
        )
    return lock


def _set_latest(link: Path, name: str) -> None:
    """Make `link` a symlink to the folder `name` beside it, atomically.

    On file systems without symlinks, write a file that contains `name`.
    """
    # No other command uses this temporary name: we hold the lock of the folder `name`.
    temporary = link.with_name(f".{link.name}-{name}")
    try:
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(name, target_is_directory=True)
        temporary.replace(link)
    except (OSError, NotImplementedError):
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        write_bytes(link, name.encode())


def require_folder(path: Path) -> Path:
    """Return `path` if it is a writable folder or can be created; else raise ConfigError. Creates nothing.

    Commands call this before they compute, so that no results are lost because they cannot be written.
    """
    nearest = next(folder for folder in (path, *path.parents) if os.path.exists(folder))
    if not nearest.is_dir():
        raise ConfigError(f"{path}: cannot be a folder: {nearest} is a file; name another")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"{path}: the folder {nearest} cannot be written to; name another")
    return path


def make_folder(path: Path) -> Path:
    """Create the folder `path` if it does not exist, and return it. Raises ConfigError."""
    try:
        require_folder(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(path, error) from None
    return path


# --- files ------------------------------------------------------------------------------------------


def cannot_write(path: Path, error: OSError | SafetensorError) -> ConfigError:
    """Return the error for a file that cannot be written, with its path, the reason and the remedy."""
    number = error.errno if isinstance(error, OSError) else None
    # A SafetensorError has the error number only in its text.
    if number is None and (match := re.search(r"\(os error (\d+)\)", str(error))):
        number = int(match[1])
    reason = os.strerror(number) if number else str(error)
    if number in (errno.ENOSPC, errno.EDQUOT):
        reason = "no space left on its disk; free some and run again"
    elif number == errno.EFBIG:
        reason = (
            "it would exceed the limit on file sizes; raise the limit (ulimit -f) and run again"
        )
    return ConfigError(f"{path}: cannot be written: {reason}")


class RecordFile(files.RecordFile):
    """Appends records to a JSONL file; raises ConfigError if the file cannot be written.

    fresh: delete records that the file holds already.
    """

    def __init__(self, path: Path, *, fresh: bool = True):
        make_folder(path.parent)
        super().__init__(path, overwrite=fresh)

    def _note_failure(self, error: OSError) -> None:
        raise cannot_write(self._path, error) from None


def read_records(path: Path) -> Iterator[Record]:
    """Yield the records of a JSONL file; none if it does not exist.

    Skips lines that are not valid JSON, such as a last line that was not written completely. If that is in
    the folder of a finished run, which wrote all lines, a warning is logged: the file was cut later.
    """
    if not path.exists():
        return
    count, is_cut = 0, False
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            is_cut = False
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                is_cut = True
                continue
            if isinstance(record, dict):
                count += 1
                yield record
    if is_cut and (info := _RunInfo.read(path.parent)) is not None and info.finished:
        _warn_cut(path, count)


@cache  # a command may read the same file several times
def _warn_cut(path: Path, count: int) -> None:
    _log.warning(
        "%s: was cut after the run had finished: its last line is not complete, and what came after is "
        "missing; %s records were read; copy the file again, or repeat the run", path, count,
    )  # fmt: skip


def read(*folders: str | Path) -> Any:
    """Return the records of finished or running runs as one pandas DataFrame.

        read("results/digits")                      # the latest run
        read("results/digits/001", "results/digits/002").groupby(["run", "round"])["accuracy"].mean()

    A simulation or a live swarm has a row for every test of a peer, with the columns `round`, `peer`, `task`,
    `accuracy`, `loss` and one for every named metric. A comparison has a row for every test of a client, with
    the columns `method`, `seed`, `round`, `bytes`, `client`, `accuracy` and one for every other metric. A
    sweep or a study has a row for every run of its grid, with the columns `line`, `seed`, `accuracy`, and one
    for every key of its settings and every named metric. The column `run` is the folder. Values that are no
    numbers or text, such as lists, stay as they are.

    Raises ConfigError if there is no such folder, or if it has no records.
    """
    import pandas as pd

    rows: list[Record] = []
    for folder in folders:
        if not Path(folder).exists():
            raise ConfigError(f"{folder}: there is no such folder{_hint_elsewhere(Path(folder))}")
        run = find_run(Path(folder))
        files_of_run = [run / name for name in ("metrics.jsonl", "runs.jsonl")]
        records = [record for file in files_of_run for record in read_records(file)]
        if not records:
            raise ConfigError(
                f"{folder}: has no records: neither metrics.jsonl nor runs.jsonl; name the folder of a run"
            )
        rows += [
            {"run": str(run), **row}
            for record in records
            for row in (client_rows(record) if "curve" in record else [_flatten(record)])
        ]
    return pd.DataFrame(rows)


def _hint_elsewhere(folder: Path) -> str:
    """Return the end of an error: a folder of the same name one level deeper; "" if there is none."""
    folders = [path for path in sorted(folder.parent.glob(f"*/{folder.name}")) if path.is_dir()]
    return f"; there is {folders[0]}" if folders else ""


def client_rows(record: Record) -> Iterator[Record]:
    """Yield a row for every test of a client in a run of a comparison."""
    metric = record.get("metric", "accuracy")
    for point in record["curve"]:
        columns = {"accuracy": point["accuracy"], metric: point.get("values", point["accuracy"])}
        columns |= {n: v for n, v in point.get("metrics", {}).items() if isinstance(v, list)}
        for client in range(len(point["accuracy"])):
            yield {
                "method": record["method"], "seed": record["seed"], "round": point["round"],
                "bytes": point["bytes"], "client": client,
                **{name: values[client] for name, values in columns.items()},
            }  # fmt: skip


def _flatten(record: Record) -> Record:
    """Return a record with its named metrics, and the settings of a run, as keys of their own."""
    flat = {key: value for key, value in record.items() if key not in ("metrics", "settings")}
    return {**flat, **(record.get("settings") or {}), **(record.get("metrics") or {})}


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file to write, which replaces `path` when the block ends.

    If the block raises, `path` is left unchanged. Raises ConfigError if the file cannot be written.
    """
    try:
        with files.atomic_path(path, sync=True) as temporary:
            yield temporary
    except (OSError, SafetensorError) as error:
        raise cannot_write(path, error) from None


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file atomically."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON atomically."""
    write_bytes(path, (json.dumps(value, indent=2) + "\n").encode())


def write_csv(path: Path, header: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    """Write a CSV file atomically."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(header)
    writer.writerows(rows)
    write_bytes(path, text.getvalue().encode())
