"""gloo beside the ring: PyTorch's all-reduce in the same processes, turn by turn.

    rank 0   | ours | stream | gloo | ours | stream | gloo | ...
    rank 1   | ours | stream | gloo | ours | stream | gloo | ...

Both groups are open all the time, on the same ranks, and all-reduce the same memory.
Two programs that run one after the other would compare two states of the machine. The
group whose turn it is not sleeps: gloo in epoll, we in poll.

Rule.  PyTorch is imported here, and only if it is asked for.

Worked example.  `gloo_ratio` 1.5: gloo takes one and a half times as long.

In PyTorch: `init_process_group("gloo")`, which is ProcessGroupGloo.

Left out: MPI, whose ranks must be started by mpiexec; gloo's other collectives.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from minddp.errors import UsageError
from minddp.group import ProcessGroup

Array = np.ndarray[Any, Any]


def check_compare() -> None:
    """Raises: UsageError if PyTorch is not installed, or the network is emulated for us
    alone. Does not import PyTorch."""
    if os.environ.get("MINDDP_NETLAB"):
        raise UsageError(
            "--compare gloo: gloo does not know of MINDDP_NETLAB and would be as fast "
            "as this machine. Unset MINDDP_NETLAB, or leave out --compare."
        )
    if find_spec("torch") is None:
        raise UsageError(
            "--compare gloo needs PyTorch in this environment: "
            "pip install torch --index-url https://download.pytorch.org/whl/cpu"
        )


@contextmanager
def gloo_all_reduce(
    pg: ProcessGroup, store: str
) -> Iterator[Callable[[Array], Callable[[], object]]]:
    """A group over gloo of the ranks of pg; gives a function that makes, of an array, a
    call that all-reduces it in place.

    store: a file through which the ranks find one another, on this machine.
    """
    torch, dist = import_module("torch"), import_module("torch.distributed")
    torch.set_num_threads(1)
    file = dist.FileStore(store, pg.world_size)
    seat = {"rank": pg.rank, "world_size": pg.world_size}
    dist.init_process_group("gloo", store=file, **seat)
    try:

        def calling(x: Array) -> Callable[[], object]:
            tensor = torch.from_numpy(x)  # the same memory
            return lambda: dist.all_reduce(tensor)

        yield calling
    finally:
        dist.destroy_process_group()
