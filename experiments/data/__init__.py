"""Data sets, their partitions over peers, and tasks (permutations of labels).

from gossamer.experiments.data import load, partition

data = load("digits")
for peer, indices in enumerate(partition.successive(len(data.train), peers=8)):
    peer_samples = data.train.take(indices)
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
