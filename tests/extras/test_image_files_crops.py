"""Random boxes of whole images: by hand with PIL, the same bytes however they are read, and as
torchvision distributes them."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from small_images import save

from hvdtrain.config.read import configure
from hvdtrain.core.import_torchvision import import_torchvision
from hvdtrain.core.progress import Hyper
from hvdtrain.data.images.resized_crop import crop_boxes, draw_keys
from hvdtrain.data.sampler import Positions
from hvdtrain.extras.image_files.decode import CropBox, Undecoded, coarsest_scale, read_header
from hvdtrain.extras.image_files.image_source import ImageSource
from hvdtrain.training.datasets import open_datasets
from hvdtrain.training.input import read_batch

SIZES = [(90, 40), (40, 90), (7, 9), (1, 1), (64, 64), (150, 130)]  # of a height and width


def smooth(height: int, width: int, place: int) -> np.ndarray:
    rows, columns, channels = np.ogrid[:height, :width, :3]
    return (120 + 100 * np.sin(rows / 9 + place) * np.cos(columns / 11 + channels)).astype(np.uint8)


def fill(root: Path, suffix: str = "jpg") -> None:
    for place, (height, width) in enumerate(SIZES):
        pixels = smooth(height, width, place)
        save(
            root / "train" / str(place % 2) / f"{place}.{suffix}",
            pixels[..., 0] if place == 4 else pixels,
        )
    for label in "01":
        save(root / "val" / label / "0.png", smooth(20, 30, 7))


def train_set(root: Path, *words: str) -> ImageSource:
    options = [
        "data.name=folder",
        f"data.root={root}",
        "data.size=16",
        "data.packed=false",
        "batch.size=2",
        "augment.resized_crop=0.2",
    ]
    found = open_datasets(configure(None, [*options, *words])).train
    assert isinstance(found, ImageSource)
    return found


def by_hand(path: Path, box: list[int]) -> np.ndarray:
    top, left, height, width = box
    with Image.open(path) as image:
        scale = coarsest_scale((height, width), (16, 16)) if path.suffix == ".jpg" else 1
        if scale > 1:
            image.draft(None, (image.width // scale, image.height // scale))
        edges = tuple(edge / scale for edge in (left, top, left + width, top + height))
        return np.asarray(image.convert("RGB").resize((16, 16), Image.Resampling.BILINEAR, edges))


@pytest.mark.in_turn
@pytest.mark.parametrize("suffix", ["jpg", "png"])
def test_pixels_are_those_of_pil_and_the_same_however_they_are_read(
    tmp_path: Path, suffix: str
) -> None:
    fill(tmp_path, suffix)
    source = train_set(tmp_path)
    files = sorted((tmp_path / "train").rglob(f"*.{suffix}"))
    indices = np.array([0, 1, 2, 3, 4, 5] * 4)
    epochs = np.arange(24) // 6
    found = source.read_in_epochs(indices, epochs, 3)["x"]
    for row, (index, epoch) in enumerate(zip(indices.tolist(), epochs.tolist(), strict=True)):
        height, width = SIZES[int(files[index].stem)]
        (box,) = crop_boxes(
            draw_keys(3, np.array([epoch]), np.array([index])), 0.2, height, width
        ).tolist()
        np.testing.assert_array_equal(found[row], by_hand(files[index], box))
    order = np.random.default_rng(0).permutation(24)
    workers = train_set(tmp_path, "data.workers=2")
    np.testing.assert_array_equal(
        workers.read_in_epochs(indices[order], epochs[order], 3)["x"], found[order]
    )
    alone = [source.read_in_epochs(indices[[row]], epochs[[row]], 3)["x"][0] for row in range(24)]
    np.testing.assert_array_equal(np.stack(alone), found)
    assert len({image.tobytes() for image in found}) > 18
    np.testing.assert_array_equal(workers.read(indices)["x"], source.read(indices)["x"])
    plain = train_set(tmp_path, "augment.resized_crop=0")
    np.testing.assert_array_equal(
        plain.read_in_epochs(indices, epochs, 3)["x"], source.read(indices)["x"]
    )
    assert [part.tolist() for part in plain.stats()] == [part.tolist() for part in source.stats()]


def test_a_batch_is_cropped_once_and_so_is_mixups_second_image(tmp_path: Path) -> None:
    fill(tmp_path)
    words = ["augment.flip=true", "augment.mixup=0.4"]
    for more in ([], ["data.val_share=0.3"]):
        place = [
            "data.name=folder",
            f"data.root={tmp_path}",
            "data.size=16",
            "data.packed=false",
            "batch.size=2",
        ]
        config = configure(None, [*place, "augment.resized_crop=0.2", *words, *more])
        source = open_datasets(config).train
        samples = np.arange(len(source))
        epochs = np.full(len(source), 5)
        hyper = Hyper(lr=1.0, momentum=0.0, weight_decay=0.0, batch=7)
        batch = read_batch(
            source, Positions(samples, epochs), hyper, config, cached_on_device=False
        )
        assert (
            batch["augmentation"].crop_box is None
            and batch["partner_augmentation"].crop_box is None
        )
        assert batch["augmentation"].flipped is not None
        expected = source.read_in_epochs(samples, epochs, config.seed)["x"]
        np.testing.assert_array_equal(batch["x"], expected)
        assert (expected != source.read(samples)["x"]).any((1, 2, 3)).sum() >= len(source) - 1, (
            "all but the single pixel"
        )


def test_boxes_of_each_images_own_size_are_distributed_as_those_of_torchvision() -> None:
    import_torchvision()
    from torchvision.transforms import RandomResizedCrop

    sides = np.array([(40, 50), (30, 200), (75, 20)])
    n = 12_000
    keys = draw_keys(1, np.zeros(n, np.int64), np.arange(n))
    of = np.arange(n) % 3
    boxes = crop_boxes(keys, 0.08, sides[of, 0], sides[of, 1])
    for number, (height, width) in enumerate(sides.tolist()):
        np.testing.assert_array_equal(
            boxes[of == number], crop_boxes(keys[of == number], 0.08, height, width)
        )
        with torch.random.fork_rng():
            torch.manual_seed(0)
            draws = [
                RandomResizedCrop.get_params(
                    torch.zeros(1, height, width), [0.08, 1.0], [3 / 4, 4 / 3]
                )
                for _ in range(3000)
            ]
        ours = boxes[of == number]
        theirs = np.array(draws)
        np.testing.assert_allclose(
            ours.mean(0), theirs.mean(0), atol=6 * (theirs.std(0) / 3000**0.5).max()
        )
        np.testing.assert_allclose(ours.std(0), theirs.std(0), rtol=0.08, atol=0.2)


def test_reduced_scale_only_where_the_box_has_the_pixels_and_close_to_full_scale() -> None:
    assert [
        coarsest_scale(box, (16, 16))
        for box in ((31, 500), (32, 32), (63, 64), (64, 64), (128, 400), (15, 9))
    ] == [1, 2, 2, 4, 8, 1]
    file = io.BytesIO()
    Image.fromarray(smooth(200, 260, 1)).save(file, "JPEG", quality=95)
    image = Undecoded(file.getvalue(), str)
    for box in ((10, 20, 140, 150), (0, 0, 200, 260), (33, 41, 70, 66)):
        coarse, full = (
            np.frombuffer(
                image.pixels((16, 16, 3), CropBox(*box, may_be_coarse=reduced)), np.uint8
            ).astype(int)
            for reduced in (True, False)
        )
        off = np.abs(coarse - full)  # the decoder's filter is sharper than a bilinear one
        assert 0 < off.max() <= 10 and off.mean() < 4
    assert image.pixels((40, 40, 3), CropBox(5, 5, 60, 70, True)) == image.pixels(
        (40, 40, 3), CropBox(5, 5, 60, 70)
    ), "less than twice the pixels"


@pytest.mark.parametrize(
    ("mode", "options"),
    [("RGB", {}), ("L", {}), ("RGB", {"progressive": True}), ("RGB", {"subsampling": 0})],
)
def test_jpegs_without_pils_parser_have_the_bytes_of_pil(
    mode: str, options: dict[str, object]
) -> None:
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees, which is not applied
    Image.fromarray(smooth(30, 50, 2)).convert(mode).save(
        file, "JPEG", exif=exif, comment=b"words", **options
    )
    header = read_header(file.getvalue())
    assert header == (30, 50, mode, "progressive" not in options)
    with Image.open(file) as image:
        assert (
            Undecoded(file.getvalue(), str).pixels((30, 50, 3), None)
            == image.convert("RGB").tobytes()
        )
    for cut in range(0, 30):
        assert read_header(file.getvalue()[:cut]) is None
    scan = bytearray(file.getvalue())
    scan[scan.index(b"\xff\xda") + 4] -= 1  # the channels of the first scan
    assert read_header(bytes(scan)) == (30, 50, mode, False)
    cmyk = io.BytesIO()
    Image.new("CMYK", (9, 8)).save(cmyk, "JPEG")
    assert read_header(cmyk.getvalue()) is None and read_header(b"\x89PNG" + bytes(50)) is None
