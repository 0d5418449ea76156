"""Partial models and the order in which they depend on each other."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import networkx as nx

from .errors import ModelError

# Names travel in topics and file names, and two of them joined by `&` name a pair.
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,31}")


class ModelGraph:
    """A strict partial order on partial models.

    Build it from who depends on whom; models that are only depended on need no entry of their own:

        ModelGraph({"quebec": ["french"], "france": ["french"]})

    A networkx DiGraph with edges *from a model to what it depends on* is accepted as well.
    """

    def __init__(self, depends: Mapping[str, Iterable[str]] | nx.DiGraph | None = None):
        if isinstance(depends, nx.DiGraph):
            graph = nx.DiGraph(depends)
        else:
            graph = nx.DiGraph()
            for model, others in (depends or {}).items():
                if isinstance(others, str):
                    raise ModelError(
                        f"model {model!r}: write what it depends on as a list, as in [{others!r}]"
                    )
                graph.add_node(model)
                graph.add_edges_from((model, other) for other in others)
        for model in graph:
            check_name(model)
        try:
            cycle = [edge[0] for edge in nx.find_cycle(graph)]
        except nx.NetworkXNoCycle:
            pass
        else:
            raise ModelError(
                "models depend on each other in a circle: " + " → ".join([*cycle, cycle[0]])
            )
        self._below: dict[str, frozenset[str]] = {
            model: frozenset(nx.descendants(graph, model)) for model in graph
        }

    @property
    def models(self) -> frozenset[str]:
        """Every model that the order mentions."""
        return frozenset(self._below)

    def dependencies(self, model: str) -> frozenset[str]:
        """All that `model` depends on, directly or through others."""
        return self._below.get(model, frozenset())

    def depends(self, lower: str, higher: str) -> bool:
        """Whether `lower` depends on `higher`, directly or through others."""
        return higher in self.dependencies(lower)

    def reduced(self, models: Iterable[str]) -> frozenset[str]:
        """The paper's R(π): drop every model that another one in the set depends on."""
        present = frozenset(models)
        return present.difference(*(self.dependencies(model) for model in present))

    def owner(self, models: Iterable[str], *, cross: bool = False) -> str | None:
        """Who averages a parameter whose cells belong to `models`; None when it stays private.

        With `cross` (the paper's Algorithm 2) unrelated models own it together, under `pair_name`.
        """
        left = self.reduced(models)
        if len(left) == 1:
            return next(iter(left))
        return pair_name(left) if cross and left else None


def pair_name(models: Iterable[str]) -> str:
    """The name under which unrelated models own a coordinate together: `green&yellow`."""
    return "&".join(sorted(models))


def check_name(model: object) -> str:
    """Return a model's name if it can be used as one."""
    if not isinstance(model, str) or not _NAME.fullmatch(model):
        raise ModelError(
            f"{model!r} cannot name a partial model: use 1 to 31 letters, digits, '.', '_', '@' or '-'"
        )
    return model
