"""Options of models that have the wrong type, by the constructors' own annotations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from stoker.base.errors import ConfigError
from stoker.models import DLRM, MODELS
from stoker.models.registry import check_options, own_options
from stoker.optim import SGD
from stoker.testing import make_dataset
from stoker.training.config import TrainConfig

SIZES = "expected a list of whole numbers such as [64, 32]"


@dataclass
class Tower:
    width: int


class Every(DLRM):
    name = "every"

    def __init__(
        self,
        spec: Any,
        *,
        number: int = 1,
        share: float | None = None,
        word: str = "",
        switch: bool = False,
        shares: Sequence[float] = (),
        pairs: Mapping[str, str] | None = None,
        kind: Literal["a", "b"] = "a",
        whatever: Any = None,
        own: Sequence[DLRM] = (),
        tower: Tower | None = None,
        nothing: tuple[()] = (),
        **settings: Any,
    ) -> None:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("name", "good", "bad", "expected"),
    [
        ("number", [3, -1], [1.5, "3", True, None, [3]], "a whole number."),
        ("share", [3, 0.5, None], ["x", False, []], "a number or null."),
        ("word", ["x", ""], [3, None, ["x"]], "a text."),
        ("switch", [True, False], [1, "true", None], "true or false."),
        ("shares", [[], (1, 0.5)], ["12", 3, [1, "2"], None], "a list of numbers such as [0.5, 1]."),
        ("pairs", [None, {}, {"a": "b"}], ["ab", {"a": 3}, [["a", "b"]]], 'such as {"a": "b"} or null.'),
        ("kind", ["a", "b"], ["c", 1, [], ["a"]], "'a' or 'b'."),
        ("top", [(4,), []], ["4-2", 4, [4.0], None], "a list of whole numbers such as [64, 32]."),
        ("whatever", [None, 3, "x"], [], ""),
        ("own", [3, "x"], [], ""),  # of a type that is not known here: for the model to say
        ("tower", [{"width": 3}], [], ""),  # the model makes its own objects of plain values
        ("nothing", [[]], [], ""),
        ("unheard_of", [3, "x"], [], ""),
    ],
)
def test_values_are_those_of_the_annotation(name: str, good: list[Any], bad: list[Any], expected: str) -> None:
    for value in good:
        check_options(Every, {name: value})
    for value in bad:
        with pytest.raises(ConfigError) as caught:
            check_options(Every, {name: value})
        assert str(caught.value).startswith(f"option {name} of model 'every' is {value!r}, expected ")
        assert str(caught.value).endswith(expected)


@pytest.mark.parametrize("model", sorted(MODELS))
def test_every_option_of_every_model_is_checked(model: str, tmp_path: Any) -> None:
    spec = make_dataset(tmp_path, rows=50, sequence={1: 4}).schema
    for name in own_options(MODELS[model]):
        config = TrainConfig(model=model, model_options={name: {"odd": None}})
        with pytest.raises(ConfigError, match=rf"option {name} of model '{model}' is \{{'odd': None\}}, expected "):
            config.make_model(spec, SGD(lr=0.1))


def test_a_text_for_layer_sizes(tmp_path: Any) -> None:
    spec = make_dataset(tmp_path, rows=50).schema
    for model, name in (("tbsm", "tower"), ("din", "attention"), ("deepfm", "hidden"), ("dlrm", "bottom")):
        with pytest.raises(ConfigError) as caught:
            TrainConfig(model=model, model_options={name: "abc"}).make_model(spec, SGD(lr=0.1))
        assert str(caught.value) == f"option {name} of model '{model}' is 'abc', {SIZES}."


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_dataset_instead_of_its_schema_is_named(model: Any, tmp_path: Path) -> None:
    with pytest.raises(AttributeError, match=r"Write data\.schema"):
        model(make_dataset(tmp_path / "data", rows=64))
