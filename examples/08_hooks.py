"""Overlap: each gradient leaves as soon as it is complete, while backward goes on.

    minddp run -n 2 examples/08_hooks.py

All ranks get their gradients in the same order here, as they run the same program. If
one did not, its k-th all-reduce would meet another parameter's. The last lines:

    [rank 0] loss 0.17 after 48 steps
    [rank 0] messages a step: 4, sent while backward ran
"""

import minddp
from minddp import functional as F
from minddp import nn, optim
from minddp.data import DataLoader, DistributedSampler, load_digits

EPOCHS = 2
BATCH = 60  # of all ranks together

pg = minddp.init_process_group()
minddp.manual_seed(0)  # the same start everywhere, which DDP would make sure of
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
dataset = load_digits("train")
sampler = DistributedSampler(dataset, pg.world_size, pg.rank)
loader = DataLoader(dataset, batch_size=BATCH // pg.world_size, sampler=sampler)


works = []


def gradient_ready(p):
    """Called in the middle of backward: this gradient is complete, so send it."""
    works.append(pg.all_reduce(p.grad.data, op="avg", async_op=True))


for p in model.parameters():
    p.register_post_accumulate_grad_hook(gradient_ready)


def wait_for_averages():
    while works:
        works.pop(0).wait()


steps = 0
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        wait_for_averages()
        optimizer.step()
        steps += 1

messages = pg.stats()["messages"] // steps
if pg.rank == 0:
    print(f"loss {loss.item():.2f} after {steps} steps")
    print(f"messages a step: {messages}, sent while backward ran")
pg.close()
