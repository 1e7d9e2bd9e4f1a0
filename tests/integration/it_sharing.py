"""Many callers, one engine and one model: who waits for whom, what bad calls change for others, what
two daemons share, and what happens when the model goes away."""

import os
import re
import shutil
import threading
import time

from cli import Tool, token_file
from daemon import check, equal, expect, pack, pb, scratch
from talk import EXACT, MISS, Box, Talk, case, model_dir, resumed, run_cases, tokens

CHUNK = 64


def computed(box):
    return box.counter("cached_engine_prefill_tokens_total")


@case
def a_short_turn_does_not_wait_for_long_prompts():
    """One user with ten prompts of 8k, another's turn of 50 tokens waits for two chunks at most: the
    one under way, and the one it shares a pass with.  More may begin on either side of it before the
    counter is read, so the best of some counts here; test_worker_fair.c counts every one exactly."""
    box = Box("cpu", {"engine.chunk_tokens": str(CHUNK), "engine.live_sessions": "16",
                      "hbm.bytes": "128MiB", "pool.bytes": "64MiB"}).start()
    for number in range(10):
        talk = Talk(box.client(), f"long{number}")
        threading.Thread(target=long_prefill, args=(talk, number), daemon=True).start()
    while computed(box) < 4 * CHUNK:
        pass
    bob = Talk(box.client("bob"), "short")
    waited = []
    while len(waited) < 40 and (not waited or min(waited) > 2 * CHUNK):
        before = computed(box)
        got = bob.prefill(tokens(50))
        waited.append(computed(box) - before - got.computed_tokens)
        equal(got.outcome, MISS, "a new prompt each time")
    print(f"rows of others while a turn of 50 tokens ran: {waited}")
    check(min(waited) <= 2 * CHUNK, f"two chunks: {waited}")
    before = computed(box)
    answer = bob.decode(20, temperature=1.0, seed=2)
    per_step = (computed(box) - before) / len(answer.tokens)
    print(f"rows of others for each decoded token: {per_step:.1f}")
    check(per_step <= 1.5 * CHUNK, "a step waits for one chunk")
    check(computed(box) < 10 * 8192, "they were not done before")
    box.hang_up()  # Nobody waits any more: the prompts end at the next pass.
    box.kill()


def long_prefill(talk, number):
    try:
        talk.prefill([(number * 31 + i * 7) % 500 for i in range(8192)], timeout=120)
    except Exception:  # The daemon goes away while they run.
        pass


def a_model_of_its_own():
    """A daemon on a copy of the model, with a session of one checkpoint at 200."""
    path = os.path.join(scratch(), "model")
    shutil.copytree(model_dir(), path)
    box = Box("cpu", {"engine.model_dir": path}).start()
    talk = Talk(box.client(), "s")
    prompt = tokens(200)
    talk.prefill(prompt)
    return path, box, talk, prompt


def is_refused(talk, prompt):
    for ids in (prompt + tokens(80), tokens(20)):
        expect(talk.prefill, ids, code="UNAVAILABLE", reason="MODEL_LOST", field="engine.model_dir")


@case
def a_model_file_that_shrinks_ends_calls_not_the_daemon():
    path, box, talk, prompt = a_model_of_its_own()
    os.truncate(os.path.join(path, "model.safetensors"), 8192)
    is_refused(talk, prompt)
    check(f"{path}/model.safetensors: shrank" in box.stats().health,
          f"health names the file: {box.stats().health}")
    check(box.logged(f"{path}/model.safetensors: shrank"), "the log names the file")
    equal([c.position for c in talk.get().checkpoints], [200], "what was stored before is there")
    box.stop()


@case
def a_model_file_whose_time_was_set_back_ends_calls_too():
    path, box, talk, prompt = a_model_of_its_own()
    weights = os.path.join(path, "model.safetensors")
    before = os.stat(weights)
    with open(weights, "r+b") as f:
        f.seek(before.st_size - 64)
        f.write(b"\x40" * 32)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    is_refused(talk, prompt)
    check("may hide" in box.stats().health, f"health: {box.stats().health}")
    box.stop()


@case
def a_model_may_be_removed_while_it_is_in_use():
    path, box, talk, prompt = a_model_of_its_own()
    os.rename(path, path + ".old")
    shutil.rmtree(path + ".old")
    resumed(talk.prefill(prompt + tokens(80)), EXACT, 200, "with its model removed")
    box.stop()


@case
def a_model_file_that_is_written_to_ends_calls_until_the_next_start():
    path, box, talk, prompt = a_model_of_its_own()
    weights = os.path.join(path, "model.safetensors")
    with open(weights, "r+b") as f:
        f.seek(os.path.getsize(weights) - 64)
        f.write(b"\x40" * 32)
    is_refused(talk, prompt)
    check(box.logged(f"{path}/model.safetensors: changed"), "the log names the file")
    equal([c.position for c in talk.get().checkpoints], [200], "what was stored before is there")
    box.stop()
    box.start()  # Another model by its bytes: what the first one computed is not used.
    resumed(Talk(box.client(), "s").prefill(prompt + tokens(80)), MISS, 0, "after the restart")
    box.stop()


def mapped(box, name):
    """Kilobytes of the mappings of a file, by the words of smaps."""
    sums, ours = {}, False
    with open(f"/proc/{box.process.pid}/smaps", encoding="utf-8", errors="replace") as f:
        for line in f:
            if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
                ours = line.rstrip().endswith("/" + name)
            elif ours and line.split()[-1] == "kB":
                word, count, _ = line.split()
                sums[word[:-1]] = sums.get(word[:-1], 0) + int(count)
    return sums


@case
def two_daemons_have_the_weights_once():
    boxes = [Box("cpu").start() for _ in range(2)]
    for box in boxes:
        Talk(box.client(), "s").prefill(tokens(300))
    size = os.path.getsize(os.path.join(model_dir(), "model.safetensors")) // 1024
    for box in boxes:
        found = mapped(box, "model.safetensors")
        print(found)
        check(found.get("Rss", 0) >= size, f"all of its {size} kB are resident: {found}")
        equal(found["Private_Clean"] + found["Private_Dirty"] + found["Anonymous"], 0,
              f"kB that this daemon has for itself: {found}")
        check(found["Pss"] <= 0.51 * found["Rss"], f"each has half of it: {found}")
    for box in boxes:
        box.stop()


@case
def status_and_doctor_name_the_instructions():
    """Those that engine.isa asked for, also where the machine could do better."""
    box = Box("cpu", {"engine.isa": "portable"}).start()
    ops = Tool("unix:" + box.socket, token_file(box.directory, "ops"))
    words = "cpu, instructions portable, kernels fp32"
    status = ops.code(0, "status").stdout
    check(re.search(rf"^backend +{words}$", status, re.M), status)
    check(re.search(r"^model .* 132\.5 B/token$", status, re.M), status)
    equal({c["name"]: c["found"] for c in ops.json("doctor", "--json")["checks"]}["backend"], words,
          "doctor")
    equal(ops.json("status", "--json")["daemon"]["isa"], "portable", "status --json")
    box.stop()


def bad_calls(call, until):
    """How many were refused until then, 400 at most: each kind of them in turn."""
    call.OpenSession(pb.OpenSessionRequest(session_id="bad"))
    call.Prefill(pb.PrefillRequest(session_id="bad", tokens=pack(range(3, 40))))
    wide, long, longer = pack([5, 512]), pack([7] * 300000), pack([7] * ((1 << 20) + 1))
    count = 0
    while not until.is_set() and count < 400:
        expect(call.Prefill, pb.PrefillRequest(session_id="bad", tokens=wide),
               code="INVALID_ARGUMENT", reason="TOKEN_OUT_OF_VOCAB")
        expect(call.Prefill, pb.PrefillRequest(session_id="bad", tokens=b""),
               code="INVALID_ARGUMENT", reason="TOKENS_EMPTY")
        expect(call.Prefill, pb.PrefillRequest(session_id="bad", tokens=longer),
               code="OUT_OF_RANGE", reason="PROMPT_TOO_LONG")
        expect(call.Prefill, pb.PrefillRequest(session_id="bad", tokens=long),
               code="RESOURCE_EXHAUSTED", reason="HBM_FULL")
        count += 4
    return count


def answers(talk, prompt):
    talk.prefill(prompt)
    return [talk.decode(300, temperature=0.7, seed=seed).bits for seed in range(3)]


@case
def bad_calls_change_nothing_for_others():
    """Answers while another user's calls are refused: token by token and bit by bit as alone."""
    prompt, refused, done = tokens(150), [], threading.Event()
    box = Box("cpu").start()
    alone = answers(Talk(box.client(), "s"), prompt)
    box.stop()
    box = Box("cpu").start()
    call = box.client("bob").session
    thread = threading.Thread(target=lambda: refused.append(bad_calls(call, done)))
    talk = Talk(box.client(), "s")
    thread.start()
    try:
        beside = answers(talk, prompt)
    finally:
        done.set()
        thread.join()
    print(f"{refused} calls were refused beside 3 answers of 300 tokens")
    check(refused and refused[0] >= 100, f"calls refused meanwhile: {refused}")
    check(alone == beside, "the answers are the same")
    box.stop()


run_cases(__doc__)
