"""Names, options, and the pages that list them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain.config import help, plugins
from hvdtrain.config.read import Provenance, configure
from hvdtrain.errors import UserError


def build(name: str, *, widths: tuple[int, ...] = (3,), root: Path | None = None, ratio: float = 0.5) -> None:
    """A leaf's entry."""


def test_every_name_loads() -> None:
    for folder in ("data/datasets", "frameworks/torch/models", "optim", "frameworks"):
        for name in plugins.files(folder):
            assert callable(plugins.load(folder, name, "here").build)
    assert set(plugins.files("comm")) == {"single", "mpi", "horovod", "torchdist"}


def test_known_names() -> None:
    assert {"digits", "synthetic", "mnist", "fashion_mnist", "kmnist", "cifar10", "cifar100", "folder", "webdataset"} == set(
        plugins.files("data/datasets")
    )
    assert {"wide_resnet", "resnet18", "resnet50", "mlp", "linear"} <= set(plugins.files("frameworks/torch/models"))
    assert set(plugins.files("frameworks")) == {"torch", "numpy", "jax"}
    assert set(plugins.files("optim")) == {"sgd", "lars", "larc", "lamb", "novograd", "adam", "adamw"}
    assert set(plugins.files("frameworks/jax/models")) == {"linear", "mlp", "convnet"}


def test_an_unknown_name_is_told_the_nearest() -> None:
    with pytest.raises(UserError) as caught:
        plugins.load("frameworks/torch/models", "wide_resnt", "model.name, x.yaml:3")
    assert caught.value.what == "unknown name: wide_resnt"
    assert caught.value.where == "model.name, x.yaml:3"
    assert "did you mean wide_resnet?" in caught.value.fix


def test_a_name_never_leaves_its_folder() -> None:
    for name in ("../errors", "os", "on_torch", "sampler"):
        with pytest.raises(UserError, match="unknown name"):
            plugins.load("data/datasets", name, "here")


def test_options_are_converted_to_their_annotations() -> None:
    given = {"widths": [4, 5], "ratio": 1, "root": "/x"}
    assert plugins.check_options(build, given, "model", Provenance()) == {"widths": (4, 5), "ratio": 1.0, "root": Path("/x")}


@pytest.mark.parametrize(
    ("word", "what", "fix"),
    [
        (
            "model.widhts=3",
            "model.name=wide_resnet has no option widhts",
            "did you mean widths? options of wide_resnet: widths=",
        ),
        ("model.nmae=mlp", "model.name=wide_resnet has no option nmae", "did you mean name?"),
        ("optim.base_rl=0.1", "optim.name=sgd has no option base_rl", "did you mean base_lr?"),
        ("data.samplng=partition", "data.name=digits has no option samplng", "did you mean sampling?"),
        ("data.name=nonsense", "unknown name: nonsense", "known: "),
        ("framework=tensorflow", "unknown name: tensorflow", "known: jax, numpy, torch"),
        ("comm.engine=nccl", "unknown name: nccl", "known: horovod, mpi, single"),
    ],
)
def test_names_and_options_are_checked_before_anything_is_imported(word: str, what: str, fix: str) -> None:
    config, provenance = configure(None, [word])
    with pytest.raises(UserError) as caught:
        plugins.check_names(config, provenance)
    assert caught.value.what == what
    assert "command line" in caught.value.where
    assert fix in caught.value.fix


def test_good_names_and_options_pass() -> None:
    for words in (
        [],
        ["model.name=mlp", "model.widths=[3]"],
        ["model.name=my.own:Model", "model.anything=1"],
        ["data.name=folder", "data.size=3"],
    ):
        plugins.check_names(*configure(None, words))


@pytest.mark.parametrize(("name", "value"), [("widths", "abc"), ("widths", [1, "5"]), ("ratio", [1]), ("widths", None)])
def test_an_option_of_the_wrong_type(name: str, value: object) -> None:
    with pytest.raises(UserError) as caught:
        plugins.check_options(build, {name: value}, "model", Provenance())
    assert f"wrong value for model.{name}" in caught.value.what
    assert f"model.{name} takes" in caught.value.fix


def test_dotted_names() -> None:
    assert plugins.load_dotted("faulty:Faulty", "model.name").__name__ == "Faulty"
    for name, what in (
        ("faulty:Nothing", "faulty has no Nothing"),
        ("no_such:Thing", "no module named no_such"),
        ("faulty:os", "no class"),
        (":Class", "names no class"),
        (".foo:Bar", "names no class"),
        ("faulty:", "names no class"),
    ):
        with pytest.raises(UserError, match=what):
            plugins.load_dotted(name, "model.name")


def test_list_and_help_show_every_name_and_option() -> None:
    page = help.list_text()
    for folder in plugins.ALIASES:
        for name in plugins.files(folder):
            assert f"  {name}" in page
    assert "model.widths=(16, 16, 32, 64)      channels of the stem" in help.help_text("model")
    assert "data.name=mnist|fashion_mnist|kmnist" in help.help_text("data")
    with pytest.raises(UserError, match="no such section: bath"):
        help.help_text("bath")


def test_every_option_is_documented() -> None:
    for section in ("data", "model", "optim"):
        for line in help.help_text(section).splitlines():
            if line.startswith("  "):
                assert len(line.split(None, 1)) == 2 or len(line) > 36, f"no text for {line}"
                assert line[36:].strip(), f"no text for {line}"


def test_a_misspelt_class_and_a_misspelt_choice_are_told_the_right_one() -> None:
    with pytest.raises(UserError) as caught:
        plugins.load_dotted("torch.optim.RMSPROP", "optim.name")
    assert (caught.value.what, caught.value.fix) == ("torch.optim has no RMSPROP", "write package.module:Class; did you mean RMSprop?")
    config, provenance = configure(None, ["optim.name=larc", "optim.mode=clap"])
    with pytest.raises(UserError) as caught:
        plugins.check_options(plugins.load("optim", "larc", "").build, config.optim.options, "optim", provenance)
    assert caught.value.fix == "optim.mode takes one of 'clip', 'scale'"
