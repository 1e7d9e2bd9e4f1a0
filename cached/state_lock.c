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

/* Empty, or what a daemon has left there: digits and at most a newline. */
static bool may_hold_pid(int fd)
{
    struct stat info;
    char text[24];
    if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) return false;
    const ssize_t got = pread(fd, text, sizeof(text), 0);
    if (got < 0 || got == (ssize_t)sizeof(text)) return false;
    ssize_t digits = 0;
    while (digits < got && text[digits] >= '0' && text[digits] <= '9')
        digits++;
    if (got == 0 || digits == 0) return got == 0;
    return digits == got || (digits == got - 1 && text[digits] == '\n');
}

static kv_status write_pid_file(struct state_lock *lock, const char *path, struct kv_error *err)
{
    /* Without waiting: it may be a pipe. */
    const int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0644);
    if (fd < 0) return KV_FAIL_ERRNO(err, KV_IO, "open server.pid_file %s", path);
    const kv_status status = may_hold_pid(fd)
                                 ? write_pid(fd, path, err)
                                 : KV_FAIL(err, KV_INVALID,
                                           "server.pid_file %s exists and holds no process id; it "
                                           "is left alone",
                                           path);
    (void)close(fd);
    if (status == KV_OK) (void)snprintf(lock->pid_file, sizeof(lock->pid_file), "%s", path);
    return status;
}

/* Of another reader that holds the lock shared; 0: the kernel does not say. */
static long reader_pid(int fd)
{
    struct stat info;
    FILE *locks = fstat(fd, &info) == 0 ? fopen("/proc/locks", "re") : NULL;
    char line[160];
    long found = 0;
    while (locks != NULL && found == 0 && fgets(line, sizeof(line), locks) != NULL) {
        long pid;
        unsigned long inode;
        if (sscanf(line, "%*d: FLOCK ADVISORY READ %ld %*x:%*x:%lu", &pid, &inode) == 2 &&
            inode == (unsigned long)info.st_ino && pid > 0 && pid != (long)getpid())
            found = pid;
    }
    if (locks != NULL) (void)fclose(locks);
    return found;
}

/* A daemon holds the lock alone, and wrote its pid; readers share it, and write nothing. */
static kv_status refuse(int fd, const char *dir, struct kv_error *err)
{
    if (flock(fd, LOCK_SH | LOCK_NB) != 0)
        return KV_FAIL(err, KV_INVALID, "another cached (pid %ld) uses the state directory %s",
                       read_pid(fd), dir);
    const long pid = reader_pid(fd);
    if (pid != 0)
        return KV_FAIL(err, KV_INVALID,
                       "kvdump (pid %ld) reads the state directory %s: wait until it ends", pid,
                       dir);
    return KV_FAIL(err, KV_INVALID, "kvdump reads the state directory %s: wait until it ends", dir);
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
        return refuse(lock->fd, dir, err);
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

/* Whoever has put something else there since may keep it. */
static void remove_pid_file(const struct state_lock *lock)
{
    const int fd = open(lock->pid_file, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return;
    if (may_hold_pid(fd) && read_pid(fd) == (long)getpid()) (void)unlink(lock->pid_file);
    (void)close(fd);
}

void state_lock_release(struct state_lock *lock)
{
    if (lock == NULL) return;
    if (lock->pid_file[0] != '\0') remove_pid_file(lock);
    if (lock->fd >= 0) (void)close(lock->fd);
    free(lock);
}
