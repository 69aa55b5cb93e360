"""Bit sets behave like sets, and decisions as bit sets like lists of decisions."""

import pytest
from hypothesis import given, settings, strategies as st

from lowtide.planning import Problem
from lowtide.planning.bits import Weights, bits_of, bits_where, members_of

from .traces import traces, unet_trace


@given(st.sets(st.integers(0, 200)))
def test_members_survive_conversion(members):
    assert members_of(bits_of(members)) == sorted(members)
    assert bits_where(index in members for index in range(201)) == bits_of(members)


@given(st.lists(st.integers(0, 10**12), max_size=40), st.data())
def test_weights_of_members_are_summed(weights, data):
    members = data.draw(st.sets(st.sampled_from(range(len(weights))))) if weights else set()
    assert Weights(weights).total(bits_of(members)) == sum(weights[i] for i in members)
    seconds = [weight / 7 for weight in weights]
    assert Weights(seconds).total(bits_of(members)) == pytest.approx(sum(seconds[i] for i in members))


@settings(max_examples=100, deadline=None)
@given(st.one_of(traces(), st.just(unet_trace(2))), st.data())
def test_effective_decisions_are_the_same_for_sets_and_lists(trace, data):
    problem = Problem(trace)
    keep = [pinned or data.draw(st.booleans()) for pinned in problem.pinned]
    assert problem.effective_bits(bits_where(keep)) == bits_where(problem.effective_decisions(keep))
