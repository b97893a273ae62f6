"""WebDataset archives: read in place, with the same samples as image folders; every defect is an
error that names file and member."""

from __future__ import annotations

import io
import pickle
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from ranks import needs_extra
from small_images import check_workers, colour, save, save_jpegs

from hvdtrain.config.read import configure
from hvdtrain.data.files.staging import stage_data
from hvdtrain.data.source import ArraySource, Source, Split
from hvdtrain.errors import UserError
from hvdtrain.extras.image_files.data.datasets import folder
from hvdtrain.extras.image_files.image_source import ImageSource
from hvdtrain.extras.webdataset.data.datasets import webdataset
from hvdtrain.training.datasets import open_datasets


def encoded(value: int, form: str = "png", height: int = 6) -> bytes:
    file = io.BytesIO()
    Image.fromarray(colour(value, height)).save(file, form)
    return file.getvalue()


def info(name: str, content: bytes) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    return member


def write(path: Path, members: list[tuple[str, bytes]], form: int = tarfile.PAX_FORMAT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=form) as tar:
        for name, content in members:
            tar.addfile(info(name, content), io.BytesIO(content))
    return path


def sample(value: int, label: int, key: str = "") -> list[tuple[str, bytes]]:
    return [(f"{key or value}.cls", str(label).encode()), (f"{key or value}.png", encoded(value))]


def fill(root: Path) -> None:
    """Training: 1, 2, 3 of classes 0, 2, 1 in two archives; validation: 4 of class 0, 5 of class
    2."""
    write(root / "train" / "a-000000.tar", [*sample(1, 0), *sample(2, 2)])
    write(root / "train" / "a-000001.tar", sample(3, 1))
    write(root / "val" / "b.tar", [*sample(4, 0), *sample(5, 2)])


def build(
    root: Path,
    split: Split = "train",
    size: int | None = None,
    classes: int | None = None,
    packed: bool = False,
) -> Source:
    return webdataset.build(
        "webdataset", root, split, size=size, classes=classes, packed=packed, cache=root / "cache"
    )


def refusal(
    root: Path, split: Split = "train", size: int | None = None, classes: int | None = None
) -> str:
    with pytest.raises(UserError) as caught:
        build(root, split, size, classes)
    return str(caught.value)


def check(source: Source, values: list[int], labels: list[int]) -> None:
    batch = source.read(np.arange(len(source)))
    np.testing.assert_array_equal(batch["x"], np.stack([colour(value) for value in values]))
    assert batch["y"].tolist() == labels and batch["y"].dtype == np.int64


def test_samples_are_read_in_any_order_and_indexed_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path)
    source = build(tmp_path)
    assert isinstance(source, ImageSource) and (len(source), source.shape, source.classes) == (
        3,
        (6, 5, 3),
        3,
    )
    check(source, [1, 2, 3], [0, 2, 1])
    batch = source.read(np.array([2, 0, 2]))
    assert (
        batch["y"].tolist() == [1, 0, 1]
        and (batch["x"][0] == colour(3)).all()
        and (batch["x"][1] == colour(1)).all()
    )
    assert f"found 3 images in 2 archives of {tmp_path / 'train'}: " in capsys.readouterr().err
    check(build(tmp_path, "val"), [4, 5], [0, 2])
    assert capsys.readouterr().err.count("found ") == 1
    times = {path: path.stat().st_mtime_ns for path in tmp_path.glob("cache/*/*.npy")}
    check(build(tmp_path), [1, 2, 3], [0, 2, 1])
    assert capsys.readouterr().err == "" and len(times) == 4
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("cache/*/*.npy")} == times


def test_a_changed_archive_is_indexed_again(tmp_path: Path) -> None:
    fill(tmp_path)
    source = build(tmp_path)
    victim = write(tmp_path / "train" / "a-000001.tar", [*sample(9, 1), *sample(8, 0)])
    with pytest.raises(
        UserError,
        match="the archive has changed since the job began\n  where: .*/a-000001.tar\n  fix: "
        "start again",
    ):
        source.read(np.array([2]))
    check(build(tmp_path), [1, 2, 9, 8], [0, 2, 1, 0])
    victim.unlink()
    with pytest.raises(UserError, match="the archive cannot be read: .*No such file"):
        source.read(np.array([2]))
    check(build(tmp_path), [1, 2], [0, 2])


@pytest.mark.parametrize("name", ["places", "labels"])
@pytest.mark.parametrize("damage", ["missing", "short", "pickle", "fewer"])
def test_an_index_that_is_cut_off_is_made_again(tmp_path: Path, name: str, damage: str) -> None:
    fill(tmp_path)
    build(tmp_path)
    (path,) = tmp_path.glob(f"cache/*/{name}.npy")
    index = np.load(path)
    sound = path.read_bytes()
    path.unlink()
    if damage == "short":
        path.write_bytes(sound[:-1])
    elif damage != "missing":
        np.save(
            path,
            np.array([print] * 4) if damage == "pickle" else np.ascontiguousarray(index[..., :2]),
            allow_pickle=True,
        )
    check(build(tmp_path), [1, 2, 3], [0, 2, 1])
    assert path.read_bytes() == sound


@pytest.mark.parametrize(
    ("row", "value"), [(0, 2), (0, -1), (1, 2**40), (1, -5), (2, 2**40), (2, -1)]
)
def test_a_place_is_checked_when_its_image_is_read_and_no_rank_reads_all_of_them(
    tmp_path: Path, row: int, value: int
) -> None:
    fill(tmp_path)
    build(tmp_path)
    (path,) = tmp_path.glob("cache/*/places.npy")
    places = np.load(path)
    places[row, 1] = value
    np.save(path, places)
    source = build(tmp_path)
    assert source.read(np.array([0, 2]))["y"].tolist() == [0, 1]
    where = f"\n  where: {path.parent}\n  fix: remove this folder, and start again"
    with pytest.raises(
        UserError,
        match=f"the index of .*/train is damaged: image 1 is outside of its archive{where}",
    ):
        source.read(np.array([1]))


def test_labels_take_a_byte_and_worker_processes_map_the_index_themselves(tmp_path: Path) -> None:
    fill(tmp_path)
    source = build(tmp_path)
    assert isinstance(source, ImageSource) and isinstance(source.encoded, webdataset._Archives)
    assert source.labels().dtype == np.uint8 and source.read(np.array([1]))["y"].dtype == np.int64
    packed = pickle.dumps(source.reader)
    assert source.encoded.places.tobytes() not in packed and pickle.loads(packed).encoded.content(
        2
    ) == source.encoded.content(2)
    write(tmp_path / "train" / "c.tar", sample(9, 65535))
    large = build(tmp_path, classes=2**16)
    assert isinstance(large, ImageSource) and large.labels().dtype == np.uint16
    check(large, [1, 2, 3, 9], [0, 2, 1, 65535])


@pytest.mark.parametrize(
    "layout",
    [
        "val/x.tar",
        "validation/x.tar",
        "test/x.tar",
        "val-000000.tar",
        "validation-0.tar",
        "test-0.tar",
    ],
)
def test_names_of_archives(tmp_path: Path, layout: str) -> None:
    for number in range(3):
        write(tmp_path / f"train-{number:06}.tar", sample(number, number))
    write(tmp_path / ".train-9.tar", sample(9, 9))
    write(tmp_path / layout, sample(7, 2))
    check(build(tmp_path), [0, 1, 2], [0, 1, 2])
    check(build(tmp_path, "val"), [7], [2])


def test_names_of_members(tmp_path: Path) -> None:
    """The key ends at the first dot of the last component; a path is no path."""
    long = "k" * 300
    members = [
        ("__meta__", b"x"),
        ("__notes__/1.cls", b"5"),
        ("README", b"x"),
        ("._1.png", b"x"),
        ("only.json", b"{}"),
        *sample(1, 0, "../../up"),
        *sample(2, 1, "/etc/passwd"),
        ("dir.v2/3.seg.png", b"another part of the sample"),
        ("dir.v2/3.PNG", encoded(3)),
        ("dir.v2/3.json", b"{}"),
        ("dir.v2/3.cls", b" 1\n"),
        *sample(4, 0, long),
    ]
    for form in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        write(tmp_path / str(form) / "train" / "a.tar", members, form)
        before = {path for path in tmp_path.rglob("*") if "cache" not in path.parts}
        check(build(tmp_path / str(form)), [1, 2, 3, 4], [0, 1, 1, 0])
        assert {path for path in tmp_path.rglob("*") if "cache" not in path.parts} == before
    assert not (tmp_path.parent / "up.png").exists()


@pytest.mark.parametrize("size", [None, 16])
def test_equal_to_a_folder_of_the_same_images(tmp_path: Path, size: int | None) -> None:
    rng = np.random.default_rng(7)
    members: dict[str, list[tuple[str, bytes]]] = {"train": [], "val": []}
    for split, labels, count in (("train", 3, 8), ("val", 3, 2)):
        for number in range(labels * count):
            label = number // count
            form = ("jpeg", "png", "webp")[number % 3]
            path = tmp_path / "folders" / split / f"class{label}" / f"{number:02}.{form}"
            save(path, rng.integers(0, 256, (24, 20 + (size or 4) % 5, 3), np.uint8))
            members[split] += [
                (f"{number:02}.cls", str(label).encode()),
                (f"{number:02}.{form}", path.read_bytes()),
            ]
    for split, all_of_it in members.items():
        for shard in range(2):
            half = len(all_of_it) // 2
            write(
                tmp_path / "tars" / split / f"{shard}.tar",
                all_of_it[shard * half : (shard + 1) * half],
            )
    for split in ("train", "val"):
        other = folder.build(
            "folder", tmp_path / "folders", split, size=size, cache=tmp_path / "cache"
        )
        source = build(tmp_path / "tars", split, size)
        kept = build(tmp_path / "tars", split, size, packed=True)
        assert isinstance(kept, ArraySource) and len(
            list(tmp_path.glob("tars/cache/*/images.npy"))
        ) == (1 if split == "train" else 2)
        order = rng.permutation(len(other))
        for one in (source, kept):
            assert (len(one), one.shape, one.classes) == (len(other), other.shape, other.classes)
            for key, value in other.read(order).items():
                np.testing.assert_array_equal(one.read(order)[key], value)
            assert [part.tolist() for part in one.stats()] == [
                part.tolist() for part in other.stats()
            ]


def test_each_size_has_its_own_packed_arrays(tmp_path: Path) -> None:
    fill(tmp_path)
    for size in (3, 4, 3):
        assert build(tmp_path, size=size, packed=True).shape == (size, size, 3)
    assert len(list(tmp_path.glob("cache/*/images.npy"))) == 2


def test_eight_threads_read_at_once(tmp_path: Path) -> None:
    write(
        tmp_path / "train-0.tar",
        [member for value in range(20) for member in sample(value, value % 4)],
    )
    write(
        tmp_path / "train-1.tar",
        [member for value in range(20, 40) for member in sample(value, value % 4)],
    )
    source = build(tmp_path)

    def look(thread: int) -> None:
        order = np.random.default_rng(thread).integers(0, 40, 60)
        batch = source.read(order)
        assert batch["y"].tolist() == (order % 4).tolist()
        np.testing.assert_array_equal(
            batch["x"], np.stack([colour(value) for value in order.tolist()])
        )

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(look, thread) for thread in range(16)]:
            future.result()


def test_labels_beyond_the_classes(tmp_path: Path) -> None:
    fill(tmp_path)
    assert build(tmp_path, classes=7).classes == 7
    output = refusal(tmp_path, classes=2)
    assert (
        f"label 2 is outside 0..1\n  where: {tmp_path / 'train' / 'a-000000.tar'}: 2.png\n  fix: "
        "correct it, or set data.classes=N"
    ) in output
    write(tmp_path / "val" / "b.tar", [*sample(4, 0), *sample(5, 3)])
    assert f"label 3 is outside 0..2\n  where: {tmp_path / 'val' / 'b.tar'}: 5.png" in refusal(
        tmp_path, "val"
    )
    assert "0 classes are impossible\n  where: classes" in refusal(tmp_path, classes=0)


def test_an_image_that_does_not_decode_is_named(tmp_path: Path) -> None:
    write(
        tmp_path / "train-0.tar",
        [*sample(1, 0), ("2.png", encoded(2)[:-30]), ("2.cls", b"1"), *sample(3, 0)],
    )
    source = build(tmp_path)
    with pytest.raises(
        UserError,
        match="the image cannot be read: .*\n  where: .*/train-0.tar: 2.png\n  fix: repair or "
        "remove the file",
    ):
        source.read(np.array([0, 1]))
    assert len(source.read(np.array([0, 2]))["x"]) == 2
    write(
        tmp_path / "train-0.tar", [*sample(1, 0), ("2.png", encoded(2, height=7)), ("2.cls", b"1")]
    )
    with pytest.raises(
        UserError,
        match="differ in size: 5 x 6 and 5 x 7 pixels\n  where: .*/train-0.tar: 1.png and "
        ".*/train-0.tar: 2.png",
    ):
        build(tmp_path).read(np.array([1]))


def test_folders_without_archives(tmp_path: Path) -> None:
    with pytest.raises(
        UserError,
        match="data.name=webdataset needs data.root\n  where: root\n  fix: data.root=DIR",
    ):
        webdataset.build("webdataset", None, "train")
    assert refusal(tmp_path / "none").startswith(
        f"{tmp_path}/none does not exist\n  where: root\n  fix: data.root=DIR, with archives"
    )
    (tmp_path / "file").touch()
    assert refusal(tmp_path / "file").startswith(
        f"{tmp_path}/file is not a folder\n  where: root\n"
    )
    assert f"no archives train/*.tar or train-*.tar\n  where: {tmp_path}" in refusal(tmp_path)
    fill(tmp_path)
    (tmp_path / "val" / "b.tar").unlink()
    assert "no archives val/*.tar or val-*.tar or validation/*.tar" in refusal(tmp_path, "val")
    assert "images of size 0 with 3 channels are impossible" in refusal(tmp_path, size=0)
    (tmp_path / "none").write_text("a file where a folder should be")
    with pytest.raises(
        UserError,
        match="cannot write the index of the archives: .*Not a directory.*\n.*\n  fix: "
        "data.cache=DIR",
    ):
        webdataset.build("webdataset", tmp_path, "train", cache=tmp_path / "none")


def test_validation_archives_without_train_have_their_own_size_and_classes(tmp_path: Path) -> None:
    """A model that exists already is evaluated with them; a job that trains says what is
    missing."""
    fill(tmp_path)
    (tmp_path / "train").rename(tmp_path / "elsewhere")
    check(build(tmp_path, "val"), [4, 5], [0, 2])
    assert build(tmp_path, "val").classes == 3 and build(tmp_path, "val", classes=5).classes == 5
    assert refusal(tmp_path).startswith("no archives train/*.tar or train-*.tar\n")


@pytest.mark.parametrize("layout", ["folders", "names"])
@needs_extra("staging")
def test_staging_copies_only_the_archives(tmp_path: Path, layout: str) -> None:
    root = tmp_path / "source"
    fill(root)
    if layout == "names":
        for path in list(root.glob("*/*.tar")):
            path.rename(root / f"{path.parent.name}-{path.name}")
    write(root / "other" / "x.tar", sample(1, 0))
    (root / "large").write_bytes(b"x" * 1000)
    there, options = stage_data(
        "webdataset", root, {}, str(tmp_path / "disk"), "data.stage", webdataset.STAGING
    )
    assert there is not None and len([path for path in there.rglob("*") if path.is_file()]) == 3
    check(webdataset.build("webdataset", there, "train", **options), [1, 2, 3], [0, 2, 1])
    check(webdataset.build("webdataset", there, "val", **options), [4, 5], [0, 2])
    assert list((there.parent / "decoded").glob("*/places.npy"))


@pytest.mark.in_turn
def test_worker_processes_decode_the_same_bytes(tmp_path: Path) -> None:
    members = [
        member
        for path in save_jpegs(tmp_path / "folder", 12)
        for member in (
            (f"{path.stem}.cls", path.parent.name.encode()),
            (f"{path.stem}.jpg", path.read_bytes()),
        )
    ]
    write(tmp_path / "train-0.tar", members)
    threads = webdataset.build("webdataset", tmp_path, "train", size=16, cache=tmp_path / "cache")
    assert isinstance(threads, ImageSource)
    check_workers(threads, 12)


@pytest.mark.in_turn
def test_the_key_data_workers(tmp_path: Path) -> None:
    for split, value in (("train", 0), ("train", 1), ("val", 1)):
        write(tmp_path / f"{split}-{value}.tar", sample(value, 0))
    words = ["data.name=webdataset", f"data.root={tmp_path}", f"data.cache={tmp_path / 'cache'}"]
    for workers in (1, 0):
        chosen = [*words, "data.classes=2", "batch.size=1", f"data.workers={workers}"]
        for source in open_datasets(configure(None, chosen))[:2]:
            assert isinstance(source, ImageSource) and (source.workers is not None) == (
                workers == 1
            )
