"""Blocks on a local disk: warm after a restart, shared by the processes of one machine."""

from .store import DiskStore

__all__ = ["DiskStore"]
