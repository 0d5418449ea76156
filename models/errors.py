"""The one error that this package raises for bad input."""

from gossamer.errors import GossamerError


class ModelError(GossamerError, ValueError):
    """A network, slicing or set of networks that cannot be used; the text says which part and model."""
