"""Augmentation: results by hand, the distribution of its random numbers, equal results on every
framework, and the loss of a mixture."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from ranks import needs_extra

from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.config.read import configure
from hvdtrain.config.sections.augment import AugmentConfig
from hvdtrain.core.arrays import Batch
from hvdtrain.core.import_torchvision import import_torchvision
from hvdtrain.core.progress import Hyper
from hvdtrain.data.images import augment, mixing
from hvdtrain.data.images.augment import AugmentationParameters
from hvdtrain.data.images.resized_crop import resized_crop
from hvdtrain.errors import UserError
from hvdtrain.frameworks.torch import augment as torch_augment
from hvdtrain.tasks.classification import Classification
from hvdtrain.training.build import build_learner

ALL = AugmentConfig(crop=4, flip=True, cutout=5, mixup=0.4)
BOXES = AugmentConfig(resized_crop=0.1, flip=True, cutout=5)
REFLECTED = AugmentConfig(crop=4, pad="reflect", flip="alternating", cutout=5, mixup=0.4)
SHAPES = [(32, 32, 3), (28, 20, 1), (9, 13, 4)]
# 1 2 3 4 / 5 6 7 8 / 9 10 11 12 / 13 14 15 16
PICTURE = np.arange(1, 17, dtype=np.uint8).reshape(1, 4, 4, 1)


def augmentation(
    config: AugmentConfig,
    n: int,
    shape: tuple[int, int, int] = (32, 32, 3),
    seed: int = 1,
    epoch: int = 3,
) -> AugmentationParameters:
    return augment.draw(config, seed, np.full(n, epoch), np.arange(n), shape)


def images(n: int, shape: tuple[int, int, int], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, *shape), dtype=np.uint8)


def taken(d: AugmentationParameters, rows: np.ndarray | slice) -> AugmentationParameters:
    return AugmentationParameters(*(None if part is None else part[rows] for part in d))


def table(x: np.ndarray) -> list[list[int]]:
    result: list[list[int]] = x[0, :, :, 0].tolist()
    return result


def test_each_augmentation_by_hand() -> None:
    moved = augment.apply(PICTURE, AugmentationParameters(shift=np.array([[1, -1]])))
    assert table(moved) == [[0, 5, 6, 7], [0, 9, 10, 11], [0, 13, 14, 15], [0, 0, 0, 0]]
    turned = augment.apply(PICTURE, AugmentationParameters(flipped=np.array([True])))
    assert table(turned) == [[4, 3, 2, 1], [8, 7, 6, 5], [12, 11, 10, 9], [16, 15, 14, 13]]
    blackened = augment.apply(PICTURE, AugmentationParameters(cutout_box=np.array([[0, 1, 2, 4]])))
    assert table(blackened) == [[1, 2, 0, 0], [5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16]]
    reflected = augment.apply(PICTURE, AugmentationParameters(reflected_shift=np.array([[1, -2]])))
    assert table(reflected) == [[7, 6, 5, 6], [11, 10, 9, 10], [15, 14, 13, 14], [11, 10, 9, 10]]
    # in this order
    both = AugmentationParameters(
        shift=np.array([[1, -1]]), flipped=np.array([True]), cutout_box=np.array([[0, 2, 0, 1]])
    )
    assert table(augment.apply(PICTURE, both)) == [
        [0, 6, 5, 0],
        [0, 10, 9, 0],
        [15, 14, 13, 0],
        [0, 0, 0, 0],
    ]
    assert table(PICTURE) == np.arange(1, 17).reshape(4, 4).tolist(), "nothing is changed in place"


def test_resized_crop_by_hand() -> None:
    """Two pixels over four points lie at -1/4, 1/4, 3/4, 5/4, and end at the box, not at the
    image."""
    x = np.array([[0, 100, 250, 7], [80, 180, 9, 9], [5, 5, 5, 5], [5, 5, 5, 5]], np.uint8).reshape(
        1, 4, 4, 1
    )
    assert table(resized_crop(x, np.array([[0, 0, 2, 2]]))) == [
        [0, 25, 75, 100],
        [20, 45, 95, 120],
        [60, 85, 135, 160],
        [80, 105, 155, 180],
    ]
    assert table(resized_crop(x, np.array([[0, 0, 4, 4]]))) == table(x)
    turned = augment.apply(
        x,
        AugmentationParameters(
            crop_box=np.array([[0, 0, 2, 2]]),
            flipped=np.array([True]),
            cutout_box=np.array([[1, 4, 0, 4]]),
        ),
    )
    assert table(turned) == [[100, 75, 25, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]


def test_mixup_is_exact_and_rounds_half_up() -> None:
    shares = np.array([0.0, 1.0, 0.5, 0.25, 40000 / 65536, 1 / 65536])
    x, other = (
        np.broadcast_to(a, (6, 16, 16, 256)).astype(np.uint8)
        for a in (np.arange(256).reshape(16, 16, 1), np.arange(256))
    )
    mixed = mixing.mixup(x, other, shares)
    for place, share in enumerate(map(Fraction, shares)):
        top = share.numerator * x[place].astype(np.int64) + (
            share.denominator - share.numerator
        ) * other[place].astype(np.int64)
        np.testing.assert_array_equal(
            mixed[place], (2 * top + share.denominator) // (2 * share.denominator)
        )
    assert mixed[2, 0, 1, 2] == 2, "1 and 2 in halves"
    tensors = [torch.from_numpy(a).permute(0, 3, 1, 2) for a in (x, other)]
    for found in (
        torch_augment.mixup(*tensors, shares),
        torch_augment.mixup_on_device(*tensors, torch.from_numpy(shares)),
    ):
        np.testing.assert_array_equal(found.permute(0, 2, 3, 1).numpy(), mixed)


def test_shifts_are_uniform_and_half_of_the_images_are_flipped() -> None:
    n = 20_000
    d = augmentation(ALL, n)
    assert (
        d.shift is not None
        and d.flipped is not None
        and d.cutout_box is not None
        and d.mixup_weight is not None
    )
    counts = np.bincount((d.shift + 4) @ [9, 1], minlength=81)
    # chi-square, 80 degrees of freedom, 99.9 %
    assert len(counts) == 81 and ((counts - n / 81) ** 2 / (n / 81)).sum() < 124.8
    assert d.flipped.mean() == pytest.approx(0.5, abs=4 * 0.5 / n**0.5)
    others = mixing.partners_of(ALL, 1, np.full(n, 3), np.arange(n), 1000)
    each = np.column_stack(
        [
            d.shift,
            d.flipped,
            d.cutout_box[:, ::2],
            d.mixup_weight,
            abs(d.mixup_weight - 0.5),
            others,
        ]
    )
    assert abs(np.corrcoef(each.T) - np.eye(8)).max() < 4 / n**0.5, "random numbers are independent"


def test_an_image_is_mirrored_in_every_second_epoch_and_in_the_first_one_by_a_coin() -> None:
    n = 20_000
    config = AugmentConfig(flip="alternating")
    epochs = [augmentation(config, n, epoch=epoch).flipped for epoch in range(5)]
    assert epochs[0] is not None and epochs[0].mean() == pytest.approx(0.5, abs=4 * 0.5 / n**0.5)
    for epoch, flipped in enumerate(epochs):
        np.testing.assert_array_equal(flipped, epochs[0] ^ (epoch % 2 == 1))
    other = augmentation(config, n, seed=2, epoch=0).flipped
    assert (other == epochs[0]).mean() == pytest.approx(0.5, abs=4 * 0.5 / n**0.5)
    np.testing.assert_array_equal(
        augmentation(AugmentConfig(flip=True), n, epoch=0).flipped,
        epochs[0],
        err_msg="the same first epoch",
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_reflected_shifts_are_windows_of_torchs_reflection_padding(
    shape: tuple[int, int, int],
) -> None:
    x = images(50, shape)
    shift = augmentation(REFLECTED, 50, shape).reflected_shift
    zeros = augmentation(AugmentConfig(crop=4), 50, shape).shift
    assert shift is not None and np.abs(shift).max() == 4
    np.testing.assert_array_equal(shift, zeros, err_msg="the padding changes no random number")
    padded = torch.nn.functional.pad(
        torch.from_numpy(x).permute(0, 3, 1, 2).double(), (4, 4, 4, 4), mode="reflect"
    )
    found = augment.apply(x, AugmentationParameters(reflected_shift=shift))
    for place, (down, right) in enumerate(shift.tolist()):
        window = padded[place, :, 4 + down : 4 + down + shape[0], 4 + right : 4 + right + shape[1]]
        np.testing.assert_array_equal(found[place], window.permute(1, 2, 0).numpy())


def test_cutout_boxes_have_their_centre_on_any_pixel_and_are_clipped_at_the_border() -> None:
    n = 8000
    square = augmentation(AugmentConfig(cutout=2), n, (4, 5, 3)).cutout_box
    assert square is not None
    edges, counts = np.unique(square, axis=0, return_counts=True)
    rows = [(0, 1), (0, 2), (1, 3), (2, 4)]
    columns = [(0, 1), (0, 2), (1, 3), (2, 4), (3, 5)]
    assert edges.tolist() == sorted([*r, *c] for r in rows for c in columns)
    assert (
        (counts - n / 20) ** 2 / (n / 20)
    ).sum() < 43.8  # chi-square, 19 degrees of freedom, 99.9 %
    odd = augmentation(AugmentConfig(cutout=3), n, (9, 9, 3)).cutout_box
    assert odd is not None and (odd[:, 1] - odd[:, 0]).max() == 3 == (odd[:, 3] - odd[:, 2]).max()


@pytest.mark.parametrize("alpha", [0.01, 0.2, 0.5, 1.0, 4.0, 1000.0])
def test_mixup_weights_follow_the_beta_distribution(alpha: float) -> None:
    """Variance 1 / (4 (2 alpha + 1)), kurtosis 3 - 6 / (2 alpha + 3), and the quantiles of numpy's
    own draws."""
    n = 100_000
    share = augmentation(AugmentConfig(mixup=alpha), n).mixup_weight
    assert (
        share is not None
        and share.min() >= 0
        and share.max() <= 1
        and (share * 65536 % 1 == 0).all()
    )
    deviation = (4 * (2 * alpha + 1)) ** -0.5
    assert share.mean() == pytest.approx(0.5, abs=4 * deviation / n**0.5)
    assert share.std() == pytest.approx(deviation, rel=0.01)
    assert ((share - 0.5) ** 4).mean() / share.var() ** 2 == pytest.approx(
        3 - 6 / (2 * alpha + 3), rel=0.03
    )
    other = np.random.default_rng(0).beta(alpha, alpha, n)
    for edge in 0.5 + deviation * np.array([-0.95, -0.6, -0.2, 0.4, 0.8]):
        assert (share < edge).mean() == pytest.approx(
            (other < edge).mean(), abs=4 * (0.5 / n) ** 0.5
        )


def test_partners_of_are_uniform_over_the_data_set() -> None:
    n = 10_000
    others = mixing.partners_of(ALL, 1, np.zeros(n, np.int64), np.arange(n), 10)
    assert others is not None and others.dtype == np.int64
    assert (
        (np.bincount(others, minlength=10) - n / 10) ** 2 / (n / 10)
    ).sum() < 27.9  # chi-square, 9 degrees of freedom, 99.9 %
    assert mixing.partners_of(BOXES, 1, np.zeros(n, np.int64), np.arange(n), 10) is None


def test_crop_boxes_are_distributed_as_those_of_torchvision() -> None:
    import_torchvision()
    from torchvision.transforms import RandomResizedCrop

    with torch.random.fork_rng():
        torch.manual_seed(0)
        theirs = np.array(
            [
                RandomResizedCrop.get_params(torch.zeros(1, 40, 50), [0.2, 1.0], [3 / 4, 4 / 3])
                for _ in range(3000)
            ]
        )
    box = augmentation(AugmentConfig(resized_crop=0.2), 20_000, (40, 50, 3)).crop_box
    assert box is not None
    for ours, other in (
        (box, theirs),
        (box[:, 2:].prod(1, keepdims=True), theirs[:, 2:].prod(1, keepdims=True)),
    ):
        np.testing.assert_allclose(
            ours.mean(0), other.mean(0), atol=5 * (other.std(0) / 3000**0.5).max()
        )
        np.testing.assert_allclose(ours.std(0), other.std(0), rtol=0.05)
    for shape, middle in (
        ((10, 100, 3), [0, 43, 10, 13]),
        ((100, 10, 3), [43, 0, 13, 10]),
    ):  # the whole area fits in no try
        assert (augmentation(AugmentConfig(resized_crop=1.0), 5, shape).crop_box == middle).all()


@pytest.mark.parametrize("config", [ALL, BOXES, REFLECTED], ids=["crop", "box", "reflect"])
def test_parameters_are_a_function_of_seed_epoch_and_sample(config: AugmentConfig) -> None:
    epochs = np.array([3, 3, 4, 4, 4, 5])
    rows = np.array([7, 50_000, 7, 0, 31, 7])
    whole = augment.draw(config, 9, epochs, rows, (32, 32, 3))
    order = np.array([4, 0, 5, 2, 1, 3])
    parts = [
        augment.draw(config, 9, epochs[part], rows[part], (32, 32, 3))
        for part in (order[:1], order[1:1], order[1:])
    ]
    for name, found in zip(AugmentationParameters._fields, zip(*parts, strict=True), strict=True):
        if found[0] is not None:
            np.testing.assert_array_equal(np.concatenate(found), getattr(taken(whole, order), name))
    base = augmentation(config, 500)
    for other in (
        augmentation(config, 500, seed=2),
        augmentation(config, 500, epoch=4),
        augment.draw(config, 1, np.full(500, 3), np.arange(1, 501), (32, 32, 3)),
    ):
        for a, b in zip(base, other, strict=True):
            assert a is None or (a == b).all(axis=tuple(range(1, a.ndim))).mean() < 0.6, (
                "a half of the mirrorings agrees"
            )
    alone = augmentation(AugmentConfig(flip=config.flip), 500)
    np.testing.assert_array_equal(
        alone.flipped, base.flipped, err_msg="what is drawn beside it changes nothing"
    )
    assert (
        alone.shift
        is alone.reflected_shift
        is alone.crop_box
        is alone.cutout_box
        is alone.mixup_weight
        is None
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "config",
    [
        ALL,
        BOXES,
        REFLECTED,
        AugmentConfig(crop=2),
        AugmentConfig(crop=2, pad="reflect"),
        AugmentConfig(cutout=3),
    ],
    ids=["all", "box", "reflected", "crop", "reflected crop", "cutout"],
)
@pytest.mark.parametrize("n", [0, 9])
def test_torch_gives_the_bytes_of_numpy(
    config: AugmentConfig, shape: tuple[int, int, int], n: int
) -> None:
    x = images(n, shape)
    d = augmentation(config, n, shape)
    host = augment.apply(x, d)
    assert host.shape == x.shape and host.dtype == np.uint8 and (n == 0 or (host != x).any())
    np.testing.assert_array_equal(
        torch_augment.apply_by_gathers(torch.from_numpy(x), d).numpy(), host
    )
    there = torch_augment.apply(torch.from_numpy(x).permute(0, 3, 1, 2), d)
    assert n == 0 or there.is_contiguous(memory_format=torch.channels_last)
    np.testing.assert_array_equal(there.permute(0, 2, 3, 1).numpy(), host)


@pytest.mark.parametrize("shape", SHAPES)
def test_resized_crop_equals_torchvision_up_to_rounding(shape: tuple[int, int, int]) -> None:
    import_torchvision()
    from torchvision.transforms import functional

    x = images(40, shape)
    box = augmentation(AugmentConfig(resized_crop=0.08), 40, shape).crop_box
    assert box is not None
    tensors = torch.from_numpy(x).permute(0, 3, 1, 2).double()
    theirs = [
        functional.resized_crop(image, *b, list(shape[:2]), antialias=False)
        for image, b in zip(tensors, box.tolist(), strict=True)
    ]
    assert (
        np.abs(resized_crop(x, box) - torch.stack(theirs).permute(0, 2, 3, 1).numpy()).max()
        < 0.5 + 0.13
    )


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["augment.crop=8"], "augment.crop=8 may leave nothing of images of 8 x 9 pixels"),
        (["augment.cutout=9"], "augment.cutout=9 may black out all of images of 8 x 9 pixels"),
    ],
)
def test_augmentations_that_may_leave_nothing_of_an_image_are_errors(
    words: list[str], what: str
) -> None:
    config = configure(None, words)
    with pytest.raises(UserError) as caught:
        augment.check_augmentation(config.augment, (8, 9, 3))
    assert (
        caught.value.what == what
        and caught.value.fix
        and words[0].split("=")[0] in caught.value.where
    )
    augment.check_augmentation(AugmentConfig(crop=7, cutout=8), (8, 9, 3))
    assert config.augment.is_enabled and not AugmentConfig().is_enabled


MIXTURES = {
    "mixup": ALL,
    "cutmix": ALL.replace(mixup=0.0, cutmix=1.0, erase=0.5),
    "either": ALL.replace(cutmix=1.0),
}


def mixture(n: int, config: AugmentConfig) -> Batch:
    rng = np.random.default_rng(4)
    d = augmentation(config, n, (7, 6, 2))
    partners = augment.draw(config, 1, np.full(n, 3), np.arange(n) + 90, (7, 6, 2))
    boxes = {} if d.cutmix_box is None else {"cutmix_box": d.cutmix_box}
    labels = boxes | {
        "y": rng.integers(0, 3, n),
        "partner_y": rng.integers(0, 3, n),
        "mixup_weight": d.mixup_weight,
        "w": np.linspace(-0.5, 2.0, n),
    }
    return labels | {
        "x": images(n, (7, 6, 2)),
        "partner_x": images(n, (7, 6, 2), 1),
        "augmentation": d,
        "partner_augmentation": partners,
    }


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        ("cross_entropy", "mixup"),
        pytest.param("cross_entropy", "cutmix", marks=needs_extra("augmentations")),  # it erases
        ("cross_entropy", "either"),
        ("squared_error", "mixup"),
    ],
)
def test_one_step_on_mixed_images_is_the_same_in_every_framework(loss: str, kind: str) -> None:
    """The losses of two smoothed labels, each by its own formula, and their gradient (softmax or
    logits less the mixed label) times x."""
    words = [
        "model.name=linear",
        f"model.loss={loss}",
        "model.label_smoothing=0.3",
        "speed.precision=fp64",
        "batch.size=8",
    ]
    class_weights = (0.5, 1.0, 2.0) if kind == "either" else None
    data = mixture(7, MIXTURES[kind])
    task = Classification(
        (7, 6, 2),
        3,
        np.array([0.4, 0.5]),
        np.array([0.2, 0.3]),
        top_k=2,
        class_weights=class_weights,
    )
    share = data["mixup_weight"][:, None]
    parts = (
        augment.apply(data["x"], data["augmentation"]),
        augment.apply(data["partner_x"], data["partner_augmentation"]),
    )
    x = np.floor(share[:, None, None] * parts[0] + (1 - share[:, None, None]) * parts[1] + 0.5)
    for place, (top, bottom, left, right) in enumerate(
        data.get("cutmix_box", np.zeros((7, 4), int))
    ):
        x[place] = (
            x[place] if kind == "mixup" or (kind == "either" and bottom == 0) else parts[0][place]
        )
        x[place, top:bottom, left:right] = parts[1][place, top:bottom, left:right]
    x = ((x / 255 - task.mean) / task.std).transpose(0, 3, 1, 2).reshape(7, -1)
    weights = {
        "p.fc.weight": np.random.default_rng(5).normal(size=(3, 84)) / 9,
        "p.fc.bias": np.array([0.3, -0.2, 0.1]),
    }
    logits = x @ weights["p.fc.weight"].T + weights["p.fc.bias"]
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    label, label2 = (np.eye(3)[data[y]] * 0.7 + 0.1 for y in ("y", "partner_y"))
    if loss == "cross_entropy":
        error = p
        each = -(label * np.log(p)).sum(1)
        each2 = -(label2 * np.log(p)).sum(1)
    else:
        error = logits
        each = ((logits - label) ** 2).sum(1) / 2
        each2 = ((logits - label2) ** 2).sum(1) / 2
    # (7,)
    first, second = (
        np.array(class_weights or (1.0, 1.0, 1.0))[data[y]] for y in ("y", "partner_y")
    )
    each = first * each
    each2 = second * each2
    error = share * first[:, None] * (error - label) + (1 - share) * second[:, None] * (
        error - label2
    )
    error = data["w"][:, None] * error / 7
    for framework in ("numpy", "torch", "jax"):
        config = configure(None, [*words, f"framework={framework}"])
        one = build_learner(config, task, SingleProcessCommunicator())
        one.load(one.state() | weights)
        sums = one.step(
            [one.to_device(dict(data))], Hyper(lr=1.0, momentum=0.0, weight_decay=0.0, batch=7), 0
        )
        assert float(sums["loss"]) == pytest.approx(
            (data["mixup_weight"] * each + (1 - data["mixup_weight"]) * each2).sum(), rel=1e-12
        ), framework
        assert (float(sums["right"]), int(sums["count"])) == (
            (logits.argmax(1) == data["y"]).sum(),
            7,
        )
        moved = {name: array - one.state()[name] for name, array in weights.items()}
        np.testing.assert_allclose(
            moved["p.fc.weight"], error.T @ x, rtol=1e-12, atol=1e-14, err_msg=framework
        )
        np.testing.assert_allclose(
            moved["p.fc.bias"], error.sum(0), rtol=1e-12, atol=1e-14, err_msg=framework
        )
