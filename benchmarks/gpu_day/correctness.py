"""Whether a GPU computes what it should: tests, losses against a CPU, two ranks on one GPU, the
same bits after a stop, ZeRO."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from gpu_day.part import Failed, Job, Part

EXACT = 1e-9  # largest relative difference of losses in float64 that differ by rounding alone
STEPS = [
    "batch.size=48",
    "stop.steps=8",
    "log.every_steps=1",
    "recipe.warmup=0",
    "evaluate.samples=40",
]
CONVNET = [
    *STEPS,
    "model.name=convnet",
    "model.widths=[4,6]",
    "norm.kind=sync",
    "speed.precision=fp64",
    "optim.base_lr=0.2",
]
TOKENS = [
    "data.name=image_tokens",
    "data.source=digits",
    "task.name=language",
    "model.name=gpt",
    "optim.name=adamw",
]
# SGD: gradients that are off by a factor change nothing in Adam
GPT = [
    *STEPS,
    *TOKENS,
    "optim.name=sgd",
    "model.layers=2",
    "model.width=32",
    "speed.precision=fp64",
    "optim.base_lr=0.05",
]
GLOO = f"{Path(__file__).parent / 'gloo_program.py'}"
WAYS = {"mpi": (["comm.engine=mpi"], "-m hvdtrain"), "gloo": (["comm.engine=torchdist"], GLOO)}
STAGES = {
    "stage 0": [],
    "stage 3": ["shard.stage=3"],
    "stage 3, parameters offloaded": ["shard.stage=3", "shard.offload=parameters"],
}


def tests(part: Part) -> str:
    """`make test-gpu`, in this Python; its test marked `gpu` that needs two GPUs is skipped on
    one."""
    report = part.folder / "tests.xml"
    try:
        part.python(
            "-m", "pytest", "-m", "gpu", "-v", "-p", "no:cacheprovider", f"--junitxml={report}"
        )
    except Failed:
        if not report.exists():  # it took too long, or did not begin
            raise
    cases = ElementTree.parse(report).getroot().iter("testcase")
    by_end: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": []}
    for case in cases:
        ends = {child.tag for child in case}
        end = (
            "failed"
            if ends & {"failure", "error"}
            else "skipped"
            if "skipped" in ends
            else "passed"
        )
        by_end[end].append(f"{case.get('classname')}::{case.get('name')}")
    part.row(passed=len(by_end["passed"]), failed=by_end["failed"], skipped=by_end["skipped"])
    if by_end["failed"]:
        raise Failed(f"{len(by_end['failed'])} tests failed: {', '.join(by_end['failed'])}")
    if part.device.is_gpu and not by_end["passed"]:
        raise Failed("no test ran")
    return f"{len(by_end['passed'])} passed, {len(by_end['skipped'])} skipped"


def losses(part: Part) -> str:
    """benchmarks/losses.py."""
    out = part.folder / "losses.jsonl"
    few = ["--steps", "3", "--jobs", "mlp,gpt"] if part.quick else []
    try:
        part.python("benchmarks/losses.py", *few, "--json", str(out))
    finally:
        rows = part.copy_rows(out) if out.exists() else []
    worst = {
        name: max(row["largest_difference"][name] for row in rows)
        for name in rows[0]["largest_difference"]
    }
    return (
        f"largest difference {', '.join(f'{value:.1e} in {name}' for name, value in worst.items())}"
    )


def ranks(part: Part) -> str:
    """Two ranks on one GPU by each way: the losses of one process, and what they wait for each
    other."""
    one, words = part.train("one", *CONVNET), list[str]()
    model = (
        ["model.widths=[4,4,8,8]", "batch.size=32"]
        if part.quick
        else ["model.widths=[16,160,320,640]", "batch.size=512"]
    )
    data = ["data.name=synthetic", "data.shape=[28,28,1]", "speed.precision=auto"]
    for way, (engine, program) in WAYS.items():
        difference = _difference(
            part.train(way, *CONVNET, *engine, ranks=2, program=program), one, way
        )
        if part.quick and words:
            continue  # one timing is enough to try the script
        found = part.bench_step(*data, *model, *engine, ranks=2, program=program)
        part.row(way=way, data="synthetic", largest_difference=difference, **found)
        words.append(
            f"{way} {found['samples_per_s']:,.0f} images/s, "
            f"{found['exposed_communication_ms']:.1f} ms of waiting"
        )
    return "; ".join(words)


def resume(part: Part) -> str:
    """Checks that with speed.deterministic a job that is stopped and resumed ends with the same
    bits as an uninterrupted job. Measures a checkpoint."""
    small = ["model.widths=[4,4,8,8]", "batch.size=16", "evaluate.samples=40"]
    resnet = (
        small
        if part.quick
        else ["model.widths=[16,160,320,640]", "batch.size=256", "speed.precision=bf16"]
    )
    models = {"wide_resnet": ["data.name=synthetic", "data.shape=[28,28,1]", *resnet]}
    if not part.quick:
        models["gpt"] = [
            *TOKENS,
            "model.layers=24",
            "model.width=512",
            "model.heads=8",
            "batch.size=64",
            "speed.precision=bf16",
        ]
    words = []
    for name, model in models.items():
        words_of_all = [*model, "speed.deterministic=true", "checkpoint.keep_last=1"]
        straight = part.train(f"{name} straight", *words_of_all, "stop.steps=8")
        part.train(f"{name} halves", *words_of_all, "stop.steps=3")
        halves = part.train(f"{name} halves", *words_of_all, "stop.steps=8")
        is_same = _digests(straight) == _digests(halves)
        last = halves.events("checkpoint")[-1]
        sizes = {key: last[key] for key in ("megabytes", "write_s", "pause_s")}
        part.row(
            model=name,
            data="synthetic",
            same_bits=is_same,
            **sizes,
            start_s=halves.events("started")[-1]["start_s"],
        )
        if not is_same:
            raise Failed(
                f"{name}: a resumed job has other weights than one that was not interrupted"
            )
        words.append(
            f"{name} the same bits, {last['megabytes']:,.0f} MB in {last['write_s']:.1f} s"
        )
    return "; ".join(words)


def zero3(part: Part) -> str:
    """Two ranks with stage 3, and with its parameters in host memory: the losses of stage 0, then
    memory and time of a larger model."""
    stages = {name: words for name, words in STAGES.items() if not part.quick or name != "stage 3"}
    jobs = {
        name: part.train(f"exact {name}", *GPT, *stage, "comm.engine=mpi", ranks=2)
        for name, stage in stages.items()
    }
    for name, job in jobs.items():
        part.row(stage=name, largest_difference=_difference(job, jobs["stage 0"], name))
    if part.quick:
        return "the losses of stage 0"
    large = [
        *TOKENS,
        "model.layers=24",
        "model.width=512",
        "model.heads=8",
        "batch.size=64",
        "speed.precision=bf16",
    ]
    large += [
        "stop.steps=12",
        "log.every_steps=2",
        "recipe.warmup=0",
        "evaluate.samples=32",
        "comm.engine=mpi",
        "checkpoint.keep_last=1",
    ]
    words = []
    for name, stage in STAGES.items():
        job = part.train(f"large {name}", *large, *stage, ranks=2)
        ms = statistics.median(
            1e3 * event["window_s"] / event["steps"] for event in job.events("step")[1:]
        )
        part.row(stage=name, ms_per_step=ms, losses=job.losses, **job.memory_mb)
        words.append(
            f"{name}: {job.memory_mb['peak_mb']:,.0f} MB of each rank, {ms:,.0f} ms a step"
        )
    return "; ".join(words)


def _difference(job: Job, expected: Job, name: str) -> float:
    """Returns the largest relative difference of the losses. Raises Failed if it exceeds
    rounding."""
    pairs: Sequence[tuple[float, float]] = list(zip(job.losses, expected.losses, strict=True))
    difference = max(abs(a / b - 1) for a, b in pairs)
    if not difference <= EXACT or expected.losses[0] == expected.losses[-1]:
        raise Failed(f"{name}: losses {job.losses}, expected {expected.losses}")
    return difference


def _digests(job: Job) -> dict[str, str]:
    """Returns the digests of the arrays in the newest checkpoint."""
    newest = sorted((job.folder / "checkpoints").iterdir())[-1]
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(newest.glob("*.safetensors"))
    }
