"""Ranks with unequal amounts of data: join, and batches that count by their length.

    minddp run -n 3 examples/12_uneven.py

1,440 digits, not padded, in batches of 32 on 3 ranks, one of which has had 100 of its
digits taken away: it is out of data three batches before the others. Inside `join` it
brings zeros from then on, and with weight_by_batch every example counts alike. It
prints:

    [rank 0] rank 0 has 480 digits, 15 batches, the last of 32
    [rank 1] rank 1 has 480 digits, 15 batches, the last of 32
    [rank 2] rank 2 has 380 digits, 12 batches, the last of 28
    [rank 0] loss of rank 0 0.17, and all ranks have the same model
"""

import minddp
from minddp import functional as F
from minddp import nn, optim
from minddp.data import DataLoader, DistributedSampler, load_digits
from minddp.ddp import DistributedDataParallel as DDP

EPOCHS, BATCH, MISSING = 4, 32, 100

pg = minddp.init_process_group()
minddp.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
ddp = DDP(model, pg, weight_by_batch=True)
optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
dataset = load_digits("train")
sampler = DistributedSampler(dataset, pg.world_size, pg.rank, pad=False)

for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    mine = list(sampler)[MISSING if pg.rank == 2 else 0 :]
    loader = DataLoader(dataset, batch_size=BATCH, sampler=mine)
    # The rank without data takes the others' steps: its optimizer stays equal, too.
    with ddp.join(then=optimizer.step):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(ddp(x), y)
            loss.backward()
            optimizer.step()

batches = f"{len(loader)} batches, the last of {len(x)}"
print(f"rank {pg.rank} has {len(mine)} digits, {batches}")
ddp.check_sync()
pg.barrier()
if pg.rank == 0:
    print(f"loss of rank 0 {loss.item():.2f}, and all ranks have the same model")
pg.close()
