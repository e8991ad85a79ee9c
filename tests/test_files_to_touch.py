"""What is new stands in one file: a row optimizer, a model, a backing store and a recipe, each from a folder that
Stoker does not know.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from processes import run_python

import stoker
from stoker.base.errors import ConfigError
from stoker.models import MODELS, import_model
from stoker.ops.rule import RULES
from stoker.optim import ROW_OPTIMIZERS, register_row_optimizer
from stoker.tables.stores.registry import _STORES
from stoker.testing import check_store, make_dataset

SMALL = {"embedding_dim": 4, "batch_size": 64, "steps": 30, "display": "quiet", "tensorboard": False}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for one new file, from which Python imports; what it registers is forgotten afterwards."""
    registries = (ROW_OPTIMIZERS, MODELS, RULES, _STORES)
    before = [dict(each) for each in registries]
    known = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for registry, entries in zip(registries, before, strict=True):
        registry.clear()
        registry.update(entries)
    for name in set(sys.modules) - known:
        if getattr(sys.modules[name], "__file__", None) in {str(path) for path in tmp_path.glob("*.py")}:
            del sys.modules[name]


DOCS = Path(__file__).parents[1] / "docs"
in_checkout = pytest.mark.skipif(not DOCS.exists(), reason="there is no docs folder beside these tests: not a checkout")


def code_of(page: str, words: str) -> str:
    """The block of Python of a page that has ``words``."""
    blocks = (DOCS / page).read_text(encoding="utf-8").split("```python\n")[1:]
    (found,) = [block.split("```")[0] for block in blocks if words in block.split("```")[0]]
    return found


@pytest.mark.slow
@in_checkout
def test_a_row_optimizer_is_one_file(folder: Path) -> None:
    (folder / "lion_of_tests.py").write_text(code_of("backends.md", "(RowOptimizer)"))
    import lion_of_tests

    # Rows as in the paper, worked out by PyTorch for rows 1 and 2, of which row 2 is looked up in every second step.
    table = stoker.TableConfig(name="t", num_embeddings=3, embedding_dim=5)
    found = {}
    for backend in ("reference", "auto"):
        tables = stoker.EmbeddingTables([table], optimizer=lion_of_tests.Lion(lr=0.01), backend=backend)
        weight, mean = tables.rows("t").clone(), torch.zeros(3, 5)
        for step in range(8):
            ids = [1, 2] if step % 2 else [1]
            (tables(torch.tensor(ids).view(-1, 1)) - 0.02 * step).square().sum().backward()
            grad = torch.zeros(3, 5)
            grad[ids] = 2 * (weight[ids] - 0.02 * step)
            seen = torch.zeros(3, 1, dtype=torch.bool)
            seen[ids] = True
            weight = torch.where(seen, weight - 0.01 * (0.9 * mean + 0.1 * grad).sign(), weight)
            mean = torch.where(seen, 0.99 * mean + 0.01 * grad, mean)
        torch.testing.assert_close(tables.rows("t"), weight, rtol=0, atol=1e-6)
        found[backend] = tables.rows("t")
    assert torch.equal(found["reference"], found["auto"]), "kernels equal the reference to the bit"

    data = make_dataset(folder / "data", rows=4000)
    lion = {"row_optimizer": "lion", "row_options": {"betas": (0.8, 0.95)}, **SMALL}
    resident = stoker.train(data, out=folder / "resident", **lion)
    placed = stoker.train(data, out=folder / "placed", device_memory="6KiB", **lion)
    assert resident.model.embeddings.optimizer == lion_of_tests.Lion(lr=1e-3, betas=(0.8, 0.95))
    again = stoker.train(resume=folder / "placed", steps=45, display="quiet")
    longer = stoker.train(data, out=folder / "longer", **{**lion, "steps": 45})
    for name in data.schema.num_embeddings:
        assert torch.equal(resident.model.embeddings.rows(name), placed.model.embeddings.rows(name))
        assert torch.equal(again.model.embeddings.rows(name), longer.model.embeddings.rows(name))
    assert stoker.verify(folder / "placed", steps=5).identical
    with pytest.raises(ConfigError, match=r"lion has no option 'beta'. Did you mean 'betas'\? It has: betas"):
        stoker.TrainConfig(row_optimizer="lion", row_options={"beta": 1})


def test_row_optimizers_of_one_kind_are_refused(folder: Path) -> None:
    class Other(stoker.SGD):
        kind = "adam"

    class Fresh(stoker.optim.RowOptimizer):
        kind = "fresh"

    with pytest.raises(ConfigError, match=r"which is that of stoker.optim.rows:Adam"):
        register_row_optimizer(Other)
    with pytest.raises(ConfigError, match="has no default_lr"):
        register_row_optimizer(Fresh)
    with pytest.raises(ConfigError, match=r"row_optimizer 'adma' is unknown. Choose one of 'sgd'"):
        stoker.TrainConfig(row_optimizer="adma")  # type: ignore[arg-type]
    for other, shown in ((None, "None"), (stoker.SGD(lr=0.1), r"SGD\(.*\)")):
        with pytest.raises(ConfigError, match=rf"row_optimizer {shown} is unknown. Choose one of 'sgd'"):
            stoker.TrainConfig(row_optimizer=other)  # type: ignore[arg-type]


MODEL = '''
"""Logistic regression over dense columns and the sum of the rows' elements."""

import torch
from processes import run_python

from stoker import RecModel
from stoker.models.layers import dense_generator, linear


class Flat(RecModel):
    name = "flat"

    def __init__(self, spec, *, scale=1.0, **settings):
        super().__init__(spec, **settings)
        self.scale = scale
        self.last = linear(len(spec.dense), 1, dense_generator(self.seed, "flat"))
        self.to(self.device)

    def dense_part(self, dense, embedded):
        return self.scale * (self.last(dense).squeeze(1) + embedded.sum((1, 2)))

    def config(self):
        return {**super().config(), "scale": self.scale}
'''


@pytest.mark.slow
def test_a_model_is_one_file(folder: Path) -> None:
    (folder / "flat_of_tests.py").write_text(MODEL)
    import_model("flat_of_tests:Flat")
    data = make_dataset(folder / "data", rows=4000)
    chosen = {"model": "flat", "model_options": {"scale": 0.5}, "row_optimizer": "sgd", "row_lr": 0.5, **SMALL}
    resident = stoker.train(data, out=folder / "resident", **chosen)
    placed = stoker.train(data, out=folder / "placed", device_memory="6KiB", **chosen)
    assert resident.test == placed.test
    assert resident.test["auc"] > 0.6

    # The same by hand: tables of PyTorch, from the same start, over the same batches.
    start = stoker.TrainConfig(**{k: v for k, v in chosen.items() if k != "display"}).make_model(
        data.schema, stoker.SGD(lr=0.5)
    )
    own = torch.nn.ModuleList(
        torch.nn.EmbeddingBag.from_pretrained(start.embeddings.rows(name).clone(), freeze=False, mode="sum")
        for name in data.schema.num_embeddings
    )
    last = start.last
    rows = torch.optim.SGD(own.parameters(), lr=0.5)
    dense = torch.optim.Adam(last.parameters(), lr=1e-3)
    stream = data.train.batches(64, seed=0)
    done = 0
    while done < SMALL["steps"]:
        for batch in stream:
            pooled = sum(bag(batch.ids[:, [place]]).sum(1) for place, bag in enumerate(own))
            logits = 0.5 * (last(batch.dense).squeeze(1) + pooled)
            rows.zero_grad()
            dense.zero_grad()
            torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels).backward()
            rows.step()
            dense.step()
            done += 1
            if done == SMALL["steps"]:
                break
    for name, bag in zip(data.schema.num_embeddings, own, strict=True):
        torch.testing.assert_close(resident.model.embeddings.rows(name), bag.weight.detach(), rtol=1e-4, atol=1e-5)
    assert stoker.load(folder / "placed").model.scale == 0.5


@pytest.mark.slow
@in_checkout
def test_a_backing_store_is_one_file(folder: Path) -> None:
    (folder / "folder_of_tests.py").write_text(code_of("placement.md", "register_store"))
    import folder_of_tests

    check_store(lambda initial, state: folder_of_tests.Folder(initial, state, folder / "contract"))
    assert not list((folder / "contract").iterdir())
    data = make_dataset(folder / "data", rows=3000, num_embeddings=(20_000, 200))
    limits = {"device_memory": "60KiB", "host_memory": "100KiB", "home_path": f"folder://{folder}/rows"}
    resident = stoker.train(data, out=folder / "resident", **SMALL)
    placed = stoker.train(data, out=folder / "placed", **limits, **SMALL)
    found = [group.storage.home for group in placed.model.embeddings.groups if hasattr(group.storage, "home")]
    assert [home.kind for home in found] == ["memory over folder"]
    assert len(list((folder / "rows").glob("*/*"))) > 10
    for name in data.schema.num_embeddings:
        assert torch.equal(resident.model.embeddings.rows(name), placed.model.embeddings.rows(name))
    placed.model.embeddings.close()
    placement = stoker.plan(placed.model, **limits)
    assert f"at folder://{folder}/rows behind 100.0 KiB of memory" in placement.summary()
    assert stoker.verify(folder / "placed", steps=5).identical


RECIPE = '''
"""A shop's log in lines of "user;item;bought"."""

from stoker.prep.recipe import Recipe
from stoker.prep.schema import CategoricalColumn, Label, Schema, SplitRule
from stoker.prep.source_format import SourceFormat


def corner_shop(preset: str = "plain") -> Recipe:
    """Visits to a corner shop."""
    return Recipe(name="corner-shop", description="visits", presets={"plain": _schema}, preset=preset,
                  example="stoker prepare corner-shop log.csv --out data/shop")


def _schema() -> Schema:
    return Schema(
        name="corner-shop", label=Label(column="bought"), source=SourceFormat(separator=";"),
        categorical=(CategoricalColumn(name="user"), CategoricalColumn(name="item")),
        split=SplitRule(rule="hash"),
    )
'''
SCHEMA = """
name = "corner-shop"

[source]
separator = ";"

[label]
column = "bought"

[[categorical]]
name = "user"

[[categorical]]
name = "item"

[split]
rule = "hash"
"""


@pytest.mark.slow
def test_a_recipe_is_one_file(tmp_path: Path) -> None:
    pytest.importorskip("polars", reason="preparation needs Polars")
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "corner.py").write_text(RECIPE)
    lines = [f"u{i * i % 37};i{i * 7 % 23};{int(i * i % 37 < 12)}" for i in range(3000)]
    log = tmp_path / "log.csv"
    log.write_text("user;item;bought\n" + "\n".join(lines) + "\n")
    (tmp_path / "shop.toml").write_text(SCHEMA)
    program = (
        "import sys, stoker\n"
        "stoker.recipes.__path__.append(sys.argv[2] + '/recipes')  # as if the file were in the folder of recipes\n"
        "stoker.recipes.__spec__.loader.exec_module(stoker.recipes)\n"
        "assert 'corner-shop' in stoker.recipes.names() and stoker.recipes.corner_shop().name == 'corner-shop'\n"
        "made = stoker.prepare('corner-shop', sys.argv[1], out=sys.argv[2] + '/by-recipe')\n"
        "same = stoker.prepare(sys.argv[2] + '/shop.toml', sys.argv[1], out=sys.argv[2] + '/by-schema')\n"
        "assert len(made.train) > 2000 and made.train.data_hash == same.train.data_hash\n"
        "result = stoker.train(made, out=sys.argv[2] + '/run', steps=60, batch_size=128,"
        " backend='reference', display='quiet')\n"
        "print(result.test['auc'])\n"
    )
    done = run_python("-c", program, log, tmp_path)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) > 0.6
