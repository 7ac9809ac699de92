/* memory.c - the limits that Linux sets on a process's memory. */
#include "memory.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

/* The number after `key` at the start of a line of a file; key "" = the file's first number. */
static bool read_number(const char *path, const char *key, uint64_t *out)
{
    char line[256];
    bool found = false;
    size_t n = strlen(key);
    FILE *f = fopen(path, "re");
    while (f && !found && fgets(line, sizeof line, f))
        if (strncmp(line, key, n) == 0) {
            char *end;
            *out = strtoull(line + n, &end, 10);
            found = end != line + n;
        }
    if (f) fclose(f);
    return found;
}

static uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }

/* What one control group leaves; its files have other names in version 1. */
static uint64_t group_leaves(const char *folder, bool v2)
{
    char path[4300];
    uint64_t limit, used, cache = 0;
    snprintf(path, sizeof path, "%s/%s", folder, v2 ? "memory.max" : "memory.limit_in_bytes");
    if (!read_number(path, "", &limit)) return UINT64_MAX;
    snprintf(path, sizeof path, "%s/%s", folder, v2 ? "memory.current" : "memory.usage_in_bytes");
    if (!read_number(path, "", &used)) return UINT64_MAX;
    snprintf(path, sizeof path, "%s/memory.stat", folder);
    if (!read_number(path, v2 ? "inactive_file " : "total_inactive_file ", &cache)) cache = 0;
    used -= least(used, cache);
    return limit > used ? limit - used : 0;
}

/* The least of a group and all groups above it. `path` is the group's place under `mount`. */
static uint64_t groups_leave(const char *mount, char *path, bool v2)
{
    char folder[4200];
    uint64_t leaves = UINT64_MAX;
    for (;;) {
        snprintf(folder, sizeof folder, "%s%s", mount, path);
        leaves = least(leaves, group_leaves(folder, v2));
        char *cut = strrchr(path, '/');
        if (!cut || !*path) return leaves;
        *cut = '\0';
    }
}

static uint64_t control_groups_leave(void)
{
    char line[4096];
    uint64_t leaves = UINT64_MAX;
    FILE *f = fopen("/proc/self/cgroup", "re");
    while (f && fgets(line, sizeof line, f)) {       /* "0::/path" or "4:memory:/path" */
        line[strcspn(line, "\n")] = '\0';
        char *name = strchr(line, ':'), *path = name ? strchr(name + 1, ':') : NULL;
        if (!path) continue;
        *path++ = '\0';
        if (!name[1]) leaves = least(leaves, groups_leave("/sys/fs/cgroup", path, true));
        else if (strstr(name, "memory")) leaves = least(leaves, groups_leave("/sys/fs/cgroup/memory", path, false));
    }
    if (f) fclose(f);
    return leaves;
}

static uint64_t address_space_leaves(void)
{
    struct rlimit limit;
    uint64_t pages = 0;
    if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return UINT64_MAX;
    read_number("/proc/self/statm", "", &pages);
    uint64_t used = pages * (uint64_t)sysconf(_SC_PAGESIZE);
    return limit.rlim_cur > used ? limit.rlim_cur - used : 0;
}

uint64_t memory_available(void)
{
    uint64_t kib, machine = UINT64_MAX;
    if (read_number("/proc/meminfo", "MemAvailable:", &kib)) machine = kib * 1024;
    return least(machine, least(control_groups_leave(), address_space_leaves()));
}
