"""The training loop: plain PyTorch, one file, made to be read and copied."""

from __future__ import annotations

import signal
import time
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from stoker.base.device import has_bf16_products, resolve_device
from stoker.base.timeline import span
from stoker.base.units import format_size
from stoker.dataset.dataset import Dataset
from stoker.models import RecModel
from stoker.models.registry import class_path
from stoker.optim import Constant, Schedule
from stoker.tables import Stage
from stoker.training.auto_batch import BatchChoice, choose_batch_size
from stoker.training.config import TrainConfig
from stoker.training.display import Display, Mode, make_display
from stoker.training.ends import TrainArguments, TrainResult, finish, open_run, restore, takes_settings
from stoker.training.files import checkpoint
from stoker.training.files.rundir import INTERIM, RunDirectory, RunLog, Upload, local_run
from stoker.training.notes import chosen, explain, facts, undefined, without_effect
from stoker.training.placing import Epochs, StageTotals, check_disk, check_memory, iterate, moved, movement, place_run
from stoker.training.progress import Clock, Diverged, Interrupted, Progress, SaveTimer, StopSignals
from stoker.training.replica import open_stream, process_settings, tidy
from stoker.training.scheduled import ScheduledFeed, run_feed, swap_loss
from stoker.training.scores.evaluation import dataset_identity, evaluate, finite
from stoker.training.scores.metrics import deciding
from stoker.training.settings import RESUMABLE

_WARM = 5  # steps of a process that no rate counts if more follow: kernels compile, the first batches are read


@takes_settings(TrainArguments)
def train(
    dataset: Dataset | str | Path | None = None,
    config: TrainConfig | None = None,
    *,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    display: Display | Mode = "auto",
    **settings: Any,
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
            be "auto": the one that trains fastest here (:func:`stoker.training.auto_batch.choose_batch_size`).

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
        data, config = open_run(dataset, config, out, resume, dict(settings))
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
    stream = open_stream(config, data, optimizer, placement)
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
        kept["batch_size_chosen"] = vars(choice)
    run = RunDirectory.create(out, kept) if out is not None else RunDirectory(str(resume))
    progress = Progress()
    with make_display(display) if isinstance(display, str) else display as shown, run.locked():
        if resume is not None:
            progress = restore(run, data, model, dense, stream, config, shown)
            run.write("config.json", kept)
        again = progress.step < total and progress.loss_count > 0  # its steps are part of the next training record
        log = RunLog(run, progress.step, tensorboard=config.tensorboard, again=again)
        feed = run_feed(stream, total, model, config, progress=partial(shown.work, unit="batches"))
        try:
            shown.start(progress.step, total, facts(model, data, config, total, placement, stream))
            if progress.step < total:
                data.train.check(partial(shown.work, "checking shards"))
            if config.dense_dtype == "bfloat16" and device.type == "cpu" and not has_bf16_products():
                shown.note("this processor has no bfloat16 products: a float32 dense part would be faster")
            grouped = data.groups is not None
            ignored = without_effect(config, placement, total, len(model.tensor_train), grouped=grouped)
            for note in (*chosen(choice, config), *filter(None, warnings), *ignored):
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
    totals, timer = StageTotals(), SaveTimer(config.checkpoint_minutes)
    clock = Clock(meter=lambda: moved(model, feed, totals))
    warm = marked = timed = replace(clock)  # after the first steps; at the last training record; where its times begin
    model.train()

    with StopSignals() as stop, totals.recording(model), closing(iterate(feed)) as batches:
        if isinstance(feed, Stage | ScheduledFeed):
            feed.hurry = stop.asked
        while True:
            # What is due after the step before; also the first thing after a restart.
            step = progress.step
            due = step > 0 and (step % eval_every == 0 or step >= total)
            improved = False
            if due and valid and progress.evaluated < step and not stop.asked():
                with clock.paused():
                    found = evaluate(model, valid, rows=config.valid_rows, stop=stop.asked, k=config.ranking_k)
                    if not stop.asked():
                        metrics = finite(found)
                        if progress.latest is None and deciding(metrics, config.metric) != config.metric:
                            shown.note(undefined(config.metric))
                        improved = progress.judge(metrics, config.metric)
                        _record(log, shown, "valid", feed.step / epoch, step, **metrics)
            finished = step >= total or (config.patience is not None and progress.stale >= config.patience)
            if isinstance(feed, ScheduledFeed) and feed.swapping and not finished and not stop.asked():
                with clock.paused():
                    test_loss = swap_loss(model, data, config, stop=stop.asked)
                    if not stop.asked():
                        _record(log, shown, "schedule", feed.step / epoch, step, **feed.swap(test_loss).to_dict())
                        swaps += 1
            wanted = (step % config.save_every == 0 if config.save_every else due) or improved or finished
            stale = step == saved[0]  # the checkpoint that is there
            state = (step, progress.evaluated, swaps)
            if step > 0 and state != saved and (wanted or stale or timer.due or stop.asked()):
                with clock.paused():
                    begin = timer.now()
                    progress.read_losses()
                    extra = _extra(progress, data, config) | ({} if wanted else INTERIM)
                    checkpoint.save(
                        run.checkpoint(step), model, dense, feed, step=step, extra=extra, overwrite=True,
                        require_finite=True,
                    )  # fmt: skip
                    saved = state
                    timer.saved(timer.now() - begin)
                    run.prune(config.keep_last, None if progress.best is None else int(progress.best["step"]))
                    if (problem := upload()) is not None:
                        shown.note(
                            f"warning: {problem} The run goes on; the next checkpoint is uploaded with this one."
                        )
            if stop.number is not None:
                raise Interrupted(stop.number, run.checkpoint(saved[0]) if saved[0] else None, run.path)
            if finished:
                with clock.paused():
                    return clock.since(warm) if clock.examples > warm.examples else clock

            batch = next(batches)
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
            clock.steps += 1
            clock.examples += len(batch)
            shown.step(progress.step)

            regular = progress.step % config.log_every == 0 or progress.step == first
            if regular or progress.step >= total:
                with clock.paused():
                    progress.read_losses()
                    since, times = clock.since(marked), clock.since(timed)
                    _record(
                        log, shown, "train", feed.step / epoch, progress.step,
                        loss=progress.loss_sum / progress.loss_count, samples_per_second=times.examples / times.seconds,
                        seconds_per_step=times.seconds / times.steps,
                        row_lr=model.embeddings.optimizer.lr * schedule.factor(step),
                        dense_lr=dense.param_groups[0]["lr"], **movement(since, times),
                    )  # fmt: skip
                    if regular:  # else it is of the last steps; should the run go on, the next one counts them again
                        progress.loss_sum, progress.loss_count = 0.0, 0
                        marked = timed = replace(clock)
            if clock.steps == _WARM:
                with clock.paused():
                    warm = timed = replace(clock)


def _record(log: RunLog, shown: Display, kind: str, epoch: float, step: int, **values: Any) -> None:
    """One record, written and shown."""
    record = {"kind": kind, "step": step, "epoch": round(epoch, 6), **values, "time": round(time.time(), 3)}
    log.write(record)
    shown.record(record)


def _extra(progress: Progress, data: Dataset, config: TrainConfig) -> dict[str, Any]:
    """What a checkpoint keeps besides the model and its optimizers."""
    settings = {name: value for name, value in config.to_dict().items() if name not in RESUMABLE}
    kept = {"best": progress.best, "progress": progress.to_dict()}
    return {**kept, "dataset": dataset_identity(data), "settings": settings}
