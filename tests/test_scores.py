import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from dynchunk import (
    BoundaryRule,
    Chunks,
    DelimiterScore,
    HashScore,
    KeyChangeScore,
    SharePlan,
    SimilarityScore,
    SurprisalScore,
    agreement,
    calibrate,
)
from dynchunk.boundaries.scores.delimiter import DelimiterWeights
from dynchunk.testing import sample_text
from dynchunk.testing.strategies import token_streams

CORPUS = sample_text(4000, seed=1)
SURPRISAL = SurprisalScore.fit(CORPUS, order=4, vocab_size=256)
BOUNDED = {
    "hash1": HashScore(1),
    "hash5": HashScore(5, seed=3),
    "delimiter": DelimiterScore.from_bytes(),
    "surprisal": SURPRISAL,
    "sum": DelimiterScore.from_bytes() + 0.25 * (HashScore(3) + 2 * SURPRISAL),
}


@pytest.mark.parametrize("name", BOUNDED)
@given(tokens=token_streams(min_tokens=1), data=st.data())
def test_a_score_reads_its_receptive_field_and_nothing_else(name, tokens, data):
    score = BOUNDED[name]
    R = score.receptive_field
    t = data.draw(st.integers(0, len(tokens) - 1))
    changed = torch.randint(0, 256, tokens.shape)
    changed[max(0, t - R) : t + 1] = tokens[max(0, t - R) : t + 1]
    begin = max(0, t - R - 1)  # one more token: a sequence's start is told apart
    alone = score(tokens[begin : t + 1])[-1]
    expected = score(tokens)[t]
    assert score(changed)[t] == expected
    assert alone == expected or begin == t - R + 1


@pytest.mark.parametrize("name", BOUNDED)
def test_a_score_uses_its_whole_receptive_field(name):
    score = BOUNDED[name]
    R = score.receptive_field
    reads = False
    for begin in range(0, 400, 7):
        tokens = CORPUS[begin : begin + 12].clone()
        before = score(tokens)[-1]
        tokens[-1 - R] = (tokens[-1 - R] + 17) % 128
        reads |= bool(score(tokens)[-1] != before)
    assert reads


@pytest.mark.parametrize("name", BOUNDED)
@given(rows=st.lists(token_streams(max_tokens=20), min_size=1, max_size=4))
def test_packed_sequences_score_as_if_alone(name, rows):
    score = BOUNDED[name]
    cu = torch.tensor([0, *map(len, rows)]).cumsum(0)
    packed = score(torch.cat(rows), cu)
    assert packed.equal(torch.cat([score(row) for row in rows]))
    assert not packed.isnan().any()


def test_a_hash_is_uniform_and_depends_on_order_and_seed():
    tokens = torch.randint(0, 50_000, (20_000,))
    scores = HashScore(3)(tokens)
    assert abs(float(scores.mean()) - 0.5) < 0.01
    assert abs(float(scores.var()) - 1 / 12) < 0.003
    assert len(scores.unique()) > 19_900
    assert scores[2] != HashScore(3)(tokens[[1, 0, 2]])[2]
    assert scores[9] != HashScore(3, seed=1)(tokens)[9]


def test_a_hash_never_changes():
    """Boundaries of text that people have stored must not move with a release."""
    scores = HashScore(3)(torch.tensor(list(b"abc")))
    assert (scores * 2**24).long().tolist() == [5919371, 4293607, 16356713]


def test_delimiters_know_where_units_begin():
    text = 'if x:\n\n    go("a b", 3.14)\n\ttab.  Next! 1, 2'
    weights = DelimiterWeights(newline=4, sentence=3, punctuation=2, space=1)
    scores = DelimiterScore.from_bytes(weights)(torch.tensor(list(text.encode())))
    marks = "".join(str(int(s)) if s else "." for s in scores)
    shown = text.replace("\n", "|").replace("\t", ">")
    assert (shown, marks) == (
        'if x:||    go("a b", 3.14)|>tab.  Next! 1, 2',
        "4.1....4.......21...2..2...4....3......3..2.",
    )


def byte_level(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def metaspace(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(mark, "isolated") for mark in ".,\n"]
        + [pre_tokenizers.Split("\u2581", "merged_with_next")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    special = ["<unk>", *(f"<0x{b:02X}>" for b in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


@pytest.mark.parametrize("make", [byte_level, metaspace])
def test_delimiters_come_from_a_tokenizer(make):
    text = "The cat sat. The dog ran, fast.\nThe end of it"
    tokenizer = make([text] * 50)
    encoding = tokenizer.encode(text)
    scores = DelimiterScore.from_tokenizer(tokenizer)(torch.tensor(encoding.ids))
    at = [begin for begin, _ in encoding.offsets]
    found = {text[i:]: int(s) for i, s in zip(at, scores, strict=True) if s >= 2}
    assert found == {
        text: 4,
        " The dog ran, fast.\nThe end of it": 3,
        " fast.\nThe end of it": 2,
    } | {"The end of it": 4}


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["x", "\n    ", "def", " f"], [4, 0, 4, 1]),
        (["x", "\n\n", "\n", "y"], [4, 0, 0, 4]),
        (["x", "\n  y", " z"], [4, 4, 1]),
        (["a ", "b", ". ", "c"], [4, 1, 0, 3]),
        (["a", "\u3002", "b", "\uff0c", "c"], [4, 0, 3, 0, 2]),
        (["a", "_", "b", "", "c"], [4, 0, 0, 0, 0]),
    ],
)
def test_delimiters_of_tokens_longer_than_a_byte(texts, expected):
    scores = DelimiterScore.from_texts(texts)(torch.arange(len(texts)))
    assert scores.tolist() == expected


def test_a_tokenizer_is_a_tokenizer():
    with pytest.raises(TypeError, match="tokenizer: expected one of the tokenizers"):
        DelimiterScore.from_tokenizer("gpt2")


def test_surprisal_is_witten_bell():
    a, b = 0, 1
    score = SurprisalScore.fit(torch.tensor([a, b, a, b, a, a]), order=2, vocab_size=4)
    # Unigrams: a 4, b 2 of 6, 2 distinct. After a: b 2, a 1 of 3, 2 distinct. After b: a 2.
    p_a, p_b, p_new = (4 + 2 / 4) / 8, (2 + 2 / 4) / 8, (0 + 2 / 4) / 8
    expected = [p_a, (2 + 2 * p_b) / 5, (2 + 1 * p_a) / 3, (0 + 2 * p_new) / 5, p_a]
    got = score(torch.tensor([a, b, a, 3, a]))
    assert got.tolist() == pytest.approx([-math.log(p) for p in expected], abs=2**-10)


def test_surprisal_sums_to_one():
    contexts = [CORPUS[i : i + 3] for i in (0, 50, 99)] + [torch.tensor([250, 251, 252])]
    for context in contexts:
        rows = torch.stack([torch.cat([context, torch.tensor([v])]) for v in range(256)])
        p = torch.exp(-SURPRISAL(rows.flatten(), torch.arange(0, 1025, 4)).double()[3::4])
        assert float(p.sum()) == pytest.approx(1.0, abs=2e-3)


def test_surprisal_falls_on_its_own_corpus():
    own, other = (float(SURPRISAL(t).mean()) for t in (CORPUS, torch.randint(0, 256, (4000,))))
    assert own < 1.0 < math.log(256) / 2 < other


def test_surprisal_is_saved_and_loaded(tmp_path):
    SURPRISAL.save(tmp_path / "model")
    loaded = SurprisalScore.load(tmp_path / "model")
    assert (loaded.order, loaded.vocab_size, loaded.receptive_field) == (4, 256, 3)
    assert loaded(CORPUS).equal(SURPRISAL(CORPUS))
    assert loaded.to("cpu")(CORPUS).equal(SURPRISAL(CORPUS))
    whole = (tmp_path / "model").read_bytes()
    for name, content in (("cut", whole[:-40]), ("text", b"hello"), ("empty", b"")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=r"a file written by SurprisalScore\.save"):
            SurprisalScore.load(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        SurprisalScore.load(tmp_path / "nowhere")


def test_similarity_is_h_nets_router():
    x = torch.randn(9, 6, dtype=torch.float64)
    score = SimilarityScore(6).double()
    with torch.no_grad():
        score.W_q.weight.copy_(torch.randn(6, 6))
        score.W_k.weight.copy_(torch.randn(6, 6))
    q, k = (x @ W.weight.detach().T for W in (score.W_q, score.W_k))
    expected = [1.0] + [
        float((1 - q[t] @ k[t - 1] / (q[t].norm() * k[t - 1].norm())) / 2) for t in range(1, 9)
    ]
    torch.testing.assert_close(score(x), torch.tensor(expected, dtype=torch.float64))
    assert score(x, [0, 4, 9])[4] == 1.0
    assert score.receptive_field is None
    assert SimilarityScore(6, input_receptive_field=2).receptive_field == 3
    assert torch.autograd.gradcheck(score, (x.requires_grad_(),))


def test_key_change_is_one_minus_cosine_over_heads():
    keys = torch.randn(7, 3, 8)
    expected = 1 - torch.cosine_similarity(keys[1:], keys[:-1], dim=-1).mean(1)
    torch.testing.assert_close(KeyChangeScore()(keys)[1:], expected)
    torch.testing.assert_close(KeyChangeScore()(keys[:, 0])[0], torch.tensor(1.0))
    assert KeyChangeScore()(keys.bfloat16()).dtype == torch.float32
    scored = KeyChangeScore(0) + 0.5 * KeyChangeScore(3)
    assert scored.receptive_field == 4
    torch.testing.assert_close(scored(keys), 1.5 * KeyChangeScore()(keys))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: HashScore(0), "n: expected an integer >= 1"),
        (lambda: HashScore(2)(torch.rand(3)), "tokens: expected integer token ids"),
        (lambda: HashScore(2)(torch.zeros(3, 2).long()), "tokens: expected integer token ids"),
        (
            lambda: HashScore(2)(torch.zeros(3).long(), [0, 2]),
            r"cu_seqlens: expected 3 \(all tokens\)",
        ),
        (
            lambda: DelimiterScore.from_bytes()(torch.tensor([256])),
            r"tokens: expected ids in \[0, 256",
        ),
        (lambda: SURPRISAL(torch.tensor([-1])), r"tokens: expected ids in \[0, 256"),
        (lambda: SurprisalScore.fit(torch.zeros(0).long(), 2, 4), "at least one token"),
        (
            lambda: SurprisalScore.fit(torch.zeros(4).long(), 0, 4),
            r"order: expected an integer >= 1",
        ),
        (lambda: SimilarityScore(4)(torch.rand(3, 5)), r"hidden states: expected shape \[T, 4\]"),
        (
            lambda: KeyChangeScore()(torch.rand(3)),
            r"keys: expected a floating tensor of shape \[T, D",
        ),
        (lambda: KeyChangeScore(-1), "input_receptive_field: expected an integer >= 0"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# Calibration


@pytest.mark.parametrize("ratio", [2.5, 4.0, 6.0, 12.0])
@pytest.mark.parametrize(
    "score",
    [
        HashScore(3),
        DelimiterScore.from_bytes() + 0.5 * HashScore(3),
        SURPRISAL + 0.01 * HashScore(9),
    ],
)
@pytest.mark.parametrize("ladder", [False, True])
def test_calibration_reaches_the_ratio_on_the_sample(score, ratio, ladder):
    sample = score(sample_text(20_000))
    rule = calibrate(BoundaryRule(4, min_length=1, max_length=48, ladder=ladder), sample, ratio)
    assert rule(sample).ratio == pytest.approx(ratio, rel=0.02)
    assert (rule.min_length, rule.max_length, rule.ladder) == (1, 48, ladder)


@pytest.mark.parametrize(
    ("rule", "sample", "ratio", "message"),
    [
        (
            BoundaryRule(1, max_length=8),
            torch.rand(999),
            9,
            r"\[min_length, max_length\] = \[1, 8\]",
        ),
        (BoundaryRule(4, min_length=4), torch.rand(999), 4.2, "the nearest are"),
        (BoundaryRule(1), torch.zeros(999), 4, "the nearest are"),
        (BoundaryRule(1), torch.zeros(0), 4, "the nearest are nan"),
        (BoundaryRule(1), torch.arange(999) % 2.0, 9, "add a small HashScore"),
    ],
)
def test_a_ratio_out_of_reach_is_an_error(rule, sample, ratio, message):
    with pytest.raises(ValueError, match=message):
        calibrate(rule, sample, ratio)


# Sharing


def test_share_plans_name_the_leader_of_each_layer():
    assert SharePlan.every_layer(3).leaders == (0, 1, 2)
    assert SharePlan.all_from_one(3).groups == {0: (0, 1, 2)}
    assert SharePlan.anchors(5, every=2).groups == {0: (0, 1), 2: (2, 3), 4: (4,)}
    calls = []
    layers = SharePlan.anchors(5, every=2).share(
        lambda layer: calls.append(layer) or Chunks.fixed(layer + 1, 8)
    )
    assert calls == [0, 2, 4]
    assert [int(chunks.lengths[0]) for chunks in layers] == [1, 1, 3, 3, 5]
    with pytest.raises(ValueError, match=r"leaders\[1\]: expected itself or an earlier layer"):
        SharePlan((0, 2, 2))
    with pytest.raises(ValueError, match=r"leaders\[2\]: expected itself or an earlier layer"):
        SharePlan((0, 0, 1))


def test_agreement_counts_what_it_says():
    a = Chunks.from_boundaries([3, 7, 12, 20], [0, 15, 30])
    b = Chunks.from_boundaries([3, 8, 14, 16, 22], [0, 15, 30])
    # Positions 15 are first tokens; equal: 3; within 1: 3-3, 7-8.
    result = agreement(a, b)
    assert result.jaccard == 1 / 8
    assert result.f1 == pytest.approx(2 * (2 / 4) * (2 / 5) / (2 / 4 + 2 / 5))
    assert agreement(a, b, tolerance=2).f1 == pytest.approx(2 * (4 / 4) * (4 / 5) / (4 / 4 + 4 / 5))
    assert agreement(a, a)[::2] == (1.0, 1.0)
    nothing = Chunks.from_boundaries([], 9)
    assert all(math.isnan(value) for value in agreement(nothing, nothing))
    assert agreement(nothing, Chunks.fixed(3, 9)) == (0.0, 0.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="b: expected the sequences of a"):
        agreement(a, nothing)


def test_agreement_does_not_reach_across_sequences():
    a = Chunks.from_boundaries([4], [0, 5, 10])
    b = Chunks.from_boundaries([6], [0, 5, 10])
    assert agreement(a, b, tolerance=2).f1 == 0.0


@pytest.mark.parametrize("rate", [0.1, 0.25, 0.5])
def test_agreement_by_chance_is_what_independent_boundaries_give(rate):
    a, b = (Chunks.from_boundaries(torch.rand(400_000) < rate, 400_000) for _ in range(2))
    result = agreement(a, b)
    assert result.jaccard == pytest.approx(result.jaccard_chance, abs=0.004)
    assert result.f1 == pytest.approx(result.f1_chance, abs=0.004)
    assert result.jaccard_chance == pytest.approx(rate / (2 - rate), abs=0.004)
