"""LAMB on rows: the paper's algorithm with a table as layer, wherever the rows lie and however their norm is kept."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
from campaigns import scaled
from hypothesis import given, settings
from hypothesis import strategies as st
from placed import build, draw, placed_run, resident_run, same

from stoker import LAMB, Cached, EmbeddingTables, TableConfig
from stoker.base.errors import ConfigError
from stoker.ops import lamb
from stoker.ops.lamb import squares
from stoker.tables import group as layers
from stoker.tables.storage import Rows

UNIT = Fraction(1, 2**80)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tables_of(optimizer: LAMB, backend: str = "auto", placement: object = None) -> EmbeddingTables:
    tables = [
        TableConfig(name="a", num_embeddings=9, embedding_dim=5, features=("f", "g")),
        TableConfig(name="b", num_embeddings=4, embedding_dim=5, features=("h",), init_scale=0.0),
    ]
    return EmbeddingTables(tables, optimizer=optimizer, backend=backend, placement=placement)  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_norm_of_a_table_is_that_of_rows_that_were_replaced():
    """By a write, by a follower's scatter or by an average of copies."""
    ids, values = torch.tensor([[0, 1, 2]]), torch.full((3, 5), 7.0)
    found = []
    for how in ("write", "scatter", "replace"):
        tables = tables_of(LAMB(lr=0.1, max_trust=None))
        tables(ids).sum().backward()
        [(_, rows)] = tables.read("a", 9)
        new = Rows(values, {name: state[3:6].clone() for name, state in rows.state.items()})
        group = tables.group_of["a"]
        if how == "write":
            tables.write("a", 3, new)
        elif how == "scatter":
            group.scatter("a", np.arange(3, 6), new)
        else:
            group.replace(torch.arange(3, 6), new)
        tables(ids).sum().backward()
        found.append(tables.rows("a"))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize(("decay", "bounds"), [(0.0, (0.0, None)), (0.1, (0.0, None)), (0.01, (0.9, 1.1))])
def test_with_every_row_touched_it_is_the_algorithm_on_a_layer(backend, decay, bounds):
    """Algorithm 2, line by line in float64; the table that starts at zero has trust 1 in its first step."""
    optimizer = LAMB(lr=0.05, weight_decay=decay, min_trust=bounds[0], max_trust=bounds[1])
    tables = tables_of(optimizer, backend)
    generator = torch.Generator().manual_seed(3)
    ids = torch.stack([torch.arange(9), torch.arange(9).flip(0), torch.arange(9) % 4], 1)
    x = {name: tables.rows(name).double() for name in "ab"}
    m = {name: torch.zeros_like(x[name]) for name in "ab"}
    v = {name: torch.zeros_like(x[name]) for name in "ab"}
    for t in range(1, 7):
        grad = torch.randn(9, 3, 5, generator=generator)
        (tables(ids) * grad).sum().backward()
        for name, columns in (("a", (0, 1)), ("b", (2,))):
            g = torch.zeros_like(x[name])
            for column in columns:
                g.index_add_(0, ids[:, column], grad[:, column].double())
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.999 * v[name] + 0.001 * g**2
            r = (m[name] / (1 - 0.9**t)) / ((v[name] / (1 - 0.999**t)).sqrt() + 1e-6)
            update = r + decay * x[name]
            ratio = 1.0
            if x[name].norm() > 0:
                ratio = float(x[name].norm() / update.norm())
                ratio = min(max(ratio, bounds[0]), math.inf if bounds[1] is None else bounds[1])
            x[name] = x[name] - 0.05 * ratio * update
            torch.testing.assert_close(tables.rows(name).double(), x[name], rtol=1e-4, atol=1e-6)


@settings(deadline=None, max_examples=scaled(50))
@given(
    seed=st.integers(0, 2**20), rows=st.integers(0, 300), dim=st.sampled_from([1, 4, 16, 33]),
    scale=st.sampled_from([1e-12, 1e-3, 1.0, 1e4]), tables=st.integers(1, 4),
)  # fmt: skip
def test_sums_are_exact_and_know_no_order(seed, rows, dim, scale, tables):
    generator = torch.Generator().manual_seed(seed)
    values = scale * torch.randn(rows, dim, generator=generator)
    table = torch.randint(0, tables, (rows,), generator=generator)
    found = squares(values, table, tables)
    order = torch.randperm(rows, generator=generator)
    assert squares(values[order], table[order], tables) == found
    half = rows // 2
    parts = [squares(values[begin:end], table[begin:end], tables) for begin, end in ((0, half), (half, rows))]
    assert [sum(each) for each in zip(*parts, strict=True)] == found
    exact = [Fraction(0)] * tables
    for row, index in zip(values.tolist(), table.tolist(), strict=True):
        exact[index] += sum(Fraction(value) ** 2 for value in row)
    for mine, wanted in zip(found, exact, strict=True):
        assert abs(mine * UNIT - wanted) <= wanted * Fraction(1, 2**48) + rows * UNIT


def test_sums_of_more_rows_than_are_added_at_a_time(monkeypatch):
    values, table = torch.randn(20, 3), torch.arange(20) % 3
    found = squares(values, table, 3)
    monkeypatch.setattr("stoker.ops.lamb.ROWS", 6)
    assert squares(values, table, 3) == found


def test_what_is_not_finite_counts_as_much_as_anything_can():
    rows = torch.tensor([[math.nan, 1.0], [math.inf, 0.0], [1e30, 0.0]])
    assert squares(rows) == [3 << 120]


LAMBS = [
    LAMB(lr=0.1), LAMB(lr=0.3, weight_decay=0.1), LAMB(lr=0.1, clip_norm=0.5, max_trust=None),
    LAMB(lr=0.2, betas=(0.5, 0.9), min_trust=0.3, max_trust=0.5, clip_value=0.3, cow_clip=(0.5, 0.1)),
]  # fmt: skip


def trained(case, placement=None, backend=None):
    """Tables after the batches of a case, and the sums of squares that they kept."""
    tables = build(replace(case, backend=backend or case.backend), placement)
    for step, batch in enumerate(case.batches):
        out = tables(batch.ids, batch.offsets, batch.weights)
        (out * case.target(step, out.shape)).sum().backward()
    return tables


@pytest.mark.slow
@pytest.mark.parametrize("block", range(4))
def test_a_placed_run_equals_the_resident_one(block):
    for seed in range(block * 30, block * 30 + 30):
        case = draw(seed, backend="reference" if seed % 4 else "auto")
        which = seed // 4 % 4 if seed % 4 else seed // 4 % 2 + 2 * (case.tables[0].embedding_dim == 4)  # fewer kernels
        case = replace(case, optimizer=LAMBS[which])
        assert same(resident_run(case), placed_run(case)), f"seed {seed}: {case.strategy}"


def float_sums(rows, table=None, tables=1):
    """What a kernel would do: add up in the order that rows come in."""
    totals = torch.zeros(tables)
    for index, square in enumerate((rows.float() ** 2).sum(1)):
        totals[0 if table is None else table[index]] += square
    return [int(float(total) * 2**80) for total in totals]


@pytest.mark.slow
def test_the_cases_notice_sums_that_know_an_order(monkeypatch):
    for module in (layers, lamb):
        monkeypatch.setattr(module, "squares", float_sums)
    for seed in range(200):
        case = replace(draw(seed, backend="reference"), optimizer=LAMBS[seed // 4 % 4])
        if not same(resident_run(case), placed_run(case)):
            return
    pytest.fail("sums in the order of slots went unnoticed")


@pytest.mark.slow
def test_batches_that_come_in_parts_are_among_the_cases():
    spilled = 0
    for seed in range(120):
        case = replace(draw(seed), optimizer=LAMBS[0])
        most = max(len(set(batch.ids.reshape(-1).tolist())) for batch in case.batches)
        spilled += most > case.transit
    assert spilled > 10


@pytest.mark.slow
def test_back_ends_agree_to_the_bit():
    for seed in range(1000, 1040):
        case = replace(draw(seed), optimizer=LAMBS[seed // 4 % 4], backend="reference")
        one, other = trained(case), trained(case, backend="auto")
        for table in case.tables:
            assert torch.equal(one.rows(table.name), other.rows(table.name)), f"seed {seed}"


@pytest.mark.slow
@pytest.mark.parametrize("placed", [False, True])
def test_what_was_kept_is_what_a_fresh_look_finds(placed):
    for seed in range(30):
        case = replace(draw(seed, backend="reference"), optimizer=LAMBS[seed % 4])
        if placed and isinstance(case.strategy, Cached):
            tables = trained(case, case.strategy)
        else:
            tables = trained(case)
        for group in tables.groups:
            kept = list(group.squares())
            group._squares = None
            assert group.squares() == kept
            fresh = [squares(tables.rows(table.name))[0] for table in group.tables]
            assert fresh == kept
        tables.close()


def test_rows_that_are_replaced_are_looked_at_again():
    tables = tables_of(LAMB(lr=0.1))
    ids = torch.zeros(2, 3, dtype=torch.int64)
    tables(ids).sum().backward()
    again = tables_of(LAMB(lr=0.1))
    again(ids).square().sum().backward()  # its own norms are known now
    again.load_state_dict(tables.state_dict())
    for each in (tables, again):
        each(ids).sum().backward()
    for name in "ab":
        assert torch.equal(tables.rows(name), again.rows(name))


def test_a_bad_id_that_a_device_found_late_stops_the_update(monkeypatch):
    tables = tables_of(LAMB(lr=0.1), "reference")
    before = {name: value.clone() for name, value in tables.state_dict().items()}
    out = tables(torch.zeros(2, 3, dtype=torch.int64)).sum()

    def late() -> None:
        raise IndexError("example 1 has id 77")

    monkeypatch.setattr(tables.groups[0].backend, "synchronize", late)
    with pytest.raises(IndexError, match="77"):
        out.backward()
    monkeypatch.undo()
    for name, value in tables.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["backward", "step"])  # the step of ranks, in blocks
def test_a_step_that_fails_halfway_forgets_the_norms(how, monkeypatch):
    """Rows have moved, so sums of squares of before are wrong."""
    tables = tables_of(LAMB(lr=0.1, max_trust=None), placement=Cached(slots=12, spill="parts"))
    group = tables.group_of["a"]
    group.squares()
    move = group.backend.lamb_move

    def failing(*given):
        move(*given)
        raise OSError("interrupted")

    monkeypatch.setattr(group.backend, "lamb_move", failing)
    loss, rows = tables(torch.tensor([[0, 1, 2]])).sum(), torch.tensor([0, 1, 9])
    step = partial(group.step, rows, torch.ones(3, 5), torch.ones(3, dtype=torch.int64))
    with pytest.raises(OSError, match="interrupted"):
        (loss.backward if how == "backward" else step)()
    monkeypatch.undo()
    assert group.squares() == [squares(tables.rows(table.name))[0] for table in group.tables]


def test_an_empty_batch_moves_nothing():
    tables = tables_of(LAMB(lr=0.1))
    before = tables.rows("a")
    tables(torch.zeros(0, 3, dtype=torch.int64)).sum().backward()
    assert torch.equal(tables.rows("a"), before)
    assert tables.tick == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_trust": 0.0}, "max_trust"),
        ({"min_trust": 3.0, "max_trust": 2.0}, "trust"),
        ({"betas": (1.0, 0.0)}, "betas"),
    ],
)
def test_values_out_of_range(options, words):
    with pytest.raises(ConfigError, match=words):
        LAMB(lr=0.1, **options)
