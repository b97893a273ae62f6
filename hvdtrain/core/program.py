"""The words that start this program, as a user types them in this terminal."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path


def command_line(*arguments: str) -> str:
    """With these arguments, quoted for a shell: `hvdtrain ...` where the shell finds that of this environment, else its path."""
    return shlex.join([*_program(), *arguments])


def path_argument(path: Path) -> str:
    """A path as an argument that no command takes for an option: ./-x for -x."""
    return f"./{path}" if str(path).startswith("-") else str(path)


def _program() -> list[str]:
    folders = [os.path.dirname(sys.executable), sysconfig.get_path("scripts"), sysconfig.get_path("scripts", f"{os.name}_user")]
    scripts = [Path(folder, "hvdtrain") for folder in folders]
    found = shutil.which("hvdtrain")
    if found and any(script.exists() and script.samefile(found) for script in scripts):
        return ["hvdtrain"]
    script = next((script for script in scripts if os.access(script, os.X_OK)), None)
    if script is None:  # imported from its source
        return [sys.executable or "python", "-m", "hvdtrain"]
    below = os.path.relpath(script)
    return [str(script) if below.startswith(os.pardir) else below]
