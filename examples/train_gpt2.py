"""Train a Hugging Face GPT-2 under a policy, with one added line.

    python examples/train_gpt2.py [--policy EveryN(2)] [--steps 5]

Prints the loss of every step and the peak of live tensor bytes. Try KeepAll(), EveryN(1), EveryN(3) and
SaveOps(["addmm", "mm"]): the losses are equal in all digits, and the peaks differ.
"""

from __future__ import annotations

import argparse

import torch
import transformers

import lowtide
from lowtide.profiling.peak_meter import PeakMeter

POLICIES = {
    name: getattr(lowtide, name) for name in ("KeepAll", "KeepNone", "EveryN", "Selective", "Segments", "SaveOps")
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="EveryN(2)", help="a policy of lowtide, as a Python expression")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    policy = eval(options.policy, {"__builtins__": {}}, POLICIES)

    torch.set_num_threads(1)
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    config = transformers.GPT2Config(n_layer=6, n_embd=128, n_head=4, vocab_size=512, n_positions=128)
    model = transformers.GPT2LMHeadModel(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    with PeakMeter(model.parameters()) as meter:
        for step in range(options.steps):
            ids = torch.randint(0, 512, (4, 128))
            with lowtide.saving(policy):  # the added line
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {step}  loss {loss.item():.9f}")
    print(f"peak {meter.peak_bytes / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
