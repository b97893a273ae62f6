"""YAML and key=value: what is read, and the message of each mistake."""

from __future__ import annotations

import math
import typing
from pathlib import Path

import pytest
from pydantic import ValidationError
from ranks import needs_extra

from hvdtrain.config import help, schema
from hvdtrain.config.plugins import load_dotted
from hvdtrain.config.read import configure, to_yaml
from hvdtrain.config.sections.batch import BatchConfig
from hvdtrain.config.sections.log import LogConfig
from hvdtrain.config.sections.model import ModelConfig
from hvdtrain.errors import UserError


def read(*words: str, text: str = "", tmp: Path | None = None) -> schema.Config:
    path = None
    if tmp is not None:
        path = tmp / "x.yaml"
        path.write_text(text)
    return configure(str(path) if path else None, words)


def error(*words: str, text: str = "", tmp: Path | None = None) -> UserError:
    with pytest.raises(UserError) as caught:
        read(*words, text=text, tmp=tmp)
    return caught.value


def test_defaults_are_the_schema() -> None:
    assert read() == schema.Config()


def test_arguments_override_the_file_and_the_last_argument_counts(tmp_path: Path) -> None:
    text = "epochs: 3\nbatch:\n  size: 12\noptim: {base_lr: 1e-3}\n"
    c = read("batch.size=13", "--batch.size=14", text=text, tmp=tmp_path)
    assert (c.epochs, c.batch.size, c.optim.base_lr) == (3, 14, 0.001)


def test_unknown_keys_of_open_sections_are_options() -> None:
    c = read("model.widths=[1,2,3,4]", "data.samples=100")
    assert c.model.options == {"widths": [1, 2, 3, 4]}
    assert c.data.options == {"samples": 100}


def test_the_printed_configuration_reads_back_equal(tmp_path: Path) -> None:
    c = read(
        "model.name=mlp",
        "model.widths=[3]",
        "stop.target=0.85",
        "data.root=/a b/c",
        "seed=9223372036854775807",
    )
    assert read(text=to_yaml(c), tmp=tmp_path) == c


def test_keys_may_be_dotted_and_sections_empty(tmp_path: Path) -> None:
    c = read(
        text="stop.target: 0.9\nbatch.micro: 3\nmodel.widths: [3]\ndata:\n  # root: /x\n",
        tmp=tmp_path,
    )
    assert (c.stop.target, c.batch.micro, c.model.options) == (0.9, 3, {"widths": [3]})


@pytest.mark.parametrize("text", ["no", "007", "1e3", "null and void", "~/x", "a: b"])
def test_a_text_is_taken_as_it_is_written(tmp_path: Path, text: str) -> None:
    assert read(f"run={text}").run == text
    if ":" not in text:
        assert read(text=f"run: {text}", tmp=tmp_path).run == text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[
            ("1e-3", 0.001),
            ("1.5E+2", 150.0),
            ("-.5", -0.5),
            ("1.", 1.0),
            ("1_000", 1000),
            ("0x10", 16),
            ("-.inf", -math.inf),
            ("+1e3", 1000.0),
        ],
        *[
            ("true", True),
            ("no", False),
            ("~", None),
            ("'1e3'", "1e3"),
            ("1e", "1e"),
            ("e3", "e3"),
            (".", "."),
            ("???", "???"),
        ],
        *[
            ("2001-01-01", "2001-01-01"),
            ("[1e3, a, {b: 1}]", [1000.0, "a", {"b": 1}]),
            ("!!float 3", 3.0),
            ("!!str 3", "3"),
        ],
    ],
)
def test_values_of_options_are_printed_as_they_are_read(
    tmp_path: Path, text: str, value: object
) -> None:
    for config in (read(f"model.a={text}"), read(text=f"model.a: {text}", tmp=tmp_path)):
        assert repr(config.model.options) == repr({"a": value})
        assert read(text=to_yaml(config), tmp=tmp_path) == config


@pytest.mark.parametrize(
    ("old", "fix"),
    [
        ("log.sinks=[wandb]", "did you mean log.trackers?"),
    ],
)
@needs_extra("other_words")
def test_a_renamed_key_is_answered_with_the_new_one(tmp_path: Path, old: str, fix: str) -> None:
    key, _, value = old.partition("=")
    (tmp_path / "config.yaml").write_text(f"epochs: 3\n{key}: {value}\n")
    for e, where in (
        (error(old), "command line"),
        (error(f"resume={tmp_path}"), f"{tmp_path}/config.yaml:2"),
    ):
        assert (e.what, e.where, e.fix) == (f"no such key: {key}", where, fix)


def test_null_and_nothing_unset_a_key() -> None:
    assert read("run=null", "stop.target=", "batch.micro=null") == schema.Config()


def test_resume_takes_the_configuration_of_its_run(tmp_path: Path) -> None:
    former = read(
        "batch.size=32", "optim.base_lr=0.001", "model.widths=[5]", "run=elsewhere", "epochs=1"
    )
    (tmp_path / "config.yaml").write_text(to_yaml(former))
    now = configure(None, [f"resume={tmp_path}", "epochs=2", "batch.size=16"])
    assert (now.batch.size, now.optim.base_lr, now.model.options, now.epochs) == (
        16,
        0.001,
        {"widths": [5]},
        2,
    )
    assert (now.run, now.resume) == (None, str(tmp_path))
    assert now.optim.origin("base_lr").startswith(f"{tmp_path}/config.yaml:")
    with pytest.raises(UserError, match="there is no run folder nowhere"):
        configure(None, ["resume=nowhere"])


def test_provenance_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("# a comment\nepochs: 3\nbatch:\n  micro: 2\n  size: 12\n")
    config = configure(str(path), ["seed=2"])
    assert config.where("batch.size") == f"batch.size, {path}:5"
    assert config.where("seed") == "seed, command line"
    assert config.where("run") == "run, default"


@pytest.mark.parametrize(
    ("word", "what", "fix"),
    [
        (
            "data.pad={input_ids:0}",
            "data.pad has the name input_ids:0 without a value",
            "'data.pad={input_ids: 0}'",
        ),
        ("shard.stage=4", "wrong value for shard.stage: 4", "shard.stage takes one of 0, 1, 2, 3"),
        (
            "shard.stage=[]",
            "wrong value for shard.stage: []",
            "shard.stage takes one of 0, 1, 2, 3",
        ),
        ("bach.size=3", "no such key: bach.size", "did you mean batch.size?"),
        ("size=3", "no such key: size", "did you mean batch.size?"),
        ("epoch=3", "no such key: epoch", "did you mean epochs?"),
        ("batch.size.x=3", "no such key: batch.size.x", "did you mean batch.size?"),
        ("zzz=3", "no such key: zzz", "known: framework, run"),
        pytest.param(
            "model=3",
            "no such key: model",
            "model is a section: write model.name=3; --help model lists its keys",
            marks=needs_extra("other_words"),
        ),
        (
            "augment=true",
            "no such key: augment",
            "augment is a section: write augment.<key>=value; --help augment lists its keys",
        ),
        ("epochs=x", "wrong value for epochs: 'x'", "epochs takes a number, or null: epochs=10"),
        (
            "batch.size=1:30",
            "wrong value for batch.size: '1:30'",
            "batch.size takes a whole number: batch.size=64",
        ),
        ("batch.size=010", "wrong value for batch.size: '010'", "batch.size takes a whole number"),
        ("batch.size=!!int 1:30", "1:30 is not of its type !!int", "quote it"),
        (
            "log.trackers=wandb",
            "wrong value for log.trackers: 'wandb'",
            "a list, each a text: 'log.trackers=[wandb]'",
        ),
        (
            "recipe.milestones=30",
            "wrong value for recipe.milestones: 30",
            "a list, each a length: 'recipe.milestones=[30]'",
        ),
        ("stop.epochs=x", "wrong value for epochs: 'x'", "epochs takes a number, or null"),
        ("batch.size=2.5", "wrong value for batch.size: 2.5", "batch.size takes a whole number"),
        ("epochs=[1]", "wrong value for epochs", "epochs takes a number"),
        (
            "optim.base_lr=fast",
            "wrong value for optim.base_lr: 'fast'",
            "optim.base_lr takes a number",
        ),
        (
            "comm.reduce=foo",
            "wrong value for comm.reduce: 'foo'",
            "one of 'auto', 'distributed_optimizer', 'ddp', 'bucket'",
        ),
        (
            "max_steps=many",
            "wrong value for stop.steps: 'many'",
            "stop.steps takes a whole number, or null",
        ),
        ("stop.target=1e31", "stop.target is 1e+31", "give -1e+30 to 1e+30"),
        ("optim.base_lr=.nan", "optim.base_lr is nan", "give 0 or more"),
        ("batch.size=0", "batch.size is 0", "give 1 or more"),
        ("seed=-1", "seed is -1", "give 0 or more"),
        pytest.param(
            *("servers.bound=-1", "servers.bound is -1", "give 0 or more"),
            marks=needs_extra("servers"),
        ),
        ("--fast", "cannot read the argument '--fast'", "write key=value"),
        ("model.widths=[1,", "cannot read the value of 'model.widths=[1,'", "quote it"),
        ("model..x=3", "no such key: model..x", "known: model.name, model.loss"),
        ("recipe.zzz=1", "no such key: recipe.zzz", "known: recipe.scale, recipe.warmup"),
        ("log.momentum=1", "no such key: log.momentum", "did you mean optim.momentum?"),
        ("augment.flip=1", "wrong value for augment.flip: 1", "augment.flip takes true or false"),
        ("epochs=true", "wrong value for epochs: True", "epochs takes a number"),
        ("batch.micro=0", "batch.micro is 0", "give 1 or more, or null"),
        ("epochs=10000000000", "epochs is 10000000000", "give more than 0, up to 1e+09, or null"),
        ("optim.momentum=1", "optim.momentum is 1", "give 0 or more and less than 1, or null"),
        ("data.val_share=1", "data.val_share is 1", "give more than 0 and less than 1, or null"),
        ("optim.clip_norm=0", "optim.clip_norm is 0", "give more than 0, or null"),
        (
            "recipe.chain=[{kind: x}]",
            "wrong value for recipe.chain[0].kind: 'x'",
            "takes one of 'constant', 'steps'",
        ),
        ("recipe.chain=[{king: steps}]", "no such key: recipe.chain[0].king", "did you mean kind?"),
        (
            "optim.groups=[{decya: 0, names: x}]",
            "no such key: optim.groups[0].decya",
            "did you mean decay?",
        ),
        (
            "optim.groups=[{names: [x]}]",
            "wrong value for optim.groups[0].names: ['x']",
            "optim.groups[0].names takes a text",
        ),
        ("optim.groups=[{name: x}]", "no such key: optim.groups[0].name", "did you mean names?"),
        (
            "optim.groups=[{rate: 5}]",
            "optim.groups[0] has no names",
            "optim.groups[0].names takes a text",
        ),
        (
            "optim.groups=5",
            "wrong value for optim.groups: 5",
            "optim.groups takes a list of groups, as in ",
        ),
        ("recipe.chain=[{}, {gamma: -1}]", "recipe.chain[1].gamma is -1", "give 0 to 1000"),
        (
            "recipe.milestones=[.inf]",
            "wrong value for recipe.milestones[0]: inf",
            "give 0 to 1e+09 epochs",
        ),
        (
            "log.trackers=[1]",
            "wrong value for log.trackers[0]: 1",
            "log.trackers takes a list, each a text",
        ),
        ("seed=1e3", "wrong value for seed: 1000.0", "seed takes a whole number: seed=1000"),
        (f"run={'a' * 256}", "a name of 256 bytes: aaa", "a name has at most 255 bytes"),
        (f"data.root={'é' * 128}", "a name of 256 bytes: ééé", "a name has at most 255 bytes"),
        (f"run={'a/' * 1900}a", "a path of 3801 bytes", "a path 3800"),
    ],
)
def test_mistakes_on_the_command_line(word: str, what: str, fix: str) -> None:
    e = error(word)
    assert what in e.what
    assert "command line" in e.where
    assert fix in e.fix


@pytest.mark.parametrize(
    ("text", "what", "line", "fix"),
    [
        (
            "epochs: 3\nbatch:\n  size: 12\n  micr: 3\n",
            "no such key: batch.micr",
            4,
            "did you mean batch.micro?",
        ),
        ("epochs: x", "wrong value for epochs: 'x'", 1, "epochs takes a number"),
        ("epochs: 3\nbatch: 7\n", "no such key: batch", 2, "batch is a section"),
        ("epochs: [\n", "not YAML", 2, "correct that line"),
        ("- a\n", "not YAML: a configuration is lines of `key: value`", 1, "correct that line"),
        (
            "epochs: 3\nepochs: 4\n",
            "epochs is given twice, in lines 1 and 2",
            2,
            "keep one of them",
        ),
        (
            "batch.size: 3\nbatch:\n  size: 4\n",
            "batch.size is given twice, in lines 1 and 3",
            3,
            "keep one of them",
        ),
        (
            "model: &x\n  b: *x\n",
            "not YAML: an alias is not read: write the value again, or ${key}",
            2,
            "correct that line",
        ),
        (
            "epochs: 3\nbatch:\n  size: ${nothing}\n",
            "cannot resolve a value",
            3,
            "correct the ${...}",
        ),
        ("run: runs/${nothing}\n", "cannot resolve a value", 1, "correct the ${...}"),
        (
            "seed: 2\nrun: !!python/object/apply:os.system ['echo hacked']",
            "cannot read the value of run: !!python/object/apply:os.system is not a text",
            2,
            "correct that",
        ),
        (
            "seed: 2\nmodel:\n  widths: &x [*x]\n",
            "not YAML: an alias is not read: write the value again, or ${key}",
            3,
            "correct that line",
        ),
    ],
)
def test_mistakes_in_a_file(tmp_path: Path, text: str, what: str, line: int, fix: str) -> None:
    e = error(text=text, tmp=tmp_path)
    assert what in e.what
    assert f"x.yaml:{line}" in e.where
    assert fix in e.fix


def test_a_missing_file_is_named() -> None:
    with pytest.raises(UserError, match=r"cannot read the configuration.*nowhere\.yaml"):
        configure("nowhere.yaml", [])


def test_every_number_is_bounded_and_every_key_is_described() -> None:
    page = help.help_text("all-keys")
    for key, info in schema.known_keys().items():
        assert f"  {key}=" in page
        assert info.description, f"{key} has no description"
        kinds = {info.annotation, *typing.get_args(info.annotation)}
        if (
            {int, float} & kinds
            and str not in kinds
            and typing.get_origin(info.annotation) is not list
        ):  # a text: of a length
            assert len(info.metadata) == 2, f"{key} has no lowest and highest value"


def test_a_section_knows_where_its_keys_were_set(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("epochs: 3\nbatch:\n  size: 12\nmodel.widths: [3]\n")
    config = configure(str(path), ["seed=2"])
    assert config.where("batch.size") == config.batch.where("size") == f"batch.size, {path}:3"
    assert config.where("model.widths") == config.model.where("widths") == f"model.widths, {path}:4"
    assert (config.where("epochs"), config.where("seed")) == (
        f"epochs, {path}:1",
        "seed, command line",
    )
    assert config.log.where("every_s") == "log.every_s, default" == LogConfig().where("every_s")


def test_a_copy_with_other_values_knows_where_its_keys_were_set() -> None:
    config = configure(None, ["batch.size=12"])
    changed = config.replace(epochs=7, batch=config.batch.replace(micro=3))
    assert (changed.epochs, changed.batch.size, changed.batch.micro, config.batch.micro) == (
        7,
        12,
        3,
        None,
    )
    assert changed.where("batch.size") == changed.batch.where("size") == "batch.size, command line"
    with pytest.raises(TypeError, match="BatchConfig has no sise"):
        config.batch.replace(sise=3)


def test_sections_are_equal_where_their_values_are() -> None:
    typed = configure(None, ["batch.size=64", "model.widths=[3]"])
    assert typed.batch == BatchConfig() != BatchConfig(size=65)
    assert typed.model == ModelConfig(widths=[3]) != ModelConfig(widths=[4])
    assert typed == schema.Config(model=typed.model) != schema.Config()
    with pytest.raises(ValidationError, match="frozen"):
        typed.batch.size = 3  # type: ignore[misc]


def test_a_mapping_in_place_of_a_list_is_an_error() -> None:
    e = error("recipe.chain={kind: cosine}")
    assert e.what.startswith("wrong value for recipe.chain")
    assert (
        e.fix == "recipe.chain takes a list of pieces, as in [{kind: constant, length: 5}, {kind: "
        "cosine}]"
    )


def test_sections_are_those_of_config() -> None:
    built = schema.Config()
    assert {name: type(getattr(built, name)) for name in schema.SECTIONS} == schema.SECTIONS


@pytest.mark.parametrize(
    "path",
    sorted((Path(__file__).parents[2] / "configs").rglob("*.yaml")),
    ids=lambda path: path.name,
)
def test_every_shipped_configuration_reads_and_begins_with_its_command(path: Path) -> None:
    from hvdtrain.config.plugins import check_names

    root = Path(__file__).parents[2]
    check_names(configure(str(path), []))
    header = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert any(f"hvdtrain --config {path.relative_to(root)}" in line for line in header)


def test_code_that_only_a_run_folder_names_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        "model:\n  name: torch.hub:load\n  repo_or_dir: stranger/evil\n"
    )
    with pytest.raises(UserError) as caught:
        configure(None, [f"resume={tmp_path}"])
    assert str(caught.value).splitlines() == [
        "model.name=torch.hub:load imports code, and only the run folder names it",
        f"  where: {tmp_path}/config.yaml:2",
        "  fix: if you trust it, add the argument model.name=torch.hub:load",
    ]
    assert configure(None, [f"resume={tmp_path}", "model.name=mine:Net"]).model.name == "mine:Net"
    (tmp_path / "config.yaml").write_text("optim:\n  name: torch.optim.RMSprop\n")
    assert configure(None, [f"resume={tmp_path}"]).optim.name == "torch.optim.RMSprop"


@pytest.mark.parametrize(
    ("key", "value", "other"),
    [("run", "/x", "ANOTHER"), ("data.cache", "/x/y", "null"), ("data.stage", "/y", "null")],
)
@pytest.mark.parametrize(
    ("folder", "file"),
    [("", "config.yaml"), (".hvdtrain", "any.yaml"), ("checkpoints", "config.yaml")],
)
def test_where_a_job_writes_is_not_said_by_the_record_of_a_run_alone(
    tmp_path: Path, key: str, value: str, other: str, folder: str, file: str
) -> None:
    (tmp_path / folder).mkdir(exist_ok=True)
    path = tmp_path / file
    path.write_text(f"epochs: 3\ndata.name: folder\n{key}: {value}\n")
    with pytest.raises(UserError) as caught:
        configure(str(path), ["data.root=x"])
    assert str(caught.value).splitlines() == [
        f"{key}={value} is where a job writes, but it is set only in the configuration of a run",
        f"  where: {path}:3",
        f"  fix: if you want that, add the argument {key}={value}; if not, {key}={other}",
    ]
    assert configure(str(path), [f"{key}={tmp_path}"]).epochs == 3
    assert configure(str(path), [f"{key}=null"]).epochs == 3


def test_where_a_job_writes_may_be_said_by_a_file_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("run: x\ndata.stage: y\n")
    assert configure(str(tmp_path / "mine.yaml"), []).run == "x"


def test_a_cache_that_only_a_run_folder_names_is_not_written(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        "data:\n  name: folder\n  cache: /x\n  stage: /y\nrun: /z\n"
    )
    with pytest.raises(
        UserError,
        match="^data.cache=/x is where a job writes, but it is set only in the configuration of "
        "a run\n  where: .*:3\n",
    ):
        configure(None, [f"resume={tmp_path}"])
    config = configure(None, [f"resume={tmp_path}", "data.cache=null"])
    assert (config.run, config.data.stage, config.data.options) == (None, None, {"cache": None})


def test_a_file_of_a_run_asks_for_its_code_as_the_run_does(tmp_path: Path) -> None:
    """--config RUN/config.yaml, or a file beside a run's events; a file of the user's own is the
    user's word."""
    (tmp_path / "config.yaml").write_text("model:\n  name: mymodel:Net\n")
    with pytest.raises(UserError) as caught:
        configure(str(tmp_path / "config.yaml"), ["epochs=3"])
    assert f"{caught.value}" == (
        "model.name=mymodel:Net imports code, and only the run folder names it\n"
        f"  where: {tmp_path}/config.yaml:2\n  fix: if you trust it, add the argument "
        "model.name=mymodel:Net"
    )
    assert (
        configure(str(tmp_path / "config.yaml"), ["model.name=mymodel:Net"]).model.name
        == "mymodel:Net"
    )
    (tmp_path / "config.yaml").rename(tmp_path / "mine.yaml")
    assert configure(str(tmp_path / "mine.yaml"), []).model.name == "mymodel:Net"
    (tmp_path / "events.jsonl").touch()
    with pytest.raises(UserError, match="imports code, and only the run folder names it"):
        configure(str(tmp_path / "mine.yaml"), [])
    (tmp_path / "config.yaml").write_text(
        "data:\n  name: mymodel:data\nmodel:\n  name: mymodel:Net\nhooks: [mymodel:Hook]\n"
    )
    with pytest.raises(UserError) as caught:  # all at once
        configure(None, [f"resume={tmp_path}"])
    assert f"{caught.value}" == (
        'data.name=mymodel:data, model.name=mymodel:Net and hooks=["mymodel:Hook"] import code, '
        "and only the run folder names them\n"
        f"  where: {tmp_path}/config.yaml:2, {tmp_path}/config.yaml:4, {tmp_path}/config.yaml:5\n"
        "  fix: if you trust them, add the arguments data.name=mymodel:data "
        "model.name=mymodel:Net 'hooks=[\"mymodel:Hook\"]'"
    )
    configure(
        None,
        [
            f"resume={tmp_path}",
            "data.name=mymodel:data",
            "model.name=mymodel:Net",
            'hooks=["mymodel:Hook"]',
        ],
    )


def test_a_class_of_a_script_is_resumed_by_that_script(tmp_path: Path) -> None:
    """model.name=__main__:Net on the command line would look for Net in hvdtrain."""
    fix = (
        "Net is a class of a script: start that script again, with resume=RUN in its "
        "hvdtrain.train()"
    )
    (tmp_path / "config.yaml").write_text("model:\n  name: __main__:Net\n")
    with pytest.raises(UserError, match="imports code, and only the run folder names it") as caught:
        configure(None, [f"resume={tmp_path}"])
    assert caught.value.fix == fix
    with pytest.raises(UserError, match="the program does not define class Net") as caught:
        load_dotted("__main__:Net", "model.name")
    assert caught.value.fix == fix


def test_two_names_of_one_key(tmp_path: Path) -> None:
    """stop.epochs is epochs, and max_steps is stop.steps; both names of a key in one file are the
    key twice."""
    assert configure(None, ["stop.epochs=2", "max_steps=5"]) == configure(
        None, ["epochs=2", "stop.steps=5"]
    )
    path = tmp_path / "x.yaml"
    path.write_text(
        "stop: {epochs: 3}\nbatch.size: ${stop.epochs}\nseed: ${max_steps}\nmax_steps: 7\n"
    )
    config = configure(str(path), [])
    assert (config.epochs, config.batch.size, config.seed, config.stop.steps) == (3, 3, 7, 7)
    assert config.where("stop.steps") == f"stop.steps, {path}:4"
    path.write_text("epochs: 3\nstop: {epochs: 3}\n")
    with pytest.raises(UserError, match="epochs is given twice, in lines 1 and 2"):
        configure(str(path), [])


def test_the_default_number_of_epochs_is_for_jobs_that_nothing_else_ends() -> None:
    found = [
        configure(None, words).epochs
        for words in ([], ["stop.steps=5"], ["stop.time=1h"], ["stop.steps=5", "stop.steps=null"])
    ]
    assert found == [10, None, None, 10]
    assert (
        configure(None, ["epochs=0.5"]).epochs,
        configure(None, ["epochs=3.0", "stop.steps=9"]).epochs,
    ) == (0.5, 3)
