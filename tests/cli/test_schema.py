"""The JSON Schema of configuration files: it has every key, and accepts and rejects the same files
as the reader."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from hvdtrain.__main__ import main
from hvdtrain.config import plugins
from hvdtrain.config.read import configure
from hvdtrain.config.schema import known_keys
from hvdtrain.config.yaml_reader import Loader
from hvdtrain.errors import UserError
from hvdtrain.extras.schema.command import json_schema, schema

CONFIGS = Path(__file__).parents[2] / "configs"
RIGHT = [
    "epochs: 3\nbatch: {size: 32, micro: null}\noptim.base_lr: 1e-3\n",
    "data:\n  # nothing\nmodel: {name: mlp, widths: [3, 4], dropout: 0.5}\n",
    "model: {widths: [1, 2, 3, 4]}\n",  # which model, the command line says
    "model: {name: convnet, norm: false, widths: [3]}\n",
    "model: {name: my.own:Net, anything: {at: [all, 1]}}\noptim: {name: torch.optim.RMSprop, "
    "alpha: 0.9}\n",
    "model.name: my.own:Net\nmodel.anything: 3\n",
    "batch: {size: '${epochs}', evaluate: 7}\nmodel: {name: mlp, dropout: "
    "'${recipe.gamma}'}\naugment.flip: ${comm.tune}\n",
    "epochs: 0.5\nrecipe: {warmup: 500 steps, grow_at: [1e6 samples, 10%]}\nrecipe.chain: "
    "[{length: 2e8 tokens}, {}]\n",
    "epochs:\nstop: {steps: 5, time: 2h}\nrecipe.warmup: ${batch.size}\n",
    "stop: {epochs: 2.25}\nmax_steps: 3\n",
    "stop.epochs: 2.25\nmax_steps: ${seed}\n",
    "run: 007\nguard: {max_time: 90, stall_s: null}\nresume: no\n",
    "recipe: {chain: [{kind: steps, length: 3, milestones: [1, 2.5, 300 steps]}, {}]}\nlog: "
    "{trackers: [wandb]}\n",
    "optim: {name: larc, mode: scale, clip_norm: 1}\ndata: {name: synthetic, shape: [3, 3, "
    "1]}\ncomm.engine: mpi\nframework: torch\n",
]
WRONG = [
    "epochs: 0\n",
    "epochs: x\n",
    "epochs: [1]\n",
    "epochs: '3'\n",
    "epochs: true\n",
    "epochs: 10000000000\n",
    "stop: {epochs: x}\n",
    "max_steps: 1.5\n",
    "recipe.warmup: 5 minutes\n",
    "recipe.warmup: [1]\n",
    "recipe.warmup: -1\n",
    "recipe: {chain: [{epochs: 3}]}\n",
    "speed: auto\n",
    "sead: 3\n",
    "batch: {sise: 3}\n",
    "batch.sise: 3\n",
    "batch: 3\n",
    "comm.wire: none\n",
    "model.options: {a: 1}\n",
    "data.rot: /x\n",
    "optim: {momentum: 1}\n",
    "optim: {clip_norm: 0}\n",
    "stop.target: high\n",
    "augment.flip: 1\n",
    "recipe.milestones: 3\n",
    "comm: {reduce: foo}\n",
    "comm.engine: nccl\n",
    "framework: tf\n",
    "data.name: mnst\n",
    "model: {name: resnet19}\n",
    "log.trackers: [x]\n",
    "model: {name: mlp, zero_gamma: true}\n",
    "model: {widhts: [3]}\n",
    "model.widhts: [3]\n",
    "optim: {name: sgd, beta2: 0.9}\n",
    "optim: {name: larc, mode: x}\n",
    "data: {name: synthetic, shape: [3, 3]}\n",
    "model: {name: mlp, widths: 3}\n",
    "recipe: {chain: [{kind: x}]}\n",
    "recipe: {chain: [{king: steps}]}\n",
    "recipe: {chain: {kind: steps}}\n",
    "batch.size: ${a b}\n",
]


def mistakes(content: str) -> list[str]:
    validator = jsonschema.Draft202012Validator(json_schema())
    return [error.message for error in validator.iter_errors(yaml.load(content, Loader))]


@pytest.mark.in_turn
@pytest.mark.parametrize("content", RIGHT)
def test_what_is_read_is_right(tmp_path: Path, content: str) -> None:
    (tmp_path / "x.yaml").write_text(content)
    plugins.check_names(configure(str(tmp_path / "x.yaml"), []))
    assert mistakes(content) == []


@pytest.mark.in_turn
@pytest.mark.parametrize("content", WRONG)
def test_what_is_refused_is_wrong(tmp_path: Path, content: str) -> None:
    (tmp_path / "x.yaml").write_text(content)
    with pytest.raises(UserError):
        plugins.check_names(configure(str(tmp_path / "x.yaml"), []))
    assert mistakes(content)


def test_the_command_prints_the_schema_of_the_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json_schema()
    with pytest.raises(UserError, match="schema takes no arguments: x"):
        schema(["x"])


def test_every_key_and_option_has_a_description_an_editor_can_show() -> None:
    tree = json_schema()
    tables = {"": tree["properties"]} | {
        name: kind["properties"] for name, kind in tree["$defs"].items() if name != "reference"
    }
    missing = [
        f"{name}.{key}"
        for name, table in tables.items()
        for key, value in table.items()
        if not {"description", "$ref"} & set(value)
    ]
    assert missing == []
    dotted = {key for key in known_keys() if "." in key}
    assert {
        key for key in dotted if f"^{key.replace('.', chr(92) + '.')}$" in tree["patternProperties"]
    } == dotted
    described = tree["$defs"]["ModelConfig"]["properties"]["widths"]["description"]
    assert (
        "wide_resnet: channels of the stem" in described
        and "mlp: neurons of each hidden layer" in described
    )


def test_the_tool_that_editors_and_ci_use_accepts_every_configuration(tmp_path: Path) -> None:
    files = sorted(CONFIGS.rglob("*.yaml"))
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("batch:\n  sise: 3\n")
    (tmp_path / "schema.json").write_text(json.dumps(json_schema()))
    check = [
        sys.executable,
        "-m",
        "check_jsonschema",
        "--schemafile",
        str(tmp_path / "schema.json"),
    ]
    good = subprocess.run([*check, *map(str, files)], capture_output=True, text=True, check=False)
    assert good.returncode == 0, good.stdout
    bad = subprocess.run([*check, str(wrong)], capture_output=True, text=True, check=False)
    assert (
        bad.returncode == 1
        and "$.batch: Additional properties are not allowed ('sise' was unexpected)" in bad.stdout
    )
    for path in files:
        schema = os.path.relpath(CONFIGS / "schema.json", path.parent)
        assert path.read_text().splitlines()[0] == f"# yaml-language-server: $schema={schema}"
