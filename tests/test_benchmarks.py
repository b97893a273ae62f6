"""The benchmark scripts run, check before they time, and have a docstring that says what they measure."""

from __future__ import annotations

import ast
import json
import struct
from pathlib import Path

import numpy as np
import pytest
from ranks import ROOT, python

SCRIPTS = sorted((ROOT / "benchmarks").glob("*.py")) + sorted((ROOT / "benchmarks" / "peers").glob("*.py"))


@pytest.fixture(scope="module")
def fashion(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 and 40 images of noise in Fashion-MNIST's files."""
    raw = tmp_path_factory.mktemp("data") / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    rng = np.random.default_rng(1)
    for part, count in (("train", 120), ("t10k", 40)):
        images, labels = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8), (np.arange(count) % 10).astype(np.uint8)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 0x803, count, 28, 28) + images.tobytes())
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x801, count) + labels.tobytes())
    return raw.parent.parent


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_every_script_has_a_docstring(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    assert len(docstring.splitlines()[0]) > 30


def test_gpu_script_runs_without_a_gpu(fashion: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    done = python(["benchmarks/gpu.py", "--root", str(fashion), "--json", str(out), "--quick"], timeout_s=200)
    assert done.returncode == 0, done.stdout + done.stderr
    steps, times = (json.loads(line) for line in out.read_text().splitlines())
    assert set(steps["rows"]) == {"textbook", "by hand", "hvdtrain"} and steps["rows"]["hvdtrain"]["to textbook"][0] > 0
    assert times["textbook"]["reached"] and times["hvdtrain"]["reached"] and times["hvdtrain"]["seconds"] > 0


def test_watching_measures_every_part(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    arguments = ["--rounds", "3", "--steps", "10", "--json", str(out), "model.name=linear", "framework=numpy"]
    done = python(["benchmarks/watching.py", *arguments], timeout_s=100)
    assert (done.returncode, done.stderr) == (0, "")
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["part"] for row in rows] == ["nothing", "stopwatch", "step_times", "events.jsonl", "display", "trackers", "all sinks"]
    assert all(row["quartiles"][0] <= row["images_per_s_ratio"] <= row["quartiles"][1] for row in rows)


def test_guard_measures_every_part(tmp_path: Path) -> None:
    """Each part is switched off by an attribute of the job: one that is renamed must not be missed."""
    out = tmp_path / "out.jsonl"
    done = python(["benchmarks/guard.py", "--engine", "single", "--rounds", "8", "--quick", "--json", str(out)], timeout_s=100)
    assert (done.returncode, done.stderr) == (0, ""), done
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["part"] for row in rows] == [
        *("nothing", "heartbeat, watchdog", "flags on the sums", "non-finite check", "nonfinite=skip", "digests", "sync_buffers")
    ]
    assert all(row["ratio"] > 0 for row in rows)
