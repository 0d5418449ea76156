"""Comparisons: TOML read into a typed, frozen object; a mistake is one line that names file and key."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gossamer.names import hint

from ...models import ImageNetworkName
from ..config.reading import require_table
from ..config.tables import ConfigError, Count, Name, Positive, first_mistake, read_table
from .method import Method
from .registry import METHODS, find, require_serverless


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Data(_Table):
    """Which samples there are."""

    set: str = "digits"
    """A data set's name (`gossamer data` lists them), or a function of yours, `my_module:make_data`, that
    returns a `gossamer.experiments.data.Dataset`; its file stands beside this one."""
    samples: Count | None = None
    """Training samples of all clients together, drawn at random; all that there are if left out."""
    test: Count | None = None
    """Test samples, drawn at random; all that there are if left out."""
    tested: Literal["own", "common"] = "own"
    """own: a client is tested on classes in the shares that it has in training, common: on all of them.
    Methods with one network for all do well on common tests, personal ones on clients' own."""


class Split(_Table):
    """Who holds which samples, and what labels mean to whom."""

    kind: Literal["iid", "dirichlet", "shards", "successive", "natural"] = "dirichlet"
    """How samples are dealt out. `natural` gives each client one writer, subject or node."""
    alpha: Positive = 0.5
    """Dirichlet's concentration: lower is more skewed."""
    shards: Count = 2
    """Shards per client: fewer is more skewed."""
    minimum: Count = 10
    """Dirichlet: samples that even the poorest client has."""
    tasks: Literal["same", "swaps"] = "same"
    """swaps: every client has two labels of its own exchanged, so that no network suits all."""


class Network(_Table):
    """The network that every client trains; all start from the same values."""

    kind: ImageNetworkName = "mlp"
    """A perceptron, or a ready network for images, whose inputs and outputs follow the data."""
    layout: str = "64=32=10"
    """mlp: its cells, as in `784=300=100=10`."""
    activation: Literal["sigmoid", "tanh", "relu", "prelu"] = "relu"
    """mlp: of its hidden cells."""
    options: dict[str, Any] = {}
    """The others: their sizes, as in `{widths = [16, 32], hidden = 64}`; see gossamer.models.READY."""


class Training(_Table):
    """How a client learns between two exchanges, by plain SGD on the mean loss of a batch."""

    epochs: Count = 1
    """E: passes over its own samples in a round."""
    batch: Count = 10
    """B: samples per gradient step."""
    rate: Positive = 0.1
    """η: the learning rate."""
    loss: Literal["cross-entropy", "squared"] = "cross-entropy"


SWARMS = ("models", "tasks", "gossip", "trust", "time", "sweep", "fednp")
"""Keys that only a swarm's config has."""


class Comparison(_Table):
    """Several methods on the same clients, with the same seeds, for the same number of rounds."""

    name: Name = "compare"
    peers: Annotated[int, Field(ge=2)] = 10
    """Clients."""
    rounds: Count = 30
    seeds: Count = 3
    """Runs of every method: the split, the starting values and the order of samples follow the seed."""
    seed: int = 0
    """The first of them."""
    test_every: Count = 1
    """Rounds between two tests; the start and the last round are always tested."""
    server: bool = True
    """Whether there is a server. Without one, methods that need it are refused."""
    data: Data = Data()
    split: Split = Split()
    network: Network = Network()
    training: Training = Training()
    methods: dict[str, dict[str, Any]] = {"fedavg": {}, "gossamer": {}, "local": {}}
    """A table for every line of the picture. Its name is the method's, or `method` inside it is:
    `[methods.strong-prox]` with `method = "fedprox"` and `mu = 1.0`."""

    def method(self, name: str) -> Method:
        """The method of one table, with its knobs."""
        knobs = {key: value for key, value in self.methods[name].items() if key != "method"}
        kind = find(self.kind(name))
        try:
            return kind.model_validate(knobs)
        except ValidationError as error:
            raise ConfigError(f"in [methods.{name}]: {first_mistake(error, kind)}") from None

    def kind(self, name: str) -> str:
        """The name under which a table's method is registered."""
        return str(self.methods[name].get("method", name))


def load_comparison(path: str | Path) -> Comparison:
    """Read a comparison's file."""
    return parse_comparison(read_table(path), str(path))


def parse_comparison(table: dict[str, Any], source: str = "config") -> Comparison:
    """Check a table that was read or written by hand; `source` starts every error."""
    require_table(table, source, "load_comparison")
    if "methods" not in table and (foreign := [key for key in SWARMS if key in table]):
        raise ConfigError(
            f"{source}: has {foreign[0]!r}, so it is a swarm's config: run it with gossamer simulate or "
            "gossamer swarm. A comparison has a table [methods.NAME] for each method"
        )
    try:
        found = Comparison.model_validate(table)
    except ValidationError as error:
        raise ConfigError(f"{source}: {first_mistake(error, Comparison)}") from None
    if not found.methods:
        raise ConfigError(
            f"{source}: key 'methods': names none; write a table such as [methods.fedavg] for each of "
            f"those to compare. There are {', '.join(METHODS)}"
        )
    try:
        for name in found.methods:
            found.method(name)
        if not found.server:
            require_serverless({name: found.kind(name) for name in found.methods})
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    return found


def choose(config: Comparison, only: list[str] | None) -> Comparison:
    """The comparison with some of its methods left out."""
    for name in only or []:
        if name not in config.methods:
            near = hint(name, config.methods, are="there are")
            raise ConfigError(f"--only {name}: the config has no such method; {near}")
    if not only:
        return config
    kept = {name: knobs for name, knobs in config.methods.items() if name in only}
    return config.model_copy(update={"methods": kept})
