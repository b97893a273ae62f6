"""The run folder: one of its own, marked, without links; a folder of something else is refused and
stays as it was."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from hvdtrain.__main__ import main
from hvdtrain.config.read import configure
from hvdtrain.errors import DONE, USER, UserError
from hvdtrain.training.run_folder import FILES, FOLDERS, MARKER, check_run_folder, make_run_folder

JOB = [
    "framework=numpy",
    "model.name=linear",
    "comm.engine=single",
    "data.name=synthetic",
    "data.shape=[8,8,1]",
    "data.samples=32",
]
JOB += ["data.val_samples=8", "batch.size=8", "epochs=1"]


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)
    return home


def tree(folder: Path) -> dict[str, str]:
    """Each path below a folder, with what it is and the hash of what it holds."""
    found = {}
    for path in sorted(folder.rglob("*")):
        content = (
            os.readlink(path)
            if path.is_symlink()
            else hashlib.sha256(path.read_bytes()).hexdigest()
            if path.is_file()
            else "-"
        )
        found[str(path.relative_to(folder))] = f"{path.lstat().st_mode:o} {content}"
    return found


def make(*arguments: str) -> Path:
    return make_run_folder(configure(None, arguments))


@pytest.mark.parametrize("there", [None, [], ["hvdtrain-17.log", "job.out", "job.err"]])
def test_a_new_and_an_empty_folder_become_a_run_folder(there: list[str] | None) -> None:
    if there is not None:
        Path("run").mkdir()
    for name in there or ():
        (Path("run") / name).write_text("of the batch system")
    assert make("run=run") == Path("run")
    assert sorted(os.listdir("run")) == sorted([MARKER, *(there or ())])
    (Path("run") / "notes.txt").write_text("of the user")
    assert make("run=run") == Path("run"), "what is in a run folder by now does not matter"


@pytest.mark.parametrize(
    "name",
    [
        "config.yaml",
        "events.jsonl",
        "checkpoints/model.ckpt",
        "report.html",
        "thesis.tex",
        ".bashrc",
    ],
)
def test_a_folder_of_something_else_is_refused(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path("run") / name
    path.parent.mkdir(parents=True)
    path.write_text("precious: true\n")
    before = tree(Path())
    assert main([*JOB, "run=run"]) == USER
    first = name.partition("/")[0]
    expected = (
        f"run is not a run folder: {first} in it was not written by hvdtrain\n  where: run, "
        "command line\n  fix: give run= a separate folder"
    )
    assert f"{expected}, such as run=run/run-1\n" in capsys.readouterr().err
    assert tree(Path()) == before


def test_a_start_without_room_for_a_checkpoint_ends_before_its_first_step() -> None:
    run = make("run=run")
    check_run_folder(run, 10**4)
    with pytest.raises(
        UserError,
        match=r"^no room on the disk for a checkpoint: needs 1000000000000\.0 MB, \d+\.\d+ MB "
        r"free\n  where: run\n",
    ):
        check_run_folder(run, 10**18)


@pytest.mark.parametrize("run", ["~", "/", ".", "link"])
def test_the_home_folder_is_no_run_folder(
    run: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("link").symlink_to(home)
    if run == ".":
        monkeypatch.chdir(home)
    with pytest.raises(UserError, match="is not a run folder"):
        make(f"run={run}")
    assert os.listdir(home) == []


def test_a_run_folder_without_a_marker_goes_on() -> None:
    assert main([*JOB, "run=run"]) == DONE
    (Path("run") / MARKER).unlink()
    (Path("run") / "notes.txt").write_text("of the user")
    assert main([*JOB, "run=run", "epochs=2"]) == DONE
    assert (Path("run") / MARKER).exists()
    for path in (MARKER, "events.jsonl"):
        (Path("run") / path).unlink()
    assert main([*JOB, "resume=run", "epochs=3"]) == DONE, "its checkpoints say what it is"
    assert (Path("run") / MARKER).exists()


@pytest.mark.parametrize("name", [*FILES, *FOLDERS])
def test_a_link_in_a_run_folder_is_refused(name: str) -> None:
    run = make("run=run")
    outside = Path("outside").absolute()
    outside.touch() if name in FILES else outside.mkdir()
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(outside)
    before = tree(Path())
    with pytest.raises(
        UserError,
        match=f"^run/{name} is a link, not a (file|folder)\n  where: run, command line\n  fix: "
        ".*do not trust",
    ):
        make("run=run")
    assert tree(Path()) == before


def test_a_job_does_not_go_on_in_a_folder_with_a_link(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*JOB, "run=run"]) == DONE
    Path("run/checkpoints").rename("outside")
    Path("run/checkpoints").symlink_to("../outside")
    before = tree(Path())
    for argument in ("run=run", "resume=run"):
        assert main([*JOB, argument, "epochs=2"]) == USER
        assert "a link, not a folder\n" in capsys.readouterr().err
    assert tree(Path()) == before
