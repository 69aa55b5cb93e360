"""What the disk store costs: its throughput against plain ways to a file, and how much of it hides behind compute.

    python -m benchmarks.disk_store [--rounds N] [--values N] [--mib N] [--directory DIR]

One torch thread. All variants are run in turn, round by round, and minima are compared, because the machine may be
shared. Plain writes have no checksum and the page cache takes what all of them write: this is the cost to the
program, not the speed of the disk. `--directory` should be where a training run would spill.
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


def clock(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def disk_store(values: list[torch.Tensor], directory: str, prefetch: bool) -> Times:
    """Everything put and written, then fetched in reverse order, as backward does."""
    with DiskStore(directory, max_in_flight_bytes="64 MiB") as store:

        def put() -> None:
            tickets.extend(store.put(value) for value in values)
            store.flush()

        def fetch() -> None:
            if prefetch:
                for ticket in reversed(tickets):
                    store.prefetch(ticket)
            for ticket, value in zip(reversed(tickets), reversed(values), strict=True):
                got = store.fetch(ticket)
                store.drop(ticket)
                assert got[-1] == value[-1]

        tickets: list[Ticket] = []
        return {"out": clock(put), "back": clock(fetch)}


def plain_file(values: list[torch.Tensor], directory: str, crc: bool) -> Times:
    """One unnamed file, written and read in the calling thread."""
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
                got = torch.empty_like(value)
                assert os.preadv(file.fileno(), [bytes_of(got).data], i * size) == size
                assert got[-1] == value[-1]
                assert check(got) == sums[i]

        sums: list[int] = []
        return {"out": clock(put), "back": clock(fetch)}


def checksums(values: list[torch.Tensor]) -> None:
    for value in values:
        data = bytes_of(value)
        for i in range(0, data.nbytes, BLOCK):
            checksum(data[i : i + BLOCK])


def torch_save(values: list[torch.Tensor], directory: str) -> Times:
    """One file a value."""
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        paths = [Path(folder, f"{i}.pt") for i in range(len(values))]

        def put() -> None:
            for path, value in zip(paths, values, strict=True):
                torch.save(value, path)

        def fetch() -> None:
            for path, value in zip(reversed(paths), reversed(values), strict=True):
                assert torch.load(path)[-1] == value[-1]
                path.unlink()

        return {"out": clock(put), "back": clock(fetch)}


def overlap(values: list[torch.Tensor], directory: str, loops: int) -> Times:
    """A loop of matmuls alone, and with one value put (as forward does) or fetched (as backward does) every few."""
    a = torch.randn(512, 512)
    each = max(1, loops // len(values))

    def compute() -> None:
        for _ in range(each):
            a @ a

    def alone() -> None:
        for _ in values:
            compute()

    def put() -> None:
        for value in values:
            compute()
            tickets.append(store.put(value))
        store.flush()

    def fetch(ahead: bool) -> None:
        if ahead:
            for ticket in reversed(tickets):
                store.prefetch(ticket)
        for ticket in reversed(tickets):
            store.fetch(ticket)
            compute()

    def synchronous() -> None:
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
            "matmuls alone": clock(alone),
            "and puts": clock(put),
            "and the same in the caller": clock(synchronous),
            "and fetches, prefetched": clock(lambda: fetch(True)),
            "and fetches, no prefetch": clock(lambda: fetch(False)),
        }


def machine(directory: str) -> str:
    return (
        f"{processor()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; "
        f"Python {platform.python_version()}, torch {torch.__version__}, {platform.system()} {platform.release()}; "
        f"one torch thread; spilling to {'the directory given' if directory else 'the temporary directory'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--values", type=int, default=32)
    parser.add_argument("--mib", type=int, default=8, help="size of each value")
    parser.add_argument("--directory", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    directory = options.directory or tempfile.gettempdir()
    values = [torch.rand(options.mib << 18) for _ in range(options.values)]
    gib = sum(value.nbytes for value in values) / 2**30
    print(machine(options.directory))
    print(f"{options.values} values of {options.mib} MiB; minima of {options.rounds} interleaved rounds\n")

    variants: dict[str, Callable[[], Times]] = {
        "disk store": lambda: disk_store(values, directory, prefetch=True),
        "disk store, no prefetch": lambda: disk_store(values, directory, prefetch=False),
        "plain file, in the caller": lambda: plain_file(values, directory, crc=False),
        "plain file with crc32": lambda: plain_file(values, directory, crc=True),
        "torch.save, torch.load": lambda: torch_save(values, directory),
    }
    best: dict[str, Times] = {}
    hidden: Times = {}
    best_checksum = float("inf")
    for _ in range(options.rounds):
        best_checksum = min(best_checksum, clock(lambda: checksums(values)))
        for name, variant in variants.items():
            least(best.setdefault(name, {}), variant())
        least(hidden, overlap(values, directory, loops=20 * options.values))

    print(f"checksums: {gib / best_checksum:.2f} GiB/s in one thread")
    print(f"{'':28} {'out, GiB/s':>10} {'back, GiB/s':>11}")
    for name, times in best.items():
        print(f"{name:28} {gib / times['out']:10.2f} {gib / times['back']:11.2f}")
    print()
    alone = hidden["matmuls alone"]
    for name, seconds in hidden.items():
        print(f"{name:28} {seconds * 1e3:7.0f} ms  × {seconds / alone:.3f}")
    for kind, hiding, shown in [
        ("writing", "and puts", "and the same in the caller"),
        ("reading", "and fetches, prefetched", "and fetches, no prefetch"),
    ]:
        share = 1 - (hidden[hiding] - alone) / (hidden[shown] - alone)
        print(f"hidden behind compute: {share:.0%} of the {kind}")


def least(best: Times, times: Times) -> None:
    for key, seconds in times.items():
        best[key] = min(seconds, best.get(key, seconds))


if __name__ == "__main__":
    main()
