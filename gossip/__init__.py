"""How values are averaged: push-sum, transfers, the wire format and transports."""

from .delays import Patience
from .gossiper import Account, Gossiper, new_session
from .memory_transport import FaultPlan, MemoryBroker, MemoryTransport
from .messages import Ack, Give, Message, Recall
from .modes import AsyncMode, ManualMode, Mode
from .modes_paced import PacedMode
from .modes_rounds import RoundsMode, exchanges_for
from .modes_server import ServerMode
from .mqtt import MqttOptions, MqttTransport
from .mqtt_address import TlsFiles
from .pushsum import ONE, Mass, absorb, estimate, split
from .store import DictStore, Store
from .transport import Transport, TransportError, Will
from .wire import WireError, decode, encode, schema_hash

__all__ = [
    "ONE",
    "Account",
    "Ack",
    "AsyncMode",
    "DictStore",
    "FaultPlan",
    "Give",
    "Gossiper",
    "ManualMode",
    "Mass",
    "MemoryBroker",
    "MemoryTransport",
    "Message",
    "Mode",
    "MqttOptions",
    "MqttTransport",
    "PacedMode",
    "Patience",
    "Recall",
    "RoundsMode",
    "ServerMode",
    "Store",
    "TlsFiles",
    "Transport",
    "TransportError",
    "Will",
    "WireError",
    "absorb",
    "decode",
    "encode",
    "estimate",
    "exchanges_for",
    "new_session",
    "schema_hash",
    "split",
]
