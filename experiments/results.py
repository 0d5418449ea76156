"""Results on disk: a folder of its own for every run, and files that are whole or not there.

A run claims its folder and locks it, so that no other command writes into it or empties it:

    results = Results(Path("results/digits"), "simulate")
    with results.begun() as folder:               # results/digits/001, or the next free number
        write_json(folder / "config.json", …)

JSON lines are for what is recorded while a run goes on, the other files are replaced whole.
"""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from safetensors import SafetensorError

from gossamer import files
from gossamer.files import FileLock

from .errors import ConfigError

Record = dict[str, Any]

_MARK = "run.json"
_LOCK = ".lock"
_LATEST = "latest"


# --- a run's folder ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Mark:
    """What run.json says: the command, what it computes (None: not to be resumed), whether it finished."""

    command: str
    key: str | None
    finished: bool

    @classmethod
    def read(cls, folder: Path) -> _Mark | None:
        """Return the mark of a folder; None if no run left one."""
        try:
            table = json.loads((folder / _MARK).read_text("utf-8"))
            return cls(table["command"], table["key"], table["finished"])
        except (OSError, ValueError, KeyError, TypeError):
            return None


class Results:
    """Where one run of a command leaves its results, so that no other run overwrites them.

    place: results go to its sub-folders 001, 002, …, each run to the next free one; the link `latest`
        in it names the last run that has begun.
    command: the command's name, without `gossamer`.
    exact: results go to `place` itself, which must be empty.
    force: replace the newest results of this place instead.
    """

    def __init__(self, place: Path, command: str, *, exact: bool = False, force: bool = False):
        self.place = require_folder(place)
        self._command, self._exact, self._force = command, exact, force
        self._folder: Path | None = None
        self._key: str | None = None
        self._begun = self._resumed = False
        self._new_folders: list[Path] = []

    @property
    def folder(self) -> Path:
        """The run's folder, once it is open."""
        assert self._folder is not None, "open the results first"
        return self._folder

    @contextmanager
    def opened(self, key: str | None = None) -> Iterator[Path]:
        """Claim a folder and hold its lock while the block lasts. Raises ConfigError.

        key: names all that a resumable run computes. An unfinished run of the same key is continued in
            its folder. Left out, nothing is continued.

        A block that ends without an error has finished the run. If it did not call `begin`, a folder that was
        made for it is removed, and one that was there before stays as it was.
        """
        self._key, self._begun, self._resumed, self._new_folders = key, False, False, []
        folder, lock = self._claim()
        self._folder = folder
        try:
            yield folder
            if self._begun:
                self._write_mark(finished=True)
        finally:
            if not self._begun:
                self._give_back(folder)
            lock.release()

    @contextmanager
    def begun(self, key: str | None = None) -> Iterator[Path]:
        """Claim a folder and begin: for a run whose config has been checked already."""
        with self.opened(key) as folder:
            self.begin()
            yield folder

    def begin(self, keep: Collection[str] = ()) -> None:
        """Start writing: mark the folder as the latest run, and delete what --force replaces.

        keep: names in the folder that this run has written already.
        """
        self._begun = True
        self._write_mark(finished=False)
        if not self._resumed:
            for path in self.folder.iterdir():
                if path.name in (_MARK, _LOCK, *keep):
                    continue
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()
        if not self._exact:
            _set_latest(self.place / _LATEST, self.folder.name)

    def earlier(self) -> list[Path]:
        """Folders of other runs at this place, the newest first; none where --force begins anew."""
        if self._exact or self._force:
            return []
        return [run for run in _numbered(self.place) if run != self._folder]

    def _claim(self) -> tuple[Path, FileLock]:
        if self._exact:
            return self._claim_exact()
        runs = _numbered(self.place)
        if self._force and runs and (_Mark.read(runs[0]) or _is_empty(runs[0])):
            return runs[0], _lock(runs[0])
        for run in filter(self._continues, () if self._force else runs):
            lock = _lock(run)
            if self._continues(run):  # it was not finished in the meantime
                self._resumed = True
                return run, lock
            lock.release()
        number = int(runs[0].name) if runs else 0
        while True:
            number += 1
            folder = self.place / f"{number:03d}"
            self._note_new_folders(folder)
            make_folder(self.place)
            try:
                folder.mkdir()
                lock = _lock(folder)
            except FileExistsError:
                continue  # another command was faster
            except OSError as error:
                raise cannot_write(folder, error) from None
            return folder, lock

    def _claim_exact(self) -> tuple[Path, FileLock]:
        folder = self.place
        self._note_new_folders(folder)
        lock, mark = _lock(make_folder(folder)), _Mark.read(folder)
        self._resumed = not self._force and self._continues(folder)
        if self._resumed or _is_empty(folder) or (mark and self._force):
            return folder, lock
        lock.release()
        if mark is None:
            raise ConfigError(
                f"{folder}: holds files that no gossamer command left there; name another folder"
            )
        raise ConfigError(
            f"{folder}: holds the results of gossamer {mark.command}; name another folder, or replace them "
            "with --force"
        )

    def _continues(self, run: Path) -> bool:
        """Return True if this run would go on with that one."""
        return self._key is not None and _Mark.read(run) == _Mark(self._command, self._key, False)

    def _write_mark(self, *, finished: bool) -> None:
        write_json(self.folder / _MARK, asdict(_Mark(self._command, self._key, finished)))

    def _note_new_folders(self, folder: Path) -> None:
        """Note which folders are to be made, so that they can be removed again."""
        self._new_folders = [each for each in (folder, *folder.parents) if not each.exists()]

    def _give_back(self, folder: Path) -> None:
        """Remove a folder that was made for a run which did not begin, and empty ones above it."""
        if folder in self._new_folders:
            shutil.rmtree(folder, ignore_errors=True)
        for each in self._new_folders:
            with suppress(OSError):
                each.rmdir()


def find_run(folder: Path) -> Path:
    """Return a run's folder: `folder` itself, or the latest run in it if there are several."""
    if (folder / _MARK).exists():
        return folder
    latest = folder / _LATEST
    if latest.is_dir():
        return latest
    with suppress(OSError, ValueError):
        # Without symlinks, `latest` is a file that holds the folder's name.
        named = folder / latest.read_text("utf-8").strip()
        if named.parent == folder and named.is_dir():
            return named
    return next(iter(_numbered(folder)), folder)


def _numbered(place: Path) -> list[Path]:
    """Folders of runs, the newest first."""
    try:
        found = [each for each in place.iterdir() if re.fullmatch(r"\d{3,}", each.name)]
    except OSError:
        return []
    return sorted((each for each in found if each.is_dir()), key=lambda each: -int(each.name))


def _is_empty(folder: Path) -> bool:
    return all(each.name == _LOCK for each in folder.iterdir())


def _lock(folder: Path) -> FileLock:
    lock = FileLock(folder / _LOCK)
    try:
        taken = lock.acquire()
    except OSError as error:
        raise cannot_write(folder, error) from None
    if not taken:
        raise ConfigError(
            f"{folder}: another gossamer command is writing its results there; wait until it has ended, or "
            "name another folder with --out"
        )
    return lock


def _set_latest(link: Path, name: str) -> None:
    """Make `link` a symlink to `name` beside it, atomically; without symlinks, a file that names it."""
    # Only the command that holds this folder's lock uses this name.
    part = link.with_name(f".{link.name}-{name}")
    try:
        part.unlink(missing_ok=True)
        part.symlink_to(name, target_is_directory=True)
        part.replace(link)
    except (OSError, NotImplementedError):
        with suppress(OSError):
            part.unlink(missing_ok=True)
        write_bytes(link, name.encode())


def require_folder(path: Path) -> Path:
    """`path`, if it is a folder to write into or can become one; nothing is made yet.

    Commands call this before they compute, so that no results are lost for want of a folder. Raises
    ConfigError.
    """
    nearest = next(one for one in (path, *path.parents) if os.path.exists(one))
    if not nearest.is_dir():
        raise ConfigError(f"{path}: cannot be a folder: {nearest} is a file; name another")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"{path}: the folder {nearest} cannot be written to; name another")
    return path


def make_folder(path: Path) -> Path:
    """`path`, a folder to write into, made if it is not there; raises as `require_folder` does."""
    try:
        require_folder(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(path, error) from None
    return path


# --- files ------------------------------------------------------------------------------------------


def cannot_write(path: Path, error: OSError | SafetensorError) -> ConfigError:
    """What to raise for a file that cannot be written: its name, the reason, the remedy."""
    number = error.errno if isinstance(error, OSError) else None
    if number is None and (written := re.search(r"\(os error (\d+)\)", str(error))):
        number = int(written[1])  # safetensors raises errors of its own
    why = os.strerror(number) if number else str(error)
    if number in (errno.ENOSPC, errno.EDQUOT):
        why = "no space left on its disk; free some and run again"
    elif number == errno.EFBIG:
        why = "it would exceed the limit on file sizes; raise it (ulimit -f) and run again"
    return ConfigError(f"{path}: cannot be written: {why}")


class RecordFile:
    """Appends records to a JSONL file, each at once and whole. What cannot be written is a ConfigError."""

    def __init__(self, path: Path, *, fresh: bool = True):
        from ..peer import (
            RecordFile as TolerantRecordFile,  # loads pydantic, which help does not need
        )

        self._path = path
        make_folder(path.parent)
        self._file = TolerantRecordFile(path, fresh=fresh)
        self._raise_failure()

    def __enter__(self) -> Self:
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)

    def write(self, record: Record) -> None:
        """Append one record."""
        self._file.write(record)
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._file.failure is not None:
            raise cannot_write(self._path, self._file.failure) from None


def read_records(path: Path) -> Iterator[Record]:
    """The records of a JSONL file; a line that was cut off while being written is passed over."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(record, dict):
                yield record


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the name of a file to write in the place of `path`, which it becomes when the block ends.

    If the block fails, `path` is as it was. Raises ConfigError for what cannot be written.
    """
    try:
        with files.replacing(path, sync=True) as part:
            yield part
    except (OSError, SafetensorError) as error:
        raise cannot_write(path, error) from None


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file, whole or not at all."""
    with replacing(path) as part:
        part.write_bytes(data)


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON, whole or not at all."""
    write_bytes(path, (json.dumps(value, indent=2) + "\n").encode())


def write_csv(path: Path, header: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    """Write a table, whole or not at all; cells with a comma are quoted."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(header)
    writer.writerows(rows)
    write_bytes(path, text.getvalue().encode())
