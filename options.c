/* options.c - the option table, and the parser that it drives.
 *
 * A word with two dashes is an exact long name, one with one dash an exact name or a letter with its number attached
 * (-n5); a value follows as the next word or after '='. Nothing is abbreviated. */
#include "options.h"

#include <assert.h>
#include <errno.h>
#include <float.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *const option_groups[N_GROUPS][2] = {
    [GROUP_MODEL] = { "model", "Model and machine" },
    [GROUP_PROMPT] = { "prompt", "Prompt" },
    [GROUP_CHAT] = { "chat", "Chat" },
    [GROUP_GENERATION] = { "generation", "Generation" },
    [GROUP_SAMPLING] = { "sampling", "Sampling" },
    [GROUP_BATCH] = { "batch", "Batches of prompts" },
    [GROUP_CACHE] = { "cache", "Key-value cache" },
    [GROUP_OUTPUT] = { "output", "Output" },
    [GROUP_MEASURE] = { "measure", "Measuring" },
    [GROUP_INFORMATION] = { "information", "Information" },
};

#define AT(field) offsetof(struct options, field)
#define IN(mode) (1u << MODE_##mode)
#define TEXTS (PROMPTS | IN(BATCH))
#define PROMPTS (IN(GENERATE) | IN(SHOW_PROMPT) | IN(DUMP_TOKENS) | IN(DRY_RUN))
#define ANSWERS (IN(GENERATE) | IN(DRY_RUN))
#define JSON_MODES (IN(GENERATE) | IN(PERPLEXITY) | IN(BENCH) | IN(KV_REPORT) | IN(INSPECT) | IN(DRY_RUN))
#define ABOVE_0 1e-30                  /* as a lower bound, shown as "above 0" */
#define MOST_TOKENS INT_MAX
#define MOST_PARALLEL 64               /* rows of a forward pass that may want logits */
#define SAMPLING(field) AT(sampling.field)

/* group, name, letter, argument, preset, kind, lo, hi, field, mode, modes, help */
const struct option_row option_table[] = {
    { GROUP_MODEL, "model", 'm', "FILE", NULL, OPT_TEXT, 0, 0, AT(model), 0, 0,
      "GGUF model file; of a split model the first file. Without it GEN_MODEL names the file, else "
      "weights/SmolLM2-135M-Instruct.Q4_1.gguf is used, beside the program or in the current directory." },
    { GROUP_MODEL, "no-mmap", 0, NULL, NULL, OPT_FLAG, 0, 0, AT(no_mmap), 0, 0,
      "Read the file into memory instead of mapping it." },
    { GROUP_MODEL, "threads", 't', "N", "0", OPT_INT, 0, 1024, AT(threads), 0, 0,
      "Threads; 0 = the cores that this process may use, which are also the most." },
    { GROUP_MODEL, "batch-size", 'b', "N", NULL, OPT_INT, 1, 65536, AT(batch), 0, 0,
      "Tokens of the prompt that are computed together. Chosen when not given; on the processor results never depend "
      "on it." },
    { GROUP_MODEL, "backend", 0, "auto|cpu|cuda", "auto", OPT_CHOICE, 0, 0, AT(backend), 0, 0,
      "What computes: the processor, or an NVIDIA GPU; auto takes the GPU where there is one that can be used." },
    { GROUP_MODEL, "tensor-parallel", 0, "N", "1", OPT_INT, 1, 1024, AT(tensor_parallel), 0, 0,
      "Divide cache and weights over the N processes of `mpirun -n N gen ...`: by heads, or where N does not divide "
      "the KV heads, the cache by tokens (not on CUDA)." },
    { GROUP_MODEL, "rope-freq-base", 0, "X", NULL, OPT_DOUBLE, ABOVE_0, DBL_MAX, AT(rope_freq_base), 0, 0,
      "Base of the rotary position angles, instead of the file's." },
    { GROUP_MODEL, "rope-scale", 0, "X", NULL, OPT_DOUBLE, ABOVE_0, DBL_MAX, AT(rope_scale), 0, 0,
      "Divide positions by X, instead of the file's scaling." },

    { GROUP_PROMPT, "prompt", 'p', "TEXT", NULL, OPT_ANY_TEXT, 0, 0, AT(prompt), 0, PROMPTS,
      "Raw text that the model continues." },
    { GROUP_PROMPT, "file", 'f', "FILE", NULL, OPT_TEXT, 0, 0, AT(file), 0, PROMPTS | IN(KV_REPORT),
      "Read the prompt from FILE, - is standard input; after the text of -p. A byte order mark and one final line end "
      "are dropped. Without -p and -f, standard input is the prompt unless it is a terminal; with them it is read only "
      "where - names it (a word - alone appends it)." },
    { GROUP_PROMPT, "no-bos", 0, NULL, NULL, OPT_FLAG, 0, 0, AT(no_bos), 0, TEXTS,
      "Put no start token in front of a raw prompt." },
    { GROUP_PROMPT, "no-parse-special", 0, NULL, NULL, OPT_FLAG, 0, 0, AT(no_parse_special), 0, TEXTS,
      "Text of a raw prompt that spells a control token stays text, as that of messages always does." },
    { GROUP_PROMPT, "show-prompt", 0, NULL, NULL, OPT_MODE, 0, 0, AT(mode), MODE_SHOW_PROMPT, 0,
      "Print the prompt as the model gets it, start token included, and stop. A file that holds only a vocabulary will "
      "do." },
    { GROUP_PROMPT, "dump-tokens", 0, NULL, NULL, OPT_MODE, 0, 0, AT(mode), MODE_DUMP_TOKENS, 0,
      "Print the prompt's tokens, one per line as id<TAB>text, and stop. In the text \\n, \\t, \\\\ and \\xNN stand "
      "for line end, tab, backslash and for control and invalid bytes. A file that holds only a vocabulary will do." },

    { GROUP_CHAT, "chat", 0, NULL, NULL, OPT_FLAG, 0, 0, AT(chat), 0, TEXTS,
      "Chat: messages are read line by line (/help lists the commands), -p gives the first one. A terminal without a "
      "prompt gets a chat by itself where the model has a template." },
    { GROUP_CHAT, "cnv", 0, NULL, NULL, OPT_FLAG, 0, 0, AT(chat), 0, TEXTS, "The same as --chat." },
    { GROUP_CHAT, "sys", 0, "TEXT", NULL, OPT_ANY_TEXT, 0, 0, AT(system), 0, TEXTS,
      "The system message. This, and each option of this group, makes a chat message of -p, -f and standard input." },
    { GROUP_CHAT, "st", 0, NULL, NULL, OPT_FLAG, 0, 0, AT(single_turn), 0, TEXTS, "One message and its reply." },
    { GROUP_CHAT, "messages", 0, "FILE", NULL, OPT_TEXT, 0, 0, AT(messages), 0, PROMPTS,
      "Messages as JSON, a list of {\"role\": ..., \"content\": ...}, - is standard input; other prompts follow as one "
      "message more." },
    { GROUP_CHAT, "chat-template", 0, "TEMPLATE", NULL, OPT_TEXT, 0, 0, AT(chat_template), 0, TEXTS,
      "Jinja template instead of the model's: chatml, llama2, llama3, gemma, phi3, mistral, or a file." },
    { GROUP_CHAT, "no-think", 0, NULL, NULL, OPT_FLAG, 0, 0, AT(no_think), 0, TEXTS,
      "Have a thinking model answer at once, by its template's own switch." },

    { GROUP_GENERATION, "predict", 'n', "N", "512", OPT_LONG, -2, MOST_TOKENS, AT(predict), 0, 0,
      "New tokens at most; -1 in a chat when not given. -1: until the model ends its text; -2: the same, or until the "
      "context is full; 0: only read the prompt. A full context ends every answer." },
    { GROUP_GENERATION, "ctx-size", 'c', "N", "0", OPT_LONG, 0, MOST_TOKENS, AT(ctx), 0, 0,
      "Context in tokens, prompt and answer together (a prompt of N tokens still gives one new one). 0 = the model's, "
      "lowered with a note if its cache does not fit memory. With --perplexity the size of a window, 512 if not "
      "given." },
    { GROUP_GENERATION, "stop", 'r', "TEXT", NULL, OPT_TEXTS, 0, 0, AT(stops), 0, 0,
      "End the answer where it says TEXT, which is not printed. May be repeated." },
    { GROUP_GENERATION, "ignore-eos", 0, NULL, NULL, OPT_FLAG, 0, 0, AT(ignore_eos), 0, 0,
      "Go on past the tokens by which the model ends its text." },
    { GROUP_GENERATION, "lookup", 0, NULL, NULL, OPT_FLAG, 0, 0, AT(lookup), 0, ANSWERS,
      "Guess what follows from the text so far and verify several tokens at a time: faster where the answer repeats "
      "the prompt, with the same results." },

    { GROUP_SAMPLING, "seed", 's', "N", "-1", OPT_LONG, -1, 0x1p53, AT(seed), 0, 0,
      "Seed of the random draws; -1 = a random one, told on standard error so that the run can be repeated." },
    { GROUP_SAMPLING, "temp", 0, "X", "0.8", OPT_FLOAT, 0, FLT_MAX, SAMPLING(temperature), 0, 0,
      "Temperature; 0 = always the most likely token." },
    { GROUP_SAMPLING, "top-k", 0, "N", "40", OPT_INT, 0, INT_MAX, SAMPLING(top_k), 0, 0,
      "Keep the N most likely tokens; 0 = off." },
    { GROUP_SAMPLING, "top-p", 0, "X", "0.95", OPT_FLOAT, 0, 1, SAMPLING(top_p), 0, 0,
      "Keep the most likely tokens that together have the probability X; 1 = off." },
    { GROUP_SAMPLING, "min-p", 0, "X", "0.05", OPT_FLOAT, 0, FLT_MAX, SAMPLING(min_p), 0, 0,
      "Keep tokens at least X times as likely as the best; 0 = off." },
    { GROUP_SAMPLING, "typical-p", 0, "X", "1", OPT_FLOAT, 0, 1, SAMPLING(typical_p), 0, 0,
      "Keep the most typical tokens that together have the probability X; 1 = off." },
    { GROUP_SAMPLING, "repeat-penalty", 0, "X", "1", OPT_FLOAT, ABOVE_0, FLT_MAX, SAMPLING(repeat_penalty), 0, 0,
      "Make tokens that occurred less likely; 1 = off." },
    { GROUP_SAMPLING, "repeat-last-n", 0, "N", "64", OPT_INT, -1, INT_MAX, SAMPLING(repeat_last_n), 0, 0,
      "Tokens that the penalties look back on; 0 = off, -1 = all." },
    { GROUP_SAMPLING, "presence-penalty", 0, "X", "0", OPT_FLOAT, -FLT_MAX, FLT_MAX, SAMPLING(presence_penalty), 0, 0,
      "Taken once from the logit of a token that occurred; 0 = off." },
    { GROUP_SAMPLING, "frequency-penalty", 0, "X", "0", OPT_FLOAT, -FLT_MAX, FLT_MAX, SAMPLING(frequency_penalty), 0, 0,
      "Taken from the logit of a token for each time it occurred; 0 = off." },
    { GROUP_SAMPLING, "logit-bias", 'l', "ID+X", NULL, OPT_BIAS, 0, 0, SAMPLING(bias), 0, 0,
      "Add X to the logit of token ID; ID-X takes it away, ID-inf forbids the token. May be repeated." },

    { GROUP_BATCH, "batch", 0, "FILE", NULL, OPT_MODE, 0, 0, AT(lines), MODE_BATCH, 0,
      "Answer a file of prompts, one a line: JSON objects with \"prompt\" or \"messages\", \"custom_id\" and options "
      "by their long names, or plain text where the file's name ends with .txt; - is standard input. The answers are "
      "JSON lines in the same order." },
    { GROUP_BATCH, "output", 'o', "FILE", NULL, OPT_TEXT, 0, 0, AT(output), 0, IN(BATCH),
      "Write the answers to FILE instead of standard output, each line as soon as it is known. What FILE held is gone, "
      "unless --resume is given." },
    { GROUP_BATCH, "parallel", 0, "N", "16", OPT_INT, 1, MOST_PARALLEL, AT(parallel), 0, IN(BATCH),
      "Lines computed together; -np means the same. On the processor answers never depend on it." },
    { GROUP_BATCH, "resume", 0, NULL, NULL, OPT_FLAG, 0, 0, AT(resume), 0, IN(BATCH),
      "Go on with the --output of a run that was ended: lines that have an answer or an error there are "
      "left out." },
    { GROUP_BATCH, "unordered", 0, NULL, NULL, OPT_FLAG, 0, 0, AT(unordered), 0, IN(BATCH),
      "Write each answer when it is ready, whatever the order of the lines." },
    { GROUP_BATCH, "samples", 0, "N", "1", OPT_INT, 1, 1024, AT(samples), 0, IN(BATCH),
      "Answers to each line, with the seeds that follow --seed; a line says it as \"n\"." },
    { GROUP_BATCH, "timings", 0, NULL, NULL, OPT_FLAG, 0, 0, AT(timings), 0, IN(BATCH),
      "Add to each answer how long it took and how much of its prompt was known already." },
    { GROUP_BATCH, "data-parallel", 0, NULL, NULL, OPT_FLAG, 0, 0, AT(data_parallel), 0, IN(BATCH),
      "Divide the lines over the processes of `mpirun -n N gen ...`; the first one reads and writes." },
    { GROUP_BATCH, "progress", 0, "auto|json|never", "auto", OPT_CHOICE, 0, 0, AT(report), 0, IN(BATCH),
      "How far the run is, on standard error: a line on a terminal, or an object each second and at the end." },

    { GROUP_CACHE, "kv-layout", 0, "paged|contiguous", "paged", OPT_CHOICE, 0, 0, AT(layout), 0, 0,
      "How the cache lies in memory; results never depend on it." },
    { GROUP_CACHE, "page-size", 0, "N", "32", OPT_INT, 32, 1 << 20, AT(page_size), 0, 0,
      "Tokens in a page of the paged layout, a multiple of 32." },
    { GROUP_CACHE, "ctk", 0, "f32|f16|bf16|fp8|int8|int4|auto|q8_0|q4_0", "f16", OPT_CHOICE, 4, 7,
      AT(type_k), 0, 0,
      "Type of the cached keys; q8_0 and q4_0 are other names of int8 and int4. auto: the finest of f16, int8 and int4 "
      "with which the context fits memory." },
    { GROUP_CACHE, "ctv", 0, "f32|f16|bf16|fp8|int8|int4|auto|q8_0|q4_0", "f16", OPT_CHOICE, 4, 7,
      AT(type_v), 0, 0,
      "Type of the cached values, likewise; where both are auto, keys are never coarser than values." },
    { GROUP_CACHE, "kv-heads", 0, "auto|mha|gqa|mqa|N", "auto", OPT_CHOICE_OR_INT, 1, 4096, AT(kv_heads), 0, 0,
      "Key and value heads: the model's own (auto, gqa), one for each query head (mha), a single one (mqa), or N. "
      "Fewer than the model's are means of its heads, at a loss of quality; more are repeated, at a loss of memory." },
    { GROUP_CACHE, "kv-memory", 0, "SIZE", NULL, OPT_SIZE, 1, 0x1p60, AT(kv_memory), 0, 0,
      "Memory that the cache may take, in bytes or with K, M or G: the context is lowered to it, or refused; -ctk auto "
      "and -ctv auto choose types by it." },
    { GROUP_CACHE, "window", 0, "N", "0", OPT_INT, 0, 1 << 26, AT(window), 0, 0,
      "Keep the last N tokens and the sinks, and give back the memory of the others: the text may grow without "
      "end; 0 = off." },
    { GROUP_CACHE, "sinks", 0, "N", "4", OPT_INT, 0, 1 << 20, AT(sinks), 0, 0,
      "With --window: also keep the first N tokens, which models lean on." },
    { GROUP_CACHE, "kv-offload", 0, "DIR", NULL, OPT_TEXT, 0, 0, AT(kv_offload), 0, 0,
      "Where the cache goes beyond --kv-memory, at the price of speed: a file without a name in the folder DIR; host = "
      "in /var/tmp, or with CUDA in pinned memory. The results are the same." },
    { GROUP_CACHE, "no-share", 0, NULL, NULL, OPT_FLAG, 0, 0, AT(no_share), 0, 0,
      "Compute each text for itself, instead of taking over what others have computed of its beginning." },
    { GROUP_CACHE, "evict", 0, "off|attention|snapkv", "off", OPT_CHOICE, 0, 0, AT(evict), 0, 0,
      "Keep --kv-budget tokens per layer and head: the first 32, the most recent ones, and of the others those that "
      "got most attention, from all tokens (attention) or from the prompt's last and the generated ones (snapkv). The "
      "prompt is read in full first." },
    { GROUP_CACHE, "kv-budget", 0, "N", NULL, OPT_LONG, 160, 1 << 26, AT(budget), 0, 0,
      "With --evict: tokens that are kept, at least 160, in whole blocks of 32; half of them are the most recent." },
    { GROUP_CACHE, "no-kv-cache", 0, NULL, NULL, OPT_FLAG, 0, 0, AT(no_kv_cache), 0, 0,
      "Compute the whole text again for each token: the slow baseline, with the same results. --bench measures it "
      "beside the cache." },
    { GROUP_CACHE, "prompt-cache", 0, "FILE", NULL, OPT_TEXT, 0, 0, AT(prompt_cache), 0, ANSWERS,
      "Keep the prompt's keys and values in FILE, and begin with those that are there. A file that does not fit this "
      "run is told and replaced." },
    { GROUP_CACHE, "prompt-cache-ro", 0, NULL, NULL, OPT_FLAG, 0, 0, AT(prompt_cache_ro), 0, ANSWERS,
      "With --prompt-cache: never write the file." },
    { GROUP_CACHE, "prompt-cache-all", 0, NULL, NULL, OPT_FLAG, 0, 0, AT(prompt_cache_all), 0, ANSWERS,
      "With --prompt-cache: keep the answer, too." },
    { GROUP_CACHE, "prefix-cache", 0, "DIR", NULL, OPT_TEXT, 0, 0, AT(prefix_cache), 0, ANSWERS | IN(BATCH),
      "Keep the keys and values of all prompts in a database in DIR, and begin with the longest prefix that is there, "
      "whichever process put it there. It tells as much as the prompts themselves." },
    { GROUP_CACHE, "prefix-cache-size", 0, "SIZE", "4G", OPT_SIZE, 1, 0x1p53, AT(prefix_cache_size), 0,
      ANSWERS | IN(BATCH),
      "Bytes that DIR may take; the least recently used prefixes go first." },

    { GROUP_OUTPUT, "json", 0, NULL, NULL, OPT_FLAG, 0, 0, AT(json), 0, JSON_MODES,
      "Print one JSON object instead of text." },
    { GROUP_OUTPUT, "logprobs", 0, "N", "-1", OPT_INT, 0, 100, AT(logprobs), 0, ANSWERS | IN(BATCH),
      "With --json or --batch: the log-probability of each token and of the N most likely ones." },
    { GROUP_OUTPUT, "display-prompt", 0, NULL, NULL, OPT_FLAG, 0, 0, AT(display_prompt), 0, ANSWERS,
      "Print the prompt before the answer." },
    { GROUP_OUTPUT, "color", 0, "auto|always|never", "auto", OPT_CHOICE, 0, 0, AT(color), 0, 0,
      "Tell prompt and answer apart by colour; auto = on a terminal, unless NO_COLOR is set." },
    { GROUP_OUTPUT, "quiet", 'q', NULL, NULL, OPT_FLAG, 0, 0, AT(quiet), 0, 0,
      "Nothing on standard error but errors." },
    { GROUP_OUTPUT, "verbose", 0, NULL, NULL, OPT_FLAG, 0, 0, AT(verbose), 0, 0,
      "Tell on standard error what is loaded and how it runs." },

    { GROUP_MEASURE, "perplexity", 0, "FILE", NULL, OPT_MODE, 0, 0, AT(perplexity), MODE_PERPLEXITY, 0,
      "Score a text (- is standard input) in windows of -c tokens, the second half of each, by llama-perplexity's "
      "method." },
    { GROUP_MEASURE, "chunks", 0, "N", NULL, OPT_LONG, 1, INT_MAX, AT(chunks), 0, IN(PERPLEXITY) | IN(KV_REPORT),
      "Windows at most; all when not given, two with --kv-report." },
    { GROUP_MEASURE, "save-logits", 0, "FILE", NULL, OPT_TEXT, 0, 0, AT(save_logits), 0, IN(PERPLEXITY),
      "Write the log-probabilities of the scored tokens to FILE." },
    { GROUP_MEASURE, "kl-base", 0, "FILE", NULL, OPT_TEXT, 0, 0, AT(kl_base), 0, IN(PERPLEXITY),
      "Compare with the log-probabilities in FILE: mean and 99th percentile of the Kullback-Leibler divergence, and "
      "how often the most likely token is the same." },
    { GROUP_MEASURE, "bench", 0, NULL, NULL, OPT_MODE, 0, 0, AT(mode), MODE_BENCH, 0,
      "Measure the speed of prefill and decode beside the memory's and the processor's own. The lists of the tests are "
      "whole numbers with commas between them." },
    { GROUP_MEASURE, "pp", 0, "LIST", NULL, OPT_TEXT, 0, 0, AT(bench_prefill), 0, IN(BENCH),
      "Tokens of each prefill test; 512 when neither -pp nor -tg is given." },
    { GROUP_MEASURE, "tg", 0, "LIST", NULL, OPT_TEXT, 0, 0, AT(bench_decode), 0, IN(BENCH),
      "Tokens of each decode test; 128 when neither -pp nor -tg is given." },
    { GROUP_MEASURE, "depth", 'd', "LIST", NULL, OPT_TEXT, 0, 0, AT(bench_depth), 0, IN(BENCH),
      "Tokens in the cache before each test; 0 when not given." },
    { GROUP_MEASURE, "np", 0, "LIST", NULL, OPT_TEXT, 0, 0, AT(bench_parallel), 0,
      IN(BENCH) | IN(BATCH),
      "Sequences of each decode test that are computed together; 1 when not given. With --batch the same as "
      "--parallel." },
    { GROUP_MEASURE, "reps", 0, "N", "5", OPT_INT, 1, 1000, AT(reps), 0, IN(BENCH),
      "Repetitions of each test; their median counts." },
    { GROUP_MEASURE, "kv-report", 0, NULL, NULL, OPT_MODE, 0, 0, AT(mode), MODE_KV_REPORT, 0,
      "What each way to keep the cache costs: bytes, speed with one window in the cache, and, on the text of -f in "
      "windows of -c tokens (1024 if not given), perplexity and divergence from the f16 cache. Cache options that are "
      "given make one line more." },

    { GROUP_INFORMATION, "inspect", 0, "[FILE]", NULL, OPT_MODE, 0, 0, AT(inspect), MODE_INSPECT, 0,
      "Print a summary of a model file, or of a cache file, and stop." },
    { GROUP_INFORMATION, "dry-run", 0, NULL, NULL, OPT_MODE, 0, 0, AT(mode), MODE_DRY_RUN, 0,
      "Print the bytes that the run would take and the largest context that fits memory, and stop." },
    { GROUP_INFORMATION, "check-tensors", 0, NULL, NULL, OPT_MODE, 0, 0, AT(mode), MODE_CHECK_TENSORS, 0,
      "Read every tensor, report values that are not finite, and stop." },
    { GROUP_INFORMATION, "version", 0, NULL, NULL, OPT_MODE, 0, 0, AT(mode), MODE_VERSION, 0,
      "Print the version and stop." },
    { GROUP_INFORMATION, "help", 'h', "[GROUP]", NULL, OPT_MODE, 0, 0, AT(help_topic), MODE_HELP, 0,
      "Print this text, or one group of options (model, prompt, ...), and stop. --help man prints a man page, --help "
      "markdown the options as tables." },
    { GROUP_INFORMATION, "completion", 0, "bash|zsh|fish", NULL, OPT_MODE, 0, 0, AT(shell), MODE_COMPLETION, 0,
      "Print a completion script for the shell and stop." },
};
const int n_options = sizeof option_table / sizeof *option_table;
static_assert(sizeof option_table / sizeof *option_table <= MAX_OPTIONS, "struct options marks rows that were given");

/* ---- names */

const char *option_display(const struct option_row *row, char buffer[40])
{
    buffer[0] = buffer[1] = '-';
    strcpy(buffer + (!row->letter && strlen(row->name) <= 3 ? 1 : 2), row->name);
    return buffer;
}

static const struct option_row *row_of(const char *name, size_t n)
{
    for (int i = 0; i < n_options; i++)
        if (strlen(option_table[i].name) == n && memcmp(option_table[i].name, name, n) == 0) return &option_table[i];
    return NULL;
}

static const struct option_row *row_of_letter(char letter)
{
    for (int i = 0; i < n_options; i++)
        if (option_table[i].letter && option_table[i].letter == letter) return &option_table[i];
    return NULL;
}

static const struct option_row *row_of_mode(enum mode mode)
{
    for (int i = 0; i < n_options; i++)
        if (option_table[i].kind == OPT_MODE && option_table[i].mode == mode) return &option_table[i];
    return NULL;
}

bool options_given(const struct options *o, const char *name)
{
    const struct option_row *row = row_of(name, strlen(name));
    return row && o->given[row - option_table];
}

/* Levenshtein's distance of two words, at most 39 letters of each. */
static int distance(const char *a, const char *b)
{
    int row[40], n = (int)strnlen(b, 39);
    for (int j = 0; j <= n; j++) row[j] = j;
    for (int i = 1; i <= 39 && a[i - 1]; i++) {
        int corner = row[0];
        row[0] = i;
        for (int j = 1; j <= n; j++) {
            int change = corner + (a[i - 1] != b[j - 1]);
            corner = row[j];
            int step = (row[j] < row[j - 1] ? row[j] : row[j - 1]) + 1;
            row[j] = change < step ? change : step;
        }
    }
    return row[n];
}

/* The row whose name is nearest: one that the word begins, else the least changed one. *far = changes needed. */
static const struct option_row *nearest(const char *word, int *far)
{
    const struct option_row *best = NULL;
    char name[40];
    size_t n = 0;
    while (n < 39 && word[n] && word[n] != '=') n++;
    memcpy(name, word, n);
    name[n] = '\0';
    for (int i = 0; i < n_options; i++) {
        bool begins = n >= 2 && strncmp(option_table[i].name, name, n) == 0;
        int d = begins ? 0 : distance(name, option_table[i].name);
        if (!best || d < *far) best = &option_table[i], *far = d;
    }
    return best;
}

static bool unknown(const char *word, struct error *e)
{
    char display[40];
    int far;
    const struct option_row *row = word[0] == '-' && word[1] && word[2] == '=' ? row_of_letter(word[1]) : NULL;
    if (row && row->arg)
        return fail(e, GEN_USAGE, "'%s': the value of -%c is the next word, or write %s=%s", word, row->letter,
                    option_display(row, display), word + 3);
    row = nearest(word + strspn(word, "-"), &far);
    return fail(e, GEN_USAGE, "unknown option '%s': the nearest is %s (gen --help lists all)", word,
                option_display(row, display));
}

/* ---- values */

/* The place of `value` among the words of "a|b|c", or -1. */
static int choice(const char *words, const char *value)
{
    size_t n = strlen(value);
    for (int i = 0; *words; i++) {
        size_t len = strcspn(words, "|");
        if (len == n && memcmp(words, value, n) == 0) return i;
        words += len + (words[len] == '|');
    }
    return -1;
}

const char *option_takes(const struct option_row *row, char buffer[160])
{
    bool whole = row->kind == OPT_INT || row->kind == OPT_LONG;
    const char *number = whole ? "a whole number" : "a finite number";
    bool open = row->hi >= FLT_MAX;
    bool words = row->arg && strchr(row->arg, '|');
    if (words) snprintf(buffer, 160, "one of %s", row->arg);
    else if (row->kind == OPT_SIZE) snprintf(buffer, 160, "a whole number of bytes above 0, or one with K, M or G");
    else if (row->kind == OPT_BIAS) snprintf(buffer, 160, "a token id and a signed number: 15+1.5, 15-1 or 15-inf");
    else if (row->kind == OPT_TEXT || row->kind == OPT_TEXTS || row->kind == OPT_MODE)
        snprintf(buffer, 160, "a text that is not empty");
    else if (row->kind == OPT_ANY_TEXT) snprintf(buffer, 160, "a text");
    else if (open && row->lo <= -FLT_MAX) snprintf(buffer, 160, "%s", number);
    else if (open && row->lo == ABOVE_0) snprintf(buffer, 160, "%s above 0", number);
    else if (open) snprintf(buffer, 160, "%s of at least %.17g", number, row->lo);
    else snprintf(buffer, 160, "%s from %.17g to %.17g", number, row->lo, row->hi);
    return buffer;
}

static bool read_whole(const char *text, int64_t *out)
{
    char *end;
    errno = 0;
    long long value = strtoll(text, &end, 10);
    *out = value;
    return strchr("+-0123456789", text[0]) && end != text && *end == '\0' && errno == 0;
}

/* A whole number of bytes, or of units of 2^10, 2^20, 2^30 bytes. */
static bool read_size(const char *text, int64_t *out)
{
    static const char units[] = "KMG";
    char digits[24] = "";
    size_t n = strspn(text, "0123456789");
    const char *unit = text[n] ? strchr(units, text[n]) : NULL;
    if (!n || n >= sizeof digits || (text[n] && (!unit || text[n + 1]))) return false;
    memcpy(digits, text, n);
    if (!read_whole(digits, out)) return false;
    return !unit || !__builtin_mul_overflow(*out, (int64_t)1 << 10 * (unit - units + 1), out);
}

/* A decimal number; "inf" too, which the range refuses. */
static bool read_real(const char *text, double *out)
{
    char *end;
    *out = strtod(text, &end);
    return strchr("+-.0123456789", text[0]) && end != text && *end == '\0' && !strpbrk(text, "xX");
}

static bool add_text(struct texts *t, const char *text)
{
    const char **data = realloc(t->data, (t->len + 1) * sizeof *data);
    if (!data) return false;
    t->data = data;
    t->data[t->len++] = text;
    return true;
}

/* Reads ID+X or ID-X. */
static bool add_bias(struct sampler_options *s, const char *text, bool *memory)
{
    size_t digits = strspn(text, "0123456789");
    int64_t id = 0;
    double x = -INFINITY;
    char number[16] = "";
    if (!digits || digits >= sizeof number || (text[digits] != '+' && text[digits] != '-')) return false;
    memcpy(number, text, digits);
    if (!read_whole(number, &id) || id > INT32_MAX) return false;
    if (strcmp(text + digits, "-inf") != 0 && (!read_real(text + digits, &x) || !(fabs(x) <= FLT_MAX))) return false;
    struct logit_bias *bias = realloc((void *)s->bias, (s->n_bias + 1) * sizeof *bias);
    if (!bias) return *memory = false;
    bias[s->n_bias++] = (struct logit_bias){ (int32_t)id, (float)x };
    s->bias = bias;
    return true;
}

/* Puts a value into the row's field; false when the option does not take it, or memory is out (*memory = false). */
static bool store(struct options *o, const struct option_row *row, const char *value, bool check, bool *memory)
{
    void *field = (char *)o + row->at;
    int64_t whole = 0;
    double real = 0;
    switch (row->kind) {
    case OPT_FLAG: *(bool *)field = true; return true;
    case OPT_ANY_TEXT: *(const char **)field = value; return true;
    case OPT_TEXT: *(const char **)field = value; return *value != '\0';
    case OPT_TEXTS: return *value && (add_text(field, value) || (*memory = false));
    case OPT_BIAS: return add_bias(&o->sampling, value, memory);
    case OPT_CHOICE:
        *(int *)field = choice(row->arg, value);
        if (row->hi > 0 && *(int *)field >= row->hi) *(int *)field += (int)(row->lo - row->hi);
        return *(int *)field >= 0;
    case OPT_CHOICE_OR_INT:
        whole = choice(row->arg, value);
        if (whole >= 0 && strcmp(value, "N") != 0) return *(int *)field = (int)-whole, true;
        if (!read_whole(value, &whole) || !(whole >= row->lo && whole <= row->hi)) return false;
        return *(int *)field = (int)whole, true;
    case OPT_MODE:
        if (!row->arg || !value) return true;
        if (strchr(row->arg, '|')) return (*(int *)field = choice(row->arg, value)) >= 0;
        *(const char **)field = value;
        return *value != '\0';
    case OPT_SIZE:
        if (!read_size(value, &whole) || !(whole >= row->lo && whole <= row->hi)) return false;
        return *(int64_t *)field = whole, true;
    case OPT_INT:
    case OPT_LONG:
        if (!read_whole(value, &whole) || (check && !(whole >= row->lo && whole <= row->hi))) return false;
        if (row->kind == OPT_INT) *(int *)field = (int)whole;
        else *(int64_t *)field = whole;
        return true;
    case OPT_FLOAT:
    case OPT_DOUBLE:
        if (!read_real(value, &real) || !(real >= row->lo && real <= row->hi)) return false;
        if (row->kind == OPT_FLOAT) *(float *)field = (float)real;
        else *(double *)field = real;
        return true;
    }
    return false;
}

static bool set(struct options *o, const struct option_row *row, const char *value, struct error *e)
{
    char name[40], other[40], takes[160];
    bool memory = true;
    if (!row->arg && value) return fail(e, GEN_USAGE, "%s takes no value, but is given one", option_display(row, name));
    if (row->arg && row->arg[0] != '[' && !value)
        return fail(e, GEN_USAGE, "%s needs a value: %s", option_display(row, name), option_takes(row, takes));
    if (row->kind == OPT_MODE && row->mode < MODE_HELP && o->mode != MODE_GENERATE && o->mode != row->mode)
        return fail(e, GEN_USAGE, "%s and %s exclude each other", option_display(row_of_mode(o->mode), other),
                    option_display(row, name));
    if (!store(o, row, value, true, &memory))
        return memory ? fail(e, GEN_USAGE, "%s '%s' is not possible: it takes %s", option_display(row, name), value,
                             option_takes(row, takes))
                      : fail(e, GEN_RUN, "cannot allocate memory for the options");
    if (row->kind == OPT_MODE) o->mode = row->mode;
    o->given[row - option_table] = true;
    return true;
}

/* ---- words */

/* The row that a word names, and the value attached to it (after '=' or, for a letter, its number), NULL = none. */
static const struct option_row *match(const char *word, const char **value)
{
    const char *name = word + 1;
    const struct option_row *row;
    *value = NULL;
    if (name[0] == '-') name++;
    size_t n = strcspn(name, "=");
    if (n > 1 && (row = row_of(name, n))) {
        if (name[n] == '=') *value = name + n + 1;
        return row;
    }
    if (name != word + 1 || !(row = row_of_letter(name[0]))) return NULL;
    if (name[1] == '\0') return row;
    bool number = strspn(name + 1 + strspn(name + 1, "+-"), ".0123456789") > 0;
    if (!row->arg || !number) return NULL;
    *value = name + 1;
    return row;
}

/* Takes the option at argv[*i], and its value where that is a word of its own. */
static bool take_option(struct options *o, int argc, char **argv, int *i, struct error *e)
{
    const char *word = argv[*i], *value;
    const struct option_row *row = match(word, &value);
    if (!row) return unknown(word, e);
    bool may_lack = row->arg && row->arg[0] == '[';
    if (row->arg && !value && *i + 1 < argc && !(may_lack && argv[*i + 1][0] == '-')) value = argv[++*i];
    return set(o, row, value, e);
}

const struct option_row *options_of_line(const char *name, struct error *e)
{
    static const char *const others[] = { "predict", "stop", "ignore-eos", "logprobs", "samples", "no-bos",
                                          "no-parse-special" };
    const struct option_row *row = row_of(name, strlen(name));
    char display[40];
    if (!row) return unknown(name, e), NULL;
    bool allowed = row->group == GROUP_SAMPLING;
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) allowed = allowed || strcmp(name, others[i]) == 0;
    if (allowed) return row;
    fail(e, GEN_USAGE, "%s cannot be set by a line: give it on the command line", option_display(row, display));
    return NULL;
}

bool options_copy(struct options *to, const struct options *from, struct error *e)
{
    size_t stops = from->stops.len * sizeof *from->stops.data;
    size_t bias = from->sampling.n_bias * sizeof *from->sampling.bias;
    *to = *from;
    to->stops.data = malloc(stops + 1);
    struct logit_bias *biases = malloc(bias + 1);
    to->sampling.bias = biases;
    if (!to->stops.data || !biases) {
        options_free(to);
        return fail(e, GEN_RUN, "cannot allocate memory for a line's options");
    }
    if (stops) memcpy(to->stops.data, from->stops.data, stops);
    if (bias) memcpy(biases, from->sampling.bias, bias);
    return true;
}

/* Does an answer depend on the option? Unless it is listed here, it may. */
static bool shapes_answers(const struct option_row *row)
{
    static const char listed[] = " model no-mmap threads batch-size lookup kv-layout page-size no-kv-cache kv-memory "
        "kv-offload prompt-cache prompt-cache-ro prompt-cache-all prefix-cache prefix-cache-size no-share samples np "
        "parallel output resume unordered timings progress data-parallel json display-prompt color quiet verbose ";
    char word[48];
    snprintf(word, sizeof word, " %s ", row->name);
    return row->kind != OPT_MODE && row->group != GROUP_MEASURE && !strstr(listed, word);
}

bool options_text(const struct options *o, struct bytes *out)
{
    bool ok = true;
    for (const struct option_row *row = option_table; ok && row < option_table + n_options; row++) {
        const void *field = (const char *)o + row->at;
        const struct texts *texts = field;
        if (!shapes_answers(row)) continue;
        ok = bytes_printf(out, "%s", row->name);
        switch (row->kind) {
        case OPT_FLAG: ok = ok && bytes_printf(out, " %d", *(const bool *)field); break;
        case OPT_INT:
        case OPT_CHOICE:
        case OPT_CHOICE_OR_INT: ok = ok && bytes_printf(out, " %d", *(const int *)field); break;
        case OPT_SIZE:
        case OPT_LONG: ok = ok && bytes_printf(out, " %lld", (long long)*(const int64_t *)field); break;
        case OPT_FLOAT: ok = ok && bytes_printf(out, " %a", (double)*(const float *)field); break;
        case OPT_DOUBLE: ok = ok && bytes_printf(out, " %a", *(const double *)field); break;
        case OPT_TEXT:
        case OPT_ANY_TEXT:
            if (*(const char *const *)field) ok = ok && bytes_printf(out, " %s", *(const char *const *)field);
            break;
        case OPT_TEXTS:
            for (size_t i = 0; ok && i < texts->len; i++) ok = bytes_printf(out, " %s", texts->data[i]);
            break;
        case OPT_BIAS:
            for (size_t i = 0; ok && i < o->sampling.n_bias; i++)
                ok = bytes_printf(out, " %d%+a", o->sampling.bias[i].id, (double)o->sampling.bias[i].bias);
            break;
        case OPT_MODE: break;
        }
        ok = ok && bytes_add(out, "", 1);
    }
    return ok;
}

bool option_value(const struct options *o, const struct option_row *row, struct bytes *out)
{
    const void *field = (const char *)o + row->at;
    const struct texts *texts = field;
    bool ok = bytes_add(out, "", 0);
    switch (row->kind) {
    case OPT_FLAG: return bytes_printf(out, "%s", *(const bool *)field ? "on" : "off");
    case OPT_INT: return bytes_printf(out, "%d", *(const int *)field);
    case OPT_LONG: return bytes_printf(out, "%lld", (long long)*(const int64_t *)field);
    case OPT_FLOAT: return bytes_printf(out, "%g", (double)*(const float *)field);
    case OPT_DOUBLE: return bytes_printf(out, "%g", *(const double *)field);
    case OPT_TEXTS:
        for (size_t i = 0; ok && i < texts->len; i++) ok = bytes_printf(out, "%s%s", i ? " " : "", texts->data[i]);
        return ok;
    case OPT_BIAS:
        for (size_t i = 0; ok && i < o->sampling.n_bias; i++)
            ok = bytes_printf(out, "%s%d%+g", i ? " " : "", o->sampling.bias[i].id, (double)o->sampling.bias[i].bias);
        return ok;
    default: return ok;
    }
}

bool options_set(struct options *o, const char *name, const char *value, struct error *e)
{
    const struct option_row *row = name[0] && !name[1] ? row_of_letter(name[0]) : row_of(name, strlen(name));
    char display[40];
    if (!row) return unknown(name, e);
    if (row->kind == OPT_MODE)
        return fail(e, GEN_USAGE, "%s is possible on the command line only", option_display(row, display));
    return set(o, row, value, e);
}

static bool stray(const char *word, struct error *e)
{
    char display[40];
    int far;
    const struct option_row *row = nearest(word, &far);
    if (strlen(word) >= 4 && far <= 1)
        return fail(e, GEN_USAGE, "stray word '%s': did you mean %s?", word, option_display(row, display));
    return fail(e, GEN_USAGE, "stray word '%s': a text of several words must stand in quotes", word);
}

/* Takes a word that is no option: the text of one message. */
static bool take_word(struct options *o, const char *word, bool only_words, struct error *e)
{
    int far;
    bool like_option = !only_words && strlen(word) >= 4 && (nearest(word, &far), far <= 1);
    if (o->text || o->prompt || like_option) return stray(word, e);
    if (!*word) return fail(e, GEN_USAGE, "the message is empty: gen TEXT sends one, -p TEXT has a text continued");
    o->text = word;
    return true;
}

bool options_chat(const struct options *o)
{
    return o->text || o->chat || o->single_turn || o->no_think || o->system || o->messages || o->chat_template;
}

/* Refuses what contradicts itself in the options that keep the cache on disk. */
static bool consistent_store(const struct options *o, struct error *e)
{
    if ((o->prompt_cache_ro || o->prompt_cache_all) && !o->prompt_cache)
        return fail(e, GEN_USAGE, "--prompt-cache-%s does nothing without --prompt-cache FILE",
                    o->prompt_cache_ro ? "ro" : "all");
    if (o->prompt_cache_ro && o->prompt_cache_all)
        return fail(e, GEN_USAGE, "--prompt-cache-ro and --prompt-cache-all exclude each other");
    if (options_given(o, "prefix-cache-size") && !o->prefix_cache)
        return fail(e, GEN_USAGE, "--prefix-cache-size does nothing without --prefix-cache DIR");
    if (o->prompt_cache && o->prefix_cache)
        return fail(e, GEN_USAGE, "--prompt-cache and --prefix-cache exclude each other: the first keeps one text in a "
                    "file, the second all prompts");
    if (o->tensor_parallel > 1 && (o->prompt_cache || o->prefix_cache))
        return fail(e, GEN_USAGE, "--%s and --tensor-parallel exclude each other: each process has a part of the cache",
                    o->prompt_cache ? "prompt-cache" : "prefix-cache");
    if (o->no_kv_cache && (o->prompt_cache || o->prefix_cache))
        return fail(e, GEN_USAGE, "--%s and --no-kv-cache exclude each other",
                    o->prompt_cache ? "prompt-cache" : "prefix-cache");
    if (o->evict && (o->prompt_cache || o->prefix_cache))
        return fail(e, GEN_USAGE, "--%s and --evict exclude each other: a cache with holes serves this text alone",
                    o->prompt_cache ? "prompt-cache" : "prefix-cache");
    return true;
}

/* What eviction needs, and what cannot be had with it. */
static bool evicts(const struct options *o, struct error *e)
{
    if (!o->budget) return fail(e, GEN_USAGE, "--evict needs --kv-budget N, the number of tokens to keep");
    if (o->window)
        return fail(e, GEN_USAGE, "--evict and --window exclude each other: both say which tokens are kept");
    if (o->layout == choice("paged|contiguous", "contiguous"))
        return fail(e, GEN_USAGE, "--evict gives pages back, which --kv-layout contiguous cannot: use paged");
    if (o->page_size != 32)
        return fail(e, GEN_USAGE, "--evict closes its holes in pages of 32 tokens: leave --page-size %d out",
                    o->page_size);
    if (o->lookup)
        return fail(e, GEN_USAGE, "--evict and --lookup exclude each other: what a rejected draft looked at cannot be "
                    "taken back");
    if (o->tensor_parallel > 1)
        return fail(e, GEN_USAGE, "--evict and --tensor-parallel exclude each other: attention's sums stay with the "
                    "rank that made them");
    if (o->no_kv_cache)
        return fail(e, GEN_USAGE, "--evict and --no-kv-cache exclude each other: without a cache there is nothing to "
                    "evict");
    return true;
}

/* The option that chose the task; NULL where none did. */
static const struct option_row *task_of(const struct options *o)
{
    for (int i = 0; i < n_options; i++)
        if (o->given[i] && option_table[i].kind == OPT_MODE && option_table[i].mode == o->mode) return &option_table[i];
    return NULL;
}

/* Refuses options that would do nothing, and combinations that contradict each other. */
static bool consistent(const struct options *o, struct error *e)
{
    char name[40], other[40];
    const struct option_row *task = task_of(o);
    for (int i = 0; i < n_options; i++) {
        const struct option_row *row = &option_table[i];
        if (!o->given[i] || !row->modes || row->modes & 1u << o->mode) continue;
        if (row->modes == IN(PERPLEXITY))
            return fail(e, GEN_USAGE, "%s does nothing without --perplexity FILE", option_display(row, name));
        if (row->modes == IN(BATCH))
            return fail(e, GEN_USAGE, "%s does nothing without --batch FILE", option_display(row, name));
        if (row->modes == (IN(PERPLEXITY) | IN(KV_REPORT)))
            return fail(e, GEN_USAGE, "%s does nothing without --perplexity FILE or --kv-report",
                        option_display(row, name));
        if (row->modes == (IN(BENCH) | IN(BATCH)))
            return fail(e, GEN_USAGE, "%s does nothing without --bench or --batch FILE", option_display(row, name));
        if (row->modes == IN(BENCH))
            return fail(e, GEN_USAGE, "%s does nothing without --bench", option_display(row, name));
        return fail(e, GEN_USAGE, "%s does nothing with %s: leave one of them out", option_display(row, name),
                    task ? option_display(task, other) : "text to go on with");
    }
    if (o->mode == MODE_KV_REPORT && (!o->file || o->no_kv_cache))
        return fail(e, GEN_USAGE, o->file ? "--kv-report compares caches: leave out --no-kv-cache"
                                          : "--kv-report needs a text to measure quality with: name one with -f FILE");
    if (o->mode == MODE_KV_REPORT && o->tensor_parallel > 1)
        return fail(e, GEN_USAGE, "--kv-report measures one process: leave out --tensor-parallel");
    if (o->stdin_word && !(PROMPTS & 1u << o->mode))
        return fail(e, GEN_USAGE, "the word - (standard input) does nothing with the task that was chosen");
    if (o->stdin_word + (o->file && strcmp(o->file, "-") == 0) + (o->messages && strcmp(o->messages, "-") == 0) > 1)
        return fail(e, GEN_USAGE, "standard input is named twice: leave one - out");
    if (o->text && !(PROMPTS & 1u << o->mode))
        return fail(e, GEN_USAGE, "'%s' as a message does nothing with the task that was chosen", o->text);
    if (o->text && o->prompt)
        return fail(e, GEN_USAGE, "stray word '%s': -p gives the text, and one of several words must stand in quotes",
                    o->text);
    if (options_chat(o) && (o->no_bos || o->no_parse_special))
        return fail(e, GEN_USAGE, "%s does nothing in a chat, whose template says what stands where",
                    o->no_bos ? "--no-bos" : "--no-parse-special");
    if (options_given(o, "logprobs") && !o->json && o->mode != MODE_BATCH)
        return fail(e, GEN_USAGE, "--logprobs does nothing without --json");
    if (o->data_parallel && o->tensor_parallel > 1)
        return fail(e, GEN_USAGE, "--data-parallel and --tensor-parallel exclude each other: the processes share "
                    "either the lines or the model");
    if (o->resume && !o->output) return fail(e, GEN_USAGE, "--resume does nothing without --output FILE");
    if (o->mode == MODE_BATCH && o->no_kv_cache)
        return fail(e, GEN_USAGE, "--batch and --no-kv-cache exclude each other: lines are computed together by their "
                    "caches");
    if (o->display_prompt && o->json)
        return fail(e, GEN_USAGE, "--display-prompt and --json exclude each other: the object holds the answer alone");
    if (options_given(o, "sinks") && !o->window) return fail(e, GEN_USAGE, "--sinks does nothing without --window N");
    if (o->window && o->layout == choice("paged|contiguous", "contiguous"))
        return fail(e, GEN_USAGE, "--window gives pages back, which --kv-layout contiguous cannot: use paged");
    if (o->window && o->no_kv_cache)
        return fail(e, GEN_USAGE, "--window and --no-kv-cache exclude each other: without a cache there is nothing to "
                    "give back");
    if (options_given(o, "kv-budget") && !o->evict)
        return fail(e, GEN_USAGE, "--kv-budget does nothing without --evict attention or --evict snapkv");
    if (o->evict && !evicts(o, e)) return false;
    if (o->lookup && o->no_kv_cache)
        return fail(e, GEN_USAGE, "--lookup and --no-kv-cache exclude each other: drafts are verified against the "
                    "cache");
    if (options_given(o, "page-size") && o->layout == choice("paged|contiguous", "contiguous"))
        return fail(e, GEN_USAGE, "--page-size does nothing with --kv-layout contiguous");
    if (o->page_size % 32)
        return fail(e, GEN_USAGE, "--page-size %d is not possible: it takes a multiple of 32", o->page_size);
    if (o->kv_offload && !o->kv_memory)
        return fail(e, GEN_USAGE, "--kv-offload does nothing without --kv-memory SIZE");
    if (o->kv_offload && o->tensor_parallel > 1)
        return fail(e, GEN_USAGE, "--kv-offload and --tensor-parallel exclude each other: the ranks' memories add up");
    if (o->kv_offload && o->layout == choice("paged|contiguous", "contiguous"))
        return fail(e, GEN_USAGE, "--kv-offload moves pages, which --kv-layout contiguous has not: use paged");
    if (o->quiet && o->verbose) return fail(e, GEN_USAGE, "--quiet and --verbose exclude each other");
    if (o->inspect && o->model)
        return fail(e, GEN_USAGE, "--inspect %s and --model %s: name the file once", o->inspect, o->model);
    return consistent_store(o, e);
}

bool options_parse(struct options *o, int argc, char **argv, struct error *e)
{
    bool memory = true, only_words = false;
    *o = (struct options){ 0 };
    for (int i = 0; i < n_options; i++)
        if (option_table[i].preset) store(o, &option_table[i], option_table[i].preset, false, &memory);
    for (int i = 1; i < argc && o->mode < MODE_HELP; i++) {
        if (!only_words && strcmp(argv[i], "--") == 0) {
            only_words = true;
        } else if (strcmp(argv[i], "-") == 0) {
            if (o->stdin_word) return fail(e, GEN_USAGE, "standard input is named twice by the word -");
            o->stdin_word = true;
        } else if (only_words || argv[i][0] != '-') {
            if (!take_word(o, argv[i], only_words, e)) return false;
        } else if (!take_option(o, argc, argv, &i, e)) {
            return false;
        }
    }
    if (o->mode >= MODE_HELP) return true;
    if (!consistent(o, e)) return false;
    return o->mode != MODE_BATCH || !o->bench_parallel || options_set(o, "parallel", o->bench_parallel, e);
}

void options_free(struct options *o)
{
    free(o->stops.data);
    free((void *)o->sampling.bias);
    *o = (struct options){ 0 };
}
