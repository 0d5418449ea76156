from .find import find as find
from .proof import prove as prove
