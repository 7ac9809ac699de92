/* journal.c - the output of a batch, and what an earlier run left there. */
#define _GNU_SOURCE
#include "journal.h"
#include "json.h"
#include "output.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* An answer of an earlier run. */
struct known { char key[64]; int32_t sample, left; };

struct journal {
    int file;                          /* -1 = standard output */
    const char *path;
    bool regular;
    off_t size;                        /* where the last whole line ends */
    struct known *known;               /* [n] sorted; equal ones are one with a count */
    size_t n, cap;
    int64_t lines, answers, errors, seed;
};

static int compare(const void *a, const void *b)
{
    const struct known *x = a, *y = b;
    int order = memcmp(x->key, y->key, sizeof x->key);
    return order ? order : (x->sample > y->sample) - (x->sample < y->sample);
}

/* Notes the answer on a line of the file. */
static bool note_answer(struct journal *j, const char *line, size_t n, struct error *e)
{
    json_t *object = json_read(line, n, "the line is", e), *key = json_object_get(object, "key");
    json_t *seed = json_object_get(object, "seed"), *sample = json_object_get(object, "sample");
    bool ok = json_is_string(key) && json_string_length(key) == 64;
    if (!object && e->code == GEN_RUN) return false;
    if (!ok) {
        fail(e, GEN_USAGE, "--resume: line %lld of %s is no answer of a batch: name the file of the run that is to go "
                           "on", (long long)j->lines, j->path);
    } else if (j->n == j->cap) {
        size_t cap = j->cap ? 2 * j->cap : 256;
        struct known *grown = realloc(j->known, cap * sizeof *grown);
        ok = grown || fail(e, GEN_RUN, "cannot allocate memory for the answers of %s", j->path);
        if (ok) j->known = grown, j->cap = cap;
    }
    if (ok) {
        struct known *to = &j->known[j->n++];
        memcpy(to->key, json_string_value(key), sizeof to->key);
        to->sample = (int32_t)json_integer_value(sample);
        to->left = 1;
        j->answers++;
        j->errors += json_object_get(object, "error") != NULL;
        if (j->seed < 0 && json_is_integer(seed)) j->seed = json_integer_value(seed);
    }
    json_decref(object);
    return ok;
}

/* Could the text, the beginning of a line, be that of an answer? */
static bool may_be_answer(const char *text, size_t n)
{
    static const char *const first[] = { "{\"key\":\"", "{\"custom_id\":", "{\"seed\":" };
    bool may = false;
    for (size_t i = 0; i < sizeof first / sizeof *first; i++)
        may = may || strncmp(text, first[i], n < strlen(first[i]) ? n : strlen(first[i])) == 0;
    return may;
}

/* Reads the answers that are there, up to where the last whole line ends. */
static bool read_answers(struct journal *j, size_t size, struct error *e)
{
    char *text = size ? mmap(NULL, size, PROT_READ, MAP_PRIVATE, j->file, 0) : NULL;
    const char *at = text, *end;
    if (!size) return true;
    if (text == MAP_FAILED) return fail(e, GEN_RUN, "cannot read --output %s: %s", j->path, strerror(errno));
    bool ok = true;
    while (ok && (end = memchr(at, '\n', size - (size_t)(at - text)))) {
        j->lines++;
        if (at + strspn(at, " \t\r") < end)             /* an editor may have left an empty one */
            ok = note_answer(j, at, (size_t)(end - at), e);
        at = end + 1;
        if (at == text + size) break;
    }
    j->size = at - text;
    if (ok && !may_be_answer(at, size - (size_t)j->size))      /* nothing else is cut */
        ok = fail(e, GEN_USAGE, "--resume: %s does not %s with an answer of a batch: name the file of the run that is "
                                "to go on", j->path, j->answers ? "end" : "begin");
    munmap(text, size);
    if (!ok) return false;
    if (j->n) qsort(j->known, j->n, sizeof *j->known, compare);
    size_t kept = 0;
    for (size_t i = 0; i < j->n; i++)
        if (kept && compare(&j->known[kept - 1], &j->known[i]) == 0) j->known[kept - 1].left++;
        else j->known[kept++] = j->known[i];
    j->n = kept;
    return true;
}

static bool open_file(struct journal *j, bool resume, const char *source, struct error *e)
{
    struct stat st, in;
    bool has_source = strcmp(source, "-") == 0 ? fstat(STDIN_FILENO, &in) == 0 : stat(source, &in) == 0;
    j->file = open(j->path, (resume ? O_RDWR : O_WRONLY) | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (j->file < 0 || fstat(j->file, &st) != 0)
        return fail(e, GEN_USAGE, "cannot write --output %s: %s", j->path, strerror(errno));
    j->regular = S_ISREG(st.st_mode);
    if (j->regular && has_source && st.st_dev == in.st_dev && st.st_ino == in.st_ino)
        return fail(e, GEN_USAGE, "--output %s is the file that the lines are read from: name another one", j->path);
    if (resume && !j->regular)
        return fail(e, GEN_USAGE, "--resume needs a regular file to go on with, which --output %s is not", j->path);
    if (!j->regular) return true;
    if (flock(j->file, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
        return fail(e, GEN_USAGE, "--output %s is being written by another run: wait for its end", j->path);
    if (resume && !read_answers(j, (size_t)st.st_size, e)) return false;
    return ftruncate(j->file, j->size) == 0
        || fail(e, GEN_RUN, "cannot cut --output %s to its whole lines: %s", j->path, strerror(errno));
}

bool journal_open(struct journal **out, const char *path, bool resume, const char *source, struct error *e)
{
    struct journal *j = alloc_zeroed(1, sizeof *j, "the output", e);
    *out = NULL;
    if (!j) return false;
    j->file = -1;
    j->path = path;
    j->seed = -1;
    if (path && !open_file(j, resume, source, e)) return journal_close(j), false;
    *out = j;
    return true;
}

void journal_close(struct journal *j)
{
    if (!j) return;
    if (j->file >= 0) close(j->file);
    free(j->known);
    free(j);
}

bool journal_take(struct journal *j, const char key[65], int sample)
{
    struct known sought = { .sample = sample }, *found;
    memcpy(sought.key, key, sizeof sought.key);
    found = j->n ? bsearch(&sought, j->known, j->n, sizeof *j->known, compare) : NULL;
    return found && found->left > 0 && found->left-- > 0;
}

int64_t journal_answers(const struct journal *j) { return j->answers; }
int64_t journal_errors(const struct journal *j) { return j->errors; }
int64_t journal_seed(const struct journal *j) { return j->seed; }

bool journal_write(struct journal *j, const char *line, size_t n, struct error *e)
{
    if (j->file < 0) return output_write(line, n, e);
    for (size_t done = 0; done < n;) {
        ssize_t step = write(j->file, line + done, n - done);
        if (step < 0 && errno == EINTR) continue;
        if (step <= 0) {
            fail(e, GEN_RUN, "cannot write --output %s: %s", j->path, step ? strerror(errno) : "nothing is written");
            if (j->regular && done && ftruncate(j->file, j->size) != 0)
                fail(e, GEN_RUN, "cannot write --output %s, whose last line is not whole", j->path);
            return false;
        }
        done += (size_t)step;
    }
    j->size += (off_t)n;
    return true;
}
