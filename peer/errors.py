"""The errors that end a peer."""


class PeerError(Exception):
    """Something that waiting does not cure; the text is one line that says what to do about it."""


class NotSaved(PeerError):
    """The checkpoint cannot be written. The peer ends as if it was killed, and says no goodbye: nobody was
    told what the last one that was written does not know, so that it can go on from there."""
