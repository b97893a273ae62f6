"""Classes of pixels: losses and gradients beside torch's, mean IoU beside scikit-learn's, masks
that move with images, whole jobs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import own_data
import pytest
import torch
from host_reads import NoReading
from PIL import Image
from rank_threads import in_threads
from ranks import needs_extra
from sklearn.metrics import accuracy_score, confusion_matrix, jaccard_score
from torch.nn import functional

import hvdtrain
from hvdtrain.__main__ import main
from hvdtrain.comm.communicator import Communicator, SingleProcessCommunicator
from hvdtrain.comm.on_all_ranks import allreduce_sums
from hvdtrain.config.read import configure
from hvdtrain.config.sections.augment import AugmentConfig
from hvdtrain.core.metrics import add_sums, zero_sums
from hvdtrain.core.progress import Hyper
from hvdtrain.data.declared import as_declared
from hvdtrain.data.images import augment
from hvdtrain.data.images.augment import AugmentationParameters
from hvdtrain.data.sampler import Positions
from hvdtrain.data.source import NamedArrays, Source
from hvdtrain.data.user_data.as_source import as_source
from hvdtrain.errors import UserError
from hvdtrain.extras.augmentations.operations import GEOMETRIC, Operation
from hvdtrain.extras.maps.moved_masks import MovedMasks, move, with_moved_masks
from hvdtrain.extras.maps.tasks import segmentation
from hvdtrain.extras.maps.tasks.segmentation import Segmentation
from hvdtrain.frameworks.torch.models import unet
from hvdtrain.tasks.task import DeviceAndDtype
from hvdtrain.training.build import build_learner, restore_task
from hvdtrain.training.checkpoint import files
from hvdtrain.training.data_notes import notes
from hvdtrain.training.datasets import Datasets, open_datasets
from hvdtrain.training.input import read_batch

UNET = ["model.name=unet", "model.widths=[4,6]", "model.norm=group", "model.groups=2"]
WORDS = [
    "data.name=own_data:shapes",
    "task.name=segmentation",
    "task.ignore_label=255",
    *UNET,
    "speed.precision=fp64",
    "optim.name=sgd",
]
HYPER = Hyper(lr=0.3, momentum=0.0, weight_decay=0.0, batch=12)
SHARES = {1: [0, 12], 2: [0, 9, 12], 3: [0, 1, 3, 12]}  # where the ranks' samples begin and end


def declared(split: str = "val", **options: Any) -> tuple[Source, Segmentation]:
    source = as_source(own_data.shapes(split), "mine", "data.name")
    task = segmentation.build(
        "segmentation", source, source, "task.name", **{"ignore_label": 255, **options}
    )
    return as_declared(source, task.fields), task


def learner_of(
    task: Segmentation,
    communicator: Communicator,
    first: dict[str, np.ndarray] | None = None,
    *words: str,
) -> Any:
    """first: its weights, since ranks that are threads draw from one generator."""
    found: Any = build_learner(configure(None, [*WORDS[1:], *words]), task, communicator)
    found.load(first or found.state())
    return found


def normalized(task: Segmentation, rows: slice = slice(None)) -> torch.Tensor:
    x = (own_data.shapes("val")["x"][rows] / 255 - task.mean) / task.std
    return torch.tensor(x).permute(0, 3, 1, 2)


def loss_by_hand(
    logits: torch.Tensor, y: torch.Tensor, dice: float, weights: tuple[float, ...] | None
) -> torch.Tensor:
    """The mean over all pixels with a class; Dice of each sample and class by a loop, weighted by
    the pixels of the sample."""
    label = y.where(y != 255, 0)
    nats = -logits.log_softmax(1).gather(1, label[:, None])[:, 0]
    total = (nats * torch.tensor(weights or (1.0,) * 3, dtype=torch.float64)[label])[y != 255].sum()
    for shares, mask in zip(logits.softmax(1), y, strict=True):
        known = mask != 255
        of_classes = []
        for label in mask[known].unique():
            p = shares[int(label)][known]
            g = (mask[known] == label).double()
            of_classes.append(2 * (p * g).sum() / (p.sum() + g.sum()))
        total = total + dice * known.sum().double() * (1 - torch.stack(of_classes).mean())
    return total / (y != 255).sum()


def test_the_host_reads_no_number_in_a_pass() -> None:
    """On a GPU it would wait for each: how many pixels count, the largest cell, a zero."""
    source, task = declared(dice=0.4, class_weights=(0.25, 0.5, 3.0))
    part: Any = task.torch(
        configure(None, WORDS[1:]).model, DeviceAndDtype(torch.float64, torch.device("cpu"))
    )
    y = torch.tensor(source.read(np.arange(len(source)))["y"])
    logits = torch.randn((len(y), task.classes, *task.pixels), dtype=torch.float64)
    logits.requires_grad_()
    with NoReading():
        each = part.each(logits, {"y": y}, training=True)
        each.loss.sum().backward()
    said = logits.argmax(1)
    for labels, guesses, cells in zip(y, said, each.terms["confusion"], strict=True):
        expected = confusion_matrix(
            labels[labels != 255], guesses[labels != 255], labels=range(task.classes)
        )
        assert cells.tolist() == expected.flatten().tolist()


@pytest.mark.in_turn
@pytest.mark.parametrize(("dice", "weights"), [(0.0, None), (0.4, None), (0.4, (0.25, 0.0, 3.0))])
def test_steps_are_those_of_torch_on_any_number_of_ranks(
    dice: float, weights: tuple[float, ...] | None
) -> None:
    """Samples have different numbers of pixels with a class."""
    source, task = declared(dice=dice, class_weights=weights)
    y = torch.tensor(own_data.shapes("val")["y"]).long()
    assert len({int((mask != 255).sum()) for mask in y}) > 3
    alone = learner_of(task, SingleProcessCommunicator())
    model = alone.model
    first = {name: array.copy() for name, array in alone.state().items()}
    for _ in range(2):
        loss = loss_by_hand(model(normalized(task)), y, dice, weights)
        with torch.no_grad():
            for p, gradient in zip(
                model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
            ):
                p.sub_(gradient, alpha=0.3)
    expected = {f"p.{name}": p.detach().numpy() for name, p in model.named_parameters()}

    def trained(rank: Communicator, *words: str) -> dict[str, np.ndarray]:
        one, edges = learner_of(task, rank, first, *words), SHARES[rank.size]
        rows = np.arange(edges[rank.rank], edges[rank.rank + 1])
        for step in range(2):
            micro = [one.to_device(source.read(part)) for part in (rows[:4], rows[4:])]
            one.step(
                micro, Hyper(lr=0.3, momentum=0.0, weight_decay=0.0, batch=12, step=step), step
            )
        found: dict[str, np.ndarray] = one.state()
        return found

    found = [one for size in (1, 2, 3) for one in in_threads(size, trained)]
    if weights:
        found += in_threads(2, lambda rank: trained(rank, "framework=jax"))
    for one in found:
        for name, array in expected.items():
            np.testing.assert_allclose(one[name], array, rtol=1e-12, atol=1e-14)


@pytest.mark.in_turn
@pytest.mark.parametrize(
    "words", [[], ["model.norm=none", "framework=jax"], ["framework=jax", "speed.precision=fp32"]]
)
def test_metrics_are_those_of_scikit_learn_on_uneven_shares(words: list[str]) -> None:
    source, task = declared()
    alone = learner_of(
        task, SingleProcessCommunicator(), None, *words[:1] * ("model.norm=none" in words)
    )
    logits = alone.model(normalized(task)).detach()
    first = alone.state()
    y = own_data.shapes("val")["y"]
    known = y != 255
    labels = y[known]
    said = logits.argmax(1).numpy()[known]

    def evaluated(rank: Communicator) -> dict[str, float]:
        one, sums, rows = (
            learner_of(task, rank, first, *words),
            zero_sums(task.sums),
            SHARES[3][rank.rank : rank.rank + 2],
        )
        for start in range(*rows, 4):
            sums = add_sums(
                sums,
                one.evaluate(one.to_device(source.read(np.arange(start, min(start + 4, rows[1]))))),
            )
        total = allreduce_sums(rank, sums, "test", task.sums)
        return {metric.name: metric.of(total) for metric in task.metrics}

    expected = {
        "loss": functional.cross_entropy(logits, torch.tensor(y).long(), ignore_index=255).item(),
        "accuracy": accuracy_score(labels, said),
        "mean_iou": jaccard_score(labels, said, average="macro", labels=np.unique([labels, said])),
    }
    for found in in_threads(3, evaluated):
        assert found == pytest.approx(
            expected, rel=1e-6 if "speed.precision=fp32" in words else 1e-12
        )


def test_classes_that_are_nowhere_are_not_in_the_mean() -> None:
    sums = {
        "count": 1,
        "pixels": 4.0,
        "confusion": np.array([2.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]),
    }
    assert (
        segmentation.mean_iou(sums) == pytest.approx((2 / 3 + 1 / 2) / 2)
        and segmentation.pixel_accuracy(sums) == 0.75
    )
    assert np.isnan(segmentation.mean_iou(sums | {"pixels": 0.0})) and np.isnan(
        segmentation.iou_of_classes(sums["confusion"])[2]
    )


# masks that move


@pytest.mark.parametrize(
    "words",
    [
        "augment.flip=true",
        "augment.crop=3 augment.flip=true",
        "augment.crop=3 augment.pad=reflect augment.flip=alternating",
    ],
)
def test_masks_move_as_their_images_do(words: str) -> None:
    """Of images that are their masks: black pixels from outside of an image are 0 in it, and 9 in
    the mask."""
    masks = np.random.default_rng(1).integers(1, 9, (40, 10, 8)).astype(np.uint8)
    config = configure(None, words.split()).augment
    samples = np.arange(40)
    epochs = np.arange(40) // 10
    parameters = augment.draw(config, 7, epochs, samples, (10, 8, 1))
    images = augment.apply(masks[..., None], parameters)[..., 0]
    moved = move(masks, parameters, 9)
    assert (np.where(images == 0, 9, images) == moved).all() and (moved != masks).any()
    source = as_source({"x": masks[..., None], "y": masks}, "mine", "data.name")
    found = with_moved_masks(source, {"y": 9}, config)
    assert (
        isinstance(found, MovedMasks)
        and (found.read_in_epochs(samples, epochs, 7)["y"] == moved).all()
    )
    assert (found.read(samples)["y"] == masks).all() and (
        found.read_in_epochs(samples[3:5], epochs[3:5], 7)["y"] == moved[3:5]
    ).all()


def test_a_resized_crop_takes_the_nearest_pixel() -> None:
    """Of images with large areas: pixels that are not mixed with others are those of the mask."""
    masks = np.kron(np.random.default_rng(2).integers(0, 2, (30, 2, 2)), np.ones((8, 8))).astype(
        np.uint8
    )
    config = configure(None, ["augment.resized_crop=0.3", "augment.flip=true"]).augment
    parameters = augment.draw(config, 3, np.zeros(30, np.int64), np.arange(30), (16, 16, 1))
    images = augment.apply(255 * masks[..., None], parameters)[..., 0]
    moved = move(masks, parameters, 0)
    pure = (images == 0) | (images == 255)
    assert ((images > 127) == moved)[pure].all() and pure.mean() > 0.7 and (moved != masks).any()
    assert ((images > 127) == moved).mean() > 0.99


def test_cutmix_pastes_masks_as_images() -> None:
    """Of images that are their masks; no label is mixed. The second sample moves with its own
    parameters."""
    masks = np.random.default_rng(1).integers(1, 9, (40, 10, 8)).astype(np.uint8)
    source = as_source({"x": masks[..., None], "y": masks}, "mine", "data.name")
    config = configure(
        None, ["augment.cutmix=1", "augment.crop=2", "augment.flip=true", "augment.erase=0"]
    )
    positions = Positions(np.arange(40), np.arange(40) // 10)
    batch = read_batch(
        with_moved_masks(source, {"y": 0}, config.augment),
        positions,
        HYPER,
        config,
        cached_on_device=False,
    )
    assert not batch.keys() & {"mixup_weight", "partner_y"}
    images = augment.augment_batch(batch)["x"][..., 0]
    assert (images == batch["y"]).all() and (batch["cutmix_box"][:, 1] > 0).mean() > 0.8
    alone = configure(None, ["augment.crop=2", "augment.flip=true"])
    without = read_batch(
        with_moved_masks(source, {"y": 0}, alone.augment),
        positions,
        HYPER,
        alone,
        cached_on_device=False,
    )
    assert 0.1 < (without["y"] != batch["y"]).mean() < 0.6


def test_steps_with_moved_and_pasted_masks_are_those_of_torch_on_any_number_of_ranks() -> None:
    """The sum over pixels of what one process reads of all 12 samples, with all augmentations of
    masks."""
    words = (
        "augment.rand_augment=2 augment.magnitude=20 augment.cutmix=1.0 augment.erase=0.5 "
        "augment.color_jitter=[0.4,0.4,0.4,0.1]"
    )
    config = configure(None, [*WORDS, *words.split(), "batch.size=12"])
    plain, task = declared()
    source = with_moved_masks(plain, task.masks, config.augment)

    def read(one: Any, rows: np.ndarray, step: int) -> Any:
        return one.to_device(
            read_batch(
                source,
                Positions(rows, np.full(len(rows), step)),
                HYPER,
                config,
                cached_on_device=False,
            )
        )

    alone = learner_of(task, SingleProcessCommunicator())
    model = alone.model
    first = {name: array.copy() for name, array in alone.state().items()}
    for step in range(2):
        batch = read(alone, np.arange(12), step)
        assert (batch.arrays["y"].numpy() != own_data.shapes("val")["y"]).mean() > 0.1
        x = torch.tensor(
            (batch.arrays["x"].permute(0, 2, 3, 1).numpy() / 255 - task.mean) / task.std
        ).permute(0, 3, 1, 2)
        loss = loss_by_hand(model(x), batch.arrays["y"].long(), 0.0, None)
        with torch.no_grad():
            for p, gradient in zip(
                model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
            ):
                p.sub_(gradient, alpha=0.3)
    expected = {f"p.{name}": p.detach().numpy() for name, p in model.named_parameters()}

    def trained(rank: Communicator) -> dict[str, np.ndarray]:
        one = learner_of(task, rank, first)
        edges = SHARES[rank.size]
        rows = np.arange(edges[rank.rank], edges[rank.rank + 1])
        for step in range(2):
            micro = [read(one, part, step) for part in (rows[:4], rows[4:])]
            one.step(
                micro, Hyper(lr=0.3, momentum=0.0, weight_decay=0.0, batch=12, step=step), step
            )
        found: dict[str, np.ndarray] = one.state()
        return found

    for size in (1, 2, 3):
        for found in in_threads(size, trained):
            for name, array in expected.items():
                np.testing.assert_allclose(found[name], array, rtol=1e-12, atol=1e-14)


def test_what_comes_from_outside_needs_a_label() -> None:
    source, _ = declared()
    with pytest.raises(
        UserError,
        match=r"rand_augment=2 fills in black .* no class\n.*\n  fix: task\.ignore_label=255 "
        r".*rand_augment=0",
    ):
        with_moved_masks(source, {"y": None}, configure(None, ["augment.rand_augment=2"]).augment)
    with pytest.raises(
        UserError,
        match=r"which have no class\n.*\n  fix: task\.ignore_label=255 ignores them; or "
        r"augment\.pad=reflect",
    ):
        with_moved_masks(source, {"y": None}, configure(None, ["augment.crop=2"]).augment)
    assert with_moved_masks(source, {"y": None}, AugmentConfig()) is source


# whole jobs


def test_a_stopped_job_goes_on_as_one_that_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        *WORDS,
        "batch.size=7",
        "batch.micro=4",
        "optim.base_lr=0.5",
        "augment.crop=2",
        "augment.flip=true",
        "task.dice=0.3",
    ]
    words += ["augment.rand_augment=2", "augment.cutmix=1", "augment.erase=0.5"]
    for run, more in (
        ("whole", ["max_steps=9"]),
        ("parts", ["max_steps=4"]),
        ("parts", ["max_steps=9", "resume=auto"]),
    ):
        assert main([*words, f"run={run}", *more]) == 0
    weights = [
        files.read_arrays(files.finished(tmp_path / run)[-1], 2**20)["p.head.weight"]
        for run in ("whole", "parts")
    ]
    assert np.array_equal(*weights)


def test_shapes_are_learned_from_arrays_of_a_script() -> None:
    data = {split: own_data.shapes(split) for split in ("train", "val")}
    config = {
        "task.name": "segmentation",
        "task.ignore_label": 255,
        "model.name": "unet",
        "model.widths": [8, 16],
        "epochs": 8,
    }
    config |= {"batch.size": 8, "optim.name": "adamw", "optim.base_lr": 0.02, "optim.base_batch": 8}
    run = hvdtrain.train(config, train_data=data["train"], val_data=data["val"])
    assert run.objective == "mean_iou" and run.last > 0.8


def test_unet_is_the_same_function_in_jax() -> None:
    """With the weights and running statistics of torch after a step."""
    source, task = declared()
    alone = [
        learner_of(task, SingleProcessCommunicator(), None, "model.norm=batch", f"framework={name}")
        for name in ("torch", "jax")
    ]
    alone[1].load(alone[0].state())
    outputs = []
    for one in alone:
        batch = one.to_device(source.read(np.arange(5)))
        one.step([batch], Hyper(lr=0.3, momentum=0.0, weight_decay=0.0, batch=5), 0)
        outputs.append(one.predict(batch).outputs)
    assert outputs[0].shape == (5, 3, 16, 16)
    np.testing.assert_allclose(*outputs, rtol=1e-11, atol=1e-12)


def jax_net(key: Any, shape: tuple[int, int, int], pixel_classes: int, last: bool = True) -> Any:
    """A user's own pair: each pixel by itself; classes last, or behind the samples."""

    def init(key: Any) -> dict[str, np.ndarray]:
        return {"w": np.linspace(-1, 1, shape[2] * pixel_classes).reshape(shape[2], pixel_classes)}

    def apply(params: dict[str, Any], x: Any) -> Any:
        found = x @ params["w"]
        return found if last else found.transpose(0, 3, 1, 2)

    return init, apply


def test_ones_own_net_of_jax_may_give_its_classes_last() -> None:
    """Of images, and of floats (n, C, H, W), which it gets as (n, H, W, C)."""
    weights = np.linspace(-1, 1, 9).reshape(3, 3)
    images = own_data.shapes("val")
    floats = {"x": np.random.default_rng(1).normal(size=(12, 3, 16, 16)), "y": images["y"]}
    for data in (images, floats):
        source = as_source(data, "mine", "data.name")
        task = segmentation.build(
            "segmentation", source, source, "task.name", ignore_label=255, users_model=True
        )
        source = as_declared(source, task.fields)
        x = (
            (np.moveaxis(images["x"], 3, 1) / 255 - task.mean[:, None, None])
            / task.std[:, None, None]
            if data is images
            else data["x"]
        )
        for last in ("true", "false"):
            words = [
                "framework=jax",
                "speed.precision=fp64",
                "model.name=test_maps_segmentation:jax_net",
                f"model.last={last}",
            ]
            one: Any = build_learner(
                configure(None, [*WORDS[1:3], *words]), task, SingleProcessCommunicator()
            )
            found = one.predict(one.to_device(source.read(np.arange(12)))).outputs
            np.testing.assert_allclose(
                found, np.einsum("nchw,co->nohw", x, weights), rtol=1e-12, atol=1e-13
            )


def test_nets_of_torchvision_give_dicts() -> None:
    words = [
        "model.name=torchvision.models.segmentation:lraspp_mobilenet_v3_large",
        "model.num_classes=3",
        "model.weights_backbone=null",
    ]
    source, task = declared()
    config = configure(None, [*WORDS[1:3], *words, "speed.precision=fp64"])
    one: Any = build_learner(config, task, SingleProcessCommunicator())
    batch = one.to_device(source.read(np.arange(4)))
    found = one.predict(batch)
    expected = one.model(normalized(task, slice(4)))["out"].detach().numpy()
    assert found.outputs.shape == (4, 3, 16, 16) and np.allclose(
        found.outputs, expected, rtol=1e-9, atol=1e-12
    )
    before = one.state()["p.classifier.low_classifier.weight"].copy()
    one.step([batch], Hyper(lr=0.3, momentum=0.0, weight_decay=0.0, batch=4), 0)
    assert not np.array_equal(before, one.state()["p.classifier.low_classifier.weight"])


class Several(torch.nn.Module):
    def __init__(self, names: str) -> None:
        super().__init__()
        self.layer = torch.nn.Conv2d(3, 3, 1)
        self.names = names.split("+")

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: self.layer(x) * scale for scale, name in enumerate(self.names)}


def test_a_dict_of_outputs_needs_one_that_is_known() -> None:
    _, task = declared()
    config = configure(
        None, [*WORDS[1:3], "model.name=test_maps_segmentation:Several", "model.names=aux+logits"]
    )
    assert build_learner(config, task, SingleProcessCommunicator())
    with pytest.raises(
        UserError, match="a dict of first, second, and it is unknown which of them to train"
    ):
        build_learner(
            configure(None, [*WORDS[1:3], *config_words("first+second")]),
            task,
            SingleProcessCommunicator(),
        )


def config_words(names: str) -> list[str]:
    return ["model.name=test_maps_segmentation:Several", f"model.names={names}"]


@pytest.mark.parametrize("norm", ["batch", "group", "none"])
def test_unet_keeps_the_size_and_looks_at_its_surroundings(norm: Any) -> None:
    model = unet.build("unet", (8, 12, 2), 5, widths=(8, 16, 16), norm=norm).double().eval()
    x = torch.zeros(1, 2, 8, 12, dtype=torch.float64, requires_grad=True)
    out = model(x)
    assert out.shape == (1, 5, 8, 12)
    (gradient,) = torch.autograd.grad(model(x + torch.rand(1, 2, 8, 12))[0, 0, 4, 6], x)
    assert int((gradient[0, 0] != 0).sum()) > 40


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.widths=[4,8,16,32,64,128]"], r"images of 16 x 16 pixels cannot be halved 5 times"),
        (
            ["model.norm=group", "model.groups=3"],
            "model.groups=3 does not divide the widths 16, 32, 64",
        ),
        (["model.widths=[0]"], "are not valid"),
    ],
)
def test_nets_that_cannot_be_made_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_learner(
            configure(None, [*WORDS[1:3], "model.name=unet", *words]),
            declared()[1],
            SingleProcessCommunicator(),
        )


@pytest.mark.parametrize(
    ("x", "y", "options", "message"),
    [
        (
            np.zeros((4, 8, 8), np.uint8),
            np.zeros((4, 8, 8), int),
            {},
            r"needs images x; x is uint8 \(8, 8\)\n.*\n  fix: x\[\.\.\., None\]",
        ),
        (
            np.zeros((4, 8, 8, 3), np.uint8),
            np.zeros((4, 1, 8, 8), int),
            {},
            r"y is int64 \(1, 8, 8\)\n.*\n  fix: y\[:, 0\]",
        ),
        (
            np.zeros((4, 8, 8, 3), np.uint8),
            np.ones((4, 8, 8)),
            {},
            r"masks y \(8, 8\) of integers; y is float64",
        ),
        (
            np.zeros((4, 8, 8, 3), np.uint8),
            np.zeros((4, 8, 8), int),
            {},
            "1 classes of pixels are not supported, only 2 to 1,000",
        ),
        (
            np.zeros((4, 8, 8, 3), np.uint8),
            np.full((4, 8, 8), 7),
            {"classes": 3},
            r"field y of sample 0 has 7, expected 0 to 2\n.*\n.*task.ignore_label=7 of "
            "task.name=segmentation",
        ),
        (np.zeros((4, 8, 8, 3), np.uint8), np.ones((4, 8, 8), int), {"dice": -1.0}, "task.dice=-1"),
        (
            np.zeros((4, 8, 8, 3), np.uint8),
            np.ones((4, 8, 8), int),
            {"class_weights": (1.0,)},
            "class_weights has 1 weights, for 2 classes",
        ),
        (
            np.zeros((4, 8, 8, 3), np.uint8),
            np.ones((4, 8, 8), int),
            {"class_weights": (1.0, -2.0)},
            r"task.class_weights=\[1.0, -2.0\]",
        ),
    ],
)
def test_data_that_do_not_fit_are_refused(
    x: np.ndarray, y: np.ndarray, options: dict[str, Any], message: str
) -> None:
    source = as_source({"x": x, "y": y}, "mine", "data.name")
    with pytest.raises(UserError, match=message):
        as_declared(
            source,
            segmentation.build("segmentation", source, source, "task.name", **options).fields,
        )


@pytest.mark.parametrize(
    "word",
    [
        "augment.mixup=0.3",
        "augment.mixup=0.3 augment.cutmix=1.0",
        "framework=numpy",
        "data.resident=true",
    ],
)
def test_what_segmentation_cannot_do_is_refused(word: str) -> None:
    config = configure(None, [*WORDS, "batch.size=8", *word.split()])
    with pytest.raises(UserError, match=word.partition("=")[0]):
        found = open_datasets(config)
        learner = build_learner(config, found.task, SingleProcessCommunicator())
        learner.cache_on_device(found.train)


def test_floats_are_standardized_by_channel() -> None:
    random = np.random.default_rng(3)
    x = random.normal(5.0, 3.0, (12, 3, 4, 8)) * np.array([1.0, 10.0, 0.1])[:, None, None]
    source = NamedArrays({"x": x, "y": (random.random((12, 4, 8)) > 0.5).astype(np.uint8)})
    options: Any = {"classes": 2, "standardize": "channel"}
    task = segmentation.build("segmentation", source, source, "task.name", **options)
    mean, std = (of(x, axis=(0, 2, 3), keepdims=True) for of in (np.mean, np.std))
    transform = task.transform
    np.testing.assert_allclose(transform(x), (x - mean) / std, rtol=1e-5, atol=1e-5)
    assert transform.summary.startswith("(x - mean) / std by channel")
    config = configure(None, ["task.name=segmentation"])
    assert restore_task(config, json.loads(json.dumps(task.facts()))).facts() == task.facts()


def test_a_mask_of_255_is_a_line_of_the_header() -> None:
    x = np.random.default_rng(0).integers(0, 256, (8, 4, 4, 1), dtype=np.uint8)
    data = {"x": x, "y": np.where(x[..., 0] > 100, 1, 0).astype(np.uint8)}
    data["y"][:, 0] = 255
    source = as_source(data, "data", "train_data")
    task = segmentation.build("segmentation", source, source, "data")
    assert task.classes == 256
    lines = notes(configure(None, ["task.name=segmentation"]), Datasets(source, source, task))
    assert any("task.ignore_label=255 if 255 stands for no class" in line for line in lines)


def test_masks_move_as_images_under_operations() -> None:
    """Of images that are their masks, under operations that move pixels."""
    rng = np.random.default_rng(1)
    n = 60
    masks = rng.integers(1, 9, (n, 10, 14)).astype(np.uint8)
    ranges = {
        Operation.SHEAR_X: 0.3,
        Operation.SHEAR_Y: 0.3,
        Operation.TRANSLATE_X: 14.0,
        Operation.TRANSLATE_Y: 14.0,
        Operation.ROTATE: 30.0,
        Operation.IDENTITY: 0.0,
    }
    assert set(ranges) == {*GEOMETRIC, Operation.IDENTITY}
    operations = rng.choice([*ranges], (n, 2))
    most = np.array([ranges.get(operation, 0.0) for operation in Operation])
    arguments = rng.uniform(-most[operations], most[operations])
    parameters = AugmentationParameters(
        flipped=rng.random(n) < 0.5, operation=operations, argument=arguments
    )
    moved = move(masks, parameters, 9)
    found = augment.apply(masks[..., None], parameters)[..., 0]
    assert (np.where(found == 0, 9, found) == moved).all() and (moved != masks).mean() > 0.3
    colours = np.full_like(operations, Operation.EQUALIZE)
    assert (
        move(masks, AugmentationParameters(operation=colours, argument=arguments), 9) == masks
    ).all()
    assert moved.shape == masks.shape


def test_facts_make_the_task_again() -> None:
    _, task = declared(dice=0.25, objective="accuracy", class_weights=(1, 0, 2.5))
    assert segmentation.restore(task.facts()).facts() == task.facts()
    signed = declared(ignore_label=-1, classes=300)[1]
    assert signed.fields["y"].dtype == "int64" and task.fields["y"].dtype == "uint8"


# folders of images and masks


def written(folder: Path, mode: str = "P") -> Path:
    """The shapes as files: images as PNG and masks with a palette; those of val in 20 x 16 pixels,
    with a border left and right."""
    for split in ("train", "val"):
        data = own_data.shapes(split)
        for part in ("images", "masks"):
            (folder / split / part / "a").mkdir(parents=True)
        for number, (image, mask) in enumerate(zip(data["x"], data["y"], strict=True)):
            if split == "val":
                image, mask = (  # noqa: PLW2901
                    np.pad(array, ((0, 0), (2, 2), (0, 0))[: array.ndim]) for array in (image, mask)
                )
            Image.fromarray(image).save(folder / split / "images" / "a" / f"{number:02}.bmp")
            saved = Image.fromarray(mask).convert(mode)
            if mode == "P":
                saved = Image.fromarray(mask, "P")
                saved.putpalette(
                    [value for colour in range(256) for value in (colour, 255 - colour, 7)]
                )
            saved.save(folder / split / "masks" / "a" / f"{number:02}.png")
    return folder


def folder_job(root: Path, *words: str) -> Any:
    return open_datasets(
        configure(
            None,
            [
                "data.name=image_masks",
                f"data.root={root}",
                *WORDS[1:],
                "task.classes=3",
                "batch.size=8",
                *words,
            ],
        )
    )


def test_a_folder_of_images_and_masks_is_read_as_the_arrays_are(tmp_path: Path) -> None:
    found = folder_job(written(tmp_path), "data.size=16")
    for split, source in (("train", found.train), ("val", found.val)):
        batch = source.read(np.arange(len(source)))
        assert all(
            np.array_equal(batch[name], array) for name, array in own_data.shapes(split).items()
        )
    moved = folder_job(tmp_path, "data.size=16", "augment.flip=true").train
    samples = np.arange(40)
    flips = augment.draw(
        configure(None, ["augment.flip=true"]).augment, 1, 0 * samples, samples, (16, 16, 3)
    ).flipped
    assert flips is not None
    expected = np.where(
        flips[:, None, None],
        own_data.shapes("train")["y"][:, :, ::-1],
        own_data.shapes("train")["y"],
    )
    assert np.array_equal(moved.read_in_epochs(samples, 0 * samples, 1)["y"], expected)
    with pytest.raises(
        UserError,
        match=r"it has 20 x 16 pixels, and the first image 16 x 16\n  where: .*00.bmp\n  fix: "
        r"data\.size=N",
    ):
        folder_job(tmp_path).val.read(np.arange(1))


def test_a_folder_that_lacks_something_is_refused(tmp_path: Path) -> None:
    root = written(tmp_path / "whole")
    (root / "train" / "masks" / "a" / "03.png").unlink()
    with pytest.raises(UserError, match=r"a/03.bmp has no mask"):
        folder_job(root, "data.size=16")
    with pytest.raises(
        UserError,
        match=r"the mask has pixels of mode RGB, not the number of a class\n  where: .*00.png",
    ):
        folder_job(written(tmp_path / "colours", "RGB"), "data.size=16").train.read(np.arange(1))
    with pytest.raises(UserError, match=r"field y of sample 0 has 2, expected 0 to 1"):
        folder_job(written(tmp_path / "classes"), "data.size=16", "task.classes=2").train.read(
            np.arange(40)
        )
    with pytest.raises(
        UserError,
        match=r"the number of classes is not known: masks are read sample by sample\n.*\n  fix: "
        r"task.classes=N",
    ):
        folder_job(tmp_path / "classes", "data.size=16", "task.classes=null")
    with pytest.raises(UserError, match=r"no folder masks"):
        folder_job(tmp_path, f"data.root={_without_masks(tmp_path / 'none')}")


def _without_masks(folder: Path) -> Path:
    (folder / "train" / "images").mkdir(parents=True)
    return folder


@needs_extra("predict")
@needs_extra("trained_models")
def test_predict_writes_a_mask_for_each_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    root = written(tmp_path / "data")
    assert (
        main(
            [
                "data.name=image_masks",
                f"data.root={root}",
                "data.size=16",
                *WORDS[1:],
                "task.classes=3",
                "batch.size=8",
                "epochs=2",
                "run=out",
            ]
        )
        == 0
    )
    images = root / "val" / "images"
    assert main(["predict", "out", "--images", str(images), "--to", "masks"]) == 0
    assert "12 masks -> masks" in capsys.readouterr().out
    said = hvdtrain.predict("out", own_data.shapes("val")["x"]).argmax(1)
    for number, classes in enumerate(said):
        mask = Image.open(tmp_path / "masks" / "a" / f"{number:02}.png")
        assert mask.mode == "P" and np.array_equal(np.array(mask), classes)
    assert len(np.unique(said)) > 1
    for to, message in (
        ("masks", "masks exists already"),
        ("said.csv", "masks are written as PNG files into a folder, but said.csv is not a folder"),
    ):
        assert main(["predict", "out", "--images", str(images), "--to", to]) == 2
        assert message in capsys.readouterr().err
    assert main(["predict", "out", "--images", str(images), "--to", "masks", "--force"]) == 0
