"""Distillation: a small network learns from the answers of a large one.

    python examples/models/distill.py
    minddp run -n 2 examples/models/distill.py

Few digits have labels: 200. A large network learns from these, and then tells a small
one what it thinks of 1,440 images without labels: not only which digit it is, but also
which others it looks like ("soft" targets). A small one of the same size that has seen
the 200 labels alone is worse.     [Hinton, Vinyals & Dean 2015, arXiv 1503.02531]
"""

import argparse

import minddp
from minddp import functional as F
from minddp import nn, optim
from minddp.data import DataLoader, DistributedSampler, TensorDataset, load_digits
from minddp.ddp import DistributedDataParallel as DDP
from minddp.progress import progress

LABELLED, BATCH, TEMPERATURE = 200, 40, 3.0


def network(width):
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def train(model, pg, dataset, loss_of, epochs, name):
    """Train on this rank's share of the dataset; loss_of(logits, images, labels)."""
    ddp = DDP(model, pg)
    optimizer = optim.AdamW(model.parameters(), lr=3e-3)
    sampler = DistributedSampler(dataset, pg.world_size, pg.rank)
    loader = DataLoader(dataset, BATCH // pg.world_size, sampler=sampler)
    for epoch in progress(range(epochs), desc=name, show=pg.rank == 0):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss_of(ddp(x), x, y).backward()
            optimizer.step()
    return model


def accuracy(model):
    x, y = load_digits("test")[:]
    with minddp.no_grad():
        return (model(x).argmax(-1) == y).numpy().mean()


def main():
    parser = argparse.ArgumentParser(description="distil a large network")
    parser.add_argument("--epochs", type=int, default=40)
    args = parser.parse_args()
    pg = minddp.init_process_group()
    images, labels = load_digits("train")[:]
    few = TensorDataset(images[:LABELLED], labels[:LABELLED])
    everything = TensorDataset(images, labels)

    def by_labels(logits, x, y):
        return F.cross_entropy(logits, y)

    def by_teacher(logits, x, y):
        """y is not looked at: the teacher's opinion takes its place."""
        with minddp.no_grad():
            opinion = F.softmax(teacher(x) / TEMPERATURE)
        student_says = F.log_softmax(logits / TEMPERATURE)
        divergence = F.kl_div(student_says, opinion, reduction="batchmean")
        return divergence * TEMPERATURE**2

    minddp.manual_seed(0)
    teacher = train(network(512), pg, few, by_labels, 4 * args.epochs, "teacher")
    minddp.manual_seed(1)
    alone = train(network(12), pg, few, by_labels, 7 * args.epochs, "student alone")
    minddp.manual_seed(1)
    student = train(network(12), pg, everything, by_teacher, args.epochs, "student")
    if pg.rank == 0:
        models = {"teacher": teacher, "student alone": alone, "student": student}
        for name, model in models.items():
            size = sum(p.numel() for p in model.parameters())
            print(f"{name:<14} {size:>7,} parameters, accuracy {accuracy(model):.3f}")
    pg.close()


if __name__ == "__main__":
    main()
