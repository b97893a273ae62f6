"""--help: of each command, of a key, of an option; and the choices of every key."""

from __future__ import annotations

import re
import typing

import pytest
from ranks import needs_extra

from hvdtrain.__main__ import main
from hvdtrain.config import help, plugins
from hvdtrain.config.plugins import options_of
from hvdtrain.config.schema import SECTIONS, known_keys
from hvdtrain.core import extras
from hvdtrain.errors import MEANINGS, UserError


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", ["train", "list", "extras", *extras.commands()])
def test_each_command_has_help_of_its_own(capsys: pytest.CaptureFixture[str], command: str) -> None:
    page = said(capsys, command, "--help")
    assert (
        re.search(rf"hvdtrain \[?{command}\b", page.splitlines()[0]) and len(page.splitlines()) < 30
    )
    assert said(capsys, command, "-h") == said(capsys, "--help", command) == page
    extra = extras.commands().get(command)
    pages = [extras.list_text()] if extra else []
    if extra is None or extra.listed_at:
        pages.append(help.help_text(None))
    assert all(f"hvdtrain {command}" in page for page in pages) or command in (
        "train",
        "list",
        "schema",
    )


def test_the_keys_that_most_jobs_set_have_the_rows_of_all_keys(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """--help keys: at most 45 of them, wrapped, in the order and with the text of --help
    all-keys."""
    everyday, every = said(capsys, "--help", "keys"), said(capsys, "--help", "all-keys")
    assert max(len(line) for line in everyday.splitlines()) <= 118
    paragraphs = re.split(r"\n(?=\n|  \S)", everyday)[1:-1]
    rows = [" ".join(each.split()) for each in paragraphs if each.strip()]
    lines = [" ".join(line.split()) for line in every.splitlines() if line.startswith("  ")]
    assert len(lines) == len(known_keys()) and 40 <= len(rows) <= 45
    assert rows == [line for line in lines if line in rows]
    assert everyday.endswith(
        f"{len(lines) - len(rows)} more keys: --help all-keys; one section: --help optim\n"
    )


def test_the_help_of_the_program_fits_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, "--help").splitlines()
    assert 24 <= len(lines) <= 40 and max(map(len, lines)) <= 130
    listed = re.split(
        r"\W+",
        "\n".join(line for line in lines if line.startswith(("Sections: ", "Keys without", "  "))),
    )
    assert not {*SECTIONS, "epochs", "seed"} - {*listed}
    assert [line.split()[0] for line in lines[lines.index("Exit codes:") + 1 :]] == [
        str(code) for code in MEANINGS
    ]


def test_the_help_of_a_job_names_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert all(
        option in said(capsys, "train", "--help")
        for option in ("--config", "--max-time", "--print-config", *extras.modes("train"))
    )
    assert said(capsys, "train", "--help", "batch.size") == said(capsys, "--help", "batch.size")


@pytest.mark.parametrize(
    ("topic", "expected"),
    [
        (
            "batch.size",
            "batch.size: default 64\n  global batch: samples per step, summed over all ranks\n  "
            "takes a whole number: 1 or more",
        ),
        ("comm.op", "takes one of 'mean', 'adasum'"),
        ("comm.reduce", "takes one of 'auto', 'distributed_optimizer', 'ddp', 'bucket'"),
        (
            "stop.target",
            "stop.target: default nothing\n  value of the task's objective at which the job "
            "stops; with task.name=classification the validation accuracy\n",
        ),
        ("log.trackers", "takes a list, each a text"),
        (
            "optim.mode",
            "optim.name=larc: LARC: LARS whose trust ratio can lower the learning rate of a "
            "layer but not raise it.\n  optim.mode=clip",
        ),
        ("model.widths", "model.name=mlp with framework=jax: "),
    ],
)
def test_the_help_of_a_key_or_an_option(topic: str, expected: str) -> None:
    page = help.help_text(topic)
    assert expected in page
    assert "model.dropout" not in page and "optim.trust" not in page  # the other options


@pytest.mark.parametrize("key", known_keys())
def test_every_key_has_help(key: str) -> None:
    assert help.help_text(key).startswith(f"{key}: default ")


@pytest.mark.parametrize(
    ("topic", "fix"),
    [
        pytest.param("lr", "did you mean optim.base_lr?", marks=needs_extra("other_words")),
        ("optm", "did you mean optim?"),
        ("model.zzz", "known: model.name, model.loss"),
    ],
)
def test_an_unknown_topic(topic: str, fix: str) -> None:
    with pytest.raises(UserError, match="no such key or section") as caught:
        help.help_text(topic)
    assert caught.value.fix.startswith(fix)


def test_the_description_of_a_key_names_every_choice() -> None:
    options = [
        options_of(path).model_fields
        for folder in plugins.ALIASES
        for path in plugins.files(folder).values()
    ]
    found = 0
    for fields in (known_keys(), *options):
        for key, info in fields.items():
            choices = (
                typing.get_args(info.annotation)
                if typing.get_origin(info.annotation) is typing.Literal
                else ()
            )
            found += len(choices)
            for choice in choices:
                assert re.search(
                    rf"(?<![\w-]){re.escape(str(choice))}(?![\w-])", info.description or ""
                ), f"{key}={choice}"
    assert found > 50


def test_the_help_of_a_command_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian", "--help"]) == 2
    assert (
        "there is no command trian\n  where: command line\n  fix: did you mean train?"
        in capsys.readouterr().err
    )
    assert main(["train.py", "--lr", "1"]) == 2
    wanted = (
        "train.py is a script, not a command or a key of a job\n  where: command line\n  fix: "
        "hvdtrain launch -np 2 -- train.py on "
    )
    assert wanted in capsys.readouterr().err
    assert main(["list", "--help"]) == 0 and main(["epochs=1", "--help"]) == 0
