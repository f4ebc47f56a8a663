"""The face of torch.distributed: functions over a default group, sub-groups, spawn."""

import copy
import os
import time
from datetime import timedelta

import numpy as np
import pytest
from ranks import attempt, run, tell

import minddp
import minddp.distributed as dist
from minddp.distributed import GroupMember
from minddp.errors import MindDPError, PeerLost, UsageError
from minddp.multiprocessing import (
    ProcessExitedException,
    ProcessRaisedException,
    spawn,
)
from minddp.net import listen
from minddp.testing import run_groups

# ---- split, with ranks as threads ----


def test_split_makes_groups_by_color_ordered_by_key_and_rank():
    def body(pg):
        group = pg.split(pg.rank % 2, key=-pg.rank)
        x = np.array([10.0**pg.rank])
        group.all_reduce(x)
        found = group.rank, group.world_size, group.ranks, x.item()
        group.close()
        return found

    even, odd = [4, 2, 0], [3, 1]
    assert run_groups(5, body) == [
        (2, 3, even, 10101.0),
        (1, 2, odd, 1010.0),
        (1, 3, even, 10101.0),
        (0, 2, odd, 1010.0),
        (0, 3, even, 10101.0),
    ]


def test_a_rank_without_a_color_gets_no_group_and_a_group_can_be_split_again():
    def body(pg):
        half = pg.split(0 if pg.rank < 4 else None)
        if half is None:
            return None
        quarter = half.split(half.rank // 2)
        x = np.array([2.0**pg.rank])
        quarter.all_reduce(x)
        alone = quarter.split(quarter.rank)
        alone.all_reduce(x)  # a world of one
        for group in (alone, quarter, half):
            group.close()
        return quarter.ranks, alone.ranks, x.item()

    assert run_groups(5, body) == [
        ([0, 1], [0], 3.0),
        ([0, 1], [1], 3.0),
        ([2, 3], [2], 12.0),
        ([2, 3], [3], 12.0),
        None,
    ]


def test_a_world_of_one_can_be_split_as_well():
    def body(pg):
        alone = pg.split(3)
        nobody = pg.split(None)
        x = np.ones(2)
        alone.all_reduce(x)
        alone.close()
        return nobody, alone.ranks, x.tolist()

    assert run_groups(1, body) == [(None, [0], [1.0, 1.0])]


def test_a_key_that_is_no_number_is_refused():
    def body(pg):
        for key in ("a", 1.7, 2**70):
            with pytest.raises(UsageError, match="split: key"):
                pg.split(0, key=key)

    run_groups(1, body)


def test_a_model_that_holds_a_group_can_be_copied():
    def body(pg):
        return copy.deepcopy({"group": pg})["group"] is pg

    assert run_groups(2, body) == [True, True]


def test_messages_and_collectives_of_two_groups_do_not_mix():
    def body(pg):
        group = pg.split(0)
        right, left = (pg.rank + 1) % 3, (pg.rank - 1) % 3
        x, y = np.array([0.0]), np.array([0.0])
        works = [
            pg.isend(np.array([pg.rank + 0.0]), right),
            group.isend(np.array([pg.rank + 10.0]), right),
            group.irecv(y, left),
            pg.irecv(x, left),
        ]
        total = np.ones(1)
        group.all_reduce(total)
        for work in works:
            work.wait()
        group.close()
        return x.item() == left, y.item() == left + 10, total.item()

    assert run_groups(3, body) == [(True, True, 3.0)] * 3


def test_a_failure_in_a_sub_group_tells_who_its_ranks_are_and_spares_the_others():
    def body(pg):
        group = pg.split(pg.rank // 2)
        if pg.rank == 3:
            group.abort(ValueError("only here"))
        elif pg.rank == 2:
            with pytest.raises(
                PeerLost, match=r"rank 1 ended.*only here.*are \[2, 3\]"
            ):
                group.barrier()
        else:
            group.barrier()
        group.close()
        pg.barrier()
        return True

    assert run_groups(4, body) == [True] * 4


# ---- The module, with one process a rank ----


def test_functions_use_the_default_group_and_take_tensors_and_arrays():
    def body():
        import minddp as torch
        import minddp.distributed as dist

        assert not dist.is_initialized()
        dist.init_process_group("gloo", timeout=5.0)
        r, n = dist.get_rank(), dist.get_world_size()
        t, x = torch.ones(2) * (r + 1), np.full(2, r + 1.0)
        assert dist.all_reduce(t, op=dist.ReduceOp.SUM) is None
        dist.all_reduce(x, op=dist.ReduceOp.MAX)
        b = torch.tensor([r])
        work = dist.broadcast(b, src=1, async_op=True)
        work.wait()
        rows = [torch.zeros(1, dtype="int64") for _ in range(n)]
        dist.all_gather(rows, torch.tensor([r * r]))
        dist.barrier()
        total = torch.ones(1) * (r + 1)
        dist.reduce(total, dst=1)
        into = [torch.zeros(2) for _ in range(n)] if r == 2 else None
        dist.gather(torch.ones(2) * r, into, dst=2)
        mine = torch.zeros(1)
        parts = [torch.ones(1) * 10 * k for k in range(n)] if r == 0 else None
        dist.scatter(mine, parts, src=0)
        got = torch.zeros(1)
        if r == 0:
            dist.send(torch.tensor([7.0]), dst=2, tag=3)
        elif r == 2:
            assert dist.recv(got, src=0, tag=3) == 0
        dist.destroy_process_group()
        assert not dist.is_initialized()
        tell(
            "done",
            sum=t.tolist(),
            max=x.tolist(),
            root=b.tolist(),
            rows=[row.item() for row in rows],
            got=got.item(),
            total=total.item(),
            into=into and [t.tolist() for t in into],
            mine=mine.item(),
        )

    for rank, result in enumerate(run(3, body)):
        done = result.facts["done"]
        assert done["sum"] == [6.0, 6.0]
        assert done["max"] == [3.0, 3.0]
        assert done["root"] == [1]
        assert done["rows"] == [0, 1, 4]
        assert done["got"] == (7.0 if rank == 2 else 0.0)
        assert done["total"] == (6.0 if rank == 1 else rank + 1)
        assert done["into"] == ([[k, k] for k in range(3)] if rank == 2 else None)
        assert done["mine"] == 10.0 * rank


def test_a_sub_group_by_ranks_of_the_world():
    def body():
        import minddp as torch
        import minddp.distributed as dist

        dist.init_process_group(timeout=5.0)
        pair = dist.new_group([2, 0])
        t = torch.ones(1) * (dist.get_rank() + 1)
        dist.all_reduce(t, group=pair)
        dist.broadcast(t, src=2, group=pair)
        if dist.get_rank() == 0:
            dist.send(t, 2, group=pair)
        elif dist.get_rank() == 2:
            dist.recv(t, 0, group=pair)
        dist.barrier(group=pair)
        place = dist.get_rank(pair), dist.get_world_size(pair)
        dist.destroy_process_group()
        tell("done", t=t.item(), place=place)

    seen = [(r.facts["done"]["t"], r.facts["done"]["place"]) for r in run(3, body)]
    assert seen == [(4.0, [0, 2]), (2.0, [-1, -1]), (4.0, [1, 2])]


def test_ranks_that_name_different_groups_are_told():
    def body():
        import minddp.distributed as dist

        dist.init_process_group(timeout=5.0)
        ranks = [0, 1] if dist.get_rank() == 0 else [1, 2]
        attempt(lambda: dist.new_group(ranks))

    for rank, result in enumerate(run(3, body)):
        assert "rank 0 names other ranks" in result.raised["text"] or rank == 0


def test_leaving_twice_is_fine_if_the_group_was_closed_in_between(world_of_one):
    dist.default_group().close()
    dist.destroy_process_group()


def test_ddp_takes_the_default_group_and_a_script_may_forget_to_leave():
    def body():
        import minddp as torch
        import minddp.distributed as dist
        from minddp import nn

        dist.init_process_group("nccl", timeout=5.0)
        m = nn.Linear(1, 1, bias=False)
        ddp = torch.DistributedDataParallel(m, device_ids=[dist.get_rank()])
        ddp(torch.ones(1, 1) * (dist.get_rank() + 1)).sum().backward()
        tell("done", grad=m.weight.grad.item())

    results = run(2, body)
    assert [r.facts["done"]["grad"] for r in results] == [1.5, 1.5]
    assert [r.code for r in results] == [0, 0]
    assert [r.err for r in results] == ["", ""]


def test_without_a_default_group_the_only_one_that_is_open_will_do():
    with minddp.init_process_group(rank=0, world_size=1) as pg:
        assert dist.default_group() is pg
        ddp = minddp.DistributedDataParallel(minddp.nn.Linear(1, 1))
        assert ddp.process_group is pg
        second = minddp.init_process_group(rank=0, world_size=1)
        with second, pytest.raises(UsageError, match="no default process group"):
            dist.default_group()


def test_without_a_default_group_every_function_says_what_to_call():
    for call in (
        dist.get_rank,
        dist.get_world_size,
        dist.barrier,
        lambda: dist.all_reduce(np.ones(1)),
        lambda: minddp.DistributedDataParallel(minddp.nn.Linear(1, 1)),
        dist.destroy_process_group,
    ):
        with pytest.raises(UsageError, match="init_process_group"):
            call()


@pytest.fixture
def world_of_one():
    dist.init_process_group(rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_wrong_calls_are_refused_with_what_is_right(world_of_one):
    for call, says in (
        (dist.init_process_group, "destroy_process_group"),
        (lambda: dist.new_group([0, 1]), "ranks 0 to 0"),
        (lambda: dist.broadcast(np.ones(1), src=4), "rank 4 is not in this group"),
        (lambda: dist.all_gather([], np.ones(1)), "1 tensors of shape"),
        (lambda: dist.scatter(np.ones(1)), "1 tensors of shape"),
        (lambda: dist.reduce(np.ones(1), dst=3), "rank 3 is not in this group"),
        (lambda: dist.irecv(np.ones(1)), "src="),
        (lambda: dist.barrier(group="world"), "is no process group"),
        (lambda: dist.all_reduce([1.0]), "NumPy array"),
        (lambda: dist.all_reduce(np.ones(1), op="mean"), "sum, avg, min, max, prod"),
    ):
        with pytest.raises(UsageError, match=says):
            call()


def test_outside_of_a_group_nothing_happens(world_of_one):
    outside = GroupMember.NON_GROUP_MEMBER
    x = np.ones(1)
    dist.all_reduce(x, group=outside)
    dist.broadcast(x, 0, group=outside)
    dist.all_gather([], x, group=outside)
    dist.barrier(group=outside)
    dist.send(x, 0, group=outside)
    assert dist.recv(x, 0, group=outside) == -1
    assert dist.isend(x, 0, group=outside) is None
    assert (dist.get_rank(outside), dist.get_world_size(outside)) == (-1, -1)
    dist.destroy_process_group(outside)
    assert dist.is_initialized()


@pytest.mark.parametrize(
    "method", ["tcp://127.0.0.1", "file:///tmp/x", "tcp://:80", ""]
)
def test_an_init_method_that_means_nothing_is_refused(method):
    with pytest.raises(UsageError, match="init_method"):
        dist.init_process_group(init_method=method)


# ---- spawn ----


def meet(rank, n, port, words):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
    dist.init_process_group(
        "gloo", rank=rank, world_size=n, timeout=timedelta(seconds=5)
    )
    x = np.ones(1)
    dist.all_reduce(x)
    assert x.item() == n
    with open(words, "a") as file:
        file.write(f"{rank} ")
    dist.destroy_process_group()


def meet_by_tcp(rank, n, port):
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(init_method=where, rank=rank, world_size=n, timeout=5.0)
    dist.barrier()


def fail_on_rank_1(rank, n, port):
    meet_by_tcp(rank, n, port)
    if rank == 1:
        raise KeyError("the cause")
    dist.barrier()


def fail_one_after_the_other(rank):
    time.sleep(1.0 - rank)
    raise ValueError(f"rank {rank}: " + "x" * 200_000)


def exit_with_3(rank):
    if rank == 1:
        os._exit(3)
    time.sleep(60)


def free_port():
    listener = listen("127.0.0.1")
    listener.close()
    return listener.port


@pytest.mark.processes
def test_three_spawns_in_a_row_on_one_port(tmp_path):
    port, words = free_port(), tmp_path / "words"
    for _ in range(3):
        spawn(meet, args=(2, port, str(words)), nprocs=2)
    assert sorted(words.read_text().split()) == ["0"] * 3 + ["1"] * 3


@pytest.mark.processes
def test_an_address_in_the_init_method_and_no_destroy():
    spawn(meet_by_tcp, args=(2, free_port()), nprocs=2)


@pytest.mark.processes
def test_the_exception_of_the_rank_that_failed_first_reaches_the_parent():
    with pytest.raises(ProcessRaisedException) as caught:
        spawn(fail_on_rank_1, args=(3, free_port()), nprocs=3)
    assert caught.value.error_index == 1
    assert "KeyError: 'the cause'" in str(caught.value)
    assert "in fail_on_rank_1" in str(caught.value)


@pytest.mark.processes
def test_the_first_error_in_time_counts_however_long_it_is():
    with pytest.raises(ProcessRaisedException) as caught:
        spawn(fail_one_after_the_other, nprocs=2)
    assert caught.value.error_index == 1
    assert "rank 1: " + "x" * 200_000 in str(caught.value)


@pytest.mark.processes
def test_a_process_that_exits_ends_the_others():
    start = time.monotonic()
    with pytest.raises(ProcessExitedException) as caught:
        spawn(exit_with_3, nprocs=2)
    assert time.monotonic() - start < 30
    assert (caught.value.error_index, caught.value.exit_code) == (1, 3)


@pytest.mark.processes
def test_a_context_is_joined_later():
    context = spawn(meet_by_tcp, args=(1, free_port()), nprocs=1, join=False)
    assert len(context.pids()) == 1
    assert context.join()
    assert not any(process.is_alive() for process in context.processes)


def test_spawn_refuses_what_it_cannot_do():
    for settings in ({"nprocs": 0}, {"start_method": "fork"}):
        with pytest.raises(UsageError):
            spawn(meet, **settings)
    assert issubclass(ProcessRaisedException, MindDPError)
