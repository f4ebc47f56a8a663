"""Autograd alone: a gradient, when it is complete, whether it is right, what it is for.

    python examples/01_autograd_alone.py

A line w x + b is fitted to points of 3 x - 1. `backward` computes in which direction
the loss grows; the loop walks the other way. No layer and no optimizer is involved.
The last lines it prints:

    step 20:  w = 2.9654  b = -1.0000  loss = 0.000935
    step 30:  w = 2.9963  b = -1.0000  loss = 0.000011
    step 40:  w = 2.9996  b = -1.0000  loss = 0.000000
"""

import numpy as np

from minddp import Tensor, no_grad

STEPS = 40
LEARNING_RATE = 0.2
H = 1e-6  # how far the finite difference moves w

x = np.linspace(-1, 1, 5)
y = 3 * x - 1
w = Tensor(np.array(0.0), requires_grad=True)
b = Tensor(np.array(0.0), requires_grad=True)


def loss_of(w, b):
    """The mean squared distance of the line from the points."""
    return ((w * x + b - y) ** 2).mean()


# ---- When is a gradient complete? b was used after w, so it is ready before w ----

ready = []
hooks = [p.register_post_accumulate_grad_hook(ready.append) for p in (w, b)]
loss_of(w, b).backward()
for p in ready:
    print(f"ready: d loss / d {'w' if p is w else 'b'} = {p.grad:.6f}")
for hook in hooks:
    hook.remove()

# ---- Is it right? Move w a little and look at the loss ----

difference = (loss_of(H, 0.0) - loss_of(-H, 0.0)) / (2 * H)
print(f"by moving w by {H}:  {difference:.6f}")

# ---- What is it for? Walk downhill ----

for step in range(1, STEPS + 1):
    w.grad = b.grad = None  # backward adds to what is there
    loss = loss_of(w, b)
    loss.backward()
    with no_grad():
        w -= LEARNING_RATE * w.grad
        b -= LEARNING_RATE * b.grad
    if step % 10 == 0:
        print(f"step {step}:  w = {w:.4f}  b = {b:.4f}  loss = {loss:.6f}")
