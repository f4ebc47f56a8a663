"""Training in one process: an MLP learns to read handwritten digits.

    python examples/04_train_one_process.py

1,440 images of 8 x 8 pixels, batches of 60, 24 steps an epoch. The next example does
the same on several ranks; the diff between the two is what data parallelism costs you.
The last lines it prints:

    epoch 8: mean loss 0.066
    epoch 9: mean loss 0.062
    test accuracy 0.969
"""

import minddp
from minddp import functional as F
from minddp import nn, optim
from minddp.data import DataLoader, load_digits
from minddp.progress import progress

EPOCHS = 10
BATCH = 60
LEARNING_RATE = 0.1

minddp.manual_seed(0)  # the weights to start from
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
loader = DataLoader(load_digits("train"), batch_size=BATCH, shuffle=True, seed=0)

for epoch in range(EPOCHS):
    losses = []
    for x, y in progress(loader, desc=f"epoch {epoch}"):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"epoch {epoch}: mean loss {sum(losses) / len(losses):.3f}")

x, y = load_digits("test").tensors
with minddp.no_grad():
    right = (model(x).argmax(1) == y).sum()
print(f"test accuracy {right.item() / len(y):.3f}")
