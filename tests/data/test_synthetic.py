"""Generated logs: the asked skew, the planted truth, the same bytes for the same seed, bounded memory."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import math
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest
from campaigns import scaled
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker import synthetic
from stoker.base.errors import ConfigError, DataError
from stoker.prep.recipes import draw
from stoker.synthetic import logs, writer
from stoker.synthetic.clicks import ClickLog, IdColumn, Options
from stoker.synthetic.logs import RECIPES, RenderedBlock
from stoker.synthetic.writer import source_of

TEXT_RECIPES = ("criteo", "avazu", "taobao", "trivago")


def _out(folder: Path, recipe: str, name: str = "log") -> Path:
    if recipe in ("movielens", "ebnerd"):
        return folder / name
    return folder / f"{name}{'.parquet' if recipe in ('online-retail', 'globo') else '.csv'}"


def _digests(path: Path) -> dict[str, str]:
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", list(RECIPES))
def test_the_same_seed_gives_the_same_bytes_on_any_number_of_threads(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "BLOCK", 5_000)
    rows = 18_000  # several blocks
    for name, workers in (("a", 1), ("b", 3)):
        synthetic.write(recipe, rows, _out(tmp_path / name, recipe), seed=3, drift=0.4, workers=workers)
    synthetic.write(recipe, rows, _out(tmp_path / "c", recipe), seed=4, drift=0.4)
    first, again, other = (_digests(_out(tmp_path / name, recipe)) for name in "abc")
    assert first == again
    assert first != other
    truths = [synthetic.SyntheticTruth.load(f"{_out(tmp_path / name, recipe)}.truth.json") for name in "ab"]
    assert truths[0] == truths[1]
    assert truths[0].rows == rows


_BEFORE_UNIVERSES = {
    "criteo": "34b209f0fbb1dbf2",
    "avazu": "c578fb3cb792b795",
    "taobao": "811f690a13807156",
    "trivago": "afa5a9bea0cae820",
    "movielens": "cab15e3915cbf023",
    "online-retail": "3aa0ce2d15a245fb",
    "globo": "b23e24e84543dfc2",
    "ebnerd": "0e14f68204c5e389",
}


def _content(path: Path) -> bytes:
    """The bytes of text; the values of Parquet, whose bytes depend on the version of Arrow; five digits of the truth,
    whose last ones depend on the processor (it sums float32 logarithms)."""
    if path.suffix == ".json":
        truth = json.loads(path.read_text())
        return repr({key: f"{one:.5g}" if isinstance(one, float) else one for key, one in truth.items()}).encode()
    return repr(pq.read_table(path).to_pydict()).encode() if path.suffix == ".parquet" else path.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", list(RECIPES))
def test_a_call_with_a_seed_alone_writes_what_it_wrote_before_universes(recipe: str, tmp_path: Path) -> None:
    out, bad = _out(tmp_path, recipe), 0.02 if recipe in TEXT_RECIPES else 0.0
    synthetic.write(recipe, 400, out, seed=3, drift=0.4, scale=0.05, bad=bad)
    files = [*(sorted(out.iterdir()) if out.is_dir() else [out]), Path(f"{out}.truth.json")]
    digest = hashlib.sha256(b"".join(map(_content, files))).hexdigest()
    assert digest[:16] == _BEFORE_UNIVERSES[recipe]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", list(RECIPES))
def test_the_universe_is_the_seed_by_default_and_another_seed_draws_other_rows(recipe: str, tmp_path: Path) -> None:
    for name, seeds in {"a": {"seed": 3}, "b": {"seed": 3, "universe": 3}, "c": {"seed": 4, "universe": 3}}.items():
        synthetic.write(recipe, 300, _out(tmp_path / name, recipe), scale=0.05, **seeds)
    first, same, other = (_digests(_out(tmp_path / name, recipe)) for name in "abc")
    assert first == same
    changed = {name for name in first if first[name] != other[name]}
    assert changed == set(first) - {"users.dat", "movies.dat"}  # who users are and what movies are, is the universe's
    truths = [synthetic.SyntheticTruth.load(f"{_out(tmp_path / name, recipe)}.truth.json") for name in "abc"]
    assert [truth.universe for truth in truths] == [None, 3, 3]


def _parts(recipe: str, seed: int, universe: int | None, column: int) -> tuple[list[bytes], np.ndarray]:
    """Values of a column of 30,000 lines, and labels drawn with their true probabilities."""
    part = source_of(recipe, Options(rows=30_000, scale=0.01, seed=seed, universe=universe)).files[""][1](0, 30_000)
    assert part.block is not None
    lines = part.block.tobytes().translate(None, b"\0").splitlines()
    chance = 1 / (1 + np.exp(-part.logits.astype(np.float64)))
    return [line.split(b"\t" if recipe == "criteo" else b",")[column] for line in lines], chance


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "column"), [("criteo", 23), ("avazu", 5)])
def test_days_of_one_universe_give_a_value_the_same_frequency_and_probability(recipe: str, column: int) -> None:
    def profile(seed: int, universe: int | None) -> dict[bytes, tuple[float, float]]:
        values, chance = _parts(recipe, seed, universe, column)
        of = np.array(values)
        return {value: (float(np.mean(of == value)), float(chance[of == value].mean())) for value in set(values)}

    first, second, foreign = profile(1, 7), profile(2, 7), profile(2, None)
    common = [value for value, (share, _) in first.items() if share > 0.02]
    assert len(common) >= 5
    for value in common:
        assert second[value][0] == pytest.approx(first[value][0], abs=0.01)
        assert second[value][1] == pytest.approx(first[value][1], abs=0.03)
    assert any(abs(foreign.get(value, (0, 0))[1] - first[value][1]) > 0.05 for value in common)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "of", "names"),
    [
        ("taobao", "item", ["category"]),
        ("online-retail", "StockCode", ["UnitPrice"]),
        ("online-retail", "CustomerID", ["Country"]),
        ("globo", "user_id", ["click_os", "click_region"]),
        ("ebnerd", "user_id", ["device_type", "is_sso_user", "gender", "is_subscriber"]),
    ],
)
def test_what_belongs_to_an_id_belongs_to_the_universe(recipe: str, of: str, names: list[str], tmp_path: Path) -> None:
    def known(seed: int, universe: int | None) -> dict[object, set[object]]:
        out = _out(tmp_path / f"{seed}-{universe}", recipe)
        synthetic.write(recipe, 3_000, out, seed=seed, universe=universe)
        if out.suffix == ".csv":
            frame = pl.read_csv(out, has_header=False, new_columns=["user", "item", "category", "behaviour", "time"])
        else:
            frame = pl.read_parquet(out / "train_behaviors.parquet" if out.is_dir() else out)
        if recipe == "online-retail":
            frame = frame.filter(
                ~pl.col("StockCode").is_in(["POST", "M", "D", "C2"]), pl.col("CustomerID").is_not_null()
            )
        values: dict[object, set[object]] = {}
        for key, *rest in frame.select(of, *names).iter_rows():
            values.setdefault(key, set()).add(tuple(rest))
        return values

    first, second, foreign = known(1, 7), known(2, 7), known(2, None)
    common = first.keys() & second.keys() & foreign.keys()
    assert len(common) > 20
    assert all(first[key] == second[key] for key in common)
    assert any(first[key] != foreign[key] for key in common)


@pytest.mark.parametrize("kind", ["clicks", "purchases", "choices"])
def test_hidden_weights_groups_and_drift_belong_to_the_universe(kind: str) -> None:
    def hidden(seed: int, universe: int | None) -> list[np.ndarray]:
        options = Options(rows=2_000, seed=seed, universe=universe, drift=0.5)
        ids = np.arange(400)
        if kind == "clicks":
            columns = [IdColumn(name=name, num_ids=400) for name in "abcd"]
            log = ClickLog([*columns, IdColumn(name="e", num_ids=7, of="a")], **{**vars(options), "base_rate": 0.3})
            logits = log._raw_logits([ids] * 5, [], np.zeros(0, dtype=np.float32))
            drawn = log.draw_ids(np.arange(20_000, dtype=np.uint64))
            of_parent = np.full(400, -1)
            of_parent[drawn[0]] = drawn[4]
            drifted = log.options.drifted(ids, ids, 400, "a")
            return [np.array(log._calibration[1:]), logits, drifted, of_parent[:30]]
        if kind == "purchases":
            taste = logs._Taste(options, 640)
            return [taste.group(ids), options.drifted(ids, ids, 640, groups=32)]
        chooser = logs._Chooser(options, 4_000, 10, 0.1)
        return [chooser.utility(ids.reshape(-1, 10), ids[:40]), options.drifted(ids, ids, chooser.per_slot, "shown")]

    for one, two, foreign in zip(hidden(1, 7), hidden(2, 7), hidden(2, None), strict=True):
        np.testing.assert_array_equal(one, two)
        assert (one != foreign).any()


def _picks(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Listed items of trivago's click-outs and whether each was clicked."""
    pairs = []
    for line in path.read_text().splitlines()[1:]:
        fields = line.replace('", "', "").split(",")
        reference, listed = fields[5], fields[-2].split("|")
        pairs += [(int(item), item == reference) for item in listed if reference in listed[:25]]
    items, clicked = zip(*pairs, strict=True)
    return np.array(items), np.array(clicked)


@pytest.mark.slow
def test_what_is_learnt_on_one_day_scores_the_next_day_of_its_universe_only(tmp_path: Path) -> None:
    from sklearn.metrics import roc_auc_score

    for name, seed, universe in (("monday", 1, 7), ("tuesday", 2, 7), ("elsewhere", 2, None)):
        synthetic.write("trivago", 20_000, tmp_path / name, seed=seed, universe=universe, scale=0.3)
    items, clicked = _picks(tmp_path / "monday")
    shown, taken = np.bincount(items, minlength=2_000), np.bincount(items, clicked, minlength=2_000)
    rate = (taken + 20 * clicked.mean()) / (shown + 20)

    def auc(name: str) -> float:
        items, clicked = _picks(tmp_path / name)
        return float(roc_auc_score(clicked, rate[items]))

    assert auc("tuesday") > 0.65
    assert auc("elsewhere") == pytest.approx(0.5, abs=0.08)


def _prices(path: Path) -> dict[str, str]:
    lines = [line.split(",") for line in path.read_text().splitlines()[1:]]
    return {item: price for line in lines for item, price in zip(line[-2].split("|"), line[-1].split("|"), strict=True)}


def _metadata(folder: Path, **settings: int) -> dict[int, set[str]]:
    synthetic.write("trivago", 30_000, folder / "log.csv", metadata=folder / "item_metadata.csv", **settings)
    header, *lines = (folder / "item_metadata.csv").read_text().splitlines()
    assert header == "item_id,properties"
    pairs = [line.split(",") for line in lines]
    return {int(item): set(properties.split("|")) for item, properties in pairs}


@pytest.mark.slow
def test_metadata_of_hotels_belongs_to_the_universe(tmp_path: Path) -> None:
    first = _metadata(tmp_path / "a", seed=1, universe=7, workers=1)
    again = _metadata(tmp_path / "b", seed=2, universe=7, workers=3)
    other = _metadata(tmp_path / "c", seed=1)
    assert first == again != other
    assert (tmp_path / "a" / "item_metadata.csv").read_bytes() == (tmp_path / "b" / "item_metadata.csv").read_bytes()
    assert list(first) == list(range(1, 2_001))
    assert len(set.union(*first.values())) == 157
    items, clicked = _picks(tmp_path / "a" / "log.csv")
    assert set(items.tolist()) <= set(first)
    prices = [_prices(tmp_path / name / "log.csv") for name in "abc"]
    common = prices[0].keys() & prices[1].keys() & prices[2].keys()
    assert all(prices[0][item] == prices[1][item] for item in common)
    assert any(prices[0][item] != prices[2][item] for item in common)
    # Stars follow the hidden worth: hotels of five are clicked more often where they are listed.
    rates = [clicked[np.array([f"{n} Star" in first[item] for item in items])].mean() for n in (1, 5)]
    assert rates[1] > 1.5 * rates[0]


@pytest.mark.slow
def test_hotels_of_similar_popularity_share_properties(tmp_path: Path) -> None:
    known = _metadata(tmp_path)

    def overlap(left: int, right: int) -> float:
        pairs = [(known[left + k], known[right + k]) for k in range(200)]
        return float(np.mean([len(a & b) / len(a | b) for a, b in pairs]))

    assert overlap(1_700, 1_750) > 1.5 * overlap(1_700, 200)  # ids rise with popularity's rank


def test_metadata_over_more_than_one_block_is_the_same_on_any_number_of_threads() -> None:
    source = source_of("trivago", Options(rows=2_000_000))
    assert source.metadata is not None
    count, render = source.metadata
    assert count > 100_000
    whole, (left, right) = render(60_000, 70_000), (render(60_000, 65_536), render(65_536, 70_000))
    text_of = [part.block.tobytes().translate(None, b"\0") for part in (whole, left, right) if part.block is not None]
    assert text_of[0] == text_of[1] + text_of[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "name", "message"),
    [
        ("criteo", "item_metadata.csv", r"metadata cannot be written: of all logs only trivago has any, not criteo"),
        ("trivago", "items.csv", r"items\.csv: prepare finds this file by 'metadata' in its name"),
        ("trivago", "metadata.log", r"metadata\.log: the log is written to this file"),
        ("trivago", "", r"this is a directory\. Name a file in it: .*item_metadata\.csv"),
    ],
)
def test_metadata_that_cannot_be_written(recipe: str, name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        synthetic.write(recipe, 50, tmp_path / "metadata.log", metadata=tmp_path / name)
    assert caught.value.settings == ("metadata",)
    assert list(tmp_path.iterdir()) == []


def test_metadata_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    kept = tmp_path / "item_metadata.csv"
    kept.write_text("mine")
    with pytest.raises(ConfigError, match=r"item_metadata\.csv is there already"):
        synthetic.write("trivago", 50, tmp_path / "log.csv", metadata=kept)
    assert _tree(tmp_path) == {"item_metadata.csv": b"mine"}
    synthetic.write("trivago", 50, tmp_path / "log.csv", metadata=kept, overwrite=True)
    assert kept.read_text().startswith("item_id,properties\n1,")


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_logs_hold_the_same_text(suffix: str, tmp_path: Path) -> None:
    synthetic.write("criteo", 500, tmp_path / "log.tsv")
    synthetic.write("criteo", 500, tmp_path / f"log.tsv{suffix}")
    raw = (tmp_path / f"log.tsv{suffix}").read_bytes()
    if suffix == ".gz":
        plain = gzip.decompress(raw)
    else:
        import zstandard

        with zstandard.ZstdDecompressor().stream_reader(raw) as reader:
            plain = reader.read()
    assert plain == (tmp_path / "log.tsv").read_bytes()


@cache
def _small_criteo() -> Callable[[int, int], RenderedBlock]:
    return source_of("criteo", Options(rows=50_000, drift=0.7, scale=0.01)).files[""][1]


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(start=st.integers(0, 10_000), sizes=st.lists(st.integers(1, 400), min_size=1, max_size=4))
def test_rows_do_not_depend_on_the_pieces_they_are_made_in(start: int, sizes: list[int]) -> None:
    render = _small_criteo()
    whole = render(start, start + sum(sizes))
    lines, logits, at = b"", [], start
    assert whole.block is not None
    for size in sizes:
        part = render(at, at + size)
        assert part.block is not None
        lines += part.block.tobytes().translate(None, b"\0")
        logits.append(part.logits)
        at += size
    assert lines == whole.block.tobytes().translate(None, b"\0")
    np.testing.assert_array_equal(np.concatenate(logits), whole.logits)


@pytest.mark.slow
def test_a_row_of_a_log_without_drift_does_not_depend_on_its_length() -> None:
    short, long = (
        source_of("criteo", Options(rows=rows, scale=0.01)).files[""][1](100, 200) for rows in (1_000, 10**9)
    )
    assert short.block is not None
    assert long.block is not None
    assert short.block.tobytes() == long.block.tobytes()


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0, 1.05, 1.4])
def test_ids_follow_zipf(alpha: float) -> None:
    num_ids, count = 50_000, 400_000
    weight = np.arange(1, num_ids + 1) ** -alpha
    exact = np.cumsum(weight / weight.sum())
    curve = synthetic.zipf(alpha, num_ids)
    ranks = synthetic.Sampler(curve)(draw.uniform(draw.key_of(0, "x"), np.arange(count)))
    assert ranks.min() >= 0
    assert ranks.max() < num_ids
    for top in (1, 10, 300, 5_000, 49_000):
        assert curve.share_of_top(top) == pytest.approx(exact[top - 1], abs=0.002)
        assert np.mean(ranks < top) == pytest.approx(exact[top - 1], abs=0.005)


def test_a_curve_of_forty_million_ids_is_small_and_ends_at_one() -> None:
    curve = synthetic.zipf(1.05, 40_000_000)
    assert len(curve.ranks) < 1_500
    assert curve.shares[-1] == pytest.approx(1.0)
    sampler = synthetic.Sampler(curve)
    assert sampler(np.array([0.0, 1 - 2**-53])).tolist() == [0, 39_999_999]
    assert float(sampler.share(np.arange(0, 2_000)).sum()) == pytest.approx(curve.share_of_top(2_000), abs=1e-5)


def test_a_measured_curve_gives_back_the_skew_it_was_measured_on(tmp_path: Path) -> None:
    counts = np.maximum(1, (2e5 / np.arange(1, 30_001) ** 0.9).astype(int))
    np.random.default_rng(0).shuffle(counts)
    curve = synthetic.measure_curve(counts, name="mine")
    assert len(curve.ranks) < 70
    curve.save(tmp_path / "mine.json")
    loaded = synthetic.Curve.load(tmp_path / "mine.json")
    ranks = synthetic.Sampler(loaded)(draw.uniform(1, np.arange(300_000)))
    ordered = np.sort(counts)[::-1]
    for top in (1, 30, 300, 3_000):
        assert np.mean(ranks < top) == pytest.approx(ordered[:top].sum() / counts.sum(), abs=0.006)
    wide = loaded.stretched(3_000_000)
    assert wide.share_of_top(30_000) == pytest.approx(loaded.share_of_top(300), abs=0.003)


@pytest.mark.parametrize(
    ("name", "num_ids", "top", "share"),
    [("globo-articles", 46_033, 460, 0.680), ("book-crossing-books", 340_556, 3_405, 0.251)],
)
def test_the_package_brings_measured_curves(name: str, num_ids: int, top: int, share: float) -> None:
    curve = synthetic.Curve.load(name)
    assert curve.num_ids == num_ids
    assert curve.share_of_top(top) == pytest.approx(share, abs=0.002)


def test_curves_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="globo-articles"):
        synthetic.Curve.load("no-such-curve")
    (tmp_path / "bad.json").write_text('{"name": 3}')
    with pytest.raises(DataError, match="is not a frequency curve"):
        synthetic.Curve.load(tmp_path / "bad.json")
    with pytest.raises(ConfigError, match="must rise"):
        synthetic.Curve(name="x", num_ids=3, ranks=(1, 3), shares=(0.6, 0.5))
    with pytest.raises(DataError, match="no count is above 0"):
        synthetic.measure_curve([0, 0])


def test_drift_changes_who_is_popular_and_not_how_popular() -> None:
    def top_ids(log: synthetic.ClickLog, start: int) -> tuple[set[int], float]:
        ids = log.draw_ids(np.arange(start, start + 40_000, dtype=np.uint64))[0]
        values, counts = np.unique(ids, return_counts=True)
        order = np.argsort(-counts)[:20]
        return set(values[order].tolist()), float(counts[order].sum() / 40_000)

    column = [synthetic.IdColumn(name="item", num_ids=100_000)]
    rows = 1_000_000
    still = synthetic.ClickLog(column, rows=rows)
    moving = synthetic.ClickLog(column, rows=rows, drift=0.5)
    same = len(top_ids(still, 0)[0] & top_ids(still, rows - 40_000)[0])
    early, late = top_ids(moving, 0), top_ids(moving, rows - 40_000)
    assert same >= 17
    assert 3 <= len(early[0] & late[0]) <= 15
    assert late[1] == pytest.approx(early[1], abs=0.02)
    # Whoever is replaced at half of the drift is a different set than at all of it: it goes on all the time.
    assert len(early[0] & top_ids(moving, rows // 2)[0]) > len(early[0] & late[0])


@pytest.mark.slow
def test_the_planted_truth_is_what_scoring_with_the_true_logit_reaches(tmp_path: Path) -> None:
    from sklearn.metrics import log_loss, roc_auc_score

    rows, log = 200_000, None
    options = Options(rows=rows, scale=0.02)
    truth = synthetic.write("criteo", rows, tmp_path / "log.tsv", scale=0.02)
    part = source_of("criteo", options).files[""][1](0, rows)
    log = part.logits
    labels = np.array([line[:1] == b"1" for line in (tmp_path / "log.tsv").read_bytes().splitlines()])
    chance = 1 / (1 + np.exp(-log.astype(np.float64)))
    noise = 4 / math.sqrt(rows)
    assert truth.best_auc == pytest.approx(roc_auc_score(labels, chance), abs=noise)
    assert truth.best_log_loss == pytest.approx(log_loss(labels, chance), abs=noise)
    assert truth.base_rate == pytest.approx(labels.mean(), abs=noise)
    assert truth.base_rate == pytest.approx(0.2562, abs=0.01)
    assert 0.7 < truth.best_auc < 0.9
    # Anything that knows less stays below.
    blurred = log + np.random.default_rng(0).normal(0, 1, rows)
    assert roc_auc_score(labels, blurred) < truth.best_auc - noise


def test_without_signal_nothing_can_be_learnt(tmp_path: Path) -> None:
    truth = synthetic.write("avazu", 20_000, tmp_path / "log.csv", signal=0.0, base_rate=0.3)
    assert truth.best_auc == pytest.approx(0.5, abs=1e-6)
    assert truth.best_log_loss == pytest.approx(-(0.3 * math.log(0.3) + 0.7 * math.log(0.7)), abs=1e-3)


def test_the_truth_of_choices_is_what_their_shares_reach(tmp_path: Path) -> None:
    from sklearn.metrics import roc_auc_score

    truth = synthetic.write("ebnerd", 6_000, tmp_path / "log")
    source = source_of("ebnerd", Options(rows=6_000))
    labels, scores = [], []
    for name in ("train_behaviors.parquet", "validation_behaviors.parquet"):
        table = pq.read_table(tmp_path / "log" / name)
        rows, render = source.files[name]
        scores.append(render(0, rows).logits)
        for shown, clicked in zip(
            table["article_ids_inview"].to_pylist(), table["article_ids_clicked"].to_pylist(), strict=True
        ):
            assert len(set(shown)) == len(shown)
            assert clicked[0] in shown
            labels += [item in clicked for item in shown]
    assert truth.examples == len(labels)
    assert roc_auc_score(labels, np.concatenate(scores)) == pytest.approx(truth.best_auc, abs=0.01)


def test_the_truth_meter_agrees_with_scikit_learn_on_known_labels() -> None:
    from sklearn.metrics import log_loss, roc_auc_score

    generator = np.random.default_rng(1)
    logits = generator.normal(0, 2, 5_000)
    labels = generator.random(5_000) < 1 / (1 + np.exp(-logits))
    meter = synthetic.TruthMeter()
    for piece in np.array_split(np.arange(5_000), 7):
        meter.add_known(logits[piece], labels[piece])
    assert meter.auc == pytest.approx(roc_auc_score(labels, logits), abs=1e-4)
    assert meter.log_loss == pytest.approx(log_loss(labels, 1 / (1 + np.exp(-logits))), abs=1e-9)
    assert meter.examples == 5_000


@pytest.mark.slow
def test_spoiled_lines_are_as_many_as_reported_and_of_every_kind(tmp_path: Path) -> None:
    truth = synthetic.write("criteo", 20_000, tmp_path / "log.tsv", bad="2%")
    kinds = {"columns": 0, "label": 0, "number": 0, "hex": 0, "utf8": 0}
    for line in (tmp_path / "log.tsv").read_bytes().splitlines():
        fields = line.split(b"\t")
        try:
            line.decode()
        except UnicodeDecodeError:
            kinds["utf8"] += 1
            continue
        if len(fields) != 40:
            kinds["columns"] += 1
        elif fields[0] not in (b"0", b"1"):
            kinds["label"] += 1
        elif any(field.startswith(b"x") for field in fields[1:14]):
            kinds["number"] += 1
        elif any(field.startswith(b"z") for field in fields[14:]):
            kinds["hex"] += 1
    assert sum(kinds.values()) == truth.bad
    assert truth.bad == pytest.approx(400, abs=80)
    assert truth.examples == 20_000 - truth.bad
    assert min(kinds.values()) > 40


@pytest.mark.slow
def test_raw_values_are_distinct_per_id_and_table_sizes_scale(tmp_path: Path) -> None:
    values = draw.scatter32(12_345, np.arange(200_000))
    assert len(np.unique(values)) == 200_000
    synthetic.write("criteo", 20_000, tmp_path / "log.tsv", scale=0.001, alpha=0.2)
    columns = np.array([line.split(b"\t") for line in (tmp_path / "log.tsv").read_bytes().splitlines()])
    seen = [len(np.unique(columns[:, 14 + table][columns[:, 14 + table] != b""])) for table in range(26)]
    for found, size in zip(seen, synthetic.KAGGLE_SIZES, strict=True):
        assert found <= max(3, round(size * 0.001))
    assert seen[9] == 93  # C10: 93,145 scaled


@settings(max_examples=scaled(200), deadline=None)
@given(st.lists(st.integers(-(10**17), 10**17), min_size=1, max_size=30))
def test_numbers_are_rendered_as_python_would(values: list[int]) -> None:
    missing = np.arange(len(values)) % 3 == 1
    block, _ = logs.joined([logs.whole(np.array(values), missing), logs.whole(np.abs(np.array(values)))], "::")
    expected = "".join(f"{'' if gone else value}::{abs(value)}\n" for value, gone in zip(values, missing, strict=True))
    assert block.tobytes().translate(None, b"\0").decode() == expected


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=20))
def test_hex_is_rendered_as_python_would(values: list[int]) -> None:
    rendered = logs.hex8(np.array(values, dtype=np.uint32))
    assert [bytes(row).decode() for row in rendered] == [f"{value:08x}" for value in values]


@pytest.mark.slow
def test_refusals_name_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="online-retail"):
        synthetic.write("netflix", 10, tmp_path / "x")
    with pytest.raises(ConfigError, match="at least 1"):
        synthetic.write("criteo", 0, tmp_path / "x")
    with pytest.raises(ConfigError, match=r"x\.parquet"):
        synthetic.write("globo", 10, tmp_path / "x.csv")
    with pytest.raises(ConfigError, match=r"\.tsv"):
        synthetic.write("criteo", 10, tmp_path / "x.parquet")
    with pytest.raises(ConfigError, match="spoil"):
        synthetic.write("globo", 10, tmp_path / "x.parquet", bad=0.1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("drift", 2, r"drift is 2; it must be 0 to 1\."),
        ("drift", -0.1, r"drift is -0\.1; it must be 0 to 1\."),
        ("alpha", float("nan"), r"alpha is nan; it must be 0 to 10\."),
        ("signal", 5.5, r"signal is 5\.5; it must be 0 to 5\."),
        ("scale", 0, r"scale is 0\. Give more than 0 and at most 100\."),
        ("scale", -1, r"scale is -1\. Give more than 0"),
        ("scale", 1e30, r"scale is 1e\+30\. Give more than 0 and at most 100\."),
        ("base_rate", 0, r"base_rate is 0\. Give more than 0 and less than 1\."),
        ("base_rate", 1.5, r"base_rate is 1\.5\. Give more than 0 and less than 1"),
        ("seed", -1, "seed is -1; it must not be negative"),
        ("universe", -1, "universe is -1; it must not be negative"),
        ("bad", "2", r"bad: share '2' is outside 0 to 100 %\."),
        ("rows", "-5", r"rows: count '-5' is not a number"),
    ],
)
@pytest.mark.parametrize("recipe", ["criteo", "taobao", "ebnerd"])
def test_settings_out_of_range(tmp_path: Path, recipe: str, setting: str, value: float | str, message: str) -> None:
    arguments = {"rows": 10, setting: value}
    with pytest.raises(ConfigError, match=f"^{message}"):
        synthetic.write(recipe, out=tmp_path / "made" / "x", **arguments)
    assert list(tmp_path.iterdir()) == []
    if setting not in ("bad", "universe"):
        with pytest.raises(ConfigError):
            synthetic.dataset(tmp_path / "set", **arguments)


@pytest.mark.slow
def test_a_log_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    for recipe, out in (("criteo", tmp_path / "log.tsv"), ("movielens", tmp_path / "movielens")):
        synthetic.write(recipe, 50, out, scale=0.001)
        before = _tree(tmp_path)
        with pytest.raises(ConfigError, match=r"is there already\. Choose another out, or pass overwrite") as caught:
            synthetic.write(recipe, 50, out, scale=0.001, seed=1)
        assert caught.value.settings == ("out", "overwrite")
        assert _tree(tmp_path) == before
        synthetic.write(recipe, 50, out, scale=0.001, seed=1, overwrite=True)
        assert set(_tree(tmp_path)) == set(before)
        assert _tree(tmp_path) != before


def test_an_output_of_the_wrong_kind(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match=rf"is a directory\. Name a file in it: {tmp_path}/trivago\.csv\."):
        synthetic.write("trivago", 50, tmp_path)
    with pytest.raises(ConfigError, match=r"file is a file, but this log has 4 files\. Name a directory"):
        synthetic.write("ebnerd", 50, tmp_path / "file", overwrite=True)
    assert _tree(tmp_path) == {"file": b"mine"}


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_log_that_was_not_finished_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """Not even those of its files that were whole, nor the directories made for it."""
    meter = synthetic.TruthMeter.add

    def stop(self: synthetic.TruthMeter, logits: np.ndarray) -> None:
        if not len(logits):  # users.dat, after the whole of ratings.dat
            raise error
        meter(self, logits)

    monkeypatch.setattr(synthetic.TruthMeter, "add", stop)
    with pytest.raises(error) as caught:
        synthetic.write("movielens", 100, tmp_path / "new" / "log")
    if error is KeyboardInterrupt:
        assert "nothing was written" in str(caught.value)
        assert "same command again" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def _tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_a_prepared_dataset_is_whole_numbered_by_frequency_and_repeatable(tmp_path: Path) -> None:
    arguments = {
        "rows": 90_000,
        "valid_rows": 20_000,
        "sizes": (3_000, 40, 700),
        "num_dense": 2,
        "drift": 0.3,
        "missing": 0.02,
        "seed": 5,
    }
    made, truth = synthetic.dataset(tmp_path / "a", **arguments, workers=1)
    again, _ = synthetic.dataset(tmp_path / "b", **arguments, workers=3)
    assert made.verify() == 4
    assert made.manifest == again.manifest
    assert {name: len(split) for name, split in made.splits.items()} == {"train": 90_000, "valid": 20_000}
    assert made.schema.num_embeddings == {"C1": 3_001, "C2": 41, "C3": 701}
    ids = np.concatenate([batch.ids.numpy() for batch in made.train.batches(30_000)])
    for feature, (table, counts) in enumerate(sorted(made.counts.items())):
        assert table == f"C{feature + 1}"
        np.testing.assert_array_equal(counts.numpy(), np.bincount(ids[:, feature], minlength=len(counts)))
        assert np.all(np.diff(counts[1:].numpy()) <= 0)
    labels = np.concatenate([batch.labels.numpy() for batch in made.valid.batches(30_000)])
    assert labels.mean() == pytest.approx(truth.base_rate, abs=0.012)
    assert made.manifest["splits"]["valid"]["positives"] == labels.sum()
    with pytest.raises(DataError, match="already holds a dataset"):
        synthetic.dataset(tmp_path / "a", **arguments)


def test_a_prepared_dataset_with_bags(tmp_path: Path) -> None:
    made, _ = synthetic.dataset(tmp_path / "a", rows=5_000, sizes=(300, 50), num_dense=0, sequences={"seen": ("C1", 7)})
    assert made.verify() == 3
    assert [feature.name for feature in made.schema.features] == ["C1", "C2", "seen"]
    batch = next(iter(made.train.batches(5_000)))
    assert batch.offsets is not None
    lengths = np.diff(batch.offsets.numpy()).reshape(-1, 3)
    assert np.all(lengths[:, :2] == 1)
    assert lengths[:, 2].min() == 0
    assert lengths[:, 2].max() == 7
    assert int(made.counts["C1"].sum()) == 5_000 + lengths[:, 2].sum()
    with pytest.raises(ConfigError, match="a table from C1 to C"):
        synthetic.dataset(tmp_path / "b", rows=10, sizes=(5,), sequences={"x": ("C9", 3)})


_PEAK = """
import resource, sys
from stoker import synthetic
synthetic.write("criteo", int(sys.argv[1]), sys.argv[2], workers=2, overwrite=True)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no resource module on Windows")
def test_memory_does_not_grow_with_the_log(tmp_path: Path) -> None:
    peaks = []
    for rows in (150_000, 600_000):
        command = [sys.executable, "-c", _PEAK, str(rows), str(tmp_path / "log.tsv")]
        peaks.append(int(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    (tmp_path / "log.tsv").unlink()
    assert peaks[1] < 1.25 * peaks[0]


@pytest.mark.slow
def test_the_command_writes_a_log_and_prints_its_truth(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from stoker.cli import app

    out = tmp_path / "clicks.tsv.gz"
    result = CliRunner().invoke(
        app, ["synthetic", "criteo", "--rows", "2k", "--out", str(out), "--bad", "1%", "--json"]
    )
    assert result.exit_code == 0, result.output
    truth = synthetic.SyntheticTruth.load(f"{out}.truth.json")
    assert json.loads(result.stdout) == dataclasses.asdict(truth)
    assert len(gzip.decompress(out.read_bytes()).splitlines()) == truth.rows == 2_000


def test_the_command_writes_another_day_and_metadata(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from stoker.cli import app

    out, kept = tmp_path / "day_1.csv", tmp_path / "item_metadata.csv"
    arguments = ["--rows", "500", "--seed", "1", "--universe", "0", "--out", str(out), "--metadata", str(kept)]
    result = CliRunner().invoke(app, ["synthetic", "trivago", *arguments])
    assert result.exit_code == 0, result.output
    synthetic.write("trivago", 500, tmp_path / "same.csv", seed=1, universe=0, metadata=tmp_path / "metadata.csv")
    assert out.read_bytes() == (tmp_path / "same.csv").read_bytes()
    assert kept.read_bytes() == (tmp_path / "metadata.csv").read_bytes()
