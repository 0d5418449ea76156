"""Peers learn together by gossip, with no server in charge."""
