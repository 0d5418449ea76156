"""The errors that end a peer."""


class PeerError(Exception):
    """Something that waiting does not cure; the text is one line that says what to do about it."""
