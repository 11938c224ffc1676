#!/usr/bin/env bash
# Train NAM56R on the GPUs of this machine: examples/one_node.sh GPUS DATA_PREFIX RUN_FOLDER
#
# The data must have the recipe's vocabulary of 65,536, whose last id ends a document; for other
# data the run says what to set. Start it again after a crash: it resumes from the last complete
# checkpoint.
set -euo pipefail
gpus=$1 data=$2 run=$3

megacpp doctor || echo "one_node.sh: the stack is not the pinned one; see above" >&2
megacpp data check "$data"
exec megacpp train nam56r --gpus "$gpus" --resume --out "$run" \
  --set "data.data_path=[\"$data\"]" \
  --set "checkpoint.save=$run/checkpoints" --set "checkpoint.load=$run/checkpoints"
