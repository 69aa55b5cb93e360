"""What fp8 and int8 share: a byte a value and a scale for each block of 64 values.

NaNs and infinities are kept apart, bit for bit, with their places (4 bytes and the element for each), so they
do not spoil the scale of their block; finite values stay finite. Blocks run along the memory.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch

from ._base import Codec, Encoded, EncodedRow, FixedSize, Tensor, chunks, index_dtype

BLOCK = 64

# The real dtype of the elements, and that in which they are computed with.
_REALS = {
    torch.float16: (torch.float16, torch.float32),
    torch.bfloat16: (torch.bfloat16, torch.float32),
    torch.float32: (torch.float32, torch.float32),
    torch.float64: (torch.float64, torch.float64),
    torch.complex64: (torch.float32, torch.float32),
    torch.complex128: (torch.float64, torch.float64),
}


class Blockwise(Codec):
    """A byte a value, a scale a block."""

    exact = False
    code: ClassVar[torch.dtype]

    def accepts(self, dtype: torch.dtype) -> bool:
        """Floats of more than a byte, real or complex."""
        return dtype in _REALS

    def fixed_size(self, dtype: torch.dtype, *, binary: bool = False) -> FixedSize | None:
        """A byte a value and a scale a block."""
        if dtype not in _REALS or dtype.is_complex:
            return None
        work_bytes_per_element = 4 * _REALS[dtype][1].itemsize
        return FixedSize(
            bits=8, block_bytes=self.scale_dtype(dtype).itemsize, work_bytes_per_element=work_bytes_per_element
        )

    def _encode_row(self, row: Tensor) -> EncodedRow | None:
        real, work = _REALS[row.dtype]
        values = row.view(real)
        count = len(values)
        codes = torch.empty(count, dtype=self.code, device=row.device)
        scales = torch.empty(-(-count // BLOCK), dtype=self.scale_dtype(real), device=row.device)
        places: list[Tensor] = []
        odd: list[Tensor] = []
        for chunk in chunks(count):
            blocks = _in_blocks(values[chunk], work)
            largest = blocks.abs().amax(1)
            if not bool(largest.isfinite().all()):
                here = (~values[chunk].isfinite()).nonzero().squeeze(1)
                places.append((here + chunk.start).to(index_dtype(count)))
                odd.append(values[chunk][here])
                if sum(map(len, places)) * 4 >= count:  # more than is saved; do not pile up the rest
                    return None
                blocks = torch.where(blocks.isfinite(), blocks, 0)
                largest = blocks.abs().amax(1)
            first = chunk.start // BLOCK
            code, scale = self.quantise(blocks, largest)
            codes[chunk] = code.view(-1)[: chunk.stop - chunk.start]
            scales[first : first + len(scale)] = scale
        rest = (torch.cat(places), torch.cat(odd)) if places else ()
        return EncodedRow((codes, scales, *rest))

    def _decode_row(self, encoded: Encoded, row: Tensor) -> None:
        real, work = _REALS[row.dtype]
        codes, scales, *rest = encoded.parts
        values = row.view(real)
        finite = torch.finfo(real)
        for chunk in chunks(len(values)):
            blocks = _in_blocks(self.widen(codes[chunk]), work)
            first = chunk.start // BLOCK
            blocks = self.restore(blocks, scales[first : first + len(blocks)])
            # Rounding up in the last binade would overflow; infinities proper come below.
            values[chunk] = blocks.view(-1)[: chunk.stop - chunk.start].clamp_(finite.min, finite.max)
        if rest:
            places, odd = rest
            values[places.to(torch.int64)] = odd

    @abstractmethod
    def scale_dtype(self, real: torch.dtype) -> torch.dtype:
        """In what the scales are kept."""

    @abstractmethod
    def quantise(self, blocks: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and scales of blocks of finite values with these largest magnitudes."""

    def widen(self, codes: Tensor) -> Tensor:
        """Codes in a dtype that every device converts quickly."""
        return codes

    @abstractmethod
    def restore(self, codes: Tensor, scales: Tensor) -> Tensor:
        """The values of blocks; `codes` are widened, of the dtype to compute in, and may be overwritten."""


def _in_blocks(part: Tensor, work: torch.dtype) -> Tensor:
    whole = -(-len(part) // BLOCK) * BLOCK
    if whole == len(part):
        return part.to(work).view(-1, BLOCK)
    padded = torch.zeros(whole, dtype=work, device=part.device)
    padded[: len(part)] = part
    return padded.view(-1, BLOCK)
