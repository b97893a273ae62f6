"""Prose: no sentence of a page of docs has more than 30 words, every link leads somewhere, a
docstring begins with what the thing is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks import needs_all_files

ROOT = Path(__file__).parents[1]
FRONT = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "jobs/README.md",
    "tests/README.md",
)
DOCS = [ROOT / name for name in FRONT] + sorted((ROOT / "docs").glob("*.md"))
PAGES = [
    *DOCS,
    ROOT / "tests" / "promises.md",
    *sorted(path for folder in ("benchmarks", "labs") for path in (ROOT / folder).rglob("*.md")),
]
MOST_WORDS = 30
# a beginning that says nothing without the signature, or the docstring before it
_VAGUE = re.compile(r"(Of|The same|Those|As)\b")
# what a reader stops at -> most lines of hvdtrain/ that may have it; a count only falls
PHRASES = {
    r"(?<!there )\b(is|are) no\b(?! longer)": 0,
    r"\bof which\b": 2,
    r"\b(goes|go|going|went) on\b": 0,
    r"\b(is|are) told\b": 0,
    r"\bin the place of\b": 0,
    r"\b(has|have) not (an?|the|as|its|so)\b": 0,
}
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_NOT_PROSE = re.compile(r"\||#|<|!\[")  # a table, a heading, HTML, an image
_ITEM = re.compile(r"^\s*(?:[-*]|\d\.) ")
_LINK = re.compile(r"!?\[([^\]]*)\]\(([^)\s]*)\)")
_CODE = re.compile(r"`[^`]*`")
_END = re.compile(r"(?<!\bal)(?<![.:])[.!?][)\"*]*(?=\s)")  # neither "et al." nor "..."


def sentences(text: str) -> list[str]:
    """The sentences of a page, without code, tables, headings and the addresses of links."""
    paragraphs = [""]
    for line in _FENCE.sub("\n", text).splitlines():
        if not line.strip() or _NOT_PROSE.match(line) or _ITEM.match(line):
            paragraphs.append("")
        if not _NOT_PROSE.match(line):
            paragraphs[-1] += _ITEM.sub("", line) + " "
    prose = (_CODE.sub("`", _LINK.sub(r"\1", paragraph)) for paragraph in paragraphs)
    return [
        sentence.strip()
        for paragraph in prose
        for sentence in _END.split(paragraph)
        if sentence.strip()
    ]


def words(sentence: str) -> int:
    return len(re.findall(r"[^\W\d_][\w'-]*", sentence))


def anchors(page: Path) -> set[str]:
    """The fragments that a link to a heading of the page may have."""
    headings = re.findall(r"^#+ (.*)$", _FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def leads_somewhere(page: Path, address: str) -> bool:
    path, _, fragment = address.partition("#")
    target = page.parent / path if path else page
    return target.exists() and (
        not fragment or target.suffix != ".md" or fragment in anchors(target)
    )


def vague_docstrings(source: str) -> Iterator[tuple[int, str]]:
    """The line and the beginning of each docstring that does not say what its module, class or
    function is."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node) or ""
            if _VAGUE.match(text):
                yield node.body[0].lineno, text[:60]


@pytest.mark.parametrize("page", DOCS, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_sentence_of_a_page_has_more_than_30_words(page: Path) -> None:
    assert not [
        sentence for sentence in sentences(page.read_text()) if words(sentence) > MOST_WORDS
    ]


@needs_all_files
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_or_a_heading_that_exists(page: Path) -> None:
    addresses = [
        address
        for _, address in _LINK.findall(_FENCE.sub("", page.read_text()))
        if not address.startswith("http")
    ]
    assert not [address for address in addresses if not leads_somewhere(page, address)]


def merged_parameters(source: str) -> Iterator[str]:
    """function: parameter, of each that a docstring describes behind the end of another line's
    text, as a formatter that joins lines leaves it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node) or ""
            names = [each.arg for each in (*node.args.args, *node.args.kwonlyargs)]
            described = [name for name in names if re.search(rf"^{name}(, \w+)*: ", text, re.M)]
            for name in set(names) - set(described) if described else ():
                if re.search(rf"[\w)`\"] {name}: ", text):
                    yield f"{node.name}: {name}"


def test_the_description_of_each_parameter_begins_a_line() -> None:
    """A docstring that lists parameters describes each on a line of its own."""
    merged = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted((ROOT / "hvdtrain").rglob("*.py"))
        for name in merged_parameters(path.read_text())
    ]
    assert merged == []
    text = '"""Sums.\n\n    x: an array of any shape y: another.\n    """'
    assert list(merged_parameters(f"def f(x, y):\n    {text}")) == ["f: y"]


@pytest.mark.parametrize("phrase", PHRASES)
def test_no_more_lines_of_code_have_a_phrase_that_reads_like_a_translation(phrase: str) -> None:
    """If this fails, rewrite the sentence as the documentation of PyTorch would put it. If a count
    has fallen, lower it in PHRASES."""
    lines = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in sorted((ROOT / "hvdtrain").rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(phrase, line)
    ]
    assert len(lines) <= PHRASES[phrase], lines


def test_what_counts_as_a_sentence() -> None:
    first = "# A heading of any length\nOne (Young et al. 1974) two `code in code` three.\nFour\n"
    page = (
        first + "[five](six.md), ... seven. Eight\n- nine.\n| ten |\n```\neleven.\n```\n1. twelve\n"
    )
    assert [words(sentence) for sentence in sentences(page)] == [6, 3, 1, 1, 1]
    assert words("it's a well-known 40 and x1") == 5


def test_a_link_to_a_heading_that_is_not_there_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("## `a.b`: 16 bits, or\n```\n# no heading\n```\n")
    assert anchors(page) == {"ab-16-bits-or"}
    assert [
        leads_somewhere(page, address)
        for address in ("#ab-16-bits-or", "page.md#no-heading", "other.md", "page.md")
    ] == [
        True,
        False,
        False,
        True,
    ]


def test_a_docstring_begins_with_what_the_thing_is() -> None:
    files = sorted((ROOT / "hvdtrain").rglob("*.py"))
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in files
        for line, text in vague_docstrings(path.read_text())
    ]
    assert not found and len(files) > 200


def test_a_docstring_that_says_nothing_alone_is_found() -> None:
    source = (
        '"""Of a rank."""\nclass A:\n    """Offers."""\n    def b(self):\n        """The same, '
        'later."""\n'
    )
    assert list(vague_docstrings(source)) == [(1, "Of a rank."), (5, "The same, later.")]
