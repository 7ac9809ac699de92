/* gen.c - the program: what a run is asked to do, signals, exit codes. */
#define _GNU_SOURCE                    /* memrchr */
#include "answer.h"
#include "batch.h"
#include "bench.h"
#include "chat.h"
#include "chat_session.h"
#include "comm.h"
#include "engine.h"
#include "gguf.h"
#include "input.h"
#include "inspect.h"
#include "kvreport.h"
#include "kvstore.h"
#include "measure.h"
#include "model.h"
#include "options.h"
#include "output.h"
#include "memory.h"
#include "ranks.h"
#include "result.h"
#include "sampler.h"
#include "tokenizer.h"
#include "usage.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define DEFAULT_MODEL "weights/SmolLM2-135M-Instruct.Q4_1.gguf"

struct program {
    struct options o;
    struct gguf *file;                 /* until the model owns it */
    struct tokenizer *tokenizer;
    struct model *model;
    struct comm *comm;                 /* processes that the model or a batch's lines are divided over; NULL = one */
    struct engine *engine;
    struct kvstore *store;             /* the cache on disk; NULL = none */
    uint8_t fingerprint[32], root[KV_KEY];         /* of the model file; of all that the store's blocks depend on */
    int64_t ctx;                       /* tokens of context, the window's included */
    int sinks;                         /* in a chat: tokens that stay when the context is full, and slides; 0 = it ends
                                        * there */
    struct sequence *sequence;
    struct sampler *sampler;
    struct stream *stream;
    struct chat *chat;                 /* the prompt is made of messages; NULL = it is raw */
    struct conversation *conversation;
    bool session;                      /* messages are read while the program runs */
    struct bytes prompt;
    struct ids tokens;                 /* prompt, then answer */
    size_t n_prompt;
    struct logprob_rows logprobs;      /* of the generated tokens */
    struct result result;
    int64_t steps;                     /* decode steps */
    double begun;                      /* when the program started */
};

static volatile sig_atomic_t caught;   /* the signal that asks to end */
static volatile int stop_now;          /* the same as the engine reads it */

static void on_signal(int number)
{
    if (caught) {                      /* the second one, of whatever kind, ends the program at once */
        signal(number, SIG_DFL);
        raise(number);
    }
    caught = number;
    stop_now = 1;
}

/* Is standard output read by a person? mpirun hands every rank a terminal of its own and passes on what it says. */
static bool on_terminal(const struct program *p) { return isatty(STDOUT_FILENO) && !p->comm; }

/* From now on a signal ends the run in order; a second one ends the program at once. */
static void catch_signals(void)
{
    static const int signals[] = { SIGINT, SIGTERM, SIGHUP };
    for (size_t i = 0; i < sizeof signals / sizeof *signals; i++) {
        struct sigaction old, action = { .sa_handler = on_signal };
        if (sigaction(signals[i], NULL, &old) == 0 && old.sa_handler == SIG_DFL) sigaction(signals[i], &action, NULL);
    }
}

/* A line on standard error, unless --quiet. */
__attribute__((format(printf, 2, 3))) static void note(const struct program *p, const char *format, ...)
{
    struct bytes line = { 0 };
    char text[600];                    /* may quote file content */
    va_list args;
    if (p->o.quiet) return;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (visible_add(&line, text, strlen(text))) fprintf(stderr, "gen: %s\n", line.data);
    bytes_free(&line);
}

/* ---- progress --------------------------------------------------------------------------------------------------- */

static struct { bool wanted, shown; const char *what; double begun, drawn; } bar;

/* A bar on standard error once something takes longer than half a second; removed when it is done. */
static void progress(const char *what, double done)
{
    double now = now_seconds();
    if (!bar.wanted) return;
    if (!bar.what || strcmp(bar.what, what) != 0) bar.what = what, bar.begun = now;
    if (done >= 1) {
        if (bar.shown) fputs("\r\033[K", stderr);
        bar.shown = false;
        bar.what = NULL;
    } else if (now - bar.begun > 0.5 && now - bar.drawn > 0.1) {
        int n = (int)(done * 30);
        fprintf(stderr, "\r%-10s [%.*s%*s] %3d %%", what, n, "##############################", 30 - n, "",
                (int)(done * 100));
        bar.shown = true;
        bar.drawn = now;
    }
}

/* ---- what is read ----------------------------------------------------------------------------------------------- */

/* Was a prompt named in any way? */
static bool has_prompt(const struct options *o)
{
    return o->text || o->prompt || o->file || o->messages || o->stdin_word;
}

/* Is standard input named as a prompt? */
static bool names_input(const struct options *o)
{
    return o->stdin_word || (o->file && strcmp(o->file, "-") == 0) || (o->messages && strcmp(o->messages, "-") == 0);
}

/* Appends text that was given; messages of several parts get a line end between them, raw prompts nothing. */
static bool add_part(struct program *p, const char *text, size_t n, bool message, struct error *e)
{
    bool apart = message && n && p->prompt.len && p->prompt.data[p->prompt.len - 1] != '\n';
    return (bytes_add(&p->prompt, "\n", apart) && bytes_add(&p->prompt, text, n))
        || fail(e, GEN_RUN, "cannot allocate memory for the prompt");
}

static bool add_file(struct program *p, const char *path, bool message, struct error *e)
{
    struct bytes text = { 0 };
    if (!message || !p->prompt.len) return input_read(path, &p->prompt, e);
    bool ok = input_read(path, &text, e) && add_part(p, text.data ? text.data : "", text.len, message, e);
    bytes_free(&text);
    return ok;
}

/* The raw prompt or the message: TEXT or -p, then -f, then standard input where it is named or nothing else is
 * given. */
static bool read_prompt(struct program *p, bool message, struct error *e)
{
    const struct options *o = &p->o;
    const char *text = o->text ? o->text : o->prompt;
    if (text && !add_part(p, text, strlen(text), message, e)) return false;
    if (o->file && !add_file(p, o->file, message, e)) return false;
    bool input = o->stdin_word || (!has_prompt(o) && !p->session);
    return !input || add_file(p, "-", message, e);
}

/* Text in a pipe that nobody reads was probably meant. */
static void warn_of_unread_input(const struct program *p)
{
    struct stat st;
    int waiting = 0;
    if (names_input(&p->o) || !has_prompt(&p->o) || fstat(STDIN_FILENO, &st) != 0 || !S_ISFIFO(st.st_mode)) return;
    if (ioctl(STDIN_FILENO, FIONREAD, &waiting) == 0 && waiting > 0)
        note(p, "warning: standard input holds text that is not read; the word - appends it to the prompt");
}

/* The model file: -m, GEN_MODEL, or the default beside the program or in the current directory. NULL = none. */
static const char *model_path(const struct program *p, char buffer[PATH_MAX + 64])
{
    const char *named = getenv("GEN_MODEL");
    if (p->o.inspect) return p->o.inspect;
    if (p->o.model) return p->o.model;
    if (named && *named) return named;
    ssize_t n = readlink("/proc/self/exe", buffer, PATH_MAX);
    char *name = n > 0 ? memrchr(buffer, '/', (size_t)n) : NULL;
    if (name) {
        strcpy(name + 1, DEFAULT_MODEL);
        if (access(buffer, F_OK) == 0) return buffer;
    }
    return access(DEFAULT_MODEL, F_OK) == 0 ? DEFAULT_MODEL : NULL;
}

static bool open_file(struct program *p, struct error *e)
{
    char buffer[PATH_MAX + 64];
    const char *path = model_path(p, buffer);
    if (!path)
        return fail(e, GEN_USAGE, "there is no model: name a GGUF file with -m FILE or GEN_MODEL, or run `make run` "
                                  "once in gen's source directory, which obtains " DEFAULT_MODEL);
    return gguf_open(&p->file, path, !p->o.no_mmap, e);
}

static bool open_tokenizer(struct program *p, struct error *e)
{
    char remark[200] = "";
    if (!open_file(p, e) || !tokenizer_open(&p->tokenizer, p->file, remark, e)) return false;
    if (*remark) note(p, "warning: %s", remark);
    return true;
}

/* The template's source: a built-in's or a file's that --chat-template names, else the model's. */
static bool find_template(struct program *p, struct bytes *out, struct error *e)
{
    struct gguf_str own;
    const char *named = p->o.chat_template, *builtin = named ? chat_builtin(named) : NULL;
    if (builtin)
        return bytes_add(out, builtin, strlen(builtin))
            || fail(e, GEN_RUN, "cannot allocate memory for the chat template");
    if (named && access(named, F_OK) != 0)
        return fail(e, GEN_USAGE, "--chat-template %s is neither a file nor one of %s", named, chat_builtin_names());
    if (named) return input_read(named, out, e);
    if (!chat_model_template(p->file, &own, e)) return false;
    if (!own.ptr)
        return fail(e, GEN_USAGE, "the model brings no chat template: have a text continued with -p TEXT, or name a "
                                  "template, for instance --chat-template chatml");
    return bytes_add(out, own.ptr, own.len) || fail(e, GEN_RUN, "cannot allocate memory for the chat template");
}

/* The messages of --messages, and that of -sys before them. */
static bool add_messages(struct program *p, struct error *e)
{
    struct json_t *list = NULL;
    struct bytes text = { 0 };
    bool ok = true;
    if (p->o.messages) {
        ok = input_read(p->o.messages, &text, e)
          && (chat_read_messages(&list, text.data ? text.data : "", text.len, e)
              || fail(e, e->code, "%s: %s", p->o.messages, e->text))
          && conversation_add_list(p->conversation, list, e);
        chat_free_messages(list);
        bytes_free(&text);
    }
    return ok && (!p->o.system || conversation_add_system(p->conversation, p->o.system, "--messages", e));
}

/* Opens the chat; *source becomes its template's. */
static bool open_template(struct program *p, struct bytes *source, struct error *e)
{
    if (!find_template(p, source, e)) return false;
    struct chat_options co = { source->data ? source->data : "", source->len, p->o.no_think, time(NULL) };
    return chat_open(&p->chat, p->tokenizer, &co, e);
}

static bool open_chat(struct program *p, struct error *e)
{
    struct bytes source = { 0 };
    bool ok = open_template(p, &source, e) && conversation_open(&p->conversation, p->chat, e) && add_messages(p, e);
    bytes_free(&source);
    return ok;
}

/* Makes one prompt of the messages and their text. */
static bool encode_messages(struct program *p, bool message, struct error *e)
{
    const struct ids *ids;
    if (message && !conversation_add(p->conversation, "user", p->prompt.data ? p->prompt.data : "", p->prompt.len, e))
        return false;
    if (!conversation_prompt(p->conversation, &ids, e)) return false;
    const struct bytes *text = conversation_text(p->conversation);
    p->prompt.len = 0;
    bool ok = bytes_add(&p->prompt, text->data, text->len);
    for (size_t i = 0; ok && i < ids->len; i++) ok = ids_add(&p->tokens, ids->data[i]);
    return ok || fail(e, GEN_RUN, "cannot allocate memory for the prompt");
}

/* Reads the prompt and makes tokens of it. A chat that goes on has messages of its own later: its prompt stays text. */
static bool make_prompt(struct program *p, struct error *e)
{
    struct options *o = &p->o;
    bool waits = !has_prompt(o) && isatty(STDIN_FILENO), chats = options_chat(o);
    struct gguf_str template = { NULL, 0 };
    if (!open_tokenizer(p, e)) return false;
    if (waits && !chats && o->mode == MODE_GENERATE && !o->no_bos && !o->no_parse_special) {
        if (!chat_model_template(p->file, &template, e)) return false;
        chats = template.ptr != NULL;
    }
    p->session = o->mode == MODE_GENERATE && chats && (waits || (o->chat && !o->single_turn));
    if (waits && !p->session)
        return fail(e, GEN_USAGE, "there is no prompt: give one with -p TEXT or -f FILE, or through a pipe");
    if (p->session && names_input(o))
        return fail(e, GEN_USAGE, "a chat reads standard input message by message: it cannot be a prompt, too");
    if (!read_prompt(p, chats, e) || (chats && !open_chat(p, e))) return false;
    if (p->session) return true;
    struct span text = { p->prompt.len ? p->prompt.data : "", p->prompt.len, !o->no_parse_special };
    bool message = o->text || o->prompt || o->file || o->stdin_word || !o->messages;
    if (!(chats ? encode_messages(p, message, e) : tokenizer_encode(p->tokenizer, &text, 1, !o->no_bos, &p->tokens, e)))
        return false;
    p->n_prompt = p->tokens.len;
    if (chats && !options_given(o, "predict")) o->predict = -1;
    return true;
}

static struct engine_options engine_options(const struct program *p, int64_t ctx)
{
    int places, place = comm_place(p->comm, &places);
    return (struct engine_options){
        .ctx = ctx, .batch = p->o.batch, .threads = p->o.threads, .backend = p->o.backend,
        .max_sequences = p->o.mode == MODE_BATCH ? p->o.parallel : 1, .layout = p->o.layout,
        .page_size = p->o.page_size, .type_k = p->o.type_k, .type_v = p->o.type_v, .window = p->o.window,
        .sinks = p->o.sinks, .slide = p->sinks, .evict = p->o.evict, .budget = p->o.budget, .cache = !p->o.no_kv_cache,
        .share = !p->o.no_share,
        .kv_memory = (size_t)p->o.kv_memory, .kv_offload = p->o.kv_offload,
        .overcommit = p->o.mode == MODE_BATCH && p->o.layout == KV_PAGED,
        .progress = progress, .comm = p->o.data_parallel ? NULL : p->comm, .place = place,
    };
}

static struct model_options model_options(const struct program *p, int64_t ctx)
{
    struct comm *parts = p->o.data_parallel ? NULL : p->comm;
    return (struct model_options){ p->o.rope_freq_base, p->o.rope_scale, (int)ctx, comm_rank(parts), comm_size(parts),
                                   p->o.kv_heads };
}

/* The model takes the file over, whether it can be opened or not. */
static bool open_model(struct program *p, int64_t ctx, struct error *e)
{
    char remark[200] = "";
    struct model_options mo = model_options(p, ctx);
    struct gguf *file = p->file;
    p->file = NULL;
    if (!model_open(&p->model, file, &mo, remark, e)) return false;
    if (*remark) note(p, "warning: %s", remark);
    return true;
}

/* This process's share of its device's free memory; 0 = there is no device. */
static uint64_t device_memory(const struct program *p)
{
    struct error none = { 0 };
    int places, place = comm_place(p->comm, &places);
    return cuda_memory(place, places, &none);
}

/* Bytes that weights and cache may take: of the device, where that is what computes. */
static uint64_t memory_for(const struct program *p)
{
    uint64_t device = p->o.backend == BACKEND_CPU ? 0 : device_memory(p);
    return device ? device : memory_available();
}

/* Chooses the types that are to be chosen, for a context of `asked` tokens (0 = the model's). */
static bool choose_types(struct program *p, int64_t asked, struct error *e)
{
    struct options *o = &p->o;
    bool auto_k = o->type_k == CACHE_AUTO, auto_v = o->type_v == CACHE_AUTO;
    struct engine_options eo = engine_options(p, asked ? asked : p->model->n_ctx);
    if (!auto_k && !auto_v) return true;
    if (o->kv_memory) eo.max_sequences = 1;      /* as for the context */
    uint64_t room = cache_room(p->model, o->kv_memory, memory_for(p));
    if (!finest_types(p->model, &eo, auto_k, auto_v, room, e)) return false;
    o->type_k = eo.type_k;
    o->type_v = eo.type_v;
    if (eo.ctx)
        note(p, "types chosen for the cache of %lld tokens: keys %s, values %s", (long long)eo.ctx,
             kv_type_name(eo.type_k), kv_type_name(eo.type_v));
    return true;
}

/* The context to use when `asked` is asked for; 0 = the model's, or what fits memory. */
static bool choose_context(struct program *p, int64_t asked, int64_t *ctx, struct error *e)
{
    if (!choose_types(p, asked, e)) return false;
    struct engine_options eo = engine_options(p, asked);
    const struct model *m = p->model;
    struct kv_usage need;
    uint64_t budget = (uint64_t)p->o.kv_memory, available = budget ? budget : memory_for(p);
    const char *whose = budget ? "that --kv-memory gives" : "that are available";
    char a[32], b[32];
    if (budget) eo.max_sequences = 1;  /* the sequences of a batch take turns in it */
    human_bytes((double)available, a);
    if (!asked) {
        if (eo.window && !engine_estimate(m, &eo, &need, e)) return false;
        *ctx = largest_context(m, &eo, m->n_ctx, cache_room(m, budget, available));
        if (*ctx) return true;
        if (!budget) return fail(e, GEN_RUN, "the model needs more memory than the %s %s", a, whose);
        eo.ctx = KV_BLOCK;
        return engine_estimate(m, &eo, &need, e)
            && fail(e, GEN_RUN, "the cache of %s needs %zu bytes (%s), more than the %s %s: raise it", eo.window ?
                    "the window" : "one block of 32 tokens", need.bytes_reserved,
                    human_bytes((double)need.bytes_reserved, b), a, whose);
    }
    *ctx = asked;
    if (!engine_estimate(m, &eo, &need, e)) return false;
    if (need.bytes_reserved > available && budget && eo.overcommit)
        note(p, "a context of %lld tokens needs %s for its cache, but there are only the %s %s: lines that need more "
                "get an error", (long long)asked, human_bytes((double)need.bytes_reserved, b), a, whose);
    else if (need.bytes_reserved > available)
        return fail(e, GEN_RUN, "a context of %lld tokens needs %zu bytes (%s) for its cache, more than the %s %s: "
                                "lower --ctx-size or choose smaller types with -ctk and -ctv", (long long)asked,
                    need.bytes_reserved, human_bytes((double)need.bytes_reserved, b), a, whose);
    if (asked > m->n_ctx && !eo.window)
        note(p, "warning: the model was made for %d tokens, fewer than --ctx-size %lld", m->n_ctx, (long long)asked);
    return true;
}

/* What makes room for a longer prompt than the context of `ctx` tokens, which was asked for or (0) chosen. */
static const char *longer_context(const struct program *p, int64_t asked, int64_t ctx)
{
    if (asked || ctx >= p->model->n_ctx) return "raise --ctx-size";
    if (!p->o.kv_memory) return "choose smaller types with -ctk and -ctv";
    return p->o.layout == KV_PAGED && !p->comm ? "raise --kv-memory, add --kv-offload host" : "raise --kv-memory";
}

static bool prompt_fits(const struct program *p, int64_t asked, int64_t ctx, struct error *e)
{
    return (int64_t)p->n_prompt <= ctx || p->o.window
        || fail(e, GEN_USAGE, "the prompt has %zu tokens, but the context holds %lld: %s or shorten the prompt",
                p->n_prompt, (long long)ctx, longer_context(p, asked, ctx));
}

/* What is not exact is said once. */
static void note_approximations(const struct program *p, const struct engine_options *eo)
{
    const struct model *m = p->model;
    if (kv_sealed(eo->type_k) || kv_sealed(eo->type_v))
        note(p, "the cache is approximate: keys %s, values %s", kv_type_name(eo->type_k), kv_type_name(eo->type_v));
    if (p->o.window)
        note(p, "the cache is approximate: the last %d tokens and the first %d are kept", eo->window, eo->sinks);
    if (eo->evict)
        note(p, "the cache is approximate: of each layer and head %lld tokens are kept",
             (long long)eo->budget / KV_BLOCK * KV_BLOCK);
    if (m->all_kv < m->file_kv)
        note(p, "the model is approximate: its %d key/value heads are averaged to %d, without the training that this "
                "asks for", m->file_kv, m->all_kv);
}

/* Chooses what is to be chosen and opens the engine; what memory allows is known for certain only when all has been
 * reserved. */
static bool plan_engine(struct program *p, int64_t asked, struct error *e)
{
    int64_t ctx;
    if (!choose_context(p, asked, &ctx, e) || !prompt_fits(p, asked, ctx, e)) return false;
    struct engine_options eo = engine_options(p, ctx);
    while (p->ctx = eo.ctx, !engine_open(&p->engine, p->model, &eo, e)) {
        if (asked || p->o.window || p->comm || e->code != GEN_RUN || eo.ctx < 2 * KV_BLOCK) return false;
        eo.ctx = eo.ctx / 2 / KV_BLOCK * KV_BLOCK;
    }
    return true;
}

/* Opens the engine for the prompt and a context of `asked` tokens; 0 = the model's, or as many as memory allows. */
static bool open_engine(struct program *p, int64_t asked, struct error *e)
{
    struct options *o = &p->o;
    int type_k = o->type_k, type_v = o->type_v;
    bool device = o->backend == BACKEND_AUTO && device_memory(p), ok = plan_engine(p, asked, e);
    bool least = !asked && ok && p->ctx < p->model->n_ctx;
    char why[sizeof e->text] = "", a[32];
    if (ok) memcpy(why, engine_note(p->engine), sizeof why);
    else if (device) memcpy(why, e->text, sizeof why);
    if (device && *why && (!ok || least || o->type_k != type_k || o->type_v != type_v) && !comm_lost(p->comm)) {
        engine_close(p->engine);       /* the device's memory is not what counts */
        p->engine = NULL;
        o->backend = BACKEND_CPU;
        o->type_k = type_k, o->type_v = type_v;
        ok = plan_engine(p, asked, e);
    }
    if (!ok) return false;
    progress("loading", 1);
    if (!asked && p->ctx < p->model->n_ctx)
        note(p, "the context is lowered from the model's %d to %lld tokens, whose cache fits the memory %s",
             p->model->n_ctx, (long long)p->ctx, p->o.kv_memory ? "that --kv-memory gives" : "available");
    if (p->sinks > p->ctx / 2) p->sinks = 0;
    struct engine_options eo = engine_options(p, p->ctx);
    note_approximations(p, &eo);
    const struct backend *b = engine_backend(p->engine);
    p->result.load_s = now_seconds() - p->begun;
    if (*why && (o->verbose || device)) note(p, "CUDA is not used: %s", why);
    if (p->o.verbose) {
        note(p, "model %s, architecture %s", gguf_path(p->model->file), p->model->arch_name);
        note(p, "backend %s (%s), %d threads; context %lld tokens; cache %s, %s reserved", b->name, b->isa, b->threads,
             (long long)engine_ctx(p->engine), p->o.layout == KV_PAGED ? "paged" : "contiguous",
             human_bytes((double)engine_kv_usage(p->engine).bytes_reserved, a));
    }
    return prompt_fits(p, asked, p->ctx, e);
}

/* ---- the cache on disk ------------------------------------------------------------------------------------------- */

static void tell_store(void *user, const char *sentence) { note(user, "warning: %s", sentence); }

/* The model file's fingerprint: what the store remembers, or computed by reading the whole file. */
static bool find_fingerprint(struct program *p, struct kvstore *k, struct error *e)
{
    uint8_t identity[32];
    bool sure = gguf_identity(p->model->file, identity);
    if (sure && k->known(k, identity, p->fingerprint)) return true;
    int threads = engine_backend(p->engine)->threads;
    if (!gguf_digest(p->model->file, p->fingerprint, threads, progress, e)) return false;
    if (sure) k->remember(k, identity, p->fingerprint);
    return true;
}

/* What stands in a cache file about the run that made it, as JSON. */
static bool settings_text(const struct program *p, struct bytes *out)
{
    const struct options *o = &p->o;
    bool slides = p->session && p->sinks;
    const struct backend *b = engine_backend(p->engine);
    return bytes_printf(out, "{\"gen\": \"%s\", \"backend\": \"%s\", \"isa\": \"%s\", \"type_k\": \"%s\", "
                        "\"type_v\": \"%s\", \"layout\": \"%s\", \"page_size\": %d, \"rope_freq_base\": %.17g, "
                        "\"rope_scale\": %.17g, \"window\": %d, \"sinks\": %d, "
                        "\"kv_heads\": %d}", GEN_VERSION, b->name, b->isa,
                        kv_type_name(o->type_k), kv_type_name(o->type_v),
                        o->layout == KV_PAGED ? "paged" : "contiguous", o->page_size, o->rope_freq_base,
                        o->rope_scale, slides ? (int)p->ctx - p->sinks : o->window,
                        slides ? p->sinks : o->window ? o->sinks : 0,
                        p->model->all_kv);
}

/* Are the blocks of a cache file those that this run makes? If not, *why says in what they differ. */
static bool check_store(struct program *p, struct kvstore *k, const uint8_t root[KV_KEY], struct error *why)
{
    const struct kvstore_text *t = kvstore_file_text(k);
    struct bytes own = { 0 }, differs = { 0 };
    bool known = t && settings_text(p, &own) && inspect_settings(&differs, &t->settings, &own);
    bool model = t && memcmp(t->fingerprint, p->fingerprint, 32) == 0;
    bool same = kvstore_file_check(k, p->fingerprint, root, why);
    if (!same && model && known && differs.len) fail(why, why->code, "%s%s", why->text, differs.data);
    bytes_free(&own);
    bytes_free(&differs);
    return same;
}

/* Opens the cache on disk that the options name, once the engine is there. What is wrong with it is told; the run then
 * goes on without it. A prompt of less than a block has nothing to keep or look for. */
static bool open_store(struct program *p, struct error *e)
{
    const struct options *o = &p->o;
    struct error why = { 0 };
    if (o->prefix_cache && o->mode == MODE_GENERATE && !p->session && p->n_prompt < KV_BLOCK) return true;
    if (o->prefix_cache) {
        p->store = kvstore_open(o->prefix_cache, (uint64_t)o->prefix_cache_size, engine_backend(p->engine)->threads,
                                tell_store, p);
        if (!p->store) return true;
    } else if (o->prompt_cache) {
        p->store = kvstore_file_open(o->prompt_cache, o->prompt_cache_ro ? KVSTORE_READ : KVSTORE_UPDATE, &why);
        if (!p->store) return *e = why, false;
        p->store->tell = tell_store;
        p->store->user = p;
    } else return true;
    if (!find_fingerprint(p, p->store, e)) return false;
    engine_root_key(p->engine, p->fingerprint, p->root);
    if (o->prompt_cache && !why.code) check_store(p, p->store, p->root, &why);
    if (why.code)
        note(p, "warning: %s: it is not used, and %s", why.text, kvstore_file_replaces(p->store) ?
             "replaced when this run ends" : "stays as it is");
    return engine_use_store(p->engine, p->store, p->root, e);
}

/* Writes the file of --prompt-cache. */
static bool save_store(struct program *p, struct error *e)
{
    struct kvstore_text t = { .tokens = sequence_tokens(p->sequence), .n_tokens = sequence_length(p->sequence) };
    struct error why;
    if (!p->store || !p->o.prompt_cache || p->o.prompt_cache_ro) return true;
    if (p->o.prompt_cache_all && !sequence_store(p->sequence, p->store, p->root, e)) return false;
    if (!p->o.prompt_cache_all && !p->session && t.n_tokens > (int64_t)p->n_prompt) t.n_tokens = (int64_t)p->n_prompt;
    memcpy(t.root, p->root, KV_KEY);
    memcpy(t.fingerprint, p->fingerprint, 32);
    bool ok = settings_text(p, &t.settings) || fail(e, GEN_RUN, "cannot allocate memory for the prompt's cache");
    if (ok && !kvstore_file_save(p->store, &t, &why)) note(p, "warning: %s", why.text);
    bytes_free(&t.settings);
    return ok;
}

/* Keeps the chat in a file; see chat_session.h. */
static bool save_chat(void *user, const char *path, const struct bytes *messages, const struct ids *tokens,
                      int64_t *cached, char said[500], struct error *e)
{
    struct program *p = user;
    struct error ignored = { 0 };
    struct kvstore_text t = { .tokens = tokens->data, .n_tokens = (int64_t)tokens->len, .messages = *messages };
    bool holes = p->o.evict && sequence_evicted(p->sequence) > 0;
    if (holes || p->comm)
        snprintf(said, 500, "the cache %s: only the messages are kept",
                 holes ? "has holes because of --evict" : "is divided over several processes");
    struct kvstore *k = kvstore_file_open(path, KVSTORE_REPLACE, &ignored);
    if (!k) return *e = ignored, false;
    bool ok = find_fingerprint(p, k, e);
    engine_root_key(p->engine, p->fingerprint, t.root);
    memcpy(t.fingerprint, p->fingerprint, 32);
    ok = ok && (settings_text(p, &t.settings) || fail(e, GEN_RUN, "cannot allocate memory for the settings"))
      && (*said || sequence_store(p->sequence, k, t.root, e)) && kvstore_file_save(k, &t, e);
    if (ok) *cached = kvstore_file_text(k)->n_blocks * KV_BLOCK;
    bytes_free(&t.settings);
    k->close(k);
    return ok;
}

static bool load_chat(void *user, const char *path, struct bytes *messages, struct ids *tokens, char said[500],
                      struct error *e)
{
    struct program *p = user;
    struct error why = { 0 };
    uint8_t root[KV_KEY];
    struct kvstore *k = kvstore_file_open(path, KVSTORE_READ, &why);
    const struct kvstore_text *t = k ? kvstore_file_text(k) : NULL;
    bool ok = k && !why.code, made = ok && t && t->messages.len;
    if (!ok) *e = why;
    else if (!made)
        ok = access(path, F_OK) != 0 ? fail(e, GEN_RUN, "cannot read %s: %s", path, strerror(errno))
                                     : fail(e, GEN_RUN, "%s holds no chat", path);
    ok = ok && (bytes_add(messages, t->messages.data, t->messages.len)
                || fail(e, GEN_RUN, "cannot allocate memory for the chat"));
    for (int64_t i = 0; ok && i < t->n_tokens && t->tokens[i] >= 0 && t->tokens[i] < p->model->n_vocab; i++)
        ok = ids_add(tokens, t->tokens[i]) || fail(e, GEN_RUN, "cannot allocate memory for the chat");
    ok = ok && find_fingerprint(p, k, e);
    if (ok) {
        engine_root_key(p->engine, p->fingerprint, root);
        if (!check_store(p, k, root, &why))
            snprintf(said, 500, "%.400s: only its messages are used", why.text);
        k->tell = tell_store;
        k->user = p;
        sequence_cut(p->sequence, 0);
        if (!p->comm && !*said) sequence_restore(p->sequence, k, root, tokens->data, (int64_t)tokens->len);
    }
    if (k) k->close(k);
    return ok;
}

/* ---- generation ------------------------------------------------------------------------------------------------- */

static bool use_color(const struct program *p)
{
    const char *no_color = getenv("NO_COLOR");
    if (p->o.color != COLOR_AUTO) return p->o.color == COLOR_ALWAYS;
    return on_terminal(p) && !(no_color && *no_color);
}

static bool show_prompt_before_answer(const struct program *p, struct error *e)
{
    struct bytes out = { 0 };
    bool color = use_color(p);
    bool ok = (!color || bytes_add(&out, "\033[32m", 5))
           && (on_terminal(p) ? visible_add(&out, p->prompt.data, p->prompt.len)
                                     : bytes_add(&out, p->prompt.data, p->prompt.len))
           && (!color || bytes_add(&out, "\033[0m", 4));
    ok = ok ? output_write(out.data, out.len, e) : fail(e, GEN_RUN, "cannot allocate memory for the prompt");
    bytes_free(&out);
    return ok;
}

static bool choose_seed(struct program *p, struct error *e)
{
    struct options *o = &p->o;
    if (o->seed < 0) {
        uint32_t seed = 0;
        if (getrandom(&seed, sizeof seed, 0) != sizeof seed)
            return fail(e, GEN_RUN, "cannot draw a random seed (%s): give --seed N", strerror(errno));
        o->seed = seed;
        if (o->sampling.temperature > 0 && o->predict != 0) note(p, "seed %lld", (long long)o->seed);
    }
    o->sampling.seed = (uint64_t)o->seed;
    return true;
}

/* Opens what generating needs, once the model and the prompt are there. */
static bool prepare(struct program *p, struct error *e)
{
    struct options *o = &p->o;
    if (!choose_seed(p, e)) return false;
    p->logprobs.n_top = o->logprobs;
    bool terminal = on_terminal(p);
    struct stream_options so = { .tokenizer = p->tokenizer, .stops = &o->stops, .at_start = p->prompt.len == 0,
                                 .print = !o->json, .visible = terminal };
    return sampler_open(&p->sampler, &o->sampling, p->model->n_vocab, e) && stream_open(&p->stream, &so, e);
}

/* Takes a token of the answer. */
static bool take(void *user, int32_t id, size_t index, const float *logits, bool *stopped, struct error *e)
{
    struct program *p = user;
    return logprobs_keep(&p->logprobs, p->sampler, logits, id, index, e) && stream_add(p->stream, id, stopped, e);
}

static bool decode(struct program *p, struct answer *a, struct error *e)
{
    bool ok = answer_reserve(a, &p->tokens, e) && answer_run(a, &p->tokens, e);
    p->result.finish_reason = a->finish_reason;
    p->steps = a->steps;
    return ok;
}

/* Computes the prompt, then the answer; both are timed. */
static bool generate(struct program *p, struct error *e)
{
    struct result *r = &p->result;
    if (!sequence_open(&p->sequence, p->engine, e)) return false;
    struct answer a = { .sequence = p->sequence, .engine = p->engine, .sampler = p->sampler, .tokenizer = p->tokenizer,
                        .limit = p->o.predict, .ignore_end = p->o.ignore_eos, .lookup = p->o.lookup,
                        .stop = &stop_now, .wants_logits = p->o.logprobs >= 0, .take = take, .user = p };
    answer_expect(&a);
    double start = now_seconds();
    if (!sequence_sync(p->sequence, p->tokens.data, (int64_t)p->n_prompt, &r->cached_tokens, &stop_now, e))
        return false;
    progress("prefill", 1);
    r->prefill_s = now_seconds() - start;
    if (p->o.display_prompt && !stop_now && !show_prompt_before_answer(p, e)) return false;
    struct error later;                /* what went wrong first is what is told */
    bool ok = decode(p, &a, e);
    ok = stream_end(p->stream, ok ? e : &later) && ok;
    r->decode_s = now_seconds() - start - r->prefill_s;
    if (on_terminal(p) && !p->o.json && !stream_at_line_start(p->stream))
        ok = output_write("\n", 1, ok ? e : &later) && ok;
    return ok;
}

static bool print_json(struct program *p, struct error *e)
{
    struct result *r = &p->result;
    struct bytes out = { 0 };
    r->text = stream_text(p->stream)->data;
    r->text_len = stream_text(p->stream)->len;
    if (!r->text) r->text = "";
    r->tokens = p->tokens.data + p->n_prompt;
    r->n_tokens = p->tokens.len - p->n_prompt;
    r->prompt_tokens = (int64_t)p->n_prompt;
    r->layout = p->o.layout;
    r->type_k = p->o.type_k;
    r->type_v = p->o.type_v;
    r->kv = engine_kv_usage(p->engine);
    r->evicted_tokens = sequence_evicted(p->sequence);
    r->seed = p->o.seed;
    r->n_top = p->o.logprobs;
    r->logprobs = p->logprobs.data;
    bool ok = sequence_hash_logits(p->sequence, r->logits_sha256, e) && result_json(&out, r, p->tokenizer, e)
           && output_write(out.data, out.len, e);
    bytes_free(&out);
    return ok;
}

static void print_summary(const struct program *p)
{
    const struct result *r = &p->result;
    struct kv_usage kv = engine_kv_usage(p->engine);
    size_t generated = p->tokens.len - p->n_prompt;
    char a[32], b[32], c[32];
    int64_t length = sequence_length(p->sequence), read = length < (int64_t)p->n_prompt ? length : (int64_t)p->n_prompt;
    double prefill = (double)(read - r->cached_tokens) / (r->prefill_s > 0 ? r->prefill_s : 1e-9);
    double speed = (double)p->steps / (r->decode_s > 0 ? r->decode_s : 1e-9);
    note(p, "prompt %lld tokens (%lld cached) at %.1f t/s, generated %zu tokens at %.1f t/s, KV cache %s of %s",
         (long long)read, (long long)r->cached_tokens, prefill, generated, speed,
         human_bytes((double)(kv.bytes_used - kv.bytes_slow), a), human_bytes((double)kv.bytes_reserved, b));
    if (p->o.verbose && kv.bytes_used)
        note(p, "%d pages, %.1f %% of their bytes without a token yet", kv.pages,
             100 * (double)kv.bytes_unfilled / (double)kv.bytes_used);
    if (kv.bytes_slow || kv.bytes_out)
        note(p, "%s of the cache lie in %s; moved there %s, back %s", human_bytes((double)kv.bytes_slow, c),
             engine_backend(p->engine)->device ? "the host's memory" : "the file of --kv-offload",
             human_bytes((double)kv.bytes_out, a),
             human_bytes((double)kv.bytes_in, b));
    if (p->o.verbose && (p->o.window || p->o.evict))
        note(p, "%lld tokens were evicted", (long long)sequence_evicted(p->sequence));
}

enum { FEWEST_SINKS = 4 };             /* which models lean on */

/* A chat that goes on; its own signals end it. */
static bool run_session(struct program *p, struct error *e)
{
    struct options *o = &p->o;
    int signal = 0;
    if (o->json || o->display_prompt)
        return fail(e, GEN_USAGE, "%s does nothing in a chat that goes on: give one message with -st",
                    o->json ? "--json" : "--display-prompt");
    if (!options_given(o, "predict")) o->predict = -1;
    size_t head = 0;
    bool slides = !o->window && !o->evict && o->layout == KV_PAGED && !o->no_kv_cache;
    if (slides && !conversation_head(p->conversation, &head, e)) return false;
    p->sinks = !slides ? 0 : head < FEWEST_SINKS ? FEWEST_SINKS : head < INT_MAX ? (int)head : INT_MAX;
    if (!open_model(p, o->ctx, e) || !choose_seed(p, e) || !open_engine(p, o->ctx, e)) return false;
    if (!open_store(p, e) || !sequence_open(&p->sequence, p->engine, e)) return false;
    struct chat_session session = {
        .options = o, .tokenizer = p->tokenizer, .engine = p->engine, .conversation = p->conversation,
        .sequence = p->sequence, .ctx = p->ctx, .sinks = p->sinks, .save = save_chat, .load = load_chat, .user = p,
        .first = o->text || o->prompt || o->file ? p->prompt.data : NULL, .n_first = p->prompt.len,
        .once = o->single_turn, .color = use_color(p), .terminal = on_terminal(p),
        .read_file = input_read, .progress = progress,
    };
    bool lowered = !o->ctx && p->ctx < p->model->n_ctx;
    session.longer = !lowered ? "--ctx-size" : o->kv_memory ? "--kv-memory" : "-ctk int8 -ctv int8";
    bool ok = chat_session_run(&session, &signal, e);
    caught = signal;
    return ok && save_store(p, e);
}

static bool run_generate(struct program *p, struct error *e)
{
    if (!make_prompt(p, e)) return false;
    if (p->session) return run_session(p, e);
    if (p->n_prompt == 0)
        return fail(e, GEN_USAGE, "the prompt is empty, and no start token stands in for it: give some text with -p");
    if (!open_model(p, p->o.ctx, e) || !prepare(p, e) || !open_engine(p, p->o.ctx, e) || !open_store(p, e))
        return false;
    warn_of_unread_input(p);
    catch_signals();
    if (!generate(p, e) || (p->o.json && !print_json(p, e))) return false;
    print_summary(p);
    return save_store(p, e);
}

/* ---- batches ---------------------------------------------------------------------------------------------------- */

/* Where the progress of a batch goes. */
struct reporter { bool json, line; double last; };

static void print_status(const struct batch_status *s, bool json, bool last, const char *before, const char *after)
{
    struct bytes text = { 0 };
    struct error e;
    if (batch_describe(&text, s, json, last, &e)) fprintf(stderr, "%s%s%s", before, text.data, after);
    bytes_free(&text);
}

static void report_batch(void *user, const struct batch_status *s)
{
    struct reporter *r = user;
    double now = now_seconds();
    if (!(r->json || r->line) || now - r->last < (r->json ? 1 : 0.2)) return;
    r->last = now;
    if (r->json) print_status(s, true, false, "", "");
    else print_status(s, false, false, "\r", "\033[K");
    bar.shown = r->line;
}

/* The seed of a batch: given, that of the run which is gone on with, or drawn, and then *drawn. */
static bool choose_batch_seed(struct program *p, const struct journal *j, int64_t *drawn, struct error *e)
{
    bool random = p->o.seed < 0;
    int64_t known = journal_seed(j);
    if (random && known >= 0) p->o.seed = known;
    if (!choose_seed(p, e)) return false;
    *drawn = random && known < 0 ? p->o.seed : -1;
    return true;
}

static bool answer_lines(struct program *p, struct batch_options *bo, struct error *e)
{
    const struct options *o = &p->o;
    struct batch_status s;
    struct reporter r = { .json = o->report == PROGRESS_JSON,
                          .line = o->report == PROGRESS_AUTO && !o->quiet && isatty(STDERR_FILENO) };
    bo->report = report_batch;
    bo->user = &r;
    bool ok = batch_run(bo, &s, e);
    int64_t other = journal_answers(bo->journal) - s.known;
    if (bar.shown) fputs("\r\033[K", stderr);
    bar.shown = false;
    if (r.json) print_status(&s, true, true, "", "");
    else if (!o->quiet) print_status(&s, false, true, "gen: ", "\n");
    if (ok && !stop_now && other)
        note(p, "%lld answers in %s belong to other lines, options or models", (long long)other, o->output);
    if (ok && stop_now && s.unanswered)
        note(p, "interrupted: %s%lld line%s no answer%s", s.unread ? "at least " : "", (long long)s.unanswered,
             s.unanswered == 1 ? " has" : "s have",
             o->output ? "; the same command with --resume goes on" : ", and only with -o FILE can --resume go on");
    else if (ok && stop_now && s.unread)
        note(p, "interrupted: lines that were not read have no answer");
    int64_t failed = s.failed + journal_errors(bo->journal);
    if (!ok || stop_now || !failed) return ok;
    return fail(e, GEN_RUN, "%lld %s no answer: see \"error\" in %s", (long long)failed,
                failed == 1 ? "line has" : "lines have", o->output ? o->output : "the output");
}

static bool open_batch(struct program *p, struct request_context *c, struct error *no_chat, struct error *e)
{
    const struct options *o = &p->o;
    struct bytes source = { 0 };
    size_t name = strlen(o->lines);
    if (!open_tokenizer(p, e)) return false;
    bool chats = options_chat(o), ok = open_template(p, &source, no_chat) || !chats || (*e = *no_chat, false);
    ok = ok && open_model(p, o->ctx, e) && open_engine(p, o->ctx, e)
      && request_base(c->base, o, source.data ? source.data : "", source.len, p->model->file, e)
      && open_store(p, e);
    bytes_free(&source);
    c->options = o;
    c->tokenizer = p->tokenizer;
    c->chat = p->chat;
    c->no_chat = no_chat;
    c->chats = chats;
    c->plain = name >= 4 && strcmp(o->lines + name - 4, ".txt") == 0;
    return ok;
}

/* One of the processes but the first: computes what that one sends it. */
static bool follow_batch(struct program *p, struct batch_options *bo, struct error *e)
{
    struct batch_status s;
    struct reporter r = { 0 };
    bo->report = report_batch;
    bo->user = &r;
    bo->unordered = true;
    bo->drawn_seed = -1;
    if (batch_run(bo, &s, e) || e->code == GEN_OK) return true;
    fprintf(stderr, "gen: rank %d: %s\n", comm_rank(p->comm), e->text);
    comm_abort(p->comm, e->code);
}

static bool run_batch(struct program *p, struct error *e)
{
    const struct options *o = &p->o;
    struct error no_chat;
    struct comm *comm = o->data_parallel ? p->comm : NULL;
    struct request_context context = { .keep = comm != NULL };
    struct batch_options bo = { .context = &context, .parallel = o->parallel, .unordered = o->unordered,
                                .timings = o->timings, .stop = &stop_now, .comm = comm };
    int rank = comm_rank(comm);
    if (rank) p->o.quiet = true;
    bool ok = (rank || feed_open(&bo.feed, o->lines, e)) && open_batch(p, &context, &no_chat, e);
    if (rank) signal(SIGINT, SIG_IGN), signal(SIGTERM, SIG_IGN);   /* rank 0 ends the run in order */
    else if (ok) catch_signals();
    ok = ok && (rank || (journal_open(&bo.journal, o->output, o->resume, o->lines, e)
                         && choose_batch_seed(p, bo.journal, &bo.drawn_seed, e)));
    if (comm) {
        ok = comm_agree(comm, ok, e);
        comm_share(comm, &p->o.seed, sizeof p->o.seed);
    }
    context.seed = o->seed;
    bo.engine = p->engine;
    bo.longer = ok ? longer_context(p, o->ctx, p->ctx) : NULL;
    ok = ok && (rank ? follow_batch(p, &bo, e) : answer_lines(p, &bo, e));
    if (!ok && rank) e->code = GEN_OK; /* rank 0 says it */
    feed_close(bo.feed);
    journal_close(bo.journal);
    return ok;
}

/* ---- the other tasks -------------------------------------------------------------------------------------------- */

static bool print(struct bytes *out, struct error *e)
{
    bool ok = output_write(out->data, out->len, e);
    bytes_free(out);
    return ok;
}

/* The prompt as the model gets it: the start token's text is put in front where a start token is. */
static bool run_show_prompt(struct program *p, struct error *e)
{
    if (!make_prompt(p, e)) return false;
    int32_t bos = tokenizer_bos(p->tokenizer);
    bool ok = true;
    if (p->n_prompt && bos >= 0 && p->tokens.data[0] == bos) {
        struct gguf_str text = tokenizer_text(p->tokenizer, bos);
        bool spelled = p->prompt.len >= text.len && memcmp(p->prompt.data, text.ptr, text.len) == 0;
        ok = (spelled && !p->o.no_parse_special) || output_write(text.ptr, text.len, e);
    }
    return ok && output_write(p->prompt.data, p->prompt.len, e) && (!on_terminal(p) || output_write("\n", 1, e));
}

static bool run_dump_tokens(struct program *p, struct error *e)
{
    struct bytes out = { 0 };
    bool ok = make_prompt(p, e);
    for (size_t i = 0; ok && i < p->tokens.len; i++) {
        int32_t id = p->tokens.data[i];
        struct gguf_str text = tokenizer_piece(p->tokenizer, id, true);
        ok = (bytes_printf(&out, "%d\t", id) && escaped_add(&out, text.ptr, text.len) && bytes_add(&out, "\n", 1))
          || fail(e, GEN_RUN, "cannot allocate memory for the tokens");
        if (ok && (out.len > 1 << 16 || i + 1 == p->tokens.len)) ok = output_write(out.data, out.len, e), out.len = 0;
    }
    bytes_free(&out);
    return ok;
}

/* The tokens of a text that is scored, which stays as it is spelled. */
static bool read_scored(struct program *p, const char *path, struct error *e)
{
    if (!input_read(path, &p->prompt, e) || !open_tokenizer(p, e)) return false;
    struct span text = { p->prompt.len ? p->prompt.data : "", p->prompt.len, false };
    if (!tokenizer_encode(p->tokenizer, &text, 1, true, &p->tokens, e)) return false;
    bytes_free(&p->prompt);
    return true;
}

/* The tokens of a window of a scored text. With --window it may be longer than the model's context: all of the text at
 * most, which then streams through. */
static bool choose_window(const struct program *p, int64_t preset, int64_t *window, struct error *e)
{
    int64_t most = p->model->n_ctx, text = (int64_t)p->tokens.len;
    *window = options_given(&p->o, "ctx-size") ? p->o.ctx ? p->o.ctx : most : preset;
    if (p->o.window && *window > text) *window = text;
    if (p->o.window && text > most) most = text;
    return (*window >= 4 && *window <= most)
        || fail(e, GEN_USAGE, "--ctx-size %lld is not possible as the size of a window: it takes 4 to %d tokens, the "
                              "model's context", (long long)*window, p->model->n_ctx);
}

static bool run_perplexity(struct program *p, struct error *e)
{
    const struct options *o = &p->o;
    struct perplexity_options po = { .chunks = o->chunks, .save = o->save_logits, .base = o->kl_base,
                                     .progress = progress, .stop = &stop_now };
    struct perplexity result;
    struct bytes out = { 0 };
    struct stat a, b;
    if (o->save_logits && stat(o->perplexity, &a) == 0 && stat(o->save_logits, &b) == 0 && S_ISREG(b.st_mode) &&
        a.st_dev == b.st_dev && a.st_ino == b.st_ino)
        return fail(e, GEN_USAGE, "--save-logits %s would overwrite the text that is scored: name another file",
                    o->save_logits);
    if (!read_scored(p, o->perplexity, e) || !open_model(p, o->ctx, e) || !choose_window(p, 512, &po.window, e))
        return false;
    if (!open_engine(p, po.window, e)) return false;
    catch_signals();
    bool ok = perplexity_measure(&result, p->engine, p->tokenizer, p->tokens.data, p->tokens.len, &po, e);
    progress("perplexity", 1);
    return ok && perplexity_print(&out, &result, po.window, o->json, e) && print(&out, e);
}

static bool run_bench(struct program *p, struct error *e)
{
    const struct options *o = &p->o;
    struct bench_options bo = { .prefill = o->bench_prefill, .decode = o->bench_decode, .depth = o->bench_depth,
                                .parallel = o->bench_parallel, .reps = o->reps, .json = o->json, .progress = progress,
                                .stop = &stop_now };
    struct bytes out = { 0 };
    if (!open_file(p, e) || !open_model(p, o->ctx, e) || !choose_types(p, o->ctx, e)) return false;
    struct engine_options eo = engine_options(p, o->ctx);
    catch_signals();
    bool ok = bench_run(&out, p->model, &eo, &bo, e);
    progress("measuring", 1);
    return ok && print(&out, e);
}

static bool run_kv_report(struct program *p, struct error *e)
{
    struct options *o = &p->o;
    struct kv_report_options ko = { .chunks = o->chunks ? o->chunks : 2, .model = model_options(p, o->ctx),
                                    .map = !o->no_mmap, .json = o->json, .progress = progress, .stop = &stop_now };
    struct bytes out = { 0 };
    int64_t ctx;
    o->kv_heads = KV_HEADS_AUTO;       /* of the model; the report has one more with what is asked for */
    if (!read_scored(p, o->file, e) || !open_model(p, o->ctx, e) || !choose_window(p, 1024, &ko.window, e) ||
        !choose_context(p, ko.window, &ctx, e))
        return false;
    struct engine_options eo = engine_options(p, ctx);
    catch_signals();
    bool ok = kv_report(&out, p->model, p->tokenizer, p->tokens.data, p->tokens.len, &eo, &ko, e);
    progress("measuring", 1);
    return ok && print(&out, e);
}

static bool run_inspect(struct program *p, struct error *e)
{
    struct bytes out = { 0 };
    if (p->o.inspect && kvstore_file_is(p->o.inspect))
        return inspect_cache(&out, p->o.inspect, p->o.json, e) && print(&out, e);
    return open_file(p, e) && inspect_file(&out, p->file, p->o.json, e) && print(&out, e);
}

static bool run_dry_run(struct program *p, struct error *e)
{
    struct bytes out = { 0 };
    if (!open_file(p, e) || !open_model(p, p->o.ctx, e) || !choose_types(p, p->o.ctx, e)) return false;
    struct engine_options eo = engine_options(p, p->o.ctx);
    uint64_t room = cache_room(p->model, p->o.kv_memory, memory_for(p));
    return inspect_run(&out, p->model, &eo, room, p->o.json, e) && print(&out, e);
}

static bool run_check_tensors(struct program *p, struct error *e)
{
    struct bytes out = { 0 };
    bool ok = open_file(p, e) && inspect_tensors(&out, p->file, progress, e);
    return ok && print(&out, e);
}

/* ---- several processes ------------------------------------------------------------------------------------------ */

/* Joins the ranks that hold the parts of the model. */
static bool join_ranks(struct program *p, struct error *e)
{
    int n = p->o.tensor_parallel;
    int rank, size = comm_started(&rank);
    if (p->o.data_parallel) return comm_open(&p->comm, e);
    if (n == 1 && (size <= 1 || p->o.mode >= MODE_HELP)) return true;
    if (n > 1) {
        if (!comm_open(&p->comm, e)) return false;
        rank = comm_rank(p->comm);
        size = comm_size(p->comm);
        if (size == n) return true;
        comm_close(p->comm);
        p->comm = NULL;
        fail(e, GEN_USAGE, "--tensor-parallel %d needs as many processes, but there are %d: start them with mpirun "
                           "-n %d", n, size, n);
    } else {
        fail(e, GEN_USAGE, "mpirun has started %d processes, each of which would do everything alone: divide the model "
                           "with --tensor-parallel %d, or the lines of --batch with --data-parallel", size, size);
    }
    if (rank > 0) e->code = GEN_OK;    /* rank 0 says it */
    return false;
}

/* A rank that computes its part of what rank 0 does, and then ends with it. */
static bool run_follower(struct program *p, struct error *e)
{
    struct engine_options eo;
    signal(SIGINT, SIG_IGN);           /* rank 0 ends the run in order */
    signal(SIGTERM, SIG_IGN);
    p->o.quiet = true;
    while (engine_wait(p->comm, &eo)) {
        bool opened = (p->model || (open_file(p, e) && open_model(p, p->o.ctx, e))) || comm_agree(p->comm, false, e);
        opened = opened && engine_open(&p->engine, p->model, &eo, e);
        if (!opened && !comm_lost(p->comm)) continue;  /* rank 0 says why */
        if (!opened || !engine_serve(p->engine, e)) {
            fprintf(stderr, "gen: rank %d: %s\n", comm_rank(p->comm), e->text);
            comm_abort(p->comm, e->code);
        }
        engine_close(p->engine);
        p->engine = NULL;
    }
    return true;
}

static bool run_help(struct program *p, struct error *e)
{
    struct bytes out = { 0 };
    return usage_help(&out, p->o.help_topic, e) && print(&out, e);
}

static bool run_version(struct program *p, struct error *e)
{
    static const char version[] = "gen " GEN_VERSION "\n";
    (void)p;
    return output_write(version, sizeof version - 1, e);
}

static bool run_completion(struct program *p, struct error *e)
{
    struct bytes out = { 0 };
    return usage_completion(&out, p->o.shell, e) && print(&out, e);
}

static bool (*const tasks[])(struct program *p, struct error *e) = {
    [MODE_GENERATE] = run_generate, [MODE_BATCH] = run_batch, [MODE_SHOW_PROMPT] = run_show_prompt,
    [MODE_DUMP_TOKENS] = run_dump_tokens, [MODE_PERPLEXITY] = run_perplexity, [MODE_BENCH] = run_bench,
    [MODE_KV_REPORT] = run_kv_report, [MODE_INSPECT] = run_inspect, [MODE_DRY_RUN] = run_dry_run,
    [MODE_CHECK_TENSORS] = run_check_tensors, [MODE_HELP] = run_help, [MODE_VERSION] = run_version,
    [MODE_COMPLETION] = run_completion,
};

static void close_program(struct program *p)
{
    stream_close(p->stream);
    sampler_close(p->sampler);
    sequence_close(p->sequence);
    if (p->store) p->store->close(p->store);
    engine_close(p->engine);
    conversation_close(p->conversation);
    chat_close(p->chat);
    tokenizer_close(p->tokenizer);
    model_close(p->model);
    if (p->file) gguf_close(p->file);
    free(p->logprobs.data);
    ids_free(&p->tokens);
    bytes_free(&p->prompt);
    options_free(&p->o);
    if (p->comm && comm_rank(p->comm) == 0 && !p->o.data_parallel) ranks_tell(p->comm, NULL, 0);
    comm_close(p->comm);
}

/* A standard file that is closed must not become the number of another file; using it stays an error. */
static void hold_standard_files(void)
{
    for (int file = STDIN_FILENO; file <= STDERR_FILENO; file++)
        if (fcntl(file, F_GETFD) < 0) open("/dev/null", file == STDIN_FILENO ? O_WRONLY : O_RDONLY);
}

/* A page of a mapped file cannot be read any more: the file has been cut short, or its disk fails. */
static void on_lost_page(int number)
{
    static const char text[] = "gen: the model file has become shorter or unreadable while it was in use: leave it "
                               "alone while gen runs, or read it first with --no-mmap\n";
    (void)number;
    if (write(STDERR_FILENO, text, sizeof text - 1) < 0) _exit(GEN_RUN);
    _exit(GEN_MODEL);
}

/* Less than this the kernels' tables do not fit on. */
static bool enough_stack(struct error *e)
{
    enum { NEEDED = 128 << 10 };
    struct rlimit r;
    if (getrlimit(RLIMIT_STACK, &r) != 0 || r.rlim_cur >= NEEDED) return true;
    return fail(e, GEN_RUN, "the stack is limited to %llu kB, but gen needs %d: ulimit -s %d",
                (unsigned long long)r.rlim_cur >> 10, NEEDED >> 10, NEEDED >> 10);
}

int main(int argc, char **argv)
{
    struct program p = { .begun = now_seconds() };
    struct error e = { 0 };
    hold_standard_files();
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN);          /* a write past the limit of file sizes fails with EFBIG */
    signal(SIGBUS, on_lost_page);
    output_until(&stop_now);
    bool ok = enough_stack(&e) && options_parse(&p.o, argc, argv, &e);
    bar.wanted = ok && !p.o.quiet && isatty(STDERR_FILENO);
    ok = ok && join_ranks(&p, &e) && (comm_rank(p.comm) && !p.o.data_parallel ? run_follower : tasks[p.o.mode])(&p, &e);
    if (bar.shown) fputs("\r\033[K", stderr);
    if (comm_lost(p.comm)) {
        fprintf(stderr, "gen: %s\n", e.text);
        comm_abort(p.comm, e.code);
    }
    close_program(&p);
    if (caught) {
        signal(caught, SIG_DFL);
        raise(caught);
    }
    int rank;
    comm_started(&rank);
    bool said = rank && e.code == GEN_USAGE && !p.comm;            /* by rank 0, which got the same words */
    if (!ok && e.code != GEN_OK && !said) fprintf(stderr, "gen: %s\n", e.text);
    return ok ? GEN_OK : e.code;
}
