"""Twelve processes with trust on a real broker: two are hostile, one is killed with -9, and one joins late.

    PYTHONPATH=tests:tests/live python tests/live/hostile.py --seed 3 --rounds 30

Run by hand, not in CI: twelve processes that load torch, twice, take minutes on two cores. The swarm lives
once with two hostile members and once with the same two honest. Printed: for both, the mean accuracy of the
honest peers and the worst of them, and what they refused and why. Exit code 1 if the hostile members cost
more than .03 of the mean. How many rounds a peer trains depends on the machine; `--rounds` is the least.

A hostile process is a member like the others, with other code: its gossiper sends each neighbour the value
that the neighbour sent last, moved against what training on the hostile member's own samples would do to it,
as far as neighbours are from each other. The second one sends each such value eight times, all but the last
with the weight of sixteen peers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import signal
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from swarm_kit import Watched

from gossamer.experiments.build import make_learner
from gossamer.experiments.config.tables import Config, Data, Gossip, Model, Network, Training, Trust
from gossamer.experiments.live.layout import plan
from gossamer.gossip import ONE, Ack, Give, Gossiper, Message
from gossamer.models import Learner
from gossamer.peer import Broker, BrokerAddress, BrokerSettings

PEERS, CRASHED, NEWCOMER = 12, 5, 11
HOSTILE = {3: "drift", 8: "inflate_and_spam"}
"""Which peers are hostile, and the function of this module that makes their learner."""
COPIES, HEAVY = 8, 16 * ONE
BAR = 0.03


# --- hostile processes ------------------------------------------------------------------------------


def drift(**arguments: Any) -> Learner:
    """Make this process's gossiper send values that raise the loss of its own samples."""
    return _hostile(arguments, copies=1)


def inflate_and_spam(**arguments: Any) -> Learner:
    """The same, with eight messages for each, most of them with much weight."""
    return _hostile(arguments, copies=COPIES)


def _hostile(arguments: dict[str, Any], copies: int) -> Learner:
    """Change the gossiper of this process, and return the learner of an honest one, whose values mix with the
    others' as usual."""
    forger = Forger(make_learner(**arguments), copies)
    poll, handle = Gossiper.poll, Gossiper.handle

    def forging_poll(self: Gossiper) -> list[Message]:
        return [forged for message in poll(self) for forged in forger.forged(message)]

    def spying_handle(self: Gossiper, message: Message, now: float) -> None:
        handle(self, forger.noted(message), now)

    # Who runs a hostile process can change any code in it.
    setattr(Gossiper, "poll", forging_poll)  # noqa: B010
    setattr(Gossiper, "handle", spying_handle)  # noqa: B010
    return make_learner(**arguments)


@dataclass
class Forger:
    """Replaces values by those that harm their receiver; `learner` is one that only the forger uses."""

    learner: Any
    copies: int
    last: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    """The last value of every neighbour."""

    def noted(self, message: Message) -> Message:
        """Remember an honest neighbour's value; return the message as the gossiper expects it."""
        if isinstance(message, Give) and not is_hostile(message.sender):
            self.last[message.sender] = np.array(message.value)
        if isinstance(message, Ack):
            return replace(message, sequence=message.sequence // self.copies)
        return message

    def forged(self, message: Message) -> list[Message]:
        """Return what is sent instead of a message: several transfers for one, with rising numbers."""
        if not isinstance(message, Give):
            return [message]
        friend = is_hostile(message.receiver)
        value = message.value if friend else self.value_for(message)
        first = self.copies * message.sequence
        return [
            replace(
                message, value=value, sequence=first + copy,
                weight=HEAVY if copy < self.copies - 1 else 0,
            )
            for copy in range(self.copies)
        ]  # fmt: skip

    def value_for(self, give: Give) -> np.ndarray[Any, Any]:
        """Return the receiver's own value, moved by the usual distance against training on our samples."""
        base = self.last.get(give.receiver, give.value)
        others = [value for peer, value in self.last.items() if peer != give.receiver]
        usual = np.median([np.linalg.norm(value - base) for value in others or [give.value]])
        network = self.learner.network
        network.write(give.model, base)
        self.learner.train(1)
        move = network.read(give.model).numpy() - base
        length = np.linalg.norm(move)
        return np.asarray(base - usual * move / max(length, 1e-12), give.value.dtype)


# --- the swarm ------------------------------------------------------------------------------------


def is_hostile(peer: str) -> bool:
    """Return whether a peer is hostile, by its number or its full name."""
    return int(peer.partition("@")[0]) in HOSTILE


def config(seed: int) -> Config:
    return Config(
        name=f"hostile-{secrets.token_hex(4)}", peers=PEERS, rounds="forever", test_every=5,
        topology="regular:5", seed=seed,
        data=Data(set="digits", samples=50, partition="iid"),
        network=Network(layout="64=32=10", activation="relu"),
        models=[Model(name="global", layout="64-32-10")],
        training=Training(local_samples=100, batch=25, rate=0.4),
        gossip=Gossip(mode="steady"),
        trust=Trust(kind="swarm"),
    )  # fmt: skip


async def live(folder: Path, url: str, seed: int, rounds: int, attacked: bool) -> None:
    """Let a swarm live in a folder until all honest peers have trained so many rounds, the newcomer too."""
    spec = plan(config(seed), folder, BrokerAddress(url))
    names = [peer.name for peer in spec.peers if int(peer.name) != NEWCOMER]
    first = spec.peers[0].settings.expect[:NEWCOMER]
    peers = [
        replace(
            peer,
            entry=f"hostile:{HOSTILE[index]}" if attacked and index in HOSTILE else peer.entry,
            # The others start together.
            settings=peer.settings.updated(
                expect=() if index == NEWCOMER else first,
                founder=None,
                silence=120.0,
                start_timeout=600.0,
            ),
        )
        for index, peer in enumerate(spec.peers)
    ]
    late = peers.pop(NEWCOMER)
    watched = Watched(replace(spec, peers=peers))
    newcomer = Watched(replace(spec, peers=[late], folder=folder / "newcomer"))

    async def interfere() -> None:
        await watched.reached(rounds // 3, str(CRASHED))
        os.kill(watched.swarm.pids[str(CRASHED)], signal.SIGKILL)
        await watched.returned(str(CRASHED))
        joins = asyncio.create_task(newcomer.swarm.run())
        await newcomer.reached(rounds, late.name)
        await watched.reached(rounds, *(name for name in names if not is_hostile(name)))
        newcomer.swarm.stop()
        watched.swarm.stop()
        await joins

    async with asyncio.TaskGroup() as group:
        group.create_task(watched.run())
        group.create_task(interfere())
    print(*watched.events, sep="\n")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args(arguments)
    means: list[float] = []
    for attacked in (False, True):
        with tempfile.TemporaryDirectory() as name, Broker(BrokerSettings()) as broker:
            folder = Path(name)
            asyncio.run(live(folder, broker.url, options.seed, options.rounds, attacked))
            files = [*folder.glob("*.report.json"), *folder.glob("newcomer/*.report.json")]
            reports = [json.loads(path.read_text()) for path in files]
        honest = [report for report in reports if not is_hostile(report["peer"])]
        accuracies = [report["accuracy"] for report in honest]
        rounds = [report["rounds"] for report in honest]
        means.append(float(np.mean(accuracies)))
        refused = Counter[str]()
        for counters in (report[key] for report in honest for key in ("gossip", "dropped")):
            refused.update({key: count for key, count in counters.items() if "refused" in key})
        print(
            f"{'two hostile members' if attacked else 'without attack'}: {len(honest)} honest peers after "
            f"{min(rounds)} to {max(rounds)} rounds, accuracy {means[-1]:.3f}, worst {min(accuracies):.3f}; "
            f"{dict(refused)}",
            flush=True,
        )
    cost = means[0] - means[1]
    print(f"the hostile members cost {cost:.3f}, and may cost {BAR}")
    return 0 if cost <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
