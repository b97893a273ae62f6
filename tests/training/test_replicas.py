"""The message about ranks that are no longer equal."""

from __future__ import annotations

from hvdtrain.errors import DIVERGED
from hvdtrain.training.replicas.compare import DigestTables, explain

SAME = {"p.a": 1, "p.b": 2, "s.a.0": 3, "step": 4}


def whole(tables: list[dict[str, int]]) -> list[DigestTables]:
    return [DigestTables(table, {}) for table in tables]


def test_the_first_difference_and_the_ranks_of_the_minority_are_named() -> None:
    tables = [SAME, SAME, SAME | {"p.b": 9, "s.a.0": 9}, SAME]
    error = explain(whole(tables), ["n1", "n1", "n2", "n2"], 120)
    assert error.code == DIVERGED
    assert (error.what, error.where) == (
        "ranks differ after step 120: p.b and 1 more",
        "rank 2 on n2, against 3 equal ranks",
    )
    assert "newest checkpoint" in error.fix


def test_of_two_ranks_the_second_is_named() -> None:
    error = explain(whole([SAME, SAME | {"step": 5}]), ["n1", "n2"], 5)
    assert error.what == "ranks differ after step 5: step"
    assert (
        error.where
        == "rank 1 on n2, against 1 equal rank; there is no majority, so it is unknown which of "
        "them is wrong"
    )


def test_a_name_that_a_rank_lacks_is_a_difference_and_many_ranks_are_counted() -> None:
    short = {name: value for name, value in SAME.items() if name != "p.a"}
    error = explain(whole([SAME] * 10 + [short] * 9), ["h"] * 19, 7)
    assert error.what == "ranks differ after step 7: p.a"
    assert (
        error.where
        == "ranks 10 on h, 11 on h, 12 on h, 13 on h, 14 on h, 15 on h, 16 on h, 17 on h and 1 "
        "more, against 10 equal ranks"
    )


def test_a_part_is_compared_with_its_copies_alone() -> None:
    """Ranks 0 and 2, and 1 and 3, have the same part."""
    parts = [{"s.a.0[0:5]": 1}, {"s.a.0[5:9]": 2}, {"s.a.0[0:5]": 1}, {"s.a.0[5:9]": 7}]
    error = explain([DigestTables(SAME, part) for part in parts], ["n1", "n1", "n2", "n2"], 30)
    assert error.what == "ranks differ after step 30: s.a.0[5:9]"
    assert error.where.startswith("rank 3 on n2, against 1 equal rank;")
