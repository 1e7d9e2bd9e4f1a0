"""request_id: a call that is made again joins the first one or gets its answer, and only that."""

import time

import daemon
import grpc
from daemon import check, equal, expect, pack, pb
from talk import (
    EXACT, MISS, MINUTE_MS, Answer, Talk, case, opened, positions, resumed, run_cases, tokens)

LONG = {"engine.chunk_tokens": "16"}
KEPT = 64  # KV_ANSWERS_PER_SESSION_MAX


def plain(message):
    """An answer without what every answer has of its own: times, and what grows older."""
    copy = type(message)()
    copy.CopyFrom(message)
    if "times" in copy.DESCRIPTOR.fields_by_name:
        copy.ClearField("times")
    listed = list(getattr(copy, "checkpoints", []))
    if "checkpoint" in copy.DESCRIPTOR.fields_by_name:
        listed.append(copy.checkpoint)
    for checkpoint in listed:
        for name in ("rows_expire_ms", "window_expire_ms", "age_ms"):
            checkpoint.ClearField(name)
    return copy


def said(answer):
    return answer.first, answer.tokens, plain(answer.end)


def repeated(box, how):
    return box.counter("cached_repeated_calls_total", f'how="{how}"')


def until(condition, what, seconds=10):
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return check(False, what)
        time.sleep(0.005)
    return True


@case
def answers_are_kept():
    """Each call of a session once more, with its id: its answer, and nothing else happened."""
    box, talk = opened()
    prompt = tokens(200)
    call = talk.call
    fields = {"session_id": "new", "request_id": "open"}
    made = call.OpenSession(pb.OpenSessionRequest(**fields))
    check(made.created, "opened")
    equal(call.OpenSession(pb.OpenSessionRequest(**fields)), made, "OpenSession again")
    first = talk.prefill(prompt, request_id="turn-1")
    resumed(first, MISS, 0, "the first prefill")
    again = talk.prefill(prompt, request_id="turn-1")
    equal(plain(again), plain(first), "Prefill again")
    equal(talk.prefill(prompt).hit_tokens, 198, "without an id it is another call")
    answer = talk.decode(6, request_id="answer-1", forced=[5, 6, 7, 8, 9, 10])
    once_more = talk.decode(6, request_id="answer-1", forced=[5, 6, 7, 8, 9, 10])
    equal(said(once_more), said(answer), "Decode again")
    check(any(answer.crcs) and not any(once_more.crcs), "tokens sent again have no logits")
    equal(talk.get().session.head_position, 205, "the head was moved once")
    saved = call.Checkpoint(pb.CheckpointRequest(session_id="s", request_id="c"))
    equal(plain(call.Checkpoint(pb.CheckpointRequest(session_id="s", request_id="c"))),
          plain(saved), "Checkpoint again")
    back = talk.rollback(first.checkpoints[0].id, request_id="back", epoch=1)
    equal(back.epoch, 2, "the rollback raised the epoch")
    forward = talk.rollback(answer.end.checkpoints[0].id)
    equal((forward.epoch, forward.head_position), (3, 205), "and forward")
    equal(talk.rollback(first.checkpoints[0].id, request_id="back", epoch=1), back,
          "Rollback again, with the epoch it had")
    equal(talk.get().session.head_position, 205, "and the head did not move")
    gone = call.DeleteSession(pb.DeleteSessionRequest(session_id="s", request_id="gone"))
    check(gone.deleted and gone.bytes > 0, f"deleted: {gone}")
    equal(call.DeleteSession(pb.DeleteSessionRequest(session_id="s", request_id="gone")), gone,
          "DeleteSession again: the same receipt")
    equal(repeated(box, "answer"), 6, "answers that were sent again")
    box.stop()


@case
def another_call_with_the_id_is_refused():
    """Every field counts, and the refusal names the first one that differs."""
    box, talk = opened()
    call = talk.call
    prompt = tokens(200)
    first = talk.prefill(prompt, request_id="p", anchors=[100]).checkpoints[-1]
    talk.decode(4, request_id="d", forced=[5, 6, 7], stop_tokens=[9])
    call.OpenSession(pb.OpenSessionRequest(session_id="o", request_id="o"))
    call.Checkpoint(pb.CheckpointRequest(session_id="s", request_id="c"))
    talk.rollback(first.id, request_id="r")
    base = {
        "OpenSession": dict(session_id="o", request_id="o"),
        "Prefill": dict(session_id="s", request_id="p", tokens=pack(prompt), anchors=[100]),
        "Decode": dict(session_id="s", request_id="d", max_tokens=4, stop_tokens=[9],
                       ignore_eos=True, forced_tokens=pack([5, 6, 7])),
        "Checkpoint": dict(session_id="s", request_id="c"),
        "Rollback": dict(session_id="s", request_id="r", checkpoint_id=first.id, keep=True),
    }
    other = {
        "OpenSession": dict(kind=pb.SESSION_KIND_EPHEMERAL, ttl_ms=1000),
        "Prefill": dict(tokens=pack(prompt[:-1]), parent_checkpoint_id=first.id, stable_tokens=50,
                        anchors=[101], no_checkpoint=True, level=pb.LEVEL_RAM, exact=True, epoch=7),
        "Decode": dict(max_tokens=5, temperature=0.5, top_p=0.5, top_k=3, seed=4, ignore_eos=False,
                       forced_tokens=pack([5, 6, 8]), stop_tokens=[9, 10], no_checkpoint=True,
                       level=pb.LEVEL_RAM, epoch=7, from_position=201),
        "Checkpoint": dict(kind=pb.CHECKPOINT_KIND_ANCHOR, level=pb.LEVEL_RAM, epoch=7),
        "Rollback": dict(checkpoint_id=bytes(16), keep=False, epoch=7),
    }
    messages = {"OpenSession": pb.OpenSessionRequest, "Prefill": pb.PrefillRequest,
                "Decode": pb.DecodeRequest, "Checkpoint": pb.CheckpointRequest,
                "Rollback": pb.RollbackRequest}
    for method, fields in base.items():
        names = {f.name for f in messages[method].DESCRIPTOR.fields}
        # What stands beside a parent or an id is refused before it is compared.
        missing = names - set(other[method]) - {"session_id", "request_id", "parent_session_id",
                                                "position", "digest"}
        equal(missing, set(), f"{method}: fields this test does not change")
        for name, value in other[method].items():
            request = messages[method](**dict(fields, **{name: value}))
            got = expect(getattr(call, method), request, code="ALREADY_EXISTS",
                         reason="REQUEST_ID_REUSED", field=name)
            if got is not None and name in ("ttl_ms", "max_tokens", "epoch"):
                equal(got.value, str(value), f"{method}.{name}: value")
    equal(expect(talk.prefill, prompt, request_id="d", code="ALREADY_EXISTS",
                 reason="REQUEST_ID_REUSED", field="method").limit, None, "another method")
    resumed(Talk(box.client(), "other").prefill(prompt, request_id="p"), MISS, 0,
            "ids are of one session")
    resumed(Talk(box.client("bob"), "s").prefill(prompt, request_id="p"), MISS, 0, "of one user")
    box.stop()


@case
def a_running_prefill_is_joined():
    """The second call waits for the first one's answer; what was computed was computed once.  When
    the first caller leaves, the second one still gets it."""
    for leaves in (False, True):
        box, talk = opened(flags=LONG)
        prompt = tokens(3000)
        request = pb.PrefillRequest(session_id="s", tokens=pack(prompt), request_id="turn")
        first = box.client()
        future = first.session._stub.Prefill.future(request, metadata=first.metadata, timeout=30)
        until(lambda: box.counter("cached_engine_prefill_tokens_total") >= 64, "it did not begin")
        second = talk.call._stub.Prefill.future(request, metadata=talk.call._metadata, timeout=30)
        until(lambda: repeated(box, "joined") == 1, "it did not join")
        if leaves:
            first.close()
        else:
            equal(plain(future.result()), plain(second.result()), "both answers")
        resumed(second.result(), MISS, 0, "the answer of the one that joined")
        equal(second.result().computed_tokens, 3000, "computed tokens of the answer")
        equal(box.counter("cached_engine_prefill_tokens_total"), 3000, "tokens computed in all")
        equal(plain(talk.prefill(prompt, request_id="turn")), plain(second.result()), "and kept")
        box.stop()


@case
def a_running_decode_is_joined():
    """Both streams bring every token and the same end; the one that is not read delays nobody."""
    for leaves in (False, True):
        box, talk = opened()
        prompt = tokens(200)
        reference = Talk(box.client("bob"), "whole")
        reference.prefill(prompt)
        want = reference.decode(700)
        talk.prefill(prompt)
        first_client = box.client()
        first = Talk(first_client, "s").stream(700, request_id="a")
        next(first)
        lazy = talk.stream(700, request_id="a")  # Not read until the others are through.
        second = talk.stream(700, request_id="a")
        until(lambda: repeated(box, "joined") == 2, "they did not join")
        if leaves:
            first_client.close()
        got = Answer(second)
        equal((got.first, got.tokens), (200, want.tokens), "tokens of the one that joined")
        equal(plain(got.end).head_position, want.end.head_position, "its end")
        if not leaves:
            rest = [t for m in first for t in daemon.unpack(m.tokens)]
            equal(rest, want.tokens[len(want.tokens) - len(rest):], "the rest of the first stream")
        equal(said(Answer(lazy)), said(got), "the stream that was read late")
        equal(said(talk.decode(700, request_id="a")), said(got), "and kept")
        equal(box.counter("cached_decoded_tokens_total"), 1400, "tokens generated in all")
        box.stop()


@case
def a_cut_stream_goes_on():
    """The caller of a Decode leaves: with its id the tokens come again and the rest is made, as if
    it had been one call.  With from_position, too."""
    for fields in ({}, {"from_position": 150}, {"forced": [3 + i % 400 for i in range(900)]},
                   {"temperature": 0.9, "seed": 11}):
        box, talk = opened()
        prompt = tokens(200)
        reference = Talk(box.client(), "whole")
        reference.prefill(prompt)
        want = reference.decode(900, **fields)
        talk.prefill(prompt)
        stream = talk.stream(900, request_id="a", **fields)
        for _ in range(3):
            next(stream)
        stream.cancel()
        until(lambda: talk.get().session.head_position > 200, "no token was accepted")
        answer = None
        end = time.monotonic() + 10
        while answer is None and time.monotonic() < end:
            try:
                answer = talk.decode(900, request_id="a", **fields)
            except grpc.RpcError as error:
                equal(daemon.Failure(error).reason, "SESSION_BUSY", "refused meanwhile")
        equal((answer.first, answer.tokens), (want.first, want.tokens), "all tokens")
        equal(plain(answer.end), plain(want.end), "the end")
        equal(repeated(box, "continued") + repeated(box, "joined") >= 1, True, "it went on")
        equal([c.id for c in talk.get().checkpoints], [c.id for c in reference.get().checkpoints],
              "the same checkpoints as of one call")
        box.stop()


@case
def a_cut_stream_whose_head_moved():
    """Another turn came first: the repeat is told, and nothing is added to that turn."""
    box, talk = opened()
    prompt = tokens(200)
    talk.prefill(prompt)
    stream = talk.stream(60000, request_id="a")
    next(stream)
    stream.cancel()
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            talk.prefill(prompt + tokens(5))
            break
        except grpc.RpcError as error:
            equal(daemon.Failure(error).reason, "SESSION_BUSY", "refused meanwhile")
    for _ in range(2):
        expect(lambda: list(talk.stream(60000, request_id="a")), code="FAILED_PRECONDITION",
               reason="HEAD_MOVED", field="request_id")
    equal(talk.get().session.head_position, 205, "the head of the other turn")
    equal(len(talk.decode(3, request_id="b").tokens), 3, "another id is another call")
    box.stop()


@case
def failures_are_not_kept():
    """A call that failed is run again: it may end well now."""
    box, talk = opened()
    expect(lambda: list(talk.stream(4, request_id="a")), code="FAILED_PRECONDITION",
           reason="HEAD_EMPTY")
    talk.prefill(tokens(200))
    equal(len(talk.decode(4, request_id="a").tokens), 4, "the same id, when there is a head")
    box.stop()


@case
def closed_while_joined():
    """CloseSession ends the call for everybody who waits for it; the id is free again."""
    box, talk = opened(flags=LONG)
    prompt = tokens(4000)
    request = pb.PrefillRequest(session_id="s", tokens=pack(prompt), request_id="turn")
    futures = [talk.call._stub.Prefill.future(request, metadata=talk.call._metadata, timeout=30)
               for _ in range(3)]
    until(lambda: repeated(box, "joined") == 2, "they did not join")
    talk.close()
    for future in futures:
        try:
            future.result()
            check(False, "a closed turn ended well")
        except grpc.RpcError as error:
            got = daemon.Failure(error)
            equal((got.code, got.reason), ("CANCELLED", "CANCELLED"), "a closed turn")
    equal(talk.prefill(prompt, request_id="turn").computed_tokens, 4000, "run again")
    box.stop()


@case
def how_long_answers_are_kept():
    """The last 64 of a session, for 10 minutes, in bounded memory; not over a restart, where equal
    ids of content make the repeat safe; and not longer than their session."""
    box, talk = opened("synthetic")
    prompt = tokens(200)
    first = talk.prefill(prompt, request_id="turn-0")
    for i in range(1, KEPT):
        talk.call.Checkpoint(pb.CheckpointRequest(session_id="s", request_id=f"turn-{i}"))
    equal(plain(talk.prefill(prompt, request_id="turn-0")), plain(first), "64 later")
    talk.call.Checkpoint(pb.CheckpointRequest(session_id="s", request_id="one-more"))
    resumed(talk.prefill(prompt, request_id="turn-0"), EXACT, 198, "65 later it is run again")
    box.advance(10 * MINUTE_MS - 1000)
    resumed(talk.prefill(prompt, request_id="turn-0"), EXACT, 198, "10 minutes later")
    box.advance(2000)
    equal(talk.prefill(prompt, request_id="turn-0").outcome != EXACT, True, "run again after them")
    until(lambda: box.counter("cached_answers") == 1, "the others are gone")
    talk.decode(5, request_id="answer", forced=[4, 5, 6, 7, 8])
    talk.call.DeleteSession(pb.DeleteSessionRequest(session_id="s"))
    equal(box.counter("cached_answers"), 0, "answers of a session that was deleted")
    talk = Talk(box.client(), "s")
    made = talk.prefill(prompt, request_id="turn-0")
    resumed(made, MISS, 0, "another session of that id")
    box.crash()
    talk = Talk(box.client(), "s")
    again = talk.prefill(prompt, request_id="turn-0")
    equal((again.stored_tokens, positions(again.checkpoints)), (200, [200]),
          "after a restart: stored already")
    shown = talk.get()
    equal(shown.session.head_position, 200, "the head is where it was")
    check(made.checkpoints[0].id in [c.id for c in shown.checkpoints], "the checkpoint, too")
    box.stop()


@case
def memory_is_bounded():
    """Long answers push out old ones: never more than 16 MiB."""
    box, talk = opened("synthetic", {"hbm.bytes": "64MiB", "ssd.bytes": "512MiB"})
    talk.prefill(tokens(20))
    longest = 65536
    list(talk.stream(longest, timeout=60))

    def again(i, **fields):
        """One new token, and all that were sent before: an answer of 256 KiB."""
        got = sum(len(m.tokens) // 4 for m in talk.stream(
            1, request_id=f"a{i}", from_position=20, no_checkpoint=True, timeout=60, **fields))
        check(got > longest, f"{got} tokens")
        return got

    first = again(0)
    equal(again(0), first, "kept")
    for i in range(1, 10 * KEPT // 9):
        again(i)
        check(box.counter("cached_answers_bytes") <= 16 << 20, "bytes of answers")
    check(50 < box.counter("cached_answers") < KEPT, "answers that are kept")
    before = box.counter("cached_decoded_tokens_total")
    check(again(0) > first, "the oldest is another call by now")
    equal(box.counter("cached_decoded_tokens_total") - before, 1, "tokens generated")
    box.stop()


if __name__ == "__main__":
    run_cases("Calls made again with their request_id, through the real daemon.")
