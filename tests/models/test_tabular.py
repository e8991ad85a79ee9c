"""The tabular model against a plain transcription of fastai's, and its dropout and batch norm in runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

sys.path.append(str(Path(__file__).parents[1] / "training"))

from small_runs import SMALL, assert_same_run, checkpoint_files, records

import stoker
from stoker.base.errors import ConfigError
from stoker.dataset.batch import Batch
from stoker.dataset.spec import FeatureSpec
from stoker.models import DLRM, RecModel, Tabular
from stoker.models.tabular import fastai_columns
from stoker.optim import SGD
from stoker.testing import make_dataset
from stoker.training.files import loading

SPEC = FeatureSpec.from_sizes(3, [30, 7, 1000])
DROPPED = {"dropout": (0.25, 0.5), "embedding_dropout": 0.1}
RUN: dict[str, Any] = {
    **SMALL, "model": "tabular", "model_options": {"hidden": (16, 8), **DROPPED}, "epochs": 2, "eval_every": 20,
    "metric": "log_loss",
}  # fmt: skip


class FastaiTabular(nn.Module):
    """``fastai.tabular.TabularModel`` of version 1, written out: bn_drop_lin, ReLU, one output."""

    def __init__(self, sizes: Sequence[tuple[int, int]], dense: int, layers: Sequence[int]) -> None:
        super().__init__()
        self.embeds = nn.ModuleList(nn.Embedding(rows, columns) for rows, columns in sizes)
        self.bn_cont = nn.BatchNorm1d(dense) if dense else None
        widths = [sum(columns for _, columns in sizes) + dense, *layers, 1]
        self.lins = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(widths))
        self.bns = nn.ModuleList(nn.BatchNorm1d(size) for size in layers)

    def forward(self, dense: torch.Tensor, ids: torch.Tensor, masks: Sequence[Any] = (1, 1, 1)) -> torch.Tensor:
        x = torch.cat([embed(ids[:, place]) for place, embed in enumerate(self.embeds)], 1) * masks[0]
        if self.bn_cont is not None:
            x = torch.cat([x, self.bn_cont(dense)], 1)
        for place, (lin, bn) in enumerate(zip(self.lins, self.bns, strict=False)):
            x = bn(torch.relu(lin(x))) * masks[place + 1]
        return self.lins[-1](x).squeeze(1)


def pair(spec: FeatureSpec = SPEC, **options: Any) -> tuple[Tabular, FastaiTabular]:
    """Both models with the same values."""
    model = Tabular(spec, hidden=(16, 8), optimizer=SGD(lr=1.0), backend="reference", **options)
    sizes = [(table.num_embeddings, table.embedding_dim) for table in model.tables]
    plain = FastaiTabular(sizes, len(spec.dense), (16, 8))
    with torch.no_grad():
        for table, embed in zip(model.tables, plain.embeds, strict=True):
            embed.weight.copy_(model.embeddings.rows(table.name))
        for mine, other in zip((*model.layers, *model.norms), (*plain.lins, *plain.bns), strict=True):
            other.load_state_dict(mine.state_dict())
        if plain.bn_cont is not None:
            assert model.dense_norm is not None
            plain.bn_cont.load_state_dict(model.dense_norm.state_dict())
    return model, plain


def batch_of(rows: int, spec: FeatureSpec = SPEC, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    sizes = [spec.num_embeddings[feature.table] for feature in spec.features]
    return Batch(
        dense=2 * torch.randn(rows, len(spec.dense), generator=generator) + 5,
        ids=torch.stack([torch.randint(0, size, (rows,), generator=generator) for size in sizes], 1),
        labels=torch.randint(0, 2, (rows,), generator=generator).float(),
    )


@pytest.mark.slow
def test_columns_follow_the_rule_of_fastai() -> None:
    # emb_sz_rule(n) = min(600, round(1.6 * n ** 0.56)), as its documentation tabulates.
    assert [fastai_columns(n) for n in (2, 10, 100, 1000, 10_000, 10**7)] == [2, 6, 21, 77, 278, 600]
    model = Tabular(SPEC, dims={"C2": 3}, max_dim=50)
    assert [table.embedding_dim for table in model.tables] == [fastai_columns(30), 3, 50]
    assert model.embeddings(batch_of(4).ids).shape == (4, fastai_columns(30) + 53)


@pytest.mark.slow
@pytest.mark.parametrize("dense", [0, 3])
@pytest.mark.parametrize("dropped", [{}, DROPPED], ids=["whole", "dropout"])
def test_equals_a_plain_transcription(dense: int, dropped: dict[str, Any]) -> None:
    spec = FeatureSpec.from_sizes(dense, [30, 7, 1000])
    model, plain = pair(spec, **dropped)
    for step in range(3):
        batch = batch_of(64, spec, seed=step)
        assert batch.labels is not None
        masks = model.inputs(batch)[2:] or (1, 1, 1)
        logits = plain(batch.dense, batch.ids, masks)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        torch.testing.assert_close(model(batch), logits, rtol=1e-5, atol=1e-6)  # other matrix products, other rounding
        for mine in (model, plain):  # the line above has moved the running moments of one of them
            mine.zero_grad()
        model.dense_norm and model.dense_norm.load_state_dict(plain.bn_cont.state_dict())  # type: ignore[union-attr]
        for mine, other in zip(model.norms, plain.bns, strict=True):
            mine.load_state_dict(other.state_dict())
        loss.backward()
        model.loss(batch).backward()
        for mine, other in zip(model.norms, plain.bns, strict=True):
            other.load_state_dict(mine.state_dict())
        if plain.bn_cont is not None:
            plain.bn_cont.load_state_dict(model.dense_norm.state_dict())  # type: ignore[union-attr]
        named = [*zip(model.layers, plain.lins, strict=True), *zip(model.norms, plain.bns, strict=True)]
        for mine, other in named:
            torch.testing.assert_close(mine.weight.grad, other.weight.grad, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(mine.bias.grad, other.bias.grad, rtol=1e-5, atol=1e-6)
        with torch.no_grad():
            for parameter in (*model.parameters(), *plain.parameters()):
                parameter -= parameter.grad
            for table, embed in zip(model.tables, plain.embeds, strict=True):
                torch.testing.assert_close(model.embeddings.rows(table.name), embed.weight, rtol=1e-5, atol=1e-6)
                embed.weight.copy_(model.embeddings.rows(table.name))
            for mine, other in named:
                other.weight.copy_(mine.weight)
                other.bias.copy_(mine.bias)
            if plain.bn_cont is not None:
                plain.bn_cont.load_state_dict(model.dense_norm.state_dict())  # type: ignore[union-attr]
    batch = batch_of(9, spec, seed=9)
    torch.testing.assert_close(model.eval()(batch), plain.eval()(batch.dense, batch.ids), rtol=1e-5, atol=1e-6)
    assert not torch.equal(model(batch), model.train()(batch)), "evaluation must use the running moments"


@pytest.mark.slow
def test_dropout_is_a_function_of_seed_and_step() -> None:
    model = Tabular(SPEC, hidden=(64, 32), seed=1, **DROPPED)
    batch = batch_of(4000)
    masks = model.inputs(batch)[2:]
    assert [mask.shape[1] for mask in masks] == [model.embedded, 64, 32]
    for mask, share in zip(masks, (0.1, 0.25, 0.5), strict=True):
        assert mask.unique().tolist() == pytest.approx([0.0, 1 / (1 - share)])
        assert float((mask == 0).float().mean()) == pytest.approx(share, abs=0.01)
    torch.rand(3)  # of torch's generator they know nothing
    assert all(map(torch.equal, masks, model.inputs(batch)[2:]))
    assert not torch.equal(masks[0], Tabular(SPEC, hidden=(64, 32), seed=2, **DROPPED).inputs(batch)[2])
    model.loss(batch).backward()
    assert not torch.equal(masks[0], model.inputs(batch)[2]), "the next step drops others"
    with torch.no_grad():
        assert len(model.inputs(batch)) == 2, "predicting drops nothing, also in training mode"
    assert len(model.eval().inputs(batch)) == 2
    one = Tabular(SPEC, dropout=(0.0, 0.5))
    assert [mask.shape[1] for mask in one.inputs(batch)[2:]] == [32]
    assert one.loss(batch).isfinite()


@pytest.mark.parametrize("shards", [1, 2])
def test_batches_of_one_step_of_the_rows_drop_other_values(shards: int) -> None:
    """Micro-batches, and the batches of frozen rows; a batch that is computed again drops the same."""
    model, batch = Tabular(SPEC, hidden=(8, 4), seed=1, shards=shards, **DROPPED), batch_of(20)
    for tick in (0, 5):
        model.embeddings.tick = tick
        numbered = [model.inputs(replace(batch, step=step))[2] for step in range(4, 7)]
        assert all(map(torch.equal, numbered, (model.inputs(replace(batch, step=step))[2] for step in range(4, 7))))
        assert not any(torch.equal(one, other) for one, other in combinations(numbered, 2))
    assert not torch.equal(*numbered[0].chunk(2)), "shards drop other values"
    assert torch.equal(numbered[1], model.inputs(batch)[2]), "without a number, as the batch of this step"


def test_a_batch_of_one_row_trains_by_the_running_moments() -> None:
    model = Tabular(SPEC)
    model.loss(batch_of(32)).backward()
    before = {name: value.clone() for name, value in model.named_buffers()}
    loss = model.loss(batch_of(1))
    loss.backward()
    assert loss.isfinite()
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())
    assert all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters())  # type: ignore[union-attr]


def test_mistakes_are_told() -> None:
    with pytest.raises(ConfigError, match=r"dims names \['C9'\]"):
        Tabular(SPEC, dims={"C9": 3})
    for wrong in (5, {"C1": "wide"}):
        with pytest.raises(ConfigError, match="not columns by table"):
            Tabular(SPEC, dims=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="embedding_dim=0; both must be at least 1"):
        Tabular(SPEC, dims={"C1": 0})
    with pytest.raises(ConfigError, match="3 shares for 2 layers"):
        Tabular(SPEC, dropout=(0.1, 0.2, 0.3))
    with pytest.raises(ConfigError, match=r"dropout is 1\.0\. Give a share"):
        Tabular(SPEC, embedding_dropout=1.0)
    with pytest.raises(ConfigError, match="tables of equal width"):
        DLRM(SPEC, table_dims={"C1": 3})


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> stoker.Dataset:
    return make_dataset(tmp_path_factory.mktemp("tabular") / "d", rows=1601, num_embeddings=(600, 300, 10))


@pytest.fixture(scope="module")
def whole(data: stoker.Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tabular") / "whole"
    result = stoker.train(data, out=path, **RUN)
    assert result.test["auc"] is not None
    assert result.test["auc"] > 0.6
    return path


@pytest.mark.slow
def test_resumed_runs_are_the_same_to_the_bit(data: stoker.Dataset, whole: Path, tmp_path: Path) -> None:
    without_epochs = {name: value for name, value in RUN.items() if name != "epochs"}
    stoker.train(data, out=tmp_path / "a", **{**without_epochs, "steps": 20})  # in the middle of an epoch
    torch.manual_seed(99)
    stoker.train(resume=tmp_path / "a", display="quiet", epochs=2)
    assert checkpoint_files(tmp_path / "a") == checkpoint_files(whole)
    assert [r["log_loss"] for r in records(tmp_path / "a", "valid")] == [r["log_loss"] for r in records(whole, "valid")]


def test_checkpoints_keep_the_running_moments(data: stoker.Dataset, whole: Path) -> None:
    loaded = loading.load(whole)
    model: RecModel = loaded.model
    moments = dict(model.named_buffers())
    # The last batch of an epoch of 41 has one row.
    assert int(moments["norms.0.num_batches_tracked"]) == loaded.step - loaded.step // 41
    assert float(moments["dense_norm.running_mean"].abs().max()) > 0
    report = stoker.training.files.rundir.RunDirectory(whole).read("report.json")
    assert stoker.training.evaluate(model, data.test)["log_loss"] == report["test"]["log_loss"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["cached", "host-pipelined"])
def test_placed_runs_with_tables_of_different_widths_are_the_same(
    data: stoker.Dataset, whole: Path, tmp_path: Path, strategy: str
) -> None:
    size = sum(t.num_embeddings * (4 * t.embedding_dim + 4) for t in loading.load(whole).model.tables)
    stoker.train(data, out=tmp_path / "a", **RUN, device_memory=str(size // 2), strategy=strategy)
    assert_same_run(whole, tmp_path / "a")
    found = stoker.verify(whole, steps=12)
    assert found.identical, str(found.difference)
    assert found.touched_rows > 0
