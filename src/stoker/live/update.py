"""Train a run on new rows: score them first, then train on each once, in order, and write what changed.

An update is atomic and uses each log once (:mod:`stoker.live.journal`). The same call continues a killed update, and
writes the files of an uninterrupted one.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from stoker.base import remote
from stoker.base.errors import DataError, StokerError
from stoker.base.picture import Grid, Shown
from stoker.base.progress import Progress, quiet, showing
from stoker.base.settings import with_arguments_of
from stoker.base.units import format_size, plural
from stoker.dataset.dataset import Dataset
from stoker.dataset.split import BatchStream, Split
from stoker.live.journal import Order, UpdateJournal, opened
from stoker.live.settings import UpdateSettings
from stoker.models import MODELS, RecModel
from stoker.models.registry import own_options
from stoker.optim import ROW_OPTIMIZERS, Constant
from stoker.placement.budget import MemoryBudget
from stoker.prep.inputs import Inputs, files_of
from stoker.prep.like import times_of
from stoker.prep.parse.sources import expand
from stoker.prep.prepare import PrepareReport, run_prepare
from stoker.prep.stages.task import STAGE_WORDS, StageProgress
from stoker.training.config import TrainConfig
from stoker.training.files import checkpoint, loading
from stoker.training.files.checkpoint import Link
from stoker.training.files.rundir import open_dataset
from stoker.training.placing import iterate, place_run, slotted
from stoker.training.replica import Replica, process_settings
from stoker.training.scheduled import Feed
from stoker.training.scores.catalogue import catalogue_of
from stoker.training.scores.evaluation import check_rows, dataset_identity, evaluate, finite
from stoker.training.scores.metrics import metric_grid
from stoker.training.settings import DENSE_LR, MACHINE, MachineConfig

_READ_EVERY = 50  # steps between two looks at the losses, for which a GPU waits


@dataclass(frozen=True)
class UpdateArguments(UpdateSettings, MachineConfig, MemoryBudget):
    """The arguments of :func:`update`."""

    run: str | Path
    logs: Any
    _: KW_ONLY
    data: Dataset | str | Path | None = None
    progress: Progress | None = None


@dataclass(frozen=True, kw_only=True, repr=False)
class UpdateResult(Shown):
    """What :func:`update` returns."""

    run: Path
    checkpoint: Path  # the model now
    number: int  # of the last update
    step: int  # steps trained in all
    rows: int  # new rows; 0 if all logs were used before
    before: dict[str, float | None]  # metrics on the new rows of the model that had not seen them
    loss: float | None  # mean while training on them
    bytes: int  # of the files that hold what changed
    whole_bytes: int  # of a whole checkpoint
    notes: list[str] = field(default_factory=list)  # logs that were left out, warnings

    def summary(self) -> str:
        """Return the rows, and the AUC of the model before on them."""
        if not self.rows:
            return f"nothing new, {self.run} is at update {self.number}"
        known = "" if (auc := self.before.get("auc")) is None else f", AUC {auc:.4f} before they were trained on"
        return f"update {self.number}: {plural(self.rows, 'row')}{known}, {format_size(self.bytes)} written"

    def grids(self) -> tuple[Grid, ...]:
        """Return the metrics of the model before on the new rows."""
        return (metric_grid({"new rows": self.before}, "before training on these rows"),) * bool(self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**vars(self), "run": str(self.run), "checkpoint": str(self.checkpoint)}


@with_arguments_of(UpdateArguments)
def update(*given: Any, **settings: Any) -> UpdateResult:
    """Train a run on new rows, and write what changed.

    The rows are prepared like those of the run: window features continue from the last update. Ids that
    the vocabulary does not have get new rows, copies of row 0, which they had until then. First the model scores the
    rows as it is, which shows how good it is on rows it has not seen (progressive validation). Then it trains on each
    row once, in the order of the logs. The rows of tables that changed are a new segment, and ``load(run)``,
    ``predict`` and ``evaluate`` use the new model.

    All of it happens or nothing. The same call continues a killed update. A log that was used, by an update or for the
    dataset of the run, is skipped under any name; also if it was compressed or unpacked since, under its own name.

    Args:
        run: a run whose training has ended, or its URL.
        logs: new rows, as for :func:`stoker.prepare`: paths, patterns, or tables in memory. Order them by time.
        rate: factor on the learning rates of the run, which are constant in an update.
        batch_size: examples per batch; None: that of the run.
        save_every: steps between segments within an update, from which a killed one continues; None: one, at the end.
        keep_ids: give no rows to new ids. They share row 0. So do ids that occur less often in the new rows than the
            ``min_count`` of their column says, and all new ids of a model with tensor trains.
        held_out: take logs of the dataset of the run, too: of its rows for validation and test, on which the run was
            not trained.
        max_bad: allowed share of bad lines.
        data: the dataset of the run, if it was moved.
        progress: called with what is being done, how much is done, and how much there is.
        settings: :class:`TrainConfig`'s settings of the machine and of memory, which change no number.

    Raises:
        ConfigError: ``run`` is not a run, its training has not ended, or it is in use.
        DataError: logs cannot be read, have rows without a label, or begin with rows that were used already.
        CheckpointError: the model is damaged, or the disk is full.
        StokerError: the loss is no longer finite; the run is as before.

    >>> from stoker.testing import make_daily_run
    >>> tuesday, wednesday = make_daily_run("run")
    >>> found = stoker.update("run", tuesday)
    >>> found.rows, found.number, found.checkpoint.name
    (300, 1, 'update_000001')
    >>> stoker.update("run", tuesday)
    <UpdateResult: nothing new, run is at update 1>
    """
    asked = UpdateArguments(*given, **settings)
    machine = {name: settings[name] for name in MACHINE if name in settings}
    with files_of(asked.logs) as inputs, opened(asked.run) as journal:
        files = expand(inputs.files)[0]
        (asked.progress or quiet)("reading logs", 0, 1)
        fresh, notes = journal.unused(files, inputs.names, _trained_on(journal, asked))
        (asked.progress or quiet)("reading logs", 1, 1)  # else a watch would show it until there are new rows
        if not fresh:
            return _result(journal, journal.checkpoint, notes, new=False)
        own = {name: getattr(asked, name) for name in UpdateSettings.__dataclass_fields__}
        order = Order(journal.number + 1, tuple(log for _, log in fresh), own)
        journal.begin(order)
        try:
            return _update(journal, order, Inputs([path for path, _ in fresh], inputs.names), machine, asked, notes)
        except KeyboardInterrupt as stop:
            raise KeyboardInterrupt("interrupted; the run is as before. The same command continues.") from stop


def _update(
    journal: UpdateJournal, order: Order, inputs: Inputs, machine: Mapping[str, Any], asked: UpdateArguments,
    notes: list[str],
) -> UpdateResult:  # fmt: skip
    config = TrainConfig.from_dict(journal.config["settings"])
    config = config.replace(
        schedule="constant", warmup=0, dense_warmup=0, decay_steps=None, batch_order="shuffled",
        batch_size=asked.batch_size or config.batch_size, **machine,
    )  # fmt: skip
    segment = journal.finished(order.number)
    if segment is None:
        data, report = prepare_rows(journal, order, inputs, asked)
        notes += report.warnings
        segment = _train(journal, order, data, config, asked)
    journal.publish(order.number, segment)
    return _result(journal, segment, notes, new=True)


def prepare_rows(
    journal: UpdateJournal, order: Order, inputs: Inputs, asked: UpdateArguments
) -> tuple[Dataset, PrepareReport]:
    """Prepare the rows of an update like those before; continue a killed preparation."""
    show = asked.progress or quiet

    def progress(stage: StageProgress) -> None:
        show(f"new rows: {STAGE_WORDS[stage.stage]}", stage.done, stage.total)

    like = dataset_before(journal, asked)
    config = TrainConfig.from_dict(journal.config["settings"])
    grow = not (asked.keep_ids or config.tensor_trains(like.schema))  # cores have no rows of their own
    report = run_prepare(
        None, inputs, out=journal.run.rows_of(order.number), like=like, grow=grow,
        negatives=bool(like.manifest["schema"].get("negatives")), max_bad=asked.max_bad,
        threads=asked.threads, progress=progress,
    )  # fmt: skip
    shutil.rmtree(report.path / ".work", ignore_errors=True)  # of a preparation that was killed at its very end
    data = Dataset(report.path)
    if not len(data.test):
        raise DataError(f"the new logs have no rows, so {journal.run.path} stays as it is.")
    _check_whole(data, report, inputs)
    if absent := len(data.test) - data.test.labelled:
        raise DataError(
            f"{plural(absent, 'row')} of {len(data.test):,} have no label, so the run cannot be "
            "trained on them. Wait until their labels are known; stoker predict scores rows without."
        )
    report.warnings += _late(times_of(like.manifest["splits"]), times_of(data.manifest["splits"]))
    return data, report


def dataset_before(journal: UpdateJournal, asked: UpdateArguments) -> Dataset:
    """Return the dataset that new rows are prepared like: that of the last update, or of the run."""
    found = open_dataset(journal.dataset if journal.number or asked.data is None else asked.data)
    check_rows(found, checkpoint.read_manifest(journal.checkpoint), continued=True)
    return found


def _trained_on(journal: UpdateJournal, asked: UpdateArguments) -> Mapping[str, Any]:
    """Return the manifest of the dataset of the run; that of the last update without its logs, if it is gone."""
    first = journal.config["dataset"] if asked.data is None else asked.data
    known = checkpoint.read_manifest(journal.checkpoint)["extra"].get("dataset") or {}
    if not journal.number or remote.url_of(first) is None:
        with suppress(DataError):
            found = open_dataset(first)
            same = not journal.number or dataset_identity(found)["vocabulary_hash"] == known.get("first")
            if same:  # and not prepared again from other logs
                return {**found.manifest, **({"sources": []} if asked.held_out else {})}
    return {**open_dataset(journal.dataset).manifest, "sources": []}  # the journal has the logs of updates


def _check_whole(data: Dataset, report: PrepareReport, inputs: Inputs) -> None:
    """Refuse a log that breaks off, and note lines that are left out or may have been cut.

    The whole file of one that breaks off would be refused later, as one that has grown.
    """
    for source in data.manifest["sources"]:
        if "breaks_off" in source:
            raise DataError(
                f"{source['file']} breaks off at line {source['breaks_off']:,}, so rows are lost. Get the file whole; "
                "the run is as before."
            )
    if bad := int(data.manifest["quarantined"]):
        report.warnings.append(f"{plural(bad, 'line')} bad and left out: {report.path / 'quarantine.jsonl'} has each")
    for path in inputs.files:
        if _is_text(path) and not _ends_a_line(path):
            report.warnings.append(
                f"{path} has no newline at its end: if its last line was still being written, take this update back "
                "with stoker rollback and give the whole file"
            )


def _is_text(path: Path) -> bool:
    with path.open("rb") as file:
        begin = file.read(4)
    return not begin.startswith((b"PAR1", b"\x1f\x8b", b"\x28\xb5\x2f\xfd"))  # Parquet, gzip, zstd


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read() in (b"\n", b"\r", b"\0")


def _late(before: list[Any], new: list[Any]) -> list[str]:
    """Note rows that are older than the last row that the model has seen."""
    if not before or not new or new[0] >= before[1]:
        return []
    return [
        f"the new rows begin at {new[0]}, before the last row that the model has seen, of {before[1]}. "
        "Updates in order of time keep the model up to date, and test it on rows that it could not know"
    ]


def _train(journal: UpdateJournal, order: Order, data: Dataset, config: TrainConfig, asked: UpdateArguments) -> Path:
    """Score the rows, train on them, and return the segment that was written."""
    show = asked.progress or quiet
    rows = data.test
    parent = journal.partial(order.number)
    begun = checkpoint.read_manifest(parent or journal.checkpoint)
    with process_settings(config) as models:
        rates = _scaled(config, order.settings["rate"])
        # What the model derived from the sizes of the tables then, such as their columns.
        sized = {name: begun["model"][name] for name in own_options(MODELS[config.model]) if name in begun["model"]}
        rates = rates.replace(model_options={**rates.model_options, **sized})
        placement = place_run(rates, data, rates.make_row_optimizer(Constant()))
        replica = Replica(rates, data.schema, Constant(), placement)
        models.append(replica.model)
        own_rates = [group["lr"] for group in replica.dense.param_groups]
        checkpoint.track_changes(replica.model)
        stream = _stream(config, rows, replica.model)
        of_model = dataset_before(journal, asked) if parent is None else data
        known = begun["extra"].get("dataset")
        check_rows(of_model, begun)
        identity = {
            **dataset_identity(data),
            "first": (known or {}).get("first", dataset_identity(of_model)["vocabulary_hash"]),
        }
        loading.load_larger(
            parent or journal.checkpoint, replica.model, replica.dense, None if parent is None else stream
        )
        for group, rate in zip(replica.dense.param_groups, own_rates, strict=True):
            group["initial_lr"] = rate
        if parent is None:
            parent, first = journal.checkpoint, int(begun["step"])
            own = of_model if asked.data is None else open_dataset(asked.data)
            with showing(lambda _, done, total, unit: show("scoring new rows", done, total)):
                before = finite(evaluate(
                    replica.model, rows, lookahead=config.some_lookahead, k=config.ranking_k,
                    catalogue=catalogue_of(replica.model, own, parent),
                ), config.loss, config.metric)  # fmt: skip
            read = [each["rows"] if each["bytes"] == log.bytes else None
                    for log, each in zip(order.logs, data.manifest["sources"], strict=True)]  # fmt: skip
            logs = [log.to_dict() | {"rows": count} for log, count in zip(order.logs, read, strict=True)]
            note = {**order.to_dict(), "logs": logs, "rows": len(rows), "data_hash": rows.data_hash, "before": before,
                    "first": first, "loss_sum": 0.0}  # fmt: skip
        else:
            note = dict(begun["extra"]["update"])
        losses = _Losses(note["loss_sum"])
        feed = Feed(stream, len(stream), replica.model, config)

        def save(parent: Path, path: Path, done: int) -> Path:
            losses.read()
            seen = {**note, "loss_sum": losses.total}
            extra = {"update": seen, "dataset": identity, "settings": begun["extra"].get("settings", {})}
            return checkpoint.save(
                path, replica.model, replica.dense, feed, step=note["first"] + done, extra=extra, parent=parent,
                overwrite=True, require_finite=True,
            )  # fmt: skip

        with closing(iterate(feed)) as batches:
            for batch in batches:
                losses.add(replica.step(replace(batch, step=note["first"] + batch.step)), len(batch))
                done = batch.step + 1
                if done % _READ_EVERY == 0:
                    losses.read()
                    show("training on new rows", done, len(stream))
                if asked.save_every is not None and done % asked.save_every == 0 and done < len(stream):
                    parent = save(parent, journal.segment(order.number, note["first"] + done), done)
        segment = save(parent, journal.segment(order.number), len(stream))
        replica.close()
    return segment


def _scaled(config: TrainConfig, rate: float) -> TrainConfig:
    """Return the settings with both learning rates times ``rate``."""
    if rate == 1.0:
        return config
    row = ROW_OPTIMIZERS[config.row_optimizer].default_lr if config.row_lr is None else config.row_lr
    dense = DENSE_LR[config.dense_optimizer] if config.dense_lr is None else config.dense_lr
    return config.replace(row_lr=row * rate, dense_lr=dense * rate)


def _stream(config: TrainConfig, rows: Split, model: RecModel) -> BatchStream:
    """Return the rows in the order of the logs."""
    gpu = model.device.type == "cuda"
    placed = any(group.storage.reads_ids for group in model.embeddings.groups) or bool(slotted(model))
    device = model.device if gpu and not placed else None
    return rows.batches(config.batch_size, reuse=not gpu and not placed, pin_memory=gpu, device=device)


class _Losses:
    """The sum of the losses of all examples, in float64 and in their order."""

    def __init__(self, total: float) -> None:
        self.total = total
        self._unread: list[tuple[Tensor, int]] = []

    def add(self, loss: Tensor, examples: int) -> None:
        """Add the mean loss of some examples."""
        self._unread.append((loss, examples))

    def read(self) -> None:
        """Bring :attr:`total` up to date, for which a GPU waits."""
        for loss, examples in self._unread:
            self.total += loss.item() * examples
        self._unread.clear()
        if not math.isfinite(self.total):
            raise StokerError(
                "the loss is no longer finite. Nothing was written, and the run is as before. Lower the learning rates "
                "with rate=0.1 (--rate 0.1), or look at the new rows."
            )


def _result(journal: UpdateJournal, segment: Path, notes: list[str], *, new: bool) -> UpdateResult:
    links = checkpoint.chain(segment)
    manifest = links[-1].manifest
    done = manifest["extra"].get("update", {})
    rows = int(done.get("rows", 0)) if new else 0
    own = [link for link in links if link.manifest["extra"].get("update", {}).get("number") == done.get("number")]
    return UpdateResult(
        run=journal.run.path, checkpoint=segment, number=int(done.get("number", 0)), step=int(manifest["step"]),
        rows=rows, before=done["before"] if new else {}, loss=done["loss_sum"] / rows if rows else None,
        bytes=sum(map(_size, own)) if new else 0, whole_bytes=_whole_size(links), notes=notes,
    )  # fmt: skip


def _whole_size(links: list[Link]) -> int:
    """Return the bytes of the files of a whole checkpoint with the tables of the last segment."""
    base, rows = links[0].manifest, {entry["name"]: entry["num_embeddings"] for entry in links[-1].manifest["tables"]}
    total = float(base["files"][checkpoint.DENSE]["bytes"])
    for entry in base["tables"]:
        own = sum(int(base["files"][shard["file"]]["bytes"]) for shard in entry["shards"])
        total += own * rows[entry["name"]] / entry["num_embeddings"]
    return round(total)


def _size(link: Link) -> int:
    return sum(int(entry["bytes"]) for entry in link.manifest["files"].values())
