"""Errors of data sets, raised without knowledge of how the user set their options."""

from __future__ import annotations

from pathlib import Path

from hvdtrain.config.read import expand
from hvdtrain.errors import UserError


class OptionError(UserError):
    """An error whose `where` is an option name of the data set's build().

    The caller adds the key and where it was set: with_keys() of configured/opened.py.
    """


class NoValidationSet(UserError):
    """One file or folder has all samples, and nothing says which are for validation."""


def expanded(path: str | Path, option: str) -> Path:
    """Returns the path that an option names, with ~ or ~user replaced. Raises OptionError if
    expand() fails."""
    try:
        return expand(path, option)
    except UserError as error:
        raise OptionError(error.what, option, error.fix) from None
