"""A state directory that another engine has written.

Goal: a daemon with another model finds sessions whose state is not its own: it says so, reads nothing
of it, answers as if it were not there, and takes nothing away; the engine that wrote it goes on as if
nothing had been in between.
Method: copies of one directory, of several sessions and users, under the model that made it and under
one of another seed.  (Records of an earlier version of the format: unit/test_manifest_record.c; those
of nodes without kernels are written to this day, it_kernels.py.)
"""

import os
import shutil
import subprocess

import daemon as d
from daemon import check, equal, expect
from talk import MISS, REPLAY, Box, Talk, case, model_dir, resumed, run_cases, tokens

SESSIONS = {("alice", "short"): 100, ("alice", "long"): 700, ("bob", "short"): 301}


def other_model():
    path = os.path.join(d.scratch(), "other")
    subprocess.run([os.path.join(d.BUILD, "tools", "mkmodel"), "--config", "tiny", "--seed", "2",
                    path], check=True, stdout=subprocess.DEVNULL)
    return path


def start(state, model):
    return Box(flags={"state.dir": state, "engine.model_dir": model}).start()


def copy_of(state):
    path = os.path.join(d.scratch(), "state")
    shutil.copytree(state, path)
    return path


def talks(box):
    return {key: Talk(box.client(key[0]), key[1]) for key in SESSIONS}


def files(state):
    """Sizes of the segment files."""
    folder = os.path.join(state, "ssd")
    return {name: os.path.getsize(os.path.join(folder, name)) for name in os.listdir(folder)}


def turns(box, prompts):
    """The next turn of every session: what the prefill said, and the bits of the answer."""
    said = {}
    for key, talk in talks(box).items():
        got = talk.prefill(prompts[key])
        said[key] = (got.outcome, got.hit_tokens, got.replayed_tokens, got.reason,
                     talk.decode(8).bits)
    return said


def without_plan(said):
    return {key: answer[-1] for key, answer in said.items()}


@case
def another_seed_finds_nothing_and_takes_nothing():
    first = {key: tokens(count) for key, count in SESSIONS.items()}
    box = Box().start()
    for key, talk in talks(box).items():
        talk.prefill(first[key])
        first[key] += talk.decode(5).tokens
    box.stop()
    made = box.state
    again = {key: ids[:-1] + tokens(40) for key, ids in first.items()}

    # What its own engine makes of it, and what another makes of an empty directory.
    own = start(copy_of(made), model_dir())
    for key, talk in talks(own).items():
        resumed(talk.lookup(again[key]), REPLAY, SESSIONS[key] + 4 - (SESSIONS[key] + 4) % 2,
                f"{key}: its own engine")
    want = turns(own, again)
    own.stop()
    other = other_model()
    empty = start(os.path.join(d.scratch(), "empty"), other)
    fresh = without_plan(turns(empty, again))
    empty.stop()
    check(all(fresh[key] != want[key][-1] for key in SESSIONS), "the two models differ")

    moved = copy_of(made)
    box = start(moved, other)
    for key, talk in talks(box).items():
        check(not talk.opened.created, f"{key}: the session is known")
        equal(talk.opened.head_position, SESSIONS[key] + 4, f"{key}: its head")
        resumed(talk.lookup(again[key]), MISS, 0, f"{key}: Lookup", reason="MODEL_CHANGED")
        expect(lambda t=talk: t.decode(4), code="FAILED_PRECONDITION", reason="HEAD_MOVED")
    said = turns(box, again)
    for key, answer in said.items():
        equal(answer[1:4], (0, 0, "MODEL_CHANGED"), f"{key}: Prefill")
    check(without_plan(said) == fresh, "the answers of an empty directory")
    equal(box.counter("cached_load_bytes_total", 'tier="ssd"'), 0, "nothing was loaded")
    equal(box.counter("cached_checksum_failures_total", 'tier="ssd",where="read"'), 0, "nothing is damaged")
    equal(box.counter("cached_checkpoints_dropped_total"), 0, "nothing was dropped")
    before = files(made)
    check(before.items() <= files(moved).items(), "every segment is there, as large as it was")
    box.stop()

    # And back: the tokens of the other engine's turns are in the tree too, and not in the way.
    back = start(moved, model_dir())
    for key, talk in talks(back).items():
        resumed(talk.lookup(again[key]), REPLAY, want[key][1], f"{key}: back again")
    check(turns(back, again) == want, "the same plans, the same bits")
    equal(back.counter("cached_checksum_failures_total", 'tier="ssd",where="read"'), 0, "nothing is damaged")
    back.stop()


run_cases(__doc__)
