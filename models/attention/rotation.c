// Turns the channel pairs of bf16 queries or keys by angles, in float32: each result is rounded once, as torch's
// products and differences are (compile with -ffp-contract=off).

#include "bf16.h"

// Steps in elements.
typedef struct {
    int64_t n_sequences, n_heads, length, width, n_pairs;
    const bf16 *x;  // [B, H, T, K], the last axis contiguous
    int64_t x_sequence, x_head, x_position;
    bf16 *to;  // the same
    int64_t to_sequence, to_head, to_position;
    const float *cos, *sin;  // [B or 1, T, P], the last axis contiguous
    int64_t table_sequence, table_position;
} turn;

void birthmark_turn(const turn *a) {
#pragma omp parallel for collapse(2) schedule(static)
    for (int64_t b = 0; b < a->n_sequences; b++)
        for (int64_t t = 0; t < a->length; t++) {
            const float *restrict cos = a->cos + b * a->table_sequence + t * a->table_position;
            const float *restrict sin = a->sin + b * a->table_sequence + t * a->table_position;
            for (int64_t h = 0; h < a->n_heads; h++) {
                const bf16 *restrict x = a->x + b * a->x_sequence + h * a->x_head + t * a->x_position;
                bf16 *restrict to = a->to + b * a->to_sequence + h * a->to_head + t * a->to_position;
                for (int64_t p = 0; p < a->n_pairs; p++) {
                    float first = wide(x[p]), second = wide(x[a->n_pairs + p]);
                    to[p] = rounded(first * cos[p] - second * sin[p]);
                    to[a->n_pairs + p] = rounded(second * cos[p] + first * sin[p]);
                }
                int64_t turned = 2 * a->n_pairs;
                memcpy(to + turned, x + turned, (a->width - turned) * sizeof(bf16));
            }
        }
}
