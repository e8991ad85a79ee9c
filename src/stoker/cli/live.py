"""Commands that update runs: update, rollback, compact."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stoker.base.errors import ConfigError
from stoker.base.files import url_of
from stoker.base.progress import Bars
from stoker.base.units import format_size, plural
from stoker.cli.options import Data, Json, printed, say, show_grids, takes
from stoker.live.settings import POLL, UpdateSettings
from stoker.placement.budget import MemoryBudget
from stoker.training.settings import MachineConfig

if TYPE_CHECKING:
    from stoker.live.update import UpdateResult

Updated = Annotated[Path, typer.Argument(help="Run directory.")]


@takes(UpdateSettings, of_run=(MemoryBudget, MachineConfig))
def update(
    run: Annotated[Path, typer.Argument(help="Run directory, whose training has ended.")],
    logs: Annotated[list[str] | None, typer.Argument(help="New rows, in order of time: files or patterns.")] = None,
    watch: Path | None = typer.Option(None, help="Take each new file of this directory, until Ctrl-C."),
    stream: str | None = typer.Option(None, help="Take the messages of a topic: kafka://HOST:PORT/TOPIC."),
    poll: float = typer.Option(POLL, help="Seconds between two checks of that directory, or of messages of an update."),
    data: Data = None,
    *,
    settings: dict[str, Any],
    as_json: Json = False,
) -> None:
    """Train a run on new rows, and write only what changed.

    Prepares the new rows like those of the run. Scores them first, which shows
    how good the model is on rows it has not seen. Then trains on each row once.
    predict, evaluate and the next update then use the new model.

    The same command continues a killed update and skips logs that were used,
    so a script can simply repeat it.

    \b
    stoker update runs/a day_02.csv
    stoker update runs/a 'logs/day_*.csv.gz' --rate 0.5
    stoker update runs/a --watch logs --json
    stoker update runs/a --stream kafka://localhost:9092/clicks
    """
    if bool(logs) + (watch is not None) + (stream is not None) != 1:
        raise ConfigError("give either logs, a directory with --watch, or a topic with --stream.")
    if logs:
        from stoker.live.update import update as run_update

        with Bars(quiet=as_json) as bars:
            found = run_update(run, logs, data=data, progress=bars, **settings)
        _show(found, as_json)
        return
    from stoker.live.stream import stream as read_topic
    from stoker.live.watch import watch as watch_folder

    more: Any = {"poll": poll, "data": data, "progress": lambda *stage: bars(*stage), **settings}
    results = read_topic(run, stream, **more) if stream else watch_folder(run, watch or "", **more)
    source = (stream or str(watch)).partition("?")[0]  # what follows may have a password
    say(f"waiting for new rows of {source}, checked every {poll:g} s; Ctrl-C ends this", error=True)
    while True:
        with Bars(quiet=as_json) as bars:
            found = next(results)
        _show(found, as_json)


def _show(found: UpdateResult, as_json: bool) -> None:
    if printed(found.to_dict(), as_json):
        return
    for text in found.notes:
        say(f"note: {text}", "yellow")
    if not found.rows:
        say(found.summary())
        return
    show_grids(found.grids())
    share = f" ({found.bytes / found.whole_bytes:.1%} of a whole checkpoint)" if found.whole_bytes else ""
    say(f"update {found.number}: trained on {plural(found.rows, 'row')}, loss {found.loss:.4f}")
    say(f"{found.checkpoint}: {format_size(found.bytes)}{share}")


def rollback(
    run: Updated,
    to: int | None = typer.Option(None, help="Update to go back to; 0 is the model before all. (default: one back)"),
    as_json: Json = False,
) -> None:
    """Go back to an earlier update of a run.

    Discards the later updates. Their logs can be used again.

    \b
    stoker rollback runs/a
    stoker rollback runs/a --to 3
    """
    from stoker.live.history import rollback as go_back

    with Bars(quiet=as_json):
        found = go_back(run, to)
    if not printed({"run": url_of(run) or str(run), "checkpoint": str(found)}, as_json):
        say(f"{found.parent.parent} is at {found.name} now")


def compact(
    run: Updated,
    to: int | None = typer.Option(None, help="Last update to join. (default: the newest)"),
    as_json: Json = False,
) -> None:
    """Join the updates of a run to a whole checkpoint.

    Deletes the updates before it. The run can no longer go back to one of these.

    \b
    stoker compact runs/a
    stoker compact runs/a --to 30
    """
    from stoker.live.history import compact as join_updates

    with Bars(quiet=as_json):
        found = join_updates(run, to)
    record = {"checkpoint": str(found.checkpoint), "joined": found.joined, "freed": found.freed}
    if not printed({"run": url_of(run) or str(run), **record}, as_json):
        say(found.summary())
