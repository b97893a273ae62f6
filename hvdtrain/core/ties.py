"""The names of an array. A tied weight has two or more names, and the state uses the first
(Learner.state_dict_names())."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from hvdtrain.errors import UserError, short


class Ties:
    """The sets of names that stand for one array."""

    def __init__(self, names: Mapping[str, str]) -> None:
        """names: every name of an array -> the main name, which stands for it."""
        self._all: dict[str, list[str]] = {}
        for name, own in names.items():
            self._all.setdefault(own, []).append(name)
        self._own = dict(names)

    def groups(self) -> list[list[str]]:
        """Returns the names of each array with several names, the main name first."""
        return [names for names in self._all.values() if len(names) > 1]

    def names_of(self, name: str) -> Sequence[str]:
        """Returns every name of the array, including this one."""
        return self._all[self._own[name]]

    def others(self, name: str) -> list[str]:
        """Returns the other names of the array."""
        return [other for other in self.names_of(name) if other != name]

    def spread(self, names: Iterable[str]) -> set[str]:
        """Returns these names and the other names of their arrays."""
        return {other for name in names for other in self.names_of(name)}

    def half_fitted(self, fits: Callable[[str], bool]) -> dict[str, list[str]]:
        """Returns names that match although other names of the same array do not: {name: other
        names}."""
        half: dict[str, list[str]] = {}
        for names in self._all.values():
            fitting = [name for name in names if fits(name)]
            if fitting and len(fitting) < len(names):
                half[fitting[0]] = [name for name in names if name not in fitting]
        return half

    def check_whole(self, fits: Callable[[str], bool], what: str, where: str) -> None:
        """Raises UserError if patterns match one name of an array and not another. what: the key
        with its patterns."""
        for name, others in self.half_fitted(fits).items():
            raise UserError(
                f"{what} matches {name}, but not {' and '.join(others)}, which is the same array "
                "(tied weights)",
                where,
                "patterns that match all of its names or none: "
                f"{short(', '.join([name, *others]))}",
            )

    def lines(self, names: Collection[str], key: str) -> list[str]:
        """Returns header lines for arrays that a key selects by one of several names. names: the
        names that the key's patterns match."""
        half = self.half_fitted(lambda name: name in names)
        return [
            f"{key}: {name} is {' and '.join(others)} too (tied weights): it counts for both"
            for name, others in half.items()
        ]


def check_equal(
    found: Mapping[str, object], ties: Ties, equal: Callable[[str, str], bool], where: str
) -> None:
    """Raises UserError if a file contains different arrays for the names of one array; equal:
    compares two arrays of the file by name."""
    for name in found:
        for other in ties.others(name):
            if other in found and not equal(name, other):
                what = (
                    f"{name} and {other} are one array of the model (tied weights), and the file "
                    "has two different ones"
                )
                fix = (
                    f"model.weights_names=['{other}=unused.{other}'] leaves one out; or a model "
                    "that does not tie them"
                )
                raise UserError(what, where, fix)
