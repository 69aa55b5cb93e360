"""Plans for steps with several forward and backward passes.

step_solve        runs the searches in a fixed order
step_facts        a trace as lists by op, value and event
stage_table       backward passes as stages, and what each stage needs
decisions         what is held into which stage; the fields of a plan
step_simulator    peak and time of decisions; the judge
step_candidate    decisions with their simulation
step_summary      descriptions of decisions, for plans and errors

step_milp         the loop that solves, simulates and adds byte rows
  step_formulation, step_byte_rows
step_smallest     the smallest budget for which a plan is known
"""
