#!/usr/bin/env bash
# Compare NAM56R at full size with the yardstick, Megatron's own blocks of the same sizes with
# Mamba-2 in place of M and R: examples/full_size.sh GPUS DATA_PREFIX OUT [STEPS]
#
# Both runs have the same data and steps, and the same options except those that Megatron's blocks
# cannot serve; OUT keeps two receipts and their comparison. The data are the byte tokens of
# `megacpp data build`, with the recipe's own vocabulary of 65,536.
set -euo pipefail
gpus=$1 data=$2 out=$3 steps=${4:-36}

sets=(
  --set "data.data_path=[\"$data\"]" --set data.null_tokenizer_eod_id=256
  --set "schedule.train_iters=$steps" --set schedule.lr_warmup_iters=5
  --set schedule.eval_iters=1 --set schedule.log_interval=1
  --set checkpoint.save=null --set checkpoint.load=null --set checkpoint.save_interval=null
)
if [ "$gpus" = 1 ]; then
  recipe=$(dirname "$0")/nam56r-1gpu.toml
else
  recipe=nam56r
  sets+=(--set schedule.micro_batch_size=4 --set "schedule.global_batch_size=$((4 * gpus))")
fi
megacpp train "$recipe" --gpus "$gpus" "${sets[@]}" --out "$out/ours"
megacpp train "$recipe" --gpus "$gpus" --yardstick "${sets[@]}" --out "$out/yardstick"
megacpp report compare --allow-unlike "$out/yardstick/receipt.json" "$out/ours/receipt.json"
