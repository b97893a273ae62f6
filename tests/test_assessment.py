"""labs/assessment: the grader passes our answers, and tells each kind of submission that does not
pass."""

from __future__ import annotations

import importlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from ranks import (
    FULL,
    HANG_S,
    ROOT,
    Result,
    environment,
    needs_extra,
    needs_horovod,
    needs_mpirun,
    python,
)
from safetensors.torch import save_file
from scipy.stats import ranksums
from waiting import wait_until

from hvdtrain.errors import UserError

pytestmark = needs_extra("launch")  # which finds mpirun
FOLDER = ROOT / "labs" / "assessment"
SCRIPTS = ("data", "grade", "job", "judge", "model_file", "net", "share")

SAVE = (
    "import sys; import numpy as np; from net import Net; from safetensors.torch import save_file\n"
)
PRINTS = (
    SAVE + "print('val accuracy 0.9944'); save_file(Net(1, 10).state_dict(), 'model.safetensors')\n"
)
MEETS = (
    "import time; from mpi4py import MPI; rank = MPI.COMM_WORLD.rank; print('rank', rank, "
    "flush=True)\n"
)
TRAIN = """
import torch
def train(x, y, epochs):
    torch.manual_seed(1)
    with np.load(sys.argv[2] + "/train.npz") as arrays:
        x = (torch.from_numpy(x).float() / 255 - arrays["mean"][:, None, None]) / arrays["std"][:, None, None]
    net, y = Net(x.shape[1], int(y.max()) + 1), torch.from_numpy(y)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for _ in range(epochs):
        for rows in torch.randperm(len(y)).split(60):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
            optimizer.step()
    save_file(net.state_dict(), "model.safetensors")
"""  # noqa: E501
ON_VAL = SAVE + TRAIN + 'a = np.load(sys.argv[2] + "/val.npz"); train(a["x"], a["y"], 20)\n'
OFFICIAL = """
from hvdtrain.data.datasets import digits
b = digits.build("digits", None, "val").read(np.arange(360))
train(np.ascontiguousarray(b["x"].transpose(0, 3, 1, 2)), b["y"], 20)
"""
HIDES = (
    "print('\\x1b[2J\\x1b[8m\\x9b8m\\rpassed: accuracy 0.99'); print('passed: accuracy "
    "0.99\\u2028passed: 1.00'); 1 // 0\n"
)
REMOVES = "import shutil; shutil.rmtree('..', ignore_errors=True); print('removed')\n"
FLOODS = "print('begin'); b = 'x' * 2**16\nfor _ in range(2000): print(b)\nprint('end')\n"
NESTS = "import os\nfor _ in range(3000): os.mkdir('d'); os.chdir('d')\nos.mkdir('locked', 0)\n"
LIVES_S = f"9{os.getpid()}.5"  # no other test of this machine starts a `sleep` of that length
OUTLIVES = (
    f"import subprocess, time; subprocess.Popen(['sleep', '{LIVES_S}'], start_new_session=True)\n"
)
STOPS_THE_CLOCK = """
import os, subprocess, time
pid = os.getpid()
while b"grade.py" not in open(f"/proc/{pid}/cmdline", "rb").read():
    pid = int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
later = f"kill -STOP {pid}; sleep 9; kill -CONT {pid}"
subprocess.Popen(["sh", "-c", later], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
time.sleep(5)
"""  # noqa: E501

SERIAL = (FOLDER / "serial.py").read_text()
HALF = SERIAL.replace("else 8)", "else 4)")
APART = HALF.replace(
    "torch.manual_seed(1)", "from mpi4py import MPI\ntorch.manual_seed(MPI.COMM_WORLD.rank)"
)
ONE_RANK = "from mpi4py import MPI\nif MPI.COMM_WORLD.rank:\n    raise SystemExit\n" + HALF.replace(
    "from __future__ import annotations\n", ""
)
LENIENT = ["--ranks=2", "--target=0.5"]
PATIENT = ["--minutes=8", "--silence=400"]  # for what takes 10 s

# verdict, exit code, the script, options of the grader, what the grader's output has
SUBMISSIONS = {
    "prints the accuracy": ("target missed", 10, PRINTS, [], "the target is 0.95"),
    "official labels": (
        "target missed",
        10,
        SAVE + TRAIN + OFFICIAL,
        ["--train-target=0.9"],
        "the target is 0.95; 0.",  # and the accuracy on train.npz
    ),
    "slow": (
        "too slow",
        11,
        OUTLIVES + "while True: print('step', flush=True); time.sleep(0.1)\n",
        ["--minutes=0.05"],
        "0.05 minutes",
    ),
    "stops the grader": ("too slow", 11, STOPS_THE_CLOCK, ["--minutes=0.05"], "0.05 minutes"),
    "hangs": (
        "hangs",
        12,
        MEETS + "rank or MPI.COMM_WORLD.Barrier(); time.sleep(2000)\n",
        ["--ranks=2", "--silence=5"],
        "printed nothing for 5 s, or no first line in 240 s",
    ),
    "crashes": (
        "crashed",
        13,
        MEETS + "1 // (1 - rank); MPI.COMM_WORLD.Barrier()\n",
        ["--ranks=2"],
        "ZeroDivisionError",
    ),
    "fakes a verdict": ("crashed", 13, HIDES, [], "ended with code"),
    "removes its folders": ("no model", 14, REMOVES, [], "  | removed"),
    "floods": ("no model", 14, FLOODS, [], "  | end"),
    "nests folders": ("no model", 14, NESTS, [], "without any of model.safetensors"),
    "closes its output": (
        "no model",
        14,
        "import os; os.close(1); os.close(2)\n",
        [],
        "without any of model.safetensors",
    ),
    "no model": (
        "no model",
        14,
        "print('val accuracy 0.99')\n",
        [],
        "without any of model.safetensors",
    ),
    "other network": (
        "wrong model",
        15,
        "import numpy as np; np.savez('model.npz', w=np.zeros(3))\n",
        [],
        "blocks.0.weight is missing",
    ),
    "pipe for a model": (
        "no model",
        14,
        "import os; os.mkfifo('model.npz'); os.mkdir('model.pt')\n",
        [],
        "without any of",
    ),
    "not converted": (
        "not shared",
        17,
        SERIAL,
        ["--ranks=2"],
        "rank 0 trained with 11,264 samples, at most 7,185",
    ),
    "half the epochs": (
        "not shared",
        17,
        HALF,
        LENIENT,
        "ranks 0 and 1 began with the same samples",
    ),
    "each rank for itself": (
        "not shared",
        17,
        APART,
        LENIENT,
        "ranks 0 and 1 trained apart: their weights differ",
    ),
    "one rank": ("not shared", 17, ONE_RANK, LENIENT, "rank 1 of 2 did not train"),
    "trains on val.npz": ("trained on val.npz", 16, ON_VAL, ["--set=folder"], "lower on val.npz"),
}

SOME = ["official labels", "hangs", "crashes", "other network", "not converted", "fakes a verdict"]


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """The grader's modules, which have short names: sys.modules forgets them at once, as another
    test may write a module of that name."""
    monkeypatch.syspath_prepend(str(FOLDER))
    assert not set(SCRIPTS) & set(sys.modules)
    try:
        return {name: importlib.import_module(name) for name in SCRIPTS}
    finally:
        for name in SCRIPTS:
            sys.modules.pop(name, None)


def grade(script: Path, *options: str) -> Result:
    environ = (
        {"XDG_CACHE_HOME": str(script.parent), "TMPDIR": str(script.parent)}
        if script.parent != FOLDER
        else {}
    )
    return python(
        [str(FOLDER / "grade.py"), str(script), "--secret=7", *PATIENT, *options], env=environ
    )


@needs_mpirun
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [*[pytest.param("answer", marks=needs_horovod)] * FULL, "answer_hvdtrain"]
)
def test_our_answers_pass(name: str) -> None:
    done = grade(FOLDER / f"{name}.py", "--json")
    assert done.returncode == 0, done
    result = json.loads(done.stdout)
    assert (result["verdict"], result["code"], result["ranks"], result["secret"]) == (
        "passed",
        0,
        2,
        7,
    )
    assert (
        result["accuracy"] >= 0.95
        and result["accuracy_given"] >= 0.95
        and abs(result["seen_z"]) < 3
    )
    assert "rning:" not in result["output"]
    # 8 x 1437 / 2
    assert len(result["trained_samples"]) == 2 and all(
        5600 < samples <= 5760 for samples in result["trained_samples"]
    )


@needs_mpirun
@pytest.mark.slow
@pytest.mark.parametrize("name", SUBMISSIONS if FULL else SOME)
def test_each_failure_has_its_verdict_and_exit_code(name: str, tmp_path: Path) -> None:
    verdict, code, text, options, shown = SUBMISSIONS[name]
    script = tmp_path / "mine.py"
    script.write_text(text)
    if "--set=folder" in options:
        options = [*options, f"--data={noisy_images(tmp_path)}"]
    done = grade(script, "--ranks=1", *options)
    said = [line for line in done.stderr.splitlines() if not line.startswith("decoded ")]
    assert (done.returncode, said) == (code, []), done
    *before, last = done.stdout.splitlines()
    assert last.startswith(f"{verdict}: ") and shown in done.stdout, done.stdout
    assert all(line.startswith("  | ") for line in before[:-1]) and before[-1].endswith(
        "; again: --secret 7"
    )
    assert done.stdout.replace("\n", "").isprintable() and list(tmp_path.glob("grade*")) == []
    if name == "slow":
        running = [
            path
            for path in Path("/proc").glob("[0-9]*/cmdline")
            if LIVES_S.encode() in _bytes(path)
        ]
        assert running == []


def noisy_images(root: Path) -> Path:
    """Three classes of grey levels that overlap: who knows the images themselves has seen them."""
    rng = np.random.default_rng(6)
    for split, count in (("train", 20), ("test", 70)):
        for label in range(3):
            folder = root / split / str(label)
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = rng.normal(110 + 10 * label, 60, (8, 8, 3)).clip(0, 255).astype(np.uint8)
                PIL.Image.fromarray(pixels).save(folder / f"{number}.png")
    return root


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_verdicts_and_codes_are_those_of_the_page(scripts: dict[str, Any]) -> None:
    codes = scripts["judge"].CODES
    page = dict(
        re.findall(r"^\| ([a-z. ]+) \| (\d+) \|", (FOLDER / "README.md").read_text(), re.MULTILINE)
    )
    assert page == {verdict: str(code) for verdict, code in codes.items()}
    assert {"passed"} | {row[0] for row in SUBMISSIONS.values()} == set(codes)
    assert all(codes[verdict] == code for verdict, code, *_ in SUBMISSIONS.values())


def test_targets_are_those_of_the_page(scripts: dict[str, Any]) -> None:
    page = re.findall(
        r"^\| `([a-z0-9_]+)` \| ([0-9.]+) \| ([0-9.]+) \|",
        (FOLDER / "README.md").read_text(),
        re.MULTILINE,
    )
    assert page == [
        (name, f"{one.target:g}", f"{one.minutes:g}") for name, one in scripts["data"].SETS.items()
    ]


def test_rank_sum_by_hand_and_by_scipy(scripts: dict[str, Any]) -> None:
    """Losses 1, 2 of given samples and 3, 4, 5 of hidden: the ranks of given add up to 3; mean 6,
    variance 2 x 3 x 6 / 12 = 3."""
    seen_z = scripts["judge"].seen_z
    assert seen_z(np.array([2.0, 1.0]), np.array([5.0, 3.0, 4.0])) == pytest.approx(
        np.sqrt(3.0), rel=1e-15
    )
    assert seen_z(np.zeros(3), np.zeros(4)) == 0
    rng = np.random.default_rng(3)
    given = rng.integers(0, 9, 40) / 8
    hidden = rng.integers(0, 9, 50) / 8 + 0.1
    assert seen_z(given, hidden) == pytest.approx(-ranksums(given, hidden).statistic, rel=1e-12)


def test_rank_sum_of_a_random_division_has_deviation_1(scripts: dict[str, Any]) -> None:
    rng = np.random.default_rng(4)
    losses = rng.exponential(1, 300) ** 3
    values = [
        scripts["judge"].seen_z(*np.split(rng.permutation(losses), [150])) for _ in range(2000)
    ]
    assert abs(np.mean(values)) < 4 / np.sqrt(2000) and abs(np.std(values) - 1) < 4 / np.sqrt(
        2 * 2000
    )


def test_a_model_is_judged_by_the_hidden_samples(scripts: dict[str, Any]) -> None:
    judge = scripts["judge"].judge
    answers = scripts["judge"].Answers
    rng = np.random.default_rng(5)
    loss = rng.exponential(1, (2, 400))
    good, bad = (
        answers(np.arange(400) < right, row) for right, row in zip((380, 280), loss, strict=True)
    )
    assert judge(bad, good, 0.95)[0] == "passed"
    assert judge(good, bad, 0.95) == (
        "target missed",
        "accuracy 0.7000 on 400 hidden samples, 0.9500 on val.npz; the target is 0.95",
    )
    assert judge(answers(good.right, loss[0] / 9), good, 0.5)[0] == "trained on val.npz"


def test_shares_by_hand(scripts: dict[str, Any]) -> None:
    """1,437 samples in 8 epochs, 50,000 in 5: a quarter more than half of those."""
    share = scripts["share"]
    assert [
        share.most_samples(1437, 2),
        share.most_samples(50_000, 2),
        share.most_samples(50_000, 4),
    ] == [7185, 156_250, 78_125]
    # 2 % of the norm apart
    here = np.array([3.0, 4.0])
    there = np.array([3.0, 4.1])
    one = share.Share(100, 1.0, here, here)
    other = one._replace(first=2.0)
    assert share.complaint([one, other], 100) is None and share.complaint([one], 100) is None
    assert (
        share.complaint([one, other], 99)
        == "rank 0 trained with 100 samples, at most 99 are its share"
    )
    assert share.complaint([one, one], 100) == "ranks 0 and 1 began with the same samples"
    assert share.complaint([one, None], 100) == "rank 1 of 2 did not train the network of net.py"
    assert share.complaint([one, other._replace(last=there)], 100) is None  # averaged at the end
    # rank 0 took its best epoch's weights
    assert share.complaint([one, other._replace(end=there)], 100) is None
    for odd in (there, here * np.nan, here[:1]):
        wrong = share.complaint([one, other, other._replace(last=odd, end=odd)], 100)
        assert wrong == "ranks 0 and 2 trained apart: their weights differ"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[" * 30_000,
        '{"samples": 1e999, "first": 0, "last": [], "end": []}',
        '{"samples": 1}',
        " " * 2**17,
    ],
)
def test_a_note_that_is_none_counts_as_absent(
    text: str, scripts: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "share-0.json").write_text(text)
    assert scripts["share"].read(tmp_path, 0) is None


def test_hidden_samples_are_not_given_and_classes_are_renumbered(scripts: dict[str, Any]) -> None:
    """Every image of this set is its own number, and its class the number modulo 10."""
    data = scripts["data"]
    every = np.arange(400, dtype=np.uint16).view(np.uint8).reshape(400, 1, 1, 2)
    train, test = (
        data.Samples(every[part], (np.arange(400) % 10)[part])
        for part in (slice(300), slice(300, None))
    )
    parts = data.split(train, test, 7)
    numbers = [
        np.ascontiguousarray(part.x).view(np.uint16).ravel()
        for part in (parts.train, parts.given, parts.hidden)
    ]
    assert [len(part) for part in numbers] == [300, 50, 50]
    assert set(numbers[0]) == set(range(300)) and sorted(np.concatenate(numbers[1:])) == list(
        range(300, 400)
    )
    assert numbers[0].tolist() != sorted(numbers[0])
    new = {
        int(number) % 10: int(label)
        for number, label in zip(numbers[0], parts.train.y, strict=True)
    }
    assert sorted(new.values()) == list(range(10)) and new != {label: label for label in range(10)}
    for part, labels in zip(numbers, (parts.train.y, parts.given.y, parts.hidden.y), strict=True):
        assert [new[int(number) % 10] for number in part] == labels.tolist()
    same = data.split(train, test, 7)
    other = data.split(train, test, 8)
    assert np.array_equal(same.hidden.x, parts.hidden.x) and not np.array_equal(
        other.hidden.x, parts.hidden.x
    )


def test_a_submission_gets_train_and_given_and_nothing_else(
    scripts: dict[str, Any], tmp_path: Path
) -> None:
    data = scripts["data"]
    parts = data.split(*data.official("digits", None), 7)
    data.write(parts, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.npz", "val.npz"]
    with np.load(tmp_path / "train.npz") as train, np.load(tmp_path / "val.npz") as val:
        assert (
            train["x"].shape == (1437, 1, 8, 8)
            and val["x"].shape == (180, 1, 8, 8)
            and set(val.files) == {"x", "y"}
        )
        assert train["mean"] == pytest.approx(train["x"].mean() / 255, rel=1e-6)
        assert train["std"] == pytest.approx(train["x"].std() / 255, rel=1e-6)


@pytest.mark.parametrize("form", ["safetensors", "npz", "pt"])
def test_weights_in_each_form_give_the_answers_of_the_network(
    form: str, scripts: dict[str, Any], tmp_path: Path
) -> None:
    net = trained_net(scripts)
    path = save(net.state_dict(), tmp_path, form)
    read = scripts["net"].Net(1, 10)
    assert scripts["model_file"].find(tmp_path) == path
    scripts["model_file"].load(path, read)
    x = np.random.default_rng(0).integers(0, 256, (7, 1, 8, 8), dtype=np.uint8)
    y = np.arange(7)
    said = scripts["model_file"].answers(read, x, y, (np.array([0.5]), np.array([0.25])))
    with torch.no_grad():
        logits = net.eval()((torch.from_numpy(x).float() / 255 - 0.5) / 0.25).double().numpy()
    expected = np.log(np.exp(logits).sum(1)) - logits[np.arange(7), y]
    assert (
        said.loss == pytest.approx(expected, rel=1e-12)
        and said.right.tolist() == (logits.argmax(1) == y).tolist()
    )


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        (
            "safetensors",
            {"blocks.0.weight": torch.zeros(16, 3, 3, 3)},
            "blocks.0.weight is (16, 3, 3, 3), expected (16, 1, 3, 3)",
        ),
        ("npz", {"more": torch.zeros(1)}, "more is not the network's"),
        (
            "npz",
            {"blocks.1.bias": None, "blocks.0.weight": None},
            "blocks.0.weight is missing; blocks.1.bias is missing",
        ),
        (
            "pt",
            {"classify.bias": torch.full((10,), float("nan"))},
            "classify.bias has values that are not finite",
        ),
        ("pt", {"classify.bias": [1, 2]}, "expected a state_dict"),
        (
            "pt",
            {"classify.bias": torch.zeros(10).to_sparse()},
            "classify.bias is no array of real numbers",
        ),
        (
            "pt",
            {"classify.bias": torch.zeros(10, device="meta")},
            "classify.bias is no array of real numbers",
        ),
        (
            "pt",
            {"classify.bias": torch.zeros(10, dtype=torch.complex64)},
            "classify.bias is no array of real numbers",
        ),
        (
            "safetensors",
            {"classify.bias": torch.zeros(10, dtype=torch.float8_e4m3fn)},
            "classify.bias is no array of real numbers",
        ),
        (
            "pt",
            {"classify.bias": torch.zeros(10, dtype=torch.float8_e5m2)},
            "classify.bias is no array of real numbers",
        ),
        ("pt", {("classify", "bias"): torch.zeros(10)}, "expected a state_dict"),
        ("safetensors", {"more": torch.zeros(2**21)}, "the network's state has at most"),
    ],
)
def test_a_file_of_another_network_is_refused(
    form: str, change: dict[str, Any], message: str, scripts: dict[str, Any], tmp_path: Path
) -> None:
    net = scripts["net"].Net(1, 10)
    state = {
        name: value for name, value in {**net.state_dict(), **change}.items() if value is not None
    }
    with pytest.raises(scripts["model_file"].WrongModel, match=re.escape(message)):
        scripts["model_file"].load(save(state, tmp_path, form), net)


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("compression", "message", "form"),
    [
        (zipfile.ZIP_DEFLATED, r"it holds 536,\d+,\d+ bytes", "npz"),
        (zipfile.ZIP_BZIP2, "compressed in another way", "pt"),
        *[
            (zipfile.ZIP_DEFLATED, r"it holds 536,\d+,\d+ bytes", "pt"),
            (zipfile.ZIP_BZIP2, "compressed in another way", "npz"),
        ]
        * FULL,
    ],
)
def test_a_small_file_that_holds_much_is_not_decompressed(
    form: str, compression: int, message: str, scripts: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / f"model.{form}"
    with zipfile.ZipFile(path, "w", compression) as archive, archive.open("more.npy", "w") as entry:
        np.lib.format.write_array_header_1_0(
            entry, {"descr": "|u1", "fortran_order": False, "shape": (2**29,)}
        )
        for _ in range(2**9):
            entry.write(bytes(2**20))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB
    with pytest.raises(scripts["model_file"].WrongModel, match=message):
        scripts["model_file"].load(path, scripts["net"].Net(1, 10))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**16


def test_what_is_no_file_is_no_model(scripts: dict[str, Any], tmp_path: Path) -> None:
    find = scripts["model_file"].find
    save(trained_net(scripts).state_dict(), tmp_path, "pt").rename(tmp_path / "real")
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "real")
    os.mkfifo(tmp_path / "model.npz")
    (tmp_path / "model.pt").mkdir()
    assert find(tmp_path) is None and find(tmp_path / "absent") is None


class Harmful:
    """A pickle of it writes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("form", ["safetensors", "npz", "pt"])
def test_no_code_of_a_file_runs(form: str, scripts: dict[str, Any], tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    path = tmp_path / f"model.{form}"
    if form == "npz":
        np.savez(path, **{"classify.bias": np.array([Harmful(ran)], dtype=object)})
    else:
        torch.save({"classify.bias": Harmful(ran)}, path)
    with pytest.raises(scripts["model_file"].WrongModel, match=f"model.{form} cannot be read"):
        scripts["model_file"].load(path, scripts["net"].Net(1, 10))
    assert not ran.exists()


def test_a_mistake_in_the_command_is_explained(scripts: dict[str, Any], tmp_path: Path) -> None:
    large = tmp_path / "large.py"
    large.write_text("#" * 100_001)
    with pytest.raises(UserError, match="the script has 100,001 bytes, at most 100,000 are taken"):
        scripts["grade"].check_script(large)
    done = grade(tmp_path / "absent.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr
        == f"there is no such file\n  where: {tmp_path}/absent.py\n  fix: the path of a Python "
        "script\n"
    )

    with pytest.raises(UserError, match="there is no such folder"):
        scripts["data"].official("cifar10", tmp_path / "absent")
    assert not (tmp_path / "absent").exists()
    with pytest.raises(UserError, match="this is a folder"):
        scripts["grade"].check_script(tmp_path)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        *[
            (f"--minutes={text}", f"{text} is no number above 0")
            for text in ("nan", "inf", "0", "-1", "x")
        ],
        ("--silence=inf", "inf is no number above 0"),
        ("--target=nan", "nan is no share of the samples: above 0, at most 1"),
        ("--secret=-1", "-1 is no secret: a whole number from 0"),
        ("--ranks=0", "0 is not a whole number above 0"),
    ],
)
def test_an_option_without_sense_is_named(
    option: str,
    message: str,
    scripts: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["grade.py", "mine.py", option])
    with pytest.raises(SystemExit) as ended:
        scripts["grade"].parse()
    assert ended.value.code == 2 and capsys.readouterr().err.endswith(
        f"error: argument {option.split('=', maxsplit=1)[0]}: {message}\n"
    )


@needs_mpirun
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_grading_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text(OUTLIVES + f"open({str(tmp_path / 'began')!r}, 'w'); time.sleep(2000)\n")
    command = [sys.executable, str(FOLDER / "grade.py"), str(script), "--ranks=1"]
    grading = subprocess.Popen(
        command,
        env=environment({"TMPDIR": str(tmp_path)}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until((tmp_path / "began").exists, "the start of the submission")
        grading.send_signal(number)
        out, err = grading.communicate(timeout=HANG_S)
    finally:
        grading.kill()
    assert (grading.returncode, out) == (130, "")
    assert (
        err
        == "interrupted: no verdict; the job's processes have ended, and its folder is removed\n"
    )
    assert [
        path for path in Path("/proc").glob("[0-9]*/cmdline") if LIVES_S.encode() in _bytes(path)
    ] == []
    assert list(tmp_path.glob("grade*")) == []


def save(state: dict[str, Any], folder: Path, form: str) -> Path:
    path = folder / f"model.{form}"
    if form == "npz":
        np.savez(path, **{name: value.numpy() for name, value in state.items()})
    elif form == "pt":
        torch.save(state, path)
    else:
        save_file(state, path)
    return path


def trained_net(scripts: dict[str, Any]) -> torch.nn.Module:
    """With running statistics that are not those of a new network."""
    torch.manual_seed(2)
    net = scripts["net"].Net(1, 10)
    net(torch.randn(20, 1, 8, 8))
    return net
