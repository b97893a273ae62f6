"""What ranks make next, of what each of them asks for: the pure function that all of them call."""

from __future__ import annotations

from hvdtrain.horovod.engine.agree import Asked, Standing, decide
from hvdtrain.horovod.engine.requests import Key, Signature


def asked(*names: str, bucket: int = 0) -> list[Asked]:
    return [
        Asked(Signature(name, "allreduce", "sum", ("float32",), ((3,),)), bucket) for name in names
    ]


def key(name: str) -> Key:
    return "allreduce", name, False


def test_what_all_ask_for_is_made_in_the_order_of_the_first_rank_and_the_rest_waits() -> None:
    found = decide([Standing(0, asked("a", "b", "c")), Standing(1, asked("c", "a", "d"))])
    assert [ready.signature.name for ready in found.ready] == ["a", "c"]
    assert found.missing == {key("b"): [1], key("d"): [0]} and not found.refused


def test_calls_of_two_kinds_and_of_several_tensors_share_a_name() -> None:
    one = Signature("a", "allreduce", "sum", ("float32",), ((3,),))
    signatures = (
        one,
        one._replace(kind="allgather"),
        one._replace(dtypes=("float32",) * 2, shapes=((3,), (3,))),
    )
    both = [Asked(signature, 0) for signature in signatures]
    assert [
        ready.signature for ready in decide([Standing(0, both), Standing(1, both[::-1])]).ready
    ] == list(signatures)


def test_a_rank_that_has_joined_takes_part_in_everything() -> None:
    found = decide([Standing(0, [], joined=True), Standing(1, asked("a")), Standing(2, asked("a"))])
    (ready,) = found.ready
    assert ready.signature.name == "a" and len(ready.buckets) == 2  # ranks that an average is over


def test_an_average_counts_a_rank_that_asked_for_it_before_it_joined() -> None:
    (ready,) = decide([Standing(0, asked("a"), joined=True), Standing(1, asked("a"))]).ready
    assert len(ready.buckets) == 2


def test_other_shapes_and_ops_are_named_with_both_ranks_and_values() -> None:
    other = Asked(Signature("a", "allreduce", "max", ("float32",), ((4,),)), 0)
    (refusal,) = decide([Standing(0, asked("a")), Standing(3, [other])]).refused.values()
    assert (
        refusal.what
        == "ranks do not agree: op sum on rank 0, max on rank 3, shape (3,) on rank 0, (4,) on "
        "rank 3"
    )
    assert not refusal.of_missing


def test_what_differs_is_refused_once_every_rank_has_asked() -> None:
    other = Asked(Signature("a", "allreduce", "max", ("float32",), ((3,),)), 0)
    found = decide([Standing(0, asked("a")), Standing(1, [other]), Standing(2, [])])
    assert not found.refused and found.missing == {key("a"): [2]}


def test_what_a_rank_that_has_ended_lacks_is_refused() -> None:
    (refusal,) = decide([Standing(0, asked("a")), Standing(1, [], leaving=True)]).refused.values()
    assert refusal.what == "rank 1 ended without it; rank 0 asked for it" and refusal.of_missing


def test_ranks_that_wait_for_different_things_are_a_deadlock_once_one_has_waited_long() -> None:
    standings = [Standing(0, asked("a"), blocked=True), Standing(1, asked("b"), blocked=True)]
    assert not decide(standings).refused
    refused = decide([standings[0], standings[1]._replace(overdue=True)]).refused
    text = "rank 0 waits for allreduce 'a'; rank 1 waits for allreduce 'b'"
    assert refused[key("a")].what == f"rank 1 did not ask for it and cannot: {text}"
    assert refused[key("b")].what == f"rank 0 did not ask for it and cannot: {text}"


def test_it_is_no_deadlock_while_one_rank_computes() -> None:
    standings = [Standing(0, asked("a"), blocked=True, overdue=True), Standing(1, asked("b"))]
    assert not decide(standings).refused


def test_a_broadcast_whose_root_has_joined_is_refused() -> None:
    request = Asked(Signature("a", "broadcast", "", ("float32",), ((3,),), root=1), 0)
    (refusal,) = decide([Standing(0, [request]), Standing(1, [], joined=True)]).refused.values()
    assert refusal.what == "its root, rank 1, has joined"


def test_buckets_of_every_rank_are_told_so_that_fusion_does_not_depend_on_time() -> None:
    (ready,) = decide([Standing(0, asked("a", bucket=4)), Standing(1, asked("a", bucket=2))]).ready
    assert ready.buckets == (4, 2)
