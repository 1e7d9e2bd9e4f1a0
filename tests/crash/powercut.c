/*
 * A power cut at a random moment loses nothing that was acknowledged at level SSD.
 *
 * As crash.c, on an ext4 of its own that goes down while calls are under way.  The daemon lives on
 * for a moment on a file system that fails every write, and must neither crash nor hang.  Then it
 * is killed, the file system mounted again, and everything is compared.
 *
 * Acknowledgements that come after the cut began prove nothing, and count as calls under way: an
 * fdatasync that races with the ioctl returns 0 for data that is lost (Linux 6.18: 14 of 360
 * writers that only write and fdatasync, in 60 cuts).  A machine without power acknowledges
 * nothing.
 */

#include "tests/crash/drive.h"
#include "tests/crash/loopfs.h"

#include <stdio.h>
#include <sys/stat.h>

#define IMAGE_BYTES (128u << 20)

static const char help[] =
    "Takes the file system of the state down while eight sessions of three users write, mounts it\n"
    "again, starts the daemon and compares what is there with what was acknowledged.  Needs root "
    "and\n"
    "loop devices.\n"
    "\n"
    "  --cuts N       how many (default 20)\n";

static bool make(void *context, const char *scratch, char *ret_state, uint32_t bytes, char *why)
{
    struct cr_loop *loop = context;
    if (!cr_loop_make(loop, scratch, IMAGE_BYTES, why)) return false;
    (void)snprintf(ret_state, bytes, "%s/state", loop->mount);
    return true;
}

static bool cut(void *context, char *why)
{
    return cr_loop_shutdown(context, why);
}

static bool restore(void *context, char *why)
{
    struct cr_loop *loop = context;
    return cr_loop_unmount(loop, why) && cr_loop_mount(loop, why);
}

static void drop(void *context)
{
    cr_loop_drop(context);
}

int main(int argc, char **argv)
{
    struct cr_options options = {.program = "powercut", .unit = "cuts", .seed = 1, .count = 20};
    struct cr_loop loop = {0};
    struct stat unused;
    const struct cr_medium medium = {
        .context = &loop, .make = make, .cut = cut, .restore = restore, .drop = drop};
    cr_parse(argc, argv, help, &options);
    /* Where flushes cost little: what they mean is the mounted file system's business. */
    if (options.dir == NULL) options.dir = stat("/dev/shm", &unused) == 0 ? "/dev/shm" : "/tmp";
    cr_loop_probe(options.dir);
    return cr_drive(&options, &medium);
}
