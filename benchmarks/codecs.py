"""Measure codecs on activations: compression ratio, speed, and the codecs that the chooser selects.

    python -m benchmarks.codecs [--rounds N] [--layers N] [--dtype float32|bfloat16]

A GPT-2 with random weights is trained for some steps on one batch. Then the values that autograd saves in one forward
pass are collected, each storage once. A ReLU MLP is added, because GPT-2 has no ReLU. One thread. All codecs run in
each round and minima are compared, because the machine may be shared. Speeds are bytes of the tensor
per second; the speed of a plain copy is shown beside them. Parameters and values under 8 KiB are excluded. Masks are
listed separately, but the chooser does not know that they are masks.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections import defaultdict
from collections.abc import Callable
from importlib.metadata import version

import torch

from benchmarks.harness.machine import processor
from lowtide.codecs import CODECS, Chooser, Codec, resolve

MIN_BYTES = 8 * 2**10
MASKS = ", two-valued"
MAX_VALUES = 3
"""Number of measured values of one kind."""


def saved_by_gpt2(layers: int, dtype: torch.dtype, steps: int = 8) -> dict[str, list[torch.Tensor]]:
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=layers, n_embd=384, n_head=6, attn_implementation="eager")
    model = transformers.GPT2LMHeadModel(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    ids = torch.randint(0, config.vocab_size, (4, 256))
    for _ in range(steps):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    model.to(dtype)  # after training, because training in bfloat16 is slow on a CPU
    parameters = {tensor.untyped_storage().data_ptr() for tensor in model.parameters()}
    return collect(lambda: model(input_ids=ids, labels=ids).loss, parameters)


def saved_by_relu_mlp(dtype: torch.dtype) -> dict[str, list[torch.Tensor]]:
    torch.manual_seed(0)
    linear = torch.nn.Linear(256, 1024).to(dtype), torch.nn.Linear(1024, 256).to(dtype)
    model = torch.nn.Sequential(linear[0], torch.nn.ReLU(), linear[1], torch.nn.ReLU(), torch.nn.Dropout(0.1))
    parameters = {tensor.untyped_storage().data_ptr() for tensor in model.parameters()}
    x = torch.randn(1024, 256, dtype=dtype)
    return collect(lambda: model(x).sum(), parameters, prefix="MLP: ")


def collect(
    forward: Callable[[], torch.Tensor], parameters: set[int], prefix: str = ""
) -> dict[str, list[torch.Tensor]]:
    """Return the storages that the graph of `forward` saved, as whole tensors, by the node that saved them."""
    kinds: dict[str, list[torch.Tensor]] = defaultdict(list)
    loss = forward()
    seen = set(parameters)
    pending, nodes = [loss.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is None or node in nodes:
            continue
        nodes.add(node)
        pending += [parent for parent, _ in node.next_functions]
        for name in dir(node):
            if not name.startswith("_saved_"):
                continue
            saved = getattr(node, name)
            for tensor in saved if isinstance(saved, (tuple, list)) else [saved]:
                if not isinstance(tensor, torch.Tensor):
                    continue
                storage = tensor.untyped_storage()
                if storage.data_ptr() in seen or storage.nbytes() < MIN_BYTES:
                    continue
                seen.add(storage.data_ptr())
                whole = torch.empty(0, dtype=tensor.dtype).set_(storage)
                op = node.name().removesuffix("0").removesuffix("Backward")
                kind = f"{prefix}{op}.{name.removeprefix('_saved_')} {str(tensor.dtype).removeprefix('torch.')}"
                is_mask = CODECS["mask"].encode(whole) is not None
                kinds[f"{kind}{MASKS if is_mask else ''}"].append(whole.detach())
    return kinds


def timed(codec: Codec, tensor: torch.Tensor) -> tuple[int, float, float] | None:
    """Return encoded bytes, encode time and decode time; None if the codec does not apply."""
    start = time.perf_counter()
    encoded = codec.encode(tensor)
    middle = time.perf_counter()
    if encoded is None:
        return None
    codec.decode(encoded)
    return encoded.nbytes, middle - start, time.perf_counter() - middle


def report_kind(label: str, tensors: list[torch.Tensor], rounds: int) -> None:
    """Measure some tensors of one kind and print the results of all codecs."""
    sample = tensors[:: max(1, len(tensors) // MAX_VALUES)][:MAX_VALUES]
    nbytes = sum(tensor.nbytes for tensor in sample)
    encoded_bytes = dict.fromkeys(CODECS, 0)
    encode = {name: [float("inf")] * len(sample) for name in CODECS}
    decode = {name: [float("inf")] * len(sample) for name in CODECS}
    copy = [float("inf")] * len(sample)
    refused: set[str] = set()
    for _ in range(rounds):
        for name, codec in CODECS.items():
            sizes = 0
            for i, tensor in enumerate(sample):
                result = timed(codec, tensor) if name not in refused else None
                if result is None:
                    refused.add(name)
                    break
                sizes += result[0]
                encode[name][i] = min(encode[name][i], result[1])
                decode[name][i] = min(decode[name][i], result[2])
            encoded_bytes[name] = sizes
        for i, tensor in enumerate(sample):
            start = time.perf_counter()
            tensor.clone()
            copy[i] = min(copy[i], time.perf_counter() - start)
    total = sum(tensor.nbytes for tensor in tensors)
    print(
        f"\n{label}: {len(tensors)} values, {total / 2**20:.1f} MiB; a copy takes {nbytes / sum(copy) / 1e9:.1f} GB/s"
    )
    for name in CODECS:
        if name not in refused:
            print(
                f"    {name:10}{nbytes / encoded_bytes[name]:12.2f} ×"
                f"{nbytes / sum(encode[name]) / 1e9:10.2f}{nbytes / sum(decode[name]) / 1e9:10.2f}"
            )


def totals(kinds: dict[str, list[torch.Tensor]]) -> None:
    """Print the results of the chooser on all values."""
    plain_bytes = sum(tensor.nbytes for tensors in kinds.values() for tensor in tensors)
    print(f"\nAll {plain_bytes / 2**20:.1f} MiB with the chooser; the key of a value is the op that saved it:")
    print(f"{'codecs':24}{'held, MiB':>10}{'ratio':>10}{'first pass s':>14}{'later pass s':>14}   used (values)")
    for allowed in ("exact", ("constant", "mask", "narrow", "sparse"), "bf16", "fp8", "int8"):
        chooser = Chooser(resolve(allowed))
        seconds = []
        for _ in range(3):
            held_bytes = 0
            used: dict[str, int] = defaultdict(int)
            start = time.perf_counter()
            for label, tensors in kinds.items():
                for tensor in tensors:
                    encoded = chooser.encode(tensor, key=label.removesuffix(MASKS))
                    held_bytes += encoded.nbytes if encoded is not None else tensor.nbytes
                    used[encoded.codec if encoded is not None else "none"] += 1
            seconds.append(time.perf_counter() - start)
        title = allowed if isinstance(allowed, str) else "exact without bytes"
        names = ", ".join(f"{name} {count}" for name, count in sorted(used.items()))
        print(
            f"{title:24}{held_bytes / 2**20:10.1f}{plain_bytes / held_bytes:9.2f} ×"
            f"{seconds[0]:14.2f}{min(seconds[1:]):14.2f}   {names}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of all codecs (default 5)")
    parser.add_argument("--layers", type=int, default=4, help="layers of the GPT-2 (default 4)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype of the activations")
    options = parser.parse_args()
    torch.set_num_threads(1)
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "numpy", "blosc2", "transformers"))
    print(f"{platform.platform()}, {processor()}, Python {platform.python_version()}, {versions}; one thread")
    dtype = getattr(torch, options.dtype)
    kinds = saved_by_gpt2(options.layers, dtype) | saved_by_relu_mlp(dtype)
    print(
        f"minima of {options.rounds} rounds; GPT-2 of {options.layers} layers, 384 wide, batch 4 × 256, {options.dtype}"
    )
    print(f"    {'codec':10}{'ratio':>14}{'encode':>10}{'decode':>10}   GB/s")
    for label, tensors in kinds.items():
        report_kind(label, tensors, options.rounds)
    totals(kinds)


if __name__ == "__main__":
    main()
