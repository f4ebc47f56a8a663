"""DDP rebuilds its buckets once, in the order in which the gradients really came.

    minddp run -n 2 examples/10_rebuild.py

The first plan assumes that backward meets parameters in the reverse of definition. Here
the head is defined first and used last, so its gradients come first, but the plan has
them in the last bucket: nothing could leave before backward has ended. It prints:

    [rank 0] bucket        bytes  parameters
    [rank 0]      0       33,280  body.bias, body.weight
    [rank 0]      1        5,160  head.bias, head.weight
    [rank 0] after the first backward, in the order in which gradients came
    [rank 0] bucket        bytes  parameters
    [rank 0]      0        5,672  head.bias, head.weight, body.bias
    [rank 0]      1       32,768  body.weight
    [rank 0] loss 0.13 after 48 steps
"""

import minddp
from minddp import functional as F
from minddp import nn, optim
from minddp.data import DataLoader, DistributedSampler, load_digits
from minddp.ddp import DistributedDataParallel as DDP

EPOCHS = 2
BATCH = 60  # of all ranks together


class HeadFirst(nn.Module):
    def __init__(self):
        self.head = nn.Linear(128, 10)
        self.body = nn.Linear(64, 128)

    def forward(self, x):
        return self.head(F.relu(self.body(x)))


pg = minddp.init_process_group()
minddp.manual_seed(0)
model = DDP(HeadFirst(), pg, bucket_cap_mb=0.005)
if pg.rank == 0:
    print(model.describe())
optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
dataset = load_digits("train")
sampler = DistributedSampler(dataset, pg.world_size, pg.rank)
loader = DataLoader(dataset, batch_size=BATCH // pg.world_size, sampler=sampler)


steps = 0
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if steps == 0 and pg.rank == 0:
            print("after the first backward, in the order in which gradients came")
            print(model.describe())
        steps += 1

if pg.rank == 0:
    print(f"loss {loss.item():.2f} after {steps} steps")
pg.close()
