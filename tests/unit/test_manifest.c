/*
 * Durable records.
 *
 * Goal: what was answered is there after a reopen, in key order; scans stop where they must;
 * batches share syncs; a second process is refused; a failed write is final until restart.
 *
 * Method: a database in a temporary folder.  The failing write is a file-size limit (EFBIG), the
 * second process this program, started with the folder's name.
 */

#include "kvstore/base/bytes.h"
#include "kvstore/index/manifest.h"
#include "tests/harness.h"

#include <dirent.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#define BATCHES 200u
#define EXIT_REFUSED 3

struct env {
    char dir[64];
    struct kv_manifest *manifest;
    struct kv_mailbox *mailbox;
};

struct commit {
    struct kv_manifest_batch batch;
    struct kv_manifest_put puts[2];
    char key[16];
    bool done;
};

struct load {
    struct kv_manifest_scan scan;
    bool done;
};

static struct kv_manifest_put put_of(const char *key, const char *value)
{
    return (struct kv_manifest_put){
        .key = (const uint8_t *)key,
        .key_bytes = (uint32_t)strlen(key),
        .value = (const uint8_t *)value,
        .value_bytes = value == NULL ? 0 : (uint32_t)strlen(value),
    };
}

static void commit_done(struct kv_msg *msg)
{
    KV_CONTAINER_OF(msg, struct commit, batch.msg)->done = true;
}

static void load_done(struct kv_msg *msg)
{
    KV_CONTAINER_OF(msg, struct load, scan.msg)->done = true;
}

static void run_until(struct env *env, const bool *done)
{
    while (!*done) {
        kv_mailbox_wait(env->mailbox, 10000);
        (void)kv_mailbox_run(env->mailbox, 64);
    }
}

static void env_init(struct env *env)
{
    (void)snprintf(env->dir, sizeof(env->dir), "test_manifest.XXXXXX");
    EXPECT(mkdtemp(env->dir) != NULL);
    EXPECT(kv_mailbox_create(&env->mailbox, NULL) == KV_OK);
    EXPECT(kv_manifest_open(env->dir, &env->manifest, NULL) == KV_OK);
}

static void env_reopen(struct env *env)
{
    kv_manifest_close(env->manifest);
    EXPECT(kv_manifest_open(env->dir, &env->manifest, NULL) == KV_OK);
}

static void env_fini(struct env *env)
{
    kv_manifest_close(env->manifest);
    kv_mailbox_destroy(env->mailbox);
    DIR *entries = opendir(env->dir);
    for (const struct dirent *entry; (entry = readdir(entries)) != NULL;)
        (void)unlinkat(dirfd(entries), entry->d_name, 0);
    (void)closedir(entries);
    EXPECT(rmdir(env->dir) == 0);
}

static kv_status write_posted(struct env *env, const struct kv_manifest_put *puts, uint32_t count)
{
    struct commit commit = {0};
    commit.batch = (struct kv_manifest_batch){
        .msg = {.run = commit_done}, .reply = env->mailbox, .puts = puts, .put_count = count};
    kv_manifest_write_post(env->manifest, &commit.batch);
    run_until(env, &commit.done);
    return commit.batch.status;
}

static void scan_posted(struct env *env, struct load *load, const char *prefix, const char *start,
                        uint32_t record_max, uint8_t *buf, uint32_t buf_bytes)
{
    *load = (struct load){0};
    load->scan = (struct kv_manifest_scan){
        .msg = {.run = load_done},
        .reply = env->mailbox,
        .prefix = (const uint8_t *)prefix,
        .prefix_bytes = (uint32_t)strlen(prefix),
        .start = (const uint8_t *)start,
        .start_bytes = start == NULL ? 0 : (uint32_t)strlen(start),
        .record_max = record_max,
        .buf = buf,
        .buf_bytes = buf_bytes,
    };
    kv_manifest_scan_post(env->manifest, &load->scan);
    run_until(env, &load->done);
    EXPECT(load->scan.status == KV_OK);
}

/* "k1=v1,k2=v2" of what a scan found. */
static void expect_records(const struct kv_manifest_scan *scan, const char *want)
{
    char text[256] = "";
    uint32_t offset = 0;
    uint32_t count = 0;
    struct kv_manifest_put record;
    for (; kv_manifest_scan_next(scan, &offset, &record); count++) {
        const size_t used = strlen(text);
        (void)snprintf(text + used, sizeof(text) - used, "%s%.*s=%.*s", count == 0 ? "" : ",",
                       (int)record.key_bytes, (const char *)record.key, (int)record.value_bytes,
                       (const char *)record.value);
    }
    EXPECT_EQ_STR(text, want);
    EXPECT_EQ_U32(count, scan->record_count);
    EXPECT_EQ_U32(offset, scan->used_bytes);
}

static void test_put_scan_delete_reopen(void)
{
    struct env env;
    struct load load;
    uint8_t buf[256];
    env_init(&env);
    const struct kv_manifest_put puts[] = {put_of("a2", "two"), put_of("a1", "one"),
                                           put_of("b1", "other"), put_of("a3", "")};
    EXPECT(write_posted(&env, puts, 4) == KV_OK);
    scan_posted(&env, &load, "a", NULL, 10, buf, sizeof(buf));
    expect_records(&load.scan, "a1=one,a2=two,a3=");
    EXPECT(!load.scan.more);

    env_reopen(&env);
    scan_posted(&env, &load, "", NULL, 10, buf, sizeof(buf));
    expect_records(&load.scan, "a1=one,a2=two,a3=,b1=other");

    /* In one batch the later word on a key counts. */
    const struct kv_manifest_put changes[] = {put_of("a1", NULL), put_of("a2", "zwei"),
                                              put_of("b1", NULL), put_of("b1", "back")};
    EXPECT(write_posted(&env, changes, 4) == KV_OK);
    env_reopen(&env);
    scan_posted(&env, &load, "", NULL, 10, buf, sizeof(buf));
    expect_records(&load.scan, "a2=zwei,a3=,b1=back");
    scan_posted(&env, &load, "c", NULL, 10, buf, sizeof(buf));
    expect_records(&load.scan, "");
    EXPECT(!load.scan.more);
    env_fini(&env);
}

static void test_scan_bounds(void)
{
    struct env env;
    struct load load;
    uint8_t buf[256];
    env_init(&env);
    const struct kv_manifest_put puts[] = {put_of("k1", "aaaa"), put_of("k2", "bbbb"),
                                           put_of("k3", "cccc"), put_of("l", "x")};
    EXPECT(kv_manifest_write_now(env.manifest, puts, 4, NULL) == KV_OK);

    scan_posted(&env, &load, "k", NULL, 2, buf, sizeof(buf));
    expect_records(&load.scan, "k1=aaaa,k2=bbbb");
    EXPECT(load.scan.more);
    scan_posted(&env, &load, "k", NULL, 3, buf, sizeof(buf));
    EXPECT(!load.scan.more); /* Exactly all. */
    /* 8 + 2 + 4 = 14 bytes a record. */
    scan_posted(&env, &load, "k", NULL, 10, buf, 28);
    expect_records(&load.scan, "k1=aaaa,k2=bbbb");
    EXPECT(load.scan.more);
    scan_posted(&env, &load, "k", "k2", 10, buf, 27);
    expect_records(&load.scan, "k2=bbbb");
    EXPECT(load.scan.more);
    scan_posted(&env, &load, "k", "k22", 10, buf, 28);
    expect_records(&load.scan, "k3=cccc");
    EXPECT(!load.scan.more);
    scan_posted(&env, &load, "k", NULL, 10, buf, 13);
    expect_records(&load.scan, "");
    EXPECT(load.scan.more);
    env_fini(&env);
}

struct visited {
    uint32_t count;
    uint32_t stop_after;
};

static kv_status visit(void *context, const struct kv_manifest_put *record)
{
    struct visited *visited = context;
    EXPECT(record->key[0] == 'k');
    return ++visited->count == visited->stop_after ? KV_CORRUPT : KV_OK;
}

static void test_now(void)
{
    struct env env;
    struct visited visited = {0};
    env_init(&env);
    const struct kv_manifest_put puts[] = {put_of("k1", "a"), put_of("k2", "b"), put_of("l", "x")};
    EXPECT(kv_manifest_write_now(env.manifest, puts, 3, NULL) == KV_OK);
    EXPECT(kv_manifest_scan_now(env.manifest, (const uint8_t *)"k", 1, visit, &visited, NULL) ==
           KV_OK);
    EXPECT_EQ_U32(visited.count, 2);
    visited = (struct visited){.stop_after = 1};
    EXPECT(kv_manifest_scan_now(env.manifest, (const uint8_t *)"k", 1, visit, &visited, NULL) ==
           KV_CORRUPT);
    EXPECT_EQ_U32(visited.count, 1);
    env_fini(&env);
}

static void test_batches_share_syncs(void)
{
    static struct commit commits[BATCHES];
    static uint8_t buf[BATCHES * 64];
    struct env env;
    struct load load;
    env_init(&env);
    for (uint32_t i = 0; i < BATCHES; i++) {
        struct commit *commit = &commits[i];
        (void)snprintf(commit->key, sizeof(commit->key), "s%06u", i);
        commit->puts[0] = put_of(commit->key, "record");
        commit->puts[1] = put_of("last", commit->key);
        commit->batch = (struct kv_manifest_batch){.msg = {.run = commit_done},
                                                   .reply = env.mailbox,
                                                   .puts = commit->puts,
                                                   .put_count = 2};
        kv_manifest_write_post(env.manifest, &commit->batch);
    }
    /* A scan does not wait for them, and sees some prefix of them. */
    scan_posted(&env, &load, "s", NULL, BATCHES, buf, sizeof(buf));
    for (uint32_t i = 0; i < BATCHES; i++) {
        run_until(&env, &commits[i].done);
        EXPECT(commits[i].batch.status == KV_OK);
    }
    const struct kv_manifest_stats stats = kv_manifest_stats(env.manifest);
    (void)printf("  %u batches, %u syncs\n", (unsigned)stats.batches, (unsigned)stats.syncs);
    EXPECT_EQ_U64(stats.batches, BATCHES);
    EXPECT_EQ_U64(stats.records, 2 * BATCHES);
    EXPECT(stats.syncs < BATCHES);
    EXPECT(!stats.failed);

    /* Answered means durable, and the order of posting is the order of records. */
    env_reopen(&env);
    scan_posted(&env, &load, "s", NULL, BATCHES, buf, sizeof(buf));
    EXPECT_EQ_U32(load.scan.record_count, BATCHES);
    scan_posted(&env, &load, "last", NULL, 1, buf, sizeof(buf));
    expect_records(&load.scan, "last=s000199");
    env_fini(&env);
}

static void test_close_finishes(void)
{
    static struct commit commits[BATCHES];
    struct env env;
    env_init(&env);
    for (uint32_t i = 0; i < BATCHES; i++) {
        commits[i] = (struct commit){0};
        commits[i].puts[0] = put_of("key", "value");
        commits[i].batch = (struct kv_manifest_batch){.msg = {.run = commit_done},
                                                      .reply = env.mailbox,
                                                      .puts = commits[i].puts,
                                                      .put_count = 1};
        kv_manifest_write_post(env.manifest, &commits[i].batch);
    }
    env_reopen(&env);
    EXPECT_EQ_U32(kv_mailbox_run(env.mailbox, 2 * BATCHES), BATCHES);
    for (uint32_t i = 0; i < BATCHES; i++)
        EXPECT(commits[i].done && commits[i].batch.status == KV_OK);
    env_fini(&env);
}

static void test_second_open_refused(void)
{
    struct env env;
    struct kv_error err = {0};
    struct kv_manifest *second = NULL;
    env_init(&env);
    EXPECT(kv_manifest_open(env.dir, &second, &err) == KV_INVALID);
    EXPECT(strstr(err.text, "in use by another process") != NULL);
    EXPECT(strstr(err.text, env.dir) != NULL);

    /* RocksDB knows the locks of its own process by name: only another one asks the kernel. */
    char self[] = "/proc/self/exe";
    char *const args[] = {self, env.dir, NULL};
    const pid_t child = fork();
    if (child == 0) {
        (void)execv(self, args);
        _exit(EXIT_FAILURE);
    }
    int result = -1;
    EXPECT(waitpid(child, &result, 0) == child);
    EXPECT(WIFEXITED(result));
    EXPECT_EQ_I64(WEXITSTATUS(result), EXIT_REFUSED);
    /* The first is not disturbed. */
    const struct kv_manifest_put put = put_of("k", "v");
    EXPECT(write_posted(&env, &put, 1) == KV_OK);
    env_fini(&env);

    EXPECT(kv_manifest_open("/nonexistent/a/b", &second, &err) == KV_IO);
    EXPECT(strstr(err.text, "/nonexistent/a/b") != NULL);
}

/* In a process of its own: after a failed write RocksDB is left as it is, with its lock. */
static int fail_in(const char *dir)
{
    struct env env;
    struct load load;
    struct rlimit before;
    uint8_t buf[64];
    struct kv_error err = {0};
    (void)snprintf(env.dir, sizeof(env.dir), "%s", dir);
    EXPECT(kv_mailbox_create(&env.mailbox, NULL) == KV_OK);
    EXPECT(kv_manifest_open(env.dir, &env.manifest, NULL) == KV_OK);
    const struct kv_manifest_put good = put_of("good", "1");
    EXPECT(write_posted(&env, &good, 1) == KV_OK);

    (void)signal(SIGXFSZ, SIG_IGN);
    EXPECT(getrlimit(RLIMIT_FSIZE, &before) == 0);
    const struct rlimit small = {.rlim_cur = 65536, .rlim_max = before.rlim_max};
    EXPECT(setrlimit(RLIMIT_FSIZE, &small) == 0);
    uint8_t *large = malloc(1u << 20);
    memset(large, 'x', 1u << 20);
    const struct kv_manifest_put huge = {
        .key = (const uint8_t *)"huge", .key_bytes = 4, .value = large, .value_bytes = 1u << 20};
    EXPECT(write_posted(&env, &huge, 1) == KV_IO);
    EXPECT(setrlimit(RLIMIT_FSIZE, &before) == 0);
    free(large);

    EXPECT(kv_manifest_stats(env.manifest).failed);
    const uint64_t syncs = kv_manifest_stats(env.manifest).syncs;
    EXPECT(write_posted(&env, &good, 1) == KV_INVALID);
    EXPECT(kv_manifest_write_now(env.manifest, &good, 1, &err) == KV_INVALID);
    EXPECT(strstr(err.text, "restart") != NULL);
    EXPECT_EQ_U64(kv_manifest_stats(env.manifest).syncs, syncs); /* RocksDB was not asked again. */
    scan_posted(&env, &load, "good", NULL, 1, buf, sizeof(buf)); /* Reads go on. */
    expect_records(&load.scan, "good=1");
    kv_manifest_close(env.manifest);
    kv_mailbox_destroy(env.mailbox);
    return EXIT_SUCCESS;
}

static void test_failed_write_is_final(void)
{
    struct env env;
    struct load load;
    uint8_t buf[64];
    char self[] = "/proc/self/exe", fail[] = "fail";
    int result = -1;
    (void)snprintf(env.dir, sizeof(env.dir), "test_manifest.XXXXXX");
    EXPECT(mkdtemp(env.dir) != NULL);
    char *const args[] = {self, env.dir, fail, NULL};
    const pid_t child = fork();
    if (child == 0) {
        (void)execv(self, args);
        _exit(EXIT_FAILURE);
    }
    EXPECT(waitpid(child, &result, 0) == child);
    EXPECT(WIFEXITED(result));
    EXPECT_EQ_I64(WEXITSTATUS(result), EXIT_SUCCESS);

    EXPECT(kv_mailbox_create(&env.mailbox, NULL) == KV_OK);
    EXPECT(kv_manifest_open(env.dir, &env.manifest, NULL) == KV_OK);
    EXPECT(!kv_manifest_stats(env.manifest).failed);
    scan_posted(&env, &load, "", NULL, 10, buf, sizeof(buf));
    expect_records(&load.scan, "good=1");
    const struct kv_manifest_put good = put_of("good", "1");
    EXPECT(write_posted(&env, &good, 1) == KV_OK);
    env_fini(&env);
}

/* Behind each key, and before the next one there is; a long one takes no more room than there is.
 */
static void test_scan_behind(void)
{
    struct {
        uint8_t start[8], guard;
    } at = {.guard = 0x5a};
    struct kv_manifest_put last = put_of("Tab", "");
    EXPECT_EQ_U32(kv_manifest_scan_behind(&last, at.start, sizeof(at.start)), 4);
    EXPECT_EQ_MEM(at.start, "Tab\0", 4);
    last = put_of("Tabcdef", "");
    EXPECT_EQ_U32(kv_manifest_scan_behind(&last, at.start, sizeof(at.start)), 8);
    EXPECT_EQ_MEM(at.start, "Tabcdef\0", 8);
    last = put_of("Tabcdefghijklmnopqrstuvwxyz", "");
    EXPECT_EQ_U32(kv_manifest_scan_behind(&last, at.start, sizeof(at.start)), 8);
    EXPECT_EQ_MEM(at.start, "Tabcdefh", 8);
    last = put_of("Tabcd\xff\xff\xff\xff", "");
    EXPECT_EQ_U32(kv_manifest_scan_behind(&last, at.start, sizeof(at.start)), 5);
    EXPECT_EQ_MEM(at.start, "Tabce", 5);
    EXPECT_EQ_U32(at.guard, 0x5a);
}

/* With a folder as its argument the program is the second process. */
static int open_as_second(const char *dir)
{
    struct kv_manifest *manifest = NULL;
    const kv_status status = kv_manifest_open(dir, &manifest, NULL);
    kv_manifest_close(manifest);
    return status == KV_INVALID ? EXIT_REFUSED : EXIT_FAILURE;
}

int main(int argc, char **argv)
{
    if (argc == 2) return open_as_second(argv[1]);
    if (argc == 3) return fail_in(argv[1]);
    test_second_open_refused();
    test_put_scan_delete_reopen();
    test_scan_bounds();
    test_now();
    test_batches_share_syncs();
    test_close_finishes();
    test_failed_write_is_final();
    test_scan_behind();
    kv_manifest_close(NULL);
    HARNESS_END();
}
