/*
 * kvdump: what a stopped daemon's state directory holds, and whether all of it is right.
 */

#include "tools/kvdump/kvdump.h"
#include "tools/version.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

static void print_help(FILE *out)
{
    (void)fprintf(
        out,
        "Usage: kvdump print DIR [--session S] [--json]\n"
        "       kvdump verify DIR [--master-key FILE]\n"
        "       kvdump --help | --version\n"
        "\n"
        "Reads the state directory (state.dir) of a daemon that is stopped.  Nothing is written "
        "to\n"
        "it, and no token is printed.\n"
        "\n"
        "  print       layout version, model, segments with their pages, counts\n"
        "  --session S also the checkpoints and pages of session S, or USER/S\n"
        "  --json      the same as one JSON document\n"
        "  verify      reads every record and every page and compares them: one line for each\n"
        "              damage, with the page, its cause and how many checkpoints need it\n"
        "  --master-key FILE\n"
        "              opens an encrypted directory: token ids and rows are compared, too\n"
        "  --version   version, commit and layout version of this program\n"
        "\n"
        "Exit codes:\n"
        "  0 ok              2 wrong usage                 5 in use by a daemon\n"
        "  1 failed          3 no such directory, session  7 damage found\n"
        "\n"
        "Example:\n"
        "  kvdump verify /var/lib/cached\n");
}

static int usage_error(const char *text, const char *value)
{
    dump_error("%s%s; `kvdump --help` says how it is used", text, value);
    return DUMP_USAGE;
}

struct choice {
    const char *command, *dir, *session, *master_key;
    bool json;
};

/* DUMP_OK: run it.  Flags may stand anywhere behind the command. */
static int read_arguments(int argc, char **argv, struct choice *choice)
{
    if (argc < 2) return usage_error("no command", "");
    choice->command = argv[1];
    if (strcmp(argv[1], "print") != 0 && strcmp(argv[1], "verify") != 0)
        return usage_error("unknown command ", argv[1]);
    for (int i = 2; i < argc; i++) {
        const bool is_print = strcmp(choice->command, "print") == 0;
        if (is_print && strcmp(argv[i], "--json") == 0) {
            choice->json = true;
        } else if (is_print && strcmp(argv[i], "--session") == 0) {
            if (i + 1 == argc) return usage_error("--session: no session", "");
            choice->session = argv[++i];
        } else if (is_print && strncmp(argv[i], "--session=", 10) == 0) {
            choice->session = argv[i] + 10;
        } else if (!is_print && strcmp(argv[i], "--master-key") == 0) {
            if (i + 1 == argc) return usage_error("--master-key: no file", "");
            choice->master_key = argv[++i];
        } else if (!is_print && strncmp(argv[i], "--master-key=", 13) == 0) {
            choice->master_key = argv[i] + 13;
        } else if (argv[i][0] == '-') {
            return usage_error("unknown flag ", argv[i]);
        } else if (choice->dir != NULL) {
            return usage_error("more than one directory: ", argv[i]);
        } else {
            choice->dir = argv[i];
        }
    }
    if (choice->dir == NULL || choice->dir[0] == '\0') return usage_error("no directory", "");
    return DUMP_OK;
}

static int run(const struct choice *choice)
{
    const bool verify = strcmp(choice->command, "verify") == 0;
    struct dump dump;
    int code = dump_open(&dump, choice->dir, choice->master_key, verify ? stdout : stderr);
    if (code == DUMP_OK)
        code = verify ? dump_verify(&dump) : dump_print(&dump, choice->session, choice->json);
    dump_close(&dump);
    return code;
}

/* That it could not be written is a failure, but not for a pipe whose reader has seen enough. */
static int flush(int code)
{
    errno = 0;
    if (fflush(stdout) == 0 && !ferror(stdout)) return code;
    if (errno != EPIPE) dump_error("stdout: %s", errno != 0 ? strerror(errno) : "write error");
    return code == DUMP_OK ? DUMP_FAILED : code;
}

int main(int argc, char **argv)
{
    struct choice choice = {0};
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            print_help(stdout);
            return flush(DUMP_OK);
        }
        if (strcmp(argv[i], "--version") == 0) {
            (void)printf("kvdump %s, commit %s, layout version %u\n", KVDUMP_VERSION,
                         CACHECTL_COMMIT, KV_LAYOUT_VERSION);
            return flush(DUMP_OK);
        }
    }
    const int code = read_arguments(argc, argv, &choice);
    return code == DUMP_OK ? flush(run(&choice)) : code;
}
