/* mma_twins.h - what the tensor core wrappers of device.h do, under the same names (there they are inline PTX, seen by
 * nvcc alone). Fragments lie in the lanes as the PTX manual draws them. */
#ifndef EMULATOR_MMA_TWINS_H
#define EMULATOR_MMA_TWINS_H

/* d[16][8] += a[16][16] b[16][8]: mma.sync.aligned.m16n8k16.row.col.f32, of f16 or bf16. */
void emulator_mma(float d[4], const uint32_t a[4], const uint32_t b[2], bool bf16, emulator::place at);
/* ldmatrix.sync.aligned.m8n8.x2 or .x4.trans.shared.b16: lane i gives the address of row i % 8 of matrix i / 8. */
void emulator_ldmatrix_trans(uint32_t *r, int matrices, const void *row, emulator::place at);

static inline void mma_f16(float d[4], const uint32_t a[4], const uint32_t b[2], HERE)
{
    emulator_mma(d, a, b, false, at);
}
static inline void mma_bf16(float d[4], const uint32_t a[4], const uint32_t b[2], HERE)
{
    emulator_mma(d, a, b, true, at);
}
static inline void ldmatrix_x2_trans(uint32_t r[2], const void *row, HERE) { emulator_ldmatrix_trans(r, 2, row, at); }
static inline void ldmatrix_x4_trans(uint32_t r[4], const void *row, HERE) { emulator_ldmatrix_trans(r, 4, row, at); }

/* cvt.rn.f16x2.f32, cvt.rn.bf16x2.f32, sub.f16x2, mul.f16x2. */
uint32_t pair_halves(float low, float high);
uint32_t pair_bf16(float low, float high);
uint32_t minus_halves(uint32_t x, uint32_t y);
uint32_t times_halves(uint32_t x, uint32_t y);

#endif
