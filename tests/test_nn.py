"""Modules: names in definition order, tied parameters, saving and loading."""

import copy
import threading
from functools import partial

import numpy as np
import pytest

from minddp import functional as F
from minddp import nn
from minddp.autograd import Tensor
from minddp.device import manual_seed
from minddp.errors import UsageError


class Block(nn.Module):
    """Parameters, a buffer and children, defined in an order that no sorting gives."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(3, 2)
        self.scale = nn.Parameter(np.ones(1))
        self.register_buffer("mean", np.zeros(2))
        self.act = nn.ReLU()
        self.body = nn.ModuleList([nn.Linear(3, 3, bias=False), nn.Dropout(0.5)])

    def forward(self, x):
        for layer in self.body:
            x = self.act(layer(x))
        return self.out(x) * self.scale - self.mean


class Tied(nn.Module):
    """An embedding whose table is also the weight of the last layer."""

    def __init__(self):
        self.table = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        return self.head(self.table(ids))


def mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


# ---- Names and order ----


def test_parameters_come_in_the_order_of_definition():
    names = [name for name, _ in Block().named_parameters()]
    assert names == ["out.weight", "out.bias", "scale", "body.0.weight"]
    assert [name for name, _ in Block().named_buffers()] == ["mean"]
    assert [p.shape for p in mlp().parameters()] == [(8, 4), (8,), (3, 8), (3,)]


def test_modules_are_found_each_once():
    names = [name for name, _ in Block().named_modules()]
    assert names == ["", "out", "act", "body", "body.0", "body.1"]
    shared = nn.ReLU()
    assert len(list(nn.Sequential(shared, shared).modules())) == 2


def test_a_tied_parameter_is_listed_once_and_its_hook_sees_both_uses():
    model, calls = Tied(), []
    assert [name for name, _ in model.named_parameters()] == ["table.weight"]
    weight = model.table.weight
    weight.register_post_accumulate_grad_hook(
        lambda p: calls.append(p.grad.data.copy())
    )
    model(np.array([1, 2])).sum().backward()

    ones = np.ones((2, 5))
    of_head = ones.T @ weight.data[[1, 2]]
    of_table = np.zeros((5, 3))
    of_table[[1, 2]] = ones @ weight.data
    assert len(calls) == 1
    np.testing.assert_allclose(calls[0], of_head + of_table, rtol=1e-5)


# ---- Saving and loading ----


def test_a_state_dict_carries_a_model_into_another():
    manual_seed(0)
    a, b, x = Block().eval(), Block().eval(), np.ones((2, 3), "float32")
    assert a(x).tolist() != b(x).tolist()
    assert b.load_state_dict(a.state_dict()) == ([], [])
    assert a(x).tolist() == b(x).tolist()
    assert list(a.state_dict()) == [
        "out.weight", "out.bias", "scale", "mean", "body.0.weight",
    ]  # fmt: skip


def test_loading_writes_into_the_parameters_that_are_there():
    model = mlp()
    before = [(id(p), id(p.data)) for p in model.parameters()]
    model.load_state_dict({k: v.data + 1 for k, v in model.state_dict().items()})
    assert [(id(p), id(p.data)) for p in model.parameters()] == before


def test_a_tie_survives_saving_and_loading():
    model = Tied()
    state = copy.deepcopy(model.state_dict())
    assert list(state) == ["table.weight", "head.weight"]
    for tensor in state.values():
        tensor.data[...] = 7
    model.load_state_dict(state)
    assert model.head.weight is model.table.weight
    assert (model.table.weight.data == 7).all()


def test_loading_lists_all_that_is_wrong_and_changes_nothing():
    model = mlp()
    state = {k: v.data + 1 for k, v in model.state_dict().items()}
    state["3.weight"] = state.pop("0.bias")
    state["2.bias"] = np.zeros(99)
    before = [p.data.copy() for p in model.parameters()]
    with pytest.raises(UsageError) as caught:
        model.load_state_dict(state)
    for text in ("missing: 0.bias", "unexpected: 3.weight", "2.bias is (3,)", "(99,)"):
        assert text in str(caught.value)
    for p, old in zip(model.parameters(), before, strict=True):
        np.testing.assert_array_equal(p.data, old)


def test_loading_less_strictly_reports_what_did_not_match():
    model = mlp()
    missing, unexpected = model.load_state_dict({"2.bias": [1, 2, 3], "x": 0}, False)
    assert missing == ["0.weight", "0.bias", "2.weight"]
    assert unexpected == ["x"]
    assert model[2].bias.tolist() == [1, 2, 3]
    with pytest.raises(UsageError, match="misshapen"):
        model.load_state_dict({"2.bias": [1, 2]}, strict=False)


def test_a_copied_model_shares_nothing():
    a = Tied()
    b = copy.deepcopy(a)
    assert b.head.weight is b.table.weight is not a.table.weight
    assert not np.shares_memory(b.head.weight.data, a.head.weight.data)


def test_a_copied_model_leaves_the_hooks_with_the_original():
    a, lock = Tied(), threading.Lock()
    hook = partial(print, lock)  # no copy can take a lock along
    a.table.weight.register_post_accumulate_grad_hook(hook)
    b = copy.deepcopy(a)
    assert b.head.weight is b.table.weight
    b(np.array([1, 2])).sum().backward()
    assert a.table.weight.grad is None


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (np.zeros(3, complex), "no tensor: 2.bias, .*complex128"),
        (np.array(["1", "2", "3"]), "no tensor: 2.bias, .*<U1"),
        ([1, 2, "x"], "no tensor: 2.bias"),
        ([[1], [2, 3]], "no tensor: 2.bias"),
        (None, "no tensor: 2.bias"),
    ],
)
def test_loading_what_is_no_real_number_changes_nothing(value, match):
    model = mlp()
    state = {k: v.data + 1 for k, v in model.state_dict().items()}
    before = [p.data.copy() for p in model.parameters()]
    with pytest.raises(UsageError, match=match):
        model.load_state_dict({**state, "2.bias": value})
    for p, old in zip(model.parameters(), before, strict=True):
        np.testing.assert_array_equal(p.data, old)


def test_loading_never_cuts_the_fraction_off_a_number():
    model = nn.Module()
    model.register_buffer("count", np.array(3))
    with pytest.raises(UsageError, match="mistyped: count is int64 here, float32"):
        model.load_state_dict({"count": 2.5})
    model.load_state_dict({"count": 2})
    assert model.count.item() == 2


# ---- Settings ----


def test_train_and_eval_reach_every_module():
    model = Block()
    assert model.training
    assert model.eval() is model
    assert not any(module.training for module in model.modules())
    model.train()
    assert all(module.training for module in model.modules())


def test_dropout_is_the_identity_in_eval():
    layer, x = nn.Dropout(0.9), np.ones((4, 4))
    assert layer.eval()(x).tolist() == x.tolist()
    assert layer.train()(x).tolist() != x.tolist()


def test_zero_grad_drops_gradients_or_clears_them_in_place():
    model = mlp()
    model(np.ones((2, 4), "float32")).sum().backward()
    grads = [p.grad.data for p in model.parameters()]
    model.zero_grad(set_to_none=False)
    for p, g in zip(model.parameters(), grads, strict=True):
        assert p.grad.data is g
        assert (g == 0).all()
    model.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_frozen_parameters_get_no_gradient():
    model = mlp()
    model[0].requires_grad_(False)
    model(np.ones((2, 4), "float32")).sum().backward()
    assert [p.grad is None for p in model.parameters()] == [True, True, False, False]


def test_to_changes_floats_and_keeps_the_parameter_objects():
    model = Block()
    model.register_buffer("count", np.array(3))
    before = [id(p) for p in model.parameters()]
    assert model.to("float64").to("cpu") is model
    assert [id(p) for p in model.parameters()] == before
    assert {p.dtype for p in model.parameters()} == {np.dtype("float64")}
    assert model.count.dtype == np.int64
    assert all(p.requires_grad and p.is_leaf for p in model.parameters())


@pytest.mark.parametrize("target", ["int64", "complex64", "junk", None])
def test_to_refuses_what_would_not_leave_floats_floats(target):
    model = mlp()
    with pytest.raises(UsageError, match="to\\("):
        model.to(target)
    assert {p.dtype for p in model.parameters()} == {np.dtype("float32")}


def test_apply_visits_children_before_their_parent():
    seen = []
    model = nn.Sequential(nn.ReLU(), nn.Sequential(nn.Tanh()))
    model.apply(lambda module: seen.append(type(module).__name__))
    assert seen == ["ReLU", "Tanh", "Sequential", "Sequential"]


# ---- Layers and containers ----


def test_linear_starts_uniform_and_is_reproducible():
    manual_seed(0)
    a = nn.Linear(100, 50)
    manual_seed(0)
    b = nn.Linear(100, 50)
    assert (a.weight.data == b.weight.data).all()
    assert a.weight.shape == (50, 100)
    assert a.weight.dtype == a.bias.dtype == np.float32
    assert 0.099 < abs(a.weight.data).max() <= 0.1  # 1 / sqrt(100)
    assert nn.Linear(2, 3, dtype="float64").weight.dtype == np.float64
    assert nn.Linear(2, 3, bias=False).bias is None


@pytest.mark.parametrize(
    ("layer", "f"),
    [
        (nn.ReLU(), F.relu),
        (nn.Tanh(), F.tanh),
        (nn.Sigmoid(), F.sigmoid),
        (nn.GELU(), F.gelu),
        (nn.Identity(), lambda x: Tensor(x)),
        (nn.Flatten(), lambda x: Tensor(x.reshape(2, 6))),
    ],
)
def test_layers_are_their_functions(layer, f):
    x = np.linspace(-2, 2, 12).reshape(2, 3, 2)
    assert Tensor(layer(x)).tolist() == f(x).tolist()


@pytest.mark.parametrize(
    ("loss", "f", "target"),
    [
        (nn.CrossEntropyLoss(), F.cross_entropy, np.array([0, 2])),
        (nn.MSELoss(), F.mse_loss, np.ones((2, 3))),
        (nn.BCEWithLogitsLoss(), F.binary_cross_entropy_with_logits, np.ones((2, 3))),
    ],
)
def test_loss_modules_are_their_functions(loss, f, target):
    x = np.linspace(-2, 2, 6).reshape(2, 3)
    assert loss(x, target).item() == f(x, target).item()


def test_containers_hold_modules():
    model = mlp()
    assert len(model) == 3
    assert model[-1] is list(model)[2]
    parts = nn.ModuleDict({"b": nn.ReLU(), "a": nn.Linear(2, 2)})
    assert list(parts) == parts.keys() == ["b", "a"]
    assert "a" in parts
    assert [name for name, _ in parts.named_parameters()] == ["a.weight", "a.bias"]
    with pytest.raises(UsageError, match="'keys' is an attribute"):
        parts["keys"] = nn.ReLU()
    assert nn.ModuleList().append(parts)[0] is parts


def test_a_model_prints_as_a_tree():
    assert repr(nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.Dropout(0.1)))) == (
        "Sequential(\n"
        "  (0): Linear(4, 8, bias=True)\n"
        "  (1): Sequential(\n"
        "    (0): Dropout(p=0.1)\n"
        "  )\n"
        ")"
    )


# ---- States that come from elsewhere ----


def small_cnn():
    return nn.Sequential(
        *(nn.Conv2d(1, 2, 3, bias=False), nn.BatchNorm2d(2), nn.ReLU()),
        *(nn.Flatten(), nn.LayerNorm(8), nn.Linear(8, 3)),
    )


# As `torch.nn` names and shapes the state of the same modules.
STATE_OF_TORCH = {
    "0.weight": (2, 1, 3, 3),
    "1.weight": (2,),
    "1.bias": (2,),
    "1.running_mean": (2,),
    "1.running_var": (2,),
    "1.num_batches_tracked": (),
    "4.weight": (8,),
    "4.bias": (8,),
    "5.weight": (3, 8),
    "5.bias": (3,),
}


def test_a_state_has_the_names_and_shapes_that_it_has_in_pytorch():
    state = small_cnn().state_dict()
    assert {name: t.shape for name, t in state.items()} == STATE_OF_TORCH


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_a_state_goes_through_files_that_pytorch_can_write_and_read(kind, tmp_path):
    file = tmp_path / f"state.{kind}"
    ours, theirs = small_cnn(), small_cnn()
    arrays = {name: t.numpy() for name, t in ours.state_dict().items()}
    if kind == "npz":
        np.savez(file, **arrays)
        loaded = dict(np.load(file))
    else:
        from safetensors.numpy import load_file, save_file

        save_file(arrays, file)
        loaded = load_file(file)
    theirs.load_state_dict(loaded)
    for name, t in theirs.state_dict().items():
        assert t.numpy().tobytes() == arrays[name].tobytes(), name


# ---- What would get lost ----


def test_containers_take_modules_only_and_number_them_anew():
    for make in (
        lambda: nn.Sequential(nn.Linear(2, 2), F.relu),
        lambda: nn.ModuleList([3]),
        lambda: nn.ModuleDict({"a": np.zeros(3)}),
    ):
        with pytest.raises(UsageError, match="holds modules"):
            make()
    named = nn.Sequential({"first": nn.Linear(2, 3), "second": nn.ReLU()})
    assert [name for name, _ in named.named_children()] == ["first", "second"]
    layers = nn.ModuleList([nn.Linear(1, 1), nn.Linear(2, 2), nn.Linear(3, 3)])
    del layers.__dict__["1"]
    layers.append(nn.Linear(4, 4))
    assert [layer.weight.shape[0] for layer in layers] == [1, 3, 4]


def test_a_tensor_in_place_of_a_parameter_is_refused_and_of_a_buffer_taken_over():
    m = nn.BatchNorm1d(2)
    with pytest.raises(UsageError, match=r"BatchNorm1d\.weight is a Parameter"):
        m.weight = Tensor(np.ones(2))
    m.weight = nn.Parameter(np.full(2, 3.0))
    m.running_mean = m.running_mean * 0.9 + 1.0
    assert m.state_dict()["running_mean"].tolist() == [1.0, 1.0]
    m.bias = None
    assert "bias" not in m.state_dict()


def test_a_module_is_converted_as_a_whole():
    m = nn.Linear(2, 2)
    for convert, dtype in ((m.double, "float64"), (m.half, "float16"), (m.float, "f4")):
        assert convert() is m
        assert m.weight.dtype == dtype
    assert nn.ReLU(inplace=True)(np.array([-1.0, 2.0])).tolist() == [0.0, 2.0]
