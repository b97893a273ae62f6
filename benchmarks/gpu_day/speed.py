"""How fast a GPU trains, what it takes of its memory, and how many joules: each by a benchmark of
this folder, or `hvdtrain bench`."""

from __future__ import annotations

import json
import statistics

from gpu_day.board import Board
from gpu_day.data import SYNTHETIC, cifar10, fashion_mnist, jpegs
from gpu_day.part import ROOT, Failed, Part

WIDTHS = "16,160,320,640"
COMPILED = {
    "plain": [],
    "compiled": ["speed.compile=default"],
    "CUDA graphs": ["speed.compile=reduce-overhead"],
}
GPT = ["--config", str(ROOT / "configs" / "image_gpt_cifar10.yaml")]
IMAGES = 512  # images that are converted to tokens, 13 ms each
GPT_OF_LAYERS = {  # the model of configs/image_gpt_cifar10.yaml, and iGPT-S (Chen et al. 2020)
    12: ["model.layers=12"],
    24: ["model.layers=24", "model.width=512"],
}


def wide_resnet(part: Part) -> str:
    """The full network: the textbook's loop, one by hand, hvdtrain with each switch; its phases,
    compiled, and as CUDA graphs."""
    data = fashion_mnist(part)
    out = part.folder / "step.jsonl"
    widths, batch = ("4,4,8,8", "20") if part.quick else (WIDTHS, "512")
    few = (
        ["--rounds", "2", "--steps", "2"]
        if part.quick
        else ["--rounds", "5", "--steps", "10", "--switches", "--workers", "4"]
    )
    options = ["--root", str(data.root), "--widths", widths, "--batch", batch, *few]
    part.python("benchmarks/step.py", *options, "--json", str(out))
    (row,) = part.copy_rows(out, data=data.name)
    job = [
        "data.name=fashion_mnist",
        f"data.root={data.root}",
        f"model.widths=[{widths}]",
        f"batch.size={batch}",
        "speed.precision=auto",
    ]
    shares = []
    for name, words in list(COMPILED.items())[: 1 if part.quick else None]:
        found = part.bench_step(*job, *words)
        part.row(way=name, data=data.name, **found)
        shares.append(
            f"{name} {found['samples_per_s']:,.0f}, {found['share_of_matmul']:.0%} of a matrix "
            "product's rate"
        )
    ours = row["rows"]["hvdtrain"]
    return (
        f"{ours['images_per_s']:,.0f} images/s, x {ours['to by hand'][0]} by hand, x "
        f"{ours['to textbook'][0]} textbook; {'; '.join(shares)}"
    )


def accuracy(part: Part) -> str:
    """Seconds to 85 % on Fashion-MNIST."""
    data = fashion_mnist(part)
    out = part.folder / "accuracy.jsonl"
    few = (
        ["--widths", "4,4,8,8", "--batch", "20", "--target", "0", "--epochs", "1"]
        if part.quick
        else []
    )
    part.python("benchmarks/accuracy.py", "--root", str(data.root), *few, "--json", str(out))
    (row,) = part.copy_rows(out, data=data.name)
    found = {name: row[name] for name in ("textbook", "hvdtrain")}
    if missed := [name for name, one in found.items() if not one["reached"]]:
        raise Failed(f"{' and '.join(missed)} did not reach {row['target']:.0%}: {found}")
    return ", ".join(
        f"{name} {one['seconds']} s ({one['epochs']} epochs)" for name, one in found.items()
    )


def gpt(part: Part, layers: int) -> str:
    """Measures an image GPT: tokens/s compared with a hand-written loop, share of a matrix
    product's rate, and memory compared with the prediction."""
    images = (
        {"samples": 16, "val_samples": 2, "shape": [4, 4, 3]}
        if part.quick
        else {"samples": IMAGES, "val_samples": 32}
    )
    data = ["data.source=synthetic", f"data.source_options={json.dumps(images)}"]
    small = ["model.layers=1", "model.width=16", "model.heads=2", "data.colours=16"]
    model = small if part.quick else [*GPT_OF_LAYERS[layers], "model.heads=8", "data.colours=512"]
    few = ["--rounds", "2", "--steps", "10"] if part.quick else ["--rounds", "7", "--steps", "5"]
    out = part.folder / "gpt.jsonl"
    batch = 4 if part.quick else 32
    words = [*data, *model, f"batch.size={batch}", "speed.precision=auto"]
    part.python("benchmarks/gpt.py", *few, "--draws", "0", "--json", str(out), *words)
    (row,) = part.copy_rows(out, data=SYNTHETIC, layers=layers)
    words = [
        *GPT,
        *data,
        *model,
        *(["batch.size=4", "batch.micro=2", "batch.evaluate=2"] if part.quick else []),
    ]
    rates = []
    for name, compiled in list(COMPILED.items())[: 1 if part.quick else 2]:
        found = part.bench_step(*words, *compiled)
        part.row(way=name, data=SYNTHETIC, layers=layers, **found)
        rates.append(f"{name} {found['share_of_matmul']:.0%} of a matrix product's rate")
    end = [
        "stop.steps=3",
        "log.every_steps=1",
        "recipe.warmup=0",
        "recipe.schedule=constant",
        "recipe.floor=0",
        "evaluate.samples=2",
        "log.samples=0",
    ]
    memory = part.train("memory", *words, *end, "checkpoint.keep_last=1").memory_mb
    part.row(data=SYNTHETIC, layers=layers, **memory)
    off = f", predicted {memory['predicted_mb']:,.0f}" if memory["predicted_mb"] else ""
    training = row["training"]
    tokens = (
        f"{training['tokens_per_s']['hvdtrain']:,} tokens/s, x {training['hvdtrain_to_by_hand']} "
        "by hand"
    )
    return f"{tokens}; {'; '.join(rates)}; {memory['peak_mb']:,.0f} MB{off}"


def cifar10_speed(part: Part) -> str:
    """configs/cifar10_speed.yaml and the same by hand in plain torch: accuracy, and seconds of
    training."""
    data = cifar10(part)
    out = part.folder / "cifar10.jsonl"
    seeds = "0" if part.quick else "0,1,2,3,4"
    small = ["batch.size=20", "epochs=1", "model.widths=[8,8,8]"] if part.quick else []
    parts = "record" if part.quick else "record,by-hand"
    command = [
        "benchmarks/cifar10_speed.py",
        str(data.root),
        "--gpu",
        "--parts",
        parts,
        "--seeds",
        seeds,
    ]
    part.python(*command, "--out", str(out), *small)
    rows = part.copy_rows(out, data=data.name)
    words = []
    for name in parts.split(","):
        accuracies, seconds = zip(
            *[(row["accuracy"], row["train_s"]) for row in rows if row["part"] == name], strict=True
        )
        words.append(
            f"{name} {statistics.mean(accuracies):.2%} in {statistics.median(seconds):.2f} s of "
            f"training (n={len(seconds)})"
        )
    return "; ".join(words)


def folder(part: Part) -> str:
    """JPEGs of 500x400 as squares of 224: read by each way, and trained on by a ResNet-50, packed
    and decoded at each read."""
    data = jpegs(part)
    out = part.folder / "folder.jsonl"
    home = part.folder / "images"
    sizes = (
        ["--images", "40", "--size", "32", "--rounds", "1"]
        if part.quick
        else ["--images", "2000", "--size", "224", "--rounds", "3"]
    )
    enlarged = "48x40" if part.quick else "500x400"
    ways = ["packed, one", "packed=false"]
    options = [
        "--root",
        str(data.root),
        *sizes,
        "--enlarge",
        enlarged,
        "--only",
        *ways,
        "--home",
        str(home),
    ]
    part.python("benchmarks/folder.py", *options, "--json", str(out))
    rows = part.copy_rows(out, data=data.name)
    (home / "folder" / "test").symlink_to("train")
    job = ["data.name=folder", f"data.root={home / 'folder'}", "speed.precision=auto"]
    model = (
        ["data.size=32", "model.name=resnet18", "batch.size=4"]
        if part.quick
        else ["data.size=224", "model.name=resnet50", "batch.size=256"]
    )
    words = [f"{row['method']} {row['images_per_s']:,.0f} images/s" for row in rows]
    for packed in ("false",) if part.quick else ("true", "false"):
        found = part.bench_step(*job, *model, f"data.packed={packed}")
        part.row(way=f"ResNet, packed={packed}", data=data.name, **found)
        words.append(
            f"ResNet, packed={packed} {found['samples_per_s']:,.0f} ({found['data_wait_ms']:.1f} "
            "ms a step of waiting)"
        )
    return "; ".join(words)


def energy(part: Part) -> str:
    """Returns the joules per image as the job reports them, which must not exceed the board's
    energy including start-up and end."""
    small = ["model.widths=[4,4,8,8]", "batch.size=20", "stop.steps=4"]
    model = small if part.quick else [f"model.widths=[{WIDTHS}]", "batch.size=512", "stop.time=60s"]
    words = [
        "data.name=synthetic",
        "data.shape=[28,28,1]",
        "speed.precision=auto",
        "evaluate.samples=100",
        *model,
    ]
    with Board(part.device.uuid) as board:
        job = part.train("energy", *words)
    start = job.events("start")[-1]
    end = job.events("end")[-1]
    joules = end["joules"] or {}
    each = end.get("joules_per_sample")
    watts = [event["watts"] for event in job.events("step") if event.get("watts")]
    part.row(
        data=SYNTHETIC,
        joules=joules,
        joules_per_image=each,
        watts=watts[-10:],
        board_j=board.joules,
        reasons=start["energy"],
    )
    if part.device.is_gpu and "gpu" not in joules:
        raise Failed(f"the energy of the GPU is not measured: {start['energy'].get('gpu')}")
    if joules.get("gpu", 0.0) > 1.05 * board.joules:
        raise Failed(
            f"the job counts {joules['gpu']:,.0f} J of the GPU, whose power makes "
            f"{board.joules:,.0f} J"
        )
    if not joules:
        return f"not measured: {', '.join(start['energy'].values())}"
    return (
        f"{each:.4g} J an image, {sum(joules.values()):,.0f} J; by the board's power "
        f"{board.joules:,.0f} J, with start and end"
    )
