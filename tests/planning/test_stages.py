"""The lower bound with backward cut into stages."""

import pytest

from lowtide.planning import Problem, lower_bound
from lowtide.records import Op, Unpack, Value

from .traces import make_trace


def needed_twice_trace():
    """What is made first (2) is cheap and large; backward needs it first and last, and in between there is no room."""
    ops = (
        Op("dear", "", 100.0, (0,), (1,)),
        Op("cheap", "", 1.0, (1,), (2,)),
        Op("cheap", "", 1.0, (2,), (3,)),
        Op("dear", "", 100.0, (0,), (4,), other_bytes=21),
    )
    values = (Value(1, None, 0, 3), Value(1, 0, 1, 1), Value(10, 1, 2, 2), Value(10, 2, 3, 2), Value(10, 3, 4, 3))
    unpacks = (Unpack(3, 0, 1, 1.0), Unpack(4, 1, 21, 1.0), Unpack(2, 2, 1, 1.0))
    return make_trace(ops=ops, unpacks=unpacks, values=values, saved=(2, 3, 4), step_s=300.0)


def test_the_bound_counts_an_op_that_is_replayed_twice():
    """Keeping the value that backward needs first and last does not fit in between."""
    bound = lower_bound(Problem(needed_twice_trace()), 32)
    assert not bound.impossible
    assert bound.step_s == pytest.approx(303.0)
