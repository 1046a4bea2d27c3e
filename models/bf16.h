// Numbers in bf16, to and from float32; for the C files of this package (compile with -I on this folder).

#ifndef BIRTHMARK_BF16_H
#define BIRTHMARK_BF16_H

#include <stdint.h>
#include <string.h>

typedef uint16_t bf16;

static inline float wide(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, sizeof y);
    return y;
}

// To the nearest, of two as near the even one.
static inline bf16 rounded(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    bf16 nearest = (bf16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
    return x != x ? 0x7fc0 : nearest;
}

#endif
