"""Pages about swarms, in the browser: a report of finished runs, and a running swarm or its playback."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
