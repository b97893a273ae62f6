"""The comparison of two checkouts: the smallest difference of a weight or a loss is reported; a job
with a fixed seed repeats its bits."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import same_bits
from safetensors.numpy import save_file

FOUND = {"one": {"weights": "00ff", "losses": [["step", 5, 0.5, None], ["epoch", 7, 0.25]]}}


def test_one_ulp_of_a_loss_is_a_difference(capsys: pytest.CaptureFixture[str]) -> None:
    other = copy.deepcopy(FOUND)
    assert same_bits.compare(FOUND, other) and "| same |" in capsys.readouterr().out
    other["one"]["losses"][1][2] = float(np.nextafter(0.25, 1))  # type: ignore[index]
    assert not same_bits.compare(FOUND, other)
    assert (
        "DIFFER: ['epoch', 7, 0.25] -> ['epoch', 7, 0.25000000000000006]" in capsys.readouterr().out
    )
    assert not same_bits.compare(FOUND, {})


def test_the_digest_covers_names_types_shapes_and_bits(tmp_path: Path) -> None:
    x = np.arange(6, dtype=np.float32)
    variants = {
        "same": {"p.x": x},
        "name": {"p.y": x},
        "type": {"p.x": x.view(np.int32)},
        "shape": {"p.x": x.reshape(2, 3)},
        "bit": {"p.x": np.nextafter(x, np.float32(9))},
        "more": {"p.x": x, "s.x.0": x},
    }
    for name, arrays in variants.items():
        (tmp_path / name).mkdir()
        save_file(arrays, tmp_path / name / "weights.safetensors")
    (tmp_path / "again").mkdir()
    # whichever file holds it
    save_file({"p.x": x.copy()}, tmp_path / "again" / "optimizer_state.safetensors")
    digests = {name: same_bits.weights(tmp_path / name) for name in variants}
    assert len(set(digests.values())) == len(variants)
    assert same_bits.weights(tmp_path / "again") == digests["same"]


@pytest.mark.slow
def test_a_job_repeats_itself_and_another_seed_does_not(tmp_path: Path) -> None:
    name, job = next(iter(same_bits.JOBS.items()))
    jobs = job, job, job._replace(options=f"{job.options} seed=2")
    one, again, other = (
        {name: same_bits.run(each, tmp_path / str(number))} for number, each in enumerate(jobs)
    )
    assert same_bits.compare(one, again)
    assert (
        one[name]["weights"] != other[name]["weights"]
        and one[name]["losses"] != other[name]["losses"]
    )
