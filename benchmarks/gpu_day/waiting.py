"""What the host does beside its GPU: waits of the steps, digests, memory during a checkpoint; and
what two GPUs do together, where there are two: pipelines, and buckets of gradients."""

from __future__ import annotations

import json
from typing import Any

from gpu_day.part import Failed, Part

EXACT = 1e-9  # largest relative difference of losses in float64 that differ by rounding alone
OBJECTS = "benchmarks.gpu_day.user_objects"
STEPS = "batch.size={} stop.steps={} log.every_steps=4 recipe.warmup=0 log.samples=0"
TOKENS = "task.name=language data.name=image_tokens data.source=digits model.name=gpt"
IMAGES = "data.name=synthetic data.shape=[32,32,3] data.classes=10"
MASKS = f"task.name=segmentation data.name={OBJECTS}:masks model.name=unet"
MODELS = {
    "linear": f"{IMAGES} model.name=linear",
    "mlp": f"{IMAGES} model.name=mlp model.widths=[512,512]",
    "convnet, synchronized norms": f"{IMAGES} model.name=convnet norm.kind=sync",
    "wide_resnet": f"{IMAGES} model.name=wide_resnet model.widths=[16,64,128,256]",
    "resnet18, augmented": f"{IMAGES} model.name=resnet18 augment.crop=4 augment.flip=true "
    "augment.cutmix=1.0",
    "gpt": f"{TOKENS} model.layers=4 model.width=256 model.heads=4 optim.name=adamw",
    "unet": f"{MASKS} data.side=64",
}
SMALL = {
    "mlp": "data.name=synthetic data.shape=[4,4,1] model.name=mlp model.widths=[8,8]",
    "unet": f"{MASKS} data.samples=16 data.val_samples=4 data.side=16 model.widths=[2,4]",
}
SMALL_GPT = "model.layers=2 model.width=16 model.heads=2"
LARGE_GPT = "model.layers=24 model.width=1024 model.heads=16"
SCHEDULES = ("gpipe", "1f1b", "zero_bubble")
BUCKETS_MB = (1, 4, 25, 100)
TWO = 2  # GPUs


def waits(part: Part) -> str:
    """Steps of each model under torch.cuda.set_sync_debug_mode("error"), between sync points."""
    models = SMALL if part.quick else MODELS
    found = _steps(part, {name: f"{words} {_few(part, 32)}" for name, words in models.items()})
    for name, each in found.items():
        part.row(model=name, **each)
    if waiting := {name: each["waited"] for name, each in found.items() if each["waited"]}:
        raise Failed(f"the host waits in steps of {waiting}")
    how = "without a wait" if part.device.is_gpu else "on a CPU, which nobody waits for"
    return f"{len(found)} models {how}"


def segmentation(part: Part) -> str:
    """A U-Net: images/s in each precision."""
    words = f"{SMALL['unet']} {_few(part, 4)}" if part.quick else f"{MASKS} {_few(part, 32)}"
    types = ("fp32",) if part.quick else ("fp32", "bf16")
    found = _steps(part, {name: f"{words} speed.precision={name}" for name in types})
    for name, each in found.items():
        part.row(precision=name, data="synthetic", **each)
        if each["waited"]:
            raise Failed(f"the host waits in a step: {each['waited']}")
    return ", ".join(
        f"{name} {each['samples_per_s']:,.0f} images/s" for name, each in found.items()
    )


def pipelines(part: Part) -> str:
    """Two stages on two GPUs: the losses of one, and the time of each schedule beside it."""
    if missing := _needs_two(part):
        return missing
    exact = f"{TOKENS} {SMALL_GPT} optim.name=sgd optim.base_lr=0.05 speed.precision=fp64"
    large = f"{TOKENS} {LARGE_GPT} optim.name=adamw speed.precision=auto"
    jobs = {"exact": f"{exact} {_few(part, 12)}"}
    if not part.quick:
        jobs["large"] = f"{large} {_few(part, 32)}"
    one = _steps(part, jobs)
    schedules = SCHEDULES[1:2] if part.quick else SCHEDULES
    on_two = "parallel.pipeline=2 comm.engine=torchdist"
    found = _steps(
        part,
        {
            f"{name}, {schedule}": f"{words} {on_two} parallel.schedule={schedule}"
            for name, words in jobs.items()
            for schedule in schedules
        },
        ranks=TWO,
    )
    shown = []
    for name, each in found.items():
        job, _, schedule = name.partition(", ")
        part.row(job=job, schedule=schedule, one_gpu_ms=one[job]["ms_per_step"], **each)
        if job == "exact":
            _check_losses(each["losses"], one[job]["losses"], name)
        if job == "large" or part.quick:
            ratio = one[job]["ms_per_step"] / each["ms_per_step"]
            shown.append(f"{schedule} x {ratio:.2f} of one GPU")
    return f"the losses of one GPU; {', '.join(shown)}"


def buckets(part: Part) -> str:
    """Data parallelism on two GPUs: the time of a step with buckets of each size."""
    if missing := _needs_two(part):
        return missing
    model = SMALL["mlp"] if part.quick else f"{TOKENS} {LARGE_GPT} optim.name=adamw"
    words = f"{model} {_few(part, 32)} comm.engine=torchdist"
    sizes = BUCKETS_MB[:2] if part.quick else BUCKETS_MB
    jobs = {"default": words}
    jobs |= {f"{size} MB": f"{words} comm.bucket_mb={size}" for size in sizes}
    found = _steps(part, jobs, ranks=TWO)
    for name, each in found.items():
        part.row(bucket=name, **each)
    return ", ".join(f"{name} {each['ms_per_step']:.1f} ms" for name, each in found.items())


def digests(part: Part) -> str:
    """Digests of arrays on the GPU: the same as on the host, and how fast."""
    size = "0.1" if part.quick else "4000"
    found = json.loads(part.python("benchmarks/gpu_day/digests_program.py", size))
    part.row(**found)
    if found["other_on_the_host"] or not found["notices_a_bit"]:
        raise Failed(f"digests differ: {found}")
    return f"{found['gb_per_s']:,.1f} GB/s, on the host {found['host_gb_per_s']:,.1f}"


def checkpoint(part: Part) -> str:
    """Memory of the host while a checkpoint is written, beside the size of the checkpoint."""
    model = SMALL["mlp"] if part.quick else f"{TOKENS} {LARGE_GPT} optim.name=adamw"
    words = (
        f"{model} batch.size=8 stop.steps=6 log.every_steps=2 recipe.warmup=0 log.samples=0 "
        "evaluate.samples=4 checkpoint.every_steps=2 checkpoint.every_minutes=null "
        f"checkpoint.keep_last=1 hooks=[{OBJECTS}:HostMemory]"
    )
    job = part.train("host memory", *words.split())
    rows = json.loads((job.folder / "host_memory.json").read_text())
    most_mb = max(row["most_mb"] - row["before_mb"] for row in rows)
    size_mb = job.events("checkpoint")[-1]["megabytes"]
    part.row(checkpoints=rows, additional_mb=most_mb, megabytes=size_mb)
    return f"{most_mb:,.0f} MB more for a checkpoint of {size_mb:,.0f} MB"


def _steps(part: Part, jobs: dict[str, str], ranks: int = 0) -> dict[str, Any]:
    """What steps_program.py finds of each job."""
    listed = part.folder / f"jobs on {ranks}.json"
    out = part.folder / f"steps on {ranks}.json"
    listed.write_text(json.dumps(jobs))
    part.python("benchmarks/gpu_day/steps_program.py", str(listed), str(out), ranks=ranks)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def _few(part: Part, batch: int) -> str:
    return STEPS.format(4, 16) if part.quick else STEPS.format(batch, 40)


def _needs_two(part: Part) -> str:
    """Why the part does not run; empty where there are two GPUs."""
    if part.device.count >= TWO:
        return ""
    what = f"not run: it needs {TWO} GPUs, and there is {part.device.count or 'none'}"
    part.row(needs_gpus=TWO, gpus=part.device.count)
    return what


def _check_losses(found: list[float], expected: list[float], name: str) -> None:
    """Raises Failed where they differ by more than rounding."""
    difference = max(abs(a / b - 1) for a, b in zip(found, expected, strict=True))
    if not difference <= EXACT or expected[0] == expected[-1]:
        raise Failed(f"{name}: losses {found}, expected {expected}")
