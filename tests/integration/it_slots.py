"""Live slots (engine.live_sessions) shared between users: who waits, who is next, who is refused.

However much one user sends, another is served within a counted number of its turns.  A call that
waits can be cancelled, run out of time or lose its client; its place is free again, and nothing of
it stays.
"""

import threading
import time

import grpc

import daemon
from daemon import check, equal, expect, expect_deadline, pack, pb
from talk import Box, Talk, case, run_cases, tokens, untilfree

PER_USER, IN_ALL = 32, 128  # KV_LIVE_WAITING_PER_USER_MAX, KV_LIVE_WAITING_MAX
# A Decode of 65,536 tokens keeps its slot longer than a case takes.
HELD = {"engine.draft": "off", "hbm.bytes": "64MiB", "pool.bytes": "64MiB"}
ONE = dict(HELD, **{"engine.live_sessions": "1"})


def value(box, name):
    return box.counter(f"cached_{name}")


def until(condition, what, seconds=10):
    """Without it the rest of a case means nothing."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise RuntimeError(f"not within {seconds} s: {what}")
        time.sleep(0.01)


def waiting(box, count, what):
    until(lambda: value(box, "live_waiting") == count, f"{what}: {count} calls wait")


def nothing_left(box, what):
    """Nobody waits, no slot is held, and nothing but the question itself is in flight."""
    waiting(box, 0, what)
    until(lambda: value(box, "live_in_use") == 0, f"{what}: slots in use")
    until(lambda: box.stats().requests_inflight <= 1, f"{what}: requests in flight")
    check(box.is_up(), f"{what}: the daemon is up")


def later(client, name, prompt, timeout=60, **fields):
    """A Prefill under way; who forgets it cancels it."""
    return client.session._stub.Prefill.future(
        pb.PrefillRequest(session_id=name, tokens=pack(prompt), **fields),
        metadata=client.metadata, timeout=timeout)


def sessions(client, names):
    for name in names:
        client.session.OpenSession(pb.OpenSessionRequest(session_id=name))


def holding(client, name):
    """A Decode that keeps its slot until it is cancelled, or the result of this is forgotten."""
    talk = Talk(client, name)
    untilfree(talk.prefill, tokens(20), no_checkpoint=True)
    stream = talk.stream(65536, timeout=120, no_checkpoint=True)
    next(stream)
    return stream


def ended(call):
    """"ok", or why it failed."""
    try:
        call.result()
        return "ok"
    except grpc.FutureCancelledError:
        return "cancelled here"
    except grpc.RpcError as error:
        return daemon.Failure(error).reason


# ---- fairness ----

class Hammer:
    """A user whose sessions send turn after turn and look at no retry time."""

    def __init__(self, box, count, prompt):
        self.turns, self.refused, self.over, self.prompt = 0, 0, False, prompt
        self.lock = threading.Lock()
        self.threads = []
        for number in range(count):
            talk = Talk(box.client("alice"), f"hammer{number}")
            self.threads.append(threading.Thread(target=self.run, args=(talk, number)))
        for thread in self.threads:
            thread.start()

    def run(self, talk, number):
        turn = 0
        while not self.over:
            turn += 1
            try:
                talk.prefill([3 + number, 3 + turn % 400] + self.prompt, timeout=60,
                             no_checkpoint=True)
                with self.lock:
                    self.turns += 1
            except grpc.RpcError:
                with self.lock:
                    self.refused += 1

    def stop(self):
        self.over = True
        for thread in self.threads:
            thread.join()


@case
def one_user_who_hammers_keeps_nobody_out():
    """12 sessions of alice on 4 slots, turn after turn; bob has one session and obeys retry times.
    Between a call of bob's and its answer, alice ends as many turns as there are slots, and as many
    again while bob's is computed; each of her threads may count one more late."""
    slots, count, turns = 4, 12, 12
    box = Box("cpu", {"engine.live_sessions": str(slots), "hbm.bytes": "64MiB"}).start()
    hammer = Hammer(box, count, tokens(300))
    until(lambda: hammer.turns >= count, "alice is at work")
    bob = Talk(box.client("bob"), "quiet")
    history, seen, refused = tokens(100), [], 0
    for _ in range(turns):
        before = hammer.turns
        end = time.monotonic() + 6
        while True:
            try:
                bob.prefill(history, timeout=60)
                break
            except grpc.RpcError as error:
                got = daemon.Failure(error)
                refused += 1
                if got.retry_ms == 0 or time.monotonic() > end:
                    check(False, f"bob was never served: {got!r}")
                    break
                time.sleep(got.retry_ms / 1000)
        seen.append(hammer.turns - before)
        history = history + tokens(20)
    hammer.stop()
    print(f"alice: {hammer.turns} turns, {hammer.refused} refused; her turns during each of bob's: "
          f"{seen}")
    equal(refused, 0, "refusals of bob, who never has two calls")
    check(max(seen) <= count + 2 * slots, f"turns of alice during one of bob's: {seen}")
    check(hammer.turns > turns, "alice was served as well")
    nothing_left(box, "after the hammering")
    box.stop()


@case
def a_free_slot_goes_to_who_has_fewest():
    """2 slots, alice runs on both and has ten calls waiting; whoever came later and has none is next,
    every time."""
    box = Box("cpu", dict(HELD, **{"engine.live_sessions": "2"})).start()
    alice, bob, carol = box.client("alice"), box.client("bob"), box.client("bob")
    held = [holding(alice, f"held{i}") for i in range(2)]
    sessions(alice, [f"a{i}" for i in range(10)])
    calls = [later(alice, f"a{i}", tokens(40)) for i in range(10)]
    waiting(box, 10, "alice's ten")
    sessions(bob, ["b0", "b1"])
    # Two of bob's, on two connections: one user is one user.
    first = later(bob, "b0", tokens(40))
    waiting(box, 11, "bob's first")
    second = later(carol, "b1", tokens(40))
    waiting(box, 12, "bob's second")
    # A slot is free; then bob's call ends and has none again, but alice, who holds one, waits on.
    held[0].cancel()
    equal(ended(first), "ok", "bob's first")
    equal(ended(second), "ok", "bob's second")
    for call in calls:
        equal(ended(call), "ok", "a call of alice's, on the slot that is left")
    check(not held[1].done(), "what ran all the time goes on")
    held[1].cancel()
    equal(value(box, "live_waits_total"), 12, "calls that waited")
    nothing_left(box, "fewest first")
    box.stop()


# ---- leaving the queue ----

@case
def who_leaves_frees_the_place():
    """Cancelled, out of time, closed, gone: at once out of the queue, and the session is free."""
    box = Box("cpu", ONE).start()
    alice, bob = box.client("alice"), box.client("bob")
    held = holding(alice, "held")
    talk = Talk(bob, "s")

    call = later(bob, "s", tokens(40))
    waiting(box, 1, "one call")
    expect(talk.prefill, tokens(40), code="ABORTED", reason="SESSION_BUSY")
    expect(talk.rollback, b"0" * 16, code="ABORTED", reason="SESSION_BUSY")
    equal(talk.lookup(tokens(40)).hit_tokens, 0, "Lookup runs beside it")
    call.cancel()
    waiting(box, 0, "cancelled")

    began = time.monotonic()
    expect_deadline(untilfree, talk.prefill, tokens(40), timeout=0.3)
    check(time.monotonic() - began < 3, "it did not wait longer than its deadline")
    waiting(box, 0, "out of time")

    call = later(bob, "s", tokens(40))
    waiting(box, 1, "one call")
    talk.close()
    equal(ended(call), "CANCELLED", "a waiting call of a session that is closed")
    waiting(box, 0, "closed")

    leaving = box.client("bob")
    call = later(leaving, "s", tokens(40))
    waiting(box, 1, "one call of a client")
    leaving.close()
    box.clients.remove(leaving)
    waiting(box, 0, "its client is gone")

    call = later(bob, "s", tokens(40))
    waiting(box, 1, "who stays")
    time.sleep(0.1)
    check(not call.done(), "it waits while the slot is in use")
    held.cancel()
    equal(ended(call), "ok", "who stays is served")
    check(call.result().times.queue_ms >= 100, f"the wait shows: {call.result().times.queue_ms} ms")
    by_name = {l.name: l for l in box.stats().latencies}
    equal(by_name["stage_live_queue"].count, 5, "waits counted")
    check(by_name["stage_live_queue"].max_ms >= 100, "the wait for a slot")
    check(by_name["stage_queue"].max_ms >= 100, "the queue of all stages has it too")
    nothing_left(box, "left")
    box.stop()


@case
def decode_and_parent_wait_too():
    """A Decode from a stored head and a Prefill by parent id wait like a whole prompt, and go on with
    what is stored."""
    box = Box("cpu", ONE).start()
    alice, bob = box.client("alice"), box.client("bob")
    prompt = tokens(300)
    talk, other = Talk(bob, "s"), Talk(bob, "t")
    talk.prefill(prompt)
    want = talk.decode(5)
    talk.rollback(talk.prefill(prompt).checkpoints[-1].id)
    parent = other.prefill(prompt).checkpoints[-1].id
    held = holding(alice, "held")
    stream = talk.stream(5, timeout=60)
    call = later(bob, "t", tokens(30), parent_checkpoint_id=parent)
    waiting(box, 2, "a Decode and a Prefill")
    held.cancel()
    got = daemon_answer(stream)
    equal(got, want.tokens, "tokens of the Decode that waited")
    equal(ended(call), "ok", "the Prefill by parent")
    check(call.result().hit_tokens >= 300 - 1, f"hit: {call.result().hit_tokens}")
    nothing_left(box, "decode and parent")
    box.stop()


def daemon_answer(stream):
    return [token for message in stream for token in daemon.unpack(message.tokens)]


@case
def stopping_answers_who_waits():
    box = Box("cpu", ONE).start()
    alice, bob = box.client("alice"), box.client("bob")
    held = holding(alice, "held")
    sessions(bob, ["s0", "s1", "s2"])
    calls = [later(bob, f"s{i}", tokens(40)) for i in range(3)]
    waiting(box, 3, "three calls")
    began = time.monotonic()
    box.process.terminate()
    for call in calls:
        equal(ended(call), "SHUTTING_DOWN", "a waiting call at a stop")
    expect(lambda: list(held), code="UNAVAILABLE", reason="SHUTTING_DOWN")
    box.hang_up()
    equal(box.wait(), 0, "exit code")
    check(time.monotonic() - began < 5, "a stop does not wait for the queue")


# ---- limits ----

@case
def a_full_queue_says_so_and_is_shared():
    """One user may have 32 waiting; four fill the queue; a fifth still gets its share of it."""
    users = [(f"user{i}", "harness", f"token-of-user{i}-0123456789abcdef") for i in range(5)]
    box = Box("cpu", ONE)
    daemon.write_tokens(box.token_file, list(daemon.TOKENS.values()) + users)
    box.start()
    held = holding(box.client("alice"), "held")
    clients = [box.client(token=token) for _, _, token in users]
    calls = []
    for i, client in enumerate(clients[:4]):
        sessions(client, [f"s{k}" for k in range(PER_USER + 1)])
        calls += [later(client, f"s{k}", tokens(10), no_checkpoint=True) for k in range(PER_USER)]
        waiting(box, PER_USER * (i + 1), f"user {i}")
        got = expect(client.session.Prefill,
                     pb.PrefillRequest(session_id=f"s{PER_USER}", tokens=pack(tokens(10))),
                     code="RESOURCE_EXHAUSTED", reason="QUEUE_FULL", limit=str(PER_USER),
                     field="calls of one user waiting for a live session", value=str(PER_USER))
        check(got is not None and got.retry_ms > 0, f"a retry time: {got!r}")
    equal(len(calls), IN_ALL, "the queue is full")

    late = clients[4]
    sessions(late, [f"s{k}" for k in range(PER_USER)])
    mine = [later(late, f"s{k}", tokens(10), no_checkpoint=True) for k in range(PER_USER)]
    refused = len(users[:4]) + PER_USER
    until(lambda: value(box, "live_refused_total") == refused, "somebody has to leave for each")
    waiting(box, IN_ALL, "it stays full")
    until(lambda: sum(c.done() for c in calls + mine) == PER_USER, "the answers of those")
    failures = [daemon.Failure(c.exception()) for c in calls + mine if c.done()]
    check(all((f.code, f.reason, f.field, f.limit) == (
        "RESOURCE_EXHAUSTED", "QUEUE_FULL", "calls waiting for a live session", str(IN_ALL)) and
        f.retry_ms > 0 for f in failures), f"they say why: {failures[:1]}")
    entered = sum(not c.done() for c in mine)
    check(IN_ALL // 5 - 1 <= entered <= IN_ALL // 5 + 1, f"a fifth of the queue: {entered}")

    held.cancel()
    results = [ended(c) for c in calls + mine]
    equal(results.count("ok"), IN_ALL, "all who waited are served")
    equal(results.count("QUEUE_FULL"), PER_USER, "the others were refused")
    nothing_left(box, "after a full queue")
    equal(ended(later(late, "s0", tokens(10))), "ok", "and it goes on")
    box.stop()


if __name__ == "__main__":
    run_cases(__doc__)
