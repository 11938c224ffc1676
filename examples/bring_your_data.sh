#!/usr/bin/env bash
# Train on your own text: examples/bring_your_data.sh FOLDER GLOB RUN_FOLDER [STEPS]
#
# The tokens are the bytes of the files, and the tiny recipe trains on a CPU. For Parquet shards see
# `megacpp data build --help`. Tokenised data in Megatron's format, a pair of .bin and .idx files,
# needs no build: set data.data_path to it.
set -euo pipefail
folder=$1 glob=$2 run=$3 steps=${4:-100}

megacpp data build "$folder" --include "$glob" --out "$run/data/corpus"
megacpp data check "$run/data/corpus"
megacpp train nam56r-tiny --steps "$steps" --out "$run/train" \
  --set "data.data_path=[\"$run/data/corpus\"]"
megacpp report show "$run/train/receipt.json"
