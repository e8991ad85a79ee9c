"""First pass: read raw files into typed parts, in parallel, resumable; record every bad line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from stoker.base.errors import DataError
from stoker.dataset.rebuild import UnusableInput
from stoker.prep.parse.frames import Block
from stoker.prep.parse.ingest import Source
from stoker.prep.parse.quarantine import BadLineLimit, write_bad_lines
from stoker.prep.parse.sources import FRAME
from stoker.prep.stages.parts import Part, is_whole
from stoker.prep.stages.task import Progress, Task


class Sink(Protocol):
    """Write a block to a path; return the record for the journal."""

    suffix: ClassVar[str]  # of the path
    anywhere: ClassVar[bool]  # whether any process can run it

    def __call__(self, block: Block, file: str, path: Path) -> Mapping[str, Any]: ...


@dataclass(frozen=True, kw_only=True)
class _BlockStep:
    """Parse one block, in any process."""

    name: str
    source: Source
    path: Path
    size: int
    read: Callable[[], Block]
    sink: Sink

    def is_whole(self, record: Mapping[str, Any]) -> bool:
        return is_whole(self.path, record) and (not record["bad"] or self.path.with_suffix(".bad").exists())

    def make(self) -> dict[str, Any]:
        block = self.read()
        record = self.sink(block, self.source.name, self.path)
        if block.bad:
            write_bad_lines(self.path.with_suffix(".bad"), block.bad)
        broken = any(bad.broken for bad in block.bad)
        return {**record, "rows": block.rows, "lines": block.lines, "bad": len(block.bad), "broken": broken}


def ingest(
    task: Task,
    sources: Sequence[Source],
    name: str,
    sink: Sink,
    limit: BadLineLimit,
    *,
    stage: str = "read",
    total: int | None = None,
) -> list[Part]:
    """Write every block of every source as a part, a file ``name``/... of the work directory.

    Args:
        task: the preparation.
        sources: the files in order.
        name: name of the folder.
        sink: writes the parts.
        limit: counts bad lines and stops if there are too many.
        stage: name of the stage in the progress.
        total: bytes of the stage; None: those of the sources.

    Raises:
        DataError: there are more bad lines than ``limit`` allows.
    """
    directory = task.work / name
    directory.mkdir(parents=True, exist_ok=True)
    for source in sources:
        source.open()
    _check_agreement(sources)
    if total is None:
        total = sum(source.path.stat().st_size for source in sources)

    def steps() -> Iterator[_BlockStep]:
        for source in sources:
            for number, size, read in source.blocks(task.block_bytes):
                stem = f"{source.number:05d}.{number:06d}"
                path = directory / f"{stem}{sink.suffix}"
                yield _BlockStep(name=f"{name}/{stem}", source=source, path=path, size=size, read=read, sink=sink)

    parts: list[Part] = []
    start, lines = 0, Counter[int]()
    # Threads that wait for Polars are idle, but more threads would need more memory for their frames.
    for step, record in task.run(steps(), executor=task.executor if sink.anywhere else None):
        source = step.source
        part = Part(
            path=step.path, index=len(parts), file=source.number, name=source.name, start=start,
            lines_before=lines[source.number], **{key: record[key] for key in ("rows", "lines", "bad", "broken")},
        )  # fmt: skip
        limit.add(part)
        parts.append(part)
        start += part.rows
        lines[source.number] += part.lines
        task.read[stage] += step.size
        task.report(Progress(stage=stage, done=task.read[stage], total=total, unit="bytes"))
    if not start:
        which = "The only line is bad" if limit.bad == 1 else f"All {limit.bad:,} lines are bad, the first"
        reason = f" {which}: {limit.first}." if limit.bad else ""
        names = ", ".join(source.name for source in sources[:3])
        table = sources[0].path.suffix == FRAME
        usual = "A stream gives its rows only once." if table else "Check the files, the separator and the columns."
        advice = " ".join(limit.reasons().remedies) or usual
        raise UnusableInput(f"there is no usable row in {names}.{reason} {advice}")
    limit.check()
    return parts


def _check_agreement(sources: Sequence[Source]) -> None:
    """Raise :class:`DataError` if only some files have an optional column; JSON lines may lack any key."""
    columns = [source for source in sources if source.kind != "jsonl"]
    lacking = [source for source in columns if source.absent]
    having = [source for source in columns if not source.absent]
    if lacking and having:
        raise DataError(
            f"{lacking[0].name} has no column {lacking[0].absent[0]!r}, but {having[0].name} has. Prepare files "
            "with labels and files without them one after the other."
        )
