/* Folders, time and numbers for programs that drive a daemon. */

#include "tests/driver/scratch.h"

#include "tests/harness.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

static void remove_at(int at, const char *name)
{
    const int fd = openat(at, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR *dir = fd < 0 ? NULL : fdopendir(fd);
    const struct dirent *entry;
    if (dir == NULL) return;
    while ((entry = readdir(dir)) != NULL) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
        if (unlinkat(fd, entry->d_name, 0) != 0) remove_at(fd, entry->d_name);
    }
    (void)closedir(dir);
    (void)unlinkat(at, name, AT_REMOVEDIR);
}

void ex_remove_tree(const char *path)
{
    if (unlink(path) != 0) remove_at(AT_FDCWD, path);
}

/* Where the cleaner hears of folders; -1: there is none. */
static int cleaner_fd = -1;

/* A process of its own session, which a Ctrl-C does not reach; it ends when nobody can tell it of
 * more.  The daemon may live for some milliseconds longer than we did. */
static _Noreturn void clean(int fd)
{
    enum { DIRS_MAX = 64 };
    char dirs[DIRS_MAX][512];
    uint32_t count = 0;
    FILE *file = fdopen(fd, "r");
    (void)setsid();
    /* Whoever reads what we print is not to wait for us. */
    for (int i = 0; i <= STDERR_FILENO; i++)
        (void)close(i);
    while (file != NULL && count < DIRS_MAX && fgets(dirs[count], sizeof(dirs[0]), file) != NULL) {
        dirs[count][strcspn(dirs[count], "\n")] = '\0';
        count++;
    }
    for (int tries = 0; tries < 3; tries++) {
        for (uint32_t i = 0; i < count; i++)
            ex_remove_tree(dirs[i]);
        (void)usleep(100000);
    }
    _exit(0);
}

void ex_clean_after(void)
{
    int fds[2];
    EXPECT(cleaner_fd < 0 && pipe2(fds, O_CLOEXEC) == 0);
    (void)fflush(NULL);
    const pid_t pid = fork();
    EXPECT(pid >= 0);
    if (pid == 0) {
        (void)close(fds[1]);
        clean(fds[0]);
    }
    (void)close(fds[0]);
    cleaner_fd = fds[1];
}

bool ex_make_scratch(const char *path, const char *name, char *ret_dir, uint32_t bytes)
{
    const int count = snprintf(ret_dir, bytes, "%s/%s-XXXXXX", path, name);
    if (count < 0 || (uint32_t)count >= bytes) {
        errno = ENAMETOOLONG;
        return false;
    }
    if (mkdtemp(ret_dir) == NULL) return false;
    if (cleaner_fd >= 0) (void)dprintf(cleaner_fd, "%s\n", ret_dir);
    return true;
}

double ex_seconds_since(const struct timespec *then)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)(now.tv_sec - then->tv_sec) + (double)(now.tv_nsec - then->tv_nsec) / 1e9;
}

bool ex_parse_number(const char *text, uint64_t max, uint64_t *ret_number)
{
    char *end;
    errno = 0;
    const unsigned long long number = strtoull(text, &end, 10);
    if (text[0] < '0' || text[0] > '9' || *end != '\0' || errno != 0 || number > max) return false;
    *ret_number = number;
    return true;
}

void ex_build_path(const char *name, char *ret_path, uint32_t bytes)
{
    char self[1024];
    const ssize_t count = readlink("/proc/self/exe", self, sizeof(self) - 1);
    EXPECT(count > 0);
    self[count] = '\0';
    *strrchr(self, '/') = '\0';
    const int printed = snprintf(ret_path, bytes, "%s/../%s", self, name);
    EXPECT(printed > 0 && (uint32_t)printed < bytes);
}
