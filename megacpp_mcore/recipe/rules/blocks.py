"""Rules about the model as a whole, the blocks that the table of letters has rules for, and MTP."""

from megacpp_mcore.hybrid import letters
from megacpp_mcore.recipe.refusal import Rules


def check(r: Rules) -> None:
    _sizes(r)
    for entry in letters.known():
        if r.has_letter(entry.letter):
            _letter(r, entry)
    if r["mtp.mtp_num_layers"]:
        _mtp(r)


def _sizes(r: Rules) -> None:
    r.refuse(
        r["model.swiglu"] and r["model.squared_relu"],
        "model.squared_relu",
        "cannot be true with model.swiglu = true: choose one activation",
    )


def _letter(r: Rules, entry: letters.BlockLetter) -> None:
    key = "data.dataloader_inter_document_masking"
    r.refuse(
        r[key] and entry.packed_documents,
        key,
        f"must be false, as the pattern has {entry.letter}: {entry.packed_documents}",
    )
    if entry.rules:
        entry.rules(r)


def _mtp(r: Rules) -> None:
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
