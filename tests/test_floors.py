"""The shape of the code: imports point down, heavy ones stay in their leaves, nothing grows past its limit, and --help is fast."""

from __future__ import annotations

import ast
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "hvdtrain"
FILES = sorted(ROOT.rglob("*.py"))
NAMES = [str(path.relative_to(ROOT)) for path in FILES]

FLOOR = {  # folder or top-level file -> floor; a module imports its own folder and lower floors only
    "__init__": 0, "errors": 0, "state": 0, "config": 0, "config_run": 0, "config_text": 0, "configure": 0, "limits": 0, "leaf": 0,
    "manual": 0, "vision": 0,
    "comm": 1, "data": 1, "recipe": 1, "optim": 1, "report": 1,
    "frames": 2, "models": 2, "jax_models": 2, "sinks": 2,
    "run": 3,
    "launch": 4, "__main__": 4,
    "script": 5,
}  # fmt: skip
ALLOWED = {  # the only files that may import these
    "torch": ("vision.py", "comm/hvd.py", "comm/half.py", "comm/torchdist.py", "frames/on_torch.py", "frames/torch_", "models/"),
    "torchvision": ("vision.py",),
    "horovod": ("comm/hvd.py", "frames/torch_reduce.py"),
    "jax": ("frames/on_jax.py", "frames/jax_", "jax_models/"),
    "mpi4py": ("comm/mpi.py", "comm/hvd.py"),
    "matplotlib": ("report/curves.py", "report/scaling_curve.py", "report/figures"),
    "rich": ("report/live.py",),
    "jinja2": ("report/page.py",),
    "pandas": ("report/table.py", "script.py"),
    "tensorboard": ("sinks/tensorboard.py",),
    "mlflow": ("sinks/mlflow.py",),
    "wandb": ("sinks/wandb.py",),
    "pynvml": ("run/energy.py",),
    "pickle": (),
}
BANNED_FILES = {"utils", "helpers", "common", "base", "misc", "manager"}


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def room(module: str) -> str:
    """hvdtrain.run.loop -> run; hvdtrain.state -> state."""
    return module.split(".")[1] if "." in module else "__init__"


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_imports_point_down(path: Path) -> None:
    here = path.relative_to(ROOT).parts[0].removesuffix(".py")
    for module in imports(path):
        if module.split(".")[0] == "hvdtrain" and room(module) in FLOOR:
            there = room(module)
            allowed = here in ("__init__", there) or FLOOR[there] < FLOOR[here] or FLOOR[here] == FLOOR[there] == 0 or here == "__main__"
            assert allowed, f"{path.name} (floor {FLOOR[here]}) imports {module} (floor {FLOOR[there]})"


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_heavy_imports_stay_in_their_leaves(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    for module in imports(path):
        homes = ALLOWED.get(module.split(".")[0])
        assert homes is None or name.startswith(homes), f"{name} imports {module}; only {homes} may"


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_sizes(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) <= (120 if path.name == "loop.py" else 250), f"{path.name} has {len(lines)} lines"
    assert path.stem not in BANNED_FILES
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            count = len([a for a in node.args.posonlyargs + node.args.args if a.arg not in ("self", "cls")])
            assert length <= 60, f"{node.name} has {length} lines"
            assert count <= 7, f"{node.name} takes {count} arguments"


def test_every_file_says_what_it_is() -> None:
    missing = [
        name for name, path in zip(NAMES, FILES, strict=True) if path.read_text() and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert not missing


def test_help_is_fast_and_imports_no_framework() -> None:
    heavy = "numpy", "torch", "jax", "mpi4py", "horovod", "sklearn", "omegaconf", "torchvision"
    code = "import sys; from hvdtrain.__main__ import main; main(['--help']); main(['list']); main(['--help', 'model'])\n"
    code += f"loaded = [m for m in {heavy} if m in sys.modules]\nassert not loaded, loaded"
    best = 9.0
    for _ in range(3):
        start = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])  # of processor time: a busy machine must not fail this
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        best = min(best, sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - start)
        assert done.returncode == 0, done.stderr
    assert "batch.size=64" in done.stdout and "model.widths" in done.stdout
    assert best < 0.3, f"--help took {best:.2f} s"
