"""Measures the cost of codecs whose compressed size does not depend on the content, for the planner."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch

from ..records import CodecCost, Trace
from . import Codec, measure
from ._base import CHUNK_ELEMENTS
from .names import CODECS, resolve

_SMALL_ELEMENTS, _LARGE_ELEMENTS = 2**14, 2**18
_ROUNDS = 3


def codec_costs_for(trace: Trace, codecs: str | Sequence[str] | Sequence[Codec] | None) -> tuple[CodecCost, ...]:
    """Return the costs of the allowed codecs for every dtype of the values in `trace`."""
    named = [codec.name if isinstance(codec, Codec) else codec for codec in codecs or ()]
    allowed = resolve(codecs if isinstance(codecs, str) else named)
    contents = sorted({(value.dtype, value.binary) for value in trace.values if value.dtype})
    found = [
        measure_codec_cost(codec.name, dtype, trace.device, binary=binary)
        for codec in allowed
        for dtype, binary in contents
    ]
    return tuple(dict.fromkeys(codec_cost for codec_cost in found if codec_cost is not None))


def measure_codec_costs(codecs: Iterable[Codec], dtypes: Iterable[torch.dtype], device: str) -> None:
    """Measure the costs of codecs for masks and for values of these dtypes, so that planning need not allocate."""
    names = {str(dtype).removeprefix("torch.") for dtype in (torch.bool, *dtypes)}
    for codec, name, binary in itertools.product(codecs, sorted(names), (False, True)):
        measure_codec_cost(codec.name, name, device, binary=binary)


@lru_cache(maxsize=256)
def measure_codec_cost(
    codec_name: str, dtype_name: str, device: str = "cpu", *, binary: bool = False
) -> CodecCost | None:
    """Return size and time of a codec for a dtype. None if the size depends on the content or the codec does not apply.

    `binary` means that the values have at most two distinct elements.

    >>> from lowtide.codecs.costs import measure_codec_cost
    >>> codec_cost = measure_codec_cost("mask", "bool")
    >>> codec_cost.compressed_bytes(64)
    8
    """
    codec = CODECS[codec_name]
    dtype = getattr(torch, dtype_name)
    if binary and codec.fixed_size(dtype) is not None:
        return measure_codec_cost(codec_name, dtype_name, device)  # same cost, one cache entry
    size = codec.fixed_size(dtype, binary=binary, device=device)
    if size is None:
        return None
    generator = torch.Generator(device).manual_seed(0)  # leaves the global random state unchanged
    content = torch.randn(_LARGE_ELEMENTS, device=device, generator=generator)
    row = (content > 0).to(dtype) if binary or dtype is torch.bool else content.to(dtype)
    small, large = (measure(codec, row[:count], _ROUNDS) for count in (_SMALL_ELEMENTS, _LARGE_ELEMENTS))
    if small is None or large is None:
        return None
    nbytes = _SMALL_ELEMENTS * dtype.itemsize, _LARGE_ELEMENTS * dtype.itemsize
    compress_s, compress_s_per_byte = _fit_line(nbytes, small.encode_bytes_per_second, large.encode_bytes_per_second)
    decompress_s, decompress_s_per_byte = _fit_line(
        nbytes, small.decode_bytes_per_second, large.decode_bytes_per_second
    )
    return CodecCost(
        codec=codec_name,
        dtype=dtype_name,
        exact=codec.exact,
        itemsize=dtype.itemsize,
        bits=size.bits,
        block_bytes=size.block_bytes,
        work_bytes_per_element=size.work_bytes_per_element,
        chunk_elements=CHUNK_ELEMENTS,
        compress_s=compress_s,
        compress_s_per_byte=compress_s_per_byte,
        decompress_s=decompress_s,
        decompress_s_per_byte=decompress_s_per_byte,
        binary=binary,
    )


def _fit_line(nbytes: tuple[int, int], small_bytes_per_s: float, large_bytes_per_s: float) -> tuple[float, float]:
    """Return fixed seconds and seconds per byte of the line through two measurements."""
    small_s, large_s = nbytes[0] / small_bytes_per_s, nbytes[1] / large_bytes_per_s
    per_byte = max(0.0, (large_s - small_s) / (nbytes[1] - nbytes[0]))
    return max(0.0, small_s - nbytes[0] * per_byte), per_byte
