"""Common checkpointing rules, judged by the simulator."""

from dataclasses import replace

from lowtide.planning import BASELINES, Problem, Simulator, knapsack

from .traces import changed, gpt_trace


def simulations(problem):
    simulator = Simulator(problem)
    return {name: simulator.run(rule(problem)) for name, rule in BASELINES.items()}


def test_keep_all_costs_nothing_and_recompute_all_costs_a_forward():
    trace = gpt_trace(6)
    outcome = simulations(Problem(trace))
    assert outcome["keep all"].extra_s == 0
    forward_s = sum(op.time_s for op in trace.ops)
    assert 0.95 * forward_s < outcome["recompute all"].extra_s <= forward_s + 1e-9


def test_checkpointed_layers_need_less_memory_and_more_time():
    outcome = simulations(Problem(gpt_trace(12)))
    assert outcome["every block"].peak_bytes < 0.5 * outcome["keep all"].peak_bytes
    assert outcome["every block"].extra_s > outcome["keep matmuls and attention"].extra_s > 0
    assert outcome["every block"].peak_bytes < outcome["keep matmuls and attention"].peak_bytes


def test_every_block_keeps_only_the_residual_stream_of_the_layers():
    trace = gpt_trace(8)
    problem = Problem(trace)
    keep = BASELINES["every block"](problem)
    inside = [j for j, op in enumerate(trace.ops) if ".h." in op.module and keep[j]]
    assert len(inside) == 8
    assert all(trace.ops[j].name == "aten.add.Tensor" for j in inside)


def test_selective_checkpointing_keeps_matmuls_and_attention():
    trace = gpt_trace(3)
    keep = BASELINES["keep matmuls and attention"](Problem(trace))
    names = {op.name for op, kept in zip(trace.ops, keep, strict=True) if kept and ".h." in op.module}
    assert {"aten.addmm.default", "aten._scaled_dot_product_flash_attention.default"} <= names
    assert "aten.gelu.default" not in names
    assert "aten.native_layer_norm.default" not in names


def test_knapsack_keeps_more_and_is_faster_with_more_memory():
    trace = gpt_trace(12)
    problem = Problem(trace)
    simulator = Simulator(problem)
    plain = simulator.run(problem.keep_all()).peak_bytes
    kept_ops = [sum(knapsack(problem, int(share * plain))) for share in (0.4, 0.6, 0.8)]
    assert kept_ops == sorted(kept_ops)
    assert simulator.run(knapsack(problem, plain)).extra_s <= simulator.run(knapsack(problem, plain // 2)).extra_s


def test_without_module_names_layers_are_repeated_blocks():
    trace = gpt_trace(12)
    nameless = changed(trace, ops=tuple(replace(op, module="") for op in trace.ops))
    problem = Problem(nameless)
    keep = BASELINES["every block"](problem)
    assert 0 < sum(keep) < 30
