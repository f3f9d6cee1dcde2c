"""How much the tokens of a sequence were looked at, from the attention weights that ``generate`` returns if asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


def attention_mass(attentions: Sequence[Any], row: int) -> npt.NDArray[np.float64] | None:
    """What each position of sequence *row* received, over all steps, layers, heads and queries ``[positions]``.

    *attentions* is what ``generate(output_attentions=True, return_dict_in_generate=True)`` returns: for each step a
    tensor ``[sequences, heads, queries, positions]`` for each layer.  None where the attention in use, as that of SDPA,
    returns no weights.
    """
    steps = [[layer for layer in step if layer is not None] for step in attentions]
    if not steps or not all(steps):
        return None
    mass = np.zeros(max(int(layer.shape[-1]) for layer in steps[-1]))
    for step in steps:
        for layer in step:
            received = layer[row].detach().sum(dim=(0, 1)).float().cpu().numpy()
            mass[: len(received)] += received
    return mass
