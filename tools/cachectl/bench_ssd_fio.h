#pragma once

/* fio, the anchor of the benchmarks of the SSD tier: io_uring, O_DIRECT, one thread a job,
 * registered files and buffers. */

#include "tools/cachectl/bench_progress.h"

struct fio_job {
    uint32_t flush;   /* It writes, and calls fdatasync after so many; 0: it reads. */
    const char *file; /* Written through before. */
    uint64_t offset;  /* Where in it the region begins, */
    uint64_t region;  /* and its bytes: gone through from front to back, again and again, */
    uint64_t bytes;   /* until so many are moved. */
    uint64_t block;   /* Bytes of one operation. */
    uint32_t depth;   /* Operations in flight. */
    bool drains;      /* All of them end before the next are started. */
    bool huge;        /* Its buffers lie in huge pages. */
    const char *dir;  /* For its answer. */
};

struct fio_result {
    double seconds;     /* While operations ran. */
    double cpu_seconds; /* Of its thread, user and system. */
    double p99_seconds; /* From start to end of an operation; of a write without its flush. */
};

/* The program; NULL, with the sentence printed: it is not here. */
const char *fio_find(char *path, size_t path_bytes);

/* Whether the kernel has so many bytes of huge pages to give (vm.nr_hugepages): without them the
 * buffers of fio are many small pieces to the device, those of the store few large ones. */
bool fio_has_huge(uint64_t bytes);

/* Runs the jobs beside each other: `ret_results` has one for each.  False: it failed (the sentence
 * is printed), or this program is to end. */
#define FIO_JOBS_MAX 2u
bool fio_run(struct bench_progress *progress, const char *fio, const struct fio_job *jobs,
             uint32_t count, struct fio_result *ret_results);
