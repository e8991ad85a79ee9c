"""``stoker.classify``: rows are classified by the profile of the very data."""

from __future__ import annotations

from pathlib import Path

import pytest

import stoker
from stoker.base.errors import DataError
from stoker.dataset.dataset import Dataset
from stoker.testing import make_dataset

SIZES = (600, 300, 10)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(tmp_path_factory.mktemp("data") / "d", rows=3000, num_embeddings=SIZES, sequence={1: 3})


@pytest.fixture(scope="module")
def profile(data: Dataset) -> stoker.HotProfile:
    return stoker.profile(data, device_memory="8KiB", embedding_dim=4, sample=None)


@pytest.mark.slow
def test_the_share_of_hot_rows_is_the_profiles(data: Dataset, profile: stoker.HotProfile, tmp_path: Path) -> None:
    made = stoker.classify(data, profile, tmp_path / "out")
    assert made.hot_cold is not None
    assert made.hot_cold["hot_rows"] == profile.hot_rows
    assert stoker.HotProfile.from_dict(made.hot_cold["profile"]) == profile
    assert len(made.hot) / len(made.train) == pytest.approx(profile.input_share, abs=1e-12)
    assert 0 < len(made.hot) < len(made.train)


def test_dataset_and_profile_may_be_paths(data: Dataset, profile: stoker.HotProfile, tmp_path: Path) -> None:
    profile.save(tmp_path / "hot.json")
    made = stoker.classify(str(data.path), tmp_path / "hot.json", str(tmp_path / "out"))
    assert made.hot_cold is not None
    assert made.hot_cold["profile_hash"] == profile.hash


def test_a_profile_of_other_data_is_refused(profile: stoker.HotProfile, tmp_path: Path) -> None:
    other = make_dataset(tmp_path / "other", rows=3000, num_embeddings=SIZES, sequence={1: 3}, seed=1)
    profile.save(tmp_path / "hot.json")
    with pytest.raises(DataError, match=r"hot\.json was made from other data than .*stoker profile .*other --out"):
        stoker.classify(other, tmp_path / "hot.json", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_classified_dataset_may_be_classified_anew(data: Dataset, profile: stoker.HotProfile, tmp_path: Path) -> None:
    """By another profile of the original rows: they are the same in another order."""
    stoker.classify(data, profile, tmp_path / "out")
    larger = stoker.profile(data, device_memory="12KiB", embedding_dim=4, sample=None)
    again = stoker.classify(tmp_path / "out", larger, tmp_path / "again")
    direct = stoker.classify(data, larger, tmp_path / "direct")
    assert len(again.hot) == len(direct.hot) > len(Dataset(tmp_path / "out").hot)
    own = stoker.profile(again, device_memory="12KiB", embedding_dim=4, sample=None)
    assert len(stoker.classify(again, own, tmp_path / "third").hot) == len(direct.hot)
