/* lookup.h - prompt-lookup drafts for speculative decoding: the text so far proposes how it goes on (Saxena 2023,
 * "Prompt Lookup Decoding"). Drafts never change what is generated, only how many tokens one forward pass settles. */
#ifndef LOOKUP_H
#define LOOKUP_H

#include <stddef.h>
#include <stdint.h>

enum { LOOKUP_MOST = 15 };             /* tokens of the longest draft */

/* How far drafts are trusted; a zeroed struct starts. */
struct lookup { int length, misses, rest; };

/* Fills draft with the tokens that followed the latest earlier occurrence of history's last 3 tokens, up to `most` <=
 * LOOKUP_MOST of them; returns how many, 0 for none. After drafts that failed it rests for a while, so that text
 * without repetitions is not slowed. */
int lookup_draft(struct lookup *l, const int32_t *history, size_t n, int most, int32_t draft[LOOKUP_MOST]);
/* What became of a draft: `accepted` of its `drafted` tokens were right. */
void lookup_learn(struct lookup *l, int drafted, int accepted);

#endif
