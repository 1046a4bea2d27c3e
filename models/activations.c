// Activations of bf16 numbers: a table holds the value of each of the 65,536 that there are, another the derivative.
// Every result is computed in float32 and rounded once.

#include <stddef.h>

#include "bf16.h"

enum { BLOCK = 4096 };

static inline int64_t end_of(int64_t start, int64_t n) { return start + BLOCK < n ? start + BLOCK : n; }

// y = values[x], or values[x] · by where there is a factor.
void birthmark_activation(int64_t n, const float *restrict values, const bf16 *restrict x, const bf16 *restrict by,
                          bf16 *restrict y) {
#pragma omp parallel for schedule(static)
    for (int64_t start = 0; start < n; start += BLOCK) {
        int64_t end = end_of(start, n);
        if (by == NULL)
            for (int64_t i = start; i < end; i++) y[i] = rounded(values[x[i]]);
        else
            for (int64_t i = start; i < end; i++) y[i] = rounded(values[x[i]] * wide(by[i]));
    }
}

// Gradients of x and of the factor, given that of y.
void birthmark_activation_gradients(int64_t n, const float *restrict values, const float *restrict slopes,
                                    const bf16 *restrict d, const bf16 *restrict x, const bf16 *restrict by,
                                    bf16 *restrict dx, bf16 *restrict d_by) {
#pragma omp parallel for schedule(static)
    for (int64_t start = 0; start < n; start += BLOCK) {
        int64_t end = end_of(start, n);
        if (by == NULL)
            for (int64_t i = start; i < end; i++) dx[i] = rounded(wide(d[i]) * slopes[x[i]]);
        else
            for (int64_t i = start; i < end; i++) {
                float given = wide(d[i]);
                dx[i] = rounded(given * wide(by[i]) * slopes[x[i]]);
                d_by[i] = rounded(given * values[x[i]]);
            }
    }
}
