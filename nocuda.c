/* nocuda.c - stands in for the CUDA backend in a program that is built without it. */
#include "backend.h"

static const char absent[] = "this gen was built without CUDA (make found no nvcc)";

bool cuda_open(struct backend **out, const struct model *m, const struct backend_options *o, struct error *e)
{
    (void)out, (void)m, (void)o;
    return fail(e, GEN_MODEL, "%s", absent);
}

size_t cuda_memory(int place, int places, struct error *e)
{
    (void)place, (void)places;
    return fail(e, GEN_MODEL, "%s", absent), 0;
}
