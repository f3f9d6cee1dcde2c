"""The load generator: users as the statistics say, counts that agree, drift that is seen."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from kvcache_factory.cli import main
from kvcache_factory.errors import ConfigError, TraceError
from kvcache_factory.load.report import drift
from kvcache_factory.load.run import Plan, run_load
from kvcache_factory.load.sampling import yardstick_ms
from kvcache_factory.load.statistics import BUILT_IN, POINTS, draw, measure
from kvcache_factory.load.users import SYSTEM_PROMPTS, Shape, User, system_prompt
from kvcache_factory.load.watch import Thinned

TRACES = Path(__file__).resolve().parents[3] / "shared" / "reference" / "traces"
SHAPE = Shape(vocabulary=500, context=512, scale=512 / BUILT_IN.context_tokens)


def test_counts_agree_to_the_token(tmp_path: Path) -> None:
    """Two workers, too little memory, a disk below: model, adapter, ledger and /metrics tell the same story."""
    plan = Plan(duration_s=3, users=6, workers=2, think_s=0.02, memory_mb=4, disk=tmp_path / "cache", metrics_port=0)
    rows = run_load(plan)
    counts = {row["name"]: row for row in rows if row["kind"] == "count"}
    assert all(row["agree"] for row in counts.values()), counts
    assert counts["requests"]["own"] > 10
    assert 0 < counts["served"]["own"] <= counts["reusable"]["own"] <= counts["asked"]["own"]
    assert counts["served"]["metrics"] == counts["served"]["page"] == counts["served"]["own"]
    samples = [row for row in rows if row["kind"] == "sample"]
    assert samples[-1]["held_bytes"] > 0
    assert samples[-1]["cpu_s"] > samples[0]["cpu_s"]
    assert {s["generator_bytes"] for s in samples} <= set(range(10 << 20))
    assert samples[-1]["sessions"] == 6


def test_counts_agree_where_most_has_to_leave(tmp_path: Path) -> None:
    """Memory for one conversation and a half, six users: a hit rate far below 1 is the same to the token everywhere."""
    rows = run_load(Plan(duration_s=6, users=6, workers=2, think_s=0, memory_mb=2, metrics_port=0))
    counts = {row["name"]: row for row in rows if row["kind"] == "count"}
    assert all(row["agree"] for row in counts.values()), counts
    assert 0 < counts["served"]["own"] < counts["reusable"]["own"]
    assert counts["hit rate"]["ledger"] == counts["hit rate"]["metrics"] == counts["hit rate"]["page"] < 0.9


def talk(user: User, turns: int) -> list[tuple[int, int, bool]]:
    """Prompts, answers and arrivals of a user who hears what was to be answered."""
    said = []
    for _ in range(turns):
        question = user.ask()
        user.heard(np.concatenate((question.prompt, np.full(question.answer_tokens, 7))))
        said.append((len(question.prompt), question.answer_tokens, question.new_session))
    return said


def test_users_say_what_follows_from_the_seed() -> None:
    """The same seed is the same load; another one, or another seat, is another."""
    one, same, other, seat = (talk(User(n, BUILT_IN, SHAPE, s), 50) for n, s in ((0, 1), (0, 1), (0, 2), (1, 1)))
    assert one == same
    assert one != other
    assert one != seat


def test_users_go_on_switch_topics_leave_and_fit_the_model() -> None:
    """Whatever the statistics say, a prompt and its answer fit; sessions begin with a topic."""
    user, lengths, sessions = User(0, BUILT_IN, SHAPE, 1), [], set()
    went_on = 0
    for _ in range(400):
        before = user._said
        question = user.ask()
        assert len(question.prompt) + question.answer_tokens <= SHAPE.context + SHAPE.context // 8
        assert question.prompt.min() >= 3
        assert question.prompt.max() < SHAPE.vocabulary
        n = len(before)
        goes_on = 0 < n < len(question.prompt) and bool((question.prompt[:n] == before).all())
        assert not (goes_on and question.new_session)
        went_on += goes_on
        sessions.add(user.session)
        lengths.append(len(question.prompt))
        user.heard(np.concatenate((question.prompt, np.full(question.answer_tokens, 7))))
    assert 50 < went_on < 300
    assert len(sessions) > 10
    assert max(lengths) > 4 * min(lengths)


def test_statistics_of_a_trace_are_those_of_its_requests(tmp_path: Path) -> None:
    """Two conversations of three turns each: beginnings of 1,024 tokens, turns that add 512, answers of 100."""
    lines = []
    for turn in range(3):
        for talk_number in range(2):
            ids = [1000 * talk_number + i for i in range(2 + turn)]
            at = 1000 * (2 * turn + talk_number)
            lines.append({"timestamp": at, "input_length": 512 * len(ids), "output_length": 100, "hash_ids": ids})
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    facts = measure(trace)
    assert set(facts.first_tokens) == {1024.0}
    assert set(facts.more_tokens) == {512.0}
    assert set(facts.output_tokens) == {100.0}
    assert set(facts.pauses) == {1.0}
    assert facts.new_topic == round(1 / 3, 4)
    assert all(len(q) == POINTS for q in (facts.first_tokens, facts.pauses))
    trace.write_text(json.dumps(lines[0]), encoding="utf-8")
    with pytest.raises(TraceError, match="beginnings and continuations"):
        measure(trace)


def test_the_built_in_statistics_are_those_of_their_trace() -> None:
    """But for its pauses, which its clock of three seconds hides, and for rounding."""
    trace = TRACES / "mooncake_conversation.jsonl"
    if not trace.exists():
        pytest.skip(f"{trace} is not there")
    facts = measure(trace)
    for name in ("first_tokens", "more_tokens", "output_tokens"):
        assert getattr(BUILT_IN, name) == pytest.approx(getattr(facts, name), abs=0.51)
    assert BUILT_IN.new_topic == facts.new_topic


@pytest.mark.parametrize("users", [4, 64])
def test_what_users_repeat_is_what_was_said_before(users: int) -> None:
    """Found by comparing with two topics a user, as it would be found in all that was ever said."""
    seats = [User(number, BUILT_IN, SHAPE, 3) for number in range(users)]
    ever: set[bytes] = set()
    block, random = 16, np.random.default_rng(5)

    def prefixes(tokens: Any) -> list[bytes]:
        ends = range(block, len(tokens) + 1, block)
        return [hashlib.blake2b(tokens[:end].tobytes(), digest_size=16).digest() for end in ends]

    for number in range(SYSTEM_PROMPTS):
        ever.update(prefixes(system_prompt(number, SHAPE)))
    repeated = 0
    for turn in range(1500):
        question = seats[turn % users].ask()
        known = next((i for i, p in enumerate(prefixes(question.prompt)) if p not in ever), len(question.prompt))
        assert question.repeated // block == min(known, len(question.prompt) // block)
        repeated += question.repeated
        conversation = np.concatenate((question.prompt, random.integers(3, 500, question.answer_tokens)))
        ever.update(prefixes(conversation[:-1]))
        seats[turn % users].heard(conversation)
    assert repeated > 1500 * 64


def test_what_users_remember_does_not_grow() -> None:
    """Two topics and what stands in front, each at most as long as the context."""
    user = User(0, BUILT_IN, SHAPE, 1)
    most = (2 * (SHAPE.context + SHAPE.context // 8) + SYSTEM_PROMPTS * 64) * 8
    for _ in range(300):
        talk(user, 1)
        assert user.nbytes <= most


@given(st.integers(1, 200), st.integers(1, 8).map(lambda half: 2 * half))
def test_points_are_thinned_evenly(count: int, places: int) -> None:
    """All of them while they fit; later every second, fourth ... from the first on, in the same memory."""
    points = Thinned(places)
    size = points.nbytes
    for number in range(count):
        points.add(float(number), -float(number))
    kept = points.between(0, count).tolist()
    every = 1
    while len(range(0, count, every)) > places:
        every *= 2
    assert kept == [-float(n) for n in range(0, count, every)]
    assert points.nbytes == size
    assert points.between(1.5, 3.5).tolist() == [-n for n in (2.0, 3.0) if n < count and n % every == 0]


def test_the_yardstick_takes_time() -> None:
    """Some, of this thread's."""
    assert yardstick_ms() > 0


def test_draws_stay_between_the_ends() -> None:
    """Interpolated between quantiles, never outside."""
    random = np.random.default_rng(0)
    drawn = [draw(BUILT_IN.output_tokens, random) for _ in range(2000)]
    assert 1 <= min(drawn) < 50
    assert 500 < max(drawn) <= 2000
    assert np.median(drawn) == pytest.approx(350, rel=0.1)


@pytest.mark.parametrize(("late", "flat"), [(1000, True), (1019, True), (1021, False), (900, True)])
def test_memory_that_grows_is_not_flat(late: int, flat: bool) -> None:
    """More than 2 % from the second to the last quarter; latency is compared as well."""
    names = ("generator_bytes", "held_bytes", "fragmentation_bytes", "sessions", "yardstick_ms")
    samples: list[dict[str, Any]] = [
        {
            "t_s": float(t),
            **dict.fromkeys(("resident_bytes", "python_blocks"), 1000 if t < 60 else late),
            **dict.fromkeys(names, 5),
            "requests": 2 * t,
            "cpu_s": 0.01 * t if t < 60 else 0.6 + 0.02 * (t - 60),
            "computed_tokens": 500 * t,
            "answered_tokens": 0,
        }
        for t in range(101)
    ]
    watch: Any = SimpleNamespace(first_tokens=Thinned())
    for t in range(100):
        watch.first_tokens.add(500.0 + t, 0.001 if t < 60 else 0.002)
    rows = {row["name"]: row for row in drift(samples, watch, 500.0)}
    assert rows["resident_bytes"]["flat"] is flat
    assert rows["resident_bytes"]["change"] == round(late / 1000 - 1, 4)
    assert (rows["time_to_first_token"]["early"], rows["time_to_first_token"]["late"]) == (1.0, 2.0)
    assert rows["held_bytes"]["change"] == 0
    assert rows["python_blocks"]["flat"] is flat
    assert (rows["cpu_per_turn"]["early"], rows["cpu_per_turn"]["late"]) == (5, 10)
    assert rows["computed_per_turn"]["change"] == 0
    assert [name for name, row in rows.items() if row["flat"] is not None] == ["resident_bytes", "python_blocks"]


@pytest.mark.parametrize("wrong", [{"duration_s": 0}, {"users": 0}, {"workers": 0}, {"think_s": -1}, {"memory_mb": 0}])
def test_plans_that_cannot_work_are_refused(wrong: dict[str, Any]) -> None:
    """By name, before anything is made."""
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Plan(**{"duration_s": 1.0, **wrong})


@pytest.mark.parametrize("duration", ["0", "-3", "10x", "m", ""])
def test_what_is_no_duration_is_a_usage_error(duration: str) -> None:
    """One line that shows how to write one."""
    result = CliRunner().invoke(main, ["load", "--duration", duration])
    assert result.exit_code == 2
    assert "10m" in result.stderr


def test_the_command_prints_two_tables_and_draws(tmp_path: Path) -> None:
    """As a reader sees it; the picture is a picture."""
    pytest.importorskip("matplotlib")
    picture = tmp_path / "load.png"
    arguments = ["load", "--duration", "1s", "--users", "2", "--think-s", "0", "--workers", "1", "--plot", str(picture)]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert "own count" in result.stdout
    assert "resident_bytes" in result.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
