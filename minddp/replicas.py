"""Replicas: do all ranks have the same model, and does it stay the same?

    rank 0   ["parameter '0.weight' (128, 64) float32", ...]  --SHA-256-->  32 bytes
    rank 1   ["parameter '0.weight' (128, 32) float32", ...]  --SHA-256-->  32 bytes
                                                                  all-gather
    all ranks: the digests differ, so broadcast both lists and name the first difference

While training the same is done with values: a CRC-32 of every parameter. Replicas take
equal steps from an equal start, so one bit of difference means that something is
broken: an all-reduce whose result was thrown away, an optimizer that differs, a write
to a parameter on one rank. Nothing would fail; the replicas would drift apart.

Rule.  All ranks come to the same verdict. If only those that differ from rank 0 raised,
rank 0 would wait for them in the next collective.

Cost.  One all-gather when all is well: 32 bytes a rank at construction, 8 bytes a
parameter and rank for a check, and one pass over the parameters.

In PyTorch: `_verify_param_shape_across_processes`, which compares shapes, not names. It
does not look at values.

Left out: a comparison of the code in `forward`; buffers, which may differ on purpose.
"""

import hashlib
import json
import zlib
from itertools import zip_longest

import numpy as np

from minddp.errors import ReplicaError, UsageError
from minddp.group import ProcessGroup
from minddp.nn import Module


def compare_models(module: Module, pg: ProcessGroup, **settings: object) -> None:
    """Also the settings of DDP, which decide what it sends.

    Raises: UsageError, the same on all ranks, naming the first difference.
    """
    kinds = ("parameter", module.named_parameters()), ("buffer", module.named_buffers())
    rows = [f"setting {name}={value!r}" for name, value in settings.items()]
    rows += [
        f"{kind} {name!r} {t.shape} {t.dtype}{'' if t.requires_grad else ', fixed'}"
        for kind, named in kinds
        for name, t in named
    ]
    mine = json.dumps(rows).encode()
    digest = hashlib.sha256(mine).digest()
    digests = pg.all_gather_rows(np.frombuffer(digest, np.uint8))
    for rank in range(1, pg.world_size):
        if (digests[rank] != digests[0]).any():
            theirs = [pg.broadcast_object(rows, root) for root in (0, rank)]
            first = next(pair for pair in zip_longest(*theirs) if pair[0] != pair[1])
            raise UsageError(
                f"the models differ: rank 0 has {first[0] or 'nothing more'}, but rank "
                f"{rank} has {first[1] or 'nothing more'}. All must build the same."
            )


def check_sync(module: Module, pg: ProcessGroup) -> None:
    """Raises: ReplicaError, the same on all ranks, if a parameter differs in any
    bit."""
    named = list(module.named_parameters())
    sums = pg.all_gather_rows([zlib.crc32(p.data.tobytes()) for _, p in named])
    for rank in range(1, pg.world_size):
        differ = [named[i][0] for i in np.flatnonzero(sums[rank] != sums[0])]
        if differ:
            raise ReplicaError(
                f"the replicas have drifted apart: {differ[0]!r} and {len(differ) - 1} "
                f"other parameters differ between rank 0 and rank {rank}. Was the "
                "result of an all-reduce lost, or a parameter written on one rank only?"
            )
