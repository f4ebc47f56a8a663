"""The same training on several ranks: compare with 04_train_one_process.py.

    minddp run -n 2 examples/05_train_two_ranks.py

What is new: a process group, a sampler that deals out every batch of 60, and DDP, which
averages the gradients. The losses are those of one process, and so is the accuracy. The
last lines it prints:

    [rank 0] epoch 8: mean loss 0.066
    [rank 0] epoch 9: mean loss 0.062
    [rank 0] test accuracy 0.969
"""

import numpy as np

import minddp
from minddp import functional as F
from minddp import nn, optim
from minddp.data import DataLoader, DistributedSampler, load_digits
from minddp.ddp import DistributedDataParallel as DDP
from minddp.progress import progress

EPOCHS = 10
BATCH = 60  # of all ranks together
LEARNING_RATE = 0.1

pg = minddp.init_process_group()
minddp.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
model = DDP(model, pg)
optimizer = optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
dataset = load_digits("train")
sampler = DistributedSampler(dataset, pg.world_size, pg.rank, seed=0)
loader = DataLoader(dataset, batch_size=BATCH // pg.world_size, sampler=sampler)

for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    losses = []
    for x, y in progress(loader, desc=f"epoch {epoch}", show=pg.rank == 0):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()  # returns when the gradients are averaged
        optimizer.step()
        losses.append(loss.item())
    mean = np.array(sum(losses) / len(losses))
    pg.all_reduce(mean, op="avg")  # each rank knows the loss of its own part only
    if pg.rank == 0:
        print(f"epoch {epoch}: mean loss {mean:.3f}")

if pg.rank == 0:  # all replicas are equal, so one is enough
    x, y = load_digits("test").tensors
    with minddp.no_grad():
        right = (model(x).argmax(1) == y).sum()
    print(f"test accuracy {right.item() / len(y):.3f}")
pg.close()
