"""Every rule of training/conflicts.py: its message, and that train, check and plan all give it before data or a model exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hvdtrain.__main__ import main
from hvdtrain.comm.features import MEANINGS, features_of
from hvdtrain.comm.placement import NO_LAUNCHER, Placement
from hvdtrain.comm.select_engine import possible_engines
from hvdtrain.config.read import configure
from hvdtrain.errors import USER, UserError
from hvdtrain.training.conflicts import refuse_before_connecting, refuse_conflicts, refuse_on_every_engine

# (the configuration, what the message says, the key that it names, how to fix it), in a job of one process
OF_ONE_PROCESS = [
    ("comm.local_steps=3", "comm.local_steps=3 does not divide log.every_steps=10; ranks synchronize at both",
     "comm.local_steps", "log.every_steps=12, or another multiple of 3"),
    ("comm.local_steps=2 checkpoint.every_steps=7",
     "comm.local_steps=2 does not divide checkpoint.every_steps=7; ranks synchronize at both",
     "comm.local_steps", "checkpoint.every_steps=8, or another multiple of 2"),
    ("comm.local_steps=2 speed.precision=fp16", "comm.local_steps=2 with speed.precision=fp16 gives each rank a loss scale of its own",
     "comm.local_steps", "speed.precision=bf16, or comm.local_steps=1"),
    ("comm.local_steps=2 guard.nonfinite=skip",
     "comm.local_steps=2 with guard.nonfinite=skip lets one rank skip a step that the others make",
     "comm.local_steps", "guard.nonfinite=stop, or comm.local_steps=1"),
    ("comm.local_steps=2 log.noise_scale=true",
     "log.noise_scale compares each rank's gradient with their mean, which comm.local_steps=2 does not compute",
     "comm.local_steps", "comm.local_steps=1, or log.noise_scale=false"),
    ("comm.local_steps=2 norm.kind=sync", "norm.kind=sync synchronizes the ranks in every step, comm.local_steps=2 does not",
     "comm.local_steps", "comm.local_steps=1, or norm.kind=ghost"),
    ("comm.local_steps=2 comm.reduce=bucket", "comm.local_steps=2 reduces weights, not gradients: comm.reduce=bucket has nothing to do",
     "comm.reduce", "comm.reduce=auto"),
    ("comm.local_steps=2 comm.tune=true", "comm.tune measures bucket sizes; comm.local_steps=2 has no buckets to tune",
     "comm.tune", "comm.tune=false"),
    ("comm.local_steps=2 comm.compression=fp16", "comm.compression=fp16 and comm.local_steps=2 exclude each other",
     "comm.op", "keep one of them"),
    ("comm.compression=fp16 comm.reduce=ddp", "comm.reduce=ddp does not support comm.compression=fp16", "comm.reduce", "comm.reduce=auto"),
    ("comm.compression=fp16 speed.precision=fp64", "comm.compression=fp16 would round the gradients of speed.precision=fp64",
     "comm.compression", "comm.compression=none"),
    ("comm.op=adasum", "comm.op=adasum needs the horovod engine; this is single", "comm.op", "comm.engine=horovod, or comm.op=mean"),
    ("comm.reduce=distributed_optimizer", "comm.reduce=distributed_optimizer needs the horovod engine; this is single",
     "comm.reduce", "comm.engine=horovod, or comm.reduce=auto"),
    ("comm.reduce=ddp", "comm.reduce=ddp needs the torchdist engine; this is single", "comm.reduce",
     "comm.engine=torchdist, or comm.reduce=auto"),
    ("comm.cycle_ms=1", "comm.cycle_ms is a setting of Horovod; this is the single engine", "comm.cycle_ms",
     "leave comm.cycle_ms out, or comm.engine=horovod"),
    ("comm.fusion_mb=1", "comm.fusion_mb is a setting of Horovod; this is the single engine", "comm.fusion_mb",
     "leave comm.fusion_mb out, or comm.engine=horovod"),
    ("comm.hierarchical=true", "comm.hierarchical is a setting of Horovod; this is the single engine", "comm.hierarchical",
     "leave comm.hierarchical out, or comm.engine=horovod"),
    ("comm.address=n1", "'n1' is not HOST:PORT", "comm.address", "comm.address=n1:29500"),
    ("log.noise_scale=true", "log.noise_scale compares each rank's gradient with their mean; the job has 1 rank", "log.noise_scale",
     "two ranks or more, or log.noise_scale=false"),
    ("log.targets=[0.5,95]", "log.targets has 95: accuracies are 0 to 1", "log.targets", "log.targets=[0.9] for 90 %"),
    ("profile.steps=banana", "profile.steps=banana is no range of steps", "profile.steps",
     "profile.steps=10:15 traces the five steps that follow step 10"),
    ("guard.max_time=soon", "'soon' is not a length of time", "guard.max_time",
     "write 90 (seconds), 45m, 3.5h, 2d, 45:00 (minutes), 1:30:00 or 2-00:00:00"),
    ("data.ahead=0 data.readers=2", "data.readers=2 threads read steps ahead, and data.ahead=0 reads none ahead", "data.readers",
     "data.ahead=2, or leave data.readers out"),
    ("augment.crop=4 augment.resized_crop=0.5", "augment.crop=4 and augment.resized_crop=0.5 both crop the image", "augment.crop",
     "keep one of them"),
    ("framework=numpy model.name=mlp", "framework=numpy does not support model.name=mlp", "model.name",
     "model.name=linear, or framework=torch"),
    ("framework=numpy model.name=linear speed.device=cuda", "framework=numpy does not support speed.device=cuda", "speed.device",
     "speed.device=auto, or framework=torch"),
    ("framework=numpy model.name=linear profile.steps=1:2", "framework=numpy does not support profile.steps=1:2", "profile.steps",
     "profile.steps=null, or framework=torch"),
    ("framework=jax model.name=linear data.resident=true", "framework=jax does not support data.resident=true", "data.resident",
     "data.resident=null, or framework=torch"),
    ("framework=jax model.name=linear optim.name=torch.optim.SGD", "torch.optim.SGD is a torch optimizer, framework=jax needs a rule",
     "optim.name", "framework=torch, or a name of `list`"),
    ("optim.name=torch.optim.Adam optim.lr=0.1", "optim.lr is not an option: the recipe sets the rate of each step", "optim.lr",
     "optim.base_lr=..."),
    ("recipe.schedule=cosine recipe.warmup_epochs=10", "a warm-up of 10 epochs leaves nothing of 10 epochs to the schedule",
     "recipe.warmup_epochs", "a shorter warm-up, or more epochs"),
    ("optim.name=adam optim.beta2=1", "a beta2 of 1.0 makes no running mean", "optim.beta2",
     "give 0 or more and less than 1, as in optim.beta2=0.999"),
    ("recipe.warmup_epochs=1 recipe.warmup_steps=1", "recipe.warmup_epochs=1 and recipe.warmup_steps=1 both set the warm-up's length",
     "recipe.warmup_steps", "keep one of them"),
]  # fmt: skip

# the same on several ranks: (the configuration, the engine, ranks, ...)
OF_SEVERAL_RANKS = [
    ("batch.size=3", "mpi", 4, "batch 3 does not split over 4 ranks: some would have no sample", "batch.size", "4 or more, or fewer ranks"),
    ("recipe.growth=milestones recipe.grow_at=[1] recipe.grow_to=[3]", "mpi", 4,
     "batch 3 does not split over 4 ranks: some would have no sample", "recipe.grow_to", "4 or more, or fewer ranks"),
    ("comm.engine=single", "single", 2, "comm.engine=single is for one process; the job has 2 ranks", "comm.engine", "comm.engine=auto"),
    ("comm.op=adasum", "mpi", 2, "comm.op=adasum needs the horovod engine; this is mpi", "comm.op", "comm.engine=horovod, or comm.op=mean"),
    ("comm.op=adasum", "horovod", 3, "comm.op=adasum needs 2, 4, 8, ... ranks; the job has 3", "comm.op",
     "another number of ranks, or comm.op=mean"),
    ("comm.op=adasum comm.reduce=distributed_optimizer", "horovod", 2, "comm.reduce=distributed_optimizer does not support comm.op=adasum",
     "comm.reduce", "comm.reduce=auto"),
    ("comm.op=adasum comm.tune=true", "horovod", 2, "comm.tune measures bucket sizes; comm.op=adasum has no buckets to tune",
     "comm.tune", "comm.tune=false"),
    ("comm.reduce=ddp comm.tune=true", "torchdist", 2, "comm.tune measures bucket sizes; comm.reduce=ddp has no buckets to tune",
     "comm.tune", "comm.tune=false"),
    ("comm.compression=bf16", "horovod", 2, "comm.compression=bf16 needs sums of bfloat16, which the horovod engine does not have",
     "comm.compression", "comm.compression=fp16, or another comm.engine"),
    ("log.noise_scale=true speed.precision=fp16", "mpi", 2,
     "log.noise_scale reads each rank's own gradients, which speed.precision=fp16 scales", "speed.precision",
     "speed.precision=bf16, or log.noise_scale=false"),
    ("log.noise_scale=true comm.reduce=ddp", "torchdist", 2,
     "log.noise_scale reads each rank's own gradients, which comm.reduce=ddp does not show", "comm.reduce",
     "comm.reduce=auto, or log.noise_scale=false"),
    ("framework=numpy model.name=linear log.noise_scale=true", "mpi", 2, "framework=numpy does not support log.noise_scale=true",
     "log.noise_scale", "log.noise_scale=false, or framework=torch"),
]  # fmt: skip

DATA = ["data.name=folder", "data.root=nowhere"]  # which train, check and plan would refuse, had they come so far


@pytest.mark.parametrize(
    ("words", "engine", "ranks", "what", "key", "fix"),
    [*((words, "single", 1, *rest) for words, *rest in OF_ONE_PROCESS), *OF_SEVERAL_RANKS],
)
def test_a_conflict_is_named_with_its_key_and_a_fix(words: str, engine: str, ranks: int, what: str, key: str, fix: str) -> None:
    with pytest.raises(UserError) as caught:
        refuse_conflicts(configure(None, words.split()), engine, ranks)
    error = caught.value
    assert (error.what, error.fix) == (what, fix)
    assert key in error.where


@pytest.mark.parametrize(("words", "what", "key", "fix"), OF_ONE_PROCESS)
def test_train_check_and_plan_give_the_same_message(
    words: str, what: str, key: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [*DATA, *words.split()]
    assert main([*given, "run=run"]) == USER
    trained = capsys.readouterr().err.splitlines()
    assert trained == [f"hvdtrain: {what}", trained[1], f"  fix: {fix}"] and trained[1].startswith("  where: ") and key in trained[1]
    assert not (tmp_path / "run").exists()
    assert main(["plan", "--ranks", "1", *given]) == USER
    assert capsys.readouterr().err.splitlines() == trained
    assert main(["check", *given]) == USER
    checked = capsys.readouterr().out
    assert what in checked and fix in checked and trained[1].removeprefix("  where: ") in checked


@pytest.mark.parametrize("framework", ["numpy", "jax"])
@pytest.mark.parametrize(
    "word",
    [
        *("speed.precision=bf16", "speed.precision=fp16", "speed.compile=default", "speed.channels_last=false", "data.resident=true"),
        *("comm.compression=fp16", "comm.local_steps=10", "comm.tune=true", "comm.reduce=bucket", "norm.kind=ghost"),
        "model.classifier_std=0.01",
    ],
)
def test_only_torch_has_these_options(framework: str, word: str) -> None:
    words = [f"framework={framework}", "model.name=linear", word]
    with pytest.raises(UserError, match=re.escape(f"framework={framework} does not support {word}")):
        refuse_conflicts(configure(None, words), "mpi", 2)


@pytest.mark.parametrize(
    ("words", "engine", "ranks"),
    [
        ("", "single", 1),
        ("comm.op=adasum", "horovod", 4),
        ("comm.compression=bf16", "mpi", 3),
        ("comm.reduce=ddp", "torchdist", 2),
        ("comm.reduce=distributed_optimizer comm.cycle_ms=1 comm.fusion_mb=4 comm.hierarchical=true", "horovod", 2),
        ("comm.local_steps=5 checkpoint.every_steps=20", "mpi", 2),
        ("framework=numpy model.name=linear speed.precision=auto", "mpi", 2),
        ("log.noise_scale=true", "mpi", 2),
        ("comm.tune=true", "mpi", 64),
    ],
)
def test_what_goes_together_is_not_refused(words: str, engine: str, ranks: int) -> None:
    refuse_conflicts(configure(None, words.split()), engine, ranks)


def test_a_launcher_is_judged_before_the_ranks_connect() -> None:
    """Without one the number of ranks is known once they are connected; with resume=RUN rank 0 alone has the whole configuration."""
    mpirun = Placement(1, 3, 1, 3, "Open MPI's mpirun")
    with pytest.raises(UserError, match="needs 2, 4, 8, ... ranks; the job has 3"):
        refuse_before_connecting(configure(None, ["comm.op=adasum", "comm.engine=horovod"]), mpirun)
    with pytest.raises(UserError, match="this is mpi"):
        refuse_before_connecting(configure(None, ["comm.op=adasum", "comm.engine=mpi", "batch.per_rank=2"]), mpirun)
    refuse_before_connecting(configure(None, ["comm.op=adasum", "comm.engine=horovod"]), NO_LAUNCHER)
    refuse_before_connecting(configure(None, ["comm.op=adasum", "resume=elsewhere"], ()), mpirun)


def test_a_plan_of_auto_is_refused_where_every_engine_refuses() -> None:
    assert possible_engines("auto", 1) == ["single"] and possible_engines("mpi", 1) == ["mpi"]
    assert possible_engines("auto", 2) == ["horovod", "mpi", "torchdist"]
    for words in ("comm.op=adasum", "comm.reduce=ddp", "comm.compression=bf16", "comm.cycle_ms=1"):
        refuse_on_every_engine(configure(None, [words]), 2)
    with pytest.raises(UserError, match="comm.op=adasum needs 2, 4, 8, ... ranks; the job has 3"):
        refuse_on_every_engine(configure(None, ["comm.op=adasum"]), 3)
    with pytest.raises(UserError, match="comm.reduce=ddp needs the torchdist engine; this is mpi"):
        refuse_on_every_engine(configure(None, ["comm.reduce=ddp", "comm.engine=mpi"]), 2)
    with pytest.raises(UserError, match="comm.compression=bf16 needs sums of bfloat16"):
        refuse_on_every_engine(configure(None, ["comm.compression=bf16", "comm.cycle_ms=1"]), 2)


def test_a_plan_names_the_rows_that_a_conflict_concerns(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--samples", "960", "--image", "8x8x3", "--classes", "10", "model.name=mlp"]
    assert main(["plan", "--ranks", "2,3,4", "comm.op=adasum", *shape]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if "needs 2, 4, 8, ... ranks" in line]
    assert len(rows) == 1 and rows[0].split()[0] == "3", rows


def test_features_have_meanings() -> None:
    known = {engine: features_of(engine) for engine in ("single", "horovod", "mpi", "torchdist")}
    assert frozenset().union(*known.values()) | {"nccl"} == MEANINGS.keys()
    with pytest.raises(UserError, match="unknown name: nothing"):
        features_of("nothing")
