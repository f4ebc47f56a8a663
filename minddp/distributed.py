"""The interface of torch.distributed: module functions over one default group.

    import minddp.distributed as dist

    dist.init_process_group()               group.init_process_group, and kept here
    dist.all_reduce(t, op=dist.ReduceOp.MAX)     group.all_reduce(t.data, "max")
    dist.destroy_process_group()                 group.close()

Scripts written for PyTorch call functions of a module, which find the group in a
variable. These do the same, mostly in one line: all that happens, happens in group.py.
A program of your own is clearer with the group in its hands.

Rule 1.  `group=None` is the default group, all ranks. A rank that is not in a group of
         `new_group` has NON_GROUP_MEMBER in its place, with which every function does
         nothing.
Rule 2.  Tensors and arrays are both taken. Results land in place.
Rule 3.  Ranks that messages go to, and `src` of a broadcast, are those of the world, as
         in PyTorch, also within a group.

Worked example.  Ranks 1 and 2 of 3 add what they have; rank 0 looks on:

    pair = dist.new_group([1, 2])           all ranks call it
    t = torch.ones(1)
    dist.all_reduce(t, group=pair)          2 on ranks 1 and 2, still 1 on rank 0

In PyTorch: torch/distributed/distributed_c10d.py.

Left out: `all_to_all`; stores; objects (they are pickled there). Of the names that
`backend` may have, "mpi" is also one here, and "nccl" where there is a GPU and NCCL;
with others MINDDP_TRANSPORT decides.
"""

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np

from minddp.backends import nccl
from minddp.errors import UsageError
from minddp.group import ProcessGroup, open_groups
from minddp.group import init_process_group as make_group
from minddp.payload import is_array, zeros_beside
from minddp.work import Work


class ReduceOp:
    """Names for the reductions of group.py."""

    SUM, AVG, PRODUCT, MIN, MAX = "sum", "avg", "prod", "min", "max"


class GroupMember:
    """What stands for a group on ranks that are not in it."""

    NON_GROUP_MEMBER = object()


Group = ProcessGroup | object | None

_default: ProcessGroup | None = None
_sub_groups: list[ProcessGroup] = []


# ---- The default group ----


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | float = 60.0,
    world_size: int = -1,
    rank: int = -1,
    device_id: Any = None,
) -> None:
    """Meet all ranks, and keep the group as the default.

    backend: "mpi" for MPI (backends/mpi.py); "nccl" for NCCL (backends/nccl.py) where
    CuPy finds a GPU and NCCL, and MINDDP_TRANSPORT says nothing else; all others are
    accepted, and change nothing.
    init_method: "env://" (the launcher's variables, the default) or "tcp://host:port".
    timeout: of a collective, in seconds or as a timedelta.

    Raises: UsageError, PeerTimeout; as `minddp.init_process_group`.
    """
    global _default
    if is_initialized():
        raise UsageError(
            "init_process_group: there is a default group already. Call "
            "destroy_process_group() before another."
        )
    host, port = _where(init_method)
    _default = make_group(
        rank=None if rank == -1 else rank,
        world_size=None if world_size == -1 else world_size,
        master_addr=host,
        master_port=port,
        timeout=timeout.total_seconds() if isinstance(timeout, timedelta) else timeout,
        transport=_transport(backend),
    )


def _transport(backend: str | None) -> str | None:
    """The transport that this name means; None leaves it to MINDDP_TRANSPORT."""
    if backend == "nccl" and "MINDDP_TRANSPORT" not in os.environ and nccl.usable():
        return "nccl"
    return "mpi" if backend == "mpi" else None


def _where(init_method: str | None) -> tuple[str | None, int | None]:
    """The address in tcp://host:port; nothing if the environment says it."""
    if init_method in (None, "env://"):
        return None, None
    scheme, _, rest = str(init_method).partition("://")
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not port.isdecimal():
        raise UsageError(
            f"init_method={init_method!r}: it can be 'env://' or 'tcp://host:port'"
        )
    return host, int(port)


def default_group() -> ProcessGroup:
    """The default group; without one, the only group that is open.

    Raises: UsageError if there is none.
    """
    if _default is None or _default.closed:
        if len(open_groups) == 1:
            return open_groups[0]
        raise UsageError(
            "there is no default process group. Call minddp.distributed."
            "init_process_group() first, or pass a process group."
        )
    return _default


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    """Whether there is a default group that has not been closed."""
    return _default is not None and not _default.closed


def destroy_process_group(group: Group = None) -> None:
    """Leave in good order; without a group, the default one and its sub-groups."""
    global _default
    if group is None and _default is not None and _default.closed:
        _default = None
        return
    member = _member(group)
    if member is _default:
        while _sub_groups:
            _sub_groups.pop().close()
        _default = None
    if member:
        member.close()


def get_backend(group: Group = None) -> str:
    """What carries the group's collectives, as "tcp" or "mpi"; "" if this rank is not
    in it."""
    member = _member(group)
    return member.transport if member else ""


def get_rank(group: Group = None) -> int:
    """This rank's number in the group, -1 if it is not in it."""
    member = _member(group)
    return member.rank if member else -1


def get_world_size(group: Group = None) -> int:
    """The number of ranks in the group, -1 if this one is not in it."""
    member = _member(group)
    return member.world_size if member else -1


def new_group(ranks: Sequence[int] | None = None, backend: Any = None) -> Group:
    """A group of these ranks of the world; every rank of the world must call it.

    Raises: UsageError; PeerError.
    """
    world = default_group()
    members = sorted(set(range(world.world_size) if ranks is None else ranks))
    if world.broadcast_object(members) != members:
        text = f"new_group({members}) on rank {world.rank}: rank 0 names other ranks"
        world.abort(error := UsageError(f"{text}. All must call it alike."))
        raise error
    if not members or not set(members) <= set(range(world.world_size)):
        raise UsageError(
            f"new_group({ranks}): name some of the ranks 0 to {world.world_size - 1}"
        )
    group = world.split(0 if world.rank in members else None)
    if group is None:
        return GroupMember.NON_GROUP_MEMBER
    _sub_groups.append(group)
    return group


# ---- Collectives ----


def all_reduce(
    tensor: Any, op: str = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Work | None:
    """`tensor` becomes the reduction over the group."""
    if not (member := _member(group)):
        return None
    return _told(member.all_reduce(_array(tensor), op, async_op), async_op)


def broadcast(
    tensor: Any, src: int, group: Group = None, async_op: bool = False
) -> Work | None:
    """`tensor` becomes that of rank src of the world, which must be in the group."""
    if not (member := _member(group)):
        return None
    if src not in member.ranks:
        raise UsageError(f"broadcast: rank {src} is not in this group {member.ranks}")
    root = member.ranks.index(src)
    return _told(member.broadcast(_array(tensor), root, async_op), async_op)


def all_gather(tensor_list: Sequence[Any], tensor: Any, group: Group = None) -> None:
    """tensor_list[r] becomes the tensor of the group's rank r; all of one shape."""
    if not (member := _member(group)):
        return
    mine = _array(tensor)
    rows = _rows("all_gather", tensor_list, mine, member)
    for x, row in zip(rows, member.all_gather_rows(mine), strict=True):
        x[...] = row


def reduce(tensor: Any, dst: int, op: str = ReduceOp.SUM, group: Group = None) -> None:
    """`tensor` becomes the reduction over the group on rank dst; others' stays."""
    if member := _member(group):
        member.reduce(_array(tensor), _place(member, dst), op)


def gather(
    tensor: Any,
    gather_list: Sequence[Any] | None = None,
    dst: int = 0,
    group: Group = None,
) -> None:
    """On rank dst, gather_list[r] becomes the tensor of the group's rank r."""
    if not (member := _member(group)):
        return
    mine, root = _array(tensor), _place(member, dst)
    rows: list[Any] = []
    if member.rank == root:
        rows = _rows("gather", gather_list or (), mine, member)
    table = zeros_beside(mine, (member.world_size, *mine.shape), mine.dtype)
    table[member.rank] = mine
    member.gather(table, root)
    for x, row in zip(rows, table, strict=False):
        x[...] = row


def scatter(
    tensor: Any,
    scatter_list: Sequence[Any] | None = None,
    src: int = 0,
    group: Group = None,
) -> None:
    """`tensor` becomes scatter_list[r] of rank src, on the group's rank r."""
    if not (member := _member(group)):
        return
    mine, root = _array(tensor), _place(member, src)
    table = zeros_beside(mine, (member.world_size, *mine.shape), mine.dtype)
    if member.rank == root:
        rows = _rows("scatter", scatter_list or (), mine, member)
        table[...] = np.stack(rows)
    member.scatter(table, root)
    mine[...] = table[member.rank]


def barrier(group: Group = None, async_op: bool = False) -> Work | None:
    """Returns when all ranks of the group have entered."""
    member = _member(group)
    return _told(member.barrier(async_op), async_op) if member else None


# ---- Messages ----


def send(tensor: Any, dst: int, group: Group = None, tag: int = 0) -> None:
    """Send to rank dst of the world; returns when the bytes have left."""
    if member := _member(group):
        member.send(_array(tensor), _place(member, dst), tag)


def recv(tensor: Any, src: int | None = None, group: Group = None, tag: int = 0) -> int:
    """Fill `tensor` with the next message of rank src of the world; returns src."""
    work = irecv(tensor, src, group, tag)
    if work is None or src is None:
        return -1
    work.wait()
    return src


def isend(tensor: Any, dst: int, group: Group = None, tag: int = 0) -> Work | None:
    """As send, without waiting."""
    if not (member := _member(group)):
        return None
    return member.isend(_array(tensor), _place(member, dst), tag)


def irecv(
    tensor: Any, src: int | None = None, group: Group = None, tag: int = 0
) -> Work | None:
    """As recv, without waiting."""
    if not (member := _member(group)):
        return None
    if src is None:
        raise UsageError("recv: say from which rank, src=")
    return member.irecv(_array(tensor), _place(member, src), tag)


# ---- What is meant ----


def _rows(
    verb: str, tensors: Sequence[Any], mine: Any, member: ProcessGroup
) -> list[Any]:
    """The arrays of a list that has one for each rank, all like this rank's."""
    rows = [_array(t) for t in tensors]
    if [x.shape for x in rows] != [mine.shape] * member.world_size:
        raise UsageError(
            f"{verb}: the list must hold {member.world_size} tensors of shape "
            f"{mine.shape}, not {[x.shape for x in rows]}"
        )
    return rows


def _member(group: Group) -> ProcessGroup | None:
    """The group that is meant; None if this rank is not in it."""
    if group is GroupMember.NON_GROUP_MEMBER:
        return None
    if isinstance(group, ProcessGroup):
        return group
    if group is not None:
        raise UsageError(f"{group!r} is no process group; new_group makes one")
    return default_group()


def _array(tensor: Any) -> Any:
    """The array of a Tensor; arrays as they are, and group.py refuses all else."""
    return tensor if is_array(tensor) else getattr(tensor, "data", tensor)


def _place(member: ProcessGroup, rank: int) -> int:
    """What number a rank of the world has in the group."""
    if rank not in member.ranks:
        raise UsageError(f"rank {rank} is not in this group {member.ranks}")
    return member.ranks.index(rank)


def _told(work: Work, async_op: bool) -> Work | None:
    """A Work if it was asked for, as in PyTorch."""
    return work if async_op else None
