/*
 * `cachectl bench NAME`: the list of benchmarks and their flags.
 *
 * Each one measures against anchors of the same run and prints ratios; a missed target is printed
 * as missed and does not change the exit code.
 */

#include "kvstore/base/bytes.h"
#include "kvstore/base/limits.h"
#include "tools/cachectl/bench_call.h"
#include "tools/cachectl/bench_gemm.h"
#include "tools/cachectl/bench_list.h"
#include "tools/cachectl/commands.h"
#include "tools/cachectl/spawn.h"
#include "tools/mkstate_content.h"

#include <stdio.h>
#include <string.h>

/* What --help says, of all and of one. */
#define TEXT_RPC                                                                                   \
    "rpc           Lookup over a unix socket beside an echo over bare gRPC C core and two\n"       \
    "              hand-overs between threads; at most 1.10 at p50.  Starts its own daemon.\n"
#define TEXT_GEMM                                                                                  \
    "gemm          matrix products on weights as stored beside oneDNN's bf16 product, one\n"       \
    "              thread; at least 0.90 of it from 32 rows on\n"
#define TEXT_PREFILL "prefill       a prompt through CED beside all layers on every token\n"
#define TEXT_THREADS "threads       prefill with two threads beside one\n"
#define TEXT_RESUME                                                                                \
    "resume        50 new tokens after EXACT and REPLAY beside a session that stayed live\n"
#define TEXT_DECODE "decode        16 sessions sharing passes beside one\n"
#define TEXT_DRAFT                                                                                 \
    "draft         one session with engine.draft = auto beside off; starts its own daemons\n"
#define TEXT_BATCH_REPLAY                                                                          \
    "batch-replay  16 sessions without windows back together, beside one long prompt and\n"        \
    "              one by one\n"
#define TEXT_FILL                                                                                  \
    "fill          saves --bytes N, more than there is room for, and says what was evicted and\n"  \
    "              refused; with --dir through a daemon of its own that keeps its state there\n"   \
    "              (all defaults but for the synthetic backend), else through the one at\n"        \
    "              --endpoint.  Ends with an error if a save was refused or failed.\n"
#define TEXT_RESTART                                                                               \
    "restart       a daemon on a directory of mkstate, killed with -9 under load and started\n"    \
    "              again: time to ready and to the first hit, memory; 1,000,000 checkpoints\n"     \
    "              (--quick: 100,000) are made where no --dir is given\n"
#define TEXT_SSD_READ                                                                              \
    "ssd-read      sessions of 1k, 16k and 200k tokens from SSD beside fio, one thread; at\n"      \
    "              least 0.97 of its speed, and 0.80 of that if encrypted.  Two stores of its "    \
    "own\n"                                                                                        \
    "              in TMPDIR, 1.2 GB.\n"
#define TEXT_SSD_COMMIT                                                                            \
    "ssd-commit    checkpoints of 8 writers acknowledged on SSD beside fio write + fdatasync;\n"   \
    "              at least 0.90 of it.  A store of its own in TMPDIR, 1.2 GB.\n"
#define TEXT_ENGINE                                                                                \
    "\nThe engine's benchmarks run on the model `small` with random weights, in this process\n"    \
    "where nothing else is said.\n"
#define TEXT_ALL                                                                                   \
    "A target that is missed is reported as missed; the exit code stays 0.  A benchmark that is\n" \
    "ended (Ctrl-C) says what it has measured so far, and leaves no files and no daemon."

/* Flags that not every benchmark takes. */
enum {
    TAKES_QUICK = 1,
    TAKES_DAEMON = 2,
    TAKES_DIR = 4,
    TAKES_SEED = 8,
    TAKES_BYTES = 16,
    TAKES_OPS = 32,
    TAKES_HOT = 64,
    TAKES_MODEL = 128,
    TAKES_THREADS = 256,
    TAKES_ENGINE = TAKES_QUICK | TAKES_MODEL | TAKES_THREADS,
};
#define NOT_GIVEN UINT64_MAX /* No number of the command line is. */

static const char *const flags[] = {
    "--quick",          "--daemon", "--dir",   "--seed",    "--bytes",
    "--ops-token-file", "--hot",    "--model", "--threads",
};

static const struct {
    const char *name, *help, *example;
    unsigned takes;
    int (*run)(struct bench_progress *progress, const struct bench_engine_options *options);
} benches[] = {
    {"rpc", TEXT_RPC "\n" TEXT_ALL, "cachectl bench rpc --quick", TAKES_QUICK | TAKES_DAEMON, NULL},
    {"gemm", TEXT_GEMM "\n" TEXT_ALL, "cachectl bench gemm --quick", TAKES_QUICK | TAKES_HOT, NULL},
    {"fill", TEXT_FILL "\n" TEXT_ALL, "cachectl bench fill --dir /var/lib/scratch --bytes 3GiB",
     TAKES_DAEMON | TAKES_DIR | TAKES_BYTES | TAKES_OPS, NULL},
    {"restart", TEXT_RESTART "\n" TEXT_ALL, "cachectl bench restart --quick",
     TAKES_QUICK | TAKES_DAEMON | TAKES_DIR | TAKES_SEED, NULL},
    {"prefill", TEXT_PREFILL TEXT_ENGINE TEXT_ALL, "cachectl bench prefill --quick", TAKES_ENGINE,
     bench_prefill},
    {"threads", TEXT_THREADS TEXT_ENGINE TEXT_ALL, "cachectl bench threads --quick",
     TAKES_QUICK | TAKES_MODEL, bench_threads},
    {"resume", TEXT_RESUME TEXT_ENGINE TEXT_ALL, "cachectl bench resume --quick", TAKES_ENGINE,
     bench_resume},
    {"decode", TEXT_DECODE TEXT_ENGINE TEXT_ALL, "cachectl bench decode --quick", TAKES_ENGINE,
     bench_decode},
    {"draft", TEXT_DRAFT TEXT_ENGINE TEXT_ALL, "cachectl bench draft --quick",
     TAKES_QUICK | TAKES_MODEL, bench_draft},
    {"batch-replay", TEXT_BATCH_REPLAY TEXT_ENGINE TEXT_ALL, "cachectl bench batch-replay --quick",
     TAKES_ENGINE, bench_batch_replay},
    {"ssd-read", TEXT_SSD_READ "\n" TEXT_ALL, "cachectl bench ssd-read --quick", TAKES_QUICK, NULL},
    {"ssd-commit", TEXT_SSD_COMMIT "\n" TEXT_ALL, "cachectl bench ssd-commit --quick", TAKES_QUICK,
     NULL},
};

/* A flag that this benchmark would not look at is a mistake of whoever gave it. */
static bool check_flags(const char *name, unsigned given)
{
    char list[128] = "";
    unsigned takes = given;
    size_t used = 0;

    for (size_t i = 0; i < KV_ARRAY_COUNT(benches); i++)
        if (strcmp(name, benches[i].name) == 0) takes = benches[i].takes;
    for (size_t i = 0; i < KV_ARRAY_COUNT(flags); i++)
        if ((takes & (1u << i)) != 0)
            used += (size_t)snprintf(list + used, sizeof(list) - used, "%s%s", used > 0 ? ", " : "",
                                     flags[i]);
    for (size_t i = 0; i < KV_ARRAY_COUNT(flags); i++)
        if ((given & ~takes & (1u << i)) != 0) {
            ctl_error("bench %s does nothing with %s; its flags are %s", name, flags[i], list);
            return false;
        }
    return true;
}

/* Runs the benchmark `name`. */
static int run_named(struct bench_progress *progress, const char *name,
                     const struct bench_engine_options *options,
                     const struct bench_restart_options *restart, bool hot)
{
    if (strcmp(name, "gemm") == 0) return bench_gemm(progress, options->quick, hot);
    if (strcmp(name, "rpc") == 0) return bench_rpc(progress, restart->daemon, options->quick);
    if (strcmp(name, "restart") == 0) return bench_restart(progress, restart);
    if (strcmp(name, "ssd-read") == 0) return bench_ssd_read(progress, options->quick);
    if (strcmp(name, "ssd-commit") == 0) return bench_ssd_commit(progress, options->quick);
    for (size_t i = 0; i < KV_ARRAY_COUNT(benches); i++)
        if (strcmp(name, benches[i].name) == 0) return benches[i].run(progress, options);
    ctl_error("no benchmark is called %.64s: see cachectl bench --help", name);
    return CLIENT_EXIT_NOT_FOUND;
}

/* The command as --help shows it: with the text of the benchmark that argv names, if it names one.
 */
static struct command named_command(const struct command *command, int argc, char **argv)
{
    struct command named = *command;

    for (int word = 0; word < argc; word++)
        for (size_t i = 0; i < KV_ARRAY_COUNT(benches); i++)
            if (strcmp(argv[word], benches[i].name) == 0) {
                named.arguments = benches[i].name;
                named.details = benches[i].help;
                named.example = benches[i].example;
            }
    return named;
}

static unsigned given_flags(const struct bench_engine_options *options,
                            const struct bench_restart_options *restart,
                            const struct bench_fill_options *fill, bool hot)
{
    return (options->quick ? TAKES_QUICK : 0u) | (restart->daemon != NULL ? TAKES_DAEMON : 0u) |
           (restart->dir != NULL ? TAKES_DIR : 0u) |
           (restart->seed != NOT_GIVEN ? TAKES_SEED : 0u) |
           (fill->bytes != NULL ? TAKES_BYTES : 0u) |
           (fill->ops_token_file != NULL ? TAKES_OPS : 0u) | (hot ? TAKES_HOT : 0u) |
           (options->model_dir != NULL ? TAKES_MODEL : 0u) |
           (options->threads != NOT_GIVEN ? TAKES_THREADS : 0u);
}

static int run(struct ctl *ctl, const struct command *command, int argc, char **argv)
{
    struct bench_engine_options options = {.threads = NOT_GIVEN};
    struct bench_restart_options restart = {.seed = NOT_GIVEN};
    struct bench_progress progress;
    struct bench_fill_options fill = {.bytes = NULL};
    bool hot = false;
    int code = 0;

    const struct arg args[] = {
        {"--quick", ARG_FLAG, NULL, "few and short rounds, fewer on a slow machine: a minute",
         &options.quick},
        {"--daemon", ARG_TEXT, "PATH",
         "rpc, restart, fill: its program (../cached/cached beside cachectl)", &restart.daemon},
        {"--dir", ARG_TEXT, "DIR",
         "restart: a directory of mkstate; it stays, a little fuller; fill: state of its daemon",
         &restart.dir},
        {"--seed", ARG_COUNT, "K", "restart: mkstate's --seed of DIR (default 1)", &restart.seed},
        {"--bytes", ARG_TEXT, "N", "fill: how much to save: 3GiB", &fill.bytes},
        {"--ops-token-file", ARG_TEXT, "F", "fill: token with role ops, where there is no --dir",
         &fill.ops_token_file},
        {"--hot", ARG_FLAG, NULL, "gemm: one matrix again and again, not a set of them", &hot},
        {"--model", ARG_TEXT, "DIR", "engine benchmarks: this model (default: `small`, made anew)",
         &options.model_dir},
        {"--threads", ARG_COUNT, "N",
         "prefill, resume, decode, batch-replay: threads (default 0: one per core)",
         &options.threads},
    };
    const struct command named = named_command(command, argc, argv);
    if (ctl_parse(ctl, &named, args, KV_ARRAY_COUNT(args), argc, argv, &code) < 0) return code;
    if (!check_flags(argv[0], given_flags(&options, &restart, &fill, hot)))
        return CLIENT_EXIT_USAGE;
    if (restart.seed == NOT_GIVEN) restart.seed = MKSTATE_SEED_DEFAULT;
    if (options.threads == NOT_GIVEN) options.threads = 0;
    if (options.threads > KV_ENGINE_THREADS_MAX) {
        ctl_error("--threads must be at most %u, found %llu", KV_ENGINE_THREADS_MAX,
                  (unsigned long long)options.threads);
        return CLIENT_EXIT_USAGE;
    }
    fill.daemon = restart.daemon;
    fill.dir = restart.dir;
    bench_progress_start(&progress, ctl);
    restart.quick = options.quick;
    code = strcmp(argv[0], "fill") == 0 ? bench_fill(&progress, &fill)
                                        : run_named(&progress, argv[0], &options, &restart, hot);
    bench_progress_stop(&progress);
    if (code != 0 && spawn_interrupted()) bench_say_interrupted(&progress);
    return code;
}

static int run_echo(struct ctl *ctl, const struct command *command, int argc, char **argv)
{
    uint64_t bytes = 0;
    int code = 0;

    if (ctl_parse(ctl, command, NULL, 0, argc, argv, &code) < 0) return code;
    if (!client_endpoint_valid(argv[0]) || !ctl_parse_count(argv[1], 0, 1 << 20, &bytes))
        return CLIENT_EXIT_USAGE;
    return bench_echo_serve(argv[0], (size_t)bytes);
}

const struct command command_bench = {
    .name = "bench",
    .arguments = "NAME",
    .summary = "one named benchmark, against anchors of the same run",
    .details = TEXT_RPC TEXT_GEMM TEXT_RESTART TEXT_PREFILL TEXT_THREADS TEXT_RESUME TEXT_DECODE
        TEXT_DRAFT TEXT_BATCH_REPLAY TEXT_SSD_READ TEXT_SSD_COMMIT TEXT_FILL TEXT_ENGINE TEXT_ALL,
    .example = "cachectl bench rpc --quick",
    .arguments_min = 1,
    .arguments_max = 1,
    .run = run,
};

/* The anchor's server, started by the benchmark itself; not listed. */
const struct command command_bench_echo = {
    .name = "bench-echo",
    .arguments = "ENDPOINT BYTES",
    .arguments_min = 2,
    .arguments_max = 2,
    .run = run_echo,
};
