/* dequant_tool.c - the conversions of quant.h for the Python tests, as a filter from stdin to stdout.
 *
 *   dequant_tool types      the table: number, name, block, bytes for the type numbers below 1,000
 *   dequant_tool TYPE       blocks of the type with this number to floats
 *   dequant_tool to-f16     floats to halves */
#include "base.h"
#include "quant.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void print_types(void)
{
    for (uint32_t t = 0; t < 1000; t++) {
        const struct type_info *info = type_info(t);
        printf("%u %s %d %d %s\n", t, type_name(t), info ? info->block : 0, info ? info->bytes : 0,
               info ? info->name : "-");
    }
}

int main(int argc, char **argv)
{
    struct error e;
    struct bytes in = { 0 };
    char chunk[1 << 16];
    if (argc != 2) return GEN_USAGE;
    if (strcmp(argv[1], "types") == 0) {
        print_types();
        return GEN_OK;
    }
    for (size_t n; (n = fread(chunk, 1, sizeof chunk, stdin)) > 0;)
        if (!bytes_add(&in, chunk, n)) return GEN_RUN;
    if (strcmp(argv[1], "to-f16") == 0) {
        for (size_t i = 0; i < in.len / 4; i++) {
            float f;
            memcpy(&f, in.data + 4 * i, 4);
            uint16_t h = f32_to_f16(f);
            fwrite(&h, 2, 1, stdout);
        }
    } else {
        const struct type_info *info = type_info((uint32_t)strtoul(argv[1], NULL, 10));
        if (!info || in.len % (size_t)info->bytes) return GEN_USAGE;
        size_t n = in.len / (size_t)info->bytes * (size_t)info->block;
        float *out = alloc_zeroed(n, sizeof *out, "weights", &e);    /* exact, so that the sanitizer guards its end */
        if (!out) return GEN_RUN;
        memset(out, 0xFF, n * sizeof *out);
        info->dequantise(in.data ? in.data : chunk, out, n);
        fwrite(out, sizeof *out, n, stdout);
        free(out);
    }
    bytes_free(&in);
    return fflush(stdout) == 0 && !ferror(stdout) ? GEN_OK : GEN_RUN;
}
