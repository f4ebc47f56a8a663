"""minddp: distributed data-parallel training, small enough to read in an evening.

To train:

    import minddp
    from minddp import nn, optim, functional as F

To read, in this order:

    tensor_ops   formulas on arrays        frame        bytes on the wire
    autograd     the tape                  handshake    who may join
    functional   functions on tensors      net          links between ranks
    nn, optim    models that learn         rendezvous   how ranks find one another
    data         batches, and whose        ring         how n ranks add
                                           group        collectives in one order
                            `------>  ddp  <------'

The two columns know nothing of each other. They meet in `ddp`.
"""

from minddp import data, functional, nn, optim
from minddp.autograd import Tensor, no_grad
from minddp.ddp import DistributedDataParallel
from minddp.device import manual_seed
from minddp.errors import (
    MindDPError,
    PeerError,
    PeerLost,
    PeerMismatch,
    PeerTimeout,
    UsageError,
)
from minddp.group import ProcessGroup, init_process_group

__version__ = "0.1.0"

__all__ = [
    "DistributedDataParallel",
    "MindDPError",
    "PeerError",
    "PeerLost",
    "PeerMismatch",
    "PeerTimeout",
    "ProcessGroup",
    "Tensor",
    "UsageError",
    "data",
    "functional",
    "init_process_group",
    "manual_seed",
    "nn",
    "no_grad",
    "optim",
]
