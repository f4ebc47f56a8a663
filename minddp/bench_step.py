"""`minddp bench step`: whole training steps, and where their time and memory go.

    minddp bench step -n 2 --model bigmlp --bucket-cap-mb 0.1,17
    minddp bench step -n 1 --model gpt --batch 8 --profile

A step is everything between two batches. Each rank has its own batch, and keeps it.

    n = 1   | zero_grad | forward | backward | optimizer |
    n = 2   | zero_grad | forward | backward | wait | optimizer |
                                       =============      gradients travel
            |<------------------ one step ------------------>|

What n ranks add to the step of one is the communication that backward could not hide,
and, on one machine, what the ranks take from each other: cores and memory.

Several bucket caps are compared in one run. Each has a model of its own, and their
steps take turns, so that what disturbs the machine disturbs all of them:

    cap    0.1  17  0.1  17  0.1  17 ...

Worked example: the weights of bigmlp have 6.1, 16, 14 and 0.07 MiB, and their gradients
come from the last to the first. A bucket closes once it has reached its cap, the first
at 1 MiB already (buckets.py). So the first takes the 0.07 and the 14. All caps from 0.1
to 16 make the same three buckets, and all from 16.1 on the same two:

    cap 0.1    | 0.07 14 | 16 | 6.1 |
    cap 17     | 0.07 14 | 16   6.1 |

--profile takes the time of every op, forward and backward, in steps of their own, since
taking it costs time. Memory is told always: what the graph of one step holds between
forward and backward, and the most that the process has had.

Rule.  A wrong result has no time: that the replicas are still equal after the last step
is checked outside what is timed.

In PyTorch: benchmarks/distributed/ddp; torch.profiler.

Left out: loading of data.
"""

import argparse
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from minddp import functional as F
from minddp import nn
from minddp import tensor_ops as ops
from minddp.autograd import bytes_held
from minddp.bench_clock import Row, Trial, median, network, peak_mb, take_turns
from minddp.buckets import BUCKET_CAP_MB
from minddp.ddp import DistributedDataParallel, NaiveDistributedDataParallel
from minddp.device import Array, generator, manual_seed
from minddp.errors import UsageError
from minddp.group import ProcessGroup
from minddp.optim import SGD, AdamW, Optimizer
from minddp.progress import progress
from minddp.replicas import check_sync

WARM_UP_STEPS = 5  # in the first, DDP makes its buckets anew


class Workload(NamedTuple):
    """What a step trains, on what, and how."""

    model: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Array, Array]]  # samples -> input, target
    optimizer: Callable[[nn.Module], Optimizer]


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.01, momentum=0.9)


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=1e-3)


def mlp(*widths: int) -> nn.Module:
    """Linear layers from each width to the next, ReLU between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def images(samples: int) -> tuple[Array, Array]:
    """Noise (samples, 784) in float32, and labels of ten classes."""
    random = generator()
    x = random.standard_normal((samples, 784), np.float32)
    return x, random.integers(0, 10, samples)


def cnn() -> nn.Module:
    """Two convolutions, each with ReLU and pooling, and a linear layer."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 7 * 7, 10)),
    )


def square_images(samples: int) -> tuple[Array, Array]:
    """The same as (samples, 1, 28, 28)."""
    x, y = images(samples)
    return x.reshape(samples, 1, 28, 28), y


CHARACTERS, WIDTH, HEADS, BLOCKS, CONTEXT = 65, 128, 4, 4, 64


class Block(nn.Module):
    """Attention and a two-layer network, each behind a layer norm and added."""

    def __init__(self) -> None:
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        b, t, d = x.shape
        q, k, v = (
            part.view(b, t, HEADS, d // HEADS).transpose(1, 2)
            for part in self.qkv(self.ln1(x)).split(d, -1)
        )
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, d))
        return x + self.fc2(F.gelu(self.fc1(self.ln2(x)), approximate="tanh"))


class GPT(nn.Module):
    """(samples, CONTEXT) characters -> logits (samples * CONTEXT, CHARACTERS)."""

    def __init__(self) -> None:
        self.token = nn.Embedding(CHARACTERS, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.ln, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CHARACTERS)

    def forward(self, characters: Any) -> Any:
        x = self.token(characters) + self.position(np.arange(CONTEXT))
        return self.head(self.ln(self.blocks(x))).reshape(-1, CHARACTERS)


def characters(samples: int) -> tuple[Array, Array]:
    """Characters (samples, CONTEXT), and as many targets in one row."""
    x, y = generator().integers(0, CHARACTERS, (2, samples, CONTEXT))
    return x, y.reshape(-1)


MODELS = {
    # 0.5 million parameters, 2 MiB of gradients
    "mlp": Workload(lambda: mlp(784, 512, 256, 10), images, sgd),
    # 9.5 million parameters, 36 MiB of gradients, nearly all in three matrices
    "bigmlp": Workload(lambda: mlp(784, 2048, 2048, 1792, 10), images, sgd),
    # 20 thousand parameters: nearly all of the time is computing
    "cnn": Workload(cnn, square_images, sgd),
    # 0.8 million parameters in 54 tensors
    "gpt": Workload(GPT, characters, adamw),
}


class Variant(NamedTuple):
    """How gradients are averaged: "naive", "bucketed" with its cap, None for not."""

    ddp: str | None
    bucket_cap_mb: float | None = None

    def wrap(self, model: nn.Module, pg: ProcessGroup) -> nn.Module:
        if self.ddp is None:
            return model
        if self.bucket_cap_mb is None:
            return NaiveDistributedDataParallel(model, pg)
        return DistributedDataParallel(model, pg, self.bucket_cap_mb)


def variants(n: int, ddp: str, caps: str | None) -> list[Variant]:
    """What to compare on n ranks; caps: MiB with commas between, None if not given.

    Raises: UsageError.
    """
    if n > 1 and ddp == "bucketed":
        texts = (caps or str(BUCKET_CAP_MB)).split(",")
        return [Variant(ddp, parse_cap(text)) for text in texts]
    if caps is not None:
        which = "one rank" if n == 1 else "--ddp naive"
        raise UsageError(
            f"--bucket-cap-mb {caps}: {which} has no buckets; leave it out"
        )
    return [Variant(ddp if n > 1 else None)]


def parse_cap(text: str) -> float:
    """The MiB in a text like "0.5". Raises: UsageError."""
    try:
        cap = float(text)
    except ValueError:
        cap = math.nan
    if not 0 < cap < math.inf:
        raise UsageError(
            f"--bucket-cap-mb {text!r}: MiB above 0, as in 25; several as in 0.5,25"
        )
    return cap


def step_rows(pg: ProcessGroup, options: argparse.Namespace) -> Iterator[Row]:
    """One row for each variant."""
    workload = MODELS[options.model]
    manual_seed(pg.rank)
    x, y = workload.batch(options.batch)
    models = [variant.wrap(workload.model(), pg) for variant in options.variants]
    steps = [training_step(model, workload.optimizer(model), x, y) for model in models]
    seconds = time_steps(pg, steps, options.steps)
    profile = profiled(steps[0], options.steps) if options.profile else None
    for model, variant, times in zip(models, options.variants, seconds, strict=True):
        check_sync(model, pg)
        held = bytes_held(F.cross_entropy(model(x), y))
        yield {
            "model": options.model,
            "batch": options.batch,
            "world_size": pg.world_size,
            "threads": options.threads,
            "parameters": sum(p.data.size for p in model.parameters()),
            "median_ms": round(median(times) * 1e3, 3),
            "min_ms": round(times[0] * 1e3, 3),
            "max_ms": round(times[-1] * 1e3, 3),
            **variant._asdict(),
            **network(pg),
            "graph_mb": round(held / 1e6, 3),
            "peak_mb": round(peak_mb(), 1),
            **({"profile": profile} if profile else {}),
        }


def training_step(
    model: nn.Module, optimizer: Optimizer, x: Array, y: Array
) -> Callable[[], None]:
    """A call that trains the model once more, always on the same batch."""

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def time_steps(
    pg: ProcessGroup, steps: Sequence[Callable[[], None]], repetitions: int
) -> list[list[float]]:
    """The seconds of each repetition of each step, sorted; the steps take turns."""
    rounds = range(WARM_UP_STEPS + repetitions)
    shown = progress(rounds, desc="steps", show=pg.rank == 0)
    seconds = take_turns(pg, [Trial(step) for step in steps], shown)
    return [sorted(times[WARM_UP_STEPS:]) for times in seconds]


# ---- Where time and memory go ----


def profiled(step: Callable[[], None], repetitions: int) -> list[Row]:
    """What each kind of op takes in a step, the most expensive first.

    "(all else)" is recording, hooks, communication and the optimizer.
    """
    with timed_ops() as times:
        start = time.perf_counter()
        for _ in range(repetitions):
            step()
        total = time.perf_counter() - start
    forward = {op: seconds for (op, way), seconds in times.items() if way == "forward"}
    backward = {op: seconds for (op, way), seconds in times.items() if way != "forward"}
    rows = {op: (forward[op], backward.get(op, 0.0)) for op in forward}
    rows["(all else)"] = 0.0, total - sum(times.values())
    return [
        {
            "op": op,
            "forward_ms": round(there / repetitions * 1e3, 3),
            "backward_ms": round(back / repetitions * 1e3, 3),
        }
        for op, (there, back) in sorted(rows.items(), key=lambda row: -sum(row[1]))
    ]


@contextmanager
def timed_ops() -> Iterator[dict[tuple[str, str], float]]:
    """Inside, the seconds of each op's forward and backward add up in what it gives."""
    times: dict[tuple[str, str], float] = defaultdict(float)
    busy = False  # within an op; what it asks of other ops is its own time

    def timed(function: Callable[..., Any], way: str) -> Callable[..., Any]:
        @wraps(function)
        def call(op: ops.Op, *arrays: Any) -> Any:
            nonlocal busy
            if busy:
                return function(op, *arrays)
            busy, start = True, time.perf_counter()
            try:
                return function(op, *arrays)
            finally:
                times[type(op).__name__, way] += time.perf_counter() - start
                busy = False

        return call

    plain = {
        (op, way): vars(op)[way]
        for op in all_ops(ops.Op)
        for way in ("forward", "backward")
        if way in vars(op)
    }
    for (op, way), function in plain.items():
        setattr(op, way, timed(function, way))
    try:
        yield times
    finally:
        for (op, way), function in plain.items():
            setattr(op, way, function)


def all_ops(kind: type[ops.Op]) -> list[type[ops.Op]]:
    """All classes below this one."""
    return [op for sub in kind.__subclasses__() for op in (sub, *all_ops(sub))]
