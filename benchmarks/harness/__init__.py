"""The harness: measures training steps of lowtide and its peers, and writes the result pages.

    models.py        models and their sizes               blocks.py       blocks of a model that get a checkpoint
    unets.py         two U-Nets                           steps.py        one training step: peak, bits, time
    machine.py       processor, versions, allocator       base.py         base class of variants
    peers.py         checkpoint, SAC, save_on_cpu         remat.py        torch_remat
    compiled.py      torch.compile                        variants.py     all variants by name
    lowtide_variants.py   rules, online budget, plans     descriptions.py variants in words
    baseline_variants.py  rotor, DTR, simple schedules    records.py      results, to JSON and back
    measurement.py   one model, all variants, in rounds   resident.py     resident memory, one process each
    scaling.py       step time by depth, batch, length    suite.py        all benchmarks in a row
    noise.py         which differences are real           verdicts.py     ahead, behind, undecided
    regressions.py   comparison of two runs               summary.py      the five lines of the results page
    pages.py         the results page                     plots.py        plots
    markdown.py      Markdown tables                      rows.py         results that are one table

Data flows one way: `measurement` makes a `Run`; `verdicts`, `regressions`, `pages` and `plots` read it without torch.
"""
