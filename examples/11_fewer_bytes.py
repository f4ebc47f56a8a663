"""Communication hooks: what each sends in a step, and what it costs in loss.

    minddp run -n 2 examples/11_fewer_bytes.py

The same training five times. A hook decides how a full bucket is averaged; local SGD
averages parameters in every eighth step instead. It prints:

    [rank 0] hook                 bytes a step    loss
    [rank 0] allreduce_hook             38,440    0.15
    [rank 0] fp16_compress_hook         19,220    0.15
    [rank 0] bf16_compress_hook         19,220    0.15
    [rank 0] powerSGD_hook               3,192    0.15
    [rank 0] local SGD                   4,805    0.17
"""

import minddp
from minddp import functional as F
from minddp import nn, optim
from minddp.comm_hooks import allreduce_hook, bf16_compress_hook, fp16_compress_hook
from minddp.data import DataLoader, DistributedSampler, load_digits
from minddp.ddp import DistributedDataParallel as DDP
from minddp.local_sgd import PeriodicModelAverager
from minddp.powersgd import PowerSGDState, powerSGD_hook

pg = minddp.init_process_group()


def train(state=pg, hook=allreduce_hook, averager=None):
    """(bytes that this rank sends in a step, the mean loss of the last 24 steps)."""
    minddp.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    ddp = DDP(model, pg, check_sync_every=0)
    ddp.register_comm_hook(state, hook)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    dataset = load_digits("train")
    sampler = DistributedSampler(dataset, pg.world_size, pg.rank)
    loader = DataLoader(dataset, batch_size=30, sampler=sampler)
    losses, sent = [], []
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for x, y in loader:
            before = pg.stats()
            ddp.require_backward_grad_sync = averager is None
            optimizer.zero_grad()
            loss = F.cross_entropy(ddp(x), y)
            loss.backward()
            optimizer.step()
            if averager:
                averager.average_parameters(model.parameters())
            losses.append(loss.item())
            after = pg.stats()
            fingerprints = after["header_bytes"] - before["header_bytes"]
            sent.append(after["bytes_sent"] - before["bytes_sent"] - fingerprints)
    return sum(sent[-24:]) / 24, sum(losses[-24:]) / 24


runs = {
    "allreduce_hook": train(),
    "fp16_compress_hook": train(hook=fp16_compress_hook),
    "bf16_compress_hook": train(hook=bf16_compress_hook),
    "powerSGD_hook": train(
        PowerSGDState(pg, matrix_approximation_rank=2), powerSGD_hook
    ),
    "local SGD": train(averager=PeriodicModelAverager(8, process_group=pg)),
}
if pg.rank == 0:
    print("hook                 bytes a step    loss")
    for name, (sent, loss) in runs.items():
        print(f"{name:<20} {sent:>12,.0f} {loss:>7.2f}")
pg.close()
