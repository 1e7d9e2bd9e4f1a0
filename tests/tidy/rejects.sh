#!/bin/bash
# Proves that tidy can fail.  Each rule that tidy names must have samples in bad/RULE/CASE/; a sample
# laid over the clean tree must make tidy exit 1 and complain of that rule and of no other.  The
# clean tree itself must pass.  Then the same for "a header compiles alone", whose tool is the
# compiler.
#
# usage: rejects.sh TIDY COMPILER...
set -euo pipefail
export LC_ALL=C

tidy=$1
shift
compiler=("$@")
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
checks=0
failures=0

check() { # WHAT CONDITION...
    local what=$1
    shift
    checks=$((checks + 1))
    if "$@"; then return; fi
    failures=$((failures + 1))
    echo "FAILED: $what"
}

run_tidy() { # TREE: sets code, and output in $work/output
    code=0
    "$tidy" "$1" >"$work/output" 2>&1 || code=$?
}

rules_in_output() {
    sed -n 's/^[^:]*:[0-9]*: \[\([a-z_]*\)\] .*/\1/p' "$work/output" | sort -u
}

compiles_alone() { # TREE HEADER
    sed "s|@HEADER@|$2|" "$here/../header_check.c.in" >"$work/alone.c"
    "${compiler[@]}" -std=c17 -Wall -Wextra -Werror -fsyntax-only -I "$1" "$work/alone.c" \
        >"$work/output" 2>&1
}

run_tidy "$here/clean"
check "the clean tree passes" test "$code" -eq 0
check "the clean tree has no complaint" test -z "$(rules_in_output)"
check "the clean tree was looked at" grep -q '^4 files, 5 functions' "$work/output"

for rule in $("$tidy" --rules); do
    check "rule $rule has a sample" test -d "$here/bad/$rule"
    for sample in "$here/bad/$rule"/*/; do
        [ -d "$sample" ] || continue
        name=$rule/$(basename "$sample")
        rm -rf "$work/tree"
        mkdir "$work/tree"
        [ "$rule" = nothing_checked ] || cp -R "$here/clean/." "$work/tree/"
        cp -R "$sample." "$work/tree/"
        run_tidy "$work/tree"
        check "$name: exit code $code, not 1" test "$code" -eq 1
        check "$name: rejected for: $(rules_in_output | tr '\n' ' ')" \
            test "$(rules_in_output)" = "$rule"
    done
done

# Long, but not too long: said, and allowed.
rm -rf "$work/tree"
cp -R "$here/clean" "$work/tree"
head -n 700 "$here/bad/file_length/of_1001_lines/kvstore/base/bad.c" >"$work/tree/kvstore/base/bad.c"
run_tidy "$work/tree"
check "a file of 700 lines passes" test "$code" -eq 0
check "a file of 700 lines is warned of" grep -q 'bad.c:700: warning: \[file_length\]' "$work/output"

check "a clean header compiles alone" compiles_alone "$here/clean" kvstore/base/good.h
for sample in "$here"/bad/header_alone/*/; do
    if compiles_alone "$sample" kvstore/base/bad.h; then compiled=yes; else compiled=no; fi
    check "header_alone/$(basename "$sample"): compiles" test "$compiled" = no
    check "header_alone/$(basename "$sample"): not because of its types" \
        grep -Eq 'uint32_t|kv_other' "$work/output"
done

echo "$checks checks, $failures failures"
[ "$failures" -eq 0 ]
