"""Checkpoint beside what runs: at the next step of a Decode, behind a Prefill, one at a time."""

import time

import daemon
from daemon import check, equal, expect, pack, pb
from talk import (
    EXACT, Answer, Box, Talk, case, opened, positions, resumed, run_cases, together, tokens)


def take(talk, **fields):
    return talk.call.Checkpoint(pb.CheckpointRequest(session_id=talk.name, **fields)).checkpoint


def begun(stream, count):
    """The first tokens of a stream that goes on."""
    got = []
    for message in stream:
        got += list(zip(daemon.unpack(message.tokens), message.logits_crc))
        if len(got) >= count:
            return got
    check(False, "the stream ended")
    return got


@case
def taken_at_a_step():
    """It answers the position it was taken at; decoding goes on with the same bits; what it holds is
    what a session holds that was stopped there; and it is durable when it says so."""
    box, talk = opened()
    prompt = tokens(200)
    alone = Talk(box.client(), "alone")
    alone.prefill(prompt)
    want = alone.decode(1200)
    talk.prefill(prompt)
    stream = talk.stream(1200)
    got = begun(stream, 5)
    made = [take(talk, level=pb.LEVEL_SSD) for _ in range(4)]
    got += Answer(stream).bits
    equal(got, want.bits, "tokens and logits of the whole answer")
    for checkpoint in made:
        check(200 <= checkpoint.position < 1400, f"taken at {checkpoint.position}")
        equal((checkpoint.kind, checkpoint.rows_level, checkpoint.window_level),
              (pb.CHECKPOINT_KIND_MANUAL, pb.LEVEL_SSD, pb.LEVEL_RAM), "kind and levels")
    equal(sorted(positions(made)), positions(made), "later ones stand later")
    check(made[-1].position > made[0].position, "decoding went on between them")
    listed = talk.get().checkpoints
    equal(positions(listed), sorted({200, 1399} | set(positions(made))), "checkpoints of the session")
    # The same position, reached and stored by a session of its own.
    middle = made[1]
    stopped = Talk(box.client(), "stopped")
    stopped.prefill(prompt)
    stopped.decode(middle.position - 200 + 1, no_checkpoint=True)
    equal((take(stopped).position, take(stopped).id), (middle.position, middle.id), "content")
    for way in ("window", "rows"):
        back = Talk(box.client(), "s")
        back.rollback(middle.id)
        history = prompt + want.tokens[:middle.position - 200]
        if way == "window":
            answer = back.decode(20)
            equal(answer.tokens, want.tokens[middle.position - 200 + 1:][:20], "decoded from it")
            equal(answer.crcs, want.crcs[middle.position - 200 + 1:][:20], "the same bits")
            back.rollback(made[0].id)
        else:
            box.crash()
            back = Talk(box.client(), "s")
            equal(back.lookup(history + tokens(9)).hit_tokens // 2, middle.position // 2,
                  "rows of it after kill -9")
    box.stop()


@case
def pages_are_whole():
    """Taken often while pages fill: no row of it is ever another one's.  SYNTHETIC compares each."""
    box, talk = opened("synthetic")
    talk.prefill(tokens(100))
    for _ in range(3):
        stream = talk.stream(30000)
        begun(stream, 5)
        for _ in range(25):
            take(talk, level=pb.LEVEL_SSD)
        Answer(stream)
        talk.close()
        back = talk.get().checkpoints
        for checkpoint in back[1::5]:
            talk.rollback(checkpoint.id)
            talk.decode(3, no_checkpoint=True)
        talk.rollback(back[0].id)
        box.no_wrong_bytes("in checkpoints beside a Decode")
    box.restart()
    talk = Talk(box.client(), "s")
    for checkpoint in talk.get().checkpoints[1::9]:
        talk.rollback(checkpoint.id)
        talk.decode(3, no_checkpoint=True)
    box.no_wrong_bytes("after a restart")
    box.stop()


@case
def many_at_once():
    """Each gets a position of its own time; none is refused."""
    box, talk = opened("synthetic")
    talk.prefill(tokens(200))
    stream = talk.stream(30000)
    begun(stream, 5)
    made = [None] * 12
    talks = [Talk(box.client(), "s") for _ in made]

    def one(i):
        made[i] = take(talks[i], level=pb.LEVEL_SSD)

    together(len(made), one)
    check(all(c.position >= 200 and c.rows_level == pb.LEVEL_SSD for c in made), f"{made}")
    equal(len(Answer(stream).tokens) > 20000, True, "decoding went on")
    listed = {c.id for c in talk.get().checkpoints}
    check(all(c.id in listed for c in made), "all are listed")
    box.no_wrong_bytes()
    box.stop()


@case
def behind_a_prefill():
    """A Prefill stands nowhere until its end: there it waits, and takes the end."""
    box, talk = opened(flags={"engine.chunk_tokens": "16"})
    prompt = tokens(3000)
    first = talk.call._stub.Prefill.future(pb.PrefillRequest(
        session_id="s", tokens=pack(prompt), no_checkpoint=True), metadata=talk.call._metadata,
        timeout=30)
    end = time.monotonic() + 10
    while box.counter("cached_engine_prefill_tokens_total") < 64 and time.monotonic() < end:
        time.sleep(0.005)
    made = take(talk)
    check(first.done() or first.result() is not None, "the prefill ended first")
    equal(made.position, 3000, "taken at its end")
    equal(positions(talk.get().checkpoints), [3000], "and listed")
    # Its own deadline holds meanwhile, and so does its caller's leave.
    again = talk.call._stub.Prefill.future(pb.PrefillRequest(
        session_id="s", tokens=pack(prompt + tokens(4000))), metadata=talk.call._metadata,
        timeout=30)
    daemon.expect_deadline(talk.call.Checkpoint, pb.CheckpointRequest(session_id="s"), timeout=0.3)
    again.cancel()
    box.stop()


@case
def of_an_empty_head():
    box, talk = opened("synthetic")
    expect(talk.call.Checkpoint, pb.CheckpointRequest(session_id="s"), code="FAILED_PRECONDITION",
           reason="HEAD_EMPTY")
    box.stop()


@case
def beside_a_close():
    """CloseSession ends the Decode; a Checkpoint that came with it answers what is stored then."""
    for _ in range(5):
        box, talk = opened("synthetic")
        talk.prefill(tokens(200))
        stream = talk.stream(60000)
        begun(stream, 5)
        results = {}

        def one(i):
            if i == 0:
                results["close"] = talk.close().was_live
            else:
                results[i] = take(Talk(box.client(), "s")).position

        together(4, one)
        check(all(results[i] >= 200 for i in (1, 2, 3)), f"{results}")
        stream.cancel()
        box.no_wrong_bytes()
        resumed(talk.prefill(tokens(20)), pb.OUTCOME_MISS, 0, "the session is usable")
        box.stop()


if __name__ == "__main__":
    run_cases("Checkpoint beside other calls, through the real daemon.")
