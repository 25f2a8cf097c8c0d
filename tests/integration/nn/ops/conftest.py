from __future__ import annotations

import pytest

from tinkex.nn.ops.library import load_kernels


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make torch run everything."""
    for module in ("autograd", "packed_matmul"):
        monkeypatch.setattr(f"tinkex.nn.ops.{module}.load_kernels", lambda: None)


@pytest.fixture(params=["kernel", "torch"])
def implementation(request: pytest.FixtureRequest) -> str:
    """Run a test with the kernels and again without them."""
    assert load_kernels() is not None, "tests need a C compiler; see scripts/system-packages.sh"
    if request.param == "torch":
        request.getfixturevalue("without_kernels")
    return str(request.param)
