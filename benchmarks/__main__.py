"""The command line: list the bars, run some, write results."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import (
    accuracy,
    classify,
    defaults,
    dlrm_step,
    embedding,
    every_day,
    extreme_batches,
    features,
    first_result,
    formats,
    gradient_share,
    growing,
    hot_cold,
    list_loss,
    loading,
    lookahead,
    memory_curve,
    placed,
    planner,
    planning,
    popularity,
    prepare,
    ranks,
    reader,
    reorder,
    schedule,
    serving,
    serving_peers,
    sessions,
    tensor_train,
    tensor_train_accuracy,
    tensor_train_mix,
    tensor_train_step,
)
from benchmarks.harness import Bar, Result, Run, exit_code, judge, report, write_results
from benchmarks.machine import describe

__all__ = ["all_bars", "main"]


def all_bars() -> list[Bar]:
    """Every bar, in the order they are listed and run."""
    modules = (
        embedding,
        dlrm_step,
        reader,
        loading,
        prepare,
        formats,
        features,
        first_result,
        gradient_share,
        accuracy,
        defaults,
        lookahead,
        placed,
        memory_curve,
        planner,
        planning,
        popularity,
        hot_cold,
        classify,
        reorder,
        sessions,
        schedule,
        tensor_train,
        tensor_train_accuracy,
        tensor_train_step,
        tensor_train_mix,
        extreme_batches,
        every_day,
        serving,
        serving_peers,
        growing,
        list_loss,
        ranks,
    )
    return [bar for module in modules for bar in module.bars()]


def _chosen(names: Sequence[str], known: Sequence[Bar]) -> list[Bar]:
    """Bars by name, or by the name of their group."""
    chosen: list[Bar] = []
    for name in names:
        found = [bar for bar in known if name in (bar.name, bar.group)]
        if not found:
            raise SystemExit(f"bar {name!r} is unknown. Run python -m benchmarks for the list.")
        chosen += [bar for bar in found if bar not in chosen]
    return chosen


def _list(known: Sequence[Bar]) -> None:
    width = max(len(bar.name) for bar in known)
    for bar in known:
        aim = "" if bar.aim is None else f", aim {bar.aim:g}{bar.unit}"
        print(f"{bar.name:<{width}}  {bar.title} (must {bar.requirement}{aim})")
    groups = dict.fromkeys(bar.group for bar in known)
    print(f"\npython -m benchmarks NAME [--quick]; groups: {', '.join(groups)}")


def main(arguments: Sequence[str] | None = None, known: Sequence[Bar] | None = None) -> int:
    """Run and return the exit code: 0 no regression, 1 a regression, 2 a bar did not run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Side-by-side measurements.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="bars or groups; none lists them")
    parser.add_argument("--quick", action="store_true", help="an answer in under a minute a bar")
    parser.add_argument("--all", action="store_true", help="run every bar")
    parser.add_argument("--rounds", type=int, help="interleaved rounds (3 to 5, quick 2)")
    parser.add_argument("--out", type=Path, help="directory for <bar>_<machine>_<time>.md and .json")
    options = parser.parse_args(arguments)
    known = all_bars() if known is None else known
    if not options.all and not options.names:
        _list(known)
        return 0
    machine = describe()
    print(f"{machine['CPU']}, {machine['cores']} cores, {machine['memory']}", flush=True)
    results: list[Result] = []
    for bar in known if options.all else _chosen(options.names, known):
        print(f"\n{bar.name}: {bar.title}", flush=True)
        result = judge(bar, Run.of(quick=options.quick, rounds=options.rounds, full_rounds=bar.rounds))
        results.append(result)
        print(f"\n{report(result)}\n", flush=True)
        if options.out is not None:
            print(f"wrote {write_results([result], options.out, bar.name, machine, quick=options.quick)}")
        if len(results) > 1 or options.all:
            print(result.line, flush=True)
    print("\n".join(result.line for result in results), flush=True)
    return exit_code(results)


if __name__ == "__main__":
    sys.exit(main())
