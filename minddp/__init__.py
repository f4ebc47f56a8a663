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
                                           ring         how n ranks add
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
    ReplicaError,
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
    "ReplicaError",
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
