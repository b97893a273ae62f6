"""What a rank has of its host's memory, the largest micro-batch in it, and what a job records of
both."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest
from ranks import needs_extra, python

from hvdtrain.__main__ import main
from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.config.read import configure
from hvdtrain.training.datasets import open_datasets
from hvdtrain.training.job_memory import forecast_of_job
from hvdtrain.training.memory import largest_micro, room

SMALL = ["data.name=digits", "model.name=mlp", "model.widths=[40]", "max_steps=4", "batch.size=60"]


def host(folder: Path, cgroup: str = "0::/\n") -> tuple[Path, Path]:
    proc = folder / "proc"
    cgroups = folder / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(cgroup)
    (proc / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    return proc, cgroups


def test_ranks_share_the_free_memory_of_a_host(tmp_path: Path) -> None:
    found = room(2, *host(tmp_path))
    assert found.bytes == 8000 * 1024 // 2 and found.limit == "the free memory of the host"


def test_a_limit_of_private_memory_counts(tmp_path: Path) -> None:
    proc, cgroups = host(tmp_path)
    former = resource.getrlimit(resource.RLIMIT_DATA)
    limit = 2**40
    (proc / "self" / "status").write_text(f"VmSize:\t 9 kB\nVmData:\t {limit // 1024 - 3000} kB\n")
    resource.setrlimit(resource.RLIMIT_DATA, (limit, former[1]))
    try:
        assert room(1, proc, cgroups) == (3000 * 1024, "ulimit -d")
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, former)


def test_the_smallest_limit_of_the_groups_around_a_process_counts(tmp_path: Path) -> None:
    """1 of 3 MB is used, including 0.5 MB of file pages that the kernel gives back."""
    proc, cgroups = host(tmp_path, "0::/job/step\n")
    for group, most in {"": None, "job": 3_000_000, "job/step": None}.items():
        folder = cgroups / group
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{most or 'max'}\n")
        (folder / "memory.current").write_text("1000000\n")
        (folder / "memory.stat").write_text("anon 5\ninactive_file 500000\n")
    assert room(1, proc, cgroups) == (2_500_000, "the container's memory.max")
    assert room(5, proc, cgroups) == (500_000, "the container's memory.max")


def test_version_1_of_control_groups(tmp_path: Path) -> None:
    proc, cgroups = host(tmp_path, "9:cpu:/x\n4:memory:/job\n")
    (cgroups / "memory" / "job").mkdir(parents=True)
    for name, text in {
        "limit_in_bytes": "2000000",
        "usage_in_bytes": "500000",
        "stat": "total_inactive_file 0",
    }.items():
        (cgroups / "memory" / "job" / f"memory.{name}").write_text(f"{text}\n")
    assert room(1, proc, cgroups) == (1_500_000, "the container's memory.limit_in_bytes")


@pytest.mark.parametrize("at", [1, 2, 37, 299, 300])
def test_the_largest_micro_batch_is_found_in_few_guesses(at: int) -> None:
    """The update of 50 bytes hides small passes, which then cost 3 bytes a sample: convex."""
    guesses = []

    def size(samples: int) -> int:
        guesses.append(samples)
        return max(50, 20 + 3 * samples)

    found = largest_micro(size, 300, size(at))
    assert (
        size(found) == size(at)
        and found >= at
        and (found == 300 or size(found + 1) > size(at))
        and len(guesses) < 22
    )
    assert largest_micro(size, 300, 49) == 0


@needs_extra("memory_forecast")
def test_auto_takes_a_number_that_the_run_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert (
        main(
            [*SMALL, "batch.micro=auto", f"run={run}", "checkpoint.every_steps=2", "optim.ema=0.5"]
        )
        == 0
    )
    said = capsys.readouterr().out.splitlines()
    (line,) = [number for number, line in enumerate(said) if line.startswith("batch   ")]
    assert (
        "batch.micro=60 (auto: " in said[line + 1]
        and said[line + 2].startswith("recipe  ")
        and "optim.ema=0.5" in said[line + 3]
    )
    assert "micro: 60\n" in (run / "config.yaml").read_text()
    text = (run / "config.yaml").read_text().replace("micro: 60\n", "micro: 7\n")
    (run / "config.yaml").write_text(text)
    assert (
        main(
            [
                *SMALL,
                "batch.micro=auto",
                "optim.ema=0.5",
                f"run={run}",
                "resume=auto",
                "max_steps=6",
            ]
        )
        == 0
    )
    assert "batch.micro=7 (auto: as this run began)" in capsys.readouterr().out
    ends = [
        json.loads(line)
        for line in (run / "events.jsonl").read_text().splitlines()
        if '"kind": "end"' in line
    ]
    assert (
        all(len(end["rank_memory_mb"]) == 1 and end["memory_base_mb"] > 50 for end in ends)
        and len(ends) == 2
    )


@pytest.mark.parametrize(
    ("word", "loaded"),
    [
        pytest.param("parallel.pipeline=2", ["pipeline"], marks=needs_extra("pipeline")),
        pytest.param("parallel.tensor=2", ["tensor"], marks=needs_extra("tensor")),
        ("batch.size=60", []),
    ],
)
def test_what_divides_a_model_is_imported_before_memory_is_measured(
    word: str, loaded: list[str]
) -> None:
    program = f"""
import sys
from hvdtrain.config.read import configure
from hvdtrain.training.build import load_libraries
load_libraries(configure(None, {[*SMALL, word]}))
paths = {{f"hvdtrain.extras.{{name}}" for name in ("pipeline.arrangement", "tensor.division")}}
print(sorted(path.split(".")[2] for path in paths & sys.modules.keys()))
"""
    done = python(["-c", program])
    assert done.stdout == f"{loaded}\n", done


def test_auto_needs_a_framework_that_predicts(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["data.name=digits", "framework=numpy", "model.name=linear", "batch.micro=auto"]) == 2
    )
    assert "batch.micro=auto needs a memory prediction" in capsys.readouterr().err


def test_a_job_with_lengths_in_tokens_is_forecast() -> None:
    words = [
        "data.name=digit_tokens:windows",
        "task.name=language",
        "model.name=gpt",
        "recipe.warmup=2000 tokens",
        "epochs=2",
    ]
    config = configure(None, words)
    found = forecast_of_job(config, open_datasets(config), SingleProcessCommunicator())
    assert (found.ranks, found.share) == (1, 64)


class Two(SingleProcessCommunicator):
    """A size, of ranks that a forecast needs no more of."""

    size = local_size = 2


@needs_extra("memory_forecast")
@needs_extra("tensor")
def test_auto_takes_what_fits_on_ranks_that_have_a_model_together() -> None:
    config = configure(
        None,
        [
            "data.name=digits",
            "model.name=mlp",
            "model.widths=[32,32]",
            "batch.size=256",
            "batch.micro=auto",
            "parallel.tensor=2",
        ],
    )
    found = forecast_of_job(config, open_datasets(config), Two())
    assert found.share == 256, "both ranks read the same samples"
    sizes = {micro: found.footprint(micro=micro).total for micro in (1, 16, 256)}
    assert sizes[1] <= sizes[16] <= sizes[256], sizes
    room_bytes = (sizes[16] + sizes[256]) / 2
    micro = largest_micro(
        lambda samples: found.footprint(micro=samples).total, found.share, room_bytes
    )
    assert 16 <= micro <= 256 and found.footprint(micro=micro).total <= room_bytes
