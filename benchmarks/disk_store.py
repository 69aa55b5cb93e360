"""Measure the disk store: throughput compared with plain file I/O, and the part that overlaps with compute.

    python -m benchmarks.disk_store [--rounds N] [--values N] [--mib N] [--directory DIR]

One torch thread. All variants run in each round and minima are compared, because the machine may be shared. Writes go
to the page cache, so this measures the cost to the program, not the speed of the disk. Plain writes have no checksum.
`--directory` should be the directory in which a training run would offload.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.harness.machine import processor
from lowtide.stores import DiskStore, Ticket
from lowtide.stores._geometry import bytes_of
from lowtide.stores._spill_file import BLOCK, checksum

Times = dict[str, float]


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def disk_store(values: list[torch.Tensor], directory: str, prefetch: bool) -> Times:
    """Put and flush all values, then fetch them in reverse order, as backward does."""
    with DiskStore(directory, max_in_flight_bytes="64 MiB") as store:

        def put() -> None:
            tickets.extend(store.put(value) for value in values)
            store.flush()

        def fetch() -> None:
            if prefetch:
                for ticket in reversed(tickets):
                    store.prefetch(ticket)
            for ticket, value in zip(reversed(tickets), reversed(values), strict=True):
                fetched = store.fetch(ticket)
                store.drop(ticket)
                assert fetched[-1] == value[-1]

        tickets: list[Ticket] = []
        return {"write": seconds(put), "read": seconds(fetch)}


def plain_file(values: list[torch.Tensor], directory: str, crc: bool) -> Times:
    """Write and read one unnamed file in the calling thread."""
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        size = values[0].nbytes

        def check(value: torch.Tensor) -> int:
            return zlib.crc32(bytes_of(value).data) if crc else 0

        def put() -> None:
            for i, value in enumerate(values):
                sums.append(check(value))
                assert os.pwritev(file.fileno(), [bytes_of(value).data], i * size) == size

        def fetch() -> None:
            for i, value in reversed(list(enumerate(values))):
                fetched = torch.empty_like(value)
                assert os.preadv(file.fileno(), [bytes_of(fetched).data], i * size) == size
                assert fetched[-1] == value[-1]
                assert check(fetched) == sums[i]

        sums: list[int] = []
        return {"write": seconds(put), "read": seconds(fetch)}


def checksums(values: list[torch.Tensor]) -> None:
    for value in values:
        data = bytes_of(value)
        for i in range(0, data.nbytes, BLOCK):
            checksum(data[i : i + BLOCK])


def torch_save(values: list[torch.Tensor], directory: str) -> Times:
    """Save each value in its own file."""
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        paths = [Path(folder, f"{i}.pt") for i in range(len(values))]

        def put() -> None:
            for path, value in zip(paths, values, strict=True):
                torch.save(value, path)

        def fetch() -> None:
            for path, value in zip(reversed(paths), reversed(values), strict=True):
                assert torch.load(path)[-1] == value[-1]
                path.unlink()

        return {"write": seconds(put), "read": seconds(fetch)}


def overlap(values: list[torch.Tensor], directory: str, loops: int) -> Times:
    """Time a loop of matmuls: alone, with puts between them (as in forward), and with fetches (as in backward)."""
    a = torch.randn(512, 512)
    loops_per_value = max(1, loops // len(values))

    def compute() -> None:
        for _ in range(loops_per_value):
            a @ a

    def compute_all() -> None:
        for _ in values:
            compute()

    def put() -> None:
        for value in values:
            compute()
            tickets.append(store.put(value))
        store.flush()

    def fetch(prefetch: bool) -> None:
        if prefetch:
            for ticket in reversed(tickets):
                store.prefetch(ticket)
        for ticket in reversed(tickets):
            store.fetch(ticket)
            compute()

    def write_in_caller() -> None:
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            for value in values:
                compute()
                data = bytes_of(value)
                for i in range(0, data.nbytes, BLOCK):
                    checksum(data[i : i + BLOCK])
                    file.write(data[i : i + BLOCK].data)

    tickets: list[Ticket] = []
    with DiskStore(directory, max_in_flight_bytes="64 MiB") as store:
        return {
            "matmuls alone": seconds(compute_all),
            "with puts": seconds(put),
            "with writes in the caller": seconds(write_in_caller),
            "with prefetched fetches": seconds(lambda: fetch(True)),
            "with fetches, no prefetch": seconds(lambda: fetch(False)),
        }


def machine(directory: str) -> str:
    """Return machine and versions in one line."""
    return (
        f"{processor()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; "
        f"Python {platform.python_version()}, torch {torch.__version__}, {platform.system()} {platform.release()}; "
        f"one torch thread; files in {'the given directory' if directory else 'the temporary directory'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="rounds of all variants (default 7)")
    parser.add_argument("--values", type=int, default=32, help="number of values (default 32)")
    parser.add_argument("--mib", type=int, default=8, help="MiB of each value (default 8)")
    parser.add_argument("--directory", default="", help="directory of the files (default: the temporary directory)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    directory = options.directory or tempfile.gettempdir()
    values = [torch.rand(options.mib << 18) for _ in range(options.values)]
    gib = sum(value.nbytes for value in values) / 2**30
    print(machine(options.directory))
    print(f"{options.values} values of {options.mib} MiB; minima of {options.rounds} rounds\n")

    variants: dict[str, Callable[[], Times]] = {
        "disk store": lambda: disk_store(values, directory, prefetch=True),
        "disk store, no prefetch": lambda: disk_store(values, directory, prefetch=False),
        "plain file, in the caller": lambda: plain_file(values, directory, crc=False),
        "plain file with crc32": lambda: plain_file(values, directory, crc=True),
        "torch.save, torch.load": lambda: torch_save(values, directory),
    }
    best: dict[str, Times] = {}
    overlapped: Times = {}
    best_checksum = float("inf")
    for _ in range(options.rounds):
        best_checksum = min(best_checksum, seconds(lambda: checksums(values)))
        for name, variant in variants.items():
            keep_minima(best.setdefault(name, {}), variant())
        keep_minima(overlapped, overlap(values, directory, loops=20 * options.values))

    print(f"checksums: {gib / best_checksum:.2f} GiB/s in one thread")
    print(f"{'':28} {'write, GiB/s':>12} {'read, GiB/s':>11}")
    for name, times in best.items():
        print(f"{name:28} {gib / times['write']:12.2f} {gib / times['read']:11.2f}")
    print()
    alone = overlapped["matmuls alone"]
    for name, time_s in overlapped.items():
        print(f"{name:28} {time_s * 1e3:7.0f} ms  × {time_s / alone:.3f}")
    for kind, asynchronous, synchronous in [
        ("writing", "with puts", "with writes in the caller"),
        ("reading", "with prefetched fetches", "with fetches, no prefetch"),
    ]:
        share = 1 - (overlapped[asynchronous] - alone) / (overlapped[synchronous] - alone)
        print(f"overlapped with compute: {share:.0%} of the {kind}")


def keep_minima(best: Times, times: Times) -> None:
    for key, time_s in times.items():
        best[key] = min(time_s, best.get(key, time_s))


if __name__ == "__main__":
    main()
