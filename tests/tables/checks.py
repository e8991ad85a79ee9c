"""The check of one random program, by its seed: for the tests, and for `make soak`."""

from __future__ import annotations

from dataclasses import replace

import simulated
from placed import Case, bag_run, difference, draw, placed_run, resident_run

from stoker.tables.links.cuda_link import CudaLink

__all__ = ["check", "program"]

#: What a placed run is compared with, by the seed: a resident run, for both back ends; bags of plain PyTorch, on
#: integers; or a resident run again, with the placed one on a simulated GPU.
KINDS = ("reference", "auto", "bags", "GPU")


def kind_of(seed: int) -> str:
    return KINDS[seed % len(KINDS)]


def program(seed: int) -> Case:
    """What is run."""
    kind = kind_of(seed)
    if kind == "GPU":
        case = simulated.draw_case(seed)
        return replace(case, background=True, staged=True) if threaded(seed) else case
    return draw(seed, backend="auto" if kind == "auto" else "reference", integers=kind == "bags")


def threaded(seed: int) -> bool:
    """Whether threads of their own stage and write back; on a simulated GPU most runs have one thread."""
    return seed // len(KINDS) % 8 == 0


def check(seed: int) -> str:
    """The first thing in which the program of a seed shows that rows are placed; nothing if it does not."""
    case = program(seed)
    kind = kind_of(seed)
    if kind == "bags":
        return difference(bag_run(case), placed_run(case), by="kind")
    if kind == "GPU":
        link = CudaLink if threaded(seed) else simulated.SimulatedLink
        return difference(resident_run(case, simulated.log_outputs), simulated.run(case, kind=link))
    return difference(resident_run(case), placed_run(case))
