"""Features kept step by step: equal to nn.Embedding on padded ids, whatever the placement."""

from __future__ import annotations

import copy
import io
import itertools

import pytest
import torch
from campaigns import scaled
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import stoker
from stoker.base.errors import ConfigError
from stoker.dataset.batch import Batch
from stoker.ops import Bags
from stoker.tables.lookups import StepLayout

PLACEMENTS = {
    "device": None,
    "cached": stoker.Cached(slots=40),
    "in parts": stoker.Cached(slots=9),
    "pipelined, file": stoker.HostPipelined(slots=40, home="file"),
}


def make(backend: str = "reference", placement: object = None, steps: object = None, **options: object):
    """An item table under a target and two histories, and a user table of its own width or pooling."""
    tables = [
        stoker.TableConfig(name="user", num_embeddings=9, embedding_dim=4, **options.pop("user", {})),
        stoker.TableConfig(name="item", num_embeddings=30, embedding_dim=4, features=("seen", "item", "bought")),
    ]
    return stoker.EmbeddingTables(
        tables,
        optimizer=options.pop("optimizer", stoker.SGD(lr=0.5)),
        features=["seen", "user", "item", "bought"],
        steps={"seen": 5, "bought": 2} if steps is None else steps,
        backend=backend,
        placement=placement,
        **options,
    )


def draw(rows: int, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.ones(rows, 4, dtype=torch.int64)
    lengths[:, 0] = torch.randint(0, 6, (rows,), generator=generator)
    lengths[:, 3] = torch.randint(0, 3, (rows,), generator=generator)
    sizes = torch.repeat_interleave(torch.tensor([30, 9, 30, 30]).repeat(rows), lengths.view(-1))
    ids = (torch.rand(len(sizes), generator=generator) ** 2 * sizes).long()
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.view(-1).cumsum(0)])
    return Batch(dense=torch.zeros(rows, 0), ids=ids, offsets=offsets)


def padded(batch: Batch, rows: dict[str, torch.Tensor]) -> torch.Tensor:
    """The same vectors from nn.functional.embedding on padded ids, masked: [B, 5 + 1 + 1 + 2, 4]."""
    parts = []
    for feature, (table, steps) in enumerate([("item", 5), ("user", 1), ("item", 1), ("item", 2)]):
        found = nn.functional.embedding(batch.padded(feature, steps), rows[table])
        parts.append(found * batch.mask(feature, steps).unsqueeze(2))
    return torch.cat(parts, dim=1)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("user", [{}, {"pooling": "mean"}], ids=["one group", "two groups"])
def test_equals_an_embedding_on_padded_ids(backend, placement, user):
    tables = make(backend, PLACEMENTS[placement], user=user)
    leaves = {name: tables.rows(name).requires_grad_() for name in ("user", "item")}
    for step in range(4):
        batch, grad = draw(7, step), torch.randn(7, 9, 4, generator=torch.Generator().manual_seed(step))
        expected = padded(batch, leaves)
        expected.backward(grad)
        out = tables(batch.ids, batch.offsets)
        assert torch.equal(out, expected)
        out.backward(grad)
        with torch.no_grad():
            for name, rows in leaves.items():
                rows -= 0.5 * rows.grad
                rows.grad = None
                torch.testing.assert_close(tables.rows(name), rows)
                rows.copy_(tables.rows(name))
    tables.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [stoker.Adagrad, stoker.RowWiseAdagrad, stoker.AdamW, stoker.MomentumSGD, stoker.FTRL])
def test_every_placement_gives_the_same_bits_staged_or_not(kind):
    def run(placement: object, staged: bool) -> list[torch.Tensor]:
        tables = make("cpu", placement, optimizer=kind(lr=0.1))
        batches, seen = [draw(6, step) for step in range(8)], []
        for batch in stoker.stage(batches, tables, lookahead=4) if staged else batches:
            out = tables(batch.ids, batch.offsets)
            seen.append(out.detach().clone())
            out.square().sum().backward()
        seen += [tables.rows("item"), tables.rows("user")]
        tables.close()
        return seen

    resident = run(None, False)
    for placement in PLACEMENTS.values():
        for staged in (False, True):
            assert all(torch.equal(a, b) for a, b in zip(resident, run(placement, staged), strict=True))


@settings(deadline=None, max_examples=scaled(60))
@given(
    lengths=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), min_size=1, max_size=6),
    extra=st.integers(0, 2),
    pooled=st.booleans(),
)
def test_the_newest_id_is_the_last_step(lengths, extra, pooled):
    layout = StepLayout(["a", "b"], {"b": 5 + extra} if pooled else {"a": 3, "b": 5 + extra})
    flat = [length for pair in lengths for length in pair]
    offsets = torch.tensor([0, *flat]).cumsum(0)
    ids = torch.arange(int(offsets[-1]))
    made = layout.expand(Bags(ids, offsets))
    found, expanded = made.ids, made.offsets
    assert torch.equal(found, ids)
    bags = [found[a:b].tolist() for a, b in itertools.pairwise(expanded.tolist())]
    assert len(bags) == len(lengths) * len(layout)
    expected: list[list[int]] = []
    for row in range(len(lengths)):
        for feature, steps in ((0, 0 if pooled else 3), (1, 5 + extra)):
            begin, end = offsets[2 * row + feature : 2 * row + feature + 2].tolist()
            bag = list(range(begin, end))
            expected += [[]] * (steps - len(bag)) + [[i] for i in bag] if steps else [bag]
    assert bags == expected


@pytest.mark.slow
def test_one_id_a_bag_and_per_sample_weights():
    tables = stoker.EmbeddingTables(
        [stoker.TableConfig(name="t", num_embeddings=9, embedding_dim=2, features=("a", "b"))],
        optimizer=stoker.SGD(lr=1.0),
        steps={"b": 3},
    )
    ids = torch.tensor([[1, 2], [3, 4]])
    weights = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).requires_grad_()
    rows = tables.rows("t")
    out = tables(ids, None, weights)
    assert out.shape == (2, 4, 2)
    assert not out[:, 1:3].any()
    assert torch.equal(out[:, [0, 3]], rows[ids] * weights.detach().unsqueeze(2))
    out.sum().backward()
    torch.testing.assert_close(weights.grad, rows[ids].sum(2))


@pytest.mark.slow
def test_positions_and_mixed_widths():
    tables = make(user={})
    assert tables.steps == {"seen": 5, "bought": 2}
    assert tables.positions == {"seen": slice(0, 5), "user": slice(5, 6), "item": slice(6, 7), "bought": slice(7, 9)}
    configs = [
        stoker.TableConfig(name="a", num_embeddings=9, embedding_dim=2, features=("a", "s")),
        stoker.TableConfig(name="b", num_embeddings=9, embedding_dim=3),
    ]
    wide = stoker.EmbeddingTables(configs, optimizer=stoker.SGD(lr=1.0), features=["s", "b", "a"], steps={"s": 2})
    a, b = wide.rows("a"), wide.rows("b")
    found = wide(torch.tensor([4, 7, 1, 2, 3]), torch.tensor([0, 1, 2, 3, 3, 4, 5]))
    zeros = torch.zeros(2)
    assert torch.equal(
        found, torch.stack([torch.cat([zeros, a[4], b[7], a[1]]), torch.cat([zeros, zeros, b[2], a[3]])])
    )


@pytest.mark.parametrize("copied", ["deepcopy", "pickle"])
def test_copies_keep_their_steps(copied):
    tables = make(user={"pooling": "mean"})
    if copied == "deepcopy":
        other = copy.deepcopy(tables)
    else:
        file = io.BytesIO()
        torch.save(tables, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    batch = draw(5)
    assert torch.equal(tables(batch.ids, batch.offsets), other(batch.ids, batch.offsets))


def test_what_cannot_be_is_refused():
    tables = make()
    batch = draw(3)
    offsets = torch.tensor([0, 2, 3, 4, 4, 10, 11, 12, 12])
    with pytest.raises(ValueError, match=r"example 1 has 6 ids in feature 'seen', which is kept for 5 steps. Cut it"):
        tables(torch.zeros(12, dtype=torch.int64), offsets)
    with pytest.raises(ValueError, match="rise from 0"):
        tables(batch.ids, batch.offsets + 1)
    with pytest.raises(IndexError, match=r"example 0 has id 30 in feature 'seen\[4\]', but table 'item'"):
        tables(torch.tensor([30, 1, 1]), torch.tensor([0, 1, 2, 3, 3]))
    with pytest.raises(ConfigError, match=r"steps name \['sean'\], but the features are seen, user"):
        make(steps={"sean": 3})
    with pytest.raises(ConfigError, match="steps of feature 'seen' are 0"):
        make(steps={"seen": 0})
