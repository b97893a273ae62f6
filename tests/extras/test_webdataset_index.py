"""Hostile archives: truncated, compressed, with impossible sizes, links, wrong labels. Each is an
error that names file and member."""

from __future__ import annotations

import gzip
import io
import os
import re
import tarfile
from pathlib import Path

import numpy as np
import pytest
from test_webdataset import build, check, encoded, info, refusal, sample, write

from hvdtrain.errors import UserError


def one_archive(root: Path, members: list[tuple[str, bytes]]) -> str:
    write(root / "train-0.tar", [*sample(1, 0, "sound"), *members])
    return refusal(root)


@pytest.mark.parametrize(
    "label",
    ["1e9", "-1", "", "one", "1.0", "0x1", "1_0", str(2**20), "9" * 40, "\u0661", "3" + " " * 70],
)
def test_labels_that_are_no_class(tmp_path: Path, label: str) -> None:
    output = one_archive(tmp_path, [("2.png", encoded(2)), ("2.cls", label.encode())])
    assert output.startswith("the label is '") and ", expected 0 to 1048575\n" in output
    assert f"where: {tmp_path / 'train-0.tar'}: 2.cls\n  fix: the number of the class" in output


def test_incomplete_samples(tmp_path: Path) -> None:
    image = ("2.png", encoded(2))
    label = ("2.cls", b"0")
    for members, has, first in (
        ([image], "1 images and 0 labels", "2.png"),
        ([label], "0 images and 1 labels", "2.cls"),
        ([image, ("2.jpg", b"x"), label], "2 images and 1 labels", "2.png"),
        ([image, label, label], "1 images and 2 labels", "2.png"),
        ([image, ("3.png", encoded(3)), label, ("3.cls", b"0")], "1 images and 0 labels", "2.png"),
    ):
        output = one_archive(tmp_path, members)
        assert (
            f"sample 2 has {has}\n  where: {tmp_path / 'train-0.tar'}: {first}\n  fix: one image "
            "and one 2.cls, next to each other" in output
        )
    assert "the image is a file of 0 bytes" in one_archive(tmp_path, [("2.png", b""), label])


def test_a_sample_that_is_there_twice(tmp_path: Path) -> None:
    output = one_archive(tmp_path, [*sample(2, 0), *sample(3, 1), *sample(2, 1)])
    assert (
        "sample 2 is in the archive twice, with other members in between\n  where: "
        f"{tmp_path / 'train-0.tar'}: 2."
    ) in output
    write(tmp_path / "train-0.tar", [*sample(1, 0), *sample(2, 1)])
    # archives may count from the same number
    write(tmp_path / "train-1.tar", [*sample(1, 1), *sample(2, 0)])
    check(build(tmp_path), [1, 2, 1, 2], [0, 1, 1, 0])


def test_a_truncated_archive_wherever_it_is_cut(tmp_path: Path) -> None:
    path = write(tmp_path / "train-0.tar", [*sample(1, 0), *sample(2, 1), *sample(3, 1)])
    content = path.read_bytes()
    last = content.rindex(b"IEND") // 512 * 512 + 512  # where the mark of the end begins
    assert not any(content[last:]) and len(content) - last >= 1024
    for cut in (*range(0, last, 256), last - 1, last + 511):
        path.write_bytes(content[:cut])
        output = refusal(tmp_path)
        assert "the archive is damaged or cut off: " in output and f"where: {path}\n" in output, (
            cut,
            output,
        )
    path.write_bytes(content[: last - 512])
    assert (
        f"cut off: 3.png ends at byte {content.rindex(b'IEND') + 8}, the file at {last - 512}\n"
        in refusal(tmp_path)
    )
    path.write_bytes(content[: last + 512])
    check(build(tmp_path), [1, 2, 3], [0, 1, 1])


def checksummed(header: bytes) -> bytes:
    return header[:148] + b"%06o\0 " % sum(header[:148] + b" " * 8 + header[156:512]) + header[156:]


def test_hostile_headers(tmp_path: Path) -> None:
    path = write(tmp_path / "train-0.tar", [*sample(1, 0), *sample(2, 1)])
    content = path.read_bytes()
    third = content.index(b"2.cls\0")

    def with_header(size: bytes | None = None, kind: bytes | None = None, at: int = third) -> str:
        header = content[at : at + 512]
        header = (
            header[:124]
            + (size or header[124:136])
            + header[136:156]
            + (kind or header[156:157])
            + header[157:]
        )
        path.write_bytes(content[:at] + checksummed(header) + content[at + 512 :])
        return refusal(tmp_path)

    for size in (
        b"77777777777\0",
        b"\x80" + b"\0" * 3 + b"\x7f" * 8,
        b"\xff" * 11 + b"\0",
        b"\xff" * 12,
        b"\x80" + b"\xff" * 11,
    ):
        for kind in (b"0", b"L", b"x", b"g", b"S", b"5"):
            assert "the archive is damaged or cut off: " in with_header(size, kind), (size, kind)
    for kind in (b"1", b"2", b"3", b"6", b"S"):
        output = with_header(kind=kind)
        assert (
            "the member is not a regular file" in output
            or "damaged or cut off" in output
            or "0 images and 1 labels" in output
        ), kind
    # tarfile takes it for the end
    path.write_bytes(content[: third + 10] + b"\xff" * 20 + content[third + 30 :])
    assert f"cut off: a damaged header at byte {third}" in refusal(tmp_path)
    path.write_bytes(content + content)
    assert "another archive behind the end of this one, which would not be read" in refusal(
        tmp_path
    )


def test_links_and_sparse_files_are_errors(tmp_path: Path) -> None:
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE):
        with tarfile.open(tmp_path / "train-0.tar", "w") as tar:
            label = info("1.cls", b"0")
            image = tarfile.TarInfo("1.png")
            tar.addfile(label, io.BytesIO(b"0"))
            image.type = kind
            image.linkname = "/etc/passwd"
            tar.addfile(image)
        output = refusal(tmp_path)
        assert (
            "the member is not a regular file, but a link, a sparse file or a device\n" in output
            and "train-0.tar: 1.png\n" in output
        )
    with tarfile.open(tmp_path / "train-0.tar", "w") as tar:
        image = info("1.png", b"1\n0\n0\n")
        image.pax_headers = {
            "GNU.sparse.major": "1",
            "GNU.sparse.minor": "0",
            "GNU.sparse.realsize": "99999999999999",
        }
        tar.addfile(image, io.BytesIO(b"1\n0\n0\n"))
        tar.addfile(info("1.cls", b"0"), io.BytesIO(b"0"))
    assert "the member is not a regular file" in refusal(tmp_path)


def test_compressed_archives_and_pipes_are_errors(tmp_path: Path) -> None:
    path = write(tmp_path / "train-0.tar", sample(1, 0))
    content = path.read_bytes()
    path.write_bytes(gzip.compress(content))
    assert f"the archive is compressed (gzip)\n  where: {path}\n  fix: decompress it" in refusal(
        tmp_path
    )
    path.write_bytes(content)
    (tmp_path / "train-1.tar.gz").write_bytes(gzip.compress(content))
    assert f"the archive is compressed\n  where: {tmp_path / 'train-1.tar.gz'}" in refusal(tmp_path)
    (tmp_path / "train-1.tar.gz").unlink()
    os.mkfifo(tmp_path / "train-1.tar")
    assert f"the archive is not a regular file\n  where: {tmp_path / 'train-1.tar'}" in refusal(
        tmp_path
    )
    (tmp_path / "train-1.tar").unlink()
    write(path, [("notes.txt", b"x")])
    assert f"the archives hold no samples\n  where: {tmp_path}" in refusal(tmp_path)


def test_headers_of_negative_or_huge_sizes(tmp_path: Path) -> None:
    """A size that is negative would make the reader read the same header forever; one long name
    behind the other exhausts the stack."""
    path = tmp_path / "train-0.tar"
    for size in ("-512", "-1024", "-99999999999999", "9" * 30, str(2**62)):
        with tarfile.open(path, "w") as tar:
            image = info("1.png", encoded(1))
            image.pax_headers = {"size": size}
            tar.addfile(image, io.BytesIO(encoded(1)))
            tar.addfile(info("1.cls", b"0"), io.BytesIO(b"0"))
        # Python 3.13 goes on behind a negative size, and does not find the image
        assert re.search(
            "the archive is damaged or cut off: |sample 1 has 0 images", refusal(tmp_path)
        ), size
    name = info("././@LongLink", b"n" * 100)
    name.type = tarfile.GNUTYPE_LONGNAME
    path.write_bytes((name.tobuf(tarfile.GNU_FORMAT) + b"n" * 100 + bytes(412)) * 5000)
    assert "the archive is damaged or cut off: " in refusal(tmp_path)


def test_a_name_of_two_megabytes(tmp_path: Path) -> None:
    """It is whole and sound: a header alone may not take so much memory."""
    write(tmp_path / "train-0.tar", sample(1, 0, "k" * 2**21))
    assert "cut off: ReadError: a header of 2097" in refusal(tmp_path)


def test_archives_of_random_damage(tmp_path: Path) -> None:
    path = write(tmp_path / "train-0.tar", [*sample(1, 0), *sample(2, 1, "k" * 120), *sample(3, 1)])
    content = path.read_bytes()
    rng = np.random.default_rng(3)
    refused = 0
    for _ in range(300):
        harmed = bytearray(content)
        for place in rng.integers(0, content.rindex(b"IEND"), 3).tolist():
            harmed[place] = int(rng.integers(256))
        path.write_bytes(harmed)
        try:
            source = build(tmp_path)
            batch = source.read(np.arange(len(source)))
            assert (
                batch["x"].shape == (len(source), *source.shape)
                and 0 <= batch["y"].min() <= batch["y"].max() < source.classes
            )
        except UserError as error:
            refused += 1
            assert str(path) in error.where and error.fix
    assert refused > 100
