"""The start of a run, new or resumed, and its end: the best model, its metrics, the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from stoker.base.device import resolve_device
from stoker.base.errors import CheckpointError, ConfigError, require
from stoker.base.picture import Grid, Shown
from stoker.base.units import plural, quoted
from stoker.dataset.dataset import Dataset
from stoker.dataset.split import BatchStream
from stoker.models import RecModel
from stoker.tables import Ranks
from stoker.training.config import TrainConfig
from stoker.training.defaults import by_rows, complete, left_out
from stoker.training.display import Display, Mode
from stoker.training.files import loading
from stoker.training.files.logs import Logger
from stoker.training.files.rundir import LOST, RunDirectory, Upload, open_dataset, own_dataset
from stoker.training.notes import ending, leak_hint
from stoker.training.progress import LoopState, TrainState
from stoker.training.ranks.first import on_first
from stoker.training.ranks.run import open_run_directory
from stoker.training.ranks.start import check_run, with_shards
from stoker.training.replica import Replica
from stoker.training.report.analysis import FILE, SECONDS, analyse
from stoker.training.scheduled import HotColdStream, batch_order
from stoker.training.scores.evaluation import check_dataset, evaluate, finite
from stoker.training.scores.metrics import RANKING, metric_grid
from stoker.training.settings import RESUMABLE
from stoker.training.step_time import BatchChoice, choose_batch_size
from stoker.training.tools.baseline import baseline_line, saved_baselines

_ANALYSED = 60  # seconds of training that pay for an analysis; stoker report makes it for shorter runs


@dataclass(frozen=True, kw_only=True, repr=False)
class TrainResult(Shown):
    """What :func:`stoker.train` returns; ``model`` has the rows of the best checkpoint.

    Close a model whose rows are in a spill file by ``model.embeddings.close()``, which deletes the file. So does
    dropping it, or the end of the process.
    """

    run: Path
    model: RecModel
    step: int  # batches trained
    epochs: float  # passes over the training rows
    stopped_early: bool  # by patience
    best_step: int | None  # None without validation rows
    valid: dict[str, float | None]  # metrics of the best checkpoint on the validation rows
    test: dict[str, float | None]  # and on the test rows
    samples_per_second: float | None  # of the training steps in this call; None if there were none

    def summary(self) -> str:
        """Return the model, its steps and its AUC."""
        known = ((split, metrics.get("auc")) for split, metrics in (("valid", self.valid), ("test", self.test)))
        scores = [f"{split} AUC {auc:.4f}" for split, auc in known if auc is not None]
        return ", ".join([f"{self.model.name} after {plural(self.step, 'step')}", *scores, f"run {self.run}"])

    def grids(self) -> tuple[Grid, ...]:
        """Return the metrics of the best checkpoint, a column for each split."""
        columns = {name: metrics for name, metrics in (("valid", self.valid), ("test", self.test)) if metrics}
        return (metric_grid(columns),) if columns else ()


@dataclass(frozen=True)
class TrainArguments(TrainConfig):
    """The arguments of :func:`stoker.train`."""

    dataset: Dataset | str | Path | None = None
    config: TrainConfig | None = None
    _: KW_ONLY
    out: str | Path | None = None
    resume: str | Path | None = None
    display: Display | Mode = "auto"
    loggers: Sequence[Logger] = ()
    ranks: Ranks | None = None
    if TYPE_CHECKING:
        batch_size: int | Literal["auto"] | None = None  # type: ignore[assignment]


class Start(NamedTuple):
    """The checked inputs of a run."""

    data: Dataset
    config: TrainConfig
    batch_choice: BatchChoice | None = None  # None: the batch size was not measured
    defaults_note: str = ""  # about the settings that depend on the number of rows
    ranks: Ranks | None = None  # processes that train together


class Outputs(NamedTuple):
    """The outputs of a run: its directory, the screen, loggers and a URL."""

    out: str | Path | None
    resume: str | Path | None
    display: Display | Mode
    loggers: Sequence[Logger]
    upload: Upload


def check_settings(config: TrainConfig | None, settings: Mapping[str, Any]) -> TrainConfig:
    """Return the settings of a new run; ConfigError for those that cannot work with any dataset."""
    _refuse_both_lengths(settings)
    whole = (config or TrainConfig()).replace(**settings)
    resolve_device(whole.device)
    return whole


def _refuse_both_lengths(settings: Mapping[str, Any]) -> None:
    if settings.get("epochs") is not None and settings.get("steps") is not None:
        raise ConfigError("give epochs or steps, not both: each says how long to train.", settings=("epochs", "steps"))


def open_run(
    dataset: Dataset | str | Path | None,
    config: TrainConfig | None,
    out: str | Path | None,
    resume: str | Path | None,
    settings: dict[str, Any],
    ranks: Ranks | None = None,
) -> Start:
    """Return the dataset and all settings; check them against each other before anything is written."""
    if (out is None) == (resume is None):
        raise ConfigError(
            "give either out, the run directory to make, or resume, the one to continue.", settings=("out", "resume")
        )
    auto = settings.get("batch_size") == "auto"
    if ranks is not None:
        if auto:
            raise ConfigError(
                "batch_size='auto' is measured in one process. Give the ranks a number.", settings=("batch_size",)
            )
        if resume is None:
            settings = with_shards(config, settings, ranks.size)
    if auto:  # a resumed run keeps the size that it chose
        del settings["batch_size"]
    if settings.get("tensorboard", config is not None and config.tensorboard):
        require("tensorboard", "writing TensorBoard events needs")
    if resume is None:
        if dataset is None:
            raise ConfigError("a new run needs a dataset. Make one with stoker prepare.")
        config = check_settings(config, settings)
        open_run_directory(str(out), ranks).check_new()
        data = open_dataset(dataset)
        config = config.replace(batch_order=batch_order(config, data))
    else:
        _refuse_both_lengths(settings)
        data, config = _reopen(open_run_directory(resume, ranks), dataset, config, settings)
    data.check_labelled("trained on")
    if not len(data.train):
        raise ConfigError(f"{data.path} has no training rows.")
    if config.patience is not None and not data.splits.get("valid"):
        raise ConfigError(
            f"{data.path} has no validation rows, which patience needs. Leave patience out, or prepare the data with a "
            "split that has some.",
            settings=("patience",),
        )
    valid = data.splits.get("valid")
    if config.metric in RANKING and valid and valid.groups is None:
        raise ConfigError(
            f"metric {config.metric!r} needs lists of rows, but {data.path} was prepared without group, so has none. "
            'Choose auc or log_loss, or name the column in the schema (group = "session") and prepare it again.',
            settings=("metric",),
        )
    _check_learnable(data, config)
    if resume is not None:
        return _met(Start(data, config, ranks=ranks))
    choice = choose_batch_size(data, config) if auto else None
    if choice is not None:
        config = config.replace(batch_size=choice.batch_size)
    whole = complete(config, data)
    return _met(Start(data, whole, choice, by_rows(config, whole, data), ranks))


def _check_learnable(data: Dataset, config: TrainConfig) -> None:
    """Raise :class:`ConfigError` if there is no id to embed, or if all training rows have one label."""
    if not data.schema.features:
        raise ConfigError(
            f"{data.path} has dense columns only, so a model would have no embedding table. Add a [[categorical]] "
            f"column to its schema and prepare it again, or fit simple models: stoker baseline {quoted(str(data.path))}"
        )
    rows, positives = len(data.train), data.manifest["splits"]["train"].get("positives")
    if positives in (0, rows) and config.loss != "in-batch":
        remedy = "Check the column or the rule of the label."
        if positives:
            remedy = (
                'Sample rows of label 0 ([negatives] in the schema, docs/prepare.md), or train with model "two-tower" '
                'and loss "in-batch", which takes the other items of a batch as negatives.'
            )
        raise ConfigError(
            f"{data.path} has {plural(rows, 'training row')}, none with label {int(not positives)}, so there is "
            f"nothing to learn with loss {config.loss!r}. {remedy}",
            settings=("model", "loss"),
        )


def _met(start: Start) -> Start:
    """Return a start after a check that all ranks have the same one."""
    if start.ranks is not None:
        check_run(start.config, start.data, start.ranks)
    return start


def _reopen(
    run: RunDirectory, dataset: Dataset | str | Path | None, config: TrainConfig | None, settings: dict[str, Any]
) -> tuple[Dataset, TrainConfig]:
    """Return the dataset and the settings of a run to resume."""
    resume, values = run.path, run.config()
    if (head := run.head()) is not None:
        raise ConfigError(
            f"{resume} was updated with newer rows ({head['checkpoint']}), which a resumed training would not know. Go "
            f"on with stoker update, train a new run, or take the updates back first: stoker rollback {quoted(resume)} "
            "--to 0"
        )
    before = TrainConfig.from_dict(values["settings"])
    if config is not None:
        given = {name: value for name, value in config.to_dict().items() if name not in left_out(config)}
        settings = {**given, **settings}
    elif settings.get("epochs") is not None:
        settings = {"steps": None, **settings}  # also where the run was started with steps
    if settings.get("batch_order") == "auto":  # resolved when the run began
        settings = {**settings, "batch_order": before.batch_order}
    wanted = before.replace(**settings)
    old, new = before.to_dict(), wanted.to_dict()
    changed = [name for name in old if old[name] != new[name] and name not in RESUMABLE]
    if changed:
        raise ConfigError(
            f"{resume} was started with {', '.join(f'{name}={old[name]!r}' for name in changed)}; a resumed "
            "run cannot change that. Leave it out, or start a new run. What may change: "
            f"{', '.join(sorted(RESUMABLE))}.",
            settings=(*changed, *RESUMABLE),
        )
    own = dataset or own_dataset(values, f"stoker train DATASET --resume {quoted(resume)}")
    return open_dataset(own), wanted


def lengths_of(run: RunDirectory, epoch: int) -> list[int]:
    """Return the steps that a run was to have at its start, and whenever it was resumed with others."""
    values = run.read("config.json")
    return values.get("lengths") or [TrainConfig.from_dict(values["settings"]).total_steps(epoch)]


def restore(
    run: RunDirectory, data: Dataset, replica: Replica, stream: BatchStream | HotColdStream, shown: Display
) -> LoopState:
    """Load the newest whole checkpoint into ``replica`` and ``stream``; without any checkpoint, start over."""
    config, model = replica.config, replica.model
    newest, problems = run.newest_whole()
    if newest is None:
        if problems:
            raise CheckpointError(f"{run.path} has no whole checkpoint to resume from. {' '.join(problems)} {LOST}")
        shown.note(f"{run.path} has no checkpoint yet; starting from the beginning.")
        return LoopState()
    for problem in problems:
        shown.note(f"warning: {problem} Its steps are trained again.")
    manifest = run.manifest(newest)
    check_dataset(data, model.spec, manifest["extra"].get("dataset"))
    _check_length(run, int(manifest["step"]), config, len(stream))
    loaded = loading.load(newest, model, replica.dense, stream)
    shown.note(f"resuming from {newest}{', the newest whole checkpoint' if problems else ''}")
    for step in run.steps():
        if step > loaded.step:  # damaged, else it would be the newest whole one
            aside = run.set_aside(step)
            shown.note(f"the damaged checkpoint is kept as {aside}; delete it when you do not need it")
    progress = LoopState(**loaded.manifest["extra"]["progress"])
    if progress.best is not None and progress.best["step"] not in run.steps():
        progress.best = next(iter(run.evaluated(config.metric)), None)
    run.prune(config.keep_last, progress.best_step)  # a killed run may not have done it
    return progress


def _check_length(run: RunDirectory, step: int, config: TrainConfig, epoch: int) -> None:
    if step <= config.total_steps(epoch):
        return
    passes = step / epoch
    asked, more = f"steps={config.steps}", f"steps={2 * step}"
    if config.steps is None:
        asked, more = f"epochs={config.epochs}", f"epochs={step // epoch + 1}"
    raise ConfigError(
        f"{run.path} has trained {plural(step, 'step')} ({passes:g} epoch{'' if passes == 1 else 's'}), so {asked} "
        f"leaves nothing to do. Give more, such as {more}.",
        settings=("epochs", "steps"),
    )


def finish(state: TrainState) -> TrainResult:
    """Say why training ended, load the best checkpoint, evaluate it on the test rows, write the report."""
    config, progress, model = state.config, state.progress, state.replica.model
    trained = state.clock.since("warm")
    if not trained["examples"]:  # the run was too short to leave its first steps out
        trained = state.clock.counted
    if said := ending(progress, config, state.total_steps, trained=trained["examples"] > 0):
        state.shown.note(said)
    best = _go_to_best(state)
    test: dict[str, float | None] = {}
    if split := state.data.splits.get("test"):
        test = finite(evaluate(
            model, split, lookahead=config.some_lookahead, k=config.ranking_k, catalogue=state.catalogue
        ))  # fmt: skip
        state.write(kind="test", step=progress.step if best is None else best["step"], **test)
    metrics, name = (test, "test") if test else ({} if best is None else best["valid"], "valid")
    if said := leak_hint(state.data, metrics, name):
        state.shown.note(f"warning: {said}")
    known = saved_baselines(state.data)
    if known is not None and (said := baseline_line(known, "test" if test else "valid")):
        state.shown.note(said)
    result = TrainResult(
        run=state.run.path,
        model=model,
        step=progress.step,
        epochs=progress.step / state.epoch_steps,
        stopped_early=progress.step < state.total_steps,
        best_step=None if best is None else int(best["step"]),
        valid={} if best is None else best["valid"],
        test=test,
        samples_per_second=trained["examples"] / trained["seconds"] if trained["examples"] else None,
    )
    report = {name: value for name, value in vars(result).items() if name not in ("run", "model")}
    state.run.write("report.json", report | ({} if known is None else {"baselines": known.to_dict()}))
    if on_first(state.replica.ranks, "see whether the run was long", lambda: trained["seconds"] > _ANALYSED):
        seconds, ranks = min(SECONDS, 0.02 * trained["seconds"]), state.replica.ranks
        figures = analyse(model, state.data, config, seconds=seconds, ranks=ranks)
        at = progress.step if best is None else int(best["step"])
        state.run.write(FILE, figures | {"checkpoint": state.run.checkpoint(at).name})
    return result


def _go_to_best(state: TrainState) -> dict[str, Any] | None:
    """Load the best whole checkpoint; warn of damaged ones and set them aside.

    Return its evaluation, ``{"step", "valid"}``; None if there was no evaluation.
    """
    config, progress, run, model = state.config, state.progress, state.run, state.replica.model
    best = progress.best
    while best is not None and best["step"] != progress.step:
        path = run.checkpoint(int(best["step"]))
        try:
            loading.load(path, model)
            break
        except CheckpointError as error:
            kept = f" It is kept as {aside}." if (aside := run.set_aside(int(best["step"]))) else ""
            warning = f"warning: {error} This was the best checkpoint; the next best replaces it.{kept}"
            state.shown.note(warning)
        best = next(iter(run.evaluated(config.metric)), None)
        if best is None:
            found = evaluate(
                model, state.data.valid, rows=config.valid_rows, lookahead=config.some_lookahead, k=config.ranking_k,
                catalogue=state.catalogue,
            )  # fmt: skip
            return {"step": progress.step, "valid": finite(found)}
    return best
