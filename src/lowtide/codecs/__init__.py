"""Codecs: values held in fewer bytes, exactly or within a stated error.

`resolve` turns names into codecs, a `Chooser` finds which of them pays for a value, `Codec.encode` makes an
`Encoded` and `decode` a tensor again. What may be lost is only what the user has asked for by name.

| name       | exact | for                                                          |
|------------|-------|--------------------------------------------------------------|
| `constant` | yes   | all elements the same                                        |
| `mask`     | yes   | two different elements: bools, dropout masks                 |
| `narrow`   | yes   | integers of a small range                                    |
| `sparse`   | yes   | many zeros                                                   |
| `bytes`    | yes   | anything that compresses (`pip install "lowtide[codecs]"`)   |
| `bf16`     | no    | floats: 2⁻⁸ of each value                                    |
| `fp16`     | no    | floats: 2⁻¹¹ of each value                                   |
| `fp8`      | no    | floats: 2⁻⁴ of each value                                    |
| `int8`     | no    | floats: 1/253 of the largest in each 64                      |
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
