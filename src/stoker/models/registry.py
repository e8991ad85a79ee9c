"""Models by name or import path, such as ``my_models.wide:Wide`` for your own; and checks of the options of each."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import typing
from collections.abc import Hashable, Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from stoker.base.checks import expected
from stoker.base.errors import ConfigError
from stoker.models.base import RecModel
from stoker.models.dcn import DCN
from stoker.models.deepfm import DeepFM
from stoker.models.din import DIN
from stoker.models.dlrm import DLRM
from stoker.models.rankmixer import RankMixer
from stoker.models.sasrec import SASRec
from stoker.models.tabular import Tabular
from stoker.models.tbsm import TBSM
from stoker.models.two_tower import TwoTower

#: name -> model, for the command line and for checkpoints; add your own.
MODELS: dict[str, type[RecModel]] = {
    model.name: model for model in (DLRM, DeepFM, DCN, TBSM, DIN, SASRec, Tabular, RankMixer, TwoTower)
}


def import_model(path: str) -> type[RecModel]:
    """Import a model class and register it in :data:`stoker.models.MODELS` under its ``name``.

    Args:
        path: ``package.module:Class``; the module may be in the current directory.

    Returns:
        The class.

    Raises:
        ConfigError: it cannot be imported, is not a :class:`RecModel`, or has the ``name`` of another model.

    >>> stoker.models.import_model("stoker.models.dlrm:DLRM").name
    'dlrm'
    """
    module_name, colon, name = path.partition(":")
    if not (colon and module_name and name):
        raise ConfigError(
            f"{path!r} does not name a class. Write package.module:Class, for example my_models.wide:Wide for class "
            "Wide in my_models/wide.py."
        )
    found = _attribute(_module(module_name), name, path)
    if not (inspect.isclass(found) and issubclass(found, RecModel)):
        what = f"class {found.__qualname__}" if inspect.isclass(found) else type(found).__name__
        raise ConfigError(
            f"{path} is a {what}, not a subclass of stoker.RecModel, so no command can build it. Subclass that "
            "(docs/adding_a_model.md), or load a module of your own in Python: stoker.load(directory, into=module)."
        )
    if missing := sorted(found.__abstractmethods__):
        raise ConfigError(f"{path} does not define {', '.join(missing)}. Name a class that does.")
    if not isinstance(getattr(found, "name", None), str):
        raise ConfigError(f"{path} has no name. Give the class one: name = {found.__name__.lower()!r}.")
    known = MODELS.get(found.name)
    if known is not None and known is not found and class_path(known) != class_path(found):
        raise ConfigError(
            f"{path} has the name {found.name!r}, which is that of {known.__module__}:{known.__qualname__}. Give your "
            "class another name, and train again: checkpoints say which model they hold by its name."
        )
    MODELS[found.name] = found
    return found


def class_path(kind: type) -> str | None:
    """Return the import path of a class, for :func:`import_model`; None if it cannot be imported."""
    if "<locals>" in kind.__qualname__:
        return None
    module = kind.__module__
    if module == "__main__":  # an import would give it another name
        main = sys.modules["__main__"]
        spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
        if spec is not None:
            module = spec.name
        elif file is None:  # typed at a prompt, or in a notebook
            return None
        else:
            script = Path(file).resolve().with_suffix("")
            here = Path.cwd()
            module = ".".join(script.relative_to(here).parts) if script.is_relative_to(here) else script.name
    return f"{module}:{kind.__qualname__}"


def _module(name: str) -> Any:
    """Import a module, which may be in the current directory."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise ConfigError(f"{name} cannot be imported: it needs {error.name}, which is not installed.") from error
        raise ConfigError(
            f"there is no module {error.name!r}, neither in the current directory ({here}) nor installed. Go to the "
            "directory that holds it, or add that to PYTHONPATH."
        ) from error
    except Exception as error:
        raise ConfigError(
            f"{name} cannot be imported: {type(error).__name__}: {error}. Find the line with: python -c 'import {name}'"
        ) from error


def _attribute(module: Any, name: str, path: str) -> Any:
    try:
        return attrgetter(name)(module)
    except AttributeError as error:
        models = [
            key
            for key, value in vars(module).items()
            if inspect.isclass(value) and issubclass(value, RecModel) and value.__module__ == module.__name__
        ]
        raise ConfigError(
            f"{path}: module {module.__name__!r} has no {name!r}. Its models: {', '.join(models) or 'none'}."
        ) from error


def own_options(model: type[RecModel]) -> list[str]:
    """Return the options of a model that not every model has."""
    common = inspect.signature(RecModel.__init__).parameters
    own = inspect.signature(model.__init__).parameters
    return [name for name, found in own.items() if name not in common and found.kind is not found.VAR_KEYWORD]


def check_options(model: type[RecModel], options: Mapping[str, Any]) -> None:
    """Compare options with the annotations of the model's constructor and of the constructors that it calls.

    An option without an annotation, or with an unknown one, may have any value.
    """
    hints: dict[str, Any] = {}
    for kind in reversed(model.__mro__):
        if issubclass(kind, RecModel) and "__init__" in vars(kind):
            with suppress(NameError, TypeError):  # names that only type checkers import
                hints |= typing.get_type_hints(kind.__init__)
    for name, value in options.items():
        hint = hints.get(name)
        made = any(map(is_dataclass, (hint, *typing.get_args(hint))))  # by the model, of plain values
        known = expected(hint) if isinstance(hint, Hashable) and not made else None
        if known is not None and not known[1](value):
            shown = list(value) if isinstance(value, tuple) else value
            raise ConfigError(f"option {name} of model {model.name!r} is {shown!r}, expected {known[0]}.")
