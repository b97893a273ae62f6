"""What excludes what: every row of hvdtrain/features, every pair of features; train, check and plan
say it before data exist."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from pairs import (
    ENGINES,
    EXAMPLES,
    Example,
    Pair,
    all_pairs,
    assigned,
    engines_of,
    joined,
    names,
    refusal,
    reverse,
    rows,
    rows_without,
    verdict,
)
from ranks import of_this_copy
from rotation import rows_of_today

from hvdtrain.__main__ import is_command, main
from hvdtrain.comm.engines import MEANINGS, features_of, possible_engines
from hvdtrain.comm.launcher_variables import NO_LAUNCHER, Placement
from hvdtrain.config.exclusion import Exclusion
from hvdtrain.config.schema import known_keys
from hvdtrain.core.extras import extras
from hvdtrain.errors import USER, UserError
from hvdtrain.features.core_keys import core_keys
from hvdtrain.features.every_feature import FEATURES, configure
from hvdtrain.features.job_feature import JobFeature
from hvdtrain.recipe.conflicts import NO_EFFECT
from hvdtrain.training.checkpoint.changes import changes
from hvdtrain.training.conflicts import (
    refuse_before_connecting,
    refuse_conflicts,
    refuse_on_every_engine,
)

ROOT = Path(__file__).parents[2]
# Rules that are no pair, and some rows of each kind of sentence, as they are read: (the
# configuration, what the message says, the key that it names, how to fix it), in a job of one
# process
OF_ONE_PROCESS = [
    ("comm.local_steps=3", "comm.local_steps=3 does not divide log.every_steps=10; ranks "
                           "synchronize at both", "comm.local_steps",
     "log.every_steps=12, or another multiple of 3"),
    ("comm.local_steps=2 checkpoint.every_steps=7",
     "comm.local_steps=2 does not divide checkpoint.every_steps=7; ranks synchronize at "
     "both", "comm.local_steps",
     "checkpoint.every_steps=8, or another multiple of 2"),
    ("norm.kind=sync batch.size=64 batch.micro=auto",
     "batch.micro=auto divides a step into micro-batches that depend on the number of ranks, and "
     "norm.kind=sync normalizes over each of them",
     "batch.micro", "leave batch.micro out: a growing batch then has the same micro-batches on "
     "any number of ranks; or norm.kind=batch or ghost"),
    ("norm.kind=sync batch.size=64 batch.micro=63",
     "batch.micro=63 divides a step into micro-batches that depend on the number of ranks, and "
     "norm.kind=sync normalizes over each of them",
     "batch.micro", "leave batch.micro out: a growing batch then has the same micro-batches on "
     "any number of ranks; or norm.kind=batch or ghost"),
    ("norm.kind=sync batch.size=64 batch.micro=64 data.sampling=partition",
     "batch.micro=64 divides a step into micro-batches that depend on the number of ranks, and "
     "norm.kind=sync normalizes over each of them",
     "batch.micro", "leave batch.micro out: a growing batch then has the same micro-batches on "
     "any number of ranks; or norm.kind=batch or ghost"),
    ("norm.kind=sync batch.size=64 batch.micro=64 recipe.growth=milestones recipe.grow_at=[1] "
     "recipe.grow_to=[65]",
     "batch.micro=64 divides a step into micro-batches that depend on the number of ranks, and "
     "norm.kind=sync normalizes over each of them",
     "batch.micro", "leave batch.micro out: a growing batch then has the same micro-batches on "
     "any number of ranks; or norm.kind=batch or ghost"),
    ("comm.local_from=3", "comm.local_from=3 has no effect without comm.local_steps",
     "comm.local_from", "comm.local_steps=4, or leave comm.local_from out"),
    ("comm.local_steps=2 comm.local_from=50% stop.time=1h",
     "comm.local_from: 50% is a share of the job, but only stop.time=1h ends the job, at an "
     "unknown step", "comm.local_from",
     "a length in epochs, steps, samples or tokens; or also set stop.steps or epochs"),
    ("comm.local_steps=2 comm.local_from=1 "
     "comm.compression=fp16", "comm.compression=fp16 and comm.local_steps=2 exclude each other",
     "comm.local_steps", "keep one of them"),
    ("comm.local_steps=2 "
     "comm.compression=fp16", "comm.compression=fp16 and comm.local_steps=2 exclude each "
                              "other", "comm.local_steps",
     "keep one of them"),
    ("comm.compression=fp16 "
     "comm.reduce=ddp", "comm.reduce=ddp does not support "
                        "comm.compression=fp16", "comm.reduce", "comm.reduce=auto"),
    ("guard.lost=shrink "
     "shard.stage=3", "guard.lost=shrink cannot continue on fewer ranks with shard.stage=3",
     "guard.lost",
     "guard.lost=restart, or shard.stage=2"),
    ("comm.op=adasum", "comm.op=adasum needs the horovod engine, but the engine is single",
     "comm.op", "comm.engine=horovod, or comm.op=mean"),
    ("comm.reduce=distributed_optimizer", "comm.reduce=distributed_optimizer needs the horovod "
    "engine, but the engine is single", "comm.reduce",
     "comm.engine=horovod, or comm.reduce=auto"),
    ("comm.reduce=ddp", "comm.reduce=ddp needs the torchdist engine, but the engine is single",
     "comm.reduce",
     "comm.engine=torchdist, or comm.reduce=auto"),
    ("comm.cycle_ms=1", "comm.cycle_ms is a Horovod setting, but the engine is single",
     "comm.cycle_ms",
     "leave comm.cycle_ms out, or comm.engine=horovod"),
    ("comm.fusion_mb=1", "comm.fusion_mb is a Horovod setting, but the engine is single",
     "comm.fusion_mb",
     "leave comm.fusion_mb out, or comm.engine=horovod"),
    ("comm.hierarchical=true",
     "comm.hierarchical is a Horovod setting, but the engine is single", "comm.hierarchical",
     "leave comm.hierarchical out, or comm.engine=horovod"),
    ("comm.device_memory=device", "comm.device_memory=device is an mpi setting, but the engine is "
    "single", "comm.device_memory",
     "leave comm.device_memory out, or comm.engine=mpi"),
    ("comm.address=n1", "'n1' is not HOST:PORT", "comm.address", "comm.address=n1:29500"),
    ("log.samples=8", "log.samples=8 generates tokens, but the job has task.name=classification",
     "log.samples",
     "task.name=language or segmentation, or leave it out"),
    ("log.noise_scale=true", "log.noise_scale compares each rank's gradient with their mean; the "
                             "job has 1 rank", "log.noise_scale",
     "two ranks or more, or log.noise_scale=false"),
    ("shard.group=node", "shard.group=node has no effect without shard.stage", "shard.group",
     "shard.stage=1, or leave shard.group out"),
    ("stop.target=85", "stop.target=85 is outside 0 to 1, the range of accuracies",
     "stop.target", "stop.target=0.9 for 90 %"),
    ("log.targets=[0.5,95]", "log.targets=[0.5, 95.0] contains values outside 0 to 1, the range of "
     "accuracies", "log.targets", "log.targets=[0.9] for 90 %"),
    ("guard.max_time=soon", "'soon' is not a length of time", "guard.max_time",
     "write 90 (seconds), 45m, 3.5h, 2d, 45:00 (minutes), 1:30:00 or 2-00:00:00"),
    ("augment.crop=4 "
     "augment.resized_crop=0.5", "augment.crop=4 and augment.resized_crop=0.5 both crop the "
                                 "image", "augment.crop",
     "keep one of them"),
    ("augment.magnitude=7", "augment.magnitude=7 has no effect without augment.rand_augment",
     "augment.magnitude",
     ("augment.rand_augment=2, or " if "augmentations" in extras() else "")
     + "leave augment.magnitude out"),
    ("augment.color_jitter=[0,0,0,0.6]", "augment.color_jitter turns hues by up to 0.6 of the "
                                         "colour circle, but 0.5 already covers all hues",
     "augment.color_jitter", "brightness, contrast, saturation, hue: [0.4,0.4,0.4,0.1]"),
    ("framework=numpy "
     "model.name=mlp", "framework=numpy does not support model.name=mlp", "model.name",
     "model.name=linear, or framework=torch"),
    ("framework=jax model.name=linear "
     "data.resident=true", "framework=jax does not support data.resident=true", "data.resident",
     "data.resident=null, or framework=torch"),
    ("framework=jax model.name=linear optim.name=torch.optim.SGD",
     "torch.optim.SGD is a torch optimizer, but framework=jax needs a rule or a function of optax",
     "optim.name", "framework=torch, or a name of `list`"),
    ("optim.name=torch.optim.Adam "
     "optim.lr=0.1", "optim.lr is not an option: the recipe sets the rate of each step", "optim.lr",
     "optim.base_lr=..."),
    ("comm.local_steps=4 log.every_steps=8 evaluate.every_steps=10",
     "comm.local_steps=4 does not divide evaluate.every_steps=10; ranks synchronize at "
     "both", "comm.local_steps",
     "evaluate.every_steps=12, or another multiple of 4"),
    ("stop.time=soon", "'soon' is not a length of time", "stop.time",
     "write 90 (seconds), 45m, 3.5h, 2d, 45:00 (minutes), 1:30:00 or 2-00:00:00"),
    ("recipe.schedule=cosine "
     "recipe.warmup=10", "a warm-up of 10 epochs leaves nothing of 10 epochs for the "
     "schedule", "recipe.warmup",
     "recipe.warmup=10% is a tenth of the job, however short; or epochs=11 or more"),
    ("optim.name=adam optim.beta2=1", "a beta2 of 1.0 does not define a running mean",
     "optim.beta2",
     "give 0 or more and less than 1, as in optim.beta2=0.999"),
]  # fmt: skip

# the same on several ranks: (the configuration, the engine, ranks, ...)
OF_SEVERAL_RANKS = [
    ("batch.size=3", "mpi", 4, "batch 3 does not split over 4 ranks: some would have no "
                               "sample", "batch.size",
     "4 or more, or fewer ranks"),
    ("recipe.growth=milestones recipe.grow_at=[1] recipe.grow_to=[3]", "mpi", 4,
     "batch 3 does not split over 4 ranks: some would have no "
     "sample", "recipe.grow_to", "4 or more, or fewer ranks"),
    ("comm.engine=single", "single", 2, "comm.engine=single runs one process, but the job has 2 "
    "ranks", "comm.engine", "comm.engine=auto"),
    ("shard.stage=3", "horovod", 2, "shard.stage=3 needs torch's process groups, which the "
    "horovod engine does not create", "comm.engine",
     "comm.engine=mpi with the same mpirun, or shard.stage=2"),
    ("speed.devices=2", "mpi", 2, "framework=torch uses one device on each rank, but the job has "
    "speed.devices=2", "speed.devices",
     "as many ranks as there are devices; or framework=jax"),
    ("framework=jax model.name=mlp speed.devices=2 shard.stage=3", "mpi", 2,
     "speed.devices=2 does not support shard.stage=3: a unit is gathered on one device",
     "speed.devices", "shard.stage=2"),
    ("framework=jax model.name=mlp model.recompute=2 shard.stage=3", "mpi", 2,
     "shard.stage=3 in JAX recomputes every block, so model.recompute=2 has no effect",
     "model.recompute",
     "model.recompute=all or none"),
    ("framework=jax speed.devices=2 norm.kind=sync", "mpi", 2,
     "speed.devices=2 does not support norm.kind=sync: ranks exchange the statistics of one "
     "device", "speed.devices",
     "norm.kind=batch, which computes statistics over all devices of a rank"),
    ("shard.stage=3 "
     "log.noise_scale=true", "mpi", 2, "log.noise_scale reads each rank's own gradients, which "
                                       "shard.stage=3 does not keep",
     "log.noise_scale", "shard.stage=1, or log.noise_scale=false"),
    ("shard.stage=2 log.noise_scale=true batch.size=64 batch.micro=8", "mpi", 2,
     "log.noise_scale reads each rank's own gradients of several micro-batches, which "
     "shard.stage=2 does not keep", "log.noise_scale",
     "shard.stage=1, or log.noise_scale=false"),
    ("comm.op=adasum", "mpi",
     2, "comm.op=adasum needs the horovod engine, but the engine is mpi", "comm.op",
     "comm.engine=horovod, or comm.op=mean"),
    ("comm.op=adasum", "horovod",
     3, "comm.op=adasum needs 2, 4, 8, ... ranks, but the job has 3", "comm.op",
     "another number of ranks, or comm.op=mean"),
    ("comm.op=adasum "
     "comm.reduce=distributed_optimizer", "horovod", 2, "comm.reduce=distributed_optimizer does "
                                                        "not support comm.op=adasum",
     "comm.reduce", "comm.reduce=auto"),
    ("comm.compression=bf16", "horovod", 2, "comm.compression=bf16 needs sums of bfloat16, which "
                                            "the horovod engine does not have",
     "comm.compression", "comm.compression=fp16, or another comm.engine"),
]  # fmt: skip

# which train, check and plan would refuse, had they come so far
DATA = [
    "data.name=cifar10",
    "data.root=nowhere",
    "data.download=false",
]
ROWS = [
    (feature, *row)
    for feature in FEATURES
    for row in rows(feature)
    if row[0].key != "profile.steps" or "profiler" in extras()  # else it is refused before
]
ROWS_WITHOUT = [(feature, *row) for feature in FEATURES for row in rows_without(feature)]


def _ids(table: list[tuple[JobFeature, Exclusion, str, UserError]]) -> list[str]:
    return [words for _, _, words, _ in table]


@pytest.mark.in_turn
@pytest.mark.parametrize("order", [str, reverse])
@pytest.mark.parametrize(("feature", "row", "words", "told"), ROWS, ids=_ids(ROWS))
def test_what_a_feature_excludes_is_the_message_of_some_engine_and_names_both(
    feature: JobFeature, row: Exclusion, words: str, told: UserError, order: Callable[[str], str]
) -> None:
    """Its row, which no rule before it hides; without the excluded value, and without the feature,
    it is not said."""
    given = [str(error) for engine in ENGINES if (error := verdict(order(words), engine))]
    assert str(told) in given, given
    assert names(told, assigned(joined(feature.examples[0], row.words))) and names(
        told, [row.key, row.where or row.key]
    ), told
    alone = " ".join(word for word in words.split() if word.partition("=")[0] != row.key)
    assert not any(_says(told, verdict(alone, engine)) for engine in ENGINES)


@pytest.mark.parametrize("order", [str, reverse])
@pytest.mark.parametrize(("feature", "row", "words", "told"), ROWS_WITHOUT, ids=_ids(ROWS_WITHOUT))
def test_what_means_nothing_without_a_feature_is_refused(
    feature: JobFeature, row: Exclusion, words: str, told: UserError, order: Callable[[str], str]
) -> None:
    """And is read with one of the examples of the feature."""
    error = verdict(order(words), "mpi")
    assert str(error) == str(told) and names(told, [row.key])
    if told.fix == f"leave {row.key} out":  # what turns the feature on needs a missing extra
        assert not feature.is_installed or not of_this_copy(feature.extra_values)
        return
    examples = [each.words for each in EXAMPLES if each.feature is feature]
    assert not examples or any(engines_of(joined(example, words)) for example in examples)


def _says(told: UserError, error: UserError | None) -> bool:
    return error is not None and error.what == told.what


def test_every_feature_has_examples() -> None:
    """With which the test of pairs turns it on; a rule without a feature is in conflicts_of()."""
    of_texts = [] if "texts" in extras() else ["data.name", "task.loss_on"]
    assert [feature.key for feature in FEATURES if not feature.examples] == of_texts
    assert [feature.key for feature in FEATURES if feature.on(configure(None, []))] == []


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.words)
def test_each_feature_alone_is_accepted_by_an_engine(example: Example) -> None:
    assert example.feature.on(configure(None, example.words.split()))
    assert engines_of(example.words)


def test_each_pair_of_features_is_accepted_or_refused_with_both_keys_and_in_both_orders_alike() -> (
    None
):
    """The other order for every fifth pair, which halves the time."""
    every_pair = all_pairs()
    pairs = rows_of_today(every_pair)
    accepted = 0
    refused = 0
    wrong = []
    for number, pair in enumerate(pairs):
        error = refusal(pair)
        if number % 5 == 0 and str(error) != str(backwards := refusal(Pair(pair.other, pair.one))):
            wrong.append(f"{pair.name}: {error} / {backwards}")
        elif error is None:
            accepted += 1
        else:
            refused += 1
            wrong += _unnamed(pair, error)
    assert not wrong, "\n".join(wrong)
    assert len(every_pair) > (4000 if extras() else 2000)
    # Those that divide a model exclude most. 721 of 5,577 pairs: the floor is a number, not a
    # share, which falls with each feature that excludes little. A day has a seventh of the pairs.
    is_complete = {"dense", "pipeline", "servers", "tensor"} <= extras().keys()
    share = 0.1 if extras() else 0.05
    least = 670 if is_complete else share * len(every_pair)
    assert accepted > 0.7 * len(pairs), accepted
    assert refused * len(every_pair) > least * len(pairs), refused


def _unnamed(pair: Pair, error: UserError) -> list[str]:
    """A message that names one feature alone: of the pair, or of an engine that takes each of the
    two."""
    both = set(engines_of(pair.one.words)) & set(engines_of(pair.other.words))
    errors = [error, *(found for engine in both if (found := verdict(pair.words, engine)))]
    return [
        f"{pair.name}: {e}"
        for e in errors
        if not (names(e, pair.one.keys) and names(e, pair.other.keys))
    ]


def test_no_two_features_have_one_key_and_one_value() -> None:
    words = [example.words for example in EXAMPLES]
    assert len(words) == len(set(words)) > 60


@pytest.mark.parametrize(
    ("words", "engine", "ranks", "what", "key", "fix"),
    [*((words, "single", 1, *rest) for words, *rest in OF_ONE_PROCESS), *OF_SEVERAL_RANKS],
)
def test_a_conflict_is_named_with_its_key_and_a_fix(
    words: str, engine: str, ranks: int, what: str, key: str, fix: str
) -> None:
    with pytest.raises(UserError) as caught:
        refuse_conflicts(configure(None, words.split()), engine, ranks)
    error = caught.value
    assert (error.what, error.fix) == (what, fix)
    assert key in error.where


@pytest.mark.in_turn
@pytest.mark.parametrize(("words", "what", "key", "fix"), OF_ONE_PROCESS)
def test_train_check_and_plan_give_the_same_message(
    words: str,
    what: str,
    key: str,
    fix: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [*DATA, *words.split()]
    assert main([*given, "run=run"]) == USER
    trained = capsys.readouterr().err.splitlines()
    assert (
        trained == [f"hvdtrain: {what}", trained[1], f"  fix: {fix}"]
        and trained[1].startswith("  where: ")
        and key in trained[1]
    )
    assert not (tmp_path / "run").exists()
    if is_command("plan"):
        assert main(["plan", "--ranks", "1", *given]) == USER
        assert capsys.readouterr().err.splitlines() == trained
    if is_command("check"):
        assert main(["check", *given]) == USER
        checked = capsys.readouterr().out
        where = trained[1].removeprefix("  where: ")
        assert what in checked and fix in checked and where in checked


@pytest.mark.parametrize(
    ("words", "engine", "ranks"),
    [
        ("", "single", 1),
        ("comm.op=adasum", "horovod", 4),
        ("comm.compression=bf16", "mpi", 3),
        ("comm.reduce=ddp", "torchdist", 2),
        (
            "comm.reduce=distributed_optimizer comm.cycle_ms=1 comm.fusion_mb=4 "
            "comm.hierarchical=true",
            "horovod",
            2,
        ),
        ("comm.local_steps=5 checkpoint.every_steps=20", "mpi", 2),
        ("comm.local_steps=5 comm.local_from=50% comm.reduce=bucket", "mpi", 2),
        ("framework=numpy model.name=linear speed.precision=auto", "mpi", 2),
        ("comm.tune=true", "mpi", 64),
        ("comm.device_memory=host", "mpi", 2),
        *(
            (words, "mpi", 2)
            for words in of_this_copy(
                [
                    "norm.kind=sync batch.size=64 batch.micro=32",
                    "log.noise_scale=true",
                    "shard.stage=2 log.noise_scale=true",
                ]
            )
        ),
        *(
            (words, "horovod", 3)
            for words in of_this_copy(
                ["framework=jax model.name=mlp shard.stage=2 log.noise_scale=true"]
            )
        ),
        *(
            (words, "torchdist", 4)
            for words in of_this_copy(
                ["shard.stage=3 shard.group=node shard.reshard=false shard.offload=parameters"]
            )
        ),
    ],
)
def test_what_goes_together_is_not_refused(words: str, engine: str, ranks: int) -> None:
    refuse_conflicts(configure(None, words.split()), engine, ranks)


def test_the_commands_of_the_page_of_meshes_are_not_refused() -> None:
    text = (ROOT / "docs" / "parallel.md").read_text()
    commands = re.findall(
        r"^(?:\$ )?(?:mpirun -np (\d+) )?hvdtrain (?:plan )?[^\n]*--config (configs/\S+) ([^\n]+)$",
        text,
        re.MULTILINE,
    )
    assert len(commands) == 6, commands
    for ranks, path, words in (each for each in commands if of_this_copy([each[2]])):
        config = configure(ROOT / path, words.split())
        refuse_on_every_engine(config, int(ranks or config.parallel.ranks))


def test_a_launcher_is_judged_before_the_ranks_connect() -> None:
    """Without one the number of ranks is known once they are connected; with resume=RUN rank 0
    alone has the whole configuration."""
    mpirun = Placement(1, 3, 1, 3, "Open MPI's mpirun")
    with pytest.raises(UserError, match="needs 2, 4, 8, ... ranks, but the job has 3"):
        refuse_before_connecting(configure(None, ["comm.op=adasum", "comm.engine=horovod"]), mpirun)
    with pytest.raises(UserError, match="but the engine is mpi"):
        refuse_before_connecting(
            configure(None, ["comm.op=adasum", "comm.engine=mpi", "batch.per_rank=2"]), mpirun
        )
    refuse_before_connecting(
        configure(None, ["comm.op=adasum", "comm.engine=horovod"]), NO_LAUNCHER
    )
    refuse_before_connecting(configure(None, ["comm.op=adasum", "resume=elsewhere"], ()), mpirun)


def test_a_plan_of_auto_is_refused_where_every_engine_refuses() -> None:
    assert possible_engines("auto", 1) == ["single"] and possible_engines("mpi", 1) == ["mpi"]
    assert possible_engines("auto", 2) == ["horovod", "mpi", "torchdist"]
    for words in ("comm.op=adasum", "comm.reduce=ddp", "comm.compression=bf16", "comm.cycle_ms=1"):
        refuse_on_every_engine(configure(None, [words]), 2)
    with pytest.raises(UserError, match="adasum needs 2, 4, 8, ... ranks, but the job has 3"):
        refuse_on_every_engine(configure(None, ["comm.op=adasum"]), 3)
    with pytest.raises(
        UserError, match="comm.reduce=ddp needs the torchdist engine, but the engine is mpi"
    ):
        refuse_on_every_engine(configure(None, ["comm.reduce=ddp", "comm.engine=mpi"]), 2)
    with pytest.raises(UserError, match="comm.compression=bf16 needs sums of bfloat16"):
        refuse_on_every_engine(configure(None, ["comm.compression=bf16", "comm.cycle_ms=1"]), 2)


def test_features_have_meanings() -> None:
    known = {engine: features_of(engine) for engine in ("single", "horovod", "mpi", "torchdist")}
    assert frozenset().union(*known.values()) | {"nccl"} == MEANINGS.keys()
    with pytest.raises(UserError, match="unknown name: nothing"):
        features_of("nothing")


# Keys that are read only where another one is set, beside those of the features: a value by itself,
# and the words with which it has an effect.
NEEDS = {
    "recipe.gamma=0.5": "recipe.schedule=steps recipe.milestones=[1]",
    "recipe.power=3": "recipe.schedule=polynomial",
    "recipe.end_lr=0.001": "recipe.schedule=cosine",
    "recipe.floor=0.1": "recipe.schedule=cosine",
    "recipe.warmup_kind=constant": "recipe.warmup=1",
    "recipe.warmup_from=0.01": "recipe.warmup=1",
    "recipe.milestones=[1]": "recipe.schedule=steps",
    "recipe.cycle_momentum=[0.8,0.9]": "recipe.schedule=one_cycle",
    **{
        f"recipe.{words}": "recipe.schedule=plateau"
        for words in ("patience=3", "threshold=0.1", "threshold_mode=abs", "cooldown=2")
    },
    "recipe.batch_max=64": "recipe.growth=decays recipe.schedule=steps recipe.milestones=[1]",
    "recipe.grow_at=[1]": "recipe.growth=milestones recipe.grow_to=[64]",
    "recipe.grow_to=[64]": "recipe.growth=milestones recipe.grow_at=[1]",
    "recipe.adapt_regime=true": "optim.base_batch=16",
    "recipe.sample_noise=0.5": "optim.base_batch=16",
    "data.bucket_by=length": "data.pad={tokens: 0}",
    **dict.fromkeys(
        of_this_copy(["parallel.sequence=true"]),
        "parallel.tensor=2 model.name=gpt task.name=language",
    ),
    **{
        f"comm.{words}": "comm.engine=horovod"
        for words in ("hierarchical=true", "cycle_ms=2", "fusion_mb=4")
    },
}


def _refused(words: str) -> str:
    config = configure(
        None, [*words.split(), "batch.size=32"] if "{" not in words else [words, "batch.size=32"]
    )
    engine = "horovod" if "horovod" in words else "mpi"
    try:
        refuse_conflicts(config, engine, 2)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("words", NEEDS)
def test_a_key_without_effect_is_refused(words: str) -> None:
    key = words.partition("=")[0]
    assert key in _refused(words), "it does nothing by itself"
    needed = NEEDS[words]
    assert "{" in needed or not _refused(f"{words} {needed}"), "it is read there"


# what a run may have recorded without an effect
RECORDED = [
    *(words for words in NEEDS if words.split("=")[0] in {row.key for row in NO_EFFECT}),
    *(words for _, row, words, _ in ROWS_WITHOUT if not row.key.startswith("servers.")),
]


@pytest.mark.parametrize("words", RECORDED)
def test_a_key_without_effect_that_a_run_recorded_is_left_out(words: str, tmp_path: Path) -> None:
    key, _, value = words.partition("=")
    (tmp_path / "config.yaml").write_text(f"{key}: {value}\nbatch.size: 32\n")
    resumed = f"resume={tmp_path}"
    config = configure(None, [resumed])
    assert config.model_dump(exclude={"resume"}) == configure(None, ["batch.size=32"]).model_dump(
        exclude={"resume"}
    )
    refuse_conflicts(config, "mpi", 2)
    assert changes(tmp_path, config) == []
    refuse_conflicts(configure(str(tmp_path / "config.yaml"), []), "mpi", 2)
    with pytest.raises(UserError, match=re.escape(key)):
        refuse_conflicts(configure(None, [resumed, words]), "mpi", 2)


@pytest.mark.parametrize(
    ("recorded", "typed"),
    [
        ("stop.patience: 3\nstop.min_delta: 0.01\n", "stop.patience=null"),
        (
            "recipe.schedule: steps\nrecipe.milestones: [1]\nrecipe.gamma: 0.5\n",
            "recipe.schedule=cosine",
        ),
        ("recipe.warmup: 1\nrecipe.warmup_kind: constant\n", "recipe.warmup=0"),
    ],
)
def test_a_resumed_run_leaves_behind_what_the_command_turns_off(
    recorded: str, typed: str, tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").write_text(recorded)
    config = configure(None, [f"resume={tmp_path}", typed])
    refuse_conflicts(config, "mpi", 2)
    assert [change.key for change in changes(tmp_path, config)] == re.findall(
        r"^(\S+):", "".join(sorted(recorded.splitlines(keepends=True))), re.MULTILINE
    )


def test_every_key_belongs_to_one_feature_or_to_the_core() -> None:
    """A feature without a key of its own is a value of a key that belongs to one of them, or an
    option of a task or of a data set."""
    owners = Counter([*core_keys(), *(key for feature in FEATURES for key in feature.keys)])
    assert owners.keys() == known_keys().keys()
    assert [key for key, count in owners.items() if count > 1] == []
    values = {feature.key for feature in FEATURES if not feature.keys}
    assert values - owners.keys() == {
        "task.ignore_label",
        "task.metrics",
        "task.loss_on",
        *(["data.columns"] if "science" in extras() else []),
        *(["data.mixture"] if "tokens" in extras() else []),
    }
