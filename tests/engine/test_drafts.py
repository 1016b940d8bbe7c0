"""Guesses from what was said before, and how many of them are worth their time."""

import random

import pytest

from localllm.backends import MAX_DRAFT_EDITS
from localllm.engine.blocks import BlockPool
from localllm.engine.drafts import (
    CLASSES,
    FIRST_CHANCES,
    LONGEST,
    MOST,
    PromptLookup,
    common_length,
)
from localllm.engine.pace import Pace
from localllm.engine.scheduler import Scheduler
from localllm.engine.sequence import Request, Sequence
from localllm.engine.speculation import Speculation, StepCost, most_useful
from localllm.sampling import Sampler, SamplingParams


def guesses(tokens: list[int], count: int = 6) -> list[int]:
    lookup = PromptLookup()
    return lookup.guess(min(count, lookup.update(tokens)))


def test_a_guess_is_what_followed_the_last_two_tokens_before() -> None:
    assert guesses([1, 2, 3, 4, 5, 1, 2], 3) == [3, 4, 5]
    assert guesses([1, 2, 3, 9, 1, 2, 4, 9, 1, 2], 2) == [4, 9]  # the latest time
    for nothing in ([], [1], [1, 2], [1, 2, 3, 2, 1], [5, 2, 3, 2]):
        assert guesses(nothing) == []


def test_guesses_beyond_the_end_go_on_with_the_text_that_repeats_itself() -> None:
    assert guesses([7, 7, 7], 4) == [7, 7, 7, 7]
    assert guesses([1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]
    assert guesses([1, 2, 3] * 3, MOST) == [1, 2, 3] * 5


def test_tokens_given_one_by_one_and_all_at_once_give_the_same_guesses() -> None:
    rng = random.Random(1)
    for _ in range(50):
        tokens = [rng.randrange(6) for _ in range(60)]
        slow, quick = PromptLookup(), PromptLookup()
        for length in range(1, len(tokens) + 1):
            slow.update(tokens[:length])
        quick.update(tokens)
        tokens += [77, *tokens[10:12]]  # a new token ends what was followed
        assert slow.update(tokens) == quick.update(tokens) == MOST
        assert slow.guess(5) == quick.guess(5)


def test_a_match_is_followed_until_it_is_wrong() -> None:
    text = [10, 11, 12, 13, 14, 15, 16, 17]
    tokens = [*text, 1, 10, 11]
    lookup = PromptLookup()
    lookup.update(tokens)
    first = lookup.chance(0)
    assert first == FIRST_CHANCES[CLASSES[2]]
    for token in text[2:6]:
        assert lookup.guess(1) == [token]
        tokens.append(token)
        assert lookup.update(tokens) == MOST
    assert lookup.chance(0) > first
    tokens.append(99)
    assert lookup.update(tokens) == 0


def test_chances_follow_what_was_right() -> None:
    lookup = PromptLookup()
    tokens = [1, 2, 3]
    before = PromptLookup().chance(0)
    for _ in range(60):
        tokens += [1, 2]
        lookup.update(tokens)  # guesses what followed last time
        tokens += [len(tokens) + 100]  # and is wrong
    lookup.update(tokens)
    tokens += [1, 2]
    lookup.update(tokens)
    assert lookup.chance(0) < before / 3
    assert lookup.chance(LONGEST) == FIRST_CHANCES[-1]


def test_the_common_length_counts_equal_tokens_backwards_up_to_a_bound() -> None:
    assert common_length([1, 2, 3, 9, 2, 3], 3, 6) == 2
    assert common_length([5, 5, 5], 2, 3) == 2
    assert common_length([5] * 200, 150, 200) == LONGEST


def learn(cost: StepCost, line, sizes: list[int], count: int = 200) -> None:
    for i in range(count):
        size = sizes[i % len(sizes)]
        cost.observe(size, line(size))


def test_the_cost_is_the_line_through_the_measured_steps() -> None:
    for slope in (0.01, 0.2, 0.9):
        cost = StepCost()
        learn(cost, lambda n, s=slope: 0.01 * (1 + s * (n - 1)), [1, 1, 4, 8])
        for n in (1, 5, 16):
            assert cost.seconds(n) == pytest.approx(0.01 * (1 + slope * (n - 1)), rel=0.1)


def test_the_second_token_may_cost_more_or_less_than_the_others() -> None:
    for second in (1.0, 1.5):
        cost = StepCost()
        learn(cost, lambda n, s=second: 0.01 * (1 if n == 1 else s + 0.1 * (n - 2)), [1, 1, 3, 9])
        assert cost.seconds(2) / cost.seconds(1) == pytest.approx(second, rel=0.1)
        assert cost.seconds(9) / cost.seconds(1) == pytest.approx(second + 0.7, rel=0.1)


def test_the_cost_is_supposed_until_it_is_measured_and_after_a_while_without() -> None:
    (size, supposed), _ = StepCost.SUPPOSED
    cost = StepCost()
    assert cost.seconds(size) / cost.seconds(1) == pytest.approx(supposed)
    learn(cost, lambda n: 0.01, [1])
    assert cost.seconds(size) / cost.seconds(1) == pytest.approx(supposed)
    learn(cost, lambda n: 0.01 * n, [1, 8])
    assert cost.seconds(8) / cost.seconds(1) > 6
    learn(cost, lambda n: 0.01, [1], 1500)
    assert cost.seconds(size) / cost.seconds(1) == pytest.approx(supposed, rel=0.01)


def test_a_step_that_was_held_up_counts_little() -> None:
    for size in (1, 8):
        cost = StepCost()
        learn(cost, lambda n: 0.01 * (1 + 0.2 * (n - 1)), [1, 8])
        cost.observe(size, 30.0)
        assert 1.5 < cost.seconds(8) / cost.seconds(1) < 3.5


class Sure:
    """A drafter whose every guess has the same chance."""

    def __init__(self, chance: float) -> None:
        self.odds = chance

    def update(self, tokens) -> int:
        return MOST

    def chance(self, place: int) -> float:
        return self.odds

    def guess(self, count: int) -> list[int]:
        return [0] * count


def planned(chances: list[float], slope: float = 0.2, **params) -> list[int]:
    """Guesses that sequences with these chances get in a step that they share."""
    pool = BlockPool([400], [None], 32, lambda *copy: None)
    scheduler = Scheduler(pool, Pace(512), max_tokens=512, max_rows=64, max_running=16)
    sequences = []
    for i, chance in enumerate(chances):
        sampling = SamplingParams(temperature=0, **params)
        sampler = Sampler(sampling, [1, 2, 3], 100)
        sequence = Sequence(Request(f"r{i}", [1, 2, 3], sampling), sampler, print, i, 1000)
        sequence.drafter = Sure(chance)
        scheduler.add(sequence)
        sequences.append(sequence)
    scheduler.commit(scheduler.plan())
    for sequence in sequences:
        sequence.append(5)
    speculation = Speculation()
    learn(speculation.cost, lambda n: 0.01 * (1 + slope * (n - 1)), [1, 2, 4, 8])
    step = scheduler.plan()
    speculation.plan(step, scheduler)
    assert step.num_generated == sum(segment.count for segment in step.generated)
    return [len(segment.drafts) for segment in step.generated]


def test_more_is_guessed_the_likelier_it_is_and_the_less_it_costs() -> None:
    counts = [planned([chance])[0] for chance in (0.1, 0.5, 0.8, 0.95)]
    assert counts[0] == 0 < counts[1] < counts[2] < counts[3]
    costs = [planned([0.8], slope)[0] for slope in (0.01, 0.1, 0.3, 1.0)]
    assert costs == sorted(costs, reverse=True)
    assert costs[0] > 10
    assert costs[-1] == 0


def test_nothing_is_guessed_when_many_sequences_fill_the_step() -> None:
    assert sum(planned([0.95] * 2)) > 0
    assert sum(planned([0.6] * 16)) == 0
    assert sum(planned([0.95] + [0.0] * 15)) == 0


def test_the_likeliest_guesses_go_first() -> None:
    few, none, many = planned([0.6, 0.05, 0.95], slope=0.05)
    assert many > few > none == 0


def test_no_more_is_guessed_than_can_become_tokens() -> None:
    assert planned([0.99], 0.0, num_predict=5) == [3]
    assert planned([0.99], 0.0, num_predict=2) == [0]
    params = SamplingParams(presence_penalty=1, repeat_last_n=-1)
    prompt = list(range(1000))
    sequence = Sequence(Request("r", prompt, params), Sampler(params, prompt, 1000), print, 0, 5000)
    assert most_useful(sequence) == MAX_DRAFT_EDITS // 1000 - 1
    sequence.max_length = 1003
    assert most_useful(sequence) == 2
