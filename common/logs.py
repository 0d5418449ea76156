"""Limits the log lines of an event that repeats."""


def is_milestone(count: int) -> bool:
    """Return True for 1, 2, 4, 8, …: the occurrences of a repeating event that are logged."""
    return count & (count - 1) == 0
