"""The one error that this package raises for bad input."""


class ModelError(ValueError):
    """A network, slicing or set of networks that cannot be used; the text says which part and model."""
