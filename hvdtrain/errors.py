"""What a user is told when something is wrong, and the exit codes of every command."""

from __future__ import annotations

DONE = 0  # the job reached its end, or the target
BUG = 1  # an unexpected exception: its traceback is printed once, with rank and host
USER = 2  # something the user can mend: configuration, data, launcher, installation


class UserError(Exception):
    """A mistake outside hvdtrain: `what` is wrong, `where` (key, file:line, path, rank), and how to `fix` it.

    Shown as three short lines and exit code 2, never as a traceback.
    """

    def __init__(self, what: str, where: str = "", fix: str = "") -> None:
        super().__init__(what, where, fix)
        self.what, self.where, self.fix = what, where, fix

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.fix:
            lines.append(f"  fix: {self.fix}")
        return "\n".join(lines)
