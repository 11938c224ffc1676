"""Exported folders: the loader's logits, names, the way back, and blocks of other packages."""

import ast
import importlib
import itertools
import json
import math
import os
import re
import shlex
import struct
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from megacpp_mcore import cli, receipts
from megacpp_mcore.errors import MegacppError
from megacpp_mcore.inference import export, standalone
from megacpp_mcore.inference.importing import import_model
from megacpp_mcore.inference.loading import Loaded, built, load_weights, loaded
from megacpp_mcore.inference.names import exported_name
from megacpp_mcore.inference.recipe import MODEL_SECTIONS, InferenceError, on_one_device
from megacpp_mcore.inference.safetensors import read_safetensors, write_safetensors
from megacpp_mcore.inference.trained import Trained, trained
from megacpp_mcore.inference.upstream import from_upstream, read_weights, to_upstream
from megacpp_mcore.kernels.mamba3 import mamba3_scan
from megacpp_mcore.recipe import load_recipe
from megacpp_mcore.training.checkpoints import folder
from megacpp_mcore.training.cpu.train import train

VARIANTS = {
    "mla": [],
    "gqa": ["attention.kind=gqa", "attention.num_query_groups=1", "attention.qk_layernorm=true",
            "model.rotary_percent=0.5"],
    "mla-norms": ["attention.qk_layernorm=true"],
    "no-q-lora": ["attention.q_lora_rank=null"],
    "yarn": ["attention.rope_type=yarn", "attention.rotary_scaling_factor=4"],
    "mimo": ["mamba3.variant=mimo", "mamba3.mimo_rank=2", "mamba3.mamba_num_groups=2"],
    "rational": ["mamba3.decay=rational", "mamba3.rope_fraction=1.0"],
    "tied": ["model.untie_embeddings_and_output_weights=false"],
    "softmax": ["moe.moe_router_score_function=softmax", "moe.moe_router_enable_expert_bias=false",
                "moe.moe_router_topk_scaling_factor=1.5"],
    "pre-softmax": ["moe.moe_router_score_function=softmax", "moe.moe_router_pre_softmax=true",
                    "moe.moe_router_enable_expert_bias=false", "moe.moe_router_dtype=fp64"],
    "one-expert": ["moe.moe_router_topk=1", "moe.moe_router_score_function=sqrtsoftplus"],
    "shared-gate": ["moe.moe_shared_expert_gate=true"],
    "no-shared": ["moe.moe_shared_expert_intermediate_size=null"],
    "squared-relu": ["model.swiglu=false", "model.squared_relu=true"],
}  # fmt: skip


@pytest.fixture
def folder_of(small_recipe, tmp_path):
    """folder_of(overrides): an exported folder of new weights, no two alike, and the model's logits
    of the tokens."""

    def make(overrides, tokens, blocks=False):
        recipe = load_recipe(str(small_recipe), list(overrides))
        alone = on_one_device("small", recipe.to_dict(), device="cpu", mtp=True)
        source = Trained("small", recipe.to_dict(), tmp_path, 7)
        with built(alone) as model, torch.no_grad():
            for parameter in [*model.parameters(), *model.buffers()]:
                if parameter.is_floating_point():
                    parameter += 0.1 * torch.randn_like(parameter)
            model.eval()
            found = Loaded(model, alone, torch.device("cpu"), 256)
            export.write(tmp_path / "out", source, found, "fp32", blocks=blocks)
            return tmp_path / "out", model.next_token_logits(tokens)

    return make


def rounding(logits):
    """Another order of sums: 4 layers, up to 64 terms. Of 280 models, 20 of each case here, one was
    off by 18 roundings of the largest logit, most by less than 10."""
    return 64 * torch.finfo(torch.float32).eps * logits.abs().max().item()


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_loader_has_the_models_logits(folder_of, variant):
    """At once, and in pieces from its states."""
    tokens = torch.randint(0, 257, (2, 40))
    out, wanted = folder_of(VARIANTS[variant], tokens)
    model = standalone.load(out)
    found, _ = model(tokens)
    assert wanted.std() > 1000 * rounding(wanted)
    torch.testing.assert_close(found, wanted, rtol=0, atol=rounding(wanted))
    parts, states = [], None
    for start, end in ((0, 3), (3, 17), *((t, t + 1) for t in range(17, 40))):
        part, states = model(tokens[:, start:end], states)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), wanted, rtol=0, atol=rounding(wanted))


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["mla-norms", "gqa", "no-q-lora", "mimo", "shared-gate"])
def test_the_page_has_every_name(folder_of, variant):
    page = (Path(__file__).parents[2] / "docs/inference.md").read_text()
    out, _ = folder_of(VARIANTS[variant], torch.zeros(1, 1, dtype=torch.int64))
    for name in read_safetensors(out / export.WEIGHTS):
        name = re.sub(r"(?<=\.)\d+(?=\.)", "N", name)
        assert f"`{name.removeprefix('mtp.N.') if '.layers.' in name else name}`" in page, name


@pytest.mark.slow
def test_every_weight_matters_to_the_logits(folder_of):
    """A loader that ignored one would pass the comparison above for that weight's initial value."""
    tokens = torch.randint(0, 257, (1, 12))
    out, wanted = folder_of([], tokens)
    model = standalone.load(out)
    for name, parameter in model.named_parameters():
        kept = parameter.data.clone()
        parameter.data = parameter + 0.5 * torch.randn_like(parameter)
        found, _ = model(tokens)
        parameter.data = kept
        assert (found - wanted).abs().max() > rounding(wanted), name


def test_the_loader_is_short_and_needs_torch_alone():
    text = Path(standalone.__file__).read_text()
    assert len(text.splitlines()) < 400
    imported = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module.partition(".")[0])
    assert imported - {"torch"} <= set(sys.stdlib_module_names)


@pytest.mark.slow
def test_a_round_trip_trains_on(small_run, small_text, tmp_path, capfd):
    """Through the commands: the parameters are the same bits, and a run goes on from them."""
    recipe = tmp_path / "small.toml"
    recipe.write_text(small_text)
    out, back = str(tmp_path / "out"), str(tmp_path / "back")
    assert cli.main(["export", str(small_run), "--out", out, "--blocks"]) == 0
    name = trained(small_run).name  # of a file, which a name alone does not find
    assert f"import {out} --recipe {name}.toml --out" in capfd.readouterr().out
    blocks = [
        word
        for layer, package in ((2, "mamba-ssm"), (3, "xma"))
        for word in ("--block", f"{layer}={out}/blocks/layer-{layer}.{package}.safetensors")
    ]
    assert cli.main(["import", out, "--recipe", str(recipe), "--out", back, *blocks]) == 0
    assert f"train {recipe} --out {back} --resume" in capfd.readouterr().out
    with loaded(trained(small_run), device="cpu", mtp=True) as found:
        wanted = {name: p.detach().clone() for name, p in found.model.state_dict().items()
                  if isinstance(p, torch.Tensor)}  # fmt: skip
    with loaded(trained(Path(back)), device="cpu", mtp=True) as found:
        for name, parameter in found.model.state_dict().items():
            if isinstance(parameter, torch.Tensor):
                assert torch.equal(parameter, wanted[name]), name
    train(load_recipe(str(recipe)), Path(back), steps=2, resume=True)
    series = receipts.read(Path(back) / "receipt.json")["series"]
    assert series["step"] == [1, 2]
    first = receipts.read(small_run / "receipt.json")["series"]["loss"][0]
    assert series["loss"][0] < first - 0.05  # not from the start again


@pytest.mark.slow
def test_for_gpus_weights_alone(small_run, tmp_path):
    """A checkpoint that loads at any layout, in the export's dtype."""
    export.export(trained(small_run), tmp_path / "out")
    content = trained(small_run).recipe
    recipe = load_recipe("nam56r", [
        f"{section}.{key}={json.dumps(value)}"
        for section in export.MODEL_SECTIONS for key, value in content[section].items()
        if value is not None and (section, key) not in {
            ("model", "transformer_impl"), ("moe", "moe_token_dispatcher_type"),
            ("moe", "moe_grouped_gemm")}
    ])  # fmt: skip
    saved = import_model(tmp_path / "out", recipe, tmp_path / "gpu")
    assert folder.is_complete(saved) and saved.name == "iter_0000000"
    alone = on_one_device("small", content, device="cpu", mtp=True)
    with loaded(trained(small_run), device="cpu", mtp=True) as found:
        wanted = {n: p.detach().clone() for n, p in found.model.named_parameters()}
    with built(alone) as model:
        load_weights(model, saved)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, wanted[name]), name


CONFIG = {
    "hidden_size": 12,
    "mamba3": {"mimo": True, "rank": 2, "heads": 4, "head_dim": 3, "state_dim": 8, "groups": 2,
               "angles": 2, "decay": "softplus", "decay_floor": 1e-4},
    "m2rnn": {"heads": 2, "k_dim": 5, "v_dim": 4, "kernel": 3},
}  # fmt: skip


def upstreams_mamba3(c, w, u):
    """mamba-ssm's Mamba3 module, its rows of B and C by (rank, group, state)."""
    inner, rows = c["heads"] * c["head_dim"], c["groups"] * c["rank"] * c["state_dim"]
    parts = (inner, inner, rows, rows, *[c["heads"]] * 3, c["angles"])
    z, x, B, C, dd_dt, dd_A, trap, angles = (u @ w["in_proj.weight"].T).split(parts, dim=-1)
    B, C = (
        F.rms_norm(m.unflatten(-1, (c["rank"], c["groups"], c["state_dim"])), (c["state_dim"],),
                   w[f"{name}_norm.weight"], 1e-5)
        for name, m in (("B", B), ("C", C))
    )  # fmt: skip
    A = torch.clamp(-F.softplus(dd_A), max=-c["decay_floor"])
    dt = F.softplus(dd_dt + w["dt_bias"])
    squeeze = (lambda m, dim: m) if c["mimo"] else (lambda m, dim: m.squeeze(dim))
    names = {"mimo_v": "mimo_x", "mimo_z": "mimo_z", "mimo_out": "mimo_o"}
    mimo = {argument: w[name] for argument, name in names.items() if c["mimo"]}
    y = mamba3_scan(
        squeeze(C, 2), squeeze(B, 2), x.unflatten(-1, (c["heads"], -1)), A * dt, dt, trap,
        angles.unsqueeze(2), squeeze(w["C_bias"], 1), squeeze(w["B_bias"], 1), w["D"],
        z.unflatten(-1, (c["heads"], -1)), **mimo,
    )  # fmt: skip
    return y.flatten(2) @ w["out_proj.weight"].T


def drawn_like(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) / 2)
    return module.double()


@pytest.mark.parametrize("mimo", [True, False], ids=["mimo", "siso"])
def test_mamba_ssms_weights_are_the_same_function(mimo):
    config = CONFIG | {"mamba3": CONFIG["mamba3"] | {"mimo": mimo, "rank": 2 if mimo else 1}}
    block = drawn_like(standalone.Mamba3(config))
    u = torch.randn(2, 9, 12, dtype=torch.float64)
    wanted, _ = block(u, None, 0)
    theirs = to_upstream(config, "mamba3", dict(block.state_dict()))
    assert theirs["B_bias"].shape == (4, config["mamba3"]["rank"], 8)
    # angles: both accumulate them in float32 or wider, and wrap them at 2 pi
    torch.testing.assert_close(upstreams_mamba3(config["mamba3"], theirs, u), wanted,
                               rtol=0, atol=1e-6 * wanted.abs().max().item())  # fmt: skip
    back = from_upstream(config, "mamba3", theirs)
    assert all(torch.equal(back[name], x) for name, x in block.state_dict().items())
    for change in ({"norm.weight": torch.ones(12)}, {"D": torch.ones(5)}):
        with pytest.raises(MegacppError, match="not the weights of a mamba-ssm Mamba3"):
            from_upstream(config, "mamba3", theirs | change)
    for change, message in (({"decay": "rational"}, "'softplus'"), ({"angles": 3}, "0.5 and 1.0")):
        with pytest.raises(MegacppError, match=message):
            to_upstream({"mamba3": config["mamba3"] | change}, "mamba3", theirs)


def test_xmas_weights_both_ways():
    """That they are the same function, tests/layers/test_m2rnn_lm_engine.py shows."""
    block = drawn_like(standalone.M2RNN(CONFIG | {"norm_eps": 1e-5}))
    theirs = to_upstream(CONFIG, "m2rnn", dict(block.state_dict()))
    assert theirs["input_projection.weight"].shape == (2 * 5 + 2 * 8 + 2, 12)
    rows = block.state_dict()["in_proj.weight"]
    assert torch.equal(theirs["input_projection.weight"][18:20], rows[-2:])  # the decay comes first
    back = from_upstream(CONFIG, "m2rnn", theirs)
    assert back.keys() == block.state_dict().keys()
    assert all(torch.equal(back[name], x) for name, x in block.state_dict().items())
    with pytest.raises(MegacppError, match="missing"):
        from_upstream(CONFIG, "m2rnn", {"D": torch.ones(2)})


class TestSafetensors:
    tensors = {  # noqa: RUF012
        "narrow": torch.randn(3, 5).bfloat16(), "wide": torch.randn(7), "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5), "turned": torch.randn(4, 6).T,
    }  # fmt: skip

    def test_round_trip(self, tmp_path):
        write_safetensors(tmp_path / "x", self.tensors, {"format": "pt"})
        found = read_safetensors(tmp_path / "x")
        assert found.keys() == self.tensors.keys()
        for name, tensor in self.tensors.items():
            assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)

    def test_the_bytes_are_the_formats(self, tmp_path):
        """Read by hand: the header's length, JSON, and tensors without holes."""
        write_safetensors(tmp_path / "x", self.tensors, {"format": "pt"})
        data = (tmp_path / "x").read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        assert length % 8 == 0 and header.pop("__metadata__") == {"format": "pt"}
        spans = sorted(entry["data_offsets"] for entry in header.values())
        assert spans[0][0] == 0 and spans[-1][1] == len(data) - 8 - length
        assert all(one[1] == two[0] for one, two in itertools.pairwise(spans))
        first, last = header["wide"]["data_offsets"]
        assert header["wide"]["dtype"] == "F32"
        values = struct.unpack("<7f", data[8 + length + first : 8 + length + last])
        assert list(values) == self.tensors["wide"].tolist()

    @pytest.mark.parametrize("damage", [b"", b"\0" * 4, b"\xff" * 40, "cut"])
    def test_damage_is_refused(self, tmp_path, damage):
        write_safetensors(tmp_path / "x", self.tensors)
        whole = (tmp_path / "x").read_bytes()
        (tmp_path / "x").write_bytes(whole[:-8] if damage == "cut" else damage)
        with pytest.raises(MegacppError, match="not a readable safetensors file"):
            read_safetensors(tmp_path / "x")

    def test_torchs_own_files(self, tmp_path):
        torch.save({"a": torch.ones(2)}, tmp_path / "x.pt")
        assert torch.equal(read_weights(tmp_path / "x.pt")["a"], torch.ones(2))
        for content in ({"a": 3}, [1], {"a": math.sqrt}):
            torch.save(content, tmp_path / "x.pt")
            with pytest.raises(MegacppError, match="is not a"):
                read_weights(tmp_path / "x.pt")


def test_an_unknown_tensor_is_named():
    with pytest.raises(MegacppError, match=r"decoder\.layers\.0\.cross\.weight has no name"):
        exported_name("decoder.layers.0.cross.weight", "attention")


@pytest.mark.parametrize("change", [
    {"recipe": {}}, {"recipe": dict.fromkeys(MODEL_SECTIONS, True)}, {"recipe": 3},
    {"layers": 3}, {"dtype": []}, {"dtype": "fp8"}, {"format": None},
], ids=str)  # fmt: skip
def test_a_config_that_no_export_wrote_is_refused(tmp_path, change):
    config = {"format": export.FORMAT, "recipe": {section: {} for section in MODEL_SECTIONS},
              "layers": ["mamba3"], "dtype": "fp32"}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InferenceError, match="not a readable safetensors file"):  # so far it is one
        export.read(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(export.ExportError, match="is not an exported model"):
        export.read(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "block.pt"])
def test_weights_in_a_fifo_are_not_waited_for(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(InferenceError, match="no regular file"):
        read_weights(tmp_path / name)


def test_a_planted_pickle_of_weights_is_named_in_one_line(tmp_path):
    class Planted:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "code ran"),)

    torch.save({"w": Planted()}, tmp_path / "block.pt")
    with pytest.raises(InferenceError, match=r"not plain data: .*mkdir") as refused:
        read_weights(tmp_path / "block.pt")
    assert "\n" not in str(refused.value) and not (tmp_path / "code ran").exists()


@pytest.mark.slow
def test_refusals(small_run, small_text, tmp_path, capfd):
    recipe, out = tmp_path / "small.toml", str(tmp_path / "out")
    recipe.write_text(small_text)
    assert cli.main(["export", str(small_run), "--out", out]) == 0
    words = ["import", out, "--recipe", str(recipe), "--out", str(tmp_path / "back")]
    for command, message in [
        (["export", str(small_run), "--out", out], "not an empty folder"),
        (["export", str(small_run), "--out", f"{recipe}/x"], "cannot write"),
        (
            ["export", str(small_run), "--out", f"{out}2", "--tokenizer", "none.json"],
            "cannot read the tokenizer none.json",
        ),
        ([*words, "--set", "model.hidden_size=64"], "hidden_size is 64, the export has 32"),
        ([*words, "--block", "1=x"], "not an M or R layer; those are 2 (mamba3), 3 (m2rnn)"),
        ([*words, "--block", "x"], "expected N=FILE"),
        ([*words, "--block", "2=none.safetensors"], "not a readable safetensors file"),
        ([words[0], str(tmp_path), *words[2:]], "is not an exported model"),
    ]:
        assert cli.main(command) == 2
        assert message in capfd.readouterr().err
        assert not (tmp_path / "back").exists() and not (tmp_path / "out2").exists()
    weights = read_safetensors(Path(out) / export.WEIGHTS)
    write_safetensors(
        Path(out) / export.WEIGHTS, {"final_norm.weight": weights["final_norm.weight"]}
    )
    assert cli.main(words) == 2
    assert "missing embedding.weight" in capfd.readouterr().err
    with pytest.raises(ValueError, match="is not of its config"):
        standalone.load(out)
    with pytest.raises(MegacppError, match=r"normalization is 'LayerNorm', the loader knows 'RMSN"):
        other = load_recipe(str(recipe), ["model.normalization=LayerNorm"]).to_dict()
        export.export(Trained("x", other, tmp_path, 1), tmp_path / "other")


@pytest.mark.parametrize("balancing", ["sinkhorn", "quantile_balancing"])
def test_a_router_that_the_loader_does_not_have_is_refused(balancing, small_recipe, tmp_path):
    """Sinkhorn's scores are not those of moe_router_score_function, quantile balancing has a bias
    of its own: the loader would compute other logits."""
    settings = [f"moe.moe_router_load_balancing_type={balancing}", "moe.moe_aux_loss_coeff=0.0",
                "moe.moe_router_enable_expert_bias=false"]  # fmt: skip
    content = load_recipe(str(small_recipe), settings).to_dict()
    with pytest.raises(MegacppError, match=f"moe_router_load_balancing_type is .*{balancing}"):
        export.export(Trained("x", content, tmp_path, 1), tmp_path / "other")
    aux = load_recipe(str(small_recipe), settings[1:]).to_dict()
    (difference,) = export.differences({"recipe": aux}, content)
    assert "moe_router_load_balancing_type" in difference
    off = load_recipe(str(small_recipe), ["moe.moe_router_load_balancing_type=none", *settings[1:]])
    assert not export.differences({"recipe": aux}, off.to_dict())


def test_the_way_back_has_the_keys_that_were_set_for_the_run():
    """And none that training chooses anew; the words parse to the exported model."""
    back = importlib.import_module("megacpp_mcore.commands.export")._back
    changed = ["model.vocab_size=2048", 'moe.moe_router_score_function="softmax"']
    run = load_recipe("nam56r-tiny", [*changed, "model.seq_length=128"]).to_dict()
    words = shlex.split(back("nam56r-tiny", {"recipe": run}, Path("my export")))
    args = cli.build_parser(["import"]).parse_args(words[1:])
    assert (args.folder, args.recipe) == (Path("my export"), "nam56r-tiny")
    assert args.overrides == changed
    assert not export.other_keys({"recipe": run}, load_recipe(args.recipe, changed).to_dict())
    assert "--recipe own.toml --out" in back("own", {"recipe": run}, Path("x"))
