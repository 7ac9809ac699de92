/* options.h - the command line: one table of options that drives parsing, checking, --help, the man page, the README's
 * table and the shells' completions. */
#ifndef OPTIONS_H
#define OPTIONS_H

#include "base.h"
#include "sampler.h"

#define GEN_VERSION "0.1.0"

/* What a run does. All but the first are chosen by the option of the same name. */
enum mode {
    MODE_GENERATE, MODE_BATCH, MODE_SHOW_PROMPT, MODE_DUMP_TOKENS, MODE_PERPLEXITY, MODE_BENCH, MODE_KV_REPORT,
    MODE_INSPECT, MODE_DRY_RUN, MODE_CHECK_TENSORS, MODE_HELP, MODE_VERSION, MODE_COMPLETION
};

enum option_group {
    GROUP_MODEL, GROUP_PROMPT, GROUP_CHAT, GROUP_GENERATION, GROUP_SAMPLING, GROUP_BATCH, GROUP_CACHE, GROUP_OUTPUT,
    GROUP_MEASURE, GROUP_INFORMATION, N_GROUPS
};

/* How a value is read, and the type of the field that takes it. */
enum option_kind {
    OPT_FLAG,          /* bool; no value */
    OPT_TEXT,          /* const char *, any text but the empty one */
    OPT_ANY_TEXT,      /* const char *, the empty text too */
    OPT_TEXTS,         /* struct texts, one entry each time the option is given */
    OPT_INT,           /* int, lo to hi */
    OPT_LONG,          /* int64_t, lo to hi */
    OPT_SIZE,          /* int64_t bytes, lo to hi; K, M, G after the number are 2^10, 2^20, 2^30 */
    OPT_FLOAT,         /* float, lo to hi */
    OPT_DOUBLE,        /* double, lo to hi */
    OPT_CHOICE,        /* int, the place of the value in the words of `arg`; where hi > 0, the words from place hi on
                        * are other names of those from place lo on */
    OPT_CHOICE_OR_INT, /* int: a word of `arg` is minus its place, else a number, lo to hi */
    OPT_BIAS,          /* ID+X or ID-X, added to sampling.bias */
    OPT_MODE           /* enum mode, chosen by the option; with an `arg` its text goes to the field */
};

struct option_row {
    enum option_group group;
    const char *name;                  /* long name, without dashes */
    char letter;                       /* short name, 0 = none */
    const char *arg;                   /* NULL = takes no value; "[X]" = a value may follow; "a|b" = these words */
    const char *preset;                /* the value when it is not given; NULL = zero */
    enum option_kind kind;
    double lo, hi;                     /* of numbers */
    size_t at;                         /* offset of the field in struct options */
    enum mode mode;                    /* OPT_MODE: what it chooses */
    unsigned modes;                    /* bits of the modes that it means something in; 0 = all */
    const char *help;
};

#define MAX_OPTIONS 128
extern const struct option_row option_table[];
extern const int n_options;
extern const char *const option_groups[N_GROUPS][2];       /* word for --help, title */

struct texts { const char **data; size_t len; };

enum { CACHE_AUTO = 6 };               /* -ctk auto: the place behind the types of kvcache.h */
enum { COLOR_AUTO, COLOR_ALWAYS, COLOR_NEVER };
enum { PROGRESS_AUTO, PROGRESS_JSON, PROGRESS_NEVER };
enum { SHELL_BASH, SHELL_ZSH, SHELL_FISH };

struct options {
    bool given[MAX_OPTIONS];           /* by row of the table */
    enum mode mode;
    /* model */
    const char *model;
    bool no_mmap;
    int threads, batch, backend, tensor_parallel;
    double rope_freq_base, rope_scale; /* 0 = the file's */
    /* prompt */
    const char *prompt, *file;
    bool stdin_word;                   /* the word - was given */
    bool no_bos, no_parse_special;
    /* chat */
    const char *text;                  /* a word that is no option: one message */
    const char *system, *messages, *chat_template;
    bool chat, single_turn, no_think;
    /* generation */
    int64_t predict, ctx;
    struct texts stops;
    bool ignore_eos, display_prompt, lookup;
    int64_t seed;                      /* -1 = random */
    struct sampler_options sampling;   /* .seed is not set; .bias belongs to these options */
    /* batch */
    const char *lines, *output;
    int parallel, samples, report;
    bool resume, unordered, timings, data_parallel;
    /* cache */
    int layout, page_size, type_k, type_v, window, sinks, evict;       /* a type CACHE_AUTO is still to be chosen */
    int kv_heads;                      /* as model_options.kv_heads */
    int64_t kv_memory;                 /* most bytes of the cache; 0 = what memory allows */
    int64_t budget;                    /* of eviction; 0 = not given */
    const char *prompt_cache, *prefix_cache;
    bool prompt_cache_ro, prompt_cache_all;
    int64_t prefix_cache_size;
    const char *kv_offload;
    bool no_kv_cache, no_share;
    /* output */
    bool json, quiet, verbose;
    int logprobs, color;
    /* measure */
    const char *perplexity, *save_logits, *kl_base;
    int64_t chunks;                    /* 0 = all */
    const char *bench_prefill, *bench_decode, *bench_depth, *bench_parallel;       /* lists of numbers */
    int reps;
    /* information */
    const char *inspect, *help_topic;
    int shell;
};

/* Fills *o from the words after argv[0]; texts point into argv. --help, --version and --completion end the parsing.
 * Errors: GEN_USAGE naming the option, and for an unknown one the nearest. *o is to be freed in either case. */
bool options_parse(struct options *o, int argc, char **argv, struct error *e);
void options_free(struct options *o);
/* Sets one option by its long name or letter, by the command line's rules: for chat commands and batch lines. value
 * NULL = none is given; the text must live as long as *o. Errors: GEN_USAGE, also for an option that chooses a task. */
bool options_set(struct options *o, const char *name, const char *value, struct error *e);
/* The option that a line of a batch names: one of those that shape one answer, by its long name. NULL after filling *e
 * (GEN_USAGE). */
const struct option_row *options_of_line(const char *name, struct error *e);
/* Copies what the options own, so that *to can be changed and freed by itself. Errors: GEN_RUN for memory. */
bool options_copy(struct options *to, const struct options *from, struct error *e);
/* Appends the value of each option that an answer depends on: equal texts, equal answers. false when memory is out. */
bool options_text(const struct options *o, struct bytes *out);
/* Do the options ask for a chat? */
bool options_chat(const struct options *o);
/* Was the option of this long name given? */
bool options_given(const struct options *o, const char *name);
/* The option's value as it would be given, nothing where it takes none or has none. False when memory is out. */
bool option_value(const struct options *o, const struct option_row *row, struct bytes *out);
/* "--temp", or "-ctk" for a name of at most three letters. */
const char *option_display(const struct option_row *row, char buffer[40]);
/* What values the option takes: "a whole number from 0 to 100". */
const char *option_takes(const struct option_row *row, char buffer[160]);

#endif
