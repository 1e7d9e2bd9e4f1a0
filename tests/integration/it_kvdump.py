"""kvdump on state directories that the real daemon made: whole ones, and every kind of damage.

What is expected comes from tests/integration/state_files.py, which reads a directory by the offsets
of docs/format.md.  A daemon started on the same damage computes again what is hurt, and only that.
"""

import fcntl
import json
import os
import shutil
import struct
import subprocess

import daemon
from daemon import BUILD, check, equal, scratch
from state_files import HEADER_BYTES, State, crc32c, resealed_record, sealed
from talk import (
    MISS, REPLAY, Box, Talk, case, even, overwrite, patiently, resumed, rng, run_cases,
    tokens)

KVDUMP = os.path.join(BUILD, "tools", "kvdump")
CACHECTL = os.path.join(BUILD, "tools", "cachectl")
GOLDEN = os.path.join(BUILD, "tests", "test_format_golden")
FLAGS = {"ssd.segment_bytes": "256KiB"}


def kvdump(*arguments):
    done = subprocess.run([KVDUMP, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          timeout=60, check=False)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def files_of(directory, but=("lock",)):
    """Every file with its bytes."""
    found = {}
    for folder, _, names in os.walk(directory):
        for name in names:
            path = os.path.join(folder, name)
            if name in but:
                continue
            with open(path, "rb") as f:
                found[os.path.relpath(path, directory)] = f.read()
    return found


def verify_ok(directory, what):
    code, out, err = kvdump("verify", directory)
    equal((code, err), (0, ""), f"{what}: exit code and stderr of verify, which said {out}")
    return out


def verify_damage(directory, lines, what, last=None):
    """Exactly these lines, in any order, and exit 7."""
    code, out, err = kvdump("verify", directory)
    equal((code, err), (7, ""), f"{what}: exit code and stderr of verify")
    said = out.splitlines()
    check(said and said[-1].startswith("DAMAGED: "), f"{what}: the last line is {said[-1:]}")
    equal(sorted(said[:-1]), sorted(lines), f"{what}: lines of damage")
    if last is not None:
        equal(said[-1], last, f"{what}: the last line")


def grow(client, name, prompt, turns, added=40):
    """A conversation with answers, a rollback and a branch; the prompt of its head."""
    talk = Talk(client, name)
    for turn in range(turns):
        got = patiently(talk.prefill, prompt)
        answer = patiently(talk.decode, 7)
        if turn == 1:
            talk.rollback(got.checkpoints[-1].id)
            prompt = prompt + tokens(added)
        elif turn == 2:
            prompt = prompt[:len(prompt) * 2 // 3] + tokens(added)
        else:
            prompt = prompt + answer.tokens + tokens(added)
    equal(patiently(talk.prefill, prompt).save_reason, "", f"{name}: saved")
    talk.close()
    return prompt


_made = []


def made():
    """A stopped directory with sessions of two users; copied for each who asks: (box, prompts)."""
    if not _made:
        box = Box("synthetic", FLAGS).start()
        prompts = {}
        for user in ("alice", "bob"):
            client = box.client(user)
            for i in range(4):
                prompts[f"{user}/s{i}"] = grow(client, f"s{i}", tokens(rng.randrange(150, 400)), 4)
        _made.append((box, prompts, box.stats()))
        box.stop()
    template, prompts, stats = _made[0]
    box = Box("synthetic", FLAGS)
    shutil.copytree(template.state, box.state)
    return box, dict(prompts), stats


def serves(box, prompts, hurt, what):
    """A daemon on the damage: sessions in hurt find it and go on with what is left {label: tokens,
    None: less than all}, all others hit in full; each is used, so that what is lost is cleared."""
    box.start()
    for label, prompt in prompts.items():
        user, name = label.split("/")
        talk = Talk(box.client(user), name)
        got = talk.prefill(prompt + tokens(9))
        if label not in hurt:
            resumed(got, REPLAY, even(len(prompt)), f"{what}: {label} is not hurt")
            continue
        equal(got.weakened, 1, f"{what}: {label} is hurt; weakened plans")
        if hurt[label] == 0:
            resumed(got, MISS, 0, f"{what}: {label} is hurt from its start", reason="CORRUPT")
        else:
            check(got.hit_tokens < len(prompt), f"{what}: {label} is hurt, hit {got.hit_tokens}")
    equal(box.stats().wrong_bytes, 0, f"{what}: wrong bytes")
    box.stop()
    verify_ok(box.state, f"{what}: after a daemon had it")


# ---- Whole directories ----

@case
def a_whole_directory():
    """Counts are those of the daemon before its stop; nothing is written; print says the same."""
    box, prompts, stats = made()
    ssd = next(t for t in stats.tiers if t.name == "ssd")
    check(stats.checkpoints > 30, f"checkpoints: {stats.checkpoints}")
    state = State(box.state)
    before = files_of(box.state, but=())
    out = verify_ok(box.state, "whole")
    pages = ssd.bytes_used // state.page_bytes
    equal(out, f"OK: {stats.checkpoints} checkpoints, {pages} pages, {ssd.bytes_used} bytes\n",
          "verify against GetStats")
    code, out, _ = kvdump("print", "--json", box.state)
    said = json.loads(out)
    equal(code, 0, "exit code of print --json")
    equal((said["layout_version"], said["users"], said["sessions"], said["checkpoints"],
           said["pages"], said["page_bytes"], said["id"]),
          (1, 2, 8, stats.checkpoints, pages, state.page_bytes, state.id.hex()), "print --json")
    equal(sum(s["pages_used"] for s in said["segments"]), pages, "pages used in segments")
    equal({s["bytes"] for s in said["segments"]}, {256 << 10}, "bytes of segments")
    equal({s["pages_used"] + s["pages_free"] for s in said["segments"]}, {12}, "pages of segments")
    equal(len(said["model"]), 64, "digits of the model fingerprint")
    code, out, _ = kvdump("print", box.state)
    equal(code, 0, "exit code of print")
    for word in ("layout version 1", f"{stats.checkpoints} checkpoints", "segment-000000.kv",
                 said["model"], "8 sessions", "2 users"):
        check(word in out, f"print says {word!r}")
    session_is_printed(box, state)
    equal(files_of(box.state, but=()), before, "files after verify and print")
    serves(box, prompts, {}, "whole")


def session_is_printed(box, state):
    label = "alice/s2"
    tree = state.trees[state.session(label)]
    code, out, _ = kvdump("print", box.state, "--session", label, "--json")
    equal(code, 0, "exit code of print --session")
    sessions = json.loads(out)["session_trees"]
    equal([s["session"] for s in sessions], [label], "sessions printed")
    equal({(n["position"], n["id"]) for n in sessions[0]["checkpoints"]},
          {(n.tokens, n.id.hex()) for n in tree.nodes.values()}, "checkpoints printed")
    equal({(p["uid"], p["generation"], p["position"], p["count"]) for p in sessions[0]["pages"]},
          {(p.uid, p.generation, p.position, p.count) for p in tree.pages.values()},
          "pages printed")
    code, out, _ = kvdump("print", box.state, "--session=s2", "--json")
    equal([s["session"] for s in json.loads(out)["session_trees"]].sort(),
          ["alice/s2", "bob/s2"].sort(), "sessions of that name, of both users")
    code, out, _ = kvdump("print", box.state, "--session", label)
    check(code == 0 and all(n.id.hex() in out for n in tree.nodes.values()),
          "print --session names every checkpoint")
    code, out, err = kvdump("print", box.state, "--session", "nobody")
    equal((code, out, err), (3, "", "kvdump: no session nobody\n"), "a session that is not there")


@case
def approximate_and_crashed_sessions():
    """Clipped replays enter ids; a kill leaves pages without records: both are well."""
    box = Box("synthetic", FLAGS).start()
    for round_number in range(3):
        for i in range(3):
            talk = Talk(box.client(), f"r{i}")
            prompt = tokens(200 + 30 * i) if round_number == 0 else prompts[i] + tokens(20)
            prompts = {**({} if round_number == 0 and i == 0 else prompts), i: prompt}
            patiently(talk.prefill, prompt)
            patiently(talk.decode, 3)
        checkpoints = box.stats().checkpoints
        box.kill()
        out = verify_ok(box.state, f"killed, round {round_number}")
        check(out.startswith(f"OK: {checkpoints} checkpoints"), f"{checkpoints} checkpoints: {out}")
        replays = sum(v[95] for k, v in State(box.state).records.items() if k[17:18] == b"N")
        equal(replays > 0, round_number > 0, "checkpoints behind clipped replays")
        box.start()
    box.stop()


@case
def golden_directory():
    """tests/data/format-v1: verified, and a daemon of another model lives beside what is there."""
    box = Box("synthetic", FLAGS)
    subprocess.run([GOLDEN, "--unpack", box.state], check=True, stdout=subprocess.DEVNULL)
    equal(verify_ok(box.state, "golden"), "OK: 4 checkpoints, 5 pages, 102400 bytes\n", "verify")
    state = State(box.state)
    equal(sorted(map(state.label, state.sessions)), ["alice/s", "bob/t.1"], "sessions")
    equal([f"{crc32c(state.read(p)[12:]):08x}" for p in state.pages()],
          [f"{struct.unpack_from('<I', state.read(p), 8)[0]:08x}" for p in state.pages()],
          "checksums of pages")
    box.start()
    stats = box.stats()
    equal((stats.recovered_checkpoints, stats.dropped_checkpoints), (4, 0), "recovered, dropped")
    talk = Talk(box.client(), "s")
    resumed(talk.prefill(tokens(200)), MISS, 0, "another model's session", reason="MODEL_CHANGED")
    box.stop()
    verify_ok(box.state, "golden, after a daemon of another model")


# ---- The command line ----

@case
def wrong_usage_and_no_directory():
    for arguments in ((), ("verify",), ("print",), ("show", "x"), ("verify", "a", "b"),
                      ("verify", "--json", "a"), ("print", "a", "--session"), ("print", "--x", "a")):
        code, out, err = kvdump(*arguments)
        equal((code, out), (2, ""), f"{arguments}: exit code and stdout")
        check(err.startswith("kvdump: ") and err.count("\n") == 1, f"{arguments}: {err!r}")
    code, out, err = kvdump("--help")
    check(code == 0 and err == "" and "Exit codes" in out and "kvdump verify" in out, "--help")
    code, out, _ = kvdump("--version")
    check(code == 0 and "layout version 1" in out, f"--version: {out!r}")
    empty = scratch()
    for directory in (empty, os.path.join(empty, "none")):
        code, out, err = kvdump("verify", directory)
        equal((code, out), (3, ""), f"{directory}: exit code and stdout")
        check(err.count("\n") == 1 and directory in err, f"{directory}: {err!r}")
    equal(os.listdir(empty), [], "what verify left in an empty directory")


@case
def a_running_daemon_keeps_its_directory():
    box, _, _ = made()
    box.start()
    for command in ("verify", "print"):
        code, out, err = kvdump(command, box.state)
        equal((code, out), (5, ""), f"{command}: exit code and stdout")
        check(f"pid {box.process.pid}" in err and err.count("\n") == 1, f"{command}: {err!r}")
    box.stop()


@case
def a_reader_keeps_its_directory():
    """The daemon says who reads it, and starts when that is over."""
    box, _, _ = made()
    with open(os.path.join(box.state, "lock"), "rb") as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        code, said = box.refused()
        check(code == 2 and f"kvdump (pid {os.getpid()}) reads the state directory" in said,
              f"with a reader: {code} {said!r}")
    box.start()
    box.stop()


@case
def other_versions_are_refused_untouched():
    """By daemon and kvdump, in one sentence that names found, expected and what to do."""
    box, _, _ = made()
    good = State(box.state).superblock

    def refused(what, words):
        before = files_of(box.state)
        code, said = box.refused()
        equal(code, 2, f"{what}: exit code of the daemon")
        lines = said.strip().splitlines()
        check(len(lines) == 1 and all(w in said for w in words), f"{what}: the daemon said {said!r}")
        code, out, err = kvdump("verify", box.state)
        equal((code, out), (1, ""), f"{what}: exit code of kvdump")
        check(err.count("\n") == 1 and all(w in err for w in words), f"{what}: kvdump said {err!r}")
        equal(files_of(box.state), before, f"{what}: files")

    path = os.path.join(box.state, "superblock")
    for version in (0, 2, 77):
        copy = bytearray(good[:4096])
        struct.pack_into("<I", copy, 12, version)
        overwrite(path, 0, sealed(copy) * 2)
        refused(f"version {version}", [f"layout version {version}", "reads version 1", "state.dir"])
    copy = bytearray(good[:4096])
    struct.pack_into("<Q", copy, 48, 1 << 40)
    overwrite(path, 0, sealed(copy) * 2)
    refused("features", ["features 0x10000000000", "state.dir"])
    os.unlink(path)
    refused("no superblock", ["layout version 0", "reads version 1", "another state.dir"])
    overwrite_new(path, good)
    verify_ok(box.state, "superblock put back")


def overwrite_new(path, data):
    with open(path, "wb") as f:
        f.write(data)


@case
def damaged_superblock():
    box, prompts, _ = made()
    path = os.path.join(box.state, "superblock")
    good = State(box.state).superblock
    for copy in (0, 1):
        overwrite(path, 4096 * copy + 17, bytes([good[17] ^ 1]))
        verify_damage(box.state, ["superblock: one of its two copies is damaged; the next start of "
                                  "a daemon puts it right"], f"copy {copy}")
        box.start()
        box.stop()
        with open(path, "rb") as f:
            equal(f.read(), good, f"copy {copy}: put right")
    overwrite(path, 0, bytes(8192))
    code, out, err = kvdump("verify", box.state)
    check(code == 7 and err == "" and out.startswith("superblock: both copies"), f"both: {out!r}")
    code, said = box.refused()
    check(code == 2 and "both copies" in said and said.count("\n") == 1, f"both: {said!r}")
    overwrite(path, 0, good)
    serves(box, prompts, {}, "superblock put back")


# ---- Pages ----

def shared_page(state, labels, position=128):
    """A page at that position with several owners, the session's head among them."""
    pages = [p for label in labels for p in state.trees[state.session(label)].pages.values()
             if p.position == position and state.head(p.session) in
             state.trees[p.session].owners(p.uid)
             and len(state.trees[p.session].owners(p.uid)) >= 2]
    return rng.choice(pages)


def hurt_by(state, page, prompts):
    """{label: 0 or None as serves() takes it}, if the head's history goes through the page."""
    label = state.label(page.session)
    tree = state.trees[page.session]
    head = state.head(page.session)
    if head not in tree.owners(page.uid):
        return {}
    equal(tree.nodes[head].tokens, len(prompts[label]), f"position of the head of {label}")
    return {label: 0 if page.position == 0 else None}


@case
def four_kib_in_the_middle_of_a_segment():
    """As `dd if=/dev/urandom of=SEGMENT bs=4096 count=1 seek=N conv=notrunc`."""
    box, prompts, _ = made()
    state = State(box.state)
    page = next(p for p in state.pages() if p.position == 0 and hurt_by(state, p, prompts)
                and len(state.trees[p.session].owners(p.uid)) >= 3)
    path, offset = state.where(page)
    hurt = hurt_by(state, page, prompts)
    total, owners = len(state.pages()), len(state.trees[page.session].owners(page.uid))
    nodes = sum(len(t.nodes) for t in state.trees.values())
    stored = struct.unpack_from("<I", state.read(page), 8)[0]
    subprocess.run(["dd", "if=/dev/urandom", f"of={path}", "bs=4096", "count=1",
                    f"seek={offset // 4096 + 2}", "conv=notrunc", "status=none"], check=True)
    cause = f"checksum 0x{stored:08x}, computed 0x{crc32c(state.read(page)[12:]):08x}"
    verify_damage(box.state, [state.line(page, cause)], "dd",
                  f"DAMAGED: 1 of {total} pages, {owners} of {nodes} checkpoints cannot be used")
    serves(box, prompts, hurt, "dd")


@case
def every_field_of_a_page_is_compared():
    """A page forged in one field under a right checksum; then whole pages in wrong places."""
    box, _, _ = made()
    state = State(box.state)
    page = shared_page(state, ["alice/s0", "alice/s1", "alice/s2"])
    good = state.read(page)
    other_user = next(u for u in state.users if state.users[u] == "bob")

    def changed(at, data):
        return sealed(good[:at] + data + good[at + len(data):])

    g = page.generation
    cases = {
        "wrong magic": b"KVPAGE2\n" + good[8:],
        f"count {page.count - 1}, expected {page.count}":
            changed(12, struct.pack("<I", page.count - 1)),
        "position 0, expected 128": changed(16, struct.pack("<I", 0)),
        "page_bytes 4096, expected 20480": changed(20, struct.pack("<I", 4096)),
        f"generation {g - 1}, expected {g}": changed(24, struct.pack("<Q", g - 1)),
        "belongs to another user": changed(32, other_user),
        "made by another model": changed(48, bytes(32)),
        "stands after other tokens": changed(80 + 8, bytes(8)),  # Beyond the tag in the record.
        "belongs to another state directory": changed(112, bytes(16)),
        "cipher 2, expected 0 or 1": changed(128, b"\x02"),
        "encrypted without a key id": changed(128, b"\x01"),
        "its nonce is of another generation": changed(128, b"\x01\0\0\0\x01"),
        "encrypted, in a directory that is not":
            changed(128, b"\x01\0\0\0\x01" + struct.pack("<3xIQ", page.place, g)),
        "header byte 130 is not zero": changed(130, b"\x01"),
        "header byte 255 is not zero": changed(255, b"\x01"),
    }
    for cause, data in cases.items():
        state.write(page, data)
        verify_damage(box.state, [state.line(page, cause)], cause)
    # A token id changed and sealed again: the next page, or a digest, does not follow from it.
    state.write(page, changed(256, struct.pack("<I", 1)))
    code, out, _ = kvdump("verify", box.state)
    check(code == 7 and ("stands after other tokens" in out or "its digest is not" in out),
          f"a token id: {out!r}")
    state.write(page, good)
    verify_ok(box.state, "put back")


@case
def pages_in_the_wrong_place():
    """Swapped, and a copy of another user's: each is named, with whom it hurts."""
    box, prompts, _ = made()
    state = State(box.state)
    mine = shared_page(state, ["alice/s0", "alice/s1"])
    theirs = shared_page(state, ["bob/s0", "bob/s1"])
    own, foreign = state.read(mine), state.read(theirs)

    def causes(page, other):
        if other.count != page.count:
            return f"count {other.count}, expected {page.count}"
        return f"generation {other.generation}, expected {page.generation}"

    state.write(mine, foreign)
    verify_damage(box.state, [state.line(mine, causes(mine, theirs))], "another user's page")
    state.write(theirs, own)
    verify_damage(box.state, [state.line(mine, causes(mine, theirs)),
                              state.line(theirs, causes(theirs, mine))], "swapped")
    hurt = {}
    for page, data in ((mine, own), (theirs, foreign)):
        state.write(page, data)
        hurt.update(hurt_by(state, page, prompts))
    state.write(mine, foreign)
    state.write(theirs, own)
    serves(box, prompts, hurt, "swapped")


@case
def a_stale_page():
    """An older write of the same place, kept aside and put back: only the generation tells."""
    box = Box("synthetic", {**FLAGS, "ssd.bytes": "1MiB"}).start()
    prompt = tokens(300)
    talk = Talk(box.client(), "s")
    patiently(talk.prefill, prompt)
    old, stale = {}, None
    for _ in range(30):
        box.stop()
        state = State(box.state)
        tree = state.trees[state.session("alice/s")]
        for page in tree.pages.values():
            if page.place in old and old[page.place][0] != page.generation:
                stale = stale or page
        if stale:
            break
        for page in tree.pages.values():
            old[page.place] = (page.generation, state.read(page))
        box.start()
        talk = Talk(box.client(), "s")
        prompt = prompt + tokens(3)
        patiently(talk.prefill, prompt)
    if not check(stale, "a place was written twice"):
        return
    found = struct.unpack_from("<II", old[stale.place][1], 12)
    cause = f"generation {old[stale.place][0]}, expected {stale.generation}"
    if found[1] != stale.position:
        cause = f"position {found[1]}, expected {stale.position}"
    if found[0] != stale.count:
        cause = f"count {found[0]}, expected {stale.count}"
    state.write(stale, old[stale.place][1])
    verify_damage(box.state, [state.line(stale, cause)], "stale")
    state.write(stale, sealed(state.read(stale)[:12] + struct.pack(
        "<II", stale.count, stale.position) + state.read(stale)[20:]))
    verify_damage(box.state, [state.line(
        stale, f"generation {old[stale.place][0]}, expected {stale.generation}")], "stale, forged")
    serves(box, {"alice/s": prompt}, hurt_by(state, stale, {"alice/s": prompt}), "stale")


# ---- Segments ----

def lost_lines(state, pages, cause):
    return [state.line(p, cause) for p in pages]


@case
def segments_swapped_foreign_damaged():
    """Another number, another directory, another version, no header."""
    box, prompts, _ = made()
    state = State(box.state)
    first, second = state.segment(0), state.segment(1)
    with open(first, "rb") as f:
        good = f.read()
    with open(second, "rb") as f:
        other = f.read()
    header = good[:HEADER_BYTES]

    def with_header(data):
        overwrite(first, 0, data)

    with_header(other[:HEADER_BYTES])
    verify_damage(box.state, ["segment-000000.kv: is segment 1 under another name"], "number")
    code, said = box.refused()
    check(code == 2 and "is segment 1 under another name" in said, f"the daemon: {said!r}")
    with_header(sealed(header[:32] + bytes(16) + header[48:]))
    verify_damage(box.state, ["segment-000000.kv: belongs to another state directory"], "directory")
    code, said = box.refused()
    check(code == 2 and "belongs to another state directory" in said, f"the daemon: {said!r}")
    with_header(sealed(header[:28] + bytes(20) + header[48:]))  # As before version 1.
    verify_damage(box.state, ["segment-000000.kv: layout version 0, expected 1"], "version")
    code, said = box.refused()
    check(code == 2 and "layout version 0" in said, f"the daemon: {said!r}")
    with open(first, "rb") as f:
        equal(f.read(HEADER_BYTES)[28:32], bytes(4), "a header of another version is left alone")
    with_header(header[:40] + b"\xff" + header[41:])
    verify_damage(box.state, ["segment-000000.kv: header damaged"], "damaged header")
    with_header(bytes(HEADER_BYTES))
    verify_damage(box.state, ["segment-000000.kv: no header: making it was interrupted"], "no header")
    count = len(os.listdir(os.path.join(box.state, "ssd")))
    for number, data in ((count, b""), (count + 1, bytes(2 * HEADER_BYTES))):
        with open(state.segment(number), "wb") as f:
            f.write(data)
    with_header(header)
    equal(verify_ok(box.state, "segments whose making was cut off").splitlines()[:-1],
          [f"unfinished: segment-{count:06}.kv: empty; the next start completes it",
           f"unfinished: segment-{count + 1:06}.kv: no header: making it was interrupted; the next "
           "start completes it"], "a line each")
    with_header(header[:40] + b"\xff" + header[41:])
    serves(box, prompts, {}, "damaged header")  # The pages are there, and the header again.

    box, prompts, _ = made()
    state = State(box.state)
    with open(state.segment(0), "rb") as f:
        one = f.read()
    with open(state.segment(1), "rb") as f:
        two = f.read()
    overwrite(state.segment(0), HEADER_BYTES, two[HEADER_BYTES:])
    overwrite(state.segment(1), HEADER_BYTES, one[HEADER_BYTES:])
    code, out, _ = kvdump("verify", box.state)
    bad = [p for p in state.pages() if p.place < 2 * state.pages_per_segment]
    equal((code, out.count("segment-00000"), out.count("owners:")), (7, len(bad), len(bad)),
          "contents of two segments swapped: exit code, lines")


def used_by_a_daemon(box, state, prompts, lost, what):
    """It drops what needs the lost pages, serves the rest, and what is left is whole."""
    dropped = set()
    for page in lost:
        dropped |= {(page.session, n) for n in state.trees[page.session].below(page.uid)}
    box.start()
    for label, prompt in prompts.items():
        user, name = label.split("/")
        got = Talk(box.client(user), name).prefill(prompt + tokens(9))
        session = state.session(label)
        if (session, state.head(session)) not in dropped:
            resumed(got, REPLAY, even(len(prompt)), f"{what}: {label} is not hurt")
        else:
            check(got.hit_tokens < len(prompt), f"{what}: {label} is hurt, hit {got.hit_tokens}")
    equal(box.stats().wrong_bytes, 0, f"{what}: wrong bytes")
    box.stop()
    verify_ok(box.state, f"{what}: after a daemon had it")


@case
def segment_deleted_and_cut():
    box, prompts, _ = made()
    state = State(box.state)
    gone = [p for p in state.pages() if p.place // state.pages_per_segment == 1]
    os.unlink(state.segment(1))
    verify_damage(box.state, lost_lines(state, gone, "its segment file is missing"), "deleted")
    used_by_a_daemon(box, state, prompts, gone, "deleted")

    box, prompts, _ = made()
    state = State(box.state)
    keep = HEADER_BYTES + 5 * state.page_bytes
    os.truncate(state.segment(1), keep)
    cut = [p for p in state.pages() if p.place // state.pages_per_segment == 1
           and p.place % state.pages_per_segment >= 5]
    verify_damage(box.state, ["segment-000001.kv: cut to %d of %d B" % (keep, 256 << 10)]
                  + lost_lines(state, cut, f"beyond the end of its segment file ({keep} B)"), "cut")
    used_by_a_daemon(box, state, prompts, cut, "cut")


# ---- Records ----

@case
def damaged_records():
    """One record of each kind damaged, under another key, gone, or doubled."""
    box, _, _ = made()
    state = State(box.state)
    label = "bob/s1"
    session = state.session(label)
    tree = state.trees[session]
    page = shared_page(state, [label])
    leaf = max(tree.nodes.values(), key=lambda n: n.tokens)
    parent = tree.nodes[leaf.parent]
    below = [n for n in tree.nodes.values() if n.parent == parent.id]

    def damage(key, value, lines, what):
        state.put(key, value) if value is not None else state.delete(key)
        verify_damage(box.state, lines, what)
        if key in state.records:
            state.put(key, state.records[key])
        else:
            state.delete(key)

    def node_line(node, cause):
        return (f"checkpoint {node.id.hex()} at position {node.tokens} of session {label}: {cause}")

    def flipped(value):
        return value[:20] + bytes([value[20] ^ 1]) + value[21:]

    damage(leaf.key, flipped(leaf.value),
           [f"manifest: record {leaf.key.hex()}: a checkpoint, damaged"], "a checkpoint flipped")
    damage(page.key, flipped(page.value),
           [f"manifest: record {page.key.hex()}: a page, damaged"]
           + [node_line(n, "its page at 128 has no record") for n in tree.nodes.values()
              if page.uid in n.uids], "a page flipped")
    damage(parent.key, None, [node_line(n, "its parent checkpoint has no record") for n in below]
           + [f"session {label}: its record counts {len(tree.nodes)} checkpoints, "
              f"{len(tree.nodes) - 1} are there"],
           "a parent gone")
    digest = leaf.value[:46] + bytes(32) + leaf.value[78:]
    damage(leaf.key, resealed_record(digest),
           [node_line(leaf, "its digest is not that of the tokens in its pages")], "digest")
    other = leaf.key[:18] + bytes(16)
    damage(other, leaf.value, [f"manifest: record {other.hex()}: a checkpoint under the key of "
                               "another"], "a checkpoint under another key")
    damage(b"X1", b"\x01", ["manifest: record 5831: a kind of record that layout version 1 does not "
                           "have"], "a letter of another version")
    twin = b"T" + session + b"P" + struct.pack(">Q", 1 << 50)
    twin_value = resealed_record(page.value[:1] + struct.pack("<Q", 1 << 50) + page.value[9:])
    state.put(twin, twin_value)
    code, out, _ = kvdump("verify", box.state)
    check(code == 7 and out.count("claimed by two records, the other one of session bob/s1") == 1,
          f"one place, two records: {out!r}")
    state.delete(twin)
    key = b"S" + session
    state.delete(key)
    code, out, _ = kvdump("verify", box.state)
    check(code == 7 and out.splitlines()[0] == f"session {session.hex()}: no record, "
          f"{len(tree.nodes)} checkpoints, {len(tree.pages)} pages", f"no session: {out!r}")
    state.put(key, state.records[key])
    user_key = next(k for k in state.records if k[:1] == b"U")
    state.put(user_key, flipped(state.records[user_key]))
    code, out, _ = kvdump("verify", box.state)
    check(code == 7 and "manifest: a user's record is damaged" in out, f"a user: {out!r}")
    code, out, err = kvdump("print", "--json", box.state)
    equal((code, json.loads(out)["users"], "a user's record is damaged" in err), (7, 1, True),
          "print --json of a damaged user: exit code, users, stderr")
    state.put(user_key, state.records[user_key])
    store = state.records[b"M"]
    damage(b"M", resealed_record(store[:1] + bytes(16) + store[17:]),
           ["manifest: belongs to another state directory"], "another directory's manifest")
    state.put(b"M", resealed_record(store[:1] + bytes(16) + store[17:]))
    code, said = box.refused()
    check(code == 2 and "belongs to another state directory" in said, f"the daemon: {said!r}")
    state.put(b"M", store)
    verify_ok(box.state, "records put back")


@case
def acknowledged_batches():
    """The file beside the manifest: whole, one slot rotten, both, another's, ahead of the manifest."""
    box, _, _ = made()
    path = os.path.join(box.state, "acknowledged")
    with open(path, "rb") as f:
        slots = f.read()
    numbers = [struct.unpack_from("<Q", slots, at + 32)[0] for at in (0, 4096)]
    state = State(box.state)
    batches, = struct.unpack_from("<Q", state.records[b"C"], 1)
    equal((len(slots), max(numbers)), (8192, batches), "bytes, and the last batch noted")
    code, out, _ = kvdump("print", "--json", box.state)
    said = json.loads(out)
    equal((code, said["batches"], said["batches_acknowledged"]), (0, batches, batches), "print")

    def slot(number, directory=state.id):
        return sealed(slots[:16] + directory + struct.pack("<Q", number) + slots[40:4096])

    overwrite(path, 4096 * numbers.index(max(numbers)) + 33, b"\x77")
    verify_ok(box.state, "one slot torn")
    overwrite(path, 0, bytes(b ^ 1 for b in slots))
    verify_damage(box.state, ["acknowledged: damaged; the next start of a daemon writes it anew"],
                  "both slots")
    overwrite(path, 0, slot(1, bytes(16)) + slot(2, bytes(16)))
    verify_damage(box.state, ["acknowledged: belongs to another state directory"], "another's")
    overwrite(path, 0, slot(batches + 7) + slot(batches + 6))
    verify_damage(box.state, [f"manifest: lacks the last 7 batches of records: {batches + 7} were "
                              f"acknowledged, it holds {batches}"], "ahead")
    os.unlink(path)
    verify_ok(box.state, "without the file")
    with open(path, "wb") as f:
        f.write(slots)
    verify_ok(box.state, "as it was")


@case
def damaged_rocksdb():
    """RocksDB's own files flipped: named as the manifest's, exit 7, no crash."""
    box, _, _ = made()
    folder = os.path.join(box.state, "manifest")
    State(box.state)  # Opening it has made tables of its log.
    tables = [n for n in os.listdir(folder) if n.endswith(".sst")]
    path = os.path.join(folder, max(tables, key=lambda n: os.path.getsize(
        os.path.join(folder, n))))
    size = os.path.getsize(path)
    with open(path, "rb") as f:
        data = f.read()
    for at in (10, size // 2):
        overwrite(path, at, bytes(b ^ 0x55 for b in data[at:at + 16]))
        code, out, err = kvdump("verify", box.state)
        check(code == 7 and "manifest: " in out, f"flipped at {at}: {code} {out!r} {err!r}")
        overwrite(path, at, data[at:at + 16])
    current = os.path.join(folder, "CURRENT")
    os.unlink(current)
    code, out, err = kvdump("verify", box.state)
    check(code in (1, 7) and (out + err).count("\n") == 1, f"no CURRENT: {code} {out!r} {err!r}")


@case
def random_flips():
    """A flipped bit in any file: named where it hurts, or harmless; no crash, nothing passed over."""
    box, _, _ = made()
    state = State(box.state)
    tree_of = {p.place: p for p in state.pages()}
    whole = verify_ok(box.state, "before")
    files = [(folder, name) for folder in ("", "ssd", "manifest")
             for name in os.listdir(os.path.join(box.state, folder))
             if os.path.isfile(os.path.join(box.state, folder, name))]
    said = {"ok": 0, "named": 0}
    for round_number in range(120):
        folder, name = files[round_number % len(files)]
        path = os.path.join(box.state, folder, name)
        size = os.path.getsize(path)
        if size == 0:
            continue
        at, bit = rng.randrange(size), 1 << rng.randrange(8)
        with open(path, "rb") as f:
            f.seek(at)
            byte = f.read(1)[0]
        overwrite(path, at, bytes([byte ^ bit]))
        code, out, err = kvdump("verify", box.state)
        what = f"{name} byte {at} of {size}: {code} {out!r} {err!r}"
        if folder == "ssd":
            place = (at - HEADER_BYTES) // state.page_bytes
            place += int(name[8:14]) * state.pages_per_segment
            page = tree_of.get(place) if (at - HEADER_BYTES) // state.page_bytes \
                < state.pages_per_segment else None
            if at < HEADER_BYTES:
                equal(out.splitlines()[:-1], [f"{name}: header damaged"], what)
            elif page is None:
                equal((code, out), (0, whole), what)
            else:
                lines = out.splitlines()
                check(code == 7 and len(lines) == 2 and lines[0].startswith(
                    state.line(page, "").split("): ")[0]), what)
        elif name == "superblock":
            check(code == 7 and out.count("one of its two copies is damaged") == 1, what)
        elif code == 0:
            equal(out, whole, what)
        else:
            check(code in (1, 7) and (out + err).strip(), what)
        said["ok" if code == 0 else "named"] += 1
        overwrite(path, at, bytes([byte]))
    print(f"flips: {said}", flush=True)
    equal(verify_ok(box.state, "after"), whole, "after all flips were taken back")


if __name__ == "__main__":
    run_cases(__doc__)
