"""The embedded broker's process: `python embedded_broker.py CONFIG.json`, started by broker.py.

It runs amqtt by itself, so that no peer's event loop is shared with it, and imports nothing of this
package, so that it starts fast. It ends when its standard input does: with its parent, that is.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_REFUSED = 0x80


def write_passwords(path: Path, users: dict[str, str]) -> None:
    """Write amqtt's password file."""
    from pwdlib.hashers.argon2 import Argon2Hasher

    hasher = Argon2Hasher()
    path.write_text("".join(f"{user}:{hasher.hash(word)}\n" for user, word in users.items()))


def mended_broker(config: dict[str, Any]) -> Any:
    """amqtt's broker without the races that cost a client its connection or its subscriptions.

    amqtt knows a subscriber by its client id alone. When a client comes back while its former
    connection is still being wound down, the end of the old one takes the new one's subscriptions
    along, or a late subscription of the old one stands in the way of the new one's: the client stays
    connected and never hears anything again. Here a subscription belongs to one connection.
    """
    from amqtt.broker import Broker

    class Mended(Broker):
        def __init__(self, config: dict[str, Any]) -> None:
            super().__init__(config)
            self._subscriptions = _Steady()

        async def add_subscription(self, subscription: tuple[str, int], session: Any) -> int:
            current = self._sessions.get(session.client_id or "", (None, None))[0]
            if current is not None and current is not session:
                return _REFUSED  # a connection that is over, and whose client has a new one
            pattern = subscription[0]
            kept = self._subscriptions.get(pattern, [])
            kept[:] = [
                one for one in kept if one[0] is session or one[0].client_id != session.client_id
            ]
            return await super().add_subscription(subscription, session)

        def _del_subscription(self, a_filter: str, session: Any) -> int:
            kept = self._subscriptions.get(a_filter, [])
            before = len(kept)
            kept[:] = [one for one in kept if one[0] is not session]
            return before - len(kept)

        async def _publish_retained_messages_for_subscription(
            self, subscription: tuple[str, int], session: Any
        ) -> None:
            # amqtt would greet every newcomer with what all the others have asked for.
            if any(one[0] is session for one in self._subscriptions.get(subscription[0], [])):
                await super()._publish_retained_messages_for_subscription(subscription, session)

    return Mended(config)


class _Steady(dict[str, Any]):
    """A dict that may change while somebody iterates over it.

    amqtt waits for sockets in the middle of such a loop; a client that subscribed meanwhile would cost
    another one, just about to connect, its connection.
    """

    def __iter__(self) -> Iterator[str]:
        return iter(list(super().__iter__()))

    def items(self) -> Any:
        """As they are now."""
        return list(super().items())


async def run(config: dict[str, Any]) -> None:
    """Serve until the parent closes our standard input or a signal asks us to end."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)

    def parent_gone() -> None:
        if not os.read(sys.stdin.fileno(), 1024):
            loop.remove_reader(sys.stdin)
            ended.set()

    loop.add_reader(sys.stdin, parent_gone)
    broker = mended_broker(config)
    await broker.start()
    await ended.wait()
    await broker.shutdown()


def main() -> None:
    """Entry point of the process."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    asyncio.run(run(json.loads(Path(sys.argv[1]).read_text())))


if __name__ == "__main__":
    main()
