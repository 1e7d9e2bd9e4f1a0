"""Reads that fail, made on purpose against the real daemon.

A call uses what it can read and computes the rest; nothing that was acknowledged is forgotten.
"""

import errno
import os
import subprocess

from daemon import check, equal, scratch
from faults import CROWDED, stored_sessions, well
from talk import MISS, REPLAY, Box, Talk, case, even, patiently, resumed, run_cases, tokens

# Laid over libc: reads of segment files fail while the file FAULT_FILE exists.  It holds errno and the
# first page of a file that fails.
READ_FAULT = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#define LAID_OVER(name) \
ssize_t name(int fd, void *buf, size_t count, off_t at) \
{ \
    char link[64], path[512]; \
    int code = 0, first = 0; \
    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd); \
    ssize_t n = readlink(link, path, sizeof(path) - 1); \
    FILE *file = NULL; \
    if (n > 0) path[n] = 0; \
    if (n > 0 && strstr(path, "/segment-") && at >= 4096) file = fopen(getenv("FAULT_FILE"), "r"); \
    if (file != NULL) { \
        if (fscanf(file, "%d %d", &code, &first) != 2) code = 0; \
        fclose(file); \
    } \
    if (code != 0 && (at - 4096) / 20480 >= first) { \
        errno = code; \
        return -1; \
    } \
    return ((ssize_t (*)(int, void *, size_t, off_t))dlsym(RTLD_NEXT, #name))(fd, buf, count, at); \
}
LAID_OVER(pread)
LAID_OVER(pread64)
"""


def box_with_bad_reads():
    """A box, and the file that makes its reads fail; None: no compiler."""
    place = scratch()
    library, trigger = os.path.join(place, "fault.so"), os.path.join(place, "now")
    made = subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", library, "-ldl"],
                          input=READ_FAULT.encode(), check=False)
    if not check(made.returncode == 0, "the faulty pread is built"):
        return None, None
    sanitizer = os.environ.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0"
    return Box("synthetic", {**CROWDED, "io.backend": "pool"}, env={
        "LD_PRELOAD": library, "FAULT_FILE": trigger, "ASAN_OPTIONS": sanitizer}).start(), trigger


def fail_reads(trigger, code, first=0):
    with open(trigger, "w", encoding="ascii") as f:
        f.write(f"{code} {first}")


@case
def reads_of_some_pages_fail():
    """This call uses the rows before them, what follows is computed, and the next start has all."""
    box, trigger = box_with_bad_reads()
    if box is None:
        return
    prompt = tokens(600)
    equal(patiently(Talk(box.client(), "s").prefill, prompt).save_reason, "", "saved")
    for first, hit in ((4, 512), (3, 384), (1, 128), (0, 0)):
        box.restart()
        fail_reads(trigger, errno.EIO, first)
        got = patiently(Talk(box.client(), "s").prefill, prompt + tokens(5), no_checkpoint=True)
        resumed(got, REPLAY if hit else MISS, hit, f"page {first} on", reason="READ_FAILED")
        equal(got.weakened, 1, f"page {first} on: weakened")
        os.unlink(trigger)
    fail_reads(trigger, errno.EIO, 2)
    box.restart()
    longer = prompt + tokens(200)
    talk = Talk(box.client(), "s")
    got = patiently(talk.prefill, longer)
    resumed(got, REPLAY, 256, "page 2 on, with a checkpoint", reason="READ_FAILED")
    equal(got.save_reason, "", "page 2 on: saved")
    os.unlink(trigger)
    box.restart()
    got = patiently(Talk(box.client(), "s").prefill, longer + tokens(5), no_checkpoint=True)
    resumed(got, REPLAY, 800, "all of both, when they work again")
    well(box, what="some pages")
    box.stop()


@case
def reads_that_fail_and_work_again():
    """A passing error costs computing, once a call, and forgets nothing that was acknowledged."""
    box, trigger = box_with_bad_reads()
    if box is None:
        return
    prompts = stored_sessions(box, 6, low=300)
    for code in (errno.EIO, errno.ENOMEM, errno.EAGAIN):
        what = f"reads fail with {errno.errorcode[code]}"
        box.restart()  # Nothing is in memory.
        checkpoints = box.stats().checkpoints
        fail_reads(trigger, code)
        client = box.client()
        for turn in range(2):
            before = box.counter("cached_read_failures_total", 'tier="ssd"')
            for name, prompt in prompts.items():
                got = patiently(Talk(client, name).prefill, prompt + tokens(3), no_checkpoint=True)
                check(got.hit_tokens < even(len(prompt)) or turn > 0, f"{what}: {name} hit "
                      f"{got.hit_tokens}")
                if turn == 0:
                    resumed(got, MISS, 0, f"{what}: {name}", reason="READ_FAILED")
                    check(got.weakened > 0, f"{what}: {name}: weakened {got.weakened}")
                    failed = box.counter("cached_read_failures_total", 'tier="ssd"')
                    check(failed > before, f"{what}: read failures {before} to {failed}")
        stats = box.stats()
        equal((stats.checkpoints, box.counter("cached_checkpoints_dropped_total")),
              (checkpoints, 0), f"{what}: checkpoints stored, and dropped")
        check(box.logged("event=page_read_failed"), f"{what}: the log says so")
        well(box, what=what)
        os.unlink(trigger)
        box.restart()
        client = box.client()
        for name, prompt in prompts.items():
            got = patiently(Talk(client, name).prefill, prompt + tokens(3), no_checkpoint=True)
            resumed(got, REPLAY, even(len(prompt)), f"{what}: {name}, when they work again")
    box.stop()


if __name__ == "__main__":
    run_cases("Reads that fail.")
