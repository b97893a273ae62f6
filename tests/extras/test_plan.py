"""What `plan` prints and draws, against numbers worked out by hand; its errors; and what it does
not import."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from plan_command import planned, refused, without_data
from ranks import needs_extra, python

from hvdtrain.__main__ import main
from hvdtrain.config.read import configure
from hvdtrain.extras.plan.forecast.layers import LayerRange
from hvdtrain.tasks.classification import without_statistics

IMAGENET = without_data(1281167, "224x224x3", 1000)
GOYAL = ["model.name=resnet50", "optim.base_lr=0.1", "optim.base_batch=256", "batch.per_rank=32", "epochs=90", "recipe.warmup=5",  # noqa: E501
         "recipe.schedule=steps", "recipe.milestones=[30,60,80]", "optim.weight_decay=1e-4"]  # fmt: skip  # noqa: E501
# imports no torch: fast
SMALL = ["framework=numpy", "model.name=linear", *without_data(1000, "4x4x1", 10)]
GROWTH = ["recipe.growth=milestones", "recipe.grow_at=[1,2.5]", "recipe.grow_to=[300,200]"]


@pytest.fixture(autouse=True)
def own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def cells(lines: list[str], ranks: int) -> list[str]:
    """A row of the table."""
    return next(line.split() for line in lines if line.split()[:1] == [str(ranks)])


def test_goyal_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    """1,281,167 / 256 = 5004.56 and / 8192 = 156.39 steps an epoch; 90 epochs are 450,410.3 and
    14,075.3 steps, the last one whole.

    lr 0.1 x 8192 / 256 = 3.2, then three tenths; 25,557,032 x 4 bytes are 97.49 MiB. Of 161 tensors
    53 convolutions and the classifier have two dimensions or more; 53 norms have two vectors each,
    and the classifier a bias: 107.
    """
    lines = planned(capsys, *GOYAL, *IMAGENET, "--ranks", "8,256")
    assert cells(lines, 8) == [
        "8",
        "256",
        "32",
        "1",
        "90",
        "5,004.6",
        "450,411",
        "0",
        "0.1",
        "0.0001",
        "0.9",
    ]
    assert cells(lines, 256) == [
        "256",
        "8,192",
        "32",
        "1",
        "90",
        "156.4",
        "14,076",
        "0.1",
        "3.2",
        "0.0032",
        "0.9",
    ]
    text = " ".join(" ".join(lines).split())
    assert (
        "1,281,167 training samples, images of 224x224 pixels and 3 channels, 1,000 classes (by "
        "--samples" in text
    )
    assert (
        "on 8 ranks lr 0.1 after 5 warm-up epochs (from 0), then x 0.1 at epochs 30, 60, 80 batch "
        "256 " in text
    )
    assert (
        "lr 0.1 x 8192/256 = 3.2 after 5 warm-up epochs (linear scaling, from 0.1), then x 0.1 at "
        "epochs 30, 60, 80 batch 8192" in text
    )
    assert "resnet50: 161 tensors, 25,557,032 numbers" in text
    assert (
        "54 tensors, 25,502,912 numbers: decayed 107 tensors, 54,120 numbers: not decayed: "
        "bn1.weight, bn1.bias, layer1" in text
    )
    assert "and 99 more (--all lists them)" in text
    assert (
        "weights 97.5 gradients 97.5 optimizer state 97.5 reduction buffers 97.5 with "
        "comm.reduce=bucket" in text
    )
    assert "sum 390.0 without these buffers 292.5" in text
    assert max(map(len, lines)) <= 100


def test_a_growing_batch_shows_its_first_and_last_value(capsys: pytest.CaptureFixture[str]) -> None:
    """Batch 64 for 16 steps (1,024 samples), 300 for 5 (2,524), 200 for 8 (4,124): 29 steps. On 3
    ranks 21 or 22, then 66 or 67 samples."""
    lines = planned(
        capsys, *SMALL, "batch.size=64", "epochs=4", *GROWTH, "optim.base_lr=0.16", "--ranks", "1,3"
    )
    assert cells(lines, 1) == [
        "1",
        "64>200",
        "64>200",
        "1>4",
        "4",
        "15.6>5.0",
        "29",
        "0.16",
        "0.16",
        "0.5",
        "0.9",
    ]
    assert cells(lines, 3)[2:4] == ["21-22>66-67", "1>4"]
    assert "  a>b: the batch changes from a to b, maybe in several steps" in lines
    assert "            batch 64, 300 from epoch 1, 200 from epoch 2.5" in lines


def test_a_common_recipe_is_printed_once_and_a_fixed_batch_gives_the_same_steps(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = planned(capsys, *SMALL, "--ranks", "1,8,64")
    assert "recipe      on 1, 8, 64 ranks" in lines
    assert [cells(lines, ranks)[4:] for ranks in (1, 8, 64)] == [
        ["10", "15.6", "157", "0.02", "0.02", "0.02", "0.9"]
    ] * 3


def test_an_impossible_number_of_ranks_has_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    lines = planned(capsys, *SMALL)
    assert cells(lines, 64)[1] == "64"
    why = (
        "impossible: batch 64 does not split over 512 ranks: some would have no sample; fix: 512 "
        "or more, or fewer ranks"
    )
    assert f"512 {why}" in " ".join(" ".join(lines).split())
    lines = planned(capsys, *SMALL, "batch.per_rank=20", "--ranks", "50,51")
    assert cells(lines, 50)[1] == "1,000"
    assert "51 impossible: batch 1020 is more than the 1000 training samples" in " ".join(
        " ".join(lines).split()
    )


def test_without_a_possible_number_of_ranks_the_exit_code_is_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = refused(capsys, *SMALL, "--ranks", "100,200")
    for ranks in (100, 200):
        assert (
            f"\n  {ranks}: batch 64 does not split over {ranks} ranks: some would have no sample; "
            f"fix: {ranks} or more" in text
        )
    # the same for every number of ranks: reported once
    text = refused(capsys, *SMALL, "recipe.schedule=steps")
    assert text.splitlines()[0] == "hvdtrain: recipe.schedule=steps needs recipe.milestones"


def test_a_job_that_ends_before_its_warmup(capsys: pytest.CaptureFixture[str]) -> None:
    lines = planned(
        capsys, *SMALL, "max_steps=5", "recipe.warmup=1", "stop.target=0.9", "--ranks", "1"
    )
    # 0.02 x 4 x 64 / 1000
    assert cells(lines, 1) == [
        "1",
        "64",
        "64",
        "1",
        "0.32",
        "15.6",
        "5",
        "0",
        "never",
        "0.00512",
        "0.9",
    ]
    assert any("validation accuracy 0.9 is held" in line for line in lines)


def test_a_users_own_model_and_optimizer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Lazy layers, and a model that reads its own numbers, which has none on torch's meta
    device."""
    (tmp_path / "own_model.py").write_text(
        "from torch import nn\n"
        "def lazy(classes): return nn.Sequential(nn.Flatten(), nn.LazyLinear(classes))\n"
        "def reads(classes):\n    layer = nn.Linear(64, classes)\n    assert "
        "layer.weight.sum().item() != 0\n"
        "    layer.bias.requires_grad_(False)\n    return nn.Sequential(nn.Flatten(), layer)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    data = [*without_data(100, "8x8x1", 10), "--ranks", "1", "optim.name=torch.optim.RMSprop"]
    lines = planned(capsys, "model.name=own_model:lazy", *data)
    assert "            1 tensor, 10 numbers: not decayed: 1.bias" in lines
    assert "  optimizer state      known only after its first step" in lines
    # 2 x 650 x 4 bytes
    assert (
        next(line for line in lines if line.startswith("  sum of what is known ")).split()[-1]
        == "0.0050"
    )
    assert "  ".join(cells(lines, 1)[-2:]) == "its  own"
    lines = planned(capsys, "model.name=own_model:reads", *data, "optim.exclude=none")
    assert "            not decayed: none (optim.exclude=none)" in lines
    assert "model       own_model:reads: 1 tensor, 640 numbers, framework=torch, fp32" in lines


def test_names_of_excluded_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["optim.name=lars", "model.widths=[4,4,4,4]", *without_data(1000, "8x8x1", 10)]
    lines = planned(capsys, *arguments)
    assert any(line.endswith("numbers: decayed and adapted layer by layer") for line in lines)
    text = " ".join(" ".join(lines).split())
    assert (
        "numbers: neither: stem.1.weight, stem.1.bias, " in text
        and " more (--all lists them)" in text
    )
    text = " ".join(planned(capsys, *arguments, "--all"))
    assert "more (--all" not in text and "fc.bias" in text
    text = " ".join(
        " ".join(
            planned(capsys, *arguments[1:], "optim.name=muon", "optim.rest_rule=sgd", "--all")
        ).split()
    )
    assert (
        "numbers: by sgd at 0.015 of the rate, momentum 0.9: stem.1.weight, " in text
        and "fc.weight, fc.bias" in text
    )
    groups = 'optim.groups=[{"names":"fc.*","rate":64,"momentum":0.5}]'
    text = " ".join(" ".join(planned(capsys, *arguments[1:], groups)).split())
    assert "numbers: by sgd at 64 of the rate, momentum 0.5: fc.weight, fc.bias" in text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["--samples", "5"],
            [
                "--samples, --image and --classes need each other",
                "--samples 1281167 --image 224x224x3 --classes 1000",
            ],
        ),
        (["--image", "224x224"], ["cannot read the shape '224x224'", "height x width x channels"]),
        (["--classes", "0"], ["0 is not a number of samples or classes"]),
        (["--ranks", "8,x"], ["cannot read the numbers of ranks '8,x'", "--ranks 1,8,64,512"]),
        (["--ranks"], ["argument --ranks: expected one argument"]),
        (["--rank", "8"], ["cannot read the argument '--rank'"]),
        (["batch.sise=8"], ["no such key: batch.sise", "did you mean batch.size?"]),
        (
            ["model.widhts=3"],
            ["model.name=wide_resnet has no option widhts", "did you mean widths?"],
        ),
        (["model.name=resnet500"], ["unknown name: resnet500", "did you mean resnet50?"]),
        pytest.param(
            ["data.name=folder", "data.root=nowhere"],
            ["nowhere", "or plan without data, as in --samples"],
            marks=needs_extra("image_files"),
        ),
        ([*SMALL, "model.name=mlp"], ["framework=numpy does not support model.name=mlp"]),
        (
            [*SMALL, "optim.name=torch.optim.SGD"],
            ["torch.optim.SGD is a torch optimizer, but framework=numpy needs a rule"],
        ),
        (["--config", "none.yaml"], ["cannot read the configuration", "none.yaml"]),
    ],
    ids=lambda arguments: " ".join(arguments)[:40],
)
def test_mistakes(
    arguments: list[str], expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    text = refused(capsys, *arguments)
    for message in expected:
        assert message in text, text


@needs_extra("image_files")
def test_a_plan_downloads_nothing_and_makes_no_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Sets of known sizes are planned before their files are there; image files are counted, and
    neither packed nor decoded."""
    lines = planned(
        capsys,
        "framework=numpy",
        "model.name=linear",
        "data.name=cifar10",
        "batch.size=100",
        "--ranks",
        "1",
    )
    assert lines[2].startswith(
        "data        50,000 training samples, images of 32x32 pixels and 3 channels, 10 classes (as"
    )
    assert "its files are not here, and plan downloads nothing)" in " ".join(
        map(str.strip, lines[2:5])
    )
    assert cells(lines, 1)[1:6] == ["100", "100", "1", "10", "500.0"]
    shared = ["data.name=mnist", f"data.root={tmp_path / 'deep' / 'er'}", "--ranks", "1"]
    assert (
        main(["plan", "framework=numpy", "model.name=linear", "data.val_share=0.1", *shared]) == 2
    )
    said = capsys.readouterr()
    assert (
        "the files of mnist are missing, and plan downloads nothing" in said.err
        and "--samples 1281167" in said.err
    )
    for label in ("a", "b"):
        folder = tmp_path / "photos" / "train" / label
        folder.mkdir(parents=True)
        for number in range(3):
            Image.new("RGB", (4, 4)).save(folder / f"{number}.png")
    files = sorted(tmp_path.rglob("*"))
    words = [
        "framework=numpy",
        "model.name=linear",
        "data.name=folder",
        f"data.root={tmp_path / 'photos'}",
        "batch.size=2",
        "--ranks",
        "1",
    ]
    assert (
        "6 training samples, images of 4x4 pixels and 3 channels, 2 classes"
        in planned(capsys, *words)[2]
    )
    assert (
        sorted(tmp_path.rglob("*")) == files
        and not (tmp_path / "cache").exists()
        and not (tmp_path / "deep").exists()
    )


def test_the_picture_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    """A line of its own colour for each number of ranks, in both panels; and one for all where the
    recipe is the same."""
    from PIL import Image

    colours = {"blue": (0, 114, 178), "vermillion": (213, 94, 0)}
    for batch, lines in (("batch.per_rank=8", 2), ("batch.size=64", 1)):
        out = planned(
            capsys,
            *SMALL,
            batch,
            "optim.base_batch=8",
            "recipe.schedule=cosine",
            "--ranks",
            "1,8",
            "--png",
            "plan.png",
        )
        assert out[-1] == "picture: plan.png"
        with Image.open("plan.png") as image:
            assert (image.format, image.size) == ("PNG", (1440, 960))
            pixels = np.asarray(image.convert("RGB"))
        for index, colour in enumerate(colours.values()):
            of_colour = (pixels == colour).all(2)  # (H, W)
            assert (of_colour[:580].sum() > 1000, of_colour[580:860].sum() > 1000) == (
                index < lines,
            ) * 2
    assert main(["plan", *SMALL, "--ranks", "1", "--png", "nowhere/plan.png"]) == 2
    assert "cannot write the picture" in " ".join(capsys.readouterr().err.split())


def test_without_matplotlib_the_table_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    lines = planned(capsys, *SMALL, "--png", "plan.png")
    assert lines[-1] == "no picture: matplotlib is not installed; pip install matplotlib"
    assert cells(lines, 8)[1] == "64"
    assert not Path("plan.png").exists()


def test_only_the_framework_is_imported(tmp_path: Path) -> None:
    """No MPI ever, and no torch for a numpy model, even under a launcher's variables."""
    code = f"""
import sys
from hvdtrain.__main__ import main
assert main(["plan", *{SMALL!r}, "--png", {str(tmp_path / "plan.png")!r}]) == 0
loaded = [m for m in ("torch", "jax", "mpi4py", "horovod", "matplotlib.pyplot", "sklearn") if m in sys.modules]
assert not loaded, loaded
import torch
torch.nn.Linear(1, 1, device="meta")  # which imports sympy with torch 2.9
heavy = [m for m in ("mpi4py", "horovod", "sympy") if m not in sys.modules]
assert heavy[:2] == ["mpi4py", "horovod"], heavy
assert main(["plan", "model.name=mlp"]) == 0
loaded = [m for m in heavy if m in sys.modules]
assert not loaded, loaded
"""  # noqa: E501
    result = python(
        ["-c", code], env={"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, is_warm=False
    )
    assert result.returncode == 0, result.stderr


@needs_extra("tensor")
def test_the_layout_of_a_model_over_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "mesh.png"
    words = [
        "model.name=mlp",
        "model.widths=[16,8]",
        "parallel.tensor=2",
        f"--parallel-picture={picture}",
    ]
    data = ["--ranks", "4", *without_data(64, "2x2x1", 3)]
    said = "\n".join(planned(capsys, *data, *words))
    assert picture.read_bytes()[:4] == b"\x89PNG" and f"picture: {picture}" in said
    lost = [*data, *words[:3], "--parallel-picture=/no/such/p.png"]
    assert main(["plan", *lost]) == 2
    assert (
        "cannot write the picture" in (err := capsys.readouterr().err)
        and "\n  where: --parallel-picture\n" in err
    )
    from hvdtrain.extras.plan.of_torch.layout import (
        layout,  # torch: the other tests here go without it
    )

    config = configure(None, words[:3])
    found = layout(config, without_statistics((2, 2, 1), 3), 4)
    assert found.ranks == [
        "data 0, tensor 0",
        "data 0, tensor 1",
        "data 1, tensor 0",
        "data 1, tensor 1",
    ]
    first, second, last = found.rows
    halves = [LayerRange(0.0, 0.5), LayerRange(0.5, 1.0)] * 2
    assert (first.shape, first.way, first.held) == ((16, 4), "columns", halves)
    assert (second.shape, second.way, second.held, second.whole_bytes) == (
        (8, 16),
        "rows",
        halves,
        8 * 4,
    )
    assert (last.way, last.held, last.sent) == ("whole", [LayerRange(0.0, 1.0)] * 4, "")
    of_rank = 4 * ((16 * 4 + 16) // 2 + 8 * 16 // 2 + 8 + 3 * 8 + 3)
    assert [found.weight_bytes(rank) for rank in range(4)] == [of_rank] * 4
    assert found.updates == [of_rank, of_rank - 4 * (8 + 3 * 8 + 3)] * 2, (
        "of what both have whole the first rank has the state"
    )
    assert second.sent == "forward: sum of outputs, 32 bytes a sample"


@needs_extra("pipeline")
@pytest.mark.parametrize(("balance", "stages"), [("seconds", [0, 1, 1]), ("5,1", [0, 0, 1])])
def test_the_layout_of_stages_measures_nothing(balance: str, stages: list[int]) -> None:
    """By operations the first layer, of most weights, has a stage of its own."""
    from hvdtrain.extras.plan.of_torch.layout import layout

    config = configure(
        None,
        [
            "model.name=mlp",
            "model.widths=[16,8]",
            "parallel.pipeline=2",
            f"parallel.balance={balance}",
        ],
    )
    found = layout(config, without_statistics((8, 8, 1), 3), 2)
    assert [row.stage for row in found.rows] == stages
    assert ("stages are cut by operations; a job measures seconds at its start" in found.notes) == (
        balance == "seconds"
    )
