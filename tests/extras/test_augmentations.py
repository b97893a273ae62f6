"""Operations of RandAugment and colour jitter beside torchvision's functions; what is drawn beside
its transforms; erasing; CutMix."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hvdtrain.config.sections.augment import AugmentConfig
from hvdtrain.core.import_torchvision import import_torchvision
from hvdtrain.data.images import augment, mixing
from hvdtrain.data.images.augment import AugmentationParameters
from hvdtrain.data.images.mixing import cutmix_boxes, paste, remaining_shares
from hvdtrain.data.images.resized_crop import draw_keys
from hvdtrain.extras.augmentations.erasing import random_pixels
from hvdtrain.extras.augmentations.operations import (
    GEOMETRIC,
    HostArrays,
    Operation,
    apply_operations,
)
from hvdtrain.extras.augmentations.random_operations import color_jitter, rand_augment
from hvdtrain.frameworks.torch import augment as torch_augment

import_torchvision()
from torchvision.transforms import v2  # noqa: E402
from torchvision.transforms.v2 import functional as tv  # noqa: E402

# by operation: the smallest and the largest argument, and the name of the operation in
# torchvision's RandAugment
RANGES: dict[Operation, tuple[float, float, str]] = {
    Operation.IDENTITY: (0, 0, "Identity"),
    Operation.SHEAR_X: (-0.3, 0.3, "ShearX"),
    Operation.SHEAR_Y: (-0.3, 0.3, "ShearY"),
    Operation.TRANSLATE_X: (-14, 14, "TranslateX"),
    Operation.TRANSLATE_Y: (-14, 14, "TranslateY"),
    Operation.ROTATE: (-30, 30, "Rotate"),
    Operation.BRIGHTNESS: (0, 2, "Brightness"),
    Operation.COLOR: (0, 2, "Color"),
    Operation.CONTRAST: (0, 2, "Contrast"),
    Operation.SHARPNESS: (0, 2, "Sharpness"),
    Operation.POSTERIZE: (1, 8.99, "Posterize"),
    Operation.SOLARIZE: (0, 255, "Solarize"),
    Operation.AUTO_CONTRAST: (0, 0, "AutoContrast"),
    Operation.EQUALIZE: (0, 0, "Equalize"),
    Operation.HUE: (-0.5, 0.5, ""),
}
TO_ONE_LEVEL = (
    Operation.COLOR,
    Operation.CONTRAST,
    Operation.SHARPNESS,
    Operation.AUTO_CONTRAST,
    Operation.HUE,
)
SHAPES = [(32, 32, 3), (28, 20, 1), (2, 2, 3)]


def images(n: int, shape: tuple[int, int, int], seed: int = 0) -> np.ndarray:
    """Areas and noise: dark, bright and saturated ones."""
    rng, (height, width, channels) = np.random.default_rng(seed), shape
    areas = np.kron(
        rng.normal(0, 1, (n, height // 4 + 1, width // 4 + 1, channels)), np.ones((1, 4, 4, 1))
    )[:, :height, :width]
    pixels = (
        areas * rng.uniform(5, 70, (n, 1, 1, 1))
        + rng.uniform(40, 200, (n, 1, 1, 1))
        + rng.normal(0, 3, (n, *shape))
    )
    return pixels.clip(0, 255).astype(np.uint8)


def of_torchvision(x: torch.Tensor, operation: Operation, argument: float) -> torch.Tensor:
    """(C, H, W), by the calls that torchvision's RandAugment and ColorJitter make."""
    if operation == Operation.HUE:
        return tv.adjust_hue(x, argument)
    is_factor = Operation.BRIGHTNESS <= operation <= Operation.SHARPNESS
    magnitude = argument - is_factor if operation != Operation.SOLARIZE else argument / 255
    transform = v2.RandAugment()
    return transform._apply_image_or_video_transform(
        x, RANGES[operation][2], magnitude, transform.interpolation, transform._fill
    )


@pytest.mark.parametrize("operation", list(RANGES), ids=lambda operation: operation.name)
@pytest.mark.parametrize("shape", SHAPES)
def test_each_operation_is_torchvisions(operation: Operation, shape: tuple[int, int, int]) -> None:
    """To the bit; where torchvision rounds sums of float32, to one grey level. Its grids are of
    float64 for images of float64."""
    n, (low, high, _) = 40, RANGES[operation]
    x = images(n, shape)
    arguments = np.random.default_rng(1).uniform(low, high, n)
    if operation in (Operation.POSTERIZE, Operation.SOLARIZE):
        arguments = np.floor(arguments)
    found = apply_operations(x, np.full((n, 1), operation), arguments[:, None], HostArrays())
    tensors = torch.from_numpy(x).permute(0, 3, 1, 2)
    tensors = tensors.double() if operation in GEOMETRIC else tensors
    expected = torch.stack(
        [
            of_torchvision(each, operation, a)
            for each, a in zip(tensors, arguments.tolist(), strict=True)
        ]
    )
    apart = np.abs(found.astype(int) - expected.permute(0, 2, 3, 1).numpy().astype(int))
    assert apart.max() <= (operation in TO_ONE_LEVEL)
    assert min(shape) <= 2 or (apart > 0).mean() < 0.1
    assert min(shape) <= 2 or operation == Operation.IDENTITY or (found != x).any() or shape[2] == 1
    moved = torch_augment.apply_by_gathers(
        torch.from_numpy(x),
        AugmentationParameters(operation=np.full((n, 1), operation), argument=arguments[:, None]),
    )
    np.testing.assert_array_equal(moved.numpy(), found)


def test_a_few_operations_by_hand() -> None:
    x = np.array([[10, 20, 30], [40, 50, 60], [70, 80, 90]], np.uint8)[None, :, :, None]

    def done(operation: Operation, argument: float) -> list[list[int]]:
        result: list[list[int]] = apply_operations(
            x, np.array([[operation]]), np.array([[argument]]), HostArrays()
        )[0, :, :, 0].tolist()
        return result

    assert done(Operation.TRANSLATE_X, 1.9) == [[0, 10, 20], [0, 40, 50], [0, 70, 80]]
    assert done(Operation.TRANSLATE_Y, -1) == [[40, 50, 60], [70, 80, 90], [0, 0, 0]]
    assert done(Operation.ROTATE, 90) == [[30, 60, 90], [20, 50, 80], [10, 40, 70]]
    # half a pixel at the first row's centre
    assert done(Operation.SHEAR_X, 1) == [
        [20, 30, 0],
        [60, 0, 0],
        [0, 0, 0],
    ]
    assert done(Operation.CONTRAST, 0) == [[50] * 3] * 3
    assert done(Operation.AUTO_CONTRAST, 0) == [[0, 31, 63], [95, 127, 159], [191, 223, 255]]
    assert done(Operation.SOLARIZE, 80) == [[10, 20, 30], [40, 50, 60], [70, 175, 165]]
    assert done(Operation.POSTERIZE, 3) == [[0, 0, 0], [32, 32, 32], [64, 64, 64]]
    assert x[0, 0, 0, 0] == 10, "nothing is changed in place"


@pytest.mark.parametrize("magnitude", range(31))
def test_magnitudes_are_torchvisions(magnitude: int) -> None:
    keys = draw_keys(1, np.zeros(600, np.int64), np.arange(600))
    operations, arguments = rand_augment(keys, 2, magnitude, 48, 64)
    assert operations.shape == arguments.shape == (600, 2)
    for operation, (_, _, name) in RANGES.items():
        if operation == Operation.HUE:
            assert operation not in operations
            continue
        sizes, signed = v2.RandAugment._AUGMENTATION_SPACE[name]
        table = sizes(31, 48, 64)
        size = (
            0.0
            if table is None
            else float(table[magnitude]) * (255 if operation == Operation.SOLARIZE else 1)
        )
        middle = float(Operation.BRIGHTNESS <= operation <= Operation.SHARPNESS)
        expected = sorted({middle - size, middle + size} if signed else {size})
        np.testing.assert_allclose(
            np.unique(arguments[operations == operation]), expected, rtol=1e-6, atol=1e-7
        )


def test_operations_and_their_directions_have_equal_probability() -> None:
    n = 14_000
    operations, arguments = rand_augment(draw_keys(1, np.full(n, 3), np.arange(n)), 2, 9, 32, 32)
    for column in operations.T:
        counts = np.bincount(column, minlength=14)
        # chi-square, 13 degrees of freedom, 99.9 %
        assert len(counts) == 14 and ((counts - n / 14) ** 2 / (n / 14)).sum() < 34.5
    pairs = np.bincount(operations @ [14, 1], minlength=196)
    assert (
        (pairs - n / 196) ** 2 / (n / 196)
    ).sum() < 261.6  # 195 degrees of freedom: the second does not depend on the first
    turned = arguments[operations == Operation.ROTATE]
    assert (turned > 0).mean() == pytest.approx(0.5, abs=4 * 0.5 / len(turned) ** 0.5)


def test_jitter_is_drawn_as_torchvisions() -> None:
    n = 4000
    widths = [0.4, 1.5, 0.3, 0.1]
    operations, arguments = color_jitter(draw_keys(1, np.full(n, 3), np.arange(n)), widths)
    orders, counts = np.unique(operations, axis=0, return_counts=True)
    # 23 degrees of freedom, 99.9 %
    assert len(orders) == 24 and ((counts - n / 24) ** 2 / (n / 24)).sum() < 49.8
    transform = v2.ColorJitter(*widths)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        theirs = [transform.make_params([]) for _ in range(1000)]
    kinds = [Operation.BRIGHTNESS, Operation.CONTRAST, Operation.COLOR, Operation.HUE]
    for kind, name in zip(kinds, ("brightness", "contrast", "saturation", "hue"), strict=True):
        found = arguments[operations == kind]
        other = np.array([each[f"{name}_factor"] for each in theirs])
        width = np.ptp(other)
        np.testing.assert_allclose(
            [found.min(), found.max()], [other.min(), other.max()], atol=0.02 * width
        )
        assert found.mean() == pytest.approx(
            other.mean(), abs=0.05 * width
        ) and found.std() == pytest.approx(other.std(), rel=0.1)
    alone = color_jitter(draw_keys(1, np.full(n, 3), np.arange(n)), [0.0, 1.5])
    assert (alone[0] == Operation.CONTRAST).all() and (
        alone[1][:, 0] == arguments[operations == Operation.CONTRAST]
    ).all()


ALL = AugmentConfig(
    crop=4,
    flip=True,
    rand_augment=3,
    magnitude=20,
    color_jitter=[0.4, 0.4, 0.4, 0.1],
    erase=0.5,
    cutout=3,
    cutmix=1.0,
    mixup=0.4,
)


def drawn(
    config: AugmentConfig, n: int, shape: tuple[int, int, int], epoch: int = 3
) -> AugmentationParameters:
    return augment.draw(config, 1, np.full(n, epoch), np.arange(n), shape)


@pytest.mark.parametrize("shape", SHAPES[:2])
@pytest.mark.parametrize("n", [0, 50])
def test_an_image_does_not_depend_on_others_nor_on_the_device(
    shape: tuple[int, int, int], n: int
) -> None:
    x = images(n, shape)
    d = drawn(ALL, n, shape)
    whole = augment.apply(x, d)
    assert whole.shape == x.shape and whole.dtype == np.uint8
    np.testing.assert_array_equal(
        torch_augment.apply_by_gathers(torch.from_numpy(x), d).numpy(), whole
    )
    for rows in (slice(0, 1), slice(7, 20)):
        part = AugmentationParameters(*(None if each is None else each[rows] for each in d))
        np.testing.assert_array_equal(augment.apply(x[rows], part), whole[rows])
    assert d.operation is not None and d.operation.shape == (n, 7)


def test_erased_boxes_are_distributed_as_torchvisions() -> None:
    transform = v2.RandomErasing()
    n = 20_000
    with torch.random.fork_rng():
        torch.manual_seed(0)
        params = [transform.make_params([torch.zeros(3, 40, 50)]) for _ in range(3000)]
    theirs = np.array(
        [
            [each["i"], each["j"], each["h"], each["w"], each["h"] * each["w"]]
            for each in params
            if each["v"] is not None
        ]
    )
    box = drawn(AugmentConfig(erase=0.25), n, (40, 50, 3)).erase_box
    assert box is not None
    top, bottom, left, right = box[box[:, 1] > 0].T
    assert len(top) / n == pytest.approx(0.25, abs=4 * (0.1875 / n) ** 0.5)
    ours = np.stack([top, left, bottom - top, right - left, (bottom - top) * (right - left)], 1)
    np.testing.assert_allclose(
        ours.mean(0), theirs.mean(0), atol=5 * theirs.std(0).max() / 3000**0.5, rtol=0.02
    )
    np.testing.assert_allclose(ours.std(0), theirs.std(0), rtol=0.07)
    assert bottom.max() == 40 and right.max() == 50 and top.min() == left.min() == 0


def test_erased_pixels_are_random_and_the_others_stay() -> None:
    n = 200
    shape = (20, 24, 3)
    x, d = np.full((n, *shape), 7, np.uint8), drawn(AugmentConfig(erase=1.0), n, shape)
    found = augment.apply(x, d)
    assert d.erase_box is not None and d.erase_key is not None
    for image, (top, bottom, left, right) in zip(found, d.erase_box.tolist(), strict=True):
        inside = np.zeros(shape[:2], bool)
        inside[top:bottom, left:right] = True
        assert (image[~inside] == 7).all() and (not inside.any() or (image[inside] != 7).any())
    pixels = random_pixels(d.erase_key, *shape)
    counts = np.bincount(pixels.ravel(), minlength=256)
    assert (
        (counts - pixels.size / 256) ** 2 / (pixels.size / 256)
    ).sum() < 330.5  # 255 degrees of freedom, 99.9 %
    assert (
        abs(np.corrcoef(pixels.reshape(n, -1)[:, :40].T.astype(float)) - np.eye(40)).max()
        < 5 / n**0.5
    )
    assert (random_pixels(d.erase_key[3:4], *shape) == pixels[3]).all()


def test_boxes_of_cutmix_by_hand() -> None:
    """A quarter of 8 x 12 pixels is 4 x 6: about a centre, and clipped at a corner; nothing of it
    with weight 1."""
    boxes = cutmix_boxes(
        np.array([0.75, 0.75, 1.0, 0.0]),
        np.array([[0.5, 0.5], [0.99, 0.0], [0.5, 0.5], [0.5, 0.5]]),
        8,
        12,
    )
    assert boxes.tolist() == [[2, 6, 3, 9], [5, 8, 0, 3], [4, 4, 6, 6], [0, 8, 0, 12]]
    assert remaining_shares(boxes, 8, 12).tolist() == [0.75, 1 - 9 / 96, 1.0, 0.0]


def test_boxes_and_labels_of_cutmix_are_torchvisions() -> None:
    """By the calls that its CutMix makes: a box of its making pastes the same pixels, and has the
    same weight."""
    n = 300
    shape = (9, 14, 3)
    x = images(2 * n, shape)[:n]
    other = images(2 * n, shape)[n:]
    d = drawn(AugmentConfig(cutmix=1.0), n, shape)
    assert d.cutmix_box is not None and d.mixup_weight is not None
    batch = {"x": x, "partner_x": other, "cutmix_box": d.cutmix_box, "mixup_weight": d.mixup_weight}
    found = augment.augment_batch(batch)["x"]
    transform = v2.CutMix(num_classes=10)
    for place, (top, bottom, left, right) in enumerate(d.cutmix_box.tolist()):
        params: dict[str, Any] = {
            "box": (left, top, right, bottom),
            "batch_size": 2,
            "labels": None,
        }
        both = torch.from_numpy(np.stack([x[place], other[place]])).permute(0, 3, 1, 2)
        np.testing.assert_array_equal(
            found[place], transform.transform(both, params)[0].permute(1, 2, 0).numpy()
        )
        assert d.mixup_weight[place] == pytest.approx(
            1.0 - (right - left) * (bottom - top) / (14 * 9), abs=1e-15
        )
    on_device = torch_augment.paste_on_device(
        *(torch.from_numpy(a).permute(0, 3, 1, 2) for a in (x, other)), d.cutmix_box
    )
    np.testing.assert_array_equal(on_device.permute(0, 2, 3, 1).numpy(), found)
    sides = np.sqrt(1 - np.random.default_rng(0).uniform(size=(100_000, 1))) * [9, 14]
    expected = (2 * (sides / 2).astype(int)).max(0)
    assert (
        (d.cutmix_box[:, 1] - d.cutmix_box[:, 0]).max(),
        (d.cutmix_box[:, 3] - d.cutmix_box[:, 2]).max(),
    ) <= tuple(expected)


@pytest.mark.parametrize("alpha", [0.2, 1.0])
def test_shares_of_cutmix_before_clipping_follow_the_beta_distribution(alpha: float) -> None:
    """Of images that are so large that few boxes are clipped, by a rare centre: the sides of boxes
    that touch no border."""
    n = 40_000
    size = 2000
    box = drawn(AugmentConfig(cutmix=alpha), n, (size, size, 1)).cutmix_box
    assert box is not None
    sides = box[:, 1] - box[:, 0]
    expected = size * np.sqrt(np.random.default_rng(0).beta(alpha, alpha, n))
    corner = (box[:, 0] > 0) & (box[:, 1] < size)
    centres = np.random.default_rng(1).integers(0, size, n)
    fits = (centres - expected / 2 > 0) & (centres + expected / 2 < size)
    for share in (0.1, 0.3, 0.5, 0.7):
        assert (sides[corner] < share * size).mean() == pytest.approx(
            (expected[fits] < share * size).mean(), abs=0.02
        )


def test_with_mixup_each_sample_has_one_of_both() -> None:
    n = 4000
    shape = (32, 32, 3)
    config = AugmentConfig(cutmix=1.0, mixup=0.4)
    both, cut, mixed = (
        drawn(each, n, shape)
        for each in (config, AugmentConfig(cutmix=1.0), AugmentConfig(mixup=0.4))
    )
    assert (
        both.cutmix_box is not None and cut.cutmix_box is not None and both.mixup_weight is not None
    )
    is_cut = both.mixup_weight == cut.mixup_weight
    assert is_cut.mean() == pytest.approx(0.5, abs=0.03)
    np.testing.assert_array_equal(both.mixup_weight[~is_cut], mixed.mixup_weight[~is_cut])
    np.testing.assert_array_equal(both.cutmix_box, np.where(is_cut[:, None], cut.cutmix_box, 0))
    x = images(2 * n, (8, 8, 1))[:n]
    other = images(2 * n, (8, 8, 1))[n:]
    d = drawn(config, n, (8, 8, 1))
    assert d.cutmix_box is not None and d.mixup_weight is not None
    batch = {"x": x, "partner_x": other, "cutmix_box": d.cutmix_box, "mixup_weight": d.mixup_weight}
    found = augment.augment_batch(batch)["x"]
    has_box = d.cutmix_box[:, 1] > 0
    np.testing.assert_array_equal(found[has_box], paste(x, other, d.cutmix_box)[has_box])
    np.testing.assert_array_equal(found[~has_box], mixing.mixup(x, other, d.mixup_weight)[~has_box])
    tensors = {
        name: torch.from_numpy(batch[name]).permute(0, 3, 1, 2) for name in ("x", "partner_x")
    }
    np.testing.assert_array_equal(
        torch_augment.augment_batch(batch | tensors)["x"].permute(0, 2, 3, 1).numpy(), found
    )
