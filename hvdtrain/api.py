"""Training and reading from a script or a notebook: run = hvdtrain.train({"epochs": 3});
hvdtrain.read(run) is a DataFrame."""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from hvdtrain.errors import UserError
from hvdtrain.training.failure import RankFailed

if TYPE_CHECKING:
    import numpy as np
    import pandas

    from hvdtrain.config.sections.section import Given
    from hvdtrain.context.context import Context
    from hvdtrain.tasks.transform import Transform, Transforms
    from hvdtrain.training.hooks import Hook

T = TypeVar("T")


class Script(NamedTuple):
    """The objects of a script that a run folder does not store."""

    given: Mapping[str, Given]  # objects, by section
    # model.name= and task.name= of its own code: a run folder alone imports none
    names: tuple[str, ...]


def _like(found: np.ndarray, given: Any) -> Any:
    """Converts to a tensor on the same device if the input was a tensor."""
    if not hasattr(given, "detach"):
        return found
    from hvdtrain.tasks.torch import as_tensor

    return as_tensor(found, given)


def _encoded(x: Any, run: Path) -> Any:
    """Encodes a DataFrame as the run's tables; anything else is not changed."""
    if not hasattr(x, "columns"):
        return x
    from hvdtrain.data.input_encoding import encoding_of_run

    encoding = encoding_of_run(run)
    return x if encoding is None else encoding.encode({"x": x}, (), "run.transform()")["x"]


@dataclass(frozen=True)
class Run:
    """The result of a job."""

    folder: Path  # config.yaml, events.jsonl, checkpoints
    rank: int  # of this process; 0 without a launcher. All else but `seconds` is equal on all ranks
    code: int  # 0: done; 75: stopped early, the same call with run=folder resumes
    why: str  # it ended
    objective: str  # the metric that the next two are of: "accuracy"
    last: float  # of the last evaluation; NaN without one
    best: float
    epochs: float  # done
    steps: int
    seconds: float  # spent, over all its runs
    # what the script gave as objects
    script: Script | None = field(default=None, repr=False, compare=False)
    # what was done to x; None: the task says nothing
    inputs: Transform | Transforms | None = field(default=None, repr=False, compare=False)

    def transform(self, x: Any) -> Any:
        """Transforms rows x (n, ...) of the data as the model got them: model(run.transform(x)). An
        array gives an array, a tensor a tensor.

        A DataFrame of a run with data.columns gives what its columns became in training.
        For several inputs it takes and returns a dict: model(**run.transform({"image": image,
        "table": table})).
        """
        if self.inputs is None:
            raise UserError(
                "this run's task computes the model's inputs itself",
                "run.transform()",
                "call the task's inputs()",
            )
        found = self.inputs(_encoded(x, self.folder))
        return (
            {name: _like(of, x[name]) for name, of in found.items()}
            if isinstance(found, dict)
            else _like(found, x)
        )

    @property
    def weights(self) -> dict[str, np.ndarray]:
        """Weights of the newest checkpoint, by the names of the model's state dict, from which
        training would resume.

        With optim.ema these are the weights themselves, while evaluations, exports and the model
        object use their average; with stop.restore_best they are from the last step. Read from
        `folder` each time. Raises UserError if it has no good checkpoint.
        """
        from hvdtrain.frameworks.learner import plain_names
        from hvdtrain.training.checkpoint.resume import newest_good

        found, arrays, _ = newest_good(self.folder, sys.maxsize)
        return {name: arrays[own] for name, own in (found.names or plain_names(arrays)).items()}

    @property
    def pytree(self) -> Any:
        """Trained weights of a JAX model object, from the last evaluation, in the model's own tree.

        For flax.linen and haiku `params`, for a pair the tree from init(), for equinox a module,
        for flax.nnx the module that was passed.
        """
        given = self.script.given.get("model") if self.script else None
        params = given.trained() if given else None
        if params is None:
            raise UserError(
                "this run has no model object of JAX",
                "run.pytree",
                "run.weights has arrays by name",
            )
        return params


def train(
    config: Mapping[str, Any] | str | Path | None = None,
    *arguments: str,
    model: Any = None,
    train_data: Any = None,
    val_data: Any = None,
    sample_weights: Any = None,
    loss: Callable[..., Any] | None = None,
    metrics: Mapping[str, Any] | None = None,
    objective: str | None = None,
    optimizer: Any = None,
    schedule: Callable[[float], float] | None = None,
    hooks: Sequence[Hook] = (),
) -> Run:
    """Trains, as `hvdtrain` does, in one process or as one rank of those that mpirun or srun
    started with this script. Every rank passes the same arguments.

    config: the keys of `hvdtrain --help all-keys`, nested or dotted: {"epochs": 3, "model":
        {"name": Net}}, where a class stands for its import path; or a YAML file
    arguments: key=value; they take precedence over config

    The other arguments replace names in the configuration and take precedence over it.
    docs/own-model.md, own-data.md and own-loss.md have examples.

    model: a torch module, which is trained from rank 0's weights; afterwards it has, on every
        rank, the weights of the last evaluation (with stop.restore_best of the best one). Or its
        class, a function that creates it (with the parameters of model.name), or its import path;
        or a pair (init, apply) of JAX, a module of flax, equinox or haiku, whose trained weights
        are in run.pytree
    train_data, val_data: a dict of arrays, a torch Dataset, or anything else that
        data.name=package.module:function may return
    sample_weights: an array with a number for each sample of train_data, in proportion to which
        samples are drawn; a string sets data.sample_weights
    loss: (outputs, batch) -> the loss of each sample, (n,); batch has the fields of the data, and
        outputs are the model's outputs for batch["x"]. Or a loss of torch.nn, of outputs and
        batch["y"]
    metrics: {"mae": (function, "min")}; the function returns for (outputs, batch) a value per
        sample, (n,), or (sum, count). Or an OwnMetric
    objective: the metric for stop.target, checkpoint.keep_best and log.targets
    optimizer: a class of torch.optim, a function of optax, or a name as in optim.name. Or an optax
        transformation, or a function that creates a torch optimizer from a list of (name,
        parameter): these have their own learning rates, which the recipe multiplies, by 1 unless
        optim.base_lr is set
    schedule: maps the completed fraction of the job, 0 to 1, to the factor of the learning rate
        after recipe.warmup
    hooks: the script's callbacks in the training loop, hvdtrain.Hook objects

    In one process an error is raised. A mistake in the arguments is a UserError, which prints what,
    where and fix if the script does not catch it. If one of several ranks fails, its error is
    printed and all ranks end.
    """
    from hvdtrain.comm.launcher_variables import placement
    from hvdtrain.config.sections.section import COMMAND_LINE, name_of_object
    from hvdtrain.data.worker_pool import end_script_of_worker
    from hvdtrain.frameworks.by_name import makes_groups
    from hvdtrain.training.failure import report_user_errors
    from hvdtrain.training.given import given_hooks, given_optimizer, given_schedule, given_weights
    from hvdtrain.training.run_rank import run_rank

    end_script_of_worker()
    report_user_errors()
    try:
        config_file, arguments = _file_and_arguments(config, arguments)
        given = _given(model, train_data, val_data, loss, metrics, objective)
        names = [
            f"{section}.name={one.name}" for section, one in given.items() if one.name is not None
        ]
        if sample_weights is not None:
            word, of_data = given_weights(sample_weights, given.get("data"))
            given |= {} if of_data is None else {"data": of_data}
            names.append(f"data.sample_weights={word}")
        of_job = (
            given
            | ({"hooks": given_hooks(hooks)} if hooks else {})
            | ({"recipe": given_schedule(schedule)} if schedule else {})
        )
        names += [f"recipe.function={name_of_object(schedule)}"] if schedule else []
        if (
            optimizer is not None
            and not isinstance(optimizer, str)
            and (makes_groups(optimizer) or not _has_path(optimizer))
        ):
            of_job["optim"] = given_optimizer(optimizer)
            names.append(f"optim.name={of_job['optim'].name}")
        elif optimizer is not None:
            names.append(f"optim.name={_yaml('optim.name', optimizer)}")
        if model is not None and "model" not in given:
            names.append(f"model.name={_yaml('model.name', model)}")
        result = run_rank(config_file, [*arguments, *names], from_script=True, given=of_job)
    except UserError as error:
        error.where = error.where.replace(COMMAND_LINE, "hvdtrain.train()")
        raise
    except RankFailed as failed:
        sys.exit(failed.code)
    now = result.train_state
    return Run(
        folder=result.run,
        rank=placement(os.environ).rank,
        code=result.code,
        why=result.reason,
        objective=now.objective,
        last=now.last,
        best=now.best,
        epochs=now.progress.epochs,
        steps=now.progress.step,
        seconds=now.seconds,
        script=Script(
            given,
            tuple(
                word
                for word in (*arguments, *names)
                if word.startswith(("model.name=", "task.name="))
            ),
        ),
        inputs=result.transform,
    )


def predict(
    run: Run | str | Path, data: Any, *arguments: str, model: Any = None, checkpoint: str = ""
) -> np.ndarray:
    """Returns the outputs of a run's model for the rows of data, in their order, on every rank:
    logits or numbers; the first output if there are several.

    data: anything that train_data of train() may be, or only its x: targets are not read. A table
        has the columns of x
    arguments: key=value, as for `hvdtrain predict`; a run whose code the script did not name needs
        model.name=package.module:Class
    model: the object, class or function that the run trained, if `run` is not the result of
        train(); its weights do not change
    checkpoint: newest, best (by the objective), or the name of one; default: newest, or best if the
        run has stop.restore_best
    """
    from hvdtrain.core.extras import implementing_module

    script = _script_of(run, model, {})
    found: np.ndarray = implementing_module("hvdtrain.predict()").predict(
        _folder_of(run), data, arguments, script, checkpoint
    )
    return found


def evaluate(
    run: Run | str | Path,
    data: Any,
    *arguments: str,
    model: Any = None,
    loss: Callable[..., Any] | None = None,
    metrics: Mapping[str, Any] | None = None,
    checkpoint: str = "",
) -> dict[str, float]:
    """Evaluates a run's model on data and returns the metrics by name: exact over all samples, on
    any number of ranks.

    data: anything that train_data of train() may be
    loss, metrics: default: the run's own, if `run` is the result of train()
    arguments, model, checkpoint: as in predict()
    """
    from hvdtrain.core.extras import implementing_module

    script = _script_of(run, model, {"loss": loss, "metrics": metrics})
    found: dict[str, float] = implementing_module("hvdtrain.evaluate()").evaluate(
        _folder_of(run), data, arguments, script, checkpoint
    )
    return found


def _folder_of(run: Run | str | Path) -> str:
    return str(run.folder if isinstance(run, Run) else run)


def _script_of(run: Run | str | Path, model: Any, task: Mapping[str, Any]) -> Script:
    """The objects of a run that its folder does not store: from train(), or passed again."""
    kept = (run.script if isinstance(run, Run) else None) or Script({}, ())
    given = {**kept.given, **_given(model, None, None, task.get("loss"), task.get("metrics"), None)}
    names = [word for word in kept.names if model is None or not word.startswith("model.name=")]
    names = [
        word for word in names if task.get("loss") is None or not word.startswith("task.name=")
    ]
    if model is not None:
        if "model" in given and not isinstance(model, str) and not _has_path(model):
            names.append(f"model.name={given['model'].name}")
        else:
            given.pop("model", None)
            names.append(f"model.name={_yaml('model.name', model)}")
    if task.get("loss") is not None:
        names.append(f"task.name={given['task'].name}")
    return Script(given, tuple(names))


def init(config: Mapping[str, Any] | str | Path | None = None, *arguments: str) -> Context:
    """Connects this process with the other ranks, for a custom loop in a script; see
    docs/own-loop.md.

    config: keys of the configuration, nested or dotted, {"run": "run", "comm": {"engine": "mpi"}},
    or a YAML file; `arguments` are key=value, and win over it: hvdtrain.init(*sys.argv[1:]) takes
    them from the command line. A custom loop supports the keys framework, run, resume, seed, comm,
    shard, parallel, optim.clip_norm and clip_value, data.sampling, workers, pad, speed, checkpoint,
    guard, log. Without `run` nothing is written. Every rank calls it with the same. Only one
    context can be open: close() ends it, or `with hvdtrain.init() as ctx`. An exception that the
    script does not catch ends all ranks, with the traceback of the first that failed.
    """
    from hvdtrain.context.open_context import open_context

    return open_context(*_file_and_arguments(config, arguments))


def run(
    train: Callable[[Context], object],
    config: Mapping[str, Any] | str | Path | None = None,
    *arguments: str,
) -> int:
    """Calls train(ctx), a custom loop as a function of the context that init() returns; returns the
    exit code, 0 or 75.

    With guard.lost=shrink, the surviving ranks call train(ctx) again when a rank is lost, in the
    same processes: it creates the model, calls ctx.prepare() and ctx.resume(), and so resumes from
    the newest checkpoint. That needs run=, and an engine that survives lost ranks
    (docs/elastic.md). config, arguments and errors: as in init().
    """
    from hvdtrain.context.run_loop import run_loop

    return run_loop(train, *_file_and_arguments(config, arguments))


def _file_and_arguments(
    config: Mapping[str, Any] | str | Path | None, arguments: tuple[str, ...]
) -> tuple[str | None, tuple[str, ...]]:
    """Returns the YAML file, if one was given, and key=value arguments."""
    if isinstance(config, str) and "=" in config:
        return None, (config, *arguments)
    if isinstance(config, Mapping):
        return None, (*_assignments(config, ""), *arguments)
    return str(config) if isinstance(config, (str, Path)) else None, arguments


def _given(
    model: Any,
    train_data: Any,
    val_data: Any,
    loss: Any,
    metrics: Mapping[str, Any] | None,
    objective: str | None,
) -> dict[str, Given]:
    """Selects the objects, by section. Raises UserError for what is not what train() takes."""
    from hvdtrain.training.given import given_data, given_model, given_task

    given: dict[str, Given] = {}
    if model is not None and not isinstance(model, str) and not _has_path(model):
        given["model"] = given_model(model)
    if train_data is not None or val_data is not None:
        given["data"] = given_data(train_data, val_data)
    if loss is not None or metrics or objective is not None:
        given["task"] = given_task(loss, metrics, objective)
    return given


def _has_path(thing: Any) -> bool:
    """Whether it is a top-level class or function of a module, which other processes can import."""
    return (
        callable(thing)
        and not inspect.ismethod(thing)
        and not set("<.") & set(getattr(thing, "__qualname__", "<"))
    )


def read(run: Run | str | Path, *, step_times: bool = False) -> pandas.DataFrame:
    """Reads a run's events of kind step, epoch and target, one per row, with their fields as
    columns (docs/events.md).

    step_times: also the events of single steps (log.step_times). The job may be running, complete,
    or killed.
    """
    from hvdtrain.config.read import expand
    from hvdtrain.records.run import read_run, to_dataframe

    folder = run.folder if isinstance(run, Run) else expand(run, "hvdtrain.read()")
    return to_dataframe(read_run(folder, step_times))


def _assignments(tree: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """Yields key=value for each value of a configuration."""
    from hvdtrain.config.schema import SECTIONS

    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and not prefix and name in SECTIONS:
            yield from _assignments(value, f"{key}.")
        else:
            yield f"{key}={_yaml(key, value)}"


def _public_module(value: Any) -> str:
    """The module that users import it from: optax, for objects of optax._src.alias."""
    module: str = value.__module__
    package = module.partition("._")[0]
    return (
        package if getattr(sys.modules.get(package), value.__qualname__, None) is value else module
    )


def _yaml(key: str, value: Any) -> str:
    """Returns a value as written on the command line. Raises UserError if that is not possible."""
    from hvdtrain.config.schema import takes_text

    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        if "<" in value.__qualname__:  # a lambda, or made inside of a function
            raise UserError(
                f"{key} is {value.__qualname__}, which has no name to import",
                "hvdtrain.train()",
                "define it at the top of the file",
            )
        return f"{_public_module(value)}:{value.__qualname__}"
    # of numpy
    value = value.item() if hasattr(value, "item") and not getattr(value, "ndim", 1) else value
    if isinstance(value, (str, Path)):
        return str(value) if takes_text(key) else json.dumps(str(value))
    try:
        return json.dumps(value)
    except TypeError:
        fix = (
            "texts, numbers, truth values, None, lists, mappings, or a class (not one of its "
            "objects)"
        )
        if key in ("model.name", "data.name", "task.name"):
            fix += "; objects as hvdtrain.train(config, model=..., train_data=..., loss=...)"
        raise UserError(
            f"{key} is an object of {type(value).__name__}", "hvdtrain.train()", fix
        ) from None
