"""configs/cifar10_speed.yaml as a loop by hand in plain torch, on one GPU or on the CPU: what the
record is compared with.

    python benchmarks/cifar10_speed_by_hand.py FOLDER [--seeds 0,1,2] [--epochs 8] [--fp32]

FOLDER has cifar-10-batches-bin, or images in train/CLASS and test/CLASS. Network, optimizer and
numbers: Jordan 2024, arXiv:2404.00498, and airbench94_muon in KellerJordan/cifar10-airbench. A line
of JSON for each seed: accuracy with six views, seconds of training, of the evaluation.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torchvision.datasets import ImageFolder

BATCH = 2000
SMOOTHING = 0.2
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Net(nn.Module):
    def __init__(self, patches: torch.Tensor) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 24, 2)
        values, vectors = torch.linalg.eigh(patches.T @ patches / len(patches))
        kernels = (vectors.T / (values[:, None] + 5e-4).sqrt()).view(12, 3, 2, 2)
        self.first.weight = nn.Parameter(
            torch.cat([kernels, -kernels]).float(), requires_grad=False
        )
        nn.init.zeros_(self.first.bias)
        layers: list[nn.Module] = [nn.GELU()]
        for before, after in ((24, 64), (64, 256), (256, 256)):
            layers += [
                conv(before, after),
                nn.MaxPool2d(2),
                norm(after),
                nn.GELU(),
                conv(after, after),
                norm(after),
                nn.GELU(),
            ]
        self.layers = nn.Sequential(*layers, nn.MaxPool2d(3), nn.Flatten())
        self.head = nn.Linear(256, 10, bias=False)
        self.head.weight.data /= self.head.weight.data.std()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.first(x))) / 256


def conv(before: int, after: int) -> nn.Conv2d:
    layer = nn.Conv2d(before, after, 3, padding=1, bias=False)
    nn.init.dirac_(layer.weight.data[:before])
    return layer


def norm(width: int) -> nn.BatchNorm2d:
    layer = nn.BatchNorm2d(width, eps=1e-12, momentum=0.4)
    layer.weight.requires_grad_(False)
    return layer


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    a = 3.4445
    b = -4.7750
    c = 2.0315
    x = matrix.bfloat16() / (matrix.norm() + 1e-7)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    for _ in range(3):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return (x.T if tall else x).float()


def load(folder: Path, part: str) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 (n, 3, 32, 32), and classes (n,)."""
    if (binary := folder / "cifar-10-batches-bin").is_dir():
        files = sorted(binary.glob("data_batch_?.bin" if part == "train" else "test_batch.bin"))
        records = torch.from_numpy(
            np.concatenate([np.fromfile(file, np.uint8) for file in files]).reshape(-1, 3073)
        )
        return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].long()
    images = ImageFolder(str(folder / part))
    x = torch.from_numpy(np.stack([np.asarray(image) for image, _ in images]))
    return x.permute(0, 3, 1, 2), torch.tensor(images.targets)


def augmented(padded: torch.Tensor, epoch: int) -> torch.Tensor:
    """padded: the epoch's images with 2 pixels on each side; half of the images were mirrored
    before the first epoch."""
    out = torch.empty(len(padded), 3, 32, 32, device=DEVICE).contiguous(
        memory_format=torch.channels_last
    )
    shifts = torch.randint(5, (len(padded), 2), device=DEVICE)
    for y in range(5):
        for x in range(5):
            rows = ((shifts[:, 0] == y) & (shifts[:, 1] == x)).nonzero()[:, 0]
            out[rows] = padded[rows, :, y : y + 32, x : x + 32]
    return out.flip(3) if epoch % 2 else out


def predict(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    shifted = F.pad(x, (1,) * 4, "reflect")
    views = ((x, 0.5), (shifted[:, :, :32, :32], 0.25), (shifted[:, :, 2:, 2:], 0.25))
    return sum(
        share * 0.5 * (net(view).float() + net(view.flip(3)).float()) for view, share in views
    )


def train(
    seed: int,
    epochs: int,
    x: torch.Tensor,
    y: torch.Tensor,
    x_val: torch.Tensor,
    y_val: torch.Tensor,
    fp32: bool,
) -> dict:
    torch.manual_seed(seed)
    began_s = time.perf_counter()
    net = Net(F.unfold(x[:5000].double(), 2).transpose(1, 2).flatten(0, 1).cpu()).to(
        DEVICE, memory_format=torch.channels_last
    )
    kernels = [p for p in net.parameters() if p.ndim == 4 and p.requires_grad]
    biases = [p for p in net.parameters() if p.ndim == 1 and p.requires_grad]
    decay = 2e-6 * BATCH
    groups = [
        {"params": p, "lr": rate, "rate": rate, "weight_decay": decay / rate}
        for p, rate in ((biases, 0.053), ([net.head.weight], 0.67))
    ]
    sgd = torch.optim.SGD(groups, momentum=0.85, nesterov=True)
    velocity = [torch.zeros_like(p) for p in kernels]
    mirrored = torch.where(
        (torch.rand(len(x), device=DEVICE) < 0.5).view(-1, 1, 1, 1), x.flip(3), x
    )
    padded = F.pad(mirrored, (2,) * 4, "reflect").contiguous(memory_format=torch.channels_last)
    cast = torch.autocast(DEVICE.type, torch.bfloat16, enabled=not fp32)
    steps = epochs * (len(x) // BATCH)
    step = 0
    net.train()
    for epoch in range(epochs):
        images = augmented(padded, epoch)
        for rows in torch.randperm(len(x), device=DEVICE)[: len(x) // BATCH * BATCH].split(BATCH):
            with cast:
                outputs = net(images[rows])
            loss = F.cross_entropy(
                outputs.float(), y[rows], label_smoothing=SMOOTHING, reduction="sum"
            )
            net.zero_grad()
            loss.backward()
            left = 1 - step / steps
            for group in sgd.param_groups:
                group["lr"] = group["rate"] * left
            sgd.step()
            with torch.no_grad():
                for p, v in zip(kernels, velocity, strict=True):
                    v.mul_(0.6).add_(p.grad)
                    p.mul_(len(p) ** 0.5 / p.norm())
                    p.sub_(orthogonal((p.grad + 0.6 * v).flatten(1)).view_as(p), alpha=0.24 * left)
            step += 1
        print(
            f"epoch {epoch + 1}: loss {loss.item() / BATCH:.4f}, "
            f"{time.perf_counter() - began_s:.1f} s",
            flush=True,
        )
    trained_s = time.perf_counter() - began_s
    net.eval()
    with torch.no_grad(), cast:
        guesses = torch.cat([predict(net, part) for part in x_val.split(1000)])
    accuracy = (guesses.argmax(1) == y_val).double().mean().item()
    evaluate_s = time.perf_counter() - began_s - trained_s
    return {
        "seed": seed,
        "epochs": epochs,
        "accuracy": accuracy,
        "train_s": round(trained_s, 2),
        "evaluate_s": round(evaluate_s, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--fp32", action="store_true")
    options = parser.parse_args()
    (x, y), (x_val, y_val) = (
        [tensor.to(DEVICE) for tensor in load(options.folder, part)] for part in ("train", "test")
    )
    mean, std = stats(x)
    x, x_val = ((part.float() / 255 - mean) / std for part in (x, x_val))
    for seed in options.seeds.split(","):
        print(
            json.dumps(train(int(seed), options.epochs, x, y, x_val, y_val, options.fp32)),
            flush=True,
        )


def stats(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values = x.transpose(0, 1).flatten(1).float() / 255
    return values.mean(1).view(3, 1, 1), values.std(1).view(3, 1, 1)


if __name__ == "__main__":
    main()
