"""A running peer: training, gossip, presence and checkpoints in one process."""
