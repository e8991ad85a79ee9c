"""Which back end a name stands for, and what is said where it cannot work."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from stoker import ops
from stoker.base.errors import ConfigError, DependencyError

CPU = torch.device("cpu")


@pytest.fixture
def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else real(name))
    monkeypatch.setattr(ops, "_load", ops._load.__wrapped__)  # what was loaded before does not count


@pytest.fixture
def with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_interpreting", lambda: False)


@pytest.mark.parametrize("triton", ["without_triton", "with_triton"])
def test_triton_without_a_gpu_says_that_there_is_none(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, triton: str
) -> None:
    request.getfixturevalue(triton)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="no GPU was found") as caught:
        ops.get_backend("triton", CPU)
    assert "pip install" not in str(caught.value)


@pytest.mark.usefixtures("with_triton")
def test_triton_on_tables_beside_the_gpu_says_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="these are on cpu"):
        ops.get_backend("triton", CPU)


@pytest.mark.usefixtures("without_triton")
def test_the_interpreter_needs_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(DependencyError, match="pip install triton"):
        ops.get_backend("triton", CPU)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'fastest' is unknown"):
        ops.get_backend("fastest", CPU)  # type: ignore[arg-type]
