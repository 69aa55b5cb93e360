"""Random tensor programs for the fuzz test: a strategy that draws them and an interpreter that runs them.

A program is a list of instructions over a growing list of live tensors. The argument of an instruction is a number,
reduced modulo the number of suitable tensors, so every drawn program is valid and shrinks well. The same seed gives the
same run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import lowtide

ROWS, COLS = 32, 48  # one tensor is larger than a generator state, so that random ops are replayed
Tensor = torch.Tensor


@dataclass
class Machine:
    """The live tensors of one run, and memory outside all graphs."""

    live: list[Tensor]
    leaves: list[Tensor]
    buffer: Tensor
    running: tuple[Tensor, Tensor]
    outside: Tensor
    counted: list[str] = field(default_factory=list)

    @classmethod
    def fresh(cls) -> Machine:
        g = torch.Generator().manual_seed(7)
        make = lambda *s: torch.randn(*s, generator=g)
        leaves = [
            make(ROWS, COLS).requires_grad_(),
            make(ROWS, COLS).requires_grad_(),
            make(COLS, COLS).mul_(0.1).requires_grad_(),
        ]
        frozen = make(ROWS, COLS)
        return cls(
            [*leaves[:2], frozen], leaves, make(ROWS, COLS), (torch.zeros(COLS), torch.ones(COLS)), make(ROWS, COLS)
        )

    def pick(self, k: int, fits: Callable[[Tensor], bool] = lambda t: True) -> Tensor | None:
        candidates = [t for t in self.live if fits(t)]
        return candidates[k % len(candidates)] if candidates else None


def is_float(t: Tensor) -> bool:
    return t.dtype in (torch.float32, torch.float64, torch.bfloat16)


def is_matrix(t: Tensor) -> bool:
    return is_float(t) and t.dim() == 2


class Cube(torch.autograd.Function):
    """A well-behaved custom function that saves its input and its output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x * x * x
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        x, _ = ctx.saved_tensors
        return g * 3 * x * x


class Sneaky(torch.autograd.Function):
    """Keeps state on ctx, which saved-tensor hooks do not receive."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mask = x > 0
        ctx.kept = torch.tanh(x)
        return ctx.kept * ctx.mask

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * (1 - ctx.kept**2) * ctx.mask


UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "sin": torch.sin,
    "exp": lambda t: torch.exp(t.clamp(-2, 2)),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "abs": torch.abs,
    "square": torch.square,
    "neg": torch.neg,
    "sqrt": lambda t: (t.abs() + 1).sqrt(),
    "log": lambda t: (t.abs() + 1).log(),
    "softplus": F.softplus,
    "leaky": F.leaky_relu,
    "hardswish": F.hardswish,
    "clone": torch.clone,
    "contiguous": lambda t: t.contiguous(),
    "softmax": lambda t: t.softmax(-1),
    "log_softmax": lambda t: t.log_softmax(0),
    "cumsum": lambda t: t.cumsum(0),
    "layer_norm": lambda t: F.layer_norm(t, t.shape[-1:]),
    "normalize": lambda t: F.normalize(t, dim=-1),
    "sort": lambda t: t.sort(-1).values,
    "flip": lambda t: t.flip(0),
    "roll": lambda t: t.roll(3, -1),
    "tril": lambda t: t.tril(),
    "scale": lambda t: t * 0.5 + 1,
    "pow": lambda t: t.clamp(-2, 2) ** 3,
    "to_double_and_back": lambda t: t.double().sin().to(t.dtype),
    "bf16": lambda t: t.bfloat16().float(),
    "cube_fn": Cube.apply,
    "sneaky_fn": Sneaky.apply,
    "detach": lambda t: t.detach(),
    "data": lambda t: t.data.clone(),
    "dropout": lambda t: F.dropout(t, 0.3, True),
    "alpha_dropout": lambda t: F.alpha_dropout(t, 0.2, True),
    "rrelu": lambda t: F.rrelu(t, training=True),
    "noise": lambda t: t + torch.rand_like(t),
    "bernoulli": lambda t: t * torch.bernoulli(torch.full_like(t, 0.5)),
    "randn": lambda t: t * torch.randn(t.shape),
    "complex": lambda t: torch.view_as_real(torch.complex(t, t * 2).conj() * 1j).sum(-1),
    "imag": lambda t: torch.complex(t, t.sin()).conj().imag * 2,
    "angle": lambda t: torch.complex(t, t + 1).abs(),
}

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transpose": lambda t: t.transpose(0, -1),
    "first_half": lambda t: t[: max(1, t.shape[0] // 2)],
    "every_other": lambda t: t[..., ::2],
    "flatten": lambda t: t.reshape(-1),
    "unsqueeze": lambda t: t.unsqueeze(0),
    "squeeze": lambda t: t.squeeze(),
    "chunk": lambda t: t.chunk(2, -1)[0],
    "unbind": lambda t: t.unbind(0)[-1],
    "diagonal": lambda t: t.diagonal() if t.dim() >= 2 else t,
    "narrow": lambda t: t.narrow(-1, 0, max(1, t.shape[-1] - 1)),
    "expand": lambda t: t.unsqueeze(0).expand(2, *t.shape),
    "view_as": lambda t: t.view_as(t),
    "movedim": lambda t: t.movedim(0, -1),
    "as_strided": lambda t: t.contiguous().as_strided((2,), (1,)) if t.numel() > 2 else t,
}

REDUCE: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda t: t.sum(-1),
    "mean": lambda t: t.mean(0),
    "max": lambda t: t.max(-1).values,
    "amax": lambda t: t.amax(0),
    "var": lambda t: t.var(-1, unbiased=False),
    "norm": lambda t: t.norm(dim=-1),
    "logsumexp": lambda t: t.logsumexp(-1),
    "prod": lambda t: t.clamp(-1.1, 1.1)[..., :3].prod(-1),
    "topk": lambda t: t.topk(1, -1).values,
    "median": lambda t: t.median(-1).values,
}

BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": lambda a, b: a / (b.abs() + 1),
    "maximum": torch.maximum,
    "where": lambda a, b: torch.where(a > 0, a, b),
    "lerp": lambda a, b: torch.lerp(a, b, 0.3),
    "atan2": lambda a, b: torch.atan2(a, b + 3),
    "cat": lambda a, b: torch.cat([a, b], -1),
    "stack": lambda a, b: torch.stack([a, b]).sum(0),
    "addcmul": lambda a, b: torch.addcmul(a, a, b),
    "hypot": lambda a, b: torch.hypot(a + 5, b),
    "outer_sum": lambda a, b: a + b.mean(),
    "kl": lambda a, b: F.mse_loss(a, b, reduction="none"),
}

INPLACE: dict[str, Callable[[Tensor], Any]] = {
    "relu_": lambda t: t.relu_(),
    "mul_": lambda t: t.mul_(0.7),
    "alias_add_": lambda t: t.add_(t.view_as(t)),
    "alias_mul_": lambda t: t[:1].mul_(t.detach()[:1]),
    "add_": lambda t: t.add_(1.0),
    "sigmoid_": lambda t: t.sigmoid_(),
    "tanh_": lambda t: t.tanh_(),
    "zero_row": lambda t: t[0].zero_(),
    "fill_part": lambda t: t[..., :1].fill_(0.5),
    "clamp_": lambda t: t.clamp_(-1, 1),
    "masked_fill_": lambda t: t.masked_fill_(t > 1, 0.25),
    "set_masked": lambda t: t.__setitem__(t < -1, -0.5),
    "neg_": lambda t: t.neg_(),
    "square_half": lambda t: t[: max(1, t.shape[0] // 2)].square_(),
    "exp_": lambda t: t.clamp_(-1, 1).exp_(),
    "dropout_": lambda t: F.dropout(t, 0.2, True, inplace=True),
    "bernoulli_": lambda t: t.bernoulli_(0.4),
    "normal_": lambda t: t.normal_(),
    "zero_": lambda t: t.zero_(),
    "cumsum_": lambda t: t.cumsum_(0),
    "t_": lambda t: t.transpose_(0, -1),
    "self_add_": lambda t: t.add_(t),
    "shift_": lambda t: t[1:].copy_(t[:-1].clone()) if t.shape[0] > 1 else None,
    "index_fill_": lambda t: t.index_fill_(0, torch.tensor([0]), 0.1),
    "leaky_": lambda t: F.leaky_relu_(t, 0.1),
    "silu_": lambda t: F.silu(t, inplace=True),
}

INPLACE_BINARY: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "iadd": lambda a, b: a.add_(b),
    "imul": lambda a, b: a.mul_(b),
    "copy_": lambda a, b: a.copy_(b),
    "copy_part": lambda a, b: a[0].copy_(b[0]),
    "lerp_": lambda a, b: a.lerp_(b, 0.5),
    "addcmul_": lambda a, b: a.addcmul_(b, b),
    "out": lambda a, b: torch.mul(b.detach(), 2, out=a) if not a.requires_grad else None,
    "foreach": lambda a, b: torch._foreach_add_([a, a.detach().clone()], 1.0),
    "foreach_mul": lambda a, b: torch._foreach_mul_([a, a.detach().clone()], 1.5),
}


def special_matmul(m: Machine, a: int, b: int) -> Tensor | None:
    x = m.pick(a, lambda t: is_matrix(t) and t.shape[-1] == COLS and t.dtype == torch.float32)
    return None if x is None else x @ m.leaves[2]


def special_linear(m: Machine, a: int, b: int) -> Tensor | None:
    x = m.pick(a, lambda t: is_float(t) and t.dim() >= 1 and t.shape[-1] == COLS and t.dtype == torch.float32)
    return None if x is None else F.linear(x, m.leaves[2], m.leaves[2][0])


def special_batch_norm(m: Machine, a: int, b: int) -> Tensor | None:
    x = m.pick(a, lambda t: is_matrix(t) and t.shape[-1] == COLS and t.shape[0] > 1 and t.dtype == torch.float32)
    return None if x is None else F.batch_norm(x, *m.running, training=b % 3 != 0, momentum=0.2)


def special_buffer_read(m: Machine, a: int, b: int) -> Tensor | None:
    x = m.pick(a, lambda t: is_float(t) and t.shape == m.buffer.shape)
    return None if x is None else x * m.buffer


def special_buffer_write(m: Machine, a: int, b: int) -> Tensor | None:
    with torch.no_grad():
        if b % 2:
            m.buffer.mul_(0.9).add_(0.1)
        else:
            m.buffer[b % ROWS].zero_()
    return None


def special_buffer_swap(m: Machine, a: int, b: int) -> Tensor | None:
    m.buffer = m.buffer * 2
    return None


def special_data_write(m: Machine, a: int, b: int) -> Tensor | None:
    """Write without a change of the version counter, only to memory from outside.

    For a value that autograd saved, plain PyTorch would use the overwritten content, and a recompute the original.
    """
    m.outside.data.mul_(1.5)
    return None


def special_outside_read(m: Machine, a: int, b: int) -> Tensor | None:
    x = m.pick(a, lambda t: is_float(t) and t.shape == m.outside.shape)
    return None if x is None else (x + m.outside).sin() * m.outside


def special_embedding(m: Machine, a: int, b: int) -> Tensor | None:
    return F.embedding((torch.arange(ROWS) * (a + 1)) % COLS, m.leaves[2], padding_idx=b % COLS)


def special_gather(m: Machine, a: int, b: int) -> Tensor | None:
    x = m.pick(a, is_matrix)
    return None if x is None else x.gather(-1, (torch.arange(x.shape[-1]).expand(x.shape) * (b + 1)) % x.shape[-1])


def special_scatter(m: Machine, a: int, b: int) -> Tensor | None:
    x = m.pick(a, is_matrix)
    if x is None:
        return None
    index = (torch.arange(x.shape[0]) * (b + 1)) % x.shape[0]
    return torch.zeros_like(x).index_add(0, index, x)


def special_index_put(m: Machine, a: int, b: int) -> Tensor | None:
    x = m.pick(a, is_matrix)
    if x is None:
        return None
    y = torch.empty_like(x)
    y[:] = 0.0
    y[x > 0] = x[x > 0]
    return y


def special_empty_filled(m: Machine, a: int, b: int) -> Tensor | None:
    x = m.pick(a, is_float)
    if x is None:
        return None
    y = torch.empty_like(x)
    if b % 2:
        y.copy_(x)
    else:
        y.fill_(0.3)
        y = y * x
    return y


def special_empty_by_rows(m: Machine, a: int, b: int) -> Tensor | None:
    x = m.pick(a, is_matrix)
    if x is None:
        return None
    y = torch.empty(x.shape, dtype=x.dtype)
    for i in range(x.shape[0]):
        y[i] = x[i] * (i % 3)
    return y


def special_no_grad(m: Machine, a: int, b: int) -> Tensor | None:
    x = m.pick(a, is_float)
    if x is None:
        return None
    with torch.no_grad():
        mask = (x.sin() > 0).to(x.dtype)
        mask += 0.5
    return x * mask


def special_split(m: Machine, a: int, b: int) -> Tensor | None:
    x = m.pick(a, lambda t: is_float(t) and t.dim() >= 1 and t.shape[-1] >= 2)
    if x is None:
        return None
    left, *rest = x.split([1, x.shape[-1] - 1], -1)
    return left.sigmoid() * rest[0]


def special_loop(m: Machine, a: int, b: int) -> Tensor | None:
    x = m.pick(a, is_float)
    if x is None:
        return None
    for i in range(b % 5):
        x = x + (x * 0.1).sin() if i % 2 else x.tanh()
    return x


def special_lowtide_checkpoint(m: Machine, a: int, b: int) -> Tensor | None:
    x = m.pick(a, is_float)
    return (
        None if x is None else lowtide.checkpoint(lambda t: F.dropout(t.sin(), 0.2, True).exp() * m.leaves[0].mean(), x)
    )


def special_torch_checkpoint(m: Machine, a: int, b: int) -> Tensor | None:
    x = m.pick(a, is_float)
    return None if x is None else torch_checkpoint(lambda t: t.sin().exp() * m.leaves[0].mean(), x, use_reentrant=False)


def special_forget(m: Machine, a: int, b: int) -> Tensor | None:
    if len(m.live) > 3:
        del m.live[3 + a % (len(m.live) - 3)]
    return None


def special_attention(m: Machine, a: int, b: int) -> Tensor | None:
    x = m.pick(a, lambda t: is_matrix(t) and t.shape[-1] == COLS and t.dtype == torch.float32)
    if x is None:
        return None
    h = x.view(1, x.shape[0], 4, COLS // 4).transpose(1, 2) if x.is_contiguous() else None
    if h is None:
        return None
    y = F.scaled_dot_product_attention(h, h, h * 2, dropout_p=0.1 if b % 2 else 0.0, is_causal=True)
    return y.transpose(1, 2).reshape(x.shape)


def special_conv(m: Machine, a: int, b: int) -> Tensor | None:
    x = m.pick(a, lambda t: is_matrix(t) and t.dtype == torch.float32 and min(t.shape) >= 4)
    if x is None:
        return None
    return F.max_pool2d(F.conv2d(x[None, None], m.leaves[2][:3, :9].reshape(3, 1, 3, 3), padding=1), 2)[0, 0]


def special_accumulate(m: Machine, a: int, b: int) -> Tensor | None:
    """The residual stream: a running sum, in place."""
    x = m.pick(a, is_float)
    if x is None:
        return None
    total = torch.zeros_like(x)
    for i in range(1 + b % 4):
        total += x * i
        total = total.sin() if b % 2 else total
    return total


def special_cross_entropy(m: Machine, a: int, b: int) -> Tensor | None:
    x = m.pick(a, lambda t: is_matrix(t) and t.dtype == torch.float32)
    return None if x is None else F.cross_entropy(x, torch.arange(x.shape[0]) % x.shape[1], reduction="none")


SPECIAL = {name.removeprefix("special_"): f for name, f in list(globals().items()) if name.startswith("special_")}


@dataclass(frozen=True)
class Instruction:
    kind: str
    name: str
    a: int
    b: int

    def run(self, m: Machine) -> None:
        if self.kind == "special":
            out = SPECIAL[self.name](m, self.a, self.b)
        elif self.kind in ("unary", "view", "reduce"):
            x = m.pick(self.a, lambda t: is_float(t) and t.dim() >= 1 and t.numel() > 1)
            table = {"unary": UNARY, "view": VIEWS, "reduce": REDUCE}[self.kind]
            out = None if x is None else table[self.name](x)
        elif self.kind == "inplace":
            x = m.pick(self.a, lambda t: is_float(t) and t.dim() >= 1 and not (t.is_leaf and t.requires_grad))
            if x is not None:
                INPLACE[self.name](x)
            out = None
        else:
            x = m.pick(self.a, lambda t: is_float(t) and t.dim() >= 1)
            y = None if x is None else m.pick(self.b, lambda t: t.shape == x.shape and t.dtype == x.dtype)
            out = None
            if x is not None and y is not None:
                if self.kind == "binary":
                    out = BINARY[self.name](x, y)
                elif not (x.is_leaf and x.requires_grad):
                    INPLACE_BINARY[self.name](x, y)
        if out is not None:
            m.live.append(out)


TABLES = {
    "unary": UNARY,
    "view": VIEWS,
    "reduce": REDUCE,
    "binary": BINARY,
    "inplace": INPLACE,
    "inplace_binary": INPLACE_BINARY,
    "special": SPECIAL,
}
number = st.integers(0, 30)
instructions = st.sampled_from([(k, n) for k, table in TABLES.items() for n in table]).flatmap(
    lambda kn: st.builds(Instruction, st.just(kn[0]), st.just(kn[1]), number, number)
)
programs = st.lists(instructions, min_size=1, max_size=24)


def by_hash(salt: int, share: int) -> Callable[[lowtide.OpInfo], lowtide.Decision]:
    """A policy that keeps ops by a hash of their index."""

    def decide(op: lowtide.OpInfo) -> lowtide.Decision:
        kept = (op.index * 2654435761 + salt * 40503) % 97 < share
        return lowtide.Decision.KEEP if kept else lowtide.Decision.RECOMPUTE

    decide.__qualname__ = f"by_hash({salt}, {share})"
    return decide


class Layer(torch.nn.Module):
    """A few instructions of a program as a module, for policies with layers."""

    def __init__(self, instructions: list[Instruction]) -> None:
        super().__init__()
        self.instructions = instructions

    def forward(self, machine: Machine) -> None:
        for instruction in self.instructions:
            instruction.run(machine)


def run_in_layers(program: list[Instruction], machine: Machine, length: int) -> None:
    """Run a program in layers, with the first instruction outside all layers."""
    for instruction in program[:1]:
        instruction.run(machine)
    for start in range(1, len(program), length):
        Layer(program[start : start + length])(machine)


layered = st.one_of(
    st.builds(lambda n: lowtide.EveryN(n, layers=Layer), st.integers(1, 3)),
    st.lists(st.sampled_from(["sin", "mul", "add", "exp", "copy_", "bernoulli_", "relu_"]), max_size=3).map(
        lambda ops: lowtide.SaveOps(ops, layers=Layer)
    ),
)
policies = st.one_of(
    st.just(lowtide.KeepNone()),
    st.just(lowtide.KeepAll()),
    st.just(lowtide.Selective(min_cost_us=3, cost=lambda op: 1.0)),
    st.just(lowtide.Selective(min_cost_us=20)),  # measures costs
    st.builds(lambda n, k: lowtide.Segments.uniform(n, k), st.integers(0, 40), st.integers(0, 5)),
    st.lists(st.integers(0, 40), max_size=3).map(lambda xs: lowtide.Segments([(x, x + 6) for x in xs])),
    st.builds(by_hash, st.integers(0, 1000), st.sampled_from([15, 50, 85])),
    layered,
    st.builds(lambda a, b: a | b, layered, st.builds(by_hash, st.integers(0, 1000), st.just(15))),
)
