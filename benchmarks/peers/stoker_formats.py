"""Logs of several shapes by stoker's prepare, with a schema of the user's own."""

from __future__ import annotations

from prepare_tools import prepare_case
from worker_tools import argument, versions

import stoker
from stoker.prep.schema import CategoricalColumn, DenseColumn, Label, SplitRule
from stoker.prep.source_format import SourceFormat

config = argument()
versions(stoker=stoker.__version__)
names = config["columns"]
schema = stoker.Schema(
    label=Label(column="label"),
    dense=[DenseColumn(name=name, transforms=["log1p"]) for name in names["dense"]],
    categorical=[
        CategoricalColumn(name=name, type=kind)
        for kind, group in (("int", "whole"), ("string", "text"))
        for name in names[group]
    ],
    split=SplitRule(rule="runs"),
    source=SourceFormat(kind=config["shape"]["kind"]),
)
prepare_case(config, lambda log, rows, out: stoker.prepare(schema, log, out=out))
