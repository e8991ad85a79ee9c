"""CowClip (Zheng et al. 2022, Algorithm 1) against its algorithm written out, wherever the rows lie."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from campaigns import scaled
from hypothesis import given, settings
from hypothesis import strategies as st
from placed import draw, placed_run, resident_run, same
from torch import Tensor

from stoker import SGD, Adam, EmbeddingTables, RowWiseAdagrad, TableConfig, TensorTrain, TTEmbeddingBag, optim
from stoker.base.errors import ConfigError


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def algorithm_1(w: Tensor, g: Tensor, ids: list[int], r: float, zeta: float) -> Tensor:
    """The gradient of every id's column, clipped, id by id in float64."""
    w, g = w.double(), g.double().clone()
    for i in sorted(set(ids)):
        cnt = ids.count(i)
        clip_t = cnt * max(r * float(w[i].norm()), zeta)
        norm = float(g[i].norm())
        if norm > 0:
            g[i] = min(1.0, clip_t / norm) * g[i]
    return g


@settings(deadline=None, max_examples=scaled(60))
@given(
    ids=st.lists(st.integers(0, 7), min_size=1, max_size=30), dim=st.sampled_from([1, 4, 17]),
    clip=st.sampled_from([(1.0, 1e-5), (0.1, 0.0), (0.0, 0.5), (0.5, 2.0)]), scale=st.sampled_from([0.0, 0.1, 3.0]),
    seed=st.integers(0, 2**20),
)  # fmt: skip
def test_equals_the_algorithm(ids, dim, clip, scale, seed):
    """SGD with rate 1 shows the clipped gradient."""
    table = TableConfig(name="t", num_embeddings=8, embedding_dim=dim, init_scale=scale)
    tables = EmbeddingTables([table], optimizer=SGD(lr=1.0, cow_clip=clip), backend="reference", seed=seed)
    before = tables.rows("t")
    grad = torch.randn(len(ids), 1, dim, generator=torch.Generator().manual_seed(seed))
    (tables(torch.tensor(ids).view(-1, 1)) * grad).sum().backward()
    g = torch.zeros(8, dim).index_add_(0, torch.tensor(ids), grad[:, 0])
    wanted = before.double() - algorithm_1(before, g, ids, *clip)
    torch.testing.assert_close(tables.rows("t").double(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_popular_row_may_move_further():
    table = TableConfig(name="t", num_embeddings=3, embedding_dim=2, init_scale=0.0)
    tables = EmbeddingTables([table], optimizer=SGD(lr=1.0, cow_clip=(1.0, 0.5)))
    ids = torch.tensor([[0], [1], [1], [1], [2]])
    grad = torch.tensor([[3.0, 4.0], [9.0, 0.0], [9.0, 0.0], [9.0, 0.0], [0.3, 0.0]]).unsqueeze(1)
    tables(ids).backward(grad)
    torch.testing.assert_close(tables.rows("t"), torch.tensor([[-0.3, -0.4], [-1.5, 0.0], [-0.3, 0.0]]))


@pytest.mark.slow
def test_all_occurrences_of_a_row_count_however_many_are_summed_at_a_time():
    table = TableConfig(name="t", num_embeddings=2, embedding_dim=4)
    found = []
    for backend in ("reference", "auto"):
        tables = EmbeddingTables([table], optimizer=SGD(lr=1.0, cow_clip=(0.0, 0.01)), backend=backend)
        before = tables.rows("t")
        (3.0 * tables(torch.zeros(200, 1, dtype=torch.int64))).sum().backward()
        found.append(tables.rows("t"))
    assert torch.equal(*found)
    torch.testing.assert_close((found[0] - before)[0].norm(), torch.tensor(200 * 0.01))


CLIPPED = [
    Adam(lr=0.05, cow_clip=(1.0, 1e-3)), SGD(lr=0.5, cow_clip=(0.2, 0.1), clip_value=1.0),
    RowWiseAdagrad(lr=0.1, cow_clip=(0.5, 0.05), weight_decay=0.1, clip_norm=1.0),
    optim.Adagrad(lr=0.1, cow_clip=(0.0, 0.3)),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("block", range(3))
def test_a_placed_run_equals_the_resident_one(block):
    for seed in range(block * 15, block * 15 + 15):
        # Each rule is a kernel to compile: the plain back end takes the variety.
        compiled = seed % 15 == 0
        case = draw(seed, backend="auto" if compiled else "reference")
        case = replace(case, optimizer=CLIPPED[0 if compiled else seed % 4])
        assert same(resident_run(case), placed_run(case)), f"seed {seed}: {case.strategy}"


@pytest.mark.slow
def test_the_cases_are_clipped():
    changed = 0
    for seed in range(1, 21):
        case = replace(draw(seed, backend="reference"), optimizer=CLIPPED[0])
        free = replace(case, optimizer=replace(CLIPPED[0], cow_clip=None))
        changed += not same(resident_run(case), resident_run(free))
    assert changed > 10


def test_it_comes_back_from_a_checkpoint():
    assert optim.RowOptimizer.from_dict(CLIPPED[0].to_dict()) == CLIPPED[0]


@pytest.mark.parametrize(
    ("clip", "words"),
    [((-1.0, 0.1), "not negative"), ((math.inf, 0.1), "finite"), ((0.0, 0.0), "clip every gradient"), ((1.0,), "two")],
)
def test_values_out_of_range(clip, words):
    with pytest.raises(ConfigError, match=words):
        SGD(lr=0.1, cow_clip=clip)


def test_tensor_trains_have_no_ids_to_count():
    clipped = SGD(lr=0.1, cow_clip=(1.0, 0.1))
    table = TableConfig(name="t", num_embeddings=64, embedding_dim=4)
    with pytest.raises(ConfigError, match="no ids to count"):
        EmbeddingTables([table], optimizer=clipped, placement=TensorTrain(rank=2))
    tables = EmbeddingTables([table], optimizer=SGD(lr=0.1), placement=TensorTrain(rank=2))
    with pytest.raises(ConfigError, match="no ids to count"):
        tables.optimizer = clipped
    with pytest.raises(ConfigError, match="no ids to count"):
        TTEmbeddingBag(64, 4, rank=2, optimizer=clipped)
