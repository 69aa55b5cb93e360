"""Base class of fp8 and int8: one byte per element, and one scale per block of 64 elements in memory order.

NaNs and infinities are stored separately and exactly, each with its index, so that they do not affect the
scale of their block. Finite values stay finite.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch

from ..records.codec_cost import BLOCK
from ._base import Codec, Encoded, EncodedRow, FixedSize, Tensor, chunks, index_dtype

# Real dtype of the elements, and dtype for arithmetic.
_REALS = {
    torch.float16: (torch.float16, torch.float32),
    torch.bfloat16: (torch.bfloat16, torch.float32),
    torch.float32: (torch.float32, torch.float32),
    torch.float64: (torch.float64, torch.float64),
    torch.complex64: (torch.float32, torch.float32),
    torch.complex128: (torch.float64, torch.float64),
}


class Blockwise(Codec):
    """Base class of codecs with one byte per element and one scale per block."""

    exact = False
    code: ClassVar[torch.dtype]

    def accepts(self, dtype: torch.dtype) -> bool:
        """Return whether `dtype` is a real or complex float dtype wider than one byte."""
        return dtype in _REALS

    def fixed_size(self, dtype: torch.dtype, *, binary: bool = False, device: str = "cpu") -> FixedSize | None:
        """Return one byte per element and one scale per block."""
        if dtype not in _REALS or dtype.is_complex:
            return None
        work_itemsize = _REALS[dtype][1].itemsize
        return FixedSize(bits=8, block_bytes=self.scale_dtype(dtype).itemsize, work_bytes_per_element=4 * work_itemsize)

    def _encode_row(self, row: Tensor) -> EncodedRow | None:
        real, work = _REALS[row.dtype]
        values = row.view(real)
        count = len(values)
        codes = torch.empty(count, dtype=self.code, device=row.device)
        scales = torch.empty(-(-count // BLOCK), dtype=self.scale_dtype(real), device=row.device)
        indices: list[Tensor] = []
        non_finite: list[Tensor] = []
        for chunk in chunks(count):
            blocks = _in_blocks(values[chunk], work)
            largest = blocks.abs().amax(1)
            if not bool(largest.isfinite().all()):
                found = (~values[chunk].isfinite()).nonzero().squeeze(1)
                indices.append((found + chunk.start).to(index_dtype(count)))
                non_finite.append(values[chunk][found])
                if sum(map(len, indices)) * 4 >= count:  # the result would not be smaller
                    return None
                blocks = torch.where(blocks.isfinite(), blocks, 0)
                largest = blocks.abs().amax(1)
            first = chunk.start // BLOCK
            code, scale = self.quantise(blocks, largest)
            codes[chunk] = code.view(-1)[: chunk.stop - chunk.start]
            scales[first : first + len(scale)] = scale
        exceptions = (torch.cat(indices), torch.cat(non_finite)) if indices else ()
        return EncodedRow((codes, scales, *exceptions))

    def _decode_row(self, encoded: Encoded, row: Tensor) -> None:
        real, work = _REALS[row.dtype]
        codes, scales, *exceptions = encoded.parts
        values = row.view(real)
        finite = torch.finfo(real)
        for chunk in chunks(len(values)):
            blocks = _in_blocks(self.widen(codes[chunk]), work)
            first = chunk.start // BLOCK
            blocks = self.restore(blocks, scales[first : first + len(blocks)])
            # Clamp: rounding up in the last binade would overflow to infinity.
            values[chunk] = blocks.view(-1)[: chunk.stop - chunk.start].clamp_(finite.min, finite.max)
        if exceptions:
            indices, non_finite = exceptions
            values[indices.to(torch.int64)] = non_finite

    @abstractmethod
    def scale_dtype(self, real: torch.dtype) -> torch.dtype:
        """Return the dtype of the scales."""

    @abstractmethod
    def quantise(self, blocks: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes and scales of blocks of finite values. `largest` has the largest magnitude of each block."""

    def widen(self, codes: Tensor) -> Tensor:
        """Return codes in a dtype that every device converts quickly."""
        return codes

    @abstractmethod
    def restore(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Return the values of blocks. `codes` are widened, have the dtype for arithmetic, and may be overwritten."""


def _in_blocks(part: Tensor, work: torch.dtype) -> Tensor:
    whole = -(-len(part) // BLOCK) * BLOCK
    if whole == len(part):
        return part.to(work).view(-1, BLOCK)
    padded = torch.zeros(whole, dtype=work, device=part.device)
    padded[: len(part)] = part
    return padded.view(-1, BLOCK)
