"""The chatbot's requests: what a prompt holds, who talks to whom, and what is refused."""

import numpy as np
import pytest

from repro.errors import UserError
from repro.workloads import fig11_lengths, make_trace
from repro.workloads.chatbot import OUTPUT_LIMIT, Conversations, chatbot_trace

ROUNDS = fig11_lengths("sharegpt")


def opened(conversations: Conversations, count: int, seed: int = 0) -> np.ndarray:
    """Which requests open a conversation: their prompt is the query alone. Queries of 1024 and more are left out."""
    requests, rounds = conversations.draw(count, seed), ROUNDS.draw(count, seed)
    return (requests[:, 0] == rounds[:, 0])[rounds[:, 0] < 1024]


def test_one_endless_conversation_carries_everything_said_so_far() -> None:
    requests, rounds = Conversations(ROUNDS, 0.0, mean_rounds=None).draw(300, 5), ROUNDS.draw(300, 5)
    history = np.concatenate([[0], np.cumsum(rounds[:, 0] + np.minimum(rounds[:, 1], OUTPUT_LIMIT))[:-1]])
    assert OUTPUT_LIMIT == 2048 - 1024 - 8
    assert (requests[:, 0] == np.minimum(history + rounds[:, 0], 1024)).all()
    assert (requests[:, 1] == np.minimum(rounds[:, 1], OUTPUT_LIMIT)).all()
    assert requests.max() == 1024 and requests.min() >= 1


@pytest.mark.parametrize("changes", [{"new_probability": 1.0}, {"mean_rounds": 1.0}])
def test_without_second_rounds_it_is_the_basic_workload_cut_to_its_limits(changes: dict) -> None:
    cut = np.minimum(ROUNDS.draw(2000, 3), [1024, OUTPUT_LIMIT])
    assert (Conversations(ROUNDS, **changes).draw(2000, 3) == cut).all()


@pytest.mark.parametrize("probability", [0.05, 0.1, 0.5])
def test_a_conversation_opens_as_often_as_said(probability: float) -> None:
    assert opened(Conversations(ROUNDS, probability, None), 20_000).mean() == pytest.approx(probability, rel=0.05)


@pytest.mark.parametrize("mean_rounds", [2.0, 5.0])
def test_a_conversation_has_as_many_rounds_as_said(mean_rounds: float) -> None:
    # With probability 0 one conversation runs at a time, and the next one opens when it has ended.
    assert 1 / opened(Conversations(ROUNDS, 0.0, mean_rounds), 20_000).mean() == pytest.approx(mean_rounds, rel=0.05)


def test_the_longer_conversations_are_the_more_prompts_are_full() -> None:
    shares = [
        (Conversations(ROUNDS, 0.1, mean).draw(5000, 0)[:, 0] == 1024).mean() for mean in (1.0, 2.0, 4.0, 8.0, None)
    ]
    assert shares == sorted(shares) and shares[0] < 0.05 and 0.7 < shares[-1] < 0.85


@pytest.mark.parametrize("mean_rounds", [None, 3.0])
def test_a_seeds_requests_begin_alike(mean_rounds: float | None) -> None:
    conversations = Conversations(ROUNDS, 0.1, mean_rounds)
    assert (conversations.draw(4000, 7)[:1500] == conversations.draw(1500, 7)).all()
    assert (conversations.draw(1500, 7) != conversations.draw(1500, 8)).any()


def test_the_trace_has_a_card_that_says_what_it_is() -> None:
    trace = chatbot_trace(0.5, 600.0, seed=2, mean_rounds=4.0)
    assert (trace.arrival_s == make_trace("sharegpt", 0.5, 600.0, 2).arrival_s).all()
    assert trace.card.workload == "chatbot" and not trace.card.equals_paper_trace
    assert "4 rounds" in trace.card.source.recipe and "1024 tokens" in trace.card.source.filter
    long = Conversations(ROUNDS, 0.1, 4.0).draw(10_000, 9)
    assert trace.card.source.mean_prompt_tokens == pytest.approx(long[:, 0].mean(), rel=0.1)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"new_probability": 1.5}, "from 0 to 1"),
        ({"new_probability": float("nan")}, "from 0 to 1"),
        ({"mean_rounds": 0.5}, "at least 1"),
        ({"mean_rounds": float("inf")}, "at least 1"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        chatbot_trace(1.0, 10.0, 0, **changes)
