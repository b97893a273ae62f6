"""Image folders: decoded once, by one process, and every defect named."""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps
from ranks import HANG_S
from small_images import colour, save

from hvdtrain.__main__ import main
from hvdtrain.config.read import configure
from hvdtrain.data.configured.class_names import with_class_names
from hvdtrain.data.source import ArraySource, Source, Split
from hvdtrain.errors import UserError
from hvdtrain.extras.image_files.data.datasets import folder
from hvdtrain.training.data_notes import notes
from hvdtrain.training.datasets import open_datasets

PROJECT = Path(__file__).parents[2]


def fill(root: Path, val: str = "val") -> None:
    """Class ant: 1, 2, 3; class bee: 4. Validation: ant 5, bee 6 and 7."""
    for path, value in [("ant/a.png", 1), ("ant/b.bmp", 2), ("ant/c.PNG", 3), ("bee/z.png", 4)]:
        save(root / "train" / path, colour(value))
    for path, value in [("ant/a.png", 5), ("bee/a.png", 6), ("bee/b.png", 7)]:
        save(root / val / path, colour(value))


def build(root: Path, split: Split = "train", size: int | None = None, channels: int = 3) -> Source:
    return folder.build("folder", root, split, size=size, channels=channels, cache=root / "cache")


def refusal(root: Path, split: Split = "train", size: int | None = None, channels: int = 3) -> str:
    with pytest.raises(UserError) as caught:
        build(root, split, size, channels)
    return str(caught.value)


def arrays(root: Path) -> list[Path]:
    return sorted((root / "cache").glob("*/images.npy"))


def test_classes_follow_sorted_names_and_pixels_are_the_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path)
    (tmp_path / "train" / "ant" / "notes.txt").write_text("no image")
    (tmp_path / "train" / ".hidden").mkdir()
    (tmp_path / "train" / "ant" / "._a.png").write_text("no image either")
    source = build(tmp_path)
    batch = source.read(np.arange(4))
    assert (len(source), source.shape, source.classes) == (4, (6, 5, 3), 2)
    assert batch["y"].tolist() == [0, 0, 0, 1] and batch["y"].dtype == np.int64
    np.testing.assert_array_equal(batch["x"], np.stack([colour(value) for value in (1, 2, 3, 4)]))
    batch["x"][:] = 0  # the caller's own memory, not the file
    assert source.read(np.arange(4))["x"].any()
    val = build(tmp_path, "val").read(np.arange(3))
    assert val["y"].tolist() == [0, 1, 1] and (val["x"][2] == colour(7)).all()
    output = capsys.readouterr().err
    assert (
        f"decoded {tmp_path / 'train'}: 4 / 4 images, " in output
        and f"written to {tmp_path / 'cache'}" in output
    )


@pytest.mark.parametrize("suffix", ["jpg", "jpeg", "webp"])
def test_lossy_formats(tmp_path: Path, suffix: str) -> None:
    smooth = np.broadcast_to(
        np.arange(0, 128, 4, dtype=np.uint8)[:, None, None], (32, 32, 3)
    ).copy()
    save(tmp_path / "train" / "a" / f"1.{suffix}", smooth)
    read = build(tmp_path).read(np.array([0]))["x"][0]
    assert np.abs(read.astype(int) - smooth).max() < 8


@pytest.mark.parametrize("name", ["val", "validation", "test"])
def test_names_of_the_validation_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    fill(tmp_path, name)
    source = build(tmp_path, "val")
    assert isinstance(source, ArraySource) and source.where == str(tmp_path / name)
    assert f"decoded {tmp_path / name}: 3 / 3 images" in capsys.readouterr().err


def test_the_second_start_decodes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path)
    first = build(tmp_path).read(np.arange(4))["x"]
    stat = arrays(tmp_path)[0].stat()
    capsys.readouterr()
    again = build(tmp_path)
    assert capsys.readouterr().err == ""
    assert arrays(tmp_path)[0].stat().st_mtime_ns == stat.st_mtime_ns
    np.testing.assert_array_equal(again.read(np.arange(4))["x"], first)
    assert stat.st_size == 4 * 6 * 5 * 3 + 128  # one array file, header and pixels
    np.testing.assert_array_equal(np.load(arrays(tmp_path)[0], allow_pickle=False), first)
    assert sorted(os.listdir(arrays(tmp_path)[0].parent)) == [
        ".hvdtrain.lock",
        "images.npy",
        "images.npy.xxh3",
    ]


def test_a_changed_file_or_option_makes_a_new_array(tmp_path: Path) -> None:
    fill(tmp_path)
    build(tmp_path)
    assert len(arrays(tmp_path)) == 1
    save(tmp_path / "train" / "bee" / "z.png", colour(200))
    os.utime(tmp_path / "train" / "bee" / "z.png", ns=(1, 1))
    assert (build(tmp_path).read(np.array([3]))["x"][0] == colour(200)).all()
    assert len(arrays(tmp_path)) == 2
    os.utime(tmp_path / "train" / "bee" / "z.png", ns=(2, 2))
    build(tmp_path)
    assert len(arrays(tmp_path)) == 3
    build(tmp_path, size=5)
    assert len(arrays(tmp_path)) == 4
    assert build(tmp_path, channels=1).shape == (6, 5, 1)
    assert len(arrays(tmp_path)) == 5
    os.rename(tmp_path / "train" / "bee" / "z.png", tmp_path / "train" / "bee" / "y.png")
    build(tmp_path)
    assert len(arrays(tmp_path)) == 6


def test_files_of_equal_times_and_sizes_make_different_arrays(tmp_path: Path) -> None:
    for name, value in [("one", 1), ("two", 2)]:
        save(tmp_path / name / "train" / "a" / "1.bmp", colour(value))
        os.utime(tmp_path / name / "train" / "a" / "1.bmp", ns=(0, 0))
    for name, value in [("one", 1), ("two", 2)]:
        source = folder.build("folder", tmp_path / name, "train", cache=tmp_path / "cache")
        assert (source.read(np.array([0]))["x"][0] == colour(value)).all()


def test_the_cache_is_under_xdg_cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    fill(tmp_path)
    folder.build("folder", tmp_path, "train")
    assert len(list((tmp_path / "xdg" / "hvdtrain" / "folders").glob("*/images.npy"))) == 1


def whole(content: bytes) -> list[bytes]:
    """Ways for an array file to be damaged."""
    header = content.replace(b"(4, 6, 5, 3)", b"(9, 6, 5, 3)")
    return [
        content[:-1],
        content + b"x",
        content[:60],
        b"",
        b"not an array",
        header,
        content.replace(b"'|u1'", b"'|i1'"),
        b"PK\3\4" + content,
    ]


@pytest.mark.parametrize("damage", range(8))
def test_a_damaged_cache_is_decoded_again_with_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: int
) -> None:
    fill(tmp_path)
    build(tmp_path)
    path = arrays(tmp_path)[0]
    sound = path.read_bytes()
    path.write_bytes(whole(sound)[damage])
    capsys.readouterr()
    source = build(tmp_path)
    output = capsys.readouterr().err
    assert (
        f"the cached array {path} is damaged: decoding again\n" in output
        and "4 / 4 images" in output
    )
    assert path.read_bytes() == sound
    assert (source.read(np.array([3]))["x"][0] == colour(4)).all()


def test_an_array_of_pickles_is_never_loaded(tmp_path: Path) -> None:
    fill(tmp_path)
    build(tmp_path)
    np.save(arrays(tmp_path)[0], np.array([print] * 4), allow_pickle=True)
    assert build(tmp_path).shape == (6, 5, 3)


def test_size_takes_the_centre_square(tmp_path: Path) -> None:
    wide = np.full((4, 10, 3), 9, np.uint8)
    wide[:, 3:7] = colour(100, 4, 4)
    tall = np.ascontiguousarray(wide.transpose(1, 0, 2))
    for name, pixels in [
        ("wide", wide),
        ("tall", tall),
        ("square", colour(30, 4, 4)),
        ("double", colour(40, 4, 4).repeat(2, 0).repeat(2, 1)),
    ]:
        save(tmp_path / "train" / "a" / f"{name}.png", pixels)
    source = build(tmp_path, size=4)
    double, square, tall_read, wide_read = source.read(np.arange(4))["x"]
    assert source.shape == (4, 4, 3)
    np.testing.assert_array_equal(wide_read, colour(100, 4, 4))
    np.testing.assert_array_equal(tall_read, colour(100, 4, 4).transpose(1, 0, 2))
    np.testing.assert_array_equal(square, colour(30, 4, 4))
    # halved, with a filter over 4 pixels
    assert np.abs(double[1:3, 1:3].astype(int) - colour(40, 4, 4)[1:3, 1:3]).max() <= 3


def test_grey_images_in_colour_and_colour_in_grey(tmp_path: Path) -> None:
    save(tmp_path / "train" / "a" / "1.png", np.arange(30, dtype=np.uint8).reshape(5, 6))
    grey = np.arange(30).reshape(5, 6)
    np.testing.assert_array_equal(
        build(tmp_path).read(np.array([0]))["x"][0], np.stack([grey] * 3, 2)
    )
    np.testing.assert_array_equal(
        build(tmp_path, channels=1).read(np.array([0]))["x"][0, ..., 0], grey
    )


def test_links_are_followed(tmp_path: Path) -> None:
    save(tmp_path / "store" / "x.png", colour(8))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "1.png").symlink_to(tmp_path / "store" / "x.png")
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "a").symlink_to(tmp_path / "elsewhere")
    assert (build(tmp_path).read(np.array([0]))["x"][0] == colour(8)).all()


def test_images_that_differ_in_size(tmp_path: Path) -> None:
    fill(tmp_path)
    save(tmp_path / "train" / "bee" / "zz.png", colour(1, 9, 8))
    output = refusal(tmp_path)
    assert "the images differ in size: 5 x 6 and 8 x 9 pixels" in output
    assert f"{tmp_path / 'train/ant/a.png'} and {tmp_path / 'train/bee/zz.png'}" in output
    assert "fix: data.size=5 resizes the centre square" in output
    assert not arrays(tmp_path)  # nothing half done is taken for a cache
    assert len(build(tmp_path, size=5)) == 5


def test_validation_of_another_size_than_train(tmp_path: Path) -> None:
    for part, height in [("train", 6), ("val", 7)]:
        save(tmp_path / part / "a" / "1.png", colour(1, height, 5))
    assert "the images differ in size: 5 x 6 and 5 x 7 pixels" in refusal(tmp_path, "val")


def png_of(width: int, height: int) -> bytes:
    """A header that claims so many pixels, without pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            len(body).to_bytes(4, "big") + kind + body + zlib.crc32(kind + body).to_bytes(4, "big")
        )

    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 0, 0, 0, 0])
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(bytes(100)))
        + chunk(b"IEND", b"")
    )


@pytest.mark.filterwarnings("default")  # as in a run
@pytest.mark.parametrize(
    "side", [10000, 60000]
)  # PIL only warns of the first, and refuses the second
@pytest.mark.parametrize(
    "name", ["a.png", "z.png"]
)  # the first image, whose header is read beforehand, and a later one
@pytest.mark.parametrize("size", [None, 4])
def test_a_decompression_bomb(tmp_path: Path, side: int, name: str, size: int | None) -> None:
    fill(tmp_path)
    (tmp_path / "train" / "ant" / name).write_bytes(png_of(side, side))
    output = refusal(tmp_path, size=size)
    assert "the image is too large to be decoded safely: Image size" in output
    assert (
        f"where: {tmp_path / 'train' / 'ant' / name}" in output
        and "fix: make it smaller, or remove it" in output
    )


def test_an_unreadable_image_is_named(tmp_path: Path) -> None:
    fill(tmp_path)
    victim = tmp_path / "train" / "bee" / "z.png"
    sound = victim.read_bytes()
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 5 6\n"
    for content, message in [
        (sound[:-30], ""),
        (b"", "UnidentifiedImageError"),
        (postscript, "UnidentifiedImageError"),
        (sound[:40] * 2, ""),
    ]:
        victim.write_bytes(content)
        output = refusal(tmp_path)
        assert f"the image cannot be read: {message}" in output
        assert f"where: {victim}" in output and "fix: repair or remove the file" in output


def test_sixteen_bit_images_are_errors(tmp_path: Path) -> None:
    save(tmp_path / "train" / "a" / "1.png", np.arange(30, dtype=np.uint16).reshape(5, 6) * 2000)
    assert "the image has more than 8 bits a channel (mode I" in refusal(tmp_path, channels=1)


def test_images_of_every_suffix_and_of_folders_in_a_class_are_taken(tmp_path: Path) -> None:
    """In the order of torchvision's ImageFolder: folder by folder, sorted by path; files that are
    left out are named."""
    fill(tmp_path)
    names = [
        "a.tif",
        "b.TIFF",
        "c.gif",
        "d.webp",
        "e.ppm",
        "sub/a.png",
        "sub-2/a.png",
        "sub/deep/a.bmp",
    ]
    for number, name in enumerate(names):
        path = tmp_path / "train" / "bee" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(np.full((6, 5, 3), 10 * number, np.uint8))
        image.save(path, lossless=True) if path.suffix == ".webp" else image.save(path)
    frames = [Image.fromarray(np.full((6, 5, 3), value, np.uint8)) for value in (80, 200)]
    frames[0].save(tmp_path / "train" / "bee" / "f.gif", save_all=True, append_images=frames[1:])
    (tmp_path / "elsewhere").mkdir()
    save(tmp_path / "elsewhere" / "linked.png", np.full((6, 5, 3), 90, np.uint8))
    (tmp_path / "train" / "bee" / "to").symlink_to(tmp_path / "elsewhere")
    found = build(tmp_path)
    assert (
        isinstance(found, ArraySource)
        and found.y.tolist() == [0] * 3 + [1] * 11
        and found.notes == ()
    )
    assert found.x[3:, 0, 0, 0].tolist() == [
        0,
        10,
        20,
        30,
        40,
        80,
        colour(4)[0, 0, 0],
        50,
        60,
        70,
        90,
    ]
    for name in ("bee/.DS_Store", "bee/sub/Thumbs.db", "loose.png", "ant/._a.png"):
        (tmp_path / "train" / name).write_bytes(b"nothing")
    save(tmp_path / "train" / "ant" / ".ipynb_checkpoints" / "a.png", colour(1))
    (tmp_path / "train" / ".hidden").mkdir()
    for source in (
        build(tmp_path),
        *open_datasets(configure(None, words(tmp_path, "data.val_share=0.3")))[:2],
    ):
        (line,) = source.notes  # type: ignore[attr-defined]
        assert line == (
            f"{tmp_path}/train: left out 6 files and folders that are hidden or no image "
            "(.jpg .jpeg .png .bmp .webp .tif .tiff .gif .ppm .pgm): .hidden/, loose.png, "
            "ant/._a.png, ..."
        )
    config = configure(None, words(tmp_path))
    counts = "training samples by class: ant 3, bee 11"
    assert notes(config, open_datasets(config)) == [line, counts]
    assert (
        len(build(tmp_path)) == 14 and (build(tmp_path).read(np.arange(14))["x"] == found.x).all()
    )


def words(root: Path, *more: str) -> list[str]:
    return [
        "data.name=folder",
        f"data.root={root}",
        f"data.cache={root}/cache",
        "batch.size=2",
        *more,
    ]


def test_a_circle_of_links_is_an_error(tmp_path: Path) -> None:
    fill(tmp_path)
    (tmp_path / "train" / "bee" / "again").symlink_to(tmp_path / "train")
    assert (
        refusal(tmp_path) == f"a circle of links: it leads back to {tmp_path}/train\n  where: "
        f"{tmp_path}/train/bee/again\n  fix: remove the link"
    )


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp"])
def test_images_are_turned_as_their_exif_orientation_says(tmp_path: Path, suffix: str) -> None:
    """As by PIL's own exif_transpose(), whole and with the centre square of large ones; without
    data.exif they are as they are stored."""
    for orientation in range(1, 9):
        height, width = (40, 64) if orientation < 5 else (64, 40)
        exif = Image.Exif()
        exif[0x112] = orientation
        path = tmp_path / "train" / "ant" / f"{orientation}.{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        rows, columns = np.mgrid[:height, :width]
        pixels = np.stack([4 * rows % 256, 3 * columns % 256, rows + columns], 2).astype(np.uint8)
        Image.fromarray(pixels).save(
            path, exif=exif, **({"lossless": True} if suffix == "webp" else {})
        )
    opened = [
        Image.open(tmp_path / "train" / "ant" / f"{orientation}.{suffix}")
        for orientation in range(1, 9)
    ]
    upright = [ImageOps.exif_transpose(image).convert("RGB") for image in opened]
    every = np.arange(8)
    for packed in (True, False):
        found = folder.build(
            "folder", tmp_path, "train", packed=packed, cache=tmp_path / "cache", exif="apply"
        )
        assert [image.tobytes() for image in found.read(every)["x"]] == [
            image.tobytes() for image in upright
        ]
        sized = folder.build(
            "folder",
            tmp_path,
            "train",
            size=16,
            packed=packed,
            cache=tmp_path / "cache",
            exif="apply",
        )
        squares = [
            image.resize((16, 16), Image.Resampling.BILINEAR, (12, 0, 52, 40)) for image in upright
        ]
        assert [image.tobytes() for image in sized.read(every)["x"]] == [
            image.tobytes() for image in squares
        ]
    stored = folder.build("folder", tmp_path, "train", size=40, cache=tmp_path / "cache")
    boxes = [(12, 0, 52, 40) if image.width > image.height else (0, 12, 40, 52) for image in opened]
    assert [x.tobytes() for x in stored.read(every)["x"]] == [
        image.convert("RGB").crop(box).tobytes() for image, box in zip(opened, boxes, strict=True)
    ]


def test_wrong_folders_are_errors(tmp_path: Path) -> None:
    fix = "  fix: data.root=DIR, with images in DIR/train/<class>/"
    assert refusal(tmp_path / "none").startswith(
        f"{tmp_path}/none does not exist\n  where: root\n{fix}"
    )
    assert "no folder train\n" in refusal(tmp_path) and f"where: {tmp_path}" in refusal(tmp_path)
    (tmp_path / "train").mkdir()
    assert "no class folders" in refusal(tmp_path)
    save(tmp_path / "train" / "ant" / "1.png", colour(1))
    assert "no folder val or validation or test" in refusal(tmp_path, "val")
    assert "DIR/val/<class>/" in refusal(tmp_path, "val")
    save(tmp_path / "val" / "ant" / "1.png", colour(1))
    save(tmp_path / "val" / "wasp" / "1.png", colour(1))
    assert f"only one of train and val has class wasp\n  where: {tmp_path / 'val'}" in refusal(
        tmp_path, "val"
    )
    (tmp_path / "train" / "wasp").mkdir()
    output = refusal(tmp_path)
    assert (
        "no images (.jpg .jpeg .png .bmp .webp .tif .tiff .gif .ppm .pgm) in class wasp" in output
    )
    assert "with images in it or in its folders" in output
    (tmp_path / "train" / "wasp" / "1.png").symlink_to(tmp_path / "nowhere")
    output = refusal(tmp_path)
    assert (
        "cannot list the images: [Errno 2] No such file or directory" in output
        and "wasp/1.png" in output
    )


def test_wrong_options_are_errors(tmp_path: Path) -> None:
    with pytest.raises(
        UserError,
        match=r"data.name=folder needs data.root\n  where: root\n  fix: data.root=DIR",
    ):
        folder.build("folder", None, "train")
    assert "images of size None with 2 channels are impossible" in refusal(tmp_path, channels=2)
    assert "images of size 0 with 3 channels" in refusal(tmp_path, size=0)


def test_a_cache_folder_that_cannot_be_made(tmp_path: Path) -> None:
    fill(tmp_path)
    (tmp_path / "cache").write_text("a file where a folder should be")
    output = refusal(tmp_path)
    assert "cannot pack the images: [Errno 20] Not a directory" in output
    assert "fix: data.cache=DIR, with 0 MB of free space" in output


ONE_OF_MANY = """
import sys
from pathlib import Path
import numpy as np
from hvdtrain.extras.image_files.data.datasets import folder
source = folder.build("folder", Path(sys.argv[1]), "train", cache=Path(sys.argv[1]) / "cache")
print(int(source.read(np.arange(len(source)))["x"].sum()))
"""


def test_one_of_three_processes_decodes(tmp_path: Path) -> None:
    for number in range(300):
        save(tmp_path / "train" / str(number % 2) / f"{number:03}.png", colour(number, 32, 32))
    command = [sys.executable, "-c", ONE_OF_MANY, str(tmp_path)]
    running = [
        subprocess.Popen(
            command, cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    output = [process.communicate(timeout=HANG_S) for process in running]
    total = sum(int(colour(number, 32, 32).sum()) for number in range(300))
    assert [out for out, _ in output] == [f"{total}\n"] * 3, output
    assert "".join(err for _, err in output).count("300 / 300 images") == 1
    assert len(arrays(tmp_path)) == 1


def test_folders_are_compared_before_an_image_is_decoded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a job opens them; train alone decoded all of its images before the classes of val were
    looked at."""
    fill(tmp_path)
    (tmp_path / "val" / "wasp").mkdir()
    save(tmp_path / "val" / "wasp" / "a.png", colour(1))

    def opened(*arguments: str) -> str:
        with pytest.raises(UserError) as caught:
            open_datasets(
                configure(
                    None,
                    [
                        "data.name=folder",
                        f"data.root={tmp_path}",
                        f"data.cache={tmp_path / 'cache'}",
                        *arguments,
                    ],
                )
            )
        return str(caught.value)

    assert opened().startswith("only one of train and val has class wasp\n")
    (tmp_path / "val").rename(tmp_path / "other")
    fix = (
        "data.root=DIR, with images in DIR/val/<class>/; or data.val_share=0.1, which takes a "
        "tenth of train instead"
    )
    assert opened() == f"no folder val or validation or test\n  where: {tmp_path}\n  fix: {fix}"
    assert not (tmp_path / "cache").exists() and "decoded" not in capsys.readouterr().err
    assert opened("data.val_share=0.5", "batch.size=9").startswith(
        "batch 9 is more than the 2 training samples"
    )


def test_a_share_of_train_validates_where_there_is_no_val(tmp_path: Path) -> None:
    """Of 3 ants and 1 bee: 2 and 1 are trained on. All are decoded once, into one file, whatever
    the share."""
    fill(tmp_path, val="elsewhere")
    words = [
        "data.name=folder",
        f"data.root={tmp_path}",
        f"data.cache={tmp_path / 'cache'}",
        "batch.size=1",
    ]
    train, val, task, _ = open_datasets(configure(None, [*words, "data.val_share=0.34"]))
    assert (train.labels().tolist(), val.labels().tolist(), len(arrays(tmp_path))) == (
        [0, 0, 1],
        [0],
        1,
    )
    assert train.class_names == val.class_names == ("ant", "bee")
    # of what is trained on
    assert task.mean == pytest.approx(train.read(np.arange(3))["x"].mean((0, 1, 2)) / 255)
    open_datasets(configure(None, [*words, "data.val_share=0.6"]))
    assert len(arrays(tmp_path)) == 1
    (tmp_path / "train" / "ant" / "b.bmp").unlink()
    (tmp_path / "train" / "ant" / "c.PNG").unlink()
    with pytest.raises(
        UserError, match="no class has the two samples that data.val_share=0.6 needs"
    ):
        open_datasets(configure(None, [*words, "data.val_share=0.6"]))


def test_validation_images_without_train_have_their_own_classes(tmp_path: Path) -> None:
    fill(tmp_path)
    (tmp_path / "train").rename(tmp_path / "elsewhere")
    assert (build(tmp_path, "val").class_names, build(tmp_path, "val").labels().tolist()) == (
        ("ant", "bee"),
        [0, 1, 1],
    )
    assert refusal(tmp_path).startswith("no folder train\n")


def test_names_of_classes_are_recorded_and_compared(tmp_path: Path) -> None:
    fill(tmp_path)
    source = build(tmp_path)
    config = configure(None, [])
    assert with_class_names(config, source).data.class_names == ["ant", "bee"]
    assert with_class_names(
        configure(None, ["data.class_names=[ant,bee]"]), source
    ).data.class_names == ["ant", "bee"]
    unnamed = replace(source, class_names=())
    assert with_class_names(config, unnamed).data.class_names is None
    assert with_class_names(
        configure(None, ["data.class_names=[a,b]"]), unnamed
    ).data.class_names == ["a", "b"]
    for names in (["x" * 200] * 200, ["${a}", "b"]):  # which config.yaml cannot hold
        assert (
            with_class_names(config, replace(source, class_names=tuple(names))).data.class_names
            is None
        )
    for given, what in (
        ("[ant,bug]", "data.class_names differs from the data set: class 1 is bee\n"),
        ("[ant]", "data.class_names differs from the data set: class 1 is bee\n"),
        ("[ant,bee,cat]", "data.class_names differs from the data set: it has fewer\n"),
    ):
        with pytest.raises(UserError) as caught:
            with_class_names(configure(None, [f"data.class_names={given}"]), source)
        assert str(caught.value).startswith(what)
    with pytest.raises(UserError, match="1 names for 2 classes"):
        with_class_names(configure(None, ["data.class_names=[a]"]), unnamed)


def test_grey_images_in_three_channels_are_named(tmp_path: Path) -> None:
    for split in ("train", "val"):
        for name in ("a/1.png", "a/2.png", "b/1.png"):
            save(tmp_path / split / name, colour(len(name))[..., 0])
    words = [
        "data.name=folder",
        f"data.root={tmp_path}",
        f"data.cache={tmp_path / 'cache'}",
        "batch.size=1",
    ]
    (line,) = notes(configure(None, words), open_datasets(configure(None, words)))
    assert line == "grey images: the three channels have the same values; data.channels=1 reads one"
    for others in ([*words, "data.channels=1"], ["data.name=synthetic"]):
        assert notes(configure(None, others), open_datasets(configure(None, others))) == []


def test_a_root_that_is_not_there_is_named_by_its_key(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It is looked at before the set is opened."""
    assert main(["data.name=folder", f"data.root={tmp_path / 'nosuch'}", "run=null"]) == 2
    assert "where: data.root, command line" in capsys.readouterr().err
