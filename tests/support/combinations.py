"""Runs every pair of features as a tiny job on ranks and compares it with one process;
docs/combinations.md is the result.

    python tests/support/combinations.py docs/combinations.md                          runs every
        pair that is not refused; writes the page
    python tests/support/combinations.py docs/combinations.md --of augment.erase
        pairs of one feature; the others keep their signs. 57 pairs took 97 s on two idle cores
    python tests/support/combinations.py docs/combinations.md --signs ?o --results FILE --for-s 500
        pairs with these signs on the page, as many as that time allows; the others keep their signs
    python tests/support/combinations.py --jobs-only "comm.local_steps=2 + optim.ema=0.8"    these
        pairs, with their commands
    python tests/support/combinations.py docs/combinations.md --framework jax --results FILE
        all pairs with framework=jax, or keras; writes its row of the page

Jobs compute in float64 with SGD, on two ranks or four. Weights, losses and rates must equal those
of one process to 1e-12. If other numbers are right by definition, `bound_of()` and `HAS_NO_TWIN`
say which. Each job is also resumed from its middle: half of the pairs begin on the ranks and end on
one process, the others begin on one process. Pairs that cannot be compared with one process are
resumed on their ranks.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import NamedTuple

from drawn_job import DrawnJob, Place
from pairs import EXAMPLES, Pair, all_pairs, assigned, engines_of, joined, names, refusal
from pool import end_all
from random_jobs import (
    AT_A_TIME,
    ENV,
    OF_MUON,
    ONE,
    ROUNDING,
    Part,
    Verdict,
    compare,
    left_of,
    run_part,
)
from ranks import Job

from hvdtrain.config.exclusion import as_yaml
from hvdtrain.errors import DONE

LIMIT_S = 120.0  # of a job
COMPILED_S = 360.0  # of a job for which torch calls a C++ compiler
COMMON = (
    "speed.precision=fp64 optim.name=sgd optim.base_lr=0.05 batch.size=12 stop.steps=4 epochs=50 "
    "log.every_steps=2 guard.equal_steps=2 "
    "checkpoint.every_minutes=null checkpoint.every_steps=2 checkpoint.keep_last=99 "
    "comm.bucket_mb=0.001"
)
PER_DAY = 24  # pairs that the tests run: each takes about two seconds of a core
STOPPED = 2  # steps after which a job is resumed elsewhere
SAMPLES = "data.samples=36 data.val_samples=12"  # an epoch ends within the job
IMAGES = f"{SAMPLES} task.name=classification data.name=synthetic data.shape=[8,8,1] data.classes=3"
TEXT = "task.name=language data.name=text data.context=16 data.val_share=0.25"
OF_CHATS = Path(__file__).parent / "chats"
CHATS = (
    f"task.name=language data.name=jsonl data.root={OF_CHATS / 'chats.jsonl'} "
    f"data.tokenizer={OF_CHATS} data.val_share=0.25"
)
OF_KERAS = "model.name=example_objects:keras_model"
GPT = "model.name=gpt model.layers=4 model.heads=2 model.width=8"
MODELS = {  # the first one that has what both features need
    "mlp": f"{IMAGES} model.name=mlp model.widths=[10,8,6]",
    "convnet": f"{IMAGES} model.name=convnet model.widths=[3,4] model.dense=[8,6] model.norm=false",
    "linear": f"{IMAGES} model.name=linear",
    "gpt": f"{SAMPLES} task.name=language data.name=drawn_job:tokens {GPT}",
    "text": f"{TEXT} data.root={Path(__file__).parents[2] / 'CITATION.cff'} {GPT}",
    "numbers": f"{SAMPLES} task.name=regression data.name=drawn_job:numbers model.name=mlp "
    "model.widths=[10,8,6]",
    "labels": f"{SAMPLES} task.name=multilabel data.name=example_objects:labels model.name=mlp "
    "model.widths=[10,8,6]",
    "masks": f"{SAMPLES} task.name=segmentation data.name=example_objects:masks "
    "model.name=example_objects:Pixels",
    "sequences": f"{SAMPLES} task.name=language data.name=example_objects:sequences {GPT}",
    "texts": f"{CHATS} {GPT}",
    "chats": f"{CHATS} data.messages=messages {GPT}",
    "mixture": "task.name=language data.name=tokens data.val_share=0.25 data.context=8 "
    f"data.root={Path(__file__).parent / 'token_sets'} {GPT}",
    "keras": f"{IMAGES} {OF_KERAS}",
    "keras-labels": f"{SAMPLES} task.name=multilabel data.name=example_objects:labels {OF_KERAS}",
    "keras-numbers": f"{SAMPLES} task.name=regression data.name=drawn_job:numbers {OF_KERAS}",
    "fields": f"{SAMPLES} task.name=classification data.name=example_objects:fields "
    "model.name=example_objects:Both",
    "table": f"task.name=classification data.name=csv data.val_share=0.25 model.name=mlp "
    f"data.root={Path(__file__).parent / 'patients.csv'} data.columns=auto data.missing=mean "
    "model.widths=[10,8,6]",
    "resnet": f"{IMAGES} model.name=wide_resnet model.widths=[4,4,4,4] model.dropout=0 "
    "norm.kind=ghost norm.ghost=3",
}
OF_CLASSES = ("mlp", "convnet", "resnet", "linear", "keras")
OF_LABELS = (*OF_CLASSES, "table")
OF_IMAGES = (*OF_CLASSES, "labels", "masks", "keras-labels")
OF_TOKENS = ("gpt", "text", "sequences", "texts", "chats", "mixture")
CAN_BE_CUT = (*OF_TOKENS, "mlp", "numbers", "labels", "table")
WITH_LINEAR_LAYERS = (*CAN_BE_CUT, "linear", "fields")
NEEDS: dict[str, tuple[str, ...]] = {  # words -> models that have what they need
    "framework=numpy": ("linear",),
    "framework=keras": ("keras", "keras-labels", "keras-numbers"),
    "framework=jax": (
        *("mlp", "linear", "numbers", "convnet", "gpt", "text", "resnet", "labels", "table"),
        "mixture",
    ),
    "parallel.dense": ("convnet",),
    "parallel.sequence": OF_TOKENS,
    "parallel.context": OF_TOKENS,
    "parallel.tensor": CAN_BE_CUT,
    "parallel.pipeline": CAN_BE_CUT,
    "norm.kind": ("resnet",),
    "speed.channels_last": ("convnet", "resnet", "masks"),
    "model.recompute": (*OF_TOKENS, "resnet"),
    "model.lora": WITH_LINEAR_LAYERS,
    "log.samples": ("text",),
    "data.pad": ("sequences",),
    "data.pack": ("sequences", "texts", "chats"),
    "data.bucket_by": ("sequences", "texts", "chats"),
    "data.name=jsonl": ("texts", "chats"),
    "data.messages": ("chats",),
    "data.mixture": ("mixture",),
    "data.inputs": ("fields",),
    "data.epoch_samples": OF_CLASSES,
    "data.columns": ("table",),
    "data.sample_weights": (*OF_LABELS, "fields"),
    "data.shift": ("numbers", "keras-numbers"),
    "data.gaps": ("numbers", "keras-numbers"),
    "task.name=language": OF_TOKENS,
    "task.name=regression": ("numbers", "keras-numbers"),
    "task.name=multilabel": ("labels", "keras-labels"),
    "task.name=segmentation": ("masks",),
    "task.name=mine:measured": OF_LABELS,
    "task.ignore_label": OF_LABELS,
    "task.metrics": OF_LABELS,
    "augment.": OF_IMAGES,
    "evaluate.views": OF_CLASSES,
}
SMALLER = {  # what replaces a word of an example; None: the word of the model
    "recipe.grow_to=[80]": "[18]",
    "data.name=text": None,
    "data.name=jsonl": None,
    "data.name=tokens": None,
    "task.name=mine:measured": "example_objects:measured",
    "data.name=mine:stream": "example_objects:stream",
    "hooks=[mine:Hook]": "[example_objects:Hook]",
    # images of one channel have no saturation or hue
    "augment.color_jitter=[0.4,0.4,0.4,0.1]": "[0.4,0.4]",
    **{
        f"task.name={name}": None
        for name in ("regression", "language", "multilabel", "segmentation")
    },
}
STILL_TRAINED = {  # what a group may set besides an example that freezes biases
    "model.freeze": "*.weight",
    "model.lora": "*.lora_B",
}
BASE = "base.safetensors"  # of an example; the run folder of a job with the same model replaces it
# keys that the base job does not have
OF_PRETRAINED = (
    "model.weights",
    "model.lora",
    "model.freeze",
    "model.thaw",
)
# what one process does without
ON_RANKS = (
    "comm.",
    "shard.",
    "parallel.",
    "servers.",
    "guard.lost",
    "log.noise_scale",
    "speed.devices",
)
# a key of ON_RANKS that changes what one process computes
ONE_PROCESS_TOO = "comm.compression_rank"
SAME_NUMBERS = (  # keys that change no number, besides those in HAS_NO_TWIN
    *(
        "comm.tune",
        "comm.cycle_ms",
        "comm.fusion_mb",
        "comm.hierarchical",
        "comm.device_memory",
        "comm.reduce",
        "data.readers",
        "log.",
        "guard.",
        "checkpoint.",
    ),
    *(
        "model.recompute",
        "batch.micro",
        "parallel.sequence",
        "shard.",
        "hooks",
        "stop.",
        "data.bucket_by",
        "speed.devices",
    ),
)
HAS_NO_TWIN = {  # keys that make other numbers than one process, by definition
    "comm.local_steps": "each rank steps by itself",
    "comm.op": "Adasum is not a mean",
}
# key -> bound for the effect of rounding to 16 bits on weights in float32
IN_16_BITS = {
    "comm.compression": 4e-3,
    "speed.precision": 1e-1,
}

BY_RANK = {  # a pair of words -> why its numbers depend on the ranks
    (
        "norm.kind=ghost",
        "data.sampling=partition",
    ): "which samples are in a ghost batch depends on the ranks",
    (
        "norm.kind=ghost",
        "recipe.growth",
    ): "a larger batch has the same number of passes on any number of ranks, whose parts are "
    "other samples",
    ("norm.kind=ghost", "batch.micro"): "running statistics have an update for each pass of a rank",
}
MULTIPLY_ROUNDING = (  # what 16 bits round
    "norm.kind",  # statistics of three samples
    "optim.name=muon",  # see OF_MUON
    # numbers are not standardized: a sum over all samples may exceed fp16's range although a rank's
    # sum does not
    "task.name=regression",
)


class Found(NamedTuple):
    """The outcome of a pair: equal, alike, runs, refused, no model or failed."""

    kind: str
    why: str = ""
    apart: float = 0.0
    job: str = ""
    resumed: str = ""  # "place of the first half -> place of the second half"


class Planned(NamedTuple):
    """A pair's job on ranks, and what it is compared with."""

    pair: Pair
    job: DrawnJob
    twin: DrawnJob | None  # None: there is none


def plan(pair: Pair) -> Planned | Found:
    """The job of a pair; or its refusal before there is a job."""
    error = refusal(pair)
    if error is not None:
        return Found("refused", error.what)
    model = model_of(pair.words)
    if model is None:
        return Found("no model", "no model of the table has what both need")
    job = job_of(pair, model, pair.words)
    return Planned(pair, job, twin_of(pair, model, job))


def job_of(pair: Pair, model: str, words: str) -> DrawnJob:
    """Returns a pair's words as a job: the words that one process supports too, and a place with
    all other words."""
    found = smaller(words)
    updates = "parallel.dense_updates" in found  # of the dense part, which one process can make too
    on_ranks = {
        key
        for key in found
        if key.startswith(ON_RANKS)
        and key != ONE_PROCESS_TOO
        and not (updates and key.startswith("parallel.dense"))
    }
    alone = as_words({key: value for key, value in found.items() if key not in on_ranks})
    if found.get("comm.reduce") == "ddp" and "speed.compile" in found:
        alone = joined(alone, "comm.bucket_mb=1")
    if "comm.compression" in found:
        alone = joined("speed.precision=fp32", alone)
    place = Place(
        engine_of(pair),
        ranks_of(pair.words),
        as_words({key: found[key] for key in found if key in on_ranks}),
    )
    words = joined(COMMON, MODELS[model], alone)
    if "norm.kind=sync" in words:
        words = words.replace(" norm.ghost=3", "")  # of the model, and without effect
    return DrawnJob(0, words, place, None, STOPPED)


def twin_of(pair: Pair, model: str, job: DrawnJob) -> DrawnJob | None:
    """Returns the job on one process. If a feature changes numbers, returns the job on the ranks
    without the other feature, provided that the other one changes no number."""
    if rounds_much(pair) or by_rank(pair):
        return None
    makes_others = [example for example in pair.both if example.keys & HAS_NO_TWIN.keys()]
    if not makes_others:
        return job._replace(place=ONE)
    others = [example for example in pair.both if example not in makes_others]
    if len(others) == 1 and all(key.startswith(SAME_NUMBERS) for key in smaller(others[0].words)):
        return job_of(pair, model, joined(pair.more, makes_others[0].words))
    return None


def rounds_much(pair: Pair) -> bool:
    """Whether a feature multiplies what 16 bits round."""
    return any(key in pair.words for key in MULTIPLY_ROUNDING) and any(
        key in assigned(pair.words) for key in IN_16_BITS
    )


def by_rank(pair: Pair) -> str:
    """Why a pair's numbers depend on the ranks by definition, or nothing."""
    return next(
        (why for words, why in BY_RANK.items() if all(word in pair.words for word in words)), ""
    )


def model_of(words: str) -> str | None:
    """The first model of the table that has what these words need."""
    allowed = set(MODELS)
    for word in words.split():
        for need, models in NEEDS.items():
            if word.startswith(need):
                allowed &= set(models)
    return next((model for model in MODELS if model in allowed), None)


def smaller(words: str) -> dict[str, str]:
    """The words of examples for a tiny job."""
    found = {key: SMALLER.get(f"{key}={value}", value) for key, value in assigned(words).items()}
    if "framework" in found and found.get("task.name") == "example_objects:measured":
        found["task.name"] = "example_objects:measured_in_arrays"  # torchmetrics takes tensors
    groups = found.get("optim.groups")
    for key, trained in STILL_TRAINED.items():
        if groups is not None and key in found:
            found["optim.groups"] = groups.replace("*.bias", trained)
    return {key: value for key, value in found.items() if value is not None}


def as_words(found: dict[str, str]) -> str:
    return " ".join(f"{key}={value}" for key, value in found.items())


def engine_of(pair: Pair) -> str:
    """Returns the pair's engine: torchdist if ranks may be lost, because mpi supports that only
    with an option of one launcher."""
    engines = engines_of(pair.words)
    return "torchdist" if "guard.lost" in pair.words and "torchdist" in engines else engines[0]


def ranks_of(words: str) -> int:
    """Returns the number of ranks: two; three for a server and two workers that wait for each
    other; four if parts of a model are divided again or replicated."""
    found = assigned(words)
    if "servers.count" in found:
        return 2 if "servers.bound" in found else 3
    axes = ("parallel.tensor", "parallel.pipeline", "parallel.context")
    cut = [key for key in axes if key in found]
    return (
        4
        if len(cut) == 2
        or (cut and any(key.startswith(("shard.", "comm.compression")) for key in found))
        else 2
    )


def bound_of(words: Iterable[str]) -> float:
    """Returns the largest difference allowed: rounding, rounding to 16 bits, or muon's, whose steps
    amplify rounding."""
    found = assigned(" ".join(words))
    in_16_bits = [bound for key, bound in IN_16_BITS.items() if found.get(key) in ("fp16", "bf16")]
    return max([ROUNDING, *in_16_bits, *[OF_MUON] * (found.get("optim.name") == "muon")])


def needs_ulfm(part: Part) -> bool:
    """Whether mpirun has to be told that ranks may be lost."""
    return "guard.lost=shrink" in part.place.words or (
        part.place.engine == "mpi" and "guard.lost" in part.place.words
    )


def limit_of(words: Iterable[str]) -> float:
    return COMPILED_S if any("speed.compile" in word for word in words) else LIMIT_S


def run_at_place(part: Part) -> Verdict | None:
    """Like run_part(), with mpirun's option if its place needs it."""
    return run_with_ulfm(part) if needs_ulfm(part) else run_part(part, limit_of(part.words))


def run_with_ulfm(part: Part) -> Verdict | None:
    """Like run_part(), by a separate command with that option of mpirun."""
    part.prepare()
    argv = ["-m", "hvdtrain", *part.words, f"run={part.run}"]
    options = ("--with-ft", "ulfm")
    with Job(
        part.place.ranks,
        argv,
        timeout_s=limit_of(part.words),
        env=ENV | part.env,
        options=options,
        is_warm=True,
    ) as job:
        result = job.wait()
    return (
        None
        if result.returncode == DONE
        else Verdict("failed", f"exit code {result.returncode}\n{result.stderr[-3000:]}")
    )


class Runner:
    """Runs jobs in a folder; a twin that several pairs have runs once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._twins: dict[tuple[str, ...], Part | Verdict] = {}
        self._bases: dict[str, Path] = {}

    def run(self, planned: Planned) -> Found:
        """A pair on its ranks, compared with its twin; then from its middle at another place,
        compared with its ranks."""
        job = self._with_base(planned.job)
        part = Part(job, job.place, self._folder / "ranks")
        command = part.command()
        instead = run_at_place(part)
        if instead is not None:
            is_known = instead.kind == "refused" and all(
                names(instead.why, example.keys) for example in planned.pair.both
            )
            return Found("refused" if is_known else "failed", instead.why, job=command)
        if planned.twin is None:
            reasons = [why for key, why in HAS_NO_TWIN.items() if key in planned.pair.words]
            why = (
                "; ".join(reasons)
                or by_rank(planned.pair)
                or "the other feature multiplies what 16 bits round"
            )
            return self._resumed(part, Found("runs", why, job=command), part, part.place)
        twin = self._twin(self._with_base(planned.twin))
        if isinstance(twin, Verdict):
            return Found("failed", f"what it is compared with: {twin.why}", job=command)
        verdict = compare(left_of(twin.run), left_of(part.run), 0, bound_of(part.words))
        if verdict.kind == "failed":
            return Found("failed", verdict.why, verdict.apart, command)
        if planned.twin.place != ONE:
            return self._resumed(part, Found("alike", "", verdict.apart, command), part, part.place)
        result = Found(verdict.kind, "", verdict.apart, command)
        begins_alone = zlib.crc32(planned.pair.name.encode()) % 2  # half of the pairs
        return (
            self._resumed(part, result, twin, part.place)
            if begins_alone
            else self._resumed(part, result, part, ONE)
        )

    def _resumed(self, part: Part, straight: Found, stopped: Part, place: Place) -> Found:
        """What a pair came to, after a second run from the middle of `stopped` at `place`."""
        again = Part(part.job, place, self._folder / "next", stopped.run)
        way = f"{stopped.place.engine} x {stopped.place.ranks} -> {place.engine} x {place.ranks}"
        instead = run_at_place(again)
        if instead is not None:
            return straight._replace(
                kind="failed", why=f"resumed, {way}: {instead.why}", job=again.command()
            )
        verdict = compare(left_of(part.run), left_of(again.run), STOPPED, bound_of(part.words))
        if verdict.kind == "failed":
            return straight._replace(
                kind="failed",
                why=f"resumed, {way}: {verdict.why}",
                apart=verdict.apart,
                job=again.command(),
            )
        return straight._replace(apart=max(straight.apart, verdict.apart), resumed=way)

    def _twin(self, job: DrawnJob) -> Part | Verdict:
        part = Part(job, job.place, self._folder / f"twin-{len(self._twins)}")
        known = tuple(sorted(part.words))
        if known not in self._twins:
            self._twins[known] = run_at_place(part) or part
        return self._twins[known]

    def _with_base(self, job: DrawnJob) -> DrawnJob:
        """Returns the job with pretrained weights: its model's weights after a step with another
        seed."""
        if f"model.weights={BASE}" not in job.words:
            return job
        of_model = [
            word
            for word in job.words.split()
            if word.startswith(("data.", "task.", "model.", "framework=", "norm."))
        ]
        words = joined(
            COMMON,
            *(word for word in of_model if not word.startswith(OF_PRETRAINED)),
            "stop.steps=1 seed=7",
        )
        if words not in self._bases:
            part = Part(job._replace(words=words), ONE, self._folder / f"base-{len(self._bases)}")
            instead = run_at_place(part)
            assert instead is None, instead
            self._bases[words] = part.run
        return job._replace(words=joined(job.words, f"model.weights={self._bases[words]}"))


def run_pairs(pairs: Sequence[Pair], for_s: float) -> Iterator[tuple[Pair, Found]]:
    """Yields the outcome of each pair. Some run at a time; pairs on the same kind of ranks run one
    after the other, and pairs that torch compiles run last."""
    end_s = time.monotonic() + for_s
    planned = [(pair, plan(pair)) for pair in pairs]
    yield from ((pair, found) for pair, found in planned if isinstance(found, Found))
    jobs = [found for _, found in planned if isinstance(found, Planned)]
    random.Random(0).shuffle(jobs)  # so that some are a sample of all
    groups = [jobs[first : first + AT_A_TIME] for first in range(0, len(jobs), AT_A_TIME)]
    jobs = [each for group in groups for each in sorted(group, key=lambda each: each.job.place[:2])]
    jobs.sort(key=lambda planned: "speed.compile" in planned.pair.words)
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(Path(folder))
        for each in jobs:
            if time.monotonic() > end_s:
                return
            yield each.pair, runner.run(each)


def shown(name: str, found: Found) -> str:
    """A line; of a failure the command as well."""
    line = f"{found.kind:8} {found.apart:8.1e}  {name}  {found.why}".rstrip()
    return f"{line}\n      {found.job}" if found.kind == "failed" else line


SIGNS = {
    "equal": "=",
    "close": "~",
    "alike": "a",
    "runs": "r",
    "refused": "x",
    "refused later": "d",
    "no model": "-",
    "once": "o",
    "failed": "!",
    "not run": "?",
    "same key": ".",
}
MEANINGS = {
    "equal": "runs, and resumes from its middle on another engine or number of ranks, with the "
    "weights of one process to 1e-12 (muon: 1e-8)",
    "close": "runs, with the weights of one process up to 16-bit rounding",
    "alike": "runs, with the weights of the same ranks without the other feature, which changes no "
    "number; the weights of one process differ",
    "runs": "runs, but no other job has the same numbers: with local SGD each rank steps by "
    "itself, Adasum is not a mean, ghost batches depend on each rank's micro-batches, and norms, "
    "muon and unscaled numbers amplify 16-bit rounding",
    "refused": "rejected, with both keys in the message",
    "refused later": "also rejected, because of the data or the task",
    "no model": "the tool has no model that supports both",
    "once": "ran as one of the above in an earlier version; not resumed from its middle yet",
    "failed": "differs, or ends with an error",
    "not run": "not run yet",
    "same key": "two values of one key, or of its options",
}


def page(results: dict[str, Found], of_frameworks: dict[str, str] | None = None) -> str:
    """The matrix, the rows of other frameworks, and the reasons, as Markdown."""
    kinds = {name: kind_of(name, found) for name, found in results.items()}
    counts = Counter(kinds.values())
    running = sum(counts[kind] for kind in (*RUNNING, "once"))
    later = f", {counts['not run']} have not run yet" * (counts["not run"] > 0)
    lines = [
        "# Supported combinations",
        "",
        "This page lists every pair of features. A feature is named by the settings that turn it "
        "on. Each pair is tried as a job of four steps on two to four ranks, in float64 with SGD.",
        "`python tests/support/combinations.py docs/combinations.md` runs them and writes this "
        f"page. Of {len(results)} pairs of "
        f"{len(EXAMPLES)} settings {running} run, {counts['refused']} are rejected before data is "
        f"read, {counts['refused later']} later, {counts['no model']} have no "
        f"model that supports both, {counts['failed']} are wrong{later}.",
        "All ranks are on one host, so `shard.group=node` has only one group.",
        f"The slow tests run at most {PER_DAY} of the resumed pairs per day, in turn; "
        "`HVDTRAIN_TEST_DAY=2026-11-28` selects a day.",
        "",
        "| sign | pairs | meaning |",
        "|---|---|---|",
        *(
            f"| `{SIGNS[kind]}` | {counts[kind]} | {meaning} |"
            for kind, meaning in MEANINGS.items()
            if counts[kind]
        ),
        "",
        "The row and the column of a sign are the numbers of the two features.",
        "",
        "```text",
        *_matrix(kinds),
        "```",
        "",
        *_frameworks(of_frameworks or {}),
        "## Why pairs are rejected",
        "`not implemented yet` means that the pair is possible in principle. The other reasons "
        "follow from the mathematics, or from the library that is used.",
        "",
        "| feature | not supported with | reason |",
        "|---|---|---|",
        *_reasons(),
        "",
    ]
    return "\n".join(lines)


def _frameworks(rows: dict[str, str]) -> Iterator[str]:
    if not rows:
        return
    yield from (
        "## In other frameworks",
        "Some pairs of the other settings were also run with `framework=jax` or `keras`, in random "
        "order, and compared with one process of that framework.",
        "",
        "| framework | pairs | accepted | run | equal, also resumed | other numbers by definition "
        "| wrong |",
        "|---|---|---|---|---|---|---|",
    )
    yield from (f"| {framework} | {row}" for framework, row in sorted(rows.items()))
    yield ""


def framework_row(pairs: int, results: dict[str, Found]) -> str:
    """Returns the row of a framework with this number of pairs, from the results of pairs that ran
    or cannot run."""
    counts = Counter(found.kind for found in results.values())
    without = counts["refused"] + counts["no model"]
    resumed = sum(found.kind == "equal" and bool(found.resumed) for found in results.values())
    others = counts["alike"] + counts["runs"] + counts["close"]
    return (
        f"{pairs} | {pairs - without} | {len(results) - without} | {resumed} | {others} | "
        f"{counts['failed']} |"
    )


def framework_rows(text: str) -> dict[str, str]:
    return dict(re.findall(r"^\| (jax|keras) \| (.*)$", text, re.MULTILINE))


RUNNING = ("equal", "close", "alike", "runs")  # and resumed


def kind_of(name: str, found: Found) -> str:
    """The kind for the page."""
    if found.kind in RUNNING and not found.resumed:
        return "once"
    if found.kind == "refused" and found.job:
        return "refused later"
    in_16_bits = any(f"{key}={kind}" in name for key in IN_16_BITS for kind in ("fp16", "bf16"))
    return "close" if found.kind == "equal" and in_16_bits else found.kind


def signs_of(text: str) -> dict[str, str]:
    """Pair -> its sign in the matrix of the page, which may be older than some of the examples."""
    rows = re.findall(
        r"^ *\d+  (.+?)(?:  +(\S+))?$", text.partition("```text\n")[2].partition("```")[0], re.M
    )
    found = {
        frozenset((one, other)): sign
        for number, (other, signs) in enumerate(rows)
        for (one, _), sign in zip(rows[:number], signs, strict=True)
    }
    of_pairs = (
        (pair.name, found.get(frozenset(e.words for e in pair.both))) for pair in all_pairs()
    )
    return {name: sign for name, sign in of_pairs if sign is not None}


def is_of(pair: Pair, key: str) -> bool:
    """Whether one of the two features is turned on by words with this key."""
    return any(key in example.keys for example in pair.both)


def read_page(text: str, pairs: Iterable[Pair], key: str = "") -> dict[str, Found]:
    """Returns what the page says about pairs. Refusals and missing models are determined again, but
    with a key only for pairs of its features."""
    kinds = {sign: kind for kind, sign in SIGNS.items()}
    signs = signs_of(text)
    found: dict[str, Found] = {}
    for pair in pairs:
        kind = kinds[signs.get(pair.name, SIGNS["not run"])]
        planned = plan(pair) if not key or is_of(pair, key) else None
        if planned is None and kind in ("refused", "no model"):
            found[pair.name] = Found(kind)
        elif isinstance(planned, Found):
            found[pair.name] = planned
        elif kind == "once":
            found[pair.name] = Found("equal")
        elif kind == "refused later":
            found[pair.name] = Found("refused", job="as the page says")
        elif kind in (*RUNNING, "failed"):
            found[pair.name] = Found(kind, resumed="as the page says")
    return found


def pairs_of_day(day: date, page_text: str) -> list[Pair]:
    """The pairs that the tests run on a day, at most PER_DAY: on two ranks of MPI, not compiled,
    and resumed when the page was written.

    A pair has a day of the month, by its name. Where a day has too many pairs, each month takes
    some of them: all have run after as many months as the most crowded day needs.
    """
    known = [SIGNS[kind] for kind in RUNNING]
    names = [
        name
        for name, sign in signs_of(page_text).items()
        if sign in known and 1 + zlib.crc32(name.encode()) % 31 == day.day
    ]
    pairs = {pair.name: pair for pair in all_pairs()}
    quick = [
        pairs[name]
        for name in names
        if not any(word in name for word in ("speed.compile", "framework=jax"))
    ]
    on_two = [
        pair
        for pair in quick
        if isinstance(planned := plan(pair), Planned) and planned.job.place[:2] == ("mpi", 2)
    ]
    months = -(-len(on_two) // PER_DAY) or 1
    return on_two[(12 * day.year + day.month) % months :: months]


def _matrix(kinds: dict[str, str]) -> Iterator[str]:
    width = max(len(example.words) for example in EXAMPLES)
    for place in (10, 1):
        yield " " * (width + 7) + "".join(
            str(number // place % 10) for number in range(1, len(EXAMPLES))
        )
    for number, example in enumerate(EXAMPLES, start=1):
        signs = "".join(
            SIGNS[kinds.get(Pair(other, example).name, "same key")]
            for other in EXAMPLES[: number - 1]
        )
        yield f"{number:3}  {example.words:{width}}  {signs}".rstrip()


def _reasons() -> Iterator[str]:
    """What each feature excludes, from its own file."""
    features = {id(example.feature): example.feature for example in EXAMPLES}
    for feature in features.values():
        excluded: dict[tuple[str, str], list[str]] = {}
        for row in feature.excludes:
            needed = row.words if row.when else ""  # else they are of the excluded value
            reason = joined(feature.examples[0], needed), row.why or feature.why
            excluded.setdefault(reason, []).append(f"`{row.key}={as_yaml(row.values.example)}`")
        for (words, why), keys in excluded.items():
            yield f"| `{words}` | {', '.join(dict.fromkeys(keys))} | {why} |"


def read_results(path: Path | None) -> dict[str, Found]:
    if path is None or not path.exists():
        return {}
    return {name: Found(*found) for name, *found in map(json.loads, path.read_text().splitlines())}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("page", type=Path, nargs="?", help="docs/combinations.md")
    parser.add_argument(
        "--jobs-only",
        nargs="+",
        metavar="PAIR",
        help="these pairs, and no page: 'comm.local_steps=2 + optim.ema=0.8'",
    )
    parser.add_argument(
        "--signs",
        help="the pairs with these signs on the page, as `?o`; the others keep what it says",
    )
    parser.add_argument(
        "--of",
        default="",
        metavar="KEY",
        help="only pairs of the features that this key turns on, as `augment.erase`; the others "
        "keep what the page says",
    )
    parser.add_argument(
        "--framework", choices=("jax", "keras"), help="all pairs with this framework"
    )
    parser.add_argument(
        "--results", type=Path, help="a file of results, to which those of more pairs are added"
    )
    parser.add_argument(
        "--for-s", type=float, default=float("inf"), help="after these seconds no job begins"
    )
    args = parser.parse_args()
    if (args.signs or args.of) and (args.framework or not args.page):
        parser.error("--signs and --of choose pairs of the page")
    pairs = {
        pair.name: pair
        for pair in all_pairs(f"framework={args.framework}" if args.framework else "")
    }
    if unknown := [name for name in args.jobs_only or () if name not in pairs]:
        parser.error(f"no pair: {unknown[0]}; known are, as examples: {', '.join(list(pairs)[:3])}")
    results = {} if args.jobs_only else read_results(args.results)
    wanted = set(args.jobs_only or pairs) - set(results)
    if args.of and not any(is_of(pair, args.of) for pair in pairs.values()):
        parser.error(f"--of {args.of}: no feature has examples with this key")
    if args.signs or args.of:
        kept = read_page(args.page.read_text(), pairs.values(), args.of)
        before = {name: kind_of(name, kept.get(name, Found("not run"))) for name in pairs}
        wanted = {
            name
            for name in wanted
            if SIGNS[before[name]] in (args.signs or "".join(SIGNS.values()))
            and (not args.of or is_of(pairs[name], args.of))
        }
        results = kept | results
    todo = [pair for name, pair in pairs.items() if name in wanted]
    with (args.results or Path("/dev/null")).open("a") as file:
        for pair, found in run_pairs(todo, args.for_s):
            results[pair.name] = found
            file.write(json.dumps([pair.name, *found]) + "\n")
            file.flush()
            if found.kind not in ("refused", "no model") or args.jobs_only:
                print(shown(pair.name, found), flush=True)
    end_all()
    print(
        f"{len(results)} of {len(args.jobs_only or pairs)} pairs: "
        f"{dict(Counter(found.kind for found in results.values()))}"
    )
    has_failed = any(found.kind == "failed" for found in results.values())
    if args.page and not args.jobs_only:
        text = args.page.read_text() if args.page.exists() else ""
        rows = framework_rows(text)
        if args.framework:
            rows[args.framework] = framework_row(len(pairs), results)
            pairs = {pair.name: pair for pair in all_pairs()}
            results = read_page(text, pairs.values())
        of_page = {name: results.get(name, Found("not run")) for name in pairs}
        args.page.write_text(page(of_page, rows))
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
