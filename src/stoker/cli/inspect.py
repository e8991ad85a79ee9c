"""``stoker inspect`` shows datasets, checkpoints, runs and exports. ``stoker doctor`` shows this machine."""

from __future__ import annotations

import json
import shutil
import textwrap
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from stoker.base.errors import CheckpointError, DataError, errors_as
from stoker.base.files import unseal
from stoker.base.progress import Bars
from stoker.base.remote import local_run
from stoker.base.units import EPOCHS, epoch_unit, format_size, plural
from stoker.cli.options import Json, alternatives, say, show_rows, show_table

_UPDATES = 20  # that are shown, the last ones


def inspect(
    path: Annotated[Path, typer.Argument(help="Dataset, checkpoint, run or export, or its URL.")],
    verify: bool = typer.Option(False, "--verify", help="Check the hash of every file, and every id."),
    as_json: Json = False,
) -> None:
    """Show what is in a dataset, a checkpoint, a run or an export.

    For a run, lists all checkpoints and shows the best one, or the newest if
    none was evaluated.

    \b
    stoker inspect data/criteo --verify
    stoker inspect runs/a
    stoker inspect runs/a/checkpoints/step_000001000 --json
    """
    path = local_run(path)
    kind = _kind(path)
    if kind == "dataset":
        from stoker.dataset.dataset import Dataset
        from stoker.dataset.summary import describe_dataset

        found = describe_dataset(dataset := Dataset(path))
        if verify:
            found["verified_files"] = dataset.verify()
    else:
        found = (_describe_export if kind == "export" else _describe_checkpoint)(path, verify=verify)
    if as_json:
        print(json.dumps(found, indent=1, allow_nan=False))
    else:
        {"dataset": _show_dataset, "checkpoint": _show_checkpoint, "export": _show_export}[kind](found)


def doctor(
    as_json: Json = False,
    measure: bool = typer.Option(True, help="Measure memory bandwidth and a training step, a few seconds."),
) -> None:
    """Show what this machine has, which kernels run, and what is missing.

    The exit code is 0 if training can run.

    \b
    stoker doctor
    stoker doctor --json --no-measure
    """
    from stoker.cli.machine import examine

    with Bars(quiet=as_json, at_once=True):
        found = examine(measure=measure)
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        _show_machine(found)
    if not found["ok"]:
        raise typer.Exit(1)


def _kind(path: Path) -> str:
    manifest = path / "manifest.json"
    if manifest.is_file():
        remedy = "Restore it from a copy, or make it again."
        with errors_as(DataError, f"{manifest} cannot be read", remedy, (OSError, ValueError)):
            values = unseal(manifest.read_bytes())
        kind = values.get("kind", "dataset") if isinstance(values, dict) else None
        if kind in ("dataset", "checkpoint", "export"):
            return str(kind)
        raise DataError(f"{manifest} is of kind {kind!r}; stoker inspect knows datasets, checkpoints and exports.")
    if (path / "checkpoints").is_dir() or (path / "config.json").is_file():
        return "checkpoint"
    if not path.exists():
        raise DataError(f"{path} does not exist. Give the directory of a dataset, a checkpoint or a run.")
    from stoker.dataset.manifest import LEFT_OVER, is_left_over

    if is_left_over(path):
        raise DataError(f"{path} is what {LEFT_OVER}")
    if path.is_dir() and any((path / name).is_dir() for name in (".work", "train", "valid", "vocab")):
        raise DataError(
            f"{path} looks like a dataset whose preparation was interrupted: it has no manifest.json. "
            "Run the same stoker prepare command again; finished parts are kept."
        )
    raise DataError(f"{path} is neither a dataset nor a checkpoint nor a run: it has no manifest.json or config.json.")


def _describe_checkpoint(path: Path, *, verify: bool) -> dict[str, Any]:
    from stoker.training.files.checkpoint import read_manifest
    from stoker.training.files.checkpoint import verify as verify_files
    from stoker.training.files.rundir import find_checkpoint, whole_checkpoints

    run, path = path, find_checkpoint(path)
    manifest = read_manifest(path)
    files = manifest["files"]
    tables = []
    for table in manifest["tables"]:
        own = {kind: table[kind] for kind in ("shards", "changed", "deleted") if kind in table}
        size = sum(int(files[item["file"]]["bytes"]) for items in own.values() for item in items)
        rows = {kind: sum(int(item["rows"]) for item in items) for kind, items in own.items() if kind != "shards"}
        tables.append({**{key: value for key, value in table.items() if key not in own}, **rows, "bytes": size})
    found = {
        "kind": "checkpoint",
        "path": str(path),
        "step": manifest["step"],
        "model": manifest["model"] or {"class": manifest["class"]},
        "row_optimizer": manifest.get("row_optimizer"),
        "dense_optimizer": (manifest["dense_optimizer"] or {}).get("kind"),
        "stream": manifest["stream"],
        "stoker_version": manifest["stoker_version"],
        "tables": tables,
        "files": len(files),
        "bytes": sum(int(entry["bytes"]) for entry in files.values()),
        "extra": manifest.get("extra", {}),
    }
    if "parent" in manifest:
        found["parent"] = manifest["parent"]
    if "trained" in manifest:
        found |= {"trained": manifest["trained"], "extra_state": sorted(manifest["extra_state"])}
        found["optimizers"] = {name: values["kind"] for name, values in manifest["optimizers"].items()}
    if run != path:
        found |= {"run": str(run), "checkpoints": _describe_run(run), "updates": _describe_updates(run)}
    if verify:
        try:
            found["verified_files"] = verify_files(path)
        except CheckpointError as error:
            raise CheckpointError(f"{error} {whole_checkpoints(path)}") from error
    return found


def _describe_export(path: Path, *, verify: bool) -> dict[str, Any]:
    from stoker.serve.scorer import Scorer

    columns = Scorer(path, check=verify).columns
    manifest = unseal((path / "manifest.json").read_bytes())
    files = manifest["files"].values()
    tables = [{"table": name, "rows": rows} for name, rows in manifest["features"]["num_embeddings"].items()]
    found = {"kind": "export", "path": str(path), "columns": columns, "tables": tables, **manifest["version"]}
    found |= {"run": manifest["source"], "rows": manifest["rows"], "model": manifest["model"]}
    found |= {"stoker_version": manifest["stoker"], "bytes": sum(int(each["bytes"]) for each in files)}
    return found | ({"verified_files": len(files)} if verify else {})


def _describe_updates(path: Path) -> list[dict[str, Any]]:
    """Return the record of each update of a run."""
    from stoker.training.files.rundir import RunDirectory

    if RunDirectory(path).head() is None:
        return []
    from stoker.live.journal import UpdateJournal

    return UpdateJournal(RunDirectory(path)).lines


def _describe_run(path: Path) -> list[dict[str, Any]]:
    """Return each checkpoint of a run by rising step; an unreadable one with its error."""
    from stoker.training.files.checkpoint import read_manifest
    from stoker.training.files.rundir import RunDirectory
    from stoker.training.scores.metrics import deciding

    run = RunDirectory(path)
    steps, best = run.steps(), run.best()
    listed = []
    for step in steps:
        place = run.checkpoint(step)
        entry: dict[str, Any] = {"path": str(place), "step": step, "best": place == best, "last": step == steps[-1]}
        try:
            manifest = read_manifest(place)
        except CheckpointError as error:
            listed.append({**entry, "error": str(error)})
            continue
        extra = manifest["extra"]
        latest = extra.get("progress", {}).get("latest")
        values = latest["valid"] if latest is not None and latest["step"] == step else {}
        metric = deciding(values, extra.get("settings", {}).get("metric", "auc"))
        size = sum(int(file["bytes"]) for file in manifest["files"].values())
        listed.append({**entry, "bytes": size, "metric": metric, "value": values.get(metric)})
    return listed


def _recipe(recipe: str | dict[str, str] | None) -> str:
    """Return name and preset of a recipe in words; older and generated datasets have a name only."""
    if not isinstance(recipe, dict):
        return recipe or "unknown"
    from stoker.prep.recipe import OWN_SCHEMA

    own = recipe["preset"] == OWN_SCHEMA
    return f"{recipe['name']}, a schema of your own" if own else f"{recipe['name']}, preset {recipe['preset']}"


def _line(name: str, value: object) -> None:
    say(f"{name:<16} {value}")


def _wrapped(first: str, text: str, indent: int, style: str = "") -> None:
    """Print a text behind ``first`` in lines of at most 100 columns; those after the first are indented."""
    width = min(100, shutil.get_terminal_size().columns)
    say(textwrap.fill(text, width, initial_indent=first, subsequent_indent=" " * indent, break_on_hyphens=False), style)


def _verified(found: dict[str, Any]) -> None:
    if "verified_files" in found:
        say(f"verified: checksums are right, {plural(found['verified_files'], 'file')}", "green")


def _show_dataset(found: dict[str, Any]) -> None:
    _line("dataset", found["path"])
    _line("recipe", _recipe(found["recipe"]))
    parts = found["hot_cold"]
    if parts and parts["stoker_version"]:
        words = f"stoker classify, Stoker {parts['stoker_version']}, by profile {parts['profile_hash'][:16]}"
        _line("made by", words)
        _line("from", parts["source"])
    if order := found["reordered"]:
        names = list(order["tables"])
        names = [*names[:3], f"{len(names) - 3} more tables"] if len(names) > 4 else names
        words = f"stoker reorder, Stoker {order['stoker_version']}, {order['settings']['method']}"
        _line("reordered", f"{words}, {alternatives(names, 'and')}, order {order['hash'][:16]}")
    _line("prepared by" if parts else "made by", f"{found['created_by']}, Stoker {found['stoker_version']}")
    _line("size", f"{format_size(found['bytes'])}, format {found['format_version']}")
    _line("schema", found["schema_hash"][:16])
    if found["quarantined"]:
        _line("bad lines", f"{found['quarantined']:,}, listed in quarantine.jsonl")
    for file, line in found["broken_files"].items():
        _line("truncated", f"{file} ends early at line {line:,}; the rest of it is missing")
    splits = [{"name": name, **split} for name, split in found["splits"].items()]
    columns = {
        "split": "{0[name]}", "rows": "{0[rows]:,}", "positives": "{0[positives]:,}", "share": "{0[share]:.1%}",
        "shards": "{0[shards]:,}", "size": "{0[bytes]:size}",
    }  # fmt: skip
    unknown = {"positives": None}
    show_rows("Splits", columns, [split | unknown if split.get("labelled") == 0 else split for split in splits])
    for split in splits:
        if "labelled" in split:
            absent = split["rows"] - split["labelled"]
            _line("no label", f"{absent:,} rows of {split['name']}: for stoker predict, not for training")
    if timed := [split for split in splits if "time" in split]:
        _show_times({split["name"]: split["time"] for split in timed})
    if found["keep"]:
        _line("kept columns", ", ".join(f"{name} ({kind})" for name, kind in found["keep"].items()))
    if groups := found["groups"]:
        cut = f"; {groups['cut']:,} have rows in several splits" if groups["cut"] else ", each whole in one split"
        grouped = [{**split, **split["groups"], "split": split["name"]} for split in splits if split.get("groups")]
        columns = {
            "split": "{0[split]}", "groups": "{0[count]:,}", "rows on average": "{0[mean]:.1f}",
            "at most": "{0[largest]:,}", "with a positive": "{0[share]:.1%}",
        }  # fmt: skip
        shares = ({**each, "share": each["with_positive"] / each["count"]} for each in grouped)
        show_rows(f"Groups by {groups['column']}: {groups['count']:,}{cut}", columns, shares)
    if parts:
        hot, cold = parts["hot"], parts["cold"]
        share = hot["rows"] / max(1, hot["rows"] + cold["rows"])
        counted = f"{hot['rows']:,} hot training rows ({share:.1%}), {cold['rows']:,} cold"
        _line("classified", f"{counted}; profile {parts['profile_hash'][:16]}")
    tables = [
        {
            **table, "largest": (table["top_counts"] or [None])[0],
            "longest": f" (up to {table['max_length']})" if table["max_length"] > 1 else "",
        }
        for table in found["tables"]
    ]  # fmt: skip
    columns = {
        "table": "{0[table]}{0[longest]}", "rows": "{0[rows]:,}", "accesses": "{0[accesses]:count}",
        "unknown": "{0[oov_share]:.1%}", "top 1 %": "{0[hot_1_percent]:.1%}", "top 10 %": "{0[hot_10_percent]:.1%}",
        "largest": "{0[largest]:count}",
    }  # fmt: skip
    show_rows(
        "Tables: training accesses, and the share that unknown values and the most popular rows take", columns, tables
    )
    if dense := found["dense"]:
        figures = {key: f"{{0[{key}]:.4g}}" for key in ("min", "mean", "max", "std")}
        columns = {"column": "{0[column]}", **figures, "zeros": "{0[zeros]:.1%}"}
        show_rows(f"Dense columns after their transforms, in {dense[0]['rows']:,} training rows", columns, dense)
    _verified(found)


def _show_times(ends: dict[str, dict[str, Any]]) -> None:
    """Show the first and the last time of each split; of numbers that look like times since 1970, the date, too."""
    values = [value for one in ends.values() for value in one.values()]
    numbers = all(isinstance(value, int | float) for value in values)
    unit = epoch_unit(min(values), max(values)) if numbers else None

    def shown(value: float | str) -> str:
        if unit is None or isinstance(value, str):
            return str(value)
        return f"{value} = {datetime.fromtimestamp(value // EPOCHS[unit], UTC):%Y-%m-%dT%H:%M:%SZ}"

    since = f", as {unit} since 1970" if unit is not None else ""
    rows = [[name, shown(one["first"]), shown(one["last"])] for name, one in ends.items()]
    show_table(f"Times of the rows{since}", ["split", "first", "last"], rows)


def _show_checkpoint(found: dict[str, Any]) -> None:
    if "run" in found:
        _show_run(found)
    _line("checkpoint", found["path"])
    _line("step", f"{found['step']:,}")
    if "parent" in found:
        _line("segment", f"only what changed since {found['parent']['name']}")
    _line("model", " ".join(f"{key}={value}" for key, value in found["model"].items()))
    _line("optimizers", _optimizers(found))
    if found.get("extra_state"):
        _line("extra state", ", ".join(found["extra_state"]))
    if found["stream"] and ("scheduler" in found["stream"] or "epoch" in found["stream"]):
        _line("data position", _position(found["stream"]))
    _line("size", f"{format_size(found['bytes'])} in {plural(found['files'], 'file')}")
    tables = [
        {**table, "path": ".".join(filter(None, (table.get("module"), table["name"])))} for table in found["tables"]
    ]
    columns = {
        "table": "{0[path]}", "rows": "{0[num_embeddings]:,}", "dim": "{0[embedding_dim]}", "type": "{0[dtype]}",
        "size with state": "{0[bytes]:size}",
    }  # fmt: skip
    show_rows("Tables", columns, tables)
    _verified(found)


def _show_export(found: dict[str, Any]) -> None:
    _line("export", found["path"])
    _line("of", f"{found['run']} at step {found['step']:,}, update {found.get('update', 0)}")
    _line("model", " ".join(f"{key}={value}" for key, value in found["model"].items()))
    _line("columns", ", ".join(found["columns"]))
    _line("size", f"{format_size(found['bytes'])}, rows as {found['rows']}")
    show_rows("Tables", {"table": "{0[table]}", "rows": "{0[rows]:,}"}, found["tables"])
    _verified(found)


def _optimizers(found: dict[str, Any]) -> str:
    if "trained" not in found:
        dense = str(found["dense_optimizer"]).lower().removeprefix("dense")  # as --dense-optimizer has it
        return f"rows {found['row_optimizer']['kind']}, dense {dense}"
    rules = {name: each["row_optimizer"] for name, each in found["trained"].items()}
    rows = {f"{name or 'rows'} {rule['kind']}" for name, rule in rules.items() if rule is not None}
    return ", ".join([*sorted(rows), *(f"{name} {kind}" for name, kind in found["optimizers"].items())])


def _position(stream: dict[str, Any]) -> str:
    if "scheduler" not in stream:
        return f"epoch {stream['epoch']}, batch {stream['position']:,} of {stream['batches']:,}"
    kinds = [(kind, stream[kind]) for kind in ("cold", "hot")]  # of a run on a classified dataset
    done = ", ".join(f"{kind} batch {one['position']:,} of {one['batches']:,}" for kind, one in kinds)
    return f"epoch {stream['scheduler']['epoch']}, {done}, at R({stream['scheduler']['rate']:g})"


def _show_run(found: dict[str, Any]) -> None:
    _line("run", found["run"])
    rows = []
    for entry in found["checkpoints"]:
        marks = [name for name in ("best", "last") if entry[name]] + ["shown below"] * (entry["path"] == found["path"])
        size = "unreadable" if "error" in entry else format_size(entry["bytes"])
        score = "-" if entry.get("value") is None else f"{entry['metric']} {entry['value']:.4f}"
        rows.append([f"{entry['step']:,}", size, score, ", ".join(marks)])
    show_table("Checkpoints", ["step", "size", "validation", ""], rows)
    updates = [{**each, "auc": each["before"].get("auc"), "names": ", ".join(log["name"] for log in each["logs"])}
               for each in found["updates"][-_UPDATES:]]  # fmt: skip
    if updates:
        columns = {"update": "{0[number]}", "rows": "{0[rows]:,}", "AUC before": "{0[auc]:.4f}", "logs": "{0[names]}"}
        show_rows("The last updates, and how good the model before each was on its rows", columns, updates)


def _show_machine(found: dict[str, Any]) -> None:
    system = found["system"]
    _line("system", f"{system['platform']}, Python {system['python']}")
    _line("processor", f"{system['cpu']}, {system['cores']} cores, {' '.join(system['simd']) or 'SIMD unknown'}")
    memory = [format_size(system[key]) if system[key] else "unknown" for key in ("memory", "memory_available")]
    _line("memory", f"{memory[0]}, {memory[1]} available, huge pages {system['huge_pages'] or 'unknown'}")
    _line("disk here", f"{format_size(system['folder']['free'])} free")
    for gpu in found["gpus"]:
        _line("GPU", f"{gpu['name']}, {format_size(gpu['memory'])}, {format_size(gpu['memory_free'])} free")
    if not found["gpus"]:
        _line("GPU", "none")
    versions = [f"{name} {version}" for name, version in found["packages"].items() if version]
    _wrapped(f"{'packages':<17}", ", ".join(versions), 17)
    for use, command in found["extras"].items():
        _line("not installed", f"{use}: {command}")
    for kind, backend in found["backends"].items():
        _line(f"tables on {kind}", f"{backend['name']}: {backend['why']}")
    if (kept := found["kernel_cache"]) is not None:
        _line("kernel cache", ", ".join(filter(None, (kept["path"], kept["why"]))))
    _line("torch.compile", found["compiler"]["path"] if found["compiler"]["usable"] else "no")
    threads = ", ".join(f"{name} {value}" for name, value in found["threads"].items() if value is not None)
    _line("threads", threads)
    if found["bandwidth"]:
        copy, gather = found["bandwidth"]["copy"], found["bandwidth"]["gather_64_byte_rows"]
        _line("memory rates", f"copy {copy / 1e9:.1f} GB/s, random 64-byte rows {gather / 1e9:.2f} GB/s")
    for text in found["advice"]:
        say(f"could be better: {text}", "yellow")
    for text in found["problems"]:
        say(f"problem: {text}", "red")
    for sentence in found["verdict"].split("; "):
        _wrapped("", sentence, 2, "green" if found["ok"] else "")
