"""What live figures say about symptoms: the rows of ``docs/troubleshooting.md`` that apply."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..errors import ConfigError
from ..observe.series import CORRUPT
from .figures import Figures, State

MANY = 0.2
"""Share from which something that may happen now and then is a cause."""
FEW_BLOCKS = 64
"""Blocks below which shares say nothing."""
LITTLE_S = 1.0
"""Seconds of work below which shares of them say nothing."""

Check = Callable[[Figures], str]
"""The figure that makes a row apply, in words; empty when it does not."""


class Rule(NamedTuple):
    """A row: what people see, why, where it shows, what confirms it, and what to turn."""

    symptom: str
    cause: str
    metric: str
    command: str
    knob: str
    check: Check


def _never_asked(f: Figures) -> str:
    return "no request was looked up" if f.state.get("open") and not f.asked else ""


def _bypassed(f: Figures) -> str:
    return "bypassed: yes" if f.state.get("bypassed") else ""


def _nothing_in_common(f: Figures) -> str:
    return f"{f.asked} blocks asked, none seen before" if f.asked >= FEW_BLOCKS and not f.reusable else ""


def _other_identity(f: Figures) -> str:
    found = f.blocks("found")
    return f"{found} blocks found in the directory, no hit" if found and f.asked and not f.blocks("hit") else ""


def _loads_slower(f: Figures) -> str:
    times, predicted, actual = f.compared("load")
    return (
        f"{times} loads took {actual:.2f} s, predicted {predicted:.2f} s"
        if times > 9 and actual > 2 * predicted
        else ""
    )


def _share(f: Figures, reason: str, least: float = MANY) -> str:
    share = f.recomputed(reason)
    return f"{share:.0%} of the reusable tokens: {reason}" if share > least else ""


def _locks(f: Figures) -> str:
    waited, work = f.seconds("lock_wait"), f.seconds("match", "load", "save", manager=True)
    return f"{waited:.2f} s of {work:.2f} s waiting for an index" if work >= LITTLE_S and waited > MANY * work else ""


def _corrupt(f: Figures) -> str:
    bad = {r: n for r, n in f.reasons("load_failed", tiers_only=True).items() if n and r.startswith(CORRUPT)}
    return "load failures: " + ", ".join(f"{reason} {n}" for reason, n in sorted(bad.items())) if bad else ""


def _collisions(f: Figures) -> str:
    return _some(f.blocks("miss", reason="record_differs"), "blocks whose key was another prompt's, and were refused")


def _lossy(f: Figures) -> str:
    worst = max((float(row["value"]) for row in f.state.get("worst", ()) if "error" in row["name"]), default=0.0)
    return f"largest relative error {worst:.3g}" if worst else ""


def _lost_requests(f: Figures) -> str:
    return _some(f.times("lease_expired"), "requests lost their hold on blocks")


def _breakers(f: Figures) -> str:
    names = [f"{t['tier']}: {name}" for t in f.tiers for name, is_open in t.get("breakers", {}).items() if is_open]
    said = {r: n for r, n in f.reasons("store_error").items() if r not in ("full", "quarantined")}
    failures = sum(said.values()) + sum(f.times("error", tier["tier"]) for tier in f.tiers)
    return "; ".join([*names, *([f"{failures} failures of a store"] if failures else [])])


def _hanging(f: Figures) -> str:
    return _some(int(f.state.get("io", {}).get("abandoned_reads", 0)), "blocks whose reads have not ended")


def _own_failures(f: Figures) -> str:
    return _some(f.times("error", "manager"), "failures of the cache, answered as misses")


def _queues(f: Figures) -> str:
    return _some(f.blocks("not_stored", reason="queue_full"), "blocks were not copied down: the queue was full")


def _churn(f: Figures) -> str:
    evicted, unused = f.blocks("evicted"), f.blocks("unused")
    return f"{unused} of {evicted} left unused" if evicted >= FEW_BLOCKS and unused > 0.5 * evicted else ""


def _not_touched(f: Figures) -> str:
    late = [
        f"{tier['tier']} {tier['prefaulted']:.0%}" for tier in f.tiers if f.state.get("open") and tier["prefaulted"] < 1
    ]
    return "pre-faulted: " + ", ".join(late) if late else ""


def _too_small(f: Figures) -> str:
    return _share(f, "gone") if f.blocks("evicted", reason="capacity") else ""


def _quota(f: Figures) -> str:
    refused, dropped = f.blocks("not_stored", reason="quota"), f.blocks("dropped", reason="quota")
    return f"{refused} blocks refused, {dropped} dropped at a quota" if refused + dropped else ""


def _not_admitted(f: Figures) -> str:
    refused, stored = f.blocks("not_stored", reason="not_admitted"), f.blocks("stored")
    return f"{refused} blocks not admitted, {stored} stored" if refused > stored + FEW_BLOCKS else ""


def _full(f: Figures) -> str:
    full, pinned = f.blocks("not_stored", reason="full"), sum(bool(s.get("pinned")) for s in f.sessions)
    return f"{full} blocks found no room; {f.state.get('leases', 0)} leases, {pinned} pinned sessions" if full else ""


def _ended_early(f: Figures) -> str:
    ended = f.blocks("dropped", reason="session_destroyed")
    return _share(f, "gone") and f"{ended} blocks went with their sessions" if ended > f.blocks("evicted") else ""


def _fragments(f: Figures) -> str:
    lost, held = f.tier_sum("fragmentation"), f.tier_sum("held_bytes")
    return f"{lost:,} of {held:,} bytes hold no payload" if held and lost > MANY * held else ""


def _over_budget(f: Figures) -> str:
    over = [tier["tier"] for tier in f.tiers if tier["held_bytes"] > tier["budget_bytes"]]
    return f"over budget: {', '.join(over)}" if over else ""


def _not_continued(f: Figures) -> str:
    long = [s for s in f.sessions if s["requests"] >= 5 and s["asked_tokens"]]
    poor = [s for s in long if s["reused_tokens"] < MANY * s["asked_tokens"]]
    return f"{len(poor)} of {len(long)} sessions reuse less than a fifth" if len(poor) > len(long) / 2 else ""


def _slow_tier(f: Figures) -> str:
    hits = f.tier_hits()
    return f"hits by tier: {hits}" if len(hits) > 1 and sum(hits) >= FEW_BLOCKS and sum(hits[1:]) > hits[0] else ""


def _some(count: int, what: str) -> str:
    return f"{count} {what}" if count else ""


RULES = (
    Rule("no speed-up", "no request reaches the cache: the adapter is not attached, or hands requests on",
         "lookup_blocks_total", "state", "`attach()`; reasons are in `adapter.status()[\"bypassed\"]`", _never_asked),
    Rule("no speed-up", "the cache is bypassed", "bypassed", "bypass off", "`manager.bypass(False)`", _bypassed),
    Rule("no speed-up", "prompts have nothing in common, or not from their first token on", "reusable_tokens_total",
         "replay recording.jsonl", "fixed text first, what changes last; `block_tokens`", _nothing_in_common),
    Rule("no speed-up", "processes that should share disagree about the model, its dtype, adapter, salt or namespace",
         "found_blocks_total", "doctor --model ./model", "`model_id`, `namespace`, `salt`", _other_identity),
    Rule("slower", "loading takes longer than predicted: the disk or the network is slow or busy",
         "work_actual_seconds_total", "bench disk --quick", "`load_decision`, a faster `path`", _loads_slower),
    Rule("slower", "what was found does not come in time, and is computed after all",
         "recomputed_tokens_total", "bench disk --quick", "`io_threads`, more memory above the disk",
         lambda f: _share(f, "not_loaded", 0.05)),
    Rule("slower", "threads wait for each other at one index", "lock_wait_seconds", "bench sessions --quick",
         "a manager for each route", _locks),
    Rule("garbled or repeated replies", "stored bytes were damaged; such blocks are refused and dropped",
         "corrupt_blocks_total", "verify ./kv-cache", "`integrity=\"full\"`; replace the disk", _corrupt),
    Rule("garbled or repeated replies", "two prompts have one key; the record tells them apart, and it is a miss",
         "missed_blocks_total", "state", "`key_builder=\"ROLLING_HASH\"`", _collisions),
    Rule("garbled or repeated replies", "a lossy codec changes keys and values", "codec_error_ratio", "state",
         "the codec of the tier; exact storage", _lossy),
    Rule("crash after hours", "requests never end and hold blocks", "leases_expired_total", "state",
         "`release()` in every path; `lease_max_age_s`", _lost_requests),
    Rule("crash after hours", "a store fails: disk full, read-only, gone, or a server away", "store_errors_total",
         "doctor --disk ./kv-cache", "`path`, `size_gb` of the DiskBackend", _breakers),
    Rule("crash after hours", "reads hang in the system", "abandoned_read_blocks", "doctor --disk ./kv-cache",
         "another disk or mount", _hanging),
    Rule("crash after hours", "the cache itself fails; requests go on without it", "errors_total", "state --json",
         "report it with the warnings in the state", _own_failures),
    Rule("batch throughput down", "copies to the tier below do not keep up", "io_queued_jobs", "top --count 1",
         "`io_threads`, `ingestion=\"hot\"`", _queues),
    Rule("batch throughput down", "most blocks leave before anybody uses them", "evicted_unused_blocks_total",
         "replay recording.jsonl", "a policy that admits or ages, such as `S3FIFOEvictionPolicy`", _churn),
    Rule("batch throughput down", "memory has not been touched yet", "tier_prefaulted_ratio", "state",
         "wait for `/readyz` before sending load", _not_touched),
    Rule("hit rate low", "the tiers are too small for what returns", "recomputed_tokens_total",
         "plan recording.jsonl --model llama-3-8b", "`size_gb`, another level", _too_small),
    Rule("hit rate low", "sessions are at their quotas", "not_stored_blocks_total", "state --json",
         "`quota_gb`, `SessionSettings`", _quota),
    Rule("hit rate low", "the policy does not admit new blocks", "admissions_refused_blocks_total",
         "replay recording.jsonl", "`eviction_policy`", _not_admitted),
    Rule("hit rate low", "computing is judged faster than loading", "load_decisions_total", "bench disk --quick",
         "`load_decision=\"always\"`, if the judgement is wrong", lambda f: _share(f, "chosen")),
    Rule("hit rate low", "all that could leave is leased or pinned", "leases", "state --json",
         "`pin_session(id, False)`, `lease_max_age_s`, `size_gb`", _full),
    Rule("hit rate low", "sessions end before they return", "dropped_blocks_total", "state --json",
         "`ttl_s`, `destroy_session`", _ended_early),
    Rule("out of memory", "slots are much larger than what they hold", "fragmentation_bytes", "state --json",
         "`block_tokens`", _fragments),
    Rule("out of memory", "a tier holds more than its budget: a fault of ours", "tier_used_bytes", "state",
         "report it with the state", _over_budget),
    Rule("latency growing with turns", "turns do not go on from the last one's tokens: text is encoded anew, or edited",
         "recomputed_tokens_total", "state --json", "`adapter.chat`, `use_session(id, history=\"append\")`",
         _not_continued),
    Rule("latency growing with turns", "most hits come from a slower tier", "lookup_blocks_total", "top --count 1",
         "`size_gb` of the first level; `prefetch`", _slow_tier),
)  # fmt: skip
"""Every row of the page that figures can tell, in its order."""


def advise(state: State) -> list[dict[str, Any]]:
    """The rows that apply to what ``CacheManager.state()`` gave, each with the figure that says so.

    Rows: ``manager``, ``symptom``, ``cause``, ``figure``, ``metric``, ``command``, ``knob``.  ConfigError when *state*
    is not the state of a manager.
    """
    try:
        figures = Figures(state)
        said = [(rule, rule.check(figures)) for rule in RULES]
        name = str(state.get("manager", state["name"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"this is not the state of a manager: {type(error).__name__}: {error}") from error
    return [
        {
            "manager": name,
            "symptom": rule.symptom,
            "cause": rule.cause,
            "figure": figure,
            "metric": f"kvcache_factory_{rule.metric}",
            "command": f"kvcache-factory {rule.command}",
            "knob": rule.knob.replace("`", ""),
        }
        for rule, figure in said
        if figure
    ]
