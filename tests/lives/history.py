"""Draws a history from a seed, and plays it: devices, processes, a broker and what happens to them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import json
import logging
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch

from gossamer.gossip import Hook, Will
from gossamer.gossip.security import Identity, invite, public_text, save_invitation
from gossamer.models import Metrics, ModelGraph, SlicedNetwork, mlp
from gossamer.peer import LEASE_MARGIN, GoodbyeNotDelivered, Peer, PeerError, Report, Settings

from .broker import Network, SimBroker, SimTransport
from .loop import SimError, SimLoop
from .world import Device, Entropy, Process, Write, sleep_on_worker

CHECKPOINT = Path("peer.checkpoint")
SWARM = "lives"
PATIENCE = 900.0
"""Virtual seconds that peers have to end after everything was healed."""
COUNTS_WITHIN = 13.0
"""Virtual seconds after the last arrival or fault within which everybody online counts: 10, and 3 in which
the broker notices a lost connection."""
SILENCE = 5.0
"""Seconds without word from anybody who counts before a peer founds a model; as in the settings."""
DEVICE_NAMES = ("ann", "ben", "cat", "dan", "eve", "fay")

Mode = Literal["async", "rounds", "server"]


@dataclass(frozen=True)
class Event:
    """Something that happens to a device (or, without one, to the broker).

    steps: how many callbacks of the device's process run after `at` before it happens. A kill between two
        steps of one instant meets states that a kill at a drawn time never would.
    """

    at: float
    kind: str
    device: str = ""
    seconds: float = 0.0
    """How long it lasts, or after how long the process is started again."""
    steps: int = 0
    after: str = ""
    """With text: wait, from `at` on, until the device publishes a status that contains it."""
    forget: bool = False

    def __str__(self) -> str:
        words = [f"{self.at:.2f}", self.kind, self.device]
        words += [f"after {self.after}"] if self.after else []
        words += [f"+{self.steps} steps"] if self.steps else []
        words += [f"for {self.seconds:.2f} s"] if self.seconds else []
        words += ["forgetting"] if self.forget else []
        return " ".join(word for word in words if word)


LEAVE_TIMEOUT = 10.0
"""Seconds that a peer has for leaving, in all histories."""


@dataclass(frozen=True)
class Member:
    """One device of a plan."""

    name: str
    models: tuple[str, ...]
    start: float
    value: float
    step: float
    """Seconds that one round of training takes."""
    slowness: float
    disk: bool = True
    named_boots: bool = True
    late: bool = False
    lease: float = 20.0
    asleep: float = 0.0
    initial: float | None = None
    """Where its values begin, if not where the plan says."""
    lies: bool = False
    """Whether it gives out its own target, whatever it hears from others."""


@dataclass(frozen=True)
class Plan:
    """One history before it is played. The same seed gives the same plan."""

    seed: int
    mode: Mode
    start: Literal["none", "expect", "founder"]
    equal: bool
    trust: bool
    rounds: int
    lease: float
    network: Network
    members: tuple[Member, ...]
    events: tuple[Event, ...] = ()
    guards: bool = False
    """With trust: whether peers judge each other's values. Never in drawn plans: honest peers that a fault
    keeps apart for long drift beyond the guards' bounds."""

    @property
    def calm(self) -> float:
        """When the last fault is over, and everything is healed."""
        ends = [event.at + event.seconds for event in self.events if event.kind != "kill"]
        return max([event.at for event in self.events] + ends + [m.start for m in self.members])

    def describe(self) -> Iterator[str]:
        yield (
            f"seed {self.seed}: {self.mode}, start {self.start}, "
            f"{'equal' if self.equal else 'unequal'} values, trust {'on' if self.trust else 'off'}, "
            f"{self.rounds} rounds, lease {self.lease:g} s, {self.network}"
        )
        for member in self.members:
            yield f"  {member}"
        for event in self.events:
            yield f"  {event}"


# --- drawing -----------------------------------------------------------------------------------------


def draw(seed: int) -> Plan:
    """Draw a plan."""
    rng = random.Random(f"{seed}/plan")
    mode: Mode = rng.choices(("async", "rounds", "server"), (8, 1, 1))[0]
    count = rng.choices((2, 3, 4, 5), (2, 4, 3, 1))[0]
    lease = rng.choice((8.0, 20.0, 40.0))
    start: Any = rng.choices(("none", "expect", "founder"), (3, 2, 2))[0]
    if mode != "async" and start == "none":
        start = "expect"
    members = _members(rng, count, mode, start, lease)
    trust = rng.random() < 0.35
    plan = Plan(
        seed=seed,
        mode=mode,
        start=start,
        equal=rng.random() < 0.5,
        trust=trust,
        rounds=rng.choice((3, 8, 15, 25)),
        lease=lease,
        network=_network(rng, mode),
        members=members,
        events=(),
    )
    silent_death = _silent_death(random.Random(f"{seed}/silent death"), plan)
    power_cut = _power_cut(random.Random(f"{seed}/power cut"), plan)
    together = _leave_together(random.Random(f"{seed}/leave together"), plan)
    return replace(plan, events=(*_events(rng, plan), *silent_death, *power_cut, *together))


def _network(rng: random.Random, mode: Mode) -> Network:
    if rng.random() < 0.4:
        return Network()
    return Network(
        delay=(0.001, rng.choice((0.002, 0.05, 0.2))),
        # Peers in lockstep wait for every packet: with heavy losses a history takes hours.
        drop=rng.choice((0.0, 0.05, 0.3 if mode == "async" else 0.1)),
        duplicate=rng.choice((0.0, 0.1)),
        reorder=rng.choice((0.0, 0.1)),
    )


def _members(
    rng: random.Random, count: int, mode: Mode, start: str, lease: float
) -> tuple[Member, ...]:
    models = ("global", "red", "blue")[: rng.choices((1, 2, 3), (3, 3, 2))[0]]
    gap = rng.choice((0.0, 0.2, 2.0))
    step = rng.choice((0.05, 0.3, 1.0))
    leases_differ = mode == "async" and rng.random() < 0.3
    members = []
    for index, name in enumerate(DEVICE_NAMES[:count]):
        shared = tuple(m for m in models if m == "global" or rng.random() < 0.6)
        late = mode == "async" and start == "none" and index >= 2 and rng.random() < 0.5
        members.append(
            Member(
                name=name,
                models=shared,
                start=index * gap * rng.random() + (rng.uniform(2.0, 12.0) if late else 0.0),
                value=rng.uniform(-2.0, 2.0),
                step=step * rng.uniform(0.7, 1.3),
                slowness=rng.choice((0.003, 0.01, 0.03)),
                disk=rng.random() < 0.9,
                named_boots=rng.random() < 0.85,
                late=late,
                lease=rng.choice((0.4, 1.0, 2.5)) * lease if leases_differ else lease,
            )
        )
    return tuple(members)


def _events(rng: random.Random, plan: Plan) -> Iterator[Event]:
    names = [member.name for member in plan.members]
    horizon = plan.rounds * plan.members[0].step + 4.0
    lockstep = plan.mode != "async"
    kinds = {
        "kill": 9, "freeze": 2, "cut": 2, "broker": 2, "full": 2, "leave": 2, "jump": 1,
        "power": 1, "replace": 1, "blackout": 1, "forget": 1,
    }  # fmt: skip
    if lockstep:  # what these would do to others is refused: nobody can join midway
        for kind in ("power", "replace", "blackout", "forget"):
            del kinds[kind]
    away = [0.1, 0.3, 1.0, 2.0, 4.0, 6.0]
    if not lockstep:
        away += [0.9 * plan.lease, 1.15 * plan.lease, 3 * plan.lease]
    limit = 0.6 * plan.lease if lockstep else 2.0 * plan.lease
    replaced: set[str] = set()
    for _ in range(rng.choices((0, 1, 2, 3, 4, 6), (1, 3, 4, 4, 3, 2))[0]):
        kind = rng.choices(list(kinds), list(kinds.values()))[0]
        device = rng.choice(names)
        at = rng.uniform(0.0, horizon)
        steps = rng.choice((0, rng.randint(1, 30), rng.randint(1, 400)))
        member = plan.members[names.index(device)]
        match kind:
            case "kill" | "power":
                if lockstep and not member.disk:
                    continue
                after = rng.choice(("", "", '"training"', '"settling"', '"done"', '"left"'))
                if after == '"left"':
                    steps = min(steps, rng.randint(0, 40))  # few are left
                forever = not lockstep and rng.random() < 0.15
                back = float("inf") if forever else rng.choice(away) * rng.uniform(0.8, 1.2)
                yield Event(at, kind, device, back, steps, after)
            case "freeze" | "cut":
                seconds = min(limit, rng.choice((0.5, 3.0, 6.0, 20.0)) * rng.uniform(0.5, 1.5))
                yield Event(at, kind, device, seconds, steps)
            case "broker":
                seconds = min(limit, rng.choice((0.1, 2.0, 10.0)) * rng.uniform(0.5, 1.5))
                yield Event(at, kind, "", seconds, forget=rng.random() < 0.5)
            case "full":
                yield Event(at, kind, device, rng.choice((0.5, 5.0, 45.0)) * rng.uniform(0.5, 1.5))
            case "jump":
                most = 30.0 if plan.trust or lockstep else 3600.0
                yield Event(at, kind, device, rng.uniform(-most, most))
            case "leave":
                yield Event(at, kind, device, steps=steps)
            case "blackout":
                back = rng.choice(away)
                cause = rng.choice(("kill", "power"))
                yield Event(at, "broker", "", min(limit, back / 2), forget=rng.random() < 0.5)
                for name in names:
                    yield Event(at, cause, name, back * rng.uniform(0.9, 1.1))
            case "replace" if device not in replaced:
                replaced.add(device)
                seconds = rng.choice((0.5, 4.0, 12.0))
                yield Event(at, kind, device, seconds, forget=rng.random() < 0.5)
            case "forget" if not plan.trust:
                yield Event(at, "kill", device, float("inf"), steps)
                yield Event(at + rng.uniform(1.0, 6.0), kind, device)


def _silent_death(rng: random.Random, plan: Plan) -> Iterator[Event]:
    """Let a device die for good while the broker is down, and another one start again after that.

    Nobody publishes the last will of the dead one: its retained status says that it is online.
    """
    if plan.mode != "async" or rng.random() > 0.1:
        return
    dead, restarted = rng.sample([member.name for member in plan.members], 2)
    at = rng.uniform(1.0, plan.rounds * plan.members[0].step + 8.0)
    seconds = rng.uniform(1.0, 4.0)
    yield Event(at, "broker", "", seconds)
    yield Event(at + 0.1, "kill", dead, float("inf"))
    yield Event(at + 0.2, "kill", restarted, seconds + rng.uniform(0.0, 3.0))


def _power_cut(rng: random.Random, plan: Plan) -> Iterator[Event]:
    """Cut the power of one device and of a broker that forgets; all others restart, and come back later.

    The one has to begin a new session, and must wait for those who count, though it sees nobody at first.
    """
    if plan.mode != "async" or plan.start != "none" or rng.random() > 0.15:
        return
    first, *others = rng.sample([member.name for member in plan.members], len(plan.members))
    at = rng.uniform(8.0, plan.rounds * plan.members[0].step + 10.0)
    yield Event(at, "broker", "", 0.2, forget=True)
    yield Event(at, "power", first, 0.3)
    for other in others:
        yield Event(at, "kill", other, rng.uniform(3.0, 5.0))


def _leave_together(rng: random.Random, plan: Plan) -> Iterator[Event]:
    """Ask all to leave while the broker is away, which comes back when they say goodbye.

    Each takes back what it gave the others, not knowing whether it arrived: their goodbyes must settle that.
    """
    if plan.mode != "async" or rng.random() > 0.1:
        return
    at = rng.uniform(1.0, plan.rounds * plan.members[0].step + 4.0)
    yield Event(at, "broker", "", LEAVE_TIMEOUT * rng.uniform(0.5, 0.9))
    for member in plan.members:
        yield Event(at + rng.uniform(0.0, 0.5), "leave", member.name)


# --- learners and keys -------------------------------------------------------------------------------


class Drifter:
    """A learner that moves its values a little towards its own target in every round."""

    def __init__(self, member: Member, name: str, *, equal: bool, rng: random.Random) -> None:
        slices = {m: "2-2-1" if m == "global" else "0-1-0" for m in member.models}
        graph = ModelGraph({m: [] if m == "global" else ["global"] for m in member.models})
        self.network = SlicedNetwork(mlp("2=5=2"), slices, graph=graph, peer=name, seed=0)
        self._target, self._step, self._rng = member.value, member.step, rng
        self.rounds = 0
        self._pace = 1.0 if member.lies else 0.05
        initial = 0.5 if equal else member.value
        with torch.no_grad():
            self.network.flat.fill_(initial if member.initial is None else member.initial)

    def train(self, steps: int) -> Metrics:
        sleep_on_worker(steps * self._step * self._rng.uniform(0.5, 1.5))
        self.rounds += 1
        with torch.no_grad():
            self.network.flat += self._pace * (self._target - self.network.flat)
        return Metrics(0.0, 0, 1)

    def test(self) -> Metrics:
        return Metrics(0.0, 1, 1)

    def state(self) -> dict[str, Any]:
        return {"rounds": self.rounds}

    def restore(self, state: dict[str, Any]) -> None:
        self.rounds = state["rounds"]


@cache
def _keys() -> tuple[Identity, dict[str, Identity], Path, object]:
    """Return the owner, the identities of all devices, and the folder of their files.

    They are the same in all histories: what is drawn from the seed is what happens.
    """
    temporary = tempfile.TemporaryDirectory(prefix="lives-")
    folder = Path(temporary.name)
    with Entropy("keys"):
        owner = Identity.from_secret("owner", random.Random("owner").randbytes(32))
        people = {}
        for name in DEVICE_NAMES:
            people[name] = Identity.from_secret(name, random.Random(f"key {name}").randbytes(32))
            people[name].save(folder / f"{name}.key")
            save_invitation(
                folder / f"{name}.invitation",
                invite(owner, SWARM, name, people[name].public, days=365),
            )
    return owner, people, folder, temporary


# --- playing -----------------------------------------------------------------------------------------


@dataclass
class Ending:
    """How one process ended."""

    process: Process
    device: Device
    member: Member
    at: float
    report: Report | None = None
    error: BaseException | None = None
    killed: bool = False
    learner: Drifter | None = None


@dataclass
class Saved:
    """A checkpoint that reached a disk."""

    at: float
    device: Device
    process: Process
    tree: dict[str, Any]


@dataclass(frozen=True)
class Founding:
    """A session counts in a partial model in which it had heard of nobody who does."""

    arrived: float
    at: float
    peer: str
    model: str


@dataclass
class History:
    """What happened when a plan was played."""

    plan: Plan
    endings: list[Ending] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)
    """Processes that did not end in time."""
    crash: BaseException | None = None
    """What ended the simulation itself."""
    records: list[tuple[float, str, dict[str, Any]]] = field(default_factory=list)
    saves: list[Saved] = field(default_factory=list)
    written: list[tuple[float, str, Report]] = field(default_factory=list)
    """Every report that a living process wrote: when, and which process."""
    retained: dict[str, bytes] = field(default_factory=dict)
    devices: dict[str, list[Device]] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    """Device → the name of its peer."""
    hasty: list[str] = field(default_factory=list)
    """Who founded a model when somebody who counts in it was about to come back."""
    announced: set[str] = field(default_factory=set)
    """Sessions that have shown a card."""
    left_early: set[str] = field(default_factory=set)
    uncounted: list[str] = field(default_factory=list)
    """Who was online and did not count, some time after the last arrival or fault."""
    loop_errors: list[dict[str, Any]] = field(default_factory=list)
    happened: list[str] = field(default_factory=list)
    """Every event that took place, in plain words."""
    log: list[str] = field(default_factory=list)
    seconds: float = 0.0
    """Virtual time at the end."""
    steps: int = 0
    digest: str = ""
    """A hash over everything that was published, saved and reported: the same for the same seed."""

    def reports(self) -> list[Report]:
        return list({report.session: report for _, _, report in self.written}.values())


class Stage:
    """Plays one plan."""

    def __init__(self, plan: Plan, *, verbose: bool = False) -> None:
        self.plan = plan
        self.history = History(plan)
        self.loop = SimLoop(self._rng("loop"), self._on_step)
        self.broker = SimBroker(self.loop, self._rng("broker"), plan.network, self._on_publish)
        self._members = {member.name: member for member in plan.members}
        self._devices: dict[str, Device] = {}
        self._armed: dict[str, list[list[Any]]] = {}
        """Per owner: [steps left, action]."""
        self._waiting: list[tuple[str, bytes, Callable[[], None]]] = []
        """(topic, text, action) of events that wait for a status."""
        self._restart_after: dict[Process, float] = {}
        self._peers: dict[Process, tuple[Peer, Drifter]] = {}
        self._supervised: set[Device] = set()
        self._supervisors: set[asyncio.Task[None]] = set()
        self._quiet_since = 0.0
        self._arrived: dict[str, float] = {}
        """Sessions that were online, and since when."""
        self._counted: dict[tuple[str, str], float] = {}
        """(session, model) → when it first said that it counts."""
        self._foundings: list[Founding] = []
        self._last_packet: dict[str, float] = {}
        """Inbox → when something was last sent to it."""
        self._outlived: set[str] = set()
        """Sessions of the dead whose retained status said that they were online, for as long as they had."""
        self._digest = hashlib.blake2b(digest_size=8)
        self._verbose = verbose
        for member in plan.members:
            self._devices[member.name] = self._new_device(member)
        if plan.trust:
            self.history.names = {m.name: _keys()[1][m.name].name for m in plan.members}
        else:
            self.history.names = {m.name: m.name for m in plan.members}

    @property
    def peers(self) -> dict[str, Peer]:
        """The peers that run now, by the name of their device."""
        return {p.device.name: peer for p, (peer, _) in self._peers.items() if p.alive}

    def play(self, until: float | None = None) -> History:
        """Play the plan to its end, or until a time."""
        history = self.history
        with self._logging(), Entropy(f"{self.plan.seed}/entropy"), _without_collection():
            try:
                self.loop.run_until_complete(self._conduct(until))
            except Exception as error:
                history.crash = error
            self._clean_up()
        history.retained = dict(self.broker.retained)
        history.loop_errors = self.loop.errors
        history.seconds, history.steps = self.loop.time(), self.loop.steps
        history.digest = self._digest.hexdigest()
        return history

    def _clean_up(self) -> None:
        """Let every task end, whatever state the history was left in."""
        for device in (d for devices in self.history.devices.values() for d in devices):
            for process in device.processes:
                process.kill()
        for supervisor in self._supervisors:
            supervisor.cancel()
        with contextlib.suppress(SimError):
            self.loop.run_until_complete(self._everything_ends())
        self.loop.close()

    async def _everything_ends(self) -> None:
        """Wait for the tasks of killed processes, and cancel what else there may be."""
        for _ in range(2):
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            if not tasks:
                return
            await asyncio.wait(tasks, timeout=300.0)
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

    def _rng(self, what: str) -> random.Random:
        return random.Random(f"{self.plan.seed}/{what}")

    def _note(self, text: str) -> None:
        self.history.happened.append(f"{self.loop.time():.3f} {text}")
        self.history.log.append(f"{self.loop.time():9.3f} ** {text}")
        self._digest.update(self.history.happened[-1].encode())

    # --- the course of events -------------------------------------------------------------------

    async def _conduct(self, until: float | None) -> None:
        plan = self.plan
        for member in plan.members:
            self.loop.call_at(member.start, self._begin_to_supervise, member.name)
        for event in plan.events:
            self.loop.call_at(event.at, self._arm, event)
        if until is not None:
            await asyncio.sleep(until)
            return
        await asyncio.sleep(plan.calm if plan.calm != float("inf") else 0.0)
        last = max(
            [member.start for member in plan.members]
            + [e.at + e.seconds for e in plan.events if e.kind not in ("kill", "power", "jump")]
            + [e.at for e in plan.events]
        )
        await asyncio.sleep(max(0.0, last - self.loop.time()) + 0.001)
        self._heal_everything()
        async with asyncio.timeout(None) as limit:
            limit.reschedule(self.loop.time() + PATIENCE)
            try:
                while self._supervisors:
                    await asyncio.wait(tuple(self._supervisors))
            except asyncio.CancelledError:
                if not limit.expired() and self.loop.time() < limit.when():
                    raise
        if self._supervisors:
            self.history.stuck = sorted(task.get_name() for task in self._supervisors)

    def _heal_everything(self) -> None:
        """End every fault. Kills that wait for the end of a life still come: its last steps matter."""
        self._note("everything is healed")
        if not self.broker.running:
            self.broker.start()
        for name, device in self._devices.items():
            device.full_until = min(device.full_until, self.loop.time())
            if device.is_cut:
                self.broker.heal(device)
            process = device.process
            if process is not None:
                self._thaw(process)
            del name

    def _arm(self, event: Event) -> None:
        """Let an event happen now, after some steps of its process, or when a status was published."""

        def act() -> None:
            self._happen(event)

        def step() -> None:
            process = self._devices[event.device].process if event.device else None
            if event.steps and process is not None:
                self._armed.setdefault(process.owner, []).append([event.steps, act])
            else:
                act()

        if event.after:
            topic = f"/peer/{self.history.names[event.device]}/status"
            self._waiting.append((topic, event.after.encode(), step))
        else:
            step()

    def _on_step(self, owner: str) -> None:
        armed = self._armed.get(owner)
        if not armed:
            return
        for entry in list(armed):
            entry[0] -= 1
            if entry[0] <= 0:
                armed.remove(entry)
                entry[1]()

    def _happen(self, event: Event) -> None:
        loop, broker = self.loop, self.broker
        self._note(str(event))
        self._unsettle(event.seconds if event.kind in ("broker", "cut", "freeze", "full") else 0.0)
        device = self._devices.get(event.device)
        process = None if device is None else device.process
        match event.kind:
            case "broker":
                broker.stop(forget=event.forget)
                loop.call_later(event.seconds, broker.start)
            case "jump":
                assert device is not None
                device.offset += event.seconds
            case "full":
                assert device is not None
                device.full_until = loop.time() + event.seconds
            case "cut":
                assert device is not None
                broker.cut(device)
                loop.call_later(event.seconds, broker.heal, device)
            case "replace":
                self._replace(event)
            case "forget":
                self._declare_dead(self.history.names[event.device])
            case _ if process is None or device is None:
                self._note(f"{event.device} does not run: nothing happens")
            case "kill" | "power":
                self._restart_after[process] = event.seconds
                process.kill()
                broker.die(process, silently=event.kind == "power")
                if event.kind == "power":
                    device.cut_power()
            case "freeze":
                loop.hold(process.owner)
                broker.freeze(process)
                loop.call_later(event.seconds, self._thaw, process)
            case "leave":
                self.history.left_early.add(event.device)
                peer = self._peers[process][0]
                loop.call_soon(peer.leave, context=process.context)

    def _thaw(self, process: Process) -> None:
        self.loop.release(process.owner)
        self.broker.thaw(process)

    def _replace(self, event: Event) -> None:
        """Put a new device with an empty disk in the place of one that is cut off.

        That one dies (`forget`), or comes back later and finds its name taken.
        """
        old = self._devices[event.device]
        self.broker.cut(old)
        process = old.process
        if process is not None and not event.forget:
            self._restart_after[process] = float("inf")
            back = event.seconds + self._rng("return").uniform(0.5, 10.0)
            self.loop.call_later(back, self.broker.heal, old)
        elif process is not None:
            self._restart_after[process] = float("inf")
            process.kill()
            self.broker.die(process, silently=True)
        else:
            self._restart_after = {
                p: float("inf") if p.device is old else s for p, s in self._restart_after.items()
            }
        self._devices[event.device] = self._new_device(self._members[event.device])
        self.loop.call_later(event.seconds, self._begin_to_supervise, event.device)

    def _declare_dead(self, name: str) -> None:
        """Publish a death notice for the session that is offline under a name, as an operator does."""
        topic = f"gossamer/v1/{SWARM}/peer/{name}"
        status = json.loads(self.broker.retained.get(f"{topic}/status", b"{}"))
        if status.get("state") == "offline":
            notice = {
                "session": status["session"],
                "reason": "it burnt down",
                "by": "operator",
                "time": 0.0,
            }
            self.broker.publish("operator", f"{topic}/death", json.dumps(notice).encode(), True)

    def _unsettle(self, seconds: float = 0.0) -> None:
        """Note that somebody came, or something is wrong for so long: who counts is looked at later."""
        at = self.loop.time() + (seconds if seconds != float("inf") else 0.0)
        self._quiet_since = max(self._quiet_since, at)
        self.loop.call_at(
            self._quiet_since + COUNTS_WITHIN, self._look_who_counts, self._quiet_since
        )

    def _notice_status(self, peer: str, status: dict[str, Any]) -> None:
        """Note that a session is online for the first time (a process may have several), or counts."""
        if status["state"] != "online":
            return
        now, session = self.loop.time(), status["session"]
        if session not in self._arrived:
            self._arrived[session] = now
            self._outlived.clear()
            self._unsettle()
        for model in status["counts"]:
            for found in self._foundings:
                before = self._counted.get((session, model), now) < found.arrived
                if found.model == model and before and now < found.arrived + SILENCE:
                    self.history.hasty.append(
                        f"at {found.at:.1f} s {found.peer} founded {model}; {peer}, who counts, came back "
                        f"{now - found.arrived:.1f} s after it had arrived"
                    )
            if (session, model) not in self._counted:
                self._counted[session, model] = now
                if self.plan.start == "none" and not self._was_heard(peer, session, model):
                    self._foundings.append(Founding(self._arrived[session], now, peer, model))

    def _was_heard(self, peer: str, session: str, model: str) -> bool:
        """Return whether anybody counted in a model, or gave of it, since a session arrived."""
        place = f"gossamer/v1/{SWARM}/peer"
        if self._last_packet.get(f"{place}/{peer}/inbox/{model}", -1.0) >= self._arrived[session]:
            return True
        others = [m.name for m in self.plan.members if m.name != peer]
        statuses = [
            json.loads(self.broker.retained.get(f"{place}/{o}/status", b"{}")) for o in others
        ]
        return any(s.get("state") == "online" and model in s["counts"] for s in statuses)

    def _look_who_counts(self, since: float) -> None:
        """Write down who is online, and in which of its models it does not count."""
        if since != self._quiet_since or self.plan.mode != "async" or self.plan.trust:
            return
        names = self.history.names
        online, ghosts = {}, {}
        for member in self.plan.members:
            place = f"gossamer/v1/{SWARM}/peer/{names[member.name]}/status"
            status = json.loads(self.broker.retained.get(place, b"{}"))
            # The last will of a process that died while the broker was down is never published.
            alive = self._devices[member.name].process is not None
            if status.get("state") == "online":
                (online if alive else ghosts)[member] = status
        if self.plan.start != "none" and len(online) < len(self.plan.members):
            return  # somebody may wait for a peer that is expected
        for member, status in online.items():
            lacking = sorted(set(member.models) - status["counts"].keys())
            waits_for = [
                ghost.lease
                for ghost, its in ghosts.items()
                if its["session"] not in self._outlived and its["counts"].keys() & set(lacking)
            ]
            lost = [
                self.broker.last_drop.get(
                    f"gossamer/v1/{SWARM}/peer/{names[member.name]}/inbox/{m}", -1.0
                )
                for m in lacking
            ]
            if any(
                at >= since for at in lost
            ):  # what it waits for is repeated, with longer and longer pauses
                self._unsettle()
                return
            if waits_for:  # it counts, as far as anybody can know before its lease is over
                self._outlived |= {its["session"] for its in ghosts.values()}
                self._unsettle(LEASE_MARGIN * max(waits_for))
                return
            if lacking:
                self.history.uncounted.append(
                    f"at {self.loop.time():.1f} s {member.name} does not count in {', '.join(lacking)}"
                )

    # --- processes ------------------------------------------------------------------------------

    def _new_device(self, member: Member) -> Device:
        devices = self.history.devices.setdefault(member.name, [])
        device = Device(
            f"{member.name}{'+' * len(devices)}",
            self.loop,
            self._rng(f"device {member.name} {len(devices)}"),
            named_boots=member.named_boots,
        )
        devices.append(device)
        return device

    def _begin_to_supervise(self, name: str) -> None:
        device = self._devices[name]
        if device in self._supervised:
            return  # it was replaced before its first start
        self._supervised.add(device)
        task = self.loop.create_task(self._supervise(name, device), name=f"supervisor of {name}")
        self._supervisors.add(task)
        task.add_done_callback(self._supervisors.discard)

    async def _supervise(self, name: str, device: Device) -> None:
        """Start a process again whenever it was killed, as a service manager does."""
        again = 0
        while self._devices[name] is device:
            process = self._start(name, device)
            assert process.task is not None
            await asyncio.wait((process.task,))
            ending = self._ended(name, device, process)
            if self._has_finished(process, device):
                return  # what its host finds out from the files that it left
            if ending.killed:
                pause = self._restart_after.get(process, float("inf"))
            elif ending.error is not None and _worth_another_try(ending.error) and again < 20:
                again += 1
                pause = 5.0
            else:
                return
            if pause == float("inf"):
                return
            await asyncio.sleep(pause)
            if self._restart_after.get(process) == float("inf"):
                return

    def _has_finished(self, process: Process, device: Device) -> bool:
        """Return whether a process wrote its last report and removed its checkpoint."""
        reports = [r for _, owner, r in self.history.written if owner == process.owner]
        return bool(reports) and reports[-1].ended == "finished" and not device.disk.get(CHECKPOINT)

    def _start(self, name: str, device: Device) -> Process:
        member = self._members[name]
        process = Process(
            device,
            slowness=member.slowness,
            on_save=lambda path, write: self._on_save(device, process, path, write),
        )
        process.on_death.append(lambda: None)
        learner = Drifter(
            member, self.history.names[name], equal=self.plan.equal, rng=self._rng(process.owner)
        )

        def connect(client_id: str, will: Will, on_connect: Hook) -> SimTransport:
            return SimTransport(self.broker, process, client_id, will, on_connect)

        def on_record(record: dict[str, Any]) -> None:
            if process.alive:
                self.history.records.append((self.loop.time(), process.owner, record))

        def on_report(report: Report) -> None:
            if process.alive:
                self.history.written.append((self.loop.time(), process.owner, report))
                self._note(
                    f"{process.owner} reports: {report.session} {report.ended} {report.weight}"
                )

        def make() -> Peer:
            return Peer(
                name, learner, self._settings(member, device), connect,
                checkpoint=CHECKPOINT if member.disk else None,
                seed=self._rng(f"peer {process.owner}").getrandbits(32),
                machine=process, on_record=on_record, on_report=on_report,
            )  # fmt: skip

        peer = process.context.run(make)
        self._peers[process] = peer, learner
        self._note(f"{process.owner} starts")
        self._outlived.clear()  # it knows nothing of how long they have been silent
        self._unsettle()
        process.start(peer.run())
        return process

    def _ended(self, name: str, device: Device, process: Process) -> Ending:
        assert process.task is not None
        task = process.task
        ending = Ending(process, device, self._members[name], self.loop.time())
        ending.learner = self._peers[process][1]
        if not process.alive:
            ending.killed = True
            how = "was killed"
            if not task.cancelled() and task.exception() is None:
                how += " (its task had returned)"
        elif task.cancelled():
            ending.error = asyncio.CancelledError("its task was cancelled by nobody")
            how = "was cancelled"
        elif task.exception() is not None:
            ending.error = task.exception()
            how = f"failed: {ending.error!r}"
        else:
            ending.report = task.result()
            how = f"ended: session {ending.report.session}, weight {ending.report.weight}"
        process.alive = False
        self.broker.die(process, silently=False)
        self.history.endings.append(ending)
        self._note(f"{process.owner} {how}")
        return ending

    def _settings(self, member: Member, device: Device) -> Settings:
        plan, names = self.plan, self.history.names
        # A person says so of a new device; a supervisor, of a process without a disk that it saw die.
        replaces = device is not self.history.devices[member.name][0]
        restarted = not member.disk and len(device.processes) > 1
        first = [names[m.name] for m in plan.members if not m.late]
        settings = Settings(
            swarm=SWARM, mode=plan.mode, rounds=plan.rounds, tick=0.25, lease=member.lease,
            settle_tolerance=1e-3, settle_timeout=15.0, start_timeout=120.0, leave_timeout=LEAVE_TIMEOUT,
            save_every=3.0, test_every=4, silence=SILENCE, asleep=member.asleep,
            expect=() if plan.start == "none" else tuple(first),
            founder=True if plan.start == "founder" else None, replace=replaces or restarted,
            servers={
                m: names[next(p.name for p in plan.members if m in p.models)]
                for m in ("global", "red", "blue")
                if any(m in p.models for p in plan.members)
            } if plan.mode == "server" else {},
        )  # fmt: skip
        if plan.trust:
            owner, _, folder, _ = _keys()
            settings = settings.updated(
                trust="swarm",
                identity=str(folder / f"{member.name}.key"),
                invitation=str(folder / f"{member.name}.invitation"),
                owner=public_text(owner.public),
                guards=None if plan.guards else "off",
            )
        return settings

    # --- what is seen ---------------------------------------------------------------------------

    def _on_publish(self, client: str, topic: str, payload: bytes, retain: bool) -> None:
        self._digest.update(f"{self.loop.time():.6f} {client} {topic} {retain}".encode() + payload)
        if self._verbose:
            text = (
                repr(payload[:300]) if topic.endswith(("card", "status")) else f"{len(payload)} B"
            )
            self.history.log.append(f"{self.loop.time():9.3f} -> {client} {topic[18:]} {text}")
        if topic.endswith("/card") and payload:
            self.history.announced.add(client.rpartition("-")[2])
        if not self.plan.trust and topic.endswith("/status"):
            self._notice_status(topic.split("/")[-2], json.loads(payload))
        self._last_packet[topic] = self.loop.time()
        for entry in list(self._waiting):
            where, text, act = entry
            if topic.endswith(where) and text in payload:
                self._waiting.remove(entry)
                act()

    def _on_save(self, device: Device, process: Process, path: Path, write: Write) -> None:
        self._digest.update(f"{write.at:.6f} {process.owner} saves {path}".encode())
        self.history.saves.append(Saved(write.at, device, process, write.tree))

    @contextlib.contextmanager
    def _logging(self) -> Iterator[None]:
        logger, handler = logging.getLogger("gossamer"), _Lines(self)
        before = logger.level, logger.propagate
        logger.addHandler(handler)
        logger.propagate = False
        logger.setLevel(logging.DEBUG if self._verbose else logging.INFO)
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.level, logger.propagate = before


class _Lines(logging.Handler):
    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self._stage = stage

    def emit(self, record: logging.LogRecord) -> None:
        now = self._stage.loop.time()
        self._stage.history.log.append(
            f"{now:9.3f} {record.levelname[0]} {record.name.removeprefix('gossamer.')}: "
            f"{record.getMessage()}"
        )


def _worth_another_try(error: BaseException) -> bool:
    """Return whether a service manager's restart can cure what ended a process."""
    text = str(error)
    return isinstance(error, PeerError) and (
        "cannot be written" in text
        or "is already online" in text
        or isinstance(error, GoodbyeNotDelivered)
    )


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Keep the cyclic collector from running finalizers at moments that no seed decides."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


async def _nothing() -> None:
    pass


def play(seed: int, *, verbose: bool = False) -> History:
    """Draw the history of a seed and play it."""
    return Stage(draw(seed), verbose=verbose).play()
