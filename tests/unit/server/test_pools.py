from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tinkex.errors import ConfigError
from tinkex.server.config import ServerConfig
from tinkex.server.config_sources import decode_config, encode_config, read_config
from tinkex.server.pools import PoolConfig, make_group_id, pool_of_group

POSTGRES = "postgresql://lab@db/lab"


def test_pools_are_read_from_the_file(tmp_path: Path) -> None:
    (tmp_path / "server.toml").write_text(
        f'cluster = "ray"\nstore = "{POSTGRES}"\n'
        '[[pools]]\nname = "train"\nmodels = ["m=/m"]\nresources = {GPU = 1, CPU = 8}\n'
        "min = 2\nmax = 16\n"
    )
    config = read_config({"home": tmp_path}, None, {})
    pool = PoolConfig(
        name="train", models=("m=/m",), resources={"GPU": 1.0, "CPU": 8.0}, min=2, max=16
    )
    assert config.worker_pools == (pool,)
    assert decode_config(encode_config(config)) == config


def test_pools_are_read_from_a_variable(tmp_path: Path) -> None:
    variables = {
        "TINKEX_CLUSTER": "ray",
        "TINKEX_STORE": POSTGRES,
        "TINKEX_POOLS": '[{"name": "a", "min": 3}]',
    }
    config = read_config({"home": tmp_path}, None, variables)
    assert config.worker_pools == (PoolConfig(name="a", min=3),)


def test_flags_alone_make_one_pool(tmp_path: Path) -> None:
    config = ServerConfig(
        home=tmp_path, cluster="ray", store=POSTGRES, workers=2, max_workers=5, device="cuda"
    )
    (pool,) = config.worker_pools
    assert (pool.name, pool.min, pool.largest) == ("default", 2, 5)
    assert pool.resources == {"CPU": 1.0, "GPU": 1.0}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"cluster": "slurm"}, "cluster is 'slurm'; expected 'ray' or nothing"),
        ({"cluster": "ray", "store": ""}, "need a PostgreSQL store, but the store is SQLite"),
        ({"max_workers": 3}, "pools and max_workers need cluster = 'ray'"),
        ({"cluster": "ray", "worker_on_demand": True}, "worker_on_demand cannot be combined"),
        ({"cluster": "ray", "workers": 0}, "min is 0"),
        (
            {"cluster": "ray", "pools": (PoolConfig(name="a"), PoolConfig(name="a"))},
            "two pools are called 'a'",
        ),
    ],
)
def test_bad_cluster_settings_are_refused(
    tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        _ = ServerConfig(home=tmp_path, **{"store": POSTGRES, **values}).worker_pools


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "Train"}, "pool name 'Train' is invalid"),
        ({"ranks": 3}, "ranks is 3; expected 1, 2, 4, 8"),
        ({"min": 3, "max": 2}, "min is 3 and max is 2"),
        ({"resources": {"CPU": 0.0}}, "resource 'CPU' is 0.0"),
    ],
)
def test_bad_pools_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PoolConfig(**{"name": "a", **values})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('[[pools]]\nname = "a"\nmax_size = 3\n', "unknown field `max_size`"),
        ('[[pools]]\nname = "a"\nranks = 3\n', "pool 'a': ranks is 3"),
        ('pools = "a"\n', "Expected `array`"),
    ],
)
def test_bad_pools_in_a_file_are_one_sentence(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "server.toml").write_text(line)
    with pytest.raises(ConfigError, match=message):
        read_config({"home": tmp_path}, None, {})


def test_group_ids_name_their_pool() -> None:
    assert pool_of_group(make_group_id("train-8b", "0a1b")) == "train-8b"
    assert pool_of_group("myhost-0a1b") is None
    assert pool_of_group("") is None
