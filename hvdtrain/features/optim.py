"""optim.name, optim.ema and optim.groups: muon, a class of torch.optim or of the user's, averages of the weights, groups of parameters."""

from __future__ import annotations

from collections.abc import Iterator

from hvdtrain.config.lengths import read_length
from hvdtrain.config.plugins import is_dotted
from hvdtrain.config.schema import Config
from hvdtrain.errors import UserError
from hvdtrain.features.job_feature import Exclusion, JobFeature, PlannedJob, Values, above, always, among, as_set, other_than, value_of
from hvdtrain.recipe.recipe import Recipe


def _rate_is_of_the_recipe(job: PlannedJob) -> Iterator[UserError]:
    """Such a class has an option lr."""
    if "lr" in job.config.optim.options:
        yield UserError("optim.lr is not an option: the recipe sets the rate of each step", job.where("optim.lr"), "optim.base_lr=...")


# optim.name=package.module:Class: an optimizer of torch.optim or of the user's.
USER_OPTIMIZER = JobFeature(
    key="optim.name",
    on=lambda config: is_dotted(config.optim.name),
    examples=("optim.name=torch.optim.SGD",),
    off="optim.name=sgd",
    rules=(_rate_is_of_the_recipe,),
)


# optim.name=muon: it makes whole matrices orthogonal; where each rank has a part of one, shard.stage of framework=torch alone does it.
MUON = JobFeature(
    key="optim.name",
    on=lambda config: config.optim.name == "muon",
    examples=("optim.name=muon",),
    off="optim.name=adamw",
    why="it makes whole matrices orthogonal, and no rank has them",
    excludes=(
        Exclusion(
            "shard.stage",
            above(0),
            what="{chosen} does not support {set} in JAX",
            when=lambda config: config.framework == "jax",
            words="framework=jax model.name=mlp",
        ),
        Exclusion("parallel.tensor", above(1)),
        Exclusion("parallel.pipeline", above(1)),
        Exclusion("parallel.dense", other_than("none", "a")),
        Exclusion("servers.count", above(0)),
        Exclusion(
            "framework",
            among("numpy"),
            what="numpy has no bfloat16",
            where="optim.bf16",
            fix="leave optim.bf16 out, or framework=torch",
            when=lambda config: bool(config.optim.options.get("bf16")),
            words="optim.bf16=true model.name=linear",
            why="numpy has no bfloat16",
        ),
    ),
)


# optim.ema: an average of the weights, a part of the optimizer's state, whose parts an evaluation puts together.
EMA = JobFeature(
    key="optim.ema",
    on=lambda config: config.optim.ema is not None,
    examples=("optim.ema=0.8",),
    off="optim.ema=null",
    why="no rank has all averages to evaluate with",
    what="optim.ema does not go with {key}: no rank has all averages to evaluate with",
    fix="leave {key} or optim.ema out",
    excludes=(
        Exclusion(
            "optim.name",
            Values(is_dotted, "torch.optim.Adam"),
            what="optim.ema is of hvdtrain's own optimizers, and {set} has its state to itself",
            where="optim.ema",
            fix="a name of `list` for optim.name, or leave optim.ema out",
            why="a class of torch.optim has its state to itself",
        ),
        Exclusion(
            "shard.stage",
            among(3),
            what="optim.ema does not go with {set}: no rank has all averages to evaluate with",
            where="optim.ema",
            fix="leave {set} or optim.ema out; shard.stage=2 has them",
            when=lambda config: config.framework != "jax",
        ),
        Exclusion("servers.count", above(0), where="optim.ema"),
        Exclusion("parallel.tensor", above(1), where="optim.ema"),
        Exclusion("parallel.pipeline", above(1), where="optim.ema"),
        Exclusion("parallel.dense", other_than("none", "a"), where="optim.ema"),
    ),
    lines_of_recipe=lambda config, recipe, samples: [f"evaluations of averaged weights, optim.ema={config.optim.ema:g}"],
)


# optim.groups: parameters with a rate, a decay or a momentum of their own, by the rules of hvdtrain/optim.
GROUPS = JobFeature(
    key="optim.groups",
    on=lambda config: bool(config.optim.groups),
    examples=('optim.groups=[{"names":"*.bias","rate":3}]',),
    off="optim.groups=[]",
    excludes=(
        Exclusion(
            "optim.name",
            Values(is_dotted, "torch.optim.SGD"),
            what="optim.groups is of hvdtrain's own optimizers; {config.optim.name} is made by a class or function of yours, or torch's",
            where="optim.groups",
            fix="a name of `list` for optim.name, or leave optim.groups out",
            why="a class of torch.optim has one rate for all parameters",
        ),
    ),
)


def _lines_of_thaw(config: Config, recipe: Recipe, samples: int) -> list[str]:
    entries = zip(config.model.thaw, recipe.thaw, strict=True)
    return [f"thawed after {read_length(entry.at).words()} (step {step}): {', '.join(entry.names)}" for entry, step in entries]


def _thaw_conflicts(job: PlannedJob) -> Iterator[UserError]:
    config, where = job.config, job.where("model.thaw")
    if is_dotted(config.optim.name):
        what = f"model.thaw is of hvdtrain's own optimizers; {config.optim.name} has one count of steps for all parameters"
        yield UserError(what, where, "a name of `list` for optim.name, or leave model.thaw out")
    for key, usual in (
        ("optim.ema", None),
        ("servers.count", 0),
        ("comm.local_steps", 1),
        ("parallel.dense", "none"),
        ("log.noise_scale", False),
    ):
        if value_of(config, key) != usual:
            yield UserError(f"model.thaw does not support {as_set(config, key)}", where, f"leave {key} or model.thaw out")


# model.thaw: the rules of hvdtrain/optim leave frozen weights as they are, up to a step.
THAW = JobFeature(key="model.thaw", on=lambda config: bool(config.model.thaw), rules=(_thaw_conflicts,), lines_of_recipe=_lines_of_thaw)


def _weights_of_nothing(job: PlannedJob) -> Iterator[UserError]:
    model = job.config.model
    for key in ("weights_names", "weights_skip") if model.weights is None else ():
        if given := getattr(model, key):
            what = f"model.{key}={list(given)} is of model.weights, and there is none"
            yield UserError(what, job.where(f"model.{key}"), f"model.weights=FILE, or leave model.{key} out")


# model.weights: what a file has takes the place of first weights.
WEIGHTS = JobFeature(key="model.weights", on=always, rules=(_weights_of_nothing,))


def _lora_conflicts(job: PlannedJob) -> Iterator[UserError]:
    config, where = job.config, job.where("model.lora")
    if not config.model.lora:
        for key, usual in (("lora_rank", 8), ("lora_alpha", None), ("lora_dropout", 0.0)):
            if getattr(config.model, key) != usual:
                yield UserError(f"model.{key} needs model.lora", job.where(f"model.{key}"), "model.lora=['*.fc1'], the layers that get one")
        return
    for key, off in (("servers.count", 0), ("parallel.tensor", 1), ("parallel.dense", "none")):
        if value_of(config, key) != off:
            yield UserError(f"model.lora does not support {as_set(config, key)}", where, f"leave {key} or model.lora out")


# model.lora: adapters of linear layers that each rank calls as a whole.
LORA = JobFeature(key="model.lora", on=always, rules=(_lora_conflicts,))
