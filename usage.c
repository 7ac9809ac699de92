/* usage.c - the option table as help text, man page, Markdown and shell completions. */
#include "usage.h"

#include "options.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WIDTH = 100, INDENT = 32 };     /* columns of the help text; where descriptions begin */

static const char synopsis[] = "gen [OPTIONS] [TEXT] [-]";
static const char summary[] = "generate text from a GGUF language model";
static const char about[] =
    "gen loads a GGUF model. TEXT is one chat message, answered in the model's own template; without it the raw text "
    "of -p, of -f or of standard input is continued; on a terminal with neither a chat starts. The generated text "
    "goes to standard output, everything else to standard error. A word - appends standard input. An option may be "
    "written with "
    "one dash or two, its value as the next word, after = (--temp=0), or behind a letter (-n5); names are never "
    "abbreviated; where an option is given twice the last one counts, unless it may be repeated.";

static const char *const examples[][2] = {
    { "gen", "chat" },
    { "gen 'Name three fruits.'", "one message and its reply" },
    { "gen -p 'The capital of France is' -n 20", "continue a text" },
    { "echo 'Once upon a time' | gen --temp 0", "the prompt through a pipe, the most likely answer" },
    { "gen -m model.gguf --dry-run", "what a model takes in memory" },
};
static const char *const codes[][2] = {
    { "0", "done, or the reader of the output went away" },
    { "1", "failed while running (memory, a full disk, numbers that are not finite)" },
    { "2", "bad usage: an option, a value, a text file that cannot be read, a prompt longer than the context" },
    { "3", "a model file that is damaged, not supported or cannot be read; --backend cuda where CUDA cannot be used" },
};
static const char *const variables[][2] = {
    { "GEN_MODEL", "model file when -m is not given" },
    { "GEN_ISA", "instruction set to use: generic, avx2, avxvnni or avx512; the best one otherwise" },
    { "NO_COLOR", "set to anything: no colour unless --color always" },
};
#define COUNT(a) (sizeof(a) / sizeof *(a))

/* "-m, --model FILE" */
static const char *heading(const struct option_row *row, char out[120])
{
    char name[40], letter[8] = "";
    if (row->letter) snprintf(letter, sizeof letter, "-%c, ", row->letter);
    snprintf(out, 120, "%s%s%s%s", letter, option_display(row, name), row->arg ? " " : "", row->arg ? row->arg : "");
    return out;
}

/* The preset as a reader should see it: "off" where it lies outside the values that may be given. NULL = none. */
static const char *preset(const struct option_row *row)
{
    bool number = row->kind == OPT_INT || row->kind == OPT_LONG;
    if (!row->preset) return NULL;
    return number && strtod(row->preset, NULL) < row->lo ? "off" : row->preset;
}

/* ---- help */

/* Adds words from column `column` on, broken before WIDTH and continued at `indent`. */
static void wrap(struct bytes *out, const char *text, int column, int indent)
{
    while (*text) {
        int n = (int)strcspn(text, " ");
        if (column > indent && column + 1 + n > WIDTH) bytes_printf(out, "\n%*s", indent, ""), column = indent;
        else if (column > indent) bytes_add(out, " ", 1), column++;
        bytes_add(out, text, (size_t)n);
        column += n;
        text += n + (text[n] == ' ');
    }
    bytes_add(out, "\n", 1);
}

static void help_row(struct bytes *out, const char *left, const char *right)
{
    int n = bytes_printf(out, "  %s", left) ? (int)strlen(left) + 2 : 0;
    if (n >= INDENT) bytes_printf(out, "\n%*s", INDENT, "");
    else bytes_printf(out, "%*s", INDENT - n, "");
    wrap(out, right, INDENT, INDENT);
}

static void help_group(struct bytes *out, int group)
{
    bytes_printf(out, "\n%s (--help %s)\n", option_groups[group][1], option_groups[group][0]);
    for (int i = 0; i < n_options; i++) {
        const struct option_row *row = &option_table[i];
        struct bytes text = { 0 };
        char left[120];
        if ((int)row->group != group) continue;
        bytes_printf(&text, "%s", row->help);
        if (preset(row)) bytes_printf(&text, " [%s]", preset(row));
        help_row(out, heading(row, left), text.data ? text.data : row->help);
        bytes_free(&text);
    }
}

static void help_list(struct bytes *out, const char *title, const char *const list[][2], size_t n)
{
    bytes_printf(out, "\n%s\n", title);
    for (size_t i = 0; i < n; i++) help_row(out, list[i][0], list[i][1]);
}

static void help_all(struct bytes *out)
{
    bytes_printf(out, "Usage: %s\n\n", synopsis);
    wrap(out, about, 0, 0);
    for (int g = 0; g < N_GROUPS; g++) help_group(out, g);
    bytes_printf(out, "\nExamples\n");
    for (size_t i = 0; i < COUNT(examples); i++) bytes_printf(out, "  # %s\n  %s\n", examples[i][1], examples[i][0]);
    help_list(out, "Environment", variables, COUNT(variables));
    help_list(out, "Exit codes", codes, COUNT(codes));
}

/* ---- man page */

/* Adds text for roff: hyphens that may be typed, backslashes and leading dots are escaped. */
static void roff(struct bytes *out, const char *text)
{
    if (*text == '.' || *text == '\'') bytes_add(out, "\\&", 2);
    for (; *text; text++) {
        if (*text == '\\') bytes_add(out, "\\e", 2);
        else if (*text == '-') bytes_add(out, "\\-", 2);
        else bytes_add(out, text, 1);
    }
}

static void man_entry(struct bytes *out, const char *left, const char *right, const char *end)
{
    bytes_printf(out, ".TP\n.B ");
    roff(out, left);
    bytes_add(out, "\n", 1);
    roff(out, right);
    if (end) bytes_printf(out, " Default: "), roff(out, end), bytes_add(out, ".", 1);
    bytes_add(out, "\n", 1);
}

static void man_page(struct bytes *out)
{
    char left[120];
    bytes_printf(out, ".TH GEN 1 \"\" \"gen %s\"\n.SH NAME\ngen \\- %s\n.SH SYNOPSIS\n.B ", GEN_VERSION, summary);
    roff(out, synopsis);
    bytes_printf(out, "\n.SH DESCRIPTION\n");
    roff(out, about);
    bytes_printf(out, "\n.SH OPTIONS\n");
    for (int g = 0; g < N_GROUPS; g++) {
        bytes_printf(out, ".SS %s\n", option_groups[g][1]);
        for (int i = 0; i < n_options; i++)
            if ((int)option_table[i].group == g)
                man_entry(out, heading(&option_table[i], left), option_table[i].help, preset(&option_table[i]));
    }
    bytes_printf(out, ".SH EXAMPLES\n");
    for (size_t i = 0; i < COUNT(examples); i++) man_entry(out, examples[i][0], examples[i][1], NULL);
    bytes_printf(out, ".SH ENVIRONMENT\n");
    for (size_t i = 0; i < COUNT(variables); i++) man_entry(out, variables[i][0], variables[i][1], NULL);
    bytes_printf(out, ".SH EXIT STATUS\n");
    for (size_t i = 0; i < COUNT(codes); i++) man_entry(out, codes[i][0], codes[i][1], NULL);
}

/* ---- Markdown */

/* Adds text for a cell of a table. */
static void cell(struct bytes *out, const char *text)
{
    for (; *text; text++) {
        if (strchr("|\\*<", *text)) bytes_add(out, "\\", 1);
        bytes_add(out, text, 1);
    }
}

static void markdown(struct bytes *out)
{
    char left[120];
    for (int g = 0; g < N_GROUPS; g++) {
        bytes_printf(out, "%s**%s**\n\n| option | meaning | default |\n|---|---|---|\n", g ? "\n" : "",
                     option_groups[g][1]);
        for (int i = 0; i < n_options; i++) {
            const struct option_row *row = &option_table[i];
            if ((int)row->group != g) continue;
            bytes_printf(out, "| `");
            for (const char *c = heading(row, left); *c; c++) bytes_printf(out, *c == '|' ? "\\|" : "%c", *c);
            bytes_printf(out, "` | ");
            cell(out, row->help);
            bytes_printf(out, " | %s |\n", preset(row) ? preset(row) : "");
        }
    }
}

bool usage_help(struct bytes *out, const char *topic, struct error *e)
{
    int group = 0;
    if (!topic) {
        help_all(out);
    } else if (strcmp(topic, "man") == 0) {
        man_page(out);
    } else if (strcmp(topic, "markdown") == 0) {
        markdown(out);
    } else {
        while (group < N_GROUPS && strcmp(option_groups[group][0], topic) != 0) group++;
        if (group == N_GROUPS) {
            struct bytes all = { 0 };
            for (int g = 0; g < N_GROUPS; g++) bytes_printf(&all, "%s, ", option_groups[g][0]);
            fail(e, GEN_USAGE, "--help '%s': the topics are %sman and markdown", topic, all.data ? all.data : "");
            bytes_free(&all);
            return false;
        }
        help_group(out, group);
    }
    return out->len > 0 || fail(e, GEN_RUN, "cannot allocate memory for the help text");
}

/* ---- completions */

enum complete { COMPLETE_NOTHING, COMPLETE_FILES, COMPLETE_WORDS };

static enum complete completes(const struct option_row *row)
{
    if (!row->arg) return COMPLETE_NOTHING;
    if (strstr(row->arg, "FILE") || strcmp(row->arg, "DIR") == 0) return COMPLETE_FILES;
    return strchr(row->arg, '|') ? COMPLETE_WORDS : COMPLETE_NOTHING;
}

/* "a|b|c" with another separator; a last "|N" stands for any number. */
static void words(struct bytes *out, const char *choices)
{
    for (; *choices && strcmp(choices, "|N") != 0; choices++) bytes_add(out, *choices == '|' ? " " : choices, 1);
}

/* The option as it is typed: -m and --model, with `between` between them. */
static void spellings(struct bytes *out, const struct option_row *row, const char *between)
{
    char name[40];
    if (row->letter) bytes_printf(out, "-%c%s", row->letter, between);
    bytes_printf(out, "%s", option_display(row, name));
}

static void bash(struct bytes *out)
{
    bytes_printf(out, "# bash completion of gen: source <(gen --completion bash)\n_gen()\n{\n"
                      "    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]}\n    COMPREPLY=()\n"
                      "    case $before in\n");
    for (int i = 0; i < n_options; i++) {
        const struct option_row *row = &option_table[i];
        bool topic = strcmp(row->name, "help") == 0;
        if (!row->arg || (row->arg[0] == '[' && !topic)) continue;
        bytes_printf(out, "    ");
        spellings(out, row, "|");
        if (topic || completes(row) == COMPLETE_WORDS) {
            bytes_printf(out, ") COMPREPLY=($(compgen -W '");
            for (int g = 0; topic && g < N_GROUPS; g++) bytes_printf(out, "%s ", option_groups[g][0]);
            words(out, topic ? "man|markdown" : row->arg);
            bytes_printf(out, "' -- \"$word\")); return ;;\n");
        } else {
            bytes_printf(out, completes(row) == COMPLETE_FILES ? ") compopt -o default; return ;;\n" : ") return ;;\n");
        }
    }
    bytes_printf(out, "    esac\n    if [[ $word == -* ]]; then\n        COMPREPLY=($(compgen -W '");
    for (int i = 0; i < n_options; i++) {
        if (i) bytes_add(out, " ", 1);
        spellings(out, &option_table[i], " ");
    }
    bytes_printf(out, "' -- \"$word\"))\n    else\n        compopt -o default\n    fi\n}\ncomplete -F _gen gen\n");
}

/* The first sentence of the help, without characters that mean something to the shells in '...' and [...]. */
static void brief(struct bytes *out, const char *help)
{
    for (; *help && !(*help == '.' && (help[1] == ' ' || !help[1])); help++)
        if (*help == ':') bytes_add(out, ",", 1);
        else if (!strchr("'[]\\", *help)) bytes_add(out, help, 1);
}

static void zsh(struct bytes *out)
{
    bytes_printf(out, "#compdef gen\n# zsh completion of gen: gen --completion zsh > \"${fpath[1]}/_gen\"\n"
                      "_arguments \\\n");
    for (int i = 0; i < n_options; i++) {
        const struct option_row *row = &option_table[i];
        for (int letter = row->letter != 0; letter >= 0; letter--) {
            char name[40];
            if (letter) bytes_printf(out, "  '*-%c[", row->letter);
            else bytes_printf(out, "  '*%s[", option_display(row, name));
            brief(out, row->help);
            bytes_printf(out, "]");
            if (row->arg) bytes_printf(out, row->arg[0] == '[' ? "::value:" : ":value:");
            if (completes(row) == COMPLETE_FILES) bytes_printf(out, "_files");
            if (completes(row) == COMPLETE_WORDS) bytes_printf(out, "("), words(out, row->arg), bytes_printf(out, ")");
            bytes_printf(out, "' \\\n");
        }
    }
    bytes_printf(out, "  '*:word:(-)'\n");
}

static void fish(struct bytes *out)
{
    bytes_printf(out, "# fish completion of gen: gen --completion fish | source\ncomplete -c gen -f\n");
    for (int i = 0; i < n_options; i++) {
        const struct option_row *row = &option_table[i];
        char name[40];
        bool old = option_display(row, name)[1] != '-';          /* -ctk: one dash, several letters */
        bytes_printf(out, "complete -c gen -%c %s", old ? 'o' : 'l', row->name);
        if (row->letter) bytes_printf(out, " -s %c", row->letter);
        if (completes(row) == COMPLETE_FILES) bytes_printf(out, " -rF");
        else if (row->arg && row->arg[0] != '[') bytes_printf(out, " -x");
        if (completes(row) == COMPLETE_WORDS) bytes_printf(out, " -a '"), words(out, row->arg), bytes_printf(out, "'");
        bytes_printf(out, " -d '");
        brief(out, row->help);
        bytes_printf(out, "'\n");
    }
}

bool usage_completion(struct bytes *out, int shell, struct error *e)
{
    if (shell == SHELL_BASH) bash(out);
    else if (shell == SHELL_ZSH) zsh(out);
    else fish(out);
    return out->len > 0 || fail(e, GEN_RUN, "cannot allocate memory for the completions");
}
