"""Jobs at fixed seeds: the sha256 of their weights and the losses of every step and epoch, to compare two checkouts to the last bit.

python tests/support/same_bits.py OUT.json             runs the jobs with the checkout that this file lies in
python tests/support/same_bits.py --compare BEFORE.json AFTER.json  prints a table; exit status 1 where anything differs

OUT.json: {job: {"weights": sha256, "losses": [[kind, step, number, ...], ...]}}. Both files must come from one machine with the same
versions of torch, JAX and MPI: others may round otherwise.
"""  # noqa: E501

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import lost_ranks
import safetensors.numpy
from pool import alone
from ranks import ROOT, mpirun, python

KINDS = {  # of events, and what a row has of each; no times
    "step": ["loss", "accuracy", "lr", "batch", "noise_scale"],
    "epoch": [
        "train_loss",
        "train_accuracy",
        "val_loss",
        "val_accuracy",
        "val_count",
        "best_accuracy",
        "lr",
        "batch",
        "noise_scale",
    ],
}

# 31 splits neither over 2 ranks nor over 3, and 157 not into steps of 31: shares are uneven, and
# steps reach over the ends of epochs.
SYNTHETIC = (
    "data.name=synthetic data.samples=157 data.val_samples=61 data.classes=5 data.shape=[8,8,3] "
    "batch.size=31 epochs=3"
)
DIGITS = "data.name=digits batch.size=96 epochs=2"
GROWTH = "recipe.growth=milestones recipe.grow_at=[1.2,2.3] recipe.grow_to=[62,93]"
RESNET = (
    f"{SYNTHETIC} model.name=wide_resnet model.widths=[4,4,8,8] log.every_steps=3 "
    "optim.base_lr=0.05"
)
GPT = (
    "task.name=language data.name=image_tokens data.colours=16 model.name=gpt model.layers=4 "
    "model.heads=2 model.width=8 batch.size=16 "
)
GPT += (
    "data.source=synthetic data.source_options={'shape':[4,4,1],'samples':61,'val_samples':23} "
    "epochs=2 log.every_steps=2 "
)
GPT += "comm.engine=mpi framework=torch"
DENSE = (
    f"{SYNTHETIC} model.name=convnet model.widths=[3,4] model.dense=[7] model.norm=false "
    "comm.engine=mpi framework=torch log.every_steps=3"
)
MLP = f"{SYNTHETIC} model.name=mlp model.widths=[24,16] log.every_steps=3 optim.base_lr=0.05"


class Job(NamedTuple):
    """What is trained, and on how many ranks: 1 is a process without mpirun."""

    options: str
    ranks: int = 2
    stop: int = 0  # if not 0, the job is stopped after so many steps and resumed
    resume_ranks: int = 0
    kill: str = ""  # a plan of killed_ranks.py; the other ranks continue
    is_own_loop: bool = False  # own_loop_on_ranks.py, instead of hvdtrain's loop


JOBS = {
    "single torch: ghost norm, batch growth, dropout, nesterov, warm-up": Job(
        f"{RESNET} comm.engine=single framework=torch norm.kind=ghost norm.ghost=5 "
        f"model.dropout=0.2 {GROWTH} optim.nesterov=true "
        "optim.weight_decay=1e-3 recipe.warmup=0.7 recipe.schedule=cosine",
        ranks=1,
    ),
    "mpi torch: LARS, clipping, noises, augmentation, micro-batches, noise scale": Job(
        f"{RESNET} comm.engine=mpi framework=torch optim.name=lars optim.trust=0.1 "
        "optim.weight_decay=1e-3 optim.base_batch=24 "
        "optim.clip_norm=1 optim.clip_value=0.5 recipe.sample_noise=0.5 recipe.gradient_noise=0.01 "
        "augment.crop=2 augment.flip=true augment.cutout=3 augment.mixup=0.3 batch.micro=5 "
        "log.noise_scale=true comm.bucket_mb=0.001"
    ),
    "mpi jax: adam, batch growth, steps of the rate": Job(
        f"{MLP} comm.engine=mpi framework=jax optim.name=adam optim.base_lr=0.003 {GROWTH} "
        "recipe.schedule=steps recipe.milestones=[1.5] "
        "recipe.gamma=0.3 optim.clip_norm=2"
    ),
    "mpi numpy: LAMB, label smoothing, sample noise, batch growth, fp64": Job(
        f"{SYNTHETIC} comm.engine=mpi framework=numpy model.name=linear speed.precision=fp64 "
        "optim.name=lamb optim.weight_decay=1e-2 "
        f"model.label_smoothing=0.1 optim.base_batch=24 recipe.sample_noise=0.5 {GROWTH} "
        "log.every_steps=2"
    ),
    "mpi torch: sync norm, novograd, classifier_std": Job(
        f"{RESNET} comm.engine=mpi framework=torch norm.kind=sync optim.name=novograd "
        "optim.base_lr=0.01 model.classifier_std=0.01"
    ),
    "mpi torch: local steps, larc, resized crop": Job(
        f"{MLP} comm.engine=mpi framework=torch comm.local_steps=3 optim.name=larc "
        "augment.resized_crop=0.5"
    ),
    "horovod torch: hvd.DistributedOptimizer, partition, batch growth, tensorboard": Job(
        f"{RESNET} comm.engine=horovod framework=torch data.sampling=partition {GROWTH} "
        "log.trackers=[tensorboard] log.step_times=true"
    ),
    "horovod torch: fp16 compression, adamw, digits": Job(
        f"{DIGITS} model.name=convnet comm.engine=horovod framework=torch comm.compression=fp16 "
        "optim.name=adamw optim.base_lr=0.003"
    ),
    "torchdist torch: DDP, bf16, ghost norm one update by each, torch.optim.RMSprop": Job(
        f"{RESNET} comm.engine=torchdist comm.reduce=ddp framework=torch speed.precision=bf16 "
        "norm.kind=ghost norm.ghost=5 "
        "norm.statistics=sequential optim.name=torch.optim.RMSprop optim.base_lr=0.001 "
        "optim.momentum=0.9"
    ),
    "mpi torch: stopped on 2 ranks, resumed on 3, fp16, digits": Job(
        f"{DIGITS} model.name=mlp comm.engine=mpi framework=torch speed.precision=fp16 "
        "log.every_steps=5",
        stop=17,
        resume_ranks=3,
    ),
    "mpi torch: stage 1, adamw, EMA, noise scale, growth": Job(
        f"{MLP} comm.engine=mpi framework=torch shard.stage=1 optim.name=adamw "
        "optim.base_lr=0.003 optim.ema=0.9 log.noise_scale=true "
        f"{GROWTH}"
    ),
    "mpi torch: EMA and noise scale with buckets, on 3 ranks": Job(
        f"{RESNET} comm.engine=mpi framework=torch optim.ema=0.9 log.noise_scale=true "
        "comm.bucket_mb=0.001",
        ranks=3,
    ),
    "mpi torch: stage 2, lamb, clipping, micro-batches, resumed on 3 with stage 0": Job(
        f"{MLP} comm.engine=mpi framework=torch shard.stage=2 optim.name=lamb optim.clip_norm=1 "
        "batch.micro=5",
        stop=8,
        resume_ranks=3,
    ),
    "mpi torch: stage 3, momentum, gradient noise": Job(
        f"{MLP} comm.engine=mpi framework=torch shard.stage=3 optim.momentum=0.9 "
        "recipe.gradient_noise=0.01 optim.clip_norm=1"
    ),
    "torchdist torch: stage 3, bf16, adam": Job(
        f"{RESNET} comm.engine=torchdist framework=torch shard.stage=3 speed.precision=bf16 "
        "optim.name=adam optim.base_lr=0.003"
    ),
    "mpi jax: stage 2, adam": Job(
        f"{MLP} comm.engine=mpi framework=jax shard.stage=2 optim.name=adam optim.base_lr=0.003"
    ),
    "mpi torch: tensor x data, dropout": Job(
        f"{MLP} comm.engine=mpi framework=torch parallel.tensor=2 model.dropout=0.2 "
        "optim.momentum=0.9",
        ranks=4,
    ),
    "mpi torch: image gpt, tensor, sequence": Job(
        f"{GPT} parallel.tensor=2 parallel.sequence=true"
    ),
    "mpi torch: pipeline, 1f1b, adam": Job(
        f"{MLP} comm.engine=mpi framework=torch parallel.pipeline=2 optim.name=adam "
        "optim.base_lr=0.003 batch.micro=8"
    ),
    "mpi torch: image gpt, pipeline of 2 x stage 1, recomputed": Job(
        f"{GPT} parallel.pipeline=2 shard.stage=1 model.recompute=all optim.name=adam "
        "optim.base_lr=0.003",
        ranks=4,
    ),
    "mpi torch: dense scheme b, one update": Job(
        f"{DENSE} parallel.dense=b optim.momentum=0.9 optim.clip_norm=1"
    ),
    "mpi torch: dense scheme c, two updates": Job(
        f"{DENSE} parallel.dense=c parallel.dense_updates=2 optim.name=adam optim.base_lr=0.003"
    ),
    "mpi torch: a server and a worker, damped": Job(
        f"{MLP} comm.engine=mpi framework=torch servers.count=1 servers.bound=2 "
        "servers.correct=scale optim.name=lamb comm.bucket_mb=0.004"
    ),
    "mpi torch: two servers and a worker, synchronous": Job(
        f"{MLP} comm.engine=mpi framework=torch servers.count=2 servers.bound=0 "
        "optim.momentum=0.9 comm.bucket_mb=0.004",
        ranks=3,
    ),
    "mpi torch: local steps with EMA, resumed on 3": Job(
        f"{MLP} comm.engine=mpi framework=torch comm.local_steps=3 optim.ema=0.9",
        stop=9,
        resume_ranks=3,
    ),
    "mpi torch: shrinks to 2 ranks": Job(
        f"{MLP} comm.engine=mpi framework=torch guard.lost=shrink optim.momentum=0.9 "
        "log.every_steps=2",
        ranks=3,
        kill="1 learner.py:step 5",
    ),
    "torchdist numpy: shrinks to 1 rank": Job(
        f"{SYNTHETIC} framework=numpy model.name=linear guard.lost=shrink comm.engine=torchdist "
        "log.every_steps=2",
        kill="1 accumulate 9",
    ),
    "mpi torch: a loop of one's own": Job(
        "comm.engine=mpi log.every_steps=1", ranks=3, is_own_loop=True
    ),
    "torchdist torch: a loop of one's own, stage 2": Job(
        "comm.engine=torchdist shard.stage=2 log.every_steps=1", is_own_loop=True
    ),
}


def run(job: Job, folder: Path) -> dict[str, Any]:
    """Trains a job to its end; its weights and losses."""
    words = f"{job.options} run={folder}".split()
    start(job, job.ranks, [*words, f"max_steps={job.stop}"] if job.stop else words)
    if job.stop:
        start(job, job.resume_ranks, words)
    return {
        "weights": weights(sorted((folder / "checkpoints").glob("step-*"))[-1]),
        "losses": losses(folder / "events.jsonl"),
    }


def start(job: Job, ranks: int, words: list[str]) -> None:
    """Trains until the ranks have ended; exits the script if they failed."""
    if job.kill:
        engine = next(
            word.removeprefix("comm.engine=") for word in words if word.startswith("comm.engine=")
        )
        results = lost_ranks.finish(engine, ranks, [lost_ranks.KILLED_RANKS, job.kill, *words])
        has_failed = any("done (" in result.stdout for result in results) is False
    else:
        with tempfile.NamedTemporaryFile() as out:
            argv = (
                alone("own_loop_on_ranks:main", out.name, *words)
                if job.is_own_loop
                else ["-m", "hvdtrain", *words]
            )
            results = [mpirun(ranks, argv, env=lost_ranks.ENV) if ranks > 1 else python(argv)]
        has_failed = any(result.returncode for result in results)
    if has_failed:
        sys.exit(
            f"failed on {ranks} ranks: {' '.join(words)}\n"
            + "\n".join(
                f"{result.returncode} {result.stdout}\n{result.stderr}" for result in results
            )
        )


def weights(checkpoint: Path) -> str:
    """The sha256 of all arrays of a checkpoint, optimizer state too: name, type, shape and bytes of
    each, by name."""
    arrays = {
        name: array
        for file in checkpoint.glob("*.safetensors")
        for name, array in safetensors.numpy.load_file(file).items()
    }
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode() + array.tobytes())
    return digest.hexdigest()


def losses(events: Path) -> list[list[Any]]:
    """A row for each event of kind step and epoch, without its times. JSON keeps every bit of a
    float."""
    rows = [json.loads(line) for line in events.read_text().splitlines()]
    return [
        [e["kind"], e["step"], *(e.get(name) for name in KINDS[e["kind"]])]
        for e in rows
        if e["kind"] in KINDS
    ]


def run_all(only: str = "") -> dict[str, dict[str, Any]]:
    """Every job, one after the other, in a folder that is removed."""
    left = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, job) in enumerate(JOBS.items()):
            if only not in name:
                continue
            left[name] = run(job, Path(folder) / f"job-{number}")
            print(
                f"{left[name]['weights'][:12]}  {len(left[name]['losses']):3} rows  {name}",
                flush=True,
            )
    return left


def compare(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> bool:
    """Prints a table, in each row the first row of losses that is not the same; are both files the
    same?"""
    print("| job | weights before | weights after | rows before, after | |\n|---|---|---|---|---|")
    nothing: dict[str, Any] = {"weights": "-", "losses": []}
    for name in dict.fromkeys([*before, *after]):
        a = before.get(name, nothing)
        b = after.get(name, nothing)
        rows = [*zip_longest(a["losses"], b["losses"])]
        result = (
            "same"
            if a == b
            else next(
                (f"DIFFER: {row} -> {other}" for row, other in rows if row != other),
                "WEIGHTS DIFFER",
            )
        )
        print(
            f"| {name} | {a['weights'][:12]} | {b['weights'][:12]} | {len(a['losses'])}, "
            f"{len(b['losses'])} | {result} |"
        )
    return before == after


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="JSON")
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--only", default="", help="jobs whose name has these words")
    args = parser.parse_args()
    if len(args.files) != 1 + args.compare:
        parser.error("one file to write, or with --compare two to read")
    if args.compare:
        return 0 if compare(*(json.loads(file.read_text()) for file in args.files)) else 1
    print(f"checkout {ROOT}")
    args.files[0].write_text(json.dumps(run_all(args.only), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
