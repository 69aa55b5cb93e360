"""Traces for the planning tests: small random ones, and realistic transformers and U-Nets of any depth."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from lowtide.records import TRACE_VERSION, Op, Trace, Unpack, Value, Write


def make_trace(*, ops: tuple[Op, ...] = (), unpacks: tuple[Unpack, ...] = (), **fields: Any) -> Trace:
    """Return a trace of a forward pass followed by a backward pass."""
    defaults = {"values": (), "saved": (), "step_s": 1.0, "peak_bytes": 0}
    return Trace(version=TRACE_VERSION, events=(*ops, *unpacks), **{**defaults, **fields})


def changed(trace: Trace, **fields: Any) -> Trace:
    """Return a trace with other ops, unpacks or fields."""
    if "ops" in fields or "unpacks" in fields:
        fields["events"] = (*fields.pop("ops", trace.ops), *fields.pop("unpacks", trace.unpacks))
    return replace(trace, **fields)


@st.composite
def unpack_of(draw, value: int, node: int, max_other_bytes: int) -> Unpack:
    other = draw(st.integers(0, max_other_bytes))
    return Unpack(value, node, other, 1.0, rise_bytes=draw(st.integers(0, other)))


@st.composite
def overheads(draw) -> dict[str, object]:
    """Time of a replay beside its kernel; sometimes none."""
    return {"replay_overhead_s": draw(st.sampled_from((0.0, 0.5, 3.0)))}


@st.composite
def modules(draw, n: int) -> list[str]:
    """By op: the module that it runs in. Several ops run in the same module, also with others in between."""
    return [f"layer.{draw(st.integers(0, 3))}" for _ in range(n)]


@st.composite
def traces(draw, max_ops: int = 10, writes: bool = True, pins: bool = True, nodes: bool = True) -> Trace:
    """A valid trace: a DAG with sources, several outputs, in-place writes, repeated unpacks, pinned ops."""
    n = draw(st.integers(1, max_ops))
    values: list[dict] = []
    ops: list[dict] = []
    current: list[int] = []  # values that are the current content of their storage
    for _ in range(draw(st.integers(1, 2))):
        values.append({"nbytes": 8, "made_at": None, "storage": len(values)})
        current.append(len(values) - 1)
    for j in range(n):
        inputs = draw(st.lists(st.sampled_from(current), min_size=1, max_size=3, unique=True))
        outputs: list[int] = []
        op_writes: list[tuple] = []
        produced_inputs = [v for v in inputs if values[v]["made_at"] is not None]
        if writes and produced_inputs and draw(st.integers(0, 3)) == 0:
            old = draw(st.sampled_from(produced_inputs))
            new = len(values)
            values.append({"nbytes": values[old]["nbytes"], "made_at": j, "storage": values[old]["storage"]})
            current.remove(old)
            current.append(new)
            outputs.append(new)
            op_writes.append((old, new))
        for _ in range(draw(st.integers(0 if outputs else 1, 2))):
            values.append({"nbytes": draw(st.integers(0, 9)), "made_at": j, "storage": 1000 + len(values)})
            outputs.append(len(values) - 1)
            current.append(len(values) - 1)
        ops.append({"inputs": inputs, "outputs": outputs, "writes": op_writes})
    produced = [v for v, value in enumerate(values) if value["made_at"] is not None]
    saved = draw(st.lists(st.sampled_from(range(len(values))), unique=True, max_size=len(values)))
    read_by: dict[int, list[int]] = {}
    for j, op in enumerate(ops):
        for v in op["inputs"]:
            read_by.setdefault(v, []).append(j)
    unpacks: list[Unpack] = []
    if saved:
        groups = draw(st.lists(st.lists(st.sampled_from(saved), min_size=1, max_size=3), max_size=5 if nodes else 0))
        rest = [v for v in reversed(saved) if draw(st.integers(0, 9))]  # some values are never unpacked
        groups += [[v] for v in rest]
        for node, group in enumerate(groups):
            unpacks += [draw(unpack_of(v, node, 6)) for v in group]
    for v in produced:
        last = max([values[v]["made_at"], *read_by.get(v, [])])
        until_backward = draw(st.integers(0, 5)) == 0
        first, end = (n, n + len(unpacks)) if until_backward else (last, n - 1)
        values[v]["held_until"] = draw(st.integers(first, end))
    module = draw(modules(n))
    return make_trace(
        ops=tuple(
            Op(
                name=f"op{j}",
                module=module[j],
                time_s=float(draw(st.integers(0, 9))),
                inputs=tuple(op["inputs"]),
                outputs=tuple(op["outputs"]),
                pinned="random" if pins and draw(st.integers(0, 6)) == 0 else None,
                other_bytes=draw(st.integers(0, 6)),
                replay_s=draw(st.none() | st.just(0.5)),
                workspace_bytes=draw(st.sampled_from((0, 0, 3, 7))),
                writes=tuple(
                    Write(old, new, exclusive=old not in saved and read_by[old] == [j] and draw(st.booleans()))
                    for old, new in op["writes"]
                ),
            )
            for j, op in enumerate(ops)
        ),
        values=tuple(Value(**{"held_until": n, **value}) for value in values),
        saved=tuple(saved),
        unpacks=tuple(unpacks),
        step_s=100.0,
        peak_bytes=0,
        **draw(overheads()),
    )


class TraceBuilder:
    """Builds a realistic trace op by op: times from flops and bytes, backward nodes in reverse order."""

    FLOPS_PER_S = 50e12
    BYTES_PER_S = 1e12

    def __init__(self) -> None:
        self.values: list[dict] = []
        self.ops: list[dict] = []
        self.nodes: list[tuple[list[int], int]] = []
        self.parameter_bytes = 0
        self.module = ""

    def source(self, nbytes: int) -> int:
        self.values.append({"nbytes": nbytes, "made_at": None, "storage": len(self.values)})
        self.parameter_bytes += nbytes
        return len(self.values) - 1

    def op(self, name: str, inputs: list[int], *sizes: int, flops: float = 0.0, saves: str = "") -> int:
        """Add an op and return its first output. `saves` lists the values that its backward node unpacks: "0", "1" for
        inputs, "a", "b" for outputs."""
        index = len(self.ops)
        outputs = []
        for nbytes in sizes:
            outputs.append(len(self.values))
            self.values.append({"nbytes": nbytes, "made_at": index, "storage": len(self.values)})
        moved = sum(self.values[v]["nbytes"] for v in (*inputs, *outputs))
        self.ops.append(
            {
                "name": f"aten.{name}",
                "module": self.module,
                "time_s": max(flops / self.FLOPS_PER_S, moved / self.BYTES_PER_S) + 4e-6,
                "inputs": tuple(dict.fromkeys(inputs)),
                "outputs": tuple(outputs),
            }
        )
        unpacked = [inputs[int(c)] if c.isdigit() else outputs[ord(c) - ord("a")] for c in saves]
        # A backward node holds the gradients of its first output and of its inputs at once.
        self.nodes.append((unpacked, sum(self.values[v]["nbytes"] for v in {*outputs[:1], *inputs})))
        return outputs[0]

    def finish(self) -> Trace:
        n = len(self.ops)
        held_until = {}
        for j, op in enumerate(self.ops):
            for v in (*op["inputs"], *op["outputs"]):
                held_until[v] = j
        unpacks, saved = [], {}
        for node, (unpacked, gradient_bytes) in enumerate(reversed(self.nodes)):
            done = self.parameter_bytes * node // len(self.nodes)
            for v in unpacked:
                unpacks.append(Unpack(v, node, self.parameter_bytes + done + gradient_bytes, 0.0))
                saved[v] = True
        held_until[self.ops[-1]["outputs"][0]] = n + len(unpacks)  # the loss
        forward_s = sum(op["time_s"] for op in self.ops)
        return make_trace(
            ops=tuple(Op(**op, other_bytes=self.parameter_bytes) for op in self.ops),
            values=tuple(Value(held_until=held_until.get(v, n), **value) for v, value in enumerate(self.values)),
            saved=tuple(sorted(saved)),
            unpacks=tuple(unpacks),
            step_s=3 * forward_s,
            peak_bytes=0,
        )


def gpt_trace(layers: int, *, batch: int = 8, seq: int = 1024, width: int = 768, heads: int = 12) -> Trace:
    """GPT-2 with fused attention, as it would be recorded: 12 ops per block."""
    m = TraceBuilder()
    rows = batch * seq
    x_bytes, vocab = 2 * rows * width, 16384
    ids = m.source(8 * rows)
    wte, wpe = m.source(2 * vocab * width), m.source(2 * seq * width)
    m.module = "transformer.wte"
    tokens = m.op("embedding.default", [wte, ids], x_bytes, saves="1")
    m.module = "transformer.wpe"
    positions = m.op("embedding.default", [wpe], 2 * seq * width)
    m.module = "transformer"
    x = m.op("add.Tensor", [tokens, positions], x_bytes)

    def linear(x: int, module: str, n_in: int, n_out: int) -> int:
        m.module = module
        weight, bias = m.source(2 * n_in * n_out), m.source(2 * n_out)
        return m.op("addmm.default", [bias, x, weight], 2 * rows * n_out, flops=2 * rows * n_in * n_out, saves="12")

    def norm(x: int, module: str) -> int:
        m.module = module
        return m.op("native_layer_norm.default", [x, m.source(2 * width)], x_bytes, 4 * rows, 4 * rows, saves="01bc")

    for layer in range(layers):
        block = f"transformer.h.{layer}"
        qkv = linear(norm(x, f"{block}.ln_1"), f"{block}.attn.c_attn", width, 3 * width)
        m.module = f"{block}.attn"
        attended = m.op(
            "_scaled_dot_product_flash_attention.default",
            [qkv],
            x_bytes,
            4 * batch * heads * seq,
            flops=4 * batch * seq * seq * width,
            saves="0ab",
        )
        projected = linear(attended, f"{block}.attn.c_proj", width, width)
        m.module = f"{block}.attn.resid_dropout"
        dropped = m.op("native_dropout.default", [projected], x_bytes, rows * width, saves="b")
        m.module = block
        x = m.op("add.Tensor", [x, dropped], x_bytes)
        wide = linear(norm(x, f"{block}.ln_2"), f"{block}.mlp.c_fc", width, 4 * width)
        m.module = f"{block}.mlp.act"
        active = m.op("gelu.default", [wide], 4 * x_bytes, saves="0")
        narrow = linear(active, f"{block}.mlp.c_proj", 4 * width, width)
        m.module = f"{block}.mlp.dropout"
        dropped = m.op("native_dropout.default", [narrow], x_bytes, rows * width, saves="b")
        m.module = block
        x = m.op("add.Tensor", [x, dropped], x_bytes)
    x = norm(x, "transformer.ln_f")
    m.module = "lm_head"
    logits = m.op("mm.default", [x, wte], 2 * rows * vocab, flops=2 * rows * width * vocab, saves="01")
    m.module = ""
    log_probs = m.op("_log_softmax.default", [logits], 2 * rows * vocab, saves="a")
    m.op("nll_loss_forward.default", [log_probs, ids], 4, 4, saves="1b")
    return m.finish()


def cell_trace(steps: int, *, batch: int = 64, width: int = 64) -> Trace:
    """An LSTM cell called once per time step: 11 ops per step, and a state that passes through all of them."""
    m = TraceBuilder()
    m.module = "cell"
    weight = m.source(4 * 4 * width * width)
    size = 4 * batch * width
    h, c = (m.op("zeros.default", [m.source(4)], size) for _ in range(2))
    for _ in range(steps):
        gates = m.op("mm.default", [h, weight], 4 * size, flops=8 * batch * width * width, saves="01")
        i, f, o = (m.op("sigmoid.default", [gates], size, saves="a") for _ in range(3))
        g = m.op("tanh.default", [gates], size, saves="a")
        kept, new = m.op("mul.Tensor", [f, c], size, saves="01"), m.op("mul.Tensor", [i, g], size, saves="01")
        c = m.op("add.Tensor", [kept, new], size)
        squashed = m.op("tanh.default", [c], size, saves="a")
        h = m.op("mul.Tensor", [o, squashed], size, saves="01")
    m.op("mean.default", [h], 4)
    return m.finish()


def unfused_trace(layers: int, *, batch: int = 4, seq: int = 1024, width: int = 1024, experts: int = 7) -> Trace:
    """A transformer in small ops: fp32 norms, rotary positions, plain attention, dense experts; 115 ops per block."""
    m = TraceBuilder()
    rows, heads = batch * seq, width // 64
    half, full, scores = 2 * rows * width, 4 * rows * width, 2 * batch * heads * seq * seq
    cos, sin = m.source(2 * seq * 64), m.source(2 * seq * 64)
    mask = m.source(2 * seq * seq)
    m.module = "model.embed"
    x = m.op("embedding.default", [m.source(2 * 32000 * width), m.source(8 * rows)], half, saves="1")

    def norm(x: int, module: str) -> int:
        m.module = module
        y = m.op("_to_copy.default", [x], full)
        squares = m.op("pow.Tensor_Scalar", [y], full, saves="0")
        mean = m.op("mean.dim", [squares], 4 * rows)
        mean = m.op("add.Tensor", [mean], 4 * rows)
        scale = m.op("rsqrt.default", [mean], 4 * rows, saves="a")
        y = m.op("mul.Tensor", [y, scale], full, saves="01")
        y = m.op("_to_copy.default", [y], half)
        return m.op("mul.Tensor", [y, m.source(2 * width)], half, saves="01")

    def linear(x: int, module: str, n_in: int, n_out: int) -> int:
        m.module = module
        weight = m.source(2 * n_in * n_out)
        return m.op("mm.default", [x, weight], 2 * rows * n_out, flops=2 * rows * n_in * n_out, saves="01")

    def rotary(x: int) -> int:
        straight = m.op("mul.Tensor", [x, cos], half, saves="1")
        turned = m.op("cat.default", [m.op("neg.default", [x], half // 2), x], half)
        return m.op("add.Tensor", [straight, m.op("mul.Tensor", [turned, sin], half, saves="1")], half)

    for layer in range(layers):
        block = f"model.layers.{layer}"
        y = norm(x, f"{block}.input_norm")
        q, k, v = (linear(y, f"{block}.attn.{name}", width, width) for name in ("q", "k", "v"))
        m.module = f"{block}.attn"
        q, k = (m.op("clone.default", [rotary(z)], half) for z in (q, k))
        v = m.op("clone.default", [v], half)
        flops = 2 * batch * seq * seq * width
        a = m.op("bmm.default", [q, k], scores, flops=flops, saves="01")
        a = m.op("mul.Scalar", [a], scores)
        a = m.op("add.Tensor", [a, mask], scores)
        a = m.op("_to_copy.default", [a], 2 * scores)
        a = m.op("_softmax.default", [a], 2 * scores, saves="a")
        a = m.op("_to_copy.default", [a], scores)
        a = m.op("native_dropout.default", [a], scores, scores // 2, saves="b")
        y = m.op("bmm.default", [a, v], half, flops=flops, saves="01")
        y = m.op("clone.default", [y], half)
        y = linear(y, f"{block}.attn.o", width, width)
        m.module = block
        x = m.op("add.Tensor", [x, y], half)
        y = norm(x, f"{block}.post_norm")
        m.module = f"{block}.mlp.router"
        routes = m.op("_softmax.default", [linear(y, m.module, width, 64)], 128 * rows, saves="a")
        total = None
        for expert in range(experts):
            module = f"{block}.mlp.experts.{expert}"
            gate, up = linear(y, f"{module}.gate", width, width // 2), linear(y, f"{module}.up", width, width // 2)
            m.module = module
            active = m.op("silu.default", [gate], half // 2, saves="0")
            active = m.op("mul.Tensor", [active, up], half // 2, saves="01")
            active = m.op("native_dropout.default", [active], half // 2, half // 4, saves="b")
            down = linear(active, f"{module}.down", width // 2, width)
            m.module = module
            chosen = m.op("select.int", [routes], 2 * rows)
            weighted = m.op("mul.Tensor", [down, chosen], half, saves="01")
            weighted = m.op("_to_copy.default", [weighted], half)
            m.module = f"{block}.mlp"
            total = weighted if total is None else m.op("add.Tensor", [total, weighted], half)
        m.module = block
        x = m.op("add.Tensor", [x, total], half)
    x = norm(x, "model.norm")
    logits = linear(x, "lm_head", width, 32000)
    m.module = ""
    log_probs = m.op("_log_softmax.default", [logits], 64000 * rows, saves="a")
    m.op("nll_loss_forward.default", [log_probs], 4, 4, saves="b")
    return m.finish()


@st.composite
def training_traces(draw, max_ops: int = 9) -> Trace:
    """Small steps as autograd makes them: ops save inputs and outputs, backward nodes in reverse order of forward."""
    n = draw(st.integers(4, max_ops))
    values: list[dict] = [{"nbytes": 8, "made_at": None, "storage": 0}]
    ops: list[dict] = []
    nodes: list[list[int]] = []
    for j in range(n):
        recent = range(max(0, len(values) - 4), len(values))
        inputs = sorted(draw(st.sets(st.sampled_from(recent), min_size=1, max_size=2)))
        outputs = []
        for _ in range(draw(st.sampled_from((1, 1, 1, 2)))):
            outputs.append(len(values))
            values.append({"nbytes": draw(st.integers(1, 9)), "made_at": j, "storage": len(values)})
        ops.append({"inputs": inputs, "outputs": outputs})
        nodes.append(draw(st.lists(st.sampled_from([*inputs, *outputs]), max_size=2, unique=True)))
    unpacks = [
        draw(unpack_of(v, node, 9)) for node, values_of_node in enumerate(reversed(nodes)) for v in values_of_node
    ]
    for j, op in enumerate(ops):
        for v in (*op["inputs"], *op["outputs"]):
            values[v]["held_until"] = j
    module = draw(modules(n))
    return make_trace(
        ops=tuple(
            Op(
                name=f"op{j}",
                module=module[j],
                time_s=float(draw(st.integers(1, 9))),
                inputs=tuple(op["inputs"]),
                outputs=tuple(op["outputs"]),
                pinned="random" if draw(st.integers(0, 8)) == 0 else None,
            )
            for j, op in enumerate(ops)
        ),
        values=tuple(Value(**{"held_until": n, **value}) for value in values),
        saved=tuple(sorted({unpack.value for unpack in unpacks})),
        unpacks=tuple(unpacks),
        step_s=100.0,
        peak_bytes=0,
        **draw(overheads()),
    )


def unet_trace(depth: int = 5, *, batch: int = 8, size: int = 256, width: int = 32, convs: int = 3) -> Trace:
    """A U-Net with long skip connections and batch norms: no two blocks are alike."""
    m = TraceBuilder()
    x = m.source(4 * batch * 3 * size * size)

    def stage(x: int, module: str, n_in: int, n_out: int, side: int) -> int:
        for i in range(convs):
            m.module = f"{module}.{i}"
            n_from = n_in if i == 0 else n_out
            out = 4 * batch * n_out * side * side
            flops = 2 * 9 * n_from * n_out * batch * side * side
            y = m.op("convolution.default", [x, m.source(36 * n_from * n_out)], out, flops=flops, saves="01")
            y = m.op("native_batch_norm.default", [y, m.source(4 * n_out)], out, 4 * n_out, 4 * n_out, saves="01bc")
            x = m.op("relu.default", [y], out, saves="a")
        return x

    skips, channels = [], 3
    for level in range(depth):
        x = stage(x, f"down.{level}", channels, width << level, size >> level)
        channels = width << level
        skips.append(x)
        pooled = 4 * batch * channels * (size >> level + 1) ** 2
        x = m.op("max_pool2d_with_indices.default", [x], pooled, 2 * pooled, saves="0b")
    x = stage(x, "middle", channels, channels, size >> depth)
    for level in reversed(range(depth)):
        side = size >> level
        m.module = f"up.{level}"
        grown = 4 * batch * channels * side * side
        x = m.op("upsample_nearest2d.default", [x], grown)
        x = m.op("cat.default", [x, skips[level]], grown + 4 * batch * (width << level) * side * side)
        x = stage(x, f"up.{level}", channels + (width << level), width << level, side)
        channels = width << level
    m.module = ""
    m.op("mse_loss.default", [x], 4, saves="0")
    return m.finish()
