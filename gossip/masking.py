"""Private averaging: masks that cancel, so that neighbours learn the average and not your values. No IO.

Before a round's averaging every two neighbours draw a common mask from a secret that only they share; one
adds it to its sum, the other subtracts it. What each then gossips is drowned in masks, and the masks add
up to nothing: the average is the same. A neighbour knows the mask it shares with you and none of the
others, so a peer is hidden once it has masks with two peers that do not tell each other.

Masks are drawn with a cipher, not a random number generator, on a grid of powers of two: both ends
compute the same numbers, bit for bit, on any machine.

It needs a round to begin from, with the same neighbours at both ends: the lockstep modes. It costs
log(scale) more exchanges, because values start farther apart by the masks' scale.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from .gossiper import Gossiper
from .pushsum import ONE, Array, Mass, is_finite

_BITS = 24  # exact in float32, whatever the scale


@dataclass(frozen=True, slots=True)
class MaskPlan:
    """How a partial model is masked.

    scale: the largest entry of one mask, as a power of two. It should exceed the values to be hidden by
        far: with masks of standard deviation s (scale / √3 each) over values of standard deviation v, a
        neighbour's best guess has a correlation of about v / s. Raise it for more privacy, at
        log(scale) more exchanges and, in float32, scale · 1e-7 less accuracy.
    """

    scale: float = 64.0

    def __post_init__(self) -> None:
        if not (self.scale > 0 and math.frexp(self.scale)[0] == 0.5):
            raise ValueError(f"private averaging: scale {self.scale} is not a power of two")


def mask(secret: bytes, model: str, round: int, attempt: int, length: int, scale: float) -> Array:
    """Return the common mask of two peers for one model and one attempt at one round; float64, exact.

    secret: 32 bytes that the two share and nobody else has (`Keyring.mask_secret`).
    """
    if len(secret) != 32:
        raise ValueError(f"private averaging: a secret of {len(secret)} bytes, not 32")
    # A key of its own for every use, by a construction that the standard library has: keyed BLAKE2.
    label = f"gossamer mask v1\0{model}\0{round}\0{attempt}".encode()
    key = hashlib.blake2b(label, key=secret, digest_size=32).digest()
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update(bytes(4 * length))
    numbers = np.frombuffer(stream, "<u4") >> (32 - _BITS)
    half = float(1 << (_BITS - 1))
    return (numbers.astype(np.float64) - half) * (scale / half)


@dataclass(slots=True)
class PrivateRound:
    """One peer's part in one private averaging of one model.

        private = PrivateRound("anna", "global", round=3, secrets={"ben": …, "carl": …})
        mass = private.enter(mass)           # masked: gossip this
        mass = private.cancel("ben", mass)   # ben vanished before it gave anything away
        mass = private.again()               # somebody vanished later: begin anew from the true value

    peer, model, round: who, what, when; the same round has the same masks at both ends.
    secrets: per neighbour that takes part, the secret shared with it. Both ends must list each other:
        lockstep rounds wait for exactly these neighbours.
    """

    peer: str
    model: str
    round: int
    secrets: Mapping[str, bytes] = field(repr=False)
    plan: MaskPlan = field(default_factory=MaskPlan)
    attempt: int = 0
    _true: Mass | None = None
    _cancelled: set[str] = field(default_factory=set)

    def enter(self, mass: Mass) -> Mass:
        """Return the mass to gossip instead of the true one: same weight, masked value.

        Refused with fewer than two neighbours: the only one could simply subtract its mask.
        """
        if self._true is not None:
            raise ValueError(f"private round {self.round} of {self.model!r} has begun already")
        if len(self.secrets) < 2:
            raise ValueError(
                f"private averaging of {self.model!r}: peer {self.peer!r} has {len(self.secrets)} "
                "neighbours, and a single one would see through its mask; give it two or more"
            )
        if mass.weight == 0:
            raise ValueError(f"private averaging of {self.model!r}: no weight, nothing to hide")
        if not is_finite(mass.value):
            raise ValueError(
                f"private averaging of {self.model!r}: its values are NaN or infinite, which no mask hides: "
                "the training has diverged; lower the learning rate, or look at the data"
            )
        self._true = Mass(np.array(mass.value), mass.weight)
        return _shifted(mass, self._total(self.secrets, mass.value.size))

    def cancel(self, neighbour: str, mass: Mass) -> Mass:
        """Take the mask shared with a neighbour out again, from whatever mass is held now.

        Exact if the neighbour vanished before it gave any of its masked mass away: then nobody holds
        the other half. If it gave some, begin `again` instead, all of you.
        """
        if self._true is None or neighbour not in self.secrets or neighbour in self._cancelled:
            return mass
        self._cancelled.add(neighbour)
        return _shifted(mass, -self._total([neighbour], mass.value.size))

    def again(self, without: Collection[str] = ()) -> PrivateRound:
        """Return the next attempt at this round, among the neighbours that are left; `true` is what to enter.

        Everybody who takes part must begin the same attempt. New masks: two attempts with the same
        ones would show the difference of what changed between them.
        """
        left = {peer: s for peer, s in self.secrets.items() if peer not in without}
        return PrivateRound(self.peer, self.model, self.round, left, self.plan, self.attempt + 1)

    @property
    def true(self) -> Mass:
        """The mass as it was before it was masked."""
        if self._true is None:
            raise ValueError(f"private round {self.round} of {self.model!r} has not begun")
        return self._true

    def _total(self, neighbours: Collection[str], length: int) -> Array:
        total = np.zeros(length)
        for other in sorted(neighbours):
            common = mask(
                self.secrets[other], self.model, self.round, self.attempt, length, self.plan.scale
            )
            total += common if self.peer < other else -common
        return total


def enter_round(
    gossiper: Gossiper,
    number: int,
    secret_with: Callable[[str], bytes],
    plans: Mapping[str, MaskPlan],
) -> dict[str, PrivateRound]:
    """Mask the planned models of a gossiper; call it just before its mode begins round `number`.

    secret_with: the secret shared with a neighbour (`Keyring.mask_secret`). Keep what is returned
    until the round is over, for `leave_round`.
    """
    rounds = {}
    for model, plan in plans.items():
        secrets = {other: secret_with(other) for other in gossiper.neighbours(model)}
        private = PrivateRound(gossiper.peer, model, number, secrets, plan)
        mass = private.enter(Mass(gossiper.value(model), gossiper.weight(model)))
        gossiper.set_value(model, mass.value)
        rounds[model] = private
    return rounds


def leave_round(gossiper: Gossiper, rounds: Mapping[str, PrivateRound], neighbour: str) -> None:
    """Take a vanished neighbour's masks out; call it when the neighbour's session is gone.

    Right only if it had given nothing away in this round: see `PrivateRound.cancel`.
    """
    for model, private in rounds.items():
        mass = private.cancel(neighbour, Mass(gossiper.value(model), gossiper.weight(model)))
        gossiper.set_value(model, mass.value)


def _shifted(mass: Mass, change: Array) -> Mass:
    """Mass whose *sum* is changed by `change` peers' worth; push-sum keeps values, not sums."""
    if mass.weight == 0:
        raise ValueError("private averaging: a mask cannot be taken out of mass without weight")
    with np.errstate(over="ignore"):
        value = (mass.value + change * (ONE / mass.weight)).astype(mass.value.dtype)
    if not is_finite(value):
        raise ValueError(f"private averaging: masks overflow {mass.value.dtype}; lower the scale")
    return Mass(value, mass.weight)
