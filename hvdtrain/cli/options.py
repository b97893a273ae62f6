"""Options of a command and the types of their values; mistakes are UserErrors."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from hvdtrain.errors import UserError


class CommandParser(argparse.ArgumentParser):
    """A parser that raises UserError for an invalid command line. Names must be complete, and
    --help belongs to the command."""

    def __init__(self, command: str, fix: str = "", **more: Any) -> None:
        """command: its words after hvdtrain; fix: what to do after a mistake; more: of
        ArgumentParser."""
        super().__init__(
            prog=f"hvdtrain {command}", allow_abbrev=False, **{"add_help": False, **more}
        )
        self.where = f"command line of {command}"
        self._fix = fix or f"hvdtrain {command} --help shows its options"

    def error(self, message: str) -> NoReturn:
        raise UserError(message, self.where, self._fix)

    def names(self) -> list[str]:
        """Returns all options, as they are written."""
        return [name for action in self._actions for name in action.option_strings]
