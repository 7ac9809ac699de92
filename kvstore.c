/* kvstore.c - the store that processes share: an SQLite database in a directory, a row for each block, and a folder of
 * files with the blocks' data, named by the rows' ids: what goes through the write-ahead log is written twice. Nothing
 * else that lies in the directory is written to or removed.
 *
 * Any number of processes read and write at once; one transaction takes what a prompt adds, or a part of it. A file is
 * written before its row is committed, and removed after the row's end was: so a process may be killed at any moment.
 * After the whole machine stopped the store may be damaged, since nothing is waited for: a damaged one is noticed, by
 * SQLite or by a row's checksum, is not used and is removed. */
#define _GNU_SOURCE
#include "kvstore.h"

#include "threads.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sqlite3.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

uint64_t kvstore_sum(uint64_t sum, const void *data, size_t n)
{
    uint32_t a = (uint32_t)sum, b = (uint32_t)(sum >> 32), w[2];
    const unsigned char *at = data;
    for (size_t i = 0; i < n; i += sizeof w) {
        memcpy(w, at + i, sizeof w);
        a += w[0] + b;
        b += w[1] + a;
    }
    return (uint64_t)b << 32 | a;
}

uint64_t kvstore_block_sum(const struct kvstore_block *b)
{
    uint64_t parts = b->parts, sum = kvstore_sum(1, b->key, KV_KEY);
    sum = kvstore_sum(sum, b->parent, KV_KEY);
    sum = kvstore_sum(sum, b->tokens, KV_BLOCK * sizeof *b->tokens);
    sum = kvstore_sum(sum, &parts, sizeof parts);
    return kvstore_sum(sum, b->data, b->bytes);
}

static const char name[] = "prefixes.db", folder[] = "prefixes.blocks";
enum {
    APPLICATION = 0x67656e6b,          /* "genk", in the database's header */
    VERSION = 3,
    PAGE = 4096,                       /* bytes of a database page, and of what a file takes on the disk */
    WAIT_MS = 1000,                    /* for another process's transaction */
    MOST = 16,                         /* blocks that are written together */
    SECOND = 1000000                   /* microseconds */
};
#define TRANSACTION ((uint64_t)16 << 20)           /* most bytes of one transaction */
#define LOG ((uint64_t)4 << 20)                    /* the write-ahead log is worked off when it has so many bytes */

/* A block's use is the time of the prompt that used it less its index, and a prompt uses all blocks of its text, so the
 * least recently used one is the last of a prefix: nothing depends on it. An id is never given twice: who finds a row
 * and then another block's data in its file could not tell. The first one is a time, so that a store that is begun anew
 * does not meet what it could not remove of the old one. `gone` has the ids of dropped rows whose file may be there
 * still. */
static const char schema[] =
    "CREATE TABLE block(id INTEGER PRIMARY KEY AUTOINCREMENT, key BLOB NOT NULL UNIQUE, parent BLOB NOT NULL,"
    " used INTEGER NOT NULL, parts INTEGER NOT NULL, tokens BLOB NOT NULL, bytes INTEGER NOT NULL,"
    " sum INTEGER NOT NULL);"
    "CREATE INDEX block_used ON block(used);"
    "CREATE TABLE gone(id INTEGER PRIMARY KEY);"
    "CREATE TABLE disk(bytes INTEGER NOT NULL);"
    "INSERT INTO disk VALUES (0);"
    "CREATE TRIGGER block_added AFTER INSERT ON block BEGIN"
    " UPDATE disk SET bytes = bytes + (new.bytes + 4095) / 4096 * 4096; END;"
    "CREATE TRIGGER block_dropped AFTER DELETE ON block BEGIN"
    " UPDATE disk SET bytes = bytes - (old.bytes + 4095) / 4096 * 4096; INSERT INTO gone VALUES (old.id); END;"
    "CREATE TABLE model(identity BLOB PRIMARY KEY, fingerprint BLOB NOT NULL, sum INTEGER NOT NULL) WITHOUT ROWID;";

enum statement {
    BEGIN, COMMIT, ROLLBACK, FIND, READ, TOUCH, LAST, ADD, OLDEST, NEWEST, DROP, GONE, FORGET, SIZE, KNOWN, REMEMBER,
    STATEMENTS
};
static const char *const sql[STATEMENTS] = {
    [BEGIN] = "BEGIN IMMEDIATE",
    [COMMIT] = "COMMIT",
    [ROLLBACK] = "ROLLBACK",
    [FIND] = "SELECT id, parts FROM block WHERE key = ?1",
    [READ] = "SELECT id, parent, tokens, parts, bytes, sum FROM block WHERE key = ?1",
    [TOUCH] = "UPDATE block SET used = ?2 WHERE key = ?1 AND used < ?2",
    [LAST] = "SELECT seq FROM sqlite_sequence WHERE name = 'block'",
    [ADD] = ("INSERT INTO block(id, key, used, parent, parts, tokens, bytes, sum)"
             " VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)"),
    [OLDEST] = "SELECT id, used FROM block ORDER BY used LIMIT 1",
    [NEWEST] = "SELECT max(used) FROM block",
    [DROP] = "DELETE FROM block WHERE id = ?1",
    [GONE] = "SELECT id FROM gone",
    [FORGET] = "DELETE FROM gone",
    [SIZE] = "SELECT bytes + (page_count - freelist_count) * 4096 FROM disk, pragma_page_count, pragma_freelist_count",
    [KNOWN] = "SELECT fingerprint, sum FROM model WHERE identity = ?1",
    [REMEMBER] = "INSERT OR REPLACE INTO model VALUES (?1, ?2, ?3)",
};

struct touch { uint8_t key[KV_KEY]; int64_t index; };

struct database {
    struct kvstore base;
    char *path;
    int dir;                           /* locked (flock) as long as the database is open: shared by those who use it */
    int blocks;                        /* the folder of the blocks' files */
    sqlite3 *db;
    sqlite3_stmt *statements[STATEMENTS];
    uint64_t limit;                    /* bytes of files and of database pages in use */
    uint64_t most;                     /* bytes of a transaction */
    uint64_t pending;                  /* bytes of the transaction that is open */
    int64_t first, end;                /* the ids that it has given to files: first to end - 1 */
    bool writing;                      /* a transaction is open */
    bool dropped;                      /* it drops rows */
    bool off;                          /* nothing is done any more */
    bool silent;                       /* nothing is written any more */
    bool ours, damaged;                /* the header says it is gen's; it is to be removed */
    int64_t now;                       /* microseconds: the time of this prompt, 0 = not taken yet */
    int64_t deepest;                   /* largest index of a block of this prompt */
    struct bytes touched;              /* struct touch of each block that was found */
    struct team *team;                 /* that writes blocks, `threads` of them; NULL = there was only one at a time */
    int threads;
    void *data;                        /* the block read last, room for data_cap bytes */
    size_t data_cap;
};

/* ---- what goes wrong --------------------------------------------------------------------------------------------- */

__attribute__((format(printf, 2, 3))) static bool give_up(struct database *d, const char *format, ...)
{
    char text[400];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (!d->off) d->base.tell(d->base.user, text);
    d->off = true;
    return false;
}

static bool damage(struct database *d, const char *what)
{
    d->damaged = true;
    return give_up(d, "the prefix cache %s is damaged (%s): it is not used, and is begun anew by a later run", d->path,
                   what);
}

/* An SQLite call failed with `rc`. A lock that is held too long only ends the writing. */
static bool failed(struct database *d, int rc)
{
    switch (rc & 0xff) {
    case SQLITE_BUSY:
    case SQLITE_LOCKED:
        d->silent = true;
        return false;
    case SQLITE_CORRUPT:
    case SQLITE_NOTADB:
    case SQLITE_CONSTRAINT:
    case SQLITE_MISMATCH:
    case SQLITE_TOOBIG:
    case SQLITE_ERROR:                 /* a statement that no more fits the tables */
        if (d->ours) return damage(d, sqlite3_errmsg(d->db));
        return give_up(d, "%s is not a prefix cache of gen, or is damaged (%s): it is not used; remove it or name "
                       "another directory", d->path, sqlite3_errmsg(d->db));
    default:
        if (rc == SQLITE_IOERR_SHORT_READ && d->ours) return damage(d, sqlite3_errmsg(d->db));
        return give_up(d, "the prefix cache %s cannot be used (%s): this run goes on without it", d->path,
                       sqlite3_errmsg(d->db));
    }
}

/* ---- statements -------------------------------------------------------------------------------------------------- */

static void bind_blob(struct database *d, enum statement s, int i, const void *data, size_t n)
{
    sqlite3_bind_blob64(d->statements[s], i, data, n, SQLITE_STATIC);
}

static void bind_number(struct database *d, enum statement s, int i, int64_t n)
{
    sqlite3_bind_int64(d->statements[s], i, n);
}

/* One step: SQLITE_ROW, SQLITE_DONE, or 0 after a failure. The row lasts until reset(). */
static int step(struct database *d, enum statement s)
{
    int rc = sqlite3_step(d->statements[s]);
    return rc == SQLITE_ROW || rc == SQLITE_DONE ? rc : (failed(d, rc), 0);
}

static void reset(struct database *d, enum statement s) { sqlite3_reset(d->statements[s]); }

static bool run(struct database *d, enum statement s)
{
    int rc = step(d, s);
    reset(d, s);
    return rc != 0;
}

static const void *blob(struct database *d, enum statement s, int column, size_t bytes)
{
    const void *data = sqlite3_column_blob(d->statements[s], column);
    return data && (size_t)sqlite3_column_bytes(d->statements[s], column) == bytes ? data : NULL;
}

static int64_t number(struct database *d, enum statement s, int column)
{
    return sqlite3_column_int64(d->statements[s], column);
}

static bool execute(struct database *d, const char *text)
{
    int rc = sqlite3_exec(d->db, text, NULL, NULL, NULL);
    return rc == SQLITE_OK || failed(d, rc);
}

static bool pragma(struct database *d, const char *text, int64_t *out)
{
    sqlite3_stmt *s;
    int rc = sqlite3_prepare_v2(d->db, text, -1, &s, NULL);
    if (rc == SQLITE_OK && (rc = sqlite3_step(s)) == SQLITE_ROW) {
        *out = sqlite3_column_int64(s, 0);
        rc = SQLITE_OK;
    }
    sqlite3_finalize(s);
    return rc == SQLITE_OK || failed(d, rc);
}

/* ---- transactions ------------------------------------------------------------------------------------------------ */

/* The file of a block's data. */
struct file_name { char text[32]; };
static struct file_name file_of(int64_t id)
{
    struct file_name f;
    snprintf(f.text, sizeof f.text, "block-%lld", (long long)id);
    return f;
}

/* Removes the files of all blocks; something else by such a name goes only where it is an empty folder. */
static void clear_blocks(struct database *d)
{
    int fd = openat(d->blocks, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *all = fd >= 0 ? fdopendir(fd) : NULL;
    if (!all && fd >= 0) close(fd);
    for (struct dirent *file; all && (file = readdir(all));) {
        if (strncmp(file->d_name, "block-", 6) != 0) continue;
        if (strcmp(file->d_name, file_of(strtoll(file->d_name + 6, NULL, 10)).text) != 0) continue;
        if (unlinkat(d->blocks, file->d_name, 0) != 0) unlinkat(d->blocks, file->d_name, AT_REMOVEDIR);
    }
    if (all) closedir(all);
}

/* The largest id that was ever given. */
static bool last_id(struct database *d, int64_t *last)
{
    int rc = step(d, LAST);
    *last = rc == SQLITE_ROW ? number(d, LAST, 0) : 0;
    reset(d, LAST);
    if (*last < 0 || *last > INT64_MAX / 2) return damage(d, "a block's number is none");
    return rc != 0;
}

/* In a transaction: removes the files of rows that were dropped by earlier ones. */
static void remove_gone(struct database *d)
{
    bool any = false;
    while (step(d, GONE) == SQLITE_ROW) {
        unlinkat(d->blocks, file_of(number(d, GONE, 0)).text, 0);
        any = true;
    }
    reset(d, GONE);
    if (any) run(d, FORGET);
}

static bool begin(struct database *d)
{
    if (d->off || d->silent) return false;
    if (d->writing) return true;
    d->writing = run(d, BEGIN);
    if (d->writing) remove_gone(d);
    return d->writing;
}

static void leave(struct database *d)
{
    if (!sqlite3_get_autocommit(d->db)) sqlite3_step(d->statements[ROLLBACK]), reset(d, ROLLBACK);
}

/* The files that were written go, too, or they would keep a full disk full; but for those whose ids another process was
 * given meanwhile. */
static void roll_back(struct database *d)
{
    if (d->writing) leave(d);
    int64_t last;
    if (d->first < d->end && run(d, BEGIN)) {
        for (int64_t id = last_id(d, &last) ? d->first : d->end; id < d->end; id++)
            if (id > last) unlinkat(d->blocks, file_of(id).text, 0);
        leave(d);
    }
    d->writing = d->dropped = false;
    d->pending = 0;
    d->first = d->end = 0;
}

static void commit(struct database *d)
{
    if (d->writing && (d->off || !run(d, COMMIT))) roll_back(d);
    bool dropped = d->dropped;
    d->writing = d->dropped = false;
    d->pending = 0;
    d->first = d->end = 0;
    if (dropped && begin(d)) commit(d);
}

/* Microseconds since 1970. */
static int64_t clock_time(void)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (int64_t)t.tv_sec * SECOND + t.tv_nsec / 1000;
}

/* The use of a block of this prompt, whose time is later than all that are there, even where the clock was set back. */
static int64_t use_of(struct database *d, int64_t index)
{
    if (!d->now) {
        d->now = clock_time();
        int64_t newest = step(d, NEWEST) == SQLITE_ROW ? number(d, NEWEST, 0) : 0;
        reset(d, NEWEST);
        if (newest > INT64_MAX / 2) damage(d, "a block's time is none");
        else if (newest >= d->now) d->now = newest + SECOND;
    }
    if (index > d->deepest) d->deepest = index;
    return d->now - index;
}

static bool drop(struct database *d, int64_t id)
{
    bind_number(d, DROP, 1, id);
    d->dropped = true;
    return run(d, DROP);
}

/* Drops least recently used blocks until `bytes` more fit; false when only this prompt's own are left, or none. */
static bool make_room(struct database *d, size_t bytes, bool *none)
{
    while (!d->off) {
        if (!step(d, SIZE)) return reset(d, SIZE), false;
        uint64_t used = (uint64_t)number(d, SIZE, 0);
        reset(d, SIZE);
        if (used + bytes <= d->limit) return true;
        int rc = step(d, OLDEST);
        int64_t id = rc == SQLITE_ROW ? number(d, OLDEST, 0) : 0, last = rc == SQLITE_ROW ? number(d, OLDEST, 1) : 0;
        reset(d, OLDEST);
        *none = rc == SQLITE_DONE;
        if (rc != SQLITE_ROW || (d->now && last >= d->now - d->deepest)) return false;
        if (!drop(d, id)) return false;
    }
    return false;
}

static bool too_small(struct database *d)
{
    return give_up(d, "the prefix cache %s may not take enough bytes for one block: this run goes on without it; give "
                   "--prefix-cache-size more", d->path);
}

static bool touch(struct database *d, const uint8_t key[KV_KEY], int64_t index)
{
    bind_blob(d, TOUCH, 1, key, KV_KEY);
    bind_number(d, TOUCH, 2, use_of(d, index));
    return run(d, TOUCH);
}

/* Marks the blocks that were found as used, in a transaction. */
static void touch_found(struct database *d)
{
    const struct touch *t = (const struct touch *)d->touched.data;
    size_t n = d->touched.len / sizeof *t;
    for (size_t i = 0; i < n && touch(d, t[i].key, t[i].index); i++) continue;
    d->touched.len = 0;
}

/* ---- the store --------------------------------------------------------------------------------------------------- */

/* The id of a block and its parts; 0 = it is not there. */
static int64_t find_id(struct database *d, const uint8_t key[KV_KEY], unsigned *parts)
{
    *parts = 0;
    if (d->off) return 0;
    bind_blob(d, FIND, 1, key, KV_KEY);
    int rc = step(d, FIND);
    int64_t id = rc == SQLITE_ROW ? number(d, FIND, 0) : 0;
    if (id) *parts = (unsigned)number(d, FIND, 1);
    reset(d, FIND);
    return id;
}

static unsigned db_find(struct kvstore *k, const struct kvstore_block *b)
{
    struct database *d = (struct database *)k;
    struct touch used = { .index = b->index };
    unsigned parts;
    if (!find_id(d, b->key, &parts)) return 0;
    memcpy(used.key, b->key, KV_KEY);
    if (!bytes_add(&d->touched, &used, sizeof used)) d->touched.len = 0;
    return parts;
}

/* Reads the data that the row says to lie in the file of this id. 0, or an errno; ENODATA = the file is too short. */
static int read_file(struct database *d, int64_t id, size_t n)
{
    if (d->data_cap < n) {
        free(d->data);
        d->data = malloc(n);
        d->data_cap = d->data ? n : 0;
        if (!d->data) return ENOMEM;
    }
    int file = openat(d->blocks, file_of(id).text, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC), why = 0;
    if (file < 0) return errno;
    for (size_t done = 0; done < n && !why;) {
        ssize_t got = pread(file, (char *)d->data + done, n - done, (off_t)done);
        if (got > 0) done += (size_t)got;
        else if (got == 0 || errno != EINTR) why = got ? errno : ENODATA;
    }
    close(file);
    return why;
}

/* Can a block's file that gave this errno never be read? It is not there or too short, or something else is there: a
 * link, a socket, a folder, a pipe. */
static bool is_damage(int why)
{
    return why == ENOENT || why == ENODATA || why == ELOOP || why == ENXIO || why == EISDIR || why == ESPIPE;
}

static const void *db_read(struct kvstore *k, const struct kvstore_block *b)
{
    struct database *d = (struct database *)k;
    struct kvstore_block row = *b;
    if (d->off) return NULL;
    bind_blob(d, READ, 1, b->key, KV_KEY);
    if (step(d, READ) != SQLITE_ROW) return reset(d, READ), NULL;
    int64_t id = number(d, READ, 0);
    const uint8_t *parent = blob(d, READ, 1, KV_KEY);
    const void *tokens = blob(d, READ, 2, KV_BLOCK * sizeof *b->tokens);
    uint64_t sum = (uint64_t)number(d, READ, 5);
    row.parts = (unsigned)number(d, READ, 3);
    bool whole = parent && tokens && memcmp(tokens, b->tokens, KV_BLOCK * sizeof *b->tokens) == 0;
    if (whole) memcpy(row.parent, parent, KV_KEY);
    whole = whole && (row.parts != b->parts || (uint64_t)number(d, READ, 4) == b->bytes);
    reset(d, READ);
    if (whole && row.parts != b->parts) return NULL;   /* another process has put more of it since it was found */
    int why = whole ? read_file(d, id, b->bytes) : 0;
    row.data = d->data;
    if (whole && !why && kvstore_block_sum(&row) == sum) return d->data;
    if (why && !is_damage(why))
        give_up(d, "the prefix cache %s cannot be read (%s): this run goes on without it", d->path, strerror(why));
    else if (find_id(d, b->key, &row.parts) == id)
        damage(d, why ? "a block's file is missing, cut or not a file" : "a block's checksum is wrong");
    return NULL;                       /* or it was dropped meanwhile */
}

/* Blocks that are being put: their sums and files are made by several threads. */
struct putting {
    const struct database *d;
    const struct kvstore_block *b[MOST];
    int64_t id[MOST];
    uint64_t sum[MOST];
    int error[MOST];                   /* errno; 0 = its file is written */
    int n;
};

static void write_block(void *user, int i, int thread)
{
    struct putting *p = user;
    const struct kvstore_block *b = p->b[i];
    (void)thread;
    p->sum[i] = kvstore_block_sum(b);
    struct file_name f = file_of(p->id[i]);
    int how = O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, file = openat(p->d->blocks, f.text, how, 0600);
    if (file < 0 && errno == EEXIST) { /* left by a writer that was killed */
        unlinkat(p->d->blocks, f.text, 0);
        file = openat(p->d->blocks, f.text, how, 0600);
    }
    if (file < 0) {
        p->error[i] = errno;
        return;
    }
    for (size_t done = 0; done < b->bytes && !p->error[i];) {
        ssize_t n = pwrite(file, (const char *)b->data + done, b->bytes - done, (off_t)done);
        if (n > 0) done += (size_t)n;
        else if (n == 0 || errno != EINTR) p->error[i] = n ? errno : ENOSPC;
    }
    close(file);
}

static bool add_row(struct database *d, const struct kvstore_block *b, int64_t id, uint64_t sum)
{
    bind_number(d, ADD, 1, id);
    bind_blob(d, ADD, 2, b->key, KV_KEY);
    bind_number(d, ADD, 3, use_of(d, b->index));
    bind_blob(d, ADD, 4, b->parent, KV_KEY);
    bind_number(d, ADD, 5, b->parts);
    bind_blob(d, ADD, 6, b->tokens, KV_BLOCK * sizeof *b->tokens);
    bind_number(d, ADD, 7, (int64_t)b->bytes);
    bind_number(d, ADD, 8, (int64_t)sum);
    return run(d, ADD);
}

/* Writes the files and adds the rows; false after a failure, and the transaction is to be rolled back. */
static bool add_blocks(struct database *d, struct putting *p)
{
    struct error ignored;
    int64_t last;
    if (!last_id(d, &last)) return false;
    for (int i = 0; i < p->n; i++) p->id[i] = last + 1 + i;
    if (!d->end) d->first = last + 1;
    d->end = last + 1 + p->n;
    if (p->n > 1 && !d->team && d->threads > 1 && !team_open(&d->team, d->threads, &ignored)) d->threads = 1;
    if (p->n > 1 && d->team) team_each(d->team, p->n, write_block, p);
    else for (int i = 0; i < p->n; i++) write_block(p, i, 0);
    int why = 0;
    for (int i = 0; i < p->n; i++)
        if (p->error[i]) why = p->error[i];
    if (why == EEXIST) return damage(d, "a folder lies in a block's place");
    if (why) return give_up(d, "the prefix cache %s cannot be written (%s): this run goes on without it", d->path,
                            strerror(why));
    for (int i = 0; i < p->n; i++)
        if (!add_row(d, p->b[i], p->id[i], p->sum[i])) return false;
    return true;
}

static void put_some(struct database *d, const struct kvstore_block *b, int n)
{
    struct putting p = { .d = d };
    size_t bytes = 0;
    bool none = false;                 /* no block is left to be dropped */
    for (int i = 0; i < n; i++) {
        unsigned there;
        int64_t id = find_id(d, b[i].key, &there);
        if (id && !(b[i].parts & ~there)) {
            touch(d, b[i].key, b[i].index);
            continue;
        }
        use_of(d, b[i].index);         /* no room is made of this prompt's own */
        bytes += b[i].bytes + 2 * PAGE;
        if (!make_room(d, bytes, &none)) break;
        if (id && !drop(d, id)) return roll_back(d);   /* it has fewer parts */
        p.b[p.n++] = &b[i];
    }
    if (none && !p.n) {
        commit(d);
        too_small(d);
    }
    if (d->off || !add_blocks(d, &p)) return roll_back(d);
    d->pending += bytes;
    if (d->pending >= d->most) commit(d);
}

static void db_put(struct kvstore *k, const struct kvstore_block *b, int n)
{
    struct database *d = (struct database *)k;
    for (int i = 0; i < n && begin(d); i += MOST) {
        touch_found(d);                /* or they might have to make room */
        put_some(d, b + i, n - i < MOST ? n - i : MOST);
    }
}

static void db_pause(struct kvstore *k)
{
    struct database *d = (struct database *)k;
    commit(d);
}

static void db_done(struct kvstore *k)
{
    struct database *d = (struct database *)k;
    if (d->touched.len && begin(d)) touch_found(d);
    d->touched.len = 0;
    db_pause(k);
    d->now = d->deepest = 0;
    d->silent = false;                 /* the lock that was waited for may be free by the next prompt */
}

static bool db_known(struct kvstore *k, const uint8_t identity[32], uint8_t fingerprint[32])
{
    struct database *d = (struct database *)k;
    if (d->off) return false;
    bind_blob(d, KNOWN, 1, identity, 32);
    const uint8_t *found = step(d, KNOWN) == SQLITE_ROW ? blob(d, KNOWN, 0, 32) : NULL;
    bool ok = found && kvstore_sum(kvstore_sum(1, identity, 32), found, 32) == (uint64_t)number(d, KNOWN, 1);
    if (ok) memcpy(fingerprint, found, 32);
    reset(d, KNOWN);
    return ok;
}

static void db_remember(struct kvstore *k, const uint8_t identity[32], const uint8_t fingerprint[32])
{
    struct database *d = (struct database *)k;
    if (!begin(d)) return;
    bind_blob(d, REMEMBER, 1, identity, 32);
    bind_blob(d, REMEMBER, 2, fingerprint, 32);
    bind_number(d, REMEMBER, 3, (int64_t)kvstore_sum(kvstore_sum(1, identity, 32), fingerprint, 32));
    run(d, REMEMBER);
    commit(d);
}

/* A damaged store is removed when nobody else has it open. */
static void remove_store(struct database *d)
{
    static const char *const files[] = { name, "prefixes.db-wal", "prefixes.db-shm", "prefixes.db-journal" };
    if (flock(d->dir, LOCK_EX | LOCK_NB) != 0) return;
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) unlinkat(d->dir, files[i], 0);
    if (d->blocks >= 0) clear_blocks(d);
}

static void db_close(struct kvstore *k)
{
    struct database *d = (struct database *)k;
    if (d->ours && !d->off) db_done(k);
    roll_back(d);
    for (int i = 0; i < STATEMENTS; i++) sqlite3_finalize(d->statements[i]);
    sqlite3_close(d->db);
    if (d->damaged) remove_store(d);
    if (d->blocks >= 0) close(d->blocks);
    if (d->dir >= 0) close(d->dir);
    bytes_free(&d->touched);
    if (d->team) team_close(d->team);
    free(d->data);
    free(d->path);
    free(d);
}

/* ---- opening ----------------------------------------------------------------------------------------------------- */

/* Makes the directory and an empty file that only the user can read; the log files get the same mode from SQLite. */
static bool make_files(struct database *d, const char *dir)
{
    struct stat st;
    int unmade = mkdir(dir, 0700) != 0 && errno != EEXIST ? errno : 0;
    d->dir = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (d->dir < 0)
        return give_up(d, "the prefix cache %s cannot be used: %s", dir, strerror(unmade ? unmade : errno));
    if (flock(d->dir, LOCK_SH | LOCK_NB) != 0)
        return give_up(d, "the prefix cache %s is being repaired: this run goes on without it", dir);
    int file = openat(d->dir, name, O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600);
    if (file < 0 || fstat(file, &st) != 0) {
        int why = errno;
        if (file >= 0) close(file);
        return give_up(d, "the prefix cache %s cannot be used: %s", d->path, strerror(why));
    }
    close(file);
    if (!S_ISREG(st.st_mode) || st.st_uid != geteuid())
        return give_up(d, "the prefix cache %s is not a file of your own: it is not used", d->path);
    return true;
}

/* Makes the folder of the blocks' files, where it is not there, and opens it. */
static bool open_folder(struct database *d)
{
    struct stat st;
    int unmade = mkdirat(d->dir, folder, 0700) != 0 && errno != EEXIST ? errno : 0;
    d->blocks = openat(d->dir, folder, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (d->blocks < 0 || fstat(d->blocks, &st) != 0)
        return give_up(d, "the folder %s of the prefix cache %s cannot be used: %s", folder, d->path,
                       strerror(unmade ? unmade : errno));
    if (st.st_uid != geteuid())
        return give_up(d, "the folder %s of the prefix cache %s is not your own: it is not used", folder, d->path);
    return true;
}

/* Makes the tables in a database without any, and removes the files of a database that is no more. */
static bool create(struct database *d)
{
    char text[200];
    int64_t application;
    snprintf(text, sizeof text, "PRAGMA page_size=%d; PRAGMA journal_mode=WAL", PAGE);
    if (!execute(d, text) || !execute(d, "BEGIN IMMEDIATE") || !pragma(d, "PRAGMA application_id", &application))
        return false;
    if (application) return execute(d, "ROLLBACK");    /* another process was faster */
    clear_blocks(d);
    snprintf(text, sizeof text, "INSERT INTO sqlite_sequence VALUES ('block', %lld); PRAGMA application_id=%d;"
             "PRAGMA user_version=%d; COMMIT", (long long)clock_time(), APPLICATION, VERSION);
    return execute(d, schema) && execute(d, text);
}

static bool prepare(struct database *d)
{
    int64_t application, version, tables = 0, page = 0;
    sqlite3_extended_result_codes(d->db, 1);
    sqlite3_busy_timeout(d->db, WAIT_MS);
    sqlite3_db_config(d->db, SQLITE_DBCONFIG_DEFENSIVE, 1, NULL);
    sqlite3_wal_autocheckpoint(d->db, (int)((d->limit / 16 < LOG ? d->limit / 16 : LOG) / PAGE) + 1);
    if (!execute(d, "PRAGMA mmap_size=0; PRAGMA trusted_schema=OFF; PRAGMA cell_size_check=ON; PRAGMA synchronous=OFF;"
                 "PRAGMA temp_store=MEMORY") || !pragma(d, "PRAGMA application_id", &application)) return false;
    if (!application && !pragma(d, "SELECT count(*) FROM sqlite_master", &tables)) return false;
    if ((application == APPLICATION || (!application && !tables)) && !open_folder(d)) return false;
    for (int tries = 0; !application && !tables; tries++) {
        if (!create(d) && (d->off || tries == 50)) return false;
        if (d->silent) d->silent = false, sqlite3_exec(d->db, "ROLLBACK", NULL, NULL, NULL), usleep(20000);
        if (!pragma(d, "PRAGMA application_id", &application)) return false;
    }
    if (application != APPLICATION)
        return give_up(d, "%s is not a prefix cache of gen: it is not used; name another directory", d->path);
    d->ours = true;
    if (!pragma(d, "PRAGMA user_version", &version) || !pragma(d, "PRAGMA page_size", &page)) return false;
    if (version != VERSION || page != PAGE)
        return give_up(d, "%s is a prefix cache of another version of gen: it is not used; name another directory",
                       d->path);
    for (int i = 0; i < STATEMENTS; i++) {
        int rc = sqlite3_prepare_v3(d->db, sql[i], -1, SQLITE_PREPARE_PERSISTENT, &d->statements[i], NULL);
        if (rc != SQLITE_OK) return failed(d, rc);
    }
    if (!step(d, SIZE)) return false;
    uint64_t used = (uint64_t)number(d, SIZE, 0);
    reset(d, SIZE);
    bool none = false;
    if (used > d->limit && begin(d)) make_room(d, 0, &none), commit(d);
    return !d->off && (!none || too_small(d));
}

struct kvstore *kvstore_open(const char *dir, uint64_t limit, int threads, void (*tell)(void *, const char *),
                             void *user)
{
    struct database *d = calloc(1, sizeof *d);
    char *path = NULL;
    if (!d || asprintf(&path, "%s/%s", dir, name) < 0) {
        free(d);
        tell(user, "cannot allocate memory for the prefix cache: this run goes on without it");
        return NULL;
    }
    d->base = (struct kvstore){ db_find, db_read, db_put, db_pause, db_done, db_known, db_remember, db_close,
                                tell, user };
    d->path = path;
    d->threads = threads;
    d->dir = d->blocks = -1;
    d->limit = limit / 8 * 7;          /* the rest is left to the log, and to what is dropped only after a commit */
    d->most = limit / 16 < TRANSACTION ? limit / 16 : TRANSACTION;
    bool ok = make_files(d, dir);
    if (ok) {
        int rc = sqlite3_open_v2(path, &d->db, SQLITE_OPEN_READWRITE | SQLITE_OPEN_NOMUTEX, NULL);
        ok = (rc == SQLITE_OK || failed(d, rc)) && prepare(d);
    }
    if (ok) return &d->base;
    if (!d->off) give_up(d, "the prefix cache %s is locked by another process: this run goes on without it", d->path);
    db_close(&d->base);
    return NULL;
}
