"""DistBelief's figure 3, by splitting its nets: dense ones stop paying at 8 machines, locally connected ones go on."""

from itertools import pairwise
from types import ModuleType

import pytest
import recipe
import torch

# bytes that a machine is sent forward: of the inputs of each layer but the first, what others have computed
SENT = {8: 4 * 100 * 7 / 8 * (4 * 2560), 16: 4 * 100 * 15 / 16 * (4 * 2560)}


@pytest.fixture(scope="module")
def figure() -> ModuleType:
    return recipe.load("figure3.py")


def test_the_nets_are_as_large_as_the_paper_says(figure: ModuleType) -> None:
    weights = 440 * 2560 + 3 * 2560**2 + 2560 * 8192
    assert figure.parameters(figure.speech()) == weights + 4 * 2560 + 8192
    found = [figure.parameters(figure.image(maps)) / 1e6 for maps in (8, 16, 36)]
    assert found == pytest.approx([108, 370, 1700], rel=0.005)
    assert figure.parameters(figure.image(36), 4) == figure.parameters(figure.image(36))


def test_dense_nets_are_fastest_on_8_machines(figure: ModuleType) -> None:
    net = figure.speech()
    found = dict(zip((1, 2, 4, 8, 16), figure.speedups(net, (1, 2, 4, 8, 16)), strict=True))
    assert found[1] == 1
    assert max(found, key=lambda count: found[count]) == 8
    assert found[8] == pytest.approx(2.2, abs=0.1)
    for count, size in SENT.items():  # no machine can have what it needs, forward and back, any sooner
        assert figure.seconds(net, count) > figure.seconds(net, 1) / count + 2 * size / figure.NETWORK.bandwidth


def test_a_net_of_tiles_is_the_whole_one(figure: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Maps of 2x3 tiles are those of one, with the same filters at the same places; and so is the loss."""
    monkeypatch.setattr(figure, "CLASSES", 13)
    whole, parts = figure.Images(2, 1, 1), figure.Images(2, 2, 3)
    sides = [side for side in (91, 82, 73) for _ in range(3)]
    for layer, side in enumerate(sides):
        for tile, box in zip(parts.tiles, figure.tiles(side, 2, 3), strict=True):
            for name, part in tile.layers[layer].named_parameters():
                one = dict(whole.tiles[0].layers[layer].named_parameters())[name]
                part.data = one.data[slice(*box.rows), slice(*box.columns)].clone()
    images = torch.randn(2, *figure.IMAGE)
    with torch.no_grad():
        [one], many = whole.maps(images), parts.maps(images)
        assert torch.equal(torch.cat([torch.cat(many[:3], 3), torch.cat(many[3:], 3)], 2), one)
        for net in (whole, parts):
            for tile in net.tiles:
                torch.nn.init.constant_(tile.out.weight, 0.01)
                torch.nn.init.constant_(tile.out.bias, 0.1)
        labels = torch.tensor([3, 12])
        torch.testing.assert_close(parts((images, labels)), whole((images, labels)))
    assert [box.columns for box in figure.tiles(73, 1, 3)] == list(pairwise((0, 25, 49, 73)))


def test_scores_in_parts_add_up_to_the_loss(figure: ModuleType) -> None:
    """The softmax's is that of torch, summed where its classes are."""
    scores, labels = torch.randn(4, 6, dtype=torch.float64), torch.tensor([0, 2, 3, 5])
    parts = figure.Scored(torch.exp)(scores[:, :3], labels) + figure.Scored(torch.exp, first=3)(scores[:, 3:], labels)
    torch.testing.assert_close(figure.speech().loss(parts, None), torch.nn.functional.cross_entropy(scores, labels))


@pytest.mark.long
def test_locally_connected_nets_go_on_and_the_larger_the_further(figure: ModuleType) -> None:
    dense, small, large = (
        figure.speedups(net, (9,))[0] for net in (figure.speech(), figure.image(8), figure.image(36))
    )
    assert 1 < small < large < 9
    assert large > 1.5 * dense
