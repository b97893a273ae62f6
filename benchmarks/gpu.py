"""Everything that is measured on a GPU, in one script of at most 8 minutes on an H200: step time, share of the peak, time to accuracy.

python benchmarks/gpu.py --root DIR --json FILE [--quick]

DIR holds FashionMNIST/raw. Three parts, in lines of JSON: step.py (textbook, by hand, hvdtrain, a row for each switch; losses are compared
before anything is timed) with the full wide_resnet at batch 512; `bench step` (phases, share of the bf16 matmul peak), plain, compiled and
as CUDA graphs; seconds to 85 % validation accuracy of the textbook's loop and of hvdtrain, each with its evaluations. --quick: a tiny
network, few steps and no `bench step`, to try the script anywhere.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from step import LR, MEAN, STD, Textbook, device_words

from hvdtrain.core.import_torchvision import import_torchvision

ROOT = Path(__file__).resolve().parent.parent
TARGET = 0.85
WAYS = {"plain": [], "compiled": ["speed.compile=default"], "graphs": ["speed.compile=reduce-overhead"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    a = parser.parse_args()
    widths, batch, rounds, steps = ("4,4,8,8", 20, 2, 2) if a.quick else ("16,160,320,640", 512, 5, 10)
    began = time.perf_counter()
    shape = ["--root", str(a.root), "--widths", widths, "--batch", str(batch), "--rounds", str(rounds), "--steps", str(steps)]
    run("benchmarks/step.py", *shape, "--workers", "0" if a.quick else "4", *([] if a.quick else ["--switches"]), "--json", str(a.json))
    words = ["data.name=fashion_mnist", f"data.root={a.root}", f"model.widths=[{widths}]", f"batch.size={batch}", "speed.precision=auto"]
    for name, more in () if a.quick else WAYS.items():
        told = run("-m", "hvdtrain", "bench", "step", *words, *more, "--rounds", str(rounds), "--steps", str(steps), "--json", "-")
        keep(a.json, {"bench step": name} | json.loads(told))
    target, epochs = (0.0, 1) if a.quick else (TARGET, 8)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    theirs = textbook_seconds(a.root, widths, batch, device, target, epochs)
    ours = hvdtrain_seconds([*words, f"optim.base_lr={LR}", f"epochs={epochs}"], target)
    keep(a.json, {"seconds to accuracy": target, "device": device_words(device), "textbook": theirs, "hvdtrain": ours})
    print(f"all of it: {time.perf_counter() - began:.0f} s; {a.json}")


def run(*words: str) -> str:
    """The standard output of `python WORDS`, which must end well."""
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    print(done.stdout[-2000:], flush=True)
    return done.stdout


def keep(path: Path, row: dict[str, Any]) -> None:
    with path.open("a") as out:
        out.write(json.dumps(row) + "\n")


def textbook_seconds(root: Path, widths: str, batch: int, device: torch.device, target: float, epochs: int) -> dict[str, Any]:
    """Seconds from the first step to the end of the epoch whose evaluation reaches the target; start-up is left out on both sides."""
    loop = Textbook(root, tuple(int(w) for w in widths.split(",")), batch, device, 4 if device.type == "cuda" else 0)
    vision = import_torchvision()
    from torchvision import transforms

    change = transforms.Compose([transforms.ToTensor(), transforms.Normalize((MEAN,), (STD,))])
    val = torch.utils.data.DataLoader(vision.datasets.FashionMNIST(str(root), train=False, transform=change), 500)
    began, steps, accuracy, epoch = time.perf_counter(), len(loop.loader), -1.0, 0
    while epoch < epochs and accuracy < target:
        epoch += 1
        loop.block(steps)
        loop.model.eval()
        with torch.no_grad():
            right = sum((loop.model(x.to(device)).argmax(1) == y.to(device)).sum().item() for x, y in val)
        accuracy = right / len(val.dataset)  # type: ignore[arg-type]
    return {"seconds": round(time.perf_counter() - began, 2), "epochs": epoch, "accuracy": accuracy, "reached": accuracy >= target}


def hvdtrain_seconds(words: list[str], target: float) -> dict[str, Any]:
    """The same of a job, by its own clock."""
    with tempfile.TemporaryDirectory() as folder:
        run("-m", "hvdtrain", *words, f"stop.target_accuracy={target}", "stop.patience=1", f"run={folder}/run")
        lines = [json.loads(line) for line in Path(folder, "run", "events.jsonl").read_text().splitlines()]
    last = [line for line in lines if line["kind"] == "epoch"][-1]
    return {
        "seconds": last["seconds"],
        "epochs": last["epoch"],
        "accuracy": last["val_accuracy"],
        "reached": last["val_accuracy"] >= target,
    }


if __name__ == "__main__":
    main()
