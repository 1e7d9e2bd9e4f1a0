"""Fork: a second head in a tree.

Nothing is copied, both heads go on, and neither can hurt the other: each goes on with the bits of a
session that never forked, and what one deletes stays for the other as far as it needs it.
"""

import os
import threading

import grpc
from cli import Tool, token_file
from daemon import Failure, admin_pb, check, equal, expect, failure, pack, pb
from faults import mounted
from state_files import State, kvdump
from talk import (
    EXACT, MINUTE_MS, MISS, PAGE, REPLAY, Box, Talk, case, name_of, opened, patiently, resumed, rng,
    run_cases, together, tokens)

PAGE_BYTES = 20480  # Of the model `tiny`.


def fork(talk, name, checkpoint=b"", **fields):
    return talk.call.Fork(pb.ForkRequest(
        session_id=talk.name, checkpoint_id=checkpoint, new_session_id=name, **fields))


def attach(client, name):
    """A session that is there already."""
    talk = Talk.__new__(Talk)
    talk.call, talk.name, talk.opened = client.session, name, None
    return talk


def used(box):
    return box.operator.DiskUsage(admin_pb.DiskUsageRequest()).rows[0]


def ids_of(talk):
    return {c.id for c in talk.get().checkpoints}


def verified(box, what):
    """Of a stopped daemon's directory."""
    code, out, errors = kvdump("verify", box.state)
    equal(code, 0, f"kvdump verify, {what}: {out[-300:]} {errors[-300:]}")


class Cold:
    """What a session that never forked answers to the same calls."""

    def __init__(self):
        self.box = Box().start()

    def bits(self, *turns):
        """Of the last turn; a turn is (tokens that are added, tokens decoded)."""
        talk = Talk(self.box.client(), f"cold{rng.random()}")
        history = []
        for added, count in turns:
            history += added
            talk.prefill(history)
            answer = talk.decode(count)
            history += answer.tokens
        return answer.bits


@case
def shares_all_and_copies_nothing():
    """O(1): du is the same before and after, and the fork resumes EXACT where it was made."""
    box, talk = opened()
    prompt = tokens(5 * PAGE + 40)
    made = talk.prefill(prompt).checkpoints[0]
    before, written = used(box), box.counter("cached_save_bytes_total", 'tier="ssd"')
    got = fork(talk, "f", made.id)
    equal((got.head_position, got.epoch, got.created, got.checkpoint_id),
          (len(prompt), 1, True, made.id), "answer")
    after = used(box)
    equal((after.live_bytes, after.expired_bytes, after.checkpoints),
          (before.live_bytes, before.expired_bytes, before.checkpoints), "bytes of the user")
    equal(after.sessions, before.sessions + 1, "sessions of the user")
    equal(box.counter("cached_save_bytes_total", 'tier="ssd"'), written, "bytes written by a fork")
    branch = attach(box.client(), "f")
    resumed(branch.lookup(prompt + tokens(9)), EXACT, len(prompt), "the fork's first turn")
    info = branch.get()
    equal((info.session.head_position, info.session.parent_session_id, info.head_checkpoint_id),
          (len(prompt), "s", made.id), "the fork as it is shown")
    equal([(h.session_id, h.position) for h in info.heads], [("s", len(prompt))], "other heads")
    equal([c.session_id for c in info.checkpoints], ["s"], "who made its checkpoints")
    equal([c.session_id for c in talk.get().checkpoints], [""], "as the source shows them")
    names = [s.session_id for s in talk.call.ListSessions(pb.ListSessionsRequest()).sessions]
    equal(sorted(names), ["f", "s"], "listed")
    box.stop()
    verified(box, "after a fork")


@case
def both_go_on_with_the_bits_of_a_cold_run():
    """Forks in the middle of a page and at its end; source and fork go on, in turn and at once."""
    cold = Cold()
    for length in (2 * PAGE + 50, 2 * PAGE, 2 * PAGE - 1):
        box, talk = opened()
        prompt, here, there = tokens(length), tokens(70), tokens(90)
        made = talk.prefill(prompt).checkpoints[0]
        first = talk.decode(1).tokens
        fork(talk, "f", made.id)
        branch = attach(box.client(), "f")
        answers = {}

        def go(index):
            if index == 0:
                talk.prefill(prompt + first + here)
                answers["s"] = talk.decode(20).bits
            else:
                branch.prefill(prompt + there)
                answers["f"] = branch.decode(20).bits

        together(2, go)
        equal(answers["s"], cold.bits((prompt, 1), (here, 20)), f"source, forked at {length}")
        plain = Talk(cold.box.client(), f"plain{length}")
        plain.prefill(prompt)
        plain.prefill(prompt + there)
        equal(answers["f"], plain.decode(20).bits, f"fork at {length}")
        box.crash()
        client = box.client()
        got = attach(client, "f").lookup(prompt + there + tokens(3))
        check(got.hit_tokens >= len(prompt + there) - 1, f"fork after kill -9: {got}")
        got = attach(client, "s").lookup(prompt + first + here + tokens(3))
        check(got.hit_tokens >= len(prompt + first + here) - 1, f"source after kill -9: {got}")
        box.stop()
        verified(box, f"forked at {length}, after kill -9")
    cold.box.stop()


@case
def from_the_head_while_it_is_live():
    """Without a checkpoint the head is made one: the pending token goes with it."""
    box, talk = opened()
    prompt = tokens(200)
    talk.prefill(prompt)
    answer = talk.decode(10, no_checkpoint=True)
    got = fork(talk, "f")
    equal((got.head_position, got.created), (209, True), "where the head is")
    equal(talk.decode(8).bits, attach(box.client(), "f").decode(8).bits, "both decode on")
    again = fork(talk, "f")
    equal((again.head_position, again.created, again.checkpoint_id),
          (got.head_position, False, got.checkpoint_id), "again, when the head has moved")
    empty = Talk(box.client(), "empty")
    expect(fork, empty, "none", code="FAILED_PRECONDITION", reason="HEAD_EMPTY")
    check(len(answer.tokens) == 10, "decoded")
    box.stop()
    verified(box, "forked from a live head")


@case
def while_the_source_decodes():
    """Fork of a node runs beside a Decode; of the head it takes the last step."""
    box, talk = opened()
    prompt = tokens(300)
    made = talk.prefill(prompt).checkpoints[0]
    stream = talk.stream(400)
    next(stream)
    equal(fork(talk, "f", made.id).head_position, 300, "beside a Decode")
    at = fork(talk, "g").head_position
    check(300 < at <= 700, f"the head of a running Decode: {at}")
    branch = attach(box.client(), "f")
    bits = branch.decode(20).bits
    for _ in stream:
        pass
    talk.rollback(made.id)
    equal(talk.decode(20).bits, bits, "both from the fork's place")
    box.stop()
    verified(box, "forked beside a Decode")


def grown(box, talk, prompt, made):
    """A fork at `made`; both go on by themselves."""
    fork(talk, "f", made.id)
    branch = attach(box.client(), "f")
    mine, theirs = prompt + tokens(300), prompt + tokens(280)
    talk.prefill(mine)
    branch.prefill(theirs)
    return branch, mine, theirs


@case
def either_is_deleted_first():
    """What the other one needs stays, the rest goes at once; the last one takes all of it."""
    for first, crash in (("s", False), ("f", False), ("s", True), ("f", True)):
        box, talk = opened()
        prompt = tokens(4 * PAGE + 30)
        made = talk.prefill(prompt).checkpoints[0]
        branch, mine, theirs = grown(box, talk, prompt, made)
        whole = used(box).live_bytes
        kept = {"s": branch, "f": talk}[first]
        history = {"s": theirs, "f": mine}[first]
        dry = talk.call.DeleteSession(pb.DeleteSessionRequest(session_id=first, dry_run=True))
        receipt = talk.call.DeleteSession(pb.DeleteSessionRequest(session_id=first))
        equal((dry.bytes, dry.checkpoints), (receipt.bytes, receipt.checkpoints), "dry run")
        check(0 < receipt.bytes < whole, f"{first}: {receipt.bytes} of {whole} freed")
        equal(used(box).live_bytes, whole - receipt.bytes, f"bytes left without {first}")
        expect(attach(box.client(), first).lookup, prompt, code="NOT_FOUND",
               reason="SESSION_NOT_FOUND")
        if crash:
            box.crash()
        else:
            box.restart()
        kept = attach(box.client(), kept.name)
        got = kept.lookup(history + tokens(5))
        check(got.hit_tokens >= len(history) - 1, f"without {first}: {got}")
        equal(len(kept.get().checkpoints), 2, f"checkpoints without {first}")
        # The name is free, and is another session then, with a tree of its own.
        other = Talk(box.client(), first)
        equal(other.opened.created, True, f"{first} is opened again")
        resumed(other.lookup(prompt), MISS, 0, "a new session of the old name")
        other.prefill(prompt)
        box.restart()
        check(len(ids_of(attach(box.client(), first))) == 1, "its own tree")
        for name in (first, kept.name):
            box.client().session.DeleteSession(pb.DeleteSessionRequest(session_id=name))
        equal(list(box.operator.DiskUsage(admin_pb.DiskUsageRequest()).rows), [], "all is gone")
        box.restart()
        equal(box.stats().checkpoints, 0, "checkpoints at the end")
        box.stop()
        verified(box, f"{first} deleted first")


@case
def usage_by_who_made_it():
    """A row for each session that made something, the same from memory and from records."""
    box, talk = opened()
    prompt = tokens(3 * PAGE)
    made = talk.prefill(prompt).checkpoints[0]
    fork(talk, "idle", made.id)
    fork(talk, "f", made.id)
    attach(box.client(), "f").prefill(prompt + tokens(2 * PAGE))
    for when in ("loaded", "from records"):
        if when != "loaded":
            box.restart()
        rows = box.client().admin.DiskUsage(admin_pb.DiskUsageRequest()).rows
        equal(sorted((r.session_id, r.sessions, r.checkpoints, r.live_bytes // PAGE_BYTES)
                     for r in rows), [("f", 1, 1, 2), ("s", 1, 1, 3)], f"rows, {when}")
        row = used(box)
        equal((row.sessions, row.checkpoints, row.live_bytes // PAGE_BYTES), (3, 2, 5),
              f"the user, {when}")
    box.stop()


@case
def a_user_with_forks_is_erased():
    """The dry run and the receipt count each checkpoint and page once; nothing is left."""
    box, talk = opened()
    for name in ("s", "t"):
        talk = Talk(box.client(), name)
        prompt = tokens(2 * PAGE)
        made = talk.prefill(prompt).checkpoints[0]
        for branch in range(3):
            fork(talk, f"{name}{branch}", made.id)
            attach(box.client(), f"{name}{branch}").prefill(prompt + tokens(PAGE))
    whole = used(box)
    dry = box.operator.EraseUser(admin_pb.EraseUserRequest(user="alice", dry_run=True))
    equal((dry.sessions, dry.checkpoints, dry.bytes), (8, 8, whole.live_bytes), "dry run")
    got = box.operator.EraseUser(admin_pb.EraseUserRequest(user="alice"))
    equal((got.sessions, got.checkpoints, got.bytes), (8, 8, whole.live_bytes), "receipt")
    equal(list(box.operator.DiskUsage(admin_pb.DiskUsageRequest()).rows), [], "all is gone")
    box.crash()
    equal((box.stats().sessions, box.stats().checkpoints), (0, 0), "after kill -9")
    box.stop()
    verified(box, "a user erased")


@case
def a_fork_of_a_fork():
    """Three sessions in a row; the one in the middle goes."""
    box, talk = opened()
    prompt = tokens(PAGE + 20)
    made = talk.prefill(prompt).checkpoints[0]
    fork(talk, "b", made.id)
    middle = attach(box.client(), "b")
    longer = prompt + tokens(200)
    point = middle.prefill(longer).checkpoints[0]
    equal(fork(middle, "c", point.id).head_position, len(longer), "fork of a fork")
    last = attach(box.client(), "c")
    longest = longer + tokens(PAGE)
    last.prefill(longest)
    receipt = talk.call.DeleteSession(pb.DeleteSessionRequest(session_id="b"))
    equal((receipt.bytes, receipt.checkpoints, receipt.deleted), (0, 0, True),
          "all of it is needed by its fork")
    box.crash()
    last = attach(box.client(), "c")
    got = last.lookup(longest + tokens(4))
    check(got.hit_tokens >= len(longest) - 1, f"after the middle went: {got}")
    box.client().session.DeleteSession(pb.DeleteSessionRequest(session_id="s"))
    got = last.lookup(longest + tokens(4))
    check(got.hit_tokens >= len(longest) - 1, f"after the first went: {got}")
    equal(len(last.get().heads), 0, "it is alone")
    box.stop()
    verified(box, "a fork of a fork")


@case
def sixty_four_forks_of_one_node():
    """All at once, all go on at once; each is as if it were alone."""
    box = Box("synthetic").start()
    talk = Talk(box.client(), "s")
    prompt = tokens(3 * PAGE + 7)
    made = talk.prefill(prompt).checkpoints[0]
    before = used(box).live_bytes
    suffixes = [tokens(40 + i) for i in range(64)]
    together(8, lambda i: [fork(talk, f"f{j}", made.id) for j in range(i, 64, 8)])
    equal(used(box).live_bytes, before, "bytes after 64 forks")

    def go(i):
        for j in range(i, 64, 8):
            branch = attach(box.client(), f"f{j}")
            got = patiently(branch.prefill, prompt + suffixes[j])
            equal((got.hit_tokens, got.save_reason), (len(prompt), ""), f"f{j}")

    together(8, go)
    equal(len(talk.get().heads), 64, "heads beside the source's")
    box.crash()
    for j in rng.sample(range(64), 8):
        branch = attach(box.client(), f"f{j}")
        got = branch.lookup(prompt + suffixes[j] + [9])
        equal(got.hit_tokens, (len(prompt) + len(suffixes[j])) & ~1, f"f{j} after kill -9")
    together(8, lambda i: [
        box.client().session.DeleteSession(pb.DeleteSessionRequest(session_id=f"f{j}"))
        for j in range(i, 64, 8)])
    equal(used(box).live_bytes, before, "bytes when all forks are gone")
    resumed(attach(box.client(), "s").lookup(prompt + [9]), REPLAY, len(prompt) & ~1, "the source")
    box.no_wrong_bytes()
    box.stop()
    verified(box, "64 forks")


@case
def deleted_beside_a_running_sibling():
    """A session goes while its fork computes on rows of it."""
    box = Box("synthetic").start()
    talk = Talk(box.client(), "s")
    prompt = tokens(6 * PAGE)
    made = talk.prefill(prompt[:3 * PAGE]).checkpoints[0]
    talk.prefill(prompt)
    fork(talk, "f", made.id)
    branch = attach(box.client(), "f")
    resumed(branch.lookup(prompt + [5]), EXACT, len(prompt), "rows of the source serve the fork")
    stop = threading.Event()
    errors = []

    def turns():
        while not stop.is_set():
            try:
                patiently(branch.prefill, prompt + tokens(rng.randrange(1, 300)))
            except Exception as error:
                errors.append(error)
                return

    thread = threading.Thread(target=turns)
    thread.start()
    for i in range(20):
        name = f"x{i}"
        fork(talk, name, made.id)
        side = attach(box.client(), name)
        patiently(side.prefill, prompt[:3 * PAGE] + tokens(200))
        if i == 10:
            talk.call.DeleteSession(pb.DeleteSessionRequest(session_id="s"))
            talk = branch
        box.client().session.DeleteSession(pb.DeleteSessionRequest(session_id=name))
    stop.set()
    thread.join()
    equal(errors, [], "turns of the fork")
    box.no_wrong_bytes()
    box.stop()
    verified(box, "deleted beside a running sibling")


@case
def idempotent_and_compared():
    """The same ids again: the same answer.  Other parameters: what differs is named."""
    box, talk = opened()
    prompt = tokens(300)
    made = talk.prefill(prompt[:150]).checkpoints[0]
    later = talk.prefill(prompt).checkpoints[0]
    first = fork(talk, "f", made.id, kind=pb.SESSION_KIND_EPHEMERAL, ttl_ms=MINUTE_MS)
    branch = attach(box.client(), "f")
    branch.prefill(prompt[:150] + tokens(40))

    def repeated(what):
        again = fork(talk, "f", made.id, kind=pb.SESSION_KIND_EPHEMERAL, ttl_ms=MINUTE_MS)
        equal((again.head_position, again.epoch, again.created, again.checkpoint_id),
              (first.head_position, first.epoch, False, first.checkpoint_id), what)

    repeated("the same again")
    box.restart()
    talk = attach(box.client(), "s")
    repeated("the same after a restart")
    for fields, field in (
            ({"checkpoint": later.id, "kind": 3, "ttl_ms": MINUTE_MS}, "checkpoint_id"),
            ({"checkpoint": made.id, "kind": 1, "ttl_ms": MINUTE_MS}, "kind"),
            ({"checkpoint": made.id, "kind": 3, "ttl_ms": 2 * MINUTE_MS}, "ttl_ms")):
        got = expect(fork, talk, "f", code="ALREADY_EXISTS", reason="SESSION_EXISTS", **fields)
        equal(got.field, field, "what differs")
    Talk(box.client(), "other").prefill(prompt)
    for name in ("other", "s"):
        got = expect(fork, talk, name, made.id, code="ALREADY_EXISTS", reason="SESSION_EXISTS")
        equal(got.field, "session_id", f"{name} is no fork of s")
    found = box.client().session.OpenSession(pb.OpenSessionRequest(
        session_id="f", kind=pb.SESSION_KIND_EPHEMERAL, ttl_ms=MINUTE_MS))
    equal((found.created, found.epoch), (False, 1), "OpenSession finds a fork")
    box.stop()


@case
def refused():
    """Every field, and every checkpoint that cannot be forked."""
    box, talk = opened()
    made = talk.prefill(tokens(200)).checkpoints[0]
    theirs = Talk(box.client("bob"), "s")
    foreign = theirs.prefill(tokens(200)).checkpoints[0]
    mine = Talk(box.client(), "mine").prefill(tokens(150)).checkpoints[0]
    for what, checkpoint, name, fields, code, reason in (
            ("no such checkpoint", b"\1" * 16, "f", {}, "NOT_FOUND", "CHECKPOINT_NOT_FOUND"),
            ("another user's", foreign.id, "f", {}, "NOT_FOUND", "CHECKPOINT_NOT_FOUND"),
            ("another tree's", mine.id, "f", {}, "NOT_FOUND", "CHECKPOINT_NOT_FOUND"),
            ("a short id", made.id[:15], "f", {}, "INVALID_ARGUMENT", "CHECKPOINT_ID_INVALID"),
            ("no name", made.id, "", {}, "INVALID_ARGUMENT", "SESSION_ID_INVALID"),
            ("a name too long", made.id, "x" * 129, {}, "INVALID_ARGUMENT", "SESSION_ID_INVALID"),
            ("a bad name", made.id, "a b", {}, "INVALID_ARGUMENT", "SESSION_ID_INVALID"),
            ("a kind", made.id, "f", {"kind": 4}, "INVALID_ARGUMENT", "SESSION_KIND_INVALID"),
            ("a ttl", made.id, "f", {"ttl_ms": 1 << 40}, "INVALID_ARGUMENT", "TTL_INVALID"),
            ("a request id", made.id, "f", {"request_id": "\n"}, "INVALID_ARGUMENT",
             "REQUEST_ID_INVALID"),
            ("an epoch", made.id, "f", {"epoch": 7}, "FAILED_PRECONDITION", "STALE_EPOCH")):
        got = failure(fork, talk, name, checkpoint, **fields)
        check(got is not None and (got.code, got.reason) == (code, reason), f"{what}: {got!r}")
    expect(fork, attach(box.client(), "nobody"), "f", made.id, code="NOT_FOUND",
           reason="SESSION_NOT_FOUND")
    expect(fork, attach(box.client("bob"), "nobody"), "f", made.id, code="NOT_FOUND",
           reason="SESSION_NOT_FOUND")
    equal(len(talk.call.ListSessions(pb.ListSessionsRequest()).sessions), 2, "nothing was made")
    box.stop()


@case
def expiry_spares_what_a_fork_stands_on():
    """The source's checkpoints outlive its own ttl while a fork with a longer one stands there."""
    box = Box().start()
    talk = Talk(box.client(), "s", ttl_ms=10 * MINUTE_MS)
    prompt = tokens(3 * PAGE)
    made = talk.prefill(prompt[:200]).checkpoints[0]
    talk.prefill(prompt)
    talk.close()
    fork(talk, "f", made.id, ttl_ms=60 * MINUTE_MS)
    box.advance(11 * MINUTE_MS)
    branch = attach(box.client(), "f")
    equal([c.position for c in branch.get().checkpoints], [200], "what is left")
    resumed(branch.lookup(prompt[:200] + tokens(9)), REPLAY, 200, "the fork's place")
    box.restart()
    branch = attach(box.client(), "f")
    resumed(branch.lookup(prompt[:200] + tokens(9)), REPLAY, 200, "after a restart")
    box.advance(61 * MINUTE_MS)
    equal(len(branch.get().checkpoints), 0, "then it goes, too")
    box.stop()
    verified(box, "expired")


@case
def records_say_whose_they_are():
    """docs/format.md: bit 4, sessions and nodes of version 2 where a tree is another's."""
    box, talk = opened()
    prompt = tokens(200)
    made = talk.prefill(prompt).checkpoints[0]
    box.stop()
    equal(State(box.state).features & 16, 0, "no bit before the first fork")
    box.start()
    talk = attach(box.client(), "s")
    fork(talk, "f", made.id)
    attach(box.client(), "f").prefill(prompt + tokens(150))
    box.stop()
    equal(State(box.state).features & 16, 16, "the bit")
    code, out, _ = kvdump("print", "--json", "--session", "f", box.state)
    equal(code, 0, "kvdump print")
    check(made.id.hex() in out, "it names where it was forked")
    verified(box, "printed")


@case
def the_first_fork_on_a_full_file_system():
    """The superblock cannot say that there are forks: none is made, nor a quota; with room both are."""
    with mounted("the_first_fork_on_a_full_file_system", mib=80) as place:
        if place is None:
            return
        box = Box("synthetic", {"state.dir": os.path.join(place, "state"),
                                "ssd.segment_bytes": "1MiB"})
        box.state = box.flags["state.dir"]
        box.start()
        talk = Talk(box.client(), "s")
        made = talk.prefill(tokens(300)).checkpoints[-1]
        fill = os.path.join(place, "others")
        with open(fill, "wb", buffering=0) as f:
            try:
                while f.write(b"x" * 4096) > 0:
                    pass
            except OSError:
                pass
        turns = admin_pb.SetQuotaRequest(user="carol", limits=[admin_pb.SetLimit(name="turns", limit=7)])
        for _ in range(2):
            expect(fork, talk, "f", made.id, code="RESOURCE_EXHAUSTED", reason="SSD_FULL")
            expect(box.operator.SetQuota, turns, code="RESOURCE_EXHAUSTED", reason="SSD_FULL")
        expect(attach(box.client(), "f").get, code="NOT_FOUND", reason="SESSION_NOT_FOUND")
        os.unlink(fill)
        equal(patiently(fork, talk, "f", made.id).created, True, "made when there is room")
        patiently(box.operator.SetQuota, turns)
        box.crash()
        equal(attach(box.client(), "f").get().session.head_position, 300, "and there after kill -9")
        box.stop()
        verified(box, "after a full file system")


@case
def a_full_disk_takes_from_forks():
    """Forked trees on a tier that is too small: saves go on, what is left is right, and a fork that
    was used last keeps what it stands on."""
    box = Box("synthetic", {"ssd.bytes": "4MiB", "ssd.segment_bytes": "1MiB"}).start()
    client = box.client()
    histories, last = {}, {}
    for tree in range(10):
        talk = Talk(client, f"s{tree}")
        prompt = tokens(8 * PAGE)
        made = patiently(talk.prefill, prompt).checkpoints[-1]
        for branch in range(6):
            name = f"f{tree}.{branch}"
            try:
                fork(talk, name, made.id)
            except grpc.RpcError as error:  # It went meanwhile: the conversation begins again.
                equal(Failure(error).reason, "CHECKPOINT_NOT_FOUND", "fork of what went")
                made = patiently(talk.prefill, prompt).checkpoints[-1]
                fork(talk, name, made.id)
            longer = prompt + tokens(6 * PAGE)
            got = patiently(attach(client, name).prefill, longer)
            check(got.save_reason in ("", "SSD_FULL"), f"{name}: {got.save_reason}")
            equal(got.save_reason, "", f"{name} is saved")
            histories[name], last = longer, name
    check(box.counter("cached_evictions_total", 'tier="ssd",cause="capacity"') > 0, "evicted")
    got = attach(client, last).lookup(histories[last] + [9])
    equal(got.hit_tokens, len(histories[last]), "the last one is whole")
    box.crash()
    client = box.client()
    kept = 0
    for name, history in histories.items():
        got = attach(client, name).lookup(history + [9])
        kept += got.hit_tokens > 0
        patiently(attach(client, name).prefill, history + tokens(5))
    check(kept >= 2, f"{kept} of {len(histories)} have something left")
    box.no_wrong_bytes()
    box.stop()
    verified(box, "evicted")


@case
def trees_leave_memory_and_come_back():
    """With little index.ram trees of several sessions are unloaded whole, and loaded again."""
    box = Box("synthetic", {"index.ram": "1MiB"}).start()
    client = box.client()
    histories = {}
    for tree in range(24):
        talk = Talk(client, f"s{tree}")
        prompt = tokens(20 * PAGE)
        points = []
        for at in range(160, len(prompt) + 1, 160):
            points += patiently(talk.prefill, prompt[:at],
                                anchors=[at - 128, at - 96, at - 64, at - 32]).checkpoints
        talk.close()
        for branch in range(3):
            name = f"f{tree}.{branch}"
            point = rng.choice(points)
            fork(talk, name, point.id)
            histories[name] = prompt[:point.position] + tokens(3 * PAGE)
            patiently(attach(client, name).prefill, histories[name])
            attach(client, name).close()
    check(box.counter("cached_index_unloads_total") > 0, "trees left memory")
    names = list(histories)
    rng.shuffle(names)
    for name in names:
        got = attach(client, name).lookup(histories[name] + [9])
        check(got.hit_tokens >= len(histories[name]) - 1, f"{name}: {got}")
        listed = attach(client, name).get()
        equal(len(listed.heads), 3, f"{name}: other heads")
    together(4, lambda i: [patiently(attach(client, n).prefill, histories[n] + tokens(30))
                           for n in names[i::4]])
    box.no_wrong_bytes()
    box.stop()
    verified(box, "unloaded and loaded")


@case
def the_commands():
    """cachectl session fork, and the tree of both as a graph."""
    box, talk = opened()
    tool = Tool(f"unix:{box.socket}", token_file(box.directory, "alice"))
    prompt = tokens(200)
    made = talk.prefill(prompt).checkpoints[0]
    talk.prefill(prompt + tokens(60))
    said = tool.code(0, "session", "fork", "s", "f", "--checkpoint", made.id.hex()[:8]).stdout
    equal(said, "forked f: shares 200 tokens with s, no bytes copied\n", "what it says")
    said = tool.code(0, "session", "fork", "s", "f", "--checkpoint", made.id.hex()).stdout
    equal(said, "there already: f: shares 200 tokens with s, no bytes copied\n", "again")
    got = tool.json("--json", "session", "fork", "s", "g", "--ttl-ms", "60000")
    equal((got["session_id"], got["head_position"], got["created"]), ("g", 260, True), "as JSON")
    tool.code(3, "session", "fork", "s", "x", "--checkpoint", "0123456789")
    tool.code(2, "session", "fork", "s", "x", "--checkpoint", "xyz")
    tool.code(2, "session", "fork", "s", "a b")
    tool.code(3, "session", "fork", "nobody", "x")
    tool.code(2, "session", "fork", "s")
    attach(box.client(), "f").prefill(prompt + tokens(40))
    drawn = tool.code(0, "session", "show", "s", "--tree").stdout.splitlines()
    drawn = drawn[drawn.index("* 0"):]
    equal(drawn[0], "* 0", "the root")
    check(drawn[1].startswith("* 200  PREFILL_END"), drawn[1])
    equal(drawn[2], "|\\", "the fork point")
    check(drawn[3].startswith("| * 240") and "by f" in drawn[3] and "<- head of f" in drawn[3] and
          "+40 tokens" in drawn[3] and "SSD" in drawn[3] and "ttl" in drawn[3], drawn[3])
    check(drawn[4].startswith("* 260") and "<- head" in drawn[4] and "head of g" in drawn[4],
          drawn[4])
    check(all(len(line) <= 120 for line in drawn), "short lines")
    shown = tool.json("--json", "session", "show", "f", "--tree")
    equal(sorted((h["session_id"], h["position"]) for h in shown["heads"]), [("g", 260), ("s", 260)],
          "heads as JSON")
    equal({c["session_id"] for c in shown["checkpoints"]}, {"s", "f"}, "makers as JSON")
    box.stop()


run_cases(__doc__.splitlines()[0])
