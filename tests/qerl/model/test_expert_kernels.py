"""The kernel that sums over a token's experts, against float64. Last run on an H200 on 2026-11-23.

Without a card but with triton installed, run it by
`TRITON_INTERPRET=1 pytest -m gpu tests/qerl/model/test_expert_kernels.py`.
"""

import os

import pytest
import torch

from qerl.model.experts import sort_by_expert

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [pytest.mark.gpu(instead=INTERPRETED), pytest.mark.usefixtures("fresh_seed")]
DEVICE = "cpu" if INTERPRETED else "cuda"


@pytest.mark.parametrize("weighted", [True, False], ids=["weighted", "plain"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "chosen", "columns"), [(1, 1, 7), (5, 2, 16), (9, 8, 1300), (0, 2, 16)])
def test_the_sum_over_a_tokens_experts_is_that_in_float64(tokens, chosen, columns, dtype, weighted):
    from qerl.model.kernels import sum_of_rows

    shares = torch.rand(tokens, chosen, device=DEVICE)
    routed = sort_by_expert(torch.rand(tokens, 16, device=DEVICE).topk(chosen).indices, shares, 16)
    rows = torch.randn(tokens * chosen, columns, device=DEVICE).to(dtype)
    found = sum_of_rows(rows, routed.row, shares if weighted else None)
    factors = shares.double() if weighted else torch.ones_like(shares).double()
    expected = (rows.double()[routed.row] * factors[..., None]).sum(1)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-5)
