/*
 * cachectl: the operator's and developer's tool of the daemon.
 *
 * Reads the global flags before the command, finds the command (one or two words) and hands it the
 * rest.  Its variables are CACHED_ENDPOINT and CACHED_TOKEN_FILE, and the convention NO_COLOR;
 * flags win over them.
 */

#include "tools/cachectl/ctl.h"
#include "tools/cachectl/spawn.h"
#include "tools/version.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SIGNALLED 128 /* What shells add a signal to. */

static void print_help(void)
{
    (void)printf("Usage: cachectl [flags] COMMAND [arguments] [flags]\n\nCommands:\n");
    for (size_t i = 0; commands[i]; i++) {
        if (!commands[i]->summary) continue; /* Not for people: a part of a benchmark. */
        (void)printf("  %-16s %s\n", commands[i]->name, commands[i]->summary);
    }
    (void)printf("\n");
    ctl_print_globals();
    (void)printf("  --version        version and commit of this program\n"
                 "\nVariables: CACHED_ENDPOINT and CACHED_TOKEN_FILE; flags win over them.\n"
                 "\nExit codes:\n"
                 "  0 ok              3 not found              6 quota or capacity\n"
                 "  1 failed          4 denied                 7 corruption found\n"
                 "  2 wrong usage     5 unavailable, retry\n"
                 "\n`cachectl COMMAND --help` has an example of each command.\n"
                 "\nExample:\n  cachectl status\n");
}

/* The command named by the first words of argv; *ret_words says how many. */
static const struct command *find(int argc, char **argv, int *ret_words)
{
    for (size_t i = 0; commands[i]; i++) {
        const char *name = commands[i]->name;
        const char *space = strchr(name, ' ');
        const size_t first = space ? (size_t)(space - name) : strlen(name);
        if (strlen(argv[0]) != first || strncmp(argv[0], name, first) != 0) continue;
        *ret_words = space ? 2 : 1;
        if (!space) return commands[i];
        if (argc > 1 && strcmp(argv[1], space + 1) == 0) return commands[i];
    }
    return NULL;
}

/* "cachectl session", "cachectl session --help": what can follow.  false: no such first word. */
static bool print_verbs(const char *noun, FILE *out)
{
    const size_t count = strlen(noun);
    bool found = false;

    for (size_t i = 0; commands[i]; i++) {
        if (strncmp(commands[i]->name, noun, count) != 0 || commands[i]->name[count] != ' ')
            continue;
        if (!found) (void)fprintf(out, "Usage: cachectl %s VERB\n\n", noun);
        (void)fprintf(out, "  %-16s %s\n", commands[i]->name, commands[i]->summary);
        found = true;
    }
    return found;
}

static int unknown(int argc, char **argv)
{
    const char *names[64];
    char text[64];
    size_t count = 0;

    const bool help = argc > 1 && strcmp(argv[1], "--help") == 0;
    if (print_verbs(argv[0], help ? stdout : stderr)) {
        return help ? CLIENT_EXIT_OK : CLIENT_EXIT_USAGE;
    }
    for (size_t i = 0; commands[i] && count < 64; i++)
        names[count++] = commands[i]->name;
    (void)snprintf(text, sizeof(text), "%s", argv[0]);
    const char *nearest = ctl_nearest(text, names, count);
    ctl_error("unknown command %s%s%s%s; `cachectl --help` lists them", text,
              nearest ? " (did you mean " : "", nearest ? nearest : "", nearest ? "?)" : "");
    return CLIENT_EXIT_USAGE;
}

static int run(struct ctl *ctl, int argc, char **argv)
{
    int words = 0;

    const struct command *command = find(argc, argv, &words);
    if (!command) return unknown(argc, argv);
    if (!command->own_flags) return command->run(ctl, command, argc - words, argv + words);

    /* --json and --quiet given before the command belong to it as well. */
    char *own[64] = {0};
    char json_flag[] = "--json", quiet_flag[] = "--quiet";
    int count = 0;
    for (int i = words - 1; i < argc && count < 61; i++)
        own[count++] = argv[i];
    if (ctl->json) own[count++] = json_flag;
    if (ctl->quiet) own[count++] = quiet_flag;
    return command->run(ctl, command, count, own);
}

/* What was printed is written out; that it could not be is a failure, told here for all commands.
 * Not for a pipe whose reader has seen enough. */
static int flush(int code)
{
    errno = 0;
    if (fflush(stdout) == 0 && !ferror(stdout)) return code;
    if (errno != EPIPE) ctl_error("stdout: %s", errno != 0 ? strerror(errno) : "write error");
    return code == CLIENT_EXIT_OK ? CLIENT_EXIT_FAILED : code;
}

/* What a shell says of a program that a signal ended, also where the signal was held until files
 * and daemons were cleaned up. */
static int ended(int code)
{
    return code != CLIENT_EXIT_OK && spawn_interrupted() ? SIGNALLED + spawn_signal() : code;
}

int main(int argc, char **argv)
{
    const char *no_color = getenv("NO_COLOR");
    const bool terminal = isatty(STDOUT_FILENO) == 1;
    const char *endpoint = getenv("CACHED_ENDPOINT");
    struct ctl ctl = {
        .endpoint = endpoint && endpoint[0] ? endpoint : CTL_ENDPOINT_DEFAULT,
        .token_file = getenv("CACHED_TOKEN_FILE"),
        .timeout_ms = CTL_TIMEOUT_MS_DEFAULT,
        .terminal = terminal,
        .color = terminal && !(no_color && no_color[0]),
    };
    int code = CLIENT_EXIT_OK;
    int i = 1;

    /* A reader that has seen enough (`| head`) is no reason to die half way through a demo. */
    (void)signal(SIGPIPE, SIG_IGN);
    /* Nor is a file that may not grow (`ulimit -f`): EFBIG is told, and the rest is removed. */
    (void)signal(SIGXFSZ, SIG_IGN);
    if (ctl.token_file && ctl.token_file[0] == '\0') ctl.token_file = NULL;
    if (!client_endpoint_valid(ctl.endpoint)) {
        ctl_error("CACHED_ENDPOINT is neither unix:/path nor host:port");
        return CLIENT_EXIT_USAGE;
    }
    for (; i < argc && argv[i][0] == '-'; i++) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            print_help();
            return flush(CLIENT_EXIT_OK);
        }
        if (strcmp(argv[i], "--version") == 0) {
            (void)printf("cachectl %s (commit %s)\n", CACHECTL_VERSION, CACHECTL_COMMIT);
            return flush(CLIENT_EXIT_OK);
        }
        if (!ctl_parse_global(&ctl, argc, argv, &i, &code)) {
            ctl_error("unknown flag %s; `cachectl --help` lists them", argv[i]);
            code = CLIENT_EXIT_USAGE;
        }
        if (code != CLIENT_EXIT_OK) return code;
    }
    if (i == argc) {
        print_help();
        return flush(CLIENT_EXIT_USAGE);
    }
    return ended(flush(run(&ctl, argc - i, argv + i)));
}
