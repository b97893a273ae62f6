"""The section augment: how training images are changed."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from hvdtrain.config.sections.extra_keys import with_keys_of_extras
from hvdtrain.config.sections.section import Section


@with_keys_of_extras
class AugmentConfig(Section):
    """Augmentation of training images; the random numbers of an image depend on (seed, epoch,
    sample) only."""

    section = "augment"
    crop: int = Field(
        default=0,
        ge=0,
        le=10_000,
        description="pad each side by this many pixels, then take a random crop of the "
        "original size (CIFAR: 4)",
    )
    pad: Literal["zeros", "reflect"] = Field(
        default="zeros",
        description="what augment.crop pads with; zeros: black pixels; reflect: the mirrored "
        "image, without repeating the border pixels (Jordan 2024, "
        "arXiv:2404.00498)",
    )
    resized_crop: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="smallest area of a random crop as a fraction of the image, with an "
        "aspect ratio of 3/4 to 4/3, resized to the image size; 0: off (ImageNet: "
        "0.08). Image files (data.packed=false) and archives are cropped from the "
        "full image, other data from the stored one",
    )
    flip: bool | Literal["alternating"] = Field(
        default=False,
        description="true: mirror an image left to right with probability 1/2, drawn again in "
        "each epoch; alternating: mirror it in every second epoch, beginning with "
        "epoch 1 or 2 with probability 1/2 each (Jordan 2024, arXiv:2404.00498)",
    )
    cutout: int = Field(
        default=0,
        ge=0,
        le=10_000,
        description="side length in pixels of a square that is blacked out (DeVries 2017, "
        "arXiv:1708.04552)",
    )
    mixup: float = Field(
        default=0.0,
        ge=0,
        le=1e3,
        description="alpha of mixup: blend each image and its label with those of another "
        "sample, with a weight drawn from Beta(alpha, alpha) (Zhang 2017, "
        "arXiv:1710.09412)",
    )
    cutmix: float = Field(
        default=0.0,
        ge=0,
        le=1e3,
        description="alpha of CutMix: paste a box from another sample into each image, or "
        "mask, and mix the labels by area; the fraction outside the box is drawn "
        "from Beta(alpha, alpha) (Yun 2019, arXiv:1905.04899). Together with "
        "augment.mixup, each sample gets one of the two with probability 1/2",
    )
    rand_augment: int = Field(
        default=0,
        ge=0,
        le=16,
        description="number of operations applied to each image, drawn from 14 (RandAugment: "
        "Cubuk 2020, arXiv:1909.13719); for example 2",
    )
    magnitude: int = Field(
        default=9,
        ge=0,
        le=30,
        description="strength of augment.rand_augment on torchvision's scale: 30 is a "
        "rotation by 30 degrees or a shear of 0.3",
    )
    color_jitter: list[Annotated[float, Field(ge=0, le=10)]] = Field(
        default_factory=list,
        max_length=4,
        description="ranges of random brightness, contrast, saturation and hue, as in "
        "torchvision's ColorJitter, in random order, after augment.rand_augment: "
        "[0.4,0.4,0.4,0.1]",
    )
    erase: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="probability of overwriting a box of 2 to 33 % of the image with random "
        "pixels (Zhong 2017, arXiv:1708.04896)",
    )

    @property
    def is_enabled(self) -> bool:
        """Whether any augmentation is on."""
        return self != AugmentConfig()
