"""The engine: record the ops of forward, and replay the ops that backward needs.

A recorder below autograd records which op made every value, and from which inputs. Each tensor that autograd saves
becomes a handle. When backward unpacks a handle, the value is in memory, or is fetched from a store, or is replayed.
User code never runs twice. Comments cite these rules by number:

 1. **Exact.** With lossless decisions, loss, every gradient and every buffer are bit-equal to the run without lowtide.
 2. **Nothing runs twice but kernels.** No user code, hook, print, collective or buffer update happens a second time.
 3. **Identity is the storage.** The table of live storages holds weak references and never keeps a tensor alive.
    (`values/storage_table.py`)
 4. **Lifetimes are references.** A handle holds its value, a value its recipe, a recipe its inputs. After backward
    nothing of lowtide is left. With `keep` for everything the peak is plain PyTorch's. (`values/`)
 5. **A kept value is held once a handle or recipe needs it**, not from the moment it is made.
    (`recording/recorder.py`)
 6. **In-place ops** are replayed on a private copy, unless the overwritten memory is fresh or has no other user.
    (`recording/inplace.py`, `values/replay.py`)
 7. **Hidden writes** (running statistics) go to scratch copies in replay. (`ops/facts.py`, `values/replay.py`)
 8. **Randomness.** An op that draws random numbers is replayed from the generator state it had. The current state is
    restored, also after an error. (`ops/rng.py`)
 9. **Opaque memory.** Memory that no recorded op has written is a source: held, never recomputed.
    (`recording/known_memory.py`)
10. **Verified recipes.** An op that does not reproduce bit for bit is pinned and named. (`recording/verifier.py`)
11. **Changed sources are an error**, never a wrong gradient. (`values/value.py`, `values/replay.py`)
12. **Collectives are never replayed**, nor is any op with an outside effect. (`ops/facts.py`)
13. **A step that differs from its plan is still right.** At the first difference the rest of the step falls back to
    the online budget. (`strategies/planned.py`)
14. **Foreign tensors pass through** (unknown wrapper subclasses, sparse, nested, meta): kept and counted in the report.
    (`recording/known_memory.py`)
"""
