"""A convolutional network reads digits: at least 98 of 100 right.

    python examples/models/cnn.py
    minddp run -n 2 examples/models/cnn.py

The 1,440 digits are moved about by a pixel, another way in each epoch, so that the
network learns shapes and not pixels. The batch is shared by all ranks.
"""

import argparse

import numpy as np

import minddp
from minddp import functional as F
from minddp import nn, optim
from minddp.data import DataLoader, DistributedSampler, load_digits
from minddp.ddp import DistributedDataParallel as DDP
from minddp.progress import progress

BATCH = 48  # of all ranks together


def build():
    """(N, 1, 8, 8) images -> (N, 10) logits."""
    minddp.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def moved(images, random):
    """The images (N, 64) as (N, 1, 8, 8), each moved by up to a pixel."""
    n = len(images)
    room = np.zeros((n, 10, 10), np.float32)
    room[:, 1:9, 1:9] = images.reshape(n, 8, 8)
    rows = random.integers(0, 3, (n, 1, 1)) + np.arange(8)[:, None]
    columns = random.integers(0, 3, (n, 1, 1)) + np.arange(8)
    return room[np.arange(n)[:, None, None], rows, columns][:, None]


def accuracy(model, dataset):
    x, y = dataset[:]
    with minddp.no_grad():
        logits = model(x.numpy().reshape(-1, 1, 8, 8))
    return (logits.argmax(-1) == y).numpy().mean()


def main():
    parser = argparse.ArgumentParser(description="train a CNN on digits")
    parser.add_argument("--epochs", type=int, default=20)
    args = parser.parse_args()
    pg = minddp.init_process_group()
    model = DDP(build(), pg)
    optimizer = optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    dataset = load_digits("train")
    sampler = DistributedSampler(dataset, pg.world_size, pg.rank)
    loader = DataLoader(dataset, BATCH // pg.world_size, sampler=sampler)
    for epoch in progress(range(args.epochs), desc="epochs", show=pg.rank == 0):
        sampler.set_epoch(epoch)
        optimizer.param_groups[0]["lr"] = 3e-3 * (1 - epoch / args.epochs)
        random = np.random.default_rng([epoch, pg.rank])
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(moved(x.numpy(), random)), y)
            loss.backward()
            optimizer.step()
    if pg.rank == 0:
        right = accuracy(model.module, load_digits("test"))
        print(f"test accuracy {right:.4f} after {args.epochs} epochs")
    pg.close()


if __name__ == "__main__":
    main()
