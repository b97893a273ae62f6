"""What the words after -- start: hvdtrain, a script, a module or another program."""

from __future__ import annotations

import pytest

from hvdtrain.core.extras import commands
from hvdtrain.errors import UserError
from hvdtrain.extras.launch.words import Program, read_program


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], Program("hvdtrain", ())),
        (["model.name=my.py"], Program("hvdtrain", ("model.name=my.py",))),
        (["a.py", "-np", "2"], Program("script", ("a.py", "-np", "2"))),
        (["python", "a.py"], Program("script", ("a.py",))),
        (["python3", "-m", "tool", "x"], Program("module", ("tool", "x"))),
        (["python", "-u", "a.py"], Program("program", ("python", "-u", "a.py"))),
        (["python"], Program("program", ("python",))),
        (["sh", "-c", "echo a; b"], Program("program", ("sh", "-c", "echo a; b"))),
    ],
)
def test_what_the_words_start(words: list[str], expected: Program) -> None:
    assert read_program(words, ["-np"]) == expected


def test_every_command_of_hvdtrain_runs_on_ranks_or_is_refused() -> None:
    assert read_program(["train"], []) == Program("hvdtrain", ("train",))
    for name in ("list", "extras", *commands()):
        if name in commands() and commands()[name].launched:
            assert read_program([name], []) == Program("hvdtrain", (name,))
        else:
            with pytest.raises(UserError, match=f"'{name}' is not something that launch can start"):
                read_program([name], [])


READ = [
    (["python", "-m", "pkg.train", "a"], ("module", "pkg.train", "a")),
    (["-m", "pkg.train", "a"], ("module", "pkg.train", "a")),
    (["python3", "x.py", "a"], ("script", "x.py", "a")),
    (["python", "-m", "hvdtrain", "epochs=1"], ("hvdtrain", "epochs=1")),
    (["hvdtrain", "train", "epochs=1"], ("hvdtrain", "train", "epochs=1")),
    (["python", "-c", "pass"], ("program", "python", "-c", "pass")),
    (["hvdtrain"], ("program", "hvdtrain")),
]


@pytest.mark.parametrize(("words", "expected"), READ)
def test_words_as_after_mpirun(words: list[str], expected: tuple[str, ...]) -> None:
    program = read_program(words, ["-np"])
    assert (program.kind, *program.words) == expected
