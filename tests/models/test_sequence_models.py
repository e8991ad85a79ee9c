"""Models over a history: the published layers, against plain transcriptions, with masks that hide what is missing."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from stoker.base.errors import ConfigError, DataError
from stoker.dataset.batch import Batch
from stoker.dataset.spec import Feature, FeatureSpec
from stoker.models import DIN, DLRM, TBSM, SASRec, SequenceModel
from stoker.models.layers import Dice, PReLU

TAOBAO = FeatureSpec(
    dense=("position",),
    features=(
        Feature(name="user", table="user"),
        Feature(name="item", table="item"),
        Feature(name="category", table="category"),
        Feature(name="items", table="item", sequence=True, max_length=20),
        Feature(name="categories", table="category", sequence=True, max_length=20),
    ),
    num_embeddings={"user": 10, "item": 40, "category": 6},
)
NEWS = FeatureSpec(
    dense=("fresh", "last_hour"),
    features=(
        Feature(name="user", table="user"),
        Feature(name="article", table="article"),
        Feature(name="device", table="device"),
        Feature(name="hour", table="hour"),
        Feature(name="clicked", table="article", sequence=True, max_length=6),
    ),
    num_embeddings={"user": 10, "article": 30, "device": 4, "hour": 5},
)
ALONE = FeatureSpec(
    dense=(),
    features=(Feature(name="seen", table="item", sequence=True, max_length=4), Feature(name="item", table="item")),
    num_embeddings={"item": 12},
)
SPECS = {"taobao": TAOBAO, "news": NEWS, "alone": ALONE}


def draw(spec: FeatureSpec, rows: int, seed: int = 0, longest: int | None = None) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    most = max(feature.max_length for feature in spec.features)
    ids: list[int] = []
    lengths: list[int] = []
    for row in range(rows):
        history = [0, most, 1][row] if row < 3 else int(torch.randint(0, most + 1, (), generator=generator))
        for feature in spec.features:
            lengths.append(min(history, longest or most) if feature.sequence else 1)
            size = spec.num_embeddings[feature.table]
            ids += torch.randint(0, size, (lengths[-1],), generator=generator).tolist()
    return Batch(
        dense=torch.rand(rows, len(spec.dense), generator=generator),
        ids=torch.tensor(ids),
        offsets=torch.tensor([0, *lengths]).cumsum(0),
        labels=torch.randint(0, 2, (rows,), generator=generator).float(),
    )


def build(kind: type[SequenceModel], spec: FeatureSpec, **options: Any) -> Any:
    return kind(spec, **{"embedding_dim": 8, "backend": "reference", "seed": 5, **options})


def vectors(model: SequenceModel, batch: Batch, example: int) -> tuple[dict[str, Tensor], list[list[Tensor]]]:
    """Rows of the one-id features, and for each step that is there those of its sequences, oldest first."""
    width = len(model.spec.features)
    one: dict[str, Tensor] = {}
    many: dict[str, Tensor] = {}
    for place, feature in enumerate(model.spec.features):
        begin, end = batch.offsets[example * width + place : example * width + place + 2].tolist()
        rows = model.embeddings.rows(feature.table)[batch.ids[begin:end]]
        (many if feature.sequence else one)[feature.name] = rows if feature.sequence else rows[0]
    sequences = [many[name] for name in model.history.values()]
    return one, [list(step) for step in zip(*sequences, strict=True)]


def relu_chain(x: Tensor, layers: Any) -> Tensor:
    for layer in layers:
        x = (layer.weight @ x + layer.bias).clamp(min=0)
    return x


def last_linear_chain(x: Tensor, layers: Any) -> Tensor:
    x = relu_chain(x, list(layers)[:-1])
    return layers[-1].weight @ x + layers[-1].bias


def plain_tbsm(model: TBSM, batch: Batch, example: int) -> Tensor:
    """One example, step by step, from the paper and the layers' weights."""
    one, steps = vectors(model, batch, example)
    history, total = list(model.history), model.num_steps
    context = [one[name] for name in model.pooled if name not in history]
    column = model.spec.dense.index("position") if "position" in model.spec.dense else None

    def tower(inputs: Tensor, step: list[Tensor]) -> Tensor:
        own = [relu_chain(inputs, model.bottom.layers), *step]
        products = [own[i] @ own[j] for i in range(len(own)) for j in range(i)]
        products += [mine @ other for mine in own for other in context]
        products += [context[i] @ context[j] for i in range(len(context)) for j in range(i)]
        found = relu_chain(torch.cat([own[0], torch.stack(products)]), model.tower.layers)
        return found / found.norm().clamp(min=1e-4)

    first = total - len(steps)
    own = [value for number, value in enumerate(batch.dense[example]) if number != column]
    others = torch.stack(own) if own else torch.zeros(0)
    seen = [
        tower(torch.cat([torch.tensor([(first + t + 1) / (total + 1)]), 0 * others]), step)
        for t, step in enumerate(steps)
    ]
    place = torch.ones(1) if column is None else batch.dense[example, column].view(1)
    last = tower(torch.cat([place, others]), [one[name] for name in history])
    asked = last
    if model.product is not None:
        asked = model.product @ last
        asked = model.product.T @ asked if model.inner == "definite" else asked
    weights = torch.zeros(total)
    for t, step in enumerate(seen):
        weights[first + t] = step @ asked
    if model.attention is not None:
        weights = 1 / (1 + torch.exp(-last_linear_chain(weights, model.attention.layers)))
    found = torch.zeros_like(last)
    for t, step in enumerate(seen):
        found = found + weights[first + t] * step
    return last_linear_chain(torch.cat([found, last, others]), model.top.layers)[0]


def plain_din(model: DIN, batch: Batch, example: int) -> Tensor:
    one, steps = vectors(model, batch, example)
    target = torch.cat([one[name] for name in model.history])

    def chain(x: Tensor, layers: Any) -> Tensor:
        for layer, activation in zip(layers.layers, [*layers.activations, None], strict=True):
            x = layer.weight @ x + layer.bias
            if isinstance(activation, PReLU):
                x = torch.stack([v if v > 0 else a * v for v, a in zip(x, activation.slope, strict=True)])
            elif activation is not None:
                share = torch.sigmoid((x - activation.running_mean) / torch.sqrt(activation.running_var + 1e-8))
                x = share * x + (1 - share) * activation.slope * x
        return x[0]

    interest = torch.zeros_like(target)
    for step in steps:
        past = torch.cat(step)
        interest = interest + chain(torch.cat([past, target, past - target, past * target]), model.attention) * past
    return chain(torch.cat([batch.dense[example], *(one[name] for name in model.pooled), interest]), model.deep)


def plain_sasrec(model: SASRec, batch: Batch, example: int) -> Tensor:
    """The steps that are there, one query after the other, each over the keys up to itself."""
    one, steps = vectors(model, batch, example)
    target = torch.cat([one[name] for name in model.history])
    places = model.places[len(model.places) - len(steps) :]
    x = [torch.cat(step) + place for step, place in zip(steps, places, strict=True)]
    size = len(target) // model.heads
    for block in model.blocks:
        q, k, v = block.attention.chunk(3)
        seen = [block.before(each) for each in x]
        made = []
        for t in range(len(x)):
            heads = []
            for own in (slice(head * size, head * size + size) for head in range(model.heads)):
                scores = torch.stack([(q @ seen[t])[own] @ (k @ seen[j])[own] for j in range(t + 1)]) / size**0.5
                heads.append(sum(w * (v @ seen[j])[own] for j, w in enumerate(scores.softmax(0))))
            y = x[t] + torch.cat(heads)
            made.append(y + last_linear_chain(block.after(y), [block.first, block.second]))
        x = made
    state = model.normed(x[-1]) if x else torch.zeros_like(target)
    others = torch.cat([batch.dense[example], *(one[name] for name in model.pooled), state])
    return state @ target + last_linear_chain(others, model.others.layers)[0]


CASES: dict[str, tuple[type[SequenceModel], dict[str, Any], Any]] = {
    "tbsm": (TBSM, {}, plain_tbsm),
    "tbsm, deeper": (
        TBSM,
        {"bottom": (4,), "tower": (12, 9, 7), "attention": (6,), "inner": "indefinite"},
        plain_tbsm,
    ),
    "tbsm, products as weights": (TBSM, {"tower": (11,), "attention": (), "inner": "dot"}, plain_tbsm),
    "din": (DIN, {}, plain_din),
    "din, dice": (DIN, {"attention": (9, 5), "hidden": (12,), "activation": "dice"}, plain_din),
    "sasrec": (SASRec, {}, plain_sasrec),
    "sasrec, more heads": (SASRec, {"blocks": 3, "heads": 4, "hidden": ()}, plain_sasrec),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("spec", SPECS)
def test_equals_a_plain_transcription_step_by_step(case: str, spec: str) -> None:
    kind, options, plain = CASES[case]
    model = build(kind, SPECS[spec], **options)
    batch = draw(SPECS[spec], 12)
    if "dice" in case:
        for _ in range(3):
            model(batch)  # moving averages away from their start
    model.eval()
    with torch.no_grad():
        for parameter in model.dense_parameters():
            if parameter.dim() == 1:  # slopes too, so that the activations bend
                parameter.add_(torch.linspace(-0.2, 0.3, len(parameter)))
        expected = torch.stack([plain(model, batch, example) for example in range(12)])
        torch.testing.assert_close(model(batch), expected, rtol=1e-4, atol=1e-5)


def test_tbsm_has_the_published_layers_on_taobao() -> None:
    model = build(TBSM, TAOBAO, embedding_dim=16)
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters() if name.endswith("weight")}
    assert shapes == {
        "bottom.layers.0.weight": (16, 1),
        "tower.layers.0.weight": (15, 22),
        "tower.layers.1.weight": (15, 15),
        "attention.layers.0.weight": (15, 20),
        "attention.layers.1.weight": (15, 15),
        "attention.layers.2.weight": (20, 15),
        "top.layers.0.weight": (60, 30),
        "top.layers.1.weight": (1, 60),
    }
    assert model.product.shape == (15, 15)
    assert model.history == {"item": "items", "category": "categories"}


@pytest.mark.parametrize("case", CASES)
def test_what_stands_in_a_missing_step_changes_no_bit(case: str) -> None:
    kind, options, _ = CASES[case]
    model = build(kind, NEWS, **options)
    dense, embedded, steps, mask = (tensor.detach() for tensor in model.inputs(draw(NEWS, 16)))
    there = steps.clone().requires_grad_()
    noise = torch.where(mask[:, :, None, None], steps, 100 * torch.randn_like(steps)).requires_grad_()
    results = []
    for given in (there, noise):
        model.zero_grad()
        logits = model.dense_part(dense, embedded, given, mask)
        logits.square().sum().backward()
        results.append([logits.detach(), *(parameter.grad.clone() for parameter in model.dense_parameters())])
    assert torch.equal(results[0][0], results[1][0])
    for one, other in zip(results[0][1:], results[1][1:], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert not there.grad[~mask].any()
    assert not noise.grad[~mask].any()


@pytest.mark.parametrize("case", ["din", "din, dice"])
def test_room_for_more_steps_changes_nothing(case: str) -> None:
    """TBSM's attention has a weight for each step, so there more steps are another model."""
    kind, options, _ = CASES[case]
    longer = replace(NEWS, features=tuple(replace(f, max_length=50) if f.sequence else f for f in NEWS.features))
    batch = draw(NEWS, 16)
    models = [build(kind, spec, **options) for spec in (NEWS, longer)]
    one, other = (model(batch) for model in models)  # in training: the moments of Dice leave missing steps out too
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    for model in models:
        model.loss(batch).backward()
    torch.testing.assert_close(
        models[0].embeddings.rows("article"), models[1].embeddings.rows("article"), rtol=1e-5, atol=1e-6
    )


def test_steps_matter_in_their_order_but_to_din() -> None:
    batch = draw(NEWS, 3)
    ids = batch.ids.clone()
    begin, end = batch.offsets[2 * 5 - 1].item(), batch.offsets[2 * 5].item()
    assert end - begin == 6
    ids[begin:end] = ids[begin:end].flip(0)
    for kind, same in ((TBSM, False), (SASRec, False), (DIN, True)):
        model = build(kind, NEWS)
        one, other = model(batch), model(replace(batch, ids=ids))
        assert torch.allclose(one, other, atol=1e-6) == same
        assert torch.equal(one[[0, 2]], other[[0, 2]])


def test_dice_bends_at_the_batch_mean_and_keeps_moving_averages() -> None:
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0)) * 2 + 1
    mask = torch.arange(50) % 3 > 0
    dice = Dice(3, momentum=0.25)
    with torch.no_grad():
        dice.slope.fill_(0.1)
    kept = x[mask]
    mean, var = kept.mean(0), kept.var(0, unbiased=False)
    share = torch.sigmoid((x - mean) / torch.sqrt(var + 1e-8))
    torch.testing.assert_close(dice(x, mask), share * x + (1 - share) * 0.1 * x)
    torch.testing.assert_close(dice.running_mean, 0.25 * mean)
    torch.testing.assert_close(dice.running_var, 0.75 + 0.25 * var)
    with torch.no_grad():
        dice(x)  # predicting in training mode changes nothing
    dice.eval()
    dice(x)
    torch.testing.assert_close(dice.running_mean, 0.25 * mean)
    dice.train()
    before = {name: value.clone() for name, value in dice.state_dict().items()}
    assert math.isfinite(dice(x, torch.zeros(50, dtype=torch.bool)).sum().item())  # no row counts
    assert dice(x[:0]).shape == (0, 3)
    assert all(torch.equal(value, before[name]) for name, value in dice.state_dict().items())


def with_features(*features: Feature) -> FeatureSpec:
    return FeatureSpec(
        dense=(), features=features, num_embeddings=dict.fromkeys({feature.table for feature in features}, 9)
    )


def test_pairs_that_are_not_plain_are_refused() -> None:
    item = Feature(name="item", table="item")
    seen = Feature(name="seen", table="item", sequence=True, max_length=3)
    with pytest.raises(ConfigError, match=r"there is no sequence\. Let both columns name one table.*such as 'dlrm'"):
        TBSM(with_features(item))
    with pytest.raises(ConfigError, match="words share no table with a one-id feature"):
        DIN(with_features(item, Feature(name="words", table="word", sequence=True, max_length=3)))
    with pytest.raises(ConfigError, match=r"'item' and 'page' share table 'item'.*history=\{\"item\": \"seen\"\}"):
        TBSM(with_features(item, Feature(name="page", table="item"), seen))
    bought = replace(seen, name="bought")
    with pytest.raises(ConfigError, match=r"'seen' and 'bought' share table 'item'"):
        TBSM(with_features(item, seen, bought))
    assert TBSM(with_features(item, seen, bought), history={"item": "bought"}).pooled == ("item", "seen")
    with pytest.raises(ConfigError, match=r"history names 'sean', which is not a sequence feature. Those are: seen"):
        TBSM(with_features(item, seen), history={"item": "sean"})
    with pytest.raises(ConfigError, match=r"history names 'seen', which is not a one-id feature. Those are: item"):
        TBSM(with_features(item, seen), history={"seen": "item"})
    with pytest.raises(ConfigError, match="at least one pair"):
        TBSM(with_features(item, seen), history={})
    shop, shops = Feature(name="shop", table="shop"), Feature(name="shops", table="shop", sequence=True, max_length=4)
    with pytest.raises(
        ConfigError, match=r"differ in length: seen up to 3, shops up to 4.*history=\{\"item\": \"seen\"\}"
    ):
        DIN(with_features(item, seen, shop, shops))
    with pytest.raises(ConfigError, match="activation 'relu' is unknown"):
        DIN(with_features(item, seen), activation="relu")
    with pytest.raises(ConfigError, match="inner 'cosine' is unknown"):
        TBSM(with_features(item, seen), inner="cosine")
    with pytest.raises(ConfigError, match="heads that divide the 16 columns of a step"):
        SASRec(with_features(item, seen), heads=3)


def test_sequences_of_one_history_must_be_as_long() -> None:
    batch = draw(TAOBAO, 2)
    offsets = torch.tensor([0, 1, 2, 3, 5, 7, 8, 9, 10, 11, 13])
    batch = replace(batch, ids=torch.zeros(13, dtype=torch.int64), offsets=offsets)
    with pytest.raises(DataError, match="example 1 of batch 0 has 1 steps in 'items' and 2 in 'categories'"):
        build(TBSM, TAOBAO)(batch)


def test_models_that_pool_refuse_steps() -> None:
    with pytest.raises(ConfigError, match=r"model 'dlrm' takes one vector a feature, but steps name \['clicked'\]"):
        DLRM(NEWS, steps={"clicked": 6})
