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

ROOT = Path(__file__).parents[2]
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
    *((f"norm.kind=sync batch.size=64 batch.micro={words}", f"batch.micro={words.partition(' ')[0]} makes the passes of a step, "
       "over each of which norm.kind=sync normalizes, depend on the number of ranks", "batch.micro",
       "leave batch.micro out: a batch that grows has the same passes on any number of ranks; or norm.kind=batch or ghost")
      for words in ("auto", "63", "64 data.sampling=partition", "64 recipe.growth=milestones recipe.grow_at=[1] recipe.grow_to=[65]")),
    ("comm.local_steps=2 comm.reduce=bucket", "comm.local_steps=2 reduces weights, not gradients: comm.reduce=bucket has nothing to do",
     "comm.reduce", "comm.reduce=auto"),
    ("comm.local_from=3", "comm.local_from=3 is where comm.local_steps begins, and comm.local_steps=1 reduces every gradient",
     "comm.local_from", "comm.local_steps=4, say, or leave comm.local_from out"),
    ("comm.local_steps=2 comm.local_from=50% stop.time=1h",
     "comm.local_from: 50% is a share of the job; stop.time=1h alone ends the job, at a step that is not known before",
     "comm.local_from", "a length in epochs, steps, samples or tokens; or stop.steps or epochs as well"),
    ("comm.local_steps=2 comm.local_from=1 comm.compression=fp16", "comm.compression=fp16 and comm.local_steps=2 exclude each other",
     "comm.op", "keep one of them"),
    ("comm.local_steps=2 comm.tune=true", "comm.tune measures bucket sizes; comm.local_steps=2 has no buckets to tune",
     "comm.tune", "comm.tune=false"),
    ("comm.local_steps=2 comm.compression=fp16", "comm.compression=fp16 and comm.local_steps=2 exclude each other",
     "comm.op", "keep one of them"),
    ("comm.compression=fp16 comm.reduce=ddp", "comm.reduce=ddp does not support comm.compression=fp16", "comm.reduce", "comm.reduce=auto"),
    ("comm.compression=fp16 speed.precision=fp64", "comm.compression=fp16 would round the gradients of speed.precision=fp64",
     "comm.compression", "comm.compression=none"),
    ("guard.lost=shrink shard.stage=3", "guard.lost=shrink does not go on with shard.stage=3 on fewer ranks",
     "guard.lost", "guard.lost=restart, or shard.stage=2"),
    ("guard.lost=shrink shard.stage=1 shard.group=node", "guard.lost=shrink does not go on with shard.group=node on fewer ranks",
     "guard.lost", "guard.lost=restart, or shard.group=all"),
    ("optim.ema=0.9 shard.stage=3", "optim.ema does not go with shard.stage=3: no rank has all averages to evaluate with",
     "optim.ema", "leave shard.stage=3 or optim.ema out; shard.stage=2 has them"),
    ("optim.ema=0.9 optim.name=torch.optim.Adam",
     "optim.ema is of hvdtrain's own optimizers, and optim.name=torch.optim.Adam has its state to itself",
     "optim.ema", "a name of `list` for optim.name, or leave optim.ema out"),
    ("guard.lost=shrink framework=jax model.name=mlp",
     "guard.lost=shrink does not go on with framework=jax, whose step is compiled for a number of ranks",
     "guard.lost", "guard.lost=restart, or framework=torch"),
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
    ("comm.device_memory=device", "comm.device_memory=device is of the mpi engine; this is the single engine", "comm.device_memory",
     "leave comm.device_memory out, or comm.engine=mpi"),
    ("comm.address=n1", "'n1' is not HOST:PORT", "comm.address", "comm.address=n1:29500"),
    ("log.samples=8", "log.samples=8 draws tokens; the job has task.name=classification", "log.samples",
     "task.name=language, or leave it out"),
    ("log.noise_scale=true", "log.noise_scale compares each rank's gradient with their mean; the job has 1 rank", "log.noise_scale",
     "two ranks or more, or log.noise_scale=false"),
    ("shard.group=node", "shard.group=node is of shard.stage=1 or more; this is 0", "shard.group", "shard.stage=1"),
    ("shard.stage=2 shard.reshard=false", "shard.reshard=false is of shard.stage=3; this is 2", "shard.reshard", "shard.stage=3"),
    ("shard.stage=2 shard.offload=parameters", "shard.offload=parameters is of shard.stage=3; this is 2", "shard.offload", "shard.stage=3"),
    ("shard.stage=1 comm.local_steps=2", "shard.stage=1 does not support comm.local_steps=2", "comm.local_steps",
     "leave comm.local_steps out, or shard.stage=0"),
    ("shard.stage=2 comm.compression=fp16", "shard.stage=2 does not support comm.compression=fp16", "comm.compression",
     "leave comm.compression out, or shard.stage=0"),
    ("shard.stage=1 comm.tune=true", "shard.stage=1 does not support comm.tune=true", "comm.tune", "leave comm.tune out, or shard.stage=0"),
    ("shard.stage=3 comm.reduce=bucket", "shard.stage=3 does not support comm.reduce=bucket", "comm.reduce",
     "leave comm.reduce out, or shard.stage=0"),
    ("shard.stage=3 speed.channels_last=true", "shard.stage=3 does not support speed.channels_last=true", "speed.channels_last",
     "leave speed.channels_last out, or shard.stage=0"),
    ("stop.target=85", "stop.target is 85: accuracy is 0 to 1", "stop.target", "stop.target=0.9 for 90 %"),
    ("task.name=regression model.loss=squared_error", "model.loss=squared_error is of task.name=classification, this is regression",
     "model.loss", "task.loss=squared_error, which is its default"),
    ("task.name=regression model.label_smoothing=0.1",
     "model.label_smoothing=0.1 spreads the label of a class, which task.name=regression does not have",
     "model.label_smoothing", "leave it out"),
    ("log.targets=[0.5,95]", "log.targets has 95: accuracies are 0 to 1", "log.targets", "log.targets=[0.9] for 90 %"),
    ("profile.steps=banana", "profile.steps=banana is no range of steps", "profile.steps",
     "profile.steps=10:15 traces the five steps that follow step 10"),
    ("guard.max_time=soon", "'soon' is not a length of time", "guard.max_time",
     "write 90 (seconds), 45m, 3.5h, 2d, 45:00 (minutes), 1:30:00 or 2-00:00:00"),
    ("data.ahead=0 data.readers=2", "data.readers=2 threads read steps ahead, and data.ahead=0 reads none ahead", "data.readers",
     "data.ahead=2, or leave data.readers out"),
    ("augment.crop=4 augment.resized_crop=0.5", "augment.crop=4 and augment.resized_crop=0.5 both crop the image", "augment.crop",
     "keep one of them"),
    ("augment.pad=reflect augment.flip=true", "augment.pad=reflect is what augment.crop pads with, and there is no augment.crop",
     "augment.pad", "augment.crop=2, or leave augment.pad out"),
    ('optim.name=torch.optim.SGD optim.groups=[{"names":"x"}]',
     "optim.groups is of hvdtrain's own optimizers; torch.optim.SGD has one rate for all parameters", "optim.groups",
     "a name of `list` for optim.name, or leave optim.groups out"),
    ("evaluate.views=6 task.name=regression", "evaluate.views=6 is of images of classes; the job has task.name=regression",
     "evaluate.views", "task.name=classification, or leave it out"),
    ("framework=numpy model.name=mlp", "framework=numpy does not support model.name=mlp", "model.name",
     "model.name=linear, or framework=torch"),
    ("framework=numpy model.name=linear speed.device=cuda", "framework=numpy does not support speed.device=cuda", "speed.device",
     "speed.device=auto, or framework=torch"),
    ("framework=numpy model.name=linear profile.steps=1:2", "framework=numpy does not support profile.steps=1:2", "profile.steps",
     "profile.steps=null, or framework=torch"),
    ("framework=jax model.name=linear data.resident=true", "framework=jax does not support data.resident=true", "data.resident",
     "data.resident=null, or framework=torch"),
    ("framework=jax model.name=linear shard.stage=3", "framework=jax does not support shard.stage=3", "shard.stage",
     "shard.stage=2, or framework=torch"),
    ("framework=jax model.name=linear shard.stage=1 shard.group=node", "framework=jax does not support shard.group=node", "shard.group",
     "shard.group=all, or framework=torch"),
    ("framework=jax model.name=linear shard.stage=1 shard.offload=optimizer", "framework=jax does not support shard.offload=optimizer",
     "shard.offload", "shard.offload=none, or framework=torch"),
    ("framework=jax model.name=linear parallel.dense=a", "framework=jax does not support parallel.dense=a", "parallel.dense",
     "parallel.dense=none, or framework=torch"),
    ("framework=numpy model.name=linear shard.stage=1", "framework=numpy does not support shard.stage=1", "shard.stage",
     "shard.stage=0, or framework=torch"),
    ("framework=jax model.name=linear optim.name=torch.optim.SGD", "torch.optim.SGD is a torch optimizer, framework=jax needs a rule",
     "optim.name", "framework=torch, or a name of `list`"),
    ("optim.name=torch.optim.Adam optim.lr=0.1", "optim.lr is not an option: the recipe sets the rate of each step", "optim.lr",
     "optim.base_lr=..."),
    ("comm.local_steps=4 log.every_steps=8 evaluate.every_steps=10",
     "comm.local_steps=4 does not divide evaluate.every_steps=10; ranks synchronize at both",
     "comm.local_steps", "evaluate.every_steps=12, or another multiple of 4"),
    ("stop.time=soon", "'soon' is not a length of time", "stop.time",
     "write 90 (seconds), 45m, 3.5h, 2d, 45:00 (minutes), 1:30:00 or 2-00:00:00"),
    ("recipe.schedule=cosine recipe.warmup=10", "a warm-up of 10 epochs leaves nothing of 10 epochs to the schedule",
     "recipe.warmup", "recipe.warmup=10% is a tenth of the job, however short; or epochs=11 or more"),
    ("optim.name=adam optim.beta2=1", "a beta2 of 1.0 makes no running mean", "optim.beta2",
     "give 0 or more and less than 1, as in optim.beta2=0.999"),
]  # fmt: skip

# the same on several ranks: (the configuration, the engine, ranks, ...)
OF_SEVERAL_RANKS = [
    ("parallel.dense=a comm.op=adasum", "horovod", 2, "parallel.dense=a does not support comm.op=adasum", "comm.op",
     "leave comm.op out, or parallel.dense=none"),
    ("parallel.dense=a comm.local_steps=2", "mpi", 2, "parallel.dense=a does not support comm.local_steps=2",
     "comm.local_steps", "leave comm.local_steps out, or parallel.dense=none"),
    ("parallel.dense=a comm.compression=fp16", "mpi", 2, "parallel.dense=a does not support comm.compression=fp16", "comm.compression",
     "leave comm.compression out, or parallel.dense=none"),
    ("parallel.dense=a comm.reduce=ddp", "torchdist", 2, "parallel.dense=a does not support comm.reduce=ddp", "comm.reduce",
     "leave comm.reduce out, or parallel.dense=none"),
    ("parallel.dense=a comm.tune=true", "mpi", 2, "parallel.dense=a does not support comm.tune=true", "comm.tune",
     "leave comm.tune out, or parallel.dense=none"),
    ("parallel.dense=a norm.kind=sync", "mpi", 2, "parallel.dense=a does not support norm.kind=sync", "norm.kind",
     "leave norm.kind out, or parallel.dense=none"),
    ("parallel.dense=a model.recompute=all", "mpi", 2, "parallel.dense=a does not support model.recompute=all", "model.recompute",
     "leave model.recompute out, or parallel.dense=none"),
    ("parallel.dense=a log.noise_scale=true", "mpi", 2, "parallel.dense=a does not support log.noise_scale=true", "log.noise_scale",
     "leave log.noise_scale out, or parallel.dense=none"),
    ("parallel.dense=a speed.compile=default", "mpi", 2, "parallel.dense=a does not support speed.compile=default", "speed.compile",
     "leave speed.compile out, or parallel.dense=none"),
    ("parallel.dense=b shard.stage=1 shard.group=node", "mpi", 2, "parallel.dense=b does not support shard.group=node", "shard.group",
     "leave shard.group out, or parallel.dense=none"),
    ("parallel.dense=b shard.stage=1 shard.offload=optimizer", "mpi", 2, "parallel.dense=b does not support shard.offload=optimizer",
     "shard.offload", "leave shard.offload out, or parallel.dense=none"),
    ("parallel.dense=c shard.stage=3", "mpi", 2, "parallel.dense=c keeps whole convolutions on every rank, which shard.stage=3 cuts",
     "shard.stage", "shard.stage=2, or parallel.dense=none"),
    ("parallel.dense=c parallel.tensor=2", "mpi", 2,
     "parallel.dense=c and parallel.tensor=2 both divide layers: parallel.dense over all ranks", "parallel.dense",
     "keep one of them"),
    ("optim.name=muon servers.count=1", "mpi", 2, "optim.name=muon does not support servers.count=1", "servers.count",
     "leave servers.count out, or optim.name=adamw"),
    ("optim.name=muon parallel.dense=a", "mpi", 2, "optim.name=muon does not support parallel.dense=a", "parallel.dense",
     "leave parallel.dense out, or optim.name=adamw"),
    ("optim.name=muon shard.stage=1 framework=jax model.name=linear", "mpi", 2,
     "optim.name=muon does not support shard.stage=1 in JAX", "shard.stage", "leave shard.stage out, or optim.name=adamw"),
    ("optim.name=muon optim.bf16=true framework=numpy model.name=linear", "mpi", 2, "numpy has no bfloat16", "optim.bf16",
     "leave optim.bf16 out, or framework=torch"),
    ("parallel.dense_updates=2", "mpi", 2, "parallel.dense_updates=2 is of a dense part; this is parallel.dense=none",
     "parallel.dense_updates", "parallel.dense=c, also on one rank; or leave it out"),
    ("parallel.dense=a parallel.dense_updates=2", "mpi", 2, "parallel.dense_updates=2 needs turns; parallel.dense=a has all samples in one",
     "parallel.dense_updates", "parallel.dense=c or b"),
    ("parallel.dense=b parallel.dense_updates=8 batch.size=7", "mpi", 2,
     "batch 7 does not split into the turns of parallel.dense_updates=8: some would have no sample", "parallel.dense_updates",
     "parallel.dense_updates=7 or fewer"),
    ("parallel.dense=c parallel.dense_updates=2 optim.name=torch.optim.SGD", "mpi", 2,
     "parallel.dense_updates=2 updates some of the parameters by themselves; whether torch.optim.SGD counts its steps right is not known",
     "optim.name", "an optimizer of hvdtrain's own: sgd, adam, lars ...; or parallel.dense_updates=1"),
    *((f"parallel.dense=c parallel.dense_updates=2 {word}", "mpi", 2, f"parallel.dense_updates=2 does not support {word.split()[0]}",
       word.partition("=")[0], f"leave {word.partition('=')[0]} out, or parallel.dense_updates=1")
      for word in ("batch.micro=8", "batch.micro=auto", "recipe.gradient_noise=0.01", "data.sampling=partition",
                   "recipe.growth=milestones recipe.grow_at=[1] recipe.grow_to=[512]")),
    ("framework=jax model.name=linear parallel.dense_updates=2", "mpi", 2, "framework=jax does not support parallel.dense_updates=2",
     "parallel.dense_updates", "parallel.dense_updates=1, or framework=torch"),
    ("batch.size=3", "mpi", 4, "batch 3 does not split over 4 ranks: some would have no sample", "batch.size", "4 or more, or fewer ranks"),
    ("recipe.growth=milestones recipe.grow_at=[1] recipe.grow_to=[3]", "mpi", 4,
     "batch 3 does not split over 4 ranks: some would have no sample", "recipe.grow_to", "4 or more, or fewer ranks"),
    ("parallel.sequence=true", "mpi", 2,
     "parallel.sequence=true divides positions over the ranks of a tensor group; this is parallel.tensor=1",
     "parallel.sequence", "parallel.tensor=2, or parallel.sequence=false"),
    ("parallel.tensor=2", "mpi", 3, "parallel.tensor=2 does not divide the 3 ranks of the job", "parallel.tensor",
     "a multiple of 2 ranks, or another parallel.tensor"),
    ("parallel.tensor=2 comm.local_steps=2", "mpi", 2, "parallel.tensor=2 does not support comm.local_steps=2", "comm.local_steps",
     "leave comm.local_steps out, or parallel.tensor=1"),
    ("parallel.tensor=2 norm.kind=sync", "mpi", 4, "parallel.tensor=2 does not support norm.kind=sync", "norm.kind",
     "leave norm.kind out, or parallel.tensor=1"),
    ("parallel.tensor=2 shard.stage=1 shard.group=node", "mpi", 4, "parallel.tensor=2 does not support shard.group=node", "shard.group",
     "leave shard.group out, or parallel.tensor=1"),
    ("parallel.tensor=2 log.noise_scale=true", "mpi", 4, "parallel.tensor=2 does not support log.noise_scale=true", "log.noise_scale",
     "leave log.noise_scale out, or parallel.tensor=1"),
    ("parallel.tensor=2 batch.size=1", "mpi", 4, "batch 1 does not split over 2 ranks: some would have no sample", "batch.size",
     "2 or more, or fewer ranks"),
    ("parallel.pipeline=2 parallel.tensor=2", "mpi", 6, "parallel.pipeline=2 x parallel.tensor=2 does not divide the 6 ranks of the job",
     "parallel.tensor", "a multiple of 4 ranks, or another parallel.tensor"),
    ("parallel.pipeline=2 speed.compile=default", "mpi", 2, "parallel.pipeline=2 does not support speed.compile=default", "speed.compile",
     "leave speed.compile out, or parallel.pipeline=1"),
    ("servers.count=1", "horovod", 2, "servers.count=1 sends from one rank to another, which the horovod engine does not", "comm.engine",
     "comm.engine=mpi with the same mpirun, or comm.engine=torchdist"),
    ("servers.count=3", "mpi", 3, "servers.count=3 leaves no worker: the job has 3 ranks", "servers.count",
     "4 ranks or more, or fewer servers"),
    ("servers.count=1 comm.local_steps=2", "mpi", 2, "servers.count=1 does not support comm.local_steps=2", "comm.local_steps",
     "leave comm.local_steps out, or servers.count=0"),
    ("guard.lost=shrink servers.count=1", "torchdist", 2,
     "guard.lost=shrink does not go on with servers.count=1 on the torchdist engine", "guard.lost",
     "comm.engine=mpi (mpirun --with-ft ulfm), or guard.lost=stop"),
    ("guard.lost=restart servers.count=1", "torchdist", 2,
     "guard.lost=restart does not go on with servers.count=1 on the torchdist engine", "guard.lost",
     "comm.engine=mpi (mpirun --with-ft ulfm), or guard.lost=stop"),
    ("servers.count=1 shard.stage=1", "mpi", 2, "servers.count=1 does not support shard.stage=1", "shard.stage",
     "leave shard.stage out, or servers.count=0"),
    ("servers.count=1 parallel.tensor=2", "mpi", 4, "servers.count=1 does not support parallel.tensor=2", "parallel.tensor",
     "leave parallel.tensor out, or servers.count=0"),
    ("servers.count=1 optim.name=torch.optim.SGD", "mpi", 2,
     "servers.count=1 does not support optim.name=torch.optim.SGD: servers apply rules to ranges of the weights", "optim.name",
     "optim.name=sgd, adamw or another rule of hvdtrain"),
    ("servers.count=1 servers.log=true", "mpi", 2, "servers.log=true is of asynchronous updates; with servers.bound=0 there are none",
     "servers.log", "servers.bound=4 or none, or leave servers.log out"),
    ("servers.bound=4", "mpi", 2, "servers.bound=4 is of parameter servers; this is servers.count=0", "servers.bound",
     "servers.count=1, or leave servers.bound out"),
    ("servers.count=1 servers.bound=4 servers.log=true log.every_steps=70000", "mpi", 2,
     "servers.log needs a sync point every 65535 steps or less, this is log.every_steps=70000", "log.every_steps", "log.every_steps=65535"),
    ("servers.count=1 servers.bound=4 servers.log=true guard.nonfinite=rollback", "mpi", 2,
     "servers.log has updates alone, and guard.nonfinite=rollback puts older weights in their place", "guard.nonfinite",
     "guard.nonfinite=skip or stop, or servers.log=false"),
    ("parallel.pipeline=2", "horovod", 2, "parallel.pipeline=2 sends from one rank to another, which the horovod engine does not",
     "comm.engine", "comm.engine=mpi with the same mpirun, or comm.engine=torchdist"),
    ("parallel.schedule=gpipe", "mpi", 2, "parallel.schedule=gpipe is of a pipeline; this is parallel.pipeline=1", "parallel.schedule",
     "parallel.pipeline=2, or leave parallel.schedule out"),
    ("parallel.balance=3,2", "mpi", 2, "parallel.balance=[3, 2] is of a pipeline; this is parallel.pipeline=1", "parallel.balance",
     "parallel.pipeline=2, or leave parallel.balance out"),
    ("parallel.pipeline=2 parallel.balance=3", "mpi", 2, "parallel.balance=[3] has 1 stage, the pipeline has 2",
     "parallel.balance", "2 numbers of units: hvdtrain plan --pipeline shows them"),
    ("parallel.pipeline=2 parallel.balance=3,2,1", "mpi", 2, "parallel.balance=[3, 2, 1] has 3 stages, the pipeline has 2",
     "parallel.balance", "2 numbers of units: hvdtrain plan --pipeline shows them"),
    ("parallel.pipeline=2 parallel.virtual=2", "mpi", 2, "parallel.schedule=1f1b has one stage on each rank, parallel.virtual=2 wants more",
     "parallel.virtual", "parallel.schedule=interleaved, or leave parallel.virtual out"),
    ("parallel.pipeline=2 parallel.schedule=interleaved parallel.virtual=1", "mpi", 2,
     "parallel.schedule=interleaved with parallel.virtual=1 has one stage on each rank, which is 1f1b",
     "parallel.virtual", "parallel.virtual=2, or parallel.schedule=1f1b"),
    ("parallel.pipeline=2 parallel.schedule=zero_bubble model.recompute=all", "mpi", 2,
     "zero_bubble goes back through each stage twice, and would compute its blocks twice: model.recompute=all", "model.recompute",
     "parallel.schedule=1f1b, or model.recompute=none"),
    ("parallel.pipeline=2 parallel.micro_batches=4 batch.micro=8", "mpi", 2,
     "parallel.micro_batches=4 and batch.micro=8 both say how many micro-batches a step has", "batch.micro",
     "leave one of them out"),
    ("parallel.pipeline=2 batch.micro=auto", "mpi", 2, "parallel.pipeline=2 does not support batch.micro=auto", "batch.micro",
     "leave batch.micro out, or parallel.pipeline=1"),
    ("parallel.pipeline=2 shard.stage=3", "mpi", 2, "parallel.pipeline=2 does not support shard.stage=3: no rank has the whole model",
     "shard.stage", "shard.stage=1 or 2; or parallel.pipeline=1"),
    ("parallel.pipeline=2 task.name=language data.name=image_tokens model.name=gpt log.samples=4", "mpi", 2,
     "parallel.pipeline=2 does not support log.samples=4: no rank has the whole model",
     "log.samples", "log.samples=0, and draw from its checkpoints: hvdtrain sample RUN; or parallel.pipeline=1"),
    ("framework=jax model.name=linear parallel.pipeline=2", "mpi", 2, "framework=jax does not support parallel.pipeline=2",
     "parallel.pipeline", "parallel.pipeline=1, or framework=torch"),
    ("framework=jax model.name=linear parallel.tensor=2", "mpi", 2, "framework=jax does not support parallel.tensor=2", "parallel.tensor",
     "parallel.tensor=1, or framework=torch"),
    ("comm.engine=single", "single", 2, "comm.engine=single is for one process; the job has 2 ranks", "comm.engine", "comm.engine=auto"),
    ("shard.stage=1 comm.op=adasum", "horovod", 2, "shard.stage=1 does not support comm.op=adasum", "comm.op",
     "leave comm.op out, or shard.stage=0"),
    ("shard.stage=1 comm.reduce=ddp", "torchdist", 2, "shard.stage=1 does not support comm.reduce=ddp", "comm.reduce",
     "leave comm.reduce out, or shard.stage=0"),
    ("shard.stage=3", "horovod", 2, "shard.stage=3 runs on torch's process groups, which the horovod engine does not make", "comm.engine",
     "comm.engine=mpi with the same mpirun, or shard.stage=2"),
    ("shard.stage=3 log.noise_scale=true", "mpi", 2, "log.noise_scale reads each rank's own gradients, which shard.stage=3 does not keep",
     "log.noise_scale", "shard.stage=1, or log.noise_scale=false"),
    ("shard.stage=2 log.noise_scale=true batch.size=64 batch.micro=8", "mpi", 2,
     "log.noise_scale reads each rank's own gradients of several micro-batches, which shard.stage=2 does not keep",
     "log.noise_scale", "shard.stage=1, or log.noise_scale=false"),
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
        *(
            "comm.compression=fp16",
            "comm.local_steps=10",
            "comm.device_memory=host",
            "comm.tune=true",
            "comm.reduce=bucket",
            "norm.kind=ghost",
        ),
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
        ("comm.local_steps=5 comm.local_from=50% comm.reduce=bucket", "mpi", 2),
        ("framework=numpy model.name=linear speed.precision=auto", "mpi", 2),
        ("log.noise_scale=true", "mpi", 2),
        ("comm.tune=true", "mpi", 64),
        ("comm.device_memory=host", "mpi", 2),
        ("norm.kind=sync batch.size=64 batch.micro=32", "mpi", 2),
        ("shard.stage=2 log.noise_scale=true", "mpi", 2),
        ("framework=jax model.name=mlp shard.stage=2 log.noise_scale=true", "horovod", 3),
        ("shard.stage=3 shard.group=node shard.reshard=false shard.offload=parameters", "torchdist", 4),
    ],
)
def test_what_goes_together_is_not_refused(words: str, engine: str, ranks: int) -> None:
    refuse_conflicts(configure(None, words.split()), engine, ranks)


def test_the_commands_of_the_page_of_meshes_are_not_refused() -> None:
    text = (ROOT / "docs" / "parallel.md").read_text()
    commands = re.findall(r"^(?:\$ )?(?:mpirun -np (\d+) )?hvdtrain (?:plan )?[^\n]*--config (configs/\S+) ([^\n]+)$", text, re.MULTILINE)
    assert len(commands) == 4, commands
    for ranks, path, words in commands:
        config = configure(ROOT / path, words.split())
        refuse_on_every_engine(config, int(ranks or config.parallel.ranks))


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
