"""A Trainer with snapshots: killed, or just started again, it goes on where it was.

    minddp run -n 2 examples/torch_style/snapshots.py 4 --snapshot /tmp/snapshot.minddp

The arguments are the number of epochs, and the file. Started a second time, with more
epochs, it finds the snapshot and trains only what is missing. It prints (first time):

    [rank 0] epoch 0: 32 batches on each of 2 ranks
    [rank 0] epoch 1: 32 batches on each of 2 ranks
    [rank 0] epoch 2: 32 batches on each of 2 ranks
    [rank 0] epoch 3: 32 batches on each of 2 ranks
    [rank 0] saved a snapshot of 4 epochs
"""

import argparse
import os

import minddp as torch
import minddp.distributed as dist
from minddp import functional as F
from minddp import nn
from minddp.data import DataLoader, Dataset, DistributedSampler
from minddp.ddp import DistributedDataParallel as DDP


class RandomDataset(Dataset):
    def __init__(self, size):
        self.data = [(torch.rand(20), torch.rand(1)) for _ in range(size)]

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index]


class Trainer:
    def __init__(self, model, train_data, optimizer, snapshot_path):
        self.rank = int(os.environ["RANK"])
        self.epochs_run, self.snapshot_path = 0, snapshot_path
        self.train_data, self.optimizer = train_data, optimizer
        self.model = model
        if os.path.exists(snapshot_path):
            self._load_snapshot()
        self.model = DDP(self.model, device_ids=[int(os.environ["LOCAL_RANK"])])

    def _load_snapshot(self):
        snapshot = torch.load(self.snapshot_path, map_location="cpu")
        self.model.load_state_dict(snapshot["MODEL_STATE"])
        self.optimizer.load_state_dict(snapshot["OPTIMIZER_STATE"])
        self.epochs_run = snapshot["EPOCHS_RUN"]
        if self.rank == 0:
            print(f"resuming after {self.epochs_run} epochs")

    def _save_snapshot(self):
        snapshot = {
            "MODEL_STATE": self.model.module.state_dict(),
            "OPTIMIZER_STATE": self.optimizer.state_dict(),
            "EPOCHS_RUN": self.epochs_run,
        }
        torch.save(snapshot, self.snapshot_path)
        print(f"saved a snapshot of {self.epochs_run} epochs")

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(source), targets)
        loss.backward()
        self.optimizer.step()

    def train(self, max_epochs):
        for epoch in range(self.epochs_run, max_epochs):
            self.train_data.sampler.set_epoch(epoch)
            if self.rank == 0:
                batches, n = len(self.train_data), dist.get_world_size()
                print(f"epoch {epoch}: {batches} batches on each of {n} ranks")
            for source, targets in self.train_data:
                self._run_batch(source, targets)
            self.epochs_run = epoch + 1
        if self.rank == 0:
            self._save_snapshot()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("total_epochs", type=int)
    parser.add_argument("--snapshot", default="snapshot.minddp")
    args = parser.parse_args()
    dist.init_process_group(backend="nccl")
    torch.manual_seed(1)
    dataset = RandomDataset(2048)
    model = nn.Linear(20, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    loader = DataLoader(
        dataset,
        batch_size=32,
        pin_memory=True,
        shuffle=False,
        sampler=DistributedSampler(dataset),
    )
    Trainer(model, loader, optimizer, args.snapshot).train(args.total_epochs)
    dist.destroy_process_group()
