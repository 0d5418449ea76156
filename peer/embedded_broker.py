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
from pathlib import Path
from typing import Any


def write_passwords(path: Path, users: dict[str, str]) -> None:
    """Write amqtt's password file."""
    from pwdlib.hashers.argon2 import Argon2Hasher

    hasher = Argon2Hasher()
    path.write_text("".join(f"{user}:{hasher.hash(word)}\n" for user, word in users.items()))


async def run(config: dict[str, Any]) -> None:
    """Serve until the parent closes our standard input or a signal asks us to end."""
    from amqtt.broker import Broker

    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)

    def parent_gone() -> None:
        if not os.read(sys.stdin.fileno(), 1024):
            loop.remove_reader(sys.stdin)
            ended.set()

    loop.add_reader(sys.stdin, parent_gone)
    broker = Broker(config)
    await broker.start()
    await ended.wait()
    await broker.shutdown()


def main() -> None:
    """Entry point of the process."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    asyncio.run(run(json.loads(Path(sys.argv[1]).read_text())))


if __name__ == "__main__":
    main()
