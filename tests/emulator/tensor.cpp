/* tensor.cpp - matrix instructions: what a warp's lanes hold of a fragment, as the PTX manual draws it. */
#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "emulator.h"

using namespace emulator;

namespace {
/* One lane's registers; row and column of a lane in fragments of 8 rows and 4 columns of registers. */
template <class Sum> struct product { Sum *d; const uint32_t *a, *b; };

/* Element k of the lane's register i, of 4 / per bytes each. */
float half_at(const uint32_t *r, int i, int k) { return half_to_float((uint16_t)(r[i] >> 16 * k)); }
float bf16_at(const uint32_t *r, int i, int k) { return bf16_to_float((uint16_t)(r[i] >> 16 * k)); }
int byte_at(const uint32_t *r, int i, int k) { return (int8_t)(r[i] >> 8 * k); }

/* d[16][8] += a[16][4 * 2 * PER] b[4 * 2 * PER][8]; a register holds PER elements that are neighbours in k. Register
 * i of a: rows from 8 * (i & 1), columns from 4 * PER * (i >> 1). Register i of b: rows from 4 * PER * i. */
template <class Sum, int PER, Sum (*AT)(const uint32_t *, int, int)> void multiply(void *const lanes[], unsigned)
{
    auto lane = [&](int row, int column) { return (product<Sum> *)lanes[4 * row + column]; };
    for (int m = 0; m < 16; m++)
        for (int n = 0; n < 8; n++) {
            Sum &d = lane(m % 8, n / 2)->d[2 * (m / 8) + n % 2];
            for (int k = 0; k < 8 * PER; k++) {
                int quarter = k / PER % 4, half = k / PER / 4;
                d += AT(lane(m % 8, quarter)->a, m / 8 + 2 * half, k % PER) * AT(lane(n, quarter)->b, half, k % PER);
            }
        }
}

struct rows { const unsigned char *row; uint32_t *r; int n; bool trans; };
void load_matrices(void *const lanes[], unsigned)
{
    uint32_t got[32][4];
    const rows *first = (const rows *)lanes[0];
    for (int l = 0; l < 32; l++)
        for (int i = 0; i < first->n; i++) {
            uint16_t two[2];
            for (int k = 0; k < 2; k++) {
                int row = first->trans ? l % 4 * 2 + k : l / 4, column = first->trans ? l / 4 : l % 4 * 2 + k;
                memcpy(&two[k], ((const rows *)lanes[8 * i + row])->row + 2 * column, 2);
            }
            got[l][i] = two[0] | (uint32_t)two[1] << 16;
        }
    for (int l = 0; l < 32; l++) memcpy(((rows *)lanes[l])->r, got[l], sizeof(uint32_t) * (size_t)first->n);
}
}

void emulator_mma_f16(float d[4], const uint32_t a[4], const uint32_t b[2], place at)
{
    product<float> p = { d, a, b };
    warp_meet(~0u, &p, multiply<float, 2, half_at>, "mma f16", false, at);
}
void emulator_mma_bf16(float d[4], const uint32_t a[4], const uint32_t b[2], place at)
{
    product<float> p = { d, a, b };
    warp_meet(~0u, &p, multiply<float, 2, bf16_at>, "mma bf16", false, at);
}
void emulator_mma_s8(int32_t d[4], const uint32_t a[4], const uint32_t b[2], place at)
{
    product<int32_t> p = { d, a, b };
    warp_meet(~0u, &p, multiply<int32_t, 4, byte_at>, "mma s8", false, at);
}
void emulator_ldmatrix(uint32_t *r, int n, bool trans, const void *row, place at)
{
    if ((uintptr_t)row % 16) fault(at, "ldmatrix: a row that does not start at a multiple of 16");
    if ((int)lane() < 8 * n) {
        if (!is_shared((uintptr_t)row)) fault(at, "ldmatrix: a row that is not in shared memory");
        access((uintptr_t)row, 16, false, false, __builtin_return_address(0));
    }
    rows x = { (const unsigned char *)row, r, n, trans };
    warp_meet(~0u, &x, load_matrices, "ldmatrix", false, at);
}
