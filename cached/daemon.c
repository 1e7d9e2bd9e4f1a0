/*
 * Wiring: the only file that names concrete things together.
 *
 * Building goes from the state directory's lock up to the shard, so that a daemon that must not run
 * has touched nothing but the lock.  The server listens before the store opens, which can take long
 * when trees are to be read: it says how far that is, and refuses other calls until there is a
 * shard to give them to.  Going down is the reverse, in two parts: daemon_wait() lets calls end and
 * threads return, then daemon_destroy() frees.  Each part of struct daemon is NULL until it is
 * made, so destroying works from any point.
 *
 * A stop has one bound for everything, a watchdog that ends the process after 10 s: whatever is
 * durable is so already, and what is not was never acknowledged.
 */

#include "cached/daemon.h"

#include "cached/auth.h"
#include "cached/headroom.h"
#include "cached/obs/log_sink.h"
#include "cached/rpc/rpc_server.h"
#include "cached/shard/shard.h"
#include "cached/state_lock.h"
#include "cached/state_watch.h"
#include "cached/version.h"
#include "cached/worker/worker.h"
#include "kvstore/base/bytes.h"
#include "kvstore/base/key_file.h"
#include "kvstore/base/limits.h"
#include "kvstore/base/ring.h"
#include "kvstore/base/secret.h"
#include "kvstore/base/thread.h"
#include "kvstore/store/store.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <time.h>
#include <unistd.h>

#define STOP_MS_MAX 10000
#define EXIT_STUCK 3
#define STUCK_LINE_S 1 /* For the line that says so. */
#define RSS_BUDGET_EXTRA (64ull << 20)
#define TELL_NS 2000000000ull

_Static_assert((int)CONFIG_ISA_AMX == (int)ENG_ISA_AMX, "choices of engine.isa");
_Static_assert((int)CONFIG_ISA_PORTABLE == (int)ENG_ISA_PORTABLE, "choices of engine.isa");
_Static_assert((int)CONFIG_DRAFT_OFF == (int)WORKER_DRAFT_OFF, "choices of engine.draft");
_Static_assert((int)CONFIG_DRAFT_ON == (int)WORKER_DRAFT_ON, "choices of engine.draft");

struct daemon {
    const struct cached_config *config;
    const char *plant;
    struct state_lock *lock;
    struct auth *auth;
    struct kv_log *log;
    struct kv_clock *clock;
    struct eng_model *model;
    struct kv_mailbox *mailbox;
    struct kv_disk *disk;
    struct kv_manifest *manifest;
    struct kv_store *store;
    struct worker *worker;
    struct shard *shard;
    struct rpc_server *rpc;
    struct state_watch *watch;
    struct kv_thread worker_thread, shard_thread, rpc_thread, watchdog_thread;
    bool told;        /* That it starts, so that its end is worth a line. */
    uint64_t told_ns; /* When it last said how far its start is. */
    int signal_fd;
    int stopped_fd; /* Written when the stop is over: ends the watchdog. */
    char values[CONFIG_KEY_COUNT][CONFIG_TEXT_MAX];
    struct rpc_setting settings[CONFIG_KEY_COUNT];
};

static sigset_t handled_signals(void)
{
    sigset_t set;
    (void)sigemptyset(&set);
    (void)sigaddset(&set, SIGTERM);
    (void)sigaddset(&set, SIGINT);
    return set;
}

void daemon_block_signals(void)
{
    sigset_t set = handled_signals();
    /* Blocked rather than ignored: a closed pipe is an error of one write, a hang-up is nothing. */
    (void)sigaddset(&set, SIGPIPE);
    (void)sigaddset(&set, SIGHUP);
    (void)sigaddset(&set, SIGXFSZ); /* The write fails with EFBIG, which is seen to. */
    (void)pthread_sigmask(SIG_BLOCK, &set, NULL);
}

static uint64_t pool_bytes(const struct cached_config *config)
{
    if (config->pool_bytes > 0) return config->pool_bytes;
    const uint64_t ram = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
    return (uint64_t)((double)ram * config->pool_fraction);
}

/* Open files of the daemon beside its connections. */
static uint64_t own_files(const struct cached_config *config)
{
    return KV_DESCRIPTORS_MIN + config->ssd_bytes / config->ssd_segment_bytes;
}

/* Libraries that cannot have one abort, so there must be enough before they begin.  The soft limit
 * is for programs that know no better. */
static kv_status enough_descriptors(const struct cached_config *config, struct kv_error *err)
{
    const uint64_t want = own_files(config);
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0)
        return KV_FAIL_ERRNO(err, KV_IO, "look at RLIMIT_NOFILE");
    limit.rlim_cur = limit.rlim_max;
    (void)setrlimit(RLIMIT_NOFILE, &limit);
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur >= want) return KV_OK;
    return KV_FAIL(err, KV_INVALID,
                   "RLIMIT_NOFILE allows %" PRIu64 " open files: want at least %" PRIu64
                   ", %u and one for each segment that ssd.bytes allows",
                   (uint64_t)limit.rlim_cur, want, KV_DESCRIPTORS_MIN);
}

static kv_status make_base(struct daemon *daemon, struct kv_error *err)
{
    const struct cached_config *config = daemon->config;
    const sigset_t set = handled_signals();

    kv_status status = enough_descriptors(config, err);
    if (status != KV_OK) return status;
    status = state_lock_take(config->state_dir, config->server_pid_file, &daemon->lock, err);
    if (status != KV_OK) return status;
    status = auth_load(config->server_token_file, &daemon->auth, err);
    if (status != KV_OK) return status;
    status = kv_log_create((enum kv_log_level)config->log_level, KV_LOG_QUEUE_LINES, log_sink_write,
                           NULL, &daemon->log, err);
    if (status != KV_OK) return status;

    daemon->clock = config->clock_mode == CONFIG_CLOCK_VIRTUAL ? kv_clock_create_virtual()
                                                               : kv_clock_create_real();
    if (daemon->clock == NULL) return KV_FAIL(err, KV_NOMEM, "create the clock");
    daemon->signal_fd = signalfd(-1, &set, SFD_CLOEXEC);
    daemon->stopped_fd = eventfd(0, EFD_CLOEXEC);
    if (daemon->signal_fd < 0 || daemon->stopped_fd < 0)
        return KV_FAIL_ERRNO(err, KV_IO, "create the descriptors of the main thread");
    return KV_OK;
}

/* Test builds: room for four sessions, so that a test can fill it. */
#define PLANT_SESSIONS "sessions"
/* Test builds: kernels of another family; checkpoints that say they are of one. */
#define PLANT_KERNELS "kernels"
#define PLANT_KERNELS_MADE "kernels_made"
/* Test builds: a second for each step of a start. */
#define PLANT_SLOW_START "slow_start"

static bool is_plant(const struct daemon *daemon, const char *name)
{
    return daemon->plant != NULL && strcmp(daemon->plant, name) == 0;
}

static bool is_worker_plant(const struct daemon *daemon)
{
    return kv_plant_of(daemon->plant) == KV_PLANT_NONE && !is_plant(daemon, PLANT_SESSIONS) &&
           !is_plant(daemon, PLANT_KERNELS) && !is_plant(daemon, PLANT_KERNELS_MADE) &&
           !is_plant(daemon, PLANT_SLOW_START);
}

/* A core is left for calls, so that a pass does not delay them. */
static uint32_t compute_threads(const struct cached_config *config)
{
    cpu_set_t set;

    if (config->engine_threads != 0) return (uint32_t)config->engine_threads;
    if (sched_getaffinity(0, sizeof(set), &set) != 0) return 1;
    const uint32_t cores = (uint32_t)CPU_COUNT(&set);
    return KV_MIN(KV_MAX(cores, 2u) - 1, KV_ENGINE_THREADS_MAX);
}

static kv_status make_model(struct daemon *daemon, struct kv_error *err)
{
    const struct cached_config *config = daemon->config;
    const struct eng_options engine = {
        .backend = config->engine_backend == CONFIG_BACKEND_SYNTHETIC ? ENG_BACKEND_SYNTHETIC
                                                                      : ENG_BACKEND_CPU,
        .model_dir = config->engine_model_dir[0] == '\0' ? NULL : config->engine_model_dir,
        .spare_tokens = (uint32_t)config->window_spare_tokens,
        .isa = (enum eng_isa)config->engine_isa,
        .threads = compute_threads(config),
        .pass_rows = config_pass_rows(config),
    };
    kv_status status = eng_model_open(&engine, &daemon->model, err);
    if (status != KV_OK) return status;
    status = kv_mailbox_create(&daemon->mailbox, err);
    if (status != KV_OK) return status;
    return kv_ring_create(KV_RING_DEPTH, (enum kv_ring_choice)config->io_backend, &daemon->disk,
                          err);
}

static uint64_t memory_bytes(const struct daemon *daemon)
{
    const struct cached_config *config = daemon->config;
    return config->hbm_bytes + pool_bytes(config) + config->index_ram_bytes +
           eng_model_bytes(daemon->model) +
           config->engine_live_sessions * eng_model_session_bytes(daemon->model) +
           KV_ANSWERS_BYTES_MAX + RSS_BUDGET_EXTRA;
}

/* While the model's threads are there, and before those of libraries. */
static kv_status enough_room(const struct daemon *daemon, struct kv_error *err)
{
    cpu_set_t set;
    const bool known = sched_getaffinity(0, sizeof(set), &set) == 0;
    const uint32_t cores = known ? (uint32_t)CPU_COUNT(&set) : 1;
    return headroom_check(HEADROOM_THREADS + 2 * cores, memory_bytes(daemon), err);
}

/* While the store opens; a line in the log when that takes long. */
static void progress(void *context, const char *phase, uint32_t percent)
{
    struct daemon *daemon = context;
    const uint64_t now = kv_clock_stopwatch_ns();
    rpc_server_progress(daemon->rpc, phase, percent);
    if (is_plant(daemon, PLANT_SLOW_START)) {
        const struct timespec pause = {1, 0};
        (void)nanosleep(&pause, NULL);
    }
    if (now - daemon->told_ns < TELL_NS) return;
    daemon->told_ns = now;
    kv_log(daemon->log, KV_LOG_INFO, "starting", "phase=\"%s\" percent=%" PRIu32, phase, percent);
}

static struct kv_quota default_plan(const struct cached_config *config)
{
    struct kv_quota plan;
    for (unsigned i = 0; i < KV_QUOTA_COUNT; i++)
        plan.limits[i] = KV_QUOTA_UNLIMITED;
    if (config->quota_default_sessions > 0)
        plan.limits[KV_QUOTA_SESSIONS] = config->quota_default_sessions;
    if (config->quota_default_turns > 0)
        plan.limits[KV_QUOTA_TURNS] = config->quota_default_turns;
    return plan;
}

static bool has_master_key(const struct cached_config *config)
{
    return config->ssd_master_key_file[0] != '\0' || config->ssd_master_key_credential[0] != '\0';
}

/* As it is there now: again when it is rotated.  The shard's thread, and this one at the start. */
static kv_status read_master_key(void *context, uint8_t key[KV_KEY_BYTES], struct kv_error *err)
{
    const struct cached_config *config = context;
    if (config->ssd_master_key_file[0] != '\0')
        return kv_key_file_read(config->ssd_master_key_file, config->state_dir, key, err);
    return kv_key_credential_read(config->ssd_master_key_credential, key, err);
}

static kv_status open_store(struct daemon *daemon, struct kv_store_options *store,
                            struct kv_error *err)
{
    char path[CONFIG_TEXT_MAX + sizeof("/manifest")];
    daemon->told_ns = kv_clock_stopwatch_ns();
    /* Nothing in the directory is opened before it is known to be ours, and the key to fit. */
    kv_status status = kv_store_directory(store, err);
    if (status != KV_OK) return status;
    (void)snprintf(path, sizeof(path), "%s/manifest", store->dir);
    progress(daemon, "opening the manifest", 0);
    status = kv_manifest_open(path, &daemon->manifest, err);
    if (status != KV_OK) return status;
    store->manifest = daemon->manifest;
    return kv_store_open(store, &daemon->store, err);
}

/* The store has its own copy of the key; this one goes when it is open. */
static kv_status open_with_key(struct daemon *daemon, struct kv_store_options *store,
                               struct kv_error *err)
{
    const struct cached_config *config = daemon->config;
    const bool is_file = config->ssd_master_key_file[0] != '\0';
    char source[CONFIG_TEXT_MAX + 16];
    struct kv_secrets *secrets = NULL;
    if (!has_master_key(config)) return open_store(daemon, store, err);
    (void)snprintf(source, sizeof(source), "%s '%s'", is_file ? "file" : "credential",
                   is_file ? config->ssd_master_key_file : config->ssd_master_key_credential);
    kv_status status = kv_secrets_create(KV_KEY_BYTES, &secrets, err);
    uint8_t *key = status == KV_OK ? kv_secrets_alloc(secrets) : NULL;
    if (status == KV_OK && key == NULL) status = KV_FAIL(err, KV_NOMEM, "keep the master key");
    if (status == KV_OK) status = read_master_key((void *)(uintptr_t)config, key, err);
    store->encryption.master = key;
    store->encryption.source = source;
    if (status == KV_OK) status = open_store(daemon, store, err);
    kv_secrets_destroy(secrets);
    return status;
}

static kv_status make_store(struct daemon *daemon, struct kv_error *err)
{
    const struct cached_config *config = daemon->config;
    const char *family =
        is_plant(daemon, PLANT_KERNELS) ? "planted" : eng_model_family(daemon->model);
    struct kv_store_options store = {
        .dir = config->state_dir,
        .layout = eng_model_layout(daemon->model),
        .model = eng_model_fingerprint(daemon->model),
        .kernels = kv_kernels_tag(family),
        .kernels_made = kv_kernels_tag(is_plant(daemon, PLANT_KERNELS_MADE) ? "planted" : family),
        .clock = daemon->clock,
        .log = daemon->log,
        .disk = daemon->disk,
        .mailbox = daemon->mailbox,
        .hbm_bytes = config->hbm_bytes,
        .pool_bytes = pool_bytes(config),
        .ssd_bytes = config->ssd_bytes,
        .segment_bytes = config->ssd_segment_bytes,
        .index_bytes = config->index_ram_bytes,
        .pool_ttl_ms = config->pool_ttl_ms,
        .rows_ttl_ms = config->ssd_ttl_ms,
        .erase_within_ms = config->ssd_erase_within_ms,
        .sessions_max = is_plant(daemon, PLANT_SESSIONS) ? 4 : KV_SESSIONS_MAX,
        .quota = default_plan(config),
        .progress = progress,
        .progress_context = daemon,
        .encryption.on = config->ssd_encryption == CONFIG_ENCRYPTION_ON,
        .plant = kv_plant_of(daemon->plant),
    };
    const kv_status status = headroom_segment(config->state_dir, config->ssd_segment_bytes, err);
    return status == KV_OK ? open_with_key(daemon, &store, err) : status;
}

static kv_status make_shard(struct daemon *daemon, struct kv_error *err)
{
    const struct cached_config *config = daemon->config;
    const struct worker_options worker = {
        .model = daemon->model,
        .slots = (uint32_t)config->engine_live_sessions,
        .chunk_tokens = (uint32_t)config->engine_chunk_tokens,
        .draft = (enum worker_draft)config->engine_draft,
        .log = daemon->log,
        .plant = is_worker_plant(daemon) ? daemon->plant : NULL,
    };
    const kv_status status = worker_create(&worker, &daemon->worker, err);
    if (status != KV_OK) return status;

    const struct shard_options shard = {
        .clock = daemon->clock,
        .log = daemon->log,
        .worker = daemon->worker,
        .store = daemon->store,
        .disk = daemon->disk,
        .mailbox = daemon->mailbox,
        .model_name = eng_model_name(daemon->model),
        .engine_backend = eng_model_backend(daemon->model),
        .engine_isa = eng_model_isa(daemon->model),
        .engine_family = eng_model_family(daemon->model),
        .eos = eng_model_eos(daemon->model),
        .model = daemon->model,
        .compact_below_thousandths = (uint32_t)(config->ssd_compact_below * 1000 + 0.5),
        .compact_rate = config->ssd_compact_rate,
        .scrub_rate_bytes = config->scrub_rate_bytes,
        .scrub_every_ms = config->scrub_every_ms,
        .read_master_key = has_master_key(config) ? read_master_key : NULL,
        .key_context = (void *)(uintptr_t)config,
        .key_setting = config->ssd_master_key_file[0] != '\0' ? "ssd.master_key_file"
                                                              : "ssd.master_key_credential",
        .rss_budget_bytes = memory_bytes(daemon),
    };
    return shard_create(&shard, &daemon->shard, err);
}

static kv_status make_rpc(struct daemon *daemon, struct kv_error *err)
{
    const struct cached_config *config = daemon->config;
    for (unsigned i = 0; i < CONFIG_KEY_COUNT; i++) {
        config_format(config, i, daemon->values[i], sizeof(daemon->values[i]));
        daemon->settings[i] = (struct rpc_setting){
            .key = config_item(i)->key,
            .value = daemon->values[i],
            .origin = config->origins[i],
            .doc = config_item(i)->doc,
        };
    }
    const struct rpc_options options = {
        .socket = config->server_socket,
        .listen = config->server_listen,
        .reserved_files = own_files(config),
        .auth = daemon->auth,
        .log = daemon->log,
        .shard_mailbox = daemon->mailbox,
        .about =
            {
                .version = CACHED_VERSION,
                .commit = CACHED_COMMIT,
                .pid = (uint64_t)getpid(),
                .started_ns = kv_clock_stopwatch_ns(),
                .vocab_tokens = eng_model_layout(daemon->model)->vocab_tokens,
                .context_tokens = eng_model_layout(daemon->model)->context_tokens,
                .model_fingerprint = eng_model_fingerprint(daemon->model),
            },
        .settings = daemon->settings,
        .setting_count = CONFIG_KEY_COUNT,
    };
    const kv_status status = rpc_server_create(&options, &daemon->rpc, err);
    if (status != KV_OK) return status;
    return kv_thread_start(&daemon->rpc_thread, KV_THREAD_RPC, "kv-rpc", rpc_server_run,
                           daemon->rpc, err);
}

static void files_gone(void *context, bool is_page_file, const char *why)
{
    struct daemon *daemon = context;
    shard_files_gone(daemon->shard, is_page_file, why);
}

static kv_status start_threads(struct daemon *daemon, struct kv_error *err)
{
    const struct state_watch_options watch = {.dir = daemon->config->state_dir,
                                              .log = daemon->log,
                                              .gone = files_gone,
                                              .context = daemon};
    kv_status status = kv_thread_start(&daemon->worker_thread, KV_THREAD_WORKER, "kv-worker",
                                       worker_run, daemon->worker, err);
    if (status != KV_OK) return status;
    status = kv_thread_start(&daemon->shard_thread, KV_THREAD_SHARD, "kv-shard", shard_run,
                             daemon->shard, err);
    if (status != KV_OK) return status;
    return state_watch_start(&watch, &daemon->watch, err);
}

/* What was found, what was not, and why. */
static void log_recovered(const struct daemon *daemon)
{
    const struct kv_store_recovery *r = &daemon->store->recovery;
    char why[320] = "";
    if (r->dropped > 0)
        (void)snprintf(why, sizeof(why),
                       " why=\"%" PRIu64 " need pages that have no place on SSD any more, %" PRIu64
                       " have a damaged record, %" PRIu64 " are of sessions without a record\"",
                       r->dropped_lost, r->dropped_damaged, r->dropped_orphans);
    kv_log(daemon->log, KV_LOG_INFO, "recovered",
           "text=\"recovered %" PRIu64 " checkpoints, dropped %" PRIu64 "\" sessions=%" PRIu64
           " pages=%" PRIu64 " bytes=%" PRIu64 " dropped_sessions=%" PRIu64
           " dropped_bytes=%" PRIu64 " ms=%.1f%s%s%s%s",
           r->checkpoints, r->dropped, r->sessions, r->pages, r->bytes, r->dropped_sessions,
           r->dropped_bytes, (double)r->duration_ns / 1e6, why,
           r->scan_why == NULL ? "" : " all_trees_read=\"", r->scan_why == NULL ? "" : r->scan_why,
           r->scan_why == NULL ? "" : "\"");
}

kv_status daemon_start(const struct daemon_options *options, struct daemon **ret_daemon,
                       struct kv_error *err)
{
    const struct cached_config *config = options->config;
    struct daemon *daemon = calloc(1, sizeof(*daemon));
    if (daemon == NULL) return KV_FAIL(err, KV_NOMEM, "start the daemon");
    daemon->config = config;
    daemon->plant = options->plant;
    daemon->signal_fd = -1;
    daemon->stopped_fd = -1;

    kv_status status = make_base(daemon, err);
    if (status == KV_OK) status = make_model(daemon, err);
    if (status == KV_OK) status = enough_room(daemon, err);
    if (status == KV_OK) status = make_rpc(daemon, err);
    if (status == KV_OK) status = make_store(daemon, err);
    if (status == KV_OK) status = make_shard(daemon, err);
    if (status != KV_OK) goto fail;
    kv_log(daemon->log, KV_LOG_INFO, "start",
           "version=%s commit=%s pid=%d model=%s backend=%s isa=%s kernels=%s io=%s socket=%s "
           "listen=%s",
           CACHED_VERSION, CACHED_COMMIT, (int)getpid(), eng_model_name(daemon->model),
           eng_model_backend(daemon->model), eng_model_isa(daemon->model),
           eng_model_family(daemon->model), kv_disk_backend(daemon->disk), config->server_socket,
           config->server_listen);
    daemon->told = true;
    status = start_threads(daemon, err);
    if (status != KV_OK) goto fail;
    rpc_server_serve(daemon->rpc, daemon->shard);
    log_recovered(daemon);
    kv_log(daemon->log, KV_LOG_INFO, "ready", "port=%d", rpc_server_port(daemon->rpc));
    *ret_daemon = daemon;
    return KV_OK;

fail:
    daemon_destroy(daemon);
    return status;
}

static void end_stuck(int signal_number)
{
    (void)signal_number;
    _exit(EXIT_STUCK);
}

static void watchdog_run(void *context)
{
    const struct daemon *daemon = context;
    struct pollfd poll_fd = {.fd = daemon->stopped_fd, .events = POLLIN};
    if (poll(&poll_fd, 1, STOP_MS_MAX) != 0) return;
    /* Not through the log: its thread may be what hangs.  Nor may this line hold anything up, on a
     * pipe that nobody reads or a file system that does not answer: the alarm ends that. */
    (void)alarm(STUCK_LINE_S);
    static const char line[] = "level=error event=stop_stuck text=\"not stopped after 10 s\"\n";
    log_sink_try(line, sizeof(line) - 1);
    _exit(EXIT_STUCK);
}

static void begin_stop(struct daemon *daemon, uint32_t signal_number)
{
    kv_log(daemon->log, KV_LOG_INFO, "stop", "signal=%" PRIu32, signal_number);
    struct kv_error err = {0};
    const struct sigaction action = {.sa_handler = end_stuck};
    (void)sigaction(SIGALRM, &action, NULL);
    if (kv_thread_start(&daemon->watchdog_thread, KV_THREAD_MAIN, "kv-watchdog", watchdog_run,
                        daemon, &err) != KV_OK)
        kv_log(daemon->log, KV_LOG_WARN, "no_watchdog", "text=\"%s\"", err.text);
    rpc_server_stop(daemon->rpc);
    shard_stop(daemon->shard);
}

void daemon_wait(struct daemon *daemon)
{
    struct pollfd poll_fds[] = {
        {.fd = daemon->signal_fd, .events = POLLIN},
        {.fd = rpc_server_done_fd(daemon->rpc), .events = POLLIN},
    };
    bool stopping = false;

    while (poll_fds[1].revents == 0) {
        if (poll(poll_fds, 2, -1) < 0) continue;
        if (poll_fds[0].revents == 0) continue;
        struct signalfd_siginfo info;
        if (read(daemon->signal_fd, &info, sizeof(info)) != sizeof(info)) continue;
        if (stopping) {
            rpc_server_stop(daemon->rpc); /* The second time: at once. */
            continue;
        }
        stopping = true;
        begin_stop(daemon, info.ssi_signo);
    }
}

/* Threads, if they run; in the order in which they wait for each other. */
static void join_threads(struct daemon *daemon)
{
    if (daemon->rpc_thread.started) rpc_server_stop(daemon->rpc);
    if (daemon->shard_thread.started) shard_stop(daemon->shard);
    kv_thread_join(&daemon->rpc_thread);
    kv_thread_join(&daemon->shard_thread);
    if (daemon->worker_thread.started) worker_stop(daemon->worker);
    kv_thread_join(&daemon->worker_thread);
}

void daemon_destroy(struct daemon *daemon)
{
    if (daemon == NULL) return;
    join_threads(daemon);
    state_watch_destroy(daemon->watch);
    rpc_server_destroy(daemon->rpc);
    shard_destroy(daemon->shard);
    worker_destroy(daemon->worker);
    kv_store_close(daemon->store);
    kv_manifest_close(daemon->manifest);
    kv_disk_destroy(daemon->disk);
    kv_mailbox_destroy(daemon->mailbox);
    eng_model_close(daemon->model);
    kv_clock_destroy(daemon->clock);

    if (daemon->told) kv_log(daemon->log, KV_LOG_INFO, "stopped", "pid=%d", (int)getpid());
    kv_log_destroy(daemon->log);
    if (daemon->watchdog_thread.started) {
        const int rc = eventfd_write(daemon->stopped_fd, 1);
        assert(rc == 0);
        kv_thread_join(&daemon->watchdog_thread);
    }
    if (daemon->signal_fd >= 0) (void)close(daemon->signal_fd);
    if (daemon->stopped_fd >= 0) (void)close(daemon->stopped_fd);
    auth_destroy(daemon->auth);
    state_lock_release(daemon->lock);
    free(daemon);
}
