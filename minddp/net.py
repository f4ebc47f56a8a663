"""TCP links between ranks: listen, dial, prove, move bytes. (Neural layers are in
nn.py.)

The only module that imports `socket`. From the ground up:

    Deadline    how long a public call may still take; handed down to all that block
    Alarm       wakes a rank that waits on its links, because the group has failed
    Listener    a bound port          listen(host, port), adopt(fd)
    Link        one authenticated connection to one rank: send_some, recv_some
    Lobby       where connections become links: many handshakes at once
    RingLinks   the links to the left and to the right neighbour, as ring.py uses them

                 listen                        .-- stranger: dropped within 5 s
    rank 0  ----------------  Lobby  <---------+-- rank 1: handshake -> Link
                                               '-- rank 2: handshake -> Link

Rule 1.  Every socket is non-blocking, and every wait is a `poll` that ends at a
         deadline. A blocking call could outlive the deadline, and a timeout on each
         system call would not bound a transfer of many.
Rule 2.  Only what is asked for is bound: never a wildcard address unless told to.
Rule 3.  A connection becomes a Link only by a handshake (handshake.py). While it is
         none it may cost us 5 seconds and 256 bytes, and never the time of anybody
         else.

Invariant.  OSError does not leave this module: it becomes PeerLost, PeerTimeout or
UsageError, with the OSError as its cause.

In PyTorch: gloo/transport/tcp (listener.cc, pair.cc); its `pair` is our Link.

Left out: TLS; reconnecting (a collective half done on one link cannot be resumed on
another); Windows, where a pipe cannot be polled together with sockets.
"""

import errno
import fcntl
import itertools
import logging
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from minddp.errors import PeerError, PeerLost, PeerTimeout, UsageError
from minddp.handshake import HandshakeError, Hello, Script, Stranger

log = logging.getLogger("minddp")

HANDSHAKE_SECONDS = 5.0  # what a stranger may cost
PENDING_CONNECTIONS = 64  # strangers at the same time; beyond it the oldest is dropped
BUFFERS_A_SEND = 64  # iovecs in one sendmsg; Linux takes up to 1,024
RETRY_SECONDS = 0.05  # between two attempts to reach a rank 0 that is not there yet
LOGGED_STRANGERS = 20  # after so many, strangers are dropped without a line

Address = tuple[Any, ...]  # (host, port) or IPv6's (host, port, flow, scope)
Bytes = bytes | bytearray | memoryview


class Deadline:
    """The moment at which a public call gives up. Made once a call, then handed
    down."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.restart()

    def restart(self) -> None:
        """Count from now: collectives do it whenever a byte has moved."""
        self._end = time.monotonic() + self.seconds

    def left(self) -> float:
        """Seconds that are left, never below 0."""
        return max(0.0, self._end - time.monotonic())


class Alarm:
    """Says that the group has failed: `error` is set once, and `fileno` becomes
    readable.

    A pipe, because the rank to be woken waits in `poll`, and poll watches descriptors
    only.
    """

    def __init__(self) -> None:
        self.error: PeerError | None = None
        self._read, self._write = os.pipe()

    def fileno(self) -> int:
        return self._read

    def sound(self, error: PeerError) -> None:
        """Keep the first error, and wake whoever waits."""
        if self.error is None:
            self.error = error
            os.write(self._write, b"!")

    def close(self) -> None:
        os.close(self._read)
        os.close(self._write)


# ---- Addresses ----


def resolve(host: str, port: int, deadline: Deadline) -> list[tuple[int, Address]]:
    """The (family, address) pairs of a host, in the order in which to try them.

    getaddrinfo cannot be interrupted, so a name is looked up in a thread that we can
    leave behind; an address in digits needs no lookup at all.

    Raises: UsageError if the name is unknown, PeerTimeout if nobody answers in time.
    """
    found: list[Any] = []

    def look_up(flags: int = 0) -> None:
        try:
            found[:] = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=flags
            )
        except OSError as exc:
            found[:] = [exc]

    look_up(socket.AI_NUMERICHOST)
    if isinstance(found[0], OSError):
        found.clear()
        worker = threading.Thread(target=look_up, daemon=True)
        worker.start()
        worker.join(deadline.left())
    if not found:
        raise PeerTimeout(f"looking up the host {host!r} took {deadline.seconds:g} s")
    if isinstance(found[0], OSError):
        raise UsageError(
            f"the host {host!r} is unknown: {found[0].strerror}. Set MASTER_ADDR to "
            "the address of rank 0's machine, for example 10.0.0.1."
        ) from found[0]
    return [(family, address) for family, _, _, _, address in found]


def interface_address(name: str) -> str:
    """The IPv4 address of a network interface, for MINDDP_IFNAME."""
    siocgifaddr = 0x8915  # linux/sockios.h
    request = struct.pack("256s", name[:15].encode())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            reply = fcntl.ioctl(probe, siocgifaddr, request)
        except OSError as exc:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise UsageError(
                f"MINDDP_IFNAME={name}: {exc.strerror}. This machine has: {names}."
            ) from exc
    return socket.inet_ntoa(reply[20:24])


def shown(address: Address) -> str:
    """An address as people write it: 127.0.0.1:29500, [::1]:29500."""
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


# ---- Listening ----


class Listener:
    """A bound port; `accept` gives the next connection, or None if there is none."""

    def __init__(self, sock: socket.socket):
        sock.setblocking(False)
        self._sock = sock
        self.host: str = sock.getsockname()[0]
        self.port: int = sock.getsockname()[1]

    def fileno(self) -> int:
        return self._sock.fileno()

    def accept(self) -> tuple[socket.socket, Address] | None:
        try:
            return self._sock.accept()
        except (
            OSError
        ):  # nobody there (any more), or out of descriptors: not our caller's
            return None

    def close(self) -> None:
        self._sock.close()

    def __str__(self) -> str:
        return shown((self.host, self.port))


def listen(host: str, port: int = 0, deadline: Deadline | None = None) -> Listener:
    """A listener on exactly this address; port 0 takes any that is free.

    Raises: UsageError if the port is taken or the address is not one of this machine's.
    """
    family, address = resolve(host, port, deadline or Deadline(10.0))[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Without it a port stays blocked for a minute after the job that used it.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(1024)
    except OSError as exc:
        sock.close()
        raise UsageError(_why_not_bound(exc, shown(address))) from exc
    return Listener(sock)


def listen_in_range(host: str, ports: str | None) -> Listener:
    """A listener on the first free port of `ports` ("40000-40010"; None: any port)."""
    if not ports:
        return listen(host)
    try:
        first, last = (int(text) for text in ports.split("-"))
        if not 0 < first <= last < 65536:
            raise ValueError(ports)
    except ValueError as exc:
        raise UsageError(
            f"MINDDP_PORT_RANGE={ports!r} is not a range like 40000-40010"
        ) from exc
    for port in range(first, last + 1):
        try:
            return listen(host, port)
        except UsageError:
            if port == last:
                raise
    raise AssertionError("unreachable: the last port has returned or raised")


def adopt(fd: int) -> Listener:
    """The listener that the launcher bound for us: no other program can take its
    port."""
    return Listener(socket.socket(fileno=fd))


def _why_not_bound(exc: OSError, where: str) -> str:
    if exc.errno == errno.EADDRINUSE:
        return (
            f"cannot listen on {where}: the port is in use. Another job on this "
            "machine probably has it: end that job, or choose another port with "
            "MASTER_PORT (minddp run --master-port)."
        )
    if exc.errno == errno.EADDRNOTAVAIL:
        return (
            f"cannot listen on {where}: this machine does not have that address. Rank "
            "0 must run on the machine that MASTER_ADDR names."
        )
    return f"cannot listen on {where}: {exc.strerror}"


# ---- Links ----


class Link:
    """One authenticated TCP connection to the rank `peer`; never blocks."""

    def __init__(self, sock: socket.socket, peer: int, timeout: float = 60.0):
        self.peer = peer
        self.address = shown(sock.getpeername())
        self.local_host: str = sock.getsockname()[0]
        self._sock = sock
        _tune(sock, timeout)

    def fileno(self) -> int:
        return self._sock.fileno()

    def send_some(self, buffers: Iterable[Bytes]) -> int:
        """How many bytes, from the front of these buffers, the kernel took: 0 if
        full."""
        try:
            return self._sock.sendmsg(itertools.islice(buffers, BUFFERS_A_SEND))
        except BlockingIOError:
            return 0
        except OSError as exc:
            raise self._lost(exc) from exc

    def recv_some(self, buffer: bytearray | memoryview) -> int:
        """How many bytes came into the front of this buffer: 0 if none are there
        yet."""
        try:
            received = self._sock.recv_into(buffer)
        except BlockingIOError:
            return 0
        except OSError as exc:
            raise self._lost(exc) from exc
        if received == 0:  # the only sign of an orderly end that TCP gives
            raise PeerLost("connection closed", self.peer)
        return received

    def close(self) -> None:
        """Close; what the kernel has taken is still delivered, followed by the end."""
        self._sock.close()

    def _lost(self, exc: OSError) -> PeerLost:
        return PeerLost((exc.strerror or str(exc)).lower(), self.peer)


class RingLinks:
    """The links to both neighbours: what ring.py needs of a network, and all it knows
    of it.

    `testing.MemoryLinks` has the same five members over queues in memory.
    """

    def __init__(
        self, rank: int, world_size: int, left: Link, right: Link, alarm: Alarm
    ):
        self.rank, self.world_size = rank, world_size
        self.left, self.right = left, right
        self.bytes_sent = self.bytes_received = 0
        self._alarm = alarm
        self._poll = select.poll()
        self._poll.register(alarm, select.POLLIN)

    def send_some(self, buffers: Iterable[Bytes]) -> int:
        """Send to the right what the kernel takes now; the number of bytes."""
        sent = self.right.send_some(buffers)
        self.bytes_sent += sent
        return sent

    def recv_some(self, buffer: bytearray | memoryview) -> int:
        """Receive from the left what is there now; the number of bytes."""
        received = self.left.recv_some(buffer)
        self.bytes_received += received
        return received

    def wait(self, sending: bool, receiving: bool, deadline: Deadline) -> bool:
        """Sleep until a byte can move; False if the deadline came first.

        Raises: the alarm's PeerError, if the group fails meanwhile.
        """
        if receiving:
            self._poll.register(self.left, select.POLLIN)
        if sending:
            self._poll.register(self.right, select.POLLOUT)
        ready = self._poll.poll(deadline.left() * 1000)
        # A link we do not wait for is not watched: a closed one would wake us for ever.
        if receiving:
            self._poll.unregister(self.left)
        if sending:
            self._poll.unregister(self.right)
        if self._alarm.error:
            raise self._alarm.error
        return bool(ready)

    def close(self) -> None:
        self.left.close()
        self.right.close()


def _tune(sock: socket.socket, timeout: float) -> None:
    """Send at once, and notice within a minute that the other host has gone.

    The kernel's own defaults are two hours of silence before the first keep-alive, and
    about 15 minutes of retransmission.
    """
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = (
        ("TCP_KEEPIDLE", 15),  # seconds of silence before the first probe
        ("TCP_KEEPINTVL", 5),  # seconds between probes
        ("TCP_KEEPCNT", 3),  # probes without an answer
        (
            "TCP_USER_TIMEOUT",
            int(timeout * 1000),
        ),  # ms that sent data may stay unacknowledged
    )
    for name, value in options:
        if hasattr(socket, name):  # macOS and BSD lack some
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


# ---- From connections to links ----


class Conversation:
    """A handshake under way on one socket (`script` is a generator of handshake.py)."""

    def __init__(
        self, sock: socket.socket, address: Address, script: Script, seconds: float
    ):
        sock.setblocking(False)
        self.sock, self.address, self._script = sock, address, script
        self.deadline = Deadline(seconds)
        self._outbox, self._wanted = next(script)
        self._inbox = b""

    def fileno(self) -> int:
        return self.sock.fileno()

    @property
    def events(self) -> int:
        return select.POLLOUT if self._outbox else select.POLLIN

    def advance(self) -> Hello | None:
        """Say and hear what the socket allows; at the end, who the caller is.

        Raises: HandshakeError or OSError; the connection is then of no more use.
        """
        try:
            while True:
                if self._outbox:
                    self._outbox = self._outbox[self.sock.send(self._outbox) :]
                elif len(self._inbox) < self._wanted:
                    self._inbox += self._read(self._wanted - len(self._inbox))
                else:
                    self._outbox, self._wanted = self._script.send(self._inbox)
                    self._inbox = b""
        except BlockingIOError:
            return None
        except StopIteration as end:
            hello: Hello = end.value
            return hello

    def _read(self, count: int) -> bytes:
        data = self.sock.recv(count)
        if not data:
            got = f"{len(self._inbox)} of {self._wanted} bytes"
            raise Stranger(f"closed the connection after {got} of the handshake")
        return data


class Lobby:
    """Where connections become links: answers all who knock and dials whom we call, at
    once.

    One poll loop drives every handshake, so that a silent stranger delays nobody, and
    so that ranks which all dial their right neighbour can also answer their left one.
    """

    def __init__(self, listener: Listener, script: Callable[[], Script], alarm: Alarm):
        self._listener, self._script, self._alarm = listener, script, alarm
        self._visitors: list[Conversation] = []
        self._calls: dict[int, Conversation] = {}  # by the rank that we call
        self._strangers = 0

    def call(self, rank: int, host: str, port: int, script: Script) -> None:
        """Start to dial a rank at an address in digits; `links` yields its link."""
        family, address = resolve(host, port, Deadline(0))[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        sock.connect_ex(
            address
        )  # goes on in the background; `advance` sees the outcome
        self._calls[rank] = Conversation(sock, address, script, HANDSHAKE_SECONDS)

    def links(self, deadline: Deadline) -> Iterator[tuple[Hello | None, Link]]:
        """Yields each link as its handshake ends, with who knocked (None: we called).

        Ends at the deadline. Raises: PeerLost if a call of ours fails, the alarm's
        error if the group fails.
        """
        while self._wait(deadline):
            self._let_in()
            for rank, call in list(self._calls.items()):
                try:
                    done = call.advance()
                except (HandshakeError, OSError) as exc:
                    raise PeerLost(f"{shown(call.address)}: {exc}", rank) from exc
                if done:
                    yield None, Link(self._calls.pop(rank).sock, rank)
            for visitor in list(self._visitors):
                try:
                    if hello := visitor.advance():
                        self._visitors.remove(visitor)
                        yield hello, Link(visitor.sock, hello.rank)
                    elif not visitor.deadline.left():
                        seconds = f"{HANDSHAKE_SECONDS:g} s"
                        self._drop(visitor, f"no handshake within {seconds}")
                except (HandshakeError, OSError) as exc:
                    self._drop(visitor, str(exc))

    def waiting_for(self) -> list[tuple[int, str]]:
        """The calls that nobody has answered yet: (rank, address)."""
        return [(rank, shown(call.address)) for rank, call in self._calls.items()]

    def close(self) -> None:
        for conversation in [*self._visitors, *self._calls.values()]:
            conversation.sock.close()
        self._listener.close()

    def _wait(self, deadline: Deadline) -> bool:
        """Sleep until something happens or a visitor's time is up; False at the
        deadline."""
        poll = select.poll()
        poll.register(self._alarm, select.POLLIN)
        poll.register(self._listener, select.POLLIN)
        for conversation in [*self._visitors, *self._calls.values()]:
            poll.register(conversation, conversation.events)
        patience = [deadline.left(), *(v.deadline.left() for v in self._visitors)]
        poll.poll(min(patience) * 1000 + 1)
        if self._alarm.error:
            raise self._alarm.error
        return deadline.left() > 0

    def _let_in(self) -> None:
        while connection := self._listener.accept():
            visitor = Conversation(*connection, self._script(), HANDSHAKE_SECONDS)
            self._visitors.append(visitor)
            if len(self._visitors) > PENDING_CONNECTIONS:
                self._drop(self._visitors[0], "too many connections are pending")

    def _drop(self, visitor: Conversation, why: str) -> None:
        if visitor in self._visitors:
            self._visitors.remove(visitor)
        visitor.sock.close()
        self._strangers += 1
        if self._strangers <= LOGGED_STRANGERS:
            where = f"{shown(visitor.address)} at port {self._listener.port}"
            log.warning("dropped a connection from %s: %s", where, why)


def dial(
    host: str, port: int, script: Callable[[str], Script], deadline: Deadline
) -> Link:
    """A link to rank 0, which may not be there yet: tries until the deadline.

    `script(local_host)` makes the handshake, once it is known from which of our
    addresses rank 0 is reached.

    Raises: PeerTimeout if nobody listens before the deadline; UsageError if somebody
    does but the handshake fails.
    """
    last: OSError | None = None
    addresses = resolve(host, port, deadline)
    for family, address in itertools.cycle(addresses):
        if not deadline.left():
            break
        try:
            sock = _connect(family, address, deadline)
        except OSError as exc:
            last = exc
            time.sleep(min(RETRY_SECONDS, deadline.left()))
            continue
        try:
            hello = _converse(sock, address, script(sock.getsockname()[0]), deadline)
        except HandshakeError as exc:
            sock.close()
            raise UsageError(f"{shown(address)} turned this rank away: {exc}") from exc
        except OSError as exc:  # rank 0's machine dropped us before anybody answered
            sock.close()
            last = exc
            continue
        if hello:
            return Link(sock, 0)
        sock.close()
    why = last.strerror if last and last.strerror else "it accepts but does not answer"
    raise PeerTimeout(f"no answer from {shown((host, port))}: {why}", 0) from last


def _connect(family: int, address: Address, deadline: Deadline) -> socket.socket:
    """A connected socket. Raises: OSError."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(deadline.left() or 1e-3)
        sock.connect(address)
    except OSError:
        sock.close()
        raise
    return sock


def _converse(
    sock: socket.socket, address: Address, script: Script, deadline: Deadline
) -> Hello | None:
    """Carry one handshake to its end; None if the deadline came first."""
    conversation = Conversation(sock, address, script, deadline.left())
    while (hello := conversation.advance()) is None:
        poll = select.poll()
        poll.register(conversation, conversation.events)
        if not poll.poll(deadline.left() * 1000):
            return None
    return hello
