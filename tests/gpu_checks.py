"""Checks for arrays on GPUs: CuPy's (test_gpu.py) or its double's (test_nccl.py)."""

import numpy as np

from minddp import functional as F
from minddp import nn, optim
from minddp.autograd import Tensor
from minddp.bfloat16 import to_bfloat16
from minddp.ddp import DistributedDataParallel as DDP
from minddp.device import manual_seed
from minddp.errors import UsageError
from minddp.frame import DTYPES
from minddp.ring import chunk

ROOTED = ("broadcast", "reduce", "gather", "scatter")
OPS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", *ROOTED)


# ---- What device arrays refuse and give ----

PROBES = {  # of a device array x: the type of what it gives or raises
    "np.asarray": (lambda x, xp: np.asarray(x), TypeError),
    "its memory": (lambda x, xp: memoryview(x), TypeError),
    "a host array added": (lambda x, xp: x + np.ones(3), TypeError),
    "a host array assigned": (lambda x, xp: x.__setitem__(..., np.ones(3)), ValueError),
    "writeable": (lambda x, xp: x.flags.writeable, AttributeError),
    "an unknown name": (lambda x, xp: xp.no_such_name, AttributeError),
    "np.exp": (lambda x, xp: np.exp(x), "device"),
    "np.zeros_like": (lambda x, xp: np.zeros_like(x), "device"),
    "np.stack": (lambda x, xp: np.stack([x, x]), "device"),
    "an element": (lambda x, xp: x[0], "device"),
    "a sum": (lambda x, xp: x.sum(), "device"),
    "asarray": (lambda x, xp: xp.asarray([1.0]), "device"),
    "get": (lambda x, xp: x.get(), np.ndarray),
    "tobytes": (lambda x, xp: x.tobytes(), bytes),
    "truth": (lambda x, xp: bool(x[0]), bool),
}


def probe(what, xp):
    """The type that PROBES has."""
    ask, x = PROBES[what][0], xp.asarray(np.ones(3))
    try:
        result = ask(x, xp)
    except (TypeError, ValueError, AttributeError) as exc:
        return type(exc)
    return "device" if isinstance(result, xp.ndarray) else type(result)


# ---- Collectives ----


def revealing(rank, length, dtype="float32"):
    """Small whole numbers, whose sums are exact in any order."""
    x = (np.arange(length) + rank) % 3 + (rank == 1)
    return to_bfloat16(x) if dtype == "bfloat16" else x.astype(dtype)


def promised(pg, op, x, **arguments):
    """What the call gives and what it leaves alone, as bytes; `x` is on either side."""
    root, before = arguments.get("root"), x.tobytes()
    result = getattr(pg, op)(x, **arguments)
    if op == "reduce_scatter":
        return result.tobytes()
    if op in ("reduce", "gather") and pg.rank != root:
        assert x.tobytes() == before, f"{op} wrote to a rank that is not the root"
    if op == "scatter" and pg.rank != root:
        part = chunk(x.size, pg.world_size, pg.rank)
        return x[part].tobytes()
    return x.tobytes()


def everything(pg, where, lengths, skip=""):
    """The outcome of every collective, dtype and reduction, over arrays that `where`
    has made; rank n-1 is the root."""
    outcomes = {}
    for op in OPS:
        root = {"root": pg.world_size - 1} if op in ROOTED else {}
        for length in lengths:
            if op != "all_to_all" or length % pg.world_size == 0:
                x = where(revealing(pg.rank, length, "int16" if not root else "int64"))
                if op in ("all_reduce", "reduce_scatter"):
                    x = x.astype("float64")
                outcomes[op, length] = promised(pg, op, x, **root)
    for dtype in set(DTYPES[1:]) - {"int16", skip}:
        for reduce in ("sum", "avg", "min", "max", "prod"):
            x = where(revealing(pg.rank, 7, dtype))
            try:
                pg.all_reduce(x, reduce)
            except UsageError:
                outcomes[dtype, reduce] = "refused"
            else:
                outcomes[dtype, reduce] = x.tobytes()
    return outcomes


# ---- Training ----


def train(pg, device, hook):
    """Parameters and losses after some steps; every rank has a part of each batch."""
    manual_seed(pg.rank)  # replicas start as rank 0's
    model = nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 3)).to(device)
    ddp = DDP(model, pg, bucket_cap_mb=0.001, check_sync_every=2, nan="raise")
    ddp.register_comm_hook(pg, hook)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    random = np.random.default_rng(pg.rank)
    losses = []
    for _ in range(5):
        x = Tensor(random.standard_normal((4, 6)).astype("f4")).to(device)
        y = Tensor(random.integers(0, 3, 4)).to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(ddp(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(type(p.grad.data) is type(p.data) for p in model.parameters())
    return losses, [p.detach().numpy() for p in model.parameters()]
