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
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from minddp.errors import UsageError
from minddp.group import ProcessGroup, init_process_group
from minddp.launch import launch

SIZES = "1KiB,16KiB,256KiB,1MiB,4MiB,25MiB,100MiB"
UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
WARM_UP = 3  # repetitions that do not count


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; starts n ranks of this module. Returns the exit code."""
    options = _parser().parse_args(argv)
    sizes = [parse_size(text) for text in options.sizes.split(",")]
    worker = ["-m", "minddp.bench", *(str(size) for size in sizes), options.json or ""]
    return launch(worker, options.nproc_per_node)


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


def worker(sizes: Sequence[int], json_path: str) -> None:
    """One rank of the bench; rank 0 prints."""
    with init_process_group() as pg:
        rows = []
        for nbytes in sizes:
            rows.append(result(pg.world_size, nbytes, time_all_reduce(pg, nbytes)))
            if pg.rank == 0 and json_path != "-":
                print(_as_line(rows[-1], header=len(rows) == 1), flush=True)
        if pg.rank == 0 and json_path:
            text = "".join(json.dumps(row) + "\n" for row in rows)
            if json_path == "-":
                print(text, end="", flush=True)
            else:
                with open(json_path, "w") as file:
                    file.write(text)


def _as_line(row: dict[str, Any], header: bool) -> str:
    line = (
        f"{row['bytes']:>12,}  {row['median_us']:>12,.1f}  {row['min_us']:>12,.1f}"
        f"  {row['algbw_GBps']:>10.3f}  {row['busbw_GBps']:>10.3f}"
    )
    if not header:
        return line
    names = f"{'bytes':>12}  {'median us':>12}  {'min us':>12}"
    return f"{names}  {'algbw GB/s':>10}  {'busbw GB/s':>10}\n{line}"


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
    worker([int(size) for size in sys.argv[1:-1]], sys.argv[-1])
