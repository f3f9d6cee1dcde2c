"""Capacities, tiers, policies and costs as people write them, and plans made of replays."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcache_factory.errors import CapacityError, ConfigError
from kvcache_factory.simulate.cost import CostModel, saved_s
from kvcache_factory.simulate.models import MODELS, find_model
from kvcache_factory.simulate.optimum import optimum
from kvcache_factory.simulate.plan import Planner, Prices, describe
from kvcache_factory.simulate.plot import draw, draw_plan
from kvcache_factory.simulate.replay import Settings, Size
from kvcache_factory.simulate.still import row_bytes
from kvcache_factory.simulate.study import Capacity, Study, capped, parse_list, parse_policy, parse_tiers
from kvcache_factory.simulate.workload import Workload

Make = Callable[[Iterable[list[int]]], Workload]
LLAMA = MODELS["llama-3-8b"]


def conversations(count: int = 40, turns: int = 4) -> list[list[int]]:
    """Conversations that take turns; each grows by two blocks a turn."""
    return [
        [1000 * number + block for block in range(2 * turn + 2)] for turn in range(turns) for number in range(count)
    ]


# -- as people write them ---------------------------------------------------------------------------------------------


def test_a_capacity_is_a_share_a_number_or_bytes(workload: Make) -> None:
    """Per cent are of the unique blocks; bytes count what the engine's tiers would count."""
    spec = LLAMA.spec(512)
    with workload([[i] for i in range(1000)]) as read:
        assert Capacity.parse("5%").blocks(read, None) == 50
        assert Capacity.parse(" 0.01 % ").blocks(read, None) == 1
        assert Capacity.parse("70").blocks(read, None) == 70
        assert Capacity.parse("1GiB").blocks(read, spec) == 2**30 // row_bytes(spec) == 15
        assert Capacity.parse("1 TiB").blocks(read, spec) == 2**40 // row_bytes(spec)
        with pytest.raises(ConfigError, match="--model"):
            Capacity.parse("1GiB").blocks(read, None)
        with pytest.raises(CapacityError, match="does not hold one block"):
            Capacity.parse("1MiB").blocks(read, spec)


@pytest.mark.parametrize("text", ["0", "0%", "0GiB", "", "x", "-3", "5 %%", "3 parsecs", "nan", "1e3"])
def test_what_is_no_capacity_is_refused(text: str) -> None:
    """Zero is named as zero, nonsense with what would do."""
    with pytest.raises(CapacityError, match="more than zero" if text.startswith("0") else "is no capacity"):
        Capacity.parse(text)


def test_tiers_have_names_and_capacities() -> None:
    """The order is that of the tiers, and a name is there once."""
    assert [name for name, _ in parse_tiers("dram=2%, nvme=1TiB")] == ["dram", "nvme"]
    for text in ("dram", "dram=1%,dram=2%", "=3", "dram=0", "dram:3"):
        with pytest.raises(ConfigError):
            parse_tiers(text)


def test_policies_are_named_with_their_options() -> None:
    """An unknown name is answered with near ones."""
    assert parse_policy("lru:max_size_gb=2.5").options() == {"max_size_gb": 2.5}
    with pytest.raises(ConfigError, match="lru"):
        parse_policy("lruu")
    both = parse_list('hybrid:policies=["lru","s3fifo"]:target=cpu, lru')
    assert both == ['hybrid:policies=["lru","s3fifo"]:target=cpu', "lru"]
    assert [
        (policy["name"], policy["options"]["target"]) for policy in parse_policy(both[0]).options()["policies"]
    ] == [
        ("lru", "cpu"),
        ("s3fifo", "cpu"),
    ]
    with pytest.raises(ConfigError, match="option=value"):
        parse_policy("lru:fast")
    with pytest.raises(ConfigError, match="'lru' has no option 'colour'; use max_size_gb, target, action"):
        parse_policy("lru:colour=3")
    with pytest.raises(ConfigError, match="empty"):
        parse_list(" , ")


def test_models_are_known_by_name_or_by_their_configuration(tmp_path: Path) -> None:
    """llama-3-8b from its own config.json is the llama-3-8b of the table."""
    config = {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    read = find_model(str(tmp_path))
    assert (read.layers, read.kv_heads, read.head_dim, read.width) == (32, 8, 128, 4096)
    assert read.parameters == pytest.approx(LLAMA.parameters, rel=0.01)
    assert LLAMA.spec(1).bytes_per_token == 131072
    with pytest.raises(ConfigError, match="llama-3-8b"):
        find_model("llama3-8b")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="hidden_size"):
        find_model(str(tmp_path))


# -- costs ------------------------------------------------------------------------------------------------------------


def test_prefill_costs_more_the_further_on_it_is() -> None:
    """Two halves cost what the whole costs, and the second costs more."""
    cost = CostModel.of_model(LLAMA, tflops=100)
    assert cost.prefill_s(0, 1000) + cost.prefill_s(1000, 2000) == pytest.approx(cost.prefill_s(0, 2000))
    assert cost.prefill_s(1000, 2000) > cost.prefill_s(0, 1000)
    assert CostModel.from_rate(500).prefill_s(100, 600) == pytest.approx(1.0)


def test_a_measured_cost_is_found_again(tmp_path: Path) -> None:
    """Times of a known law give that law; those of the warm phase do not count."""
    law = CostModel(1e-3, 2e-7)
    rows = [
        {"phase": "cold", "prompt_tokens": n, "ttft_s": 0.05 + float(law.prefill_s(0, n)), "reused_tokens": 0}
        for n in (500, 1000, 2000, 4000)
    ]
    rows.append({"phase": "warm", "prompt_tokens": 4000, "ttft_s": 0.01, "reused_tokens": 3968})
    path = tmp_path / "demo.json"
    path.write_text(json.dumps({"command": "demo", "rows": rows}))
    found = CostModel.from_file(path)
    assert found.token_s == pytest.approx(law.token_s, rel=1e-3)
    assert found.position_s == pytest.approx(law.position_s, rel=1e-3)


@pytest.mark.parametrize("text", ["", "{}", '{"rows": []}', '{"rows": [{"prompt_tokens": 3}]}', "[1]", '{"rows": [3]}'])
def test_a_file_without_measurements_is_refused(tmp_path: Path, text: str) -> None:
    """The message says what belongs in it."""
    path = tmp_path / "demo.json"
    path.write_text(text)
    with pytest.raises(ConfigError):
        CostModel.from_file(path)
    with pytest.raises(ConfigError):
        CostModel.from_rate(0)


def test_saved_seconds_are_those_of_prefill_less_loading() -> None:
    """Two requests hit 2 and 1 blocks in two tiers; the second prompt is shorter than its blocks."""
    hits = [np.array([1, 1]), np.array([1, 0])]
    cost = CostModel.from_rate(100.0)
    saved = saved_s(cost, hits, 50, np.array([500, 30]), block_bytes=10, rates=[10.0, 5.0])
    assert saved == pytest.approx((100 + 30) / 100 - 20 / 10 - 10 / 5)


# -- studies and plans ------------------------------------------------------------------------------------------------


def test_a_study_has_a_row_for_each_policy_and_capacity(workload: Make) -> None:
    """The keys that scripts rely on, and values within their bounds."""
    sizes = [[("cache", Capacity.parse(text))] for text in ("10%", "50%")]
    policies = [(name, parse_policy(name)) for name in ("lru", "fifo")]
    with workload(conversations()) as read:
        settings = Settings(spec=LLAMA.spec(512))
        rows = [row for row, _ in Study(policies, sizes, settings, cost=CostModel.from_rate(1e4)).run(read)]
    assert [(row["policy"], row["capacity_fraction"]) for row in rows] == [
        (policy, fraction) for fraction in (0.1, 0.5) for policy in ("lru", "fifo")
    ]
    for row in rows:
        assert 0 <= row["usable_hit"] <= row["optimum"] <= 1
        assert row["saved_prefill_s"] > 0 or row["usable_hit"] == 0
        assert {"trace", "block_hit", "us_per_block", "evictions", "cache_gib"} <= row.keys()


def test_the_cap_of_a_policy_holds_in_a_replay(workload: Make) -> None:
    """Of one tier, of those in memory together, or of the kind that is its target; without weights it is refused."""
    spec = LLAMA.spec(512)
    gib = row_bytes(spec) / 2**30
    sizes = [Size("gpu", 6), Size("dram", 30), Size("nvme", 100)]
    for text, expected in (
        (f"lru:max_size_gb={20.5 * gib}", [6, 14, 100]),
        (f"lru:max_size_gb={20.5 * gib}:target=cpu", [6, 20, 100]),
        (f"lru:max_size_gb={20.5 * gib}:target=disk", [6, 30, 20]),
        ("lru", [6, 30, 100]),
    ):
        assert [size.blocks for size in capped(sizes, parse_policy(text), spec)] == expected
    with pytest.raises(ConfigError, match="--model"):
        capped(sizes, parse_policy("lru:max_size_gb=1"), None)
    with pytest.raises(CapacityError, match="no room for one block"):
        capped(sizes, parse_policy("lru:max_size_gb=0.001"), spec)
    policies = [(name, parse_policy(name)) for name in ("lru", f"lru:max_size_gb={32.5 * gib}")]
    with workload(conversations()) as read:
        whole, part = (row for row, _ in Study(policies, [parse_tiers("cache=160")], Settings(spec=spec)).run(read))
        assert (whole["capacity_blocks"], part["capacity_blocks"]) == (160, 32)
        assert part["optimum"] == optimum(read, 32) < whole["optimum"]


def test_flat_semantics_has_no_tiers(workload: Make) -> None:
    """What cannot be combined is said."""
    sizes = [parse_tiers("dram=1%,nvme=2%")]
    with workload([[1]]) as read, pytest.raises(ConfigError, match="flat"):
        Study([("lru", parse_policy("lru"))], sizes, semantics="flat").run(read)


def plan(read: Workload, **options: Any) -> tuple[list[dict[str, Any]], Planner]:
    """A plan for llama-3-8b."""
    planner = Planner(read, LLAMA, parse_policy("lru"), **options)
    return planner.run(), planner


def test_a_plan_reaches_its_target(workload: Make) -> None:
    """The capacity that is answered serves what was asked for, and a little less does not."""
    with workload(conversations()) as read:
        rows, planner = plan(read, target=0.5)
        target = next(row for row in rows if row["kind"] == "target")
        assert target["of_reusable"] >= 0.5
        curve = [row for row in rows if row["kind"] == "curve"]
        assert [row["tier_gib"] for row in curve] == sorted(row["tier_gib"] for row in curve)
        assert curve[-1]["of_reusable"] == pytest.approx(1.0)
        assert any(row["kind"] == "knee" for row in rows)
        assert "GiB" in describe(rows, planner)


def test_prices_decide_how_much_dram(workload: Make) -> None:
    """Cheap DRAM and a dear accelerator buy DRAM; dear DRAM leaves it to the NVMe."""
    with workload(conversations()) as read:
        parts = []
        for dram in (1e-6, 1e6):
            prices = Prices(dram=dram, nvme=0.0, gpu=1.0)
            rows, _ = plan(read, target=1.0, prices=prices, load_gb_s={"nvme": 0.5})
            answer = {row["tier"]: row for row in rows if row["kind"] == "answer"}
            parts.append(answer["dram"]["tier_gib"])
            whole = answer.get("dram+nvme", answer["dram"])
            assert whole["price_a_month"] == pytest.approx(dram * parts[-1])
        assert parts[0] > parts[1]


def test_parts_of_an_answer_add_up(workload: Make) -> None:
    """What the two tiers serve and save is what both together do."""
    with workload(conversations()) as read:
        rows, _ = plan(read, target=1.0, prices=Prices(dram=1e6, nvme=0.0, gpu=1.0))
        *parts, whole = [row for row in rows if row["kind"] == "answer"]
        assert len(parts) == 2
        for name in ("tier_gib", "usable_hit", "saved_prefill_s"):
            assert sum(row[name] for row in parts) == pytest.approx(whole[name])


@pytest.mark.parametrize("target", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("prices", [Prices(), Prices(dram=1e6, nvme=0.0, gpu=1.0)])
def test_an_answer_of_two_tiers_serves_what_was_asked_for(workload: Make, target: float, prices: Prices) -> None:
    """Requests of up to 40 blocks: a DRAM of one block would cut them off before they reach the NVMe."""
    turns = [[1000 * number + i for i in range(10 * turn + 10)] for turn in range(4) for number in range(20)]
    with workload(turns) as read:
        rows, _ = plan(read, target=target, prices=prices)
        answer = {row["tier"]: row for row in rows if row["kind"] == "answer"}
        assert answer["dram"]["tier_gib"] * 2**30 >= 40 * row_bytes(LLAMA.spec(512))
        assert answer.get("dram+nvme", answer["dram"])["of_reusable"] >= 0.98 * target


@pytest.mark.parametrize("text", ["dram", "dram=x", "gold=3", "dram=-1", "dram=inf", "{}"])
def test_prices_that_are_none_are_refused(text: str) -> None:
    """With an example of what would do."""
    with pytest.raises(ConfigError, match="prices"):
        Prices.parse(text)


def test_prices_come_from_a_file_as_well(tmp_path: Path) -> None:
    """A JSON object with the same names."""
    path = tmp_path / "prices.json"
    path.write_text('{"dram": 3.2, "gpu": 2.5}')
    assert Prices.parse(str(path)) == Prices(dram=3.2, gpu=2.5)
    path.write_text('{"dram": -3.2}')
    with pytest.raises(ConfigError, match="from 0 on"):
        Prices.parse(str(path))


@pytest.mark.parametrize("target", [0.0, -1.0, 1.5])
def test_a_target_beyond_all_or_nothing_is_refused(workload: Make, target: float) -> None:
    """Per cent are above 0 and at most 100."""
    with workload([[1]]) as read, pytest.raises(ConfigError, match="target"):
        plan(read, target=target)


def test_a_trace_without_reuse_has_a_plan_all_the_same(workload: Make) -> None:
    """Nothing to find: the smallest cache will do."""
    with workload([[i, i + 1] for i in range(0, 60, 2)]) as read:
        rows, _ = plan(read)
        assert all(row["usable_hit"] == 0 for row in rows)


def test_plots_are_drawn(workload: Make, tmp_path: Path) -> None:
    """Pictures of a study and of a plan; a place that cannot be written is said."""
    with workload(conversations(12)) as read:
        sizes = [[("cache", Capacity.parse(text))] for text in ("10%", "50%")]
        found = Study([("lru", parse_policy("lru"))], sizes).run(read)
        draw([(read, found)], tmp_path / "replay.png")
        rows, _ = plan(read)
        draw_plan(rows, tmp_path / "plan.png")
        with pytest.raises(ConfigError, match="cannot be written"):
            draw([(read, found)], tmp_path / "none" / "replay.png")
    for name in ("replay.png", "plan.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
