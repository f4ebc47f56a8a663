"""Join: ranks with unequal amounts of data, and what each of them counts for.

    batches   rank 0  1  2  3  4  5                  with ddp.join():
              rank 1  1  2  3                            for x, y in loader: ...
                               '-- out of data

Without join rank 0 would wait in batch 4 for an all-reduce that rank 1 never makes.
Inside `join` every step begins with a *roll call*: an all-gather of two numbers a rank,
what it does next and what it counts for. A rank that is out of data answers "absent"
and then does what the others do, with zeros in place of gradients, until all are
absent.

    roll call      rank 0          rank 1          then both
    batch 3        backward, 1     backward, 1     average gradients
    batch 4        backward, 1     absent          average; rank 1 brings zeros
    end            absent          absent          leave, with the model of rank 0,
                                                   the last that was present

What is the average, when some have no data? Every rank has a weight w; its gradient is
scaled by n w / (sum of all w) before the average over n ranks, which makes it the
weighted mean. (The sum over all ranks of w_r g_r, divided by the sum of all w.)

                                         w, present    w, absent     the average is
    divide_by_initial_world_size=True    1             1             sum / n
    divide_by_initial_world_size=False   1             0             sum / ranks present
    weight_by_batch=True                 examples      0             mean over examples

Worked example.  n = 2, the last batches have 3 and 1 examples, mean gradients 1.0 and
5.0. The mean over the 4 examples is (3 * 1.0 + 1 * 5.0) / 4 = 2.0, not the 3.0 of two
ranks that count alike. Scaled by 1.5 and 0.5 they are 1.5 and 2.5: average 2.0.

In PyTorch: `DistributedDataParallel.join` and `torch.distributed.algorithms.join`.
PyTorch announces forwards, so two forwards before one backward break its join; here a
backward is announced when it begins. In PyTorch an absent rank repeats an old map of
used parameters, so one that nobody uses may get zeros; here it gets no gradient.

Left out: other classes that join along (`Joinable`). What a rank without data is to do
after each of the others' backwards, such as an optimizer's step, is given to
`DDP.join` as a function.
"""

from enum import IntEnum

import numpy as np

from minddp.errors import UsageError
from minddp.group import ProcessGroup


class Step(IntEnum):
    """What a rank does next."""

    ABSENT = 0  # it has no more data
    BUFFERS = 1  # broadcasts the buffers
    BACKWARD = 2  # averages gradients


class RollCall:
    """Who is there, doing what, counting for how much.

    absent_weight: what a rank without data counts for.
    raise_if_absent: an error, on all ranks, as soon as one is absent and others not.
    """

    def __init__(
        self,
        process_group: ProcessGroup,
        by_examples: bool = False,
        absent_weight: float = 1.0,
        raise_if_absent: bool = False,
    ):
        self.process_group = process_group
        self.by_examples = by_examples
        self.last_present, self.all_present = 0, True
        self._absent_weight = 0.0 if by_examples else absent_weight
        self._raise = raise_if_absent
        self._weights = np.ones(process_group.world_size)

    def hold(self, step: Step, weight: float = 0.0) -> Step:
        """Tell what this rank does next; returns what those that are present do.

        Raises: UsageError, if it is an error to be absent; PeerError.
        """
        table = self.process_group.all_gather_rows([float(step), weight])
        steps, self._weights = table[:, 0], table[:, 1]
        present = np.flatnonzero(steps != Step.ABSENT)
        absent = np.flatnonzero(steps == Step.ABSENT).tolist()
        self.all_present = not absent
        if present.size:
            self.last_present = int(present[-1])
        if self._raise and absent and present.size:
            raise UsageError(
                f"ranks {absent} have no more data, but others do. Give all ranks the "
                "same number of batches, or leave out throw_on_early_termination."
            )
        return Step(int(steps.max()))

    def be_absent(self) -> Step:
        """As `hold`, of a rank without data."""
        return self.hold(Step.ABSENT, self._absent_weight)

    @property
    def speaker(self) -> int:
        """The rank whose word holds for all: 0, or if not all have data, the last that
        has (as in PyTorch)."""
        return 0 if self.all_present else self.last_present

    def scale(self, examples: int) -> float:
        """What this rank counts for in the backward that begins: n w / sum of all w."""
        weight = float(examples) if self.by_examples else 1.0
        self.hold(Step.BACKWARD, weight)
        total = self._weights.sum()
        return float(self.process_group.world_size * weight / total) if total else 0.0
