import pytest
import torch
from torch import nn

import models
from spillway.model.units import find_units
from spillway.spec.errors import UsageError


def members(model: nn.Module) -> list[list[str]]:
    return [[path for path, _ in unit.members] for unit in find_units(model)]


def test_blocks_are_units_and_so_is_everything_else() -> None:
    expected = [["model.embed_tokens"], *([f"model.layers.{i}"] for i in range(3)), ["model.norm"], ["lm_head"]]
    assert members(models.llama()) == expected


def test_tied_modules_are_one_unit_with_one_copy() -> None:
    units = find_units(models.gpt2())
    assert [path for path, _ in units[0].members] == ["transformer.wte", "lm_head"]
    assert [place.name for place in units[0].layout.places] == ["transformer.wte.weight"]


def test_encoder_and_decoder_blocks_are_units() -> None:
    found = members(models.t5())
    assert ["encoder.block.0"] in found and ["decoder.block.1"] in found
    assert any("lm_head" in group or "decoder.embed_tokens" in group for group in found)


def test_parameters_above_units_are_a_unit_of_their_own() -> None:
    units = find_units(models.two_lists())
    assert units[-1].members == () and [place.name for place in units[-1].layout.places] == ["scale"]
    assert sum(unit.name.startswith(("first", "second", "unused")) for unit in units) == 6


def test_every_parameter_is_in_exactly_one_unit() -> None:
    for make in models.MODELS.values():
        model = make()
        names = [place.name for unit in find_units(model) for place in unit.layout.places]
        assert sorted(names) == sorted(name for name, _ in model.named_parameters())


def test_a_model_without_lists_is_one_unit_and_sequences_of_blocks_are_cut() -> None:
    assert members(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))) == [[""]]
    blocks = nn.Sequential(*(models.Block(4) for _ in range(3)))
    assert members(blocks) == [["0"], ["1"], ["2"]]


def test_what_cannot_be_trained_is_named() -> None:
    with pytest.raises(UsageError, match="no parameters"):
        find_units(nn.ReLU())
    with pytest.raises(UsageError, match=r"torch.float64; train in torch.bfloat16, torch.float16 or torch.float32"):
        find_units(nn.Linear(2, 2).double())
    mixed = nn.Linear(2, 2)
    mixed.bias.data = mixed.bias.data.to(torch.bfloat16)
    with pytest.raises(UsageError, match="mix torch.bfloat16 and torch.float32"):
        find_units(mixed)


def test_frozen_parameters_of_another_dtype_are_fine_and_lie_behind_the_trained_ones() -> None:
    layer = nn.Linear(3, 3)
    layer.bias.data = layer.bias.data.half()
    layer.bias.requires_grad_(False)
    (unit,) = find_units(layer)
    weight, bias = (next(p for p in unit.layout.places if p.name == name) for name in ("weight", "bias"))
    assert weight.trainable and not bias.trainable
    assert unit.layout.byte_range(bias)[0] % 4096 == 0
