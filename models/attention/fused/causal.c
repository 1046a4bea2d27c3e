// Causal softmax attention in bf16, forward and backward, for CPUs with AVX-512 BF16 instructions; with a window, over
// the last so many keys.
//
// Scores lie transposed, keys by queries: the 16 lanes of a register are 16 queries, so that maxima, sums, the mask and
// every number of a query are vertical. A tile is 64 keys by 64 queries and stays in the first-level cache; the forward
// pass takes the tiles of a query with the running maximum of Flash Attention (arXiv 2205.14135). Products multiply
// pairs of bf16 numbers and add in float32 (vdpbf16ps): in C[m, n] += Σ_p A[m, p]·B[p, n] the left matrix has rows of
// pairs, the right one pairs of rows.
//
// The score gradient is p ∘ (dp − shift + 2h·p), with shift = rowsum(dO ∘ O) − g + 2h·Σp², g the gradient of the
// log-sum-exp and h that of the sum of squared weights. Where one key takes most of a row, dp and rowsum(dO ∘ O) are
// almost equal: so the forward pass also returns what bf16 leaves of O, in 256ths of its last digit, and dp is never
// rounded.
//
// Legend: B sequences, H query heads, G key/value heads, T positions, K head width, V that of values.

#include <float.h>
#include <immintrin.h>
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { TILE = 64, LANES = 16, VECTORS = TILE / LANES, ROWS = 4, CACHE_LINE = 64 };

typedef uint16_t bf16;
typedef uint32_t pair;  // two bf16 numbers, the first one in the lower half

// A tensor [B, heads, T, width] whose last axis is contiguous: steps in elements along the others.
typedef struct {
    bf16 *data;
    int64_t sequence, head, position;
} tensor;

typedef struct {
    int64_t n_sequences, n_heads, n_kv_heads, length, width, value_width;
    int64_t window;              // keys that a query sees at most, itself among them; the length, where there is none
    float scale;
    tensor q, k, v;
    tensor out;
    int8_t *rest;                // [B, T, H, V]: what bf16 leaves of the output; NULL where it is not wanted
    float *lse, *squares;        // [B, H, T]; squares: NULL where they are not wanted
    tensor d_out, dq, dk, dv;
    float *d_lse, *d_squares;    // [B, H, T]; NULL where no gradient comes
} attention;

static inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

static inline int64_t at_most(int64_t n, int64_t most) { return n < most ? n : most; }

static inline int8_t *rest_of(const attention *a, int64_t b, int64_t h, int64_t t) {
    return a->rest + ((b * a->length + t) * a->n_heads + h) * a->value_width;
}

static inline bf16 *rows_of(tensor x, int64_t sequence, int64_t head, int64_t position) {
    return x.data + sequence * x.sequence + head * x.head + position * x.position;
}

// The next so many bytes of a workspace; without memory only their number is added up.
static void *take(char *memory, int64_t *used, int64_t bytes) {
    void *start = memory ? memory + *used : NULL;
    *used += round_up(bytes, CACHE_LINE);
    return start;
}

// A thread's workspace; that none is left for one of the team is known to all of them afterwards.
static char *workspace(int64_t bytes, int *failed) {
    char *memory = aligned_alloc(CACHE_LINE, bytes);
    if (!memory) {
#pragma omp atomic write
        *failed = 1;
    }
#pragma omp barrier
    return memory;
}

// ---------------------------------------------------------------------------------------------------------------------
// Registers

static inline __m512i multiples_of(int64_t step) {
    __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_mullo_epi32(lane, _mm512_set1_epi32((int)step));
}

// The first lanes, where so many numbers are left.
static inline __mmask16 first_lanes(int64_t left) {
    return left >= LANES ? 0xffff : left <= 0 ? 0 : (__mmask16)((1u << left) - 1);
}

static inline void store_bf16(bf16 *to, __mmask16 lanes, __m512 x) {
    _mm256_mask_storeu_epi16(to, lanes, (__m256i)_mm512_cvtneps_pbh(x));
}

static inline __m512 load_bf16(const bf16 *x, __mmask16 lanes) {
    return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, x)), 16);
}

// What bf16 leaves of numbers: half of the last of its eight binary digits at most, here in 256ths of that digit.
static inline void store_rest(int8_t *to, __mmask16 lanes, __m512 x, __m512 rounded) {
    __m512 digit = _mm512_sub_ps(_mm512_set1_ps(15.f), _mm512_getexp_ps(rounded));
    __m512i rest = _mm512_cvtps_epi32(_mm512_scalef_ps(_mm512_sub_ps(x, rounded), digit));
    _mm_mask_storeu_epi8(to, lanes, _mm512_cvtsepi32_epi8(rest));
}

static inline __m512 load_rest(const int8_t *rest, __mmask16 lanes, __m512 rounded) {
    __m512 digit = _mm512_sub_ps(_mm512_getexp_ps(rounded), _mm512_set1_ps(15.f));
    return _mm512_scalef_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(lanes, rest))), digit);
}

// Two rows of numbers as one row of pairs.
static inline __m512i paired(__m512 first, __m512 second) {
    __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(first));
    __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(second));
    return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}

// 16 channels of one query, from a tile [channels, 64].
static inline __m512 of_query(const float *tile, int64_t query, int64_t channel, __mmask16 lanes) {
    const float *first = tile + channel * TILE + query;
    return _mm512_mask_i32gather_ps(_mm512_setzero_ps(), lanes, multiples_of(TILE), first, 4);
}

// e^x with a relative error of 2.4e-7 for −87 ≤ x ≤ 0, as 2^n·2^f with f in [−1/2, 1/2] and the series of 2^f. NaN stays NaN:
// of two operands the maximum is the second one where either is NaN.
static inline __m512 exponential(__m512 x) {
    const __m512 log2e = _mm512_set1_ps(1.44269504f), log2e_rest = _mm512_set1_ps(1.92596303e-8f);
    __m512 n = _mm512_max_ps(_mm512_set1_ps(-150.f), _mm512_mul_ps(x, log2e));
    n = _mm512_roundscale_ps(n, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 f = _mm512_fmadd_ps(x, log2e_rest, _mm512_fmsub_ps(x, log2e, n));
    f = _mm512_max_ps(_mm512_set1_ps(-1.f), f);  // beyond the smallest number
    __m512 sum = _mm512_set1_ps(1.5403530e-4f);
    sum = _mm512_fmadd_ps(sum, f, _mm512_set1_ps(1.3333558e-3f));
    sum = _mm512_fmadd_ps(sum, f, _mm512_set1_ps(9.6181291e-3f));
    sum = _mm512_fmadd_ps(sum, f, _mm512_set1_ps(5.5504109e-2f));
    sum = _mm512_fmadd_ps(sum, f, _mm512_set1_ps(2.4022651e-1f));
    sum = _mm512_fmadd_ps(sum, f, _mm512_set1_ps(6.9314718e-1f));
    sum = _mm512_fmadd_ps(sum, f, _mm512_set1_ps(1.f));
    return _mm512_scalef_ps(sum, n);
}

// ---------------------------------------------------------------------------------------------------------------------
// Layouts

// So many rows of a tensor as rows of pairs [n_rows, n_pairs], filled up with zeros.
static void copy_rows(const bf16 *x, int64_t step, int64_t count, int64_t width, pair *to, int64_t n_rows,
                      int64_t n_pairs) {
    memset(to, 0, n_rows * n_pairs * sizeof(pair));
    for (int64_t t = 0; t < count; t++) memcpy(to + t * n_pairs, x + t * step, width * sizeof(bf16));
}

// Rows of pairs [n_rows, n_pairs] as the right matrix whose rows are the channels: pairs of channels [n_pairs, n_rows].
static void channels_right(const pair *x, int64_t n_rows, int64_t n_pairs, pair *to) {
    __m512i rows = multiples_of(n_pairs);
    for (int64_t t = 0; t < n_rows; t += LANES)
        for (int64_t p = 0; p < n_pairs; p++)
            _mm512_storeu_si512(to + p * n_rows + t, _mm512_i32gather_epi32(rows, x + t * n_pairs + p, 4));
}

// The same rows as the left matrix whose rows are the channels: pairs of rows, by channel [2·n_pairs, n_rows/2].
static void channels_left(const pair *x, int64_t n_rows, int64_t n_pairs, pair *to) {
    __m512i rows = multiples_of(2 * n_pairs), low = _mm512_set1_epi32(0xffff);
    for (int64_t t = 0; t < n_rows; t += 2 * LANES)
        for (int64_t p = 0; p < n_pairs; p++) {
            __m512i even = _mm512_i32gather_epi32(rows, x + t * n_pairs + p, 4);
            __m512i odd = _mm512_i32gather_epi32(rows, x + (t + 1) * n_pairs + p, 4);
            __m512i first = _mm512_or_si512(_mm512_and_si512(even, low), _mm512_slli_epi32(odd, 16));
            __m512i second = _mm512_or_si512(_mm512_srli_epi32(even, 16), _mm512_andnot_si512(low, odd));
            _mm512_storeu_si512(to + 2 * p * (n_rows / 2) + t / 2, first);
            _mm512_storeu_si512(to + (2 * p + 1) * (n_rows / 2) + t / 2, second);
        }
}

// The same rows as the right matrix whose rows are these: pairs of rows [n_rows/2, 2·n_pairs].
static void rows_right(const pair *x, int64_t n_rows, int64_t n_pairs, pair *to) {
    for (int64_t t = 0; t < n_rows; t += 2)
        for (int64_t p = 0; p < n_pairs; p++) {
            pair first = x[t * n_pairs + p], second = x[(t + 1) * n_pairs + p];
            to[t * n_pairs + 2 * p] = (first & 0xffffu) | (second << 16);
            to[t * n_pairs + 2 * p + 1] = (first >> 16) | (second & 0xffff0000u);
        }
}

// ---------------------------------------------------------------------------------------------------------------------
// What is seen

// A tile of 64 keys, as 64 queries from ``start`` on see it.
typedef struct {
    int64_t keys_before;  // from the tile's first key to ``start``
    int64_t window;
    int whole;            // every query sees every key
} view;

static int64_t first_tile(const attention *a, int64_t start) {
    return start < a->window ? 0 : (start - a->window + 1) / TILE;
}

static view view_of(const attention *a, int64_t tile, int64_t start) {
    view seen = {start - tile * TILE, a->window, 0};
    seen.whole = seen.keys_before >= TILE && seen.keys_before + TILE <= a->window;
    return seen;
}

// The queries of a register that see a key of the tile: itself or a later one, by less than the window.
static inline __mmask16 that_see(view seen, int64_t key, int vector) {
    if (seen.whole) return 0xffff;
    int64_t first = key - seen.keys_before - vector * LANES;
    return first_lanes(first + seen.window) & ~first_lanes(first);
}

// ---------------------------------------------------------------------------------------------------------------------
// Products

// Four rows of C (+)= A·B, and so many registers of lanes, which the compiler is to know.
static inline __attribute__((always_inline)) void four_rows(const pair *a, int64_t a_row, const pair *b, int64_t b_row,
                                                            float *c, int64_t c_row, int64_t n_pairs, int add,
                                                            int vectors) {
    __m512 sum[ROWS][VECTORS];
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < vectors; j++)
            sum[i][j] = add ? _mm512_loadu_ps(c + i * c_row + j * LANES) : _mm512_setzero_ps();
    for (int64_t p = 0; p < n_pairs; p++) {
        __m512i right[VECTORS];
        for (int j = 0; j < vectors; j++) right[j] = _mm512_loadu_si512(b + p * b_row + j * LANES);
        for (int i = 0; i < ROWS; i++) {
            __m512i left = _mm512_set1_epi32((int)a[i * a_row + p]);
            for (int j = 0; j < vectors; j++)
                sum[i][j] = _mm512_dpbf16_ps(sum[i][j], (__m512bh)left, (__m512bh)right[j]);
        }
    }
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < vectors; j++) _mm512_storeu_ps(c + i * c_row + j * LANES, sum[i][j]);
}

// C[n_rows, n_lanes] (+)= A[n_rows, n_pairs]·B[n_pairs, n_lanes]; rows in fours, lanes in sixteens.
static void product(const pair *a, int64_t a_row, const pair *b, int64_t b_row, float *c, int64_t c_row,
                    int64_t n_rows, int64_t n_lanes, int64_t n_pairs, int add) {
    for (int64_t n = 0; n < n_lanes; n += TILE)
        for (int64_t m = 0; m < n_rows; m += ROWS) {
            const pair *left = a + m * a_row, *right = b + n;
            float *to = c + m * c_row + n;
            switch ((n_lanes - n) / LANES) {
                case 1: four_rows(left, a_row, right, b_row, to, c_row, n_pairs, add, 1); break;
                case 2: four_rows(left, a_row, right, b_row, to, c_row, n_pairs, add, 2); break;
                case 3: four_rows(left, a_row, right, b_row, to, c_row, n_pairs, add, 3); break;
                default: four_rows(left, a_row, right, b_row, to, c_row, n_pairs, add, VECTORS);
            }
        }
}

// ---------------------------------------------------------------------------------------------------------------------
// Forward

typedef struct {
    int64_t padded, k_pairs, v_pairs;
    pair *rows, *keys, *values;       // of one key/value head: keys by rows, values by channels
    pair *q_rows, *queries, *weights; // of one tile
    float *scores, *out;              // of one tile: [64 keys, 64 queries], [2·v_pairs, 64 queries]
} forward_space;

static int64_t lay_out_forward(forward_space *w, const attention *a, char *memory) {
    int64_t used = 0;
    w->padded = round_up(a->length, TILE);
    w->k_pairs = round_up(a->width, 2) / 2;
    w->v_pairs = round_up(a->value_width, ROWS) / 2;
    w->rows = take(memory, &used, w->padded * w->v_pairs * sizeof(pair));
    w->keys = take(memory, &used, w->padded * w->k_pairs * sizeof(pair));
    w->values = take(memory, &used, w->padded * w->v_pairs * sizeof(pair));
    w->q_rows = take(memory, &used, TILE * w->k_pairs * sizeof(pair));
    w->queries = take(memory, &used, TILE * w->k_pairs * sizeof(pair));
    w->weights = take(memory, &used, TILE / 2 * TILE * sizeof(pair));
    w->scores = take(memory, &used, TILE * TILE * sizeof(float));
    w->out = take(memory, &used, 2 * w->v_pairs * TILE * sizeof(float));
    return used;
}

// Maxima, sums of exponentials and of their squares, of 64 queries.
typedef struct {
    __m512 top[VECTORS], sum[VECTORS], squares[VECTORS];
} running;

// From scores of 64 keys to weights as pairs of keys; what was summed before shrinks where a maximum grows.
static void weigh(const forward_space *w, __m512 scale, view seen, int first, running *r) {
    int grown = 0;
    __m512 shrink[VECTORS];
    for (int j = 0; j < VECTORS; j++) {
        float *scores = w->scores + j * LANES;
        __m512 top = r->top[j], sum = _mm512_setzero_ps(), squares = _mm512_setzero_ps();
        for (int64_t key = 0; key < TILE; key++) {
            __m512 score = _mm512_mul_ps(scale, _mm512_load_ps(scores + key * TILE));
            _mm512_store_ps(scores + key * TILE, score);
            top = _mm512_mask_max_ps(top, that_see(seen, key, j), top, score);
        }
        for (int64_t key = 0; key < TILE; key += 2) {
            __m512 weight[2];
            for (int i = 0; i < 2; i++) {
                __m512 below = _mm512_sub_ps(_mm512_load_ps(scores + (key + i) * TILE), top);
                weight[i] = _mm512_maskz_mov_ps(that_see(seen, key + i, j), exponential(below));
                sum = _mm512_add_ps(sum, weight[i]);
                squares = _mm512_fmadd_ps(weight[i], weight[i], squares);
            }
            _mm512_store_si512(w->weights + key / 2 * TILE + j * LANES, paired(weight[0], weight[1]));
        }
        grown |= _mm512_cmp_ps_mask(top, r->top[j], _CMP_NEQ_UQ);
        shrink[j] = exponential(_mm512_sub_ps(r->top[j], top));
        r->top[j] = top;
        r->sum[j] = _mm512_fmadd_ps(r->sum[j], shrink[j], sum);
        r->squares[j] = _mm512_fmadd_ps(r->squares[j], _mm512_mul_ps(shrink[j], shrink[j]), squares);
    }
    if (!grown || first) return;
    for (int64_t channel = 0; channel < 2 * w->v_pairs; channel++)
        for (int j = 0; j < VECTORS; j++) {
            float *out = w->out + channel * TILE + j * LANES;
            _mm512_store_ps(out, _mm512_mul_ps(shrink[j], _mm512_load_ps(out)));
        }
}

// Write output, log-sum-exp and what else is wanted of the queries of a tile.
static void finish(const attention *a, const forward_space *w, const running *r, int64_t b, int64_t h, int64_t start,
                   int64_t count) {
    float tops[TILE], sums[TILE], squares[TILE];
    for (int j = 0; j < VECTORS; j++) {
        _mm512_storeu_ps(tops + j * LANES, r->top[j]);
        _mm512_storeu_ps(sums + j * LANES, r->sum[j]);
        _mm512_storeu_ps(squares + j * LANES, r->squares[j]);
    }
    for (int64_t t = 0; t < count; t++) {
        int64_t row = (b * a->n_heads + h) * a->length + start + t;
        a->lse[row] = tops[t] + logf(sums[t]);
        if (a->squares) a->squares[row] = squares[t] / (sums[t] * sums[t]);
        bf16 *out = rows_of(a->out, b, h, start + t);
        __m512 share = _mm512_set1_ps(1.f / sums[t]);
        for (int64_t channel = 0; channel < a->value_width; channel += LANES) {
            __mmask16 lanes = first_lanes(a->value_width - channel);
            __m512 x = _mm512_mul_ps(share, of_query(w->out, t, channel, lanes));
            store_bf16(out + channel, lanes, x);
            if (a->rest)
                store_rest(rest_of(a, b, h, start + t) + channel, lanes, x, load_bf16(out + channel, lanes));
        }
    }
}

static void forward_tile(const attention *a, const forward_space *w, int64_t b, int64_t h, int64_t i) {
    int64_t start = i * TILE, count = at_most(a->length - start, TILE);
    copy_rows(rows_of(a->q, b, h, start), a->q.position, count, a->width, w->q_rows, TILE, w->k_pairs);
    channels_right(w->q_rows, TILE, w->k_pairs, w->queries);
    memset(w->out, 0, 2 * w->v_pairs * TILE * sizeof(float));
    running r;
    for (int j = 0; j < VECTORS; j++) {
        r.top[j] = _mm512_set1_ps(-FLT_MAX);  // and not −∞, whose distance to itself is no number
        r.sum[j] = r.squares[j] = _mm512_setzero_ps();
    }
    int64_t first = first_tile(a, start);
    for (int64_t tile = first; tile <= i; tile++) {
        product(w->keys + tile * TILE * w->k_pairs, w->k_pairs, w->queries, TILE, w->scores, TILE, TILE, TILE,
                w->k_pairs, 0);
        weigh(w, _mm512_set1_ps(a->scale), view_of(a, tile, start), tile == first, &r);
        product(w->values + tile * TILE / 2, w->padded / 2, w->weights, TILE, w->out, TILE, 2 * w->v_pairs, TILE,
                TILE / 2, 1);
    }
    finish(a, w, &r, b, h, start, count);
}

// Output, log-sum-exp, and what else there is room for. Returns 0, or 1 where memory is short.
int birthmark_causal_forward(const attention *a) {
    int failed = 0;
    int64_t n_kv = a->n_sequences * a->n_kv_heads, shared = a->n_heads / a->n_kv_heads;
    // With fewer heads than threads, several threads take every so many tiles of one head.
    int64_t parts = at_most(round_up(omp_get_max_threads(), n_kv) / n_kv, round_up(a->length, TILE) / TILE);
#pragma omp parallel
    {
        forward_space w;
        char *memory = workspace(lay_out_forward(&w, a, NULL), &failed);
        if (!failed) {
            lay_out_forward(&w, a, memory);
#pragma omp for collapse(2) schedule(dynamic)
            for (int64_t kv = 0; kv < n_kv; kv++)
                for (int64_t part = 0; part < parts; part++) {
                    int64_t b = kv / a->n_kv_heads, g = kv % a->n_kv_heads;
                    copy_rows(rows_of(a->k, b, g, 0), a->k.position, a->length, a->width, w.keys, w.padded, w.k_pairs);
                    copy_rows(rows_of(a->v, b, g, 0), a->v.position, a->length, a->value_width, w.rows, w.padded,
                              w.v_pairs);
                    channels_left(w.rows, w.padded, w.v_pairs, w.values);
                    for (int64_t h = g * shared; h < (g + 1) * shared; h++)
                        for (int64_t i = part; i < w.padded / TILE; i += parts) forward_tile(a, &w, b, h, i);
                }
        }
        free(memory);
    }
    return failed;
}

// ---------------------------------------------------------------------------------------------------------------------
// Backward

typedef struct {
    int64_t padded, k_pairs, v_pairs;
    pair *keys, *values, *keys_left;           // of one key/value head: rows, and keys by channels
    float *dk, *dv;                            // of one key/value head
    pair *q_rows, *q_channels, *queries;       // of one tile: rows, and as the right matrix both ways
    pair *d_rows, *d_channels, *d_out;         // the same of the upstream gradient
    float *scores, *slopes, *dq;               // of one tile; slopes: dp
    pair *weights, *d_scores, *d_scores_right; // of one tile: left matrices, and pairs of keys
} backward_space;

static int64_t lay_out_backward(backward_space *w, const attention *a, char *memory) {
    int64_t used = 0;
    w->padded = round_up(a->length, TILE);
    w->k_pairs = round_up(a->width, LANES) / 2;
    w->v_pairs = round_up(a->value_width, LANES) / 2;
    int64_t of_keys = w->padded * w->k_pairs, of_values = w->padded * w->v_pairs;
    pair **of_head[] = {&w->keys, &w->keys_left, &w->values};
    for (int i = 0; i < 3; i++) *of_head[i] = take(memory, &used, (i < 2 ? of_keys : of_values) * sizeof(pair));
    w->dk = take(memory, &used, 2 * of_keys * sizeof(float));
    w->dv = take(memory, &used, 2 * of_values * sizeof(float));
    pair **of_queries[] = {&w->q_rows, &w->q_channels, &w->queries};
    pair **of_gradient[] = {&w->d_rows, &w->d_channels, &w->d_out};
    pair **of_tile[] = {&w->weights, &w->d_scores, &w->d_scores_right};
    for (int i = 0; i < 3; i++) {
        *of_queries[i] = take(memory, &used, TILE * w->k_pairs * sizeof(pair));
        *of_gradient[i] = take(memory, &used, TILE * w->v_pairs * sizeof(pair));
        *of_tile[i] = take(memory, &used, TILE * TILE / 2 * sizeof(pair));
    }
    w->scores = take(memory, &used, TILE * TILE * sizeof(float));
    w->slopes = take(memory, &used, TILE * TILE * sizeof(float));
    w->dq = take(memory, &used, 2 * w->k_pairs * TILE * sizeof(float));
    return used;
}

// What is known of 64 queries.
typedef struct {
    __m512 lse[VECTORS], shift[VECTORS], twice_h[VECTORS];
} known;

static known known_of(const attention *a, int64_t b, int64_t h, int64_t start, int64_t count) {
    float shift[TILE] = {0}, twice_h[TILE] = {0};
    int64_t row = (b * a->n_heads + h) * a->length + start;
    for (int64_t t = 0; t < count; t++) {
        const bf16 *d_out = rows_of(a->d_out, b, h, start + t);
        const bf16 *out = rows_of(a->out, b, h, start + t);
        const int8_t *rest = rest_of(a, b, h, start + t);
        __m512 sum = _mm512_setzero_ps();
        for (int64_t channel = 0; channel < a->value_width; channel += LANES) {
            __mmask16 lanes = first_lanes(a->value_width - channel);
            __m512 whole = load_bf16(out + channel, lanes);
            whole = _mm512_add_ps(whole, load_rest(rest + channel, lanes, whole));
            sum = _mm512_fmadd_ps(load_bf16(d_out + channel, lanes), whole, sum);
        }
        shift[t] = _mm512_reduce_add_ps(sum);
        if (a->d_lse) shift[t] -= a->d_lse[row + t];
        if (a->d_squares) {
            twice_h[t] = 2 * a->d_squares[row + t];
            shift[t] += twice_h[t] * a->squares[row + t];
        }
    }
    known x;
    for (int j = 0; j < VECTORS; j++) {
        // Queries beyond the last weigh nothing.
        x.lse[j] = _mm512_mask_loadu_ps(_mm512_set1_ps(INFINITY), first_lanes(count - j * LANES),
                                        a->lse + row + j * LANES);
        x.shift[j] = _mm512_loadu_ps(shift + j * LANES);
        x.twice_h[j] = _mm512_loadu_ps(twice_h + j * LANES);
    }
    return x;
}

// From scores and dp of 64 keys to weights and score gradients.
static void slope(const backward_space *w, __m512 scale, view seen, const known *x) {
    bf16 *weights = (bf16 *)w->weights, *d_scores = (bf16 *)w->d_scores;
    for (int64_t key = 0; key < TILE; key += 2)
        for (int j = 0; j < VECTORS; j++) {
            __m512 d[2];
            for (int i = 0; i < 2; i++) {
                int64_t at = (key + i) * TILE + j * LANES;
                __m512 weight = exponential(_mm512_fmsub_ps(scale, _mm512_load_ps(w->scores + at), x->lse[j]));
                weight = _mm512_maskz_mov_ps(that_see(seen, key + i, j), weight);
                d[i] = _mm512_sub_ps(_mm512_load_ps(w->slopes + at), x->shift[j]);
                d[i] = _mm512_mul_ps(weight, _mm512_fmadd_ps(x->twice_h[j], weight, d[i]));
                store_bf16(weights + at, 0xffff, weight);
                store_bf16(d_scores + at, 0xffff, d[i]);
            }
            _mm512_store_si512(w->d_scores_right + key / 2 * TILE + j * LANES, paired(d[0], d[1]));
        }
}

static void backward_tile(const attention *a, const backward_space *w, int64_t b, int64_t h, int64_t i) {
    int64_t start = i * TILE, count = at_most(a->length - start, TILE), k_lanes = 2 * w->k_pairs, v_lanes = 2 * w->v_pairs;
    __m512 scale = _mm512_set1_ps(a->scale);
    known x = known_of(a, b, h, start, count);
    copy_rows(rows_of(a->q, b, h, start), a->q.position, count, a->width, w->q_rows, TILE, w->k_pairs);
    channels_right(w->q_rows, TILE, w->k_pairs, w->q_channels);
    rows_right(w->q_rows, TILE, w->k_pairs, w->queries);
    copy_rows(rows_of(a->d_out, b, h, start), a->d_out.position, count, a->value_width, w->d_rows, TILE, w->v_pairs);
    channels_right(w->d_rows, TILE, w->v_pairs, w->d_channels);
    rows_right(w->d_rows, TILE, w->v_pairs, w->d_out);
    memset(w->dq, 0, k_lanes * TILE * sizeof(float));
    for (int64_t tile = first_tile(a, start); tile <= i; tile++) {
        int64_t key = tile * TILE;
        product(w->keys + key * w->k_pairs, w->k_pairs, w->q_channels, TILE, w->scores, TILE, TILE, TILE, w->k_pairs, 0);
        product(w->values + key * w->v_pairs, w->v_pairs, w->d_channels, TILE, w->slopes, TILE, TILE, TILE, w->v_pairs,
                0);
        slope(w, scale, view_of(a, tile, start), &x);
        product(w->weights, TILE / 2, w->d_out, v_lanes, w->dv + key * v_lanes, v_lanes, TILE, v_lanes, TILE / 2, 1);
        product(w->d_scores, TILE / 2, w->queries, k_lanes, w->dk + key * k_lanes, k_lanes, TILE, k_lanes, TILE / 2, 1);
        product(w->keys_left + key / 2, w->padded / 2, w->d_scores_right, TILE, w->dq, TILE, k_lanes, TILE, TILE / 2, 1);
    }
    for (int64_t t = 0; t < count; t++)
        for (int64_t channel = 0; channel < a->width; channel += LANES) {
            __mmask16 lanes = first_lanes(a->width - channel);
            __m512 d = of_query(w->dq, t, channel, lanes);
            store_bf16(rows_of(a->dq, b, h, start + t) + channel, lanes, _mm512_mul_ps(scale, d));
        }
}

static void store_rows(tensor to, int64_t b, int64_t g, int64_t length, int64_t width, const float *x, int64_t n_lanes,
                       float scale) {
    for (int64_t t = 0; t < length; t++)
        for (int64_t channel = 0; channel < width; channel += LANES) {
            __m512 scaled = _mm512_mul_ps(_mm512_set1_ps(scale), _mm512_load_ps(x + t * n_lanes + channel));
            store_bf16(rows_of(to, b, g, t) + channel, first_lanes(width - channel), scaled);
        }
}

// Gradients of queries, keys and values. Returns 0, or 1 where memory is short. A key/value head is one thread's.
int birthmark_causal_backward(const attention *a) {
    int failed = 0;
    int64_t n_kv = a->n_sequences * a->n_kv_heads, shared = a->n_heads / a->n_kv_heads;
#pragma omp parallel
    {
        backward_space w;
        char *memory = workspace(lay_out_backward(&w, a, NULL), &failed);
        if (!failed) {
            lay_out_backward(&w, a, memory);
            int64_t k_lanes = 2 * w.k_pairs, v_lanes = 2 * w.v_pairs;
#pragma omp for schedule(dynamic)
            for (int64_t kv = 0; kv < n_kv; kv++) {
                int64_t b = kv / a->n_kv_heads, g = kv % a->n_kv_heads;
                copy_rows(rows_of(a->k, b, g, 0), a->k.position, a->length, a->width, w.keys, w.padded, w.k_pairs);
                copy_rows(rows_of(a->v, b, g, 0), a->v.position, a->length, a->value_width, w.values, w.padded,
                          w.v_pairs);
                channels_left(w.keys, w.padded, w.k_pairs, w.keys_left);
                memset(w.dk, 0, w.padded * k_lanes * sizeof(float));
                memset(w.dv, 0, w.padded * v_lanes * sizeof(float));
                for (int64_t h = g * shared; h < (g + 1) * shared; h++)
                    for (int64_t i = 0; i < w.padded / TILE; i++) backward_tile(a, &w, b, h, i);
                store_rows(a->dk, b, g, a->length, a->width, w.dk, k_lanes, a->scale);
                store_rows(a->dv, b, g, a->length, a->value_width, w.dv, v_lanes, 1.f);
            }
        }
        free(memory);
    }
    return failed;
}
