/* kernels.c - which tables of kernels there are, and which this processor can use. */
#include "kernels.h"
#include "processor.h"

#include <cpuid.h>
#include <string.h>

/* ---- the processor ----------------------------------------------------------------------------------------------- */

struct cpuid { unsigned a, b, c, d; };

static struct cpuid cpuid(unsigned leaf, unsigned sub)
{
    struct cpuid r = { 0, 0, 0, 0 };
    if (!__get_cpuid_count(leaf, sub, &r.a, &r.b, &r.c, &r.d)) return (struct cpuid){ 0, 0, 0, 0 };
    return r;
}

/* All bits of `state` (XCR0: 2 xmm, 4 ymm, 0xE0 the AVX-512 registers) are saved by the system. */
static bool system_saves(unsigned state)
{
    if (!(cpuid(1, 0).c & bit_OSXSAVE)) return false;
    unsigned low, high;
    __asm__ volatile ("xgetbv" : "=a" (low), "=d" (high) : "c" (0));
    return (low & state) == state;
}

bool cpu_has_avx2(void)
{
    unsigned need = bit_AVX | bit_FMA | bit_F16C;
    return system_saves(0x6) && (cpuid(1, 0).c & need) == need && cpuid(7, 0).b & bit_AVX2;
}

bool cpu_has_avxvnni(void) { return cpu_has_avx2() && cpuid(7, 1).a & 1u << 4; }

bool cpu_has_avx512(void)
{
    unsigned need = bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ;
    return cpu_has_avx2() && system_saves(0xE6) && (cpuid(7, 0).b & need) == need && cpuid(7, 0).c & bit_AVX512VNNI;
}

/* ---- the tables -------------------------------------------------------------------------------------------------- */

extern const struct kernels kernels_generic, kernels_avx2, kernels_avxvnni, kernels_avx512;

const struct kernels *const kernel_tables[] = { &kernels_generic, &kernels_avx2, &kernels_avxvnni, &kernels_avx512 };
const int n_kernel_tables = sizeof kernel_tables / sizeof *kernel_tables;

const struct kernels *kernels_choose(const char *name, struct error *e)
{
    struct bytes usable = { 0 };
    for (int i = n_kernel_tables - 1; i >= 0; i--) {
        const struct kernels *k = kernel_tables[i];
        bool works = k->usable();
        if (works && (!name || !strcmp(name, k->name))) {
            bytes_free(&usable);
            return k;
        }
        if (works) bytes_printf(&usable, "%s%s", usable.len ? ", " : "", k->name);
        if (name && !strcmp(name, k->name)) {
            fail(e, GEN_USAGE, "GEN_ISA=%s needs instructions that this processor lacks; unset it to get the best",
                 name);
            bytes_free(&usable);
            return NULL;
        }
    }
    fail(e, GEN_USAGE, "GEN_ISA=%s is not an instruction set; this processor can use %s", name,
         usable.data ? usable.data : "none");
    bytes_free(&usable);
    return NULL;
}
