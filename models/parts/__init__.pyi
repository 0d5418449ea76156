from .finding import find as find
from .finding import prove as prove
