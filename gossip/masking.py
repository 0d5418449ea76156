"""Private averaging: pairwise masks that cancel, so that neighbours learn only the average. No IO.

Before a round's averaging every two neighbours derive a common mask from a secret that only they share; one
adds it to its sum, the other subtracts it. The masks hide the values that each peer then gossips, and add up
to zero, so the average is the same. A neighbour knows only the mask that it shares with a peer, so a peer's
values stay hidden unless all its neighbours collude.

Masks are generated with a cipher, not a random number generator, and are multiples of a power of two, so that
both peers compute the same numbers, bit for bit, on any machine.

Masks need rounds in which both peers of each pair take part: the lockstep modes. They cost log(scale) more
exchanges, because masked values differ by the masks' scale.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from .gossiper import Gossiper
from .pushsum import ONE, Array, Mass, is_finite

_BITS = 24
"""Random bits per number of a mask: as many as the significand of a float32, so that masks are exact."""


@dataclass(frozen=True, slots=True)
class MaskPlan:
    """How a partial model is masked.

    scale: the largest magnitude in a mask, a power of two. It should be much larger than the values to hide:
        with masks of standard deviation s (scale / √3 each) on values of standard deviation v, a neighbour's
        best guess has a correlation of about v / s with the values. Raise it for more privacy; this costs
        log(scale) more exchanges and, in float32, an error of about scale · 1e-7.
    """

    scale: float = 64.0

    def __post_init__(self) -> None:
        if not (self.scale > 0 and math.frexp(self.scale)[0] == 0.5):
            raise ValueError(f"private averaging: scale {self.scale} is not a power of two")


def mask(secret: bytes, model: str, round: int, length: int, scale: float) -> Array:
    """Return the common mask of two peers for one model and one round, in float64.

    secret: the 32 bytes that only the two peers share (`Keyring.mask_secret`).
    """
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    if len(secret) != 32:
        raise ValueError(f"private averaging: a secret of {len(secret)} bytes, not 32")
    # Each use has its own key, derived with keyed BLAKE2. The "0" must stay, or masks change.
    label = "\0".join(("gossamer mask v1", model, str(round), "0")).encode()
    key = hashlib.blake2b(label, key=secret, digest_size=32).digest()
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update(bytes(4 * length))
    numbers = np.frombuffer(stream, "<u4") >> (32 - _BITS)
    half = float(1 << (_BITS - 1))
    return (numbers.astype(np.float64) - half) * (scale / half)


@dataclass(slots=True)
class PrivateRound:
    """The masks of one peer in one private round of one model.

        private = PrivateRound("anna", "global", round=3, secrets={"ben": …, "carl": …})
        mass = private.enter(mass)           # gossip this masked mass
        mass = private.cancel("ben", mass)   # if ben vanished before it sent any mass

    peer, model, round: two peers use the same masks if model and round are the same.
    secrets: the secret shared with each neighbour that takes part. Two neighbours must list each other:
        lockstep rounds wait for exactly these neighbours.
    """

    peer: str
    model: str
    round: int
    secrets: Mapping[str, bytes] = field(repr=False)
    plan: MaskPlan = field(default_factory=MaskPlan)
    _has_begun: bool = False
    _cancelled: set[str] = field(default_factory=set)

    def enter(self, mass: Mass) -> Mass:
        """Return the mass to gossip, with the same weight and a masked value.

        Raise ValueError with fewer than two neighbours (a single one could subtract its mask), for mass
        without weight or with values that are not finite, and if the round has begun already.
        """
        if self._has_begun:
            raise ValueError(f"private round {self.round} of {self.model!r} has begun already")
        if len(self.secrets) < 2:
            raise ValueError(
                f"private averaging of {self.model!r}: peer {self.peer!r} has {len(self.secrets)} "
                "neighbours, and a single one could subtract its mask; give it two or more"
            )
        if mass.weight == 0:
            raise ValueError(f"private averaging of {self.model!r}: no weight, nothing to hide")
        if not is_finite(mass.value):
            raise ValueError(
                f"private averaging of {self.model!r}: its values are NaN or infinite, which no mask hides: "
                "the training has diverged; lower the learning rate, or check the data"
            )
        self._has_begun = True
        return _add_to_sum(mass, self._total(self.secrets, mass.value.size))

    def cancel(self, neighbour: str, mass: Mass) -> Mass:
        """Return the given mass without the mask shared with a neighbour.

        Exact if the neighbour vanished before it sent any of its masked mass: then its mask is in no other
        peer's mass. If it sent some, a part of its mask stays in the average.
        """
        if not self._has_begun or neighbour not in self.secrets or neighbour in self._cancelled:
            return mass
        self._cancelled.add(neighbour)
        return _add_to_sum(mass, -self._total([neighbour], mass.value.size))

    def _total(self, neighbours: Collection[str], length: int) -> Array:
        """Return the sum of the masks shared with neighbours, each with this peer's sign."""
        total = np.zeros(length)
        for other in sorted(neighbours):
            common = mask(self.secrets[other], self.model, self.round, length, self.plan.scale)
            total += common if self.peer < other else -common
        return total


def enter_round(
    gossiper: Gossiper,
    number: int,
    secret_with: Callable[[str], bytes],
    plans: Mapping[str, MaskPlan],
) -> dict[str, PrivateRound]:
    """Mask the models of a gossiper that have a plan; call it just before its mode begins round `number`.

    secret_with: returns the secret shared with a neighbour (`Keyring.mask_secret`). Keep the result until the
        round is over, for `leave_round`.
    """
    rounds, masked = {}, {}
    for model, plan in plans.items():
        secrets = {other: secret_with(other) for other in gossiper.neighbours(model)}
        rounds[model] = PrivateRound(gossiper.peer, model, number, secrets, plan)
        masked[model] = rounds[model].enter(Mass(gossiper.value(model), gossiper.weight(model)))
    for model, mass in masked.items():  # only if all can be masked: no mask may stay in a value
        gossiper.set_value(model, mass.value)
    return rounds


def leave_round(gossiper: Gossiper, rounds: Mapping[str, PrivateRound], neighbour: str) -> None:
    """Remove the masks shared with a vanished neighbour; call it when the neighbour's session is gone.

    Correct only if the neighbour has sent no mass in this round: see `PrivateRound.cancel`.
    """
    for model, private in rounds.items():
        mass = private.cancel(neighbour, Mass(gossiper.value(model), gossiper.weight(model)))
        gossiper.set_value(model, mass.value)


def _add_to_sum(mass: Mass, change: Array) -> Mass:
    """Return mass whose sum vector (weight · value) is larger by ONE · `change`; the weight stays."""
    if mass.weight == 0:
        raise ValueError("private averaging: a mask cannot be removed from mass without weight")
    with np.errstate(over="ignore"):
        value = (mass.value + change * (ONE / mass.weight)).astype(mass.value.dtype)
    if not is_finite(value):
        raise ValueError(f"private averaging: masks overflow {mass.value.dtype}; lower the scale")
    return Mass(value, mass.weight)
