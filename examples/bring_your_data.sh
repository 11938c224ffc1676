#!/usr/bin/env bash
# Train on your own text: examples/bring_your_data.sh FOLDER GLOB RUN_FOLDER [STEPS]
#
# Here the bytes of the files are the tokens, and the tiny recipe trains on a CPU. For Parquet
# shards see `megacpp data build --help`; data that is tokenised already is a .bin and .idx pair
# of Megatron's, which data.data_path names as it is.
set -euo pipefail
folder=$1 glob=$2 run=$3 steps=${4:-100}

megacpp data build "$folder" --include "$glob" --out "$run/data/corpus"
megacpp data check "$run/data/corpus"
megacpp train nam56r-tiny --steps "$steps" --out "$run/train" \
  --set "data.data_path=[\"$run/data/corpus\"]"
megacpp report show "$run/train/receipt.json"
