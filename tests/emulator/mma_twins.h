/* mma_twins.h - what the tensor core wrappers of device.h do, under the same names (there they are inline PTX, seen by
 * nvcc alone). Fragments lie in the lanes as the PTX manual draws them. */
#ifndef EMULATOR_MMA_TWINS_H
#define EMULATOR_MMA_TWINS_H

/* d[16][8] += a[16][16] b[16][8]: mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32. */
void emulator_mma_f16(float d[4], const uint32_t a[4], const uint32_t b[2], emulator::place at);
/* ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16: lane i gives the address of row i % 8 of matrix i / 8. */
void emulator_ldmatrix_x4_trans(uint32_t r[4], const void *row, emulator::place at);

static inline void mma_f16(float d[4], const uint32_t a[4], const uint32_t b[2], HERE)
{
    emulator_mma_f16(d, a, b, at);
}
static inline void ldmatrix_x4_trans(uint32_t r[4], const void *row, HERE) { emulator_ldmatrix_x4_trans(r, row, at); }

#endif
