#!/usr/bin/python3
"""Prints what a run of `meson test` did: failures with their output, skips with their reason,
and last, alone on its line, `N passed, N failed` (and `, N skipped`).

usage: report.py TESTLOG.json EXIT_CODE_OF_MESON_TEST
Exit code: 0 if at least one test passed and none failed.  A run that meson test itself ended early
counts as one failure, so that what did not run is not taken for what passed.
"""

import json
import sys

PASSED = {"OK", "EXPECTEDFAIL"}
OUTPUT_LINES = 60


def indent(text):
    for line in text.strip().splitlines()[-OUTPUT_LINES:]:
        print("    " + line)


def reason(text):
    for line in text.splitlines():
        if line.startswith("SKIPPED: "):
            return line[len("SKIPPED: "):]
    return "(the test does not say why)"


def main():
    passed = failed = skipped = 0
    try:
        with open(sys.argv[1], encoding="utf-8") as log:
            tests = [json.loads(line) for line in log if line.strip()]
    except FileNotFoundError:
        print("no test has run: there is no", sys.argv[1])
        tests = []
    for test in tests:
        output = test.get("stdout") or ""
        if test["result"] in PASSED:
            passed += 1
        elif test["result"] == "SKIP":
            skipped += 1
            print(f"skipped: {test['name']}: {reason(output)}")
        else:
            failed += 1
            print(f"failed: {test['name']}: {test['result']} after {test['duration']:.1f} s")
            indent(output)
            indent(test.get("stderr") or "")
    if int(sys.argv[2]) != 0 and failed == 0:
        failed += 1
        print("failed: meson test itself ended with code", sys.argv[2])
    line = f"{passed} passed, {failed} failed"
    if skipped:
        line += f", {skipped} skipped"
    print(line, flush=True)
    return 0 if passed > 0 and failed == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
