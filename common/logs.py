"""Log lines that a flood cannot multiply."""


def is_milestone(count: int) -> bool:
    """Return True for 1, 2, 4, 8, …: when to log what happens again and again."""
    return count & (count - 1) == 0
