"""Image sets too large for one array file: shards that survive a kill, and images decoded when they
are read."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Barrier, BrokenBarrierError

import numpy as np
import pytest
from PIL import Image
from small_images import colour, save
from test_image_files import PROJECT, fill
from xxhash import xxh3_64_intdigest

from hvdtrain.data.source import ArraySource, Source
from hvdtrain.errors import UserError
from hvdtrain.extras.image_files.data.datasets import folder
from hvdtrain.extras.image_files.decoded_files import PackedSource, pack
from hvdtrain.extras.image_files.image_source import ImageSource
from hvdtrain.extras.image_files.npy import MOST_ROWS, checksums, rows_of_block

IMAGES = 10
SHARD_BYTES = 300  # images take 6 * 5 * 3 = 90 bytes: three in a file, 3 + 3 + 3 + 1
NAMES = [f"images-{number:05}-of-00004.npy" for number in range(4)]


class Counted:
    """PNG files in memory, which remember what was asked for, and break off at one place."""

    where = "memory"

    def __init__(self, images: int = IMAGES, broken: int | None = None) -> None:
        self.images = images
        self.broken = broken
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.images

    def content(self, index: int) -> bytes:
        self.asked.append(index)
        if index == self.broken:
            raise OSError(5, "the disk is gone")
        file = io.BytesIO()
        Image.fromarray(colour(index)).save(file, "png")
        return file.getvalue()

    def name(self, index: int) -> str:
        return f"image {index}"


def streamed(encoded: Counted) -> ImageSource:
    y = np.arange(len(encoded), dtype=np.int64) % 3
    return ImageSource(encoded, y, 3, (6, 5, 3), False, lambda: "the first")


def packed(encoded: Counted, home: Path) -> Source:
    return pack(streamed(encoded), home, SHARD_BYTES)


def check_pixels(source: Source, order: Sequence[int]) -> None:
    batch = source.read(np.array(order))
    np.testing.assert_array_equal(batch["x"], np.stack([colour(place) for place in order]))
    assert batch["y"].tolist() == [place % 3 for place in order] and batch["y"].dtype == np.int64


def test_shards_hold_the_images_in_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    encoded = Counted()
    source = packed(encoded, tmp_path)
    assert sorted(set(encoded.asked)) == list(range(10))
    assert sorted(os.listdir(tmp_path)) == sorted(
        [".hvdtrain.lock", *NAMES, *(f"{name}.xxh3" for name in NAMES)]
    )
    np.testing.assert_array_equal(
        np.load(tmp_path / NAMES[1]), np.stack([colour(place) for place in (3, 4, 5)])
    )
    assert np.load(tmp_path / NAMES[3]).shape == (1, 6, 5, 3)
    output = capsys.readouterr().err
    assert (
        "decoded memory: 10 / 10 images, " in output
        and f" images/s, written to {tmp_path}\n" in output
    )
    assert isinstance(source, PackedSource) and (len(source), source.shape, source.classes) == (
        10,
        (6, 5, 3),
        3,
    )
    check_pixels(source, [9, 0, 5, 5, 3, 2, 8])
    asked = list(encoded.asked)
    again = packed(encoded, tmp_path)
    assert encoded.asked == asked and capsys.readouterr().err == ""
    batch = again.read(np.arange(10))
    batch["x"][:] = 0  # the caller's own memory, not the files
    check_pixels(again, range(10))
    assert again.read(np.array([], np.int64))["x"].shape == (0, 6, 5, 3)
    for wrong in ([10], [-1, 2]):
        with pytest.raises(IndexError, match=f"samples .* of {len(again)}"):
            again.read(np.array(wrong))


def test_one_file_makes_an_array_source(tmp_path: Path) -> None:
    source = pack(streamed(Counted(3)), tmp_path, SHARD_BYTES)
    assert (
        isinstance(source, ArraySource)
        and source.x.shape == (3, 6, 5, 3)
        and os.path.exists(tmp_path / "images.npy")
    )
    assert isinstance(pack(streamed(Counted(4)), tmp_path, SHARD_BYTES), PackedSource)
    # an image that is larger than a file may be has its own
    assert isinstance(pack(streamed(Counted(2)), tmp_path / "large", 80), PackedSource)


def test_an_interrupted_packing_is_completed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match="cannot pack the images: .*the disk is gone"):
        packed(Counted(broken=7), tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*.npy")) == NAMES[:2] and not list(
        tmp_path.glob("*.part")
    )
    encoded = Counted()
    capsys.readouterr()
    check_pixels(packed(encoded, tmp_path), range(10))
    assert sorted(set(encoded.asked)) == [6, 7, 8, 9]
    output = capsys.readouterr().err
    assert (
        "decoded memory: 4 / 4 images, " in output
        and f"images/s, 6 more were already there, written to {tmp_path}\n" in output
    )


@pytest.mark.parametrize("damage", ["short", "long", "gone", "header", "empty"])
def test_only_the_damaged_shard_is_decoded_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    packed(Counted(), tmp_path)
    victim = tmp_path / NAMES[1]
    sound = victim.read_bytes()
    harmed = {
        "short": sound[:-1],
        "long": sound + b"x",
        "header": sound.replace(b"(3, 6", b"(6, 3"),
        "empty": b"",
    }
    victim.write_bytes(harmed[damage]) if damage in harmed else victim.unlink()
    capsys.readouterr()
    encoded = Counted()
    check_pixels(packed(encoded, tmp_path), range(10))
    assert sorted(set(encoded.asked)) == [3, 4, 5] and victim.read_bytes() == sound
    assert (
        f"the cached array {victim} is damaged: decoding again\n" in capsys.readouterr().err
    ) == (damage != "gone")


def alter(path: Path, at: int = 200) -> None:
    """One bit of a pixel, in place: the length stays, and no other time than the file's own
    changes."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


def test_one_altered_file_is_decoded_again_at_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pack(streamed(Counted(3)), tmp_path, SHARD_BYTES)
    alter(tmp_path / "images.npy")
    capsys.readouterr()
    encoded = Counted(3)
    check_pixels(pack(streamed(encoded), tmp_path, SHARD_BYTES), range(3))
    assert sorted(set(encoded.asked)) == [0, 1, 2]
    assert (
        f"the cached array {tmp_path / 'images.npy'} is damaged: decoding again"
        in capsys.readouterr().err
    )


def test_an_altered_image_of_several_files_is_found_when_it_is_read(tmp_path: Path) -> None:
    packed(Counted(), tmp_path)
    alter(tmp_path / NAMES[1])
    source = packed(Counted(), tmp_path)
    check_pixels(source, [0, 1, 2, 6, 9])
    with pytest.raises(
        UserError,
        match=r"cached images were altered .*: images 0 to 2 of the file\n  where: "
        rf"{tmp_path / NAMES[1]}\n",
    ):
        source.read(np.array([4]))
    check_pixels(source, [0, 8])
    encoded = Counted()
    check_pixels(packed(encoded, tmp_path), range(10))
    assert sorted(set(encoded.asked)) == [3, 4, 5], "what was found damaged is decoded again"


def test_a_file_cut_off_while_it_is_in_use_is_named(tmp_path: Path) -> None:
    source = packed(Counted(), tmp_path)
    os.truncate(tmp_path / NAMES[2], 150)
    check_pixels(source, [0, 3])
    with pytest.raises(
        UserError,
        match=r"cached images were cut off while they were in use\n  where: "
        rf"{tmp_path / NAMES[2]}\n",
    ):
        source.read(np.array([7]))
    (tmp_path / NAMES[1]).unlink()
    check_pixels(source, [5])


def test_files_without_checksums_are_decoded_again(tmp_path: Path) -> None:
    packed(Counted(), tmp_path)
    (tmp_path / f"{NAMES[3]}.xxh3").unlink()
    encoded = Counted()
    check_pixels(packed(encoded, tmp_path), range(10))
    assert set(encoded.asked) == {9}


@pytest.mark.parametrize(
    ("shape", "rows"),
    [((9, 1, 1, 1), 64), ((9, 32, 32, 3), 16), ((9, 224, 224, 3), 1), ((9, 256, 256, 1), 1)],
)
def test_blocks_divide_what_a_thread_decodes_at_once(shape: tuple[int, ...], rows: int) -> None:
    assert rows_of_block(shape) == rows and MOST_ROWS % rows == 0
    images = np.arange(150 * 4, dtype=np.uint8).reshape(150, 2, 2, 1)
    assert checksums(images, 64) == [
        int(xxh3_64_intdigest(images[a:b].tobytes())) for a, b in ((0, 64), (64, 128), (128, 150))
    ]


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = ["tests/extras", "tests/support"]
from test_image_files_decoded import Counted, packed

class Mortal(Counted):
    def content(self, index):
        if index == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().content(index)

packed(Mortal(), Path(sys.argv[1]))
"""


def test_a_killed_packing_is_completed(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)], cwd=PROJECT, capture_output=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [path.name for path in tmp_path.glob("*.npy")] == NAMES[:1] and list(
        tmp_path.glob("*.part")
    )
    encoded = Counted()
    check_pixels(packed(encoded, tmp_path), range(10))
    assert sorted(set(encoded.asked)) == list(range(3, 10)) and not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize("kind", ["packed", "streamed"])
def test_eight_threads_read_at_once(tmp_path: Path, kind: str) -> None:
    source = packed(Counted(), tmp_path) if kind == "packed" else streamed(Counted())
    orders = [np.random.default_rng(thread).integers(0, IMAGES, 50).tolist() for thread in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(check_pixels, source, order) for order in orders * 3]:
            future.result()


class TwoAtOnce(Counted):
    """Records whether two threads read images at once: each waits for the other. Image 0 only shows
    how large the files are."""

    def __init__(self, padding: int, timeout_s: float) -> None:
        super().__init__()
        self.padding = padding
        self.timeout_s = timeout_s
        self.both = Barrier(2)  # breaks where a thread waits in vain

    def content(self, index: int) -> bytes:
        if index:
            with suppress(BrokenBarrierError):
                self.both.wait(self.timeout_s)
        return super().content(index) + bytes(self.padding)


@pytest.mark.parametrize(
    ("padding", "one_at_a_time", "timeout_s"), [(0, True, 0.2), (4096, False, 300)]
)
def test_small_images_are_read_by_one_thread_at_a_time(
    padding: int, one_at_a_time: bool, timeout_s: float
) -> None:
    encoded = TwoAtOnce(padding, timeout_s)
    source = streamed(encoded)
    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(check_pixels, source, [0, 1, 2, 3, 4, 5]) for _ in range(2)]:
            future.result()
    assert encoded.both.broken == one_at_a_time


def test_images_decoded_on_read_equal_the_packed_ones_and_write_nothing(tmp_path: Path) -> None:
    fill(tmp_path)
    save(tmp_path / "train" / "bee" / "y.png", colour(9, 12, 12))
    before = sorted(tmp_path.rglob("*"))
    for size, split in ((5, "train"), (4, "val"), (None, "val")):
        options = {"size": size, "cache": tmp_path / "cache"}
        loose = folder.build("folder", tmp_path, split, packed=False, **options)
        assert sorted(tmp_path.rglob("*")) == before and isinstance(loose, ImageSource)
        kept = folder.build("folder", tmp_path, split, **options)
        order = np.array([2, 0, 0, 1, len(kept) - 1])
        one = loose.read(order)
        two = kept.read(order)
        assert (len(loose), loose.shape, loose.classes) == (len(kept), kept.shape, 2)
        np.testing.assert_array_equal(one["x"], two["x"])
        assert (
            one["y"].tolist() == two["y"].tolist() and one["x"].any() and one["y"].dtype == np.int64
        )
        assert [part.tolist() for part in loose.stats()] == [part.tolist() for part in kept.stats()]
        before = sorted(tmp_path.rglob("*"))
    with pytest.raises(IndexError, match="samples -1..0 of 3"):
        loose.read(np.array([-1, 0]))


def test_an_image_damaged_after_the_start_is_named(tmp_path: Path) -> None:
    fill(tmp_path)
    victim = tmp_path / "train" / "ant" / "b.bmp"
    source = folder.build("folder", tmp_path, "train", packed=False)
    for content, words in (
        (
            b"nothing",
            "the image cannot be read: UnidentifiedImageError: neither JPEG nor PNG, BMP, WebP, "
            "TIFF, GIF, PPM",
        ),
        (None, "the image cannot be read: FileNotFoundError"),
    ):
        victim.write_bytes(content) if content else victim.unlink()
        with pytest.raises(UserError) as caught:
            source.read(np.array([0, 1]))
        assert words in str(
            caught.value
        ) and f"where: {victim}\n  fix: repair or remove the file" in str(caught.value)
        assert len(source.read(np.array([0, 2, 3]))["x"]) == 3
    save(victim, colour(1, 9, 8))
    with pytest.raises(
        UserError,
        match="the images differ in size: 5 x 6 and 8 x 9 pixels\n  where: .*/a.png and .*/b.bmp\n",
    ):
        source.read(np.array([1]))


def test_statistics_of_many_images_are_of_a_fixed_sample(tmp_path: Path) -> None:
    encoded = Counted(2500)
    images = streamed(encoded)
    mean, deviation = images.stats()
    chosen = sorted(set(encoded.asked))
    # of 2,000 draws out of 2,500, 1,377 differ on average
    assert len(chosen) <= 2000 and len(chosen) > 1200
    assert min(chosen) < 50 and max(chosen) > 2450
    pixels = np.stack([colour(place) for place in chosen]) / 255
    np.testing.assert_allclose(mean, pixels.mean((0, 1, 2)), rtol=1e-12)
    np.testing.assert_allclose(deviation, pixels.std((0, 1, 2)), rtol=1e-12)
    kept = pack(images, tmp_path, 90 * 1000)
    assert isinstance(kept, PackedSource) and [part.tolist() for part in kept.stats()] == [
        mean.tolist(),
        deviation.tolist(),
    ]
