"""The start of a job: nothing is imported that it does not use."""

from __future__ import annotations

from pathlib import Path

import ranks

from hvdtrain.core.extras import (
    environment_recorder,
    extras,
    gauges_of_every_job,
    throughput_measure,
)

JOB = ["data.name=synthetic", "data.samples=64", "model.name=mlp", "max_steps=12", "resume=no"]


def test_a_job_searches_for_garbage_only_after_its_imports_and_never_among_them(
    tmp_path: Path,
) -> None:
    program = f"""
import gc
from hvdtrain.cli.train import train
frozen = []  # objects that are never searched, at each search
gc.callbacks.append(lambda phase, info: frozen.append(gc.get_freeze_count()))
assert not train({[*JOB, f"run={tmp_path}"]!r})
assert gc.isenabled() and frozen and min(frozen) > 50_000, frozen
"""
    done = ranks.python(["-c", program], is_warm=False)
    assert done.returncode == 0, done


def test_the_end_of_a_command_searches_nothing_for_garbage() -> None:
    program = (
        "import gc, sys; from hvdtrain.__main__ import main; sys.argv[1:] = ['--version']; "
        "main(); print(len(gc.get_objects()))"
    )
    done = ranks.python(["-c", program], is_warm=False)
    assert done.returncode == 0 and int(done.stdout.split()[-1]) < 100, done  # of some 30,000


def test_nothing_is_imported_that_the_job_does_not_use(tmp_path: Path) -> None:
    heavy = (
        "sympy",
        "torch._dynamo",
        "torch._inductor",
        "torchvision",
        "jax",
        "mpi4py",
        "horovod",
        "matplotlib",
        "sklearn",
        "scipy",
        "PIL",
        "hvdtrain.comm.cores.bind",
        "hvdtrain.comm.counted",
        "hvdtrain.data.datasets.text",
        "hvdtrain.data.tokenizer",
        "hvdtrain.data.user_data.as_source",
        "hvdtrain.frameworks.host",
        "hvdtrain.frameworks.keras.build",
        "hvdtrain.frameworks.torch.augment",
        "hvdtrain.extras.noise_scale.meter",
        "hvdtrain.extras.noise_scale.scale",
        "hvdtrain.frameworks.torch.of_transformers",
        "hvdtrain.frameworks.torch.not_used",
        "hvdtrain.frameworks.torch.recompute",
        "hvdtrain.frameworks.torch.thaw",
        "hvdtrain.tasks.several_inputs",
        "hvdtrain.training.given",
        "hvdtrain.training.pretrained",
        *(f"hvdtrain.frameworks.torch.parallel.{way}" for way in ("local_sgd", "zero_1_and_2")),
        *(
            f"hvdtrain.extras.{name}.{module}"
            for name in extras()
            for module in (
                "arrangement",
                "image_source",
                "sequences",
                "by_framework",
                "survival",
                "load",
                "lora",
                "transformers",
                "tables",
                "columns.encoded_table",
                "divided_model",
                "shown_masks",
                "step_profiler",
                "stored.source",
            )
        ),
    )
    code = (
        "import sys; from hvdtrain.__main__ import main; code = "
        f"main({[*JOB, f'run={tmp_path}']!r}); assert code == 0, code\n"
    )
    code += f"print('loaded', [name for name in {heavy} if name in sys.modules])"
    result = ranks.python(["-c", code], is_warm=False)
    assert result.stdout.splitlines()[-1] == "loaded []", result.stdout[-500:] + result.stderr


def test_the_smallest_job_imports_few_modules(tmp_path: Path) -> None:
    """A linear model of the digits in NumPy, on one rank. Extras that it does not use add only
    their keys, and what they register."""
    words = ["framework=numpy", "model.name=linear", "stop.steps=2", f"run={tmp_path / 'run'}"]
    code = f"import sys; from hvdtrain.__main__ import main; assert main({words!r}) == 0\n"
    code += "print(*(name for name in sys.modules if name.partition('.')[0] == 'hvdtrain'))"
    done = ranks.python(["-c", code], is_warm=False)
    assert done.returncode == 0, done.stderr
    names = done.stdout.splitlines()[-1].split()
    of_extras = [name.split(".")[2:] for name in names if name.startswith("hvdtrain.extras.")]
    assert len(names) - len(of_extras) <= 188, f"{len(names) - len(of_extras)}; 188 when written"
    in_every_job = (*gauges_of_every_job(), environment_recorder(), throughput_measure())
    registrations = ([], ["keys"], ["features"])
    more = {path[0] for path in of_extras if path[1:] not in registrations}
    assert more == {name.split(".")[2] for name in in_every_job if name}
