"""The command `plan`: how tests call it."""

from __future__ import annotations

import pytest

from hvdtrain.__main__ import main


def without_data(samples: int, image: str, classes: int) -> list[str]:
    """The arguments of a plan for data that is not there."""
    return ["--samples", str(samples), "--image", image, "--classes", str(classes)]


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """The lines of a plan."""
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The message of a plan that is refused, which prints nothing else."""
    assert main(["plan", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err[:10]) == ("", "hvdtrain: ")
    return err
