"""`minddp bench`: how long a collective takes, and a whole training step.

    minddp bench all-reduce -n 2 --sizes 1KiB,1MiB,25MiB --json -
    minddp bench step -n 2 --model bigmlp --bucket-cap-mb 0.1,1,25 --json -

Each repetition starts after a barrier and is timed by rank 0's clock. The median is
reported beside the minimum: on a machine with other work the minimum says what the code
can do, the median what one gets.

all-reduce: in place, float32, sum; measured as nccl-tests does it.

    algbw = bytes / time                  what the caller sees
    busbw = algbw * 2 (n-1) / n           what every link carries; comparable for any n

step: everything between two batches. Each rank has its own batch, and keeps it.

    n = 1   | zero_grad | forward | backward | optimizer |
    n = 2   | zero_grad | forward | backward | wait | optimizer |
                                       =============      gradients travel
            |<------------------ one step ------------------>|

What n ranks add to the step of one is the communication that backward could not hide,
and, on one machine, what the ranks take from each other: cores and memory.

Several bucket caps are compared in one run. Each has a model of its own, and their
steps take turns, so that what disturbs the machine disturbs all of them:

    cap    0.1  1  25  0.1  1  25  0.1  1  25 ...

Worked example: the weights of bigmlp have 6.1, 16, 14 and 0.07 MiB. A bucket closes
once it has reached its cap (buckets.py), so all caps from 0.1 to 6 make the same four
buckets, and all from 23 on the same two.

Rule.  A wrong result has no time: the sum, or that the replicas are still equal after
the last step, is checked outside what is timed.

In PyTorch: param_bench, and nccl-tests' all_reduce_perf (see its PERFORMANCE.md for
busbw); benchmarks/distributed/ddp for steps.

Left out: other collectives, convolutions and transformers, loading of data, plots.
"""

import argparse
import json
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from minddp import functional as F
from minddp import nn
from minddp.buckets import BUCKET_CAP_MB
from minddp.ddp import DistributedDataParallel, NaiveDistributedDataParallel
from minddp.device import Array, generator, manual_seed
from minddp.environment import THREAD_VARIABLES
from minddp.errors import UsageError
from minddp.group import ProcessGroup, init_process_group
from minddp.launch import launch
from minddp.optim import SGD
from minddp.progress import progress
from minddp.replicas import check_sync

Row = dict[str, Any]


def main(argv: Sequence[str]) -> int:
    """The command line; starts n ranks of this module. Returns the exit code.

    Raises: UsageError before anything is started.
    """
    options = parse(argv)
    if options.benchmark == "step":  # NumPy reads them once, when a rank imports it
        os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(options.threads)))
    # Rank 0 leaves its rows in a file: what it prints would get the launcher's tag.
    with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as file:
        program = ["-m", "minddp.bench", file.name, *argv]
        if exit_code := launch(program, options.nproc_per_node):
            return exit_code
        rows = [json.loads(line) for line in file]
    if options.json != "-":
        print(as_table(rows, COLUMNS[options.benchmark]))
    write_json(rows, options.json)
    return 0


def worker(path: str, argv: Sequence[str]) -> None:
    """One rank of the bench, with main's arguments; rank 0 writes the rows."""
    options = parse(argv)
    measure = all_reduce_rows if options.benchmark == "all-reduce" else step_rows
    with init_process_group() as pg:
        rows = list(measure(pg, options))
        if pg.rank == 0:
            write_json(rows, path)


# ---- all-reduce ----

SIZES = "1KiB,16KiB,256KiB,1MiB,4MiB,25MiB,100MiB"
UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
WARM_UP = 3  # repetitions that do not count


def parse_size(text: str) -> int:
    """The bytes in a text like "25MiB" or "1024". Raises: UsageError."""
    match = re.fullmatch(r"(\d+)\s*(B|KiB|MiB|GiB)?", text.strip())
    if not match:
        raise UsageError(f"{text!r} is no size; write 1024, 16KiB, 25MiB or 1GiB")
    return int(match[1]) * UNITS[match[2] or "B"]


def repetitions(nbytes: int) -> int:
    """More for small arrays, within about 200 MB and between 5 and 300."""
    return max(5, min(300, int(2e8 / (nbytes + 100_000))))


def all_reduce_rows(pg: ProcessGroup, options: argparse.Namespace) -> Iterator[Row]:
    """One row for each size."""
    for nbytes in progress(options.sizes, desc="sizes", show=pg.rank == 0):
        yield result(pg.world_size, nbytes, time_all_reduce(pg, nbytes))


def time_all_reduce(pg: ProcessGroup, nbytes: int) -> list[float]:
    """The seconds of each repetition on this rank, sorted."""
    x = np.ones(max(1, nbytes // 4), np.float32)
    seconds = []
    for _ in range(repetitions(nbytes) + WARM_UP):
        x.fill(1)
        pg.barrier()
        start = time.perf_counter()
        pg.all_reduce(x)
        seconds.append(time.perf_counter() - start)
        assert x[-1] == pg.world_size, "the sum is wrong"
    return sorted(seconds[WARM_UP:])


def result(n: int, nbytes: int, seconds: list[float]) -> Row:
    """One row: what `--json` prints."""
    median = seconds[len(seconds) // 2]
    return {
        "op": "all_reduce",
        "world_size": n,
        "transport": "tcp",
        "bytes": nbytes,
        "median_us": round(median * 1e6, 1),
        "min_us": round(seconds[0] * 1e6, 1),
        "algbw_GBps": round(nbytes / median / 1e9, 3),
        "busbw_GBps": round(nbytes / median * 2 * (n - 1) / n / 1e9, 3),
    }


# ---- A training step ----

WARM_UP_STEPS = 5  # in the first, DDP makes its buckets anew


class Workload(NamedTuple):
    """What a step trains, and on what."""

    model: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Array, Array]]  # samples -> input, target


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


MODELS = {
    # 0.5 million parameters, 2 MiB of gradients
    "mlp": Workload(lambda: mlp(784, 512, 256, 10), images),
    # 9.5 million parameters, 36 MiB of gradients, nearly all in three matrices
    "bigmlp": Workload(lambda: mlp(784, 2048, 2048, 1792, 10), images),
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
            f"--bucket-cap-mb {text!r}: MiB above 0, as in 25; several as in 0.5,1,25"
        )
    return cap


def step_rows(pg: ProcessGroup, options: argparse.Namespace) -> Iterator[Row]:
    """One row for each variant."""
    workload = MODELS[options.model]
    manual_seed(pg.rank)
    x, y = workload.batch(options.batch)
    models = [variant.wrap(workload.model(), pg) for variant in options.variants]
    steps = [training_step(model, x, y) for model in models]
    seconds = time_steps(pg, steps, options.steps)
    for model, variant, times in zip(models, options.variants, seconds, strict=True):
        check_sync(model, pg)
        yield {
            "model": options.model,
            "batch": options.batch,
            "world_size": pg.world_size,
            "threads": options.threads,
            **variant._asdict(),
            "parameters": sum(p.data.size for p in model.parameters()),
            "median_ms": round(times[len(times) // 2] * 1e3, 3),
            "min_ms": round(times[0] * 1e3, 3),
            "max_ms": round(times[-1] * 1e3, 3),
        }


def training_step(model: nn.Module, x: Array, y: Array) -> Callable[[], None]:
    """A call that trains the model once more, always on the same batch."""
    optimizer = SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def time_steps(
    pg: ProcessGroup, steps: Sequence[Callable[[], None]], repetitions: int
) -> list[list[float]]:
    """The seconds of each repetition of each step, sorted; the steps take turns."""
    seconds: list[list[float]] = [[] for _ in steps]
    rounds = range(WARM_UP_STEPS + repetitions)
    for _ in progress(rounds, desc="steps", show=pg.rank == 0):
        for step, times in zip(steps, seconds, strict=True):
            pg.barrier()
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
    return [sorted(times[WARM_UP_STEPS:]) for times in seconds]


# ---- What comes out ----

COLUMNS = {
    "all-reduce": ("bytes", "median_us", "min_us", "algbw_GBps", "busbw_GBps"),
    "step": ("model", "ddp", "bucket_cap_mb", "median_ms", "min_ms", "max_ms"),
}


def write_json(rows: Sequence[Row], path: str | None) -> None:
    """One object a line into a file; "-" is standard output, None is nowhere."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path == "-":
        print(text, end="")
    elif path:
        Path(path).write_text(text)


def as_table(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """These columns of the rows, for people."""
    table = [columns, *([cell(row[name]) for name in columns] for row in rows)]
    return "\n".join(" ".join(f"{text:>13}" for text in line) for line in table)


def cell(value: Any) -> str:
    """12345 as 12,345, and None as -."""
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:,}"


# ---- The command line ----


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options; `sizes`, or `variants`, as lists. Raises: UsageError."""
    options = _parser().parse_args(argv)
    if options.benchmark == "all-reduce":
        options.sizes = [parse_size(text) for text in options.sizes.split(",")]
        return options
    for name in ("batch", "threads", "steps"):
        if vars(options)[name] < 1:
            raise UsageError(f"--{name} {vars(options)[name]}: at least 1 is needed")
    options.variants = variants(
        options.nproc_per_node, options.ddp, options.bucket_cap_mb
    )
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="minddp bench", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    kinds = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    all_reduce = kinds.add_parser("all-reduce", help="the ring's all-reduce, by size")
    _add_common(all_reduce)
    all_reduce.add_argument("--transport", choices=["tcp"], default="tcp")
    all_reduce.add_argument("--sizes", default=SIZES, help=f"default: {SIZES}")
    step = kinds.add_parser("step", help="a training step, by size of buckets")
    _add_common(step)
    step.add_argument("--model", choices=MODELS, default="mlp", help="default: mlp")
    for flag, default, text in (
        ("--batch", 64, "samples for each rank"),
        ("--threads", 1, "threads of each rank for matrix products"),
        ("--steps", 20, f"steps that count, after {WARM_UP_STEPS} that do not"),
    ):
        text += f"; default: {default}"
        step.add_argument(flag, type=int, default=default, metavar="N", help=text)
    text = "default: bucketed; one rank averages nothing"
    versions = ["bucketed", "naive"]
    step.add_argument("--ddp", choices=versions, default="bucketed", help=text)
    text = f"MiB, several as in 0.5,1,25; default: {BUCKET_CAP_MB:g}"
    step.add_argument("--bucket-cap-mb", metavar="MIB", help=text)
    return parser


def _add_common(parser: argparse.ArgumentParser) -> None:
    text = "ranks, all on this machine; default: 2"
    parser.add_argument(
        *("--nproc-per-node", "-n"), type=int, default=2, metavar="N", help=text
    )
    parser.add_argument(
        "--json", metavar="FILE", help="one object a line; - prints them"
    )


if __name__ == "__main__":
    worker(sys.argv[1], sys.argv[2:])
