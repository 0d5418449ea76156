"""The family of errors."""


class GossamerError(Exception):
    """Base of all errors that Gossamer raises on purpose.

    Its text is one line for the person who can put it right: what was wrong, where, and what to do.
    """
