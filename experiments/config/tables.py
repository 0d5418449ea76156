"""Configs: TOML read into typed, frozen objects; a mistake is one line that names file and key."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from gossamer.names import hint

from ...gossip import (
    Count,
    GossipSettings,
    LinkSettings,
    Positive,
    SettingsTable,
    check_name,
    checked,
    either,
    sentence,
)
from ...models import ReadyName
from ...models.fednp import FedNPOptions
from ...peer import (
    CredentialSettings,
    LifeSettings,
    ProtectionSettings,
    ScheduleSettings,
    TrustKind,
)
from ..errors import ConfigError


def _check_duration(value: float | str | dict[str, Any]) -> None:
    from ..arena import TimeError, parse

    try:
        parse(value, "it")
    except TimeError as error:
        raise ValueError(str(error).removeprefix("it: ").removeprefix("it ")) from None


def _check_folder(name: str) -> None:
    """A config's name is a folder's and a swarm's: it may neither leave the one nor break the other."""
    check_name("config's own", name)
    if not name.strip("."):
        raise ValueError(
            f"the config's own name {name!r} is no folder's: use a letter or digit too"
        )


Name = Annotated[str, checked(_check_folder)]
Chance = Annotated[float, Field(ge=0, le=1)]
# A number takes the first so many peers, a list names them, "all" is everybody.
Who = Annotated[
    Annotated[int, Field(ge=0)] | list[Annotated[int, Field(ge=0)]] | Literal["all"],
    either("should be a number of peers, a list of peers' numbers, or 'all'"),
]
Topology = Annotated[str | dict[str, Any] | None, either("should be a graph's name or a table")]
# The part of a network's cells that a model has.
Share = Annotated[
    Chance | dict[str, Chance] | None,
    either("should be a fraction from 0 to 1, or a table of them by part"),
]
# Seconds that something takes: a number, or a distribution's name with its parameters.
Duration = Annotated[
    float | str | dict[str, Any],
    either("should be a number of seconds, a distribution such as 'exponential:1', or a table"),
    checked(_check_duration),
]


class Trust(ProtectionSettings):
    """Whom live peers believe. `trust = "swarm"` is short for a table with that kind alone."""

    kind: TrustKind = "none"
    """none: whoever reaches the broker can read and forge. swarm: peers have keys and invitations, and
    what they send is sealed; `gossamer swarm` makes throw-away ones for its own peers. The peer's setting
    `trust`."""


class PeerTrust(Trust, CredentialSettings):
    """The same in a device's file, with the device's key and invitation: paths relative to that file.
    With an identity, `kind` is "swarm" unless it says otherwise."""


def named_kind(value: Any) -> Any:
    """Let the kind's name stand for a table."""
    return {"kind": value} if isinstance(value, str) else value


TrustTable = Annotated[Trust, BeforeValidator(named_kind)]
PeerTrustTable = Annotated[PeerTrust, BeforeValidator(named_kind)]


LAYOUT = "64=32=10"
"""The network of a config that does not say."""


class Data(SettingsTable):
    """Which samples there are, and who holds them."""

    set: str = "digits"
    """A data set's name (`gossamer data` lists them), or `sparse` for the paper's binary vectors; or a
    function of yours, `my_module:make_data`, that returns a `gossamer.experiments.data.Dataset`: its file
    stands beside this one, and it is given `seed` if it has an argument of that name."""
    partition: Literal["successive", "iid", "dirichlet", "shards", "natural"] = "successive"
    """How samples are dealt out. `natural` gives each peer one writer, subject or node. `successive` goes by
    the order of the data set, so every seed has the same: they differ in starting values and order alone."""
    samples: Count | None = None
    """Training samples per peer; all that there are, dealt evenly, if left out. With `dirichlet` and `shards`
    at most so many: peers that were dealt fewer have those, and with a low `alpha` that may be a handful."""
    total: Count | None = None
    """Training samples of all peers together, drawn at random before they are dealt out; all of the data set
    if left out."""
    test: Count | None = None
    """Test samples: the first so many of the test set, or, where there is none, per peer."""
    tested: Literal["common", "own"] = "common"
    """common: every peer is tested on the whole test set. own: on classes in the shares that it has in
    training. One network for all does well on common tests, personal ones on peers' own."""
    alpha: Annotated[float, Field(gt=0)] = 0.5
    """Dirichlet's concentration: lower is more skewed."""
    minimum: Count = 1
    """Dirichlet: samples that even the poorest peer has."""
    shards: Count = 2
    """Shards per peer: fewer is more skewed."""


class TaskEntry(SettingsTable):
    """Makes some peers' labels mean something else. Entries that name the same peer add up."""

    kind: Literal["swap", "cycle", "symmetric", "swaps", "modified"]
    """swap: two labels change places. cycle: the last `last` labels move round. symmetric: all
    permutations of the last `last` labels, dealt in turn. swaps: every peer swaps a pair of its own.
    modified: another target for one block of the `sparse` vectors."""
    labels: Annotated[tuple[int, int] | None, Field(strict=False)] = None
    """The two labels of a swap, as in `[8, 9]`."""
    last: int = 3
    """How many labels, from the last one, take part in a cycle or a permutation."""
    peers: Who = "all"
    """Whose labels: the first so many peers, a list of their numbers, or all."""


class Size(SettingsTable):
    """Peers whose network has another layout; as many parts, inputs and outputs as everybody's."""

    layout: str
    """The network of these peers."""
    peers: Who
    """The first so many peers, or a list of their numbers."""


class Network(SettingsTable):
    """The network that every peer trains."""

    RENAMED: ClassVar = {"kind": "it is called name now; a perceptron has a layout alone"}

    layout: str = LAYOUT
    """`784=300=100=10` for a perceptron, `50<>400` for the associative network."""
    name: ReadyName | None = None
    """A ready network instead of a layout: see gossamer.models.READY. Samples keep their shape."""
    entry: str | None = None
    """A function of yours instead, `my_module:make_net`, that returns a torch module; its file stands beside
    this one. It is given `channels`, `size` and `classes` of the data if it has arguments of these names."""
    options: dict[str, Any] = {}
    """Further arguments for either, as in `{widths = [8, 16], hidden = 32}`."""
    buffers: Literal["average", "local", "recompute"] = "average"
    """Batch norm's statistics: averaged with their cells; kept, with gains and biases (FedBN); or the peer's
    own, taken anew before every test. Prefer the last two where cells are shared in part."""
    activation: Literal["sigmoid", "tanh", "relu", "prelu"] = "relu"
    """Of a perceptron's hidden cells; the paper's is sigmoid."""
    output: Literal["sigmoid", "tanh", "relu", "none"] = "none"
    """The last layer's activation. Keep none with cross-entropy, which reads logits."""
    start: Literal["normal", "uniform"] | None = None
    """The distribution of starting weights; normal for a perceptron, uniform for associative."""
    gain: Annotated[float, Field(gt=0)] = 1.0
    """Their spread, in units of 1/√fan_in for a perceptron."""
    shift: float = 0.0
    """Their mean."""
    equal_starts: bool = True
    """Whether a shared slice starts from the same values on every peer."""
    trained: str | None = None
    """Networks that were trained before, a file for each peer beside this one: `nets/{peer}.safetensors`.
    `matching` then brings their cells into one order."""
    sizes: list[Size] = []
    """Peers whose network is wider or narrower; the partial models that they share are fused."""

    @property
    def named(self) -> str | None:
        """The ready network or the function; None for a network given by its layout."""
        return self.name or self.entry

    @model_validator(mode="after")
    def _one_network(self) -> Network:
        if self.name and self.entry:
            raise sentence("has a name and an entry: leave one of them out")
        if self.options and not self.named:
            raise sentence(
                "has options, which are for a name or an entry; a perceptron has a layout"
            )
        if self.named and (self.layout != LAYOUT or self.sizes):
            what = "sizes" if self.sizes else "a layout"
            raise sentence(
                f"has {what}, which is for perceptrons, beside {self.named!r}: leave it out"
            )
        return self


class Model(SettingsTable):
    """A partial model: its name, its slice, who implements it, what it depends on.

    `{peer}` and `{task}` in the name stand for the peer's number and its task's name, so one entry
    can make a model per group. Cells that no model claims stay the peer's own.
    """

    name: str
    """Names the model to all peers; those that have one of the same name share it."""
    layout: str | None = None
    """Cells per part, as in `64-24-10`."""
    share: Share = None
    """Instead of a layout: a fraction of every hidden part's cells (0.8), or fractions by part, `{"*" = 0.8,
    "head" = 0}`, the last that matches; `gossamer slices CONFIG` lists the parts. Inputs and outputs go to
    the first model with a share unless named. A model listed with 0 has no cells there."""
    peers: Who = "all"
    """Who implements it: the first so many peers, a list of their numbers, or all."""
    depends: list[str] = []
    """Models that every peer with this one has too; weights between the two are averaged in this one."""
    matching: Literal["none", "align", "fuse"] = "none"
    """align: peers with a network of their own (`network.trained`, or starts that are not equal) permute
    its cells to agree with the others' before they count. fuse: peers of different widths average at a
    common one; entries of one name then give each group of peers its layout."""
    width: str | None = None
    """fuse: the common layout, at least as wide as the widest slice."""
    bound: str | None = None
    """fuse: the layout up to which newcomers' cells may make the model grow; `width` if left out."""

    @model_validator(mode="after")
    def _one_slice(self) -> Model:
        if (self.layout is None) == (self.share is None):
            raise sentence("needs a layout or a share, and not both")
        return self

    @property
    def cells(self) -> str | float | dict[str, float]:
        """The slice, as a Slicing takes it."""
        found = self.share if self.layout is None else self.layout
        assert found is not None  # checked above
        return found


class Training(SettingsTable):
    """How a peer learns between two averagings."""

    RENAMED: ClassVar = {"stretch": "it is called local_samples now"}

    local_samples: Count = 100
    """Samples between two averagings: what the paper calls the mini-batch size."""
    epochs: Count | None = None
    """Instead of `local_samples`: passes over a peer's own samples. If left out, `gossamer compare` trains
    one."""
    batch: Count = 10
    """Samples per gradient step."""
    reduction: Literal["sum", "mean"] = "mean"
    """Of a batch's losses. `sum` is the paper's: a step as long as its samples' own steps together, so divide
    `rate` by `batch` for a like one."""
    rate: Annotated[float, Field(gt=0)] = 0.1
    """The learning rate."""
    optimizer: Literal["sgd", "momentum", "adam"] = "sgd"
    """Plain gradient descent, the same with momentum, or Adam; its state stays with the peer."""
    momentum: Annotated[float, Field(gt=0, lt=1)] | None = None
    """For the optimizer `momentum`: the share of the last step that is taken again; 0.9 if left out."""
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Pulls every parameter towards 0, as in torch: the gradient of half its square, times this."""
    loss: Literal["cross-entropy", "squared"] = "cross-entropy"
    """squared: half the squared distance to the one-hot label, the paper's."""
    proximal: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """FedProx's μ: a pull towards the values that the last averaging gave. Raise it when peers' data
    differ and they drift apart between averagings."""

    @model_validator(mode="after")
    def _one_amount_and_momentum_is_used(self) -> Training:
        if self.epochs is not None and "local_samples" in self.model_fields_set:
            raise sentence("has epochs and local_samples: leave one of them out")
        if self.momentum is not None and self.optimizer != "momentum":
            raise sentence(
                f"has a momentum, which the optimizer {self.optimizer!r} does not use: "
                'write optimizer = "momentum"'
            )
        return self


class Gossip(GossipSettings, LifeSettings, LinkSettings):
    """How live peers average, and peers in virtual time, which also know `exchanges`, `fraction`, `dtype`,
    `compress` and `drift`. Without a [time] table so do peers in lockstep, except for `fraction`, where they
    send messages: on a `topology`, or in the modes `rounds` and `server`. Else the arena averages exactly.
    Most keys are those of any peer: gossip/settings.py, peer/settings.py, gossip/transport/options.py."""

    exchanges: Count | None = None
    """Neighbours that a peer pushes to after a round (async; 2 if left out), or exchanges per averaging
    (rounds; if left out, as many as the graph needs to reach `tolerance`)."""
    tolerance: Annotated[float, Field(gt=0, lt=1)] = 1e-6
    """rounds: how far disagreement must shrink in one averaging."""
    rule: Literal["push", "metropolis", "max-degree", "edges"] = "push"
    """What a peer gives to whom on a `topology`. push: equal parts to its neighbours and itself, as live
    peers and peers in virtual time do. In lockstep also metropolis and max-degree, the same both ways, for
    graphs that are not directed; and edges: a link's `weight` is the share of its mass that a peer sends
    over it."""
    per_process: Count = 1
    """Peers that share one process: more saves the memory and start-up time of torch."""

    @property
    def lossy(self) -> list[str]:
        """The keys that make values arrive otherwise than they were, or not at all."""
        given = self.compress is not None, self.drift is not None, self.dtype == "float16"
        return [key for key, one in zip(("compress", "drift", "dtype"), given, strict=True) if one]


class Churn(SettingsTable):
    """Peers that come and go, by chance or from a trace. Who leaves takes along what it held."""

    trace: str | None = None
    """A file of lines `step,event,peer[,other]`, beside the config: arrive, leave, link-down, link-up. If
    left out, events are drawn with the chances below, per step and peer or link."""
    leave: Chance = 0.01
    """That a peer that is there leaves."""
    arrive: Chance = 0.1
    """That a peer that is away comes back."""
    link_down: Chance = 0.0
    """That a link fails."""
    link_up: Chance = 0.5
    """That a link which has failed works again."""
    step: Positive = 1.0
    """Virtual seconds per step."""


class Split(SettingsTable):
    """A partition: for a while nothing passes between some peers and all others."""

    start: Annotated[float, Field(ge=0)]
    """The virtual second at which it begins."""
    end: Positive
    """The virtual second at which it ends."""
    peers: Who
    """Those on one side: the first so many, or a list of their numbers."""


class Time(SettingsTable):
    """Virtual time: peers train at their own pace, and what they push is on its way for a while.

    With this table `gossamer simulate` runs peers asynchronously, by push-sum under the rules of live
    peers, instead of averaging exactly; `exchanges` and `fraction` of [gossip] count. A duration is a
    number (constant), `uniform:LOW:HIGH`, `exponential:MEAN`, `lognormal:MEDIAN:SIGMA`, `gamma:MEAN:SHAPE`,
    or a table `{kind = "gamma", mean = 1, shape = 4, fixed = true}`; fixed ones are drawn once for each peer
    or link and kept.
    """

    training: Duration = "lognormal:1:0.3"
    """How long training between two averagings takes."""
    delay: Duration = "exponential:0.1"
    """How long a message is on its way, one way."""
    seconds: Positive | None = None
    """When to stop; if left out, after as long as `rounds` of training take on average."""
    stragglers: Chance = 0.0
    """The share of peers that are slow."""
    slowdown: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 10.0
    """How many times longer training takes them."""
    loss: Chance = 0.0
    """The probability that a message, or its answer, is lost."""
    timeout: Positive | None = None
    """How long a peer waits for an answer before it settles a transfer; lost mass then returns to it.
    Ten mean delays if left out."""
    churn: Churn | None = None
    """Peers that come and go; nobody does without this table."""
    partitions: list[Split] = []
    """Times in which some peers hear nobody else."""


class Experiment(ScheduleSettings):
    """What a swarm's config and a comparison have in common: peers, data, tasks, the network, training."""

    name: Name = "swarm"
    """Names the folder of results and the live swarm: letters, digits and any of . _ - & @."""
    seed: int = 0
    """Decides the split, starting values and the order of samples; of several runs, the first one's."""
    peers: Count = 16
    """How many there are; a comparison calls them clients."""
    data: Data = Data()
    """Which samples there are, and who holds them."""
    tasks: list[TaskEntry] = []
    """What labels mean to whom; the same to all without these."""
    network: Network = Network()
    """The network that every peer trains."""
    training: Training = Training()
    """How a peer learns between two averagings."""


class Config(Experiment):
    """A whole swarm: peers, their data and tasks, the network and its partial models."""

    cross: bool = False
    """Average weights between unrelated models too (the paper's Algorithm 2)."""
    topology: Topology = None
    """Who may talk to whom: `ring`, `regular:4`, `graph.graphml` (beside this file), `module:function` (as
    in `networkx:karate_club_graph`), a table `{kind = "clusters", links = 2}`; everybody if left out.
    Every partial model must be connected on it. Links' weights count with `rule = "edges"` in [gossip] alone.
    `gossamer topology show CONFIG` says how it mixes in lockstep, under that rule."""
    bridge: bool = False
    """Add the fewest links that join partial models which the topology tears apart, and list them."""
    models: list[Model] = []
    """The partial models; without any, every peer is alone."""
    fednp: FedNPOptions | None = None
    """Wraps every learner in FedNP; its keys are in models/fednp/options.py."""
    gossip: Gossip = Gossip()
    """How peers average, and how live ones wait and connect."""
    trust: TrustTable = Trust()
    """Whom live peers believe: `trust = "swarm"`, or a table; the tables Trust and PeerTrust here."""
    time: Time | None = None
    """Virtual time; without this table peers train and average in lockstep."""
    sweep: dict[str, Any] = {}
    """What `gossamer sweep` varies: keys of this file with lists of values, as in `training.rate = [0.1,
    0.3]` or `models.0.layout = ["64-20-0", "64-30-0"]`; every combination is run. `seeds = 5` repeats each
    with five seeds."""


# --- reading one ------------------------------------------------------------------------------------

Table = TypeVar("Table", bound=BaseModel)


def load_config(path: str | Path) -> Config:
    """Read a config file."""
    return parse_config(read_table(path), str(path))


def parse_config(table: dict[str, Any], source: str = "config") -> Config:
    """Check a table that was read or written by hand; `source` starts every error."""
    require_table(table, source, "load_config")
    if "methods" in table:
        raise ConfigError(
            f"{source}: has [methods], so it is a comparison's config: run it with gossamer compare"
        )
    return parse_table(Config, table, source)


def parse_table(kind: type[Table], table: dict[str, Any], source: str) -> Table:
    """Check a table of any kind; `source` starts every error."""
    try:
        return kind.model_validate(table)
    except ValidationError as error:
        raise ConfigError(f"{source}: {first_mistake(error, kind)}") from None


def read_table(path: str | Path) -> dict[str, Any]:
    """A TOML file as it is; one that cannot be read is an error that names it."""
    path = Path(path)
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: cannot be read: it is not text in UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: is not TOML: {error}") from None


def require_table(table: object, source: str, reader: str) -> None:
    """Raise unless what was given for a table is one; `reader` is what reads files."""
    if not isinstance(table, dict):
        raise ConfigError(f"{source}: give a table (a dict), not {table!r}; {reader} reads a file")


def first_mistake(error: ValidationError, table: type[BaseModel]) -> str:
    """One sentence about the first mistake that was found in a table."""
    mistakes = error.errors()
    # A misspelt key is reported before the one that is missing because of it.
    mistake = next((m for m in mistakes if m["type"] == "extra_forbidden"), mistakes[0])
    place = [str(step) for step in mistake["loc"]]
    key = ".".join(place)
    if mistake["type"] == "extra_forbidden":
        inner = _table_at(table, place[:-1])
        if new := getattr(inner, "RENAMED", {}).get(place[-1]):
            return f"unknown key {key!r}; {new}"
        known = list(inner.model_fields)
        return f"unknown key {key!r}; {hint(place[-1], known, are='known keys are')}"
    return f"key {key!r}: {_plain_words(mistake)}"


def _plain_words(mistake: ErrorDetails) -> str:
    last, given = mistake["loc"][-1], mistake["input"]
    match mistake["type"]:
        case "missing":
            return "is missing"
        case "sentence":
            return mistake["msg"]
        case "model_type":
            return f"should be a table, not {given!r}"
        case "list_type" if isinstance(given, dict):
            return f"is a list of tables: write [[{last}]], not [{last}]"
    return f"{mistake['msg'][0].lower()}{mistake['msg'][1:]}, not {given!r}"


def _table_at(table: type[BaseModel], place: list[str]) -> type[BaseModel]:
    for step in place:
        if step.isdigit():
            continue
        annotation = table.model_fields[step].annotation
        inner = [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type)]
        table = next(kind for kind in inner if issubclass(kind, BaseModel))
    return table


def check_matching(config: Config, source: str) -> None:
    """Refuse matching that cannot be had, naming the key."""
    seen: dict[str, tuple[int, Model]] = {}
    for place, model in enumerate(config.models):
        key = f"{source}: key 'models.{place}"
        if model.matching != "none" and "<>" in config.network.layout:
            raise ConfigError(
                f"{key}.matching': cells are matched in chains of dense layers, which the associative "
                "network is not"
            )
        if model.matching == "fuse" and config.network.named:
            raise ConfigError(
                f"{key}.matching': only chains of dense layers are fused, which {config.network.named!r} is "
                "not known to be; peers of one architecture can use align"
            )
        if model.matching != "fuse" and (model.width or model.bound):
            what = "width" if model.width else "bound"
            raise ConfigError(f'{key}.{what}\': is for matching = "fuse" alone; leave it out')
        if model.matching == "fuse" and model.width is None:
            raise ConfigError(
                f"{key}.width': is missing; fuse needs the common layout, at least as wide as the widest "
                f"slice of {model.name!r}"
            )
        if model.matching == "fuse" and not _starts_together(config):
            raise ConfigError(
                f"{key}.matching': fuse starts all peers from common values; set equal_starts = true, or "
                "name what they bring in network.trained"
            )
        other, first = seen.setdefault(model.name, (place, model))
        for what in ("matching", "width", "bound", "depends"):
            if getattr(first, what) != getattr(model, what):
                raise ConfigError(
                    f"{key}.{what}': models.{other} says {getattr(first, what)!r} of the same model "
                    f"{model.name!r}; give both the same"
                )


def _starts_together(config: Config) -> bool:
    return config.network.equal_starts or config.network.trained is not None


def needs_matching(config: Config) -> bool:
    """Return whether peers start from different values and a partial model's cells are to be matched."""
    different_starts = config.network.trained is not None or not config.network.equal_starts
    return different_starts and any(model.matching != "none" for model in config.models)


def without_networks(config: Config) -> Config:
    """The same swarm, where the networks that peers bring along are handed over otherwise."""
    return config.model_copy(
        update={"network": config.network.model_copy(update={"trained": None})}
    )
