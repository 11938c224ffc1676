"""Rules about the model as a whole, Mamba-3, M2RNN and MTP."""

from megacpp_mcore.recipe.refusal import Rules


def check(r: Rules) -> None:
    _sizes(r)
    if r.has_letter("M"):
        _mamba3(r)
    if r.has_letter("R"):
        _m2rnn(r)
    if r["mtp.mtp_num_layers"]:
        _mtp(r)


def _sizes(r: Rules) -> None:
    seq_length = r["model.seq_length"]
    r.refuse(
        r["model.max_position_embeddings"] < seq_length,
        "model.max_position_embeddings",
        f"must be at least model.seq_length = {seq_length}",
    )
    r.refuse(
        r["model.swiglu"] and r["model.squared_relu"],
        "model.squared_relu",
        "cannot be true with model.swiglu = true: choose one activation",
    )
    r.refuse(r["model.rotary_percent"] > 1, "model.rotary_percent", "must be at most 1")


def _mamba3(r: Rules) -> None:
    key = "mamba3.mamba_num_heads"
    r.refuse(r[key] is None, key, "is needed: the pattern has an M")
    r.multiple(key, "parallel.tensor_model_parallel_size")
    r.multiple(key, "mamba3.mamba_num_groups")
    backend = r.recipe.backends.get("mamba3_scan", "auto")
    for size in ("mamba3.mamba_head_dim", "mamba3.mamba_state_dim"):
        r.refuse(
            backend != "reference" and r[size] & (r[size] - 1),
            size,
            "must be a power of two, as the fused scans need; only backends.mamba3_scan = "
            '"reference" takes others',
        )
    fraction, state = r["mamba3.rope_fraction"], r["mamba3.mamba_state_dim"]
    r.refuse(
        fraction > 1 or (state * fraction) % 2,
        "mamba3.rope_fraction",
        f"must be at most 1 and make mamba3.mamba_state_dim = {state} times it an even number: "
        "RoPE turns pairs",
    )
    tp, angles = "parallel.tensor_model_parallel_size", int(state * fraction) // 2
    r.refuse(
        angles % r[tp],
        "mamba3.rope_fraction",
        f"makes {angles} angles: must be a multiple of {r.told(tp)}",
    )
    _time_step(r, "mamba3")


def _m2rnn(r: Rules) -> None:
    hidden, tp = r["model.hidden_size"], "parallel.tensor_model_parallel_size"
    width = r["m2rnn.k_head_dim"] + r["m2rnn.v_head_dim"]
    heads = r["m2rnn.num_heads"] or hidden // width
    r.refuse(
        heads == 0,
        "m2rnn.num_heads",
        f"is needed: model.hidden_size = {hidden} is less than k_head_dim + v_head_dim = {width}",
    )
    r.refuse(
        heads % r[tp],
        "m2rnn.num_heads",
        f"makes {heads} heads: must be a multiple of {r.told(tp)}",
    )
    r.multiple("m2rnn.k_head_dim", tp)
    _time_step(r, "m2rnn")


def _time_step(r: Rules, section: str) -> None:
    low, high = f"{section}.dt_min", f"{section}.dt_max"
    r.refuse(r[low] > r[high], low, f"must be at most {r.told(high)}")


def _mtp(r: Rules) -> None:
    r.refuse(
        r["model.position_embedding_type"] not in ("rope", "none"),
        "model.position_embedding_type",
        'must be "rope" or "none" with MTP',
    )
    full = r["parallel.recompute_granularity"] == "full"
    r.refuse(
        full and r["parallel.recompute_method"] == "block",
        "parallel.recompute_method",
        'must be "uniform" with MTP: Megatron 0.19.2 leaves MTP out of "block" with a warning',
    )
    r.refuse(
        full
        and r["parallel.recompute_method"] == "uniform"
        and r["parallel.recompute_num_layers"] != 1,
        "parallel.recompute_num_layers",
        'must be 1 with MTP and parallel.recompute_method = "uniform"',
    )
