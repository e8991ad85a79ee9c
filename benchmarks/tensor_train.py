"""Tensor-train tables against their published size, the straightforward lookup, and tensorly-torch.

Every process starts from the same cores for its shape, looks up and takes one SGD step; rows and cores are compared
with autograd of the definition in float64 before anything is timed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from benchmarks.harness import Bar, NotRun, Outcome, Run, Table, WrongResult
from benchmarks.peers.tt_tools import left_by
from benchmarks.rounds import Contestant, Timings, compare, peer_python, play
from benchmarks.tensor_train_workload import (
    BATCH,
    PUBLISHED_COLS,
    UNSTRETCHED,
    Case,
    check,
    equal_rows,
    ids_file,
)
from benchmarks.workload import KAGGLE
from stoker.ops.tt.shape import TTShape, factorize

__all__ = ["bars", "footprint"]

RANK = 128  # of the published footprints
LARGE = 1_000_000  # tables with more rows are compressed
MB = 1e6
#: Avazu's 20 columns without id, click, hour and C1, as distinct values of the whole public log are commonly given
AVAZU = (
    7, 4737, 7745, 26, 8552, 559, 36, 2686408, 6729486, 8251, 5, 4, 2626, 8, 9, 435, 4, 68, 172, 60,
)  # fmt: skip
#: MLPerf's DLRM tables, ids modulo 40 M
TERABYTE = (
    40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10, 2209, 11938, 155, 4, 976,
    14, 40000000, 40000000, 40000000, 590152, 12973, 108, 36,
)  # fmt: skip
PUBLISHED = {"Kaggle": 258.2, "Avazu": 87.6, "Terabyte": 797.9, "Terabyte, 242.5 M": 797.9}  # MB, EL-Rec's Table III
AIMS = {"Kaggle": 147.7, "Avazu": 45.5}  # MiB
SETS = {"Kaggle": (KAGGLE, 16), "Avazu": (AVAZU, 16), "Terabyte": (TERABYTE, 64)}
#: EL-Rec's Table II has 242.5 M rows and no sizes: MLPerf's, larger in proportion
SETS["Terabyte, 242.5 M"] = (tuple(round(rows * 242.5e6 / sum(TERABYTE)) for rows in TERABYTE), 64)

OURS = "stoker"
GROUPED = "grouped by shared slices"
SKEWED = (2_500_000, 5_000_000, 10_000_000)


def footprint(tables: Sequence[int], dim: int, shape_of: Callable[[int, int, int], TTShape]) -> int:
    """Bytes in float32 with tables of over ``LARGE`` rows as tensor trains."""
    return 4 * sum(shape_of(rows, dim, RANK).num_parameters if rows > LARGE else rows * dim for rows in tables)


def published_shape(rows: int, dim: int, rank: int) -> TTShape:
    """Equal row factors, [2, 2, 4] or [4, 4, 4] columns."""
    return TTShape(equal_rows(rows), PUBLISHED_COLS[dim], (rank, rank))


def printed_shape(rows: int, dim: int, rank: int) -> TTShape:
    """The same with the columns that EL-Rec prints for D 16, [2, 4, 2]."""
    return TTShape(equal_rows(rows), (2, 4, 2) if dim == 16 else PUBLISHED_COLS[dim], (rank, rank))


def measure_footprint(run: Run) -> Outcome:
    """Bytes of all tables at rank 128 against EL-Rec's; the worst data set."""
    rows, values, data = [], [], {}
    for name, (tables, dim) in SETS.items():
        for size in (size for size in tables if size > LARGE):
            shape = factorize(size, dim, RANK)
            if shape.capacity < size or shape.dim != dim or min(shape.ranks) < RANK:
                raise WrongResult(f"{name}: {shape} does not hold {size:,} x {dim} at rank {RANK}")
        ours = footprint(tables, dim, factorize)
        equal, printed = (footprint(tables, dim, shape_of) for shape_of in (published_shape, printed_shape))
        dense = 4 * sum(tables) * dim
        values.append(ours / MB / PUBLISHED[name])
        aim = AIMS.get(name)
        small = 4 * dim * sum(size for size in tables if size <= LARGE)
        rows.append(
            [
                name,
                f"{dense / MB:,.1f}",
                f"{ours / MB:.1f} ({ours / 2**20:.1f} MiB)",
                f"{small / MB:.1f}",
                f"{PUBLISHED[name]:.1f}",
                f"{values[-1]:.3f}",
                "" if aim is None else f"{aim:.1f} MiB",
                f"{equal / MB:.1f} ({equal / 2**20:.1f} MiB)",
                f"{printed / MB:.1f}",
                f"{dense / ours:.1f}",
            ]
        )
        data[name] = {"ours": ours, "dense": dense, "equal": equal, "printed": printed, "published_mb": PUBLISHED[name]}
    table = Table(
        title=f"Tables of over {LARGE:,} rows as tensor trains of rank {RANK}, the others dense; float32, MB",
        columns=[
            "data", "dense", "ours", "of it dense", "EL-Rec", "ours / EL-Rec", "aim",
            "equal rows, [2,2,4] or [4,4,4]", "as printed, [2,4,2]", "smaller than dense",
        ],
        rows=rows,
    )  # fmt: skip
    notes = [
        "Kaggle: all ids kept (33.8 M rows; EL-Rec prints 30.8 M rows)",
        "Terabyte: MLPerf's tables (ids modulo 40 M), and in proportion for the 242.5 M rows that EL-Rec prints",
        f"Avazu: EL-Rec prints 8.9 M rows in 20 tables and not which; here {sum(AVAZU):,} rows, the columns' "
        "commonly given sizes with device_ip 6.7 M and device_id 2.7 M, so more than there",
        "a smaller table has fewer parameters to learn with: the accuracy bars tell what that costs",
    ]
    return Outcome(value=max(values), tables=[table], notes=notes, data=data)


def cases(run: Run) -> list[Case]:
    """Both ranks and widths; the articles' skew for all sizes, the readers', which is nearly flat, for one."""
    sizes = SKEWED[1:2] if run.quick else SKEWED
    made = [Case(rows=rows, dim=dim, rank=rank) for rows in sizes for dim in (16, 64) for rank in (64, 128)]
    return made + [Case(rows=SKEWED[1], dim=dim, rank=rank, of="user") for dim in (16, 64) for rank in (64, 128)]


def contestants() -> list[Contestant]:
    """Ours; the straightforward form twice, each in both shapes; tensorly-torch in both."""
    made = [Contestant(label=OURS, script="stoker_tt.py", options={"shape": "ours"})]
    for shape, title in (("published", "EL-Rec's shape"), ("ours", "our shape")):
        made += [
            Contestant(label=f"plain {form}, {title}", script="torch_tt.py", options={"form": form, "shape": shape})
            for form in ("bmm", "einsum")
        ]
        grouped = {"form": "grouped", "shape": shape}
        made.append(Contestant(label=f"{GROUPED}, {title}", script="torch_tt.py", options=grouped))
        made.append(
            Contestant(
                label=f"tltorch, {title}", script="tltorch_tt.py", environment="tltorch", options={"shape": shape}
            )
        )
    return made


@cache
def _played(run: Run, grouped: bool) -> tuple[Timings, list[Case], list[Contestant], list[str]]:
    """Time ours against grouped products, or against the others, which two bars share."""
    chosen, notes = cases(run), []
    players = [each for each in contestants() if each.label == OURS or each.label.startswith(GROUPED) == grouped]
    try:
        if not grouped:
            peer_python("tltorch")
    except NotRun as missing:
        players = [player for player in players if player.environment is None]
        notes.append(f"tltorch was not compared: {missing}")
    by_name = {case.name: case for case in chosen}
    shape_of = {player.label: player.options["shape"] for player in players}

    def looked_at(label: str, line: dict[str, Any], results: Path) -> None:
        name, what = line["case"].rsplit(", ", 1)
        if what == "lookup":  # one file has what both left
            check(label, by_name[name], shape_of[label], run, results / left_by(name))

    config = {"cases": [case.config(run) for case in chosen]}
    return play(players, config, run, looked_at), chosen, players, notes


def _limits(timings: Timings) -> Table:
    """How near the grouped products are to one large product on this machine."""
    said = timings.extra[OURS]
    peak = max(line["flops"] for line in said if line["case"] == "gemm")
    rows = []
    for name in dict.fromkeys(line["case"] for line in said if line["case"] != "gemm"):
        lines = [line for line in said if line["case"] == name]
        first = lines[0]
        trie, expand, back = (statistics.median(line[key] for line in lines) for key in ("trie", "expand", "gradients"))
        flop = first["flop"]
        rows.append(
            [
                name,
                " / ".join(map(str, first["nodes"])),
                " / ".join(map(str, first["slices"])),
                f"{flop / 1e6:.0f}",
                f"{trie * 1e3:.2f}",
                f"{expand * 1e3:.2f}",
                f"{flop / expand / peak:.0%}",
                f"{back * 1e3:.2f}",
                f"{2 * flop / back / peak:.0%}",
            ]
        )
    return Table(
        title=f"Grouped products alone, against {peak / 1e9:.0f} GFLOP/s of one torch.mm of 2048 x 2048 x 2048",
        columns=["case", "nodes", "slices", "MFLOP", "trie ms", "expand ms", "of GEMM", "gradients ms", "of GEMM"],
        rows=rows,
    )


def measure_speed(what: str, run: Run) -> Outcome:
    """The smallest ratio over all cases to the fastest of the others."""
    timings, chosen, players, notes = _played(run, grouped=False)
    wanted = {f"{case.name}, {what}": BATCH for case in chosen}
    title = {
        "lookup": f"Lookup of {BATCH} ids, no graph",
        "backward": f"Backward and SGD update of {BATCH} ids, without the forward",
    }[what]
    peers = [player.label for player in players if player.label != OURS]
    value, table, ratios = compare(timings, OURS, peers, wanted, title)
    groups = {
        "straightforward, EL-Rec's shape": [p for p in peers if p.startswith("plain") and p.endswith("EL-Rec's shape")],
        "straightforward, our shape": [p for p in peers if p.startswith("plain") and p.endswith("our shape")],
        "tltorch": [p for p in peers if p.startswith("tltorch")],
    }
    notes = [
        "checked: rows of the first batch and the change of all cores by its SGD step equal autograd of the definition "
        "in float64 within float32 rounding, in every process",
        "ids: Globo's articles (readers where it says user), counts in falling order stretched to the rows",
        *(
            f"smallest ratio, {group}: {compare(timings, OURS, labels, wanted, title)[0]:.2f}"
            for group, labels in groups.items()
            if labels
        ),
        *notes,
    ]
    tables = [table, *([_limits(timings)] if what == "lookup" else [])]
    data = {"seconds": timings.seconds, "ratios": ratios, "versions": timings.versions, "extra": timings.extra[OURS]}
    return Outcome(value=value, tables=tables, notes=notes, data=data)


def measure_grouped(run: Run) -> Outcome:
    """The smallest ratio over all cases, lookup and backward, to grouped products in plain PyTorch."""
    timings, chosen, players, _ = _played(run, grouped=True)
    wanted = {f"{case.name}, {what}": BATCH for case in chosen for what in ("lookup", "backward")}
    labels = [player.label for player in players if player.label.startswith(GROUPED)]
    value, table, ratios = compare(timings, OURS, labels, wanted, "Against grouped products in plain PyTorch")
    notes = [
        "one product for all distinct prefixes that share a slice; the faster of both shapes; checked as tt-lookup"
    ]
    data = {"seconds": timings.seconds, "ratios": ratios, "versions": timings.versions}
    return Outcome(value=value, tables=[table], notes=notes, data=data)


#: Globo's skew stretched to all rows, and as it is, on the most popular ones
ABLATED = tuple(Case(rows=5_000_000, dim=64, rank=64, of=of) for of in ("article", "article" + UNSTRETCHED))
VARIANTS: dict[str, dict[str, bool]] = {
    "full": {},
    "without gradient aggregation": {"aggregate": False},
    "without prefix reuse": {"reuse": False},
    "without distinct rows": {"distinct": False},
    "without frequency order": {"permuted": True},
    "without all four": {"aggregate": False, "reuse": False, "distinct": False, "permuted": True},
}
STRAIGHT = "nor grouped products: bmm an id, autograd"


def measure_ablation(run: Run) -> Outcome:
    """What each part is worth: a step without it, over the full one (EL-Rec's Figure 14)."""
    players = [
        Contestant(label=label, script="stoker_tt_parts.py", options={"shape": "ours", "parts": parts})
        for label, parts in VARIANTS.items()
    ]
    players.append(
        Contestant(label=STRAIGHT, script="torch_tt.py", options={"form": "bmm", "shape": "ours", "permuted_ids": True})
    )
    permuted = {label: bool(parts.get("permuted")) for label, parts in VARIANTS.items()} | {STRAIGHT: True}
    by_name = {case.name: case for case in ABLATED}

    def looked_at(label: str, line: dict[str, Any], results: Path) -> None:
        name, what = line["case"].rsplit(", ", 1)
        if what == "lookup":
            check(label, by_name[name], "ours", run, results / left_by(name), permuted=permuted[label])

    config = {
        "cases": [
            {**case.config(run), "permuted": str(ids_file(case.of, case.rows, run, permuted=True))} for case in ABLATED
        ]
    }
    timings = play(players, config, run, looked_at)
    tables, gains, over = [], [], {}
    for case in ABLATED:
        lookup, back = (f"{case.name}, {what}" for what in ("lookup", "backward"))
        steps = {
            player.label: [
                a + b for a, b in zip(*(timings.seconds[player.label][w] for w in (lookup, back)), strict=True)
            ]
            for player in players
        }
        rows = []
        for label, own in steps.items():
            pairs = [mine / full for mine, full in zip(own, steps["full"], strict=True)]
            over[f"{case.name}, {label}"] = statistics.median(pairs)
            cells = [f"{timings.median(label, what) * 1e3:.2f}" for what in (lookup, back)]
            rows.append([label, *cells, f"{statistics.median(pairs):.2f} ({min(pairs):.2f}-{max(pairs):.2f})"])
        gains.append(over[f"{case.name}, {STRAIGHT}"])
        tables.append(
            Table(
                title=f"{case.name}: lookup, and backward with SGD, of {BATCH} ids",
                columns=["", "lookup ms", "backward + update ms", "over the full one (min-max)"],
                rows=rows,
            )
        )
    notes = [
        "variants are built from public operations in the benchmark; all but the last use the same grouped products",
        f"{UNSTRETCHED[1:]}: Globo's counts as they are; else stretched, so that few rows of a batch repeat",
        "checked as the other bars; without frequency order the ids are renamed at random",
    ]
    data = {"seconds": timings.seconds, "over_full": over, "versions": timings.versions}
    return Outcome(value=min(gains), tables=tables, notes=notes, data=data)


def bars() -> list[Bar]:
    """Size, speed, and what the parts are worth."""
    group = "tensor-train"
    return [
        Bar(
            name="tt-footprint",
            group=group,
            title="bytes of tensor-train tables of rank 128 over EL-Rec's published ones, the worst of three data sets",
            must=1.0,
            at_most=True,
            run=measure_footprint,
        ),
        Bar(
            name="tt-lookup",
            group=group,
            title="tensor-train lookup against the straightforward one and tensorly-torch",
            must=4.0,
            aim=10.0,
            run=partial(measure_speed, "lookup"),
        ),
        Bar(
            name="tt-backward",
            group=group,
            title="tensor-train backward and update against the straightforward ones and tensorly-torch",
            must=3.0,
            aim=8.0,
            run=partial(measure_speed, "backward"),
        ),
        Bar(
            name="tt-vs-grouped",
            group=group,
            title="tensor-train lookup and backward against grouped products in plain PyTorch, the worst case",
            must=1.5,
            aim=2.0,
            rounds=3,
            run=measure_grouped,
        ),
        Bar(
            name="tt-ablation",
            group=group,
            title="the straightforward step over ours, and ours without each of its parts (reported)",
            must=1.0,
            run=measure_ablation,
        ),
    ]
