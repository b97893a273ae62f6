"""hvdtrain plan: shows what a job would do on several numbers of ranks, as a table and a picture,
without training."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from hvdtrain.cli.options import CommandParser
from hvdtrain.cli.output import STANDARD_OUTPUT, print_result, with_json_value
from hvdtrain.config import plugins
from hvdtrain.config.schema import Config
from hvdtrain.core.extras import modes
from hvdtrain.errors import DONE, UserError
from hvdtrain.extras.plan import faults
from hvdtrain.extras.plan.figure import RecipeCurve, draw_layout, draw_recipe
from hvdtrain.extras.plan.forecast.data import add_data_options, training_data
from hvdtrain.extras.plan.forecast.job import (
    Forecast,
    Infeasible,
    find_conflict,
    forecast,
    group_by_recipe,
)
from hvdtrain.extras.plan.forecast.memory import (
    RANKS,
    memory_json,
    memory_plan,
    read_size,
    with_memory_value,
)
from hvdtrain.extras.plan.meshes import plan as mesh_plan
from hvdtrain.extras.plan.table import Plan, batch_label, one_line, plan_lines, ranks_label, to_json
from hvdtrain.features.every_feature import configure
from hvdtrain.frameworks.by_name import build_rule, check_patterns, is_made_with_the_model
from hvdtrain.optim.rule import Rule
from hvdtrain.recipe import from_config
from hvdtrain.recipe.summary import lr_summary
from hvdtrain.tasks.task import Task, tokens_of_sample
from hvdtrain.training.job_memory import resident_bytes

USAGE = """\
hvdtrain plan [--config FILE] [--ranks 1,8,64,512] [--json [FILE]] [--png FILE] [--parallel-picture FILE] [key=value ...]
  prints batch, steps, learning rate and memory of the job on each number of ranks, without training
  --config FILE, key=value   the configuration of the job
  --ranks 1,8,64,512         numbers of ranks
  --samples 1281167 --image 224x224x3 --classes 1000   the data, which then is not read; without it: read, not downloaded
  --all                      the names of all parameters without weight decay
  --json FILE                write the plan as JSON too; --json or --json - prints it instead of the text
  --memory [16GiB]           the memory of a rank, for 1, 2, 4, 8 ranks (or --ranks) and each shard.stage, with and without recomputation:
                             what fits in so much, the largest batch.micro, which to take; computed without memory, in seconds
  --faults [KEY=VALUE,...]   the share of time that moves the job on 8 to 8,192 ranks, where a fault stops it, restarts it or takes a rank;
                             rank_mtbf_hours, checkpoint_s, sync_s, detect_s, restart_s, reform_s, requeue_s, repair_s, seed
  --png FILE                 draw learning rate and batch
  --parallel-picture FILE    draw as PNG which rank has which part of each layer, and what is sent, on the first of --ranks
hvdtrain plan --parallel [--ranks 4] [--memory 16GiB] [--json [FILE]] [key=value ...]
  instead: the ways to divide ranks and model (parallel.tensor, parallel.pipeline, parallel.dense, shard.stage), by the predicted time of a
  step, with what each computes, sends, waits and keeps; which to take and why; which cannot be, and why
  --gflops 50                floating-point operations of a rank in a second while all compute, in 10^9
  --inside 10GB/s,5us        bandwidth and latency between the ranks of a node
  --between 1.25GB/s,30us    those of a node to the others, shared by its ranks
  --ranks-per-node 8         ranks on a node
  --measured FILE,FILE       these numbers from JSON of bench step (of ranks that each have the whole model) and of bench allreduce\
"""  # noqa: E501
_RANKS = (1, 8, 64, 512)
_PICTURE = "--parallel-picture"
_CURVE_POINTS = 2000


def plan(arguments: Sequence[str]) -> int:
    """Runs `plan`; returns the exit code. Raises UserError."""
    if {"-h", "--help"} & set(arguments):
        print("\n".join([USAGE, *(mode.usage for mode in modes("plan").values())]))
        return DONE
    options, config_arguments = _parse(arguments)
    mesh_plan.refuse_options(options)
    config = configure(options.config, config_arguments)
    plugins.check_names(config)
    if mesh_plan.run(options, config):
        return DONE
    options.ranks = options.ranks or list(_RANKS if options.memory is None else RANKS)
    conflicts = [conflict for ranks in options.ranks if (conflict := find_conflict(config, ranks))]
    if len(conflicts) == len(options.ranks):  # before data are read
        raise _none_feasible(conflicts)
    limit = read_size(options.memory) if options.memory else None
    times = None if options.faults is None else faults.read_fault_times(options.faults)
    data = training_data(options, config)
    forecasts = [
        forecast(config, data.samples, ranks, tokens_of_sample(data.task))
        for ranks in options.ranks
    ]
    feasible = [one for one in forecasts if isinstance(one, Forecast)]
    if not feasible:
        raise _none_feasible([one for one in forecasts if isinstance(one, Infeasible)])
    rule = _rule(config)
    framework = plugins.load("frameworks", config.framework, config.where("framework"))
    shapes = framework.shapes(config, data.task)
    frozen = getattr(framework, "frozen", lambda *_: ())
    check_patterns(config, shapes, frozen=lambda: frozen(config, data.task))
    planned = Plan(config, data.task, data.samples, data.origin, forecasts, shapes, rule)
    of_memory = None
    if options.memory is not None:
        of_memory = memory_plan(config, data.task, feasible, limit, resident_bytes())
    lines = plan_lines(planned, options.all, of_memory)
    found = to_json(planned)
    if times is not None:
        rows = faults.goodputs(times)
        lines += ["", *faults.fault_lines(times, rows)]
        found |= {"faults": faults.faults_json(times, rows)}
    print_result(
        options.json, lines, found | ({"memory": memory_json(of_memory)} if of_memory else {})
    )
    if options.png is not None:
        curves = [_curve(group) for group in group_by_recipe(feasible)]
        drawn = draw_recipe(Path(options.png), _title(config, data.samples, feasible[-1]), curves)
        if options.json != STANDARD_OUTPUT:
            print(f"\n{drawn}")
    if options.parallel_picture is not None:
        drawn = _draw_parallel(
            options.parallel_picture, feasible[0].config, data.task, feasible[0].ranks
        )
        if options.json != STANDARD_OUTPUT:
            print(f"\n{drawn}")
    return DONE


def _parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns the options of plan, and the remaining arguments, which belong to the
    configuration."""
    parser = CommandParser("plan")
    parser.add_argument("--config")
    parser.add_argument("--ranks", type=_read_ranks, default=None)
    parser.add_argument("--memory")
    parser.add_argument("--faults")
    parser.add_argument("--png")
    parser.add_argument("--parallel-picture")
    parser.add_argument("--json")
    add_data_options(parser)
    parser.add_argument("--all", action="store_true")
    mesh_plan.add_options(parser)
    arguments = faults.with_value(with_memory_value(with_json_value(arguments)))
    return parser.parse_known_args(arguments)


def _read_ranks(value: str) -> list[int]:
    ranks = value.split(",")
    if not all(number.isdecimal() and int(number) for number in ranks):
        raise UserError(
            f"cannot read the numbers of ranks {value!r}",
            "--ranks",
            "give them as in --ranks 1,8,64,512",
        )
    return sorted({int(number) for number in ranks})


def _draw_parallel(path: str, config: Config, task: Task, ranks: int) -> str:
    """Writes a PNG; returns a line for people. Raises UserError if the framework has no such
    picture, or the file cannot be written."""
    if config.framework != "torch":
        raise UserError(
            f"framework={config.framework} keeps the whole model on each rank",
            _PICTURE,
            "framework=torch",
        )
    from hvdtrain.extras.plan.of_torch.layout import layout  # torch, which other plans do without

    return draw_layout(Path(path), layout(config, task, ranks), _PICTURE)


def _rule(config: Config) -> Rule | None:
    """Returns the optimizer; None for a user's, torch.optim's or optax's, whose state is only known
    after its first step."""
    if is_made_with_the_model(config):
        plugins.load("frameworks", config.framework, config.where("framework")).check_optimizer(
            config
        )
        return None
    return build_rule(config)


def _none_feasible(rejected: list[Infeasible]) -> UserError:
    """Returns the common reason if there is one, else the reason for each number of ranks."""
    if len({str(one.error) for one in rejected}) == 1:
        return rejected[0].error
    reasons = "".join(f"\n  {one.ranks}: {one_line(one.error)}" for one in rejected)
    return UserError(
        f"the job can run on none of these numbers of ranks:{reasons}",
        rejected[0].error.where,
        "other --ranks, or another batch",
    )


def _curve(group: list[Forecast]) -> RecipeCurve:
    """Returns the curve of forecasts with equal recipes: all steps, or about as many as a picture
    can show, and every change of the batch."""
    one = group[0]
    evenly_spaced = {point * one.steps // _CURVE_POINTS for point in range(_CURVE_POINTS)}
    steps = sorted(evenly_spaced | {phase.first_step for phase in one.batch_phases})
    hypers = [one.hyper(step) for step in steps]
    hypers.append(hypers[-1])  # holds up to the end of the job
    label = (
        f"{ranks_label(group)}: batch {batch_label(one)}, lr {from_config.peak_lr(one.config):g}"
    )
    epochs = [*(one.progress(step).epochs for step in steps), one.epochs]
    return RecipeCurve(label, epochs, [h.lr for h in hypers], [h.batch for h in hypers])


def _title(config: Config, samples: int, shown: Forecast) -> str:
    job = f"{config.model.name} on {samples:,} samples with {config.optim.name}"
    return f"{job}\n{ranks_label([shown])}: {lr_summary(shown.config, samples, shown.context)}"
