#!/usr/bin/env bash
# Runs the example: makes tables, trains on a pool, and checks the predictions that it writes.
#
#   examples/tables/run.sh
#
# With the pool at TENSORD_URL, or else with one that this script starts, for which it needs
# the program `tensord` in PATH or as TENSORD.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

work=$(mktemp -d)
pool=
trap '[ -z "$pool" ] || kill "$pool"; rm -rf "$work"' EXIT

if [ -z "${TENSORD_URL:-}" ]; then
    TENSORD_STATE="$work/state" "${TENSORD:-tensord}" up --listen 127.0.0.1:0 >"$work/pool.log" 2>&1 &
    pool=$!
    for _ in $(seq 100); do
        TENSORD_URL=$(sed -n "s/^programs:.*'\(tensord:.*\)'$/\1/p" "$work/pool.log")
        [ -z "$TENSORD_URL" ] || break
        sleep 0.1
    done
    if [ -z "$TENSORD_URL" ]; then
        cat "$work/pool.log" >&2
        echo "the pool has not started within 10 s" >&2
        exit 1
    fi
    export TENSORD_URL
fi

cargo build --release
tables() { "${CARGO_TARGET_DIR:-target}/release/tables" "$@"; }

tables make "$work/rides.csv" --rows 100000
tables make "$work/new.parquet" --rows 5000 --seed 2

echo "== batches made ahead, by a thread"
tables train "$work/rides.csv" --predict "$work/new.parquet" --to "$work/predicted.csv"
echo "== each batch made when the training wants it"
tables train "$work/rides.csv" --predict "$work/new.parquet" --to "$work/inline.csv" --no-loader
cmp "$work/predicted.csv" "$work/inline.csv"

# The rides have a random part, by which even the best prediction is wrong by half a minute.
awk -F, '
    NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i; next }
    { error = $at["minutes"] - $at["predicted_minutes"]; sum += error < 0 ? -error : error; rows++ }
    END {
        if (rows != 5000) { print rows " predictions, not 5000"; exit 1 }
        mean = sum / rows
        printf "%d predictions, on average wrong by %.2f minutes\n", rows, mean
        if (mean > 1.5) { print "that is more than 1.5 minutes"; exit 1 }
    }' "$work/predicted.csv"

echo "== a broken row"
{ head -n 7 "$work/rides.csv"; echo "3.5,eight,1,mon,dry,9"; } >"$work/broken.csv"
if tables train "$work/broken.csv" --predict "$work/new.parquet" --to "$work/x.csv" 2>"$work/error"; then
    echo "a broken row was accepted" >&2
    exit 1
fi
cat "$work/error"
grep -q "row 7, column hour: eight is not a finite number" "$work/error"
