#!/usr/bin/env bash
# Measure again what the README and the catalog claim: examples/rerun_receipts.sh GPUS DATA_PREFIX [MINUTES [NAME ...]]
#
# GPUS: 1, 2 or 4 H200s of one host; the receipts of that kind of machine are measured, what is claimed
# most first, until MINUTES (default 25) have passed: a measurement that would end later is left out and
# named. Each replaces its file in examples/receipts/h200 (another card's: in a folder of its name) when
# it has ended well, so an earlier one stays where a bench is wrong or a run ends early. NAME: these
# receipts alone. DATA_PREFIX: byte tokens of `megacpp data build`. With DRY=1 the commands are printed,
# for CARD (h200 or h100).
# Two runs whose losses are compared are compared when both are there (runs/rerun/A.B.txt). At the end
# the table in examples/receipts/README.md is written anew.
set -euo pipefail
gpus=$1 data=$2 minutes=${3:-25} only=" ${*:4} "
here=$(cd "$(dirname "$0")" && pwd)
card=${CARD:-h200}
[ "${DRY:-}" ] || card=$(python -c 'import re, torch
print(re.search(r"[A-Z]+\d+", torch.cuda.get_device_name())[0].lower())')
out=$here/receipts/$card
work=${WORK:-runs/rerun}
mkdir -p "$work" "$out"
[ "${DRY:-}" ] || python -c '
import sys; from megacpp_mcore.receipts.lane import code, is_traceable
sys.exit(not is_traceable(code()) and "megacpp_mcore/ has changes that no commit has")'
failed=() left_out=() too_large=() measured=" "

# measure SECONDS NAME COMMAND...: COMMAND writes $work/NAME.json. may_not_fit=1: it may run out of memory.
# may_be_refused=BACKEND: a bench may find this backend's results beyond the tolerance
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
  elif timeout $((3 * seconds)) "$@" >"$work/$name.log" 2>&1 ||
    { [ "${may_be_refused:-}" ] && grep -q "^megacpp: layer: $may_be_refused: " "$work/$name.log"; }; then
    mv "$work/$name.json" "$out/$name.json"
    measured+="$name "
  elif [ "${may_not_fit:-}" ] && grep -q OutOfMemoryError "$work/$name.log"; then
    too_large+=("$name")
  else
    failed+=("$name (see $work/$name.log)")
  fi
}
bench() { # SECONDS NAME WORDS...
  local seconds=$1 name=$2
  shift 2
  measure "$seconds" "$name" megacpp bench "$@" --set "schedule.micro_batch_size=${rows:-4}" --receipt "$work/$name.json"
}
train() { # SECONDS NAME RECIPE STEPS WORDS...: a run and its receipt. forced=SURFACE=BACKEND,...
  local seconds=$1 name=$2 recipe=$3 steps=$4
  shift 4
  # shellcheck disable=SC2016
  measure "$seconds" "$name" bash -c 'out=$1; shift; rm -rf "$out"; "$@" && cp "$out/receipt.json" "$out.json"' _ \
    "$work/$name" ${forced:+env "MEGACPP_BACKENDS=$forced"} \
    megacpp train "$recipe" --gpus "$gpus" --out "$work/$name" \
    --set "data.data_path=[\"$data\"]" --set data.split=98,1,1 --set data.null_tokenizer_eod_id=256 \
    --set "schedule.train_iters=$steps" --set schedule.lr_warmup_iters=5 --set schedule.eval_iters=1 \
    --set checkpoint.save=null --set checkpoint.load=null --set checkpoint.save_interval=null "$@"
}
compared() { # A B: two runs, if one is of this call: the rule's verdict, and both curves
  if [[ $measured == *" $1 "* || $measured == *" $2 "* ]] && [[ -f $out/$1.json && -f $out/$2.json ]]; then
    {
      megacpp report compare --allow-unlike "$out/$1.json" "$out/$2.json"
      python -c 'import sys; from pathlib import Path; from megacpp_mcore.pages.run_tables import curves
print(curves("\n".join(f"{name} | {name}" for name in sys.argv[2:]), Path(sys.argv[1])))' "$out" "$1" "$2"
    } >"$work/$1.$2.txt"
    cat "$work/$1.$2.txt"
  fi
}
packed=(--set data.dataloader_inter_document_masking=true)
gqa=(--set attention.kind=gqa)
# In all projections but MLA's up-projections and the experts'
fp8=(--set precision.fp8=hybrid --set precision.fp8_recipe=tensorwise
  --set backends.moe_experts=fused_moe --set backends.mla_up=triton)
mamba3=(--against upstream mamba3_core=reference) # upstream's autotuning takes two minutes

if [ "$gpus" = 1 ]; then
  quarter=run-nam56r-quarter four=(--set schedule.global_batch_size=16) # four micro batches a step
  train 100 run-nam56r-1x$card-graph "$here/nam56r-1gpu.toml" 17
  train 100 run-nam56r-1x$card-profile "$here/nam56r-1gpu.toml" 12 --profile 10
  bench 45 layer-mla layer A --against core_attention=sdpa_cudnn mla_rope=megatron
  bench 40 layer-mla-up layer A --against mla_up=reference
  bench 60 layer-moe layer E --against moe_experts=grouped_mm moe_experts=te
  bench 50 layer-router layer E --against router_topk=reference
  bench 190 layer-mamba3 layer M "${mamba3[@]}"
  bench 220 layer-mamba3-wide layer M "${mamba3[@]}" --set mamba3.mamba_num_heads=112 \
    --set mamba3.mamba_state_dim=128
  bench 80 layer-m2rnn-core layer R --against m2rnn_core=reference
  if python -c 'import xma.layers.m2rnn' 2>/dev/null; then # PyPI has not XMA
    # One of its gradients is beyond the bench's tolerance, which the receipt and the page say.
    may_be_refused=upstream bench 120 layer-m2rnn-core-xma layer R --against m2rnn_core=reference upstream
  fi
  train 80 $quarter-graph nam56r-quarter 24 "${four[@]}"
  # M and R operation by operation, around mamba-ssm's scan and our recurrence
  plain_mr=mamba3_core=reference,m2rnn_core=reference
  forced=$plain_mr train 80 $quarter-graph-plain-mr nam56r-quarter 24 "${four[@]}"
  forced=$plain_mr train 100 "run-nam56r-1x$card-graph-plain-mr" "$here/nam56r-1gpu.toml" 17
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
  bench 190 mamba3_scan-mimo mamba3_scan --set mamba3.variant=mimo --set mamba3.mimo_rank=4
  bench 30 router_gating router_gating
  bench 30 embedding embedding
  # Curves. All that ships, against the same run eager with gradients added up and reduced in fp32
  train 230 $quarter-200-graph nam56r-quarter 200 "${four[@]}"
  train 260 $quarter-200-eager nam56r-quarter 200 "${four[@]}" --set launch.cuda_graph_impl=none \
    --set precision.gradient_accumulation_fusion=false --set optimizer.fused_update=false
  for experts in te fused_moe; do
    train 180 $quarter-100-$experts nam56r-quarter 100 "${four[@]}" --set backends.moe_experts=$experts
  done
  train 110 $quarter-40-bf16 nam56r-quarter 40 "${four[@]}"
  train 110 $quarter-40-fp8 nam56r-quarter 40 "${four[@]}" "${fp8[@]}"
  train 140 $quarter-100-fp8 nam56r-quarter 100 "${four[@]}" "${fp8[@]}" # against $quarter-100-fused_moe
  train 90 $quarter-20-fp8-graph nam56r-quarter 20 "${four[@]}" "${fp8[@]}"
  train 90 $quarter-20-fp8-eager nam56r-quarter 20 "${four[@]}" "${fp8[@]}" --set launch.cuda_graph_impl=none
  # Rows so short that the GPU has next to nothing to do: what the host takes to launch a layer
  train 60 $quarter-short-rows nam56r-quarter 20 --set launch.cuda_graph_impl=none --set model.seq_length=512 \
    --set schedule.micro_batch_size=1 --set schedule.global_batch_size=4
  # 500 steps of two micro batches at twice the learning rate, with both decays: as the recipe has them, with
  # mamba-ssm's floor of the decay, and with Megatron's embedding as well
  for start in "" -floor-1e-4 -megatron-init; do
    upstream=()
    if [ "$start" ]; then upstream=(--set mamba3.decay_floor=1e-4); fi
    if [ "$start" = -megatron-init ]; then upstream+=(--set model.embedding_init_method_std=null); fi
    for decay in softplus rational; do
      train 280 $quarter-lr2-$decay$start nam56r-quarter 500 --set "mamba3.decay=$decay" --set schedule.lr_warmup_iters=100 \
        --set schedule.global_batch_size=8 --set optimizer.lr=6e-4 --set optimizer.min_lr=6e-5 "${upstream[@]}"
    done
  done
  # Experts at every size; a cell that does not fit into memory is left out. Liger's are tuned once a size
  export TRITON_CACHE_AUTOTUNING=1
  for tokens in 4 16 64; do
    for experts in 16 64 128; do
      for ffn in 512 896 2048; do
        may_not_fit=1 rows=$((tokens / 4)) bench $((110 + tokens)) "layer-moe-${tokens}k-$experts-$ffn" layer E \
          --against moe_experts=grouped_mm moe_experts=te upstream --set "moe.num_experts=$experts" \
          --set "moe.moe_ffn_hidden_size=$ffn" --set schedule.global_batch_size=128 # of the recipe's 8 GPUs
      done
    done
  done
  compared $quarter-graph-plain-mr $quarter-graph
  compared $quarter-200-eager $quarter-200-graph
  compared $quarter-100-te $quarter-100-fused_moe
  compared $quarter-40-bf16 $quarter-40-fp8
  compared $quarter-100-fused_moe $quarter-100-fp8
  compared $quarter-lr2-softplus $quarter-lr2-rational
else
  whole=run-nam56r-${gpus}x$card batch=(--set "schedule.global_batch_size=$((16 * gpus))") beside=()
  if [ "$card" = h100 ]; then # 80 GB: half the rows, and the yardstick, which keeps more, recomputes
    batch+=(--set schedule.micro_batch_size=2)
    beside=(--set 'recompute.moe=["act"]' --set recompute.layernorm=true)
  fi
  for turn in "" -again; do # in turns: a machine that becomes slower does so for both
    train 200 "$whole-dp$gpus-graph$turn" nam56r 60 "${batch[@]}"
    train 500 "$whole-yardstick$turn" nam56r 60 "${batch[@]}" "${beside[@]}" --yardstick
  done
  train 150 "$whole-dp$gpus-fp8" nam56r 20 "${batch[@]}" "${fp8[@]}"
  divided=("${batch[@]}" --set "parallel.expert_model_parallel_size=$gpus")
  train 120 "$whole-ep$gpus" nam56r 20 "${divided[@]}"
  train 120 "$whole-ep$gpus-graph" nam56r 20 "${divided[@]}" --set backends.moe_dispatch=allgather
  if [ "$card" = h100 ]; then # is another layout better for the yardstick?
    train 160 "$whole-yardstick-1-row" nam56r 20 "${batch[@]}" --set schedule.micro_batch_size=1 --yardstick
  fi
  quarter=run-nam56r-quarter-${gpus}x$card-reduce
  for dtype in fp32 bf16; do
    train 160 "$quarter-$dtype" nam56r-quarter 200 --set "schedule.global_batch_size=$((8 * gpus))" \
      --set schedule.lr_warmup_iters=50 --set "precision.grad_reduce_in_bf16=$([ $dtype = bf16 ] && echo true || echo false)"
  done
  compared "$whole-yardstick" "$whole-dp$gpus-graph"
  compared "$whole-yardstick-again" "$whole-dp$gpus-graph-again"
  compared "$quarter-fp32" "$quarter-bf16"
fi
[ "${DRY:-}" ] || python -m megacpp_mcore.pages "$here/.."
for name in "${failed[@]+"${failed[@]}"}"; do echo "failed: $name" >&2; done
for name in "${left_out[@]+"${left_out[@]}"}"; do echo "left out, no time: $name" >&2; done
for name in "${too_large[@]+"${too_large[@]}"}"; do echo "left out, no memory: $name" >&2; done
((${#failed[@]} == 0))
