"""Tests of the exercises of docs/02-links-and-rendezvous.md."""

import pytest

from minddp.handshake import Stranger


class StoppedClock:
    """A deadline of `seconds` whose time passes only when somebody pauses."""

    def __init__(self, seconds):
        self.rest = seconds

    def left(self):
        return max(0.0, self.rest)


def hear(script, data):
    """What the script says and returns when `data` is all that it is brought."""
    out, wanted = next(script)
    said = out
    try:
        while True:
            message, data = data[:wanted], data[wanted:]
            assert len(message) == wanted, "it wants more than it was told to want"
            out, wanted = script.send(message)
            said += out
    except StopIteration as end:
        return said, end.value


@pytest.mark.parametrize("word", [b"", b"a", b"ring", b"x" * 256])
def test_parrot(answer, word):
    """parrot sends back what it hears, reversed."""
    message = len(word).to_bytes(2, "big") + word
    assert hear(answer(), message) == (word[::-1], word)


def test_parrot_is_not_to_be_flooded(answer):
    """parrot refuses lengths over 256 before it asks for the bytes."""
    with pytest.raises(Stranger):
        hear(answer(), (257).to_bytes(2, "big"))


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.0, []),
        (0.1, [0.05, 0.05]),
        (0.4, [0.05, 0.1, 0.2, 0.05]),
        (10.0, [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2, 2, 2, 0.85]),
    ],
)
def test_pauses(answer, seconds, expected):
    """pauses double up to 2 seconds and end with the deadline."""
    clock, taken = StoppedClock(seconds), []
    for pause in answer(clock):
        taken.append(pause)
        clock.rest = round(clock.rest - pause, 9)
        assert len(taken) < 100
    assert taken == pytest.approx(expected)
