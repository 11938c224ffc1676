#!/usr/bin/env bash
# Measure again what the README and the catalog claim: examples/rerun_receipts.sh GPUS DATA_PREFIX [MINUTES [NAME ...]]
#
# GPUS: 1, 2 or 4 H200s of one host; the receipts of that kind of machine are measured, what is claimed
# most first, until MINUTES (default 25) have passed: a measurement that would end later is left out and
# named. Each replaces its file in examples/receipts/h200 when it has ended well, so an earlier one stays
# where a bench is wrong or a run ends early. NAME: these receipts alone. DATA_PREFIX: byte tokens of
# `megacpp data build`. With DRY=1 the commands are printed. At the end the table in
# examples/receipts/README.md is written anew.
set -euo pipefail
gpus=$1 data=$2 minutes=${3:-25} only=" ${*:4} "
here=$(cd "$(dirname "$0")" && pwd)
out=$here/receipts/h200
work=${WORK:-runs/rerun}
mkdir -p "$work"
[ "${DRY:-}" ] || python -c '
import sys; from megacpp_mcore.receipts.lane import code, is_traceable
sys.exit(not is_traceable(code()) and "megacpp_mcore/ has changes that no commit has")'
failed=() left_out=()

# measure SECONDS NAME COMMAND...: COMMAND writes $work/NAME.json
measure() {
  local seconds=$1 name=$2
  shift 2
  if [[ $only != "  " && $only != *" $name "* ]]; then return; fi
  if ((SECONDS + seconds > minutes * 60)); then
    left_out+=("$name")
  elif [ "${DRY:-}" ]; then
    printf '%4d s ' "$seconds"
    printf ' %q' "$@"
    printf '\n'
    SECONDS=$((SECONDS + seconds))
  elif timeout $((3 * seconds)) "$@" >"$work/$name.log" 2>&1; then
    mv "$work/$name.json" "$out/$name.json"
  else
    failed+=("$name (see $work/$name.log)")
  fi
}
bench() { # SECONDS NAME WORDS...
  local seconds=$1 name=$2
  shift 2
  measure "$seconds" "$name" megacpp bench "$@" --set "schedule.micro_batch_size=${rows:-4}" --receipt "$work/$name.json"
}
train() { # SECONDS NAME RECIPE STEPS WORDS...: a run and its receipt
  local seconds=$1 name=$2 recipe=$3 steps=$4
  shift 4
  # shellcheck disable=SC2016
  measure "$seconds" "$name" bash -c 'receipt=$1; shift; "$@" && cp "$receipt/receipt.json" "$receipt.json"' _ \
    "$work/$name" megacpp train "$recipe" --gpus "$gpus" --out "$work/$name" --overwrite "$@" \
    --set "data.data_path=[\"$data\"]" --set data.split=98,1,1 --set data.null_tokenizer_eod_id=256 \
    --set "schedule.train_iters=$steps" --set schedule.lr_warmup_iters=5 --set schedule.eval_iters=1 \
    --set checkpoint.save=null --set checkpoint.load=null --set checkpoint.save_interval=null
}
packed=(--set data.dataloader_inter_document_masking=true)
gqa=(--set attention.kind=gqa)

if [ "$gpus" = 1 ]; then
  train 100 run-nam56r-1xh200-graph "$here/nam56r-1gpu.toml" 17
  bench 45 layer-mla layer A --against core_attention=sdpa_cudnn mla_rope=megatron
  bench 40 layer-mla-up layer A --against mla_up=reference
  bench 50 layer-moe layer E --against moe_experts=grouped_mm
  bench 50 layer-mamba3 layer M --against mamba3_core=reference
  bench 60 layer-mamba3-wide layer M --against mamba3_core=reference --set mamba3.mamba_num_heads=112 \
    --set mamba3.mamba_state_dim=128
  bench 50 layer-m2rnn-core layer R --against m2rnn_core=reference
  bench 45 linear_cross_entropy linear_cross_entropy
  bench 45 linear_cross_entropy-mean linear_cross_entropy --variant mean
  bench 40 moe_experts moe_experts
  bench 30 norm norm
  bench 30 m2rnn-b4-h44 m2rnn --against cuda --set m2rnn.num_heads=44
  rows=1 bench 30 m2rnn-b1-h44 m2rnn --against cuda --set m2rnn.num_heads=44
  bench 30 mamba3_scan mamba3_scan
  bench 45 core_attention core_attention
  bench 60 core_attention-thd core_attention "${packed[@]}"
  bench 30 mla_rope mla_rope
  bench 30 rope_qk rope_qk "${gqa[@]}"
  bench 40 layer-gqa layer '*' --against rope_qk=megatron
  bench 90 mamba3_scan-mimo mamba3_scan --set mamba3.variant=mimo --set mamba3.mimo_rank=4
  bench 30 router_gating router_gating
  bench 30 embedding embedding
else
  batch=(--set "schedule.global_batch_size=$((16 * gpus))") # four micro batches a GPU
  train 240 "run-nam56r-${gpus}xh200-dp${gpus}-graph" nam56r 60 "${batch[@]}"
  train 380 "run-nam56r-${gpus}xh200-yardstick" nam56r 60 "${batch[@]}" --yardstick
fi
[ "${DRY:-}" ] || python -m megacpp_mcore.pages "$here/.."
for name in "${failed[@]+"${failed[@]}"}"; do echo "failed: $name" >&2; done
for name in "${left_out[@]+"${left_out[@]}"}"; do echo "left out, no time: $name" >&2; done
((${#failed[@]} == 0))
