/*
 * cached: arguments, configuration, start, wait, stop.
 *
 * Exit codes: 0 stopped as asked; 2 refused to start (one sentence on standard error says why);
 * 3 did not stop within 10 s.  The environment is not read: what a daemon does is in its command
 * line and its files.
 */

#include "cached/config.h"
#include "cached/daemon.h"
#include "cached/version.h"
#include "kvstore/base/bytes.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { EXIT_REFUSED = 2, SENTENCE_MS_MAX = 2000 };

struct arguments {
    const char *config_file;
    const char *check_file;
    const char *plant;
    bool print_config;
    bool help;
    bool version;
};

static const char usage[] =
    "Usage: cached [--config FILE] [--SECTION.KEY=VALUE ...]\n"
    "       cached --check-config FILE | --print-config | --version | --help\n"
    "\n"
    "Keeps the attention state of agent conversations and serves it over gRPC.\n"
    "\n"
    "  --config FILE         read settings from FILE, then from FILE.d/NAME.conf by name\n"
    "  --SECTION.KEY=VALUE   set one value; stronger than any file\n"
    "  --check-config FILE   say whether every key and value in FILE is right\n"
    "  --print-config        print every setting with its meaning, range and value\n"
    "  --version             print version, commit and compiler\n"
    "\n"
    "Example:\n"
    "  cached --state.dir=/tmp/cached --engine.model_dir=/tmp/tiny \\\n"
    "         --server.listen=127.0.0.1:7070 --server.token_file=/tmp/tokens\n";

/* The sentence must not hold the exit up, where standard error is a pipe that nobody reads. */
static int refuse(const char *sentence)
{
    struct pollfd poll_fd = {.fd = STDERR_FILENO, .events = POLLOUT};
    if (poll(&poll_fd, 1, SENTENCE_MS_MAX) == 0) return EXIT_REFUSED;
    (void)fprintf(stderr, "cached: %s\n", sentence);
    return EXIT_REFUSED;
}

/* Takes `--name VALUE` or `--name=VALUE`.  false: another argument. */
static bool take_value(int argc, char **argv, int *index, const char *name, const char **ret_value)
{
    const char *argument = argv[*index];
    const size_t count = strlen(name);
    if (strncmp(argument, name, count) != 0) return false;
    if (argument[count] == '=') {
        *ret_value = argument + count + 1;
        return true;
    }
    if (argument[count] != '\0') return false;
    *ret_value = *index + 1 < argc ? argv[++*index] : ""; /* Refused by parse(). */
    return true;
}

/* What is not a setting; settings are applied after the file they override. */
static bool parse(int argc, char **argv, struct arguments *arguments, const char **flags,
                  int *ret_flag_count, struct kv_error *err)
{
    int flag_count = 0;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            arguments->help = true;
        } else if (strcmp(argv[i], "--version") == 0) {
            arguments->version = true;
        } else if (strcmp(argv[i], "--print-config") == 0) {
            arguments->print_config = true;
        } else if (take_value(argc, argv, &i, "--check-config", &arguments->check_file) ||
                   take_value(argc, argv, &i, "--config", &arguments->config_file)) {
            continue;
#ifdef CACHED_TEST_HOOKS
        } else if (take_value(argc, argv, &i, "--plant", &arguments->plant)) {
            continue;
#endif
        } else if (strncmp(argv[i], "--", 2) == 0) {
            flags[flag_count++] = argv[i] + 2;
        } else {
            (void)KV_FAIL(err, KV_INVALID, "what is \"%.64s\"?  See cached --help", argv[i]);
            return false;
        }
    }
    *ret_flag_count = flag_count;
    const struct {
        const char *name, *value;
    } values[] = {
        {"--config", arguments->config_file},
        {"--check-config", arguments->check_file},
    };
    for (size_t i = 0; i < KV_ARRAY_COUNT(values); i++) {
        if (values[i].value == NULL || values[i].value[0] != '\0') continue;
        (void)KV_FAIL(err, KV_INVALID, "%s needs a file: %s FILE", values[i].name, values[i].name);
        return false;
    }
    return true;
}

static kv_status load(struct cached_config *config, const char *file, const char *const *flags,
                      int flag_count, struct kv_error *err)
{
    config_defaults(config);
    if (file != NULL) {
        const kv_status status = config_read(config, file, err);
        if (status != KV_OK) return status;
    }
    for (int i = 0; i < flag_count; i++) {
        const kv_status status = config_flag(config, flags[i], err);
        if (status != KV_OK) return status;
    }
    return KV_OK;
}

static int serve(const struct cached_config *config, const char *plant)
{
    struct daemon *daemon;
    struct kv_error err = {0};
    const struct daemon_options options = {.config = config, .plant = plant};

    daemon_block_signals();
    if (daemon_start(&options, &daemon, &err) != KV_OK) return refuse(err.text);
    daemon_wait(daemon);
    daemon_destroy(daemon);
    return EXIT_SUCCESS;
}

static int run(const struct arguments *arguments, struct cached_config *config,
               const char *const *flags, int flag_count)
{
    struct kv_error err = {0};
    const char *file =
        arguments->check_file != NULL ? arguments->check_file : arguments->config_file;

    if (load(config, file, flags, flag_count, &err) != KV_OK) return refuse(err.text);
    if (arguments->print_config) {
        config_print(config, stdout);
        return EXIT_SUCCESS;
    }
    if (config_check(config, &err) != KV_OK) return refuse(err.text);
    if (arguments->check_file != NULL) {
        (void)printf("%s: ok\n", arguments->check_file);
        return EXIT_SUCCESS;
    }
    return serve(config, arguments->plant);
}

int main(int argc, char **argv)
{
    struct arguments arguments = {0};
    struct kv_error err = {0};
    int flag_count = 0;
    int code = EXIT_REFUSED;
    const char **flags = calloc((size_t)argc, sizeof(*flags));
    struct cached_config *config = calloc(1, sizeof(*config));

    if (flags == NULL || config == NULL) {
        (void)refuse("out of memory");
    } else if (!parse(argc, argv, &arguments, flags, &flag_count, &err)) {
        (void)refuse(err.text);
    } else if (arguments.help) {
        code = fputs(usage, stdout) < 0;
    } else if (arguments.version) {
        code = printf("cached %s (commit %s, compiler %s)\n", CACHED_VERSION, CACHED_COMMIT,
                      __VERSION__) < 0;
    } else {
        code = run(&arguments, config, flags, flag_count);
    }
    free(config);
    free(flags);
    return code;
}
