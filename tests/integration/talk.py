"""What the tests of conversations share: cases, a daemon on a virtual clock, sessions, checks.

A test file marks its functions with @case and ends with run_cases(); each case has its own daemons
and its own random numbers, drawn from a seed that is printed.
"""

import argparse
import os
import random
import subprocess
import sys
import threading
import time
import traceback

import daemon
import grpc
from daemon import BUILD, Daemon, admin_pb, check, equal, finish, pack, pb, scratch, unpack

MISS, REPLAY, EXACT = pb.OUTCOME_MISS, pb.OUTCOME_REPLAY, pb.OUTCOME_EXACT
WINDOW = 16  # Of the model `tiny`; a page is 128 tokens always.
SPARE = 16
PAGE = 128
VOCAB = 512

MINUTE_MS = 60 * 1000
POOL_TTL_MS = 5 * MINUTE_MS
SSD_TTL_MS = 72 * 60 * MINUTE_MS


def even(position):
    return position & ~1


# ---- Running cases ----

_cases = []
_skipped = []
rng = random.Random()


def case(function):
    if function.__module__ == "__main__":  # Not those of a file that is imported.
        _cases.append(function)
    return function


def run_cases(description):
    """Runs every case, or those named; each has its own daemons and its own random numbers."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seed", type=int, default=None, help="same seed, same inputs")
    parser.add_argument("--list", action="store_true", help="names of the cases")
    parser.add_argument("only", nargs="*", help="run these cases only")
    options = parser.parse_args()
    if options.list:
        print("\n".join(f.__name__ for f in _cases))
        sys.exit(0)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 31)
    print(f"seed {seed}: repeat with --seed {seed}", flush=True)
    for function in _cases:
        if options.only and function.__name__ not in options.only:
            continue
        rng.seed(f"{seed} {function.__name__}")
        _run_case(function)
    if _skipped and not daemon._failures:
        print(f"{daemon._checks} checks, 0 failed")
        daemon.skip("; ".join(_skipped))
    finish()


def skip_case(why):
    """A part that cannot run here; the file exits 77 unless something failed."""
    print(f"skipped: {why}", flush=True)
    _skipped.append(why)


def _run_case(function):
    failures = len(daemon._failures)
    began = time.monotonic()
    Box.made = []
    try:
        function()
    except Exception:  # A case that breaks is a failed check; the others still run.
        traceback.print_exc(file=sys.stdout)
        check(False, f"{function.__name__} did not end")
    for box in Box.made:
        if box.is_up():
            box.kill()
        elif box in Daemon.running:
            check(False, f"{function.__name__}: the daemon died with {box.process.returncode}")
            box.kill()
    broken = len(daemon._failures) - failures
    print(f"{function.__name__}: {'ok' if broken == 0 else f'{broken} FAILED'}, "
          f"{time.monotonic() - began:.1f} s", flush=True)
    if broken:
        for box in Box.made:
            print(f"---- the end of {box.log_file}")
            print("\n".join(box.log().splitlines()[-12:]), flush=True)


# ---- Daemon and conversation ----

_models = []


def model_dir():
    """The weights that the cpu backend loads; made once."""
    if not _models:
        path = os.path.join(scratch(), "model")
        subprocess.run([os.path.join(BUILD, "tools", "mkmodel"), "--config", "tiny", path],
                       check=True, stdout=subprocess.DEVNULL)
        _models.append(path)
    return _models[0]


class Box(Daemon):
    """A daemon on a clock that only moves when asked."""

    made = []

    def __init__(self, backend="cpu", flags=None, **kwargs):
        mine = {"engine.backend": backend, "clock.mode": "virtual"}
        if backend == "cpu":
            mine["engine.model_dir"] = model_dir()
        mine.update(flags or {})
        super().__init__(mine, **kwargs)
        self.operator = None
        Box.made.append(self)

    def start(self, timeout=30):
        super().start(timeout)
        self.operator = self.client("ops").admin
        return self

    def stop(self, timeout=15):
        """A clean stop.  Channels are closed first: an idle one delays the end by seconds."""
        self.hang_up()
        code, seconds = super().stop(timeout)
        equal(code, 0, "exit code of a clean stop")
        return code, seconds

    def restart(self):
        self.stop()
        return self.start()

    def crash(self):
        """kill -9, then a start on what is left."""
        self.kill()
        return self.start()

    def hang_up(self):
        for client in self.clients:
            client.close()
        self.clients = []

    def stats(self):
        return self.operator.GetStats(admin_pb.GetStatsRequest())

    def counter(self, name, labels=""):
        for counter in self.stats().counters:
            if counter.name == name and counter.labels == labels:
                return counter.value
        raise KeyError(f"{name}{{{labels}}}")

    def tier(self, name):
        return next(t for t in self.stats().tiers if t.name == name)

    def advance(self, ms):
        self.operator.AdvanceClock(admin_pb.AdvanceClockRequest(ms=int(ms)))

    def no_wrong_bytes(self, what=""):
        """SYNTHETIC only: the engine compares every byte it is given with what it made."""
        return equal(self.stats().wrong_bytes, 0, f"wrong bytes {what}".strip())

    def segments(self):
        folder = os.path.join(self.state, "ssd")
        return [os.path.join(folder, name) for name in sorted(os.listdir(folder))]


class Answer:
    """What one Decode sent."""

    def __init__(self, stream):
        self.tokens, self.crcs, self.first, self.end = [], [], None, None
        for message in stream:
            if message.tokens:
                if self.first is None:
                    self.first = message.position
                equal(message.position, self.first + len(self.tokens),
                      "position of the next tokens of a stream")
            self.tokens += unpack(message.tokens)
            self.crcs += list(message.logits_crc)
            if message.HasField("end"):
                self.end = message.end

    @property
    def bits(self):
        """Equal only when every logit that was sampled from is equal."""
        return list(zip(self.tokens, self.crcs))


class Talk:
    """One session of one user."""

    def __init__(self, client, name, **fields):
        self.call = client.session
        self.name = name
        self.opened = self.call.OpenSession(pb.OpenSessionRequest(session_id=name, **fields))

    def lookup(self, tokens):
        return self.call.Lookup(pb.LookupRequest(session_id=self.name, tokens=pack(tokens)))

    def prefill(self, tokens, timeout=20, **fields):
        return self.call.Prefill(pb.PrefillRequest(
            session_id=self.name, tokens=pack(tokens), **fields), timeout=timeout)

    def stream(self, count, timeout=20, **fields):
        fields.setdefault("ignore_eos", True)
        if "forced" in fields:
            fields["forced_tokens"] = pack(fields.pop("forced"))
        return self.call.Decode(pb.DecodeRequest(
            session_id=self.name, max_tokens=count, **fields), timeout=timeout)

    def decode(self, count, **fields):
        return Answer(self.stream(count, **fields))

    def close(self):
        """Releases the engine's windows; the next turn restores an image."""
        return self.call.CloseSession(pb.CloseSessionRequest(session_id=self.name))

    def get(self):
        return self.call.GetSession(pb.GetSessionRequest(session_id=self.name))

    def rollback(self, checkpoint, **fields):
        fields.setdefault("keep", True)
        return self.call.Rollback(pb.RollbackRequest(
            session_id=self.name, checkpoint_id=checkpoint, **fields))


def tokens(count):
    """Random ids without those that mean something to the model."""
    return [rng.randrange(3, 500) for _ in range(count)]


def name_of(outcome):
    return pb.Outcome.Name(outcome).replace("OUTCOME_", "")


def resumed(got, outcome, hit, what, replayed=None, reason=None):
    """A LookupResponse or PrefillResponse says this plan."""
    rerun = got.replay_tokens if isinstance(got, pb.LookupResponse) else got.replayed_tokens
    if replayed is None:
        replayed = WINDOW if outcome == REPLAY else 0
    good = equal((name_of(got.outcome), got.hit_tokens, rerun),
                 (name_of(outcome), hit, replayed), f"{what}: (plan, hit, replayed)")
    if reason is not None:
        good = equal(got.reason, reason, f"{what}: reason") and good
    return good


def patiently(call, *args, seconds=20, **kwargs):
    """A client as the README asks for: refused for lack of room, it waits and tries again."""
    end = time.monotonic() + seconds
    while True:
        try:
            return call(*args, **kwargs)
        except grpc.RpcError as error:
            got = daemon.Failure(error)
            if got.code != "RESOURCE_EXHAUSTED" or time.monotonic() > end:
                raise RuntimeError(f"{got!r}") from error
            time.sleep(max(got.retry_ms, 5) / 1000)


def untilfree(call, *args, seconds=5, **kwargs):
    """A call after one that broke: the daemon may still be ending that."""
    end = time.monotonic() + seconds
    while True:
        try:
            return call(*args, **kwargs)
        except grpc.RpcError as error:
            if daemon.Failure(error).reason != "SESSION_BUSY" or time.monotonic() > end:
                raise
            time.sleep(0.01)


def together(count, work):
    """work(i) on `count` threads at once; raises what the first broken one raised."""
    errors = []

    def one(index):
        try:
            work(index)
        except Exception as error:  # Reported on the main thread.
            errors.append(error)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def find_pages(box, ids):
    """Where pages that hold these ids lie: [(path, offset)], by scanning the segment files."""
    page_bytes = box.page_bytes
    wanted = pack(ids)
    found = []
    for path in box.segments():
        with open(path, "rb") as f:
            data = f.read()
        for offset in range(0, len(data) - page_bytes + 1, 4096):
            if data[offset:offset + 8] != b"KVPAGE1\n":
                continue
            if data[offset + 256:offset + 256 + len(wanted)] == wanted:
                found.append((path, offset))
    return found


def overwrite(path, offset, data):
    with open(path, "r+b") as f:
        f.seek(offset)
        f.write(data)
        f.flush()
        os.fsync(f.fileno())


def flip(path, offset):
    with open(path, "rb") as f:
        f.seek(offset)
        byte = f.read(1)[0]
    overwrite(path, offset, bytes([byte ^ (1 << rng.randrange(8))]))


def opened(backend="cpu", flags=None):
    """A daemon, and a session of alice on it."""
    box = Box(backend, flags).start()
    return box, Talk(box.client(), "s")


def positions(checkpoints):
    return [c.position for c in checkpoints]


def positions(checkpoints):
    return [c.position for c in checkpoints]


def name_of_kind(checkpoint):
    names = {v: k.replace("CHECKPOINT_KIND_", "") for k, v in pb.CheckpointKind.items()}
    return names.get(checkpoint.kind, f"kind {checkpoint.kind} is not in the .proto")
