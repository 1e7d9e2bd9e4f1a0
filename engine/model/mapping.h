#pragma once

/*
 * A file mapped read-only, that may shrink under us.
 *
 * Opened once, fstat'ed once; the pages are shared with every other process that maps the file.  If
 * somebody truncates the file, or its device fails, touching a page that is gone raises SIGBUS.  A
 * handler then puts zeros where the file was and marks the mapping as lost: nothing crashes, and
 * whoever used the bytes asks eng_mapping_lost() before believing what came of them.
 *
 * Owned by: whoever opens the model.  Reading and eng_mapping_lost(): any thread.  The handler is
 * the process's; it passes on every SIGBUS that is not in one of these mappings.
 */

#include "kvstore/base/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

struct eng_mapping {
    char *path;
    int fd;
    const uint8_t *data; /* NULL when the file is empty. */
    uint64_t bytes;
    /* When it was opened.  mtime can be set back, ctime cannot; but a link made or removed moves
     * ctime too, and a model may be unlinked while it is in use. */
    struct timespec written, changed;
    uint64_t links;
    uint32_t slot; /* Where the handler finds it; ENG_MAPPINGS_MAX: nowhere. */
};

/* KV_INVALID: not a regular file, or longer than `max`; KV_IO; KV_BUSY: too many mappings. */
kv_status eng_mapping_open(const char *path, uint64_t max, struct eng_mapping *ret_mapping,
                           struct kv_error *err) KV_MUST_CHECK;
/* Also of a zeroed struct.  No thread may be reading. */
void eng_mapping_close(struct eng_mapping *mapping);

/* True once a page was missing: everything computed since may be wrong.  One atomic load. */
bool eng_mapping_lost(const struct eng_mapping *mapping);

/* KV_IO when the mapping is lost, or the file has another size or mtime than when it was opened, or
 * another ctime with as many links. */
kv_status eng_mapping_check(const struct eng_mapping *mapping, struct kv_error *err) KV_MUST_CHECK;

/* Reads from the file and not through the mapping, which would bring in the pages around as well.
 */
kv_status eng_mapping_read(const struct eng_mapping *mapping, uint64_t offset, void *data,
                           size_t count, struct kv_error *err) KV_MUST_CHECK;

/* Gives back the memory of pages that were read; they are read again when touched. */
void eng_mapping_forget(const struct eng_mapping *mapping, uint64_t offset, uint64_t count);

/* Whole regular file of at most `max` bytes into malloc'd memory, with a zero after it. */
kv_status eng_file_read(const char *path, uint64_t max, uint8_t **ret_data, size_t *ret_count,
                        struct kv_error *err) KV_MUST_CHECK;
