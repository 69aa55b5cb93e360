"""Sets as bits: the same as sets, and what is decided with them is obeyed alike."""

import pytest
from hypothesis import given, settings, strategies as st

from lowtide.planning import Problem
from lowtide.planning.bits import Weights, bits_of, members_of, where

from .traces import traces, unet_trace


@given(st.sets(st.integers(0, 200)))
def test_there_and_back(members):
    assert members_of(bits_of(members)) == sorted(members)
    assert where(place in members for place in range(201)) == bits_of(members)


@given(st.lists(st.integers(0, 10**12), max_size=40), st.data())
def test_weights_are_added_up(weights, data):
    members = data.draw(st.sets(st.sampled_from(range(len(weights))))) if weights else set()
    assert Weights(weights).total(bits_of(members)) == sum(weights[i] for i in members)
    seconds = [weight / 7 for weight in weights]
    assert Weights(seconds).total(bits_of(members)) == pytest.approx(sum(seconds[i] for i in members))


@settings(max_examples=100, deadline=None)
@given(st.one_of(traces(), st.just(unet_trace(2))), st.data())
def test_the_engine_obeys_a_set_as_it_does_a_list(trace, data):
    problem = Problem(trace)
    keep = [pinned or data.draw(st.booleans()) for pinned in problem.pinned]
    assert problem.effective_bits(where(keep)) == where(problem.effective_decisions(keep))
