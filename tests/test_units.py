"""Sizes, counts and shares: read as people write them, written as people read them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.base.errors import ConfigError
from stoker.base.units import format_count, format_duration, format_size, listed, parse_count, parse_share, parse_size


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4GiB", 2**32),
        ("4 gib", 2**32),
        ("1.5MiB", 3 * 2**19),
        ("2GB", 2 * 10**9),
        ("512", 512),
        (77, 77),
        ("1_024B", 1024),
    ],
)
def test_sizes(text: str | int, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"), [("10k", 10_000), ("1.5M", 1_500_000), ("1,000", 1000), (5, 5), ("2G", 2 * 10**9)]
)
def test_counts(text: str | int, expected: int) -> None:
    assert parse_count(text) == expected


def test_an_unknown_unit_of_a_count_is_named() -> None:
    with pytest.raises(ConfigError, match=r"count '1T' has the unknown unit 'T'\."):
        parse_count("1T")


@pytest.mark.parametrize(
    ("text", "expected"), [("0.1%", 0.001), ("0.25", 0.25), (1, 1.0), (".5", 0.5), ("100 %", 1.0), ("1e-9", 1e-9)]
)
def test_shares(text: str | float, expected: float) -> None:
    assert parse_share(text) == pytest.approx(expected)


@pytest.mark.parametrize(("text", "expected"), [("99.9%", 0.999), ("99.99 %", 0.9999), ("5%", 0.05), ("0.7%", 0.007)])
def test_a_share_in_percent_is_the_number_a_program_would_write(text: str, expected: float) -> None:
    assert parse_share(text) == expected  # to the bit: the hash of a profile covers it


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (parse_size, "4 bananas"),
        (parse_size, "lots"),
        (parse_size, "-1GiB"),
        (parse_size, ""),
        (parse_count, "1.5"),
        (parse_count, "3GiB"),
        (parse_share, "150%"),
        (parse_share, "-0.1"),
        (parse_share, "1e"),
        (parse_share, "inf"),
        (parse_share, "1k"),
        (parse_share, 2.0),
    ],
)
def test_nonsense_is_refused_with_an_example(parse: object, text: object) -> None:
    with pytest.raises(ConfigError, match=r"Write for example"):
        parse(text)  # type: ignore[operator]


@given(st.integers(0, 2**53))
def test_bytes_round_trip_within_rounding(size: int) -> None:
    assert parse_size(str(size)) == size
    assert parse_size(format_size(size)) == pytest.approx(size, rel=0.05, abs=1)


@given(st.integers(0, 10**14))
def test_counts_round_trip_within_rounding(count: int) -> None:
    text = format_count(count)
    value, _, unit = text.replace(",", "").partition(" ")
    assert float(value) * {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}[unit] == pytest.approx(count, rel=0.006)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.085, "85 ms"),
        (4.21, "4.2 s"),
        (59.94, "59.9 s"),
        (200, "3 min 20 s"),
        (3599.7, "1 h 00 min"),
        (3720, "1 h 02 min"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_lists_of_names_are_short() -> None:
    assert listed([]) == ""
    assert listed(list("abcdefgh")) == "a, b, c, d, e, f, g, h"
    assert listed(list("abc") * 1_000, 2) == "a, b and 2,998 more"
    assert listed(["x" * 40, "y" * 41]) == f"{'x' * 40}, {'y' * 37}..."
