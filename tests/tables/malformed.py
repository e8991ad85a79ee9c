"""Malformed lookups on every path into the tables, by seed: ``python tests/tables/malformed.py 0:2000``.

Each seed draws tables, a good lookup, how it is spoilt and by which path it comes. A lookup that nobody could mean is
refused with an error; one that is still good gives what resident tables give. Run in a process of its own, which prints
each seed before it is tried: a crash has a number (tests/tables/test_malformed.py).
"""

from __future__ import annotations

import itertools
import sys
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stoker import Batch, Cached, EmbeddingTables, HotCold, TableConfig, optim, stage

__all__ = ["attempt"]

REFUSED = (ValueError, IndexError, RuntimeError, TypeError)
SPOILS = (
    "", "offset negative", "offset too large", "offset huge", "offsets fall", "offsets begin late", "offsets end early",
    "an offset more", "an offset less", "no offsets at all", "offsets of floats", "offsets of int16", "offsets 2-D",
    "offsets int32", "offsets strided", "offsets elsewhere", "id negative", "id too large", "id huge", "id smallest",
    "ids of floats", "ids of int16", "ids of bool", "ids 3-D", "ids of no dimension", "ids 2-D with offsets",
    "ids strided", "ids int32", "ids elsewhere", "ids empty", "a weight less", "weights of integers", "weights strided",
    "weights of bfloat16", "weights of float64", "weights elsewhere", "weights not wanted", "weights expanded",
)  # fmt: skip
PATHS = (
    "call", "no gradient", "eval", "staged", "background", "staged, spoilt when handed out", "staged, spoilt by numpy",
    "operator", "backward", "accumulate", "optimizer", "beside a stage",
)  # fmt: skip


@dataclass
class Lookup:
    """What is given to the tables."""

    ids: Tensor
    offsets: Tensor | None
    weights: Tensor | None


def draw_tables(random: np.random.Generator) -> tuple[list[TableConfig], dict[str, Any], dict[str, int]]:
    """Tables, other arguments, and the steps of features."""
    widths = [4, 8] if random.random() < 0.5 else [4]
    pooling = str(random.choice(["sum", "mean", "max"], p=[0.6, 0.2, 0.2]))
    tables = [
        TableConfig(
            name=f"t{n}", num_embeddings=int(random.integers(2, 40)), embedding_dim=int(random.choice(widths)),
            features=(f"a{n}", f"b{n}")[: int(random.integers(1, 3))], pooling=pooling,
            padding_idx=0 if random.random() < 0.2 else None,
        )
        for n in range(int(random.integers(1, 4)))
    ]  # fmt: skip
    last = bool(random.random() < 0.6)
    steps = {tables[0].features[0]: 4} if random.random() < 0.2 else {}
    return tables, {"include_last_offset": last, "optimizer": optim.Adagrad(lr=0.1)}, steps


def draw_lookup(random: np.random.Generator, tables: list[TableConfig], last: bool) -> Lookup:
    """A good one."""
    limits = [table.num_embeddings for table in tables for _ in table.features]
    batch, weighted = int(random.integers(1, 6)), all(table.pooling == "sum" for table in tables)
    if random.random() < 0.25:
        ids = np.stack([random.integers(limit, size=batch) for limit in limits], axis=1)
        return Lookup(torch.from_numpy(ids), None, None)
    lengths = random.integers(0, 4, batch * len(limits))
    parts = [random.integers(limits[bag % len(limits)], size=length) for bag, length in enumerate(lengths)]
    ids, offsets = np.concatenate(parts), np.concatenate([[0], np.cumsum(lengths)])
    weights = torch.rand(len(ids)) if weighted and random.random() < 0.5 else None
    return Lookup(torch.from_numpy(ids), torch.from_numpy(offsets if last else offsets[:-1]), weights)


def spoil(how: str, lookup: Lookup, random: np.random.Generator) -> Lookup:
    """The lookup with one thing wrong, or only unusual."""
    ids, offsets, weights = lookup.ids, lookup.offsets, lookup.weights
    what = how.split(" ")[0].rstrip("s")
    if how == "no offsets at all":
        return Lookup(ids, None if offsets is None else offsets[:0], weights)
    if what == "offset" or how in ("an offset more", "an offset less"):
        if offsets is None or not len(offsets):
            return lookup
        at = int(random.integers(len(offsets)))
        new = offsets.clone()
        if how in ("offset negative", "offset too large", "offset huge"):
            new[at] = {"n": -1, "t": len(ids) + 1, "h": 2**62}[how.split()[1][0]]
        elif how == "offsets fall":
            new = new.flip(0)
        elif how == "offsets begin late":
            new[0] = 1
        elif how == "offsets end early":
            new[-1] = max(0, int(new[-1]) - 1)
        elif how == "an offset more":
            new = torch.cat([new, new[-1:]])
        elif how == "an offset less":
            new = new[:-1]
        elif how == "offsets strided":
            new = torch.stack([new, new], dim=1)[:, 0]
        elif how == "offsets 2-D":
            new = new.view(1, -1)
        elif how == "offsets elsewhere":
            new = new.to("meta")
        else:
            new = new.to({"floats": torch.float32, "int16": torch.int16, "int32": torch.int32}[how.split()[-1]])
        return Lookup(ids, new, weights)
    if what == "id":
        at, new = int(random.integers(max(1, ids.numel()))), ids.clone()
        if how.startswith("id "):
            if not ids.numel():
                return lookup
            value = {"negative": -1, "large": 40, "huge": 2**40, "smallest": -(2**63)}[how.split()[-1]]
            new.view(-1)[at] = value
        elif how == "ids 3-D":
            new = new.view(1, 1, -1)
        elif how == "ids of no dimension":
            new = torch.tensor(1)
        elif how == "ids 2-D with offsets":
            new = new.view(1, -1)
        elif how == "ids strided":
            new = torch.stack([new, new], dim=-1)[..., 0]
        elif how == "ids elsewhere":
            new = new.to("meta")
        elif how == "ids empty":
            new = new[:0]
        else:
            kinds = {"floats": torch.float32, "int16": torch.int16, "bool": torch.bool, "int32": torch.int32}
            new = new.to(kinds[how.split()[-1]])
        return Lookup(new, offsets, weights)
    if how == "weights not wanted":
        return Lookup(ids, offsets, torch.ones(ids.numel()))
    if weights is None or not how:
        return lookup
    if how == "a weight less":
        return Lookup(ids, offsets, weights[:-1])
    if how == "weights strided":
        return Lookup(ids, offsets, torch.stack([weights, weights], dim=1)[:, 0])
    if how == "weights expanded":
        return Lookup(ids, offsets, torch.full((1,), 2.0).expand(len(ids)))
    if how == "weights elsewhere":
        return Lookup(ids, offsets, weights.to("meta"))
    kind = {"integers": torch.int64, "bfloat16": torch.bfloat16, "float64": torch.float64}[how.split()[-1]]
    return Lookup(ids, offsets, weights.to(kind))


def is_good(lookup: Lookup, tables: list[TableConfig], last: bool, steps: dict[str, int]) -> bool:
    """The definition, element by element."""
    ids, offsets, weights = lookup.ids, lookup.offsets, lookup.weights
    names = [(name, table) for table in tables for name in table.features]
    whole = (torch.int32, torch.int64)
    if (
        any(each is not None and each.device.type == "meta" for each in (ids, offsets, weights))
        or ids.dtype not in whole
    ):
        return False
    if offsets is None:
        if ids.dim() != 2 or ids.shape[1] != len(names):
            return False
        ends = list(range(ids.numel() + 1))
    else:
        if ids.dim() != 1 or offsets.dim() != 1 or offsets.dtype not in whole:
            return False
        ends = offsets.tolist() + ([] if last else [len(ids)])
        if not ends or (len(ends) - 1) % len(names) or ends[0] != 0 or ends[-1] != len(ids) or sorted(ends) != ends:
            return False
    if weights is not None and (
        weights.numel() != ids.numel() or not weights.is_floating_point() or any(t.pooling != "sum" for t in tables)
    ):
        return False
    flat = ids.reshape(-1).tolist()
    for bag, (begin, end) in enumerate(itertools.pairwise(ends)):
        name, table = names[bag % len(names)]
        if end - begin > steps.get(name, len(flat)):
            return False
        if not all(0 <= each < table.num_embeddings for each in flat[begin:end]):
            return False
    return True


def overwrite(target: Lookup, source: Lookup, *, numpy: bool) -> bool:
    """Give the tensors of ``target`` the contents of ``source`` in place; whether that can be done."""
    pairs = [(target.ids, source.ids), (target.offsets, source.offsets)]
    for mine, theirs in pairs:
        if (mine is None) != (theirs is None):
            return False
        if mine is None or theirs is None:
            continue
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype or theirs.device.type == "meta":
            return False
    if source.weights is not target.weights:
        return False
    for mine, theirs in pairs:
        if mine is not None and theirs is not None:
            if numpy:
                mine.numpy()[...] = theirs.numpy()
            else:
                mine.copy_(theirs)
    return True


def batch_of(lookup: Lookup) -> Batch:
    return Batch(dense=torch.zeros(1, 1), ids=lookup.ids, offsets=lookup.offsets, weights=lookup.weights)


def copy_of(lookup: Lookup) -> Lookup:
    return Lookup(*(None if each is None else each.clone() for each in (lookup.ids, lookup.offsets, lookup.weights)))  # type: ignore[arg-type]


def go(path: str, tables: EmbeddingTables, good: Lookup, bad: Lookup) -> tuple[Tensor | None, bool]:
    """Take ``bad`` through a path: its output, and whether that must be right."""
    weights = bad.weights
    if weights is not None and weights.is_floating_point() and path in ("call", "staged", "operator"):
        weights = weights.detach().requires_grad_()
    if path in ("staged", "background"):
        stream = [batch_of(copy_of(good)), batch_of(bad), batch_of(copy_of(good))]
        found = []
        for batch in stage(stream, tables, lookahead=2, background=path == "background"):
            found.append(tables(batch.ids, batch.offsets, batch.weights))
            found[-1].sum().backward()
        return found[1], True
    if path.startswith("staged, spoilt"):
        mine = copy_of(good)
        for batch in stage([batch_of(mine)], tables, lookahead=2):
            if not overwrite(mine, bad, numpy=path.endswith("numpy")):
                return None, False
            out = tables(batch.ids, batch.offsets, batch.weights)
            out.sum().backward()
            return out, True
    if path in ("backward", "accumulate", "optimizer"):
        mine, rows = copy_of(good), tables.as_optimizer() if path == "optimizer" else None
        if path == "accumulate":
            with tables.accumulate():
                tables(mine.ids, mine.offsets, mine.weights).sum().backward()
                overwrite(mine, bad, numpy=True)
            return None, False
        out = tables(mine.ids, mine.offsets, mine.weights)
        if rows is not None:
            out.sum().backward()
        overwrite(mine, bad, numpy=True)
        if rows is not None:
            rows.step()
            rows.zero_grad()
        else:
            out.sum().backward()
        return None, False
    if path == "operator":  # what compiled code calls
        found = torch.ops.stoker.look_up(tables.handle, bad.ids, bad.offsets, weights, tables.number, True)[0]
        found.sum().backward()
        return found, True
    if path == "no gradient":
        with torch.no_grad():
            return tables(bad.ids, bad.offsets, bad.weights), True
    if path == "eval":
        return tables.eval()(bad.ids, bad.offsets, bad.weights), True
    if path == "beside a stage":
        for _ in stage([batch_of(copy_of(good)) for _ in range(3)], tables, lookahead=1):
            out = tables(bad.ids, bad.offsets, bad.weights)
        return out, True
    out = tables(bad.ids, bad.offsets, weights)
    out.sum().backward()
    return out, True


def attempt(seed: int) -> str:
    """What is wrong with how the lookup of a seed was treated; nothing if it was treated well."""
    random = np.random.default_rng(seed)
    configs, options, steps = draw_tables(random)
    last = options["include_last_offset"]
    good = draw_lookup(random, configs, last)
    how, path = str(random.choice(SPOILS)), str(random.choice(PATHS))
    bad = spoil(how, good, random)
    backend = str(random.choice(["auto", "reference"]))
    placements = [
        None,
        Cached(slots=24),
        Cached(slots=80),
        Cached(slots=24, home="file"),
        HotCold(hot={"t0": 1}, slots=24),
    ]
    placement: Any = placements[int(random.integers(len(placements)))]
    title = f"{how or 'nothing wrong'}, {path}, {backend}, {placement}"
    fine = is_good(bad, configs, last, steps)
    if path == "operator" and how.endswith("elsewhere"):  # where torch asks for shapes alone
        return ""

    def made(placement: Any) -> EmbeddingTables:
        return EmbeddingTables(configs, placement=placement, backend=backend, steps=steps, **options)  # type: ignore[arg-type]

    tables = made(placement)
    before = [tables.rows(table.name) for table in configs]
    out, counts, error = None, False, None
    try:
        out, counts = go(path, tables, copy_of(good), bad)
    except REFUSED as refused:
        error = refused
    if error is not None:
        if (
            isinstance(error, RuntimeError | TypeError)
            and path not in ("backward", "operator")
            and "elsewhere" not in how
        ):
            return f"{title}: {type(error).__name__}: {error}"
        if fine and path not in ("backward",) and "weights of" not in how:
            return f"{title}: refused though good: {type(error).__name__}: {error}"
        if len(str(error)) < 20:
            return f"{title}: the error says nothing: {error!r}"
        kept = all(torch.equal(tables.rows(t.name), rows) for t, rows in zip(configs, before, strict=True))
        if path in ("call", "no gradient", "eval", "operator") and not kept:
            return f"{title}: rows changed though it was refused"
    elif counts and not fine:
        return f"{title}: not refused"
    elif counts and out is not None and path not in ("staged", "background"):
        expected = made(None)(bad.ids, bad.offsets, bad.weights)
        if not torch.equal(out.detach(), expected.detach()):
            return f"{title}: {out} instead of {expected}"
    tables.train()
    tables(good.ids, good.offsets, good.weights).sum().backward()  # they go on working
    tables.close()
    return ""


def main() -> None:
    first, last = map(int, sys.argv[1].split(":"))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for seed in range(first, last):
        print(seed, flush=True)
        if found := attempt(seed):
            sys.exit(f"seed {seed}: {found}")


if __name__ == "__main__":
    main()
