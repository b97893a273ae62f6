"""Lists every reader that is fuzzed, and defines the readers of names and options. As a script: the
child process of fuzzing.fuzz(), or one input again."""

from __future__ import annotations

import inspect
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import fuzz_checkpoint
import fuzz_files
import fuzz_images
import fuzz_text
import fuzzing
import PIL.Image
from fuzz_bytes import chance, mutated, pick
from numpy.random import Generator

from hvdtrain.config import plugins
from hvdtrain.config.read import configure
from hvdtrain.config.schema import OPEN_SECTIONS
from hvdtrain.config.sections.data import DataConfig
from hvdtrain.config.sections.optim import OptimConfig
from hvdtrain.core.import_torchvision import define_missing_operators

# a name may be of a module that imports torchvision: what torch is loaded for then is loaded here,
# before a library that is loaded counts as a finding
define_missing_operators()

PLAIN = """
os:system os.system posix:system subprocess:Popen subprocess.run builtins:exec builtins.eval runpy:run_path pickle:loads
ctypes:CDLL code:interact importlib:import_module shutil:rmtree pathlib:Path this:d antigravity:x os.path:join socket:socket
../../x ../errors ..errors /etc/passwd a/b:c a:b:c a..b:c : . .. mlp.py on_torch sampler __init__ mlp mnist sgd 1:2 é:ê
numpy:array numpy.random:default_rng numpy:float64 numpy:pi numpy:nothing numpy:__class__ numpy:__loader__ numpy:__dict__
numpy.ctypeslib:ctypes numpy.ufunc numpy:frombuffer numpy:add hvdtrain.errors:UserError hvdtrain.data:idx hvdtrain.config.plugins:re
hvdtrain:__version__ no_such:x no.such:x numpy.no:x fuzz_readers:forge fuzz_readers:sys fuzz_readers:pick fuzz_readers:PLAIN
"""  # noqa: E501
NAMES = (
    *PLAIN.split(),
    *(
        "class:def",
        "None:x",
        "\ud800:x",
        "a\0b:c",
        "x" * 9999,
        "a" + ".b" * 2000,
        "a" + ".b" * 90 + ":c",
        "",
        " ",
        "mlp ",
        "mlp\n",
    ),
)
forge = sys.exit  # a name of this module for a function of Python's own


def read_names(rng: Generator, home: Path) -> Callable[[], None]:
    """A name of a plugin or an import path."""
    name = pick(rng, NAMES)
    folder = pick(rng, tuple(plugins.ALIASES))
    if chance(rng, 0.3):
        name = mutated(rng, name.encode(errors="replace")).decode(errors="surrogateescape")
    dotted = plugins.is_dotted(name) and chance(rng, 0.8)
    return lambda: check_dotted(name) if dotted else check_name(folder, name)


def check_dotted(name: str) -> None:
    """A model is nothing of Python itself, and has a readable signature."""
    config = configure(None, [f"model.name={name}"])
    plugins.check_names(config)
    found = plugins.load_dotted(config.model.name, "model.name")
    inspect.signature(found)
    home = (
        getattr(
            found if isinstance(found, type) or inspect.isroutine(found) else type(found),
            "__module__",
            None,
        )
        or ""
    )
    assert callable(found) and home.split(".")[0] not in sys.stdlib_module_names, found


def check_name(folder: str, name: str) -> None:
    """Nothing of another folder."""
    path = plugins.find(folder, name, "here")
    assert plugins.PACKAGE / folder in path.parents and path.is_file(), path


OPTIONS = (
    *(
        None,
        True,
        0,
        1,
        -1,
        3,
        2**31,
        2**62,
        1e30,
        0.5,
        float("nan"),
        float("inf"),
        -1e308,
        "x",
        "1",
        "~nobodyhere/x",
        "a/b",
    ),
    *(
        [],
        [1],
        [1, 2, 3],
        [4, 4, 1, 1],
        [0, 0, 0],
        [10**9] * 3,
        [2**62] * 3,
        ["a"],
        [[1]],
        [None],
        {},
        {"a": 1},
        [1.5, 2.5, 3.5],
    ),
    *((8, 8, 3), [60000, 60000, 3], [2048, 2048, 1], "???", "[1, 2, 3]", "1e3", "-0", [1] * 999),
)


def read_options(rng: Generator, home: Path) -> Callable[[], None]:
    """Options of the plugins of data and optim, converted and used."""
    section = pick(rng, ("data", "optim"))
    folder = OPEN_SECTIONS[section]
    names = tuple(name for name in plugins.files(folder) if name != "digits")  # it reads nothing
    name = pick(rng, names) if chance(rng, 0.6) else {"data": "synthetic", "optim": "adam"}[section]
    build = plugins.load(folder, name, "").build
    given = {
        option: pick(rng, OPTIONS) for option in build.__kwdefaults__ or () if chance(rng, 0.5)
    }
    settings = (
        DataConfig(name=name, **given) if section == "data" else OptimConfig(name=name, **given)
    )
    (home / "train" / "a").mkdir(parents=True)
    (home / "train" / "a" / "1.png").write_bytes(fuzz_images.sound_images()[2])

    def read() -> None:
        options = plugins.convert_options(settings, folder)
        if section == "optim":
            build(**options)
        elif name in ("folder", "webdataset"):
            fuzz_files.check_source(
                build(name, home, "train", **{"cache": home / "cache", **options})
            )
        elif name == "synthetic":
            fuzz_files.check_source(build(name, None, "train", **options))
        else:
            build(
                name,
                home,
                "train",
                **({"download": False} if "download" in (build.__kwdefaults__ or ()) else {}),
            )

    return read


READERS: dict[str, fuzzing.Reader] = {
    "idx": fuzz_files.read_idx,
    "cifar": fuzz_files.read_cifar,
    **(
        {"folder": fuzz_files.read_folder, "cache": fuzz_files.read_cache}
        if fuzz_files.HAS_FOLDERS
        else {}
    ),
    "yaml": fuzz_text.read_yaml,
    "words": fuzz_text.read_words,
    "names": read_names,
    "options": read_options,
    "checkpoint": fuzz_checkpoint.read_checkpoint,
}


def again(name: str, seed: str, number: str) -> None:
    """One input once more, without watch or limits, in a new folder that stays."""
    home = Path(tempfile.mkdtemp())
    os.chdir(home)
    print(home)
    READERS[name](fuzzing.generator(name, int(seed), int(number)), home)()


if __name__ == "__main__":
    if len(sys.argv) > 2:  # python tests/support/fuzz_readers.py READER SEED NUMBER
        again(*sys.argv[1:])
        sys.exit()
    fuzz_images.sound_images(), fuzz_images.image_bombs()  # before memory is counted
    for by_chunks in (False, True):
        fuzz_checkpoint.good_files(Path(tempfile.mkdtemp()), by_chunks)
    PIL.Image.init()
    fuzzing.child(json.loads(sys.argv[1]), READERS)
