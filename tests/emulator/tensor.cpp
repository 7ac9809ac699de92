/* tensor.cpp - matrix instructions: what a warp's lanes hold of a fragment, as the PTX manual draws it. */
#include "cuda_fp16.h"
#include "emulator.h"

using namespace emulator;

namespace {
/* One lane's registers; row and column of a lane in fragments of 8 rows and 4 columns of registers. */
struct product { float *d; const uint32_t *a, *b; };

/* d[16][8] += a[16][16] b[16][8]; a register holds two elements that are neighbours in k. Register i of a: rows from
 * 8 * (i & 1), columns from 8 * (i >> 1). Register i of b: rows from 8 * i. */
void multiply(void *const lanes[], unsigned)
{
    auto lane = [&](int row, int column) { return (product *)lanes[4 * row + column]; };
    auto half = [](const uint32_t *r, int i, int k) { return half_to_float((uint16_t)(r[i] >> 16 * k)); };
    for (int m = 0; m < 16; m++)
        for (int n = 0; n < 8; n++) {
            float &d = lane(m % 8, n / 2)->d[2 * (m / 8) + n % 2];
            for (int k = 0; k < 16; k++) {
                const uint32_t *a = lane(m % 8, k / 2 % 4)->a, *b = lane(n, k / 2 % 4)->b;
                d += half(a, m / 8 + 2 * (k / 8), k % 2) * half(b, k / 8, k % 2);
            }
        }
}

struct rows { const unsigned char *row; uint32_t *r; };
void load_matrices(void *const lanes[], unsigned)
{
    uint32_t got[32][4];
    for (int l = 0; l < 32; l++)
        for (int i = 0; i < 4; i++) {
            uint16_t two[2];
            for (int k = 0; k < 2; k++)
                memcpy(&two[k], ((const rows *)lanes[8 * i + l % 4 * 2 + k])->row + 2 * (l / 4), 2);
            got[l][i] = two[0] | (uint32_t)two[1] << 16;
        }
    for (int l = 0; l < 32; l++) memcpy(((rows *)lanes[l])->r, got[l], sizeof got[l]);
}
}

void emulator_mma_f16(float d[4], const uint32_t a[4], const uint32_t b[2], place at)
{
    product p = { d, a, b };
    warp_meet(~0u, &p, multiply, "mma f16", false, at);
}
void emulator_ldmatrix_x4_trans(uint32_t r[4], const void *row, place at)
{
    if ((uintptr_t)row % 16) fault(at, "ldmatrix: a row that does not start at a multiple of 16");
    if (!is_shared((uintptr_t)row)) fault(at, "ldmatrix: a row that is not in shared memory");
    access((uintptr_t)row, 16, false, false, __builtin_return_address(0));
    rows x = { (const unsigned char *)row, r };
    warp_meet(~0u, &x, load_matrices, "ldmatrix", false, at);
}
