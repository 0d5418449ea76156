"""Fusing networks: the `fuse` command, and the experiments of the two papers on matching."""
