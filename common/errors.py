"""The base class of Gossamer's errors."""


class GossamerError(Exception):
    """Base of all errors that Gossamer raises on purpose.

    Its message is one line for the person who can fix it: what was wrong, where, and what to do.
    """
