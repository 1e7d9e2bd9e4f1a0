"""Encryption at rest: what is on disk says nothing, the right key opens it, a wrong one touches
nothing, and a key that is dropped or replaced is gone.

What a directory holds is read by tests/integration/state_files.py, by the offsets of docs/format.md;
what must not be in it are the token ids and the rows that the same turns leave in a directory that
is not encrypted.
"""

import hashlib
import os
import re
import struct
import subprocess
import time

from cli import Tool, token_file
from daemon import BUILD, PLANT, TEST_BINARY, Daemon, admin_pb, check, equal, expect, pack, pb, scratch
from faults import SANITIZED
from state_files import State, kvdump, sealed
from talk import (
    EXACT, MISS, REPLAY, Box, Talk, case, even, flip, overwrite, patiently, resumed, rng, run_cases,
    skip_case, tokens)

FLAGS = {"ssd.segment_bytes": "256KiB", "ssd.bytes": "8MiB"}
ID = rb"(?:[^\x00][\x00\x01]|\x00\x01)\x00\x00"  # Of a token of the model `tiny`: 1 to 511.
RUN = re.compile(rb"(?s)(?=(" + ID * 4 + rb"))")


def key_file(directory=None, name="master.key", text=None):
    path = os.path.join(directory or scratch(), name)
    with open(path, "w", encoding="ascii") as f:
        os.chmod(path, 0o600)
        f.write(text or os.urandom(32).hex() + "\n")
    return path


def put_key(path):
    """Another key in its place, by rename; what was there."""
    with open(path, "rb") as f:
        before = f.read()
    other = key_file(os.path.dirname(path), "next.key")
    os.rename(other, path)
    return before


def encrypted(backend="synthetic", flags=None, **kwargs):
    box = Box(backend, dict(FLAGS, **{"ssd.encryption": "on"}, **(flags or {})), **kwargs)
    box.key = key_file(box.directory)
    box.flags["ssd.master_key_file"] = box.key
    return box


def turns(box, prompts):
    """Each session saves half of its prompt, then all of it; what was stored is durable."""
    for label, prompt in prompts.items():
        user, name = label.split("/")
        talk = Talk(box.client(user), name)
        half = len(prompt) // 2
        equal(patiently(talk.prefill, prompt[:half], level=pb.LEVEL_SSD).save_reason, "", label)
        equal(patiently(talk.prefill, prompt, level=pb.LEVEL_SSD).save_reason, "", label)
        talk.close()


def come_back(box, prompts, what):
    for label, prompt in prompts.items():
        user, name = label.split("/")
        resumed(Talk(box.client(user), name).prefill(prompt + tokens(5)), REPLAY,
                even(len(prompt)), f"{what}: {label}")


def some_prompts(count=4):
    return {f"{('alice', 'bob')[i % 2]}/s{i}": tokens(rng.randrange(300, 700))
            for i in range(count)}


def files_of(directory):
    for folder, _, names in os.walk(directory):
        for name in sorted(names):
            yield os.path.join(folder, name)


def contents(directory):
    """Every file but the lock, which holds a process id."""
    found = {}
    for path in files_of(directory):
        with open(path, "rb") as f:
            found[os.path.relpath(path, directory)] = hashlib.sha256(f.read()).hexdigest()
    found.pop("lock", None)
    return found


def found_runs(directory, prompts):
    """Places where any four consecutive ids of a prompt stand."""
    known = {pack(prompt[i:i + 4]) for prompt in prompts.values()
             for i in range(len(prompt) - 3)}
    hits = []
    for path in files_of(directory):
        with open(path, "rb") as f:
            data = f.read()
        hits += [(os.path.relpath(path, directory), match.start())
                 for match in RUN.finditer(data) if match.group(1) in known]
    return hits


def found_bytes(directory, needles):
    hits = []
    for path in files_of(directory):
        with open(path, "rb") as f:
            data = f.read()
        hits += [path for needle in needles if needle in data]
    return hits


def rows_of(state, each=6):
    """Bytes of rows, from places in each page that are not zeros."""
    needles = set()
    for page in state.pages():
        data = state.read(page)
        for _ in range(200):
            at = rng.randrange(768, len(data) - 24)
            needle = data[at:at + 24]
            if len(set(needle)) > 12:
                needles.add(needle)
            if len(needles) % each == 0:
                break
    return needles


def header_of(state, page):
    """(cipher, key id, place, generation in the nonce, run)"""
    data = state.read(page)
    cipher, zeros, key = struct.unpack_from("<HHI", data, 128)
    equal(zeros, 0, "bytes 130 and 131")
    place, generation = struct.unpack_from("<IQ", data, 136)
    return cipher, key, place, generation, data[164:180]


def nothing_to_read(io_backend):
    prompts = some_prompts()
    plain = Box("synthetic", dict(FLAGS, **{"io.backend": io_backend})).start()
    turns(plain, prompts)
    plain.stop()
    rows = rows_of(State(plain.state))
    check(len(rows) > 20, f"rows to look for: {len(rows)}")
    # The search is seen to find: ids and rows in the segments; no id is in the manifest's files.
    hits = found_runs(plain.state, prompts)
    check(len(hits) > 100 and all(path.startswith("ssd/") for path, _ in hits),
          f"plain: ids in segments only: {len(hits)}, {hits[:3]}")
    equal(found_runs(os.path.join(plain.state, "manifest"), prompts), [], "plain: manifest")
    check(len(found_bytes(plain.state, rows)) >= len(rows), "plain: rows are found")

    box = encrypted(flags={"io.backend": io_backend}).start()
    equal(box.stats().io_backend, "io_uring" if io_backend != "pool" else "pool", "I/O backend")
    turns(box, prompts)
    saved = box.counter("cached_pages_encrypted_total")
    check(saved > 8, f"pages encrypted: {saved}")
    box.no_wrong_bytes()
    box.crash()
    come_back(box, prompts, "after kill -9")
    check(box.counter("cached_pages_decrypted_total") > 8, "pages decrypted")
    equal(box.counter("cached_pages_read_plain_total"), 0, "none was plain")
    box.no_wrong_bytes()
    box.stop()
    equal(found_runs(box.state, prompts), [], "encrypted: ids")
    equal(found_bytes(box.state, rows), [], "encrypted: rows")
    salts = found_bytes(box.state, [State(plain.state).records[key][1:33]
                                    for key in State(plain.state).records if key[:1] == b"U"])
    equal(salts, [], "salts of another directory")
    state = State(box.state)
    equal(state.features & 2, 2, "bit 1")
    nonces = set()
    for page in state.pages():
        cipher, key, place, generation, run = header_of(state, page)
        equal((cipher, key, place, generation), (1, 1, page.place, page.generation), "header")
        nonces.add((page.session, run, place, generation))
    equal(len(nonces), len(state.pages()), "each nonce once")
    equal(len({nonce[1] for nonce in nonces}), 2, "one run for each start")
    # A page in plain among them is found.
    page = state.pages()[0]
    data = bytearray(state.read(page))
    data[256:768] = pack((list(prompts.values())[0] * 2)[:128])
    state.write(page, bytes(data))
    check(len(found_runs(box.state, prompts)) > 100, "a planted page is found")


@case
def nothing_to_read_by_io_uring():
    nothing_to_read("auto")


@case
def nothing_to_read_by_threads():
    nothing_to_read("pool")


@case
def rows_of_the_engine():
    """The cpu backend: the same answers from an encrypted directory, window or not."""
    prompt, more = tokens(280), tokens(40)
    bits = []
    for box in (Box("cpu", FLAGS).start(), encrypted("cpu").start()):
        talk = Talk(box.client(), "s")
        talk.prefill(prompt, level=pb.LEVEL_SSD)
        talk.close()
        box.restart()
        talk = Talk(box.client(), "s")
        resumed(talk.prefill(prompt + more), REPLAY, 280, "after a restart")
        bits.append(talk.decode(12).bits)
        box.stop()
    equal(bits[0], bits[1], "the same logits")


def refused(box, words, what):
    """Says so in one line, ends with 2, and the directory is as before."""
    before = contents(box.state) if os.path.isdir(box.state) else None
    code, text = box.refused()
    equal(code, 2, f"{what}: exit code")
    lines = text.strip().splitlines()
    check(len(lines) == 1 and all(word in lines[0] for word in words),
          f"{what}: {words} in {text!r}")
    if before is not None:
        equal(contents(box.state), before, f"{what}: the directory")


@case
def a_wrong_key_touches_nothing():
    box = encrypted().start()
    prompts = some_prompts(2)
    turns(box, prompts)
    status = Tool("unix:" + box.socket, token_file(box.directory, "ops")).code(0, "status").stdout
    master = re.search(r"encrypted yes, master key ([0-9a-f]{16}), 2 keys", status)
    check(master, f"status: {status}")
    master = master.group(1) if master else ""
    box.stop()
    with open(box.key, "rb") as f:
        right = f.read()

    def refused_with(words, what):
        refused(box, words, what)

    put_key(box.key)
    refused_with(["is encrypted with master key " + master, "put the right one there"], "wrong key")
    os.remove(box.key)
    refused_with(["open the master key file", "No such file"], "no file")
    os.mkdir(box.key)
    refused_with(["no regular file"], "a folder")
    os.rmdir(box.key)
    for text in ("", "abc", "0" * 63, "0" * 65 + "\n", "g" * 64):
        key_file(box.directory, "master.key", text or " ")
        refused_with(["want 32 bytes, or 64 hexadecimal digits"], f"key {text!r}")
    inside = os.path.join(box.state, "master.key")
    os.rename(box.key, inside)
    box.flags["ssd.master_key_file"] = inside
    refused_with(["lies in the state directory"], "a key in the directory it opens")
    os.rename(inside, box.key)
    box.flags["ssd.master_key_file"] = box.key
    for text in ("0" * 64, "\0" * 32):
        key_file(box.directory, "master.key", text)
        refused_with(["nothing but zeros"], f"key {text!r}")
    with open(box.key, "wb") as f:
        f.write(right)
    for mode in (0o640, 0o604, 0o620, 0o644):
        os.chmod(box.key, mode)
        refused_with([f"mode {mode:03o}", "chmod 600"], f"mode {mode:o}")
    os.chmod(box.key, 0o400)
    del box.flags["ssd.master_key_file"]
    refused_with(["ssd.encryption = on needs ssd.master_key_file"], "on, and no key")
    box.flags["ssd.encryption"] = "off"
    refused_with(["is encrypted: set ssd.master_key_file", master], "off, and no key")
    box.flags.update({"ssd.encryption": "on", "ssd.master_key_file": box.key,
                      "ssd.master_key_credential": "k"})
    refused_with(["set one of"], "two places")
    del box.flags["ssd.master_key_credential"]
    # 32 bytes as they are, and as a credential of systemd's.
    with open(box.key, "rb") as f:
        raw = bytes.fromhex(f.read().decode().strip())
    del box.flags["ssd.master_key_file"]
    box.flags["ssd.master_key_credential"] = "cached.key"
    refused_with(["CREDENTIALS_DIRECTORY"], "no such folder")
    folder = scratch()
    path = os.path.join(folder, "cached.key")
    with open(path, "wb") as f:
        f.write(raw)
    box.env = dict(os.environ, CREDENTIALS_DIRECTORY=folder)
    os.chmod(path, 0o444)
    refused_with(["mode 444"], "a credential for everybody")
    os.chmod(path, 0o440)
    box.start()
    come_back(box, prompts, "by credential")
    box.no_wrong_bytes()
    box.stop()


@case
def on_and_off_and_an_older_directory():
    box = Box("synthetic", FLAGS).start()
    old = some_prompts(2)
    turns(box, old)
    box.stop()
    before = State(box.state)
    equal((before.features & 2, [k for k in before.records if k[:1] == b"K"]), (0, []),
          "as an older build leaves it")
    check(all(before.records[b"U" + u][0] == 1 for u in before.users), "salts in plain")
    plain_bytes = contents(box.state)
    code, text = kvdump("verify", box.state)[:2]
    equal(code, 0, f"verify: {text}")
    equal(contents(box.state), plain_bytes, "kvdump changed nothing")

    box.flags.update({"ssd.encryption": "on", "ssd.master_key_file": key_file(box.directory)})
    box.start()
    tool = Tool("unix:" + box.socket, token_file(box.directory, "ops"))
    come_back(box, old, "written in plain")
    check(box.counter("cached_pages_read_plain_total") > 0, "plain pages are counted")
    new = {"alice/n1": tokens(400), "bob/n2": tokens(500)}
    turns(box, new)
    equal(tool.json("du", "--json")["encryption"], "on", "du")
    tool.code(0, "scrub", "start", "--wait")
    left = tool.json("scrub", "status", "--json")["plain"]
    box.stop()
    state = State(box.state)
    equal(state.features & 2, 2, "bit 1")
    equal(sorted(k[1:17] for k in state.records if k[:1] == b"K"), sorted(state.users),
          "a key for each user")
    check(all(state.records[b"U" + u][0] == 2 for u in state.users), "salts are encrypted")
    salts = [before.records[b"U" + u][1:33] for u in before.users]
    for salt in salts:
        check(all(salt not in value for value in state.records.values()), "no salt in a record")
    ciphers = {page.uid: header_of(state, page)[0] for page in state.pages()}
    plain = sum(1 for cipher in ciphers.values() if cipher == 0)
    check(0 < plain < len(ciphers), f"{plain} of {len(ciphers)} are plain")
    equal(left, plain, "the scrub counts plain pages")
    key = box.flags["ssd.master_key_file"]
    code, text, _ = kvdump("verify", "--master-key", key, box.state)
    check(code == 0 and f"not encrypted: {plain} pages" in text and "opened" in text, text)

    # Off again, with the key: all of it is read, and what is written is plain.
    box.flags["ssd.encryption"] = "off"
    box.start()
    tool = Tool("unix:" + box.socket, token_file(box.directory, "ops"))
    equal(tool.json("du", "--json")["encryption"], "off, and some pages are encrypted", "du")
    check("encrypted no more" in tool.code(0, "status").stdout, "status")
    for label, prompt in new.items():
        user, name = label.split("/")
        resumed(Talk(box.client(user), name).prefill(prompt + tokens(5)), REPLAY,
                even(len(prompt)), f"off: {label}")
    equal(box.counter("cached_encryption_on"), 0, "off")
    last = {"alice/l": tokens(300)}
    turns(box, last)
    equal(box.counter("cached_pages_encrypted_total"), 0, "nothing is encrypted")
    box.restart()
    come_back(box, last, "written while off")
    box.no_wrong_bytes()
    box.stop()
    check(len(found_runs(box.state, last)) > 50, "in plain, as it was asked for")
    state = State(box.state)
    check(all(state.records[b"U" + u][0] == 2 for u in state.users), "salts stay encrypted")
    code, text, _ = kvdump("verify", "--master-key", key, box.state)
    equal(code, 0, f"verify: {text}")


@case
def compaction_encrypts_what_it_moves():
    box = Box("synthetic", dict(FLAGS, **{"ssd.compact_below": "0"})).start()
    keep = {f"alice/k{i}": tokens(140) for i in range(8)}
    for i, (label, prompt) in enumerate(keep.items()):
        turns(box, {label: prompt, f"bob/g{i}": tokens(600)})
    for i in range(8):
        box.client("bob").session.DeleteSession(pb.DeleteSessionRequest(session_id=f"g{i}"))
    box.stop()
    box.flags.update({"ssd.encryption": "on", "ssd.master_key_file": key_file(box.directory),
                      "ssd.compact_below": "0.9", "ssd.compact_rate": "1GiB"})
    box.start()
    end = time.monotonic() + 20
    while box.counter("cached_compacted_bytes_total") < 6 * 20480 and time.monotonic() < end:
        time.sleep(0.05)
    box.stop()
    state = State(box.state)
    moved = [page for page in state.pages() if header_of(state, page)[0] == 1]
    check(len(moved) >= 6, f"{len(moved)} of {len(state.pages())} pages were moved, encrypted")
    box.start()
    come_back(box, keep, "after compaction")
    equal(box.tier("ssd").note, "rows, durable", "the tier")
    box.no_wrong_bytes()
    box.stop()


def rotate(box, code=0):
    tool = Tool("unix:" + box.socket, token_file(box.directory, "ops"))
    return tool.json("key", "rotate", "--json") if code == 0 else tool.code(code, "key", "rotate")


@case
def the_key_is_rotated():
    box = encrypted().start()
    prompts = some_prompts(3)
    turns(box, prompts)
    same = rotate(box)
    equal((same["rotated"], same["keys"]), (False, 2), "the same key again")
    right = put_key(box.key)
    got = rotate(box)
    equal((got["rotated"], got["before"], got["keys"]), (True, same["master_key"], 2), "rotated")
    equal(rotate(box)["rotated"], False, "an answer that was lost: again")
    check(got["master_key"] != same["master_key"], "another id")
    turns(box, {"alice/after": tokens(300)})
    expect(box.client("stats").admin.RotateKey, admin_pb.RotateKeyRequest(),
           code="PERMISSION_DENIED", reason="ROLE_DENIED")
    equal(box.counter("cached_key_rotations_total"), 1, "counted")
    box.crash()
    come_back(box, prompts, "after a rotation and kill -9")
    box.no_wrong_bytes()
    box.stop()
    with open(box.key, "rb") as f:
        new = f.read()
    with open(box.key, "wb") as f:
        f.write(right)
    refused(box, [got["master_key"], same["master_key"]], "the old key")
    code, _, text = kvdump("verify", "--master-key", box.key, box.state)
    check(code == 1 and got["master_key"] in text, f"kvdump with the old key: {text}")
    with open(box.key, "wb") as f:
        f.write(new)
    code, text, _ = kvdump("verify", f"--master-key={box.key}", box.state)
    check(code == 0 and "opened with the master key" in text, text)
    # What is wrong with the new one is said, and the old one stays.
    box.start()
    os.chmod(box.key, 0o644)
    got = expect(box.operator.RotateKey, admin_pb.RotateKeyRequest(), code="FAILED_PRECONDITION",
                 reason="MASTER_KEY_INVALID", field="ssd.master_key_file")
    check(got is not None and "mode 644" in got.message, f"the sentence: {got!r}")
    check("mode 644" in rotate(box, 1).stderr, "cachectl says it")
    os.chmod(box.key, 0o600)
    come_back(box, prompts, "after one that was refused")
    box.restart()
    box.stop()
    plain = Box("synthetic", FLAGS).start()
    expect(plain.operator.RotateKey, admin_pb.RotateKeyRequest(), code="FAILED_PRECONDITION",
           reason="ENCRYPTION_OFF", field="ssd.encryption")
    equal(plain.counter("cached_encryption_on"), 0, "off")
    plain.stop()


def cut_off(plant, took_place):
    """kill -9 in the middle: one of the two keys opens it, and the sentence says which."""
    box = encrypted(binary=TEST_BINARY, arguments=["--plant", plant]).start()
    prompts = some_prompts(2)
    turns(box, prompts)
    old = put_key(box.key)
    tool = Tool("unix:" + box.socket, token_file(box.directory, "ops"))
    tool.run("key", "rotate")
    equal(box.wait(), -9, f"{plant}: killed")
    box.arguments, box.binary = [], Daemon().binary
    with open(box.key, "rb") as f:
        new = f.read()
    right, wrong = (new, old) if took_place else (old, new)
    with open(box.key, "wb") as f:
        f.write(wrong)
    refused(box, ["a key rotation of", "was cut off " + ("when" if took_place else "before"),
                  f"start it with the {'new' if took_place else 'old'} key"], plant)
    with open(box.key, "wb") as f:
        f.write(os.urandom(32))
    refused(box, ["is encrypted with master key"], f"{plant}: a third key")
    with open(box.key, "wb") as f:
        f.write(right)
    box.start()
    check(box.logged("event=key_rotation_ended"), f"{plant}: the log says so")
    come_back(box, prompts, plant)
    box.restart()
    check(has_one_key(box), f"{plant}: the superblock names one key")
    # And once more, whole.
    put_key(box.key)
    equal(rotate(box)["rotated"], True, f"{plant}: rotated")
    box.crash()
    come_back(box, prompts, f"{plant}: in the end")
    box.no_wrong_bytes()
    box.stop()


def has_one_key(box):
    with open(os.path.join(box.state, "superblock"), "rb") as f:
        data = f.read()
    return data[64:100].strip(b"\0") != b"" and data[100:136].strip(b"\0") == b""


@case
def a_rotation_is_cut_off():
    if PLANT:
        return
    cut_off("rotate-cut-before", False)
    cut_off("rotate-cut-after", True)


@case
def erasing_drops_the_key():
    box = encrypted().start()
    prompts = some_prompts(4)
    turns(box, prompts)
    box.restart()
    box.stop()
    before = State(box.state)
    alice = next(u for u, name in before.users.items() if name == "alice")
    key = b"K" + alice + struct.pack(">I", 1)
    check(key in before.records, "alice has a key")
    wrapped = before.records[key][21:53]
    box.start()
    box.operator.EraseUser(admin_pb.EraseUserRequest(user="alice"))
    equal(box.counter("cached_encryption_keys", box_labels(box)), 1, "one key is left")
    box.kill()
    state = State(box.state)
    check(key not in state.records and b"U" + alice not in state.records, "with her record")
    equal([k for k in state.records if wrapped in state.records[k]], [], "in no record")
    box.start()
    come_back(box, {k: v for k, v in prompts.items() if k.startswith("bob/")}, "bob")
    talk = Talk(box.client("alice"), "s0")
    resumed(talk.prefill(prompts["alice/s0"]), MISS, 0, "alice begins anew")
    talk.close()
    box.restart()
    equal(box.counter("cached_encryption_keys", box_labels(box)), 2, "with a key of her own")
    box.stop()
    check(State(box.state).records[key][21:53] != wrapped, "another one")


def box_labels(box):
    return next(c.labels for c in box.stats().counters if c.name == "cached_encryption_keys")


@case
def damage_is_found_with_a_key_and_without():
    box = encrypted(flags={"ssd.compact_below": "0"}).start()
    prompts = some_prompts(4)
    turns(box, prompts)
    box.stop()
    state = State(box.state)
    code, text, _ = kvdump("verify", box.state)
    check(code == 0 and re.search(r"encrypted: \d+ pages; without --master-key", text), text)
    listing = kvdump("print", "--session", "alice/s0", box.state)[1]
    check("AES-256-GCM   1" in listing and "master key" in listing, listing)
    bad = state.pages()[0]
    path, offset = state.where(bad)
    flip(path, offset + rng.choice((rng.randrange(128, 180), rng.randrange(256, 20480))))
    code, text, _ = kvdump("verify", box.state)
    check(code == 7 and f"page {bad.place % state.pages_per_segment} (offset" in text, text)
    box.start()
    label = state.label(bad.session)
    got = {}
    for name, prompt in prompts.items():
        user, session = name.split("/")
        got[name] = Talk(box.client(user), session).prefill(prompt + tokens(5))
    check(got[label].reason == "CORRUPT", f"{label}: {got[label].reason}")
    for name in prompts:
        if name != label:
            equal(got[name].reason in ("", "NONE", "NEVER_STORED", "LOST_NODE"), True,
                  f"{name}: {got[name].reason}")
    box.no_wrong_bytes()
    box.stop()
    # A page of another place, whole and with a right checksum: not what its place should hold.
    box = encrypted(flags={"ssd.compact_below": "0"}).start()
    turns(box, {"alice/a": tokens(128), "alice/b": tokens(128)})
    box.stop()
    state = State(box.state)
    first, second = state.pages()[:2]
    data = state.read(first)
    state.write(first, state.read(second))
    state.write(second, data)
    code, text, _ = kvdump("verify", "--master-key", box.key, box.state)
    check(code == 7 and text.count("generation") == 2, text)


def memory_of(pid):
    """(flags, bytes) of every mapping that can be written to."""
    maps, flags, here = [], {}, None
    with open(f"/proc/{pid}/smaps", encoding="ascii", errors="replace") as f:
        for line in f:
            found = re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+) ", line)
            if found:
                here = (int(found.group(1), 16), int(found.group(2), 16), found.group(3))
                maps.append(here)
            elif line.startswith("VmFlags:"):
                flags[here] = line.split()[1:]
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for begin, end, rights in maps:
            if "w" not in rights:
                continue
            memory.seek(begin)
            try:
                yield flags[(begin, end, rights)], memory.read(end - begin)
            except OSError:
                continue


@case
def keys_stay_where_they_are_locked():
    """No copy of the master key lies anywhere else in the daemon's memory, nor the file's text."""
    if SANITIZED:
        skip_case("keys_stay_where_they_are_locked: a sanitizer's memory is too much to look through")
        return
    box = encrypted().start()
    turns(box, some_prompts(2))
    box.restart()
    put_key(box.key)
    equal(rotate(box)["rotated"], True, "rotated")
    with open(box.key, "rb") as f:
        text = f.read().strip()
    key = bytes.fromhex(text.decode())
    inside, outside, written = 0, 0, 0
    for flags, data in memory_of(box.process.pid):
        if "dd" in flags and "lo" in flags and len(data) <= 1 << 20:
            inside += data.count(key)
        else:
            outside += data.count(key)
        written += data.count(text)
    equal((outside, written), (0, 0), "copies of the key, and of its text, elsewhere")
    equal(inside, 1, "and one where it belongs")
    equal(box.counter("cached_encryption_unlocked_errno"), 0, "locked")
    doctor = Tool("unix:" + box.socket, token_file(box.directory, "ops")).run("doctor").stdout
    check("new pages on SSD are encrypted" in doctor, f"doctor: {doctor}")
    box.stop()


@case
def many_users():
    """mkstate --master-key: a daemon finds all of it, and starts no slower for the keys."""
    folder = scratch()
    directory, key = os.path.join(folder, "state"), key_file(folder)
    made = subprocess.run(
        [os.path.join(BUILD, "tools", "mkstate"), "--checkpoints", "3000", "--users", "600",
         "--sessions", "2", "--master-key", key, directory], capture_output=True, check=False)
    equal(made.returncode, 0, f"mkstate: {made.stderr}")
    code, text, _ = kvdump("verify", "--master-key", key, directory)
    check(code == 0 and "OK: 3000 checkpoints" in text and "not encrypted" not in text, text)
    box = encrypted(flags={"ssd.segment_bytes": "64MiB", "ssd.bytes": "256MiB",
                           "state.dir": directory})
    box.flags["ssd.master_key_file"] = key
    box.start()
    equal(box.counter("cached_encryption_keys", box_labels(box)), 600, "a key for each user")
    check(box.logged("recovered 3000 checkpoints, dropped 0"), "recovered")
    put_key(key)
    equal(rotate(box)["keys"], 600, "all of them rotated")
    box.crash()
    equal(box.counter("cached_encryption_keys", box_labels(box)), 600, "and there again")
    box.stop()
    code, text, _ = kvdump("verify", "--master-key", key, directory)
    check(code == 0 and "OK: 3000 checkpoints" in text, text)


@case
def the_golden_directory():
    """tests/data/format-v1-encrypted, by kvdump: with its key, without it, with another."""
    directory = os.path.join(scratch(), "golden")
    unpack = [os.path.join(BUILD, "tests", "test_format_golden"), "--unpack-encrypted", directory]
    subprocess.run(unpack, check=True, stdout=subprocess.DEVNULL)
    before = contents(directory)
    key = key_file(text=bytes(range(32)).hex())
    code, text, _ = kvdump("verify", "--master-key", key, directory)
    check(code == 0 and "encrypted: 5 pages, opened" in text and "OK: 4 checkpoints" in text, text)
    code, text, _ = kvdump("verify", directory)
    check(code == 0 and "ids and rows are not compared" in text and "OK: 4 checkpoints" in text,
          text)
    code, _, text = kvdump("verify", "--master-key", key_file(), directory)
    check(code == 1 and "encrypted with master key" in text, text)
    code, _, text = kvdump("verify", "--master-key")
    check(code == 2 and "--master-key: no file" in text, text)
    equal(contents(directory), before, "kvdump changed nothing")
    state = State(directory)
    page = state.pages()[0]
    # One bit of the ciphertext and the checksum made right: only who has the key sees it.
    data = bytearray(state.read(page))
    data[300] ^= 4
    state.write(page, sealed(data))
    equal(kvdump("verify", directory)[0], 0, "without the key it looks whole")
    code, text, _ = kvdump("verify", "--master-key", key, directory)
    check(code == 7 and "encrypted with another key" in text, text)


if __name__ == "__main__":
    run_cases(__doc__)
