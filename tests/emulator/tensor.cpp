/* tensor.cpp - matrix instructions: what a warp's lanes hold of a fragment, as the PTX manual draws it. */
#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "emulator.h"

using namespace emulator;

namespace {
/* One lane's registers; row and column of a lane in fragments of 8 rows and 4 columns of registers. */
struct product { float *d; const uint32_t *a, *b; };

/* d[16][8] += a[16][16] b[16][8]; a register holds two elements that are neighbours in k. Register i of a: rows from
 * 8 * (i & 1), columns from 8 * (i >> 1). Register i of b: rows from 8 * i. */
template <bool BF16> void multiply(void *const lanes[], unsigned)
{
    float a[16][16], b[16][8];
    auto number = [](uint32_t r, int k) {
        uint16_t bits = (uint16_t)(r >> 16 * k);
        return BF16 ? as<float>((uint32_t)bits << 16) : half_to_float(bits);
    };
    for (int l = 0; l < 32; l++) {
        const product *p = (const product *)lanes[l];
        for (int i = 0; i < 4; i++)
            for (int k = 0; k < 2; k++) a[l / 4 + 8 * (i & 1)][l % 4 * 2 + k + 8 * (i >> 1)] = number(p->a[i], k);
        for (int i = 0; i < 2; i++)
            for (int k = 0; k < 2; k++) b[l % 4 * 2 + k + 8 * i][l / 4] = number(p->b[i], k);
    }
    for (int m = 0; m < 16; m++)
        for (int n = 0; n < 8; n++) {
            float &d = ((product *)lanes[m % 8 * 4 + n / 2])->d[2 * (m / 8) + n % 2];
            for (int k = 0; k < 16; k++) d += a[m][k] * b[k][n];
        }
}

struct rows { const unsigned char *row; uint32_t *r; };
template <int N> void load_matrices(void *const lanes[], unsigned)
{
    uint32_t got[32][N];
    for (int l = 0; l < 32; l++)
        for (int i = 0; i < N; i++) {
            uint16_t two[2];
            for (int k = 0; k < 2; k++)
                memcpy(&two[k], ((const rows *)lanes[8 * i + l % 4 * 2 + k])->row + 2 * (l / 4), 2);
            got[l][i] = two[0] | (uint32_t)two[1] << 16;
        }
    for (int l = 0; l < 32; l++) memcpy(((rows *)lanes[l])->r, got[l], sizeof got[l]);
}

template <class F> uint32_t halves(uint32_t x, uint32_t y, F f)
{
    return pair_halves(f(half_to_float((uint16_t)x), half_to_float((uint16_t)y)),
                       f(half_to_float((uint16_t)(x >> 16)), half_to_float((uint16_t)(y >> 16))));
}
}

void emulator_mma(float d[4], const uint32_t a[4], const uint32_t b[2], bool bf16, place at)
{
    product p = { d, a, b };
    warp_meet(~0u, &p, bf16 ? multiply<true> : multiply<false>, bf16 ? "mma bf16" : "mma f16", false, at);
}
void emulator_ldmatrix_trans(uint32_t *r, int matrices, const void *row, place at)
{
    if ((uintptr_t)row % 16) fault(at, "ldmatrix: a row that does not start at a multiple of 16");
    if (!is_shared((uintptr_t)row)) fault(at, "ldmatrix: a row that is not in shared memory");
    access((uintptr_t)row, 16, false, false, __builtin_return_address(0));
    rows x = { (const unsigned char *)row, r };
    warp_meet(~0u, &x, matrices == 2 ? load_matrices<2> : load_matrices<4>, "ldmatrix", false, at);
}
uint32_t pair_halves(float low, float high) { return float_to_half(low) | (uint32_t)float_to_half(high) << 16; }
uint32_t pair_bf16(float low, float high) { return float_to_bf16(low) | (uint32_t)float_to_bf16(high) << 16; }
uint32_t minus_halves(uint32_t x, uint32_t y) { return halves(x, y, [](float a, float b) { return a - b; }); }
uint32_t times_halves(uint32_t x, uint32_t y) { return halves(x, y, [](float a, float b) { return a * b; }); }
