"""`minddp bench`: how long collectives take, measured as nccl-tests does it.

    minddp bench all-reduce -n 2 --sizes 1KiB,1MiB,25MiB --json -

Each repetition starts after a barrier and is timed by rank 0's clock, in place,
float32, sum. The median is reported beside the minimum: on a machine with other work
the minimum says what the code can do, the median what one gets.

    algbw = bytes / time                  what the caller sees
    busbw = algbw * 2 (n-1) / n           what every link carries; comparable for any n

In PyTorch: param_bench, and nccl-tests' all_reduce_perf (see its PERFORMANCE.md for
busbw).

Left out: other collectives, whole training steps, plots.
"""

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from minddp.errors import UsageError
from minddp.group import ProcessGroup, init_process_group
from minddp.launch import launch
from minddp.progress import progress

SIZES = "1KiB,16KiB,256KiB,1MiB,4MiB,25MiB,100MiB"
UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
WARM_UP = 3  # repetitions that do not count


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; starts n ranks of this module. Returns the exit code."""
    options = _parser().parse_args(argv)
    sizes = [str(parse_size(text)) for text in options.sizes.split(",")]
    # Rank 0 leaves its rows in a file: what it prints would get the launcher's tag.
    with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as file:
        program = ["-m", "minddp.bench", file.name, *sizes]
        if exit_code := launch(program, options.nproc_per_node):
            return exit_code
        rows = [json.loads(line) for line in file]
    if options.json != "-":
        print(as_table(rows))
    write_json(rows, options.json)
    return 0


def parse_size(text: str) -> int:
    """The bytes in a text like "25MiB" or "1024". Raises: UsageError."""
    match = re.fullmatch(r"(\d+)\s*(B|KiB|MiB|GiB)?", text.strip())
    if not match:
        raise UsageError(f"{text!r} is no size; write 1024, 16KiB, 25MiB or 1GiB")
    return int(match[1]) * UNITS[match[2] or "B"]


def repetitions(nbytes: int) -> int:
    """More for small arrays, within about 200 MB and between 5 and 300."""
    return max(5, min(300, int(2e8 / (nbytes + 100_000))))


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


def result(n: int, nbytes: int, seconds: list[float]) -> dict[str, Any]:
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


def worker(path: str, sizes: Sequence[int]) -> None:
    """One rank of the bench; rank 0 writes one row of JSON for each size."""
    with init_process_group() as pg, open(path, "a") as file:
        for nbytes in progress(sizes, desc="sizes", show=pg.rank == 0):
            seconds = time_all_reduce(pg, nbytes)
            if pg.rank == 0:
                file.write(json.dumps(result(pg.world_size, nbytes, seconds)) + "\n")


def write_json(rows: Sequence[dict[str, Any]], path: str | None) -> None:
    """One object a line into a file; "-" is standard output, None is nowhere."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path == "-":
        print(text, end="")
    elif path:
        Path(path).write_text(text)


def as_table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows for people."""
    columns = ("bytes", "median_us", "min_us", "algbw_GBps", "busbw_GBps")
    lines = [" ".join(f"{name:>12}" for name in columns)]
    lines += [" ".join(f"{row[name]:>12,}" for name in columns) for row in rows]
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="minddp bench", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("what", choices=["all-reduce"])
    parser.add_argument("--nproc-per-node", "-n", type=int, default=2, metavar="N")
    parser.add_argument("--transport", choices=["tcp"], default="tcp")
    parser.add_argument("--sizes", default=SIZES, help=f"default: {SIZES}")
    parser.add_argument(
        "--json", metavar="FILE", help="one object a line; - prints them"
    )
    return parser


if __name__ == "__main__":
    worker(sys.argv[1], [int(size) for size in sys.argv[2:]])
