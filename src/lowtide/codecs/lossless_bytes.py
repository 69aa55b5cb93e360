"""Anything else: the bytes, compressed by Blosc2 (byte shuffle, then Zstandard at its fastest level).

Exact. Shuffling puts the first bytes of all elements side by side, then the second ones, and so on: signs and
exponents of activations are alike and compress, mantissas hardly do. So float32 activations become some 15 %
smaller and bfloat16 ones some 30 %. Blosc2 was chosen over the `zstandard` package because it shuffles and
unshuffles inside the cache: on float32 activations with the same ratio, twice as fast in and seven times as
fast out.

What is kept is in host memory, also for tensors on other devices (that way has not been run on a GPU). While it
is put together it is there twice. One thread; Blosc2's switch for releasing the GIL is turned on for the process,
so that other threads go on. The package `blosc2` is an optional extra, imported at first use.
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

_FRAME_BYTES = 16 * 2**20  # compressed at once; Blosc2 itself ends at 2 GiB
_LEAST_RATIO = 1.05  # of the sample: with less it cannot be worth the work


class Bytes(Codec):
    """A lossless byte codec."""

    name = "bytes"
    exact = True

    @staticmethod
    def available() -> bool:
        """Whether the package is installed, without importing it."""
        return importlib.util.find_spec("blosc2") is not None

    def _encode_row(self, row: Tensor) -> EncodedRow | None:
        typesize = row.dtype.itemsize // (2 if row.dtype.is_complex else 1)
        part = _on_host(sample(row))
        if len(_compress(part, typesize)) * _LEAST_RATIO > len(part):
            return None
        plain = row.view(torch.uint8)
        frames = [
            _compress(_on_host(plain[start : start + _FRAME_BYTES]), typesize)
            for start in range(0, len(plain), _FRAME_BYTES)
        ]
        ends = tuple(accumulate(map(len, frames)))
        kept = torch.empty(ends[-1], dtype=torch.uint8, device="cpu")  # torch's own memory, which is metered
        for end in reversed(ends):
            frame = frames.pop()
            kept.numpy()[end - len(frame) : end] = np.frombuffer(frame, dtype=np.uint8)
        return EncodedRow((kept,), ends)

    def _decode_row(self, encoded: Encoded, row: Tensor) -> None:
        blosc2 = _library()
        (kept,) = encoded.parts
        plain = row.view(torch.uint8)
        begin = 0
        for number, end in enumerate(encoded.scalars):
            target = plain[number * _FRAME_BYTES : (number + 1) * _FRAME_BYTES]
            host = target if row.device.type == "cpu" else torch.empty_like(target, device="cpu")
            blosc2.decompress2(kept[begin:end].numpy(), dst=host.numpy(), nthreads=1)
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
    blosc2.set_releasegil(True)  # off by default: a store's thread would stop the training
    return blosc2
