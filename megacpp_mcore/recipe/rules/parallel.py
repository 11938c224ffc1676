"""Rules about parallelism: the world, sequences, overlap, recomputation."""

from megacpp_mcore.hybrid import letters
from megacpp_mcore.recipe.refusal import Rules
from megacpp_mcore.surfaces.support import TE

_TP, _PP = "parallel.tensor_model_parallel_size", "parallel.pipeline_model_parallel_size"
_CP, _EP = "parallel.context_parallel_size", "parallel.expert_model_parallel_size"
_BATCH = "schedule.global_batch_size"


def check(r: Rules) -> None:
    _world(r)
    _sequence(r)
    _context(r)
    _overlap(r)
    _recompute(r)


def _world(r: Rules) -> None:
    world, tp, pp, cp, ep = r.recipe.world_size, r[_TP], r[_PP], r[_CP], r[_EP]
    gpus = f"launch.nnodes x launch.nproc_per_node = {world}"
    etp = r["parallel.expert_tensor_parallel_size"] or tp
    expert = etp * ep * pp
    r.refuse(
        world % expert,
        _EP,
        f"times expert tensor size {etp} times pipeline size {pp} is {expert}, which must divide "
        f"{gpus}",
    )
    if world % (tp * pp * cp):
        return  # Megatron refuses it, in words
    dp = r.recipe.data_parallel_size
    r.refuse(
        dp * cp % r["parallel.num_distributed_optimizer_instances"],
        "parallel.num_distributed_optimizer_instances",
        f"must divide the data x context parallel size = {dp * cp}",
    )
    step = r["schedule.micro_batch_size"] * dp
    r.multiple(_BATCH, f"schedule.micro_batch_size x data parallel size {dp} = {step}", step)
    virtual, batches = r.recipe.plan.vpp, r[_BATCH] // step
    r.refuse(
        virtual > 1 and r[_BATCH] % step == 0 and batches % pp,
        _BATCH,
        f"makes {batches} micro batches: the interleaved schedule of {virtual} virtual stages "
        f"needs a multiple of {r.text(_PP)}",
    )


def _sequence(r: Rules) -> None:
    tp, cp, seq_length = r[_TP], r[_CP], r["model.seq_length"]
    if r["parallel.sequence_parallel"]:
        r.refuse(tp == 1, "parallel.sequence_parallel", f"must be false with {_TP} = 1")
        r.refuse(
            seq_length % (cp * tp),
            "model.seq_length",
            f"must be a multiple of context x tensor parallel size = {cp * tp} with "
            "parallel.sequence_parallel",
        )
    r.refuse(
        len(r["parallel.cp_comm_type"]) not in (1, r["model.depth"]),
        "parallel.cp_comm_type",
        f"must have one entry, or one for each of the {r['model.depth']} layers",
    )


def _context(r: Rules) -> None:
    if r[_CP] == 1:
        return
    instead = "use tensor and sequence parallelism, or pipeline stages, for long sequences"
    for entry in letters.known():
        r.refuse(
            entry.split_sequence and r.has_letter(entry.letter),
            _CP,
            f"must be 1, as the pattern has {entry.letter}: {entry.split_sequence}; {instead}",
        )
    attention = r.recipe.backends.get("core_attention", "auto")
    r.refuse(
        r.has("+*") and attention not in ("auto", TE),
        _CP,
        f"must be 1 with backends.core_attention = {attention!r}, which sees the tokens of one "
        f'rank only; "{TE}" attends over the ranks. Or {instead}',
    )


def _overlap(r: Rules) -> None:
    key = "parallel.overlap_p2p_comm"
    r.refuse(
        r[key] and r.recipe.plan.vpp == 1,
        key,
        "must be left out without virtual pipeline stages: Megatron would turn it off",
    )


def _recompute(r: Rules) -> None:
    method, layers = "parallel.recompute_method", "parallel.recompute_num_layers"
    full = r["parallel.recompute_granularity"] == "full"
    for key in (method, layers):
        r.refuse(
            r[key] is not None and not full,
            key,
            'is read with parallel.recompute_granularity = "full" only',
        )
    stage = r["model.depth"] // r[_PP]
    r.refuse(
        (r[layers] or 0) > stage, layers, f"must be at most the {stage} layers of a pipeline stage"
    )
