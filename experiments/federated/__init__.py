"""Methods of learning together on one interface, and a command that compares them."""

from .client import Client
from .method import Method, RoundReport, ServerMethod, Turn
from .registry import METHODS, find

__all__ = ["METHODS", "Client", "Method", "RoundReport", "ServerMethod", "Turn", "find"]
