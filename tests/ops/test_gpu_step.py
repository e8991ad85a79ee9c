"""A step of training on a pretended GPU (tests/pretended.py): its launches, and that the host never waits."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from pretended import CUDA, Pretended, pretend

from stoker import (
    DIN,
    DLRM,
    SGD,
    Batch,
    Cached,
    EmbeddingTables,
    Feature,
    FeatureSpec,
    RecModel,
    RowWiseAdagrad,
    TableConfig,
    Tabular,
    TensorTrain,
    stage,
)
from stoker.ops import Bags, interaction, reference
from stoker.ops import mlp as ops_mlp
from stoker.ops.loss import binary_cross_entropy
from stoker.ops.mlp import mlp
from stoker.tables.lookups import Lookups

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the process of test_triton.py's test_interpreter"
)
ONE_ID = FeatureSpec.from_sizes(2, [40 + n for n in range(26)])
HISTORY = FeatureSpec(
    dense=("a", "b"),
    features=(
        Feature(name="item", table="items"),
        Feature(name="past", table="items", sequence=True, max_length=5),
        Feature(name="user", table="users"),
    ),
    num_embeddings={"items": 60, "users": 40},
)
TRAINS = {"C2": TensorTrain(rank=3), "C9": TensorTrain(own=2)}
RESIDENT: dict[str, torch.Tensor] = {}
DEPTH: dict[str, Any] = {"bottom": (8, 8), "top": (8, 8, 8, 8)}  # as many layers as MLPerf's DLRM
#: kind -> columns, how to build the model, and the most launches of a step
MODELS: dict[str, tuple[FeatureSpec, Callable[..., RecModel], int]] = {
    "resident": (ONE_ID, lambda spec, **o: DLRM(spec, **DEPTH, **o), 50),
    "cached": (ONE_ID, lambda spec, **o: DLRM(spec, placement=Cached(fraction=0.5), **DEPTH, **o), 50),
    "several groups": (ONE_ID, lambda spec, **o: DLRM(spec, placement={"C2": Cached(fraction=0.5)}, **DEPTH, **o), 67),
    "jagged": (HISTORY, lambda spec, **o: DLRM(spec, **DEPTH, **o), 52),
    "mixed width": (FeatureSpec.from_sizes(2, [40, 50, 60]), lambda spec, **o: Tabular(spec, **o), 47),
    "sequence": (HISTORY, lambda spec, **o: DIN(spec, **o), 109),
    "tensor trains": (ONE_ID, lambda spec, **o: DLRM(spec, tensor_train=TRAINS, **DEPTH, **o), 190),
}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pretended]:
    with pretend(monkeypatch) as made:
        yield made


def batches(spec: FeatureSpec, count: int, size: int = 8) -> list[Batch]:
    found = []
    for step in range(count):
        g = torch.Generator().manual_seed(step)
        lengths, offsets = torch.ones(size, len(spec.features), dtype=torch.int64), None
        for place, feature in enumerate(spec.features):
            if feature.sequence:
                lengths[:, place] = torch.randint(0, 6, (size,), generator=g)
        ids = torch.randint(0, 40, (int(lengths.sum()),), generator=g)
        if spec is HISTORY:
            offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.view(-1).cumsum(0)])
        else:
            ids = ids.view(size, -1)
        labels = (torch.rand(size, generator=g) < 0.3).float()
        made = Batch(dense=torch.randn(size, 2, generator=g), ids=ids, offsets=offsets, labels=labels, step=step)
        found.append(made.pin_memory())
    return found


def train(device: Pretended, kind: str, steps: int = 4) -> tuple[list[torch.Tensor], RecModel]:
    """Train; the device counts the last steps."""
    spec, make, _ = MODELS[kind]
    model = make(spec, device=CUDA, optimizer=RowWiseAdagrad(lr=0.1))
    dense = torch.optim.SGD(model.dense_parameters(), lr=0.1, foreach=True)
    losses = []
    for batch in stage(batches(spec, steps), model, lookahead=2):
        device.clock += 1
        if device.clock in (3, steps):
            device.launches.clear()
        if device.clock == 3:  # what is cached on the device is there
            device.waits.clear()
        loss = model.loss(batch.to(CUDA, non_blocking=True))
        loss.backward()  # type: ignore[no-untyped-call]
        dense.step()
        dense.zero_grad()
        losses.append(loss.detach().inner)
    return losses, model


@pytest.mark.parametrize("kind", MODELS)
def test_the_host_never_waits_and_launches_few_kernels(device: Pretended, kind: str) -> None:
    losses, model = train(device, kind)
    assert device.waits == {}
    assert 30 < sum(device.launches.values()) <= MODELS[kind][2], device.launches
    if MODELS[kind][0] is ONE_ID and kind != "tensor trains":  # wherever its rows are
        assert torch.equal(torch.stack(losses), RESIDENT.setdefault("losses", torch.stack(losses)))
    model.embeddings.close()


@pytest.mark.parametrize(
    ("rows", "popular", "weighted", "most"),
    [(500, 1, False, 12), (500, 1, True, 13), (500, 100, False, 13), (10**6, 1, False, 13)],
)
def test_a_tensor_train_takes_12_launches(
    device: Pretended, rows: int, popular: int, weighted: bool, most: int
) -> None:
    """Lookup and gradients, if all slices are used; one more for a core with unused ones, and for a popular row."""
    g = torch.Generator().manual_seed(0)
    ids, grad = torch.randint(0, rows, (300, 1), generator=g), torch.randn(300, 1, 8, generator=g)
    ids[:popular] = 3
    weights = torch.rand(300, 1, generator=g) if weighted else None
    found: list[tuple[torch.Tensor, ...]] = []
    for where in (torch.device("cpu"), CUDA):
        tables = EmbeddingTables(
            [TableConfig(name="items", num_embeddings=rows, embedding_dim=8)], optimizer=SGD(lr=0.1), device=where,
            placement={"items": TensorTrain(rank=4)}, seed=1,
        )  # fmt: skip
        [group] = tables.groups
        mine = [each if each is None else each.pin_memory().to(where, non_blocking=True) for each in (ids, weights)]
        given, wanted = Bags(mine[0], None, mine[1]), grad.to(where)
        for _ in range(2):  # the first brings what is constant
            lease = group.storage.acquire(Bags(ids), group.space)
            lease.use(given)
            device.start()
            out = group.lookup(Lookups(given, group.space), lease)
            expanded = group._expanded(lease)
            slices = group._slices(expanded, group._row_sums(expanded, wanted, None))
        assert device.waits == {}
        assert sum(device.launches.values()) == most * (where is CUDA), device.launches
        found.append(tuple(each.to("cpu") for each in (out, *(part for pair in slices for part in pair))))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("matmul", "precision"), [("fp32", "highest"), ("tf32", "high")])
def test_a_model_sets_the_precision_of_products(
    device: Pretended, monkeypatch: pytest.MonkeyPatch, matmul: Any, precision: str
) -> None:
    model = DLRM(HISTORY, **DEPTH, device=CUDA, matmul=matmul)
    asked: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", asked.append)
    model.loss(batches(HISTORY, 1)[0].to(CUDA, non_blocking=True)).backward()  # type: ignore[no-untyped-call]
    assert asked == [precision]
    assert DLRM.from_config(HISTORY, model.config(), device=CUDA).matmul == matmul


def test_waits_and_launches_are_counted(device: Pretended) -> None:
    x, host = torch.arange(6.0, device=CUDA), torch.ones(6)
    pinned = torch.empty(6, pin_memory=True)
    assert not device.waits
    waits: list[Callable[[], Any]] = [
        x.sum().item, lambda: x[x > 2], x.nonzero, x.cpu, x.tolist, lambda: x.to("cpu"), lambda: bool(x.any()),
        lambda: torch.unique(x), lambda: torch.equal(x, x), lambda: torch.repeat_interleave(x.long()),
        lambda: host.to(CUDA), lambda: host.to(CUDA, non_blocking=True), lambda: x.copy_(host),
        lambda: host.copy_(x), lambda: pinned.copy_(x), lambda: torch.cuda.Event().synchronize(),
    ]  # fmt: skip
    for number, work in enumerate(waits, 1):
        work()
        assert device.waits.total() == number, f"{number} of the list"
    device.launches.clear()
    pinned.copy_(x, non_blocking=True)
    x.copy_(pinned, non_blocking=True)
    event = torch.cuda.Event()
    device.clock += 3
    event.synchronize()
    x.view(2, 3)[0].add_(1)
    assert device.waits.total() == len(waits)
    assert device.launches == {"add_": 1}
    assert x.tolist() == [2.0, 2.0, 2.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([0, 1, 3, 2] + [4] * 45, "must rise from 0 to the number of ids, 100"),
        ([1] + [100] * 48, "must rise from 0"),
        ([0] * 48 + [99], "must rise from 0"),
        ([0, 1] + [100] * 47, "example 0 has 99 ids in feature 'past', which is kept for 5 steps"),
    ],
)
def test_bad_offsets_are_reported_late_and_change_nothing(device: Pretended, offsets: list[int], message: str) -> None:
    _, model = train(device, "sequence", 1)
    before = [model.embeddings.rows(name).inner for name in ("items", "users")]
    device.waits.clear()
    ids = torch.zeros(100, dtype=torch.int64, device=CUDA)
    out = model.embeddings(ids, torch.tensor(offsets).to(CUDA))
    out.backward(torch.ones(out.shape, device=CUDA))
    assert set(device.waits) == {"? copy that blocks"}, "only those of this test"
    with pytest.raises(ValueError, match=message):
        model.embeddings.groups[0].backend.synchronize()
    for name, rows in zip(("items", "users"), before, strict=True):
        assert torch.equal(model.embeddings.rows(name).inner, rows)


def on(device: Any, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.to(CUDA).detach().requires_grad_() for tensor in tensors]


@pytest.mark.parametrize(
    ("batch", "features", "dim", "dtype"),
    [(3, 26, 16, torch.float32), (2, 1, 1, torch.float32), (2, 40, 100, torch.float32), (2, 5, 64, torch.bfloat16)],
)
def test_the_fused_interaction_is_that_of_the_reference(
    device: Pretended, batch: int, features: int, dim: int, dtype: torch.dtype
) -> None:
    g = torch.Generator().manual_seed(dim)
    dense, joint = torch.randn(batch, dim, generator=g).to(dtype), torch.randn(batch, features + 2, dim, generator=g)
    given, mine = [dense.requires_grad_(), joint.requires_grad_()], on(device, dense, joint)
    expected = reference.dot_interaction(given[0], given[1][:, 1:-1])
    found = interaction.dot_interaction(mine[0], mine[1][:, 1:-1], align=16)  # a slice of several groups' output
    assert (found.dtype, found.shape[1] % 16) == (dtype, 0)
    grad = torch.randn(found.shape, generator=g).to(dtype)
    count = expected.shape[1]
    expected.backward(grad[:, :count])
    found.backward(grad.to(CUDA))
    close: dict[str, float] = {"rtol": 2e-2, "atol": 0.3} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 3e-5}
    torch.testing.assert_close(found.inner[:, :count], expected, **close)
    assert not found.inner[:, count:].any()
    for one, other in zip(mine, given, strict=True):
        torch.testing.assert_close(one.grad.inner, other.grad, **close)


def test_the_fused_interaction_moves_a_fourth_of_the_bytes(device: Pretended) -> None:
    """MLPerf's 26 features of 128 columns: bytes of all operands, forward and backward."""
    moved = []
    for function in (reference.dot_interaction, interaction.dot_interaction):
        dense, rows = on(device, torch.randn(2, 128), torch.randn(2, 26, 128))
        device.bytes.clear()
        out = function(dense, rows)
        grad = torch.ones(out.shape, device=CUDA)
        out.backward(grad)
        moved.append(device.bytes.total() - device.bytes["ones"])
    assert moved[1] == 2 * 4 * (3 * 27 * 128 + 2 * (128 + 27 * 13))
    assert moved[0] > 3.5 * moved[1], moved


@pytest.mark.parametrize("relu_last", [True, False])
def test_layers_on_a_gpu_are_those_of_torch(device: Pretended, relu_last: bool) -> None:
    g = torch.Generator().manual_seed(1)
    sizes = (20, 33, 8, 5 if relu_last else 1)
    weights = [torch.randn(b, a, generator=g) / a**0.5 for a, b in pairwise(sizes)]
    biases = [torch.randn(b, generator=g) / 9 for b in sizes[1:]]
    x = torch.randn(300, 20, generator=g)
    here = [tensor.clone().requires_grad_() for tensor in (x, *weights, *biases)]
    there = on(device, torch.nn.functional.pad(x, (0, 12)), *weights, *biases)  # with columns of zeros
    expected = here[0]
    for layer in range(3):
        expected = torch.nn.functional.linear(expected, here[1 + layer], here[4 + layer])
        expected = expected.relu() if relu_last or layer < 2 else expected
    found = mlp(there[0], there[1:4], there[4:], relu_last=relu_last)
    grad = torch.randn(expected.shape, generator=g)
    expected.backward(grad)
    device.launches.clear()
    found.backward(grad.to(CUDA))
    assert device.launches["relu_gradient_kernel"] == 2 + relu_last
    assert not {"threshold_backward", "sum", "cat", "mul"} & set(device.launches), device.launches
    torch.testing.assert_close(found.inner, expected, rtol=1e-5, atol=1e-5)
    for one, other in zip(there[1:], here[1:], strict=True):
        torch.testing.assert_close(one.grad.inner, other.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(there[0].grad.inner[:, :20], here[0].grad, rtol=1e-4, atol=1e-4)


def test_a_graph_has_counters_of_its_own(device: Pretended, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of another graph are 0 only after its first replay."""
    from stoker.ops.gpu import dense

    first = dense._counter(CUDA, 3)
    assert dense._counter(CUDA, 3) is first
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    captured = [dense._counter(CUDA, 3) for _ in range(2)]
    assert len({id(each) for each in (first, *captured)}) == 3


@pytest.mark.parametrize("hides", [True, False])
def test_layers_on_a_gpu_let_nan_through(device: Pretended, monkeypatch: pytest.MonkeyPatch, hides: bool) -> None:
    """Whatever the fused ReLU of the GPU's library makes of it."""
    fused = torch._addmm_activation
    if hides:
        monkeypatch.setattr(torch, "_addmm_activation", lambda *given: fused(*given).nan_to_num(0.0))
    monkeypatch.setattr(ops_mlp, "_passing", {})
    x, weight, bias = on(device, torch.ones(5, 4), torch.ones(8, 4), torch.zeros(8))
    x.inner[2, 1] = torch.nan
    for _ in range(2):  # the device is asked in the first
        device.launches.clear()
        found = mlp(x, [weight], [bias], relu_last=True)
    assert found.inner.isnan().any(1).tolist() == [False, False, True, False, False]
    assert device.launches == ({"addmm": 1, "relu_": 1} if hides else {"_addmm_activation": 1})


@pytest.mark.parametrize("size", [1, 1000, 8200])
def test_the_loss_on_a_gpu_is_torchs(device: Pretended, size: int) -> None:
    logits, labels = torch.linspace(-60, 60, size), (torch.arange(size) % 3 == 1).float()
    here, there = logits.clone().requires_grad_(), on(device, logits)[0]
    expected = torch.nn.functional.binary_cross_entropy_with_logits(here, labels)
    on_device = labels.to(CUDA)
    device.launches.clear()
    found = binary_cross_entropy(there, on_device)
    assert device.launches == {"loss_kernel": 1}
    (3 * expected).backward()
    (3 * found).backward()
    torch.testing.assert_close(found.inner, expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(there.grad.inner, here.grad, rtol=1e-5, atol=1e-9)
    logits[size // 2] = torch.nan
    assert binary_cross_entropy(logits.to(CUDA), on_device).inner.isnan()
