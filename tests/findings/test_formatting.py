"""Numbers are written in one way: read back, they are what was given, to the digits that are shown."""

import math
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from birthmark.findings.formatting import MISSING, format_value, in_ascii, in_prose


def read(text):
    """The number of a text: commas between thousands, powers of ten as ASCII has them."""
    return float(in_ascii(text).replace(",", ""))


@given(st.floats(1e-290, 1e290), st.integers(1, 6), st.sampled_from([1, -1]))
def test_significant_digits_are_those_of_decimal(size, digits, sign):
    value = sign * size
    text = format_value(value, f".{digits}g")
    assert read(text) == pytest.approx(float(f"{Decimal(value):.{digits - 1}e}"), rel=1e-12)
    assert "e" not in text
    assert not text.lstrip("-").startswith(".")
    assert not text.endswith((".", ".0"))


@given(st.floats(-1e6, 1e6), st.integers(0, 4))
def test_sentences_and_tables_write_a_number_alike(value, decimals):
    text = in_prose(value, decimals)
    assert text == format_value(value, f".{decimals}f") == format_value(value, f",.{decimals}f")
    assert read(text) == pytest.approx(value, abs=0.5000001 * 10**-decimals)
    assert not text.lstrip("-").startswith(".")
    assert text.strip("-0.") or not text.startswith("-")


@pytest.mark.parametrize(
    ("value", "spec", "expected"),
    [
        (0.0084, ".3f", "0.008"),
        (34226.1, ".3g", "34,200"),
        (28814.9, ",.0f", "28,815"),
        (1.2e-5, ".3g", "1.2·10⁻⁵"),
        (2e9, ".3g", "2·10⁹"),
        (0.0002, "ratio", "0.0002"),
        (-0.0001, ".3f", "0.000"),
        (507.0, "d", "507"),
        (0, ".3g", "0"),
        (math.nan, ".3f", MISSING),
        (-math.inf, "d", "-∞"),
    ],
)
def test_numbers_as_tables_have_them(value, spec, expected):
    assert format_value(value, spec) == expected


def test_ascii_has_the_same_numbers():
    assert in_ascii("p < 10⁻³⁰, 3.4·10⁻⁵ ± 0.1, – and ∞") == "p < 1e-30, 3.4e-5 +- 0.1, - and inf"
