"""The git repositories of a job's code: commits, and changes that are not committed."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import site
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from hvdtrain.events.redaction import HIDDEN, is_secret_key, redact_urls

MOST_DIFF_BYTES = 2**20
_MOST_NAMES = 2000  # of files in an event
_GIT_S = 5.0  # a file server may be slow
# files whose content never enters a diff: names of secrets
_SECRET_FILES = (".env*", "*.pem", "*.key", "id_*", ".netrc", "*credentials*", "*secret*")
_MOST_LINE = 2000  # letters of a line that is searched for secrets
_WORD = re.compile(r"(?<![\w.-])[A-Za-z_][\w.-]*+")
# what may follow the name of a secret without being one: max_tokens = 512, tokens = read(path)
_PLAIN = re.compile(
    r"""["'\])\s]*+(?:[:=]\s*+)?(?:[-+]?\d{1,6}(?![\w.])|(?:true|false|none|null)\b|$)""", re.I
)
# name = value, "name": value, x["name"] = value, name=value in a call
_ASSIGNS = re.compile(r"""["'\])]*\s*(?::\s*[\w\[\], |.]+=|[:=](?!=))\s*\S""")
_TOKEN = re.compile(
    r"\b(?:gh[opsur]_|github_pat_|glpat-|hf_|sk-|xox[abpr]-|AKIA|ASIA)[A-Za-z0-9_-]{12,}"
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"
)


class Repository(NamedTuple):
    """A git repository. changed: names of changed and new files; digest: of the diff and of new
    files, or empty."""

    folder: str
    commit: str
    origin: str
    changed: list[str]
    digest: str
    diff: str  # against the commit, with secrets hidden; without files that git does not know
    problem: str = ""  # why something is unknown

    def fields(self) -> dict[str, Any]:
        """Returns the fields of the event: everything but the diff."""
        return {
            "folder": self.folder,
            "commit": self.commit,
            "origin": self.origin,
            "changed": _at_most(self.changed),
            "digest": self.digest,
            "problem": self.problem,
        }


def repositories(modules: Mapping[str, ModuleType], package: Path) -> list[Repository]:
    """Returns the repositories of hvdtrain's `package` and of imported modules that belong neither
    to Python nor to an installed package."""
    folders = [package, *_folders_of_user(modules)]
    tops = dict.fromkeys(top for folder in folders if (top := _top(folder)) is not None)
    return [repository(top) for top in tops]


def files_of_user(modules: Mapping[str, ModuleType]) -> dict[str, str]:
    """Returns path -> digest of the user's imported files. If there are more than 2,000, the last
    entry says how many are not recorded."""
    files = _files_of_user(modules)
    found = {}
    for path in files[:_MOST_NAMES]:
        try:
            found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        except OSError:
            found[str(path)] = "cannot be read"
    if len(files) > _MOST_NAMES:
        found[f"and {len(files) - _MOST_NAMES:,} more"] = "not recorded"
    return found


def _at_most(names: list[str]) -> list[str]:
    """Returns the first 2,000 names, and how many more there are."""
    more = len(names) - _MOST_NAMES
    return names if more <= 0 else [*names[:_MOST_NAMES], f"and {more:,} more"]


def _folders_of_user(modules: Mapping[str, ModuleType]) -> list[Path]:
    return list(dict.fromkeys(path.parent for path in _files_of_user(modules)))


def _files_of_user(modules: Mapping[str, ModuleType]) -> list[Path]:
    """Returns the files of modules outside of Python's and the packages' folders, sorted."""
    names = {getattr(module, "__file__", None) for module in list(modules.values())}
    return sorted(
        Path(name)
        for name in names
        if isinstance(name, str) and name.endswith(".py") and _is_of_user(name)
    )


@functools.cache
def _is_of_user(name: str) -> bool:
    real = os.path.realpath(name)
    return not real.startswith(_installed()) and os.path.isfile(real)


@functools.cache
def _installed() -> tuple[str, ...]:
    """Returns the folders of Python and of installed packages, and hvdtrain's."""
    paths = sysconfig.get_paths()
    users = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    named = {"site-packages", "dist-packages"}
    on_path = [folder for folder in sys.path if Path(folder).name in named]
    folders = [paths["stdlib"], paths["platstdlib"], paths["purelib"], paths["scripts"]]
    folders += [*users, *on_path, str(Path(__file__).parents[2])]
    return tuple(f"{os.path.realpath(folder)}{os.sep}" for folder in folders)


@functools.cache
def _top(folder: Path) -> Path | None:
    """Returns the repository that contains a folder; None if there is none, or no git."""
    if not any((above / ".git").exists() for above in (folder, *folder.parents)):
        return None
    found = _git(folder, "rev-parse", "--show-toplevel")
    return Path(found.strip()) if found else None


@functools.cache
def repository(top: Path) -> Repository:
    """Returns the state of a repository, as it is when a process first asks: its code has then just
    been imported."""
    commit = _git(top, "rev-parse", "HEAD")
    status = _git(top, "status", "--porcelain=v1", "-z", "--no-renames")
    if not commit or status is None:
        return Repository(str(top), "", "", [], "", "", "git has no commit, or does not answer")
    entries = [entry for entry in status.split("\0") if entry and not _is_compiled(entry)]
    names = [entry[3:] for entry in entries]
    origin = redact_urls((_git(top, "config", "--get", "remote.origin.url") or "").strip())
    if not names:
        return Repository(str(top), commit.strip(), origin, [], "", "")
    hidden = [f":(exclude,glob)**/{name}" for name in _SECRET_FILES]
    diff = _git(
        top, "diff", "HEAD", "--no-ext-diff", "--no-textconv", "--no-color", "--", ".", *hidden
    )
    new = [entry[3:] for entry in entries if entry.startswith("??")]
    digest = hashlib.sha256((diff or "").encode())
    for name in new:
        digest.update(f"\0{name}\0".encode() + _content(top / name))
    problem = "" if diff is not None else "git diff does not answer"
    text = without_secrets((diff or "")[:MOST_DIFF_BYTES])
    cut = len(diff or "") > MOST_DIFF_BYTES
    return Repository(
        str(top),
        commit.strip(),
        origin,
        names,
        digest.hexdigest()[:16],
        text,
        f"the diff has more than {MOST_DIFF_BYTES:,} letters and is cut" if cut else problem,
    )


def _is_compiled(entry: str) -> bool:
    """Whether git lists what Python has compiled."""
    return entry.rstrip("/").endswith(("__pycache__", ".pyc"))


def without_secrets(diff: str) -> str:
    """Replaces what looks like a secret in the lines of a diff by ***: values of names such as
    api_key, logins in URLs, tokens of well-known services, private keys."""
    lines = []
    in_key = False
    for line in diff.split("\n"):
        in_key = in_key or ("PRIVATE KEY-----" in line and "BEGIN" in line)
        ends = in_key and "END" in line and "PRIVATE KEY-----" in line
        lines.append(f"{line[:1]}{HIDDEN}" if in_key else _without_secret(line))
        in_key = in_key and not ends
    return "\n".join(lines)


def _without_secret(line: str) -> str:
    """Hides the rest of a line behind the name of a secret, unless it is a short number or a
    constant, or is only called or named."""
    if len(line) > _MOST_LINE:
        return f"{line[:1]}{HIDDEN} ({len(line):,} letters)"
    line = _TOKEN.sub(HIDDEN, redact_urls(line))
    for found in _WORD.finditer(line):
        rest = line[found.end() :]
        if is_secret_key(found[0]) and not _PLAIN.match(rest) and _ASSIGNS.match(rest):
            return line[: found.end()] + f" {HIDDEN}"
    return line


def _content(path: Path) -> bytes:
    """Returns the content of a small file; the size of a large one."""
    try:
        if not path.is_file():
            return b""
        size = path.stat().st_size
        return path.read_bytes() if size <= MOST_DIFF_BYTES else f"{size}".encode()
    except OSError:
        return b""


def _git(folder: Path, *words: str) -> str | None:
    """Returns the output of a git command without hooks and monitors; None if it fails or takes
    long. Filters of the repository's own configuration run, as with `git diff`: the job imports
    code from there, too."""
    command = ["git", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", *words]
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            timeout=_GIT_S,
            check=False,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None
