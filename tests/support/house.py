"""Measures the size and depth of the source: `python tests/support/house.py [hvdtrain's folder, or
another commit's]`.

It counts modules, their lines, protocols, classes that share a name, and for each feature the
modules outside its files that name it. It runs the smallest job, 2 steps of a linear model on
digits, on two MPI ranks, and counts the modules that it imports. It also counts hvdtrain's stack
frames, and their files, from main() to backward() and to the engine's allreduce of a gradient.
"""

from __future__ import annotations

import ast
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2] / "hvdtrain"


class Words(NamedTuple):
    """How code names a feature."""

    pattern: str
    own_files: tuple[str, ...]  # parts of the paths of its files


# Left out: words of other libraries (transformers' custom_pipelines, Matplotlib's shrinkA, torch's
# pt_elastic), the elastic mode of Horovod's API, and `launch --elastic`, which restarts jobs.
FEATURES = {
    "pipeline": Words(r"pipeline(?!s\b)", ("pipeline",)),
    "tensor": Words(
        r"parallel\.tensor|parallel\.sequence|mesh\.tensor", ("extras/tensor", "mesh.py")
    ),
    "ema": Words("ema", ("optim/weight_average.py",)),
    "shrink": Words(
        r"(?<!pt_)(elastic|shrink(?![AB]\b))", ("elastic", "lost.py", "horovod/", "extras/launch/")
    ),
    "servers": Words("servers", ("extras/servers",)),
    "noise_scale": Words("noise_scale", ("noise",)),
    "dense": Words(r"parallel\.dense|dense_part|dense_updates", ("extras/dense",)),
    "views": Words("views", ("views", "extras/augmentations/")),
}
# what excludes what, and the keys, here and in extras
DATA = ("features/", "config/sections/", "config/schema.py", "/features.py", "/keys.py")
SHORT = 40  # lines
PROBE = """
import sys, traceback
deepest = {}
def note(what):
    frames = [f for f in traceback.extract_stack() if "hvdtrain" in f.filename]
    deepest.setdefault(what, (len(frames), len({f.filename for f in frames})))
import torch
backward = torch.autograd.backward
def noted(*arguments, **named):
    note("backward")
    return backward(*arguments, **named)
torch.autograd.backward = noted
from hvdtrain.comm import mpi
start = mpi.MpiCommunicator.start_allreduce
def seen(self, x, name, op="sum"):
    if name.startswith("gradient"):
        note("allreduce")
    return start(self, x, name, op)
mpi.MpiCommunicator.start_allreduce = seen
from hvdtrain.__main__ import main
code = main(sys.argv[1:])
ours = [name for name in sys.modules if name.startswith("hvdtrain.")]
print("found", code, len(ours), *(f"{what}={frames}/{files}" for what, (frames, files) in deepest.items()))
"""  # noqa: E501
JOB = "framework=torch model.name=linear data.name=digits stop.steps=2 log.every_steps=1"


def modules(root: Path) -> dict[Path, str]:
    """The text of each module; an __init__.py is none."""
    found = {path: path.read_text() for path in sorted(root.rglob("*.py"))}
    return {path: text for path, text in found.items() if path.name != "__init__.py"}


def classes(texts: dict[Path, str]) -> list[ast.ClassDef]:
    return [
        node
        for text in texts.values()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef)
    ]


def is_protocol(node: ast.ClassDef) -> bool:
    return any(
        ast.unparse(base).partition("[")[0] in ("Protocol", "typing.Protocol")
        for base in node.bases
    )


def code_of(text: str) -> str:
    """Without comments and docstrings, in which a feature may be named."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(
            node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        ) and ast.get_docstring(node, clean=False):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def named_outside(texts: dict[Path, str], root: Path) -> dict[str, int]:
    """Modules outside of a feature's own files whose code has its word, as a name or a part of
    one."""
    codes = {path.relative_to(root).as_posix(): code_of(text) for path, text in texts.items()}
    return {
        name: sum(
            not any(part in path for part in (*words.own_files, *DATA))
            and bool(re.search(rf"(?<![a-zA-Z])({words.pattern})", code))
            for path, code in codes.items()
        )
        for name, words in FEATURES.items()
    }


def measured(root: Path) -> str:
    """What PROBE says of the smallest job on the tree of `root`."""
    with tempfile.TemporaryDirectory() as folder:
        start = [
            "mpirun",
            "--allow-run-as-root",
            "--oversubscribe",
            "-np",
            "2",
            sys.executable,
            "-c",
            PROBE,
        ]
        command = [*start, *JOB.split(), "comm.engine=mpi", f"run={folder}/run"]
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(root.parent)},
            capture_output=True,
            text=True,
            check=False,
        )
    found = re.search(r"^found (.*)$", done.stdout, re.MULTILINE)
    return found[1] if found else f"not measured: {done.stderr[-500:]}"


def main() -> None:
    root = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT
    texts = modules(root)
    lines = [text.count("\n") for text in texts.values()]
    found = classes(texts)
    shared = {name: n for name, n in Counter(node.name for node in found).items() if n > 1}
    print(
        f"modules        {len(texts)}, without __init__; {sum(lines):,} lines, median "
        f"{statistics.median(lines):.0f}, largest {max(lines)}"
    )
    print(f"short modules  {sum(n < SHORT for n in lines)} under {SHORT} lines")
    print(
        f"protocols      {sum(map(is_protocol, found))} of {len(found)} classes; {len(shared)} "
        "class names in several modules"
    )
    print(
        "features       named by modules outside of their own files: "
        + ", ".join(f"{k} {n}" for k, n in named_outside(texts, root).items())
    )
    print(f"smallest job   exit code, modules imported, frames/files from main: {measured(root)}")


if __name__ == "__main__":
    main()
