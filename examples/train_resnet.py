"""Train a small ResNet with BatchNorm on real handwritten digits (the 1,797 images of scikit-learn), with plain DDP.

    torchrun --nproc-per-node 4 train_resnet.py
    torchrun --nproc-per-node 4 train_resnet.py --epochs 20 --snapshot resnet.pt     # run again to resume
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Residual(nn.Module):
    """Two 3x3 convolutions with BatchNorm and a shortcut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def resnet(width: int) -> nn.Module:
    """A ResNet of six convolutional layers for images [batch, 1, 8, 8]; logits are [batch, 10]."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, 1, 1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        Residual(width, width, 1),
        Residual(width, 2 * width, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, 10),
    )


def load_images() -> tuple[TensorDataset, TensorDataset]:
    """Training and test images, float32 [n, 1, 8, 8] in 0..1, and labels, int64 [n]; every sixth is a test image."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target, dtype=torch.int64)
    test = torch.arange(len(images)) % 6 == 0
    return TensorDataset(images[~test], labels[~test]), TensorDataset(images[test], labels[test])


@torch.no_grad()
def accuracy(model: nn.Module, images: TensorDataset, device) -> float:
    """Share of `images` that `model` names rightly."""
    model.eval()
    right = sum((model(x.to(device)).argmax(1) == y.to(device)).sum().item() for x, y in DataLoader(images, 256))
    model.train()
    return right / len(images)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=16, help="images per rank and step")
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--workers", type=int, default=0, help="DataLoader workers per rank")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--snapshot", default="", help="file to save to after every epoch and to resume from")
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)

    torch.manual_seed(args.seed)
    train, test = load_images()
    sampler = DistributedSampler(train, seed=args.seed, drop_last=True)
    loader = DataLoader(train, args.batch, sampler=sampler, num_workers=args.workers, drop_last=True)
    model = DDP(resnet(args.width).to(device), device_ids=[device.index] if cuda else None)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=5e-4, nesterov=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(loader))

    first = 0
    if args.snapshot and os.path.exists(args.snapshot):
        snapshot = torch.load(args.snapshot, map_location=device)
        model.module.load_state_dict(snapshot["model"])
        optimizer.load_state_dict(snapshot["optimizer"])
        schedule.load_state_dict(snapshot["schedule"])
        first = snapshot["epoch"]
        if rank == 0:
            print(f"resumed from {args.snapshot} after epoch {first}", flush=True)

    if rank == 0:
        size = sum(p.numel() for p in model.parameters())
        print(f"{len(train)} images, {size:,} parameters, {world} ranks x {len(loader)} steps an epoch", flush=True)

    for epoch in range(first, args.epochs):
        sampler.set_epoch(epoch)
        total = 0.0
        for images, labels in loader:
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item()
        right = accuracy(model.module, test, device)
        if rank == 0:
            print(f"epoch {epoch + 1:3d}  loss {total / len(loader):.4f}  test accuracy {right:.3f}", flush=True)
            if args.snapshot:
                state = {
                    "model": model.module.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "schedule": schedule.state_dict(),
                    "epoch": epoch + 1,
                }
                torch.save(state, args.snapshot)

    if cuda:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
