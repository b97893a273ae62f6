"""Checkpoints: what is written, read back and kept, and the messages about damaged ones."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from hvdtrain.config.read import configure
from hvdtrain.core.arrays import Arrays
from hvdtrain.core.progress import Progress
from hvdtrain.errors import UserError
from hvdtrain.recipe.plateau import Plateau
from hvdtrain.training.checkpoint import array_file, files, prune, resume, room
from hvdtrain.training.checkpoint.array_file import HEADER_BYTES
from hvdtrain.training.checkpoint.files import Damaged
from hvdtrain.training.data_facts import identity
from hvdtrain.training.datasets import open_datasets
from hvdtrain.training.progress.train_state import Reached, TrainState

IDENTITY = {
    "seed": 5,
    "data": {"samples": 10, "shape": [1, 2, 3], "classes": 4, "mean": [0.5], "labels": "0f"},
}
FILES = ["SHA256SUMS", "optimizer.safetensors", "progress.json", "weights.safetensors"]
ROOM = 2**20
KINDS = ("p", ""), ("s", ".0"), ("s", ".1")  # of arrays: a parameter, and its two moments


def arrays(value: float = 1.5) -> Arrays:
    return {
        "p.w": np.full((2, 3), value, np.float32),
        "b.count": np.array(7, np.int64),
        "s.w.0": np.arange(6, dtype=np.float64).reshape(2, 3),
    }


def train_state(step: int, **more: object) -> TrainState:
    there = TrainState(
        Progress(dataset=10, total=30, step=step, samples=4 * step),
        seconds=2.5,
        epoch=1,
        evaluated=2,
        epoch_s=0.1,
        sums={"loss": 1 / 3, "right": 5.0, "count": 8.0},
        at_target=1,
        target=0.9,
        last=0.95,
        nonfinite=3,
        lr=0.1,
        batch=4,
        noise=(0.1, 1e-300),
    )
    return replace(there, **more)  # type: ignore[arg-type]


def save(run: Path, step: int, value: float = 1.5, **more: object) -> Path:
    return files.write(run, train_state(step, **more), arrays(value), IDENTITY)


def read(folder: Path) -> Arrays:
    files.read_numbers(folder)
    return files.read_arrays(folder, ROOM)


def test_what_is_written_is_read_back_to_the_last_bit(tmp_path: Path) -> None:
    folder = save(tmp_path, 3)
    assert folder == tmp_path / "checkpoints" / "step-00000003"
    assert sorted(path.name for path in folder.iterdir()) == FILES
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000003"]
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1, (
        "all of them as the umask says"
    )
    held = {
        name.partition(".")[0]: {*load_file(folder / name)}
        for name in FILES
        if name.endswith("safetensors")
    }
    assert held == {"weights": {"p.w", "b.count"}, "optimizer": {"s.w.0"}}
    found = files.read_numbers(folder)
    # a nan is equal to none
    assert repr(found) == repr(type(found)(folder, train_state(3), IDENTITY, {}))
    again = read(folder)
    assert again.keys() == arrays().keys()
    for name, array in arrays().items():
        np.testing.assert_array_equal(again[name], array)
        assert (again[name].dtype, again[name].shape) == (array.dtype, array.shape)


def test_files_and_folders_are_on_the_disk_before_and_after_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calls of a write by which it survives a loss of power; of a later one those without the
    folders that are there."""
    calls: list[str] = []
    fsync = os.fsync
    rename = os.rename

    def path_of(handle: int) -> str:
        path = os.path.relpath(os.readlink(f"/proc/self/fd/{handle}"), tmp_path)
        return re.sub(r"\.[0-9a-f]{16}\.", ".*.", path)

    def recorded_fsync(handle: int) -> None:
        calls.append(f"fsync {path_of(handle)}")
        fsync(handle)

    def recorded_rename(old: str, new: str, **folders: int) -> None:
        if not new.startswith("."):  # of what is removed
            calls.append(f"rename to {new}")
        rename(old, new, **folders)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "rename", recorded_rename)
    run = tmp_path / "run"
    unfinished = "run/checkpoints/.step-0000000{}.*.unfinished"
    run.mkdir()
    for step, folders in ((1, ["fsync run", "fsync ."]), (2, [])):
        calls.clear()
        save(run, step)
        new = unfinished.format(step)
        contents = [
            f"fsync {new}/{name}"
            for name in (
                "weights.safetensors",
                "optimizer.safetensors",
                "progress.json",
                "SHA256SUMS",
            )
        ]
        assert calls == [
            *folders,
            *contents,
            f"fsync {new}",
            f"rename to step-0000000{step}",
            "fsync run/checkpoints",
        ]


def test_two_writers_of_one_step_never_mix_their_files(tmp_path: Path) -> None:
    """50 rounds of two threads: what is there is wholly one writer's; a write may fail, and says
    so."""
    failed = []

    def write(value: int) -> None:
        try:
            files.write(tmp_path, train_state(3, nonfinite=value), arrays(value), IDENTITY)
        except OSError as error:
            failed.append(error)

    for number in range(0, 100, 2):
        writers = [threading.Thread(target=write, args=(number + one,)) for one in range(2)]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
        (folder,) = files.finished(tmp_path)
        value = files.read_numbers(folder).train_state.nonfinite
        np.testing.assert_array_equal(read(folder)["p.w"], np.full((2, 3), value))
    assert len(failed) <= 50, "of two writers one succeeds"


def test_no_accuracy_yet_is_no_number(tmp_path: Path) -> None:
    folder = save(tmp_path, 3, last=math.nan, target=None)
    assert '"last": null' in (folder / "progress.json").read_text()
    assert math.isnan(files.read_numbers(folder).train_state.last)


def test_a_metric_of_infinity_is_written_and_read_back(tmp_path: Path) -> None:
    """As words, in sums and in what the rate's rule keeps too; the best checkpoint is known by
    it."""
    numbers = {"to_beat": -math.inf, "last": math.inf, "best": math.inf, "evaluated": 3}
    sums = {
        "loss": 0.5,
        "m_sum": math.inf,
        "m_count": math.nan,
        "rows": (1.0, -math.inf, math.nan),
        "count": 8.0,
    }
    reached = (Reached(0.5, math.inf, 1.0, 1.0, 8, None),)
    folder = save(
        tmp_path, 3, **numbers, sums=sums, reached=reached, plateau=Plateau(0.5, math.inf, 1, 0)
    )
    assert '"last": "inf"' in (folder / "progress.json").read_text()
    found = files.read_numbers(folder).train_state
    assert {name: getattr(found, name) for name in numbers} == numbers and found.plateau == Plateau(
        0.5, math.inf, 1, 0
    )
    assert found.reached == reached and found.sums.keys() == sums.keys()
    for name, value in sums.items():
        np.testing.assert_array_equal(found.sums[name], value)
    assert prune.best([save(tmp_path, 2, evaluated=2), folder], 1) == [folder]


def test_sha256sum_checks_it_too(tmp_path: Path) -> None:
    folder = save(tmp_path, 3)
    done = subprocess.run(
        ["sha256sum", "-c", "SHA256SUMS"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"{name}: OK" for name in ("weights.safetensors", "optimizer.safetensors", "progress.json")
    ]


def test_the_newest_and_the_best_stay(tmp_path: Path) -> None:
    """Accuracies 0.5, 0.7, 0.7 of evaluations at steps 1 to 3; step 4 was not evaluated, though it
    names the last accuracy."""
    for step, accuracy, evaluated in (
        (1, 0.5, 1),
        (2, 0.7, 2),
        (3, 0.7, 3),
        (4, 0.7, 3),
        (5, 0.6, 5),
        (6, 0.1, 6),
    ):
        folder = save(tmp_path, step, last=accuracy, evaluated=evaluated)
        prune.prune(tmp_path, 2, 1, folder)
    assert [path.name for path in files.finished(tmp_path)] == [
        "step-00000002",
        "step-00000005",
        "step-00000006",
    ]


def test_evaluations_of_other_samples_are_not_compared(tmp_path: Path) -> None:
    """Of 10 samples at steps 1 and 2, of 7 from step 3 on; step 2 was the best of its own."""
    beginning = replace(train_state(0), evaluates=7)
    config = configure(None, ["stop.target=0.9"])
    for evaluates, best in ((10, math.nan), (7, 0.95), (0, 0.95)):  # 0: of an older checkpoint
        save(tmp_path, 2, evaluates=evaluates, best=0.95, best_epoch=1)
        point, _ = resume.find_resume_point(
            tmp_path, config, IDENTITY, beginning, resume.Reading(ROOM)
        )
        found = point.train_state
        reset = math.isnan(best)
        assert (found.best, found.last) == pytest.approx((best, best), nan_ok=True)
        assert (found.evaluates, found.best_epoch, found.at_target) == (
            7,
            0 if reset else 1,
            0 if reset else 1,
        )
        assert (
            "evaluations are of 7 samples, and were of 10: the best one and stop.patience start "
            "over" in point.notes
        ) == reset
        files.remove(tmp_path / "checkpoints" / "step-00000002")
    save(tmp_path, 2, evaluates=7, best=0.95, best_epoch=1, views=6)
    point, _ = resume.find_resume_point(tmp_path, config, IDENTITY, beginning, resume.Reading(ROOM))
    assert math.isnan(point.train_state.best) and point.train_state.views == 1
    assert (
        "evaluations are of 1 view of each sample, and were of 6: the best one and stop.patience "
        "start over" in point.notes
    )
    files.remove(tmp_path / "checkpoints" / "step-00000002")
    for step, accuracy, evaluates in (
        (1, 0.5, 10),
        (2, 0.9, 10),
        (3, 0.7, 7),
        (4, 0.6, 7),
        (5, 0.5, 7),
    ):
        folder = save(tmp_path, step, last=accuracy, evaluated=step, evaluates=evaluates)
        prune.prune(tmp_path, 1, 1, folder)
    assert [path.name for path in files.finished(tmp_path)] == ["step-00000003", "step-00000005"]


def test_the_checkpoint_just_written_stays_beside_newer_damaged_ones(tmp_path: Path) -> None:
    for step in (8, 9):
        (save(tmp_path, step) / "SHA256SUMS").unlink()
    save(tmp_path, 4)
    folder = save(tmp_path, 5)
    prune.prune(tmp_path, 2, 0, folder)
    assert [path.name[-1] for path in files.finished(tmp_path)] == ["4", "5", "8", "9"], (
        "damaged ones do not count"
    )
    prune.prune(tmp_path, 1, 0, folder)
    assert folder.exists()
    found, _, notes = resume.newest_good(tmp_path, ROOM)
    assert found.folder == folder
    assert notes == [
        f"damaged step-0000000{n} is skipped: SHA256SUMS: No such file or directory" for n in (9, 8)
    ]


def test_a_full_disk_costs_the_oldest_first_the_best_last_and_never_the_newest_good_one(
    tmp_path: Path,
) -> None:
    for step, accuracy in ((1, 0.5), (2, 0.9), (3, 0.7), (4, 0.6), (5, 0.6)):
        save(tmp_path, step, last=accuracy, evaluated=step)
    (tmp_path / "checkpoints" / "step-00000005" / "SHA256SUMS").unlink()
    assert room.give_up_one(tmp_path, 10**18, 1, ROOM) is None, (
        "all of them together are not enough: none is lost in vain"
    )
    assert len(files.finished(tmp_path)) == 5
    assert [room.give_up_one(tmp_path, 100, 1, ROOM) for _ in range(4)] == [1, 3, 2, None]
    assert [path.name[-1] for path in files.finished(tmp_path)] == ["4", "5"]


def test_leftovers_of_a_write_that_was_cut_off_are_removed(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / ".step-00000009.unfinished").mkdir(parents=True)
    folder = save(tmp_path, 1)
    assert files.finished(tmp_path) == [folder]
    prune.prune(tmp_path, 2, 0, folder)
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000001"]


def test_a_damaged_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    (save(tmp_path, 3) / "optimizer.safetensors").unlink()
    assert read(save(tmp_path, 3, 2.5))["p.w"][0, 0] == 2.5


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no checkpoint in"):
        resume.newest_good(tmp_path, ROOM)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["missing", "cut", "garbage", "empty", "flipped", "folder"])
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_used(
    tmp_path: Path, name: str, damage: str
) -> None:
    good = save(tmp_path, 2)
    path = save(tmp_path, 3) / name
    whole = path.read_bytes()
    path.unlink()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 4
    if damage == "folder":
        path.mkdir()
    elif damage != "missing":
        garbage = b"\x80\x04cposix\nsystem\n" * 9
        path.write_bytes(
            {
                "cut": whole[: len(whole) // 2],
                "garbage": garbage,
                "empty": b"",
                "flipped": bytes(flipped),
            }[damage]
        )
    with pytest.raises(Damaged, match="the checkpoint is damaged: ") as caught:
        read(path.parent)
    assert caught.value.where == str(path.parent)
    found, _, notes = resume.newest_good(tmp_path, ROOM)
    assert found.folder == good
    assert len(notes) == 1
    assert notes[0].startswith("damaged step-00000003 is skipped: "), notes
    if damage in ("missing", "folder"):
        assert name in notes[0]
    (good / "optimizer.safetensors").write_bytes(b"")
    with pytest.raises(
        UserError, match="no checkpoint of .* is good: damaged step-00000003 is skipped"
    ):
        resume.newest_good(tmp_path, ROOM)


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    folder = save(tmp_path, 3)
    random = np.random.default_rng(1)
    for name in FILES:
        whole = (folder / name).read_bytes()
        for bit in random.choice(8 * len(whole), 40, replace=False):
            flipped = bytearray(whole)
            flipped[bit // 8] ^= 1 << bit % 8
            (folder / name).write_bytes(bytes(flipped))
            with pytest.raises(Damaged):
                read(folder)
        (folder / name).write_bytes(whole)
    read(folder)


def test_a_file_too_large_for_the_model_is_not_read(tmp_path: Path) -> None:
    folder = save(tmp_path, 3)
    with (folder / "weights.safetensors").open("r+b") as file:
        file.truncate(1 << 40)  # a terabyte of nothing, on paper
    with pytest.raises(
        Damaged,
        match="weights.safetensors: it has 1099511627776 bytes, but this model and optimizer "
        "have at most 1048576",
    ):
        read(folder)


@pytest.mark.in_turn
def test_a_checkpoint_of_many_arrays_is_read_back(tmp_path: Path) -> None:
    """45,000 parameters with the state of Adam: a header of 10 MB; safetensors reads 100."""
    names = [f"transformer.layers.{n}.attention.weight" for n in range(45000)]
    many = {
        f"{kind}.{name}{state}": np.full((1, 2), n, np.float32)
        for n, name in enumerate(names)
        for kind, state in KINDS
    }
    folder = files.write(
        tmp_path, train_state(3), many, IDENTITY, {f"p.{name}": f"model.{name}" for name in names}
    )
    assert files.read_numbers(folder).names["p." + names[7]] == "model." + names[7]
    assert (folder / "optimizer.safetensors").stat().st_size > 2**23
    found = files.read_arrays(
        folder, 2**20 + 8 * sum(array.nbytes + HEADER_BYTES for array in many.values())
    )
    assert found.keys() == many.keys() and found["s." + names[-1] + ".1"].tolist() == [
        [44999.0, 44999.0]
    ]


def test_what_no_reader_takes_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(array_file, "MOST_HEADER_BYTES", 100)
    with pytest.raises(
        ValueError,
        match=r"the header has \d+ bytes for 2 arrays, but safetensors reads at most "
        "100",
    ):
        save(tmp_path, 3)
    assert files.finished(tmp_path) == [] and os.listdir(tmp_path / "checkpoints") == []


def rewrite(folder: Path, change: dict) -> None:
    """Changes progress.json and its checksum: a file that was made like this on purpose."""
    path = folder / "progress.json"
    tree = json.loads(path.read_text())
    for key, value in change.items():
        *parents, last = key.split(".")
        node = tree
        for parent in parents:
            node = node[parent]
        node[last] = value
    path.write_text(json.dumps(tree))
    sums = [
        f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n"
        for name in (*files.ARRAYS, "progress.json")
    ]
    (folder / "SHA256SUMS").write_text("".join(sums))


def test_another_format_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path, 3)
    rewrite(folder, {"format": 99})
    with pytest.raises(Damaged, match="format 99, this version reads 4"):
        read(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("progress.step", "abc"),
        ("progress.samples", None),
        ("progress.samples", -64),
        ("progress.samples", 2**63),
        ("progress.dataset", 0),
        ("progress.total", 1.5),
        ("at_target", float("inf")),
        ("evaluated", True),
        ("seconds", "x"),
        ("seconds", -1.0),
        ("seconds", 1e12),
        ("epoch_s", -1e-3),
        ("evaluated_s", -1.0),
        ("trained_s", -1.0),
        ("progress.step", 2**62),
        ("progress.step", 13),  # of 12 samples
        ("progress.samples", 2**53),
        ("last", float("nan")),
        ("sums", {}),
        ("sums.loss", float("inf")),
        ("sums.loss", "infinite"),
        ("seconds", "inf"),
        ("noise", [1]),
        ("noise", 1),
        ("noise", [1, 2, 3]),
        ("progress", 3),
    ],
)
def test_numbers_that_cannot_be_are_refused(tmp_path: Path, key: str, value: object) -> None:
    folder = save(tmp_path, 3)
    rewrite(folder, {f"train_state.{key}": value})
    with pytest.raises(Damaged, match="the checkpoint is damaged: progress.json: "):
        read(folder)


ODD_TREES = [
    "[]",
    "3",
    "{}",
    '{"format": 3}',
    '{"format": 3, "identity": 3, "names": {}, "train_state": {}}',
    "[" * 100000,
]


@pytest.mark.parametrize("text", ODD_TREES)
def test_another_shape_of_json_is_refused(tmp_path: Path, text: str) -> None:
    folder = save(tmp_path, 3)
    (folder / "progress.json").write_text(text)
    with pytest.raises(Damaged, match="the checkpoint is damaged: progress.json: "):
        read(folder)


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("data.samples", 11, "another data.samples: 10, but this job has 11"),
        ("data.mean", [0.25], r"another data.mean: \[0.5\], but this job has \[0.25\]"),
        ("data.labels", "1e", "another data.labels: '0f', but this job has '1e'"),
        ("data.shuffle", "feistel-1", "another data.shuffle: None, but this job has 'feistel-1'"),
        ("seed", 6, "another seed: 5, but this job has 6"),
    ],
)
def test_another_job_is_refused(tmp_path: Path, key: str, value: object, what: str) -> None:
    found = files.read_numbers(save(tmp_path, 3))
    resume.check_identity(found, IDENTITY)
    section, _, name = key.rpartition(".")
    mine = IDENTITY | ({section: IDENTITY[section] | {name: value}} if section else {name: value})
    with pytest.raises(UserError, match=f"the checkpoint has {what}"):
        resume.check_identity(found, mine)


@pytest.mark.parametrize(("samples", "version"), [(2**24, None), (2**24 + 1, "feistel-1")])
def test_a_checkpoint_names_the_shuffle_of_a_large_set(samples: int, version: str | None) -> None:
    config = configure(
        None, ["data.name=synthetic", f"data.samples={samples}", "data.shape=[2,2,1]"]
    )
    assert identity(config, open_datasets(config))["data"].get("shuffle") == version
