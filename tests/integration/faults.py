"""What the tests of faults share: what must hold after any of them."""

import re

import daemon
from daemon import check, equal
from talk import EXACT, MISS, Talk, patiently, resumed, rng, tokens

MIB = 1 << 20
with open(daemon.BINARY, "rb") as _binary:
    SANITIZED = b"__asan_init" in _binary.read()  # Its shadow and quarantine have no budget.


def well(box, rss_before=None, what=""):
    """After a fault: another user's turn works, and memory is inside its budget."""
    if not check(box.is_up(), f"{what}: the daemon is up"):
        return
    name = f"well{rng.randrange(10**9)}"
    talk = Talk(box.client("bob"), name)
    prompt = tokens(90)
    resumed(patiently(talk.prefill, prompt), MISS, 0, f"{what}: another user's first turn")
    answer = patiently(talk.decode, 3)
    resumed(patiently(talk.prefill, prompt + answer.tokens + tokens(5)), EXACT, 92,
            f"{what}: another user's second turn")
    talk.close()
    stats = box.stats()
    within_budget(box, what)
    if rss_before is not None and not SANITIZED:
        check(stats.rss_bytes <= rss_before + 24 * MIB,
              f"{what}: RSS {stats.rss_bytes} is back near {rss_before}")
    if stats.engine_backend == "SYNTHETIC":
        equal(stats.wrong_bytes, 0, f"{what}: wrong bytes")


def within_budget(box, what):
    stats = box.stats()
    if not SANITIZED:
        check(stats.rss_bytes <= stats.rss_budget_bytes,
              f"{what}: RSS {stats.rss_bytes} within {stats.rss_budget_bytes}")


def recovered(box, offset=0):
    """(recovered, dropped) as the log says at start."""
    found = re.findall(r"recovered (\d+) checkpoints, dropped (\d+)", box.log(offset))
    if not check(found, "the log says what was recovered"):
        return (None, None)
    said = tuple(map(int, found[-1]))
    stats = box.stats()
    equal((stats.recovered_checkpoints, stats.dropped_checkpoints), said,
          "GetStats against the log: (recovered, dropped)")
    return said
