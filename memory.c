/* memory.c - the limits that Linux sets on a process: memory and cores. */
#define _GNU_SOURCE
#include "memory.h"

#include <sched.h>
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

/* The memory that one control group leaves; its files have other names in version 1. */
static uint64_t memory_of(const char *folder, bool v2)
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

/* The cores that its quota comes to, rounded up. */
static uint64_t cores_of(const char *folder, bool v2)
{
    char path[4300];
    long long quota = 0, period = 0;
    uint64_t there;
    snprintf(path, sizeof path, "%s/%s", folder, v2 ? "cpu.max" : "cpu.cfs_quota_us");
    FILE *f = fopen(path, "re");
    int n = f ? fscanf(f, "%lld %lld", &quota, &period) : 0;        /* "max" and -1: there is none */
    if (f) fclose(f);
    snprintf(path, sizeof path, "%s/cpu.cfs_period_us", folder);
    if (n < 1 || quota <= 0 || (!v2 && !read_number(path, "", &there))) return UINT64_MAX;
    if (!v2) period = (long long)there;
    return period > 0 ? (uint64_t)((quota + period - 1) / period) : UINT64_MAX;
}

typedef uint64_t group_limit(const char *folder, bool v2);

/* The least of a group and all groups above it. `path` is the group's place under `mount`. */
static uint64_t least_above(group_limit *limit, const char *mount, char *path, bool v2)
{
    char folder[4200];
    uint64_t found = UINT64_MAX;
    for (;;) {
        snprintf(folder, sizeof folder, "%s%s", mount, path);
        found = least(found, limit(folder, v2));
        char *cut = strrchr(path, '/');
        if (!cut || !*path) return found;
        *cut = '\0';
    }
}

/* The least of this process's groups; `controller` and where its groups of version 1 are. */
static uint64_t least_of_groups(group_limit *limit, const char *controller, const char *mount)
{
    char line[4096];
    uint64_t found = UINT64_MAX;
    FILE *f = fopen("/proc/self/cgroup", "re");
    while (f && fgets(line, sizeof line, f)) {       /* "0::/path" or "4:cpu,cpuacct:/path" */
        line[strcspn(line, "\n")] = '\0';
        char *names = strchr(line, ':'), *path = names ? strchr(names + 1, ':') : NULL;
        if (!path) continue;
        *path++ = '\0';
        if (!names[1]) found = least(found, least_above(limit, "/sys/fs/cgroup", path, true));
        for (char *rest = names + 1, *name; (name = strsep(&rest, ","));)
            if (strcmp(name, controller) == 0) found = least(found, least_above(limit, mount, path, false));
    }
    if (f) fclose(f);
    return found;
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
    uint64_t groups = least_of_groups(memory_of, "memory", "/sys/fs/cgroup/memory");
    return least(machine, least(groups, address_space_leaves()));
}

int cores_available(void)
{
    cpu_set_t set;
    int n = sched_getaffinity(0, sizeof set, &set) ? (int)sysconf(_SC_NPROCESSORS_ONLN) : CPU_COUNT(&set);
    return (int)least(n > 0 ? (uint64_t)n : 1, least_of_groups(cores_of, "cpu", "/sys/fs/cgroup/cpu"));
}
