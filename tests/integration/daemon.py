"""Starts and stops the real daemon for tests, and counts checks.

Run by Debian's python3, which has grpcio and grpcio-tools.  Paths come from meson
(CACHED_BUILD_ROOT, CACHED_SOURCE_ROOT); CACHED_BIN names another program to try.
"""

import atexit
import fcntl
import hashlib
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time

import grpc

SOURCE = os.environ.get("CACHED_SOURCE_ROOT") or os.path.abspath(
    os.path.join(os.path.dirname(__file__), "../.."))
BUILD = os.environ.get("CACHED_BUILD_ROOT") or os.path.join(SOURCE, "build")
BINARY = os.environ.get("CACHED_BIN") or os.path.join(BUILD, "cached", "cached")
PLANT = os.environ.get("CACHED_PLANT")  # tests/mutation: a bug in the daemon, to be found.
TEST_BINARY = os.environ.get("CACHED_TEST_BIN") or os.path.join(BUILD, "cached", "cached-test")

TOKENS = {
    "alice": ("alice", "harness", "token-of-alice-0123456789abcdef"),
    "bob": ("bob", "harness", "token-of-bob-0123456789abcdef"),
    "ops": ("root", "ops", "token-of-root-0123456789abcdef"),
    "stats": ("watcher", "stats", "token-of-watcher-0123456789abcdef"),
}

_checks = 0
_failures = []


def check(condition, what):
    """Counts; a failed one is printed and remembered, the test goes on."""
    global _checks
    _checks += 1
    if not condition:
        frame = sys._getframe(1)
        while frame.f_code.co_filename == __file__ and frame.f_back is not None:
            frame = frame.f_back
        _failures.append(what)
        print(f"FAILED: {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}: {what}",
              flush=True)
    return bool(condition)


def equal(got, want, what):
    return check(got == want, f"{what}: got {got!r}, want {want!r}")


def finish():
    print(f"{_checks} checks, {len(_failures)} failed")
    if _checks == 0:
        print("no checks ran: a test that checks nothing fails")
    sys.exit(1 if _failures or _checks == 0 else 0)


def skip(why):
    print(f"SKIPPED: {why}")
    sys.exit(77)


# ---- protobuf modules ----

def _generate():
    out = os.path.join(BUILD, "tests", "pyproto")
    os.makedirs(out, exist_ok=True)
    proto = os.path.join(SOURCE, "proto")
    files = [os.path.join(proto, f) for f in (
        "cached/session/v1/session.proto", "cached/admin/v1/admin.proto",
        "cached/transfer/v1/transfer.proto")]
    # These two at top level: as google.rpc and grpc.health they would hide installed packages.
    alone = [os.path.join(proto, f) for f in (
        "google/rpc/status.proto", "grpc/health/v1/health.proto")]
    with open(os.path.join(out, "lock"), "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # Tests run side by side.
        digest = hashlib.sha256()
        for name in files + alone:
            with open(name, "rb") as f:
                digest.update(f.read())
        stamp = os.path.join(out, "stamp")
        if os.path.exists(stamp):
            with open(stamp, encoding="ascii") as f:
                if f.read() == digest.hexdigest():
                    return out
        protoc = [sys.executable, "-m", "grpc_tools.protoc", f"--python_out={out}",
                  f"--grpc_python_out={out}"]
        subprocess.run(protoc + ["-I", proto] + files, check=True)
        for name in alone:
            subprocess.run(protoc + ["-I", os.path.dirname(name), name], check=True)
        with open(stamp, "w", encoding="ascii") as f:
            f.write(digest.hexdigest())
    return out


PROTO = _generate()
sys.path.insert(0, PROTO)
from cached.session.v1 import session_pb2 as pb  # noqa: E402
from cached.session.v1 import session_pb2_grpc as pb_grpc  # noqa: E402
from cached.admin.v1 import admin_pb2 as admin_pb  # noqa: E402
from cached.admin.v1 import admin_pb2_grpc as admin_grpc  # noqa: E402
import health_pb2  # noqa: E402
import health_pb2_grpc  # noqa: E402
import status_pb2  # noqa: E402


def pack(ids):
    return struct.pack(f"<{len(ids)}I", *ids)


def unpack(data):
    return list(struct.unpack(f"<{len(data) // 4}I", data))


class Failure:
    """What a failed call said: status, reason, field, limit, value, retry time."""

    def __init__(self, error):
        self.code = error.code().name
        self.message = error.details()
        self.reason = self.field = self.limit = self.value = None
        self.retry_ms = 0
        self.quota = None  # (subject, description) of a QuotaFailure.
        for key, value in error.trailing_metadata() or ():
            if key == "grpc-status-details-bin":
                self._read(value)

    def _read(self, data):
        status = status_pb2.Status.FromString(data)
        self.status_code = status.code
        for detail in status.details:
            if detail.type_url.endswith("ErrorInfo"):
                info = status_pb2.ErrorInfo.FromString(detail.value)
                self.reason, self.domain = info.reason, info.domain
                pairs = {m.key: m.value for m in info.metadata}
                self.field, self.limit, self.value = (
                    pairs.get("field"), pairs.get("limit"), pairs.get("value"))
            if detail.type_url.endswith("RetryInfo"):
                delay = status_pb2.RetryInfo.FromString(detail.value).retry_delay
                self.retry_ms = delay.seconds * 1000 + delay.nanos // 1000000
            if detail.type_url.endswith("QuotaFailure"):
                violation, = status_pb2.QuotaFailure.FromString(detail.value).violations
                self.quota = violation.subject, violation.description

    def __repr__(self):
        return (f"{self.code} {self.reason} field={self.field} limit={self.limit} "
                f"value={self.value}: {self.message}")


def failure(call, *args, **kwargs):
    """The Failure of a call that must fail; None (and a failed check) if it does not."""
    try:
        answer = call(*args, **kwargs)
        if hasattr(answer, "__next__"):
            for _ in answer:
                pass
    except grpc.RpcError as error:
        return Failure(error)
    check(False, f"the call succeeded: {answer}")
    return None


def expect(call, *args, code, reason, **kwargs):
    """A call must fail with this status and reason."""
    wanted = {k: kwargs.pop(k) for k in ("field", "limit", "value") if k in kwargs}
    got = failure(call, *args, **kwargs)
    if got is None:
        return None
    check(got.code == code and got.reason == reason, f"want {code} {reason}, got {got!r}")
    for name, value in wanted.items():
        check(getattr(got, name) == value, f"want {name}={value!r}, got {got!r}")
    return got


def expect_deadline(call, *args, **kwargs):
    """A call must fail because its time is up; the client or the daemon notices it first."""
    got = failure(call, *args, **kwargs)
    check(got is not None and got.code == "DEADLINE_EXCEEDED" and got.reason in (None, "DEADLINE"),
          f"want DEADLINE_EXCEEDED, got {got!r}")


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def write_tokens(path, tokens=None):
    with open(path, "w", encoding="ascii") as f:
        os.chmod(path, 0o600)
        for user, role, token in (tokens or TOKENS.values()):
            f.write(f"{user} {role} {hashlib.sha256(token.encode()).hexdigest()}\n")


_scratch = []


def scratch():
    path = tempfile.mkdtemp(prefix="cached-it-")
    _scratch.append(path)
    return path


@atexit.register
def _clean():
    for daemon in list(Daemon.running):
        daemon.kill()
    for path in _scratch:
        shutil.rmtree(path, ignore_errors=True)


class Client:
    """Stubs of one user on one channel."""

    def __init__(self, target, token):
        self.channel = grpc.insecure_channel(target, options=[
            ("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1),
            ("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1)])
        if token is not None:
            token = (("authorization", f"Bearer {token}"),)
        self.metadata = token or ()
        self.session = _WithMetadata(pb_grpc.SessionServiceStub(self.channel), self.metadata)
        self.admin = _WithMetadata(admin_grpc.AdminServiceStub(self.channel), self.metadata)
        self.health = health_pb2_grpc.HealthStub(self.channel)

    def raw(self, path, message, stream=False, **kwargs):
        kwargs.setdefault("timeout", 20)
        make = self.channel.unary_stream if stream else self.channel.unary_unary
        call = make(path, request_serializer=lambda b: b, response_deserializer=lambda b: b)
        return call(message, metadata=kwargs.pop("metadata", self.metadata), **kwargs)

    def close(self):
        self.channel.close()


class _WithMetadata:
    def __init__(self, stub, metadata):
        self._stub = stub
        self._metadata = metadata

    def __getattr__(self, name):
        call = getattr(self._stub, name)

        def with_metadata(*args, **kwargs):
            kwargs.setdefault("metadata", self._metadata)
            kwargs.setdefault("timeout", 20)
            return call(*args, **kwargs)
        return with_metadata


class Daemon:
    """One daemon with its own directory.  flags: {"section.key": value}."""

    running = []

    def __init__(self, flags=None, binary=None, directory=None, arguments=(), env=None):
        self.directory = directory or scratch()
        self.binary = binary or (TEST_BINARY if PLANT else BINARY)
        self.state = os.path.join(self.directory, "state")
        self.token_file = os.path.join(self.directory, "tokens")
        self.log_file = os.path.join(self.directory, "log")
        self.socket = os.path.join(self.directory, "socket")
        self.flags = {
            "server.listen": "127.0.0.1:0",
            "server.socket": self.socket,
            "server.token_file": self.token_file,
            "state.dir": self.state,
            "engine.backend": "synthetic",
            "engine.live_sessions": "8",
            "hbm.bytes": "16MiB",
            "pool.bytes": "16MiB",
            "ssd.bytes": "64MiB",
            "ssd.segment_bytes": "8MiB",
            "index.ram": "16MiB",
            # Most tests are about something else; it_quota.py has the default plan.
            "quota.default_sessions": "0",
            "quota.default_turns": "0",
        }
        if os.environ.get("CACHED_TEST_IO"):  # The suite once more, on this I/O backend.
            self.flags["io.backend"] = os.environ["CACHED_TEST_IO"]
        self.flags.update(flags or {})
        self.arguments = list(arguments) or (["--plant", PLANT] if PLANT else [])
        self.env = dict(os.environ, **env) if env else None
        self.preexec = None  # Runs in the child before the program.
        self.process = None
        self.port = 0
        self.clients = []
        if not os.path.exists(self.token_file):
            write_tokens(self.token_file)

    def command(self):
        return [self.binary] + self.arguments + [
            f"--{key}={value}" for key, value in self.flags.items() if value is not None]

    def start(self, timeout=30):
        """Waits until it serves."""
        log = open(self.log_file, "ab")
        offset = log.tell()
        self.process = subprocess.Popen(self.command(), stdout=log, stderr=log, env=self.env,
                                        preexec_fn=self.preexec)
        log.close()
        Daemon.running.append(self)
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            found = re.search(r"event=ready port=(\d+)", self.log_now(offset))
            if found:
                self.port = int(found.group(1))
                return self
            if self.process.poll() is not None:
                break
            time.sleep(0.01)
        raise RuntimeError(f"the daemon did not start: {self.log_now(offset)}")

    def refused(self, timeout=30):
        """Runs a daemon that must refuse to start: (exit code, its standard error)."""
        done = subprocess.run(self.command(), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              timeout=timeout, check=False, env=self.env)
        return done.returncode, done.stderr.decode()

    def log_now(self, offset=0):
        with open(self.log_file, "rb") as f:
            f.seek(offset)
            return f.read().decode(errors="replace")

    def log(self, offset=0):
        """The log, when nothing was added for a moment: a thread of its own writes it, so an answer
        may be here before its line."""
        found = self.log_now(offset)
        for _ in range(30):  # It may never be quiet.
            time.sleep(0.03)
            before, found = found, self.log_now(offset)
            if found == before:
                break
        return found

    def logged(self, text, offset=0, seconds=5):
        """Whether the log has this text, soon."""
        end = time.monotonic() + seconds
        while text not in self.log_now(offset):
            if time.monotonic() > end:
                return False
            time.sleep(0.01)
        return True

    def client(self, user="alice", token=None, target=None):
        if token is None and user is not None:
            token = TOKENS[user][2]
        if target is None:
            target = f"127.0.0.1:{self.port}" if self.port else f"unix:{self.socket}"
        client = Client(target, token)
        self.clients.append(client)
        return client

    def is_up(self):
        return self.process is not None and self.process.poll() is None

    def stop(self, timeout=15):
        """SIGTERM; the exit code, and how long it took."""
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        code = self.wait(timeout)
        return code, time.monotonic() - began

    def wait(self, timeout=15):
        code = self.process.wait(timeout)
        self._forget()
        return code

    def kill(self):
        if self.is_up():
            self.process.kill()
        if self.process is not None:
            self.process.wait()
        self._forget()

    def _forget(self):
        for client in self.clients:
            client.close()
        self.clients = []
        if self in Daemon.running:
            Daemon.running.remove(self)
