import pytest
import torch

from dynchunk.lab.task import RecallTask, TokenClass

TASKS = {
    "even": RecallTask(),
    "uneven": RecallTask.uneven(),
    "keys-of-2": RecallTask(key_length=2),
    "keys-of-3": RecallTask.uneven(key_length=3),
    "run": RecallTask(run=16),
    "uneven-run": RecallTask.uneven(run=40),
    "few": RecallTask(pairs=5, queries=5, context=40),
}


@pytest.fixture(params=TASKS.values(), ids=TASKS)
def task(request):
    return request.param


def test_every_query_has_its_pair_in_the_context_and_one_answer(task):
    batch = task.draw(16, seed=3)
    context = batch.tokens[:, batch.context]
    assert context.shape[1] == task.context
    for row in range(16):
        for query in range(task.queries):
            asked, at = int(batch.asked_at[row, query]), int(batch.positions[row, query])
            key = batch.tokens[row, asked - task.key_length + 1 : asked + 1]
            assert torch.equal(batch.tokens[row, at : at + task.key_length], key)
            value = batch.tokens[row, at + task.key_length]
            assert value == batch.tokens[row, asked + 1] == batch.answers[row, query]
            windows = context[row].unfold(0, task.key_length, 1)
            assert int((windows == key).all(1).sum()) == 1
    assert int((task.classes[context] == TokenClass.VALUE).sum()) == 16 * task.pairs
    assert int(torch.isin(context, torch.tensor(task.starts)).sum()) == 16 * task.pairs
    outside = torch.cat([batch.tokens[:, : batch.context.start], _gap(task, batch)], 1)
    assert bool((task.classes[outside] == TokenClass.FILLER).all())


def _gap(task, batch):
    return batch.tokens[:, batch.context.stop : batch.context.stop + task.gap]


def test_equal_arguments_give_equal_sequences(task):
    first, again, other = (task.draw(4, seed=7, step=step).tokens for step in (1, 1, 2))
    assert torch.equal(first, again)
    assert first.shape != other.shape or not torch.equal(first, other)


@pytest.mark.parametrize("name", ["even", "uneven", "keys-of-2"])
def test_every_phase_has_equal_shares_mean_and_variance_of_position(name):
    task = TASKS[name]
    draws = [task.draw(64, seed=1, step=step).positions[:, 0] for step in range(600)]
    positions = torch.cat(draws).double()
    for stride in (2, 3, 4, 6, 8, 12, 24):
        groups = [positions[positions % stride == phase] for phase in range(stride)]
        expected = len(positions) / stride
        assert all(abs(len(group) - expected) < 8 * expected**0.5 for group in groups)
        for group in groups:
            error = (positions.var() / len(group)) ** 0.5
            assert abs(group.mean() - positions.mean()) < 8 * error  # one prefix for a batch of 64
            assert group.var() / positions.var() == pytest.approx(1, abs=0.09)


def test_two_prefixes_balance_mean_and_variance_exactly():
    """Prefix o1 + o2 + any place that is uniform over a multiple of the period."""
    first, second, place = torch.meshgrid(*[torch.arange(n) for n in (24, 24, 48)], indexing="ij")
    positions = (first + second + place).flatten().double()
    for stride in (4, 6, 8, 12, 24):
        groups = torch.stack([positions[positions % stride == phase] for phase in range(stride)])
        assert float(groups.mean(1).std()) < 1e-9
        assert float(groups.var(1, correction=0).std()) < 1e-9


@pytest.mark.parametrize("name", ["even", "uneven", "keys-of-2", "uneven-run"])
def test_only_the_target_moves(name):
    task = TASKS[name]
    moved = task.draw_moved(6, moves=24, seed=5, prefix=3)
    assert moved.tokens.shape == (6, 24, 3 + task.context + task.gap + task.key_length)
    assert bool((moved.positions.diff(dim=1) == 1).all())
    for row in range(6):
        for move in range(24):
            tokens, at = moved.tokens[row, move], int(moved.positions[row, move])
            assert torch.equal(tokens[at : at + task.key_length], tokens[-task.key_length :])
            assert tokens[at + task.key_length] == moved.answers[row]
        apart = (moved.tokens[row, 0] != moved.tokens[row, 23]).nonzero().flatten()
        first, last = int(moved.positions[row, 0]), int(moved.positions[row, 23])
        assert all(first <= i < last + task.width for i in apart.tolist())


def test_a_prefix_moves_everything_and_changes_nothing_else():
    task = RecallTask()
    batch = task.draw(5, seed=0, prefix=2)
    moved = task.with_prefix(batch, 3, seed=9)
    assert torch.equal(moved.tokens[:, 3:], batch.tokens)
    assert torch.equal(moved.asked_at, batch.asked_at + 3)
    assert torch.equal(moved.positions, batch.positions + 3)
    assert moved.context == slice(5, 101)


def test_a_run_is_there():
    batch = TASKS["run"].draw(8, seed=0)
    same = batch.tokens.unfold(1, 16, 1)
    assert bool((same == same[..., :1]).all(-1).any(1).all())


def test_pairs_of_the_uneven_task_lie_close_together():
    batch = TASKS["uneven"].draw(64, seed=0)
    spread = batch.positions.max(1).values - batch.positions.min(1).values
    assert int(spread.max()) <= 62
    assert int(batch.positions.max() - batch.positions.min()) > 120


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"key_length": 4}, "key_length: expected 1, 2 or 3, got 4"),
        ({"queries": 25}, "queries: expected at most 24 pairs, got 25"),
        ({"pairs": 40, "queries": 1}, "pairs: expected at most half of 64 keys, got 40"),
        ({"context": 40}, "pairs: expected at most 40 tokens of pairs, got 48"),
        ({"stretch": 200}, "stretch: expected at most 96 tokens, got 200"),
        ({"stretch": 40}, "pairs: expected at most 40 tokens of pairs, got 48"),
        ({"gap": -1}, "gap: expected an integer >= 0, got -1"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        RecallTask(**settings)


def test_too_many_moves():
    with pytest.raises(ValueError, match="context: expected at least 101 tokens, got 96"):
        RecallTask().draw_moved(1, moves=54, seed=0)
