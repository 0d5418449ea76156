"""How values are averaged: push-sum, transfers, the wire format and transports."""
