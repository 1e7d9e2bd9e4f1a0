/*
 * Space made ahead of its use.
 *
 * Goal: as many free pages are written through as plan/prewrite.h says, and no other; zeros never
 * meet a page of somebody's, also over restarts; what fails of it is a failure of the tier.
 * Method: the tier on real files (ssd_env.h), both ring backends.  That pages were written through
 * is read from the file system (FIEMAP), where it tells.
 */

#include "tests/unit/ssd_env.h"

#include <fcntl.h>
#include <linux/fiemap.h>
#include <linux/fs.h>
#include <sys/ioctl.h>

/* Bytes of the file that the file system calls reserved and never written; -1: it does not tell. */
static int64_t unwritten_bytes(const char *path)
{
    static union {
        struct fiemap map;
        uint8_t room[sizeof(struct fiemap) + 256 * sizeof(struct fiemap_extent)];
    } found;
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    EXPECT(fd >= 0);
    memset(&found, 0, sizeof(found));
    found.map.fm_length = FIEMAP_MAX_OFFSET;
    found.map.fm_flags = FIEMAP_FLAG_SYNC;
    found.map.fm_extent_count = 256;
    const int rc = ioctl(fd, FS_IOC_FIEMAP, &found.map);
    (void)close(fd);
    if (rc != 0 || found.map.fm_mapped_extents == 0) return -1;
    int64_t bytes = 0;
    for (uint32_t i = 0; i < found.map.fm_mapped_extents; i++)
        if (found.map.fm_extents[i].fe_flags & FIEMAP_EXTENT_UNWRITTEN)
            bytes += (int64_t)found.map.fm_extents[i].fe_length;
    return bytes;
}

/* Free pages are written through, as many as plan/prewrite.h says, and others are left alone. */
static void test_ahead(enum kv_ring_choice choice)
{
    struct env env;
    uint32_t pages[PAGES_PER_SEGMENT];
    char path[128];
    uint8_t *buf = aligned_alloc(KV_IO_ALIGN, PAGE_BYTES);
    uint8_t *back = aligned_alloc(KV_IO_ALIGN, PAGE_BYTES);
    env_init(&env, choice);
    EXPECT(env_open(&env, NULL) == KV_OK);
    segment_path(&env, 0, path);
    const int64_t at_first = unwritten_bytes(path);
    EXPECT(kv_ssd_alloc(env.ssd, 3, pages, NULL) == KV_OK);
    EXPECT_EQ_U64(kv_ssd_usage(env.ssd).pages_behind, 3);
    fill(buf, 4);
    EXPECT(page_io(&env, pages[1], buf, true) == KV_OK);
    EXPECT(flush_now(&env) == KV_OK);

    /* The least there is for so small segments: two of them. */
    run_ahead(&env);
    struct kv_ssd_usage usage = kv_ssd_usage(env.ssd);
    EXPECT_EQ_U64(usage.pages_ahead, 3 * PAGES_PER_SEGMENT - 3);
    EXPECT_EQ_U64(usage.bytes_files, 3 * SEGMENT_BYTES);
    EXPECT_EQ_U64(usage.bytes_used, 3 * PAGE_BYTES);
    if (at_first > 0) {
        EXPECT_EQ_I64(at_first, PAGES_PER_SEGMENT * PAGE_BYTES);
        EXPECT_EQ_I64(unwritten_bytes(path), 2 * PAGE_BYTES); /* In use, not written. */
        segment_path(&env, 2, path);
        EXPECT_EQ_I64(unwritten_bytes(path), 0);
    }
    EXPECT(page_io(&env, pages[1], back, false) == KV_OK);
    EXPECT_EQ_MEM(back, buf, PAGE_BYTES);
    EXPECT(kv_ssd_alloc(env.ssd, 8, pages, NULL) == KV_OK);
    EXPECT_EQ_U64(kv_ssd_usage(env.ssd).pages_behind, 3);
    env_close(&env);

    /* A start does not know what was written; it asks nobody for what is in use. */
    EXPECT(env_open(&env, NULL) == KV_OK);
    EXPECT(kv_ssd_claim(env.ssd, 1) == KV_OK);
    run_ahead(&env);
    usage = kv_ssd_usage(env.ssd);
    EXPECT(usage.pages_ahead >= 2 * PAGES_PER_SEGMENT);
    EXPECT(page_io(&env, 1, back, false) == KV_OK);
    EXPECT_EQ_MEM(back, buf, PAGE_BYTES);
    memset(buf, 0, PAGE_BYTES);
    EXPECT(page_io(&env, 0, back, false) == KV_OK);
    EXPECT_EQ_MEM(back, buf, PAGE_BYTES);
    env_fini(&env);
    free(buf);
    free(back);
}

/* A free page that is out of use from now on counts as neither free nor written. */
static void test_ahead_quarantined(enum kv_ring_choice choice)
{
    struct env env;
    uint32_t pages[3 * PAGES_PER_SEGMENT];
    env_init(&env, choice);
    EXPECT(env_open(&env, NULL) == KV_OK);
    run_ahead(&env);
    for (uint32_t page = 0; page < PAGES_PER_SEGMENT; page++)
        EXPECT(kv_ssd_quarantine(env.ssd, page) == KV_OK);
    run_ahead(&env);
    const struct kv_ssd_usage usage = kv_ssd_usage(env.ssd);
    EXPECT_EQ_U32(usage.pages_quarantined, PAGES_PER_SEGMENT);
    EXPECT_EQ_U32(usage.pages_used, 0);
    EXPECT_EQ_U64(usage.pages_ahead, 3 * PAGES_PER_SEGMENT); /* Two segments are ahead again. */
    EXPECT(kv_ssd_alloc(env.ssd, 2 * PAGES_PER_SEGMENT, pages, NULL) == KV_OK);
    EXPECT_EQ_U32(pages[0], PAGES_PER_SEGMENT);
    EXPECT_EQ_U64(kv_ssd_usage(env.ssd).pages_behind, 0);
    run_ahead(&env);
    env_fini(&env);
}

/* Zeros and pages of others, at random: no page ever comes back as something else. */
static void test_ahead_at_random(enum kv_ring_choice choice, bool erases)
{
    enum { PLACES = SEGMENTS * PAGES_PER_SEGMENT };
    struct env env;
    struct kv_error err = {0};
    uint32_t held[PLACES], seeds[PLACES], count = 0, random = 1;
    uint8_t *buf = aligned_alloc(KV_IO_ALIGN, PAGE_BYTES);
    uint8_t *back = aligned_alloc(KV_IO_ALIGN, PAGE_BYTES);
    env_init(&env, choice);
    env.options.erase_within_ns = erases ? 16 : 0;
    EXPECT(env_open(&env, NULL) == KV_OK);
    uint64_t erased = 0;
    for (uint32_t step = 0; step < 600; step++) {
        random = random * 1664525u + 1013904223u;
        const uint32_t dice = random >> 16;
        if (dice % 4 != 0) kv_ssd_tick(env.ssd, step); /* Not waited for. */
        if (dice % 3 != 0 && count < PLACES) {
            const kv_status status = alloc_wait(&env, 1, &held[count], &err);
            EXPECT(status == KV_OK || status == KV_BUSY);
            if (status != KV_OK) continue;
            fill(buf, seeds[count] = step);
            EXPECT(page_io_beside(&env, held[count], buf, true) == KV_OK);
            count++;
        } else if (count > 0) {
            const uint32_t at = dice % count;
            fill(buf, seeds[at]);
            EXPECT(page_io_beside(&env, held[at], back, false) == KV_OK);
            EXPECT_EQ_MEM(back, buf, PAGE_BYTES);
            kv_ssd_free(env.ssd, held[at]);
            held[at] = held[--count];
            seeds[at] = seeds[count];
        }
        if (dice % 97 == 0) {
            run_all(&env);
            erased += kv_ssd_usage(env.ssd).pages_erased;
            env_close(&env);
            EXPECT(env_open(&env, NULL) == KV_OK);
            for (uint32_t i = 0; i < count; i++)
                EXPECT(kv_ssd_claim(env.ssd, held[i]) == KV_OK);
        }
    }
    run_all(&env);
    EXPECT_EQ_U64(kv_ssd_usage(env.ssd).bytes_used, (uint64_t)count * PAGE_BYTES);
    EXPECT_EQ_U32(erased > 0, erases);
    env_fini(&env);
    free(buf);
    free(back);
}

/* What fails of it is a failure of the tier: it is read-only then, and space adds up. */
static void test_ahead_fails(enum kv_ring_choice choice)
{
    struct env env;
    uint32_t page;
    for (int flush = 0; flush < 2; flush++) {
        env_init(&env, choice);
        EXPECT(env_open(&env, NULL) == KV_OK);
        env.bad.fail_writes = flush == 0;
        env.bad.fail_syncs = flush == 1;
        run_ahead(&env);
        env.bad.fail_writes = env.bad.fail_syncs = false;
        run_ahead(&env);
        const struct kv_ssd_usage usage = kv_ssd_usage(env.ssd);
        EXPECT(usage.read_only);
        EXPECT(strstr(usage.read_only_reason, flush == 0
                                                  ? "write of segment-000000.kv"
                                                  : "fdatasync of segment-000000.kv") != NULL);
        EXPECT_EQ_U64(usage.pages_ahead, 0);
        EXPECT_EQ_U64(usage.bytes_used, 0);
        EXPECT(kv_ssd_alloc(env.ssd, 1, &page, NULL) == KV_INVALID);
        env_fini(&env);
    }
}

/* ---- zeros over what was stored ---- */

#define WITHIN_NS 1600000000ull

static bool is_zero(struct env *env, uint32_t page)
{
    static const uint8_t zeros[PAGE_BYTES];
    uint8_t *back = aligned_alloc(KV_IO_ALIGN, PAGE_BYTES);
    EXPECT(page_io(env, page, back, false) == KV_OK);
    const bool same = memcmp(back, zeros, PAGE_BYTES) == 0;
    free(back);
    return same;
}

/* Time goes on by `ns`, a hundredth at a time. */
static void pass_time(struct env *env, uint64_t ns)
{
    for (uint32_t i = 0; i < 100; i++) {
        env->now_ns += ns / 100;
        run_ahead(env);
    }
}

static void store(struct env *env, uint32_t page, uint32_t seed)
{
    uint8_t *buf = aligned_alloc(KV_IO_ALIGN, PAGE_BYTES);
    fill(buf, seed);
    EXPECT(page_io(env, page, buf, true) == KV_OK);
    free(buf);
}

/* What is free again is all zeros within the time stated, and what is in use stays; also what a
 * start finds without an owner. */
static void test_erase(enum kv_ring_choice choice)
{
    struct env env;
    uint32_t pages[12];
    struct kv_error err = {0};
    env_init(&env, choice);
    env.options.erase_within_ns = WITHIN_NS;
    EXPECT(env_open(&env, NULL) == KV_OK);
    run_ahead(&env);
    pass_time(&env, WITHIN_NS);
    EXPECT_EQ_U64(kv_ssd_usage(env.ssd).pages_erased, 0); /* Nothing was stored. */
    EXPECT_EQ_U32(kv_ssd_usage(env.ssd).pages_unerased, 0);
    EXPECT(alloc_wait(&env, 12, pages, &err) == KV_OK);
    for (uint32_t i = 0; i < 12; i++)
        store(&env, pages[i], i);
    for (uint32_t i = 0; i < 12; i += 2)
        kv_ssd_free(env.ssd, pages[i]);
    EXPECT_EQ_U32(kv_ssd_usage(env.ssd).pages_unerased, 6);
    run_ahead(&env);
    EXPECT(!is_zero(&env, pages[0])); /* No sooner than needed: somebody may want it. */
    uint32_t again;
    EXPECT(kv_ssd_alloc(env.ssd, 1, &again, NULL) == KV_OK);
    EXPECT_EQ_U32(again, pages[0]);
    EXPECT_EQ_U32(kv_ssd_usage(env.ssd).pages_unerased, 5);
    store(&env, again, 100);
    pass_time(&env, WITHIN_NS);
    for (uint32_t i = 0; i < 12; i++)
        EXPECT_EQ_U32(is_zero(&env, pages[i]), i % 2 == 0 && i > 0);
    EXPECT_EQ_U64(kv_ssd_usage(env.ssd).pages_erased, 5);
    EXPECT_EQ_U32(kv_ssd_usage(env.ssd).pages_unerased, 0);
    EXPECT_EQ_U64(kv_ssd_usage(env.ssd).bytes_used, 7 * PAGE_BYTES);
    env_close(&env);

    /* Half of them has a record; nobody knows of the others. */
    EXPECT(env_open(&env, NULL) == KV_OK);
    for (uint32_t i = 1; i < 6; i += 2)
        EXPECT(kv_ssd_claim(env.ssd, pages[i]) == KV_OK);
    EXPECT(kv_ssd_usage(env.ssd).pages_unerased > 0);
    pass_time(&env, WITHIN_NS);
    EXPECT_EQ_U32(kv_ssd_usage(env.ssd).pages_unerased, 0);
    for (uint32_t i = 0; i < 12; i++)
        EXPECT_EQ_U32(is_zero(&env, pages[i]), !(i % 2 == 1 && i < 6));
    env_fini(&env);
}

/* A place that is out of use is not written to; one in a closed segment is, when that opens. */
static void test_erase_closed(enum kv_ring_choice choice)
{
    struct env env;
    uint32_t pages[PAGES_PER_SEGMENT];
    struct kv_error err = {0};
    env_init(&env, choice);
    env.options.erase_within_ns = WITHIN_NS;
    EXPECT(env_open(&env, NULL) == KV_OK);
    EXPECT(alloc_wait(&env, PAGES_PER_SEGMENT, pages, &err) == KV_OK);
    for (uint32_t i = 0; i < PAGES_PER_SEGMENT; i++)
        store(&env, pages[i], i);
    EXPECT(kv_ssd_quarantine(env.ssd, pages[2]) == KV_OK);
    kv_ssd_segment_close(env.ssd, 0);
    for (uint32_t i = 0; i < PAGES_PER_SEGMENT; i++)
        kv_ssd_free(env.ssd, pages[i]);
    pass_time(&env, 2 * WITHIN_NS);
    EXPECT(!is_zero(&env, pages[0]));
    kv_ssd_segments_open(env.ssd);
    pass_time(&env, WITHIN_NS);
    for (uint32_t i = 0; i < PAGES_PER_SEGMENT; i++)
        EXPECT_EQ_U32(is_zero(&env, pages[i]), i != 2);
    env_fini(&env);
}

/* A write or flush that failed: read-only, and the pages count as not erased. */
static void test_erase_fails(enum kv_ring_choice choice)
{
    struct env env;
    uint32_t pages[4];
    struct kv_error err = {0};
    for (int flush = 0; flush < 2; flush++) {
        env_init(&env, choice);
        env.options.erase_within_ns = WITHIN_NS;
        EXPECT(env_open(&env, NULL) == KV_OK);
        run_ahead(&env);
        EXPECT(alloc_wait(&env, 4, pages, &err) == KV_OK);
        store(&env, pages[0], 1);
        for (uint32_t i = 0; i < 4; i++)
            kv_ssd_free(env.ssd, pages[i]);
        env.bad.fail_writes = flush == 0;
        env.bad.fail_syncs = flush == 1;
        pass_time(&env, WITHIN_NS);
        const struct kv_ssd_usage usage = kv_ssd_usage(env.ssd);
        EXPECT(usage.read_only);
        EXPECT_EQ_U64(usage.pages_erased, 0);
        EXPECT_EQ_U32(usage.pages_unerased, 4);
        EXPECT_EQ_U64(usage.bytes_used, 0);
        env_fini(&env);
    }
}

static void test_backend(enum kv_ring_choice choice)
{
    test_erase(choice);
    test_erase_closed(choice);
    test_erase_fails(choice);
    test_ahead(choice);
    test_ahead_quarantined(choice);
    test_ahead_at_random(choice, false);
    test_ahead_at_random(choice, true);
    test_ahead_fails(choice);
}

int main(void)
{
    struct env env;
    struct kv_error err = {0};

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
