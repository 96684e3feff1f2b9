"""How far nets scale by replicas: by what they compute for each parameter, so AlexNet and VGG stop first."""

from types import ModuleType

import pytest
import recipe

PARAMETERS = {"AlexNet": 60_965_224, "VGG-16": 138_357_544, "Inception v1": 6_998_552}
REPLICAS = (1, 2, 4, 16)


@pytest.fixture(scope="module")
def scaling() -> ModuleType:
    return recipe.load("scaling.py")


@pytest.mark.long
def test_alexnet_and_vgg_fall_under_one_half_first(scaling: ModuleType) -> None:
    fell: dict[str, list[int | None]] = {}
    for name, task in scaling.NETS.items():
        one = scaling.net(task)
        assert one.parameters == PARAMETERS[name]
        for network in scaling.NETWORKS.values():
            found = scaling.efficiencies(one, network, REPLICAS)
            assert found == sorted(found, reverse=True)
            # an update touches two vectors; two replicas send each other half a vector twice, beside a step or after it
            alone = one.step + 2 * 4 * one.parameters / scaling.Handling().memory
            sends = 4 * one.parameters / network.bandwidth
            assert 0.95 * alone / (alone + sends) < found[1] < 1.02 * alone / max(alone, sends)
            fell.setdefault(name, []).append(scaling.falls(found, REPLICAS))
    assert fell == {"AlexNet": [2, 4], "VGG-16": [2, None], "Inception v1": [4, None]}


@pytest.mark.long
def test_a_network_that_costs_nothing_wastes_nothing(scaling: ModuleType) -> None:
    free = scaling.NetworkModel(latency=1e-9, bandwidth=1e15)
    assert scaling.efficiencies(scaling.net("inception-v1"), free, (4,)) == pytest.approx([1.0], abs=0.02)
