#!/usr/bin/env bash
# All tests, in parts that a machine with two cores can do in less time than one after the other:
#   tests/all.sh PYTHON
# 1. what needs no server and no host, three files at a time (most of it waits); 2. real servers and the browser, in two rows;
# and beside both, from the start, 3. real hosts, which mostly wait. Every part runs whatever the others gave; the first exit
# code that is not 0 is the script's.
set -u
python=${1:?tests/all.sh PYTHON}
cd "$(dirname "${BASH_SOURCE[0]}")/.."
code=0
part() {
    local given=$1
    ((given == 0 || code != 0)) || code=$given
}
hosts=$(mktemp)
row=$(mktemp)
trap 'rm -f "$hosts" "$row"' EXIT
trap 'kill -INT $(jobs -p) 2>/dev/null; wait; exit 130' INT TERM # the lab takes its hosts down, a server its processes
servers="(server or browser or gpu) and not lab"
"$python" -m pytest -q -p no:cacheprovider -m lab >"$hosts" 2>&1 &
lab=$!
"$python" -m pytest -q -n 3 --dist loadfile -m "not server and not lab and not browser and not gpu"
part $?
one=(tests/audit tests/load tests/model tests/widgets tests/batch tests/report tests/runs/test_sweep_real.py)
"$python" -m pytest -q -p no:cacheprovider -m "$servers" "${one[@]}" >"$row" 2>&1 &
beside=$!
"$python" -m pytest -q -m "$servers" "${one[@]/#/--ignore=}"
part $?
wait $beside
part $?
wait $lab
part $?
cat "$row" "$hosts"
exit $code
