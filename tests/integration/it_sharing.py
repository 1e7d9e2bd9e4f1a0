"""Many callers and one engine: who waits for whom, and what happens when the model goes away."""

import os
import shutil
import threading
import time

from daemon import check, equal, expect, scratch
from talk import MISS, Box, Talk, case, model_dir, resumed, run_cases, tokens

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


@case
def a_model_file_that_shrinks_ends_calls_not_the_daemon():
    path = os.path.join(scratch(), "model")
    shutil.copytree(model_dir(), path)
    box = Box("cpu", {"engine.model_dir": path}).start()
    talk = Talk(box.client(), "s")
    prompt = tokens(200)
    talk.prefill(prompt)
    os.truncate(os.path.join(path, "model.safetensors"), 8192)
    for ids in (prompt + tokens(80), tokens(20)):
        expect(talk.prefill, ids, code="UNAVAILABLE", reason="MODEL_LOST", field="engine.model_dir")
    check(f"{path}/model.safetensors: shrank" in box.log(), "the log names the file")
    time.sleep(0.2)  # The shard looks every 50 ms.
    check("a file of the model" in box.stats().health, f"health says so: {box.stats().health}")
    equal([c.position for c in talk.get().checkpoints], [200], "what was stored before is there")
    box.stop()


@case
def a_model_file_that_is_written_to_ends_calls_until_the_next_start():
    path = os.path.join(scratch(), "model")
    shutil.copytree(model_dir(), path)
    box = Box("cpu", {"engine.model_dir": path}).start()
    talk = Talk(box.client(), "s")
    prompt = tokens(200)
    talk.prefill(prompt)
    weights = os.path.join(path, "model.safetensors")
    with open(weights, "r+b") as f:
        f.seek(os.path.getsize(weights) - 64)
        f.write(b"\x40" * 32)
    for ids in (prompt + tokens(80), tokens(20)):
        expect(talk.prefill, ids, code="UNAVAILABLE", reason="MODEL_LOST", field="engine.model_dir")
    check(f"{path}/model.safetensors: changed" in box.log(), "the log names the file")
    equal([c.position for c in talk.get().checkpoints], [200], "what was stored before is there")
    box.stop()
    box.start()  # Another model by its bytes: what the first one computed is not used.
    resumed(Talk(box.client(), "s").prefill(prompt + tokens(80)), MISS, 0, "after the restart")
    box.stop()


run_cases(__doc__)
