"""Real faults of disks and processes: full, read-only or damaged disks; killed, forked or exiting processes."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import torch

from lowtide import ArgumentError, LowtideWarning
from lowtide.stores import DamagedValueError, DiskStore, StoreError
from lowtide.stores._disk_entry import DiskEntry, State

from .conftest import mount
from .processes import Processes
from .tiers import assert_same, random_bits, wait_until

MIB = 1 << 20


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    processes = Processes()
    yield processes
    processes.close()


def test_full_disk_keeps_values_in_memory(small_disk: Path) -> None:
    with DiskStore(small_disk, threads=1) as store:
        tensors = [random_bits((MIB - 100,), torch.uint8, i) for i in range(10)]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tickets = [store.put(tensor.clone(), f"x{i}") for i, tensor in enumerate(tensors)]
            store.flush()
            fallbacks = [ticket for ticket in tickets if ticket.fell_back]
            for ticket in tickets:
                store.prefetch(ticket)
            for ticket, tensor in zip(tickets, tensors, strict=True):
                assert_same(store.fetch(ticket), tensor)
        (warning,) = caught
        assert warning.category is LowtideWarning
        assert re.search(r"No space left on device.*Nothing is lost.*pass directory=", str(warning.message))
        assert 6 <= len(fallbacks) <= 7
        stats = store.stats()
        assert stats.fallbacks == len(fallbacks)
        assert stats.resident_bytes == len(fallbacks) * tensors[0].nbytes
        for ticket in tickets:
            store.drop(ticket)
        assert store.stats().resident_bytes == 0
        wait_until(lambda: store.stats().file_bytes == 0)
        again = store.put(tensors[3].clone())
        store.flush()
        assert not again.fell_back
        assert_same(store.fetch(again), tensors[3])


def test_short_write_keeps_the_value_in_memory(processes: Processes, tmp_path: Path) -> None:
    """With a limit on the file size, the system writes a part and then fails."""
    result = processes.run(
        """
        import resource, warnings
        resource.setrlimit(resource.RLIMIT_FSIZE, (2_500_000, 2_500_000))
        tensors = [torch.randn(300_000) for _ in range(5)]  # 1.2 MB each, the third is cut in a block
        with warnings.catch_warnings(record=True) as caught, DiskStore(sys.argv[1], threads=1) as store:
            warnings.simplefilter("always")
            tickets = [store.put(tensor.clone()) for tensor in tensors]
            store.flush()
            assert [ticket.fell_back for ticket in tickets] == [False, False, True, True, True]
            assert all(torch.equal(store.fetch(k), t) for k, t in zip(tickets, tensors))
            small = store.put(torch.ones(3))
            store.flush()
            assert not small.fell_back
        assert len(caught) == 1, caught
        assert "File too large" in str(caught[0].message)
        """,
        tmp_path,
    )
    assert (result.status, result.output) == (0, "")


def test_value_can_be_fetched_after_the_warning_was_raised_as_an_error(small_disk: Path) -> None:
    with DiskStore(small_disk) as store:
        tensor = random_bits((5 * MIB,), torch.uint8)
        ticket = store.put(tensor)
        wait_until(lambda: ticket.fell_back)
        with pytest.raises(LowtideWarning):
            store.fetch(ticket)
        assert_same(store.fetch(ticket), tensor)


def test_read_only_directory_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "locked"
    directory.mkdir()
    if os.getuid() == 0:  # permissions do not apply to root
        mount(directory, "ro,size=1m")
    else:
        directory.chmod(0o500)
    try:
        with pytest.raises(
            ArgumentError, match=r"cannot write in '.*locked' \((Read-only|Permission).*pass directory="
        ):
            DiskStore(directory)
    finally:
        subprocess.run(["umount", "-l", str(directory)], capture_output=True)


def spill_files(pid: int | str, directory: Path) -> list[str]:
    """Return the open files of a process that were deleted from `directory`."""
    found = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{fd}"
        if os.path.islink(path) and os.readlink(path).startswith(f"{directory}/") and "(deleted)" in os.readlink(path):
            found.append(path)
    return found


def test_damaged_block_raises_an_error_that_names_the_value(tmp_path: Path) -> None:
    with DiskStore(tmp_path, threads=1) as store:
        tensors = [random_bits((MIB, 3), torch.uint8, i) for i in range(3)]
        tickets = [store.put(tensor.clone(), f"layer{i}.out") for i, tensor in enumerate(tensors)]
        store.flush()
        (path,) = spill_files("self", tmp_path)
        with open(path, "r+b") as file:
            place = 3 * MIB + 2 * MIB + 12345  # in the third block of the second value
            file.seek(place)
            (byte,) = file.read(1)
            file.seek(place)
            file.write(bytes([byte ^ 1]))  # a single bit
        for prefetch in (False, True):
            if prefetch:
                store.prefetch(tickets[1])
                entry = cast(DiskEntry, tickets[1].entry)
                wait_until(lambda: entry.read is not None and entry.read.state is State.FAILED)
            with pytest.raises(DamagedValueError, match=r"'layer1.out'.*\(1048576, 3\).*block 3 of 3.*checksum"):
                store.fetch(tickets[1])
        assert_same(store.fetch(tickets[0]), tensors[0])
        assert_same(store.fetch(tickets[2]), tensors[2])
        os.truncate(path, 7 * MIB)
        with pytest.raises(DamagedValueError, match=r"'layer2.out'.*the file ends before it"):
            store.fetch(tickets[2])
        assert store.stats().prefetched_bytes == 0


@pytest.mark.parametrize("prefetched", [False, True])
def test_failed_read_raises_an_error_that_names_the_value(tmp_path: Path, prefetched: bool) -> None:
    """The descriptor of the file is replaced by a write-only one, so that real reads fail."""
    with DiskStore(tmp_path, threads=1) as store:
        tensor = random_bits((1000,), torch.uint8)
        tickets = [store.put(tensor, "layer7.out"), store.put(tensor)]
        store.flush()
        fd = store.queue.file.fd
        readable, broken = os.dup(fd), os.open(os.devnull, os.O_WRONLY)
        os.dup2(broken, fd)
        try:
            for ticket, name in zip(tickets, [r"'layer7.out' \(", r"a value \("], strict=True):
                if prefetched:
                    store.prefetch(ticket)
                    entry = cast(DiskEntry, ticket.entry)
                    wait_until(lambda: entry.read is not None and entry.read.state is State.FAILED)
                    assert store.bytes_to_fetch(ticket) == 1000
                with pytest.raises(
                    StoreError, match=name + r"uint8 of shape \(1000,\)\) cannot be read back.*at byte"
                ) as caught:
                    store.fetch(ticket)
                assert isinstance(caught.value.__cause__, OSError)
        finally:
            os.dup2(readable, fd)
            os.close(readable)
            os.close(broken)
        for ticket in tickets:  # the file is readable again
            assert_same(store.fetch(ticket), tensor)
        assert store.stats().prefetched_bytes == 0


def test_killed_process_leaves_no_file(tmp_path: Path) -> None:
    directory = tmp_path / "spill"
    script = (
        "import sys, torch\nfrom lowtide.stores import DiskStore\n"
        "store = DiskStore(sys.argv[1], max_in_flight_bytes='32 MiB')\nkept = []\nprint('go', flush=True)\n"
        "while True:\n    kept = [*kept[-8:], store.put(torch.ones(1 << 21))]\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(directory)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"go\n"
        (path,) = spill_files(process.pid, directory)
        wait_until(lambda: os.stat(path).st_size > MIB)  # the process is writing
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert list(directory.iterdir()) == []


ENDINGS = {
    "end": "",
    "exit": "sys.exit(0)",
    "collected": "store = None",
    "referenced by a module": "sys.modules['kept'] = (store, tickets)",
    "in a cycle": "tickets.append(tickets)",
    "a large value": "last = store.put(torch.ones(1 << 25), 'big')",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_process_exits_cleanly_without_close(processes: Processes, tmp_path: Path, ending: str) -> None:
    result = processes.run(
        f"""
        store = DiskStore(sys.argv[1], max_in_flight_bytes="100 MiB")
        tickets = [store.put(torch.ones(1 << 20)) for _ in range(24)]
        store.prefetch(tickets[0])
        {ENDINGS[ending]}
        """,
        tmp_path,
    )
    assert (result.status, result.output) == (0, "")
    assert result.seconds < 10
    assert list(tmp_path.iterdir()) == []


def test_process_with_an_exception_prints_only_that_exception(processes: Processes, tmp_path: Path) -> None:
    result = processes.run(
        """
        store = DiskStore(sys.argv[1])
        tickets = [store.put(torch.ones(1 << 22)) for _ in range(8)]
        raise KeyError("the user's own")
        """,
        tmp_path,
    )
    assert result.status == 1
    assert result.output.count("Traceback") == 1
    assert result.output.rstrip().endswith('KeyError: "the user\'s own"')


def test_forked_child_gets_errors_and_exits(processes: Processes, tmp_path: Path) -> None:
    result = processes.run(
        """
        store = DiskStore(sys.argv[1], max_in_flight_bytes="512 MiB")
        tickets = [store.put(torch.ones(1 << 20)) for _ in range(40)]  # the threads are busy during the fork
        pid = os.fork()
        if pid == 0:
            for call in (lambda: store.put(torch.ones(3)), lambda: store.fetch(tickets[0]), lambda: store.stats(),
                         lambda: store.prefetch(tickets[0]), lambda: store.drop(tickets[0]), lambda: store.flush(),
                         lambda: store.drain(1), lambda: store.is_resident(tickets[0]),
                         lambda: store.bytes_to_fetch(tickets[0])):
                try:
                    call()
                except StoreError as error:
                    assert "cannot be used in its fork" in str(error), error
                else:
                    raise SystemExit("no error")
            tickets.pop()
            sys.exit(0)  # with normal interpreter shutdown
        assert os.waitpid(pid, 0)[1] == 0
        assert all(torch.equal(store.fetch(ticket), torch.ones(1 << 20)) for ticket in tickets)
        """,
        tmp_path,
    )
    assert (result.status, result.output) == (0, "")
