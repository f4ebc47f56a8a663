"""The handshake, as transcripts of two generators back to back: no socket in sight."""

import pytest

from minddp import handshake
from minddp.handshake import (
    CONTROL,
    RING,
    HandshakeError,
    Hello,
    Stranger,
    answer,
    introduce,
)

TOKEN = b"a secret of the job"


def hello(rank=1, world_size=2, job="job", role=CONTROL):
    return Hello(role, rank, world_size, job, "10.0.0.7", 4711)


def welcome_all(_):
    return None


class Side:
    """One end: feeds its generator, and notes how the conversation ended."""

    def __init__(self, script):
        self.script, self.inbox, self.end = script, b"", None
        self.outbox, self.wanted = next(script)
        self.sent = [self.outbox]

    def hear(self, data):
        self.inbox += data
        while self.end is None and len(self.inbox) >= self.wanted:
            message, self.inbox = self.inbox[: self.wanted], self.inbox[self.wanted :]
            try:
                out, self.wanted = self.script.send(message)
                self.outbox += out
                self.sent.append(out)
            except StopIteration as stop:
                self.end = stop.value
            except HandshakeError as error:
                self.end = error
                self.wanted = 1

    def take(self):
        out, self.outbox = self.outbox, b""
        return out


def talk(dialer, listener):
    """Carry bytes to and fro until nobody has anything to say."""
    while dialer.outbox or listener.outbox:
        listener.hear(dialer.take())
        dialer.hear(listener.take())
    return dialer.end, listener.end


def meet(
    caller=None,
    host=None,
    caller_token=TOKEN,
    host_token=TOKEN,
    objection=welcome_all,
):
    caller, host = caller or hello(), host or hello(rank=0)
    dialer = Side(introduce(caller, caller_token))
    listener = Side(answer(host, host_token, objection))
    return (*talk(dialer, listener), dialer, listener)


def test_two_holders_of_the_token_meet():
    at_dialer, at_listener, *_ = meet()
    assert at_dialer == hello()
    assert at_listener.rank == 1
    assert (at_listener.host, at_listener.port) == ("10.0.0.7", 4711)


def test_without_a_token_on_either_side_they_meet_too():
    assert meet(caller_token=b"", host_token=b"")[1].rank == 1


def test_ipv6_addresses_travel_as_well():
    caller = Hello(CONTROL, 1, 2, "job", "fd00::17", 1)
    assert meet(caller)[1].host == "fd00::17"


def test_a_wrong_token_learns_nothing():
    at_dialer, at_listener, _, listener = meet(caller_token=b"guess")
    assert isinstance(at_listener, Stranger)
    assert "does not hold the token" in str(at_listener)
    assert at_dialer is None, "the listener says nothing more; it hangs up"
    assert len(b"".join(listener.sent)) == 40, "a challenge, and no verdict"


def test_the_listener_must_hold_the_token_too():
    caller, token = hello(), TOKEN
    dialer = Side(introduce(caller, token))
    dialer.hear(handshake._CHALLENGE.pack(b"mddp", 1, bytes(32)))
    dialer.hear(handshake._REPLY.pack(True, bytes(32), b""))
    assert "does not hold the token" in str(dialer.end)


def test_a_proof_sent_back_is_no_proof():
    dialer = Side(introduce(hello(), TOKEN))
    dialer.hear(handshake._CHALLENGE.pack(b"mddp", 1, bytes(32)))
    proof = dialer.sent[-1]
    dialer.hear(handshake._REPLY.pack(True, proof, b""))
    assert isinstance(dialer.end, HandshakeError), "the side is part of the HMAC"


def test_a_recorded_conversation_cannot_be_replayed():
    *_, dialer, _ = meet()
    replayed = Side(answer(hello(rank=0), TOKEN, welcome_all))
    for message in dialer.sent:
        replayed.hear(message)
    assert isinstance(replayed.end, Stranger), "the listener's nonce is fresh"


def test_a_proof_for_one_seat_does_not_open_another():
    dialer = Side(introduce(hello(rank=1, world_size=4), TOKEN))
    listener = Side(answer(hello(rank=0, world_size=4), TOKEN, welcome_all))
    forged = bytearray(dialer.take())
    forged[11] = 2  # the last byte of the rank
    listener.hear(bytes(forged))
    dialer.hear(listener.take())
    listener.hear(dialer.take())
    assert isinstance(listener.end, Stranger)


@pytest.mark.parametrize(
    ("caller", "reason"),
    [
        (hello(world_size=3), "its WORLD_SIZE is 3, rank 0's 2"),
        (hello(job="yesterday"), "it belongs to another job"),
        (hello(rank=2), "its RANK is 2 of 2"),
    ],
)
def test_a_member_of_another_job_is_told_why_it_is_refused(caller, reason):
    at_dialer, at_listener, *_ = meet(caller)
    assert reason in str(at_dialer)
    assert reason in str(at_listener)


def test_the_listener_may_object():
    at_dialer, *_ = meet(objection=lambda caller: f"seat {caller.rank} is taken")
    assert str(at_dialer) == "seat 1 is taken"


def test_both_sides_name_both_versions(monkeypatch):
    dialer = Side(introduce(hello(), TOKEN))
    monkeypatch.setattr(handshake, "VERSION", 2)
    listener = Side(answer(hello(rank=0), TOKEN, welcome_all))
    listener.hear(dialer.take())
    challenge = listener.take()
    monkeypatch.setattr(handshake, "VERSION", 1)
    dialer.hear(challenge)
    assert str(dialer.end) == "it speaks wire version 2, this rank 1"


@pytest.mark.parametrize(
    ("said", "looks_like"),
    [
        (b"GET / HTTP/1.1\r\n", "speaks HTTP"),
        (b"\x16\x03\x01\x02\x00\x01", "speaks TLS"),
        (b"SSH-2.0-OpenSSH_9", "speaks SSH"),
        (b"*1\r\n$4\r\nPING", "begins with b'*1"),
    ],
)
def test_a_stranger_is_known_by_its_first_four_bytes(said, looks_like):
    listener = Side(answer(hello(rank=0), TOKEN, welcome_all))
    listener.hear(said[:4])
    assert isinstance(listener.end, Stranger)
    assert looks_like in str(listener.end)
    assert b"".join(listener.sent) == b"", "it gets no answer"


def test_nobody_says_more_than_256_bytes():
    *_, dialer, listener = meet(hello(role=RING))
    assert 0 < sum(map(len, dialer.sent)) <= 256
    assert 0 < sum(map(len, listener.sent)) <= 256
