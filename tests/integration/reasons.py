"""Cases that each provoke one failure reason of kvstore/format/reason.c, and the account of them.

Together the scripts of SCRIPTS have a case for every reason, or a line in LATER that says why none can
be had; a reason in neither fails the test, so a new one comes with its case.
"""

import os
import re
import time

import daemon as d
from daemon import check, expect, pack, pb

SCRIPTS = ("it_bad_input.py", "it_no_room.py")
INVALID = "INVALID_ARGUMENT"
VOCAB = 512  # `tiny`, which SYNTHETIC takes its shape from.

# Reasons that no test can bring about: none.
LATER = {}

provoked = set()


def case(reason):
    """Marks a function that provokes a reason."""
    def mark(function):
        function.reason = reason
        cases.append(function)
        return function
    return mark


cases = []


def fails(call, *args, code, reason, **kwargs):
    got = expect(call, *args, code=code, reason=reason, **kwargs)
    if got is not None and got.reason == reason:
        provoked.add(reason)
        check(got.domain == "cached", f"{reason}: the domain is cached")
        check(bool(got.message) and got.message.endswith("."), f"{reason}: a sentence: {got!r}")
    return got


class World:
    """One daemon with a session that has tokens, and one that has none."""

    def __init__(self):
        self.daemon = d.Daemon().start()
        self.alice = self.daemon.client("alice").session
        self.bob = self.daemon.client("bob").session
        self.ops = self.daemon.client("ops").admin
        self.alice.OpenSession(pb.OpenSessionRequest(session_id="s"))
        self.alice.OpenSession(pb.OpenSessionRequest(session_id="empty"))
        self.prefill = self.alice.Prefill(
            pb.PrefillRequest(session_id="s", tokens=pack(range(40)), level=pb.LEVEL_SSD))


def prefill(**fields):
    fields.setdefault("session_id", "s")
    fields.setdefault("tokens", pack([1, 2, 3, 4]))
    return pb.PrefillRequest(**fields)


def decode(**fields):
    fields.setdefault("session_id", "s")
    fields.setdefault("max_tokens", 4)
    return pb.DecodeRequest(**fields)


def failure_reasons():
    """Names of all reasons that are failures, from the table itself."""
    with open(os.path.join(d.SOURCE, "kvstore/format/reason.c"), encoding="utf-8") as f:
        pairs = re.findall(r"REASON\(([A-Z_]+),\s*([A-Z_]+),", f.read())
    return [name for name, code in pairs if code != "OUTCOME"]


def cases_elsewhere(script):
    """Reasons that have their case in another of the scripts."""
    found = set()
    for name in SCRIPTS:
        if name == script:
            continue
        with open(os.path.join(d.SOURCE, "tests", "integration", name), encoding="utf-8") as f:
            found.update(re.findall(r'^@case\("([A-Z_]+)"\)$', f.read(), re.MULTILINE))
    return found


def run(world):
    """All cases, in the order of the file; the daemon of `world` outlives each."""
    for function in cases:
        began = time.monotonic()
        function(world)
        print(f"{function.reason}: {time.monotonic() - began:.1f} s")
        check(world.daemon.is_up(), f"after {function.reason}: the daemon is up")


def account(script):
    """Every reason is provoked here, in another script, or marked; each is looked at once."""
    reasons, elsewhere = failure_reasons(), cases_elsewhere(script)
    if script == SCRIPTS[0]:
        check(len(reasons) > 40, f"the table was read: {len(reasons)} reasons")
    for reason in reasons:
        if reason in elsewhere:
            continue
        if reason in provoked:
            check(reason not in LATER, f"{reason} is provoked and need not be marked")
        elif check(reason in LATER, f"{reason} has neither a case nor a mark"):
            print(f"skipped: {reason}: {LATER[reason]}")
