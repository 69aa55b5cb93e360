"""The engine: record what forward does, replay just what backward asks for.

While forward runs, a recorder below autograd notes which op made every value and from what. Each tensor
that autograd saves becomes a handle; when backward asks for it, the value is there, or the ops that it
needs are replayed. User code never runs twice. The rules, cited by number where a line depends on one:

 1. Exact. Loss, gradients and buffers are bit-equal to the run without lowtide.
 2. Nothing runs twice but kernels: no user code, hook, print, collective or buffer update.
 3. Identity is the storage. The table of live storages is weak and keeps no tensor alive.   (values, recorder)
 4. Lifetimes are references. A handle holds its value, a value its op, an op its inputs.     (values)
 5. A kept value is held only once somebody needs it, not from the moment it is made.         (recorder)
 6. In-place ops are replayed on a private copy, unless what they overwrite is wanted by no one else.  (replay)
 7. Hidden writes (running statistics) go to scratch copies in replay.                        (effects)
 8. Randomness: a drawing op is replayed from the generator state it had.                     (randomness)
 9. Opaque memory: what no recorded op has written is a source, held and never recomputed.    (recorder)
10. Verified recipes: an op that does not reproduce bit for bit is pinned and named.          (verification)
11. Changed sources are an error, never a wrong gradient.                                     (values)
12. Collectives, and anything with an outside effect, are never replayed.                     (effects)
13. A step that differs from its plan is still right: the rest is recorded under the online budget. (planned, attention)
14. Foreign tensors (wrapper subclasses, sparse, nested) pass through, kept and counted.      (recorder)
"""
