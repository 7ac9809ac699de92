/* The store that processes share, seen by two of them. */
#include <dirent.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "../base.h"
#include "../kvstore.h"

#include <cmocka.h>              /* after base.h: it defines a macro named fail */

static char folder[] = "/tmp/gen-kvstore-XXXXXX";
static int told;

static void tell(void *user, const char *sentence)
{
    (void)user;
    print_message("%s\n", sentence);
    told++;
}

static struct kvstore *store(void)
{
    struct kvstore *k = kvstore_open(folder, 64 << 20, 2, tell, NULL);
    assert_non_null(k);
    return k;
}

/* A block without a parent whose text is `text`, with 1000 bytes for each of its parts. */
static struct kvstore_block block(int32_t text, unsigned parts)
{
    static int32_t tokens[KV_BLOCK];
    static const char data[3000];
    struct kvstore_block b = { .parts = parts, .tokens = tokens, .data = data };
    tokens[0] = text;
    b.bytes = 1000 * (size_t)__builtin_popcount(parts);
    kv_block_key(b.parent, tokens, b.key);
    return b;
}

/* The one who computes after it has put a block does not keep the other one from putting his. */
static void test_pause(void **unused)
{
    (void)unused;
    struct kvstore *one = store(), *other = store();
    struct kvstore_block first = block(1, 3);
    one->put(one, &first, 1);
    one->pause(one);
    struct kvstore_block second = block(2, 3);
    other->put(other, &second, 1);
    other->done(other);
    assert_int_equal(one->find(one, &second), 3);
    assert_int_equal(other->find(other, &first), 3);
    one->close(one);
    other->close(other);
    assert_int_equal(told, 0);
}

/* A lock that is held too long costs this prompt's blocks, not those of the next one. */
static void test_silent(void **unused)
{
    (void)unused;
    struct kvstore *one = store(), *other = store();
    struct kvstore_block b = block(3, 3);
    one->put(one, &b, 1);
    b = block(4, 3);
    other->put(other, &b, 1);
    other->done(other);
    assert_int_equal(other->find(other, &b), 0);
    one->done(one);
    other->put(other, &b, 1);
    other->done(other);
    assert_int_equal(one->find(one, &b), 3);
    one->close(one);
    other->close(other);
    assert_int_equal(told, 0);
}

/* Between finding a block and reading it another process may put more of it. */
static void test_put_again(void **unused)
{
    (void)unused;
    struct kvstore *one = store(), *other = store();
    struct kvstore_block b = block(5, 1);
    one->put(one, &b, 1);
    one->done(one);
    assert_int_equal(one->find(one, &b), 1);
    struct kvstore_block more = block(5, 3);
    other->put(other, &more, 1);
    other->done(other);
    assert_null(one->read(one, &b));
    assert_int_equal(one->find(one, &more), 3);
    assert_non_null(one->read(one, &more));
    one->close(one);
    other->close(other);
    assert_int_equal(told, 0);
}

/* The number of names in the store's folder `below`; `then` is done with each. */
static int each(const char *below, int (*then)(int, const char *, int))
{
    int n = 0, fd = open(folder, O_RDONLY | O_DIRECTORY);
    int at = openat(fd, below, O_RDONLY | O_DIRECTORY);
    DIR *all = at >= 0 ? fdopendir(at) : NULL;
    for (struct dirent *file; all && (file = readdir(all));) {
        if (file->d_name[0] == '.') continue;
        n++;
        if (then) then(at, file->d_name, 0);
    }
    if (all) closedir(all);
    close(fd);
    return n;
}

/* A limit that holds from here on; the one before. */
static struct rlimit limit(int which, rlim_t most)
{
    struct rlimit before, now;
    getrlimit(which, &before);
    now = before;
    now.rlim_cur = most;
    assert_int_equal(setrlimit(which, &now), 0);
    return before;
}

/* A block that cannot be read just now is no damage: one warning, and the store stays. */
static void test_cannot_read(void **unused)
{
    (void)unused;
    struct kvstore *one = store();
    struct kvstore_block b = block(6, 3);
    one->put(one, &b, 1);
    one->done(one);
    assert_non_null(one->read(one, &b));
    struct rlimit before = limit(RLIMIT_NOFILE, 3);
    assert_null(one->read(one, &b));
    assert_null(one->read(one, &b));
    assert_int_equal(one->find(one, &b), 0);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
    one->close(one);
    assert_int_equal(told, 1);
    told = 0;
    one = store();
    assert_int_equal(one->find(one, &b), 3);
    assert_non_null(one->read(one, &b));
    one->close(one);
    assert_int_equal(told, 0);
}

/* A transaction that ends because the disk is full leaves none of its files. */
static void test_full_disk(void **unused)
{
    (void)unused;
    struct kvstore *one = store();
    int files = each("prefixes.blocks", NULL);
    for (int i = 0; i < 20; i++) {
        struct kvstore_block b = block(100 + i, 1);
        one->put(one, &b, 1);
    }
    assert_int_equal(each("prefixes.blocks", NULL), files + 20);
    struct kvstore_block b = block(200, 7);
    signal(SIGXFSZ, SIG_IGN);
    struct rlimit before = limit(RLIMIT_FSIZE, 2000);
    one->put(one, &b, 1);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
    assert_int_equal(told, 1);
    told = 0;
    assert_int_equal(each("prefixes.blocks", NULL), files);
    one->close(one);
    one = store();
    one->put(one, &b, 1);
    one->done(one);
    assert_int_equal(one->find(one, &b), 7);
    one->close(one);
    assert_int_equal(told, 0);
}

static int make(void **unused)
{
    (void)unused;
    return mkdtemp(folder) ? 0 : -1;
}

static int clean(void **unused)
{
    (void)unused;
    char blocks[sizeof folder + 20];
    snprintf(blocks, sizeof blocks, "%s/prefixes.blocks", folder);
    each("prefixes.blocks", unlinkat);
    each(".", unlinkat);
    return rmdir(blocks) || rmdir(folder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pause), cmocka_unit_test(test_silent), cmocka_unit_test(test_put_again),
        cmocka_unit_test(test_cannot_read), cmocka_unit_test(test_full_disk),
    };
    return cmocka_run_group_tests(tests, make, clean);
}
