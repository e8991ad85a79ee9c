"""Rows behind a GPU: runs on a simulated device, and on a real one where there is one, equal resident ones.

The programs of the simulated device are among those of tests/tables/test_placement_exact.py; here is the proof that
they can fail, and what they do not reach.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import simulated
import torch
from campaigns import numbers
from placed import Case, draw, placed_run, reconcile, resident_run, same

from stoker import Batch, Cached, ConfigError, EmbeddingTables, TableConfig, optim, stage
from stoker.base.errors import HomeError
from stoker.ops import Bags
from stoker.tables.links import cuda_link
from stoker.tables.links.cuda_link import CudaLink
from stoker.tables.storage import Rows
from stoker.tables.stores.log_home import LogHome


@pytest.fixture(autouse=True)
def one_thread():
    """The cases are tiny: threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def compare(seed: int, **settings) -> bool:
    case = simulated.draw_case(seed)
    return same(resident_run(case, simulated.log_outputs), simulated.run(case, **settings))


def without_fence(storage):
    storage._link.settle = lambda plan: None


def with_buffers_given_back_at_once(storage):
    take_off = storage._link._take_off

    def altered(slots):
        buffer = take_off(slots)
        buffer.busy = False
        return buffer

    storage._link._take_off = altered


def counting_unheld_rows_as_held(storage):
    if not isinstance(storage.home, LogHome):  # whose index says where rows are
        storage.home.stored.words.fill(-1)


MUTATIONS = {
    "rows leave before they are updated": {"ignored": {("outgoing", "compute")}},
    "rows come before the old ones are read": {"ignored": {("incoming", "compute")}},
    "rows come before the old ones left": {"ignored": {("incoming", "outgoing")}},
    "rows are used before they came": {"ignored": {("compute", "incoming")}},
    "a buffer is filled again before it was copied": {"ignored": {("host", "incoming")}},
    "rows are stored before they arrived": {"ignored": {("host", "outgoing"), ("worker", "outgoing")}},
    "a buffer is used again before it was stored": {"alter": with_buffers_given_back_at_once},
    "memory is given away while a kernel uses it": {"ignored": {("memory", "compute")}},
    "a fetch overtakes a writeback": {"alter": without_fence},
    "rows that were never stored are read": {"alter": counting_unheld_rows_as_held},
}


# Cases that noticed once come first.
NOTICED = {
    "rows come before the old ones are read": (3, 20, 40),
    "a buffer is used again before it was stored": (25, 32, 51),
    "a fetch overtakes a writeback": (20, 24, 45),
}


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_cases_notice_a_missing_wait(mutation):
    """The proof that the cases above can fail: each safeguard is removed in turn."""
    wrong = 0
    for seed in dict.fromkeys([*NOTICED.get(mutation, ()), *range(400)]):
        try:
            wrong += not compare(seed, **MUTATIONS[mutation])
        except (AssertionError, IndexError, RuntimeError, KeyError):
            wrong += 1
        if wrong > 2:
            return
    pytest.fail(f"went unnoticed: {mutation}")


def small(placement=None, *, rows=400, **options):
    table = TableConfig(name="t", num_embeddings=rows, embedding_dim=4)
    return EmbeddingTables([table], optimizer=optim.Adagrad(lr=0.1), placement=placement, **options)


def ids_of(count, rows=400, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [(rows * torch.rand(16, 1, generator=generator) ** 2).long() for _ in range(count)]


def behind_device(seed, **settings):
    """Tables behind a simulated device that runs ahead and lags at random, and their storage."""
    tables = small(Cached(slots=40))
    device = simulated.SimulatedStreams(np.random.default_rng(seed))
    storage = tables.groups[0].storage
    simulated.use(storage, device, **settings)
    simulated.defer(tables, device)
    return tables, storage


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_a_writeback_that_failed_is_kept_and_its_buffer_is_free_again(seed, monkeypatch):
    tables, storage = behind_device(seed, buffers=1, buffer_bytes=100)
    resident, store, full, done = small(), storage.home.store, threading.Event(), 0

    def maybe(*given):
        if full.is_set():
            raise HomeError("no space left on the device")
        store(*given)

    monkeypatch.setattr(storage.home, "store", maybe)
    for step, ids in enumerate(ids_of(40)):
        if step == 10:
            full.set()
        try:
            out = tables(ids)
        except HomeError:
            break
        out.backward(torch.ones_like(out))
        there = resident(ids)
        there.backward(torch.ones_like(there))
        done += 1
    assert 10 <= done < 40
    assert storage._link._failed
    full.clear()
    storage._broken = None  # the failed plan evicted nothing that was not kept by the link
    storage._link.drain()
    assert not storage._link._failed
    inside = set(storage.residency.row_in_slot.tolist())
    outside = [row for row in range(400) if row not in inside]
    assert torch.equal(storage.home.read(0, 400).weight[outside], resident.rows("t")[outside])


def test_rows_that_a_failed_device_did_not_deliver_are_never_stored(monkeypatch):
    tables, storage = behind_device(3, buffers=1)
    link = storage._link
    for ids in ids_of(12):
        out = tables(ids)
        out.backward(torch.ones_like(out))
    link.drain()
    stored = []
    monkeypatch.setattr(storage.home, "store", lambda *given: stored.append(given))
    slots = storage.residency.row_in_slot >= 0
    job = simulated_job(link, slots)

    def fail():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(job.end, "synchronize", fail)
    link._post(job)
    for _ in range(2):  # a second attempt must not store what the buffer holds by then
        with pytest.raises(RuntimeError, match="illegal memory access"):
            link.drain()
    assert not stored
    assert not link._leaving[0].busy


def simulated_job(link, slots):
    from stoker.tables.links.cuda_link import _BufferedWriteback

    places = np.flatnonzero(slots)[:3]
    return _BufferedWriteback(0, places, link._take_off(places))


@pytest.mark.slow
@pytest.mark.parametrize("seed", numbers(20))
def test_rows_written_in_the_middle_of_training_are_those_that_it_goes_on_with(seed):
    tables, _ = behind_device(seed, buffers=2, buffer_bytes=300)
    resident, random = small(), np.random.default_rng(seed)
    grad = torch.ones(16, 1, 4)
    for step, ids in enumerate(ids_of(30, seed=seed)):
        out, there = tables(ids), resident(ids)
        if step % 3 == 0:
            start, count = int(random.integers(0, 350)), int(random.integers(1, 50))
            new = Rows(torch.randn(count, 4), {"sum": torch.rand(count, 4)})
            tables.write("t", start, new)
            resident.write("t", start, new)
        out.backward(grad)
        there.backward(grad)
        if step % 7 == 0:
            assert torch.equal(tables.rows("t"), resident.rows("t"))
    for (_, one), (_, other) in zip(tables.read("t"), resident.read("t"), strict=True):
        assert torch.equal(one.weight, other.weight)
        assert torch.equal(one.state["sum"], other.state["sum"])
    tables.close()


@pytest.mark.parametrize("seed", range(5))
def test_gathered_rows_are_read_before_others_enter_their_slots(seed, monkeypatch):
    tables, storage = behind_device(seed, buffers=2)
    device, expected, found = storage._link.streams, small().rows("t"), []

    class Late:
        """Slots that the compute stream reads when the device gets to it, as those of a GPU are."""

        def __getitem__(self, at):
            read = storage.home.empty(len(at))
            device.queue(device.compute, lambda: read.weight.copy_(storage.weight[at]))
            return read

    for ids in ids_of(10, seed=seed):
        tables(ids)
        resident = storage.residency.row_in_slot
        rows = resident[resident >= 0]
        with monkeypatch.context() as patch:
            patch.setattr(type(storage), "slots", Late())
            found.append((rows, storage.gather(rows).weight))
    storage._link.finish()
    for rows, weight in found:
        assert torch.equal(weight, expected[rows])


def test_a_staged_batch_is_handed_out_while_others_are_brought():
    """Training must not wait for the rows of later batches."""
    tables = small(Cached(slots=100))
    storage = tables.groups[0].storage
    lookups = Bags(torch.arange(5).view(-1, 1))
    queue = storage.queue()
    queue.announce(lookups)
    lease = queue.stage()
    entered, leave = threading.Event(), threading.Event()
    fetch = storage._link.fetch

    def slow(rows, slots):
        entered.set()
        leave.wait(30)
        fetch(rows, slots)

    storage._link.fetch = slow
    queue.announce(Bags(torch.arange(50, 60).view(-1, 1)))
    thread = threading.Thread(target=queue.stage)
    thread.start()
    try:
        assert entered.wait(30)
        other = threading.Thread(target=storage.hand_out, args=(lease,))
        other.start()
        other.join(30)
        assert not other.is_alive()
    finally:
        leave.set()
        thread.join()


def test_direct_reading_needs_a_home_that_the_gpu_can_read():
    storage = small(Cached(slots=40)).groups[0].storage
    device = simulated.SimulatedStreams(np.random.default_rng(0))
    with pytest.raises(ConfigError, match="pin=True"):
        simulated.use(storage, device, reading="direct")
    simulated.use(storage, device, reading="auto")
    assert storage._link.reading == "staged"


@pytest.mark.parametrize("faster", ["staged", "direct"])
def test_the_faster_way_of_reading_is_chosen(faster, monkeypatch):
    storage = small(Cached(slots=40)).groups[0].storage
    storage.home.pinned = True
    device = simulated.SimulatedStreams(np.random.default_rng(0))
    times, fill = cuda_link._times, storage.home.stored.words.copy()

    def measured(home, streams):
        seconds = times(home, streams)
        assert seconds.keys() == {"staged", "direct"}
        assert min(seconds.values()) > 0
        return {way: float(way != faster) for way in seconds}

    monkeypatch.setattr(cuda_link, "_times", measured)
    simulated.use(storage, device, reading="auto")
    assert storage._link.reading == faster
    assert (storage.home.stored.words == fill).all()  # measuring stores nothing

    def failing(*given):
        raise RuntimeError("pointer argument cannot be accessed")

    monkeypatch.setattr(cuda_link, "_times", failing)
    with pytest.warns(UserWarning, match="cannot be accessed.*staged"):
        simulated.use(storage, device, reading="auto")
    assert storage._link.reading == "staged"


@pytest.mark.parametrize("home", ["memory", "file"])
def test_rows_behind_a_gpu_move_on_streams(home, monkeypatch, tmp_path):
    """Which link and home a strategy gets; no GPU is needed to ask."""
    from stoker.ops.space import make_space
    from stoker.tables.slots import slotted

    made = {}

    def keep(home, space, **given):
        made.update(given, home=home)
        return SimpleNamespace()

    monkeypatch.setattr(slotted, "SlottedRows", keep)
    table = TableConfig(name="t", num_embeddings=50, embedding_dim=4)
    space = make_space(["t"], [50], [["t"]], ["t"])
    strategy = Cached(slots=5, home=home, path=str(tmp_path) if home == "file" else None)
    slotted.make_slotted(strategy, [table], space, 0, {}, torch.device("cuda"))
    assert made["link"] is CudaLink
    assert made["home"].kind == home
    assert made["home"].pinned == (home == "memory" and torch.cuda.is_available())
    made["home"].close()
    slotted.make_slotted(replace(strategy, pin=False), [table], space, 0, {}, torch.device("cuda"))
    assert not made["home"].pinned
    made["home"].close()


@pytest.mark.slow
@pytest.mark.parametrize(("moved", "bulk"), [(3, 900), (40, 500), (40, 3000), (300, 900)])
def test_buffers_take_what_a_plan_counts_for_them(moved, bulk, monkeypatch):
    monkeypatch.setattr(cuda_link, "_BUFFER", 3000)
    monkeypatch.setattr(cuda_link, "_BULK", bulk)
    storage = small(Cached(slots=350)).groups[0].storage
    simulated.use(storage, simulated.SimulatedStreams(np.random.default_rng(0)), buffer_bytes=3000)
    link = storage._link
    for count in range(1, moved + 1):  # so that room doubles
        for _ in range(5):  # every buffer has its turn
            link.fetch(np.arange(count), np.arange(count))
            link.write_back(0, np.arange(count), np.arange(count))
    for _ in range(5):
        link.store(np.arange(350), np.arange(350))
    taken = {"host": 0, "device": 0}
    for buffer in (*link._arriving, *link._leaving):
        for side in taken:
            held = getattr(buffer, f"_{side}")
            tensors = [held.weight, *held.state.values(), getattr(buffer, f"_{side}_names")]
            taken[side] += sum(tensor.nbytes for tensor in tensors)
    counted = cuda_link.staging_bytes(storage.home.row_bytes, moved)
    assert max(taken.values()) <= counted <= 2 * min(taken.values())


def test_only_homes_in_memory_can_be_pinned():
    with pytest.raises(ConfigError, match=r"pin=True.*home='file'"):
        Cached(slots=5, home="file", pin=True)


on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none here")


class Dawdling:
    """A back end whose kernels begin late, so that copies have every chance to overtake them."""

    def __init__(self, inner, seed):
        self.inner, self.random = inner, np.random.default_rng(seed)

    def __getattr__(self, name):
        method = getattr(self.inner, name)
        if name not in ("lookup", "update", "weight_gradient"):
            return method

        def late(*given):
            torch.cuda._sleep(int(self.random.choice([0, 10_000, 1_000_000])))
            return method(*given)

        return late


class LateStreams:
    """Makes a link's copies begin late."""

    def __init__(self, link, seed):
        self.random, queue = np.random.default_rng(seed), link.streams.queue

        def late(stream, work):
            def slowly():
                torch.cuda._sleep(int(self.random.choice([0, 0, 10_000, 1_000_000])))
                work()

            queue(stream, slowly)

        link.streams.queue = late


def gpu_case(seed: int) -> Case:
    case = draw(seed)
    random = np.random.default_rng(seed + 2)
    strategy = case.strategy
    if strategy.home == "memory":
        strategy = replace(strategy, pin=bool(random.random() < 0.7))
    return reconcile(
        replace(
            case, strategy=strategy, device="cuda", slow=False, background=bool(random.random() < 0.6),
            peeks={step for step in range(14) if random.random() < 0.4},
        )
    )  # fmt: skip


def gpu_run(case: Case):
    random = np.random.default_rng(case.seed + 3)

    def change(storage):
        pinned = storage.home.pinned
        settings = {
            "reading": "direct" if pinned and random.random() < 0.7 else "staged",
            "buffer_bytes": storage.home.row_bytes * int(random.integers(1, 20)),
            "buffers": int(random.integers(1, 4)),
        }
        storage.move_by(CudaLink(storage.home, storage.transit, storage.stats, **settings))
        LateStreams(storage._link, case.seed)

    def watch(tables):
        for group in tables.groups:
            group.backend = Dawdling(group.backend, case.seed)
        return None

    return placed_run(case, change, watch)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("block", range(10))
def test_a_run_on_a_gpu_equals_the_resident_one(block):
    for seed in range(block * 20, block * 20 + 20):
        case = gpu_case(seed)
        assert same(resident_run(case), gpu_run(case)), f"seed {seed}: {case.strategy}"


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("pin", [False, True])
def test_long_training_with_large_batches_on_a_gpu_equals_the_resident_one(dtype, pin):
    """Real copies of megabytes beside real kernels; every way of reading."""
    generator = torch.Generator().manual_seed(0)
    batches = [
        Batch(
            dense=torch.zeros(4096, 1), ids=(200_000 * torch.rand(4096, 8, generator=generator) ** 4).long(), step=step
        )
        for step in range(60)
    ]
    config = TableConfig(
        name="t", num_embeddings=200_000, embedding_dim=64, features=tuple("abcdefgh"), dtype=dtype
    )  # fmt: skip
    found = []
    for placement in (None, *([Cached(fraction=0.25, pin=pin)] * 2)):
        tables = EmbeddingTables([config], optimizer=optim.Adagrad(lr=0.1), placement=placement, device="cuda")
        storage = tables.groups[0].storage
        if placement is not None:
            reading = "direct" if pin and len(found) == 1 else "staged"
            storage.move_by(CudaLink(storage.home, storage.transit, storage.stats, reading=reading))
        losses = []
        for batch in stage(batches, tables, lookahead=8, in_flight=3):
            loss = tables(batch.ids.to("cuda")).square().mean(dim=(1, 2)).sum()
            loss.backward()
            losses.append(loss.detach())
        found.append((torch.stack(losses).cpu(), tables.rows("t").cpu()))
        tables.close()
    for losses, rows in found[1:]:
        assert torch.equal(losses, found[0][0])
        assert torch.equal(rows, found[0][1])
