"""Public configuration refuses values of another type or out of their range, by name, when it is made."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field, fields
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import polars as pl
import pytest
import torch

import stoker
from stoker import ConfigError, optim
from stoker.base.checks import hints_of
from stoker.optim import ROW_OPTIMIZERS
from stoker.testing import make_dataset

SPEC = stoker.FeatureSpec.from_sizes(1, [10])
TABLE = {"name": "t", "num_embeddings": 10, "embedding_dim": 4}
MADE: list[tuple[Any, dict[str, Any]]] = [
    *((kind, {"lr": 0.1}) for kind in ROW_OPTIMIZERS.values()),
    (stoker.Constant, {}),
    (stoker.PolynomialDecay, {"steps": 4}),
    (stoker.CosineDecay, {"steps": 4}),
    (stoker.StepDecay, {"every": 2}),
    (stoker.OneCycle, {"steps": 6}),
    (stoker.TableConfig, TABLE),
    (stoker.Cached, {"slots": 4}),
    (stoker.HostPipelined, {"slots": 4}),
    (stoker.HotCold, {"slots": 4, "hot": {"t": 2}}),
    (stoker.Mapped, {}),
    (stoker.TensorTrain, {}),
    (stoker.Grow, {}),
    (stoker.Feature, {"name": "a", "table": "t"}),
    (stoker.TrainConfig, {}),
    (stoker.Reordering, {}),
]
#: type -> values that are of none that a setting of this type could take
WRONG = {
    "int": (2.5, True, math.nan, "x", [1]),
    "float": (True, "x", [0.5]),
    "bool": (2, "x", 0.5),
    "str": (2, True),
}


@pytest.mark.parametrize(("kind", "given"), MADE, ids=lambda each: getattr(each, "__name__", ""))
def test_wrong_types_are_refused_by_name(kind: Any, given: dict[str, Any]) -> None:
    tried = 0
    for item in fields(kind):
        plain = {"int": int, "float": float, "bool": bool, "str": str}
        hint, parsed = hints_of(kind)[item.name], item.metadata.get("parse")
        name = next((name for name, each in plain.items() if hint in (each, each | None)), None)
        for value in WRONG.get(name or "", ()) if parsed is None else ():
            with pytest.raises(ConfigError, match=item.name):
                kind(**{**given, item.name: value})
            tried += 1
    assert tried or kind is stoker.TensorTrain


def adam(**given: Any) -> Callable[[], Any]:
    return lambda: stoker.Adam(lr=0.1, **given)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (adam(eps=-1.0), r"Adam\(eps=-1.0\) must be finite and not negative"),
        (adam(eps=math.nan), "eps=nan"),
        (adam(betas=[]), "betas must be two numbers"),
        (adam(betas=(0.9, "x")), "betas must be"),
        (adam(schedule=0.5), "schedule must be a Schedule"),
        (adam(cow_clip=(1.0,)), "cow_clip must be"),
        (lambda: stoker.PolynomialDecay(steps=0), r"PolynomialDecay\(steps=0\) must be at least 1"),
        (lambda: stoker.PolynomialDecay(steps=4, power=-1), r"power=-1\) must be finite and not negative"),
        (lambda: stoker.CosineDecay(steps=-3), r"steps=-3\) must be at least 1"),
        (lambda: stoker.CosineDecay(steps=3, end=math.inf), "end=inf"),
        (lambda: stoker.StepDecay(every=-2), r"every=-2\) must be at least 1"),
        (lambda: stoker.StepDecay(every=2, gamma=math.nan), "gamma=nan"),
        (lambda: stoker.Constant(warmup=-1), r"warmup=-1\) must be finite and not negative"),
        (lambda: stoker.TableConfig(**TABLE, init_scale=-0.5), "init_scale=-0.5"),
        (lambda: stoker.TableConfig(**TABLE, features="t"), "features must be a list of texts"),
        (
            lambda: stoker.TableConfig(**TABLE, dtype="float16"),
            "'float16' is unknown: choose 'float32' or 'bfloat16'",
        ),
        (lambda: stoker.Cached(memory=-1), "size -1 is negative"),
        (lambda: stoker.Cached(slots=4, window=-1), "size -1 is negative"),
        (lambda: stoker.HotCold(slots=4, hot={"t": 2.7}), r"hot is \{'t': 2.7\}; give rows of tables"),
        (lambda: stoker.HotCold(slots=4, hot=5), "hot is 5; give rows of tables"),
        (lambda: stoker.Feature(name="a", table=Path("t"), max_length=Path("2")), "max_length must be a whole number"),
        (lambda: stoker.FeatureSpec(dense=Path("ab"), features=(), num_embeddings={}), "dense must be a list of texts"),
        (lambda: stoker.Cached(slots=4, writes="both"), "writes 'both' is unknown: choose 'append' or 'in-place'"),
        (lambda: stoker.Grow(evict="fifo"), "evict 'fifo' is unknown: choose 'lru' or 'lfu'"),
        (lambda: stoker.Feature(name="a", table="t", max_length=-1), "max_length is -1"),
        (lambda: stoker.TableConfig(**TABLE | {"num_embeddings": 1e300}), r"at least 1, and less than 2\*\*63"),
        (lambda: stoker.TrainConfig(strategy=3), "strategy must be 'auto'"),
        (lambda: stoker.TrainConfig(seed=None), "seed must be a whole number"),
        (lambda: stoker.TrainConfig(model_options=None), "model_options must be an object"),
        (lambda: stoker.TrainConfig(row_options=[1]), "row_options must be an object"),
        (lambda: stoker.TrainConfig(row_cow_clip=5), "row_cow_clip must be two numbers"),
        (lambda: stoker.TrainConfig(tt_own={"a": 0.5}), "tt_own must be an object of whole numbers"),
        (lambda: stoker.TrainConfig(data_memory=-1), "data_memory: size -1 is negative"),
        (lambda: stoker.TrainConfig(device_memory="9" * 400), "device_memory is 9+; it must be at most"),
        (lambda: stoker.TrainConfig(steps=Decimal("2.5")), "steps must be a whole number or null, found 2.5"),
        (lambda: stoker.TrainConfig(row_lr=Decimal("inf")), "row_lr is inf; it must be finite"),
        (lambda: stoker.TrainConfig(home_path=Decimal(3)), "home_path must be a text, found 3"),
        (lambda: stoker.DLRM(SPEC, embedding_dim="4"), "DLRM: embedding_dim must be a whole number, found '4'"),
        (lambda: stoker.DLRM(SPEC, optimizer="sgd"), "DLRM: optimizer must be a RowOptimizer or null, found 'sgd'"),
        (lambda: stoker.TrainConfig(data_memory=True), "data_memory: size .*True.* is not a number with a unit"),
    ],
)
def test_values_out_of_range_are_refused_by_name(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"seed": 2.5}, "EmbeddingTables: seed must be a whole number"),
        ({"seed": True}, "seed must be"),  # rows of seed 1 are others than those of a text True
        ({"include_last_offset": "no"}, "include_last_offset must be true or false"),
        ({"backend": "gpu"}, "backend"),
        ({"steps": {"t": "x"}}, "steps must be an object of whole numbers"),
    ],
)
def test_tables_refuse_wrong_arguments(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        stoker.EmbeddingTables([stoker.TableConfig(**TABLE)], optimizer=optim.SGD(lr=0.1), **given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"padding_idx": 2.5}, "TTEmbeddingBag: padding_idx must be a whole number"),
        ({"seed": "x"}, "seed must be a whole number"),
        ({"std": math.inf}, "std is inf"),
        ({"num_embeddings": 10.5}, "num_embeddings must be a whole number"),
    ],
)
def test_a_bag_refuses_wrong_arguments(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        stoker.TTEmbeddingBag(**{"num_embeddings": 100, "embedding_dim": 8, **given})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"lookahead": 2.5}, "lookahead must be a whole number or null, found 2.5"),
        ({"lookahead": math.nan}, "lookahead must be a whole number"),
        ({"lookahead": -1}, "lookahead is -1 batches; give 0 or more"),
        ({"in_flight": 1.5}, "in_flight must be a whole number"),
        ({"in_flight": 0.0}, "in_flight is 0 batches; give at least 1"),
        ({"in_flight": "2"}, "in_flight must be a whole number"),
    ],
)
def test_a_stage_refuses_numbers_that_are_not_whole(given: dict[str, Any], words: str) -> None:
    tables = stoker.EmbeddingTables([stoker.TableConfig(**TABLE)], optimizer=optim.SGD(lr=0.1))
    with pytest.raises(ConfigError, match=words):
        stoker.stage([], tables, **given)


def test_whole_floats_are_taken_everywhere() -> None:
    made = stoker.TableConfig(name="t", num_embeddings=1e1, embedding_dim=4.0)
    assert made == stoker.TableConfig(**TABLE)
    assert type(made.num_embeddings) is type(made.embedding_dim) is int
    tables = stoker.EmbeddingTables([made], optimizer=optim.SGD(lr=0.1), placement=stoker.Cached(slots=8.0))
    items = [torch.tensor([[1]]), torch.tensor([[2]])]
    staged = stoker.stage(items, tables, lookahead=2.0, in_flight=np.float32(2), lookups=lambda item: item)
    assert [tables(each).shape for each in staged] == [(1, 1, 4)] * 2
    assert stoker.TrainConfig(lookahead=2.0).lookahead == 2
    for size in (64.0, np.int64(64)):
        assert stoker.TrainConfig(batch_size=size).to_dict() == stoker.TrainConfig(batch_size=64).to_dict()


def test_options_are_what_their_json_is() -> None:
    given = {
        "model_options": {"layers": (1, (np.int64(2), 3)), "dims": {"a": torch.tensor(4)}},
        "tt_own": [("a", np.int64(1))], "row_cow_clip": np.array([1, 1e-5]),
    }  # fmt: skip
    made = stoker.TrainConfig(**given)
    assert made.to_dict()["model_options"] == {"layers": [1, [2, 3]], "dims": {"a": 4}}
    assert (made.tt_own, made.row_cow_clip) == ({"a": 1}, (1.0, 1e-5))
    assert stoker.TrainConfig.from_dict(json.loads(json.dumps(made.to_dict()))) == made


def test_names_can_be_any_ordered_collection() -> None:
    wanted = stoker.TableConfig(**TABLE, features=("a", "b"))
    names = {"a": 1, "b": 2}
    for given in (["a", "b"], names.keys(), iter(names), (name for name in names)):
        assert stoker.TableConfig(**TABLE, features=given) == wanted
    for given in ({"a", "b"}, names, b"ab"):  # a set has another order in each process
        with pytest.raises(ConfigError, match="features must be a list of texts"):
            stoker.TableConfig(**TABLE, features=given)


def test_decimals_and_fractions_are_taken_as_plain_numbers() -> None:
    given = {
        "data_memory": Decimal(64),
        "row_lr": Decimal("0.1"),
        "steps": Fraction(8),
        "row_cow_clip": (Decimal(1), 0.5),
    }
    plain = stoker.TrainConfig(data_memory=64, row_lr=0.1, steps=8, row_cow_clip=(1, 0.5))
    assert json.dumps(stoker.TrainConfig(**given).to_dict()) == json.dumps(plain.to_dict())
    assert stoker.DLRM(SPEC, embedding_dim=Decimal(4)).embedding_dim == 4


def test_numbers_of_numpy_and_paths_are_taken_as_plain_values() -> None:
    made = stoker.TrainConfig(steps=np.int64(5), dense_lr=np.float32(0.5))
    assert (type(made.steps), type(made.dense_lr)) == (int, float)
    assert type(optim.SGD(lr=np.float32(0.5)).lr) is float
    assert stoker.Cached(slots=np.int32(3), home="file", path=Path("rows")).path == "rows"
    assert stoker.SGD(lr=1).lr == 1
    assert type(stoker.SGD(lr=torch.tensor(0.5)).lr) is float
    size: Any = np.int64(2**20)
    assert type(stoker.TrainConfig(data_memory=size).data_memory).__name__ == "int"  # for config.json
    # Tuners give such numbers, and old runs hold them.
    many: Any = 1e5
    assert repr([stoker.TrainConfig(steps=many).steps, stoker.Cached(slots=many).slots]) == "[100000, 100000]"
    assert type(optim.SGD(lr=np.float64(0.5)).lr) is float
    assert stoker.MomentumSGD(lr=0.1, nesterov=np.True_).nesterov is True
    betas = optim.Adam(lr=0.1, betas=(np.float32(0.5), 0.75)).betas
    assert (betas, type(betas[0])) == ((0.5, 0.75), float)


def test_subclasses_of_users_may_have_annotations_and_fields_of_their_own() -> None:
    class Local:
        """Nobody can look it up."""

    @dataclass(frozen=True, kw_only=True)
    class Mine(stoker.SGD):
        extra: Local | None = None
        given: InitVar[int] = 3
        later: float = field(init=False)

        def __post_init__(self, given: int) -> None:
            super().__post_init__()
            object.__setattr__(self, "later", 2.0 * given)

    @dataclass(frozen=True, kw_only=True)
    class Place(stoker.Device):
        extra: Local | None = None

    @dataclass(frozen=True, kw_only=True)
    class Stairs(stoker.optim.Schedule):
        kind: ClassVar[str] = "stairs"
        steps: tuple[int, ...] = (2, 4)
        gamma: float = -0.5

        def decay(self, step: int) -> float:
            return float(self.gamma ** sum(step >= each for each in self.steps))

    made = Mine(lr=0.1, extra=Local(), schedule=Stairs(warmup=1))
    assert (made.later, made.schedule.factor(3), Place(extra=Local()).extra is not None) == (6.0, -0.5, True)
    with pytest.raises(ConfigError, match="Mine: lr must be a number"):
        Mine(lr="x")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"Stairs\(warmup=-1\)"):
        Stairs(warmup=-1)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: stoker.DLRM(None), "DLRM: spec must be a FeatureSpec, found None."),
        (lambda: stoker.SASRec("data"), "SASRec: spec must be a FeatureSpec, found 'data'."),
        (lambda: stoker.DLRM(SPEC, bottom=64), "bottom must be a list of whole numbers such as [64, 32], found 64."),
        (lambda: stoker.tables_for(pl.DataFrame({"a": 1}), 4), "must be a FeatureSpec, found an object of DataFrame."),
        (lambda: stoker.Dataset(5), "Dataset: path must be a text or a Path, found 5."),
        (lambda: stoker.train(5, out="run"), "train: dataset must be a Dataset or a text or a Path or null, found 5."),
        (lambda: stoker.report(None), "report: run must be a text or a Path, found None."),
        (lambda: stoker.Scorer([]), "Scorer: source must be a text or a Path or a RecModel, found []."),
        (lambda: stoker.Client(None), "Client: url must be a text, found None."),
        (lambda: stoker.FeatureSpec.from_sizes(1, 10), "num_embeddings must be a list of whole numbers"),
        (lambda: stoker.draft_schema("log.csv", rows="x"), "draft_schema: rows must be a whole number, found 'x'."),
        (lambda: stoker.draft_schema("log.csv", rows=math.nan), "rows=nan is below 1"),
    ],
)  # fmt: skip
def test_arguments_that_make_a_call_fail_are_named_if_their_type_is_wrong(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        call()


def test_train_and_others_name_arguments_of_wrong_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = make_dataset("data", rows=100)
    for given, words in (
        ({"loggers": print}, "train: loggers must be a list, found <built-in function print>."),
        ({"loggers": [print]}, "loggers holds <built-in function print>, which has no method log"),
        ({"loggers": "tensorboard"}, "loggers holds 't', which has no method log"),
        ({"config": {"epochs": 1}}, "train: config must be a TrainConfig or null, found {'epochs': 1}."),
        ({"config": stoker.TrainConfig}, "config must be a TrainConfig or null, found <class"),
    ):
        with pytest.raises(ConfigError, match=re.escape(words)):
            stoker.train(data, out="run", **given)  # type: ignore[arg-type]
    assert not Path("run").exists()
    with pytest.raises(ConfigError, match="reorder: how must be a Reordering or null, found 'x'"):
        stoker.reorder(data, "out", how="x", tables=["C1"])  # type: ignore[arg-type]
    model = stoker.DLRM(data.schema, embedding_dim=4)
    for split in (None, "valid", data, []):
        with pytest.raises(ConfigError, match=r"give a model, such as .* and a split"):
            stoker.evaluate(model, split)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="batch_size is nan"):
        data.train.batches(math.nan)  # type: ignore[arg-type]


def test_errors_of_other_classes_and_models_of_users_stay_as_they_are(tmp_path: Path) -> None:
    class Mine(stoker.DLRM):
        def __init__(self, spec: stoker.FeatureSpec, foresight: int = 0, **settings: Any) -> None:
            if spec is None or foresight:
                raise TypeError(f"of its own, {foresight}")
            super().__init__(spec, **settings)

    for given in ({"spec": None}, {"spec": SPEC, "foresight": 3}):  # a name that a setting of Stoker had before
        with pytest.raises(TypeError, match="of its own") as caught:
            Mine(**given)  # type: ignore[arg-type]
        assert type(caught.value) is TypeError

    class Full(Exception):
        pass

    class Logger:
        def log(self, *record: Any) -> None:
            raise Full

        def close(self) -> None:
            pass

    data = make_dataset(tmp_path / "data", rows=100)
    odd: Any = {0: Logger()}.values()  # no list, but it would do
    with pytest.raises(Full):
        stoker.train(data, out=tmp_path / "run", loggers=odd, steps=2, batch_size=10, display="quiet")
