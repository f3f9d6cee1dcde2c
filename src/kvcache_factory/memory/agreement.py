"""Agreement between the ranks of a tensor-parallel engine, each with a cache of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class Agreement:
    """Lets all ranks of a ``torch.distributed`` process group go by the least that any of them has.

    Every rank must ask equally often and in the same order, so that whoever calls it does so for each request, whatever
    that has found.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.asked = 0

    def least(self, value: int) -> int:
        """The least *value* of all ranks: one collective.  Raises RuntimeError when a rank is gone."""
        import torch
        import torch.distributed as dist

        self.asked += 1
        shared = torch.tensor([value], dtype=torch.int64, device=self._device())
        dist.all_reduce(shared, op=dist.ReduceOp.MIN, group=self.group)
        return int(shared.item())

    def _device(self) -> torch.device:
        import torch
        import torch.distributed as dist

        on_host = "gloo" in dist.get_backend(self.group) or "mpi" in dist.get_backend(self.group)
        return torch.device("cpu") if on_host else torch.device("cuda", torch.cuda.current_device())
