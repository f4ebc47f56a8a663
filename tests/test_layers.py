"""Imports point down, and the two columns meet in ddp.py only."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "minddp"

GROUND = ["errors", "environment"]
COMPUTE = [
    *("device", "tensor_ops", "neural_ops", "spatial_ops", "autograd", "functional"),
    *("creation", "torch_names", "module", "init", "nn", "lr_scheduler", "optim"),
    *("data", "checkpoint"),
]
COMMUNICATE = [
    *("bfloat16", "frame", "handshake", "net", "netlab", "lobby", "verdict"),
    "control",
    *(
        "rendezvous",
        "combine",
        "ring",
        "work",
        "mailbox",
        "rooted",
        "shm",
        "hierarchy",
    ),
    *(
        "payload",
        "backends.tcp",
        "backends.memory",
        "backends.nccl",
        "backends.mpi",
        "backends",
    ),
    *("group", "distributed"),
]
MEET = [
    *("replicas", "buckets", "comm_hooks", "join", "nonfinite", "ddp_logger"),
    *("reducer", "ddp", "powersgd", "local_sgd", "sync_batch_norm", "amp"),
]
AROUND = [
    *("progress", "relay", "supervise", "launch", "multiprocessing", "testing"),
    *("bench_clock", "bench_limits", "bench_gloo", "bench_collectives", "bench_step"),
    *("bench_rendezvous", "bench_table", "bench_plot", "bench"),
    *("__init__", "__main__"),
]

# A module may import those before it in a list that contains it.
ORDERS = [
    GROUND + COMPUTE + MEET + AROUND,
    GROUND + COMMUNICATE + MEET + AROUND,
]
PACKAGES = ("minddp", "minddp.backends")
RUNS_CODE = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}


def modules():
    """Dotted names below minddp; a package goes by its own, as "backends"."""
    paths = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py")]
    names = [".".join(path.with_suffix("").parts) for path in paths]
    return sorted(name.removesuffix(".__init__") for name in names)


def source(module):
    path = PACKAGE.joinpath(*module.split("."))
    return (
        path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    ).read_text()


def imports(module):
    """The dotted names that a module imports, anywhere in its text."""
    for node in ast.walk(ast.parse(source(module))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module in PACKAGES:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            yield node.module


def own_imports(module):
    for name in imports(module):
        if name.startswith("minddp."):
            inner = name.removeprefix("minddp.")
            yield inner if inner in modules() else inner.split(".")[0]


def test_every_module_has_its_place():
    known = GROUND + COMPUTE + COMMUNICATE + MEET + AROUND
    assert modules() == sorted(known)


@pytest.mark.parametrize("module", modules())
def test_imports_point_down(module):
    below = {
        name
        for order in ORDERS
        if module in order
        for name in order[: order.index(module)]
    }
    wrong = [name for name in own_imports(module) if name not in below]
    assert not wrong, f"{module}.py must not import {wrong}"


def test_only_net_knows_sockets():
    assert [module for module in modules() if "socket" in imports(module)] == ["net"]


def test_only_device_and_nccl_import_cupy_and_only_when_asked():
    for module in modules():
        assert not {"cupy", "cupyx"} & {name.split(".")[0] for name in imports(module)}
    users = [m for m in modules() if 'import_module("cupy' in source(m)]
    assert users == ["backends.nccl", "device"]


@pytest.mark.parametrize("module", modules())
def test_nothing_that_is_received_or_read_can_run_code(module):
    tree = ast.parse(source(module))
    assert not RUNS_CODE & {name.split(".")[0] for name in imports(module)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = getattr(node.func, "id", None)
            assert called not in ("eval", "exec", "compile"), f"line {node.lineno}"
            for keyword in node.keywords:
                if keyword.arg == "allow_pickle":
                    assert isinstance(keyword.value, ast.Constant)
                    assert keyword.value.value is False


@pytest.mark.parametrize("module", modules())
def test_every_module_opens_with_its_lesson(module):
    text = ast.get_docstring(ast.parse(source(module)))
    assert text, f"{module}.py has no docstring"
    lesson = module not in ("__init__", "__main__", "progress")
    assert not lesson or ("In PyTorch" in text and "Left out" in text)
