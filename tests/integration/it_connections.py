"""Connections: too many, silent ones, and none because descriptors are lacking.  The daemon goes on
with those it has, says so, and takes new ones as soon as it can."""

import contextlib
import os
import resource
import socket
import stat
import sys
import time

import grpc

import daemon as d
from daemon import admin_pb, check, equal, pb

CASES = []
SERVING, NOT_SERVING = 1, 2


def case(function):
    CASES.append(function)
    return function


def opens(client, name, timeout=5):
    """Whether a call works on this client's connection."""
    try:
        client.session.OpenSession(pb.OpenSessionRequest(session_id=name), timeout=timeout)
        return True
    except grpc.RpcError:
        return False


def works_again(daemon, seconds=10):
    """Whether somebody new is served, soon."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        client = daemon.client()
        if opens(client, "new", timeout=2):
            return True
        client.close()
    return False


def stats(client):
    return client.admin.GetStats(admin_pb.GetStatsRequest())


def counters(client):
    return {c.name + (f"{{{c.labels}}}" if c.labels else ""): c.value
            for c in stats(client).counters}


def health(client):
    return client.health.Check(d.health_pb2.HealthCheckRequest(), timeout=5).status


def until(probe, seconds=5):
    end = time.monotonic() + seconds
    while not probe():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def files_of(daemon):
    return len(os.listdir(f"/proc/{daemon.process.pid}/fd"))


def connect(daemon, seconds=5):
    s = socket.socket(socket.AF_UNIX)
    s.settimeout(seconds)
    s.connect(daemon.socket)
    return s


def is_closed(s, seconds=5):
    """Whether the other side closed it; it never says anything by itself."""
    s.settimeout(seconds)
    try:
        return s.recv(1) == b""
    except socket.timeout:
        return False
    except OSError:
        return True


def start(**kwargs):
    """A daemon that listens on its socket and on a port."""
    return d.Daemon(**kwargs).start()


@case
def no_descriptors():
    """The limit falls to what is in use, connections come, it rises again."""
    daemon = start()
    old, ops = daemon.client(), daemon.client("ops")
    check(opens(old, "old"), "a session before")
    equal(health(ops), SERVING, "health before")
    before = resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE)
    try:
        in_use = files_of(daemon)
        resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, (in_use, before[1]))
        for number in range(3):
            began = time.monotonic()
            check(not opens(daemon.client(), "none", timeout=3), f"connection {number} is refused")
            check(time.monotonic() - began < 2.5, "its client hears of it at once")
        check(opens(old, "old2"), "the old connection is served")
        check(until(lambda: health(ops) == NOT_SERVING), "health says so")
        equal(stats(ops).health, "too few file descriptors: new connections are refused",
              "and why")
        check(daemon.logged("event=connections_stopped"), "so does the log")
        check(counters(ops)['cached_connections_refused_total{cause="descriptors"}'] >= 3,
              "they are counted")
    finally:
        resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, before)
    check(works_again(daemon), "new connections are taken again, by itself")
    check(until(lambda: health(ops) == SERVING), "health is back")
    check(daemon.logged("event=connections_again"), "and the log says so")
    equal(daemon.stop()[0], 0, "exit code")


@case
def limit_below_the_reserve():
    """Not even the descriptor in reserve helps: connections wait in the queue, nothing spins."""
    daemon = start()
    old, ops = daemon.client(), daemon.client("ops")
    check(opens(old, "old"), "a session before")
    equal(health(ops), SERVING, "health before")
    before = resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE)
    try:
        resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, (3, before[1]))
        waiting = connect(daemon)
        waiting.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        check(daemon.logged("event=connections_stopped"), "the log says it")
        began = cpu(daemon)
        time.sleep(1.5)
        check(cpu(daemon) - began < 0.5, "it does not spin")
        check(opens(old, "old2"), "the old connection is served")
    finally:
        resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, before)
    waiting.settimeout(5)
    check(waiting.recv(1) != b"", "who waited is served")
    waiting.close()
    check(works_again(daemon), "new connections are taken again, by itself")
    check(daemon.logged("event=connections_again"), "the log says it is over")
    equal(daemon.stop()[0], 0, "exit code")


def cpu(daemon):
    with open(f"/proc/{daemon.process.pid}/stat", encoding="ascii") as f:
        fields = f.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def flood(daemon, count):
    """Connects so often, without a token; those that are still open."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(connect(daemon)) for _ in range(count)]
        stack.pop_all()
    return sockets


@case
def few_descriptors_many_strangers():
    """LimitNOFILE bounds connections before the kernel does, so the store keeps its files."""
    daemon = d.Daemon()
    daemon.preexec = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (400, 400))
    daemon.start()
    old, ops = daemon.client(), daemon.client("ops")
    check(opens(old, "old"), "a session before")
    equal(health(ops), SERVING, "health before")
    strangers = flood(daemon, 450)
    # 128 descriptors are the daemon's own, and one for each of 8 segments.
    most = 400 - 128 - 8
    check(until(lambda: counters(ops)["cached_connections"] == most), "as many as there may be")
    check(until(lambda: counters(ops)['cached_connections_refused_total{cause="limit"}'] >=
                450 - most), "the others are refused")
    check(files_of(daemon) < 400 - 60, "there are descriptors left")
    answer = old.session.Prefill(pb.PrefillRequest(session_id="old", tokens=d.pack(range(500))))
    equal(answer.save_reason, "", "a save meanwhile")
    check(not opens(daemon.client(), "none", timeout=3), "nobody new is served meanwhile")
    equal(health(ops), SERVING, "that is no matter of health")
    for s in strangers:
        s.close()
    check(works_again(daemon), "new connections are taken again")
    log = daemon.log()
    equal(log.count("event=connections_refused"), 1, "one line for all of them")
    check(f"{most} connections are open" in log, "it names the limit")
    equal(daemon.stop()[0], 0, "exit code")


@case
def a_thousand():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 3000:
        print(f"a_thousand: SKIPPED: the hard limit of open files is {hard}")
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    daemon = start()
    old, ops = daemon.client(), daemon.client("ops")
    check(opens(old, "old"), "a session before")
    equal(health(ops), SERVING, "health before")
    strangers = flood(daemon, 1100)
    check(until(lambda: counters(ops)["cached_connections"] == 1000), "1,000 are open")
    check(is_closed(strangers[-1]), "the last one is closed at once")
    check(not is_closed(strangers[0], 0.2), "the first one is not")
    check(opens(old, "old2"), "the old connection is served")
    for s in strangers:
        s.close()
    check(works_again(daemon), "new connections are taken again")
    check(until(lambda: counters(ops)["cached_connections"] < 10), "those closed are not counted")
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    equal(daemon.stop()[0], 0, "exit code")


@case
def silent():
    """A connection without a byte is closed after 10 s; one that spoke is not, by us."""
    daemon = start()
    ops = daemon.client("ops")
    equal(health(ops), SERVING, "health")
    quiet, hasty = connect(daemon), connect(daemon)
    hasty.close()
    began = time.monotonic()
    check(is_closed(quiet, 15), "it is closed")
    took = time.monotonic() - began
    check(8.5 < took < 13, f"after 10 s: {took:.1f}")
    equal(counters(ops)['cached_connections_refused_total{cause="silent"}'], 1, "it is counted")
    check(daemon.logged("event=connections_silent"), "the log says it")
    rude = connect(daemon)
    rude.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
    rude.settimeout(5)
    data = b"x"
    with contextlib.suppress(OSError):
        while data:
            data = rude.recv(4096)
    check(data == b"", "another protocol is shown the door")
    check(opens(daemon.client(), "after"), "the daemon serves")
    equal(daemon.stop()[0], 0, "exit code")


@case
def socket_file():
    """It is there while the daemon is, and nobody else's is taken away."""
    daemon = start()
    check(stat.S_ISSOCK(os.lstat(daemon.socket).st_mode), "a socket")
    other = d.Daemon({"server.socket": daemon.socket})
    code, said = other.refused()
    check(code == 2 and "another process serves on the socket" in said, f"a second one: {said!r}")
    check(opens(daemon.client(target=f"unix:{daemon.socket}"), "over"), "the first one serves")
    nowhere = os.path.join(other.directory, "none", "socket")
    other.flags["server.socket"] = nowhere
    code, said = other.refused()
    check(code == 2 and f"listen on the socket {nowhere}: No such file or directory" in said,
          f"in a folder that is not there: {said!r}")
    equal(daemon.stop()[0], 0, "exit code")
    check(not os.path.lexists(daemon.socket), "it is gone")

    daemon.start()
    daemon.kill()
    check(os.path.lexists(daemon.socket), "one that is killed leaves it")
    daemon.start()
    check(opens(daemon.client(target=f"unix:{daemon.socket}"), "again"), "the next takes it over")
    os.unlink(daemon.socket)
    with socket.socket(socket.AF_UNIX) as foreign:
        foreign.bind(daemon.socket)
        equal(daemon.stop()[0], 0, "exit code")
        check(os.path.lexists(daemon.socket), "another's file stays")
    os.unlink(daemon.socket)

    with open(daemon.socket, "w", encoding="ascii") as f:
        f.write("mine")
    code, said = daemon.refused()
    check(code == 2 and "is no socket; it is left alone" in said, f"a plain file: {said!r}")
    os.unlink(daemon.socket)


@case
def addresses():
    """localhost is every address it stands for, with one port; a port in use is refused."""
    daemon = d.Daemon({"server.listen": "localhost:0"}).start()
    check(opens(daemon.client(target=f"127.0.0.1:{daemon.port}"), "four"), "127.0.0.1")
    try:
        with socket.socket(socket.AF_INET6) as s:
            s.bind(("::1", 0))
        six = any(a[0] == socket.AF_INET6 for a in socket.getaddrinfo("localhost", 0))
    except OSError:
        six = False
    if six:
        check(opens(daemon.client(target=f"[::1]:{daemon.port}"), "six"), "[::1]")
    code, said = d.Daemon({"server.listen": f"127.0.0.1:{daemon.port}"}).refused()
    check(code == 2 and f"listen on 127.0.0.1:{daemon.port}: Address already in use" in said,
          f"in use: {said!r}")
    # A stop does not wait for who says nothing, nor for who asks nothing.
    quiet = connect(daemon)
    with socket.create_connection(("127.0.0.1", daemon.port)) as spoke:
        spoke.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        code, took = daemon.stop()
    equal(code, 0, "exit code")
    check(took < 5, f"a stop with connections open takes {took:.1f} s")
    check(is_closed(quiet), "the silent one is closed")
    quiet.close()


def main():
    for function in CASES:
        if len(sys.argv) < 2 or function.__name__ in sys.argv[1:]:
            function()
    d.finish()


main()
