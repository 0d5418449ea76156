"""Configs: what is read, and one line that names file and key for what is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gossamer.experiments.config.tables import Config, ConfigError, load_config, parse_config

CONFIGS = Path(__file__).parents[2] / "experiments" / "configs"
EXAMPLES = sorted(set(CONFIGS.glob("*.toml")) - set(CONFIGS.glob("compare*.toml")))


def test_the_resolved_config_reads_back_the_same() -> None:
    config = parse_config({"tasks": [{"kind": "swap", "labels": [8, 9], "peers": 3}]})
    assert parse_config(config.model_dump(mode="json")) == config


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_valid(path: Path) -> None:
    assert load_config(path).name == path.stem


def test_there_are_examples() -> None:
    assert {path.stem for path in EXAMPLES} >= {"digits", "groups"}


def test_configs_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Config().seed = 3  # pyright: ignore


@pytest.mark.parametrize(
    ("table", "text"),
    [
        # a misspelt key names the nearest one, at every depth
        ({"roundz": 3}, "unknown key 'roundz'; did you mean 'rounds'?"),
        (
            {"training": {"stretch": 5}},
            "unknown key 'training.stretch'; it is called local_samples",
        ),
        ({"training": {"lr": 0.1}}, "unknown key 'training.lr'; did you mean 'rate'?"),
        ({"data": {"sampels": 3}}, "unknown key 'data.sampels'; did you mean 'samples'?"),
        (
            {"models": [{"nme": "a", "layout": "1"}]},
            "unknown key 'models.0.nme'; did you mean 'name'?",
        ),
        (
            {"models": [{"name": "a", "layout": "1", "qqq": 1}]},
            "unknown key 'models.0.qqq'; known keys are name, layout, share, peers",
        ),
        # wrong types and values
        ({"peers": "16"}, "key 'peers': input should be a valid integer, not '16'"),
        ({"peers": True}, "key 'peers': input should be a valid integer, not True"),
        ({"peers": 0}, "key 'peers': input should be greater than or equal to 1, not 0"),
        (
            {"training": {"rate": -1}},
            "key 'training.rate': input should be greater than 0, not -1",
        ),
        ({"seed": -1}, "key 'seed': input should be greater than or equal to 0, not -1"),
        *(
            ({table: {key: value}}, f"key '{table}.{key}': input should be a finite number, not")
            for table, key in (
                ("data", "alpha"),
                ("network", "gain"),
                ("network", "shift"),
                ("training", "rate"),
            )
            for value in (float("inf"), float("nan"))
        ),
        ({"data": {"samples": "many"}}, "key 'data.samples': input should be a valid integer, not"),
        (
            {"data": {"partition": "x"}},
            "key 'data.partition': input should be 'successive', 'iid', 'dirichlet', 'shards' or "
            "'natural', not 'x'",
        ),
        (
            {"tasks": [{"kind": "swap", "labels": [1, 2, 3]}]},
            "key 'tasks.0.labels': tuple should have at most 2 items",
        ),
        ({"data": 3}, "key 'data': should be a table, not 3"),
        (
            {"models": {"name": "a"}},
            "key 'models': is a list of tables: write [[models]], not [models]",
        ),
        ({"models": [{"layout": "1-1"}]}, "key 'models.0.name': is missing"),
        ({"models": [{"name": "g"}]}, "key 'models.0': needs a layout or a share, and not both"),
        ({"topology": 3}, "key 'topology': should be a graph's name or a table, not 3"),
    ],
)
def test_mistakes_name_file_and_key(table: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config(table, "swarm.toml")
    assert str(error.value).startswith(f"swarm.toml: {text}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("table", ["tasks", "models"])
@pytest.mark.parametrize("who", ["everyone", -1, [0, -1], [0, "one"], True, 1.5])
def test_who_is_one_error_without_the_alternatives_in_its_path(table: str, who: Any) -> None:
    entry = {"kind": "cycle"} if table == "tasks" else {"name": "g", "layout": "64-1-1"}
    with pytest.raises(ConfigError) as error:
        parse_config({table: [entry | {"peers": who}]}, "f")
    assert str(error.value) == (
        f"f: key '{table}.0.peers': should be a number of peers, a list of peers' numbers, or 'all', "
        f"not {who!r}"
    )


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: there is no such file$"):
        load_config(tmp_path / "none.toml")


def test_a_folder_is_no_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"peers = = 3", r"swarm\.toml: is not TOML: .*line 1"),
        (b"\xff\xfe", r"swarm\.toml: cannot be read"),
    ],
)
def test_what_is_not_toml_says_where(tmp_path: Path, content: bytes, text: str) -> None:
    path = tmp_path / "swarm.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=text):
        load_config(path)
