"""TCP links between ranks: addresses, ports, bytes. (Neural layers are in nn.py.)

The only module that imports `socket`. From the ground up:

    Deadline    how long a public call may still take; handed down to all that block
    Alarm       wakes a rank that waits on its links, because the group has failed
    Listener    a bound port: listen(host, port), adopt(fd)
    Link        one authenticated connection to one rank: send_some, recv_some;
                tcp_link makes one of a connected socket
    RingLinks   the links to the left and to the right neighbour, as ring.py uses them

                 send_some  .------------------------.  recv_some
    rank r-1  ------------> | kernel's buffers, wire | ------------>  rank r
      right                 '------------------------'                  left

Rule 1.  A link is non-blocking, and every wait is a `poll` that ends at a deadline. A
         blocking call could outlive the deadline, and a timeout on each system call
         would not bound a transfer of many.
Rule 2.  Only what is asked for is bound: never a wildcard address unless told to.
Rule 3.  A connection becomes a Link only by a handshake (lobby.py).

Invariant.  OSError leaves this module and lobby.py only as the cause of PeerLost,
PeerTimeout or UsageError.

In PyTorch: gloo/transport/tcp (listener.cc, pair.cc); its `pair` is our Link.

Left out: TLS; reconnecting (a collective half done on one link cannot be resumed on
another); Windows, where a pipe cannot be polled together with sockets.
"""

import errno
import fcntl
import itertools
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Iterable
from typing import Any

from minddp.errors import PeerError, PeerLost, PeerTimeout, UsageError

LONGEST_SECONDS = 1e6  # eleven days, for "no timeout": poll takes no more than 24
BUFFERS_A_SEND = 64  # handed over in one sendmsg; Linux takes up to 1,024
PAIR_BYTES = 128 * 1024  # what a local pair holds, about

Address = tuple[Any, ...]  # (host, port) or IPv6's (host, port, flow, scope)
Bytes = bytes | bytearray | memoryview
Socket = socket.socket


class Deadline:
    """The moment at which a public call gives up. Made once a call, then handed
    down."""

    def __init__(self, seconds: float):
        self.seconds = min(seconds, LONGEST_SECONDS)
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
        except (OSError, UnicodeError) as exc:  # the latter: "a..b" is no name at all
            found[:] = [exc]

    look_up(socket.AI_NUMERICHOST)
    if isinstance(found[0], Exception):
        found.clear()
        worker = threading.Thread(target=look_up, daemon=True)
        worker.start()
        worker.join(deadline.left())
    if not found:
        raise PeerTimeout(f"looking up the host {host!r} took {deadline.seconds:g} s")
    if isinstance(found[0], Exception):
        why = getattr(found[0], "strerror", None) or str(found[0])
        raise UsageError(
            f"the host {host!r} is unknown: {why}. Set MASTER_ADDR to "
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


def start_connecting(family: int, address: Address) -> Socket:
    """A socket that connects in the background; sending on it tells the outcome."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setblocking(False)
    sock.connect_ex(address)
    return sock


def connect(family: int, address: Address, deadline: Deadline) -> Socket:
    """A connected socket. Raises: OSError, of which TimeoutError is one."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(deadline.left() or 1e-3)
        sock.connect(address)
    except OSError:
        sock.close()
        raise
    return sock


def local_pair() -> tuple[Socket, Socket]:
    """Two sockets of this process, joined: what is sent on one comes out of the other.

    For whatever stands between a link and its connection (netlab.py).
    """
    pair = socket.socketpair()
    for sock in pair:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PAIR_BYTES // 2)
    return pair


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
        # Nobody there (any more), or out of descriptors: our caller can do nothing.
        except OSError:
            return None

    def close(self) -> None:
        self._sock.close()

    def __str__(self) -> str:
        return shown((self.host, self.port))


def listen(host: str, port: int = 0, deadline: Deadline | None = None) -> Listener:
    """A listener on exactly this address; port 0 takes any that is free.

    Raises: UsageError if the port is taken or the address is not one of this machine's.
    """
    addresses = resolve(host, port, deadline or Deadline(10.0))
    # "localhost" is ::1 as well as 127.0.0.1, and other ranks may write the latter.
    family, address = min(addresses, key=lambda found: found[0] != socket.AF_INET)
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
        except UsageError as taken:
            why = taken
    raise UsageError(f"MINDDP_PORT_RANGE={ports} has no port to listen on: {why}")


def adopt(fd: int) -> Listener:
    """The listener that the launcher bound for us, so that nobody could take its port.

    Raises: UsageError if the descriptor is no socket of ours.
    """
    try:
        return Listener(socket.socket(fileno=fd))
    except OSError as exc:
        raise UsageError(
            f"MINDDP_LISTEN_FD={fd} is no socket of this process ({exc.strerror}). It "
            "is set by `minddp run` for rank 0 alone; do not pass it on."
        ) from exc


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
    """One authenticated connection to the rank `peer`; never blocks.

    address: where the peer is, as errors show it. local_host: by which address of this
    machine it is reached.
    """

    def __init__(self, sock: Socket, peer: int, address: str, local_host: str):
        self.peer, self.address, self.local_host = peer, address, local_host
        self._sock = sock
        sock.setblocking(False)

    def fileno(self) -> int:
        return self._sock.fileno()

    def send_some(self, buffers: Iterable[Bytes]) -> int:
        """The number of bytes, from the front of these, that the kernel took."""
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


def tcp_link(sock: Socket, peer: int, timeout: float) -> Link:
    """A link over a connected TCP socket. timeout: the group's."""
    _tune(sock, timeout)
    return Link(sock, peer, shown(sock.getpeername()), sock.getsockname()[0])


class RingLinks:
    """The links to both neighbours: what ring.py needs of a network, and all it knows
    of it.

    `testing.MemoryLinks` has the same members over queues in memory. `me` is this
    rank's number in the group, which errors name; in a ring of some ranks only, `rank`
    is another one, its place in the ring.
    """

    def __init__(
        self, rank: int, world_size: int, left: Link, right: Link, alarm: Alarm
    ):
        self.rank, self.world_size = rank, world_size
        self.me, self.left, self.right = rank, left, right
        self.bytes_sent = self.bytes_received = 0
        self._alarm = alarm
        self._polls = {
            (sending, receiving): self._watch(sending, receiving)
            for sending in (False, True)
            for receiving in (False, True)
        }

    def _watch(self, sending: bool, receiving: bool) -> select.poll:
        """Of the links only what is waited for: a closed one would wake us for ever."""
        poll = select.poll()
        poll.register(self._alarm, select.POLLIN)
        if receiving:
            poll.register(self.left, select.POLLIN)
        if sending:
            poll.register(self.right, select.POLLOUT)
        return poll

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

    def count_from_here(self) -> None:
        """Forget the bytes that have been counted."""
        self.bytes_sent = self.bytes_received = 0

    def wait(self, sending: bool, receiving: bool, deadline: Deadline) -> bool:
        """Sleep until a byte can move; False if the deadline came first.

        Raises: the alarm's PeerError, if the group fails meanwhile.
        """
        ready = self._polls[sending, receiving].poll(deadline.left() * 1000)
        # What has come is taken first: a collective that others have completed before
        # they failed can be completed here as well.
        can_move = any(fd != self._alarm.fileno() for fd, _ in ready)
        if self._alarm.error and not can_move:
            raise self._alarm.error
        return can_move

    def close(self) -> None:
        self.left.close()
        self.right.close()


def _tune(sock: socket.socket, timeout: float) -> None:
    """Send at once, and notice within a minute that the other host has gone.

    The kernel's own defaults are two hours of silence before the first keep-alive, and
    about 15 minutes of retransmission.

    The sizes of the buffers are the kernel's, which grows them as a link needs it. Set
    by hand they were never faster on loopback, and the ring took 1.3 times as long with
    128 KiB. Two or four sockets for each neighbour carried no more than one (within a
    tenth, with four ranks on two cores).
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # How long data that was sent may wait: for an acknowledgement, or at a slow reader.
    # Somewhat longer than a collective waits, whose error says more than the kernel's.
    milliseconds = min(int((timeout + 10) * 1000), 2**31 - 1)
    options = (
        ("TCP_KEEPIDLE", 15),  # seconds of silence before the first probe
        ("TCP_KEEPINTVL", 5),  # seconds between probes
        ("TCP_KEEPCNT", 3),  # probes without an answer
        ("TCP_USER_TIMEOUT", milliseconds),
    )
    for name, value in options:
        if hasattr(socket, name):  # macOS and BSD lack some
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
