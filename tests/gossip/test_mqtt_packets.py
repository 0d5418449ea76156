"""PacketSocket reads and writes the same packets as paho, however the stream of bytes is split."""

import socket
from itertools import pairwise

import numpy as np
import paho.mqtt.client as paho
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from gossamer.gossip import Buffers
from gossamer.gossip.transport.paho_socket import PacketSocket, frame

LARGE = 200_000


class Socket:
    """A socket from which `pieces` are read, and which accepts at most `accepts` bytes per write."""

    def __init__(self, pieces=(), accepts=1 << 30):
        self.pieces, self.accepts, self.written = list(pieces), accepts, bytearray()

    def recv_into(self, target):
        if not self.pieces:
            raise BlockingIOError
        piece = self.pieces.pop(0)
        count = min(len(piece), len(target))
        target[:count] = piece[:count]
        if piece[count:]:
            self.pieces.insert(0, piece[count:])
        return count

    def close(self):
        pass

    def send(self, data):
        data = bytes(data)[: self.accepts]
        self.written += data
        return len(data)


def client_on(sock, version5):
    version = paho.MQTTv5 if version5 else paho.MQTTv311
    client = paho.Client(CallbackAPIVersion.VERSION2, "test", protocol=version)
    client._sock = sock
    return client


def attached(sock, *, version5=False):
    heard = []
    client = client_on(sock, version5)
    packets = PacketSocket(client, lambda *message: heard.append(message), version5=version5)
    return client, packets, heard


def message(topic, payload, *, retain=False, version5=False, properties=None):
    """Return a PUBLISH packet as paho or a broker would send it."""
    sock = Socket()
    client = client_on(sock, version5)
    client._send_publish(
        1, topic.encode(), payload, 0, retain, False, paho.MQTTMessageInfo(1), properties
    )
    return bytes(sock.written or client._out_packet[0]["packet"])


def cut(data, places):
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in pairwise(edges) if b > a]


def read_all(client, sock):
    while sock.pieces:
        assert client.loop_read() == paho.MQTT_ERR_SUCCESS


@settings(max_examples=60)
@given(
    messages=st.lists(
        st.tuples(
            st.sampled_from(["a", "swarm/peer/x/inbox/global", "ü"]),
            st.sampled_from([0, 1, 127, 128, 5000, LARGE]),
            st.booleans(),
        ),
        min_size=1,
        max_size=5,
    ),
    places=st.lists(st.integers(0, 1 << 20), max_size=12),
    version5=st.booleans(),
)
def test_messages_are_the_same_however_the_stream_is_split(messages, places, version5):
    rng = np.random.default_rng(1)
    sent = [(topic, rng.bytes(size), retain) for topic, size, retain in messages]
    stream = b"".join(
        message(topic, payload, retain=retain, version5=version5) for topic, payload, retain in sent
    )
    sock = Socket(cut(stream, places))
    client, _, heard = attached(sock, version5=version5)
    read_all(client, sock)
    assert heard == sent


def test_properties_of_version_5_are_skipped():
    properties = Properties(PacketTypes.PUBLISH)
    properties.UserProperty = ("from", "somebody")
    sock = Socket([message("a", b"payload", version5=True, properties=properties)])
    client, _, heard = attached(sock, version5=True)
    read_all(client, sock)
    assert heard == [("a", b"payload", False)]


def test_other_packets_go_to_paho():
    sock = Socket([b"\x40\x02\x00\x07" + message("a", b"x")])  # an acknowledgement of message 7
    client, packets, heard = attached(sock)
    acknowledged = []
    client.on_publish = lambda _client, _data, mid, _code, _properties: acknowledged.append(mid)
    info = paho.MQTTMessage(7, b"t")
    info.qos, info.state = 1, paho.mqtt_ms_wait_for_puback
    client._out_messages[7] = info
    read_all(client, sock)
    while packets.pending():
        client.loop_read()
    assert acknowledged == [7]
    assert heard == [("a", b"x", False)]


@pytest.mark.parametrize("topic", ["a", "abc", "gossamer/v1/s/peer/p/inbox/global"])
@pytest.mark.parametrize("version5", [False, True])
def test_large_payloads_are_aligned_and_not_copied(topic, version5):
    values = np.arange(LARGE // 4, dtype=np.float32)
    sock = Socket(cut(message(topic, values.tobytes(), version5=version5), [70_000]))
    client, _, heard = attached(sock, version5=version5)
    read_all(client, sock)
    (_, payload, _) = heard[0]
    assert isinstance(payload, memoryview)
    array = np.frombuffer(payload, np.float32)
    assert array.flags.aligned
    assert array.ctypes.data % 8 == 0
    assert np.array_equal(array, values)


@pytest.mark.parametrize(
    "stream",
    [
        b"\x30\xff\xff\xff\xff\x01",  # a length of five digits
        b"\x30\x03\x00\x09a",  # a topic longer than its packet
        b"\x30\x04\x00\x02\xff\xfe",  # a topic that is not text
    ],
)
def test_malformed_packets_end_the_connection(stream):
    client, packets, heard = attached(Socket([stream]))
    assert client.loop_read() == paho.MQTT_ERR_CONN_LOST
    assert "malformed" in str(packets.error)
    assert heard == []


def test_a_cut_off_property_length_ends_the_connection():
    client, _, heard = attached(Socket([b"\x30\x04\x00\x01a\xff"]), version5=True)
    assert client.loop_read() == paho.MQTT_ERR_CONN_LOST
    assert heard == []


def test_the_end_of_the_stream_is_a_loss():
    client, _, _ = attached(Socket([b""]))
    assert client.loop_read() == paho.MQTT_ERR_CONN_LOST


@pytest.mark.parametrize("version5", [False, True])
@pytest.mark.parametrize("size", [0, 1, 200, LARGE])
@pytest.mark.parametrize("accepts", [100_000, 1 << 30])
def test_what_is_written_is_what_paho_would_write(version5, size, accepts):
    payload = np.random.default_rng(0).bytes(size)
    sock = Socket(accepts=accepts)
    client, packets, _ = attached(sock, version5=version5)
    info = packets.publish("swarm/inbox", payload)
    while client.want_write():
        client.loop_write()
    assert bytes(sock.written) == message("swarm/inbox", payload, version5=version5)
    assert info.is_published()


@pytest.fixture
def pair():
    """Two connected sockets; the first does not block, and takes less than a large payload at once."""
    near, far = socket.socketpair()
    near.setblocking(False)
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LARGE // 10)
    with near, far:
        yield near, far


def received(client, far, size):
    """Let paho write what is left, and return the next `size` bytes at the other end."""
    data = b""
    while len(data) < size:
        client.loop_write()
        data += far.recv(size - len(data))
    return data


@pytest.mark.parametrize("version5", [False, True])
@pytest.mark.parametrize("sizes", [(0,), (1, 200), (40, 0, 300), (40, LARGE), (LARGE, 7, LARGE)])
def test_payloads_in_several_buffers_are_written_in_order(pair, version5, sizes):
    near, far = pair
    rng = np.random.default_rng(0)
    client, packets, _ = attached(near, version5=version5)
    stream, infos = b"", []
    for _ in range(3):
        views = [memoryview(rng.bytes(size)) for size in sizes]
        infos.append(packets.publish("swarm/inbox", Buffers(views)))
        stream += message("swarm/inbox", b"".join(views), version5=version5)
    assert received(client, far, len(stream)) == stream
    assert not client.want_write()
    # None: written at once. What did not fit was queued, and is reported once it is written.
    assert (infos[0] is None) == (sum(sizes) < LARGE)
    assert all(info is None or info.is_published() for info in infos)


def test_nothing_is_written_past_packets_that_wait(pair):
    near, far = pair
    client, packets, _ = attached(near)
    large, small = bytes(LARGE), b"small"
    first, second = packets.publish("a", large), packets.publish("b", small)
    assert first is not None
    assert second is not None
    stream = message("a", large) + message("b", small)
    assert received(client, far, len(stream)) == stream


def test_a_write_to_a_closed_connection_is_a_loss(pair):
    near, far = pair
    client, packets, _ = attached(near)
    far.close()
    lost = []
    client.on_disconnect = lambda *_: lost.append(True)
    info = packets.publish("a", b"payload")
    assert info is not None
    assert not info.is_published()
    assert lost


# --- websocket frames ------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 125, 126, 65_535, 65_536])
def test_frames_unmask_to_what_was_sent(size):
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8).tobytes()
    raw = bytes(frame(memoryview(data)))
    head = {True: 2, False: 4 if size < 65_536 else 10}[size < 126]
    key, body = raw[head : head + 4], raw[head + 4 :]
    assert raw[0] == 0x82
    assert raw[1] & 0x80
    assert bytes(byte ^ key[index % 4] for index, byte in enumerate(body)) == data


def test_a_frame_that_needs_several_writes_keeps_its_packet():
    raw = Socket(accepts=100)

    class Wrapper(Socket):
        """As paho wraps a socket for websockets."""

        _socket = raw

    _, packets, _ = attached(Wrapper())
    attempts = 1
    while True:
        try:
            assert packets.send(b"x" * 250) == 250
            break
        except BlockingIOError:
            attempts += 1
    assert attempts == 3
    assert len(raw.written) == 250 + 8
