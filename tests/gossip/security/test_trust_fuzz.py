"""Mutated messages, by the thousand, over the whole receive path: nothing raises, nothing grows.

`GOSSAMER_FUZZ=200000 pytest --timeout 1800 tests/gossip/security/test_trust_fuzz.py` runs that many (about
a minute). The seed is fixed: what fails, fails again.
"""

from __future__ import annotations

import logging
import os
import resource

import numpy as np
from fuzz_kit import Target

from gossamer.gossip.pushsum import MAX_WEIGHT

MESSAGES = int(os.environ.get("GOSSAMER_FUZZ", "20000"))
SHARES = {"outsider": 0.55, "publisher": 0.15, "member": 0.3}
GROWTH_KILOBYTES = 32 << 10


def test_no_mutated_message_raises_changes_or_fills_anything():
    logging.disable(logging.WARNING)
    target = Target(seed=1)
    target.deliver()
    kinds = list(SHARES)
    order = target.rng.choice(len(kinds), size=MESSAGES, p=list(SHARES.values()))
    done, start = dict.fromkeys(kinds, 0), 0
    try:
        for number, kind in enumerate(order):
            if number == MESSAGES // 4:  # caches are full by now
                start = peak()
            name = kinds[kind]
            before = target.state() if name != "member" else None
            getattr(target, name)()
            done[name] += 1
            if before is not None:
                assert target.state() == before, (number, name)
            else:
                check_sound(target)
    finally:
        logging.disable(logging.NOTSET)
    assert peak() - start < GROWTH_KILOBYTES
    assert target.intake.reassembler.held_bytes < 64 * 2000  # its bounds on unfinished messages
    assert target.intake.reassembler.unfinished <= 64
    assert len(target.ben.trust._waiting) <= 256
    assert min(done.values()) > MESSAGES // 20
    # It reached everything: trust, chunks, the wire format, guards, and the books.
    causes = {cause.removeprefix("untrusted-") for cause in target.ben.trust.counters}
    assert causes >= {"malformed", "unknown-sender", "forged", "replayed", "no-key", "signature"}
    assert set(target.dropped) >= {"garbage", "truncated", "trailing", "checksum", "too-large"}
    assert target.gossiper.counters["credited"] > 0


def peak() -> int:
    """Kilobytes that the process has held at most so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def check_sound(target: Target) -> None:
    """A member can be credited; what it cannot do is make values that are not, or a broken book."""
    value = target.gossiper.value("global")
    assert np.isfinite(value).all()
    assert 0 < target.gossiper.weight("global") <= MAX_WEIGHT
    assert set(target.ben.trust.register.members) == {target.anna.name, target.carl.name}
    assert len(target.ben.trust.keyring._models["global"].keys) <= 3


def test_the_untouched_messages_would_have_passed():
    """Or the fuzzer would only show that nothing ever gets through."""
    target = Target(seed=2)
    taken = [target.intake.take("global", packet, 0.0) for packet in target.captured]
    messages = [message for message in taken if message is not None]
    assert [message.sequence for message in messages] == list(range(1, 9))
    for at, statement in target.statements[1:3]:
        target.clock.now += 1
        assert target.ben.trust.hear(at, statement) is not None
    assert not target.ben.trust.counters
