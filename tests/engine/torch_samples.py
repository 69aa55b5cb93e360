"""Torch's own samples of its ops and modules, as programs that run with and without a scope.

A sample runs in several forms: the op as a function, in place, on inputs without grad, and so on. Its inputs are
copied inside the scope, so that they and the op can be replayed, and the loss squares the results, so that autograd
saves them.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.autograd import forward_ad
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db

from lowtide.torch_compat import tree_leaves

Tensor = torch.Tensor
Results = list[Tensor | None]
DTYPES = (torch.float64, torch.float32, torch.complex128)
FUNCTION = "function"
FORMS = (
    FUNCTION,
    "in place",
    "in place on a view",
    "without grad",
    "some without grad",
    "conjugated",
    "double backward",
    "forward mode",
    "autocast",
)


class Case(NamedTuple):
    """One sample in one form."""

    op: str
    form: str
    sample: str
    run: Callable[[Any], Results]
    """Run in a scope. Returns all outputs, gradients and the state of the generator."""

    def __str__(self) -> str:
        return f"{self.op} ({self.form}, {self.sample})"


def seed(name: str) -> None:
    """Seed all generators, so that the samples of an op do not depend on those before."""
    number = zlib.crc32(name.encode())
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


OPS = {op.formatted_name: op for op in op_db if op.supports_autograd}
MODULES = {info.name: info for info in module_db}


def op_cases(name: str, n_samples: int, forms: tuple[str, ...]) -> Iterator[Case]:
    """Yield the cases of an op: `n_samples` of each dtype, in all of `forms` that apply."""
    op = OPS[name]
    for dtype in DTYPES:
        if dtype not in op.supported_backward_dtypes("cpu"):
            continue
        seed(name)
        samples = op.sample_inputs("cpu", dtype, requires_grad=True)
        for k, sample in enumerate(itertools.islice(samples, n_samples)):
            for form in forms:
                function = _in_form(op, form)
                if function is None or (form == "conjugated" and not dtype.is_complex):
                    continue
                if form == "autocast" and dtype is not torch.float32:
                    continue
                label = f"{str(dtype).removeprefix('torch.')}, sample {k}"
                yield Case(name, form, label, _op_runner(function, sample, form))


def _in_form(op: Any, form: str) -> Callable[..., Any] | None:
    """Return the op as a function that is called in this form, or None if it has no such form."""
    in_place = op.inplace_variant
    if form == "in place":
        return in_place  # type: ignore[no-any-return]
    if form == "in place on a view":
        return None if in_place is None else lambda x, *a, **k: (in_place(x.view_as(x), *a, **k), x)
    if (form == "double backward" and not op.supports_gradgrad) or (
        form == "forward mode" and not op.supports_forward_ad
    ):
        return None
    return op.op  # type: ignore[no-any-return]


def _op_runner(function: Callable[..., Any], sample: Any, form: str) -> Callable[[Any], Results]:
    def body(inputs: Any) -> Any:
        x, args, kwargs = inputs
        return sample.output_process_fn_grad(function(x, *args, **kwargs))

    return lambda scope: _run(body, (sample.input, sample.args, sample.kwargs), form, scope)


def module_cases(name: str, n_samples: int) -> Iterator[Case]:
    """Yield the cases of a module class, in training and in evaluation."""
    info = MODULES[name]
    for dtype, training in itertools.product(DTYPES, (True, False)):
        if dtype not in info.dtypes:
            continue
        seed(name)
        samples = info.module_inputs_func(info, "cpu", dtype, requires_grad=True, training=training)
        for k, sample in enumerate(itertools.islice(samples, n_samples)):
            made = sample.constructor_input
            module = info.module_cls(*made.args, **made.kwargs).to(dtype).train(training)
            label = f"{str(dtype).removeprefix('torch.')}, sample {k}"
            inputs = (sample.forward_input.args, sample.forward_input.kwargs)
            yield Case(name, "training" if training else "evaluation", label, _module_runner(module, inputs))


def _module_runner(original: torch.nn.Module, inputs: Any) -> Callable[[Any], Results]:
    def run(scope: Any) -> Results:
        module = copy.deepcopy(original)
        results = _run(lambda both: module(*both[0], **both[1]), inputs, FUNCTION, scope, list(module.parameters()))
        return [*results, *module.buffers()]

    return run


def _run(
    body: Callable[[Any], Any], inputs: Any, form: str, scope: Any, parameters: list[Tensor] | None = None
) -> Results:
    torch.manual_seed(0)
    leaves = list(parameters or ())
    counter = itertools.count()

    def leaf(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return copy.deepcopy(t) if isinstance(t, torch.Generator) else t
        made = t.detach().clone()
        if form == "conjugated" and made.is_complex() and made.layout is torch.strided:
            made = made.resolve_conj().conj()
        wants_grad = form != "without grad" and not (form == "some without grad" and next(counter) % 2)
        if t.requires_grad and wants_grad:
            leaves.append(made.requires_grad_())
        return made

    def copied(t: Any) -> Any:
        if not isinstance(t, Tensor) or t.layout is not torch.strided or not (t.is_floating_point() or t.is_complex()):
            return t
        return t * 1 if form == "conjugated" else t.clone()

    fresh = torch.utils._pytree.tree_map(leaf, inputs)
    with contextlib.ExitStack() as stack:
        stack.enter_context(scope)
        if form == "forward mode":
            stack.enter_context(forward_ad.dual_level())
            fresh = torch.utils._pytree.tree_map(_dual, fresh)
        inputs = torch.utils._pytree.tree_map(copied, fresh)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=form == "autocast"):
            outputs = [t for t in tree_leaves(body(inputs)) if isinstance(t, Tensor)]
        if form == "forward mode":
            outputs = [t for dual in outputs for t in forward_ad.unpack_dual(dual) if t is not None]
        loss = sum((_squares(t) for t in outputs if t.requires_grad), torch.zeros((), dtype=torch.float64))
        outputs = [t.detach() for t in outputs]
    grads: Results = []
    if loss.requires_grad:
        twice = form == "double backward"
        grads += torch.autograd.grad(loss, leaves, allow_unused=True, create_graph=twice)
        second = sum((_squares(g) for g in grads if twice and g is not None and g.requires_grad), torch.zeros(()))
        if second.requires_grad:
            grads += torch.autograd.grad(second, leaves, allow_unused=True)
    return [*outputs, *(g if g is None else g.detach() for g in grads), torch.get_rng_state()]


def _dual(t: Any) -> Any:
    if not isinstance(t, Tensor) or not t.requires_grad or t.layout is not torch.strided:
        return t
    return forward_ad.make_dual(t, torch.linspace(-1, 1, t.numel(), dtype=t.dtype).view(t.shape))


def _squares(t: Tensor) -> Tensor:
    if not (t.is_floating_point() or t.is_complex()):
        return torch.zeros(())
    dense = t if t.layout is torch.strided else t.to_dense()
    return ((dense * dense.conj()).real if dense.is_complex() else dense * dense).sum()


def same(first: Results, second: Results) -> bool:
    """Return whether all tensors have the same dtypes, shapes and bits. NaN equals itself; 0.0 and -0.0 differ."""
    return len(first) == len(second) and all(_same(a, b) for a, b in zip(first, second, strict=True))


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype is b.dtype and a.shape == b.shape and a.layout is b.layout and torch.equal(_bits(a), _bits(b))


def _bits(t: Tensor) -> Tensor:
    dense = t.detach() if t.layout is torch.strided else t.detach().to_dense()
    plain = torch.empty(dense.shape, dtype=dense.dtype)
    plain.copy_(dense)
    return plain.reshape(-1).view(torch.uint8) if plain.numel() else plain


def fill_free_memory(byte: int) -> None:
    """Fill memory that the next ops will probably get, so that a kernel that reads it gives another result."""
    del [torch.full((size,), byte, dtype=torch.uint8) for size in (8, 16, 32, 64, 128, 256, 512, 1024) * 12][:]
