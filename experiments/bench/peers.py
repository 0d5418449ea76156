"""Other simulators of federated learning, on the workloads of `bench arena`: the same network, batches,
steps and amount of data, one thread each and two threads each.

Every simulator has an environment of its own, whose Python runs this file as a program:

    PYTHON peers.py pfl '{"layout": "64=32=10", "peers": 1024, "batch": 32, "steps": 20, …}'

It prints one line of JSON: the median seconds of a round, by the clock and of the processor. So this file
imports nothing but the standard library at its top, and nothing of this project in its programs.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import ceil
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import Row
    from .arena import Workload

ROUNDS = 3
"""Timed rounds of every simulator; one round before them warms up."""
PRODUCTS = 9
"""Timed large products, whose speed is the machine's peak."""
TIMEOUT = 1800
"""Seconds after which a simulator is given up."""
SIMULATORS: Mapping[str, str] = {
    "pfl": "pfl-research: pip install 'pfl[pytorch]'",
    "flower": "Flower: pip install 'flwr[simulation]' torch",
    "gossipy": "gossipy: pip install gossipy-dfl torchvision (the package named gossipy is another one)",
}
"""The other simulators, and how their environments are made."""
WANTED = (1.5, 6.0, 50.0)
"""How many times as fast a round is here as with the fastest of them, for each workload."""


def peers(
    environments: Mapping[str, Path] | None = None, workloads: Sequence[Workload] | None = None
) -> list[Row]:
    """Compare rounds of the arena with those of the simulators whose Python is given.

    The notes say what share of the machine's peak each reaches: where a simulator reaches .66 of it, nothing
    that does the same operations can be more than 1.5 times as fast. workloads: by default those of
    `bench arena`.
    """
    from . import Row
    from .arena import WORKLOADS

    pythons = environments or {}
    claims = zip(workloads or WORKLOADS, WANTED, strict=False)
    trials = [(*claim, threads) for claim in claims for threads in (1, 2)]
    rows: list[Row] = []
    for workload, wanted, threads in trials:
        times: dict[str, tuple[float, float]] = {}
        skipped: dict[str, str] = {}
        for name, remedy in SIMULATORS.items():
            if name not in pythons:
                skipped[name] = f"skipped: no environment given (--{name}); {remedy}"
                continue
            try:
                times[name] = run_simulator(name, pythons[name], workload, threads)
            except RuntimeError as error:
                skipped[name] = str(error)
        arena_times = own_times(workload, threads) if times else (0.0, 0.0)
        peaks = peak_flops(threads) if times else (0.0, 0.0)
        # Which of the two times is compared: 0 is the clock's, 1 the processor's. Flower's processor time is
        # not known, since Ray's workers are processes of their own.
        compared = {name: int(threads == 1 and name != "flower") for name in times}
        fastest = min(times, key=lambda name: times[name][compared[name]], default="")
        for name in SIMULATORS:
            title = f"{workload.name}, {threads} thread{'s' * (threads > 1)}, against {name}"
            if name in skipped:
                rows.append(Row(title, "s", note=skipped[name]))
                continue
            index = compared[name]
            arena_seconds, seconds = arena_times[index], times[name][index]
            peak_seconds = workload.flops / peaks[index]  # at the machine's peak
            rows.append(
                Row(
                    title, "s of the processor" if index else "s", arena_seconds, seconds,
                    wanted if name == fastest and threads == 1 else None, speedup=True,
                    note=f"baseline: {name}{', the fastest of them' * (name == fastest)}; "
                    f"{peak_seconds / arena_seconds:.2f} of the machine's peak, the baseline "
                    f"{peak_seconds / seconds:.2f}",
                )
            )  # fmt: skip
    return rows


def own_times(workload: Workload, threads: int = 1) -> tuple[float, float]:
    """Return the median seconds of a round in the arena: by the clock, and of the processor."""
    from ..arena import Arena

    swarm = Arena(workload.learners(workload.data()), mixing=workload.mix(), threads=threads)
    return _median_times(swarm.train_and_average, ROUNDS)


def peak_flops(threads: int = 1) -> tuple[float, float]:
    """Return the operations a second of large matrix products: by the clock, and of the processor."""
    from .arena import PEAK_FLOPS, large_products

    wall, cpu = _median_times(large_products(threads), PRODUCTS)
    return threads * PEAK_FLOPS / wall, threads * PEAK_FLOPS / cpu


def _median_times(function: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Return the median seconds of a function, on one thread of torch: by the clock, and of the processor."""
    from ..study import torch_threads

    stamps = [_stamp()]
    with torch_threads(1):
        for _ in range(1 + repeats):
            function()
            stamps.append(_stamp())
    return _medians(stamps)


def run_simulator(
    name: str, python: Path, workload: Workload, threads: int = 1
) -> tuple[float, float]:
    """Run a simulator in its environment; return the median seconds of a round, clock and processor.

    Raises RuntimeError, which says why, if it fails.
    """
    work = {
        key: getattr(workload, key)
        for key in ("layout", "peers", "batch", "steps", "reduction", "samples")
    } | {"threads": threads}
    command = [str(python), str(Path(__file__).resolve()), name, json.dumps(work)]
    limits = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    try:
        run = subprocess.run(
            command, env=os.environ | limits, capture_output=True, text=True, timeout=TIMEOUT, check=True
        )  # fmt: skip
        result = json.loads(run.stdout.splitlines()[-1])
        return result["wall"], result["cpu"]
    except OSError as error:
        raise RuntimeError(
            f"skipped: {python} does not run ({error.strerror}); give the Python of an environment with "
            f"{SIMULATORS[name]}"
        ) from None
    except subprocess.TimeoutExpired:
        raise RuntimeError(
            f"skipped: {name} took more than {TIMEOUT} s for {ROUNDS + 1} rounds"
        ) from None
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise RuntimeError(f"skipped: {name} failed ({reason}); {SIMULATORS[name]}") from None


# --- programs, which run in the other environments --------------------------------------------------


def _stamp() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _medians(stamps: list[tuple[float, float]]) -> tuple[float, float]:
    """Return the medians of the times between stamps but the first, by the clock and of the processor."""
    pairs = list(pairwise(stamps[1:]))
    wall, cpu = (median(after[k] - before[k] for before, after in pairs) for k in (0, 1))
    return wall, cpu


def _network(layout: str) -> Any:
    """A perceptron with sigmoid activations, as that of the arena."""
    from torch import nn

    cells = [int(count) for count in layout.split("=")]
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(cells):
        layers += [nn.Linear(inputs, outputs), nn.Sigmoid()]
    return nn.Sequential(*layers)


def _loss(outputs: Any, labels: Any, reduction: str) -> Any:
    from torch.nn import functional as F

    targets = F.one_hot(labels, outputs.shape[1])
    losses = 0.5 * (outputs - targets).square().sum(dim=1)
    return losses.mean() if reduction == "mean" else losses.sum()


def _data(work: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Random samples of every peer, repeated until one pass over them has the steps of a round."""
    import torch

    generator = torch.Generator().manual_seed(0)
    features, *_, classes = (int(count) for count in work["layout"].split("="))
    needed = work["batch"] * work["steps"]
    for _ in range(work["peers"]):
        inputs = torch.rand(work["samples"], features, generator=generator)
        labels = torch.randint(0, classes, (work["samples"],), generator=generator)
        times = ceil(needed / work["samples"])
        yield inputs.repeat(times, 1)[:needed], labels.repeat(times)[:needed]


def pfl(work: Mapping[str, Any]) -> tuple[float, float]:
    """Federated averaging in pfl-research, all peers in every round."""
    import torch
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam.base import NNTrainHyperParams
    from pfl.metrics import Weighted
    from pfl.model.pytorch import PyTorchModel

    torch.set_num_threads(work["threads"])
    datasets = [Dataset(raw_data=list(samples)) for samples in _data(work)]

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = _network(work["layout"])

        def loss(self, inputs: Any, labels: Any, eval: bool = False) -> Any:
            return _loss(self.network(inputs), labels, work["reduction"])

        @torch.no_grad()
        def metrics(self, inputs: Any, labels: Any, eval: bool = True) -> dict[str, Any]:
            return {"loss": Weighted(float(self.loss(inputs, labels)), 1)}

    stamps: list[tuple[float, float]] = []

    class Stamps(TrainingProcessCallback):
        def after_central_iteration(self, *_: Any, **__: Any) -> tuple[bool, Any]:
            from pfl.metrics import Metrics

            stamps.append(_stamp())
            return False, Metrics()

    module = Model()
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    sampler = get_user_sampler("minimize_reuse", list(range(work["peers"])))
    data = FederatedDataset(lambda user: datasets[user], sampler)
    rounds = 2 + ROUNDS
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=rounds, evaluation_frequency=10 * rounds,
            train_cohort_size=work["peers"], val_cohort_size=0,
        ),
        SimulatedBackend(training_data=data, val_data=data), model,
        NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=0.1, local_batch_size=work["batch"]
        ),
        callbacks=[Stamps()],
    )  # fmt: skip
    return _medians(stamps)


def flower(work: Mapping[str, Any]) -> tuple[float, float]:
    """Federated averaging in Flower's simulation, all peers in every round; Ray has a processor a thread."""
    import torch
    from flwr.client import ClientApp, NumPyClient
    from flwr.common import ndarrays_to_parameters
    from flwr.server import ServerApp, ServerAppComponents, ServerConfig
    from flwr.server.strategy import FedAvg
    from flwr.simulation import run_simulation

    class Client(NumPyClient):
        def __init__(self, number: int):
            self._number = number

        def fit(self, parameters: list[Any], config: Any) -> tuple[list[Any], int, dict[str, Any]]:
            torch.set_num_threads(1)
            inputs, labels = _samples(self._number)
            network = _network(work["layout"])
            with torch.no_grad():
                for parameter, value in zip(network.parameters(), parameters, strict=True):
                    parameter.copy_(torch.from_numpy(value))
            optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
            for begin in range(0, len(labels), work["batch"]):
                chosen = slice(begin, begin + work["batch"])
                optimizer.zero_grad()
                _loss(network(inputs[chosen]), labels[chosen], work["reduction"]).backward()
                optimizer.step()
            return [value.detach().numpy() for value in network.parameters()], len(labels), {}

    data_sets: list[tuple[Any, Any]] = []

    def _samples(number: int) -> tuple[Any, Any]:
        # Only 16 data sets, so that making them in every process of Ray takes no time.
        data_sets[:] = data_sets or _data({**work, "peers": 16})
        return data_sets[number % len(data_sets)]

    stamps: list[tuple[float, float]] = []

    class Strategy(FedAvg):
        def aggregate_fit(self, *arguments: Any, **options: Any) -> Any:
            aggregated = super().aggregate_fit(*arguments, **options)
            stamps.append(_stamp())
            return aggregated

    start = [value.detach().numpy() for value in _network(work["layout"]).parameters()]
    strategy = Strategy(
        fraction_fit=1.0, fraction_evaluate=0.0, min_fit_clients=work["peers"],
        min_available_clients=work["peers"], initial_parameters=ndarrays_to_parameters(start),
    )  # fmt: skip
    config = ServerConfig(num_rounds=2 + ROUNDS)
    server = ServerApp(
        server_fn=lambda context: ServerAppComponents(strategy=strategy, config=config)
    )
    client = ClientApp(
        client_fn=lambda context: Client(int(context.node_config["partition-id"])).to_client()
    )
    resources = {"client_resources": {"num_cpus": 1}, "init_args": {"num_cpus": work["threads"]}}
    run_simulation(server, client, num_supernodes=work["peers"], backend_config=resources)
    return _medians(stamps)


def gossipy(work: Mapping[str, Any]) -> tuple[float, float]:
    """Gossip learning in gossipy: in every round each peer pushes once, and a receiver merges and trains."""
    import networkx as nx
    import torch
    from gossipy.core import AntiEntropyProtocol, CreateModelMode, StaticP2PNetwork
    from gossipy.model import TorchModel
    from gossipy.model.handler import TorchModelHandler
    from gossipy.node import GossipNode
    from gossipy.simul import GossipSimulator, SimulationEventReceiver

    torch.set_num_threads(work["threads"])
    peers = work["peers"]

    class Model(TorchModel):
        def __init__(self) -> None:
            super().__init__()
            self.network = _network(work["layout"])

        def forward(self, inputs: Any) -> Any:
            return self.network(inputs)

        def init_weights(self) -> None:
            """Keep torch's."""

    class Stamps(SimulationEventReceiver):
        def update_timestep(self, t: int) -> None:
            stamps.append(_stamp())

        def update_message(self, failed: bool, msg: Any = None) -> None:
            """Count nothing."""

        def update_evaluation(self, *_: Any, **__: Any) -> None:
            """Nothing is evaluated."""

        def update_end(self) -> None:
            """The stamps are kept."""

    class NoTest:
        def has_test(self) -> bool:
            return False

    stamps: list[tuple[float, float]] = []
    graph = nx.to_numpy_array(nx.random_regular_graph(4, peers, seed=1))
    network = StaticP2PNetwork(peers, graph)
    nodes = {
        number: GossipNode(
            number, (samples, None), 1,
            TorchModelHandler(
                Model(), torch.optim.SGD, {"lr": 0.1},
                lambda outputs, labels: _loss(outputs, labels, work["reduction"]),
                local_epochs=1, batch_size=work["batch"], create_model_mode=CreateModelMode.MERGE_UPDATE,
            ),
            network,
        )
        for number, samples in enumerate(_data(work))
    }  # fmt: skip
    simulator = GossipSimulator(nodes, NoTest(), 1, AntiEntropyProtocol.PUSH)
    simulator.add_receiver(Stamps())
    simulator.init_nodes()
    simulator.start(n_rounds=2 + ROUNDS)
    return _medians(stamps)


PROGRAMS: Mapping[str, Callable[[Mapping[str, Any]], tuple[float, float]]] = {
    "pfl": pfl,
    "flower": flower,
    "gossipy": gossipy,
}


def main(name: str, work: str) -> None:
    """Run a simulator and print its times."""
    wall, cpu = PROGRAMS[name](json.loads(work))
    print(json.dumps({"wall": wall, "cpu": cpu}))


if __name__ == "__main__":
    main(*sys.argv[1:])
