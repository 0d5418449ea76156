"""A port for a broker that a test starts later, or starts twice."""

import random
import socket


def unused_port(host: str = "127.0.0.1") -> int:
    """Return a random port that is free, below those that systems give to outgoing connections.

    A port that the system chooses would be given to any connection of another test before the broker of
    this test binds it.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
