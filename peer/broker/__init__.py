"""Runs an MQTT broker: its process, configuration, certificates, and a swarm's permissions on it."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
