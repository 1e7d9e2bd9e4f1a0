/*
 * What `cachectl doctor` can find out about this machine without the daemon.
 *
 * Each check does the thing itself where it can (sets up a ring, opens a file with O_DIRECT)
 * instead of reading a version number: containers refuse system calls that the kernel has.  Nothing
 * is left behind and nothing is changed.
 */

#include "tools/cachectl/doctor_local.h"

#include "kvstore/base/bytes.h"
#include "tools/cachectl/out.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/timex.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PROBE_MS 3000

void doctor_add(struct doctor *doctor, const char *name, enum doctor_state state, const char *fix,
                const char *fmt, ...)
{
    va_list list;

    assert(doctor->count < KV_ARRAY_COUNT(doctor->lines));
    struct doctor_line *line = &doctor->lines[doctor->count++];
    line->name = name;
    line->state = state;
    va_start(list, fmt);
    (void)vsnprintf(line->found, sizeof(line->found), fmt, list);
    va_end(list);
    (void)snprintf(line->fix, sizeof(line->fix), "%s", state == DOCTOR_OK ? "" : fix);
}

void doctor_check_io_uring(struct doctor *doctor)
{
    struct io_uring_params params;

    memset(&params, 0, sizeof(params));
    const long fd = syscall(SYS_io_uring_setup, 8, &params);
    if (fd >= 0) {
        (void)close((int)fd);
        doctor_add(doctor, "io_uring", DOCTOR_OK, "", "a ring can be set up");
        return;
    }
    doctor_add(doctor, "io_uring", DOCTOR_WARN,
               "allow io_uring_setup in seccomp and set kernel.io_uring_disabled=0; until then a "
               "pool of threads does the I/O",
               "refused: %s", strerror(errno));
}

/* What the child found out about the disk. */
struct probe {
    int make_errno;  /* 0: a file could be made, */
    int write_errno; /* and written past the page cache. */
};

/* In the child.  The file has no name while it is written, so nothing is left when this hangs and
 * is killed. */
static struct probe probe_disk(char *path)
{
    enum { BYTES = 4096 };
    struct probe probe = {0};
    void *buffer = NULL;
    const int named = mkstemp(path);
    if (named < 0) {
        probe.make_errno = errno;
        return probe;
    }
    const int fd = open(path, O_RDWR | O_DIRECT | O_CLOEXEC);
    probe.write_errno = fd < 0 ? errno : 0;
    (void)unlink(path);
    if (fd >= 0 && posix_memalign(&buffer, BYTES, BYTES) == 0) {
        memset(buffer, 0, BYTES);
        const ssize_t wrote = pwrite(fd, buffer, BYTES, 0);
        if (wrote != BYTES) probe.write_errno = wrote < 0 ? errno : EIO;
    } else if (fd >= 0) {
        probe.write_errno = ENOMEM;
    }
    return probe;
}

/* A disk that hangs holds whoever waits for it, and nothing ends him: so a child does, and is left
 * behind.  It gives back our output at once, because somebody may wait for its end.  false: no
 * answer, or no child. */
static bool probe_apart(char *path, struct probe *ret_probe)
{
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) return false;
    const pid_t child = fork();
    if (child == 0) {
        for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
            (void)close(fd);
        const struct probe probe = probe_disk(path);
        _exit(write(ends[1], &probe, sizeof(probe)) == sizeof(probe) ? 0 : 1);
    }
    (void)close(ends[1]);
    struct pollfd answer = {.fd = ends[0], .events = POLLIN};
    const bool got = child > 0 && poll(&answer, 1, PROBE_MS) == 1 &&
                     read(ends[0], ret_probe, sizeof(*ret_probe)) == sizeof(*ret_probe);
    (void)close(ends[0]);
    if (child > 0 && !got) (void)kill(child, SIGKILL); /* Once the disk lets it. */
    if (child > 0) (void)waitpid(child, NULL, got ? 0 : WNOHANG);
    return got;
}

bool doctor_check_direct(struct doctor *doctor, const char *state_dir)
{
    char path[512];
    struct probe probe;

    if (snprintf(path, sizeof(path), "%s/doctor.XXXXXX", state_dir) >= (int)sizeof(path))
        return true;
    if (!probe_apart(path, &probe)) {
        doctor_add(doctor, "O_DIRECT", DOCTOR_FAIL,
                   "look at the disk (dmesg); what it has is served again when it answers",
                   "the disk under %s gave no answer to a write for %d s", state_dir,
                   PROBE_MS / 1000);
        return false;
    }
    if (probe.make_errno != 0) {
        const int cause = probe.make_errno;
        const bool denied = cause == EACCES || cause == EPERM || cause == EROFS;
        doctor_add(doctor, "O_DIRECT", denied ? DOCTOR_WARN : DOCTOR_FAIL,
                   denied ? "run doctor as the daemon's user" : "create the state directory",
                   "cannot write in %s: %s", state_dir, strerror(cause));
    } else if (probe.write_errno == 0) {
        doctor_add(doctor, "O_DIRECT", DOCTOR_OK, "", "4 KiB written past the page cache in %s",
                   state_dir);
    } else {
        doctor_add(doctor, "O_DIRECT", DOCTOR_FAIL,
                   "put the state directory on ext4 or xfs, not on tmpfs or overlayfs",
                   "refused in %s: %s", state_dir, strerror(probe.write_errno));
    }
    return true;
}

void doctor_check_space(struct doctor *doctor, const char *state_dir, uint64_t needed_bytes)
{
    char free_text[OUT_TEXT_BYTES], needed_text[OUT_TEXT_BYTES];
    struct statvfs fs;

    if (statvfs(state_dir, &fs) != 0) {
        doctor_add(doctor, "space", DOCTOR_FAIL, "create the state directory", "%s: %s", state_dir,
                   strerror(errno));
        return;
    }
    const uint64_t free_bytes = (uint64_t)fs.f_bavail * fs.f_frsize;
    const uint64_t total_bytes = (uint64_t)fs.f_blocks * fs.f_frsize;
    (void)out_bytes(free_text, free_bytes);
    if (needed_bytes > free_bytes) {
        doctor_add(doctor, "space", DOCTOR_WARN,
                   "free some, or lower the capacity of the SSD tier; the tier turns read-only "
                   "when the disk is full",
                   "%s free in %s, the SSD tier may still grow by %s", free_text, state_dir,
                   out_bytes(needed_text, needed_bytes));
    } else if (free_bytes < total_bytes / 100) {
        doctor_add(doctor, "space", DOCTOR_FAIL, "free some space", "%s free in %s", free_text,
                   state_dir);
    } else {
        doctor_add(doctor, "space", DOCTOR_OK, "", "%s free in %s", free_text, state_dir);
    }
}

void doctor_check_memlock(struct doctor *doctor, uint64_t pid)
{
    /* Registered buffers are locked memory; the kernel holds everybody but root to this limit. */
    enum { WANTED_BYTES = 64 << 20 };
    char text[OUT_TEXT_BYTES], path[64];
    struct rlimit limit;
    struct stat process;

    const bool of_daemon = pid > 0 && prlimit((pid_t)pid, RLIMIT_MEMLOCK, NULL, &limit) == 0;
    if (!of_daemon && getrlimit(RLIMIT_MEMLOCK, &limit) != 0) return;
    const char *whose = of_daemon ? "the daemon's" : "this shell's";
    (void)snprintf(path, sizeof(path), "/proc/%llu", (unsigned long long)pid);
    const bool is_root =
        of_daemon && stat(path, &process) == 0 ? process.st_uid == 0 : geteuid() == 0;
    if (limit.rlim_cur == RLIM_INFINITY) {
        doctor_add(doctor, "memlock", DOCTOR_OK, "", "%s limit is unlimited", whose);
    } else if (limit.rlim_cur >= WANTED_BYTES || is_root) {
        doctor_add(doctor, "memlock", DOCTOR_OK, "", "%s limit is %s%s", whose,
                   out_bytes(text, limit.rlim_cur), is_root ? "; root is not held to it" : "");
    } else {
        doctor_add(doctor, "memlock", DOCTOR_WARN,
                   "LimitMEMLOCK=infinity in the unit, or ulimit -l unlimited; without it reads "
                   "use unregistered buffers",
                   "%s limit is %s", whose, out_bytes(text, limit.rlim_cur));
    }
}

/* 0, or the errno that says why not; EINVAL stands for an empty file. */
static int unreadable(const char *path)
{
    struct stat info;
    if (stat(path, &info) != 0 || access(path, R_OK) != 0) return errno;
    return info.st_size > 0 ? 0 : EINVAL;
}

void doctor_check_model(struct doctor *doctor, const char *model_dir)
{
    /* Each with what may stand in its place. */
    static const char *const names[][2] = {{"config.json", NULL},
                                           {"model.safetensors", "model.safetensors.index.json"}};
    char path[512], other[512];

    if (!model_dir) {
        doctor_add(doctor, "model", DOCTOR_WARN, "give --model-dir DIR", "directory not known");
        return;
    }
    for (size_t i = 0; i < KV_ARRAY_COUNT(names); i++) {
        (void)snprintf(path, sizeof(path), "%s/%s", model_dir, names[i][0]);
        (void)snprintf(other, sizeof(other), "%s/%s", model_dir, names[i][1] ? names[i][1] : "");
        const int why = unreadable(path);
        if (why == 0 || (names[i][1] && unreadable(other) == 0)) continue;
        doctor_add(doctor, "model", DOCTOR_FAIL,
                   "make a model with mkmodel, or correct the model's directory and its rights",
                   "%s: %s", path, why == EINVAL ? "empty" : strerror(why));
        return;
    }
    doctor_add(doctor, "model", DOCTOR_OK, "", "readable in %s (`cachectl model verify` reads it)",
               model_dir);
}

void doctor_check_clock(struct doctor *doctor)
{
    enum { YEAR_2024 = 1704067200 };
    struct timex state;
    struct timespec first, second;

    memset(&state, 0, sizeof(state));
    if (clock_gettime(CLOCK_REALTIME, &first) != 0) return;
    (void)clock_gettime(CLOCK_REALTIME, &second);
    const int kernel = adjtimex(&state);
    if (first.tv_sec < YEAR_2024) {
        doctor_add(doctor, "clock", DOCTOR_FAIL,
                   "set the clock: lifetimes are counted in wall time across restarts",
                   "the wall clock says %lld s since 1970", (long long)first.tv_sec);
    } else if (second.tv_sec < first.tv_sec) {
        doctor_add(doctor, "clock", DOCTOR_FAIL, "find out who sets the clock back",
                   "the wall clock runs backwards");
    } else if (kernel < 0 || kernel == TIME_ERROR || (state.status & STA_UNSYNC) != 0) {
        doctor_add(doctor, "clock", DOCTOR_WARN,
                   "run an NTP client: the daemon goes on by the time since boot after a jump, and "
                   "warns until the clock is right",
                   "not synchronised");
    } else {
        doctor_add(doctor, "clock", DOCTOR_OK, "", "synchronised");
    }
}

void doctor_check_token(struct doctor *doctor, const char *token_file)
{
    struct stat info;

    if (!token_file) {
        doctor_add(doctor, "token", DOCTOR_WARN, "give --token-file F or CACHED_TOKEN_FILE",
                   "none given");
    } else if (stat(token_file, &info) != 0) {
        doctor_add(doctor, "token", DOCTOR_FAIL, "correct --token-file or CACHED_TOKEN_FILE",
                   "%s: %s", token_file, strerror(errno));
    } else if ((info.st_mode & 0077) != 0) {
        doctor_add(doctor, "token", DOCTOR_WARN, "chmod 600 the file",
                   "%s is readable by others (mode %04o)", token_file,
                   (unsigned)info.st_mode & 07777);
    } else {
        doctor_add(doctor, "token", DOCTOR_OK, "", "%s, private", token_file);
    }
}
