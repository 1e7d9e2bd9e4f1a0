"""Pin, Touch and GetUsage: what is kept, what is renewed, what there is."""

from daemon import check, equal, expect, pb
from talk import (
    EXACT, MINUTE_MS, MISS, PAGE, REPLAY, Box, Talk, case, opened, patiently, positions, resumed,
    run_cases, tokens)


def pin(talk, checkpoint, ttl_ms=10 * MINUTE_MS):
    return talk.call.Pin(pb.PinRequest(
        session_id=talk.name, checkpoint_id=checkpoint.id, ttl_ms=ttl_ms))


def touch(talk, checkpoint):
    return talk.call.Touch(pb.TouchRequest(session_id=talk.name, checkpoint_id=checkpoint.id))


def usage(client):
    return client.session.GetUsage(pb.GetUsageRequest())


@case
def outlives_ages():
    """Rows of a session of 2 minutes and a window of 5 stay as long as they are pinned."""
    box, _ = opened()
    client = box.client()
    prompt = tokens(300)
    for is_pinned in (True, False):
        talk = Talk(client, f"pin{is_pinned}", ttl_ms=2 * MINUTE_MS)
        made = talk.prefill(prompt).checkpoints[0]
        talk.close()
        if is_pinned:
            got = pin(talk, made, 8 * MINUTE_MS)
            equal(got.expire_ms, 8 * MINUTE_MS, "how long")
            check(got.window_expire_ms >= 8 * MINUTE_MS - 1000, f"window {got.window_expire_ms}")
            shown = talk.get().checkpoints[0]
            check(7 * MINUTE_MS < shown.pin_expire_ms <= 8 * MINUTE_MS, f"{shown.pin_expire_ms}")
    box.advance(7 * MINUTE_MS)
    resumed(Talk(client, "pinFalse", ttl_ms=2 * MINUTE_MS).lookup(prompt + tokens(5)), MISS, 0,
            "without a pin", reason="EXPIRED")
    talk = Talk(client, "pinTrue", ttl_ms=2 * MINUTE_MS)
    resumed(talk.lookup(prompt + tokens(5)), EXACT, 300, "with one")
    box.advance(MINUTE_MS + 1000)
    equal(talk.get().checkpoints[0].pin_expire_ms, 0, "the pin ended")
    resumed(talk.lookup(prompt + tokens(5)), REPLAY, 300, "its window goes, its rows were used then",
            reason="EXPIRED")
    box.advance(2 * MINUTE_MS)
    resumed(talk.lookup(prompt + tokens(5)), MISS, 0, "after the pin", reason="EXPIRED")
    box.stop()


@case
def outlives_pressure():
    """Newer sessions fill pool and SSD: what is pinned stays, with its window; nothing else has to."""
    box = Box("synthetic", {"pool.bytes": "2MiB", "ssd.bytes": "24MiB", "ssd.segment_bytes": "2MiB",
                            "hbm.bytes": "32MiB"}).start()
    alice = box.client()
    kept, other = Talk(alice, "kept"), Talk(alice, "other")
    prompt = tokens(1000)
    made = kept.prefill(prompt).checkpoints[0]
    patiently(other.prefill, prompt)
    kept.close()
    other.close()
    pin(kept, made)
    box.advance(1000)
    for i in range(60):
        talk = Talk(alice, f"more{i}")
        patiently(talk.prefill, tokens(4000))
        talk.close()
    shown = kept.get().checkpoints
    equal(positions(shown), [1000], "pinned rows")
    equal(shown[0].window_level, pb.LEVEL_RAM, "pinned window")
    check(box.counter("cached_evictions_total", 'tier="ssd",cause="capacity"') > 10,
          "others were evicted")
    equal(positions(other.get().checkpoints), [], "the same without a pin")
    resumed(kept.prefill(prompt + tokens(3)), EXACT, 1000, "and used")
    box.no_wrong_bytes()
    box.stop()


@case
def not_from_deletion_or_restart():
    box, talk = opened()
    made = talk.prefill(tokens(300)).checkpoints[0]
    pin(talk, made)
    box.crash()
    talk = Talk(box.client(), "s")
    equal(talk.get().checkpoints[0].pin_expire_ms, 0, "a restart forgets it")
    pin(talk, made)
    talk.call.DeleteSession(pb.DeleteSessionRequest(session_id="s"))
    equal(usage(box.client()).pins, 0, "a deletion does not ask it")
    equal(box.tier("ssd").bytes_used, 0, "bytes on SSD")
    box.stop()


@case
def until_somebody_ends_it():
    box, talk = opened()
    made = talk.prefill(tokens(300)).checkpoints[0]
    pin(talk, made)
    equal(pin(talk, made, 1000).expire_ms, 1000, "the last call counts")
    equal(pin(talk, made, 0).expire_ms, 0, "ended")
    equal(pin(talk, made, 0).expire_ms, 0, "and again")
    equal(talk.get().checkpoints[0].pin_expire_ms, 0, "shown")
    equal(usage(box.client()).pins, 0, "counted")
    box.advance(6 * MINUTE_MS)
    equal(talk.get().checkpoints[0].window_level, pb.LEVEL_NONE, "its window goes in its time")
    box.stop()


@case
def within_a_budget():
    """A quarter of each tier, 64 checkpoints: the refusal names which, its limit and the value."""
    box = Box("synthetic", {"ssd.bytes": "16MiB", "ssd.segment_bytes": "2MiB",
                            "hbm.bytes": "32MiB"}).start()
    client = box.client()
    talk = Talk(client, "s")
    page = box.stats().page_bytes
    limit = (16 << 20) // 4
    fits = limit // page
    prompt = tokens(PAGE * (fits + 1))
    talk.prefill(prompt[:PAGE * fits])
    made = talk.prefill(prompt).checkpoints[0]
    shorter = talk.get().checkpoints[0]
    got = expect(talk.call.Pin, pb.PinRequest(session_id="s", checkpoint_id=made.id, ttl_ms=1000),
                 code="RESOURCE_EXHAUSTED", reason="PIN_LIMIT", field="pinned bytes of rows")
    check(int(got.limit) <= limit and int(got.value) > int(got.limit), f"{got!r}")
    equal(usage(client).pins, 0, "nothing was pinned")
    pin(talk, shorter)
    equal(usage(client).pinned_bytes_ssd, fits * page, "pinned bytes")
    other = Talk(client, "other")
    more = other.prefill(tokens(PAGE)).checkpoints[0]
    expect(other.call.Pin, pb.PinRequest(session_id="other", checkpoint_id=more.id, ttl_ms=1),
           code="RESOURCE_EXHAUSTED", reason="PIN_LIMIT", field="pinned bytes of rows")
    pin(talk, shorter, 0)
    pin(other, more)
    bobs = Talk(box.client("bob"), "s")
    pin(bobs, bobs.prefill(prompt[:PAGE * fits]).checkpoints[0])
    box.stop()
    box = Box("synthetic", {"pool.bytes": "64MiB"}).start()
    talk = Talk(box.client(), "s")
    prompt = tokens(2)
    for i in range(65):
        prompt += tokens(2)
        made = talk.prefill(prompt).checkpoints[0]
        if i < 64:
            pin(talk, made)
    expect(talk.call.Pin, pb.PinRequest(session_id="s", checkpoint_id=made.id, ttl_ms=1),
           code="RESOURCE_EXHAUSTED", reason="PIN_LIMIT", field="pins", limit="64", value="65")
    use = usage(box.client())
    equal((use.pins, use.pinned_bytes_ssd), (64, 2 * box.stats().page_bytes),
          "a page counts once, however many checkpoints share it")
    box.stop()


@case
def what_is_refused():
    box, talk = opened("synthetic")
    made = talk.prefill(tokens(100)).checkpoints[0]
    expect(talk.call.Pin, pb.PinRequest(session_id="s", checkpoint_id=made.id, ttl_ms=600001),
           code="INVALID_ARGUMENT", reason="PIN_INVALID", field="ttl_ms", limit="600000",
           value="600001")
    for method, message in (("Pin", pb.PinRequest), ("Touch", pb.TouchRequest)):
        call = getattr(talk.call, method)
        expect(call, message(session_id="s", checkpoint_id=b"x"), code="INVALID_ARGUMENT",
               reason="CHECKPOINT_ID_INVALID", field="checkpoint_id")
        expect(call, message(session_id="s", checkpoint_id=bytes(16)), code="NOT_FOUND",
               reason="CHECKPOINT_NOT_FOUND", field="checkpoint_id")
        expect(call, message(session_id="no", checkpoint_id=made.id), code="NOT_FOUND",
               reason="SESSION_NOT_FOUND")
        expect(getattr(box.client("bob").session, method),
               message(session_id="s", checkpoint_id=made.id), code="NOT_FOUND",
               reason="SESSION_NOT_FOUND")
    stream = talk.stream(60000)
    next(stream)
    pin(talk, made)
    touch(talk, made)
    stream.cancel()
    box.stop()


@case
def touch_renews():
    """Rows and window, also of the checkpoints above."""
    box, _ = opened()
    client = box.client()
    prompt = tokens(300)
    talks = [Talk(client, f"t{i}", ttl_ms=6 * MINUTE_MS) for i in range(2)]
    made = []
    for talk in talks:
        talk.prefill(prompt)
        made.append(talk.prefill(prompt + tokens(50)).checkpoints[0])
        talk.close()
    box.advance(4 * MINUTE_MS)
    got = touch(talks[0], made[0])
    equal(got.rows_expire_ms, 6 * MINUTE_MS, "rows")
    check(5 * MINUTE_MS - 1000 < got.window_expire_ms <= 5 * MINUTE_MS, f"{got.window_expire_ms}")
    box.advance(3 * MINUTE_MS)
    equal([positions(t.get().checkpoints) for t in talks], [[300, 350], []],
          "7 minutes old, one of them touched 3 minutes ago")
    equal(talks[0].get().checkpoints[1].window_level, pb.LEVEL_RAM, "its window")
    box.stop()


@case
def usage_of_a_user():
    """Against the daemon's own tiers: bytes are of pages and slots, each once."""
    box, talk = opened("synthetic")
    equal(usage(box.client()).sessions, 1, "sessions")
    empty = usage(box.client("bob"))
    equal(empty, pb.GetUsageResponse(), "of one who has nothing")
    prompt = tokens(300)
    talk.prefill(prompt)
    talk.decode(100)
    talk.prefill(prompt[:200] + tokens(40))
    second = Talk(box.client(), "second")
    second.prefill(tokens(1000))
    use = usage(box.client())
    equal((use.sessions, use.checkpoints), (2, 5), "sessions and checkpoints")
    equal(use.bytes_ssd, box.tier("ssd").bytes_used, "bytes on SSD")
    equal(use.bytes_pool, box.tier("pool").bytes_used, "bytes in the pool")
    check(0 < use.bytes_hbm <= box.tier("hbm").bytes_used, f"{use.bytes_hbm} bytes in HBM")
    talk.close()
    second.close()
    after = usage(box.client())
    equal(after.bytes_hbm, box.tier("hbm").bytes_used, "bytes in HBM at rest")
    box.restart()
    use = usage(box.client())
    equal((use.sessions, use.checkpoints, use.bytes_pool), (2, 5, 0), "after a restart")
    box.stop()


if __name__ == "__main__":
    run_cases("Pin, Touch and GetUsage, through the real daemon.")
