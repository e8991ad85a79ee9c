"""The training loop: plain PyTorch, made to be read and copied.

:func:`fit` is the loop. :func:`train_step` trains on a batch (:meth:`stoker.training.replica.Replica.step`: forward,
backward, both optimizers) and counts it, :func:`after_step` evaluates and saves. The rest of this module sets up a run.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from stoker.base.checks import checked
from stoker.base.device import has_bf16_products, resolve_device
from stoker.base.errors import ConfigError
from stoker.base.progress import showing
from stoker.base.settings import with_arguments_of
from stoker.base.units import format_size
from stoker.dataset.batch import Batch
from stoker.dataset.dataset import Dataset
from stoker.models import RecModel
from stoker.models.registry import class_path
from stoker.optim import Constant
from stoker.tables import Ranks
from stoker.tables.ranks.share import whole_of
from stoker.training.config import TrainConfig
from stoker.training.display import Display, Mode, make_display
from stoker.training.ends import Outputs, Start, TrainArguments, TrainResult, finish, lengths_of, open_run, restore
from stoker.training.files import checkpoint
from stoker.training.files.logs import Logger, NoLog, RunLog
from stoker.training.files.rundir import INTERIM, RunDirectory, local_run
from stoker.training.notes import chosen, crowded, explain, facts, of_both_towers, stretched, undefined, without_effect
from stoker.training.placing import check_disk, check_memory, for_ranks, iterate, place_run, rank_tables
from stoker.training.progress import Diverged, Interrupted, LoopState, SaveTimer, StopSignals, TrainState, movement
from stoker.training.ranks.first import is_first, on_first
from stoker.training.ranks.run import open_run_directory, unshared
from stoker.training.ranks.start import find_ranks, same_ranks, together
from stoker.training.replica import Replica, open_stream, process_settings
from stoker.training.scheduled import Feed, swap_loss
from stoker.training.scores.evaluation import dataset_identity, evaluate, finite
from stoker.training.scores.metrics import deciding
from stoker.training.settings import RESUMABLE

_WARM = 5  # first steps of a process, left out of rates if more follow: kernels compile, reading begins


@with_arguments_of(TrainArguments)
def train(
    dataset: Dataset | str | Path | None = None,
    config: TrainConfig | None = None,
    *,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    display: Display | Mode = "auto",
    loggers: Sequence[Logger] = (),
    ranks: Ranks | None = None,
    **settings: Any,
) -> TrainResult:
    """Train a model, or continue a run. On return, torch's threads and generators and the allocator are as before.

    Args:
        dataset: what ``stoker prepare`` wrote; None takes the dataset of the run that is resumed.
        config: settings; keyword settings override them.
        out: the new run directory, or a URL: the run is then in the local cache, and is uploaded after each checkpoint
            and at the end.
        resume: the run directory or URL to continue from its newest whole checkpoint, to the bit.
        display: "auto", "rich", "plain", "json", "quiet" or a :class:`Display`.
        loggers: also get the figures of every record; see :class:`stoker.Logger`.
        ranks: processes that train this run together, and all call this with the same arguments. None: all processes of
            ``torch.distributed``, if it was initialised. The first one writes, shows and logs (docs/ranks.md).
        settings: fields of :class:`TrainConfig`; with ``resume``, only those that do not change the numbers.
            ``batch_size`` may be "auto": the size that trains fastest on this machine
            (:func:`stoker.training.step_time.choose_batch_size`).

    Raises:
        ConfigError: settings cannot work, ``out`` exists, or ``resume`` is not a run.
        DataError: the dataset is missing or damaged.
        CheckpointError: no checkpoint is whole, it is of another model, or the disk is too small.
        StokerError: the loss is no longer finite.
        Interrupted: SIGTERM or Ctrl-C came; a checkpoint was written, unless it came twice or outside of steps.

    >>> from stoker.testing import make_dataset
    >>> data = make_dataset("data", rows=1000)
    >>> result = stoker.train(data, out="run", batch_size=64, epochs=1, display="quiet")
    >>> result.step, 0 < result.test["auc"] < 1
    (13, True)
    >>> stoker.train(resume="run", epochs=2, display="quiet").step
    26
    """
    ranks = find_ranks(ranks)
    place = local_run(out, resume) if is_first(ranks) else unshared(out, resume)
    with together(ranks), place as (out, resume, upload):
        if not isinstance(display, Display):
            checked("display", display, Mode)
        if wrong := [each for each in loggers if not hasattr(each, "log")]:
            raise ConfigError(f"loggers holds {wrong[0]!r}, which has no method log(step, values): see stoker.Logger.")
        start = open_run(dataset, config, out, resume, dict(settings), ranks)
        with process_settings(start.config) as models, Interrupted.by_signals(Path(str(out or resume))):
            return _train(start, Outputs(out, resume, display, loggers, upload), models)


def _train(start: Start, outputs: Outputs, models: list[RecModel]) -> TrainResult:
    """Train with checked arguments; append the model to ``models``."""
    data, config, batch_choice, defaults_note, ranks = start
    first_rank, averages = is_first(ranks), config.average_every is not None
    dividing = 1 if ranks is None or averages else ranks.size  # ranks that divide the rows
    device = resolve_device(config.device)
    optimizer = config.make_row_optimizer(Constant())
    placement = on_first(ranks, "plan the placement", lambda: place_run(config, data, optimizer, dividing))
    tables = config.stored_tables(data.schema)
    cores = {table.name for table in tables} - data.schema.num_embeddings.keys()  # every rank has them
    warnings = [check_memory(rank_tables(tables, dividing, cores), optimizer.state, device, placement)]
    stream = open_stream(config, data, optimizer, placement)
    if config.data_memory not in ("auto", "0") and not stream.resident:
        warnings.append(
            f"a data memory of {config.data_memory} is too small for the training rows, "
            f"{format_size(data.train.bytes)}: they are read from their files"
        )
    total = config.total_steps(len(stream))
    rank_placement = for_ranks(placement, tables, dividing)
    replica = Replica(config, data.schema, config.make_schedule(total), rank_placement, ranks=ranks)
    model = replica.model
    models.append(model)  # its files are closed if training fails
    resume, display = outputs.resume, outputs.display
    run = open_run_directory(str(resume if outputs.out is None else outputs.out), ranks)
    saved_steps = run.steps()
    dense_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.dense_parameters())
    steps = total - (saved_steps[-1] if saved_steps else 0)
    warnings.append(on_first(ranks, "check the disk", lambda: check_disk(
        run.path, tables, optimizer.state, dense_bytes, config, steps=steps, epoch=len(stream), there=len(saved_steps)
    )))  # fmt: skip
    values: dict[str, Any] = {"dataset": data.url or str(data.path.resolve()), "settings": config.to_dict()}
    if not type(model).__module__.startswith("stoker."):
        values["model_class"] = class_path(type(model))
    if averages and ranks is not None:
        values["ranks"] = ranks.size
    if resume is not None:
        values = {**same_ranks(run.read("config.json"), values), **values}
    elif batch_choice is not None:
        values["batch_size_chosen"] = vars(batch_choice)
    if resume is None:
        on_first(ranks, "make the run directory", lambda: RunDirectory.create(run.path, values))
    progress, lengths = LoopState(), [total]
    screen = Display() if not first_rank else make_display(display) if isinstance(display, str) else display
    with screen as shown, run.locked(), showing(lambda *work: shown.work(*work[:3], unit=work[3])):
        if resume is not None:
            lengths = lengths_of(run, len(stream))
            values["lengths"] = lengths if lengths[-1] == total else [*lengths, total]
            progress = restore(run, data, replica, stream, shown)
            run.write("config.json", values)
        again = progress.step < total and progress.loss_count > 0  # the next training record repeats the last one
        log = partial(RunLog, run, progress.step, tensorboard=config.tensorboard, loggers=outputs.loggers, again=again)
        timer = SaveTimer(config.checkpoint_minutes)
        state = TrainState(
            data=data, config=config, replica=replica, epoch_steps=len(stream), total_steps=total, run=run,
            feed=Feed(stream, total, model, config, progress=partial(shown.work, unit="batches")),
            log=log() if first_rank else NoLog(), stop=StopSignals(ranks, timer), shown=shown, upload=outputs.upload,
            progress=progress, timer=timer,
        )  # fmt: skip
        try:
            shown.start(progress.step, total, facts(model, data, config, total, placement, stream))
            if progress.step < total:
                data.train.check(partial(shown.work, "checking shards"))
            if config.matmul == "bf16" and device.type == "cpu" and not has_bf16_products():
                shown.note("this processor has no bfloat16 arithmetic: a float32 dense part would be faster")
            grouped = data.groups is not None
            ignored = without_effect(config, placement, total, len(model.tensor_train), grouped=grouped)
            doubts = of_both_towers(model, data)
            longer = stretched(config, lengths[-1], total)
            for note in (
                *chosen(batch_choice, config),
                *filter(None, [defaults_note, *warnings, state.log.missed, longer]),
                *ignored,
                *doubts,
            ):
                shown.note(note)
            try:
                fit(state)
            except (Diverged, checkpoint.NotFiniteError) as error:
                step = error.step if isinstance(error, Diverged) else progress.step
                raise explain(str(error), step, model, replica.dense, replica.schedule, config, run) from None
            return finish(state)
        finally:
            state.log.close()


def fit(state: TrainState) -> None:
    """Train until all steps are done or patience ends. This is the loop.

    Raises:
        Diverged: the loss is no longer finite.
        Interrupted: a signal came; a checkpoint was written.
    """
    with state.stop, state.stage_totals.recording(state.replica.model), closing(iterate(state.feed)) as batches:
        state.feed.hurry = state.stop.asked
        after_step(state)  # a resumed run may have been stopped before this
        while not state.finished:
            train_step(state, next(batches))
            after_step(state)
        with state.clock.paused():  # brings what was counted up to date
            pass


def train_step(state: TrainState, batch: Batch) -> None:
    """Train on a batch, whose rows are on the device; count it, and write a training record if one is due."""
    config, progress, clock = state.config, state.progress, state.clock
    loss = state.replica.step(batch)  # forward, backward, both optimizers
    progress.unread.append((progress.step, loss))
    progress.step += 1
    clock.counted["steps"] += 1
    clock.counted["examples"] += len(whole_of(batch))
    state.shown.step(progress.step)
    if state.replica.model.device.type == "cpu" or len(progress.unread) >= config.log_every:
        progress.read_losses()  # waits for a GPU, so losses are collected there
    soon = min(config.log_every, config.eval_every or state.epoch_steps)  # a run that patience ends has a record, too
    regular = progress.step % config.log_every == 0 or progress.step == soon
    if regular or progress.step >= state.total_steps:
        with clock.paused():
            _record(state, regular=regular)
    if clock.counted["steps"] == _WARM:
        clock.mark_now("warm", "rate")


def after_step(state: TrainState) -> None:
    """Do what is due: evaluate, choose hot or cold batches, save, stop. A resumed run begins with this.

    Raises:
        Interrupted: a signal came; a checkpoint was written.
    """
    config, step, stop = state.config, state.progress.step, state.stop
    due = step > 0 and (step % (config.eval_every or state.epoch_steps) == 0 or step >= state.total_steps)
    if not _average_copies(state, due=due):
        return
    improved = due and state.progress.evaluated < step and not stop.asked() and _evaluate(state)
    if state.feed.swapping and not state.finished and not stop.asked():
        begun = time.perf_counter()  # a test loss is part of this order's cost, so the clock counts it
        loss = swap_loss(state.replica.model, state.data, config, stop=stop.asked_together)
        seconds = time.perf_counter() - begun
        with state.clock.paused():
            if not stop.asked():
                state.record("schedule", **state.feed.swap(loss).to_dict(), seconds=seconds)
                state.swaps += 1
    wanted = (step % config.save_every == 0 if config.save_every else due) or improved or state.finished
    outdated = step == state.saved_moment[0]  # the checkpoint of this step lacks the evaluation or the swap
    if step > 0 and state.moment != state.saved_moment and (wanted or outdated or state.save_due or stop.asked()):
        with state.clock.paused():
            _save(state, interim=not wanted)
    if stop.number is not None:
        raise Interrupted(stop.number, state.newest, state.run.path)


def _record(state: TrainState, *, regular: bool) -> None:
    """Write a training record; the next one counts the same steps again unless this one is ``regular``."""
    progress, clock, replica = state.progress, state.clock, state.replica
    progress.read_losses()
    since, times = clock.since("record"), clock.since("rate")
    state.record(
        "train", loss=progress.loss_sum / progress.loss_count,
        samples_per_second=times["examples"] / times["seconds"], seconds_per_step=times["seconds"] / times["steps"],
        row_lr=replica.model.embeddings.optimizer.lr * replica.schedule.factor(progress.step - 1),
        dense_lr=replica.dense.param_groups[0]["lr"], **movement(since, times),
    )  # fmt: skip
    if not state.crowded and (said := crowded(times, replica.model.device)):
        state.crowded = True
        state.shown.note(said)
    if regular:
        progress.loss_sum, progress.loss_count = 0.0, 0
        clock.mark("record", "rate")


def _average_copies(state: TrainState, *, due: bool) -> bool:
    """Average the copies of ranks if it is time; return whether they are equal. Signals wait for that."""
    config, step = state.config, state.progress.step
    saves = config.save_every is not None and step % config.save_every == 0
    return state.replica.average(now=due or state.feed.swapping or state.finished or saves)


def _evaluate(state: TrainState) -> bool:
    """Evaluate on the validation rows, unless a signal comes; return True if the model is the best so far."""
    config, progress, stop = state.config, state.progress, state.stop
    valid = state.data.splits.get("valid")
    if not valid:
        return False
    with state.clock.paused():
        found = evaluate(
            state.replica.model, valid, rows=config.valid_rows, stop=stop.asked_together, k=config.ranking_k,
            catalogue=state.catalogue,
        )  # fmt: skip
        if stop.asked():
            return False
        metrics = finite(found, config.loss, config.metric)
        if progress.latest is None and (other := deciding(metrics, config.metric)) != config.metric:
            state.shown.note(undefined(config.metric, other))
        improved = progress.judge(metrics, config.metric)
        state.record("valid", **metrics)
    return improved


def _save(state: TrainState, *, interim: bool) -> None:
    """Write a checkpoint, delete old ones, and upload the run if it has a URL."""
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
    state.saved_moment = state.moment
    state.timer.saved(state.timer.now() - begin)
    run.prune(config.keep_last, progress.best_step)
    if (problem := state.upload()) is not None:
        state.shown.note(f"warning: {problem} The run goes on; the next checkpoint is uploaded with this one.")
