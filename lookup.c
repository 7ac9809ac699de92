/* lookup.c - prompt-lookup drafts. */
#include "lookup.h"

#include <string.h>

enum { GRAM = 3,                       /* tokens that must match */
       FIRST = 3,                      /* length of a draft that nothing is known about */
       REST_MOST = 6 };                /* after k failures in a row, 2^k - 1 tokens without drafts, k at most this */

int lookup_draft(struct lookup *l, const int32_t *history, size_t n, int most, int32_t draft[LOOKUP_MOST])
{
    if (l->rest > 0) return l->rest--, 0;
    if (l->length == 0) l->length = FIRST;
    if (n <= GRAM) return 0;
    const int32_t *end = history + n - GRAM;
    for (size_t i = n - GRAM; i-- > 0; ) {
        if (history[i] != end[0] || memcmp(history + i, end, GRAM * sizeof *end) != 0) continue;
        int count = l->length < most ? l->length : most;
        if ((size_t)count > n - (i + GRAM)) count = (int)(n - (i + GRAM));
        memcpy(draft, history + i + GRAM, (size_t)count * sizeof *draft);
        return count;
    }
    return 0;
}

void lookup_learn(struct lookup *l, int drafted, int accepted)
{
    if (accepted == 0) {
        l->misses++;
        l->rest = (1 << (l->misses < REST_MOST ? l->misses : REST_MOST)) - 1;
        l->length = FIRST;
    } else {
        l->misses = 0;
        l->length = accepted == drafted ? accepted * 2 : accepted + 1;
        if (l->length > LOOKUP_MOST) l->length = LOOKUP_MOST;
    }
}
