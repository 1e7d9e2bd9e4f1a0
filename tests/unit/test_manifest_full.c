/*
 * The manifest on a file system that others fill.
 *
 * Goal: on a full file system records are written as long as RocksDB has blocks reserved for them,
 * deletions longer, then refused with nothing written; the file system filled at any moment never
 * ends the manifest; with room again writes succeed by themselves; whatever was answered with OK is
 * there after a reopen, and what was refused is not. Method: a real ext4 in a file, a filler that
 * takes every block, before and while RocksDB writes its tables.  Skipped where loop devices or
 * mounts are not allowed.
 */

#include "kvstore/base/bytes.h"
#include "kvstore/base/clock.h"
#include "kvstore/index/manifest.h"
#include "tests/crash/loopfs.h"
#include "tests/driver/scratch.h"
#include "tests/harness.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/statvfs.h>
#include <unistd.h>

enum { FS_BYTES = 64 << 20, VALUE_BYTES = 4000, KEYS_MAX = 60000, RESUME_MS = 5000 };

struct post {
    struct kv_manifest_batch batch;
    bool done;
};

struct env {
    struct cr_loop loop;
    struct kv_mailbox *mailbox;
    char scratch[300], dir[400], filler[400];
    struct kv_manifest *manifest;
    uint32_t next;
    uint8_t *written; /* By key: 1 + its status. */
};

static void fill(struct env *env)
{
    static uint8_t zeros[1 << 20];
    const int fd = open(env->filler, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    EXPECT(fd >= 0);
    for (size_t bytes = sizeof(zeros); bytes >= 1024;) {
        if (write(fd, zeros, bytes) <= 0) bytes /= 4;
    }
    (void)fsync(fd);
    (void)close(fd);
}

static void env_init(struct env *env)
{
    char why[CR_LOOP_WHY_BYTES];
    *env = (struct env){.written = calloc(KEYS_MAX, 1)};
    EXPECT(env->written != NULL);
    EXPECT(ex_make_scratch("/tmp", "manifest-full", env->scratch, sizeof(env->scratch)));
    EXPECT(cr_loop_make(&env->loop, env->scratch, FS_BYTES, why));
    (void)snprintf(env->dir, sizeof(env->dir), "%s/manifest", env->loop.mount);
    (void)snprintf(env->filler, sizeof(env->filler), "%s/filler", env->loop.mount);
    EXPECT(kv_mailbox_create(&env->mailbox, NULL) == KV_OK);
    EXPECT(kv_manifest_open(env->dir, &env->manifest, NULL) == KV_OK);
}

static void answered(struct kv_msg *msg)
{
    KV_CONTAINER_OF(msg, struct post, batch.msg)->done = true;
}

/* One record; where it is `removes`, a deletion of a key that never was. */
static kv_status put(struct env *env, bool removes)
{
    uint8_t value[VALUE_BYTES];
    char key[16];
    struct post post = {.done = false};
    EXPECT(env->next < KEYS_MAX);
    memset(value, (int)(env->next % 251), sizeof(value));
    (void)snprintf(key, sizeof(key), "k%08u", env->next);
    const struct kv_manifest_put put = {
        .key = (const uint8_t *)key,
        .key_bytes = (uint32_t)strlen(key),
        .value = removes ? NULL : value,
        .value_bytes = removes ? 0 : VALUE_BYTES,
    };
    post.batch = (struct kv_manifest_batch){
        .msg = {.run = answered},
        .reply = env->mailbox,
        .puts = &put,
        .put_count = 1,
        .resumes = kv_manifest_stats(env->manifest).may_resume,
    };
    kv_manifest_write_post(env->manifest, &post.batch);
    while (!post.done) {
        kv_mailbox_wait(env->mailbox, 10000);
        (void)kv_mailbox_run(env->mailbox, 64);
    }
    env->written[env->next++] = removes ? 0 : (uint8_t)(1 + post.batch.status);
    return post.batch.status;
}

static kv_status visit(void *context, const struct kv_manifest_put *record)
{
    struct env *env = context;
    char key[16] = "";
    EXPECT(record->key_bytes == 9 && record->value_bytes == VALUE_BYTES);
    memcpy(key, record->key, 9);
    const unsigned long number = strtoul(key + 1, NULL, 10);
    EXPECT(number < env->next && record->value[0] == number % 251);
    /* OK is there; IO may be, BUSY is not. */
    EXPECT(env->written[number] == 1 + KV_OK || env->written[number] == 1 + KV_IO);
    if (env->written[number] == 1 + KV_OK) env->written[number] = 255;
    return KV_OK;
}

static void env_fini(struct env *env, uint32_t oks)
{
    struct kv_error err = {0};
    kv_manifest_close(env->manifest);
    EXPECT(kv_manifest_open(env->dir, &env->manifest, &err) == KV_OK);
    EXPECT(kv_manifest_scan_now(env->manifest, (const uint8_t *)"k", 1, visit, env, NULL) == KV_OK);
    uint32_t found = 0;
    for (uint32_t i = 0; i < env->next; i++) {
        EXPECT(env->written[i] != 1 + KV_OK); /* Lost. */
        found += env->written[i] == 255;
    }
    EXPECT_EQ_U32(found, oks);
    kv_manifest_close(env->manifest);
    kv_mailbox_destroy(env->mailbox);
    cr_loop_drop(&env->loop);
    ex_remove_tree(env->scratch);
    free(env->written);
}

static uint64_t now_ms(void)
{
    return kv_clock_stopwatch_ns() / 1000000;
}

/* ms until a write succeeds. */
static uint64_t resumes_after(struct env *env, uint32_t *oks)
{
    const uint64_t begun = now_ms();
    EXPECT(unlink(env->filler) == 0);
    while (put(env, false) != KV_OK) {
        EXPECT(now_ms() - begun < 30000);
        (void)usleep(20000);
    }
    ++*oks;
    return now_ms() - begun;
}

static void test_filled_before(void)
{
    struct env env;
    uint32_t oks = 0, more = 0, removed = 0;
    env_init(&env);
    for (; oks < 100; oks++)
        EXPECT(put(&env, false) == KV_OK);
    fill(&env);
    while (!kv_manifest_stats(env.manifest).no_room) {
        EXPECT(put(&env, false) == KV_OK);
        more++;
    }
    (void)printf("  full: %u more records of %d bytes, then no_room\n", more, VALUE_BYTES);
    EXPECT(more * VALUE_BYTES > 3u << 20); /* Of the reserved log. */
    oks += more;
    EXPECT(!kv_manifest_stats(env.manifest).failed && !kv_manifest_stats(env.manifest).may_resume);
    for (uint32_t i = 0; i < 1000; i++)
        removed += put(&env, true) == KV_OK;
    EXPECT_EQ_U32(removed, 1000);
    /* Who does not ask is refused before the log ends; then so are deletions, which may depend on
     * what was refused. */
    while (put(&env, false) == KV_OK)
        oks++;
    EXPECT_EQ_U32(env.written[env.next - 1], 1 + KV_BUSY);
    EXPECT_EQ_U32(put(&env, true), KV_BUSY);
    const uint64_t ms = resumes_after(&env, &oks);
    (void)printf("  written %llu ms after the space came back\n", (unsigned long long)ms);
    EXPECT(ms < RESUME_MS);
    EXPECT(!kv_manifest_stats(env.manifest).no_room);
    for (uint32_t i = 0; i < 2500; i++, oks++)
        EXPECT(put(&env, false) == KV_OK);
    env_fini(&env, oks);
}

static void *fill_later(void *context)
{
    (void)usleep(1000);
    fill(context);
    return NULL;
}

/* While RocksDB begins logs and tables: it may meet the full file system itself. */
static void test_filled_meanwhile(void)
{
    struct env env;
    uint32_t oks = 0, busy = 0, failed = 0;
    uint64_t slowest = 0;
    env_init(&env);
    for (uint32_t cycle = 0; cycle < 3; cycle++) {
        pthread_t filler;
        /* Just before a table is due, or just behind. */
        for (uint32_t i = 0; i < 1300 + 300 * cycle; i++, oks++)
            EXPECT(put(&env, false) == KV_OK);
        EXPECT(pthread_create(&filler, NULL, fill_later, &env) == 0);
        for (uint32_t i = 0; i < 800; i++) {
            const kv_status status = put(&env, false);
            oks += status == KV_OK;
            busy += status == KV_BUSY;
            failed += status == KV_IO;
            EXPECT(status == KV_OK || status == KV_BUSY || status == KV_IO);
        }
        EXPECT(pthread_join(filler, NULL) == 0);
        EXPECT(!kv_manifest_stats(env.manifest).failed);
        const uint64_t ms = resumes_after(&env, &oks);
        slowest = KV_MAX(slowest, ms);
        /* RocksDB deletes what it does not need any more in its own time. */
        for (uint32_t i = 0; i < 100; i++, oks++)
            EXPECT(put(&env, false) == KV_OK);
    }
    (void)printf("  filled meanwhile: %u written, %u refused, %u of unknown result; resumed within "
                 "%llu ms\n",
                 oks, busy, failed, (unsigned long long)slowest);
    EXPECT(busy > 0);
    env_fini(&env, oks);
}

int main(void)
{
    cr_loop_probe("/tmp");
    test_filled_before();
    test_filled_meanwhile();
    HARNESS_END();
}
