from __future__ import annotations

from typing import Annotated, Literal, NotRequired

import pytest
from annotated_types import Interval, Len
from typing_extensions import TypedDict

from birthmark.schema import SchemaError, check


class Leaf(TypedDict):
    n: Annotated[int, Interval(ge=0, le=10)]
    name: NotRequired[str | None]


class Tree(TypedDict):
    leaves: list[Leaf]
    by_name: NotRequired[dict[str, float | None]]
    kind: Literal["a", 2]
    digest: NotRequired[Annotated[str, Len(4, 4)]]


LEAVES = [{"n": 3, "name": None}, {"n": 0, "other": ...}]
SOUND = {"leaves": LEAVES, "by_name": {"x": 1, "y": 0.5, "z": None}, "kind": 2}


def test_what_a_schema_says_is_taken():
    check(SOUND, Tree)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": True}, "kind is True, not one of 'a' or 2"),
        ({"kind": None}, "kind is None, not one of 'a' or 2"),
        ({"leaves": {}}, "leaves is {}, not a list"),
        ({"leaves": [{"n": 3}, {}]}, "leaves[1].n is missing"),
        ({"leaves": [{"n": 3.0}]}, "leaves[0].n is 3.0, not a whole number"),
        ({"leaves": [{"n": True}]}, "leaves[0].n is True, not a whole number"),
        ({"leaves": [{"n": 11}]}, "leaves[0].n is 11, not at most 10"),
        ({"leaves": [{"n": 1, "name": 7}]}, "leaves[0].name is 7, not text"),
        ({"digest": "abc"}, "digest has the length 3, not a text of at least 4"),
        ({"by_name": {"x": "1"}}, "by_name.x is '1', not a number"),
        ({"by_name": {"x": 10**400}}, "by_name.x is a number of very many digits, not a number"),
        ({"by_name": {1: 1.0}}, "a name in by_name is 1, not text"),
        ({"by_name": {"x": list(range(100))}}, "by_name.x is a list, not a number"),
    ],
)
def test_what_it_does_not_say_is_named_with_its_place(changes, message):
    with pytest.raises(SchemaError) as error:
        check(SOUND | changes, Tree)
    assert str(error.value) == message
