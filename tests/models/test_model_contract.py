"""What every model must do. A new model inherits every test here; a line in CASES makes it small, or adds variants."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import stoker
from stoker.dataset.batch import Batch
from stoker.dataset.spec import Feature, FeatureSpec
from stoker.models import (
    DCN,
    DIN,
    DLRM,
    MODELS,
    TBSM,
    DeepFM,
    RankMixer,
    RecModel,
    SASRec,
    SequenceModel,
    Tabular,
    TwoTower,
)
from stoker.optim import SGD, Adagrad

CASES: dict[str, tuple[type[RecModel], dict[str, Any]]] = {
    "dlrm": (DLRM, {"bottom": (16,), "top": (16, 8)}),
    "dlrm, linear terms": (DLRM, {"bottom": (16,), "top": (16, 8), "linear": 0.2}),
    "deepfm": (DeepFM, {"hidden": (16, 8)}),
    "dcn": (DCN, {"cross_layers": 2, "rank": 4, "hidden": (16,)}),
    "dcn stacked, full rank": (DCN, {"rank": None, "hidden": (16,), "structure": "stacked"}),
    "tbsm": (TBSM, {"tower": (24, 16), "attention": (8,), "top": (16,)}),
    "tbsm, products as weights": (TBSM, {"tower": (24,), "attention": (), "top": (16,), "inner": "dot"}),
    "din": (DIN, {"attention": (8,), "hidden": (16, 8)}),
    "tabular": (Tabular, {"hidden": (16, 8)}),
    "tabular of equal dims": (Tabular, {"hidden": (12,), "max_dim": 2}),
    "rankmixer": (RankMixer, {"tokens": 2, "width": 8, "expansion": 2}),
    "sasrec": (SASRec, {"hidden": (16,)}),
    "two-tower": (TwoTower, {"hidden": (16,), "width": 8}),
    "din with dice": (DIN, {"attention": (8,), "hidden": (16,), "activation": "dice"}),
}
CASES |= {name: (kind, {}) for name, kind in MODELS.items() if kind not in {each for each, _ in CASES.values()}}

DENSE = FeatureSpec.from_sizes(3, [30, 7, 1])
NO_DENSE = FeatureSpec.from_sizes(0, [30, 7])
SEQUENCE = FeatureSpec(
    dense=("price",),
    features=(
        Feature(name="item", table="item"),
        Feature(name="history", table="item", sequence=True, max_length=5),
        Feature(name="country", table="country"),
    ),
    num_embeddings={"item": 30, "country": 4},
)
TWO_SEQUENCES = FeatureSpec(
    dense=(),
    features=(
        Feature(name="items", table="item", sequence=True, max_length=4),
        Feature(name="user", table="user"),
        Feature(name="item", table="item"),
        Feature(name="category", table="category"),
        Feature(name="categories", table="category", sequence=True, max_length=4),
        Feature(name="genres", table="genre", sequence=True, max_length=3),  # pooled by every model
    ),
    num_embeddings={"item": 30, "user": 9, "category": 5, "genre": 6},
)
SPECS = {"dense": DENSE, "no dense": NO_DENSE, "sequence": SEQUENCE, "two sequences": TWO_SEQUENCES}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every model on every data set that it takes: one over a history needs a sequence of its targets."""
    pairs = {
        f"{name}-{data}": (case, spec)
        for name, case in CASES.items()
        for data, spec in SPECS.items()
        if "sequence" in data or not issubclass(case[0], SequenceModel)
    }
    if "spec" in metafunc.fixturenames:
        metafunc.parametrize(("case", "spec"), pairs.values(), ids=pairs)


def build(case: tuple[type[RecModel], dict[str, Any]], spec: FeatureSpec, **settings: Any) -> RecModel:
    kind, options = case
    if kind is TwoTower and spec.one_hot:  # no history tells which column is the item
        options = {"item": (spec.features[0].name, *spec.dense[:1]), **options}
    return kind(
        spec,
        **{"embedding_dim": 8, "optimizer": Adagrad(lr=0.1), "backend": "reference", **options, **settings},
    )


def random_batch(spec: FeatureSpec, rows: int, seed: int = 0, *, empty: bool = False) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    sizes = [spec.num_embeddings[feature.table] for feature in spec.features]
    lengths = []
    for _ in range(rows):  # sequences of equal max_length have a value for every step in each
        drawn = {n: 0 if empty else int(torch.randint(0, n + 1, (), generator=generator)) for n in (3, 4, 5)}
        lengths += [drawn[feature.max_length] if feature.sequence else 1 for feature in spec.features]
    flat = [
        torch.randint(0, sizes[bag % len(sizes)], (length,), generator=generator) for bag, length in enumerate(lengths)
    ]
    ids = torch.cat([torch.empty(0, dtype=torch.int64), *flat])
    return Batch(
        dense=torch.randn(rows, len(spec.dense), generator=generator),
        ids=ids.view(rows, len(sizes)) if spec.one_hot else ids,
        offsets=None if spec.one_hot else torch.tensor([0, *lengths]).cumsum(0),
        labels=torch.randint(0, 2, (rows,), generator=generator).float(),
    )


def all_rows(model: RecModel) -> dict[str, torch.Tensor]:
    return {table.name: model.embeddings.rows(table.name) for table in model.tables}


def test_every_registered_model_is_tested() -> None:
    assert {kind for kind, _ in CASES.values()} == set(MODELS.values())


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2, 33])
def test_logits_and_probabilities(case: Any, spec: FeatureSpec, rows: int) -> None:
    model = build(case, spec).eval()
    batch = random_batch(spec, rows)
    logits = model(batch)
    assert logits.shape == (rows,)
    assert logits.dtype == torch.float32
    scores = model.predict(batch)
    assert scores.shape == (rows,)
    assert not scores.requires_grad
    assert bool(((scores >= 0) & (scores <= 1)).all())
    torch.testing.assert_close(scores, torch.sigmoid(logits))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [0, 3])
def test_a_batch_without_rows_or_sequences(case: Any, spec: FeatureSpec, rows: int) -> None:
    """It is scored and trains; without rows nothing changes, as with nn.EmbeddingBag and nn.Linear."""
    model = build(case, spec).train()
    batch = random_batch(spec, rows, empty=True)
    before = {name: value.clone() for name, value in model.state_dict().items() if not name.endswith("tick")}
    logits = model(batch)
    assert logits.shape == model.eval().predict(batch).shape == (rows,)
    logits.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.dense_parameters())
    after = model.state_dict()
    assert all(value.isfinite().all() for value in after.values())
    if not rows:
        assert not any(p.grad is not None and p.grad.any() for p in model.dense_parameters())
        assert all(torch.equal(value, after[name]) for name, value in before.items())


def exported(name: str, spec: FeatureSpec, **settings: Any) -> tuple[RecModel, torch.export.ExportedProgram]:
    model = build(CASES[name], spec, **settings).train()
    program = model.export_dense(random_batch(spec, 4))
    assert model.training
    return model.eval(), program


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_exported_dense_parts_score_batches_of_any_size(name: str) -> None:
    spec = TWO_SEQUENCES if issubclass(CASES[name][0], SequenceModel) else DENSE
    model, program = exported(name, spec)
    # It runs without Stoker, and without the rows.
    used = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert "aten.linear.default" in used
    assert not any("stoker" in target for target in used), used
    assert sum(value.numel() for value in program.parameters()) == sum(one.numel() for one in model.dense_parameters())
    assert not any("embeddings" in key for key in program.state_dict)
    score = program.module()
    for rows in (1, 2, 7, 33):
        inputs = model.inputs(random_batch(spec, rows, seed=rows))
        with torch.no_grad():
            torch.testing.assert_close(score(*inputs), model.dense_part(*inputs), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_exported_programs_are_kept_in_files(tmp_path: Path) -> None:
    model, program = exported("dlrm", NO_DENSE, matmul="bf16")
    torch.export.save(program, tmp_path / "dense.pt2")
    score = torch.export.load(tmp_path / "dense.pt2").module()
    for rows in (2, 9):
        batch = random_batch(NO_DENSE, rows)
        with torch.no_grad():
            logits = score(*model.inputs(batch))
            assert logits.dtype == torch.float32
            torch.testing.assert_close(logits, model(batch), rtol=2e-2, atol=2e-2)


def test_one_example_is_enough_to_export_and_none_is_refused() -> None:
    model = build(CASES["dcn"], DENSE).eval()
    score = model.export_dense(random_batch(DENSE, 1)).module()
    inputs = model.inputs(random_batch(DENSE, 5))
    with torch.no_grad():
        torch.testing.assert_close(score(*inputs), model.dense_part(*inputs), rtol=1e-5, atol=1e-6)
    with pytest.raises(stoker.ConfigError, match="at least 1 example"):
        model.export_dense(Batch(dense=torch.zeros(0, 3), ids=torch.zeros(0, 3, dtype=torch.int64)))


@pytest.mark.slow
def test_each_example_is_scored_by_itself(case: Any, spec: FeatureSpec) -> None:
    model = build(case, spec)
    batch = random_batch(spec, 9)
    together = model.predict(batch)
    for row in range(9):
        width = len(spec.features)
        bags = slice(row * width, (row + 1) * width + 1)
        if batch.offsets is None:
            ids, offsets = batch.ids[row : row + 1], None
        else:
            own = batch.offsets[bags]
            ids, offsets = batch.ids[own[0] : own[-1]], own - own[0]
        alone = model.predict(Batch(dense=batch.dense[row : row + 1], ids=ids, offsets=offsets))
        torch.testing.assert_close(alone, together[row : row + 1])


@pytest.mark.slow
def test_every_input_matters(case: Any, spec: FeatureSpec) -> None:
    model = build(case, spec, seed=3).eval()  # batch norm, while it trains, takes away what all rows have in common
    batch = random_batch(spec, 4)
    before = model(batch)
    for column in range(len(spec.dense)):
        dense = batch.dense.clone()
        dense[:, column] += 1
        changed = model(Batch(dense=dense, ids=batch.ids, offsets=batch.offsets))
        assert not torch.equal(changed, before), f"dense column {column} is ignored"
    for table in model.tables:
        for start, rows in model.embeddings.read(table.name):
            kept = rows.weight.clone()
            rows.weight += 0.5
            model.embeddings.write(table.name, start, rows)
            assert not torch.equal(model(batch), before), f"table {table.name} is ignored"
            rows.weight.copy_(kept)


@pytest.mark.slow
def test_loss_is_mean_binary_cross_entropy_and_falls(case: Any, spec: FeatureSpec) -> None:
    model = build(case, spec).eval()
    batch = random_batch(spec, 64)
    optimizer = torch.optim.Adam(model.dense_parameters(), lr=0.01)
    assert batch.labels is not None
    first = model.loss(batch).item()
    scores = model.predict(batch).double()
    expected = -(batch.labels * scores.log() + (1 - batch.labels) * (1 - scores).log()).mean()
    assert first == pytest.approx(expected.item(), rel=1e-5)
    model.train()
    for _ in range(60):
        model.loss(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model.loss(batch).item() < 0.5 * first


@pytest.mark.slow
def test_loss_without_labels_is_refused(case: Any, spec: FeatureSpec) -> None:
    batch = random_batch(spec, 2)
    with pytest.raises(ValueError, match="no labels"):
        build(case, spec).loss(replace(batch, labels=None))
    for shape in ((1,), (2, 1), (3,)):  # some of which would be broadcast
        with pytest.raises(ValueError, match=r"has labels of shape .* for 2 examples"):
            build(case, spec).loss(replace(batch, labels=torch.zeros(shape)))


@pytest.mark.slow
def test_backward_moves_just_the_rows_looked_up(case: Any, spec: FeatureSpec) -> None:
    model = build(case, spec)
    batch = random_batch(spec, 3)
    before = all_rows(model)
    model.loss(batch).backward()
    after = all_rows(model)
    lengths = torch.ones(3 * len(spec.features), dtype=torch.int64)
    if batch.offsets is not None:
        lengths = batch.offsets.diff()
    tables = [feature.table for feature in spec.features] * 3
    owner = [table for table, length in zip(tables, lengths.tolist(), strict=True) for _ in range(length)]
    for name, rows in after.items():
        moved = set((rows != before[name]).any(1).nonzero().flatten().tolist())
        seen = {i for i, table in zip(batch.ids.flatten().tolist(), owner, strict=True) if table == name}
        assert moved == seen


@pytest.mark.slow
def test_predicting_and_evaluating_change_nothing(case: Any, spec: FeatureSpec) -> None:
    model = build(case, spec)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    batch = random_batch(spec, 8)
    scores = model.train().predict(batch)
    assert torch.equal(model.eval().predict(batch), scores)
    with torch.no_grad():
        model(batch)
    after = model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert model.embeddings.tick == 0


@pytest.mark.slow
def test_dense_gradients_are_those_of_finite_differences(case: Any, spec: FeatureSpec) -> None:
    model = build(case, spec)
    with pytest.warns(UserWarning, match="rows of EmbeddingTables remain"):
        model.double()
    inputs = [
        torch.randn(tensor.shape, dtype=torch.float64, requires_grad=True) if tensor.is_floating_point() else tensor
        for tensor in model.inputs(random_batch(spec, 3))
    ]
    names, parameters = zip(*((n, p) for n, p in model.dense_tensors() if p.requires_grad), strict=True)

    def score(*values: torch.Tensor) -> torch.Tensor:
        bound = _DensePart(model)
        return torch.func.functional_call(
            bound,
            {f"model.{name}": value for name, value in zip(names, values[len(inputs) :], strict=True)},
            values[: len(inputs)],
        )

    assert torch.autograd.gradcheck(score, (*inputs, *parameters), fast_mode=True)


class _DensePart(torch.nn.Module):
    def __init__(self, model: RecModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.model.dense_part(*inputs)


def plain_inputs(model: RecModel, batch: Batch, rows: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """What the dense part takes, bag by bag from the rows of every table."""
    width = len(model.spec.features)
    offsets = torch.arange(len(batch) * width + 1) if batch.offsets is None else batch.offsets
    bags: dict[str, list[torch.Tensor]] = {feature.name: [] for feature in model.spec.features}
    for bag in range(len(batch) * width):
        feature = model.spec.features[bag % width]
        bags[feature.name].append(rows[feature.table][batch.ids.flatten()[offsets[bag] : offsets[bag + 1]]])

    def pooled(names: Any) -> torch.Tensor:
        found = [
            torch.stack([bag.mean(0) if len(bag) else torch.zeros(bag.shape[1]) for bag in bags[name]])
            for name in names
        ]
        return torch.cat(found, 1) if model.mixed_dims else torch.stack(found, 1)

    if not isinstance(model, SequenceModel):
        return [batch.dense, pooled(bags)]
    missing = [
        [torch.cat([torch.zeros(model.num_steps - len(bag), 8), bag]) for bag in bags[name]]
        for name in model.history.values()
    ]
    steps = torch.stack([torch.stack(bag) for bag in missing], 2)
    lengths = torch.tensor([len(bag) for bag in bags[next(iter(model.history.values()))]])
    mask = torch.arange(model.num_steps) >= model.num_steps - lengths.unsqueeze(1)
    return [batch.dense, pooled(model.pooled), steps, mask]


@pytest.mark.slow
def test_row_gradient_is_the_derivative_of_the_loss(case: Any, spec: FeatureSpec) -> None:
    model = build(case, spec, optimizer=SGD(lr=1.0))
    batch = random_batch(spec, 5)
    leaves = {name: rows.requires_grad_() for name, rows in all_rows(model).items()}
    inputs = plain_inputs(model, batch, leaves)
    for plain, found in zip(inputs, model.inputs(batch), strict=True):
        torch.testing.assert_close(plain, found)
    logits = model.dense_part(*inputs)
    torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels).backward()
    model.zero_grad()
    model.loss(batch).backward()
    for name, rows in all_rows(model).items():
        torch.testing.assert_close(rows, leaves[name].detach() - leaves[name].grad)


@pytest.mark.slow
def test_config_rebuilds_the_same_model(case: Any, spec: FeatureSpec) -> None:
    model = build(case, spec, seed=11, pooling="sum")
    config = json.loads(json.dumps(model.config()))
    again = MODELS[config["model"]].from_config(spec, config, optimizer=Adagrad(lr=0.1), backend="reference")
    assert again.config() == model.config()
    batch = random_batch(spec, 6)
    assert torch.equal(again(batch), model(batch))


@pytest.mark.slow
def test_seed_decides_the_start(case: Any, spec: FeatureSpec) -> None:
    batch = random_batch(spec, 6)
    assert torch.equal(build(case, spec, seed=1)(batch), build(case, spec, seed=1)(batch))
    assert not torch.equal(build(case, spec, seed=1)(batch), build(case, spec, seed=2)(batch))
    state = torch.get_rng_state()
    build(case, spec)
    assert torch.equal(torch.get_rng_state(), state), "building a model must not draw from the global generator"


@pytest.mark.slow
def test_checkpoint_round_trip(case: Any, spec: FeatureSpec, tmp_path: Path) -> None:
    model = build(case, spec)
    batch = random_batch(spec, 16)
    model.loss(batch).backward()
    stoker.save(tmp_path / "a", model)
    again = stoker.load(tmp_path / "a", backend="reference").model
    assert type(again) is type(model)
    assert torch.equal(again(batch), model(batch))
    again.loss(batch).backward()
    model.zero_grad()
    model.loss(batch).backward()
    for name, rows in all_rows(model).items():
        assert torch.equal(again.embeddings.rows(name), rows), "row-optimizer state was not kept"


@pytest.mark.slow
def test_bfloat16_dense_part_is_near(case: Any, spec: FeatureSpec) -> None:
    batch = random_batch(spec, 32)
    exact = build(case, spec)(batch)
    half = build(case, spec, matmul="bf16")
    logits = half(batch)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, exact, rtol=0.05, atol=0.05)
    half.loss(batch).backward()
    assert all(parameter.grad is not None for parameter in half.dense_parameters())


@pytest.mark.slow
def test_bfloat16_tables(case: Any, spec: FeatureSpec) -> None:
    model = build(case, spec, dtype="bfloat16")
    batch = random_batch(spec, 32)
    assert all(table.dtype == "bfloat16" for table in model.tables)
    before = all_rows(model)
    model.loss(batch).backward()
    assert any(not torch.equal(rows, before[name]) for name, rows in all_rows(model).items())
