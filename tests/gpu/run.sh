#!/usr/bin/env bash
# The GPU tests, side by side on every GPU: tests/gpu/run.sh FOLDER [FILE or TEST ...]
#
# FOLDER gets a log for each file: commit or tree, device, every test's outcome and seconds. WORKERS
# (4) processes share a GPU, which has 16 cores to compile their kernels: with 7 they took longer.
# Tests marked `alone` follow, one at a time, on one GPU of several too, which share disk and cores.
# TEST_LIMIT (300) is what a test may take that does not say it itself, LIMIT and ALONE_LIMIT (3600)
# what either part may take, in seconds: what was not run by then is listed so. The exit status is 1
# unless all ran and passed.
set -uo pipefail
folder=$1
shift
python=${PYTHON:-python}
cd "$(dirname "$0")/../.."
mkdir -p "$folder"
if [ $# = 0 ]; then set -- tests/gpu; fi
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
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
[ "$gpus" != 0 ] || { echo "tests/gpu/run.sh: torch sees no GPU here" >&2; exit 1; }
# Else hundreds of tests fail one by one, in GPU time, for one package that cannot be imported.
"$python" -W ignore -c 'import transformer_engine.pytorch, megatron.core' || {
  echo "tests/gpu/run.sh: no test is run where these cannot be imported; megacpp doctor says more" >&2
  exit 1
}
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $((gpus - 1)))}
notes=$(cd "$folder" && pwd)/.notes mark=gpu-tests-$$-$RANDOM broken=0
: >"$notes"
export MEGACPP_GPU_TEST_NOTES=$notes TORCHINDUCTOR_COMPILE_THREADS=${TORCHINDUCTOR_COMPILE_THREADS:-2}

logs() { "$python" tests/gpu/logs.py "$notes" "$folder" <<<"$head"; }
part() { # LIMIT WORKERS MARKS TEST...
  timeout -s KILL "$1" env MEGACPP_TEST_MARK="$mark" "$python" -m pytest -m "$3" -n "$2" \
    --no-loadscope-reorder --timeout "${TEST_LIMIT:-300}" --tb=short -p no:cacheprovider \
    -p no:benchmark "${@:4}"
  local status=$?
  ((status == 0 || status == 1 || status == 5)) || { # 1: a test failed; 5: there are none
    broken=1
    echo "tests/gpu/run.sh: the tests marked '$3' ended with status $status, 137 at their limit" >&2
  }
  # Whatever a test has started does not outlive its part.
  PYTHONPATH=tests${PYTHONPATH:+:$PYTHONPATH} "$python" -c '
import os, sys
from left_behind import Marked
for pid in Marked(sys.argv[1]).pids():
    print("killed what a test had left:", open(f"/proc/{pid}/cmdline").read().replace("\0", " "))
    os.kill(pid, 9)' "$mark"
}
part "${LIMIT:-3600}" $((${WORKERS:-4} * gpus)) "gpu and not alone" "$@"
logs >/dev/null # for whoever stops this script in its second part
part "${ALONE_LIMIT:-3600}" 1 "gpu and alone" "$@"
logs
status=$?
rm "$notes"
exit $((status | broken))
