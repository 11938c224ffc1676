#!/usr/bin/env bash
# The GPU tests of every file, one after the other: tests/gpu/run.sh FOLDER [FILE ...]
#
# FOLDER gets a log for each file, with the commit or tree, the device, the counts, and the names of
# what was skipped or failed. All of them are of one tree. The exit status is 1 where one failed.
set -uo pipefail
folder=$1
shift
python=${PYTHON:-python}
root=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
cd "$root"
if [ $# = 0 ]; then set -- tests/gpu/test_*.py; fi
head=$("$python" - <<'PYTHON'
from megacpp_mcore.receipts.goodput import utc_now
from megacpp_mcore.receipts.lane import code, lane

own, here = code(), lane()
changes = " + changes" if own["dirty"] else ""
print(f"{utc_now()}, commit {own['commit']}{changes}, tree {own['tree']}, sha256 {own['sha256']}")
print(f"{here['device']['count']} x {here['device']['name']}, driver {here['driver']}, "
      f"CUDA {here['cuda']}, torch {here['packages']['torch']}")
PYTHON
) || exit 1
failed=0
for file in "$@"; do
  log=$folder/$(basename "$file" .py).log
  { echo "$head"; echo "pytest -m gpu $file"; } >"$log.tmp"
  "$python" -m pytest -m gpu -rsfE --tb=short -p no:cacheprovider "$file" >>"$log.tmp" 2>&1
  status=$?
  mv "$log.tmp" "$log"
  echo "$(basename "$file"): $(tail -1 "$log")"
  ((status == 0 || status == 5)) || failed=1  # 5: none of the file's tests needs a GPU
done
exit $failed
