"""A toy model under DDP, as one writes it for PyTorch and starts it with torchrun.

    minddp run -n 2 examples/torch_style/toy_ddp.py

Only the import lines differ. It prints:

    [rank 0] rank 0 of 2, backend tcp; rank 0 is at 127.0.0.1
    [rank 1] rank 1 of 2, backend tcp; rank 0 is at 127.0.0.1
    [rank 0] rank 0 took one step, gradient norm 0.62
    [rank 1] rank 1 took one step, gradient norm 0.62
"""

import os

import minddp as torch
import minddp.distributed as dist
from minddp import nn, optim
from minddp.ddp import DistributedDataParallel as DDP


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


def demo_basic(local_world_size, local_rank):
    device_ids = [local_rank]
    rank, n = dist.get_rank(), dist.get_world_size()
    host = os.environ["MASTER_ADDR"]
    print(f"rank {rank} of {n}, backend {dist.get_backend()}; rank 0 is at {host}")

    torch.manual_seed(0)
    model = ToyModel()
    ddp_model = DDP(model, device_ids=device_ids)
    loss_fn = nn.MSELoss()
    optimizer = optim.SGD(ddp_model.parameters(), lr=0.001)

    optimizer.zero_grad()
    outputs = ddp_model(torch.randn(20, 10))
    labels = torch.randn(20, 5)
    loss_fn(outputs, labels).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print(f"rank {rank} took one step, gradient norm {norm:.2f}")


if __name__ == "__main__":
    dist.init_process_group(backend="gloo")
    demo_basic(int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["LOCAL_RANK"]))
    dist.destroy_process_group()
