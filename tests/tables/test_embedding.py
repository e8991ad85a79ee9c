"""EmbeddingTables as a user meets them: a replacement for nn.EmbeddingBag(sparse=True) and its optimizer."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from campaigns import scaled
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import stoker
from stoker.base.errors import ConfigError

BACKENDS = ["reference", "cpu"]


def integer_rows(tables: stoker.EmbeddingTables, seed: int) -> dict[str, torch.Tensor]:
    """Fill every table with small whole numbers, so that all sums are exact; returns copies."""
    generator = torch.Generator().manual_seed(seed)
    filled = {}
    for table in tables.tables:
        for start, rows in tables.read(table.name):
            rows.weight.copy_(torch.randint(-8, 8, rows.weight.shape, generator=generator))
            tables.write(table.name, start, rows)
        filled[table.name] = tables.rows(table.name)
    return filled


@pytest.mark.parametrize("backend", BACKENDS)
@settings(deadline=None, max_examples=scaled(40))
@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    batch=st.integers(1, 20),
    jagged=st.booleans(),
    steps=st.integers(1, 4),
    seed=st.integers(0, 2**20),
)
def test_equals_embedding_bags_with_sgd_exactly_on_integers(backend, sizes, batch, jagged, steps, seed):
    generator = torch.Generator().manual_seed(seed)
    tables = stoker.EmbeddingTables(
        [stoker.TableConfig(name=f"t{i}", num_embeddings=n, embedding_dim=4) for i, n in enumerate(sizes)],
        optimizer=stoker.SGD(lr=1.0),
        backend=backend,
    )
    start = integer_rows(tables, seed)
    bags = [
        nn.EmbeddingBag.from_pretrained(w, freeze=False, mode="sum", include_last_offset=True) for w in start.values()
    ]
    textbook = torch.optim.SGD([bag.weight for bag in bags], lr=1.0)
    for _ in range(steps):
        lengths = (
            torch.randint(0, 4, (batch, len(sizes)), generator=generator)
            if jagged
            else torch.ones(batch, len(sizes)).long()
        )
        columns = [torch.randint(0, n, (int(lengths[:, i].sum()),), generator=generator) for i, n in enumerate(sizes)]
        grad = torch.randint(-3, 4, (batch, len(sizes), 4), generator=generator).float()
        ends = [torch.cat([torch.zeros(1, dtype=torch.int64), lengths[:, i].cumsum(0)]) for i in range(len(sizes))]
        expected = torch.stack([bag(ids, off) for bag, ids, off in zip(bags, columns, ends, strict=True)], 1)
        expected.backward(grad)
        textbook.step()
        textbook.zero_grad()
        if jagged:
            flat = [columns[i][ends[i][b] : ends[i][b + 1]] for b in range(batch) for i in range(len(sizes))]
            offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.reshape(-1).cumsum(0)])
            out = tables(torch.cat(flat), offsets)
        else:
            out = tables(torch.stack(columns, 1))
        assert torch.equal(out, expected)
        out.backward(grad)
    for table, bag in zip(tables.tables, bags, strict=True):
        assert torch.equal(tables.rows(table.name), bag.weight)


OPTIMIZERS = {
    "adagrad": (stoker.Adagrad(lr=0.1), lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-8)),
    "adam": (stoker.Adam(lr=0.1, eps=1e-16), lambda p: torch.optim.SparseAdam(p, lr=0.1, eps=1e-16)),
    "sgd": (stoker.SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
}


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", sorted(OPTIMIZERS))
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_trains_like_embedding_bag_with_a_sparse_optimizer(backend, kind, mode):
    torch.manual_seed(0)
    own, make = OPTIMIZERS[kind]
    tables = stoker.EmbeddingTables(
        [stoker.TableConfig(name="t", num_embeddings=50, embedding_dim=8, pooling=mode)],
        optimizer=own,
        backend=backend,
    )
    bag = nn.EmbeddingBag.from_pretrained(
        tables.rows("t"), freeze=False, mode=mode, sparse=True, include_last_offset=True
    )
    textbook = make(list(bag.parameters()))
    for _ in range(8):
        lengths = torch.randint(0, 5, (10,))
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        ids = torch.randint(0, 50, (int(lengths.sum()),))
        target = torch.randn(10, 8)
        for out in (tables(ids, offsets)[:, 0], bag(ids, offsets)):
            ((out - target) ** 2).sum().backward()
        textbook.step()
        textbook.zero_grad()
    torch.testing.assert_close(tables.rows("t"), bag.weight.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_per_sample_weights_get_their_gradient(backend):
    torch.manual_seed(0)
    tables = stoker.EmbeddingTables(
        [stoker.TableConfig(name="t", num_embeddings=20, embedding_dim=8)],
        optimizer=stoker.SGD(lr=0.1),
        backend=backend,
    )
    bag = nn.EmbeddingBag.from_pretrained(tables.rows("t"), freeze=False, mode="sum", include_last_offset=True)
    ids, offsets = torch.randint(0, 20, (9,)), torch.tensor([0, 2, 2, 9])
    ours, theirs = (torch.linspace(-1, 1, 9).requires_grad_() for _ in range(2))
    grad = torch.randn(3, 8)
    tables(ids, offsets, ours)[:, 0].backward(grad)
    bag(ids, offsets, per_sample_weights=theirs).backward(grad)
    torch.testing.assert_close(ours.grad, theirs.grad)
    torch.testing.assert_close(tables.rows("t"), bag.weight.detach() - 0.1 * bag.weight.grad)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_mixed_widths_poolings_and_types_in_feature_order(backend):
    torch.manual_seed(0)
    configs = [
        stoker.TableConfig(name="user", num_embeddings=30, embedding_dim=8),
        stoker.TableConfig(
            name="item", num_embeddings=40, embedding_dim=4, features=("target", "history"), pooling="mean"
        ),
        stoker.TableConfig(name="shop", num_embeddings=50, embedding_dim=8, dtype="bfloat16"),
    ]
    order = ["history", "user", "shop", "target"]
    tables = stoker.EmbeddingTables(configs, optimizer=stoker.SGD(lr=0.5), features=order, backend=backend)
    assert len(tables.groups) == 3
    lengths = torch.tensor([2, 1, 1, 1, 0, 1, 1, 1])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = torch.tensor([3, 5, 7, 9, 3, 1, 2, 4])
    out = tables(ids, offsets)
    assert out.shape == (2, 4 + 8 + 8 + 4)
    item, user, shop = (tables.rows(name).float() for name in ("item", "user", "shop"))
    torch.testing.assert_close(out[0], torch.cat([(item[3] + item[5]) / 2, user[7], shop[9], item[3]]))
    torch.testing.assert_close(out[1], torch.cat([torch.zeros(4), user[1], shop[2], item[4]]))
    out.backward(torch.ones_like(out))
    torch.testing.assert_close(tables.rows("item")[3], item[3] - 0.5 * (0.5 + 1.0))
    torch.testing.assert_close(tables.rows("user")[7], user[7] - 0.5)
    assert torch.equal(tables.rows("user")[8], user[8])


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(
    jagged=st.booleans(),
    threads=st.integers(1, 3),
    loop=st.sampled_from(["plain", "two lookups", "accumulated", "frozen", "optimizer", "one batch"]),
    seed=st.integers(0, 2**20),
)
def test_several_widths_at_once_equal_the_reference_to_the_bit(jagged, threads, loop, seed):
    generator = torch.Generator().manual_seed(seed)
    configs = [
        stoker.TableConfig(name="a", num_embeddings=300, embedding_dim=4),
        stoker.TableConfig(name="b", num_embeddings=40, embedding_dim=8, features=("b0", "b1")),
        stoker.TableConfig(name="c", num_embeddings=9, embedding_dim=4, pooling="mean"),
    ]
    given = []
    for _ in range(2 if loop != "one batch" else 1):
        lengths = torch.randint(0, 4, (5, 4), generator=generator) if jagged else torch.ones(5, 4).long()
        limits = torch.tensor([40, 300, 9, 40]).repeat(5).repeat_interleave(lengths.view(-1))
        ids = (torch.rand(len(limits), generator=generator) ** 3 * limits).long()
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.view(-1).cumsum(0)])
        given.append((ids, offsets) if jagged else (ids.view(5, 4),))
    grads = torch.randn(2, 5, 24, generator=generator)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    results = []
    for backend in BACKENDS:
        tables = stoker.EmbeddingTables(
            configs, optimizer=stoker.Adam(lr=0.1), features=["b0", "a", "c", "b1"], backend=backend
        )
        assert (tables._joint is None) == (backend == "reference")
        rows = tables.as_optimizer() if loop == "optimizer" else None
        outs = [tables(*each) for each in given]
        if loop == "frozen":
            tables.freeze("b")
        if loop == "two lookups":
            torch.cat(outs).backward(grads.view(10, 24))
        elif loop == "accumulated":
            with tables.accumulate():
                [out.backward(grad) for out, grad in zip(outs, grads, strict=True)]
        else:
            [out.backward(grad) for out, grad in zip(outs, grads, strict=False)]
        if rows is not None:
            rows.step()
        state = tables.state_dict()
        results.append([*outs, *(tables.rows(name) for name in "abc"), *map(torch.as_tensor, state.values())])
        assert tables.tick == (2 if loop in ("plain", "frozen") else 1)
    torch.set_num_threads(before)
    for expected, got in zip(*results, strict=True):
        assert torch.equal(expected, got)


def test_an_optimizer_of_another_kind_begins_with_its_own_state():
    """Also where one kernel steps tables of several widths."""
    tables = [stoker.TableConfig(name=f"t{dim}", num_embeddings=4, embedding_dim=dim) for dim in (4, 8)]
    found = stoker.EmbeddingTables(tables, optimizer=stoker.SGD(lr=0.1))
    expected = stoker.EmbeddingTables(tables, optimizer=stoker.Adam(lr=0.1))
    found.optimizer = expected.optimizer
    for _ in range(3):
        for each in (found, expected):
            each(torch.tensor([[1, 2], [1, 3]])).square().sum().backward()
    for name, value in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], value), name


@pytest.mark.parametrize("placed", ["t4", "t8"])
@pytest.mark.parametrize("wrong", [stoker.Adam(lr=0.1), stoker.SGD(lr=0.1, cow_clip=(1.0, 1e-5))])
def test_an_optimizer_that_is_refused_changes_no_group(placed, wrong):
    """One group keeps its rows behind a cache or is a tensor train, the other could change its optimizer."""
    tables = [stoker.TableConfig(name=f"t{dim}", num_embeddings=40, embedding_dim=dim) for dim in (4, 8)]
    where = stoker.Cached(slots=20) if wrong.kind == "adam" else stoker.TensorTrain(rank=2)
    found = stoker.EmbeddingTables(tables, optimizer=stoker.SGD(lr=0.5), placement={placed: where})
    with pytest.raises((stoker.ConfigError, stoker.StokerError)):
        found.optimizer = wrong
    assert [group.optimizer for group in found.groups] == [stoker.SGD(lr=0.5)] * 2


@pytest.mark.parametrize("dims", [(4, 4), (4, 8)], ids=["one width", "two widths"])
@pytest.mark.parametrize("strided", [False, True], ids=["whole", "strided"])
def test_memory_of_a_gradient_remains_that_of_torch(dims, strided):
    """Else FSDP could not resize it, and a gradient of the next step in the same memory would be copied first."""
    tables = stoker.EmbeddingTables(
        [stoker.TableConfig(name=f"t{n}", num_embeddings=9, embedding_dim=dim) for n, dim in enumerate(dims)],
        optimizer=stoker.SGD(lr=0.1),
    )
    found = tables(torch.tensor([[1, 2], [3, 4]]))
    grad = torch.ones(2, 2 * found[0].numel()).view(2, *found.shape[1:-1], -1)
    grad = grad[..., : found.shape[-1]] if strided else grad[..., : found.shape[-1]].contiguous()
    found.backward(grad)
    assert tables.tick == 1
    assert grad.untyped_storage().resizable()


def test_offsets_without_any_entry_are_refused():
    tables = stoker.EmbeddingTables(
        [stoker.TableConfig(name="t", num_embeddings=4, embedding_dim=2)], optimizer=stoker.SGD(lr=1.0),
        include_last_offset=True,
    )  # fmt: skip
    nothing = torch.zeros(0, dtype=torch.int64)
    with pytest.raises(ValueError, match="offsets have 0 entries"):
        tables(nothing, nothing)


def test_writes_stay_within_their_table():
    tables = stoker.EmbeddingTables(
        [stoker.TableConfig(name=name, num_embeddings=4, embedding_dim=2) for name in "ab"],
        optimizer=stoker.SGD(lr=1.0),
    )
    before = tables.rows("a")
    for start, count in ((-1, 1), (3, 2), (-4, 4)):
        with pytest.raises(IndexError, match="do not fit table 'b' of 4 rows"):
            tables.write("b", start, torch.zeros(count, 2))
    assert torch.equal(tables.rows("a"), before)


def test_one_hot_of_some_features_only():
    configs = [stoker.TableConfig(name=f"t{i}", num_embeddings=9, embedding_dim=4 + 4 * (i % 2)) for i in range(4)]
    tables = stoker.EmbeddingTables(configs, optimizer=stoker.SGD(lr=1.0))
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    expected = torch.cat([tables.rows(f"t{i}")[ids[:, i]] for i in range(4)], 1)
    assert torch.equal(tables(ids), expected)


def test_same_start_whatever_the_grouping_order_or_back_end():
    def build(names: list[str], **options: object) -> stoker.EmbeddingTables:
        configs = [stoker.TableConfig(name=name, num_embeddings=100, embedding_dim=16) for name in names]
        return stoker.EmbeddingTables(configs, optimizer=stoker.SGD(lr=0.1), **options)

    first, second = build(["a", "b", "c"]), build(["c", "a"], backend="reference")
    assert torch.equal(first.rows("a"), second.rows("a"))
    assert torch.equal(first.rows("c"), second.rows("c"))
    assert not torch.equal(first.rows("a"), first.rows("b"))
    assert not torch.equal(first.rows("a"), build(["a"], seed=1).rows("a"))
    assert first.rows("a").abs().max() <= 0.1  # sqrt(1 / 100)


def test_bfloat16_training_is_seeded_and_unbiased():
    def run(seed: int) -> torch.Tensor:
        tables = stoker.EmbeddingTables(
            [stoker.TableConfig(name="t", num_embeddings=4000, embedding_dim=8, dtype="bfloat16", init_scale=0.0)],
            optimizer=stoker.SGD(lr=1.0),
            seed=seed,
        )
        for value in [1.0] + [2.0**-12] * 16:  # each small step is far below half an ulp at 1.0
            tables(torch.arange(4000).view(-1, 1)).backward(torch.full((4000, 1, 8), -value))
        return tables.rows("t").float()

    first = run(0)
    assert torch.equal(first, run(0))
    assert not torch.equal(first, run(1))
    assert abs(first.mean().item() - (1 + 16 * 2.0**-12)) < 2e-4  # rounding to nearest would leave exactly 1


@pytest.mark.parametrize("optimizer", [stoker.Adam(lr=0.1), stoker.RowWiseAdagrad(lr=0.1)], ids=["adam", "rowwise"])
def test_state_dict_carries_rows_state_and_step(optimizer):
    def build(seed: int) -> nn.Module:
        configs = [stoker.TableConfig(name="t", num_embeddings=20, embedding_dim=4)]
        return nn.ModuleDict({"tables": stoker.EmbeddingTables(configs, optimizer=optimizer, seed=seed)})

    def step(model: nn.Module, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        model["tables"](torch.randint(0, 20, (6, 1), generator=generator)).square().sum().backward()

    first = build(0)
    step(first, 1)
    saved = copy.deepcopy(first.state_dict())
    second = build(9)
    assert second.load_state_dict(saved).missing_keys == []
    for model in (first, second):
        step(model, 2)
    for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    del saved["tables.t.weight"]
    with pytest.raises(RuntimeError, match=r"tables\.t\.weight"):
        build(0).load_state_dict(saved)


def through_pickle(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.slow
@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle], ids=["deepcopy", "torch.save"])
@pytest.mark.parametrize(
    "placement", [None, {"a": stoker.Cached(slots=8), "b": stoker.Device()}], ids=["device", "cached"]
)
def test_copies_are_whole_and_their_own(copied, placement):
    """As people do for averages of weights, or with torch.save of a whole model."""
    configs = [
        stoker.TableConfig(name="a", num_embeddings=30, embedding_dim=4),
        stoker.TableConfig(name="b", num_embeddings=5, embedding_dim=4, dtype="bfloat16"),
        stoker.TableConfig(name="c", num_embeddings=7, embedding_dim=2),
    ]
    optimizer = stoker.Adam(lr=0.1, schedule=stoker.StepDecay(every=2, gamma=0.5))
    tables = stoker.EmbeddingTables(configs, optimizer=optimizer, seed=3, features=["c", "a", "b"], placement=placement)
    model = nn.ModuleDict({"tables": tables, "head": nn.Linear(10, 1)}).eval()

    def step(model: nn.Module, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.stack([torch.randint(0, n, (6,), generator=generator) for n in (7, 30, 5)], dim=1)
        model["tables"](ids).square().sum().backward()

    step(model.train(), 1)
    model.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    other = copied(model)
    assert not other.training
    assert [group.strategy for group in other["tables"].groups] == [group.strategy for group in tables.groups]
    step(other.train(), 2)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    step(model.train(), 2)
    first, second = model.state_dict(), other.state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_evaluation_changes_nothing():
    tables = stoker.EmbeddingTables(
        [stoker.TableConfig(name="t", num_embeddings=20, embedding_dim=4)], optimizer=stoker.Adam(lr=0.1)
    )
    before = tables.rows("t")
    with torch.no_grad():
        assert not tables(torch.tensor([[3]])).requires_grad
    tables(torch.tensor([[3]]))  # a forward without backward
    assert tables.tick == 0
    assert torch.equal(before, tables.rows("t"))


@pytest.mark.slow
def test_schedule_follows_the_number_of_updates():
    tables = stoker.EmbeddingTables(
        [stoker.TableConfig(name="t", num_embeddings=2, embedding_dim=1, init_scale=0.0)],
        optimizer=stoker.SGD(lr=1.0, schedule=stoker.StepDecay(every=2, gamma=0.5, warmup=2)),
    )
    moved = []
    for _ in range(6):
        before = tables.rows("t")[0].item()
        tables(torch.tensor([[0]])).sum().backward()
        moved.append(before - tables.rows("t")[0].item())
    assert moved == [0.5, 1.0, 1.0, 1.0, 0.5, 0.5]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(3, 2).long(),), r"shape \(3, 2\).*must be \[B, 3\]"),
        ((torch.zeros(3, 3),), "int32 or int64"),
        ((torch.zeros(4).long(), torch.tensor([0, 1, 2])), "multiple of 3"),
        (
            (torch.zeros(4).long(), torch.tensor([0, 1, 2, 3])),
            "the number of ids, 4.*include_last_offset=False",
        ),
        ((torch.zeros(4).long(), torch.tensor([0, 3, 2, 4])), "rise from 0"),
        ((torch.zeros(1, 3).long(), None, torch.ones(2)), "2 per-sample weights for 3 ids"),
    ],
)
def test_wrong_shapes_are_refused(arguments, message):
    configs = [stoker.TableConfig(name=f"t{i}", num_embeddings=5, embedding_dim=2) for i in range(3)]
    tables = stoker.EmbeddingTables(configs, optimizer=stoker.SGD(lr=0.1))
    with pytest.raises(ValueError, match=message):
        tables(*arguments)


def test_wrong_configurations_are_refused():
    table = stoker.TableConfig(name="t", num_embeddings=5, embedding_dim=2)
    with pytest.raises(ConfigError, match="at least one"):
        stoker.EmbeddingTables([], optimizer=stoker.SGD(lr=0.1))
    with pytest.raises(ConfigError, match=r"stoker.RowWiseAdagrad"):
        stoker.EmbeddingTables([table], optimizer=torch.optim.SGD)
    with pytest.raises(ConfigError, match=r"\['t'\] are named twice"):
        stoker.EmbeddingTables([table, table], optimizer=stoker.SGD(lr=0.1))
    with pytest.raises(ConfigError, match="num_embeddings=0"):
        stoker.TableConfig(name="t", num_embeddings=0, embedding_dim=2)
    with pytest.raises(ConfigError, match="must be finite"):
        stoker.SGD(lr=-1.0)
    with pytest.raises(ConfigError, match="in the batch or in the tables"):
        stoker.EmbeddingTables([table], optimizer=stoker.SGD(lr=0.1), features=["u"])
    mean = stoker.TableConfig(name="t", num_embeddings=5, embedding_dim=2, pooling="mean")
    with pytest.raises(ValueError, match="sum pooling"):
        stoker.EmbeddingTables([mean], optimizer=stoker.SGD(lr=0.1))(torch.zeros(1, 1).long(), None, torch.ones(1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_keep_their_dtype_and_say_so(dtype: str):
    tables = stoker.EmbeddingTables(
        [stoker.TableConfig(name="t", num_embeddings=5, embedding_dim=2, dtype=dtype)], optimizer=stoker.SGD(lr=0.1)
    )
    model = nn.Sequential(tables, nn.Linear(2, 1))
    before = tables.rows("t")
    tables.to("cpu").to(getattr(torch, dtype))  # what they are already: nothing to say
    for convert in (model.half, model.double, lambda: tables.to(torch.float16)):
        with pytest.warns(UserWarning, match=f"remain {dtype}: half"):
            convert()
    assert model[1].weight.dtype == torch.float64
    assert torch.equal(before, tables.rows("t"))
    assert before.dtype == tables.rows("t").dtype == getattr(torch, dtype)


def test_offsets_without_the_last_one():
    tables = stoker.EmbeddingTables(
        [stoker.TableConfig(name="t", num_embeddings=9, embedding_dim=2)],
        optimizer=stoker.SGD(lr=0.1),
        include_last_offset=False,
    )
    bag = nn.EmbeddingBag.from_pretrained(tables.rows("t"), mode="sum")
    ids, offsets = torch.tensor([1, 2, 3, 4]), torch.tensor([0, 1, 1])
    assert torch.equal(tables(ids, offsets)[:, 0], bag(ids, offsets))


@pytest.mark.parametrize("dim", [1, 4])
@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_a_gradient_that_torch_negates_lazily_is_negated(dim: int, backend: str) -> None:
    """The imaginary part of a conjugate is a view of memory that has the other sign."""
    real, imaginary = (
        stoker.EmbeddingTables(
            [stoker.TableConfig(name=name, num_embeddings=9, embedding_dim=dim)],
            optimizer=stoker.SGD(lr=1.0),
            backend=backend,
        )
        for name in ("real", "imaginary")
    )
    ids, before = torch.arange(3).view(-1, 1), imaginary.rows("imaginary")
    weights = torch.randn(3, 1, dim, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    (torch.complex(real(ids), imaginary(ids)).conj() * weights).real.sum().backward()
    moved = (imaginary.rows("imaginary") - before)[:3]
    torch.testing.assert_close(moved, -weights[:, 0].imag)
