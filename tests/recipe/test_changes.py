"""With which other recipe a run may be resumed, and what is said of the rest."""

from megacpp_mcore.recipe import load_recipe
from megacpp_mcore.recipe.changes import refused_changes


def test_a_run_may_change_its_layout_and_its_length_and_nothing_else():
    def refused(*overrides):
        return refused_changes(before, load_recipe("nam56r", overrides).to_dict())

    before = load_recipe("nam56r").to_dict()
    whole = "AEMEAEMEAEMR" * 4 + "AEME"
    uncut = load_recipe("nam56r", [f"model.pattern={whole}"]).to_dict()
    stages = ["parallel.pipeline_model_parallel_size=2", f"model.pattern={whole[:24]}|{whole[24:]}"]
    assert refused() is refused(*stages[:1]) is refused("schedule.train_iters=5000") is None
    assert refused_changes(uncut, load_recipe("nam56r", stages).to_dict()) is None
    moved = stages[0], f"model.pattern={whole[24:]}|{whole[:24]}"
    assert refused_changes(uncut, load_recipe("nam56r", moved).to_dict()).startswith(
        f"model.pattern was '{whole}' and is '"
    )
    assert refused("schedule.seed=7", "launch.nproc_per_node=4") == (
        "schedule.seed was 1234 and is 7"
    )
    assert "launch.device was 'cuda' and is 'cpu'" in refused_changes(
        before, load_recipe("nam56r-tiny").to_dict()
    )


def test_a_run_of_a_release_without_a_key_goes_on_at_the_keys_default():
    def begun_without(key):
        section, _, name = key.partition(".")
        content = load_recipe("nam56r").to_dict()
        del content[section][name]
        return content

    now = load_recipe("nam56r").to_dict()
    assert refused_changes(begun_without("optimizer.adam_eps"), now) is None
    eps = load_recipe("nam56r", ["optimizer.adam_eps=1e-6"]).to_dict()
    assert refused_changes(begun_without("optimizer.adam_eps"), eps) == (
        "optimizer.adam_eps is 1e-06, and the release that began the run had no such key"
    )
    # What the run asked for and this release does not know, or has no default for, is refused.
    assert refused_changes({**now, "data": {**now["data"], "old": 3}}, now) == (
        "data.old was 3, and this release has no such key"
    )
    assert "model.hidden_size is 3584, and the release that began the run" in refused_changes(
        begun_without("model.hidden_size"), now
    )
    norm = load_recipe("nam56r", ["backends.norm=te"]).to_dict()
    assert refused_changes(norm, now) == "backends.norm was 'te' and is None"
    # A section that is new has keys that are new.
    content = load_recipe("nam56r-tiny").to_dict()
    without = {name: keys for name, keys in content.items() if name != "recompute"}
    assert refused_changes(without, content) is None
