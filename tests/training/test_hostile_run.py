"""Run folders from a stranger: no command creates, changes or removes anything outside, starts a
program, or ends with a traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hostile_run import JOB, KINDS, clear, outside_folder, sound_run, tree
from ranks import FULL, HANG_S, ROOT, in_full_rounds, mpirun, needs_extra, needs_mpirun, python

from hvdtrain.__main__ import is_command, main
from hvdtrain.config.read import configure
from hvdtrain.errors import USER, UserError

SCRIPT = "tests/support/hostile_run.py"
# HVDTRAIN_TEST_ROUNDS=full PYTEST_TIMEOUT=7200 pytest -m slow --basetemp=/dev/shm/hostile
# tests/training/test_hostile_run.py tries every case, in half an hour of processor time. Torch's
# build for CUDA on PyPI starts a process where it is imported, by its package cuda-pathfinder: no
# doing of the folder that is read.
TORCH_STARTS_A_PROCESS = """
import sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            sys.meta_path.remove(self)
            import subprocess

            subprocess.run(["true"], check=True)

sys.meta_path.insert(0, Finder())
"""


def check(tmp_path: Path, *arguments: str, path: str = "") -> int:
    """The number of cases, all of which passed; path: more folders with modules."""
    env = {"PYTHONPATH": f"{path}:{ROOT}"} if path else None
    result = python(
        [SCRIPT, str(tmp_path), *arguments], timeout_s=7200 if FULL else HANG_S, env=env
    )
    *wrong, counts = [json.loads(line) for line in result.stdout.splitlines()] or [{}]
    assert (result.returncode, wrong, result.stderr) == (0, [], ""), result
    return int(counts["tried"])


@pytest.mark.in_turn
@needs_extra("predict")
@needs_extra("export")
@pytest.mark.parametrize(
    "arguments", [("planted", "24"), ("swapped", "2")], ids=lambda words: words[0]
)
def test_a_sample_of_hostile_run_folders(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "sitecustomize.py").write_text(TORCH_STARTS_A_PROCESS)
    assert check(tmp_path, *arguments, path=str(modules)) == int(arguments[1])


NAMES_CODE = [  # lines of a stranger's config.yaml, whose folder is stranger.net
    "model.name: stranger.net",
    "model.name: ${resume}",
    "model.name: ${run}\nrun: stranger.net",
    "model.name: ${data.root}\ndata.root: ${data.a}${data.b}\ndata.a: stranger\ndata.b: .net",
    "optim.name: ${data.root}\ndata.root: stranger.net",
    "task.name: ${data.root}\ndata.root: stranger:net",
    "data.name: ${data.root}\ndata.root: stranger:net",
    "recipe.function: ${data.root}\ndata.root: stranger:net",
    "hooks: ['${data.root}']\ndata.root: stranger:net",
]
COMMANDS = [
    "resume=stranger.net stop.steps=4",
    "--config stranger.net/config.yaml run=stranger.net",
    "check --config stranger.net/config.yaml run=stranger.net resume=stranger.net",
    "plan --config stranger.net/config.yaml run=stranger.net resume=stranger.net",
    "summary --config stranger.net/config.yaml run=stranger.net resume=stranger.net",
    "bench step --config stranger.net/config.yaml run=stranger.net resume=stranger.net",
    "sweep --config stranger.net/config.yaml --grid seed=1,2 --out out",
    "evaluate stranger.net",
    "predict stranger.net --images stranger.net --to x.csv",
    "sample stranger.net",
    "export stranger.net --to x.keras",
    "replay stranger.net",
]


def is_here(command: str) -> bool:
    """False for a command of an extra that this copy of hvdtrain lacks."""
    first = command.partition(" ")[0]
    return is_command(first) or "=" in first or first.startswith("-")


NEVER_IMPORTS = ["report stranger.net", "export stranger.net --to x.safetensors"]


@pytest.mark.parametrize("lines", NAMES_CODE)
def test_code_that_a_record_names_is_not_imported(
    lines: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By no command, whatever references lead to its name; the user has typed the name of the
    folder alone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "stranger.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\nclass net: pass\n"
    )
    (tmp_path / "stranger.net" / "checkpoints" / "step-00000002").mkdir(parents=True)
    (tmp_path / "stranger.net" / "config.yaml").write_text(f"framework: numpy\n{lines}\n")
    key = lines.partition(":")[0]
    for command in filter(is_here, COMMANDS):
        trains_not = command.startswith(("evaluate", "predict", "sample", "export"))
        code = main(command.split())
        said = "".join(capsys.readouterr())
        assert code == USER and not (tmp_path / "ran").exists(), (command, said)
        if "${r" not in lines and not (
            trains_not and key in ("optim.name", "recipe.function", "hooks")
        ):  # else it is not read, or is null
            assert (
                "imports code, and only the run folder names it" in said
                and f"add the argument {key}=" in said
            ), (command, said)
    for command in NEVER_IMPORTS:
        main(command.split())
        assert not (tmp_path / "ran").exists(), command


def test_names_that_the_user_types_are_the_users(tmp_path: Path) -> None:
    """Also by a reference; a file of the user's that refers to what a run folder says is not."""
    record = tmp_path / "config.yaml"
    mine = tmp_path / "own" / "mine.yaml"
    mine.parent.mkdir()
    record.write_text("data.root: stranger:net\nmodel.name: linear\n")
    mine.write_text("model.name: ${data.root}\n")
    with pytest.raises(UserError, match="model.name=stranger:net imports code"):
        configure(str(mine), [f"resume={tmp_path}"])
    with pytest.raises(UserError, match="model.name=stranger:net imports code"):
        configure(None, [f"resume={tmp_path}", "model.name=${data.root}"])
    assert (
        configure(
            None, [f"resume={tmp_path}", "model.name=${data.root}", "data.root=mine:Net"]
        ).model.name
        == "mine:Net"
    )
    # a key within a key that refers to it
    record.write_text("data: {a: '${data.a.b}', a.b: 1}\nmodel.name: ${data.a}\n")
    with pytest.raises(UserError):
        configure(None, [f"resume={tmp_path}"])


@pytest.mark.parametrize(
    ("lines", "what"),
    [
        (
            "data.name: image_tokens\ndata.source: folder\ndata.source_options: {cache: /x}",
            "data.source_options.cache=/x is where a job writes",
        ),
        (
            "comm.address: stranger.example:1",
            "comm.address=stranger.example:1 is where the ranks connect",
        ),
        ("model.download: true", "model.download=true lets a model's code download"),
        ("data.cache: ${task.a}\ntask.a: /x", "data.cache=/x is where a job writes"),
    ],
)
def test_what_a_record_does_outside_its_folder_needs_the_users_word(
    lines: str, what: str, tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").write_text(f"{lines}\n")
    key, _, value = what.partition(" ")[0].partition("=")
    with pytest.raises(UserError) as caught:
        configure(str(tmp_path / "config.yaml"), [])
    assert caught.value.what == f"{what}, but it is set only in the configuration of a run"
    assert f"add the argument {key}={value}" in caught.value.fix
    configure(str(tmp_path / "config.yaml"), [f"{key}={value}"])


@pytest.mark.parametrize("model", ["name: gpt\n  layers: 1000000000\n  width: 8\n  heads: 1"])
def test_a_model_that_no_host_can_have(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends before it has taken the memory."""
    monkeypatch.setattr("hvdtrain.frameworks.torch.model.most_bytes", lambda: 2.0**20)
    (tmp_path / "text.txt").write_text("to be or not to be " * 20)
    (tmp_path / "mine.yaml").write_text(
        "model: {name: gpt, layers: 1000000000, width: 8, heads: 1}\ntask.name: "
        "language\nbatch.size: 8\n"
    )
    data = [
        "data.name=text",
        f"data.root={tmp_path / 'text.txt'}",
        "data.context=8",
        "data.val_share=0.2",
    ]
    assert (
        main(
            [
                "--config",
                str(tmp_path / "mine.yaml"),
                *data,
                f"run={tmp_path / 'run'}",
                "comm.engine=single",
            ]
        )
        == USER
    )
    assert (
        "gpt has more than the 0.0 GiB of memory that this process can have"
        in capsys.readouterr().err
    )


@needs_mpirun
@pytest.mark.parametrize(
    ("arguments", "name", "kind", "refusal"),
    [
        (
            [*JOB, "run=RUN", "max_steps=3"],
            "events.jsonl",
            "link to a file",
            "NAME is a link, not a file\n  where: run, command line",
        ),
        (
            [*JOB, "run=RUN", "max_steps=3", "log.per_rank=true"],
            "ranks/rank-00001.log",
            "link to a file",
            "the log file of a rank: NAME: a link, not a file",
        ),
        *[(["evaluate", "RUN"], "config.yaml", "pipe", "NAME is a pipe, not a file\n  where: ")]
        * (FULL and is_command("evaluate")),
    ],
    ids=["events", "log of a rank", *["configuration"] * (FULL and is_command("evaluate"))],
)
def test_two_ranks_end_together(
    tmp_path: Path, arguments: list[str], name: str, kind: str, refusal: str
) -> None:
    """Rank 0 refuses what is planted, rank 1 its own log; one message, and both ranks have
    ended."""
    run = tmp_path / "run"
    outside = outside_folder(tmp_path)
    sound_run(run)
    clear(run / name)
    KINDS[kind](run / name, outside)
    before = tree(outside)
    words = [argument.replace("RUN", str(run)) for argument in arguments]
    result = mpirun(2, ["-m", "hvdtrain", *words, "comm.engine=mpi"])
    assert (result.returncode, result.stderr.count("hvdtrain: ")) == (2, 1), result
    assert (
        refusal.replace("NAME", str(run / name)) in result.stderr
        and "do not trust this folder" in result.stderr
    ), result
    assert "Traceback" not in result.stderr and tree(outside) == before, result


@pytest.mark.slow
@in_full_rounds
def test_every_odd_thing_under_every_name(tmp_path: Path) -> None:
    assert check(tmp_path, "planted", "0") >= 2400


@pytest.mark.slow
@in_full_rounds
def test_a_name_that_becomes_a_link_while_a_job_writes(tmp_path: Path) -> None:
    assert check(tmp_path, "swapped", "50") == 50


@pytest.mark.slow
@pytest.mark.parametrize(
    "file",
    [
        "weights.safetensors",
        *[
            "config.yaml",
            "SHA256SUMS",
            "events.jsonl",
            "mlflow_run.json",
            "optimizer.safetensors",
            "progress.json",
        ]
        * FULL,
    ],
)
def test_damaged_files(tmp_path: Path, file: str) -> None:
    path = f"checkpoints/step-00000002/{file}" if file[0] in "wopS" else file
    count = 2000 if FULL else 50
    assert check(tmp_path, "mutated", str(count), path) == count
