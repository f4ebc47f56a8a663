"""What happens to a recorded graph: writes in between, computing again, pictures."""

import gc
import os
import weakref
from pathlib import Path

import numpy as np
import pytest

from minddp import functional as F
from minddp import manual_seed, nn, optim
from minddp.autograd import Tensor, bytes_held, checkpoint, no_grad, note_write
from minddp.ddp import DistributedDataParallel
from minddp.errors import UsageError
from minddp.testing import run_groups


def leaf(x):
    return Tensor(np.array(x, dtype="float64"), requires_grad=True)


# ---- Writes between forward and backward ----

WRITES = {
    "an element": lambda x: x.__setitem__((0, 0), 9.0),
    "in place": lambda x: x.__iadd__(1.0),
    "through a view": lambda x: x[1:].zero_(),
    "through a detached tensor": lambda x: x.detach().zero_(),
    "zero_": lambda x: x.zero_(),
}


@pytest.mark.parametrize("how", WRITES)
def test_a_write_to_what_an_op_has_kept_is_an_error_in_backward(how):
    x, w = leaf(np.ones((3, 3))), leaf(np.ones((3, 3)))
    y = (x @ w).sum()
    with no_grad():
        WRITES[how](x)
    with pytest.raises(UsageError, match=r"MatMul.*modified in place"):
        y.backward()


def test_a_write_to_a_kept_result_is_an_error():
    x = leaf([1.0, 2.0])
    y = x.tanh()
    with no_grad():
        y.zero_()
    with pytest.raises(UsageError, match=r"Tanh.*modified"):
        y.sum().backward()


def test_a_write_to_something_else_or_before_forward_is_none():
    x, w, other = leaf([1.0, 2.0]), leaf([3.0, 4.0]), leaf([5.0])
    with no_grad():
        x[0] = 7.0  # before
    y = (x * w).sum()
    with no_grad():
        other.zero_()
        (x + 0.0).zero_()
    y.backward()
    assert w.grad.tolist() == [7.0, 2.0]


def test_an_op_that_keeps_nothing_does_not_mind():
    x = leaf([1.0, 2.0])
    y = (x + 1.0).sum()
    with no_grad():
        x.zero_()
    y.backward()
    assert x.grad.tolist() == [1.0, 1.0]


def test_after_backward_writing_is_free_and_the_next_step_is_clean():
    x = leaf([2.0])
    for _ in range(3):
        x.grad = None
        (x * x).sum().backward()
        with no_grad():
            x -= 0.25 * x.grad
    assert x.item() == 0.25


def test_loading_a_state_between_forward_and_backward_is_noticed():
    m = nn.Linear(2, 2)
    y = m(Tensor(np.ones((1, 2), np.float32), requires_grad=True)).sum()
    m.load_state_dict({name: p.numpy() * 2 for name, p in m.state_dict().items()})
    with pytest.raises(UsageError, match=r"Linear.*modified"):
        y.backward()


def test_the_memory_of_writes_ends_with_the_array():
    from minddp.autograd import _writes

    gc.collect()
    before = len(_writes._latest)
    arrays = [np.zeros(3) for _ in range(50)]
    for x in arrays:
        note_write(x[1:])
    assert len(_writes._latest) == before + 50
    del x, arrays
    assert len(_writes._latest) <= before


# ---- Computing again ----


def mlp():
    manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 8, dtype="float64"), nn.Tanh(), nn.Linear(8, 2, dtype="float64")
    )


def test_a_checkpoint_gives_the_same_values_and_gradients():
    x = np.random.default_rng(0).standard_normal((3, 4))
    results = []
    for call in (lambda m, t: m(t), lambda m, t: checkpoint(m, t)):
        m, t = mlp(), leaf(x)
        y = (call(m, t) ** 2).sum()
        y.backward()
        results.append(
            [y.item(), t.grad.tolist(), *(p.grad.tolist() for p in m.parameters())]
        )
    assert results[0] == results[1]


def test_parameters_get_gradients_though_no_input_requires_one():
    m = mlp()
    checkpoint(m, Tensor(np.ones((1, 4)))).sum().backward()
    assert all(p.grad is not None for p in m.parameters())


def test_a_checkpoint_keeps_its_inputs_only():
    seen = []

    def function(x):
        h = x * 2
        seen.append(weakref.ref(h))
        return h.tanh()

    x = leaf([1.0])
    y = checkpoint(function, x)
    gc.disable()
    try:
        assert seen[0]() is None, "the intermediate result is gone"
        y.backward()
        assert len(seen) == 2, "it was computed again"
        assert seen[1]() is None
    finally:
        gc.enable()


def test_dropout_drops_the_same_again_and_the_stream_goes_on():
    manual_seed(3)
    x = leaf(np.ones(1000))
    y = checkpoint(lambda t: F.dropout(t, 0.5), x)
    drawn_after = F.dropout(np.ones(5), 0.5).tolist()
    y.sum().backward()
    assert x.grad.tolist() == y.tolist()
    manual_seed(3)
    F.dropout(np.ones(1000), 0.5)
    assert F.dropout(np.ones(5), 0.5).tolist() == drawn_after


def test_arguments_that_are_no_tensors_and_inputs_that_are_not_used():
    x, unused = leaf([2.0]), leaf([1.0])
    y = checkpoint(lambda a, b, power: a**power, x, unused, 3)
    y.backward()
    assert (x.grad.item(), unused.grad.item()) == (12.0, 0.0)


def test_without_recording_a_checkpoint_is_a_call():
    with no_grad():
        y = checkpoint(lambda x: x * 2, leaf([1.0]))
    assert not y.requires_grad


def test_checkpoints_nest():
    x = leaf([1.5])
    y = checkpoint(lambda a: checkpoint(lambda b: b.exp(), a * a), x)
    y.backward()
    np.testing.assert_allclose(x.grad.item(), 3 * np.exp(2.25), rtol=1e-12)


def test_a_function_that_returns_no_tensor_is_refused():
    with pytest.raises(UsageError, match="one Tensor"):
        checkpoint(lambda x: (x, x), leaf([1.0]))


@pytest.mark.parametrize("n", [1, 2])
def test_a_checkpoint_under_ddp_is_averaged(n):
    class Checkpointed(nn.Module):
        def __init__(self):
            self.body, self.head = mlp(), nn.Linear(2, 1, dtype="float64")

        def forward(self, x):
            return self.head(checkpoint(self.body, x))

    def body(pg, static):
        manual_seed(1)
        m = Checkpointed()
        ddp = DistributedDataParallel(m, pg, bucket_cap_mb=1e-6, static_graph=static)
        for _ in range(2):
            m.zero_grad()
            ddp(np.full((1, 4), pg.rank + 1.0)).sum().backward()
        return [p.grad.data.tolist() for p in m.parameters()]

    manual_seed(1)
    m = Checkpointed()
    for r in range(n):
        (m(np.full((1, 4), r + 1.0)).sum() / n).backward()
    for static in (False, True):
        for grads in run_groups(n, lambda pg, static=static: body(pg, static)):
            for g, p in zip(grads, m.parameters(), strict=True):
                np.testing.assert_allclose(g, p.grad.data, rtol=0, atol=1e-12)


# ---- Pictures ----


def test_a_graph_is_drawn_with_ops_leaves_and_edges():
    x, w = leaf([[1.0, 2.0]]), nn.Parameter(np.ones((2, 3)))
    dot = ((x @ w) + 1.0).sum().graph()
    assert dot.startswith("digraph {")
    assert dot.endswith("}")
    for label in ("MatMul #", "Add #", "Sum #", "Tensor (1, 2)", "Parameter (2, 3)"):
        assert dot.count(label) == 1, label
    assert dot.count(" -> ") == 5, "two leaves into MatMul, then Add, Sum and y"


def test_the_graph_of_a_leaf_is_itself():
    assert " -> " not in leaf([1.0]).graph()


def test_a_graph_that_was_freed_is_refused():
    x = leaf([1.0])
    y = x * 2
    y.backward()
    with pytest.raises(UsageError, match="freed"):
        y.graph()


# ---- Memory ----


def test_a_thousand_steps_take_no_more_memory_than_the_first_hundred():
    m = nn.Sequential(
        *(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 32), nn.GELU()),
        nn.Linear(32, 10),
    )
    optimizer = optim.AdamW(m.parameters())
    x = np.random.default_rng(0).standard_normal((32, 1, 8, 8)).astype("float32")
    y = np.arange(32) % 10

    def resident():
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def train(steps):
        for _ in range(steps):
            optimizer.zero_grad()
            F.cross_entropy(m(x), y).backward()
            optimizer.step()
        return resident()

    gc.collect()
    gc.disable()  # what a step has made is to go without its help
    try:
        before = train(100)
        assert train(1000) - before < 2e6
    finally:
        gc.enable()


def test_the_bytes_that_a_graph_holds_are_counted_once():
    x, w = leaf(np.ones((10, 10))), leaf(np.ones((10, 10)))
    y = x @ w
    assert bytes_held(y) == 1600
    assert bytes_held(y * y) == 2400, "y is kept twice and counted once"
    assert bytes_held(x) == 0
    y.sum().backward()


@pytest.mark.parametrize(
    "make",
    [
        lambda a, b: F.einsum("ij,jk->ik", a, b),
        lambda a, b: checkpoint(lambda b: a * b, b),
    ],
)
def test_what_is_kept_in_tuples_and_in_ops_within_ops_is_watched_as_well(make):
    a, b = leaf(np.ones((2, 2))), Tensor(np.ones((2, 2)))
    y = make(a, b).sum()
    b.zero_()
    with pytest.raises(UsageError, match="modified in place"):
        y.backward()


def test_an_index_that_is_changed_after_forward_is_noticed():
    a, rows = leaf(np.eye(3)), Tensor(np.array([0, 1]))
    y = a[rows, rows].sum()
    with no_grad():
        rows += 1
    with pytest.raises(UsageError, match="GetItem"):
        y.backward()


def test_filling_what_was_computed_is_refused():
    h = leaf([1.0]) * 1
    for wrong in (h.zero_, lambda: h.fill_(2.0), lambda: h.copy_([3.0])):
        with pytest.raises(UsageError, match="computed"):
            wrong()
    with pytest.raises(UsageError, match="leaf that requires grad"):
        leaf([1.0]).zero_()


def test_moving_averages_are_written_in_place():
    average, new = leaf([1.0, 2.0]), leaf([3.0, 6.0])
    with no_grad():
        same = average.mul_(0.5).add_(new, alpha=0.5)
        new.copy_([7, 8])
    assert same is average
    assert average.tolist() == [2.0, 4.0]
    assert new.tolist() == [7.0, 8.0]
