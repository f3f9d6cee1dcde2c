"""What travels between the scheduler's side and the workers' side in one step: plain data, moved by vLLM itself."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from ...block.spec import BlockSpec, Layout
from ...memory.shared import SlabHandle

Slots = npt.NDArray[np.int32]
BlockIds = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SlabPlace:
    """Where the slots are: by *number* in the process that owns them, by *handle* in any other."""

    number: int
    pid: int
    handle: SlabHandle | None
    payload_offset: int


@dataclass(frozen=True)
class Load:
    """Copy *slots* ``[n]``, payloads in order *tag*, to the engine's blocks *blocks* ``[n, m]`` before the forward."""

    request_id: str
    tag: Layout
    slots: Slots
    blocks: BlockIds


@dataclass(frozen=True)
class Save:
    """Copy the engine's *blocks* ``[n, m]`` to *slots* ``[n]`` after the forward; *plan* is told how that went."""

    plan: int
    slots: Slots
    blocks: BlockIds


@dataclass
class Nothing(KVConnectorMetadata):  # type: ignore[misc]
    """The plan of a connector that sleeps."""


@dataclass
class StepPlan(KVConnectorMetadata):  # type: ignore[misc]
    """All copies of one step.

    Attributes
    ----------
    lost:
        Engine blocks that the scheduler was promised and that cannot be loaded after all.
    failures:
        How many failed steps the planner knew of: a worker that had more saves nothing, because what was computed since
        may have been computed on blocks that were never filled.
    """

    step: int
    spec: BlockSpec
    place: SlabPlace
    failures: int = 0
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)


@dataclass
class StepReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """How the copies went, over all ranks after :meth:`aggregate`: *filled* leading slots of each save plan."""

    step: int = -1
    failures: int = 0
    filled: dict[int, int] = field(default_factory=dict)
    failed_loads: set[str] = field(default_factory=set)
    loaded_blocks: int = 0
    saved_blocks: int = 0

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReport:
        """A block is stored when every rank has stored its shard, and lost when one could not load its own."""
        assert isinstance(other, StepReport)
        both = {plan: min(count, other.filled.get(plan, 0)) for plan, count in self.filled.items()}
        return StepReport(
            step=min(self.step, other.step),
            failures=max(self.failures, other.failures),
            filled={**dict.fromkeys(other.filled, 0), **both},
            failed_loads=self.failed_loads | other.failed_loads,
            loaded_blocks=min(self.loaded_blocks, other.loaded_blocks),
            saved_blocks=min(self.saved_blocks, other.saved_blocks),
        )
