"""A model that serves without its dataset: a directory of mapped rows, vocabularies, features and the dense part.

::

    OUT/manifest.json           written last: model, schema, sizes and sha256 of all files
    OUT/rows/0.rows             the rows of all tables of one width, in their order
    OUT/dense.safetensors       the dense part, and the cores of tensor trains
    OUT/vocab/item.arrow        values with their ids, by rising hash
    OUT/raw_ids/item.safetensors  of a table that grows: its rows with their raw ids
    OUT/features/               fitted features and the state of window features
    OUT/items.arrow             of a two-tower model: its items and their vectors
    OUT/dense.pt2, dense.onnx   on request
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from stoker.base.errors import CheckpointError, ConfigError, DependencyError, errors_as
from stoker.base.files import atomic_file, canonical_json, check_target, exchange, seal, sync_folder, unseal
from stoker.base.picture import Shown
from stoker.base.progress import Counted
from stoker.base.settings import with_arguments_of
from stoker.base.units import format_size, listed
from stoker.base.version import __version__
from stoker.dataset.batch import Batch
from stoker.dataset.dataset import Dataset
from stoker.dataset.manifest import describe_file
from stoker.dataset.spec import FeatureSpec
from stoker.models import MODELS, RecModel, TwoTower
from stoker.optim import SGD
from stoker.prep.features.past import Past
from stoker.prep.features.store import load_features
from stoker.prep.fit.dense import DenseFit
from stoker.prep.like import FEATURES, Like
from stoker.prep.requests import FittedSchema, Ids, RowEncoder, write_mapped
from stoker.prep.schema import Schema
from stoker.serve.items import ITEMS, Items
from stoker.serve.settings import ExportSettings
from stoker.tables.exported import Exported, quantize, width_of
from stoker.tables.growing.ids import merged
from stoker.tables.storage import Rows
from stoker.training.files.checkpoint import DENSE, Link, read_manifest, reading, remove_folder, verify, write_tensors
from stoker.training.files.loading import saved_model
from stoker.training.files.rundir import find_checkpoint, kind_of, newest_rows, trained_rows
from stoker.training.files.segments import SavedTable
from stoker.training.scores.catalogue import Catalogue
from stoker.training.scores.evaluation import check_dataset

FORMAT_VERSION = 2  # with tables that grow; 1 without
_CORE = "core:"  # prefix of the cores of tensor trains among the dense tensors
_REMEDY = "Pass the dataset: stoker.export(run, out, data=...)"


@dataclass(frozen=True, kw_only=True, repr=False)
class Export(Shown):
    """What :func:`export` returns."""

    path: Path
    rows: str
    row_bytes: int  # of all rows
    fp32_bytes: int  # of all rows in float32

    def summary(self) -> str:
        """Return the directory, and the size of its rows."""
        share = f", {self.row_bytes / self.fp32_bytes:.3f} of fp32" if self.fp32_bytes else ""
        return f"{self.path}: rows as {self.rows}, {format_size(self.row_bytes)}{share}"


@dataclass(frozen=True)
class ExportArguments(ExportSettings):
    """The arguments of :func:`export`."""

    run: str | Path
    out: str | Path
    _: KW_ONLY
    data: str | Path | None = None


@with_arguments_of(ExportArguments)
def export(run: str | Path, out: str | Path, **given: Any) -> Export:
    """Write the model of a run to a directory that serves without the run and its dataset.

    Rows are mapped when they are needed, so a process starts quickly and takes the memory of the rows that it touches.
    Cores of tensor trains are kept as trained. The directory appears whole, or not at all.

    Args:
        run: a run directory or a checkpoint.
        out: the directory.
        rows: "fp32"; or smaller and within rounding: "bf16", "int8", "int4", the last two with a scale and an offset
            a row.
        data: the dataset of the run, if it was moved.
        pt2: write the dense part as a ``torch.export`` program, too.
        onnx: and as an ONNX model.
        overwrite: replace an earlier export.

    Raises:
        ConfigError: ``out`` exists, or rows cannot be made one by one.
        CheckpointError: a file is missing or damaged, or the disk is full.
        DependencyError: ``onnx`` needs packages that are not installed.

    >>> from stoker.testing import make_daily_run
    >>> log, _ = make_daily_run("run")
    >>> stoker.export("run", "served", rows="int8").rows
    'int8'
    >>> stoker.Scorer("served").score(log.select("user", "item")).shape
    (300,)
    """
    asked = ExportArguments(run, out, **given)
    rows, data = asked.rows, asked.data
    if asked.onnx and find_spec("onnxscript") is None:
        raise DependencyError("ONNX needs onnx and onnxscript. Run: pip install 'stoker[onnx]'")
    target = Path(out)
    check_target(target)
    if target.exists() and not (asked.overwrite and is_export(target)):
        more = ", or pass overwrite=True." if is_export(target) else ": it is not an export."
        raise ConfigError(f"{target} exists. Choose another name{more}", settings=("out", "overwrite"))
    path = find_checkpoint(run)
    manifest = read_manifest(path)
    verify(path)
    spec = FeatureSpec.from_dict(manifest["features"])
    float32 = {"tensor trains": manifest["model"].get("tensor_train"), "tables that grow": spec.grow}
    for what, names in float32.items():
        if rows == "bf16" and names:
            raise ConfigError(
                f"rows='bf16' does not work with {what} ({listed(list(names))}), which are float32. Choose fp32, int8 "
                "or int4.", settings=("rows",),
            )  # fmt: skip
    like = Like(Path(newest_rows(path, _REMEDY, data)))
    check_dataset(like.data, spec, manifest["extra"].get("dataset"), continued=True)
    fitted = FittedSchema.of(like)
    RowEncoder(fitted)  # refuses features that change the number of rows
    with _written(target) as made, reading(path, manifest) as links:
        groups, sizes = _write_rows(made, links, spec, rows)
        (made / "vocab").mkdir()
        for name, known in fitted.ids.items():
            known.write(made / "vocab" / f"{name}.arrow")
        clock = _write_raw_ids(made, links)
        like.copy(f"{FEATURES}/", made)
        config = {**manifest["model"], "dtype": "bfloat16" if rows == "bf16" else "float32"}
        description = {
            "kind": "export", "format_version": FORMAT_VERSION if clock else 1, "clock": clock, "stoker": __version__,
            "rows": rows, "groups": groups,
            "model": config, "features": manifest["features"], "schema": like.data.manifest["schema"],
            "notation": like.schema.notation, "times": like.times,
            "dense_stats": like.data.manifest["dense_stats"], "history": sorted(fitted.state), "source": str(run),
            "version": version_of(manifest),
        }  # fmt: skip
        _write_manifest(made, {**description, "files": _files(made)})
        two_tower = issubclass(MODELS[config["model"]], TwoTower)
        if two_tower:
            _write_items(made, path, None if data is None else Dataset(data))
        if asked.pt2 or asked.onnx:
            _write_programs(made, pt2=asked.pt2, onnx=asked.onnx)
        if two_tower or asked.pt2 or asked.onnx:
            _write_manifest(made, {**description, "files": _files(made)})
    return Export(path=target, rows=rows, row_bytes=sizes[0], fp32_bytes=sizes[1])


@contextmanager
def _written(target: Path) -> Iterator[Path]:
    """Yield a directory that gets the name of the target at the end of the block, or is deleted."""
    made = target.with_name(target.name + ".tmp")
    remove_folder(made)
    try:
        with errors_as(CheckpointError, f"{target} cannot be written", "Free some space, or choose another disk."):
            made.mkdir(parents=True)
            yield made
            sync_folder(made)
            exchange(made, target, target.with_name(target.name + ".tmp-old"), remove_folder)
    finally:
        remove_folder(made)


def _files(folder: Path) -> dict[str, Any]:
    return {
        path.relative_to(folder).as_posix(): describe_file(path)
        for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "manifest.json"
    }  # fmt: skip


def _write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    with atomic_file(folder / "manifest.json") as file:
        file.write(canonical_json(seal(manifest)).encode() + b"\n")


def _write_rows(
    out: Path, links: Sequence[Link], spec: FeatureSpec, rows: str
) -> tuple[list[dict[str, Any]], tuple[int, int]]:
    """Write the rows of all tables, a file for each width and pooling, and the dense part with all cores."""
    path, manifest, _ = links[-1]
    kind = MODELS[saved_model(path, manifest)]
    entries = {entry["name"]: entry for entry in manifest["tables"]}
    by_group: dict[Any, list[str]] = {}
    dims = {}
    for table in kind.tables_from(spec, manifest["model"]):
        if table.name in entries:
            dims[table.name] = table.embedding_dim
            by_group.setdefault((table.embedding_dim, table.pooling), []).append(table.name)
    (out / "rows").mkdir()
    groups, written, plain = [], 0, 0
    counted = Counted("writing rows", sum(int(entries[name]["num_embeddings"]) for name in dims), "rows")
    for number, names in enumerate(by_group.values()):
        file = out / "rows" / f"{number}.rows"
        with atomic_file(file) as stream:
            for name in names:
                for _, chunk in SavedTable(links, entries[name]).chunks():
                    stream.write(_encoded(chunk.weight, rows))
                    counted.add(len(chunk.weight))
        count = file.stat().st_size // width_of(rows, dims[names[0]])
        written, plain = written + file.stat().st_size, plain + 4 * count * dims[names[0]]
        groups.append({"file": f"rows/{file.name}", "tables": names})
    with safe_open(path / DENSE, framework="pt") as tensors:
        dense = {name: tensors.get_tensor(name) for name in tensors.keys() if name.startswith("model.")}  # noqa: SIM118
    for name in entries.keys() - dims.keys():
        for start, chunk in SavedTable(links, entries[name]).chunks():
            dense[f"{_CORE}{start}:{name}"] = chunk.weight.contiguous()
    write_tensors(dense, out / DENSE)
    return groups, (written, plain)


def _write_raw_ids(out: Path, links: Sequence[Link]) -> list[int]:
    """Write which raw ids have which rows, a file for each table that grows; return the time of the last step."""
    found = []
    for entry in links[-1].manifest["tables"]:
        if "clock" in entry:
            found = entry["clock"]
            (out / "raw_ids").mkdir(exist_ok=True)
            parts = [
                torch.empty(0, 5, dtype=torch.int64),
                *merged(SavedTable(links, entry).raw_ids(waiting=False), 2**20),
            ]
            write_tensors({"entries": torch.cat(parts)}, out / "raw_ids" / f"{entry['name']}.safetensors")
    return found


def _encoded(weight: torch.Tensor, rows: str) -> bytes:
    if rows == "bf16":
        return weight.to(torch.bfloat16).view(torch.int16).numpy().tobytes()
    plain = weight.float().numpy()
    return plain.tobytes() if rows == "fp32" else quantize(plain, int(rows[3:])).tobytes()


def _write_items(out: Path, checkpoint: Path, data: Dataset | None) -> None:
    model, fitted, _ = open_export(out)
    assert isinstance(model, TwoTower)
    if model.spec.features[model.identity].table in fitted.ids:  # else their values are not known
        items = Items(model, fitted, Catalogue(model, *trained_rows(checkpoint, data, _REMEDY)))
        write_mapped(out / ITEMS, items.table(model))


def _write_programs(out: Path, *, pt2: bool, onnx: bool) -> None:
    model, _, _ = open_export(out)
    batch = Batch(
        dense=torch.zeros(2, len(model.spec.dense)), ids=torch.zeros(2 * len(model.spec.features), dtype=torch.int64),
        offsets=torch.arange(2 * len(model.spec.features) + 1),
    )  # fmt: skip
    if pt2:
        torch.export.save(model.export_dense(batch), str(out / "dense.pt2"))
    if onnx:
        model.matmul = "fp32"  # runtimes have no products of bfloat16 on a CPU
        program = model.export_dense(batch)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's, about its own code
            made = torch.onnx.export(program, dynamo=True, verbose=False)
        assert made is not None
        made.save(str(out / "dense.onnx"))


def version_of(manifest: Mapping[str, Any]) -> dict[str, int]:
    """Return what names the model of a checkpoint in answers."""
    return {"update": int(manifest["extra"].get("update", {}).get("number", 0)), "step": int(manifest["step"])}


def is_export(path: str | Path) -> bool:
    """Return True if a directory was written by :func:`export`."""
    return kind_of(Path(path)) == "an export"


def open_export(path: str | Path, *, check: bool = False) -> tuple[RecModel, FittedSchema, dict[str, Any]]:
    """Return the model, what its rows are encoded by, and the manifest.

    ``check``: read all files and compare their sha256; else only their sizes, and features.
    """
    path = Path(path)
    with errors_as(CheckpointError, f"{path} is not an export", "Export the run again.", (OSError, ValueError)):
        manifest = unseal((path / "manifest.json").read_bytes())
    if int(manifest["format_version"]) > FORMAT_VERSION:
        raise CheckpointError(f"{path} has export format {manifest['format_version']}. Update Stoker.")
    if not {"notation", "times"} <= manifest.keys():
        raise CheckpointError(f"{path} was written by an unreleased version of Stoker. Export the run again.")
    for name, entry in manifest["files"].items():
        _check_file(path / name, entry, whole=check or not name.startswith(("rows/", "vocab/", ITEMS)))
    spec = FeatureSpec.from_dict(manifest["features"])
    names = [name for group in manifest["groups"] for name in group["tables"]]
    model = MODELS[manifest["model"]["model"]].from_config(
        spec, manifest["model"], optimizer=SGD(lr=1.0), placement=dict.fromkeys(names, Exported(str(path)))
    )
    if model.embeddings.raw is not None:
        entries = {name: load_file(path / "raw_ids" / f"{name}.safetensors").values() for name in spec.grow}
        model.embeddings.raw.load(manifest["clock"], {(name, False): parts for name, parts in entries.items()})
    tensors = load_file(path / DENSE)
    with torch.no_grad():
        for name, value in model.dense_tensors():
            value.copy_(tensors[f"model.{name}"])
    for name, value in tensors.items():
        if name.startswith(_CORE):
            _, start, core = name.split(":", 2)
            model.embeddings.write(core, int(start), Rows(value, {}))
    schema = replace(Schema.from_dict(manifest["schema"], where=f"{path}: schema"), notation=manifest["notation"])
    fitted_tables = load_features(path / FEATURES)[1] if schema.feature else {}
    ids = {file.stem: Ids.mapped(file) for file in sorted((path / "vocab").glob("*.arrow"))}
    state = {one.name: fitted_tables[one.name].table for one in schema.feature
             if isinstance(one, Past) and one.name in manifest["history"]}  # fmt: skip
    fitted = FittedSchema(
        schema=schema, dense=[DenseFit(**manifest["dense_stats"][column.name]) for column in schema.dense],
        ids=ids, fitted_tables=fitted_tables, state=state, times=manifest["times"],
    )  # fmt: skip
    return model.eval(), fitted, manifest


def _check_file(path: Path, entry: Mapping[str, Any], *, whole: bool) -> None:
    size = path.stat().st_size if path.is_file() else -1
    if size == int(entry["bytes"]) and (not whole or describe_file(path) == dict(entry)):
        return
    problem = "is missing" if size < 0 else f"was altered: {size:,} bytes, {int(entry['bytes']):,} were written"
    raise CheckpointError(f"{path} {problem}, or its sha256 differs from the manifest's. Copy or export it again.")
