"""Names, options, and the pages that list them."""

from __future__ import annotations

import typing
from pathlib import Path

import pytest
from ranks import needs_extra

from hvdtrain.config import help, plugins
from hvdtrain.config.plugins import options_of
from hvdtrain.config.read import configure
from hvdtrain.config.sections.data import DataConfig
from hvdtrain.config.sections.model import ModelConfig
from hvdtrain.config.sections.optim import OptimConfig
from hvdtrain.core.extras import (
    archives,
    data_files,
    document_files,
    image_files,
    plugins_of_extras,
    tables,
    token_images,
)
from hvdtrain.errors import UserError, nearest

WIDTHS = "model.widths takes a list of 4, each a whole number: 'model.widths=[16,16,32,64]'"


def test_every_name_loads() -> None:
    for folder in ("data/datasets", "frameworks/torch/models", "optim", "frameworks"):
        for name in plugins.files(folder):
            assert callable(plugins.load(folder, name, "here").build)
    assert set(plugins.files("comm")) == {"single", "mpi", "horovod", "torchdist"}


def test_known_names() -> None:
    images = {
        "digits",
        "synthetic",
        "mnist",
        "fashion_mnist",
        "kmnist",
        "cifar10",
        "cifar100",
        *image_files(),
    }
    stored = {*data_files().values(), *tables().values(), *archives().values()}
    stored |= {*document_files().values(), *plugins_of_extras("data/datasets")}
    assert images | stored | {*token_images(), "text"} == set(plugins.files("data/datasets"))
    assert {"wide_resnet", "resnet18", "resnet50", "mlp", "linear"} <= set(
        plugins.files("frameworks/torch/models")
    )
    assert set(plugins.files("frameworks")) == {"torch", "numpy", "jax", "keras"}
    assert set(plugins.files("optim")) == {
        "sgd",
        "lars",
        "larc",
        "lamb",
        "novograd",
        "adam",
        "adamw",
        "muon",
    }
    assert set(plugins.files("frameworks/jax/models")) == {
        "linear",
        "mlp",
        "convnet",
        "gpt",
        "unet",
        "wide_resnet",
        *(f"resnet{d}" for d in (8, 14, 18, 20, 32, 34, 44, 50, 56, 101, 110, 152)),
    }


def test_a_long_list_of_known_names_is_cut() -> None:
    names = [f"name{number:02}" for number in range(30)]
    assert nearest("zzz", names) == f"known: {', '.join(names[:24])}, and 6 more" and nearest(
        "name7", names
    ).startswith("did you mean name")


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
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
    """Only those that are set: build() has the defaults."""
    for section, folder, converted in (
        (DataConfig(name="synthetic", shape=[4, 4, 1]), "data/datasets", {"shape": (4, 4, 1)}),
        *[
            (
                DataConfig(name="folder", cache="/x", size=None),
                "data/datasets",
                {"cache": Path("/x"), "size": None},
            )
        ]
        * ("folder" in image_files()),
        (
            ModelConfig(name="mlp", widths=[4, 5], dropout=1),
            "frameworks/torch/models",
            {"widths": (4, 5), "dropout": 1.0},
        ),
        (ModelConfig(name="mlp"), "frameworks/jax/models", {}),
        (OptimConfig(name="larc", mode="scale"), "optim", {"mode": "scale"}),
    ):
        options = plugins.convert_options(section, folder)
        assert options == converted and [type(option) for option in options.values()] == [
            type(option) for option in converted.values()
        ]


def test_options_are_the_parameters_of_build() -> None:
    """Read from the source, as Python has them."""
    for folder in ("data/datasets", "frameworks/torch/models", "optim"):
        for name, path in plugins.files(folder).items():
            build = plugins.load(folder, name, "here").build
            hints = {
                option: hint
                for option, hint in typing.get_type_hints(build).items()
                if option in (build.__kwdefaults__ or {})
            }
            fields = options_of(path).model_fields
            assert {option: field.annotation for option, field in fields.items()} == hints
            assert {option: field.default for option, field in fields.items()} == (
                build.__kwdefaults__ or {}
            )


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
        (
            "data.samplng=partition",
            "data.name=digits has no option samplng",
            "did you mean sampling?",
        ),
        ("data.name=nonsense", "unknown name: nonsense", "known: "),
        ("framework=theano", "unknown name: theano", "known: jax, keras, numpy, torch"),
        pytest.param(
            *("framework=tensorflow", "unknown name: tensorflow", "did you mean keras?"),
            marks=needs_extra("other_words"),
        ),
        pytest.param(
            *("comm.engine=nccl", "unknown name: nccl", "did you mean torchdist?"),
            marks=needs_extra("other_words"),
        ),
    ],
)
def test_names_and_options_are_checked_before_anything_is_imported(
    word: str, what: str, fix: str
) -> None:
    config = configure(None, [word])
    with pytest.raises(UserError) as caught:
        plugins.check_names(config)
    assert caught.value.what == what
    assert "command line" in caught.value.where
    assert fix in caught.value.fix


def test_good_names_and_options_pass() -> None:
    for words in (
        [],
        ["model.name=mlp", "model.widths=[3]"],
        ["model.name=my.own:Model", "model.anything=1"],
        *[["data.name=folder", "data.size=3"]] * ("folder" in image_files()),
    ):
        plugins.check_names(configure(None, words))


@pytest.mark.parametrize(
    ("word", "what", "fix"),
    [
        ("model.widths=abc", "wrong value for model.widths: 'abc'", WIDTHS),
        (
            "model.widths=[1, '5', 1, 1]",
            "wrong value for model.widths: [1, '5', 1, 1]",
            WIDTHS,
        ),
        ("model.widths=[1, 2]", "wrong value for model.widths: [1, 2]", WIDTHS),
        ("model.widths=null", "wrong value for model.widths: None", WIDTHS),
        (
            "model.dropout=[1]",
            "wrong value for model.dropout: [1]",
            "model.dropout takes a number: model.dropout=0.01",
        ),
        (
            "optim.nesterov=1",
            "wrong value for optim.nesterov: 1",
            "optim.nesterov takes true or false",
        ),
    ],
)
def test_an_option_of_the_wrong_type(word: str, what: str, fix: str) -> None:
    """Found when the configuration is read: nothing is imported for it."""
    with pytest.raises(UserError) as caught:
        plugins.check_names(configure(None, [word]))
    assert (caught.value.what, caught.value.where, caught.value.fix) == (
        what,
        f"{word.partition('=')[0]}, command line",
        fix,
    )


def test_dotted_names() -> None:
    assert plugins.load_dotted("faulty:Faulty", "model.name").__name__ == "Faulty"
    for name, what in (
        ("faulty:Nothing", "faulty has no Nothing"),
        ("no_such:Thing", "no module named no_such"),
        ("faulty:os", "neither a class"),
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
    assert "model.widths=[16,16,32,64]         channels of the stem" in help.help_text("model")
    assert "data.name=mnist|fashion_mnist|kmnist" in help.help_text("data")
    with pytest.raises(UserError, match="no such key or section: bath"):
        help.help_text("bath")


def test_every_option_is_documented() -> None:
    for section in ("data", "model", "optim"):
        for line in help.help_text(section).splitlines():
            if line.startswith("  "):
                assert len(line.split(None, 1)) == 2 or len(line) > 36, f"no text for {line}"
                assert line[36:].strip(), f"no text for {line}"


def test_a_misspelt_class_and_a_misspelt_choice_are_answered_with_the_right_one() -> None:
    with pytest.raises(UserError) as caught:
        plugins.load_dotted("torch.optim.RMSPROP", "optim.name")
    assert (caught.value.what, caught.value.fix) == (
        "torch.optim has no RMSPROP",
        "write package.module:Class; did you mean RMSprop?",
    )
    config = configure(None, ["optim.name=larc", "optim.mode=clap"])
    with pytest.raises(UserError) as caught:
        plugins.check_names(config)
    assert caught.value.fix == "optim.mode takes one of 'clip', 'scale'; did you mean clip?"


def test_the_description_of_an_option_may_take_several_lines(tmp_path: Path) -> None:
    path = tmp_path / "wide.py"
    path.write_text(
        '"""A model whose first paragraph\ntakes two lines.\n\nMore of it."""\n\n\n'
        "def build(*, width: int = 3, depth: int = 2) -> None:\n"
        '    """A model.\n\n    width: neurons of each layer,\n        or of all\n    depth: '
        'layers\n\n    Raises nothing.\n    """\n'
    )
    fields = options_of(path).model_fields
    assert {name: field.description for name, field in fields.items()} == {
        "width": "neurons of each layer, or of all",
        "depth": "layers",
    }
    assert help._first_paragraph(path) == "A model whose first paragraph takes two lines."


@pytest.mark.parametrize(
    "name", ["cifar_resnet", "convnet", "gpt", "linear", "mlp", "resnet", "unet", "wide_resnet"]
)
def test_a_model_has_the_same_options_in_torch_and_in_jax(name: str) -> None:
    """Names, types, defaults and texts."""
    of_torch, of_jax = (
        options_of(plugins.PACKAGE / "frameworks" / framework / "models" / f"{name}.py")
        for framework in ("torch", "jax")
    )
    assert of_torch.model_json_schema() == of_jax.model_json_schema()
