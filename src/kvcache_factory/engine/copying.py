"""From the slots of one tier to those of another: the bytes of a part of a chain, encoded or whole."""

from __future__ import annotations

from .images import seal
from .lasting import LastingTier
from .packed import PackedTier
from .table import Rows
from .tier import Tier
from .transit import Transit
from .values import StoredChain, runs


def copy_part(source: Tier, chain: StoredChain, part: slice, target: Tier, rows: Rows, transit: Transit) -> int:
    """Write the blocks *part* of *chain*, which is in *source*, to *rows* of *target*; by way of *transit* if need be.

    Returns how many leading ones were written.
    """
    written = 0
    for first, last, whole in runs(source.whole(chain.rows[part])):
        some = slice(part.start + first, part.start + last)
        copy = _copy_whole if whole else _copy_encoded
        done = copy(source, chain, some, target, rows[first:last], transit)
        written += done
        if done < last - first:
            break
    return written


def _copy_encoded(source: Tier, chain: StoredChain, part: slice, target: Tier, rows: Rows, transit: Transit) -> int:
    """Blocks that the source has encoded: images as they are, or payloads decoded."""
    assert isinstance(source, PackedTier)
    written = 0
    while written < len(rows):
        slots = transit.take(len(rows) - written, wait=True)
        some = slice(written, written + len(slots))
        try:
            if isinstance(target, LastingTier):
                for slot, number in zip(slots.tolist(), range(part.start + written, part.stop), strict=False):
                    source.write_image(chain, number, transit.memory.view[slot])
                done = target.write_images(rows[some], transit.memory, slots)
            else:
                offset = transit.spec.header_bytes
                good = source.copy_payloads(chain.rows[part][some], transit.memory, slots, offset)
                done = target.store.write(target.slots_of(rows[some][:good]), transit.memory, slots[:good], offset)
        finally:
            transit.give_back(slots)
        written += done
        if done < len(slots):
            break
    return written


def _copy_whole(source: Tier, chain: StoredChain, part: slice, target: Tier, rows: Rows, transit: Transit) -> int:
    """Blocks that are in slots of the source as they are."""
    source_rows = chain.rows[part]
    source_slots = source.slots_of(source_rows)
    if not isinstance(target, LastingTier):
        return target.store.write(target.slots_of(rows), source.slots, source_slots, source.payload_offset)
    spec = transit.spec
    exactly = target.rule.exactly(chain.num_blocks, spec.block_tokens)
    if source.payload_offset:  # slot images: sealed where they are
        seal(spec, source.slots.view, source_slots, chain, part, source.known_sums(source_rows))
        return target.write_images(rows, source.slots, source_slots, exactly)
    written = 0
    while written < len(rows):
        slots = transit.take(len(rows) - written, wait=True)
        try:
            some = slice(written, written + len(slots))
            source.copy_payloads(source_rows[some], transit.memory, slots, spec.header_bytes)
            numbers = slice(part.start + some.start, part.start + some.stop)
            seal(spec, transit.memory.view, slots, chain, numbers, source.known_sums(source_rows[some]))
            done = target.write_images(rows[some], transit.memory, slots, exactly)
        finally:
            transit.give_back(slots)
        written += done
        if done < len(slots):
            break
    return written
