"""A preparation: its settings, its work directory, and the state that its steps share."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from stoker.base.errors import DataError
from stoker.base.files import NO_ROOM, check_name, hash_file
from stoker.base.ordered import ordered_map
from stoker.base.version import __version__
from stoker.dataset.manifest import REQUEST, SPLITS
from stoker.dataset.memory import temporary_folder_of
from stoker.prep.features.fitted import Merge
from stoker.prep.parse.layout import Layout
from stoker.prep.parse.quarantine import BadLineLimit
from stoker.prep.parse.sources import BLOCK_BYTES, FRAME
from stoker.prep.recipe import Recipe
from stoker.prep.schema import Negatives, OptionalLabel, Schema, SplitRule, Timestamp
from stoker.prep.stages.parts import Journal

if TYPE_CHECKING:
    from stoker.prep.like import Like

WORK_VERSION = 14  # raise it when the content of parts changes
KEPT = "__keep."  # prefix of kept columns while features are computed
STAGE_WORDS = {
    "read": "reading", "derive": "deriving rows", "features": "working out features", "encode": "encoding rows",
    "fit": "counting", "write": "writing",
    "look": "reading again", "order": "ordering ids", "replace": "replacing ids",
}  # fmt: skip
_OURS = (
    "manifest.json", REQUEST, "counts.safetensors", "quarantine.jsonl", "vocab", "groups", "keep", "features", *SPLITS,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class StageProgress:
    """The argument of the ``progress`` callback: a stage and how much of it is done, which never decreases."""

    stage: str  # read | derive | features | encode | fit | write; of --reorder also look | order | replace
    done: int
    total: int
    unit: str  # bytes | steps | rows | tables | values


class Step(Protocol):
    """A step of the work that any process can do. The journal records it by its name."""

    @property
    def name(self) -> str:
        """The name of the step in the journal."""
        ...

    def is_whole(self, record: Mapping[str, Any]) -> bool:
        """Return True if the files of a recorded step are whole."""
        ...

    def make(self) -> dict[str, Any]:
        """Write the files; return the record for the journal."""
        ...


S = TypeVar("S", bound=Step)


def _run(given: tuple[Step, Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """Do a step; return None if an earlier run has done it and its files are whole."""
    step, record = given
    return None if record is not None and step.is_whole(record) else step.make()


@dataclass(kw_only=True)
class Task:
    """Settings of a preparation and the state that its steps share."""

    recipe: Recipe
    schema: Schema
    files: list[Path]
    out: Path
    limit: BadLineLimit
    threads: int
    report: Callable[[StageProgress], None]
    block_bytes: int = BLOCK_BYTES
    executor: Executor | None = None  # does the steps; None: threads
    reused: int = 0  # steps that an interrupted run had finished
    like: Like | None = None  # the dataset whose vocabularies, statistics and fitted features are used
    names: Mapping[Path, str] = field(default_factory=dict)  # names of inputs in messages and the quarantine
    splitting: Schema = field(init=False)  # the schema that splits the rows
    inner: Schema = field(init=False)  # the schema of rows after their features are computed
    layout: Layout = field(init=False)
    journal: Journal = field(init=False)
    temporary: bool = field(init=False)  # whether the dataset is in memory
    sizes: dict[Path, int] = field(init=False)  # of the files, before they are read
    read: Counter[str] = field(init=False, default_factory=Counter)  # bytes read in each stage, of all inputs

    def __post_init__(self) -> None:
        if self.like is None:
            self.schema = replace(self.schema, notation={**self.schema.notation, **self.schema.notation_of_unlisted()})
        self.splitting = self.schema if self.like is None else all_test(self.schema)
        if self.like is not None and self.like.negatives and not self.schema.label.column:
            self.splitting = replace(self.splitting, label=self.schema.label)  # each row has label 1
        self.inner = schema_after_features(self.splitting) if self.in_passes else self.splitting
        self.layout = Layout(self.inner)
        self.temporary = temporary_folder_of(self.out) is not None
        self.sizes = {path: path.stat().st_size for path in self.files}

    @property
    def negatives(self) -> Negatives | None:
        """How to sample rows of label 0; None for none."""
        found = self.schema.negatives
        wanted = self.like is None or self.like.negatives
        return found if found is not None and found.per_positive and wanted else None

    @property
    def in_passes(self) -> bool:
        """Whether rows need more than one pass: for features, or for sampled rows."""
        return bool(self.schema.feature) or self.negatives is not None

    @property
    def merged(self) -> list[Merge]:
        """The ``merge`` features whose file this preparation reads."""
        return [one for one in self.schema.feature if isinstance(one, Merge) and self.like is None]

    @property
    def work(self) -> Path:
        """The directory of unfinished work; it is removed when the dataset is whole."""
        return self.out / ".work"

    def begin(self, *, resume: bool) -> None:
        """Lock the output directory and open its journal.

        Raises:
            DataError: the directory is neither empty nor left by an interrupted preparation, or another preparation is
                running in it.
        """
        check_name(self.out.absolute())
        if self.out.exists() and not self.out.is_dir():
            raise DataError(f"{self.out} is a file. Choose another directory.")
        present = sorted(entry.name for entry in self.out.iterdir()) if self.out.exists() else []
        if present and not (self.work / "journal.jsonl").exists() and present != [".work"]:
            raise DataError(
                f"{self.out} is not empty and not a dataset ({', '.join(present[:3])} ...). Choose another directory."
            )
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            self.journal = Journal(self.work, {"block_bytes": self.block_bytes, **self._inputs()}, resume=resume)
        except OSError as error:
            if error.errno in NO_ROOM:
                raise
            raise DataError(
                f"{self.out} cannot be written ({error.strerror}). Choose a directory that you may write to."
            ) from error
        if not self.journal.done:
            self._clear()

    def run(
        self, steps: Iterable[S], *, executor: Executor | None = None, ahead: int | None = None
    ) -> Iterator[tuple[S, dict[str, Any]]]:
        """Do the steps that no earlier run finished; yield each step with its record, in order.

        Args:
            steps: taken as threads become free.
            executor: as in :func:`stoker.base.ordered.ordered_map`.
            ahead: likewise.
        """
        handed: deque[S] = deque()  # steps in work

        def given() -> Iterator[tuple[S, Mapping[str, Any] | None]]:
            for step in steps:
                handed.append(step)
                yield step, self.journal.done.get(step.name)

        for made in ordered_map(_run, given(), self.threads, executor=executor, ahead=ahead):
            step = handed.popleft()
            self.reused += made is None
            yield step, self.journal.done[step.name] if made is None else self.journal.add(step.name, made)

    def remedy_of_full_disk(self, *, kept: bool) -> str:
        """Say what to do about a full disk; ``kept``: whether there are finished steps."""
        if self.temporary:
            return "Free some space, let TMPDIR name a larger disk, or pass out=DIRECTORY."
        what = "finished parts are kept" if kept else "nothing was kept"
        return f"Free some space and run the same command again: {what}."

    def discard(self) -> None:
        """Delete all finished work."""
        self.journal.done.clear()
        self._clear()

    def _clear(self) -> None:
        for path in (self.out / name for name in _OURS):
            if path.exists():
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def request(self, *settings: Any) -> str | None:
        """Return a hash of all that decides the bytes of the dataset, and of further settings.

        Return None if code outside Stoker takes part, because it may change.
        """
        derive: Any = self.recipe.derive
        function = getattr(derive, "func", derive)  # unwraps a partial
        parts = [*map(type, self.schema.feature), *([] if derive is None else [function])]
        ours = all(str(part.__module__).startswith("stoker.") for part in parts)
        if self.temporary or not ours or not all(one.path.is_file() for one in self.merged):
            return None
        given = [getattr(derive, name, None) for name in ("args", "keywords")]
        values = [self._inputs(), self.limit.strict, self.limit.share, repr([given, *settings])]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

    def _inputs(self) -> dict[str, Any]:
        return {
            "work_version": WORK_VERSION, "stoker": __version__, "schema": self.schema.hash(),
            "recipe": [self.recipe.name, self.recipe.preset_name],
            "files": [_stamp(path) for path in self.files],
            "merged": [_stamp(one.path) for one in self.merged],
            "like": self.like.identity if self.like is not None else None,
        }  # fmt: skip


def _stamp(path: Path) -> list[Any]:
    if path.suffix == FRAME:  # a table is identified by its rows
        return [path.name, *hash_file(path)]
    return [str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns]


def all_test(schema: Schema) -> Schema:
    """Return the schema for ``like``: all rows go to test, and may lack a label. A split column may still drop rows."""
    split = SplitRule(rule="hash", train=0.0, valid=0.0, test=1.0)
    if schema.split.rule == "column":
        values = {value: "drop" if target == "drop" else "test" for value, target in schema.split.values.items()}
        split = replace(schema.split, values=values)
    label = OptionalLabel(column=schema.label.column, rule=schema.label.rule)
    return replace(schema, label=label, split=split, as_text=schema.text_columns)


def schema_after_features(schema: Schema) -> Schema:
    """Return the schema of rows with features: label, split and time are in helper columns."""
    values = {name: name for name in (*SPLITS, "drop")}
    time = Timestamp(column="__time") if schema.timestamp is not None else None
    return replace(
        schema,
        label=type(schema.label)(column="__label"),
        split=SplitRule(rule="column", column="__split", values=values),
        timestamp=time,
        negative_keep=1.0,
        negatives=None,
        keep=tuple(f"{KEPT}{name}" for name in schema.keep),
    )
