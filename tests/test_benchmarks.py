"""The benchmarks' own promises: verdicts, exit codes, and no time without a right result."""

from __future__ import annotations

import json
import mmap
import subprocess
import sys
import textwrap
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import fork_contestants

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import harness, rounds
from benchmarks.__main__ import all_bars, main
from benchmarks.accuracy import auc
from benchmarks.harness import (
    Bar,
    Crashed,
    NotRun,
    Outcome,
    Run,
    Table,
    WrongResult,
    current_name,
    data_files,
    exit_code,
    judge,
    known_short,
    latest,
    provenance,
    write_results,
)
from benchmarks.peers.placed_tools import RankIds, drop_steps, filled_ids, load_trace
from benchmarks.placed_workload import FileTrace, check_close, check_same_losses, large_rows
from benchmarks.prepare import bijective, split_rows
from benchmarks.rounds import Contestant, Timings, compare, play
from benchmarks.workload import MATRIX, EmbeddingWorkload, Shape, check_rows, kaggle_like

ROOT = Path(__file__).parents[1]
QUICK = Run.of(quick=True, rounds=2)


def made(value: float = 2.5, *, error: Exception | None = None, **settings: Any) -> Bar:
    def run(_: Run) -> Outcome:
        if error is not None:
            raise error
        return Outcome(value=value, tables=[Table(title="t", columns=["a", "b"], rows=[["x", "1.25 ms"]])])

    return Bar(**{"name": "bar", "group": "bars", "title": "a bar", "must": 2.0, "run": run, **settings})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bar", "line", "code"),
    [
        (made(2.0), "bar: 2.00x (must 2x) ok", 0),
        (made(1.99), "bar: 1.99x (must 2x) short", 1),
        (made(float("nan")), "bar: nanx (must 2x) short", 1),
        (made(0.5, must=1.0, at_most=True, unit=" %"), "bar: 0.50 % (must at most 1 %) ok", 0),
        (made(1.5, must=1.0, at_most=True, unit=" %"), "bar: 1.50 % (must at most 1 %) short", 1),
        (made(error=NotRun("make peers")), "bar: not run: make peers (must 2x) not run", 2),
        (made(error=WrongResult("off by one")), "bar: wrong results, no time reported (must 2x) short", 1),
        (
            made(error=ZeroDivisionError("by 0")),
            "bar: crashed, no time reported: ZeroDivisionError: by 0 (must 2x) crashed",
            1,
        ),
        (
            made(error=Crashed("peer ended with signal 11:\nlog")),
            "bar: crashed, no time reported: peer ended with signal 11: (must 2x) crashed",
            1,
        ),
    ],
)
def test_last_line_and_exit_code(
    bar: Bar, line: str, code: int, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["bar", "--quick", "--out", str(tmp_path)], known=[bar]) == code
    said = capsys.readouterr().out
    assert said.rstrip().splitlines()[-1] == line
    if "no time" in line:
        assert "1.25 ms" not in said
    assert ("WRONG RESULTS" in said) == ("wrong results" in line)
    assert ("CRASHED" in said) == ("crashed" in line)
    (written,) = tmp_path.glob("bar_*.md")
    assert line in written.read_text()
    kept = json.loads(written.with_suffix(".json").read_text())
    assert kept["bars"][0]["name"] == "bar"
    assert kept["quick"] is True
    assert kept["machine"]["cores"] >= 1
    assert kept["bars"][0]["rounds"] == 2
    assert kept["command"]
    assert datetime.now(UTC) - datetime.fromisoformat(kept["time"]) < timedelta(minutes=5)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    assert (kept["commit"] or "") == head


def test_a_rerun_writes_new_files_and_names_those_it_supersedes(tmp_path: Path) -> None:
    machine = {"slug": "m", "versions": {"python": "3"}}
    kept: dict[str, str] = {}
    stamps = []
    for value in (3.0, 2.5, 1.0):
        result = judge(made(value), QUICK)
        markdown = write_results([result], tmp_path, "bar", machine, quick=False)
        for path, text in kept.items():
            assert (tmp_path / path).read_text() == text  # nothing is overwritten
        kept = {path.name: path.read_text() for path in tmp_path.iterdir()}
        stamps.append(markdown.with_suffix(".json").name)
    assert len(kept) == 6
    found = [json.loads(kept[stamp])["supersedes"] for stamp in stamps]
    assert found == [[], stamps[:1], stamps[1:2]]
    assert f"supersedes: {stamps[1]}" in kept[stamps[2].replace(".json", ".md")]
    assert latest(tmp_path)["m", "bar"][2]["value"] == 1.0
    # What did not run, and a quick run, take nobody's place.
    write_results([judge(made(error=NotRun("x")), QUICK)], tmp_path, "bar", machine, quick=False)
    write_results([judge(made(9.0), QUICK)], tmp_path, "bar", machine, quick=True)
    assert latest(tmp_path)["m", "bar"][2]["value"] == 1.0
    assert latest(tmp_path / "none") == {}


def test_only_a_regression_fails_a_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(harness, "known_short", lambda: {"bar": "memory is slow"})
    assert main(["bar"], known=[made(1.0)]) == 0
    assert capsys.readouterr().out.rstrip().endswith("bar: 1.00x (must 2x) short, known: memory is slow")
    assert main(["bar"], known=[made(3.0)]) == 0
    assert capsys.readouterr().out.rstrip().endswith("bar: 3.00x (must 2x) ok; delete it from known_short.toml")
    for error in (WrongResult("off by one"), Crashed("gone")):
        assert main(["bar"], known=[made(error=error)]) == 1
    assert main(["other"], known=[made(1.0, name="other")]) == 1


def test_bars_known_to_be_short_are_those_whose_newest_result_is() -> None:
    bars = {bar.name: bar for bar in all_bars()}
    reasons = known_short()
    assert set(reasons) <= set(bars)
    assert all(len(reason) > 20 for reason in reasons.values())
    newest: dict[str, tuple[str, str]] = {}
    for _, made, bar in latest(ROOT / "benchmarks" / "results").values():
        name = current_name(bar)
        status = bar["status"]
        if status == "ok" and name in bars and bars[name].must != bar["must"]:  # judged by another bar
            status = "short" if (bar["value"] > bars[name].must) == bars[name].at_most else "ok"
        newest[name] = max(newest.get(name, ("", "")), (made.get("time", made["date"]), status))
    assert not set(bars) - set(newest), "a bar without a result: run it, and keep what it wrote"
    failed = {name for name, (_, status) in newest.items() if status in ("short", "wrong", "crashed")}
    assert failed & set(bars) <= set(reasons), "list what is short with its reason, or measure again"
    assert not [name for name in reasons if newest.get(name, ("", "short"))[1] == "ok"], "delete what is ok"


@pytest.mark.slow
def test_peak_memory_is_the_programs_own(scripts: Path) -> None:
    """``ru_maxrss`` survives exec: a small child of a large parent would report the large parent's."""
    from benchmarks.peers.worker_tools import peak_memory

    tools = Path(rounds.__file__).parent / "peers"
    script(
        scripts,
        "small.py",
        f"""
        import resource
        sys.path.insert(0, {str(tools)!r})
        from worker_tools import peak_memory
        small = peak_memory()
        held = bytearray(b"x") * 150_000_000
        del held
        largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({{"small": small, "peak": peak_memory(), "ru_maxrss": largest}}))
        """,
    )
    fat = np.ones(600_000_000, np.uint8)
    assert peak_memory() > fat.nbytes
    (found,) = rounds.work(Contestant(label="small", script="small.py"), {})
    assert found["small"] < 100_000_000
    assert 150_000_000 < found["peak"] < 250_000_000
    assert found["ru_maxrss"] > fat.nbytes  # why it is not used


def test_a_short_value_is_never_rounded_into_an_ok() -> None:
    assert judge(made(1.999), QUICK).line == "bar: 2.00x (must 2x) short"


def test_exit_code_of_several() -> None:
    ok, short = judge(made(3.0), QUICK), judge(made(1.0), QUICK)
    absent = judge(made(error=NotRun("make peers")), QUICK)
    assert exit_code([ok, ok]) == 0
    assert exit_code([ok, absent]) == 2
    assert exit_code([ok, absent, short]) == 1
    assert exit_code([]) == 1


def test_listing_and_unknown_names(capsys: pytest.CaptureFixture[str]) -> None:
    bars = all_bars()
    assert len({bar.name for bar in bars}) == len(bars)
    assert main([]) == 0
    listed = capsys.readouterr().out
    assert all(bar.name in listed for bar in bars)
    with pytest.raises(SystemExit, match="unknown"):
        main(["no-such-bar"])


def script(folder: Path, name: str, body: str) -> None:
    folder.joinpath(name).write_text("import json, sys\nconfig = json.loads(sys.argv[1])\n" + textwrap.dedent(body))


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(rounds, "SCRIPTS", tmp_path)
    monkeypatch.setattr(rounds, "PEERS", tmp_path / "peers")
    return tmp_path


GOOD = """
    print("chatter of a library")
    print(json.dumps({"event": "checked", "case": "c", "value": config["value"]}))
    print(json.dumps({"event": "timed", "case": "c", "seconds": 0.5}))
"""


def accept(label: str, line: dict[str, Any], results: Path) -> None:
    if line["value"] != 1:
        raise WrongResult(label)


def test_rounds_interleave_and_start_in_turn(scripts: Path) -> None:
    script(scripts, "good.py", GOOD)
    seen = []

    def check(label: str, line: dict[str, Any], results: Path) -> None:
        seen.append(label)
        assert results.is_dir()

    pair = [Contestant(label=label, script="good.py", options={"value": 1}) for label in "ab"]
    timings = play(pair, {}, QUICK, check)
    assert seen == ["a", "b", "b", "a"]
    assert timings.seconds == {"a": {"c": [0.5, 0.5]}, "b": {"c": [0.5, 0.5]}}


def test_a_wrong_result_hides_every_time(scripts: Path) -> None:
    script(scripts, "good.py", GOOD)
    pair = [Contestant(label=label, script="good.py", options={"value": v}) for label, v in (("a", 1), ("b", 2))]
    with pytest.raises(WrongResult, match="b"):
        play(pair, {}, QUICK, accept)


def test_data_sets_that_are_not_here_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_DATA", str(tmp_path))
    (tmp_path / "clicks").mkdir()
    (tmp_path / "clicks" / "day.parquet").touch()
    assert data_files("clicks/day.parquet") == [tmp_path / "clicks" / "day.parquet"]
    with pytest.raises(NotRun, match=r"^clicks/night\.parquet not found \(set STOKER_DATA"):
        data_files("clicks/day.parquet", "clicks/night.parquet")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('print(json.dumps({"event": "timed", "case": "c", "seconds": 1}))', "without a check"),
        ('print("{}"); raise SystemExit(3)', "exit code 3"),
        ("pass", "exit code 0"),
        ('raise ValueError("what went wrong")', "what went wrong"),
        ("import os; os.abort()", "bad ended with signal 6"),
    ],
)
def test_a_contestant_that_skips_its_check_or_dies(scripts: Path, body: str, message: str) -> None:
    script(scripts, "bad.py", body)
    with pytest.raises(WrongResult if message == "without a check" else Crashed, match=message):
        play([Contestant(label="bad", script="bad.py")], {}, QUICK, accept)


def test_a_missing_peer_is_not_run(scripts: Path) -> None:
    script(scripts, "good.py", GOOD)
    absent = Contestant(label="peer", script="good.py", environment="absent")
    with pytest.raises(NotRun, match="make peers"):
        play([absent], {}, QUICK, accept)
    half_built = scripts / "peers" / "absent" / "bin"
    half_built.mkdir(parents=True)
    (half_built / "python").touch()
    with pytest.raises(NotRun, match="make peers"):
        play([absent], {}, QUICK, accept)


def test_equal_environment_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    ours = rounds.worker_env(Contestant(label="a", script="s"))
    peer = rounds.worker_env(Contestant(label="b", script="s", environment="p"))
    assert "PYTHONPATH" not in peer
    assert ours.pop("PYTHONPATH").endswith("src")
    assert ours == peer
    assert "OMP_WAIT_POLICY" not in ours
    assert ours["GLIBC_TUNABLES"] == rounds.TUNABLES


def test_compare_takes_the_best_peer_and_the_worst_case() -> None:
    seconds = {
        "ours": {"c1": [1.0, 2.0, 1.0], "c2": [1.0, 1.0, 1.0]},
        "slow": {"c1": [9.0, 9.0, 9.0], "c2": [9.0, 9.0, 9.0]},
        "fast": {"c1": [3.0, 4.0, 3.0], "c2": [2.0, 2.0, 8.0]},
    }
    fastest = {label: {"c1": 1.0, "c2": 1.0} for label in seconds}
    timings = Timings(seconds=seconds, fastest=fastest, versions={}, extra={})
    value, table, ratios = compare(timings, "ours", ["slow", "fast"], {"c1": 10, "c2": 10}, "t")
    assert ratios == {"c1": 3.0, "c2": 2.0}  # pair by pair, then the median
    assert value == 2.0
    assert "fast (best peer)" in table.markdown()
    del timings.seconds["fast"]["c2"]  # a peer may leave a case out: the best of the others counts
    assert compare(timings, "ours", ["slow", "fast"], {"c1": 10, "c2": 10}, "t")[2] == {"c1": 3.0, "c2": 9.0}


TINY = Shape(name="tiny", sizes=(40, 3, 11), dims=(4, 8, 4), batch=32, longest=5, skew=0.8)


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> EmbeddingWorkload:
    from benchmarks import workload as module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CACHE", tmp_path_factory.mktemp("cache"))
        return EmbeddingWorkload.make(TINY)


def run_peer(script_name: str, workload: EmbeddingWorkload, optimizer: str, results: Path, **options: Any) -> None:
    """Run a contestant of ours or of plain PyTorch on the workload; leave what it trained in ``results``."""
    from benchmarks.workload import BETAS, CHECKED_STEPS, EPS, LR

    config = {
        "cases": [workload.case()], "optimizer": optimizer, "checked_steps": CHECKED_STEPS, "lr": LR, "eps": EPS,
        "betas": BETAS, "seconds": 0.01, "quick": True, "results": str(results),
    }  # fmt: skip
    lines = rounds.work(Contestant(label=script_name, script=script_name, options=options), config)
    assert [line["event"] for line in lines if line["event"] != "versions"] == ["checked", "timed"]


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
def test_the_float64_reference_agrees_with_ours(workload: EmbeddingWorkload, optimizer: str) -> None:
    import torch

    from benchmarks.workload import BETAS, CHECKED_STEPS, EPS, LR
    from stoker import EmbeddingTables, TableConfig, optim
    from stoker.tables.storage import Rows

    rule: Any = {
        "sgd": optim.SGD(lr=LR),
        "adagrad": optim.Adagrad(lr=LR, eps=EPS),
        "rowwise_adagrad": optim.RowWiseAdagrad(lr=LR, eps=EPS),
        "adam": optim.Adam(lr=LR, eps=EPS, betas=BETAS),
    }[optimizer]
    tables = EmbeddingTables(
        [
            TableConfig(name=f"t{i}", num_embeddings=n, embedding_dim=d)
            for i, (n, d) in enumerate(zip(TINY.sizes, TINY.dims, strict=True))
        ],
        optimizer=rule,
        backend="reference",
    )
    initial = [np.array(rows) for rows in workload.tables()]
    for i, rows in enumerate(initial):
        group = next(group for group in tables.groups if group.dim == rows.shape[1])
        zeros = {k: torch.zeros(len(rows), *v.shape[1:]) for k, v in group.storage.state.items()}
        tables.write(f"t{i}", 0, Rows(torch.from_numpy(rows.copy()), zeros))
    grads = np.load(workload.directory / "grad.npy")
    out = torch.empty(0)
    for step in range(CHECKED_STEPS):
        ids, offsets = (torch.from_numpy(np.array(part)) for part in workload.batch_ids(step))
        out = tables(ids, offsets)
        out.backward(torch.from_numpy(grads[step]))
    right: dict[str, np.ndarray] = {"output": out.detach().numpy()}
    for i, before in enumerate(initial):
        now = tables.rows(f"t{i}").numpy()
        changed = np.flatnonzero((now != before).any(axis=1))
        right |= {f"rows_{i}": changed, f"weight_{i}": now[changed]}
    reference = workload.reference(optimizer)

    def check(**changes: np.ndarray) -> None:
        check_rows("ours", optimizer, reference, {**right, **changes})

    check()
    with pytest.raises(WrongResult, match="rows of table 0 differ"):
        check(weight_0=right["weight_0"] + np.float32(1e-4))
    with pytest.raises(WrongResult, match="lookup differ"):
        check(output=right["output"] * np.float32(1.001))
    with pytest.raises(WrongResult, match="not updated"):
        check(rows_0=right["rows_0"][:-4], weight_0=right["weight_0"][:-4])
    untouched = np.setdiff1d(np.arange(TINY.sizes[0]), reference["rows_0"])[:1]
    if len(untouched):
        more = np.concatenate([right["rows_0"], untouched])
        with pytest.raises(WrongResult, match="never touched"):
            check(rows_0=more, weight_0=initial[0][more])


@pytest.mark.parametrize(
    ("script_name", "optimizer", "options"),
    [
        ("stoker_embedding.py", "adagrad", {}),
        ("torch_embedding.py", "sgd", {"form": "EmbeddingBag"}),
        ("torch_embedding.py", "rowwise_adagrad", {"form": "sort + embedding_bag"}),
    ],
)
def test_contestants_of_the_matrix_leave_right_results(
    workload: EmbeddingWorkload,
    tmp_path: Path,
    script_name: str,
    optimizer: str,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tables of several widths, bags and one id: what the peers do not test here runs where they are built."""
    fork_contestants(monkeypatch)
    run_peer(script_name, workload, optimizer, tmp_path, **options)
    found = dict(np.load(tmp_path / f"{workload.directory.name}.npz"))
    check_rows(script_name, optimizer, workload.reference(optimizer), found)


def test_the_matrix_covers_its_ranges() -> None:
    assert {dim for shape in MATRIX for dim in shape.dims} >= {8, 16, 32, 64, 128}
    assert {shape.batch for shape in MATRIX} >= {1024, 65536}
    assert {shape.longest for shape in MATRIX} == {1, 20}
    assert {shape.skew for shape in MATRIX} >= {0.0, 0.6, 0.8, 1.05, 1.2}
    assert {shape.scattered for shape in MATRIX} == {True, False}
    assert any(len(set(shape.dims)) == 4 for shape in MATRIX)
    assert len({shape.name for shape in MATRIX}) == len(MATRIX)
    assert all(bar.rounds >= 3 for bar in all_bars() if "matrix" in bar.name)


def test_scattered_ids_follow_the_same_law(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import workload as module

    monkeypatch.setattr(module, "CACHE", tmp_path)
    counts = {}
    for scattered in (True, False):
        shape = Shape(name="s", sizes=(500,), dims=(4,), batch=2000, skew=1.2, scattered=scattered)
        made = EmbeddingWorkload.make(shape)
        counts[scattered] = np.bincount(np.load(made.directory / "ids.npy"), minlength=500)
    assert (np.sort(counts[True]) == np.sort(counts[False])).all()
    assert counts[False][0] == counts[False].max() > 10 * counts[False][250]
    assert (counts[True] != counts[False]).any()


def test_workload_is_made_once_and_again_when_its_settings_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import workload as module

    monkeypatch.setattr(module, "CACHE", tmp_path)
    first = EmbeddingWorkload.make(TINY)
    stamp = (first.directory / "weight.npy").stat().st_mtime_ns
    EmbeddingWorkload.make(TINY)
    assert (first.directory / "weight.npy").stat().st_mtime_ns == stamp
    other = EmbeddingWorkload.make(replace(TINY, batch=16))
    assert other.directory != first.directory


def test_kaggle_like_sizes() -> None:
    sizes = kaggle_like()
    assert sum(sizes) == 5_000_000
    assert len(sizes) == 26
    assert min(sizes) == 3


def test_a_wrong_dlrm_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import dlrm_workload as module
    from benchmarks import workload as tables

    for each in (module, tables):
        monkeypatch.setattr(each, "CACHE", tmp_path)
    monkeypatch.setattr(tables, "POOL_IDS", 0)
    shape = replace(TINY, dims=(4, 4, 4), longest=3)
    dlrm = module.DlrmWorkload.make(module.DlrmShape(tables=shape, layers="narrow"))
    reference = dlrm.reference("sgd")
    with np.load(dlrm.directory / "start.npz") as start:
        layers = {name: (start[name] + reference[name]).astype(np.float32) for name in start}
    touched = reference["touched"]
    rows = np.load(dlrm.directory / "rows.npy")[touched] + reference["rows"]
    right = {"logits": reference["logits"], "changed": touched, "rows": rows.astype(np.float32), **layers}

    def check(**changes: Any) -> None:
        np.savez(tmp_path / "left.npz", **{**right, **changes})
        module.check_model("peer", dlrm, "sgd", tmp_path / "left.npz")

    check()
    with pytest.raises(WrongResult, match="logits"):
        check(logits=reference["logits"] + 0.01)
    with pytest.raises(WrongResult, match=r"change of t1\.weight"):
        check(**{"t1.weight": layers["t1.weight"] - np.float32(0.1) * reference["t1.weight"].astype(np.float32)})
    with pytest.raises(WrongResult, match="rows of table 0"):
        check(rows=(rows + 0.05 * reference["rows"]).astype(np.float32))
    # The strong peer, eager, and ours do the same steps.
    fork_contestants(monkeypatch)
    config = {
        **module.DlrmWorkload.config([dlrm], ["sgd", "rowwise_adagrad"]),
        "results": str(tmp_path),
        "quick": True,
        "seconds": 0.01,
    }
    config["cases"][0]["shares"] = False
    options = {"dense_dtype": "float32", "compile": False, "sums": "embedding_bag"}
    for script_name in ("stoker_dlrm.py", "torch_dlrm.py"):
        lines = rounds.work(Contestant(label=script_name, script=script_name, options=options), config)
        checked = [line for line in lines if line["event"] == "checked"]
        assert len(checked) == 2
        for line in checked:
            module.check_model(script_name, dlrm, line["optimizer"], tmp_path / line["left"])


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=2, max_size=60))
def test_auc_equals_its_definition(pairs: list[tuple[int, bool]]) -> None:
    scores = np.array([score for score, _ in pairs], dtype=np.float64)
    labels = np.array([label for _, label in pairs], dtype=np.float32)
    positive, negative = scores[labels > 0], scores[labels == 0]
    if not len(positive) or not len(negative):
        return
    difference = positive[:, None] - negative[None]
    assert auc(scores, labels) == pytest.approx(((difference > 0) + 0.5 * (difference == 0)).mean())


def test_bijective_ids() -> None:
    assert bijective(np.array([1, 2, 1, 0]), np.array([7, 5, 7, 9]))
    assert not bijective(np.array([1, 2, 1, 0]), np.array([7, 5, 5, 9]))
    assert not bijective(np.array([1, 2, 1, 2]), np.array([7, 7, 7, 7]))


@given(st.integers(14, 10_000))
def test_split_rows_are_those_of_the_recipe(rows: int) -> None:
    from stoker.prep.fit.split_rules import _halved_runs

    codes = np.bincount(_halved_runs(np.arange(rows), rows, 7), minlength=3)
    found = split_rows(rows)
    assert [found["train"], found["valid"], found["test"]] == codes.tolist()


def test_ids_by_rank_follow_their_law() -> None:
    rows, skew = 50, 1.05
    ids = RankIds(rows, skew)
    drawn = np.concatenate([ids.batch(n, (100, 100)).reshape(-1) for n in range(20)])
    assert (ids.batch(3, (4, 2)) == ids.batch(3, (4, 2))).all()
    assert drawn.min() == 0
    assert drawn.max() == rows - 1
    edges = np.arange(1, rows + 2, dtype=np.float64) ** (1 - skew)
    expected = np.diff(edges) / (edges[-1] - 1)
    assert np.abs(np.bincount(drawn, minlength=rows) / len(drawn) - expected).max() < 0.004
    filled = np.concatenate([filled_ids(n, 5, 2, 23).reshape(-1) for n in range(3)])
    assert set(filled.tolist()) == set(range(23))


def rowwise_tables(rows: int, dim: int, features: tuple[str, ...]) -> Any:
    from benchmarks.placed_workload import EPS, LR
    from stoker import EmbeddingTables, TableConfig, optim

    table = TableConfig(name="rows", num_embeddings=rows, embedding_dim=dim, features=features)
    return EmbeddingTables([table], optimizer=optim.RowWiseAdagrad(lr=LR, eps=EPS), backend="reference")


def test_the_replay_of_the_large_table_agrees_with_training() -> None:
    import torch

    config = {
        "num_rows": 300,
        "dim": 4,
        "features": 2,
        "grads": 2,
        "skew": 1.05,
        "fill_batch": 8,
        "batch": 6,
        "steps": 5,
    }
    tables = rowwise_tables(300, 4, ("f0", "f1"))
    ids = RankIds(300, 1.05)
    given = [filled_ids(n, 8, 2, 40) for n in range(3)], [ids.batch(n, (6, 2)) for n in range(5)]
    for batches in given:
        shape = (2, len(batches[0]), 2, 4)
        grads = np.random.default_rng(8).standard_normal(shape, dtype=np.float32)
        for number, batch in enumerate(batches):
            tables(torch.from_numpy(batch)).backward(torch.from_numpy(grads[number % 2]))
    rows = np.unique(np.concatenate([batch[:3] for batch in given[1]]))
    found = tables.rows("rows").numpy()[rows]
    exact = large_rows(config, {"fills": 3, "slots": 40}, rows)
    check_close("ours", "rows", found, exact)
    found[0, 1] += 1e-4
    with pytest.raises(WrongResult, match=r"rows differ .* at \(0, 1\)"):
        check_close("ours", "rows", found, exact)


def test_the_file_trace_agrees_with_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from benchmarks import placed_workload as module
    from stoker import Dataset, synthetic
    from stoker.tables.storage import Rows

    monkeypatch.setattr(module, "CACHE", tmp_path)
    synthetic.dataset(tmp_path / "data", rows=400, sizes=[30, 5], num_dense=1, alpha=1.05)
    trace = FileTrace.make(Dataset(tmp_path / "data"), {16: 6}, 4)
    assert trace.num_rows == 8 * trace.real_rows
    batches = load_trace(str(trace.directory / "trace_16.npz"))
    assert len(batches) == 6
    initial = np.fromfile(trace.directory / "weight.bin", np.float32).reshape(trace.num_rows, 4)
    tables = rowwise_tables(trace.num_rows, 4, trace.features)
    tables.write("rows", 0, Rows(torch.from_numpy(initial.copy()), {"sum": torch.zeros(trace.num_rows)}))
    grads = np.load(trace.directory / "grad_16.npy")
    out = torch.empty(0)
    for number, (ids, offsets) in enumerate(batches):
        out = tables(torch.from_numpy(ids), torch.from_numpy(offsets))
        out.backward(torch.from_numpy(grads[number % len(grads)]))
    touched = np.unique(np.concatenate([ids for ids, _ in batches]))
    weight = tables.rows("rows").numpy()
    assert (np.delete(weight, touched, 0) == np.delete(initial, touched, 0)).all()
    np.save(tmp_path / "weight_16.npy", weight[touched])
    np.save(tmp_path / "output_16.npy", out.detach().numpy())
    trace.check("ours", 16, 6, tmp_path)
    np.save(tmp_path / "output_16.npy", out.detach().numpy() * 1.001)
    with pytest.raises(WrongResult, match="output differ"):
        trace.check("ours", 16, 6, tmp_path)


def test_when_the_page_cache_is_dropped() -> None:
    rows_per_page = mmap.PAGESIZE // 256
    trace = [(np.arange(8) * rows_per_page + 8 * rows_per_page * (n % 3), np.arange(9)) for n in range(9)]
    assert drop_steps(trace, "plenty", 256) == set()
    assert drop_steps(trace, "dropped", 256) == {0, 4, 8}
    assert drop_steps(trace, "equal", 256) == set(range(9))  # ours: slots are its only cache
    pages = mmap.PAGESIZE
    assert drop_steps(trace, "equal", 256, 24 * pages) == {0}  # all 24 pages fit
    assert drop_steps(trace, "equal", 256, 16 * pages) == {0, 2, 4, 6, 8}  # two batches fit, a third one does not


def test_losses_must_be_equal_to_the_bit() -> None:
    first = np.array([0.5, 0.25])
    check_same_losses("ours", first.copy(), first)
    with pytest.raises(WrongResult, match="step 1"):
        check_same_losses("ours", np.array([0.5, np.nextafter(0.25, 1)]), first)
    with pytest.raises(WrongResult, match="finite"):
        check_same_losses("ours", np.array([0.5, np.nan]), np.array([0.5, np.nan]))


@pytest.mark.parametrize("out", [["--out", "/a folder/b"], ["--out=/a folder/b"], ["--out", "/b"]])
def test_the_command_of_a_result_names_no_folder_of_this_machine(
    out: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["/somewhere/__main__.py", "ranks", *out, "--quick"])
    assert provenance()["command"] == "python -m benchmarks ranks --quick"
