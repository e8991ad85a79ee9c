"""The training loop: plain PyTorch, one file, made to be read and copied."""

from __future__ import annotations

import signal
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import torch

from stoker.base.device import has_bf16_products, resolve_device
from stoker.base.errors import ConfigError
from stoker.base.timeline import span
from stoker.base.units import format_count, format_size, plural
from stoker.dataset.batch import Batch
from stoker.dataset.dataset import Dataset
from stoker.dataset.split import BatchStream
from stoker.models import MODELS, RecModel
from stoker.models.imported import class_path
from stoker.optim import Constant, Schedule
from stoker.placement.placement import Placement, row_bytes
from stoker.tables import Stage
from stoker.training.config import RESUMABLE, ROW_OPTIONS, TrainConfig
from stoker.training.files import checkpoint
from stoker.training.files.log import RunLog
from stoker.training.files.remote_run import Upload, local_run
from stoker.training.files.rundir import INTERIM, RunDirectory, open_dataset
from stoker.training.finish import TrainResult, finish
from stoker.training.placing import Epochs, moved, movement, place_run, tidy
from stoker.training.process import process_settings
from stoker.training.resume import reopen, restore
from stoker.training.scheduled import HotColdStream, ScheduledFeed, batch_order, run_feed, run_stream, swap_loss
from stoker.training.scores.evaluation import dataset_identity, evaluate, finite
from stoker.training.scores.metrics import deciding
from stoker.training.scores.ranking import RANKING
from stoker.training.settings import TrainSettings
from stoker.training.sizing.auto_batch import BatchChoice, choose_batch_size
from stoker.training.sizing.room import batch_options, check_disk, check_memory
from stoker.training.terminal.display import Display, Mode, make_display
from stoker.training.terminal.interrupt import Interrupted, StopSignals
from stoker.training.terminal.progress import Clock, Diverged, Progress, SaveTimer, explain

__all__ = ["TrainResult", "train"]

_WARM = 5  # steps of a process that no rate counts if more follow: kernels compile, the first batches are read


def train(
    dataset: Dataset | str | Path | None = None,
    config: TrainConfig | None = None,
    *,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    display: Display | Mode = "auto",
    **settings: Unpack[TrainSettings],
) -> TrainResult:
    """Train a model, or continue a run. Threads, generators and allocator are afterwards as they were before.

    Args:
        dataset: what ``stoker prepare`` wrote; when resuming, None means the run's own.
        config: settings; keyword settings go on top.
        out: the run directory to make, or a URL: the run is then in the local cache, and is uploaded after each
            checkpoint and at the end.
        resume: the run directory or URL to continue from its newest whole checkpoint, to the bit.
        display: "auto", "rich", "plain", "json", "quiet" or a :class:`Display`.
        settings: fields of :class:`TrainConfig`; when resuming, those that leave the numbers alone. ``batch_size`` may
            be "auto": the one that trains fastest here (:func:`stoker.training.sizing.auto_batch.choose_batch_size`).

    Raises:
        ConfigError: settings that cannot work, or a run directory that exists (``out``) or does not
        (``resume``).
        DataError: no such dataset, or a damaged one.
        CheckpointError: no whole checkpoint to resume from, or one of another model.
        StokerError: the loss is no longer finite.
        Interrupted: SIGTERM or Ctrl-C came; a checkpoint was written, unless it came twice.
    """
    auto = settings.get("batch_size") == "auto"
    if auto:  # what a run chose when it began is among its settings
        del settings["batch_size"]
    with local_run(out, resume) as (out, resume, upload):
        return _prepared(dataset, config, out, resume, display, dict(settings), upload, auto=auto)


def _prepared(
    dataset: Dataset | str | Path | None,
    config: TrainConfig | None,
    out: str | Path | None,
    resume: str | Path | None,
    display: Display | Mode,
    settings: dict[str, Any],
    upload: Upload,
    *,
    auto: bool,
) -> TrainResult:
    """:func:`train` with local paths; ``upload`` copies the run to where it is wanted."""
    data, config = _opened(dataset, config, out, resume, settings)
    choice = choose_batch_size(data, config) if auto and resume is None else None
    if choice is not None:
        config = config.replace(batch_size=choice.batch_size)
    with process_settings(config), tidy(config) as models:
        return _train(data, config, out, resume, display, models, choice, upload)


def _train(
    data: Dataset,
    config: TrainConfig,
    out: str | Path | None,
    resume: str | Path | None,
    display: Display | Mode,
    models: list[RecModel],
    choice: BatchChoice | None,
    upload: Upload,
) -> TrainResult:
    """:func:`train` with its arguments checked; ``models`` gets the model, ``choice`` says how its batch size came."""
    device = resolve_device(config.device)
    optimizer = config.make_row_optimizer(Constant())
    placement = place_run(config, data, optimizer)
    tables = config.stored_tables(data.schema)
    warnings = [check_memory(tables, optimizer.state, device, placement)]
    placed = placement is not None and not placement.resident
    stream = run_stream(config, data, **batch_options(config, tables, optimizer.state, device, placed=placed))
    if config.data_memory not in ("auto", "0") and not stream.held:
        warnings.append(
            f"data memory of {config.data_memory} does not hold the training rows, {format_size(data.train.bytes)}: "
            "they are read from their files"
        )
    total = config.total_steps(len(stream))
    schedule = config.make_schedule(total)
    model = config.make_model(data.schema, config.make_row_optimizer(schedule), placement)
    models.append(model)
    dense = config.make_dense_optimizer(model)
    if config.compile:
        model.compile_dense()
    path = Path(str(resume if out is None else out))
    done = RunDirectory(path).steps()
    dense_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.dense_parameters())
    steps = total - (done[-1] if done else 0)
    warnings.append(
        check_disk(path, tables, optimizer.state, dense_bytes, config, steps=steps, epoch=len(stream), there=len(done))
    )
    kept: dict[str, Any] = {"dataset": data.url or str(data.path.resolve()), "settings": config.to_dict()}
    if not type(model).__module__.startswith("stoker."):
        kept["model_class"] = class_path(type(model))
    if resume is not None:
        kept = {**RunDirectory(str(resume)).read("config.json"), **kept}
    elif choice is not None:
        kept["batch_size_chosen"] = choice.to_dict()
    run = RunDirectory.create(out, kept) if out is not None else RunDirectory(str(resume))
    progress = Progress()
    with make_display(display) if isinstance(display, str) else display as shown, run.locked():
        if resume is not None:
            progress = restore(run, data, model, dense, stream, config, shown)
            run.write("config.json", kept)
        log = RunLog(run, progress.step, tensorboard=config.tensorboard, again=_goes_on(progress, total))
        feed = run_feed(stream, total, model, config, progress=partial(shown.work, unit="batches"))
        try:
            shown.start(progress.step, total, _facts(model, data, config, total, placement, stream))
            if progress.step < total:
                data.train.check(partial(shown.work, "checking shards"))
            if config.dense_dtype == "bfloat16" and device.type == "cpu" and not has_bf16_products():
                shown.note("this processor has no bfloat16 products: a float32 dense part would be faster")
            ignored = _without_effect(
                config, placement, total, len(model.tensor_train), grouped=data.groups is not None
            )
            for note in (*_chosen(choice, config), *filter(None, warnings), *ignored):
                shown.note(note)
            try:
                clock = _fit(
                    model, dense, schedule, feed, data, config, total, len(stream), progress, run, log, shown, upload
                )
            except (Diverged, checkpoint.NotFiniteError) as error:
                step = error.step if isinstance(error, Diverged) else progress.step
                raise explain(str(error), step, model, dense, schedule, config, run) from None
            return finish(model, data, config, progress, clock, total, len(stream), run, log, shown)
        except KeyboardInterrupt as stop:
            if isinstance(stop, Interrupted):
                raise
            there = run.steps()  # the second one, or one outside of the loop
            newest = run.checkpoint(there[-1]) if there else None
            raise Interrupted(signal.SIGINT, newest, run.path, at_once=True) from None
        finally:
            log.close()


def _opened(
    dataset: Dataset | str | Path | None,
    config: TrainConfig | None,
    out: str | Path | None,
    resume: str | Path | None,
    settings: dict[str, Any],
) -> tuple[Dataset, TrainConfig]:
    """The dataset and all settings, checked against each other before anything is written."""
    if (out is None) == (resume is None):
        raise ConfigError(
            "give either out, the run directory to make, or resume, the one to continue.", settings=("out", "resume")
        )
    if settings.get("epochs") is not None and settings.get("steps") is not None:
        raise ConfigError("give epochs or steps, not both: each says how long to train.", settings=("epochs", "steps"))
    if resume is None:
        if dataset is None:
            raise ConfigError("a new run needs a dataset. Make one with stoker prepare.")
        config = (config or TrainConfig()).replace(**settings)
        RunDirectory(str(out)).check_new()
        data = open_dataset(dataset)
        config = config.replace(batch_order=batch_order(config, data))
    else:
        data, config = reopen(resume, dataset, config, settings)
    data.check_labelled("trained on")
    if not len(data.train):
        raise ConfigError(f"{data.path} has no training rows.")
    if config.patience is not None and not data.splits.get("valid"):
        raise ConfigError(
            f"{data.path} has no validation rows, by which patience could stop. Leave patience out, or prepare the "
            "data with a split that has some.",
            settings=("patience",),
        )
    valid = data.splits.get("valid")
    if config.metric in RANKING and valid and valid.groups is None:
        raise ConfigError(
            f"metric {config.metric!r} is over lists of rows, but {data.path} was prepared without group, so it has no "
            'lists. Choose auc or log_loss, or name the column in the schema (group = "session") and prepare it again.',
            settings=("metric",),
        )
    return data, config


def _fit(
    model: RecModel,
    dense: torch.optim.Optimizer,
    schedule: Schedule,
    feed: Epochs | Stage | ScheduledFeed,
    data: Dataset,
    config: TrainConfig,
    total: int,
    epoch: int,
    progress: Progress,
    run: RunDirectory,
    log: RunLog,
    shown: Display,
    upload: Upload,
) -> Clock:
    """Train until ``total`` steps are done or patience ends, ``epoch`` of them a pass. This is the loop."""
    for group in dense.param_groups:
        group.setdefault("initial_lr", group["lr"])
    parameters = model.dense_parameters()
    valid = data.splits.get("valid")
    eval_every = config.eval_every or epoch
    first = min(config.log_every, eval_every)  # so that a run which patience ends has a record
    read_every = 1 if model.device.type == "cpu" else config.log_every  # reading a loss waits for the GPU
    swaps = 0  # in this process
    saved = (progress.step, progress.evaluated, swaps)
    clock, timer = Clock(meter=lambda: moved(model, feed)), SaveTimer(config.checkpoint_minutes)
    marked = (replace(clock), progress.step)  # clock and step at the last training record
    timed = marked  # and where the times of the next one begin
    begun, warm = progress.step, replace(clock)
    model.train()

    with StopSignals() as stop, closing(_each(feed)) as batches:
        if isinstance(feed, Stage | ScheduledFeed):
            feed.hurry = lambda: stop.number is not None
        while True:
            # What is due after the step before; also the first thing after a restart.
            step = progress.step
            due = step > 0 and (step % eval_every == 0 or step >= total)
            improved = False
            if due and valid and progress.evaluated < step and stop.number is None:
                clock.pause()
                metrics = finite(
                    evaluate(
                        model, valid, rows=config.valid_rows, stop=lambda: stop.number is not None, k=config.ranking_k
                    )
                )
                if stop.number is None:
                    if progress.latest is None and deciding(metrics, config.metric) != config.metric:
                        shown.note(_undefined(config.metric))
                    improved = progress.judge(metrics, config.metric)
                    _record(log, shown, "valid", feed.step / epoch, step, **metrics)
                clock.go()
            finished = step >= total or (config.patience is not None and progress.stale >= config.patience)
            if isinstance(feed, ScheduledFeed) and feed.swapping and not finished and stop.number is None:
                clock.pause()
                test_loss = swap_loss(model, data, config, stop=lambda: stop.number is not None)
                if stop.number is None:
                    _record(log, shown, "schedule", feed.step / epoch, step, **feed.swap(test_loss).to_dict())
                    swaps += 1
                clock.go()
            wanted = (step % config.save_every == 0 if config.save_every else due) or improved or finished
            stale = step == saved[0]  # the checkpoint that is there
            state = (step, progress.evaluated, swaps)
            if step > 0 and state != saved and (wanted or stale or timer.due or stop.number is not None):
                clock.pause()
                begin = timer.now()
                progress.read_losses()
                checkpoint.save(
                    run.checkpoint(step),
                    model,
                    dense,
                    feed,
                    step=step,
                    extra=_extra(progress, data, config) | ({} if wanted else INTERIM),
                    overwrite=True,
                    require_finite=True,
                )
                saved = state
                timer.saved(timer.now() - begin)
                run.prune(config.keep_last, None if progress.best is None else int(progress.best["step"]))
                if (problem := upload()) is not None:
                    shown.note(f"warning: {problem} The run goes on; the next checkpoint is uploaded with this one.")
                clock.go()
            if stop.number is not None:
                raise Interrupted(stop.number, run.checkpoint(saved[0]) if saved[0] else None, run.path)
            if finished:
                clock.pause()
                return clock.since(warm) if clock.examples > warm.examples else clock

            batch = next(batches)
            factor = schedule.factor(step)
            for group in dense.param_groups:
                group["lr"] = group["initial_lr"] * config.dense_factor(schedule, step)
            with span("forward"):
                loss = model.loss(batch)
            progress.unread.append((step, loss.detach()))
            if len(progress.unread) >= read_every:
                progress.read_losses()
            with span("backward"):
                loss.backward()  # rows are updated here, in place
            with span("dense"):
                if config.dense_clip_norm is not None:
                    torch.nn.utils.clip_grad_norm_(parameters, config.dense_clip_norm)
                dense.step()
                dense.zero_grad()
            progress.step += 1
            clock.examples += len(batch)
            shown.step(progress.step)

            regular = progress.step % config.log_every == 0 or progress.step == first
            if regular or progress.step >= total:
                clock.pause()
                progress.read_losses()
                since, times = clock.since(marked[0]), clock.since(timed[0])
                _record(
                    log,
                    shown,
                    "train",
                    feed.step / epoch,
                    progress.step,
                    loss=progress.loss_sum / progress.loss_count,
                    samples_per_second=times.examples / times.seconds,
                    seconds_per_step=times.seconds / (progress.step - timed[1]),
                    row_lr=model.embeddings.optimizer.lr * factor,
                    dense_lr=dense.param_groups[0]["lr"],
                    **movement(since.counted, progress.step - marked[1], times),
                )
                if regular:  # else it is of the last steps; should the run go on, the next one counts them again
                    progress.loss_sum, progress.loss_count = 0.0, 0
                    marked = timed = (replace(clock), progress.step)
                clock.go()
            if progress.step - begun == _WARM:
                clock.pause()
                warm, timed = replace(clock), (replace(clock), progress.step)
                clock.go()


def _goes_on(progress: Progress, total: int) -> bool:
    """Whether a run takes up steps that its last record, if any, is of, as a run from its beginning would not have."""
    return progress.step < total and progress.loss_count > 0


def _undefined(metric: str) -> str:
    if metric == "group_auc":
        return "no list of validation rows has both labels: without a group AUC, log loss says what is best"
    name = "an AUC" if metric == "auc" else f"an {metric}" if metric == "mrr" else f"a {metric}"
    return f"all validation labels are the same: without {name}, log loss says what is best"


def _each(feed: Epochs | Stage | ScheduledFeed) -> Generator[Batch, None, None]:
    """The batches as a generator, which can be closed: that ends the threads behind a stage."""
    yield from feed


def _record(log: RunLog, shown: Display, kind: str, epoch: float, step: int, **values: Any) -> None:
    """One record, written and shown."""
    record = {"kind": kind, "step": step, "epoch": round(epoch, 6), **values, "time": round(time.time(), 3)}
    log.write(record)
    shown.record(record)


def _extra(progress: Progress, data: Dataset, config: TrainConfig) -> dict[str, Any]:
    """What a checkpoint keeps besides the model and its optimizers."""
    settings = {name: value for name, value in config.to_dict().items() if name not in RESUMABLE}
    return {
        "best": progress.best,
        "progress": progress.to_dict(),
        "dataset": dataset_identity(data),
        "settings": settings,
    }


def _chosen(choice: BatchChoice | None, config: TrainConfig) -> Iterator[str]:
    """How the batch size came, and what it means for the learning rates."""
    if choice is not None:
        yield str(choice)
        if config.lr_scaling == "none" and choice.batch_size != config.base_batch_size:
            yield (
                f"the learning rates are those meant for batches of {config.base_batch_size:,}: "
                "with lr scaling they would follow the batch size"
            )
    elif config.lr_scaling == "none" and (said := _ignored(config, "base_batch_size")):
        yield f"{said}: without lr scaling the learning rates do not follow the batch size"


def _without_effect(
    config: TrainConfig, placement: Placement | None, total: int, trains: int, *, grouped: bool
) -> Iterator[str]:
    """Settings that were given and change nothing."""
    if config.batch_order == "shuffled" and (said := _ignored(config, "swap_rate", "schedule_rows")):
        yield f"{said}: batches are shuffled, not hot and cold by the schedule"
    if config.tt_rank is None and (said := _ignored(config, "tt_rows", "tt_cores")):
        yield f"{said}: without a tt rank no table is a tensor train"
    elif config.tt_rank is not None and trains == len(config.tt_own):
        yield (
            f"tt rank is ignored: no table of {config.tt_rows:,} rows or more gets smaller by rank {config.tt_rank}. "
            "Give fewer tt rows to compress smaller tables, or a smaller rank"
        )
    if MODELS[config.model].mixed_dims and (said := _ignored(config, "embedding_dim")):
        yield f"{said}: model {config.model!r} has tables of different widths (option dims)"
    if not grouped and (said := _ignored(config, "ranking_k")):
        yield f"{said}: the dataset was prepared without group, so it has no lists"
    if placement is None:
        names = ("host_memory", "home_path", "strategy", "lookahead", "foresight", "in_flight", "spill")
        if said := _ignored(config, *names):
            yield f"{said}: without a limit on device memory all rows lie there"
    elif config.lookahead == 0 and not config.foresight:
        yield "without a lookahead a row leaves without knowing its next use, so more of them have to travel"
    if config.schedule != "one-cycle" and (said := _ignored(config, "cycle_rise")):
        yield f"{said}: only the schedule one-cycle has a rise"
    if "lamb" not in (config.row_optimizer, config.dense_optimizer) and (
        said := _ignored(config, "min_trust", "max_trust")
    ):
        yield f"{said}: only lamb has a trust ratio"
    used = ROW_OPTIONS.get(config.row_optimizer, {}).values()
    own = {name for options in ROW_OPTIONS.values() for name in options.values() if name.startswith("row_")}
    if said := _ignored(config, *sorted(own.difference(used))):
        yield f"{said}: row optimizer {config.row_optimizer} does not have that"
    if (warmup := max(config.warmup, config.dense_warmup)) >= total:
        yield (
            f"the warm-up of {plural(warmup, 'step')} is no shorter than the run of {plural(total, 'step')}: "
            "the learning rates never reach their full value"
        )
    elif (
        config.schedule in ("linear", "cosine", "polynomial", "one-cycle")
        and config.warmup + (config.decay_steps or 0) > total
    ):
        yield (
            f"warm-up and decay take {plural(config.warmup + (config.decay_steps or 0), 'step')}, the run has "
            f"{total:,}: the decay does not come to its end"
        )


def _ignored(config: TrainConfig, *names: str) -> str:
    """That those of the settings are ignored that are not as by default; empty if all are."""
    plain = TrainConfig()
    given = [name for name in names if getattr(config, name) != getattr(plain, name)]
    words = [{"home_path": "home", "embedding_dim": "dim"}.get(name, name.replace("_", " ")) for name in given]
    listed = " and ".join(filter(None, (", ".join(words[:-1]), "".join(words[-1:]))))
    return f"{listed} {'is' if len(words) == 1 else 'are'} ignored" if given else ""


def _facts(
    model: RecModel,
    data: Dataset,
    config: TrainConfig,
    total: int,
    placement: Placement | None,
    stream: BatchStream | HotColdStream,
) -> str:
    """What is about to be trained, for the first line on the screen."""
    rows = sum(table.num_embeddings for table in model.tables)
    state = model.embeddings.optimizer.state
    size = sum(table.num_embeddings * row_bytes(table, state) for table in model.embeddings.stored)
    trains = f", {plural(len(model.tensor_train), 'tensor train')} among them" if model.tensor_train else ""
    dense = sum(parameter.numel() for parameter in model.dense_parameters())
    return (
        f"{model.name}: {plural(len(model.tables), 'table')}{trains}, {format_count(rows)} rows, {format_size(size)} "
        f"with optimizer state; {format_count(dense)} dense parameters; {format_count(len(data.train))} training "
        f"rows{' held in memory' if stream.held else ''}, {plural(total, 'step')} of {config.batch_size:,} on "
        f"{model.device}"
        + (f"\n{stream}" if isinstance(stream, HotColdStream) else "")
        + ("" if placement is None else f"\n{placement.summary()}")
    )
