"""Matching in one process: peers of a config come in one after the other, as live ones would."""

from __future__ import annotations

import numpy as np

from ..models import ModelError
from ..peer import MatchedStore
from .build import Member, Swarm
from .config.matching import starts_apart
from .config.tables import ConfigError


def members_in_order(swarm: Swarm) -> tuple[list[Member], list[MatchedStore]]:
    """Every peer of a config, its cells matched, and its vectors as they are averaged.

    Peers that bring values of their own hear the mean of those before them and are put into its order,
    once; the others start from equal values, and are in order already. No vectors if nothing is matched:
    they are those of the networks.
    """
    config = swarm.config
    apart = starts_apart(config)
    members, stores = swarm.members(), []
    if all(model.matching == "none" for model in config.models):
        return members, stores
    sums: dict[str, np.ndarray] = {}
    counts: dict[str, int] = {}
    for index, member in enumerate(members):
        try:
            trained = config.network.trained is not None
            store = MatchedStore(member.network, swarm.matching(index), trained=trained)
            known = {owner: sums[owner] / counts[owner] for owner in store.names() if owner in sums}
            if apart and known:
                store.keep_apart()
                for owner, mean in known.items():
                    store.write(owner, mean.astype(store.read(owner).dtype))
                store.put_in_order(member.learner)
        except ModelError as error:
            raise ConfigError(f"{swarm.source}: key 'models': peer {index}: {error}") from None
        stores.append(store)
        for owner in store.names() if apart else ():
            value = store.read(owner).astype(np.float64)
            total = sums.get(owner, np.zeros_like(value))
            if total.shape == value.shape:  # other widths are refused by whoever averages them
                sums[owner] = total + value
                counts[owner] = counts.get(owner, 0) + 1
    return members, stores
