/*
 * The SSD tier on real files.
 *
 * Goal: space (all or nothing, bounds, look-ahead, claims), page I/O, group commit, what a restart
 * finds, and each failure the header names.
 * Method: small segments in a temporary folder, both ring backends.  A failing write or fdatasync
 * is made by a disk around the ring.  A full disk is a file-size limit.  That pages were written
 * through is read from the file system (FIEMAP), where it tells.
 */

#include "kvstore/tier/ssd_segment.h"
#include "tests/unit/ssd_env.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <fcntl.h>

#define FLUSHES 50u

static void test_space(enum kv_ring_choice choice)
{
    struct env env;
    struct kv_error err = {0};
    uint32_t pages[64];
    env_init(&env, choice);
    EXPECT(env_open(&env, &err) == KV_OK);
    EXPECT_EQ_U64(kv_ssd_usage(env.ssd).bytes_files, SEGMENT_BYTES);

    EXPECT(kv_ssd_alloc(env.ssd, 3, pages, &err) == KV_OK);
    EXPECT_EQ_U32(pages[0], 0);
    EXPECT_EQ_U32(pages[2], 2);
    EXPECT_EQ_U64(kv_ssd_usage(env.ssd).bytes_used, 3 * PAGE_BYTES);
    EXPECT_EQ_U64(kv_ssd_usage(env.ssd).bytes_files, SEGMENT_BYTES);
    EXPECT(kv_ssd_alloc(env.ssd, 4, pages, &err) == KV_OK);
    EXPECT_EQ_U64(kv_ssd_usage(env.ssd).bytes_files, SEGMENT_BYTES); /* Nothing by itself. */

    /* All or nothing. */
    EXPECT(kv_ssd_alloc(env.ssd, 26, pages, &err) == KV_BUSY);
    EXPECT(strstr(err.text, "full") != NULL);
    EXPECT_EQ_U64(kv_ssd_usage(env.ssd).bytes_used, 7 * PAGE_BYTES);
    EXPECT(kv_ssd_alloc(env.ssd, 25, pages, &err) == KV_MISS); /* Needs three more files. */
    EXPECT(kv_ssd_alloc(env.ssd, 25, pages, &err) == KV_MISS); /* One is being made. */
    EXPECT_EQ_U32(env.bad.creates, 2); /* With the first one. */
    EXPECT(alloc_wait(&env, 25, pages, &err) == KV_OK);
    EXPECT_EQ_U32(env.bad.creates, 4);
    EXPECT_EQ_U64(kv_ssd_usage(env.ssd).bytes_files, SEGMENTS * SEGMENT_BYTES);
    EXPECT(kv_ssd_alloc(env.ssd, 1, pages, &err) == KV_BUSY);
    kv_ssd_free(env.ssd, 12);
    EXPECT(kv_ssd_alloc(env.ssd, 1, pages, &err) == KV_OK);
    EXPECT_EQ_U32(pages[0], 12);
    EXPECT_EQ_U64(kv_ssd_usage(env.ssd).bytes_files, SEGMENTS * SEGMENT_BYTES);
    EXPECT(!kv_ssd_usage(env.ssd).read_only);
    EXPECT(kv_ssd_usage(env.ssd).read_only_reason == NULL);
    env_fini(&env);
}

static void test_pages_and_reopen(enum kv_ring_choice choice)
{
    struct env env;
    uint32_t pages[20];
    uint8_t *buf = aligned_alloc(KV_IO_ALIGN, PAGE_BYTES);
    uint8_t *back = aligned_alloc(KV_IO_ALIGN, PAGE_BYTES);
    env_init(&env, choice);
    EXPECT(env_open(&env, NULL) == KV_OK);
    EXPECT(alloc_wait(&env, 20, pages, NULL) == KV_OK);
    for (uint32_t i = 0; i < 20; i++) {
        fill(buf, pages[i]);
        EXPECT(page_io(&env, pages[i], buf, true) == KV_OK);
    }
    EXPECT(flush_now(&env) == KV_OK);
    EXPECT_EQ_U64(kv_ssd_usage(env.ssd).flushes, 3); /* One per segment written. */
    EXPECT_EQ_U64(kv_ssd_usage(env.ssd).pages_written, 20);
    env_close(&env);

    /* After a restart nothing is used until it is claimed. */
    EXPECT(env_open(&env, NULL) == KV_OK);
    EXPECT_EQ_U64(kv_ssd_usage(env.ssd).bytes_used, 0);
    for (uint32_t i = 0; i < 20; i += 2) {
        EXPECT(kv_ssd_claim(env.ssd, pages[i]) == KV_OK);
        EXPECT(kv_ssd_claim(env.ssd, pages[i]) == KV_CORRUPT);
        fill(buf, pages[i]);
        EXPECT(page_io(&env, pages[i], back, false) == KV_OK);
        EXPECT_EQ_MEM(back, buf, PAGE_BYTES);
    }
    EXPECT(kv_ssd_claim(env.ssd, 1000) == KV_MISS);
    EXPECT(kv_ssd_alloc(env.ssd, 1, pages, NULL) == KV_OK);
    EXPECT_EQ_U32(pages[0], 1);
    env_close(&env);

    /* A missing segment in the middle: its pages are a miss, its place is used again. */
    char path[128];
    segment_path(&env, 1, path);
    EXPECT(unlink(path) == 0);
    EXPECT(env_open(&env, NULL) == KV_OK);
    EXPECT(kv_ssd_claim(env.ssd, PAGES_PER_SEGMENT) == KV_MISS);
    EXPECT(kv_ssd_claim(env.ssd, 2 * PAGES_PER_SEGMENT) == KV_OK);
    EXPECT(alloc_wait(&env, 16, pages, NULL) == KV_OK);
    EXPECT(access(path, F_OK) == 0);
    env_fini(&env);
    free(buf);
    free(back);
}

static void test_group_commit(enum kv_ring_choice choice)
{
    static struct flush_io flushes[FLUSHES];
    struct env env;
    uint32_t page;
    uint8_t *buf = aligned_alloc(KV_IO_ALIGN, PAGE_BYTES);
    env_init(&env, choice);
    EXPECT(env_open(&env, NULL) == KV_OK);
    EXPECT(kv_ssd_alloc(env.ssd, 1, &page, NULL) == KV_OK);

    for (uint32_t i = 0; i < FLUSHES; i++) {
        struct page_io io = {.op = {.page = page, .buf = buf, .done = page_done}};
        fill(buf, i);
        flushes[i] = (struct flush_io){.flush = {.done = flush_done}};
        kv_ssd_write_start(env.ssd, &io.op);
        while (!io.done)
            (void)kv_disk_run(env.disk, -1, -1);
        EXPECT(kv_ssd_flush_start(env.ssd, &flushes[i].flush) == KV_OK);
    }
    run_all(&env);
    uint64_t syncs = kv_ssd_usage(env.ssd).flushes;
    for (uint32_t i = 0; i < FLUSHES; i++) {
        EXPECT_EQ_U32(flushes[i].done_count, 1);
        EXPECT(flushes[i].status == KV_OK);
    }
    (void)printf("  write and flush, overlapping: %u flushes, %u fdatasyncs\n", FLUSHES,
                 (unsigned)syncs);
    EXPECT(syncs <= FLUSHES);

    /* All at once and nothing written since: one fdatasync serves them all. */
    for (uint32_t i = 0; i < FLUSHES; i++) {
        flushes[i] = (struct flush_io){.flush = {.done = flush_done}};
        EXPECT(kv_ssd_flush_start(env.ssd, &flushes[i].flush) == KV_OK);
    }
    run_all(&env);
    EXPECT_EQ_U64(kv_ssd_usage(env.ssd).flushes, syncs + 1);
    syncs++;

    /* A write that ends during a round is not covered by it: one more round. */
    struct page_io io = {.op = {.page = page, .buf = buf, .done = page_done}};
    flushes[0] = (struct flush_io){.flush = {.done = flush_done}};
    flushes[1] = (struct flush_io){.flush = {.done = flush_done}};
    kv_ssd_write_start(env.ssd, &io.op);
    EXPECT(kv_ssd_flush_start(env.ssd, &flushes[0].flush) == KV_OK);
    EXPECT(kv_ssd_flush_start(env.ssd, &flushes[1].flush) == KV_OK);
    run_all(&env);
    EXPECT(io.done);
    EXPECT_EQ_U32(flushes[0].done_count, 1);
    EXPECT_EQ_U32(flushes[1].done_count, 1);
    EXPECT(kv_ssd_usage(env.ssd).flushes <= syncs + 2);
    EXPECT(page_io(&env, page, buf, true) == KV_OK);
    EXPECT(flush_now(&env) == KV_OK);
    env_fini(&env);
    free(buf);
}

struct writer {
    struct page_io io;
    struct flush_io commit;
};

static void writer_written(struct kv_ssd_op *op, kv_status status)
{
    struct writer *writer = (struct writer *)op;
    page_done(op, status);
    EXPECT(kv_ssd_flush_start(op->ssd, &writer->commit.flush) == KV_OK);
}

/* Many commits at once, each writing a page and then flushing: they share the fdatasyncs. */
static void test_many_commits(enum kv_ring_choice choice)
{
    static struct writer writers[24];
    struct env env;
    uint32_t pages[24];
    uint8_t *buf = aligned_alloc(KV_IO_ALIGN, PAGE_BYTES);
    fill(buf, 1);
    env_init(&env, choice);
    EXPECT(env_open(&env, NULL) == KV_OK);
    EXPECT(alloc_wait(&env, 24, pages, NULL) == KV_OK);
    for (uint32_t i = 0; i < 24; i++) {
        writers[i] =
            (struct writer){.io = {.op = {.page = pages[i], .buf = buf, .done = writer_written}},
                            .commit = {.flush = {.done = flush_done}}};
        kv_ssd_write_start(env.ssd, &writers[i].io.op);
    }
    run_all(&env);
    for (uint32_t i = 0; i < 24; i++) {
        EXPECT(writers[i].io.status == KV_OK);
        EXPECT_EQ_U32(writers[i].commit.done_count, 1);
        EXPECT(writers[i].commit.status == KV_OK);
    }
    const struct kv_ssd_usage usage = kv_ssd_usage(env.ssd);
    EXPECT_EQ_U64(usage.pages_written, 24);
    EXPECT(usage.flushes < 24);
    (void)printf("  24 commits at once, 3 segments: %u fdatasyncs\n", (unsigned)usage.flushes);
    env_fini(&env);
    free(buf);
}

static void test_failed_flush(enum kv_ring_choice choice)
{
    struct env env;
    struct kv_error err = {0};
    struct flush_io flushes[3];
    uint32_t page;
    uint32_t more;
    uint8_t *buf = aligned_alloc(KV_IO_ALIGN, PAGE_BYTES);
    uint8_t *back = aligned_alloc(KV_IO_ALIGN, PAGE_BYTES);
    env_init(&env, choice);
    EXPECT(env_open(&env, NULL) == KV_OK);
    EXPECT(kv_ssd_alloc(env.ssd, 1, &page, NULL) == KV_OK);
    fill(buf, 7);
    EXPECT(page_io(&env, page, buf, true) == KV_OK);

    env.bad.fail_syncs = env.bad.fail_writes = true;
    for (uint32_t i = 0; i < 3; i++) {
        flushes[i] = (struct flush_io){.flush = {.done = flush_done}};
        EXPECT(kv_ssd_flush_start(env.ssd, &flushes[i].flush) == KV_OK);
    }
    run_all(&env);
    for (uint32_t i = 0; i < 3; i++) {
        EXPECT_EQ_U32(flushes[i].done_count, 1);
        EXPECT(flushes[i].status == KV_IO);
    }
    EXPECT(kv_ssd_usage(env.ssd).read_only);
    EXPECT(strstr(kv_ssd_usage(env.ssd).read_only_reason, "segment-000000.kv") != NULL);
    EXPECT(page_io(&env, page, buf, true) == KV_IO); /* A failed write is that op's alone. */
    EXPECT(kv_ssd_usage(env.ssd).io_errors >= 2);

    /* The disk is well again: reads go on, everything else stays refused. */
    env.bad.fail_syncs = env.bad.fail_writes = false;
    EXPECT(page_io(&env, page, back, false) == KV_OK);
    EXPECT_EQ_MEM(back, buf, PAGE_BYTES);
    EXPECT(kv_ssd_alloc(env.ssd, 1, &more, &err) == KV_INVALID);
    EXPECT(strstr(err.text, "read-only") != NULL);
    struct flush_io refused = {.flush = {.done = flush_done}};
    const uint64_t flushes_before = kv_ssd_usage(env.ssd).flushes;
    EXPECT(kv_ssd_flush_start(env.ssd, &refused.flush) == KV_IO);
    run_all(&env);
    EXPECT_EQ_U32(refused.done_count, 0);
    EXPECT_EQ_U64(kv_ssd_usage(env.ssd).flushes, flushes_before); /* The file is left alone. */
    kv_ssd_free(env.ssd, page);
    run_ahead(&env); /* It does nothing by itself either. */
    EXPECT_EQ_U64(kv_ssd_usage(env.ssd).flushes, flushes_before);
    EXPECT_EQ_U64(kv_ssd_usage(env.ssd).pages_ahead, 0);
    env_close(&env);

    EXPECT(env_open(&env, NULL) == KV_OK);
    EXPECT(!kv_ssd_usage(env.ssd).read_only);
    env_fini(&env);
    free(buf);
    free(back);
}

/* Until so many pages were written through, and no other segment. */
static void run_ahead_pages(struct env *env, uint32_t pages)
{
    kv_ssd_tick(env->ssd, 0);
    run_all(env);
    EXPECT_EQ_U64(kv_ssd_usage(env->ssd).pages_ahead, pages);
}

static void test_disk_full(enum kv_ring_choice choice)
{
    struct env env;
    struct kv_error err = {0};
    struct rlimit before;
    uint32_t pages[32];
    env_init(&env, choice);
    EXPECT(env_open(&env, NULL) == KV_OK);

    run_ahead_pages(&env, 8);
    (void)signal(SIGXFSZ, SIG_IGN);
    EXPECT(getrlimit(RLIMIT_FSIZE, &before) == 0);
    const struct rlimit small = {.rlim_cur = SEGMENT_BYTES - 1, .rlim_max = before.rlim_max};
    EXPECT(setrlimit(RLIMIT_FSIZE, &small) == 0);
    /* What is made ahead fails, once, and nobody minds. */
    EXPECT(kv_ssd_alloc(env.ssd, 7, pages, &err) == KV_OK);
    run_ahead(&env);
    run_ahead(&env);
    EXPECT_EQ_U32(env.bad.creates, 2); /* With the first one. */
    EXPECT_EQ_U64(kv_ssd_usage(env.ssd).bytes_files, SEGMENT_BYTES);
    EXPECT(kv_ssd_alloc(env.ssd, 1, pages, &err) == KV_OK);
    EXPECT(alloc_wait(&env, 1, pages, &err) == KV_IO);
    EXPECT_EQ_I64(err.sys_errno, EFBIG);
    EXPECT(strstr(err.text, "segment-000001.kv") != NULL);
    EXPECT(strstr(err.text, "File too large") != NULL);
    char path[128];
    segment_path(&env, 1, path);
    EXPECT(access(path, F_OK) != 0); /* Nothing left behind. */
    EXPECT(!kv_ssd_usage(env.ssd).read_only);

    EXPECT(setrlimit(RLIMIT_FSIZE, &before) == 0);
    EXPECT(alloc_wait(&env, 1, pages, &err) == KV_OK);
    EXPECT_EQ_U32(pages[0], PAGES_PER_SEGMENT);
    env_fini(&env);
}

static void write_byte(const char *path, off_t offset, uint8_t byte)
{
    const int fd = open(path, O_RDWR | O_CLOEXEC);
    EXPECT(fd >= 0);
    EXPECT_EQ_I64(pwrite(fd, &byte, 1, offset), 1);
    (void)close(fd);
}

static void test_refused_at_open(enum kv_ring_choice choice)
{
    struct env env;
    struct kv_error err = {0};
    char path[128];
    char other[128];
    env_init(&env, choice);
    segment_path(&env, 0, path);
    segment_path(&env, 2, other);

    env.options.bytes_max = SEGMENT_BYTES - 1;
    EXPECT(env_open(&env, &err) == KV_INVALID);
    EXPECT(strstr(err.text, "69631") != NULL);
    EXPECT(strstr(err.text, "69632") != NULL);
    env.options.bytes_max = SEGMENT_BYTES; /* Exactly one. */
    EXPECT(env_open(&env, &err) == KV_OK);
    env_close(&env);

    env.options.page_bytes = 4096;
    EXPECT(env_open(&env, &err) == KV_INVALID);
    EXPECT(strstr(err.text, "another model") != NULL);
    env.options.page_bytes = PAGE_BYTES;
    env.options.segment_bytes = SEGMENT_BYTES - PAGE_BYTES;
    EXPECT(env_open(&env, &err) == KV_INVALID);
    env.options.segment_bytes = 8192; /* Header and half a page. */
    EXPECT(env_open(&env, &err) == KV_INVALID);
    env.options.segment_bytes = SEGMENT_BYTES;

    EXPECT(rename(path, other) == 0);
    EXPECT(env_open(&env, &err) == KV_INVALID);
    EXPECT(rename(other, path) == 0);
    /* A damaged header costs nothing: pages are verified by themselves. */
    write_byte(path, 20, 0xee);
    EXPECT(env_open(&env, &err) == KV_OK);
    EXPECT_EQ_U64(kv_ssd_usage(env.ssd).segments_repaired, 1);
    EXPECT(kv_ssd_claim(env.ssd, 0) == KV_OK);
    env_close(&env);
    EXPECT(env_open(&env, &err) == KV_OK);
    EXPECT_EQ_U64(kv_ssd_usage(env.ssd).segments_repaired, 0);
    env_close(&env);
    /* A cut file loses the pages beyond the cut, until the next start only by its records. */
    EXPECT(truncate(path, 4096 + PAGE_BYTES + 100) == 0);
    EXPECT(env_open(&env, &err) == KV_OK);
    EXPECT_EQ_U64(kv_ssd_usage(env.ssd).segments_repaired, 1);
    EXPECT(kv_ssd_claim(env.ssd, 0) == KV_OK);
    EXPECT(kv_ssd_claim(env.ssd, 1) == KV_MISS);
    env_close(&env);
    EXPECT(truncate(path, 100) == 0);
    EXPECT(env_open(&env, &err) == KV_OK);
    EXPECT(kv_ssd_claim(env.ssd, 0) == KV_MISS);
    env_close(&env);

    /* A crash while a segment was made: no bytes, or zeros. */
    EXPECT(truncate(path, 0) == 0);
    EXPECT(env_open(&env, &err) == KV_OK);
    env_close(&env);
    EXPECT(truncate(path, 0) == 0);
    EXPECT(truncate(path, SEGMENT_BYTES) == 0);
    EXPECT(env_open(&env, &err) == KV_OK);
    EXPECT(kv_ssd_claim(env.ssd, 0) == KV_MISS); /* Nothing was ever stored in it. */
    env_close(&env);
    EXPECT(unlink(path) == 0);

    const char *dir = env.options.dir;
    env.options.dir = "/nonexistent/ssd";
    EXPECT(env_open(&env, &err) == KV_IO);
    EXPECT(strstr(err.text, "/nonexistent/ssd") != NULL);
    env.options.dir = dir;
    env_fini(&env);
}

static void test_less_space_than_before(enum kv_ring_choice choice)
{
    struct env env;
    uint32_t pages[32];
    env_init(&env, choice);
    EXPECT(env_open(&env, NULL) == KV_OK);
    EXPECT(alloc_wait(&env, 32, pages, NULL) == KV_OK);
    env_close(&env);

    env.options.bytes_max = 2 * SEGMENT_BYTES;
    EXPECT(env_open(&env, NULL) == KV_OK);
    for (uint32_t page = 14; page < 32; page++)
        EXPECT(kv_ssd_claim(env.ssd, page) == KV_OK); /* Readable, though beyond. */
    EXPECT(kv_ssd_alloc(env.ssd, 1, pages, NULL) == KV_BUSY);
    for (uint32_t page = 14; page < 17; page++)
        kv_ssd_free(env.ssd, page);
    EXPECT(kv_ssd_alloc(env.ssd, 1, pages, NULL) == KV_OK);
    EXPECT(kv_ssd_alloc(env.ssd, 1, pages, NULL) == KV_BUSY);
    EXPECT_EQ_U64(kv_ssd_usage(env.ssd).bytes_files, 4 * SEGMENT_BYTES);
    env_fini(&env);
}

struct retest_io {
    struct kv_ssd_retest retest;
    kv_status status;
};

static void retest_done(struct kv_ssd_retest *retest, kv_status status)
{
    ((struct retest_io *)retest)->status = status;
}

static kv_status retest_now(struct env *env, uint32_t page)
{
    struct retest_io io = {.retest = {.page = page, .done = retest_done},
                           .status = KV_STATUS_COUNT};
    const kv_status status = kv_ssd_retest_start(env->ssd, &io.retest);
    if (status != KV_OK) return status;
    EXPECT(io.status == KV_STATUS_COUNT);
    run_all(env);
    return io.status;
}

/* A quarantined page is free again when it keeps what is written to it, and holds zeros then; when
 * it does not, only that is known. */
static void test_release(enum kv_ring_choice choice)
{
    struct env env;
    uint32_t pages[PAGES_PER_SEGMENT], again[2];
    uint8_t *buf = aligned_alloc(KV_IO_ALIGN, PAGE_BYTES);
    env_init(&env, choice);
    EXPECT(env_open(&env, NULL) == KV_OK);
    EXPECT(kv_ssd_alloc(env.ssd, PAGES_PER_SEGMENT, pages, NULL) == KV_OK);
    fill(buf, 3);
    for (uint32_t i = 0; i < PAGES_PER_SEGMENT; i++)
        EXPECT(page_io(&env, pages[i], buf, true) == KV_OK);
    for (uint32_t i = 0; i < 3; i++)
        EXPECT(kv_ssd_quarantine(env.ssd, pages[i]) == KV_OK);
    EXPECT(kv_ssd_quarantine(env.ssd, 2 * PAGES_PER_SEGMENT) == KV_OK);
    EXPECT(retest_now(&env, 2 * PAGES_PER_SEGMENT) == KV_MISS); /* There is no such file. */

    env.bad.fail_writes = true;
    EXPECT(retest_now(&env, pages[0]) == KV_IO);
    env.bad.fail_writes = false;
    env.bad.fail_reads = true;
    EXPECT(retest_now(&env, pages[0]) == KV_IO);
    env.bad.fail_reads = false;
    env.bad.lie = true;
    EXPECT(retest_now(&env, pages[0]) == KV_CORRUPT);
    env.bad.lie = false;
    struct kv_ssd_usage usage = kv_ssd_usage(env.ssd);
    EXPECT(!usage.read_only);
    EXPECT_EQ_U32(usage.pages_quarantined, 3);
    EXPECT_EQ_U32(usage.ops_inflight, 0);

    EXPECT(retest_now(&env, pages[0]) == KV_OK);
    EXPECT(retest_now(&env, pages[2]) == KV_OK);
    kv_ssd_release(env.ssd, pages[2]);
    kv_ssd_release(env.ssd, pages[0]);
    usage = kv_ssd_usage(env.ssd);
    EXPECT_EQ_U32(usage.pages_quarantined, 1);
    EXPECT_EQ_U32(usage.pages_free, 2);
    EXPECT_EQ_U32(usage.pages_unerased, 0);
    EXPECT_EQ_U32(usage.pages_used, PAGES_PER_SEGMENT - 3);
    EXPECT(page_io(&env, pages[0], buf, false) == KV_OK);
    for (uint32_t i = 0; i < PAGE_BYTES; i++)
        EXPECT(buf[i] == 0);
    EXPECT(kv_ssd_alloc(env.ssd, 2, again, NULL) == KV_OK);
    EXPECT_EQ_U32(again[0], pages[0]);
    EXPECT_EQ_U32(again[1], pages[2]);

    /* In a closed segment it is free when that opens. */
    kv_ssd_segment_close(env.ssd, 0);
    EXPECT(retest_now(&env, pages[1]) == KV_OK);
    kv_ssd_release(env.ssd, pages[1]);
    EXPECT_EQ_U32(kv_ssd_usage(env.ssd).pages_closed, 1);
    kv_ssd_segments_open(env.ssd);
    EXPECT(kv_ssd_alloc(env.ssd, 1, again, NULL) == KV_OK);
    EXPECT_EQ_U32(again[0], pages[1]);

    EXPECT(kv_ssd_quarantine(env.ssd, pages[1]) == KV_OK);
    env.bad.fail_syncs = true;
    EXPECT(retest_now(&env, pages[1]) == KV_INVALID); /* As after any flush that failed. */
    EXPECT(kv_ssd_usage(env.ssd).read_only);
    EXPECT(retest_now(&env, pages[1]) == KV_INVALID);
    env_fini(&env);
    free(buf);
}

static void test_backend(enum kv_ring_choice choice)
{
    test_release(choice);
    test_space(choice);
    test_pages_and_reopen(choice);
    test_group_commit(choice);
    test_many_commits(choice);
    test_failed_flush(choice);
    test_disk_full(choice);
    test_refused_at_open(choice);
    test_less_space_than_before(choice);
}

int main(void)
{
    struct env env;
    struct kv_error err = {0};
    uint32_t number = 0;

    EXPECT(kv_ssd_segment_parse("segment-000042.kv", &number));
    EXPECT_EQ_U32(number, 42);
    EXPECT(!kv_ssd_segment_parse("segment-00042.kv", &number));
    EXPECT(!kv_ssd_segment_parse("segment-000042.kv~", &number));
    EXPECT(!kv_ssd_segment_parse("segment-00004x.kv", &number));

    env_init(&env, KV_RING_AUTO);
    const bool has_uring = strcmp(kv_disk_backend(env.ring), "io_uring") == 0;
    const kv_status status = env_open(&env, &err);
    env_fini(&env);
    if (status != KV_OK && strstr(err.text, "O_DIRECT") != NULL) SKIP("no O_DIRECT in this folder");
    EXPECT(status == KV_OK);

    if (has_uring) test_backend(KV_RING_URING);
    test_backend(KV_RING_POOL);
    HARNESS_END();
}
