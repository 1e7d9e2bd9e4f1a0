/* Runs fio and reads its answer. */

#include "tools/cachectl/bench_ssd_fio.h"

#include "kvstore/base/bytes.h"
#include "tools/cachectl/spawn.h"

#include <assert.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define FLAG_BYTES 320u
#define FLAGS_MAX 60u

/* Flags of one run, one behind the other. */
struct flags {
    char texts[FLAGS_MAX][FLAG_BYTES];
    char *argv[FLAGS_MAX + 1];
    uint32_t count;
};

static void add(struct flags *flags, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static void add(struct flags *flags, const char *fmt, ...)
{
    va_list list;
    if (flags->count == FLAGS_MAX) return;
    va_start(list, fmt);
    (void)vsnprintf(flags->texts[flags->count], FLAG_BYTES, fmt, list);
    va_end(list);
    flags->argv[flags->count] = flags->texts[flags->count];
    flags->argv[++flags->count] = NULL;
}

const char *fio_find(char *path, size_t path_bytes)
{
    const char *list = getenv("PATH");
    while (list != NULL && *list != '\0') {
        const size_t length = strcspn(list, ":");
        const int used = snprintf(path, path_bytes, "%.*s/fio", (int)length, list);
        if (used > 0 && (size_t)used < path_bytes && access(path, X_OK) == 0) return path;
        list += length + (list[length] == ':');
    }
    ctl_error("the anchor of this benchmark is missing: no fio in PATH (Debian package fio)");
    return NULL;
}

bool fio_has_huge(uint64_t bytes)
{
    char line[128];
    uint64_t count = 0, kib = 0;
    FILE *file = fopen("/proc/meminfo", "re");
    while (file != NULL && fgets(line, sizeof(line), file) != NULL) {
        if (strncmp(line, "HugePages_Free:", 15) == 0) count = strtoull(line + 15, NULL, 10);
        if (strncmp(line, "Hugepagesize:", 13) == 0) kib = strtoull(line + 13, NULL, 10);
    }
    if (file != NULL) (void)fclose(file);
    return count * kib * 1024 >= bytes;
}

static void add_job(struct flags *flags, const struct fio_job *job)
{
    add(flags, "--name=anchor");
    add(flags, "--filename=%s", job->file);
    add(flags, "--rw=%s", job->flush > 0 ? "write" : "read");
    add(flags, "--offset=%" PRIu64, job->offset);
    add(flags, "--size=%" PRIu64, job->region);
    add(flags, "--io_size=%" PRIu64, job->bytes);
    add(flags, "--bs=%" PRIu64, job->block);
    add(flags, "--iodepth=%u", job->depth);
    if (job->drains) {
        add(flags, "--iodepth_batch_submit=%u", job->depth);
        add(flags, "--iodepth_batch_complete_min=%u", job->depth);
    }
    if (job->flush > 0) {
        add(flags, "--overwrite=1");
        add(flags, "--fdatasync=%u", job->flush);
    }
    if (job->huge) add(flags, "--iomem=mmaphuge");
    add(flags, "--ioengine=io_uring");
    add(flags, "--fixedbufs");
    add(flags, "--registerfiles");
    add(flags, "--direct=1");
    add(flags, "--invalidate=0");
    add(flags, "--allow_file_create=0");
    add(flags, "--thread");
    add(flags, "--lat_percentiles=1");
    add(flags, "--clat_percentiles=0");
    add(flags, "--percentile_list=99");
}

static double number_at(const json_t *object, const char *name)
{
    return json_number_value(json_object_get(object, name));
}

static bool read_job(const json_t *one, const struct fio_job *job, struct fio_result *ret_result)
{
    const json_t *side = json_object_get(one, job->flush > 0 ? "write" : "read");
    const json_t *late = json_object_get(json_object_get(side, "lat_ns"), "percentile");
    const uint64_t moved = (uint64_t)number_at(side, "io_bytes");
    *ret_result = (struct fio_result){
        .seconds = number_at(side, "runtime") / 1e3,
        .cpu_seconds = (number_at(one, "usr_cpu") + number_at(one, "sys_cpu")) / 100 *
                       number_at(one, "job_runtime") / 1e3,
        .p99_seconds = number_at(late, "99.000000") / 1e9,
    };
    /* The last operation is a whole one. */
    if (ret_result->seconds > 0 && moved >= job->bytes && moved < job->bytes + job->block)
        return true;
    ctl_error("fio's answer is not understood: %" PRIu64 " bytes in %.3f s, asked for %" PRIu64,
              moved, ret_result->seconds, job->bytes);
    return false;
}

static bool read_answer(const char *path, const struct fio_job *jobs, uint32_t count,
                        struct fio_result *ret_results)
{
    json_t *answer = json_load_file(path, 0, NULL);
    const json_t *list = json_object_get(answer, "jobs");
    bool ok = json_array_size(list) == count;
    if (!ok) ctl_error("fio's answer is not understood: %s", path);
    for (uint32_t i = 0; ok && i < count; i++)
        ok = read_job(json_array_get(list, i), &jobs[i], &ret_results[i]);
    json_decref(answer);
    return ok;
}

static bool go_on(void *progress)
{
    return bench_go_on(progress);
}

bool fio_run(struct bench_progress *progress, const char *fio, const struct fio_job *jobs,
             uint32_t count, struct fio_result *ret_results)
{
    struct flags *flags = calloc(1, sizeof(*flags));
    char path[FLAG_BYTES - 16];
    int status = 0;
    bool ok = false;

    if (flags == NULL) {
        ctl_error("no memory to run fio");
        return false;
    }
    assert(count >= 1 && count <= FIO_JOBS_MAX);
    (void)snprintf(path, sizeof(path), "%s/fio.json", jobs[0].dir);
    (void)unlink(path);
    add(flags, "%s", fio);
    add(flags, "--output-format=json");
    add(flags, "--output=%s", path);
    for (uint32_t i = 0; i < count; i++)
        add_job(flags, &jobs[i]);
    const pid_t pid = spawn_tool(flags->argv);
    if (pid == 0) {
        ctl_error("cannot start %s", fio);
    } else if (!spawn_wait(pid, go_on, progress, &status)) {
        ctl_error("cannot wait for %s", fio);
    } else if (!spawn_interrupted()) {
        ok = WIFEXITED(status) && WEXITSTATUS(status) == 0;
        if (!ok) ctl_error("%s failed (status %d)", fio, status);
    }
    free(flags);
    return ok && read_answer(path, jobs, count, ret_results);
}
