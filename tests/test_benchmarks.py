"""The benchmark scripts run, check before they time, and have a docstring that says what they
measure."""

from __future__ import annotations

import ast
import importlib
import json
import math
import re
import struct
import time
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pytest
from ranks import FULL, ROOT, in_full_rounds, mpirun, needs_extra, needs_mpirun, python
from simulated_gpu.table import PARTS as SIMULATED

from hvdtrain.data.source import NamedArrays

SCRIPTS = sorted((ROOT / "benchmarks").glob("*.py")) + sorted(
    (ROOT / "benchmarks" / "peers").glob("*.py")
)


@pytest.fixture(scope="module")
def fashion(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 and 40 images of noise in Fashion-MNIST's files."""
    raw = tmp_path_factory.mktemp("data") / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    rng = np.random.default_rng(1)
    for part, count in (("train", 120), ("t10k", 40)):
        images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = (np.arange(count) % 10).astype(np.uint8)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(
            struct.pack(">IIII", 0x803, count, 28, 28) + images.tobytes()
        )
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(
            struct.pack(">II", 0x801, count) + labels.tobytes()
        )
    return raw.parent.parent


def with_its_extras(script: Path) -> Any:
    """A row of a script, which needs the extras that it imports."""
    needed = sorted(set(re.findall(r"hvdtrain\.extras\.(\w+)", script.read_text())))
    return pytest.param(script, marks=[needs_extra(name) for name in needed], id=script.name)


@pytest.mark.parametrize("path", [with_its_extras(script) for script in SCRIPTS])
def test_every_script_has_a_docstring_and_what_it_imports(path: Path) -> None:
    tree = ast.parse(path.read_text())
    docstring = ast.get_docstring(tree) or ""
    assert len(docstring.splitlines()[0]) > 30
    for node in ast.walk(tree):  # what it imports of hvdtrain is there
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hvdtrain"):
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                is_package = hasattr(module, "__path__")
                assert hasattr(module, alias.name) or (
                    is_package and find_spec(f"{node.module}.{alias.name}")
                ), f"{node.module} has no {alias.name}"


@needs_extra("bench")
def test_the_numbers_of_the_readme_are_those_of_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The claims of README.md, computed from the newest rows of benchmarks/*.jsonl."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    everything = importlib.import_module("all")

    def rows(name: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = everything.last_rows(ROOT / "benchmarks" / f"{name}.jsonl")
        return found

    accuracy = defaultdict(list)
    for row in rows("large_batch"):
        accuracy[row["recipe"]].append(row["accuracy"])
    averaged = "batch 4096, Muon, averaged weights"
    points = {name: 100 * mean(values) for name, values in accuracy.items()}
    ratios = everything.of_peers(rows("peers"))
    default, on_mpi = (ratios[f"hvdtrain {engine}, bf16"] for engine in ("horovod", "mpi"))
    by_hand = [name[0]["rows"]["hvdtrain"]["to by hand"][0] for name in (rows("step"), rows("gpu"))]
    text = (ROOT / "README.md").read_text().replace("\n  ", " ")
    for claim in (
        f"loses {points['batch 128'] - points['batch 4096, nothing else changed']:.1f} points",
        f"and {points['batch 128'] - points['+ LARC']:.1f} with LARC",
        f"averaged weights it loses {points['batch 128, Muon'] - points[averaged]:.1f}",
        f"loses {points['batch 128, Muon'] - points['+ label smoothing, momentum 0.9']:.1f} (",
        f"{by_hand[0]:.2f} of its images/s on one CPU process, {by_hand[1]:.3f} on one GPU",
        f"two ranks takes {default:.2f} times as long as with the fastest of ",
        f"with `comm.engine=mpi` it takes {on_mpi:.2f} times as long",
    ):
        assert claim in text, claim


def test_the_longest_sequences_are_those_of_the_rows() -> None:
    """benchmarks/parallel.md has a row for each way, and docs/parallel.md the ratios of some."""
    path = ROOT / "benchmarks" / "context_memory.jsonl"
    rows = {row["way"]: row for row in map(json.loads, path.read_text().splitlines())}
    table = (ROOT / "benchmarks" / "parallel.md").read_text()
    for way, row in rows.items():
        assert row["messages_bytes"] == row["formula_bytes"], way
        sent = f"{row['messages_bytes'] / 1e6:.2f} | {row['rest_bytes'] / 1e6:.2f}"
        assert f"| {way} | {row['ranks']} | {row['positions']:,} | {sent} |" in table, way
    most = {way: f"{row['positions']:,}" for way, row in rows.items()}
    claim = (
        f"trains on {most['one process']} positions alone, on {most['ring on 2 ranks']} on 2 ranks "
        f"with `ring`, and on {most['ulysses on 2 ranks']} with `ulysses` ("
    )
    assert claim in (ROOT / "docs" / "parallel.md").read_text().replace("\n", " ")


@needs_extra("bench")
def test_all_compares_each_ratio_with_its_last_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    everything = importlib.import_module("all")
    for name, part in everything.PARTS.items():
        path = ROOT / "benchmarks" / f"{everything.FILES.get(name, name)}.jsonl"
        assert not path.exists() or part.values(everything.last_rows(path)), name
        script = next(word for word in part.command.split() if word.endswith(".py"))
        assert (ROOT / script).exists(), script
    script = "import json, sys; open(sys.argv[1], 'w').write(json.dumps(dict(what='a', ratio=3)))"
    values = everything.by("ratio", "what")
    part = everything.Part(f'{{python}} -c "{script}" {{json}}', values, "times", 60)
    broken = part._replace(command="{python} -c 'exit(3)'")
    monkeypatch.setattr(everything, "PARTS", {"one": part, "broken": broken})
    monkeypatch.setattr(everything, "FOLDER", tmp_path)
    rows = [{"run": "", "what": "a", "ratio": 9}, {"run": "2026", "what": "a", "ratio": 2}]
    (tmp_path / "one.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(
        "sys.argv", ["all.py", "--root", str(tmp_path), "--keep", "--part", "one", "broken"]
    )
    assert everything.main() == 1
    out = capsys.readouterr().out
    assert " 2.000    3.000   +50.0 %" in out
    assert "broken failed: code 3" in out
    kept = json.loads((tmp_path / "one.jsonl").read_text().splitlines()[-1])
    assert {"commit", "date", "processor", "run"} <= kept.keys()


GPU_DAY = [
    ["tests", "losses", "wide_resnet", "accuracy"],
    ["ranks", "resume", "zero3"],
    ["gpt12"],
    ["gpt24"],  # with --quick the same as gpt12
    ["cifar10", "folder", "energy"],
]


@pytest.mark.slow
@needs_mpirun
@pytest.mark.parametrize(
    "parts", [parts for parts in GPU_DAY if FULL or parts != ["gpt24"]], ids=lambda parts: parts[0]
)
def test_every_part_of_the_gpu_day_runs_without_a_gpu(
    fashion: Path, tmp_path: Path, parts: list[str]
) -> None:
    out = tmp_path / "out.jsonl"
    done = python(
        [
            "benchmarks/gpu.py",
            "--root",
            str(fashion),
            "--json",
            str(out),
            "--quick",
            "--part",
            *parts,
        ]
    )
    assert (done.returncode, done.stderr) == (0, ""), done
    day, *rows = (json.loads(line) for line in out.read_text().splitlines())
    assert day["quick"] and [(row["part"], row["ended"]) for row in rows if "ended" in row] == [
        (name, "ok") for name in parts
    ]
    of = {name: [row for row in rows if row["part"] == name] for name in parts}
    if "tests" in parts:
        assert of["tests"][0][
            "passed"
        ] == 0 and "test_gpu::test_a_gpu_computes_what_a_cpu_does" in str(of["tests"][0]["skipped"])
        resnet, reached = (of[name][0]["measured"] for name in ("wide_resnet", "accuracy"))
        assert (
            set(resnet["rows"]) == {"textbook", "by hand", "hvdtrain"}
            and of["wide_resnet"][0]["data"] == "Fashion-MNIST"
        )
        assert reached["textbook"]["reached"] and reached["hvdtrain"]["seconds"] > 0
    if "zero3" in parts:
        assert [row["stage"] for row in of["zero3"][:-1]] == [
            "stage 0",
            "stage 3, parameters offloaded",
        ] and of["resume"][0]["same_bits"]
    if "cifar10" in parts:
        assert (
            of["cifar10"][0]["data"] == of["folder"][0]["data"] == "synthetic"
            and of["cifar10"][0]["measured"]["part"] == "record"
        )


@needs_extra("bench")
def test_a_part_of_the_gpu_day_that_fails_ends_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its error is in the table and in the rows; one that takes too long ends with its program."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu

    tried = [*(name for some in GPU_DAY for name in some), *SIMULATED]
    assert sorted(gpu.PARTS) == sorted(tried), "each is tried by a test"

    def waits(part: gpu.Part) -> str:
        monkeypatch.setattr(part, "_end_s", time.monotonic() + 2)
        return part.python("-c", "import time; time.sleep(1000)")

    fails = "print('half'); raise SystemExit('no such kernel')"
    parts = {
        "fails": lambda part: part.python("-c", fails),
        "breaks": lambda part: str(1 // 0),
        "waits": waits,
        "works": lambda part: part.python("-c", "print('fine')"),
    }
    monkeypatch.setattr(gpu, "PARTS", parts)
    monkeypatch.setattr("sys.argv", ["gpu.py", "--json", str(tmp_path / "out.jsonl")])
    assert gpu.main() == 1
    ends = [
        row
        for row in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
        if "ended" in row
    ]
    assert {row["part"]: row["ended"] for row in ends} == {
        "fails": "FAILED",
        "breaks": "FAILED",
        "waits": "FAILED",
        "works": "ok",
    }
    assert ends[0]["found"] == f"exit code 1 of python -c {fails}\nhalf\nno such kernel\n"
    assert ends[2]["found"].startswith("more than 480 s with python -c ")
    table = capsys.readouterr().out.partition("part         result")[2].splitlines()[1:5]
    assert [line.split()[:2] for line in table] == [[row["part"], row["ended"]] for row in ends]
    assert table[0].endswith(" ... no such kernel") and table[1].endswith(
        "ZeroDivisionError: integer division or modulo by zero"
    )
    assert table[3].endswith("fine")


@pytest.mark.in_turn
@needs_extra("bench")
@needs_extra("trackers")
def test_watching_measures_every_part(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    arguments = [
        "--rounds",
        "3",
        "--steps",
        "10",
        "--json",
        str(out),
        "model.name=linear",
        "framework=numpy",
    ]
    done = python(["benchmarks/watching.py", *arguments])
    assert (done.returncode, done.stderr) == (0, "")
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["part"] for row in rows] == [
        "nothing",
        "stopwatch",
        "step_times",
        "events.jsonl",
        "display",
        "trackers",
        "all sinks",
    ]
    assert all(
        row["quartiles"][0] <= row["images_per_s_ratio"] <= row["quartiles"][1] for row in rows
    )


@pytest.mark.slow
def test_guard_measures_every_part(tmp_path: Path) -> None:
    """Each part is switched off by an attribute of the job: one that is renamed must not be
    missed."""
    out = tmp_path / "out.jsonl"
    done = python(
        [
            "benchmarks/guard.py",
            "--engine",
            "single",
            "--rounds",
            "8",
            "--quick",
            "--json",
            str(out),
        ]
    )
    assert (done.returncode, done.stderr) == (0, ""), done
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["part"] for row in rows] == [
        *(
            "nothing",
            "heartbeat, watchdog",
            "flags on the sums",
            "non-finite check",
            "nonfinite=skip",
            "digests",
            "sync_buffers",
        )
    ]
    assert all(row["ratio"] > 0 for row in rows)


def test_token_baselines_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 3 tokens; training windows 0 0 1 and 1 1 1, so that 0 is followed by 0, 1; 1 by 1, 1. The
    validation window is 0 1 2."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import token_baselines

    train, val = (
        NamedArrays({"tokens": np.array(rows)}, {"tokens": 3})
        for rows in ([[0, 0, 1], [1, 1, 1]], [[0, 1, 2]])
    )
    pairs = [token_baselines.counts(source, 3, 1) for source in (train, val)]
    assert pairs[0].tolist() == [[1, 1, 0], [0, 2, 0], [0, 0, 0]] and pairs[1].tolist() == [
        [0, 1, 0],
        [0, 0, 1],
        [0, 0, 0],
    ]
    assert token_baselines.nats(*pairs) == pytest.approx(
        -(math.log(2 / 5) + math.log(1 / 5)) / 2, rel=1e-15
    )
    alone = [each.sum(0, keepdims=True) for each in pairs]
    assert token_baselines.nats(*alone) == pytest.approx(
        -(math.log(4 / 7) + math.log(1 / 7)) / 2, rel=1e-15
    )
    assert token_baselines.counts(train, 3, 2).tolist() == [[1, 1, 0], [0, 2, 0], [0, 0, 0]], (
        "before the first place is the first token"
    )


@needs_extra("bench")
def test_a_block_that_is_computed_again_keeps_its_input_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else 16 numbers for each of its width's: its input and those of two norms, of three linear
    layers with 1, 4 and 4, queries, keys, values and what attention makes of them; and a few for
    each token and head."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import recompute

    sizes = {"layers": 4, "heads": 2, "width": 64, "context": 32, "vocabulary": 9, "batch": 5}
    tokens = 5 * 32
    number = 4 / recompute.MB
    one = tokens * 64 * number
    # mean and deviation of two norms, and of each head the logarithm of a sum
    few = tokens * (2 + 2 + 2) * number
    found = {
        which: recompute.kept(recompute.Step(sizes, which))["blocks"]
        for which in ("none", "2", "all")
    }
    assert found["all"] == pytest.approx([one] * 4, abs=1e-4)
    assert found["none"] == pytest.approx([16 * one + few] * 4, abs=1e-4)
    assert found["2"] == pytest.approx([16 * one + few, one, 16 * one + few, one], abs=1e-4)


@pytest.mark.slow
@pytest.mark.clock
@in_full_rounds
def test_recompute_measures_each_way(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    sizes = [
        "--layers",
        "2",
        "--context",
        "64",
        "--width",
        "32",
        "--vocabulary",
        "33",
        "--which",
        "none,all",
    ]
    done = python(["benchmarks/recompute.py", *sizes, "--rounds", "2", "--json", str(out)])
    assert (done.returncode, done.stderr) == (0, "")
    row = json.loads(out.read_text())
    assert (
        row["all"]["kept"]["all"] < row["none"]["kept"]["all"] / 3
        and row["all"]["tensors"]["total"] < row["none"]["tensors"]["total"]
    )
    assert row["all"]["to none"][0] > 1


@pytest.mark.slow
@pytest.mark.clock
def test_gpt_compares_training_and_drawing(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    arguments = [
        "--rounds",
        "2",
        "--steps",
        "2",
        "--draws",
        "2",
        "--json",
        str(out),
        "model.layers=1",
        "data.side=4",
    ]
    done = python(["benchmarks/gpt.py", *arguments])
    assert (done.returncode, done.stderr) == (0, "")
    row = json.loads(out.read_text())
    assert (
        row["training"]["quartiles"][0]
        <= row["training"]["hvdtrain_to_by_hand"]
        <= row["training"]["quartiles"][1]
    )
    assert row["drawing"]["positions"] == 16 and row["drawing"]["times_as_fast"] > 1


@pytest.mark.slow
@in_full_rounds
@needs_mpirun
def test_shards_compares_stages_and_fsdp2_on_the_same_job(tmp_path: Path) -> None:
    """Without the same losses there is nothing to compare: that only hvdtrain takes optim.momentum,
    Adam's beta1, must be noticed."""
    out = tmp_path / "out.jsonl"
    arguments = [
        "benchmarks/shards.py",
        "--rounds",
        "3",
        "--steps",
        "2",
        "--json",
        str(out),
        "model.widths=[16]",
    ]
    done = mpirun(
        2, [*arguments, "--trainers", "torchdist/0,torchdist/2,mpi/1,fsdp2", "--to", "fsdp2"]
    )
    assert done.returncode == 0, done.stdout + done.stderr
    row = json.loads(out.read_text())
    assert (
        list(row["rows"]) == ["torchdist/0", "torchdist/2", "mpi/1", "fsdp2"]
        and row["largest_difference_of_losses"] < 1e-5
    )
    losses = row["rows"]["fsdp2"]["losses"]
    assert len(losses) == 4 and losses[-1] < losses[0]
    done = mpirun(2, [*arguments, "--trainers", "torchdist/0,fsdp2", "optim.momentum=0.5"])
    assert (
        done.returncode != 0 and "the trainers do not train the same" in done.stdout + done.stderr
    )


@needs_mpirun
@needs_extra("dense")
def test_dense_schemes_sends_the_bytes_that_are_counted_by_hand(tmp_path: Path) -> None:
    """Of 2 ranks with 6 samples and a layer of 32 x 32, in float32: own rows, half of the neurons
    of all rows, and both back again; and how many rows a rank has. Data parallel: once the weights
    and biases, which is 2 (ranks - 1) / ranks of them."""
    out = tmp_path / "out.jsonl"
    arguments = [
        "benchmarks/dense_schemes.py",
        "--width",
        "32",
        "--samples",
        "6",
        "--rounds",
        "2",
        "--json",
        str(out),
    ]
    done = mpirun(2, arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["way"]: row for row in map(json.loads, out.read_text().splitlines())}
    own = 6 * 32 * 4
    assert [rows[way]["bytes"] for way in "abc"] == [2 * own + 2 * own + 8] * 3
    assert rows["data parallel"]["bytes"] == (32 * 32 + 32) * 4
    assert (
        [rows[way]["bytes_of_rows_forward"] for way in "abc"]
        == [own] * 3
        == [rows[way]["bytes_of_rows_backward"] for way in "abc"]
    )
    assert [rows[way]["bytes_most_in_a_turn"] for way in "abc"] == [own, own, own // 2]


@needs_extra("bench")
def test_shards_refuses_trainers_that_do_not_go_together(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import shards

    for trainers, message in {
        "mpi/3,torchdist/3": "mpi/3 goes with stages of mpi alone",
        "mpi/1,fsdp2": "others need a stage of torchdist beside them",
        "mpi/4": "no trainer mpi/4; there are mpi/0, mpi/1",
    }.items():
        monkeypatch.setattr("sys.argv", ["shards.py", "--trainers", trainers])
        with pytest.raises(SystemExit):
            shards.parse()
        assert message in capsys.readouterr().err
