"""The scheduler's side: it owns the manager and decides; workers are told which slots belong to which blocks."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ...block.plan import SavePlan
from ...engine.io import Ticket
from ...jit import warm_up_in_background
from ..base import RateLimitedLog
from .decision import LoadDecision
from .events import EventLog
from .geometry import read_geometry
from .identity import Spaces, model_name
from .metrics import ConnectorStats
from .owner import open_manager
from .places import announce
from .plans import BlockIds, Load, Save, StepPlan, StepReport
from .requests import TrackedRequest, cacheable
from .settings import Settings

NULL_BLOCK = 0
"""The engine's block that nothing reads: where a loaded block overlaps what the engine has computed itself."""

WARM_UP_S = 10.0
"""The engine starts at most this much later, so that its first requests do not compete with a compiler."""


class SchedulerSide:
    """Index, slots and sessions of one engine, and the plans for its workers.

    Raises LayoutError and ConfigError for engines whose KV cannot be restored exactly.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: Any, settings: Settings) -> None:
        self.settings = settings
        self.geometry = read_geometry(vllm_config, kv_cache_config, settings.block_tokens)
        transfer = vllm_config.kv_transfer_config
        self.saves, self.loads = transfer.is_kv_producer, transfer.is_kv_consumer
        model = model_name(vllm_config, settings)
        self.owner = open_manager(settings, vllm_config.parallel_config)
        scales = vllm_config.cache_config.cache_dtype if self.geometry.spec.dtype.itemsize == 1 else ""
        self.spaces = Spaces(self.owner.manager, self.geometry, settings, model, str(scales))
        self.spaces.plain  # noqa: B018  opens the manager: what cannot work must fail here
        warm_up_in_background().join(WARM_UP_S)
        self.place = announce(self.owner.manager)
        self.stats = ConnectorStats()
        self._log = RateLimitedLog()
        ledger = self.owner.manager.ledger
        self.decision = LoadDecision(settings.load_decision, self.geometry.spec.bytes_per_token, book=ledger)
        self.events = self._event_log(vllm_config, kv_cache_config)
        self._planned = (0.0, 0)
        self._requests: dict[str, TrackedRequest] = {}
        self._pending: dict[int, tuple[str, SavePlan]] = {}
        self._loads: list[Load] = []
        self._lost: list[int] = []
        self._ended: list[tuple[int, TrackedRequest, int]] = []
        self._step = 0
        self._reported = -1
        self._next_plan = 0
        self._failures = 0
        self._idle = True

    def _event_log(self, vllm_config: Any, kv_cache_config: Any) -> EventLog | None:
        wanted = vllm_config.kv_events_config
        tokens = self.geometry.engine_tokens
        if wanted is None or not wanted.enable_kv_cache_events or kv_cache_config.hash_block_size not in (None, tokens):
            return None
        index = self.owner.manager.first_index
        return EventLog(self.geometry.parts, tokens, lambda keys: index.rows_of(keys) >= 0)

    # -- a request comes ----------------------------------------------------------------------------------------------

    def add(self, request: Any) -> None:
        """Compute the keys of a new request, and begin to bring what slower tiers hold of it."""
        if not cacheable(request):
            self.stats.count(requests_not_cacheable=1)
            return
        with self._guard("reading a request"):
            tracked = TrackedRequest(request, self.spaces.of(request))
            if tracked.session is not None:
                self.stats.count(sessions_let_go=self.owner.know(tracked.session))
            tracked.grow()
            self._requests[tracked.id] = tracked
            if self._may_load(tracked):
                tracked.refresh = tracked.space.refresh()
                self._prefetch(tracked)

    def matched_tokens(self, request: Any, computed: int) -> int | None:
        """Tokens beyond the *computed* ones that can be loaded now; None: ask again, they are on their way."""
        tracked = self._requests.get(request.request_id)
        if tracked is None or not self._may_load(tracked):
            return 0
        found: int | None = 0
        with self._guard("looking up"):
            found = self._look_up(tracked, computed)
        return found

    def _look_up(self, tracked: TrackedRequest, computed: int) -> int | None:
        tracked.grow()
        tracked.local_tokens = computed
        if self._on_its_way(tracked):
            return None
        self._match(tracked)
        return max(tracked.ready_blocks * tracked.space.block_tokens - computed, 0)

    @contextmanager
    def _guard(self, what: str) -> Iterator[None]:
        """A failure of ours costs a computation; the engine must not notice."""
        try:
            yield
        except Exception as error:
            self.stats.count(errors=1)
            self._log.warning(what, f"vLLM: {what} failed, going on without the cache: {error}", exc_info=True)

    def _may_load(self, tracked: TrackedRequest) -> bool:
        skips = tracked.request.skip_reading_prefix_cache
        return bool(self.loads and not skips and not self.decision.never)

    def _prefetch(self, tracked: TrackedRequest) -> None:
        """Begin to bring what slower tiers hold, if more of it is known than at the last look and it pays.

        The one place where that begins: when the request comes, and when other processes' blocks have become known.
        """
        known = tracked.space.peek(tracked.chain)
        if known <= tracked.looked_at:
            return
        # What a remote level has is known to nobody before it was asked, which is done once.
        wanted = tracked.chain.num_blocks if tracked.looked_at < 0 and tracked.space.asks_remotely else known
        tracked.looked_at = known
        tracked.held_before = tracked.space.ready_in_memory(tracked.chain)
        deeper = (wanted - tracked.held_before) * tracked.space.block_tokens
        if deeper <= 0:
            return
        tracked.declined = not self.decision.worth_it(deeper)
        if tracked.declined:
            self.stats.count(loads_declined=1)
            return
        tracked.prefetch = tracked.space.prefetch(tracked.chain, self.decision.patience_s(deeper))
        if tracked.prefetch is not None:
            tracked.prefetched_since = time.monotonic()
            tracked.awaited_tokens = deeper
            self.decision.begun(deeper)

    def _on_its_way(self, tracked: TrackedRequest) -> bool:
        """Whether the request should wait: for what others have stored to be known, or for blocks to be here."""
        if tracked.waiting_since is None:
            tracked.waiting_since = time.monotonic()
        if tracked.refresh is not None:
            if self._still_waiting(tracked, tracked.refresh, self.settings.lookup_wait_s):
                return True
            self.stats.count(lookups_late=int(not tracked.refresh.done))
            tracked.refresh = None
        if tracked.prefetch is None:
            self._prefetch(tracked)
        if tracked.prefetch is not None:
            if self._still_waiting(tracked, tracked.prefetch, self.settings.max_wait_s):
                return True
            self.stats.count(prefetches_late=int(not tracked.prefetch.done))
            self._arrived(tracked)
        tracked.waiting_since = None
        return False

    def _still_waiting(self, tracked: TrackedRequest, ticket: Ticket, bound_s: float) -> bool:
        assert tracked.waiting_since is not None
        left = tracked.waiting_since + bound_s - time.monotonic()
        # With other requests at work the engine has better to do than to wait; without, asking would only burn a core.
        done = ticket.wait(max(min(self.settings.ask_again_s, left), 0)) if self._idle else ticket.done
        return not done and left > 0

    def _arrived(self, tracked: TrackedRequest) -> None:
        """Nothing is awaited any more; learn from how long it took."""
        ticket, tracked.prefetch = tracked.prefetch, None
        if ticket is not None:
            held = tracked.space.ready_in_memory(tracked.chain)
            brought = (held - tracked.held_before) * tracked.space.block_tokens
            seconds = time.monotonic() - tracked.prefetched_since if ticket.done else 0.0
            self.decision.ended(tracked.awaited_tokens, brought, seconds)

    def _match(self, tracked: TrackedRequest) -> None:
        limit = tracked.request.num_tokens - 1  # one token must be left to compute
        known = tracked.match
        if known is not None and tracked.space.holds(known):
            wanted = limit // tracked.space.block_tokens
            if known.blocks >= min(wanted, tracked.space.peek(tracked.chain)):
                return
        said: dict[str, Any] = {"session": tracked.session, "reuse_hint": tracked.reuse_hint}
        tracked.match = tracked.space.match(tracked.chain, tracked.id, max_tokens=limit, **said)
        tracked.space.serve(tracked.match, tracked.ready_blocks, declined=tracked.declined)

    # -- a request is scheduled ---------------------------------------------------------------------------------------

    def allocated(self, request: Any, block_ids: list[int], tokens: int) -> None:
        """The engine has reserved *block_ids* and counts on *tokens* tokens to be loaded into them."""
        tracked = self._requests.get(request.request_id)
        if not tokens or tracked is None:
            return
        planned = False
        with self._guard("planning a load"):
            self._plan_load(tracked, block_ids, tokens)
            planned = True
        if not planned:
            engine = self.geometry.engine_tokens
            self._lost += block_ids[tracked.local_tokens // engine : (tracked.local_tokens + tokens) // engine]

    def _plan_load(self, tracked: TrackedRequest, block_ids: list[int], tokens: int) -> None:
        size, engine = tracked.space.block_tokens, self.geometry.engine_tokens
        total = tracked.local_tokens + tokens
        first, local = tracked.local_tokens // size, tracked.local_tokens // engine
        assert tracked.match is not None, "tokens were promised without a match"
        assert total % size == 0, "promised tokens are whole blocks"
        plan = tracked.space.plan_load(tracked.match, total // size)
        ids = np.array(block_ids[: total // engine], np.int64)
        ids[:local] = NULL_BLOCK
        by_block = ids.reshape(-1, self.geometry.parts)
        loads = [Load(tracked.id, tag, plan.rows[rows], by_block[rows]) for tag, rows in plan.by_layout(first)]
        lost = by_block[max(len(plan.rows), first) :].reshape(-1)
        self._loads += loads
        self._lost += [block for block in lost.tolist() if block != NULL_BLOCK]
        tracked.saved = max(tracked.saved, len(plan.rows))
        tracked.loaded_tokens = tokens
        tracked.load_step = self._step

    def fetched_tokens(self, request: Any, tokens: int) -> int:
        """How many of the *tokens* that are loaded came from slower tiers for this request."""
        tracked = self._requests.get(request.request_id)
        return 0 if tracked is None else min(tracked.fetched_blocks * tracked.space.block_tokens, tokens)

    def plan_step(self, output: Any) -> StepPlan:
        """All copies of the step that *output* describes."""
        for request_id in output.preempted_req_ids or ():
            self._preempted(request_id)
        plan = StepPlan(self._step, self.geometry.spec, self.place, self._failures, self._loads, [], self._lost)
        for request_id, scheduled in output.num_scheduled_tokens.items():
            tracked = self._requests.get(request_id)
            if tracked is not None:
                self._note_first_token(tracked)
                if self.saves:
                    with self._guard("planning a save"):
                        self._plan_save(plan, tracked, scheduled, output.kv_connector_block_state)
        self._loads, self._lost = [], []
        self._step += 1
        self._idle = not output.num_scheduled_tokens
        self._planned = (time.monotonic(), int(output.total_num_scheduled_tokens))
        return plan

    @staticmethod
    def _note_first_token(tracked: TrackedRequest) -> None:
        """The first token is seen when the step after it is planned, or the request has ended."""
        if not tracked.answering and tracked.request.num_output_tokens:
            tracked.answering = True
            tracked.space.first_token(time.monotonic() - tracked.came)

    def _plan_save(self, plan: StepPlan, tracked: TrackedRequest, scheduled: int, blocks: Any) -> None:
        # Drafts are scheduled tokens too, but only those that became tokens of the request are known.
        computed = min(tracked.request.num_computed_tokens + scheduled, tracked.request.num_tokens)
        end = computed // tracked.space.block_tokens
        if end <= tracked.saved:
            return
        tracked.grow(computed)
        saving = self._reserve(tracked, tracked.saved, end)
        tracked.saved = end
        if saving is None:
            return
        last = saving.first + len(saving.rows)
        parts = self.geometry.parts
        ids: BlockIds = np.array(blocks.get_block_ids(tracked.id)[0][saving.first * parts : last * parts], np.int64)
        self._pending[self._next_plan] = (tracked.id, saving)
        plan.saves.append(Save(self._next_plan, saving.slots, ids.reshape(-1, parts)))
        if self.events is not None:
            self.events.planned(self._next_plan, tracked, saving)
        self._next_plan += 1

    def _reserve(self, tracked: TrackedRequest, first: int, end: int) -> SavePlan | None:
        space, tag = tracked.space, self.geometry.tag
        said: dict[str, Any] = {"session": tracked.session, "reuse_hint": tracked.reuse_hint}
        plan = space.plan_save(tracked.chain, first=first, count=end - first, tag=tag, **said)
        if plan is None and first and space.peek(tracked.chain) < first:
            # What these blocks build on has left; the engine still has it.
            plan = space.plan_save(tracked.chain, first=0, count=end, tag=tag, **said)
        return plan

    # -- a step has ended ---------------------------------------------------------------------------------------------

    def step_ended(self, report: StepReport) -> None:
        """Take what the workers say: keys of blocks that could not be loaded leave first, then plans end."""
        begun, tokens = self._planned
        self._planned = (0.0, 0)
        self.decision.computed(tokens, time.monotonic() - begun)
        self._reported = max(self._reported, report.step)
        self._failures = max(self._failures, report.failures)
        for request_id in report.failed_loads:
            with self._guard("dropping what could not be loaded"):
                self._drop(request_id)
        for number, filled in report.filled.items():
            request_id, plan = self._pending.pop(number, ("", None))
            if plan is None:
                continue
            tracked = self._requests.get(request_id)
            space = tracked.space if tracked is not None else self.spaces.plain
            said: dict[str, Any] = {}
            if tracked is not None:
                said = {"session": tracked.session, "reuse_hint": tracked.reuse_hint}
            space.finish_save(plan, filled, **said)
            if self.events is not None:
                self.events.ended(number, filled)
            if tracked is not None and filled < len(plan.rows):
                tracked.saved = min(tracked.saved, plan.first + filled)
        ended = [entry for entry in self._ended if entry[0] <= report.step]
        self._ended = [entry for entry in self._ended if entry[0] > report.step]
        for _, tracked, output_tokens in ended:
            tracked.space.release(tracked.id, output_tokens)
        self.stats.count(blocks_loaded=report.loaded_blocks, blocks_saved=report.saved_blocks)

    def _drop(self, request_id: str) -> None:
        """A load failed: its keys must not be found again, or the engine would try for ever."""
        self.stats.count(loads_failed=1)
        tracked = self._requests.get(request_id) or next(
            (ended for _, ended, _ in self._ended if ended.id == request_id), None
        )
        if tracked is None:
            return
        first = tracked.local_tokens // tracked.space.block_tokens
        tracked.space.drop(tracked.chain, first)
        tracked.saved = min(tracked.saved, first)

    # -- a request leaves ---------------------------------------------------------------------------------------------

    def _preempted(self, request_id: str) -> None:
        tracked = self._requests.get(request_id)
        if tracked is not None:
            self._let_go(tracked, 0)
            tracked.forget_match()
            self.stats.count(preemptions=1)

    def finished(self, request: Any) -> dict[str, Any] | None:
        """The request has ended, however; what the client is told about it if it asked for anything."""
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None:
            return None
        self._note_first_token(tracked)
        self._let_go(tracked, request.num_output_tokens)
        if not request.kv_transfer_params:
            return None
        return {"loaded_tokens": tracked.loaded_tokens, "session_id": tracked.session}

    def _let_go(self, tracked: TrackedRequest, output_tokens: int) -> None:
        """Give the lease back, after the step that uses its slots."""
        self._arrived(tracked)
        if tracked.load_step > self._reported:
            self._ended.append((tracked.load_step, tracked, output_tokens))
        else:
            tracked.space.release(tracked.id, output_tokens)

    def reset(self) -> bool:
        """Never serve again what was stored until now."""
        self.spaces.turn_page(uuid.uuid4().hex)
        for tracked in self._requests.values():
            self._let_go(tracked, 0)
        self._requests.clear()  # what they compute from now on builds on KV from before
        return True

    def close(self) -> None:
        """Let go of everything; a manager that was made here is closed, after its background copies."""
        for tracked in self._requests.values():
            tracked.space.release(tracked.id)
        self._requests.clear()
        self.owner.close()
