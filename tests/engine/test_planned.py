"""Steps that follow a plan are exact, and so are steps that differ from their plan (Rule 13)."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings, strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from lowtide.codecs._base import CHUNK_ELEMENTS
from lowtide.engine.memory.budget import MemoryBudget
from lowtide.engine.recording.recorded_op import RecordedOp
from lowtide.engine.runtime import current_runtime
from lowtide.engine.scopes.recording_scope import RecordingScope, make_recorder
from lowtide.engine.strategies.online import WithinBudget
from lowtide.engine.strategies.planned import PlannedStrategy, StepMeter
from lowtide.engine.values.recipe import Recipe
from lowtide.fitting import fitted_model
from lowtide.fitting.plan import profile
from lowtide.planning import CodecCost, Plan, solve
from lowtide.torch_compat import innermost_hooks, innermost_mode, tree_leaves
from tests.allocator import live_bytes
from tests.scenarios.running import process_bytes

from . import deep
from .budgets import RandomEvictionBudget
from .programs import Instruction, instructions, programs
from .steps import assert_equal, run_step
from .test_fuzz import EXAMPLES, assert_same, run

modes = st.sampled_from(["after", "twice", "double"])
seeds = st.none() | st.integers(0, 1000)
lengths = st.sampled_from([3, 6])  # instructions per layer
REFUSALS = (RuntimeError, IndexError, TypeError, ValueError, AttributeError)
FUZZ = settings(
    max_examples=EXAMPLES // 4,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize="LOWTIDE_FUZZ_EXAMPLES" not in os.environ,
    print_blob=True,
)


# A value that is written in place, and copied before the second write.
WRITTEN_TWICE = [
    *[Instruction("unary", "sin", 0, 0)] * 3,
    Instruction("special", "lowtide_checkpoint", 0, 0),
    *[Instruction("inplace", "silu_", 1, 0)] * 2,
    *[Instruction("unary", "sin", 0, 0)] * 2,
]


# A gradient formula that uses other kernels under a dispatch mode, in a step that leaves its plan.
SENSITIVE_FORMULA = [
    *[Instruction("unary", "sin", 0, 0)] * 5,
    Instruction("unary", "complex", 0, 0),
    Instruction("reduce", "prod", 0, 0),
    *[Instruction("unary", "sin", 0, 0)] * 2,
]


# The same with create_graph.
SENSITIVE_TWICE = [
    *[Instruction("unary", "sin", 0, 0)] * 3,
    Instruction("reduce", "prod", 0, 0),
    Instruction("unary", "sin", 0, 0),
]


MASKS = tuple(
    CodecCost(
        "mask", dtype, True, size, 1, 0, 12, CHUNK_ELEMENTS, 0.0, 0.0, 0.0, 0.0, min_bytes=0, binary=dtype != "bool"
    )
    for dtype, size in (("bool", 1), ("float32", 4), ("float64", 8))
)


class following:  # noqa: N801
    """A scope that follows a plan and lists the names of the recorded ops.

    With a `memory_budget` the step may differ from the plan, or leave out some of its ops, and evicts values.
    """

    def __init__(self, plan: Plan, memory_budget: MemoryBudget | None = None) -> None:
        runtime = current_runtime()
        varies = memory_budget is not None
        memory_budget = memory_budget or MemoryBudget(runtime.memory(), 2**60)
        self.names: dict[int, str] = {}
        self.strategy = PlannedStrategy(
            plan, memory_budget, None, runtime.backward.begin, may_differ=varies, may_be_shorter=varies
        )
        recorded = self.strategy.recorded

        def record_name(op: RecordedOp, recipe: Recipe | None) -> None:
            self.names[op.number] = op.facts.name
            recorded(op, recipe)

        self.strategy.recorded = record_name  # type: ignore[method-assign]
        self.recorder = make_recorder(self.strategy, WithinBudget(2**60), name="a plan")
        self._scope = RecordingScope(runtime, self.recorder)

    def __enter__(self) -> following:
        self._scope.open()
        return self

    def __exit__(self, *error: object) -> None:
        self._scope.close()


def names_of(program: list[Instruction], mode: str, length: int) -> list[str]:
    scope = following(plan_of([], 0, 0))
    run(program, scope, mode, length)
    return [scope.names[j] for j in range(len(scope.names))]


def plan_of(names: list[str], salt: int, share: int) -> Plan:
    """Return a plan that keeps about `share` per cent of the ops and compresses a third of them.

    Every third plan ends before the step does. Every other plan releases some recomputed values after use.
    """
    if salt % 3 == 0:
        names = names[: len(names) * 3 // 4]
    keep = tuple(hash((salt, j)) % 100 < share for j in range(len(names)))
    compressed = tuple(j for j, kept in enumerate(keep) if kept and hash((salt, j, 1)) % 3 == 0)
    recomputed = [j for j, kept in enumerate(keep) if not kept] if salt % 2 else []
    released = tuple(j for j in recomputed if hash((salt, j, 2)) % 3 == 0)
    return Plan(
        keep=keep, released=released, offload=compressed, written_before=tuple(j + 1 for j in compressed),
        compress=compressed, codec_costs=MASKS,
        budget_bytes=2**60, predicted_peak_bytes=0, plain_peak_bytes=0, peak_at="",
        predicted_step_s=1.0, plain_step_s=1.0, bound_step_s=1.0, solver="none", solve_s=0.0, replayed_ops=0,
        pinned=(), modules=(), fingerprint="", op_names=tuple(names),
    )  # fmt: skip


@FUZZ
@pytest.mark.filterwarnings("ignore::lowtide.LowtideWarning")
@given(programs, modes, lengths, st.integers(0, 1000), st.sampled_from([50, 80, 95]), seeds)
@example(WRITTEN_TWICE, "after", 3, 3, 50, None)
@example([Instruction("unary", "rrelu", 0, 0)], "after", 3, 0, 50, None)  # memory that is saved before it is written
def test_random_programs_are_exact(
    program: list[Instruction], mode: str, length: int, salt: int, share: int, seed: int | None
) -> None:
    try:
        plain = run(program, contextlib.nullcontext(), mode, length)
    except REFUSALS:
        return
    plan = plan_of(names_of(program, mode, length), salt, share)
    memory_budget = None if seed is None else RandomEvictionBudget(seed, None, None)
    ours = run(program, following(plan, memory_budget), mode, length)
    for part in plain:
        assert_same(plain[part], ours[part], part)
    assert innermost_mode() is None
    assert innermost_hooks() is None


@FUZZ
@pytest.mark.filterwarnings("ignore::lowtide.LowtideWarning")
@given(
    programs.filter(lambda program: len(program) > 3),
    modes,
    lengths,
    st.integers(0, 1000),
    st.sampled_from([50, 80, 95]),
    st.lists(st.tuples(st.integers(1, 23), instructions), min_size=1, max_size=3),
    seeds,
)
@example(SENSITIVE_TWICE, "double", 3, 220, 50, [(4, Instruction("unary", "exp", 0, 0))], None)
@example(SENSITIVE_FORMULA, "after", 3, 0, 50, [(7, Instruction("unary", "exp", 0, 0))], None)
def test_programs_that_differ_from_their_plan_are_exact(
    program: list[Instruction],
    mode: str,
    length: int,
    salt: int,
    share: int,
    changes: list[tuple[int, Instruction]],
    seed: int | None,
) -> None:
    other = list(program)
    for at, instruction in changes:
        other[at % len(other)] = instruction
    try:
        run(program, contextlib.nullcontext(), mode, length)
        plain = run(other, contextlib.nullcontext(), mode, length)
    except REFUSALS:
        return
    plan = plan_of(names_of(program, mode, length), salt, share)
    memory_budget = None if seed is None else RandomEvictionBudget(seed, None, None)
    ours = run(other, following(plan, memory_budget), mode, length)
    assert innermost_mode() is None
    assert innermost_hooks() is None
    for part in plain:
        assert_same(plain[part], ours[part], part)


def test_the_random_programs_replay_and_follow_their_plans() -> None:
    """The fuzz tests are meaningless if no value is recomputed, or if every step leaves its plan."""
    counts: Counter[str] = Counter()

    @settings(max_examples=150, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(programs, lengths, st.integers(0, 1000))
    def drive(program: list[Instruction], length: int, salt: int) -> None:
        with contextlib.suppress(*REFUSALS):
            plan = plan_of(names_of(program, "after", length), salt, 80)
            scope = following(plan)
            run(program, scope, "after", length)
            counts["programs"] += 1
            counts["replays"] += scope.recorder.context.counts.replayed_ops > 0
            counts["releases"] += bool(plan.released)
            counts["left"] += scope.strategy.left_at is not None

    drive()
    assert counts["programs"] > 40
    assert counts["replays"] > counts["programs"] // 3
    assert counts["releases"] > counts["programs"] // 16
    assert counts["left"] <= counts["programs"] // 10


# -- models -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.6])
@pytest.mark.parametrize("name", ["gpt2", "llama", "resnet"])
def test_spare_recipes_hold_no_memory(name: str, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """After each op, a step that may differ from its plan has the same live bytes as one that may not."""
    model, batch = deep.build(name)
    plain = run_step(model, batch)
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held_tensors(model, batch)}
    beside = process_bytes() - sum(held.values())  # tensors of other tests
    limit = int(share * plain.peak_bytes) + beside if share else smallest_budget(model, batch)
    plan = lowtide.plan(model, batch, limit, stores=None, codecs=None, deadline_s=5.0)
    assert len(plan.recomputed) > 0
    live: list[int] = []
    strategies: list[PlannedStrategy] = []
    op_ends = StepMeter.op_ends

    def op_ends_and_list(meter: StepMeter, out: Any, probe: Any) -> None:
        op_ends(meter, out, probe)
        live.append(live_bytes())

    def measured(may_differ: bool) -> tuple[int, list[int]]:
        def strategy(*args: Any, **options: Any) -> PlannedStrategy:
            strategies.append(PlannedStrategy(*args, **{**options, "may_differ": may_differ}))
            return strategies[-1]

        monkeypatch.setattr(fitted_model, "PlannedStrategy", strategy)
        lowtide.fit(model, plan=plan, budget=2**40)
        gc.collect()
        start = live_bytes()
        live.clear()
        step = run_step(model, batch)
        lowtide.unfit(model)
        assert_equal(plain, step)
        return step.peak_bytes, [after - start for after in live]

    monkeypatch.setattr(StepMeter, "op_ends", op_ends_and_list)
    assert measured(may_differ=True) == measured(may_differ=False)
    assert [strategy.left_at for strategy in strategies] == [None, None]
    assert live


def held_tensors(model: nn.Module, batch: Any) -> list[torch.Tensor]:
    return [t for t in [*model.parameters(), *model.buffers(), *tree_leaves(batch)] if isinstance(t, torch.Tensor)]


def smallest_budget(model: nn.Module, batch: Any) -> int:
    """Return the smallest budget with a plan."""
    with pytest.raises(lowtide.BudgetError) as caught:
        lowtide.plan(model, batch, "1 KiB", stores=None, codecs=None)
    assert caught.value.smallest_bytes is not None
    return caught.value.smallest_bytes


def test_replays_in_a_pass_that_creates_a_graph_are_not_recorded() -> None:
    def run_twice(plan: Plan) -> tuple[following, torch.Tensor]:
        x = torch.linspace(0, 1, 8, requires_grad=True)
        with following(plan) as scope:
            y = x.sin().exp().sin()
            (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            loss = gradient.square().sum()
        loss.backward()
        assert x.grad is not None
        return scope, x.grad

    kept, plain = run_twice(plan_of([], 0, 0))
    names = [kept.names[j] for j in range(len(kept.names))]
    replaying, ours = run_twice(plan_of(names, 2, 0))
    assert replaying.recorder.context.counts.replayed_ops > 0
    assert replaying.names == kept.names
    assert replaying.strategy.left_at is None
    assert torch.equal(plain, ours)


class Residual(nn.Module):
    """A residual block with several in-place ops, as in convolutional nets."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.relu = nn.BatchNorm2d(8), nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(self.relu(self.norm(self.first(x))))
        y += x
        return self.relu(y)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(6))
        self.head = nn.Linear(8, 4)
        self.drop = nn.Dropout(0.3)
        self.surprise = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i == 3 and self.surprise == "error":
                raise ValueError("surprise")
            if i == 3 and self.surprise == "skip":
                x = block(x)
        return self.head(self.drop(x.mean((2, 3))))


def net() -> tuple[Net, tuple[torch.Tensor]]:
    torch.manual_seed(0)
    return Net(), (torch.randn(4, 8, 16, 16),)


def mean_square(out: torch.Tensor) -> torch.Tensor:
    return out.float().square().mean()


def plan_at(share: float, model: nn.Module, batch: Any, loss: Any = mean_square) -> Plan:
    """Return a plan for this share of the bytes that a plain step adds to the live bytes before it."""
    trace = profile(model, batch, loss=loss)
    beside, peak = trace.ops[0].other_bytes, solve(trace, 2**60).predicted_peak_bytes
    plan = solve(trace, beside + int(share * (peak - beside)))
    assert plan.recomputed
    return plan


def fitted(share: float) -> tuple[Net, tuple[torch.Tensor], Any]:
    """Return a model whose steps follow a plan, its batch, and a plain step."""
    model, batch = net()
    plain = run_step(model, batch)
    lowtide.fit(model, plan=plan_at(share, model, batch), budget=2**40)
    for _ in range(2):
        assert_equal(plain, run_step(model, batch))
    return model, batch, plain


@pytest.mark.parametrize("share", [0.9, 0.75])
def test_nets_that_write_in_place(share: float) -> None:
    model, batch, plain = fitted(share)
    plan = lowtide.report(model).plan
    assert plan is not None
    for _ in range(3):
        step = run_step(model, batch)
        assert_equal(plain, step)
        saved = plan.plain_peak_bytes - plan.predicted_peak_bytes
        assert plain.peak_bytes - step.peak_bytes >= 0.95 * saved > 0
        assert lowtide.report().replayed_ops == plan.replayed_ops
    assert lowtide.report(model).online_steps == 0
    lowtide.unfit(model)


class Overwriting(nn.Module):
    """Overwrites values, and memory whose first content is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            x = x @ self.weight
            unused = x.detach() * 2
            unused.copy_(x.sin())
            written = x * 3
            written.add_(x)
            x = unused.sigmoid() * x.tanh() + written.cos()
        return x


@pytest.mark.parametrize("share", [0.8, 0.6, 0.5])
def test_ops_that_are_not_recorded_make_memory_that_recomputed_ops_overwrite(share: float) -> None:
    torch.manual_seed(0)
    model, batch = Overwriting(), (torch.randn(512, 64),)
    plain = run_step(model, batch)
    plan = plan_at(share, model, batch)
    lowtide.fit(model, plan=plan, budget=2**40)
    for _ in range(4):
        step = run_step(model, batch)
        assert_equal(plain, step)
        assert plain.peak_bytes - step.peak_bytes >= 0.95 * (plan.plain_peak_bytes - plan.predicted_peak_bytes) > 0
        assert lowtide.report().replayed_ops == plan.replayed_ops
    assert lowtide.report(model).online_steps == 0
    lowtide.unfit(model)


def test_ops_whose_values_are_kept_are_not_recorded() -> None:
    model, batch = net()
    plan = plan_at(0.75, model, batch)
    scope = following(plan)
    with scope:
        loss = mean_square(model(*batch))
    loss.backward()
    assert scope.strategy.left_at is None
    assert {*plan.recomputed} <= {*scope.names}
    not_recorded = {plan.op_names[j] for j in range(len(plan.keep)) if j not in scope.names}
    assert {"aten.convolution.default", "aten.mean.dim"} & not_recorded
    written = {"aten.add_.Tensor", "aten.relu_.default", "aten.native_batch_norm.default"}
    assert not written & not_recorded  # ops that write in place are always recorded


def test_a_step_that_differs_from_its_plan() -> None:
    model, batch = net()
    model.surprise = "skip"
    expected = run_step(model, batch)
    model, batch, plain = fitted(0.75)
    assert not torch.equal(plain.loss, expected.loss)
    assert_equal(plain, run_step(model, batch))
    model.surprise = "skip"
    assert_equal(expected, run_step(model, batch))
    model.surprise = ""
    for _ in range(3):
        assert_equal(plain, run_step(model, batch))
    assert lowtide.report(model).online_steps == 2  # the step that differs, and the next one, which is profiled
    lowtide.unfit(model)


class Drawing(nn.Module):
    """Eight products; with `draws` the fifth op is a dropout instead."""

    draws = False

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in range(8):
            x = torch.native_dropout(x, 0.5, True)[0] if self.draws and i == 4 else x @ self.weight
            x = x.tanh().exp().sin()
        return x


@pytest.mark.parametrize("steps_before", [0, 3])
def test_a_step_that_draws_in_place_of_a_kept_op(steps_before: int) -> None:
    """The generator state of a kept op is not captured, so the dropout cannot be recomputed."""
    torch.manual_seed(0)
    model, batch = Drawing(), (torch.randn(512, 64),)
    trace = profile(model, batch, loss=mean_square)
    plan = solve(trace, solve(trace, 2**60).predicted_peak_bytes - 12 * batch[0].nbytes)
    products = [j for j, name in enumerate(plan.op_names) if name == "aten.mm.default"]
    assert plan.keep[products[4]]
    model.draws = True
    expected = run_step(model, batch)
    model.draws = False
    lowtide.fit(model, plan=plan)
    for _ in range(steps_before):
        run_step(model, batch)
    model.draws = True
    assert_equal(expected, run_step(model, batch))
    assert lowtide.report().replayed_ops
    lowtide.unfit(model)


class Sine(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin()


class MaybeWrite(nn.Module):
    """Returns its input; with `writes` it overwrites the input first."""

    writes = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2) if self.writes else x


def test_a_value_that_another_module_overwrites() -> None:
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(8, 8), Sine(), MaybeWrite(), nn.Linear(8, 8)), (torch.randn(4, 8),)
    plain = run_step(model, batch)
    model[2].writes = True
    expected = run_step(model, batch)
    model[2].writes = False
    plan = solve(profile(model, batch, loss=mean_square), 2**60)
    sines = [j for j, name in enumerate(plan.op_names) if "sin" in name]
    assert len(sines) == 1
    lowtide.fit(model, plan=replace(plan, keep=tuple(j not in sines for j in range(len(plan.keep)))), budget=2**40)
    for _ in range(4):
        assert_equal(plain, run_step(model, batch))
        assert lowtide.report().replayed_ops == 1
    model[2].writes = True
    assert_equal(expected, run_step(model, batch))
    lowtide.unfit(model)


HALVES = (CodecCost("bf16", "float32", False, 4, 16, 0, 0, CHUNK_ELEMENTS, 0.0, 0.0, 0.0, 0.0),)


@pytest.mark.parametrize("codec_costs", [MASKS, HALVES, ()])
def test_dropout_masks_are_compressed_or_drawn_from_the_same_state(codec_costs: tuple[CodecCost, ...]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 64))
    batch = (torch.randn(256, 64),)
    plain = run_step(model, batch)
    trace = profile(model, batch, loss=mean_square)
    plan = solve(trace, 2**60)
    (mask,) = (j for j, name in enumerate(plan.op_names) if "div_" in name)
    if codec_costs:
        plan = replace(plan, offload=(mask,), written_before=(mask + 1,), compress=(mask,), codec_costs=codec_costs)
    else:
        plan = replace(plan, keep=tuple(op.module != "1" or op.pinned is not None for op in trace.ops))
    lowtide.fit(model, plan=plan, budget=2**40, codecs=("mask", "bf16"))
    for _ in range(4):
        assert_equal(plain, run_step(model, batch))  # 0 and 2 are the same in bf16
        assert lowtide.report().values_compressed == bool(codec_costs)
        assert bool(lowtide.report().replayed_ops) == (not codec_costs)
    lowtide.unfit(model)


class Gated(nn.Module):
    """Multiplies by a mask, and with `early` by a value computed from the mask first."""

    def __init__(self, early: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.early = early
        self.other: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        mask = (x.detach() > 0.5).float()
        if self.early:
            x = x * (mask + 1)
        return x * (mask if self.other is None else self.other)


@pytest.mark.parametrize("early", [False, True])
def test_a_value_that_is_compressed_before_it_is_saved(early: bool) -> None:
    """A recipe that reads the value must not hold its memory."""
    torch.manual_seed(0)
    model, batch = Gated(early), (torch.randn(256, 64),)
    plain = run_step(model, batch)
    plan = solve(profile(model, batch, loss=mean_square), 2**60)
    mask = plan.op_names.index("aten._to_copy.default")
    keep = tuple(name != "aten.add.Tensor" for name in plan.op_names)
    assert keep.count(False) == early
    plan = replace(plan, keep=keep, offload=(mask,), written_before=(mask + 1,), compress=(mask,), codec_costs=MASKS)
    lowtide.fit(model, plan=plan, budget=2**40)
    for _ in range(4):
        assert_equal(plain, run_step(model, batch))
        report = lowtide.report()
        assert (report.values_compressed, report.values_recomputed) == (1, early)
    lowtide.unfit(model)


class Surprising(nn.Module):
    """A module whose forward depends on `surprise`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.surprise = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        first = y.sin()
        if self.surprise == "overwrites":
            first.mul_(2)
        with torch.set_grad_enabled(self.surprise != "fewer are saved"):
            z = y.view(-1, 16) + 1
        if self.surprise == "more are saved":
            z = z.exp()
        if self.surprise == "ends early":
            return first.square()
        last = nn.functional.dropout(z.tanh().cos() * first.square(), 0.3)
        if self.surprise == "error":
            raise ValueError("surprise")
        out: torch.Tensor = last.view(-1) + 1
        return out if self.surprise != "more at the end" else out.exp()


SURPRISES = ["", "overwrites", "fewer are saved", "more are saved", "ends early", "more at the end", "error"]


@pytest.mark.parametrize("surprise", SURPRISES)
def test_a_forward_that_differs_from_its_plan(surprise: str) -> None:
    def build() -> tuple[Surprising, tuple[torch.Tensor]]:
        torch.manual_seed(0)
        return Surprising(), (torch.randn(48, 16),)

    model, batch = build()
    plain = run_step(model, batch)
    model.surprise = surprise
    surprised = None
    with contextlib.suppress(ValueError):
        surprised = run_step(model, batch)
    model, batch = build()
    plan = solve(profile(model, batch, loss=mean_square), 2**60)
    recomputed = [j for j, name in enumerate(plan.op_names) if name in ("aten.sin.default", "aten.cos.default")]
    assert len(recomputed) == 2
    plan = replace(plan, keep=tuple(j not in recomputed for j in range(len(plan.keep))))
    lowtide.fit(model, plan=plan, budget=2**40)
    for _ in range(3):
        assert_equal(plain, run_step(model, batch))
        assert lowtide.report().replayed_ops == 2
    model.surprise = surprise
    if surprised is None:
        with pytest.raises(ValueError, match="surprise"):
            model(*batch)
    else:
        assert_equal(surprised, run_step(model, batch))
    assert innermost_mode() is None
    assert innermost_hooks() is None
    model.surprise = ""
    assert_equal(plain, run_step(model, batch))
    lowtide.unfit(model)


class Sharing(nn.Module):
    """Weights are divided by their sum in place, as in routers. Autograd saves a copy of them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = (self.inner(x).tanh() + 2).sin()
        scale = weights.tanh().cos().sum(-1, keepdim=True)
        weights /= scale
        return weights.square()


def test_weights_that_are_divided_in_place() -> None:
    torch.manual_seed(0)
    model, batch = Sharing(), (torch.randn(48, 16),)
    plain = run_step(model, batch)
    plan = solve(profile(model, batch, loss=mean_square), 2**60)
    released = [j for j, name in enumerate(plan.op_names) if name in ("aten.sin.default", "aten.div_.Tensor")]
    assert len(released) == 2
    lowtide.fit(model, plan=replace(plan, keep=tuple(j not in released for j in range(len(plan.keep)))), budget=2**40)
    for _ in range(5):
        assert_equal(plain, run_step(model, batch))
        assert lowtide.report().replayed_ops == 2
    assert lowtide.report(model).online_steps == 0
    lowtide.unfit(model)


class Loss(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin().square().mean()


def test_ops_after_the_last_planned_op() -> None:
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), Loss()), (torch.randn(4, 8),)
    loss = lambda model, batch: model(*batch)
    plain = run_step(model, batch, loss=loss)
    whole = solve(profile(model, batch, loss=lambda out: out), 2**60)
    end = 1 + next(j for j, name in enumerate(whole.op_names) if "sin" in name)
    assert end < len(whole.op_names)
    keep = tuple("sin" not in name and "gelu" not in name for name in whole.op_names[:end])
    lowtide.fit(model, plan=replace(whole, keep=keep, op_names=whole.op_names[:end]), budget=2**40)
    for _ in range(4):
        assert_equal(plain, run_step(model, batch, loss=loss))
        assert lowtide.report().replayed_ops == 2
    assert lowtide.report(model).online_steps == 0
    lowtide.unfit(model)


def test_no_state_remains_after_an_error_in_forward() -> None:
    model, batch, plain = fitted(0.75)
    state = copy.deepcopy(model.state_dict())
    model.surprise = "error"
    with pytest.raises(ValueError, match="surprise"):
        model(*batch)
    assert innermost_mode() is None
    assert innermost_hooks() is None
    model.surprise = ""
    model.load_state_dict(state)
    assert_equal(plain, run_step(model, batch))
    assert lowtide.report(model).online_steps == 0
    lowtide.unfit(model)


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Watched(nn.Module):
    """A model that counts its own ops and packs its own saved tensors."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.ops: Counter[str] = Counter()
        self.n_packed = 0

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.n_packed += 1
        return tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n_packed = 0
        x = x * 2
        with Counting() as mode, torch.autograd.graph.saved_tensors_hooks(self._pack, lambda t: t):
            x = self.inner(x)
        self.ops = mode.ops
        return x.sin()


def test_modes_and_hooks_inside_the_model() -> None:
    torch.manual_seed(0)
    model, batch = Watched(nn.Sequential(*[nn.Linear(32, 32), nn.GELU()] * 4)), (torch.randn(64, 32),)
    plain = run_step(model, batch)
    ops, n_packed = model.ops, model.n_packed
    plan = solve(profile(model, batch, loss=mean_square), 2**60)
    gelus = [j for j, name in enumerate(plan.op_names) if "gelu" in name]
    decisions = [j not in gelus[:2] for j in range(len(plan.keep))]
    lowtide.fit(model, plan=replace(plan, keep=tuple(decisions)), budget=2**40)
    for _ in range(4):
        assert_equal(plain, run_step(model, batch))
        assert model.ops["aten.addmm.default"] == ops["aten.addmm.default"]
        assert model.n_packed == n_packed
    assert lowtide.report(model).online_steps == 0
    lowtide.unfit(model)


def test_a_new_loss_module_in_every_step() -> None:
    model, batch = net()
    loss = lambda m, b: nn.MSELoss()(m(*b), torch.zeros(4, 4))
    plain = run_step(model, batch, loss=loss)
    plan = plan_at(0.75, model, batch, loss=lambda out: nn.MSELoss()(out, torch.zeros(4, 4)))
    lowtide.fit(model, plan=plan, budget=2**40)
    for _ in range(5):
        assert_equal(plain, run_step(model, batch, loss=loss))
    assert lowtide.report(model).online_steps == 0
    lowtide.unfit(model)
