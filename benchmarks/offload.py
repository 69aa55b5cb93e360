"""Measure offloading to a disk, with a budget for a quarter of the activations.

    python -m benchmarks.offload [--rounds N] [--width N] [--layers N] [--directory DIR] [--mb-per-s N] [--save]

One torch thread; the disk store has its own threads. All variants run in each round and minima are compared, because
the machine may be shared. Peaks come from a separate step, with a meter that is independent of the engine.
`--directory` should be the directory in which a training run would offload. Writes go to the page cache, so this
measures the cost to the program, not the speed of the disk. `--mb-per-s` simulates a disk without a cache: it slows all
reads and writes down to this speed by sleeping, without processor time. `--save` writes plot and numbers to
benchmarks/results.

All variants with a budget have the same budget:
  disk               lowtide.budget(stores=DiskStore(...)): values are written in the background, or recomputed
  disk, synchronous  the same, but waits for every write and prefetches nothing
  recompute only     values are recomputed only
  hooks              no budget: saved_tensors_hooks (as in torch's save_on_cpu) write every saved activation to a file
                     and read it in the calling thread; parameters stay in memory
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import lowtide
from benchmarks.disk_store import machine
from benchmarks.harness.machine import RESULTS, keep_freed_memory, use_one_thread
from benchmarks.online import fixed_bytes
from lowtide.profiling.peak_meter import PeakMeter
from lowtide.stores import DiskStore, Ticket
from lowtide.stores._geometry import bytes_of

SHARE = 0.25
VOCAB_SIZE = 512


class Synchronous(DiskStore):
    """A disk store that waits for every write and prefetches nothing."""

    def put(self, tensor: torch.Tensor, name: str = "") -> Ticket:
        ticket = super().put(tensor, name)
        self.flush()
        return ticket

    def prefetch(self, ticket: Ticket) -> None:
        pass


class Throttle:
    """Slow I/O down to the speed of a disk; 0 is no limit."""

    def __init__(self, mb_per_s: float) -> None:
        self.mb_per_s = mb_per_s

    def paced(self, work: Callable[[], Any], nbytes: int) -> Any:
        start = time.perf_counter()
        done = work()
        if self.mb_per_s:
            time.sleep(max(0.0, nbytes / (self.mb_per_s * 1e6) - (time.perf_counter() - start)))
        return done

    def slow_down(self, store: DiskStore) -> None:
        file: Any = store.queue.file
        write, read = file.write, file.read
        file.write = lambda data, **more: self.paced(lambda: write(data, **more), data.nbytes)
        file.read = lambda written, into, entry: self.paced(lambda: read(written, into, entry), into.nbytes)


class FileHooks:
    """Write every saved activation to a file, and read it on unpack."""

    def __init__(self, directory: str, throttle: Throttle) -> None:
        self._directory = directory
        self._throttle = throttle

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with tempfile.TemporaryFile(dir=self._directory, buffering=0) as file:
            descriptor = os.dup(file.fileno())
        end = 0

        def pack(tensor: torch.Tensor) -> Any:
            nonlocal end
            if tensor.is_leaf and tensor.requires_grad:
                return tensor
            tensor = tensor.detach().contiguous()
            offset, end = end, end + tensor.nbytes
            if tensor.nbytes:
                data = bytes_of(tensor).data
                written = self._throttle.paced(lambda: os.pwrite(descriptor, data, offset), tensor.nbytes)
                assert written == tensor.nbytes
            return offset, tensor.shape, tensor.dtype

        def unpack(saved: Any) -> torch.Tensor:
            if isinstance(saved, torch.Tensor):
                return saved
            offset, shape, dtype = saved
            tensor = torch.empty(shape, dtype=dtype)
            if tensor.nbytes:
                data = bytes_of(tensor).data
                read = self._throttle.paced(lambda: os.preadv(descriptor, [data], offset), tensor.nbytes)
                assert read == tensor.nbytes
            return tensor

        self.close = lambda: os.close(descriptor)
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield


Times = dict[str, float]


def step(model: nn.Module, ids: torch.Tensor, scope: AbstractContextManager[Any]) -> tuple[Times, list[torch.Tensor]]:
    """Return start and end times of forward and backward, and the gradients, which stay allocated between steps."""
    model.zero_grad(set_to_none=False)
    torch.manual_seed(3)
    gc.collect()
    started = time.perf_counter()
    with scope:
        loss = model(input_ids=ids, labels=ids).loss
    forward_end = time.perf_counter()
    loss.backward()
    times = {"start": started, "forward_end": forward_end, "end": time.perf_counter()}
    return times, [p.grad for p in model.parameters() if p.grad is not None]


def draw(times: Times, spans: list[Any], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    start = times["start"]
    figure, axis = pyplot.subplots(figsize=(11, 3.2), layout="constrained")
    lanes = {"compute": 3, "write": 2, "read": 1, "wait": 0}
    colours = {"forward": "#0b6e99", "backward": "#4d9d79", "write": "#d9730d", "read": "#8a4fbf", "wait": "#c0392b"}
    for name, begin, end in [
        ("forward", start, times["forward_end"]),
        ("backward", times["forward_end"], times["end"]),
    ]:
        axis.broken_barh([(begin - start, end - begin)], (3 - 0.35, 0.7), color=colours[name], alpha=0.9)
        axis.text((begin + end) / 2 - start, 3, name, ha="center", va="center", color="white", fontsize=10)
    for span in spans:
        if start <= span.start_seconds <= times["end"]:
            lane = "wait" if span.kind.startswith("wait") else span.kind
            height = 0.7 if lane == "wait" else 0.5  # two threads: shades add up while both work
            axis.broken_barh(
                [(span.start_seconds - start, span.seconds)], (lanes[lane] - height / 2, height),
                color=colours[lane], alpha=1.0 if lane == "wait" else 0.55, linewidth=0,
            )  # fmt: skip
    axis.set_yticks([3, 2, 1, 0], ["compute", "disk writes", "disk reads", "compute\nwaits"])
    axis.set_xlim(0, times["end"] - start)
    axis.set_ylim(-0.5, 3.5)
    axis.set_xlabel("seconds")
    axis.set_title(title, fontsize=11, loc="left")
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(axis="y", length=0)
    figure.savefig(path, dpi=110)


def covered(spans: list[Any], start: float, end: float) -> float:
    """Return the time in which at least one span was active."""
    total, reached = 0.0, start
    for span in sorted(spans, key=lambda s: s.start_seconds):
        begin, stop = max(span.start_seconds, reached), min(span.end_seconds, end)
        if stop > begin:
            total += stop - begin
            reached = stop
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of timed steps (default 5)")
    parser.add_argument("--width", type=int, default=512, help="width of the GPT-2 (default 512)")
    parser.add_argument("--layers", type=int, default=6, help="layers of the GPT-2 (default 6)")
    parser.add_argument("--batch", type=int, default=8, help="batch size (default 8)")
    parser.add_argument("--directory", default="", help="directory of the files (default: the temporary directory)")
    parser.add_argument("--mb-per-s", type=float, default=0.0, help="slow the disk down to this speed")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/offload.{json,png}")
    options = parser.parse_args()
    keep_freed_memory("benchmarks.offload")
    use_one_thread()
    torch.manual_seed(0)
    directory = options.directory or tempfile.gettempdir()
    config = transformers.GPT2Config(
        n_layer=options.layers, n_embd=options.width, n_head=8, vocab_size=VOCAB_SIZE, n_positions=128,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).train()
    ids = torch.randint(5, VOCAB_SIZE, (options.batch, 128), generator=torch.Generator().manual_seed(1))
    _, grads = step(model, ids, contextlib.nullcontext())
    plain_grads = [g.clone() for g in grads]
    fixed = fixed_bytes(model, [ids, *grads])
    fixed_with_reference = fixed + sum(g.nbytes for g in plain_grads)  # the reference gradients are allocated too

    def peak(scope: AbstractContextManager[Any]) -> int:
        gc.collect()
        with PeakMeter([*model.parameters(), *model.buffers(), ids, *grads]) as meter:
            step(model, ids, scope)
        return meter.peak_bytes

    plain_peak = peak(contextlib.nullcontext())
    activations = plain_peak - fixed
    limit = fixed_with_reference + int(SHARE * activations)
    throttle = Throttle(options.mb_per_s)
    threads = 1 if options.mb_per_s else 2  # each thread would sleep separately, as if it had its own disk
    store = DiskStore(directory, threads=threads, record_timeline=True)
    synchronous = Synchronous(directory, threads=threads)
    throttle.slow_down(store)
    throttle.slow_down(synchronous)
    hooks = FileHooks(directory, throttle)
    scopes: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "plain": contextlib.nullcontext,
        "disk": lambda: lowtide.budget(f"{limit} B", stores=store, codecs=None),
        "disk, synchronous": lambda: lowtide.budget(f"{limit} B", stores=synchronous, codecs=None),
        "recompute only": lambda: lowtide.budget(f"{limit} B", stores=None, codecs=None),
        "hooks": hooks,
    }
    mib = 2.0**20
    print(machine(options.directory) + (f", slowed to {options.mb_per_s:g} MB/s" if options.mb_per_s else ""))
    print(
        f"GPT-2, {options.layers} layers, {options.width} wide, batch {options.batch} × 128: "
        f"{activations / mib:.0f} MiB of activations, {activations * SHARE / mib:.0f} MiB of which fit the budget; "
        f"minima of {options.rounds} rounds"
    )
    rows: dict[str, dict[str, Any]] = {}
    for name, scope in scopes.items():
        rows[name] = {"activation_peak_bytes": peak(scope()) - fixed}
        if name in ("disk", "disk, synchronous", "recompute only"):
            report = lowtide.report()
            assert report.budget is not None
            rows[name] |= {
                "replayed_ops": report.replayed_ops,
                "written_bytes": report.budget.bytes_written,
                "values_read_back": report.budget.values_fetched,
            }
        if name == "hooks":
            hooks.close()
    timeline: tuple[Times, list[Any]] | None = None
    for k in range(options.rounds):
        for name, scope in list(scopes.items())[:: 1 if k % 2 else -1]:
            before = store.stats()
            times, gradients = step(model, ids, scope())
            seconds = times["end"] - times["start"]
            if name == "hooks":
                hooks.close()
            assert all(torch.equal(a, b) for a, b in zip(gradients, plain_grads, strict=True)), name
            if name == "disk" and seconds < rows[name].get("seconds", float("inf")):
                timeline = times, [s for s in store.timeline() if times["start"] <= s.start_seconds <= times["end"]]
                after = store.stats()
                budget_report = lowtide.report().budget
                assert budget_report is not None
                rows[name] |= {
                    "prefetched": after.prefetch_hits - before.prefetch_hits,
                    "fetched": budget_report.values_fetched,
                }
            rows[name]["seconds"] = min(seconds, rows[name].get("seconds", seconds))
    print(f"{'':20}{'time':>10}{'activation peak, MiB':>22}{'written, MiB':>14}{'fetched':>11}{'replayed ops':>14}")
    for name, row in rows.items():
        row["times"] = row["seconds"] / rows["plain"]["seconds"]
        written = f"{row['written_bytes'] / mib:14.0f}" if "written_bytes" in row else f"{'':14}"
        print(f"{name:20}{'× ' + format(row['times'], '.3f'):>10}{row['activation_peak_bytes'] / mib:22.1f}{written}"
              f"{row.get('values_read_back', ''):>11}{row.get('replayed_ops', ''):>14}")  # fmt: skip
    assert timeline is not None
    times, spans = timeline
    busy = [s for s in spans if not s.kind.startswith("wait")]
    waits = [s for s in spans if s.kind.startswith("wait")]
    disk_seconds = covered(busy, times["start"], times["end"])
    waited = covered(waits, times["start"], times["end"])
    print(
        f"disk: in a step of {times['end'] - times['start']:.3f} s (plain {rows['plain']['seconds']:.3f} s) the disk "
        f"was busy for {disk_seconds:.3f} s, and compute waited for {waited:.3f} s: "
        f"{1 - waited / max(disk_seconds, 1e-9):.0%} overlapped; {rows['disk']['prefetched']} of "
        f"{rows['disk']['fetched']} fetched values had been prefetched"
    )
    store.close()
    synchronous.close()
    if options.save:
        RESULTS.mkdir(exist_ok=True)
        saved = {
            "machine": machine(options.directory),
            "mb_per_s": options.mb_per_s or None,
            "model": {"layers": options.layers, "width": options.width, "tokens": ids.numel()},
            "activation_bytes": activations,
            "resident_bytes": int(SHARE * activations),
            "rounds": options.rounds,
            "variants": rows,
            "disk_busy_seconds": disk_seconds,
            "waited_seconds": waited,
        }
        name = "offload-slow-disk" if options.mb_per_s else "offload"
        (RESULTS / f"{name}.json").write_text(json.dumps(saved, indent=1) + "\n")
        title = f"A step with a budget for {SHARE:.0%} of its activations: × {rows['disk']['times']:.2f} of plain"
        if options.mb_per_s:
            title += f", on a disk of {options.mb_per_s:g} MB/s"
        draw(times, spans, title, RESULTS / f"{name}.png")


if __name__ == "__main__":
    main()
