"""What vLLM loads into its own processes."""

from importlib.metadata import entry_points

import pytest

from penstock.workers.engines.vllm import plugin


@pytest.mark.parametrize(
    ("named", "loaded"),
    [("", "penstock"), ("lora_filesystem_resolver", "lora_filesystem_resolver,penstock"), ("penstock,a", "penstock,a")],
)
def test_a_users_list_of_plugins_does_not_leave_this_one_out(named: str, loaded: str) -> None:
    assert plugin.variables({plugin.ALLOWED: named})[plugin.ALLOWED] == loaded


def test_without_such_a_list_vllm_loads_all_plugins_as_before() -> None:
    assert plugin.variables({}) == {plugin.ACTIVE: "1"}


def test_the_plugin_is_known_to_vllm_by_its_name() -> None:
    values = {each.name: each.value for each in entry_points(group="vllm.general_plugins")}
    assert values[plugin.NAME] == f"{plugin.__name__}:register"
