"""docs/pytorch.md: every line of its tables names tests that exist, its examples run, and what no other test covers."""

from __future__ import annotations

import ast
import copy
import gc
import io
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import stoker
from stoker import EmbeddingTables, TableConfig, TTEmbeddingBag

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "pytorch.md").read_text(encoding="utf-8")
LINES = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| PyTorch |")]
FILES = [
    "tables/test_pytorch_idioms.py", "tables/test_pytorch_page.py", "tables/test_distributed.py",
    "training/test_module_checkpoint.py", "models/test_model_contract.py",
]  # fmt: skip
ROWS, DIM = 20, 4
PLACEMENTS: dict[str, Any] = {
    "device": None, "cached": stoker.Cached(slots=12), "file": stoker.Cached(slots=12, home="file"),
}  # fmt: skip
IDS = torch.tensor([[3, 1], [2, 3], [1, 0]])
BAG = torch.tensor([1, 2, 3]), torch.tensor([0, 2])


@pytest.fixture(scope="module")
def tests() -> dict[str, str]:
    """The decorators of each test in ``FILES``, as text."""
    found = {}
    for name in FILES:
        for node in ast.parse((ROOT / "tests" / name).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                assert node.name not in found, "two tests of one name"
                found[node.name] = " ".join(ast.unparse(each) for each in node.decorator_list)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("line", LINES, ids=lambda line: line.split(" | ")[0].strip("| `"))
def test_each_line_of_the_page_names_tests_that_run(line: str, tests: dict[str, str]) -> None:
    cells = line.strip("| ").split(" | ")
    assert len(cells) == 3
    named = re.findall(r"`(test_\w+)`", cells[2])
    assert named
    for name in named:
        assert name in tests, f"there is no {name}"
        assert not re.search("skip|xfail|gpu", tests[name])


@pytest.mark.slow
def test_the_examples_of_the_page_run(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    names: dict[str, Any] = {"__name__": "page"}
    try:
        for example in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
            exec(example, names)
        assert names["tables"].tick == 8 + 1 + 8 + 8  # each backward, an accumulation, the scaler, the stage
    finally:
        dist.destroy_process_group()
        names.clear()  # a scaler among them
        gc.collect()


class Model(nn.Module):
    def __init__(self, where: str = "device", **options: Any) -> None:
        super().__init__()
        table = TableConfig(name="t", num_embeddings=ROWS, embedding_dim=DIM, features=("a", "b"))
        options.setdefault("optimizer", stoker.SGD(lr=0.5))
        self.tables = EmbeddingTables([table], placement=PLACEMENTS[where], **options)
        self.head = nn.Linear(2 * DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.tables(ids).flatten(1))

    def rows(self) -> Tensor:
        return self.tables.rows("t")


@pytest.fixture(params=list(PLACEMENTS))
def model(request: pytest.FixtureRequest) -> Model:
    return Model(request.param)


def test_a_graph_that_is_kept_gives_a_second_gradient(model: Model) -> None:
    other = copy.deepcopy(model)
    loss = model(IDS).sum()
    with model.tables.accumulate():
        loss.backward(retain_graph=True)
        loss.backward()
    (2 * other(IDS).sum()).backward()
    torch.testing.assert_close(model.rows(), other.rows())
    loss = model(IDS).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert model.tables.tick == 3


@pytest.mark.slow
def test_float16_with_a_scaler_and_clipping(model: Model) -> None:
    plain = copy.deepcopy(model)
    rows, dense = model.tables.as_optimizer(), torch.optim.SGD(model.head.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with torch.autocast("cpu", torch.float16):
        loss = model(IDS).float().square().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(rows)
    scaler.unscale_(dense)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    scaler.step(rows)
    scaler.step(dense)
    del scaler
    gc.collect()
    weight = plain.rows().requires_grad_()
    embedded = nn.functional.embedding(IDS, weight)
    plain.head(embedded.flatten(1)).square().mean().backward()
    expected = torch.linalg.vector_norm(
        torch.cat([weight.grad.flatten(), plain.head.weight.grad.flatten(), plain.head.bias.grad])
    )
    torch.testing.assert_close(norm, expected, rtol=1e-2, atol=1e-3)
    wanted = plain.rows() - 0.5 * weight.grad * min(1.0, 0.25 / float(expected))
    torch.testing.assert_close(model.rows(), wanted, rtol=1e-2, atol=1e-3)


def test_a_closure_that_calls_backward_many_times_is_refused() -> None:
    model = Model()
    optimizer = torch.optim.LBFGS(model.head.parameters(), max_iter=4)

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(IDS).square().sum()
        loss.backward()
        return loss.item()

    with pytest.raises(stoker.ConfigError, match=r"LBFGS steps once for .* backwards"):
        optimizer.step(closure)
    rows, before = model.tables.as_optimizer(), model.rows()
    first = model(IDS).square().sum().item()
    optimizer.step(closure)
    optimizer.step(closure)
    assert model(IDS).square().sum().item() < first
    assert torch.equal(model.rows(), before)
    rows.zero_grad()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad])
def test_optimizers_over_all_parameters_leave_rows_alone(model: Model, kind: Any) -> None:
    alone = copy.deepcopy(model)
    optimizers = [kind(model.parameters(), lr=0.1), kind(alone.head.parameters(), lr=0.1)]
    for _ in range(3):
        for each, optimizer in zip((model, alone), optimizers, strict=True):
            each(IDS).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(model.rows(), alone.rows())
    assert torch.equal(model.head.weight, alone.head.weight)


@pytest.mark.slow
def test_gradients_that_nobody_uses_draw_a_warning() -> None:
    model = Model()
    model.tables.as_optimizer()
    for _ in range(255):
        model(IDS).sum().backward()
    with pytest.warns(UserWarning, match=r"256 backwards wait .*in_backward=True"):
        model(IDS).sum().backward()


def test_inference_mode(model: Model) -> None:
    plain = Model()
    plain.load_state_dict(model.state_dict())
    with torch.inference_mode():
        batches = [(IDS + turn) % ROWS for turn in range(4)]
        for place, ids in enumerate(stoker.stage(batches, model, lookups=lambda ids: ids, lookahead=2)):
            if place == 2:
                ids.add_(1).remainder_(ROWS)
            assert torch.equal(model(ids), plain(ids))
    for each in (model, plain):
        each(IDS).sum().backward()
    assert torch.equal(model.rows(), plain.rows())


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_that_are_asked_for_move_no_rows(compiled: bool) -> None:
    model = Model("cached")
    call: Callable[[Tensor], Tensor] = torch.compile(model, backend="aot_eager") if compiled else model
    dense = list(model.head.parameters())
    (gradient, _) = torch.autograd.grad(call(IDS).sum(), dense)
    call(IDS).sum().backward(inputs=dense)
    assert torch.equal(gradient, dense[0].grad)
    with pytest.raises(stoker.ConfigError, match=r"autograd.grad was asked for the gradient of the handle"):
        torch.autograd.grad(call(IDS).sum(), list(model.parameters()), allow_unused=True)
    assert model.tables.tick == 0
    call(IDS).sum().backward()
    assert model.tables.tick == 1
    torch._dynamo.reset()


def test_gradients_of_weights_move_no_rows() -> None:
    tables = Model("cached").tables
    weights = torch.ones(IDS.numel(), requires_grad=True)
    torch.autograd.grad(tables(IDS.reshape(-1), torch.arange(IDS.numel() + 1), weights).sum(), weights)
    assert tables.tick == 0


def test_a_gradient_penalty(model: Model) -> None:
    weight = model.rows().requires_grad_()
    found = []
    for embedded in (model.tables(IDS), nn.functional.embedding(IDS, weight)):
        loss = model.head(embedded.flatten(1).tanh()).sum()
        (gradient,) = torch.autograd.grad(loss, embedded, create_graph=True)
        found.append(loss + gradient.square().sum())
    for loss in found:
        loss.backward()
    assert model.tables.tick == 1
    torch.testing.assert_close(model.rows(), weight.detach() - 0.5 * weight.grad)


@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")
@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
def test_hooks_and_modes_of_autograd(model: Model) -> None:
    plain, seen = copy.deepcopy(model), []
    model.tables.register_forward_hook(lambda *_: seen.append("forward"))
    model.tables.register_full_backward_hook(lambda *_: seen.append("backward"))
    with torch.autograd.detect_anomaly(), torch.autograd.graph.save_on_cpu():
        loss = model(IDS).sum()
        loss.backward()
    plain(IDS).sum().backward()
    assert seen == ["forward", "backward"]
    assert torch.equal(model.rows(), plain.rows())


@pytest.mark.filterwarnings("ignore")  # tracing is deprecated
@pytest.mark.parametrize("kind", ["tables", "bag"])
def test_export_and_trace_are_refused(kind: str) -> None:
    module, given = (Model().eval(), (IDS,)) if kind == "tables" else (bag().eval(), BAG)
    with pytest.raises(stoker.ConfigError, match="export_dense"):
        torch.export.export(module, given)
    with pytest.raises(stoker.ConfigError, match=r"torch.jit.trace records"):
        torch.jit.trace(module, given)


@pytest.mark.parametrize("kind", ["tables", "bag"])
def test_transforms_of_functions_are_refused(kind: str) -> None:
    module, given = (Model(), (IDS,)) if kind == "tables" else (bag(), BAG)
    parameters = dict(module.named_parameters())
    with pytest.raises(stoker.ConfigError, match=r"inside a transform of torch.func .*Look the rows up first"):
        torch.func.grad(lambda p: torch.func.functional_call(module, p, given).sum())(parameters)
    with pytest.raises(stoker.ConfigError, match=r"inside a transform of torch.func"), torch.no_grad():
        torch.vmap(lambda ids: module(ids, *given[1:]))(torch.stack([given[0], given[0]]))


def test_functional_call(model: Model) -> None:
    before = model.rows()
    with pytest.raises(stoker.ConfigError, match=r"\(tables.handle\) was replaced, by .*functional_call"):
        torch.func.functional_call(model, {k: v.clone() for k, v in model.named_parameters()}, (IDS,))
    dense = {f"head.{name}": torch.ones_like(each) for name, each in model.head.named_parameters()}
    torch.func.functional_call(model, dense, (IDS,)).sum().backward()
    assert not torch.equal(model.rows(), before)
    embedded = model.tables(IDS).flatten(1).detach()
    gradients = torch.vmap(
        torch.func.grad(
            lambda x: torch.func.functional_call(model.head, dict(model.head.named_parameters()), (x,)).sum()
        )
    )
    assert torch.equal(gradients(embedded)[0], model.head.weight[0])


def test_the_dense_part_alone_takes_looked_up_rows(model: Model) -> None:
    """What a CUDA graph would capture reads a tensor of fixed place."""
    place = torch.zeros(len(IDS), 2, DIM)
    for ids in (IDS, IDS + 1):
        with torch.no_grad():
            place.copy_(model.tables(ids))
            assert torch.equal(model.head(place.flatten(1)), model(ids))


def test_data_parallel_is_refused(model: Model) -> None:
    with pytest.raises(stoker.ConfigError, match=r"nn.DataParallel .*DistributedDataParallel"):
        model.tables._replicate_for_data_parallel()  # which DataParallel asks each module for


@pytest.mark.slow
def test_threads_that_train_lose_no_step(model: Model) -> None:
    plain, failed = Model(), []
    model.tables.load_state_dict({**model.tables.state_dict(), "t.weight": torch.ones(ROWS, DIM)})
    plain.tables.load_state_dict({**plain.tables.state_dict(), "t.weight": torch.ones(ROWS, DIM)})

    def work(seed: int) -> None:
        try:
            for turn in range(20):
                model.tables((IDS + seed + turn) % ROWS).sum().backward()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(3):
        for turn in range(20):
            plain.tables((IDS + seed + turn) % ROWS).sum().backward()
    assert not failed
    assert model.tables.tick == 60
    assert torch.equal(model.rows(), plain.rows())


@pytest.mark.slow
def test_an_average_of_the_dense_part(model: Model) -> None:
    averaged = torch.optim.swa_utils.AveragedModel(model.head)
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.5)
    seen = []
    for _ in range(3):
        model(IDS).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        averaged.update_parameters(model.head)
        seen.append(model.head.weight.detach().clone())
    torch.testing.assert_close(averaged.module.weight.detach(), torch.stack(seen).mean(0))
    with torch.no_grad():
        assert averaged(model.tables(IDS).flatten(1)).shape == (3, 1)


def test_pickles_train_on(model: Model) -> None:
    model(IDS).sum().backward()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    found = torch.load(file, weights_only=False)
    for each in (model, found):
        each(IDS).sum().backward()
    assert torch.equal(found.rows(), model.rows())
    assert found.tables.tick == 2


@pytest.mark.parametrize("to", list(PLACEMENTS))
def test_a_state_dict_goes_to_any_placement(model: Model, to: str) -> None:
    model(IDS).sum().backward()
    found = Model(to, optimizer=stoker.SGD(lr=0.5), seed=1)
    assert not torch.equal(found.rows(), model.rows())
    found.load_state_dict(model.state_dict())
    for each in (model, found):
        each(IDS).sum().backward()
    assert torch.equal(found.rows(), model.rows())


@pytest.mark.parametrize("change", [nn.Module.half, nn.Module.double, lambda module: module.to(torch.bfloat16)])
def test_rows_keep_their_type(model: Model, change: Callable[[nn.Module], nn.Module]) -> None:
    before = model.rows()
    with pytest.warns(UserWarning, match="Give TableConfig the dtype"):
        change(model)
    assert model.head.weight.dtype != torch.float32
    assert torch.equal(model.to("cpu").rows(), before)
    model.tables(IDS).sum().backward()
    assert model.tables.tick == 1


def test_a_cell_that_is_run_again(model: Model) -> None:
    """The same stage, left early and begun again, beside the first loop's open iterator."""
    plain = copy.deepcopy(model)
    batches = [(IDS + turn) % ROWS for turn in range(5)]
    staged = stoker.stage(batches, model, lookups=lambda ids: ids, lookahead=3)
    open_ones = []
    for _ in range(2):
        cell = iter(staged)
        open_ones.append(cell)
        for place, ids in enumerate(cell):
            model(ids).sum().backward()
            if place == 2:
                break
        for ids in batches[:3]:
            plain(ids).sum().backward()
    assert torch.equal(model.rows(), plain.rows())


def test_arguments_that_are_not_there() -> None:
    for option in ("max_norm", "scale_grad_by_freq"):
        with pytest.raises(TypeError, match=option):
            TableConfig(name="t", num_embeddings=4, embedding_dim=2, **{option: 1})


def bag(optimizer: Any = None) -> TTEmbeddingBag:
    return TTEmbeddingBag(100, 8, rank=4, mode="sum", seed=0, optimizer=optimizer)


@pytest.mark.slow
def test_a_bag_without_optimizer_is_parameters() -> None:
    module = bag()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler = torch.amp.GradScaler("cpu")
    before = [core.detach().clone() for core in module.cores]
    for _ in range(2):
        scaler.scale(module(*BAG).sum()).backward()
    scaler.unscale_(optimizer)
    assert nn.utils.clip_grad_norm_(module.parameters(), 1.0) > 0
    scaler.step(optimizer)
    schedule.step()
    assert any(not torch.equal(core, old) for core, old in zip(module.cores, before, strict=True))
    del scaler
    gc.collect()


@pytest.mark.slow
def test_a_bag_with_optimizer_says_what_to_do_instead() -> None:
    module, scaler = bag(stoker.SGD(lr=0.1)), torch.amp.GradScaler("cpu")
    with pytest.raises(stoker.ConfigError, match=r"GradScaler is in use.*Make the bag without optimizer") as error:
        scaler.scale(module(*BAG).sum()).backward()
    assert "as_optimizer" not in str(error.value)
    del scaler, error
    gc.collect()
    module, head = bag(stoker.SGD(lr=0.1)), nn.Linear(8, 1)
    dense = torch.optim.SGD(head.parameters(), lr=0.1)
    for _ in range(2):
        head(module(*BAG)).sum().backward()
    with pytest.raises(stoker.ConfigError, match=r"SGD steps once for 2 backwards.*Make the bag without optimizer"):
        dense.step()


def test_a_frozen_bag_stays() -> None:
    for optimizer in (None, stoker.SGD(lr=0.1)):
        module = bag(optimizer).requires_grad_(False)
        before = [core.detach().clone() for core in module.cores]
        head = nn.Linear(8, 1)
        head(module(*BAG)).sum().backward()
        assert all(torch.equal(core, old) for core, old in zip(module.cores, before, strict=True))
        assert module.tick == 0
        head(module.requires_grad_(True)(*BAG)).sum().backward()
        assert module.tick == (optimizer is not None)
    module.eval()
    with pytest.warns(UserWarning, match="eval mode: its cores were not updated"):
        module(*BAG).sum().backward()
    assert module.tick == 1


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [None, stoker.SGD(lr=0.1)], ids=["plain", "optimizer"])
def test_a_compiled_bag(optimizer: Any) -> None:
    plain, module = nn.Sequential(bag(optimizer), nn.Linear(8, 1)), nn.Sequential(bag(optimizer), nn.Linear(8, 1))
    plain.load_state_dict(module.state_dict())
    compiled = torch.compile(module, backend="aot_eager")
    for each in (plain, compiled):
        for _ in range(2):
            each(torch.tensor([[1, 2], [3, 4]])).sum().backward()
    for one, other in zip(plain.parameters(), module.parameters(), strict=True):
        assert torch.equal(one, other)
        assert one.grad is other.grad is None or torch.equal(one.grad, other.grad)
    torch._dynamo.reset()


def test_types_of_a_bag() -> None:
    assert bag().double()(*BAG).dtype == torch.float64
    with pytest.raises(stoker.ConfigError, match=r"torch.float64 now.*float32"):
        bag(stoker.SGD(lr=0.1)).double()(*BAG)


@pytest.mark.slow
def test_our_own_loop_takes_no_notice_of_scalers_elsewhere(tmp_path: Path) -> None:
    from stoker.testing import make_dataset

    scaler = torch.amp.GradScaler("cpu")
    data = make_dataset(tmp_path / "data", rows=200)
    stoker.train(
        data, out=tmp_path / "run", batch_size=64, epochs=1, embedding_dim=4, display="quiet", tensorboard=False,
        model_options={"bottom": (8,), "top": (8,)},
    )  # fmt: skip
    del scaler
    gc.collect()
