"""Groups' lookups side by side: as slices and cat give, forward and backward."""

from __future__ import annotations

import torch

from stoker.tables.lookups import side_by_side


def test_it_equals_slices_and_cat_forward_and_backward():
    runs = [(1, 0, 2), (0, 0, 1), (1, 2, 3), (0, 1, 4), (2, 0, 2)]
    sizes = [4, 3, 2]
    for shape in ((5,), ()):
        generator = torch.Generator().manual_seed(0)
        mine = [torch.randn(7, size, *shape, generator=generator, requires_grad=True) for size in sizes]
        theirs = [each.detach().clone().requires_grad_() for each in mine]
        mine[2].requires_grad_(False)
        found = side_by_side(runs, mine)
        wanted = torch.cat([theirs[which][:, first:stop] for which, first, stop in runs], dim=1)
        assert torch.equal(found, wanted)
        gradient = torch.randn(wanted.shape, generator=generator)
        found.backward(gradient)
        wanted.backward(gradient)
        assert mine[2].grad is None
        for left, right in zip(mine[:2], theirs[:2], strict=True):
            assert torch.equal(left.grad, right.grad)
            assert left.grad.is_contiguous()
