"""The lobby: where connections become links. Answers who knocks, dials others.

                 listen                      .-- stranger: dropped within 5 s
    rank 0  ---------------  Lobby  <--------+-- rank 1: handshake -> Link
                                             '-- rank 2: handshake -> Link

One poll loop drives all handshakes (handshake.py) at once, for two reasons. A stranger
who says nothing must delay nobody. And when the ring is built every rank dials its
right neighbour and answers its left one: done one after the other, all would wait for
ever.

Rule.  While a connection is no link it may cost 5 seconds, 256 bytes and one of 64
places; then it is dropped, with one line in the log.

In PyTorch: the accept loop of gloo's transport/tcp/listener.cc; strangers are not
expected.

Left out: blocking an address that keeps knocking.
"""

import itertools
import logging
import select
import time
from collections.abc import Callable, Iterator

from minddp.errors import PeerLost, PeerTimeout
from minddp.handshake import HandshakeError, Hello, Script, Stranger
from minddp.net import (
    LONGEST_SECONDS,
    Address,
    Alarm,
    Deadline,
    Link,
    Listener,
    Socket,
    connect,
    resolve,
    shown,
    start_connecting,
    tcp_link,
)

log = logging.getLogger("minddp")

HANDSHAKE_SECONDS = 5.0  # what a stranger may cost
PENDING_CONNECTIONS = 64  # strangers at a time; beyond it the oldest is dropped
RETRY_SECONDS = 0.05  # between two attempts to reach a rank 0 that is not there yet
LOGGED_STRANGERS = 20  # after so many, strangers are dropped without a line


class Conversation:
    """A handshake under way on one socket (`script` is a generator of handshake.py)."""

    def __init__(self, sock: Socket, address: Address, script: Script):
        sock.setblocking(False)
        self.sock, self.address, self._script = sock, address, script
        self.deadline = Deadline(HANDSHAKE_SECONDS)  # for visitors
        self._outbox, self._wanted = next(script)
        self._inbox, self._heard = b"", False

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
        if not data and not self._heard:
            raise ConnectionAbortedError("closed before a word was said")
        self._heard = True
        if not data:
            got = f"{len(self._inbox)} of {self._wanted} bytes"
            raise Stranger(f"closed the connection after {got} of the handshake")
        return data


class Lobby:
    """Carries on all handshakes at one listener, and with those whom we dial.

    `make_script` gives our side of a visitor's handshake. `timeout` (seconds) is the
    group's; the links are tuned to it.
    """

    def __init__(
        self,
        listener: Listener,
        make_script: Callable[[], Script],
        alarm: Alarm,
        timeout: float = 60.0,
        world_size: int = 1,
    ):
        self._listener, self._alarm = listener, alarm
        self._make_script = make_script
        self._timeout = timeout
        # More than the ranks that may all knock at the same moment.
        self._places = max(PENDING_CONNECTIONS, 4 * world_size)
        self._visitors: list[Conversation] = []
        self._dialled: dict[int, Conversation] = {}  # by the rank that we call
        self._strangers = 0

    def dial(self, rank: int, host: str, port: int, script: Script) -> None:
        """Start to dial a rank at an address in digits; `links` yields its link."""
        family, address = resolve(host, port, Deadline(0))[0]
        sock = start_connecting(family, address)
        self._dialled[rank] = Conversation(sock, address, script)

    def links(self, deadline: Deadline) -> Iterator[tuple[Hello | None, Link]]:
        """Yields each link as its handshake ends, with who knocked (None: we dialled).

        Ends at the deadline. Raises: PeerLost if one we dialled fails, the alarm's
        error if the group fails.
        """
        while self._wait(deadline):
            yield from self.advance()

    def advance(self) -> Iterator[tuple[Hello | None, Link]]:
        """One turn of `links`, without waiting."""
        self._let_in()
        for rank, dialled in list(self._dialled.items()):
            try:
                if dialled.advance():
                    link = tcp_link(dialled.sock, rank, self._timeout)
                    del self._dialled[rank]
                    yield None, link
            except (HandshakeError, OSError) as exc:
                why = f"{shown(dialled.address)} broke off the handshake: {exc}"
                raise PeerLost(f"rank {rank} at {why}", rank) from exc
        for visitor in list(self._visitors):
            try:
                if hello := visitor.advance():
                    self._visitors.remove(visitor)
                    yield hello, tcp_link(visitor.sock, hello.rank, self._timeout)
                elif not visitor.deadline.left():
                    seconds = f"{HANDSHAKE_SECONDS:g} s"
                    self._drop(visitor, f"no handshake within {seconds}")
            except (HandshakeError, OSError) as exc:
                self._drop(visitor, str(exc))

    def waiting_for(self) -> list[tuple[int, str]]:
        """Whom we have dialled in vain so far: (rank, address)."""
        return [(rank, shown(each.address)) for rank, each in self._dialled.items()]

    def close(self) -> None:
        for conversation in [*self._visitors, *self._dialled.values()]:
            conversation.sock.close()
        self._listener.close()

    def _wait(self, deadline: Deadline) -> bool:
        """Sleep until something is to be done; False if the deadline came first."""
        poll = select.poll()
        poll.register(self._alarm, select.POLLIN)
        patience = self.register(poll)
        poll.poll(min(patience, deadline.left()) * 1000 + 1)
        if self._alarm.error:
            raise self._alarm.error
        return deadline.left() > 0

    def register(self, poll: select.poll) -> float:
        """Let `poll` watch all that concerns the lobby; the seconds it may sleep."""
        poll.register(self._listener, select.POLLIN)
        for conversation in [*self._visitors, *self._dialled.values()]:
            poll.register(conversation, conversation.events)
        return min((v.deadline.left() for v in self._visitors), default=LONGEST_SECONDS)

    def _let_in(self) -> None:
        """One visitor a turn, so that a crowd does not push out who is being heard."""
        if connection := self._listener.accept():
            visitor = Conversation(*connection, self._make_script())
            self._visitors.append(visitor)
            if len(self._visitors) > self._places:
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
    host: str,
    port: int,
    make_script: Callable[[str], Script],
    deadline: Deadline,
    timeout: float = 60.0,
) -> Link:
    """A link to rank 0, which may not be there yet: tries until the deadline.

    `make_script(local_host)` gives the handshake, once it is known from which of our
    addresses rank 0 is reached. `timeout` is the group's, for the link.

    Raises: PeerTimeout if nobody listens before the deadline; HandshakeError if
    somebody does and does not let us in; what `make_script` raises.
    """
    last: OSError | None = None
    addresses = resolve(host, port, deadline)
    for family, address in itertools.cycle(addresses):
        if not deadline.left():
            break
        try:
            sock = connect(family, address, deadline)
            try:
                local_host = sock.getsockname()[0]
                if _converse(sock, address, make_script(local_host), deadline):
                    return tcp_link(sock, 0, timeout)
            except BaseException:
                sock.close()
                raise
            sock.close()
        except OSError as exc:  # nobody there yet, or nobody who said a word
            last = exc
            time.sleep(min(RETRY_SECONDS, deadline.left()))
    why = (last and (last.strerror or str(last))) or "it accepts but does not answer"
    raise PeerTimeout(f"no answer from {shown((host, port))}: {why}", 0) from last


def _converse(
    sock: Socket, address: Address, script: Script, deadline: Deadline
) -> Hello | None:
    """Carry one handshake to its end; None if the deadline came first."""
    conversation = Conversation(sock, address, script)
    while (hello := conversation.advance()) is None:
        poll = select.poll()
        poll.register(conversation, conversation.events)
        if not poll.poll(deadline.left() * 1000):
            return None
    return hello
