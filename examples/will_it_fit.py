"""Find the largest batch that fits into a budget, and its cost, before training.

    python examples/will_it_fit.py [--budget "30 MiB"] [--plot frontier.png]

For batches of a small GPT-2, prints the plain peak, whether a plan fits into the budget, and its cost. Then prints the
frontier of the largest batch that fits, trains one step under its plan, and compares the peak with the prediction and
the gradients with plain PyTorch.
"""

from __future__ import annotations

import argparse

import torch
import transformers

import lowtide

LENGTH, WORDS = 64, 256


def mib(nbytes: int | None) -> str:
    return f"{nbytes / 2**20:.1f} MiB" if nbytes is not None else "unknown"


def batch_of(rows: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, WORDS, (rows, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def plan_batch(model: torch.nn.Module, rows: int, budget: str) -> lowtide.Plan | None:
    """Print the prediction for a batch. Return the plan, or None if no plan fits."""
    try:
        plan = lowtide.plan(model, batch_of(rows), budget, deadline_s=2)
    except lowtide.BudgetError as error:
        print(f"batch {rows:3}   no; the smallest budget that works is {mib(error.smallest_bytes)}")
        return None
    extra = plan.predicted_step_s / plan.plain_step_s - 1
    plain, peak = mib(plan.plain_peak_bytes), mib(plan.predicted_peak_bytes)
    print(f"batch {rows:3}   yes; plain peak {plain}, planned peak {peak}, {extra:.1%} more time")
    return plan


def gradients(model: torch.nn.Module, rows: int) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(2)  # for dropout
    model(**batch_of(rows)).loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="30 MiB")
    parser.add_argument("--plot", metavar="FILE", help="write a plot of the frontier")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    config = transformers.GPT2Config(n_layer=3, n_embd=64, n_head=4, vocab_size=WORDS, n_positions=LENGTH)
    model = transformers.GPT2LMHeadModel(config).train()

    print(f"a budget of {options.budget} for all live tensors\n")
    found: tuple[int, lowtide.Plan] | None = None
    for rows in (8, 16, 32, 64):
        plan = plan_batch(model, rows, options.budget)
        if plan is None:
            break
        found = rows, plan
    if found is None:
        raise SystemExit("no batch fits")
    rows, plan = found

    frontier = lowtide.frontier(model, batch_of(rows), points=3, deadline_s=2)
    print(f"\nbatch {rows}, step time against memory\n{frontier}")
    if options.plot:
        frontier.plot(options.plot)

    expected = gradients(model, rows)
    held = sum(gradient.nbytes for gradient in expected)  # the budget counts these gradients too
    lowtide.fit(model, budget=plan.budget_bytes + held, plan=plan)
    equal = all(torch.equal(a, b) for a, b in zip(expected, gradients(model, rows), strict=True))
    measured = (lowtide.report(model).measured_peak_bytes or 0) - held
    print(f"\npeak {mib(measured)} measured, {mib(plan.predicted_peak_bytes)} predicted")
    print(f"gradients bit-equal to plain PyTorch's: {equal}")
    if not equal or measured > plan.budget_bytes:
        raise SystemExit("the gradients differ or the budget was exceeded")


if __name__ == "__main__":
    main()
