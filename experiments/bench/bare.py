"""The baseline of gossip: `python bare.py SPEC.json`, clients that move bytes with aiomqtt and no more.

In every turn each client sends `messages` payloads to its neighbours, one after the other, and waits
until it has received as many. Started as a script it imports nothing heavy: what it costs is what
aiomqtt and the broker cost.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import aiomqtt
from gate import READY, say_through, wait_for_turn  # a sibling: this file runs as a script


def connection(port: int, name: str) -> aiomqtt.Client:
    """Return an aiomqtt client, not connected yet, that never watches a socket which is closed.

    When paho has something to write, aiomqtt adds the writer in the loop's next turn. A broker that hangs
    up in between has made paho close the socket, and the loop prints that `add_writer` failed.
    """
    client = aiomqtt.Client("127.0.0.1", port, identifier=f"bare-{name}")
    paho: Any = client._client  # aiomqtt has no public way to paho
    loop = asyncio.get_running_loop()

    def watch(sock: Any) -> None:
        if paho.socket() is sock and paho.want_write():
            loop.add_writer(sock.fileno(), paho.loop_write)

    # Through the loop even so: paho connects on another thread.
    paho.on_socket_register_write = lambda _client, _data, sock: loop.call_soon_threadsafe(
        watch, sock
    )
    return client


async def run(spec: dict[str, Any], name: str, neighbours: list[str]) -> None:
    """One client: take part in every turn."""
    folder, messages, window = Path(spec["folder"]), spec["messages"], 2 * len(neighbours)
    payload = bytes(spec["bytes"])
    received = 0
    arrived = asyncio.Condition()

    # The receiver in a group of its own: whatever ends the client, it is seen to its end too.
    async with connection(spec["port"], name) as client, asyncio.TaskGroup() as group:
        await client.subscribe(f"bare/{name}")

        async def receive() -> None:
            nonlocal received
            async for message in client.messages:
                if len(message.payload) != len(payload):
                    raise RuntimeError(f"client {name} received something else than was sent")
                received += 1
                async with arrived:
                    arrived.notify_all()

        async def until(count: int) -> None:
            async with arrived:
                await arrived.wait_for(lambda: received >= count)

        receiver = group.create_task(receive())
        say_through(folder, "bare", READY, name)
        for turn in range(spec["turns"]):
            await asyncio.to_thread(wait_for_turn, folder, "bare", turn)
            for index in range(messages):
                # Never far ahead of what comes in, or the broker would have to hold it all.
                await until(turn * messages + index - window)
                await client.publish(f"bare/{neighbours[index % len(neighbours)]}", payload)
            await until((turn + 1) * messages)
            say_through(folder, "bare", turn, name)
        receiver.cancel()


async def main(spec: dict[str, Any]) -> None:
    """All clients of this process."""
    async with asyncio.TaskGroup() as group:
        for name, neighbours in spec["clients"].items():
            group.create_task(run(spec, name, neighbours))


def _first(errors: BaseExceptionGroup) -> BaseException:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


if __name__ == "__main__":
    try:
        asyncio.run(main(json.loads(Path(sys.argv[1]).read_text("utf-8"))))
    except KeyboardInterrupt:
        sys.exit(130)
    except BaseExceptionGroup as errors:
        if not isinstance(_first(errors), aiomqtt.MqttError):
            raise
        sys.exit(f"bare client: {_first(errors)}")  # the broker ended first: one line will do
