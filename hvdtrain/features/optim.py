"""optim.name, optim.ema and optim.groups: muon, a class of torch.optim or of the user's, averages
of the weights, groups of parameters."""

from __future__ import annotations

from hvdtrain.config.exclusion import Exclusion, Values, above, among, options, other_than
from hvdtrain.config.plugins import is_dotted
from hvdtrain.config.schema import Config
from hvdtrain.core.lengths import read_length
from hvdtrain.features.job_feature import Conflict, JobFeature
from hvdtrain.recipe.recipe import Recipe

# optim.name=package.module:Class: an optimizer of torch.optim or of the user's.
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


# optim.name=muon: it makes whole matrices orthogonal; where each rank has a part of one,
# shard.stage of framework=torch alone does it.
MUON = JobFeature(
    key="optim.name",
    is_value=True,
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


# optim.ema: an average of the weights, a part of the optimizer's state, whose parts an evaluation
# puts together.
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
        Exclusion("parallel.tensor", above(1), where="optim.ema"),
        Exclusion("parallel.pipeline", above(1), where="optim.ema"),
    ),
    lines_of_recipe=lambda config, recipe, samples: [
        f"evaluations of averaged weights, optim.ema={config.optim.ema:g}"
    ],
)


# optim.groups: parameters with a rate, a decay or a momentum of their own, by the rules of
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
            what="optim.groups is of hvdtrain's own optimizers; {config.optim.name} is made by a "
            "class or function of yours, or torch's",
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


# model.thaw: the rules of hvdtrain/optim leave frozen weights as they are, up to a step.
THAW = JobFeature(
    key="model.thaw",
    on=lambda config: bool(config.model.thaw),
    updates_whole_weights=False,
    chosen=lambda config: "model.thaw",
    examples=('model.thaw=[{"at":"2steps","names":["*bias"]}] model.freeze=["*bias"]',),
    fix="leave {key} or model.thaw out",
    why="not made yet",
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
            what="model.thaw does not support {set}: an average would count the steps in which a "
            "weight was frozen",
            where="model.thaw",
            why="an average would count the steps in which a weight was frozen",
        ),
        Exclusion("comm.local_steps", above(1), where="model.thaw"),
        Exclusion("log.noise_scale", among(True), where="model.thaw"),
    ),
    lines_of_recipe=_lines_of_thaw,
)

# model.weights: what a file has takes the place of first weights.
WEIGHTS = JobFeature(
    key="model.weights",
    on=lambda config: config.model.weights is not None,
    examples=("model.weights=base.safetensors",),
    off="model.weights=null",
    without=options(
        "model.weights",
        {"model.weights_names": ["a=b"], "model.weights_skip": ["fc*"]},
        fix="model.weights=FILE",
    ),
)

# model.lora: adapters of linear layers that each rank calls as a whole.
LORA = JobFeature(
    key="model.lora",
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
    excludes=(
        Exclusion(
            "parallel.tensor",
            above(1),
            what="model.lora does not support {set}: an adapter needs the whole inputs and "
            "outputs of its layer on each rank",
            where="model.lora",
            why="an adapter needs the whole inputs and outputs of its layer on each rank",
        ),
    ),
)
