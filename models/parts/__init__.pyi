from .finding import find as find
from .proof import prove as prove
