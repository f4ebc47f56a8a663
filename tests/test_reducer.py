"""The bucketed DDP: when gradients travel, in which portions, and what is refused."""

import copy
import threading
import time
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest

from minddp import functional as F
from minddp import manual_seed, nn
from minddp.autograd import Tensor, no_grad
from minddp.buckets import MIB, Bucket, Size, plan
from minddp.ddp import DistributedDataParallel, NaiveDistributedDataParallel
from minddp.errors import MindDPError, PeerLost, ReplicaError, UsageError
from minddp.frame import HEADER_BYTES
from minddp.optim import SGD
from minddp.testing import run_groups

DTYPE = "float64"
TinyBuckets = partial(DistributedDataParallel, bucket_cap_mb=1 / MIB)


def linear(inputs=1, outputs=1):
    return nn.Linear(inputs, outputs, bias=False, dtype=DTYPE)


def mlp(seed=0):
    manual_seed(seed)
    layers = [nn.Linear(4, 4, dtype=DTYPE) for _ in range(3)]
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


def collectives(pg):
    return pg.stats()["collectives"]


class Branches(nn.Module):
    """Two branches, of which a forward uses those that it is told to."""

    def __init__(self):
        self.a, self.b = linear(), linear()
        for branch in (self.a, self.b):
            branch.weight.data[...] = 1.0

    def forward(self, x, use="ab"):
        y = Tensor(np.zeros((1, 1)))
        for name in use:
            y = y + getattr(self, name)(x)
        return y


ONE = np.array([[1.0]])


# ---- The plan ----


def test_buckets_fill_up_to_their_cap_and_may_overshoot():
    sizes = [Size(nbytes, "float32") for nbytes in (4, 4, 2, 9)]
    assert plan(sizes, [0, 1, 2, 3], first_bytes=3, cap_bytes=6) == [[0], [1, 2], [3]]
    assert plan(sizes, [3, 2, 1, 0], first_bytes=3, cap_bytes=6) == [[3], [2, 1], [0]]
    assert plan(sizes, [0, 1, 2, 3], 10**9, 10**9) == [[0, 1, 2, 3]]
    assert plan([], [], 1, 1) == []


def test_each_dtype_has_buckets_of_its_own():
    sizes = [Size(4, "float32"), Size(8, "float64")] * 3
    assert plan(sizes, range(6), 8, 8) == [[1], [0, 2], [3], [5], [4]]


def test_all_parameters_are_in_one_bucket_each_exactly_once():
    draw = np.random.default_rng(0)
    for _ in range(100):
        dtypes = draw.choice(["float32", "float64"], 20)
        sizes = [Size(int(draw.integers(0, 50)), dtype) for dtype in dtypes]
        order = draw.permutation(20).tolist()
        buckets = plan(sizes, order, 20, 60)
        assert sorted(i for bucket in buckets for i in bucket) == list(range(20))
        for bucket in buckets:
            assert len({sizes[i].dtype for i in bucket}) == 1
            assert [order.index(i) for i in bucket] == sorted(map(order.index, bucket))


def test_a_gradient_in_a_bucket_is_a_view_of_its_flat_array():
    p, q = (nn.Parameter(np.zeros(shape)) for shape in ((2, 3), (2,)))
    bucket = Bucket(0, [p, q])
    p.grad = Tensor(np.arange(6.0).reshape(2, 3))
    bucket.take(0)
    assert not bucket.full
    bucket.take(1)  # q has no gradient: zeros
    assert bucket.full
    assert bucket.flat.tolist() == [0, 1, 2, 3, 4, 5, 0, 0]
    assert np.shares_memory(p.grad.data, bucket.flat)
    assert q.grad is None


def test_the_description_is_a_table_of_buckets():
    def body(pg):
        return TinyBuckets(mlp(), pg).describe().splitlines()

    lines = run_groups(1, body)[0]
    assert lines[0].split() == ["bucket", "bytes", "parameters"]
    assert lines[1].split() == ["0", "32", "4.bias"]
    assert lines[-1].split() == ["5", "128", "0.weight"]


# ---- When they travel ----


def test_the_first_bucket_leaves_while_backward_still_computes():
    def body(pg):
        m = mlp()
        left = []
        m[0].weight.register_post_accumulate_grad_hook(
            lambda _: left.append([b.work is not None for b in ddp.buckets])
        )
        ddp = TinyBuckets(m, pg)  # its hook on that weight comes after ours
        ddp(np.ones((2, 4))).sum().backward()
        return left

    # 4.bias, 4.weight, 2.bias, 2.weight are on their way; 0.bias comes after 0.weight
    # or before it, as the op hands them back.
    for left in run_groups(2, body):
        assert left[0][:4] == [True] * 4
        assert not left[0][5]


def test_buckets_leave_in_the_order_of_their_index_whatever_the_order_of_gradients():
    """Rank 1 gets its gradients in another order than rank 0."""

    def body(pg):
        m = Branches()
        ddp = TinyBuckets(m, pg)
        for _ in range(3):
            m.zero_grad()
            x = ONE * (pg.rank + 1)
            ddp(x, use="ab" if pg.rank == 0 else "ba").sum().backward()
        return m.a.weight.grad.item(), m.b.weight.grad.item()

    assert run_groups(2, body) == [(1.5, 1.5)] * 2


def test_buckets_are_rebuilt_once_in_the_order_in_which_rank_0_got_its_gradients():
    def body(pg):
        ddp = TinyBuckets(Branches(), pg)
        order = [ddp.describe().split()[5::3]]
        for _ in range(3):
            ddp(ONE, use="ba" if pg.rank == 0 else "ab").sum().backward()
            order.append(ddp.describe().split()[5::3])
        return order

    for order in run_groups(2, body):
        assert order[0] == ["b.weight", "a.weight"], "the reverse of the definition"
        assert order[1] == order[2] == order[3] == ["a.weight", "b.weight"]


def test_gradients_are_views_into_the_buckets_before_and_after_the_rebuild():
    def body(pg):
        ddp = TinyBuckets(mlp(), pg)
        for _ in range(3):
            ddp.zero_grad()
            ddp(np.ones((2, 4))).sum().backward()
            for bucket in ddp.buckets:
                for p in bucket.parameters:
                    assert np.shares_memory(p.grad.data, bucket.flat)

    run_groups(2, body)


def test_a_layers_gradient_is_computed_in_its_bucket_and_never_copied():
    def body(pg):
        m = mlp()
        at_home = []
        for p in (m[0].weight, m[4].weight):
            p.register_post_accumulate_grad_hook(
                lambda p: at_home.append(p.grad.data is p.grad_home)
            )  # called before the hook of DDP
        ddp = TinyBuckets(m, pg)
        for _ in range(2):  # before and after the rebuild
            ddp.zero_grad()
            ddp(np.ones((2, 4))).sum().backward()
        return at_home

    assert run_groups(2, body) == [[True] * 4] * 2


def test_many_small_parameters_cost_as_many_messages_as_there_are_buckets():
    def body(pg):
        m = nn.Sequential(*(nn.Linear(8, 8) for _ in range(100)))
        ddp = DistributedDataParallel(m, pg)
        ddp(np.ones((2, 8), np.float32)).sum().backward()
        before = pg.stats()["messages"]
        ddp(np.ones((2, 8), np.float32)).sum().backward()
        return pg.stats()["messages"] - before, len(ddp.buckets)

    assert run_groups(3, body) == [(2, 1)] * 3  # n-1, once


def test_setting_gradients_to_zero_instead_of_none_is_as_good():
    def body(pg):
        m = mlp()
        ddp = TinyBuckets(m, pg)
        for _ in range(3):
            ddp.zero_grad(set_to_none=False)
            ddp(np.full((2, 4), pg.rank + 1.0)).sum().backward()
        return [p.grad.data.tolist() for p in m.parameters()]

    def oracle(pg):
        m = mlp()
        NaiveDistributedDataParallel(m, pg)
        ddp = NaiveDistributedDataParallel(m, pg)
        ddp(np.full((2, 4), pg.rank + 1.0)).sum().backward()
        return [p.grad.data.tolist() for p in m.parameters()]

    assert run_groups(2, body) == run_groups(2, oracle)


# ---- no_sync ----


def accumulate(pg, style):
    m = linear()
    ddp = DistributedDataParallel(m, pg)
    ddp(ONE).sum().backward()
    m.zero_grad()
    before = collectives(pg)
    for step in range(4):
        x = ONE * (10 * step + pg.rank)
        if step == 3 or style == "none":
            ddp(x).sum().backward()
        elif style == "forward and backward":
            with ddp.no_sync():
                ddp(x).sum().backward()
        elif style == "forward":
            with ddp.no_sync():
                loss = ddp(x).sum()
            loss.backward()
        elif style == "attribute":
            ddp.require_backward_grad_sync = False
            ddp(x).sum().backward()
            ddp.require_backward_grad_sync = True
        else:
            loss = ddp(x).sum()
            with ddp.no_sync():
                loss.backward()
    return m.weight.grad.item(), collectives(pg) - before


@pytest.mark.parametrize(
    ("style", "sent"),
    [
        ("forward and backward", 1),
        ("forward", 1),
        ("attribute", 1),
        ("backward", 4),  # too late: forward has decided
        ("none", 4),
    ],
)
def test_no_sync_counts_where_forward_runs_and_the_sum_is_right_in_any_case(
    style, sent
):
    total = sum(10 * step + 0.5 for step in range(4))
    assert run_groups(2, lambda pg: accumulate(pg, style)) == [(total, sent)] * 2


@pytest.mark.parametrize("where", ["evaluation", "no_sync"])
def test_another_forward_before_backward_does_not_turn_the_average_off(where):
    """One that records nothing, or whose own backward would not send."""

    def body(pg):
        m = linear()
        ddp = DistributedDataParallel(m, pg)
        loss = ddp(ONE * (pg.rank + 1)).sum()
        with no_grad() if where == "evaluation" else ddp.no_sync():
            ddp(ONE * 100)
        loss.backward()
        averaged = m.weight.grad.item()
        ddp(ONE)  # a forward without a backward, as of a batch that is left out
        with ddp.no_sync():
            ddp(ONE).sum().backward()  # and this one is local again
        return averaged, ddp.logging_data()["iteration"]

    assert run_groups(2, body) == [(1.5, 1)] * 2


def test_the_wrapped_model_can_be_trained_beside_its_wrapper_on_one_rank_alone():
    def body(pg):
        m = linear()
        ddp = DistributedDataParallel(m, pg)
        ddp(ONE).sum().backward()
        calls = collectives(pg)
        m.zero_grad()
        if pg.rank == 1:
            ddp.module(ONE * 7).sum().backward()
        return m.weight.grad and m.weight.grad.item(), collectives(pg) - calls

    assert run_groups(2, body) == [(None, 0), (7.0, 0)]


def test_two_wrappers_of_one_model_take_turns():
    def body(pg):
        m = nn.Sequential(linear(64, 64), linear(64, 64))
        wrappers = [TinyBuckets(m, pg), DistributedDataParallel(m, pg)]
        for step in range(6):
            m.zero_grad()
            calls = collectives(pg)
            x = np.full((1, 64), pg.rank + 1.0)
            wrappers[step % 2](x).sum().backward()
            if step > 1:  # the first backward of each makes its buckets anew
                assert collectives(pg) - calls == len(wrappers[step % 2].buckets)
            expected = 1.5 * (np.ones((1, 64)) @ m[0].weight.data.T)
            np.testing.assert_allclose(
                m[1].weight.grad.data[0], expected[0], rtol=1e-12
            )
        return True

    assert run_groups(2, body) == [True, True]


def test_each_step_may_run_in_a_thread_of_its_own():
    def body(pg):
        m = linear()
        ddp = DistributedDataParallel(m, pg)
        seen = []
        for step in range(3):
            m.zero_grad()
            x = ONE * (pg.rank + step)
            thread = threading.Thread(target=lambda x=x: ddp(x).sum().backward())
            thread.start()
            thread.join()
            seen.append(m.weight.grad.item())
        return seen

    assert run_groups(2, body) == [[0.5, 1.5, 2.5]] * 2


def test_no_sync_ends_with_its_block_even_if_that_raises():
    def body(pg):
        ddp = DistributedDataParallel(linear(), pg)
        with pytest.raises(ValueError, match="stop"), ddp.no_sync():
            raise ValueError("stop")
        return ddp.require_backward_grad_sync

    assert run_groups(1, body) == [True]


# ---- Parameters that are not used ----


def test_an_unused_parameter_is_named_with_the_remedy():
    def body(pg):
        ddp = DistributedDataParallel(Branches(), pg)
        ddp(ONE, use="a").sum().backward()

    with pytest.raises(UsageError) as caught:
        run_groups(2, body)
    for rank, error in enumerate(caught.value.of_ranks):
        assert f"gradient for 'b.weight' (bucket 0) on rank {rank}" in str(error)
        assert "find_unused_parameters=True" in str(error)


def test_a_parameter_unused_on_one_rank_only_ends_the_others_with_its_name():
    def body(pg):
        ddp = DistributedDataParallel(Branches(), pg)
        ddp(ONE, use="a" if pg.rank == 1 else "ab").sum().backward()

    with pytest.raises(MindDPError) as caught:
        run_groups(3, body)
    errors = caught.value.of_ranks
    assert isinstance(errors[1], UsageError)
    for rank in (0, 2):
        assert isinstance(errors[rank], PeerLost)
        assert errors[rank].culprit == 1
        assert "'b.weight'" in str(errors[rank])


@pytest.mark.parametrize("make", [DistributedDataParallel, TinyBuckets])
def test_unused_parameters_are_found_and_contribute_zeros(make):
    def body(pg):
        m = Branches()
        ddp = make(m, pg, find_unused_parameters=True)
        seen = []
        for use_on_rank_1 in ("ab", "a", "b", "ab"):
            m.zero_grad()
            use = use_on_rank_1 if pg.rank == 1 else "ab"
            ddp(ONE * 4, use=use).sum().backward()
            seen.append((m.a.weight.grad.item(), m.b.weight.grad.item()))
        return seen

    expected = [(4.0, 4.0), (4.0, 2.0), (2.0, 4.0), (4.0, 4.0)]
    assert run_groups(2, body) == [expected] * 2


def test_a_parameter_that_no_rank_uses_keeps_its_gradient_untouched():
    def body(pg):
        m = Branches()
        ddp = DistributedDataParallel(m, pg, find_unused_parameters=True)
        ddp(ONE, use="a").sum().backward()
        return m.a.weight.grad.item(), m.b.weight.grad

    assert run_groups(2, body) == [(1.0, None)] * 2


def test_two_forwards_that_use_different_branches_need_no_search():
    def body(pg):
        m = Branches()
        ddp = DistributedDataParallel(m, pg, find_unused_parameters=True)
        x = ONE * (pg.rank + 1)
        (ddp(x, use="a") + ddp(x, use="b")).sum().backward()
        return m.a.weight.grad.item(), m.b.weight.grad.item()

    assert run_groups(2, body) == [(1.5, 1.5)] * 2


# ---- Construction ----


def different(kind):
    """A model of two layers, or one that differs from it in this respect."""
    first, second = nn.Linear(2, 3), nn.Linear(3, 2)
    if kind == "shape":
        first = nn.Linear(2, 4)
    if kind == "dtype":
        second = nn.Linear(3, 2, dtype="float64")
    if kind == "trained":
        first.bias.requires_grad = False
    if kind == "count":
        return nn.Sequential(first, second, nn.Linear(2, 2))
    if kind == "buffer":
        first.register_buffer("mean", np.zeros(3))
    if kind == "name":
        return nn.ModuleDict({"one": first, "two": second})
    return nn.Sequential(first, second)


@pytest.mark.parametrize(
    ("kind", "on_rank_0", "on_rank_1"),
    [
        ("shape", "'0.weight' (3, 2) float32", "'0.weight' (4, 2) float32"),
        ("dtype", "'1.weight' (2, 3) float32", "'1.weight' (2, 3) float64"),
        ("trained", "'0.bias' (3,) float32", "'0.bias' (3,) float32, fixed"),
        ("count", "nothing more", "'2.weight' (2, 2) float32"),
        ("buffer", "nothing more", "buffer '0.mean' (3,) float64, fixed"),
        ("name", "'0.weight' (3, 2)", "'one.weight' (3, 2)"),
    ],
)
def test_models_that_differ_are_refused_on_all_ranks_alike(kind, on_rank_0, on_rank_1):
    def body(pg):
        with pytest.raises(UsageError) as caught:
            DistributedDataParallel(different(kind if pg.rank == 1 else ""), pg)
        pg.barrier()  # the group lives on
        return str(caught.value)

    texts = run_groups(3, body)
    assert len(set(texts)) == 1
    assert f"rank 0 has {on_rank_0}" in texts[0].replace("parameter ", "")
    assert f"but rank 1 has {on_rank_1}" in texts[0].replace("parameter ", "")


def test_models_that_differ_are_refused_before_memory_is_shared():
    """Buckets above 32 KiB lie in shared memory, and all ranks make them together."""

    def body(pg):
        with pytest.raises(
            UsageError, match=r"rank 0 has parameter 'weight' \(200, 10"
        ):
            DistributedDataParallel(linear(10, 200 + 300 * pg.rank), pg)
        pg.barrier()

    run_groups(2, body, transport="shm")


def test_settings_that_decide_what_is_sent_must_be_the_same():
    def body(pg):
        with pytest.raises(UsageError) as caught:
            DistributedDataParallel(linear(), pg, bucket_cap_mb=25.0 - pg.rank)
        return str(caught.value)

    for text in run_groups(2, body):
        assert "rank 0 has setting bucket_cap_mb=25.0" in text
        assert "rank 1 has setting bucket_cap_mb=24.0" in text


def test_buffers_come_from_rank_0_even_if_they_are_not_broadcast_later():
    class WithMean(nn.Module):
        def __init__(self, rank):
            self.layer = linear()
            self.register_buffer("mean", np.full(3, float(rank)))

        def forward(self, x):
            self.mean.data += 1
            return self.layer(x)

    def body(pg, broadcast):
        m = WithMean(pg.rank)
        ddp = DistributedDataParallel(m, pg, broadcast_buffers=broadcast)
        start = m.mean.tolist()
        if pg.rank == 1:
            m.mean.data += 5
        ddp(ONE).sum().backward()
        return start, m.mean.tolist()

    zeros, ones = [0.0] * 3, [1.0] * 3
    assert run_groups(2, partial(body, broadcast=True)) == [(zeros, ones)] * 2
    apart = run_groups(2, partial(body, broadcast=False))
    assert apart == [(zeros, ones), (zeros, [6.0] * 3)]


def test_evaluation_on_one_rank_broadcasts_no_buffer():
    def body(pg):
        m = nn.Sequential(linear())
        m.register_buffer("mean", np.zeros(3))
        ddp = DistributedDataParallel(m, pg)
        before = collectives(pg)
        ddp.eval()
        if pg.rank == 0:
            ddp(ONE)
        return collectives(pg) - before

    assert run_groups(2, body) == [0, 0]


def test_ddp_in_ddp_and_a_model_without_parameters_are_refused():
    def body(pg):
        inner = DistributedDataParallel(linear(), pg)
        for module, says in (
            (inner, "the module is in DDP already"),
            (nn.Sequential(linear(), inner), "1 is in DDP already"),
            (nn.ReLU(), "no parameter to train"),
        ):
            with pytest.raises(UsageError, match=says):
                DistributedDataParallel(module, pg)

    run_groups(1, body)


def test_freezing_after_wrapping_is_refused_by_name():
    def body(pg):
        m = nn.Sequential(linear(), linear().requires_grad_(False))
        ddp = DistributedDataParallel(m, pg)
        ddp(ONE).sum().backward()
        m[1].weight.requires_grad = True
        with pytest.raises(UsageError, match=r"'1\.weight' is trained now"):
            ddp(ONE)
        m[1].weight.requires_grad = False
        m[0].weight.requires_grad = False
        with pytest.raises(UsageError, match=r"'0\.weight' is frozen now"):
            ddp(ONE)

    run_groups(1, body)


# ---- Mixtures ----


def test_two_backwards_after_one_forward_are_both_averaged():
    def body(pg):
        m = linear()
        ddp = DistributedDataParallel(m, pg)
        y = ddp(ONE * pg.rank)
        (y * 1.0).sum().backward(retain_graph=True)
        (y * 2.0).sum().backward()
        return m.weight.grad.item()

    assert run_groups(2, body) == [1.5, 1.5]


def test_two_dtypes_travel_in_buckets_of_their_own():
    def body(pg):
        m = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2, dtype=DTYPE)])
        m.forward = lambda x: m[0](x.astype("f4")).sum() * m[1](x).sum()
        ddp = DistributedDataParallel(m, pg)
        ddp(np.full((1, 2), pg.rank + 1.0)).backward()
        kinds = [bucket.flat.dtype.name for bucket in ddp.buckets]
        return kinds, [p.grad.data.tobytes() for p in m.parameters()]

    first, second = run_groups(2, body)
    assert sorted(first[0]) == ["float32", "float64"]
    assert first == second


def test_an_empty_batch_on_one_rank_contributes_zeros():
    def body(pg):
        table = nn.Embedding(4, 2, dtype=DTYPE)
        ddp = DistributedDataParallel(table, pg)
        rows = np.array([1, 3] if pg.rank == 0 else [], np.int64)
        ddp(rows).sum().backward()
        return table.weight.grad.tolist()

    half = [[0.0, 0.0], [0.5, 0.5], [0.0, 0.0], [0.5, 0.5]]
    assert run_groups(2, body) == [half] * 2


def test_summed_losses_need_no_average():
    """With op avg, n ranks have 1/n of the gradient of a summed loss: scale it."""
    x, y = np.arange(8.0).reshape(8, 1), np.zeros(8)

    def body(pg):
        m = linear()
        m.weight.data[...] = 1.0
        ddp = DistributedDataParallel(m, pg)
        part = slice(pg.rank, None, 2)
        out = ddp(x[part])
        F.mse_loss(out, y[part].reshape(-1, 1), reduction="sum").backward()
        return m.weight.grad.item() * pg.world_size

    alone = linear()
    alone.weight.data[...] = 1.0
    F.mse_loss(alone(x), y.reshape(-1, 1), reduction="sum").backward()
    assert run_groups(2, body) == [alone.weight.grad.item()] * 2


# ---- Do replicas stay equal? ----


def test_a_drift_of_one_ulp_on_one_rank_is_reported_by_name_on_all_ranks():
    def body(pg):
        m = mlp()
        ddp = DistributedDataParallel(m, pg)
        ddp.check_sync()
        if pg.rank == 1:
            m[2].bias.data[3] = np.nextafter(m[2].bias.data[3], 10)
        with pytest.raises(ReplicaError) as caught:
            ddp.check_sync()
        pg.barrier()  # the group lives on
        return str(caught.value)

    texts = run_groups(3, body)
    assert len(set(texts)) == 1
    assert (
        "'2.bias' and 0 other parameters differ between rank 0 and rank 1" in texts[0]
    )


@pytest.mark.parametrize(("every", "found_in"), [(5, 5), (1, 3), (0, None)])
def test_replicas_are_compared_every_so_many_backwards(every, found_in):
    def body(pg):
        m = linear()
        ddp = DistributedDataParallel(m, pg, check_sync_every=every)
        for step in range(1, 12):
            if step == 3 and pg.rank == 1:
                m.weight.data += 1e-9
            try:
                ddp(ONE).sum().backward()
            except ReplicaError:
                return step
        return None

    assert run_groups(2, body) == [found_in] * 2


def test_in_healthy_training_the_comparison_finds_nothing():
    def body(pg):
        m = mlp()
        ddp = DistributedDataParallel(m, pg, check_sync_every=1)
        optimizer = SGD(m.parameters(), lr=0.1, momentum=0.9)
        for _ in range(10):
            optimizer.zero_grad()
            ddp(np.full((2, 4), pg.rank + 1.0)).sum().backward()
            optimizer.step()

    run_groups(3, body)


# ---- A static graph ----


class Uneven(nn.Module):
    """Rank r uses the layers that it is told to; `c` is used by nobody."""

    def __init__(self):
        self.a, self.b, self.c = linear(), linear(), linear()
        for layer in (self.a, self.b, self.c):
            layer.weight.data[...] = 1.0

    def forward(self, x, use):
        return sum((getattr(self, name)(x) for name in use), Tensor(np.zeros((1, 1))))


def test_a_static_graph_learns_from_its_first_backward_what_is_unused():
    def body(pg):
        m = Uneven()
        ddp = TinyBuckets(m, pg, static_graph=True)
        seen = []
        for _ in range(3):
            m.zero_grad()
            ddp(ONE * 4, "ab" if pg.rank == 0 else "a").sum().backward()
            seen.append([p.grad and p.grad.item() for p in m.parameters()])
        return seen

    assert run_groups(2, body) == [[[4.0, 2.0, None]] * 3] * 2


def test_a_static_graph_overlaps_and_rebuilds_like_any_other():
    def body(pg):
        m = mlp()
        left = []
        ddp = TinyBuckets(m, pg, static_graph=True)
        m[0].weight.register_post_accumulate_grad_hook(
            lambda _: left.append(ddp.buckets[0].work is not None)
        )
        for _ in range(2):
            ddp(np.ones((2, 4))).sum().backward()
        return left, ddp.logging_data()["has_rebuilt_buckets"]

    assert run_groups(2, body) == [([False, True], True)] * 2


def test_a_parameter_that_gets_two_gradients_in_a_static_backward_is_sent_once():
    """A backward inside backward, as activation checkpointing makes it."""

    def body(pg, static):
        m = linear()
        ddp = DistributedDataParallel(m, pg, static_graph=static)
        for _ in range(3):
            m.zero_grad()
            gate = Tensor(np.ones(1), requires_grad=True)
            inner = m(ONE * pg.rank).sum()
            gate.register_post_accumulate_grad_hook(lambda _, y=inner: y.backward())
            (ddp(ONE) * gate).sum().backward()
        return m.weight.grad.item()

    assert run_groups(2, partial(body, static=True)) == [1.5, 1.5]
    with pytest.raises(UsageError, match="'weight' got a second gradient in one"):
        run_groups(2, partial(body, static=False))


def test_a_static_graph_needs_no_search_for_unused_parameters():
    def body(pg):
        m = Uneven()
        settings = {"static_graph": True, "find_unused_parameters": True}
        ddp = TinyBuckets(m, pg, **settings)
        for _ in range(3):
            m.zero_grad()
            ddp(ONE, "ab").sum().backward()
        return [p.grad and p.grad.item() for p in m.parameters()]

    assert run_groups(2, body) == [[1.0, 1.0, None]] * 2


def test_a_static_graph_that_changes_is_refused_by_name():
    def body(pg):
        ddp = DistributedDataParallel(Uneven(), pg, static_graph=True)
        ddp(ONE, "ab").sum().backward()
        ddp(ONE, "abc" if pg.rank == 1 else "ab").sum().backward()

    with pytest.raises(MindDPError) as caught:
        run_groups(2, body)
    on_0, on_1 = caught.value.of_ranks
    assert "'c.weight' got a gradient more often on rank 1" in str(on_1)
    assert isinstance(on_0, PeerLost)
    assert "'c.weight'" in str(on_0)


def test_a_static_graph_that_lacks_a_gradient_is_refused_by_name():
    def body(pg):
        ddp = DistributedDataParallel(Uneven(), pg, static_graph=True)
        ddp(ONE, "ab").sum().backward()
        ddp(ONE, "a").sum().backward()

    with pytest.raises(UsageError, match=r"never saw a gradient for 'b\.weight'"):
        run_groups(2, body)


def test_a_loss_may_use_a_parameter_without_forward_and_leave_an_output_out():
    """Whether it is used is a question to backward, not to forward's outputs."""

    class Both(Branches):
        def forward(self, x):
            return {"a": self.a(x), "b": self.b(x)}

    def body(pg, use):
        m = Both()
        ddp = TinyBuckets(m, pg, find_unused_parameters=True)
        ddp(ONE)  # and a forward may have no backward at all
        loss = ddp(ONE)["a"].sum()
        if use:
            loss = loss + (m.b.weight * m.b.weight).sum()
        loss.backward()
        return [p.grad and p.grad.item() for p in m.parameters()]

    assert run_groups(2, partial(body, use=True)) == [[1.0, 2.0]] * 2
    assert run_groups(2, partial(body, use=False)) == [[1.0, None]] * 2


def test_outputs_in_a_dataclass_or_in_an_object_unknown_are_averaged_as_well():
    @dataclass
    class Output:
        logits: Tensor

    class Unknown:
        def __init__(self, logits):
            self.logits = logits

    class Wrapped(nn.Module):
        def __init__(self, kind):
            self.layer, self.kind = linear(), kind

        def forward(self, x):
            return self.kind(self.layer(x))

    def body(pg, kind):
        m = Wrapped(kind)
        ddp = DistributedDataParallel(m, pg)
        ddp(ONE * pg.rank).logits.sum().backward()
        return m.layer.weight.grad.item()

    for kind in (Output, Unknown):
        assert run_groups(2, partial(body, kind=kind)) == [0.5, 0.5]


def test_a_stale_gradient_that_no_rank_has_used_stays_to_the_bit():
    def body(pg):
        m = Branches()
        ddp = TinyBuckets(m, pg, find_unused_parameters=True)
        ddp(ONE / 3, use="ab").sum().backward()
        before = m.b.weight.grad.data.tobytes()
        for _ in range(3):
            ddp(ONE, use="a").sum().backward()
        return before == m.b.weight.grad.data.tobytes()

    assert run_groups(3, body) == [True] * 3


def test_gradients_that_are_no_views_outlive_the_next_backward():
    def body(pg):
        m = mlp()
        ddp = TinyBuckets(m, pg, gradient_as_bucket_view=False)
        kept = []
        for step in range(3):
            m.zero_grad()
            ddp(np.full((1, 4), pg.rank + 1.0 + step)).sum().backward()
            kept.append(m[0].weight.grad.data)
        shares = np.shares_memory(kept[-1], ddp.buckets[-1].flat)
        return [g.tobytes() for g in kept], shares

    def oracle(pg):
        m = mlp()
        ddp = DistributedDataParallel(m, pg)
        kept = []
        for step in range(3):
            m.zero_grad()
            ddp(np.full((1, 4), pg.rank + 1.0 + step)).sum().backward()
            kept.append(m[0].weight.grad.data.tobytes())
        return kept

    results = run_groups(2, body)
    assert [shares for _, shares in results] == [False, False]
    assert [kept for kept, _ in results] == run_groups(2, oracle)


def test_what_makes_no_sense_is_refused_by_name():
    def body(pg):
        for cap in (float("inf"), float("nan"), "25", -1, 0, None):
            with pytest.raises(UsageError, match="bucket_cap_mb"):
                DistributedDataParallel(linear(), pg, bucket_cap_mb=cap)
        m = linear()
        ddp = DistributedDataParallel(m, pg)
        with pytest.raises(UsageError, match=r"Copy ddp\.module"):
            copy.deepcopy(ddp)
        copy.deepcopy(m)
        m.to("float32")
        with pytest.raises(UsageError, match="float64 has become float32"):
            ddp(ONE)
        m.to("float64")
        ddp.register_comm_hook(None, lambda state, bucket: None)
        with pytest.raises(UsageError, match="hook returned None for bucket 0"):
            ddp(ONE).sum().backward()

    run_groups(1, body)


def test_hooks_of_wrappers_that_have_gone_are_taken_off():
    def body(pg):
        m = linear()
        for _ in range(5):
            DistributedDataParallel(m, pg)
        return len(m.weight._hooks)

    assert run_groups(1, body) == [0]


# ---- The logger ----


def test_the_logging_data_have_pytorchs_names_and_add_up():
    def body(pg):
        ddp = TinyBuckets(mlp(), pg)
        for _ in range(4):
            ddp(np.ones((2, 4))).sum().backward()
        return ddp.logging_data()

    for rank, data in enumerate(run_groups(2, body)):
        assert data["rank"] == rank
        assert data["iteration"] == 4
        assert data["num_parameter_tensors"] == 6
        assert data["total_parameter_size_bytes"] == sum(data["bucket_sizes"]) == 480
        assert data["has_rebuilt_buckets"]
        order = data["prev_iteration_grad_ready_order_indices"]
        assert [
            i for bucket in data["per_bucket_param_indices"] for i in bucket
        ] == order
        assert sorted(order) == list(range(6))
        comm, hidden, exposed = (
            data[f"backward_{name}_time"]
            for name in ("comm", "compute_comm_overlap", "comm_exposed")
        )
        assert comm == hidden + exposed > 0
        # Half of each bucket twice, and a header for each of the six.
        assert data["bytes_sent"] == 480 + 6 * HEADER_BYTES
        for name in ("forward_compute_time", "backward_compute_time"):
            assert data[name] > 0
            assert data[f"avg_{name}"] > 0


def test_the_order_of_gradients_is_that_of_the_first_backward():
    def body(pg):
        ddp = TinyBuckets(Branches(), pg, find_unused_parameters=True)
        orders = []
        for use in ("ba", "ab", "ab"):
            ddp(ONE, use=use).sum().backward()
            name = "prev_iteration_grad_ready_order_indices"
            orders.append(ddp.logging_data()[name])
        return orders

    assert run_groups(2, body) == [[[0, 1]] * 3] * 2


def test_waiting_for_a_slow_rank_before_buckets_leave_is_no_overlap():
    def body(pg):
        ddp = DistributedDataParallel(mlp(), pg, weight_by_batch=True)
        x = np.ones((2, 4))
        ddp(x).sum().backward()
        loss = ddp(x).sum()
        time.sleep(0.3 * pg.rank)  # rank 0 waits in the roll call
        loss.backward()
        return ddp.logging_data()["backward_compute_comm_overlap_time"]

    assert max(run_groups(2, body)) < 0.2e9


def test_once_a_ddp_has_gone_gradients_have_arrays_of_their_own():
    def body(pg):
        m = mlp()
        ddp = DistributedDataParallel(m, pg)
        assert m[0].weight.grad_home is ddp.buckets[0].views[-1]
        del ddp
        return [p.grad_home for p in m.parameters()]

    assert run_groups(1, body) == [[None] * 6]


def test_communication_that_backward_hides_is_counted_as_overlap():
    """A slow gradient at the end of backward leaves time for the first bucket."""

    def body(pg):
        m = mlp()
        ddp = TinyBuckets(m, pg)
        m[0].weight.register_post_accumulate_grad_hook(lambda _: time.sleep(0.05))
        ddp(np.ones((2, 4))).sum().backward()
        data = ddp.logging_data()
        return data["backward_compute_comm_overlap_time"], data["backward_comm_time"]

    for overlap, comm in run_groups(2, body):
        assert overlap > comm / 4


# ---- What users of such libraries have stumbled on ----


def test_an_embedding_of_which_a_rank_uses_no_row_contributes_zeros():
    def body(pg):
        m = nn.Embedding(8, 2, dtype=DTYPE)
        ddp = DistributedDataParallel(m, pg)
        ids = np.array([5, 6, 5] if pg.rank == 0 else [], np.int64)
        ddp(ids).sum().backward()
        return m.weight.grad.data[:, 0].tolist()

    assert run_groups(2, body) == [[0, 0, 0, 0, 0, 1.0, 0.5, 0]] * 2


def test_gradients_of_gradients_are_refused_under_ddp():
    def body(pg):
        ddp = DistributedDataParallel(linear(), pg)
        loss = ddp(ONE).sum()
        with pytest.raises(UsageError, match="no gradients of gradients"):
            loss.backward(create_graph=True)
        loss.backward()  # nothing has happened before

    run_groups(2, body)


def test_a_rank_with_a_batch_too_many_ends_with_the_name_of_the_one_that_stopped():
    def body(pg):
        m = linear()
        with pg:
            ddp = DistributedDataParallel(m, pg)
            for _ in range(5 + pg.rank):
                ddp(ONE).sum().backward()

    with pytest.raises(MindDPError) as caught:
        run_groups(2, body)
    on_1 = caught.value.of_ranks[1]
    assert isinstance(on_1, PeerLost)
    assert on_1.culprit == 0
    assert "rank 0 closed its group after" in str(on_1)


def test_float16_sums_overflow_on_all_ranks_alike():
    def body(pg):
        x = np.full(3, 60_000.0, np.float16)
        with np.errstate(over="ignore"):
            pg.all_reduce(x)
        return x.tolist()

    assert run_groups(2, body) == [[float("inf")] * 3] * 2


def test_optimizer_and_clipping_send_nothing_more():
    def body(pg):
        m = mlp()
        ddp = DistributedDataParallel(m, pg)
        optimizer = SGD(m.parameters(), lr=0.1)
        ddp(np.ones((2, 4))).sum().backward()
        before = pg.stats()["bytes_sent"]
        nn.clip_grad_norm_(m.parameters(), 1.0)
        optimizer.step()
        return pg.stats()["bytes_sent"] - before

    assert run_groups(2, body) == [0, 0]
