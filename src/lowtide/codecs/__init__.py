"""Codecs that compress values, exactly or within a stated error.

`resolve` turns names into codecs. `Codec.encode` compresses a tensor to an `Encoded`; `decode` decompresses
it. A `Chooser` selects the codec that is worth its time for a value. Lossy codecs are used only if the user
names them.

| name       | exact | for                                                        |
|------------|-------|------------------------------------------------------------|
| `constant` | yes   | tensors whose elements are all equal                       |
| `mask`     | yes   | tensors with two distinct elements: bools, dropout masks   |
| `narrow`   | yes   | integers with a small range                                |
| `sparse`   | yes   | tensors with many zeros                                    |
| `bytes`    | yes   | any compressible bytes (`pip install "lowtide[codecs]"`)   |
| `bf16`     | no    | floats, relative error 2⁻⁸                                 |
| `fp16`     | no    | floats, relative error 2⁻¹¹                                |
| `fp8`      | no    | floats, relative error 2⁻⁴                                 |
| `int8`     | no    | floats, error 1/253 of the largest in each block of 64     |
"""

from ._base import Codec, Encoded, Geometry
from .chooser import Chooser, Measurement, choose, measure
from .names import CODECS, decode, resolve

__all__ = [
    "CODECS",
    "Chooser",
    "Codec",
    "Encoded",
    "Geometry",
    "Measurement",
    "choose",
    "decode",
    "measure",
    "resolve",
]
