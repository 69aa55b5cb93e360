"""The bytes of results are known before an op runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from lowtide.engine.ops.facts import facts_of
from lowtide.engine.ops.output_sizes import output_bytes, shapes_of

DTYPES = (torch.float32, torch.float64, torch.float16, torch.int64, torch.bool)
aten = torch.ops.aten
Draw = Callable[[st.SearchStrategy[Any]], Any]


@st.composite
def tensors(draw: Draw, shape: tuple[int, ...]) -> torch.Tensor:
    """Draw a tensor that broadcasts to `shape`, perhaps transposed in memory."""
    own = [n if draw(st.booleans()) else 1 for n in shape[draw(st.integers(0, len(shape))) :]]
    tensor = torch.ones(own, dtype=draw(st.sampled_from(DTYPES)))
    return tensor.mT.contiguous().mT if tensor.dim() >= 2 and draw(st.booleans()) else tensor


@st.composite
def calls(draw: Draw) -> tuple[Any, tuple[Any, ...]]:
    """Draw an elementwise op and its arguments."""
    shape = tuple(draw(st.lists(st.integers(1, 4), max_size=3)))
    op, n_tensors, numbers = draw(
        st.sampled_from(
            [
                (aten.add.Tensor, 2, ()), (aten.mul.Tensor, 2, ()), (aten.gt.Tensor, 2, ()), (aten.sin.default, 1, ()),
                (aten.mul.Scalar, 1, (2.5,)), (aten.pow.Tensor_Scalar, 1, (2,)), (aten.eq.Scalar, 1, (1,)),
                (aten.maximum.default, 2, ()), (aten.neg.default, 1, ()), (aten.addcmul.default, 3, ()),
                (aten.clamp.default, 1, (0, 1)), (aten.where.self, 3, ()),
            ]
        )
    )  # fmt: skip
    found = [draw(tensors(shape)) for _ in range(n_tensors)]
    if op is aten.where.self:
        found[0] = found[0].bool()
    return op, (*found, *numbers)


@settings(max_examples=300, deadline=None)
@given(calls())
def test_elementwise_results(call: tuple[Any, tuple[Any, ...]]) -> None:
    op, args = call
    try:
        result = op(*args)
    except (RuntimeError, NotImplementedError):  # not for these dtypes
        return
    assert output_bytes((op, shapes_of(args)), facts_of(op), args, {}) == (result.untyped_storage().nbytes(), True)


def test_numbers_in_tensors_without_dimensions_do_not_promote() -> None:
    half, number = torch.ones(6, dtype=torch.float16), torch.tensor(2.0, dtype=torch.float64)
    args = half, number
    found = output_bytes(("half", shapes_of(args)), facts_of(aten.mul.Tensor), args, {})
    assert found == ((half * number).untyped_storage().nbytes(), True)
    args = torch.ones(6, dtype=torch.float64), number
    found = output_bytes(("double", shapes_of(args)), facts_of(aten.mul.Tensor), args, {})
    assert found == (48, True)


@pytest.mark.parametrize("keep", [torch.preserve_format, torch.contiguous_format])
def test_results_of_other_ops_come_from_meta_tensors(keep: torch.memory_format) -> None:
    x = torch.ones(3, 4).expand(2, 3, 4)
    kwargs = {"memory_format": keep}
    found = output_bytes(("clone", keep), facts_of(aten.clone.default), (x,), kwargs)
    assert found == (x.clone(**kwargs).untyped_storage().nbytes(), True)
