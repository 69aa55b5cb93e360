"""Set-up of each variant in words, for the results page. No torch."""

from __future__ import annotations

from collections.abc import Iterable

DESCRIPTIONS = {
    "plain": "PyTorch without checkpointing.",
    "plain-again": "Plain steps as a variant of their own. Their distance from 1 is the noise of the machine.",
    "checkpoint": "`torch.utils.checkpoint` on every block, with `use_reentrant=False`: through "
    "`gradient_checkpointing_enable` for models of transformers, around the forward of each block for the others.",
    "checkpoint-sqrt": "One checkpoint around every √n consecutive blocks, as `checkpoint_sequential` does.",
    "sac": "Selective checkpointing of every block with `create_selective_checkpoint_contexts`: `MUST_SAVE` for matrix "
    "products, convolutions and attention, `PREFER_RECOMPUTE` for other ops.",
    "offload": "`torch.autograd.graph.save_on_cpu(pin_memory=False)` around the forward pass. On a CPU no tensor "
    "moves, so this measures the cost of the hooks.",
    "remat": "torch_remat: `remat.checkpoint` around every block, `remat.region(recompute=False)` around the linear "
    "and convolution modules in it, and a hook for the generator state where blocks have dropout. Attention is a "
    "function, not a module, and is recomputed.",
    "compile": "`torch.compile(model)` with default settings. *@0.5* sets "
    "`torch._functorch.config.activation_memory_budget` to 0.5. The models are small, because compiling is slow.",
    "rule:every1": "`with lowtide.saving(lowtide.EveryN(1)):` around the forward pass.",
    "rule:products": "`with lowtide.saving(lowtide.SaveOps(...)):` around the forward pass, with the ops that SAC "
    "saves.",
    "online": "`with lowtide.budget(limit):` around the forward pass, with default settings. No plan.",
    "planned": "`plan = lowtide.plan(model, batch, budget)`, then `lowtide.fit(model, plan=plan)`. All budgets are "
    "planned from one profile. As in `fit`, plans leave 1/200 of the budget free where possible. The periodic scan "
    "of all live tensors, at most 0.5 % of the time, runs between the timed steps.",
    "planned-disk": "The same with `stores=(\"disk\",)`: values may be offloaded to a temporary file. Processor time "
    "includes the threads that write.",
    "schedule:DTR": "`lowtide.budget` with the eviction heuristic h-DTR (Kirisame et al., 2021), without stores and "
    "codecs.",
    "schedule:rotor": "The fastest schedule of rotor (Beaumont et al., 2019) within the budget, on the profiled step, "
    "executed by lowtide. `benchmarks/planners/rotor.py` describes the differences.",
}  # fmt: skip


def describe(names: Iterable[str]) -> dict[str, str]:
    """Return the descriptions of these variants, without the settings after an @, in their order."""
    kinds = dict.fromkeys(name.partition("@")[0] for name in names)
    return {kind: DESCRIPTIONS[kind] for kind in kinds if kind in DESCRIPTIONS}
