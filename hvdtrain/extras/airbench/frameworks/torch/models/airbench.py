"""airbench: the network that holds the records of training CIFAR-10 to 94 % in the shortest time
(Jordan 2024, arXiv:2404.00498)."""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch.nn import functional

from hvdtrain.errors import UserError

# samples whose patches are in memory at the same time: 46 MB for CIFAR-10; all 5,000 samples would
# take 0.92 GB
PART = 250


class Whitening(nn.Conv2d):
    """Multiplies 2x2 patches by the eigenvectors of their covariance, with both signs, so that
    outputs are uncorrelated with variance 1.

    (n, C, H, W) -> (n, 8 C, H - 1, W - 1). The kernels are computed from training samples before
    the first step and are not trained, but the bias is. Without `from_samples` it is an ordinary
    layer.
    """

    def __init__(self, channels: int, eps: float, from_samples: bool = True) -> None:
        super().__init__(channels, 8 * channels, kernel_size=2)
        self.eps = eps
        self.weight.requires_grad_(not from_samples)
        assert self.bias is not None
        nn.init.zeros_(self.bias)

    @torch.no_grad()
    def begin_with(self, x: torch.Tensor) -> None:
        """Computes the kernels, as in section 3.2 of the paper, in float64 on the host. x: (n, C,
        H, W), samples as the network gets them."""
        products = torch.zeros(self.weight[0].numel(), self.weight[0].numel(), dtype=torch.float64)
        count = 0
        for part in x.detach().split(PART):
            # (patches, 4 C)
            patches = (
                nn.functional.unfold(part.to("cpu", torch.float64), 2).transpose(1, 2).flatten(0, 1)
            )
            products += patches.T @ patches
            count += len(patches)
        variances, vectors = torch.linalg.eigh(products / count)
        # a row for each, the largest first
        largest = vectors.flip(1).T / torch.sqrt(variances.flip(0) + self.eps)[:, None]
        # the sign of an eigenvector depends on the library
        largest = largest * torch.where(largest.sum(1, keepdim=True) < 0, -1.0, 1.0)
        self.weight.copy_(torch.cat([largest, -largest]).view(self.weight.shape))


class AirbenchBlock(nn.Sequential):
    """Two convolutions that are initialized as the identity of their first channels; the image is
    halved after the first."""

    def __init__(self, before: int, after: int, identity: bool) -> None:
        super().__init__(
            _conv(before, after, identity),
            nn.MaxPool2d(2),
            _norm(after),
            nn.GELU(),
            _conv(after, after, identity),
            _norm(after),
            nn.GELU(),
        )


class Airbench(nn.Module):
    """The network. The trainer calls begin_with() once, before the first step, with `first_samples`
    of the training set."""

    first_samples = 5000

    def __init__(
        self,
        channels: int,
        widths: tuple[int, ...],
        outputs: int,
        *,
        whitening: bool,
        whitening_eps: float,
        identity: bool,
    ) -> None:
        super().__init__()
        self.has_whitening = whitening
        self.whitening = Whitening(channels, whitening_eps, from_samples=whitening)
        self.blocks = nn.Sequential(
            nn.GELU(),
            *(
                AirbenchBlock(*pair, identity)
                for pair in itertools.pairwise((8 * channels, *widths))
            ),
        )
        self.fc = nn.Linear(widths[-1], outputs, bias=False)
        with torch.no_grad():
            self.fc.weight /= self.fc.weight.std()

    def begin_with(self, x: torch.Tensor) -> None:
        if self.has_whitening:
            self.whitening.begin_with(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.whitening(x))
        # adaptive pooling has no deterministic kernel on a GPU
        x = functional.max_pool2d(x, x.shape[2:]).flatten(1)
        return self.fc(x) / x.shape[1]


def _conv(before: int, after: int, identity: bool) -> nn.Conv2d:
    layer = nn.Conv2d(before, after, kernel_size=3, padding=1, bias=False)
    if identity:
        with torch.no_grad():
            nn.init.dirac_(layer.weight[:before])
    return layer


def _norm(width: int) -> nn.BatchNorm2d:
    """Returns a norm without a trained weight."""
    # momentum: the weight of the new statistics
    layer = nn.BatchNorm2d(width, eps=1e-12, momentum=0.4)
    layer.weight.requires_grad_(False)
    return layer


def build(
    name: str,
    shape: tuple[int, int, int],
    outputs: int,
    *,
    widths: tuple[int, ...] = (64, 256, 256),
    whitening: bool = True,
    whitening_eps: float = 5e-4,
    identity: bool = True,
) -> nn.Module:
    """Returns a whitening convolution of 2x2 patches, blocks of two 3x3 convolutions, the largest
    number of each channel, a linear layer.

    Images (n, C, H, W) of 9x9 pixels and more, for three blocks. The first layer is computed from
    5,000 training samples. In a block: conv, max-pool of 2, batch norm, GELU, conv, batch norm,
    GELU; norms have no weight. The last layer's weights have a standard deviation of 1, and its
    outputs are divided by its width.

    widths: channels of each block
    whitening: the first layer is computed from training samples; false: it is trained as all others
    whitening_eps: added to the variances of the patches
    identity: convolutions begin as the identity of their first channels; false: with random numbers

    Raises UserError for widths below 1 and images that the blocks halve to nothing.
    """
    if min(widths, default=0) < 1:
        raise UserError(
            f"widths {widths} are not valid",
            "model.widths",
            "one width of 1 or more for each block",
        )
    smallest = 2 ** len(widths) + 1
    if min(shape[:2]) < smallest:
        what = f"{len(widths)} blocks halve images of {shape[0]}x{shape[1]} to nothing"
        raise UserError(
            what, "model.widths", f"fewer widths, or images of {smallest}x{smallest} and more"
        )
    return Airbench(
        shape[2],
        widths,
        outputs,
        whitening=whitening,
        whitening_eps=whitening_eps,
        identity=identity,
    )
