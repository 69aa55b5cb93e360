"""`ActivationStore`: values, eviction, statistics, threads and the disk tier."""

import collections
import errno
import gc
import os
import stat
import subprocess
import sys
import threading
import tracemalloc

import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lowtide import ArgumentError, BudgetError, DiskFullError, LowtideError, MissingCheckpointError
from lowtide.chain import ActivationStore, StoreStats


def array(nbytes, fill=0):
    return np.full(nbytes, fill, dtype="uint8")


class StoreAgainstModel(RuleBasedStateMachine):
    """Compare the store with a simple model: an ordered dict."""

    @initialize(
        budget=st.one_of(st.none(), st.integers(1, 60)),
        slots=st.one_of(st.none(), st.integers(1, 5)),
        evict=st.sampled_from(["oldest", "cheapest", "largest", "error"]),
        tier=st.sampled_from(["memory", "disk"]),
    )
    def make(self, budget, slots, evict, tier):
        self.store = ActivationStore(budget=budget, slots=slots, evict=evict, tier=tier)
        self.model = collections.OrderedDict()  # key -> (size, fill, cost, pinned), oldest first
        self.budget = float("inf") if budget is None else budget
        self.slots = float("inf") if slots is None else slots
        self.evict = evict
        self.puts = self.hits = self.misses = self.evictions = 0

    def over(self, model):
        return sum(e[0] for e in model.values()) > self.budget or len(model) > self.slots

    def after_put(self, key, entry):
        """Return the model with the entry, and the evicted keys. Return (None, None) if it does not fit."""
        model = self.model.copy()
        model.pop(key, None)
        evicted = []
        rank = {"oldest": lambda k: 0, "cheapest": lambda k: model[k][2], "largest": lambda k: -model[k][0]}
        while self.over({**model, key: entry}):
            evictable = [k for k in model if not model[k][3]]
            if self.evict == "error" or not evictable:
                return None, None
            victim = min(evictable, key=rank[self.evict])  # min takes the first of equals: the oldest
            evicted.append(victim)
            del model[victim]
        model[key] = entry
        return model, evicted

    keys = st.integers(0, 6)

    @rule(
        key=keys,
        size=st.integers(0, 70),
        fill=st.integers(0, 255),
        cost=st.sampled_from([0, 1, 2.5]),
        pin=st.booleans(),
    )
    def put(self, key, size, fill, cost, pin):
        pinned = pin and size < 10
        model, evicted = self.after_put(key, (size, fill, cost, pinned))
        if model is None:
            with pytest.raises(BudgetError):
                self.store.put(key, array(size, fill), cost, pinned=pinned)
        else:
            assert list(self.store.put(key, array(size, fill), cost, pinned=pinned)) == evicted
            self.model = model
            self.puts += 1
            self.evictions += len(evicted)

    @rule(key=keys, take=st.booleans())
    def read(self, key, take):
        read = self.store.take if take else self.store.get
        if key not in self.model:
            self.misses += 1
            with pytest.raises(MissingCheckpointError):
                read(key)
            return
        self.hits += 1
        size, fill, _, _ = self.model[key]
        assert np.array_equal(read(key), array(size, fill))
        if take:
            del self.model[key]

    @rule(key=keys)
    def remove(self, key):
        if key in self.model:
            self.store.remove(key)
            del self.model[key]
        else:
            with pytest.raises(MissingCheckpointError):
                self.store.remove(key)

    @rule()
    def clear(self):
        self.store.clear()
        self.model.clear()

    @invariant()
    def statistics_match_the_model(self):
        if not hasattr(self, "store"):
            return
        nbytes = sum(entry[0] for entry in self.model.values())
        stats = self.store.stats()
        assert self.store.keys() == tuple(self.model)
        assert self.store.bytes_stored == stats.bytes_stored == nbytes <= self.budget
        assert len(self.store) == stats.resident == len(self.model) <= self.slots
        assert (stats.stored, stats.evictions) == (self.puts, self.evictions)
        assert (stats.hits, stats.misses) == (self.hits, self.misses)
        assert stats.peak_bytes >= nbytes
        for key, (size, _, cost, pinned) in self.model.items():
            entry = self.store.entry(key)
            assert (entry.nbytes, entry.cost, entry.pinned) == (size, cost, pinned)
        if self.store.scratch is not None:
            scratch = self.store.scratch
            assert scratch.file_bytes - scratch.free_bytes == nbytes
            assert os.fstat(scratch.file.fileno()).st_size == scratch.file_bytes

    def teardown(self):
        if hasattr(self, "store"):
            self.store.close()


TestStoreAgainstModel = StoreAgainstModel.TestCase
TestStoreAgainstModel.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_values_are_copied_in_and_out():
    store = ActivationStore()
    x = np.zeros(3)
    store.put("x", {"u": x})
    x[:] = 1
    store.get("x")["u"][:] = 2
    assert store.get("x")["u"].tolist() == [0, 0, 0]


def test_take_removes_the_entry_without_a_copy():
    store = ActivationStore()
    store.put("x", np.zeros(2**20))
    tracemalloc.start()
    x = store.take("x")
    assert tracemalloc.get_traced_memory()[1] < 2**16
    tracemalloc.stop()
    assert x.nbytes == 2**23
    assert store.bytes_stored == 0
    assert "x" not in store


def test_replacing_a_key_counts_its_bytes_once():
    store = ActivationStore(budget=100)
    for _ in range(5):
        assert store.put("a", array(60)) == ()
    assert store.bytes_stored == 60
    assert store.stats().evictions == 0


def test_several_entries_are_evicted_if_one_is_not_enough():
    store = ActivationStore(budget=100, evict="oldest")
    for key in "abcd":
        store.put(key, array(25))
    assert store.put("e", array(60)) == ("a", "b", "c")
    assert store.keys() == ("d", "e")
    assert store.bytes_stored == 85


def test_evict_cheapest_and_largest():
    cheap = ActivationStore(slots=2, evict="cheapest")
    cheap.put("expensive", array(1), cost=9)
    cheap.put("cheap", array(1), cost=0.5)
    assert cheap.put("new", array(1), cost=3) == ("cheap",)
    large = ActivationStore(budget=100, evict="largest")
    large.put("small", array(10))
    large.put("large", array(80))
    assert large.put("new", array(50)) == ("large",)


def test_entry_larger_than_the_budget_raises_without_evictions():
    store = ActivationStore(budget="1 KiB")
    store.put("a", array(500, 1))
    store.put("b", array(500, 2))
    with pytest.raises(BudgetError) as caught:
        store.put("a", array(2000))
    assert str(caught.value) == (
        "'a' needs 1.95 KiB, more than the whole budget of 1.00 KiB. It was not stored and nothing was evicted. "
        "Raise budget=, or store narrower with precision="
    )
    assert (caught.value.budget_bytes, caught.value.smallest_bytes) == (1024, 2000)
    assert isinstance(caught.value, MemoryError)
    assert store.get("a")[0] == 1
    assert store.keys() == ("a", "b")
    assert store.stats().evictions == 0


def test_error_names_the_reason_for_no_eviction():
    strict = ActivationStore(slots=1, evict="error")
    strict.put(0, array(1))
    with pytest.raises(BudgetError, match="but 1 of 1 slots are in use, and evict='error' forbids evictions"):
        strict.put(1, array(1))
    pinned = ActivationStore(budget=10)
    pinned.put(0, array(8), pinned=True)
    with pytest.raises(BudgetError, match="8 B of 10 B are in use, and pinned entries cannot be evicted") as caught:
        pinned.put(1, array(5))
    assert caught.value.smallest_bytes == 13
    assert pinned.put(1, array(2)) == ()


def test_stats_are_frozen_and_give_the_utilisation():
    store = ActivationStore(budget=200, precision="float16")
    store.put("a", np.zeros(25, dtype="float32"))
    store.get("a")
    with pytest.raises(MissingCheckpointError):
        store.get("b")
    assert store.stats() == StoreStats(
        stored=1, resident=1, bytes_stored=50, bytes_avoided=50, peak_bytes=50, budget_bytes=200, slots=None,
        utilisation=0.25, evictions=0, hits=1, misses=1,
    )  # fmt: skip
    with pytest.raises(AttributeError):
        store.stats().stored = 3
    assert ActivationStore().stats().utilisation == 0.0
    half = ActivationStore(slots=2)
    half.put(0, array(1))
    assert half.stats().utilisation == 0.5


def test_entry_metadata_and_repr():
    store = ActivationStore(budget="1 KiB", precision="float16")
    store.put(7, np.zeros(10), cost=3)
    entry = store.entry(7)
    assert (entry.key, entry.nbytes, entry.exact_bytes, entry.cost, entry.tier) == (7, 20, 80, 3.0, "memory")
    assert entry.stored_at > 1.6e9
    assert repr(store) == "<ActivationStore: 1 entries, 20 B of 1.00 KiB in memory>"


def test_error_for_missing_key_lists_stored_keys():
    store = ActivationStore(slots=1)
    store.put("a", array(1))
    store.put("b", array(1))
    with pytest.raises(MissingCheckpointError) as caught:
        store.get("a")
    assert str(caught.value) == "nothing is stored under 'a' (stored: 'b'; 1 entries were evicted so far)"
    assert isinstance(caught.value, LookupError)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slots": 0}, "slots is the maximum number of entries, an int ≥ 1, not 0"),
        ({"slots": True}, "slots is the maximum number of entries"),
        ({"evict": "newest"}, "evict is one of 'oldest', 'cheapest', 'largest', 'error', not 'newest'"),
        ({"tier": "tape"}, "tier is 'memory' or 'disk', not 'tape'"),
        ({"directory": "."}, "directory= needs tier='disk'"),
        ({"tier": "disk", "directory": "/nowhere/at/all"}, "cannot write in '/nowhere/at/all'"),
        ({"budget": 0.5}, r"a size must be an int \(bytes\) or a string"),
    ],
)
def test_invalid_options(options, message):
    with pytest.raises(ArgumentError, match=message):
        ActivationStore(**options)


def test_cost_must_be_finite():
    with pytest.raises(ArgumentError, match="cost of 0 must be a finite number, not nan"):
        ActivationStore().put(0, array(1), cost=float("nan"))


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_threads(tier):
    store = ActivationStore(budget=40_000, evict="oldest", tier=tier)
    failures = []

    def work(seed):
        rng = np.random.default_rng(seed)
        try:
            for _ in range(150):
                key = int(rng.integers(12))
                fill = int(rng.integers(256))
                store.put(key, array(int(rng.integers(1, 9000)), fill))
                try:
                    value = store.take(key) if rng.random() < 0.3 else store.get(key)
                except MissingCheckpointError:
                    continue
                assert len(np.unique(value)) == 1, "a torn value"
        except Exception as error:
            failures.append(error)

    old = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(old)
    assert not failures
    stats = store.stats()
    assert stats.bytes_stored == sum(store.entry(key).nbytes for key in store) <= 40_000
    assert stats.peak_bytes <= 40_000
    assert stats.hits + stats.misses == stats.stored == 8 * 150


def test_disk_tier_holds_no_memory(tmp_path):
    x = np.random.default_rng(0).standard_normal(2**20)
    with ActivationStore(tier="disk", directory=tmp_path) as store:
        tracemalloc.start()
        for i in range(4):
            store.put(i, x)
        assert tracemalloc.get_traced_memory()[1] < 2**20
        tracemalloc.stop()
        assert store.bytes_stored == 4 * x.nbytes
        assert np.array_equal(store.get(3), x)


@pytest.mark.skipif(os.name != "posix", reason="only POSIX has unnamed files")
def test_scratch_file_is_private_and_has_no_name(tmp_path):
    store = ActivationStore(tier="disk", directory=tmp_path)
    store.put(0, array(100))
    assert list(tmp_path.iterdir()) == []
    status = os.fstat(store.scratch.file.fileno())
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_nlink == 0


def test_scratch_file_is_closed_when_the_store_is_deleted():
    store = ActivationStore(tier="disk")
    file = store.scratch.file
    del store
    gc.collect()
    assert file.closed


def test_killed_process_leaves_no_file(tmp_path):
    code = (
        "import os, signal, numpy as np\nfrom lowtide.chain import ActivationStore\n"
        f"s = ActivationStore(tier='disk', directory={str(tmp_path)!r}); s.put(0, np.zeros(1000))\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert list(tmp_path.iterdir()) == []


def test_closed_disk_store_raises():
    store = ActivationStore(tier="disk")
    store.put(0, array(10))
    store.close()
    assert len(store) == 0
    with pytest.raises(ArgumentError, match="this store is closed"):
        store.put(1, array(10))


def test_freed_disk_space_is_reused():
    with ActivationStore(tier="disk") as store:
        for key, size in enumerate([100, 200, 300, 400]):
            store.put(key, array(size, key))
        store.remove(1)
        store.remove(2)  # frees 500 adjacent bytes
        store.put("x", array(450, 9))
        assert store.scratch.file_bytes == 1000
        assert [int(store.get(key)[0]) for key in (0, 3, "x")] == [0, 3, 9]
        store.clear()
        assert store.scratch.file_bytes == 0


def test_full_disk_leaves_stored_data_intact(tmp_path):
    """Uses the operating system's limit on the size of a file."""
    resource = pytest.importorskip("resource")
    code = f"""
import resource, signal, numpy as np, pytest
from lowtide import DiskFullError
from lowtide.chain import ActivationStore
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
store = ActivationStore(tier="disk", directory={str(tmp_path)!r})
store.put("a", np.full(60_000, 1, dtype="uint8"))
for key in ("a", "b"):
    with pytest.raises(DiskFullError) as caught:
        store.put(key, [np.zeros(30_000, dtype="uint8"), np.full(20_000, 2, dtype="uint8")])
assert "Stored data is intact" in str(caught.value), caught.value
assert store.keys() == ("a",) and store.bytes_stored == 60_000 and store.scratch.file_bytes == 60_000
assert (store.get("a") == 1).all()
store.put("c", np.full(40_000, 3, dtype="uint8"))
assert (store.get("c") == 3).all()
print("intact")
"""
    del resource
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.stdout == "intact\n", ran.stderr


def test_disk_full_error_is_a_lowtide_error_and_an_os_error():
    assert issubclass(DiskFullError, LowtideError)
    assert issubclass(DiskFullError, OSError)
    assert DiskFullError(errno.ENOSPC, "x").errno == errno.ENOSPC


def test_store_does_not_use_pickle(monkeypatch):
    import pickle

    def refuse(*args, **kwargs):
        raise AssertionError("pickled")

    for name in ("dump", "dumps", "load", "loads"):
        monkeypatch.setattr(pickle, name, refuse)
    with ActivationStore(tier="disk", precision="int8") as store:
        store.put(0, {"i": np.arange(3), "f": np.ones((4, 200))})
        assert store.get(0)["i"].tolist() == [0, 1, 2]
        assert np.allclose(store.get(0)["f"], 1, rtol=1e-5)
