"""A worker's side: it copies what it is told between the engine's tensors and the slots, and says how that went."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import LayoutError
from ...jit import warm_up_in_background
from ...memory.move import AnySlab, gather, scatter
from ...memory.packed import PackedRegion
from ..base import RateLimitedLog
from .geometry import make_region, read_geometry
from .places import reach
from .plans import Load, Save, SlabPlace, StepPlan, StepReport
from .settings import Settings

if TYPE_CHECKING:
    import torch


class WorkerSide:
    """Copies of one rank.  A copy that fails is reported and costs a recomputation, never an answer."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, settings: Settings) -> None:
        self.geometry = read_geometry(vllm_config, kv_cache_config, settings.block_tokens)
        self._parallel = vllm_config.parallel_config
        self._region: PackedRegion | None = None
        self._place: SlabPlace | None = None
        self._slab: AnySlab | None = None
        self._report = StepReport()
        self._failures = 0
        self._failed_blocks: set[int] = set()
        self._unsaved: StepPlan | None = None
        self._log = RateLimitedLog()
        warm_up_in_background()  # a worker of its own process has no manager that would

    def register(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take the engine's KV tensors; LayoutError when blocks in them cannot be restored exactly."""
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        rank = get_tensor_model_parallel_rank()
        self._region = make_region(self.geometry, tensors, rank, self._parallel.tensor_parallel_size)

    # -- one step -----------------------------------------------------------------------------------------------------

    def load(self, plan: StepPlan) -> None:
        """Fill the blocks of *plan* before the forward reads them."""
        self._unsaved = plan if plan.saves else None
        if plan.lost:
            self._fail(plan.lost)
        for load in plan.loads:
            self._report.step = plan.step
            try:
                self._scatter(plan, load)
                self._report.loaded_blocks += len(load.slots)
            except Exception as error:
                self._report.failed_loads.add(load.request_id)
                self._fail(load.blocks.reshape(-1).tolist())
                self._log.warning("load", f"vLLM: loading failed, the engine computes instead: {error}", exc_info=True)

    def save(self) -> None:
        """Copy the blocks that the forward has completed; idempotent within a step."""
        plan, self._unsaved = self._unsaved, None
        if plan is None:
            return
        self._report.step = plan.step
        for save in plan.saves:
            self._report.filled[save.plan] = 0
            if plan.failures < self._failures:  # computed on blocks that were never filled
                continue
            try:
                self._gather(plan, save)
                self._report.filled[save.plan] = len(save.slots)
                self._report.saved_blocks += len(save.slots)
            except Exception as error:
                self._log.warning("save", f"vLLM: saving failed, the blocks are not stored: {error}", exc_info=True)

    def report(self) -> StepReport | None:
        """What has happened since the last report; None when nothing has."""
        report, self._report = self._report, StepReport()
        report.failures = self._failures
        return report if report.step >= 0 or self._failures else None

    def take_failed_blocks(self) -> set[int]:
        """The engine's blocks that were promised and not filled."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def close(self) -> None:
        """Let the slots of another process go."""
        slab, self._slab = self._slab, None
        if slab is not None and self._place is not None and self._place.handle is not None:
            slab.close()

    # -- copying ------------------------------------------------------------------------------------------------------

    def _scatter(self, plan: StepPlan, load: Load) -> None:
        region, slab = self._reach(plan)
        scatter(region, region.positions(load.blocks), slab, load.slots, plan.place.payload_offset, load.tag)

    def _gather(self, plan: StepPlan, save: Save) -> None:
        region, slab = self._reach(plan)
        gather(region, region.positions(save.blocks), slab, save.slots, plan.place.payload_offset, region.tag)

    def _reach(self, plan: StepPlan) -> tuple[PackedRegion, AnySlab]:
        if self._region is None:
            raise LayoutError("the engine has not registered its KV tensors")
        if plan.spec != self.geometry.spec:
            raise LayoutError(f"scheduler and worker differ: {plan.spec} and {self.geometry.spec}")
        if self._slab is None or plan.place != self._place:
            self._slab, self._place = reach(plan.place), plan.place
        return self._region, self._slab

    def _fail(self, blocks: list[int]) -> None:
        self._failures += 1
        self._failed_blocks |= set(np.unique(blocks).tolist()) - {0}
