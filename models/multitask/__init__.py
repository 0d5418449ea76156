"""Federated multi-task learning (MOCHA): linear models whose relations are learned with them.

result = multitask(tasks, MultiTaskOptions(relation=0.1))     # with a server
Arena([MultiTaskLearner(task, test, t, len(tasks)) …])        # by gossip, as live peers too
"""

from .alternate import MultiTaskResult, multitask
from .learner import MultiTaskLearner
from .local import improve, theta
from .problem import (
    LinearTask,
    MultiTaskOptions,
    coupling,
    dual_objective,
    objective,
    relationship,
    unrelated,
)

__all__ = [
    "LinearTask",
    "MultiTaskLearner",
    "MultiTaskOptions",
    "MultiTaskResult",
    "coupling",
    "dual_objective",
    "improve",
    "multitask",
    "objective",
    "relationship",
    "theta",
    "unrelated",
]
