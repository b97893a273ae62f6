"""--json: with a file, with -, and without a value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ranks import needs_extra

from hvdtrain.__main__ import main
from hvdtrain.cli.output import with_json_value


@pytest.mark.parametrize(
    ("arguments", "completed"),
    [
        ("--json", "--json -"),
        ("--json epochs=1", "--json - epochs=1"),
        ("--json --ranks 2", "--json - --ranks 2"),
        ("--json - epochs=1", "--json - epochs=1"),
        ("--json file epochs=1", "--json file epochs=1"),
        ("--json=file", "--json=file"),
        ("tests --json", "tests --json -"),
        ("epochs=1 --json", "epochs=1 --json -"),
        ("", ""),
    ],
)
def test_a_json_without_a_value_is_the_standard_output(arguments: str, completed: str) -> None:
    assert with_json_value(arguments.split()) == completed.split()


@pytest.mark.parametrize(
    "arguments", [["--json", "RUN"], ["--json=RUN"], ["--json", "RUN", "epochs=1"]]
)
@pytest.mark.parametrize(
    "command", [pytest.param(name, marks=needs_extra(name)) for name in ("evaluate", "check")]
)
def test_a_folder_is_not_taken_for_the_file(
    command: str, arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [argument.replace("RUN", str(tmp_path)) for argument in arguments]
    assert main([*command.split(), *words]) == 2
    said = capsys.readouterr()
    fix = "where: --json\n  fix: a file: --json=FILE; or --json - for the standard output"
    assert (
        f"{tmp_path.name} is a folder, and --json takes it for its FILE\n  {fix}" in said.err
        and not said.out
    )


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main(arguments) == 0
    return json.loads(capsys.readouterr().out)


@needs_extra("check")
def test_a_check_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    report = printed(
        capsys, "check", "--json", "framework=numpy", "model.name=linear", "comm.engine=single"
    )
    assert report["exit_code"] == 0 and len(report["ranks"]) == 1
