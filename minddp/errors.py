"""Errors that say who, what, the probable cause, and what to do now.

Two families, because they ask for two different reactions:

    MindDPError
      UsageError       this call is wrong: mend the call
      PeerError        another rank failed: look there first, not here
        PeerLost         its connection closed or was reset
        PeerTimeout      it is there, but nothing came in time
        PeerMismatch     it is doing something else than this rank
      ReplicaError     the ranks' parameters differ: do not train on
      NonFiniteError   a gradient is infinite or no number, if that is to be an error
      CheckpointError  this file is damaged, or no checkpoint: take another

Rule.  OSError and struct.error never reach a user: they are mapped to one of these and
kept as the cause (`raise ... from exc`). What the system says of a file that the user
named, such as FileNotFoundError, does.

State afterwards.  After a UsageError nothing has happened: no byte was sent, no array
was written. After a PeerError the process group is dead for good; every later call on
it raises the same cause at once. A ReplicaError comes from comparing, which broke
nothing.

Left out: error codes. A program that wants to react has the class and the culprit.

In PyTorch: `DistBackendError`, `DistNetworkError`, `DistStoreError`
(torch/csrc/Exceptions).
"""


class MindDPError(RuntimeError):
    """Base of everything that minddp raises on purpose."""


class UsageError(MindDPError, ValueError, TypeError):
    """The call cannot work as written; nothing has been sent or changed.

    It is a ValueError and a TypeError as well, so that code written for NumPy or
    PyTorch, which raise one or the other in these places, catches it.
    """


class PeerError(MindDPError):
    """Another rank failed; `culprit` is the rank to look at first (None: not known).

    The process group that raised it is dead: close it, or let the program end.
    """

    def __init__(self, text: str, culprit: int | None = None):
        super().__init__(text)
        self.culprit = culprit


def same_error(error: PeerError) -> PeerError:
    """The same error without the traceback of where it was raised before."""
    return type(error)(str(error), error.culprit)


class ReplicaError(MindDPError):
    """Replicas that should be equal are not. The group lives on, to find out why."""


class NonFiniteError(MindDPError):
    """A gradient is not finite; raised on all ranks alike (DDP with nan="raise")."""


class CheckpointError(MindDPError):
    """A file cannot be read as a checkpoint: it is damaged or something else."""


class PeerLost(PeerError):
    """The culprit's connection closed or was reset: it crashed, was killed or left
    early."""


class PeerTimeout(PeerError):
    """The culprit made no progress before the deadline: stopped, stuck or cut off."""


class PeerMismatch(PeerError):
    """The culprit is in another collective, or in the same one with another array."""
