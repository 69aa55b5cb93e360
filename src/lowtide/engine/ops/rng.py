"""Generator states: captured before an op draws, set for its replay, and restored afterwards (Rule 8)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch


class Draw(NamedTuple):
    """The generator of an op (None: the default one of the device) and its state before the op."""

    generator: torch.Generator | None
    device: torch.device
    state: torch.Tensor


def capture(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Draw:
    """Return the generator of a call with these arguments, and its present state."""
    generator = kwargs.get("generator")
    if generator is None:
        generator = next((a for a in args if isinstance(a, torch.Generator)), None)
    if generator is not None:
        return Draw(generator, generator.device, generator.get_state())
    device = _device(args, kwargs)
    return Draw(None, device, _default_state(device))


@contextmanager
def replaying(draw: Draw) -> Iterator[None]:
    """Set the generator to the state of `draw` inside the block. Restore the present state afterwards."""
    if draw.generator is not None:
        current = draw.generator.get_state()
        draw.generator.set_state(draw.state)
        try:
            yield
        finally:
            draw.generator.set_state(current)
    else:
        current = _default_state(draw.device)
        _set_default_state(draw.device, draw.state)
        try:
            yield
        finally:
            _set_default_state(draw.device, current)


def _device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    for a in args:
        if isinstance(a, torch.Tensor):
            return a.device
        if isinstance(a, (list, tuple)) and a and isinstance(a[0], torch.Tensor):
            return a[0].device
    device = kwargs.get("device")
    return torch.device("cpu") if device is None else torch.device(device)


def _default_state(device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return torch.default_generator.get_state()
    if device.type == "meta":
        return torch.empty(0, dtype=torch.uint8)  # meta tensors draw nothing
    state: torch.Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def _set_default_state(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cpu":
        torch.default_generator.set_state(state)
    elif device.type != "meta":
        torch.get_device_module(device).set_rng_state(state, device)
