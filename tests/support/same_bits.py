"""Ten jobs at fixed seeds: the sha256 of their weights and the losses of every step and epoch, to compare two checkouts to the last bit.

python tests/support/same_bits.py OUT.json [--old-keys]             runs the jobs with the checkout that this file lies in
python tests/support/same_bits.py --compare BEFORE.json AFTER.json  prints a table; exit status 1 where anything differs

OUT.json: {job: {"weights": sha256, "losses": [[kind, step, number, ...], ...]}}. Both files must come from one machine with the same
versions of torch, JAX and MPI: others may round otherwise. --old-keys is for a checkout from before keys were renamed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.numpy
from ranks import ROOT, mpirun, python

OLD_KEYS = {
    "recipe.warmup=": "recipe.warmup_epochs=",
    "framework=": "frame=",
    "comm.local_steps=": "comm.every=",
    "comm.compression=": "comm.wire=",
    "log.trackers=": "log.sinks=",
}
KINDS = {  # of events, and what a row has of each; no times
    "step": ["loss", "accuracy", "lr", "batch", "noise_scale"],
    "epoch": ["train_loss", "train_accuracy", "val_loss", "val_accuracy", "val_count", "best_accuracy", "lr", "batch", "noise_scale"],
}

# 31 splits neither over 2 ranks nor over 3, and 157 not into steps of 31: shares are uneven, and steps reach over the ends of epochs.
SYNTHETIC = "data.name=synthetic data.samples=157 data.val_samples=61 data.classes=5 data.shape=[8,8,3] batch.size=31 epochs=3"
DIGITS = "data.name=digits batch.size=96 epochs=2"
GROWTH = "recipe.growth=milestones recipe.grow_at=[1.2,2.3] recipe.grow_to=[62,93]"
RESNET = f"{SYNTHETIC} model.name=wide_resnet model.widths=[4,4,8,8] log.every_steps=3 optim.base_lr=0.05"
MLP = f"{SYNTHETIC} model.name=mlp model.widths=[24,16] log.every_steps=3 optim.base_lr=0.05"


class Job(NamedTuple):
    """What is trained, and on how many ranks: 1 is a process without mpirun."""

    options: str
    ranks: int = 2
    stop: int = 0  # where not 0 the job is stopped after so many steps, and resumed
    resume_ranks: int = 0


JOBS = {
    "single torch: ghost norm, batch growth, dropout, nesterov, warm-up": Job(
        f"{RESNET} comm.engine=single framework=torch norm.kind=ghost norm.ghost=5 model.dropout=0.2 {GROWTH} optim.nesterov=true "
        "optim.weight_decay=1e-3 recipe.warmup=0.7 recipe.schedule=cosine",
        ranks=1,
    ),
    "mpi torch: LARS, clipping, noises, augmentation, micro-batches, noise scale": Job(
        f"{RESNET} comm.engine=mpi framework=torch optim.name=lars optim.trust=0.1 optim.weight_decay=1e-3 optim.base_batch=24 "
        "optim.clip_norm=1 optim.clip_value=0.5 recipe.sample_noise=0.5 recipe.gradient_noise=0.01 "
        "augment.crop=2 augment.flip=true augment.cutout=3 augment.mixup=0.3 batch.micro=5 log.noise_scale=true comm.bucket_mb=0.001"
    ),
    "mpi jax: adam, batch growth, steps of the rate": Job(
        f"{MLP} comm.engine=mpi framework=jax optim.name=adam optim.base_lr=0.003 {GROWTH} recipe.schedule=steps recipe.milestones=[1.5] "
        "recipe.gamma=0.3 optim.clip_norm=2"
    ),
    "mpi numpy: LAMB, label smoothing, sample noise, batch growth, fp64": Job(
        f"{SYNTHETIC} comm.engine=mpi framework=numpy model.name=linear speed.precision=fp64 optim.name=lamb optim.weight_decay=1e-2 "
        f"model.label_smoothing=0.1 optim.base_batch=24 recipe.sample_noise=0.5 {GROWTH} log.every_steps=2"
    ),
    "mpi torch: sync norm, novograd, classifier_std": Job(
        f"{RESNET} comm.engine=mpi framework=torch norm.kind=sync optim.name=novograd optim.base_lr=0.01 model.classifier_std=0.01"
    ),
    "mpi torch: local steps, larc, resized crop": Job(
        f"{MLP} comm.engine=mpi framework=torch comm.local_steps=3 optim.name=larc augment.resized_crop=0.5"
    ),
    "horovod torch: hvd.DistributedOptimizer, partition, batch growth, tensorboard": Job(
        f"{RESNET} comm.engine=horovod framework=torch data.sampling=partition {GROWTH} log.trackers=[tensorboard] log.step_times=true"
    ),
    "horovod torch: fp16 compression, adamw, digits": Job(
        f"{DIGITS} model.name=convnet comm.engine=horovod framework=torch comm.compression=fp16 optim.name=adamw optim.base_lr=0.003"
    ),
    "torchdist torch: DDP, bf16, ghost norm one update by each, torch.optim.RMSprop": Job(
        f"{RESNET} comm.engine=torchdist comm.reduce=ddp framework=torch speed.precision=bf16 norm.kind=ghost norm.ghost=5 "
        "norm.statistics=sequential optim.name=torch.optim.RMSprop optim.base_lr=0.001 optim.momentum=0.9"
    ),
    "mpi torch: stopped on 2 ranks, resumed on 3, fp16, digits": Job(
        f"{DIGITS} model.name=mlp comm.engine=mpi framework=torch speed.precision=fp16 log.every_steps=5", stop=17, resume_ranks=3
    ),
}


def run(job: Job, folder: Path, old_keys: bool) -> dict[str, Any]:
    """Trains a job to its end; its weights and losses."""
    words = f"{job.options} run={folder}".split()
    start(job.ranks, [*words, f"max_steps={job.stop}"] if job.stop else words, old_keys)
    if job.stop:
        start(job.resume_ranks, words, old_keys)
    return {"weights": weights(sorted((folder / "checkpoints").glob("step-*"))[-1]), "losses": losses(folder / "events.jsonl")}


def start(ranks: int, words: list[str], old_keys: bool) -> None:
    """Trains until the ranks have ended; the script ends here where they failed."""
    for new, old in OLD_KEYS.items() if old_keys else ():
        words = [old + word.removeprefix(new) if word.startswith(new) else word for word in words]
    argv = ["-m", "hvdtrain", *words]
    result = mpirun(ranks, argv, timeout_s=120) if ranks > 1 else python(argv, timeout_s=120)
    if result.returncode:
        sys.exit(f"exit status {result.returncode} on {ranks} ranks: {' '.join(words)}\n{result.stdout}\n{result.stderr}")


def weights(checkpoint: Path) -> str:
    """The sha256 of all arrays of a checkpoint, optimizer state too: name, type, shape and bytes of each, by name."""
    arrays = {name: array for file in checkpoint.glob("*.safetensors") for name, array in safetensors.numpy.load_file(file).items()}
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode() + array.tobytes())
    return digest.hexdigest()


def losses(events: Path) -> list[list[Any]]:
    """A row for each event of kind step and epoch, without its times. JSON keeps every bit of a float."""
    rows = [json.loads(line) for line in events.read_text().splitlines()]
    return [[e["kind"], e["step"], *(e.get(name) for name in KINDS[e["kind"]])] for e in rows if e["kind"] in KINDS]


def run_all(old_keys: bool) -> dict[str, dict[str, Any]]:
    """Every job, one after the other, in a folder that is removed."""
    left = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, job) in enumerate(JOBS.items()):
            left[name] = run(job, Path(folder) / f"job-{number}", old_keys)
            print(f"{left[name]['weights'][:12]}  {len(left[name]['losses']):3} rows  {name}", flush=True)
    return left


def compare(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> bool:
    """Prints a table, in each row the first row of losses that is not the same; are both files the same?"""
    print("| job | weights before | weights after | rows before, after | |\n|---|---|---|---|---|")
    nothing: dict[str, Any] = {"weights": "-", "losses": []}
    for name in dict.fromkeys([*before, *after]):
        a, b = before.get(name, nothing), after.get(name, nothing)
        rows = [*zip_longest(a["losses"], b["losses"])]
        result = "same" if a == b else next((f"DIFFER: {row} -> {other}" for row, other in rows if row != other), "WEIGHTS DIFFER")
        print(f"| {name} | {a['weights'][:12]} | {b['weights'][:12]} | {len(a['losses'])}, {len(b['losses'])} | {result} |")
    return before == after


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="JSON")
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--old-keys", action="store_true", help=f"write {' '.join(OLD_KEYS.values())}")
    args = parser.parse_args()
    if len(args.files) != 1 + args.compare:
        parser.error("one file to write, or with --compare two to read")
    if args.compare:
        return 0 if compare(*(json.loads(file.read_text()) for file in args.files)) else 1
    print(f"checkout {ROOT}")
    args.files[0].write_text(json.dumps(run_all(args.old_keys), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
