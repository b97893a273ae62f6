"""`evaluate` and `predict`: the numbers of a run's last epoch on any number of ranks, counts by
hand, other data, and their errors."""

from __future__ import annotations

import csv
import io
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from ranks import FULL, HIGHEST_STAGE, mpirun, needs_extra, needs_mpirun, python
from safetensors import safe_open
from safetensors.numpy import load_file
from sklearn.metrics import average_precision_score, roc_auc_score

from hvdtrain.__main__ import main
from hvdtrain.comm import on_all_ranks
from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.config.read import Assignment, configure, read_argument, read_file
from hvdtrain.config.schema import Config
from hvdtrain.core.process import command_line
from hvdtrain.data.datasets import digits
from hvdtrain.errors import UserError
from hvdtrain.extras.evaluate.command import USAGE, evaluate
from hvdtrain.extras.trained_models.arguments import read_former_run
from hvdtrain.extras.trained_models.saved_weights import find_checkpoint
from hvdtrain.extras.trained_models.trained_model import load_trained_model, task_of
from hvdtrain.training.checkpoint.files import Checkpoint, Damaged
from hvdtrain.training.checkpoint.resume import Reading
from hvdtrain.training.conflicts import refuse_conflicts
from hvdtrain.training.progress.train_state import Progress, TrainState

TRAIN = ["model.name=linear", "speed.precision=fp64", "epochs=1", "optim.base_lr=0.05"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one epoch on the digits, framework=numpy."""
    run = tmp_path_factory.mktemp("trained") / "run"
    assert main([*TRAIN, "framework=numpy", f"run={run}"]) == 0
    return run


@pytest.fixture
def run(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, for a test of its own."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained, tmp_path / "run")
    return Path("run")


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    return [
        event
        for event in map(json.loads, (run / "events.jsonl").read_text().splitlines())
        if event["kind"] == kind
    ]


def evaluated(run: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The result as JSON."""
    capsys.readouterr()
    assert main(["evaluate", str(run), "--json", "-", *arguments]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refusal(*arguments: str) -> str:
    with pytest.raises(UserError) as caught:
        evaluate(arguments)
    return str(caught.value)


def refused_on_ranks(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """An error after the ranks are connected."""
    capsys.readouterr()
    assert main(["evaluate", *arguments]) == 2
    return capsys.readouterr().err


def logits_by_hand(run: Path) -> tuple[np.ndarray, np.ndarray]:
    """(360, 10) and the labels (360,), from the weights of the newest checkpoint alone."""
    (checkpoint,) = (run / "checkpoints").iterdir()
    weights = load_file(checkpoint / "weights.safetensors")
    train = digits.build("digits", None, "train").read(np.arange(1437))
    val = digits.build("digits", None, "val").read(np.arange(360))
    x = (val["x"].reshape(360, 64) / 255 - (train["x"] / 255).mean()) / (train["x"] / 255).std()
    return x @ weights["p.fc.weight"].T + weights["p.fc.bias"], val["y"]


def confusion_by_hand(run: Path) -> np.ndarray:
    """(10, 10), [label, answer], of logits_by_hand()"""
    logits, labels = logits_by_hand(run)
    confusion = np.zeros((10, 10), int)
    for label, answer in zip(labels, logits.argmax(1), strict=True):
        confusion[label, answer] += 1
    return confusion


def test_the_result_is_that_of_the_last_epoch_with_counts_by_hand(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = (run / "config.yaml").read_bytes()
    found, (epoch,) = evaluated(run, capsys), events(run, "epoch")
    assert (
        found["loss"] == pytest.approx(epoch["val_loss"], rel=1e-12)
        and found["accuracy"] == epoch["val_accuracy"]
    )
    confusion = confusion_by_hand(run)
    assert found["confusion"] == confusion.tolist()
    assert found["class_samples"] == confusion.sum(1).tolist() and found["count"] == 360
    assert found["class_accuracy"] == [
        confusion[label, label] / confusion[label].sum() for label in range(10)
    ]
    said = confusion.sum(0)
    assert found["class_precision"] == [
        confusion[label, label] / said[label] if said[label] else None for label in range(10)
    ]
    logits, labels = logits_by_hand(run)
    odds = np.exp(logits)
    shares = odds / odds.sum(1, keepdims=True)
    for label in range(10):
        expected = roc_auc_score(labels == label, shares[:, label])
        assert found["class_auroc"][label] == pytest.approx(expected, rel=1e-5)
        expected = average_precision_score(labels == label, shares[:, label])
        assert found["class_average_precision"][label] == pytest.approx(expected, rel=1e-5)
        x, y = found["roc"][label]
        assert np.trapezoid(y, x) == pytest.approx(found["class_auroc"][label], abs=0.01)
        x, y = found["precision_recall"][label]
        assert x[-1] == 1 and y[-1] == pytest.approx((labels == label).mean(), abs=1e-5)
    assert sum(found["calibration"][2]) == 360
    label, answer, count = found["confused"][0]
    assert count == confusion[label, answer] == (confusion - np.diag(np.diag(confusion))).max()
    assert (found["class_names"], found["split"], found["checkpoint"]) == (
        list("0123456789"),
        "val",
        "step-00000023",
    )
    (event,) = events(run, "evaluation")
    assert event.pop("time") and event.pop("step") == 23 and event.pop("kind") and event == found
    assert (run / "config.yaml").read_bytes() == config


@needs_extra("augmentations")
def test_views_are_those_of_the_run_or_of_the_command(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a run with evaluate.views=6 has it, which is what the mean over six views is of this
    model."""
    one = evaluated(run, capsys)
    six = evaluated(run, capsys, "evaluate.views=6")
    assert (one["views"], six["views"]) == (1, 6) and one["loss"] != six["loss"]
    path = run / "config.yaml"
    path.write_text(path.read_text().replace("views: 1", "views: 6"))
    assert {**evaluated(run, capsys), "evaluate_s": 0} == {**six, "evaluate_s": 0}
    assert main(["evaluate", str(run)]) == 0
    assert (
        "data     digits, val: 360 samples, 6 views of each, 8x8x1, 10 classes"
        in capsys.readouterr().out
    )


def test_the_lines_for_people(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["evaluate", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    confusion = confusion_by_hand(run)
    right = int(np.trace(confusion))
    assert lines[2] == "weights  run, step 23, epoch 1.02"
    assert (
        lines[3]
        == "data     digits, val: 360 samples, 8x8x1, 10 classes: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9"
    )
    assert lines[5] == f"accuracy {right / 360:.4f}: {right} of 360 right"
    assert lines[6].split() == ["class", "samples", "accuracy", "most", "often", "taken", "for"]
    rows = [line.split()[:3] for line in lines[7:17]]
    assert rows == [
        [str(k), str(confusion[k].sum()), f"{confusion[k, k] / confusion[k].sum():.4f}"]
        for k in range(10)
    ]
    assert lines[17] == f"added to run/events.jsonl: {command_line()} report run draws it"


@pytest.mark.parametrize("framework", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_the_other_frameworks(
    framework: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], jax_compilation_cache: None
) -> None:
    """A batch of 7 in evaluation, where the job's was 500, moves the loss by rounding alone."""
    run = tmp_path / "run"
    assert main([*TRAIN, f"framework={framework}", f"run={run}"]) == 0
    found, (epoch,) = evaluated(run, capsys, "batch.evaluate=7"), events(run, "epoch")
    assert (
        found["loss"] == pytest.approx(epoch["val_loss"], rel=1e-12)
        and found["accuracy"] == epoch["val_accuracy"]
    )
    assert np.array_equal(found["confusion"], confusion_by_hand(run))


@needs_mpirun
@pytest.mark.parametrize("ranks", [2, *[pytest.param(3, marks=pytest.mark.slow)] * FULL])
def test_on_several_ranks_the_result_is_the_same(
    ranks: int, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """3 ranks have 120 samples each in batches of 50: a last batch of 20."""
    alone = evaluated(run, capsys)
    result = mpirun(
        ranks,
        ["-m", "hvdtrain", "evaluate", str(run.absolute()), "batch.evaluate=50", "--json", "-"],
    )
    assert result.returncode == 0, result.stderr
    together = json.loads(result.stdout)
    assert together.pop("ranks") == ranks and alone.pop("ranks") == 1
    assert together.pop("loss") == pytest.approx(alone.pop("loss"), rel=1e-12)
    assert {**together, "evaluate_s": 0} == {**alone, "evaluate_s": 0}
    assert len(events(run, "evaluation")) == 2


def test_the_training_set(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluated(run, capsys, "--split", "train")["count"] == 1437


def images(root: Path, *classes: str) -> None:
    """Validation digits as image files, ROOT/val/CLASS/NUMBER.png: all of the named classes."""
    source = digits.build("digits", None, "val").read(np.arange(360))
    for number, (x, y) in enumerate(zip(source["x"], source["y"], strict=True)):
        if str(y) in classes:
            (root / "val" / str(y)).mkdir(parents=True, exist_ok=True)
            Image.fromarray(x[..., 0]).save(root / "val" / str(y) / f"{number:03}.png")


@needs_extra("image_files")
def test_other_data_are_matched_by_the_names_of_their_classes(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Folders 7 and 8 are labels 0 and 1 of their own data set; there is no train/."""
    images(Path("two"), "7", "8")
    found = evaluated(
        run, capsys, "data.name=folder", "data.root=two", "data.channels=1", "data.cache=cache"
    )
    confusion = confusion_by_hand(run)
    confusion[[label for label in range(10) if label not in (7, 8)]] = 0
    assert found["confusion"] == confusion.tolist()
    assert (
        found["class_accuracy"][0] is None and found["class_samples"][7] == confusion[7].sum() > 20
    )
    (Path("two/val/8")).rename("two/val/eight")
    what = (
        "the model does not know eight\n  where: data.root, command line\n  fix: data of its "
        "classes: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9\n"
    )
    words = ["data.name=folder", "data.root=two", "data.cache=cache"]
    assert refused_on_ranks(capsys, "run", *words, "data.channels=1").endswith(f"hvdtrain: {what}")
    assert "the images are 8x8x3, the model takes 8x8x1" in refused_on_ranks(capsys, "run", *words)


def test_data_without_names_may_have_fewer_classes_not_more(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["data.name=synthetic", "data.shape=[8,8,1]", "data.val_samples=30"]
    assert evaluated(run, capsys, *words, "data.classes=3")["class_samples"] == [
        10,
        10,
        10,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
    ]
    assert "the data have 11 classes, the model 10" in refused_on_ranks(
        capsys, "run", *words, "data.classes=11"
    )


def test_the_checkpoint_that_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluated(run, capsys, "--checkpoint", "best")["checkpoint"] == "step-00000023"
    assert "run has no checkpoint step-1" in refused_on_ranks(
        capsys, "run", "--checkpoint", "step-1"
    )
    (run / "checkpoints/step-00000023/weights.safetensors").write_bytes(b"x")
    assert "no checkpoint of run is good" in refused_on_ranks(capsys, "run")


def test_weights_of_another_model_are_refused(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = refused_on_ranks(capsys, "run", "model.name=mlp")
    assert "framework=numpy does not support model.name=mlp" in text


def test_a_folder_without_events_gets_none(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "events.jsonl").unlink()
    capsys.readouterr()
    assert main(["evaluate", str(run)]) == 0
    assert capsys.readouterr().out.endswith(
        "not added to run/events.jsonl: No such file or directory\n"
    )
    assert not (run / "events.jsonl").exists()


def test_mistakes_of_the_command_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["evaluate"]) == main(["evaluate", "--help"]) == 0
    assert capsys.readouterr().out == f"{USAGE}\n" * 2
    assert "evaluate does not accept epochs=3, because it does not train" in refusal(
        "run", "epochs=3"
    )
    assert (
        "evaluate does not accept optim.ema=0.9: it uses the weight averages of the run"
        in refusal("run", "optim.ema=0.9")
    )
    assert "unknown argument '--chekpoint': did you mean --checkpoint?" in refusal(
        "run", "--chekpoint", "best"
    )
    assert "unknown split: test\n  where: --split\n  fix: train or val" in refusal(
        "run", "--split", "test"
    )
    assert "RUN is missing" in refusal("data.root=x")
    assert "RUN is missing: nowhere is the FILE of --json" in refusal("--json", "nowhere")
    assert "one RUN is needed, not 2: run other" in refusal("run", "other")
    (run / "config.yaml").write_text("model.name: os:system\n")
    assert "only the run folder names it" in refusal("run")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("shape", [8, 8]),
        ("shape", [8, 0, 1]),
        ("shape", [2**20, 2**20, 1]),
        ("shape", "abc"),
        ("classes", 2**60),
        ("classes", True),
        ("mean", [math.nan]),
        ("mean", [0.1, 0.2]),
        ("std", [0.0]),
        ("std", None),
    ],
)
def test_what_a_checkpoint_was_trained_for_is_checked(key: str, value: Any) -> None:
    data = {"shape": [8, 8, 1], "classes": 10, "mean": [0.5], "std": [0.25]}
    state = TrainState(Progress(4, 4))
    assert task_of(Config(), Checkpoint(Path("x"), state, {"data": data}, {})).shape == (8, 8, 1)
    for identity in (
        {"data": data | {key: value}},
        {"data": {name: data[name] for name in data if name != key}},
        {"data": None},
        {},
    ):
        with pytest.raises(Damaged, match="the checkpoint does not record what it was trained for"):
            task_of(Config(), Checkpoint(Path("x"), state, identity, {}))


def predicted(text: str) -> list[list[str]]:
    head, *rows = csv.reader(io.StringIO(text))
    assert head == ["file", "class", "probability", *(f"p_{label}" for label in range(10))]
    return rows


@needs_extra("predict")
def test_predictions_of_image_files(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All validation digits as files: as many right in each class as the confusion matrix has;
    probabilities by hand for the first."""
    images(Path("all"), *"0123456789")
    Path("all/val/0/.hidden.png").write_bytes(b"x")
    Path("all/val/0/notes.txt").write_bytes(b"x")
    assert (
        main(["predict", str(run), "--images", "all/val", "--to", "said.csv", "batch.evaluate=50"])
        == 0
    )
    shown = capsys.readouterr()
    assert shown.out.endswith("360 images -> said.csv\n")
    assert (
        "all/val: left out 2 files and folders that are hidden or no image" in shown.err
        and ": 0/.hidden.png, 0/notes.txt\n" in shown.err
    )
    rows = predicted(Path("said.csv").read_text())
    assert [row[0] for row in rows] == sorted(
        str(path.relative_to("all/val")) for path in Path("all/val").glob("*/[0-9]*.png")
    )
    counts = np.zeros((10, 10), int)
    for path, said, *_ in rows:
        counts[int(path[0]), int(said)] += 1
    assert (counts == confusion_by_hand(run)).all()
    weights = load_file(next((run / "checkpoints").iterdir()) / "weights.safetensors")
    train = digits.build("digits", None, "train").read(np.arange(1437))["x"] / 255
    x = (
        np.asarray(Image.open(Path("all/val", rows[0][0]))).ravel() / 255 - train.mean()
    ) / train.std()
    odds = np.exp(weights["p.fc.weight"] @ x + weights["p.fc.bias"])
    assert float(rows[0][2]) == pytest.approx(odds.max() / odds.sum(), abs=1e-6)
    assert [float(cell) for cell in rows[0][3:]] == pytest.approx(odds / odds.sum(), abs=1e-6)


@needs_extra("predict")
def test_images_of_another_size_and_colour_are_made_to_fit(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A digit in colour with ten more columns left and right: its centre square is the digit
    again."""
    x = digits.build("digits", None, "val").read(np.arange(1))["x"][0, ..., 0]
    wide = np.pad(x, ((0, 0), (10, 10)), constant_values=200)
    Path("in").mkdir()
    Image.fromarray(np.stack([wide] * 3, 2)).save("in/=a, b.png")
    Image.fromarray(x).save("in/small.png")
    capsys.readouterr()
    assert main(["predict", str(run), "--images", "in", "--to", "-"]) == 0
    first, second = predicted(capsys.readouterr().out)
    assert (first[0], second[0]) == ("=a, b.png", "small.png") and first[1:] == second[1:]


@needs_extra("predict")
@needs_mpirun
@pytest.mark.slow
def test_predictions_on_three_ranks_are_the_same(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images(Path("two"), "3", "8")
    capsys.readouterr()
    assert main(["predict", str(run), "--images", "two", "--to", "-"]) == 0
    alone = capsys.readouterr().out
    words = [
        "-m",
        "hvdtrain",
        "predict",
        str(run.absolute()),
        "--images",
        str(Path("two").absolute()),
        "--to",
        "-",
        "batch.evaluate=9",
    ]
    together = mpirun(3, words)
    assert together.returncode == 0 and together.stdout == alone, together.stderr


@needs_extra("predict")
def test_mistakes_of_predict(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*arguments: str) -> str:
        capsys.readouterr()
        assert main(["predict", "run", *arguments]) == 2
        return capsys.readouterr().err

    Path("in").mkdir()
    Path("in/broken.png").write_bytes(b"x")
    Path("old.csv").write_text("mine")
    assert "--images or --data is missing" in refused(
        "--to", "x.csv"
    ) and "--to is missing" in refused("--images", "in")
    assert "x.txt does not end in .csv" in refused("--images", "in", "--to", "x.txt")
    assert "there is no folder nowhere" in refused("--images", "in", "--to", "nowhere/x.csv")
    assert "old.csv exists already" in refused("--images", "in", "--to", "old.csv")
    absent = (
        "there is no folder absent\n  where: --images\n  fix: --images DIR, a folder with image "
        "files"
    )
    assert absent in refused("--images", "absent", "--to", "x.csv")
    assert "no images (.jpg" in refused("--images", "run", "--to", "x.csv")
    assert "in/broken.png" in refused("--images", "in", "--to", "old.csv", "--force")
    assert Path("old.csv").read_text() == "mine" and not Path("x.csv").exists()


@needs_extra("export")
@needs_extra("image_files")
def test_names_of_classes_are_in_the_configuration_the_events_and_the_exported_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tenth of each of two classes of train/ validates; the run's own part is evaluated again,
    other data whole."""
    monkeypatch.chdir(tmp_path)
    images(Path("all"), "1", "7")
    Path("all/val").rename("all/train")
    Path("all/train/7").rename("all/train/seven, grey")
    words = [
        "data.name=folder",
        "data.root=all",
        "data.cache=cache",
        "data.channels=1",
        "data.val_share=0.1",
    ]
    assert main([*words, *TRAIN, "framework=numpy", "run=run", "batch.size=8"]) == 0
    header = capsys.readouterr().out.splitlines()
    names = ["1", "seven, grey"]
    ones, sevens = (len(list(Path("all/train", name).iterdir())) for name in names)
    val = round(0.1 * ones) + round(0.1 * sevens)
    of_train = (
        f"{ones + sevens - val} training and {val} validation samples (data.val_share=0.1 of train)"
    )
    assert header[1] == f"data    folder: {of_train}, 8x8x1, 2 classes: 1, seven, grey"
    config = {assignment.key: assignment.value for assignment in read_file("run/config.yaml")}
    (start,) = events(Path("run"), "start")
    assert config["data.class_names"] == start["class_names"] == names and (
        start["shape"],
        start["classes"],
    ) == ([8, 8, 1], 2)
    found, (epoch,) = (
        evaluated(Path("run"), capsys, "data.cache=cache"),
        events(Path("run"), "epoch"),
    )
    assert found["count"] == val and found["loss"] == pytest.approx(epoch["val_loss"], rel=1e-12)
    Path("all/train").rename("all/val")
    assert (
        evaluated(Path("run"), capsys, "data.cache=cache", "data.root=all")["count"]
        == ones + sevens
    )
    Path("all/val").rename("all/train")  # its name repeated is not other data
    repeated = evaluated(Path("run"), capsys, "data.cache=cache", "data.name=folder")
    assert (repeated["count"], repeated["loss"]) == (val, found["loss"])
    assert main(["export", "run", "--to", "model.safetensors"]) == 0
    with safe_open("model.safetensors", "numpy") as file:
        assert json.loads(file.metadata()["class_names"]) == names
    assert 'named ["1", "seven, grey"]' in capsys.readouterr().out


@pytest.fixture(scope="module", params=["torch", *["jax"] * FULL])
def in_parts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("in_parts") / "run"
    words = [
        "model.name=mlp",
        "model.widths=[9,7]",
        "speed.precision=fp64",
        "max_steps=3",
        "batch.size=31",
    ]
    trained = python(
        ["-m", "hvdtrain", *words, f"framework={request.param}", HIGHEST_STAGE, f"run={run}"]
    )
    assert trained.returncode == 0, trained.stderr
    return run


@needs_mpirun
@pytest.mark.slow
def test_ranks_with_parts_of_the_weights_evaluate_what_one_with_all_does(
    in_parts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 5 images rank 0 has 2 and rank 1 has 3: in the last batch rank 0 has none."""
    words = ["data.name=synthetic", "data.shape=[8,8,1]", "data.val_samples=5", "batch.evaluate=1"]
    assert main(["evaluate", str(in_parts), *words]) == 0
    alone, (found,) = capsys.readouterr().out.splitlines(), events(in_parts, "evaluation")
    result = mpirun(2, ["-m", "hvdtrain", "evaluate", str(in_parts), *words, "comm.engine=mpi"])
    assert result.returncode == 0, result.stderr
    together = result.stdout.splitlines()
    assert together[4:] == alone[4:] and together[2:4] == alone[2:4]
    units = {
        "torch": "as one unit: the model has no `blocks`",
        "jax": "in 2 blocks with 89.1% of them, and the rest",
    }
    framework = "jax" if "jax" in alone[1] else "torch"
    assert together[1].endswith(f", weights sharded over 2 ranks {units[framework]} (ZeRO stage 3)")
    model = {
        "torch": "MLP, 735 parameters, torch float64 on cpu",
        "jax": "mlp, 735 parameters, jax float64 on cpu:0",
    }
    assert alone[1] == f"model    mlp: {model[framework]}"
    *_, in_parts_found = events(in_parts, "evaluation")
    assert (
        in_parts_found.pop("loss") == pytest.approx(found.pop("loss"), rel=1e-12)
        and in_parts_found["ranks"] == 2
    )
    ignored = {"ranks": 0, "time": 0, "evaluate_s": 0}
    assert in_parts_found | ignored == found | ignored


def test_without_memory_for_the_whole_model_parts_are_advised() -> None:
    def find(reading: Reading) -> Any:
        assert not reading.mapped, "of one process"
        raise MemoryError

    with pytest.raises(MemoryError) as caught:
        load_trained_model(configure(None, ["shard.stage=3"]), SingleProcessCommunicator(), find)
    (note,) = caught.value.__notes__
    assert note.startswith(
        "hvdtrain: the model is whole on each rank; on several ranks (mpirun -np N) shard.stage=3 "
        "comm.engine=mpi"
    )


def test_no_time_limit_ends_a_rank_while_a_checkpoint_is_read_and_sent(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each piece that is read, and each array that has travelled, counts as progress on every
    rank."""
    beats = list[int]()
    pieces = list[int]()

    def find(reading: Reading) -> Any:
        def count() -> None:
            pieces.append(1)
            reading.on_piece()

        found = find_checkpoint(run, "newest", reading._replace(on_piece=count))
        assert len(beats) == len(pieces) > 0
        return found

    monkeypatch.setattr(on_all_ranks, "MEET_S", 0.0)
    load_trained_model(
        configure(None, [*TRAIN, "framework=numpy"]),
        SingleProcessCommunicator(),
        find,
        go_on=lambda: beats.append(1),
    )
    assert len(beats) == len(pieces) + 2, "a weight and a bias"


def test_of_the_stages_of_a_run_the_third_remains_and_of_its_devices_none(tmp_path: Path) -> None:
    def kept(run: Path) -> list[Assignment]:
        return [
            a
            for a in read_former_run([read_argument(f"resume={run}")])
            if a.key.startswith(("shard.", "speed.devices"))
        ]

    run = tmp_path / "run"
    assert main([*TRAIN, "shard.stage=2", "max_steps=1", f"run={run}"]) == 0
    assert kept(run) == []
    text = (run / "config.yaml").read_text()
    assert text.count("stage: 2") == 1
    assert text.count("devices: 1") == 1
    (run / "config.yaml").write_text(
        text.replace("stage: 2", "stage: 3").replace("devices: 1", "devices: 2")
    )
    assert [(a.key, a.value) for a in kept(run)] == [("shard.stage", 3)]
    with pytest.raises(UserError, match="which the horovod engine does not create") as caught:
        refuse_conflicts(configure(None, ["batch.size=2"], kept(run)), "horovod", 2)
    assert "comm.engine=mpi with the same mpirun" in str(caught.value)


@needs_extra("predict")
@needs_mpirun
@pytest.mark.slow
def test_ranks_with_parts_of_the_weights_predict_what_one_with_all_does(
    in_parts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    images(Path("some"), "3")
    for path in sorted(Path("some/val/3").iterdir())[5:]:
        path.unlink()
    words = [
        "predict",
        str(in_parts),
        "--images",
        str(Path("some").absolute()),
        "--to",
        "-",
        "batch.evaluate=1",
    ]
    capsys.readouterr()
    assert main(words) == 0
    alone = capsys.readouterr().out
    together = mpirun(2, ["-m", "hvdtrain", *words, "comm.engine=mpi"])
    assert together.returncode == 0 and together.stdout == alone and len(predicted(alone)) == 5, (
        together.stderr
    )
