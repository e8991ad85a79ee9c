"""The training loop: plain PyTorch, one file, made to be read and copied."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from stoker.base.device import has_bf16_products, resolve_device
from stoker.base.settings import with_arguments_of
from stoker.base.units import format_size
from stoker.dataset.dataset import Dataset
from stoker.models import RecModel
from stoker.models.registry import class_path
from stoker.optim import Constant
from stoker.training.config import TrainConfig
from stoker.training.display import Display, Mode, make_display
from stoker.training.ends import Outputs, Start, TrainArguments, TrainResult, finish, open_run, restore
from stoker.training.files import checkpoint
from stoker.training.files.logs import Logger, RunLog
from stoker.training.files.rundir import INTERIM, RunDirectory, local_run
from stoker.training.notes import chosen, explain, facts, undefined, without_effect
from stoker.training.placing import check_disk, check_memory, iterate, place_run
from stoker.training.progress import Diverged, Interrupted, Progress, SaveTimer, TrainState, movement
from stoker.training.replica import Replica, open_stream, process_settings
from stoker.training.scheduled import Feed, swap_loss
from stoker.training.scores.evaluation import dataset_identity, evaluate, finite
from stoker.training.scores.metrics import deciding
from stoker.training.settings import RESUMABLE

_WARM = 5  # steps of a process that no rate counts if more follow: kernels compile, the first batches are read


@with_arguments_of(TrainArguments)
def train(
    dataset: Dataset | str | Path | None = None,
    config: TrainConfig | None = None,
    *,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    display: Display | Mode = "auto",
    loggers: Sequence[Logger] = (),
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
        loggers: get the figures of every record, beside the run's own files; see :class:`stoker.Logger`.
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
    with local_run(out, resume) as (out, resume, upload):
        start = open_run(dataset, config, out, resume, dict(settings))
        with process_settings(start.config) as models:
            return _train(start, Outputs(out, resume, display, loggers, upload), models)


def _train(start: Start, outputs: Outputs, models: list[RecModel]) -> TrainResult:
    """Do :func:`train` with its arguments checked; ``models`` gets the model."""
    data, config, choice, line = start
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
    replica = Replica(config, data.schema, config.make_schedule(total), placement)
    model = replica.model
    models.append(model)
    resume, display = outputs.resume, outputs.display
    run = RunDirectory(str(resume if outputs.out is None else outputs.out))
    done = run.steps()
    dense_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.dense_parameters())
    steps = total - (done[-1] if done else 0)
    warnings.append(
        check_disk(
            run.path, tables, optimizer.state, dense_bytes, config, steps=steps, epoch=len(stream), there=len(done)
        )
    )
    kept: dict[str, Any] = {"dataset": data.url or str(data.path.resolve()), "settings": config.to_dict()}
    if not type(model).__module__.startswith("stoker."):
        kept["model_class"] = class_path(type(model))
    if resume is not None:
        kept = {**run.read("config.json"), **kept}
    elif choice is not None:
        kept["batch_size_chosen"] = vars(choice)
    if resume is None:
        RunDirectory.create(run.path, kept)
    progress = Progress()
    with make_display(display) if isinstance(display, str) else display as shown, run.locked():
        if resume is not None:
            progress = restore(run, data, replica, stream, shown)
            run.write("config.json", kept)
        again = progress.step < total and progress.loss_count > 0  # its steps are part of the next training record
        state = TrainState(
            data=data, config=config, replica=replica, epoch=len(stream), total=total, run=run,
            feed=Feed(stream, total, model, config, progress=partial(shown.work, unit="batches")),
            log=RunLog(run, progress.step, tensorboard=config.tensorboard, loggers=outputs.loggers, again=again),
            shown=shown, upload=outputs.upload, progress=progress, timer=SaveTimer(config.checkpoint_minutes),
        )  # fmt: skip
        try:
            shown.start(progress.step, total, facts(model, data, config, total, placement, stream))
            if progress.step < total:
                data.train.check(partial(shown.work, "checking shards"))
            if config.dense_dtype == "bfloat16" and device.type == "cpu" and not has_bf16_products():
                shown.note("this processor has no bfloat16 products: a float32 dense part would be faster")
            grouped = data.groups is not None
            ignored = without_effect(config, placement, total, len(model.tensor_train), grouped=grouped)
            for note in (*chosen(choice, config), *filter(None, [line, *warnings, state.log.missed]), *ignored):
                shown.note(note)
            try:
                fit(state)
            except (Diverged, checkpoint.NotFiniteError) as error:
                step = error.step if isinstance(error, Diverged) else progress.step
                raise explain(str(error), step, model, replica.dense, replica.schedule, config, run) from None
            return finish(state)
        except KeyboardInterrupt as stop:
            if isinstance(stop, Interrupted):
                raise
            there = run.steps()  # the second one, or one outside of the loop
            newest = run.checkpoint(there[-1]) if there else None
            raise Interrupted(signal.SIGINT, newest, run.path, at_once=True) from None
        finally:
            state.log.close()


def fit(state: TrainState) -> None:
    """Train until all steps are done or patience ends. This is the loop.

    Raises:
        Diverged: the loss is no longer finite.
        Interrupted: a signal came; a checkpoint was written.
    """
    with state.stop, state.totals.recording(state.replica.model), closing(iterate(state.feed)) as batches:
        state.feed.hurry = state.stop.asked
        after_step(state)  # what was due when the run was stopped
        while not state.finished:
            batch = next(batches)
            loss = state.replica.step(batch)  # forward, backward, both optimizers
            count_step(state, len(batch), loss)
            after_step(state)
        with state.clock.paused():
            pass


def count_step(state: TrainState, examples: int, loss: Tensor) -> None:
    """Count a step and its loss; write a training record where one is due."""
    config, progress, clock, model = state.config, state.progress, state.clock, state.replica.model
    progress.unread.append((progress.step, loss))
    progress.step += 1
    clock.total["steps"] += 1
    clock.total["examples"] += examples
    state.shown.step(progress.step)
    if model.device.type == "cpu" or len(progress.unread) >= config.log_every:  # reading a loss waits for the GPU
        progress.read_losses()
    first = min(config.log_every, config.eval_every or state.epoch)  # so that a run which patience ends has a record
    regular = progress.step % config.log_every == 0 or progress.step == first
    if regular or progress.step >= state.total:
        with clock.paused():
            progress.read_losses()
            since, times = clock.since("record"), clock.since("rate")
            state.record(
                "train", loss=progress.loss_sum / progress.loss_count,
                samples_per_second=times["examples"] / times["seconds"],
                seconds_per_step=times["seconds"] / times["steps"],
                row_lr=model.embeddings.optimizer.lr * state.replica.schedule.factor(progress.step - 1),
                dense_lr=state.replica.dense.param_groups[0]["lr"], **movement(since, times),
            )  # fmt: skip
            if regular:  # else it is of the last steps; should the run go on, the next one counts them again
                progress.loss_sum, progress.loss_count = 0.0, 0
                clock.mark("record", "rate")
    if clock.total["steps"] == _WARM:
        with clock.paused():
            clock.mark("warm", "rate")


def after_step(state: TrainState) -> None:
    """Do what is due after a step, which is also the first thing after a restart: evaluate, swap, save.

    Raises:
        Interrupted: a signal came; a checkpoint was written.
    """
    config, step, stop = state.config, state.progress.step, state.stop
    due = step > 0 and (step % (config.eval_every or state.epoch) == 0 or step >= state.total)
    improved = due and state.progress.evaluated < step and not stop.asked() and _evaluate(state)
    if state.feed.swapping and not state.finished and not stop.asked():
        with state.clock.paused():
            loss = swap_loss(state.replica.model, state.data, config, stop=stop.asked)
            if not stop.asked():
                state.record("schedule", **state.feed.swap(loss).to_dict())
                state.swaps += 1
    wanted = (step % config.save_every == 0 if config.save_every else due) or improved or state.finished
    stale = step == state.saved[0]  # the checkpoint that is there
    if step > 0 and state.moment != state.saved and (wanted or stale or state.timer.due or stop.asked()):
        with state.clock.paused():
            _save(state, interim=not wanted)
    if stop.number is not None:
        newest = state.saved[0]
        raise Interrupted(stop.number, state.run.checkpoint(newest) if newest else None, state.run.path)


def _evaluate(state: TrainState) -> bool:
    """Evaluate on the validation rows, unless a signal comes; return True if the model is the best so far."""
    config, progress, stop = state.config, state.progress, state.stop
    valid = state.data.splits.get("valid")
    if not valid:
        return False
    with state.clock.paused():
        found = evaluate(state.replica.model, valid, rows=config.valid_rows, stop=stop.asked, k=config.ranking_k)
        if stop.asked():
            return False
        metrics = finite(found)
        if progress.latest is None and deciding(metrics, config.metric) != config.metric:
            state.shown.note(undefined(config.metric))
        improved = progress.judge(metrics, config.metric)
        state.record("valid", **metrics)
    return improved


def _save(state: TrainState, *, interim: bool) -> None:
    """Write a checkpoint, delete those that are no longer kept, and upload the run where it has a URL."""
    config, progress, run, replica = state.config, state.progress, state.run, state.replica
    begin = state.timer.now()
    progress.read_losses()
    extra = {
        "best": progress.best, "progress": progress.to_dict(), "dataset": dataset_identity(state.data),
        "settings": {name: value for name, value in config.to_dict().items() if name not in RESUMABLE},
    }  # fmt: skip
    checkpoint.save(
        run.checkpoint(progress.step), replica.model, replica.dense, state.feed, step=progress.step,
        extra=extra | (INTERIM if interim else {}), overwrite=True, require_finite=True,
    )  # fmt: skip
    state.saved = state.moment
    state.timer.saved(state.timer.now() - begin)
    run.prune(config.keep_last, progress.best_step)
    if (problem := state.upload()) is not None:
        state.shown.note(f"warning: {problem} The run goes on; the next checkpoint is uploaded with this one.")
