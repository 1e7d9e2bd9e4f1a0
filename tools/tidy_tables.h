#pragma once

/* What tidy.c checks, as data.  Paths are shell patterns below the repository, in which '*' also
 * matches '/'; each list ends with NULL.  Private to tidy.c. */

#include <stdbool.h>
#include <stddef.h>

/* Each has a sample in tests/tidy/bad/RULE that must be rejected for this rule and no other. */
static const char *const rules[] = {
    "function_length", "file_length",     "line_length", "whitespace", "include",
    "include_path",    "include_order",   "vendor",      "global",     "banned",
    "opening_comment", "pragma_once",     "braces",      "has_test",   "harness_end",
    "unreadable",      "nothing_checked", NULL,
};

static const char *const walked_folders[] = {
    "proto", "kvstore", "engine", "cached", "tools", "tests", NULL,
};

/* Samples that break the rules on purpose. */
static const char *const skipped_folders[] = {"tests/tidy", NULL};

/* May be longer than a file should: one long list that nobody reads as prose. */
static const char *const long_files[] = {NULL};

static const char *const rooted_includes[] = {
    "proto/*", "kvstore/*", "engine/*", "cached/*", "tools/*", "tests/*", NULL,
};

#define BASE "kvstore/base/*"
#define FORMAT "kvstore/format/*"
#define PLAN "kvstore/plan/*"
#define TIER "kvstore/tier/*"
#define TRANSPORT "kvstore/transport/*"
#define INDEX "kvstore/index/*"
#define STORE "kvstore/store/*"
#define PROTO "proto/*"

/* Who may include whom.  The first row whose `from` matches counts; a file's own header is always
 * allowed.  STYLE.md explains the rows that are wider than one would expect. */
struct layer_row {
    const char *from;
    const char *may[12];
};

static const struct layer_row layers[] = {
    {BASE, {BASE}},
    {FORMAT, {BASE, FORMAT}},
    {PLAN, {BASE, FORMAT, PLAN}},
    {TRANSPORT, {BASE, TRANSPORT}},
    {"kvstore/tier/tier_pool.*", {BASE, FORMAT, TIER, "kvstore/transport/transport.h"}},
    /* It asks how far ahead to make space, and when to erase. */
    {"kvstore/tier/ssd_ahead.c",
     {BASE, FORMAT, "kvstore/plan/erase.h", "kvstore/plan/prewrite.h", TIER}},
    {"kvstore/tier/ssd_internal.h", {BASE, FORMAT, "kvstore/plan/erase.h", TIER}},
    {TIER, {BASE, FORMAT, TIER}},
    /* An entry embeds its image and names its pages: their types and "none" are the tiers'. */
    {INDEX, {BASE, FORMAT, TIER, INDEX}},
    {STORE, {BASE, FORMAT, PLAN, TIER, INDEX, STORE}},
    {"engine/*", {BASE, FORMAT, "kvstore/plan/plan.h", "engine/*"}},
    /* Of the shard it sees the door: shard_post and shard_poke. */
    {"cached/rpc/*",
     {BASE, FORMAT, "kvstore/plan/plan.h", PROTO, "cached/rpc/*", "cached/request.h",
      "cached/auth.h", "cached/shard/shard.h"}},
    {"cached/shard/*",
     {BASE, FORMAT, PLAN, TIER, INDEX, STORE, "kvstore/transport/transport.h", "cached/shard/*",
      "cached/request.h", "cached/worker/worker.h"}},
    {"cached/worker/*",
     {BASE, FORMAT, "kvstore/plan/plan.h", "kvstore/tier/tier_hbm.h", "cached/worker/*",
      "engine/engine.h"}},
    {"cached/cluster/*", {BASE, FORMAT, TRANSPORT, PROTO, "cached/cluster/*"}},
    {"cached/obs/*", {BASE, "cached/obs/*"}},
    /* Builds every object and names the concrete tiers; the model is opened here as well. */
    {"cached/daemon.*",
     {BASE, FORMAT, TIER, TRANSPORT, "kvstore/index/manifest.h", "kvstore/store/store.h",
      "engine/engine.h", "cached/*"}},
    {"cached/request.*", {BASE, FORMAT, "kvstore/plan/plan.h", "cached/worker/worker.h"}},
    /* main.c and what it starts with: settings, tokens, the lock on the state. */
    {"cached/*",
     {BASE, FORMAT, "cached/config*", "cached/auth.h", "cached/state_lock.h", "cached/daemon.h",
      "cached/version.h"}},
    /* They read and make models by the engine's own list of what is in one; `model run` runs them
     * in its own process. */
    {"tools/mkmodel*", {BASE, FORMAT, "engine/model/*", "tools/*"}},
    {"tools/cachectl/model_*",
     {BASE, FORMAT, PROTO, "engine/model/*", "engine/engine.h", "engine/probe.h", "tools/*"}},
    /* It times the engine's kernels in its own process. */
    {"tools/cachectl/bench_gemm.c",
     {BASE, FORMAT, "engine/backend/kernels/*", "engine/model/quant.h", "tools/*"}},
    /* They drive a store in their own process. */
    {"tools/cachectl/bench_ssd*", {BASE, FORMAT, TIER, INDEX, STORE, "engine/engine.h", "tools/*"}},
    {"tools/cachectl/bench_*", {BASE, FORMAT, PROTO, "engine/engine.h", "tools/*"}},
    /* It reads a directory without a daemon: superblock and manifest as the store opens them. */
    {"tools/kvdump/*",
     {BASE, FORMAT, "kvstore/index/manifest.h", "kvstore/store/directory.h",
      "kvstore/tier/ssd_segment.h", "tools/*"}},
    /* It saves through the store, with the engine's rows, without a daemon. */
    {"tools/mkstate*", {BASE, FORMAT, "kvstore/store/store.h", "engine/engine.h", "tools/*"}},
    {"tools/*", {BASE, FORMAT, PROTO, "tools/*"}},
    {"tests/*", {"*"}},
};

/* Which files may include a vendor's header.  Of headers only those of cached/rpc and tools/client
 * do, which nobody else needs. */
struct vendor_row {
    const char *header;
    const char *may[6];
};

static const struct vendor_row vendors[] = {
    {"grpc/*", {"cached/rpc/*.[ch]", "tools/client/*.[ch]", "tools/cachectl/bench_*.c", "tests/*"}},
    {"protobuf-c/*", {"cached/rpc/*.[ch]", "tools/client/*.[ch]", "tools/cachectl/*.c", "tests/*"}},
    {"rocksdb/*", {"kvstore/index/manifest_rocks.c", "tests/*"}},
    {"liburing.h", {"kvstore/base/ring.c", "tests/*"}},
    {"openssl/*", {"kvstore/base/aead.c", "kvstore/base/digest.c", "cached/auth.c", "tests/*"}},
    {"jansson.h", {"engine/model/*.c", "tools/*.c", "tests/*"}},
    {"ini.h", {"cached/config.c"}},
    {"zstd.h", {"tools/cachectl/trace_*.c", "tests/*"}},
    {"zlib.h", {"tools/cachectl/trace_*.c", "tests/*"}},
    {"dnnl.h", {"tools/cachectl/bench_onednn.c"}},
    {"microhttpd.h", {NULL}},
    {"cmocka.h", {"tests/*"}},
};

/* C17, POSIX and Linux. */
static const char *const system_headers[] = {
    "assert.h",   "ctype.h",   "errno.h",     "float.h",       "inttypes.h",
    "limits.h",   "locale.h",  "math.h",      "setjmp.h",      "signal.h",
    "stdalign.h", "stdarg.h",  "stdatomic.h", "stdbool.h",     "stddef.h",
    "stdint.h",   "stdio.h",   "stdlib.h",    "stdnoreturn.h", "string.h",
    "time.h",     "uchar.h",   "wchar.h",     "wctype.h",      "arpa/*.h",
    "dirent.h",   "dlfcn.h",   "endian.h",    "fcntl.h",       "fnmatch.h",
    "getopt.h",   "glob.h",    "immintrin.h", "langinfo.h",    "libgen.h",
    "linux/*.h",  "malloc.h",  "net/*.h",     "netdb.h",       "netinet/*.h",
    "poll.h",     "pthread.h", "pwd.h",       "sched.h",       "semaphore.h",
    "spawn.h",    "strings.h", "sys/*.h",     "sysexits.h",    "syslog.h",
    "termios.h",  "unistd.h",  "x86intrin.h", "nmmintrin.h",   NULL,
};

/* Words with a better way.  `where`: only there; `but`: not there. */
struct banned_row {
    const char *word;
    bool is_prefix; /* Also longer words that start like this. */
    const char *where[4];
    const char *but[6];
    const char *why;
};

#define EVERYWHERE                                                                                 \
    {                                                                                              \
        "*"                                                                                        \
    }
#define LIBRARIES                                                                                  \
    {                                                                                              \
        "kvstore/*", "engine/*"                                                                    \
    }
/* The only places with a lock; anything else crosses threads by mailbox.  disk_pool.c: the threads
 * that stand in where the kernel refuses io_uring. */
#define LOCKS                                                                                      \
    {                                                                                              \
        "kvstore/base/mailbox.c", "kvstore/base/log.c", "kvstore/base/disk_pool.c", "tests/*"      \
    }

static const struct banned_row banned_in_code[] = {
    {"volatile", false, EVERYWHERE, {NULL}, "not a tool for threads; use atomics or a mailbox"},
    {"strcpy", false, EVERYWHERE, {NULL}, "no bound; use snprintf or memcpy"},
    {"stpcpy", false, EVERYWHERE, {NULL}, "no bound; use snprintf or memcpy"},
    {"strcat", false, EVERYWHERE, {NULL}, "no bound; use snprintf"},
    {"strncpy", false, EVERYWHERE, {NULL}, "may leave out the final zero; use snprintf"},
    {"strncat", false, EVERYWHERE, {NULL}, "bound of the wrong thing; use snprintf"},
    {"sprintf", false, EVERYWHERE, {NULL}, "no bound; use snprintf"},
    {"vsprintf", false, EVERYWHERE, {NULL}, "no bound; use vsnprintf"},
    {"gets", false, EVERYWHERE, {NULL}, "no bound; use fgets"},
    {"atoi", false, EVERYWHERE, {NULL}, "hides errors; use strtol and check"},
    {"atol", false, EVERYWHERE, {NULL}, "hides errors; use strtol and check"},
    {"atoll", false, EVERYWHERE, {NULL}, "hides errors; use strtoll and check"},
    {"atof", false, EVERYWHERE, {NULL}, "hides errors; use strtod and check"},
    {"strtok", false, EVERYWHERE, {NULL}, "hidden state; use strcspn"},
    {"alloca", false, EVERYWHERE, {NULL}, "no bound; use the arena"},
    {"pthread_mutex_", true, EVERYWHERE, LOCKS, "threads exchange messages (mailbox.h)"},
    {"pthread_cond_", true, EVERYWHERE, LOCKS, "threads exchange messages (mailbox.h)"},
    {"pthread_rwlock_", true, EVERYWHERE, LOCKS, "threads exchange messages (mailbox.h)"},
    {"pthread_spin_", true, EVERYWHERE, LOCKS, "threads exchange messages (mailbox.h)"},
    {"mtx_", true, EVERYWHERE, LOCKS, "threads exchange messages (mailbox.h)"},
    {"exit", false, LIBRARIES, {NULL}, "a library returns a status; the daemon decides"},
    {"_exit", false, LIBRARIES, {NULL}, "a library returns a status; the daemon decides"},
    {"abort", false, LIBRARIES, {"kvstore/base/thread.c"}, "assert says what went wrong"},
};

/* Also in comments.  Written in two halves, so that this list does not reject itself. */
static const struct banned_row banned_anywhere[] = {
    {"TO"
     "DO",
     false,
     EVERYWHERE,
     {NULL},
     "do it, or leave it out and say so in the README"},
    {"FIX"
     "ME",
     false,
     EVERYWHERE,
     {NULL},
     "do it, or leave it out and say so in the README"},
    {"XX"
     "X",
     false,
     EVERYWHERE,
     {NULL},
     "do it, or leave it out and say so in the README"},
};

/* Variables that may change although they outlive a function. */
static const char *const mutable_allowed[] = {
    "kvstore/base/thread.c",          /* The role of the thread, thread-local. */
    "engine/model/mapping.c",         /* What the handler of SIGBUS must find. */
    "kvstore/index/manifest_rocks.c", /* What RocksDB may not close. */
    "tests/*",                        /* A test is one program with one purpose. */
    NULL,
};

static const char *const needs_unit_test[] = {"kvstore/plan/*.c", "kvstore/format/*.c", NULL};
static const char *const needs_fuzzer[] = {"kvstore/format/*.c", NULL};
