"""From spells to Gittins indices: steps 5 to 7 of GRE, in compiled loops or in numpy.

A spell is the time from one use of a block to its next.  A class's hazard in an age bucket is the chance that a block
that has been idle that long is used within the bucket; the index of an age is the best ratio, over all horizons, of
the chance of a use within the horizon to the time that the block is kept for it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..jit import kernel

BUCKETS = 28
FIRST_EDGE_S = 2.0
GROWTH = 1.4
USES, PLACES, HINTS, GAPS, OUTPUTS = 5, 3, 3, 5, 7
FINE = GAPS * OUTPUTS
"""Classes that share one coarse class."""
COARSE = USES * PLACES * HINTS
CLASSES = COARSE * FINE

KAPPA, KAPPA_COARSE = 30.0, 20.0
"""Weight, in spells, of the coarser class's hazard in a class's own, and of the overall hazard in a coarse class's."""

START, END, CLASS, WEIGHT, NUMBER = range(5)
"""Columns of the ring of spells.  END is the age bucket of the use that ended the spell, -1 while it lasts."""

Table = npt.NDArray[np.float64]
EDGES = np.append(FIRST_EDGE_S * GROWTH ** np.arange(BUCKETS - 1), np.inf)
"""Upper edges of the age buckets in seconds."""
_WIDTHS = np.diff(FIRST_EDGE_S * GROWTH ** np.arange(BUCKETS), prepend=0.0)


def _count_numpy(ring: Any, now: float, edges: Any, used: Any, risk: Any, used_coarse: Any, risk_coarse: Any) -> None:
    ended = ring[:, END] >= 0
    bucket = np.where(ended, ring[:, END], np.searchsorted(edges, now - ring[:, START], side="right"))
    bucket = np.minimum(bucket, BUCKETS - 1).astype(np.int64)
    classes, weight = ring[:, CLASS].astype(np.int64), ring[:, WEIGHT]
    np.add.at(used, (classes[ended], bucket[ended]), weight[ended])
    np.add.at(risk, (classes, bucket), weight)
    risk[:] = risk[:, ::-1].cumsum(axis=1)[:, ::-1]
    used_coarse[:] = used.reshape(COARSE, FINE, BUCKETS).sum(axis=1)
    risk_coarse[:] = risk.reshape(COARSE, FINE, BUCKETS).sum(axis=1)


@kernel(
    "void(f8[:,::1], f8, f8[::1], f8[:,::1], f8[:,::1], f8[:,::1], f8[:,::1])",
    fallback=_count_numpy,
    yields=True,
)
def _count(ring: Any, now: Any, edges: Any, used: Any, risk: Any, used_coarse: Any, risk_coarse: Any) -> None:
    """Weights of spells by class and age: of those that ended with a use there, and of those that came that far."""
    last = len(edges) - 1
    at = 0
    for i in range(len(ring)):
        bucket = int(ring[i, 1])
        if bucket < 0:
            # Spells lie in the order of their beginnings: the bucket of the one before is near.
            age = now - ring[i, 0]
            while at < last and age >= edges[at]:
                at += 1
            while at > 0 and age < edges[at - 1]:
                at -= 1
            bucket = at
        else:
            used[int(ring[i, 2]), bucket] += ring[i, 3]
        risk[int(ring[i, 2]), bucket] += ring[i, 3]
    fine = len(used) // len(used_coarse)
    for c in range(len(used)):
        above = 0.0
        for bucket in range(last, -1, -1):
            above += risk[c, bucket]
            risk[c, bucket] = above
        if above > 0:
            for bucket in range(last + 1):
                used_coarse[c // fine, bucket] += used[c, bucket]
                risk_coarse[c // fine, bucket] += risk[c, bucket]


def _gittins_numpy(hazard: Any, widths: Any, out: Any) -> None:
    out.fill(0.0)
    for first in range(BUCKETS):
        idle, reached, spent = np.ones(len(hazard)), np.zeros(len(hazard)), np.zeros(len(hazard))
        for bucket in range(first, BUCKETS):
            reached += idle * hazard[:, bucket]
            spent += idle * widths[bucket] * (1 - 0.5 * hazard[:, bucket])
            idle *= 1 - hazard[:, bucket]
            np.maximum(out[:, first], reached / spent, out=out[:, first])


@kernel("void(f8[:,::1], f8[::1], f8[:,::1])", fallback=_gittins_numpy, yields=True)
def _gittins(hazard: Any, widths: Any, out: Any) -> None:
    """Index of each class at each age, from its hazards."""
    for c in range(len(hazard)):
        for first in range(len(widths)):
            idle, reached, spent, best = 1.0, 0.0, 0.0, 0.0
            for bucket in range(first, len(widths)):
                chance = hazard[c, bucket]
                reached += idle * chance
                spent += idle * widths[bucket] * (1 - 0.5 * chance)
                idle *= 1 - chance
                if reached > best * spent:
                    best = reached / spent
            out[c, first] = best


def _smooth(values: Table) -> Table:
    before = np.concatenate((values[:, :1], values[:, :-1]), axis=1)
    after = np.concatenate((values[:, 1:], values[:, -1:]), axis=1)
    smooth: Table = 0.5 * values + 0.25 * (before + after)
    return smooth


def index_table(ring: Table, now: float) -> Table:
    """Gittins index ``[CLASSES, BUCKETS]`` in hits per second, learned from the spells in *ring*, the oldest first."""
    used, risk = np.zeros((CLASSES, BUCKETS)), np.zeros((CLASSES, BUCKETS))
    used_coarse, risk_coarse = np.zeros((COARSE, BUCKETS)), np.zeros((COARSE, BUCKETS))
    _count(ring, now, EDGES, used, risk, used_coarse, risk_coarse)
    used_all, risk_all = _smooth(used_coarse.sum(axis=0)[None]), _smooth(risk_coarse.sum(axis=0)[None])
    overall = (used_all + 0.02) / (risk_all + 1)
    coarse = (_smooth(used_coarse) + KAPPA_COARSE * overall) / (_smooth(risk_coarse) + KAPPA_COARSE)
    table = np.repeat(_indices(coarse), FINE, axis=0)
    seen = np.flatnonzero(risk[:, 0])  # a class without spells has the hazard of its coarse class
    own = (_smooth(used[seen]) + KAPPA * coarse[seen // FINE]) / (_smooth(risk[seen]) + KAPPA)
    table[seen] = _indices(own)
    return table


def _indices(hazard: Table) -> Table:
    out = np.empty_like(hazard)
    _gittins(np.ascontiguousarray(hazard), _WIDTHS, out)
    return out
