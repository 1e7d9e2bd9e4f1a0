#pragma once

/*
 * The seam between the store and its disk.  Whatever the SSD tier asks of the kernel is one of the
 * calls below, so that a test can record it, make it fail, or answer it from memory; the daemon has
 * io_uring or a pool of threads behind it (ring.h).
 *
 * kv_disk_start() does not wait: it is for pages, many at a time, and for making files while others
 * are used (kv_disk_startable()).  kv_disk_call() waits, and is for start-up.  An op is embedded in
 * its owner and stays untouched by it from start until done() runs.  done() runs inside
 * kv_disk_run(), never inside kv_disk_start().
 *
 * What a result means is decided here, the same for every implementation: a short one is continued
 * for the rest; EINTR and EAGAIN are tried again, a few times; one that makes no progress, or says
 * that more was done than asked, is KV_IO.  A SYNC is never tried twice: after one that failed the
 * kernel may have dropped the data and report success.
 *
 * Owned by: the thread that runs it (a shard); it may be created by another.
 */

#include "kvstore/base/status.h"

#include <stdbool.h>
#include <stdint.h>

enum kv_disk_verb {
    KV_DISK_READ,     /* fd, buf, bytes, offset: bytes moved. */
    KV_DISK_WRITE,    /* Likewise. */
    KV_DISK_SYNC,     /* fd: data, and what of its size is needed to read it back. */
    KV_DISK_OPEN_DIR, /* name, a path: descriptor. */
    KV_DISK_MAKE_DIR, /* name, a path. */
    KV_DISK_SYNC_DIR, /* fd: names in it. */
    KV_DISK_LIST,     /* fd: names in it, each with its zero, into buf; ERANGE: bytes too few. */
    KV_DISK_OPEN,     /* fd, name: descriptor, to read and write, past the page cache or not. */
    KV_DISK_CREATE,   /* Likewise; the name must be new. */
    KV_DISK_UNLINK,   /* fd, name. */
    KV_DISK_RENAME,   /* fd, name, to: in the same folder, in place of what has that name. */
    KV_DISK_RESERVE,  /* fd, bytes: grows the file to this size, with blocks behind all of it. */
    KV_DISK_SIZE,     /* fd: bytes in the file. */
    KV_DISK_ROOM,     /* fd: bytes that its file system has left for us. */
    KV_DISK_LINKS,    /* fd: names that the file has; 0: it was deleted. */
    KV_DISK_CLOSE,    /* fd. */
    KV_DISK_VERB_COUNT,
};

struct kv_disk_call {
    enum kv_disk_verb verb;
    int fd; /* The file; of LIST, SYNC_DIR and calls that take a file's name: the folder. */
    const char *name; /* Borrowed. */
    const char *to;   /* RENAME; likewise. */
    bool cached;      /* OPEN, CREATE: through the page cache. */
    bool read_only;   /* OPEN. */
    uint8_t *buf;     /* READ, WRITE: aligned to KV_IO_ALIGN, as are bytes and offset. */
    uint64_t bytes;
    uint64_t offset;
};

struct kv_disk_op;
typedef void kv_disk_done_fn(struct kv_disk_op *op);

struct kv_disk_op {
    struct kv_disk_call call; /* Its name stays until done. */
    kv_disk_done_fn *done;
    kv_status status; /* Result: KV_OK or KV_IO. */
    int sys_errno;    /* Of a KV_IO; 0: the file is short. */
    int fd;           /* CREATE: the descriptor. */
    /* Owned by the disk. */
    struct kv_disk_call rest; /* What is still to be done. */
    uint32_t retries;
    int64_t result; /* Of one try, on its way from where it was made. */
    struct kv_disk *disk;
    struct kv_disk_op *next;
};

struct kv_disk;

void kv_disk_destroy(struct kv_disk *disk);              /* Nothing may be in flight. */
const char *kv_disk_backend(const struct kv_disk *disk); /* "io_uring", "pool" */

/* READ, WRITE, SYNC; CREATE, RESERVE, UNLINK and SYNC_DIR. */
bool kv_disk_startable(enum kv_disk_verb verb);
void kv_disk_start(struct kv_disk *disk, struct kv_disk_op *op);
/* Hands over what was started, then waits until a result is there, wake_fd is readable or
 * timeout_ms passed (-1: no limit, 0: do not wait), and finishes ops.  Returns how many. */
uint32_t kv_disk_run(struct kv_disk *disk, int wake_fd, int timeout_ms);
uint32_t kv_disk_inflight(const struct kv_disk *disk);

/* As the system call: what the verb says, or 0; -1 with errno set.  A READ or WRITE is short only
 * at the end of the file or where an error stopped it. */
int64_t kv_disk_call(struct kv_disk *disk, const struct kv_disk_call *call) KV_MUST_CHECK;
void kv_disk_close_file(struct kv_disk *disk, int fd); /* fd < 0: nothing. */
/* LIST with as much memory as it takes: bytes of the names, which the caller frees.  -1: errno also
 * ENOMEM, and ERANGE where they are more than KV_DISK_NAMES_BYTES_MAX. */
int64_t kv_disk_names(struct kv_disk *disk, int dir_fd, char **ret_names) KV_MUST_CHECK;

/* Reads and writes inside of this memory will cost less (io_uring's registered buffers): the kernel
 * is told of each part when it is first used, because it then keeps that part in RAM.  Where the
 * kernel refuses (RLIMIT_MEMLOCK), the part is used all the same: see kv_disk_facts().  Before the
 * memory is given back, kv_disk_forget(); nothing may be in flight. */
void kv_disk_register(struct kv_disk *disk, uint8_t *buf, uint64_t bytes);
void kv_disk_forget(struct kv_disk *disk, const uint8_t *buf);

struct kv_disk_facts {
    bool registers;        /* It could. */
    uint32_t files_max;    /* Open files below this descriptor are registered; 0: none. */
    uint64_t bytes;        /* Given to kv_disk_register(), */
    uint64_t bytes_in_use; /* and those of it that the kernel has been told of. */
    int refused_errno;     /* 0: no part was refused. */
};
struct kv_disk_facts kv_disk_facts(const struct kv_disk *disk);

/* ---- for implementations ---- */

/* A disk embeds struct kv_disk.  One that wraps another hands each start, run and call on to it. */
struct kv_disk_ops {
    const char *name;
    void (*destroy)(struct kv_disk *disk);
    /* Queues one try of op->rest.  Its result goes to kv_disk_result(), from inside run. */
    void (*start)(struct kv_disk *disk, struct kv_disk_op *op);
    uint32_t (*run)(struct kv_disk *disk, int wake_fd, int timeout_ms);
    /* Of a wrapper: the result of a try that was started through it, on its way up; what it
     * returns is believed.  It asks the disk below first.  NULL: results pass as they are. */
    int64_t (*passed)(struct kv_disk *disk, struct kv_disk_op *op, int64_t result);
    /* One try; minus errno on failure. */
    int64_t (*call)(struct kv_disk *disk, const struct kv_disk_call *call);
    /* NULL, all three: nothing to do. */
    void (*register_buffer)(struct kv_disk *disk, uint8_t *buf, uint64_t bytes);
    void (*forget_buffer)(struct kv_disk *disk, const uint8_t *buf);
    struct kv_disk_facts (*facts)(const struct kv_disk *disk);
};

struct kv_disk {
    const struct kv_disk_ops *ops;
    uint32_t inflight; /* Started, done() not yet run. */
};

/* Bytes moved by one try, or minus errno.  True: the op is finished, and its owner has it back;
 * false: the rest was started. */
bool kv_disk_result(struct kv_disk_op *op, int64_t result);
/* What a wrapper's `passed` begins with. */
int64_t kv_disk_passed(struct kv_disk *disk, struct kv_disk_op *op, int64_t result);
/* A disk without a thread or a ring, for tools: calls of the kernel, and nothing can be started. */
struct kv_disk kv_disk_calls(void);

/* The call made of the kernel, and the flags with which it opens or makes a file.  Any thread. */
int64_t kv_disk_kernel(const struct kv_disk_call *call);
int kv_disk_flags(const struct kv_disk_call *call);
