"""Hostile arguments, configuration files, names and options: what an attacker could write into a
file that is given to hvdtrain."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path

from fuzz_bytes import chance, mutated, odd, pick
from fuzzing import CANARY
from numpy.random import Generator

from hvdtrain.config import plugins
from hvdtrain.config.read import configure, to_yaml
from hvdtrain.config.refusal import type_name
from hvdtrain.config.schema import SECTIONS, known_keys

SPLIT = " ¦ "
PLAIN = r"""
{a.b: 1} ¦ {'': 1} ¦ {a: {}} ¦ [{a.b: 1}] ¦ {a: {b.c: 1}}
~ ¦ null ¦ 0 ¦ -1 ¦ 1e3 ¦ 1e400 ¦ -1e400 ¦ .nan ¦ .inf ¦ -.inf ¦ nan ¦ 1e-400 ¦ 0x7f ¦ 0b1 ¦ 0o17 ¦ 2.5 ¦ true ¦ no ¦ '1' ¦ "a" ¦ 1:1:1:1
2001-01-01 ¦ !!timestamp x ¦ !!timestamp 2001-99-99 ¦ !!int '' ¦ !!int x ¦ !!int '0x' ¦ !!float '' ¦ !!float x ¦ !!bool maybe ¦ !!null x
!!str ¦ ! a ¦ !x y ¦ !!binary aGVsbG8= ¦ !!binary '*' ¦ !!binary é ¦ !!set {a, b} ¦ !!omap [a: 1] ¦ !!pairs [a: 1] ¦ !<a> b ¦ !!str [a]
!!seq a ¦ !!map [a] ¦ !!value a ¦ !!int [1] ¦ !!float {a: 1} ¦ !!bool [] ¦ !!null [1] ¦ !!merge a ¦ = ¦ <<
!!python/object/apply:os.system ['touch hacked'] ¦ !!python/name:os.system ¦ !!python/module:os ¦ !!python/tuple [1, 2]
!!python/object/new:os.system [touch hacked] ¦ !!python/complex 1 ¦ !!python/object/apply:pathlib.Path [1]
!!python/object/apply:pathlib.WindowsPath [a] ¦ !!python/object/apply:pathlib.PosixPath [/etc] ¦ ??? ¦ [???] ¦ {a: ???} ¦ ~nobodyhere/x
~/x ¦ ../../x ¦ ${oc.env:SECRET} ¦ x${oc.env:SECRET}x ¦ ${oc.env:NOTHING,${oc.env:SECRET}} ¦ ${oc.decode:'{a: 1}'} ¦ ${oc.create:{a: 1}}
${oc.deprecated:seed} ¦ ${ ¦ ${oc.select:seed,1} ¦ ${oc.dict.keys:data} ¦ ${oc.dict.values:data} ¦ ${${run}:SECRET} ¦ ${ oc.env:SECRET }
${oc.${data.root}:SECRET} ¦ ${seed} ¦ $$ ¦ ${batch.size} ¦ x${seed}x${seed} ¦ ${data} ¦ ${model.options} ¦ ${.size} ¦ ${..seed} ¦ ${}
$${seed} ¦ \${seed} ¦ ${seed ¦ ${a b} ¦ ${nothing} ¦ ${run} ¦ ${data.root}{oc.env:SECRET} ¦ $ ¦ ${run}{seed} ¦ ${data.__class__}
${model.a} ¦ [${seed}] ¦ {a: ${seed}} ¦ [${oc.env:SECRET}] ¦ {${seed}: 1} ¦ ${recipe.chain} ¦ "a\0b" ¦ "\ud800" ¦ "\e[2J" ¦ "a\nb" ¦ é
- x ¦ ? x ¦ [] ¦ {} ¦ [1] ¦ [a, 1, null] ¦ [[1], [2]] ¦ {a: 1} ¦ {1: 2} ¦ {null: 1} ¦ {[1]: 2} ¦ {1.5: a} ¦ {true: a} ¦ {a: {b: [1]}}
[1, 2] ¦ (1, 2) ¦ {kind: cosine} ¦ [{kind: cosine}] ¦ [{kind: x}] ¦ [{king: cosine}] ¦ [{length: .nan}] ¦ [{milestones: [.inf]}] ¦ x: y: z
[{<<: {kind: steps}}] ¦ &a [*a] ¦ &a {b: *a} ¦ *nothing ¦ &a ¦ &a 1 ¦ ' ¦ " ¦ %x ¦ @x ¦ `x` ¦ --- a ¦ ... ¦ # ¦ / ¦ /etc ¦ . ¦ os:system
10% ¦ 5 days ¦ 500 steps ¦ builtins:exec ¦ mlp ¦ torch.optim.SGD ¦ linear ¦ resnet18 ¦ auto ¦ digits ¦ synthetic ¦ folder ¦ jax ¦ numpy
"""  # noqa: E501
VALUES = (
    *(value for row in PLAIN.strip().splitlines() for value in row.split(SPLIT)),
    *(
        "",
        "0x" + "f" * 9999,
        "9" * 4000,
        "9" * 9999,
        "1" + "_" * 999,
        ":".join(["1"] * 2000),
        "${epochs}" * 200,
        "${a" * 500,
        "x" * 70000,
    ),
    *(
        "a\x00b",
        "\x1b[31m",
        "\ufeff",
        "\u2028",
        "\x85",
        "é" * 50,
        "|\n  x\n",
        ">-\n  x\n",
        "[" * 3000,
        "{a: " * 2000,
        "[" * 60 + "]" * 60,
    ),
    *(
        "{a: " * 60 + "1" + "}" * 60,
        "[" * 300 + "]" * 300,
        "[1" + ", 1" * 9999 + "]",
        "[1" + ", 1" * 999 + "]",
    ),
)
WORDS = (
    "",
    ".",
    "..",
    "__class__",
    "__init__",
    "options",
    "name",
    "_",
    "x",
    "size",
    "a.b",
    "<<",
    "?",
    "0",
    "null",
    "é",
    "\ud800",
    "a b",
    "-",
    "=",
)

NINE = range(9)
MANY = range(1, 40)
BOMBS: tuple[Callable[[str], str], ...] = (
    lambda key: (
        "l0: &l0 [x]\n"
        + "".join(f"l{n}: &l{n} [{nine(n)}]\n" for n in range(1, 12))
        + f"{key}: *l11\n"
    ),
    lambda key: (
        f"{key}: &l0 [x]\n" + "".join(f"{key}{n}: &l{n} [{nine(n)}]\n" for n in range(1, 12))
    ),
    lambda key: (
        "model:\n  l0: &l0 {a: 1}\n"
        + "".join(f"  l{n}: &l{n} {{a: *l{n - 1}, b: *l{n - 1}}}\n" for n in MANY)
    ),
    lambda key: (
        "model:\n  l0: [&l0 {a: 1}]\n"
        + "".join(f"  l{n}: [&l{n} {{<<: [{nine(n)}]}}]\n" for n in range(1, 12))
    ),
    lambda key: (
        "model:\n  l0: x\n"
        + "".join(f"  l{n}: {refer(n)}{refer(n)}\n" for n in MANY)
        + f"run: ${{{key}}}\n"
    ),
    lambda key: (
        "model:\n  l0: [x]\n" + "".join(f"  l{n}: ['{refer(n)}', '{refer(n)}']\n" for n in MANY)
    ),
    lambda key: "model:\n  l0: ''\n" + "".join(f"  l{n}: {refer(n)}{refer(n)}\n" for n in MANY),
    lambda key: "? &l0 [x]\n: 1\n" + "".join(f"? &l{n} [{nine(n)}]\n: 1\n" for n in range(1, 12)),
    lambda key: "".join(f"model.a{n}: 1\n" for n in range(9999)),
    lambda key: "".join(f"model.{'a.' * n}a: 1\n" for n in range(200)),
    lambda key: f"{key}: '{'x' * 2**22}'\n",
    lambda key: f"{key}: [{'1, ' * 2**20}]\n",
    lambda key: "\n".join("- " * 5000 for _ in range(3)),
    lambda key: f"{' ' * 2**22}{key}: 1",
    lambda key: f"{'x' * 2**20}: 1",
    lambda key: "".join(f"{' ' * n}a:\n" for n in range(300)),
    lambda key: f"model.{'a.' * 3000}a: 1\n",
    lambda key: f"{key}: " + "${a." * 3000 + "}" * 3000,
    lambda key: (
        "run: ${model.l0}\nmodel:\n"
        + "".join(f"  l{n}: ${{model.l{n + 1}}}\n" for n in range(400))
        + "  l400: 1\n"
    ),
)


def nine(number: int) -> str:
    return ", ".join(f"*l{number - 1}" for _ in NINE)


def refer(number: int) -> str:
    return f"${{model.l{number - 1}}}"


@functools.cache
def keys() -> tuple[str, ...]:
    return (
        *known_keys(),
        *SECTIONS,
        *(f"{section}.{word}" for section in SECTIONS for word in WORDS),
        *WORDS,
        "model.l11",
        "model.l39",
    )


def pair(rng: Generator, sound: float) -> tuple[str, str]:
    """A key and a value, with the chance `sound` of a known key and a value of its type."""
    if not chance(rng, sound):
        return pick(rng, keys()), pick(rng, VALUES)
    key, field = pick(rng, tuple(known_keys().items()))
    choices = re.findall(r"'([\w-]+)'", type_name(field.annotation))
    words = {
        "a whole number": ("1", "7", "0x10", "${epochs}"),
        "a number": ("0.5", "1e-3", "1", "${stop.target_for}"),
        "true or false": ("true", "no"),
        "a text": ("x", "~/x"),
    }
    return key, pick(
        rng,
        choices
        or words.get(
            type_name(field.annotation).removesuffix(", or null"), ("[]", "[1]", "[{kind: steps}]")
        ),
    )


def line(rng: Generator) -> str:
    """`key: value`, nested or dotted."""
    key, value = pair(rng, 0.6)
    section, _, name = key.partition(".")
    if not name or chance(rng, 0.5):
        return f"{key}: {value}\n"
    return (
        f"{section}:\n  {name}: {value}\n"
        if chance(rng, 0.7)
        else f"{section}: {{{name}: {value}}}\n"
    )


def document(rng: Generator) -> bytes:
    if chance(rng, 0.03):
        return pick(rng, BOMBS)(pick(rng, keys())).encode(errors="surrogatepass")
    text = "".join(line(rng) for _ in range(int(rng.integers(1, 5))))
    if chance(rng, 0.06):
        kind = pick(rng, ("utf-16", "utf-32", "utf-8-sig", "latin-1"))
        return text.encode(kind, errors="replace")
    data = text.encode(errors="surrogatepass")
    return mutated(rng, data) if chance(rng, 0.3) else data


def read_yaml(rng: Generator, home: Path) -> Callable[[], None]:
    """A file for --config, or the config.yaml of a run to resume."""
    path = home / "config.yaml"
    path.write_bytes(document(rng))
    if chance(rng, 0.02):
        odd(rng, path)
    if chance(rng, 0.6):
        return lambda: check_configuration(str(path), [])
    return lambda: check_configuration(None, [f"resume={home}"])


def read_words(rng: Generator, home: Path) -> Callable[[], None]:
    """One to three words of a command line."""
    words = []
    for _ in range(int(rng.integers(1, 4))):
        word = "=".join(pair(rng, 0.5))
        if chance(rng, 0.2):
            word = mutated(
                rng, word.encode(errors="surrogateescape" if "\ud800" not in word else "replace")
            ).decode(errors="surrogateescape")
        words.append(f"--{word}" if chance(rng, 0.1) else word)
    return lambda: check_configuration(None, words)


def check_configuration(path: str | None, words: list[str]) -> None:
    """What was read holds no secret, is printed, and reads back equal."""
    config = configure(path, words)
    text = to_yaml(config)
    assert CANARY not in text, text
    again = Path("again.yaml")
    again.write_text(text, encoding="utf-8")
    # repr: nan is not nan
    assert repr(configure(str(again), [])) == repr(config), (
        f"{config!r}\nis not what this reads as\n{text}"
    )
    plugins.check_names(config)
