"""Load or compute: predictions, and how they follow what is measured."""

from __future__ import annotations

from typing import Any

from kvcache_factory.engine.ledger import Ledger
from kvcache_factory.integration.vllm.decision import EXPLORE_EVERY, LoadDecision


def decision(mode: str = "auto", **options: Any) -> LoadDecision:
    return LoadDecision(mode, 100_000, **options)  # type: ignore[arg-type]


def test_what_is_faster_wins() -> None:
    """A thousand tokens are 100 MB: 0.2 s from a disk of 0.5 GB/s, and 0.1 or 1 s to compute."""
    assert decision(read_bytes_per_s=0.5e9, prefill_tokens_per_s=1_000).worth_it(1_000)
    assert not decision(read_bytes_per_s=0.5e9, prefill_tokens_per_s=10_000).worth_it(1_000)


def test_always_and_never_do_not_ask() -> None:
    """Not even for what can only be slower."""
    slow = {"read_bytes_per_s": 1.0, "prefill_tokens_per_s": 1e9}
    assert decision("always", **slow).worth_it(1_000)
    assert not decision("never", read_bytes_per_s=1e12).worth_it(1_000)


def test_nobody_waits_longer_than_computing_takes() -> None:
    """What was told to load always waits as long as everybody may."""
    assert decision(prefill_tokens_per_s=1000.0).patience_s(500) == 0.5
    assert decision("always", prefill_tokens_per_s=1000.0).patience_s(500) == float("inf")


def test_a_queue_of_reads_counts() -> None:
    """What is free at first is not worth waiting for behind others; when they have come, it is again."""
    chooses = decision(read_bytes_per_s=0.5e9, prefill_tokens_per_s=3_000)
    assert chooses.worth_it(1_000)
    chooses.begun(1_000)
    assert not chooses.worth_it(1_000)
    chooses.ended(1_000, 1_000, 0.2)
    assert chooses.worth_it(1_000)


def test_measurements_replace_beliefs() -> None:
    """A disk that turns out to be slow is left alone, but tried again now and then, and can win again."""
    chooses = decision(read_bytes_per_s=1e9, prefill_tokens_per_s=3_000)
    for _ in range(40):
        chooses.ended(0, 1_000, 10.0)
    tried = sum(chooses.worth_it(1_000) for _ in range(4 * EXPLORE_EVERY))
    assert tried == 4
    for _ in range(40):
        chooses.ended(0, 1_000, 0.1)
    assert chooses.worth_it(1_000)


def test_steps_of_a_few_tokens_say_nothing_about_prefill() -> None:
    """Decoding is not what a load replaces."""
    chooses = decision(prefill_tokens_per_s=3_000)
    chooses.computed(8, 1.0)
    assert chooses.prefill.value == 3_000
    chooses.computed(1_000, 1.0)
    assert chooses.prefill.value < 3_000


def test_decisions_and_outcomes_are_counted_beside_what_was_predicted() -> None:
    """A ledger hears what was chosen, and what loads and prefills took beside what was believed before."""
    ledger = Ledger()
    chooses = decision(read_bytes_per_s=0.5e9, prefill_tokens_per_s=3_000, book=ledger)
    assert chooses.worth_it(1_000)
    chooses.begun(1_000)
    assert [chooses.worth_it(1_000) for _ in range(EXPLORE_EVERY)].count(True) == 1
    chooses.ended(1_000, 1_000, 0.25)
    chooses.computed(1_500, 1.0)
    choices = {row["reason"]: row["times"] for row in ledger.rows() if row["event"] == "decided"}
    assert choices == {"load": 1, "recompute": EXPLORE_EVERY - 1, "explore": 1}
    load, recompute = ledger.comparisons()
    assert (load["kind"], load["predicted_s"], load["actual_s"]) == ("load", 0.2, 0.25)
    assert (recompute["kind"], recompute["predicted_s"], recompute["actual_s"]) == ("recompute", 0.5, 1.0)
