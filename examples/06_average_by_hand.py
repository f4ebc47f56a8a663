"""What DDP does, by hand: after backward, one all-reduce for each parameter.

    minddp run -n 2 examples/06_average_by_hand.py

The last lines it prints:

    [rank 0] loss 0.17 after 48 steps
    [rank 0] messages a step: 4, and the network slept during backward
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


def average_gradients():
    """Every parameter's gradient becomes its average over the ranks."""
    for p in model.parameters():
        pg.all_reduce(p.grad.data, op="avg")


steps = 0
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        average_gradients()
        optimizer.step()
        steps += 1

messages = pg.stats()["messages"] // steps
if pg.rank == 0:
    print(f"loss {loss.item():.2f} after {steps} steps")
    print(f"messages a step: {messages}, and the network slept during backward")
pg.close()
