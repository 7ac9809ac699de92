/* kvstore.c - the store that processes share: an SQLite database in a directory.
 *
 * Any number of processes read and write at once (write-ahead log); one transaction takes what a prompt adds, or a part
 * of it. A process may be killed at any moment. After the whole machine stopped the database may be damaged, since
 * nothing is waited for: a damaged one is noticed, by SQLite or by a row's checksum, is not used and is removed. */
#define _GNU_SOURCE
#include "kvstore.h"

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

static const char name[] = "prefixes.db";
enum {
    APPLICATION = 0x67656e6b,          /* "genk", in the database's header */
    VERSION = 1,
    PAGE = 32768,                      /* bytes of a database page: large, for rows of a hundred kilobytes and more */
    WAIT_MS = 1000                     /* for another process's transaction */
};
#define TRANSACTION ((uint64_t)16 << 20)           /* most bytes of one transaction */
#define LOG ((uint64_t)32 << 20)                   /* the write-ahead log is worked off when it has so many bytes */

/* A block's use is the time of the prompt that used it less its index, but always before its parent's: the least recently
 * used one is the last of a prefix. The data has a table of its own, since a change of `used` writes its whole row. */
static const char schema[] =
    "CREATE TABLE block(id INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE, parent BLOB NOT NULL, used INTEGER NOT NULL,"
    " parts INTEGER NOT NULL, tokens BLOB NOT NULL, sum INTEGER NOT NULL);"
    "CREATE INDEX block_used ON block(used);"
    "CREATE TABLE data(id INTEGER PRIMARY KEY, bytes BLOB NOT NULL);"
    "CREATE TABLE model(identity BLOB PRIMARY KEY, fingerprint BLOB NOT NULL, sum INTEGER NOT NULL) WITHOUT ROWID;";

enum statement {
    BEGIN, COMMIT, ROLLBACK, FIND, READ, TOUCH, ADD, ADD_DATA, OLDEST, DROP, DROP_DATA, SIZE, KNOWN, REMEMBER, STATEMENTS
};
#define USED(parent) "min(?2, ifnull((SELECT p.used - 1 FROM block p WHERE p.key = " parent "), ?2))"
static const char *const sql[STATEMENTS] = {
    [BEGIN] = "BEGIN IMMEDIATE",
    [COMMIT] = "COMMIT",
    [ROLLBACK] = "ROLLBACK",
    [FIND] = "SELECT id, parts FROM block WHERE key = ?1",
    [READ] = "SELECT parent, tokens, parts, sum, bytes FROM block JOIN data USING (id) WHERE key = ?1",
    [TOUCH] = "UPDATE block SET used = " USED("block.parent") " WHERE key = ?1 AND used < ?2",
    [ADD] = "INSERT INTO block(key, used, parent, parts, tokens, sum) VALUES (?1, " USED("?3") ", ?3, ?4, ?5, ?6)",
    [ADD_DATA] = "INSERT INTO data(id, bytes) VALUES (?1, ?2)",
    [OLDEST] = "SELECT id, used FROM block ORDER BY used LIMIT 1",
    [DROP] = "DELETE FROM block WHERE id = ?1",
    [DROP_DATA] = "DELETE FROM data WHERE id = ?1",
    [SIZE] = "SELECT page_count - freelist_count FROM pragma_page_count, pragma_freelist_count",
    [KNOWN] = "SELECT fingerprint, sum FROM model WHERE identity = ?1",
    [REMEMBER] = "INSERT OR REPLACE INTO model VALUES (?1, ?2, ?3)",
};

struct touch { uint8_t key[KV_KEY]; int64_t index; };

struct database {
    struct kvstore base;
    char *path;
    int dir;                           /* locked (flock) as long as the database is open: shared by those who use it */
    sqlite3 *db;
    sqlite3_stmt *statements[STATEMENTS];
    uint64_t limit;                    /* bytes of database pages in use */
    uint64_t most;                     /* bytes of a transaction */
    uint64_t pending;                  /* bytes of the transaction that is open */
    bool writing;                      /* a transaction is open */
    bool off;                          /* nothing is done any more */
    bool silent;                       /* nothing is written any more */
    bool ours, damaged;                /* the header says it is gen's; it is to be removed */
    int64_t now;                       /* microseconds: the time of this prompt, 0 = not taken yet */
    int64_t deepest;                   /* largest index of a block of this prompt */
    struct bytes touched;              /* struct touch of each block that was found */
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

static bool begin(struct database *d)
{
    reset(d, READ);                    /* a transaction that writes begins with what is there now */
    if (d->off || d->silent) return false;
    if (d->writing) return true;
    return d->writing = run(d, BEGIN);
}

static void roll_back(struct database *d)
{
    if (d->writing && !sqlite3_get_autocommit(d->db)) sqlite3_step(d->statements[ROLLBACK]), reset(d, ROLLBACK);
    d->writing = false;
    d->pending = 0;
}

static void commit(struct database *d)
{
    if (d->writing && (d->off || !run(d, COMMIT))) roll_back(d);
    d->writing = false;
    d->pending = 0;
}

static int64_t use_of(struct database *d, int64_t index)
{
    struct timespec t;
    if (!d->now) {
        clock_gettime(CLOCK_REALTIME, &t);
        d->now = (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
    }
    if (index > d->deepest) d->deepest = index;
    return d->now - index;
}

/* Drops least recently used blocks until `bytes` more fit; false when only this prompt's own are left. */
static bool make_room(struct database *d, size_t bytes)
{
    while (!d->off) {
        if (!step(d, SIZE)) return reset(d, SIZE), false;
        uint64_t used = (uint64_t)number(d, SIZE, 0) * PAGE;
        reset(d, SIZE);
        if (used + bytes <= d->limit) return true;
        int rc = step(d, OLDEST);
        int64_t id = rc == SQLITE_ROW ? number(d, OLDEST, 0) : 0, last = rc == SQLITE_ROW ? number(d, OLDEST, 1) : 0;
        reset(d, OLDEST);
        if (rc != SQLITE_ROW || (d->now && last >= d->now - d->deepest)) return false;
        bind_number(d, DROP, 1, id);
        bind_number(d, DROP_DATA, 1, id);
        if (!run(d, DROP) || !run(d, DROP_DATA)) return false;
    }
    return false;
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

static const void *db_read(struct kvstore *k, const struct kvstore_block *b)
{
    struct database *d = (struct database *)k;
    struct kvstore_block row = *b;
    if (d->off) return NULL;
    reset(d, READ);                    /* of the call before this one */
    bind_blob(d, READ, 1, b->key, KV_KEY);
    if (step(d, READ) != SQLITE_ROW) return NULL;
    const uint8_t *parent = blob(d, READ, 0, KV_KEY);
    row.tokens = blob(d, READ, 1, KV_BLOCK * sizeof *b->tokens);
    row.parts = (unsigned)number(d, READ, 2);
    if (row.parts != b->parts) return NULL;            /* another process has put more of it since it was found */
    row.data = blob(d, READ, 4, b->bytes);
    if (parent) memcpy(row.parent, parent, KV_KEY);
    bool whole = parent && row.tokens && row.data && kvstore_block_sum(&row) == (uint64_t)number(d, READ, 3)
              && memcmp(row.tokens, b->tokens, KV_BLOCK * sizeof *b->tokens) == 0;
    if (!whole) return damage(d, "a block's checksum is wrong"), NULL;
    return row.data;
}

static void db_put(struct kvstore *k, const struct kvstore_block *b)
{
    struct database *d = (struct database *)k;
    unsigned there;
    if (!begin(d)) return;
    touch_found(d);                    /* or they might have to make room */
    int64_t id = find_id(d, b->key, &there);
    if (id && !(b->parts & ~there)) {
        touch(d, b->key, b->index);
        return;
    }
    if (id) {                          /* with fewer parts */
        bind_number(d, DROP, 1, id);
        bind_number(d, DROP_DATA, 1, id);
        if (!run(d, DROP) || !run(d, DROP_DATA)) return roll_back(d);
    }
    if (!make_room(d, b->bytes + PAGE)) return;
    bind_blob(d, ADD, 1, b->key, KV_KEY);
    bind_number(d, ADD, 2, use_of(d, b->index));
    bind_blob(d, ADD, 3, b->parent, KV_KEY);
    bind_number(d, ADD, 4, b->parts);
    bind_blob(d, ADD, 5, b->tokens, KV_BLOCK * sizeof *b->tokens);
    bind_number(d, ADD, 6, (int64_t)kvstore_block_sum(b));
    if (!run(d, ADD)) return roll_back(d);
    bind_number(d, ADD_DATA, 1, sqlite3_last_insert_rowid(d->db));
    bind_blob(d, ADD_DATA, 2, b->data, b->bytes);
    if (!run(d, ADD_DATA)) return roll_back(d);
    d->pending += b->bytes;
    if (d->pending >= d->most) commit(d);
}

static void db_pause(struct kvstore *k)
{
    struct database *d = (struct database *)k;
    reset(d, READ);
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

/* A damaged database is removed when nobody else has it open. */
static void remove_database(const struct database *d)
{
    if (flock(d->dir, LOCK_EX | LOCK_NB) != 0) return;
    for (int i = 0; i < 3; i++) {
        static const char *const ends[] = { "", "-wal", "-shm" };
        char file[sizeof name + 8];
        snprintf(file, sizeof file, "%s%s", name, ends[i]);
        unlinkat(d->dir, file, 0);
    }
}

static void db_close(struct kvstore *k)
{
    struct database *d = (struct database *)k;
    int64_t pages = 0;
    if (d->ours && !d->off) db_done(k);
    roll_back(d);
    /* The limit was lowered: the file becomes shorter. */
    if (d->ours && !d->off && pragma(d, "PRAGMA page_count", &pages) && (uint64_t)pages * PAGE > d->limit + d->most)
        execute(d, "PRAGMA incremental_vacuum");
    for (int i = 0; i < STATEMENTS; i++) sqlite3_finalize(d->statements[i]);
    sqlite3_close(d->db);
    if (d->damaged) remove_database(d);
    if (d->dir >= 0) close(d->dir);
    bytes_free(&d->touched);
    free(d->path);
    free(d);
}

/* ---- opening ----------------------------------------------------------------------------------------------------- */

/* Makes the directory and an empty file that only the user can read; the log files get the same mode from SQLite. */
static bool make_files(struct database *d, const char *dir)
{
    struct stat st;
    mkdir(dir, 0700);
    d->dir = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (d->dir < 0) return give_up(d, "the prefix cache %s cannot be used: %s", dir, strerror(errno));
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

/* Makes the tables in a database without any. */
static bool create(struct database *d)
{
    char text[200];
    int64_t application;
    snprintf(text, sizeof text, "PRAGMA page_size=%d; PRAGMA auto_vacuum=INCREMENTAL; PRAGMA journal_mode=WAL", PAGE);
    if (!execute(d, text) || !execute(d, "BEGIN IMMEDIATE") || !pragma(d, "PRAGMA application_id", &application))
        return false;
    if (application) return execute(d, "ROLLBACK");    /* another process was faster */
    snprintf(text, sizeof text, "PRAGMA application_id=%d; PRAGMA user_version=%d; COMMIT", APPLICATION, VERSION);
    return execute(d, schema) && execute(d, text);
}

static bool prepare(struct database *d)
{
    int64_t application, version, tables = 0, page = 0;
    sqlite3_extended_result_codes(d->db, 1);
    sqlite3_busy_timeout(d->db, WAIT_MS);
    sqlite3_db_config(d->db, SQLITE_DBCONFIG_DEFENSIVE, 1, NULL);
    sqlite3_wal_autocheckpoint(d->db, (int)((d->limit / 8 < LOG ? d->limit / 8 : LOG) / PAGE) + 1);
    if (!execute(d, "PRAGMA mmap_size=0; PRAGMA trusted_schema=OFF; PRAGMA cell_size_check=ON; PRAGMA synchronous=OFF;"
                 "PRAGMA temp_store=MEMORY") || !pragma(d, "PRAGMA application_id", &application)) return false;
    if (!application && !pragma(d, "SELECT count(*) FROM sqlite_master", &tables)) return false;
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
    uint64_t used = (uint64_t)number(d, SIZE, 0) * PAGE;
    reset(d, SIZE);
    if (used > d->limit && begin(d)) make_room(d, 0), commit(d);
    return !d->off;
}

struct kvstore *kvstore_open(const char *dir, uint64_t limit, void (*tell)(void *, const char *), void *user)
{
    struct database *d = calloc(1, sizeof *d);
    char *path = NULL;
    if (!d || asprintf(&path, "%s/%s", dir, name) < 0) {
        free(d);
        tell(user, "cannot allocate memory for the prefix cache: this run goes on without it");
        return NULL;
    }
    d->base = (struct kvstore){ db_find, db_read, db_put, db_pause, db_done, db_known, db_remember, db_close, tell, user };
    d->path = path;
    d->dir = -1;
    d->limit = limit / 4 * 3;          /* the rest is left to the write-ahead log */
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
