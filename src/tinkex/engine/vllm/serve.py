"""Serves samples with vLLM over a socket. Run by the Python of vLLM; imports nothing of tinkex.

python serve.py DESCRIPTOR      a connected socket; ends when standard input is closed

A frame is a length of four bytes and a msgpack map. The first frame has the arguments of the engine
and the directory of an adapter without weights; the answer is "ready", or "failed" with the reason.
Then each "sample" is answered by "done" or "declined", in any order, and "cancel" ends one without
an answer.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import vllm
from vllm import SamplingParams, TokensPrompt
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

Frame = dict[str, Any]
LENGTH_BYTES = 4
#: The id of the adapter without weights; other adapters have higher ones.
NO_ADAPTER_ID = 1
#: Interval of looking whether the engine's process is alive.
WATCH_SECONDS = 1.0


def end_all() -> None:
    """End this process and the engine's processes at once."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)


def end_with_parent() -> None:
    """End all when standard input is closed, also while a model is loading."""
    while os.read(0, 1):
        pass
    end_all()


class SampleServer:
    """Runs the samples of one connection."""

    def __init__(self, engine: AsyncLLM, writer: asyncio.StreamWriter, no_adapter: str) -> None:
        self._engine = engine
        # The CPU kernels of vLLM 0.32 apply the adapter of the last slot to requests without one.
        self._default_adapter = (
            {"id": NO_ADAPTER_ID, "path": no_adapter} if current_platform.is_cpu() else None
        )
        self._writer = writer
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def handle(self, frame: Frame) -> None:
        """Start or cancel a sample."""
        job_id = frame["id"]
        if frame["type"] == "cancel":
            task = self._tasks.pop(job_id, None)
            if task is not None:
                task.cancel()
            return
        self._tasks[job_id] = asyncio.create_task(self._run(job_id, frame))

    async def watch(self) -> None:
        """End this process when the engine's process is gone."""
        while not self._engine.errored:
            await asyncio.sleep(WATCH_SECONDS)
        end_all()

    async def _run(self, job_id: str, frame: Frame) -> None:
        try:
            answer = await self._sample(job_id, frame)
        except EngineDeadError:
            end_all()
            return
        except Exception as error:  # noqa: BLE001 - one failed request must not end the others
            answer = {"type": "declined", "error": describe(error)}
        self._tasks.pop(job_id, None)
        write_frame(self._writer, {"id": job_id, **answer})
        await self._writer.drain()

    async def _sample(self, job_id: str, frame: Frame) -> Frame:
        params = SamplingParams(
            **frame["params"],
            # The stop tokens of the request include the EOS tokens, if it wants them.
            ignore_eos=True,
            skip_special_tokens=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = TokensPrompt(prompt_token_ids=frame["prompt"], cache_salt=frame["salt"])
        adapter = await self._load_adapter(frame["adapter"] or self._default_adapter)
        final = None
        async for output in self._engine.generate(prompt, params, job_id, lora_request=adapter):
            final = output
        assert final is not None
        return encode_output(final, frame)

    async def _load_adapter(self, adapter: Frame | None) -> LoRARequest | None:
        """Load an adapter, unless it is loaded; an error in the running engine would end it."""
        if adapter is None:
            return None
        number, path = adapter["id"], adapter["path"]
        # Cached prompts are looked up by the name of the adapter.
        request = LoRARequest(lora_name=str(number), lora_int_id=number, lora_path=path)
        await self._engine.add_lora(request)
        return request


# --- answers -------------------------------------------------------------------------------------
def encode_output(output: RequestOutput, frame: Frame) -> Frame:
    """The answer to a sample: arrays as bytes, int32 and float32."""
    num_topk = frame["params"]["logprobs"]
    num_prompt_topk = frame["params"]["prompt_logprobs"]
    answer: Frame = {
        "type": "done",
        "sequences": [
            {
                "tokens": to_bytes(sequence.token_ids, np.int32),
                "logprobs": encode_chosen(sequence.token_ids, sequence.logprobs),
                "topk": encode_topk(sequence.logprobs, num_topk),
                "stop_reason": sequence.finish_reason,
            }
            for sequence in output.outputs
        ],
        "num_cached_tokens": output.num_cached_tokens or 0,
    }
    if num_prompt_topk is not None:
        # The first token has no context.
        rows = [row or {} for row in output.prompt_logprobs or []]
        answer["prompt_logprobs"] = encode_chosen(frame["prompt"], rows)
        answer["prompt_topk"] = encode_topk(rows, num_prompt_topk)
    return answer


def encode_chosen(tokens: Any, rows: Any) -> bytes:
    """The log-probability of each token; NaN without one."""
    values = [
        row[token].logprob if token in row else float("nan")
        for token, row in zip(tokens, rows, strict=True)
    ]
    return to_bytes(values, np.float32)


def encode_topk(rows: Any, k: int) -> list[bytes] | None:
    """The most likely tokens of each position and their log-probabilities, padded with -1."""
    if not k:
        return None
    ids = np.full((len(rows), k), -1, dtype=np.int32)
    values = np.full((len(rows), k), float("-inf"), dtype=np.float32)
    for position, row in enumerate(rows):
        # A chosen token that is not among the most likely ones comes in addition.
        best = sorted(row.items(), key=lambda item: -item[1].logprob)[:k]
        for column, (token, score) in enumerate(best):
            ids[position, column], values[position, column] = token, score.logprob
    return [ids.tobytes(), values.tobytes()]


def to_bytes(values: Any, dtype: type) -> bytes:
    """The values as an array's bytes."""
    return np.asarray(values, dtype=dtype).tobytes()


# --- frames --------------------------------------------------------------------------------------
async def read_frame(reader: asyncio.StreamReader) -> Frame:
    """Read the next frame; raises IncompleteReadError at the end."""
    length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
    frame: Frame = msgspec.msgpack.decode(await reader.readexactly(length))
    return frame


def write_frame(writer: asyncio.StreamWriter, frame: Frame) -> None:
    """Write a frame."""
    body = msgspec.msgpack.encode(frame)
    writer.write(len(body).to_bytes(LENGTH_BYTES, "big") + body)


def describe(error: Exception) -> str:
    """The first line of an error."""
    return str(error).partition("\n")[0] or type(error).__name__


def describe_engine(engine: AsyncLLM) -> Frame:
    """The properties of the engine that the other side must know."""
    config = engine.vllm_config
    return {
        "type": "ready",
        "version": vllm.__version__,
        "max_context_tokens": config.model_config.max_model_len,
        "vocab_size": config.model_config.get_vocab_size(),
        "max_lora_rank": config.lora_config.max_lora_rank,
        "eos_tokens": find_eos_tokens(engine),
    }


def find_eos_tokens(engine: AsyncLLM) -> list[int]:
    """The EOS tokens of generation config, model config and tokenizer."""
    config = engine.vllm_config.model_config
    path = Path(config.model) / "generation_config.json"
    generation = msgspec.json.decode(path.read_bytes()) if path.is_file() else {}
    sources = [
        generation.get("eos_token_id"),
        getattr(config.hf_text_config, "eos_token_id", None),
        getattr(engine.renderer.tokenizer, "eos_token_id", None),
    ]
    lists = [ids if isinstance(ids, list) else [ids] for ids in sources]
    return sorted({token for ids in lists for token in ids if isinstance(token, int)})


async def serve(connection: socket.socket) -> None:
    """Load the engine and serve until the connection is closed."""
    reader, writer = await asyncio.open_connection(sock=connection)
    arguments = await read_frame(reader)
    try:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments["engine"]))
        ready = describe_engine(engine)
    except Exception as error:
        write_frame(writer, {"type": "failed", "error": describe(error)})
        await writer.drain()
        raise
    server = SampleServer(engine, writer, arguments["no_adapter"])
    watch = asyncio.create_task(server.watch())
    write_frame(writer, ready)
    try:
        while True:
            server.handle(await read_frame(reader))
    except asyncio.IncompleteReadError:
        watch.cancel()


def main() -> None:
    """Serve the socket that was inherited."""
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    threading.Thread(target=end_with_parent, daemon=True).start()
    try:
        asyncio.run(serve(socket.socket(fileno=descriptor)))
    except Exception:  # noqa: BLE001 - logged; the other side sees that this process ends
        traceback.print_exc()
    end_all()


if __name__ == "__main__":
    main()
