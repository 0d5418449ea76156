"""Who talks to whom: graphs, weights, spectra, schedules and churn."""

from .candidates import Advice, Candidate, advise
from .check import (
    Bridging,
    Members,
    Reach,
    bridge,
    bridged,
    check_models,
    flowing,
    require_models_connected,
    subgraphs,
)
from .churn import Event, churn, draw_events, read_events, write_events
from .delay import delayed_matrix, link_delays
from .errors import DisconnectedError, TopologyError
from .facts import Facts, facts, model_facts, schedule_rate
from .files import from_function, load, plain
from .graphs import Seed
from .losses import Loss, Point, fewest_to_split, random_loss, without, worst_loss
from .measure import consensus_errors, contraction, exchanges_to, log_errors
from .schedule import Schedule, one_peer_exponential, random_matchings, rotating_rings, static
from .spec import BUILDERS, SCHEDULES, Spec, build, build_schedule, parse
from .spectrum import period_rate, predicted_exchanges, second_eigenvalue, spectral_gap
from .structure import components, effective_diameter, require_connected, weak_spots
from .weights import (
    Rule,
    check_stochastic,
    edge_weights,
    max_degree,
    metropolis,
    mixing_matrix,
    uniform_push,
    weighted,
    with_weights,
)

__all__ = [
    "BUILDERS",
    "SCHEDULES",
    "Advice",
    "Bridging",
    "Candidate",
    "DisconnectedError",
    "Event",
    "Facts",
    "Loss",
    "Members",
    "Point",
    "Reach",
    "Rule",
    "Schedule",
    "Seed",
    "Spec",
    "TopologyError",
    "advise",
    "bridge",
    "bridged",
    "build",
    "build_schedule",
    "check_models",
    "check_stochastic",
    "churn",
    "components",
    "consensus_errors",
    "contraction",
    "delayed_matrix",
    "draw_events",
    "edge_weights",
    "effective_diameter",
    "exchanges_to",
    "facts",
    "fewest_to_split",
    "flowing",
    "from_function",
    "link_delays",
    "load",
    "log_errors",
    "max_degree",
    "metropolis",
    "mixing_matrix",
    "model_facts",
    "one_peer_exponential",
    "parse",
    "period_rate",
    "plain",
    "predicted_exchanges",
    "random_loss",
    "random_matchings",
    "read_events",
    "require_connected",
    "require_models_connected",
    "rotating_rings",
    "schedule_rate",
    "second_eigenvalue",
    "spectral_gap",
    "static",
    "subgraphs",
    "uniform_push",
    "weak_spots",
    "weighted",
    "with_weights",
    "without",
    "worst_loss",
    "write_events",
]
