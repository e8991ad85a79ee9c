"""Reading a prepared dataset back without the reader under test elsewhere."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from safetensors.numpy import load_file


def rows_of(directory: Path, split: str) -> dict[str, Any]:
    """labels [n], dense [n, D], bags: list of rows of lists of ids."""
    manifest = json.loads((directory / "manifest.json").read_text())
    features = len(manifest["features"]["features"])
    labels, dense, bags = [], [], []
    for shard in manifest["splits"][split]["shards"]:
        arrays = load_file(directory / shard["file"])
        labels += arrays["labels"].tolist()
        dense += arrays["dense"].tolist()
        if "lengths" not in arrays:
            bags += [[[item] for item in row] for row in arrays["ids"].tolist()]
            continue
        flat, at = arrays["ids"].tolist(), 0
        for lengths in arrays["lengths"].tolist():
            assert len(lengths) == features
            row = []
            for length in lengths:
                row.append(flat[at : at + length])
                at += length
            bags.append(row)
        assert at == len(flat)
    return {"labels": labels, "dense": dense, "bags": bags}


def vocabulary(directory: Path, table: str) -> list[tuple[Any, int]]:
    return list(pl.read_parquet(directory / "vocab" / f"{table}.parquet").iter_rows())


def counts(directory: Path) -> dict[str, list[int]]:
    return {name: array.tolist() for name, array in load_file(directory / "counts.safetensors").items()}


def quarantine(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "quarantine.jsonl").read_text().splitlines()]


def digests(directory: Path, *, without: tuple[str, ...] = ()) -> dict[str, str]:
    """sha256 of every file below ``directory``, but for the note of where its input was."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name not in (*without, ".request")
    }


def criteo_lines(rows: int, *, seed: int = 0) -> list[str]:
    """Lines in the Criteo format: empty fields, negative integers, hex beyond 2**31."""
    generator = np.random.default_rng(seed)
    sizes = [3 if i % 3 == 0 else 50 if i % 3 == 1 else 2000 for i in range(26)]
    labels = generator.integers(0, 2, rows)
    dense = generator.integers(-2, 300, (rows, 13))
    codes = np.stack([generator.zipf(1.3, rows) % size for size in sizes], 1).astype(np.uint64)
    codes = codes * np.uint64(2654435761) % np.uint64(2**32)
    empty = generator.random((rows, 39)) < 0.1
    lines = []
    for label, numbers, hexes, gaps in zip(labels, dense.tolist(), codes.tolist(), empty.tolist(), strict=True):
        fields = [str(n) for n in numbers] + [f"{h:08x}" for h in hexes]
        lines.append("\t".join([str(label), *("" if gap else f for f, gap in zip(fields, gaps, strict=True))]))
    return lines
