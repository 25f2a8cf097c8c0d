"""Stub clients without a server: the weights are one number, and every call is recorded."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tinkex.client.config import Config
from tinkex.client.future import APIFuture
from tinkex.errors import NotFoundError
from tinkex.testing import ToyTokenizer
from tinkex.types import AdamParams, Datum, ForwardBackwardOutput, TensorData


def resolved(value: Any) -> APIFuture[Any]:
    """Return a future that has its value already."""
    future: APIFuture[Any] = APIFuture()
    future.settle(value)
    return future


class Waited(APIFuture[Any]):
    """A finished future that records when it is waited for."""

    def __init__(self, value: Any, note: Callable[[], None]) -> None:
        super().__init__()
        self._note = note
        self.set_result(value)

    def result(self, timeout: float | None = None) -> Any:
        self._note()
        return super().result(timeout)


class StubTraining:
    """Every step changes one number by learning rate and tokens."""

    def __init__(self, service: StubService, weights: float) -> None:
        self.service, self.weights, self.gradient = service, weights, 0.0

    def _future(self, name: str, value: Any) -> Waited:
        log = self.service.log
        log.append(name)
        return Waited(value, lambda: log.append(f"wait {name}"))

    def get_info(self) -> Any:
        return resolved(SimpleNamespace(model_data=SimpleNamespace(model_name="m")))

    def get_tokenizer(self) -> Any:
        return ToyTokenizer()

    def forward(self, data: list[Datum], loss: str) -> Waited:
        self.service.evaluated.append(self.weights)
        return self._future("forward", self._output(data))

    def forward_backward(self, data: list[Datum], loss: str) -> Waited:
        self.service.fail_if_due()
        self.gradient = sum(sum(datum.model_input.to_ints()) for datum in data)
        return self._future("pass", self._output(data))

    def _output(self, data: list[Datum]) -> ForwardBackwardOutput:
        scored = [
            {"logprobs": TensorData.from_list([-self.weights] * d.model_input.length, None, "x")}
            for d in data
        ]
        return ForwardBackwardOutput("ArrayRecord", scored, {"loss:sum": self.weights})

    def optim_step(self, adam: AdamParams) -> Waited:
        self.service.rates.append(adam.learning_rate)
        self.weights = (self.weights + adam.learning_rate * self.gradient) % 1000.0
        return self._future("step", None)

    def save_state(self, name: str, overwrite: bool = False) -> Waited:
        path = f"tinker://run/weights/{name}"
        self.service.saved[path] = self.weights
        return self._future(f"save {name}", SimpleNamespace(path=path))

    def save_weights_for_sampler(self, name: str) -> Waited:
        path = f"tinker://run/sampler_weights/{name}"
        return self._future(f"export {name}", SimpleNamespace(path=path))

    def create_sampling_client(self, path: str) -> Any:
        def sample(prompt: Any, num_samples: int, params: Any) -> Waited:
            self.service.prompts.append(prompt.to_ints())
            answer = SimpleNamespace(tokens=list(b"done"))
            return self._future("sample", SimpleNamespace(sequences=[answer]))

        return resolved(SimpleNamespace(sample=sample))


class StubService:
    """A stub of the service client."""

    def __init__(self, max_context: int | None = None) -> None:
        self.config = Config(base_url="http://stub")
        self.log: list[str] = []
        self.saved: dict[str, float] = {}
        self.rates: list[float] = []
        self.evaluated: list[float] = []
        self.prompts: list[list[int]] = []
        self.opened: list[Any] = []
        self.passes_left: int | None = None
        self._max_context = max_context

    def fail_if_due(self) -> None:
        """Raise KeyboardInterrupt after the configured number of passes."""
        if self.passes_left is not None:
            self.passes_left -= 1
            if self.passes_left < 0:
                raise KeyboardInterrupt

    def get_server_capabilities(self) -> Any:
        model = SimpleNamespace(model_name="m", max_context_length=self._max_context)
        return resolved(SimpleNamespace(supported_models=[model]))

    def create_lora_training_client(
        self, base_model: str, **settings: Any
    ) -> APIFuture[StubTraining]:
        self.opened.append((base_model, settings))
        return resolved(StubTraining(self, 1.0))

    def create_training_client_from_state(
        self, path: str, **settings: Any
    ) -> APIFuture[StubTraining]:
        self.opened.append(("from", path))
        return resolved(StubTraining(self, 50.0))

    def create_training_client_from_state_with_optimizer(
        self, path: str, user_metadata: dict[str, str] | None = None
    ) -> APIFuture[StubTraining]:
        self.opened.append(("resumed", path))
        if path not in self.saved:
            raise NotFoundError("gone", response=None, body=None)
        return resolved(StubTraining(self, self.saved[path]))
