"""``stoker.trace``: measure the stages of the steps of a run, as a table and as a timeline of all threads.

The timeline is a Chrome trace (https://ui.perfetto.dev opens it). Steps of the run are replayed with its placement. The
run directory is only read.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import KW_ONLY, asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from stoker.base.errors import ConfigError, errors_as
from stoker.base.files import atomic_file
from stoker.base.picture import Grid, Shown
from stoker.base.settings import with_arguments_of
from stoker.base.timeline import Recorder, Span, span
from stoker.base.units import format_count, format_duration
from stoker.dataset.batch import Batch
from stoker.optim import Constant
from stoker.training.placing import STAGES, iterate, place_run, slotted
from stoker.training.replica import Rerun, SectionArguments, find_section, process_settings
from stoker.training.settings import RECORDED

_WARM = 5  # steps before the recording, in which kernels compile and batches are staged
_STAGING = "stoker-stage"  # name of the thread for which training waits


@dataclass(frozen=True, kw_only=True)
class StageTime:
    """One stage of all recorded steps."""

    name: str  # one of STAGES, or a span of the model
    seconds: float  # in all threads, without stages inside it
    share: float  # of the elapsed time; with other threads the sum of all stages exceeds 1
    stall_seconds: float  # time that training waited for rows or batches during this stage
    count: int


@dataclass(frozen=True, kw_only=True, repr=False)
class Trace(Shown):
    """What :func:`trace` measured."""

    run: Path
    checkpoint: Path | None  # first state; None: the start of the run
    begin: int  # first recorded step, counted from 0
    steps: int  # recorded steps
    seconds: float  # elapsed time
    examples: int
    stall_seconds: float  # time that training waited for rows or batches
    stages: tuple[StageTime, ...]  # in the order of STAGES
    spans: tuple[Span, ...]
    threads: tuple[str, ...]  # names, by Span.thread
    out: Path | None  # the file of the timeline

    def summary(self) -> str:
        """Return the time of a step, and the share of it in which training waited."""
        return (
            f"steps {self.begin:,} to {self.begin + self.steps - 1:,}, {format_duration(self.seconds / self.steps)} "
            f"each, {format_count(self.examples / self.seconds)} samples/s; training waited "
            f"{self.stall_seconds / self.seconds:.1%} of the time"
        )

    def grids(self) -> tuple[Grid]:
        """Return a table with a line for each stage."""
        rows = [
            [
                stage.name, f"{stage.seconds:.3f}", f"{stage.share:.1%}",
                f"{stage.stall_seconds:.3f} s" if stage.stall_seconds else "-", STAGES.get(stage.name, ""),
            ]
            for stage in self.stages
        ]  # fmt: skip
        return (Grid(["stage", "seconds", "share", "training waited", "what"], rows, left=(0, 4)),)

    def to_dict(self) -> dict[str, Any]:
        """Return the measurements as plain values for JSON, without the spans."""
        paths = {"run": str(self.run), "checkpoint": self.checkpoint and str(self.checkpoint)}
        values = {name: getattr(self, name) for name in ("begin", "steps", "seconds", "examples", "stall_seconds")}
        stages = {stage.name: {k: v for k, v in asdict(stage).items() if k != "name"} for stage in self.stages}
        return {**paths, **values, "stages": stages, "out": self.out and str(self.out)}


@dataclass(frozen=True)
class TraceArguments(SectionArguments):
    """The arguments of :func:`trace`."""

    _: KW_ONLY
    steps: int = RECORDED
    out: str | Path | None = None


@with_arguments_of(TraceArguments)
def trace(run: str | Path, **given: Any) -> Trace:
    """Replay steps of a run and record what each thread does.

    The first steps are not recorded. On a GPU each stage of training ends with a synchronisation, so that its time is
    measured alone. A step therefore takes longer than in training.

    Args:
        run: the run directory.
        steps: steps to record; fewer if the run has fewer.
        out: file for the timeline, in the trace-event format of Chrome. An existing file is replaced.
        begin: a step with a checkpoint, or "start". None takes the newest whole checkpoint with that many steps before
            it, else the start.
        data: the dataset; None means that of the run.
        progress: called with (what, done, total).
        settings: ``device_memory``, ``host_memory``, ``home_path``, ``strategy``, ``lookahead``, ``epoch_lookahead``,
            ``in_flight``, ``spill``, ``device``, ``backend`` or ``threads`` in place of those of the run.

    Raises:
        ConfigError: no run there, ``steps`` below 1, ``out`` cannot be written, or a budget that cannot work.
        CheckpointError: no whole checkpoint at ``begin``.

    >>> from stoker.testing import make_dataset
    >>> result = stoker.train(make_dataset("data", rows=1000), out="run", batch_size=64, steps=10, display="quiet")
    >>> found = stoker.trace("run", steps=2, out="timeline.json")
    >>> found
    <Trace: steps ... to ..., ... each, ... samples/s; training waited ... of the time>
    >>> [stage.name for stage in found.stages][:3]
    ['read', 'forward', 'lookup']
    """
    asked = TraceArguments(run, **given)
    steps, out, progress = asked.steps, asked.out, asked.progress
    if steps < 1:
        raise ConfigError(f"steps is {steps}; give at least 1.")
    if out is not None:
        _check_writable(Path(out))
    section = find_section(run, steps=steps + _WARM, begin=asked.begin, data=asked.data, settings=given)
    warm = min(_WARM, section.steps - 1)
    recorded = min(steps, section.steps - warm)
    recorder = Recorder()
    examples = 0
    with process_settings(section.config):
        placement = place_run(section.config, section.data, section.config.make_row_optimizer(Constant()))
        with (
            closing(Rerun(section, placement, wait=True, endless=True)) as rerun,
            closing((iterate if slotted(rerun.model) else _waited_for)(rerun.feed)) as batches,
        ):
            for _ in range(warm):
                rerun.step(next(batches))
            start = time.perf_counter_ns()
            with recorder:
                for number in range(recorded):
                    with span("step", section.begin + warm + number):
                        batch = next(batches)
                        rerun.step(batch)
                    examples += len(batch)
                    if progress is not None:
                        progress("steps", number + 1, recorded)
                end = time.perf_counter_ns()
    main = next(one.thread for one in recorder.spans if one.name == "step")
    spans = tuple(one for one in recorder.spans if one.start >= start and one.end <= end)
    if out is not None:
        with atomic_file(Path(out)) as file:
            file.write(json.dumps(chrome_events(spans, recorder.threads, start)).encode())
    stages, stalled = stage_times(spans, recorder.threads, main, end - start)
    return Trace(
        run=section.run.path, checkpoint=section.checkpoint, begin=section.begin + warm, steps=recorded,
        seconds=(end - start) / 1e9, examples=examples, stall_seconds=stalled, stages=stages, spans=spans,
        threads=tuple(recorder.threads), out=None if out is None else Path(out),
    )  # fmt: skip


def _check_writable(out: Path) -> None:
    """Check, before the steps, that the timeline can be written."""
    there = out.exists()
    with errors_as(ConfigError, f"{out} cannot be written", "Choose another file with --out."):
        with out.open("ab"):
            pass
        if not there:
            out.unlink()


def _waited_for(batches: Iterable[Batch]) -> Generator[Batch, None, None]:
    """Yield batches that are not staged, so that training waits for each one."""
    source = iter(batches)
    while True:
        with span("stall"), span("read"):
            batch = next(source, None)
        if batch is None:
            return
        yield batch


def chrome_events(spans: Sequence[Span], threads: Sequence[str], start: int) -> dict[str, Any]:
    """Return the timeline in the trace-event format of Chrome, in microseconds since ``start`` (nanoseconds)."""

    def named(kind: str, thread: int, name: str) -> dict[str, Any]:
        return {"ph": "M", "name": kind, "pid": 1, "tid": thread, "args": {"name": name}}

    events = [named("process_name", 0, "stoker")]
    events += [
        named("thread_name", number, "training" if name == "MainThread" else name)
        for number, name in enumerate(threads)
    ]
    for one in sorted(spans, key=lambda one: (one.start, -one.end)):
        event: dict[str, Any] = {
            "ph": "X", "name": one.name, "cat": "stoker", "pid": 1, "tid": one.thread,
            "ts": (one.start - start) / 1000, "dur": (one.end - one.start) / 1000,
        }  # fmt: skip
        if one.step is not None:
            event["args"] = {"step": one.step}
        events.append(event)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


class _Slice(NamedTuple):
    """A time in which a thread was in a span, and in no span inside it."""

    name: str
    start: int
    end: int
    waiting: bool  # inside a stall


def _slices(spans: Iterable[Span]) -> Iterator[_Slice]:
    """Cut the spans of one thread into slices that do not overlap, in order of time."""
    timed = [one for one in spans if one.end > one.start]
    # At equal times, ends are before begins, and the longest begins first, because it contains the others.
    edges = [((one.end, 0, 0), one) for one in timed] + [((one.start, 1, -one.end), one) for one in timed]
    stack: list[Span] = []
    last = 0
    for (moment, begins, _), one in sorted(edges, key=lambda edge: edge[0]):
        if stack and moment > last:
            yield _Slice(stack[-1].name, last, moment, any(each.name == "stall" for each in stack))
        last = moment
        if begins:
            stack.append(one)
        else:
            stack.remove(one)


def stage_times(
    spans: Sequence[Span], threads: Sequence[str], main: int, wall: int
) -> tuple[tuple[StageTime, ...], float]:
    """Return the times of the stages, and the seconds that training waited.

    During a stall, training (thread ``main``) waits for its own work inside the stall, or for the work of the staging
    thread at that time. ``wall`` is the elapsed time in nanoseconds.
    """
    slices = {thread: list(_slices(one for one in spans if one.thread == thread)) for thread in range(len(threads))}
    seconds: dict[str, int] = defaultdict(int)
    stalls: dict[str, int] = defaultdict(int)
    for each in (each for found in slices.values() for each in found):
        seconds[each.name] += each.end - each.start
    staging = sorted(
        (each for thread, found in slices.items() if threads[thread] == _STAGING for each in found),
        key=lambda each: each.start,
    )
    at = 0
    for each in slices[main]:
        if not each.waiting:
            continue
        left = each.end - each.start
        if each.name == "stall":
            while at < len(staging) and staging[at].end <= each.start:
                at += 1
            for other in staging[at:]:
                if other.start >= each.end:
                    break
                both = min(each.end, other.end) - max(each.start, other.start)
                stalls[other.name] += both
                left -= both
        stalls[each.name] += left
    counts = Counter(one.name for one in spans)
    stages = tuple(
        StageTime(
            name=name, seconds=seconds[name] / 1e9, share=seconds[name] / wall, stall_seconds=stalls[name] / 1e9,
            count=counts[name],
        )
        for name in (*STAGES, *sorted(counts.keys() - STAGES))
        if counts[name]
    )  # fmt: skip
    return stages, sum(stalls.values()) / 1e9
