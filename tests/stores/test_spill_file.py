"""The spill file: extents do not overlap, space is reused, and checksums detect damage."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from lowtide import ArgumentError
from lowtide.stores._geometry import Bytes
from lowtide.stores._spill_file import ALIGNMENT, BLOCK, Extent, Extents, SpillFile, checksum

PAGE = 4096
NEVER = lambda: False


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5 * ALIGNMENT), st.integers(0, 100)), max_size=60))
def test_extents_tile_the_file(steps: list[tuple[bool, int, int]]) -> None:
    extents = Extents()
    held: list[Extent] = []
    for reserve, nbytes, which in steps:
        if reserve or not held:
            extent = extents.reserve(nbytes)
            assert extent.start % ALIGNMENT == 0
            assert nbytes <= extent.length < nbytes + ALIGNMENT
            held.append(extent)
        else:
            extents.free(held.pop(which % len(held)))
        parts = sorted([extent for extent in held if extent.length] + extents.holes)
        assert [start for start, _ in parts] == [0, *(a + n for a, n in parts)][: len(parts)]  # no gap, no overlap
        assert extents.end == sum(length for _, length in parts)
        stops = {start + length for start, length in extents.holes}
        assert not stops & {start for start, _ in extents.holes}  # adjacent holes are merged
        assert extents.end not in stops  # no hole at the end
    for extent in held:
        extents.free(extent)
    assert extents.end == 0


def test_freed_space_is_reused_and_returned(tmp_path: Path) -> None:
    file = SpillFile(tmp_path)
    data = np.arange(3 * BLOCK, dtype=np.uint8)
    a, b, c = (file.write(data + i, NEVER) for i in range(3))
    assert len(a.checksums) == 3
    file.free(b.extent)
    again = file.write(data + 7, NEVER)
    assert again.extent == b.extent
    for i, written in enumerate([a, again, c]):
        got = np.empty_like(data)
        file.read(written, got, "x")
        assert np.array_equal(got, data + [0, 7, 2][i])
    for written in (a, c, again):
        file.free(written.extent)
    assert os.fstat(file.fd).st_size == file.file_bytes == 0
    file.close()


@settings(max_examples=150, deadline=None)
@given(
    length=st.sampled_from([1, 7, 8, 100, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, 5 * PAGE + 77]),
    shift=st.integers(0, 9),  # unaligned memory
    content=st.sampled_from(["zeros", "ones", "random"]),
    position=st.integers(0, 10**6),
    bit=st.integers(0, 7),
)
def test_checksum_detects_any_flipped_bit(length: int, shift: int, content: str, position: int, bit: int) -> None:
    random = np.random.default_rng(0).integers(0, 256, length, dtype=np.uint8)
    data = np.empty(length + shift, dtype=np.uint8)[shift:]
    data[:] = random if content == "random" else 255 * (content == "ones")
    before = checksum(data)
    assert checksum(data.copy()) == before
    data[position % length] ^= 1 << bit
    assert checksum(data) != before


def test_checksum_detects_typical_disk_damage() -> None:
    data = np.random.default_rng(0).integers(0, 256, 256 * PAGE, dtype=np.uint8)
    pages = data.reshape(-1, PAGE)
    damages: dict[str, Callable[[Bytes], None]] = {
        "a lost page": lambda d: d[3].fill(0),
        "a stale page": lambda d: d.__setitem__(3, d[4].copy()),
        "swapped pages": lambda d: d.__setitem__([3, 200], d[[200, 3]]),
        "swapped sectors in a page": lambda d: d[3].__setitem__(slice(0, 1024), np.roll(d[3][:1024], 512)),
        "a torn page": lambda d: d[3, 512:].fill(0),
        "moved by a word": lambda d: d.__setitem__(slice(None), np.roll(d, 8)),
        "all lost": lambda d: d.fill(0),
    }
    checksums = {checksum(data)}
    for damage in damages.values():
        damaged = pages.copy()
        damage(damaged)
        checksums.add(checksum(damaged.reshape(-1)))
    assert len(checksums) == 1 + len(damages)


def test_checksum_detects_lost_pages_of_equal_values() -> None:
    """A sum of 64-bit words would not: 512 times the bits of 2.0 is 0 modulo 2^64."""
    for value in (-0.0, 1.0, 2.0, float("inf"), 1e300):
        block = np.full(BLOCK // 8, value)
        checksums = {checksum(block.view(np.uint8))}
        for pages in (1, 2, 128, BLOCK // PAGE):
            damaged = block.copy()
            damaged[: pages * PAGE // 8] = 0
            checksums.add(checksum(damaged.view(np.uint8)))
        assert len(checksums) == 5, value


def test_file_is_private_and_has_no_name(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "spill"
    file = SpillFile(directory)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(os.fstat(file.fd).st_mode) == 0o600
    assert os.fstat(file.fd).st_nlink == 0
    assert list(directory.iterdir()) == []
    file.close()


def test_path_that_is_not_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError, match=r"cannot write in .*file.*pass directory="):
        SpillFile(tmp_path / "file")
