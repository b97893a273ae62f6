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
        description="random crop of the image's own size after padding with this many pixels on "
        "each side (CIFAR: 4)",
    )
    pad: Literal["zeros", "reflect"] = Field(
        default="zeros",
        description="what augment.crop pads with: zeros: black pixels; reflect: the image "
        "mirrored at its borders, without the pixels of "
        "the border (Jordan 2024, arXiv:2404.00498)",
    )
    resized_crop: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="random crop of at least this share of the area, aspect ratio 3/4 to 4/3, "
        "resized to the image's size; of image files "
        "(data.packed=false) and archives from the whole image, else from the stored one; 0: off "
        "(ImageNet: 0.08)",
    )
    flip: bool | Literal["alternating"] = Field(
        default=False,
        description="true: mirror an image left to right with probability 1/2, in each epoch "
        "anew; alternating: in every second epoch, in "
        "the first one with probability 1/2 (Jordan 2024, arXiv:2404.00498)",
    )
    cutout: int = Field(
        default=0,
        ge=0,
        le=10_000,
        description="black out a square with this side length in pixels (DeVries 2017, "
        "arXiv:1708.04552)",
    )
    mixup: float = Field(
        default=0.0,
        ge=0,
        le=1e3,
        description="alpha: mix each image and its label with another sample's, in a proportion "
        "drawn from Beta(alpha, alpha) "
        "(Zhang 2017, arXiv:1710.09412)",
    )
    cutmix: float = Field(
        default=0.0,
        ge=0,
        le=1e3,
        description="alpha: paste a box of another sample into each image, or mask, and mix "
        "labels by areas; the share outside of the box "
        "is drawn from Beta(alpha, alpha) (Yun 2019, arXiv:1905.04899). With augment.mixup each "
        "sample has either, with probability 1/2",
    )
    rand_augment: int = Field(
        default=0,
        ge=0,
        le=16,
        description="operations on each image, one after the other, each drawn from 14 "
        "(RandAugment: Cubuk 2020, arXiv:1909.13719): 2",
    )
    magnitude: int = Field(
        default=9,
        ge=0,
        le=30,
        description="of augment.rand_augment, as torchvision counts: 30 is a rotation of 30 "
        "degrees, a shear of 0.3",
    )
    color_jitter: list[Annotated[float, Field(ge=0, le=10)]] = Field(
        default_factory=list,
        max_length=4,
        description="widths of random brightness, contrast, saturation, hue, as of torchvision's "
        "ColorJitter, in a random order, after "
        "augment.rand_augment: [0.4,0.4,0.4,0.1]",
    )
    erase: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="probability of a box of random pixels, of 2 to 33 % of the image (Zhong "
        "2017, arXiv:1708.04896)",
    )
