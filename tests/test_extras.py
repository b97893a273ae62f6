"""Extras: without the folder of one, or of all, everything else works; their page lists them."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from ranks import ROOT, mpirun, needs_an_extra, needs_mpirun, python
from without_extra import needing

from hvdtrain.config.plugins import ALIASES
from hvdtrain.config.read import configure, to_record
from hvdtrain.config.sections.extra_keys import key_classes
from hvdtrain.core.extras import commands, extras, keys_of
from hvdtrain.errors import UserError

FOLDER = ROOT / "hvdtrain" / "extras"
PAGE = ROOT / "docs" / "extras.md"
EVERYTHING = """
import contextlib, importlib, io, sys
from pathlib import Path
root, *missing = [word for word in sys.argv[1:] if " " not in word]
gone = [word.split() for word in sys.argv[1:] if " " in word]
libraries = "torch jax keras tensorflow horovod matplotlib pandas optuna h5py zarr pyarrow mlflow wandb"
sys.modules.update(dict.fromkeys(libraries.split()))  # their import fails, in no time
sys.path.insert(0, root)
import hvdtrain
from hvdtrain.__main__ import main
from hvdtrain.comm.engines import features_of
from hvdtrain.config.read import configure
from hvdtrain.context.loop import module_of_several_models
from hvdtrain.core.extras import column_encoder, commands, document_files, extras, implementation, tables
from hvdtrain.core.extras import library_metrics, maps, maps_module
from hvdtrain.tasks.user_functions import read_metrics
from hvdtrain.data.files.staging import stage_data
from hvdtrain.data.input_encoding import encoding_of_run
from hvdtrain.errors import UserError
from hvdtrain.features.every_feature import FEATURES, conflicts_of
from hvdtrain.features.job_feature import PlannedJob
from hvdtrain.training.conflicts import refuse_conflicts
from hvdtrain.training.datasets import open_datasets
from hvdtrain.training.pretrained import check_weights
assert Path(hvdtrain.__file__).parents[1] == Path(root), hvdtrain.__file__
assert not set(extras()) & set(missing), extras()
imported = 0
for path in sorted(Path(root).glob("hvdtrain/**/*.py")):
    parts = path.relative_to(root).with_suffix("").parts
    try:
        importlib.import_module(".".join(parts).removesuffix(".__init__"))
        imported += 1
    except ImportError as error:
        assert (error.name or "").partition(".")[0] in libraries.split(), (path, error)
topics = ["data", "task", "model", "optim", "log", "train", *commands()]
pages = [["--help"], ["--help", "keys"], ["list"], ["extras"], *(["--help", topic] for topic in topics)]
assert not any(main(page) for page in pages)
words = ["framework=numpy", "model.name=linear"]
assert main(["check", *words] if "check" in commands() else ["--print-config", *words]) == 0
for command in {"check", "evaluate", "export", "launch", "predict", "report"} - set(commands()):
    shown = io.StringIO()
    with contextlib.redirect_stderr(shown):
        assert main([command, *words]) == 2
    assert f"no extra with the command {command}" in shown.getvalue(), shown.getvalue()
for command, option in gone:
    shown = io.StringIO()
    with contextlib.redirect_stderr(shown):
        assert main([command, option, "--", "run=r"]) == 2
    assert f"argument '{option}'" in shown.getvalue(), shown.getvalue()
if column_encoder() is None:
    Path(root, "columns.json").write_text("{}")
    try:
        encoding_of_run(Path(root))
    except UserError as error:
        assert "this copy of hvdtrain has no extra that does so" in error.what, error
    else:
        raise AssertionError("the columns of a run are encoded without an extra")
if tables() and not document_files():
    Path(root, "t.csv").write_text("a,y\\nb,0\\n")
    try:
        open_datasets(configure(None, ["data.name=csv", f"data.root={root}/t.csv", "data.text=a"]))
    except UserError as error:
        assert "data.text reads texts, but this copy of hvdtrain has no extra" in error.what, error
    else:
        raise AssertionError("texts are read without an extra")
if implementation("data.stage") is None:
    try:
        stage_data("digits", None, {}, "disk", "data.stage")
    except UserError as error:
        assert "no extra that copies data" in error.what, error
    else:
        raise AssertionError("data are copied without an extra")
if implementation("model.weights") is None:
    try:
        check_weights(configure(None, ["model.weights=here"]))
    except UserError as error:
        assert "no extra that loads weights" in error.what, error
    else:
        raise AssertionError("weights are loaded without an extra")
for words in (words.split() for each in FEATURES for words in each.examples):
    config = configure(None, words)
    job = PlannedJob(config, "torchdist", features_of("torchdist"), 2)
    missing = [error for error in conflicts_of(job) if "no extra that does" in error.what]
    needed = [
        each for each in FEATURES if each.on(config) and not each.is_installed_for(config)
    ]
    assert len(missing) == len(needed), (words, missing)
if implementation("profile.steps") is None:
    try:
        refuse_conflicts(configure(None, ["profile.steps=1:2"]), "torchdist", 2)
    except UserError as error:
        assert "no extra that traces steps" in error.what, error
    else:
        raise AssertionError("steps are traced without an extra")
if maps() is None:
    try:
        maps_module("pictures", "log.samples")
    except UserError as error:
        assert "no extra for masks and maps" in error.what and error.where == "log.samples", error
    else:
        raise AssertionError("maps are drawn without an extra")
if implementation("ctx.prepare(name=)") is None:
    try:
        module_of_several_models()
    except UserError as error:
        assert error.what == "this copy of hvdtrain has no extra that trains several models in turn"
        assert error.where == "ctx.prepare(..., name=)", error
    else:
        raise AssertionError("several models are trained without an extra")
if implementation("hvdtrain.predict()") is None:
    for ask in (hvdtrain.predict, hvdtrain.evaluate):
        try:
            ask("run", [1.0])
        except UserError as error:
            assert f"no extra that does hvdtrain.{ask.__name__}()" in error.what, error
        else:
            raise AssertionError("a model is asked without an extra")
if library_metrics() is None:
    metric = type("Metric", (), {"__module__": "torchmetrics.metric"})()
    try:
        read_metrics({"f1": (metric, "max")})
    except UserError as error:
        assert "metric f1 belongs to torchmetrics, which needs an extra" in error.what, error
    else:
        raise AssertionError("a metric of torchmetrics is computed without an extra")
print("imported", imported)
"""  # noqa: E501
OF_COPY = """
import sys
sys.path.insert(0, sys.argv[1])
import hvdtrain
from hvdtrain.__main__ import main
assert hvdtrain.__file__.startswith(sys.argv.pop(1)), hvdtrain.__file__
sys.exit(main())
"""
JOB = ["model.name=linear", "data.name=digits", "stop.steps=2", "batch.size=64"]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """hvdtrain without its extras."""
    root = tmp_path_factory.mktemp("copy")
    ignored = shutil.ignore_patterns("__pycache__", "extras")
    shutil.copytree(ROOT / "hvdtrain", root / "hvdtrain", ignore=ignored)
    return root


@pytest.fixture
def with_extras(copy: Path) -> Iterator[Path]:
    """The copy with every extra, until the test ends."""
    target = copy / "hvdtrain" / "extras"
    shutil.copytree(FOLDER, target, ignore=shutil.ignore_patterns("__pycache__"))
    yield copy
    shutil.rmtree(target)


def imported(root: Path, *missing: str) -> int:
    """How many modules of a copy can be imported, all its pages of help being printed; an option
    of an extra that is missing is unknown."""
    gone = [name for extra in missing for name in extras()[extra].commands]
    modes = [name for extra in missing for name in extras()[extra].modes]
    modes = [name for name in modes if name.split()[0] not in gone]
    done = python(["-c", EVERYTHING, str(root), *missing, *modes], is_warm=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


@pytest.mark.in_turn
@pytest.mark.parametrize("name", extras())
def test_everything_works_without_one_extra(name: str, with_extras: Path) -> None:
    """Those that need it are deleted, too."""
    missing = [name, *needing(name)]
    print("deleted:", *missing)
    for each in missing:
        shutil.rmtree(with_extras / "hvdtrain" / "extras" / each)
    assert imported(with_extras, *missing) > 250


def test_an_extra_without_one_that_it_needs_is_one_error(with_extras: Path) -> None:
    folder = with_extras / "hvdtrain" / "extras"
    (folder / "stages").mkdir()
    made = 'EXTRA = Extra("stable", "Divides.", needs=("parts",))'
    (folder / "stages" / "__init__.py").write_text(
        f"from hvdtrain.core.extras import Extra\n\n{made}\n"
    )
    env = {"PYTHONPATH": str(with_extras)}
    for words in (["extras"], ["--help"], JOB):
        done = python(["-c", OF_COPY, str(with_extras), *words], env=env)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.splitlines() == [
            "hvdtrain: the extra stages needs the extra parts, which is not installed",
            f"  where: {folder}",
            "  fix: add the folder parts, or delete the folder stages",
        ]
    (folder / "parts").mkdir()
    made = 'EXTRA = Extra("stable", "Has parts.")'
    (folder / "parts" / "__init__.py").write_text(
        f"from hvdtrain.core.extras import Extra\n\n{made}\n"
    )
    done = python(["-c", OF_COPY, str(with_extras), "extras"], env=env)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\nstages (stable): Divides.\n  needs parts\n" in done.stdout


@pytest.mark.in_turn
@pytest.mark.parametrize("name", ["jax", "keras"])
def test_everything_works_without_the_folder_of_a_framework(name: str, with_extras: Path) -> None:
    shutil.move(with_extras / "hvdtrain" / "frameworks" / name, with_extras / name)
    try:
        assert imported(with_extras) > 250
        env = {"PYTHONPATH": str(with_extras)}
        hvdtrain = ["-c", OF_COPY, str(with_extras)]
        done = python([*hvdtrain, *JOB, f"framework={name}"], env=env)
        assert (done.returncode, done.stderr.splitlines()[0]) == (
            2,
            f"hvdtrain: unknown name: {name}",
        )
    finally:
        shutil.move(with_extras / name, with_extras / "hvdtrain" / "frameworks" / name)


@needs_mpirun
def test_a_job_trains_without_any_extra(copy: Path, tmp_path: Path) -> None:
    assert not (copy / "hvdtrain" / "extras").exists() and imported(copy, *extras()) > 250
    env = {"PYTHONPATH": str(copy)}
    hvdtrain = ["-c", OF_COPY, str(copy)]
    words = [*hvdtrain, *JOB, f"run={tmp_path / 'run'}"]
    done = mpirun(2, words, env=env)
    assert done.returncode == 0 and done.stdout.startswith("ranks   2 "), done
    done = python([*hvdtrain, f"resume={tmp_path / 'run'}", "stop.steps=3"], env=env)
    assert done.returncode == 0, done.stderr
    done = python([*hvdtrain, "extras"], env=env)
    assert done.stdout == "this copy of hvdtrain has no extras\n"


def test_make_fills_a_wheelhouse_without_the_extra_that_builds_horovod(
    copy: Path, tmp_path: Path
) -> None:
    settings = [f"PY={sys.executable}", f"VENV={tmp_path}", "READY=", "HOROVOD=", "INSTALL=echo"]
    settings.append("ARGS=")  # of the make that runs this test
    env = os.environ | {"PYTHONPATH": str(copy)}

    def said(*command: str, status: int) -> str:
        done = subprocess.run(
            command, cwd=copy, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == status, done
        return done.stdout

    left_out = "Horovod is left out: this copy of hvdtrain has no extra that builds it\n"
    make = ["make", "-s", "-f", str(ROOT / "Makefile"), "wheelhouse", "DIR=house"]
    filled = "--extras horovod mpi notebook torchvision --wheelhouse house\n"
    assert said(*make, *settings, status=0) == left_out + filled
    assert said(sys.executable, "-m", "hvdtrain.cli.horovod", status=2) == left_out


@pytest.mark.in_turn
@needs_an_extra
@needs_mpirun
def test_a_run_of_a_copy_with_extras_goes_on_without_them(copy: Path, tmp_path: Path) -> None:
    """The run has recorded no key of an extra. One that is recorded is an error."""
    run = tmp_path / "run"
    done = python(["-m", "hvdtrain", *JOB, f"run={run}"])
    assert done.returncode == 0, done.stderr
    config = run / "config.yaml"
    text = config.read_text()
    hvdtrain = ["-c", OF_COPY, str(copy)]
    resume = [*hvdtrain, f"resume={run}", "stop.steps=4"]
    other = [*hvdtrain, "--config", f"{config}", f"run={tmp_path / 'other'}"]
    env = {"PYTHONPATH": str(copy)}
    for words, made in ((resume, run), (other, tmp_path / "other")):
        done = python(words, env=env)
        assert done.returncode == 0 and (made / "checkpoints").is_dir(), done.stderr
    assert (run / "checkpoints" / "step-00000004").is_dir()
    assert key_classes()
    for kind in key_classes():
        key = kind.full_key(next(iter(kind.model_fields)))
        config.write_text(f"{text}{key}: 2\n")
        for words in (resume, other):
            done = python(words, env=env)
            assert (
                done.returncode == 2
                and f"the run has {key}=2, but this installation" in done.stderr
            )
            assert "`hvdtrain extras` lists the installed ones" in done.stderr


@needs_an_extra
def test_a_run_records_the_keys_of_an_extra_where_it_uses_one() -> None:
    keys = {kind: [kind.full_key(name) for name in kind.model_fields] for kind in key_classes()}

    def recorded(words: list[str]) -> set[str]:
        tree = yaml.safe_load(to_record(configure(None, words), (), None))
        assert {} not in tree.values()
        return {
            key
            for key in itertools.chain.from_iterable(keys.values())
            if key.split(".")[1] in tree.get(key.split(".")[0], {})
        }

    assert recorded([]) == set()
    for kind, of_kind in keys.items():
        for key, default in zip(of_kind, kind().model_dump().values(), strict=True):
            for value in ("1", "2", "c", "scale", "true"):
                with contextlib.suppress(UserError):
                    config = configure(None, [f"{key}={value}"])
                    now = getattr(kind.of(config), key.split(".")[1])
                    assert recorded([f"{key}={value}"]) == (
                        set(of_kind) if now != default else set()
                    )


def test_the_first_key_of_an_extra_turns_it_on() -> None:
    first = [(kind.__name__, next(iter(kind.model_fields.values()))) for kind in key_classes()]
    off = {"0", "False", "None", "none", "1", "1.0"}  # 1: of a number of ranks, or of a factor
    assert all(str(info.default) in off for _, info in first), first


@pytest.mark.parametrize("value", ["none", "null", "false", "0", "8"])
@pytest.mark.parametrize("section", ["parallel", "batch", "newer"])
def test_an_unknown_key_of_a_run_is_an_error(tmp_path: Path, section: str, value: str) -> None:
    """Such as a key of a newer version, whatever its value."""
    path = tmp_path / "config.yaml"
    path.write_text(f"epochs: 3\n{section}:\n  experts: {value}\n  experts_top: 8\n")
    (tmp_path / "checkpoints").mkdir()
    text = rf"the run has {section}.experts=.* does not have that key"
    for file, words in ((None, [f"resume={tmp_path}"]), (f"{path}", [])):
        with pytest.raises(UserError, match=text) as e:
            configure(file, words)
        assert e.value.where == f"{path}:3"


def test_nothing_outside_an_extra_names_it() -> None:
    files = [path for path in (ROOT / "hvdtrain").rglob("*.py") if FOLDER not in path.parents]
    named = [
        (path.relative_to(ROOT), match[0])
        for path in files
        for match in re.finditer(r"\bextras[./](\w+)", path.read_text())
        if match[1] in extras()
    ]
    assert len(files) > 300 and named == []


def test_each_command_is_of_one_extra() -> None:
    assert len(commands()) == sum(len(extra.commands) for extra in extras().values())
    for name, extra in extras().items():
        for each in extra.commands.values():
            assert each.module.startswith(f"hvdtrain.extras.{name}.")
        for mode in extra.modes.values():
            assert mode.module.startswith(f"hvdtrain.extras.{name}.")


def row_of(name: str) -> list[str]:
    """The cells of an extra in the table of its page, without its lines."""
    extra = extras()[name]
    gives = [f"`{each}`" for each in extra.commands]
    gives += [f"`{each}`" for each in extra.modes]
    gives += [f"`{key}`" for key in keys_of(name)]
    gives += [f"`{key}`" for key in extra.implements]
    gives += ["objects in `metrics`"] * bool(extra.library_metrics)
    gives += [f"`model.name={library}:NAME`" for library in extra.libraries]
    for folder in ALIASES:
        plugins = sorted(path.stem for path in (FOLDER / name / folder).glob("*.py"))
        gives += [f"`{plugin}` in `{folder}`" for plugin in plugins if plugin != "__init__"]
    needs = ", ".join(f"`{needed}`" for needed in extra.needs)
    says = f"{extra.says} Needs {needs}." if needs else extra.says
    return [f"`{name}`", extra.status, says, ", ".join(gives)]


def lines_of(name: str) -> int:
    return sum(len(path.read_text().splitlines()) for path in (FOLDER / name).rglob("*.py"))


def test_the_page_lists_every_extra() -> None:
    rows = [
        line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if "| `" in line
    ]
    assert [row[:-1] for row in rows] == [row_of(name) for name in extras()]
    for name, row in zip(extras(), rows, strict=True):
        assert abs(int(row[-1].replace(",", "")) - lines_of(name)) <= 100, (name, lines_of(name))


if __name__ == "__main__":  # prints the table of docs/extras.md
    for each in extras():
        print(f"| {' | '.join([*row_of(each), f'{round(lines_of(each), -1):,}'])} |")
    sys.exit()
