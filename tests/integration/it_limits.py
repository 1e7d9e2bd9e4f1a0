"""Limits of the process, and places that are not the daemon's: a start is refused by name, a stop ends.

`ulimit -v`, `-u` and `-f`, a process id file that is something else's, memory that no machine has, a
disk that is full after a kill -9, and a standard error that nobody reads.  Libraries end a process
that cannot have a thread or memory; here that must never be seen: exit code 2 and one sentence, or it
serves.
"""

import os
import re
import resource
import signal
import subprocess
import time

import daemon
from daemon import check, equal, scratch
from faults import CROWDED, MIB, SANITIZED, come_back, mounted, stored_sessions
from talk import Box, Talk, case, run_cases, skip_case, tokens

SOMEBODY = 61234  # Has no other process: RLIMIT_NPROC counts all of a user's.
with open(daemon.BINARY, "rb") as _binary:
    TSAN = b"__tsan_init" in _binary.read()


def attempt(box, seconds=30, **popen):
    """A start under some limit: (exit code, or None where it serves; its sentences; all it said)."""
    process = subprocess.Popen(box.command(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, **popen)
    os.set_blocking(process.stderr.fileno(), False)
    said, end, code = b"", time.monotonic() + seconds, None
    while code is None and b"event=ready" not in said and time.monotonic() < end:
        code = process.poll()
        said += process.stderr.read() or b""
        time.sleep(0.01)
    serves = b"event=ready" in said
    if process.poll() is None:
        process.send_signal(signal.SIGTERM if serves else signal.SIGKILL)
    process.stderr.close()
    stopped = process.wait(20)
    process.stdout.close()
    if serves:
        equal(stopped, 0, "exit code of a stop under a limit")
    text = said.decode(errors="replace")
    own = [line for line in text.splitlines() if not re.match(r"\d{4}-\d\d-\d\dT", line)]
    return None if serves else code, own, text


def refused_or_serves(box, what, words, **popen):
    """True: it serves."""
    code, own, text = attempt(box, **popen)
    if code is None and "event=ready" in text:
        return True
    equal(code, 2, f"{what}: exit code, {text!r}")
    check(len(own) == 1 and own[0].startswith("cached: ") and words in own[0],
          f"{what}: one sentence with {words!r}: {text!r}")
    return False


@case
def address_space():
    if SANITIZED or TSAN:
        skip_case("address_space: sanitizers reserve terabytes")
        return
    box = Box("synthetic")
    served = []
    for mib in (200, 400, 600, 800, 1000, 1200, 1400, 1600, 1700, 1800, 2400):
        limit = mib * MIB
        if refused_or_serves(box, f"ulimit -v {mib} MiB", f"RLIMIT_AS allows {limit} bytes",
                             preexec_fn=lambda limit=limit: resource.setrlimit(
                                 resource.RLIMIT_AS, (limit, limit))):
            served.append(mib)
    check(served and served[0] > 1000 and served[-1] == 2400, f"it serves with {served} MiB")


@case
def threads():
    if SANITIZED or TSAN:
        skip_case("threads: the sanitizer wants threads of its own")
        return
    if os.geteuid() != 0:
        skip_case("threads: root has no limit of threads, and this is not root")
        return
    box = Box("synthetic")
    os.chmod(box.directory, 0o755)
    for folder, _, names in os.walk(box.directory):
        for path in [folder] + [os.path.join(folder, name) for name in names]:
            os.chown(path, SOMEBODY, SOMEBODY)

    def limited(count):
        resource.setrlimit(resource.RLIMIT_NPROC, (count, count))
        os.setgid(SOMEBODY)
        os.setuid(SOMEBODY)
    served = []
    for count in (1, 2, 4, 8, 12, 16, 20, 24, 26, 28, 30, 32, 34, 36, 40, 64, 400):
        # The log thread may be the first that there is no room for.
        if refused_or_serves(box, f"ulimit -u {count}", "start",
                             preexec_fn=lambda count=count: limited(count)):
            served.append(count)
    check(served and served[0] > 16 and served[-1] == 400, f"it serves with {served} threads")
    code, own, _ = attempt(box, preexec_fn=lambda: limited(12))
    check(code == 2 and re.search(r"\d+ threads can be started: want at least \d+", own[0])
          and "TasksMax=" in own[0], f"what it says: {own}")


@case
def file_size():
    """Too small for a segment: refused.  Too small for what comes: saves are refused, turns go on."""
    box = Box("synthetic")
    check(not refused_or_serves(box, "ulimit -f 1 MiB", "File too large",
                                preexec_fn=lambda: resource.setrlimit(
                                    resource.RLIMIT_FSIZE, (MIB, MIB))), "it does not serve")
    box.start()
    talk = Talk(box.client(), "s")
    equal(talk.prefill(tokens(300)).save_reason, "", "saved before")
    hard = resource.prlimit(box.process.pid, resource.RLIMIT_FSIZE)[1]
    resource.prlimit(box.process.pid, resource.RLIMIT_FSIZE, (4096, hard))
    other = Talk(box.client("bob"), "t")
    got = other.prefill(tokens(700))
    equal(got.save_reason, "SSD_READ_ONLY", "not saved")
    equal(got.prompt_tokens, 700, "the turn is answered")
    check(box.is_up(), "the daemon is up")
    resource.prlimit(box.process.pid, resource.RLIMIT_FSIZE, (hard, hard))
    box.stop()


@case
def memory_that_no_machine_has():
    box = Box("synthetic", {"hbm.bytes": "64TiB"})
    if SANITIZED or TSAN:
        skip_case("memory_that_no_machine_has: sanitizers end the process")
        return
    check(not refused_or_serves(box, "64 TiB", "hbm.bytes = 70368744177664: no memory for"), "refused")


@case
def a_pid_file_that_is_something_elses():
    box = Box("synthetic")
    path = os.path.join(box.directory, "pid")
    box.flags["server.pid_file"] = path
    for content in ("precious", "12 monkeys\n", "1234567890123456789012345", "\n", "-1\n"):
        with open(path, "w", encoding="ascii") as f:
            f.write(content)
        check(not refused_or_serves(box, content, f"server.pid_file {path} exists and holds no "
                                    "process id; it is left alone"), f"{content!r} is refused")
        with open(path, encoding="ascii") as f:
            equal(f.read(), content, "left as it was")
    os.unlink(path)
    os.mkfifo(path)
    check(not refused_or_serves(box, "a pipe", "exists and holds no process id"), "a pipe is refused")
    os.unlink(path)
    box.flags["server.pid_file"] = "/dev/null"
    check(not refused_or_serves(box, "/dev/null", "exists and holds no process id"), "nor a device")
    check(os.path.exists("/dev/null"), "/dev/null is still there")
    box.flags["server.pid_file"] = path
    for content in ("", "4711", "4711\n"):
        with open(path, "w", encoding="ascii") as f:
            f.write(content)
        box.start()
        with open(path, encoding="ascii") as f:
            equal(f.read(), f"{box.process.pid}\n", f"after {content!r}")
        box.stop()
        check(not os.path.exists(path), "removed at the stop")
    box.start()
    with open(path, "w", encoding="ascii") as f:
        f.write("another's\n")
    box.stop()
    check(os.path.exists(path), "what somebody put there since stays")


@case
def full_after_a_kill():
    """Refused in the words of docs/operations.md; whoever goes on trying has it back with the room."""
    with mounted("full_after_a_kill", mib=64) as place:
        if place is None:
            return
        box = Box("synthetic", {**CROWDED, "state.dir": os.path.join(place, "state"),
                                "ssd.bytes": "16MiB"})
        box.start()
        prompts = stored_sessions(box, 8)
        box.kill()
        filler = os.path.join(place, "filler")
        with open(filler, "wb", buffering=0) as f:
            for count in (MIB, 4096):
                try:
                    while True:
                        f.write(bytes(count))
                except OSError:
                    pass
        check(not refused_or_serves(box, "full", "bytes free on this file system, and a start after a "
                                    "crash needs "), "it is refused")
        os.unlink(filler)
        box.start()
        come_back(box, prompts, set(), "room again")
        box.stop()


@case
def a_log_that_nobody_reads():
    """Standard error is a full pipe: turns go on, SIGTERM ends the process in seconds."""
    box = Box("synthetic")
    reading, writing = os.pipe()
    out = os.path.join(scratch(), "out")
    with open(out, "wb") as stdout:
        box.process = subprocess.Popen(box.command(), stdout=stdout, stderr=writing)
    daemon.Daemon.running.append(box)
    said, end = b"", time.monotonic() + 30
    while b"event=ready" not in said and time.monotonic() < end:
        said += os.read(reading, 65536)
    box.port = int(re.search(rb"event=ready port=(\d+)", said).group(1))
    os.set_blocking(writing, False)
    try:
        while True:
            os.write(writing, b"x" * 4096)
    except BlockingIOError:
        pass
    os.set_blocking(writing, True)  # It is the daemon's as well.
    os.close(writing)
    talk = Talk(box.client(), "s")
    for i in range(20):
        equal(talk.prefill(tokens(50 + i)).prompt_tokens, 50 + i, "a turn")
    code, seconds = daemon.Daemon.stop(box)
    equal(code, 0, "exit code")
    check(seconds < 8, f"it ended after {seconds:.1f} s")
    equal(os.path.getsize(out), 0, "bytes on standard output")
    box.hang_up()
    # Nor does a start that is refused wait for a reader.
    reader, full = os.pipe()
    os.set_blocking(full, False)
    try:
        while True:
            os.write(full, b"x" * 4096)
    except BlockingIOError:
        pass
    os.set_blocking(full, True)
    began = time.monotonic()
    done = subprocess.run([daemon.BINARY, "--nonsense"], stderr=full, timeout=20, check=False)
    equal(done.returncode, 2, "exit code of a refusal that nobody reads")
    check(time.monotonic() - began < 8, "it does not wait")
    for fd in (reading, reader, full):
        os.close(fd)


run_cases(__doc__)
