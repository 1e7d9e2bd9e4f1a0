/*
 * A cheap power cut.
 *
 * EXT4_IOC_SHUTDOWN without a log flush drops what is in the journal's running transaction and in
 * the page cache, as losing power does; every write afterwards fails.  What a disk's own cache
 * would lose it does not show: the image file keeps what was sent to it.
 */

#include "tests/crash/loopfs.h"

#include "tests/driver/scratch.h"
#include "tests/harness.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/loop.h>
#include <sched.h>
#include <spawn.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define EXT4_IOC_SHUTDOWN _IOR('X', 125, uint32_t)
#define NO_LOG_FLUSH 2u

enum { UNMOUNT_TRIES = 4000, LOOP_TRIES = 50 };

extern char **environ;

static bool refuse(char *why, const char *what)
{
    (void)snprintf(why, CR_LOOP_WHY_BYTES, "%s: %s", what, strerror(errno));
    return false;
}

static bool own_namespace(char *why)
{
    if (unshare(CLONE_NEWNS) != 0) return refuse(why, "no mount namespace of our own");
    if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0)
        return refuse(why, "mounts cannot be made private");
    return true;
}

static bool format(const char *image, char *why)
{
    char *argv[] = {"mkfs.ext4", "-q", "-F", "-m", "0", (char *)(uintptr_t)image, NULL};
    int status;
    pid_t pid;
    const int code = posix_spawnp(&pid, argv[0], NULL, NULL, argv, environ);
    if (code != 0) {
        errno = code;
        return refuse(why, "mkfs.ext4");
    }
    if (waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0)
        return true;
    (void)snprintf(why, CR_LOOP_WHY_BYTES, "mkfs.ext4 failed on %s", image);
    return false;
}

/* A free loop device with the image on it, which goes with its last user. */
static int attach(const char *image, char path[32], char *why)
{
    const int control = open("/dev/loop-control", O_RDWR | O_CLOEXEC);
    const int file = open(image, O_RDWR | O_CLOEXEC);
    int device = -1;
    if (control < 0 || file < 0) (void)refuse(why, control < 0 ? "/dev/loop-control" : image);
    for (int i = 0; control >= 0 && file >= 0 && device < 0 && i < LOOP_TRIES; i++) {
        const int number = ioctl(control, LOOP_CTL_GET_FREE);
        struct loop_config config = {.fd = (uint32_t)file,
                                     .info = {.lo_flags = LO_FLAGS_AUTOCLEAR}};
        (void)snprintf(path, 32, "/dev/loop%d", number);
        device = number < 0 ? -1 : open(path, O_RDWR | O_CLOEXEC);
        /* Another process may have taken it since. */
        if (device >= 0 && ioctl(device, LOOP_CONFIGURE, &config) != 0) {
            (void)refuse(why, path);
            (void)close(device);
            device = -1;
        } else if (device < 0) {
            (void)refuse(why, "no loop device");
        }
    }
    if (control >= 0) (void)close(control);
    if (file >= 0) (void)close(file);
    return device;
}

bool cr_loop_mount(struct cr_loop *loop, char *why)
{
    char path[32];
    const int device = attach(loop->image, path, why);
    if (device < 0) return false;
    loop->mounted = mount(path, loop->mount, "ext4", MS_NOATIME, NULL) == 0;
    if (!loop->mounted) (void)refuse(why, "mount of the loop device");
    (void)close(device);
    return loop->mounted;
}

bool cr_loop_make(struct cr_loop *loop, const char *dir, uint64_t bytes, char *why)
{
    (void)snprintf(loop->image, sizeof(loop->image), "%s/image", dir);
    (void)snprintf(loop->mount, sizeof(loop->mount), "%s/mount", dir);
    const int file = open(loop->image, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (file < 0) return refuse(why, loop->image);
    const bool sized = ftruncate(file, (off_t)bytes) == 0;
    (void)close(file);
    if (!sized) return refuse(why, loop->image);
    if (mkdir(loop->mount, 0700) != 0 && errno != EEXIST) return refuse(why, loop->mount);
    return format(loop->image, why) && cr_loop_mount(loop, why);
}

bool cr_loop_unmount(struct cr_loop *loop, char *why)
{
    const struct timespec pause = {.tv_nsec = 500000};
    for (int i = 0; loop->mounted && i < UNMOUNT_TRIES; i++) {
        if (umount(loop->mount) == 0) {
            loop->mounted = false;
            return true;
        }
        if (errno != EBUSY) break;
        (void)nanosleep(&pause, NULL);
    }
    return !loop->mounted || refuse(why, "umount");
}

bool cr_loop_shutdown(struct cr_loop *loop, char *why)
{
    uint32_t flags = NO_LOG_FLUSH;
    const int dir = open(loop->mount, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (dir < 0) return refuse(why, loop->mount);
    const bool down = ioctl(dir, EXT4_IOC_SHUTDOWN, &flags) == 0;
    if (!down) (void)refuse(why, "EXT4_IOC_SHUTDOWN");
    (void)close(dir);
    return down;
}

void cr_loop_drop(struct cr_loop *loop)
{
    char why[CR_LOOP_WHY_BYTES];
    if (loop->mounted && !cr_loop_unmount(loop, why)) {
        (void)umount2(loop->mount, MNT_DETACH);
        loop->mounted = false;
    }
    (void)rmdir(loop->mount);
    (void)unlink(loop->image);
}

void cr_loop_probe(const char *dir)
{
    struct cr_loop loop = {0};
    char why[CR_LOOP_WHY_BYTES] = "", scratch[300], reason[CR_LOOP_WHY_BYTES + 40];
    EXPECT(ex_make_scratch(dir, "powercut", scratch, sizeof(scratch)));
    const bool can = own_namespace(why) && cr_loop_make(&loop, scratch, 16u << 20, why) &&
                     cr_loop_shutdown(&loop, why) && cr_loop_unmount(&loop, why) &&
                     cr_loop_mount(&loop, why);
    cr_loop_drop(&loop);
    ex_remove_tree(scratch);
    (void)snprintf(reason, sizeof(reason), "no loop mounts here: %s", why);
    if (!can) SKIP(reason);
}
