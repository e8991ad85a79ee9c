"""Training in logical shards: no thread and no placement changes a bit, and the sums are those of the definition."""

from __future__ import annotations

import copy
import itertools
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from campaigns import EFFORT, scaled
from hypothesis import given, settings
from hypothesis import strategies as st
from ranked import on_threads
from small_runs import FILE, HALF, TENTH, assert_same_run, checkpoint_files
from torch import Tensor, nn

import stoker
from stoker import Batch
from stoker.base.errors import ConfigError
from stoker.dataset.dataset import Dataset
from stoker.models import MODELS as KINDS
from stoker.ops.by_shard import recorded
from stoker.ops.codegen.threads import kernel_threads
from stoker.ops.tree import nodes_of, shard_bounds
from stoker.tables import Ranks, RanksError
from stoker.tables.ranks.share import share_of
from stoker.tables.shards import one_thread
from stoker.testing import make_dataset
from stoker.training.ranks import sharded
from stoker.training.ranks.sharded import ShardedLoss, each_on_one_thread, own_threads
from stoker.training.ranks.sums import Alike, StepSums, Sums, add_over_ranks

RUN: dict[str, Any] = {
    "embedding_dim": 4, "batch_size": 100, "steps": 14, "eval_every": 7, "shards": 8, "tensorboard": False,
    "display": "quiet", "dense_clip_norm": 0.5,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "dlrm": {"bottom": (16,), "top": (24,)},
    "dcn": {"hidden": (16,), "rank": 4},
    "deepfm": {"hidden": (16, 8)},
    "tabular": {"hidden": (16, 8), "dropout": 0.2, "embedding_dropout": 0.1, "dims": {"C1": 8}},
    "rankmixer": {"width": 8},
    "two-tower": {"item": ("C1",), "hidden": (8,)},
    "din": {"history": {"C1": "C2"}, "activation": "dice"},
    "tbsm": {"history": {"C1": "C2"}},
    "sasrec": {"history": {"C1": "C2"}, "heads": 2},
}
PLACES: dict[str, dict[str, Any]] = {
    "resident": {}, "cached": {"device_memory": TENTH}, "file": {"device_memory": TENTH, **FILE},
    "pipelined": {"device_memory": HALF, "strategy": "host-pipelined"},
    "hot": {"device_memory": HALF, "strategy": "hot-cold"},
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    path = tmp_path_factory.mktemp("data") / "d"
    return make_dataset(path, rows=3000, num_embeddings=(600, 300, 10), sequence={1: 4})


def run(data: Dataset, out: Path, model: str, **more: Any) -> Path:
    options = MODELS[model] | more.pop("model_options", {})
    stoker.train(data, out=out, **{**RUN, "model": model, "model_options": options, **more})
    return out


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_threads_and_placements_change_no_file(model: str, data: Dataset, tmp_path: Path) -> None:
    first = run(data, tmp_path / "first", model, threads=1)
    turn = list(MODELS).index(model)
    for number, (place, placed) in enumerate(PLACES.items()):
        if EFFORT < 1 and number and number % 2 == turn % 2:  # each model with two or three, each place with three
            continue
        other = run(data, tmp_path / place, model, threads=2 - number % 2, **placed)
        assert_same_run(first, other)
    alone = run(data, tmp_path / "alone", model, threads=1, shards=1)
    assert checkpoint_files(alone) != checkpoint_files(first), "shards are part of the numbers"


@pytest.mark.slow
@pytest.mark.parametrize("more", [
    {"row_optimizer": "lamb", "dense_optimizer": "lamb"},
    {"row_optimizer": "adam", "dtype": "bfloat16", "row_cow_clip": (1.0, 1e-4), "dense_optimizer": "sgd"},
    {"tt_own": {"C1": 2}, "row_optimizer": "adagrad", "dense_optimizer": "adagrad", "matmul": "bf16"},
])  # fmt: skip
def test_no_optimizer_depends_on_threads(more: dict[str, Any], data: Dataset, tmp_path: Path) -> None:
    """The dense part is large enough for torch to divide its norms among threads."""
    wide = {"model_options": {"bottom": (300,), "top": (300, 200)}}
    runs = [run(data, tmp_path / str(threads), "dlrm", threads=threads, **wide, **more) for threads in (1, 2)]
    assert_same_run(*runs)


@pytest.mark.slow
def test_a_resumed_run_keeps_its_shards(data: Dataset, tmp_path: Path) -> None:
    whole = run(data, tmp_path / "whole", "tabular", threads=2)
    part = run(data, tmp_path / "part", "tabular", threads=1, steps=7)
    with pytest.raises(ConfigError, match="was started with shards=8"):
        stoker.train(resume=part, shards=4, display="quiet")
    stoker.train(resume=part, steps=14, threads=2, display="quiet")
    assert_same_run(whole, part, kinds=("valid",))


@pytest.mark.slow
def test_a_loaded_run_scores_by_shards(data: Dataset, tmp_path: Path) -> None:
    wide = {"model_options": {"bottom": (300,), "top": (300, 200)}}
    out = run(data, tmp_path / "run", "dlrm", threads=2, **wide)
    model, before = stoker.load(out).model.eval(), torch.get_num_threads()
    assert model.embeddings.shards == RUN["shards"]
    scores = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        scores.append(model.predict(batch_of(data, 1000)))
    torch.set_num_threads(before)
    assert torch.equal(*scores)
    whole = stoker.load(run(data, tmp_path / "whole", "dlrm", shards=1, **wide)).model
    assert whole.by_shards is None


@pytest.mark.usefixtures("no_cycle_is_found")
def test_rows_go_with_the_last_reference_to_the_model(data: Dataset) -> None:
    model = make("dlrm", 2, data.schema)
    ShardedLoss(model)(batch_of(data, 20)).backward()
    storage = weakref.ref(model.embeddings.groups[0].storage)
    del model
    assert storage() is None


@pytest.mark.slow
def test_tools_take_a_run_with_shards(data: Dataset, tmp_path: Path) -> None:
    out = run(data, tmp_path / "run", "tabular", threads=2, device_memory=TENTH)
    assert stoker.verify(out, steps=5, threads=1).identical
    assert stoker.trace(out, steps=5).steps == 5
    given = {name: value for name, value in RUN.items() if name not in ("display", "steps")}
    assert stoker.find_lr(data, lr_steps=20, trial_steps=2, **given).losses


def make(model: str, shards: int, spec: Any, **more: Any) -> stoker.RecModel:
    kind = KINDS[model]
    made = kind(spec, embedding_dim=4, optimizer=stoker.SGD(lr=1.0), **{**MODELS[model], **more})
    made.embeddings.shards = shards
    return made


def batch_of(data: Dataset, rows: int) -> Batch:
    return next(iter(data.train.batches(rows)))


def tree(found: list[list[Tensor | None]]) -> list[Tensor | None]:
    """Sums over shards by the definition: halves of a node, each by itself; an absent half is left out."""
    if len(found) == 1:
        return found[0]
    halves = tree(found[: len(found) // 2]), tree(found[len(found) // 2 :])
    return [b if a is None else a if b is None else a + b for a, b in zip(*halves, strict=True)]


@settings(deadline=None, max_examples=scaled(60))
@given(
    name=st.sampled_from(sorted(MODELS)), shards=st.sampled_from([2, 8, 16]),
    rows=st.sampled_from([1, 3, 8, 9, 50, 512, 1024]), threads=st.sampled_from([1, 2, 3]),
)  # fmt: skip
def test_gradients_are_those_of_the_definition(name: str, shards: int, rows: int, threads: int, data: Dataset) -> None:
    model = make(name, shards, data.schema)
    plain, batch = copy.deepcopy(model), batch_of(data, rows)
    joined: list[Any] = []
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        loss = ShardedLoss(model)(batch)
        loss.backward()
    finally:
        torch.set_num_threads(before)

    assert batch.labels is not None
    parameters, moved, found = plain.dense_parameters(), [], []
    with one_thread():
        inputs = plain.inputs(batch)
        trained = [each for each in inputs if each.requires_grad]
        for start, stop in pairwise(shard_bounds(rows, shards)):
            if start == stop:
                found.append([None] * (1 + len(parameters)))
                continue
            own = [each.detach()[start:stop].clone().requires_grad_(each.requires_grad) for each in inputs]
            with recorded() as records:
                logits = plain.dense_part(*own)
            moved += records
            x, y = logits.detach(), batch.labels[start:stop]
            leaves = [each for each in own if each.requires_grad]
            slopes = (torch.sigmoid(x) - y) / rows
            grads = torch.autograd.grad(logits, [*leaves, *parameters], slopes, allow_unused=True)
            found.append([(nn.functional.softplus(x) - x * y).sum() / rows, *grads[len(leaves) :]])
            joined.append(grads[: len(leaves)])
        torch.autograd.backward(trained, [torch.cat(each) for each in zip(*joined, strict=True)])
    wanted_loss, *wanted = tree(found)
    torch.testing.assert_close(loss.detach(), wanted_loss, rtol=1e-6, atol=0)
    for mine, theirs in zip(model.dense_parameters(), wanted, strict=True):
        assert theirs is None if mine.grad is None else torch.equal(mine.grad, theirs)
    for table in model.tables:
        assert torch.equal(model.embeddings.rows(table.name), plain.embeddings.rows(table.name)), table.name
    for average, value, weight in moved:
        average.lerp_(value, weight) if average.is_floating_point() else average.add_(value)
    for (key, mine), theirs in zip(model.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(mine, theirs), key


def test_gradients_scale_as_the_loss_does(data: Dataset) -> None:
    one, other = make("dcn", 4, data.schema), make("dcn", 4, data.schema)
    batch = batch_of(data, 40)
    ShardedLoss(one)(batch).backward()
    loss = ShardedLoss(other)(batch)
    (loss * 0.5).backward()
    for mine, half in zip(one.dense_parameters(), other.dense_parameters(), strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad * 0.5, half.grad)
    with pytest.raises(RuntimeError, match="called twice"):
        loss.backward()


def test_parameters_may_be_frozen_and_released(data: Dataset) -> None:
    model = stoker.DLRM(data.schema, embedding_dim=4, bottom=(8,), top=(8,), shards=8)
    model.bottom.requires_grad_(False)
    loss_of = ShardedLoss(model)
    for trains in (False, True, False):
        model.bottom.requires_grad_(trains)
        model.zero_grad()
        loss_of(batch_of(data, 100)).backward()
        assert all((each.grad is not None) == trains for each in model.bottom.parameters())
        assert all(each.grad is not None for each in model.top.parameters())


def test_an_empty_batch_moves_nothing(data: Dataset) -> None:
    model = make("dlrm", 4, data.schema)
    before = model.embeddings.rows("C1")
    empty = Batch(
        dense=torch.zeros(0, 4), ids=torch.zeros(0, dtype=torch.int64), offsets=torch.zeros(1, dtype=torch.int64),
        labels=torch.zeros(0),
    )  # fmt: skip
    assert ShardedLoss(model)(empty).isnan()
    assert model.predict(empty).shape == (0,)
    assert torch.equal(before, model.embeddings.rows("C1"))


class Noisy(stoker.RecModel):
    """A dense part that draws."""

    name = "noisy"

    def dense_part(self, dense: Tensor, embedded: Tensor) -> Tensor:
        return nn.functional.dropout(embedded, 0.5).sum((1, 2))


class Own(Noisy):
    """A loss of its own."""

    def loss(self, batch: Batch) -> Tensor:
        return self(batch).mean()


class Constant(Noisy):
    """An input that is not of examples."""

    def inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        return (*super().inputs(batch), torch.zeros(1))


@pytest.mark.parametrize(("kind", "message"), [
    (Noisy, "draws from torch's generator"), (Own, "has a loss or forward of its own"),
    (Constant, "has 1 rows for 40 examples"),
])  # fmt: skip
def test_models_that_shards_would_change_are_refused(kind: type[stoker.RecModel], message: str, data: Dataset) -> None:
    model = kind(data.schema, embedding_dim=4)
    model.embeddings.shards = 2
    with pytest.raises(ConfigError, match=message):
        ShardedLoss(model)(batch_of(data, 40))


class Beside(Noisy):
    """A dense part beside which another thread draws, such as one that reads data, or the part itself draws, too."""

    draws = False

    def dense_part(self, dense: Tensor, embedded: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(torch.rand, 1).result()
        embedded = nn.functional.dropout(embedded, 0.5, training=self.draws)
        noise = torch.rand(len(embedded), generator=torch.Generator().manual_seed(1))
        return embedded.sum((1, 2)) + noise


@pytest.mark.parametrize("draws", [False, True])
def test_draws_of_other_threads_are_no_trouble(draws: bool, data: Dataset) -> None:
    model = Beside(data.schema, embedding_dim=4)
    model.embeddings.shards, model.draws = 2, draws
    with pytest.raises(ConfigError, match="draws from torch's generator") if draws else nullcontext():
        ShardedLoss(model)(batch_of(data, 40)).backward()
    assert model.embeddings.tick == int(not draws)


class Deaf(Noisy):
    """A dense part that takes no rows."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.weight = nn.Parameter(torch.ones(4))

    def dense_part(self, dense: Tensor, embedded: Tensor) -> Tensor:
        return dense @ self.weight


def test_rows_that_no_loss_depends_on_stay(data: Dataset) -> None:
    """As with one shard: they take no step at all, which would move them by momentum or decay."""
    model = Deaf(data.schema, embedding_dim=4, optimizer=stoker.Adam(lr=0.1))
    model.embeddings.shards = 4
    before = model.embeddings.rows("C1")
    ShardedLoss(model)(batch_of(data, 40)).backward()
    assert model.weight.grad is not None
    assert torch.equal(before, model.embeddings.rows("C1"))
    assert model.embeddings.tick == 0


def test_kernels_on_threads_of_a_team_compute_the_same(data: Dataset) -> None:
    """In a step by shards no worker of torch's is woken."""
    batch, found = batch_of(data, 200), []
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for around in (nullcontext(), own_threads()):
            model = make("dlrm", 8, data.schema)
            with around:
                assert kernel_threads() == 3
                assert (torch.get_num_threads() == 3) == (not found)
                ShardedLoss(model)(batch).backward()
            assert torch.get_num_threads() == kernel_threads() == 3
            found.append([value.clone() for value in model.state_dict().values()])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_compiled_dense_parts_are_refused(data: Dataset) -> None:
    model = make("dlrm", 2, data.schema)
    model._compiled = model.dense_part
    with pytest.raises(ConfigError, match="make code for a whole batch"):
        ShardedLoss(model)


def test_a_number_of_shards_is_a_power_of_two() -> None:
    with pytest.raises(ConfigError, match="shards is 6; it must be a power of two"):
        stoker.TrainConfig(shards=6)


def test_an_error_of_a_shard_reaches_the_caller_and_threads_are_alone() -> None:
    before = torch.get_num_threads()
    seen: list[int] = []
    torch.set_num_threads(3)
    try:
        each_on_one_thread(lambda number: seen.append(torch.get_num_threads()), range(8))
        assert torch.get_num_threads() == 3

        def fail(number: int) -> None:
            if number == 2:
                raise ZeroDivisionError("in a shard")

        with pytest.raises(ZeroDivisionError, match="in a shard"):
            each_on_one_thread(fail, range(8))
    finally:
        torch.set_num_threads(before)
    assert seen == [1] * 8


SAME = Alike(0, 0, 0, 0)


def _of_a_rank(ranks: Ranks, batch: int) -> StepSums:
    """Sums over 4 shards of two parameters; the second one has a gradient on the last rank only."""
    last = ranks.rank == ranks.size - 1
    sums = {
        node: Sums(torch.tensor(1.0), [torch.full((3,), float(node.start)), torch.ones(2) if last else None])
        for node in nodes_of(ranks.numbers_of(ranks.rank, 4))
    }
    parameters = [torch.zeros(3), torch.zeros(2)]
    return add_over_ranks(ranks, 4, batch, sums, parameters, [last, *[False] * 69], 10 * ranks.rank, SAME)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_ranks_add_what_each_has(size: int) -> None:
    starts = [node.start for rank in range(size) for node in nodes_of(range(rank * 4 // size, (rank + 1) * 4 // size))]
    for found in on_threads(size, lambda ranks: _of_a_rank(ranks, 40)):
        assert found.sums is not None
        first, second = found.sums.grads
        assert found.sums.loss == len(starts)
        assert first is not None
        assert first.tolist() == [sum(starts)] * 3
        assert second is not None
        assert second.tolist() == [1.0, 1.0]
        assert (found.reached, found.notes) == ([True, *[False] * 69], [10 * rank for rank in range(size)])


def test_ranks_with_different_batches_are_refused() -> None:
    def work(ranks: Ranks) -> str:
        with pytest.raises(RanksError) as caught:
            _of_a_rank(ranks, 40 + ranks.rank)
        return str(caught.value)

    for said in on_threads(2, work):
        assert "batches of 40, 41 examples. Give all of them the same batch" in said


def test_ranks_with_other_models_are_refused() -> None:
    def work(ranks: Ranks) -> str:
        sums = {node: Sums(torch.tensor(1.0), [torch.ones(3 + ranks.rank)])
                for node in nodes_of(ranks.numbers_of(ranks.rank, 4))}  # fmt: skip
        with pytest.raises(RanksError) as caught:
            add_over_ranks(ranks, 4, 40, sums, [torch.zeros(3 + ranks.rank)], [True], 0, SAME)
        return str(caught.value)

    for said in on_threads(2, work):
        assert "gradients of 4, 5 numbers" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("seed", "has other parameters in its dense part"), ("data", "has another batch than rank 0: other"),
        ("order", "has another batch than rank 0, by its step"), ("schedule", "has other parameters"),
        ("eval", "computes in another way"), ("autocast", "computes in another way"),
        ("products", "computes in another way"),
    ],
)  # fmt: skip
def test_ranks_that_differ_in_their_own_loop_are_refused(what: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would train without an error, and no number would be that of one process."""
    spec = stoker.FeatureSpec.from_sizes(1, [9])
    if what == "products":
        monkeypatch.setattr(sharded, "bits_of_products", itertools.count().__next__)

    def work(ranks: Ranks) -> str:
        other = ranks.rank == 1
        model = stoker.DLRM(spec, embedding_dim=4, bottom=(4,), top=(4,), shards=4, ranks=ranks)
        if other and what == "seed":
            nn.init.uniform_(model.dense_parameters()[-1])
        dense = torch.optim.SGD(model.dense_parameters(), lr=0.1)
        loss_of = stoker.distributed.ShardedLoss(model)

        def train() -> None:
            for step in range(4):
                if step == 2 and other and what == "schedule":
                    dense.param_groups[0]["lr"] = 0.05
                if step == 2 and other and what == "eval":
                    model.top.eval()
                ids = (torch.arange(8).view(8, 1) + (other and what == "data")) % 9
                number = step + (other and what == "order")
                batch = Batch(dense=torch.ones(8, 1), ids=ids, labels=torch.ones(8), step=number)
                with torch.autocast("cpu", torch.bfloat16, enabled=other and what == "autocast"):
                    loss = loss_of(batch)
                loss.backward()
                dense.step()
                dense.zero_grad()

        with pytest.raises(RanksError) as caught:
            train()
        return str(caught.value)

    for message in on_threads(2, work):
        assert message.startswith(f"rank 1 {said}")


@pytest.mark.slow
@pytest.mark.parametrize("trained", [False, True])
def test_scores_of_ranks_are_those_of_one_process(trained: bool, tmp_path: Path) -> None:
    """80 rows in blocks of their own, and 3 rows, of which some ranks have none."""
    data = make_dataset(tmp_path / "d", rows=800, num_embeddings=(120, 60, 10))

    def work(ranks: Ranks | None) -> list[list[float]]:
        model = stoker.DCN(data.schema, embedding_dim=5, hidden=(8,), shards=4, ranks=ranks)
        if trained:
            stoker.distributed.ShardedLoss(model)  # scores in training are found by shards
        return [stoker.predict(model, data.valid, rows=rows).scores.tolist() for rows in (None, 3)]

    for ranks in (1, 2, 4):
        assert on_threads(ranks, work) == [work(None)] * ranks


@pytest.mark.slow
def test_a_loss_under_autocast_is_that_of_one_process(tmp_path: Path) -> None:
    """Its shards are bfloat16, which ranks add in float32."""
    data = make_dataset(tmp_path / "d", rows=800, num_embeddings=(120, 60, 10))

    def work(ranks: Ranks | None) -> list[float]:
        model = stoker.DLRM(data.schema, embedding_dim=4, bottom=(8,), top=(8,), shards=8, ranks=ranks)
        loss_of, found = stoker.distributed.ShardedLoss(model), list[float]()
        for batch in data.train.batches(97, limit=400):
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(batch)
            loss.backward()
            found.append(loss.item())
        return found

    alone = work(None)
    assert all(on_threads(ranks, work) == [alone] * ranks for ranks in (1, 2, 3))


def test_losses_over_lists_are_refused() -> None:
    model = stoker.DLRM(stoker.FeatureSpec.from_sizes(1, [9]), embedding_dim=4, bottom=(8,), top=(8,))
    model.embeddings.shards, model.objective = 2, "softmax"
    ids = torch.zeros(4, 1, dtype=torch.int64)
    batch = Batch(dense=torch.rand(4, 1), ids=ids, labels=torch.ones(4), groups=torch.tensor([0, 0, 1, 1]))
    with pytest.raises(ConfigError, match="loss softmax is not of one example alone"):
        ShardedLoss(model)(batch)


def test_a_share_has_the_time_of_its_batch() -> None:
    batch = Batch(dense=torch.rand(8, 1), ids=torch.zeros(8, 1, dtype=torch.int64), time=77)
    for share in on_threads(2, lambda ranks: share_of(batch, ranks, 4)):
        assert (len(share), share.time) == (4, 77)


def test_a_share_has_the_weights_of_its_examples() -> None:
    """One for each id, of several features, in bags or not."""
    ids, weights = torch.arange(16).view(8, 2), torch.rand(16)
    offsets = torch.arange(17)
    for batch in (
        Batch(dense=torch.rand(8, 1), ids=ids, weights=weights),
        Batch(dense=torch.rand(8, 1), ids=ids.view(-1), weights=weights, offsets=offsets),
    ):
        for rank, share in enumerate(on_threads(2, lambda ranks, whole=batch: share_of(whole, ranks, 4))):
            assert share.ids.reshape(-1).tolist() == list(range(8 * rank, 8 * rank + 8))
            assert torch.equal(share.weights, weights[8 * rank : 8 * rank + 8])


def test_a_rank_whose_copies_are_averaged_steps_as_if_its_examples_were_the_batch() -> None:
    spec = stoker.FeatureSpec.from_sizes(2, [30, 20])
    ids = torch.randint(0, 20, (16, 2), generator=torch.Generator().manual_seed(0))
    whole = Batch(dense=torch.rand(16, 2), ids=ids, labels=(ids[:, 0] % 2).float())

    def made(**more: Any) -> stoker.DLRM:
        rows = stoker.optim.SGD(lr=1.0)
        model = stoker.DLRM(spec, embedding_dim=4, bottom=(8,), top=(8,), optimizer=rows, **more)
        with torch.no_grad():
            for each in model.dense_parameters():
                each.copy_(torch.linspace(-0.5, 0.5, each.numel()).view_as(each))
        return model

    def work(ranks: Ranks) -> Tensor:
        model = made(ranks=ranks.averaging(100), shards=8)
        ShardedLoss(model)(whole).backward()
        return model.embeddings.rows("C1")

    for rank, found in enumerate(on_threads(2, work)):
        alone, own = made(), slice(8 * rank, 8 * rank + 8)
        labels = None if whole.labels is None else whole.labels[own]
        alone.loss(Batch(dense=whole.dense[own], ids=ids[own], labels=labels)).backward()
        before = made().embeddings.rows("C1")
        assert not torch.equal(found, before)
        torch.testing.assert_close(found - before, alone.embeddings.rows("C1") - before)
