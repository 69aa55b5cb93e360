"""What the benchmarks have in common, and the run that measures lowtide beside its peers.

    models.py     the models and their sizes            blocks.py     which parts of them get a checkpoint each
    machine.py    where and with what it was measured   steps.py      one training step: peak, bits, seconds
    peers.py      what a user would pick instead        compiled.py   torch.compile, its peak and its deadline
    ours.py       lowtide's rules, budgets and plans    variants.py   all of these by name
    records.py    results, to JSON and back             running.py    one model, all variants, round by round
    resident.py   resident memory, one process each     scaling.py    cost against depth, batch and length
    noise.py      what is a difference and what is not  standing.py   ahead, behind, undecided
    comparing.py  two runs                              pages.py      Markdown       plots.py   pictures

Data flows one way: `running` makes a `Run`; `standing`, `comparing`, `pages` and `plots` read it and need no torch.
"""
