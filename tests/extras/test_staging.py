"""data.stage: what is copied, what a second start reads again, what a killed copy leaves, and that
training gives the same numbers."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
from ranks import HANG_S, environment, mpirun, needs_mpirun, python

from hvdtrain.config.read import configure
from hvdtrain.data.datasets import digits, idx
from hvdtrain.data.files.selection import FileSelection, FileState
from hvdtrain.errors import UserError
from hvdtrain.extras.staging.copying import format_bytes, list_files
from hvdtrain.extras.staging.staged import StagedCopy, ensure_staged, stage_data
from hvdtrain.training.datasets import build_source

WHERE = "data.stage, command line"


@pytest.fixture(autouse=True)
def a_new_process() -> None:
    ensure_staged.cache_clear()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """40 files of 1 to 40 kB in two levels, and a hidden one."""
    for number in range(40):
        path = tmp_path / "source" / f"part{number % 4}" / f"file {number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(np.random.default_rng(number).bytes(1000 * (number + 1)))
        os.utime(path, ns=(0, 1_600_000_000_123_456_789 + number))
    (tmp_path / "source/.hidden").touch()
    (tmp_path / "disk").mkdir()
    return tmp_path / "source"


def stage(root: Path) -> Path:
    """The folder of the copy, as the next start of a job stages it."""
    ensure_staged.cache_clear()
    found, _ = stage_data("other", root, {}, str(root.parent / "disk"), WHERE)
    assert found is not None
    return found


def same(one: Path, two: Path) -> bool:
    files = list_files(one, [FileSelection("", recursive=True)])
    return files == list_files(two, [FileSelection("", recursive=True)]) and all(
        (one / path).read_bytes() == (two / path).read_bytes() for path in files
    )


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err


def test_a_copy_is_complete_and_later_starts_copy_nothing(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = stage(root)
    output = printed(capsys)
    assert "staged 40 files, 820 kB in " in output and f"/s) from {root} to {there}\n" in output
    assert same(root, there)
    assert stat.S_IMODE(there.parent.parent.stat().st_mode) == 0o700
    assert [path.name for path in there.parent.parent.iterdir()] == [there.parent.name]
    assert there.parent.name.startswith("other-")
    before = {path: path.stat().st_ino for path in there.rglob("file*")}
    assert stage(root) == there
    assert printed(capsys) == ""
    # nothing was written anew
    assert before == {path: path.stat().st_ino for path in there.rglob("file*")}


def test_changes_of_the_source_are_copied(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = stage(root)
    (root / "part0/file 0").write_bytes(b"new")
    os.utime(root / "part1/file 1", ns=(0, 5))
    (root / "part2/file 2").unlink()
    shutil.rmtree(root / "part3")
    (root / "part3").write_bytes(b"was a folder")
    printed(capsys)
    assert stage(root) == there
    assert (
        "staged 3 files" in (output := printed(capsys)) and "; 27 more were already there" in output
    )
    assert same(root, there)
    assert (there / "part3").is_file()


def flip(path: Path) -> None:
    """One bit, and the times as they were: only the checksum shows it."""
    seen = path.stat()
    content = bytearray(path.read_bytes())
    content[500] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns))


def test_a_flipped_bit_of_the_copy_is_noticed(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = stage(root)
    flip(there / "part1/file 5")
    (there / "part2/file 6").touch()  # another time, the same bytes: read again, and kept
    (there / "part3/file 7").unlink()
    printed(capsys)
    stage(root)
    output = printed(capsys)
    assert (
        "2 staged files differ from what was copied, and are copied again: part1/file 5, ...\n"
        in output
    )
    assert "staged 2 files, 14.0 kB in " in output and "; 38 more were already there" in output
    assert (there / "part1/file 5").read_bytes() == (root / "part1/file 5").read_bytes()
    assert stage(root) == there and printed(capsys) == ""


def test_after_a_restart_of_the_machine_every_copy_is_read_again(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = stage(root)
    printed(capsys)
    lines = (there.parent / "manifest.jsonl").read_bytes().splitlines(keepends=True)
    (there.parent / "manifest.jsonl").write_bytes(b"".join([b"another start\n", *lines[1:]]))
    stage(root)
    assert "40 staged files are intact, 40 of them were read again" in printed(capsys)
    assert stage(root) == there and printed(capsys) == ""


def test_unreadable_lines_of_the_manifest_cost_their_files_alone(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = stage(root)
    manifest = there.parent / "manifest.jsonl"
    manifest.write_bytes(manifest.read_bytes()[:-20])
    printed(capsys)
    stage(root)
    assert (
        "staged 1 files" in (output := printed(capsys)) and "; 39 more were already there" in output
    )
    assert same(root, there)
    manifest.write_bytes(b'\xff{"\n[1,2\n["part0/file 0",null]\n{}\n')
    stage(root)
    assert "staged 40 files" in printed(capsys)
    assert same(root, there)


KILLED_AT_FILE_30 = """
import os, signal
opened = []

def watch(event, arguments):
    if event == "open" and str(arguments[0]).startswith(sys.argv[1] + "/part"):
        opened.append(arguments[0])
        if len(opened) == 30:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(watch)
"""


def start(root: Path, first: str = "", **env: str) -> subprocess.Popen[str]:
    """first: code that runs before the files are copied."""
    code = (
        "import sys; from pathlib import Path; from hvdtrain.data.files.staging import stage_data\n"
    )
    code += (
        first + "print(stage_data('other', Path(sys.argv[1]), {}, sys.argv[2], 'data.stage')[0])"
    )
    command = [sys.executable, "-c", code, str(root), str(root.parent / "disk")]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(env)
    )


def test_four_processes_at_once_make_one_copy(root: Path) -> None:
    ended = [
        (process, process.communicate(timeout=HANG_S))
        for process in [start(root) for _ in range(4)]
    ]
    assert [process.returncode for process, _ in ended] == [0] * 4, ended
    assert len({out for _, (out, _) in ended}) == 1
    assert "".join(err for _, (_, err) in ended).count("staged 40 files") == 1
    assert same(root, Path(ended[0][1][0].strip()))


def test_a_killed_copy_is_completed_by_the_next_start(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    process = start(root, KILLED_AT_FILE_30)
    process.communicate(timeout=HANG_S)
    (manifest,) = (root.parent / "disk").glob("*/*/manifest.jsonl")
    lines = [json.loads(line) for line in manifest.read_bytes().splitlines()[1:]]
    assert process.returncode == -signal.SIGKILL and 0 < len(lines) < 30
    files = manifest.parent / "files"
    before = {line[0]: (files / line[0]).stat().st_ino for line in lines}
    there = stage(root)
    output = printed(capsys)
    assert (
        f"staged {40 - len(lines)} files" in output
        and f"; {len(lines)} more were already there" in output
    )
    assert before == {path: (there / path).stat().st_ino for path in before}
    assert same(root, there)
    assert not (there.parent / "partial").exists()


def test_links_in_the_source(root: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(b"outside")
    (root / "link").symlink_to(tmp_path / "elsewhere")
    there = stage(root)
    assert (there / "link").read_bytes() == b"outside" and not (there / "link").is_symlink()
    (root / "part0/up").symlink_to(root)
    with pytest.raises(
        UserError, match="a link leads back to a folder above it\n  where: .*part0/up"
    ):
        stage(root)
    (root / "part0/up").unlink()
    (root / "gone").symlink_to("nowhere")
    with pytest.raises(UserError, match="a link to a file that does not exist\n  where: .*/gone"):
        stage(root)
    (root / "gone").unlink()
    os.mkfifo(root / "pipe")
    with pytest.raises(
        UserError, match="not a regular file, but a pipe, a socket or a device\n  where: .*/pipe"
    ):
        stage(root)


def test_too_little_space_is_reported_in_numbers(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sum(-(-1000 * size // 4096) for size in range(1, 41)) * 4096 == 901_120
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 300_000))
    with pytest.raises(
        UserError,
        match=r"no space for the data on .*: 40 files take 901 kB, 300 kB are free\n  where: "
        r"data.stage, .*\n  fix: a larger",
    ):
        stage(root)


def test_a_full_quota_ends_the_copy(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:  # file systems report a quota when data are written back
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "fdatasync", full)
    with pytest.raises(
        UserError,
        match="ran out of space for the data: Disk quota exceeded\n  where: .*/files\n  fix: a "
        "larger data.stage",
    ):
        stage(root)


def test_a_disk_that_stores_other_bytes_is_noticed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def corrupt(
        descriptor: int, *_: int
    ) -> None:  # called once all is written, before it is read back
        os.pwrite(descriptor, b"\0\1\2\3", 100)

    monkeypatch.setattr(os, "posix_fadvise", corrupt)
    with pytest.raises(
        UserError,
        match="cannot be copied: the copy read back from the disk differs from what was written\n "
        " where: .*part",
    ):
        stage(root)


def test_a_file_that_changes_while_it_is_copied(root: Path, tmp_path: Path) -> None:
    target = tmp_path / "disk" / "copy"
    target.mkdir()
    # its state when the source was listed: now it has 1000 bytes
    listed = {"part0/file 0": FileState(999, 1)}
    with pytest.raises(UserError, match="changed while it was copied\n  where: .*part0/file 0"):
        StagedCopy(root, target).update(listed)
    assert not (target / "files/part0").exists()


def test_stage_folders_that_cannot_be_used(root: Path, tmp_path: Path) -> None:
    disk = str(tmp_path / "disk")
    own = tmp_path / "disk" / f"hvdtrain-{os.geteuid()}"
    for folder, says in {
        str(tmp_path / "no/such"): "cannot stage data on .*: .*No such file",
        "": r"data.stage is empty\n.*\n  fix: a folder on a disk of each node .is the variable "
        r"set here.., or data.stage=null",
        "$TMPDIR/x": r"contains a variable that the shell has not expanded: \$TMPDIR/x\n.*\n  "
        r"fix: data.stage=\$TMPDIR, without quotes",
        str(root / "part0"): "is inside the folder of the data",
        "~nobodyhere/x": "cannot find the folder ~nobodyhere/x",
    }.items():
        with pytest.raises(UserError, match=says):
            stage_data("other", root, {}, folder, WHERE)
    own.symlink_to(tmp_path)
    with pytest.raises(
        UserError,
        match="others could change the data\n  where: data.stage, command line\n  fix: remove it",
    ):
        stage_data("other", root, {}, disk, WHERE)
    own.unlink()
    own.mkdir()
    own.chmod(0o777)
    with pytest.raises(UserError, match="mode drwxrwxrwx: others could change the data"):
        stage_data("other", root, {}, disk, WHERE)
    own.chmod(0o700)
    if os.geteuid() == 0:
        os.chown(own, 12345, 12345)
        with pytest.raises(UserError, match="belongs to user 12345"):
            stage_data("other", root, {}, disk, WHERE)
    with pytest.raises(UserError, match="digits has no files to stage"):
        stage_data("digits", None, {}, disk, WHERE, digits.STAGING)


def idx_root(folder: Path, labels: int = 64) -> Path:
    """64 training and 16 validation images of noise, and files of other data sets beside them."""
    raw = folder / "FashionMNIST/raw"
    raw.mkdir(parents=True)
    rng = np.random.default_rng(4)
    for part, count in (("train", labels), ("t10k", 16)):
        size = count.to_bytes(4, "big").hex()
        (raw / f"{part}-images-idx3-ubyte").write_bytes(
            bytes.fromhex(f"00000803 {size} 0000001c 0000001c") + rng.bytes(count * 784)
        )
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(
            bytes.fromhex(f"00000801 {size}") + bytes(rng.integers(0, 10, count, np.uint8))
        )
    (folder / "KMNIST").mkdir()
    (folder / "KMNIST/large").write_bytes(b"x" * 1000)
    return folder


def build(overrides: list[str]) -> tuple[np.ndarray, np.ndarray]:
    sources = [build_source(configure(None, overrides), split) for split in ("train", "val")]  # type: ignore[arg-type]
    read = [source.read(np.arange(len(source))) for source in sources]
    return np.concatenate([one["x"] for one in read]), np.concatenate([one["y"] for one in read])


def cifar_root(folder: Path) -> Path:
    rng = np.random.default_rng(5)
    (folder / "cifar-10-batches-bin").mkdir(parents=True)
    for name in [*(f"data_batch_{part}" for part in range(1, 6)), "test_batch"]:
        records = rng.integers(0, 256, (3, 3073), np.uint8)
        records[:, 0] %= 10
        (folder / "cifar-10-batches-bin" / f"{name}.bin").write_bytes(records.tobytes())
    return folder


def folder_root(folder: Path) -> Path:
    from PIL import Image

    rng = np.random.default_rng(6)
    for split in ("train", "validation", "test"):
        for number in range(6):
            path = folder / split / f"class{number % 2}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (4, 4, 3), np.uint8)).save(path)
    return folder


@pytest.mark.parametrize(
    ("name", "make", "files"),
    [("fashion_mnist", idx_root, 4), ("cifar10", cifar_root, 6), ("folder", folder_root, 12)],
)
def test_each_data_set_is_the_same_read_from_the_stage(
    name: str,
    make: object,
    files: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = make(tmp_path / "source")  # type: ignore[operator]
    overrides = [
        f"data.name={name}",
        f"data.root={root}",
        *["data.download=false"] * (name != "folder"),
    ]
    plain = build(overrides)
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    staged = build([*overrides, f"data.stage={tmp_path / 'disk'}"])
    assert f"staged {files} files" in printed(capsys)
    assert all((one == two).all() for one, two in zip(plain, staged, strict=True))
    assert not (
        tmp_path / "cache"
    ).exists()  # the decoded pictures of a folder lie in the stage, too
    root.rename(tmp_path / "away")
    if name != "folder":
        with pytest.raises(
            UserError,
            match="the files of .* are missing, and data.download is false\n  where: .*/source",
        ):
            ensure_staged.cache_clear()
            build([*overrides, f"data.stage={tmp_path / 'disk'}"])


def test_a_download_goes_to_the_stage(tmp_path: Path) -> None:
    root, options = stage_data("mnist", tmp_path / "none", {}, str(tmp_path), WHERE, idx.STAGING)
    assert root == tmp_path / f"hvdtrain-{os.geteuid()}" / "download" and options == {}


def test_format_bytes() -> None:
    assert [format_bytes(size) for size in (7, 1000, 99_900, 390e6, 1.25e9, 2e12)] == [
        "7 bytes",
        "1.0 kB",
        "99.9 kB",
        "390 MB",
        "1.2 GB",
        "2.0 TB",
    ]


@pytest.mark.in_turn
@needs_mpirun
def test_training_from_the_stage_gives_the_same_numbers(tmp_path: Path) -> None:
    root = idx_root(tmp_path / "source")
    overrides = [
        "-m",
        "hvdtrain",
        "data.name=fashion_mnist",
        f"data.root={root}",
        "framework=numpy",
        "model.name=linear",
        "batch.size=8",
    ]
    overrides += ["max_steps=10", "log.every_steps=5", "data.download=false"]
    alone = python([*overrides, f"run={tmp_path}/alone"])
    two = mpirun(
        2, [*overrides, f"run={tmp_path}/two", f"data.stage={tmp_path}", "comm.engine=mpi"]
    )
    one = python([*overrides, f"run={tmp_path}/one", f"data.stage={tmp_path}"])
    assert [ended.returncode for ended in (alone, two, one)] == [0, 0, 0], (
        alone.stderr + two.stderr + one.stderr
    )
    assert two.stderr.count("staged 4 files") == 1 and "staged" not in one.stderr
    digests, losses = zip(
        *(results(tmp_path / name) for name in ("alone", "one", "two")), strict=True
    )
    assert digests[0] and digests[0] == digests[1] and losses[0] and losses[0] == losses[1]
    np.testing.assert_allclose(losses[2], losses[0], rtol=1e-6)


def results(run: Path) -> tuple[bytes, list[float]]:
    """(the last weights, the losses of the steps)"""
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    newest = max((run / "checkpoints").glob("step-*"))
    return b"".join(path.read_bytes() for path in sorted(newest.glob("*.safetensors"))), [
        e["loss"] for e in events if "loss" in e
    ]
