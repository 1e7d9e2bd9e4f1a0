/*
 * Maps files, and survives their truncation.
 *
 * Weights of hundreds of gigabytes cannot be copied into private memory, and nothing keeps another
 * process from truncating a file (leases need its owner's rights and only delay; seals are for
 * memory files).  So the missing page is made good: the handler maps zeros over the rest of the
 * file, after setting the mark that says so.  The order matters: whoever has read a zero of it
 * finds the mark set.
 *
 * The handler needs to find the mappings, so their table is a variable of the process: slots of
 * lock-free atomics, claimed and released by whoever opens and closes, read by the handler.  It
 * calls nothing but mmap, and signal functions that are safe in a handler.
 */

#include "engine/model/mapping.h"

#include "engine/model/model_limits.h"
#include "kvstore/base/bytes.h"

#include <assert.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum slot_state { SLOT_FREE, SLOT_CLAIMED, SLOT_LIVE };

struct slot {
    atomic_int state;
    atomic_uintptr_t begin, end; /* Whole pages. */
    atomic_bool lost;
};

/* What the handler looks at, and whom it asks when the address is not ours. */
static struct slot slots[ENG_MAPPINGS_MAX];
static struct sigaction previous;
static atomic_bool installed;

static void on_bus_error(int signal_number, siginfo_t *info, void *context)
{
    const uintptr_t page_bytes = (uintptr_t)sysconf(_SC_PAGESIZE);
    const uintptr_t at = (uintptr_t)info->si_addr;
    const int cause = errno;

    for (uint32_t i = 0; i < ENG_MAPPINGS_MAX; i++) {
        struct slot *slot = &slots[i];
        if (atomic_load(&slot->state) != SLOT_LIVE) continue;
        const uintptr_t begin = atomic_load(&slot->begin), end = atomic_load(&slot->end);
        if (at < begin || at >= end) continue;
        const uintptr_t page = at / page_bytes * page_bytes;
        atomic_store(&slot->lost, true);
        if (mmap((void *)page, end - page, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1,
                 0) == MAP_FAILED)
            break;
        errno = cause;
        return;
    }
    if (previous.sa_flags & SA_SIGINFO) {
        previous.sa_sigaction(signal_number, info, context);
        return;
    }
    /* Not ours: the instruction faults again and meets whatever was set before. */
    (void)sigaction(SIGBUS, &previous, NULL);
}

static kv_status install(struct kv_error *err)
{
    struct sigaction action = {.sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO | SA_ONSTACK};

    if (atomic_exchange(&installed, true)) return KV_OK;
    (void)sigemptyset(&action.sa_mask);
    if (sigaction(SIGBUS, &action, &previous) == 0) return KV_OK;
    atomic_store(&installed, false);
    return KV_FAIL_ERRNO(err, KV_IO, "handler of SIGBUS");
}

static uint32_t claim_slot(const uint8_t *data, uint64_t bytes)
{
    const uint64_t page_bytes = (uint64_t)sysconf(_SC_PAGESIZE);

    for (uint32_t i = 0; i < ENG_MAPPINGS_MAX; i++) {
        int expected = SLOT_FREE;
        if (!atomic_compare_exchange_strong(&slots[i].state, &expected, SLOT_CLAIMED)) continue;
        atomic_store(&slots[i].begin, (uintptr_t)data);
        atomic_store(&slots[i].end, (uintptr_t)data + kv_round_up(bytes, page_bytes));
        atomic_store(&slots[i].lost, false);
        atomic_store(&slots[i].state, SLOT_LIVE);
        return i;
    }
    return ENG_MAPPINGS_MAX;
}

/* Without waiting for the other end of a pipe. */
static kv_status open_regular(const char *path, uint64_t max, int *ret_fd, struct stat *ret_found,
                              struct kv_error *err)
{
    kv_status status = KV_OK;

    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return KV_FAIL_ERRNO(err, KV_IO, "%s", path);
    if (fstat(fd, ret_found) != 0)
        status = KV_FAIL_ERRNO(err, KV_IO, "%s", path);
    else if (!S_ISREG(ret_found->st_mode))
        status = KV_FAIL(err, KV_INVALID, "%s: not a regular file", path);
    else if ((uint64_t)ret_found->st_size > max)
        status = KV_FAIL(err, KV_INVALID, "%s: %llu bytes, expected at most %llu", path,
                         (unsigned long long)ret_found->st_size, (unsigned long long)max);
    if (status == KV_OK)
        *ret_fd = fd;
    else
        (void)close(fd);
    return status;
}

kv_status eng_mapping_open(const char *path, uint64_t max, struct eng_mapping *ret_mapping,
                           struct kv_error *err)
{
    struct eng_mapping mapping = {.fd = -1, .slot = ENG_MAPPINGS_MAX};
    struct stat found;

    mapping.path = strdup(path);
    if (mapping.path == NULL) return KV_FAIL(err, KV_NOMEM, "%s", path);
    kv_status status = install(err);
    if (status == KV_OK) status = open_regular(path, max, &mapping.fd, &found, err);
    if (status != KV_OK) goto fail;
    mapping.bytes = (uint64_t)found.st_size;
    mapping.written = found.st_mtim;
    mapping.changed = found.st_ctim;
    mapping.links = found.st_nlink;
    if (mapping.bytes > 0) {
        void *data = mmap(NULL, (size_t)mapping.bytes, PROT_READ, MAP_SHARED, mapping.fd, 0);
        if (data == MAP_FAILED) {
            status = KV_FAIL_ERRNO(err, KV_IO, "%s", path);
            goto fail;
        }
        mapping.data = data;
        mapping.slot = claim_slot(mapping.data, mapping.bytes);
        if (mapping.slot == ENG_MAPPINGS_MAX) {
            status = KV_FAIL(err, KV_BUSY, "%s: more than %u mapped files", path, ENG_MAPPINGS_MAX);
            goto fail;
        }
    }
    *ret_mapping = mapping;
    return KV_OK;

fail:
    eng_mapping_close(&mapping);
    return status;
}

void eng_mapping_close(struct eng_mapping *mapping)
{
    struct slot *slot = mapping->slot < ENG_MAPPINGS_MAX ? &slots[mapping->slot] : NULL;

    if (mapping->path == NULL) return;
    if (mapping->data != NULL) {
        /* First out of the handler's sight: the addresses may be somebody else's at once. */
        if (slot != NULL) atomic_store(&slot->state, SLOT_CLAIMED);
        (void)munmap((void *)(uintptr_t)mapping->data, (size_t)mapping->bytes);
        if (slot != NULL) atomic_store(&slot->state, SLOT_FREE);
    }
    if (mapping->fd >= 0) (void)close(mapping->fd);
    free(mapping->path);
    *mapping = (struct eng_mapping){.fd = -1};
}

bool eng_mapping_lost(const struct eng_mapping *mapping)
{
    return mapping->data != NULL && atomic_load(&slots[mapping->slot].lost);
}

static bool same_time(const struct timespec *a, const struct timespec *b)
{
    return a->tv_sec == b->tv_sec && a->tv_nsec == b->tv_nsec;
}

kv_status eng_mapping_check(const struct eng_mapping *mapping, struct kv_error *err)
{
    struct stat now;

    if (fstat(mapping->fd, &now) != 0) return KV_FAIL_ERRNO(err, KV_IO, "%s", mapping->path);
    if ((uint64_t)now.st_size < mapping->bytes)
        return KV_FAIL(
            err, KV_IO, "%s: shrank while it was mapped, expected %llu bytes, found %llu",
            mapping->path, (unsigned long long)mapping->bytes, (unsigned long long)now.st_size);
    if ((uint64_t)now.st_size != mapping->bytes || !same_time(&now.st_mtim, &mapping->written))
        return KV_FAIL(err, KV_IO, "%s: changed while it was mapped", mapping->path);
    if (eng_mapping_lost(mapping))
        return KV_FAIL(err, KV_IO, "%s: pages could not be read", mapping->path);
    if (now.st_nlink == mapping->links && !same_time(&now.st_ctim, &mapping->changed))
        return KV_FAIL(err, KV_IO,
                       "%s: its times or rights were set while it was mapped, which may hide that "
                       "it was written to",
                       mapping->path);
    return KV_OK;
}

kv_status eng_mapping_read(const struct eng_mapping *mapping, uint64_t offset, void *data,
                           size_t count, struct kv_error *err)
{
    uint8_t *to = data;
    size_t got = 0;

    while (got < count) {
        const ssize_t n = pread(mapping->fd, to + got, count - got, (off_t)(offset + got));
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return KV_FAIL_ERRNO(err, KV_IO, "%s", mapping->path);
        if (n == 0)
            return KV_FAIL(err, KV_IO, "%s: shrank while it was mapped, expected %llu bytes",
                           mapping->path, (unsigned long long)mapping->bytes);
        got += (size_t)n;
    }
    return KV_OK;
}

void eng_mapping_forget(const struct eng_mapping *mapping, uint64_t offset, uint64_t count)
{
    const uint64_t page_bytes = (uint64_t)sysconf(_SC_PAGESIZE);
    const uint64_t first = kv_round_up(offset, page_bytes);
    const uint64_t end = (offset + count) / page_bytes * page_bytes;

    assert(count <= mapping->bytes && offset <= mapping->bytes - count);
    if (end <= first || eng_mapping_lost(mapping)) return;
    (void)madvise((void *)(uintptr_t)(mapping->data + first), (size_t)(end - first), MADV_DONTNEED);
}

kv_status eng_file_read(const char *path, uint64_t max, uint8_t **ret_data, size_t *ret_count,
                        struct kv_error *err)
{
    struct stat found;
    size_t got = 0;
    int fd = -1;

    kv_status status = open_regular(path, max, &fd, &found, err);
    if (status != KV_OK) return status;
    const size_t size = (size_t)found.st_size;
    uint8_t *data = malloc(size + 1);
    if (data == NULL) status = KV_FAIL(err, KV_NOMEM, "%s: %zu bytes", path, size);
    while (status == KV_OK && got < size) {
        const ssize_t n = read(fd, data + got, size - got);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) status = KV_FAIL_ERRNO(err, KV_IO, "%s", path);
        if (n == 0)
            status = KV_FAIL(err, KV_INVALID, "%s: shrank while being read, expected %zu bytes",
                             path, size);
        if (n > 0) got += (size_t)n;
    }
    (void)close(fd);
    if (status != KV_OK) {
        free(data);
        return status;
    }
    data[size] = 0;
    *ret_data = data;
    *ret_count = size;
    return KV_OK;
}
