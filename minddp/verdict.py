"""The verdict: which rank failed first? Pure functions, for rank 0's control thread.

In a ring a failure looks like the neighbour's. Let rank 1 of 4 stop:

    rank 2 waits in vain for 1,  rank 3 waits in vain for 2,  rank 0 waits in vain for 3

and each would blame another. So a rank that fails *accuses* before it closes anything,
and all ranks raise what rank 0 decides:

    connection lost   the first accusation holds
    no progress       a rank that gives no sign of life; else one that has not entered
                      the collective which the others are in; else the one accused
    mismatch          the odd one out: it disagrees with both its neighbours

Worked example.  Rank 1 of 3 calls broadcast while the others call all_reduce. Each rank
compares its left neighbour's call with its own: rank 1 accuses 0, rank 2 accuses 1.
Rank 1 is in both pairs, so it is rank 1.

In PyTorch: ProcessGroupNCCL's flight recorder leaves this to a tool that runs
afterwards.

Left out: two ranks that fail at once. The first to be heard of is named.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from minddp.errors import PeerError, PeerLost, PeerMismatch, PeerTimeout

KINDS: dict[str, type[PeerError]] = {
    "lost": PeerLost,
    "timeout": PeerTimeout,
    "mismatch": PeerMismatch,
    "silent": PeerTimeout,  # no sign of life, not even an answer to an accusation
}


@dataclass(frozen=True)
class Accusation:
    """Rank `by` says that `culprit` has failed (None: it does not know which rank).

    A verdict has the same form.
    """

    kind: str  # a key of KINDS
    by: int
    culprit: int | None
    text: str

    @staticmethod
    def of(error: PeerError, by: int) -> "Accusation":
        kind = next(kind for kind, cls in KINDS.items() if isinstance(error, cls))
        return Accusation(kind, by, error.culprit, str(error))

    @property
    def confession(self) -> bool:
        """A rank that names itself knows best why."""
        return self.by == self.culprit

    def as_error(self, rank: int) -> PeerError:
        """What rank `rank` raises when it is told of this."""
        said = f"rank {rank} gives up, as rank {self.by} reported: "
        return KINDS[self.kind](
            self.text if rank == self.by else said + self.text, self.culprit
        )


@dataclass(frozen=True)
class Pulse:
    """What rank 0 knows of a rank from its heartbeats."""

    silence: float  # seconds since the latest beat
    entered: int  # sequence number of the latest collective it has entered


def odd_one_out(accusations: Sequence[Accusation]) -> Accusation:
    """The verdict on pairs of neighbours that disagree; needs at least one.

    With two ranks, or with one pair, nobody can say which of the two is wrong.
    """
    first = accusations[0]
    pairs = {frozenset((a.by, a.culprit)) for a in accusations}
    votes = Counter(rank for pair in pairs for rank in pair)
    for rank, count in votes.items():
        if count > 1:
            note = (
                f" Rank {rank} is the odd one out: it disagrees with both neighbours."
            )
            return replace(first, culprit=rank, text=first.text + note)
    return first


def who_is_missing(
    accusation: Accusation, pulses: Mapping[int, Pulse], beat_seconds: float
) -> Accusation:
    """The verdict when somebody waited in vain: who is silent, or who is behind?"""
    silent = max(pulses, key=lambda rank: pulses[rank].silence)
    front = max(pulse.entered for pulse in pulses.values())
    behind = min(pulses, key=lambda rank: pulses[rank].entered)
    if pulses[silent].silence > 2 * beat_seconds:
        culprit = silent
        why = (
            f"rank {silent} is not responding: no sign of life for "
            f"{pulses[silent].silence:.1f} s. Is it stopped, or its host cut off?"
        )
    elif pulses[behind].entered < front:
        culprit = behind
        why = (
            f"rank {behind} is alive but has not entered collective #{front}; its "
            f"latest is #{pulses[behind].entered}. Is it slower, or on another way "
            "through the program?"
        )
    else:
        return accusation
    text = f"{why} Noticed as {accusation.text}"
    return replace(accusation, culprit=culprit, text=text)


def who_did_not_come(accusation: Accusation, n: int, came: Sequence[int]) -> Accusation:
    """The verdict when the rendezvous ended without some of the n ranks."""
    missing = [rank for rank in range(n) if rank not in came]
    text = (
        f"{accusation.text}; {len(came)} of {n} ranks joined, missing: {missing}. "
        "Start them, or see in their logs why they cannot reach rank 0."
    )
    return replace(accusation, culprit=missing[0] if missing else None, text=text)
