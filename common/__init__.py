"""Gossamer: peers learn together by gossip, with no server in charge."""

from importlib.metadata import version

__version__ = version("gossamer")
