"""The JAX framework from outside: the user's own function, refusals, its start, and whole jobs on
ranks."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ranks import ENGINES, FULL, Result, mpirun, python

from hvdtrain.__main__ import main
from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.comm.driver_files import DriverFiles
from hvdtrain.config.read import configure
from hvdtrain.core.progress import Hyper
from hvdtrain.errors import UserError
from hvdtrain.frameworks.jax.start import start_jax
from hvdtrain.frameworks.learner import Learner
from hvdtrain.tasks.classification import Classification
from hvdtrain.training.build import build_learner

pytestmark = [pytest.mark.usefixtures("jax_compilation_cache"), pytest.mark.in_turn]

OWN = "model.name=test_jax_job:own"
TASK = Classification((5, 4, 2), 3, np.array([0.4, 0.5]), np.array([0.2, 0.3]))


def learner(*words: str) -> Learner:
    config = configure(None, ["framework=jax", "model.name=linear", "speed.precision=fp64", *words])
    return build_learner(config, TASK, SingleProcessCommunicator())


def own(shape: tuple[int, int, int], classes: int, width: int = 4, what: str = "") -> Any:
    """A user's own model: nested parameters, no layer of ours; `what` makes it wrong in one way."""

    def init(key: jax.Array) -> Any:
        key, _ = jax.random.split(key)
        layers = {
            "in": {"w": jax.random.normal(key, (*shape, width))},
            "out": [jnp.zeros((width, classes)), jnp.zeros(classes)],
        }
        wrong = {
            "empty": {},
            "integer": layers | {"step": jnp.zeros(2, int)},
            "number": layers | {"scale": 1.0},
            "bare": jnp.zeros(3),
        }
        return wrong.get(what, layers | {"in.w": jnp.zeros(1)} if what == "twice" else layers)

    def apply(params: Any, x: jax.Array) -> Any:
        assert x.dtype == jnp.zeros(1).dtype, (
            "arrays that a user makes are of the framework's precision"
        )
        hidden = jnp.tanh(jnp.einsum("nhwc,hwck->nk", x, params["in"]["w"]))
        logits = hidden @ params["out"][0] + params["out"][1]
        return {"few": logits[:, :2], "pair": (logits, hidden), "hits": logits > 0}.get(
            what, logits
        )

    return "a string" if what == "string" else (init, apply)


def test_the_users_own_function_trains() -> None:
    one = learner(OWN, "model.width=6")
    before = one.state()
    assert {name: a.shape for name, a in before.items() if name[0] == "p"} == {
        "p.in.w": (5, 4, 2, 6),
        "p.out.0": (6, 3),
        "p.out.1": (3,),
    }
    assert one.describe() == "test_jax_job:own, 261 parameters, jax float64 on cpu:0, no reduction"
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (6, 5, 4, 2), dtype=np.uint8)
    y = np.array([0, 1, 2, 2, 2, 1])
    one.step(
        [one.to_device({"x": x, "y": y})], Hyper(lr=0.6, momentum=0.0, weight_decay=0.0, batch=6), 0
    )
    # zero logits: the gradient of the last bias is 1/3 - share of the label
    expected = 0.6 * (np.array([1, 2, 3]) / 6 - 1 / 3)
    np.testing.assert_allclose(one.state()["p.out.1"], expected, rtol=1e-12)
    hidden = np.tanh(np.einsum("nhwc,hwck->nk", (x / 255 - TASK.mean) / TASK.std, before["p.in.w"]))
    np.testing.assert_allclose(
        one.state()["p.out.0"], 0.1 * hidden.T @ (np.eye(3)[y] - 1 / 3), rtol=1e-9, atol=1e-15
    )


def test_the_users_own_function_makes_arrays_in_the_frameworks_precision() -> None:
    for precision in ("fp32", "fp64", "fp32"):
        one = learner(OWN, f"speed.precision={precision}")
        sums = one.evaluate(
            one.to_device({"x": np.zeros((1, 5, 4, 2), np.uint8), "y": np.array([1])})
        )
        assert float(sums["loss"]) == pytest.approx(
            np.log(3), rel=1e-6 if precision == "fp32" else 1e-15
        )


@pytest.mark.parametrize(
    ("words", "what", "fix"),
    [
        (
            ["speed.device=cuda"],
            "no CUDA device is visible to jax",
            "speed.device=cpu, or a jax built for this GPU",
        ),
        (
            ["optim.name=torch.optim.RMSprop"],
            "torch.optim.RMSprop is a torch optimizer, but framework=jax needs a rule",
            "framework=torch",
        ),
        (
            ["model.name=alexnet"],
            "unknown name for framework=jax: alexnet",
            "known: convnet, gpt, linear, mlp, resnet101",
        ),
        (
            ["model.name=mlp", "model.widths=[0]"],
            "widths (0,) with dropout 0.0 are not valid",
            "1 or more",
        ),
        (["model.name=convnet", "model.widths=[]"], "widths () are not valid", "1 or more"),
        (["model.name=convnet", "model.dense=[0]"], "dense (0,) is not valid", "1 or more"),
        (
            [OWN, "model.depth=3"],
            "does not fit: got an unexpected keyword argument 'depth'",
            "model.<name>=<value>",
        ),
        (
            [OWN, "model.what=string"],
            "test_jax_job:own returned a str, not a pair of functions (init, apply)",
            "init(key) -> parameters",
        ),
        (
            [OWN, "model.what=empty"],
            "test_jax_job:own has no parameter to train",
            "let init(key) return a dict of arrays",
        ),
        (
            [OWN, "model.what=integer"],
            "parameter step of test_jax_job:own is an array of int64",
            "only arrays of real numbers",
        ),
        (
            [OWN, "model.what=number"],
            "parameter scale of test_jax_job:own is a float",
            "only arrays of real numbers",
        ),
        (
            [OWN, "model.what=bare"],
            "1 parameters of test_jax_job:own are named ''",
            "a unique name, in a dict",
        ),
        (
            [OWN, "model.what=twice"],
            "2 parameters of test_jax_job:own are named 'in.w'",
            "a unique name, in a dict",
        ),
        (
            [OWN, "model.what=few"],
            "images (2, 5, 4, 2) the model returns float64 (2, 2), not logits (2, 3)",
            "outputs of that shape",
        ),
        (
            [OWN, "model.what=pair"],
            "for images (2, 5, 4, 2) the model returns tuple, not logits (2, 3)",
            "outputs of that shape",
        ),
        (
            [OWN, "model.what=hits"],
            "the model returns bool (2, 3), not logits (2, 3)",
            "outputs of that shape",
        ),
    ],
)
def test_impossible_settings_are_refused_at_build_time(
    words: list[str], what: str, fix: str
) -> None:
    if "speed.device=cuda" in words and jax.devices()[0].platform == "gpu":
        pytest.skip("a CUDA device is here")
    with pytest.raises(UserError) as caught:
        learner(*words)
    assert what in caught.value.what
    assert fix in caught.value.fix


@pytest.mark.parametrize(
    ("found", "what"),
    [
        (None, "framework=jax needs jax: "),
        (
            SimpleNamespace(__version__="0.6.2"),
            "framework=jax needs jax 0.8 or later; this is 0.6.2",
        ),
    ],
)
def test_a_missing_or_old_jax_is_refused(
    found: Any, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jax", found)
    with pytest.raises(UserError) as caught:
        learner()
    assert caught.value.what.startswith(what)
    assert (caught.value.where, caught.value.fix) == (
        "framework, command line",
        "pip install 'hvdtrain[jax]'",
    )


NO_GPUS = DriverFiles(Path("/nowhere"), Path("/nowhere"))


class FourOnThisHost(SingleProcessCommunicator):
    def allgather_object(self, thing: Any) -> list[Any]:
        return [thing, thing, ("another host", thing[1]), (thing[0], (99,))]


@pytest.mark.parametrize(
    ("env", "threads"),
    [
        ({}, None),
        ({"OMP_NUM_THREADS": "3"}, "3"),
        ({"OMP_NUM_THREADS": "3", "PJRT_NPROC": "5"}, "5"),
    ],
)
def test_jax_starts_with_this_ranks_part_of_the_cores(
    env: dict, threads: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str | None] = []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    jax = SimpleNamespace(config=Flags(), devices=lambda: seen.append(os.environ.get("PJRT_NPROC")))
    start_jax(jax, configure(None, ["framework=jax"]), FourOnThisHost(), NO_GPUS)
    # two of the four have the same cores
    assert seen == [threads or str(max(1, len(os.sched_getaffinity(0)) // 2))]
    assert os.environ.get("PJRT_NPROC") == env.get("PJRT_NPROC"), "left as it was"


class Flags:
    """jax.config, before JAX starts."""

    def __init__(self, **chosen: str | None) -> None:
        self.values = {
            "jax_cuda_visible_devices": "all",
            "jax_rocm_visible_devices": "all",
            "jax_platforms": None,
        } | chosen
        self.updates: list[tuple[str, str | None]] = []

    @property
    def jax_platforms(self) -> str | None:
        return self.values["jax_platforms"]

    def read(self, name: str) -> str | None:
        assert name != "jax_platforms", "read() takes flags only"
        return self.values[name]

    def update(self, name: str, value: str | None) -> None:
        self.values[name] = value
        self.updates.append((name, value))


def host_with(tmp_path: Path, nvidia: int = 0, amd: int = 0) -> DriverFiles:
    """The files of so many GPUs, and of the processor, which AMD's driver lists as a node."""
    (tmp_path / "dev").mkdir()
    for number in range(nvidia):
        (tmp_path / "dev" / f"nvidia{number}").touch()
    (tmp_path / "dev" / "nvidiactl").touch()
    for node in range(amd + 1):
        folder = tmp_path / "sys/class/kfd/kfd/topology/nodes" / str(node)
        folder.mkdir(parents=True)
        (folder / "properties").write_text(
            f"cpu_cores_count {64 * (node == 0)}\nsimd_count {440 * (node > 0)}\n"
        )
    return DriverFiles(tmp_path / "dev", tmp_path / "sys")


@pytest.mark.parametrize(
    ("host", "place", "words", "environ", "shown", "shares"),
    [
        ({"nvidia": 4}, (2, 4), "", {}, {"cuda": "2"}, False),
        ({"nvidia": 4}, (1, 2), "speed.devices=2", {}, {"cuda": "2,3"}, False),
        ({"nvidia": 4}, (2, 3), "speed.devices=2", {}, {}, True),  # too few: pick_devices() says so
        ({"nvidia": 1}, (2, 3), "", {}, {"cuda": "0"}, True),
        ({"nvidia": 8}, (3, 4), "", {"CUDA_VISIBLE_DEVICES": "4,5"}, {"cuda": "1"}, True),
        # by srun --gpus-per-task=1; whether ranks share it is not known
        ({"nvidia": 8}, (3, 4), "", {"CUDA_VISIBLE_DEVICES": "6"}, {"cuda": "0"}, True),
        ({"nvidia": 8}, (0, 1), "", {"CUDA_VISIBLE_DEVICES": ""}, {}, False),
        ({"amd": 8}, (3, 8), "", {}, {"rocm": "3"}, False),
        ({"amd": 8}, (1, 2), "", {"ROCR_VISIBLE_DEVICES": "6,7"}, {"rocm": "1"}, False),
        ({}, (0, 2), "", {}, {}, True),
        ({"nvidia": 1}, (1, 2), "", {"XLA_CLIENT_MEM_FRACTION": ".4"}, {"cuda": "0"}, False),
    ],
)
def test_a_rank_shows_jax_its_own_gpus_alone(
    host: dict[str, int],
    place: tuple[int, int],
    words: str,
    environ: dict[str, str],
    shown: dict[str, str],
    shares: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """JAX would open all GPUs of the host on each rank, and take 75 % of the memory of each."""
    for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    ranks = SingleProcessCommunicator()
    ranks.local_rank, ranks.local_size = place
    flags = Flags()
    seen: list[str | None] = []
    jax = SimpleNamespace(
        config=flags,
        devices=lambda: seen.append(os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE")),
    )
    config = configure(None, ["framework=jax", *words.split()])
    start_jax(jax, config, ranks, host_with(tmp_path, **host))
    assert dict(flags.updates) == {f"jax_{name}_visible_devices": n for name, n in shown.items()}
    assert seen == ["false" if shares else None]
    assert "XLA_PYTHON_CLIENT_PREALLOCATE" not in os.environ, "left as it was"


def test_gpus_that_the_user_shows_jax_stay_shown(tmp_path: Path) -> None:
    flags = Flags(jax_cuda_visible_devices="3")
    jax = SimpleNamespace(config=flags, devices=lambda: None)
    config = configure(None, ["framework=jax"])
    start_jax(jax, config, SingleProcessCommunicator(), host_with(tmp_path, nvidia=4))
    assert flags.updates == []


@pytest.mark.parametrize("asked", [None, "cuda,cpu"])
def test_jax_on_the_cpu_opens_no_gpu(asked: str | None, tmp_path: Path) -> None:
    flags = Flags(jax_platforms=asked)
    seen = []
    jax = SimpleNamespace(config=flags, devices=lambda: seen.append(flags.jax_platforms))
    config = configure(None, ["framework=jax", "speed.device=cpu"])
    start_jax(jax, config, SingleProcessCommunicator(), host_with(tmp_path, nvidia=4))
    assert seen == [asked or "cpu"] and flags.jax_platforms == asked
    assert flags.read("jax_cuda_visible_devices") == "all"


def test_jax_has_the_settings_that_a_start_uses() -> None:
    """By their real names, which jax.config knows."""
    for name in ("jax_cuda_visible_devices", "jax_rocm_visible_devices"):
        assert jax.config.read(name) == "all"
        jax.config.update(name, "all")
    jax.config.update("jax_platforms", jax.config.jax_platforms)


WORDS = [
    "-m",
    "hvdtrain",
    "model.name=mlp",
    "speed.precision=fp64",
    "batch.size=33",
    "optim.base_lr=0.05",
    "recipe.warmup=0.5",
]


def job(size: int, run: Path, *words: str) -> Result:
    argv = [*WORDS, *words, f"run={run}"]
    result = mpirun(size, argv) if size else python(argv)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result


def epochs(run: Path) -> list[dict]:
    return [
        e
        for e in map(json.loads, (run / "events.jsonl").read_text().splitlines())
        if e["kind"] == "epoch"
    ]


@pytest.fixture(scope="module")
def torchs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The run folders of torch's first epoch on one process, and of the two after it."""
    folder = tmp_path_factory.mktemp("torch")
    first = folder / "first"
    rest = folder / "rest"
    job(0, first, "framework=torch", "epochs=1")
    job(0, rest, "framework=torch", "epochs=3", f"resume={first}")
    return first, rest


@pytest.mark.parametrize(
    "engine",
    [ENGINES[0], *[pytest.param("horovod", marks=[*ENGINES[1].marks, pytest.mark.slow])] * FULL],
)
def test_two_ranks_continue_a_job_of_torch(
    engine: str, torchs: tuple[Path, Path], tmp_path: Path
) -> None:
    run, (first, rest) = tmp_path / "run", torchs
    found = job(2, run, "framework=jax", "epochs=3", f"resume={first}", f"comm.engine={engine}")
    assert "mlp, 9,610 parameters, jax float64 on cpu:0, gradients by one allreduce" in found.stdout
    assert "resume  from step 44" in found.stdout
    for mine, theirs in zip(epochs(run), epochs(rest), strict=True):
        for key in ("epoch", "train_loss", "val_loss", "val_accuracy", "val_count", "lr"):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-12), key
    assert [e["epoch"] for e in epochs(run)] == [2, 3]
    assert epochs(run)[-1]["val_accuracy"] > 0.9


def test_a_convnet_is_the_same_network_in_both_frameworks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With norms, its default: JAX goes on where torch stopped, and torch where JAX did, with the
    losses of torch alone."""
    small = [
        "data.name=digits",
        "model.name=convnet",
        "model.widths=[2]",
        "speed.precision=fp64",
        "guard.start_s=6000",
        "log.every_steps=1",
    ]

    def losses(run: str, *words: str) -> list[float]:
        assert main([*small, *words, f"run={tmp_path / run}"]) == 0
        events = map(json.loads, (tmp_path / run / "events.jsonl").read_text().splitlines())
        return [e["loss"] for e in events if e["kind"] == "step"]

    whole = losses("whole", "stop.steps=3")
    found = losses("first", "stop.steps=1")
    found += losses("second", "framework=jax", "stop.steps=2", f"resume={tmp_path / 'first'}")
    assert (
        "first weights are drawn by JAX: other numbers than framework=torch draws with the same "
        "seed" in capsys.readouterr().out
    )
    found += losses("third", "stop.steps=3", f"resume={tmp_path / 'second'}")
    assert found == pytest.approx(whole, rel=1e-12) and len(found) == 3


def test_work_of_a_rank_is_reported_only_where_phases_are_timed() -> None:
    """On one rank nothing waits for the device in a step, but with log.step_times."""
    assert (
        learner().waits_only_in_communication,
        learner("log.step_times=true").waits_only_in_communication,
    ) == (False, True)
