"""Checkpoints of modules that are no RecModel: any tables in them, several optimizers, schedulers, scalers."""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from campaigns import scaled
from hypothesis import example, given, settings
from hypothesis import strategies as st
from measuring import peak
from small_runs import files
from torch import Tensor, nn

import stoker
from stoker.base.errors import CheckpointError
from stoker.base.files import seal, unseal
from stoker.tables.storage import Rows
from stoker.training.files import checkpoint, module_state

FORMAT_1 = Path(__file__).with_name("format_1")


def placed(name: str, folder: Path) -> Any:
    """A placement of the tables "user" and "item"."""
    return {
        "device": None,
        "cached": stoker.Cached(slots=24),
        "hot": stoker.HotCold(hot={"user": 6, "item": 3}, slots=30),
        "file": stoker.HostPipelined(slots=48, home="file", path=str(folder)),
    }[name]


@pytest.fixture(autouse=True, scope="module")
def forget_scalers() -> Iterator[None]:
    """Delete gradient scalers in cycles: while one is in use, rows do not step inside backward."""
    yield
    gc.collect()


class Net(nn.Module):
    """Tables at two depths, one of them under two names, tensor trains that train by themselves and by an optimizer."""

    def __init__(
        self,
        placement: Any = None,
        *,
        rows: stoker.optim.RowOptimizer = stoker.Adagrad(lr=0.1),  # noqa: B008
        tt_rows: stoker.optim.RowOptimizer = stoker.Adam(lr=0.01),  # noqa: B008
        seed: int = 0,
        users: int = 40,
        dtype: Any = "bfloat16",
        names: tuple[str, ...] = ("user", "item"),
        width: int = 6,
        head: str = "head",
    ) -> None:
        super().__init__()
        sizes = {"user": users, "item": 30, "shop": 7}
        tables = [
            stoker.TableConfig(name=name, num_embeddings=sizes[name], embedding_dim=4, dtype=dtype) for name in names
        ]
        self.names = names
        self.tables = stoker.EmbeddingTables(
            tables, optimizer=rows, seed=seed, backend="reference", placement=placement
        )
        one = [stoker.TableConfig(name="user", num_embeddings=9, embedding_dim=4)]  # a name that is used twice
        self.deep = nn.ModuleDict({"inner": nn.ModuleList([nn.Identity(), stoker.EmbeddingTables(
            one, optimizer=stoker.SGD(lr=0.1, schedule=stoker.CosineDecay(steps=20)), backend="reference"
        )])})  # fmt: skip
        self.same = self.deep["inner"]
        self.own = stoker.TTEmbeddingBag(20, 4, rank=2, cores=2, seed=1, optimizer=tt_rows, backend="reference")
        self.tt = stoker.TTEmbeddingBag(20, 4, rank=2, cores=2, seed=2)
        self.norm = nn.BatchNorm1d(16 + 4 * (len(names) - 1))
        self.drop = nn.Dropout(0.2)
        setattr(self, head, nn.Linear(16 + 4 * (len(names) - 1), width))
        self.last = nn.Linear(width, width)
        self.tied = nn.Linear(width, width)
        self.tied.weight = self.last.weight
        self.add_module("aside", nn.Linear(3, 1))

    def forward(self, ids: Tensor) -> Tensor:
        found = [self.tables(ids[:, : len(self.names)]).flatten(1), self.same[1](ids[:, 3:4] % 9).flatten(1)]
        found += [self.own(ids[:, 4:5] % 20), self.tt(ids[:, 4:5] % 20)]
        hidden = self.head(self.drop(self.norm(torch.cat(found, 1))))
        return self.tied(torch.relu(self.last(hidden))).mean(1)


class Script:
    """A training script of one's own: several optimizers, accumulation, AMP and schedulers."""

    def __init__(self, net: Net) -> None:
        self.net = net
        aside = list(net.aside.parameters())
        handles = [net.tables.handle, net.same[1].handle]
        others = [each for each in net.parameters() if all(each is not one for one in (*aside, *handles))]
        if hasattr(net.own, "step_each_backward"):
            net.own.step_each_backward()
        self.optimizers = {
            "main": torch.optim.Adam([each for each in others if each.requires_grad], lr=0.01),
            "aside": torch.optim.SGD(aside, lr=1.0, momentum=0.9),
            "rows": net.tables.as_optimizer(),
            "deep": net.same[1].as_optimizer(),
        }
        self.falling = torch.optim.lr_scheduler.ExponentialLR(self.optimizers["rows"], 0.5)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizers["main"], [2, 3, 3])
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizers["aside"], patience=0, threshold=9.0)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)

    @property
    def state(self) -> dict[str, Any]:
        return {"scheduler": self.scheduler, "plateau": self.plateau, "scaler": self.scaler, "falling": self.falling}

    def run(self, steps: range) -> None:
        self.net.train()
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            limits = torch.tensor([40, 30, 7, 9, 20])
            ids = (torch.rand(12, 5, generator=generator) * limits).long()
            with torch.autocast("cpu", torch.bfloat16):
                loss = self.net(ids).float().square().mean()
                aside = self.net.aside(torch.randn(5, 3, generator=generator)).float().square().mean()
            self.scaler.scale(loss + aside).backward()
            if step % 2:  # gradients of two batches
                for optimizer in self.optimizers.values():
                    self.scaler.step(optimizer)
                    optimizer.zero_grad()
                self.scaler.update()
                self.scheduler.step()
                self.falling.step()
                self.plateau.step(aside.item())

    def save(self, path: Path, **more: Any) -> Path:
        return stoker.save(path, self.net, self.optimizers, extra_state={**self.state, "best": (0.5, None)}, **more)

    def load(self, path: Path) -> Any:
        return stoker.load(path, self.net, self.optimizers, extra_state=self.state)


def tables_of(net: nn.Module) -> list[Tensor]:
    """A copy of everything that a refused load must leave alone."""
    return [value.clone() for value in net.state_dict().values()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"), [("device", "file"), ("file", "cached"), ("cached", "hot"), ("hot", "device")]
)
def test_a_script_continues_to_the_bit_under_another_placement(before: str, after: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    script = Script(Net(placed(before, tmp_path)))
    script.run(range(4))
    script.save(tmp_path / "half", shard_bytes=200)
    script.run(range(4, 8))
    script.save(tmp_path / "whole", shard_bytes=200)

    torch.manual_seed(2)
    again = Script(Net(placed(after, tmp_path)))
    found = again.load(tmp_path / "half")
    assert found.model is again.net
    assert found.step == 4  # of the bag that updates itself in each backward
    assert found.extra_state["best"] == (0.5, None)
    assert again.scheduler.milestones == Counter({2: 1, 3: 2})
    again.run(range(4, 8))
    again.save(tmp_path / "resumed", shard_bytes=200)
    assert files(tmp_path / "resumed") == files(tmp_path / "whole")
    for net in (script.net, again.net):
        net.tables.close()


def test_tables_alone_and_a_single_optimizer(tmp_path: Path) -> None:
    made = [
        stoker.EmbeddingTables(
            [stoker.TableConfig(name="a", num_embeddings=9, embedding_dim=2)], optimizer=stoker.SGD(lr=0.1), seed=seed,
            backend="reference",
        )
        for seed in (0, 1)
    ]  # fmt: skip
    stoker.load(stoker.save(tmp_path / "a", made[0]), made[1])
    assert torch.equal(made[0].rows("a"), made[1].rows("a"))
    net = Net()
    stoker.save(tmp_path / "b", net, torch.optim.Adam(net.parameters(), lr=0.5), step=7)
    other = torch.optim.Adam(net.parameters(), lr=0.1)
    assert stoker.load(tmp_path / "b", net, other).step == 7
    assert other.param_groups[0]["lr"] == 0.5


def test_rows_do_not_go_through_the_state_of_the_module(tmp_path: Path) -> None:
    net = Net()
    stoker.save(tmp_path / "a", net)
    with stoker.training.files.loading.safe_open(tmp_path / "a" / "dense.safetensors", framework="pt") as file:
        names = {name.removeprefix("model.") for name in file.keys()}  # noqa: SIM118
    assert not [name for name in names if name.startswith(("tables.", "deep.", "same."))]  # handles neither
    rows = [name for name in net.state_dict() if name.startswith(("tables.", "deep.", "same."))]
    assert rows, "a module's own state_dict still has them"
    assert names - {"generator.cpu"} == set(net.state_dict()) - set(rows)
    entries = json.loads((tmp_path / "a" / "manifest.json").read_text())["tables"]
    assert [(entry["module"], entry["name"]) for entry in entries] == [
        ("tables", "user"), ("tables", "item"), ("deep.inner.1", "user"),
    ]  # fmt: skip


def test_wrappers_are_left_out_of_names(tmp_path: Path) -> None:
    stoker.save(tmp_path / "plain", net := Net())
    compiled: Any = torch.compile(net, backend="eager")
    stoker.save(tmp_path / "compiled", compiled)
    stoker.save(tmp_path / "parallel", nn.DataParallel(net))
    net.head = torch.compile(net.head, backend="eager")
    stoker.save(tmp_path / "inside", net)
    assert any("_orig_mod" in name for name in net.state_dict())
    for name in ("compiled", "parallel", "inside"):
        assert files(tmp_path / name) == files(tmp_path / "plain")
        stoker.load(tmp_path / name, net)
        stoker.load(tmp_path / name, Net())


def test_a_model_with_more_than_its_own_tables(tmp_path: Path) -> None:
    """A RecModel may be saved with all of this too, and is still built from its checkpoint."""
    spec = stoker.FeatureSpec.from_sizes(2, [9, 5])
    model = stoker.DLRM(spec, embedding_dim=4, bottom=(4,), top=(3,), optimizer=stoker.Adagrad(lr=0.1), seed=3)
    dense = torch.optim.Adam(model.dense_parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(dense, 3)
    stoker.save(tmp_path / "a", model, dense, extra_state={"scheduler": scheduler})
    built = stoker.load(tmp_path / "a").model
    assert type(built) is stoker.DLRM
    for name, value in model.state_dict().items():
        assert torch.equal(built.state_dict()[name], value), name
    model.bag = stoker.TTEmbeddingBag(9, 4, cores=2, rank=2, optimizer=stoker.Adagrad(lr=0.1), backend="reference")
    model.bag(torch.tensor([[1, 2]])).sum().backward()
    stoker.save(tmp_path / "b", model, dense)
    model.bag.reset_parameters()
    assert model.bag.tick == 0
    stoker.load(tmp_path / "b", model, dense)
    assert model.bag.tick == 1


def test_checkpoints_of_the_first_format_load_and_are_written_as_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``format_1`` was written before there was a second format."""
    model = stoker.load(FORMAT_1, backend="reference").model
    dense = torch.optim.Adam(model.dense_parameters())
    manifest = stoker.load(FORMAT_1, model, dense).manifest
    assert manifest["format_version"] == 1
    monkeypatch.setattr(stoker, "__version__", manifest["stoker_version"])
    stoker.save(tmp_path / "a", model, dense, extra=manifest["extra"], shard_bytes=200)
    found = files(tmp_path / "a")
    text = json.dumps(unseal(found["manifest.json"]), indent=1, sort_keys=True) + "\n"  # without its checksum
    assert {**found, "manifest.json": text.encode()} == files(FORMAT_1)


def optimizer_of(kind: Any, **options: Any) -> Callable[[Net], Any]:
    return lambda net: kind([each for each in net.parameters() if each.requires_grad], lr=0.1, **options)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"names": ("user", "item", "shop")}, r"different tables; the checkpoint lacks 'tables\.shop'"),
        ({"names": ("item",)}, r"different tables; the module given lacks 'tables\.user'"),
        ({"users": 41}, r"table 'user' has 40 rows of 4 columns, bfloat16 in .*, but 41 rows of 4"),
        ({"dtype": "float32"}, r"table 'user' has .* bfloat16 in .*, but 40 rows of 4 columns, float32"),
        ({"rows": stoker.SGD(lr=0.1)}, r"row optimizer 'adagrad', the model has 'sgd' in 'tables'"),
        ({"tt_rows": stoker.SGD(lr=0.1)}, r"row optimizer 'adam', the model has 'sgd' in 'own'"),
        ({"tt_rows": None}, r"row optimizer 'adam', the model has None in 'own'"),
        ({"placement": {"user": stoker.TensorTrain(rank=2)}, "dtype": "float32"},
         r"lacks 'tables\.user'; the checkpoint lacks 'tables\.user\.core1'.*TensorTrain"),
        ({"width": 5}, r"'head\.bias' has shape \(6,\) in .*, but \(5,\)"),
        ({"head": "top"}, r"parameters and buffers; the module given lacks 'head\.bias', 'head\.weight'; "),
    ],
)  # fmt: skip
def test_another_module_is_refused_by_name_and_left_alone(change: Any, words: str, tmp_path: Path) -> None:
    stoker.save(tmp_path / "a", Net())
    other = Net(**change, seed=1)
    before = tables_of(other)
    with pytest.raises(CheckpointError, match=words):
        stoker.load(tmp_path / "a", other)
    assert all(torch.equal(one, two) for one, two in zip(before, tables_of(other), strict=True))


def test_tables_that_are_not_there(tmp_path: Path) -> None:
    stoker.save(tmp_path / "a", Net())
    with pytest.raises(
        CheckpointError, match=r"EmbeddingTables and TTEmbeddingBag; the module given lacks 'deep\.inner\.1', 'own', "
    ):
        stoker.load(tmp_path / "a", nn.Linear(2, 2))
    stoker.save(tmp_path / "b", nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match=r"the checkpoint lacks 'tables', 'deep\.inner\.1', 'own', 'tt'"):
        stoker.load(tmp_path / "b", Net())


@pytest.mark.parametrize(
    ("saved", "given_now", "words"),
    [
        (None, optimizer_of(torch.optim.SGD), "without a dense optimizer"),
        (optimizer_of(torch.optim.Adam), optimizer_of(torch.optim.SGD), "'Adam', not 'SGD'"),
        (optimizer_of(torch.optim.SGD), lambda net: torch.optim.SGD(net.head.parameters(), lr=0.1),
         r"groups of \[\d+\] parameters, but the optimizer given has groups of \[2\]"),
        (lambda net: {"a": torch.optim.SGD(net.head.parameters())},
         lambda net: [torch.optim.SGD(net.head.parameters())],
         "of the optimizers 'a'; given are '0'"),
        (lambda net: {name: torch.optim.SGD(net.head.parameters()) for name in "ab"},
         lambda net: {"a": torch.optim.SGD(net.head.parameters())}, "given are 'a'. Give all of them"),
        (lambda net: torch.optim.SGD(list(net.head.parameters())),
         lambda net: torch.optim.SGD(list(net.head.parameters())[::-1]),
         r"has 'head\.weight' as parameter 0, but the optimizer given has 'head\.bias'"),
        (optimizer_of(torch.optim.SGD), lambda net: net.tables.optimizer,
         "row optimizer 'adagrad', whose state is saved"),
        (optimizer_of(torch.optim.SGD), lambda net: {"x": 3}, "optimizer 'x' is a int, not a torch.optim.Optimizer"),
    ],
)  # fmt: skip
def test_another_optimizer_is_refused(saved: Any, given_now: Any, words: str, tmp_path: Path) -> None:
    net = Net()
    stoker.save(tmp_path / "a", net, None if saved is None else saved(net))
    other = Net(seed=0)
    before = tables_of(other)
    with pytest.raises(CheckpointError, match=words):
        stoker.load(tmp_path / "a", other, given_now(other))
    assert all(torch.equal(one, two) for one, two in zip(before, tables_of(other), strict=True))


def test_extra_state_that_does_not_fit(tmp_path: Path) -> None:
    script = Script(Net())
    path = script.save(tmp_path / "a")
    net, state = script.net, script.state
    for given_now, words in (
        (
            {**state, "ema": state["scaler"]},
            "has no extra state 'ema'. It has: 'best', 'falling', 'plateau', 'scaler', 'scheduler'",
        ),
        ({"scaler": state["scaler"]}, "also holds extra state 'falling', 'plateau', 'scheduler'"),
        ({**state, "best": None}, r"extra_state\['best'\] cannot be filled in place: it was saved as a value"),
        ({**state, "scaler": 3}, r"extra_state\['scaler'\] cannot be .*: the int given has no load_state_dict"),
    ):
        with pytest.raises(CheckpointError, match=words):
            stoker.load(path, net, extra_state=given_now)
    with pytest.raises(CheckpointError, match=r"holds extra state 'falling', .*extra_state=\{\} to continue without"):
        stoker.load(path, net, script.optimizers)
    stoker.load(path, net, script.optimizers, extra_state={})
    off = torch.amp.GradScaler("cpu", enabled=False)
    stoker.save(tmp_path / "b", net, extra_state={"scaler": off})
    with pytest.raises(CheckpointError, match=r"extra_state\['scaler'\], a GradScaler, refuses the state"):
        stoker.load(tmp_path / "b", net, extra_state={"scaler": state["scaler"]})


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (lambda: {"a": [1, {"f": print}]}, r"extra_state\['x'\]\['a'\]\[1\]\['f'\] is a builtins.builtin_function"),
        (lambda: torch.ones(2).to_sparse(), r"extra_state\['x'\] is a tensor with layout torch.sparse_coo"),
        (lambda: nn.ModuleList([Net()]), r"extra_state\['x'\] contains EmbeddingTables"),
        (lambda: {1, 2}, r"extra_state\['x'\] is a builtins.set"),
    ],
)
def test_what_a_checkpoint_cannot_hold_is_refused_by_name(value: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=words):
        stoker.save(tmp_path / "a", Net(), extra_state={"x": value()})
    assert not list(tmp_path.iterdir())


def test_row_optimizers_get_their_settings_back_when_training_is_resumed(tmp_path: Path) -> None:
    script = Script(Net(rows=stoker.Adagrad(lr=0.3, schedule=stoker.CosineDecay(steps=9))))
    path = script.save(tmp_path / "a")  # with its optimizers
    other = Script(Net())
    stoker.load(path, other.net)
    assert other.net.tables.optimizer.lr == 0.1
    other.load(path)
    assert other.net.tables.optimizer == script.net.tables.optimizer
    with pytest.raises(CheckpointError, match=r"'tables' was trained with seed=0.*has seed=1\. Build it with seed=0"):
        Script(Net(seed=1)).load(path)


def test_a_module_is_loaded_only_into_one(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds a Net, a module that only your own code.*into=module"):
        stoker.load(stoker.save(tmp_path / "a", Net()))
    with pytest.raises(CheckpointError, match=r"holds a model 'dlrm', but the module given is a Net"):
        stoker.load(FORMAT_1, Net())
    with pytest.raises(CheckpointError, match=r"module is a OrderedDict; save takes the nn\.Module itself"):
        stoker.save(tmp_path / "b", Net().state_dict())  # type: ignore[arg-type]


def test_the_examples_of_the_docs_run(tmp_path: Path) -> None:
    import doctest

    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner()
    runner.run(parser.get_doctest(stoker.save.__doc__ or "", {}, "save", None, None))
    assert runner.summarize() == (0, 6)
    page = (Path(__file__).parents[2] / "docs/training.md").read_text()
    [source] = re.findall(r"### A module of your own.*?```python\n(.*?)```", page, re.DOTALL)
    script = Script(Net())
    names: dict[str, Any] = {
        "stoker": stoker, "net": script.net, "adam": script.optimizers["main"], "sgd": script.optimizers["aside"],
        "scheduler": script.scheduler, "scaler": script.scaler, "epoch": 3,
    }  # fmt: skip
    exec(source, names)
    for _ in range(2):
        names["save"](tmp_path / "a")
        assert names["resume"](tmp_path / "a") == 3


class Killed(BaseException):
    """As a kill: nothing is cleaned up."""


def save_until(survives: int, path: Path, net: nn.Module, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Overwrite a checkpoint, but die at the call of that number that changes the disk; whether it was survived."""
    calls = iter(range(1000))

    def killing(real: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            if next(calls) == survives:
                monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
                raise Killed
            return real(*arguments, **options)

        return call

    with monkeypatch.context():
        monkeypatch.setattr(os, "fsync", killing(os.fsync))
        monkeypatch.setattr(os, "replace", killing(os.replace))
        monkeypatch.setattr(shutil, "rmtree", killing(shutil.rmtree))
        monkeypatch.setattr(checkpoint, "save_file", killing(checkpoint.save_file))
        try:
            stoker.save(path, net, overwrite=True)
        except Killed:
            return False
        finally:
            monkeypatch.undo()
    return True


@pytest.mark.slow
@pytest.mark.parametrize("again", [None, 3, 9])
def test_a_kill_at_any_moment_leaves_a_checkpoint_that_loads(
    again: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a name that is written over and over, as most scripts do, killed once or twice in a row."""
    versions: list[nn.Module] = [
        stoker.EmbeddingTables(
            [stoker.TableConfig(name="a", num_embeddings=6, embedding_dim=2)], optimizer=stoker.SGD(lr=0.1), seed=seed,
            backend="reference",
        )
        for seed in range(3)
    ]  # fmt: skip
    target, whole = versions[0].__deepcopy__({}), False  # type: ignore[operator]
    survives = 0
    while not whole:
        folder = tmp_path / str(survives)
        path = stoker.save(folder / "last", versions[0])
        whole = save_until(survives, path, versions[1], monkeypatch)
        possible = versions[:2]
        if again is not None:
            loaded = stoker.load(path, target).model.rows("a")
            possible = [each for each in versions if torch.equal(each.rows("a"), loaded)]
            assert len(possible) == 1
            save_until(again, path, versions[2], monkeypatch)
            possible = [*possible, versions[2]]
        loaded = stoker.load(path, target).model.rows("a")
        assert any(torch.equal(each.rows("a"), loaded) for each in possible), survives
        stoker.save(path, versions[2], overwrite=True)
        assert [entry.name for entry in folder.iterdir()] == ["last"]
        survives += 1
    assert survives >= 10


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="measures memory through /proc, which is not here"
)
@pytest.mark.parametrize("home", ["memory", "file"])
def test_rows_stream_in_bounded_memory(home: Any, tmp_path: Path) -> None:
    def tables() -> nn.Module:
        made = stoker.EmbeddingTables(
            [stoker.TableConfig(name="a", num_embeddings=400_000, embedding_dim=32)], optimizer=stoker.Adagrad(lr=0.1),
            placement=stoker.Cached(slots=64, home=home, path=str(tmp_path) if home == "file" else None),
        )  # fmt: skip
        return nn.ModuleDict({"tables": made, "head": nn.Linear(4, 4)})

    rows = 400_000 * 32 * 4 * 2  # bytes with their state
    net, other = tables(), tables()
    for each in (net, other):  # what is in memory is touched, so that it counts before and after
        for start, chunk in each["tables"].read("a"):
            each["tables"].write("a", start, Rows(chunk.weight + 1, chunk.state))
    before = peak(reset=True)
    stoker.save(tmp_path / "a", net, shard_bytes=2**22)
    assert peak() - before < rows / 2
    before = peak(reset=True)
    stoker.load(tmp_path / "a", other)
    assert peak() - before < rows / 2
    for each in (net, other):
        each["tables"].close()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.just("$tensor"),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.just("$dict") | st.integers() | st.tuples(st.integers()), inner)
        | st.dictionaries(st.integers(), st.integers()).map(Counter)
    ),
    max_leaves=12,
)


@settings(max_examples=scaled(100), deadline=None)
@given(value=VALUES)
@example({"b": 1, "a": 2})
@example({"$tuple": [1]})
def test_values_come_back_as_they_were(value: Any) -> None:
    tensors: dict[str, Tensor] = {}
    text = json.dumps(
        module_state.encode("it", {"t": torch.arange(3), "v": value}, tensors), allow_nan=False, sort_keys=True
    )
    found = module_state.decode(json.loads(text), tensors)
    assert repr(found["v"]) == repr(value)
    assert torch.equal(found["t"], torch.arange(3))


def test_values_that_are_not_finite() -> None:
    text = json.dumps(module_state.encode("it", [float("nan"), float("-inf")], {}), allow_nan=False)
    assert str(module_state.decode(json.loads(text), {})) == "[nan, -inf]"


def test_newer_formats_are_refused(tmp_path: Path) -> None:
    path = stoker.save(tmp_path / "a", Net())
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["format_version"] == 2
    newer = checkpoint.FORMAT_VERSION + 1
    (path / "manifest.json").write_text(json.dumps(seal({**manifest, "format_version": newer})))
    with pytest.raises(CheckpointError, match=rf"format {newer}.*Update"):
        stoker.load(path, Net())


def test_tables_that_grow_are_resumed_with_their_seed_only(tmp_path: Path) -> None:
    """Rows of new ids are drawn by it."""

    def net(seed: int) -> stoker.EmbeddingTables:
        table = stoker.TableConfig(name="t", num_embeddings=50, embedding_dim=4, grow=stoker.Grow())
        return stoker.EmbeddingTables([table], optimizer=stoker.SGD(lr=0.1), seed=seed)

    tables = net(0)
    tables(torch.arange(5).reshape(5, 1)).sum().backward()
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    path = stoker.save(tmp_path / "a", tables, optimizer)
    stoker.load(path, net(1))
    stoker.load(path, net(0), optimizer)
    with pytest.raises(CheckpointError, match=r"by which rows of new ids are drawn, but .* has seed=1"):
        stoker.load(path, net(1), optimizer)
