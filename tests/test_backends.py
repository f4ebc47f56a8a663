"""One suite for all back ends: whatever carries the collectives, the same holds.

A check is a function of one rank's group. Back ends whose ranks can be threads run it
in this process. For MPI one mpiexec starts four processes, which run all checks in
sub-groups, as `python test_backends.py`, and print what became of each.
"""

import importlib.util
import json
import os
import shutil
import sys
import time
import traceback
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from bodies import add_strided_arrays_without_waiting
from ranks import Process, attempt, concurrently, environment, join, program, run

import minddp
from minddp import functional as F
from minddp import nn, optim
from minddp.backends import mpi
from minddp.bfloat16 import BFLOAT16, add_bfloat16, from_bfloat16, to_bfloat16
from minddp.data import DataLoader, DistributedSampler, load_digits
from minddp.ddp import DistributedDataParallel as DDP
from minddp.device import manual_seed
from minddp.errors import PeerLost, PeerMismatch, PeerTimeout, UsageError
from minddp.frame import DTYPES
from minddp.ring import chunk
from minddp.testing import run_groups

OPS = ("sum", "avg", "min", "max", "prod")
COMBINE = {
    "sum": np.add,
    "avg": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}
IN_THE_ORDER_OF_THE_RING = ("tcp", "shm", "mpi")  # its bits, too, for floats
CHECKS = {}


def check(*sizes):
    """Of groups with these numbers of ranks."""

    def add(body):
        CHECKS[body.__name__] = body, sizes
        return body

    return add


# ---- What the result has to be, from what all ranks give ----


def numbers(rank, length, dtype="float64"):
    """What this rank gives: its sum depends on the order, where dtype is a float's."""
    random = np.random.default_rng(rank)
    x = random.standard_normal(length) * 10.0 ** random.integers(-3, 3, length)
    x[:2] = np.nan if rank == 1 and dtype.startswith("float") else 1
    if dtype == "bfloat16":
        return to_bfloat16(x.astype("f4"))
    if dtype == "bool":
        return x > 0
    if not dtype.startswith("float"):
        x = (9 * x).astype("i8")
    return x.astype(dtype)


def reduced(given, op, dtype, order):
    """The arrays of all ranks combined in this order."""
    add = COMBINE[op]
    if dtype == "bfloat16":
        add = partial(add_bfloat16, out=np.empty_like(given[0]))
    total = given[order[0]].copy()
    for k in order[1:]:
        total = add(total, given[k]).copy()
    return total / np.asarray(len(given), total.dtype) if op == "avg" else total


def all_reduced(n, length, op, dtype):
    """Chunk k in the order k+1, k+2, ..., k."""
    given = [numbers(k, length, dtype) for k in range(n)]
    chunks = [chunk(length, n, k) for k in range(n)]
    orders = [[(k + i) % n for i in range(1, n + 1)] for k in range(n)]
    parts = [
        reduced([x[part] for x in given], op, dtype, order)
        for part, order in zip(chunks, orders, strict=True)
    ]
    return np.concatenate(parts).astype(given[0].dtype)


def same(pg, x, y, exactly=False):
    """Bit for bit, but for floats that a back end adds in an order of its own."""
    exactly |= x.dtype.kind not in "fV" or pg.transport in IN_THE_ORDER_OF_THE_RING
    assert x.dtype == y.dtype
    if exactly:
        assert x.tobytes() == y.tobytes(), (x, y)
        return
    few = 1e-2 if x.itemsize == 2 else 1e-5
    x, y = (from_bfloat16(z) if z.dtype == BFLOAT16 else z for z in (x, y))
    np.testing.assert_allclose(x, y, rtol=few, atol=few * 100)


def same_on_all(pg, x):
    if x.size:
        rows = pg.all_gather_rows(np.frombuffer(x.tobytes(), np.uint8))
        assert (rows == rows[0]).all(), "not the same bits on all ranks"


def table_of(dtype):
    return [op for op in OPS if reducible(op, dtype)]


def reducible(op, dtype):
    """The table of payload.py."""
    if dtype == "bool":
        return op in ("min", "max")
    if dtype == "bfloat16":
        return op == "sum"
    return op != "avg" or dtype.startswith("float")


# ---- Results ----


@check(1, 2, 3, 4)
def every_collective_gives_the_right_array(pg):
    n, r = pg.world_size, pg.rank
    for length in sorted({0, 1, n - 1, n, n + 1, 7 * n + 3, 1000, 30_011}):
        chunks = [chunk(length, n, k) for k in range(n)]
        given = [numbers(k, length) for k in range(n)]
        x = given[r].copy()
        pg.all_reduce(x)
        same(pg, x, all_reduced(n, length, "sum", "float64"))
        same_on_all(pg, x)

        x = given[r].copy()
        mine = pg.reduce_scatter(x)
        same(pg, mine, all_reduced(n, length, "sum", "float64")[chunks[r]])

        x = given[r].copy()
        pg.all_gather(x)
        gathered = np.concatenate([given[k][chunks[k]] for k in range(n)])
        same(pg, x, gathered, exactly=True)

        for root in range(n):
            x = given[r].copy()
            pg.broadcast(x, root)
            same(pg, x, given[root], exactly=True)

            x = given[r].copy()
            pg.reduce(x, root)
            order = [(root + i) % n for i in range(1, n + 1)]
            total = reduced(given, "sum", "float64", order)
            same(pg, x, total if r == root else given[r])

            x = given[r].copy()
            pg.gather(x, root)
            same(pg, x, gathered if r == root else given[r], exactly=True)

            x, wanted = given[r].copy(), given[r].copy()
            pg.scatter(x, root)
            wanted[chunks[r]] = given[root][chunks[r]]
            same(pg, x, wanted, exactly=True)

        if length % n == 0:
            x = given[r].copy()
            pg.all_to_all(x)
            wanted = np.concatenate([given[k][chunks[r]] for k in range(n)])
            same(pg, x, wanted, exactly=True)


@check(2, 3)
def every_dtype_and_reduction_gives_the_right_array(pg):
    n, r = pg.world_size, pg.rank
    for dtype in DTYPES[1:]:
        for length in (5, 2503):
            for op in table_of(dtype):
                x = numbers(r, length, dtype)
                with np.errstate(over="ignore", invalid="ignore"):
                    pg.all_reduce(x, op)
                    wanted = all_reduced(n, length, op, dtype)
                same(pg, x, wanted, exactly=op in ("min", "max"))
                same_on_all(pg, x)
            x = numbers(r, length, dtype)
            pg.broadcast(x, n - 1)
            same(pg, x, numbers(n - 1, length, dtype), exactly=True)


@check(3)
def arrays_of_any_strides_in_calls_that_are_not_waited_for(pg):
    add_strided_arrays_without_waiting(pg)


@check(4)
def sub_groups_in_any_order_of_ranks(pg):
    pair = pg.split(pg.rank // 2, key=-pg.rank)
    assert pair.transport in pg.transport
    assert pair.ranks == ([1, 0] if pg.rank < 2 else [3, 2])
    rows = pair.all_gather_rows([pg.rank])
    assert rows[:, 0].tolist() == pair.ranks
    x = np.full(5000, float(pg.rank))
    pair.all_reduce(x)
    pg.all_reduce(x)
    assert (x == 2 * (0 + 1 + 2 + 3)).all()
    pair.close()
    for _ in range(3):
        again = pg.split(0)
        assert again.all_gather_rows([pg.rank])[:, 0].tolist() == [0, 1, 2, 3]
        again.close()


@check(2, 3)
def objects_and_barriers(pg):
    settings = {"lr": [0.1, "x"]}
    assert pg.broadcast_object(settings if pg.rank == 1 else None, 1) == settings
    if pg.rank == 1:
        time.sleep(0.05)
    entered = time.monotonic()
    pg.barrier()
    left = time.monotonic()
    assert pg.all_gather_rows([entered]).max() <= left, "left before all had entered"


@check(2, 4)
def a_model_trained_by_ddp_is_the_same_on_all_ranks(pg):
    manual_seed(pg.rank)
    model = DDP(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)), pg)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = load_digits("train")
    sampler = DistributedSampler(data, pg.world_size, pg.rank)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size=32, sampler=sampler):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
    assert loss.item() < 1.0
    for p in model.parameters():
        same_on_all(pg, p.data)


# ---- Failures; each has a group of its own ----


def raises(kind, call):
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__} was raised")


@check(2, 3)
def a_mismatch_is_named_on_all_ranks_and_changes_nothing(pg):
    n = pg.world_size
    other_calls = [
        (100, lambda g, x: g.broadcast(x)),
        (40_000, lambda g, x: g.all_reduce(x[:-1])),
        (100, lambda g, x: g.all_reduce(x.view("i8"))),
        (40_000, lambda g, x: g.all_reduce(x, "max")),
    ]
    for length, call in other_calls:
        group, x = pg.split(0), numbers(pg.rank, length)
        before = x.tobytes()
        mine = call if pg.rank == n - 1 else lambda g, x: g.all_reduce(x)
        error = raises(PeerMismatch, partial(mine, group, x))
        assert error.culprit is not None and "all_reduce #1" in str(error)
        if pg.transport != "tcp" or n == 2:  # a ring compares neighbours only
            assert x.tobytes() == before, "the array was changed"
        raises(PeerMismatch, group.barrier)
        group.close()


@check(3)
def a_rank_that_raises_is_named_by_the_others(pg):
    for length in (1, 100_000):
        group = pg.split(0)
        group.barrier()
        if pg.rank == 1:
            group.abort(ValueError("no luck"))
            continue
        error = raises(PeerLost, partial(reduce_until_it_raises, group, length))
        assert error.culprit == 1 and "no luck" in str(error)
        group.close()


def reduce_until_it_raises(group, length):
    while True:
        group.all_reduce(np.ones(length))


@check(3)
def a_rank_that_leaves_early_is_named_by_the_others(pg):
    group = pg.split(0)
    group.barrier()
    if pg.rank == 2:
        group.close()
        return
    error = raises(PeerLost, lambda: group.all_reduce(np.ones(9)))
    assert error.culprit == 2 and "closed its group after 1" in str(error)
    group.close()


@check(3)
def a_rank_that_does_not_come_is_named_at_the_deadline(pg):
    pg.timeout = 1.0  # that of the new group
    group = pg.split(0)
    group.barrier()
    if pg.rank == 1:
        time.sleep(1.8)
        raises(PeerTimeout, lambda: group.all_reduce(np.ones(9)))
    else:
        start, cpu = time.monotonic(), time.thread_time()
        error = raises(PeerTimeout, lambda: group.all_reduce(np.ones(9)))
        waited, cpu = time.monotonic() - start, time.thread_time() - cpu
        assert error.culprit == 1 and "has not entered collective #2" in str(error)
        assert 0.9 < waited < 1.0 + 3
        assert cpu < 0.05 * waited + 0.02, "it did not sleep"
    group.close()


# ---- Back ends whose ranks are threads of this process ----


THREADS = {
    "tcp": partial(run_groups, transport="tcp"),
    "shm": partial(run_groups, transport="shm"),
    "shm+tcp": partial(run_groups, transport="shm", hosts="AABB"),
}


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("backend", THREADS)
def test_ranks_that_are_threads(backend, name):
    body, sizes = CHECKS[name]
    for n in sizes:
        THREADS[backend](n, body)


# ---- MPI: processes that one mpiexec has started ----


BESIDE_PYTHON = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
MPIEXEC = shutil.which("mpiexec", path=BESIDE_PYTHON)
needs_mpi = pytest.mark.skipif(
    MPIEXEC is None or importlib.util.find_spec("mpi4py") is None,
    reason="it needs mpi4py and mpiexec: pip install mpi4py mpich",
)


def mpiexec(n, *argv, patience=60.0):
    """How `mpiexec -n N python ARGV` ended."""
    # Open MPI asks root, and who has fewer cores than ranks, whether they mean it.
    asked = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    argv = [MPIEXEC, "-n", str(n), sys.executable, *argv]
    process = Process(argv, environment(asked))
    try:
        return process.result(0, time.monotonic() + patience)
    finally:
        process.close()


def run_all_checks(folder):
    """In a rank: what became of each check, into a file of this rank's."""
    mpi.PART_BYTES, mpi.SMALL_BYTES = 4096, 256  # so that arrays have many pieces
    outcomes = {}
    with minddp.init_process_group(transport="mpi", timeout=6.0) as world:
        for name, (body, sizes) in CHECKS.items():
            for n in sizes:
                group = world.split(0 if world.rank < n else None)
                if group is None:
                    continue
                try:
                    body(group)
                    group.close()
                except Exception as error:
                    group.abort(error)
                    outcomes[f"{name} {n}"] = traceback.format_exc()
                else:
                    outcomes[f"{name} {n}"] = ""
        Path(folder, str(world.rank)).write_text(json.dumps(outcomes))


@pytest.fixture(scope="module")
def all_checks(tmp_path_factory):
    """{check and n: what it raised on each rank}, and how mpiexec ended."""
    folder = tmp_path_factory.mktemp("ranks")
    result = mpiexec(4, __file__, str(folder))
    outcomes = {}
    for file in folder.iterdir():
        for name, error in json.loads(file.read_text()).items():
            outcomes.setdefault(name, []).append(error)
    return outcomes, result


@needs_mpi
@pytest.mark.processes
@pytest.mark.parametrize("name", CHECKS)
def test_ranks_of_mpiexec(name, all_checks):
    outcomes, result = all_checks
    for n in CHECKS[name][1]:
        assert outcomes.get(f"{name} {n}") == [""] * n, result


@needs_mpi
@pytest.mark.processes
def test_ranks_whose_groups_have_failed_come_to_a_good_end(all_checks):
    _, result = all_checks
    assert (result.code, result.out, result.err) == (0, "", "")


# ---- How programs end ----


def ends_in_order_without_closing():
    import minddp.distributed as dist

    dist.init_process_group(backend="mpi")
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    x = np.ones(5) * dist.get_rank()
    dist.all_reduce(x)
    assert (x == 3).all() and dist.get_backend() == "mpi"
    if dist.get_rank() == 0:
        time.sleep(0.3)


def raises_at_rank_1():
    from mpi4py import MPI

    assert MPI.COMM_WORLD.Get_size() == 3, "MPI is the user's already"
    pg = join(transport="mpi", timeout=10.0)
    pg.barrier()
    if pg.rank == 1:
        raise ValueError("no luck")
    pg.all_reduce(np.ones(100_000))


def stops_at_rank_1():
    import signal

    minddp.backends.mpi.GRACE_SECONDS = 0.5
    pg = join(transport="mpi", timeout=2.0)
    pg.barrier()
    if pg.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    pg.all_reduce(np.ones(3))


def is_torn_at_rank_1():
    mpi = minddp.backends.mpi
    mpi.GRACE_SECONDS = 0.5
    pg = join(transport="mpi", timeout=10.0)

    def torn(*_):
        raise KeyboardInterrupt

    if pg.rank == 1:
        mpi.combine = torn
    pg.all_reduce(np.ones(100_000))


def is_killed_at_rank_1():
    import signal

    pg = join(transport="mpi")
    pg.barrier()
    if pg.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    pg.all_reduce(np.ones(3))


def closes_in_a_signal_handler():
    import signal

    pg = join(transport="mpi", timeout=10.0)
    pg.barrier()
    if pg.rank == 1:
        signal.signal(signal.SIGALRM, lambda *_: pg.close())
        signal.setitimer(signal.ITIMER_REAL, 0.5)
    if pg.rank == 0:
        time.sleep(1.0)
    try:
        pg.all_reduce(np.ones(3))
    except minddp.MindDPError as error:
        os.write(2, f"{error}\n".encode())  # at once, as mpiexec mixes what ranks say


@needs_mpi
@pytest.mark.processes
def test_every_program_ends_and_says_why():
    # All at once, so these are also jobs side by side on one machine.
    programs = [
        ends_in_order_without_closing,
        raises_at_rank_1,
        stops_at_rank_1,
        is_torn_at_rank_1,
        is_killed_at_rank_1,
        closes_in_a_signal_handler,
    ]
    ended = concurrently(lambda p: mpiexec(3, "-c", program(p)), programs)
    in_order, raised, stopped, torn, killed, closed = ended

    assert (in_order.code, in_order.err) == (0, "")
    assert raised.code == 1 and "MPI_Abort" not in raised.err
    assert raised.err.count("\nValueError: no luck") == 1
    assert raised.err.count("PeerLost") == 2
    assert stopped.code != 0 and "MPI_Abort ends them" in stopped.err
    assert stopped.err.count("rank 1 is not responding") == 2
    assert torn.code != 0 and "MPI_Abort ends them" in torn.err
    assert torn.err.count("KeyboardInterrupt()") >= 2
    assert killed.code != 0
    assert closed.code == 0 and len(closed.err.splitlines()) == 3
    assert closed.err.count("InterruptedError") == 2
    assert closed.err.count("rank 1 was aborted while it was in all_reduce #2") == 1


@needs_mpi
@pytest.mark.processes
def test_processes_that_mpiexec_has_not_started_are_told_so():
    def meet_over_mpi():
        attempt(lambda: join(transport="mpi"))

    for result in run(2, meet_over_mpi):
        assert result.raised["kind"] == "UsageError"
        assert "one mpiexec has to start all 2 ranks" in result.raised["text"]
        assert (result.code, result.err) == (0, "")


def test_mpi_that_one_rank_does_not_have_is_refused_on_all(monkeypatch):
    found = iter([object(), None, object()])
    monkeypatch.setattr(mpi.importlib.util, "find_spec", lambda _: next(found))
    with pytest.raises(UsageError, match="has no mpi4py") as caught:
        run_groups(3, lambda pg: None, transport="mpi")
    assert [type(e) for e in caught.value.of_ranks] == [UsageError] * 3


def test_a_machine_that_only_it_can_reach_by_its_name_is_told():
    with pytest.raises(UsageError, match="other machines cannot reach it"):
        mpi.open_door({"here", "there"}, "localhost")


if __name__ == "__main__":
    run_all_checks(sys.argv[1])
