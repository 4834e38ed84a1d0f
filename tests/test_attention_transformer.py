"""ChunkedTransformer: padding, packing, sharing, gradients, files."""

import json
from itertools import pairwise

import attention_oracle as oracle
import pytest
import torch
from attention_oracle import LOCAL_MAXIMA, POLICIES, THRESHOLD, VOCAB
from hypothesis import given, settings
from hypothesis import strategies as st
from ops_oracle import assert_close
from safetensors.torch import save_file

from dynchunk.attention import (
    AsScored,
    ChunkedTransformer,
    Hash,
    Learned,
    ModelConfig,
    Policy,
    Rescored,
    Router,
    Shifted,
    TokenClasses,
    csa,
    hca,
    load,
    save,
    sliding,
)
from dynchunk.attention.scoring import build_scorer, log_p, ratio_loss
from dynchunk.boundaries import FixedStride, HashScore, SharePlan
from dynchunk.chunks import Chunks

few = settings(max_examples=max(settings.default.max_examples // 20, 1), deadline=None)
policies = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


def build(*pattern, dtype=torch.float64, layers=2, **options):
    config = ModelConfig(
        VOCAB, 8, layers, 2, 1, 8, 12, pattern=pattern, shared_kv=True, slopes=True, **options
    )
    torch.manual_seed(0)
    return oracle.randomise(ChunkedTransformer(config)).to(dtype)


def ids(*shape, seed=0):
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


@policies
@pytest.mark.parametrize("side", ["left", "right"])
def test_case_2_padding_never_changes_a_row(policy, side):
    model, r = build(policy, layers=1), 4
    rows = [ids(n, seed=n) for n in (5, 9, 16)]
    alone = [model(row).logits for row in rows]
    for extra in range(r + 2) if policy is POLICIES["fixed"] else (0, 1, r):
        width = 16 + extra
        tokens = torch.full((3, width), 10**9)  # no such token: it must never be read
        mask = torch.zeros(3, width, dtype=torch.bool)
        for b, row in enumerate(rows):
            part = slice(width - len(row), width) if side == "left" else slice(0, len(row))
            tokens[b, part], mask[b, part] = row, True
        logits = model(tokens, mask=mask).logits
        assert not logits[~mask].any()
        for b, expected in enumerate(alone):
            assert_close(logits[b][mask[b]], expected.detach())


@policies
def test_case_19_packed_documents_equal_each_alone(policy):
    model, tokens, cu = build(policy), ids(17), [0, 1, 3, 7, 7, 17]
    packed = model(tokens, cu).logits
    for begin, end in pairwise(cu):
        assert_close(model(tokens[begin:end]).logits, packed[begin:end].detach())


@policies
def test_case_20_no_future_token_changes_a_past_logit(policy):
    model, tokens = build(policy), ids(14)
    before = model(tokens).logits
    for j in range(14):
        changed = tokens.clone()
        changed[j] = (changed[j] + 7) % VOCAB
        # The number of entries may change, and with it the order of sums in a matrix product.
        torch.testing.assert_close(model(changed).logits[:j], before[:j], rtol=0, atol=1e-12)


@policies
def test_case_3_a_prompt_cut_anywhere_equals_the_whole(policy):
    model, tokens = build(policy), ids(13)
    whole = model(tokens).logits
    for length in range(1, 13):
        assert_close(model(tokens[:length]).logits, whole[:length].detach())


@policies
def test_only_the_last_tokens_of_each_sequence(policy):
    model, tokens, cu = build(policy), ids(14), [0, 3, 3, 14]
    whole = model(tokens, cu)
    for last in (1, 5):
        out = model(tokens, cu, last=last)
        rows = [*range(max(0, 3 - last), 3), *range(14 - last, 14)]
        assert_close(out.logits, whole.logits[rows].detach())
        for ours, theirs in zip(out.views, whole.views, strict=True):
            assert all(a.equal(b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("dim", [8, 24, 100, 576])
def test_equal_tokens_have_equal_learned_scores_whatever_else_is_there(dtype, dim):
    scorer = build_scorer(Learned(1), dim).to(dtype)
    rows = torch.randn(5, dim, dtype=dtype)[torch.randint(5, (80,))]
    whole = scorer(None, rows, torch.tensor([0, 80]))
    for begin, end in ((0, 2), (3, 5), (7, 30), (11, 80)):
        part = scorer(None, rows[begin:end].clone(), torch.tensor([0, end - begin]))
        assert torch.equal(part[1:], whole[begin + 1 : end])


def test_the_implementation_of_attend_may_be_chosen():
    model, tokens = build(POLICIES["fixed-staggered"], dtype=torch.float32), ids(3, 12)
    batched = model(tokens, impl="batched").logits
    assert_close(batched, model(tokens, impl="reference").logits.detach().double())
    with pytest.raises(ValueError, match="impl: expected one of None, 'reference'"):
        model(tokens, impl="fastest")


@few
@given(st.sampled_from(sorted(POLICIES)), st.lists(st.integers(0, 9), min_size=1, max_size=4))
def test_case_15_a_batch_equals_its_rows(name, sizes):
    model = build(POLICIES[name], dtype=torch.float32)
    cu = torch.tensor([0, *sizes]).cumsum(0)
    tokens = ids(int(cu[-1]))
    packed = model(tokens, cu).logits
    for begin, end in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
        alone = model(tokens[begin:end]).logits
        assert_close(alone, packed[begin:end].detach().double())


@policies
def test_every_parameter_gets_a_gradient(policy):
    model, tokens = build(policy), ids(3, 20)
    out = model(tokens)
    loss = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), tokens.flatten())
    extra = [one for one in (out.ratio_loss, out.index_loss) if one is not None]
    sum(extra, loss).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("tied", [True, False])
def test_a_step_of_training_lowers_the_loss(tied):
    model = build(POLICIES["learned"], POLICIES["sliding"], dtype=torch.float32, tied=tied)
    tokens, optimizer = ids(4, 16), torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for _ in range(12):
        logits = model(tokens).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5


def test_a_prefix_moves_chunks_only_up_to_the_next_content_boundary():
    model, text = build(POLICIES["hash-moved"]), ids(40)
    plain = model(text).views[0][0]
    for k in range(1, 6):
        chunks = model(torch.cat([ids(k, seed=k), text])).views[0][0]
        common = set(plain.starts.tolist()) & {start - k for start in chunks.starts.tolist()}
        first = min(common - {0})
        assert {s for s in plain.starts.tolist() if s >= first} == {
            s - k for s in chunks.starts.tolist() if s - k >= first
        }


# Boundaries: shared, given, scored by the caller


def test_a_pattern_repeats_and_boundaries_are_made_once():
    interleaved = (POLICIES["sliding"], POLICIES["overlap"], POLICIES["classes"])
    model = build(*interleaved, layers=5)
    assert model.config.plan.leaders == (0, 1, 2, 0, 1)
    views = model(ids(20)).views
    assert views[1][0] is views[4][0]
    assert [round(r, 1) for r in model(ids(20)).ratios[1:2]] == [3.0]
    assert torch.isnan(torch.tensor(model(ids(20)).ratios[0]))


def test_views_may_differ_where_boundaries_are_shared():
    grid = FixedStride(4)
    staggered = [Policy(grid, views=(view,), window=4) for view in (AsScored(), Shifted(2))]
    model = build(*staggered)
    assert model.config.plan.leaders == (0, 0)
    first, second = (views[0].starts.tolist() for views in model(ids(9)).views)
    assert (first, second) == ([0, 4, 8], [0, 2, 6])


@pytest.mark.parametrize(
    ("plan", "scorers"), [(None, 1), (SharePlan.every_layer(4), 4), (SharePlan.anchors(4, 2), 2)]
)
def test_a_share_plan_says_how_many_scorers_there_are(plan, scorers):
    model = build(POLICIES["learned"], layers=4, sharing=plan)
    own = [name for name, _ in model.named_parameters() if "scorers" in name]
    assert len(own) == scorers
    views = model(ids(30)).views
    leaders = model.config.plan.leaders
    assert all(views[layer][0] is views[leader][0] for layer, leader in enumerate(leaders))


def test_given_chunks_replace_those_of_the_policy():
    model, tokens = build(POLICIES["fixed-staggered"]), ids(3, 10)
    grids = Chunks.cat([Chunks.fixed(4, 10, offset=offset) for offset in (0, 3, 1)])
    out = model(tokens, chunks=grids)
    assert torch.equal(out.views[0][0].starts, grids.starts)
    for row, offset, logits in zip(tokens, (0, 3, 1), out.logits, strict=True):
        alone = model(row, chunks=Chunks.fixed(4, 10, offset=offset)).logits
        assert_close(logits, alone.detach())


def test_chunks_may_be_given_to_some_layers():
    model, tokens = build(POLICIES["fixed"], sharing=SharePlan.every_layer(2)), ids(10)
    views = model(tokens, layer_chunks=[Chunks.fixed(5, 10), None]).views
    assert [view[0].starts.tolist() for view in views] == [[0, 5], [0, 3, 6, 9]]


def test_scores_and_their_credit_may_be_given():
    rule = LOCAL_MAXIMA
    model, tokens = build(Policy(rule, window=8)), ids(20)
    scores = HashScore(2)(tokens).requires_grad_()
    out = model(tokens, scores=scores)
    assert out.views[0][0].equal(rule(scores.detach()))
    credit = log_p(Learned(), rule, scores, torch.tensor([0, 20]))
    model(tokens, scores=scores, log_p=credit).logits.sum().backward()
    assert scores.grad.abs().max() > 0


def test_a_second_score_has_its_own_chunks():
    model, tokens = build(POLICIES["hash-rescored"]), ids(30)
    first, second = model(tokens).views[0]
    assert first.equal(LOCAL_MAXIMA(HashScore(2)(tokens)))
    assert second.equal(LOCAL_MAXIMA(HashScore(2, seed=1)(tokens)))


# Learned scores


def test_ratio_loss_is_h_nets():
    p, is_boundary = torch.rand(50), torch.arange(50) % 5 == 0
    share, mean, n = 0.2, float(p.mean()), 4.0
    expected = n / (n - 1) * ((n - 1) * share * mean + (1 - share) * (1 - mean))
    assert float(ratio_loss(p, is_boundary, n)) == pytest.approx(expected)
    at_target = ratio_loss(torch.full((8,), 0.25), torch.arange(8) % 4 == 0, 4.0)
    assert float(at_target) == pytest.approx(1.0)


@pytest.mark.parametrize("ratio", [2.0, 6.0])
def test_the_ratio_loss_drives_a_router_to_its_ratio(ratio):
    policy = Policy(THRESHOLD, Router(ratio), window=8)
    model, tokens = build(policy, dtype=torch.float32, layers=1), ids(96)
    optimizer = torch.optim.Adam(model.parameters(), 2e-2)
    for _ in range(50):
        optimizer.zero_grad()
        model(tokens).ratio_loss.backward()
        optimizer.step()
    assert model(tokens).ratios[0] == pytest.approx(ratio, rel=0.35)


def test_log_p_is_that_of_the_maximum():
    scores, cu = torch.randn(9, dtype=torch.float64), torch.tensor([0, 4, 9])
    found = log_p(Learned(), LOCAL_MAXIMA, scores, cu)
    for begin, end in ((0, 4), (4, 9)):
        assert float(found[begin]) == 0
        for t in range(begin + 1, end):
            near = scores[max(begin, t - 1) : min(end, t + 2)]
            assert float(found[t]) == pytest.approx(float(scores[t] - near.logsumexp(0)))


def test_credit_reaches_the_logits_as_its_spec_says():
    tokens = ids(20)
    logits = {}
    for credit in ("none", "log_p", "straight_through"):
        policy = Policy(LOCAL_MAXIMA, Learned(1, credit), window=8)
        model = build(policy)
        out = model(tokens).logits
        logits[credit] = out.detach()
        out.square().sum().backward()
        (weight,) = (p for name, p in model.named_parameters() if "scorers" in name)
        assert (weight.grad is None) == (credit == "none")
    assert torch.equal(logits["none"], logits["straight_through"])
    assert not torch.allclose(logits["none"], logits["log_p"])


@pytest.mark.parametrize("spec", [Hash(2), TokenClasses((1, 2)), Learned(1), Router()])
def test_no_sequence_scores_another(spec):
    model, tokens = build(Policy(THRESHOLD, spec, window=8)), ids(20)
    together = model(tokens, [0, 8, 20]).views[0][0]
    alone = [model(part).views[0][0] for part in (tokens[:8], tokens[8:])]
    assert together.equal(Chunks.cat(alone))


# Files


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_file_gives_back_the_model(tmp_path, dtype):
    pattern = (sliding(), csa(), hca(), POLICIES["learned"], POLICIES["top-2"])
    config = ModelConfig(VOCAB, 32, 5, 2, 1, 16, pattern=pattern, tied=False)
    model = oracle.randomise(ChunkedTransformer(config)).to(dtype)
    save(model, tmp_path / "model.safetensors", {"steps": "7"})
    again, metadata = load(tmp_path / "model.safetensors")
    assert metadata == {"steps": "7"}
    assert again.config == config
    for (name, ours), (_, theirs) in zip(
        model.state_dict().items(), again.state_dict().items(), strict=True
    ):
        assert torch.equal(ours, theirs), name
        assert ours.dtype == theirs.dtype == dtype


def write(path, change):
    model = build(POLICIES["fixed"], dtype=torch.float32)
    save(model, path)
    metadata = {
        "format": "dynchunk.ChunkedTransformer",
        "version": "1",
        "config": json.dumps(model.config.as_dict()),
    }
    tensors = model.state_dict()
    change(metadata, tensors)
    save_file(tensors, path, metadata)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m, _: m.pop("format"), "not of a ChunkedTransformer"),
        (lambda m, _: m.update(format="pt"), "not of a ChunkedTransformer"),
        (lambda m, _: m.update(version="9"), "version 9 of the format, this dynchunk reads 1"),
        (lambda m, _: m.pop("version"), "version None of the format"),
        (lambda m, _: m.pop("config"), "config and weights do not fit"),
        (lambda m, _: m.update(config="{"), "config and weights do not fit"),
        (lambda m, _: m.update(config="[]"), "config and weights do not fit: config: expected"),
        (lambda _, t: t.pop("norm.weight"), "do not fit: .*norm.weight"),
        (lambda _, t: t.pop("embedding.weight"), "do not fit: .*embedding.weight"),
        (lambda _, t: t.update(extra=torch.zeros(1)), "do not fit: .*extra"),
    ],
)
def test_a_foreign_file_is_refused(tmp_path, change, message):
    path = tmp_path / "model.safetensors"
    write(path, change)
    with pytest.raises(ValueError, match=f"(?s){path}.*{message}"):
        load(path)


def test_a_truncated_file_is_refused_at_every_length(tmp_path):
    path = tmp_path / "model.safetensors"
    save(build(POLICIES["fixed"], dtype=torch.float32), path)
    whole = path.read_bytes()
    for length in [0, 4, 8, 100, len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="not a whole safetensors file"):
            load(path)


def test_no_file_and_no_other_keys(tmp_path):
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none.safetensors")
    with pytest.raises(ValueError, match="metadata: expected other keys"):
        save(build(POLICIES["fixed"]), tmp_path / "x", {"config": "{}"})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m(torch.rand(4)), "tokens: expected token ids"),
        (lambda m: m(ids(2, 3, 4)), "tokens: expected token ids"),
        (lambda m: m(ids(4), mask=torch.ones(1, 4)), "mask: expected None for packed tokens"),
        (lambda m: m(ids(4), [0, 3]), r"cu_seqlens: expected 4 \(all tokens\) at the end"),
        (lambda m: m(ids(2, 4), [0, 8]), "cu_seqlens: expected None for tokens"),
        (lambda m: m(ids(2, 4), mask=torch.ones(4, 2)), r"mask: expected shape \[2, 4\]"),
        (lambda m: m(ids(8), chunks=Chunks.fixed(3, 9)), "chunks: expected chunks of the seq"),
        (lambda m: m(ids(8), layer_chunks=[None]), "layer_chunks: expected 2 items"),
        (
            lambda m: m(ids(8), chunks=Chunks.fixed(3, 8), layer_chunks=[None] * 2),
            "layer_chunks: expected None beside chunks",
        ),
        (lambda m: m(ids(2, 4), last=1), "last: expected None for a batch"),
        (lambda m: m(ids(4), last=0), "last: expected an integer >= 1"),
        (
            lambda _: build(Policy(LOCAL_MAXIMA, window=8))(ids(8)),
            r"scores: expected scores \[8\], or chunks",
        ),
        (
            lambda _: build(POLICIES["fixed"], POLICIES["overlap"], sharing=SharePlan((0, 1, 0))),
            "sharing: expected 2 layers",
        ),
        (
            lambda _: build(POLICIES["fixed"], POLICIES["learned"], sharing=SharePlan((0, 0))),
            "policy of layer 1: expected one with the boundaries and score of layer 0",
        ),
        (lambda _: ModelConfig(9, 8, 1, 2, 1, pattern=()), "pattern: expected at least one Policy"),
    ],
)
def test_errors_name_the_argument(call, message):
    with pytest.raises(ValueError, match=message):
        call(build(POLICIES["fixed"]))


def test_a_view_on_another_score_needs_two_sets_of_chunks():
    model, tokens = build(POLICIES["hash-rescored"]), ids(12)
    grids = (Chunks.fixed(3, 12), Chunks.fixed(4, 12))
    views = model(tokens, chunks=grids).views[0]
    assert all(view.equal(grid) for view, grid in zip(views, grids, strict=True))
    with pytest.raises(ValueError, match="chunks: expected 2 Chunks"):
        model(tokens, chunks=grids[0])
    assert isinstance(POLICIES["hash-rescored"].views[1], Rescored)
