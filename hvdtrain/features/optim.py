"""optim.name, optim.ema and optim.groups: muon, classes of torch.optim or of the user, averages of
the weights, and parameter groups."""

from __future__ import annotations

from hvdtrain.config.exclusion import Exclusion, Values, above, among, options, other_than
from hvdtrain.config.plugins import is_dotted
from hvdtrain.config.schema import Config
from hvdtrain.core.lengths import read_length
from hvdtrain.features.job_feature import Conflict, JobFeature
from hvdtrain.recipe.recipe import Recipe

# optim.name=package.module:Class: an optimizer of torch.optim or of the user.
USER_OPTIMIZER = JobFeature(
    key="optim.name",
    is_value=True,
    on=lambda config: is_dotted(config.optim.name),
    examples=("optim.name=torch.optim.SGD",),
    off="optim.name=sgd",
    rules=(
        Conflict(
            lambda job: "lr" in job.config.optim.options,
            what="optim.lr is not an option: the recipe sets the rate of each step",
            fix="optim.base_lr=...",
            key="optim.lr",
        ),
    ),
)


# optim.name=muon orthogonalizes whole matrices. Where each rank has a part of a matrix, only
# shard.stage of framework=torch supports it.
MUON = JobFeature(
    key="optim.name",
    is_value=True,
    on=lambda config: config.optim.name == "muon",
    examples=("optim.name=muon",),
    off="optim.name=adamw",
    why="it orthogonalizes whole matrices, but no rank has them",
    excludes=(
        Exclusion(
            "shard.stage",
            above(0),
            what="{chosen} does not support {set} in JAX",
            when=lambda config: config.framework == "jax",
            words="framework=jax model.name=mlp",
        ),
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


AVERAGES_WRITTEN = "the averages of the weights are written (optim.ema of the run)"
# optim.ema: an average of the weights. It is part of the optimizer's state, whose parts an
# evaluation gathers.
EMA = JobFeature(
    key="optim.ema",
    on=lambda config: config.optim.ema is not None,
    examples=("optim.ema=0.8",),
    off="optim.ema=null",
    why="no rank has all averages for an evaluation",
    what="optim.ema does not support {key}: no rank has all averages for an evaluation",
    fix="leave {key} or optim.ema out",
    excludes=(
        Exclusion(
            "optim.name",
            Values(is_dotted, "torch.optim.Adam"),
            what="optim.ema needs an optimizer of hvdtrain, but {set} manages its own state",
            where="optim.ema",
            fix="a name of `list` for optim.name, or leave optim.ema out",
            why="a class of torch.optim manages its own state",
        ),
        Exclusion(
            "shard.stage",
            among(3),
            what="optim.ema does not support {set}: no rank has all averages for an evaluation",
            where="optim.ema",
            fix="shard.stage=2, or leave optim.ema out",
            when=lambda config: config.framework != "jax",
        ),
    ),
    lines_of_recipe=lambda config, recipe, samples: [
        f"evaluations of averaged weights, optim.ema={config.optim.ema:g}"
    ],
)


# optim.groups: parameters with their own learning rate, decay or momentum, applied by the rules of
# hvdtrain/optim.
GROUPS = JobFeature(
    key="optim.groups",
    on=lambda config: bool(config.optim.groups),
    examples=('optim.groups=[{"names":"*.bias","rate":3}]',),
    off="optim.groups=[]",
    excludes=(
        Exclusion(
            "optim.name",
            Values(is_dotted, "torch.optim.SGD"),
            what="optim.groups needs an optimizer of hvdtrain, but optim.name={config.optim.name} "
            "is a class or function of yours or of torch",
            where="optim.groups",
            fix="a name of `list` for optim.name, or leave optim.groups out",
            why="a class of torch.optim has one rate for all parameters",
        ),
    ),
)


def _lines_of_thaw(config: Config, recipe: Recipe, samples: int) -> list[str]:
    entries = zip(config.model.thaw, recipe.thaw, strict=True)
    return [
        f"thawed after {read_length(entry.at).words()} (step {step}): {', '.join(entry.names)}"
        for entry, step in entries
    ]


# model.thaw: the rules of hvdtrain/optim leave frozen weights unchanged until a step.
THAW = JobFeature(
    key="model.thaw",
    on=lambda config: bool(config.model.thaw),
    updates_whole_weights=False,
    chosen=lambda config: "model.thaw",
    examples=('model.thaw=[{"at":"2steps","names":["*bias"]}] model.freeze=["*bias"]',),
    fix="leave {key} or model.thaw out",
    why="not implemented yet",
    step_addition="hvdtrain.frameworks.torch.thaw:addition",
    excludes=(
        Exclusion(
            "optim.name",
            Values(is_dotted, "torch.optim.SGD"),
            what="model.thaw needs an optimizer of hvdtrain, but {set} has one step count for all "
            "parameters",
            where="model.thaw",
            fix="a name of `list` for optim.name, or leave model.thaw out",
            why="a class of torch.optim has one step count for all parameters",
        ),
        Exclusion(
            "optim.ema",
            other_than(None, 0.9),
            what="model.thaw does not support {set}: an average would include the steps in which a "
            "weight was frozen",
            where="model.thaw",
            why="an average would include the steps in which a weight was frozen",
        ),
        Exclusion("comm.local_steps", above(1), where="model.thaw"),
        Exclusion("log.noise_scale", among(True), where="model.thaw"),
    ),
    lines_of_recipe=_lines_of_thaw,
)

# model.weights: weights of a file replace the initial weights.
WEIGHTS = JobFeature(
    key="model.weights",
    is_extra=True,
    on=lambda config: config.model.weights is not None,
    examples=("model.weights=base.safetensors",),
    off="model.weights=null",
    without=options(
        "model.weights",
        {"model.weights_names": ["a=b"], "model.weights_skip": ["fc*"]},
        fix="model.weights=FILE",
    ),
)

# model.lora: adapters for linear layers that each rank calls as a whole.
LORA = JobFeature(
    key="model.lora",
    is_extra=True,
    on=lambda config: bool(config.model.lora),
    chosen=lambda config: "model.lora",
    examples=('model.lora=["*"] model.lora_rank=2',),
    fix="leave {key} or model.lora out",
    why="each rank calls a whole linear layer",
    without=options(
        "model.lora",
        {
            "model.lora_rank": 4,
            "model.lora_alpha": 16.0,
            "model.lora_dropout": 0.1,
            "model.lora_train": ["head.*"],
        },
        fix="model.lora=['*.fc1']",
    ),
)
