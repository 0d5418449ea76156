"""Results on disk stay complete if the command that writes them is interrupted or the disk is full."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from disk_kit import largest_file

from gossamer.experiments.config.tables import ConfigError
from gossamer.experiments.results import (
    RecordFile,
    Results,
    atomic_path,
    find_run,
    read_records,
    write_bytes,
    write_csv,
    write_json,
)

needs_full_device = pytest.mark.skipif(
    not Path("/dev/full").exists(), reason="needs a device that is always full"
)


def test_records_are_on_disk_as_soon_as_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "runs.jsonl"
    with RecordFile(path) as file:
        for count in range(3):
            file.write({"count": count, "name": "größer, [−1, 1]"})
            assert [record["count"] for record in read_records(path)] == list(range(count + 1))
    assert next(read_records(path))["name"] == "größer, [−1, 1]"


def test_fresh_deletes_old_records_and_otherwise_records_are_appended(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    for fresh, expected in ((True, [1]), (False, [1, 1]), (True, [1])):
        with RecordFile(path, fresh=fresh) as file:
            file.write({"a": 1})
        assert [record["a"] for record in read_records(path)] == expected


def test_an_incomplete_line_is_skipped_and_the_next_record_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text('{"a": 1}\n{"a": 2')
    assert list(read_records(path)) == [{"a": 1}]
    with RecordFile(path, fresh=False) as file:
        file.write({"a": 3})
    assert list(read_records(path)) == [{"a": 1}, {"a": 3}]


def test_lines_that_are_not_records_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text('3\n\nnull\n{"a": 1}\n')
    assert list(read_records(path)) == [{"a": 1}]


def test_a_missing_file_has_no_records(tmp_path: Path) -> None:
    assert list(read_records(tmp_path / "none.jsonl")) == []


def test_a_file_that_was_cut_after_its_run_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Results(tmp_path, "simulate").run_folder() as folder:
        path = folder / "metrics.jsonl"
        path.write_text('{"a": 1}\n{"a": ')
        assert list(read_records(path)) == [
            {"a": 1}
        ]  # the run is not finished: it may write the rest
        assert not caplog.messages
    assert list(read_records(path)) == [{"a": 1}]
    assert list(read_records(path)) == [{"a": 1}]
    (message,) = caplog.messages
    assert message.startswith(f"{path}: was cut after the run had finished")
    assert "1 records were read" in message


def test_the_error_names_a_folder_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(ConfigError, match=r"taken is a file"):
        RecordFile(tmp_path / "taken" / "runs.jsonl")


def test_json_is_written_atomically_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]


def test_tables_quote_commas(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    write_csv(path, ["line", "x"], [["[−1, 1], own", 3]])
    with path.open(newline="", encoding="utf-8") as file:
        assert list(csv.reader(file)) == [["line", "x"], ["[−1, 1], own", "3"]]


@pytest.mark.parametrize("text", [b'{"a": 1}\n{"a": 2', b'{"a": 1}\n\x00\x00\xff\xfe'])
def test_an_incomplete_last_line_is_skipped_whatever_its_bytes(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_bytes(text)
    assert list(read_records(path)) == [{"a": 1}]


# --- no space ---------------------------------------------------------------------------------------


@needs_full_device
def test_the_error_of_a_full_disk_is_one_line_with_the_remedy(tmp_path: Path) -> None:
    message = r": cannot be written: no space left on its disk; free some and run again$"
    with (
        RecordFile(Path("/dev/full"), fresh=False) as file,
        pytest.raises(ConfigError, match=message),
    ):
        file.write({"a": 1})
    path = tmp_path / "table.csv"
    write_csv(path, ["a"], [[1]])
    path.with_name("table.csv.part").symlink_to("/dev/full")
    with pytest.raises(ConfigError, match=rf"{path}{message}"):
        write_csv(path, ["a"], [[2]])
    assert path.read_bytes() == b"a\r\n1\r\n"
    assert [path.name for path in tmp_path.iterdir()] == ["table.csv"]


def test_a_file_that_exceeds_the_size_limit_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "figure.png"
    write_bytes(path, b"old")
    with largest_file(100), pytest.raises(ConfigError, match="limit on file sizes"):
        write_bytes(path, b"new" * 100)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_record_that_exceeds_the_size_limit_leaves_complete_lines(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    with RecordFile(path) as file:
        file.write({"a": 1})
        with largest_file(15), pytest.raises(ConfigError, match=r"runs\.jsonl: cannot be written"):
            file.write({"a": "long" * 10})
    assert path.read_text() == '{"a": 1}\n'


def test_safetensors_errors_are_reported_like_os_errors(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    path = tmp_path / "network.safetensors"
    with (
        largest_file(100),
        pytest.raises(ConfigError, match="limit on file sizes"),
        atomic_path(path) as part,
    ):
        save_file({"a": torch.zeros(1000)}, part)
    assert list(tmp_path.iterdir()) == []


# --- folders ----------------------------------------------------------------------------------------


def run_command(
    results: Results, text: str, key: str | None = None, error: type[BaseException] | None = None
) -> Path:
    """Run a command that writes one file, and ends with an error if one is given."""
    with suppress(*[error] if error else []), results.opened(key) as folder:
        results.begin()
        write_bytes(folder / "result", text.encode())
        if error is not None:
            raise error
    return folder


def interrupt(results: Results, text: str, key: str | None = None) -> Path:
    return run_command(results, text, key, KeyboardInterrupt)


def fail_before_begin(results: Results) -> None:
    """Run a command that finds an error in its config before it calls `begin`."""
    with suppress(ConfigError), results.opened() as folder:
        (folder / "trust").mkdir()
        raise ConfigError("a mistake")


def test_every_run_has_its_own_folder_and_latest_points_to_the_last_one(tmp_path: Path) -> None:
    base = tmp_path / "results" / "digits"
    for number in (1, 2, 3):
        folder = run_command(Results(base, "simulate"), f"{number}")
        assert folder == base / f"{number:03d}"
        assert (base / "latest" / "result").read_text() == f"{number}"
    assert [(base / f"00{number}" / "result").read_text() for number in (1, 2, 3)] == list("123")
    assert {path.name for path in folder.iterdir()} == {"result", "run.json"}


def test_commands_that_start_together_get_different_folders(tmp_path: Path) -> None:
    def run(number: int) -> Path:
        return run_command(Results(tmp_path / "x", "simulate"), f"{number}")

    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(run, range(24)))
    assert {folder.name for folder in folders} == {f"{number:03d}" for number in range(1, 25)}
    assert [int((folder / "result").read_text()) for folder in folders] == list(range(24))


def test_a_command_gets_the_next_number_while_another_runs(tmp_path: Path) -> None:
    one, other = Results(tmp_path, "simulate"), Results(tmp_path, "simulate")
    with one.opened() as first, other.opened() as second:
        assert (first.name, second.name) == ("001", "002")


def test_force_replaces_the_newest(tmp_path: Path) -> None:
    run_command(Results(tmp_path, "simulate"), "1")
    second = run_command(Results(tmp_path, "simulate"), "2")
    (second / "network").mkdir()
    (second / "network" / "a").write_text("old")
    forced = Results(tmp_path, "simulate", force=True)
    with forced.opened() as folder:
        assert folder == second
        assert (folder / "result").read_text() == "2"  # kept until `begin`
        forced.begin()
        assert {path.name for path in folder.iterdir()} == {"run.json", ".lock"}
    assert (tmp_path / "001" / "result").read_text() == "1"


def test_force_creates_the_first_folder_if_there_is_none(tmp_path: Path) -> None:
    assert run_command(Results(tmp_path, "simulate", force=True), "1").name == "001"


def test_force_never_empties_a_folder_that_is_not_a_run(tmp_path: Path) -> None:
    (tmp_path / "2024").mkdir()
    (tmp_path / "2024" / "diary").write_text("dear")
    assert run_command(Results(tmp_path, "simulate", force=True), "1").name == "2025"
    assert (tmp_path / "2024" / "diary").read_text() == "dear"


def test_force_keeps_files_that_this_run_wrote_before_begin(tmp_path: Path) -> None:
    folder = run_command(Results(tmp_path, "swarm"), "1")
    forced = Results(tmp_path, "swarm", force=True)
    with forced.opened():
        (folder / "trust").mkdir()
        forced.begin(keep=("trust",))
    assert {path.name for path in folder.iterdir()} == {"run.json", "trust"}


def test_a_run_that_does_not_begin_leaves_no_trace(tmp_path: Path) -> None:
    base = tmp_path / "results" / "digits"
    fail_before_begin(Results(base, "simulate"))
    assert list(tmp_path.iterdir()) == []
    run_command(Results(base, "simulate"), "1")
    for force in (False, True):
        fail_before_begin(Results(base, "simulate", force=force))
    assert {path.name for path in base.iterdir()} == {"001", "latest"}
    assert (base / "latest" / "result").read_text() == "1"


@pytest.mark.parametrize("exact", [False, True])
def test_a_second_command_is_refused_before_it_deletes_anything(
    tmp_path: Path, exact: bool
) -> None:
    first = Results(tmp_path / "x", "swarm", exact=exact)
    with first.opened() as folder:
        first.begin()
        (folder / "a.checkpoint").write_text("mine")
        second = Results(tmp_path / "x", "swarm", exact=exact, force=True)
        message = "another gossamer command is writing its results there; wait"
        with pytest.raises(ConfigError, match=message), second.opened():
            second.begin()
        assert (folder / "a.checkpoint").read_text() == "mine"
    assert run_command(second, "2") == folder


def test_a_killed_run_holds_no_lock(tmp_path: Path) -> None:
    code = (
        "import os, sys, pathlib\n"
        "from gossamer.experiments.results import Results\n"
        "results = Results(pathlib.Path(sys.argv[1]), 'sweep')\n"
        "with results.opened('key'):\n"
        "    results.begin()\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert done.returncode == -9
    assert run_command(Results(tmp_path, "sweep"), "1", "key").name == "001"


def test_an_unfinished_run_of_the_same_key_is_resumed(tmp_path: Path) -> None:
    assert interrupt(Results(tmp_path, "sweep"), "half", "a").name == "001"
    assert run_command(Results(tmp_path, "sweep"), "other", "b").name == "002"
    again = Results(tmp_path, "sweep")
    with again.opened("a") as folder:
        again.begin()
        assert folder.name == "001"
        assert (folder / "result").read_text() == "half"
    assert os.readlink(tmp_path / "latest") == "001"
    assert (
        run_command(Results(tmp_path, "sweep"), "whole", "a").name == "003"
    )  # 001 is finished by now


def test_a_run_without_a_key_or_of_another_command_is_not_resumed(tmp_path: Path) -> None:
    interrupt(Results(tmp_path, "sweep"), "half", "a")
    assert run_command(Results(tmp_path, "compare"), "x", "a").name == "002"
    interrupt(Results(tmp_path, "simulate"), "half")
    assert run_command(Results(tmp_path, "simulate"), "x").name == "004"


def test_force_starts_a_resumable_run_anew(tmp_path: Path) -> None:
    interrupt(Results(tmp_path, "sweep"), "half", "a")
    forced = Results(tmp_path, "sweep", force=True)
    with forced.opened("a") as folder:
        forced.begin()
        assert not (folder / "result").exists()
        assert forced.earlier_runs() == []


def test_a_run_is_not_resumed_while_another_command_runs_it(tmp_path: Path) -> None:
    with ExitStack() as stack:
        first = Results(tmp_path, "sweep")
        stack.enter_context(first.opened("a"))
        first.begin()
        with pytest.raises(ConfigError, match="another gossamer command"):
            run_command(Results(tmp_path, "sweep"), "x", "a")


def test_earlier_runs_are_listed_newest_first(tmp_path: Path) -> None:
    for number in range(3):
        run_command(Results(tmp_path, "sweep"), f"{number}")
    results = Results(tmp_path, "sweep")
    with results.opened():
        assert [path.name for path in results.earlier_runs()] == ["003", "002", "001"]


# --- a folder that the user named -------------------------------------------------------------------


def test_an_exact_folder_gets_no_sub_folder(tmp_path: Path) -> None:
    base = tmp_path / "deep" / "out"
    assert run_command(Results(base, "simulate", exact=True), "1") == base
    assert {path.name for path in base.iterdir()} == {"result", "run.json"}


def test_results_in_an_exact_folder_are_replaced_only_with_force(tmp_path: Path) -> None:
    base = tmp_path / "out"
    run_command(Results(base, "simulate", exact=True), "1")
    message = r"out: holds the results of gossamer simulate; name another folder, or .* --force"
    with pytest.raises(ConfigError, match=message):
        run_command(Results(base, "sweep", exact=True), "2")
    assert (base / "result").read_text() == "1"
    run_command(Results(base, "sweep", exact=True, force=True), "3")
    assert (base / "result").read_text() == "3"


@pytest.mark.parametrize("force", [False, True])
def test_a_folder_with_other_files_is_refused(tmp_path: Path, force: bool) -> None:
    (tmp_path / "swarm.toml").write_text("peers = 3")
    with pytest.raises(ConfigError, match="holds files that no gossamer command wrote"):
        run_command(Results(tmp_path, "simulate", exact=True, force=force), "1")
    assert [path.name for path in tmp_path.iterdir()] == ["swarm.toml"]


def test_an_unfinished_run_in_an_exact_folder_is_resumed(tmp_path: Path) -> None:
    base = tmp_path / "out"
    interrupt(Results(base, "sweep", exact=True), "half", "a")
    with pytest.raises(ConfigError, match="holds the results of gossamer sweep"):
        run_command(Results(base, "sweep", exact=True), "x", "b")
    results = Results(base, "sweep", exact=True)
    with results.opened("a") as folder:
        results.begin()
        assert (folder / "result").read_text() == "half"
    with pytest.raises(ConfigError, match="holds the results of gossamer sweep"):
        run_command(Results(base, "sweep", exact=True), "x", "a")  # finished by now


# --- readers ----------------------------------------------------------------------------------------


def test_find_run_accepts_a_run_or_the_folder_of_several_runs(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    assert find_run(plain) == plain
    base = tmp_path / "digits"
    first = run_command(Results(base, "simulate"), "1")
    second = run_command(Results(base, "simulate"), "2")
    assert find_run(first) == first
    assert (find_run(base) / "result").read_text() == "2"
    (base / "latest").unlink()
    (base / "latest").write_text("001")  # as on file systems without symlinks
    assert find_run(base) == first
    (base / "latest").write_text("../..")
    assert find_run(base) == second
    (base / "latest").unlink()
    assert find_run(base) == second
    exact = run_command(Results(tmp_path / "out", "simulate", exact=True), "1")
    assert find_run(exact) == exact


def test_without_symlinks_latest_is_a_file_with_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: object, **__: object) -> None:
        raise OSError("a privilege is not held")

    monkeypatch.setattr(Path, "symlink_to", denied)
    run_command(Results(tmp_path, "simulate"), "1")
    run_command(Results(tmp_path, "simulate"), "2")
    assert (tmp_path / "latest").read_text() == "002"
    assert find_run(tmp_path) == tmp_path / "002"
