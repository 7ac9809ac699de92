/* pretokenizer.c - the patterns of the model families, run by PCRE2.
 *
 * A family has up to MAX_STAGES patterns. The first cuts the text into its matches and what lies between them; the next
 * cuts each of those pieces, and so on. A later pattern sees a piece as if it were the whole text, which matters to
 * look-ahead.
 *
 * The patterns say the same as those in the models' tokenizer.json but are written so that the time is linear and no
 * backtracking is stored: repeats are possessive where nothing after them could use what they took. White space is
 * spelled out, since PCRE2's \s has one character more (U+180E) than the regular expressions the models were trained
 * with. */
#define _GNU_SOURCE
#define PCRE2_CODE_UNIT_WIDTH 8
#include "pretokenizer.h"

#include <pcre2.h>
#include <stdlib.h>
#include <string.h>

#include "utf8.h"

enum { MAX_STAGES = 6 };

/* Insides of character classes: White_Space; the same without line ends; letters by case, with marks. */
#define WS     "\\t-\\r \\x{85}\\p{Z}"
#define WS_ROW "\\t\\x0B\\f \\x{85}\\p{Z}"
#define UPPER  "\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}"
#define LOWER  "\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}"

#define SUFFIX        "'(?:[stmd]|re|ve|ll)"
#define SUFFIX_ANY    "'(?i:[stmd]|re|ve|ll)"
/* White space up to the last line end of the run; white space but for the last character before a word; the rest. */
#define LINE_ENDS     "(?:[" WS_ROW "]*+[\\r\\n]++)++"
#define SPACES        "[" WS "]+(?![^" WS "])|[" WS "]++"

#define GPT2          SUFFIX "| ?+\\p{L}++| ?+\\p{N}++| ?+[^" WS "\\p{L}\\p{N}]++|" SPACES
#define LLAMA3(digits) SUFFIX_ANY "|[^\\r\\n\\p{L}\\p{N}]?+\\p{L}++|" digits \
                      "| ?+[^" WS "\\p{L}\\p{N}]++[\\r\\n]*+|" LINE_ENDS "|" SPACES
#define GPT4O(suffix, digits) "[^\\r\\n\\p{L}\\p{N}]?[" UPPER "]*[" LOWER "]++" suffix \
                      "|[^\\r\\n\\p{L}\\p{N}]?[" UPPER "]++[" LOWER "]*+" suffix "|" digits \
                      "| ?+[^" WS "\\p{L}\\p{N}]++[\\r\\n/]*+|" LINE_ENDS "|" SPACES
#define CJK           "[\\x{4E00}-\\x{9FA5}\\x{800}-\\x{4E00}\\x{AC00}-\\x{D7FF}]++"

/* Letters of scripts that have case, as DeepSeek lists them. */
#define CASED "A-Za-z\u00B5\u00C0-\u00D6\u00D8-\u00F6\u00F8-\u01BA\u01BC-\u01BF\u01C4-\u0293\u0295-\u02AF" \
    "\u0370-\u0373\u0376\u0377\u037B-\u037D\u037F\u0386\u0388-\u038A\u038C\u038E-\u03A1\u03A3-\u03F5\u03F7-\u0481" \
    "\u048A-\u052F\u0531-\u0556\u10A0-\u10C5\u13A0-\u13F5\u13F8-\u13FD\u1C90-\u1CBA\u1CBD-\u1CBF\u1D00-\u1D2B" \
    "\u1D6B-\u1D77\u1D79-\u1D9A\u1E00-\u1F15\u1F18-\u1F1D\u1F20-\u1F45\u1F48-\u1F4D\u1F50-\u1F57\u1F59\u1F5B\u1F5D" \
    "\u1F5F-\u1F7D\u1F80-\u1FB4\u1FB6-\u1FBC\u1FBE\u1FC2-\u1FC4\u1FC6-\u1FCC\u1FD0-\u1FD3\u1FD6-\u1FDB\u1FE0-\u1FEC" \
    "\u1FF2-\u1FF4\u1FF6-\u1FFC\u2102\u2107\u210A-\u2113\u2115\u2119-\u211D\u2124\u2126\u2128\u212A-\u212D" \
    "\u212F-\u2134\u2139\u213C-\u213F\u2145-\u2149\u214E\u2183\u2184\u2C00-\u2C7B\u2C7E-\u2CE4\u2CEB-\u2CEE\u2CF2" \
    "\u2CF3\uA640-\uA66D\uA680-\uA69B\uA722-\uA76F\uA771-\uA787\uA78B-\uA78E\uAB70-\uABBF\uFB00-\uFB06\uFB13-\uFB17" \
    "\uFF21-\uFF3A\uFF41-\uFF5A\U00010400-\U0001044F\U000104B0-\U000104D3\U000104D8-\U000104FB\U00010C80-\U00010CB2" \
    "\U00010CC0-\U00010CF2\U000118A0-\U000118DF\U0001E900-\U0001E943"

struct family {
    const char *stages[MAX_STAGES];
    const char *names;                    /* separated by spaces */
    bool whole_words, adds_bos;
};

static const struct family families[] = {
    { .names = "gpt-2 gpt2 phi-2 mpt olmo jais exaone4 trillion gigachat a.x-4.0 mellum granite-docling",
      .stages = { GPT2 } },
    /* Every digit is a word; spaces before one are not divided. */
    { .names = "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
      .stages = { "\\p{N}|" SUFFIX "| ?+\\p{L}++| ?+[^" WS "\\p{L}\\p{N}]++|"
                  "[" WS "]+(?![^" WS "\\p{N}])|[" WS "]++" } },
    { .names = "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
      .whole_words = true, .adds_bos = true, .stages = { LLAMA3("\\p{N}{1,3}+") } },
    { .names = "dbrx smaug-bpe chatglm-bpe", .stages = { LLAMA3("\\p{N}{1,3}+") } },
    { .names = "glm4 glm5", .whole_words = true, .stages = { LLAMA3("\\p{N}{1,3}+") } },
    { .names = "qwen2 deepseek-r1-qwen stablelm2 hunyuan solar-open megrez kormo f2llmv2 grok-2",
      .stages = { LLAMA3("\\p{N}") } },
    { .names = "qwen35",
      .stages = { SUFFIX_ANY "|[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]++|\\p{N}|"
                  " ?+[^" WS "\\p{L}\\p{M}\\p{N}]++[\\r\\n]*+|" LINE_ENDS "|" SPACES } },
    { .names = "tekken", .whole_words = true, .adds_bos = true, .stages = { GPT4O("", "\\p{N}") } },
    { .names = "gpt-4o llama4 kanana2 talkie minimax-m2",
      .stages = { GPT4O("(?:" SUFFIX_ANY ")?+", "\\p{N}{1,3}+") } },
    { .names = "falcon",
      .stages = { "[\\p{P}$+<=>^~|`]++", GPT2, "[0-9]{3}" } },
    { .names = "deepseek-llm",
      .stages = { "[\\r\\n]", "[" WS "]?+[" CASED "]++",
                  "[" WS "]?[!-/:-~\\x{FF01}-\\x{FF0F}\\x{FF1A}-\\x{FF5E}\\x{2018}-\\x{201F}\\x{3000}-\\x{3002}]++",
                  "(?<![" WS "])[" WS "]++\\z", CJK, "\\p{N}++" } },
    { .names = "deepseek-coder",
      .stages = { "[\\r\\n]", "[" WS "]?+\\p{L}++", "[" WS "]?+\\p{P}++", CJK, "\\p{N}" } },
};

struct pretokenizer {
    const struct family *family;
    int n_stages;
    pcre2_code *stages[MAX_STAGES];
    pcre2_match_context *limits;
};

static bool is_listed(const char *list, const char *name, size_t n)
{
    for (const char *end; *list; list = *end ? end + 1 : end) {
        end = strchrnul(list, ' ');
        if ((size_t)(end - list) == n && !memcmp(list, name, n)) return true;
    }
    return false;
}

bool pretokenizer_open(struct pretokenizer **out, const char *name, size_t n, struct error *e)
{
    const struct family *f = families, *end = families + sizeof families / sizeof *families;
    while (f < end && !is_listed(f->names, name, n)) f++;
    if (f == end)
        return fail(e, GEN_MODEL, "tokenizer.ggml.pre is '%.*s', a way to cut text into words that is not known here",
                    n < 100 ? (int)n : 100, name);
    struct pretokenizer *p = alloc_zeroed(1, sizeof *p, "the pre-tokenizer", e);
    if (!p) return false;
    p->family = f;
    p->limits = pcre2_match_context_create(NULL);
    if (!p->limits) goto no_memory;
    pcre2_set_match_limit(p->limits, UINT32_MAX);      /* a long word is no fault: the patterns take linear time */
    for (int i = 0; i < MAX_STAGES && f->stages[i]; i++) {
        int code;
        PCRE2_SIZE at;
        p->stages[i] = pcre2_compile((PCRE2_SPTR)f->stages[i], PCRE2_ZERO_TERMINATED, PCRE2_UTF | PCRE2_UCP, &code, &at,
                                     NULL);
        if (!p->stages[i]) goto no_memory;             /* the only way in which these patterns can fail */
        pcre2_jit_compile(p->stages[i], PCRE2_JIT_COMPLETE);     /* where this fails, matching interprets */
        p->n_stages++;
    }
    *out = p;
    return true;
no_memory:
    pretokenizer_close(p);
    return fail(e, GEN_RUN, "cannot allocate memory for the pre-tokenizer");
}

void pretokenizer_close(struct pretokenizer *p)
{
    if (!p) return;
    for (int i = 0; i < p->n_stages; i++) pcre2_code_free(p->stages[i]);
    pcre2_match_context_free(p->limits);
    free(p);
}

bool pretokenizer_whole_words(const struct pretokenizer *p) { return p->family->whole_words; }
bool pretokenizer_adds_bos(const struct pretokenizer *p) { return p->family->adds_bos; }

struct splitter {
    const struct pretokenizer *p;
    pcre2_match_data *match;
    word_fn *each;
    void *context;
    int code;                             /* PCRE2's error, or 0 */
};

/* Cuts text, which is whole characters, by the patterns from `stage` on. */
static bool split_piece(struct splitter *s, int stage, const char *text, size_t n)
{
    if (stage == s->p->n_stages) return s->each(s->context, text, n);
    const pcre2_code *pattern = s->p->stages[stage];
    const PCRE2_SIZE *found = pcre2_get_ovector_pointer(s->match);
    for (size_t at = 0; at < n;) {
        uint32_t options = PCRE2_NO_UTF_CHECK;
        int rc = pcre2_match(pattern, (PCRE2_SPTR)text, n, at, options, s->match, s->p->limits);
        if (rc == PCRE2_ERROR_JIT_STACKLIMIT)
            rc = pcre2_match(pattern, (PCRE2_SPTR)text, n, at, options | PCRE2_NO_JIT, s->match, s->p->limits);
        if (rc < 0 && rc != PCRE2_ERROR_NOMATCH) {
            s->code = rc;
            return false;
        }
        size_t begin = rc < 0 ? n : found[0], end = rc < 0 ? n : found[1];
        if (begin > at && !split_piece(s, stage + 1, text + at, begin - at)) return false;
        if (end > begin && !split_piece(s, stage + 1, text + begin, end - begin)) return false;
        at = end;
    }
    return true;
}

bool pretokenizer_split(const struct pretokenizer *p, const char *text, size_t n, word_fn *each, void *context,
                        struct error *e)
{
    struct splitter s = { .p = p, .match = pcre2_match_data_create(1, NULL), .each = each, .context = context };
    bool ok = s.match != NULL;
    for (size_t at = 0; ok && at < n;) {
        size_t valid = utf8_valid(text + at, n - at);
        ok = !valid || split_piece(&s, 0, text + at, valid);
        size_t start = at += valid;
        for (int step; at < n && (step = utf8_step(text + at, n - at)) <= 0;) at += step ? (size_t)-step : n - at;
        if (ok && at > start) ok = each(context, text + start, at - start);
    }
    if (!s.match || s.code) {
        if (s.code && s.code != PCRE2_ERROR_NOMEMORY && s.code != PCRE2_ERROR_HEAPLIMIT)
            fail(e, GEN_RUN, "cutting the text into words failed with PCRE2's error %d", s.code);
        else fail(e, GEN_RUN, "cannot allocate memory for cutting %zu bytes of text into words", n);
    }
    pcre2_match_data_free(s.match);
    return ok;
}
