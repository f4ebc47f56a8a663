"""Rendezvous: n processes that know only rank 0's address become a star and a ring.

    1. join    rank 0 listens at MASTER_ADDR:MASTER_PORT. Every other rank opens a port
               of its own, dials rank 0, and says in its handshake where that port is.
    2. table   when all have come, rank 0 sends everyone the table of all addresses.
    3. ring    every rank dials its right neighbour and answers its left one.

        1 ---.                1 <--.              .--> 1 --.
        2 ----> 0             2 <--- 0 : table   0          2      links of the ring
        3 ---'                3 <--'              '--- 3 <-'

Rule 1.  There is one table, rank 0's. Ranks may spell MASTER_ADDR as they like
         (localhost, 127.0.0.1, a host name); what they dial afterwards comes from the
         table.
Rule 2.  A rank advertises the local address of the connection by which it reached rank
         0: it is on a network that the others are on, which `gethostname` does not
         promise.
Rule 3.  Without a token only loopback addresses are used. Whoever reaches the port
         could otherwise take a seat, and with it the training.

Cost.  2 (n-1) messages at rank 0 and two handshakes a rank: O(n) messages. But the
       table has n rows, so about 25 n bytes go to each rank: O(n^2) bytes at rank 0.

In PyTorch: `init_process_group` with `TCPStore` (rank 0's key-value server), and gloo's
`Context::connectFullMesh`, which makes n (n-1) / 2 connections where a ring needs n.

Left out: a key-value store; ranks without a number ("elastic" rendezvous).
"""

import ipaddress
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from minddp import netlab
from minddp.control import Control
from minddp.environment import Job
from minddp.errors import PeerError, PeerLost, PeerTimeout, UsageError
from minddp.handshake import (
    CONTROL,
    RING,
    HandshakeError,
    Hello,
    Script,
    answer,
    introduce,
)
from minddp.lobby import Lobby, dial
from minddp.net import (
    Alarm,
    Deadline,
    Link,
    Listener,
    RingLinks,
    adopt,
    interface_address,
    listen,
    listen_in_range,
    resolve,
)

log = logging.getLogger("minddp")


class Rendezvous:
    """One rank's way from a Job to its control plane and its ring links."""

    def __init__(self, job: Job, deadline: Deadline, timeout: float):
        self.job, self.deadline = job, deadline
        self._settings: Mapping[str, str] = os.environ
        self._ranks = job.world_ranks or range(job.world_size)
        self.lab = netlab.from_environment(self._settings)
        if self.lab and not job.world_ranks:
            self.lab.check(job.world_size)
        self.alarm = Alarm()
        self.control = Control(job.rank, job.world_size, self.alarm, timeout)
        self._timeout = timeout
        self._ring_port: Listener | None = None
        self.me = Hello(CONTROL, job.rank, job.world_size, job.job_id)

    def meet(self) -> RingLinks:
        """Join, learn the table, build the ring.

        Raises: UsageError (a wrong address, port or token), PeerTimeout (ranks are
        missing), PeerLost (a rank came and went). Everybody who has joined raises the
        same.
        """
        try:
            own_port = self._gather() if self.job.rank == 0 else self._join()
            where = f"{self.job.master_addr}:{self.job.master_port}"
            table = self.control.wait_for_table(self.deadline, where)
            return self._build_ring(own_port, table)
        except PeerError as error:
            raise self.control.accuse(error) from error.__cause__
        except BaseException as error:  # those who have joined must not wait for us
            text = f"rank {self.job.rank} left the rendezvous: {error!r}"
            self.control.accuse(PeerLost(text, self.job.rank))
            raise

    def abandon(self) -> None:
        """After a failure: end the control thread, close everything."""
        self.control.leave()
        self.alarm.close()
        if self._ring_port:
            self._ring_port.close()

    # ---- 1. Join ----

    def _gather(self) -> Listener:
        """Rank 0: wait for all, then publish the table. Returns its own ring port."""
        job = self.job
        if job.listen_fd is None:
            require_token(job.master_addr, job.master_port, job.token, self.deadline)
            master = listen(job.master_addr, job.master_port, self.deadline)
        else:
            master = adopt(job.listen_fd)
            # Closed after this: a later group of this process binds the port itself.
            os.environ.pop("MINDDP_LISTEN_FD", None)
        seats: dict[int, tuple[str, int]] = {}
        make_script = partial(self._answer_member, seats)
        lobby = Lobby(master, make_script, self.alarm, self._timeout, job.world_size)
        host = master.host
        try:
            for hello, link in lobby.links(self.deadline):
                assert hello, "rank 0 dials nobody while it gathers"
                seats[link.peer] = hello.host, hello.port
                self.control.add(link.peer, link)
                host = link.local_host
                if len(seats) == job.world_size - 1:
                    break
            else:
                raise PeerTimeout(
                    f"rank 0 waited {self.deadline.seconds:g} s at {master} for "
                    f"{job.world_size} ranks",
                )
        finally:
            lobby.close()
        port = self._open_ring_port(master.host)
        seats[0] = self._setting_host() or host, port.port
        self.control.publish([seats[r] for r in range(job.world_size)])
        return port

    def _answer_member(self, seats: dict[int, tuple[str, int]]) -> Script:
        def objection(hello: Hello) -> str | None:
            if hello.role != CONTROL or hello.rank == 0:
                return f"rank {hello.rank} has no seat to take here"
            if hello.rank in seats:
                return f"rank {hello.rank} has already joined; is a second job running?"
            return None

        return answer(self.me, self.job.token, objection)

    def _join(self) -> Listener:
        """Other ranks: dial rank 0 and say where this rank can be dialled."""
        job = self.job
        require_token(job.master_addr, job.master_port, job.token, self.deadline)

        def make_script(local_host: str) -> Script:
            port = self._open_ring_port(local_host)
            me = replace(self.me, host=port.host, port=port.port)
            return introduce(me, job.token)

        try:
            where = job.master_addr, job.master_port
            link = dial(*where, make_script, self.deadline, self._timeout)
        except PeerTimeout as late:
            raise PeerTimeout(
                f"rank {job.rank} could not reach rank 0 in "
                f"{self.deadline.seconds:g} s: {late}. Is rank 0 running, are "
                "MASTER_ADDR and MASTER_PORT right, does a firewall stand between?",
                0,
            ) from late.__cause__
        except HandshakeError as refused:
            raise UsageError(
                f"rank {job.rank} was not let in by rank 0 at {job.master_addr}:"
                f"{job.master_port}: {refused}. All ranks need the same MINDDP_TOKEN, "
                "MINDDP_JOB_ID and WORLD_SIZE; or another program has this port."
            ) from None
        self.control.add(0, link)
        assert self._ring_port, "dial has called make_script"
        return self._ring_port

    def _open_ring_port(self, host: str) -> Listener:
        """The port at which the left neighbour will dial; replaces an earlier one."""
        if self._ring_port:
            self._ring_port.close()
        self._ring_port = self.open_port(host)
        return self._ring_port

    def open_port(self, host: str) -> Listener:
        """A port of this rank's own, where and in the range that the user has set."""
        ports = self._settings.get("MINDDP_PORT_RANGE")
        return listen_in_range(self._setting_host() or host, ports)

    def _setting_host(self) -> str | None:
        name = self._settings.get("MINDDP_IFNAME")
        return interface_address(name) if name else None

    # ---- 3. Ring ----

    def _build_ring(self, port: Listener, table: list[tuple[str, int]]) -> RingLinks:
        r, n = self.job.rank, self.job.world_size
        left, right = self.join_ring(range(n), port, table, self.deadline)
        log.info("rank %d -> %d via %s", r, right.peer, right.local_host)
        if self.lab and r == 0 and not self.job.world_ranks:
            log.warning("emulated network: %s", self.lab)
        return RingLinks(r, n, left, self.through_the_lab(right), self.alarm)

    def join_ring(
        self,
        members: Sequence[int],
        port: Listener,
        table: Sequence[tuple[str, int]],
        deadline: Deadline,
    ) -> tuple[Link, Link]:
        """Links from the left and to the right in a ring of these ranks, in this order.

        port: where the left one dials this rank; closed afterwards. table: where every
        rank of the group can be dialled. All members call it. Raises: PeerError.
        """
        place = members.index(self.job.rank)
        left, right = members[place - 1], members[(place + 1) % len(members)]
        answer_left = partial(self._answer_left, left)
        lobby = Lobby(port, answer_left, self.alarm, self._timeout)
        ends: dict[str, Link] = {}
        try:
            # Dial right, answer left, at the same time: done in turn, all would wait.
            me = replace(self.me, role=RING)
            lobby.dial(right, *table[right], introduce(me, self.job.token))
            for hello, link in lobby.links(deadline):
                ends["left" if hello else "right"] = link
                if len(ends) == 2:
                    return ends["left"], ends["right"]
            raise self._ring_is_open(lobby, left, deadline)
        except BaseException:
            for link in ends.values():
                link.close()
            raise
        finally:
            lobby.close()

    def through_the_lab(self, link: Link) -> Link:
        """The link to send on: as it is, or as slow as MINDDP_NETLAB wants it."""
        if self.lab is None:
            return link
        ends = (self._ranks[rank] for rank in (self.job.rank, link.peer))
        return netlab.EmulatedLink(link, self.lab.between(*ends), self.alarm)

    def _ring_is_open(self, lobby: Lobby, left: int, deadline: Deadline) -> PeerTimeout:
        """Which neighbour did not answer, or did not dial."""
        r, seconds = self.job.rank, f"{deadline.seconds:g} s"
        for rank, address in lobby.waiting_for():
            return PeerTimeout(
                f"rank {r} could not reach rank {rank}'s ring port {address} in "
                f"{seconds}. Does a firewall stand between? "
                "MINDDP_PORT_RANGE=40000-40100 makes ports that one can open.",
                rank,
            )
        text = f"rank {r} was not dialled by its left neighbour {left} in {seconds}"
        return PeerTimeout(text, left)

    def _answer_left(self, left: int) -> Script:
        def objection(hello: Hello) -> str | None:
            if (hello.role, hello.rank) == (RING, left):
                return None
            return f"rank {self.job.rank} waits for rank {left} as its left neighbour"

        return answer(self.me, self.job.token, objection)


def require_token(host: str, port: int, token: bytes, deadline: Deadline) -> None:
    """Raises: UsageError if this address is not loopback and the job has no token."""
    addresses = [address[0] for _, address in resolve(host, port, deadline)]
    if token or all(
        ipaddress.ip_address(a.split("%")[0]).is_loopback for a in addresses
    ):
        return
    raise UsageError(
        f"MASTER_ADDR={host} can be reached from other machines, and anybody who "
        "reaches the port could join. So the job needs a token. Make one and set it on "
        "every machine:\n  export MINDDP_TOKEN=$(python3 -c "
        "'import secrets; print(secrets.token_hex(32))')"
    )
