"""Configs: TOML read into typed, frozen objects; a mistake is one line that names file and key."""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

Count = Annotated[int, Field(ge=1)]
# A number takes the first so many peers, a list names them, "all" is everybody.
Who = Annotated[int, Field(ge=0)] | list[Annotated[int, Field(ge=0)]] | Literal["all"]


class ConfigError(ValueError):
    """A config that cannot be used; the text names the file and the key."""


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Data(_Table):
    """Which samples there are, and who holds them."""

    set: str = "digits"
    """A data set's name (`gossamer data` lists them), or `sparse` for the paper's binary vectors."""
    partition: Literal["successive", "iid", "dirichlet", "shards", "natural"] = "successive"
    """How samples are dealt out. `natural` gives each peer one writer, subject or node."""
    samples: Count | None = None
    """Training samples per peer; all that there are, dealt evenly, if left out."""
    test: Count | None = None
    """Test samples: the first so many of the test set, or, where there is none, per peer."""
    alpha: Annotated[float, Field(gt=0)] = 0.5
    """Dirichlet's concentration: lower is more skewed."""
    shards: Count = 2
    """Shards per peer: fewer is more skewed."""


class TaskEntry(_Table):
    """Makes some peers' labels mean something else. Entries that name the same peer add up."""

    kind: Literal["swap", "cycle", "symmetric", "swaps", "modified"]
    """swap: two labels change places. cycle: the last `last` labels move round. symmetric: all
    permutations of the last `last` labels, dealt in turn. swaps: every peer swaps a pair of its own.
    modified: another target for one block of the `sparse` vectors."""
    labels: tuple[int, int] | None = None
    last: int = 3
    peers: Who = "all"


class Network(_Table):
    """The network that every peer trains."""

    layout: str = "64=32=10"
    """`784=300=100=10` for a perceptron, `50<>400` for the associative network."""
    activation: Literal["sigmoid", "tanh", "relu", "prelu"] = "sigmoid"
    output: Literal["sigmoid", "tanh", "relu", "none"] | None = None
    """The last layer's activation; the hidden one's if left out."""
    start: Literal["normal", "uniform"] | None = None
    """The distribution of starting weights; normal for a perceptron, uniform for associative."""
    gain: Annotated[float, Field(gt=0)] = 1.0
    """Their spread, in units of 1/√fan_in for a perceptron."""
    shift: float = 0.0
    """Their mean."""
    equal_starts: bool = True
    """Whether a shared slice starts from the same values on every peer."""


class Model(_Table):
    """A partial model: its name, its slice, who implements it, what it depends on.

    `{peer}` and `{task}` in the name stand for the peer's number and its task's name, so one entry
    can make a model per group. Cells that no model claims stay the peer's own.
    """

    name: str
    layout: str
    peers: Who = "all"
    depends: list[str] = []


class Training(_Table):
    """How a peer learns between two averagings."""

    stretch: Count = 100
    """Samples between two averagings: what the paper calls the mini-batch size."""
    batch: Count = 10
    """Samples per gradient step."""
    reduction: Literal["sum", "mean"] = "sum"
    rate: Annotated[float, Field(gt=0)] = 0.1
    optimizer: Literal["sgd", "momentum", "adam"] = "sgd"
    loss: Literal["squared", "cross-entropy"] = "squared"


class Config(_Table):
    """A whole swarm: peers, their data and tasks, the network and its partial models."""

    name: str = "swarm"
    seed: int = 0
    peers: Count = 16
    rounds: Count = 30
    """How often peers average."""
    every: Count = 1
    """Stretches trained between two averagings."""
    test_every: Count = 1
    """Rounds between two tests; raise it when testing takes longer than training."""
    cross: bool = False
    """Average weights between unrelated models too (the paper's Algorithm 2)."""
    weights: Literal["peers", "samples"] = "peers"
    """Whether every peer counts the same, or by its number of samples."""
    data: Data = Data()
    tasks: list[TaskEntry] = []
    network: Network = Network()
    models: list[Model] = []
    training: Training = Training()


def load_config(path: str | Path) -> Config:
    """Read a config file."""
    path = Path(path)
    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: is not TOML: {error}") from None
    return parse_config(table, str(path))


def parse_config(table: dict[str, Any], source: str = "config") -> Config:
    """Check a table that was read or written by hand; `source` starts every error."""
    try:
        return Config.model_validate(table)
    except ValidationError as error:
        raise ConfigError(f"{source}: {_first_mistake(error)}") from None


def _first_mistake(error: ValidationError) -> str:
    mistake = error.errors()[0]
    place = [str(step) for step in mistake["loc"] if not _is_union_branch(step)]
    key = ".".join(place)
    if mistake["type"] == "extra_forbidden":
        known = _known_keys(place[:-1])
        near = difflib.get_close_matches(place[-1], known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys are {', '.join(known)}"
        return f"unknown key {key!r}; {hint}"
    text = mistake["msg"][0].lower() + mistake["msg"][1:]
    return f"key {key!r}: {text}, not {mistake['input']!r}"


def _is_union_branch(step: object) -> bool:
    """Pydantic adds the name of the alternative it tried to the path; users never wrote it."""
    return isinstance(step, str) and ("[" in step or step in {"int", "constrained-int", "none"})


def _known_keys(place: list[str]) -> list[str]:
    table: type[BaseModel] = Config
    for step in place:
        if step.isdigit():
            continue
        annotation = table.model_fields[step].annotation
        inner = [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type)]
        table = next(kind for kind in inner if issubclass(kind, BaseModel))
    return list(table.model_fields)
