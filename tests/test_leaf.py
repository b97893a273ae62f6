"""Names, options, and the pages that list them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain import leaf, manual
from hvdtrain.configure import Origins
from hvdtrain.errors import UserError


def build(name: str, *, widths: tuple[int, ...] = (3,), root: Path | None = None, ratio: float = 0.5) -> None:
    """A leaf's entry."""


def test_every_name_loads() -> None:
    for folder in ("data", "models", "optim", "frames"):
        for name in leaf.files(folder):
            assert callable(leaf.load(folder, name, "here").build)
    assert set(leaf.files("comm")) == {"single", "mpi", "horovod"}


def test_known_names() -> None:
    assert {"digits", "synthetic", "mnist", "fashion_mnist", "kmnist", "cifar10", "cifar100", "folder"} == set(leaf.files("data"))
    assert {"wide_resnet", "resnet18", "resnet50", "mlp", "linear"} <= set(leaf.files("models"))
    assert set(leaf.files("frames")) == {"torch", "numpy"}


def test_an_unknown_name_is_told_the_nearest() -> None:
    with pytest.raises(UserError) as caught:
        leaf.load("models", "wide_resnt", "model.name, x.yaml:3")
    assert caught.value.what == "unknown name: wide_resnt"
    assert caught.value.where == "model.name, x.yaml:3"
    assert "did you mean wide_resnet?" in caught.value.fix


def test_a_name_never_leaves_its_folder() -> None:
    for name in ("../errors", "os", "on_torch", "sampler"):
        with pytest.raises(UserError, match="unknown name"):
            leaf.load("data", name, "here")


def test_options_are_converted_to_their_annotations() -> None:
    given = {"widths": [4, "5"], "ratio": 1, "root": "/x"}
    assert leaf.check_options(build, given, "model", Origins()) == {"widths": (4, 5), "ratio": 1.0, "root": Path("/x")}


def test_an_unknown_option_lists_the_known_ones_with_defaults() -> None:
    with pytest.raises(UserError) as caught:
        leaf.check_options(build, {"width": 3}, "model", Origins({"model.width": "x.yaml:7"}))
    assert caught.value.what == "no such option: model.width"
    assert caught.value.where == "model.width, x.yaml:7"
    assert "widths=(3,), root=None, ratio=0.5" in caught.value.fix
    assert "did you mean widths?" in caught.value.fix


@pytest.mark.parametrize(("name", "value"), [("widths", "abc"), ("widths", [1, "x"]), ("ratio", [1]), ("widths", None)])
def test_an_option_of_the_wrong_type(name: str, value: object) -> None:
    with pytest.raises(UserError) as caught:
        leaf.check_options(build, {name: value}, "model", Origins())
    assert f"wrong value for model.{name}" in caught.value.what
    assert f"model.{name} takes" in caught.value.fix


def test_dotted_names() -> None:
    assert leaf.load_dotted("faulty:Faulty", "model.name").__name__ == "Faulty"
    for name, what in (
        ("faulty:Nothing", "faulty has no Nothing"),
        ("no_such:Thing", "no module named no_such"),
        ("faulty:os", "no class"),
    ):
        with pytest.raises(UserError, match=what):
            leaf.load_dotted(name, "model.name")


def test_list_and_help_show_every_name_and_option() -> None:
    page = manual.list_text()
    for folder in leaf.ALIASES:
        for name in leaf.files(folder):
            assert f"  {name}" in page
    assert "model.widths=(16, 16, 32, 64)      channels of the stem" in manual.help_text("model")
    assert "data.name=mnist|fashion_mnist|kmnist" in manual.help_text("data")
    with pytest.raises(UserError, match="no such section: bath"):
        manual.help_text("bath")


def test_every_option_is_documented() -> None:
    for section in ("data", "model", "optim"):
        for line in manual.help_text(section).splitlines():
            if line.startswith("  "):
                assert len(line.split(None, 1)) == 2 or len(line) > 36, f"no text for {line}"
                assert line[36:].strip(), f"no text for {line}"
