"""What a job records of its code and environment, and that it records no secrets."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path

import pytest

from hvdtrain.__main__ import main
from hvdtrain.extras.compare.differing import environment_of
from hvdtrain.extras.provenance import environment
from hvdtrain.extras.provenance import repositories as provenance_repositories
from hvdtrain.extras.provenance.repositories import (
    files_of_user,
    repositories,
    repository,
    without_secrets,
)
from hvdtrain.records.run import read_run

SECRETS = {
    "password": 'password = "hunter2-in-a-file"',
    "api key": "    'api_key': 'abcdef0123456789',",
    "login": "url = 'https://me:my-secret-word@host/path'",
    "token of a service": "call('hf_abcdefghijklmnopqrstuvwx')",
    "private key": "-----BEGIN PRIVATE KEY-----\nMIIEow-my-secret\n-----END PRIVATE KEY-----",
    "environment": "export AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI",
    "argument": 'client = Client(api_key="hunter2-in-a-file")',
    "second argument": 'connect(user="me", password="hunter2hunter2")',
    "dict": '{"user": "me", "password": "hunter2"}',
    "item": 'os.environ["WANDB_API_KEY"] = "hunter2"',
    "after a colon": 'if x == 1: api_key = "hunter2"',
    "second variable": "export A=1 WANDB_API_KEY=hunter2",
    "digits": "password = 1234567890123",
    "type": "password: str = 'hunter2'",
    "one long line": "x = '" + "hunter2" * 9000 + "'",
}
HIDDEN = (
    "hunter2",
    "1234567890123",
    "abcdef0123456789",
    "my-secret",
    "hf_abcdef",
    "MIIEow",
    "wJalrXUtnFEMI",
)


def git(folder: Path, *words: str) -> str:
    own = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
    return subprocess.run(
        ["git", *own, *words], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A repository with a module, a commit, changes, and a file of secrets."""
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "cited.py").write_text("max_tokens = 5\n")
    (folder / ".env").write_text("X=1\n")
    git(folder, "init", "-q")
    git(folder, "remote", "add", "origin", "https://me:my-secret-word@host/net.git")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    return folder


def module_of(folder: Path) -> dict[str, types.ModuleType]:
    module = types.ModuleType("cited")
    module.__file__ = str(folder / "cited.py")
    return {"cited": module}


def test_a_repository_has_its_commit_and_its_changes(code: Path) -> None:
    clean = repository.__wrapped__(code)
    assert (clean.commit, clean.changed, clean.digest, clean.diff, clean.problem) == (
        git(code, "rev-parse", "HEAD"),
        *([], "", "", ""),
    )
    assert clean.origin == "https://***@host/net.git"
    (code / "cited.py").write_text("max_tokens = 7\n")
    changed = repository.__wrapped__(code)
    assert changed.changed == ["cited.py"] and changed.commit == clean.commit
    assert "-max_tokens = 5\n+max_tokens = 7\n" in changed.diff
    (code / "__pycache__").mkdir()
    (code / "__pycache__" / "cited.pyc").touch()
    (code / "new.py").write_text("a = 1\n")
    more = repository.__wrapped__(code)
    assert more.changed == ["cited.py", "new.py"] and more.diff == changed.diff
    (code / "new.py").write_text("a = 2\n")
    digests = {changed.digest, more.digest, repository.__wrapped__(code).digest}
    assert len(digests) == 3 and all(len(one) == 16 for one in digests)
    assert [one.folder for one in repositories(module_of(code), code)] == [str(code)]
    assert repositories(module_of(code.parent), code.parent) == []  # neither a file nor a .git


@pytest.mark.parametrize("name", SECRETS)
def test_no_secret_of_a_change_is_recorded(name: str, code: Path) -> None:
    (code / "cited.py").write_text(f"before = 1\n{SECRETS[name]}\nafter = 2\n")
    (code / ".env").write_text("X=hunter2\n")
    found = repository.__wrapped__(code)
    assert "+before = 1\n" in found.diff and "+after = 2\n" in found.diff and "***" in found.diff
    assert not any(secret in found.diff for secret in HIDDEN)
    assert found.changed == [".env", "cited.py"]


def test_what_is_no_secret_stays() -> None:
    lines = "+max_tokens = 512\n-key = None\n+pass_through: true,\n+tokens = read(path)\n"
    assert without_secrets(lines) == lines


def test_a_command_line_has_no_secrets() -> None:
    words = ["x.py", "data.hub_token=abc", "--password", "abc", "lr=1", "http://a:abc@b/c?sig=abc"]
    assert "abc" not in "".join(environment._command(words))
    assert environment._command(words)[4] == "lr=1"


def test_what_is_not_recorded_is_counted(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance_repositories, "_MOST_NAMES", 2)
    modules = {}
    for name in "abc":
        (code / f"{name}.py").touch()
        modules[name] = types.ModuleType(name)
        modules[name].__file__ = str(code / f"{name}.py")
    found = files_of_user(modules)
    assert list(found) == [str(code / "a.py"), str(code / "b.py"), "and 1 more"]
    assert found["and 1 more"] == "not recorded"
    state = repository.__wrapped__(code)
    assert state.changed == ["a.py", "b.py", "c.py"]
    assert state.fields()["changed"] == ["a.py", "b.py", "and 1 more"]


def test_a_job_records_its_environment(
    code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job's own module, a package that it imports, and a variable; no other variable."""
    (code / "cited.py").write_text(
        "import numpy as np\n\n"
        "def data():\n    return {'x': np.ones((8, 2)), 'y': np.arange(8) % 2}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(code))
    monkeypatch.setenv("MY_OWN_VARIABLE", "my-secret-word")
    monkeypatch.setenv("LOADEDMODULES", "gcc/13:openmpi/5")
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    job = ["run=run", "data.name=cited:data", "data.val_share=0.25", "framework=numpy"]
    try:
        assert main([*job, "model.name=linear", "batch.size=2", "max_steps=2"]) == 0
    finally:
        sys.modules.pop("cited", None)
    start = json.loads((tmp_path / "run/events.jsonl").read_text().splitlines()[0])
    found = start["environment"]
    written = json.loads((tmp_path / "run/environment.json").read_text())
    (diff,) = [text for folder, text in written.pop("diffs").items() if folder == str(code)]
    assert written == found and "+def data():" in diff
    (mine,) = [one for one in found["code"] if one["folder"] == str(code)]
    assert (mine["commit"], mine["changed"]) == (git(code, "rev-parse", "HEAD"), ["cited.py"])
    assert str(code / "cited.py") in found["files"]
    assert found["packages"]["numpy"] and found["modules"] == ["gcc/13", "openmpi/5"]
    assert found["variables"]["PYTHONHASHSEED"] == "7"
    text = json.dumps(written) + diff  # not hvdtrain's own diff, which may have this file
    assert "my-secret-word" not in text and "MY_OWN_VARIABLE" not in text
    rows = environment_of(read_run(Path("run")))
    assert "gcc/13" in rows["modules"]
    assert f"{code} at {mine['commit'][:12]}, 1 changed file ({mine['digest']})" in rows.values()


def test_a_run_folder_that_cannot_be_written_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environment.write_environment(tmp_path / "gone", {})
    assert "environment.json is not written: No such file or directory" in capsys.readouterr().err
