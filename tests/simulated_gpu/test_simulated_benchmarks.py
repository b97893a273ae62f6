"""The parts of benchmarks/gpu.py that need a GPU, or two, on two simulated ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ranks import needs_mpirun, python
from simulated_gpu.build import compiler
from simulated_gpu.table import PARTS

pytestmark = [
    pytest.mark.simulated_gpu,
    pytest.mark.skipif(compiler() is None, reason="no C++ compiler: g++ builds the simulated GPU"),
]


@pytest.mark.slow
@needs_mpirun
def test_parts_of_the_gpu_day_run_on_two_gpus(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    day = ["benchmarks/gpu.py", "--quick", "--json", str(out), "--part", *PARTS]
    support = str(Path(__file__).parents[1] / "support")
    env = {"SIMULATED_GPUS": "2", "PYTHONPATH": support, "CUDA_VISIBLE_DEVICES": "0,1"}
    done = python(["-m", "simulated_gpu", *day], env=env, timeout_s=300, is_warm=False)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    ends = {row["part"]: (row["ended"], row["found"]) for row in rows if "ended" in row}
    assert done.returncode == 0, (ends, done.stderr)
    assert [ends[name][0] for name in PARTS] == ["ok"] * len(PARTS)
    of = {name: [row for row in rows if row.get("part") == name] for name in PARTS}
    assert {row["device"] for name in PARTS for row in of[name]} == {"Simulated GPU"}
    assert [row["on"] for row in of["waits"][:-1]] == ["cuda:0"] * 2
    assert ends["waits"][1] == "2 models without a wait"
    assert of["digests"][0]["other_on_the_host"] == [] and of["digests"][0]["notices_a_bit"]
    assert of["segmentation"][0]["samples_per_s"] > 0
    (memory, _) = of["checkpoint"]
    assert len(memory["checkpoints"]) == 2 and memory["megabytes"] > 0
    assert [row["job"] for row in of["pipelines"][:-1]] == ["exact"]
    assert [row["bucket"] for row in of["buckets"][:-1]] == ["default", "1 MB", "4 MB"]
