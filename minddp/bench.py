"""`minddp bench`: how long a collective takes, and a whole training step.

    minddp bench all-reduce -n 2 --sizes 1KiB,1MiB,25MiB --json -
    minddp bench step -n 2 --model bigmlp --bucket-cap-mb 0.1,1,25 --json -

Each repetition starts after a barrier and is timed by rank 0's clock. The median is
reported beside the minimum: on a machine with other work the minimum says what the code
can do, the median what one gets.

all-reduce: in place, float32, sum; measured as nccl-tests does it.

    algbw = bytes / time                  what the caller sees
    busbw = algbw * 2 (n-1) / n           what every link carries; comparable for any n

step: everything between two batches; see bench_step.py.

Rule.  A wrong result has no time: the sum is checked outside what is timed.

In PyTorch: param_bench, and nccl-tests' all_reduce_perf (see its PERFORMANCE.md for
busbw).

Left out: other collectives, plots.
"""

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from minddp.bench_step import MODELS, WARM_UP_STEPS, step_rows, variants
from minddp.buckets import BUCKET_CAP_MB
from minddp.environment import THREAD_VARIABLES, TRANSPORTS
from minddp.errors import UsageError
from minddp.group import ProcessGroup, init_process_group
from minddp.launch import launch
from minddp.progress import progress

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
        for profile in [row["profile"] for row in rows if "profile" in row]:
            print("\n" + as_table(profile, COLUMNS["profile"]))
    write_json(rows, options.json)
    return 0


def worker(path: str, argv: Sequence[str]) -> None:
    """One rank of the bench, with main's arguments; rank 0 writes the rows."""
    options = parse(argv)
    measure = all_reduce_rows if options.benchmark == "all-reduce" else step_rows
    with init_process_group(transport=options.transport) as pg:
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
        yield result(pg, nbytes, time_all_reduce(pg, nbytes))


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


def result(pg: ProcessGroup, nbytes: int, seconds: list[float]) -> Row:
    """One row: what `--json` prints."""
    n = pg.world_size
    median = seconds[len(seconds) // 2]
    return {
        "op": "all_reduce",
        "world_size": n,
        "transport": pg.transport,
        "bytes": nbytes,
        "median_us": round(median * 1e6, 1),
        "min_us": round(seconds[0] * 1e6, 1),
        "algbw_GBps": round(nbytes / median / 1e9, 3),
        "busbw_GBps": round(nbytes / median * 2 * (n - 1) / n / 1e9, 3),
    }


# ---- What comes out ----

COLUMNS = {
    "all-reduce": ("bytes", "median_us", "min_us", "algbw_GBps", "busbw_GBps"),
    "step": ("model", "bucket_cap_mb", "median_ms", "min_ms", "graph_mb", "peak_mb"),
    "profile": ("op", "forward_ms", "backward_ms"),
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
    text = "also print the time of each kind of op"
    step.add_argument("--profile", action="store_true", help=text)
    return parser


def _add_common(parser: argparse.ArgumentParser) -> None:
    text = "ranks, all on this machine; default: 2"
    parser.add_argument(
        *("--nproc-per-node", "-n"), type=int, default=2, metavar="N", help=text
    )
    text = "what carries collectives; default: MINDDP_TRANSPORT, or tcp"
    parser.add_argument("--transport", choices=TRANSPORTS, help=text)
    parser.add_argument(
        "--json", metavar="FILE", help="one object a line; - prints them"
    )


if __name__ == "__main__":
    worker(sys.argv[1], sys.argv[2:])
