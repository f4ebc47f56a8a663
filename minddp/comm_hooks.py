"""Communication hooks: how a full bucket is averaged.

    ddp.register_comm_hook(pg, fp16_compress_hook)

    bucket.flat  --hook-->  Work  --wait-->  bucket.flat is the average

                              bytes on the wire      what comes back
    allreduce_hook            2 (n-1)/n * B          the average
    fp16_compress_hook        half of that           the average, to about 3 digits
    bf16_compress_hook        half of that           to 2 digits, in float32's range
    powersgd.py               a few per cent         a low-rank part; the rest later
    local_sgd.py              none in most steps     this rank's own gradient

Rule.  A hook is a function of a state (here the process group) and a bucket. It asks
for collectives and returns something with `wait`, after which the flat array of the
bucket is the average over the ranks. All ranks register the same hook, as they make the
same calls.

Worked example, n = 2: gradients 0.2 and 0.6 are halved first, so that their sum cannot
overflow float16 unless the average does; 0.1 + 0.3 = 0.4 travels in 2 bytes.

In PyTorch: torch/distributed/algorithms/ddp_comm_hooks/default_hooks.py.

Left out: hooks on top of hooks (`fp16_compress_wrapper`).
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from minddp.bfloat16 import from_bfloat16, to_bfloat16
from minddp.buckets import Bucket
from minddp.group import ProcessGroup
from minddp.work import After, Work

Hook = Callable[[Any, Bucket], Work | After]


def allreduce_hook(pg: ProcessGroup, bucket: Bucket) -> Work:
    """The average of this bucket, in place: what DDP does without a hook."""
    # With one rank there is nothing to overlap with.
    wait_later = pg.world_size > 1
    return pg.all_reduce(bucket.flat, "avg", async_op=wait_later, bucket=bucket.index)


def fp16_compress_hook(pg: ProcessGroup, bucket: Bucket) -> After:
    """The average, computed and sent in float16: half the bytes of float32.

    Averages above 65,504 become infinite, and gradients below n * 3e-8 zero.
    """
    half = (bucket.flat / pg.world_size).astype(np.float16)
    work = pg.all_reduce(half, "sum", async_op=True, bucket=bucket.index)

    def decompress() -> None:
        bucket.flat[...] = half

    return After(work, decompress)


def bf16_compress_hook(pg: ProcessGroup, bucket: Bucket) -> After:
    """The average, sent in bfloat16 and added in float32: half the bytes of float32.

    Nothing overflows that does not in float32, but only 8 bits of each value are kept.
    """
    half = to_bfloat16(bucket.flat / pg.world_size)
    work = pg.all_reduce(half, "sum", async_op=True, bucket=bucket.index)

    def decompress() -> None:
        bucket.flat[...] = from_bfloat16(half)

    return After(work, decompress)
