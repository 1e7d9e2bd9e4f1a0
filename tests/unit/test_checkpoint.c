/*
 * Checkpoints as mkmodel writes them: opened, read through, cut down while they are mapped.
 *
 * What each kind of damage is called is the table of tests/integration/it_model_files.py; here is
 * what a C caller relies on: pointers, digests, and that a file that shrinks is noticed and
 * survived.
 */

#include "engine/model/checkpoint.h"
#include "kvstore/base/bytes.h"
#include "tests/harness.h"

#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static char root[64];

static void make(const char *name, const char *options, char dir[128])
{
    const char *build = getenv("CACHED_BUILD_ROOT");
    char command[4400];
    if (build == NULL) SKIP("CACHED_BUILD_ROOT is not set: run through meson test");
    (void)snprintf(dir, 128, "%s/%s", root, name);
    (void)snprintf(command, sizeof(command), "'%s/tools/mkmodel' --config tiny %s %s >/dev/null",
                   build, options, dir);
    EXPECT_EQ_I64(system(command), 0);
}

static struct eng_checkpoint *open_good(const char *dir, uint64_t whole_max)
{
    struct eng_checkpoint *checkpoint = NULL;
    struct kv_error err = {0};
    const kv_status status = eng_checkpoint_open_max(dir, whole_max, &checkpoint, &err);
    if (status != KV_OK) (void)fprintf(stderr, "%s\n", err.text);
    EXPECT(status == KV_OK);
    return checkpoint;
}

static struct kv_digest digest_of(const char *dir, uint64_t whole_max)
{
    struct eng_checkpoint *checkpoint = open_good(dir, whole_max);
    const struct kv_digest digest = eng_checkpoint_digest(checkpoint);
    eng_checkpoint_close(checkpoint);
    return digest;
}

static bool same(struct kv_digest a, struct kv_digest b)
{
    return memcmp(a.bytes, b.bytes, 32) == 0;
}

/* Byte `at` of a file, from its end if negative, is changed by xor. */
static void change(const char *dir, const char *name, off_t at, uint8_t bits)
{
    char path[256];
    uint8_t byte;
    (void)snprintf(path, sizeof(path), "%s/%s", dir, name);
    const int fd = open(path, O_RDWR | O_CLOEXEC);
    EXPECT(fd >= 0);
    if (at < 0) at += lseek(fd, 0, SEEK_END);
    EXPECT_EQ_I64(pread(fd, &byte, 1, at), 1);
    byte ^= bits;
    EXPECT_EQ_I64(pwrite(fd, &byte, 1, at), 1);
    EXPECT(close(fd) == 0);
}

struct seen {
    uint64_t calls, done, total, end_at;
};

static bool on_progress(void *context, uint64_t done, uint64_t total)
{
    struct seen *seen = context;
    EXPECT(done >= seen->done && done <= total);
    seen->calls++;
    seen->done = done;
    seen->total = total;
    return done < seen->end_at;
}

/* The whole text is the path of `dir` and what follows it. */
static void expect_sentence(const struct kv_error *err, const char *dir, const char *rest)
{
    EXPECT(strncmp(err->text, dir, strlen(dir)) == 0);
    EXPECT_EQ_STR(err->text + strlen(dir), rest);
}

static void test_path_too_long(void)
{
    struct eng_checkpoint *checkpoint = NULL;
    struct kv_error err = {0};
    char dir[4200];

    memset(dir, 'd', sizeof(dir) - 1);
    dir[0] = '/';
    dir[sizeof(dir) - 1] = '\0';
    EXPECT(eng_checkpoint_open(dir, &checkpoint, &err) == KV_INVALID);
    EXPECT(strncmp(err.text, "/ddddd", 6) == 0);
    EXPECT(strstr(err.text, "path too long, expected at most 4095 bytes") != NULL);
}

static void test_single_and_shards(const char *single, const char *sharded)
{
    struct eng_checkpoint *a = open_good(single, 0), *b = open_good(sharded, 0);
    struct seen seen = {.end_at = UINT64_MAX};
    struct kv_digest content;
    const uint8_t *x = NULL, *y = NULL;
    struct kv_error err = {0};

    EXPECT_EQ_U64(eng_checkpoint_bytes(a), 6219390);
    EXPECT_EQ_U64(eng_checkpoint_bytes(b), 6219390);
    EXPECT_EQ_U32(eng_checkpoint_shard_count(a), 1);
    EXPECT_EQ_U32(eng_checkpoint_shard_count(b), 3);
    EXPECT(eng_checkpoint_take(a, "mtp.2.markov_head.head.weight", ENG_BF16, 512, 32, &x, &err) ==
           KV_OK);
    EXPECT(eng_checkpoint_take(b, "mtp.2.markov_head.head.weight", ENG_BF16, 512, 32, &y, &err) ==
           KV_OK);
    EXPECT_EQ_MEM(x, y, 512 * 32 * 2);
    EXPECT(eng_checkpoint_take(a, "norm.weight", ENG_F32, 128, 0, &x, &err) == KV_INVALID);
    expect_sentence(&err, single,
                    "/model.safetensors: tensor norm.weight: expected F32 [128], found BF16 [128]");
    EXPECT(eng_checkpoint_take(b, "norm.weight", ENG_F32, 128, 0, &x, &err) == KV_INVALID);
    expect_sentence(&err, sharded,
                    "/model-00001-of-00003.safetensors: tensor norm.weight: expected F32 [128], "
                    "found BF16 [128]");
    EXPECT(eng_checkpoint_take(a, "no.weight", ENG_F32, 128, 0, &x, &err) == KV_INVALID);
    expect_sentence(&err, single, ": tensor no.weight is missing");

    const uint32_t *ids = eng_checkpoint_compressed_ids(a);
    EXPECT_EQ_U32(ids[3 + 'q'], ids[3 + 'Q']);
    EXPECT_EQ_U32(ids[511], 485);

    EXPECT(eng_checkpoint_verify(b, on_progress, &seen, &content, &err) == KV_OK);
    EXPECT(seen.calls > 3 && seen.done == seen.total && seen.total > 6219390);
    seen = (struct seen){.end_at = 1};
    EXPECT(eng_checkpoint_verify(b, on_progress, &seen, &content, &err) == KV_CANCELLED);
    EXPECT_EQ_U64(seen.calls, 1);
    eng_checkpoint_close(a);
    eng_checkpoint_close(b);
    eng_checkpoint_close(NULL);
}

/* Whole: every byte counts.  Sampled: the edges of every tensor do, the inside does not. */
static void test_digest(const char *dir)
{
    const struct kv_digest whole = digest_of(dir, ENG_CHECKPOINT_WHOLE_MAX);
    const struct kv_digest sampled = digest_of(dir, 0);
    EXPECT(!same(whole, sampled));
    EXPECT(same(whole, digest_of(dir, ENG_CHECKPOINT_WHOLE_MAX)));
    EXPECT(same(sampled, digest_of(dir, 0)));

    change(dir, "model.safetensors", -1, 1); /* The last tensor's last byte. */
    EXPECT(!same(whole, digest_of(dir, ENG_CHECKPOINT_WHOLE_MAX)));
    EXPECT(!same(sampled, digest_of(dir, 0)));
    change(dir, "model.safetensors", -1, 1);
    change(dir, "model.safetensors", 200000, 1); /* Inside embed.weight. */
    EXPECT(!same(whole, digest_of(dir, ENG_CHECKPOINT_WHOLE_MAX)));
    EXPECT(same(sampled, digest_of(dir, 0)));
    change(dir, "model.safetensors", 200000, 1);
    EXPECT(same(whole, digest_of(dir, ENG_CHECKPOINT_WHOLE_MAX)));
    change(dir, "config.json", -1, '\n' ^ ' ');
    EXPECT(!same(whole, digest_of(dir, ENG_CHECKPOINT_WHOLE_MAX)));
    change(dir, "config.json", -1, '\n' ^ ' ');
}

static void truncate_file(const char *dir, const char *name, off_t bytes)
{
    char path[256];
    (void)snprintf(path, sizeof(path), "%s/%s", dir, name);
    EXPECT(truncate(path, bytes) == 0);
}

static void test_shrinks(const char *dir)
{
    struct eng_checkpoint *checkpoint = open_good(dir, 0);
    const uint8_t *head = NULL, *last = NULL;
    struct kv_digest content;
    struct kv_error err = {0};
    struct stat before;
    char path[256];
    uint32_t sum = 0;

    (void)snprintf(path, sizeof(path), "%s/model.safetensors", dir);
    EXPECT(stat(path, &before) == 0);
    EXPECT(eng_checkpoint_take(checkpoint, "embed.weight", ENG_BF16, 512, 128, &head, &err) ==
           KV_OK);
    EXPECT(eng_checkpoint_take(checkpoint, "mtp.2.markov_head.head.weight", ENG_BF16, 512, 32,
                               &last, &err) == KV_OK);
    EXPECT(eng_checkpoint_check(checkpoint, &err) == KV_OK);
    truncate_file(dir, "model.safetensors", 400000);
    EXPECT(eng_checkpoint_check(checkpoint, &err) == KV_IO);
    EXPECT(strstr(err.text, "model.safetensors: shrank while it was mapped") != NULL);
    for (uint32_t i = 0; i < 512 * 32 * 2; i++)
        sum += last[i];
    EXPECT_EQ_U32(sum, 0);
    /* Whole again, to look at: the zeros were read all the same. */
    truncate_file(dir, "model.safetensors", before.st_size);
    EXPECT(utimensat(AT_FDCWD, path, (struct timespec[]){before.st_atim, before.st_mtim}, 0) == 0);
    EXPECT(eng_checkpoint_check(checkpoint, &err) == KV_IO);
    EXPECT(strstr(err.text, "model.safetensors: pages could not be read") != NULL);
    truncate_file(dir, "model.safetensors", 400000);
    for (uint32_t i = 0; i < 512 * 128 * 2; i++)
        sum += head[i];
    EXPECT(sum > 0); /* What is still there is still read. */
    EXPECT(eng_checkpoint_verify(checkpoint, NULL, NULL, &content, &err) == KV_IO);
    EXPECT(strstr(err.text, "shrank while it was mapped, expected 6371198 bytes, found 400000"));
    eng_checkpoint_close(checkpoint);

    EXPECT(eng_checkpoint_open(dir, &checkpoint, &err) == KV_INVALID);
    EXPECT(strstr(err.text, "the file is truncated or damaged") != NULL);
}

/* A SIGBUS elsewhere still ends the process, as if there were no handler. */
static void test_other_faults(void)
{
    char path[128];
    (void)snprintf(path, sizeof(path), "%s/other", root);
    const int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    EXPECT(fd >= 0 && ftruncate(fd, 4096) == 0);
    const uint8_t *data = mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0);
    EXPECT(data != MAP_FAILED && ftruncate(fd, 0) == 0);
    const pid_t child = fork();
    if (child == 0) {
        (void)signal(SIGALRM, SIG_DFL);
        (void)alarm(10);
        _exit(data[100]); /* Zero, if a page were put there. */
    }
    int how = 0;
    EXPECT(child > 0 && waitpid(child, &how, 0) == child);
    EXPECT(!WIFEXITED(how) || WEXITSTATUS(how) != 0); /* A sanitizer makes an exit code of it. */
    EXPECT(munmap((void *)(uintptr_t)data, 4096) == 0 && close(fd) == 0);
}

static void test_not_files(void)
{
    struct eng_checkpoint *checkpoint = NULL;
    struct kv_error err = {0};
    char path[256], dir[128];

    EXPECT(eng_checkpoint_open("/nowhere", &checkpoint, &err) == KV_IO);
    EXPECT(strstr(err.text, "/nowhere/config.json") != NULL);
    make("pipe", "--plain", dir);
    (void)snprintf(path, sizeof(path), "%s/model.safetensors", dir);
    EXPECT(unlink(path) == 0);
    EXPECT(eng_checkpoint_open(dir, &checkpoint, &err) == KV_IO);
    EXPECT(mkfifo(path, 0600) == 0); /* Opening it must not wait for a writer. */
    EXPECT(eng_checkpoint_open(dir, &checkpoint, &err) == KV_INVALID);
    EXPECT(strstr(err.text, "not a regular file") != NULL);
}

int main(void)
{
    char single[128], sharded[128], command[128];
    (void)snprintf(root, sizeof(root), "/tmp/checkpoint-test-XXXXXX");
    EXPECT(mkdtemp(root) != NULL);
    make("single", "--seed 5", single);
    make("sharded", "--seed 5 --shards 3", sharded);
    test_path_too_long();
    test_single_and_shards(single, sharded);
    test_digest(single);
    test_shrinks(single);
    test_other_faults();
    test_not_files();
    (void)snprintf(command, sizeof(command), "rm -r %s", root);
    EXPECT_EQ_I64(system(command), 0);
    HARNESS_END();
}
