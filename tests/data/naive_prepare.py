"""The rules of preparing, written the slow and obvious way: what the fast way must agree with."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any

from stoker.prep.schema import CategoricalColumn, Schema, SequenceColumn

NUMBER = {
    "float": re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?"),
    "int": re.compile(r"[+-]?[0-9]+(\.0+)?"),
    "hex": re.compile(r"[0-9a-fA-F]{1,16}"),
}


class Bad(Exception):
    pass


def typed(kind: str, text: str) -> Any:
    if kind == "string":
        return text
    if not NUMBER[kind].fullmatch(text):
        raise Bad
    whole, point, _ = text.partition(".") if kind == "int" else (text, "", "")
    value: Any = {"float": float, "int": int, "hex": lambda t: int(t, 16)}[kind](whole)
    if point and kind == "int" and abs(value) >= 2**53:
        raise Bad
    if kind == "int" and not -(2**63) <= value < 2**63:
        raise Bad
    if kind == "float" and math.isinf(value):
        raise Bad
    return value


def category(column: CategoricalColumn, text: str) -> Any:
    """The value that meets the vocabulary, None where missing."""
    value = typed(column.type, text) if text != "" else column.fill
    if value is None:
        return None
    if column.type == "hex" and isinstance(value, str):
        value = int(value, 16)
    return value % column.modulo if column.modulo else value


def row_of(schema: Schema, names: list[str], line: bytes, separator: str) -> dict[str, Any]:
    try:
        fields = line.decode("utf-8").split(separator)
    except UnicodeDecodeError:
        raise Bad from None
    if len(fields) != len(names):
        raise Bad
    cell = dict(zip(names, fields, strict=True))
    row: dict[str, Any] = {"cell": cell}
    label = typed("float", cell[schema.label.column])
    rule = schema.label.parsed()
    if rule is None and label not in (0, 1):
        raise Bad
    row["label"] = {">=": label >= rule[1], "<": label < rule[1]}[rule[0]] if rule else label
    row["dense"] = [typed("float", cell[c.raw]) if cell[c.raw] else None for c in schema.dense]
    row["features"] = []
    for column in schema.features:
        text = cell[column.raw]
        if isinstance(column, SequenceColumn):
            items = [part for part in text.split(column.separator) if part]
            kept = items[-column.max_length :] if column.keep == "last" else items[: column.max_length]
            row["features"].append([category(column, part) for part in kept])
        else:
            row["features"].append([category(column, text)])
    if schema.timestamp is not None:
        row["time"] = typed("int", cell[schema.timestamp.column])
    if schema.split.column is not None and cell[schema.split.column] == "":
        raise Bad
    return row


def split_of(schema: Schema, rows: list[dict[str, Any]]) -> list[str]:
    rule, n = schema.split, len(rows)
    if rule.rule == "runs":
        last = n // rule.runs
        half = math.ceil(last / 2)
        return ["train"] * (n - last) + ["test"] * half + ["valid"] * (last - half)
    if rule.rule == "column":
        return [rule.values[row["cell"][rule.column]] for row in rows]
    if rule.rule == "time":
        times = sorted(row["time"] for row in rows)
        cuts = [
            times[rank] if (rank := math.ceil(share * n - 1e-9)) < n else math.inf
            for share in (rule.train, rule.train + rule.valid)
        ]
        return ["train" if row["time"] < cuts[0] else "valid" if row["time"] < cuts[1] else "test" for row in rows]
    assert rule.rule == "leave_last_out"
    by_user: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        by_user.setdefault(row["cell"][rule.column], []).append(index)
    result = ["train"] * n
    for indices in by_user.values():
        if len(indices) >= rule.min_rows:
            ordered = sorted(indices, key=lambda i: (rows[i]["time"], i))
            result[ordered[-1]] = "test"
            if len(ordered) > 1:
                result[ordered[-2]] = "valid"
    return result


def dense_of(schema: Schema, rows: list[dict[str, Any]], splits: list[str]) -> list[list[float]]:
    columns = []
    for index, column in enumerate(schema.dense):
        train = [row["dense"][index] for row, split in zip(rows, splits, strict=True) if split == "train"]
        present = sorted(value for value in train if value is not None)
        fill: Any = column.fill
        if fill == "mean":
            fill = math.fsum(present) / len(present) if present else 0.0
        elif fill == "median":
            n = len(present)
            fill = (present[(n - 1) // 2] + present[n // 2]) / 2 if present else 0.0

        def step(value: float | None, fill: float = fill, column: Any = column) -> float:
            x = fill if value is None else value
            x = max(x, -math.inf if column.clip_min is None else column.clip_min)
            x = min(x, math.inf if column.clip_max is None else column.clip_max)
            return math.log(max(x, 0.0) + 1.0) if "log1p" in column.transforms else x

        values = [step(row["dense"][index]) for row in rows]
        fitted = [value for value, split in zip(values, splits, strict=True) if split == "train"]
        if column.transforms[-1:] == ("zscore",) and fitted:
            mean = math.fsum(fitted) / len(fitted)
            deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in fitted) / len(fitted))
            values = [(value - mean) / (deviation or 1.0) for value in values]
        elif column.transforms[-1:] == ("minmax",) and fitted:
            low, width = min(fitted), max(fitted) - min(fitted)
            values = [(value - low) / (width or 1.0) for value in values]
        columns.append(values)
    return [list(values) for values in zip(*columns, strict=True)] if columns else [[] for _ in rows]


def prepare(schema: Schema, names: list[str], lines: list[bytes], separator: str) -> dict[str, Any]:
    """Bad line numbers (from 1); labels, dense values and id bags per split; vocabularies and counts."""
    rows, bad = [], []
    for number, line in enumerate(lines, 1):
        if line.rstrip(b"\r") == b"" and len(names) > 1:
            continue
        try:
            rows.append(row_of(schema, names, line.removesuffix(b"\r"), separator))
        except Bad:
            bad.append(number)
    splits = split_of(schema, rows)
    dense = dense_of(schema, rows, splits)
    vocabularies: dict[str, list[tuple[Any, int]]] = {}
    ids: dict[str, dict[Any, int]] = {}
    unknown: dict[str, int] = {}
    for table in {column.table_name for column in schema.features}:
        members = [(i, c) for i, c in enumerate(schema.features) if c.table_name == table]
        counter: Counter[Any] = Counter()
        total = 0
        for row, split in zip(rows, splits, strict=True):
            for index, column in members if split == "train" else []:
                for value in row["features"][index]:
                    total += 1
                    if value is not None or column.missing == "category":
                        counter[value] += 1
        kept = [(v, n) for v, n in counter.items() if n >= members[0][1].min_count]
        kept.sort(key=lambda item: (-item[1], item[0] is not None, item[0] if item[0] is not None else 0))
        vocabularies[table] = kept
        ids[table] = {value: number for number, (value, _) in enumerate(kept, 1)}
        unknown[table] = total - sum(n for _, n in kept)
    out: dict[str, Any] = {name: {"labels": [], "dense": [], "bags": []} for name in ("train", "valid", "test")}
    for row, split, values in zip(rows, splits, dense, strict=True):
        bags = []
        for column, items in zip(schema.features, row["features"], strict=True):
            table = ids[column.table_name]
            own = column.missing == "category"
            bags.append([0 if v is None and not own else table.get(v, 0) for v in items])
        out[split]["labels"].append(float(row["label"]))
        out[split]["dense"].append(values)
        out[split]["bags"].append(bags)
    return {"bad": bad, "splits": out, "vocabularies": vocabularies, "unknown": unknown, "rows": len(rows)}
