"""FLOPs of products that PyTorch's counter leaves out."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from spillway.model.operators import OperatorTally


def test_each_row_of_a_grouped_product_is_counted_once() -> None:
    with FakeTensorMode(), OperatorTally() as counted:
        rows, experts = torch.empty(48, 32, dtype=torch.bfloat16), torch.empty(4, 32, 64, dtype=torch.bfloat16)
        ends = torch.tensor([8, 16, 32, 48], dtype=torch.int32)
        torch.ops.aten._grouped_mm(rows, experts, ends)
        assert counted.flops == 2 * 48 * 32 * 64
        torch.ops.aten._grouped_mm(rows.t(), torch.empty(48, 64, dtype=torch.bfloat16), ends)
        assert counted.flops == 2 * 2 * 48 * 32 * 64
