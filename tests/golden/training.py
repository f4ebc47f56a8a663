"""The trainings that PyTorch DDP and minddp both run, written once for both.

    make_ddp.py       PyTorch, n processes --.                  .--> ddp.npz
                                             |-- train(case) ---|
    test_golden.py    minddp,  n threads   --'                  '--> equal to it?

minddp has PyTorch's names, so one loop serves both; a `Library` holds what differs.
Initial weights and batches come from the file, so no random numbers have to agree.

Rule.  Only rank 0 gets the initial weights. The others start with zeros, and
construction has to make them equal.

Micro-batch i of rank r is x[i, r], y[i, r]. An epoch takes up where the one before
ended on the rank that went furthest.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

STEPS, RANKS, ROWS, FEATURES, CLASSES = 12, 4, 4, 6, 5

# Which micro-batches use the branch, on ranks 0 to 3; number i has column i % 12. The
# gaps are the steps where micro-batches go by threes: in the first, nobody uses the
# branch in the last micro-batch, which sends; in the second, nobody uses it at all.
BRANCH = [
    row.replace(" ", "")
    for row in (
        "#.. ... ##. #.#",
        "... ... .#. #..",
        "#.. ... .#. ..#",
        "... ... .#. .##",
    )
]


@dataclass(frozen=True)
class Case:
    """One training on n ranks.

    micro_batches: in each step; all but the last are in `no_sync`.

    epochs: for each epoch the number of steps of every rank; () for STEPS on all.

    divide_by_initial_world_size: epochs run within `join` with this setting; None: no
    join.
    """

    n: int
    optimizer: str
    model: str = "mlp"
    micro_batches: int = 1
    find_unused_parameters: bool = False
    fp16: bool = False
    epochs: tuple[tuple[int, ...], ...] = ()
    divide_by_initial_world_size: bool | None = None


def joined(
    n: int,
    optimizer: str,
    epochs: tuple[tuple[int, ...], ...],
    divide_by_initial_world_size: bool = True,
    **settings: Any,
) -> Case:
    return Case(
        n,
        optimizer,
        epochs=epochs,
        divide_by_initial_world_size=divide_by_initial_world_size,
        **settings,
    )


# In the second epoch ranks have different momentum, for they took 5, 3, 0 and 6 steps
# in the first: who is last decides about the weights. When several are, it is the one
# with the highest number.
ONE_LAST = ((5, 3, 0, 6), (4, 5, 6, 2))
TWO_LAST = ((5, 3, 0, 6), (4, 6, 6, 2))

# Rank 0 goes on alone, for one step without the branch and two with it. The last step
# of rank 1 must not use the branch, and no step without it may follow one with it: in
# PyTorch a rank without data repeats the last map of used parameters that it has seen,
# so the branch would get a gradient of zeros, not None. minddp does not copy that.
WHILE_MAPS_ARE_RIGHT = ((8, 5),)

CASES = {
    "plain-2-sgd": Case(2, "SGD"),
    "plain-2-adamw": Case(2, "AdamW"),
    "plain-4-sgd": Case(4, "SGD"),
    "plain-4-adamw": Case(4, "AdamW"),
    "tied-2-sgd": Case(2, "SGD", "tied"),
    "tied-4-adamw": Case(4, "AdamW", "tied"),
    "cnn-2-sgd": Case(2, "SGD", "tiny_cnn"),
    "no_sync-2-sgd": Case(2, "SGD", micro_batches=3),
    "no_sync-4-adamw": Case(4, "AdamW", micro_batches=3),
    "unused-2-sgd": Case(2, "SGD", "branched", 1, True),
    "unused-4-adamw": Case(4, "AdamW", "branched", 1, True),
    "unused-no_sync-2-sgd": Case(2, "SGD", "branched", 3, True),
    "unused-no_sync-4-adamw": Case(4, "AdamW", "branched", 3, True),
    "fp16-2-sgd": Case(2, "SGD", fp16=True),
    "fp16-4-sgd": Case(4, "SGD", fp16=True),
    "join-2-adamw-by-initial": joined(2, "AdamW", ((7, 12),)),
    "join-2-adamw-by-active": joined(2, "AdamW", ((7, 12),), False),
    "join-4-sgd-by-initial": joined(4, "SGD", ONE_LAST),
    "join-4-sgd-by-active": joined(4, "SGD", ONE_LAST, False),
    "join-two-last-4-sgd": joined(4, "SGD", TWO_LAST),
    "join-no_sync-2-adamw": joined(2, "AdamW", ((12, 5),), False, micro_batches=3),
    "join-unused-2-adamw": joined(
        2, "AdamW", WHILE_MAPS_ARE_RIGHT, model="branched", find_unused_parameters=True
    ),
}


@dataclass(frozen=True)
class Library:
    """PyTorch or minddp on one rank, with what they do not have in common.

    tensor(array): an input. array(parameter): its values, an array that can be written.
    wrap(module, case): DDP around it, with the hook of the case.
    """

    nn: Any
    optim: Any
    float64: Any
    tensor: Callable[[Any], Any]
    array: Callable[[Any], Any]
    wrap: Callable[[Any, Case], Any]


def build(library: Library, name: str) -> Any:
    """The model of that name: FEATURES numbers in, CLASSES numbers out."""
    nn, dtype = library.nn, library.float64

    def linear(inputs: int, outputs: int, bias: bool = True) -> Any:
        return nn.Linear(inputs, outputs, bias=bias, dtype=dtype)

    if name == "mlp":
        return nn.Sequential(linear(FEATURES, 8), nn.Tanh(), linear(8, CLASSES))
    if name == "tied":
        first, a, b = linear(FEATURES, 5), linear(5, 5, False), linear(5, 5, False)
        b.weight = a.weight
        return nn.Sequential(first, a, nn.Tanh(), b, nn.Tanh(), linear(5, CLASSES))
    if name == "tiny_cnn":
        return build_cnn(library)

    class Branched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branch = linear(FEATURES, CLASSES)
            self.trunk = linear(FEATURES, CLASSES)

        def forward(self, x: Any, use_branch: bool) -> Any:
            return self.trunk(x) + self.branch(x) if use_branch else self.trunk(x)

    return Branched()


def build_cnn(library: Library) -> Any:
    """The FEATURES numbers as an image of 2 x 3: convolved, halved, classified."""
    nn, dtype = library.nn, library.float64

    class CNN(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                nn.Conv2d(1, 4, 3, padding=(1, 2), dtype=dtype),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Flatten(),
                nn.Linear(8, CLASSES, dtype=dtype),
            )

        def forward(self, x: Any) -> Any:
            return self.layers(x.reshape(-1, 1, 2, 3))

    return CNN()


def build_optimizer(library: Library, name: str, parameters: Any) -> Any:
    if name == "SGD":
        return library.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.05)
    return library.optim.AdamW(parameters, lr=0.02, weight_decay=0.1)


def train(
    library: Library, case: Case, rank: int, initial: Any, x: Any, y: Any
) -> tuple[Any, Any]:
    """(losses, final weights) of this rank.

    initial: all weights in one array, as are the final ones. x (micro-batches, RANKS,
    ROWS, FEATURES), y (micro-batches, RANKS, ROWS). Losses have one entry for each of
    the case's micro-batches, NaN where this rank had none.
    """
    model = build(library, case.model)
    write_weights(library, model, initial if rank == 0 else np.zeros_like(initial))
    ddp = library.wrap(model, case)
    optimizer = build_optimizer(library, case.optimizer, ddp.parameters())
    loss_of = library.nn.CrossEntropyLoss()
    losses = np.full(STEPS * case.micro_batches, np.nan)

    def forward_and_backward(i: int) -> None:
        inputs = [library.tensor(x[i, rank])]
        if case.model == "branched":
            inputs.append(BRANCH[rank][i % len(BRANCH[rank])] == "#")
        loss = loss_of(ddp(*inputs), library.tensor(y[i, rank]))
        loss.backward()
        losses[i] = loss.item()

    begin = 0
    for steps in case.epochs or ((STEPS,) * case.n,):
        with join_of(ddp, case):
            for step in range(begin, begin + steps[rank]):
                optimizer.zero_grad()
                last = (step + 1) * case.micro_batches - 1
                for i in range(step * case.micro_batches, last):
                    with ddp.no_sync():
                        forward_and_backward(i)
                forward_and_backward(last)
                optimizer.step()
        begin += max(steps)
    return losses, read_weights(library, model)


def join_of(ddp: Any, case: Case) -> Any:
    """What the epochs of this case run in."""
    by_initial = case.divide_by_initial_world_size
    if by_initial is None:
        return nullcontext()
    return ddp.join(divide_by_initial_world_size=by_initial)


def write_weights(library: Library, model: Any, weights: Any) -> None:
    at = 0
    for p in model.parameters():
        array = library.array(p)
        array[...] = weights[at : at + array.size].reshape(array.shape)
        at += array.size
    assert at == weights.size


def read_weights(library: Library, model: Any) -> Any:
    return np.concatenate([library.array(p).ravel() for p in model.parameters()])
