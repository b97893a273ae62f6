"""IDX files read strictly, the download by one process, and torchvision beside this torch."""

from __future__ import annotations

import gzip
import os
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from ranks import HANG_S
from waiting import wait_until

from hvdtrain.data.datasets import idx
from hvdtrain.data.files.folders import RequiredFiles, cache_root, data_root, download, locked
from hvdtrain.data.source import Split
from hvdtrain.errors import UserError

PROJECT = Path(__file__).parents[2]
IMAGES = "train-images-idx3-ubyte"
LABELS = "train-labels-idx1-ubyte"
X = np.arange(5 * 4 * 3, dtype=np.uint8).reshape(5, 4, 3)
Y = [3, 0, 9, 3, 1]
IMAGES_FILE = bytes.fromhex("00000803 00000005 00000004 00000003") + X.tobytes()
LABELS_FILE = bytes.fromhex("00000801 00000005") + bytes(Y)


def write(
    folder: Path, images: bytes = IMAGES_FILE, labels: bytes = LABELS_FILE, suffix: str = ""
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{IMAGES}{suffix}").write_bytes(images)
    (folder / f"{LABELS}{suffix}").write_bytes(labels)


def refusal(root: Path, name: str = "fashion_mnist", split: Split = "train") -> str:
    with pytest.raises(UserError) as caught:
        idx.build(name, root, split, download=False)
    return str(caught.value)


@pytest.mark.parametrize("place", ["FashionMNIST/raw", "."])
@pytest.mark.parametrize("packed", [False, True])
def test_reads_images_and_labels(tmp_path: Path, place: str, packed: bool) -> None:
    pack, suffix = (gzip.compress, ".gz") if packed else (bytes, "")
    write(tmp_path / place, pack(IMAGES_FILE), pack(LABELS_FILE), suffix)
    source = idx.build("fashion_mnist", tmp_path, "train", download=False)
    batch = source.read(np.array([4, 0]))
    assert (len(source), source.shape, source.classes) == (5, (4, 3, 1), 10)
    np.testing.assert_array_equal(batch["x"], X[[4, 0], :, :, None])
    assert batch["y"].tolist() == [1, 3] and batch["y"].dtype == np.int64
    # reading makes nothing
    assert set(os.listdir(tmp_path)) <= {
        "FashionMNIST",
        f"{IMAGES}{suffix}",
        f"{LABELS}{suffix}",
    }


def test_each_name_and_split_has_its_own_files(tmp_path: Path) -> None:
    for value, folder in enumerate(["MNIST", "FashionMNIST", "KMNIST"]):
        for start, prefix in enumerate(["train", "t10k"]):
            raw = tmp_path / folder / "raw"
            raw.mkdir(parents=True, exist_ok=True)
            (raw / f"{prefix}-images-idx3-ubyte").write_bytes(
                bytes.fromhex("00000803 00000001 00000001 00000001") + bytes([value])
            )
            (raw / f"{prefix}-labels-idx1-ubyte").write_bytes(
                bytes.fromhex("00000801 00000001") + bytes([start])
            )
    splits: list[Split] = ["train", "val"]
    for value, name in enumerate(["mnist", "fashion_mnist", "kmnist"]):
        for start, split in enumerate(splits):
            batch = idx.build(name, tmp_path, split).read(np.array([0]))
            assert (batch["x"].item(), batch["y"].item()) == (value, start)


HOSTILE = bytes.fromhex("00000803 ffffffff ffffffff ffffffff")
BROKEN = [
    (b"", "found first bytes none, expected 00000803 (unsigned bytes, 3 dimensions)"),
    (b"\0\0\x0d\3" + IMAGES_FILE[4:], "found first bytes 00000d03, expected 00000803"),
    (LABELS_FILE, "found first bytes 00000801, expected 00000803"),
    (IMAGES_FILE[:9], "found a header of 9 bytes, expected 16"),
    (IMAGES_FILE[:-1], "found 75 bytes, expected 76 bytes for the shape (5, 4, 3) in its header"),
    (IMAGES_FILE + b"x", "found 77 bytes, expected 76 bytes for the shape (5, 4, 3)"),
    (HOSTILE + b"x", f"found 17 bytes, expected {16 + (2**32 - 1) ** 3} bytes"),
]


@pytest.mark.parametrize(("images", "text"), BROKEN)
def test_a_broken_file_is_named_with_what_was_found_and_expected(
    tmp_path: Path, images: bytes, text: str
) -> None:
    write(tmp_path, images)
    output = refusal(tmp_path)
    assert "not a valid IDX file" in output and text in output
    assert (
        f"where: {tmp_path / IMAGES}" in output
        and "fix: delete the file and fetch it again" in output
    )


BROKEN_GZIP = [
    (b"no gzip at all", "found an error: Not a gzipped file (b'no'), expected an IDX file in gzip"),
    (
        gzip.compress(IMAGES_FILE, mtime=0)[:-12],
        "found an error: Compressed file ended before the end-of-stream marker",
    ),
    (
        gzip.compress(IMAGES_FILE[:-1], mtime=0),
        "found 75 bytes, expected 76 bytes for the shape (5, 4, 3)",
    ),
    (
        gzip.compress(IMAGES_FILE + bytes(10**7), mtime=0),
        "found more than 76 bytes, expected 76 bytes",
    ),
    (
        gzip.compress(HOSTILE + bytes(10**6), mtime=0),
        f"expected {16 + (2**32 - 1) ** 3} bytes for the shape (4294967295, 4294967295, "
        "4294967295)",
    ),
    (
        gzip.compress(b"\0\0\x08\3" + b"\0\0\x27\x10" * 2 + b"\0\0\0\1" + bytes(10**7), mtime=0),
        "bytes, expected 100000016 bytes for the shape (10000, 10000, 1)",
    ),
]


@pytest.mark.parametrize(("images", "text"), BROKEN_GZIP)
def test_a_broken_gzip_file_is_named_too(tmp_path: Path, images: bytes, text: str) -> None:
    write(tmp_path, images, gzip.compress(LABELS_FILE, mtime=0), ".gz")
    output = refusal(tmp_path)
    assert text in output and f"where: {tmp_path / IMAGES}.gz" in output


def test_a_hostile_header_takes_no_memory(tmp_path: Path) -> None:
    import tracemalloc

    for suffix, images in [
        ("", HOSTILE),
        (".gz", gzip.compress(HOSTILE, mtime=0)),
        (".gz", gzip.compress(HOSTILE + bytes(10**7), mtime=0)),
    ]:
        write(tmp_path / f"x{len(images)}", images, LABELS_FILE, suffix)
        tracemalloc.start()
        assert "not a valid IDX file" in refusal(tmp_path / f"x{len(images)}")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2**22, peak


def test_images_and_labels_must_belong_together(tmp_path: Path) -> None:
    write(tmp_path, labels=bytes.fromhex("00000801 00000004") + bytes(4))
    output = refusal(tmp_path)
    assert (
        "5 images but 4 labels" in output
        and str(tmp_path / IMAGES) in output
        and str(tmp_path / LABELS) in output
    )


def test_a_label_outside_the_classes(tmp_path: Path) -> None:
    write(tmp_path, labels=LABELS_FILE[:-1] + b"\x0a")
    assert "label 10 of sample 4 is outside 0..9" in refusal(tmp_path)


def test_an_unknown_member_of_the_family(tmp_path: Path) -> None:
    assert "one of mnist, fashion_mnist, kmnist" in refusal(tmp_path, "emnist")


def test_missing_files_without_download(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / LABELS).unlink()
    root = tmp_path / "not" / "there"
    output = refusal(root, "kmnist")
    assert "the files of kmnist are missing, and data.download is false" in output
    assert (
        f"where: {root}: KMNIST/raw/{IMAGES}, KMNIST/raw/{LABELS}, "
        "KMNIST/raw/t10k-images-idx3-ubyte" in output
    )
    assert "fix: put them there, from http://codh.rois.ac.jp/kmnist/dataset/kmnist/" in output
    assert not root.exists()  # nothing is made but by a download
    # the images are there
    assert f"where: {tmp_path}: FashionMNIST/raw/{LABELS}, FashionMNIST/raw/t10k" in refusal(
        tmp_path
    )


@pytest.mark.in_turn
def test_without_a_network_the_error_comes_at_once(tmp_path: Path) -> None:
    script = f"""
from pathlib import Path
from hvdtrain.data.datasets import cifar, idx
from hvdtrain.errors import UserError
for plugin, name in ((idx, "mnist"), (cifar, "cifar10")):
    try:
        plugin.build(name, Path({str(tmp_path)!r}), "val")
    except UserError as error:
        print(error)
"""
    nowhere = dict.fromkeys(
        ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9"
    )
    environment = {**os.environ, **nowhere, "no_proxy": "", "NO_PROXY": ""}
    ended = subprocess.run(
        [sys.executable, "-c", script],
        cwd=PROJECT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (
        "the files of mnist are missing, and the download failed: Error downloading "
        "train-images-idx3-ubyte.gz" in ended.stdout
    )
    assert "Connection refused" in ended.stdout
    assert f"where: {tmp_path}: MNIST/raw/{IMAGES}" in ended.stdout
    assert "cifar-10-batches-bin/test_batch.bin" in ended.stdout
    assert (
        f"fix: unpack https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz in {tmp_path}"
        in ended.stdout
    )
    assert f"downloading mnist into {tmp_path}\ndownloading cifar10 into {tmp_path}" in ended.stderr
    assert os.listdir(tmp_path) == [".hvdtrain.lock"]


def test_a_silent_server_ends_the_attempt(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}/"

        def pull(staging: Path) -> None:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
                address
            ) as answer:
                (staging / "a").write_bytes(answer.read())

        with pytest.raises(
            UserError, match="the files of toy are missing, and the download failed: .*timed out"
        ):
            download(RequiredFiles("toy", tmp_path, ["a"], "by hand"), pull, timeout_s=0.3)
    assert socket.getdefaulttimeout() is None


def test_a_download_is_complete_and_replaces_no_existing_file(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b").write_text("mine")
    stale = tmp_path / ".hvdtrain-download"
    stale.mkdir()
    (stale / "a").write_text("half")

    def pull(staging: Path) -> None:
        assert not os.listdir(staging)
        (staging / "deep").mkdir()
        (staging / "deep" / "a").write_text("new")
        (staging / "deep" / "b").write_text("other")
        assert not (tmp_path / "deep" / "a").exists()

    download(RequiredFiles("toy", tmp_path, ["deep/a", "deep/b"], ""), pull)
    assert {file.name: file.read_text() for file in (tmp_path / "deep").iterdir()} == {
        "a": "new",
        "b": "mine",
    }
    assert not stale.exists()


def test_a_failed_download_leaves_nothing(tmp_path: Path) -> None:
    def pull(staging: Path) -> None:
        (staging / "a").write_text("half")
        raise RuntimeError("File not found\nor corrupted.")

    with pytest.raises(
        UserError,
        match=r"the download failed: File not found or corrupted\.\n  where: .*: a\n  fix: by hand",
    ):
        download(RequiredFiles("toy", tmp_path, ["a"], "by hand"), pull)
    assert os.listdir(tmp_path) == [".hvdtrain.lock"]


def test_a_root_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"the download failed: \[Errno 20\] Not a directory"):
        download(RequiredFiles("toy", tmp_path / "file" / "root", ["a"], ""), lambda staging: None)


ONE_OF_MANY = """
import sys, time
from pathlib import Path
from hvdtrain.data.files.folders import RequiredFiles, download
def pull(staging):
    print("pulled")
    while not Path(sys.argv[2]).exists():
        time.sleep(0.02)
    (staging / "a").write_text("whole")
download(RequiredFiles("toy", Path(sys.argv[1]), ["a"], ""), pull)
assert (Path(sys.argv[1]) / "a").read_text() == "whole"
"""


@pytest.mark.in_turn
def test_one_process_downloads_and_the_others_wait(tmp_path: Path) -> None:
    """Which goes on once both others have said that they wait."""
    said = tmp_path / "said"
    both_wait = tmp_path / "both wait"
    command = [sys.executable, "-c", ONE_OF_MANY, str(tmp_path / "data"), str(both_wait)]
    with said.open("a") as stderr:
        running = [
            subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, stderr=stderr, text=True)
            for _ in range(3)
        ]
    words = "waiting for another process on this machine: it downloads toy into"
    try:
        wait_until(
            lambda: said.read_text().count(words) == 2, "two processes that wait for the third"
        )
    finally:
        both_wait.touch()
    output = "".join(process.communicate(timeout=HANG_S)[0] for process in running)
    assert [process.returncode for process in running] == [0, 0, 0], said.read_text()
    assert output == "pulled\n" and said.read_text().count(words) == 2


def test_the_lock_of_a_killed_process_is_released(tmp_path: Path) -> None:
    holder = (
        "import sys, time\nfrom pathlib import Path\nfrom hvdtrain.data.files.folders import "
        "locked\n"
    )
    holder += (
        "with locked(Path(sys.argv[1]), ''):\n    print('held', flush=True)\n    time.sleep(2000)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holder, str(tmp_path)],
        cwd=PROJECT,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        process.kill()
    with locked(tmp_path, "nothing"):
        pass


def test_default_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert data_root(None) == tmp_path / ".cache" / "hvdtrain" / "data"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the standard: to be ignored
    assert cache_root() == tmp_path / ".cache" / "hvdtrain"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert data_root(None) == tmp_path / "x" / "hvdtrain" / "data"
    assert data_root(Path("~/d")) == tmp_path / "d"


def run(script: str, *path: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*path, str(PROJECT)])}
    return subprocess.run(
        [sys.executable, "-c", script],
        cwd=PROJECT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.in_turn
def test_torchvision_imports_beside_this_torch() -> None:
    ended = run("""
from hvdtrain.core.import_torchvision import import_torchvision
first = import_torchvision()
assert import_torchvision() is first
import torch, torchvision as direct
assert direct is first
assert first.models.resnet18(num_classes=7).eval()(torch.zeros(2, 3, 32, 32)).shape == (2, 7)
import hvdtrain.core.import_torchvision
print(len(hvdtrain.core.import_torchvision._libraries) == (0 if direct.extension._has_ops() else 1), direct.datasets.MNIST.__name__)
""")  # noqa: E501
    assert ended.stdout == "True MNIST\n", ended.stderr


def test_a_torchvision_that_imports_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text("sound = True")
    ended = run(
        "from hvdtrain.core import import_torchvision as t\nprint(t.import_torchvision().sound, "
        "t._libraries)",
        str(tmp_path),
    )
    assert ended.stdout == "True []\n", ended.stderr


@pytest.mark.in_turn
def test_a_missing_or_broken_torchvision_is_an_error(tmp_path: Path) -> None:
    asked = "from hvdtrain.core.import_torchvision import import_torchvision; import_torchvision()"
    ended = run(f"import sys; sys.modules['torchvision'] = None; {asked}")
    assert "UserError: torchvision cannot be imported: import of torchvision halted" in ended.stderr
    assert "fix: pip install torchvision" in ended.stderr
    (tmp_path / "torchvision").mkdir()
    ended = run(
        f"""
import sys
from hvdtrain.errors import UserError
from hvdtrain.core.import_torchvision import import_torchvision
sys.dont_write_bytecode = True
for text in ("compiled with other CUDA", "operator torchvision::nms does not exist"):
    with open({str(tmp_path / "torchvision" / "__init__.py")!r}, "w") as module:
        module.write(f"raise RuntimeError({{text!r}})")
    try:
        import_torchvision()
    except UserError as error:
        print(error)
""",
        str(tmp_path),
    )
    assert ended.stdout.count("torchvision does not import beside torch ") == 2, ended.stderr
    assert ": compiled with other CUDA\n" in ended.stdout
    # still, after the correction
    assert ": operator torchvision::nms does not exist\n" in ended.stdout
    assert "fix: install the torchvision release that belongs to this torch" in ended.stdout
