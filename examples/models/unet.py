"""A U-Net finds cells: for every pixel, is it part of one?

    python examples/models/unet.py --picture cells.png
    minddp run -n 2 examples/models/unet.py

The images are generated: blurred ellipses of different brightness on an uneven, noisy
ground, so a threshold will not do. The network goes down to a quarter of the size,
where it sees far, and up again, where it sees sharply: what was there on the way down
is laid beside what comes up.  [Ronneberger, Fischer & Brox 2015, arXiv 1505.04597]

It prints one image with what the network found; --picture draws four of them (for
which: pip install 'minddp[plot]').
"""

import argparse

import numpy as np

import minddp
from minddp import functional as F
from minddp import nn, optim
from minddp.ddp import DistributedDataParallel as DDP
from minddp.progress import progress

SIZE = 32  # pixels each way
SHADES = " .:-=+*#%@"


def cells(n, random):
    """n images (n, 1, SIZE, SIZE) and their masks, 1 where there is a cell."""
    y, x = np.mgrid[:SIZE, :SIZE].astype(np.float32)
    images, masks = np.zeros((2, n, 1, SIZE, SIZE), np.float32)
    for image, mask in zip(images[:, 0], masks[:, 0], strict=True):
        slope = random.normal(0, 0.01, 2)
        image += 0.3 + slope[0] * (x - SIZE / 2) + slope[1] * (y - SIZE / 2)
        for _ in range(random.integers(2, 6)):
            cx, cy = random.uniform(4, SIZE - 4, 2)
            a, b, angle = (
                random.uniform(2, 5),
                random.uniform(2, 5),
                random.uniform(0, 3),
            )
            u = (x - cx) * np.cos(angle) + (y - cy) * np.sin(angle)
            v = (y - cy) * np.cos(angle) - (x - cx) * np.sin(angle)
            distance = np.sqrt((u / a) ** 2 + (v / b) ** 2)
            image += random.uniform(0.15, 0.5) / (1 + np.exp(6 * (distance - 1)))
            mask[distance < 1] = 1
        image += random.normal(0, 0.08, image.shape)
    return images, masks


class Twice(nn.Sequential):
    """Two convolutions of 3 x 3, each normalized."""

    def __init__(self, inputs, outputs):
        layers = []
        for channels in (inputs, outputs):
            layers += [nn.Conv2d(channels, outputs, 3, padding=1, bias=False)]
            layers += [nn.BatchNorm2d(outputs), nn.ReLU()]
        super().__init__(*layers)


class UNet(nn.Module):
    """(N, 1, H, W) -> (N, 1, H, W) logits; H and W are multiples of 4."""

    def __init__(self, width=8):
        self.down1, self.down2 = Twice(1, width), Twice(width, 2 * width)
        self.bottom = Twice(2 * width, 4 * width)
        self.rise2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.up2 = Twice(4 * width, 2 * width)
        self.rise1 = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.up1 = Twice(2 * width, width)
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x):
        x1 = self.down1(x)
        x2 = self.down2(F.max_pool2d(x1, 2))
        x = self.bottom(F.max_pool2d(x2, 2))
        x = self.up2(F.cat([x2, self.rise2(x)], dim=1))
        x = self.up1(F.cat([x1, self.rise1(x)], dim=1))
        return self.head(x)


def overlap(found, mask):
    """Intersection over union, of all images together."""
    found, mask = found > 0.5, mask > 0.5
    return (found & mask).sum() / (found | mask).sum()


def drawn(image):
    """An image with values from 0 to 1 as lines of characters, every second row."""
    shades = (image.clip(0, 0.999) * len(SHADES)).astype(int)
    return ["".join(SHADES[shade] for shade in row) for row in shades[::2]]


def picture(images, masks, found, path):
    from matplotlib import pyplot

    _, axes = pyplot.subplots(3, 4, figsize=(8, 6))
    for row, what in zip(axes, (images, masks, found), strict=True):
        for axis, image in zip(row, what, strict=False):
            axis.imshow(image[0], cmap="gray")
            axis.axis("off")
    pyplot.savefig(path, bbox_inches="tight")


def main():
    parser = argparse.ArgumentParser(description="train a U-Net on generated cells")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch", type=int, default=8, help="of all ranks together")
    parser.add_argument("--picture", help="a file to draw some results into")
    args = parser.parse_args()
    pg = minddp.init_process_group()
    minddp.manual_seed(0)
    model = UNet()
    ddp = DDP(model, pg)
    optimizer = optim.AdamW(model.parameters(), lr=5e-3)
    for step in progress(range(args.steps), desc="steps", show=pg.rank == 0):
        random = np.random.default_rng([step, pg.rank])
        x, mask = cells(args.batch // pg.world_size, random)
        optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(ddp(x), mask).backward()
        optimizer.step()
    if pg.rank == 0:
        images, masks = cells(32, np.random.default_rng(12345))
        model.eval()
        with minddp.no_grad():
            found = F.sigmoid(model(images)).numpy()
        rows = zip(drawn(images[0, 0]), drawn(found[0, 0]), strict=True)
        print("\n".join(f"{left} | {right}" for left, right in rows))
        print(
            f"overlap of what was found with what is there: {overlap(found, masks):.2f}"
        )
        if args.picture:
            picture(images, masks, found, args.picture)
    pg.close()


if __name__ == "__main__":
    main()
