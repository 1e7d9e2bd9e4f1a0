"""Faults of the machine and of clients, made on purpose against the real daemon.

Whatever happens: the daemon stays up (or refuses to start in one sentence), other users go on, what
was acknowledged and not hurt is found, and no wrong byte is ever used.  The synthetic engine
compares every byte it is given with what it made of the same tokens.
"""

import os
import random
import signal
import threading
import time

import grpc
from daemon import check, equal, expect, pack, pb
from faults import recovered, well, within_budget
from talk import (
    EXACT, MISS, POOL_TTL_MS, REPLAY, WINDOW, Answer, Box, Talk, case, even, name_of, patiently,
    resumed, rng, run_cases, together, tokens, untilfree)


@case
def killed_at_random_times():
    """kill -9 among prefills, decodes and commits, 20 times: every acknowledged checkpoint is found
    again, nothing is dropped, no wrong byte."""
    box = Box("synthetic", {"hbm.bytes": "4MiB", "ssd.segment_bytes": "1MiB"}).start()
    acknowledged = {}  # session -> [(id, its tokens)]
    history = {}
    lock = threading.Lock()

    def write(client, name, seed):
        random = __import__("random").Random(seed)

        def some(count):
            return [random.randrange(3, 500) for _ in range(count)]

        talk = Talk(client, name)
        mine = history.get(name, [])
        while True:
            long = random.random() < 0.1 and len(mine) < 2000
            mine = mine + some(2000 if long else random.randrange(1, 200))
            got = patiently(talk.prefill, mine)
            with lock:
                for made in got.checkpoints:
                    acknowledged.setdefault(name, []).append((made.id, mine[:made.position]))
                history[name] = mine
            answer = talk.decode(random.randrange(1, 30))
            mine = mine + answer.tokens
            with lock:
                for made in answer.end.checkpoints:
                    acknowledged[name].append((made.id, mine[:made.position]))
                history[name] = mine
            if len(mine) > 3000:
                return

    found = 0
    for cycle in range(20):
        names = [f"cycle{cycle // 2}-{i}" for i in range(4)]  # Two cycles go on with the same ones.
        threads = []
        for name in names:
            def run(name=name, seed=rng.random(), client=box.client()):
                try:
                    write(client, name, seed)
                except (grpc.RpcError, RuntimeError, ValueError):
                    pass  # The daemon was killed, or the channel closed after it.
            threads.append(threading.Thread(target=run))
        for thread in threads:
            thread.start()
        time.sleep(rng.uniform(0.01, 0.15))
        box.process.kill()
        for thread in threads:
            thread.join()
        equal(box.process.wait(), -signal.SIGKILL, "it ran until it was killed")
        box._forget()
        offset = len(box.log())
        box.start()
        total, dropped = recovered(box, offset)
        equal(dropped, 0, f"cycle {cycle}: dropped")
        check(total >= sum(len({i for i, _ in a}) for a in acknowledged.values()),
              f"cycle {cycle}: recovered {total}")
        client = box.client()
        for name in names:
            listed = {c.id: c.position for c in client.session.GetSession(
                pb.GetSessionRequest(session_id=name)).checkpoints} if name in acknowledged else {}
            for checkpoint, prompt in acknowledged.get(name, []):
                check(listed.get(checkpoint) == len(prompt),
                      f"cycle {cycle}: {name} at {len(prompt)} was acknowledged and is listed")
                found += 1
            for checkpoint, prompt in acknowledged.get(name, [])[-3:]:
                got = client.session.Lookup(pb.LookupRequest(
                    session_id=name, tokens=pack(prompt + [2])))
                check(got.stored_tokens >= len(prompt), f"{name}: {got.stored_tokens} of "
                      f"{len(prompt)} that were acknowledged")
            if name in acknowledged and cycle % 2:
                prompt = acknowledged[name][-1][1]
                talk = Talk(client, name)
                got = patiently(talk.prefill, prompt + [2] + tokens(5))
                check(got.hit_tokens >= (even(len(prompt)) if len(prompt) > WINDOW + 1 else 0),
                      f"{name}: hit {got.hit_tokens} of {len(prompt)}")
                equal(got.weakened, 0, f"{name}: weakened")
                talk.close()
        box.no_wrong_bytes(f"in cycle {cycle}")
    check(found >= 100, f"acknowledged checkpoints found: {found}")
    well(box, what="20 kills")
    box.stop()


@case
def stopped_for_five_seconds():
    """SIGSTOP in the middle of work: calls in flight end well, nothing expired."""
    box = Box(flags={"clock.mode": "real"}).start()
    client = box.client()
    prompts = {f"s{i}": tokens(150) for i in range(6)}
    for name, prompt in prompts.items():
        talk = Talk(client, name)
        talk.prefill(prompt)
        talk.close()
    rss = box.stats().rss_bytes
    busy = Talk(client, "busy")
    busy.prefill(tokens(100))
    stream = busy.stream(600, timeout=30)
    next(stream)
    box.process.send_signal(signal.SIGSTOP)
    waiting = client.session._stub.Prefill.future(pb.PrefillRequest(
        session_id="s0", tokens=pack(prompts["s0"] + tokens(9))),
        metadata=client.metadata, timeout=30)
    time.sleep(5)
    check(not waiting.done(), "a call waits for a stopped daemon")
    box.process.send_signal(signal.SIGCONT)
    resumed(waiting.result(), EXACT, 150, "the call that waited")
    equal(Answer(stream).end.tokens, 600, "tokens of the answer in flight")
    for name, prompt in prompts.items():
        if name != "s0":
            resumed(Talk(client, name).lookup(prompt + [5]), EXACT, 150, f"{name} afterwards")
    well(box, rss, "SIGSTOP")
    box.stop()


def open_files(box):
    return len(os.listdir(f"/proc/{box.process.pid}/fd"))


@case
def two_hundred_connections():
    box = Box("synthetic").start()
    prompt = tokens(100)
    first = Talk(box.client(), "s")
    first.prefill(prompt)
    well(box, what="before")
    rss, files = box.stats().rss_bytes, open_files(box)
    clients = [None] * 200

    def connect(i):
        for j in range(i, 200, 8):
            clients[j] = box.client("alice" if j % 2 else "bob")
            talk = Talk(clients[j], f"c{j}")
            resumed(patiently(talk.prefill, [3 + j] * 40), MISS, 0, f"connection {j}")

    together(8, connect)
    check(open_files(box) >= files + 200, f"connections are open: {open_files(box)} files")
    for j in rng.sample(range(200), 20):
        equal(Talk(clients[j], f"c{j}").opened.created, False, f"connection {j} still works")
    resumed(first.prefill(prompt + tokens(5)), EXACT, 100, "the first client")
    within_budget(box, "200 connections open")
    for client in clients:
        client.close()
        box.clients.remove(client)
    end = time.monotonic() + 5
    while open_files(box) > files + 4 and time.monotonic() < end:
        time.sleep(0.02)
    check(open_files(box) <= files + 4, f"files after: {open_files(box)}, before: {files}")
    well(box, rss, "200 connections")
    box.stop()


@case
def slow_reader_disturbs_nobody():
    """A client that does not read its stream for 3 s neither delays its own decoding nor others."""
    box = Box("synthetic").start()
    client = box.client()
    slow, prompt = Talk(client, "slow"), tokens(100)
    slow.prefill(prompt)
    rss = box.stats().rss_bytes
    stream = slow.stream(30000, timeout=60)
    next(stream)
    times = []
    other, history = Talk(box.client("bob"), "other"), tokens(100)
    began = time.monotonic()
    while time.monotonic() - began < 3:
        start = time.monotonic()
        other.prefill(history)
        history += other.decode(5).tokens + tokens(3)
        times.append(time.monotonic() - start)
        time.sleep(0.02)
    times.sort()
    check(len(times) > 50, f"turns of the other session: {len(times)}")
    check(times[len(times) // 2] < 0.05, f"median turn {times[len(times) // 2]:.3f} s")
    check(times[-1] < 1, f"slowest turn {times[-1]:.3f} s")
    got = Answer(stream)
    equal((len(got.tokens) + got.first, got.end.tokens), (100 + 30000, 30000),
          "(last position, tokens) of the slow stream")
    resumed(slow.prefill(prompt + [0]), EXACT, 100, "its session is whole")
    well(box, rss, "slow reader")
    box.stop()


@case
def vanished_client_frees_its_session():
    """A connection that goes away in the middle of a Decode or Prefill ends the call at a step."""
    for call in ("Decode", "Prefill"):
        box = Box(flags={"engine.chunk_tokens": "16"}).start()
        prompt = tokens(200)
        steady = box.client()
        Talk(steady, "s").prefill(prompt)
        rss = box.stats().rss_bytes
        for turn in range(3):
            leaving = box.client()
            talk = Talk(leaving, "s")
            if call == "Decode":
                stream = talk.stream(5000, timeout=60)
                for _ in range(3):
                    next(stream)
            else:
                future = leaving.session._stub.Prefill.future(pb.PrefillRequest(
                    session_id="s", tokens=pack(prompt + tokens(6000))),
                    metadata=leaving.metadata, timeout=60)
                time.sleep(0.1)
                check(not future.done(), "the long prefill runs")
            leaving.close()
            box.clients.remove(leaving)
            began = time.monotonic()
            got = untilfree(Talk(steady, "s").prefill, prompt + [2 + turn] + tokens(9))
            check(time.monotonic() - began < 1, f"{call}: free after "
                  f"{time.monotonic() - began:.2f} s")
            check(got.hit_tokens >= 200, f"{call}: hit {got.hit_tokens}")
        equal(len(Talk(steady, "s").decode(3).tokens), 3, f"{call}: an answer")
        end = time.monotonic() + 2
        while box.stats().requests_inflight > 1 and time.monotonic() < end:
            time.sleep(0.02)
        check(box.stats().requests_inflight <= 1, f"in flight: {box.stats().requests_inflight}")
        well(box, rss, f"vanished in {call}")
        box.stop()


@case
def at_once_as_if_alone():
    """Sessions that run side by side get the logits they get alone."""
    prompts = [tokens(rng.randrange(100, 260)) for _ in range(4)]
    tails = [[tokens(rng.randrange(1, 60)) for _ in range(3)] for _ in prompts]

    def conversation(client, i, out):
        talk = Talk(client, f"s{i}")
        history = list(prompts[i])
        for tail in tails[i]:
            got = patiently(talk.prefill, history)
            answer = patiently(talk.decode, 8)
            out[i].append((name_of(got.outcome), got.hit_tokens, answer.bits))
            history = history + answer.tokens + tail

    box = Box().start()
    alone = [[] for _ in prompts]
    for i in range(len(prompts)):
        conversation(box.client(), i, alone)
    box.stop()
    for flags in ({"engine.chunk_tokens": "16"}, {"engine.live_sessions": "2", "hbm.bytes": "1MiB"}):
        box = Box(flags=flags).start()
        beside = [[] for _ in prompts]
        clients = [box.client("bob" if i % 2 else "alice") for i in range(len(prompts))]
        together(len(prompts), lambda i: conversation(clients[i], i, beside))
        for i in range(len(prompts)):
            equal(beside[i], alone[i], f"session {i} with {flags}: at once against alone")
        well(box, what="at once")
        box.stop()


@case
def waiters_whose_time_is_up_end():
    """A call that waits for another call's save ends at its deadline, and at a stop; nobody hangs."""
    box = Box("synthetic", {"hbm.bytes": "64MiB", "ssd.bytes": "1GiB"}).start()
    client, other = box.client(), box.client("bob")

    def accepted(prompt):
        """The waiter of the round before may still have to notice that it is over."""
        for _ in range(100):
            try:
                return talk.prefill(prompt, level=pb.LEVEL_ACCEPTED)
            except grpc.RpcError as error:
                equal(error.code(), grpc.StatusCode.ABORTED, "busy")
                time.sleep(0.05)
        raise RuntimeError("the session stays busy")

    talk = Talk(client, "s")
    Talk(other, "o").prefill(tokens(50))
    for _ in range(25):
        prompt = tokens(60000)
        accepted(prompt)
        try:
            client.session.Prefill(pb.PrefillRequest(session_id="s", tokens=pack(prompt + [3])),
                                   timeout=0.004)
        except grpc.RpcError as error:
            check(error.code() == grpc.StatusCode.DEADLINE_EXCEEDED, f"it ends as {error.code()}")
        got = other.session.GetSession(pb.GetSessionRequest(session_id="o"), timeout=5)
        equal(got.session.head_position, 50, "another user's call is answered")
    accepted(tokens(60000))
    began = time.time()
    box.stop()
    check(time.time() - began < 10, "and the daemon stops")


@case
def refused_save_keeps_the_mark():
    """REPLAY that SSD has no room for: what follows says approximate, stored or not."""
    box = Box("synthetic", {"ssd.bytes": "1MiB", "ssd.segment_bytes": "256KiB"}).start()
    client = box.client()
    talk = Talk(client, "s")
    base = tokens(700)
    equal(talk.prefill(base).save_reason, "", "stored")
    box.advance(POOL_TTL_MS + 1000)
    prompt = base[:600] + tokens(7000)  # More than the tier holds.
    got = talk.prefill(prompt)
    equal((got.outcome, got.save_reason), (REPLAY, "SSD_FULL"), "a replay that is not stored")
    mark = got.approx_from
    got = talk.prefill(prompt + tokens(10))
    equal((got.outcome, got.approximate, got.approx_from), (EXACT, True, mark), "the next turn")
    box.stop()


@case
def refused_prefill_costs_nothing():
    """A prompt that never fits: the head, its parent id and other live sessions stay; no retry."""
    box = Box("synthetic", {"hbm.bytes": "4MiB"}).start()
    client = box.client()
    other = Talk(client, "other")
    other.prefill(tokens(90))
    talk = Talk(client, "s")
    made = talk.prefill(tokens(300)).checkpoints[-1]
    talk.close()
    expect(talk.prefill, tokens(400000), code="RESOURCE_EXHAUSTED", reason="HBM_FULL")
    equal(talk.get().session.head_position, 300, "the head")
    check(other.get().session.live, "another session keeps its memory")
    got = client.session.Prefill(pb.PrefillRequest(
        session_id="s", tokens=pack([5, 6, 7]), parent_checkpoint_id=made.id))
    equal(got.hit_tokens, 300, "its checkpoint is a parent as before")
    equal(len(talk.decode(3).tokens), 3, "and it decodes")
    box.stop()


@case
def head_that_was_never_saved_refuses_decode():
    """Gone from memory and not stored: Decode says so instead of answering from elsewhere."""
    box = Box(flags={"engine.live_sessions": "1"}).start()
    client = box.client()
    talk = Talk(client, "s")
    base = tokens(200)
    talk.prefill(base)
    talk.prefill(base + tokens(60), no_checkpoint=True)
    Talk(client, "other").prefill(tokens(50))
    expect(lambda: list(talk.stream(3)), code="FAILED_PRECONDITION", reason="HEAD_MOVED")
    talk.prefill(base + tokens(60))
    equal(len(talk.decode(3).tokens), 3, "after the prompt was sent again")
    # The window stands at stable_tokens, the head beyond it: known over a restart, too.
    stable = Talk(client, "stable")
    stable.prefill(base, stable_tokens=150)
    box.crash()
    stable = Talk(box.client(), "stable")
    expect(lambda: list(stable.stream(3)), code="FAILED_PRECONDITION", reason="HEAD_MOVED")
    got = stable.prefill(base)
    equal(got.hit_tokens, 150, "what was stored is used")
    equal(len(stable.decode(3).tokens), 3, "and it goes on")
    box.stop()


if __name__ == "__main__":
    run_cases("Faults of the machine and of clients.")
