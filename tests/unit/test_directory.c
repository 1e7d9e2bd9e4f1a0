/*
 * The superblock on disk.
 *
 * Goal: a new directory is made once and found again; every other kind (older, newer, of unknown
 * features, of another shape, damaged, unreadable) is refused in one sentence that says what to do,
 * and nothing in it changes; one damaged copy is put right.
 */

#include "kvstore/base/bytes.h"
#include "kvstore/base/checksum.h"
#include "kvstore/store/directory.h"
#include "tests/harness.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

static struct kv_disk disk;
static char dir[64];
static char path[128];
static struct kv_superblock got;
static struct kv_error err;
static uint32_t damaged;

static const struct kv_superblock want = {
    .page_bytes = 20480, .window_tokens = 16, .segment_bytes = 8u << 20, .created_ms = 7};

static const char *in_dir(const char *name)
{
    (void)snprintf(path, sizeof(path), "%s/%s", dir, name);
    return path;
}

static void read_back(uint8_t bytes[KV_SUPERBLOCK_BYTES])
{
    const int fd = open(in_dir("superblock"), O_RDONLY);
    EXPECT(fd >= 0);
    EXPECT(read(fd, bytes, KV_SUPERBLOCK_BYTES) == (ssize_t)KV_SUPERBLOCK_BYTES);
    (void)close(fd);
}

static void put(const uint8_t *bytes, size_t count)
{
    const int fd = open(in_dir("superblock"), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    EXPECT(fd >= 0);
    EXPECT(write(fd, bytes, count) == (ssize_t)count);
    (void)close(fd);
}

/* Opens, and expects a refusal with these words that leaves the file as it was. */
static void refused(const struct kv_superblock *by, kv_status status, const char *word1,
                    const char *word2)
{
    uint8_t before[KV_SUPERBLOCK_BYTES], after[KV_SUPERBLOCK_BYTES];
    const bool has = access(in_dir("superblock"), F_OK) == 0;
    if (has) read_back(before);
    err.text[0] = '\0';
    EXPECT(kv_directory_open(&disk, dir, by, &got, &err) == status);
    (void)printf("  %s\n", err.text);
    EXPECT(strstr(err.text, word1) != NULL);
    EXPECT(strstr(err.text, word2) != NULL);
    EXPECT(strstr(err.text, dir) != NULL);
    if (has) read_back(after);
    if (has) EXPECT_EQ_MEM(after, before, sizeof(before));
    EXPECT((access(in_dir("superblock"), F_OK) == 0) == has);
    EXPECT(access(in_dir("superblock.new"), F_OK) != 0);
}

static void test_new_and_again(void)
{
    struct kv_directory_id id;
    EXPECT(kv_directory_read(&disk, dir, &got, &damaged, &err) == KV_MISS);
    EXPECT(kv_directory_open(&disk, dir, &want, &got, &err) == KV_OK);
    id = got.id;
    EXPECT(kv_directory_open(&disk, dir, &want, &got, &err) == KV_OK);
    EXPECT_EQ_MEM(got.id.bytes, id.bytes, 16);
    EXPECT_EQ_U64(got.created_ms, 7);
    EXPECT(kv_directory_read(&disk, dir, &got, &damaged, &err) == KV_OK);
    EXPECT_EQ_U32(damaged, 0);
}

static void test_one_copy_damaged(void)
{
    uint8_t bytes[KV_SUPERBLOCK_BYTES], whole[KV_SUPERBLOCK_BYTES];
    const size_t at[] = {0, 5000};
    read_back(whole);
    for (size_t i = 0; i < KV_ARRAY_COUNT(at); i++) {
        memcpy(bytes, whole, sizeof(bytes));
        bytes[at[i]] ^= 4;
        put(bytes, sizeof(bytes));
        EXPECT(kv_directory_read(&disk, dir, &got, &damaged, &err) == KV_OK);
        EXPECT_EQ_U32(damaged, 1);
        EXPECT(kv_directory_open(&disk, dir, &want, &got, &err) == KV_OK);
        read_back(bytes);
        EXPECT_EQ_MEM(bytes, whole, sizeof(whole));
    }
    put(whole, KV_SUPERBLOCK_COPY_BYTES); /* Cut: the second copy is what is missing. */
    EXPECT(kv_directory_open(&disk, dir, &want, &got, &err) == KV_OK);
    read_back(bytes);
    EXPECT_EQ_MEM(bytes, whole, sizeof(whole));
    memset(bytes, 0, sizeof(bytes));
    put(bytes, sizeof(bytes));
    refused(&want, KV_CORRUPT, "damaged", "another state.dir");
    put(bytes, 0);
    EXPECT(kv_directory_open(&disk, dir, &want, &got, &err) == KV_CORRUPT);
    put(whole, sizeof(whole));
}

static void put_changed(uint32_t at, uint32_t value)
{
    uint8_t bytes[KV_SUPERBLOCK_BYTES];
    kv_superblock_encode(&got, bytes);
    kv_store32(bytes + at, value);
    kv_store32(bytes + 8, kv_checksum(bytes + 12, KV_SUPERBLOCK_COPY_BYTES - 12));
    memcpy(bytes + KV_SUPERBLOCK_COPY_BYTES, bytes, KV_SUPERBLOCK_COPY_BYTES);
    put(bytes, sizeof(bytes));
}

static void test_other_versions(void)
{
    EXPECT(kv_directory_read(&disk, dir, &got, &damaged, &err) == KV_OK);
    put_changed(12, 2);
    refused(&want, KV_INVALID, "layout version 2, this build reads version 1", "newer build");
    put_changed(48, 0x80000001);
    refused(&want, KV_INVALID, "features 0x80000001", "another state.dir");
    put_changed(12, 1);

    /* As made before version 1: no superblock, but a manifest or segments. */
    EXPECT(unlink(in_dir("superblock")) == 0);
    EXPECT(mkdir(in_dir("manifest"), 0700) == 0);
    refused(&want, KV_INVALID, "layout version 0, this build reads version 1", "older build");
    EXPECT(rmdir(in_dir("manifest")) == 0);
    EXPECT(mkdir(in_dir("ssd"), 0700) == 0);
    refused(&want, KV_INVALID, "layout version 0", "another state.dir");
    EXPECT(rmdir(in_dir("ssd")) == 0);
    EXPECT(kv_directory_open(&disk, dir, &want, &got, &err) == KV_OK);
}

static void test_other_shapes(void)
{
    struct kv_superblock by = want;

    /* Nothing is stored yet: the shape is free. */
    EXPECT(mkdir(in_dir("ssd"), 0700) == 0);
    by.page_bytes = 24576;
    by.segment_bytes = 4u << 20;
    const struct kv_directory_id id = got.id;
    EXPECT(kv_directory_open(&disk, dir, &by, &got, &err) == KV_OK);
    EXPECT_EQ_U32(got.page_bytes, 24576);
    EXPECT_EQ_MEM(got.id.bytes, id.bytes, 16);
    EXPECT(kv_directory_open(&disk, dir, &want, &got, &err) == KV_OK);

    const int fd = open(in_dir("ssd/segment-000002.kv"), O_WRONLY | O_CREAT, 0600);
    EXPECT(fd >= 0);
    (void)close(fd);
    refused(&by, KV_INVALID, "page 20480 B, window 16; this model: page 24576 B", "state.dir");
    by = want;
    by.window_tokens = 128;
    refused(&by, KV_INVALID, "another model shape", "window 128");
    by = want;
    by.segment_bytes = 4u << 20;
    refused(&by, KV_INVALID, "8388608 B; configured are 4194304 B", "ssd.segment_bytes");
    EXPECT(unlink(in_dir("ssd/segment-000002.kv")) == 0);
    EXPECT(rmdir(in_dir("ssd")) == 0);
}

static void test_no_directory(void)
{
    EXPECT(unlink(in_dir("superblock")) == 0);
    EXPECT(mkdir(in_dir("superblock"), 0700) == 0);
    EXPECT(kv_directory_open(&disk, dir, &want, &got, &err) == KV_IO);
    EXPECT(rmdir(in_dir("superblock")) == 0);
    EXPECT(rmdir(dir) == 0); /* Nothing else was left. */
    EXPECT(kv_directory_read(&disk, dir, &got, &damaged, &err) == KV_MISS);
    EXPECT(kv_directory_open(&disk, dir, &want, &got, &err) == KV_IO);
}

int main(void)
{
    disk = kv_disk_calls();
    (void)snprintf(dir, sizeof(dir), "test_directory.XXXXXX");
    EXPECT(mkdtemp(dir) != NULL);
    test_new_and_again();
    test_one_copy_damaged();
    test_other_versions();
    test_other_shapes();
    test_no_directory();
    HARNESS_END();
}
