"""Generation: states against whole forward passes, choices, texts, and the command."""

import json
import os

import pytest
import torch

from megacpp_mcore import cli
from megacpp_mcore.errors import MegacppError
from megacpp_mcore.inference.context import GenerationContext
from megacpp_mcore.inference.generate import Generation, fill
from megacpp_mcore.inference.loading import built, load_weights, loaded
from megacpp_mcore.inference.recipe import InferenceError, on_one_device
from megacpp_mcore.inference.sampling import Sampling
from megacpp_mcore.inference.text import Bytes, check_ids, check_tokenizer, tokenizer_of
from megacpp_mcore.inference.trained import trained
from megacpp_mcore.recipe import load_recipe
from megacpp_mcore.terminal import printable

GREEDY = Sampling(temperature=0)
PROMPTS = [[256, 35, 105], [256, 60], [256, 10, 20, 30, 40, 50, 60]]

VARIANTS = {
    "mla": [],
    "gqa": ["attention.kind=gqa", "attention.num_query_groups=1", "attention.qk_layernorm=true"],
    "no-q-lora": ["attention.q_lora_rank=null"],
    "mimo": ["mamba3.variant=mimo", "mamba3.mimo_rank=2"],
    "rational": ["mamba3.decay=rational"],
    "tied": ["model.untie_embeddings_and_output_weights=false"],
    "softmax-router": ["moe.moe_router_score_function=softmax",
                       "moe.moe_router_enable_expert_bias=false"],
}  # fmt: skip


def fresh(small_recipe, *overrides, dtype="fp32"):
    """The small recipe's model with new weights."""
    content = load_recipe(str(small_recipe), list(overrides)).to_dict()
    return built(on_one_device("small", content, device="cpu", mtp=True), dtype)


def rounding(logits, dtype):
    """Two orders of summation. In float32 they differ by up to 3 roundings of the largest logit
    (measured over the cases here), in bfloat16, where a block alone is compared and whose products
    are summed in float32, by up to 0.6 of its epsilon."""
    roundings = 8 if dtype == torch.float32 else 2
    return roundings * torch.finfo(dtype).eps * logits.abs().max().item()


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_token_has_the_logits_of_a_whole_forward_pass(small_recipe, variant):
    """Prompts of different lengths filled apart, then written together."""
    with fresh(small_recipe, *VARIANTS[variant]) as model, torch.no_grad():
        model.eval()
        context, logits = fill(model, PROMPTS, 16)
        rows, found = [list(prompt) for prompt in PROMPTS], [[row] for row in logits]
        for token in (3, 99, 12, 256, 77):
            chosen = torch.tensor([[token], [token + 1], [token // 2]]).clamp(max=256)
            logits = model.next_token_logits(chosen, context)[:, -1]
            context.advance(1)
            for row, ids, seen, following in zip(rows, chosen, found, logits, strict=True):
                row.append(int(ids))
                seen.append(following)
        for prompt, row, seen in zip(PROMPTS, rows, found, strict=True):
            whole = model.next_token_logits(torch.tensor([row]))[0, len(prompt) - 1 :]
            torch.testing.assert_close(
                torch.stack(seen), whole, rtol=0, atol=rounding(whole, torch.float32)
            )
            assert whole.std() > 100 * rounding(whole, torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("letter", ["M", "R", "A"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_one_more_token_is_the_scans_next(small_recipe, letter, dtype):
    """Each block alone, at the model's dtypes: a piece, then single tokens."""
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    overrides = [f"model.pattern={letter}", "model.depth=1", "mtp.mtp_num_layers=0", "mtp.pattern="]
    with fresh(small_recipe, *overrides, dtype=dtype) as model, torch.no_grad():
        model.eval()
        tokens = torch.randint(0, 257, (2, 40))
        whole = model.next_token_logits(tokens)
        context = GenerationContext(2, 40, "cpu")
        found = []
        for start, end in ((0, 17), *((t, t + 1) for t in range(17, 40))):
            found.append(model.next_token_logits(tokens[:, start:end], context))
            context.advance(end - start)
        found = torch.cat(found, 1)
    assert found.dtype == kind
    torch.testing.assert_close(found, whole, rtol=0, atol=rounding(whole.float(), kind))
    states = context.key_value_memory_dict[1]
    if letter != "A":
        wide = states.recurrent if letter == "R" else torch.cat([x.flatten() for x in states])
        assert wide.dtype == torch.float32


@pytest.mark.slow
def test_a_stale_state_is_noticed(small_recipe):
    """The tolerance above refuses a state that missed one token."""
    with fresh(small_recipe) as model, torch.no_grad():
        model.eval()
        tokens = torch.randint(0, 256, (1, 12))
        whole = model.next_token_logits(tokens)[:, -1]
        for layer in (1, 3, 4):  # A, M, R
            context, _ = fill(model, [tokens[0, :10].tolist()], 12)
            states = context.key_value_memory_dict
            before = type(states[layer])(*(x.clone() for x in states[layer]))
            model.next_token_logits(tokens[:, 10:11], context)
            context.advance(1)
            states[layer] = before
            wrong = model.next_token_logits(tokens[:, 11:], context)[:, -1]
            assert (wrong - whole).abs().max() > rounding(whole, torch.float32)


@pytest.mark.slow
def test_states_do_not_grow_and_the_cache_is_one_latent_a_token(small_recipe):
    """A context of 65,536 tokens: what it takes is known before anything is written."""
    with fresh(small_recipe) as model, torch.no_grad():
        model.eval()
        sizes = []
        for tokens in (3, 300):
            context, _ = fill(model, [[256, *range(tokens // 2), *range(tokens // 2)]], 65536)
            sizes.append(context.state_bytes())
        config = model.config
        latent = (config.kv_lora_rank + config.qk_pos_emb_head_dim) * 4
    assert sizes[0] == sizes[1]
    assert sizes[0]["cache_per_token"] == latent
    assert sizes[0]["cache"] == 65536 * latent
    assert sizes[0]["recurrent"] > 0


@pytest.mark.slow
def test_texts_do_not_depend_on_each_other_and_end_at_the_documents_end(small_run):
    sampling = Sampling(temperature=1.0, top_k=50)
    options = {"max_tokens": 12, "eod": 256, "vocab_size": 257, "sampling": sampling}
    with loaded(trained(small_run), device="cpu") as found, torch.no_grad():
        model = found.model
        together = [[] for _ in PROMPTS]
        for token in Generation(model, PROMPTS, seed=5, **options).tokens():
            together[token.row].append(token)
        for row, prompt in enumerate(PROMPTS):
            alone = list(Generation(model, [prompt], seed=5 + row, **options).tokens())
            assert [t.id for t in alone] == [t.id for t in together[row]]
            wanted = model.next_token_logits(torch.tensor([prompt]))[0, -1, :257].log_softmax(0)
            assert alone[0].logprob == pytest.approx(float(wanted[alone[0].id]), abs=1e-5)
        # The likeliest token as the end of document: it is written, and nothing follows.
        first = next(iter(Generation(model, PROMPTS[:1], seed=0, **options | {
            "sampling": GREEDY}).tokens())).id  # fmt: skip
        ended = Generation(model, PROMPTS[:1], seed=0, **options | {
            "sampling": GREEDY, "eod": first})  # fmt: skip
        assert [token.id for token in ended.tokens()] == [first]


@pytest.mark.slow
def test_a_checkpoint_in_bfloat16_loads_in_float32(small_run, tmp_path):
    """As a GPU run's: bfloat16 weights, and float32 ones in M and R."""
    from megatron.core import dist_checkpointing

    source = trained(small_run)
    recipe = on_one_device(source.name, source.recipe, device="cpu", mtp=True)
    with built(recipe, "bf16") as model:
        load_weights(model, source.checkpoint)
        expected = {name: p.float().clone() for name, p in model.named_parameters()}
        (tmp_path / "iter").mkdir()
        dist_checkpointing.save({"model": model.sharded_state_dict()}, str(tmp_path / "iter"))
    with built(recipe) as model:
        load_weights(model, tmp_path / "iter")
        for name, parameter in model.named_parameters():
            assert parameter.dtype == torch.float32
            assert torch.equal(parameter, expected[name]), name


class TestSampling:
    logits = torch.tensor([1.0, 3.0, 2.0, -1.0])

    def test_temperature(self):
        for temperature in (0.5, 1.0, 2.0):
            wanted = (self.logits.double() / temperature).softmax(0)
            torch.testing.assert_close(Sampling(temperature).probabilities(self.logits), wanted)
        assert Sampling(0).probabilities(self.logits).tolist() == [0, 1, 0, 0]
        hot = Sampling(1e-300).probabilities(self.logits)
        assert hot.tolist() == [0, 1, 0, 0]

    def test_top_k_then_top_p(self):
        whole = self.logits.double().softmax(0)
        two = Sampling(1.0, top_k=2).probabilities(self.logits)
        torch.testing.assert_close(two, torch.tensor([0, 1, 1, 0]) * whole / whole[1:3].sum())
        # 0.66 alone does not reach 0.7 of all, but 0.73 of the first two does
        assert (Sampling(1.0, top_p=0.7).probabilities(self.logits) > 0).sum() == 2
        assert (Sampling(1.0, 2, top_p=0.7).probabilities(self.logits) > 0).sum() == 1
        assert (Sampling(1.0, top_p=1e-9).probabilities(self.logits) > 0).sum() == 1
        torch.testing.assert_close(Sampling(1.0, 99).probabilities(self.logits), whole)

    def test_frequencies(self):
        sampling, generator = Sampling(1.0, top_k=3), torch.Generator().manual_seed(0)
        drawn = [sampling.draw(self.logits, generator) for _ in range(4000)]
        found = torch.bincount(torch.tensor(drawn), minlength=4) / 4000
        wanted = sampling.probabilities(self.logits)
        # four standard deviations of a share
        assert ((found - wanted).abs() <= 4 * (wanted * (1 - wanted) / 4000).sqrt()).all()

    @pytest.mark.parametrize("bad", [{"temperature": -1}, {"temperature": float("nan")},
                                     {"top_k": 0}, {"top_p": 0}, {"top_p": 1.1}])  # fmt: skip
    def test_refusals(self, bad):
        with pytest.raises(MegacppError, match="--t"):
            Sampling(**bad)


def test_text_comes_when_its_characters_are_whole():
    decoder = Bytes().decoder()
    assert [decoder(byte) for byte in "aé".encode()] == ["a", "", "é"]
    assert [decoder(0xC3), decoder(256), decoder.end()] == ["", "", "\N{REPLACEMENT CHARACTER}"]
    assert Bytes().encode("\udcff é") == [255, 32, 0xC3, 0xA9]
    with pytest.raises(MegacppError, match=r"name its tokenizer\.json"):
        tokenizer_of(65536, 65535, None)
    with pytest.raises(MegacppError, match="gives token 300"):
        check_ids([1, 300], 257)


@pytest.fixture
def tokenizer_json(tmp_path):
    from megacpp_mcore.training.data import tokenizer

    text = b"int main() { return 0; } // <|endoftext|>\n" * 4
    return tokenizer.train([text], 262, tmp_path / "tokenizer.json", progress=False)


def test_only_the_tokenizer_of_the_runs_data_is_taken(tokenizer_json, tmp_path):
    """Another of the same size gives other ids, and the model would answer nonsense."""
    path, sha256 = tmp_path / "tokenizer.json", tokenizer_json.sha256
    found = tokenizer_of(262, 256, path, sha256)
    (ids,) = tokenizer_json.documents([b"int main() // <|endoftext|>"])
    assert found.encode("int main() // <|endoftext|>") == ids[:-1].tolist()
    assert tokenizer_of(262, 256, path, None).encode("int") == found.encode("int")
    path.write_text(path.read_text() + "\n")
    for check in (tokenizer_of, lambda *words: check_tokenizer(*words[2:])):
        with pytest.raises(MegacppError, match=f"trained with that of {sha256}"):
            check(262, 256, path, sha256)
        with pytest.raises(MegacppError, match=r"cannot read the tokenizer .*none\.json"):
            check(262, 256, tmp_path / "none.json", sha256)
    with pytest.raises(MegacppError, match=rf"{sha256}.*name its tokenizer\.json"):
        tokenizer_of(262, 256, None, sha256)


@pytest.mark.slow
def test_the_command(small_run, tmp_path, capsys):
    words = ["generate", str(small_run), "--max-tokens", "5", "--temperature", "0"]
    (tmp_path / "prompt").write_bytes(b"im\xffport")
    more = ["--prompt", "def ", "--prompt-file", str(tmp_path / "prompt"), "--iteration", "1"]
    assert cli.main([*words, *more, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["prompt"] for row in found["results"]] == [
        "def ",
        "im\N{REPLACEMENT CHARACTER}port",
    ]
    assert found["state_bytes"]["cache_per_token"] == 64
    assert cli.main([*words, *more]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("def " + printable(found["results"][0]["text"]))
    assert printable(found["results"][1]["text"]) in printed.out
    assert "64 bytes a token" in printed.err
    for row in found["results"]:
        ids = row["tokens"][:-1] if row["ended"] else row["tokens"]
        assert row["text"] == bytes(ids).decode("utf-8", "replace")


def test_refusals(small_run, tmp_path, capsys):
    for words, message in [
        ([str(tmp_path)], "is not the folder of a run"),
        ([str(small_run), "--iteration", "7"], "there are checkpoints of iterations 1, 2"),
        ([str(small_run), "--prompt-file", str(tmp_path / "none")], "No such file"),
        ([str(small_run), "--top-k", "0"], "at least 1 is needed"),
        ([str(small_run), "--device", "cuda"], "torch sees no CUDA device"),
    ]:
        assert cli.main(["generate", *words]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "damage",
    [
        lambda receipt: receipt.pop("recipe"),
        lambda receipt: receipt["recipe"].update(content={}),
        lambda receipt: receipt["recipe"].update(content=[["model", 3]]),
        lambda receipt: receipt["recipe"]["content"].update(model=None),
        lambda receipt: receipt["recipe"]["content"]["model"].update(vocab_size=10**12),
        lambda receipt: receipt["recipe"]["content"].update(checkpoint=[1]),
        lambda receipt: receipt["recipe"].update(name={}),
    ],
)
def test_a_run_whose_receipt_is_damaged_is_refused(small_run, tmp_path, damage):
    receipt = json.loads((small_run / "receipt.json").read_text())
    damage(receipt)
    (tmp_path / "receipt.json").write_text(json.dumps(receipt))
    (tmp_path / "checkpoints").symlink_to(small_run / "checkpoints")
    with pytest.raises(InferenceError, match="is not the folder of a run"):
        trained(tmp_path)


@pytest.mark.parametrize("name", ["../../../{folder}/mine", "{folder}/mine", "a\0b", "a" * 300])
def test_the_name_in_a_receipt_is_no_path(small_recipe, tmp_path, name):
    """A planted one had a file written where it said."""
    mine = tmp_path / "mine.toml"
    mine.write_text("mine")
    name = name.format(folder=tmp_path)
    content = load_recipe(str(small_recipe)).to_dict()
    assert on_one_device(name, content, device="cpu").name == name
    assert mine.read_text() == "mine" and len(os.listdir(tmp_path)) == 2
