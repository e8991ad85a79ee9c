"""Choose lookups of a batch, by feature or by id, and check offsets.

Legend: B examples, F features, C of them chosen, L ids.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from stoker.ops.reference import bag_lengths
from stoker.ops.space import HAVE_NUMBA


def offsets_fit(offsets: Tensor, count: int) -> bool:
    """Return True if ``offsets`` [n] rise from 0 to ``count``, so that every bag is within that many ids."""
    if HAVE_NUMBA and offsets.device.type == "cpu":
        from stoker.ops.cpu.kernels import rises

        return bool(rises(offsets.contiguous().numpy(), count))
    wrong = (offsets[0] != 0) | (offsets[-1] != count) | (bag_lengths(offsets) < 0).any()
    return not bool(wrong)  # the host waits for a GPU


@lru_cache(maxsize=4096)
def _index(places: tuple[int, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # a later call may save it for its backward
        return torch.tensor(places, device="cpu").to(device)


def columns_of(table: Tensor, places: tuple[int, ...]) -> Tensor:
    """Copy ``table[:, places]`` [B, K], contiguous. Indexing takes 2 to 20 times as long as these copies."""
    if places == tuple(range(places[0], places[-1] + 1)):
        return table[:, places[0] : places[-1] + 1].clone(memory_format=torch.contiguous_format)
    if len(places) <= 8 and table.device.type == "cpu":
        return torch.stack([table[:, place] for place in places], dim=1)
    return table[:, _index(places, table.device)]


def keep_ids(
    keep: Tensor, ids: Tensor, offsets: Tensor | None, weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return only the ids that ``keep`` [L] marks, each in its bag: ids, offsets and weights."""
    if offsets is None:
        offsets = torch.arange(keep.numel() + 1, device=keep.device)
    before = torch.cat([offsets.new_zeros(1), keep.to(torch.int64).cumsum(0)])
    kept = None if weights is None else weights.reshape(-1)[keep]
    return ids.reshape(-1)[keep], before[offsets], kept


def select_bags(
    places: tuple[int, ...], features: int, ids: Tensor, offsets: Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the bags of some features: ids, offsets [B * C + 1] and weights, whose gradient flows through.

    ``places`` of the C of all F ``features`` rise; ``ids`` are [L], ``offsets`` [B * F + 1] int64, sample-major.
    """
    by_hand = weights is None or (weights.dtype in (torch.float32, torch.float64) and not weights.requires_grad)
    columns = _index(places, ids.device)
    if not HAVE_NUMBA or ids.device.type != "cpu" or not by_hand:
        return _by_mask(columns, features, ids, offsets, weights)
    from stoker.ops.cpu.kernels import chosen_ends, chosen_values

    place, chosen, source = offsets.numpy(), columns.numpy(), ids.numpy()
    ends = torch.empty((len(place) - 1) // features * len(chosen) + 1, dtype=torch.int64, device="cpu")
    total = chosen_ends(place, chosen, features, ends.numpy())
    kept = torch.empty(total, dtype=ids.dtype, device="cpu")
    chosen_values(place, chosen, features, source, kept.numpy())
    if weights is None:
        return kept, ends, None
    kept_weights = torch.empty(total, dtype=weights.dtype, device="cpu")
    chosen_values(place, chosen, features, weights.numpy(), kept_weights.numpy())
    return kept, ends, kept_weights


def _by_mask(
    columns: Tensor, features: int, ids: Tensor, offsets: Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Do the same in torch: the definition."""
    lengths = bag_lengths(offsets)
    chosen = torch.zeros(features, dtype=torch.bool, device=ids.device)
    chosen[columns] = True
    keep = torch.repeat_interleave(chosen.repeat(len(lengths) // features), lengths)
    ends = lengths.view(-1, features)[:, columns].reshape(-1).cumsum(0)
    return ids[keep], torch.cat([ends.new_zeros(1), ends]), None if weights is None else weights[keep]
