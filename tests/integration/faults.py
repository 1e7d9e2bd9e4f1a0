"""What the tests of faults share: what must hold after any of them, and how to make some."""

import contextlib
import os
import re
import struct
import subprocess

import daemon
from daemon import check, equal, scratch
from talk import (
    EXACT, MISS, PAGE, WINDOW, Talk, even, patiently, resumed, rng, skip_case, tokens)

MIB = 1 << 20
with open(daemon.BINARY, "rb") as _binary:
    SANITIZED = b"__asan_init" in _binary.read()  # Its shadow and quarantine have no budget.


def well(box, rss_before=None, what=""):
    """After a fault: another user's turn works, and memory is inside its budget."""
    if not check(box.is_up(), f"{what}: the daemon is up"):
        return
    name = f"well{rng.randrange(10**9)}"
    talk = Talk(box.client("bob"), name)
    prompt = tokens(90)
    resumed(patiently(talk.prefill, prompt), MISS, 0, f"{what}: another user's first turn")
    answer = patiently(talk.decode, 3)
    resumed(patiently(talk.prefill, prompt + answer.tokens + tokens(5)), EXACT, 92,
            f"{what}: another user's second turn")
    talk.close()
    stats = box.stats()
    within_budget(box, what)
    if rss_before is not None and not SANITIZED:
        check(stats.rss_bytes <= rss_before + 24 * MIB,
              f"{what}: RSS {stats.rss_bytes} is back near {rss_before}")
    if stats.engine_backend == "SYNTHETIC":
        equal(stats.wrong_bytes, 0, f"{what}: wrong bytes")


def within_budget(box, what):
    stats = box.stats()
    if not SANITIZED:
        check(stats.rss_bytes <= stats.rss_budget_bytes,
              f"{what}: RSS {stats.rss_bytes} within {stats.rss_budget_bytes}")


def recovered(box, offset=0):
    """(recovered, dropped) as the log says at start."""
    found = re.findall(r"recovered (\d+) checkpoints, dropped (\d+)", box.log(offset))
    if not check(found, "the log says what was recovered"):
        return (None, None)
    said = tuple(map(int, found[-1]))
    stats = box.stats()
    equal((stats.recovered_checkpoints, stats.dropped_checkpoints), said,
          "GetStats against the log: (recovered, dropped)")
    return said


# Small enough that pages leave HBM and several segments are in use.
CROWDED = {"hbm.bytes": "2MiB", "ssd.segment_bytes": "256KiB", "engine.live_sessions": "4"}


def stored_sessions(box, count, low=100, high=700):
    """Sessions with one acknowledged checkpoint each: {name: prompt}."""
    client = box.client()
    prompts = {f"s{i}": tokens(rng.randrange(low, high)) for i in range(count)}
    for name, prompt in prompts.items():
        talk = Talk(client, name)
        equal(patiently(talk.prefill, prompt).save_reason, "", f"{name}: saved")
        talk.close()
    return prompts


def pages_on_disk(box):
    """Every page in the segment files: [(path, offset, position, its ids)]."""
    page_bytes = box.page_bytes
    found = []
    for path in box.segments():
        with open(path, "rb") as f:
            data = f.read()
        for offset in range(4096, len(data) - page_bytes + 1, 4096):
            if data[offset:offset + 8] != b"KVPAGE1\n":
                continue
            count, position = (int.from_bytes(data[offset + at:offset + at + 4], "little")
                               for at in (12, 16))
            ids = daemon.unpack(data[offset + 256:offset + 256 + 4 * min(count, PAGE)])
            found.append((path, offset, position, ids))
    return found


def owners(prompts, position, ids):
    """Sessions that may look into this page: one of their histories begins it (another may leave it
    further on, which is only known after looking)."""
    first = ids[:4]
    return {name for name, prompt in prompts.items()
            if len(prompt) > position
            and prompt[position:position + len(first)] == first[:len(prompt) - position]}


def lookers(prompts, position):
    """Sessions whose prompt ends where this page begins: the page may hold a turn that went on from
    there, so they may look into it, find the damage, and still hit in full."""
    return {name for name, prompt in prompts.items() if len(prompt) == position}


def come_back(box, prompts, hurt, what, may_look=frozenset()):
    """Every session's next turn works; those not hurt hit in full; the turn after hits for all."""
    client = box.client()
    weakened = 0
    for name, prompt in prompts.items():
        talk = Talk(client, name)
        longer = prompt + tokens(12)
        got = patiently(talk.prefill, longer)
        weakened += got.weakened
        if name not in hurt:
            hit = even(len(prompt)) if even(len(prompt)) > WINDOW else 0
            check(got.hit_tokens >= hit, f"{what}: {name} was not hurt and hit {got.hit_tokens} "
                  f"of {len(prompt)}")
            if name not in may_look:
                equal(got.weakened, 0, f"{what}: {name} was not hurt; weakened plans")
        equal(got.save_reason, "", f"{what}: {name} is stored again")
        equal(got.computed_tokens + got.hit_tokens, len(longer), f"{what}: {name} adds up")
        talk.close()
        got = patiently(talk.prefill, longer + tokens(5))
        resumed(got, EXACT, len(longer), f"{what}: {name}, the turn after")
        equal(got.weakened, 0, f"{what}: {name}, the turn after; weakened plans")
        talk.close()
        prompts[name] = longer
    return weakened


@contextlib.contextmanager
def mounted(what, *arguments, mib=0):
    """A file system of its own (`mib`: an ext4 in a file): its path, or None where mounts are refused."""
    folder = scratch()
    place = os.path.join(folder, "mounted")
    os.mkdir(place)
    if mib > 0:
        disk = os.path.join(folder, "disk")
        with open(disk, "wb") as f:
            f.truncate(mib * MIB)
        subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", disk], check=True)
        arguments = ("-o", "loop", disk)
    done = subprocess.run(["mount", *arguments, place], stderr=subprocess.PIPE, check=False)
    if done.returncode != 0:
        skip_case(f"{what}: mount is refused: {done.stderr.decode().strip()}")
        yield None
        return
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=False)


def laid_over(source):
    """A library to preload, of this C source; None (and a failed check): no compiler."""
    library = os.path.join(scratch(), "over.so")
    made = subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-x", "c", "-", "-o", library, "-ldl"],
                          input=source.encode(), check=False)
    return library if check(made.returncode == 0, "the library is built") else None


def with_library(library, **variables):
    sanitizer = os.environ.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0"
    return {"LD_PRELOAD": library, "ASAN_OPTIONS": sanitizer, **variables}


# Calls on files fail or hang while FAULT_FILE says "CALL PART WHAT": of files with PART in their path,
# WHAT is an errno, or 0 to wait until the file is gone or says something else.
CALLS = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static int fault(const char *call, int fd)
{
    for (;;) {
        char link[64], path[512] = "", wanted[32] = "", part[128] = "";
        int what = 0;
        FILE *file = fopen(getenv("FAULT_FILE"), "r");
        if (file == NULL) return 0;
        const int read = fscanf(file, "%31s %127s %d", wanted, part, &what);
        fclose(file);
        snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
        const ssize_t n = readlink(link, path, sizeof(path) - 1);
        if (n > 0) path[n] = 0;
        if (read != 3 || strcmp(wanted, call) != 0 || strstr(path, part) == NULL) return 0;
        if (what != 0) return what;
        usleep(2000);
    }
}
#define MOVES(name, call, type) \
ssize_t name(int fd, type buf, size_t count, off_t at) \
{ \
    const int code = fault(call, fd); \
    if (code == 0) \
        return ((ssize_t (*)(int, type, size_t, off_t))dlsym(RTLD_NEXT, #name))(fd, buf, count, at); \
    errno = code; \
    return -1; \
}
MOVES(pread, "read", void *)
MOVES(pread64, "read", void *)
MOVES(pwrite, "write", const void *)
MOVES(pwrite64, "write", const void *)
int fdatasync(int fd)
{
    const int code = fault("flush", fd);
    if (code == 0) return ((int (*)(int))dlsym(RTLD_NEXT, "fdatasync"))(fd);
    errno = code;
    return -1;
}
"""


class Calls:
    """The system calls of a daemon with io.backend=pool: one at a time can be made to fail."""

    def __init__(self):
        self.library = laid_over(CALLS)
        self.file = os.path.join(scratch(), "fault")

    def env(self):
        return with_library(self.library, FAULT_FILE=self.file)

    def fail(self, call, code, part="/segment-"):
        """call: read, write, flush; code 0: it hangs."""
        with open(self.file + ".new", "w", encoding="ascii") as f:
            f.write(f"{call} {part} {code}")
        os.rename(self.file + ".new", self.file)

    def hang(self, call, part="/segment-"):
        self.fail(call, 0, part)

    def work(self):
        if os.path.exists(self.file):
            os.unlink(self.file)


# Adds to the wall clock and to the time since boot what stands in CLOCK_FILE: two i64, in ns.
CLOCKS = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
int clock_gettime(clockid_t id, struct timespec *ts)
{
    static int (*real)(clockid_t, struct timespec *);
    static volatile long long *off;
    if (real == NULL) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    if (off == NULL) {
        void *map = mmap(NULL, 16, PROT_READ, MAP_SHARED, open(getenv("CLOCK_FILE"), O_RDONLY), 0);
        if (map == MAP_FAILED) abort();
        off = map;
    }
    const int rc = real(id, ts);
    if (rc != 0 || (id != CLOCK_REALTIME && id != CLOCK_BOOTTIME)) return rc;
    const long long ns = ts->tv_sec * 1000000000ll + ts->tv_nsec + off[id == CLOCK_BOOTTIME];
    ts->tv_sec = ns / 1000000000;
    ts->tv_nsec = ns % 1000000000;
    if (ts->tv_nsec < 0) { /* Before 1970: as the kernel has it. */
        ts->tv_sec--;
        ts->tv_nsec += 1000000000;
    }
    return rc;
}
"""


class Clocks:
    """The clocks of a daemon: moved while it runs, or between two runs."""

    def __init__(self):
        self.library = laid_over(CLOCKS)
        self.file = os.path.join(scratch(), "clocks")
        self.wall = self.boot = 0
        self._write()

    def env(self):
        return with_library(self.library, CLOCK_FILE=self.file)

    def jump(self, seconds):
        """The wall clock alone."""
        self.wall += seconds
        self._write()

    def go_on(self, seconds):
        """Both: time passes."""
        self.wall += seconds
        self.boot += seconds
        self._write()

    def _write(self):
        data = struct.pack("<qq", self.wall * 10**9, self.boot * 10**9)
        fd = os.open(self.file, os.O_RDWR | os.O_CREAT, 0o600)
        os.pwrite(fd, data, 0)
        os.close(fd)
