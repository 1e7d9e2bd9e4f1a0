/*
 * Making a segment file, step by step.
 *
 * Create, reserve, header, sync of the file, sync of its folder: the order of docs/format.md.  What
 * a crash between two of them leaves is completed by the next start (ssd_segment.c).
 */

#include "kvstore/tier/ssd_make.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/limits.h"
#include "kvstore/format/segment_header.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>

static void step_done(struct kv_disk_op *op);

static void step_start(struct kv_ssd_make *make, enum kv_ssd_make_step step)
{
    const struct kv_ssd_place *place = make->place;
    struct kv_disk_call call = {.fd = make->fd};
    make->step = step;
    switch (step) {
    case KV_SSD_MAKE_CREATE:
        call =
            (struct kv_disk_call){.verb = KV_DISK_CREATE, .fd = place->dir_fd, .name = make->name};
        break;
    case KV_SSD_MAKE_RESERVE:
        call.verb = KV_DISK_RESERVE;
        call.bytes = place->segment_bytes;
        break;
    case KV_SSD_MAKE_HEADER:
        call.verb = KV_DISK_WRITE;
        call.buf = make->header;
        call.bytes = KV_SEGMENT_HEADER_BYTES;
        break;
    case KV_SSD_MAKE_SYNC:
        call.verb = KV_DISK_SYNC;
        break;
    case KV_SSD_MAKE_SYNC_DIR:
        call = (struct kv_disk_call){.verb = KV_DISK_SYNC_DIR, .fd = place->dir_fd};
        break;
    case KV_SSD_MAKE_UNLINK:
        call =
            (struct kv_disk_call){.verb = KV_DISK_UNLINK, .fd = place->dir_fd, .name = make->name};
        break;
    }
    make->op = (struct kv_disk_op){.call = call, .done = step_done};
    kv_disk_start(place->disk, &make->op);
}

static void end(struct kv_ssd_make *make)
{
    free(make->header);
    make->header = NULL;
    make->done(make);
}

static void tell(struct kv_ssd_make *make)
{
    const struct kv_ssd_place *place = make->place;
    struct kv_error *err = &make->err;
    errno = make->op.sys_errno;
    switch (make->step) {
    case KV_SSD_MAKE_CREATE:
        if (make->op.sys_errno == EINVAL)
            (void)KV_FAIL_ERRNO(err, KV_IO, "the file system of '%s' has no O_DIRECT", place->dir);
        else
            (void)KV_FAIL_ERRNO(err, KV_IO, "open '%s/%s'", place->dir, make->name);
        break;
    case KV_SSD_MAKE_RESERVE:
        (void)KV_FAIL_ERRNO(err, KV_IO, "reserve %" PRIu64 " B for '%s/%s'", place->segment_bytes,
                            place->dir, make->name);
        break;
    case KV_SSD_MAKE_HEADER:
        (void)KV_FAIL_ERRNO(err, KV_IO, "write the header of '%s/%s'", place->dir, make->name);
        break;
    case KV_SSD_MAKE_SYNC:
        (void)KV_FAIL_ERRNO(err, KV_IO, "sync '%s/%s'", place->dir, make->name);
        break;
    default:
        (void)KV_FAIL_ERRNO(err, KV_IO, "sync directory '%s'", place->dir);
        break;
    }
}

static void fail(struct kv_ssd_make *make)
{
    make->status = KV_IO;
    tell(make);
    if (make->fd < 0) { /* The name may be somebody else's, or the file was never made. */
        end(make);
        return;
    }
    kv_disk_close_file(make->place->disk, make->fd);
    make->fd = -1;
    step_start(make, KV_SSD_MAKE_UNLINK);
}

static void step_done(struct kv_disk_op *op)
{
    struct kv_ssd_make *make = KV_CONTAINER_OF(op, struct kv_ssd_make, op);
    if (make->step == KV_SSD_MAKE_UNLINK) {
        end(make); /* If it stayed, the next start finds a whole segment in it, or completes it. */
        return;
    }
    if (op->status != KV_OK) {
        fail(make);
        return;
    }
    if (make->step == KV_SSD_MAKE_CREATE) make->fd = op->fd;
    if (make->step == KV_SSD_MAKE_SYNC_DIR)
        end(make);
    else
        step_start(make, (enum kv_ssd_make_step)(make->step + 1));
}

bool kv_ssd_make_start(struct kv_ssd_make *make)
{
    make->header = aligned_alloc(KV_IO_ALIGN, KV_SEGMENT_HEADER_BYTES);
    if (make->header == NULL) return false;
    kv_ssd_segment_header(make->place, make->number, make->header);
    make->status = KV_OK;
    make->fd = -1;
    make->err = (struct kv_error){0};
    kv_ssd_segment_name(make->number, make->name);
    step_start(make, KV_SSD_MAKE_CREATE);
    return true;
}
