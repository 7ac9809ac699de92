/* kvstore_file.c - one text's blocks in a file.
 *
 *     header   struct header, written last
 *     blocks   each block's data, one after another
 *     tail     tokens | table, a struct entry for each block | settings | messages
 *
 * Everything is covered by a checksum: the header by its own, the tail by the header's, each block by its entry's. */
#define _GNU_SOURCE
#include "kvstore.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char magic[8] = "gen-kv\r\n";
enum { VERSION = 1 };

struct header {
    char magic[8];
    uint32_t version, reserved;
    uint64_t n_tokens, n_blocks, settings_bytes, messages_bytes;
    uint64_t tail, tail_sum;           /* where the tail begins: with it the file ends */
    uint8_t root[KV_KEY], identity[32], fingerprint[32];
    uint64_t sum;                      /* over the header before it */
};

struct entry {
    uint8_t key[KV_KEY], parent[KV_KEY];
    uint64_t offset, bytes, parts, sum;
};

_Static_assert(sizeof(struct header) == 168 && sizeof(struct entry) == 96, "no gaps");

struct file {
    struct kvstore base;
    char *path, *temporary;            /* temporary: the name of the file that is being written; NULL = none is */
    int fd;                            /* of the file that holds the blocks; -1 = there are none */
    enum kvstore_use use;
    bool foreign;                      /* the file is of another kind */
    bool loaded;                       /* the file can be used */
    struct kvstore_text text;
    int32_t *tokens;
    struct entry *table;               /* [text.n_blocks], room for `cap` */
    int64_t cap;
    uint8_t identity[32], fingerprint[32];
    bool identified;                   /* the two are filled */
    void *data;                        /* the block read last, room for data_cap bytes */
    size_t data_cap;
    struct error why;                  /* why nothing can be written, if so */
};

static bool all(ssize_t (*call)(int, void *, size_t, off_t), int fd, void *data, size_t n, uint64_t at)
{
    for (size_t done = 0; done < n; ) {
        ssize_t got = call(fd, (char *)data + done, n - done, (off_t)(at + done));
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return errno = got ? errno : EIO, false;
        done += (size_t)got;
    }
    return true;
}
static ssize_t write_some(int fd, void *data, size_t n, off_t at) { return pwrite(fd, data, n, at); }
static bool read_all(int fd, void *data, size_t n, uint64_t at) { return all(pread, fd, data, n, at); }
static bool write_all(int fd, const void *data, size_t n, uint64_t at)
{
    return all(write_some, fd, (void *)data, n, at);
}

/* A checksum over bytes whose number need not be a multiple of 8. */
static uint64_t sum_of(const void *data, size_t n)
{
    uint64_t last[2] = { 0, n }, whole = n / 8 * 8;
    memcpy(last, (const char *)data + whole, n - whole);
    return kvstore_sum(kvstore_sum(1, data, whole), last, sizeof last);
}

static void forget(struct file *f)
{
    f->loaded = false;
    f->text.n_blocks = f->text.n_tokens = 0;
    f->text.settings.len = f->text.messages.len = 0;
}

/* ---- reading ----------------------------------------------------------------------------------------------------- */

static bool damaged(const struct file *f, const char *what, struct error *e)
{
    return fail(e, GEN_RUN, "%s is a damaged cache file (%s)", f->path, what);
}

/* Reads and checks the header; `size` bytes are there. */
static bool read_header(struct file *f, struct header *h, uint64_t size, struct error *e)
{
    uint64_t tokens, entries, tail;
    memset(h, 0, sizeof *h);
    if (!read_all(f->fd, h, size < sizeof *h ? size : sizeof *h, 0))
        return fail(e, GEN_RUN, "cannot read %s: %s", f->path, strerror(errno));
    size_t same = size < sizeof magic ? size : sizeof magic;
    f->foreign = memcmp(h->magic, magic, same) != 0;
    if (f->foreign) return fail(e, GEN_RUN, "%s is not a cache file of gen", f->path);
    if (size < sizeof *h) return damaged(f, "it ends in its header", e);
    if (h->version != VERSION)
        return fail(e, GEN_RUN, "%s is a cache file of version %u, not %d", f->path, h->version, VERSION);
    if (h->sum != kvstore_sum(1, h, offsetof(struct header, sum)))
        return damaged(f, "its header's checksum is wrong", e);
    bool fits = !__builtin_mul_overflow(h->n_tokens, sizeof *f->tokens, &tokens)
             && !__builtin_mul_overflow(h->n_blocks, sizeof *f->table, &entries)
             && !__builtin_add_overflow(tokens, entries, &tail)
             && !__builtin_add_overflow(tail, h->settings_bytes, &tail)
             && !__builtin_add_overflow(tail, h->messages_bytes, &tail) && h->tail <= size && tail == size - h->tail
             && h->n_blocks <= h->n_tokens / KV_BLOCK;
    return fits || damaged(f, "its size is not what it says", e);
}

static bool check_table(const struct file *f, uint64_t tail, struct error *e)
{
    uint64_t at = sizeof(struct header);
    for (int64_t i = 0; i < f->text.n_blocks; i++) {
        const struct entry *b = &f->table[i];
        if (b->offset != at || b->bytes > tail - at || b->bytes % 8) return damaged(f, "its table is wrong", e);
        at += b->bytes;
    }
    return at == tail || damaged(f, "its table is wrong", e);
}

static bool load(struct file *f, struct error *e)
{
    struct stat st;
    struct header h;
    f->fd = open(f->path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (f->fd < 0 && errno == ENOENT) return true;
    f->foreign = true;                 /* until its header was seen */
    if (f->fd < 0 || fstat(f->fd, &st) != 0)
        return fail(e, GEN_RUN, "cannot open the cache file %s: %s", f->path, strerror(errno));
    if (!S_ISREG(st.st_mode)) return fail(e, GEN_RUN, "%s is not a cache file of gen", f->path);
    if (st.st_size == 0) return f->foreign = false, true;
    if (!read_header(f, &h, (uint64_t)st.st_size, e)) return false;
    size_t tokens = h.n_tokens * sizeof *f->tokens, entries = h.n_blocks * sizeof *f->table, tail = st.st_size - h.tail;
    char *data = alloc_zeroed(tail, 1, "the cache file's tail", e);
    bool ok = data != NULL;
    ok = ok && (read_all(f->fd, data, tail, h.tail)
                || fail(e, GEN_RUN, "cannot read %s: %s", f->path, strerror(errno)));
    if (ok && sum_of(data, tail) != h.tail_sum) ok = damaged(f, "its last part's checksum is wrong", e);
    f->tokens = ok ? alloc_zeroed(h.n_tokens, sizeof *f->tokens, "the cache file's tokens", e) : NULL;
    f->table = ok ? alloc_zeroed(h.n_blocks, sizeof *f->table, "the cache file's table", e) : NULL;
    if (ok && f->tokens && f->table) {
        memcpy(f->tokens, data, tokens);
        memcpy(f->table, data + tokens, entries);
        f->text = (struct kvstore_text){ .tokens = f->tokens, .n_tokens = (int64_t)h.n_tokens,
                                         .n_blocks = f->cap = (int64_t)h.n_blocks, .bytes = (uint64_t)st.st_size };
        memcpy(f->text.root, h.root, KV_KEY);
        memcpy(f->text.fingerprint, h.fingerprint, 32);
        memcpy(f->identity, h.identity, 32);
        memcpy(f->fingerprint, h.fingerprint, 32);
        ok = (bytes_add(&f->text.settings, data + tokens + entries, h.settings_bytes)
              && bytes_add(&f->text.messages, data + tokens + entries + h.settings_bytes, h.messages_bytes))
          || fail(e, GEN_RUN, "cannot allocate memory for the cache file");
        ok = ok && check_table(f, h.tail, e);
        f->loaded = f->identified = ok;
    }
    free(data);
    return f->loaded || (forget(f), false);
}

/* The entry of the block, NULL when it is not there. */
static struct entry *entry_of(struct file *f, const struct kvstore_block *b)
{
    struct entry *found = b->index < f->text.n_blocks ? &f->table[b->index] : NULL;
    return found && memcmp(found->key, b->key, KV_KEY) == 0 ? found : NULL;
}

static unsigned file_find(struct kvstore *k, const struct kvstore_block *b)
{
    struct entry *found = entry_of((struct file *)k, b);
    return found ? (unsigned)found->parts : 0;
}

static const void *file_read(struct kvstore *k, const struct kvstore_block *b)
{
    struct file *f = (struct file *)k;
    struct kvstore_block row = *b;
    struct entry *found = entry_of(f, b);
    char text[400];
    if (!found || found->parts != b->parts || found->bytes != b->bytes) return NULL;
    if (f->data_cap < b->bytes) {
        free(f->data);
        f->data = malloc(b->bytes);
        f->data_cap = f->data ? b->bytes : 0;
        if (!f->data) return NULL;
    }
    row.data = f->data;
    memcpy(row.parent, found->parent, KV_KEY);
    if (read_all(f->fd, f->data, b->bytes, found->offset) && kvstore_block_sum(&row) == found->sum) return f->data;
    snprintf(text, sizeof text, "%s is a damaged cache file (block %lld): only what stands before it is used", f->path,
             (long long)b->index);
    k->tell(k->user, text);
    f->text.n_blocks = b->index;
    return NULL;
}

/* ---- writing ----------------------------------------------------------------------------------------------------- */

static bool stop_writing(struct file *f, const char *what)
{
    fail(&f->why, GEN_RUN, "cannot %s the cache file %s: %s", what, f->path, strerror(errno));
    if (f->temporary) unlink(f->temporary);
    free(f->temporary);
    f->temporary = NULL;
    return false;
}

/* Begins the new file, with the blocks that stay of the old one. */
static bool begin(struct file *f)
{
    static char piece[1 << 16];
    uint64_t at = sizeof(struct header), end = at;
    for (int64_t i = 0; i < f->text.n_blocks; i++) end += f->table[i].bytes;
    if (f->temporary) return true;
    if (f->why.code) return false;
    if (asprintf(&f->temporary, "%s.XXXXXX", f->path) < 0) return f->temporary = NULL, stop_writing(f, "write");
    int fd = mkostemp(f->temporary, O_CLOEXEC);
    if (fd < 0) {
        free(f->temporary);
        f->temporary = NULL;
        return stop_writing(f, "create");
    }
    bool ok = true;
    for (; ok && at < end; at += sizeof piece) {
        size_t n = end - at < sizeof piece ? end - at : sizeof piece;
        ok = read_all(f->fd, piece, n, at) && write_all(fd, piece, n, at);
    }
    if (!ok) {
        stop_writing(f, "write");
        close(fd);                     /* what is there of the old file can still be read */
        return false;
    }
    if (f->fd >= 0) close(f->fd);
    f->fd = fd;
    return true;
}

static void put_block(struct file *f, const struct kvstore_block *b)
{
    struct entry *found = entry_of(f, b);
    if (f->use == KVSTORE_READ || f->foreign || b->index > f->text.n_blocks) return;
    if (found && !(b->parts & ~(unsigned)found->parts)) return;
    f->text.n_blocks = b->index;       /* what followed is another text's */
    if (!begin(f)) return;
    if (b->index == f->cap) {
        int64_t cap = f->cap ? 2 * f->cap : 64;
        struct entry *grown = realloc(f->table, (size_t)cap * sizeof *grown);
        if (!grown) return;
        f->table = grown;
        f->cap = cap;
    }
    const struct entry *before = b->index ? &f->table[b->index - 1] : NULL;
    struct entry *new = &f->table[b->index];
    *new = (struct entry){ .offset = before ? before->offset + before->bytes : sizeof(struct header),
                           .bytes = b->bytes, .parts = b->parts, .sum = kvstore_block_sum(b) };
    memcpy(new->key, b->key, KV_KEY);
    memcpy(new->parent, b->parent, KV_KEY);
    if (!write_all(f->fd, b->data, b->bytes, new->offset)) {
        stop_writing(f, "write");
        return;
    }
    f->text.n_blocks = b->index + 1;
    /* The disk begins now, not at the end, which waits for it. */
    sync_file_range(f->fd, (off_t)new->offset, (off_t)new->bytes, SYNC_FILE_RANGE_WRITE);
}

static void file_put(struct kvstore *k, const struct kvstore_block *b, int n)
{
    for (int i = 0; i < n; i++) put_block((struct file *)k, &b[i]);
}

bool kvstore_file_save(struct kvstore *k, const struct kvstore_text *t, struct error *e)
{
    struct file *f = (struct file *)k;
    if (f->foreign && f->use == KVSTORE_REPLACE)
        return fail(e, GEN_RUN, "%s is not a cache file of gen and stays as it is: name another", f->path);
    if (f->use == KVSTORE_READ || f->foreign || (f->loaded && !f->temporary && !f->why.code)) return true;
    struct header h = { .version = VERSION, .n_tokens = (uint64_t)t->n_tokens, .n_blocks = (uint64_t)f->text.n_blocks,
                        .settings_bytes = t->settings.len, .messages_bytes = t->messages.len,
                        .tail = sizeof h };
    struct bytes tail = { 0 };
    memcpy(h.magic, magic, sizeof magic);
    memcpy(h.root, t->root, KV_KEY);
    memcpy(h.identity, f->identity, 32);
    memcpy(h.fingerprint, t->fingerprint, 32);
    for (int64_t i = 0; i < f->text.n_blocks; i++) h.tail += f->table[i].bytes;
    bool memory = bytes_add(&tail, t->tokens, (size_t)t->n_tokens * sizeof *t->tokens)
               && bytes_add(&tail, f->table, (size_t)f->text.n_blocks * sizeof *f->table)
               && bytes_add(&tail, t->settings.data, t->settings.len)
               && bytes_add(&tail, t->messages.data, t->messages.len);
    if (!memory) errno = ENOMEM, stop_writing(f, "write");
    h.tail_sum = memory ? sum_of(tail.data, tail.len) : 0;
    h.sum = kvstore_sum(1, &h, offsetof(struct header, sum));
    bool ok = memory && begin(f)
           && ((write_all(f->fd, tail.data, tail.len, h.tail) && write_all(f->fd, &h, sizeof h, 0)
                && ftruncate(f->fd, (off_t)(h.tail + tail.len)) == 0 && fsync(f->fd) == 0
                && rename(f->temporary, f->path) == 0) || stop_writing(f, "write"));
    bytes_free(&tail);
    if (!ok) return *e = f->why, false;
    free(f->temporary);
    f->temporary = NULL;
    return f->loaded = true;
}

/* ---- the rest ---------------------------------------------------------------------------------------------------- */

static void file_kept(struct kvstore *k) { (void)k; }  /* by kvstore_file_save */

static bool file_known(struct kvstore *k, const uint8_t identity[32], uint8_t fingerprint[32])
{
    const struct file *f = (const struct file *)k;
    if (!f->identified || memcmp(f->identity, identity, 32) != 0) return false;
    memcpy(fingerprint, f->fingerprint, 32);
    return true;
}

static void file_remember(struct kvstore *k, const uint8_t identity[32], const uint8_t fingerprint[32])
{
    struct file *f = (struct file *)k;
    memcpy(f->identity, identity, 32);
    memcpy(f->fingerprint, fingerprint, 32);
    f->identified = true;
}

static void file_close(struct kvstore *k)
{
    struct file *f = (struct file *)k;
    if (f->temporary) unlink(f->temporary);
    if (f->fd >= 0) close(f->fd);
    bytes_free(&f->text.settings);
    bytes_free(&f->text.messages);
    free(f->temporary);
    free(f->path);
    free(f->tokens);
    free(f->table);
    free(f->data);
    free(f);
}

static void tell_nobody(void *user, const char *text)
{
    (void)user;
    (void)text;
}

struct kvstore *kvstore_file_open(const char *path, enum kvstore_use use, struct error *e)
{
    struct file *f = alloc_zeroed(1, sizeof *f, "the cache file", e);
    if (!f) return NULL;
    f->base = (struct kvstore){ file_find, file_read, file_put, file_kept, file_kept, file_known, file_remember,
                                file_close, tell_nobody, NULL };
    f->fd = -1;
    f->use = use;
    f->path = strdup(path);
    if (!f->path) {
        fail(e, GEN_RUN, "cannot allocate memory for the cache file");
        return file_close(&f->base), NULL;
    }
    load(f, e);
    if (use == KVSTORE_REPLACE) forget(f);
    return &f->base;
}

bool kvstore_file_is(const char *path)
{
    char begin[sizeof magic];
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    bool is = fd >= 0 && read_all(fd, begin, sizeof begin, 0) && memcmp(begin, magic, sizeof magic) == 0;
    if (fd >= 0) close(fd);
    return is;
}

bool kvstore_file_verify(struct kvstore *k, struct error *e)
{
    struct file *f = (struct file *)k;
    for (int64_t i = 0; i < f->text.n_blocks; i++) {
        const struct entry *t = &f->table[i];
        struct kvstore_block b = { .index = i, .tokens = f->tokens + i * KV_BLOCK, .parts = (unsigned)t->parts,
                                   .bytes = t->bytes };
        char what[40];
        memcpy(b.key, t->key, KV_KEY);
        snprintf(what, sizeof what, "block %lld", (long long)i);
        if (!file_read(k, &b)) return damaged(f, what, e);
    }
    return true;
}

const struct kvstore_text *kvstore_file_text(const struct kvstore *k)
{
    const struct file *f = (const struct file *)k;
    return f->loaded ? &f->text : NULL;
}

bool kvstore_file_check(struct kvstore *k, const uint8_t fingerprint[32], const uint8_t root[KV_KEY], struct error *e)
{
    struct file *f = (struct file *)k;
    bool model = memcmp(f->text.fingerprint, fingerprint, 32) == 0;
    if (!f->loaded || (model && memcmp(f->text.root, root, KV_KEY) == 0)) return true;
    fail(e, GEN_RUN, "%s was made with %s", f->path, model ? "other settings than this run's" : "another model file");
    return forget(f), false;
}

bool kvstore_file_replaces(const struct kvstore *k)
{
    const struct file *f = (const struct file *)k;
    return f->use != KVSTORE_READ && !f->foreign;
}
