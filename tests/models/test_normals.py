"""Normals of a birth: numpy's own but for the last bit of the tail, and the same on every machine."""

import ctypes
import hashlib
import platform

import numpy as np
import pytest

from birthmark.models.init import keyed_generator
from birthmark.models.normals import log1p_f32, standard_normals

TAIL = np.float32(3.6541529)
BLOCKS = 64
#: SHA-256 of the float32 bytes of the first 64 blocks of 2^16, by numpy 2.4.6 on x86-64 with glibc 2.36.
NORMALS = "7d31702e9ca691710b87a49c1cb826350c564d53bb1d9c677ded3c641d3e9cd4"
#: SHA-256 of glibc 2.36's log1pf at −k · 2⁻²⁴ for all k below 2²⁴.
LOGARITHMS = "b7fc05bdd49a1aa66fe2e7ee3339a2a79189d6f5f1c94b090dc5f734a23bd354"


def generator(block: int) -> np.random.Generator:
    return keyed_generator(0, "normals", block)


def test_they_are_the_same_on_every_machine():
    sha = hashlib.sha256()
    for block in range(BLOCKS):
        sha.update(standard_normals(generator(block), 1 << 16).astype("<f4").tobytes())
    assert sha.hexdigest() == NORMALS


def test_they_are_those_of_numpy_but_for_the_last_bit_beyond_the_ziggurat():
    for block in range(BLOCKS):
        drawn = standard_normals(generator(block), 1 << 16)
        by_numpy = generator(block).standard_normal(1 << 16, dtype=np.float32)
        inside = np.abs(by_numpy) <= TAIL
        assert np.array_equal(drawn[inside], by_numpy[inside])
        np.testing.assert_array_max_ulp(drawn, by_numpy, maxulp=1)


def test_a_draw_does_not_depend_on_how_many_follow():
    for block in range(8):
        drawn = standard_normals(generator(block), 1 << 14)
        for n in (*range(1, 40), 1000, (1 << 14) - 1):
            assert np.array_equal(standard_normals(generator(block), n), drawn[:n])


class Words:
    """Generator over words that are given, as a Philox gives them: two to each of 64 bits, the low one first."""

    def __init__(self, words):
        self.words, self.bit_generator = list(words), self

    def random_raw(self, n):
        given, self.words = self.words[: 2 * n], self.words[2 * n :]
        given += [1 << 9] * (2 * n - len(given))  # a draw of 0 or nearly
        return np.array(given, dtype="<u4").view("<u8")


def test_tails_are_tried_again_and_words_are_fetched_until_they_end():
    """The tail takes pairs until 2y > x²: here 40 pairs are refused, more than one fetch holds."""
    tail, certain, unlikely = 0xFFFFFE00, 0x00000000, 0xFFFFFF00
    refused = [unlikely, certain]  # x large, y 0
    taken = [certain, unlikely]  # x 0, y large
    (value,) = standard_normals(Words([tail, *refused * 40, *taken]), 1)
    assert abs(value) == TAIL
    value, after = standard_normals(Words([tail, *refused * 40, *taken, (5 << 9) | 7]), 2)
    assert abs(value) == TAIL
    assert 0 < after < 1e-6


def test_logarithms_are_near_and_the_same_on_every_machine():
    x = -(np.arange(1 << 24, dtype=np.float32) * np.float32(2**-24))
    logs = log1p_f32(x)
    near = np.log1p(x.astype(np.float64))
    assert np.abs(logs - near).max() <= 1.2e-6
    assert np.abs(logs[1:] / near[1:] - 1).max() < 1.2e-7
    assert hashlib.sha256(logs.astype("<f4").tobytes()).hexdigest() == LOGARITHMS


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or tuple(map(int, platform.libc_ver()[1].split("."))) >= (2, 41),
    reason="the logarithm of glibc up to 2.40 is asked for",
)
def test_logarithms_are_those_of_glibc_before_it_rounded_others():
    log1pf = ctypes.CDLL("libm.so.6").log1pf
    log1pf.argtypes, log1pf.restype = [ctypes.c_float], ctypes.c_float
    x = -np.float32(2**-24) * np.random.default_rng(0).integers(0, 1 << 24, 20_000).astype(np.float32)
    assert np.array_equal(log1p_f32(x), np.array([log1pf(value) for value in x.tolist()], dtype=np.float32))
