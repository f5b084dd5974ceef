#!/usr/bin/env bash
# All tests, in three parts that a machine with two cores can do in less time than one after the other:
#   tests/all.sh PYTHON
# 1. what needs no server and no host, two files at a time; 2. real servers and the browser; and beside both, from the start,
# 3. real hosts, which mostly wait. Every part runs whatever the others gave; the first exit code that is not 0 is the script's.
set -u
python=${1:?tests/all.sh PYTHON}
cd "$(dirname "${BASH_SOURCE[0]}")/.."
code=0
part() {
    local given=$1
    ((given == 0 || code != 0)) || code=$given
}
hosts=$(mktemp)
trap 'rm -f "$hosts"' EXIT
"$python" -m pytest -q -p no:cacheprovider -m lab >"$hosts" 2>&1 &
lab=$!
trap 'kill -INT $lab 2>/dev/null; wait $lab; exit 130' INT TERM # the lab takes its hosts down
"$python" -m pytest -q -n 2 --dist loadfile -m "not server and not lab and not browser and not gpu"
part $?
"$python" -m pytest -q -m "(server or browser or gpu) and not lab"
part $?
wait $lab
part $?
cat "$hosts"
exit $code
