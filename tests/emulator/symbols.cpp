/* symbols.cpp - kernels' names and static shared memory, from the program's own symbol table; the file of counters. */
#include "emulator.h"

#include <cxxabi.h>
#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace emulator {

struct symbols {
    std::map<uintptr_t, std::string> functions;    /* mangled names by address in the file */
    std::map<std::string, size_t> shared;          /* bytes of a function's thread-local variables, by its encoding */
    uintptr_t load;
};

/* A variable v in a function _Z<encoding> is named _ZZ<encoding>E<v>; `functions` holds all names. */
static void add_shared(symbols &s, const std::vector<std::pair<std::string, size_t>> &variables)
{
    for (const auto &f : s.functions) {
        if (f.second.compare(0, 2, "_Z")) continue;
        std::string start = "_Z" + f.second.substr(1) + "E";
        for (const auto &v : variables)
            if (v.first.compare(0, start.size(), start) == 0) s.shared[f.second] += v.second;
    }
}

static symbols read_symbols()
{
    symbols r;
    std::vector<std::pair<std::string, size_t>> variables;
    int fd = open("/proc/self/exe", O_RDONLY);
    struct stat st;
    if (fd < 0 || fstat(fd, &st)) die("the program's own file cannot be read");
    const char *file = (const char *)mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    close(fd);
    if (file == MAP_FAILED) die("the program's own file cannot be read");
    const Elf64_Ehdr *h = (const Elf64_Ehdr *)file;
    const Elf64_Shdr *sections = (const Elf64_Shdr *)(file + h->e_shoff);
    for (int i = 0; i < h->e_shnum; i++) {
        if (sections[i].sh_type != SHT_SYMTAB) continue;
        const Elf64_Sym *symbol = (const Elf64_Sym *)(file + sections[i].sh_offset);
        const char *names = file + sections[sections[i].sh_link].sh_offset;
        for (size_t n = sections[i].sh_size / sizeof *symbol; n--; symbol++) {
            const char *name = names + symbol->st_name;
            int type = ELF64_ST_TYPE(symbol->st_info);
            if (type == STT_FUNC) r.functions[symbol->st_value] = name;
            else if (type == STT_TLS && !strncmp(name, "_ZZ", 3)) variables.emplace_back(name, symbol->st_size);
        }
    }
    munmap((void *)file, (size_t)st.st_size);
    add_shared(r, variables);
    dl_iterate_phdr([](dl_phdr_info *info, size_t, void *to) { return *(uintptr_t *)to = info->dlpi_addr, 1; },
                    &r.load);
    return r;
}

static const symbols &table()
{
    static const symbols s = read_symbols();
    return s;
}

static std::string mangled(const void *kernel)
{
    auto f = table().functions.find((uintptr_t)kernel - table().load);
    return f == table().functions.end() ? "unknown" : f->second;
}

std::string kernel_name(const void *kernel)
{
    static std::map<const void *, std::string> known;
    std::string &name = known[kernel];
    if (!name.empty()) return name;
    int status;
    char *plain = abi::__cxa_demangle(mangled(kernel).c_str(), NULL, NULL, &status);
    name = plain ? plain : mangled(kernel);
    free(plain);
    if (name.compare(0, 5, "void ") == 0) name.erase(0, 5);
    int depth = 0;                     /* without the types of its arguments, which a template's follow */
    for (size_t i = 0; i < name.size(); i++) {
        if (name[i] == '<') depth++;
        else if (name[i] == '>') depth--;
        else if (name[i] == '(' && depth == 0) name.resize(i);
    }
    return name;
}

size_t static_shared(const void *kernel)
{
    auto f = table().shared.find(mangled(kernel));
    return f == table().shared.end() ? 0 : f->second;
}

static void put(FILE *f, const char *name, const std::map<std::string, traffic> &all)
{
    const char *comma = "";
    fprintf(f, "\"%s\": {", name);
    for (const auto &t : all) {
        fprintf(f, "%s\"%s\": {\"requests\": %llu, \"bytes\": %llu, \"sectors\": %llu, \"distinct\": %llu}", comma,
                t.first.c_str(), (unsigned long long)t.second.requests, (unsigned long long)t.second.bytes,
                (unsigned long long)t.second.sectors, (unsigned long long)t.second.distinct);
        comma = ", ";
    }
    fputs("}", f);
}

void write_counters()
{
    if (options().counters.empty()) return;
    FILE *f = fopen(options().counters.c_str(), "w");
    if (!f) die("%s cannot be written", options().counters.c_str());
    const char *comma = "";
    fputs("{", f);
    for (const auto &k : records) {
        fprintf(f, "%s\n\"%s\": {\"launches\": %llu, \"threads\": %llu, ", comma, k.first.c_str(),
                (unsigned long long)k.second.launches, (unsigned long long)k.second.threads);
        put(f, "reads", k.second.reads);
        fputs(", ", f);
        put(f, "writes", k.second.writes);
        fputs("}", f);
        comma = ",";
    }
    fputs("\n}\n", f);
    if (fclose(f)) die("%s cannot be written", options().counters.c_str());
}
}
