"""FLOPs of products that PyTorch's counter leaves out."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import flex_attention

from spillway.model.operators import OperatorTally


def test_each_row_of_a_grouped_product_is_counted_once() -> None:
    with FakeTensorMode(), OperatorTally() as counted:
        rows, experts = torch.empty(48, 32, dtype=torch.bfloat16), torch.empty(4, 32, 64, dtype=torch.bfloat16)
        ends = torch.tensor([8, 16, 32, 48], dtype=torch.int32)
        torch.ops.aten._grouped_mm(rows, experts, ends)
        assert counted.flops == 2 * 48 * 32 * 64
        torch.ops.aten._grouped_mm(rows.t(), torch.empty(48, 64, dtype=torch.bfloat16), ends)
        assert counted.flops == 2 * 2 * 48 * 32 * 64


def test_operators_that_take_functions_are_counted_and_nothing_beside_them_is_kept() -> None:
    with torch.compiler.set_stance("force_eager"), FakeTensorMode(), OperatorTally({}) as tally:
        query = torch.empty(1, 2, 128, 16)
        torch.mm(flex_attention(query, query, query).reshape(-1, 16), torch.empty(16, 16))
    products = 2 * 256 * 16 * 16
    assert tally.flops == 2 * 2 * 2 * 128 * 128 * 16 + products
    assert {entry.name: (entry.flops, entry.cheap) for entry in tally.classes()}["matmul 16"] == (products, True)
