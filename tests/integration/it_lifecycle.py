"""Starting, serving, stopping: what callers and operators see of a daemon's life.

SIGTERM idle and busy, a second signal, kill -9 and start again, two daemons, health as a probe and as
a watch, deadlines and callers that vanish (nothing of them stays), calls that nobody answers.
"""

import fcntl
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time

import grpc

import daemon as d
from daemon import admin_pb, check, equal, failure, pack, pb

SERVING, NOT_SERVING, SERVICE_UNKNOWN = 1, 2, 3


def session(daemon, name="s", tokens=range(40), **fields):
    alice = daemon.client().session
    alice.OpenSession(pb.OpenSessionRequest(session_id=name))
    alice.Prefill(pb.PrefillRequest(session_id=name, tokens=pack(tokens), **fields))
    return alice


def endless(alice, name="s", **kwargs):
    stream = alice.Decode(pb.DecodeRequest(session_id=name, max_tokens=65536, ignore_eos=True,
                                           no_checkpoint=True), **kwargs)
    next(stream)
    return stream


def stats(daemon):
    return daemon.client("ops").admin.GetStats(admin_pb.GetStatsRequest())


def quiet(daemon, what):
    """Nothing is in flight, within 3 s (an answer may arrive before its call is counted out)."""
    end = time.monotonic() + 3
    inflight = stats(daemon).requests_inflight
    while inflight > 0 and time.monotonic() < end:
        time.sleep(0.02)
        inflight = stats(daemon).requests_inflight
    equal(inflight, 0, f"{what}: requests in flight")


def stop_idle():
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        daemon = d.Daemon({"server.pid_file": os.path.join(d.scratch(), "pid")}).start()
        with open(daemon.flags["server.pid_file"], encoding="ascii") as f:
            equal(int(f.read()), daemon.process.pid, "the pid file")
        client = daemon.client()
        client.health.Check(d.health_pb2.HealthCheckRequest())
        began = time.monotonic()
        daemon.process.send_signal(signal_number)
        equal(daemon.wait(), 0, f"signal {signal_number}: exit code")
        seconds = time.monotonic() - began
        check(seconds < 2, f"idle stop in {seconds:.2f} s, with a client that stays connected")
        check(not os.path.exists(daemon.flags["server.pid_file"]), "the pid file is gone")
        check(not os.path.exists(daemon.socket), "the socket is gone")
        for event in ("event=start ", "event=ready ", "event=stop ", "event=stopped "):
            check(daemon.logged(event), f"{event}in the log")


def stop_at_once():
    """A signal right after the start, many times: no half-made thing is taken down."""
    daemon = d.Daemon()
    for i in range(5):
        daemon.start()
        code, seconds = daemon.stop()
        check(code == 0 and seconds < 3, f"start and stop {i}: {code} in {seconds:.2f} s")
    for delay in (0.0, 0.005, 0.02, 0.05):
        process = subprocess.Popen(daemon.command(), stderr=subprocess.DEVNULL)
        time.sleep(delay)
        process.terminate()
        code = process.wait(12)
        check(code in (0, -signal.SIGTERM), f"a signal after {delay} s: {code}")


def stop_busy():
    daemon = d.Daemon().start()
    alice = session(daemon)
    stream = endless(alice)
    waiting = [alice]
    began = time.monotonic()
    daemon.process.terminate()
    got = failure(lambda: list(stream))
    check(got is not None and got.code == "UNAVAILABLE" and got.reason == "SHUTTING_DOWN",
          f"a Decode under way is refused: {got!r}")
    refused = failure(waiting[0].GetSession, pb.GetSessionRequest(session_id="s"))
    check(refused is not None and refused.code == "UNAVAILABLE", f"a later call: {refused!r}")
    equal(daemon.wait(), 0, "exit code")
    seconds = time.monotonic() - began
    check(seconds < 10, f"stopped in {seconds:.2f} s")
    daemon.start()
    found = daemon.client().session.GetSession(pb.GetSessionRequest(session_id="s"))
    equal(found.session.session_id, "s", "the session is there after the restart")
    equal(daemon.stop()[0], 0, "exit code")


def stop_slow_reader():
    """A caller that never reads cannot hold the daemon."""
    daemon = d.Daemon({"engine.live_sessions": "4"}).start()
    alice = session(daemon)
    stream = alice.Decode(pb.DecodeRequest(session_id="s", max_tokens=65536, ignore_eos=True))
    time.sleep(0.5)
    quick = daemon.client("ops").admin
    began = time.monotonic()
    quick.GetStats(admin_pb.GetStatsRequest())
    check(time.monotonic() - began < 1, "others are answered meanwhile")
    code, seconds = daemon.stop()
    equal(code, 0, "exit code with a caller that does not read")
    check(seconds < 10, f"stopped in {seconds:.2f} s")
    del stream


def second_signal():
    daemon = d.Daemon().start()
    alice = session(daemon)
    stream = endless(alice)
    daemon.process.terminate()
    time.sleep(0.02)
    if daemon.is_up():
        daemon.process.send_signal(signal.SIGINT)
    equal(daemon.wait(), 0, "exit code after two signals")
    check(failure(lambda: list(stream)) is not None, "the stream has ended")


def kill_and_restart():
    daemon = d.Daemon().start()
    session(daemon, level=pb.LEVEL_SSD)
    for i in range(3):
        pid = daemon.process.pid
        daemon.process.kill()
        equal(daemon.wait(), -signal.SIGKILL, "killed")
        check(os.path.exists(daemon.socket), "a killed daemon leaves its socket file")
        daemon.start()
        check(daemon.process.pid != pid, "another process")
        found = daemon.client().session.Lookup(
            pb.LookupRequest(session_id="s", tokens=pack(list(range(40)) + [1, 2, 3])))
        check(found.stored_tokens == 40, f"restart {i}: what was on SSD is there: {found}")
        over = daemon.client(target=f"unix:{daemon.socket}")
        equal(over.health.Check(d.health_pb2.HealthCheckRequest(), timeout=5).status, SERVING,
              "the left-over socket is served again")
    daemon.stop()


def second_daemon():
    first = d.Daemon().start()
    second = d.Daemon(directory=first.directory)
    code, said = second.refused()
    equal(code, 2, "a second daemon on the same directory: exit code")
    check(f"pid {first.process.pid}" in said and first.state in said, f"it names the first: {said}")
    equal(first.client().health.Check(d.health_pb2.HealthCheckRequest()).status, SERVING,
          "the first goes on")
    other = d.Daemon({"server.listen": f"127.0.0.1:{first.port}", "server.socket": ""})
    code, said = other.refused()
    check(code == 2 and str(first.port) in said, f"port in use: {code} {said}")
    check(os.path.exists(os.path.join(first.state, "lock")), "the lock file is there")
    first.stop()
    code = second.start().stop()[0]
    equal(code, 0, "once the first has stopped the second may have the directory")


def health():
    daemon = d.Daemon().start()
    probe = daemon.client(None).health
    request = d.health_pb2.HealthCheckRequest
    for service in ("", "cached.session.v1.SessionService", "cached.admin.v1.AdminService"):
        equal(probe.Check(request(service=service), timeout=5).status, SERVING, service or "all")
    got = failure(probe.Check, request(service="cached.session.v1.Session"))
    check(got is not None and got.code == "NOT_FOUND", f"unknown service: {got!r}")
    seen, unknown = [], []

    def watch(service, out):
        try:
            for answer in probe.Watch(request(service=service)):
                out.append(answer.status)
        except grpc.RpcError as error:
            out.append(error.code().name)
    threads = [threading.Thread(target=watch, args=a)
               for a in (("", seen), ("nothing.Here", unknown))]
    for thread in threads:
        thread.start()
    time.sleep(1.5)
    equal(seen, [SERVING], "a watch says what is")
    equal(unknown, [SERVICE_UNKNOWN], "a watch of an unknown service stays open")
    code, seconds = daemon.stop()
    for thread in threads:
        thread.join(10)
    check(code == 0 and seconds < 5, f"watchers do not hold a stop: {seconds:.2f} s")
    equal(seen, [SERVING, NOT_SERVING, "UNAVAILABLE"], "the watch saw the stop")

    daemon.start()
    watches = [daemon.client(None).health.Watch(request()) for _ in range(300)]
    answers = []
    for stream in watches:
        try:
            answers.append(next(stream).status)
        except grpc.RpcError as error:
            answers.append(error.code().name)
    check(answers.count(SERVING) == 256 and answers.count("RESOURCE_EXHAUSTED") == 44,
          f"256 watchers at most: {answers.count(SERVING)}")
    for stream in watches:
        stream.cancel()
    end = time.monotonic() + 5
    while time.monotonic() < end:
        try:
            stream = daemon.client(None).health.Watch(request())
            next(stream)
            break
        except grpc.RpcError:
            time.sleep(0.2)
    check(stream.is_active(), "watchers that have gone make room")
    stream.cancel()
    daemon.stop()


def vanishing_callers():
    """Deadlines and cancels at every point: memory and streams come back."""
    daemon = d.Daemon({"engine.live_sessions": "16"}).start()
    alice = session(daemon)
    for i in range(16):
        session(daemon, f"v{i}")

    def round_of(count):
        for i in range(count):
            name = f"v{i % 16}"
            try:
                stream = alice.Decode(
                    pb.DecodeRequest(session_id=name, max_tokens=200, ignore_eos=True,
                                     no_checkpoint=True), timeout=0.001 * (i % 7) + 0.0005)
                for _, _ in zip(range(i % 5), stream):
                    pass
                stream.cancel()
            except grpc.RpcError:
                pass
            try:
                alice.Prefill(pb.PrefillRequest(session_id=name, tokens=pack([i % 500] * 300)),
                              timeout=0.0005 * (i % 9) + 0.0002)
            except grpc.RpcError:
                pass
    round_of(200)
    quiet(daemon, "200 callers gone")
    before = stats(daemon).rss_bytes
    round_of(600)
    quiet(daemon, "600 callers gone")
    grown = stats(daemon).rss_bytes - before
    limit = 24 << 20
    with open(d.BINARY, "rb") as f:
        program = f.read()
        if b"__asan_init" in program or b"__tsan_init" in program:
            limit = 300 << 20  # Sanitizers keep up to 256 MiB of freed memory.
    check(grown < limit, f"memory after 600 vanished callers: {grown >> 10} KiB more")
    answer = alice.Prefill(pb.PrefillRequest(session_id="s", tokens=pack(range(50))))
    equal(answer.prompt_tokens, 50, "the daemon serves")
    began = time.monotonic()
    got = failure(alice.Decode, pb.DecodeRequest(session_id="s", max_tokens=65536,
                                                 ignore_eos=True), timeout=0.03)
    check(got is not None and got.code == "DEADLINE_EXCEEDED", f"a deadline: {got!r}")
    check(time.monotonic() - began < 1, "at its time")
    equal(daemon.stop()[0], 0, "exit code")


def nobody_reads_the_log():
    """Standard error is a pipe that is full: turns go on, and a stop ends all the same."""
    daemon = d.Daemon()
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    daemon.process = subprocess.Popen(daemon.command(), stderr=writer)
    d.Daemon.running.append(daemon)
    os.close(writer)
    said = b""
    while b"event=ready" not in said:
        said += os.read(reader, 4096)
    alice = session(daemon)
    for i in range(60):
        alice.Prefill(pb.PrefillRequest(session_id="s", tokens=pack(range(40 + i))), timeout=5)
    began = time.monotonic()
    equal(daemon.stop(timeout=30)[0], 0, "exit code")
    seconds = time.monotonic() - began
    check(1.5 < seconds < 8, f"it waits 2 s for the reader and no longer: {seconds:.1f} s")
    os.close(reader)


def pid_file_of_somebody_else():
    """A file that is no pid file is left alone; what a killed daemon leaves is taken over."""
    path = os.path.join(d.scratch(), "precious")
    for content in (b"precious\n", b"12 34\n", b"1" * 40):
        with open(path, "wb") as f:
            f.write(content)
        code, said = d.Daemon({"server.pid_file": path}).refused()
        check(code == 2 and f"server.pid_file {path} exists and holds no process id" in said,
              f"{content!r}: {code} {said!r}")
        with open(path, "rb") as f:
            equal(f.read(), content, "it is as it was")
    os.unlink(path)
    os.mkfifo(path)
    code, said = d.Daemon({"server.pid_file": path}).refused()
    check(code == 2 and "holds no process id" in said, f"a FIFO: {code} {said!r}")
    os.unlink(path)
    daemon = d.Daemon({"server.pid_file": path}).start()
    daemon.kill()
    daemon.start()
    with open(path, "rb") as f:
        equal(int(f.read()), daemon.process.pid, "the pid file of one that was killed")
    equal(daemon.stop()[0], 0, "exit code")
    check(not os.path.exists(path), "a stop takes it away")


def small_files_only():
    """RLIMIT_FSIZE: a write beyond it fails with EFBIG, it does not end the process."""
    daemon = d.Daemon()
    daemon.preexec = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, 2 << 20))
    log = open(daemon.log_file, "ab")
    done = subprocess.run(daemon.command(), stdout=log, stderr=subprocess.PIPE, timeout=30,
                          preexec_fn=daemon.preexec, check=False)
    log.close()
    said = done.stderr.decode()
    check(done.returncode == 2 and "File too large" in said, f"{done.returncode}: {said!r}")


def half_open():
    """Connections that say nothing, or nonsense, cost nobody anything."""
    daemon = d.Daemon().start()
    silent = []
    for i in range(100):
        s = socket.create_connection(("127.0.0.1", daemon.port))
        if i % 2:
            s.sendall(b"GET / HTTP/1.1\r\n\r\n")
        silent.append(s)
    check(daemon.client().health.Check(d.health_pb2.HealthCheckRequest(), timeout=5).status == 1,
          "100 silent connections disturb nobody")
    code, seconds = daemon.stop()
    check(code == 0 and seconds < 10, f"nor a stop: {code} in {seconds:.2f} s")
    for s in silent:
        s.close()


def new_callers_while_stopping():
    """Clients that connect during the grace time do not make it longer."""
    daemon = d.Daemon().start()
    port = daemon.port
    alice = session(daemon)
    stream = endless(alice)
    ended = threading.Event()

    def knock():
        while not ended.is_set():
            channel = grpc.insecure_channel(f"127.0.0.1:{port}")
            try:
                channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=0.1)
            except grpc.RpcError:
                pass
            channel.close()
    threads = [threading.Thread(target=knock) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    code, seconds = daemon.stop()
    ended.set()
    for thread in threads:
        thread.join()
    check(code == 0 and seconds < 10, f"stopped in {seconds:.2f} s with callers knocking: {code}")
    check(failure(lambda: list(stream)) is not None, "the stream has ended")


for story in (stop_idle, stop_at_once, stop_busy, stop_slow_reader, second_signal,
              kill_and_restart, second_daemon, health, vanishing_callers, half_open,
              new_callers_while_stopping, nobody_reads_the_log, small_files_only,
              pid_file_of_somebody_else):
    if len(sys.argv) > 1 and story.__name__ not in sys.argv[1:]:
        continue
    start = time.monotonic()
    story()
    print(f"{story.__name__}: {time.monotonic() - start:.1f} s", flush=True)
d.finish()
