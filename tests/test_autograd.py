"""Recording and replaying: sums over paths, order, hooks, memory, refusals."""

import copy
import gc
import inspect
import pickle
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest

from minddp import functional as F
from minddp import tensor_ops as ops
from minddp.autograd import Tensor, apply, no_grad, queue_callback
from minddp.device import Device, generator, manual_seed
from minddp.errors import UsageError


def leaf(x, dtype="float64"):
    return Tensor(np.array(x, dtype), requires_grad=True)


# ---- Sums over paths ----


def test_an_intermediate_used_twice_runs_backward_once_with_the_whole_gradient():
    a = leaf(1.0)
    b = a + a
    c = b + b
    c.backward()
    assert a.grad.item() == 4


def test_paths_of_different_length_to_one_leaf_are_all_counted():
    x = leaf(1.0)
    xa, x2 = x * 1.0, x * x
    (x * xa + x2 * 1.0 + x * xa).backward()
    assert x.grad.item() == 6


def test_a_product_with_itself_counts_both_factors():
    x = leaf([3.0])
    (x * x).backward()
    assert x.grad.tolist() == [6]


def test_a_second_backward_adds_to_the_gradient():
    x = leaf([1.0, 2.0])
    for _ in range(3):
        (x * x).sum().backward()
    assert x.grad.tolist() == [6, 12]


def test_backward_takes_weights_for_the_elements():
    x = leaf([1.0, 2.0])
    (x * x).backward(np.array([1.0, 10.0]))
    assert x.grad.tolist() == [2, 40]


def test_backward_on_a_leaf_gives_it_a_copy_of_the_weights():
    x, weights = leaf([1.0, 2.0]), np.array([3.0, 4.0])
    x.backward(weights)
    weights[:] = 0
    assert x.grad.tolist() == [3, 4]


# ---- Whose memory a gradient is ----


def test_leaves_that_get_the_same_gradient_do_not_share_its_memory():
    """a + b hands gy itself to both: if both kept it, one would change the other."""
    a, b = leaf([1.0, 2.0]), leaf([3.0, 4.0])
    (a + b).backward(np.ones(2))
    a.grad.data += 100
    assert b.grad.tolist() == [1, 1]


def test_gradients_of_a_reused_value_are_not_added_into_an_array_in_use():
    """b gets gy by reference first; the sum at h must not be written into it."""
    x, b = leaf([1.0]), leaf([1.0])
    h = x * 1.0
    y = (h + b) + h
    weights = np.ones(1)
    y.backward(weights)
    assert x.grad.tolist() == [2]
    assert b.grad.tolist() == [1]
    assert weights.tolist() == [1]


def test_a_gradient_that_is_a_view_is_copied():
    x = leaf([1.0, 2.0, 3.0])
    x.sum().backward()
    x.grad.data[0] = 100  # a broadcast view would be read-only, or change all three
    assert x.grad.tolist() == [100, 1, 1]


def test_a_gradient_that_exists_is_added_to_in_place():
    """Under DDP grad is a view into a bucket: a new array would leave it empty."""
    bucket = np.zeros(5)
    x = leaf([1.0, 2.0])
    x.grad = Tensor(bucket[1:3])
    (x * 3).sum().backward()
    (x * 3).sum().backward()
    assert bucket.tolist() == [0, 6, 6, 0, 0]


def test_a_gradient_has_the_dtype_of_its_leaf():
    x = leaf([1.0, 2.0], "float32")
    (x * np.array([1.5, 2.5])).sum().backward()  # a float64 operand
    assert x.grad.dtype == np.float32
    (x * np.array([1.5, 2.5])).sum().backward()
    assert x.grad.dtype == np.float32
    assert x.grad.tolist() == [3, 5]


def test_numbers_do_not_widen_float32():
    x = leaf([1.0, 2.0], "float32")
    for y in (x * 2, 2.0 - x, x / np.float64(3), np.float64(3) * x, x**2.5, x**2, 2**x):
        assert y.dtype == np.float32
    assert F.maximum(0.0, x).dtype == np.float32
    assert Tensor([1.0, 2.0]).dtype == np.float32
    assert Tensor(np.array([1.0])).dtype == np.float64


# ---- Depth, memory, order ----


def test_a_chain_of_50_000_ops_needs_no_deep_recursion():
    x = leaf(1.0)
    y = x
    for _ in range(50_000):
        y = y + 0.0
    y.backward()
    assert x.grad.item() == 1

    y = x
    for _ in range(50_000):
        y = y + 0.0
    del y  # and neither does throwing such a chain away


def test_memory_is_freed_without_the_garbage_collector():
    """After backward, though y is still there, and after dropping y without it."""
    x, y = leaf(np.ones(3)), None
    gc.disable()
    try:
        for run_backward in (True, False):
            kept = np.ones(3)
            held = weakref.ref(kept)
            y = (x * kept).exp().sum()
            del kept
            assert held() is not None
            if run_backward:
                y.backward()
            else:
                del y
            assert held() is None
    finally:
        gc.enable()


def test_a_training_step_leaves_no_cycles():
    W, b = leaf(np.ones((4, 3))), leaf(np.ones(4))
    W.register_post_accumulate_grad_hook(lambda p: None)
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            F.cross_entropy(F.relu(F.linear(np.ones((2, 3)), W, b)), [0, 3]).backward()
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_a_leaf_with_a_hook_is_freed_when_it_is_dropped():
    x, calls = leaf([1.0]), []
    handle = x.register_post_accumulate_grad_hook(calls.append)
    held = weakref.ref(x)
    gc.disable()
    try:
        del x
        assert held() is None
        hooks = weakref.ref(handle)
        del handle
        assert hooks() is None
    finally:
        gc.enable()


def test_values_that_need_no_gradient_are_not_recorded():
    x = Tensor(np.ones(3))
    y = (x * 2).sum()
    assert not y.requires_grad
    assert y.is_leaf


def order_of_backward(y):
    """The names of the ops behind y, in the order in which their backward runs."""
    names = []
    nodes = [y._node]
    for node in nodes:
        nodes += [
            t for t in node.targets if t is not None and not isinstance(t, Tensor)
        ]
    for node in {id(node): node for node in nodes}.values():
        run = node.op.backward
        name = f"{node.op.name}"
        node.op.backward = lambda gy, run=run, name=name: (names.append(name), run(gy))[
            1
        ]
    y.backward(np.ones(y.shape))
    return names


def named(op, name):
    op.name = name
    return op


def test_ops_run_backward_from_the_youngest_to_the_oldest():
    x = leaf([1.0])
    a = apply(named(ops.Exp(), "a"), x)
    b = apply(named(ops.Neg(), "b"), x)
    c = apply(named(ops.Mul(), "c"), b, a)
    d = apply(named(ops.Add(), "d"), a, c)
    assert order_of_backward(d) == ["d", "c", "b", "a"]


def test_the_order_does_not_depend_on_hashes_or_addresses():
    program = """if True:
        import numpy as np
        from minddp.autograd import Tensor
        order, leaves = [], [Tensor(np.ones(1), requires_grad=True) for _ in range(20)]
        for i, x in enumerate(leaves):
            x.register_post_accumulate_grad_hook(lambda x, i=i: order.append(i))
        y = leaves[0]
        for x in leaves[1:] + leaves[::3]:
            y = y * x
        y.backward()
        print(order)
    """
    seen = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1")
    }
    assert len(seen) == 1


# ---- Hooks ----


def test_a_hook_is_called_once_per_backward_with_the_complete_gradient():
    x, seen = leaf([2.0]), []
    x.register_post_accumulate_grad_hook(lambda p: seen.append((p is x, p.grad.item())))
    (x * x + x * 3 + x).backward()
    assert seen == [(True, 2 * 2 + 3 + 1)]
    (x * 5).backward()
    assert seen == [(True, 8), (True, 13)]


def test_the_hook_of_a_late_layer_runs_before_an_early_layer_runs_backward():
    """This is what lets DDP send gradients while backward is still computing."""
    events = []

    class Spy(ops.Exp):
        def backward(self, gy):
            events.append("early layer runs")
            return super().backward(gy)

    early, late = leaf([1.0]), leaf([1.0])
    late.register_post_accumulate_grad_hook(lambda p: events.append("late is ready"))
    early.register_post_accumulate_grad_hook(lambda p: events.append("early is ready"))
    (apply(Spy(), early) * late).sum().backward()
    assert events == ["late is ready", "early layer runs", "early is ready"]


def test_a_leaf_used_early_and_late_is_ready_only_after_its_early_use():
    x, other, events = leaf([2.0]), leaf([1.0]), []
    x.register_post_accumulate_grad_hook(lambda p: events.append(("x", p.grad.item())))
    other.register_post_accumulate_grad_hook(lambda p: events.append("other"))
    h = x * 3.0
    (h * other * x).sum().backward()
    assert events == ["other", ("x", 12.0)]


def test_hooks_run_in_the_order_of_registration_and_can_be_removed():
    x, seen = leaf([1.0]), []
    for name in "abc":
        handle = x.register_post_accumulate_grad_hook(lambda p, n=name: seen.append(n))
        if name == "b":
            b = handle
    (x * 1).backward()
    b.remove()
    b.remove()
    (x * 1).backward()
    assert seen == ["a", "b", "c", "a", "c"]


def test_a_hook_may_change_the_parameter_at_once():
    x = leaf([1.0])

    def step(p):
        p -= 0.1 * p.grad
        p.grad = None

    x.register_post_accumulate_grad_hook(step)
    (x * 2).sum().backward()
    assert x.tolist() == [pytest.approx(0.8)]
    assert x.grad is None


def test_hooks_go_on_leaves_that_require_grad():
    with pytest.raises(UsageError, match="leaves"):
        Tensor([1.0]).register_post_accumulate_grad_hook(print)
    with pytest.raises(UsageError, match="leaves"):
        (leaf([1.0]) * 2).register_post_accumulate_grad_hook(print)


def test_a_queued_callback_runs_once_at_the_end_of_backward():
    x, w, events = leaf([1.0]), leaf([1.0]), []

    def hook(p):
        events.append("hook")
        queue_callback(lambda: events.append("callback"))

    w.register_post_accumulate_grad_hook(hook)
    x.register_post_accumulate_grad_hook(lambda p: events.append("last hook"))
    (x.exp() * w).sum().backward()
    assert events == ["hook", "last hook", "callback"]
    (x * 1).sum().backward()
    assert events == ["hook", "last hook", "callback", "last hook"]


def test_a_callback_waits_for_the_outermost_backward():
    x, y, events = leaf([1.0]), leaf([1.0]), []

    inner = (y * 2).sum()

    def hook(p):
        queue_callback(lambda: events.append("callback"))
        inner.backward()
        events.append("inner backward is over")

    x.register_post_accumulate_grad_hook(hook)
    (x * 3).sum().backward()
    assert y.grad.tolist() == [2]
    assert events == ["inner backward is over", "callback"]


def test_queue_callback_outside_of_backward_is_refused():
    with pytest.raises(UsageError, match="outside of backward"):
        queue_callback(print)


def test_a_backward_that_fails_forgets_its_callbacks_and_can_be_repeated():
    x, w, events = leaf([1.0]), leaf([1.0]), []

    def fail(p):
        raise RuntimeError("the link broke")

    w.register_post_accumulate_grad_hook(
        lambda p: queue_callback(lambda: events.append("callback"))
    )
    handle = x.register_post_accumulate_grad_hook(fail)
    with pytest.raises(RuntimeError, match="the link broke"):
        (x.exp() * w).sum().backward()
    handle.remove()
    (x * 1).sum().backward()
    assert events == []
    assert (x * 1).requires_grad  # recording is on again


def test_threads_do_not_see_each_others_backward_or_no_grad():
    recorded = []
    with no_grad():
        thread = threading.Thread(
            target=lambda: recorded.append((leaf([1.0]) * 2).requires_grad)
        )
        thread.start()
        thread.join()
    assert recorded == [True]

    x = leaf([1.0])
    inside, done = threading.Event(), threading.Event()
    x.register_post_accumulate_grad_hook(lambda p: (inside.set(), done.wait(10)))
    thread = threading.Thread(target=lambda: (x * 1).sum().backward())
    thread.start()
    assert inside.wait(10)
    with pytest.raises(UsageError, match="outside of backward"):
        queue_callback(print)
    done.set()
    thread.join()


# ---- Graphs, used up and retained ----


def test_a_second_backward_through_one_graph_is_refused():
    x = leaf([1.0])
    y = (x * x).sum()
    y.backward()
    with pytest.raises(UsageError, match="retain_graph"):
        y.backward()
    h = x.exp()
    (h * 2).sum().backward()
    with pytest.raises(UsageError, match="retain_graph"):
        (h * 3).sum().backward()  # a part of it is used up


def test_a_retained_graph_gives_the_same_gradient_again():
    x, labels = leaf([[1.0, 2.0], [0.5, -1.0]]), [0, 1]
    y = F.cross_entropy(F.softmax(x) * x, labels)
    y.backward(retain_graph=True)
    first = x.grad.data.copy()
    y.backward()
    np.testing.assert_allclose(x.grad.data, 2 * first)


def test_no_grad_records_nothing_as_a_statement_and_as_a_decorator():
    x = leaf([1.0])

    @no_grad()
    def double(x, depth=0):
        return double(x, depth + 1) if depth < 2 else x * 2

    with no_grad():
        assert not (x * 2).requires_grad
    assert not double(x).requires_grad
    assert (x * 2).requires_grad
    with pytest.raises(ZeroDivisionError), no_grad():
        _ = 1 / 0
    assert (x * 2).requires_grad


def test_one_no_grad_can_be_entered_again_and_within_itself():
    x, quiet = leaf([1.0]), no_grad()
    with quiet:
        with quiet:
            pass
        assert not (x * 2).requires_grad
    assert (x * 2).requires_grad
    with quiet:
        assert not (x * 2).requires_grad
    assert (x * 2).requires_grad


def test_no_grad_above_a_generator_is_refused_for_its_body_runs_later():
    def generator():
        yield 1

    async def coroutine():
        pass

    for function in (generator, coroutine):
        with pytest.raises(UsageError, match=function.__name__):
            no_grad()(function)


def test_detach_shares_the_array_and_drops_the_history():
    x = leaf([1.0, 2.0])
    y = (x * 2).detach()
    assert not y.requires_grad
    assert x.detach().data is x.data


# ---- Refusals ----


def test_integers_and_bools_cannot_require_a_gradient():
    for x in (np.arange(3), np.array([True])):
        with pytest.raises(TypeError, match="cannot require a gradient"):
            Tensor(x, requires_grad=True)
        with pytest.raises(UsageError, match=str(x.dtype)):
            Tensor(x).requires_grad_()


def test_backward_refuses_what_it_cannot_do():
    x = leaf([1.0, 2.0])
    with pytest.raises(UsageError, match=r"shape \(2,\) needs gradient="):
        (x * 2).backward()
    with pytest.raises(UsageError, match=r"gradient is \(3,\)"):
        (x * 2).backward(np.ones(3))
    with pytest.raises(UsageError, match="does not require grad"):
        Tensor(1.0).backward()
    with pytest.raises(UsageError, match="gradients of gradients"):
        (x * 2).sum().backward(create_graph=True)
    with pytest.raises(UsageError, match="leaves only"):
        (x * 2).requires_grad = False


def test_a_tensor_with_history_does_not_turn_into_an_array_silently():
    x = leaf([1.0])
    for f in (lambda: x.numpy(), lambda: np.asarray(x), lambda: np.array([x, x])):
        with pytest.raises(UsageError, match="detach"):
            f()
    with pytest.raises(TypeError):
        np.exp(x)
    assert np.asarray(x.detach()).tolist() == [1]
    assert (np.ones(1) * x).requires_grad  # an array on the left


def test_changing_a_leaf_in_place_is_refused_while_recording():
    x = leaf([1.0, 2.0])
    with pytest.raises(UsageError, match="no_grad"):
        x -= 1
    with pytest.raises(UsageError, match=r"not recorded|in place"):
        x[0] = 1.0
    array = x.data
    with no_grad():
        x -= 1
        x *= 4
        x /= 2
        x += 1
        x[0] = 7.0
    assert x.tolist() == [7, 3]
    assert x.data is array


def test_numbers_written_into_integers_never_lose_their_fraction():
    x = Tensor([1, 2, 3])
    with pytest.raises(UsageError, match="float64 does not fit into a tensor of int64"):
        x += 0.5
    with pytest.raises(UsageError, match="float64"):
        x /= 2
    with pytest.raises(UsageError, match="float32"):
        x[0] = Tensor([0.5])[0]
    with pytest.raises(UsageError, match="bool"):
        bits = Tensor([True])
        bits += 1
    x += 1
    x[0] = 7
    assert x.tolist() == [7, 3, 4]


def test_writing_in_place_refuses_what_does_not_fit_into_the_memory():
    locked = np.ones(2)
    locked.setflags(write=False)
    for array, b in ((locked, 1.0), (np.ones(2), np.ones((3, 2)))):
        x = Tensor(array)
        with pytest.raises(UsageError, match="cannot be written"):
            x *= b
        with pytest.raises(UsageError, match="cannot be written"):
            x[:] = b
        assert array.tolist() == [1, 1]


def test_adding_a_loss_to_a_running_total_keeps_the_history():
    x, total = leaf([2.0]), Tensor(np.zeros(()))
    for _ in range(3):
        total += (x * x).sum()
    total.backward()
    assert x.grad.tolist() == [12]


# What the public functions are called with, besides a tensor, where they need more.
TWO = np.full((2, 2), 2.0)
ARGUMENTS = {
    "F.linear": (TWO,), "F.matmul": (TWO,), "F.maximum": (TWO,), "F.minimum": (TWO,),
    "F.mse_loss": (TWO,), "F.binary_cross_entropy_with_logits": (TWO,),
    "F.cross_entropy": (TWO,), "F.broadcast_to": ((3, 2, 2),),
    "Tensor.reshape": (4,), "Tensor.view": (4,), "Tensor.permute": (1, 0),
    "Tensor.transpose": (0, 1), "Tensor.split": (2,), "Tensor.to": ("float32",),
    "F.layer_norm": (2,), "F.rms_norm": (2,), "F.nll_loss": ([0, 1],),
    "F.kl_div": (TWO,), "F.l1_loss": (TWO,), "F.smooth_l1_loss": (TWO,),
    "F.scaled_dot_product_attention": (TWO, TWO), "F.pad": ((1, 0),),
    "Tensor.softmax": (1,), "Tensor.log_softmax": (0,), "Tensor.pow": (2,),
    "Tensor.cumsum": (0,), "Tensor.clamp": (1.5, 3.5), "Tensor.clip": (1.5,),
    "Tensor.gather": (0, [[0, 0]]), "Tensor.chunk": (2,), "Tensor.unsqueeze": (0,),
    "Tensor.expand": (3, -1, 2), "Tensor.expand_as": (Tensor(np.ones((3, 2, 2))),),
    "Tensor.repeat": (2, 1), "Tensor.masked_fill": (TWO > 3, 0.0),
    "Tensor.type_as": (Tensor([1.0]),),
}  # fmt: skip
# Those that do not take the tensor first.
CALLS = {
    "F.conv2d": lambda x: F.conv2d(x.reshape(1, 1, 2, 2), x.reshape(1, 1, 2, 2)),
    "F.conv1d": lambda x: F.conv1d(x, x.reshape(1, 2, 2)),
    "F.conv_transpose2d": lambda x: F.conv_transpose2d(
        x.reshape(1, 1, 2, 2), x.reshape(1, 1, 2, 2)
    ),
    "F.max_pool2d": lambda x: F.max_pool2d(x.reshape(1, 2, 2), 2),
    "F.avg_pool2d": lambda x: F.avg_pool2d(x.reshape(1, 2, 2), 2),
    "F.adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x.reshape(1, 2, 2), 1),
    "F.interpolate": lambda x: F.interpolate(x.reshape(1, 1, 2, 2), 3),
    "F.embedding": lambda x: F.embedding([0, 1], x),
    "F.where": lambda x: F.where([True, False], x, 2.0),
    "F.cat": lambda x: F.cat([x, x]),
    "F.stack": lambda x: F.stack([x, x]),
    "F.einsum": lambda x: F.einsum("ij,jk->ik", x, x),
    "Tensor.sort": lambda x: x.sort().values,
    "Tensor.topk": lambda x: x.topk(1).values,
    "F.batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
}
# Positions and classes cannot move a little, so they have no gradient.
NOT_DIFFERENTIABLE = [
    "Tensor.argmax", "Tensor.argmin", "Tensor.argsort", "Tensor.multinomial",
    "Tensor.any", "Tensor.all", "Tensor.long", "Tensor.int", "Tensor.bool", "F.one_hot",
]  # fmt: skip
# These return no function of the values.
OTHERS = [
    "backward", "detach", "dim", "size", "item", "numel", "numpy", "tolist", "zero_",
    "register_post_accumulate_grad_hook", "requires_grad_", "graph",
    "fill_", "copy_", "add_", "sub_", "mul_", "div_",
]  # fmt: skip


def public_functions():
    functions = {
        f"F.{name}": f
        for name, f in vars(F).items()
        if inspect.isfunction(f) and f.__module__ == F.__name__
    }
    methods = {f"Tensor.{name}": f for name, f in vars(Tensor).items() if callable(f)}
    skipped = [f"Tensor.{name}" for name in OTHERS] + NOT_DIFFERENTIABLE
    for name, f in (functions | methods).items():
        if "._" not in name and name not in skipped:
            yield name, f


@pytest.mark.parametrize(("name", "f"), list(public_functions()))
def test_every_public_function_keeps_the_history(name, f):
    x = leaf([[1.0, 2.0], [3.0, 4.0]])
    y = CALLS[name](x) if name in CALLS else f(x, *ARGUMENTS.get(name, ()))
    y = y[0] if isinstance(y, list) else y
    y.sum().backward()
    assert x.grad.shape == x.shape


def test_what_has_no_gradient_does_not_claim_one():
    x = leaf([[1.0, 2.0], [3.0, 4.0]])
    for y in (x.argmax(), x.long(), x > 2, F.one_hot([0, 1], 2), x.argsort(), x.any()):
        assert not y.requires_grad


# ---- Tensors as values ----


def test_a_tensor_reads_like_a_torch_tensor():
    x = Tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    assert x.shape == x.size() == (2, 3)
    assert x.size(-1) == 3
    assert (len(x), x.ndim, x.dim(), x.numel()) == (2, 2, 2, 6)
    assert [row.tolist() for row in x] == [[1, 2, 3], [4, 5, 6]]
    assert (x > 2).tolist() == [[False, False, True], [True, True, True]]
    assert (x == x).dtype == np.bool_
    assert x.argmax(1).tolist() == [2, 2]
    assert x.device == Device("cpu") == "cpu"
    assert f"{x.mean():.2f}" == "3.50"
    assert float(x.sum()) == 21
    assert list(range(5))[Tensor(np.array(3))] == 3
    assert bool(x.sum() > 20)
    assert repr(Tensor([1.0, 2.5])) == "Tensor([1. , 2.5], dtype=float32)"
    assert "requires_grad=True" in repr(leaf([1.0]))
    assert x.to("float32") is x
    assert x.to("cpu") is x
    assert x.long().dtype == np.int64
    assert x.zero_().tolist() == [[0, 0, 0], [0, 0, 0]]


def test_a_tensor_is_a_dict_key_by_identity():
    x, y = leaf([1.0]), leaf([1.0])
    assert {x: 1, y: 2}[x] == 1


@pytest.mark.parametrize(
    "junk",
    [
        "abc", np.str_("1.5"), None, 1j, np.complex64(1j), np.ones(1, complex),
        np.array([1, None]), np.array(["1"]), 10**400, [[1], [2, 3]], [1j],
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_real_number_is_no_tensor_and_no_operand(junk):
    x, array = leaf([1.0]), Tensor([1.0])
    for use in (
        lambda: Tensor(junk),
        lambda: x * junk,
        lambda: junk - x,
        lambda: x < junk,
        lambda: F.where(x > 0, x, junk),
        lambda: array.__iadd__(junk),
        lambda: array.__setitem__(0, junk),
        lambda: F.mse_loss(x, junk),
    ):
        with pytest.raises(UsageError, match=r"real numbers|no Tensor can hold"):
            use()


def test_a_tensor_never_becomes_complex():
    with pytest.raises(UsageError, match="complex64"):
        leaf([1.0]).to("complex64")
    with pytest.raises(UsageError, match="complex64"):
        Tensor([1.0], dtype="complex64")


MATRIX = Tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])


@pytest.mark.parametrize(
    "call",
    [
        lambda: MATRIX.transpose(0, 3),
        lambda: MATRIX.permute(None),
        lambda: MATRIX.flatten(5),
        lambda: MATRIX.flatten(1, 0),
        lambda: MATRIX.reshape(None),
        lambda: MATRIX.split(0),
        lambda: MATRIX.split(-1),
        lambda: MATRIX.split(1, dim=2),
        lambda: Tensor(1.0).split(1),
        lambda: MATRIX.size(2),
        lambda: MATRIX.size("rows"),
        lambda: MATRIX.argmax(2),
        lambda: MATRIX.sum(2),
        lambda: MATRIX.to("junk"),
        lambda: MATRIX.to(None),
        lambda: MATRIX[2],
        lambda: MATRIX**10**400,
        lambda: Tensor(np.array([1], "int8")) + 300,
        lambda: F.cat([]),
        lambda: F.stack([]),
        lambda: F.cat([Tensor(1.0), Tensor(2.0)]),
        lambda: F.cat([MATRIX, MATRIX], dim=2),
        lambda: F.stack([MATRIX, MATRIX], dim=3),
        lambda: F.softmax(MATRIX, dim=2),
        lambda: F.broadcast_to(MATRIX, (2, 4)),
        lambda: MATRIX.var(False),
        lambda: MATRIX.long().std(),
        lambda: MATRIX.cumsum(2),
        lambda: MATRIX.prod(2),
        lambda: MATRIX.sort(2),
        lambda: MATRIX.topk(4),
        lambda: MATRIX.topk(-1),
        lambda: MATRIX.gather(0, [0]),
        lambda: MATRIX.gather(0, [[2]]),
        lambda: MATRIX.gather(1, [[0], [0], [0]]),
        lambda: MATRIX.clamp(),
        lambda: MATRIX.clamp(MATRIX),
        lambda: MATRIX.masked_fill([1, 0, 1], 0.0),
        lambda: MATRIX[0].tril(),
        lambda: MATRIX.chunk(0),
        lambda: MATRIX.squeeze(2),
        lambda: MATRIX.unsqueeze(3),
        lambda: MATRIX.expand(4, 3),
        lambda: MATRIX.expand(-1, 2, 3),
        lambda: MATRIX.repeat(2),
        lambda: MATRIX.repeat(-1, 1),
        lambda: MATRIX.flip(2),
        lambda: Tensor([1.0, -1.0]).multinomial(1),
        lambda: Tensor([1.0, 0.0]).multinomial(2),
        lambda: Tensor([[1.0, 1.0], [0.0, 0.0]]).multinomial(1, replacement=True),
        lambda: Tensor([1.0, float("nan")]).multinomial(1),
        lambda: Tensor(1.0).multinomial(1),
        lambda: manual_seed(-1),
    ],
    ids=inspect.getsource,
)
def test_arguments_that_cannot_work_are_usage_errors(call):
    with pytest.raises(UsageError):
        call()


def test_an_index_past_the_end_ends_a_loop_as_it_does_for_a_list():
    class Rows:
        def __getitem__(self, i):
            return MATRIX[i]

    assert [row.tolist() for row in Rows()] == [[1, 2, 3], [4, 5, 6]]


def test_a_copy_has_data_and_grad_but_neither_hooks_nor_graph():
    class Reducer:
        """Like a DDP: it holds what no copy can take along."""

        def __init__(self):
            self.lock, self.calls = threading.Lock(), 0

        def hook(self, p):
            self.calls += 1

    x, reducer = leaf([1.0, 2.0]), Reducer()
    x.register_post_accumulate_grad_hook(reducer.hook)
    (x * 3).sum().backward()
    for y in (copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
        assert (y.tolist(), y.grad.tolist(), y.requires_grad) == ([1, 2], [3, 3], True)
        assert not np.shares_memory(y.data, x.data)
        assert not np.shares_memory(y.grad.data, x.grad.data)
        (y * 3).sum().backward()
        assert y.grad.tolist() == [6, 6]
    assert reducer.calls == 1
    with pytest.raises(UsageError, match="leaves"):
        copy.deepcopy(x * 2)


# ---- Devices and random numbers ----


def test_a_gpu_that_is_not_there_is_refused_with_what_to_do():
    with pytest.raises(UsageError, match="'cpu'"):
        Device("cuda:0")
    with pytest.raises(UsageError, match="'cpu'"):
        Tensor([1.0]).to("cuda")
    with pytest.raises(UsageError, match="no device 'tpu'"):
        Device("tpu")


def test_each_thread_has_a_random_stream_of_its_own():
    def draw():
        manual_seed(1)
        other.append(generator().random())

    manual_seed(0)
    straight = [generator().random() for _ in range(2)]
    manual_seed(0)
    first, other = generator().random(), []
    thread = threading.Thread(target=draw)
    thread.start()
    thread.join()
    assert [first, generator().random()] == straight
    assert other == [np.random.default_rng(1).random()]


def test_a_tensor_is_compared_with_numbers_and_is_simply_unequal_to_none():
    x = Tensor([1.0, 2.0])
    assert (x == 1.0).tolist() == [True, False]
    assert (x != x).tolist() == [False, False]
    assert (x == None) is False and (x != None) is True  # noqa: E711
    assert (x == "cpu") is False


# ---- A place for gradients ----


def with_home(x):
    t = leaf(x)
    t.grad_home = np.full(t.shape, np.nan)
    return t


def test_a_layers_first_gradient_is_written_where_it_is_at_home():
    W = with_home([[1.0, 2.0]])
    for _ in range(2):
        F.linear([[3.0, 4.0]], W).sum().backward()
        assert W.grad.data is W.grad_home
    assert W.grad_home.tolist() == [[6.0, 8.0]], "the second has been added"


def test_a_weight_used_twice_gets_both_gradients_at_its_home():
    W = with_home([[2.0, 0.0], [0.0, 3.0]])
    F.linear(F.linear([[1.0, 1.0]], W), W).sum().backward()
    other = leaf([[2.0, 0.0], [0.0, 3.0]])
    F.linear(F.linear([[1.0, 1.0]], other), other).sum().backward()
    assert W.grad.data is W.grad_home
    assert W.grad_home.tolist() == other.grad.tolist()


def test_a_home_of_another_dtype_than_the_arithmetic_is_as_good():
    W = Tensor(np.ones((1, 2), np.float32), requires_grad=True)
    W.grad_home = np.zeros((1, 2), np.float32)
    F.linear(np.array([[3.0, 4.0]]), W).sum().backward()
    assert W.grad.data is W.grad_home
    assert W.grad.tolist() == [[3.0, 4.0]]


def test_other_ops_leave_the_home_alone_and_a_copy_has_none():
    W = with_home([1.0, 2.0])
    (W * W).sum().backward()
    assert W.grad.tolist() == [2.0, 4.0]
    assert np.isnan(W.grad_home).all()
    assert copy.deepcopy(W).grad_home is None


def test_the_last_input_of_an_op_gets_its_gradient_first():
    order = []
    W, b = leaf([[1.0]]), leaf([1.0])
    for name, t in (("W", W), ("b", b)):
        t.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    F.linear([[1.0]], W, b).sum().backward()
    assert order == ["b", "W"]


# ---- As in PyTorch, where NumPy would do otherwise ----


def test_a_number_beside_an_array_is_an_index_of_its_own_also_in_assignments():
    x, rows = Tensor(np.zeros((2, 3, 4))), np.array([2, 0])
    v = np.arange(6.0).reshape(3, 2)
    x[1, :, rows] = v
    assert x[1, :, rows].tolist() == v.tolist()
    assert x.data[1, :, 2].tolist() == [0, 2, 4]


def test_integers_take_on_the_dtype_of_floats_beside_them():
    x, i = Tensor(np.ones(2, np.float32)), Tensor(np.array([1, 2]))
    mask = Tensor(np.array([True, False]))
    zero_d = Tensor(np.array(2.0))
    for y in (
        x * i,
        i * x,
        x + mask,
        i / x,
        x * zero_d,
        zero_d - x,
        i / i,
        i / 2,
        i * 0.5,
    ):
        assert y.dtype == np.float32, y
    assert (i * 2).dtype == np.int64
    assert (x * Tensor(np.ones(2))).dtype == np.float64
    assert F.mse_loss(x, i).dtype == np.float32


def test_the_largest_along_an_axis_come_with_where_they_are():
    x = leaf([[1.0, 5.0, 5.0], [4.0, 2.0, 3.0]])
    values, where = x.max(1)
    assert (values.tolist(), where.tolist()) == ([5.0, 4.0], [1, 0])
    values.sum().backward()
    assert x.grad.tolist() == [[0, 1, 0], [1, 0, 0]]
    assert x.min(0, keepdim=True).values.tolist() == [[1.0, 2.0, 3.0]]
    assert x.max().item() == 5.0


def test_copies_are_copies_and_an_element_is_a_view():
    x = Tensor(np.arange(6.0).reshape(2, 3))
    for copied in (x.flip(0), x.T.contiguous(), x.clone()):
        copied += 1
    assert x.tolist() == [[0, 1, 2], [3, 4, 5]]
    element = x[1, 2]
    element += 10
    assert x[1, 2].item() == 15
    assert x.contiguous() is x


def test_to_takes_device_and_dtype_in_any_way():
    x = Tensor(np.ones(2))
    for y in (
        x.to("cpu", np.float32),
        x.to(device="cpu", dtype="float32"),
        x.to(Tensor(np.ones(1, np.float32))),
        x.to(dtype="float32", non_blocking=True).cpu(),
    ):
        assert y.dtype == np.float32
    with pytest.raises(UsageError):
        x.to()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_sums_over_many_rows_do_not_drift(dtype):
    rows = 50_000 if dtype == "float16" else 2_000_000
    x = Tensor(np.full((rows, 2), 0.1, dtype))
    exact = float(np.array(0.1, dtype)) * rows
    near = {"rel": 1e-3 if dtype == "float16" else 1e-6}
    assert x.sum(0)[0].item() == pytest.approx(exact, **near)
    assert x.mean(0)[0].item() == pytest.approx(exact / rows, **near)
    assert x.cumsum(0)[-1, 0].item() == pytest.approx(exact, **near)
    assert (x + 10).var(0)[0].item() < 1e-4
    b = Tensor(np.zeros(2, dtype), requires_grad=True)
    (x * 0 + b).backward(x.data)
    assert b.grad[0].item() == pytest.approx(exact, **near)


@pytest.mark.parametrize("f", [F.softmax, F.log_softmax])
def test_softmax_of_many_in_half_precision_adds_up(f):
    y = f(Tensor(np.zeros((5000, 1), np.float16)), 0).data.astype("f8")
    total = y.sum() if f is F.softmax else np.exp(y).sum()
    assert total == pytest.approx(1, rel=0.02)


def test_a_cube_is_exact_and_has_its_gradient():
    x = leaf([-2.0, 3.0])
    y = x**3
    y.sum().backward()
    assert (y.tolist(), x.grad.tolist()) == ([-8.0, 27.0], [12.0, 27.0])
