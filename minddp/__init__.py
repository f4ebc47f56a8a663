"""minddp: distributed data-parallel training, small enough to read in an evening.

To train:

    import minddp
    from minddp import nn, optim, functional as F

To read, from the bottom up (docs/ leads through it):

    device       where arrays live         frame        bytes on the wire
    tensor_ops   formulas on arrays        handshake    who may join
    autograd     the tape                  net, lobby   links between ranks
    functional   functions on tensors      verdict      who failed first
    nn, optim    models that learn         control      failing and leaving together
    data         batches, and whose        rendezvous   how ranks find one another
    creation     tensors from nothing      ring         how n ranks add
    checkpoint   to a file and back        group        collectives in one order
                            `-->  reducer, ddp  <--'

The two columns know nothing of each other. They meet in `ddp`. To run a script that was
written for PyTorch: `import minddp as torch`, `import minddp.distributed as dist`.
"""

from minddp import amp, data, distributed, functional, nn, optim
from minddp.autograd import Tensor, no_grad, set_grad_enabled
from minddp.checkpoint import load, save
from minddp.creation import (
    arange,
    double,
    empty,
    eye,
    float16,
    float32,
    float64,
    from_numpy,
    full,
    half,
    int32,
    int64,
    linspace,
    long,
    ones,
    ones_like,
    rand,
    randint,
    randn,
    randperm,
    tensor,
    uint8,
    zeros,
    zeros_like,
)
from minddp.ddp import DistributedDataParallel
from minddp.device import manual_seed
from minddp.errors import (
    CheckpointError,
    MindDPError,
    NonFiniteError,
    PeerError,
    PeerLost,
    PeerMismatch,
    PeerTimeout,
    ReplicaError,
    UsageError,
)
from minddp.functional import (
    cat,
    einsum,
    matmul,
    maximum,
    minimum,
    stack,
    where,
)
from minddp.group import ProcessGroup, init_process_group
from minddp.multiprocessing import spawn

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "DistributedDataParallel",
    "MindDPError",
    "NonFiniteError",
    "PeerError",
    "PeerLost",
    "PeerMismatch",
    "PeerTimeout",
    "ProcessGroup",
    "ReplicaError",
    "Tensor",
    "UsageError",
    "amp",
    "arange",
    "cat",
    "data",
    "distributed",
    "double",
    "einsum",
    "empty",
    "eye",
    "float16",
    "float32",
    "float64",
    "from_numpy",
    "full",
    "functional",
    "half",
    "init_process_group",
    "int32",
    "int64",
    "linspace",
    "load",
    "long",
    "manual_seed",
    "matmul",
    "maximum",
    "minimum",
    "nn",
    "no_grad",
    "ones",
    "ones_like",
    "optim",
    "rand",
    "randint",
    "randn",
    "randperm",
    "save",
    "set_grad_enabled",
    "spawn",
    "stack",
    "tensor",
    "uint8",
    "where",
    "zeros",
    "zeros_like",
]
