"""Standard normals of a birth: numpy's float32 ziggurat, computed here from Philox's raw words.

numpy keeps the raw words of its bit generators fixed, and promises no such thing for the normals that it makes of them
(NEP 19). Those also depend on the machine: beyond ±3.65 they take a logarithm from its C library, and glibc 2.41 rounds
another one than 2.40 (19 of 26 million values differ in their last bit, so that a birth had another digest). Here every
value follows from IEEE additions, multiplications and divisions alone, and is that of numpy up to 2.4 with glibc up to
2.40.
"""

from __future__ import annotations

import math

import numpy as np

#: Layers of the ziggurat, and the end of its lowest one, beyond which the tail begins.
_LAYERS, _TAIL = 256, 3.6541528853610088
_TAIL_F32, _INVERSE_TAIL_F32, _UNIT = np.float32(_TAIL), np.float32(1 / _TAIL), np.float32(2**-24)


def _ziggurat() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return a bound per layer below which a draw is accepted at once, its width per step, and the density at its edge.

    Bounds and widths have 2 · 256 entries, those of negative numbers behind the others. The layers have equal areas
    (Marsaglia and Tsang, Journal of Statistical Software 5(8), 2000); no entry lies so near to a rounding boundary that
    another machine's ``exp`` could carry it over (3·10⁻⁴ of a step at least).
    """

    def density(x: float) -> float:
        return math.exp(-x * x / 2)

    area = _TAIL * density(_TAIL) + math.sqrt(math.pi / 2) * math.erfc(_TAIL / math.sqrt(2))
    edges = [area / density(_TAIL), *[0.0] * (_LAYERS - 2), _TAIL]
    for i in range(_LAYERS - 2, 0, -1):
        edges[i] = math.sqrt(-2 * math.log(area / edges[i + 1] + density(edges[i + 1])))
    steps = 1 << 23
    inner = [_TAIL, 0.0, *edges[1:-1]]
    bounds = np.array([round(x / edge * steps) for x, edge in zip(inner, edges, strict=True)], dtype=np.uint32)
    widths = np.array([edge / steps for edge in edges], dtype=np.float32)
    densities = np.array([1.0, *map(density, edges[1:])], dtype=np.float32)
    return np.concatenate([bounds, bounds]), np.concatenate([widths, -widths]), densities


_BOUNDS, _WIDTHS, _DENSITIES = _ziggurat()

#: FreeBSD's msun and glibc up to 2.40, ``log1pf``: coefficients of z¹ … z⁷ in (log(1 + f) − 2s) / s, z = s²; log 2 in
#: two parts; the largest number for which 1 + x is not divided by a power of two; the mantissa of √2.
_SERIES = np.array([0x3F2AAAAB, 0x3ECCCCCD, 0x3E924925, 0x3E638E29, 0x3E3A3325, 0x3E1CD04F, 0x3E178897], np.uint32)
_LOG_2 = np.array([0x3F317180, 0x3717F7D1], dtype=np.uint32).view(np.float32)
_UNDIVIDED, _ROOT_2 = np.uint32(0xBE95F61F), np.uint32(0x3504F7)


def log1p_f32(x: np.ndarray) -> np.ndarray:
    """Return log(1 + x) for float32 ``x`` in (−1, 0], every step rounded to float32.

    1 + x = 2ᵏ(1 + f), and with s = f / (2 + f) log(1 + f) is f − (f²/2 − s(f²/2 + R(s²))) [FreeBSD msun, s_log1pf.c].
    """
    one, half = np.float32(1), np.float32(0.5)
    sum_ = one + x
    bits = sum_.view(np.uint32)
    mantissa = bits & np.uint32(0x7FFFFF)
    low = mantissa < _ROOT_2
    exponent = (bits >> np.uint32(23)).astype(np.int32) - np.where(low, 127, 126)
    scaled = (mantissa | np.where(low, np.uint32(0x3F800000), np.uint32(0x3F000000))).view(np.float32)
    undivided = (x.view(np.uint32) <= _UNDIVIDED) | (x == 0)
    f = np.where(undivided, x, scaled - one)
    k = np.where(undivided, 0, exponent).astype(np.float32)
    lost = (x - (sum_ - one)) / sum_
    square = half * f * f
    s = f / (np.float32(2) + f)
    z = s * s
    series = np.zeros_like(z)
    for coefficient in _SERIES.view(np.float32)[::-1]:
        series = z * (coefficient + series)
    product = s * (square + series)
    divided = k * _LOG_2[0] - ((square - (product + (k * _LOG_2[1] + lost))) - f)
    return np.where(k == 0, f - (square - product), divided)


def standard_normals(generator: np.random.Generator, n: int) -> np.ndarray:
    """Draw the first ``n`` standard normals of a fresh generator, float32 ``[n]``; they do not depend on ``n``.

    A draw takes 32 bits: a layer, a sign and a place in the layer. In 98.8 of 100 it lies in the layer's rectangle and
    is accepted at once. Beside it two draws decide, and in the lowest layer two or more give a value of the tail.
    """
    n_raw = n // 2 + n // 64 + 32
    raw = generator.bit_generator.random_raw(n_raw)
    while len(values := _values(raw.astype("<u8", copy=False).view("<u4"))) < n:
        raw = np.concatenate([raw, generator.bit_generator.random_raw(n_raw)])
    return values[:n]


def _values(words: np.ndarray) -> np.ndarray:
    """Return the normals that 32-bit ``words`` give, up to the first that may need more words."""
    layers, places = words & np.uint32(2 * _LAYERS - 1), words >> np.uint32(9)
    values = _WIDTHS.take(layers, mode="wrap")
    values *= places.view(np.int32).astype(np.float32)
    slow = np.flatnonzero(places >= _BOUNDS.take(layers, mode="wrap"))
    lowest = (layers[slow] & np.uint32(_LAYERS - 1)) == 0
    tails = slow[lowest & (slow + 2 < len(words))]
    first_tries = dict(zip(tails.tolist(), zip(*_tail_tries(words, tails), strict=True), strict=True))
    beside: list[int] = []  # draws beside their rectangle
    spent: list[int] = []  # words that belong to a draw before them
    free, end = 0, len(words)  # the first word that belongs to none, and the end of all that is certain
    for place, is_tail in zip(slow.tolist(), lowest.tolist(), strict=True):
        if place < free:
            continue  # it belongs to the draw before it
        if place + 2 >= len(words):
            end = place
            break
        if not is_tail:
            beside.append(place)
            free = place + 2
            continue
        excess, accepted = first_tries[place]
        free = place + 3
        while not accepted and free + 1 < len(words):
            (excess,), (accepted,) = _tail_tries(words, np.array([free - 1]))
            free += 2
        if not accepted:
            end = place
            break
        spent.extend(range(place + 1, free))
        values[place] = -(_TAIL_F32 + excess) if places[place] & 256 else _TAIL_F32 + excess
    edges = np.array(beside, dtype=np.intp)
    layer = layers[edges] & np.uint32(_LAYERS - 1)
    # exp is of float64 and compared with a float32: one draw in 10¹⁴ lies so near that its last bit would count.
    heights = (_DENSITIES[layer - 1] - _DENSITIES[layer]) * _uniforms(words[edges + 1]) + _DENSITIES[layer]
    below = heights < np.exp(-0.5 * values[edges].astype(np.float64) ** 2)
    kept = np.ones(len(words), dtype=bool)
    kept[edges[~below]] = False
    kept[edges + 1] = False
    kept[spent] = False
    return values[:end][kept[:end]]


def _uniforms(words: np.ndarray) -> np.ndarray:
    """Map 32-bit words to float32 in [0, 1)."""
    return (words >> np.uint32(8)).astype(np.float32) * _UNIT


def _tail_tries(words: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return how far beyond the tail's beginning the two words after each place lie, and if that is accepted."""
    excess = -_INVERSE_TAIL_F32 * log1p_f32(-_uniforms(words[places + 1]))
    other = -log1p_f32(-_uniforms(words[places + 2]))
    return excess, other + other > excess * excess
