"""Networks that nobody here wrote: families of timm, found from one example input."""

import pytest
import torch
from parts_kit import check_all
from timm_kit import load_timm

from gossamer.models import ModelError, discover

SMALL = {"num_classes": 5}
FAMILIES = {
    "resnet10t": SMALL | {"channels": (16, 32, 48, 64)},
    "regnety_002": SMALL | {"depth": 5, "wa": 70.0},  # grouped convolutions, squeeze and excitation
    "mobilenetv3_small_050": SMALL,  # depthwise convolutions
    "convnext_atto": SMALL | {"depths": (1, 1, 2, 1)},  # layer norm, layer scale
    "densenet121": SMALL | {"block_config": (2, 2, 2, 2)},  # concatenation of everything before
    "vit_tiny_patch16_224": SMALL | {"img_size": 32, "depth": 2},  # heads, class token, positions
}


@pytest.mark.parametrize("name", FAMILIES)
def test_timm_families(name):
    torch.manual_seed(0)
    module = load_timm().create_model(name, **FAMILIES[name])
    check_all(module, torch.randn(1, 3, 32, 32))


def test_heads_that_talk_to_each_other_are_found_out():
    """CaiT mixes its heads, so they are not interchangeable: the proof names them."""
    torch.manual_seed(0)
    module = load_timm().create_model("cait_xxs24_224", img_size=32, depth=1, num_classes=5)
    with pytest.raises(
        ModelError, match=r"part 'blocks.0.attn.heads' \(4 cells\) was traced wrongly"
    ):
        discover(module, torch.randn(1, 3, 32, 32))


def test_tokens_that_are_mixed_are_refused_by_name():
    torch.manual_seed(0)
    module = load_timm().create_model("mixer_s32_224", img_size=64, num_classes=5)
    with pytest.raises(ModelError, match=r"reach 'blocks.0.mlp_tokens.fc1.in', which has only 4"):
        discover(module, torch.randn(1, 3, 64, 64))
