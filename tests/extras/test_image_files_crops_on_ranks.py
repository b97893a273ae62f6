"""Random resized crops of whole images: two ranks train what one process does, also after a resume
on another number of ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from ranks import mpirun, needs_mpirun
from safetensors.numpy import load_file
from small_images import save

from hvdtrain.__main__ import main
from hvdtrain.records.run import read_run

# of 13 images in steps of 5, over ranks and epochs unevenly
STOP = 5
END = 12
EPOCH = 13
WORDS = [
    "data.name=folder",
    "data.size=8",
    "data.packed=false",
    "augment.resized_crop=0.2",
    "augment.flip=true",
    "seed=3",
]
WORDS += [
    "model.name=mlp",
    "model.widths=[6]",
    "speed.precision=fp64",
    "batch.size=5",
    "optim.base_lr=0.02",
    "epochs=null",
]
WORDS += ["log.every_steps=1", "guard.equal_steps=1"]


def images(root: Path) -> None:
    """Of all sizes, so that each has boxes of its own, some of them decoded at reduced scale."""
    numbers = np.random.default_rng(0)
    for place in range(EPOCH):
        height, width = numbers.integers(9, 160, 2).tolist()
        rows, columns, channels = np.ogrid[:height, :width, :3]
        pixels = 120 + 100 * np.sin(rows / (5 + place) + place) * np.cos(columns / 11 + channels)
        save(root / "train" / str(place % 2) / f"{place}.jpg", pixels.astype(np.uint8))
        save(root / "val" / str(place % 2) / f"{place}.jpg", pixels.astype(np.uint8)[:9, :9])


def losses(run: Path) -> list[float]:
    """Of steps 1 to END."""
    found = {
        event["step"]: event["loss"] for event in read_run(run).events if event["kind"] == "step"
    }
    assert sorted(found) == list(range(1, END + 1)), found
    return [found[step] for step in range(1, END + 1)]


def weights(run: Path) -> dict[str, np.ndarray]:
    return load_file(run / "checkpoints" / f"step-{END:08}" / "weights.safetensors")


def on_two_ranks(*words: str) -> None:
    result = mpirun(2, ["-m", "hvdtrain", *words, "comm.engine=mpi"])
    assert result.returncode == 0, result


@pytest.mark.slow
@needs_mpirun
def test_two_ranks_train_on_the_boxes_of_one_and_a_resumed_job_too(tmp_path: Path) -> None:
    images(tmp_path / "images")
    words = [*WORDS, f"data.root={tmp_path / 'images'}"]
    straight = tmp_path / "straight"
    fewer = tmp_path / "fewer"
    more = tmp_path / "more"
    assert main([*words, f"run={straight}", f"stop.steps={END}"]) == 0
    on_two_ranks(*words, f"run={fewer}", f"stop.steps={STOP}")
    assert main([*words, f"run={fewer}", f"stop.steps={END}"]) == 0
    assert main([*words, f"run={more}", f"stop.steps={STOP}"]) == 0
    on_two_ranks(*words, f"run={more}", f"stop.steps={END}", "data.workers=1")
    for run in (fewer, more):
        np.testing.assert_allclose(losses(run), losses(straight), rtol=1e-12, err_msg=run.name)
        for name, array in weights(straight).items():
            np.testing.assert_allclose(
                weights(run)[name], array, rtol=0, atol=1e-12, err_msg=f"{run.name}: {name}"
            )
    plain = tmp_path / "plain"
    assert main([*words, "augment.resized_crop=0", f"run={plain}", f"stop.steps={END}"]) == 0
    assert np.abs(np.array(losses(plain)) - losses(straight)).min() > 1e-6, (
        "each step has random boxes"
    )
