"""Finding the parts of any torch module from one example input."""

from .find import find
from .proof import prove

__all__ = ["find", "prove"]
