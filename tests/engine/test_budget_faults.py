"""Real faults under a budget: a full disk, a damaged block, exceptions, a process that ends or is killed."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.engine.memory.budget import MemoryBudget
from lowtide.engine.memory.eviction import Pace
from lowtide.engine.runtime import current_runtime
from lowtide.engine.values.value import Value
from lowtide.stores import DamagedValueError, DiskStore
from lowtide.stores.speed import Speed

from ..stores.conftest import small_file_system
from ..stores.processes import Processes
from ..stores.tiers import wait_until
from .budgets import RandomEvictionBudget, above, fixed_bytes, nothing_evictable_left, random_eviction
from .steps import Step, assert_equal, run_step

MIB = 1 << 20
LAYERS = 12


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    yield from small_file_system(tmp_path / "small", "4m")


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    processes = Processes()
    yield processes
    processes.close()


def stack() -> nn.Sequential:
    """Return a model that saves 1 MiB per layer for 1024 rows."""
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(LAYERS) for m in (nn.Linear(256, 256), nn.Tanh())))


def rows() -> tuple[torch.Tensor]:
    return (torch.randn(1024, 256, generator=torch.Generator().manual_seed(1)),)


class trusting(above):  # noqa: N801
    """A budget that assumes a disk faster than any op, so that it offloads whenever possible."""

    def open_budget(self) -> MemoryBudget:
        memory_budget = super().open_budget()
        if memory_budget.offloading is not None:
            memory_budget.offloading.pace = Pace(Speed(1e15, 1e15))
        return memory_budget


class offloading(random_eviction):  # noqa: N801
    """Offloads all values before every op."""

    def open_budget(self) -> MemoryBudget:
        class Offloads(RandomEvictionBudget):
            def ways(self, value: Value) -> Sequence[Callable[[Value], None]]:
                return [self.offloading.evict] if self.offloading is not None else []

        return Offloads(self.seed, self._store, self._chooser, self.share)


def within(share: float, plain: Step, model: nn.Module, batch: Any, **options: Any) -> tuple[Step, int]:
    fixed = fixed_bytes(model, batch)
    more = int(share * (plain.peak_bytes - fixed))
    return run_step(model, batch, trusting(more, codecs=None, **options)), fixed + more


# -- a full disk ----------------------------------------------------------------------------------


def test_a_disk_that_fills_up_in_forward_costs_time_only(small_disk: Path) -> None:
    model, batch = stack(), rows()
    plain = run_step(model, batch)
    with DiskStore(small_disk, threads=1) as store, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", lowtide.LowtideWarning)
        for _ in range(2):  # in the second step the disk has failed before
            ours, limit = within(0.4, plain, model, batch, stores=store)
            assert_equal(plain, ours)
            assert ours.peak_bytes <= limit
            report = lowtide.report().budget
            assert report is not None
            assert report.peak_bytes <= report.budget_bytes
            assert report.values_offloaded > 0
            assert report.values_dropped > 0  # values that did not fit on the disk are recomputed
        assert nothing_evictable_left()
        store.flush()
        stats = store.stats()
        assert stats.fallbacks > 0
        assert (stats.values, stats.resident_bytes) == (0, 0)
    (warning,) = [w for w in told if issubclass(w.category, lowtide.LowtideWarning)]
    assert "No space left on device" in str(warning.message)


def test_values_that_can_be_neither_written_nor_recomputed_stay_in_memory(small_disk: Path) -> None:
    """Under a large budget, values that fell back are unpacked from memory."""
    model, batch = stack(), rows()
    plain = run_step(model, batch)
    with DiskStore(small_disk, threads=1) as store:
        with pytest.warns(lowtide.LowtideWarning, match="No space left") as told:
            ours = run_step(model, batch, offloading(0, 1.0, stores=store, codecs=None))
        assert_equal(plain, ours)
        assert store.stats().fallbacks > 0
        assert lowtide.report().replayed_ops == 0
    assert len(told) == 1
    assert nothing_evictable_left()


def test_a_disk_that_is_full_from_the_start_is_not_used(small_disk: Path) -> None:
    model, batch = stack(), rows()
    plain = run_step(model, batch)
    with DiskStore(small_disk) as store:
        (small_disk / "another file").write_bytes(bytes(4 * MIB - 8192))
        with pytest.warns(lowtide.LowtideWarning, match="No space left") as told:
            ours, limit = within(0.4, plain, model, batch, stores=store)
        assert len(told) == 1
        released, _ = within(0.4, plain, model, batch, stores=store)  # no second warning
        assert_equal(plain, ours)
        assert_equal(plain, released)
        assert max(ours.peak_bytes, released.peak_bytes) <= limit
        report = lowtide.report().budget
        assert report is not None
        assert report.values_offloaded == 0
        assert report.values_dropped > 0


# -- a damaged block ------------------------------------------------------------------------------


@pytest.mark.parametrize("hinted", [False, True])
def test_a_damaged_block_is_an_error_that_names_the_op(tmp_path: Path, hinted: bool) -> None:
    model, batch = stack(), rows()
    with DiskStore(tmp_path, threads=1) as store:
        with offloading(0, 1.0, stores=store, codecs=None):
            loss = model(*batch).square().sum()
        store.flush()
        assert store.stats().values > LAYERS // 2
        fd = store.queue.file.fd
        location = store.stats().file_bytes // 2 + 12345
        os.pwrite(fd, bytes([os.pread(fd, 1, location)[0] ^ 1]), location)  # a single bit
        if hinted:
            tickets = [t for t in gc.get_objects() if type(t).__name__ == "_DiskTicket" and t.store is store]
            for ticket in tickets:
                store.prefetch(ticket)
            wait_until(lambda: store.stats().prefetched_bytes > 0)
            del tickets, ticket
        with pytest.raises(
            DamagedValueError, match=r"aten\.tanh\.default in module '\d+' \(op \d+\).*checksum"
        ) as caught:
            loss.backward()
        del caught, loss
        model.zero_grad(set_to_none=True)
        assert nothing_evictable_left()
        store.flush()
        assert (store.stats().values, store.stats().prefetched_bytes) == (0, 0)
    assert_equal(run_step(model, batch), run_step(model, batch, random_eviction(3, stores=None, codecs=None)))


# -- exceptions -----------------------------------------------------------------------------------


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, where: str) -> torch.Tensor:
        if where == "forward":
            raise OSError("as planned")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise OSError("as planned")


@pytest.mark.parametrize("inside", [False, True], ids=["after", "inside"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_leaves_no_value_on_the_disk_and_no_wrapper(tmp_path: Path, where: str, inside: bool) -> None:
    original = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    model, batch = stack(), rows()
    written = []

    def step(store: DiskStore) -> None:
        with offloading(2, 1.0, stores=store, codecs=None):
            middle = model[:12](*batch)
            written.append(store.stats().values)
            loss = model[12:](Fails.apply(middle, where)).sum()
            if inside:
                loss.backward()
        loss.backward()

    with DiskStore(tmp_path) as store:
        with pytest.raises(OSError, match="as planned") as caught:
            step(store)
        del caught
        assert written[0] > 0
        assert nothing_evictable_left()
        store.flush()
        stats = store.stats()
        assert (stats.values, stats.stored_bytes, stats.resident_bytes) == (0, 0, 0)
        current_runtime().backward.end_if_done()
        assert torch.autograd._engine_run_backward is original  # type: ignore[attr-defined]
    model.zero_grad(set_to_none=True)
    assert_equal(run_step(model, batch), run_step(model, batch, random_eviction(3, stores=None, codecs=None)))


# -- the end of a process -------------------------------------------------------------------------

STEP = """
import sys, torch, lowtide
from torch import nn
from lowtide.stores import DiskStore
from tests.engine.test_budget_faults import offloading, rows, stack

torch.set_num_threads(1)
model, batch = stack(), rows()
store = DiskStore(sys.argv[1])
"""


def test_a_process_killed_during_a_step_leaves_no_files(tmp_path: Path) -> None:
    directory = tmp_path / "spill"
    script = STEP + (
        "print('go', flush=True)\n"
        "while True:\n"
        "    with offloading(0, 1.0, stores=store, codecs=None):\n"
        "        loss = model(*batch).sum()\n"
        "    loss.backward()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(directory)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"go\n"
        (path,) = spill_files(process.pid, directory)
        wait_until(lambda: os.stat(path).st_size > MIB, seconds=30)  # the process is writing saved values
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert list(directory.iterdir()) == []


def spill_files(pid: int, directory: Path) -> list[str]:
    """Return the open files of a process that were deleted from `directory`."""
    links = [f"/proc/{pid}/fd/{fd}" for fd in os.listdir(f"/proc/{pid}/fd")]
    return [
        link for link in links if os.readlink(link).startswith(f"{directory}/") and "(deleted)" in os.readlink(link)
    ]


ENDINGS = {
    "end": "",
    "exit": "sys.exit(0)",
    "in backward": "loss.register_hook(lambda g: sys.exit(0)); loss.backward()",
    "in the scope": "scope = offloading(1, 1.0, stores=store, codecs=None); scope.__enter__(); x = model(*batch)",
    "held by a module": "sys.modules['kept'] = loss",
    "in a cycle": "cycle = [loss]; cycle.append(cycle)",
    "half done": "torch.autograd.grad(loss, model[-2].weight, retain_graph=True)",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_process_that_ends_with_values_on_the_disk_ends_quietly(
    processes: Processes, tmp_path: Path, ending: str
) -> None:
    done = processes.run(
        f"""{STEP}
with offloading(0, 1.0, stores=store, codecs=None):
    loss = model(*batch).sum()
assert store.stats().values > 0
{ENDINGS[ending]}
""",
        tmp_path,
    )
    assert (done.status, done.output) == (0, "")
    assert list(tmp_path.iterdir()) == []
