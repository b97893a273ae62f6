"""Ranks that differ are refused before the first step: by what differs, the rank and its host."""

from __future__ import annotations

import re
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pool import on_ranks
from ranks import FULL, mpirun, needs_horovod, needs_mpirun

from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.config.read import configure
from hvdtrain.core.arrays import digest
from hvdtrain.data.datasets import synthetic
from hvdtrain.data.labels import digest_of_labels
from hvdtrain.errors import UserError
from hvdtrain.training.replicas import same_job
from hvdtrain.training.replicas.same_job import check_same_facts
from hvdtrain.training.replicas.software import variables
from hvdtrain.training.replicas.user_code import module_digests, named_modules

HOST = socket.gethostname()
WHERE = (
    f"  where: rank 1 on {HOST}, against 1 equal rank; there is no majority, so it is unknown "
    "which of them is wrong\n"
)
HEX = "[0-9a-f]{12,16}"
MESSAGES = {  # case -> the first line and the fix
    "model code": (
        rf"the code of mine\.layers differs between ranks: {HEX} on rank 0, {HEX} on rank 1",
        "use one installation",
    ),
    "labels": (
        f"digest of the training labels differs between ranks: {HEX} on rank 0, {HEX} on rank 1",
        "copy the same data",
    ),
    "pixels": (
        f"digest of the training images differs between ranks: {HEX} on rank 0, {HEX} on rank 1",
        "copy the same data",
    ),
    "data order": (
        f"digest of the training images differs between ranks: {HEX} on rank 0, {HEX} on rank 1",
        "copy the same data",
    ),
    "configuration": (
        "seed differs between ranks: 1 on rank 0, 2 on rank 1",
        "give every rank the same command",
    ),
    "environment": (
        "PYTHONHASHSEED differs between ranks: nothing on rank 0, 7 on rank 1",
        "give every rank the same value",
    ),
    "versions": (
        rf"the version of numpy differs between ranks: {re.escape(np.__version__)} on rank 0, "
        r"1\.99 on rank 1",
        "install the same",
    ),
}


@needs_mpirun
@pytest.mark.parametrize(
    "engine",
    [
        "mpi",
        *[
            pytest.param("horovod", marks=[needs_horovod, pytest.mark.slow]),
            pytest.param("torchdist", marks=pytest.mark.slow),
        ]
        * FULL,
    ],
)
def test_seven_kinds_of_differences_are_refused(tmp_path: Path, engine: str) -> None:
    each = on_ranks(engine, 2, "same_job_on_ranks:found", str(tmp_path))
    messages: dict[str, list[str]] = {
        case: [one["messages"][case] for one in each] for case in each[0]["messages"]
    }
    assert messages.pop("same") == ["", ""]
    assert messages.keys() == MESSAGES.keys()
    for case, (of_rank_0, of_rank_1) in messages.items():
        what, fix = MESSAGES[case]
        assert of_rank_0 == of_rank_1 and re.fullmatch(
            f"{what}\n{re.escape(WHERE)}  fix: {fix}.*", of_rank_0
        ), (case, of_rank_0)


@needs_mpirun
def test_a_job_whose_ranks_differ_does_not_start(tmp_path: Path) -> None:
    odd = 'if [ "$OMPI_COMM_WORLD_RANK" = 1 ]; then export PYTHONHASHSEED=7; fi; exec "$@"'
    words = ["framework=numpy", "model.name=linear", "comm.engine=mpi", f"run={tmp_path / 'run'}"]
    start = ["sh", "-c", odd, "sh", sys.executable, "-m", "hvdtrain", *words]
    result = mpirun(2, ["-c", "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])", *start])
    assert result.returncode == 2 and not (tmp_path / "run").exists(), result
    assert (
        result.stderr.count("PYTHONHASHSEED differs between ranks: nothing on rank 0, 7 on rank 1")
        == 1
    ), result.stderr


class Third(SingleProcessCommunicator):
    """The last rank of four; `others` is what the others exchange."""

    rank = 3
    size = 4

    def __init__(self, *others: Any) -> None:
        self.others = others
        self.sent = list[Any]()

    def allgather_object(self, thing: Any) -> list[Any]:
        self.sent.append(thing)
        if isinstance(thing, str):
            return [*(same_job._digest(facts) for _, facts in self.others), thing]
        return [*self.others, thing]


def test_the_minority_is_named_and_further_differences_are_counted() -> None:
    same = {"data": {"samples": 5}, "configuration": {"seed": 1, "log.token": "ab"}}
    odd = {"data": {"samples": 6}, "configuration": {"seed": 1, "log.token": "cd"}}
    equal = Third(
        *[("n1", {"configuration": same["configuration"], "data": {"samples": 5, "classes": None}})]
        * 3
    )
    check_same_facts(equal, same)
    assert [len(sent) for sent in equal.sent] == [64], (
        "a digest, and nothing else where all are equal"
    )
    with pytest.raises(UserError) as caught:
        check_same_facts(Third(("n1", odd), ("n1", same), ("n2", same)), same)
    assert (
        caught.value.what
        == "samples differs between ranks: 5 on rank 1, 6 on rank 0; 1 more differ"
    )
    assert caught.value.where == "rank 0 on n1, against 3 equal ranks"
    with pytest.raises(
        UserError, match=r"log.token differs between ranks: \*\*\* on rank 0, \*\*\* on rank 3\n"
    ):
        check_same_facts(Third(*[("n1", same)] * 3), same | {"configuration": odd["configuration"]})


def test_modules_are_digested_as_import_would_find_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of them runs, which could change what a later import computes."""
    monkeypatch.syspath_prepend(str(tmp_path))
    files = {
        "net.py": "import json, numpy, side\nfrom deep import a\nfrom . import nothing\ndef "
        "f():\n    import late\n",
        "side.py": "raise SystemExit\n",
        "late.py": "x = (\n",
        "deep/__init__.py": "raise SystemExit\n",
        "deep/a.py": "from .b.c import x\nfrom ..too_far import y\n",
        "deep/b/__init__.py": "",
        "deep/b/c.py": "from .. import d\n",
        "deep/d.py": "import net\n",
        "deep/unused.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = module_digests(["net:Net"])
    assert sorted(found) == [
        "deep",
        "deep.a",
        "deep.b",
        "deep.b.c",
        "deep.d",
        "late",
        "net",
        "side",
    ]
    (tmp_path / "deep/d.py").write_text("import net  # altered\n")
    assert {name for name, code in module_digests(["net.Net"]).items() if code != found[name]} == {
        "deep.d"
    }
    assert sorted(module_digests(["yaml.nodes:Node"])) == ["yaml", "yaml.nodes"], (
        "an installed package has a version"
    )
    assert module_digests(["no_such_module:Net", "hvdtrain.api:train"]) == {}
    config = configure(None, ["model.name=net:Net", "optim.name=torch.optim.RMSprop"])
    assert named_modules(config) == ["net:Net", "torch.optim.RMSprop"]


def test_a_package_of_pip_install_target_has_a_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are not compared; those beside it are, and those of a checkout that is installed as
    editable."""
    (tmp_path / "target/large").mkdir(parents=True)
    (tmp_path / "target/large/__init__.py").write_text("from large import part\n")
    (tmp_path / "target/large/part.py").write_text("")
    (tmp_path / "target/large_one.py").write_text("")
    (tmp_path / "target/large-1.0.dist-info").mkdir()
    (tmp_path / "target/large-1.0.dist-info/RECORD").write_text(
        "large/__init__.py,sha256=a,1\nlarge/part.py,sha256=b,0\nlarge_one.py,,\n"
    )
    (tmp_path / "checkout/small").mkdir(parents=True)
    (tmp_path / "checkout/small/__init__.py").write_text("")
    (tmp_path / "checkout/small.egg-info").mkdir()
    (tmp_path / "target/mine_of_target.py").write_text("import large, large_one, small\n")
    monkeypatch.setattr(
        sys,
        "path",
        [str(tmp_path), str(tmp_path / "target"), str(tmp_path / "checkout"), *sys.path],
    )
    assert sorted(module_digests(["mine_of_target:Net"])) == ["mine_of_target", "small"]


def test_variables_that_change_results() -> None:
    environ = {
        "PATH": "/bin",
        "PYTHONHASHSEED": "0",
        "MY_SEED": "3",
        "OMP_NUM_THREADS": "2",
        "JAX_ENABLE_X64": "1",
    }
    assert variables(environ) == {"PYTHONHASHSEED": "0", "MY_SEED": "3", "JAX_ENABLE_X64": "1"}


def test_images_of_a_large_set_are_drawn_by_the_seed() -> None:
    source = synthetic.build("synthetic", None, "train", samples=10**9, shape=(4, 4, 1))
    other = synthetic.build("synthetic", None, "train", samples=10**9, shape=(4, 4, 1), classes=9)
    assert source.image_digest(1) == source.image_digest(1) != source.image_digest(2)
    assert source.label_digest() != other.label_digest() and source.image_digest(
        1
    ) != other.image_digest(1)
    y = np.arange(10)
    assert (
        digest_of_labels(y)
        == digest({"y": y})
        == digest_of_labels(y.astype(">i8"))
        != digest_of_labels(y[::-1])
    )
