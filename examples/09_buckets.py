"""Buckets: gradients leave during backward, but not one by one.

    minddp run -n 2 examples/09_buckets.py

Small buckets, so that this small model has two. The last lines it prints:

    [rank 0] loss 0.17 after 48 steps
    [rank 0] messages a step: 2, sent while backward ran
"""

import minddp
from minddp import functional as F
from minddp import nn, optim
from minddp.buckets import Bucket, Size, plan
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


parameters = list(model.parameters())
order = reversed(range(len(parameters)))  # backward begins with the last layer
sizes = [Size(p.data.nbytes, str(p.dtype)) for p in parameters]
groups = plan(sizes, list(order), first_bytes=4_000, cap_bytes=20_000)
buckets = [Bucket(k, [parameters[i] for i in g]) for k, g in enumerate(groups)]
sent = []


def gradient_ready(p):
    """Put it into its bucket; buckets leave when they are full, in order."""
    for bucket in buckets:
        for slot, mine in enumerate(bucket.parameters):
            if mine is p:
                bucket.take(slot)
    while len(sent) < len(buckets) and buckets[len(sent)].full:
        flat = buckets[len(sent)].flat
        sent.append(pg.all_reduce(flat, op="avg", async_op=True))


for p in parameters:
    p.register_post_accumulate_grad_hook(gradient_ready)


def wait_for_averages():
    while sent:
        sent.pop(0).wait()
    for bucket in buckets:
        bucket.expect()


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
