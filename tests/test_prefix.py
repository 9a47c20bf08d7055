"""scale/prefix.py: prefix sharing only changes the amount of computation."""

import pytest
import torch

from batching import Batch
from models import tree_attention
from scale.prefix import pack


def make(openings: list[list[int]], tails: list[list[list[int]]]) -> Batch:
    """A padded batch in which the samples of group g are openings[g] followed by tails[g]. The
    policy sampled half of every tail."""
    rows, masks, groups = [], [], []
    for g, (opening, samples) in enumerate(zip(openings, tails, strict=True)):
        for tail in samples:
            rows.append(opening + tail)
            half = (len(tail) + 1) // 2
            masks.append([0] * len(opening) + [1] * half + [0] * (len(tail) - half - 1) + [1])
            masks[-1] = masks[-1][: len(rows[-1])]
            groups.append(g)
    width = max(map(len, rows))
    ids = torch.tensor([r + [0] * (width - len(r)) for r in rows])
    mask = torch.tensor([m + [0.0] * (width - len(m)) for m in masks])
    lengths = torch.tensor([len(r) for r in rows])
    zeros = torch.zeros_like(mask)
    return Batch(ids, mask, zeros, zeros, lengths, torch.tensor(groups))


def test_a_small_group_as_a_packed_row() -> None:
    small = make([[5, 6]], [[[7, 8], [9]]])
    packed = pack(small)
    assert packed.input_ids.tolist() == [[5, 6, 7, 8, 9]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 2]]
    assert packed.source.tolist() == [[0, 0, 1, 2, 1]]
    assert packed.columns.tolist() == [[0, 1, 2, 3], [0, 1, 4, 0]]
    assert packed.parts == (2, 2, 1)


@pytest.mark.parametrize(
    "parts",
    [None, (2, 2, 2), (2, 2, 0, 2), (2, 1, 9), (3, 7, 7), (1, 2, 3, 4)],  # None: an ordinary row
)
def test_tree_attention_equals_attention_with_the_mask_of_a_tree(parts: tuple[int, ...]) -> None:
    """After a short opening, the rows of the opening are computed again and dropped. This must not
    change the result or a gradient."""
    length = sum(parts or (6,))
    tree = torch.ones(length, length, dtype=torch.bool).tril()
    if parts:
        part_of = torch.arange(len(parts)).repeat_interleave(torch.tensor(parts))
        tree &= (part_of[:, None] == part_of) | (part_of == 0)  # the same part, or P
    torch.manual_seed(0)
    heads = (4, 2, 2)  # of q, k, v: two heads to a key
    inputs = [torch.randn(1, n, length, 8, requires_grad=True) for n in heads]
    weights = torch.randn(1, length, 4, 8)
    attend = torch.nn.functional.scaled_dot_product_attention
    expected = attend(*inputs, attn_mask=tree, enable_gqa=True).transpose(1, 2)
    expected_gradients = torch.autograd.grad((expected * weights).sum(), inputs)
    actual, _ = tree_attention(None, *inputs, None, parts=parts)
    torch.testing.assert_close(actual, expected)
    actual_gradients = torch.autograd.grad((actual * weights).sum(), inputs)
    torch.testing.assert_close(actual_gradients, expected_gradients)


@pytest.mark.parametrize("name", ["sliding_window", "softcap", "s_aux"])
def test_attention_that_is_not_plain_is_refused(name: str) -> None:
    x = torch.randn(1, 1, 3, 8)
    with pytest.raises(ValueError, match=name):
        tree_attention(None, x, x, x, None, **{name: 2})
    with pytest.raises(ValueError, match="a mask"):
        tree_attention(None, x, x, x, torch.ones(3, 3))
