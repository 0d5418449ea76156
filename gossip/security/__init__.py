"""Security on a broker that is not trusted: identities, invitations, sealed packets, guards on values."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
