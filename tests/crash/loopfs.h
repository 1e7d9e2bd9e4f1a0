#pragma once

/* An ext4 in a file, mounted by this process in a mount namespace of its own: nobody else sees it,
 * and when the process is gone, however it ended, so are mount and loop device. */

#include <stdbool.h>
#include <stdint.h>

enum { CR_LOOP_WHY_BYTES = 400 };

struct cr_loop {
    char image[320], mount[320];
    bool mounted;
};

/* Makes DIR/image and DIR/mount and mounts it.  Each returns false with a sentence in why
 * (CR_LOOP_WHY_BYTES). */
/* Once per process, first: one cut with nothing at stake.  Ends the program as skipped where this
 * machine cannot. */
void cr_loop_probe(const char *dir);
bool cr_loop_make(struct cr_loop *loop, const char *dir, uint64_t bytes, char *why);
bool cr_loop_mount(struct cr_loop *loop, char *why);
bool cr_loop_unmount(struct cr_loop *loop, char *why); /* Waits for files of the dead to go. */
/* The file system goes down at once: what is not synced is not there after the next mount. */
bool cr_loop_shutdown(struct cr_loop *loop, char *why);
void cr_loop_drop(struct cr_loop *loop);
