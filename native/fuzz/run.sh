#!/bin/bash
# Builds the fuzzer and runs it until it has used so many CPU-seconds; prints executions, coverage, and what was found.
#
#     native/fuzz/run.sh [CPU_SECONDS [FOLDER]]
#
# FOLDER (default build/fuzz) keeps the corpus, so that the next run goes on from it, and findings/. PYTHON is an
# interpreter with fortyfold's dependencies; the seeds are tiled where the native decoder was built.
set -euo pipefail

cpu_seconds=${1:-1800}
here=$(cd "$(dirname "$0")" && pwd)
folder=$(mkdir -p "${2:-build/fuzz}" && cd "${2:-build/fuzz}" && pwd)
python=${PYTHON:-python3}
clang=${CLANG:-clang} # with its runtime: libclang-rt-dev on Debian
interrupted=72 # libFuzzer's exit code
TIMEFORMAT='%U %S'

mkdir -p "$folder/corpus" "$folder/findings"
PYTHONPATH="$here/../../src" "$python" "$here/make_corpus.py" "$folder/seeds"

"$clang" -g -O1 -std=c11 -D_GNU_SOURCE -DSPARE_BYTES=64 -fno-omit-frame-pointer \
    -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all \
    "$here"/fuzz_jpeg.c "$here"/../{entropy,exif,guard,jpeg,resample,retile}.c -ljpeg -lm -o "$folder/fuzz_jpeg"

fuzz() {
    ASAN_OPTIONS=quarantine_size_mb=16 nice -n 19 "$folder/fuzz_jpeg" "$folder/corpus" "$folder/seeds" -max_total_time="$1" -dict="$here/jpeg.dict" \
        -artifact_prefix="$folder/findings/" -timeout=10 -rss_limit_mb=1024 -malloc_limit_mb=512 -max_len=20024 \
        -use_value_profile=1 -print_final_stats=1 2>>"$folder/log"
}

# libFuzzer counts seconds on the clock; a busy machine gives it less of the processor, so it is started again.
: >"$folder/log"
status=0
used=0
while [ "$used" -lt "$cpu_seconds" ] && [ "$status" -eq 0 ]; do
    { time fuzz "$((cpu_seconds - used))" || status=$?; } 2>"$folder/seconds"
    used=$((used + $(awk '{ total = $1 + $2 } END { print int(total) + 1 }' "$folder/seconds")))
done

awk '/^stat::number_of_executed_units/ { total += $2 } END { print total + 0 " executions" }' "$folder/log"
grep -oE 'cov: [0-9]+ ft: [0-9]+ corp: [0-9]+' "$folder/log" | tail -n 1 || true
grep '^stat::peak_rss_mb' "$folder/log" | tail -n 1 || true
echo "$used CPU-seconds"
if [ "$status" -eq "$interrupted" ]; then
    echo "interrupted before its time"
elif [ "$status" -ne 0 ]; then
    echo "found something (libFuzzer's exit code $status), see $folder/log and:"
    ls "$folder/findings"
    grep -m 5 -E 'not so|ERROR|runtime error|SUMMARY' "$folder/log" || true
fi
exit "$status"
