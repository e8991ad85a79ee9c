"""DLRM's exact shapes, initial values and interaction (facts of the reference configurations)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from stoker.base.errors import ConfigError
from stoker.dataset.batch import Batch
from stoker.dataset.spec import FeatureSpec
from stoker.models import DCN, DLRM, DeepFM, RankMixer

KAGGLE = FeatureSpec.from_sizes(13, [50] * 26)


@pytest.mark.parametrize(
    ("dim", "bottom", "top", "inputs"),
    [
        (16, (512, 256, 64, 16), (512, 256), 367),
        (64, (512, 256, 64), (512, 512, 256), 415),
        (128, (512, 256, 128), (1024, 1024, 512, 256), 479),
    ],
)
def test_shapes_of_the_published_configurations(dim: int, bottom: Any, top: Any, inputs: int) -> None:
    model = DLRM(KAGGLE, embedding_dim=dim, bottom=bottom, top=top, backend="reference")
    assert model.bottom is not None
    layers = model.bottom.layers
    assert [(layer.in_features, layer.out_features) for layer in layers] == list(
        zip((13, *bottom[:-1]), bottom, strict=True)
    )
    assert model.bottom.last_relu
    layers = model.top.layers
    assert [(layer.in_features, layer.out_features) for layer in layers] == list(
        zip((inputs, *top), (*top, 1), strict=True)
    )
    assert not model.top.last_relu


def test_embedding_dim_ends_the_bottom_and_one_output_ends_the_top() -> None:
    model = DLRM(KAGGLE, embedding_dim=16, bottom=(512, 256, 64), top=(8, 1), backend="reference")
    assert model.config()["bottom"] == [512, 256, 64, 16]
    assert model.config()["top"] == [8]
    same = DLRM(KAGGLE, embedding_dim=16, bottom=(512, 256, 64, 16), top=(8,), backend="reference")
    assert same.config() == model.config()


def test_initial_values_have_the_published_spread() -> None:
    model = DLRM(KAGGLE, embedding_dim=16, backend="reference")
    for layer in (*model.bottom.layers, *model.top.layers):  # type: ignore[union-attr]
        if layer.weight.numel() > 4000:
            wanted = math.sqrt(2 / (layer.in_features + layer.out_features))
            assert layer.weight.std().item() == pytest.approx(wanted, rel=0.05)
            assert abs(layer.weight.mean().item()) < 0.05 * wanted
            assert layer.bias.std().item() == pytest.approx(math.sqrt(1 / layer.out_features), rel=0.25)
    rows = model.embeddings.rows("C1")
    limit = math.sqrt(1 / 50)
    assert rows.abs().max().item() <= limit
    assert rows.std().item() == pytest.approx(limit / math.sqrt(3), rel=0.1)


def test_interaction_is_the_strict_lower_triangle_after_the_dense_vector() -> None:
    spec = FeatureSpec.from_sizes(2, [5, 6])
    model = DLRM(spec, embedding_dim=4, bottom=(4,), top=(3,), backend="reference")
    seen: list[torch.Tensor] = []
    model.top.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    batch = Batch(dense=torch.randn(1, 2), ids=torch.tensor([[3, 5]]))
    model(batch)
    assert model.bottom is not None
    x = model.bottom(batch.dense)[0]
    a, b = model.embeddings.rows("C1")[3], model.embeddings.rows("C2")[5]
    expected = torch.cat([x, torch.stack([a @ x, b @ x, b @ a])])
    given = seen[0][0]
    torch.testing.assert_close(given[: len(expected)], expected)
    assert not given[len(expected) :].any()  # columns of zeros, for alignment


def test_linear_terms_are_column_0_and_dense_weights_on_top_of_the_share() -> None:
    spec = FeatureSpec.from_sizes(2, [5, 6])
    model = DLRM(spec, embedding_dim=4, bottom=(4,), top=(3,), linear=0.02, backend="reference")
    batch = Batch(dense=torch.tensor([[0.5, -2.0]]), ids=torch.tensor([[3, 5]]))
    ids = model.embeddings.rows("C1")[3, 0] + model.embeddings.rows("C2")[5, 0]
    start = math.log(0.02 / 0.98)
    assert model.dense_weights is not None
    for weights in (torch.zeros(1, 2), torch.tensor([[3.0, 0.25]])):
        with torch.no_grad():
            model.dense_weights.copy_(weights)
        torch.testing.assert_close(model(batch), start + ids[None] + weights.sum().sign())
    again = DLRM.from_config(spec, model.config(), backend="reference")
    assert again.linear == 0.02
    assert "linear" not in DLRM(spec, embedding_dim=4, bottom=(4,), top=(3,), backend="reference").config()
    with pytest.raises(ConfigError, match="linear is 1, the share of label 1"):
        DLRM(spec, linear=1, backend="reference")


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least one layer"):
        DeepFM(KAGGLE, hidden=(0,), backend="reference")
    with pytest.raises(ConfigError, match="no latent factors"):
        DeepFM(KAGGLE, embedding_dim=1, backend="reference")
    with pytest.raises(ConfigError, match="rank=0"):
        DCN(KAGGLE, rank=0, backend="reference")
    with pytest.raises(ConfigError, match="parallel"):
        DCN(KAGGLE, structure="beside", backend="reference")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="matmul"):
        DLRM(KAGGLE, matmul="fp16", backend="reference")
    assert DLRM.from_config(KAGGLE, {"dense_dtype": "bfloat16"}).matmul == "bf16", "the name of before"


def test_deepfm_equals_the_sum_over_pairs() -> None:
    spec = FeatureSpec.from_sizes(1, [5, 6])
    model = DeepFM(spec, embedding_dim=4, hidden=(3,), backend="reference")
    with torch.no_grad():
        model.bias.fill_(0.25)
    batch = Batch(dense=torch.tensor([[1.5]]), ids=torch.tensor([[3, 5]]))
    fields = [model.embeddings.rows("C1")[3], model.embeddings.rows("C2")[5], 1.5 * model.dense_rows[0]]
    pairs = sum(fields[i][1:] @ fields[j][1:] for i in range(3) for j in range(i))
    deep = model.deep(torch.cat([field[1:] for field in fields]).unsqueeze(0))[0, 0]
    expected = 0.25 + sum(field[0] for field in fields) + pairs + deep
    torch.testing.assert_close(model(batch)[0], expected)


def test_dcn_cross_layer_equals_the_formula() -> None:
    spec = FeatureSpec.from_sizes(1, [5])
    model = DCN(spec, embedding_dim=3, cross_layers=1, rank=2, hidden=(3,), backend="reference")
    batch = Batch(dense=torch.tensor([[1.5]]), ids=torch.tensor([[3]]))
    x0 = torch.cat([batch.dense[0], model.embeddings.rows("C1")[3]])
    layer = model.cross[0]
    crossed = x0 * (layer.up.weight @ (layer.down @ x0) + layer.up.bias) + x0
    joined = torch.cat([crossed, model.deep(x0.unsqueeze(0))[0]])
    torch.testing.assert_close(model(batch)[0], model.last(joined)[0])


def test_rankmixer_equals_the_formula_token_by_token() -> None:
    spec = FeatureSpec.from_sizes(1, [5, 6, 7, 8])
    model = RankMixer(spec, embedding_dim=4, tokens=4, width=8, blocks=2, expansion=3, backend="reference", seed=2)
    with torch.no_grad():
        for parameter in model.dense_parameters():  # biases and scales of norms, too
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    batch = Batch(dense=torch.tensor([[1.5], [-2.0]]), ids=torch.tensor([[3, 5, 0, 7], [1, 1, 6, 2]]))
    found = model(batch)
    expected = []
    for row in range(2):
        rows = [model.embeddings.rows(f"C{place + 1}")[id_] for place, id_ in enumerate(batch.ids[row])]
        inputs = torch.cat([batch.dense[row], *rows, torch.zeros(3)])  # 17 of 4 * 5
        tokens = [inputs[5 * t : 5 * t + 5] @ model.project.weight[t] + model.project.bias[t, 0] for t in range(4)]
        for block in model.blocks:
            heads = [[token[2 * h : 2 * h + 2] for token in tokens] for h in range(4)]
            mixed = [block.mixed(torch.cat(heads[t]) + tokens[t]) for t in range(4)]
            tokens = []
            for t, s in enumerate(mixed):
                inner = s @ block.first.weight[t] + block.first.bias[t, 0]
                inner = inner * 0.5 * (1 + torch.erf(inner / 2**0.5))
                tokens.append(block.normed(inner @ block.second.weight[t] + block.second.bias[t, 0] + s))
        expected.append(model.last(sum(tokens) / 4)[0])
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-5, atol=1e-6)
    others = [p for name, p in model.named_parameters() if p is not model.embeddings.handle]
    for one, other in zip(
        torch.autograd.grad(found.sum(), others), torch.autograd.grad(sum(expected), others), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_rankmixer_says_which_tokens_fit() -> None:
    assert [RankMixer(FeatureSpec.from_sizes(0, [5] * n)).tokens for n in (1, 3, 4, 26)] == [1, 2, 4, 16]
    assert RankMixer(KAGGLE, embedding_dim=4).tokens == 8  # 16 slices of 8 would leave the last of 117 inputs empty
    with pytest.raises(ConfigError, match="width 64 is not a multiple of its 3 tokens"):
        RankMixer(KAGGLE, tokens=3)
    with pytest.raises(ConfigError, match="cannot cut 4 inputs into 3 slices of 2: the last would be empty"):
        RankMixer(FeatureSpec.from_sizes(0, [5]), embedding_dim=4, tokens=3, width=6)
    with pytest.raises(ConfigError, match="all must be at least 1"):
        RankMixer(KAGGLE, blocks=0)
