"""Generator states: captured before an op draws, set for its replay, and restored afterwards (Rule 8).

A state is held as `bytes`, like the other Python objects of a recipe: not in memory of torch's allocator, which budgets
count. As a tensor it exists only while it is captured.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch


class Draw(NamedTuple):
    """The generator of an op (None: the default one of the device) and its state before the op."""

    generator: torch.Generator | None
    device: torch.device
    state: bytes


def capture(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Draw:
    """Return the generator of a call with these arguments, and its present state."""
    generator = kwargs.get("generator")
    if generator is None:
        generator = next((a for a in args if isinstance(a, torch.Generator)), None)
    if generator is not None:
        return Draw(generator, generator.device, _content(generator.get_state()))
    device = _device(args, kwargs)
    return Draw(None, device, _default_state(device))


@contextmanager
def replaying(draw: Draw) -> Iterator[None]:
    """Set the generator to the state of `draw` inside the block. Restore the present state afterwards."""
    if draw.generator is not None:
        current = _content(draw.generator.get_state())
        draw.generator.set_state(_tensor(draw.state))
        try:
            yield
        finally:
            draw.generator.set_state(_tensor(current))
    else:
        current = _default_state(draw.device)
        _set_default_state(draw.device, draw.state)
        try:
            yield
        finally:
            _set_default_state(draw.device, current)


@functools.cache  # a fact about torch's generators
def state_bytes(device_type: str) -> int:
    """Return the bytes that capturing a generator state takes in the memory of a device. States are CPU tensors."""
    return torch.default_generator.get_state().nbytes if device_type == "cpu" else 0


def _device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    for a in args:
        if isinstance(a, torch.Tensor):
            return a.device
        if isinstance(a, (list, tuple)) and a and isinstance(a[0], torch.Tensor):
            return a[0].device
    device = kwargs.get("device")
    return torch.device("cpu") if device is None else torch.device(device)


def _default_state(device: torch.device) -> bytes:
    if device.type == "cpu":
        return _content(torch.default_generator.get_state())
    if device.type == "meta":
        return b""  # meta tensors draw nothing
    return _content(torch.get_device_module(device).get_rng_state(device))


def _set_default_state(device: torch.device, state: bytes) -> None:
    if device.type == "cpu":
        torch.default_generator.set_state(_tensor(state))
    elif device.type != "meta":
        torch.get_device_module(device).set_rng_state(_tensor(state), device)


def _content(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


def _tensor(state: bytes) -> torch.Tensor:
    """Return a tensor that shares the memory of a copy of the state."""
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
