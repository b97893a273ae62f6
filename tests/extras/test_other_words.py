"""Words of other tools: each is answered with the key, the value or the option that it means
here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ranks import ROOT

from hvdtrain.__main__ import run_command
from hvdtrain.config import plugins
from hvdtrain.config.read import configure
from hvdtrain.config.schema import SECTIONS, known_keys
from hvdtrain.core.extras import tables
from hvdtrain.errors import UserError
from hvdtrain.extras.other_words.answers import KEYS, NO_KEYS, NO_VALUES, VALUES


def fix_of(*arguments: str) -> str:
    with pytest.raises(UserError) as caught:
        run_command([*arguments, "--print-config"])
    return caught.value.fix


def is_right(*arguments: str) -> bool:
    """Raises UserError where hvdtrain does not take them."""
    plugins.check_names(configure(None, arguments))
    return True


@pytest.mark.parametrize(
    ("arguments", "fix"),
    [
        (["lr=0.1"], "did you mean optim.base_lr?"),
        (["optim.lr=0.1"], "did you mean optim.base_lr? options of sgd: nesterov=false"),
        (["learning_rate=0.1"], "did you mean optim.base_lr?"),
        (["--learning-rate=0.1"], "did you mean optim.base_lr?"),
        (["batch_size=32"], "did you mean batch.size?"),
        (
            ["workers=4"],
            "data.readers=N sets threads that read, data.workers=N processes; ranks are started "
            "by mpirun -np N, or launch -np N",
        ),
        (["loss=mse"], "did you mean model.loss?"),
        (["criterion=mse"], "did you mean model.loss=squared_error?"),
        (
            ["model.loss=mse"],
            "model.loss takes one of 'cross_entropy', 'squared_error'; did you mean squared_error?",
        ),
        (["train", "mse"], "write model.loss=squared_error"),
        (["optim.name=RMSprop"], "did you mean torch.optim.RMSprop?"),
        (["optim.name=SGD"], "did you mean sgd?"),
        (["--epochs", "2"], "write epochs=2"),
        (["--epoch", "2"], "write epochs=2"),
        (["--lr", "0.1"], "write optim.base_lr=0.1"),
        (["--batch-size", "32", "--lr", "0.1"], "write batch.size=32"),
        (["--batch-size"], "write batch.size=VALUE"),
        (["--no-cuda"], "write speed.device=cpu"),
        (
            ["-np", "2"],
            "ranks are started by mpirun -np N, or launch -np N; each takes a GPU of its own",
        ),
        (["x.yaml"], "write --config x.yaml"),
        (["train", "configs/x.yml"], "write --config configs/x.yml"),
        (["--cofig", "x.yaml"], "did you mean --config?"),
        (["trian"], "did you mean train? commands: train, "),
        (["lsit"], "did you mean list? commands: train, "),
        (["list", "models"], "hvdtrain list"),
        (
            ["model=resnet"],
            "model is a section: write model.name=resnet18; --help model lists its keys",
        ),
        (["--momentum", "0.9"], "write optim.momentum=0.9"),
        (["--nesterov"], "write optim.nesterov=true"),
        (["help"], "hvdtrain --help; --help KEY shows one key"),
        (["-v"], "--version prints the version; "),
        (["epochs", "=", "3"], "write epochs=3, without spaces"),
        (["seed=1", "--lr", "=0.1"], "write optim.base_lr=0.1, without spaces"),
        (["epochs=", "3"], "write epochs=3, without spaces"),
        (
            ["log.trackers=tensorboard"],
            "log.trackers takes a list, each a text: 'log.trackers=[tensorboard]'",
        ),
        (
            ["augment.color_jitter=0.4"],
            "augment.color_jitter takes a list of at most 4, each a number: "
            "'augment.color_jitter=[0.4]'",
        ),
        (
            ["augment.color_jitter=[0.4,0.4,0.4,0.1,0.1]"],
            "augment.color_jitter takes a list of at most 4, each a number: "
            "'augment.color_jitter=[0.4,0.4,0.4,0.1]'",
        ),
        (["--deepspeed", "ds.json"], "docs/memory.md lists DeepSpeed's keys"),
        (["data=./photos"], "data is a section: write data.name=folder data.root=./photos; "),
        (["data.name=/data/photos"], "data.name=folder data.root=/data/photos"),
        *(
            (
                (
                    ["data=x.csv"],
                    "data is a section: write data.name=csv data.root=x.csv (docs/science-data.md)",
                ),
                (["data.name=x.CSV"], "data.name=csv data.root=x.CSV"),
                (["run.npz"], "write data.name=npz data.root=run.npz"),
            )
            if tables()
            else ()
        ),
        (
            ["data=x.json"],
            "data is a section: write data.name=mydata:load, where load() in mydata.py is yours "
            "and reads x.json (docs/own-data.md)",
        ),
        (["data.name=book.txt"], "data.name=text data.root=book.txt"),
    ],
)
def test_words_that_people_try(arguments: list[str], fix: str) -> None:
    assert fix_of(*arguments).startswith(fix)


def test_a_folder_is_data_or_a_run(tmp_path: Path) -> None:
    assert fix_of(f"{tmp_path}") == f"write data.name=folder data.root={tmp_path}"
    (tmp_path / "config.yaml").touch()
    assert fix_of(f"{tmp_path}") == f"write resume={tmp_path}"


def test_each_key_of_deepspeed_is_answered_as_the_page_says(tmp_path: Path) -> None:
    """The rows of docs/memory.md, each name as a key of a YAML file: nested, as DeepSpeed's own."""
    page = (
        (ROOT / "docs" / "memory.md")
        .read_text(encoding="utf-8")
        .partition("## DeepSpeed's keys")[2]
    )
    rows = [line.split("|")[1:3] for line in page.splitlines() if line.startswith("| `")]
    names = [
        (name, there) for here, there in rows for name in re.findall(r"`([\w.]+)(?:: \w+)?`", here)
    ]
    assert len(names) > 20
    for name, there in names:
        if name in ("weight_decay", "betas") or name.startswith(
            "deepspeed."
        ):  # keys here too, and a function
            continue
        path = tmp_path / "ds.yaml"
        path.write_text(f"{name.replace('.', ': {')}: 1{'}' * name.count('.')}\n", encoding="utf-8")
        fix = fix_of("--config", f"{path}")
        keys = re.findall(r"`(\w+\.\w+)", there)
        assert (
            any(key in fix for key in keys)
            if keys
            else "known:" not in fix and "did you mean" not in fix
        ), (name, fix)


@pytest.mark.parametrize("word", KEYS)
def test_each_key_of_other_tools_means_one_that_is_known(word: str) -> None:
    right = KEYS[word]
    assert word not in known_keys() and word == word.lower().replace("-", "_")
    assert right in known_keys() or is_right(right.replace("'", ""))
    answer = fix_of(f"{word}=[]")
    assert answer.startswith(
        f"{word} is a section: write {right}" if word in SECTIONS else f"did you mean {right}?"
    )


@pytest.mark.parametrize("word", NO_KEYS)
def test_what_no_key_sets_is_answered_with_what_does(word: str) -> None:
    assert fix_of(f"{word}=3") == fix_of(f"--{word}", "3") == NO_KEYS[word]


@pytest.mark.parametrize("word", NO_KEYS)
def test_what_an_answer_says_to_set_is_accepted(word: str) -> None:
    for assignment in re.findall(r"\b[a-z]+\.[a-z_]+=[a-z0-9]+\b", NO_KEYS[word]):
        assert is_right(assignment), assignment


def is_here(key: str, value: str) -> bool:
    """Whether this copy has the plugin of an answer, which may be in an extra that it lacks."""
    folder = {"data.name": "data/datasets", "task.name": "tasks"}.get(key)
    return folder is None or value in plugins.files(folder)


@pytest.mark.parametrize(
    ("key", "word"),
    [
        (key, word)
        for key, words in VALUES.items()
        for word, right in words.items()
        if is_here(key, right)
    ],
)
def test_each_value_of_other_tools_means_one_that_is_known(key: str, word: str) -> None:
    right = VALUES[key][word]
    wrong_one, right_one = (
        f"{key}=[{each}]" if key == "log.trackers" else f"{key}={each}" for each in (word, right)
    )
    assert is_right("model.name=linear", right_one)  # linear is a model of every framework
    assert word == word.lower() and f"did you mean {right}?" in fix_of(wrong_one)


@pytest.mark.parametrize(
    ("key", "word"), [(key, word) for key, words in NO_VALUES.items() for word in words]
)
def test_a_value_that_is_not_supported_is_answered_with_what_is(key: str, word: str) -> None:
    fix = fix_of(f"{key}={word}")
    assert fix == fix_of(f"{key}={word.upper()}")
    listed = "speed.device takes one of 'auto', 'cpu', 'cuda', 'xpu'; "
    assert fix == f"{listed * (key == 'speed.device')}{NO_VALUES[key][word]}"


def test_an_option_of_an_own_class_is_answered_with_its_parameter() -> None:
    from hvdtrain.frameworks.by_name import build_model
    from hvdtrain.tasks.classification import Classification

    task = Classification((8, 8, 1), 10, None, None)  # type: ignore[arg-type]
    for words, fix in (
        (
            ["model.name=torch.nn:Linear", "model.in_feature=3"],
            "did you mean model.in_features? give its parameters as model.<name>=<value>",
        ),
        (
            ["model.name=torch.nn:Linear", "model.in_features=3"],
            "give its parameters as model.<name>=<value>",
        ),
        (["model.name=torch.nn:Linear", "model.lss=3"], "did you mean model.loss?"),
    ):
        with pytest.raises(UserError, match="does not fit") as caught:
            build_model(configure(None, words), task, "frameworks/torch/models")
        assert caught.value.fix.startswith(fix)
