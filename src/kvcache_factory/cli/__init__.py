"""The console command ``kvcache-factory`` (alias ``kvf``): one small file per command, imported when it is used."""

from .app import main

__all__ = ["main"]
