"""The residual networks of He et al. 2015 for CIFAR-10, as in
frameworks/torch/models/cifar_resnet.py."""

from __future__ import annotations

from hvdtrain.frameworks.jax.layers import Functions
from hvdtrain.frameworks.jax.models.resnet import blocks_of, network
from hvdtrain.frameworks.model_options import check_resnet


def build(
    name: str,
    shape: tuple[int, int, int],
    outputs: int,
    *,
    zero_gamma: bool = False,
    norm: bool = True,
) -> Functions:
    """resnet8, resnet14, resnet20, resnet32, resnet44, resnet56 or resnet110 from random weights,
    for images of about 32x32 pixels (He et al. 2015, arXiv:1512.03385, 4.2).

    A 3x3 convolution of 16 channels, then three stages of n blocks with 16, 32 and 64 channels and
    two 3x3 convolutions each, so that 6n + 2 layers have weights; the mean over the remaining
    pixels; logits. Deviation from the paper: where the channels change, the shortcut is a 1x1
    convolution, as in torchvision and MLPerf Tiny.

    zero_gamma: true: the last norm of each residual block starts at scale 0, so that the block is
        its shortcut (Goyal 2017, 5.1)
    norm: true: a batch norm after each convolution; false: none, so that any number of ranks
        computes the same. The convolutions have no bias either, and each block doubles the variance
        at the start, so that the first learning rate must be small

    Raises UserError for zero_gamma without norm.
    """
    check_resnet(zero_gamma, norm)
    each = (int(name.removeprefix("resnet")) - 2) // 6
    return network(
        blocks_of([each] * 3, 16, of_two=True),
        (16, shape[2], 3, 3),
        outputs,
        by_default=False,
        small_images=True,
        zero_gamma=zero_gamma,
        norm=norm,
    )
