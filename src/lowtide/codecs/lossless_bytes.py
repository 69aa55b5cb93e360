"""bytes: lossless compression of the raw bytes with Blosc2 (byte shuffle, then Zstandard at its fastest level).

Exact. The shuffle groups the first bytes of all elements, then the second bytes, and so on. Signs and
exponents of activations compress; mantissas hardly do. float32 activations become about 15 % smaller,
bfloat16 activations about 30 %. Blosc2 shuffles inside the CPU cache: for float32 activations and the same
ratio, it compresses twice as fast and decompresses seven times as fast as the `zstandard` package.

The compressed bytes are in host memory, also for tensors on other devices (not tested on a GPU). They exist
twice while the frames are joined. One thread is used, and Blosc2 releases the GIL, which is a setting for the
whole process. The package `blosc2` is an optional extra and is imported on first use.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from .._errors import MissingPackageError
from ._base import Codec, Encoded, EncodedRow, Tensor, sample

_FRAME_BYTES = 16 * 2**20  # compressed in one call; Blosc2 allows up to 2 GiB
_MIN_SAMPLE_RATIO = 1.05  # if the sample compresses less, the tensor is not compressed


class Bytes(Codec):
    """Compresses the raw bytes without loss."""

    name = "bytes"
    exact = True

    @staticmethod
    def available() -> bool:
        """Return whether the package is installed, without importing it."""
        return importlib.util.find_spec("blosc2") is not None

    def _encode_row(self, row: Tensor) -> EncodedRow | None:
        typesize = row.dtype.itemsize // (2 if row.dtype.is_complex else 1)
        part = _on_host(sample(row))
        if len(_compress(part, typesize)) * _MIN_SAMPLE_RATIO > len(part):
            return None
        plain = row.view(torch.uint8)
        frames = [
            _compress(_on_host(plain[start : start + _FRAME_BYTES]), typesize)
            for start in range(0, len(plain), _FRAME_BYTES)
        ]
        ends = tuple(accumulate(map(len, frames)))
        joined = torch.empty(ends[-1], dtype=torch.uint8, device="cpu")  # a tensor: the memory budget counts it
        for end in reversed(ends):
            frame = frames.pop()
            joined.numpy()[end - len(frame) : end] = np.frombuffer(frame, dtype=np.uint8)
        return EncodedRow((joined,), ends)

    def _decode_row(self, encoded: Encoded, row: Tensor) -> None:
        blosc2 = _library()
        (joined,) = encoded.parts
        plain = row.view(torch.uint8)
        begin = 0
        for number, end in enumerate(encoded.scalars):
            target = plain[number * _FRAME_BYTES : (number + 1) * _FRAME_BYTES]
            host = target if row.device.type == "cpu" else torch.empty_like(target, device="cpu")
            blosc2.decompress2(joined[begin:end].numpy(), dst=host.numpy(), nthreads=1)
            if host is not target:
                target.copy_(host)
            begin = end


def _on_host(row: Tensor) -> Tensor:
    return row.view(torch.uint8).cpu()


def _compress(plain: Tensor, typesize: int) -> bytes:
    blosc2 = _library()
    frame: bytes = blosc2.compress2(
        plain.numpy(),
        codec=blosc2.Codec.ZSTD,
        clevel=1,
        typesize=typesize,
        filters=[blosc2.Filter.SHUFFLE if typesize > 1 else blosc2.Filter.NOFILTER],
        nthreads=1,
    )
    return frame


@lru_cache(maxsize=1)
def _library() -> Any:
    try:
        blosc2 = importlib.import_module("blosc2")
    except ImportError as error:
        raise MissingPackageError("blosc2", "the codec 'bytes'", extra="codecs") from error
    blosc2.set_releasegil(True)  # off by default: compression would block other threads
    return blosc2
