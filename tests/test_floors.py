"""The structure of the code: no merge markers, imports point down, heavy imports are in few files,
and --help is fast."""

from __future__ import annotations

import ast
import os
import re
import resource
import subprocess
import sys
from collections import Counter
from pathlib import Path

import import_graph
import pytest

from hvdtrain.config.schema import Config
from hvdtrain.core.extras import extras

REPOSITORY = Path(__file__).parent.parent
ROOT = REPOSITORY / "hvdtrain"
FILES = sorted(ROOT.rglob("*.py"))
NAMES = [str(path.relative_to(ROOT)) for path in FILES]

ALLOWED = {  # the only files that may import these
    "torch": (
        "core/import_torchvision.py",
        "comm/staging.py",
        "comm/horovod.py",
        "comm/mpi_calls.py",
        "comm/meeting.py",
        "comm/torchdist.py",
        "comm/torch_groups.py",
        "extras/airbench/",
        "extras/augmentations/on_device.py",
        "extras/batch_norms/",
        "extras/bench/of_torch.py",
        "extras/context_parallel/",
        "extras/dense/",
        "extras/diloco/",
        "extras/divided/",
        "extras/export/graph/",
        "extras/export/saved_folder.py",
        "extras/fully_sharded/torch/",
        "extras/gossip/",
        "extras/in_turn/",
        "extras/maps/torch_part.py",
        "extras/multilabel/torch_part.py",
        "extras/libraries/",
        "extras/memory_forecast/",
        "extras/noise_scale/meter.py",
        "extras/pipeline/",
        "extras/plan/of_torch/",
        "extras/powersgd/",
        "extras/pretrained/",
        "extras/sample/generate.py",
        "extras/sample/of_torch.py",
        "extras/servers/",
        "extras/tensor/",
        "extras/throughput/sample_flops.py",
        "extras/torchmetrics/",
        "frameworks/keras/torch_module.py",
        "frameworks/torch/",
        "horovod/",
        "tasks/loss_modules.py",
        "tasks/torch.py",
        "tasks/torch_functions.py",
    ),
    "torchvision": ("core/import_torchvision.py",),
    "timm": ("extras/libraries/timm.py",),
    "transformers": ("extras/libraries/transformers.py", "extras/pretrained/conv1d.py"),
    "horovod": (
        "comm/horovod.py",
        "frameworks/torch/parallel/",
        "horovod/engine/through_horovod.py",
    ),
    "jax": (
        "extras/fully_sharded/jax/",
        "extras/sample/of_jax.py",
        "frameworks/jax/",
        "horovod/traced/on_host.py",
    ),
    "keras": ("horovod/keras/", "frameworks/keras/"),
    **dict.fromkeys(("flax", "equinox", "haiku"), ("frameworks/jax/library_models.py",)),
    "tensorflow": ("horovod/tensorflow/", "frameworks/keras/"),
    "mpi4py": ("comm/mpi.py", "comm/horovod.py"),
    "matplotlib": ("extras/",),
    "rich": ("events/progress_display.py",),
    "jinja2": ("extras/report/page.py", "extras/tokenizer_folders/chat_template.py"),
    "pandas": ("records/run.py", "api.py"),
    "tensorboard": ("extras/trackers/",),
    "mlflow": ("extras/trackers/",),
    "wandb": ("extras/trackers/",),
    "optuna": ("extras/sweep/optuna_study.py",),
    "h5py": ("extras/science/data/datasets/hdf5.py", "extras/science/write_netcdf.py"),
    "zarr": ("extras/science/data/datasets/zarr.py", "extras/science/write_zarr.py"),
    "pyarrow": ("extras/science/data/datasets/parquet.py", "extras/tokens/inputs.py"),
    "pynvml": ("extras/energy/counters.py",),
    # between a rank and its own workers, and between ranks: over MPI, or signed
    "pickle": ("data/worker_pool.py", "horovod/objects.py"),
}
MERGE_MARKERS = (b"<" * 7 + b" ", b"|" * 7 + b" ", b">" * 7 + b" ")
BANNED_FILES = {"utils", "helpers", "common", "base", "misc", "manager"}


def test_imports_point_down() -> None:
    assert import_graph.upward() == []


def test_an_extra_uses_those_extras_that_it_needs() -> None:
    assert import_graph.between_extras() == []
    needs = {name: set(extra.needs) for name, extra in extras().items()}
    assert import_graph.circle(needs) == []
    assert all(extra.needs == tuple(sorted(set(extra.needs))) for extra in extras().values())


def test_no_module_imports_itself_through_others() -> None:
    assert import_graph.circle(import_graph.arrows()) == []


def test_no_package_imports_itself_through_others() -> None:
    assert import_graph.circle(import_graph.package_arrows(top=False)) == []


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_heavy_libraries_are_imported_only_where_allowed(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    for module in import_graph.imported_names(path):
        allowed = ALLOWED.get(module.split(".")[0])
        assert allowed is None or name.startswith(allowed), (
            f"{name} imports {module}; only {allowed} may"
        )


def test_no_file_has_markers_of_a_merge() -> None:
    files = [path for path in REPOSITORY.iterdir() if path.is_file()]
    for folder in ("hvdtrain", "tests", "docs", "labs", "benchmarks", "configs", "jobs", ".ci"):
        files += [
            path
            for path in (REPOSITORY / folder).rglob("*")
            if path.is_file() and path.suffix != ".pyc"
        ]
    marked = [
        f"{path.relative_to(REPOSITORY)}:{number}"
        for path in files
        for number, line in enumerate(path.read_bytes().splitlines(), 1)
        if line.startswith(MERGE_MARKERS)
    ]
    assert len(files) > 1000 and marked == []


def test_no_file_has_a_name_without_meaning() -> None:
    assert not BANNED_FILES & {path.stem for path in FILES}


def test_no_two_test_files_have_the_same_name() -> None:
    """pytest imports them by that name alone."""
    names = [path.name for path in (REPOSITORY / "tests").rglob("test_*.py")]
    assert len(names) > 200 and sorted(names) == sorted(set(names))


SAME_CLASS_NAMES = {  # class names that may occur twice, and why
    "GPT": "one published model, in torch and in JAX; messages name the class",
    "SyncBatchNorm": "torch's name for hvdtrain's own norm, and in hvdtrain.horovod Horovod's",
}


def test_each_class_name_occurs_once() -> None:
    places: dict[str, set[str]] = {}
    for name, path in zip(NAMES, FILES, strict=True):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, set()).add(name)
    assert {name for name, files in places.items() if len(files) > 1} == SAME_CLASS_NAMES.keys(), {
        name: files
        for name, files in places.items()
        if len(files) > 1 and name not in SAME_CLASS_NAMES
    }


def test_every_file_has_a_docstring() -> None:
    missing = [
        name
        for name, path in zip(NAMES, FILES, strict=True)
        if path.read_text() and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert not missing


def packed_assignments(source: str) -> list[int]:
    """Lines with a tuple assignment of unrelated values, `a, b = x, y`, which hides one of them.

    A swap, unpacking, subscripts, and a value that reads an earlier target are not meant.
    """
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Assign) and _is_packed(node)
    ]


def _is_packed(node: ast.Assign) -> bool:
    (targets, *others), values = node.targets, node.value
    if others or not isinstance(targets, ast.Tuple) or not isinstance(values, ast.Tuple):
        return False
    read = {ast.unparse(each) for each in ast.walk(values)}
    return all(
        isinstance(target, (ast.Name, ast.Attribute)) and ast.unparse(target) not in read
        for target in targets.elts
    ) and not any(isinstance(value, ast.Starred) for value in values.elts)


def test_packed_assignments_are_recognized() -> None:
    assert packed_assignments("a, b = 1, 2\nself.a, b = f(), (3, 4)\n") == [1, 2]
    related = "a, b = b, a\na, b = f()\nx[0], y = 1, 2\na, b = *c, 3\ni, j = j, i + j\n"
    assert packed_assignments(related) == []


def test_each_assignment_has_a_line_of_its_own() -> None:
    packed = [
        f"{name}:{line}"
        for name, path in zip(NAMES, FILES, strict=True)
        for line in packed_assignments(path.read_text())
    ]
    assert packed == []


def asks_for_kinds_of_tasks(source: str) -> list[int]:
    """Lines that ask whether a task is of a class, or has a member: Task has defaults for all."""
    tree = ast.parse(source)
    of_tasks = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hvdtrain.tasks")
        for alias in node.names
    }
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and _asks_for_kind(node, of_tasks)
    ]


def _asks_for_kind(call: ast.Call, of_tasks: set[str]) -> bool:
    name = ast.unparse(call.func)
    if name == "isinstance":
        return bool(
            {each.id for each in ast.walk(call.args[1]) if isinstance(each, ast.Name)} & of_tasks
        )
    return _asks_for_member(call, {"task"})


def _asks_for_member(call: ast.Call, of: set[str]) -> bool:
    """Whether it is getattr() or hasattr() of a variable or an attribute of one of these names."""
    name = ast.unparse(call.func)
    return name in ("getattr", "hasattr") and ast.unparse(call.args[0]).split(".")[-1] in of


def test_nobody_outside_asks_for_the_class_of_a_task() -> None:
    imported = "from hvdtrain.tasks.language import Language as L\n"
    asking = ["isinstance(x, (int, L))", "getattr(self.task, 'masks', {})", "hasattr(task, 'y')"]
    assert all(asks_for_kinds_of_tasks(imported + line) == [2] for line in asking)
    assert asks_for_kinds_of_tasks(f"{imported}isinstance(x, int)\ngetattr(x.task.name, 'y')") == []
    asked = [
        f"{name}:{line}"
        for name, path in zip(NAMES, FILES, strict=True)
        if not name.startswith("tasks/")
        for line in asks_for_kinds_of_tasks(path.read_text())
    ]
    assert asked == []


def test_nobody_outside_asks_whether_a_source_has_a_member() -> None:
    of = {"source", "train", "val", "inner", "images"}
    asked = [
        f"{name}:{call.lineno}"
        for name, path in zip(NAMES, FILES, strict=True)
        if not name.startswith(("data/around_source.py", "horovod/"))
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and _asks_for_member(call, of)
    ]
    assert asked == []


# strings of data/ with keys of other sections than data: may only shrink
KEYS_OF_OTHERS = {
    "data/field.py": 4,
    "data/images/augment.py": 3,
    "data/images/averaging.py": 1,
}
# files of data/ outside of configured/ with a key as the place of an error, not an option
KEYS_AS_PLACES = {
    "data/around_source.py",
    "data/worker_pool.py",
}


def strings_with(pattern: str, source: str) -> list[str]:
    """Strings of the code but docstrings that a pattern is found in."""
    tree = ast.parse(source)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and isinstance(node.body[0], ast.Expr)
    }
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in docstrings
        and re.search(pattern, node.value)
    ]


def test_data_does_not_know_the_keys_of_others() -> None:
    """It names the option that is wrong; configured/ adds its key, and where that was set."""
    code = "'task.a'\nf('task.name=x', f'{a}batch.size')"
    assert sorted(strings_with("task|batch", code)) == ["batch.size", "task.name=x"]
    others = "|".join(Config.model_fields.keys() - {"data"})
    strings = {
        name: path.read_text()
        for name, path in zip(NAMES, FILES, strict=True)
        if name.startswith("data/") and not name.startswith("data/configured/")
    }
    of_others = {
        name: len(strings_with(rf"\b({others})\.[a-z_]+[= ]|^({others})\.[a-z_]+$", text))
        for name, text in strings.items()
    }
    assert {name: count for name, count in of_others.items() if count} == KEYS_OF_OTHERS
    as_places = {name for name, text in strings.items() if strings_with(r"^data\.[a-z_]+$", text)}
    assert as_places == KEYS_AS_PLACES


def test_a_module_that_a_text_names_is_there() -> None:
    """As "hvdtrain.extras.servers.arrangement:Servers", which only some jobs import."""
    named = re.compile(r'"(hvdtrain(?:\.\w+)+):(\w+)"')
    found = {match.groups() for path in FILES for match in named.finditer(path.read_text())}
    missing = [
        (module, name)
        for module, name in sorted(found)
        if not (path := REPOSITORY / f"{module.replace('.', '/')}.py").is_file()
        or not re.search(rf"^(class|def) {name}\b", path.read_text(), re.MULTILINE)
    ]
    assert len(found) >= 4 and missing == []


def test_help_is_fast_and_imports_no_framework() -> None:
    heavy = (
        "numpy",
        "torch",
        "jax",
        "mpi4py",
        "horovod",
        "sklearn",
        "yaml",
        "torchvision",
        "keras",
        "tensorflow",
    )
    code = "import sys; from hvdtrain.__main__ import main; main(['--help'])\n"
    code += "main(['--help', 'keys']); main(['list']); main(['--help', 'model'])\n"
    code += (
        f"loaded = [m for m in {heavy} if m in sys.modules]\nassert not loaded, "
        "loaded\nprint(*sys.modules)"
    )
    # a user's has none
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
    }
    best = 9.0
    for _ in range(3):
        # of processor time, which other processes affect little
        start = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=False,
            env=environment,
        )
        best = min(best, sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - start)
        assert done.returncode == 0, done.stderr
    assert "batch.size=64" in done.stdout and "model.widths" in done.stdout
    modules = done.stdout.splitlines()[-1].split()
    of_extras = [name.split(".")[2] for name in modules if name.startswith("hvdtrain.extras.")]
    others = len(modules) - len(of_extras)
    assert others < 270, f"--help imports {others} modules besides the registrations of extras"
    assert max(Counter(of_extras).values()) <= 2  # the package, keys.py
    assert best < 1.0, f"--help took {best:.2f} s"  # 0.4 on a slow machine
