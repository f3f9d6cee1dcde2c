"""Transformers: plain ``model.generate(...)`` reuses and saves KV, from version 4.57 on.

adapter = TransformersCacheAdapter.attach(model, manager, tokenizer=tokenizer)
model.generate(**inputs)                    # as before; now it loads what it has seen
adapter.chat(session, messages)             # a conversation that keeps its own token ids
adapter.detach()
"""

from .adapter import TransformersCacheAdapter
from .chat import ChatReply
from .pruning import (
    H2O,
    KeyDiff,
    L2Norm,
    PruningMethod,
    PyramidKV,
    Seen,
    SnapKV,
    StreamingLLM,
    parse_pruning,
    register_pruning,
)
from .reuse import Reuse
from .special import Generated
from .tiered import TieredCache, TieredCacheLayer

__all__ = [
    "H2O",
    "ChatReply",
    "Generated",
    "KeyDiff",
    "L2Norm",
    "PruningMethod",
    "PyramidKV",
    "Reuse",
    "Seen",
    "SnapKV",
    "StreamingLLM",
    "TieredCache",
    "TieredCacheLayer",
    "TransformersCacheAdapter",
    "parse_pruning",
    "register_pruning",
]
