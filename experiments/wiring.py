"""A config's `compress`, `drift` and `dtype` in lockstep: who sends to whom, and over which wire."""

from __future__ import annotations

from collections.abc import Sequence

import networkx as nx

from .arena import Gossip, Mixing, Server
from .build import Member
from .config.tables import Config, ConfigError
from .graphs.swarm import require_push
from .live import check_compression, shared_owners
from .virtual.wire import Wire, wire_of


def wiring_of(
    config: Config, members: Sequence[Member], mixing: Mixing | None, source: str = "config"
) -> tuple[Mixing, Wire]:
    """How peers average and what becomes of values between them, for an arena: its `mixing` and `wire`.

    mixing: that of the config's topology, if it has one. Without one, live peers in `rounds` mode give
    everybody an equal part, and in `server` mode all they have to one of them.
    """
    lossy = config.gossip.lossy[0]
    require_push(config, source, "peers that send messages", f"leave out 'gossip.{lossy}'")
    owners = shared_owners(list(members))
    check_compression(config, list(members), owners, source)
    wire = wire_of(config, members, owners)
    if mixing is not None:
        return mixing, wire
    if config.gossip.mode == "server":
        return Server(), wire
    if config.gossip.mode == "rounds":
        everybody = nx.complete_graph(config.peers)
        return Gossip(everybody, exchanges=config.gossip.exchanges or 1), wire
    raise ConfigError(
        f"{source}: key 'gossip.{lossy}': without a topology and a [time] table async peers "
        'are averaged exactly, and send no messages; add one of them, or use mode = "rounds" or "server"'
    )
