"""The page and the control port: metrics, health, state and actions of the managers of this process.

It needs the extra ``server`` and is started by ``CacheManager(enable_metrics=True, metrics_port=...)``.
"""

from .run import serve

__all__ = ["serve"]
