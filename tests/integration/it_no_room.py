"""A daemon without room, broken, ending, or not starting at all: one clear error each.

The failure reasons of kvstore/format/reason.c that need a daemon of their own; those that a request
brings about stand in it_bad_input.py.  Then what must keep a daemon from starting: one sentence and
exit code 2.
"""

import errno
import json
import os
import re
import socket
import subprocess
import threading
import time

import grpc

import daemon as d
from daemon import admin_pb, check, equal, pack, pb
from faults import Calls
from reasons import VOCAB, World, account, case, decode, fails, prefill, provoked, run
from talk import model_dir


@case("INTERNAL")
def internal(_):
    """Only a bug brings it about: one is planted (test builds), the engine refuses a good window."""
    broken = d.Daemon(binary=d.TEST_BINARY, arguments=["--plant", "import"]).start()
    alice = broken.client().session
    alice.OpenSession(pb.OpenSessionRequest(session_id="i"))
    first = prefill(session_id="i", tokens=pack(range(3, 90)))
    alice.Prefill(first)
    alice.CloseSession(pb.CloseSessionRequest(session_id="i"))
    fails(alice.Prefill, prefill(session_id="i", tokens=pack(range(3, 95))), code="INTERNAL",
          reason="INTERNAL")
    check(broken.is_up(), "the daemon is up")
    broken.stop()


# ---- room: each needs a daemon of its own ----

@case("SESSIONS_FULL")
def sessions_full(_):
    """Test builds have a plant that leaves room for four; the real limit is 1,048,576."""
    small = d.Daemon(binary=d.TEST_BINARY, arguments=["--plant", "sessions"]).start()
    alice = small.client().session
    for i in range(4):
        alice.OpenSession(pb.OpenSessionRequest(session_id=f"n{i}"))
    fails(alice.OpenSession, pb.OpenSessionRequest(session_id="n4"), code="RESOURCE_EXHAUSTED",
          reason="SESSIONS_FULL", limit="4")
    check(not alice.OpenSession(pb.OpenSessionRequest(session_id="n3")).created, "n3 still opens")
    small.stop()


@case("HBM_FULL")
def hbm_full(_):
    small = d.Daemon({"hbm.bytes": "1MiB"}).start()
    alice = small.client().session
    alice.OpenSession(pb.OpenSessionRequest(session_id="big"))
    fails(alice.Prefill, prefill(session_id="big", tokens=bytes(4 * 200000)),
          code="RESOURCE_EXHAUSTED", reason="HBM_FULL")
    check(alice.Prefill(prefill(session_id="big")).prompt_tokens == 4, "a small one still fits")
    small.stop()


def fill(alice, reason, prompts):
    """Prefills until an answer says why its checkpoint was not stored."""
    for request in prompts:
        answer = alice.Prefill(request)
        if answer.save_reason:
            if equal(answer.save_reason, reason, "why the checkpoint was not stored"):
                provoked.add(reason)
            return request.session_id
    check(False, f"never {reason}")
    return None


@case("SSD_FULL")
def ssd_full(_):
    """Nothing that could go makes room for a save larger than the tier."""
    small = d.Daemon({"ssd.bytes": "1MiB", "ssd.segment_bytes": "1MiB"}).start()
    alice = small.client().session
    for name in ("small", "large"):
        alice.OpenSession(pb.OpenSessionRequest(session_id=name))
    name = fill(alice, "SSD_FULL", (
        prefill(session_id=name, tokens=pack([7] * count))
        for name, count in (("small", 2000), ("large", 9000)))) or "small"
    equal(name, "large", "which one is refused")
    list(alice.Decode(decode(session_id=name, no_checkpoint=True)))
    fails(alice.Checkpoint, pb.CheckpointRequest(session_id=name), code="RESOURCE_EXHAUSTED",
          reason="SSD_FULL")
    check(small.is_up(), "the daemon is up")
    small.stop()


# Laid over libc: flushes of segment files fail while the file FAULT_FILE exists.
FAULT = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
int fdatasync(int fd)
{
    char link[64], path[512];
    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof(path) - 1);
    if (n > 0) {
        path[n] = 0;
        if (strstr(path, "/segment-") && access(getenv("FAULT_FILE"), F_OK) == 0) {
            errno = EIO;
            return -1;
        }
    }
    return ((int (*)(int))dlsym(RTLD_NEXT, "fdatasync"))(fd);
}
"""


@case("SSD_READ_ONLY")
def ssd_read_only(_):
    place = d.scratch()
    library, trigger = os.path.join(place, "fault.so"), os.path.join(place, "now")
    made = subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", library, "-ldl"],
                          input=FAULT.encode(), check=False)
    if not check(made.returncode == 0, "the faulty fdatasync is built"):
        return
    sanitizer = os.environ.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0"
    bad = d.Daemon({"io.backend": "pool"}, env={
        "LD_PRELOAD": library, "FAULT_FILE": trigger, "ASAN_OPTIONS": sanitizer}).start()
    alice, probe = bad.client().session, bad.client(None).health
    alice.OpenSession(pb.OpenSessionRequest(session_id="ro"))
    alice.Prefill(prefill(session_id="ro", level=pb.LEVEL_SSD))
    equal(probe.Check(d.health_pb2.HealthCheckRequest()).status, 1, "serving")
    with open(trigger, "w", encoding="ascii"):
        pass
    answer = alice.Prefill(prefill(session_id="ro", tokens=pack(range(300)), level=pb.LEVEL_SSD))
    equal(answer.save_reason, "SSD_READ_ONLY", "why the checkpoint was not stored")
    os.unlink(trigger)  # A device that works again is not trusted.
    list(alice.Decode(decode(session_id="ro", no_checkpoint=True)))
    fails(alice.Checkpoint, pb.CheckpointRequest(session_id="ro", level=pb.LEVEL_SSD),
          code="FAILED_PRECONDITION", reason="SSD_READ_ONLY")
    end = time.monotonic() + 5
    while probe.Check(d.health_pb2.HealthCheckRequest()).status != 2 and time.monotonic() < end:
        time.sleep(0.05)
    equal(probe.Check(d.health_pb2.HealthCheckRequest()).status, 2, "health says so")
    health = bad.client("ops").admin.GetStats(admin_pb.GetStatsRequest()).health
    check("read-only" in health, f"and why: {health!r}")
    bad.stop()


@case("RESULT_UNKNOWN")
def result_unknown(_):
    """The flush of RocksDB's log fails once: whether the record is there, the next start finds out, and
    the same call again is right in both cases.  What comes after it was not written."""
    calls = Calls()
    bad = d.Daemon({"io.backend": "pool"}, env=calls.env()).start()
    alice = bad.client().session
    for name in ("before", "other"):
        alice.OpenSession(pb.OpenSessionRequest(session_id=name))
    calls.fail("flush", errno.EIO, ".log")
    fails(alice.DeleteSession, pb.DeleteSessionRequest(session_id="before"), code="UNAVAILABLE",
          reason="RESULT_UNKNOWN", field="manifest")
    calls.work()
    for name in ("before", "other"):
        got = d.failure(alice.DeleteSession, pb.DeleteSessionRequest(session_id=name))
        equal((got.code, got.reason), ("FAILED_PRECONDITION", "SSD_READ_ONLY"), f"then {name}")
    got = d.failure(alice.OpenSession, pb.OpenSessionRequest(session_id="new"))
    equal((got.code, got.reason), ("FAILED_PRECONDITION", "SSD_READ_ONLY"), "then a new one")
    bad.kill()
    bad.start()
    alice = bad.client().session
    try:
        alice.DeleteSession(pb.DeleteSessionRequest(session_id="before"))
    except grpc.RpcError as error:  # It happened.
        equal(d.Failure(error).reason, "SESSION_NOT_FOUND", "the same call again")
    names = [s.session_id for s in alice.ListSessions(pb.ListSessionsRequest()).sessions]
    equal(names, ["other"], "after a restart and the same call again")
    bad.stop()


@case("SSD_SLOW")
def ssd_slow(_):
    """What goes on beside it, and that it ends: it_badluck.py."""
    calls = Calls()
    hung = d.Daemon({"io.backend": "pool"}, env=calls.env()).start()
    alice = hung.client().session
    alice.OpenSession(pb.OpenSessionRequest(session_id="slow"))
    calls.hang("flush")
    answer = alice.Prefill(prefill(session_id="slow", level=pb.LEVEL_SSD), timeout=4)
    equal(answer.save_reason, "SSD_SLOW", "why the checkpoint is not stored yet")
    got = fails(alice.Checkpoint, pb.CheckpointRequest(session_id="slow", level=pb.LEVEL_SSD),
                code="UNAVAILABLE", reason="SSD_SLOW", timeout=4)
    check(got is not None and got.retry_ms > 0, f"with a time to try again: {got!r}")
    calls.work()
    hung.stop()


@case("QUOTA_SAVES")
def quota_saves(_):
    """One save is in flight, on a disk that hangs: the next turn is refused before it computes."""
    calls = Calls()
    hung = d.Daemon({"io.backend": "pool"}, env=calls.env()).start()
    hung.client("ops").admin.SetQuota(admin_pb.SetQuotaRequest(
        user="alice", limits=[admin_pb.SetLimit(name="saves", limit=1)]))
    alice = hung.client().session
    for name in ("first", "next"):
        alice.OpenSession(pb.OpenSessionRequest(session_id=name))
    calls.hang("flush")
    alice.Prefill(prefill(session_id="first", level=pb.LEVEL_ACCEPTED), timeout=4)
    got = fails(alice.Prefill, prefill(session_id="next"), code="RESOURCE_EXHAUSTED",
                reason="QUOTA_SAVES", field="saves", limit="1", value="1", timeout=4)
    check(got is not None and got.retry_ms > 0, f"with a time to try again: {got!r}")
    calls.work()
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            equal(alice.Prefill(prefill(session_id="next")).save_reason, "", "then it goes on")
            break
        except grpc.RpcError:
            time.sleep(0.05)
    else:
        check(False, "the save ended and the next turn is still refused")
    hung.stop()


@case("INDEX_FULL")
def index_full(_):
    small = d.Daemon({"index.ram": "1MiB", "ssd.bytes": "1GiB", "ssd.segment_bytes": "64MiB",
                      "hbm.bytes": "256MiB"}).start()
    alice = small.client().session
    alice.OpenSession(pb.OpenSessionRequest(session_id="deep"))
    history = list(range(12))

    def prompts():
        for i in range(3000):
            at = len(history)
            history.extend((i + k) % VOCAB for k in range(5))
            yield prefill(session_id="deep", tokens=pack(history), level=pb.LEVEL_ACCEPTED,
                          anchors=[at + 1, at + 2, at + 3, at + 4])
    name = fill(alice, "INDEX_FULL", prompts()) or "deep"
    check(alice.Prefill(prefill(session_id=name)).prompt_tokens == 4, "it goes on computing")
    check(small.is_up(), "the daemon is up")
    small.stop()


def counter(ops, name):
    got = ops.GetStats(admin_pb.GetStatsRequest()).counters
    return next(c.value for c in got if c.name == name)


@case("QUEUE_FULL")
def queue_full(_):
    # One slot, in use, and as many calls of one user waiting for it as may.
    one = d.Daemon({"engine.live_sessions": "1", "hbm.bytes": "64MiB", "engine.backend": "cpu",
                    "engine.model_dir": model_dir(), "engine.draft": "off"}).start()
    client, ops = one.client(), one.client("ops").admin
    alice = client.session
    for i in range(34):
        alice.OpenSession(pb.OpenSessionRequest(session_id=f"w{i}"))
    alice.Prefill(prefill(session_id="w0"))
    stream = alice.Decode(decode(session_id="w0", max_tokens=65536, ignore_eos=True), timeout=60)
    next(stream)
    calls = [alice._stub.Prefill.future(prefill(session_id=f"w{i}"), metadata=client.metadata,
                                        timeout=60) for i in range(1, 33)]
    end = time.monotonic() + 10
    while counter(ops, "cached_live_waiting") < 32 and time.monotonic() < end:
        time.sleep(0.01)
    got = fails(alice.Prefill, prefill(session_id="w33"), code="RESOURCE_EXHAUSTED",
                reason="QUEUE_FULL", field="calls of one user waiting for a live session",
                limit="32", value="32")
    check(got is not None and got.retry_ms > 0, f"it says when to try again: {got!r}")
    stream.cancel()
    check(all(call.result().prompt_tokens == 4 for call in calls), "those that wait are served")
    one.stop()

    # A decode each for more sessions than the daemon takes requests; 100 streams a connection.
    count = 280
    many = d.Daemon({"engine.live_sessions": str(count), "hbm.bytes": "256MiB",
                     "pool.bytes": "64MiB"}).start()
    clients = [many.client() for _ in range(4)]
    for i in range(count):
        clients[0].session.OpenSession(pb.OpenSessionRequest(session_id=f"q{i}"))
        clients[0].session.Prefill(prefill(session_id=f"q{i}", no_checkpoint=True))
    calls = [clients[i % 4].session.Decode(
        decode(session_id=f"q{i}", max_tokens=1000, ignore_eos=True, no_checkpoint=True),
        timeout=60) for i in range(count)]
    refused, served = [], 0
    for call in calls:
        try:
            served += sum(len(m.tokens) for m in call) == 4000
        except grpc.RpcError as error:
            refused.append(d.Failure(error))
    check(len(refused) > 0, "some of them are refused")
    check(all((f.code, f.reason) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL") and f.retry_ms == 100
              for f in refused), f"all of them with a retry time: {refused[:2]}")
    if refused:
        provoked.add(refused[0].reason)
    equal(served + len(refused), count, "all others are served")
    many.stop()


def own_model(name, **changes):
    """`tiny` with changes, as files of its own."""
    config = os.path.join(d.scratch(), name + ".json")
    directory = os.path.join(d.scratch(), name)
    with open(os.path.join(d.SOURCE, "engine", "model", "configs", "tiny.json"),
              encoding="ascii") as f:
        shape = json.load(f)
    shape["text_config"].update(changes)
    with open(config, "w", encoding="ascii") as f:
        json.dump(shape, f)
    subprocess.run([os.path.join(d.BUILD, "tools", "mkmodel"), "--config", config, directory],
                   check=True, stdout=subprocess.DEVNULL)
    return directory


@case("CONTEXT_FULL")
def context_full(_):
    small = d.Daemon({"engine.backend": "cpu", "engine.model_dir": own_model(
        "short", max_position_embeddings=64)}).start()
    alice = small.client().session
    alice.OpenSession(pb.OpenSessionRequest(session_id="c"))
    alice.Prefill(prefill(session_id="c", tokens=pack(range(3, 53))))
    fails(alice.Decode, decode(session_id="c", max_tokens=15), code="OUT_OF_RANGE",
          reason="CONTEXT_FULL", field="max_tokens", limit="14", value="15")
    pieces = alice.Decode(decode(session_id="c", max_tokens=14, ignore_eos=True))
    equal(sum(len(p.tokens) // 4 for p in pieces), 14, "what has room is generated")
    small.stop()


@case("MODEL_LOST")
def model_lost(_):
    directory = own_model("cut")
    server = d.Daemon({"engine.backend": "cpu", "engine.model_dir": directory}).start()
    alice = server.client().session
    alice.OpenSession(pb.OpenSessionRequest(session_id="m"))
    alice.Prefill(prefill(session_id="m"))
    os.truncate(os.path.join(directory, "model.safetensors"), 8192)
    fails(alice.Prefill, prefill(session_id="m", tokens=pack(range(3, 90))), code="UNAVAILABLE",
          reason="MODEL_LOST", field="engine.model_dir")
    check(server.is_up(), "the daemon is up")
    server.stop()


@case("STARTING")
def starting(_):
    """Test builds have a plant that takes a second for each step of a start."""
    slow = d.Daemon(binary=d.TEST_BINARY, arguments=["--plant", "slow_start"])
    starter = threading.Thread(target=slow.start)
    starter.start()
    early = slow.client(target=f"unix:{slow.socket}")
    early.admin.GetConfig(admin_pb.GetConfigRequest(), wait_for_ready=True, metadata=d.Client(
        f"unix:{slow.socket}", d.TOKENS["ops"][2]).metadata)
    fails(early.session.OpenSession, pb.OpenSessionRequest(session_id="s"), code="UNAVAILABLE",
          reason="STARTING")
    starter.join()
    check(early.session.OpenSession(pb.OpenSessionRequest(session_id="s")).created, "then it serves")
    slow.stop()


@case("SESSION_UNREADABLE")
def session_unreadable(_):
    """A block of RocksDB's tables is overwritten where one long session has its records."""
    box = d.Daemon().start()
    alice = box.client().session
    for name in ("long", "short"):
        alice.OpenSession(pb.OpenSessionRequest(session_id=name))
    whole = [3 + i % 500 for i in range(2000)]
    for end in range(40, 2000, 20):
        alice.Prefill(prefill(session_id="long", tokens=pack(whole[:end]),
                              anchors=range(end - 16, end, 4)))
    alice.Prefill(prefill(session_id="short", tokens=pack(whole[:100])))
    box.stop()
    box.start()  # Its log becomes a table.
    box.stop()
    manifest = os.path.join(box.state, "manifest")
    tables = [os.path.join(manifest, n) for n in os.listdir(manifest) if n.endswith(".sst")]
    table = max(tables, key=os.path.getsize)
    with open(table, "r+b") as f:
        f.seek(os.path.getsize(table) // 2)
        f.write(b"\xff" * 16)
    box.start()
    alice = box.client().session
    check(alice.Prefill(prefill(session_id="short", tokens=pack(whole[:110]))).hit_tokens > 90,
          "the other session is served")
    first = alice.Prefill(prefill(session_id="long", tokens=pack(whole)))
    equal((first.hit_tokens, first.save_reason), (0, "SESSION_UNREADABLE"), "nothing of it is used")
    fails(alice.Checkpoint, pb.CheckpointRequest(session_id="long"), code="FAILED_PRECONDITION",
          reason="SESSION_UNREADABLE")
    operator = box.client("ops").admin
    stats, end = operator.GetStats(admin_pb.GetStatsRequest()), time.monotonic() + 5
    while stats.health == "serving" and time.monotonic() < end:  # Judged every 50 ms.
        stats = operator.GetStats(admin_pb.GetStatsRequest())
    check(stats.health.startswith("records of some sessions cannot be read"), stats.health)
    counted = {c.name: c.value for c in stats.counters}
    equal(counted["cached_unreadable_sessions"], 1, "counted")
    check(box.logged("event=tree_unreadable session="), "the log names it")
    check(alice.Prefill(prefill(session_id="long", tokens=pack(whole + [7]))).hit_tokens > 1900,
          "it goes on in memory")
    box.kill()


@case("SHUTTING_DOWN")
def shutting_down(_):
    dying = d.Daemon().start()
    alice = dying.client().session
    alice.OpenSession(pb.OpenSessionRequest(session_id="s"))
    alice.Prefill(prefill())
    stream = alice.Decode(decode(max_tokens=65536, ignore_eos=True))
    next(stream)
    dying.process.terminate()
    fails(lambda: list(stream), code="UNAVAILABLE", reason="SHUTTING_DOWN")
    equal(dying.wait(), 0, "exit code")


# ---- what keeps a daemon from starting ----

def refuses(daemon, *words, what):
    """Exit 2 and one sentence that has these words."""
    code, said = daemon.refused()
    own = [line for line in said.splitlines() if not re.match(r"\d{4}-\d\d-\d\dT", line)]
    equal(code, 2, f"{what}: exit code")
    check(len(own) == 1 and own[0].startswith("cached: "), f"{what}: one sentence: {said!r}")
    for word in words:
        check(word in said, f"{what}: names {word!r}: {said!r}")
    check("event=ready" not in said, f"{what}: it never served")


def start_failures(w):
    refuses(d.Daemon({"state.dir": w.daemon.state}), str(w.daemon.process.pid), w.daemon.state,
            what="second daemon on the same directory")
    check(w.daemon.is_up(), "the first daemon is up")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        refuses(d.Daemon({"server.listen": address}), address, what="port in use")
    refuses(d.Daemon({"server.listen": f"127.0.0.1:{w.daemon.port}"}), str(w.daemon.port),
            what="port of another daemon")
    refuses(d.Daemon({"server.socket": w.daemon.socket}), w.daemon.socket,
            what="socket of another daemon")
    plain = os.path.join(d.scratch(), "plain")
    with open(plain, "w", encoding="ascii") as f:
        f.write("not a socket")
    refuses(d.Daemon({"server.socket": plain}), plain, what="socket path is a file")
    with open(plain, encoding="ascii") as f:
        equal(f.read(), "not a socket", "the file is left alone")
    refuses(d.Daemon({"state.dir": "/proc/nothing/state"}), "/proc/nothing/state",
            what="state directory cannot be made")
    refuses(d.Daemon({"state.dir": plain}), plain, what="state directory is a file")
    refuses(d.Daemon({"state.dir": "/proc"}), "/proc", what="state directory is unwritable")
    refuses(d.Daemon({"server.token_file": plain}), plain, what="token file is malformed")
    refuses(d.Daemon({"server.token_file": "/nonexistent"}), "/nonexistent",
            what="no token file")


def full_directory():
    mount = os.path.join(d.scratch(), "full")
    os.mkdir(mount)
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", mount], check=False,
                          stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    if made.returncode != 0:
        print("skipped: full state directory (no right to mount)")
        return
    try:
        with open(os.path.join(mount, "fill"), "wb") as f:
            try:
                f.write(bytes(2 << 20))
            except OSError:
                pass
        refuses(d.Daemon({"state.dir": os.path.join(mount, "state")}), mount,
                what="full state directory")
    finally:
        subprocess.run(["umount", mount], check=False)


def find_mkmodel():
    for root, _, names in os.walk(d.BUILD):
        if "mkmodel" in names and os.access(os.path.join(root, "mkmodel"), os.X_OK):
            return os.path.join(root, "mkmodel")
    return None


def model_failures():
    def cpu(directory):
        return d.Daemon({"engine.backend": "cpu", "engine.model_dir": directory})
    refuses(cpu("/nonexistent"), "/nonexistent", what="no model directory")
    empty = d.scratch()
    refuses(cpu(empty), "config.json", what="empty model directory")
    mkmodel = find_mkmodel()
    if not check(mkmodel is not None, "mkmodel is built: damaged models come from it"):
        return
    model = os.path.join(d.scratch(), "tiny")
    done = subprocess.run([mkmodel, model], check=False, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT)
    if not check(done.returncode == 0, f"mkmodel: {done.stdout!r}"):
        return
    weights = os.path.join(model, "model.safetensors")
    with open(weights, "rb") as f:
        whole = f.read()
    for what, data in (("half-written", whole[:len(whole) // 2]), ("7 bytes", whole[:7]),
                       ("empty", b""), ("one byte short", whole[:-1]),
                       ("huge header", b"\xff" * 8 + whole[8:]),
                       ("garbage header", whole[:8] + b"x" * 64 + whole[72:])):
        with open(weights, "wb") as f:
            f.write(data)
        refuses(cpu(model), "safetensors", what=f"safetensors {what}")
    os.unlink(weights)
    refuses(cpu(model), "safetensors", what="no safetensors")
    os.mkdir(weights)
    refuses(cpu(model), "safetensors", what="safetensors is a directory")
    with open(os.path.join(model, "config.json"), "w", encoding="ascii") as f:
        f.write("{")
    refuses(cpu(model), "config.json", what="broken config.json")


def main():
    w = World()
    run(w)
    start_failures(w)
    w.daemon.stop()
    full_directory()
    model_failures()
    account("it_no_room.py")
    d.finish()


main()
