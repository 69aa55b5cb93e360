"""A recorder that sleeps where its plan wants nothing: exact, also where a step is not the one that was learnt."""

from __future__ import annotations

import contextlib
import copy
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
from lowtide._errors import StaleSourceError
from lowtide._plan import profile
from lowtide.codecs._contract import PIECE
from lowtide.engine.attention import Attention, Learner, Lesson
from lowtide.engine.budgeting import WithinBudget
from lowtide.engine.planned import PlannedRecorder
from lowtide.engine.room import Room
from lowtide.engine.tape import Tape
from lowtide.engine.torch_private import innermost_mode, saving_hooks
from lowtide.fitting import registry
from lowtide.fitting.steps import StepScope
from lowtide.planning import Packing, Plan, solve
from lowtide.planning.turns import Turn

from .programs import Instruction, instructions, programs
from .steps import assert_equal, run_step
from .test_fuzz import EXAMPLES, assert_same, run

modes = st.sampled_from(["after", "twice", "double"])
lengths = st.sampled_from([3, 6])  # of layers, in instructions: in long ones a recorder can wake late
REFUSALS = (RuntimeError, IndexError, TypeError, ValueError, AttributeError)
FUZZ = settings(
    max_examples=EXAMPLES // 4,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize="LOWTIDE_FUZZ_EXAMPLES" not in os.environ,
    print_blob=True,
)


# What was written in place, and copied because it was about to be written again, is not watched any more.
COPIED_BEFORE_IT_SLEPT = [
    *[Instruction("unary", "sin", 0, 0)] * 3,
    Instruction("special", "lowtide_checkpoint", 0, 0),
    *[Instruction("inplace", "silu_", 1, 0)] * 2,
    *[Instruction("unary", "sin", 0, 0)] * 2,
]


# A formula that a mode would change, with values saved while the recorder slept, in a step that left its plan.
SENSITIVE_AND_UNSEEN = [
    *[Instruction("unary", "sin", 0, 0)] * 5,
    Instruction("unary", "complex", 0, 0),
    Instruction("reduce", "prod", 0, 0),
    *[Instruction("unary", "sin", 0, 0)] * 2,
]


# The same in a backward pass that makes a graph.
SENSITIVE_TWICE = [
    *[Instruction("unary", "sin", 0, 0)] * 3,
    Instruction("reduce", "prod", 0, 0),
    Instruction("unary", "sin", 0, 0),
]


MASKS = tuple(
    Packing("mask", dtype, True, size, 1, 0, 12, PIECE, 0.0, 0.0, 0.0, 0.0, least_bytes=0, binary=dtype != "bool")
    for dtype, size in (("bool", 1), ("float32", 4), ("float64", 8))
)


class Naming(PlannedRecorder):  # type: ignore[no-untyped-call]
    """Notes the names of the ops that a recorder numbers."""

    def _made(self, facts: Any, *made: Any) -> Any:
        self.names[self.tape.ops] = facts.name
        return super()._made(facts, *made)


def names_of(program: list[Instruction], mode: str, length: int) -> list[str]:
    recorder = planned(plan_of([], 0, 0), kind=Naming)
    recorder.names = {}
    run(program, StepScope(recorder), mode, length)
    return [recorder.names[j] for j in range(recorder.tape.ops)]


def plan_of(names: list[str], salt: int, share: int) -> Plan:
    """A plan that keeps about that share of the ops, in per cent, and a third of them packed where that can be.

    Every third plan ends before the step does. Every other plan makes some ops again more than once, some of them for a
    part of backward only.
    """
    if salt % 3 == 0:
        names = names[: len(names) * 3 // 4]
    keep = tuple(hash((salt, j)) % 100 < share for j in range(len(names)))
    packed = tuple(j for j, kept in enumerate(keep) if kept and hash((salt, j, 1)) % 3 == 0)
    recomputed = [j for j, kept in enumerate(keep) if not kept] if salt % 2 else []
    again = tuple(j for j in recomputed if hash((salt, j, 2)) % 3 == 0)
    turns = tuple(
        Turn(j, recomputed[hash((salt, j, time)) % len(recomputed)], time)
        for j in recomputed
        for time in range(3)
        if hash((salt, j, time, 3)) % 3 == 0
    )
    return Plan(
        keep=keep, again=again, turns=turns, offload=packed, written_by=tuple(j + 1 for j in packed), compress=packed,
        packings=MASKS, budget_bytes=2**60, predicted_peak_bytes=0, plain_peak_bytes=0, peak_at="",
        predicted_step_s=1.0, plain_step_s=1.0, bound_step_s=1.0, solver="none", solve_s=0.0, replayed_ops=0,
        pinned=(), kinds=(), fingerprint="", op_names=tuple(names),
    )  # fmt: skip


def planned(plan: Plan, lesson: Lesson | None = None, kind: Any = PlannedRecorder) -> Any:
    """A recorder that sees the whole step, or, with a lesson, only what it needs."""
    policy, tape = WithinBudget(2**60), Tape("a plan")
    where = Learner(policy, tape) if lesson is None else Attention(policy, tape, lesson)
    return kind(plan, tape, where, Room(2**60, None, None), None)


@FUZZ
@pytest.mark.filterwarnings("ignore::lowtide.LowtideWarning")
@given(programs, modes, lengths, st.integers(0, 1000), st.sampled_from([50, 80, 95]))
@example(COPIED_BEFORE_IT_SLEPT, "after", 3, 3, 50)
@example([Instruction("unary", "rrelu", 0, 0)], "after", 3, 0, 50)  # memory that is saved before it is written
def test_random_programs_are_exact_asleep(
    program: list[Instruction], mode: str, length: int, salt: int, share: int
) -> None:
    try:
        plain = run(program, contextlib.nullcontext(), mode, length)
    except REFUSALS:
        return
    plan = plan_of(names_of(program, mode, length), salt, share)
    whole = planned(plan)
    seen = run(program, StepScope(whole), mode, length)
    lesson = whole.learnt()
    assert lesson is not None
    sleeping = planned(plan, lesson)
    asleep = run(program, StepScope(sleeping), mode, length)
    for what in plain:
        assert_same(plain[what], seen[what], what)
        assert_same(plain[what], asleep[what], what)
    assert innermost_mode() is None
    assert saving_hooks() is None


@FUZZ
@pytest.mark.filterwarnings("ignore::lowtide.LowtideWarning")
@given(
    programs.filter(lambda program: len(program) > 3),
    modes,
    lengths,
    st.integers(0, 1000),
    st.sampled_from([50, 80, 95]),
    st.lists(st.tuples(st.integers(1, 23), instructions), min_size=1, max_size=3),
)
@example(SENSITIVE_TWICE, "double", 3, 220, 50, [(4, Instruction("unary", "exp", 0, 0))])
@example(SENSITIVE_AND_UNSEEN, "after", 3, 0, 50, [(7, Instruction("unary", "exp", 0, 0))])
def test_another_program_than_the_one_learnt(
    program: list[Instruction], mode: str, length: int, salt: int, share: int, changes: list[tuple[int, Instruction]]
) -> None:
    """Also where what differs happens while the recorder sleeps."""
    other = list(program)
    for at, instruction in changes:
        other[at % len(other)] = instruction
    try:
        run(program, contextlib.nullcontext(), mode, length)
        plain = run(other, contextlib.nullcontext(), mode, length)
    except REFUSALS:
        return
    plan = plan_of(names_of(program, mode, length), salt, share)
    whole = planned(plan)
    run(program, StepScope(whole), mode, length)
    lesson = whole.learnt()
    assert lesson is not None
    try:
        ours = run(other, StepScope(planned(plan, lesson)), mode, length)
    except StaleSourceError:
        ours = None  # what a recipe reads was overwritten unseen: found out, and said
    assert innermost_mode() is None
    assert saving_hooks() is None
    if ours is not None:
        for what in plain:
            assert_same(plain[what], ours[what], what)


def test_the_programs_sleep_and_replay() -> None:
    """The fuzz would prove nothing if nothing were seen, or everything."""
    counts: Counter[str] = Counter()

    @settings(max_examples=150, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(programs, lengths, st.integers(0, 1000))
    def drive(program: list[Instruction], length: int, salt: int) -> None:
        with contextlib.suppress(*REFUSALS):
            plan = plan_of(names_of(program, "after", length), salt, 80)
            whole = planned(plan)
            run(program, StepScope(whole), "after", length)
            lesson = whole.learnt()
            assert lesson is not None
            sleeping = planned(plan, lesson)
            run(program, StepScope(sleeping), "after", length)
            counts["programs"] += 1
            counts["replays"] += sleeping.tape.replayed_ops > 0
            counts["sleeps"] += any(not stretch.records for stretch in lesson.stretches[1:])
            counts["wakes twice"] += any(len(stretch.spells) > 1 for stretch in lesson.stretches)
            counts["sleeps early"] += any(s.spells and s.spells[-1].last_op is not None for s in lesson.stretches)
            counts["lost"] += sleeping.differs_at is not None
            turning = sleeping.tape.turning
            counts["turns"] += turning is not None and turning.again != set(plan.again)

    drive()
    assert counts["programs"] > 40
    assert counts["replays"] > counts["programs"] // 3
    assert counts["sleeps"] > counts["programs"] // 3
    assert counts["turns"] > counts["programs"] // 16
    assert counts["sleeps early"] > counts["programs"] // 3
    assert counts["wakes twice"] > 0
    assert counts["lost"] <= counts["programs"] // 10


# -- models -------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """What convolutional nets do to memory: in place, and then some."""

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
    """A plan for this share of what plain steps have on top of what is there before."""
    trace = profile(model, batch, loss=loss)
    beside, peak = trace.ops[0].other_bytes, solve(trace, 2**60).predicted_peak_bytes
    plan = solve(trace, beside + int(share * (peak - beside)))
    assert plan.recomputed
    return plan


def fitted(share: float) -> tuple[Net, tuple[torch.Tensor], Any]:
    """A net whose steps are planned, and learnt."""
    model, batch = net()
    plain = run_step(model, batch)
    lowtide.fit(model, plan=plan_at(share, model, batch), budget=2**40)
    for _ in range(2):
        assert_equal(plain, run_step(model, batch))
    kind = next(iter(registry.state_of(model).kinds.values()))
    assert kind.learnt is not None
    assert any(not stretch.records for stretch in kind.learnt[1].stretches)
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


def test_a_step_that_is_not_the_one_learnt() -> None:
    model, batch = net()
    model.surprise = "skip"
    expected = run_step(model, batch)
    model, batch, plain = fitted(0.75)
    assert not torch.equal(plain.loss, expected.loss)
    assert_equal(plain, run_step(model, batch))
    model.surprise = "skip"
    assert_equal(expected, run_step(model, batch))
    model.surprise = ""
    for _ in range(2):  # seen whole, as it may have been a mistake; the plan is still good
        assert_equal(plain, run_step(model, batch))
    assert lowtide.report(model).online_steps == 1
    lowtide.unfit(model)


class Drawing(nn.Module):
    """Products, until one of them is a dropout instead."""

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
def test_a_step_that_leaves_its_plan_by_drawing_where_something_was_kept(steps_before: int) -> None:
    """That op ran as one to be kept, without a note of the generator's state, so that it cannot be made again."""
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


class Hand(nn.Module):
    """Leaves what it is handed alone, until it does not."""

    writes = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2) if self.writes else x


def test_memory_that_is_overwritten_unseen() -> None:
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(8, 8), Sine(), Hand(), nn.Linear(8, 8)), (torch.randn(4, 8),)
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


class Observer(nn.Module):
    """Sees whether a recorder is watching."""

    watched = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.watched = isinstance(innermost_mode(), PlannedRecorder)
        return x


def test_a_mask_that_is_packed_lets_the_recorder_sleep() -> None:
    """What was written, then packed and freed can be written by nobody: its version need not be known."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), Observer(), nn.Linear(64, 64))
    batch = (torch.randn(256, 64),)
    plain = run_step(model, batch)
    plan = solve(profile(model, batch, loss=mean_square), 2**60)
    masks = tuple(j for j, name in enumerate(plan.op_names) if "div_" in name)
    assert len(masks) == 1
    packed = replace(plan, offload=masks, written_by=(masks[0] + 1,), compress=masks, packings=MASKS)
    lowtide.fit(model, plan=packed, budget=2**40)
    for _ in range(2):
        assert_equal(plain, run_step(model, batch))
        assert model[2].watched
    for _ in range(2):
        assert_equal(plain, run_step(model, batch))
        assert not model[2].watched
        assert lowtide.report().values_compressed == 1
    lowtide.unfit(model)


HALVES = (Packing("bf16", "float32", False, 4, 16, 0, 0, PIECE, 0.0, 0.0, 0.0, 0.0),)


@pytest.mark.parametrize(
    ("packings", "wanted"),
    [
        (MASKS, ()),  # it is known by when it is saved
        (HALVES, (0,)),  # what gives other bits must be what it was meant for; who made its memory does not matter
        ((), (-2, -1, 0)),  # of what is drawn again each write does
    ],
)
def test_what_of_a_mask_is_noted(packings: tuple[Packing, ...], wanted: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 64))
    batch = (torch.randn(256, 64),)
    plain = run_step(model, batch)
    trace = profile(model, batch, loss=mean_square)
    plan = solve(trace, 2**60)
    (mask,) = (j for j, name in enumerate(plan.op_names) if "div_" in name)
    if packings:
        plan = replace(plan, offload=(mask,), written_by=(mask + 1,), compress=(mask,), packings=packings)
    else:
        plan = replace(plan, keep=tuple(op.module != "1" or op.pinned is not None for op in trace.ops))
    lowtide.fit(model, plan=plan, budget=2**40, codecs=("mask", "bf16"))
    for _ in range(4):
        assert_equal(plain, run_step(model, batch))  # 0 and 2 are the same in bf16
        assert lowtide.report().values_compressed == bool(packings)
    (kind,) = registry.state_of(model).kinds.values()
    assert kind.learnt is not None
    assert kind.learnt[1].noted & {mask - 2, mask - 1, mask} == {mask + before for before in wanted}
    lowtide.unfit(model)


class Gated(nn.Module):
    """Multiplies with a mask, and first with something made from it if that is asked for."""

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
def test_what_is_packed_before_it_is_saved_is_noted(early: bool) -> None:
    """A recipe that reads it must know it, or it would hold its memory."""
    torch.manual_seed(0)
    model, batch = Gated(early), (torch.randn(256, 64),)
    plain = run_step(model, batch)
    plan = solve(profile(model, batch, loss=mean_square), 2**60)
    mask = plan.op_names.index("aten._to_copy.default")
    keep = tuple(name != "aten.add.Tensor" for name in plan.op_names)
    assert keep.count(False) == early
    plan = replace(plan, keep=keep, offload=(mask,), written_by=(mask + 1,), compress=(mask,), packings=MASKS)
    lowtide.fit(model, plan=plan, budget=2**40)
    for _ in range(4):
        assert_equal(plain, run_step(model, batch))
        report = lowtide.report()
        assert (report.values_compressed, report.values_recomputed) == (1, early)
    (kind,) = registry.state_of(model).kinds.values()
    assert kind.learnt is not None
    assert (mask in kind.learnt[1].noted) == early
    lowtide.unfit(model)


@pytest.mark.parametrize("binary", [True, False])
def test_another_value_where_one_to_be_packed_is_expected(binary: bool) -> None:
    """It is packed instead if it can be, and kept if not: as exact, either way."""
    torch.manual_seed(0)
    model, batch = Gated(early=False), (torch.randn(256, 64),)
    plan = solve(profile(model, batch, loss=mean_square), 2**60)
    mask = plan.op_names.index("aten._to_copy.default")
    plan = replace(plan, offload=(mask,), written_by=(mask + 1,), compress=(mask,), packings=MASKS)
    lowtide.fit(model, plan=plan, budget=2**40)
    for _ in range(3):
        run_step(model, batch)
    model.other = torch.randn(256, 64)
    if binary:
        model.other = (model.other > 0).float()
    ours = run_step(model, batch)
    assert lowtide.report().values_compressed == binary
    lowtide.unfit(model)
    assert_equal(run_step(model, batch), ours)


def test_a_mask_that_is_drawn_again_lets_the_recorder_sleep() -> None:
    """What was written and is freed can be written by nobody: its version need not be known."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), Observer(), nn.Linear(64, 64))
    batch = (torch.randn(256, 64),)
    plain = run_step(model, batch)
    trace = profile(model, batch, loss=mean_square)
    keep = tuple(op.module != "1" or op.pinned is not None for op in trace.ops)
    assert [op.name for op, kept in zip(trace.ops, keep, strict=True) if not kept and "div_" in op.name]
    lowtide.fit(model, plan=replace(solve(trace, 2**60), keep=keep), budget=2**40, codecs=None)
    for _ in range(4):
        assert_equal(plain, run_step(model, batch))
        assert lowtide.report().replayed_ops
    assert not model[2].watched
    lowtide.unfit(model)


class Watchful(nn.Module):
    """Notes now and then whether a recorder is watching it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.surprise = ""
        self.watched: list[bool] = []

    def _look_around(self) -> None:
        self.watched.append(isinstance(innermost_mode(), PlannedRecorder))


class Attending(Watchful):
    """All in one call: ops of which a plan wants nothing, a softmax, and then its dropout."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.watched.clear()
        y = self.inner(x)
        self._look_around()
        with torch.set_grad_enabled(self.surprise != "fewer are saved"):
            scores = (y @ y.transpose(1, 2)) * 0.1
        if self.surprise == "more are saved":
            scores = scores.exp().tanh()
        weights = scores.softmax(-1)
        if self.surprise == "others are saved":
            weights = weights.sigmoid() * 2
        self._look_around()
        out: torch.Tensor = nn.functional.dropout(weights, 0.3) @ y
        return out


def attending() -> tuple[Attending, tuple[torch.Tensor]]:
    torch.manual_seed(0)
    return Attending(), (torch.randn(4, 48, 16),)


@pytest.mark.parametrize("way", ["packed", "recomputed"])
@pytest.mark.parametrize("surprise", ["", "fewer are saved", "more are saved", "others are saved"])
def test_the_recorder_wakes_in_the_middle_of_a_call(way: str, surprise: str) -> None:
    model, batch = attending()
    model.surprise = surprise
    surprised = run_step(model, batch)
    model, batch = attending()
    plain = run_step(model, batch)
    plan = solve(profile(model, batch, loss=mean_square), 2**60)
    masks = tuple(j for j, name in enumerate(plan.op_names) if "div_" in name)
    assert len(masks) == 1
    if way == "packed":
        plan = replace(plan, offload=masks, written_by=(masks[0] + 1,), compress=masks, packings=MASKS)
    else:
        first = next(j for j, name in enumerate(plan.op_names) if "bernoulli" in name) - 1
        plan = replace(plan, keep=tuple(not first <= j <= masks[0] for j in range(len(plan.keep))))
    lowtide.fit(model, plan=plan, budget=2**40)
    for _ in range(2):
        assert_equal(plain, run_step(model, batch))
        assert model.watched == [True, True]
    for _ in range(2):
        assert_equal(plain, run_step(model, batch))
        assert model.watched == [False, way == "recomputed"]
        report = lowtide.report()
        assert (report.values_compressed, report.replayed_ops) == (
            (1, 0) if way == "packed" else (0, 2)
        )  # what is drawn needs no memory from before
    model.surprise = surprise
    assert_equal(surprised, run_step(model, batch))
    assert innermost_mode() is None
    model.surprise = ""
    assert_equal(plain, run_step(model, batch))
    assert lowtide.report(model).online_steps == (surprise != "")
    lowtide.unfit(model)


class Dozing(Watchful):
    """All in one call: something to be made again, a while without, more of it after a tanh, a while without."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.watched.clear()
        y = self.inner(x)
        first = y.sin()
        self._look_around()
        if self.surprise == "written while it sleeps":
            first.mul_(2)
        z = y.view(-1, 16) + 1
        if self.surprise == "more are saved":
            z = z.exp()
        if self.surprise == "never wakes":
            return first.square()
        z = z.tanh()
        self._look_around()
        last = z.cos() * first.square()
        self._look_around()
        if self.surprise == "error":
            raise ValueError("surprise")
        out: torch.Tensor = last.view(-1) + 1
        return out if self.surprise != "more at the end" else out.exp()


@pytest.mark.parametrize(
    "surprise", ["", "written while it sleeps", "more are saved", "never wakes", "more at the end", "error"]
)
def test_the_recorder_sleeps_again_in_the_middle_of_a_call(surprise: str) -> None:
    def dozing() -> tuple[Dozing, tuple[torch.Tensor]]:
        torch.manual_seed(0)
        return Dozing(), (torch.randn(48, 16),)

    model, batch = dozing()
    plain = run_step(model, batch)
    model.surprise = surprise
    surprised = None
    with contextlib.suppress(ValueError):
        surprised = run_step(model, batch)
    model, batch = dozing()
    plan = solve(profile(model, batch, loss=mean_square), 2**60)
    again = [j for j, name in enumerate(plan.op_names) if name in ("aten.sin.default", "aten.cos.default")]
    assert len(again) == 2
    plan = replace(plan, keep=tuple(j not in again for j in range(len(plan.keep))))
    lowtide.fit(model, plan=plan, budget=2**40)
    for _ in range(2):
        assert_equal(plain, run_step(model, batch))
        assert model.watched == [True, True, True]
    for _ in range(2):
        assert_equal(plain, run_step(model, batch))
        assert model.watched == [False, True, False]
        assert lowtide.report().replayed_ops == 2
    model.surprise = surprise
    if surprise == "error":
        with pytest.raises(ValueError, match="surprise"):
            model(*batch)
    elif surprised is not None:
        assert_equal(surprised, run_step(model, batch))
    assert innermost_mode() is None
    assert saving_hooks() is None
    model.surprise = ""
    assert_equal(plain, run_step(model, batch))
    lowtide.unfit(model)


class Sharing(nn.Module):
    """Weights that are divided by their sum in place, as routers do: autograd copies them first, and saves that."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = (self.inner(x).tanh() + 2).sin()
        scale = weights.tanh().cos().sum(-1, keepdim=True)
        weights /= scale
        return weights.square()


def test_what_is_saved_for_an_op_that_has_begun_does_not_wake_the_recorder() -> None:
    """It would not see that op."""
    torch.manual_seed(0)
    model, batch = Sharing(), (torch.randn(48, 16),)
    plain = run_step(model, batch)
    plan = solve(profile(model, batch, loss=mean_square), 2**60)
    again = [j for j, name in enumerate(plan.op_names) if name in ("aten.sin.default", "aten.div_.Tensor")]
    assert len(again) == 2
    lowtide.fit(model, plan=replace(plan, keep=tuple(j not in again for j in range(len(plan.keep)))), budget=2**40)
    for _ in range(5):
        assert_equal(plain, run_step(model, batch))
        assert lowtide.report().replayed_ops == 2
    assert lowtide.report(model).online_steps == 0
    (kind,) = registry.state_of(model).kinds.values()
    assert kind.learnt is not None
    waits = [spell.wait for stretch in kind.learnt[1].stretches for spell in stretch.spells]
    assert waits
    assert again[1] not in [wait.next_op for wait in waits if wait is not None]
    lowtide.unfit(model)


class Loss(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin().square().mean()


def test_ops_after_all_that_is_planned() -> None:
    """A plan that ends in a module that has to be seen."""
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


def test_an_error_in_forward_leaves_nothing_behind() -> None:
    model, batch, plain = fitted(0.75)
    state = copy.deepcopy(model.state_dict())
    model.surprise = "error"
    with pytest.raises(ValueError, match="surprise"):
        model(*batch)
    assert innermost_mode() is None
    assert saving_hooks() is None
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
    """A model that looks at its own ops, and keeps what it saves for itself."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.ops: Counter[str] = Counter()
        self.packed = 0

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.packed += 1
        return tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.packed = 0
        x = x * 2
        with Counting() as mode, torch.autograd.graph.saved_tensors_hooks(self._pack, lambda t: t):
            x = self.inner(x)
        self.ops = mode.ops
        return x.sin()


def test_modes_and_hooks_of_the_model_itself() -> None:
    torch.manual_seed(0)
    model, batch = Watched(nn.Sequential(*[nn.Linear(32, 32), nn.GELU()] * 4)), (torch.randn(64, 32),)
    plain = run_step(model, batch)
    ops, packed = model.ops, model.packed
    plan = solve(profile(model, batch, loss=mean_square), 2**60)
    gelus = [j for j, name in enumerate(plan.op_names) if "gelu" in name]
    decisions = [j not in gelus[:2] for j in range(len(plan.keep))]
    lowtide.fit(model, plan=replace(plan, keep=tuple(decisions)), budget=2**40)
    for _ in range(4):
        assert_equal(plain, run_step(model, batch))
        assert model.ops["aten.addmm.default"] == ops["aten.addmm.default"]
        assert model.packed == packed
    assert lowtide.report(model).online_steps == 0
    lowtide.unfit(model)


def test_a_loss_module_made_anew_for_every_step() -> None:
    model, batch = net()
    loss = lambda m, b: nn.MSELoss()(m(*b), torch.zeros(4, 4))
    plain = run_step(model, batch, loss=loss)
    plan = plan_at(0.75, model, batch, loss=lambda out: nn.MSELoss()(out, torch.zeros(4, 4)))
    lowtide.fit(model, plan=plan, budget=2**40)
    for _ in range(5):
        assert_equal(plain, run_step(model, batch, loss=loss))
    assert lowtide.report(model).online_steps == 0
    lowtide.unfit(model)
