"""Federated multi-task learning (MOCHA): linear models whose relations are learned with them.

result = multitask(tasks, MultiTaskOptions(relation=0.1))     # with a server
Arena([MultiTaskLearner(task, test, t, len(tasks)) …])        # by gossip, as live peers too"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
