"""Links and rendezvous over loopback: ranks are threads, strangers are raw sockets.

What is promised here: ranks find each other whatever else knocks at their ports, every
wait has an end, an error says which line to change, and nothing is left behind.
"""

import contextlib
import errno
import os
import random
import re
import select
import socket
import struct
import subprocess
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from ranks import descriptors, free_port

from minddp import lobby, net
from minddp.environment import Job
from minddp.errors import MindDPError, PeerError, PeerLost, PeerTimeout, UsageError
from minddp.group import ProcessGroup
from minddp.handshake import (
    CONTROL,
    RING,
    HandshakeError,
    Hello,
    answer,
    introduce,
)
from minddp.net import Alarm, Deadline

TOKEN = b"the token of this test"
SLACK = 1.5  # seconds beyond a deadline, for a machine that does something else as well

HTTP = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
TLS = bytes.fromhex("16030100c4010000c00303") + bytes(186)  # a ClientHello begins so
SSH = b"SSH-2.0-OpenSSH_9.6\r\n"
GARBAGE = random.Random(7).randbytes(300)
CLOSED = b""  # what recv says at the end of a connection


# ---- Ranks as threads ----


def sum_of_ranks(pg):
    """Each rank adds its own digit: 111 on three ranks, or somebody is left out."""
    x = np.array([10**pg.rank])
    pg.all_reduce(x)
    return int(x[0])


class Rank(threading.Thread):
    """One rank, started at once: `result()` is what body(pg) returned or raised."""

    def __init__(self, job, body=sum_of_ranks, timeout=3.0, rendezvous_timeout=5.0):
        super().__init__(daemon=True)
        self.job, self.body = job, body
        self.timeouts = timeout, rendezvous_timeout
        self.outcome = None
        self.start()

    def run(self):
        started = time.monotonic()
        try:
            with ProcessGroup(self.job, *self.timeouts) as pg:
                self.outcome = self.body(pg)
        except Exception as error:
            self.outcome = error
        self.seconds = time.monotonic() - started

    def result(self, within=15.0):
        self.join(within)
        assert not self.is_alive(), f"rank {self.job.rank} hangs"
        return self.outcome

    def error(self, kind=MindDPError):
        """The error that it raised, which must be of this kind."""
        result = self.result()
        assert isinstance(result, kind), f"rank {self.job.rank}: {result!r}"
        return result


def jobs_of(n, port, addr="127.0.0.1", token=TOKEN):
    """The Jobs of n ranks; rank 0 binds the port itself."""
    return [
        Job(r, n, r, n, addr, port, token, "job", listen_fd=None, launcher="test")
        for r in range(n)
    ]


def bound_jobs(n, addr="127.0.0.1", token=TOKEN):
    """The Jobs of n ranks; rank 0 gets a bound socket, as it does from `minddp run`."""
    master = net.listen(addr)
    first, *others = jobs_of(n, master.port, addr, token)
    fd = os.dup(master.fileno())
    master.close()
    return [replace(first, listen_fd=fd), *others]


def meet(jobs, body=sum_of_ranks, **timeouts):
    """What body(pg) returned or raised on each rank."""
    return [rank.result() for rank in [Rank(job, body, **timeouts) for job in jobs]]


# ---- What the kernel knows of this process ----


def listening():
    """The (host, port) pairs at which this process listens."""
    ours = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            ours.add(os.readlink(f"/proc/self/fd/{fd}"))
    found = set()
    for family, table in (socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6"):
        with open(f"/proc/self/net/{table}") as rows:
            for row in list(rows)[1:]:
                _, local, _, state, *rest = row.split()
                if state == "0A" and f"socket:[{rest[5]}]" in ours:
                    host, port = local.split(":")
                    words = [
                        bytes.fromhex(host[i : i + 8])[::-1]
                        for i in range(0, len(host), 8)
                    ]
                    name = socket.inet_ntop(family, b"".join(words))
                    found.add((name, int(port, 16)))
    return found


def wait_until(true, seconds=5.0):
    """Look again and again: for what other threads do and nobody tells of."""
    end = time.monotonic() + seconds
    while not (value := true()) and time.monotonic() < end:
        time.sleep(0.005)
    assert value
    return value


# ---- Strangers ----


def lobby_of(job, caplog):
    """Rank 0, once it has dropped its first stranger: all its descriptors are open."""
    rank_0 = Rank(job)
    knock(job.master_port).close()
    wait_until(lambda: caplog.messages)
    caplog.clear()
    return rank_0


def knock(port, data=b""):
    client = socket.create_connection(("127.0.0.1", port), timeout=5)
    client.sendall(data)
    return client


def seconds_until_closed(client, limit=8.0):
    """How long the other side kept this connection; it must not have said a word."""
    started = time.monotonic()
    client.settimeout(limit)
    with contextlib.suppress(ConnectionResetError):
        assert client.recv(1000) == CLOSED, "a stranger has learnt something"
    return time.monotonic() - started


def drip(client, data, pause):
    """Send one byte at a time, for as long as the other side puts up with it."""
    with contextlib.suppress(OSError):
        for byte in data:
            client.sendall(bytes([byte]))
            time.sleep(pause)


def test_ranks_meet_within_two_seconds_while_strangers_knock():
    first, second, third = bound_jobs(3)
    before = listening()
    members = [Rank(first), Rank(second)]
    # Rank 0's port, and the one at which rank 1 waits for its left neighbour.
    ports = wait_until(lambda: len(now := listening() - before) == 1 and now)
    ports = {first.master_port} | {port for _, port in ports}
    assert len(ports) == 2
    crowd = []
    for port in ports:
        crowd += [knock(port, data) for data in (HTTP, TLS, SSH, GARBAGE, b"mddp")]
        crowd += [knock(port) for _ in range(200)]
        for _ in range(50):
            knock(port).close()
        crowd.append(slow := knock(port))
        threading.Thread(
            target=drip, args=(slow, b"mddp" * 9, 1.0), daemon=True
        ).start()

    started = time.monotonic()
    members.append(Rank(third))
    assert [rank.result() for rank in members] == [111, 111, 111]
    assert time.monotonic() - started < 2.0
    for client in crowd:
        client.close()


def test_each_stranger_is_closed_in_time_with_one_line_in_the_log(monkeypatch, caplog):
    monkeypatch.setattr(lobby, "HANDSHAKE_SECONDS", 0.5)
    first, second = bound_jobs(2)
    rank_0 = lobby_of(first, caplog)
    fds = descriptors()
    hello = Hello(CONTROL, 1, 2, "job").pack(bytes(32))
    said = {
        "speaks HTTP": HTTP,
        "speaks TLS": TLS,
        "speaks SSH": SSH,
        re.escape(repr(GARBAGE[:4])): GARBAGE,
        "no handshake within 0.5 s": b"",
        "no handshake within 0.5 s ": b"mddp",  # the first four bytes are right
        " no handshake within 0.5 s": hello[:-1],
    }
    clients = {why: knock(first.master_port, data) for why, data in said.items()}
    slow = clients["one byte in a while"] = knock(first.master_port)
    threading.Thread(target=drip, args=(slow, hello, 0.1), daemon=True).start()

    for client in clients.values():
        assert seconds_until_closed(client) < 0.5 + SLACK
    wait_until(lambda: len(caplog.messages) >= len(clients))
    for why, client in clients.items():
        host, port = client.getsockname()
        lines = [line for line in caplog.messages if f"{host}:{port} " in line]
        assert len(lines) == 1, (why, caplog.messages)
        reason = "no handshake within" if why.startswith("one byte") else why.strip()
        assert re.search(reason, lines[0])
        client.close()
    wait_until(lambda: descriptors() == fds)

    assert [rank.result() for rank in (rank_0, Rank(second))] == [11, 11]


def test_a_crowd_fills_neither_the_log_nor_the_table_of_descriptors(caplog):
    first, second = bound_jobs(2)
    rank_0, fds = lobby_of(first, caplog), descriptors()
    crowd = [knock(first.master_port) for _ in range(200)]
    places = lobby.PENDING_CONNECTIONS
    wait_until(lambda: len(select.select(crowd, [], [], 0)[0]) == len(crowd) - places)
    own = len(crowd)  # the clients' ends are in this process, too
    assert descriptors() <= fds + own + places
    assert [rank.result() for rank in (rank_0, Rank(second))] == [11, 11]
    assert len(caplog.messages) <= lobby.LOGGED_STRANGERS + 2
    for client in crowd:
        client.close()
    assert descriptors() <= fds


def test_more_ranks_than_there_are_places_for_strangers_meet():
    n = lobby.PENDING_CONNECTIONS + 16
    jobs = bound_jobs(n)
    # Rank 0 comes last, so that all others knock at the same moment.
    others = [Rank(job, lambda pg: pg.barrier().wait(), timeout=20) for job in jobs[1:]]
    rank_0 = Rank(jobs[0], lambda pg: pg.barrier().wait(), timeout=20)
    assert [rank.result(30) for rank in (rank_0, *others)] == [None] * n


def test_a_rank_with_another_token_never_joins(caplog):
    first, second = bound_jobs(2)
    rank_0 = Rank(first)
    for wrong in (b"another token", b""):
        refused = Rank(replace(second, token=wrong)).error(UsageError)
        assert "MINDDP_TOKEN" in str(refused)
    assert [rank.result() for rank in (rank_0, Rank(second))] == [11, 11]
    assert len(caplog.messages) == 2
    for line in caplog.messages:
        assert "does not hold the token" in line
        assert TOKEN.decode() not in line


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (Hello(CONTROL, 1, 3, "job", "127.0.0.1", 1), "rank 1 has already joined"),
        (Hello(CONTROL, 2, 4, "job", "127.0.0.1", 1), "WORLD_SIZE is 4, rank 0's 3"),
        (Hello(CONTROL, 2, 3, "another", "127.0.0.1", 1), "MINDDP_JOB_ID differs"),
        (Hello(CONTROL, 3, 3, "job", "127.0.0.1", 1), "its RANK is 3 of 3"),
        (Hello(CONTROL, 0, 3, "job", "127.0.0.1", 1), "rank 0 has no seat"),
        (Hello(RING, 2, 3, "job", "127.0.0.1", 1), "rank 2 has no seat"),
    ],
    ids=["seat is taken", "world size", "job", "rank", "rank 0", "role"],
)
def test_who_may_not_join_is_told_why_and_the_members_do_not_notice(wrong, reason):
    first, second, third = bound_jobs(3)
    before = listening()
    members = [Rank(first), Rank(second)]
    # Rank 1 opens its own port when it is about to join; give it the time to do so.
    wait_until(lambda: listening() - before)
    right = replace(wrong, rank=1, world_size=3, job="job", role=CONTROL)
    assert "already joined" in refusal(first, right)
    assert reason in refusal(first, wrong)
    assert [r.result() for r in (*members, Rank(third))] == [111, 111, 111]


def refusal(job, hello):
    """Why rank 0 refuses this Hello."""
    with pytest.raises(HandshakeError) as refused:
        dial(job, hello).close()
    return str(refused.value)


def dial(job, hello):
    """A link to rank 0 for whoever this Hello says we are."""
    where = job.master_addr, job.master_port
    return lobby.dial(*where, lambda host: introduce(hello, job.token), Deadline(5))


# ---- A handshake in pieces ----


class Door(threading.Thread):
    """A lobby that lets one caller in: `caller` is its Hello."""

    def __init__(self, token=TOKEN, deadline=5.0):
        super().__init__(daemon=True)
        self.listener, self.alarm = net.listen("127.0.0.1"), Alarm()
        self.port, self.caller = self.listener.port, None
        me = Hello(CONTROL, 0, 2, "job")
        self.lobby = lobby.Lobby(
            self.listener, lambda: answer(me, token, lambda hello: None), self.alarm
        )
        self.deadline = Deadline(deadline)
        self.links = []
        self.start()

    def run(self):
        for hello, link in self.lobby.links(self.deadline):
            self.caller = hello
            self.links.append(link)
            return

    def close(self):
        self.join(10)
        for end in (*self.links, self.lobby, self.alarm):
            end.close()


def test_a_handshake_that_comes_one_byte_at_a_time_is_as_good_as_any():
    door = Door()
    hello = Hello(CONTROL, 1, 2, "job", "127.0.0.1", 4711)
    with knock(door.port) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        script = introduce(hello, TOKEN)
        out, wanted = next(script)
        with pytest.raises(StopIteration) as end:
            while True:
                for byte in out:
                    client.sendall(bytes([byte]))
                heard = b"".join(client.recv(1) for _ in range(wanted))
                out, wanted = script.send(heard)
        assert end.value.value == hello
        door.join(5)
    assert door.caller == hello
    door.close()


def test_a_handshake_that_ends_after_three_bytes_says_so(caplog):
    door = Door(deadline=1.0)
    knock(door.port, b"mdd").close()
    wait_until(lambda: caplog.messages)
    assert "closed the connection after 3 of 4 bytes" in caplog.text
    door.close()


def test_a_rank_whose_call_is_cut_after_three_bytes_says_so():
    with socket.create_server(("127.0.0.1", 0)) as server:
        rank_1 = Rank(jobs_of(2, server.getsockname()[1])[1], rendezvous_timeout=1.5)
        while rank_1.is_alive():
            server.settimeout(0.2)
            with contextlib.suppress(TimeoutError):
                client, _ = server.accept()
                client.recv(1000)  # the hello, or closing would be a reset
                client.sendall(b"mdd")
                client.close()
        assert "3 of " in str(rank_1.error())


def test_a_port_that_closes_before_it_answers_is_tried_again():
    """Tunnels and container proxies accept for a rank 0 that is not there yet."""
    port = free_port()
    first, second = jobs_of(2, port)
    with socket.create_server(("127.0.0.1", port)) as proxy:
        rank_1 = Rank(second)
        client, _ = proxy.accept()
        client.recv(1000)  # the hello, or closing would be a reset
        client.close()
    assert [rank.result() for rank in (Rank(first), rank_1)] == [11, 11]


def test_a_rank_says_what_it_reached_if_that_is_another_program():
    with socket.create_server(("127.0.0.1", 0)) as server:
        rank_1 = Rank(jobs_of(2, server.getsockname()[1])[1], rendezvous_timeout=3)
        client, _ = server.accept()
        client.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        assert "speaks HTTP" in str(rank_1.error(UsageError))
        client.close()


# ---- Every wait has an end ----


def assert_gives_up(rank, kind=PeerTimeout):
    error = rank.error(kind)
    assert rank.seconds < rank.timeouts[1] + SLACK
    return error


def test_a_rank_gives_up_in_time_whatever_does_not_answer():
    def caller(port):
        return Rank(jobs_of(2, port)[1], rendezvous_timeout=0.6)

    nobody = free_port()
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        socket.create_server(("127.0.0.1", 0), backlog=0) as full,
    ):
        # Nobody accepts here, so after this one the kernel lets a caller wait.
        queue = [knock(full.getsockname()[1]) for _ in range(1)]
        ports = [nobody, silent.getsockname()[1], full.getsockname()[1]]
        for port, rank in [(port, caller(port)) for port in ports]:
            error = assert_gives_up(rank)
            assert error.culprit == 0
            assert f"127.0.0.1:{port}" in str(error)
            assert "0.6 s" in str(error)
        for client in queue:
            client.close()


def test_a_name_server_that_does_not_answer_ends_at_the_deadline(monkeypatch):
    never = threading.Event()
    lookups = no_names(monkeypatch, lambda name: never.wait(8))
    job = replace(jobs_of(2, free_port())[1], master_addr="slow.invalid")
    error = assert_gives_up(Rank(job, rendezvous_timeout=0.5))
    assert "slow.invalid" in str(error)
    assert lookups
    never.set()


@pytest.mark.parametrize("first_to_give_up", [0, 1])
def test_all_who_came_list_who_did_not_and_where_they_waited(first_to_give_up):
    jobs = bound_jobs(4)
    # Whoever gives up first, the others learn of it at once: they started together.
    patience = {first_to_give_up: 0.7}
    ranks = [Rank(jobs[r], rendezvous_timeout=patience.get(r, 6.0)) for r in (0, 1, 3)]
    for rank in ranks:
        error = rank.error(PeerTimeout)
        assert rank.seconds < 0.7 + SLACK
        assert error.culprit == 2
        assert "missing: [2]" in str(error)
        assert f"127.0.0.1:{jobs[0].master_port}" in str(error)


def test_a_rank_0_that_falls_silent_after_the_handshake_is_given_up():
    door = Door()
    rank_1 = Rank(jobs_of(2, door.port)[1], rendezvous_timeout=0.8)
    assert assert_gives_up(rank_1).culprit == 0
    door.close()


def test_a_ring_port_that_accepts_and_says_nothing_is_named():
    job = bound_jobs(2)[0]
    rank_0 = Rank(job, rendezvous_timeout=1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        link = dial(job, Hello(CONTROL, 1, 2, "job", "127.0.0.1", port))
        error = assert_gives_up(rank_0)
        link.close()
    assert error.culprit == 1
    assert f"rank 1's ring port 127.0.0.1:{port}" in str(error)


def test_a_ring_port_that_nobody_holds_is_named_at_once():
    job = bound_jobs(2)[0]
    rank_0 = Rank(job, rendezvous_timeout=8.0)
    port = free_port()
    link = dial(job, Hello(CONTROL, 1, 2, "job", "127.0.0.1", port))
    error = rank_0.error(PeerLost)
    link.close()
    assert rank_0.seconds < 2.0
    assert error.culprit == 1
    assert f"127.0.0.1:{port}" in str(error)


def test_ranks_wait_for_a_rank_0_that_comes_last():
    first, second, third = jobs_of(3, free_port())
    others = [Rank(second), Rank(third)]
    time.sleep(0.3)  # a head start
    assert [rank.result() for rank in (Rank(first), *others)] == [111, 111, 111]


def test_a_peer_that_resets_right_after_the_handshake_is_no_os_error(monkeypatch):
    read = lobby.Conversation._read

    def read_late(conversation, count):
        time.sleep(0.1)  # so that the reset is there before the last message is read
        return read(conversation, count)

    monkeypatch.setattr(lobby.Conversation, "_read", read_late)
    with socket.create_server(("127.0.0.1", 0)) as server:
        rank_1 = Rank(jobs_of(2, server.getsockname()[1])[1], rendezvous_timeout=2.0)
        client, _ = server.accept()
        script = answer(Hello(CONTROL, 0, 2, "job"), TOKEN, lambda hello: None)
        out, wanted = next(script)
        with contextlib.suppress(StopIteration):
            while True:
                client.sendall(out)
                heard = client.recv(wanted, socket.MSG_WAITALL) if wanted else b""
                out, wanted = script.send(heard)
        reset = struct.pack("ii", 1, 0)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        client.close()
    assert_gives_up(rank_1, PeerError)


# ---- Errors that say which line to change ----


def test_a_busy_port_is_named_with_the_fix():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        rank_0 = Rank(jobs_of(2, port)[0])
        text = str(rank_0.error(UsageError))
    assert f"127.0.0.1:{port}" in text
    assert "in use" in text
    assert "MASTER_PORT" in text
    assert rank_0.seconds < 2.0


def test_an_address_of_another_machine_is_no_place_for_rank_0():
    job = replace(jobs_of(2, free_port())[0], master_addr="192.0.2.1")  # RFC 5737
    text = str(Rank(job).error(UsageError))
    assert "192.0.2.1" in text
    assert "MASTER_ADDR" in text


def no_names(monkeypatch, instead):
    """Answer lookups of names with instead(name); the list of the names asked for.

    Digits are looked up as ever, and no packet goes to a name server.
    """
    real, asked = socket.getaddrinfo, []

    def getaddrinfo(host, port, *args, **kwargs):
        names_too = not kwargs.get("flags", 0) & socket.AI_NUMERICHOST
        kwargs["flags"] = kwargs.get("flags", 0) | socket.AI_NUMERICHOST
        try:
            return real(host, port, *args, **kwargs)
        except socket.gaierror:
            if not names_too:
                raise
            asked.append(host)
            found = instead(host)
            if not isinstance(found, list):
                raise
            return [row for h in found for row in real(h, port, *args, **kwargs)]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return asked


def test_an_unknown_host_is_named(monkeypatch):
    no_names(monkeypatch, lambda name: None)
    for job in jobs_of(2, free_port(), addr="nope.invalid"):
        text = str(Rank(job).error(UsageError))
        assert "'nope.invalid'" in text
        assert "MASTER_ADDR" in text


def test_a_descriptor_that_is_no_listening_socket_is_named():
    read, write = os.pipe()
    unused = os.dup(read)
    os.close(unused)
    for fd in (read, unused):
        job = replace(jobs_of(2, free_port())[0], listen_fd=fd)
        assert "MINDDP_LISTEN_FD" in str(Rank(job).error(UsageError))
    for fd in (read, write):
        with contextlib.suppress(OSError):
            os.close(fd)


@pytest.mark.parametrize("addr", ["192.0.2.1", "0.0.0.0", "::", "2001:db8::1"])
def test_other_machines_need_a_token_and_the_error_has_the_line_that_makes_one(addr):
    for job in jobs_of(2, free_port(), addr=addr, token=b""):
        rank = Rank(job)
        text = str(rank.error(UsageError))
        assert rank.seconds < 1.0
        assert addr in text
        assert "\n  export MINDDP_TOKEN=" in text
    line = next(line for line in text.splitlines() if "export" in line)
    shell = ["bash", "-c", f"{line}; printf %s $MINDDP_TOKEN"]
    made = subprocess.run(shell, capture_output=True, text=True, timeout=10).stdout
    assert re.fullmatch("[0-9a-f]{64}", made)


def test_a_port_range_that_is_none_is_shown(monkeypatch):
    first, second = bound_jobs(2)
    rank_0 = Rank(first)
    for text in ["many", "40000", "40010-40000", "0-9", "1-65536", "-"]:
        monkeypatch.setenv("MINDDP_PORT_RANGE", text)
        error = str(Rank(second).error(UsageError))
        assert f"MINDDP_PORT_RANGE={text!r}" in error
        assert "not let in" not in error  # rank 0 has nothing to do with it
    monkeypatch.delenv("MINDDP_PORT_RANGE")
    assert [rank.result() for rank in (rank_0, Rank(second))] == [11, 11]


def test_ring_ports_come_from_the_port_range(monkeypatch):
    first = wait_until(
        lambda: (p := free_port()) and all(is_free(p + i) for i in range(8)) and p
    )
    monkeypatch.setenv("MINDDP_PORT_RANGE", f"{first}-{first + 7}")
    with socket.create_server(("127.0.0.1", first)):  # taken: the next will do
        tables = meet(bound_jobs(3), lambda pg: pg._control.table)
    for table in tables:
        ports = [port for _, port in table]
        assert len({*ports}) == 3
        assert all(first < port <= first + 7 for port in ports)


def is_free(port):
    with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
        return True
    return False


def test_a_port_range_without_a_free_port_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"MINDDP_PORT_RANGE.*{port}"):
            net.listen_in_range("127.0.0.1", f"{port}-{port}")


def test_an_interface_that_does_not_exist_is_named_with_those_that_do(monkeypatch):
    with pytest.raises(UsageError, match=r"nope.*\blo\b"):
        net.interface_address("nope")
    first, second = bound_jobs(2)
    rank_0 = Rank(first)
    monkeypatch.setenv("MINDDP_IFNAME", "nope")
    error = str(Rank(second).error(UsageError))
    assert "MINDDP_IFNAME=nope" in error
    assert "not let in" not in error
    monkeypatch.delenv("MINDDP_IFNAME")
    assert [rank.result() for rank in (rank_0, Rank(second))] == [11, 11]


def test_an_interface_can_be_chosen(monkeypatch):
    monkeypatch.setenv("MINDDP_IFNAME", "lo")
    for table in meet(bound_jobs(2), lambda pg: pg._control.table):
        assert [host for host, _ in table] == ["127.0.0.1", "127.0.0.1"]


# ---- Addresses, however they are written ----


@pytest.mark.parametrize("addr", ["127.0.0.1", "::1", "localhost"])
def test_ranks_meet_at(addr):
    assert meet(jobs_of(3, free_port(), addr)) == [111, 111, 111]


LOOPBACK = ["localhost", "127.0.0.1", "127.1", "localhost", "127.0.0.1"]


def test_each_rank_may_write_the_address_in_its_own_way():
    for n in (3, 5):
        for names in LOOPBACK, LOOPBACK[1:] + LOOPBACK[:1]:
            jobs = zip(jobs_of(n, free_port()), names, strict=False)
            jobs = [replace(job, master_addr=name) for job, name in jobs]
            assert meet(jobs) == [int("1" * n)] * n


@pytest.mark.parametrize("of_rank_0", ["localhost", "127.0.0.1"])
def test_localhost_may_mean_ipv6_first(monkeypatch, of_rank_0):
    """As on macOS, and wherever /etc/hosts gives the name to both."""
    no_names(monkeypatch, lambda name: ["::1", "127.0.0.1"])
    first, second, third = jobs_of(3, free_port())
    first = replace(first, master_addr=of_rank_0)
    third = replace(third, master_addr="localhost")
    assert meet([first, second, third]) == [111, 111, 111]


def test_a_machine_without_ipv6_uses_the_other_address_of_the_name(monkeypatch):
    class WithoutIPv6(socket.socket):
        def __init__(self, family=-1, *args, **kwargs):
            if family == socket.AF_INET6:
                raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
            super().__init__(family, *args, **kwargs)

    jobs = jobs_of(2, free_port(), "localhost")
    no_names(monkeypatch, lambda name: ["::1", "127.0.0.1"])
    monkeypatch.setattr(socket, "socket", WithoutIPv6)
    assert meet(jobs) == [11, 11]


def test_the_name_of_this_machine_is_never_looked_up(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "nope.invalid")
    asked = no_names(monkeypatch, lambda name: None)
    assert meet(bound_jobs(2)) == [11, 11]
    assert meet(jobs_of(2, free_port())) == [11, 11]
    assert asked == []


# ---- Sockets: how they are set, and that none is left ----


def same_socket(link):
    return socket.socket(fileno=os.dup(link.fileno()))


def test_ring_links_send_at_once_and_notice_a_dead_host():
    def options(pg):
        found = []
        for link in (pg._links.left, pg._links.right):
            assert not os.get_blocking(link.fileno())
            with same_socket(link) as sock:
                tcp = socket.IPPROTO_TCP
                assert sock.getsockopt(tcp, socket.TCP_NODELAY)
                assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                assert sock.getsockopt(tcp, socket.TCP_KEEPIDLE) <= 60
                found.append(sock.getsockopt(tcp, socket.TCP_USER_TIMEOUT))
        pg.barrier()
        return found

    # The kernel must not give a connection up before the group does: a peer whose
    # buffers are full may compute for as long as the group's timeout.
    for timeout in (3.0, 600.0):
        for ends in meet(bound_jobs(2), options, timeout=timeout):
            assert all(ms == 0 or ms >= timeout * 1000 for ms in ends), ends


@pytest.mark.parametrize("addr", ["127.0.0.1", "::1"])
def test_ranks_listen_on_loopback_alone_and_no_longer_than_the_rendezvous(addr):
    before = listening()
    first, *others, last = bound_jobs(3, addr)

    def body(pg):
        pg.barrier()  # now all have left the rendezvous
        found = listening() - before
        pg.barrier()
        return found

    ranks = [Rank(job, body) for job in (first, *others)]
    during = wait_until(lambda: len(now := listening() - before) == 2 and now)
    assert {host for host, _ in during} == {addr}
    assert (addr, first.master_port) in during
    ranks.append(Rank(last, body))
    assert [rank.result() for rank in ranks] == [set(), set(), set()]


def test_twenty_groups_in_a_row_leave_no_descriptor_and_no_thread():
    meet(bound_jobs(2))  # what is made once and kept is made now
    base = descriptors(), threading.active_count()
    for _ in range(20):
        # No barrier at the end: who is done first leaves while the others still read.
        assert meet(bound_jobs(3)) == [111, 111, 111]
    assert (descriptors(), threading.active_count()) == base


def test_groups_that_fail_leave_no_descriptor_and_no_thread():
    def fail_on_rank_1(pg):
        if pg.rank == 1:
            raise ValueError("on purpose")
        pg.barrier()

    def in_a_collective():
        outcomes = meet(bound_jobs(3), fail_on_rank_1)
        assert all(isinstance(x, (ValueError, PeerError)) for x in outcomes), outcomes
        return outcomes

    def at_the_rendezvous():
        ranks = [Rank(job, rendezvous_timeout=0.1) for job in bound_jobs(3)[:2]]
        return [rank.error(PeerTimeout) for rank in ranks]

    def at_the_door():
        first, second = bound_jobs(2)
        rank_0 = Rank(first, rendezvous_timeout=0.3)
        refused = Rank(replace(second, token=b"wrong"))
        return [refused.error(UsageError), rank_0.error(PeerTimeout)]

    in_a_collective()
    base = descriptors(), threading.active_count()
    # Errors are kept, as a program or a debugger may: they hold what they saw.
    for fail in in_a_collective, at_the_rendezvous, at_the_door:
        kept = [fail() for _ in range(5)]
        assert (descriptors(), threading.active_count()) == base, fail.__name__
        del kept


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize(
    ("receive_buffer", "length"),
    # Where a segment of loopback (64 KB) does not fit, each one waits for TCP's timers:
    # hence the smaller array, which still is 16 times as large as all buffers.
    [(1 << 16, 1 << 22), (4096, 1 << 14)],
)
def test_arrays_far_larger_than_the_buffers_of_the_kernel_get_through(
    n, receive_buffer, length
):
    def body(pg):
        for link in (pg._links.left, pg._links.right):
            with same_socket(link) as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        x = np.arange(length, dtype=np.float32) * (pg.rank + 1)
        pg.all_reduce(x)
        return x[[1, length // 4, -1]].tolist()

    times = n * (n + 1) // 2
    expected = [float(times * i) for i in (1, length // 4, length - 1)]
    assert meet(bound_jobs(n), body, timeout=10.0) == [expected] * n
