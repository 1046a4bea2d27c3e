"""Samples changed on purpose: tokens at given places, and a few samples read again and again."""

import numpy as np
import pytest

from birthmark.data.backcopy import BackCopy
from birthmark.data.config import DataConfig
from birthmark.data.prepare import AlteredSamples, prepare
from birthmark.errors import UsageError


def prepared(**fields):
    return prepare(DataConfig(path="backcopy", **fields), vocab_size=64, seq_len=12)


def test_tokens_stand_at_their_places_and_nothing_else_changes():
    plain, altered = prepared(), prepared(tokens_at=["0=random", "2=7"])
    for split in ("train", "val"):
        before, after = (getattr(data, split).batch(3, 4000) for data in (plain, altered))
        assert (after[:, 2] == 7).all()
        rest = [t for t in range(13) if t not in (0, 2)]
        np.testing.assert_array_equal(after[:, rest], before[:, rest])
        # Uniform over the vocabulary: 64 counts of 62.5 each, within five standard deviations.
        counts = np.bincount(after[:, 0], minlength=64)
        assert len(counts) == 64
        assert abs(counts - 62.5).max() < 5 * 62.5**0.5
        # A sample is the same in any batch.
        np.testing.assert_array_equal(getattr(altered, split).batch(10, 2), after[7:9])
    assert (altered.train.batch(0, 50)[:, 0] != altered.val.batch(0, 50)[:, 0]).any()
    other = prepared(tokens_at=["0=random"], data_seed=1).train.batch(0, 50)
    assert (other[:, 0] != altered.train.batch(0, 50)[:, 0]).any()
    assert altered.record["tokens_at"] == ["0=random", "2=7"]
    assert "tokens_at" not in plain.record


def test_the_first_samples_come_again_in_the_same_order():
    plain, altered = prepared(), prepared(train_samples=5, tokens_at=["1=random"])
    assert (altered.train.n_samples, altered.val.n_samples) == (5, None)
    assert altered.epochs(20) == {"": 4.0}
    once = altered.train.batch(0, 5)
    np.testing.assert_array_equal(once[:, 2:], plain.train.batch(0, 5)[:, 2:])
    expected = once[[3, 4, 0, 1, 2, 3, 4, 0, 1, 2, 3]]
    np.testing.assert_array_equal(altered.train.batch(13, 11), expected)
    # Validation is all of it, and without places the source itself, which an evaluation scores on.
    assert len(np.unique(altered.val.batch(0, 50), axis=0)) == 50
    assert isinstance(prepared(train_samples=5).val, BackCopy)
    source = BackCopy(64, 12, 0)
    assert AlteredSamples(source, {}, "train", 0).n_samples is None


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"tokens_at": ["first=3"]}, "data.tokens_at: 'first=3' is neither POSITION=TOKEN nor POSITION=random"),
        ({"tokens_at": ["0=3", "0=random"]}, "data.tokens_at: position 0 stands twice"),
        ({"train_samples": 0}, "data.train_samples: 0 is below 1"),
        (
            {"tokens_at": ["0=3"], "packing": "best_fit", "path": "stdlib"},
            "data.tokens_at: is not read with data.packing",
        ),
        (
            {"train_samples": 3, "sources": [{"path": "stdlib"}], "path": "stdlib"},
            "data.train_samples: is not read beside",
        ),
    ],
)
def test_what_is_impossible_is_one_line(fields, expected):
    from birthmark.data.config import SourceConfig

    sources = [SourceConfig(**source) for source in fields.get("sources", [])]
    found = DataConfig(**({"path": "backcopy"} | fields | {"sources": sources})).problems()
    assert [line for line in found if line.startswith(expected)] == found[-1:]
    assert "\n" not in found[-1]


@pytest.mark.parametrize(("entry", "expected"), [("12=3", "no position 12"), ("0=64", "no token 64")])
def test_a_place_that_no_sample_has_is_one_line(entry, expected):
    with pytest.raises(UsageError, match=f"data.tokens_at: there is {expected}"):
        prepared(tokens_at=[entry])
