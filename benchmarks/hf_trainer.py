"""Training tokens/s of a GPT-2 of transformers, with Hugging Face's Trainer and with hvdtrain, in turn.

PYTHONPATH=... python benchmarks/hf_trainer.py [--rounds 6] [--steps 6] [--json FILE] [key=value ...]

Both train the same class from the same weights, with AdamW, gradients clipped to 1 and a constant
learning rate, on the same JSON lines of 128 tokens, in batches of 16 that each shuffles by itself.
The Trainer has its texts as tokens before the timing, as its examples do; hvdtrain makes tokens of a
batch when it reads it. Before the timing both must give the same loss of the same documents, after
it both must have learned. Each block of the Trainer has a new optimizer, as train() makes one. Neither logs, evaluates nor saves within a block.

On a CPU, seconds are this process's CPU time over all its threads; on a GPU they are wall time. In
each round both train a block after two steps that are not counted, and the order alternates. The
ratio is of neighbours: above 1, hvdtrain is faster. It needs transformers and accelerate, which the
environment does not have: .venv/keras of `make test-keras` has the first, and
`pip install --no-deps --target FOLDER accelerate psutil` installs the second into a folder.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blocks import Trainer, spread
from rows import append
from step import device_name

from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.core.import_torchvision import define_missing_operators
from hvdtrain.training.health.signals import Signals

TOKENS = 128
DOCUMENTS = 512
BATCH = 16
LR = 1e-3
WARM_UP = 2  # steps of a block that are not counted
WORDS = 2000


def write_data(folder: Path) -> None:
    """Writes documents of TOKENS words, which repeat, and a tokenizer of whole words."""
    random = np.random.default_rng(0)
    with (folder / "train.jsonl").open("w") as file:
        for _ in range(DOCUMENTS):
            start, step = random.integers(0, WORDS, 2)
            words = (start + step * (np.arange(TOKENS) % 4)) % WORDS
            text = " ".join(f"w{word}" for word in words)
            file.write(json.dumps({"text": text}) + "\n")
    vocabulary = {f"w{number}": number for number in range(WORDS)}
    tokenizer = {
        "version": "1.0",
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def job(folder: Path, overrides: list[str]) -> list[str]:
    return [
        *("data.name=jsonl", f"data.root={folder / 'train.jsonl'}", "data.val_share=0.1"),
        *(f"data.tokenizer={folder / 'tokenizer.json'}", "task.name=language"),
        f"model.name=transformers:{folder / 'model'}",
        *(f"batch.size={BATCH}", "optim.name=adamw", f"optim.base_lr={LR}"),
        *(
            "optim.beta2=0.999",
            "optim.weight_decay=0",
            "optim.clip_norm=1",
            f"log.every_steps={WARM_UP}",
        ),
        *overrides,
    ]


class Documents(torch.utils.data.Dataset[dict[str, list[int]]]):
    """The tokens of the documents, in memory."""

    def __init__(self, folder: Path, transformers: Any) -> None:
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json")
        )
        texts = [json.loads(line)["text"] for line in (folder / "train.jsonl").open()]
        self.rows: list[list[int]] = tokenizer(texts)["input_ids"]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": self.rows[index]}


def collate(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Pads to the longest document of the batch, as DataCollatorWithPadding does."""
    tokens = [torch.tensor(sample["input_ids"]) for sample in samples]
    padded = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True, padding_value=0)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(one) for one in tokens], True)
    return {
        "input_ids": padded,
        "attention_mask": mask,
        "labels": padded.masked_fill(mask == 0, -100),
    }


class HuggingFace:
    """transformers.Trainer, which trains a block for each call of train()."""

    def __init__(
        self, folder: Path, transformers: Any, half: bool, clock: Callable[[], float]
    ) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
        self.documents = Documents(folder, transformers)
        self._clock = clock
        self._folder = folder
        self._half = half
        self._transformers = transformers
        self.loss = float("nan")

    def block(self, steps: int) -> float:
        """Returns the seconds of `steps` steps after WARM_UP others."""
        clock = self._clock
        marks: dict[int, float] = {}

        class Clock(self._transformers.TrainerCallback):  # type: ignore[misc, name-defined]
            def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
                if state.global_step in (WARM_UP, WARM_UP + steps):
                    marks[state.global_step] = clock()

        arguments = self._transformers.TrainingArguments(
            output_dir=str(self._folder / "trainer"),
            max_steps=WARM_UP + steps,
            per_device_train_batch_size=BATCH,
            learning_rate=LR,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=1.0,
            bf16=self._half,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        )
        trainer = self._transformers.Trainer(
            model=self.model,
            args=arguments,
            train_dataset=self.documents,
            data_collator=collate,
            callbacks=[Clock()],
        )
        trainer.remove_callback(self._transformers.PrinterCallback)
        self.loss = float(trainer.train().training_loss)
        return marks[WARM_UP + steps] - marks[WARM_UP]


class Ours:
    """hvdtrain, of which a block is part of one job."""

    def __init__(self, trainer: Trainer, clock: Callable[[], float]) -> None:
        self._trainer = trainer
        self._clock = clock

    def block(self, steps: int) -> float:
        self._trainer.block(WARM_UP)
        began_s = self._clock()
        self._trainer.block(steps)
        return self._clock() - began_s


def losses(trainer: Trainer, theirs: HuggingFace) -> tuple[float, float]:
    """Returns the mean loss of a token in the same documents, of hvdtrain and of the Trainer's
    model."""
    learner: Any = trainer.job.learner
    batch = trainer.datasets.train.read(np.arange(BATCH))
    sums = learner.evaluate(learner.to_device(batch))
    tokens = torch.from_numpy(batch["tokens"]).to(learner.device)
    theirs.model.to(learner.device).eval()
    with torch.no_grad():
        found = theirs.model(input_ids=tokens, labels=tokens).loss
    theirs.model.train()
    return float(sums["loss"]) / float(sums["tokens"]), float(found)


def measure(trainer: Trainer, theirs: HuggingFace, rounds: int, steps: int) -> dict[str, Any]:
    device: Any = trainer.job.learner.device  # type: ignore[attr-defined]
    half = theirs._half
    before = losses(trainer, theirs)
    assert abs(before[0] - before[1]) < (2e-2 if half else 1e-4) * before[0], before
    names = {"trainer": theirs, "hvdtrain": Ours(trainer, theirs._clock)}
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        for name in list(names)[:: 1 if number % 2 else -1]:
            seconds = names[name].block(steps)  # type: ignore[attr-defined]
            if number:  # the first round warms up
                times[name].append(seconds)
    after = losses(trainer, theirs)
    assert max(after) < min(before), (before, after)
    ratio, quartiles = spread(
        [a / b for a, b in zip(times["trainer"], times["hvdtrain"], strict=True)], 3
    )
    tokens = BATCH * (TOKENS - 1) * steps
    return {
        "device": device_name(device),
        "parameters": sum(p.numel() for p in theirs.model.parameters()),
        "rounds": rounds,
        "steps_per_block": steps,
        "tokens_per_s": {
            name: round(tokens / statistics.median(seconds)) for name, seconds in times.items()
        },
        "hvdtrain_to_trainer": ratio,
        "quartiles": quartiles,
        "losses": {"before": before, "after": after},
        "versions": {name: version(name) for name in ("transformers", "accelerate")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for hvdtrain")
    options = parser.parse_args()
    define_missing_operators()  # transformers imports torchvision
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    with tempfile.TemporaryDirectory() as name, Signals(0) as signals:
        folder = Path(name)
        write_data(folder)
        sizes = {"n_layer": options.layers, "n_embd": options.width, "n_head": options.width // 64}
        config = transformers.GPT2Config(
            **sizes, vocab_size=WORDS, n_positions=TOKENS, bos_token_id=0, eos_token_id=0
        )
        for dropout in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
            setattr(config, dropout, 0.0)
        torch.manual_seed(0)
        transformers.GPT2LMHeadModel(config).save_pretrained(folder / "model")
        half = ["speed.precision=bf16"] if options.bf16 else []
        trainer = Trainer(
            job(folder, [*half, *options.overrides]), SingleProcessCommunicator(), signals
        )
        theirs = HuggingFace(folder, transformers, options.bf16, clock)
        theirs.model.load_state_dict(trainer.job.learner.model.state_dict())  # type: ignore[attr-defined]
        found = measure(trainer, theirs, options.rounds, options.steps)
    facts = {"load": round(os.getloadavg()[0], 1), "torch": torch.__version__}
    found = {**facts, "bf16": options.bf16, "words": options.overrides, **found}
    print(json.dumps(found, indent=2))
    if options.json:
        append(options.json, found)


if __name__ == "__main__":
    main()
