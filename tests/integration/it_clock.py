"""A wall clock that is wrong, under the real daemon: nothing expires for it, nothing lives for ever.

Method: a library between daemon and kernel moves the wall clock and the time since boot, each by
itself (faults.py).  The clock of these daemons is `real`.
"""

import os
import re
import subprocess
import time

import daemon
from cli import Tool, token_file
from daemon import BUILD, check, equal, pack, pb
from faults import Clocks, recovered, well
from talk import MISS, Box, Talk, case, even, resumed, run_cases, tokens

MINUTE, HOUR, YEAR = 60, 3600, 365 * 86400
KVDUMP = os.path.join(BUILD, "tools", "kvdump")


def box_with(clocks):
    return Box("synthetic", {"clock.mode": "real"}, env=clocks.env()).start()


def stored(box, count=6, **fields):
    client = box.client()
    prompts = {f"s{i}": tokens(200 + 37 * i) for i in range(count)}
    for name, prompt in prompts.items():
        talk = Talk(client, name, **fields)
        equal(talk.prefill(prompt).save_reason, "", f"{name}: saved")
        talk.close()
    return prompts


def said(box, event, offset, seconds=5):
    """Waits for a line of the log."""
    end = time.monotonic() + seconds
    while f"event={event}" not in box.log(offset) and time.monotonic() < end:
        time.sleep(0.02)
    return check(box.logged(f"event={event}", offset), f"the log says {event}")


def all_there(box, prompts, what):
    """Every session hits in full, and some turns of the sweep took nothing away."""
    client = box.client()
    time.sleep(0.3)
    for name, prompt in prompts.items():
        got = client.session.Lookup(pb.LookupRequest(session_id=name, tokens=pack(prompt + [5])))
        equal(got.stored_tokens, len(prompt), f"{what}: {name} stored")
        check(got.hit_tokens >= even(len(prompt)), f"{what}: {name} hits {got.hit_tokens}")
    equal(box.stats().checkpoints, len(prompts), f"{what}: checkpoints")
    equal(box.counter("cached_checkpoints_dropped_total"), 0, f"{what}: dropped")


def agrees(box, what):
    equal((box.stats().health, box.counter("cached_clock_off_seconds")), ("serving", 0), what)


def off_by(box, seconds, what):
    """Who looks sees it; who only wants to be served is."""
    off = box.counter("cached_clock_off_seconds")
    check(abs(off - seconds) < 30, f"{what}: off by {off}, want {seconds}")
    check("the wall clock is off by" in box.stats().health, f"{what}: {box.stats().health!r}")
    health = box.client(None).health.Check(daemon.health_pb2.HealthCheckRequest())
    equal(health.status, 1, f"{what}: serving")
    tool = Tool("unix:" + box.socket, token_file(box.directory, "ops"))
    check("the wall clock is off by" in tool.code(0, "status").stdout, f"{what}: status says so")


def jumps_while_running(seconds):
    clocks = Clocks()
    box = box_with(clocks)
    prompts = stored(box)
    agrees(box, "before")
    offset = len(box.log())
    clocks.jump(seconds)
    said(box, "clock_jumped", offset)
    off_by(box, seconds, "jumped")
    all_there(box, prompts, "jumped")
    Talk(box.client(), "later").prefill(tokens(150))
    # Time itself goes on: short lives end under a clock that is wrong, as under any.
    short = Talk(box.client(), "short", ttl_ms=10 * MINUTE * 1000)
    mine = tokens(200)
    short.prefill(mine)
    resumed(short.lookup(mine + [5]), pb.OUTCOME_EXACT, len(mine), "short, at once")
    clocks.go_on(11 * MINUTE)
    time.sleep(0.2)
    resumed(short.lookup(mine + [5]), MISS, 0, "short, after 11 min", reason="EXPIRED")
    # It is put right in time: as if nothing had been.
    offset = len(box.log())
    clocks.jump(-seconds)
    said(box, "clock_back", offset)
    agrees(box, "put right")
    equal(box.counter("cached_clock_jumps_total"), 1, "jumps")
    box.stop()


@case
def ahead_by_five_years_while_running():
    jumps_while_running(5 * YEAR)


@case
def behind_by_five_years_while_running():
    jumps_while_running(-5 * YEAR)


@case
def ahead_by_four_days_while_running():
    """More than the 72 h that rows live, and no more than a daemon may have been down."""
    jumps_while_running(96 * HOUR)


@case
def before_1970_while_running():
    """Times have no sign; the jump has: far behind, and nothing expires for it."""
    clocks = Clocks()
    box = box_with(clocks)
    prompts = stored(box, 3)
    offset = len(box.log())
    clocks.jump(-(int(time.time()) + 10 * YEAR))
    said(box, "clock_jumped", offset)
    found = re.search(r"event=clock_jumped off_s=(-?\d+)", box.log(offset))
    check(found and -time.time() - MINUTE < int(found.group(1)) < -50 * YEAR,
          f"off by {found and found.group(1)} s")
    all_there(box, prompts, "before 1970")
    box.stop()


@case
def a_step_of_four_minutes_is_followed():
    clocks = Clocks()
    box = box_with(clocks)
    prompts = stored(box, 3)
    for step in (4 * MINUTE, -4 * MINUTE):
        clocks.jump(step)
        all_there(box, prompts, f"{step} s")
        agrees(box, f"{step} s")
    equal(box.counter("cached_clock_jumps_total"), 0, "jumps")
    box.stop()


def stays(seconds):
    """Believed after an hour; no start after it takes anything away, at this clock or the old one."""
    clocks = Clocks()
    box = box_with(clocks)
    prompts = stored(box)
    offset = len(box.log())
    clocks.jump(seconds)
    said(box, "clock_jumped", offset)
    clocks.go_on(61 * MINUTE)
    said(box, "clock_believed", offset)
    agrees(box, "believed")
    all_there(box, prompts, "believed")
    end = time.monotonic() + 5  # The record is on its way.
    while box.counter("cached_manifest_batches_total") == 0 and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(0.2)
    for _ in range(2):
        offset = len(box.log())
        box.crash()
        equal(recovered(box, offset), (len(prompts), 0), "(recovered, dropped)")
        equal(box.counter("cached_clock_jumps_total"), 0, "started under a clock that is believed")
        all_there(box, prompts, "believed, started again")
    fresh = tokens(260)
    Talk(box.client(), "s0").prefill(fresh)  # A use under the new clock.
    prompts["s0"] = fresh
    box.kill()
    verified = subprocess.run([KVDUMP, "verify", box.state], capture_output=True, text=True,
                              check=False)
    equal(verified.returncode, 0, f"kvdump verify: {verified.stdout}")
    clocks.jump(-seconds)
    box.start()
    for name, prompt in prompts.items():
        got = Talk(box.client(), name).lookup(prompt + [5])
        equal(got.stored_tokens, len(prompt), f"the clock as it was before: {name}")
    well(box, what="a clock that stayed")
    box.stop()


@case
def ahead_by_five_years_and_stays():
    stays(5 * YEAR)


@case
def behind_by_five_years_and_stays():
    stays(-5 * YEAR)


def wrong_at_a_start(seconds):
    clocks = Clocks()
    box = box_with(clocks)
    prompts = stored(box)
    for _ in range(2):
        box.kill()
        clocks.jump(seconds)
        offset = len(box.log())
        box.start()
        equal(recovered(box, offset), (len(prompts), 0), "(recovered, dropped)")
        said(box, "clock_jumped", offset)
        off_by(box, seconds, "at a start")
        all_there(box, prompts, "at a start")
        clocks.jump(-seconds)
        said(box, "clock_back", offset)
        agrees(box, "put right")
    box.stop()


@case
def ahead_by_five_years_at_a_start():
    wrong_at_a_start(5 * YEAR)


@case
def behind_by_five_years_at_a_start():
    wrong_at_a_start(-5 * YEAR)


if __name__ == "__main__":
    run_cases("A wall clock that is wrong.")
