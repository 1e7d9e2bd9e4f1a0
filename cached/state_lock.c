/*
 * The lock on a state directory.
 *
 * flock, because the kernel drops it with the process however that ends: a file that merely exists
 * would have to be judged stale or not.  The process id in the file is for people; the lock
 * decides.
 */

#include "cached/state_lock.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define PATH_BYTES 512u

struct state_lock {
    int fd;
    char pid_file[PATH_BYTES]; /* Empty: none was written. */
};

/* Of whoever holds the lock; 0: it has not written it yet. */
static long read_pid(int fd)
{
    char text[24];
    const ssize_t got = pread(fd, text, sizeof(text) - 1, 0);
    if (got <= 0) return 0;
    text[got] = '\0';
    return strtol(text, NULL, 10);
}

static kv_status write_pid(int fd, const char *path, struct kv_error *err)
{
    char text[24];
    const int count = snprintf(text, sizeof(text), "%ld\n", (long)getpid());
    if (ftruncate(fd, 0) != 0 || pwrite(fd, text, (size_t)count, 0) != count)
        return KV_FAIL_ERRNO(err, KV_IO, "write the process id to %s", path);
    return KV_OK;
}

static kv_status write_pid_file(struct state_lock *lock, const char *path, struct kv_error *err)
{
    const int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
    if (fd < 0) return KV_FAIL_ERRNO(err, KV_IO, "open the pid file %s", path);
    const kv_status status = write_pid(fd, path, err);
    (void)close(fd);
    if (status == KV_OK) (void)snprintf(lock->pid_file, sizeof(lock->pid_file), "%s", path);
    return status;
}

static kv_status take(struct state_lock *lock, const char *dir, const char *pid_file,
                      struct kv_error *err)
{
    char path[PATH_BYTES];
    if (mkdir(dir, 0700) != 0 && errno != EEXIST)
        return KV_FAIL_ERRNO(err, KV_IO, "make the state directory %s", dir);
    (void)snprintf(path, sizeof(path), "%s/lock", dir);
    lock->fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (lock->fd < 0) return KV_FAIL_ERRNO(err, KV_IO, "open %s", path);
    if (flock(lock->fd, LOCK_EX | LOCK_NB) != 0) {
        if (errno != EWOULDBLOCK) return KV_FAIL_ERRNO(err, KV_IO, "lock %s", path);
        return KV_FAIL(err, KV_INVALID, "another cached (pid %ld) uses the state directory %s",
                       read_pid(lock->fd), dir);
    }
    const kv_status status = write_pid(lock->fd, path, err);
    if (status != KV_OK || pid_file[0] == '\0') return status;
    return write_pid_file(lock, pid_file, err);
}

kv_status state_lock_take(const char *dir, const char *pid_file, struct state_lock **ret_lock,
                          struct kv_error *err)
{
    struct state_lock *lock = calloc(1, sizeof(*lock));
    if (lock == NULL) return KV_FAIL(err, KV_NOMEM, "lock the state directory %s", dir);
    lock->fd = -1;
    const kv_status status = take(lock, dir, pid_file, err);
    if (status != KV_OK) {
        state_lock_release(lock);
        return status;
    }
    *ret_lock = lock;
    return KV_OK;
}

void state_lock_release(struct state_lock *lock)
{
    if (lock == NULL) return;
    if (lock->pid_file[0] != '\0') (void)unlink(lock->pid_file);
    if (lock->fd >= 0) (void)close(lock->fd);
    free(lock);
}
