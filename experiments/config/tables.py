"""The tables and keys of a config file (TOML), read into typed, frozen objects.

A mistake in a file is a ConfigError of one line that names the file and the key.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails

from gossamer.errors import hint

from ...gossip import (
    Count,
    GossipSettings,
    LinkSettings,
    Positive,
    SettingsTable,
    alternatives,
    check_name,
    checked,
    validation_error,
)
from ...models import ReadyNetworkName
from ...models.fednp import FedNPOptions
from ...peer import (
    CredentialSettings,
    LifecycleSettings,
    PriorSettings,
    ProtectionSettings,
    ScheduleSettings,
    SharingSettings,
    TrustMode,
)
from ..errors import ConfigError


def _check_duration(value: float | str | dict[str, Any]) -> None:
    """Raise unless a value is a number of seconds or a distribution of them."""
    from ..arena import TimeError, parse

    try:
        parse(value, "it")
    except TimeError as error:
        # The message begins with "it", which stands for the key that the caller names.
        raise ValueError(str(error).removeprefix("it: ").removeprefix("it ")) from None


def _check_config_name(name: str) -> None:
    """Raise unless a config's name is also valid as the name of a folder and of a swarm."""
    check_name("config's own", name)
    if not name.strip("."):
        raise ValueError(
            f"the config's own name {name!r} cannot name a folder: use a letter or digit too"
        )


ConfigName = Annotated[str, checked(_check_config_name)]
Fraction = Annotated[float, Field(ge=0, le=1)]
# Which peers are meant: 3 stands for the first three, [0, 4] lists their numbers, "all" stands for all peers.
PeerSelection = Annotated[
    Annotated[int, Field(ge=0)] | list[Annotated[int, Field(ge=0)]] | Literal["all"],
    alternatives("should be a number of peers, a list of peers' numbers, or 'all'"),
]
Topology = Annotated[
    str | dict[str, Any] | None, alternatives("should be a graph's name or a table")
]
# The fraction of the cells of a network that a model has: one for all parts, or a table by part.
Share = Annotated[
    Fraction | dict[str, Fraction] | None,
    alternatives("should be a fraction from 0 to 1, or a table of them by part"),
]
# A duration in seconds: a number, or a distribution with its parameters.
Duration = Annotated[
    float | str | dict[str, Any],
    alternatives(
        "should be a number of seconds, a distribution such as 'exponential:1', or a table"
    ),
    checked(_check_duration),
]


class Trust(ProtectionSettings):
    """How live peers authenticate each other. `trust = "swarm"` is short for `trust = {kind = "swarm"}`."""

    kind: TrustMode = "none"
    """none: anyone who can connect to the broker can read and forge messages. swarm: peers have keys and
    invitations, and messages are encrypted; `gossamer swarm` makes temporary keys for its own peers. In the
    settings of a peer this key is called `trust`."""


class PeerTrust(Trust, CredentialSettings):
    """How a device and its peers authenticate each other: the `[trust]` table of a device's file.

    It also has the device's key and invitation, as paths relative to that file. If `identity` is set and
    `kind` is not, `kind` is "swarm"."""


def _expand_kind(value: Any) -> Any:
    """Turn the short form `trust = "swarm"` into a table."""
    return {"kind": value} if isinstance(value, str) else value


TrustTable = Annotated[Trust, BeforeValidator(_expand_kind)]
PeerTrustTable = Annotated[PeerTrust, BeforeValidator(_expand_kind)]


DEFAULT_LAYOUT = "64=32=10"
"""The network of a config that sets none: 64 inputs, 32 hidden cells, 10 outputs, as the digits need."""


class Data(SettingsTable):
    """The data set, and how its samples are split among the peers."""

    set: str = "digits"
    """A data set's name (`gossamer data` lists them), or `sparse` for the paper's binary vectors; or a
    function of your own, `my_module:make_data`, that returns a `gossamer.experiments.data.Dataset`, or
    `PeerDatasets` with a torch Dataset or DataLoader for each peer, for data that do not fit into memory;
    the other keys of this table cannot be used with these. The module's file is in the folder of this config;
    the function gets `seed` if it has such an argument."""
    partition: Literal["successive", "iid", "dirichlet", "shards", "natural"] = "successive"
    """How samples are split among the peers. successive: in the order of the data set, so that the split is
    the same for every seed. iid: at random. dirichlet: each peer has some classes more often than others, by
    `alpha`. shards: sorted by class, each peer gets a few pieces. natural: each peer has the samples of one
    writer, subject or node, for data sets that name them."""
    samples: Count | None = None
    """Training samples per peer; if left out, all samples are used and split evenly. With `dirichlet` and
    `shards` this is an upper bound: peers may have fewer, and with a low `alpha` only a handful."""
    total: Count | None = None
    """Training samples of all peers together, drawn at random before they are split; the whole data set if
    left out."""
    test: Count | None = None
    """The number of test samples, taken from the start of the test set, which is used whole if this is left
    out. If the data set has no test set, the number per peer, beside `samples`; if left out, a fifth of each
    peer's samples."""
    tested: Literal["common", "own"] = "common"
    """common: every peer is tested on the whole test set. own: on test samples whose classes are as frequent
    as in the peer's training samples, which suits personalised networks."""
    alpha: Positive = 0.5
    """dirichlet: the concentration. Lower it to make the classes that peers have more different."""
    minimum: Count = 1
    """dirichlet: the smallest number of samples that a peer may have."""
    shards: Count = 2
    """shards: the number of shards per peer; fewer is more skewed."""


class TaskEntry(SettingsTable):
    """Changes the meaning of some peers' labels. Several entries for the same peer are composed."""

    kind: Literal["swap", "cycle", "symmetric", "swaps", "modified"]
    """swap: two labels are exchanged. cycle: the last `last` labels are rotated. symmetric: each peer gets
    another permutation of the last `last` labels. swaps: each peer exchanges a different pair of labels.
    modified: one block of the `sparse` vectors has a different target."""
    labels: Annotated[tuple[int, int] | None, Field(strict=False)] = None
    """swap: the two labels, as in `[8, 9]`."""
    last: int = 3
    """cycle and symmetric: how many labels are permuted, counted from the last one."""
    peers: PeerSelection = "all"
    """Which peers: `3` for the first three, `[0, 4]` for a list of their numbers, or `"all"`."""


class Size(SettingsTable):
    """Peers whose network has a different layout, with the same number of parts, inputs and outputs."""

    layout: str
    """The network of these peers."""
    peers: PeerSelection
    """Which peers: `3` for the first three, or `[0, 4]` for a list of their numbers."""


class Network(SettingsTable):
    """The network that every peer trains."""

    RENAMED: ClassVar = {"kind": "it is called name now; a perceptron needs only a layout"}

    layout: str = DEFAULT_LAYOUT
    """Cells per layer: `784=300=100=10` for a perceptron, `50<>400` for the associative network."""
    name: ReadyNetworkName | None = None
    """The name of a ready network, used instead of a layout. It gets samples in their own shape; a perceptron
    gets them flat."""
    entry: str | None = None
    """A function of your own instead, `my_module:make_net`, that returns a torch module. The module's file is
    in the folder of this config; the function gets `channels`, `size` and `classes` of the data set if it
    has such arguments."""
    options: dict[str, Any] = {}
    """Further arguments for the ready network or the function, as in `{widths = [8, 16], hidden = 32}`."""
    buffers: Literal["average", "local", "recompute"] = "average"
    """The statistics of batch norm. average: averaged like the parameters of their cells. local: never
    averaged, nor are batch norm's gains and biases (FedBN). recompute: computed from the peer's own samples
    before every test. Prefer local or recompute if a model has only some of a layer's cells."""
    activation: Literal["sigmoid", "tanh", "relu", "prelu"] = "relu"
    """The activation of a perceptron's hidden layers; the paper uses sigmoid."""
    output: Literal["sigmoid", "tanh", "relu", "none"] = "none"
    """The activation of a perceptron's last layer. Keep none with cross-entropy, which expects logits."""
    start: Literal["normal", "uniform"] | None = None
    """The distribution of starting weights; if left out, normal for a perceptron and uniform for the
    associative network."""
    gain: Positive = 1.0
    """The scale of starting weights. For a perceptron it is divided by √fan_in, the root of the number of
    inputs of a cell."""
    shift: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    """The mean of starting weights."""
    equal_starts: bool = True
    """Whether a shared slice starts from the same values on every peer."""
    trained: str | None = None
    """The files of networks that were trained before, one per peer, as a path relative to this file:
    `nets/{peer}.safetensors`. Set `matching` in the models to bring their cells into the same order."""
    sizes: list[Size] = []
    """Peers with a wider or narrower network; a shared model of several widths needs `matching = "fuse"`."""

    @property
    def name_or_entry(self) -> str | None:
        """The ready network's name or the user's function; None for a network given by its layout."""
        return self.name or self.entry

    @model_validator(mode="after")
    def _check_network(self) -> Network:
        if self.name and self.entry:
            raise validation_error("has a name and an entry: leave one of them out")
        if self.options and not self.name_or_entry:
            raise validation_error(
                "has options, which are for a name or an entry; a perceptron has a layout"
            )
        if self.name_or_entry and (self.layout != DEFAULT_LAYOUT or self.sizes):
            what = "sizes" if self.sizes else "a layout"
            raise validation_error(
                f"has {what}, which is for perceptrons, beside {self.name_or_entry!r}: leave it out"
            )
        return self


class Model(SettingsTable):
    """A partial model: its name, its slice, which peers have it, and which models it depends on.

    `{peer}` and `{task}` in the name stand for the peer's number and its task's name, so that one entry
    can make a model per peer or per task. Cells that no model claims are never averaged.
    """

    name: str
    """The model's name; peers that have a model of the same name share it."""
    layout: str | None = None
    """The number of cells of every part (layer) that belong to the model, as in `64-24-10`."""
    share: Share = None
    """Instead of a layout: the fraction of the cells of every hidden part (layer), as in `0.8`; or a table of
    fractions by part, `{"*" = 0.8, "head" = 0}`, of which the last that matches a part is used.
    `gossamer slices CONFIG` lists the parts. Input and output cells belong to the first model with a share,
    unless its table names these parts. A fraction of 0 gives the model no cells of that part."""
    peers: PeerSelection = "all"
    """Which peers have the model: `3` for the first three, `[0, 4]` for a list of their numbers, or
    `"all"`."""
    depends: list[str] = []
    """The models that this model depends on; every peer that has this model must have them too. Weights
    between cells of this model and cells of such a model are averaged with this model."""
    matching: Literal["none", "align", "fuse"] = "none"
    """align: peers that start from different values (`network.trained`, or `equal_starts = false`) permute
    their cells to match those of the other peers before their values enter the average. fuse: peers with
    different widths average vectors of a common width; then one entry per group of peers, all with the same
    name, gives the group its layout."""
    width: str | None = None
    """fuse: the common layout, at least as wide as the widest slice."""
    bound: str | None = None
    """fuse: the layout up to which cells of joining peers may widen the model; `width` if left out."""

    @model_validator(mode="after")
    def _check_slice(self) -> Model:
        if (self.layout is None) == (self.share is None):
            raise validation_error("needs a layout or a share, and not both")
        return self

    @property
    def cells(self) -> str | float | dict[str, float]:
        """The model's slice, as `SlicedNetwork` expects it: a layout, a fraction, or a table of fractions."""
        slice_spec = self.share if self.layout is None else self.layout
        assert slice_spec is not None  # checked above
        return slice_spec


def _require_name(value: str | dict[str, Any]) -> str | dict[str, Any]:
    """Refuse a table without a name; whether torch has the name is known when torch is loaded."""
    if isinstance(value, dict) and not isinstance(value.get("name"), str):
        raise validation_error('a table needs a name, as in {name = "AdamW", weight_decay = 0.1}')
    return value


NameOrTable = Annotated[str | dict[str, Any], AfterValidator(_require_name)]


class Training(PriorSettings):
    """How a peer trains in a round, before its values are averaged."""

    RENAMED: ClassVar = {"stretch": "it is called local_samples now"}

    local_samples: Count = 100
    """The number of samples that a peer trains on in a round, before its values are averaged; the paper calls
    it the mini-batch size. With `every`, this many are trained several times in a round."""
    epochs: Count | None = None
    """Passes over all of a peer's samples in a round, instead of `local_samples`. If left out,
    `gossamer compare` trains one epoch."""
    batch: Count = 10
    """Samples per gradient step."""
    reduction: Literal["sum", "mean"] = "mean"
    """How the losses of a batch are combined. The paper uses `sum`: gradients then grow with `batch`, so
    divide `rate` by `batch` for steps of the same length."""
    rate: Positive = 0.1
    """The learning rate."""
    optimizer: NameOrTable = "sgd"
    """`sgd`, `momentum` or `adam`; or the name of a class in torch.optim, as in `"AdamW"`, or a table of name
    and arguments, `{name = "AdamW", betas = [0.9, 0.99]}`; its learning rate is `rate`. The first three are
    Gossamer's own: the first optimizer of torch in a process loads torch's compiler, which takes a device
    2.5 seconds and 100 MB. Simulated peers with SGD, Adam or AdamW train together in a stack; with other
    optimizers of torch they train one by one, which takes longer. The optimizer's state is not averaged."""
    scheduler: NameOrTable | None = None
    """Changes the learning rate after each round: the name of a class in torch.optim.lr_scheduler, or a table
    of name and arguments, `{name = "CosineAnnealingLR", T_max = 30}`, in which steps are rounds of the peer.
    The optimizer is torch's then, whatever its name. If left out, the rate stays `rate`."""
    momentum: Annotated[float, Field(gt=0, lt=1)] | None = None
    """The coefficient of the optimizer `momentum`; 0.9 if left out."""
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """The coefficient of an L2 penalty, as in torch: this times each parameter is added to its gradient."""
    loss: NameOrTable = "cross-entropy"
    """The loss of a sample: `cross-entropy`; `squared`, half the squared distance to the one-hot label, as in
    the paper; or the name of a loss in torch.nn, as in `"MultiMarginLoss"`, or a table of name and arguments,
    `{name = "CrossEntropyLoss", label_smoothing = 0.1}`. Losses such as `HuberLoss` compare a network's
    output with a number: they need a single output."""
    metrics: list[str] = []
    """What tests measure besides accuracy and loss: f1 (mean over classes), auc (area under the ROC curve,
    each class against the others), class-accuracy (accuracy_0 and so on), or module:function of yours, given
    outputs and labels. Files, pictures, live tables and pages have them."""
    device: str = "cpu"
    """Where a peer trains: `cpu`, `cuda`, `cuda:1`, `mps` (Apple) or another device of torch; `--device` of
    simulate and swarm overrides it. Values are averaged and sent from the CPU's memory whatever the device,
    so for small networks, which train in less time than copying takes, cpu is faster."""
    dtype: Literal["float32", "float64"] = "float32"
    """The precision in which a peer trains and holds its values; `gossip.dtype` is that of messages. float64
    takes twice the memory, is slower, and mps does not support it."""
    proximal: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """FedProx's μ: the coefficient of a penalty on the distance from the values after the last averaging.
    Raise it if peers' data differ and their values move apart while they train."""

    @model_validator(mode="after")
    def _check_combinations(self) -> Training:
        # A config that was written out and read again has every key, with its default.
        changed = self.local_samples != type(self).model_fields["local_samples"].default
        if self.epochs is not None and changed:
            raise validation_error("has epochs and local_samples: leave one of them out")
        if self.momentum is not None and self.optimizer != "momentum":
            raise validation_error(
                f"has a momentum, which the optimizer {self.optimizer!r} does not use: "
                'write optimizer = "momentum"'
            )
        if self.prior != "none" and self.loss not in ("cross-entropy", "CrossEntropyLoss"):
            raise validation_error(
                f"has a prior, which is added to logits, and the loss {self.loss!r}, which has none: write "
                'loss = "cross-entropy", or leave prior out'
            )
        return self


class Gossip(GossipSettings, LifecycleSettings, LinkSettings):
    """How peers average, and how live peers wait and connect.

    Live peers use all keys. Simulated peers use `exchanges`, `fraction`, `dtype`, `compress` and `drift` in
    virtual time (in a config with [time]). In lockstep they use the same keys without `fraction`, and only if
    they send messages: on a `topology`, or in the modes `rounds` and `server`; else the simulator computes
    exact means.
    """

    exchanges: Count | None = None
    """async: the number of neighbours that a peer pushes to after a round; 2 if left out. steady: the same; 4
    if left out. rounds: how often peers exchange values with their neighbours after a round; if left out, as
    often as the graph needs to reach `tolerance`."""
    tolerance: Annotated[float, Field(gt=0, lt=1)] = 1e-6
    """rounds: the factor by which the exchanges of a round must reduce the disagreement of peers."""
    rule: Literal["push", "metropolis", "max-degree", "edges"] = "push"
    """How a peer splits its mass (push-sum's value and weight) on a `topology`. push: equal shares for its
    neighbours and itself; live peers and peers in virtual time support only this. metropolis and max-degree:
    symmetric weights, for undirected graphs. edges: a link's `weight` is the share of its mass that a peer
    sends over it."""
    per_process: Count = 1
    """Peers per process: more than one saves memory and the time in which torch is imported."""

    @property
    def lossy_keys(self) -> list[str]:
        """The keys whose values make messages inexact or skip some of them."""
        lossy = self.compress is not None, self.drift is not None, self.dtype == "float16"
        return [key for key, on in zip(("compress", "drift", "dtype"), lossy, strict=True) if on]


class Churn(SettingsTable):
    """Peers that leave and return, at random or by a trace. A leaving peer takes the mass that it holds."""

    trace: str | None = None
    """A file of lines `step,event,peer[,other]`, as a path relative to this file; events are arrive, leave,
    link-down and link-up. If left out, events are drawn at random with the probabilities below."""
    leave: Fraction = 0.01
    """The probability that a present peer leaves, per step."""
    arrive: Fraction = 0.1
    """The probability that an absent peer returns, per step."""
    link_down: Fraction = 0.0
    """The probability that a link fails, per step."""
    link_up: Fraction = 0.5
    """The probability that a failed link works again, per step."""
    step: Positive = 1.0
    """Virtual seconds per step."""


class NetworkPartition(SettingsTable):
    """A period in which no message passes between some peers and all others."""

    start: Annotated[float, Field(ge=0)]
    """The virtual second at which the partition begins."""
    end: Positive
    """The virtual second at which the partition ends."""
    peers: PeerSelection
    """The peers on one side: `3` for the first three, or `[0, 4]` for a list of their numbers."""


class Time(SettingsTable):
    """Virtual time: peers train at different speeds, and messages take time to arrive.

    With this table `gossamer simulate` runs peers asynchronously, by push-sum with the protocol of live
    peers, instead of computing exact means; `exchanges` and `fraction` of [gossip] are used. A duration is a
    number (constant), `uniform:LOW:HIGH`, `exponential:MEAN`, `lognormal:MEDIAN:SIGMA`, `gamma:MEAN:SHAPE`,
    or a table `{kind = "gamma", mean = 1, shape = 4, fixed = true}`; with `fixed`, it is drawn only once for
    each peer or link.
    """

    training: Duration = "lognormal:1:0.3"
    """How many seconds a peer trains on `local_samples` samples."""
    delay: Duration = "exponential:0.1"
    """How many seconds a message takes to arrive."""
    seconds: Positive | None = None
    """The virtual second at which the simulation ends; if left out, when an average peer has trained `rounds`
    rounds."""
    stragglers: Fraction = 0.0
    """The fraction of peers that are slow."""
    slowdown: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 10.0
    """How many times longer training takes on slow peers."""
    loss: Fraction = 0.0
    """The probability that a message is lost; also that its acknowledgement is lost."""
    timeout: Positive | None = None
    """Seconds without an acknowledgement after which the sender asks the receiver about a transfer, and takes
    back its mass if the message was lost. Ten mean delays if left out."""
    churn: Churn | None = None
    """Peers that leave and return; without this table no peer does."""
    partitions: list[NetworkPartition] = []
    """Periods in which some peers exchange no messages with the others."""


NOT_FOREVER = (
    "key 'rounds': only live peers learn for ever (gossamer swarm, gossamer join); give the number of rounds "
    "to run here"
)


class Experiment(ScheduleSettings):
    """The keys that configs of swarms and of comparisons share: peers, data, tasks, network, training."""

    name: ConfigName = "swarm"
    """The name of the results folder and of the live swarm: letters, digits and any of . _ - & @."""
    seed: Annotated[int, Field(ge=0)] = 0
    """The seed of the data split, the starting values and the order of samples; the first of several runs
    uses it, the next one `seed + 1`."""
    peers: Count = 16
    """The number of peers, which a comparison calls clients."""
    data: Data = Data()
    """The data set, and how its samples are split among the peers."""
    tasks: list[TaskEntry] = []
    """Peers whose labels have a different meaning; without any, labels mean the same to all peers."""
    network: Network = Network()
    """The network that every peer trains."""
    training: Training = Training()
    """How a peer trains in a round, before its values are averaged."""

    def on_device(self, device: str | None) -> Self:
        """Return the config with another device to train on; as it is if that is None."""
        if device is None:
            return self
        training = self.training.model_copy(update={"device": device})
        return self.model_copy(update={"training": training})

    @property
    def round_count(self) -> int:
        """The number of rounds; ConfigError if peers learn for ever, which only live peers can."""
        if self.rounds == "forever":
            raise ConfigError(NOT_FOREVER)
        return self.rounds


class Config(SharingSettings, Experiment):
    """The config of a swarm: its peers, their data and tasks, the network and its partial models."""

    cross: bool = False
    """Whether weights between models of which neither depends on the other are averaged too, among the peers
    that have both (the paper's Algorithm 2); else they are private."""
    topology: Topology = None
    """The graph of peers that may push to each other: `ring`, `regular:4`, `graph.graphml` (a path relative
    to this file), `module:function` (as in `networkx:karate_club_graph`), or a table such as
    `{kind = "clusters", links = 2}` or `{kind = "links", links = [[0, 1], [1, 2]]}`; if left out, all peers
    are neighbours. The peers of every partial model must form a connected subgraph. The graph's edge weights
    are only used with `gossip.rule = "edges"`. `gossamer topology show CONFIG` prints how fast averaging on
    the graph converges."""
    bridge: bool = False
    """Connect the subgraphs of partial models that the topology leaves in pieces, with the fewest additional
    links, and print these links. With `gossip.mode = "steady"`, add links until every peer has as many
    neighbours as `gossip.hostile` needs, too."""
    models: list[Model] = []
    """The partial models; without any, peers share nothing and train alone, unless `sharing = "auto"`."""
    dry_run: bool = False
    """With `sharing = "auto"`, in simulations: report the changes that would be made, and make none. Samples
    are held out all the same."""
    fednp: FedNPOptions | None = None
    """Makes every peer train with FedNP: an empty table, or one with its keys."""
    gossip: Gossip = Gossip()
    """How peers average, and how live peers wait and connect."""
    trust: TrustTable = Trust()
    """How live peers authenticate each other: `trust = "swarm"`, or a table."""
    time: Time | None = None
    """Virtual time; without this table peers train and average in lockstep."""
    sweep: dict[str, Any] = {}
    """What `gossamer sweep` varies: keys of this file with lists of values, as in `training.rate = [0.1,
    0.3]` or `models.0.layout = ["64-20-0", "64-30-0"]`; every combination is run. `seeds = 5` repeats each
    combination with five seeds."""


# --- reading a config -------------------------------------------------------------------------------

Table = TypeVar("Table", bound=BaseModel)


def load_config(path: str | Path) -> Config:
    """Read a config file."""
    return parse_config(read_table(path), str(path))


def parse_config(table: dict[str, Any], source: str = "config") -> Config:
    """Turn a table of keys and values into a Config; `source` begins every error message."""
    require_table(table, source, "load_config")
    if "methods" in table:
        raise ConfigError(
            f"{source}: has [methods], so it is a comparison's config: run it with gossamer compare"
        )
    return parse_table(Config, table, source)


def parse_table(model: type[Table], table: dict[str, Any], source: str) -> Table:
    """Turn a table of keys and values into an object of a class; `source` begins every error message."""
    try:
        return model.model_validate(table)
    except ValidationError as error:
        raise ConfigError(f"{source}: {first_mistake(error, model)}") from None


def read_table(path: str | Path) -> dict[str, Any]:
    """Read a TOML file. Raises a ConfigError that names the file if it cannot be read."""
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


def flat_keys(table: Any, path: str = "") -> dict[str, str]:
    """Return the keys of a table as dotted paths with their values as text, without empty ones."""
    if isinstance(table, dict):
        items = table.items()
    elif isinstance(table, list) and any(isinstance(entry, dict) for entry in table):
        items = enumerate(table)
    elif table in (None, [], ""):
        return {}
    else:
        return {path.rstrip("."): table if isinstance(table, str) else json.dumps(table)}
    return {
        key: text
        for step, value in items
        for key, text in flat_keys(value, f"{path}{step}.").items()
    }


def differing_key(table: Any, other_table: Any) -> str | None:
    """Return the path of the first key in which two tables differ; None if they are equal."""
    first, second = flat_keys(table), flat_keys(other_table)
    return next((key for key in first | second if first.get(key) != second.get(key)), None)


def require_table(table: object, source: str, reader: str) -> None:
    """Raise ConfigError unless `table` is a dict; reader: the function that reads files, for the message."""
    if not isinstance(table, dict):
        raise ConfigError(f"{source}: give a table (a dict), not {table!r}; {reader} reads a file")


def first_mistake(error: ValidationError, table: type[BaseModel]) -> str:
    """Describe the first mistake in a table in one sentence."""
    mistakes = error.errors()
    # A misspelt key is reported first: another key may be missing only because of it.
    mistake = next((m for m in mistakes if m["type"] == "extra_forbidden"), mistakes[0])
    path = [str(step) for step in mistake["loc"]]
    key = ".".join(path)
    if mistake["type"] == "extra_forbidden":
        inner_table = _table_at(table, path[:-1])
        if new_name := getattr(inner_table, "RENAMED", {}).get(path[-1]):
            return f"unknown key {key!r}; {new_name}"
        known = list(inner_table.model_fields)
        return f"unknown key {key!r}; {hint(path[-1], known, are='known keys are')}"
    return f"key {key!r}: {_describe(mistake)}"


def _describe(mistake: ErrorDetails) -> str:
    """Describe a mistake in the words of TOML, where pydantic's own message would use those of Python."""
    key, value = mistake["loc"][-1], mistake["input"]
    match mistake["type"]:
        case "missing":
            return "is missing"
        case "sentence":
            return mistake["msg"]
        case "model_type":
            return f"should be a table, not {value!r}"
        case "list_type" if isinstance(value, dict):
            return f"is a list of tables: write [[{key}]], not [{key}]"
    return f"{mistake['msg'][0].lower()}{mistake['msg'][1:]}, not {value!r}"


def _table_at(table: type[BaseModel], path: list[str]) -> type[BaseModel]:
    """Return the class of the table at a path below another table; numbers in lists are skipped."""
    for step in path:
        if step.isdigit():
            continue
        annotation = table.model_fields[step].annotation
        types = [each for each in (annotation, *get_args(annotation)) if isinstance(each, type)]
        table = next(each for each in types if issubclass(each, BaseModel))
    return table


def check_matching(config: Config, source: str) -> None:
    """Raise ConfigError if keys about matching contradict each other, the network or another model."""
    first_entries: dict[str, tuple[int, Model]] = {}
    for number, model in enumerate(config.models):
        key = f"{source}: key 'models.{number}"
        if model.matching != "none" and "<>" in config.network.layout:
            raise ConfigError(
                f"{key}.matching': cells are matched in chains of dense layers, which the associative "
                "network is not"
            )
        if model.matching == "fuse" and config.network.name_or_entry:
            raise ConfigError(
                f"{key}.matching': only chains of dense layers can be fused, and "
                f"{config.network.name_or_entry!r} may not be one; peers of one architecture can use align"
            )
        if model.matching != "fuse" and (model.width or model.bound):
            unused = "width" if model.width else "bound"
            raise ConfigError(f'{key}.{unused}\': is only for matching = "fuse"; leave it out')
        if model.matching == "fuse" and model.width is None:
            raise ConfigError(
                f"{key}.width': is missing; fuse needs the common layout, at least as wide as the widest "
                f"slice of {model.name!r}"
            )
        has_common_start = config.network.equal_starts or config.network.trained is not None
        if model.matching == "fuse" and not has_common_start:
            raise ConfigError(
                f"{key}.matching': fuse starts all peers from common values; set equal_starts = true, or "
                "name the peers' trained networks in network.trained"
            )
        first_number, first = first_entries.setdefault(model.name, (number, model))
        for name in ("matching", "width", "bound", "depends"):
            if getattr(first, name) != getattr(model, name):
                raise ConfigError(
                    f"{key}.{name}': models.{first_number} says {getattr(first, name)!r} of the same model "
                    f"{model.name!r}; give both the same value"
                )


def needs_matching(config: Config) -> bool:
    """Return whether peers start from different values and a partial model's cells are to be matched."""
    different_starts = config.network.trained is not None or not config.network.equal_starts
    return different_starts and any(model.matching != "none" for model in config.models)


def without_networks(config: Config) -> Config:
    """Return the config without `network.trained`, for processes that get their peers' networks as files."""
    return config.model_copy(
        update={"network": config.network.model_copy(update={"trained": None})}
    )
