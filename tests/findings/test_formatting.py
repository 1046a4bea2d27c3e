"""Numbers are written in one way: read back, they are what was given, to the digits that are shown."""

import html
import math
import re
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from birthmark.findings.formatting import MISSING, format_value, in_ascii, in_prose, steps_near
from birthmark.findings.glossary import TERMS, explained


def test_steps_in_a_few_words():
    assert [steps_near(steps, 7) for steps in ([], [4, 0], range(12))] == [
        "none",
        "0, 4",
        ", ".join(map(str, range(12))),
    ]
    assert steps_near(range(0, 5001, 10), 123) == "0 … 5000 (501), the nearest 120 and 130"
    assert steps_near({0, *range(100, 200)}, 900) == "0 … 199 (101), the nearest 198 and 199"


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
        (None, ".3f", MISSING),
        (math.nan, ".3f", MISSING),
        (math.inf, "ratio", "∞"),
        (-math.inf, "d", "-∞"),
        (1234567, ",d", "1,234,567"),
        (0.1234, "percent", "12.3 %"),
        (12.345, "ratio", "12.35"),
        (123.45, "ratio", "123.5"),
        (12345.6, "ratio", "12,346"),
        (-0.5, ".3f", "-0.500"),
    ],
)
def test_numbers_as_tables_have_them(value, spec, expected):
    assert format_value(value, spec) == expected


def test_ascii_has_the_same_numbers():
    assert in_ascii("p < 10⁻³⁰, 3.4·10⁻⁵ ± 0.1, – and ∞") == "p < 1e-30, 3.4e-5 +- 0.1, - and inf"


# ---------------------------------------------------------------- words that are explained where they stand


@pytest.mark.parametrize(
    ("text", "marked"),
    [
        ("n_eff of strangers, and strangers again", ["n_eff", "strangers"]),
        ("Sink mass: p̄ and σ²(0)/σ²(late)", ["Sink mass", "p̄", "σ²(0)", "σ²(late)"]),
        ("The seed's direction survives: 0.151, at most 0.019 for 2 strangers.", ["seed's direction", "strangers"]),
        ("kindness, unkind, mean_n_eff and n_eff_normalised", []),
        ("robust z", ["robust z"]),
    ],
)
def test_words_are_found_whole_and_once(text, marked):
    assert re.findall(r"<abbr title=\"[^\"]+\">([^<]+)</abbr>", html.unescape(explained(text))) == marked


@pytest.mark.heavy
@given(st.lists(st.sampled_from([*TERMS, "<b>", "&amp;", 'stranger"><script>', " ", "\n", "p̄"]) | st.text(max_size=5)))
def test_nothing_but_the_explanations_is_markup(words):
    text = " ".join(words)
    made = str(explained(text))
    plain = re.sub(r"<abbr title=\"[^\"<>]*\">([^<>]*)</abbr>", r"\1", made)
    assert "<" not in plain
    assert ">" not in plain
    assert html.unescape(plain) == text


def test_every_meaning_is_a_plain_sentence():
    for name, term in TERMS.items():
        assert term.meaning.endswith("."), name
        assert re.fullmatch(r"(1[0-7]|[1-9])?", term.section), name
