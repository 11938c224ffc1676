"""The losses of our HybridModel against those of Megatron's own: main head and MTP, one process."""

from dataclasses import replace

import pytest
import torch
from loss_models import (
    BATCH,
    FLOAT32,
    SEQ,
    TOLERANCE,
    Outcome,
    assert_close,
    assert_same,
    batches,
    megatrons_step,
    models,
    run,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_token_prediction import (
    MTPLossLoggingHelper,
    process_mtp_loss,
)

from megacpp_mcore import dispatch
from megacpp_mcore.kernels.linear_cross_entropy import chunk_loop
from megacpp_mcore.layers import loss
from megacpp_mcore.layers.loss import LossError
from megacpp_mcore.surfaces.backend import REFERENCE
from megacpp_mcore.surfaces.registry import REGISTRY
from megacpp_mcore.surfaces.support import always
from megacpp_mcore.training.cpu import step
from megacpp_mcore.training.cpu.megatron_setup import single_process


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Launch variables of one model, taken back at the test's end."""
    for name in ("MEGACPP_RECIPE", "MEGACPP_BACKENDS", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize("per_token", [False, True], ids=["per-batch", "per-token"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("depths", [0, 1, 2])
def test_losses_log_and_gradients_are_megatrons(depths, tied, per_token):
    overrides = [f"mtp.mtp_num_layers={depths}", *([] if depths else ["mtp.pattern="])]
    overrides += [f"model.untie_embeddings_and_output_weights={str(not tied).lower()}"]
    with single_process(1):
        ours, megatrons = models(*overrides, heads="reference")
        for model in (ours, megatrons):
            model.config.calculate_per_token_loss = per_token
        expected = run(megatrons, megatrons_step, batches())
        assert_same(run(ours, step.forward_step, batches()), expected)
        # Losses for any gradient, as another loss_func would have them.
        assert_same(run(ours, megatrons_step, batches()), expected)


def test_a_micro_batch_without_a_counted_token_adds_nothing():
    with single_process(1):
        for per_token in (False, True):
            ours, megatrons = models("mtp.mtp_num_layers=2")
            for model in (ours, megatrons):
                model.config.calculate_per_token_loss = per_token
            empty = batches()
            empty[1]["loss_mask"].zero_()
            expected = run(megatrons, megatrons_step, empty)
            assert_same(run(ours, step.forward_step, empty), expected)
            alone = run(ours, step.forward_step, empty[1:])
            assert all(not g.any() for g in alone.gradients.values() if g is not None)


# keyword arguments of process_mtp_loss and HeadLosses.with_mtp, and fields of the config
@pytest.mark.parametrize(
    "asked",
    [
        pytest.param({"bounds": [0, 5, 6, SEQ]}, id="documents"),
        pytest.param({"mtp_detach_heads": True}, id="detached"),
        pytest.param({"use_mup": True, "mup_output_mult": 0.37}, id="mup"),
        pytest.param({"mask": None}, id="no-mask"),
        pytest.param({"calculate_per_token_loss": True, "bounds": [0, 1, SEQ]}, id="per-token"),
    ],
)
def test_mtp_alone_is_megatrons(asked):
    """Against process_mtp_loss, from the hidden states on: packed documents need no attention."""
    bounds, asked = asked.get("bounds"), {k: v for k, v in asked.items() if k != "bounds"}
    with single_process(1):
        model = models("mtp.mtp_num_layers=2").ours
        config = model.config
        for name, value in asked.items():
            setattr(config, name, value)
        heads = loss.head_losses(model)
        generator = torch.Generator().manual_seed(5)
        rows = 1 if bounds else BATCH
        labels = torch.randint(61, (rows, SEQ), generator=generator)
        mask = (torch.rand(rows, SEQ, generator=generator) > 0.3).float()
        mask = asked.get("mask", mask)
        packed = None
        if bounds:
            packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=torch.tensor(bounds))
        drawn = torch.randn(3 * SEQ, rows, 16, generator=generator, dtype=torch.float64)
        weight = model.output_layer.weight

        def ours(hidden):
            return heads.with_mtp(hidden, weight, labels, mask, packed, True)

        def megatrons(hidden):
            return process_mtp_loss(
                hidden, labels, mask, model.output_layer, None, None, True,
                model.compute_language_model_loss, config, model.cp_group, model.tp_group, packed,
                model._scale_logits if config.use_mup else None,
            )  # fmt: skip

        found = []
        for road in (ours, megatrons):
            MTPLossLoggingHelper.tracker.clear()
            hidden, weight.grad = drawn.clone().requires_grad_(), None
            main = road(hidden)
            assert torch.equal(main, drawn[:SEQ])
            main.square().sum().backward()
            found.append(
                Outcome(
                    [],
                    MTPLossLoggingHelper.tracker["loss_values"],
                    {"hidden": hidden.grad, "weight": weight.grad},
                )
            )
        if asked.get("mtp_detach_heads"):
            assert [outcome.gradients.pop("weight") for outcome in found] == [None, None]
        assert_same(*found)


@pytest.fixture
def serving(monkeypatch):
    """serving(name): from here on that backend serves, on this CPU too."""
    surface = REGISTRY["linear_cross_entropy"]

    def serve(name: str) -> None:
        backends = (replace(b, supports=always) for b in surface.backends if b.name == name)
        monkeypatch.setitem(REGISTRY, surface.name, replace(surface, backends=tuple(backends)))
        dispatch.forget()

    yield serve
    dispatch.forget()


def largest_allocation(call, *arguments):
    """The bytes of the largest piece of memory that torch takes during the call; its result."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        result = call(*arguments)
    events = profile.profiler.kineto_results.events()
    return max(event.nbytes() for event in events if event.name() == "[memory]"), result


@pytest.mark.slow
def test_training_makes_nothing_of_the_size_of_the_logits(serving, monkeypatch):
    vocab_size, logits = 4096, 4 * BATCH * SEQ * 4096
    weight = 4 * vocab_size * 16
    monkeypatch.setattr(chunk_loop, "chunk_length", lambda tokens, classes: 8)
    overrides = [f"model.vocab_size={vocab_size}", "mtp.mtp_num_layers=2"]
    largest, found = {}, {}
    for backend in ("chunked", REFERENCE, "megatron"):
        serving(backend)
        with single_process(1):
            ours = models(*overrides).ours.float()
            arguments = (ours, step.forward_step, batches())
            largest[backend], found[backend] = largest_allocation(run, *arguments)
        assert_same(found[backend], found["chunked"], FLOAT32)
    assert largest[REFERENCE] >= logits and largest["megatron"] >= logits
    assert largest["chunked"] <= weight < logits


def test_evaluation():
    """Without labels the logits, with labels the losses, and MTP is not logged."""
    data = batches()[0]
    inputs = {
        "input_ids": data["tokens"], "position_ids": data["position_ids"], "attention_mask": None,
    }  # fmt: skip
    with single_process(1), torch.no_grad():
        ours, megatrons = models("mtp.mtp_num_layers=2")
        ours.eval(), megatrons.eval()
        logits = ours(**inputs)
        assert logits.shape == (BATCH, SEQ, 64) and torch.equal(logits, megatrons(**inputs))
        expected = megatrons(**inputs, labels=data["labels"], loss_mask=data["loss_mask"])
        given = {**inputs, "labels": data["labels"], "loss_mask": data["loss_mask"]}
        assert_close(ours(**given), expected, "losses")
        weights = torch.rand(BATCH, SEQ)
        total = ours(**given, loss_weights=weights)
        assert_close(total, (expected * weights).sum(), "total")
        assert MTPLossLoggingHelper.tracker == {}


def test_the_backend_is_recorded_and_megatrons_own_heads_can_be_named(serving):
    serving("megatron")
    with single_process(1):
        ours, megatrons = models("mtp.mtp_num_layers=1", "backends.linear_cross_entropy=megatron")
        decided = [d for d in dispatch.decisions() if d.surface == "linear_cross_entropy"]
        assert [(d.requested, d.observed) for d in decided] == [("megatron", "megatron")] * 2
        assert "named" in decided[0].reason and "Megatron's own model class" in decided[1].reason
        found = run(ours, step.forward_step, batches())
        expected = run(megatrons, megatrons_step, batches())
        for name, gradient in expected.gradients.items():
            assert_close(found.gradients[name], gradient, name)
        assert not torch.isnan(MTPLossLoggingHelper.tracker["correct_values"]).any()


class Writer(dict):
    def add_scalar(self, name, value, iteration):
        self[name] = value.item()


def test_a_rate_that_is_not_counted_is_not_logged_as_a_number():
    with single_process(1):
        ours, megatrons = models("mtp.mtp_num_layers=2")
        logged = []
        for model, forward_step in ((ours, step.forward_step), (megatrons, megatrons_step)):
            run(model, forward_step, batches())
            logged.append(Writer())
            MTPLossLoggingHelper.track_mtp_metrics(0.5, 1, logged[-1])
    mine, theirs = logged
    for name, value in theirs.items():
        if "acceptance" in name:
            assert name not in mine or mine[name] != mine[name], name
        else:
            assert mine[name] == pytest.approx(value, rel=TOLERANCE)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mtp_report_acceptance", True),
        ("fine_grained_activation_offloading", True),
        ("gtp_weight_remat_size", 2),
    ],
)
def test_what_needs_the_logits_has_them_and_a_named_backend_is_refused(
    serving, monkeypatch, field, value
):
    with single_process(1):
        ours = models("mtp.mtp_num_layers=1").ours
        setattr(ours.config, field, value)
        dispatch.forget()
        assert loss.head_losses(ours) is None
        (decision,) = dispatch.decisions()
        assert decision.observed == "megatron"
        assert decision.reason.startswith(f"{field} = {value!r}: ")
        monkeypatch.setenv("MEGACPP_BACKENDS", "linear_cross_entropy=reference")
        with pytest.raises(LossError, match=f"{field} = {value!r}.*megatron"):
            loss.head_losses(ours)
        serving("megatron")
        monkeypatch.setenv("MEGACPP_BACKENDS", "linear_cross_entropy=megatron")
        assert loss.head_losses(ours) is None


def test_a_fusion_whose_gradients_are_wrong_serves_only_by_name(serving, monkeypatch):
    with single_process(1):
        ours = models("mtp.mtp_num_layers=1").ours
        ours.config.cross_entropy_loss_fusion = True
        ours.config.cross_entropy_fusion_impl = "te"
        with pytest.raises(LossError, match=r"fusion_impl = 'te'.*megatron"):
            loss.head_losses(ours)
        serving("megatron")
        monkeypatch.setenv("MEGACPP_BACKENDS", "linear_cross_entropy=megatron")
        assert loss.head_losses(ours) is None


def test_calls_that_cannot_be_served_are_refused():
    data = batches()[0]
    arguments = (data["tokens"], data["position_ids"], None)
    with single_process(1):
        ours = models("mtp.mtp_num_layers=1").ours
        with pytest.raises(LossError, match=r"loss_weights \(1, 12\) for labels \(3, 12\)"):
            ours(*arguments, labels=data["labels"], loss_weights=torch.ones(1, SEQ))
        with pytest.raises(LossError, match="no logits to gather"):
            ours(*arguments, labels=data["labels"], runtime_gather_output=True)


def test_the_builder_gives_the_model_what_megatrons_gives_it():
    with single_process(1):
        ours, megatrons = models("mtp.mtp_num_layers=1")
        simple = (int, float, str, bool, type(None))
        expected = {k: v for k, v in vars(megatrons).items() if isinstance(v, simple)}
        assert expected.items() <= vars(ours).items()
        assert ours.state_dict().keys() == megatrons.state_dict().keys()


def test_heads_that_megatrons_own_model_would_not_have_are_refused(environment):
    """Megatron-LM's pretrain_hybrid.py names the model's class itself."""
    environment.setenv("MEGACPP_BACKENDS", f"{loss.SURFACE}=reference")
    with single_process(1), pytest.raises(LossError, match=r"own HybridModel.*megacpp train"):
        models()  # builds ours first


@pytest.mark.parametrize("asked", ["auto", "megatron"])
def test_megatrons_own_model_is_recorded_with_its_own_heads(environment, asked):
    dispatch.forget()
    environment.setenv("MEGACPP_BACKENDS", f"{loss.SURFACE}={asked}")
    with single_process(1):
        models(heads="reference")
    found = [d for d in dispatch.decisions() if d.surface == loss.SURFACE]
    assert [(d.requested, d.observed) for d in found] == [
        ("reference", "reference"), (asked, "megatron"),
    ]  # fmt: skip
    assert "Megatron's own model class" in found[1].reason
